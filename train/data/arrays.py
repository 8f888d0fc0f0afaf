"""Images and labels as arrays in an .npz file, as numpy.savez writes them."""

import os
import re
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.config import ArrayFile
from train.data import Arrays, Dataset, size
from train.data.files import shortened, there_are
from train.data.image_batches import TrainingImages, check_padding
from train.data.labels import as_labels, check_several, class_names, split_by_class
from train.errors import UserError, nearest

_IMAGES = ("x", "image", "images", "data")
_LABELS = ("y", "label", "labels", "target", "targets")
_TRAINING, _HELD_OUT = "train", ("val", "test")
_EXPECTED = "it is an .npz file, or a folder with train.npz and, to test on, val.npz or test.npz"


class Part(NamedTuple):
    """Where the examples of a part are.

    Attributes:
      path: of the file.
      images, labels: names of arrays in it.
    """

    path: Path
    images: str
    labels: str


def parts_of(config: ArrayFile) -> list[Part]:
    """What to train on and, if there is such a part, what to test on.

    Raises:
      UserError: if files or arrays are missing, several could be meant, or both parts are one.
    """
    root = Path(config.path)
    (images, *test_images), (labels, *test_labels) = config.images or [""], config.labels or [""]
    training, held_out = (images, labels), ("".join(test_images), "".join(test_labels))
    if root.is_dir():
        there = sorted(path.stem for path in root.glob("*.npz"))
        if _TRAINING not in there:
            raise UserError(
                f"data.path: no file {root / _TRAINING}.npz; {_EXPECTED}{there_are(there, 'files')}"
            )
        parts = [_part(root / f"{_TRAINING}.npz", ("", _TRAINING), training)]
        test = _test_part(config, root, there)
        if test is None and any(held_out):
            raise UserError(
                f"data.test_split: {root} holds neither val.npz nor test.npz; name the file with "
                f"{' and '.join(filter(None, held_out))}{there_are(there, 'files')}"
            )
        parts += [_part(root / f"{test}.npz", ("", test), held_out)] if test else []
    else:
        there = sorted({part for _, part in filter(None, map(_parse, names_in(root))) if part})
        parts = [_part(root, ("", _TRAINING), training)]
        test = _test_part(config, root, there)
        if test or any(held_out):
            parts.append(_part(root, (test or _HELD_OUT[-1],), held_out))
    if len(parts) == 2 and parts[0][:2] == parts[1][:2]:
        raise UserError(
            f"data.test_split: {parts[0].images} in {parts[0].path} would be trained on and tested "
            "on; name other images for one of them"
        )
    return parts


def names_in(path: Path) -> list[str]:
    """The arrays of a file.

    Raises:
      UserError: if it is not there, or no .npz file.
    """
    try:
        with open(path, "rb") as file:
            is_zip = zipfile.is_zipfile(file)
    except FileNotFoundError:
        raise UserError(f"data.path: {path} does not exist; {_EXPECTED}") from None
    except OSError as error:
        raise UserError(f"data.path: cannot read {path}: {error.strerror}") from error
    if not is_zip:
        what = "is cut short, or no .npz file" if os.path.getsize(path) else "is empty"
        raise UserError(f"data.path: {path} {what}; numpy.savez writes such files")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return list(arrays.files)
    except Exception as error:  # a damaged file makes parsers raise whatever they meet
        raise _unreadable(path, error) from error


def read(path: Path, name: str) -> np.ndarray:
    """An array of a file, whole.

    Raises:
      UserError: if it is damaged, or holds Python objects.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            array = arrays[name]
    except Exception as error:
        raise _unreadable(f"{name} in {path}", error) from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"data.path: {name} in {path} is no array")
    return array


def _test_part(config: ArrayFile, root: Path, there: Collection[str]) -> str | None:
    """The part to test on: the one that is named, else val or test, else none."""
    name = config.test_split
    if name is not None and name not in there:
        raise UserError(
            f"data.test_split: no part {name} in {root}{nearest(name, there)}"
            f"{there_are(sorted(there), 'parts')}"
        )
    return name or next((part for part in _HELD_OUT if part in there), None)


def _part(path: Path, parts: Sequence[str], given: Sequence[str]) -> Part:
    """The arrays of a part of a file, by the given names, or where they are "" by usual ones."""
    names = names_in(path)
    found = []
    for what, words, name in zip(("images", "labels"), (_IMAGES, _LABELS), given, strict=True):
        usual = [n for n in names if _parse(n) in [(words, part.lower()) for part in parts]]
        if name and name not in names:
            raise UserError(
                f"data.{what}: no array {name} in {path}{nearest(name, names)}"
                f"{there_are(names, 'arrays')}"
            )
        if not name and len(usual) > 1:
            raise UserError(
                f"data.{what}: {' and '.join(usual)} in {path} could both be meant; name one"
            )
        if not name and not usual:
            of = "" if _TRAINING in parts else f" of {parts[-1]}"
            raise UserError(
                f"data.{what}: no array in {path} is called as {what}{of} usually are "
                f"({', '.join(_usual(words, parts))}, ...); name one{there_are(names, 'arrays')}"
            )
        found.append(name or usual[0])
    return Part(path, *found)


def _parse(name: str) -> tuple[tuple[str, ...], str] | None:
    """``"X_train"`` -> ``(_IMAGES, "train")``, ``"label"`` -> ``(_LABELS, "")``; else None."""
    words = re.split(r"[_\-. ]", name.lower())
    for kind in (_IMAGES, _LABELS):
        rest = [word for word in words if word not in kind]
        if len(rest) == len(words) - 1 < 2:
            return kind, "".join(rest)
    return None


def _usual(words: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Some names that would have been found."""
    return [word if not part else f"{word}_{part}" for part in parts for word in words[:3]]


