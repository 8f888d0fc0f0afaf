"""How each parameter is met in clipped sums: kept, multiplied, made at once or in chunks."""

import chex
import example_losses
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import CASES, B, norms_of, one_by_one, rows

from fnet.autodiff.per_example.clipped import clipped_grad, gradient_strategies
from fnet.memory import peak

as_users_write = pytest.fixture(autouse=True)(example_losses.as_users_write)

INFINITY = float("inf")


@jax.custom_vjp
def sparse(x):
    """Backwards only the three largest elements get through, of all examples together."""
    return x


def _sparse_backwards(_, ct):
    least = jax.lax.top_k(jnp.abs(ct.ravel()), 3)[0][-1]
    return (jnp.where(jnp.abs(ct) >= least, ct, 0),)


sparse.defvjp(lambda x: (x, None), _sparse_backwards)


def test_what_goes_back_in_a_way_that_is_not_known_is_computed_on_batches_of_one():
    case = example_losses.Case(
        lambda w, x: rows(sparse(jnp.tanh(x @ w))),
        example_losses.normal(0, 4, 5),
        (example_losses.normal(1, B, 4),),
    )
    each = one_by_one(case)
    assert np.count_nonzero(np.abs(each).sum(1)) == 3 * B
    found, info = jax.jit(clipped_grad(case.loss, INFINITY))(case.params, *case.batch)
    chex.assert_trees_all_close(found, each.sum(0), rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(info.norms, norms_of(each), rtol=1e-5)


def test_rows_that_are_merged_and_divided_again_are_taken_at_once():
    sizes = []

    def loss(p, x):
        sizes.append(len(x))
        h = jnp.tanh(x.reshape(-1, x.shape[-1]) @ p["w"])
        return rows(h.reshape(*x.shape[:2], -1) @ p["v"])

    case = CASES["dense_over_time"]()
    p = {name: case.params[name] for name in ("w", "v")}
    assert gradient_strategies(loss, p, *case.batch) == {"w": "ghost norm", "v": "ghost norm"}
    assert set(sizes) == {B}
    each = one_by_one(example_losses.Case(loss, p, case.batch))
    _, info = jax.jit(clipped_grad(loss, INFINITY))(p, *case.batch)
    chex.assert_trees_all_close(info.norms, norms_of(each), rtol=1e-5)


def triangular(w, x):
    return rows(jnp.tanh(x @ (w * np.tri(len(w), dtype=np.float32))))


@pytest.mark.parametrize(("width", "route"), [(None, "autodiff"), (1, "autodiff in chunks")])
def test_gradients_of_a_masked_parameter_are_made(width, route):
    w, x = example_losses.normal(0, 8, 8), example_losses.normal(1, B, 8)
    each = one_by_one(example_losses.Case(triangular, w, (x,)))
    assert gradient_strategies(triangular, w, x, width=width) == route
    found, info = jax.jit(clipped_grad(triangular, INFINITY, width=width))(w, x)
    chex.assert_trees_all_close(found, each.sum(0), rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(info.norms, norms_of(each), rtol=1e-5)


def test_a_masked_parameter_is_not_kept_as_often_as_there_are_examples():
    w, x = (jax.ShapeDtypeStruct((n, 128), jnp.float32) for n in (128, 64))
    compiled = jax.jit(clipped_grad(triangular, 1.0, width=1)).lower(w, x).compile()
    assert peak(compiled).temporaries < 8 * w.size * 4  # of 64 copies


@pytest.mark.parametrize("width", [1, 4])
def test_large_parameters_of_unknown_use_are_made_in_chunks(width):
    case = CASES["custom_derivatives"]()
    assert gradient_strategies(case.loss, case.params, *case.batch)["w"] == "autodiff"
    assert (
        gradient_strategies(case.loss, case.params, *case.batch, width=width)["w"]
        == "autodiff in chunks"
    )
    at_once = jax.jit(clipped_grad(case.loss, 0.5))(case.params, *case.batch)
    in_chunks = jax.jit(clipped_grad(case.loss, 0.5, width=width))(case.params, *case.batch)
    chex.assert_trees_all_close(in_chunks, at_once, rtol=1e-5, atol=1e-6)


def test_routes_tell_how_each_parameter_was_met():
    found = {}
    for name in ("dense", "dense_over_time", "unusual", "tied_embedding", "scaled_by_numbers"):
        case = CASES[name]()
        found |= {
            (name, k): v
            for k, v in gradient_strategies(case.loss, case.params, *case.batch).items()
        }
    assert found["dense", "w"] == found["tied_embedding", "embedding"] == "ghost norm"
    assert found["dense_over_time", "b"] == "materialized"
    assert "autodiff" not in (found["scaled_by_numbers", "w"], found["scaled_by_numbers", "v"])
    assert found["unusual", "w"] == "autodiff"
    assert found["unusual", "unused"] == "unused"
