"""From the paths of images to a batch of them: uint8, one size, weight 0 for what is unreadable."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from train.data import Arrays
from train.data.augment import (
    RESIZED_CROP_DRAWS,
    centre,
    coloured,
    cutout,
    draw_colours,
    in_bytes,
    mirrored,
    moved,
    resized_crop,
    short_side,
    views,
)
from train.data.decode import UnreadableError, ViewOf, decode
from train.errors import UserError

if TYPE_CHECKING:  # it imports JAX, which processes that decode images do without
    from train.config import HuggingFace, ImageFolder


from PIL import Image

from train.data.augment import Placement, fitted, scaled_crop
from train.data.decode import View, decode_labels

Crop = Literal["resized", "padded", "reflected", "center"]


@dataclass(frozen=True)
class TrainingImages:
    """How files become training images.

    ``draw`` makes all that is random about some images; the call, which may take place
    in another process, makes the images themselves of it.

    Attributes:
      root: the folder that paths start from.
      size: height and width of the result.
      crop: a part of random size and shape; or the middle, moved over a border of zeros or of
        its mirror image, or left where it is.
      area: smallest and largest share of the image that a resized crop takes.
      padding: pixels of the border.
      flip: mirror each image with probability 1/2.
      color_jitter: strength of the colour color_jitter.
      lighting: standard deviation of the lighting.
      cutout: side of the square that is cut out.
      fill: mean colour, which stands for what is cut out or cannot be read.
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

    @classmethod
    def of(cls, config: "ImageFolder | HuggingFace", root: bytes = b"") -> Self:
        """Those that a config describes, of files below ``root``."""
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
            fill=in_bytes(config.mean),
        )

    def draw(self, n: int, generator: np.random.Generator) -> Arrays:
        """What is random about n images: arrays of n rows."""
        drawn: Arrays = {}
        if self.crop == "resized":
            drawn["crop"] = generator.random((n, RESIZED_CROP_DRAWS))
        elif self.crop != "center":
            drawn["move"] = generator.integers(0, 2 * self.padding + 1, (n, 2))
        if self.flip:
            drawn["flip"] = generator.random(n) < 0.5
        if self.color_jitter or self.lighting:
            drawn |= draw_colours(n, self.color_jitter, self.lighting, generator)
        if self.cutout:
            drawn["cutout"] = generator.random((n, 2))
        return drawn

    def __call__(self, rows: Arrays) -> Arrays:
        """``path`` [N] and what was drawn -> ``image`` uint8 [N, size, size, 3], ``weight`` [N]."""

        def pixels(i: int) -> np.ndarray:
            path = os.path.join(self.root, rows["path"][i])
            return self.seen(functools.partial(decode, path), rows, i)

        shape = self.size, self.size, 3
        batch = read_all(len(rows["path"]), shape, pixels, self.fill)
        return batch | {"image": self.augmented(batch["image"], rows)}

    def seen(self, decoded: Callable[[ViewOf], np.ndarray], drawn: Arrays, i: int) -> np.ndarray:
        """What was drawn as row i of an image, before `augmented`: uint8 [size, size, 3].

        Args:
          decoded: ``view -> pixels`` of the image, as `decode` makes them.
          drawn: by `draw`.
          i: the row.
        """
        if "crop" not in drawn:
            return centre(decoded(short_side(self.size)), self.size)
        draws = drawn["crop"][i]
        return decoded(lambda w, h: resized_crop(w, h, self.size, draws, area=self.area))

    def augmented(self, image: np.ndarray, drawn: Arrays) -> np.ndarray:
        """Decoded images uint8 [N, size, size, 3], changed in place: all but a resized crop."""
        if "move" in drawn:
            image = moved(image, drawn["move"], self.padding, reflect=self.crop == "reflected")
        if "flip" in drawn:
            image = mirrored(image, drawn["flip"])
        if "blend" in drawn:
            image = coloured(image, drawn)
        if "cutout" in drawn:
            image = cutout(image, drawn["cutout"], self.cutout, np.array(self.fill))
        return image


