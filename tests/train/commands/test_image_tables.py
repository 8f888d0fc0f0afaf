"""Runs on tables of labels: rows per image, folds, early stopping, a frozen backbone."""

import csv
import io
import json

import jax
import numpy as np
import pytest
from image_cases import write_image
from program_cases import (
    assert_one_line_error,
    exit_code,
    fnet_command,
    initial_run,
    metrics_of,
    output_of,
)
from report_cases import make_run
from rich.console import Console

from train.commands import folds
from train.config import Config, ImageFolder, PreactResNet, recipes
from train.predictor import Predictor
from train.run import planning, weight_files
from train.run.checkpoints import load_network
from train.run.open_run import write_classes
from train.run.run_folder import RunFolder
from train.run.setup import setup

RECIPE = """
from train.config import Config, ImageTable, Mlp, Optim, Train

def config():
    return Config(
        name="table",
        data=ImageTable(path="labels.csv", images="pics", image_size=8, batch_size=8, crop="center"),
        model=Mlp(hidden=(4,)),
        optim=Optim(learning_rate=0.05),
        train=Train(steps=4, log_every=4, eval_every=2),
    )
"""
N = 24
TARGETS = {
    "class": {},
    "labels": {"targets": "labels", "label": ("red", "late")},
    "numbers": {"targets": "numbers", "label": ("loss",)},
}


PRIVATE = ("--grad.mode", "clipped", "--grad.noise-multiplier", 1, "--grad.delta", 1e-3)
PRIVATE = (*PRIVATE, "--optim.clip-norm", "None")


def config_of(kind="class"):
    config = recipes.load("recipe.py")
    return config.replace(data=config.data.replace(**TARGETS[kind]))


@pytest.fixture
def workplace(workplace):
    (workplace / "recipe.py").write_text(RECIPE)
    lines = ["file,label,red,late,loss"]
    for i in range(N):
        write_image(workplace / "pics" / f"{i:02}.png", i)
        lines.append(f"{i:02}.png,{'ab'[i % 2]},{i % 2},{int(i > 12)},{100 + i}")
    (workplace / "labels.csv").write_text("\n".join(lines) + "\n")
    return workplace


def check_captions(kind, rows, captions):
    """Every test image is shown, errors or large losses first."""
    if kind == "numbers":
        rows.sort(key=lambda row: -float(row["loss"]))
        texts = [f"{float(row['predicted loss']):.4g}\nis {row['label loss']}" for row in rows]
        assert [text.split(".0")[0] for text in captions] == [t.split(".0")[0] for t in texts]
        assert all(captions.values())
        return
    for row in rows:
        share = f" {float(row['probability']):.0%}" if kind == "class" else ""
        is_right = row["prediction"] == row["label"]
        truth = "" if is_right else f"\nis {row['label'] or 'none'}"
        assert captions[f"{row['prediction'] or 'none'}{share}{truth}"] == is_right


def rows_of(path):
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


@pytest.fixture
def captions(monkeypatch):
    """What examples.png says of each image, and whether it is right."""
    drawn = {}

    def draw(images, captions, correct, title, path):
        assert len(images) == len(captions) == len(correct)
        drawn[path.name] = dict(zip(captions, correct, strict=True))
        path.write_bytes(b"")

    monkeypatch.setattr("train.output.plots.classifications", draw)
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_each_kind_of_target_is_evaluated_and_predicted(workplace, kind, captions):
    folder = initial_run("r", config_of(kind))
    fnet_command("eval", "r")
    rows = rows_of(folder.rows)
    check_captions(kind, [*rows], captions["examples.png"])
    metrics = json.loads(folder.evaluation.read_bytes())["metrics"]
    expected = {"class": "test/macro_f1", "labels": "test/exact", "numbers": "test/r2"}
    assert expected[kind] in metrics
    mean = np.mean([float(row["loss"]) for row in rows])
    assert mean == pytest.approx(metrics["test/loss"], rel=1e-4)
    files = [row["file"] for row in rows]
    fnet_command("predict", "r", *files, "--csv")
    predicted = rows_of(workplace / "r" / "predictions" / "predictions.csv")
    for row, prediction in zip(rows, predicted, strict=True):
        assert row["file"] == prediction["file"]
        assert {k: row[k] for k in prediction} == pytest.approx(prediction) or all(
            float(row[k]) == pytest.approx(float(v), rel=1e-3)
            for k, v in prediction.items()
            if k.startswith("pro")
        )
    if kind == "numbers":  # in the units of the table
        values = [float(row["predicted loss"]) for row in rows]
        found = [float(output[0]) for output in Predictor("r")(files)]
        np.testing.assert_allclose(found, values, rtol=1e-4)


