"""Hugging Face data sets, with a fake of the package datasets and with the package if installed."""

import dataclasses
import functools
import io
import re
import sys
import types

import chex
import numpy as np
import pytest
from data_cases import error_message, take_batches
from image_cases import color, write_class_folders, write_image
from PIL import Image

from train.config import HuggingFace, ImageFolder
from train.data import evaluation_batches
from train.data.unreadable import UnreadableFiles
from train.errors import UserError

CLASSES = ("ape", "bear", "cat")


@dataclasses.dataclass
class ImageFeature:
    decode: bool = True


@dataclasses.dataclass
class ClassLabel:
    names: list


@dataclasses.dataclass
class Value:
    dtype: str


class Split:
    """As much of datasets.Dataset as is used."""

    def __init__(self, columns, features, as_numpy=False):
        self.columns, self.features, self.as_numpy = columns, features, as_numpy

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def select_columns(self, names):
        return Split({n: self.columns[n] for n in names}, {n: self.features[n] for n in names})

    def cast_column(self, name, feature):
        return Split(self.columns, self.features | {name: feature}, self.as_numpy)

    def with_format(self, kind):
        assert kind == "numpy"
        return Split(self.columns, self.features, as_numpy=True)

    def __getitem__(self, key):
        for feature in self.features.values():
            assert not getattr(feature, "decode", False), "the package would decode an image"
        rows = {name: values[key] for name, values in self.columns.items()}
        if not self.as_numpy:
            return rows
        return {name: np.asarray(values) for name, values in rows.items()}


def content(i, size=(12, 10), kind="PNG"):
    """Encoded bytes of image i."""
    file = io.BytesIO()
    Image.new("RGB", size, color(i)).save(file, kind)
    return {"bytes": file.getvalue(), "path": None}


def split(n, first=0, classes=CLASSES, **others):
    columns = {
        "image": [content(first + i) for i in range(n)],
        "label": [i % len(classes) for i in range(n)],
    }
    features = {"image": ImageFeature(), "label": ClassLabel(list(classes))}
    for name, values in others.items():
        columns[name], features[name] = values, Value("int64")
    return Split(columns, features)


@pytest.fixture
def hub(monkeypatch):
    """Fake package with data sets by name, which records the calls."""
    data_sets, calls = {}, []

    def load_dataset(path, name=None, *, revision=None):
        calls.append((path, name, revision))
        if path not in data_sets:
            raise FileNotFoundError(f"no such data set\non the hub: {path}")
        return data_sets[path]

    def load_from_disk(path):
        calls.append(path)
        return data_sets["saved"]

    fake = types.ModuleType("datasets")
    fake.Image, fake.ClassLabel = ImageFeature, ClassLabel
    fake.load_dataset, fake.load_from_disk = load_dataset, load_from_disk
    monkeypatch.setitem(sys.modules, "datasets", fake)
    data_sets["animals"] = {"train": split(12), "test": split(6, first=12)}
    data_sets["calls"] = calls
    return data_sets


SMALL = {"image_size": 8, "batch_size": 4, "crop": "center", "flip": False, "resize": 8}


def load(path="animals", **options):
    return HuggingFace(path=str(path), **SMALL | options).load()


def test_labels_can_be_the_names_of_classes(hub):
    for part in hub["animals"].values():
        part.columns["kind"] = [CLASSES[i].title() for i in part.columns["label"]]
        part.features["kind"] = Value("string")
    data = load(label="kind")
    assert data.classes == ("Ape", "Bear", "Cat")
    assert data.train["label"].tolist() == load().train["label"].tolist()
    assert data.test["label"].tolist() == load().test["label"].tolist()


def test_loads_a_data_set_by_name_subset_and_revision(hub):
    load(subset="small", revision="v2")
    assert hub["calls"] == [("animals", "small", "v2")]


