"""``fnet import`` and ``fnet export``: pretrained weights in, weights out."""

import argparse
import dataclasses
import functools
import json
import os
import pickle
import shutil
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import chex
import jax
import numpy as np
import pytest
from program_cases import assert_one_line_error, exit_code, fnet_command, output_of
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from fnet.interop.torch import to_torch
from fnet.losses.segmentation import bilinear_weights
from fnet.models.blocks import STAGES
from train.config import Optim, recipes
from train.data import Outputs
from train.errors import TrainingError, UserError
from train.run import weight_files
from train.run.checkpoints import Checkpoints
from train.run.open_run import write_classes
from train.run.run_folder import RunFolder
from train.run.setup import setup
from train.run.weight_files import load, load_configured, with_flags
from train.tasks import images

RESNET = """
from train.config import Config, Optim, ResNet, Synthetic, Train

def config():
    return Config(
        name="resnet",
        data=Synthetic(batch_size=2, image_size=32, classes=10, examples=8),
        model=ResNet(depth=18),
        optim=Optim(learning_rate=0.1),
        train=Train(steps=2),
    )
"""

MOBILE = RESNET.replace("ResNet", "EfficientNet").replace(
    "depth=18", "variant='mobilenetv3_small_100'"
)
SMALL = RESNET.replace("ResNet", "PreactResNet").replace("depth=18", "widths=(4,)")


@pytest.fixture(autouse=True)
def place(workplace, monkeypatch):
    """The workplace, with recipes of residual networks with few blocks."""
    (workplace / "resnet.py").write_text(RESNET)
    (workplace / "mobile.py").write_text(MOBILE)
    (workplace / "small.py").write_text(SMALL)
    depths = {18: (1, 1, 1, 1), 34: (2, 1, 1, 1)}
    monkeypatch.setitem(STAGES, "resnet", depths)
    return workplace


@pytest.fixture
def trained(finished_run, place, capsys):
    """A finished run of the tiny recipe, in the folder ``trained``."""
    capsys.readouterr()
    return finished_run.rename(place / "trained")


def checkpoint_of(folder):
    run = setup(folder.read_config())
    with Checkpoints(folder.checkpoints, 2) as checkpoints:
        restored = checkpoints.restore(run.state_shapes)
    key = jax.random.key_data(restored.state.key)
    state = restored.state.replace(key=None)
    return restored.step, key, jax.tree.map(np.asarray, state), restored.position


@functools.cache
def state_dict(name, **changes):
    """Random weights for a recipe's network with torch's names. Do not change them."""
    shapes = setup(recipes.load(name)).state_shapes
    generator = np.random.default_rng(0)
    params, state = jax.tree.map(
        lambda a: np.abs(generator.normal(size=a.shape)).astype(a.dtype),
        (shapes.params, shapes.model_state),
    )
    return to_torch(params, state, **changes)


def test_exporting_and_importing_keeps_the_metrics(trained, place, capsys):
    assert output_of(capsys, "export", "trained").strip() == "trained/weights.safetensors"
    output = output_of(capsys, "import", "tiny.py", "trained/weights.safetensors", "--out", "new")
    assert (
        "wrote new at step 0; evaluate it with fnet eval new, train it with fnet train new --resume"
        in output
    )
    before, after = output_of(capsys, "eval", "trained"), output_of(capsys, "eval", "new")
    assert "new after step 0" in after
    metrics = [line for line in before.splitlines() if line.startswith("test/")]
    assert len(metrics) >= 2
    assert [line for line in after.splitlines() if line.startswith("test/")] == metrics

    fnet_command("export", "new", "--out", "again.safetensors")
    chex.assert_trees_all_equal(load_file("again.safetensors"), load_file(place / "trained/weights.safetensors"))  # fmt: skip


