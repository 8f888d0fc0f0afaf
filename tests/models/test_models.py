"""Networks by name: parameter counts, shapes, strides, and their formulas in numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import count, initial, shapes

from fnet import models
from fnet.models import blocks
from fnet.models.denoiser import sinusoids


def test_the_names_of_published_networks_are_those_of_their_files():
    assert {"resnet", "resnext", "densenet", "regnet", "efficientnet", "swin"} < set(
        models.VARIANTS
    )
    names = [name for rows in models.VARIANTS.values() for name in rows]
    assert len(names) == len(set(names))
    assert set(names) < set(models.MODELS)


@pytest.mark.parametrize("name", ["resnet9", "preact_resnet"])
def test_group_norm_accepts_widths_not_divisible_by_32(name):
    model = models.get(name, num_classes=3, norm="group")
    params, state = shapes(model)
    x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    y, _ = jax.eval_shape(lambda p, x: model.apply(p, state, x, train=True), params, x)
    assert y.shape == (2, 3)
    assert state == {}


def test_number_of_groups_is_gcd_of_32_and_channels():
    channels, groups = 24, 8
    layer = blocks.group_norm_activation(channels, activation="identity", activation_param=0.01)
    params, _ = layer.init(jax.random.key(0))
    x = np.random.default_rng(0).normal(2, 3, size=(2, 5, 5, channels)).astype(np.float32)
    y, _ = layer.apply(params, {}, x, train=True)
    grouped = x.reshape(2, 25, groups, -1)
    mean, variance = (f(grouped, axis=(1, 3), keepdims=True) for f in (np.mean, np.var))
    expected = ((grouped - mean) / np.sqrt(variance + 1e-5)).reshape(x.shape)
    chex.assert_trees_all_close(y, expected, atol=1e-5)


def test_default_revnet_is_about_as_large_as_resnet50():
    params, _ = shapes(models.get("revnet", num_classes=1000))
    assert count(params) == pytest.approx(25_557_032, rel=0.05)


def test_resnet9_has_the_convolutions_of_its_source():
    params, _ = shapes(models.get("resnet9", num_classes=10))
    kernels = sorted(p.shape for p in jax.tree.leaves(params) if p.ndim == 4)
    widths = [(24, 128), (128, 128), (128, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
    assert kernels == sorted([(2, 2, 3, 24), *((3, 3, *pair) for pair in widths)])
    small = models.get("resnet9", num_classes=3, widths=(4, 8, 8), in_channels=1)
    params, state = initial(small)
    x = jnp.ones((2, 9, 9, 1))
    assert small.apply(params, state, x, train=False)[0].shape == (2, 3)
    with pytest.raises(ValueError, match="widths must have 3 numbers"):
        models.get("resnet9", num_classes=3, widths=(4, 8))
    with pytest.raises(ValueError, match="window 2 is larger than the image 1 x 1"):
        jax.eval_shape(lambda p: small.apply(p, state, x[:, :4, :4], train=False), params)


def test_rejects_wrong_names_and_sizes():
    for name, options, error, message in (
        ("resnet50", {"depth": 18}, TypeError, "multiple values for argument 'depth'"),
        ("resnet1", {}, ValueError, r"must be one of .*preact_resnet.*, got 'resnet1'"),
        ("resnet", {"depth": 20}, ValueError, r"depth must be one of \[10, 14, .*, 200\], got 20"),
        ("resnet18", {"norm": "sync"}, ValueError, r"\['abn', 'batch', 'group'\], got 'sync'"),
        (
            "revnet",
            {"widths": (8, 9), "blocks": (1, 1)},
            ValueError,
            r"widths=\(8, 9\), blocks=\(1",
        ),
        ("preact_resnet", {"widths": ()}, ValueError, r"got widths=\(\), blocks_per_stage=2"),
    ):
        with pytest.raises(error, match=message):
            models.get(name, num_classes=3, **options)


def test_preact_resnet_first_stride_and_stem_width():
    model = models.get(
        "preact_resnet",
        num_classes=3, in_channels=3, widths=(4, 8), blocks_per_stage=1, stem_width=6,
        first_stride=2,
    )  # fmt: skip
    params, state = shapes(model)
    assert params["stem"]["kernel"].shape == (3, 3, 3, 6)
    x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    run = lambda p, s, x: model.apply(p, s, x, train=True)[0]  # noqa: E731
    text = str(jax.make_jaxpr(run)(params, state, x))
    assert all(f"[{shape}]" in text for shape in ("2,32,32,6", "2,16,16,4", "2,8,8,8"))
    assert "[2,32,32,4]" not in text


def conv(x, kernel, stride=1, padding="SAME"):
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, padding, dimension_numbers=layout)
    return np.asarray(y)


def batch_norm_relu(p, s, x, *, size=lambda gamma: gamma):
    y = (x - s["running_mean"]) / np.sqrt(s["running_var"] + 1e-5) * size(p["gamma"]) + p["beta"]
    return np.maximum(y, 0)


def patches(x):
    """[N, H, W, C] -> [N, H // 2, 2, W // 2, 2, C], without an odd last row or column."""
    n, h, w, c = (side // 2 if i in (1, 2) else side for i, side in enumerate(x.shape))
    return x[:, : 2 * h, : 2 * w].reshape(n, h, 2, w, 2, c)


def evaluate(network, x):
    """Initialize a network; return its output in evaluation, params and state."""
    params, state = jax.tree.map(np.float64, initial(network))
    y = jax.jit(lambda p, s, x: network.apply(p, s, x, train=False)[0])(params, state, x)
    return y, params, state


def images(size):
    return np.random.default_rng(1).normal(size=(2, size, size, 3))


def test_preact_resnet_matches_its_formula(float64):
    network = models.get(
        "preact_resnet",
        num_classes=5,
        in_channels=3,
        widths=(4, 6),
        norm="batch",
        activation="relu",
    )
    x = images(6)
    y, p, s = evaluate(network, x)
    x = conv(x, p["stem"]["kernel"])
    for i, j in np.ndindex(2, 2):
        q, t = p[f"stage{i}"][f"block{j}"], s[f"stage{i}"][f"block{j}"]["body"]
        stride = 2 if (i, j) == (1, 0) else 1
        h = conv(
            batch_norm_relu(q["body"]["abn1"], t["abn1"], x), q["body"]["conv1"]["kernel"], stride
        )
        h = conv(batch_norm_relu(q["body"]["abn2"], t["abn2"], h), q["body"]["conv2"]["kernel"])
        kernels = [q["body"][name]["kernel"].shape[:2] for name in ("conv1", "conv2")]
        assert kernels == [(3, 3), (3, 3)]
        assert stride == 1 or q["shortcut"]["kernel"].shape == (1, 1, 4, 6)
        x = h + (conv(x, q["shortcut"]["kernel"], stride) if stride == 2 else x)
    x = batch_norm_relu(p["abn"], s["abn"], x).mean((1, 2))
    chex.assert_trees_all_close(y, x @ p["head"]["kernel"] + p["head"]["bias"], rtol=1e-9)


def test_resnet9_matches_its_formula(float64):
    network = models.get(
        "resnet9", num_classes=5, widths=(4, 6, 8), norm="batch", activation="relu"
    )
    x = images(18)
    y, p, s = evaluate(network, x)

    def block(p, s, x, *, pooled=False, padding="SAME"):
        x = conv(x, p["conv"]["kernel"], padding=padding)
        return batch_norm_relu(p["abn"], s["abn"], patches(x).max((2, 4)) if pooled else x)

    def with_residual_block(p, s, x):
        x = block(p["reduce"], s["reduce"], x, pooled=True)
        p, s = p["residual"]["body"], s["residual"]["body"]
        return x + block(p["conv2"], s["conv2"], block(p["conv1"], s["conv1"], x))

    x = block(p["stem"], s["stem"], x, padding="VALID")
    x = with_residual_block(p["stage0"], s["stage0"], x)
    x = block(p["stage1"], s["stage1"], x, pooled=True)
    x = with_residual_block(p["stage2"], s["stage2"], x)
    assert x.shape == (2, 2, 2, 8)
    chex.assert_trees_all_close(y, x.max((1, 2)) @ p["head"]["kernel"] / 8, rtol=1e-9)


def test_revnet_matches_its_formula(float64):
    network = models.get(
        "revnet",
        num_classes=5, in_channels=3, widths=(4, 8), blocks=(1, 2), bottleneck=False,
        small_images=True, activation="relu",
    )  # fmt: skip
    x = images(6)
    y, p, s = evaluate(network, x)

    def abn(p, s, x):
        return batch_norm_relu(p, s, x, size=lambda gamma: np.abs(gamma) + 1e-5)

    def half(p, s, x):
        for i in "12":
            x = conv(abn(p[f"abn{i}"], s[f"abn{i}"], x), p[f"conv{i}"]["kernel"])
        return x

    def stage(p, s, x):
        a, b = np.split(x, 2, axis=-1)
        for i in p:
            a = a + half(p[i]["f"], s[i]["f"], b)
            b = b + half(p[i]["g"], s[i]["g"], a)
        return np.concatenate([a, b], -1)

    x = stage(p["stage0"], s["stage0"], conv(x, p["stem"]["kernel"]))
    x = patches(abn(p["down1"]["abn"], s["down1"]["abn"], x)).mean((2, 4))
    x = stage(p["stage1"], s["stage1"], conv(x, p["down1"]["conv"]["kernel"]))
    x = abn(p["abn"], s["abn"], x).mean((1, 2))
    chex.assert_trees_all_close(y, x @ p["head"]["kernel"] + p["head"]["bias"], atol=1e-3)


def test_kernels_of_a_revnet():
    def kernels(**options):
        params, _ = shapes(models.get("revnet", num_classes=5, widths=(8,), blocks=(1,), **options))
        stem = params["stem"]
        whole = [stem["conv"], stem["widen"]] if "conv" in stem else [stem]
        half = params["stage0"]["0"]["f"]
        whole += [half[name] for name in sorted(half) if name.startswith("conv")]
        return [layer["kernel"].shape for layer in whole]

    assert kernels(bottleneck=False, small_images=True) == [
        (3, 3, 3, 8),
        (3, 3, 4, 4),
        (3, 3, 4, 4),
    ]
    inner = [(1, 1, 4, 2), (3, 3, 2, 2), (1, 1, 2, 4)]
    assert kernels(bottleneck=True) == [(7, 7, 3, 2), (1, 1, 2, 8), *inner]


def test_sinusoids_have_frequencies_from_1_to_a_ten_thousandth():
    # Frequencies 10,000^(-i / 2) of i = 0, 1; the last of an odd width is 0.
    expected = [np.cos(3), np.cos(0.03), np.sin(3), np.sin(0.03)]
    chex.assert_trees_all_close(sinusoids(jnp.array([3]), 4)[0], np.array(expected), atol=1e-6)
    chex.assert_trees_all_close(sinusoids(jnp.array([3]), 5)[0, :4], np.array(expected), atol=1e-6)
    assert sinusoids(jnp.array([3]), 5)[0, 4] == 0
