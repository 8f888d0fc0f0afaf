"""Images and labels as arrays in an .npz file, as numpy.savez writes them."""

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Gt, Lt, MaxLen, MinLen

from train import limits
from train.config.data import Data
from train.config.section import Count, CountOrZero, Needs, Positive, Seed
from train.data import Arrays, Dataset, columns, num_examples, storage
from train.data.files import describe_files
from train.data.image_batches import ImageOptions
from train.data.labeled_images import check_padding
from train.data.splits import check_split, choose_test_split, describe_hold_out, hold_out_rows
from train.errors import UserError, shorten

_IMAGE_NAMES = ("x", "image", "images", "data")
_LABEL_NAMES = ("y", "label", "labels", "target", "targets")
_CLASS_NAMES = ("classes", "class_names", "label_names")
_BYTES_PER_CHECK = 2**24
"""Bytes of images that are checked for nan and infinity at once."""


@dataclass(frozen=True)
class ArrayFile(Data):
    """Images and labels as arrays in an .npz file, as Keras and MedMNIST store them."""

    evaluation_options: ClassVar[dict[str, str]] = {"split": "test_split"}
    is_in_unit_interval: ClassVar[bool] = False
    needs: ClassVar[Needs] = {"padding": ("crop", ("padded", "reflected").__contains__)}

    source: Literal["arrays"] = "arrays"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "data.npz"
    """An .npz file."""
    images: Annotated[tuple[str, ...], MaxLen(2)] = ()
    """Names of the training and test image arrays; found by common names if empty."""
    labels: Annotated[tuple[str, ...], MaxLen(2)] = ()
    """Names of the training and test label arrays; found by common names if empty."""
    class_names: str | None = None
    """Name of the array of class names; None looks for a common name."""
    test_split: Annotated[str, MinLen(1)] | None = None
    """Split to test on; None is val or test, or test_fraction of train if there is neither."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Approximate fraction of each class to hold out if there is no test split."""
    split_seed: Seed = 0
    """Random seed of that split."""
    axes: Literal["channels_last", "channels_first"] | None = None
    """Layout of 4-D images: [N, H, W, C] or [N, C, H, W]; None infers it where it can."""
    batch_size: Count = 64
    """Batch size."""
    user: Annotated[str, MinLen(1)] | None = None
    """Name of the array of the training examples' user ids; privacy is then per user."""
    examples_per_user: Count | None = None
    """Largest number of examples of a user per step; needed with user."""
    crop: Literal["padded", "reflected", "center"] = "center"
    """Training crop: random with zero padding, random with reflection padding, or none."""
    padding: CountOrZero = 4
    """Padding of padded and reflected crops, in pixels per side."""
    flip: bool = False
    """Flip each training image horizontally with probability 1/2."""
    mean: Annotated[tuple[float, ...], MinLen(1)] = (0.0,)
    """Mean of each channel, or one for all; uint8 images are scaled to 0 to 1 first."""
    std: Annotated[tuple[Positive, ...], MinLen(1)] = (1.0,)
    """Standard deviation of each channel, or one for all, which images are divided by."""

    def load(self, *, private: bool = False) -> Dataset:
        """Load the images of an .npz file.

        Arrays are found by the names in the config, or by common names: ``x`` and ``y``;
        ``x_train``, ``y_train``, ``x_test`` and ``y_test`` (Keras); ``train_images``,
        ``train_labels``, ``val_images``, ... (MedMNIST). Images are [N, H, W], [N, H, W, C] or [N,
        C, H, W], uint8 or floating. Labels are integers [N] or [N, 1], or one-hot [N, K].

        Rows are ``id`` int32 [N] and ``label`` int32 [N]. Ids count training images and then test
        images; without a test array, they are indices into the one array. Batches add ``image``
        [N, H, W, C], uint8 or float32. Each array is in memory once, and only batches are copied.

        Raises:
          UserError: if the file or an array is missing, damaged or holds Python objects; if images
            have another shape or dtype or are not finite; if labels are not integers from 0, do not
            match the images in number or have one class; or if a class is too small to split.
        """
        path, splits = Path(self.path), _find_splits(self)
        images = [_as_images(_read_array(path, s.images), s.images, path, self) for s in splits]
        labels = [
            columns.as_labels(_read_array(path, s.labels), f"data.labels: {s.labels} in {path}")
            for s in splits
        ]
        _check_splits(path, splits, images, labels)
        classes = columns.name_classes(
            labels, _read_class_names(self, path), f"data.labels: {splits[0].labels} in {path}"
        )
        _check_per_channel("mean", self.mean, images[0])
        _check_per_channel("std", self.std, images[0])
        check_padding(self.crop, self.padding, *images[0].shape[1:3])
        users, notes = None, columns.describe_classes(classes, labels[0])
        if images[0].dtype != np.uint8:
            named = [
                (s.images, _range(own, f"{s.images} in {path}"))
                for s, own in zip(splits, images, strict=True)
            ]
            ranges = "; ".join(f"{name} from {a:.4g} to {b:.4g}" for name, (a, b) in named)
            notes += (f"floating images are not scaled but by data.mean and data.std: {ranges}",)
        used = [*(name for split in splits for name in split), self.class_names, self.user]
        names = [name for name in _array_names(path) if not _is_class_names(name)]
        notes += (*columns.describe_unread(f"arrays of {path}:", [*filter(None, used)], names),)
        if self.user is not None:
            user = columns.choose("data.user", self.user, _array_names(path), path, "array")
            what = f"data.user: {user} in {path}"
            users = columns.check_users(_read_array(path, user), len(labels[0]), what)
        offset = 0
        if len(splits) == 2:
            offset = len(labels[0])
            notes += tuple(check_split(self, f"{path} has the test images {splits[1].images}"))
            ids = np.arange(offset), offset + np.arange(len(labels[1]))
        else:
            contents = (image.tobytes() for image in images[0])
            is_test = hold_out_rows(self, contents, labels[0], users)
            notes += (describe_hold_out(self, is_test, f"no test arrays in {path}"),)
            ids = np.flatnonzero(~is_test), np.flatnonzero(is_test)
            labels = [labels[0][index] for index in ids]
        train, test = (
            {"id": index.astype(np.int32), "label": label}
            for index, label in zip(ids, labels, strict=True)
        )
        options, every = ImageOptions.of(self), np.concatenate(ids).tolist()

        def content(id: int) -> bytes:
            return images[-1][id - offset].tobytes() if id >= offset else images[0][id].tobytes()

        def name(id: int) -> str:
            split, first = (splits[-1], offset) if id >= offset else (splits[0], 0)
            return f"image {id - first} of {split.images} in {path}"

        notes += describe_files(ids[0].tolist(), ids[1].tolist(), content, name)

        def augment(rows: Arrays, generator: np.random.Generator) -> Arrays:
            draws = options.draw(num_examples(rows), generator)
            return rows | {"image": options.augment(_select_images(images[0], rows["id"]), draws)}

        def prepare(rows: Arrays) -> Arrays:
            return rows | {"image": _select_images(images[-1], rows["id"] - offset)}

        return Dataset(
            train=train,
            test=test,
            classes=classes,
            augment=augment,
            prepare=prepare,
            contents=tuple(images),
            users=None if users is None else columns.number_users(users[ids[0]]),
            name=lambda row: name(train["id"][row]),
            place=lambda row: {"index": every[row] - offset * (every[row] >= offset)},
            test_name=lambda row: name(test["id"][row]),
            notes=notes,
        )


