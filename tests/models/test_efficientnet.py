"""EfficientNet, MobileNetV3, RegNet and Swin: sizes, and parts against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import models
from fnet.models.efficientnet import Stage
from fnet.models.swin import window_attention
from fnet.optim import layer_scales


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # torchvision 0.29.1 and timm 1.0.31
        ("tf_efficientnetv2_m", 54_139_356),
        ("mobilenet_v3_small", 2_542_856),
        ("regnet_y_400mf", 4_344_144),
        ("swin_base_patch4_window12_384", 87_903_584),
    ],
)
def test_parameter_counts_match_those_of_the_publishers(name, parameters):
    network = models.get(name, num_classes=1000)
    params, _ = jax.eval_shape(network.init, jax.random.key(0))
    assert sum(a.size for a in jax.tree.leaves(params)) == parameters


# Tan and Le 2019, with widths rounded to multiples of 8, and Howard et al. 2019, table 2.
def test_sizes_of_efficientnets_scale_as_in_the_paper():
    for size, blocks, channels, stem, last in (
        ("b0", (1, 2, 2, 3, 3, 4, 1), (16, 24, 40, 80, 112, 192, 320), 32, 1280),
        ("b1", (2, 3, 3, 4, 4, 5, 2), (16, 24, 40, 80, 112, 192, 320), 32, 1280),
        ("b2", (2, 3, 3, 4, 4, 5, 2), (16, 24, 48, 88, 120, 208, 352), 32, 1408),
        ("b3", (2, 3, 3, 5, 5, 6, 2), (24, 32, 48, 96, 136, 232, 384), 40, 1536),
        ("b4", (2, 4, 4, 6, 6, 8, 2), (24, 32, 56, 112, 160, 272, 448), 48, 1792),
        ("b5", (3, 5, 5, 7, 7, 9, 3), (24, 40, 64, 128, 176, 304, 512), 48, 2048),
        ("b6", (3, 6, 6, 8, 8, 11, 3), (32, 40, 72, 144, 200, 344, 576), 56, 2304),
        ("b7", (4, 7, 7, 10, 10, 13, 4), (32, 48, 80, 160, 224, 384, 640), 64, 2560),
    ):
        variants = models.VARIANTS["efficientnet"]
        for name in (f"efficientnet_{size}", f"tf_efficientnet_{size}"):
            row = variants[name]
            assert tuple(s.blocks for s in row["stages"]) == blocks
            assert tuple(s.channels for s in row["stages"]) == channels
            assert (row["stem"], row["last"]) == (stem, last)
        assert variants[f"efficientnet_{size}"]["eps"] == (
            1e-3 if size in ("b5", "b6", "b7") else 1e-5
        )


def test_further_variants_have_the_widths_and_epsilons_of_their_publishers():
    variants = models.VARIANTS["efficientnet"]
    for name, row in variants.items():
        is_tensorflow = name.startswith("tf_")
        assert row.get("padding", "half") == ("same" if is_tensorflow else "half")
        of_torchvision = "v2" in name or name.startswith("mobilenet_")
        assert row["eps"] == 1e-3 or not (is_tensorflow or of_torchvision)
        if "v2" in name:
            assert (row["stem"], row["last"]) == (32 if "_l" in name else 24, 1280)
    assert (variants["mobilenet_v3_large"]["last"], variants["mobilenet_v3_large"]["hidden"]) == (
        960,
        1280,
    )
    assert (variants["mobilenet_v3_small"]["last"], variants["mobilenet_v3_small"]["hidden"]) == (
        576,
        1024,
    )
    assert {variants[n]["eps"] for n in variants if n.endswith("_100") and n[0] != "t"} == {1e-5}


@pytest.mark.parametrize(
    ("network", "features"),
    [
        (
            models.get("efficientnet", num_classes=None, stages=(Stage(1, 3, 1, 1, 8),), last=5),
            (5,),
        ),
        (
            models.get(
                "efficientnet", num_classes=None, stages=(Stage(1, 3, 1, 1, 8),), last=5, hidden=7
            ),
            (7,),
        ),
        (models.get("swin", num_classes=None, width=4, blocks=(1, 1), heads=1, window=2), (8,)),
    ],
)
def test_without_classes_a_network_returns_its_features(network, features):
    x = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
    params, state = jax.eval_shape(network.init, jax.random.key(0))
    y, _ = jax.eval_shape(lambda p, s, x: network.apply(p, s, x, train=False), params, state, x)
    assert y.shape == (2, *features)


def test_learning_rates_decay_from_the_last_block_to_the_stem():
    network = models.get("mobilenet_v3_small", num_classes=3)
    params, _ = jax.eval_shape(network.init, jax.random.key(0))
    scales = layer_scales(params, 0.5)
    assert [set(jax.tree.leaves(scales[n])) for n in ("classifier", "hidden", "last")] == [
        {1.0}
    ] * 3
    assert set(jax.tree.leaves(scales["stage4"]["2"])) == {0.5}
    assert set(jax.tree.leaves(scales["stage0"]["0"])) == {0.5**11}
    assert set(jax.tree.leaves(scales["stem"])) == {0.5**12}


def test_padding_as_in_tensorflow_begins_windows_at_the_first_pixel():
    half, same = (
        models.get(
            "efficientnet", num_classes=None, stages=(Stage(1, 3, 1, 1, 8),), padding=padding
        )
        for padding in ("half", "same")
    )
    params, state = half.init(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(1, 6, 6, 3)).astype(np.float32)
    x[:, 0] = x[:, :, 0] = 0  # as the pixel that half a window has before the first one
    shifted = np.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])[:, 1:, 1:]
    y, _ = same.apply(params, state, x, train=False)
    expected, _ = half.apply(params, state, shifted, train=False)
    np.testing.assert_allclose(y, expected, atol=1e-6)


def attention_by_hand(params, x, heads, window, shift):
    """Attention of each patch to those of its own shifted window that are near in the image."""
    params = jax.tree.map(np.asarray, params)
    n, height, columns, d = x.shape
    qkv = x @ params["query_key_value"]["kernel"] + params["query_key_value"]["bias"]
    q, k, v = np.split(qkv.reshape(n, height, columns, 3 * heads, -1), 3, axis=3)
    bias = params["position_bias"]["embedding"]
    sides, out = (height, columns), np.zeros_like(x)

    def group(i, side):
        """Number of the window of a row or column, without those that wrap around."""
        return (i - shift) // window if i >= shift else -1

    for i, j in np.ndindex(*sides):
        near = [
            (r, c)
            for r, c in np.ndindex(*sides)
            if group(r, height) == group(i, height) and group(c, columns) == group(j, columns)
        ]
        rows, cols = np.array(near).T
        offset = (i - rows + window - 1) * (2 * window - 1) + j - cols + window - 1
        for h in range(heads):
            scores = np.einsum("nd,nkd->nk", q[:, i, j, h], k[:, rows, cols, h])
            scores = scores / np.sqrt(d // heads) + bias[offset, h]
            weights = jax.nn.softmax(scores, -1)
            part = slice(h * d // heads, (h + 1) * d // heads)
            out[:, i, j, part] = np.einsum("nk,nkd->nd", weights, v[:, rows, cols, h])
    return out @ params["output"]["kernel"] + params["output"]["bias"]


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_window_attention_matches_a_loop_over_patches(shift):
    layer = window_attention(8, 2, 4, shift)
    params, _ = layer.init(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(2, 8, 12, 8)).astype(np.float32)
    y, _ = jax.jit(lambda x: layer.apply(params, {}, x, train=False))(x)
    np.testing.assert_allclose(y, attention_by_hand(params, x, 2, 4, shift), atol=1e-5)


def test_scores_of_window_attention_are_not_rounded_to_bfloat16():
    """Products of numbers up to 15 are exact, but their sums up to 900 are not."""
    layer = window_attention(8, 2, 4, 0)
    params, _ = layer.init(jax.random.key(0))
    params["query_key_value"]["kernel"] = np.tile(np.eye(8, dtype=np.float32), 3)
    x = np.random.default_rng(0).integers(0, 16, (1, 4, 4, 8)).astype(np.float32)
    y, _ = layer.apply(params, {}, jnp.asarray(x, jnp.bfloat16), train=False)
    expected = attention_by_hand(params, x, 2, 4, 0)
    np.testing.assert_allclose(y.astype(np.float32), expected, atol=0.01 * abs(expected).max())


def test_a_window_as_large_as_the_image_is_not_shifted():
    still, moved = window_attention(8, 2, 4, 0), window_attention(8, 2, 4, 2)
    params, _ = still.init(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(1, 4, 4, 8)).astype(np.float32)
    expected, _ = still.apply(params, {}, x, train=False)
    y, _ = moved.apply(params, {}, x, train=False)
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_rejects_invalid_options():
    for make, message in (
        (
            lambda: models.get("efficientnet", num_classes=2, padding="valid"),
            "padding must be one of",
        ),
        (
            lambda: models.get("regnet", num_classes=2, blocks=(1,), widths=(8, 8)),
            "one width per stage",
        ),
        (
            lambda: models.get("regnet", num_classes=2, widths=(48, 104, 208, 443)),
            "groups must divide",
        ),
        (lambda: models.get("swin", num_classes=2, width=10), "heads must divide width"),
        (lambda: models.get("swin", num_classes=2, blocks=()), "blocks must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
