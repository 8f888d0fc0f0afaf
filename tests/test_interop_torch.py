"""Torch's weights: names and shapes are the originals', outputs those of the state dict as it is."""

import functools
import re
import sys
import zlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_networks as originals

from fnet import models
from fnet.interop import norm_weights, torch_names
from fnet.interop.torch import fill, from_torch, to_torch

pytestmark = pytest.mark.slow

# Number of arrays, and crc32 of their sorted lines "key shape", of the state dicts of
# mapillary/inplace_abn 1.1's scripts/models, 1000 classes (of "3x3", with input_3x3=True).
REFERENCE = {
    "resnet18": (102, 0xA5CD3E97),
    "resnet34": (182, 0x2D39EB1A),
    "resnet50": (267, 0xDDB1E023),
    "resnet101": (522, 0x4964DFAF),
    "resnet152": (777, 0x8E974A05),
    "resnext50": (251, 0xA843DD0F),
    "resnext101": (506, 0x06E73229),
    "resnext101 3x3": (516, 0x3BDE591F),
    "resnext152": (761, 0xAB71AB86),
    "densenet121": (602, 0x5624D8B2),
    "densenet169": (842, 0x78C51768),
    "densenet201": (1002, 0x27D23ABF),
    "densenet264": (1322, 0x5485DB26),
    "wider_resnet16": (83, 0x6192C9D5),
    "wider_resnet16_a2": (83, 0x6192C9D5),
    "wider_resnet20": (103, 0xB87DA4DB),
    "wider_resnet20_a2": (103, 0xB87DA4DB),
    "wider_resnet38": (193, 0x75556ADD),
    "wider_resnet38_a2": (193, 0x75556ADD),
}
# The same of torchvision 0.28.
TORCHVISION = {
    "resnet18": (102, 0x34D030BD),
    "resnet34": (182, 0x888943B5),
    "resnet50": (267, 0x6AA4621C),
    "resnet101": (522, 0xCE4979FC),
    "resnet152": (777, 0xADD45A78),
}
# Of the snapshot's parts that scripts/test_vistas_single_gpu.py reads.
VISTAS = (212, 0x04DF3295)


@functools.cache
def shapes(network):
    return jax.eval_shape(network.init, jax.random.key(0))


@functools.cache
def keys_and_shapes(name, names="reference", **options):
    """{key in torch: shape there}, found without any array."""
    return in_torch(models.get(name, num_classes=1000, **options), names)


def in_torch(network, names):
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes(network))[0]:
        name = ".".join(step.key for step in path[1:])
        order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[leaf.ndim]
        found[torch_names.torch_key(name, names)] = tuple(leaf.shape[i] for i in order)
    return found


def digest(shape_of):
    lines = sorted(f"{key} {shape}" for key, shape in shape_of.items())
    return len(lines), zlib.crc32("\n".join(lines).encode())


@pytest.mark.parametrize("name", REFERENCE)
def test_names_and_shapes_are_the_references(name):
    options = {"stem": "3x3"} if name.endswith("3x3") else {}
    assert digest(keys_and_shapes(name.split()[0], **options)) == REFERENCE[name]


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_and_shapes_of_resnets_are_torchvisions(name):
    assert digest(keys_and_shapes(name, "torchvision")) == TORCHVISION[name]


def test_names_and_shapes_of_a_deeplab_are_those_of_the_vistas_snapshot():
    body = models.get("wider_resnet38_a2", num_classes=None, dilated=True)
    assert digest(in_torch(models.deeplab(body, 4096, num_classes=65), "reference")) == VISTAS


@pytest.mark.parametrize("name", REFERENCE)
def test_a_network_is_recognised_by_its_names(name):
    options = {"stem": "3x3"} if name.endswith("3x3") else {}
    of_reference = keys_and_shapes(name.split()[0], **options)
    known = name.split()[0].removesuffix("_a2")
    assert torch_names.recognise(of_reference) == known
    in_parts = [f"body.{key}" for key in of_reference]
    assert torch_names.recognise(in_parts) == f"deeplab on {known}"
    if name in TORCHVISION:
        assert torch_names.recognise(keys_and_shapes(name, "torchvision")) == name
    assert torch_names.recognise([key for key in of_reference if "mod3" not in key]) is None


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


