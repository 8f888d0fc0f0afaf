"""Random losses for `benchmarks.random_steps`: a seed makes a loss, its arguments and an optimizer.

A loss is a list of blocks on rows, tokens, images or time steps, and a way to reduce their result
to a number. Some blocks keep the examples of a batch apart, others mix them. Sizes are chosen so
that a step takes a few megabytes.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.foreign_programs import Program, cross_entropy
from tests.support import random_programs

Block = Callable[[Any, Any, Array], Array]
"""``block(params, batch, x) -> x``."""

ACTIVATIONS = (jax.nn.gelu, jax.nn.relu, jnp.tanh, jax.nn.silu, jax.nn.softplus, jnp.sin)
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-3, 100), weight_decay=0.1),
    "lion": lambda: optax.lion(1e-4),
    "adafactor": lambda: optax.adafactor(1e-3),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


class Kind(NamedTuple):
    """Inputs of a program.

    Attributes:
      shapes: Sizes to choose from, by axis. The last axis has features.
      batch_axis: The axis that counts examples.
    """

    shapes: tuple[tuple[int, ...], ...]
    batch_axis: int = 0


KINDS = {
    "rows": Kind(((300, 509, 512, 768, 1024, 1999, 2048), (16, 24, 32))),
    "tokens": Kind(((8, 13, 16, 24), (24, 32, 48), (16, 24, 32))),
    "images": Kind(((8, 11, 16), (12, 16), (12, 16), (3, 8, 16))),
    "steps": Kind(((48, 64, 100, 128), (8, 13, 16), (16, 24)), 1),
}


class Make:
    """Makes parameters and leaves of the batch while a program is built."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.params: dict[str, Any] = {}
        self.batch: dict[str, Any] = {}
        self.numbers = itertools.count()

    def choose(self, *options: Any) -> Any:
        """One of the options."""
        return options[self.random.integers(len(options))]

    def chance(self, share: float) -> bool:
        """Whether something rare happens."""
        return bool(self.random.random() < share)

    def normal(self, *shape: int, scale: float = 1.0) -> Array:
        """Random numbers, in double precision if that is enabled."""
        return jnp.asarray(scale * self.random.standard_normal(shape), float)

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """A new parameter, or now and then one that exists."""
        same = [n for n, a in self.params.items() if jnp.shape(a) == shape]
        if same and self.chance(0.15):
            return str(self.choose(*same))
        scale = (np.prod(shape[:-1]) or 1) ** -0.5 if scale is None else scale
        name = f"w{next(self.numbers)}"
        self.params[name] = self.normal(*shape, scale=scale)
        return name

    def leaf(self, array: Any) -> str:
        """A leaf of the batch."""
        name = f"b{next(self.numbers)}"
        self.batch[name] = array
        return name

    def integers(self, most: int, *shape: int) -> str:
        """A leaf of integers below ``most``."""
        return self.leaf(jnp.asarray(self.random.integers(0, most, shape), jnp.int32))

    def key(self) -> Callable[[Any], Array]:
        """Reads a random key, of which the batch has one."""
        number = next(self.numbers)
        if "key" not in self.batch:
            self.batch["key"] = self.choose(jax.random.key(3), jnp.int32(3), jax.random.PRNGKey(3))

        def read(batch: Any) -> Array:
            given = batch["key"]
            if given.ndim:
                given = jax.random.wrap_key_data(given)
            elif not jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
                given = jax.random.key(given)
            return jax.random.fold_in(given, number)

        return read


class _Entry(NamedTuple):
    build: Callable[[Make, tuple[int, ...]], Block]
    kinds: tuple[str, ...]
    mixes: bool


BLOCKS: dict[str, _Entry] = {}
"""Blocks by name: ``build(make, shape) -> block``."""


def _block(kinds: str = "rows tokens images steps", mixes: bool = False) -> Any:
    def register(build: Any) -> Any:
        BLOCKS[build.__name__] = _Entry(build, tuple(kinds.split()), mixes)
        return build

    return register


def norm(x: Array, axis: int | tuple[int, ...] = -1) -> Array:
    """Zero mean and unit variance."""
    centered = x - x.mean(axis, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(axis, keepdims=True) + 1e-3)


# Blocks of features.


@_block()
def dense(make: Make, shape: tuple[int, ...]) -> Block:
    width = make.choose(16, 24, 32)
    w, b, f = make.weight(shape[-1], width), make.weight(width), make.choose(*ACTIVATIONS)
    return lambda p, batch, x: f(x @ p[w] + p[b])


