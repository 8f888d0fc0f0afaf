"""Functions of every primitive that has a row in `fnet.jaxpr.axes`, with random operands.

A case is ``(function, (values, shape), ...)``: each operand has one shape, and values from a
function of a NumPy generator and a shape. `equations` traces the functions and keeps the equations
of one primitive, with operands from several draws.
"""

import contextlib
import functools
import gc
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn, Primitive, primitives
from jax.sharding import AxisType, PartitionSpec

import fnet.backward_pass  # its primitive
from fnet.jaxpr import called_jaxpr, evaluate, inner_jaxprs, interpret

with contextlib.suppress(ImportError):  # JAX 0.12 has none.
    importlib.import_module("jax.experimental.shard_alike")

PRIMITIVES = {p.name: p for p in gc.get_objects() if isinstance(p, Primitive)}
"""By name. Many have no public function."""


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def positive(rng, *shape):
    return rng.uniform(1.1, 3, shape).astype(np.float32)


def fractions(rng, *shape):
    return rng.uniform(0.1, 0.9, shape).astype(np.float32)


def integers(rng, *shape):
    return rng.integers(0, 3, shape).astype(np.int32)


def counts(rng, *shape):
    return rng.integers(1, 4, shape).astype(np.float32)


def bools(rng, *shape):
    return rng.integers(0, 2, shape).astype(bool)


def complexes(rng, *shape):
    return (floats(rng, *shape) + 1j * floats(rng, *shape)).astype(np.complex64)


def definite(rng, *shape):
    """Symmetric positive definite matrices."""
    a = floats(rng, *shape)
    return a @ np.swapaxes(a, -1, -2) + shape[-1] * np.eye(shape[-1], dtype=np.float32)


def keys(rng, *shape):
    return jax.random.split(jax.random.key(int(rng.integers(100))), shape)


def raw_keys(rng, *shape):
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


# (function, operands as (values, shape of one example)).
WINDOW = {"window_dimensions": (1, 2, 1), "window_strides": (1, 1, 1), "padding": "SAME"}
IMAGE = (1, 6, 2)
M = (2, 3, 3)

