"""Files of a data set: copies in both splits."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from train.data import files, storage


def test_copies_of_training_images_are_told(tmp_path, monkeypatch):
    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    large = bytes(range(256)) * 40
    train = [write("a", large), write("b", b"abc"), write("c", b""), str(tmp_path / "absent")]
    test = [
        write("x", large[:-1] + b"x"),  # differs at its end
        write("y", large),
        write("z", b"abd"),
        write("empty", b""),
        write("alone", b"123456"),
    ]
    os.symlink(train[1], link := str(tmp_path / "link"))
    opened = []

    def record(path, mode):
        opened.append(path)
        return Path(path).open(mode)

    monkeypatch.setattr(files, "open", record, False)
    assert files.describe_files(train, test) == (
        f"1 test images are training images or copies of them, such as {test[1]} of {train[0]}; "
        "they make test scores too good",
    )
    assert sorted(opened) == sorted(
        [*train[:2], *test[:3], train[0], *test[:2]]  # first their middle, then the whole
    )
    (note,) = files.describe_files(train, [*test, link])
    assert note.startswith("2 test images")
    assert files.describe_files(train, test[2:]) == ()
    monkeypatch.setattr(files, "_MOST_COMPARED", 8)
    assert files.describe_files(train, test) == ()
    (note,) = files.describe_files(train, [*test, os.path.relpath(train[1])])
    assert note.startswith("1 test images")


def test_images_of_several_frames_are_told(tmp_path, monkeypatch):
    pages = [Image.new("RGB", (4, 4), (90 * i, 0, 0)) for i in range(3)]
    paths = [str(tmp_path / f"{i}.{kind}") for i, kind in enumerate(("png", "gif", "tif", "webp"))]
    for path in paths:
        pages[0].save(path)
    assert files.describe_files(paths[:2], paths[2:]) == ()
    for path in paths:
        pages[0].save(path, save_all=True, append_images=pages[1:])
    what = "images of several frames or pages, of which the first is used"
    assert files.describe_files(paths[:2], paths[2:]) == (f"{what}: 4, such as {paths[0]}",)
    contents = [Path(path).read_bytes() for path in paths]
    (note,) = files.describe_files([0, 1], [2, 3], contents.__getitem__, "image {}".format)
    assert note == f"{what}: 4, such as image 0"
    monkeypatch.setattr(files, "_MOST_OPENED", 2)
    (note,) = files.describe_files(paths[:2], paths[2:])
    assert note.startswith(f"{what}: 2 of 2 that were opened, such as ")
    # A photo of a phone has another frame, with its depth.
    pages[0].save(photo := str(tmp_path / "photo.jpg"), "MPO", save_all=True, append_images=pages)
    assert files.describe_files([photo], paths[:0]) == ()


def test_images_that_use_few_of_16_bits_are_told(tmp_path):
    paths = [str(tmp_path / f"{i}.{kind}") for i, kind in enumerate(("png", "tif", "pgm"))]
    for path in paths:
        Image.fromarray(np.array([[0, 4095]], np.uint16)).save(path)
    (note,) = files.describe_files(paths[:2], paths[2:])
    assert note.startswith("images of 16 bits have values of at most 4,095 of 65,535, so that")
    Image.fromarray(np.array([[0, 60_000]], np.uint16)).save(paths[0])
    assert files.describe_files(paths[:2], paths[2:]) == ()


def test_patterns_leave_out_what_they_do_not_name(tmp_path):
    for name in ("a.csv", "@eaDir/b.csv", "x/@eaDir/c.csv", ".d.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    skipped = Counter()
    for pattern, name in (("**/*", "a.csv"), ("@eaDir/*", "@eaDir/b.csv"), (".*", ".d.csv")):
        assert storage.expand(f"{tmp_path}/{pattern}.csv", skipped) == [str(tmp_path / name)]
    assert skipped == {"@eaDir": 2}
