"""Data sets of labeled images, whose files are in a folder, in shards or in a library."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from train.data import Arrays, Dataset, Scaling, num_examples
from train.data import image_batches as batches
from train.data.augment import draw_mixup, mixup, resize_shorter_side
from train.data.columns import describe_classes
from train.data.decode import File, UnreadableError, decode, file_bytes
from train.data.files import describe_files
from train.data.image_batches import Crop, ImageOptions, evaluation_shape, read_evaluation
from train.data.workers import Workers
from train.errors import UserError

if TYPE_CHECKING:
    from train.data.photos import Photos

_LEAST_SEEN = 0.5
"""Share of a square test image from which its middle stands for it without a note."""

Read = Callable[[Arrays], Arrays]


def image_dataset(
    config: "Photos",
    labels: Sequence[np.ndarray],
    files: Callable[[np.ndarray], Iterable[File]],
    describe: Callable[[int], str],
    *,
    classes: Sequence[str],
    compared: Callable[[np.ndarray], Iterable[File]] | None,
    trained: bool = False,
    scaling: Scaling | None = None,
    notes: Iterable[str] = (),
    **others: Any,
) -> Dataset:
    """Return a data set whose batches read its files.

    Rows are ``id`` int32 [N], which counts training images and then test images, and ``label``
    int32 [N]. Batches add ``image`` uint8 [N, H, W, 3], or [N, crops, H, W, 3] in evaluation with
    several crops, and ``weight`` float32 [N], 0.0 for an unreadable file. With mixup or CutMix,
    training batches add ``label_2`` and ``mix``: see `augment.mixup`.

    Args:
      config: the data source.
      labels: labels of the training images, and of the test images.
      files: ``ids -> files``.
      describe: ``id -> text``, the file of an image and its place in it.
      classes: names of the outputs.
      compared: ``ids -> files``, to look for copies of training images; None looks for none.
      trained: whether the data are for a trained network, so that only test images matter.
      scaling: scaling of labels that are numbers.
      notes: what to tell about the data, besides what is found here.
      **others: other attributes of the data set.
    """
    options = ImageOptions.of(config, resize=config.shorter_side)
    _check_options(options)
    workers = Workers(options.workers)

    def reader(read: Callable[[ImageOptions, Arrays], Arrays], options: ImageOptions) -> Read:
        def call(rows: Arrays) -> Arrays:
            file = np.empty(num_examples(rows), object)
            file[:] = [*files(rows["id"])]
            return workers(functools.partial(read, options), rows | {"file": file})

        return call

    read_train, read_test = reader(batches.read_training, options), reader(read_evaluation, options)
    num_train = len(labels[0])
    ids = np.arange(sum(map(len, labels)), dtype=np.int32)
    if options.cache:
        uncropped = replace(options, resize=options.image_size, crops=1, border=0)
        cached = CachedImages(ids[:num_train], uncropped, reader(read_evaluation, uncropped))
        read_test = CachedImages(ids[num_train:], options, read_test)

        def read_train(rows: Arrays) -> Arrays:
            images = cached(rows)
            return images | {"image": options.augment(images["image"], rows)}

    def augment(rows: Arrays, generator: np.random.Generator) -> Arrays:
        n, local = num_examples(rows), rows.get("local")
        draws = {"id": rows["id"]} | options.draw(n, generator)
        if not (options.mixup or options.cutmix):
            return rows | batches.read_local(read_train, draws, local)
        mixed = draw_mixup(n, options.mixup, generator, options.cutmix)
        if local is not None:  # with the images that are mixed in
            local = local | np.isin(np.arange(n), mixed["other"][local])
        return mixup(rows | batches.read_local(read_train, draws, local), mixed)

    def prepare(rows: Arrays) -> Arrays:
        return rows | batches.read_local(read_test, {"id": rows["id"]}, rows.get("local"))

    def explain(id: int) -> str | None:
        (file,) = files(np.array([id]))
        try:
            decode(file, resize_shorter_side(options.resize), options.max_pixels, check=True)
        except UnreadableError as error:
            return f"{describe(id)}: {error}"
        return None

    notes, class_weights = [*notes], None
    if not trained:
        notes += describe_classes(classes, None if scaling else labels[0])
        if config.class_weights and not scaling:
            class_weights = balanced_weights(labels[0], len(classes))
    if compared is not None and not trained:
        splits = ids[:num_train].tolist(), ids[num_train:].tolist()
        notes += describe_files(*splits, lambda id: next(iter(compared(ids[[id]]))), describe)
    seen = (options.image_size / options.resize) ** 2
    if options.crops == 1 and seen < _LEAST_SEEN:
        notes.append(
            f"only the middle {seen:.0%} of each test image is seen: data.resize {options.resize} "
            f"is much more than data.image_size {options.image_size}; leave it out to see 77 %"
        )

    return Dataset(
        train={"id": ids[:num_train], "label": labels[0]},
        test={"id": ids[num_train:], "label": labels[1]},
        classes=tuple(classes),
        augment=augment,
        prepare=prepare,
        reads_local=True,
        name=describe,
        test_name=lambda row: describe(num_train + row),
        explain=explain,
        max_bad_fraction=config.max_bad_fraction,
        class_weights=class_weights,
        scaling=scaling,
        notes=tuple(notes),
        files=lambda id: files(np.array([id])),
        **{"file_bytes": lambda id: sum(map(file_bytes, files(np.array([id]))))} | others,
    )


class CachedImages:
    """Test images that are read at their first use and then stay in memory."""

    def __init__(self, ids: np.ndarray, options: ImageOptions, read: Read):
        self._first, self._read = int(ids[0]), read
        # Written to, so that the process takes this memory before training's is measured.
        self._image = np.full((len(ids), *evaluation_shape(options)), 1, np.uint8)
        self._weight = np.full(len(ids), np.nan, np.float32)  # nan: not read yet

    def __call__(self, rows: Arrays) -> Arrays:
        """Return copies of ``image`` and ``weight`` of rows."""
        index = rows["id"] - self._first
        new = np.unique(index[np.isnan(self._weight[index])])
        if new.size:
            batch = self._read({"id": new + self._first})
            self._image[new], self._weight[new] = batch["image"], batch["weight"]
        return {"image": self._image[index], "weight": self._weight[index]}


def _check_options(options: ImageOptions) -> None:
    size = options.image_size
    check_padding(options.crop, options.padding, size, size)
    if size > options.resize:
        raise UserError(
            f"data.resize: {options.resize} is less than data.image_size {size}, which is cropped "
            "from it"
        )
    if options.cache and options.crop == "resized":
        raise UserError(
            "data.cache: resized crops decode each image again; give data.crop padded, reflected "
            "or center"
        )
    if options.border and options.crops != 10:
        raise UserError(
            f"data.border: {options.border}, but only ten-crop uses a border; give data.crops 10"
        )


def check_padding(crop: Crop, padding: int, height: int, width: int) -> None:
    """Raise `UserError` if the padding is as large as an image, so that crops may show none."""
    if crop in ("padded", "reflected") and padding >= min(height, width):
        raise UserError(
            f"data.padding: {padding} pixels can shift images of {height} x {width} out of view; "
            "give fewer"
        )


def balanced_weights(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """Compute weights that make all classes count alike, as scikit-learn's ``balanced``.

    The weight of a class is N / (classes x its examples). Of several labels per image, it is the
    number of examples without the label by those with it. Labels are int [N], or [N, labels] of 0
    and 1. A class of no example has the weight 1, and so has a label of all examples.
    """
    if labels.ndim == 2:
        count = labels.sum(0)
        weights = np.where(count < len(labels), len(labels) - count, count) / np.maximum(count, 1)
    else:
        count = np.bincount(labels, minlength=classes)
        weights = len(labels) / (classes * np.maximum(count, 1))
    return tuple(np.where(count > 0, weights, 1.0).tolist())