def _unreadable(what: object, error: Exception) -> UserError:
    reason = str(error) or type(error).__name__
    if "Object arrays" in reason:
        return UserError(
            f"data.path: {what} holds Python objects, which only pickle could read, and pickle "
            "runs what a file says; save numbers, or names as an array of strings"
        )
    return UserError(f"data.path: cannot read {what}: {reason}")


_CLASS_NAMES = ("classes", "class_names", "label_names")
_AT_ONCE = 2**24
"""Bytes of images that are looked at in one go."""


def load(config: ArrayFile) -> Dataset:
    """The images of a file, or of a folder with a file a part, read once.

    Arrays are found by what they are called: ``x`` and ``y``; ``x_train``, ``y_train``,
    ``x_test`` and ``y_test``, as Keras has them; ``train_images``, ``train_labels``,
    ``val_images`` and so on, as MedMNIST; or by the names in the config. Images are [N, H, W],
    [N, H, W, C] or [N, C, H, W], uint8 or floating; labels integers [N] or [N, 1], or one-hot
    [N, K].

    Rows are ``id`` int32 [N], the place among the training images or, behind their end, among
    the test images (where these are held out of those, in the one array), and ``label`` int32
    [N]. Batches have besides ``image`` [N, H, W, C], uint8 or float32. Each array is in memory
    once: only batches are copied.

    Raises:
      UserError: if there is no such file or no such array in it, or if it is damaged or holds
        Python objects; if images have other shapes or types or are not finite; if labels are
        not as many, are no integers from 0, or all the same; if there are too few examples of
        a class to hold some out.
    """
    parts = parts_of(config)
    images = [_images(read(p.path, p.images), f"{p.images} in {p.path}", config) for p in parts]
    labels = [
        as_labels(read(p.path, p.labels), f"data.labels: {p.labels} in {p.path}") for p in parts
    ]
    _compare(parts, images, labels)
    names = _names(config, parts[0].path)
    classes = class_names(labels, names, f"data.labels: {config.path}")
    _check_by_channel("mean", config.mean, images[0])
    _check_by_channel("std", config.std, images[0])
    check_padding(config.crop, config.padding, *images[0].shape[1:3])
    offset = len(labels[0]) if len(parts) == 2 else 0
    if offset:
        ids = np.arange(offset), offset + np.arange(len(labels[1]))
    else:
        ids = split_by_class(labels[0], config.test_fraction, config.split_seed)
        labels = [labels[0][which] for which in ids]
    train, test = (
        {"id": which.astype(np.int32), "label": label}
        for which, label in zip(ids, labels, strict=True)
    )
    training = TrainingImages(
        root=b"",
        size=images[0].shape[1],
        crop=config.crop,
        area=(1.0, 1.0),
        padding=config.padding,
        flip=config.flip,
        color_jitter=0.0,
        lighting=0.0,
        cutout=0,
        fill=(),
    )

    def augment(rows: Arrays, generator: np.random.Generator) -> Arrays:
        drawn = training.draw(size(rows), generator)
        return rows | {"image": training.augmented(_chosen(images[0], rows["id"]), drawn)}

    def prepare(rows: Arrays) -> Arrays:
        return rows | {"image": _chosen(images[-1], rows["id"] - offset)}

    return Dataset(
        train=train,
        test=test,
        classes=classes,
        augment=augment,
        prepare=prepare,
        name=lambda row: f"image {train['id'][row]} of {parts[0].images} in {parts[0].path}",
    )


