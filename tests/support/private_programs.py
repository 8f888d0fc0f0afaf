"""Random losses that try to move a clipped sum: custom rules, checkpoints, scans, casts, solves.

A program is a list of layers. Each has a parameter that is transformed, meets the activations
[batch, time, D], and gives new activations, inside of a wrapper. `random_program` draws one by a
seed; `run` computes its losses.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

D, TIME = 4, 3
BF16 = jnp.bfloat16

BACKWARD = {
    "plus a constant": lambda ct: ct + 1.0,
    "plus a sign": lambda ct: ct + 5 * jnp.sign(ct),
    "float8": lambda ct: ct.astype(jnp.float8_e4m3fn).astype(ct.dtype),
    "float16": lambda ct: ct.astype(jnp.float16).astype(ct.dtype),
    "integer": lambda ct: (3 * ct).astype(jnp.int32).astype(ct.dtype),
    "2 bits": lambda ct: lax.reduce_precision(ct, 8, 1),
    "clipped": lambda ct: jnp.clip(ct, -0.1, 0.1),
    "one-sided": lambda ct: jnp.maximum(ct, 0),
    "doubled": lambda ct: 2 * ct,
}  # fmt: skip
"""What rules do with cotangents. All but the last are not linear."""


def with_backward(name):
    """The identity, with a backward rule."""
    rule = jax.custom_vjp(lambda h: h)
    rule.defvjp(lambda h: (h, None), lambda _, ct: (BACKWARD[name](ct),))
    return rule


def cg(p):
    matrix = jnp.diag(jnp.linspace(1.0, 60.0, len(p)))
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, p, maxiter=3)[0]


def solved(p):
    def solve(_, b):
        return b / (1 + jnp.linalg.norm(b))

    return lax.custom_linear_solve(lambda v: v, p, solve, solve)


def low_rank(p):
    return p + p[:, :1] @ p[:1]


def standardized(p):
    return (p - p.mean(0)) / jnp.sqrt(p.var(0) + 1e-4)


def concatenated(p):
    return jnp.concatenate([p[:, :2], p[:, 2:].astype(BF16).astype(p.dtype)], 1)


PARAMETER = {
    "plain": lambda p: p, "bfloat16": lambda p: p.astype(BF16), "transposed": lambda p: p.T, "exp": lambda p: jnp.exp(-p),
    "low rank": low_rank, "standardized": standardized, "unit columns": lambda p: p / jnp.linalg.norm(p, axis=0),
    "concatenated": concatenated, "cg": cg, "solved": solved, "difference": lambda p: jnp.tanh(p) - jnp.tanh(1.0001 * p),
} | {name: with_backward(name) for name in BACKWARD}  # fmt: skip

ACTIVATION = {
    "tanh": jnp.tanh, "relu": jax.nn.relu, "softmax": jax.nn.softmax, "linear": lambda h: h,
    "normalized": lambda h: h / jnp.sqrt(1e-6 + jnp.square(h).sum(-1, keepdims=True)),
    "centered": lambda h: h - h.mean(-1, keepdims=True),
    "bfloat16": lambda h: h.astype(BF16),
    "top 2": lambda h: jnp.concatenate([lax.top_k(h, 2)[0]] * 2, -1),
    "equal functions": lambda h: jnp.tanh(h) - (jnp.exp(h) - jnp.exp(-h)) / (jnp.exp(h) + jnp.exp(-h)),
    "sum of a softmax": lambda h: jax.nn.softmax(h).sum(-1, keepdims=True) * jnp.ones_like(h),
    "cancelled": lambda h: jnp.square(h) * 1.1 - (h * 1.1) * (0.999 * h),
    "cg": lambda h: jax.vmap(jax.vmap(cg))(h.astype(jnp.float32)),
} | {name: with_backward(name) for name in BACKWARD}  # fmt: skip

MEETING = {
    "product": lambda p, h: h @ p,
    "product of bfloat16": lambda p, h: h.astype(BF16) @ p.astype(BF16),
    "bias": lambda p, h: h + p[0].astype(h.dtype),
    "scale": lambda p, h: h * p[0].astype(h.dtype),
    "embedding": lambda p, h: h + p[jnp.argmax(h, -1)].astype(h.dtype),
    "convolution": lambda p, h: lax.conv_general_dilated(
        h.astype(p.dtype), p[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "loop": lambda p, h: lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ p.astype(h.dtype)), h),
}  # fmt: skip

WRAPPER = {
    "none": lambda f: f,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "scan": lambda f: lambda p, h: lax.scan(
        lambda h, p: (f(p, h).astype(h.dtype), None), h, jnp.stack([p, 0.5 * p.T])
    )[0],
    "checkpoints in a scan": lambda f: lambda p, h: lax.scan(
        jax.checkpoint(lambda h, p: (f(p, h).astype(h.dtype), None)), h, jnp.stack([p, 0.5 * p.T])
    )[0],
}  # fmt: skip

TABLES = (PARAMETER, ACTIVATION, MEETING, WRAPPER)


class Program(NamedTuple):
    """A random loss.

    Attributes:
      layers: Names in `TABLES`, and the number of the parameter, of each layer.
      params: Parameters by number.
      x: The batch, [batch, TIME, D].
    """

    layers: list[tuple[Any, ...]]
    params: list[Any]
    x: Any


def random_program(seed, batch=6):
    """Draw a program of one to four layers, and a batch with rows that may be constant."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    layers = [
        (*(str(rng.choice(list(table))) for table in TABLES), int(rng.integers(count)))
        for _ in range(count)
    ]
    params = [jnp.asarray(rng.normal(size=(D, D)), jnp.float32) for _ in range(count)]
    noise = rng.choice([0.0, 1e-6, 1.0])
    x = rng.normal(size=(batch, TIME, 1)) + noise * rng.normal(size=(batch, TIME, D))
    return Program(layers, params, x.astype(np.float32))


def run(program, params, x):
    """The losses of a program, [batch]."""
    h = jnp.asarray(x)
    for parameter, activation, meeting, wrapper, number in program.layers:

        def layer(p, h, names=(parameter, activation, meeting)):
            own, act, meet = (table[name] for table, name in zip(TABLES, names, strict=False))
            return act(meet(own(p), h))

        h = WRAPPER[wrapper](layer)(params[number], h)
    return h.astype(jnp.float32).sum((1, 2))