@_block()
def residual(make: Make, shape: tuple[int, ...]) -> Block:
    up, down = make.weight(shape[-1], 48), make.weight(48, shape[-1])
    f = make.choose(*ACTIVATIONS)
    return lambda p, batch, x: x + f(norm(x) @ p[up]) @ p[down]


@_block()
def gated(make: Make, shape: tuple[int, ...]) -> Block:
    w, v = (make.weight(shape[-1], shape[-1]) for _ in range(2))
    return lambda p, batch, x: (x @ p[w]) * jax.nn.sigmoid(x @ lax.stop_gradient(p[v])) + x


@_block()
def scaled_norm(make: Make, shape: tuple[int, ...]) -> Block:
    g, b = make.weight(shape[-1]), make.weight(shape[-1])
    return lambda p, batch, x: norm(x) * (1 + p[g]) + p[b]


@_block()
def dropout(make: Make, shape: tuple[int, ...]) -> Block:
    key = make.key()

    def block(p: Any, batch: Any, x: Array) -> Array:
        return jnp.where(jax.random.bernoulli(key(batch), 0.9, x.shape), x / 0.9, 0)

    return block


@_block()
def noise(make: Make, shape: tuple[int, ...]) -> Block:
    key, draw = make.key(), make.choose(jax.random.normal, jax.random.uniform, jax.random.gumbel)
    return lambda p, batch, x: x + 0.1 * draw(key(batch), x.shape, x.dtype)


@_block()
def half_precision(make: Make, shape: tuple[int, ...]) -> Block:
    w, dtype = make.weight(shape[-1], shape[-1]), make.choose(jnp.bfloat16, jnp.float16)
    f = make.choose(*ACTIVATIONS)
    return lambda p, batch, x: x + f(x.astype(dtype) @ p[w].astype(dtype)).astype(x.dtype)


@_block()
def own_rule(make: Make, shape: tuple[int, ...]) -> Block:
    """Functions with a derivative rule: of the input or of the output, linear or not."""

    def same(x: Array) -> Array:
        return x

    def steps(x: Array) -> Array:
        return jnp.round(4 * x) / 4

    rules: dict[str, tuple[Any, Any, Any]] = {
        "input": (jnp.sin, lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),)),
        "output": (jnp.tanh, lambda x: (jnp.tanh(x),) * 2, lambda y, g: (g * (1 - y * y),)),
        "straight through": (steps, lambda x: (steps(x), None), lambda _, g: (g,)),
        "clip": (same, lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-4, 1e-4),)),
        "reversal": (same, lambda x: (x, None), lambda _, g: (-0.5 * g,)),
        "unit": (
            same,
            lambda x: (x, None),
            lambda _, g: (g / (1e-3 + jnp.abs(g).max(-1, keepdims=True)),),
        ),
    }
    f, forward, backward = make.choose(*rules.values())
    function = jax.custom_vjp(f)
    function.defvjp(forward, backward)
    return lambda p, batch, x: function(x)


@_block()
def product_with_own_rule(make: Make, shape: tuple[int, ...]) -> Block:
    w = make.weight(shape[-1], shape[-1])

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def product(x: Array, w: Array, scale: float) -> Array:
        return jnp.tanh(x @ w) * scale

    def forward(x: Array, w: Array, scale: float) -> Any:
        y = jnp.tanh(x @ w)
        return y * scale, (x, w, y)

    def backward(scale: float, saved: Any, g: Array) -> Any:
        x, w, y = saved
        g = scale * g * (1 - y * y)
        return g @ w.T, jnp.tensordot(x, g, [list(range(x.ndim - 1))] * 2)

    product.defvjp(forward, backward)
    return lambda p, batch, x: x + product(x, p[w], 0.5)


