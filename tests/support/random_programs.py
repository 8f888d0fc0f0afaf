"""Random programs of parameters and a batch.

A program is a list of steps. Each step applies one of the operations below to an earlier value and
appends the result. Numbers of the step choose operands, axes and sizes, in the same way for every
batch size. A step that mixes may act along the batch axis. Without such a step the program treats
each example alone by construction.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

B = 3
LARGEST_ROW = 48


class Value(NamedTuple):
    """An array and the axis that counts examples, or None if no axis does."""

    a: Any
    axis: int | None

    @property
    def rows(self):
        """The array as [batch or 1, elements]."""
        if self.axis is None:
            return self.a.reshape(1, -1)
        return jnp.moveaxis(self.a, self.axis, 0).reshape(self.a.shape[self.axis], -1)

    def after(self, f):
        """Apply a function that keeps the order of axes."""
        return Value(f(self.a), self.axis)


class Numbers:
    """The numbers of a step, used in turn."""

    def __init__(self, numbers, mixes):
        self.numbers, self.mixes = itertools.cycle(numbers), mixes

    def below(self, n):
        return next(self.numbers) % n

    def choose(self, options):
        return options[self.below(len(options))]

    def axis(self, v):
        """An axis, which is not the batch axis unless the step mixes."""
        return self.choose([i for i in range(v.a.ndim) if i != v.axis or self.mixes])


def with_axes(v, count):
    """Append axes of size 1 until ``count`` axes do not count examples."""
    missing = count - v.a.ndim + (v.axis is not None)
    return v.after(lambda a: a.reshape(*a.shape, *[1] * max(missing, 0)))


def limited(v):
    """Average over axes until a row is small."""
    while (v.a.ndim > 5) or v.rows.shape[1] > LARGEST_ROW:
        others = [i for i in range(v.a.ndim) if i != v.axis]
        v = without_axis(v, max(others, key=lambda i: v.a.shape[i]), lambda a, i: a.mean(i))
    return v


def without_axis(v, i, f):
    """Apply a function that removes axis i."""
    if v.axis is None or i == v.axis:
        return Value(f(v.a, i), None)
    return Value(f(v.a, i), v.axis - (i < v.axis))


def fit(v, like):
    """Rearrange the elements of each row so that the value broadcasts to another."""
    shape = [n for i, n in enumerate(like.a.shape) if i != like.axis]
    numbers = np.arange(int(np.prod(shape))) % max(v.rows.shape[1], 1)
    rows = v.rows[:, numbers].reshape(-1, *shape)
    if like.axis is None:
        return rows if v.axis is not None else rows[0]
    return jnp.moveaxis(rows, 0, like.axis)


def matrix(v, rows, columns):
    """A parameter's elements as a matrix."""
    flat = v.a.reshape(-1)
    return flat[np.arange(rows * columns) % flat.size].reshape(rows, columns)


# Operations on one value: ``(value, numbers) -> value``.

