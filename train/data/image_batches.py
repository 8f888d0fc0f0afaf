"""Batches of images, and of their segmentation masks, from file paths.

This module runs in the processes of `train.data.workers`, so it must not import JAX. All randomness
is drawn before, with ``draw``; the calls are deterministic. Unreadable files get weight 0.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from PIL import Image

from train.data import Arrays, num_examples
from train.data.augment import (
    RESIZED_CROP_DRAWS,
    Placement,
    center_crop,
    color_jitter,
    cutout,
    draw_color_jitter,
    draw_mixup,
    evaluation_crops,
    fit,
    horizontal_flip,
    mixup,
    random_resized_crop,
    random_scale_crop,
    resize_shorter_side,
    shift,
    to_uint8,
)
from train.data.decode import (
    MAX_PIXELS,
    UnreadableError,
    View,
    ViewOf,
    decode,
    decode_content,
    decode_mask,
)
from train.data.masks import IGNORE, LabelMap
from train.data.rand_augment import (
    draw_erasing,
    draw_rand_augment,
    rand_augment,
    random_erasing,
)
from train.data.workers import Workers
from train.errors import UserError

if TYPE_CHECKING:  # imports JAX
    from train.config.data import HuggingFace, Images

Crop = Literal["resized", "padded", "reflected", "center"]


@dataclass(frozen=True)
class TrainingImages:
    """Reads and augments training images.

    Attributes:
      root: folder of the paths.
      size: height and width of the result.
      crop: random resized crop; random crop with zero or reflection padding; or center crop.
      area: smallest and largest area of a random resized crop, as a fraction of the image.
      padding: pixels of padding per side.
      flip: flip each image horizontally with probability 1/2.
      color_jitter: strength of the color jitter.
      lighting: standard deviation of the lighting noise.
      cutout: side of the square that cutout removes.
      fill: mean color, which fills cutouts, erased rectangles and unreadable images.
      rand_augment: number of operations of RandAugment.
      magnitude: strength of RandAugment.
      random_erasing: probability that a rectangle is erased.
      max_pixels: largest number of pixels of an image.
    """

    root: bytes
    size: int
    crop: Crop
    area: tuple[float, float]
    padding: int
    flip: bool
    color_jitter: float
    lighting: float
    cutout: int
    fill: tuple[int, ...]
    rand_augment: int = 0
    magnitude: int = 0
    random_erasing: float = 0.0
    max_pixels: int = MAX_PIXELS

    @classmethod
    def from_config(cls, config: "Images | HuggingFace", root: bytes = b"") -> Self:
        """Use the options of a config, for files below ``root``."""
        return cls(
            root=root,
            size=config.image_size,
            crop=config.crop,
            area=(config.min_area, 1.0),
            padding=config.padding,
            flip=config.flip,
            color_jitter=config.color_jitter,
            lighting=config.lighting,
            cutout=config.cutout,
            fill=to_uint8(config.mean),
            rand_augment=config.rand_augment,
            magnitude=config.magnitude,
            random_erasing=config.random_erasing,
            max_pixels=config.max_pixels,
        )

    def draw(self, n: int, generator: np.random.Generator) -> Arrays:
        """Draw the randomness of n images: arrays with n rows."""
        draws: Arrays = {}
        if self.crop == "resized":
            draws["crop"] = generator.random((n, RESIZED_CROP_DRAWS))
        elif self.crop != "center":
            draws["shift"] = generator.integers(0, 2 * self.padding + 1, (n, 2))
        if self.flip:
            draws["flip"] = generator.random(n) < 0.5
        if self.color_jitter or self.lighting:
            draws |= draw_color_jitter(n, self.color_jitter, self.lighting, generator)
        if self.cutout:
            draws["cutout"] = generator.random((n, 2))
        if self.rand_augment:
            draws["operations"] = draw_rand_augment(n, self.rand_augment, generator)
        if self.random_erasing:
            draws |= draw_erasing(n, generator)
        return draws

    def __call__(self, rows: Arrays) -> Arrays:
        """Make a batch of ``path`` [N] or ``content`` [N] (see `decode_row`) and the draws.

        Returns:
          ``image`` uint8 [N, size, size, 3] and ``weight`` float32 [N].
        """

        def read(i: int) -> np.ndarray:
            read_part = functools.partial(
                decode_row, self.root, rows, i, max_pixels=self.max_pixels
            )
            return self.crop_decoded(read_part, rows, i)

        shape = self.size, self.size, 3
        batch = read_images(num_examples(rows), shape, read, self.fill)
        return batch | {"image": self.augment(batch["image"], rows)}

    def crop_decoded(
        self, decode_view: Callable[[ViewOf], np.ndarray], draws: Arrays, i: int
    ) -> np.ndarray:
        """Decode and crop one image, before `augment`: uint8 [size, size, 3].

        Args:
          decode_view: ``view -> pixels`` of the image, as `decode` returns them.
          draws: from `draw`.
          i: row of the draws.
        """
        if "crop" not in draws:
            return center_crop(decode_view(resize_shorter_side(self.size)), self.size)
        crop = draws["crop"][i]
        return decode_view(lambda w, h: random_resized_crop(w, h, self.size, crop, area=self.area))

    def augment(self, image: np.ndarray, draws: Arrays) -> np.ndarray:
        """Augment decoded images uint8 [N, size, size, 3] in place, apart from resized crops."""
        if "shift" in draws:
            image = shift(image, draws["shift"], self.padding, reflect=self.crop == "reflected")
        if "flip" in draws:
            image = horizontal_flip(image, draws["flip"])
        if "operations" in draws:
            image = rand_augment(image, draws["operations"], self.magnitude)
        if "blend" in draws:
            image = color_jitter(image, draws)
        if "cutout" in draws:
            image = cutout(image, draws["cutout"], self.cutout, np.array(self.fill))
        if "erasing" in draws:
            fill = np.array(self.fill)
            image = random_erasing(image, draws["erasing"], self.random_erasing, fill)
        return image


@dataclass(frozen=True)
class EvaluationImages:
    """Reads and crops test images.

    Attributes:
      root: folder of the paths.
      size: height and width of the result.
      resize: shorter side of the image before it is cropped.
      crops: number of crops per image, as in `evaluation_crops`.
      fill: mean color, which fills unreadable images.
      border: pixels of reflected border, as in `evaluation_crops`.
      max_pixels: largest number of pixels of an image.
    """

    root: bytes
    size: int
    resize: int
    crops: Literal[1, 2, 10]
    fill: tuple[int, ...]
    border: int = 0
    max_pixels: int = MAX_PIXELS

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result for one image."""
        crops = () if self.crops == 1 else (self.crops,)
        return *crops, self.size, self.size, 3

    def __call__(self, rows: Arrays) -> Arrays:
        """Make a batch of ``path`` [N] or ``content`` [N], see `decode_row`.

        Returns:
          ``image`` uint8 [N, size, size, 3], or [N, crops, size, size, 3] for several crops, and
          ``weight`` float32 [N].
        """

        def read(i: int) -> np.ndarray:
            view = resize_shorter_side(self.resize)
            image = decode_row(self.root, rows, i, view, max_pixels=self.max_pixels)
            return evaluation_crops(image, self.size, self.crops, self.border)

        return read_images(num_examples(rows), self.shape, read, self.fill)