CASES = {
    "add": [
        (lax.add, (floats, (2, 4)), (floats, (2, 4))),
        (lax.add, (floats, (1, 4)), (floats, (1, 4))),
        (lax.add, (floats, ()), (floats, ())),
        (lambda a: primitives.add_p.bind(a, np.ones((1, 4), np.float32)), (floats, (1, 4))),
        (lambda a: a + 2.0, (floats, (2, 4))),
        (lambda a: a + 2.0, (floats, ())),
    ],
    "add_any": [(primitives.add_jaxvals_p.bind, (floats, (2, 4)), (floats, (2, 4)))],
    "bitcast_convert_type": [
        (lambda a: lax.bitcast_convert_type(a, jnp.int32), (floats, (2, 4))),
        (lambda a: lax.bitcast_convert_type(a, jnp.int8), (floats, (2, 4))),
    ],
    "broadcast_in_dim": [
        (lambda a: lax.broadcast_in_dim(a, (4, 2, 3), (1, 2)), (floats, (2, 3))),
        (lambda a: lax.broadcast_in_dim(a, (4, 2, 3), (1, 2)), (floats, (1, 3))),
        (lambda a: lax.broadcast_in_dim(a, (4, 2), ()), (floats, ())),
    ],
    "cholesky": [(lax.linalg.cholesky_p.bind, (definite, M))],
    "clamp": [
        (lax.clamp, (floats, (2, 4)), (floats, (2, 4)), (positive, (2, 4))),
        (lax.clamp, (floats, ()), (floats, (2, 4)), (positive, ())),
        (lambda a: lax.clamp(-0.5, a, 0.5), (floats, ())),
    ],
    "concatenate": [
        (lambda a, b: lax.concatenate([a, b], 1), (floats, (2, 3)), (floats, (2, 1))),
    ],
    "conv_general_dilated": [
        (
            lambda a, w: lax.conv_general_dilated(a, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
            (floats, (2, 5, 2)), (floats, (3, 2, 4)),
        ),
        (
            lambda a, w: lax.conv_general_dilated(
                a, w, (2,), "VALID", dimension_numbers=("CWN", "OWI", "WNC"), feature_group_count=2
            ),
            (floats, (2, 5, 2)), (floats, (4, 3, 1)),
        ),
    ],
    "cumlogsumexp": [(lambda a: lax.cumlogsumexp(a, 1), (floats, (2, 4)))],
    "cummax": [(lambda a: lax.cummax(a, 1), (floats, (2, 4)))],
    "cummin": [(lambda a: lax.cummin(a, 1), (floats, (2, 4)))],
    "cumprod": [(lambda a: lax.cumprod(a, 0), (floats, (2, 4)))],
    "cumsum": [(lambda a: lax.cumsum(a, 0, reverse=True), (floats, (2, 4)))],
    "dot_general": [
        (
            functools.partial(lax.dot_general, dimension_numbers=dims), (floats, a), (floats, b)
        )
        for dims, a, b in [
            ((((1,), (0,)), ((), ())), (2, 4), (4, 3)),
            ((((0,), (1,)), ((), ())), (4, 2), (3, 4)),
            ((((2,), (2,)), ((0,), (0,))), (2, 3, 4), (2, 1, 4)),
            ((((0,), (1,)), ((2,), (0,))), (4, 3, 2), (2, 4, 1)),
            ((((0, 2), (1, 2)), ((1, 3), (3, 0))), (2, 3, 4, 1), (1, 2, 4, 3)),
            ((((), ()), ((), ())), (2,), (3,)),
        ]
    ],
    "dynamic_slice": [
        (lambda a, i: lax.dynamic_slice(a, (0, i), (2, 2)), (floats, (2, 5)), (integers, ())),
        (lambda a, i: lax.dynamic_slice(a, (i, 0), (1, 5)), (floats, (2, 5)), (integers, ())),
    ],
    "dynamic_update_slice": [
        (
            lambda a, b, i: lax.dynamic_update_slice(a, b, (0, i)),
            (floats, (2, 5)), (floats, (2, 2)), (integers, ()),
        ),
        (
            lambda a, b, i: lax.dynamic_update_slice(a, b, (i, 0)),
            (floats, (2, 5)), (floats, (1, 5)), (integers, ()),
        ),
    ],
    "eigh": [(lambda a: lax.linalg.eigh(a, symmetrize_input=False), (definite, M))],
    "fft": [
        (lambda a: lax.fft(a, "fft", (4,)), (complexes, (2, 3, 4))),
        (lambda a: lax.fft(a, "rfft", (3, 4)), (floats, (2, 3, 4))),
    ],
    "gather": [
        (lambda a, i: a[i], (floats, (5, 3)), (integers, (2,))),
        (lambda a, i: a[:, i], (floats, (2, 5, 3)), (integers, (4,))),
        (lambda a, i: a[i, :, i], (floats, (5, 2, 4)), (integers, (4,))),
        (lambda a, i: jnp.take_along_axis(a, i, 1), (floats, (2, 5)), (integers, (2, 3))),
        (lambda a, i: jax.vmap(lambda a, i: a[i])(a, i), (floats, (2, 5, 3)), (integers, (2, 4))),
        (lambda a, i: jax.vmap(lambda a, i: a[i], (1, 1))(a, i), (floats, (5, 2)), (integers, (4, 2))),
    ],
    "lu": [(lax.linalg.lu, (floats, M))],
    "pad": [
        (lambda a: lax.pad(a, 0.5, ((0, 0, 0), (1, -1, 1))), (floats, (2, 4))),
        (lambda a, b: lax.pad(a, b, ((1, 0, 0), (0, 0, 0))), (floats, (2, 4)), (floats, ())),
    ],
    "qr": [(lambda a: lax.linalg.qr(a, full_matrices=False), (floats, (2, 4, 3)))],
    "random_bits": [
        (lambda k: jax.random.bits(k, (2, 3)), (keys, ())),
        (lambda k: jax.vmap(lambda k: jax.random.bits(k, (3,)))(k), (keys, (2,))),
    ],
    "random_unwrap": [(jax.random.key_data, (keys, (2, 2)))],
    "random_wrap": [
        (lambda a: jax.vmap(jax.random.bits)(jax.random.wrap_key_data(a)), (raw_keys, (3, 2))),
    ],
    "reduce_window_max": [
        (lambda a: lax.reduce_window(a, -jnp.inf, lax.max, **WINDOW), (floats, IMAGE)),
    ],
    "reduce_window_sum": [
        (lambda a: lax.reduce_window(a, 0.0, lax.add, **WINDOW), (floats, IMAGE)),
        (
            lambda a: lax.reduce_window(
                a, 0.0, lax.add, (1, 2, 1), (1, 2, 1), ((0, 0), (1, 0), (0, 0)),
                base_dilation=(1, 2, 1), window_dilation=(1, 2, 1),
            ),
            (floats, IMAGE),
        ),
    ],
    "reshape": [
        (lambda a, shape=shape: lax.reshape(a, shape), (floats, old))
        for old, shape in [
            ((2, 4), (8,)), ((2, 6), (2, 2, 3)), ((6, 2), (2, 3, 2)), ((2, 3, 4), (6, 4)),
            ((2, 3, 4), (4, 6)), ((1, 4), (4, 1)), ((1,), ()), ((), (1, 1)), ((4, 1), (1, 4)),
        ]
    ],
    "rev": [(lambda a: lax.rev(a, (1,)), (floats, (2, 4)))],
    "scatter": [
        (lambda a, b: a.at[:, 1].set(b), (floats, (2, 4)), (floats, (2,))),
        (lambda a, i, b: a.at[i].set(b, unique_indices=True), (floats, (5, 3)), (integers, (1,)), (floats, (1, 3))),
    ],
    "select_and_scatter_add": [
        (
            jax.grad(lambda a: (jnp.sin(lax.reduce_window(a, -jnp.inf, lax.max, **WINDOW))).sum()),
            (floats, IMAGE),
        ),
    ],
    "select_n": [
        (lax.select, (bools, (2, 4)), (floats, (2, 4)), (floats, (2, 4))),
        (lax.select_n, (bools, ()), (floats, (2, 4)), (floats, (2, 4))),
        (lax.select_n, (bools, ()), (floats, ()), (floats, ())),
        (lambda which, a: primitives.select_n_p.bind(which, a, 1.0), (bools, ()), (floats, ())),
    ],
    "sharding_constraint": [
        (
            lambda a: lax.with_sharding_constraint(a, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
            (floats, (2, 4)),
        )
    ],
    "slice": [
        (lambda a: lax.slice(a, (0, 1), (2, 4), (1, 2)), (floats, (2, 5))),
        (lambda a: lax.slice(a, (0, 0), (2, 5), (2, 1)), (floats, (2, 5))),
    ],
    "sort": [
        (lambda a: lax.sort(a, dimension=1), (floats, (2, 4))),
        (lambda a, b: lax.sort((a, b), dimension=0, num_keys=1), (floats, (4, 2)), (integers, (4, 2))),
    ],
    "split": [(lambda a: lax.split(a, (1, 3), 1), (floats, (2, 4)))],
    "squeeze": [
        (lambda a: lax.squeeze(a, (1,)), (floats, (2, 1, 3))),
        (lambda a: lax.squeeze(a, (0, 1)), (floats, (1, 1))),
    ],
    "stop_gradient": [(lax.stop_gradient, (floats, (2, 4)))],
    "svd": [(lambda a: lax.linalg.svd(a, compute_uv=False), (floats, (2, 4, 3)))],
    "tile": [(lambda a: lax.tile(a, (1, 2)), (floats, (2, 3)))],
    "top_k": [(lambda a: lax.top_k(a, 2), (floats, (2, 4)))],
    "transpose": [(lambda a: lax.transpose(a, (2, 0, 1)), (floats, (2, 3, 4)))],
    "triangular_solve": [
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), (definite, M), (floats, (2, 3, 1))),
    ],
    "unstack": [(lambda a: jnp.unstack(a, axis=1), (floats, (2, 3, 4)))],
    "stack": [(lambda a, b: jnp.stack([a, b], 1), (floats, (2, 3)), (floats, (2, 3)))],
}  # fmt: skip