load = ArrayFile.load  # a name that scripts call


class _Split(NamedTuple):
    images: str
    labels: str


def _find_splits(config: ArrayFile) -> list[_Split]:
    path = Path(config.path)
    given = [*zip_longest(config.images, config.labels), (None, None), (None, None)]
    parsed = filter(None, map(_parse_name, _array_names(path)))
    names = sorted({suffix for _, suffix in parsed if suffix})
    test = choose_test_split(config.test_split, names, path)
    splits = [_find_arrays(path, ("", "train"), given[0])]
    if test or any(given[1]):
        splits.append(_find_arrays(path, (test or "test",), given[1]))
    if splits[1:] == splits[:1]:
        raise UserError(
            f"data.test_split: {splits[0].images} in {path} is both the training and the test set; "
            "name other images for one of them"
        )
    return splits


def _find_arrays(path: Path, suffixes: Sequence[str], given: Sequence[str | None]) -> _Split:
    names = _array_names(path)
    kinds = ((_IMAGE_NAMES, "images"), (_LABEL_NAMES, "labels"))
    arrays = []
    for (stems, what), name in zip(kinds, given, strict=True):
        known = [(stems, suffix.lower()) for suffix in suffixes]
        matches = [n for n in names if _parse_name(n) in known]
        arrays.append(columns.choose(f"data.{what}", name, names, path, "array", matches))
    return _Split(*arrays)


def _parse_name(name: str) -> tuple[tuple[str, ...], str] | None:
    """``"X_train"`` -> ``(_IMAGE_NAMES, "train")``, ``"label"`` -> ``(_LABEL_NAMES, "")``."""
    parts = re.split(r"[_\-. ]", name.lower())
    for stems in (_IMAGE_NAMES, _LABEL_NAMES):
        rest = [part for part in parts if part not in stems]
        if len(rest) == len(parts) - 1 < 2:
            return stems, "".join(rest)
    return None


