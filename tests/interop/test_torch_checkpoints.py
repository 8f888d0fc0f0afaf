"""State dicts from torch: wrappers, casts, reports and errors."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch_cases import keys_and_shapes, preact, random_state_dict, shapes, torch_shapes

from fnet import models
from fnet.interop import norm_conversion
from fnet.interop.torch import from_torch, load_state_dict, to_torch


def test_convert_rejects_gammas_that_in_place_norm_cannot_represent():
    gamma = np.asarray([0.5, -0.5, 1e-6], np.float32)
    arrays = {"mod2.block1.bn1.gamma": gamma, "bn_out.gamma": np.abs(gamma) + 1}
    with pytest.raises(ValueError, match=r"2 gammas of 1 norms are below eps 1e-05 \(the least is -0.5; mod2.block1.bn1.gamma has 2\)"):  # fmt: skip
        norm_conversion.convert(arrays, "batch", "abn")
    with pytest.raises(ValueError, match="cannot convert weights of norm 'batch' to norm 'group'"):
        norm_conversion.convert(arrays, "batch", "group")
    converted = norm_conversion.convert({"bn_out.gamma": np.abs(gamma) + 1}, "batch", "abn")
    chex.assert_trees_all_close(norm_conversion.convert(converted, "abn", "batch"), {"bn_out.gamma": np.abs(gamma) + 1}, rtol=1e-7)  # fmt: skip
    assert gamma.tolist() == np.asarray([0.5, -0.5, 1e-6], np.float32).tolist()


def test_a_kernel_absorbs_the_sign_and_size_of_gammas_below_eps():
    gamma = np.asarray([0.5, -0.5, 1e-6], np.float32)
    arrays = {"bn1.gamma": gamma, "conv1.kernel": np.ones((1, 3)), "bn1.running_mean": np.ones(3)}
    converted = norm_conversion.convert(arrays, "batch", "abn")
    for name in ("conv1.kernel", "bn1.running_mean"):
        np.testing.assert_allclose(converted[name].reshape(3), [1, -1, 0.1], rtol=1e-6)


def test_negative_gammas_are_reported_without_trained_with(arrays):
    count = sum((a < 0).sum() for k, a in arrays.items() if a.ndim == 1 and k.endswith("weight"))
    (note,) = load_state_dict(*shapes(preact()), arrays).report.notes
    assert note.startswith(
        f"{count} gammas are negative, but in-place norm uses their absolute value"
    )
    assert load_state_dict(*shapes(preact()), arrays, trained_with="abn").report.notes == ()


@pytest.fixture
def arrays():
    return random_state_dict(torch_shapes(preact(), "reference"))


def test_wrappers_of_torch_are_removed(arrays):
    expected = from_torch(preact(), arrays)
    counters = {"module.abn.num_batches_tracked": np.int64(3)}
    wrapped = {f"module.module.{key}": a for key, a in arrays.items()} | counters
    for checkpoint in (
        wrapped,
        {"state_dict": wrapped, "epoch": 3},
        {"model": {f"_orig_mod.{key}": a for key, a in arrays.items()}, "optimizer": {"lr": 1}},
    ):
        chex.assert_trees_all_equal(from_torch(preact(), checkpoint), expected)
    whole = {"state_dict": wrapped, "epoch": 3}
    report = load_state_dict(*shapes(preact()), whole, trained_with="abn").report
    assert report.unused == ("epoch", "abn.num_batches_tracked")
    assert len(report.read) == len(arrays)
    assert (report.initial, report.renamed, report.notes) == ((), {}, ())


def test_new_classifier_is_initialized_with_the_given_key(arrays):
    other = preact(num_classes=9)
    params, _ = from_torch(other, arrays, new_classifier=True, key=jax.random.key(3))
    initial, _ = other.init(jax.random.key(3))
    chex.assert_trees_all_equal(params["head"], initial["head"])
    chex.assert_trees_all_equal(params["stem"], from_torch(preact(), arrays)[0]["stem"])


def test_casts_are_reported(arrays):
    narrow = {
        key: a.astype(np.float16 if a.ndim > 1 else jnp.bfloat16) for key, a in arrays.items()
    }
    narrow["abn.bias"] = np.full(4, np.inf, np.float64)
    options = {"trained_with": "abn"}
    with pytest.raises(
        ValueError, match=r"not finite: abn.bias \(4 of 4 values\); allow_nonfinite"
    ):
        load_state_dict(*shapes(preact()), narrow, **options)
    loaded = load_state_dict(*shapes(preact()), narrow, **options, allow_nonfinite=True)
    chex.assert_trees_all_equal_dtypes(loaded.params, shapes(preact())[0])
    assert loaded.report.notes == (
        "bfloat16 cast to float32",
        "float16 cast to float32",
        "float64 cast to float32",
        "not finite: abn.bias (4 of 4 values)",
    )


def test_loaded_arrays_are_copies(arrays):
    params, _ = from_torch(preact(), arrays)
    before = np.array(params["abn"]["beta"])
    arrays["abn.bias"] += 1
    np.testing.assert_array_equal(params["abn"]["beta"], before)
    to_torch(*from_torch(preact(), arrays))["abn.bias"] += 1  # changes no other array


def without(key):
    return lambda arrays: arrays.pop(key)


def with_(key, value):
    return lambda arrays: arrays.update({key: value})


MISTAKES = [
    (without("abn.bias"), "weights of another network: abn.bias (4,) is missing"),
    (with_("abn.bias", np.ones(3)), "weights of another network: abn.bias is (3,), in the network (4,)"),
    (with_("extra", np.ones(3)), "weights of another network: extra (3,) is not in the network"),
    (with_("head.weight", np.ones((9, 4))), "weights for other classes: head.weight is (9, 4), in the network (3, 4); new_classifier=True leaves"),
    (with_("module.abn.bias", np.ones(4)), "abn.bias occurs twice, under different wrappers"),
    (dict.clear, "no arrays in it, neither at the top level nor under model_ema, "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"), MISTAKES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_rejects_wrong_weights_by_name_and_shape(change, message, arrays):
    change(arrays)
    with pytest.raises(ValueError, match=re.escape(message)):
        from_torch(preact(), arrays)


def zeros(name, names="reference", **options):
    """Weights of a network that take no memory."""
    shape_of = keys_and_shapes(name, names, **options)
    return {key: np.broadcast_to(np.float32(0), shape) for key, shape in shape_of.items()}


def test_rejects_weights_of_another_network_with_its_name():
    ours = "mapillary/inplace_abn's"
    for name, weights, message in (
        ("resnet18", zeros("resnet34"), f"{ours} resnet34, the network is resnet18; give depth=34"),
        (
            "resnext50",
            zeros("resnet18", "torchvision"),
            "torchvision's resnet18, the network is resnext50; give name='resnet', depth=18",
        ),
        ("resnet18", zeros("resnet18d", "torchvision"), "give stem='deep', shortcut='pool'"),
        ("resnext50", zeros("resnext50", stem="3x3"), "give stem='3x3'"),
        ("resnext50", zeros("resnext50", groups=32), "give groups=32"),
        (
            "resnet18",
            {"features.x.weight": np.zeros((64, 3, 7, 7))},
            "the weights are of no known network, the network is mapillary/inplace_abn's resnet18",
        ),
        (
            "resnet18",
            {"layer1.0.se.fc1.bias": np.zeros(16)} | zeros("resnet18", "torchvision"),
            "layer1.0.se.fc1.bias (16,) is not in the network; the weights are of no known network",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            from_torch(name, weights, num_classes=1000)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a: from_torch("resnet18", zeros("resnet18", "torchvision")), ValueError, "trained with plain batch norm; use norm='batch'"),
        (lambda a: from_torch(preact(), a, num_classes=3), ValueError, r"\['num_classes'\] only apply to a network given by name"),
        (lambda a: from_torch(preact(), a, new_classifier=True), ValueError, "a new classifier needs key="),
        (lambda a: from_torch(preact(), a | {"abn.bias": np.zeros(4, np.int32)}), TypeError, r"abn.beta must be floating, got int32"),
        (lambda a: to_torch(*from_torch(preact(), a), names="torchvision"), ValueError, r"one of \('reference',\), got 'torchvision'; the network has"),
        (lambda a: to_torch({"mixer": {"decay": np.ones(3)}}, {}), ValueError, r"mixer\.decay has no name in torch"),
        (lambda a: to_torch({"conv": {"kernel": np.ones((3, 3, 1))}}, {}), ValueError, "must be a dense or 2d convolution kernel"),
    ],
)  # fmt: skip
def test_rejects_invalid_arguments(call, error, message, arrays):
    with pytest.raises(error, match=message):
        call(arrays)


def test_a_classifier_that_does_not_fit_is_new(arrays):
    other, like = preact(num_classes=9), shapes(preact(num_classes=9))
    params, _ = from_torch(other, arrays, new_classifier=None, key=jax.random.key(3))
    chex.assert_trees_all_equal(params["head"], other.init(jax.random.key(3))[0]["head"])
    fitting = load_state_dict(*shapes(preact()), arrays, new_classifier=None)
    assert fitting.report.initial == ()
    bodies = {key: a for key, a in arrays.items() if not key.startswith("head")}
    assert set(load_state_dict(*like, bodies, new_classifier=None).report.initial) == {
        "head.bias",
        "head.kernel",
    }


def test_weights_of_another_kind_of_network_are_named(arrays):
    transformer = models.get(
        "vit", num_classes=3, image_shape=(8, 8, 3), patch=4, width=8, blocks=1, heads=1
    )
    for given, message in (
        (
            zeros("resnet18", "torchvision"),
            "weights of torchvision's resnet18, the network is anot",
        ),
        (arrays, r"weights of another network: abn.bias \(4,\) is not in the network; neither is"),
    ):
        with pytest.raises(ValueError, match=message):
            load_state_dict(*shapes(transformer), given)


def test_keys_of_a_larger_network_are_left(arrays):
    larger = {f"model.{key}": a for key, a in arrays.items()} | {"criterion.weight": np.ones(3)}
    loaded = load_state_dict(*shapes(preact()), larger, trained_with="abn")
    expected = from_torch(preact(), arrays)
    chex.assert_trees_all_equal((loaded.params, loaded.state), expected)
    assert loaded.report.unused == ("criterion.weight",)
    with pytest.raises(ValueError, match="no entry 'ema' with weights; it has state_dict"):
        load_state_dict(*shapes(preact()), {"state_dict": arrays}, entry="ema")


def test_arrays_with_the_names_of_the_network_are_read(arrays):
    params, state = from_torch(preact(), arrays)
    flat = {
        jax.tree_util.keystr(path[1:], simple=True, separator="."): np.asarray(a)
        for path, a in jax.tree_util.tree_flatten_with_path((params, state))[0]
    }
    loaded = load_state_dict(*shapes(preact()), flat, trained_with="abn")
    assert loaded.report.names == "fnet"
    chex.assert_trees_all_equal((loaded.params, loaded.state), (params, state))