@pytest.mark.slow
def test_training_from_imported_weights_equals_training_from_the_same_initial_values(
    trained, place
):
    config = recipes.load("tiny.py")
    own = setup(config).compile_init()(jax.random.key(config.train.seed))  # as a run computes them
    save_file(to_torch(own.params, own.model_state), "first.safetensors")
    fnet_command("import", "tiny.py", "first.safetensors", "--out", "new")

    # Before its first step, all but the network may change.
    folder = RunFolder(place / "new")
    other = dataclasses.replace(config, optim=Optim(name="adamw", learning_rate=0.003))
    folder.resume(other, 1)
    assert folder.read_config() == other
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, first_stride=2))
    if config.model.first_stride != 2:
        with pytest.raises(UserError, match=r"model.first_stride is 1 there and 2 here"):
            folder.resume(other, 1)
    folder.resume(config, 1)
    fnet_command("train", "new", "--resume")
    new, own = (checkpoint_of(folder) for folder in (RunFolder(place / "new"), RunFolder(trained)))
    chex.assert_trees_all_equal(new, own)


def test_a_run_starts_from_weights_with_other_classes(place):
    save_file(state_dict("small.py"), "given.safetensors")
    config = recipes.load("small.py")
    model = dataclasses.replace(config.model, pretrained="given.safetensors")
    data = dataclasses.replace(config.data, classes=7)
    run = setup(dataclasses.replace(config, model=model, data=data))
    initial = load_configured(run)
    new, left = initial.report.initial, initial.report.unused
    assert (set(new), set(left)) == ({"head.bias", "head.kernel"}, {"head.bias", "head.weight"})
    width = state_dict("small.py")["head.weight"].shape[1]
    assert initial.values[1:] == (7 * width + 7, 10 * width + 10)
    state = run.compile_init(initial.variables)(jax.random.key(0))
    own = run.compile_init()(jax.random.key(0))
    chex.assert_trees_all_equal(state.params["head"], own.params["head"])
    chex.assert_trees_all_equal(state.opt_state, own.opt_state)
    np.testing.assert_array_equal(state.params["abn"]["beta"], state_dict("small.py")["abn.bias"])


def test_the_classifier_of_a_run_goes_with_its_classes(trained):
    config = recipes.load("tiny.py")
    model = dataclasses.replace(config.model, pretrained="trained")
    run = setup(dataclasses.replace(config, model=model))
    number = len(run.task.dataset.classes)
    names = [f"class {i}" for i in range(number)]

    def load_trained_on(classes, **options):
        write_classes(RunFolder(trained), Outputs(classes))
        dataset = run.task.dataset._replace(classes=tuple(names))
        other = run._replace(task=run.task._replace(dataset=dataset))
        return load(other, "trained", **options)

    kernel = load_trained_on(names).variables[0]["head"]["kernel"]
    turned = load_trained_on(names[::-1])
    np.testing.assert_array_equal(turned.variables[0]["head"]["kernel"], kernel[:, ::-1])
    assert not turned.report.notes
    others = [f"other {i}" for i in range(number)]
    loaded = load_trained_on(others, new_classifier=None)
    assert loaded.variables[0]["head"]["kernel"] is None
    assert "the classifier is new, because the weights are for other 0" in loaded.report.notes[-1]
    with pytest.raises(UserError, match=r"weights for other classes: other 0.*; --new-classifier"):
        load_trained_on(others, new_classifier=False)
    unnamed = load_trained_on([str(i) for i in range(number)])
    assert "which have no names, are taken for class 0, class 1" in unnamed.report.notes[-1]
    np.testing.assert_array_equal(unnamed.variables[0]["head"]["kernel"], kernel)

    # Folders that are numbers are sorted as text, so that "10" comes before "2".
    names[:] = sorted(map(str, range(number)))[::-1]
    by_number = kernel[:, [int(name) for name in names]]
    for without_names in ([str(i) for i in range(number)], [f"LABEL_{i}" for i in range(number)]):
        loaded = load_trained_on(without_names)
        np.testing.assert_array_equal(loaded.variables[0]["head"]["kernel"], by_number)
        assert not loaded.report.notes
    for named in (others, [str(i + 1) for i in range(number)]):
        loaded = load_trained_on(named)
        np.testing.assert_array_equal(loaded.variables[0]["head"]["kernel"], by_number)
        assert "are taken for the classes by number" in loaded.report.notes[-1]