CASES |= {
    f"scatter-{name}": [
        (
            lambda a, i, b, method=method: getattr(a.at[:, i], method)(b),
            (floats, (2, 4)), (integers, (3,)), (floats, (2, 3)),
        ),
        (
            lambda a, i, b, method=method: jax.vmap(lambda a, i, b: getattr(a.at[i], method)(b))(a, i, b),
            (floats, (2, 4)), (integers, (2, 3)), (floats, (2, 3)),
        ),
    ]
    for name, method in {"add": "add", "max": "max", "min": "min", "mul": "multiply"}.items()
}  # fmt: skip
CASES |= {
    name: [(lambda a, p=primitive: p.bind(a, axes=(1,), axis_index_groups=None), (floats, (2, 4)))]
    for name, primitive in [
        ("psum", primitives.psum_p), ("pmax", primitives.pmax_p), ("pmin", primitives.pmin_p)
    ]
}  # fmt: skip
CASES |= {
    name: [(lambda a, f=f: f(a, axes=(1,)), (values, (2, 4, 3)))]
    for name, f, values in [
        ("reduce_and", lax.reduce_and, bools),
        ("reduce_max", lax.reduce_max, floats),
        ("reduce_min", lax.reduce_min, floats),
        ("reduce_or", lax.reduce_or, bools),
        ("reduce_prod", lax.reduce_prod, floats),
        ("reduce_sum", lax.reduce_sum, floats),
        ("reduce_xor", lax.reduce_xor, integers),
    ]
}
CASES |= {
    "argmax": [(lambda a: lax.argmax(a, 1, jnp.int32), (floats, (2, 4, 3)))],
    "argmin": [(lambda a: lax.argmin(a, 0, jnp.int32), (floats, (2, 4, 3)))],
}

