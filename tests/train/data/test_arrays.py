"""Images and labels from .npz files."""

import tracemalloc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_cases import CLASSES, N, X, Y, load, load_error, make_images, make_labels, write_npz
from data_cases import sampled_counts, take_batches

from train.config import ArrayFile, Config, Denoiser, Digits, Mlp
from train.data import arrays, evaluation_batches
from train.errors import UserError
from train.run.setup import setup
from train.tasks import build, images


@pytest.fixture
def file(tmp_path):
    return write_npz(tmp_path / "data.npz", x=make_images(), y=make_labels())


def read_test_examples(dataset):
    """Image, label and id of every test example."""
    batches = list(evaluation_batches(dataset, 7))
    real = [b["weight"] > 0 for b in batches]
    names = ("image", "label", "id")
    return [
        np.concatenate([b[name][r] for b, r in zip(batches, real, strict=True)]) for name in names
    ]


COMMON_NAMES = [
    ("x_train", "y_train", "x_test", "y_test"),  # keras.datasets
    ("train_images", "train_labels", "test_images", "test_labels"),  # MedMNIST
    ("train_images", "train_labels", "val_images", "val_labels"),
    ("X_train", "Y_train", "X_val", "Y_val"),
    ("x", "y", "x_test", "y_test"),
    ("image", "label", "val-image", "val-label"),
    ("data", "target", "data.test", "target.test"),
]


@pytest.mark.parametrize("names", COMMON_NAMES, ids=lambda names: names[2])
def test_finds_arrays_by_common_names(tmp_path, names):
    x, y, test_x, test_y = make_images(), make_labels(), make_images(7, seed=1), make_labels(7)
    given = dict(zip(names, (x, y, test_x, test_y), strict=True))
    data = load(write_npz(tmp_path / "data.npz", **given, other=np.zeros(3)))
    assert data.train["label"].tolist() == y.tolist()
    chex.assert_trees_all_equal(read_test_examples(data)[:2], [test_x, test_y.astype(np.int32)])
    assert data.classes == ("0", "1", "2")


def test_the_test_split_is_val_then_test_or_the_given_one(tmp_path):
    named = {"x_train": make_images(), "y_train": make_labels()}
    for n, part in enumerate(("test", "val", "dev"), 5):
        named |= {f"x_{part}": make_images(n), f"y_{part}": make_labels(n)}
    path = write_npz(tmp_path / "data.npz", **named)
    read_test_examples = {
        name: len(load(path, test_split=name).test["id"]) for name in (None, "test", "dev")
    }
    assert read_test_examples == {None: 6, "test": 5, "dev": 7}


def test_one_row_less_moves_no_other(tmp_path):
    x, y = make_images(60), np.arange(60) % 3

    def tested(rows):
        data = load(write_npz(tmp_path / "a.npz", x=x[rows], y=y[rows], extra=y))
        assert any(note.endswith("a.npz: x, y are read, and not extra") for note in data.notes)
        first, count = len(data.train["id"]), len(data.test["id"])
        return {rows[data.place(first + i)["index"]] for i in range(count)}

    whole = tested([*range(60)])
    assert 5 < len(whole) < 20
    assert tested([i for i in range(60) if i != 3]) == whole - {3}


def test_what_is_held_out_copies_and_classes_without_images_are_told(tmp_path):
    x, y = make_images(), make_labels() + 1
    x[1:5] = x[:1]
    rule = "labels that are numbers count classes from 0"
    absent, held_out = load(path := write_npz(tmp_path / "a.npz", x=x, y=y)).notes  # no copies
    assert absent == f"4 classes, but no training image of 0; {rule}"
    assert held_out.startswith(f"no test arrays in {path}: ")
    assert (
        f"such as image 0 of x_val in {path} of image 0 of x in {path}; "
        in (load(write_npz(path, x=x, y=y, x_val=x[:2], y_val=y[:2])).notes[-1])
    )


def test_reads_arrays_by_given_names(tmp_path):
    path = write_npz(
        tmp_path / "data.npz",
        Xtr=make_images(), ytr=make_labels(), Xte=make_images(6, seed=1), yte=make_labels(6), x=make_images(20), y=make_labels(20),
    )  # fmt: skip
    data = load(path, images=("Xtr", "Xte"), labels=("ytr", "yte"))
    assert len(data.train["id"]) == N
    chex.assert_trees_all_equal(read_test_examples(data)[0], make_images(6, seed=1))
    for options, count in (({"images": ("Xtr",), "labels": ("ytr",)}, N), ({}, 20)):
        data = load(path, **options)
        assert len(data.train["id"]) + len(data.test["id"]) == count