ELEMENTWISE = {
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": lambda a: jnp.tan(jnp.tanh(a)),
    "asin": lambda a: jnp.arcsin(0.9 * jnp.tanh(a)),
    "acos": lambda a: jnp.arccos(0.9 * jnp.tanh(a)),
    "atan": jnp.arctan,
    "sinh": lambda a: jnp.sinh(jnp.tanh(a)),
    "cosh": lambda a: jnp.cosh(jnp.tanh(a)),
    "tanh": jnp.tanh,
    "asinh": jnp.arcsinh,
    "acosh": lambda a: jnp.arccosh(1.1 + jnp.square(a)),
    "atanh": lambda a: jnp.arctanh(0.9 * jnp.tanh(a)),
    "exp": lambda a: jnp.exp(jnp.minimum(a, 1)),
    "exp2": lambda a: jnp.exp2(jnp.minimum(a, 1)),
    "expm1": lambda a: jnp.expm1(jnp.minimum(a, 1)),
    "log": lambda a: jnp.log(jnp.abs(a) + 1),
    "log1p": lambda a: jnp.log1p(jnp.square(a)),
    "sqrt": lambda a: jnp.sqrt(jnp.square(a) + 1),
    "rsqrt": lambda a: lax.rsqrt(jnp.square(a) + 1),
    "cbrt": lambda a: jnp.cbrt(jnp.square(a) + 1),
    "logistic": lax.logistic,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erf_inv": lambda a: lax.erf_inv(0.9 * jnp.tanh(a)),
    "lgamma": lambda a: lax.lgamma(jnp.abs(a) + 1),
    "digamma": lambda a: lax.digamma(jnp.abs(a) + 1),
    "bessel_i0e": lax.bessel_i0e,
    "bessel_i1e": lax.bessel_i1e,
    "integer_pow": lambda a: lax.integer_pow(jnp.tanh(a), 3),
    "square": lambda a: jnp.square(jnp.tanh(a)),
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sign": lambda a: a * jnp.sign(a),
    "floor": lambda a: a - jnp.floor(a),
    "ceil": lambda a: jnp.ceil(a) - a,
    "round": lambda a: a + jnp.round(2 * a),
    "is_finite": lambda a: jnp.where(jnp.isfinite(a), a, 0),
    "reduce_precision": lambda a: lax.reduce_precision(a, 8, 18),
    "stop_gradient": lambda a: a * lax.stop_gradient(a),
    "clamp": lambda a: jnp.clip(a, -0.5, 0.7),
    "complex": lambda a: jnp.abs(jnp.conj(lax.complex(a, 1 + a)) * lax.complex(jnp.ones_like(a), a) + 2),
    "bits": lambda a: a * (lax.bitcast_convert_type(a, jnp.uint32) >> 31).astype(a.dtype),
    "population_count": lambda a: a * lax.population_count((8 * jnp.abs(a)).astype(jnp.uint8)),
    "clz": lambda a: a / (1 + lax.clz((8 * jnp.abs(a)).astype(jnp.int8))),
    "integers": lambda a: a * (((4 * a).astype(jnp.int32) ^ 5 | 8) & ~2) / 16,
    "shifts": lambda a: a * (((4 * a).astype(jnp.int32) << 2) >> 1) / 16,
    "rem": lambda a: lax.rem(a, jnp.full_like(a, 0.7)),
    "nextafter": lambda a: a + lax.nextafter(*map(lax.stop_gradient, (a, 2 * a))),
    "optimization_barrier": lambda a: lax.optimization_barrier(a) * 2,
    "copy": lambda a: jnp.array(a, copy=True),
    "float16": lambda a: a + lax.stop_gradient(a).astype(jnp.float16).astype(jnp.float32),
}  # fmt: skip

UNARY: dict[str, Callable[[Value, Numbers], Value]] = {
    name: functools.partial(lambda f, v, n: v.after(f), f) for name, f in ELEMENTWISE.items()
}
BINARY: dict[str, Callable[[Value, Value, Numbers], Value]] = {}


def unary(f):
    """Register an operation on a value that has at least one axis besides the batch axis."""
    UNARY[f.__name__] = lambda v, n: f(with_axes(v, 1), n)
    return f


def binary(f):
    """Register an operation on two values."""
    BINARY[f.__name__] = lambda v, w, n: f(with_axes(v, 1), w, n)
    return f


def along(name, f):
    """Register ``f(a, axis)``, which keeps the shape."""

    def operation(v, n):
        i = n.axis(v)
        return v.after(lambda a: f(a, i))

    operation.__name__ = name
    unary(operation)


def reducing(name, f):
    """Register ``f(a, axis)``, which removes the axis."""

    def operation(v, n):
        return without_axis(v, n.axis(v), f)

    operation.__name__ = name
    unary(operation)


