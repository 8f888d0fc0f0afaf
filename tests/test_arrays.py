"""Arrays in .npz files: which are found, and what is made of them."""

import tracemalloc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_cases import CLASSES, N, X, Y, load, numbers, pixels, refused, written
from data_cases import poisson_weights, seen
from program_cases import exit_code, fnet_command, said_in_one_line

from train.config import ArrayFile, Config, Denoiser, Digits, Mlp, from_json, to_json
from train.data import arrays, digits, evaluation_batches
from train.errors import UserError
from train.run.setup import setup
from train.tasks import images


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "data.npz", x=pixels(), y=numbers())


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
    held_out = {name: len(load(path, test_split=name).test["id"]) for name in (None, "test", "dev")}
    assert held_out == {None: 6, "test": 5, "dev": 7}


@pytest.mark.parametrize("part", ["val", "test"])
def test_a_folder_holds_a_file_a_part(tmp_path, part):
    written(tmp_path / "train.npz", x=pixels(), y_train=numbers())
    written(tmp_path / f"{part}.npz", images=pixels(6, seed=1), labels=numbers(6))
    chex.assert_trees_all_equal(held_out(load(tmp_path))[0], pixels(6, seed=1))
    (tmp_path / f"{part}.npz").rename(tmp_path / "other.npz")
    assert len(load(tmp_path).test["id"]) == 6  # a fifth of those to train on
    chex.assert_trees_all_equal(held_out(load(tmp_path, test_split="other"))[0], pixels(6, seed=1))


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
    "wide": (pixels(shape=(8, 5, 7)), pixels(shape=(8, 5, 7))),
    "square, of many channels": (pixels(shape=(4, 4, 9)), pixels(shape=(4, 4, 9))),
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


@pytest.mark.parametrize("channels", [1, 3, 4, 6])
def test_channels_may_stand_first(tmp_path, channels):
    given = pixels(shape=(channels, 8, 7))
    path = written(tmp_path / "data.npz", x=given, y=numbers())
    data = load(path, axes="channels_first")
    for batch in seen(data)[0]:
        chex.assert_trees_all_equal(batch["image"], given.transpose(0, 2, 3, 1)[batch["id"]])
    assert seen(load(path, axes="channels_last"), 1)[0][0]["image"].shape == (4, channels, 8, 7)
    assert refused(path) == (
        f"data.axes: x in {path} has shape (30, {channels}, 8, 7), whose channels may be first "
        "or last; give channels_first or channels_last"
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
    data = load(path, test_fraction=0.25)
    assert np.bincount(data.test["label"]).tolist() == [5, 10, 15]
    every = np.concatenate([data.train["id"], data.test["id"]])
    assert sorted(every) == list(range(120))
    assert (y[every] == np.concatenate([data.train["label"], data.test["label"]])).all()
    again, other = load(path, test_fraction=0.25), load(path, test_fraction=0.25, split_seed=1)
    chex.assert_trees_all_equal(again.test, data.test)
    assert {*other.test["id"]} != {*data.test["id"]}


def test_what_is_held_out_is_what_digits_hold_out(tmp_path):
    from sklearn.datasets import load_digits

    given = load_digits()
    x = (given.images / 16).astype(np.float32)
    data = load(written(tmp_path / "data.npz", x=x, y=given.target), test_fraction=0.2)
    expected = digits.load(Digits(test_fraction=0.2)).test["image"]
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
    chex.assert_trees_all_equal(arrays._read_array(path, "x"), x)


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
    weights = poisson_weights(load(file, **AUGMENTED), image=(4, 5, 3))
    assert min(weights) == 0 < max(weights)


def test_examples_have_names(file):
    data = load(file)
    assert data.name(3) == f"image {data.train['id'][3]} of x in {file}"


def test_bytes_are_divided_by_255_and_then_by_channel():
    x = pixels(2)
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


def test_floating_images_are_normalised_as_they_are():
    x = 7 * pixels(2, dtype=np.float32)
    config = Config(data=ArrayFile(mean=(3.0,), std=(2.0,)))
    chex.assert_trees_all_close(images.normalize(config, jnp.asarray(x)), (x - 3) / 2, atol=1e-6)
    chex.assert_trees_all_equal(images.normalize(Config(data=ArrayFile()), jnp.asarray(x)), x)
    chex.assert_trees_all_equal(images.normalize(Config(data=Digits()), jnp.asarray(x)), x)


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
    with pytest.raises(UserError, match=r"data.images: tuple should have at most 2"):
        from_json('{"data": {"source": "arrays", "images": ["a", "b", "c"]}}', "here")


@pytest.mark.slow
def test_the_program_trains_evaluates_and_goes_on_with_arrays(workplace, capsys):
    written(workplace / "data.npz", x=pixels(64, (8, 8, 2)), y=numbers(64, 2))
    words = ("--data.source", "arrays", "--optim.name", "adafactor", "--data.crop", "padded")
    given = ("train", "tiny.py", *words, "--out", "run", "--data.batch-size", 8)
    fnet_command(*given)
    fnet_command(*given, "--resume")
    assert "resumed after step 8 of 8" in capsys.readouterr().out
    fnet_command("eval", "run")
    assert "accuracy of 1 " in capsys.readouterr().out
    (workplace / "data.npz").unlink()
    assert exit_code("eval", "run") == 2
    said_in_one_line(capsys, "data.path: data.npz does not exist")


def test_a_network_on_arrays_is_built_for_their_size(tmp_path):
    path = written(tmp_path / "data.npz", x=pixels(), y=numbers())
    run = setup(Config(data=ArrayFile(path=str(path), batch_size=6), model=Mlp(hidden=(5,))))
    assert run.batch_shapes["image"].shape == (6, 4, 5, 3)
    kernels = [a.shape for a in jax.tree.leaves(run.state_shapes.params) if a.ndim == 2]
    assert kernels == [(60, 5), (5, CLASSES)]