def test_compressed_files_give_the_same_batches(tmp_path, file):
    packed = write_npz(
        tmp_path / "packed.npz", np.savez_compressed, x=make_images(), y=make_labels()
    )
    chex.assert_trees_all_equal(take_batches(load(packed))[0], take_batches(load(file))[0])


SHAPES = {
    "uint8": (make_images(), make_images()),
    "grayscale": (make_images(shape=(4, 5)), make_images(shape=(4, 5))[..., None]),
    "float16": (make_images(dtype=np.float16), make_images(dtype=np.float16).astype(np.float32)),
    "float64": (make_images(dtype=np.float64), make_images(dtype=np.float64).astype(np.float32)),
    "big endian": (make_images(dtype=">f4"), make_images(dtype=np.float32)),
    "column-major": (np.asfortranarray(make_images()), make_images()),
    "square with many channels": (make_images(shape=(4, 4, 9)), make_images(shape=(4, 4, 9))),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_batches_have_the_images_of_their_ids_as_uint8_or_float32(tmp_path, kind):
    given, expected = SHAPES[kind]
    data = load(write_npz(tmp_path / "data.npz", x=given, y=make_labels()))
    for batch in take_batches(data)[0]:
        chex.assert_trees_all_equal(batch["image"], expected[batch["id"]])
        assert batch["image"].dtype == expected.dtype == batch["image"].dtype.newbyteorder("=")
        assert (batch["label"] == batch["id"] % CLASSES).all()
        assert (batch["label"].dtype, batch["id"].dtype) == (np.int32, np.int32)
    image, label, id = read_test_examples(data)
    chex.assert_trees_all_equal((image, label), (expected[id], (id % CLASSES).astype(np.int32)))
    assert image.dtype == expected.dtype


@pytest.mark.parametrize("channels", [1, 3, 4, 6])
def test_reads_images_with_channels_first(tmp_path, channels):
    given = make_images(shape=(channels, 8, 7))
    path = write_npz(tmp_path / "data.npz", x=given, y=make_labels())
    data = load(path, axes="channels_first")
    for batch in take_batches(data)[0]:
        chex.assert_trees_all_equal(batch["image"], given.transpose(0, 2, 3, 1)[batch["id"]])
    assert take_batches(load(path, axes="channels_last"), 1)[0][0]["image"].shape == (
        4,
        channels,
        8,
        7,
    )
    assert load_error(path) == (
        f"data.axes: x in {path} has shape (30, {channels}, 8, 7), whose channels may be first "
        "or last; give channels_first or channels_last"
    )


LABELS = {
    "column": make_labels()[:, None],
    "uint8": make_labels().astype(np.uint8),
    "one-hot": np.eye(CLASSES)[make_labels()],
    "one-hot of bool": np.eye(CLASSES, dtype=bool)[make_labels()],
}


@pytest.mark.parametrize("kind", LABELS)
def test_reads_labels_as_a_vector_a_column_or_one_hot(tmp_path, kind):
    data = load(write_npz(tmp_path / "data.npz", x=make_images(), y=LABELS[kind]))
    assert data.train["label"].dtype == np.int32
    assert (data.train["label"] == data.train["id"] % CLASSES).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("axes", [None, "channels_first"])
def test_images_are_in_memory_only_once(tmp_path, save, axes, dtype):
    x = np.zeros((400, 3, 64, 64) if axes else (400, 64, 64, 3), dtype)
    x.reshape(400, -1)[:, :2] = np.stack(np.divmod(np.arange(400), 200), 1)  # no copies
    path = write_npz(tmp_path / "data.npz", save, x=x, y=make_labels(400))
    load(path, axes=axes)  # imports modules before memory is traced
    tracemalloc.start()
    data = load(path, axes=axes, crop="reflected", flip=True)
    take_batches(data, 2)
    for _ in evaluation_batches(data, 4):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert x.nbytes < peak < 1.3 * x.nbytes


AUGMENTED = {"crop": "padded", "padding": 2, "flip": True}


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_shifts_and_flips_training_images_only(tmp_path, dtype):
    x = make_images(dtype=dtype)
    path = write_npz(tmp_path / "data.npz", x=x, y=make_labels())
    data = load(path, **AUGMENTED)
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    augmentations = set()
    for batch in take_batches(data, 8)[0]:
        chex.assert_shape(batch["image"], (4, 4, 5, 3))
        assert batch["image"].dtype == dtype
        for image, id in zip(batch["image"], batch["id"], strict=True):
            views = {
                (top, left, step): padded[id, top : top + 4, left : left + 5][:, ::step]
                for top in range(5)
                for left in range(5)
                for step in (1, -1)
            }
            augmentations |= {key for key, view in views.items() if (view == image).all()}
    assert {step for *_, step in augmentations} == {1, -1}
    assert len({(top, left) for top, left, _ in augmentations}) > 8
    image, _, id = read_test_examples(data)
    chex.assert_trees_all_equal(image, x[id])
    chex.assert_trees_all_equal(arrays._read_array(path, "x"), x)


def test_reflection_padding_leaves_no_zeros(tmp_path):
    x = make_images(dtype=np.float32) + 1
    data = load(write_npz(tmp_path / "data.npz", x=x, y=make_labels()), crop="reflected", padding=3)
    assert all((batch["image"] > 0).all() for batch in take_batches(data)[0])


def test_pads_poisson_batches_even_without_a_sampled_example(file):
    weights = sampled_counts(load(file, **AUGMENTED), image=(4, 5, 3))
    assert min(weights) == 0 < max(weights)


def test_normalizes_uint8_images_per_channel():
    x = make_images(2)
    config = Config(data=ArrayFile(mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0)))
    got = images.normalize(config, jnp.asarray(x))
    expected = (x / 255 - np.array([0.1, 0.2, 0.3])) / [0.5, 0.25, 1.0]
    chex.assert_trees_all_close(got, expected.astype(np.float32), atol=1e-6)
    assert got.dtype == jnp.float32
    one = Config(data=ArrayFile(mean=(0.5,), std=(0.25,)))
    chex.assert_trees_all_close(
        images.normalize(one, jnp.asarray(x)),
        ((x / 255 - 0.5) / 0.25).astype(np.float32),
        atol=1e-6,
    )


