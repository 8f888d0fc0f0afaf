"""EfficientNet, MobileNetV3, RegNet and Swin: logits, names and variants of torchvision and timm."""

import re

import chex
import jax
import numpy as np
import pytest
import torchvision_cases
from torch_cases import load, shapes, torch_shapes
from torchvision_cases import CASES, LOGITS, build, draw, images

from fnet import models
from fnet.interop import families
from fnet.interop.norm_conversion import convert
from fnet.interop.torch import from_torch, load_state_dict, to_torch

NORMS = dict.fromkeys(CASES, "batch") | {"swin": "abn"}


def arrays_of(name, names="torchvision"):
    return draw(torch_shapes(build(name), names))


def evaluate(network, params, state):
    return jax.jit(lambda p, s: network.apply(p, s, images(), train=False)[0])(params, state)


@pytest.mark.parametrize("name", CASES)
def test_logits_match_torchvision(name):
    params, state = load(build(name), arrays_of(name), norm=NORMS[name])
    y = evaluate(build(name), params, state)[1]
    np.testing.assert_allclose(y, LOGITS[name], atol=2e-5 * np.abs(LOGITS[name]).max())


@pytest.mark.parametrize("names", ["torchvision", "timm"])
@pytest.mark.parametrize("name", CASES)
def test_files_are_read_and_written_bit_for_bit(name, names):
    arrays = arrays_of(name, names)
    loaded = load_state_dict(*shapes(build(name)), arrays, norm=NORMS[name])
    assert (loaded.report.names, loaded.report.initial) == (names, ())
    written = to_torch(loaded.params, loaded.state, names=names, norm=NORMS[name])
    chex.assert_trees_all_equal(written, arrays)


def test_a_new_classifier_keeps_the_hidden_layer_of_mobilenet():
    arrays = arrays_of("mobilenet")
    loaded = load_state_dict(*shapes(build("mobilenet")), arrays, norm="batch", new_classifier=True)
    assert loaded.report.initial == ("classifier.bias", "classifier.kernel")


def test_arrays_that_torch_computes_are_left_out():
    index = {"features.1.0.attn.relative_position_index": np.zeros(81, np.int64)}
    loaded = load_state_dict(*shapes(build("swin")), arrays_of("swin") | index)
    assert loaded.report.unused == tuple(index)


@pytest.mark.parametrize("name", ["efficientnet", "regnet_y"])
def test_weights_of_plain_norm_give_the_same_logits_in_place(name):
    network, options = CASES[name]
    options = {n: o for n, o in options.items() if n != "eps"}
    activation = {"activation": "relu"} if name == "regnet_y" else {}
    in_place, plain = (
        models.get(network, num_classes=4, norm=norm, **options, **activation)
        for norm in ("abn", "batch")
    )
    arrays = draw(torch_shapes(plain, "torchvision"))
    expected = evaluate(plain, *load(plain, arrays, norm="batch"))
    variables = load(in_place, arrays, norm="abn", trained_with="batch")
    y = evaluate(in_place, *variables)
    np.testing.assert_allclose(y, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "names", "title", "options"),
    [
        (
            "efficientnet_v2_s",
            "torchvision",
            "torchvision's efficientnet_v2_s",
            {"variant": "efficientnet_v2_s", "eps": 1e-3, "padding": "half"},
        ),
        (
            "mobilenetv3_small_100",
            "timm",
            "timm's mobilenetv3_small_100 or tf_mobilenetv3_small_100",
            {},
        ),
        ("regnety_002", "timm", "timm's regnety_002", {"variant": "regnety_002"}),
        ("swin_t", "torchvision", "torchvision's swin_t", {"variant": "swin_t"}),
    ],
)
def test_files_of_published_networks_are_recognized(name, names, title, options):
    found = families.recognize(torch_shapes(models.get(name, num_classes=10), names))
    assert (found.title, dict(found.options), found.classes) == (title, options, 10)


def test_epsilons_of_networks_of_the_same_name_differ():
    assert families.variant_options("efficientnet_b5", "torchvision")["eps"] == 1e-3
    assert families.variant_options("efficientnet_b5", "timm")["eps"] == 1e-5
    assert families.variant_options("resnet18", "timm") == {}


def test_weights_of_another_variant_are_named():
    shape_of = torch_shapes(models.get("regnety_002", num_classes=10), "timm")
    zeros = {key: np.broadcast_to(np.float32(0), shape) for key, shape in shape_of.items()}
    with pytest.raises(
        ValueError, match=re.escape("weights of timm's regnety_002, the network is regnet_y_400mf")
    ):
        from_torch("regnet_y_400mf", zeros, norm="batch", activation="relu")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_logits_match_torchvision(name):
    pytest.importorskip("torch")
    try:
        network = torchvision_cases.peer(name)
    except (ImportError, RuntimeError) as error:  # torchvision without its operators
        pytest.skip(str(error))
    arrays = arrays_of(name)
    expected = torchvision_cases.logits(network, arrays)
    y = evaluate(build(name), *load(build(name), arrays, norm=NORMS[name]))
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def test_plain_batch_norm_gets_the_factor_of_in_place_norm():
    converted = convert({"bn1.gamma": np.array([-0.5, 0.0, 2.0])}, "abn", "batch")
    np.testing.assert_allclose(converted["bn1.gamma"], [0.50001, 0.00001, 2.00001], rtol=1e-12)