@pytest.mark.parametrize(
    ("content", "classes"),
    [
        ({"class_to_idx": {"cat": 2, "ant": 0, "bee": 1}}, ("ant", "bee", "cat")),
        ({"class_to_idx": {"cat": 2, "ant": 0}}, ()),
        ({"classes": ["cat", "ant"], "state_dict": {}}, ("cat", "ant")),
        ({"classes": 3}, ()),
        ({}, ()),
    ],
)
def test_classes_of_a_torch_checkpoint_are_read(content, classes):
    assert weight_files._torch_classes(content) == classes


def test_a_run_starts_from_another_run(trained):
    config = recipes.load("tiny.py")
    model = dataclasses.replace(config.model, pretrained="trained")
    run = setup(dataclasses.replace(config, model=model))
    initial = load_configured(run)
    assert (initial.report.names, initial.report.initial, initial.report.unused) == ("fnet", (), ())
    state = run.compile_init(initial.variables)(jax.random.key(1))
    with Checkpoints(trained / "checkpoints", best=True) as checkpoints:
        saved = checkpoints.restore_network()
    chex.assert_trees_all_equal(state.params, saved.evaluation_params)
    chex.assert_trees_all_equal(state.model_state, saved.model_state)


@pytest.mark.slow
def test_an_exported_program_computes_the_logits_for_any_batch_size(trained, capsys):
    path = output_of(capsys, "export", "trained", "--format", "stablehlo").strip()
    config = RunFolder(trained).read_config()
    run = setup(config)
    with Checkpoints(trained / "checkpoints") as checkpoints:
        params, state, _ = checkpoints.restore_network()
    program = jax.export.deserialize(bytearray((trained / "model.stablehlo").read_bytes()))
    assert path == "trained/model.stablehlo"
    assert program.platforms == ("cpu", "cuda", "tpu")
    shape = run.batch_shapes["image"].shape[1:]
    for n in (1, 2):
        x = np.random.default_rng(n).random((n, *shape), np.float32)
        expected, _ = run.task.model.apply(params, state, images.normalize(config, x), train=False)
        chex.assert_trees_all_close(program.call(x), expected, rtol=1e-5, atol=1e-5)


def test_bilinear_weights_are_those_of_jax():
    for n, size in ((4, 32), (5, 13), (3, 3)):
        expected = jax.image.resize(np.eye(n), (size, n), "bilinear", antialias=False)
        chex.assert_trees_all_close(bilinear_weights(n, size, np.float32), expected, atol=1e-6)


def test_arguments_in_messages_become_flags():
    text = "from_torch: give depth=50, stem='deep', stem_norm=True; new_classifier=True keeps it"
    assert with_flags(text) == (
        "give --model.depth 50 --model.stem deep --model.stem-norm; --new-classifier keeps it"
    )


def test_exported_metadata_describe_the_network(trained, capsys):
    path = output_of(capsys, "export", "trained", "--out", "w.safetensors").strip()
    with safe_open(path, framework="numpy") as file:
        recorded = file.metadata()
    expected = {"format": "pt", "network": "preact_resnet", "norm": "abn", "names": "reference", "activation": "leaky_relu", "activation_param": "0.01"}  # fmt: skip
    assert {name: recorded[name] for name in expected} == expected


@pytest.mark.slow
def test_what_the_arrays_of_timm_do_not_show_is_noted(place, capsys):
    """Epsilon and padding."""
    Path("model").mkdir()
    save_file(state_dict("mobile.py", names="timm"), "model/model.safetensors")
    config = {"architecture": "tf_mobilenetv3_small_100", "label_names": list("abcdefghij")}
    Path("model/config.json").write_text(json.dumps(config))
    notes = load(setup(recipes.load("mobile.py")), "model").report.notes
    assert [note for note in notes if "classifier" not in note] == [
        "variant is mobilenetv3_small_100 here; the weights were trained with "
        "tf_mobilenetv3_small_100",
        "eps is 1e-05 here; the weights were trained with 0.001",
        "padding is half here; the weights were trained with same",
    ]
    config["architecture"] = "efficientnet_blur_b0"
    Path("model/config.json").write_text(json.dumps(config))
    assert exit_code("import", "mobile.py", "model") == 2
    assert_one_line_error(capsys, "model is timm's efficientnet_blur_b0, which is not supported")


