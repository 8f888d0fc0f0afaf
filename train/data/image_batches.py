"""Batches of images, and of their segmentation masks, from files.

This module runs in the processes of `train.data.workers`, so it must not import JAX. All randomness
is drawn before, with `ImageOptions.draw`; reading is deterministic. Unreadable files get weight 0.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Self

import numpy as np
from PIL import Image

from train.data import Arrays, augment, num_examples
from train.data.augment import color_jitter, cutout
from train.data.decode import MAX_PIXELS, File, UnreadableError, View, decode
from train.data.drawings import Mask, read_mask
from train.data.label_map import IGNORE, LabelMap
from train.data.rand_augment import ERASING_DRAWS, draw_rand_augment, rand_augment, random_erasing

Crop = Literal["resized", "padded", "reflected", "center", "scaled"]


@dataclass(frozen=True)
class ImageOptions:
    """How images are read and augmented: the options of all image sources, under their names.

    The defaults change nothing, for sources that lack an option.

    Attributes:
      crop: as in the sources; "scaled" is the random scale of images with masks.
      resize: shorter side of test images before they are cropped.
      mean: color that fills cutouts, erased rectangles, unreadable images and empty canvas.
    """

    image_size: int = 0
    crop: Crop = "center"
    min_area: float = 1.0
    padding: int = 0
    scale: tuple[float, float] = (1.0, 1.0)
    flip: bool = False
    color_jitter: float = 0.0
    lighting: float = 0.0
    cutout: int = 0
    rand_augment: int = 0
    magnitude: int = 0
    random_erasing: float = 0.0
    rotation: float = 0.0
    perspective: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    resize: int = 0
    crops: Literal[1, 2, 10] = 1
    border: int = 0
    mean: tuple[float, ...] = ()
    max_pixels: int = MAX_PIXELS
    cache: bool = False
    workers: int = 0

    @classmethod
    def of(cls, section: object, **others: object) -> Self:
        """Take the options of a config's section; ``others`` replace them."""
        names = {field.name for field in fields(cls)}
        return cls(**{k: v for k, v in (vars(section) | others).items() if k in names})

    @property
    def fill(self) -> tuple[int, ...]:
        """The mean color, 0 to 255."""
        return augment.to_uint8(self.mean)

    def draw(self, n: int, generator: np.random.Generator) -> Arrays:
        """Draw the randomness of n training images: arrays with n rows."""
        draws: Arrays = {}
        if self.crop in ("resized", "scaled"):
            count = augment.RESIZED_CROP_DRAWS if self.crop == "resized" else 3
            draws["crop"] = generator.random((n, count))
        elif self.crop != "center":
            draws["shift"] = generator.integers(0, 2 * self.padding + 1, (n, 2))
        if self.flip:
            draws["flip"] = generator.random(n) < 0.5
        if self.color_jitter or self.lighting:
            draws |= augment.draw_color_jitter(n, self.color_jitter, self.lighting, generator)
        if self.cutout:
            draws["cutout"] = generator.random((n, 2))
        if self.rand_augment:
            draws["operations"] = draw_rand_augment(n, self.rand_augment, generator)
        if self.random_erasing:
            draws["erasing"] = generator.random((n, ERASING_DRAWS))
        if self.rotation or self.perspective:
            draws["warp"] = augment.draw_warp(n, self.rotation, self.perspective, generator)
        return draws

    def augment(self, image: np.ndarray, draws: Arrays) -> np.ndarray:
        """Augment decoded images [N, H, W, C] in place, apart from crops that `decode` makes."""
        if "shift" in draws:
            image = augment.shift(
                image, draws["shift"], self.padding, reflect=self.crop == "reflected"
            )
        if "flip" in draws:
            image = augment.horizontal_flip(image, draws["flip"])
        if "warp" in draws:
            image = augment.warp(image, draws["warp"], self.fill)
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


def read_training(options: ImageOptions, rows: Arrays) -> Arrays:
    """Make a training batch of ``file`` [N], objects of type `File`, and the draws.

    Returns:
      ``image`` uint8 [N, size, size, 3] and ``weight`` float32 [N].
    """
    size = options.image_size

    def read(i: int, file: File) -> np.ndarray:
        if "crop" not in rows:
            view = augment.resize_shorter_side(size)
            return augment.center_crop(decode(file, view, options.max_pixels), size)

        def crop(width: int, height: int) -> View:
            area = (options.min_area, 1.0)
            return augment.random_resized_crop(width, height, size, rows["crop"][i], area=area)

        return decode(file, crop, options.max_pixels)

    batch = _read_images(rows, (size, size, 3), read, options.fill)
    return batch | {"image": options.augment(batch["image"], rows)}


