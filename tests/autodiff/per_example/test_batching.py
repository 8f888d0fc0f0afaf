"""Each batching rule equals `jax.vmap` of the same equation, for every choice of batch axes."""

import functools
import itertools

import example_losses
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun, primitives

from fnet.autodiff.per_example import batching
from fnet.autodiff.per_example.batching import (
    Rows,
    _Interpreter,
    rows_of,
    run_for_batch,
)
from fnet.jaxpr.axes import ROWS

allow_rank_promotion = pytest.fixture(autouse=True)(example_losses.allow_rank_promotion)

B = 3


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


def rows(values, axis):
    """Values [batch, ...] as rows with the batch along an axis of one example."""
    _, *shape = values.shape
    if not shape:
        return Rows(values, 0)
    merged = [*shape[:axis], -1, *shape[axis + 1 :]]
    return Rows(jnp.moveaxis(values, 0, axis).reshape(merged), axis)


@pytest.mark.parametrize("name", sorted(CASES))
def test_rules_equal_vmap(name, monkeypatch):
    rng, executed = np.random.default_rng(0), set()

    class Interpreter(_Interpreter):
        def _lengthen(self, eqn, operands, factor):
            executed.add(eqn.primitive.name)
            return super()._lengthen(eqn, operands, factor)

    monkeypatch.setattr(batching, "_Interpreter", Interpreter)
    for f, *operands in CASES[name]:
        examples = [jnp.asarray(values(rng, B, *shape)) for values, shape in operands]
        closed = jax.make_jaxpr(f)(*(a[0] for a in examples))
        # All examples share an operand, or its rows are along one of its axes.
        choices = [[None, *range(max(len(shape), 1))] for _, shape in operands]
        combinations = [axes for axes in itertools.product(*choices) if set(axes) != {None}]

        @jax.jit
        def both(examples, closed=closed, combinations=combinations):
            results = []
            for axes in combinations:
                pairs = list(zip(examples, axes, strict=True))
                args = [a[0] if axis is None else rows(a, axis) for a, axis in pairs]
                outputs = zip(run_for_batch(closed, args, B), closed.out_avals, strict=True)
                got = [rows_of(a, like.shape, B) for a, like in outputs]
                args = [a[0] if axis is None else a for a, axis in pairs]
                in_axes = [None if axis is None else 0 for axis in axes]
                results.append((got, jax.vmap(jaxpr_as_fun(closed), in_axes)(*args)))
            return results

        with jax.debug_key_reuse(False):
            results = both(examples)
        for axes, pairs in zip(combinations, results, strict=True):
            for got, expected in zip(*pairs, strict=True):
                assert got.dtype == expected.dtype
                np.testing.assert_allclose(
                    got, expected, rtol=1e-5, atol=1e-5, err_msg=f"axes {axes}"
                )
    assert name in executed or ROWS[name].is_identity