def test_undefined_scores_are_said_and_are_no_zeros(workplace, capsys):
    """No test image is a, and all have the same number."""
    lines = ["file,label,red,late,loss,split"]
    for i in range(N):
        split, label = ("val", "b") if i > 15 else ("train", "ab"[i % 2])
        lines.append(f"{i:02}.png,{label},{i % 2},{int(i < 8)},{100 + i % 16 * (i < 16)},{split}")
    (workplace / "labels.csv").write_text("\n".join(lines) + "\n")
    said = "undefined on these test examples, and left out of means: "
    for kind, undefined, line in (
        ("class", {"auc"}, "recall, AUC of a; AUC of b; AUC\n"),
        ("labels", set(), "precision, recall, F1, AUC of late\n"),
        ("numbers", {"r2"}, "R2\n"),
    ):
        initial_run(kind, config_of(kind))
        assert f"{said}{line}" in output_of(capsys, "eval", kind)
        metrics = json.loads((workplace / kind / "evaluation.json").read_bytes())["metrics"]
        assert {k for k, v in metrics.items() if v is None} == {f"test/{k}" for k in undefined}
    named = ("--checkpoint.metric", "auc", "--out", "x")
    assert exit_code("train", "recipe.py", *named) == 2
    assert_one_line_error(capsys, "checkpoint.metric: auc is undefined")


def test_folds_without_a_class_leave_undefined_scores_out(tmp_path, monkeypatch):
    scores = [None, 0.5, 1.0]

    def train(config, out, **options):
        make_run(
            out.parent, out.name, summary={"metrics": {"test/auc": scores[config.data.fold - 1]}}
        )
        return True

    monkeypatch.setattr(folds, "train", train)
    monkeypatch.setattr(folds, "load", lambda config: None)
    config, text = Config(data=ImageFolder(path="d")), io.StringIO()
    folds.train_folds(config, 3, tmp_path / "f", resume=False, console=Console(file=text, width=99))
    assert "over 2 folds; it is undefined in the other 1\n" in text.getvalue()
    auc = json.loads((tmp_path / "f" / "folds.json").read_bytes())["metrics"]["test/auc"]
    assert auc == {"mean": 0.75, "std": pytest.approx(0.5**1.5), "values": scores}


def test_folds_are_reported_together(workplace, capsys):
    fnet_command("train", "recipe.py", "--folds", 2, "--out", "f")
    rows = rows_of(workplace / "f" / "evaluation.csv")
    assert {row["file"] for row in rows} == {f"pics/{i:02}.png" for i in range(N)}
    assert len(rows) == N
    folds = json.loads((workplace / "f" / "folds.json").read_bytes())
    accuracy = folds["metrics"]["test/accuracy"]
    assert accuracy["mean"] == pytest.approx(np.mean(accuracy["values"]))
    right = np.mean([row["label"] == row["prediction"] for row in rows])
    assert accuracy["mean"] == pytest.approx(right)  # folds are of equal size
    assert "fold_2" in (workplace / "f" / "report.html").read_text()
    assert exit_code("train", "digits", "--folds", 3, "--out", "d") == 2
    assert_one_line_error(capsys, "--folds: data.source digits has no folds")
    assert exit_code("train", "recipe.py", "--folds", 3, "--data.folds", 4) == 2
    assert_one_line_error(capsys, "--folds: 3, but data.folds is 4, of which one run holds out")
    assert exit_code("train", "recipe.py", "--data.fold", 2) == 2
    assert_one_line_error(capsys, "data.fold: 2, but there are no folds")


def test_a_fold_that_cannot_be_trained_ends_all_before_the_first(workplace, capsys):
    lines = [f"{i:02}.png,{int(i >= 18)},{i % 3 if i < 18 else 0}" for i in range(N)]
    (workplace / "labels.csv").write_text("\n".join(["file,label,patient", *lines]) + "\n")
    flags = ("--folds", 3, "--data.group", "patient", "--out", "g")
    assert exit_code("train", "recipe.py", *flags, "--data.split-seed", 2) == 2
    assert_one_line_error(capsys, "data.label: all 12 training images of labels.csv have the same")
    assert not (workplace / "g").exists()


