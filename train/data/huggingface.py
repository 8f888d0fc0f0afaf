"""Images that Hugging Face's datasets library loads, from the hub or from disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import MinLen
from typing_extensions import override

from train.config.section import Count
from train.data import Dataset, columns
from train.data import splits as rules
from train.data.decode import File, UnreadableError
from train.data.labeled_images import image_dataset
from train.data.photos import Photos
from train.errors import UserError, list_available

_TRAIN = "train"
_SAVED = ("dataset_dict.json", "state.json")
"""Files of which a folder from save_to_disk holds one."""


@dataclass(frozen=True)
class HuggingFace(Photos):
    """Images that Hugging Face's datasets library loads, from the hub or from disk."""

    evaluation_options = {"split": "test_split"} | Photos.evaluation_options

    source: Literal["huggingface"] = "huggingface"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "."
    """Name on the hub (ylecun/mnist), folder of images, or folder from save_to_disk."""
    subset: Annotated[str, MinLen(1)] | None = None
    """Configuration of the data set, if it has several."""
    revision: Annotated[str, MinLen(1)] | None = None
    """Revision on the hub: commit, branch or tag; None is the newest."""
    image: Annotated[str, MinLen(1)] | None = None
    """Name of the image column; None is the only one."""
    label: Annotated[str, MinLen(1)] | None = None
    """Name of the column of labels or class names; None is the only one of class labels."""
    test_split: Annotated[str, MinLen(1)] | None = None
    """Split to test on; None is validation, val or test, or test_fraction of train."""
    user: Annotated[str, MinLen(1)] | None = None
    """Name of the column of user ids; privacy is then per user."""
    examples_per_user: Count | None = None
    """Largest number of examples of a user per step; needed with user."""

    def load(self, *, private: bool = False) -> Dataset:
        """Open a data set; batches decode its images, see `image_dataset`. One thread decodes.

        Raises:
          UserError: if the library is missing or cannot load the data; if a split or column is
            missing or ambiguous; if labels are neither names nor integers from 0, or have one
            class; or for options that exclude each other.
        """
        try:
            import datasets
        except ImportError:
            raise UserError(
                "data.source: huggingface needs the package datasets; pip install "
                "'fnet-jax[huggingface]'"
            ) from None
        available = _load_splits(datasets, self)
        if _TRAIN not in available:
            raise UserError(
                f"data.path: {self.path} has no split {_TRAIN}"
                f"{list_available(list(available), 'splits')}"
            )
        test = rules.choose_test_split(self.test_split, list(available), self.path)
        names = [_TRAIN, test or _TRAIN]
        splits = [available[name] for name in names]
        image, label = _choose_columns(datasets, self, splits[0].features)
        train, other = splits[0].features, splits[1].features
        for column in (image, label):  # which both splits must have, of the same kind
            columns.choose("data.test_split", column, other, f"the split {names[1]}", "column")
            kinds = [(type(f[column]), getattr(f[column], "names", None)) for f in (other, train)]
            if kinds[0] != kinds[1]:
                raise UserError(
                    f"data.test_split: {column} is {other[column]} in the split {names[1]}, but "
                    f"{train[column]} in {_TRAIN}"
                )
        values = [_read(split, label) for split in splits]
        feature = splits[0].features[label]
        given_names = feature.names if isinstance(feature, datasets.ClassLabel) else None
        if all(own.dtype.kind == "U" for own in values):
            texts = columns.parse_labels(
                np.concatenate(values).tolist(),
                lambda i: f"data.label: example {i} of {label} in {self.path}",
            )
            found, numbers = np.unique(texts, return_inverse=True)
            given_names, values = [*map(str, found)], np.split(numbers, [len(values[0])])
        labels = [
            columns.as_labels(own, f"data.label: {label} of {name} in {self.path}")
            for name, own in zip(names, values, strict=True)
        ]
        classes = columns.name_classes(labels, given_names, f"data.label: {label} in {self.path}")
        users = None
        if self.user is not None:
            user = columns.choose("data.user", self.user, splits[0].features, self.path, "column")
            what = f"data.user: {user} in {self.path}"
            users = columns.check_users(_read(splits[0], user), len(labels[0]), what)
        encoded = datasets.Image(decode=False)
        files = [s.select_columns([image]).cast_column(image, encoded) for s in splits]
        index = [np.arange(len(split)) for split in labels]
        notes = [*rules.describe_splits(_TRAIN, test, available)] if test else []
        notes += rules.check_split(self, f"{self.path} has the split {test}") if test else []
        used = [name for name in (image, label, self.user) if name]
        notes += columns.describe_unread("columns", used, splits[0].features)
        if not test:
            is_test = rules.hold_out_rows(self, map(_key, files[0]), labels[0], users)
            notes.append(rules.describe_hold_out(self, is_test, f"no test split in {self.path}"))
            index = [np.flatnonzero(~is_test), np.flatnonzero(is_test)]
            labels = [labels[0][part] for part in index]
        # Which split each image is in, and where.
        is_test = np.repeat([0, 1], [len(part) for part in index])
        places = np.concatenate(index)

        def read(id: int) -> File:
            content = _content(files[is_test[id]][int(places[id])])
            return UnreadableError("there is no image") if content is None else content

        def describe(id: int) -> str:
            return f"image {places[id]} of {names[is_test[id]]} in {self.path}"

        def files_of(ids: np.ndarray) -> list[File]:
            return [read(id) for id in ids.tolist()]

        return image_dataset(
            self,
            labels,
            files_of,
            describe,
            classes=classes,
            compared=files_of,
            users=None if users is None else columns.number_users(users[index[0]]),
            notes=notes,
            place=lambda row: {"index": int(places[row])},
        )

    @property
    @override
    def identity(self) -> tuple[object, ...]:
        return *super().identity, self.subset


load = HuggingFace.load  # a name that scripts call


def _content(row: Mapping[str, Any]) -> str | bytes | None:
    (file,) = row.values()
    return file and (file["path"] if file["bytes"] is None else file["bytes"])


def _key(row: Mapping[str, Any]) -> bytes:
    content = _content(row)
    return content if isinstance(content, bytes) else str(content).encode()


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


def _choose_columns(
    datasets: ModuleType, config: HuggingFace, features: Mapping[str, Any]
) -> tuple[str, str]:

    def only(field: str, kind: type) -> str:
        found = [name for name, feature in features.items() if isinstance(feature, kind)]
        given = getattr(config, field)
        return columns.choose(f"data.{field}", given, features, config.path, "column", found)

    image, label = only("image", datasets.Image), only("label", datasets.ClassLabel)
    if not isinstance(features[image], datasets.Image):
        raise UserError(f"data.image: the column {image} has {features[image]}, not images")
    return image, label


def _read(split: Any, column: str) -> np.ndarray:
    return np.asarray(split.select_columns([column]).with_format("numpy")[:][column])
