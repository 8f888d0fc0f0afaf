"""Errors for .npz files that cannot be used for training."""

import io
import zipfile

import numpy as np
import pytest
from array_cases import CLASSES, N, X, Y, load, load_error, make_images, make_labels, write_npz

from train import limits

TEST = {"x_train": X, "y_train": Y, "x_test": make_images(6), "y_test": make_labels(6)}
NAN, LARGE = make_images(dtype=np.float32), make_images(dtype=np.float64)
NAN[7, 1, 2, 0] = np.nan
INFINITE = make_images(dtype=np.float16)
INFINITE[9] = -np.inf
LARGE[3] = 1e300
NEGATIVE, TWO_HOT = make_labels(), np.eye(CLASSES)[make_labels()]
NEGATIVE[5] = -1
TWO_HOT[4] = 1

# Arrays of the file, options, and the message, with {} for the path.
MISTAKES = [
    ({"a": X, "b": Y}, {}, "data.images: {} has no array that can be the images; name one; there are a, b"),
    ({"x": X, "b": Y}, {}, "data.labels: {} has no array that can be the labels; name one; there are x, b"),
    ({"x_train": X, "y_train": Y, "x_test": X}, {}, "data.labels: {} has no array that can be the labels; name one; there are x_train, y_train, x_test"),
    ({"x_test": X, "y_test": Y}, {}, "data.images: {} has no array that can be the images"),
    ({}, {}, "; name one; there are no arrays"),
    ({"x": X, "images": X, "y": Y}, {}, "data.images: {} has several arrays (x, images) that can be the images; name one"),
    ({"x": X, "x_train": X, "y": Y}, {}, "data.images: {} has several arrays (x, x_train) that can be the images; name one"),
    ({"x": X, "y": Y}, {"images": ("xx",)}, "data.images: no array xx in {} (did you mean x?); there are x, y"),
    ({"x": X, "y": Y}, {"labels": ("y", "z")}, "data.images: {} has no array that can be the images"),
    ({"x": X, "y": Y}, {"images": ("x", "x"), "labels": ("y", "y")}, "data.test_split: x in {} is both the training and the test set"),
    (TEST, {"test_split": "train"}, "data.test_split: train in {} is the training split; there are test"),
    (TEST, {"test_split": "tests"}, "data.test_split: no split tests in {} (did you mean test?); there are test"),
    (TEST, {"class_names": "names"}, "data.class_names: no array names in {}; there are x_train, y_train, x_test, y_test"),
    ({"x": X, "y": Y[:-2]}, {}, "data.labels: y in {} has 28 labels for the 30 images in x"),
    (TEST | {"y_test": make_labels(7)}, {}, "data.labels: y_test in {} has 7 labels for the 6 images in x_test"),
    ({"x": X.reshape(N, -1), "y": Y}, {}, "data.images: x in {} has shape (30, 60); expected [N, height, width] or [N, height, width, channels]; save a table of numbers as x[:, None, :]"),
    ({"x": X[None], "y": Y}, {}, "data.images: x in {} has shape (1, 30, 4, 5, 3); expected [N, height"),
    ({"x": X[:0], "y": Y[:0]}, {}, "data.images: x in {} is empty: its shape is (0, 4, 5, 3)"),
    (TEST | {"x_test": X[:0], "y_test": Y[:0]}, {}, "data.images: x_test in {} is empty: its shape is (0, 4, 5, 3)"),
    ({"x": X[:, :0], "y": Y}, {}, "data.images: x in {} is empty: its shape is (30, 0, 5, 3)"),
    ({"x": X.astype(int), "y": Y}, {}, "data.images: x in {} is int64; expected uint8 or floating"),
    ({"x": NAN, "y": Y}, {}, "data.images: x in {} has nan in image 7"),
    ({"x": INFINITE, "y": Y}, {}, "data.images: x in {} has -inf in image 9"),
    ({"x": LARGE, "y": Y}, {}, "data.images: x in {} has 1e+300 in image 3"),
    (TEST | {"x_test": make_images(6, (4, 4, 3))}, {}, "data.images: x_train in {} has images uint8 (4, 5, 3), x_test in {} has uint8 (4, 4, 3); training and test images must match"),
    (TEST | {"x_test": make_images(6, dtype=np.float32)}, {}, "uint8 (4, 5, 3), x_test in {} has floating (4, 5, 3)"),
    ({"x": X, "y": Y / 2}, {}, "data.labels: y in {} is float64; expected integers from 0"),
    ({"x": X, "y": Y.astype(str)}, {}, "data.labels: y in {} is <U21; expected integers from 0"),
    ({"x": X, "y": NEGATIVE}, {}, "data.labels: y in {} has -1 at index 5; expected integers from 0 to 2147483647"),
    ({"x": X, "y": Y + 2**40}, {}, "data.labels: y in {} has 1099511627776 at index 0; expected integers"),
    ({"x": X, "y": Y + 1000}, {}, "data.labels: y in {} has label 1002, which makes more classes than the 30 training examples; labels count classes from 0"),
    ({"x": X, "y": TWO_HOT}, {}, "data.labels: y in {} has shape (30, 3), but row 4 is not one-hot: 1, 1, 1; give each image one label"),
    ({"x": X, "y": np.stack([Y, Y], 1)}, {}, "data.labels: y in {} has shape (30, 2), but row 0 is not one-hot: 0, 0"),
    ({"x": X, "y": Y[:, None, None]}, {}, "data.labels: y in {} has shape (30, 1, 1); expected [N], [N, 1] or one-hot [N, K]"),
    ({"x": X, "y": 0 * Y}, {}, "data.labels: y in {} has only the class 0; give examples of two or more"),
    ({"x": X, "y": np.r_[Y[:-1], 7]}, {}, "data.test_fraction: 0.2 needs two or more examples of each class, got only 033c0a0aecea8631a1c8618b1d21930d 1, which"),
    ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, {}, "data.labels: y in {} has label 2, but there are 2 class names"),
    ({"x": X, "y": Y, "classes": np.eye(3)}, {}, "data.class_names: classes in {} is float64 of shape (3, 3); expected strings [K]"),
    ({"x": X, "y": Y, "classes": np.eye(3), "class_names": Y}, {}, "data.class_names: {} has several arrays (classes, class_names) that can be the class names; name one"),
    ({"x": X, "y": Y}, {"mean": (0.1, 0.2)}, "data.mean: 2 numbers for images of 3 channels; give one per channel, or one for all"),
    ({"x": X, "y": Y}, {"mean": (125.0,)}, "data.mean: 125; uint8 images are divided by 255 first: give numbers in [0, 1]"),
    ({"x": X, "y": Y}, {"crop": "padded"}, "data.padding: 4 pixels can shift images of 4 x 5 out of view; give fewer"),
    ({"x": X, "y": Y}, {"std": (64.0,)}, "data.std: 64; uint8 images"),
]  # fmt: skip