UNARY = {
    floats: "abs asinh atan bessel_i0e bessel_i1e ceil cos cosh erf erfc exp exp2 expm1 floor "
    "is_finite logistic neg round sign sin sinh square tan tanh",
    positive: "acosh cbrt digamma lgamma log log1p rsqrt sqrt",
    fractions: "acos asin atanh erf_inv",
    integers: "clz not population_count",
    complexes: "conj imag real",
}
BINARY = {
    floats: "atan2 complex div eq ge gt le lt max min mul ne nextafter sub",
    positive: "igamma igamma_grad_a igammac pow rem zeta",
    integers: "and or shift_left shift_right_arithmetic shift_right_logical xor",
}
CONVERSIONS = {
    "convert_element_type": lambda a: lax.convert_element_type(a, jnp.int32),
    "copy": primitives.copy_p.bind,
    "integer_pow": lambda a: lax.integer_pow(a, 3),
    "name": lambda a: checkpoint_name(a, "h"),
    "reduce_precision": lambda a: lax.reduce_precision(a, 5, 4),
}


def elementwise_function(name):
    names = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}
    return getattr(lax, names.get(name, name))


CASES |= {
    name: [(elementwise_function(name), *[(values, (2, 4))] * arity)]
    for arity, table in enumerate((UNARY, BINARY), start=1)
    for values, names in table.items()
    for name in names.split()
}
CASES |= {name: [(f, (floats, (2, 4)))] for name, f in CONVERSIONS.items()}
CASES["polygamma"] = [(lax.polygamma, (counts, (2, 4)), (positive, (2, 4)))]


# Further primitives, and parameters that the rows look at.


def bind(name, **params):
    """A primitive without a public function."""
    return functools.partial(PRIMITIVES[name].bind, **params) if name in PRIMITIVES else None


def seeds(rng, *shape):
    return rng.integers(0, 100, shape).astype(np.uint32)


def pivots(rng, *shape):
    return np.broadcast_to(np.array([2, 1, 3], np.int32)[: shape[-1]], shape)


def half_sum(x, y):
    return x + y / 2


POOL = {"window_dimensions": (1, 2), "window_strides": (1, 1), "padding": "SAME"}


def max_pool(a):
    return lax.reduce_window(a, -jnp.inf, lax.max, **POOL)