along("cumsum", lambda a, i: jnp.cumsum(a, i))
along("reverse cumsum", lambda a, i: lax.cumsum(a, i, reverse=True))
along("cumprod", lambda a, i: jnp.cumprod(jnp.tanh(a), i))
along("cummax", lax.cummax)
along("cummin", lax.cummin)
along("cumlogsumexp", lax.cumlogsumexp)
along("sort", lambda a, i: jnp.sort(a, i))
along("sort by another", lambda a, i: lax.sort((jnp.sin(5 * a), a), dimension=i, num_keys=1)[1])
along("argsort", lambda a, i: a * jnp.argsort(a, i))
along("rev", lambda a, i: a * jnp.flip(a, i))
along("roll", lambda a, i: a + jnp.roll(a, 1, i))
along("softmax", lambda a, i: jax.nn.softmax(a, i))
along(
    "standardize",
    lambda a, i: (a - a.mean(i, keepdims=True)) / jnp.sqrt(1 + a.var(i, keepdims=True)),
)
along("fft", lambda a, i: jnp.fft.fft(a, axis=i).real / 4)
along("one hot of argmax", lambda a, i: a * jax.nn.one_hot(jnp.argmax(a, i), a.shape[i], axis=i))
along(
    "associative_scan", lambda a, i: lax.associative_scan(lambda x, y: jnp.tanh(x + y), a, axis=i)
)
along(
    "window sum",
    lambda a, i: lax.reduce_window(
        a, 0.0, lax.add, [3 if j == i else 1 for j in range(a.ndim)], [1] * a.ndim, "SAME"
    ),
)
along(
    "max pool",
    lambda a, i: lax.reduce_window(
        a, -jnp.inf, lax.max, [2 if j == i else 1 for j in range(a.ndim)], [1] * a.ndim, "SAME"
    ),
)
along("iota", lambda a, i: a * (1 + lax.broadcasted_iota(a.dtype, a.shape, i)))
along(
    "scan",
    lambda a, i: jnp.moveaxis(
        lax.scan(
            lambda c, r: (jnp.tanh(c + r), c * r),
            jnp.zeros_like(jnp.moveaxis(a, i, 0)[0]),
            jnp.moveaxis(a, i, 0),
        )[1],
        0,
        i,
    ),
)
along(
    "map", lambda a, i: jnp.moveaxis(lax.map(lambda r: r * jnp.sin(r), jnp.moveaxis(a, i, 0)), 0, i)
)
along("vmap", lambda a, i: jax.vmap(jnp.sin, i, i)(a))
along("pmean", lambda a, i: jax.vmap(lambda r: r - lax.pmean(r, "axis"), i, i, axis_name="axis")(a))
along("updated", lambda a, i: a.at[(slice(None),) * i + (0,)].multiply(2.0))
along(
    "updated by a slice",
    lambda a, i: lax.dynamic_update_slice_in_dim(a, lax.slice_in_dim(a, 0, 1, axis=i) * 2, 0, i),
)

reducing("sum", lambda a, i: a.sum(i))
reducing("mean", lambda a, i: a.mean(i))
reducing("prod", lambda a, i: jnp.tanh(a).prod(i))
reducing("max", lambda a, i: a.max(i))
reducing("min", lambda a, i: a.min(i))
reducing("logsumexp", lambda a, i: jax.nn.logsumexp(a, i))
reducing("argmax", lambda a, i: jnp.argmax(a, i).astype(a.dtype))
reducing("argmin", lambda a, i: a.max(i) * jnp.argmin(a, i))
reducing("any", lambda a, i: jnp.where((a > 0.5).any(i), a.sum(i), 1))
reducing("all", lambda a, i: jnp.where((a > -0.5).all(i), a.sum(i), 1))
reducing("xor", lambda a, i: a.sum(i) * lax.reduce_xor((4 * a).astype(jnp.int32), axes=(i,)) / 8)
reducing("reduce", lambda a, i: lax.reduce(a, 0.0, lambda x, y: x + y, (i,)))
reducing("norm", lambda a, i: jnp.sqrt(1 + jnp.square(a).sum(i)))
reducing("first", lambda a, i: lax.index_in_dim(a, 0, i, keepdims=False))
reducing(
    "last, dynamic", lambda a, i: lax.dynamic_index_in_dim(a, a.shape[i] - 1, i, keepdims=False)
)
reducing("median", lambda a, i: jnp.median(a, i))
reducing(
    "fold",
    lambda a, i: lax.scan(
        lambda c, r: (jnp.tanh(c * 0.5 + r), None),
        jnp.zeros_like(jnp.moveaxis(a, i, 0)[0]),
        jnp.moveaxis(a, i, 0),
    )[0],
)
reducing(
    "while",
    lambda a, i: (
        a.sum(i)
        + lax.while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, jnp.sin(c[1]) + c[1]),
            (0, lax.stop_gradient(a).max(i)),
        )[1]
    ),
)


