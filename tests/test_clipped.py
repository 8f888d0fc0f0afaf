import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import CASES, one_by_one

from fnet.autodiff.clipped import clipped_grad


@pytest.fixture(autouse=True)
def as_users_write():
    """Biases are added to arrays of higher rank."""
    with jax.numpy_rank_promotion("allow"):
        yield


def norms_of(gradients):
    return jnp.stack([optax.tree.norm(g) for g in gradients])


def scaled_sum(gradients, scales):
    return jax.tree.map(lambda *g: sum(s * a for s, a in zip(scales, g, strict=True)), *gradients)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_clipped_sum_of_a_loop_over_examples(name):
    case = CASES[name]()
    each = one_by_one(case)
    norms = norms_of(each)
    clip = float(jnp.median(norms))
    expected = scaled_sum(each, np.minimum(1, clip / norms))
    found, info = jax.jit(clipped_grad(case.loss, clip))(case.params, *case.batch)
    tolerance = 0.03 if name == "views" else 2e-5
    chex.assert_trees_all_close(info.norms, norms, rtol=tolerance)
    scale = max(float(jnp.abs(a).max()) for a in jax.tree.leaves(expected))
    chex.assert_trees_all_close(found, expected, atol=tolerance * scale, rtol=tolerance)