@dataclass(frozen=True)
class EvaluationImages:
    """How files become images to evaluate on.

    Attributes:
      root: the folder that paths start from.
      size: height and width of the result.
      resize: of the shorter side of the image that it is cut from.
      crops: how many parts of each, as `views` takes them.
      fill: mean colour, which stands for what cannot be read.
      border: pixels of its mirror image around each, likewise.
    """

    root: bytes
    size: int
    resize: int
    crops: Literal[1, 2, 10]
    fill: tuple[int, ...]
    border: int = 0

    def __call__(self, rows: Arrays) -> Arrays:
        """``path`` [N] -> ``image`` uint8 [N, size, size, 3] or [N, crops, ...]; ``weight`` [N]."""
        several = () if self.crops == 1 else (self.crops,)

        def pixels(i: int) -> np.ndarray:
            path = os.path.join(self.root, rows["path"][i])
            image = decode(path, short_side(self.resize))
            return views(image, self.size, self.crops, self.border)

        shape = *several, self.size, self.size, 3
        return read_all(len(rows["path"]), shape, pixels, self.fill)


def read_all(
    n: int, shape: Sequence[int], pixels: Callable[[int], np.ndarray], fill: Sequence[int]
) -> Arrays:
    """``image`` uint8 [n, *shape] of ``pixels(i)``, and ``weight`` float32 [n].

    Where the pixels are an `UnreadableError`, the image is the colour ``fill``, its weight 0.0.
    """
    image, weight = np.empty((n, *shape), np.uint8), np.ones(n, np.float32)
    for i in range(n):
        try:
            image[i] = pixels(i)
        except UnreadableError:
            image[i], weight[i] = fill, 0.0
    return {"image": image, "weight": weight}


def check_cut(config: "ImageFolder | HuggingFace") -> None:
    """Refuses a middle that is larger than the images it is cut from, and as `check_padding`.

    Raises:
      UserError: then.
    """
    check_padding(config.crop, config.padding, config.image_size, config.image_size)
    if config.image_size > config.shorter_side:
        raise UserError(
            f"data.resize: {config.shorter_side} is less than data.image_size "
            f"{config.image_size}, which is cut from it"
        )


def check_padding(crop: Crop, padding: int, height: int, width: int) -> None:
    """Refuses crops that may show nothing of an image of that size.

    Raises:
      UserError: then.
    """
    if crop in ("padded", "reflected") and padding >= min(height, width):
        raise UserError(
            f"data.padding: {padding} pixels move all of an image of {height} x {width} out "
            "of sight; give fewer"
        )


class KeptImages:
    """Images that are read when they are first asked for, and then kept.

    Args:
      images: how files become images.
      paths: [N] of all files.
      read: ``(images, rows) -> batch``, here or elsewhere.
    """

    def __init__(
        self,
        images: EvaluationImages,
        paths: np.ndarray,
        read: Callable[[EvaluationImages, Arrays], Arrays],
    ):
        self._images, self._paths, self._read = images, paths, read
        shape = images({"path": paths[:0]})["image"].shape[1:]
        # Written to, so that the memory is taken now: what training takes is counted from later.
        self._image = np.full((len(paths), *shape), 1, np.uint8)
        self._weight = np.full(len(paths), np.nan, np.float32)  # of those not read yet

    def __call__(self, which: np.ndarray) -> Arrays:
        """``image`` and ``weight`` of the chosen files, copied."""
        new = np.unique(which[np.isnan(self._weight[which])])
        if new.size:
            made = self._read(self._images, {"path": self._paths[new]})
            self._image[new], self._weight[new] = made["image"], made["weight"]
        return {"image": self._image[which], "weight": self._weight[which]}


IGNORE = 255
"""The label of pixels that are not counted."""

Place = Callable[[int, int], Placement]
"""``(width, height) -> Placement`` of the image, and of its mask."""