def decode_row(root: bytes, rows: Arrays, i: int, view: ViewOf, *, max_pixels: int) -> np.ndarray:
    """Decode image i of ``rows``, as `decode`.

    Args:
      root: folder of the paths.
      rows: ``content`` [N], objects: the bytes of files, or an `UnreadableError`; else ``path``
        [N], the files.
      i: row.
      view: part of the image, and its size.
      max_pixels: largest number of pixels of the image.

    Raises:
      UnreadableError: for any problem with the image.
    """
    if "content" not in rows:
        return decode(os.path.join(root, rows["path"][i]), view, max_pixels)
    content = rows["content"][i]
    if isinstance(content, UnreadableError):
        raise content
    return decode_content(content, view, max_pixels)


def read_images(
    n: int, shape: Sequence[int], read: Callable[[int], np.ndarray], fill: Sequence[int]
) -> Arrays:
    """Make ``image`` uint8 [n, *shape] from ``read(i)``, and ``weight`` float32 [n].

    Images for which ``read`` raises `UnreadableError` have the color ``fill`` and weight 0.0.
    """
    image, weight = np.empty((n, *shape), np.uint8), np.ones(n, np.float32)
    for i in range(n):
        try:
            image[i] = read(i)
        except UnreadableError:
            image[i], weight[i] = fill, 0.0
    return {"image": image, "weight": weight}


