"""Files of a data set: copies in both splits."""

import os
from pathlib import Path

from train.data import files


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
    assert files.describe_copies(train, test) == (
        f"1 test images are copies of training images, such as {test[1]} of {train[0]}; they make "
        "test scores too good",
    )
    assert sorted(opened) == sorted(
        [*train[:2], *test[:3], train[0], *test[:2]]  # first their middle, then the whole
    )
    (note,) = files.describe_copies(train, [*test, link])
    assert note.startswith("2 test images")
    assert files.describe_copies(train, test[2:]) == ()
    monkeypatch.setattr(files, "_MOST_COMPARED", 8)
    assert files.describe_copies(train, test) == ()
