"""Arrays in .npz files: which are found, what is made of them, and what is said otherwise."""

import io
import tracemalloc
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_cases import exit_code, fnet_command

from train.config import ArrayFile, Config, Denoiser, Digits, Mlp, from_json, to_json
from train.data import arrays, digits, evaluation_batches, training_batches
from train.data.poisson import poisson_batches
from train.errors import UserError
from train.setup import setup
from train.tasks import images

N, CLASSES = 30, 3


def pixels(n=N, shape=(4, 5, 3), dtype=np.uint8, seed=0):
    """Images that differ from each other."""
    values = np.random.default_rng(seed).integers(0, 256, (n, *shape))
    return values.astype(dtype) if dtype == np.uint8 else (values / 255).astype(dtype)


def numbers(n=N, classes=CLASSES):
    return np.arange(n) % classes


def written(path, save=np.savez, **named):
    save(path, **named)
    return path


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "data.npz", x=pixels(), y=numbers())


def load(path, **options):
    return arrays.load(ArrayFile(path=str(path), **{"batch_size": 4} | options))


def seen(dataset, n=6, size=4, seed=0, after=None):
    batches = training_batches(dataset, size, seed)
    if after is not None:
        batches.set_state(after)
    return [next(batches) for _ in range(n)], batches


def held_out(dataset):
    """Image, label and id of every held-out example."""
    batches = list(evaluation_batches(dataset, 7))
    real = [b["weight"] > 0 for b in batches]
    names = ("image", "label", "id")
    return [
        np.concatenate([b[name][r] for b, r in zip(batches, real, strict=True)]) for name in names
    ]


PARTS = [
    ("x_train", "y_train", "x_test", "y_test"),  # keras.datasets
    ("train_images", "train_labels", "test_images", "test_labels"),  # MedMNIST
    ("train_images", "train_labels", "val_images", "val_labels"),
    ("X_train", "Y_train", "X_val", "Y_val"),
    ("x", "y", "x_test", "y_test"),
    ("image", "label", "val-image", "val-label"),
    ("data", "target", "data.test", "target.test"),
]


@pytest.mark.parametrize("names", PARTS, ids=lambda names: names[2])
def test_arrays_with_usual_names_are_found_without_being_named(tmp_path, names):
    x, y, test_x, test_y = pixels(), numbers(), pixels(7, seed=1), numbers(7)
    given = dict(zip(names, (x, y, test_x, test_y), strict=True))
    data = load(written(tmp_path / "data.npz", **given, other=np.zeros(3)))
    assert data.train["label"].tolist() == y.tolist()
    chex.assert_trees_all_equal(held_out(data)[:2], [test_x, test_y.astype(np.int32)])
    assert data.classes == ("0", "1", "2")


def test_val_is_tested_on_before_test_and_another_part_where_it_is_said(tmp_path):
    named = {"x_train": pixels(), "y_train": numbers()}
    for n, part in enumerate(("test", "val", "dev"), 5):
        named |= {f"x_{part}": pixels(n), f"y_{part}": numbers(n)}
    path = written(tmp_path / "data.npz", **named)
    held_out = {name: len(load(path, held_out=name).test["id"]) for name in (None, "test", "dev")}
    assert held_out == {None: 6, "test": 5, "dev": 7}


@pytest.mark.parametrize("part", ["val", "test"])
def test_a_folder_holds_a_file_a_part(tmp_path, part):
    written(tmp_path / "train.npz", x=pixels(), y_train=numbers())
    written(tmp_path / f"{part}.npz", images=pixels(6, seed=1), labels=numbers(6))
    chex.assert_trees_all_equal(held_out(load(tmp_path))[0], pixels(6, seed=1))
    (tmp_path / f"{part}.npz").rename(tmp_path / "other.npz")
    assert len(load(tmp_path).test["id"]) == 6  # a fifth of those to train on
    chex.assert_trees_all_equal(held_out(load(tmp_path, held_out="other"))[0], pixels(6, seed=1))


def test_arrays_can_be_named(tmp_path):
    path = written(
        tmp_path / "data.npz",
        Xtr=pixels(), ytr=numbers(), Xte=pixels(6, seed=1), yte=numbers(6), x=pixels(20), y=numbers(20),
    )  # fmt: skip
    data = load(path, images=("Xtr", "Xte"), labels=("ytr", "yte"))
    assert len(data.train["id"]) == N
    chex.assert_trees_all_equal(held_out(data)[0], pixels(6, seed=1))
    assert len(load(path, images=("Xtr",), labels=("ytr",)).train["id"]) == 24
    assert len(load(path).train["id"]) == 16