def check_crop(config: "Images | HuggingFace") -> None:
    """Check that crops are not larger than the resized images.

    Raises:
      UserError: if they are, or as `check_padding`.
    """
    check_padding(config.crop, config.padding, config.image_size, config.image_size)
    if config.image_size > config.shorter_side:
        raise UserError(
            f"data.resize: {config.shorter_side} is less than data.image_size "
            f"{config.image_size}, which is cropped from it"
        )


def check_padding(crop: Crop, padding: int, height: int, width: int) -> None:
    """Check that every random crop shows a part of the image.

    Raises:
      UserError: if the padding is as large as an image.
    """
    if crop in ("padded", "reflected") and padding >= min(height, width):
        raise UserError(
            f"data.padding: {padding} pixels can shift images of {height} x {width} out of view; "
            "give fewer"
        )


class CachedImages:
    """Images that are read at their first use and then stay in memory.

    Args:
      shape: shape of an image.
      count: number of images.
      read: ``indices -> batch``, reads ``image`` and ``weight``.
    """

    def __init__(self, shape: Sequence[int], count: int, read: Callable[[np.ndarray], Arrays]):
        self._read = read
        # Written to, so that the process takes this memory before training's is measured.
        self._image = np.full((count, *shape), 1, np.uint8)
        self._weight = np.full(count, np.nan, np.float32)  # nan: not read yet

    def __call__(self, indices: np.ndarray) -> Arrays:
        """Return copies of ``image`` and ``weight`` of some files."""
        new = np.unique(indices[np.isnan(self._weight[indices])])
        if new.size:
            batch = self._read(new)
            self._image[new], self._weight[new] = batch["image"], batch["weight"]
        return {"image": self._image[indices], "weight": self._weight[indices]}


