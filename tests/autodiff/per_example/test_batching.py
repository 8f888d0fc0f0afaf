"""Each batching rule equals `jax.vmap` of the same equation, for every choice of batch axes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equation_cases import CASES
from jax.extend.core import jaxpr_as_fun

from fnet.autodiff.per_example import batching
from fnet.autodiff.per_example.batching import Rows, _Interpreter, rows_of, run_for_batch
from fnet.jaxpr.axes import ROWS

B = 3


def rows(values, axis):
    """Values [batch, ...] as rows with the batch along an axis of one example."""
    _, *shape = values.shape
    if not shape:
        return Rows(values, 0)
    merged = [*shape[:axis], len(values) * shape[axis], *shape[axis + 1 :]]
    return Rows(jnp.moveaxis(values, 0, axis).reshape(merged), axis)


@pytest.mark.parametrize(
    "name",
    [
        *("add", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "cummax"),
        *("dot_general", "gather", "pad", "reduce_precision", "reshape", "scatter-add"),
        *("slice", "triangular_solve"),
    ],
)
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
                if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
                    got, expected = map(jax.random.key_data, (got, expected))
                np.testing.assert_allclose(
                    got, expected, rtol=1e-5, atol=1e-5, err_msg=f"axes {axes}"
                )
    assert name in executed or ROWS[name].is_identity