@pytest.mark.parametrize("file", ["dataset_dict.json", "state.json"])
def test_loads_folders_from_save_to_disk(hub, tmp_path, file):
    (tmp_path / file).write_text("{}")
    hub["saved"] = hub["animals"] if file == "dataset_dict.json" else split(30)
    data = load(tmp_path)
    assert hub["calls"] == [str(tmp_path)]
    one = [*data.train["id"], *data.test["id"]]
    assert len(data.train["id"]) == 12 if file == "dataset_dict.json" else len(one) == 30


@pytest.mark.parametrize("field", ["subset", "revision"])
def test_refuses_subset_and_revision_for_folders_from_save_to_disk(hub, tmp_path, field):
    (tmp_path / "state.json").write_text("{}")
    message = load_error(tmp_path, **{field: "v2"})
    assert message == (
        f"data.{field}: {tmp_path} was written by save_to_disk, which saves only one; omit it"
    )


def test_the_test_split_is_validation_then_test_or_the_given_one(hub):
    hub["animals"] |= {"validation": split(7), "more": split(8)}
    sizes = {name: len(load(test_split=name).test["id"]) for name in (None, "test", "more")}
    assert sizes == {None: 7, "test": 6, "more": 8}


def test_holds_out_a_fraction_of_every_class_of_a_single_split(hub):
    hub["one"] = {"train": split(30)}
    data = load("one", test_fraction=0.2)
    assert all(np.bincount(data.test["label"], minlength=3) >= 1)
    chex.assert_trees_all_equal(load("one", test_fraction=0.2).test, data.test)
    colors = {}
    batches = [*take_batches(data, len(data.train["id"]), size=1)[0], *evaluation_batches(data, 1)]
    for batch in batches:
        for image, label, id in zip(batch["image"], batch["label"], batch["id"], strict=True):
            colors[int(id)] = image[0, 0].tolist()
            index = next(i for i in range(30) if colors[int(id)] == list(color(i)))
            assert index % 3 == label
            assert f"image {index} of train in one" == data.name(id)
    assert sorted(colors) == list(range(30))
    assert len({tuple(c) for c in colors.values()}) == 30


def test_finds_columns_by_their_feature_or_name(hub):
    column = split(12).columns
    features = {"picture": ImageFeature(), "label": Value("int64"), "kind": ClassLabel(["a", "b"])}
    kinds = [i % 2 for i in range(12)]
    columns = {"picture": column["image"], "label": column["label"], "kind": kinds}
    hub["other"] = {"train": Split(columns, features), "test": Split(columns, features)}
    assert load("other").classes == ("a", "b")
    assert load("other", label="label").classes == ("0", "1", "2")
    assert load("other", image="picture", label="kind").train["label"].tolist() == kinds


AUGMENTATION = {"crop": "resized", "flip": True, "color_jitter": 0.4, "lighting": 0.1, "cutout": 3}


def test_gives_the_same_batches_as_image_folders(hub, tmp_path):
    rng = np.random.default_rng(0)
    write_class_folders(tmp_path, train=12, test=6, classes=CLASSES)
    for path in tmp_path.rglob("*.png"):
        Image.fromarray(rng.integers(0, 256, (10, 12, 3), np.uint8)).save(path)
    hub["same"] = {}
    for name in ("train", "val"):
        files = sorted((tmp_path / name).rglob("*.png"))
        labels = [CLASSES.index(path.parent.name) for path in files]
        cells = [{"bytes": path.read_bytes(), "path": path.name} for path in files]
        columns = {"image": cells, "label": labels}
        hub["same"][name] = Split(columns, split(1).features)
    actual = load("same", **AUGMENTATION)
    expected = ImageFolder(path=str(tmp_path), **SMALL | AUGMENTATION).load()
    chex.assert_trees_all_equal(take_batches(actual)[0], take_batches(expected)[0])
    chex.assert_trees_all_equal(
        list(evaluation_batches(actual, 4)), list(evaluation_batches(expected, 4))
    )


