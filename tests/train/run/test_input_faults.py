"""Faults of the input during a run: each is one clear line, and the run resumes where it was."""

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import signal

import chex
import numpy as np
import pytest
from data_cases import take_batches
from image_cases import write_class_folders, write_image, write_mask
from program_cases import exit_code, final_state, fnet_command, metrics_of, output_of

from train.config import ArrayFile, ChatFile, SegmentationFolder, TextFile
from train.data import image_batches, training_batches
from train.data.unreadable import UnreadableFiles
from train.run.planning import StepCache

RECIPE = """
from train.config import Checkpoint, Config, ImageFolder, Mlp, Optim, Train

def config():
    return Config(
        name="images",
        data=ImageFolder(path="images", image_size=8, resize=8, batch_size=4),
        model=Mlp(hidden=()),
        optim=Optim(learning_rate=0.01),
        train=Train(steps=8, log_every=2, eval_every=8),
        checkpoint=Checkpoint(every=100, best=False),
    )
"""
TRAIN = "train", "images.py", "--out", "run"


def text(folder):
    (folder / "data.txt").write_text("In the beginning there was a text of some length. " * 20)
    return TextFile(path=str(folder / "data.txt"), context=16).load()


def chats(folder):
    lines = [json.dumps({"prompt": f"{i}", "completion": "yes" * i}) for i in range(1, 30)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return ChatFile(path=str(folder / "data.jsonl"), context=128).load()


def images_in_one_file(folder):
    image = np.arange(30 * 4 * 4 * 3, dtype=np.uint8).reshape(30, 4, 4, 3)
    np.savez(folder / "data.npz", x=image, y=np.arange(30) % 3)
    return ArrayFile(path=str(folder / "data.npz"), images="x", labels="y").load()


@pytest.mark.parametrize("source", [text, chats, images_in_one_file])
def test_a_file_that_vanishes_after_it_was_read_changes_nothing(source, tmp_path):
    """Two epochs of a file that is there, and of one that is overwritten and then removed."""
    expected = take_batches(source(tmp_path), 20)[0]
    dataset = source(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:40])
    path.unlink()
    chex.assert_trees_all_equal(take_batches(dataset, 20)[0], expected)


def test_a_mask_that_vanishes_is_one_line_and_its_image_does_not_count(tmp_path):
    labels = np.repeat(np.array([[0], [1]], np.uint8), 32).reshape(8, 8)
    for split in ("train", "val"):
        for i in range(4):
            write_image(tmp_path / split / "images" / f"{i}.png", i, (8, 8))
            write_mask(tmp_path / split / "masks" / f"{i}.png", labels)
    config = SegmentationFolder(
        path=str(tmp_path), image_size=8, batch_size=4, classes=2, max_bad_fraction=0.5
    )
    dataset, lines = config.load(), []
    gone = tmp_path / "train" / "masks" / "2.png"
    gone.unlink()
    batches = UnreadableFiles(dataset, lines.append).watch(training_batches(dataset, 4, 0))
    for _ in range(2):
        assert next(batches)["weight"].sum() == 3
    (line,) = lines
    assert line.startswith("cannot read ")
    assert f"{gone}: No such file" in line


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with images, and a run on them without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_class_folders(folder / "images")
    (folder / "images.py").write_text(RECIPE)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        fnet_command(*TRAIN)
    return folder


@pytest.fixture
def images(workplace, undisturbed):
    """The images in the workplace, and their recipe."""
    shutil.copytree(undisturbed / "images", workplace / "images")
    shutil.copy(undisturbed / "images.py", workplace)
    return workplace / "images"


def at_step(step, monkeypatch, what):
    """Call ``what()`` when the next run takes a step."""
    call, taken = StepCache.__call__, []

    def once(self, state, batch):
        taken.append(1)
        if len(taken) == step:
            what()
        return call(self, state, batch)

    monkeypatch.setattr(StepCache, "__call__", once)


def assert_resumes(workplace, undisturbed, capsys, step):
    capsys.readouterr()
    printed = output_of(capsys, *TRAIN, "--resume")
    assert f"resumed after step {step} of 8" in printed
    assert "data: changed" not in printed
    chex.assert_trees_all_equal(final_state(undisturbed / "run"), final_state(workplace / "run"))
    assert metrics_of(workplace / "run")[-1] == metrics_of(undisturbed / "run")[-1]


def saved_step(printed):
    (line,) = [line for line in printed.splitlines() if "saved after step" in line]
    return int(line.split("saved after step ")[1].split()[0])


def test_a_killed_worker_ends_the_run_without_losing_a_step(
    workplace, images, undisturbed, monkeypatch, capsys
):
    def kill():
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        at_step(4, patch, kill)
        assert exit_code(*TRAIN, "--data.workers", 2) == 1
    out, error = capsys.readouterr()
    assert error.startswith("fnet: data.workers: a process that decodes images was killed")
    assert error.count("\n") == 1
    assert "the input failed: saved after step" in out
    assert_resumes(workplace, undisturbed, capsys, saved_step(out))


@pytest.mark.slow
def test_vanishing_files_are_skipped_or_end_the_run_without_losing_a_step(
    workplace, images, undisturbed, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        at_step(2, patch, lambda: images.rename(workplace / "away"))
        assert exit_code(*TRAIN) == 2
    out, error = capsys.readouterr()
    assert error.startswith("fnet: data.max_bad_fraction: so far ")
    assert "No such file" in error
    assert error.count("\n") == 1
    (workplace / "away").rename(images)
    assert_resumes(workplace, undisturbed, capsys, saved_step(out))

    gone = images / "train" / "cat" / "000.png"
    gone.unlink()
    shutil.rmtree(workplace / "run")
    write_image(gone)
    with monkeypatch.context() as patch:
        at_step(1, patch, gone.unlink)
        fnet_command(*TRAIN, "--data.max-bad-fraction", 0.5)
    assert f"cannot read {gone.relative_to(workplace)}: No such file" in capsys.readouterr().out
    summary = json.loads((workplace / "run" / "summary.json").read_text())
    assert summary["unreadable_files"] == 1


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_batch(workplace, images, undisturbed, monkeypatch, capsys):
    decode = image_batches.decode
    calls = []

    def stuck(*args):
        calls.append(1)
        if len(calls) == 23:  # of the sixth batch
            os.kill(os.getpid(), signal.SIGTERM)
        return decode(*args)

    with monkeypatch.context() as patch:
        patch.setattr(image_batches, "decode", stuck)
        fnet_command(*TRAIN)
    out = capsys.readouterr().out
    assert f"SIGTERM: saved after step {saved_step(out)} of 8" in out
    assert_resumes(workplace, undisturbed, capsys, saved_step(out))


def test_files_that_appear_during_a_run_change_nothing(workplace, images, undisturbed, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(1, patch, lambda: write_image(images / "train" / "cat" / "0000.png"))
        fnet_command(*TRAIN)  # eight steps of four are more than two epochs
    chex.assert_trees_all_equal(final_state(undisturbed / "run"), final_state(workplace / "run"))