@_block()
def own_tangent(make: Make, shape: tuple[int, ...]) -> Block:
    @jax.custom_jvp
    def f(x: Array) -> Array:
        return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)

    f.defjvp(lambda primals, tangents: (f(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))
    return lambda p, batch, x: f(x)


@_block()
def embedding(make: Make, shape: tuple[int, ...]) -> Block:
    most = make.choose(50, 300)
    table, numbers = make.weight(most, shape[-1], scale=1.0), make.integers(most, *shape[:-1])
    return lambda p, batch, x: x + p[table][batch[numbers]]


@_block()
def shared_table(make: Make, shape: tuple[int, ...]) -> Block:
    """A table that is no example, looked up by what was computed."""
    table = make.leaf(make.normal(40, shape[-1]))

    def block(p: Any, batch: Any, x: Array) -> Array:
        scores = x @ batch[table].T
        return (
            x
            + jnp.take(batch[table], scores.argmax(-1), 0)
            + jax.nn.softmax(scores).max(-1)[..., None]
        )

    return block


@_block()
def sort_features(make: Make, shape: tuple[int, ...]) -> Block:
    f = make.choose(
        lambda x: jnp.sort(x, -1),
        lambda x: jnp.take_along_axis(x, jnp.argsort(jnp.sin(3 * x), -1), -1),
        lambda x: jnp.cumsum(x, -1) / 4,
        lambda x: lax.top_k(x, x.shape[-1] // 2)[0],
        lambda x: jax.nn.softmax(x) * x.shape[-1] ** 0.5,
        lambda x: jnp.abs(jnp.fft.rfft(x) + 3),
        lambda x: jnp.concatenate([jnp.cos(x), x[..., ::-1]], -1),
    )
    return lambda p, batch, x: f(x)


@_block()
def experts(make: Make, shape: tuple[int, ...]) -> Block:
    gate, up = make.weight(shape[-1], 4), make.weight(4, shape[-1], 24, scale=0.2)
    down = make.weight(4, 24, shape[-1], scale=0.2)

    def block(p: Any, batch: Any, x: Array) -> Array:
        top, index = lax.top_k(jax.nn.softmax(x @ p[gate]), 2)
        weight = (jax.nn.one_hot(index, 4, dtype=x.dtype) * top[..., None]).sum(-2)
        hidden = jax.nn.gelu(jnp.einsum("...d,edh->...eh", x, p[up]))
        return x + jnp.einsum("...eh,ehd,...e->...d", hidden, p[down], weight)

    return block


@_block()
def scanned_layers(make: Make, shape: tuple[int, ...]) -> Block:
    depth, width = make.choose(3, 5, 8), shape[-1]
    w, b = make.weight(depth, width, width, scale=width**-0.5), make.weight(depth, width)
    remat = make.choose(lambda f: f, lambda f: f, jax.checkpoint)
    options = make.choose({}, {"reverse": True}, {"unroll": 2})

    def block(p: Any, batch: Any, x: Array) -> Array:
        @remat
        def layer(x: Array, weights: Any) -> Any:
            return x + 0.5 * jnp.tanh(norm(x) @ weights[0] + weights[1]), None

        return lax.scan(layer, x, (p[w], p[b]), **options)[0]

    return block


@_block()
def repeated_layer(make: Make, shape: tuple[int, ...]) -> Block:
    w, times = make.weight(shape[-1], shape[-1]), make.choose(3, 6)

    def block(p: Any, batch: Any, x: Array) -> Array:
        return lax.fori_loop(0, times, lambda i, h: jnp.tanh(h @ p[w] + x * (i + 1) / times), x)

    return block


@_block()
def iterated(make: Make, shape: tuple[int, ...]) -> Block:
    """A while loop whose result is not differentiated, of each row or of a parameter."""
    w = make.weight(shape[-1], shape[-1])

    def largest(matrix: Array) -> Array:
        start = 0, jnp.ones(len(matrix), matrix.dtype)
        return lax.while_loop(
            lambda c: c[0] < 5, lambda c: (c[0] + 1, norm(matrix @ (matrix.T @ c[1]))), start
        )[1]

    def halved(x: Array) -> Array:
        return lax.while_loop(lambda c: jnp.abs(c).max() > 2, lambda c: c / 2, x)

    if make.chance(0.5):
        return lambda p, batch, x: (
            x @ p[w] + jnp.einsum("...i,i->...", x, largest(lax.stop_gradient(p[w])))[..., None]
        )

    def block(p: Any, batch: Any, x: Array) -> Array:
        rows = lax.stop_gradient(x).reshape(-1, x.shape[-1])
        return x @ p[w] + jax.vmap(halved)(rows).reshape(x.shape)

    return block


@_block()
def branch(make: Make, shape: tuple[int, ...]) -> Block:
    w, index = make.weight(shape[-1], shape[-1]), make.leaf(jnp.int32(make.choose(0, 1, 2)))
    branches = [lambda x, w: jnp.tanh(x @ w), lambda x, w: x * w.sum(0), lambda x, w: jnp.cos(x)]
    return lambda p, batch, x: lax.switch(batch[index], branches, x, p[w])


@_block()
def gradient_of_rows(make: Make, shape: tuple[int, ...]) -> Block:
    w = make.weight(shape[-1], 16)

    def block(p: Any, batch: Any, x: Array) -> Array:
        energy = jax.grad(lambda r: jnp.tanh(r @ p[w]).sum())
        return x - 0.5 * jax.vmap(energy)(x.reshape(-1, x.shape[-1])).reshape(x.shape)

    return block


@_block()
def bilinear(make: Make, shape: tuple[int, ...]) -> Block:
    w = make.weight(shape[-1], 4, shape[-1], scale=0.1)
    v = make.weight(4, shape[-1])
    return lambda p, batch, x: x + jnp.einsum("...i,ikj,...j->...k", x, p[w], jnp.tanh(x)) @ p[v]


@_block()
def odd_equations(make: Make, shape: tuple[int, ...]) -> Block:
    f = make.choose(
        lambda x: lax.optimization_barrier(x) * 1.5,
        lambda x: x + lax.stop_gradient(jnp.tanh(x)),
        lambda x: lax.reduce_precision(x, 8, 20),
        lambda x: jnp.nan_to_num(jnp.where(x > 0, jnp.log(jnp.abs(x) + 1), x)),
        lambda x: x * (1 + lax.broadcasted_iota(x.dtype, x.shape, x.ndim - 1) / x.shape[-1]),
        lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True) * jnp.cos(x),
        lambda x: checkpoint_name(jnp.cos(x), "cosine") * x,
        lambda x: x.reshape(-1, x.shape[-1]).T.T.reshape(x.shape) * 0.9,
        lambda x: x.at[..., 0].multiply(2.0).at[..., 1].set(x[..., 2]),
        lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 2)], mode="reflect"),
        lambda x: jnp.clip(x, -1, 1) + jnp.maximum(x, 0.1 * x),
        lambda x: jnp.repeat(x, 2, -1)[..., ::3],
    )
    return lambda p, batch, x: f(x)