PLANE = (floats, (2, 4))
MATRICES = {
    "eig": lax.linalg.eig,
    "geqrf": bind("geqrf"),
    "hessenberg": lax.linalg.hessenberg,
    "schur": lax.linalg.schur,
    "tridiagonal": lambda a: lax.linalg.tridiagonal(a, lower=True),
}
FURTHER_CASES = {
    "approx_top_k": [(lambda a: lax.approx_max_k(a, 2, reduction_dimension=0), (floats, (4, 3)))],
    "cholesky_update": [(bind("cholesky_update"), (definite, (3, 3)), (floats, (3,)))],
    "device_put": [(jax.device_put, PLANE)],
    "fnet_constant": [(fnet.backward_pass.constant, PLANE)],
    "fnet_finish_together": [(fnet.backward_pass.finish_together, PLANE, (floats, (3, 2)), (floats, ()))],
    "householder_product": [(lax.linalg.householder_product, (floats, M), (floats, (2, 3)))],
    "iota": [
        (lambda: lax.broadcasted_iota(jnp.float32, (2, 3, 4), 1),),
        (lambda: lax.iota(jnp.int32, 3),),
    ],
    "layout_constraint": [(lambda a: with_layout_constraint(a, Layout((1, 0))), PLANE)],
    "lu_pivots_to_permutation": [
        (lambda a: lax.linalg.lu_pivots_to_permutation(a, 4), (pivots, (2, 3))),
    ],
    "optimization_barrier": [(lambda *a: lax.optimization_barrier(a), PLANE, (floats, ()), (integers, (3,)))],
    "ormqr": [(bind("ormqr", left=True, transpose=False), (floats, M), (floats, (2, 3)), (floats, (2, 3, 4)))],
    "random_clone": [(jax.random.clone, (keys, (2, 3)))],
    "random_fold_in": [
        (bind("random_fold_in"), (keys, (2, 3)), (seeds, (2, 3))),
        (bind("random_fold_in"), (keys, ()), (seeds, (2,))),
        (bind("random_fold_in"), (keys, (2,)), (seeds, ())),
    ],
    "random_seed": [(lambda a: jax.vmap(jax.random.key)(a), (seeds, (3,)))],
    "random_split": [
        (lambda k: jax.random.split(k, (2, 3)), (keys, ())),
        (lambda k: jax.vmap(lambda k: jax.random.split(k, 4))(k), (keys, (3,))),
    ],
    "reduce": [
        (lambda a: lax.reduce(a, 0.0, half_sum, (1,)), (floats, (2, 3, 4))),
        (
            lambda a, b: lax.reduce((a, b), (0.0, 1.0), lambda x, y: (half_sum(x[0], y[0]), x[1] * y[0]), (0,)),
            (floats, (2, 3)), (floats, (2, 3)),
        ),
    ],
    "reduce_window": [(lambda a: lax.reduce_window(a, 0.0, half_sum, **POOL), PLANE)],
    "reduce_window_min": [(lambda a: lax.reduce_window(a, jnp.inf, lax.min, **POOL), PLANE)],
    "regularized_incomplete_beta": [(lax.betainc, *[(fractions, (2, 4))] * 3)],
    "scatter-sub": [
        (lambda a, i, b: a.at[:, i].subtract(b), PLANE, (integers, (3,)), (floats, (2, 3))),
        (lambda a, b: a.at[:, 1:3].subtract(b), (floats, (2, 4, 3)), (floats, (2, 2, 3))),
    ],
    "select_and_gather_add": [(lambda a, t: jax.jvp(max_pool, (a,), (t,))[1], PLANE, PLANE)],
    "shard_alike": [(bind("shard_alike"), PLANE, PLANE)],
    "symmetric_product": [(lax.linalg.symmetric_product, (floats, (2, 3, 4)), (floats, (2, 3, 3)))],
    "threefry2x32": [(bind("threefry2x32"), *[(raw_keys, (2, 3))] * 4)],
    "tie": [(bind("tie"), (floats, (3,)), PLANE), (bind("tie"), PLANE, (floats, ()))],
    "tridiagonal_solve": [
        (
            lambda a, b, c, d: lax.linalg.tridiagonal_solve(a, b + 4, c, d),
            *[(positive, (2, 3))] * 3, (floats, (2, 3, 4)),
        )
    ],
    **{name: [(bind(name), PLANE, PLANE)] for name in ("eq_to", "le_to", "lt_to")},
    "log2": [(bind("log2", accuracy=None), (positive, (2, 4)))],
    "mulhi": [(bind("mulhi"), (raw_keys, (2, 4)), (raw_keys, (2, 4)))],
    "one_minus_square": [(bind("one_minus_square"), PLANE)],
    "polynomial": [(bind("polynomial"), *[PLANE] * 4)],
    **{name: [(f, (floats, M))] for name, f in MATRICES.items()},
    # Parameters that rows look at.
    "add": [(bind("add"), (floats, (3, 4)), (floats, (1, 4)))],
    "argmax": [(lambda a: lax.argmax(a, 0, jnp.int32), (floats, (4, 3)))],
    "broadcast_in_dim": [(lambda a: lax.broadcast_in_dim(a, (2, 3), (1,)), (floats, (1,)))],
    "concatenate": [
        (lambda a, b: lax.concatenate([a, b, a], 0), (floats, (2, 3)), (floats, (1, 3))),
    ],
    "conv_general_dilated": [
        (
            lambda a, w: lax.conv_general_dilated(
                a, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), batch_group_count=2
            ),
            (floats, (4, 5, 3)), (floats, (2, 3, 4)),
        ),
        (
            lambda a, w: lax.conv_general_dilated(
                a, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
            ),
            (floats, (2, 3, 4, 5)), (floats, (6, 3, 1, 2)),
        ),
    ],
    "convert_element_type": [
        (lambda a: lax.convert_element_type(a, jnp.bfloat16), PLANE),
        (lambda a: lax.convert_element_type(a, jnp.float32), (integers, (2, 4))),
        (lambda a: lax.convert_element_type(a, jnp.float8_e4m3fn), PLANE),
    ],
    "div": [
        (lambda a: lax.div(a, 4.0), PLANE), (lambda a: lax.div(2.0, a), PLANE),
        (lax.div, (positive, (3, 1)), (positive, (3, 1))),
    ],
    "dynamic_slice": [
        (lambda a, i: lax.dynamic_slice(a, (i, 0, 0), (2, 3, 4)), (floats, (5, 3, 4)), (integers, ())),
    ],
    "dynamic_update_slice": [
        (
            lambda a, b, i: lax.dynamic_update_slice(a, b, (0, i, 0)),
            (floats, (2, 5, 3)), (floats, (2, 1, 3)), (integers, ()),
        ),
    ],
    "fft": [
        (lambda a: lax.fft(a, "irfft", (4,)), (complexes, (2, 3))),
        (lambda a: lax.fft(a, "ifft", (3,)), (complexes, (3,))),
    ],
    "gather": [
        (lambda a, i: a.at[i].get(mode="fill", fill_value=7.0), (floats, (2, 3)), (integers, (4,))),
        (lambda a, i: a.at[i].get(mode="fill", fill_value=0.0), (floats, (2, 3)), (integers, (4,))),
        (lambda a, i: a.at[i].get(mode="clip"), (floats, (2, 3)), (integers, (4, 2))),
        (lambda a, i: a[:, i, :2], (floats, (2, 5, 3)), (integers, (4,))),
        (lambda a, i: jnp.take_along_axis(a, i, 0), (floats, (5, 3)), (integers, (2, 3))),
    ],
    "mul": [
        (lambda a: 3 * a, PLANE), (lambda a: a * a, PLANE), (lax.mul, (complexes, (2, 4)), (complexes, (2, 4))),
    ],
    "neg": [(lax.neg, (integers, (3,)))],
    "pad": [
        (lambda a, b: lax.pad(a, b, ((2, -1, 0), (0, 0, 0))), (floats, (4, 1)), (floats, ())),
        (lambda a, b: lax.pad(a, b, ((0, 0, 0), (0, 1, 0))), (floats, (1, 4)), (floats, ())),
    ],
    "reduce_precision": [(lambda a: lax.reduce_precision(a, 8, 7), PLANE)],
    "reduce_sum": [(lambda a: lax.reduce_sum(a, axes=(0, 2)), (floats, (2, 4, 3)))],
    "reduce_window_sum": [
        (lambda a: lax.reduce_window(a, 0.0, lax.add, (1, 1), (1, 2), ((0, 0), (1, 1))), (floats, (3, 4))),
        (lambda a: lax.reduce_window(a, 0.0, lax.add, (1, 1), (1, 1), ((0, 0), (1, -1))), (floats, (3, 4))),
        (lambda a: lax.reduce_window(a, 0.0, lax.add, (1, 1), (1, 3), "VALID"), (floats, (3, 4))),
    ],
    "reshape": [
        (lambda a: PRIMITIVES["reshape"].bind(a, new_sizes=(4, 6), dimensions=(1, 0, 2), sharding=None), (floats, (2, 3, 4))),
        (lambda a: lax.reshape(a, (2, 2, 2, 3)), (floats, (4, 6))),
        (lambda a: lax.reshape(a, (0, 3)), (floats, (3, 0))),
    ],
    "rev": [(lambda a: lax.rev(a, (0, 2)), (floats, (2, 4, 3)))],
    "scatter": [
        (lambda a, i, b: a.at[i].set(b), (floats, (5, 3)), (integers, (4,)), (floats, (4, 3))),
        (lambda a, i, b: jax.vmap(lambda a, i, b: a.at[i].set(b))(a, i, b), (floats, (3, 4)), (integers, (3, 2)), (floats, (3, 2))),
        (
            lambda a, i, b: jnp.put_along_axis(a, i, b, 0, inplace=False),
            (floats, (5, 3)), (integers, (2, 3)), (floats, (2, 3)),
        ),
    ],
    "select_n": [(lambda i, a, b, c: lax.select_n(i, a, b, c), (integers, (2, 4)), *[PLANE] * 3)],
    "slice": [(lambda a: lax.slice(a, (1, 0, 0), (3, 4, 2)), (floats, (3, 4, 3)))],
    "sort": [(lambda a: lax.sort(a, dimension=0), (floats, (3, 2, 4)))],
    "split": [(lambda a: lax.split(a, (1, 1), 0), (floats, (2, 3)))],
    "stack": [(lambda a, b: jnp.stack([a, b], 0), (floats, (2, 3)), (floats, (2, 3)))],
    "tile": [(lambda a: lax.tile(a, (3, 1)), (floats, (2, 3)))],
    "top_k": [(lambda a: lax.top_k(a, 2), (floats, (2, 3, 4)))],
    "transpose": [(lambda a: lax.transpose(a, (1, 0)), (floats, (2, 3)))],
    "unstack": [(lambda a: jnp.unstack(a, axis=0), (floats, (2, 3)))],
}  # fmt: skip
for _name, _cases in FURTHER_CASES.items():
    if all(case[0] for case in _cases):  # None: this version of JAX has no such primitive.
        CASES[_name] = [*CASES.get(_name, ()), *_cases]

