"""Unreadable files: reported once, counted, and limited."""

import chex
import numpy as np
import pytest
from image_cases import write_class_folders

from fnet.privacy import PoissonSampling
from train.data import Dataset, evaluation_batches, num_examples, training_batches
from train.data.canaries import add_canaries
from train.data.image_folder import ImageFolder
from train.data.poisson import poisson_batches
from train.data.unreadable import UnreadableFiles
from train.errors import UserError


@pytest.fixture
def folder(tmp_path):
    write_class_folders(tmp_path, train=20, test=4)
    for name in ("000.png", "002.png"):
        (tmp_path / "train" / "cat" / name).write_bytes(b"")
    return tmp_path


def load(path, **options):
    return ImageFolder(path=str(path), image_size=8, resize=8, **options).load()


def test_reports_each_unreadable_file_once(folder):
    lines = []
    dataset = load(folder, max_bad_fraction=0.1)
    files = UnreadableFiles(dataset, lines.append)
    batches = files.watch(training_batches(dataset, 5, 0))
    for _ in range(12):  # three epochs
        next(batches)
    assert files.count == 2
    assert sorted(lines) == [
        f"cannot read {folder / 'train' / 'cat' / name}: zero bytes; skipped"
        for name in ("000.png", "002.png")
    ]


def test_too_many_unreadable_files_end_the_run(folder):
    (folder / "train" / "cat" / "004.png").write_bytes(b"")
    dataset = load(folder, max_bad_fraction=0.09)
    batches = UnreadableFiles(dataset, lambda line: None).watch(training_batches(dataset, 5, 0))
    with pytest.raises(UserError) as caught:
        [next(batches) for _ in range(8)]
    message = str(caught.value)
    assert message.startswith(
        "data.max_bad_fraction: so far 3 of the 20 training files are unreadable, more than 0.09 "
        "of all; the first is "
    )
    assert message.endswith(
        (
            f"{folder / 'train' / 'cat'}/000.png: zero bytes",
            "002.png: zero bytes",
            "004.png: zero bytes",
        )
    )


def test_two_files_of_a_small_folder_do_not_end_the_run_unless_none_may_be_unreadable(folder):
    lines, rows = [], []
    dataset = load(folder, max_bad_fraction=0.01)
    UnreadableFiles(dataset, lines.append, write=rows.extend).look()  # before anything is compiled
    assert len(lines) == 2
    where = folder / "train" / "cat"
    assert rows == [
        {"file": f"{where}/{name}", "split": "training", "reason": "zero bytes"}
        for name in ("000.png", "002.png")
    ]
    dataset = load(folder, max_bad_fraction=0.0)
    for files in (dataset, add_canaries(dataset, 5)):  # canaries are no files
        with pytest.raises(UserError, match="so far 2 of the 20 training files"):
            UnreadableFiles(files, lines.append).look()


def test_counts_test_files_separately(folder):
    path = folder / "val" / "dog" / "001.png"
    path.write_bytes(b"no image")
    dataset = load(folder, max_bad_fraction=0.1)
    files = UnreadableFiles(dataset, lambda line: None)
    with pytest.raises(UserError, match="so far 1 of the 4 test files"):
        list(files.watch(evaluation_batches(dataset, 3)))


def test_ends_the_run_if_no_file_is_readable(folder):
    for path in (folder / "val").rglob("*.png"):
        path.write_bytes(b"no image")
    dataset = load(folder, max_bad_fraction=1.0)
    files = UnreadableFiles(dataset, lambda line: None)
    with pytest.raises(UserError, match=r"data\.path: none of the 4 test files can be read; the"):
        list(files.watch(evaluation_batches(dataset, 3)))


def test_ignores_padding(folder):
    dataset = load(folder, max_bad_fraction=0.0)  # the first training file is unreadable
    must_not_explain = dataset._replace(explain=lambda id: pytest.fail(f"file {id} is read"))
    files = UnreadableFiles(must_not_explain, pytest.fail)
    assert sum(b["weight"].sum() for b in files.watch(evaluation_batches(dataset, 3))) == 4
    assert files.count == 0


def test_ignores_padding_of_poisson_batches(tmp_path):
    write_class_folders(tmp_path, train=20, test=4)
    dataset = load(tmp_path, max_bad_fraction=0.0)
    must_not_explain = dataset._replace(explain=lambda id: pytest.fail(f"file {id} is read"))
    sampling = PoissonSampling(num_examples(dataset.train), 4)
    batches = UnreadableFiles(must_not_explain, pytest.fail).watch(
        poisson_batches(dataset, sampling, 0)
    )
    assert any(next(batches)["weight"].sum() < sampling.rows for _ in range(5))


def test_saves_and_restores_the_position_of_the_batches(folder):
    dataset = load(folder, max_bad_fraction=0.5)
    files = UnreadableFiles(dataset, lambda line: None)
    first = files.watch(training_batches(dataset, 4, 0))
    for _ in range(3):
        next(first)
    second = files.watch(training_batches(dataset, 4, 0))
    second.set_state(first.get_state())
    chex.assert_trees_all_equal(next(second), next(first))


def test_passes_on_batches_without_files():
    rows = {"x": np.arange(6.0), "weight": np.zeros(6, np.float32)}
    dataset = Dataset(rows, rows, (), lambda batch, generator: batch)
    checked = UnreadableFiles(dataset, pytest.fail).watch(evaluation_batches(dataset, 6))
    assert [b["x"].tolist() for b in checked] == [list(range(6))]