def test_normalizes_floating_images_without_rescaling():
    x = 7 * make_images(2, dtype=np.float32)
    config = Config(data=ArrayFile(mean=(3.0,), std=(2.0,)))
    chex.assert_trees_all_close(images.normalize(config, jnp.asarray(x)), (x - 3) / 2, atol=1e-6)
    chex.assert_trees_all_equal(images.normalize(Config(data=ArrayFile()), jnp.asarray(x)), x)
    chex.assert_trees_all_equal(images.normalize(Config(data=Digits()), jnp.asarray(x)), x)


NAMES = {
    "strings": np.array(["ape", "Bär", "cat"]),
    "encoded": np.char.encode(["ape", "Bär", "cat"], "utf-8"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_reads_class_names_from_an_array_of_strings(tmp_path, kind):
    path = write_npz(
        tmp_path / "data.npz", x=make_images(), y=make_labels(), class_names=NAMES[kind]
    )
    assert load(path).classes == ("ape", "Bär", "cat")
    named = {"x": make_images(), "y": make_labels(), "words": NAMES[kind]}
    path = write_npz(tmp_path / "named.npz", **named)
    assert load(path).classes == ("0", "1", "2")
    assert load(path, class_names="words").classes == ("ape", "Bär", "cat")


def test_class_names_can_include_classes_without_examples(tmp_path):
    names = np.array([f"class {i}" for i in range(100)])
    path = write_npz(tmp_path / "data.npz", x=make_images(), y=make_labels() + 60, classes=names)
    assert len(load(path).classes) == 100


def test_a_denoiser_needs_floating_images_in_the_unit_interval(tmp_path):
    for factor, offset, good in ((1, 0, True), (2, 0, False), (1, -0.5, False)):
        x = factor * make_images(dtype=np.float32) + np.float32(offset)
        path = write_npz(tmp_path / "data.npz", x=x, y=make_labels())
        config = Config(data=ArrayFile(path=str(path)), model=Denoiser())
        if good:
            assert build(config).dataset.classes
        else:
            with pytest.raises(UserError, match=r"data.images: values from .*in \[0, 1\]"):
                build(config)
    path = write_npz(tmp_path / "data.npz", x=X, y=Y)
    assert build(Config(data=ArrayFile(path=str(path)), model=Denoiser())).dataset.classes


def test_the_network_fits_the_size_of_the_images(tmp_path):
    path = write_npz(tmp_path / "data.npz", x=make_images(), y=make_labels())
    run = setup(Config(data=ArrayFile(path=str(path), batch_size=6), model=Mlp(hidden=(5,))))
    assert run.batch_shapes["image"].shape == (6, 4, 5, 3)
    kernels = [a.shape for a in jax.tree.leaves(run.state_shapes.params) if a.ndim == 2]
    assert kernels == [(60, 5), (5, CLASSES)]
