"""Logits of pretrained weights against reference networks in numpy."""

import functools
import sys

import chex
import jax
import numpy as np
import pytest
import torch_networks as torch_networks
from torch_cases import load, preact, random_state_dict, shapes, torch_shapes

from fnet import layers, models
from fnet.interop.torch import from_torch, load_state_dict, to_torch
from fnet.models.blocks import STAGES


@pytest.fixture
def small(monkeypatch):
    """Networks with few blocks and channels, but all kinds of blocks."""

    def change(family, depths):
        monkeypatch.setitem(STAGES, family, depths)

    change("resnet", {18: (2, 1, 1, 1), 50: (1, 1, 1, 1)})
    change("resnext", {50: (2, 1, 1, 1)})
    change("densenet", {121: (2, 1, 1, 1)})
    change("wider_resnet", {16: (2, 1, 1, 1, 1, 1)})
    channels = ((4, 4), (8, 8), (6, 6), (6, 8), (4, 6, 12), (4, 6, 10))
    monkeypatch.setattr(sys.modules["fnet.models.wider_resnet"], "CHANNELS", channels)


def build(name, num_classes=5, **options):
    if name == "deeplab":
        body = models.get("wider_resnet16_a2", num_classes=None, dilated=True, **options)
        return models.deeplab(body, 10, num_classes=5, hidden=4, dilations=(1, 2, 3), **options)
    if name.startswith("resnext"):
        options |= {"base_channels": (8, 8, 16), "groups": 4, "stem": "3x3"}
    if name.startswith("densenet"):
        options |= {"growth": 4}
    return models.get(name, num_classes=num_classes, **options)


def outputs(network, params, state, x, modes=(False,)):
    """Outputs of a network for images [N, C, H, W], one per value of ``train`` in ``modes``."""

    @jax.jit
    def apply(params, state, x):
        return [network.apply(params, state, x, train=train)[0] for train in modes]

    actual = [np.asarray(y) for y in apply(params, state, np.transpose(x, (0, 2, 3, 1)))]
    return actual if len(modes) > 1 else actual[0]


def assert_close(actual, expected):
    expected = np.asarray(expected)
    assert np.ptp(expected) > 0.1
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def images(size=32):
    return np.random.default_rng(1).normal(size=(2, 3, size, size)).astype(np.float32)


REFERENCES = {
    "resnet18": torch_networks.resnet,
    "resnext50": torch_networks.resnext,
    "densenet121": torch_networks.densenet,
    "wider_resnet16": torch_networks.wider_resnet,
    "wider_resnet16_a2": functools.partial(torch_networks.wider_resnet, a2=True),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_match_the_reference_network(name, small):
    network = build(name)
    arrays = random_state_dict(torch_shapes(network, "reference"))
    params, state = load(network, arrays)
    expected = REFERENCES[name](torch_networks.Network(arrays), images())
    actual = outputs(network, params, state, images())
    assert_close(actual, expected)


def test_last_stages_of_a2_have_channel_dropout(small, monkeypatch):
    rates, dropout = [], layers.dropout

    def record(rate, **how):
        rates.append((rate, how))
        return dropout(rate, **how)

    monkeypatch.setattr(layers, "dropout", record)
    network = build("wider_resnet16_a2")
    assert rates == [(0.3, {"shared_axes": (1, 2)}), (0.5, {"shared_axes": (1, 2)})]
    with pytest.raises(ValueError, match=r"dropout: .*key"):
        jax.eval_shape(
            lambda key: network.apply(*network.init(key), np.ones((2, 32, 32, 3)), train=True),
            jax.random.key(0),
        )


PLAIN = {"norm": "batch", "activation": "relu"}


def test_logits_of_torchvisions_deeplab_match(small):
    body = models.get(
        "resnet50", num_classes=None, dilation=(1, 1, 2, 4), dilate_first=False, **PLAIN
    )
    network = models.deeplab(
        body, 2048, num_classes=5, hidden=8, dilations=(1, 2, 3), head="concat", **PLAIN
    )
    arrays = random_state_dict(torch_shapes(network, "torchvision"))
    auxiliary = {"aux_classifier.4.bias": np.zeros(5, np.float32)}
    loaded = load_state_dict(*shapes(network), arrays | auxiliary, norm="batch")
    assert loaded.report.unused == ("aux_classifier.4.bias",)

    reference = torch_networks.Network(arrays, plain=True, slope=0)
    scores = torch_networks.torchvision_deeplab_logits(reference, images(64), (1, 2, 3))
    scores = np.moveaxis(scores, 1, -1)
    expected = jax.image.resize(scores, (2, 64, 64, 5), "bilinear", antialias=False)
    assert_close(outputs(network, loaded.params, loaded.state, images(64)), expected)
    back = to_torch(loaded.params, loaded.state, names="torchvision", norm="batch")
    chex.assert_trees_all_equal(back, arrays)

    # The same function with in-place norm.
    body = models.get("resnet50", num_classes=None, dilation=(1, 1, 2, 4), dilate_first=False, activation="relu")  # fmt: skip
    in_place = models.deeplab(body, 2048, num_classes=5, hidden=8, dilations=(1, 2, 3), head="concat", activation="relu")  # fmt: skip
    converted = load(in_place, arrays, trained_with="batch")
    assert_close(outputs(in_place, *converted, images(64)), expected)


def test_logits_of_a_split_deeplab_snapshot_match_the_reference(small):
    network = build("deeplab")
    arrays = random_state_dict(torch_shapes(network, "reference"))
    parts = {"body": {}, "head": {}, "cls": {}}
    for key, a in arrays.items():
        part, _, rest = key.partition(".")
        parts[part][rest] = a
    params, state = load(network, {"state_dict": parts, "training_meta": {"epoch": 3}})

    scores = torch_networks.deeplab_logits(torch_networks.Network(arrays), images(), (1, 2, 3))
    expected = jax.image.resize(
        np.moveaxis(scores, 1, -1), (2, 32, 32, 5), "bilinear", antialias=False
    )
    actual = outputs(network, params, state, images())
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "names"),
    [(name, "reference") for name in [*REFERENCES, "deeplab"]]
    + [("resnet50", "torchvision"), ("resnet50", "reference"), ("densenet121", "torchvision")],
)
def test_round_trip_is_bitwise_equal(name, names, small):
    options = {"stem_norm": True} if (name, names) == ("densenet121", "torchvision") else {}
    network = build(name, norm="batch", **options)
    arrays = random_state_dict(torch_shapes(network, names))
    params, state = load(network, arrays, norm="batch")
    chex.assert_trees_all_equal(to_torch(params, state, names=names, norm="batch"), arrays)
    chex.assert_trees_all_equal_shapes_and_dtypes((params, state), shapes(network))