def _images(images: np.ndarray, what: str, config: ArrayFile) -> np.ndarray:
    """The same memory as images [N, H, W, C]."""
    shape, floating = images.shape, images.dtype.kind == "f"
    if images.dtype != np.uint8 and not floating:
        raise UserError(f"data.images: {what} is {images.dtype}; images are uint8 or floating")
    if images.ndim not in (3, 4):
        raise UserError(
            f"data.images: {what} has shape {shape}; images are [N, height, width] or "
            "[N, height, width, channels]"
        )
    if not images.size:
        raise UserError(f"data.images: {what} is empty: its shape is {shape}")
    if images.ndim == 3:
        images = images[..., None]
    elif config.axes == "channels_first":
        images = np.moveaxis(images, 1, -1)
    elif config.axes is None and shape[1] != shape[2] and shape[3] > max(4, shape[1]):
        raise UserError(
            f"data.axes: {what} has shape {shape}, and its channels may be first or last; give "
            "channels_first or channels_last"
        )
    if floating:
        _check_finite(images, what)
    return images


def _check_finite(images: np.ndarray, what: str) -> None:
    """As float32, which batches are; part by part, so that no second copy is made."""
    at_once = max(_AT_ONCE // images[0].nbytes, 1)
    for start in range(0, len(images), at_once):
        with np.errstate(over="ignore"):
            part = images[start : start + at_once].astype(np.float32, copy=False)
        finite = np.isfinite(part)
        if not finite.all():
            i, *pixel = np.argwhere(~finite)[0]
            value = images[start + i][tuple(pixel)]
            raise UserError(f"data.images: {what} has {value} in image {start + i}")


def _compare(
    parts: Sequence[Part], images: Sequence[np.ndarray], labels: Sequence[np.ndarray]
) -> None:
    """Refuses labels that are not as many as images or all one, and test images of other kinds."""
    for (path, x, y), image, label in zip(parts, images, labels, strict=True):
        if len(image) != len(label):
            raise UserError(
                f"data.labels: {y} in {path} has {len(label):,} labels for the {len(image):,} "
                f"images in {x}"
            )
    check_several(labels[0], f"data.labels: {parts[0].labels} in {parts[0].path}")
    kinds = [
        f"{'bytes' if image.dtype == np.uint8 else 'floating'} {image.shape[1:]}"
        for image in images
    ]
    if len({*kinds}) > 1:
        (path, x, _), (test_path, test_x, _) = parts
        raise UserError(
            f"data.images: {x} in {path} has images of {kinds[0]}, {test_x} in {test_path} of "
            f"{kinds[1]}; those to test on are to be as those to train on"
        )


def _names(config: ArrayFile, path: Path) -> tuple[str, ...] | None:
    """The names of labels 0, 1, ..., if there is an array of them."""
    there, name = names_in(path), config.class_names
    usual = [n for n in there if n.lower() in _CLASS_NAMES]
    if name is not None and name not in there:
        raise UserError(
            f"data.class_names: no array {name} in {path}{nearest(name, there)}"
            f"{there_are(there, 'arrays')}"
        )
    if name is None and not usual:
        return None
    if name is None and len(usual) > 1:
        raise UserError(
            f"data.class_names: {' and '.join(usual)} in {path} could both be meant; name one"
        )
    array = read(path, name or usual[0])
    if array.ndim != 1 or array.dtype.kind not in "USui":
        raise UserError(
            f"data.class_names: {name or usual[0]} in {path} is {array.dtype} of shape "
            f"{array.shape}; the names of labels 0, 1, ... are strings [K]"
        )
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8", "replace")
    return tuple(str(each) for each in array)


def _check_by_channel(name: str, values: Sequence[float], images: np.ndarray) -> None:
    """Refuses a mean or a standard deviation that is not one of images [N, H, W, C]."""
    if len(values) not in (1, images.shape[-1]):
        raise UserError(
            f"data.{name}: {len(values)} numbers for images of {images.shape[-1]} channels; give "
            "one for each, or one for all"
        )
    if images.dtype == np.uint8 and not all(0 <= value <= 1 for value in values):
        raise UserError(
            f"data.{name}: {shortened([f'{value:g}' for value in values])}; images that are "
            "bytes are divided by 255 first: give numbers in [0, 1]"
        )


def _chosen(images: np.ndarray, which: np.ndarray) -> np.ndarray:
    """A copy of some images, uint8 or float32."""
    some = np.ascontiguousarray(images[which])
    return some if some.dtype == np.uint8 else some.astype(np.float32, copy=False)