# Collectives run on two devices, each with operands of its own.
DEVICES = 2
COLLECTIVES = {
    "ppermute": lambda a: lax.ppermute(a, "i", [(0, 1), (1, 0)]),
    "psum": lambda a: lax.psum(a, "i"),
    "psum_invariant": lambda a: lax.psum(a, "i"),
    "pvary": lambda a: lax.pcast(lax.psum(a, "i"), "i", to="varying"),
    "pmax": lambda a: lax.pmax(a, "i"),
    "pmin": lambda a: lax.pmin(a, "i"),
}

NOT_RUN = {
    "need a GPU": "dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper",
    "types of arrays on a mesh, which only the program around them gives": (
        "preduced reduced_vary_cast reduced_vary_cast_p relayout reshard vary_unreduced_cast vary_unreduced_cast_p"
    ),
    "only inside of Pallas kernels": "reciprocal with_memory_space_constraint",
    "only for dtypes of other libraries": "from_edtype to_edtype",
}
"""Rows whose primitives do not run here, by the reason."""

WITHOUT_ROW = {
    "inner functions, which `Propagation` follows": (
        "call checkpoint closed_call cond core_call custom_jvp_call custom_lin custom_vjp_call "
        "eval_jaxpr jit pjit remat2 scan shard_map while"
    ),
    "inner functions with rules of their own": (
        "call_exported call_hi_primitive call_hi_primitive_linearized composite core_map "
        "custom_jvp_call_jaxpr custom_linear_solve custom_partitioning custom_vmap_call "
        "linear_call pallas_call remat_opt run_state select_and_scatter stage"
    ),
    "side effects and their order": (
        "accum_grad_in_ref addupdate after_all box_get box_set check create_linear create_token "
        "dce_sink debug_callback debug_print empty empty2 empty_ref free_ref freeze get "
        "inspect_sharding io_callback log_extend log_read new_box new_log new_ref pin "
        "pure_callback shape_assertion swap unpin unreachable"
    ),
    "parts of arrays move between devices": (
        "all_gather all_gather_done all_gather_invariant all_gather_reduced "
        "all_gather_reduced_start all_gather_start all_to_all all_to_all_done all_to_all_start "
        "axis_index pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start "
        "global_array_to_host_local_array host_local_array_to_global_array platform_index "
        "ppermute_done ppermute_start precv psend psum_done psum_invariant_start psum_start "
        "ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start unreduced_pmax "
        "unreduced_pmin unreduced_psum unreduced_psum_start unreduced_reduce_scatter "
        "unreduced_reduce_scatter_start"
    ),
    "kernels": (
        "cudnn_fusion dot_product_attention_bwd dot_product_attention_fp8_bwd "
        "dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd "
        "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd ffi_call geqp3 scaled_dot "
        "scaled_matmul scaled_matmul_wrapper"
    ),
    "groups of rows, whose sizes are data": "ragged_dot_general",
    "random numbers of a whole array": (
        "iota_2x32_shape philox2x32 philox4x32 random_gamma rng_bit_generator rng_uniform "
        "threefry4x32"
    ),
    "no arrays": "dim_as_value dimension_size",
    "replaced while tracing": "broadcast_to zeros_like",
    "sparse arrays": (
        "bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices "
        "bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general "
        "bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_spmm "
        "coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense "
        "spsolve todense"
    ),
}
"""Primitives that have no row on purpose, by the reason. Their axes are unknown."""


