"""A run knows whose its files and checkpoints are, and reads back only what fits."""

import itertools
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from image_cases import write_image
from program_cases import assert_one_line_error, exit_code, fnet_command, output_of
from report_cases import LINES, make_run
from safetensors.numpy import load_file

from train.commands import folds
from train.config import Config, ImageFolder
from train.data import Outputs
from train.errors import UserError
from train.output.logged import MetricsLine, Summary
from train.report.runs import read_runs
from train.run.checkpoints import ForeignError, Owner, Stamp
from train.run.open_run import OpenRun, write_classes
from train.run.results import measured_before
from train.run.run_folder import RunFolder, read_sealed, seal
from train.run.same_data import check_data, check_saved, describe_data
from train.stored import StoredError

OURS = Stamp("0", "config", "data")
SAVED = {"run": "a", "step": 4, "stamp": [*OURS]}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, None),
        ({"run": "b"}, "of another run: of run b, not of run a"),
        ({"run": None}, "of another run: of a run without an id"),
        ({"step": 3}, "of another step: it was saved after step 3"),
        ({"step": None}, "of another step"),
        ({"stamp": ["1", *OURS[1:]]}, "it was trained with another seed"),
        ({"stamp": ["0", "other", "data"]}, "it was trained with another config"),
        ({"stamp": [*OURS[:2], "other"]}, "it was trained with another data"),
        ({"stamp": None}, "it was trained with another seed"),
    ],
)
def test_a_checkpoint_says_whose_it_is(change, what):
    owner = Owner("a", (Stamp("0", "earlier", "data"), OURS))
    if what is None:
        owner.check(SAVED, 4)
        return
    with pytest.raises(ForeignError, match=re.escape(what)):
        owner.check(SAVED | change, 4)


def test_a_checkpoint_of_another_run_is_left_out(finished_run, workplace, capsys):
    other = workplace / "other"
    fnet_command("train", "tiny.py", "--out", other, "--train.seed", 1)
    (finished_run / "checkpoints" / "8").rename(workplace / "8")
    (other / "checkpoints" / "8").rename(finished_run / "checkpoints" / "8")
    run, its = (json.loads((f / "config.json").read_bytes())["run"] for f in (finished_run, other))
    assert run != its
    words = f"checkpoints/8 is of another run: of run {its}, not of run {run}; trying the one befo"
    fnet_command("eval", finished_run)
    assert words in capsys.readouterr().err
    out = output_of(capsys, "train", "tiny.py", "--out", finished_run, "--resume")
    assert words in out
    assert "resumed after step 6 of 8" in out
    (finished_run / "metrics.jsonl").write_bytes((other / "metrics.jsonl").read_bytes())
    assert exit_code("train", finished_run, "--resume") == 2
    assert_one_line_error(capsys, f"metrics.jsonl: it is of run {its}, and this is run {run}")


def test_what_was_edited_is_named(finished_run, workplace, capsys):
    write_image(workplace / "4.png", 4, (8, 8))
    predict, run = ("predict", finished_run, "4.png"), RunFolder(finished_run)
    assert not read_runs([run])[0].notes
    run.metrics.write_text(run.metrics.read_text().replace('loss": 2', 'loss": 1'))
    (note,) = read_runs([run])[0].notes
    assert note == "metrics.jsonl was damaged, lost or changed since the run ended"
    run.config.write_text(run.config.read_text().replace('"batch_size": 16', '"batch_size": 8'))
    (finished_run / "checkpoints" / "6").rename(finished_run / "checkpoints" / "06")
    fnet_command(*predict)
    error = capsys.readouterr().err
    assert "config.json: changed since the network was saved\n" in error
    assert "checkpoints/06: left out, because its name is not a step\n" in error
    names = json.loads(run.classes.read_bytes())
    run.classes.write_text(json.dumps(names | {"classes": names["classes"][::-1]}))
    assert exit_code(*predict) == 2
    assert "classes.json: it is damaged: its checksum differs" in capsys.readouterr().err


def damages():
    """``{name: change}``: what people, disks and programs do to a file."""

    def values(text):
        pattern, count = rb'(?<=: )(-?[\d.e+-]+|"[^"]*"|null|true|false)', itertools.count()
        return lambda path: path.write_bytes(
            re.sub(pattern, lambda m: m[0] if next(count) % 3 else text.encode(), path.read_bytes())
        )

    def replaced(make):
        def change(path):
            path.unlink()
            make(path)

        return change

    others = "null", '"x"', "-1", "1e400", "NaN", "true", "[]", "{}", "9" * 5000
    return {
        **{f"values {text[:5]}": values(text) for text in others},
        **{f"text {t[:5]}": lambda path, t=t: path.write_text(t) for t in ("", "null", "[]", "{}")},
        "gone": lambda path: path.unlink(),
        "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
        "zero": lambda path: path.write_bytes(path.read_bytes().replace(b": ", b":\0", 1)),
        "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
        "deep": lambda path: path.write_text("[" * 200_000),
        "pipe": replaced(os.mkfifo),
        "link to nowhere": replaced(lambda path: path.symlink_to("nowhere")),
        "link to itself": replaced(lambda path: path.symlink_to(path.name)),
        "folder": replaced(lambda path: path.mkdir()),
    }