@unary
def transpose(v, n):
    order = list(range(v.a.ndim))
    for i in reversed(range(1, len(order))):
        j = n.below(i + 1)
        order[i], order[j] = order[j], order[i]
    return Value(v.a.transpose(order), None if v.axis is None else order.index(v.axis))


@unary
def merge_axes(v, n):
    """Merge two neighbouring axes, possibly the batch axis."""
    v = with_axes(v, 2)
    pairs = [i for i in range(v.a.ndim - 1) if n.mixes or v.axis not in (i, i + 1)]
    if not pairs:
        return v
    i = n.choose(pairs)
    a = v.a.reshape(*v.a.shape[:i], -1, *v.a.shape[i + 2 :])
    if v.axis in (
        i,
        i + 1,
    ):  # Back, so that later values have a batch axis: maybe in another order.
        return Value(jnp.sin(a).reshape(v.a.shape), v.axis)
    return Value(a, v.axis if v.axis is None or v.axis < i else v.axis - 1)


@unary
def split_axis(v, n):
    i = n.axis(v)
    if v.a.shape[i] % 2 or i == v.axis:
        return v
    axis = None if v.axis is None else v.axis + (i < v.axis)
    return Value(v.a.reshape(*v.a.shape[:i], 2, -1, *v.a.shape[i + 1 :]), axis)


@unary
def expand_dims(v, n):
    i = n.below(v.a.ndim + 1)
    return Value(jnp.expand_dims(v.a, i), None if v.axis is None else v.axis + (i <= v.axis))


@unary
def repeated(v, n):
    """New axes by broadcasting."""
    i = n.below(v.a.ndim + 1)
    a = jnp.broadcast_to(jnp.expand_dims(v.a, i), (*v.a.shape[:i], 2, *v.a.shape[i:]))
    return Value(a, None if v.axis is None else v.axis + (i <= v.axis))


@unary
def stacked(v, n):
    i = n.below(v.a.ndim + 1)
    a = jnp.stack([v.a, jnp.sin(v.a)], i)
    return Value(a, None if v.axis is None else v.axis + (i <= v.axis))


@unary
def tile(v, n):
    i = n.axis(v)
    if i == v.axis:
        return v.after(lambda a: jnp.tile(a, [2 if j == i else 1 for j in range(a.ndim)])[: len(a)])
    return v.after(lambda a: jnp.tile(a, [2 if j == i else 1 for j in range(a.ndim)]))


@unary
def padded(v, n):
    i, how = n.axis(v), n.choose([(1, 2, 0), (-1, 1, 0), (0, 0, 1), (1, -1, 0)])
    size = v.a.shape[i]
    a = lax.pad(v.a, 0.5, [how if j == i else (0, 0, 0) for j in range(v.a.ndim)])
    if i != v.axis:
        return v._replace(a=a)
    a = jnp.concatenate([a] * 3, i)  # Cut to the batch size.
    return v._replace(a=lax.slice_in_dim(a, 0, size, axis=i))