def decode_pair(
    root: bytes, image: bytes, mask: bytes, classes: int, place: Place
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """A part of an image, resized (bilinear), and the same part of its mask (nearest label).

    Args:
      root: the folder that both paths start from.
      image, mask: paths.
      classes: labels are 0 to classes - 1, or `IGNORE`.
      place: which part, and where it goes.

    Returns:
      The image's part, uint8 [h, w, 3], the mask's, uint8 [h, w], and the x and y of both.

    Raises:
      UnreadableError: with the path of the file that cannot be used, and why.
    """
    path = os.path.join(root, mask)
    try:
        labels = decode_labels(path, classes - 1, IGNORE)
        path = os.path.join(root, image)
        placements = []

        def view(width: int, height: int) -> View:
            if (width, height) != labels.size:
                raise UnreadableError(
                    f"it is {width} x {height}, its mask {labels.width} x {labels.height}"
                )
            placements.append(place(width, height))
            return placements[0].view

        pixels = decode(path, view)
    except UnreadableError as error:
        raise UnreadableError(f"{os.fsdecode(path)}: {error}") from None
    (box, size), at = placements[0]
    part = labels.resize(size, Image.Resampling.NEAREST, box=box)
    return pixels, np.asarray(part), at


@dataclass(frozen=True)
class TrainingMasks:
    """How files become training images with masks; as `image_batches.TrainingImages`.

    Attributes:
      root: the folder that paths start from.
      size: height and width of the result.
      classes: how many labels there are.
      scale: smallest and largest; 1 is that of evaluation.
      flip: mirror each image with probability 1/2.
      color_jitter: strength of the colour color_jitter.
      lighting: standard deviation of the lighting.
      fill: mean colour, where there is no image.
    """

    root: bytes
    size: int
    classes: int
    scale: tuple[float, float]
    flip: bool
    color_jitter: float
    lighting: float
    fill: tuple[int, ...]

    def draw(self, n: int, generator: np.random.Generator) -> Arrays:
        """What is random about n images: arrays of n rows."""
        drawn: Arrays = {"place": generator.random((n, 3))}
        if self.flip:
            drawn["flip"] = generator.random(n) < 0.5
        if self.color_jitter or self.lighting:
            drawn |= draw_colours(n, self.color_jitter, self.lighting, generator)
        return drawn

    def __call__(self, rows: Arrays) -> Arrays:
        """``path``, ``mask_path`` [N] and what was drawn -> `EvaluationMasks`' batch."""

        def place(i: int, width: int, height: int) -> Placement:
            return scaled_crop(width, height, self.size, rows["place"][i], self.scale)

        batch = _batch(self.root, rows, self.size, self.classes, self.fill, place)
        if "flip" in rows:
            batch |= {name: mirrored(batch[name], rows["flip"]) for name in ("image", "mask")}
        return batch


@dataclass(frozen=True)
class EvaluationMasks:
    """How files become whole images, fitted into one size, with their masks.

    Attributes:
      root: the folder that paths start from.
      size: height and width of the result.
      classes: how many labels there are.
      fill: mean colour, where there is no image.
    """

    root: bytes
    size: int
    classes: int
    fill: tuple[int, ...]

    def __call__(self, rows: Arrays) -> Arrays:
        """``path`` and ``mask_path`` [N] -> a batch.

        ``image`` uint8 [N, size, size, 3], ``mask`` uint8 [N, size, size], `IGNORE` where
        there is no image, ``weight`` float32 [N].
        """

        def place(i: int, width: int, height: int) -> Placement:
            return fitted(width, height, self.size)

        return _batch(self.root, rows, self.size, self.classes, self.fill, place)


def _batch(
    root: bytes,
    rows: Arrays,
    size: int,
    classes: int,
    fill: tuple[int, ...],
    place: Callable[[int, int, int], Placement],
) -> Arrays:
    n = len(rows["path"])
    image = np.empty((n, size, size, 3), np.uint8)
    image[:] = fill
    mask = np.full((n, size, size), IGNORE, np.uint8)
    weight = np.ones(n, np.float32)
    colours: Arrays = {name: rows[name] for name in ("order", "blend", "light") if name in rows}
    for i, (path, mask_path) in enumerate(zip(rows["path"], rows["mask_path"], strict=True)):
        try:
            placed = functools.partial(place, i)
            pixels, labels, (x, y) = decode_pair(root, path, mask_path, classes, placed)
        except UnreadableError:
            weight[i] = 0.0
            continue
        if colours:  # of the image, not of what surrounds it
            row = {name: a[i : i + 1] for name, a in colours.items()}
            pixels = coloured(pixels[None].copy(), row)[0]
        height, width = labels.shape
        image[i, y : y + height, x : x + width] = pixels
        mask[i, y : y + height, x : x + width] = labels
    return {"image": image, "mask": mask, "weight": weight}