def test_the_report_lists_read_renamed_and_unused_arrays(place, capsys):
    arrays = state_dict("resnet.py")
    left = "aux_classifier.[/b]"  # not markup of rich
    save_file(arrays | {left: np.zeros(1)}, "given.safetensors")
    output = output_of(capsys, "import", "resnet.py", "given.safetensors", "--out", "r")
    assert "mod1.bn1.bias -> bn1.beta" in output
    assert left in output
    report = json.loads((place / "r" / "import.json").read_text())
    assert report["file"] == "given.safetensors"
    assert report["names"] == "reference"
    assert report["weights"] == "mapillary/inplace_abn's resnet18"
    assert set(report["read"]) == set(arrays)
    assert report["renamed"]["mod5.block1.convs.bn2.weight"] == "layer4.0.bn2.gamma"
    assert report["unused"] == [left]
    assert (report["initial"], report["notes"]) == ([], [])


def test_notes_weights_of_another_norm_or_activation(place):
    plain = ("--model.norm", "batch", "--model.activation", "relu")
    save_file(state_dict("resnet.py", names="torchvision"), "given.safetensors")
    fnet_command("import", "resnet.py", "given.safetensors", "--out", "plain", *plain)
    assert json.loads((place / "plain" / "import.json").read_text())["notes"] == []
    fnet_command("export", "plain", "--out", "told.safetensors")
    fnet_command("import", "resnet.py", "told.safetensors", "--out", "moved")
    assert json.loads((place / "moved" / "import.json").read_text())["notes"] == [
        "weights of norm 'batch' were converted to norm 'abn'",
        "activation is leaky_relu here; the weights were trained with relu",
    ]


@pytest.fixture
def files(place, shelf):
    """Files without weights, or with weights of another network."""
    if not (shelf / "files").exists():
        write_files(shelf / "files")
    return shutil.copytree(shelf / "files", place, copy_function=os.link, dirs_exist_ok=True)


def write_files(place):
    place.mkdir()
    arrays = state_dict("resnet.py")
    save_file(arrays, place / "good.safetensors")
    vision = state_dict("resnet.py", names="torchvision")
    save_file(vision, place / "vision.safetensors")
    nan = arrays["mod1.bn1.bias"].copy()
    nan[3] = np.nan
    save_file(arrays | {"mod1.bn1.bias": nan}, place / "nan.safetensors")
    extra = {"mod2.block3.convs.conv1.weight": np.zeros((64, 64, 3, 3), np.float32)}
    save_file(arrays | extra, place / "other.safetensors")
    save_file({"a": np.zeros(2, jax.numpy.float8_e4m3fn)}, place / "eight.safetensors")
    (place / "text.safetensors").write_text("these are no weights at all")


