"""Images that Hugging Face's datasets library loads, from the hub or from disk."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from train.config import HuggingFace
from train.data import Arrays, Dataset, num_examples
from train.data.augment import center_crop, resize_shorter_side
from train.data.decode import UnreadableError, ViewOf, decode, decode_content
from train.data.files import file_bytes
from train.data.image_batches import TrainingImages, check_crop, read_images
from train.data.labels import as_labels, check_several_classes, class_names, split_by_class
from train.data.users import number_users, split_by_user
from train.errors import UserError, did_you_mean, list_available, shorten

_TRAIN, _TEST = "train", ("validation", "val", "test")
_SAVED = ("dataset_dict.json", "state.json")
"""Files of which a folder from save_to_disk holds one."""


def load(config: HuggingFace) -> Dataset:
    """Open a data set; batches decode its images.

    Rows and batches are as in `train.data.image_folder`: rows are ``id`` int32 [N], which counts
    training images and then test images, and ``label`` int32 [N]. Batches add ``image`` uint8
    [N, H, W, 3] and ``weight`` float32 [N], 0.0 for an unreadable image. One thread decodes.

    Raises:
      UserError: if the library is missing or cannot load the data; if a split or column is
        missing or ambiguous; if labels are not integers from 0 or have one class; or for options
        that exclude each other.
    """
    check_crop(config)
    datasets = _import_library()
    available = _load_splits(datasets, config)
    names = _choose_splits(config, list(available))
    splits = [available[name] for name in names]
    image, label = _choose_columns(datasets, config, splits[0].features)
    for name, split in zip(names, splits, strict=True):
        _compare_features(name, split.features, {n: splits[0].features[n] for n in (image, label)})
    labels = [
        _read_labels(split, label, f"data.label: {label} of {name} in {config.path}")
        for name, split in zip(names, splits, strict=True)
    ]
    check_several_classes(labels[0], f"data.label: {label} of {_TRAIN} in {config.path}")
    feature = splits[0].features[label]
    given_names = feature.names if isinstance(feature, datasets.ClassLabel) else None
    classes = class_names(labels, given_names, f"data.label: {label} in {config.path}")
    indices = [np.arange(len(split_labels)) for split_labels in labels]
    users = None if config.user is None else _read_users(config, splits[0])
    if len(splits) == 1:
        fraction, seed = config.test_fraction, config.split_seed
        split = (
            split_by_class(labels[0], fraction, seed)
            if users is None
            else split_by_user(users, fraction, seed)
        )
        indices = [*split]
        labels = [labels[0][i] for i in indices]
        names, splits = names * 2, splits * 2
    files = [
        split.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        for split in splits
    ]
    images = _Images(config, [_Split(*s) for s in zip(names, files, indices, strict=True)])
    ids = np.arange(sum(map(len, labels)), dtype=np.int32)
    num_train = len(labels[0])
    return Dataset(
        train={"id": ids[:num_train], "label": labels[0]},
        test={"id": ids[num_train:], "label": labels[1]},
        classes=classes,
        augment=images.augment,
        prepare=images.prepare,
        name=images.name,
        file_bytes=images.file_bytes,
        explain=images.explain,
        max_bad_fraction=config.max_bad_fraction,
        users=None if users is None else number_users(users[indices[0]], num_train, ""),
    )


class _Split(NamedTuple):
    """Training or test images.

    Attributes:
      name: name of the split in the data set.
      files: its image column, as paths or encoded bytes.
      indices: [N], rows of the column that belong to the split.
    """

    name: str
    files: Any
    indices: np.ndarray


class _Images:
    """Training and test images by id."""

    def __init__(self, config: HuggingFace, splits: Sequence[_Split]):
        self._config, self._splits = config, splits
        self._training = TrainingImages.from_config(config)

    def augment(self, rows: Arrays, generator: np.random.Generator) -> Arrays:
        """Make a training batch."""
        training = self._training
        draws = training.draw(num_examples(rows), generator)

        def read(i: int, id: int) -> np.ndarray:
            return training.crop_decoded(functools.partial(self._decode, id), draws, i)

        batch = self._make_batch(rows, read)
        return batch | {"image": training.augment(batch["image"], draws)}

    def prepare(self, rows: Arrays) -> Arrays:
        """Make a test batch."""
        return self._make_batch(rows, lambda i, id: self._read_test_image(id))

    def name(self, id: int) -> str:
        """Describe an image by its split and index."""
        split, index = self._locate(id)
        return f"image {index} of {split.name} in {self._config.path}"

    def explain(self, id: int) -> str | None:
        """Return the error of an unreadable image, or None."""
        try:
            self._read_test_image(id)
        except UnreadableError as error:
            return f"{self.name(id)}: {error}"
        return None

    def file_bytes(self, id: int) -> int:
        """Return the size of an encoded image, -1 if there is none."""
        split, index = self._locate(id)
        (file,) = split.files[index].values()
        if file is None or file["bytes"] is None:
            return file_bytes(os.fsencode((file or {}).get("path") or ""))
        return len(file["bytes"])

    def _make_batch(self, rows: Arrays, read: Callable[[int, int], np.ndarray]) -> Arrays:
        """Add ``image`` from ``read(i, id)``, and ``weight``, to the rows."""
        ids, side = rows["id"].tolist(), self._config.image_size
        shape, fill = (side, side, 3), self._training.fill
        return rows | read_images(len(ids), shape, lambda i: read(i, ids[i]), fill)

    def _read_test_image(self, id: int) -> np.ndarray:
        resized = self._decode(id, resize_shorter_side(self._config.shorter_side))
        return center_crop(resized, self._config.image_size)

    def _decode(self, id: int, view: ViewOf) -> np.ndarray:
        split, index = self._locate(id)
        (file,) = split.files[index].values()
        return _decode_file(file, view, self._config.max_pixels)

    def _locate(self, id: int) -> tuple[_Split, int]:
        train, test = self._splits
        num_train = len(train.indices)
        split, position = (train, id) if id < num_train else (test, id - num_train)
        return split, int(split.indices[position])


def _import_library() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.source: huggingface needs the package datasets; pip install "
            "'fnet-jax[huggingface]'"
        ) from None
    return datasets


def _load_splits(datasets: ModuleType, config: HuggingFace) -> Mapping[str, Any]:
    """Load the splits by name. A folder with a single saved split is the training set."""
    saved = any((Path(config.path) / name).is_file() for name in _SAVED)
    for field in ("subset", "revision"):
        if saved and getattr(config, field) is not None:
            raise UserError(
                f"data.{field}: {config.path} was written by save_to_disk, which saves only one; "
                "omit it"
            )
    try:
        if saved:
            data = datasets.load_from_disk(config.path)
        else:
            data = datasets.load_dataset(config.path, config.subset, revision=config.revision)
    except Exception as error:  # from the file system, the network and every format
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"data.path: datasets cannot load {config.path}: {reason}") from error
    return data if isinstance(data, Mapping) else {_TRAIN: data}


def _choose_splits(config: HuggingFace, names: list[str]) -> list[str]:
    """Choose the training split and, if there is one, the test split."""
    if _TRAIN not in names:
        raise UserError(
            f"data.path: {config.path} has no split {_TRAIN}{list_available(names, 'splits')}"
        )
    test = config.test_split
    if test is not None and (test not in names or test == _TRAIN):
        others = [name for name in names if name != _TRAIN]
        raise UserError(
            f"data.test_split: no split {test} in {config.path} to test on"
            f"{did_you_mean(test, others)}{list_available(others, 'others')}"
        )
    test = test or next((name for name in _TEST if name in names), None)
    return [_TRAIN, test] if test else [_TRAIN]


def _choose_columns(
    datasets: ModuleType, config: HuggingFace, features: Mapping[str, Any]
) -> tuple[str, str]:
    """Choose the columns of images and labels: the given ones, or the only ones."""

    def choose(field: str, name: str | None, kind: type, what: str) -> str:
        if name is not None and name not in features:
            raise UserError(
                f"data.{field}: no column {name} in {config.path}{did_you_mean(name, features)}"
                f"{list_available(list(features), 'columns')}"
            )
        matches = [name for name, feature in features.items() if isinstance(feature, kind)]
        if name is None and len(matches) != 1:
            problem = f"several columns of {what} ({shorten(matches)})" if matches else f"no {what}"
            raise UserError(
                f"data.{field}: {config.path} has {problem}; name one"
                f"{list_available(list(features), 'columns')}"
            )
        return name or matches[0]

    image = choose("image", config.image, datasets.Image, "images")
    if not isinstance(features[image], datasets.Image):
        raise UserError(f"data.image: the column {image} has {features[image]}, not images")
    return image, choose("label", config.label, datasets.ClassLabel, "class labels")


def _compare_features(name: str, features: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a split has the columns of the training split, of the same kind."""
    for column, feature in expected.items():
        if column not in features:
            raise UserError(
                f"data.test_split: the split {name} has no column {column}"
                f"{list_available(list(features), 'columns')}"
            )
        kinds = [(type(f), getattr(f, "names", None)) for f in (features[column], feature)]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"data.test_split: {column} is {features[column]} in the split {name}, but "
                f"{feature} in {_TRAIN}"
            )


def _read_users(config: HuggingFace, split: Any) -> np.ndarray:
    """Number the users of the training examples, [N]."""
    names = list(split.features)
    if config.user not in names:
        raise UserError(
            f"data.user: no column {config.user} in {config.path}"
            f"{did_you_mean(config.user or '', names)}{list_available(names, 'columns')}"
        )
    ids = np.asarray(split.select_columns([config.user]).with_format("numpy")[:][config.user])
    return number_users(ids, len(split), f"data.user: {config.user} in {config.path}")


def _read_labels(split: Any, column: str, what: str) -> np.ndarray:
    values = split.select_columns([column]).with_format("numpy")[:][column]
    if not len(values):
        raise UserError(f"{what} is empty")
    return as_labels(np.asarray(values), what)


def _decode_file(file: Any, view: ViewOf, max_pixels: int) -> np.ndarray:
    """Decode an image from a path or from encoded bytes."""
    if file is None or (file["bytes"] is None and file["path"] is None):
        raise UnreadableError("there is no image")
    if file["bytes"] is None:
        return decode(file["path"], view, max_pixels)
    return decode_content(file["bytes"], view, max_pixels)
