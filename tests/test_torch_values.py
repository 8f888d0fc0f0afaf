"""Torch's weights: what a network makes of them is what torch makes of the state dict."""

import functools
import sys

import chex
import jax
import numpy as np
import pytest
import torch_networks as originals
from torch_cases import drawn, in_torch, preact, read, shapes

from fnet import layers, models
from fnet.interop.torch import fill, from_torch, to_torch

pytestmark = pytest.mark.slow


@pytest.fixture
def small(monkeypatch):
    """Families with few blocks and channels: all names and forms of block are there."""

    def change(family, **constants):
        for name, value in constants.items():
            monkeypatch.setattr(sys.modules[f"fnet.models.{family}"], name, value)

    change("resnet", DEPTHS={18: (2, 1, 1, 1), 50: (1, 1, 1, 1)})
    change("resnext", DEPTHS={50: (2, 1, 1, 1)})
    change("densenet", DEPTHS={121: (2, 1, 1, 1)})
    change(
        "wider_resnet",
        DEPTHS={16: (2, 1, 1, 1, 1, 1)},
        CHANNELS=((4, 4), (8, 8), (6, 6), (6, 8), (4, 6, 12), (4, 6, 10)),
    )


def network_of(name, num_classes=5, **options):
    if name == "deeplab":
        body = models.get("wider_resnet16_a2", num_classes=None, dilated=True, **options)
        return models.deeplab(body, 10, num_classes=5, hidden=4, dilations=(1, 2, 3), **options)
    if name.startswith("resnext"):
        options |= {"base_channels": (8, 8, 16), "groups": 4, "stem": "3x3"}
    if name.startswith("densenet"):
        options |= {"growth": 4}
    return models.get(name, num_classes=num_classes, **options)


def outputs(network, params, state, x, modes=(False,)):
    """What a network makes of images [N, C, H, W], in evaluation, in training."""

    @jax.jit
    def apply(params, state, x):
        return [network.apply(params, state, x, train=train)[0] for train in modes]

    found = [np.asarray(y) for y in apply(params, state, np.transpose(x, (0, 2, 3, 1)))]
    return found if len(modes) > 1 else found[0]


def assert_close(found, expected):
    expected = np.asarray(expected)
    assert np.ptp(expected) > 0.1
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def images(size=32):
    return np.random.default_rng(1).normal(size=(2, 3, size, size)).astype(np.float32)


ORIGINALS = {
    "resnet18": originals.resnet,
    "resnext50": originals.resnext,
    "densenet121": originals.densenet,
    "wider_resnet16": originals.wider_resnet,
    "wider_resnet16_a2": functools.partial(originals.wider_resnet, a2=True),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_logits_are_those_of_the_state_dict_as_torch_runs_it(name, small):
    network = network_of(name)
    arrays = drawn(in_torch(network, "reference"))
    params, state = read(network, arrays)
    expected = ORIGINALS[name](originals.Network(arrays), images())
    found = outputs(network, params, state, images())
    assert_close(found, expected)


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_last_feature_is_what_the_classifier_reads(name, small):
    network, features = network_of(name), network_of(name, num_classes=None)
    params, state = read(network, drawn(in_torch(network, "reference")))
    x = np.transpose(images(), (0, 2, 3, 1))
    last = jax.jit(lambda p, s, x: features.apply(p, s, x, train=False)[0][-1])(params, state, x)
    head = {name: np.asarray(a) for name, a in params.get("classifier", params)["fc"].items()}
    logits = np.asarray(last).mean((1, 2)) @ head["kernel"] + head["bias"]
    assert_close(logits, outputs(network, params, state, images()))


def test_the_last_stages_of_an_a2_network_drop_channels_in_training(small, monkeypatch):
    rates, dropout = [], layers.dropout

    def recorded(rate, **how):
        rates.append((rate, how))
        return dropout(rate, **how)

    monkeypatch.setattr(layers, "dropout", recorded)
    network = network_of("wider_resnet16_a2")
    assert rates == [(0.3, {"shared_axes": (1, 2)}), (0.5, {"shared_axes": (1, 2)})]
    with pytest.raises(ValueError, match=r"dropout: .*key"):
        jax.eval_shape(
            lambda key: network.apply(*network.init(key), np.ones((2, 32, 32, 3)), train=True),
            jax.random.key(0),
        )


def test_logits_of_torchvisions_resnets_are_those_of_plain_batch_norm_and_relu(small):
    network = network_of("resnet50", norm="batch", activation="relu")
    arrays = drawn(in_torch(network, "torchvision"))
    params, state = read(network, arrays, norm="batch")

    original = originals.Network(arrays, plain=True, slope=0)
    expected = originals.torchvision_resnet(original, images())
    found = outputs(network, params, state, images())
    assert_close(found, expected)


def test_scores_of_a_segmentation_snapshot_are_those_of_its_parts(small):
    network = network_of("deeplab")
    arrays = drawn(in_torch(network, "reference"))
    parts = {"body": {}, "head": {}, "cls": {}}
    for key, a in arrays.items():
        part, _, rest = key.partition(".")
        parts[part][rest] = a
    params, state = read(network, {"state_dict": parts, "training_meta": {"epoch": 3}})

    scores = originals.deeplab_scores(originals.Network(arrays), images(), (1, 2, 3))
    expected = jax.image.resize(
        np.moveaxis(scores, 1, -1), (2, 32, 32, 5), "bilinear", antialias=False
    )
    found = outputs(network, params, state, images())
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "names"),
    [(name, "reference") for name in [*ORIGINALS, "deeplab"]]
    + [("resnet50", "torchvision"), ("resnet50", "reference")],
)
def test_there_and_back_every_array_is_the_same_bit_for_bit(name, names, small):
    network = network_of(name, norm="batch")
    arrays = drawn(in_torch(network, names))
    params, state = read(network, arrays, norm="batch")
    chex.assert_trees_all_equal(to_torch(params, state, names=names, norm="batch"), arrays)
    chex.assert_trees_all_equal_shapes_and_dtypes((params, state), shapes(network))