IMPORTING = [
    (("text.safetensors",), "text.safetensors is damaged or not a safetensors file"),
    (("eight.safetensors",), "eight.safetensors"),
    (("other.safetensors",), "other.safetensors: weights of another network: mod2.block3.convs.conv1.weight (64, 64, 3, 3) is not in the network"),
    (("good.safetensors", "--model.depth", "34"), "are weights of mapillary/inplace_abn's resnet18, the network is resnet34; give --model.depth 18"),
    (("vision.safetensors", "--model.shortcut", "pool"), "of torchvision's resnet18, the network is resnet18; give --model.shortcut conv"),
    (("nan.safetensors",), "not finite: mod1.bn1.bias (1 of 64 values); --allow-nonfinite accepts them"),
    (("good.safetensors#model",), "good.safetensors#model: no entry 'model' with weights; it holds weights alone"),
    (("good.safetensors", "--data.classes", "7"), "weights for other classes: classifier.fc.bias is (10,), in the network (7,); --new-classifier leaves"),
    (("good.safetensors", "--model.name", "preact_resnet"), "weights of another network"),
    (("good.safetensors", "--trained-with", "group"), "--trained-with: expected one of abn, batch, got group"),
    (("good.safetensors", "--new-clasifier"), "unknown option --new-clasifier (did you mean --new-classifier?)"),
    (("good.safetensors", "--out", "tiny.py"), "cannot write tiny.py"),
    ((), "missing WEIGHTS; usage: fnet import CONFIG WEIGHTS"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), IMPORTING, ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")  # fmt: skip
def test_failing_to_import_is_one_line_and_writes_nothing(words, message, files, capsys):
    before = sorted(files.rglob("*"))
    assert exit_code("import", "resnet.py", *words) == 2
    assert_one_line_error(capsys, message)
    assert sorted(files.rglob("*")) == before


def test_refuses_to_import_into_a_run(trained, capsys):
    before = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    fnet_command("export", "trained", "--out", "w.safetensors")
    capsys.readouterr()
    assert exit_code("import", "tiny.py", "w.safetensors", "--out", "trained") == 2
    assert_one_line_error(capsys, "trained already holds a run")
    assert {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()} == before


EXPORTING = [
    (("trained", "--names", "torchvision"), "names must be one of ('reference',), got 'torchvision'"),
    (("trained", "--names", "timm"), "names must be one of ('reference',), got 'timm'"),
    (("trained", "--format", "stablehlo", "--names", "timm"), "--names: timm has no effect with --format stablehlo"),
    (("trained", "--adapters"), "--adapters: has no effect on a run of preact_resnet; leave it out"),
    (("trained", "--names", "keras"), "--names: expected one of reference, torchvision, timm, got keras"),
    (("trained", "--out", "weights.pth"), "--out: expected a file that ends in .safetensors, got weights.pth"),
    (("trained", "--out", "mine.safetensors"), "--out: mine.safetensors exists and is not overwritten; give another"),
    (("trained", "--format", "stablehlo", "--out", "tiny.py"), "--out: tiny.py exists and is not overwritten"),
    (("trained", "--out", "no/w.safetensors"), "cannot write no/w.safetensors: No such file or directory"),
    (("nowhere",), "no run in nowhere"),
    ((), "missing RUN; usage: fnet export RUN"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), EXPORTING, ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")  # fmt: skip
def test_failing_to_export_is_one_line(words, message, trained, capsys):
    Path("mine.safetensors").touch()
    assert exit_code("export", *words) == 2
    assert_one_line_error(capsys, message)


def test_refuses_networks_without_torch_names(place, capsys):
    model = "TextFile, LanguageModel\ndef config(): return Config(data=TextFile(), model=LanguageModel())"
    (place / "text.py").write_text(f"from train.config import Config, {model}")
    save_file({"a": np.zeros(3)}, "w.safetensors")
    assert exit_code("import", "text.py", "w.safetensors") == 2
    assert_one_line_error(capsys, "model.name: expected a network for images, got language_model")


class Code:
    """An object that runs code when it is unpickled."""

    def __reduce__(self):
        return open, ("ran.txt", "w")


def test_needs_torch_for_a_torch_checkpoint(place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    (place / "code.pth").write_bytes(pickle.dumps({"state_dict": Code()}, protocol=2))
    assert exit_code("import", "resnet.py", "code.pth") == 2
    assert_one_line_error(
        capsys,
        "code.pth: reading it needs torch, which is not installed: pip install 'fnet-jax[torch]'",
    )
    assert not (place / "ran.txt").exists()


def test_refuses_a_torch_that_may_run_code(place, monkeypatch, capsys):
    old = types.SimpleNamespace(__version__="2.5.1+cpu", load=pickle.load)
    monkeypatch.setitem(sys.modules, "torch", old)
    (place / "code.pth").write_bytes(pickle.dumps({"state_dict": Code()}, protocol=2))
    assert exit_code("import", "resnet.py", "code.pth") == 2
    assert_one_line_error(capsys, "torch 2.5.1+cpu may run code in a checkpoint")
    assert not (place / "ran.txt").exists()


@pytest.fixture
def torch():
    return pytest.importorskip("torch", minversion="2.6")


def in_torch(torch, arrays):
    return {key: torch.from_numpy(a.copy()) for key, a in arrays.items()}


def test_reads_checkpoints_with_options_and_averages(torch):
    arrays = in_torch(torch, state_dict("small.py"))
    averages = {f"module.{key}": 2 * t for key, t in arrays.items()}
    options = argparse.Namespace(lr=0.1, device="cuda")
    torch.save({"model": arrays, "model_ema": averages, "args": options}, "given.pth")
    run = setup(recipes.load("small.py"))
    for source, factor, note in (
        ("given.pth", 2, "took model_ema; the file also has model"),
        ("given.pth#model", 1, "took model; the file also has model_ema"),
    ):
        initial = load(run, source, trained_with="abn")
        assert initial.report.notes == (note,)
        assert "args" in initial.report.unused
        beta = initial.variables[0]["abn"]["beta"]
        np.testing.assert_array_equal(beta, factor * state_dict("small.py")["abn.bias"])


@pytest.mark.parametrize("zipped", [True, False])
def test_imports_a_torch_checkpoint(zipped, torch):
    arrays = state_dict("tiny.py")
    tensors = {f"module.{key}": t for key, t in in_torch(torch, arrays).items()}
    tensors["module.abn.bias"] = tensors["module.abn.bias"].bfloat16()
    others = {"epoch": 90, "arch": "x", "optimizer": {"param_groups": []}}
    checkpoint = others | {"state_dict": tensors}
    torch.save(checkpoint, "given.pth.tar", _use_new_zipfile_serialization=zipped)
    fnet_command("import", "tiny.py", "given.pth.tar", "--out", "r")
    fnet_command("export", "r")
    result = load_file("r/weights.safetensors")
    arrays["abn.bias"] = tensors["module.abn.bias"].float().numpy()
    chex.assert_trees_all_equal(result, arrays)


def test_refuses_a_checkpoint_with_code_without_running_it(torch, place, capsys):
    for i, zipped in enumerate((True, False)):
        path = f"code{i}.pth"
        weights = in_torch(torch, state_dict("tiny.py")) | {"x": Code()}
        torch.save(weights, path, _use_new_zipfile_serialization=zipped)
        (place / "ran.txt").unlink(missing_ok=True)
        assert exit_code("import", "tiny.py", path) == 2
        assert_one_line_error(capsys, f"{path}: it needs io.open, which is not a weight, and code in a checkpoint is never run")  # fmt: skip
        assert not (place / "ran.txt").exists()


def test_refuses_checkpoints_that_are_cut_off_or_hold_no_state_dict(torch, place, capsys):
    torch.save(in_torch(torch, state_dict("tiny.py")), "whole.pth")
    whole = (place / "whole.pth").read_bytes()
    (place / "half.pth").write_bytes(whole[: len(whole) // 2])
    torch.save(torch.zeros(3), "tensor.pth")
    torch.save({"epoch": 3}, "nothing.pth")
    torch.save({"w": torch.eye(3).to_sparse()}, "sparse.pth")
    for path, message in {
        "half.pth": "half.pth: damaged or not a checkpoint of torch",
        "tensor.pth": "tensor.pth holds a Tensor, not the state dict of a network",
        "nothing.pth": "nothing.pth: no arrays in it",
        "sparse.pth": "sparse.pth holds tensors that are not plain arrays: ",
    }.items():
        assert exit_code("import", "tiny.py", path) == 2
        assert_one_line_error(capsys, message)


def test_an_interrupted_import_leaves_no_run(place, monkeypatch):
    save_file(state_dict("tiny.py"), "given.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", Mock(side_effect=TrainingError("full")))
        assert exit_code("import", "tiny.py", "given.safetensors", "--out", "r") == 1
    assert exit_code("train", "tiny.py", "--out", "r", "--resume") == 2
