"""Images of a data set that the package datasets loads, from the Hugging Face hub or from disk."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from train.config import HuggingFace
from train.data import Arrays, Dataset, size
from train.data.augment import centre, short_side
from train.data.decode import UnreadableError, ViewOf, decode, decode_content
from train.data.files import shortened, there_are
from train.data.image_batches import TrainingImages, check_cut, read_all
from train.data.labels import as_labels, check_several, class_names, split_by_class
from train.errors import UserError, nearest

_TRAINING, _HELD_OUT = "train", ("validation", "val", "test")
_SAVED = ("dataset_dict.json", "state.json")
"""Of a folder that save_to_disk wrote, either."""


def load(config: HuggingFace) -> Dataset:
    """The images of a data set, decoded when a batch needs them.

    Rows and batches are as those of `train.data.image_folder`: ``id`` int32 [N], counted
    through training and test images, and ``label`` int32 [N]; in batches besides ``image``
    uint8 [N, H, W, 3] and ``weight`` float32 [N], 0.0 for what cannot be read. Everything is
    decoded by one thread.

    Raises:
      UserError: if the package is not installed or cannot load the data; if splits or columns
        are missing, or several could be meant; if labels are no integers from 0, or all the
        same; if sizes do not go together.
    """
    check_cut(config)
    datasets = _library()
    splits = _splits(datasets, config)
    names = _parts(config, list(splits))
    parts = [splits[name] for name in names]
    image, label = _columns(datasets, config, parts[0].features)
    for name, part in zip(names, parts, strict=True):
        _compare(name, part.features, {n: parts[0].features[n] for n in (image, label)})
    labels = [
        _labels(part, label, f"data.label: {label} of {name} in {config.path}")
        for name, part in zip(names, parts, strict=True)
    ]
    check_several(labels[0], f"data.label: {label} of {_TRAINING} in {config.path}")
    feature = parts[0].features[label]
    named = feature.names if isinstance(feature, datasets.ClassLabel) else None
    classes = class_names(labels, named, f"data.label: {label} in {config.path}")
    places = [np.arange(len(part)) for part in labels]
    if len(parts) == 1:
        places = [*split_by_class(labels[0], config.test_fraction, config.split_seed)]
        labels = [labels[0][which] for which in places]
        names, parts = names * 2, parts * 2
    files = [
        part.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        for part in parts
    ]
    images = _Images(config, [_Part(*each) for each in zip(names, files, places, strict=True)])
    ids = np.arange(sum(map(len, labels)), dtype=np.int32)
    at = len(labels[0])
    return Dataset(
        train={"id": ids[:at], "label": labels[0]},
        test={"id": ids[at:], "label": labels[1]},
        classes=classes,
        augment=images.augment,
        prepare=images.prepare,
        name=images.name,
        explain=images.explain,
        max_bad_fraction=config.max_bad_fraction,
    )


class _Part(NamedTuple):
    """What to train on, or to test on.

    Attributes:
      split: its name.
      files: the split's column of images, as files or their content.
      places: [N], which of them.
    """

    split: str
    files: Any
    places: np.ndarray


class _Images:
    """The images of both parts, by ids that are counted through them."""

    def __init__(self, config: HuggingFace, parts: Sequence[_Part]):
        self._config, self._parts = config, parts
        self._training = TrainingImages.of(config)

    def augment(self, rows: Arrays, generator: np.random.Generator) -> Arrays:
        """A training batch."""
        training = self._training
        drawn = training.draw(size(rows), generator)

        def pixels(i: int, id: int) -> np.ndarray:
            return training.seen(functools.partial(self._decoded, id), drawn, i)

        batch = self._batch(rows, pixels)
        return batch | {"image": training.augmented(batch["image"], drawn)}

    def prepare(self, rows: Arrays) -> Arrays:
        """A batch to test on."""
        return self._batch(rows, lambda i, id: self._tested(id))

    def name(self, id: int) -> str:
        """Split and place there."""
        part, place = self._found(id)
        return f"image {place} of {part.split} in {self._config.path}"

    def explain(self, id: int) -> str | None:
        """Why an image cannot be read, if so."""
        try:
            self._tested(id)
        except UnreadableError as error:
            return f"{self.name(id)}: {error}"
        return None

    def _batch(self, rows: Arrays, pixels: Callable[[int, int], np.ndarray]) -> Arrays:
        """The rows with ``image`` and ``weight``; of row i and its id, the pixels."""
        ids, side = rows["id"].tolist(), self._config.image_size
        shape, fill = (side, side, 3), self._training.fill
        return rows | read_all(len(ids), shape, lambda i: pixels(i, ids[i]), fill)

    def _tested(self, id: int) -> np.ndarray:
        whole = self._decoded(id, short_side(self._config.shorter_side))
        return centre(whole, self._config.image_size)

    def _decoded(self, id: int, view: ViewOf) -> np.ndarray:
        part, place = self._found(id)
        (file,) = part.files[place].values()
        return _decoded(file, view)

    def _found(self, id: int) -> tuple[_Part, int]:
        training, held_out = self._parts
        at = len(training.places)
        part, which = (training, id) if id < at else (held_out, id - at)
        return part, int(part.places[which])


def _library() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.source: huggingface needs the package datasets; pip install "
            "'fnet-jax[huggingface]'"
        ) from None
    return datasets


def _splits(datasets: ModuleType, config: HuggingFace) -> Mapping[str, Any]:
    """The splits by name; a saved one alone is to train on."""
    saved = any((Path(config.path) / name).is_file() for name in _SAVED)
    for field in ("subset", "revision"):
        if saved and getattr(config, field) is not None:
            raise UserError(
                f"data.{field}: {config.path} was written by save_to_disk, which keeps one; leave "
                "it out"
            )
    try:
        if saved:
            found = datasets.load_from_disk(config.path)
        else:
            found = datasets.load_dataset(config.path, config.subset, revision=config.revision)
    except Exception as error:  # of the file system, the network, and every format there is
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"data.path: datasets cannot load {config.path}: {reason}") from error
    return found if isinstance(found, Mapping) else {_TRAINING: found}


def _parts(config: HuggingFace, there: list[str]) -> list[str]:
    """The split to train on and, if there is one, that to test on."""
    if _TRAINING not in there:
        raise UserError(
            f"data.path: {config.path} has no split {_TRAINING}{there_are(there, 'splits')}"
        )
    name = config.test_split
    if name is not None and (name not in there or name == _TRAINING):
        others = [split for split in there if split != _TRAINING]
        raise UserError(
            f"data.test_split: no split {name} in {config.path} to test on{nearest(name, others)}"
            f"{there_are(others, 'others')}"
        )
    name = name or next((split for split in _HELD_OUT if split in there), None)
    return [_TRAINING, name] if name else [_TRAINING]


def _columns(
    datasets: ModuleType, config: HuggingFace, features: Mapping[str, Any]
) -> tuple[str, str]:
    """The columns of images and of labels: those that are named, or the only ones."""

    def column(field: str, name: str | None, kind: type, what: str) -> str:
        if name is not None and name not in features:
            raise UserError(
                f"data.{field}: no column {name} in {config.path}{nearest(name, features)}"
                f"{there_are(list(features), 'columns')}"
            )
        fitting = [name for name, feature in features.items() if isinstance(feature, kind)]
        if name is None and len(fitting) != 1:
            raise UserError(
                f"data.{field}: {shortened(fitting) or 'no column'} in {config.path} "
                + ("could all be meant" if fitting else f"is of {what}")
                + f"; name one{there_are(list(features), 'columns')}"
            )
        return name or fitting[0]

    image = column("image", config.image, datasets.Image, "images")
    if not isinstance(features[image], datasets.Image):
        raise UserError(f"data.image: the column {image} is of {features[image]}, not of images")
    return image, column("label", config.label, datasets.ClassLabel, "class labels")


def _compare(name: str, features: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses a split without the columns of the training images, or with others of that name."""
    for column, feature in wanted.items():
        if column not in features:
            raise UserError(
                f"data.test_split: the split {name} has no column {column}"
                f"{there_are(list(features), 'columns')}"
            )
        kinds = [(type(f), getattr(f, "names", None)) for f in (features[column], feature)]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"data.test_split: {column} of the split {name} is {features[column]}, and "
                f"{feature} of {_TRAINING}"
            )


def _labels(split: Any, column: str, what: str) -> np.ndarray:
    values = split.select_columns([column]).with_format("numpy")[:][column]
    if not len(values):
        raise UserError(f"{what} is empty")
    return as_labels(np.asarray(values), what)


def _decoded(file: Any, view: ViewOf) -> np.ndarray:
    """Pixels of a file, or of its content, as `decode` makes them."""
    if file is None or (file["bytes"] is None and file["path"] is None):
        raise UnreadableError("there is no image")
    return (
        decode(file["path"], view) if file["bytes"] is None else decode_content(file["bytes"], view)
    )