@_block()
def with_effect(make: Make, shape: tuple[int, ...]) -> Block:
    if not make.chance(0.2):
        return residual(make, shape)

    def block(p: Any, batch: Any, x: Array) -> Array:
        jax.debug.callback(lambda _: None, x.mean())
        return jnp.tanh(x)

    return block


# Blocks of tokens, images and time steps.


@_block("tokens")
def attention(make: Make, shape: tuple[int, ...]) -> Block:
    width, causal = shape[-1], make.chance(0.5)
    q, k, v, o = (make.weight(width, width) for _ in range(4))

    def block(p: Any, batch: Any, x: Array) -> Array:
        h = norm(x)
        queries, keys, values = (
            (h @ p[w]).reshape(*h.shape[:2], 4, -1).swapaxes(1, 2) for w in (q, k, v)
        )
        scores = queries @ keys.swapaxes(2, 3) / (width // 4) ** 0.5
        if causal:
            scores = jnp.where(jnp.tri(h.shape[1], dtype=bool), scores, -1e9)
        mixed = (jax.nn.softmax(scores) @ values).swapaxes(1, 2).reshape((*h.shape[:2], -1))
        return x + mixed @ p[o][: mixed.shape[-1]]

    return block if width % 4 == 0 else residual(make, shape)


@_block("tokens")
def fused_attention(make: Make, shape: tuple[int, ...]) -> Block:
    q, k = (make.weight(shape[-1], shape[-1]) for _ in range(2))
    if shape[-1] % 4:
        return residual(make, shape)

    def block(p: Any, batch: Any, x: Array) -> Array:
        split = lambda a: a.reshape(*a.shape[:2], 4, -1)  # noqa: E731
        mixed = jax.nn.dot_product_attention(split(x @ p[q]), split(x @ p[k]), split(x))
        return x + mixed.reshape(x.shape)

    return block


@_block("tokens steps")
def recurrent(make: Make, shape: tuple[int, ...]) -> Block:
    width = shape[-1]
    w, u = make.weight(width, 2 * width), make.weight(width, 2 * width)

    def block(p: Any, batch: Any, x: Array) -> Array:
        time = 0 if "steps" in batch else 1

        def cell(h: Array, x: Array) -> Any:
            z, new = jnp.split(x @ p[w] + h @ p[u], 2, -1)
            h = jax.nn.sigmoid(z) * h + (1 - jax.nn.sigmoid(z)) * jnp.tanh(new)
            return h, h

        inputs = jnp.moveaxis(x, time, 0)
        return jnp.moveaxis(lax.scan(cell, jnp.zeros_like(inputs[0]), inputs)[1], 0, time)

    return block


@_block("tokens steps")
def linear_recurrence(make: Make, shape: tuple[int, ...]) -> Block:
    w = make.weight(shape[-1], shape[-1])

    def block(p: Any, batch: Any, x: Array) -> Array:
        decay = jax.nn.sigmoid(x @ p[w])

        def join(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        return lax.associative_scan(join, (decay, x), axis=0 if "steps" in batch else 1)[1]

    return block


@_block("tokens steps")
def over_time(make: Make, shape: tuple[int, ...]) -> Block:
    f = make.choose(
        lambda x, t: jnp.cumsum(x, t) / x.shape[t] ** 0.5,
        lambda x, t: x + jnp.roll(x, 1, t),
        lambda x, t: x - x.mean(t, keepdims=True),
        lambda x, t: jnp.flip(x, t) * x,
        lambda x, t: jnp.fft.fft(x, axis=t).real / 4,
    )
    return lambda p, batch, x: f(x, 0 if "steps" in batch else 1)


@_block("tokens")
def convolution_of_tokens(make: Make, shape: tuple[int, ...]) -> Block:
    w, dilation = make.weight(3, shape[-1], 24, scale=0.15), make.choose(1, 2)

    def block(p: Any, batch: Any, x: Array) -> Array:
        layout = ("NWC", "WIO", "NWC")
        return jax.nn.gelu(
            lax.conv_general_dilated(
                x, p[w], (1,), "SAME", rhs_dilation=(dilation,), dimension_numbers=layout
            )
        )

    return block


@_block("images")
def convolution(make: Make, shape: tuple[int, ...]) -> Block:
    channels, groups = shape[-1], make.choose(1, 1, shape[-1])
    w = make.weight(3, 3, channels // groups, 16 if groups == 1 else channels, scale=0.15)
    stride = make.choose(1, 1, 2) if shape[1] > 6 else 1
    f = make.choose(*ACTIVATIONS)

    def block(p: Any, batch: Any, x: Array) -> Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return f(
            lax.conv_general_dilated(
                x,
                p[w],
                (stride, stride),
                "SAME",
                dimension_numbers=layout,
                feature_group_count=groups,
            )
        )

    return block


@_block("images")
def residual_convolution(make: Make, shape: tuple[int, ...]) -> Block:
    w = make.weight(3, 3, shape[-1], shape[-1], scale=0.1)

    def block(p: Any, batch: Any, x: Array) -> Array:
        layout = ("NHWC", "HWIO", "NHWC")
        h = jax.nn.silu(norm(x, (1, 2, 3)))
        return x + lax.conv_general_dilated(h, p[w], (1, 1), "SAME", dimension_numbers=layout)

    return block


@_block("images")
def pooling(make: Make, shape: tuple[int, ...]) -> Block:
    window = (1, 2, 2, 1)
    f = make.choose(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 1, 1, 1), "SAME"),
        lambda x: lax.reduce_window(x, 0.0, lax.add, window, (1, 1, 1, 1), "SAME") / 4,
        lambda x: jax.image.resize(x, (x.shape[0], 12, 12, x.shape[3]), "bilinear"),
        lambda x: x[:, 1:-1, 1:-1],
    )
    return lambda p, batch, x: f(x)


# Blocks on rows.


@_block("rows", mixes=True)
def messages(make: Make, shape: tuple[int, ...]) -> Block:
    """A graph whose nodes are the rows."""
    edges = 2 * shape[0]
    source, target = make.integers(shape[0], edges), make.integers(shape[0], edges)
    w = make.weight(shape[-1], shape[-1])

    def block(p: Any, batch: Any, x: Array) -> Array:
        sent = jax.nn.silu(x[batch[source]] @ p[w])
        return x + jax.ops.segment_sum(sent, batch[target], len(x)) / 2

    return block


@_block("rows", mixes=True)
def similarity(make: Make, shape: tuple[int, ...]) -> Block:
    if shape[0] > 1024:
        return residual(make, shape)
    return lambda p, batch, x: x + jax.nn.softmax(norm(x) @ norm(x).T / 4) @ x


@_block("rows")
def mapped(make: Make, shape: tuple[int, ...]) -> Block:
    w = make.weight(shape[-1], shape[-1])

    def block(p: Any, batch: Any, x: Array) -> Array:
        return lax.map(lambda r: jnp.tanh(r @ p[w]) + r, x, batch_size=64)

    return block


@_block("rows")
def table_operation(make: Make, shape: tuple[int, ...], mixes: bool = False) -> Block:
    """One of the operations of the tests of per-example gradients."""
    names = sorted(random_programs.UNARY)
    if shape[0] > 1024:  # some are slow
        names = sorted(random_programs.ELEMENTWISE)
    name, numbers = make.choose(*names), make.random.integers(0, 12, 6).tolist()

    def block(p: Any, batch: Any, x: Array) -> Array:
        value = random_programs.limited(random_programs.Value(x, 0))
        n = random_programs.Numbers(numbers, mixes)
        value = random_programs.limited(random_programs.UNARY[name](value, n))
        rows = value.rows.astype(x.dtype)
        return jnp.broadcast_to(rows, (len(x), rows.shape[1]))

    try:
        jax.eval_shape(jax.grad(lambda x: block({}, {}, x).sum()), jnp.zeros(shape))
    except NotImplementedError:  # some scatters have no derivative
        return residual(make, shape)
    return block


@_block("rows", mixes=True)
def mixing_table_operation(make: Make, shape: tuple[int, ...]) -> Block:
    return table_operation(make, shape, mixes=True)


# Blocks that mix the batch.


@_block(mixes=True)
def batch_norm(make: Make, shape: tuple[int, ...]) -> Block:
    axes, f = tuple(range(len(shape) - 1)), make.choose(*ACTIVATIONS)
    g = make.weight(shape[-1])
    return lambda p, batch, x: f(norm(x, axes) * (1 + p[g]))


@_block("rows tokens images", mixes=True)
def mixed_batch(make: Make, shape: tuple[int, ...]) -> Block:
    order = make.random.permutation(shape[0])
    f = make.choose(
        lambda x: 0.7 * x + 0.3 * x[::-1],
        lambda x: x - jnp.roll(x, 1, 0),
        lambda x: x[order],
        lambda x: x / (1 + jnp.linalg.norm(x)),
        lambda x: x * jax.nn.softmax(x, 0) * len(x),
        lambda x: jnp.cumsum(x, 0) / len(x) ** 0.5,
        lambda x: jnp.sort(x, 0),
        lambda x: lax.cond(x.mean() > 0, jnp.sin, jnp.cos, x),
        lambda x: jnp.concatenate([x[len(x) // 2 :], x[: len(x) // 2]]),
        lambda x: x + x.max(0, keepdims=True),
    )
    return lambda p, batch, x: f(x)


WRAPPERS: dict[str, Callable[[Block], Block]] = {
    "checkpoint": jax.checkpoint,
    "checkpoint, dots saved": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
    ),
    "jit": jax.jit,
    "named scope": jax.named_scope("layer"),
    "branch": lambda f: lambda p, b, x: lax.cond(x.shape[0] > 0, f, f, p, b, x),
    "vjp": lambda f: _rematerialized(f),  # defined below
}


def _rematerialized(f: Block) -> Block:
    """A checkpoint written as a derivative rule."""
    function = jax.custom_vjp(f)
    function.defvjp(
        lambda *arguments: (f(*arguments), arguments),
        lambda arguments, g: jax.vjp(f, *arguments)[1](g),
    )
    return function


# Losses of the results.


def _per_example(make: Make, shape: tuple[int, ...], axis: int) -> Callable[..., Array]:
    """``losses(params, batch, x) -> [batch]``."""
    count, width = shape[axis], shape[-1]
    inner = tuple(i for i in range(len(shape) - 1) if i != axis)
    name = make.choose("labels", "targets", "tokens" if len(shape) == 3 else "labels", "huber")
    if name == "targets" or name == "huber":
        y, w = make.leaf(make.normal(count, 4)), make.weight(width, 4)
        f = jnp.square if name == "targets" else optax.losses.huber_loss
        return lambda p, b, x: f(x.mean(inner) @ p[w] - b[y]).mean(-1)
    w, b = make.weight(width, 10), make.weight(10)
    lead = shape[:-1] if name == "tokens" else (count,)
    y = make.integers(10, *lead)
    if name == "tokens":
        return lambda p, batch, x: cross_entropy(x @ p[w] + p[b], batch[y]).mean(inner)
    return lambda p, batch, x: cross_entropy(x.mean(inner) @ p[w] + p[b], batch[y])


def _weighted(make: Make, count: int) -> Any:
    weights = make.leaf(jnp.asarray(make.random.integers(0, 2, count) + 0.0, float))
    return make.choose(
        lambda b, v: (v * b[weights]).sum() / b[weights].sum(),
        lambda b, v: (v * b[weights]).sum() / jnp.maximum((b[weights] > 0).sum(), 1),
        lambda b, v: jnp.average(v, weights=b[weights] + 0.1),
        lambda b, v: (v * b[weights]).mean() + 3.0,
    )


SEPARABLE: tuple[Any, ...] = (
    lambda b, v: v.mean(),
    lambda b, v: v.mean(),
    lambda b, v: v.sum() + 2.0,
    lambda b, v: 1e-3 * (5.0 + v.sum()) + 0.1 * v.mean(),
)

COUPLED: tuple[Any, ...] = (
    lambda b, v: jnp.log(jnp.exp(v).mean()),
    lambda b, v: jax.nn.logsumexp(v),
    lambda b, v: lax.top_k(v, max(len(v) // 4, 1))[0].mean(),
    lambda b, v: v.mean() * (1 + jnp.square(v).mean()),
    lambda b, v: jnp.sqrt(1 + jnp.square(v).sum()),
    lambda b, v: v.mean() + v.var(),
    lambda b, v: v.mean() / lax.stop_gradient(v.mean()),
    lambda b, v: (v * lax.stop_gradient((v - v.mean()) / (v.std() + 1e-3))).mean(),
    lambda b, v: v.max() + 0.5 * v.mean(),
    lambda b, v: jnp.median(v) + 0.1 * v.mean(),
    lambda b, v: (v * jax.nn.softmax(lax.stop_gradient(v))).sum(),
    lambda b, v: jax.nn.softplus(v[:, None] - v[None]).mean() + v.mean(),
    lambda b, v: v[:-1].mean() + jnp.square(v[1:] - v[:-1]).mean(),
    lambda b, v: jnp.where(jnp.isfinite(v), v, 0).sum() / jnp.isfinite(v).sum(),
)


def _of_features(make: Make, shape: tuple[int, ...], axis: int) -> Callable[..., Array]:
    """Losses of the features of all examples: ``loss(params, batch, x)``."""
    width = shape[-1]
    inner = tuple(i for i in range(len(shape) - 1) if i != axis)
    other = make.leaf(make.normal(shape[axis], width))
    scale = make.weight(scale=1.0)

    def unit(z: Array) -> Array:
        return z / jnp.sqrt(1e-3 + jnp.square(z).sum(-1, keepdims=True))

    def contrastive(p: Any, z: Array, other: Array) -> Array:
        scores = jnp.exp(0.3 * p[scale]) * 5 * unit(z) @ unit(other).T
        labels = jnp.arange(len(z))
        return (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)).mean() / 2

    def views(p: Any, z: Array, other: Array) -> Array:
        scores = unit(z) @ unit(z).T / 0.2
        scores = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, scores)
        return cross_entropy(scores, jnp.roll(jnp.arange(len(z)), len(z) // 2)).mean()

    def covariance(p: Any, z: Array, other: Array) -> Array:
        z = z - z.mean(0)
        matrix = z.T @ z / len(z)
        hinge = jax.nn.relu(1 - jnp.sqrt(jnp.diag(matrix) + 1e-3)).mean()
        return hinge + 0.1 * jnp.square(matrix).mean() + jnp.square(z - other).mean()

    def correlation(p: Any, z: Array, other: Array) -> Array:
        a, b = norm(z, 0), norm(other, 0)
        return jnp.square(a.T @ b / len(a) - jnp.eye(width)).sum()

    def kernel(p: Any, z: Array, other: Array) -> Array:
        def similar(a: Array, b: Array) -> Array:
            return jnp.exp(-jnp.square(a[:, None, :4] - b[None, :, :4]).sum(-1)).mean()

        return similar(z, z) - 2 * similar(z, other)

    def dice(p: Any, z: Array, other: Array) -> Array:
        a, b = jax.nn.sigmoid(z), (other > 0).astype(z.dtype)
        return 1 - (2 * (a * b).sum() + 1) / (a.sum() + b.sum() + 1)

    def balance(p: Any, z: Array, other: Array) -> Array:
        gates = jax.nn.softmax(z)
        load = jax.nn.one_hot(gates.argmax(-1), width, dtype=z.dtype).mean(0)
        return (load * gates.mean(0)).sum() * width + jnp.square(z - other).mean()

    def transport(p: Any, z: Array, other: Array) -> Array:
        cost = jnp.square(unit(z)[:, None, :4] - unit(other)[None, :, :4]).sum(-1)

        def step(potential: Any, _: Any) -> Any:
            f = -jax.nn.logsumexp(potential[None] - cost / 0.2, axis=1)
            return -jax.nn.logsumexp(f[:, None] - cost / 0.2, axis=0), None

        potential, _ = lax.scan(step, jnp.zeros(len(z), z.dtype), None, length=4)
        return potential.mean() + cost.mean()

    some = [covariance, correlation, dice, balance]
    if shape[axis] <= 1024:
        some += [contrastive, contrastive, views, kernel, transport]
    f = make.choose(*some)
    return lambda p, b, x: f(p, x.mean(inner), b[other])


def _wrapped(make: Make, block: Block) -> Block:
    return make.choose(*WRAPPERS.values())(block) if make.chance(0.25) else block


def random_loss(seed: int, most_blocks: int = 4) -> tuple[str, Program]:
    """Return a description of a random program, and the program."""
    make = Make(seed)
    kind = str(make.choose("rows", "rows", "tokens", "images", "steps"))
    axis = KINDS[kind].batch_axis
    shape = tuple(int(make.choose(*sizes)) for sizes in KINDS[kind].shapes)
    mixes, is_narrow = make.chance(0.4), make.chance(0.15)
    names = [n for n, e in BLOCKS.items() if kind in e.kinds and (mixes or not e.mixes)]
    names = [n for n in names if is_narrow or n != "half_precision"]
    names += [n for n in names if n.endswith("table_operation")] * 3  # one of many operations
    if kind == "steps":
        make.batch["steps"] = jnp.int32(shape[0])
    given = make.leaf(make.normal(*shape))
    chosen, blocks = [], []
    for _ in range(int(make.random.integers(min(2, most_blocks), most_blocks + 1))):
        name = str(make.choose(*names))
        block = _wrapped(make, BLOCKS[name].build(make, shape))
        shape = jax.eval_shape(block, make.params, make.batch, jnp.zeros(shape)).shape
        chosen.append(name)
        blocks.append(block)

    def features(params: Any, batch: Any) -> Array:
        x = batch[given]
        for block in blocks:
            x = block(params, batch, x)
        return x

    way = str(make.choose("mean", "separable", "weighted", "coupled", "features"))
    about = f"{kind} {'x'.join(map(str, make.batch[given].shape))}: {', '.join(chosen)}; {way}"
    optimizer = str(make.choose(*OPTIMIZERS))
    has_aux = make.chance(0.3)

    def finish(loss: Any, **more: Any) -> tuple[str, Program]:
        made = Program(loss, make.params, make.batch, OPTIMIZERS[optimizer], **more)
        return f"{about}; {optimizer}", made

    if way == "features":
        of_features = _of_features(make, shape, axis)
        return finish(lambda p, b: of_features(p, b, features(p, b)))
    of_examples = _per_example(make, shape, axis)

    def losses(params: Any, batch: Any) -> Array:
        return of_examples(params, batch, features(params, batch))

    if way == "mean" and not has_aux and axis == 0:
        return finish(lambda p, b: losses(p, b).mean(), losses=losses)
    reductions: dict[str, tuple[Any, ...]] = {
        "mean": (lambda b, v: v.mean(),),
        "separable": SEPARABLE,
        "coupled": COUPLED,
    }
    if way == "weighted":
        reduce = _weighted(make, make.batch[given].shape[axis])
    else:
        reduce = make.choose(*reductions[way])
    metrics = make.choose(
        lambda x, v: {"largest": v.max()}, lambda x, v: v, lambda x, v: (x, [v.mean()])
    )

    def loss(params: Any, batch: Any) -> Any:
        x = features(params, batch)
        values = of_examples(params, batch, x)
        value = reduce(batch, values)
        return (value, metrics(x, values)) if has_aux else value

    return finish(loss)
