"""Rows of an axis are what the whole program computes of them."""

import equation_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equation_cases import equations
from jax.extend.core import ClosedJaxpr, Literal

from fnet import jaxpr
from fnet.jaxpr.axes import ROWS
from fnet.jaxpr.batch_axis import BatchAxes, BatchAxis, Indices, Mixed, Shared, Unknown
from fnet.memory.rows import Part, RowAxes, Sum, Value, run_rows

pytestmark = pytest.mark.usefixtures("allow_key_reuse", "allow_rank_promotion")


def in_parts(closed, args, axes, size, parts):
    """The results, from rows and sums of parts; None for a result that is neither."""
    states = [Shared() if axis is None else BatchAxis(axis) for axis in axes]
    analysis = RowAxes(size, jaxpr.active_variables(closed.jaxpr, [True] * len(args)))
    found = analysis.run(closed, states)
    if any(isinstance(s, Mixed | Unknown) for s in found):
        return found, [None] * len(found)

    @jax.jit
    def compute(args):
        outs = [None] * len(found)
        for start, rows in parts:
            values = []
            for a, state in zip(args, states, strict=True):
                if isinstance(state, BatchAxis):
                    unit = np.shape(a)[state.axis] // size
                    a = jax.lax.dynamic_slice_in_dim(a, start * unit, rows * unit, state.axis)
                values.append(Value(state, a))
            interpreter, results = run_rows(closed, values, Part(start, rows, size), analysis)
            for k, array in enumerate(interpreter.lowered(results, found, closed.jaxpr.outvars)):
                kind = found[k]
                if isinstance(kind, BatchAxis):
                    joined = [array] if outs[k] is None else [outs[k], array]
                    outs[k] = jnp.concatenate(joined, kind.axis)
                elif isinstance(kind, Sum):
                    outs[k] = array if outs[k] is None else outs[k] + array
                else:
                    outs[k] = array
        return outs

    return found, compute(args)


def to_numbers(a):
    is_key = jnp.issubdtype(a.dtype, jax.dtypes.extended)
    return np.asarray(jax.random.key_data(a) if is_key else a).astype(np.complex128)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", sorted(set(ROWS) & set(equation_cases.CASES)))