def read_evaluation(options: ImageOptions, rows: Arrays) -> Arrays:
    """Make a test batch of ``file`` [N], objects of type `File`.

    Returns:
      ``image`` uint8 [N, size, size, 3], or [N, crops, size, size, 3] for several crops, and
      ``weight`` float32 [N].
    """

    def read(i: int, file: File) -> np.ndarray:
        image = decode(file, augment.resize_shorter_side(options.resize), options.max_pixels)
        return augment.evaluation_crops(image, options.image_size, options.crops, options.border)

    return _read_images(rows, evaluation_shape(options), read, options.fill)


def evaluation_shape(options: ImageOptions) -> tuple[int, ...]:
    """Return the shape of a test image."""
    crops = () if options.crops == 1 else (options.crops,)
    return *crops, options.image_size, options.image_size, 3


def _read_images(
    rows: Arrays, shape: Sequence[int], read: Callable[[int, File], np.ndarray], fill: Sequence[int]
) -> Arrays:
    n = num_examples(rows)
    image, weight = np.empty((n, *shape), np.uint8), np.ones(n, np.float32)
    for i, file in enumerate(rows["file"]):
        try:
            image[i] = read(i, file)
        except UnreadableError:
            image[i], weight[i] = fill, 0.0
    return {"image": image, "weight": weight}


def read_masked(options: ImageOptions, label_map: LabelMap, rows: Arrays) -> Arrays:
    """Make a batch of the paths ``file`` [N] and the masks ``mask`` [N], objects of type `Mask`.

    With draws, images have a random scale and position. Without them, the whole image fits into
    the canvas.

    Returns:
      ``image`` uint8 [N, size, size, 3], ``mask`` uint8 [N, size, size], `IGNORE` outside the
      image, and ``weight`` float32 [N].
    """
    n, size = num_examples(rows), options.image_size
    image = np.empty((n, size, size, 3), np.uint8)
    image[:] = options.fill
    mask = np.full((n, size, size), IGNORE, np.uint8)
    weight = np.ones(n, np.float32)

    def place(i: int, width: int, height: int) -> augment.Placement:
        if "crop" not in rows:
            return augment.fit(width, height, size)
        return augment.random_scale_crop(width, height, size, rows["crop"][i], options.scale)

    jitter: Arrays = {name: rows[name] for name in ("order", "blend", "light") if name in rows}
    for i, (file, mask_file) in enumerate(zip(rows["file"], rows["mask"], strict=True)):
        try:
            pixels, labels, (x, y) = decode_pair(
                file, mask_file, label_map, functools.partial(place, i), options.max_pixels
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
    if "flip" in rows:
        image, mask = (augment.horizontal_flip(a, rows["flip"]) for a in (image, mask))
    return {"image": image, "mask": mask, "weight": weight}


Place = Callable[[int, int], augment.Placement]
"""``(width, height) -> Placement`` of an image and its mask."""


def decode_pair(
    image: str, mask: Mask, label_map: LabelMap, place: Place, max_pixels: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Decode a part of an image (bilinear) and the same part of its mask (nearest neighbor).

    Returns:
      Part of the image, uint8 [h, w, 3], part of the mask, uint8 [h, w], and their x and y.

    Raises:
      UnreadableError: with the path of the unreadable file and the reason.
    """
    path = mask if isinstance(mask, str) else mask.source
    try:
        labels = Image.fromarray(label_map.labels(read_mask(mask, max_pixels)))
        path = image
        placements = []

        def view(width: int, height: int) -> View:
            if (width, height) != labels.size:
                raise UnreadableError(
                    f"it is {width} x {height}, its mask {labels.width} x {labels.height}"
                )
            placements.append(place(width, height))
            return placements[0].view

        pixels = decode(image, view, max_pixels)
    except UnreadableError as error:
        raise UnreadableError(f"{path}: {error}") from None
    (box, size), at = placements[0]
    part = labels.resize(size, Image.Resampling.NEAREST, box=box)
    return pixels, np.asarray(part), at


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