def network_of(name, **options):
    if name == "deeplab":
        body = models.get("wider_resnet16_a2", num_classes=None, dilated=True, **options)
        return models.deeplab(body, 10, num_classes=5, hidden=4, dilations=(1, 2, 3), **options)
    if name.startswith("resnext"):
        options |= {"base_channels": (8, 8, 16), "groups": 4, "stem": "3x3"}
    if name.startswith("densenet"):
        options |= {"growth": 4}
    return models.get(name, num_classes=5, **options)


def drawn(shape_of, seed=0):
    """A state dict of these shapes; gammas of both signs, some of them 0."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for key, shape in shape_of.items():
        a = generator.normal(size=shape)
        if key.endswith("running_var"):
            a = np.exp(a / 2)
        elif len(shape) > 1:
            a /= np.sqrt(np.prod(shape[1:]))
        elif key.endswith("weight"):
            a[:: max(len(a) // 2, 1)] = 0
        arrays[key] = a.astype(np.float32)
    return arrays


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


def read(network, arrays, **options):
    return fill(*shapes(network), arrays, **options)[:2]


def images(size=32):
    return np.random.default_rng(1).normal(size=(2, 3, size, size)).astype(np.float32)


ORIGINALS = {
    "resnet18": originals.resnet,
    "resnext50": originals.resnext,
    "densenet121": originals.densenet,
    "wider_resnet16": originals.wider_resnet,
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_logits_are_those_of_the_state_dict_as_torch_runs_it(name, small):
    network = network_of(name)
    arrays = drawn(in_torch(network, "reference"))
    params, state = read(network, arrays)
    expected = ORIGINALS[name](originals.Network(arrays), images())
    found = outputs(network, params, state, images())
    assert_close(found, expected)


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


def test_a_gamma_that_in_place_norm_cannot_have_is_never_changed_in_silence():
    gamma = np.asarray([0.5, -0.5, 1e-6], np.float32)
    arrays = {"mod2.block1.bn1.gamma": gamma, "bn_out.gamma": np.abs(gamma) + 1}
    with pytest.raises(ValueError, match=r"2 gammas of 1 norms are below eps 1e-05 \(the least is -0.5; mod2.block1.bn1.gamma has 2\)"):  # fmt: skip
        norm_weights.change(arrays, "batch", "abn")
    with pytest.raises(ValueError, match="'abn' or 'batch', not for 'batch' in 'group'"):
        norm_weights.change(arrays, "batch", "group")
    moved = norm_weights.change({"bn_out.gamma": np.abs(gamma) + 1}, "batch", "abn")
    chex.assert_trees_all_close(norm_weights.change(moved, "abn", "batch"), {"bn_out.gamma": np.abs(gamma) + 1}, rtol=1e-7)  # fmt: skip
    assert gamma.tolist() == np.asarray([0.5, -0.5, 1e-6], np.float32).tolist()


def test_negative_gammas_are_told_where_nobody_says_how_they_were_trained(arrays):
    count = sum((a < 0).sum() for k, a in arrays.items() if a.ndim == 1 and k.endswith("weight"))
    (note,) = fill(*shapes(preact()), arrays).report.notes
    assert note.startswith(f"{count} gammas are negative, of which in-place norm takes the size")
    assert fill(*shapes(preact()), arrays, trained_with="abn").report.notes == ()


def preact(num_classes=3):
    return models.get("preact_resnet", num_classes=num_classes, widths=(4,), blocks_per_stage=1)


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


def test_a_new_classifier_is_drawn_with_the_key_that_is_given(arrays):
    other = preact(num_classes=9)
    params, _ = from_torch(other, arrays, new_classifier=True, key=jax.random.key(3))
    own, _ = other.init(jax.random.key(3))
    chex.assert_trees_all_equal(params["head"], own["head"])
    chex.assert_trees_all_equal(params["stem"], from_torch(preact(), arrays)[0]["stem"])


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