@unary
def sliced(v, n):
    i, stride = n.axis(v), 1 + n.below(2)
    size = v.a.shape[i]
    if i == v.axis:
        return v.after(lambda a: a * lax.slice_in_dim(a, size - 1, size, axis=i))
    return v.after(lambda a: lax.slice_in_dim(a, size // 3, size, stride, i))


@unary
def concatenated(v, n):
    i = n.axis(v)
    if i == v.axis:
        size = v.a.shape[i]
        first, last = (lax.slice_in_dim(v.a, *part, axis=i) for part in ((0, 1), (1, size)))
        return v._replace(a=jnp.concatenate([last, first], i) * v.a)
    return v.after(lambda a: jnp.concatenate([jnp.cos(a), a], i))


@unary
def split(v, n):
    i = n.axis(v)
    first, second = jnp.split(v.a, [v.a.shape[i] // 2], i)
    if i == v.axis:
        return v._replace(a=jnp.concatenate([second, first], i))
    return v._replace(a=second)


@unary
def unstacked(v, n):
    i = n.axis(v)
    return without_axis(
        v, i, lambda a, i: sum(k * part for k, part in enumerate(jnp.unstack(a, axis=i)))
    )


@unary
def top_k(v, n):
    i = n.axis(v)
    a = jnp.moveaxis(
        lax.top_k(jnp.moveaxis(v.a, i, -1), max(1, v.a.shape[i] - (i != v.axis)))[0], -1, i
    )
    return v._replace(a=a)


@unary
def rfft(v, n):
    i = n.axis(v)
    if i == v.axis:
        return v.after(lambda a: jnp.fft.ifft(a + 0j, axis=i).real)
    return v.after(lambda a: jnp.abs(jnp.fft.rfft(a, axis=i) + 3))


@unary
def gather(v, n):
    i = n.axis(v)
    size = v.a.shape[i]
    numbers = np.array([n.below(size) for _ in range(size if i == v.axis else 3)])
    return v.after(lambda a: jnp.take(a, numbers, i))


@unary
def gather_by_data(v, n):
    i = n.axis(v)
    return v.after(lambda a: jnp.take_along_axis(a, jnp.argsort(jnp.sin(3 * a), i), i))


@unary
def scatter(v, n):
    """Each row's elements go to positions that depend on the row."""
    method = n.choose(["add", "set", "max", "min", "multiply"])

    def row(r):
        numbers = jnp.argsort(jnp.cos(7 * r.ravel()))
        return getattr(jnp.ones(r.size + 1).at[numbers], method)(r.ravel())

    if v.axis is None:
        return Value(row(v.a), None)
    return Value(jax.vmap(row, v.axis)(v.a), 0)


@unary
def segment_sum(v, n):
    i = n.axis(v)
    numbers = jnp.arange(v.a.shape[i]) % 2
    a = jax.ops.segment_sum(jnp.moveaxis(v.a, i, 0), numbers, v.a.shape[i])
    return v._replace(a=jnp.moveaxis(a, 0, i))


@unary
def linear_algebra(v, n):
    """Of a positive definite matrix for each row, or of the batch."""
    f = n.choose([
        jnp.linalg.cholesky,
        jnp.linalg.inv,
        lambda m: jnp.linalg.eigh(m + jnp.diag(jnp.arange(2.0, 2 * len(m) + 2, 2)))[0],
        lambda m: jnp.linalg.slogdet(m)[1],
        lambda m: jnp.linalg.solve(m, m[0]),
        lambda m: jax.scipy.linalg.solve_triangular(m, m[:, 0], lower=True),
        lambda m: jnp.linalg.qr(m)[1],
        lambda m: jnp.linalg.svd(m + jnp.diag(jnp.arange(2.0, 2 * len(m) + 2, 2)), compute_uv=False),
        lambda m: jax.scipy.linalg.lu(m + 3 * jnp.eye(len(m)))[1],
        jax.scipy.linalg.expm,
    ])  # fmt: skip

    def row(r):
        r = jnp.tanh(r.ravel()[:3])
        return f(jnp.outer(r, r) + jnp.eye(len(r)))

    if v.axis is None:
        return Value(row(v.a), None)
    if n.mixes:
        rows = jnp.tanh(v.rows)
        return Value(rows @ jnp.linalg.inv(rows.T @ rows + jnp.eye(rows.shape[1])), 0)
    return Value(jax.vmap(row, v.axis)(v.a), 0)


@unary
def gradient(v, n):
    """The gradient of the sum of a function of each row."""
    return v.after(jax.grad(lambda a: (jnp.sin(a) * a).sum()))


@unary
def penalty(v, n):
    if v.axis is None:
        return v.after(jax.grad(lambda a: jnp.tanh(a).prod()))
    return v.after(jax.vmap(jax.grad(lambda a: jnp.tanh(a).prod()), v.axis, v.axis))


@unary
def tangent(v, n):
    return v.after(lambda a: jax.jvp(lambda b: jnp.sin(b) * b, (a,), (jnp.cos(a),))[1])


@unary
def branches(v, n):
    """Branches chosen by a constant, by each row, or by the batch."""
    if v.axis is None or n.mixes:
        return v.after(lambda a: lax.cond(a.sum() > 0, jnp.sin, jnp.cos, a))
    if n.below(2):
        return v.after(lambda a: lax.switch(n.below(3), [jnp.sin, jnp.cos, jnp.tanh], a))
    return v.after(jax.vmap(lambda r: lax.cond(r.sum() > 0, jnp.sin, jnp.cos, r), v.axis, v.axis))


@unary
def loops(v, n):
    if n.mixes:
        return v.after(
            lambda a: (
                a
                + lax.while_loop(
                    lambda c: c.max() < 2, lambda c: 1 + 2 * jnp.abs(c), lax.stop_gradient(a)
                )
            )
        )
    if n.below(2) or v.axis is None:
        return v.after(lambda a: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * (i + 1) + a, a))

    def row(r):
        return lax.while_loop(lambda c: c.max() < 2, lambda c: 1 + 2 * jnp.abs(c), r)

    return v.after(lambda a: a + jax.vmap(row, v.axis, v.axis)(lax.stop_gradient(a)))


@unary
def custom_rules(v, n):
    """Rules that act along an axis in the forward or backward pass."""
    i, where = n.axis(v), n.below(4)

    def centered(a):
        return a - a.mean(i, keepdims=True)

    if where < 2:

        @jax.custom_jvp
        def f(a):
            return jnp.sin(a)

        f.defjvp(lambda p, t: (centered(p[0]), t[0]) if where else (p[0], centered(t[0])))
        return v.after(f)

    @jax.custom_vjp
    def g(a):
        return jnp.sin(a)

    if where == 2:
        g.defvjp(lambda a: (centered(a), a), lambda a, ct: (ct * a,))
    else:
        g.defvjp(
            lambda a: (jnp.cos(a), a.mean(i, keepdims=True)), lambda m, ct: (centered(ct) * m,)
        )
    return v.after(g)


# Operations on two values.


@binary
def arithmetic(v, w, n):
    f = n.choose([
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b: a / (1 + jnp.square(b)),
        jnp.maximum,
        jnp.minimum,
        lambda a, b: jnp.power(jnp.abs(a) + 1, jnp.tanh(b)),
        lambda a, b: jnp.arctan2(a, 1 + jnp.square(b)),
        lambda a, b: jnp.where(a > b, a, 2 * b),
        lambda a, b: lax.clamp(jnp.broadcast_to(-jnp.abs(b), a.shape), a, jnp.full_like(a, 2)),
        jnp.hypot,
        jnp.logaddexp,
        lambda a, b: a * ((a < b) ^ (a > 0)),
    ])  # fmt: skip
    other = fit(w, v)
    if n.mixes and v.axis is not None and w.axis is not None:
        other = jnp.flip(other, v.axis)
    result = f(v.a, other)
    return Value(result, v.axis if v.axis is not None else (0 if result.ndim > v.a.ndim else None))


@binary
def concatenate(v, w, n):
    i = n.choose([i for i in range(v.a.ndim) if i != v.axis])
    if v.axis is None and w.axis is not None:
        return v
    other = jnp.broadcast_to(fit(w, v), v.a.shape)
    return v._replace(a=jnp.concatenate([v.a, other], i))


@binary
def einsum(v, w, n):
    """Products of rows, or of all rows with all."""
    a, b = v.rows, w.rows
    b = b[:, np.arange(a.shape[1]) % b.shape[1]]
    if v.axis is None or w.axis is None:
        return Value(a * b, 0 if v.axis is not None or w.axis is not None else None)
    if n.mixes:
        return Value(
            n.choose(
                [
                    lambda: a @ (b.T @ a),
                    lambda: jax.nn.softmax(a @ b.T) @ a,
                    lambda: (a * b) @ b.T @ b,
                ]
            )(),
            0,
        )
    spec = n.choose(["bi,bi->b", "bi,bj->bij", "bi,bj->bji", "bi,bj->bi", "bi,bi->bi"])
    return Value(jnp.einsum(spec, a[:, :6], b[:, :6]), 0)


def with_parameter(f):
    """Register an operation of a value and a parameter."""
    return binary(functools.wraps(f)(lambda v, w, n: f(v, w, n) if w.axis is None else v))


@with_parameter
def dense(v, w, n):
    i = n.choose([i for i in range(v.a.ndim) if i != v.axis])
    kernel = matrix(w, v.a.shape[i], 1 + n.below(4))
    a = jnp.tensordot(v.a, kernel, (i, 0))
    return Value(a, None if v.axis is None else v.axis - (i < v.axis))


@with_parameter
def dense_on_the_left(v, w, n):
    i = n.choose([i for i in range(v.a.ndim) if i != v.axis])
    a = jnp.tensordot(matrix(w, 3, v.a.shape[i]), v.a, (1, i))
    return Value(a, None if v.axis is None else v.axis + (i > v.axis))


@with_parameter
def dense_over_merged_rows(v, w, n):
    if v.axis is None:
        return v
    rows = v.rows
    if rows.shape[1] % 2:
        rows = jnp.concatenate([rows, rows], 1)
    h = rows.reshape(-1, 2) @ matrix(w, 2, 3)
    return Value(jnp.tanh(h).reshape(len(rows), -1), 0)


@with_parameter
def convolution(v, w, n):
    rows = v.rows
    channels = 2 if rows.shape[1] % 2 == 0 else 1
    x = rows.reshape(len(rows), channels, -1)
    groups = n.choose([1, channels])
    kernel = matrix(w, 2 * channels // groups, 4 * channels).reshape(
        4 // groups * groups, channels // groups, -1
    )[..., :3]
    layout = n.choose(
        [("NCW", "OIW", "NCW"), ("NWC", "WIO", "NWC"), ("NCW", "OIW", "NWC"), ("WNC", "IOW", "WCN")]
    )
    x = lax.transpose(x, ["NCW".index(c) for c in layout[0]])
    kernel = lax.transpose(kernel, ["OIW".index(c) for c in layout[1]])
    options = n.choose([{}, {"rhs_dilation": (2,)}, {"lhs_dilation": (2,)}])
    a = lax.conv_general_dilated(
        x, kernel, (1 + n.below(2),), "SAME" if not options else [(2, 2)],
        dimension_numbers=layout, feature_group_count=groups, **options,
    )  # fmt: skip
    return Value(a, None if v.axis is None else layout[2].index("N"))


@with_parameter
def embedding(v, w, n):
    """Rows of a parameter, by integers that follow from the data."""
    table = matrix(w, 5, 3)
    numbers = jnp.argsort(jnp.sin(5 * v.rows), 1)[:, :4] % 5
    method = n.below(3)
    if method == 0:
        h = table[numbers]
    elif method == 1:
        h = jax.nn.one_hot(numbers, 5) @ table
    else:
        h = jax.vmap(lambda i: table[i])(numbers)
    return Value(h, 0) if v.axis is not None else Value(h[0], None)


@with_parameter
def weighted_loop(v, w, n):
    """A scan or loop over slices of a parameter."""
    kernels = w.a.reshape(-1)[np.arange(12) % w.a.size].reshape(3, 4)
    h = v.rows[:, np.arange(4) % v.rows.shape[1]]
    if n.below(2):
        h = lax.scan(lambda h, k: (jnp.tanh(h * k + h[:, ::-1]), None), h, kernels)[0]
    else:
        h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h * kernels[i]), h)
    return Value(h, 0) if v.axis is not None else Value(h[0], None)


@with_parameter
def normalized(v, w, n):
    kernel = matrix(w, 3, v.rows.shape[1])
    h = v.rows @ (kernel / jnp.sqrt(1 + jnp.square(kernel).sum(0))).T
    return Value(h, 0) if v.axis is not None else Value(h[0], None)


WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda a: lax.scan(lambda c, _: (c, f(c)), a, length=2)[1][1],
    "cond": lambda f: lambda a: lax.cond(True, f, f, a),
    "named": jax.named_scope("layer"),
    "vmap": None,
}


