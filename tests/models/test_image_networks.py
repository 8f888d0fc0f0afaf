"""Networks for large images: parameter counts, feature sizes, and blocks against numpy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import initial, shapes

import fnet
from fnet import layers, models
from fnet.models.deeplab import aspp


def output_shapes(model, size=64, *, train=True):
    x = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)
    apply = functools.partial(model.apply, train=train)
    y, _ = jax.eval_shape(lambda p, s, x: apply(p, s, x, key=jax.random.key(0)), *shapes(model), x)
    return y


@pytest.mark.parametrize(
    ("name", "options", "strides"),
    [
        ("resnet18", {"dilation": (2, 2, 2, 2), "stem": "small"}, (1, 1, 1, 1)),
        ("resnext50", {"dilation": (1, 1, 1, 2), "stem": "3x3"}, (4, 8, 16, 16)),
        ("densenet121", {"dilation": (1, 1, 2, 4)}, (4, 8, 8, 8)),
        ("wider_resnet16_a2", {"dilated": True}, (2, 4, 8, 8, 8, 8)),
    ],
)
def test_dilation_and_stem_determine_feature_sizes(name, options, strides):
    features = output_shapes(models.get(name, num_classes=None, **options))
    assert [64 // f.shape[1] for f in features] == list(strides)


def test_kernel_names_do_not_depend_on_the_norm():
    def kernels(norm):
        params, _ = shapes(models.get("resnext50", num_classes=7, norm=norm))
        leaves = jax.tree.leaves_with_path(params)
        return [(path, a.shape) for path, a in leaves if path[-1].key == "kernel"]

    kernels_of_abn = kernels("abn")
    assert kernels_of_abn == kernels("batch") == kernels("group")
    assert kernels_of_abn == kernels(lambda channels, **_: layers.rms_norm(channels))


def bn(channels, **options):
    return layers.batch_norm(channels, **{"activation": "relu"} | options)


def conv(x, kernel, *, dilation=1):
    """A convolution, as a sum over its window of slices times matrices."""
    kh, kw, _, n_out = kernel.shape
    reach = dilation * (kh // 2)
    x = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
    h, w = (n - dilation * (kh - 1) for n in x.shape[1:3])
    y = np.zeros((x.shape[0], h, w, n_out))
    for i, j in np.ndindex(kh, kw):
        rows, columns = (slice(k * dilation, k * dilation + n) for k, n in ((i, h), (j, w)))
        y += x[:, rows, columns] @ kernel[i, j]
    return y


def batch_norm(p, s, x):
    y = (x - s["running_mean"]) / np.sqrt(s["running_var"] + 1e-5) * p["gamma"] + p["beta"]
    return np.maximum(y, 0)


def evaluate_randomized(layer, x):
    """Randomize all arrays of a layer; return its output in evaluation, params and state."""
    draw = np.random.default_rng(3).normal
    params, state = (
        jax.tree.map(lambda a: a + 0.3 * draw(size=a.shape), tree) for tree in initial(layer)
    )
    state = jax.tree.map(np.abs, state)
    y, _ = jax.jit(functools.partial(layer.apply, train=False))(params, state, x)
    return y, jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, state)


def image(channels, size=6):
    return np.random.default_rng(1).normal(size=(2, size, size, channels))


@pytest.mark.parametrize("pooling_size", [None, (2, 3), (40, 40)])
def test_aspp_matches_its_formula(pooling_size, float64):
    layer = aspp(4, 3, bn, dilations=(1, 2), pooling_size=pooling_size)
    x = image(4, size=5)
    y, p, s = evaluate_randomized(layer, x)
    branches = [
        conv(x, p["map_convs"][str(i)]["kernel"], dilation=d) for i, d in enumerate((1, 1, 2))
    ]
    concatenated = batch_norm(p["map_bn"], s["map_bn"], np.concatenate(branches, -1))
    mean = np.broadcast_to(x.mean((1, 2), keepdims=True), x.shape)
    if pooling_size == (2, 3):
        inside = np.stack(
            [
                np.stack([x[:, i : i + 2, j : j + 3].mean((1, 2)) for j in range(3)], 1)
                for i in range(4)
            ],
            1,
        )
        mean = np.pad(inside, ((0, 0), (0, 1), (1, 1), (0, 0)), mode="edge")
    pooled = conv(mean, p["global_pooling_conv"]["kernel"])
    pooled = batch_norm(p["global_pooling_bn"], s["global_pooling_bn"], pooled)
    total = conv(concatenated, p["red_conv"]["kernel"])
    total = total + conv(pooled, p["pool_red_conv"]["kernel"])
    chex.assert_trees_all_close(
        y, batch_norm(p["red_bn"], s["red_bn"], total), rtol=1e-9, atol=1e-9
    )


def test_deeplab_returns_logits_for_every_pixel():
    body = models.get("resnet18", num_classes=None, dilation=(1, 1, 2, 4))
    model = models.deeplab(body, 512, num_classes=5, hidden=8)
    assert output_shapes(model).shape == (2, 64, 64, 5)
    assert set(shapes(model)[0]) == {"body", "head", "cls"}


@pytest.mark.parametrize("shared_axes", [(1, 2), (-3, -2)])
def test_dropout_with_shared_axes_drops_whole_channels(shared_axes):
    layer = layers.dropout(0.5, shared_axes=shared_axes)
    y, _ = layer.apply({}, {}, jnp.ones((2, 3, 3, 8)), key=jax.random.key(0), train=True)
    assert (y == y[:, :1, :1]).all()
    assert set(np.unique(y)) == {0, 2}


@pytest.mark.parametrize("shared_axes", [(1, 4), (-5,)])
def test_dropout_rejects_axes_out_of_range(shared_axes):
    layer = layers.dropout(0.5, shared_axes=shared_axes)
    with pytest.raises(ValueError, match=r"not all axes of x \(2, 3, 3, 8\)"):
        layer.apply({}, {}, jnp.ones((2, 3, 3, 8)), key=jax.random.key(0), train=True)


def test_batch_norm_matches_its_formula_for_gammas_of_any_sign(float64):
    x = image(3)
    gamma, beta = np.array([1.5, -0.7, 0.0]), np.array([0.1, 0.2, 0.3])
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    layer = layers.batch_norm(3)
    params = {"gamma": gamma, "beta": beta}
    state = {"running_mean": np.zeros(3), "running_var": np.ones(3)}

    def plain(gamma, x):
        mean, var = x.mean((0, 1, 2), keepdims=True), x.var((0, 1, 2), keepdims=True)
        return (x - mean) / jnp.sqrt(var + 1e-5) * gamma[None, None, None] + beta[None, None, None]

    def ours(gamma, x):
        return layer.apply(params | {"gamma": gamma}, state, x, train=True)[0]

    gradients = [
        jax.jit(jax.value_and_grad(lambda g, x, f=f: jnp.sin(f(g, x)).sum(), (0, 1)))(gamma, x)
        for f in (ours, plain)
    ]
    chex.assert_trees_all_close(*gradients, rtol=1e-9, atol=1e-9)
    _, after = layer.apply(params, state, x, train=True)
    n = x.size // 3
    chex.assert_trees_all_close(after["running_mean"], 0.1 * mean, rtol=1e-6)
    chex.assert_trees_all_close(after["running_var"], 0.9 + 0.1 * var * n / (n - 1), rtol=1e-6)


def test_batch_norm_rejects_parameters_narrower_than_float32():
    layer = layers.batch_norm(3)
    params, state = initial(layer)
    params["gamma"] = params["gamma"].astype(jnp.float16)
    with pytest.raises(TypeError, match="batch_norm: gamma must be float32 or wider, got float16"):
        layer.apply(params, state, jnp.ones((4, 3)), train=True)


def test_batch_norm_under_recompute_saves_one_array_per_block():
    blocks = {}
    for i in range(3):
        blocks[f"conv{i}"] = layers.conv(8, 8)
        blocks[f"bn{i}"] = layers.batch_norm(8, activation="relu")
    net = fnet.serial(**blocks)
    params, state = initial(net)
    x = jnp.ones((4, 6, 6, 8))
    f = fnet.recompute(lambda p, x: jnp.square(net.apply(p, state, x, train=True)[0]).sum())
    saved = [r for r in fnet.memory.residuals(f, params, x) if not r.alias_of]
    assert [r.layer for r in saved if r.shape == x.shape] == ["bn0", "bn1", "bn2"]


def test_rejects_invalid_options():
    for make, message in (
        (
            lambda: models.get("resnext", depth=18, num_classes=3),
            r"resnext: depth must be one of \[50, 101",
        ),
        (
            lambda: models.get("densenet", depth=100, num_classes=3),
            r"densenet: depth must be one of \[121",
        ),
        (
            lambda: models.get("wider_resnet", depth=50, num_classes=3),
            r"wider_resnet: depth must be one of",
        ),
        (
            lambda: models.get("wider_resnet", depth=16, num_classes=3, dilated=True),
            "needs a2=True",
        ),
        (
            lambda: models.get("resnet", depth=18, num_classes=3, stem="5x5"),
            r"stem must be one of .* got '5x5'",
        ),
        (
            lambda: models.get("resnet", depth=18, num_classes=3, dilation=(1, 2)),
            r"4 numbers .* got \(1, 2\)",
        ),
        (lambda: models.get("resnext", depth=50, num_classes=3, groups=3), "groups must divide"),
        (
            lambda: models.get("resnext", depth=50, num_classes=3, norm="sync"),
            "resnext: norm must be one of",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
