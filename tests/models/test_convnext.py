"""ConvNeXt: sizes, stochastic depth; global response norm."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fnet import models
from fnet.layers.feed_forward import feed_forward
from fnet.layers.global_response_norm import global_response_norm
from fnet.memory import residuals

IMAGES = np.random.default_rng(0).standard_normal((2, 16, 16, 3)).astype(np.float32)
SMALL = {"num_classes": 5, "blocks": (1, 2), "widths": (8, 12), "patch": 2}


def initial(layer):
    return jax.jit(layer.init)(jax.random.key(0))[0]


# Woo et al. 2023, table 6, and Liu et al. 2022, table 1, in millions.
@pytest.mark.parametrize(("name", "millions"), [("convnext_tiny", 28.6), ("convnextv2_nano", 15.6)])
def test_parameter_counts_match_the_papers(name, millions):
    params, _ = jax.eval_shape(models.get(name, num_classes=1000).init, jax.random.key(0))
    assert round(sum(a.size for a in jax.tree.leaves(params)) / 1e6, 1) == millions


def test_global_response_norm_matches_its_formula():
    layer = global_response_norm(4, eps=0.1)
    rng = np.random.default_rng(0)
    x, scale, bias = (
        rng.standard_normal((2, 3, 5, 4)),
        rng.standard_normal(4),
        rng.standard_normal(4),
    )
    norms = np.sqrt((x**2).sum((1, 2)))  # [N, C]
    ratios = norms / (norms.mean(-1, keepdims=True) + 0.1)
    expected = x + scale * x * ratios[:, None, None] + bias
    params = {"scale": scale.astype(np.float32), "bias": bias.astype(np.float32)}
    y, _ = layer.apply(params, {}, x.astype(np.float32), train=True)
    chex.assert_trees_all_close(y, expected.astype(np.float32), atol=1e-5)


def test_gradients_of_global_response_norm():
    layer = global_response_norm(3)
    params = {"scale": jnp.array([0.5, -1.0, 2.0]), "bias": jnp.zeros(3)}

    def f(params, x):
        return layer.apply(params, {}, x, train=True)[0]

    x = jax.random.normal(jax.random.key(0), (2, 2, 3, 3))
    check_grads(f, (params, x), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)
    grads = jax.grad(lambda x: f(params, x).sum())(x.at[..., 1].set(0))
    assert bool(jnp.isfinite(grads).all())
    with pytest.raises(ValueError, match=r"expected \[N, H, W, 3\], got \(2, 3\)"):
        f(params, jnp.ones((2, 3)))


def test_a_feed_forward_layer_rematerializes_its_hidden_norm():
    def bytes_saved(**options):
        layer = feed_forward(4, 16, activation="gelu", gated=False, bias=True, **options)
        params, _ = jax.eval_shape(layer.init, jax.random.key(0))
        x = jax.ShapeDtypeStruct((2, 6, 6, 4), jnp.float32)
        saved = residuals(
            lambda p, x: layer.apply(p, {}, x, train=True)[0], params, x, argnums=(0, 1)
        )
        return sum(r.added for r in saved)

    assert bytes_saved(hidden_norm=global_response_norm(16)) == bytes_saved() > 0


@pytest.mark.slow
def test_stochastic_depth_skips_blocks_of_whole_images():
    model = models.get(
        "convnext", **SMALL | {"layer_scale": None, "stochastic_depth": 0.9, "patch": 4}
    )
    params = initial(model)
    same = np.repeat(IMAGES[:1], 64, axis=0)

    @jax.jit
    def train(key):
        return model.apply(params, {}, same, key=key, train=True)[0]

    # The first block is never skipped, the second at rate 0.45, the third at rate 0.9.
    kinds, counts = np.unique(np.round(train(jax.random.key(1)), 4), axis=0, return_counts=True)
    assert 2 <= len(kinds) <= 4
    assert counts.max() < 64
    evaluated = jax.jit(lambda p: model.apply(p, {}, same, train=False)[0])(params)
    chex.assert_trees_all_close(evaluated, jnp.repeat(evaluated[:1], 64, axis=0), atol=1e-5)


def test_rejects_stages_without_width():
    with pytest.raises(ValueError, match=r"one width per stage, got blocks=\(1,\) and widths="):
        models.get("convnext", num_classes=2, blocks=(1,), widths=(8, 8))