def error_of(read, folder):
    try:
        read(folder)
    except UserError as error:
        return str(error)
    return ""


ROWS = b"file,label,prediction,probability,loss\na.png,a,b,0.75,1.5\nb.png,a,a,0.5,0.5\n"


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_file_is_one_line_with_its_name(damage, tmp_path):
    data = describe_data(Config().data.load(), private=False)
    readers = {
        "report": lambda f: read_runs([f]),
        "config": lambda f: f.read_config(),
        "outputs": lambda f: OpenRun(f).outputs,
        "data": lambda f: (check_data(f, f.read_config(), data), check_saved(f)),
        "metrics": lambda f: (f.drop_metrics_after(4, None), f.seconds_spent(), f.has_started),
        "summary": lambda f: measured_before(f, 40),
    }
    names = "config.json", "classes.json", "data.json", "metrics.jsonl", "bad_steps.jsonl"
    for name in (*names, "summary.json", "memory.json", "evaluation.json", "evaluation.csv"):
        folder = make_run(tmp_path, name, files={"evaluation.csv": ROWS, "evaluation.json": b"{}"})
        write_classes(folder, Outputs(("a", "b")))
        (folder.path / "data.json").write_text(json.dumps(seal({"run": folder.id, "train": 3})))
        line = {"step": 3, "loss": "nan", "grad_norm": "inf", "origin": "x"}
        folder.bad_steps.write_text(json.dumps(line) + "\n")
        damages()[damage](folder.path / name)
        for read in readers.values():
            error = error_of(read, RunFolder(folder.path))
            assert not error or (str(folder.path) in error and "\n" not in error), error


COMMANDS = {
    "train": ("r", "--resume"),
    "eval": ("r",),
    "predict": ("r", "4.png"),
    "attribute": ("r", "--method", "tracin"),
    "export": ("r", "--out", "w.safetensors"),
    "report": ("r",),
}
RESULTS = {
    "train": "r/summary.json",
    "eval": "r/evaluation.json",
    "predict": "r/predictions/predictions.json",
    "attribute": "r/attribution.csv",
    "export": "w.safetensors",
}
FILES = (
    *("config.json", "classes.json", "data.json", "metrics.jsonl", "summary.json"),
    *("evaluation.csv", "memory.json", "checkpoints/8/_CHECKPOINT_METADATA"),
    *("checkpoints/8/data/metadata", "checkpoints/8/state/_METADATA"),
    *("checkpoints/8/state/manifest.ocdbt", "checkpoints/6/_CHECKPOINT_METADATA"),
)


def cases():
    """Each damage of each file, with the commands in turn."""
    pairs = [(file, damage) for damage in damages() for file in FILES]
    names = [*COMMANDS] * 2 + [*COMMANDS][:1]  # 13, so that each file meets each command
    return [(names[i % len(names)], *pair) for i, pair in enumerate(pairs)]