def _array_names(path: Path) -> list[str]:
    if path.is_dir():
        raise UserError(f"data.path: {path} is a folder; give one .npz file with all arrays")
    with storage.reported("data.path", path), storage.open_file(str(path)) as file:
        if not zipfile.is_zipfile(file):
            problem = "is truncated or not an .npz file" if path.stat().st_size else "is empty"
            raise UserError(f"data.path: {path} {problem}; write it with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names, unpacked = list(arrays.files), sum(p.file_size for p in arrays.zip.infolist())
    except Exception as error:  # parsers of a damaged file raise anything
        raise _unreadable(path, error) from error
    limits.check_unpacked(unpacked, path.stat().st_size, f"data.path: {path}")
    return names


def _read_array(path: Path, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            array = arrays[name]
    except Exception as error:
        raise _unreadable(f"{name} in {path}", error) from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"data.path: {name} in {path} is not an array")
    return array


def _unreadable(what: object, error: Exception) -> UserError:
    reason = str(error) or type(error).__name__
    return UserError(
        f"data.path: cannot read {what}: {reason}; expected arrays of numbers or texts, without "
        "Python objects, which can run any code when they are unpickled"
    )


def _as_images(images: np.ndarray, name: str, path: Path, config: ArrayFile) -> np.ndarray:
    what = f"{name} in {path}"
    shape = images.shape
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise UserError(f"data.images: {what} is {images.dtype}; expected uint8 or floating")
    if images.ndim not in (3, 4):
        raise UserError(
            f"data.images: {what} has shape {shape}; expected [N, height, width] or "
            "[N, height, width, channels]"
            + ("; save a table of numbers as x[:, None, :]" if images.ndim == 2 else "")
        )
    if not images.size:
        raise UserError(f"data.images: {what} is empty: its shape is {shape}")
    if images.ndim == 3:
        images = images[..., None]
    elif config.axes == "channels_first":
        images = np.moveaxis(images, 1, -1)
    elif config.axes is None and shape[3] > 4 and (shape[1] != shape[2] or shape[2] == shape[3]):
        raise UserError(
            f"data.axes: {what} has shape {shape}, whose channels may be first or last; give "
            "channels_first or channels_last"
        )
    return images


def _range(images: np.ndarray, what: str) -> tuple[float, float]:
    """Return the smallest and largest value as float32, the dtype of batches, found in parts."""
    count, least, most = max(_BYTES_PER_CHECK // images[0].nbytes, 1), np.inf, -np.inf
    for start in range(0, len(images), count):
        with np.errstate(over="ignore"):
            part = images[start : start + count].astype(np.float32, copy=False)
        finite = np.isfinite(part)
        if not finite.all():
            i, *pixel = np.argwhere(~finite)[0]
            value = images[start + i][tuple(pixel)]
            raise UserError(f"data.images: {what} has {value} in image {start + i}")
        least, most = min(least, float(part.min())), max(most, float(part.max()))
    return least, most


def _check_splits(
    path: Path, splits: Sequence[_Split], images: Sequence[np.ndarray], labels: Sequence[np.ndarray]
) -> None:
    for split, image, label in zip(splits, images, labels, strict=True):
        if len(image) != len(label):
            raise UserError(
                f"data.labels: {split.labels} in {path} has {len(label):,} labels for the "
                f"{len(image):,} images in {split.images}"
            )
    kinds = [f"{'uint8' if a.dtype == np.uint8 else 'floating'} {a.shape[1:]}" for a in images]
    if len({*kinds}) > 1:
        train, test = splits
        raise UserError(
            f"data.images: {train.images} in {path} has images {kinds[0]}, {test.images} in {path} "
            f"has {kinds[1]}; training and test images must match"
        )


def _is_class_names(name: str) -> bool:
    return name.lower() in _CLASS_NAMES


def _read_class_names(config: ArrayFile, path: Path) -> tuple[str, ...] | None:
    names = _array_names(path)
    matches = [*filter(_is_class_names, names)]
    if config.class_names is None and not matches:
        return None
    name = columns.choose("data.class_names", config.class_names, names, path, "array", matches)
    array = _read_array(path, name)
    if array.ndim != 1 or array.dtype.kind not in "USui":
        raise UserError(
            f"data.class_names: {name} in {path} is {array.dtype} of shape "
            f"{array.shape}; expected strings [K]"
        )
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8", "surrogateescape")
    return tuple(str(class_name) for class_name in array)


def _check_per_channel(name: str, values: Sequence[float], images: np.ndarray) -> None:
    if len(values) not in (1, images.shape[-1]):
        raise UserError(
            f"data.{name}: {len(values)} numbers for images of {images.shape[-1]} channels; give "
            "one per channel, or one for all"
        )
    if images.dtype == np.uint8 and not all(0 <= value <= 1 for value in values):
        raise UserError(
            f"data.{name}: {shorten([f'{value:g}' for value in values])}; uint8 images are "
            "divided by 255 first: give numbers in [0, 1]"
        )


def _select_images(images: np.ndarray, indices: np.ndarray) -> np.ndarray:
    selected = np.ascontiguousarray(images[indices])
    return selected if selected.dtype == np.uint8 else selected.astype(np.float32, copy=False)