def test_reads_paths_and_all_kinds_of_images(hub, tmp_path):
    cells = hub["animals"]["train"].columns["image"]
    write_image(tmp_path / "0.png", 0)
    cells[0] = {"bytes": None, "path": str(tmp_path / "0.png")}
    cells[1] = content(1, (40, 30), "JPEG")
    gray = io.BytesIO()
    Image.fromarray(np.full((9, 9), 257 * 77, np.uint16)).save(gray, "PNG")
    cells[2] = {"bytes": gray.getvalue(), "path": None}
    data = load()
    images = {
        int(i): a for b in take_batches(data)[0] for i, a in zip(b["id"], b["image"], strict=True)
    }
    assert (images[0] == color(0)).all()
    assert np.abs(images[1].astype(int) - color(1)).max() < 4
    assert (images[2] == 77).all()
    assert data.explain(2) is None


def test_unreadable_images_have_weight_0_the_mean_color_and_a_reason(hub):
    cells = hub["animals"]["train"].columns["image"]
    cells[1]["bytes"] = cells[1]["bytes"][:45]
    cells[2] = None
    cells[4] = {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n", "path": "x.eps"}
    cells[5] = {"bytes": None, "path": "/nowhere/x.png"}
    data = load(mean=(0.2, 0.4, 0.6))
    bad = [1, 2, 4, 5]
    for batch in take_batches(data)[0]:
        assert (batch["weight"] == ~np.isin(batch["id"], bad)).all()
        assert (batch["image"][batch["weight"] == 0] == (51, 102, 153)).all()
    assert re.fullmatch(r"image 1 of train in animals: .*truncated.*", data.explain(1))
    assert data.explain(2) == "image 2 of train in animals: there is no image"
    assert "not an image: no format" in data.explain(4)
    assert "No such file" in data.explain(5)
    lines = []
    with pytest.raises(UserError, match=r"max_bad_fraction: so far \d of the 12 training files"):
        for _ in UnreadableFiles(data, lines.append).watch(iter(take_batches(data, 12)[0])):
            pass
    assert lines[0].startswith("cannot read image ")


load_error = functools.partial(error_message, load)


def test_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert load_error() == (
        "data.source: huggingface needs the package datasets; pip install 'fnet-jax[huggingface]'"
    )


# Change of the data set, options, and the message.
MISTAKES = [
    (lambda sets: sets.clear(), {}, "data.path: datasets cannot load animals: no such data set on the hub: animals"),
    (lambda sets: sets["animals"].pop("train"), {}, "data.path: animals has no split train; there are test"),
    (None, {"test_split": "tests"}, "data.test_split: no split tests in animals (did you mean test?); there are test"),
    (None, {"test_split": "train"}, "data.test_split: train in animals is the training split; there are test"),
    (None, {"image": "img"}, "data.image: no column img in animals (did you mean image?); there are image, label"),
    (None, {"image": "label"}, "data.image: the column label has ClassLabel"),
    (None, {"label": "lable"}, "data.label: no column lable in animals (did you mean label?)"),
    (None, {"crop": "padded", "padding": 8}, "data.padding: 8 pixels can shift images of 8 x 8 out of view"),
    (None, {"image_size": 9}, "data.resize: 8 is less than data.image_size 9"),
    (lambda sets: sets["animals"]["train"].features.update(label=Value("int64")), {}, "data.label: animals has no column that can be the label; name one; there are image, label"),
    (lambda sets: sets["animals"]["train"].features.update(fine=ClassLabel([])), {}, "data.label: animals has several columns (label, fine) that can be the label; name one, as with --data.label label or --data.label fine; there are image, label, fine"),
    (lambda sets: sets["animals"]["train"].features.update(image=Value("int64")), {}, "data.image: animals has no column that can be the image; name one"),
    (lambda sets: sets["animals"]["test"].features.pop("label"), {}, "data.test_split: no column label in the split test; there are image"),
    (lambda sets: sets["animals"]["test"].features["label"].names.reverse(), {}, "data.test_split: label is ClassLabel(names=['cat', 'bear', 'ape']) in the split test, but ClassLabel(names=['ape', 'bear', 'cat']) in train"),
    (lambda sets: sets["animals"]["test"].columns["label"].__setitem__(2, -1), {}, "data.label: label of test in animals has -1 at index 2; expected integers from 0"),
    (lambda sets: sets["animals"]["train"].columns["label"].__setitem__(2, 5), {}, "data.label: label in animals has label 5, but there are 3 class names"),
    (lambda sets: sets["animals"]["train"].columns["label"].__setitem__(2, None), {}, "data.label: label of train in animals is object; expected integers"),
    (lambda sets: sets["animals"]["train"].columns.update(label=[1] * 12), {}, "data.label: label in animals has only the class 1"),
    (lambda sets: sets["animals"].update(test=split(0)), {}, "data.label: label of test in animals is empty"),
    (lambda sets: sets["animals"].update(test=None, train=split(4)) or sets["animals"].pop("test"), {}, "data.test_fraction: 0.2 needs two or more examples of each class, got only "),
]  # fmt: skip


@pytest.mark.parametrize(("change", "options", "message"), MISTAKES)
def test_invalid_data_sets_are_refused_in_one_line(hub, change, options, message):
    if change:
        change(hub)
    assert message in load_error(**options)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The real package, without network and without the user's files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "home" / "datasets"))
    return pytest.importorskip("datasets")


def test_the_real_package_reads_folders_and_saved_data_sets(package, tmp_path):
    package.config.HF_DATASETS_CACHE = tmp_path / "cache"
    package.disable_progress_bars()
    root = tmp_path / "images"
    write_class_folders(root, train=12, test=6, classes=CLASSES)
    (root / "val").rename(root / "test")
    loaded = package.load_dataset(str(root), cache_dir=str(tmp_path / "cache"))
    in_bytes = package.Dataset.from_dict(
        {"picture": [content(i) for i in range(30)], "kind": [i % 3 for i in range(30)]},
        features=package.Features(
            picture=package.Image(), kind=package.ClassLabel(names=list(CLASSES))
        ),
    )
    loaded.save_to_disk(str(tmp_path / "saved"))
    in_bytes.save_to_disk(str(tmp_path / "bytes"))
    colors = [color(i) for i in range(12)]
    for path in (root, tmp_path / "saved"):
        data = load(path)
        assert data.classes == CLASSES
        assert np.bincount(data.train["label"]).tolist() == [4, 4, 4]
        for batch in [*take_batches(data)[0], *evaluation_batches(data, 6)]:
            assert (batch["weight"] == 1).all()
            indices = [colors.index(tuple(image[0, 0].tolist())) for image in batch["image"]]
            assert [i % 3 for i in indices] == batch["label"].tolist()
    data = load(tmp_path / "bytes")
    assert len(data.test["id"]) == 6
    for batch in take_batches(data)[0]:
        for image, label in zip(batch["image"], batch["label"], strict=True):
            assert any((image == color(i)).all() for i in range(label, 30, 3))
    assert "datasets cannot load" in load_error(tmp_path / "home")
    assert "datasets cannot load nobody/nothing: " in load_error("nobody/nothing")


def test_a_column_names_the_users(hub):
    writers = [str(i % 5) for i in range(30)]
    hub["one"] = {"train": split(30, writer=writers)}
    data = load("one", user="writer", examples_per_user=2)

    def writers_of(rows):
        return [writers[int(data.name(id).split()[1])] for id in rows["id"]]

    train, test = writers_of(data.train), writers_of(data.test)
    assert data.users.tolist() == np.unique(train, return_inverse=True)[1].tolist()
    assert (len(set(train)), len(set(test))) == (4, 1)
    assert not set(train) & set(test)
    message = error_message(load, "one", user="writers", examples_per_user=2)
    assert message.startswith("data.user: no column writers in one (did you mean writer?)")