class LabeledImages:
    """Batches of images with labels, whose files are in a folder or in shards.

    Rows have ``id``, which counts training images and then test images, and ``label``.

    Args:
      config: options.
      root: folder of the paths.
      fetch: ``ids -> rows``, as `decode_row` needs them.
      num_train, num_test: number of training and test images.

    Raises:
      UserError: for options that exclude each other.
    """

    def __init__(
        self,
        config: "Images",
        root: bytes,
        fetch: Callable[[np.ndarray], Arrays],
        num_train: int,
        num_test: int,
    ):
        check_crop(config)
        if config.cache and config.crop == "resized":
            raise UserError(
                "data.cache: resized crops decode each image again; give data.crop padded, "
                "reflected or center"
            )
        if config.border and config.crops != 10:
            raise UserError(
                f"data.border: {config.border}, but only ten-crop uses a border; give data.crops 10"
            )
        self._training = training = TrainingImages.from_config(config, root)
        sizes = config.image_size, config.shorter_side
        evaluation = EvaluationImages(
            root, *sizes, config.crops, training.fill, config.border, config.max_pixels
        )
        workers, side = Workers(config.workers), config.image_size
        self._mixup = config.mixup

        def read_train(rows: Arrays) -> Arrays:
            draws = {name: a for name, a in rows.items() if name != "id"}
            return workers(training, fetch(rows["id"]) | draws)

        def read_test(ids: np.ndarray) -> Arrays:
            return workers(evaluation, fetch(ids))

        self._read_train, self._read_test = read_train, read_test
        if config.cache:
            uncropped = replace(evaluation, resize=side, crops=1, border=0)
            shapes = [images.shape for images in (uncropped, evaluation)]
            cached_train = CachedImages(
                shapes[0], num_train, lambda i: workers(uncropped, fetch(i))
            )
            cached_test = CachedImages(shapes[1], num_test, lambda i: read_test(num_train + i))

            def read_cached(rows: Arrays) -> Arrays:
                images = cached_train(rows["id"])
                return images | {"image": training.augment(images["image"], rows)}

            self._read_train = read_cached
            self._read_test = lambda ids: cached_test(ids - num_train)

    def augment(self, rows: Arrays, generator: np.random.Generator) -> Arrays:
        """Make a training batch, see `train.data.Dataset`."""
        n, local = num_examples(rows), rows.get("local")
        draws = {"id": rows["id"]} | self._training.draw(n, generator)
        if not self._mixup:
            return rows | read_local(self._read_train, draws, local)
        mixed = draw_mixup(n, self._mixup, generator)
        if local is not None:  # with the images that are mixed in
            local = local | np.isin(np.arange(n), mixed["other"][local])
        return mixup(rows | read_local(self._read_train, draws, local), mixed)

    def prepare(self, rows: Arrays) -> Arrays:
        """Make a test batch, see `train.data.Dataset`."""

        def read(rows: Arrays) -> Arrays:
            return self._read_test(rows["id"])

        return rows | read_local(read, {"id": rows["id"]}, rows.get("local"))


def read_local(read: Callable[[Arrays], Arrays], rows: Arrays, local: np.ndarray | None) -> Arrays:
    """Read the rows where ``local`` [N] is true; the others are zeros of weight 1."""
    if local is None or local.all():
        return read(rows)
    found = read({name: a[local] for name, a in rows.items()})
    batch = {name: np.zeros((len(local), *a.shape[1:]), a.dtype) for name, a in found.items()}
    for name, a in found.items():
        batch[name][local] = a
    batch["weight"][~local] = 1.0
    return batch


Place = Callable[[int, int], Placement]
"""``(width, height) -> Placement`` of an image and its mask."""


