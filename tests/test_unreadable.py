"""Files that cannot be read: said once, counted, and too many of them."""

import chex
import numpy as np
import pytest
from image_cases import class_folders

from train.config.data import ImageFolder
from train.data import Dataset, evaluation_batches, image_folder, training_batches
from train.data.poisson import poisson_batches
from train.data.unreadable import UnreadableFiles
from train.errors import UserError


@pytest.fixture
def folder(tmp_path):
    class_folders(tmp_path, train=20, test=4)
    for name in ("000.png", "002.png"):
        (tmp_path / "train" / "cat" / name).write_bytes(b"")
    return tmp_path


def load(path, **options):
    return image_folder.load(ImageFolder(path=str(path), image_size=8, resize=8, **options))


def test_each_bad_file_is_said_once_and_counted(folder):
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


def test_more_than_the_allowed_share_of_bad_files_ends_the_run(folder):
    dataset = load(folder, max_bad_fraction=0.09)
    batches = UnreadableFiles(dataset, lambda line: None).watch(training_batches(dataset, 5, 0))
    with pytest.raises(UserError) as caught:
        [next(batches) for _ in range(8)]
    message = str(caught.value)
    assert message.startswith(
        "data.max_bad_fraction: so far 2 of the 20 training files are unreadable, more than 0.09 "
        "of all; the first is "
    )
    assert message.endswith(
        (f"{folder / 'train' / 'cat'}/000.png: zero bytes", "002.png: zero bytes")
    )


def test_test_files_are_counted_by_themselves(folder):
    path = folder / "val" / "dog" / "001.png"
    path.write_bytes(b"no image")
    dataset = load(folder, max_bad_fraction=0.1)
    files = UnreadableFiles(dataset, lambda line: None)
    with pytest.raises(UserError, match="so far 1 of the 4 test files"):
        list(files.watch(evaluation_batches(dataset, 3)))


def test_no_readable_file_ends_the_run_whatever_is_allowed(folder):
    for path in (folder / "val").rglob("*.png"):
        path.write_bytes(b"no image")
    dataset = load(folder, max_bad_fraction=1.0)
    files = UnreadableFiles(dataset, lambda line: None)
    with pytest.raises(UserError, match=r"data\.path: none of the 4 test files can be read; the"):
        list(files.watch(evaluation_batches(dataset, 3)))


def test_padding_is_no_file(folder):
    dataset = load(folder, max_bad_fraction=0.0)  # whose first training file is a bad one
    unasked = dataset._replace(explain=lambda id: pytest.fail(f"file {id} is read"))
    files = UnreadableFiles(unasked, pytest.fail)
    assert sum(b["weight"].sum() for b in files.watch(evaluation_batches(dataset, 3))) == 4
    assert files.count == 0


def test_padding_of_private_batches_is_no_file(tmp_path):
    class_folders(tmp_path, train=20, test=4)
    dataset = load(tmp_path, max_bad_fraction=0.0)
    unasked = dataset._replace(explain=lambda id: pytest.fail(f"file {id} is read"))
    drawn = UnreadableFiles(unasked, pytest.fail).watch(poisson_batches(dataset, 4, 0, 10))
    assert any(next(drawn)["weight"].sum() < 10 for _ in range(5))


def test_the_position_is_that_of_the_batches_beneath(folder):
    dataset = load(folder, max_bad_fraction=0.5)
    files = UnreadableFiles(dataset, lambda line: None)
    first = files.watch(training_batches(dataset, 4, 0))
    for _ in range(3):
        next(first)
    second = files.watch(training_batches(dataset, 4, 0))
    second.set_state(first.get_state())
    chex.assert_trees_all_equal(next(second), next(first))


def test_batches_that_are_no_files_are_passed_on():
    rows = {"x": np.arange(6.0), "weight": np.zeros(6, np.float32)}
    dataset = Dataset(rows, rows, (), lambda batch, generator: batch)
    watched = UnreadableFiles(dataset, pytest.fail).watch(evaluation_batches(dataset, 6))
    assert [b["x"].tolist() for b in watched] == [list(range(6))]