def test_parts_of_every_primitive_are_what_the_whole_gives(name):
    for equation in equations(name, 1):
        eqn, (args,) = equation.eqn, equation.draws
        if (
            equation.mesh is not None
            or any(isinstance(v, Literal) for v in eqn.invars)
            or len({*eqn.invars}) < len(eqn.invars)
        ):
            continue
        closed = ClosedJaxpr(jaxpr.part_of_jaxpr([eqn], list(eqn.invars), eqn.outvars), [])
        for factor in jaxpr.factors(eqn):
            pairs = [p for p in zip(eqn.invars, factor.operands, strict=True) if p[1] is not None]
            sizes = [(jaxpr.aval(v).shape or (1,))[axis] for v, axis in pairs]
            size = factor.parts or min(sizes, default=1)
            if size < 2 or any(n % size for n in sizes):
                continue
            parts = [(0, size - size // 2), (size - size // 2, size // 2)]
            found, outs = in_parts(closed, args, factor.operands, size, parts)
            assert factor.is_sum is False or not isinstance(found[0], BatchAxis)
            if factor.is_separate and factor.parts is None:
                assert any(isinstance(state, BatchAxis | Indices) for state in found)
            for a, b in zip(outs, jaxpr.evaluate(eqn, args), strict=True):
                if a is not None:
                    assert a.shape == b.shape
                    np.testing.assert_allclose(to_numbers(a), to_numbers(b), 1e-4, 1e-4)


def test_rows_keep_their_positions():
    n = 6

    def f(x, key):
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        places = jnp.arange(n, dtype=jnp.float32)[:, None]
        own = x[jnp.arange(n), jnp.arange(n) % 3]
        return jnp.where(mask, x + places, 0), own, (x * places).sum(0)

    args = (
        jnp.asarray(np.random.default_rng(0).standard_normal((n, 3)), jnp.float32),
        jax.random.key(1),
    )
    closed = jaxpr.inline(jax.make_jaxpr(f)(*args))
    found, outs = in_parts(closed, args, (0, None), n, [(0, 2), (2, 1), (3, 3)])
    assert [type(s) for s in found] == [BatchAxis, BatchAxis, Sum]
    for a, b in zip(outs, f(*args), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)
    # The mask is made row by row, and never as a whole.
    rows = jax.make_jaxpr(lambda x: in_parts(closed, (x, args[1]), (0, None), n, [(0, 2)])[1][0])(
        args[0]
    )
    assert "random_bits" not in str(rows)


@pytest.mark.parametrize(("axis", "dimension"), [(0, 0), (1, 1), (1, 2), (2, 0)])
def test_numbers_follow_from_positions(dimension, axis):
    def f(x):
        return x + jax.lax.broadcasted_iota(jnp.float32, x.shape, dimension)

    args = (jnp.zeros((4, 6, 5)),)
    closed, size = jax.make_jaxpr(f)(*args), args[0].shape[axis]

    def rows(x):
        return in_parts(closed, (x,), (axis,), size, [(0, 1), (1, 2), (3, size - 3)])[1]

    np.testing.assert_array_equal(rows(*args)[0], f(*args))
    # No part needs the numbers of all rows.
    made = jaxpr.find_equations(jax.make_jaxpr(rows)(*args), "iota")
    assert all(jaxpr.aval(e.outvars[0]).shape[axis] < size for e in made)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize(("bits", "axis"), [(8, 0), (16, 1), (32, 2)])
def test_random_bits_of_parts_are_those_of_the_whole(axis, bits, impl):
    def f(x, key):
        return x + jax.random.bits(key, x.shape, f"uint{bits}").astype(jnp.float32)

    args = jnp.zeros((4, 6, 5)), jax.random.key(3, impl=impl)
    closed = jaxpr.inline(jax.make_jaxpr(f)(*args))
    size = args[0].shape[axis]
    _, (out,) = in_parts(closed, args, (axis, None), size, [(0, 1), (1, size - 1)])
    np.testing.assert_array_equal(out, f(*args))


@pytest.mark.parametrize("unroll", [1, 4])
def test_a_loop_over_rows_with_other_axes_merged_into_them(unroll):
    def f(x):
        def row(carry, r):
            return carry, jnp.sin(r) * r.sum()

        return jax.lax.scan(row, 0, x.reshape(-1, 3), unroll=unroll)[1]

    args = (jnp.asarray(np.random.default_rng(0).standard_normal((4, 5, 3)), jnp.float32),)
    closed = jax.make_jaxpr(f)(*args)
    found, (out,) = in_parts(closed, args, (0,), 4, [(0, 1), (1, 3)])
    assert found == [BatchAxis(0)]
    np.testing.assert_allclose(out, f(*args), 1e-6)
    rows = jax.make_jaxpr(lambda x: in_parts(closed, (x,), (0,), 4, [(0, 3)])[1])(*args)
    (scan,) = jaxpr.find_equations(rows, "scan")
    assert (scan.params["length"], scan.params["unroll"]) == (15, unroll)


def test_a_function_with_a_derivative_rule_is_called_with_its_operands_exchanged():
    @jax.custom_vjp
    def product(a, b):
        return a @ b.T

    def backward(saved, c):
        a, b = saved
        return 2 * c @ b, 3 * c.T @ a

    product.defvjp(lambda a, b: (a @ b.T, (a, b)), backward)
    shared = jax.jit(product)

    def f(x, w):
        return shared(x, w) + shared(w, 2 * x).T

    draw = np.random.default_rng(0)
    args = [jnp.asarray(draw.standard_normal((4, 4)), jnp.float32) for _ in range(2)]
    closed = jax.make_jaxpr(f)(*args)

    def in_two(x, w):
        return in_parts(closed, (x, w), (0, None), 4, [(0, 1), (1, 3)])[1][0].sum()

    grads = jax.grad(in_two, (0, 1))(*args)
    expected = jax.grad(lambda *args: f(*args).sum(), (0, 1))(*args)
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_what_jax_writes_as_one_primitive_of_high_level():
    """`searchsorted`, `frexp` and `ldexp` since JAX 0.12."""

    def f(x, edges):
        mantissa, exponent = jnp.frexp(jnp.sin(x))
        return jnp.ldexp(mantissa, exponent + 1) * jnp.searchsorted(edges, x)

    draw = np.random.default_rng(0)
    args = jnp.asarray(draw.standard_normal((4, 3)), jnp.float32), jnp.linspace(-2, 2, 9)
    closed = jax.make_jaxpr(f)(*args)
    assert BatchAxes(4, is_differentiated=True).run(closed, [BatchAxis(0), Shared()]) == [
        BatchAxis(0)
    ]

    def in_two(x):
        found, (out,) = in_parts(closed, (x, args[1]), (0, None), 4, [(0, 1), (1, 3)])
        assert found == [BatchAxis(0)]
        return out

    (out, vjp), (expected, expected_vjp) = (
        jax.vjp(g, args[0]) for g in (in_two, lambda x: f(x, args[1]))
    )
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_allclose(vjp(out)[0], expected_vjp(out)[0], 1e-6)


def test_a_linear_solve_of_rows_runs_whole():
    def f(x, w):
        def solve(matvec, b):
            return b / w

        return jax.lax.custom_linear_solve(lambda a: w * a, x, solve, symmetric=True)

    args = jnp.ones((4, 3)), jnp.full(3, 2.0)
    found, _ = in_parts(jax.make_jaxpr(f)(*args), args, (0, None), 4, [(0, 4)])
    assert [type(state) for state in found] == [Unknown]
    shared, _ = in_parts(jax.make_jaxpr(f)(*args), args, (None, None), 4, [(0, 4)])
    assert [type(state) for state in shared] == [Shared]


def test_each_result_of_an_equation_of_wholes_gives_its_rows():
    def f(x, a, b):
        first, second = jax.lax.sort((a, b), num_keys=1)
        return x * first + second

    args = jnp.ones(4), jnp.asarray([3.0, 1, 2, 0]), jnp.arange(4.0)
    _, outs = in_parts(jax.make_jaxpr(f)(*args), args, (0, None, None), 4, [(0, 3), (3, 1)])
    np.testing.assert_array_equal(outs[0], f(*args))


def test_values_in_another_state_than_expected_are_an_error():
    interpreter, _ = run_rows(jax.make_jaxpr(lambda: ())(), [], Part(0, 1, 2), RowAxes(2))
    with pytest.raises(AssertionError):
        interpreter.sum(Value(BatchAxis(0), jnp.ones(1)))
    with pytest.raises(AssertionError):
        interpreter.rows(Value(Sum(), jnp.ones(2)), 0)


def test_rows_of_a_while_loop_stop_by_themselves():
    def halve(r):
        def body(c):
            i, r, sums = c
            return i + 1, r / 2, sums.at[i].set(r.sum())

        going = lambda c: (jnp.abs(c[1]).max() > 0.3) & (c[0] < 4)  # noqa: E731
        return jax.lax.while_loop(going, body, (0, r, jnp.zeros(4)))

    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 2, 3)), jnp.float32)
    f = lambda x: jax.vmap(halve)(x.reshape(-1, 3))  # noqa: E731
    found, outs = in_parts(
        jaxpr.inline(jax.make_jaxpr(f)(x)), (x,), (0,), 6, [(0, 2), (2, 1), (3, 3)]
    )
    assert found == [BatchAxis(0)] * 3
    for a, b in zip(outs, f(x), strict=True):
        np.testing.assert_array_equal(a, b)