class Equation(NamedTuple):
    """An equation with operands from several draws.

    Attributes:
      eqn: The equation.
      draws: Operands of each draw. On devices they have one more axis, the first.
      mesh: Devices that run it, if any.
    """

    eqn: JaxprEqn
    draws: list[list[Any]]
    mesh: jax.sharding.Mesh | None = None

    def run(self, operands: Sequence[Any], eqn: JaxprEqn | None = None) -> list[Any]:
        """Results of the equation, or of another one."""
        eqn = eqn or self.eqn
        if self.mesh is None:
            return evaluate(eqn, operands)

        def on_device(*blocks: Any) -> list[Any]:
            return [a[None] for a in evaluate(eqn, [a[0] for a in blocks])]

        # With `check_vma`, arrays that are equal on all devices have types of their own.
        is_checked = eqn.primitive.name == "psum_invariant"
        return on_mesh(self.mesh, on_device, check_vma=is_checked)(*operands)


def on_mesh(mesh: jax.sharding.Mesh, f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    each = PartitionSpec("i")
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=each, out_specs=each, **options))


def equations(name: str, draws: int) -> list[Equation]:
    """Equations of a primitive."""
    found = [equation for case in CASES.get(name, ()) for equation in _of_case(name, draws, *case)]
    return [*found, _collective(name, draws)] if name in COLLECTIVES else found