@pytest.mark.parametrize(("named", "options", "message"), MISTAKES)
def test_invalid_arrays_are_refused_in_one_line(tmp_path, named, options, message):
    path = write_npz(tmp_path / "data.npz", **named)
    assert message.replace("{}", str(path)) in load_error(path, **options)


def test_missing_files_are_named(tmp_path):
    assert load_error(tmp_path / "no.npz") == f"data.path: {tmp_path / 'no.npz'} does not exist"
    assert load_error(tmp_path) == (
        f"data.path: {tmp_path} is a folder; give one .npz file with all arrays"
    )


def test_files_that_are_not_npz_are_refused(tmp_path):
    path = tmp_path / "data.npz"
    for content, reason in (
        (b"", "is empty"),
        (b"no zip at all", "is truncated or not an .npz file"),
    ):
        path.write_bytes(content)
        assert load_error(path) == f"data.path: {path} {reason}; write it with numpy.savez"
    np.save(tmp_path / "one.npy", X)
    assert "is truncated or not an .npz file" in load_error(tmp_path / "one.npy")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x", b"text")
        file.writestr("y.npy", b"text")
    assert load_error(path) == f"data.path: x in {path} is not an array"


def test_a_file_that_unpacks_to_much_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "UNPACKED", limits.UNPACKED._replace(value=2**16))
    zeros = np.zeros((2**10, 16, 16), np.uint8)
    path = write_npz(tmp_path / "data.npz", np.savez_compressed, x=zeros, y=np.arange(2**10) % 2)
    assert "the unpacked file has 2" in load_error(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_files_are_refused(tmp_path, save):
    path = write_npz(tmp_path / "data.npz", save, x=X, y=Y)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "is truncated" in load_error(path)
    path.write_bytes(whole[:600] + bytes([whole[600] ^ 1]) + whole[601:])
    assert f"data.path: cannot read x in {path}: " in load_error(path)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["x", "y", "classes"])
def test_python_objects_are_refused_and_never_unpickled(tmp_path, name):
    trace = tmp_path / "trace"
    objects = np.array([Trap(trace)] * N)
    path = write_npz(tmp_path / "data.npz", **{"x": X, "y": Y, name: objects})
    message = load_error(path)
    assert message.startswith(f"data.path: cannot read {name} in {path}: Object arrays cannot be")
    assert message.endswith(
        "expected arrays of numbers or texts, without Python objects, which can run any code when "
        "they are unpickled"
    )
    assert not trace.exists()
    harmless = write_npz(tmp_path / "harmless.npz", x=X, y=Y, other=objects)
    assert load(harmless).classes == ("0", "1", "2")
    assert not trace.exists()


def test_a_header_with_a_larger_shape_than_the_data_is_refused(tmp_path):
    path, content = tmp_path / "data.npz", io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": (2**50, 8, 8)}
    np.lib.format.write_array_header_1_0(content, header)
    y = io.BytesIO()
    np.save(y, Y)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", content.getvalue())
        file.writestr("y.npy", y.getvalue())
    assert f"data.path: cannot read x in {path}: " in load_error(path)