IMAGES = "--data.source", "image_folder", "--data.path", "data", "--data.image-size", 8
PRIVATE = "--grad.mode", "clipped", "--grad.noise-multiplier", 1, "--grad.delta", 1e-4
OTHER_RUNS = {
    "private": (
        ("digits_mlp", *PRIVATE, "--train.steps", 2),
        ("train", "r", "--resume", "--train.steps", 3),
        ("secret_seed", "private/data.json"),
    ),
    "folds": (
        ("digits_mlp", "--folds", 2, *IMAGES, "--data.batch-size", 2, "--train.steps", 2),
        ("train", "r/fold_1/config.json", "--folds", 2, "--out", "r", "--resume"),
        ("folds.json", "fold_2/data.json"),
    ),
    "images": (
        ("digits_diffusion", "--train.steps", 2, "--model.width", 16, "--model.blocks", 1),
        ("sample", "r", "--out", "s.png", "--seed", 3),
        ("config.json", "data.json", "checkpoints/2/state/_METADATA"),
    ),
}
"""Runs of other kinds: their training, a command on them, and the files that it reads."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "file", "damage"),
    [(kind, f, d) for d in damages() for kind, (*_, files) in OTHER_RUNS.items() for f in files],
)
def test_a_damaged_run_of_another_kind_has_a_result_or_one_line(
    kind, file, damage, workplace, tmp_path_factory, capsys
):
    training, command, _ = OTHER_RUNS[kind]
    for i in range(8):
        write_image(workplace / "data" / "ab"[i % 2] / f"{i}.png", i, (8, 8))
    shelf = tmp_path_factory.getbasetemp() / f"run of {kind}"
    if not shelf.exists():
        fnet_command("train", *training, "--out", "r")
        shutil.copytree("r", shelf)
        shutil.rmtree("r")
    shutil.copytree(shelf, "r")
    damages()[damage](Path("r", file))
    capsys.readouterr()
    try:
        fnet_command(*command)
    except SystemExit:
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("fnet: "), error
        assert Path(file).name.partition(".")[0] in error or "r/" in error or " r " in error


def result_of(command):
    """Return what a command wrote: all of it, or the numbers in it that no time is in."""
    if command not in RESULTS:
        return None
    if command == "export":
        return {name: a.tolist() for name, a in load_file(RESULTS[command]).items()}
    content = Path(RESULTS[command]).read_bytes()
    if command == "attribute":
        return content
    result = json.loads(content)
    return {name: result[name] for name in ("metrics", "predictions") if name in result}


@pytest.fixture
def results(workplace, finished_run, tmp_path_factory):
    """Return the results of an intact run by command, and leave a copy of it to damage."""
    write_image(workplace / "4.png", 4, (8, 8))
    shelf = tmp_path_factory.getbasetemp() / "results.pickle"
    if not shelf.exists():
        found = {}
        for command, words in COMMANDS.items():
            shutil.copytree(finished_run, "r")
            fnet_command(command, *words)
            found[command] = result_of(command)
            shutil.rmtree("r")
        Path("w.safetensors").unlink()
        shelf.write_bytes(pickle.dumps(found))
    finished_run.rename("r")
    return pickle.loads(shelf.read_bytes())


@pytest.mark.sweep(107)
@pytest.mark.parametrize(("command", "file", "damage"), cases())
def test_a_command_on_a_damaged_run_has_the_right_result_or_one_line(
    command, file, damage, results, capsys
):
    damages()[damage](Path("r", file))
    code = 0
    try:
        fnet_command(command, *COMMANDS[command])
    except SystemExit as exit_:
        code = exit_.code
    output, errors = capsys.readouterr()
    if code:
        assert errors.splitlines()[-1].startswith("fnet: "), errors
        # Another config, such as {}, is of another run than the other files.
        named = ("r/",) if file == "config.json" else (file.split("/")[0].partition(".")[0],)
        assert any(name in errors.splitlines()[-1] for name in named), errors
        return
    output += errors
    assert result_of(command) == results[command] or file.split("/")[0] in output


def test_files_of_another_run_are_refused_and_left_out_of_a_report(tmp_path):
    ours, theirs = make_run(tmp_path, "ours"), make_run(tmp_path, "theirs")
    owner = json.dumps({"run": theirs.id}) + "\n"
    ours.metrics.write_text(owner + "\n".join(map(json.dumps, LINES)) + "\n")
    ours.summary.write_bytes(theirs.summary.read_bytes())
    expected = f"it is of run {theirs.id}, and this is run {ours.id}"
    with pytest.raises(StoredError, match=f"metrics.jsonl: {expected}"):
        ours.read_log(ours.metrics, MetricsLine)
    with pytest.raises(StoredError, match=f"summary.json: {expected}"):
        ours.read(Summary, ours.summary)
    (run,) = read_runs([ours])
    assert (run.summary, run.lines) == (None, [])
    assert {note.partition(" ")[0] for note in run.notes} == {"summary.json", "metrics.jsonl"}


def test_an_interrupted_start_hides_no_change(finished_run, monkeypatch, capsys):
    config = finished_run / "config.json"
    config.write_text(config.read_text().replace('"learning_rate": 0.05', '"learning_rate": 0.04'))
    changed = "config.json: changed since the run was last trained: optim.learning_rate was 0.05"
    resume = "train", finished_run, "--resume", "--train.steps"
    with monkeypatch.context() as patch:
        patch.setattr("train.run.loop.compile_programs", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fnet_command(*resume, 9)
    assert changed in capsys.readouterr().out
    assert changed in output_of(capsys, *resume, 9)  # which trains with it
    assert changed not in output_of(capsys, *resume, 10)
    stamps = read_sealed(finished_run / "data.json")["stamps"]
    assert len(stamps) == 2  # checkpoints of both parts are the run's own


def test_a_signal_ends_all_folds(monkeypatch, tmp_path):
    trained = []

    def train(config, out, **options):
        trained.append((config.data.fold, options["command"]))
        return False

    monkeypatch.setattr(folds, "train", train)
    monkeypatch.setattr(folds, "load", lambda config: None)
    config = Config(data=ImageFolder(path="d"))
    folds.train_folds(config, 3, tmp_path / "f", resume=False, console=None)
    where = tmp_path / "f"
    assert trained == [(1, f"{where}/fold_1 --folds 3 --out {where}")]
    assert not (where / "folds.json").exists()