@pytest.mark.parametrize("norm", ["abn", "group"])
def test_networks_that_only_this_library_has_keep_their_names(norm):
    network = preact()
    if norm == "group":
        network = models.get("resnet18", num_classes=3, norm="group")
    params, state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes(network))
    arrays = to_torch(params, state, norm=norm)
    names = {"abn": "stage0.block0.body.abn1.weight", "group": "mod2.block1.convs.bn1.bias"}
    assert names[norm] in arrays
    back = from_torch(network, arrays, norm=norm)
    chex.assert_trees_all_equal(back, (params, state))


def test_a_network_by_name_has_the_classes_of_its_weights(small):
    arrays = drawn(in_torch(models.get("resnet18", num_classes=7), "reference"))
    params, _ = from_torch("resnet18", arrays)
    assert params["fc"]["kernel"].shape == (512, 7)
    features = {k: a for k, a in arrays.items() if not k.startswith("classifier")}
    params, _ = from_torch("resnet18", features, norm="batch", activation="relu")
    assert "fc" not in params


def test_moved_weights_are_the_same_network_in_evaluation_and_in_training(small):
    arrays = drawn(in_torch(network_of("resnet18"), "torchvision"))
    pruned = arrays["layer1.0.bn1.weight"]
    pruned[:6] = [0, -3e-8, 2e-7, 1e-5, -1e-5, -2]
    plain, network = network_of("resnet18", norm="batch"), network_of("resnet18")
    params, state = read(network, arrays, trained_with="batch")

    expected = outputs(plain, *read(plain, arrays, norm="batch"), images(), modes=(False, True))
    found = outputs(network, params, state, images(), modes=(False, True))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)

    # And back, for those who go on with plain batch norm.
    back = to_torch(params, state, names="torchvision", for_norm="batch")
    sizes = np.maximum(np.abs(pruned), 1e-5)
    chex.assert_trees_all_close(back["layer1.0.bn1.weight"], sizes, rtol=1e-6)
    chex.assert_trees_all_close(
        back["layer1.0.conv1.weight"] * sizes[:, None, None, None],
        arrays["layer1.0.conv1.weight"] * pruned[:, None, None, None],
        rtol=1e-6,
    )


def test_a_new_classifier_keeps_the_values_that_it_has(small):
    arrays = drawn(in_torch(network_of("resnet18"), "reference"))
    network = models.get("resnet18", num_classes=11)
    own, state = jax.tree.map(lambda a: np.full(a.shape, 7.0, a.dtype), shapes(network))
    filled = fill(own, state, arrays, new_classifier=True)
    chex.assert_trees_all_equal(filled.params["fc"], own["fc"])
    assert not np.array_equal(filled.params["conv1"]["kernel"], own["conv1"]["kernel"])
    assert set(filled.report.initial) == {"fc.kernel", "fc.bias"}
    assert filled.report.left == ("classifier.fc.bias", "classifier.fc.weight")
    assert filled.report.renamed["mod1.bn1.weight"] == "bn1.gamma"


def test_a_segmentation_network_begins_with_the_weights_of_its_body(small):
    body = models.get("wider_resnet16_a2", num_classes=1000)
    arrays = drawn(in_torch(body, "reference"))
    network = network_of("deeplab")
    own, state = jax.tree.map(lambda a: np.full(a.shape, 7.0, a.dtype), shapes(network))
    filled = fill(own, state, arrays, new_classifier=True)
    back = to_torch(filled.params, filled.state)
    for key, a in arrays.items():
        if not key.startswith("classifier"):
            np.testing.assert_array_equal(back[f"body.{key}"], a)
    for part in ("head", "cls"):
        chex.assert_trees_all_equal(filled.params[part], own[part])
    assert filled.report.left == ("classifier.fc.bias", "classifier.fc.weight")
    with pytest.raises(ValueError, match="of the body alone; new_classifier=True leaves cls and"):
        from_torch(network, arrays)
