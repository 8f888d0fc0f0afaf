"""Vision transformers: sizes, pooling, tokens, masked patches, interpolated positions."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import layers, models
from fnet.models.vit import attention_pooling, image_transformer, resize_positions

BLOCK = layers.Block(layers.attention(8, 2), layers.feed_forward(8, 16))
network = functools.partial(
    image_transformer, image_shape=(8, 12, 3), patch=4, width=8, blocks=[BLOCK]
)
IMAGES = np.random.default_rng(0).standard_normal((2, 8, 12, 3)).astype(np.float32)


def initial(model):
    return jax.jit(model.init)(jax.random.key(0))[0]


def apply(model, x=IMAGES, params=None, **options):
    params = initial(model) if params is None else params
    return jax.jit(lambda p: model.apply(p, {}, x, train=False, **options)[0])(params)


# Dosovitskiy et al. 2021, table 1, and Touvron et al. 2021, table 1, in millions.
def test_parameter_counts_match_the_papers():
    for name, millions in (("tiny", 6), ("small", 22), ("base", 87), ("large", 304), ("huge", 633)):
        model = models.get(f"vit_{name}", num_classes=1000, patch=14 if name == "huge" else 16)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        assert round(sum(a.size for a in jax.tree.leaves(params)) / 1e6) in (millions, millions - 1)


def test_patches_are_embedded_row_by_row():
    params = initial(network(pooling="none"))
    zeros = jax.tree.map(jnp.zeros_like, params["blocks"])
    params |= {"blocks": zeros, "pos_embedding": 0 * params["pos_embedding"]}
    model = network(pooling="none", final_norm=False)
    tokens = apply(model, params=params)
    assert tokens.shape == (2, 1 + 2 * 3, 8)
    patch = IMAGES[:, 4:, 4:8].reshape(2, -1)  # second row, second column
    expected = patch @ params["patches"]["kernel"].reshape(-1, 8) + params["patches"]["bias"][None]
    chex.assert_trees_all_close(tokens[:, 5], expected, atol=1e-5)
    chex.assert_trees_all_close(tokens[:, 0], jnp.stack([params["class_token"]] * 2))


@pytest.mark.parametrize(("positions", "count"), [("class", 8), ("all", 11)])
def test_positions_of_tokens(positions, count):
    model = network(
        distillation_token=True, registers=3, positions=positions, pooling="none", final_norm=False
    )
    params = initial(model)
    assert params["pos_embedding"].shape == (count, 8)
    params = jax.tree.map(jnp.zeros_like, params)
    params["pos_embedding"] = jnp.arange(1.0, count + 1)[:, None] + jnp.zeros((1, 8))
    tokens = apply(model, params=params)
    with_position = count - 6
    expected = [*range(1, with_position + 1)] + [0] * (5 - with_position)
    expected += range(with_position + 1, count + 1)
    assert tokens[0, :, 0].tolist() == expected


def test_pooling_matches_its_formula():
    kinds = ("none", "token", "tokens", "mean", "mean_of_norm", "token_and_mean")
    networks = {pooling: network(registers=2, pooling=pooling) for pooling in kinds}
    networks["raw"] = network(registers=2, pooling="none", final_norm=False)
    params = initial(networks["none"])

    @jax.jit
    def evaluate(params):
        y = {n: net.apply(params, {}, IMAGES, train=False)[0] for n, net in networks.items()}
        mean = y["raw"][:, 3:].mean(1)
        return y, layers.layer_norm(8).apply(params["norm"], {}, mean, train=False)[0]

    y, norm_of_mean = evaluate(params)
    tokens = y["none"]
    for pooling, expected in {
        "token": tokens[:, 0],
        "tokens": tokens[:, :1],
        "mean": norm_of_mean,
        "mean_of_norm": tokens[:, 3:].mean(1),
        "token_and_mean": jnp.concatenate([tokens[:, 0], tokens[:, 3:].mean(1)], -1),
    }.items():
        chex.assert_trees_all_close(y[pooling], expected, atol=1e-5)


def test_attention_pooling_matches_its_formula():
    identity = layers.feed_forward(8, 16, activation="gelu", gated=False)
    layer = attention_pooling(8, 2, identity, fused=False)
    params = initial(layer)
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    y, _ = layer.apply(params, {}, x, train=False)
    q = (params["probe"] @ params["query"]["kernel"]).reshape(2, 4)
    k, v = jnp.split((x @ params["key_value"]["kernel"]).reshape(2, 5, 4, 4), 2, axis=2)
    scores = jax.nn.softmax(jnp.einsum("hd,nthd->nht", q, k) / 2, axis=-1)
    a = jnp.einsum("nht,nthd->nhd", scores, v).reshape(2, 8) @ params["output"]["kernel"]
    normed, _ = layers.layer_norm(8).apply(params["norm"], {}, a, train=False)
    mlp, _ = identity.apply(params["feed_forward"], {}, normed, train=False)
    chex.assert_trees_all_close(y, a + mlp, atol=1e-5)

    both = {
        n: jnp.concatenate([params["query"][n], params["key_value"][n]], -1)
        for n in ("kernel", "bias")
    }
    fused = {n: p for n, p in params.items() if n not in ("query", "key_value")}
    fused["query_key_value"] = both
    of_fused, _ = attention_pooling(8, 2, identity).apply(fused, {}, x, train=False)
    chex.assert_trees_all_close(of_fused, y, atol=1e-6)


def test_masked_patches_do_not_change_the_output():
    model = network(mask_token=True)
    masked = np.zeros((2, 6), bool)
    masked[:, 0] = True
    changed = IMAGES.copy()
    changed[:, :4, :4] = 7.0
    chex.assert_trees_all_close(
        apply(model, masked=masked), apply(model, changed, masked=masked), atol=1e-6
    )
    assert np.abs(apply(model) - apply(model, masked=masked)).max() > 1e-3
    with pytest.raises(ValueError, match="masked needs mask_token=True"):
        apply(network(), masked=masked)


@pytest.mark.parametrize("interpolation", ["bicubic", "bicubic_antialiased"])
def test_resized_positions_are_exact_for_the_same_grid_and_constants(interpolation):
    positions = jax.random.normal(jax.random.key(0), (12, 5))
    same = resize_positions(positions, (3, 4), (3, 4), interpolation)
    chex.assert_trees_all_close(same, positions, atol=1e-6)
    constant = resize_positions(jnp.ones((12, 1)), (3, 4), (7, 2), interpolation)
    chex.assert_trees_all_close(constant, jnp.ones((14, 1)), atol=1e-6)


@pytest.mark.parametrize("rows", [4, 1])  # fewer rows have wider kernels
def test_antialiased_positions_match_jax(rows):
    positions = jax.random.normal(jax.random.key(0), (6 * 5, 3))
    resized = resize_positions(positions, (6, 5), (rows, 9), "bicubic_antialiased")
    expected = jax.image.resize(positions.reshape(6, 5, 3), (rows, 9, 3), "cubic", antialias=True)
    chex.assert_trees_all_close(resized, expected.reshape(rows * 9, 3), atol=1e-5)


def test_bicubic_positions_are_a_cubic_convolution():
    """Weights of the four next values by Keys 1981, with a = -3/4."""
    positions = jax.random.normal(jax.random.key(0), (6, 1))
    resized = resize_positions(positions, (6, 1), (9, 1), "bicubic")
    for i, first, distances in (
        (4, 1, [3 / 2, 1 / 2, 1 / 2, 3 / 2]),
        (5, 2, [7 / 6, 1 / 6, 5 / 6, 11 / 6]),
    ):
        t = np.array(distances)
        near, far = 1.25 * t**3 - 2.25 * t**2 + 1, -0.75 * (t**3 - 5 * t**2 + 8 * t - 4)
        expected = np.where(t < 1, near, far) @ positions[first : first + 4, 0]
        np.testing.assert_allclose(resized[i, 0], expected, rtol=1e-5)


def test_rejects_options():
    for options, match in (
        ({"pooling": "max"}, "pooling must be one of"),
        ({"positions": "none"}, "positions must be one of"),
        ({"interpolate": "nearest"}, "interpolate must be one of"),
        ({"class_token": False}, "pooling 'token' reads the class token"),
        ({"pooling": "map"}, "give map_pooling with pooling='map'"),
        ({"patch": 16}, "patch .16, 16. is larger than the image .8, 12."),
    ):
        with pytest.raises(ValueError, match=match):
            network(**options)


def test_rejects_other_images():
    def apply(model, x):
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        jax.eval_shape(lambda p: model.apply(p, {}, x, train=False), params)

    with pytest.raises(ValueError, match=r"images of 8 x 12, got 8 x 8; resize the images, or int"):
        apply(network(), IMAGES[:, :, :8])
    with pytest.raises(ValueError, match=r"expected \[N, H, W, 3\], got \(2, 8, 12, 1\)"):
        apply(network(), IMAGES[..., :1])
    with pytest.raises(ValueError, match=r"an image of 2 x 12 is smaller than a patch"):
        apply(network(interpolate="bicubic"), IMAGES[:, :2])
    with pytest.raises(ValueError, match=r"vit: pooling must be one of .*'mean'.*, got 'map'"):
        models.get("vit", num_classes=2, pooling="map")
    with pytest.raises(ValueError, match="heads must divide width"):
        attention_pooling(8, 3, layers.feed_forward(8, 8))
    assert attention_pooling(8, 1, layers.feed_forward(8, 8))
