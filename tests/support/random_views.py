"""Random losses that use several views of one parameter, and the gradients of a loop.

A view is a chain of operations that move elements: slices, flips, transposes, reshapes and so on.
It meets data in one of several ways: itself, rounded, scaled, in a checkpoint, in a scan, under
`jax.vmap`, in a sum with other parameters, in a weight norm. `draw` makes the same loss of the same
seed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

B, T, D, ROWS = 4, 3, 4, 6
"""Examples, positions, width, and rows of a table."""


class Drawn(NamedTuple):
    """A loss ``(params, x, tokens) -> losses``.

    Attributes:
      text: The uses of the parameter.
      loss: The loss.
      params: Its parameters, of which ``w`` has several uses.
      batch: Data and tokens.
      is_rounded: Whether a view is rounded to bfloat16.
    """

    text: str
    loss: Callable[..., Any]
    params: dict[str, Any]
    batch: tuple[Any, Any]
    is_rounded: bool


View = tuple[str, Callable[[Any], Any]]


def draw(seed: int) -> Drawn:
    """Draw a loss of two or three uses of views."""
    rng = np.random.default_rng(seed)
    shape = [(4, 24), (24, 4), (6, 4, 4), (8, 12), (96,), (4, 6, 4)][rng.integers(6)]
    uses = [_draw_use(rng, shape) for _ in range(rng.integers(2, 4))]
    combine = ["sum", "product", "chain"][rng.integers(3)]

    def loss(params, x, tokens):
        h = x
        total = jnp.zeros_like(x)
        for _, use, _ in uses:
            y = use(params, h, tokens)
            h = jnp.tanh(y) if combine == "chain" else x
            total = total * (1 + jnp.tanh(y)) + y if combine == "product" else total + y
        return (jnp.sin(total) * total).sum((1, 2))

    sizes = {"w": shape, "a": (D, 2), "b": (2, D), "g": (D,), "v": (D, D)}
    params = {name: _normal(rng, *size) for name, size in sizes.items()}
    batch = _normal(rng, B, T, D), jnp.asarray(rng.integers(0, ROWS, (B, T)), jnp.int32)
    text = f" {combine} ".join(text for text, _, _ in uses)
    return Drawn(text, loss, params, batch, any(rounds for _, _, rounds in uses))


def gradients_of_a_loop(drawn: Drawn) -> list[dict[str, Any]]:
    """Gradients of batches that hold one example, by `jax.grad`, in NumPy."""
    gradient = jax.jit(jax.grad(lambda params, *one: drawn.loss(params, *one)[0]))
    batch = [np.asarray(a) for a in drawn.batch]
    ones = ([a[b : b + 1] for a in batch] for b in range(B))
    return [jax.device_get(gradient(drawn.params, *one)) for one in ones]


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape) / 2, jnp.float32)


def _draw_use(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[str, Any, bool]:
    """Draw a view and the way in which it meets data; also whether it is rounded."""
    kind = ["matrix", "matrix", "transposed", "bias", "scale", "table", "stack"][rng.integers(7)]
    target = {"bias": (D,), "scale": (D,), "table": (ROWS, D), "stack": (2, D, D)}
    target = target.get(kind, (D, D))
    of_view, view = _draw_view(rng, shape, target)
    names = ["direct", "direct", "rounded", "scaled", "checkpoint", "sum", "norm", "two", "jit"]
    way = names[rng.integers(len(names))]
    factor = float(rng.choice([-1.0, 0.5, 3.0]))
    of_other, other = _draw_view(rng, shape, target)
    is_matrix = kind in ("matrix", "transposed")
    ways = {
        "direct": lambda p, v: v,
        "rounded": lambda p, v: v.astype(jnp.bfloat16).astype(jnp.float32),
        "scaled": lambda p, v: factor * v,
        "checkpoint": lambda p, v: jax.checkpoint(lambda v: v * 1.0)(v),
        "jit": lambda p, v: jax.jit(jnp.negative)(v),
        "sum": lambda p, v: (
            v + (p["a"] @ p["b"] if is_matrix else jnp.broadcast_to(p["g"], v.shape))
        ),
        "norm": lambda p, v: v / jnp.sqrt(1 + jnp.square(v).sum(-1, keepdims=True)),
        "two": lambda p, v: v + factor * other(p["w"]),
    }

    def value(p: Any) -> Any:
        return ways[way](p, view(p["w"]))

    meets = ["plain", "plain", "checkpoint", "vmap", "scan"][rng.integers(5)]

    meet = {
        "bias": lambda v, h, tokens: h + v[None, None],
        "scale": lambda v, h, tokens: h * v[None, None],
        "table": lambda v, h, tokens: h + v[tokens],
        "stack": lambda v, h, tokens: jax.lax.scan(lambda h, m: (jnp.tanh(h @ m), None), h, v)[0],
        "matrix": lambda v, h, tokens: h @ v,
        "transposed": lambda v, h, tokens: h @ v.T,
    }[kind]

    def use(p: Any, h: Any, tokens: Any) -> Any:
        if meets == "checkpoint":
            return jax.checkpoint(lambda p: meet(value(p), h, tokens))(p)
        if meets == "vmap":
            one = jax.vmap(lambda p, h, t: meet(value(p), h[None], t[None])[0], (None, 0, 0))
            return one(p, h, tokens)
        if meets == "scan":

            def step(h: Any, _: Any) -> Any:
                return jnp.tanh(meet(value(p), h, tokens)), None

            return jax.lax.scan(step, h, None, length=2)[0]
        return meet(value(p), h, tokens)

    detail = f" with {factor} of {of_other}" if way == "two" else ""
    return f"[{of_view} {way}{detail} as {kind}, {meets}]", use, way == "rounded"


def _draw_view(rng: np.random.Generator, shape: tuple[int, ...], target: tuple[int, ...]) -> View:
    """Draw operations that lead from one shape to the other."""
    steps: list[View] = []
    while len(steps) < rng.integers(0, 4):
        text, step = _draw_step(rng, shape)
        after = jax.eval_shape(step, jax.ShapeDtypeStruct(shape, jnp.float32)).shape
        if math.prod(after) >= math.prod(target):
            steps.append((text, step))
            shape = after
    size, length = math.prod(target), math.prod(shape)
    stride = int(rng.integers(1, max(1, min(3, length // size)) + 1))
    start = int(rng.integers(0, length - stride * (size - 1)))
    stop = start + stride * (size - 1) + 1
    if len(target) == 2 and rng.integers(2):
        last: View = (
            f".ravel[{start}:{stop}:{stride}].reshape.T",
            lambda a: a.ravel()[start:stop:stride].reshape(target[::-1]).T,
        )
    else:
        last = (
            f".ravel[{start}:{stop}:{stride}].reshape",
            lambda a: a.ravel()[start:stop:stride].reshape(target),
        )
    if len(shape) == len(target) and all(n >= m for n, m in zip(shape, target, strict=True)):
        slices = tuple(
            slice(k := int(rng.integers(0, n - m + 1)), k + m)
            for n, m in zip(shape, target, strict=True)
        )
        bounds = ", ".join(f"{s.start}:{s.stop}" for s in slices)
        last = (f"[{bounds}]", lambda a: a[slices])
    steps.append(last)

    def view(a: Any) -> Any:
        for _, step in steps:
            a = step(a)
        return a

    return "w" + "".join(text for text, _ in steps), view


def _draw_step(rng: np.random.Generator, shape: tuple[int, ...]) -> View:
    """Draw an operation that moves elements of an array of this shape."""
    axis, ndim = int(rng.integers(len(shape))), len(shape)
    n = shape[axis]
    before = (slice(None),) * axis
    name = [
        "slice", "slice", "stride", "flip", "transpose", "reshape", "reshape", "split", "roll",
        "take", "dynamic", "concatenate", "pad", "broadcast", "where", "expand",
    ][rng.integers(16)]  # fmt: skip
    if name in ("slice", "dynamic"):
        length = int(rng.integers(max(1, n // 2), n + 1))
        start = int(rng.integers(0, n - length + 1))
        if name == "slice":
            return f".{axis}[{start}:{start + length}]", lambda a: a[
                (*before, slice(start, start + length))
            ]
        return (
            f".dynamic{axis}[{start}:{start + length}]",
            lambda a: jax.lax.dynamic_slice_in_dim(a, jnp.arange(n)[start], length, axis),
        )
    if name == "stride":
        start, step = int(rng.integers(2)) % n, int(rng.integers(2, 4))
        return f".{axis}[{start}::{step}]", lambda a: a[(*before, slice(start, None, step))]
    if name == "flip":
        return f".flip{axis}", lambda a: jnp.flip(a, axis)
    if name == "transpose":
        order = tuple(map(int, rng.permutation(ndim)))
        return f".T{order}", lambda a: a.transpose(order)
    if name == "reshape":
        size = math.prod(shape)
        divisors = [k for k in range(1, size + 1) if size % k == 0]
        first = int(rng.choice(divisors))
        rest = [k for k in divisors if (size // first) % k == 0]
        second = int(rng.choice(rest))
        to = (first, second, size // first // second)[: int(rng.integers(2, 4))]
        to = (*to[:1], -1) if len(to) == 2 else to
        return f".reshape{to}", lambda a: a.reshape(to)
    if name == "split" and n % 2 == 0:
        half = int(rng.integers(2))
        return f".split{axis}[{half}]", lambda a: jnp.split(a, 2, axis)[half]
    if name == "roll":
        shift = int(rng.integers(1, n + 1))
        return f".roll{axis}({shift})", lambda a: jnp.roll(a, shift, axis)
    if name == "take":
        index = rng.integers(0, n, n)
        return f".take{axis}{index.tolist()}", lambda a: jnp.take(a, index, axis)
    if name == "concatenate":
        return (
            f".concatenate{axis}",
            lambda a: jnp.concatenate([jnp.flip(a, axis), a[(*before, slice(n // 2, None))]], axis),
        )
    if name == "pad":
        widths = [(1, 1) if i == axis else (0, 0) for i in range(ndim)]
        return f".pad{axis}", lambda a: jnp.pad(a, widths)
    if name == "broadcast":
        return f".broadcast{axis}", lambda a: jnp.broadcast_to(a[(*before, slice(1))], shape)
    if name == "where":
        mask = rng.integers(0, 2, shape) > 0
        return ".where", lambda a: jnp.where(mask, a, 0.25)
    return ".expand", lambda a: a[None] if ndim < 3 else a.ravel()
