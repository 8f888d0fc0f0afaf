"""States that follow through a program: what they say of its values is confirmed numerically."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from random_programs import ANY_PROGRAMS, BATCH, PARAMS, ROWWISE_PROGRAMS, B, normal, run

from fnet.autodiff.per_example.batching import Rows, rows_of, run_for_batch
from fnet.jaxpr import BackwardPropagation, Dependence, depends_on, inline, is_elementwise
from fnet.jaxpr.batch_axis import BatchAxis, Indices, Shared, find_batch_axes
from fnet.jaxpr.propagation import active_variables

pytestmark = pytest.mark.usefixtures("allow_rank_promotion")


OTHER_BATCH = (
    normal(4, B, 3, 4),
    normal(5, B, 5),
    np.array([[1, 1, 0], [3, 0, 2], [4, 2, 3]]),
    np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), B))),
)
QUICK = settings(max_examples=5, derandomize=True, suppress_health_check=list(HealthCheck))
THOROUGH = settings(max_examples=500, suppress_health_check=list(HealthCheck))


def test_variables_behind_a_stopped_gradient_are_not_active():
    def f(x):
        return x * jax.lax.stop_gradient(jnp.sin(x))

    jaxpr = jax.make_jaxpr(f)(1.0).jaxpr
    names = {str(eqn.primitive): v for eqn in jaxpr.eqns for v in eqn.outvars}
    stopped = jaxpr.eqns[-1].invars[1]
    assert active_variables(jaxpr, [True]) == {*jaxpr.invars, names["sin"], names["mul"]}
    assert stopped not in active_variables(jaxpr, [True])


def with_all_values(program):
    """The program of a batch, with every intermediate value as a result."""
    closed = inline(jax.make_jaxpr(functools.partial(run, program))(PARAMS, *BATCH))
    values = [v for eqn in closed.jaxpr.eqns for v in eqn.outvars]
    values = [v for v in values if not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)]
    values = [v for v in values if type(v).__name__ != "DropVar"]
    debug_info = closed.jaxpr.debug_info.with_unknown_names()
    return ClosedJaxpr(closed.jaxpr.replace(outvars=values, debug_info=debug_info), closed.consts)


def close(a, b):
    return np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)


def parts(a, axis):
    """Rows [batch, elements] of an array whose axis has examples outermost."""
    return np.moveaxis(a, axis, 0).reshape(B, -1)


def check_states(program):
    """Confirm the state of every value. Returns how many have a batch axis."""
    closed = with_all_values(program)
    params = jax.tree.leaves(PARAMS)
    states = find_batch_axes(closed, [*[Shared()] * len(params), *[BatchAxis(0)] * len(BATCH)], B)
    f = jax.jit(jaxpr_as_fun(closed))

    def evaluate(batch):
        return [np.asarray(a) for a in f(*params, *batch)]

    values = evaluate(BATCH)
    rolled = evaluate([np.roll(a, 1, 0) for a in BATCH])
    replaced = [
        evaluate([np.where(np.arange(B).reshape(-1, *[1] * (a.ndim - 1)) == n, b, a)
                  for a, b in zip(BATCH, OTHER_BATCH, strict=True)])
        for n in range(B)
    ]  # fmt: skip
    for k, (state, v) in enumerate(zip(states, closed.jaxpr.outvars, strict=True)):
        value, others = values[k], [changed[k] for changed in replaced]
        if isinstance(state, BatchAxis | Indices):
            rows = parts(value, state.axis)
            for n, other in enumerate(others):
                kept = np.arange(B) != n
                assert close(parts(other, state.axis)[kept], rows[kept]), (state, v, closed)
        if isinstance(state, BatchAxis):
            by_hand = np.roll(rows, 1, 0)
            assert close(parts(rolled[k], state.axis), by_hand), (state, v, closed)
        if isinstance(state, Shared):
            assert all(close(other, value) for other in (*others, rolled[k])), (state, v, closed)
            check_shared(state, value, (state, v, closed))
    return sum(isinstance(state, BatchAxis) for state in states)


def check_shared(state, value, case):
    assert state.uniform is not None, case
    for axis in state.uniform:
        count = B if value.shape[axis] % B == 0 else value.shape[axis]
        rows = np.moveaxis(value, axis, 0).reshape(count, -1)
        assert close(rows, rows[:1]), case
    if state.value is not None:
        assert np.array_equal(state.value(), value), case


@QUICK
@given(ROWWISE_PROGRAMS)
def test_batch_axes_of_all_values(program):
    assert check_states(program) > 5


def check_dependence(program):
    """Values that are said not to depend on an argument do not change with it."""
    closed = with_all_values(program)
    args = [*jax.tree.leaves(PARAMS), *BATCH]
    others = [*(a + np.float32(0.3) for a in jax.tree.leaves(PARAMS)), *OTHER_BATCH]
    f = jax.jit(jaxpr_as_fun(closed))
    values = [np.asarray(a) for a in f(*args)]
    for number, other in enumerate(others):
        selected = [k == number for k in range(len(args))]
        changed = f(*(other if chosen else a for chosen, a in zip(selected, args, strict=True)))
        depends = depends_on(closed, selected)
        for v, flag, a, b in zip(closed.jaxpr.outvars, depends, values, changed, strict=True):
            assert flag or close(a, b), (number, v, closed)


def check_vectorized(program):
    """The program of one example, executed for all examples, equals `jax.vmap`."""

    def loss(params, *example):
        return run(program, params, *(a[None] for a in example))

    closed = jax.make_jaxpr(loss)(PARAMS, *(a[0] for a in BATCH))
    params = jax.tree.leaves(PARAMS)

    @jax.jit
    def both(params, batch):
        rows = [Rows(a.reshape(-1, *a.shape[2:]), 0) for a in batch]
        (got,) = run_for_batch(closed, [*params, *rows], B)
        vectorized = jax.vmap(jaxpr_as_fun(closed), [*[None] * len(params), *[0] * len(batch)])
        return rows_of(got, (1,), B), vectorized(*params, *batch)[0]

    got, expected = both(params, BATCH)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def check_all(program):
    check_states(program)
    check_dependence(program)
    check_vectorized(program)


@QUICK
@given(ANY_PROGRAMS)
def test_programs_that_may_mix(program):
    check_all(program)


# Wishes for results, followed back.


class Halved(BackwardPropagation):
    """A wish is the axis along which a result is asked for; elementwise operations pass it on."""

    def __init__(self):
        self.asked = []

    def equation(self, eqn, refs, outs):
        name = eqn.primitive.name
        (wish,) = outs
        self.asked.append((name, wish))
        if not is_elementwise(eqn):
            return [eqn], [None] * len(eqn.invars)
        return [eqn], [
            wish if v.aval.shape == eqn.outvars[0].aval.shape else None for v in eqn.invars
        ]

    def sliced(self, wish):
        return None if wish in (None, 0) else wish - 1

    def stacked(self, wish):
        return None if wish is None else wish + 1


W, X = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)
WANTED = {
    "elementwise": (lambda w: jnp.sin(w) * w, 1),
    "call": (lambda w: jax.jit(jnp.sin)(w), 1),
    "checkpoint": (lambda w: jax.checkpoint(jnp.sin)(w), 1),
    "custom rule": (jax.nn.relu, 1),
    "rows of a scan": (lambda w: jax.lax.scan(lambda c, row: (c, jnp.sin(row)), 0.0, w)[1], 1),
    "carry": (lambda w: jax.lax.scan(lambda c, _: (jnp.sin(c), None), w, None, length=2)[0], 1),
    "consts of a scan": (lambda w: jax.lax.scan(lambda c, _: (jnp.sin(w), None), w, None, 2)[0], 1),
    "while": (lambda w: jax.lax.while_loop(lambda c: c.sum() < 1, jnp.sin, w), 1),
    "branch": (lambda w: jax.lax.cond(True, jnp.sin, jnp.cos, w), 1),
    "one branch": (lambda w: jax.lax.cond(True, jnp.sin, lambda a: a @ a.T @ a, w), 1),
    "product": (lambda w: w @ X @ X.T, None),
    "scanned axis": (lambda w: jax.lax.scan(lambda c, row: (c, jnp.sin(row)), 0.0, w)[1], None),
}


def test_wishes_reach_the_arguments():
    for name, (f, expected) in WANTED.items():
        closed = jax.make_jaxpr(f)(W)
        wish = 0 if name == "scanned axis" else 1
        jaxpr, wishes = Halved().run(closed.jaxpr, [None], [wish])
        assert wishes == [expected], name
        assert [eqn.primitive for eqn in jaxpr.eqns] == [eqn.primitive for eqn in closed.eqns]
        assert jnp.array_equal(jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(W)[0], f(W))


def test_results_that_nobody_wants_are_not_visited():
    closed = jax.make_jaxpr(lambda w: (jnp.sin(w), jnp.cos(w)))(W)
    halved = Halved()
    halved.run(closed.jaxpr, [None], [1, None])
    assert halved.asked == [("sin", 1)]


# Loops.


def test_states_of_a_loop_are_repeated_until_they_stay():
    """What is written in one iteration reaches the next carry, three iterations later."""

    def f(x, y):
        def body(carry, _):
            return (y, *carry[:3]), None

        return jax.lax.scan(body, (x, x, x, x), None, length=5)[0]

    closed = jax.make_jaxpr(f)(1.0, 2.0)
    assert depends_on(closed, [False, True]) == [True] * 4
    assert depends_on(closed, [True, False]) == [True] * 4


def test_sites_name_the_equations_of_branches_and_loops():
    class Sites(Dependence):
        def equation(self, eqn, states, site):
            if eqn.primitive.name in ("sin", "cos", "tan"):
                found[eqn.primitive.name] = site
            return super().equation(eqn, states, site)

    def f(x):
        def body(c, _):
            with jax.named_scope("layer"):
                return jax.lax.cond(c > 0, jnp.sin, jnp.cos, c), None

        x, _ = jax.lax.scan(body, x, None, length=7)
        return jax.lax.while_loop(lambda c: jnp.tan(c) < 1, lambda c: c + 1, x)

    found = {}
    closed = jax.make_jaxpr(f)(1.0)
    Sites().run(closed, [True])
    assert found["sin"].lengths == found["cos"].lengths == (7,)
    assert found["sin"].scopes == ("layer",)
    assert found["sin"].path != found["cos"].path
    assert found["tan"].path[:2] == (1, 1)


@pytest.mark.slow
@THOROUGH
@given(ROWWISE_PROGRAMS)
def test_many_rowwise_programs(program):
    check_states(program)


@pytest.mark.slow
@THOROUGH
@given(ANY_PROGRAMS)
def test_many_programs_that_may_mix(program):
    check_all(program)
