"""Rearrangements of arrays and layouts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equation_cases import equations
from layout_cases import numbers

from fnet.jaxpr import Layout, arrangements

pytestmark = pytest.mark.usefixtures("allow_rank_promotion")


NAMES = ["broadcast_in_dim", "reshape", "rev", "slice", "split", "squeeze", "transpose", "unstack"]
UNCHANGED = ["copy", "name", "sharding_constraint"]


@pytest.mark.parametrize("name", NAMES + UNCHANGED)
def test_arrangements_equal_the_equation(name):
    for equation, lead in itertools.product(equations(name, 1), ((), (2, 3))):
        eqn, (operands,) = equation.eqn, equation.draws
        found = arrangements(eqn, len(lead))
        if eqn.params.get("dimensions") and name == "reshape":
            assert found is None  # It also transposes.
            continue
        (array,) = map(np.asarray, operands)
        repeated = np.broadcast_to(array, lead + array.shape)
        assert len(found) == len(eqn.outvars)
        for arrange, expected in zip(found, equation.run(operands), strict=True):
            got = arrange(jnp.asarray(repeated))
            assert got.shape == lead + expected.shape
            assert (np.asarray(got) == np.asarray(expected)).all()
            layout = arrange(Layout.of(repeated.shape))
            assert (repeated.ravel()[numbers(layout)] == np.asarray(got)).all()


def test_a_split_has_three_parts():
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.split(x, (1, 2, 3)))(jnp.arange(6)).eqns
    assert [f(jnp.arange(6)).tolist() for f in arrangements(eqn)] == [[0], [1, 2], [3, 4, 5]]


def test_equations_that_do_more_have_no_arrangement():
    for name in ("dot_general", "sin", "add", "gather", "cumsum", "concatenate"):
        for equation in equations(name, 1):
            assert arrangements(equation.eqn) is None, name


def test_casts_move_nothing():
    (eqn,) = jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16))(jnp.ones(3)).eqns
    assert [f(3) for f in arrangements(eqn)] == [3]