def decode_pair(
    root: bytes, image: bytes, mask: bytes, label_map: LabelMap, place: Place, max_pixels: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Decode a part of an image (bilinear) and the same part of its mask (nearest neighbor).

    Args:
      root: folder of both paths.
      image, mask: paths.
      label_map: labels of the mask's values.
      place: chooses the part and its position on the canvas.
      max_pixels: largest number of pixels of an image.

    Returns:
      Part of the image, uint8 [h, w, 3], part of the mask, uint8 [h, w], and their x and y.

    Raises:
      UnreadableError: with the path of the unreadable file and the reason.
    """
    path = os.path.join(root, mask)
    try:
        labels = Image.fromarray(label_map.labels(decode_mask(path, max_pixels)))
        path = os.path.join(root, image)
        placements = []

        def view(width: int, height: int) -> View:
            if (width, height) != labels.size:
                raise UnreadableError(
                    f"it is {width} x {height}, its mask {labels.width} x {labels.height}"
                )
            placements.append(place(width, height))
            return placements[0].view

        pixels = decode(path, view, max_pixels)
    except UnreadableError as error:
        raise UnreadableError(f"{os.fsdecode(path)}: {error}") from None
    (box, size), at = placements[0]
    part = labels.resize(size, Image.Resampling.NEAREST, box=box)
    return pixels, np.asarray(part), at


@dataclass(frozen=True)
class TrainingMasks:
    """Reads and augments training images with their masks.

    Attributes:
      root: folder of the paths.
      size: height and width of the result.
      label_map: labels of the masks' values.
      scale: smallest and largest random scale; 1 is the scale of evaluation.
      flip: flip each image horizontally with probability 1/2.
      color_jitter: strength of the color jitter.
      lighting: standard deviation of the lighting noise.
      fill: mean color, which fills the canvas around an image.
      max_pixels: largest number of pixels of an image.
    """

    root: bytes
    size: int
    label_map: LabelMap
    scale: tuple[float, float]
    flip: bool
    color_jitter: float
    lighting: float
    fill: tuple[int, ...]
    max_pixels: int = MAX_PIXELS

    def draw(self, n: int, generator: np.random.Generator) -> Arrays:
        """Draw the randomness of n images: arrays with n rows."""
        draws: Arrays = {"scale_crop": generator.random((n, 3))}
        if self.flip:
            draws["flip"] = generator.random(n) < 0.5
        if self.color_jitter or self.lighting:
            draws |= draw_color_jitter(n, self.color_jitter, self.lighting, generator)
        return draws

    def __call__(self, rows: Arrays) -> Arrays:
        """Make a batch of ``path`` [N], ``mask_path`` [N] and the draws, as `EvaluationMasks`."""

        def place(i: int, width: int, height: int) -> Placement:
            return random_scale_crop(width, height, self.size, rows["scale_crop"][i], self.scale)

        batch = _masked_batch(self, rows, place)
        if "flip" in rows:
            batch |= {
                name: horizontal_flip(batch[name], rows["flip"]) for name in ("image", "mask")
            }
        return batch


@dataclass(frozen=True)
class EvaluationMasks:
    """Reads whole test images with their masks, resized to fit into one size.

    Attributes:
      root: folder of the paths.
      size: height and width of the result.
      label_map: labels of the masks' values.
      fill: mean color, which fills the canvas around an image.
      max_pixels: largest number of pixels of an image.
    """

    root: bytes
    size: int
    label_map: LabelMap
    fill: tuple[int, ...]
    max_pixels: int = MAX_PIXELS

    def __call__(self, rows: Arrays) -> Arrays:
        """Make a batch of ``path`` [N] and ``mask_path`` [N].

        Returns:
          ``image`` uint8 [N, size, size, 3], ``mask`` uint8 [N, size, size], `IGNORE` outside the
          image, and ``weight`` float32 [N].
        """

        def place(i: int, width: int, height: int) -> Placement:
            return fit(width, height, self.size)

        return _masked_batch(self, rows, place)


def _masked_batch(
    reader: TrainingMasks | EvaluationMasks,
    rows: Arrays,
    place: Callable[[int, int, int], Placement],
) -> Arrays:
    n, size = len(rows["path"]), reader.size
    image = np.empty((n, size, size, 3), np.uint8)
    image[:] = reader.fill
    mask = np.full((n, size, size), IGNORE, np.uint8)
    weight = np.ones(n, np.float32)
    jitter: Arrays = {name: rows[name] for name in ("order", "blend", "light") if name in rows}
    for i, (path, mask_path) in enumerate(zip(rows["path"], rows["mask_path"], strict=True)):
        try:
            pixels, labels, (x, y) = decode_pair(
                reader.root,
                path,
                mask_path,
                reader.label_map,
                functools.partial(place, i),
                reader.max_pixels,
            )
        except UnreadableError:
            weight[i] = 0.0
            continue
        if jitter:  # before the image is placed, so that the canvas does not change its mean
            row = {name: a[i : i + 1] for name, a in jitter.items()}
            pixels = color_jitter(pixels[None].copy(), row)[0]
        height, width = labels.shape
        image[i, y : y + height, x : x + width] = pixels
        mask[i, y : y + height, x : x + width] = labels
    return {"image": image, "mask": mask, "weight": weight}