def wrapped(name, v, operation):
    """Apply an operation inside a transformation."""
    if name == "vmap" and v.axis is not None:
        result = jax.vmap(lambda r: operation(Value(r, None)).a, v.axis)(v.a)
        return Value(result, 0)
    axes = []

    def f(a):
        result = operation(Value(a, v.axis))
        axes.append(result.axis)
        return result.a

    a = (WRAPPERS[name] or (lambda f: f))(f)(v.a)
    return Value(a, axes[-1])


class Step(NamedTuple):
    """One step of a program.

    Attributes:
      operation: Name of the operation.
      wrapper: Name of the transformation around it.
      mixes: Whether it may act along the batch axis.
      numbers: Choose operands, axes and sizes.
    """

    operation: str
    wrapper: str
    mixes: bool
    numbers: tuple[int, ...]


def apply_unary(step, v):
    return UNARY[step.operation](v, Numbers(step.numbers[1:], step.mixes))


def apply_binary(step, w, v):
    return BINARY[step.operation](v, w, Numbers(step.numbers[1:], step.mixes))


def run(program, params, x, z, labels, raw_keys):
    """The losses of a program, [batch]."""
    noise = jax.vmap(lambda k: jax.random.normal(jax.random.wrap_key_data(k), (2,)))(raw_keys)
    weights = [Value(jnp.asarray(params[name]), None) for name in sorted(params)]
    x, z = jnp.asarray(x), jnp.asarray(z)
    values = [Value(x, 0), Value(z, 0), Value(jnp.sin(labels * 1.0), 0), Value(noise, 0)]
    for step in program:
        n = Numbers(step.numbers, step.mixes)
        # One of the latest values, so that programs are deep.
        v = values[-1 - n.below(min(3, len(values)))]
        w = n.choose([*weights, *weights, *values])
        wrapper = step.wrapper
        if step.operation in BINARY:
            wrapper = "plain" if wrapper == "vmap" and w.axis is not None else wrapper
            operation = functools.partial(apply_binary, step, w)
        else:
            operation = functools.partial(apply_unary, step)
        values.append(limited(wrapped(wrapper, v, operation)))
    losses = jnp.zeros(len(x))
    for k, v in enumerate(values[4:][-3:]):
        h = v.rows * fit(weights[k % len(weights)], Value(v.rows, 0))
        losses += (jnp.sin(h) + h).sum(1)
    return losses


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


PARAMS = {"w": normal(0, 4, 4), "v": normal(1, 3), "s": np.float32(0.6)}
BATCH = (
    normal(2, B, 3, 4),
    normal(3, B, 5),
    np.array([[0, 3, 1], [2, 2, 4], [1, 0, 0]]),
    np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), B))),
)


NUMBERS = st.lists(st.integers(0, 11), min_size=6, max_size=6).map(tuple)


def steps(mixes):
    """Strategy for steps. Most of them are not elementwise."""
    structural = sorted((set(UNARY) - set(ELEMENTWISE)) | set(BINARY))
    operations = st.one_of(*[st.sampled_from(structural)] * 3, st.sampled_from(sorted(ELEMENTWISE)))
    wrappers = st.sampled_from(["plain"] * 6 + sorted(WRAPPERS))
    return st.builds(Step, operations, wrappers, mixes, NUMBERS)


ROWWISE_PROGRAMS = st.lists(steps(st.just(False)), min_size=3, max_size=7)
ANY_PROGRAMS = st.lists(steps(st.sampled_from([False, False, True])), min_size=2, max_size=5)
