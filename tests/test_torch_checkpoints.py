"""Torch's checkpoints: what is taken off, cast, told and refused."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch_cases import drawn, in_torch, keys_and_shapes, preact, shapes

from fnet.interop import norm_conversion
from fnet.interop.torch import fill, from_torch, to_torch


def test_a_gamma_that_in_place_norm_cannot_have_is_never_changed_in_silence():
    gamma = np.asarray([0.5, -0.5, 1e-6], np.float32)
    arrays = {"mod2.block1.bn1.gamma": gamma, "bn_out.gamma": np.abs(gamma) + 1}
    with pytest.raises(ValueError, match=r"2 gammas of 1 norms are below eps 1e-05 \(the least is -0.5; mod2.block1.bn1.gamma has 2\)"):  # fmt: skip
        norm_conversion.change(arrays, "batch", "abn")
    with pytest.raises(ValueError, match="'abn' or 'batch', not for 'batch' in 'group'"):
        norm_conversion.change(arrays, "batch", "group")
    moved = norm_conversion.change({"bn_out.gamma": np.abs(gamma) + 1}, "batch", "abn")
    chex.assert_trees_all_close(norm_conversion.change(moved, "abn", "batch"), {"bn_out.gamma": np.abs(gamma) + 1}, rtol=1e-7)  # fmt: skip
    assert gamma.tolist() == np.asarray([0.5, -0.5, 1e-6], np.float32).tolist()


def test_negative_gammas_are_told_where_nobody_says_how_they_were_trained(arrays):
    count = sum((a < 0).sum() for k, a in arrays.items() if a.ndim == 1 and k.endswith("weight"))
    (note,) = fill(*shapes(preact()), arrays).report.notes
    assert note.startswith(f"{count} gammas are negative, of which in-place norm takes the size")
    assert fill(*shapes(preact()), arrays, trained_with="abn").report.notes == ()


@pytest.fixture
def arrays():
    return drawn(in_torch(preact(), "reference"))


def test_wrappers_of_torch_are_taken_off(arrays):
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
    report = fill(*shapes(preact()), whole, trained_with="abn").report
    assert report.left == ("epoch", "abn.num_batches_tracked")
    assert len(report.read) == len(arrays)
    assert (report.initial, report.renamed, report.notes) == ((), {}, ())


def test_a_new_classifier_is_drawn_with_the_key_that_is_given(arrays):
    other = preact(num_classes=9)
    params, _ = from_torch(other, arrays, new_classifier=True, key=jax.random.key(3))
    own, _ = other.init(jax.random.key(3))
    chex.assert_trees_all_equal(params["head"], own["head"])
    chex.assert_trees_all_equal(params["stem"], from_torch(preact(), arrays)[0]["stem"])


def test_other_precisions_are_cast_and_said(arrays):
    half = {key: a.astype(np.float16 if a.ndim > 1 else jnp.bfloat16) for key, a in arrays.items()}
    half["abn.bias"] = np.full(4, np.inf, np.float64)
    filled = fill(*shapes(preact()), half, trained_with="abn")
    chex.assert_trees_all_equal_dtypes(filled.params, shapes(preact())[0])
    assert filled.report.notes == (
        "bfloat16 became float32",
        "float16 became float32",
        "float64 became float32",
        "not all finite: abn.beta",
    )


def test_arrays_that_were_read_are_copies(arrays):
    params, _ = from_torch(preact(), arrays)
    before = np.array(params["abn"]["beta"])
    arrays["abn.bias"] += 1
    np.testing.assert_array_equal(params["abn"]["beta"], before)
    to_torch(*from_torch(preact(), arrays))["abn.bias"] += 1  # is nobody else's


def without(key):
    return lambda arrays: arrays.pop(key)


def with_(key, value):
    return lambda arrays: arrays.update({key: value})


MISTAKES = [
    (without("abn.bias"), "weights of another network: abn.bias (4,) is missing"),
    (with_("abn.bias", np.ones(3)), "weights of another network: abn.bias is (3,), in the network (4,)"),
    (with_("extra", np.ones(3)), "weights of another network: extra (3,) is not in the network"),
    (with_("head.weight", np.ones((9, 4))), "weights for other classes: head.weight is (9, 4), in the network (3, 4); new_classifier=True leaves"),
    (with_("module.abn.bias", np.ones(4)), "abn.bias is there twice, under different wrappers"),
    (dict.clear, "no arrays in it, neither by themselves nor under state_dict or"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"), MISTAKES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_weights_that_do_not_fit_are_refused_by_name_and_shape(change, message, arrays):
    change(arrays)
    with pytest.raises(ValueError, match=re.escape(message)):
        from_torch(preact(), arrays)


def zeros(name, names="reference", **options):
    """Weights of a network that nobody has to hold."""
    shape_of = keys_and_shapes(name, names, **options)
    return {key: np.broadcast_to(np.float32(0), shape) for key, shape in shape_of.items()}


def test_weights_of_another_network_are_told_by_its_name():
    with pytest.raises(ValueError, match="look like resnet34, the network is resnet18"):
        from_torch("resnet18", zeros("resnet34"))
    with pytest.raises(ValueError, match="look like resnet18, the network is resnext50"):
        from_torch("resnext50", zeros("resnet18", "torchvision"))
    with pytest.raises(ValueError, match="are of none known here, the network is resnet18"):
        from_torch("resnet18", {"features.conv0.weight": np.zeros((64, 3, 7, 7))})
    with pytest.raises(ValueError, match="the weights have the stem 3x3"):
        from_torch("resnext50", zeros("resnext50", stem="3x3"))
    with pytest.raises(ValueError, match="both are resnext50, with other options"):
        from_torch("resnext50", zeros("resnext50"), groups=32)


def test_torchvisions_weights_are_not_taken_for_in_place_ones_in_silence():
    with pytest.raises(ValueError, match="trained with plain batch norm: norm='batch' takes"):
        from_torch("resnet18", zeros("resnet18", "torchvision"))


def test_what_from_torch_is_given_wrongly_is_said(arrays):
    with pytest.raises(ValueError, match=r"\['num_classes'\] are of a network by name"):
        from_torch(preact(), arrays, num_classes=3)
    with pytest.raises(ValueError, match="a new classifier needs key="):
        from_torch(preact(), arrays, new_classifier=True)
    arrays["abn.bias"] = np.zeros(4, np.int32)
    with pytest.raises(TypeError, match=r"abn.beta must be floating, got int32"):
        from_torch(preact(), arrays)


def test_what_torch_has_no_name_for_is_refused(arrays):
    params, state = from_torch(preact(), arrays)
    with pytest.raises(
        ValueError, match=r"one of \('reference',\), got 'torchvision'; torchvision's"
    ):
        to_torch(params, state, names="torchvision")
    with pytest.raises(ValueError, match=r"mixer\.decay has no name in torch"):
        to_torch({"mixer": {"decay": np.ones(3)}}, {})
    with pytest.raises(ValueError, match="of no dense layer and no 2d convolution"):
        to_torch({"conv": {"kernel": np.ones((3, 3, 1))}}, {})