def _of_case(name: str, draws: int, f: Callable[..., Any], *operands: Any) -> list[Equation]:
    rng = np.random.default_rng(0)
    args = [[jnp.asarray(values(rng, *s)) for values, s in operands] for _ in range(draws)]
    closed = jax.make_jaxpr(f)(*args[0])
    found: list[tuple[JaxprEqn, list[Any]]] = []

    def handle(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        inner = called_jaxpr(eqn, custom_derivatives=True)
        if inner is not None:
            return interpret(inner, values, handle)
        if eqn.primitive.name == name:
            found.append((eqn, [jnp.asarray(a) for a in values]))
        return evaluate(eqn, values)

    for own in args:
        interpret(closed, own, handle)
    count = len(found) // draws
    return [Equation(found[k][0], [values for _, values in found[k::count]]) for k in range(count)]


def _collective(name: str, draws: int) -> Equation:
    mesh = jax.make_mesh((DEVICES,), ("i",), axis_types=(AxisType.Auto,))
    check = name in ("psum_invariant", "pvary")
    closed = jax.make_jaxpr(on_mesh(mesh, COLLECTIVES[name], check_vma=check))(
        np.ones((2 * DEVICES, 3), np.float32)
    )
    (eqn,) = [e for e in _equations_in(closed.jaxpr.eqns) if e.primitive.name == name]
    rng = np.random.default_rng(0)
    return Equation(eqn, [[floats(rng, DEVICES, 2, 3)] for _ in range(draws)], mesh)


def _equations_in(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    inner = [e for eqn in eqns for jaxpr in inner_jaxprs(eqn) for e in _equations_in(jaxpr.eqns)]
    return [*eqns, *inner]