def test_a_run_ends_when_its_metric_gets_no_better_and_resumes_alike(
    workplace, monkeypatch, capsys
):
    flags = ("--optim.learning-rate", 1e-9, "--train.steps", 40, "--train.patience", 3)
    flags += ("--checkpoint.metric", "auc")
    fnet_command("train", "recipe.py", "--out", "r", *flags)
    steps = [line["step"] for line in metrics_of(workplace / "r")]
    assert steps[-1] < 40
    assert "ends early: auc got no better in 3 evaluations" in capsys.readouterr().out
    summary = json.loads((workplace / "r" / "summary.json").read_bytes())
    assert (summary["ended_early"], summary["steps"]) == (True, steps[-1])
    fnet_command("train", "r", "--resume")  # nothing is left to do
    assert [line["step"] for line in metrics_of(workplace / "r")] == steps
    monkeypatch.setattr(planning, "compile_step", None)  # a wrong name is found before it compiles
    assert exit_code("train", "recipe.py", "--checkpoint.metric", "f1") == 2
    assert_one_line_error(capsys, "checkpoint.metric: no test metric f1")


@pytest.mark.slow
def test_a_kept_head_predicts_the_same_numbers_with_another_scaling(workplace):
    table = (workplace / "labels.csv").read_text().splitlines()
    larger = [f"{line},{int(line.split(',')[-1]) * 100 + 5000}" for line in table[1:]]
    (workplace / "other.csv").write_text(
        "\n".join([table[0].replace("loss", "old") + ",loss", *larger]) + "\n"
    )
    config = config_of("numbers").replace(model=PreactResNet(widths=(4,), blocks_per_stage=1))
    configs = [
        config.replace(data=config.data.replace(path=f"{n}.csv")) for n in ("labels", "other")
    ]
    runs = [setup(config) for config in configs]
    write_classes(initial_run(workplace / "r", configs[0]), runs[0].task.dataset.outputs)
    fnet_command("export", "r", "--out", "r.safetensors")
    for source in ("r", "r.safetensors"):
        heads = [weight_files.load(run, source).variables[0]["head"] for run in runs]
        heads = jax.tree.map(np.asarray, heads)
        numbers = [
            run.task.dataset.scaling.restore(np.ones((1, 4)) @ head["kernel"] + head["bias"])
            for run, head in zip(runs, heads, strict=True)
        ]
        np.testing.assert_allclose(*numbers, rtol=1e-5)
        assert (heads[0]["kernel"] != heads[1]["kernel"]).all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("private", [(), PRIVATE], ids=["plain", "private"])
def test_a_frozen_backbone_keeps_its_parameters_and_statistics(workplace, capsys, private):
    norm = "group" if private else "abn"
    model = PreactResNet(widths=(4,), blocks_per_stage=1, norm=norm)
    initial_run("r", recipes.load("recipe.py").replace(model=model))
    flags = "--model.norm", norm, *private
    flags += ("--model.name", "preact_resnet", "--model.widths", 4, "--model.blocks-per-stage", 1)
    flags += ("--model.pretrained", "r", "--optim.freeze-backbone", "--optim.weight-decay", 0.1)
    fnet_command("train", "recipe.py", "--out", "s", *flags)
    networks = []
    for name in "rs":
        folder = RunFolder(workplace / name)
        networks.append(load_network(folder, setup(folder.read_config()).task.model))
    (params, state, _), (new_params, new_state, _) = networks
    changed = [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(new_params), strict=True
        )
        if (a != b).any()
    ]
    assert changed
    assert [name for name in changed if "head" not in name] == []
    jax.tree.map(np.testing.assert_array_equal, state, new_state)
    run = setup(RunFolder(workplace / "s").read_config())
    batch, key = next(run.training_batches(0)), jax.random.key(0)
    grads = jax.grad(lambda p: run.task.loss(p, new_state, batch, key)[0].sum())(new_params)
    trained = {path[0].key for path, g in jax.tree_util.tree_leaves_with_path(grads) if g.any()}
    assert trained == {"head"}  # so that nothing else counts in a norm
    assert exit_code("train", "recipe.py", "--optim.freeze-backbone") == 2
    assert_one_line_error(capsys, "the backbone has random weights; give model.pretrained")