@pytest.mark.parametrize("norm", ["abn", "group"])
def test_round_trip_of_networks_without_a_reference(norm):
    network = preact()
    if norm == "group":
        network = models.get("resnet18", num_classes=3, norm="group")
    params, state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes(network))
    arrays = to_torch(params, state, norm=norm)
    names = {"abn": "stage0.block0.body.abn1.weight", "group": "mod2.block1.convs.bn1.bias"}
    assert names[norm] in arrays
    back = from_torch(network, arrays, norm=norm)
    chex.assert_trees_all_equal(back, (params, state))


def test_network_by_name_has_the_number_of_classes_of_the_weights(small):
    arrays = random_state_dict(torch_shapes(models.get("resnet18", num_classes=7), "reference"))
    params, _ = from_torch("resnet18", arrays)
    assert params["fc"]["kernel"].shape == (512, 7)
    features = {k: a for k, a in arrays.items() if not k.startswith("classifier")}
    params, _ = from_torch("resnet18", features, norm="batch", activation="relu")
    assert "fc" not in params


def test_new_classifier_keeps_its_values(small):
    arrays = random_state_dict(torch_shapes(build("resnet18"), "reference"))
    network = models.get("resnet18", num_classes=11)
    initial, state = jax.tree.map(lambda a: np.full(a.shape, 7.0, a.dtype), shapes(network))
    loaded = load_state_dict(initial, state, arrays, new_classifier=True)
    chex.assert_trees_all_equal(loaded.params["fc"], initial["fc"])
    assert not np.array_equal(loaded.params["conv1"]["kernel"], initial["conv1"]["kernel"])
    assert set(loaded.report.initial) == {"fc.kernel", "fc.bias"}
    assert loaded.report.unused == ("classifier.fc.bias", "classifier.fc.weight")
    assert loaded.report.renamed["mod1.bn1.weight"] == "bn1.gamma"


def test_deeplab_accepts_the_weights_of_its_backbone(small):
    body = models.get("wider_resnet16_a2", num_classes=1000)
    arrays = random_state_dict(torch_shapes(body, "reference"))
    network = build("deeplab")
    initial, state = jax.tree.map(lambda a: np.full(a.shape, 7.0, a.dtype), shapes(network))
    loaded = load_state_dict(initial, state, arrays, new_classifier=True)
    back = to_torch(loaded.params, loaded.state)
    for key, a in arrays.items():
        if not key.startswith("classifier"):
            np.testing.assert_array_equal(back[f"body.{key}"], a)
    for part in ("head", "cls"):
        chex.assert_trees_all_equal(loaded.params[part], initial[part])
    assert loaded.report.unused == ("classifier.fc.bias", "classifier.fc.weight")
    with pytest.raises(ValueError, match="cover only the body; new_classifier=True leaves cls and"):
        from_torch(network, arrays)