def test_compressed_files_hold_the_same(tmp_path, file):
    packed = written(tmp_path / "packed.npz", np.savez_compressed, x=pixels(), y=numbers())
    chex.assert_trees_all_equal(seen(load(packed))[0], seen(load(file))[0])


SHAPES = {
    "bytes": (pixels(), pixels()),
    "grey bytes": (pixels(shape=(4, 5)), pixels(shape=(4, 5))[..., None]),
    "half": (pixels(dtype=np.float16), pixels(dtype=np.float16).astype(np.float32)),
    "double": (pixels(dtype=np.float64), pixels(dtype=np.float64).astype(np.float32)),
    "big endian": (pixels(dtype=">f4"), pixels(dtype=np.float32)),
    "by column": (np.asfortranarray(pixels()), pixels()),
    "wide": (pixels(shape=(4, 5, 7)), pixels(shape=(4, 5, 7))),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_batches_have_the_images_of_their_ids_as_bytes_or_float32(tmp_path, kind):
    given, expected = SHAPES[kind]
    data = load(written(tmp_path / "data.npz", x=given, y=numbers()))
    for batch in seen(data)[0]:
        chex.assert_trees_all_equal(batch["image"], expected[batch["id"]])
        assert batch["image"].dtype == expected.dtype == batch["image"].dtype.newbyteorder("=")
        assert (batch["label"] == batch["id"] % CLASSES).all()
        assert (batch["label"].dtype, batch["id"].dtype) == (np.int32, np.int32)
    image, label, id = held_out(data)
    chex.assert_trees_all_equal((image, label), (expected[id], (id % CLASSES).astype(np.int32)))
    assert image.dtype == expected.dtype


def test_channels_may_stand_first(tmp_path):
    given = pixels(shape=(3, 8, 7))
    path = written(tmp_path / "data.npz", x=given, y=numbers())
    data = load(path, axes="channels_first")
    for batch in seen(data)[0]:
        chex.assert_trees_all_equal(batch["image"], given.transpose(0, 2, 3, 1)[batch["id"]])
    assert seen(load(path, axes="channels_last"), 1)[0][0]["image"].shape == (4, 3, 8, 7)
    assert refused(path) == (
        f"data.axes: x in {path} has shape (30, 3, 8, 7), and its channels may be first or last; "
        "give channels_first or channels_last"
    )


LABELS = {
    "column": numbers()[:, None],
    "bytes": numbers().astype(np.uint8),
    "one-hot": np.eye(CLASSES)[numbers()],
    "one-hot of bool": np.eye(CLASSES, dtype=bool)[numbers()],
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_integers_in_a_row_or_a_column_or_one_hot(tmp_path, kind):
    data = load(written(tmp_path / "data.npz", x=pixels(), y=LABELS[kind]))
    assert data.train["label"].dtype == np.int32
    assert (data.train["label"] == data.train["id"] % CLASSES).all()


def test_a_share_of_every_class_is_held_out_by_a_seed(tmp_path):
    y = np.repeat([0, 1, 2], [20, 40, 60])
    path = written(tmp_path / "data.npz", x=pixels(120), y=y)
    data = load(path, test_share=0.25)
    assert np.bincount(data.test["label"]).tolist() == [5, 10, 15]
    every = np.concatenate([data.train["id"], data.test["id"]])
    assert sorted(every) == list(range(120))
    assert (y[every] == np.concatenate([data.train["label"], data.test["label"]])).all()
    again, other = load(path, test_share=0.25), load(path, test_share=0.25, split_seed=1)
    chex.assert_trees_all_equal(again.test, data.test)
    assert {*other.test["id"]} != {*data.test["id"]}


def test_what_is_held_out_is_what_digits_hold_out(tmp_path):
    from sklearn.datasets import load_digits

    given = load_digits()
    x = (given.images / 16).astype(np.float32)
    data = load(written(tmp_path / "data.npz", x=x, y=given.target), test_share=0.2)
    expected = digits.load(Digits(test_share=0.2)).test["image"]
    order = np.lexsort(expected.reshape(len(expected), -1).T)
    found = held_out(data)[0]
    chex.assert_trees_all_equal(found[np.lexsort(found.reshape(len(found), -1).T)], expected[order])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("axes", [None, "channels_first"])
def test_images_are_in_memory_once(tmp_path, save, axes, dtype):
    x = np.zeros((400, 3, 64, 64) if axes else (400, 64, 64, 3), dtype)
    path = written(tmp_path / "data.npz", save, x=x, y=numbers(400))
    load(path, axes=axes)  # what is imported when it is first needed
    tracemalloc.start()
    data = load(path, axes=axes, crop="reflected", flip=True)
    seen(data, 2)
    for _ in evaluation_batches(data, 4):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert x.nbytes < peak < 1.3 * x.nbytes


AUGMENTED = {"crop": "padded", "padding": 2, "flip": True}


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_training_images_are_moved_and_mirrored_and_those_to_test_on_are_not(tmp_path, dtype):
    x = pixels(dtype=dtype)
    path = written(tmp_path / "data.npz", x=x, y=numbers())
    data = load(path, **AUGMENTED)
    around = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    kinds = set()
    for batch in seen(data, 8)[0]:
        chex.assert_shape(batch["image"], (4, 4, 5, 3))
        assert batch["image"].dtype == dtype
        for image, id in zip(batch["image"], batch["id"], strict=True):
            views = {
                (top, left, step): around[id, top : top + 4, left : left + 5][:, ::step]
                for top in range(5)
                for left in range(5)
                for step in (1, -1)
            }
            kinds |= {kind for kind, view in views.items() if (view == image).all()}
    assert {step for *_, step in kinds} == {1, -1}
    assert len({(top, left) for top, left, _ in kinds}) > 8
    image, _, id = held_out(data)
    chex.assert_trees_all_equal(image, x[id])
    chex.assert_trees_all_equal(arrays.read(path, "x"), x)


def test_what_comes_in_at_a_border_may_be_the_mirror_image(tmp_path):
    x = pixels(dtype=np.float32) + 1
    data = load(written(tmp_path / "data.npz", x=x, y=numbers()), crop="reflected", padding=3)
    assert all((batch["image"] > 0).all() for batch in seen(data)[0])


def test_batches_go_on_where_they_stopped(file):
    data = load(file, **AUGMENTED)
    _, batches = seen(data, 5)
    position = batches.get_state()
    chex.assert_trees_all_equal(seen(data, 4, after=position)[0], [next(batches) for _ in range(4)])


def test_batches_for_private_training_are_padded_even_where_none_is_drawn(file):
    batches = poisson_batches(load(file, **AUGMENTED), 1, 0, 8)
    weights = []
    for _ in range(12):
        batch = next(batches)
        chex.assert_shape(batch["image"], (8, 4, 5, 3))
        weights.append(batch["weight"].sum())
    assert 0 in weights
    assert max(weights) > 0


def test_examples_have_names(file):
    data = load(file)
    assert data.name(3) == f"image {data.train['id'][3]} of x in {file}"


def test_bytes_are_divided_by_255_and_then_by_channel():
    x = pixels(2)
    config = Config(data=ArrayFile(mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0)))
    got = images.normalized(config, jnp.asarray(x))
    expected = (x / 255 - np.array([0.1, 0.2, 0.3])) / [0.5, 0.25, 1.0]
    chex.assert_trees_all_close(got, expected.astype(np.float32), atol=1e-6)
    assert got.dtype == jnp.float32
    one = Config(data=ArrayFile(mean=(0.5,), std=(0.25,)))
    chex.assert_trees_all_close(
        images.normalized(one, jnp.asarray(x)),
        ((x / 255 - 0.5) / 0.25).astype(np.float32),
        atol=1e-6,
    )


def test_floating_images_are_normalised_as_they_are():
    x = 7 * pixels(2, dtype=np.float32)
    config = Config(data=ArrayFile(mean=(3.0,), std=(2.0,)))
    chex.assert_trees_all_close(images.normalized(config, jnp.asarray(x)), (x - 3) / 2, atol=1e-6)
    chex.assert_trees_all_equal(images.normalized(Config(data=ArrayFile()), jnp.asarray(x)), x)
    chex.assert_trees_all_equal(images.normalized(Config(data=Digits()), jnp.asarray(x)), x)


NAMES = {
    "strings": np.array(["ape", "Bär", "cat"]),
    "encoded": np.char.encode(["ape", "Bär", "cat"], "utf-8"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_classes_are_named_by_an_array_of_strings(tmp_path, kind):
    path = written(tmp_path / "data.npz", x=pixels(), y=numbers(), class_names=NAMES[kind])
    assert load(path).classes == ("ape", "Bär", "cat")
    named = {"x": pixels(), "y": numbers(), "words": NAMES[kind]}
    path = written(tmp_path / "named.npz", **named)
    assert load(path).classes == ("0", "1", "2")
    assert load(path, class_names="words").classes == ("ape", "Bär", "cat")


def test_classes_without_an_example_can_be_named(tmp_path):
    names = np.array([f"class {i}" for i in range(100)])
    path = written(tmp_path / "data.npz", x=pixels(), y=numbers() + 60, classes=names)
    assert len(load(path).classes) == 100


def refused(path, **options):
    with pytest.raises(UserError) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


X, Y = pixels(), numbers()
TEST = {"x_train": X, "y_train": Y, "x_test": pixels(6), "y_test": numbers(6)}
NAN, LARGE = pixels(dtype=np.float32), pixels(dtype=np.float64)
NAN[7, 1, 2, 0] = np.nan
INFINITE = pixels(dtype=np.float16)
INFINITE[9] = -np.inf
LARGE[3] = 1e300
NEGATIVE, TWO_HOT = numbers(), np.eye(CLASSES)[numbers()]
NEGATIVE[5] = -1
TWO_HOT[4] = 1

# What is in the file, options, and what is said of it, {} its path.
MISTAKES = [
    ({"a": X, "b": Y}, {}, "data.images: no array in {} is called as images usually are (x, image, images, x_train, image_train, images_train, ...); name one; there are a, b"),
    ({"x": X, "b": Y}, {}, "data.labels: no array in {} is called as labels usually are (y, label, labels, y_train, label_train, labels_train, ...); name one; there are x, b"),
    ({"x_train": X, "y_train": Y, "x_test": X}, {}, "data.labels: no array in {} is called as labels of test usually are (y_test, label_test, labels_test, ...); name one; there are x_train, y_train, x_test"),
    ({"x_test": X, "y_test": Y}, {}, "data.images: no array in {} is called as images usually are"),
    ({}, {}, "; name one; there are no arrays"),
    ({"x": X, "images": X, "y": Y}, {}, "data.images: x and images in {} could both be meant; name one"),
    ({"x": X, "x_train": X, "y": Y}, {}, "data.images: x and x_train in {} could both be meant; name one"),
    ({"x": X, "y": Y}, {"images": ("xx",)}, "data.images: no array xx in {} (did you mean x?); there are x, y"),
    ({"x": X, "y": Y}, {"labels": ("y", "z")}, "data.images: no array in {} is called as images of test usually are"),
    ({"x": X, "y": Y}, {"images": ("x", "x"), "labels": ("y", "y")}, "data.held_out: x in {} would be trained on and tested on"),
    (TEST, {"held_out": "train"}, "data.held_out: x_train in {} would be trained on and tested on"),
    (TEST, {"held_out": "tests"}, "data.held_out: no part tests in {} (did you mean test?); there are test, train"),
    (TEST, {"class_names": "names"}, "data.class_names: no array names in {}; there are x_train, y_train, x_test, y_test"),
    ({"x": X, "y": Y[:-2]}, {}, "data.labels: y in {} has 28 labels for the 30 images in x"),
    (TEST | {"y_test": numbers(7)}, {}, "data.labels: y_test in {} has 7 labels for the 6 images in x_test"),
    ({"x": X.reshape(N, -1), "y": Y}, {}, "data.images: x in {} has shape (30, 60); images are [N, height, width] or [N, height, width, channels]"),
    ({"x": X[None], "y": Y}, {}, "data.images: x in {} has shape (1, 30, 4, 5, 3); images are [N, height"),
    ({"x": X[:0], "y": Y[:0]}, {}, "data.images: x in {} is empty: its shape is (0, 4, 5, 3)"),
    (TEST | {"x_test": X[:0], "y_test": Y[:0]}, {}, "data.images: x_test in {} is empty: its shape is (0, 4, 5, 3)"),
    ({"x": X[:, :0], "y": Y}, {}, "data.images: x in {} is empty: its shape is (30, 0, 5, 3)"),
    ({"x": X.astype(int), "y": Y}, {}, "data.images: x in {} is int64; images are uint8 or floating"),
    ({"x": NAN, "y": Y}, {}, "data.images: x in {} has nan in image 7"),
    ({"x": INFINITE, "y": Y}, {}, "data.images: x in {} has -inf in image 9"),
    ({"x": LARGE, "y": Y}, {}, "data.images: x in {} has 1e+300 in image 3"),
    (TEST | {"x_test": pixels(6, (4, 4, 3))}, {}, "data.images: x_train in {} has images of bytes (4, 5, 3), x_test in {} of bytes (4, 4, 3); those to test on are to be as those to train on"),
    (TEST | {"x_test": pixels(6, dtype=np.float32)}, {}, "of bytes (4, 5, 3), x_test in {} of floating (4, 5, 3)"),
    ({"x": X, "y": Y / 2}, {}, "data.labels: y in {} is float64; labels are integers from 0"),
    ({"x": X, "y": Y.astype(str)}, {}, "data.labels: y in {} is <U21; labels are integers from 0"),
    ({"x": X, "y": NEGATIVE}, {}, "data.labels: y in {} has -1 at 5; labels are integers from 0 to 2147483647"),
    ({"x": X, "y": Y + 2**40}, {}, "data.labels: y in {} has 1099511627776 at 0; labels are integers"),
    ({"x": X, "y": Y + 1000}, {}, "data.labels: {} has label 1002, which makes more classes than the 30 examples to train on; labels count classes from 0"),
    ({"x": X, "y": TWO_HOT}, {}, "data.labels: y in {} has shape (30, 3), but row 4 is not one-hot: 1, 1, 1; give each image one label"),
    ({"x": X, "y": np.stack([Y, Y], 1)}, {}, "data.labels: y in {} has shape (30, 2), but row 0 is not one-hot: 0, 0"),
    ({"x": X, "y": Y[:, None, None]}, {}, "data.labels: y in {} has shape (30, 1, 1); labels are [N], [N, 1] or one-hot [N, K]"),
    ({"x": X, "y": 0 * Y}, {}, "data.labels: y in {} has one class only, 0; give examples of two or more"),
    ({"x": X, "y": np.r_[Y[:-1], 7]}, {}, "data.test_share: 0.2 does not do: The least populated class"),
    ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, {}, "data.labels: {} has label 2, but the names of 2 classes"),
    ({"x": X, "y": Y, "classes": np.eye(3)}, {}, "data.class_names: classes in {} is float64 of shape (3, 3); the names of labels 0, 1, ... are strings [K]"),
    ({"x": X, "y": Y, "classes": np.eye(3), "class_names": Y}, {}, "data.class_names: classes and class_names in {} could both be meant; name one"),
    ({"x": X, "y": Y}, {"mean": (0.1, 0.2)}, "data.mean: 2 numbers for images of 3 channels; give one for each, or one for all"),
    ({"x": X, "y": Y}, {"mean": (125.0,)}, "data.mean: 125; images that are bytes are divided by 255 first: give numbers in [0, 1]"),
    ({"x": X, "y": Y}, {"crop": "padded"}, "data.padding: 4 pixels move all of an image of 4 x 5 out of sight; give fewer"),
    ({"x": X, "y": Y}, {"std": (64.0,)}, "data.std: 64; images that are bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("named", "options", "message"), MISTAKES)
def test_what_cannot_be_trained_on_is_said_in_one_line(tmp_path, named, options, message):
    path = written(tmp_path / "data.npz", **named)
    assert message.replace("{}", str(path)) in refused(path, **options)


def test_a_file_that_is_not_there_is_said(tmp_path):
    expected = "it is an .npz file, or a folder with train.npz and, to test on, val.npz or test.npz"
    assert (
        refused(tmp_path / "no.npz")
        == f"data.path: {tmp_path / 'no.npz'} does not exist; {expected}"
    )
    assert refused(tmp_path) == (
        f"data.path: no file {tmp_path / 'train.npz'}; {expected}; there are no files"
    )
    written(tmp_path / "training.npz", x=X, y=Y)
    assert refused(tmp_path).endswith("; there are training")
    (tmp_path / "training.npz").rename(tmp_path / "train.npz")
    message = refused(tmp_path, images=("x", "x"), labels=("y", "y"))
    assert "holds neither val.npz nor test.npz; name the file with x and y" in message


def test_a_file_that_is_no_npz_is_said(tmp_path):
    path = tmp_path / "data.npz"
    for content, reason in (
        (b"", "is empty"),
        (b"no zip at all", "is cut short, or no .npz file"),
    ):
        path.write_bytes(content)
        assert refused(path) == f"data.path: {path} {reason}; numpy.savez writes such files"
    np.save(tmp_path / "one.npy", X)
    assert "is cut short, or no .npz file" in refused(tmp_path / "one.npy")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x", b"text")
        file.writestr("y.npy", b"text")
    assert refused(path) == f"data.path: x in {path} is no array"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_file_is_said(tmp_path, save):
    path = written(tmp_path / "data.npz", save, x=X, y=Y)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "is cut short" in refused(path)
    path.write_bytes(whole[:600] + bytes([whole[600] ^ 1]) + whole[601:])
    assert f"data.path: cannot read x in {path}: " in refused(path)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["x", "y", "classes"])
def test_python_objects_are_refused_and_never_unpickled(tmp_path, name):
    trace = tmp_path / "trace"
    objects = np.array([Trap(trace)] * N)
    path = written(tmp_path / "data.npz", **{"x": X, "y": Y, name: objects})
    assert refused(path) == (
        f"data.path: {name} in {path} holds Python objects, which only pickle could read, and "
        "pickle runs what a file says; save numbers, or names as an array of strings"
    )
    assert not trace.exists()
    harmless = written(tmp_path / "harmless.npz", x=X, y=Y, other=objects)
    assert load(harmless).classes == ("0", "1", "2")
    assert not trace.exists()


def test_a_header_that_promises_more_than_there_is_is_said(tmp_path):
    path, content = tmp_path / "data.npz", io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": (2**50, 8, 8)}
    np.lib.format.write_array_header_1_0(content, header)
    y = io.BytesIO()
    np.save(y, Y)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", content.getvalue())
        file.writestr("y.npy", y.getvalue())
    assert f"data.path: cannot read x in {path}: " in refused(path)


def test_networks_that_draw_images_take_floating_ones_in_the_unit_interval(tmp_path):
    for factor, offset, good in ((1, 0, True), (2, 0, False), (1, -0.5, False)):
        x = factor * pixels(dtype=np.float32) + np.float32(offset)
        path = written(tmp_path / "data.npz", x=x, y=numbers())
        config = Config(data=ArrayFile(path=str(path)), model=Denoiser())
        if good:
            assert images.load(config).classes
        else:
            with pytest.raises(UserError, match=r"data.images: values from .*in \[0, 1\]"):
                images.load(config)
    path = written(tmp_path / "data.npz", x=X, y=Y)
    assert images.load(Config(data=ArrayFile(path=str(path)), model=Denoiser())).classes


def test_the_section_survives_json():
    config = Config(data=ArrayFile(images=("a", "b"), labels=("c",), mean=(0.1, 0.2, 0.3)))
    assert from_json(to_json(config), "here") == config
    with pytest.raises(UserError, match=r"data.images: expected .* at most 2"):
        from_json('{"data": {"source": "arrays", "images": ["a", "b", "c"]}}', "here")


def test_the_program_trains_evaluates_and_goes_on_with_arrays(workplace, capsys):
    written(workplace / "data.npz", x=pixels(64, (8, 8)), y=numbers(64, 2))
    words = ("--data.source", "arrays", "--optim.name", "adafactor", "--data.crop", "padded")
    given = ("train", "tiny.py", *words, "--out", "run", "--data.batch-size", 8)
    fnet_command(*given)
    fnet_command(*given, "--resume")
    assert "resumed after step 8 of 8" in capsys.readouterr().out
    fnet_command("eval", "run")
    assert "accuracy of 1 " in capsys.readouterr().out
    (workplace / "data.npz").unlink()
    assert exit_code("eval", "run") == 2
    error = capsys.readouterr().err
    assert error.startswith("fnet: data.path: data.npz does not exist")
    assert error.count("\n") == 1


def test_a_network_on_arrays_is_built_for_their_size(tmp_path):
    path = written(tmp_path / "data.npz", x=pixels(), y=numbers())
    run = setup(Config(data=ArrayFile(path=str(path), batch_size=6), model=Mlp(hidden=(5,))))
    assert run.batch_shapes["image"].shape == (6, 4, 5, 3)
    kernels = [a.shape for a in jax.tree.leaves(run.state_shapes.params) if a.ndim == 2]
    assert kernels == [(60, 5), (5, CLASSES)]
