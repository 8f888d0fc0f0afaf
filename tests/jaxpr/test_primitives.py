"""Readers of equations, and the numbers that follow from them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equation_cases import equations
from jax import lax

from fnet.jaxpr import aval, nbytes, renames
from fnet.jaxpr.axes import ROWS
from fnet.jaxpr.primitives import Cond, DotGeneral, Reader, made_bytes, total
from fnet.memory import estimate_cost

pytestmark = pytest.mark.usefixtures("allow_key_reuse")


READERS = sorted(set(Reader.__subclasses__()) - {Cond}, key=str)


def test_a_reader_has_the_parameters_of_its_primitive_and_binds_it():
    for reader, case in ((r, case) for r in READERS for case in equations(r.primitive, 1)):
        read = reader.read(case.eqn)
        for field in dataclasses.fields(reader)[1:]:
            assert getattr(read, field.name) is case.eqn.params[field.name]
        assert [r for r in Reader.__subclasses__() if r.read(case.eqn)] == [reader]
        (expected,) = case.run(case.draws[0])
        np.testing.assert_array_equal(read.bind(*case.draws[0]), expected)


def test_readers_are_equal_if_their_parameters_are():
    products = [
        DotGeneral.of(jax.make_jaxpr(lambda x, p=p: jnp.dot(x, x, precision=p))(jnp.eye(2)).eqns[0])
        for p in (None, None, "highest")
    ]
    assert products[0] == products[1] != products[2]


def test_a_product_knows_its_axes_and_flops():
    eqns = [case.eqn for case in equations("dot_general", 1)]
    for dot, (k, v) in ((DotGeneral.read(e), v) for e in eqns for v in enumerate(e.invars)):
        assert sorted(sum(map(tuple, dot.axes(k)), ())) == list(range(aval(v).ndim))
        assert dot.flops == 2 * aval(v).size * dot.size(1 - k, dot.axes(1 - k)[2])


def test_a_cond_counts_as_its_most_expensive_branch():
    def step(x, i):
        return lax.switch(i % 3, [lambda x: x @ W @ W, lambda x: x @ W, jnp.sin], x), None

    closed = jax.make_jaxpr(lambda x: lax.scan(step, x, jnp.arange(100))[0])(jnp.ones((4, 8)))
    (scan,) = (e for e in closed.eqns if made_bytes(e) > 10_000)
    products = total(scan, lambda e: dot.flops if (dot := DotGeneral.read(e)) else 0)
    assert products == 100 * 2 * (2 * 4 * 8 * 8)
    assert products < estimate_cost(closed).flops < 1.1 * products
    # Two arrays, and numbers that choose the branch.
    assert 100 * 2 * 128 < made_bytes(scan) < 100 * (2 * 128 + 50)


W = jnp.ones((8, 8))


def test_what_combines_numbers_makes_its_result():
    for name in ("scatter-add", "reduce_sum", "reduce"):
        for case in equations(name, 1):
            assert made_bytes(case.eqn) == sum(map(nbytes, case.eqn.outvars))


def test_a_renamed_array_has_the_same_elements_in_the_same_order():
    for case in (c for name, row in ROWS.items() if row.moves for c in equations(name, 1)):
        if case.mesh is None and renames(case.eqn):
            for pair in zip(case.draws[0], case.run(case.draws[0]), strict=False):
                is_key = jnp.issubdtype(pair[0].dtype, jax.dtypes.extended)
                given, found = map(jax.random.key_data, pair) if is_key else pair
                np.testing.assert_array_equal(np.ravel(given), np.ravel(found), str(case.eqn))


def test_other_elements_and_other_memory_are_no_renaming():
    for f, is_renamed in (
        (lambda a: a.reshape(6), True),
        (lambda a: a.reshape(1, 2, 1, 3), True),
        (lambda a: lax.reduce_precision(a, 8, 23), True),
        (lambda a: lax.reduce_precision(a, 5, 23), False),
        (lambda a: a.astype(jnp.bfloat16), False),
        (lambda a: a.T, False),
        (lambda a: jnp.broadcast_to(a, (4, 2, 3)), False),
        (jax.device_put, True),
        (lambda a: jax.device_put(a, jax.memory.Space.Device), True),
        (lambda a: jax.device_put(a, jax.memory.Space.Host), False),
    ):
        (eqn,) = jax.make_jaxpr(f)(jnp.ones((2, 3))).eqns
        assert renames(eqn) == is_renamed
