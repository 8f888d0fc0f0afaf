"""Files as pixels: every kind of image comes out upright, 8 bits, RGB; or it is said why not."""

import io
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFile, JpegImagePlugin, UnidentifiedImageError

EXTENSIONS = ("jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp")
"""Of files that are taken for images: those of torchvision's ImageFolder."""

MOST_PIXELS = 2**30 // 12
"""Of an image that is decoded, about 89 million: Pillow warns of more."""

# By content, which an extension may belie; not Pillow's others, some of which run programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# By those, what was last is upright at the left, and at the top.
_LAST_COLUMN_FIRST, _LAST_ROW_FIRST = {2, 3, 6, 7}, {3, 4, 7, 8}
# A JPEG decoded at a half, a quarter or an eighth stays at least so many times as large as what
# is made of it: then the rest of the way is averaged over pixels enough (as Pillow's thumbnails).
_GAP = 2.0


class UnreadableError(Exception):
    """A file is no image that can be used; the message is the reason, without the path."""


class View(NamedTuple):
    """Which part of an image is wanted, and at which size.

    Attributes:
      box: left, top, right, bottom in pixels of the upright image; fractions are allowed.
      size: width, height of what is made of it.
    """

    box: tuple[float, float, float, float]
    size: tuple[int, int]


ViewOf = Callable[[int, int], View]
"""``(width, height) -> View`` of an upright image."""


def whole(width: int, height: int) -> View:
    """All of it, as it is."""
    return View((0, 0, width, height), (width, height))


def decode(path: str | bytes, view: ViewOf = whole) -> np.ndarray:
    """The pixels of an image file, uint8 [height, width, 3].

    The first frame, turned as EXIF says. Grey, palette and CMYK become RGB, 16 bits are
    scaled to 8, alpha is dropped. What is resized is filtered: bilinear, over all pixels
    that fall into one, those beside the box too. Where much less than all pixels of a JPEG
    is wanted, it is decoded at a half, a quarter or an eighth, at least twice as large as
    wanted: that changes photos by one level of 255 on average, half of what bicubic instead
    of bilinear does.

    Args:
      path: of the file.
      view: which part of it, at which size.

    Raises:
      UnreadableError: whatever is wrong with the file.
    """
    return decode_content(_content(path), view)


def decode_content(content: bytes, view: ViewOf = whole) -> np.ndarray:
    """The same of what is in an image file.

    Raises:
      UnreadableError: likewise.
    """
    return np.asarray(_opened(content, lambda image: _viewed(image, view)))


def decode_labels(path: str | bytes, most: int, ignore: int = 255) -> Image.Image:
    """An upright image of labels, mode L: the values of a grey image, the indices of a palette.

    Args:
      path: of the file.
      most: the largest label.
      ignore: a label beside them.

    Raises:
      UnreadableError: if the file cannot be read, has colours instead of labels, levels of grey
        that are spread over others, or labels out of range; the first is named.
    """

    def labels(image: Image.Image) -> Image.Image:
        if _spread(image):
            raise UnreadableError(
                "its levels of grey are fewer than 256, which readers spread over 0 to 255; labels "
                "are 8 or 16 bits, or a palette's"
            )
        image = _upright(image)
        if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
            raise UnreadableError(
                f"its mode is {image.mode}; labels are the values of a grey or a palette image"
            )
        values = np.asarray(image)
        wrong = values[(values != ignore) & ((values > most) | (values < 0))]
        if wrong.size:
            raise UnreadableError(f"label {wrong[0]}, expected 0 to {most}, or {ignore} for none")
        return Image.fromarray(values.astype(np.uint8))

    return _opened(_content(path), labels)


def _spread(image: Image.Image) -> bool:
    """Whether Pillow multiplies the grey levels of a file that is not loaded: 2 of 3 become 170."""
    assert isinstance(image, ImageFile.ImageFile), type(image)
    for tile in image.tile:
        how = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        if tile.codec_name.startswith("ppm"):
            return how[-1] not in (255, 65535)
        if str(how[0]).startswith(("L;2", "L;4")):
            return True
    return False


def _content(path: str | bytes) -> bytes:
    """All of a file: one that is cut short while it is mapped would end the process."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        raise UnreadableError(error.strerror or str(error) or type(error).__name__) from error


def _opened(content: bytes, use: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """What is made of an opened image; whatever goes wrong is an `UnreadableError`."""
    if not content:
        raise UnreadableError("zero bytes")
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise UnreadableError(
                    f"{image.width} x {image.height} pixels are more than {MOST_PIXELS:,}"
                )
            return use(image)
    except UnreadableError:
        raise
    except UnidentifiedImageError:
        raise UnreadableError(f"not an image: none of {', '.join(_FORMATS)}") from None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error) or type(error).__name__) from error
    except Exception as error:  # a damaged file makes Pillow raise whatever its parsers meet
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


def _viewed(image: Image.Image, view: ViewOf) -> Image.Image:
    by = turned = 1
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        # A JPEG says how it is turned before its pixels; draft() acts on what is not loaded.
        turned = _orientation(image)
        width, height = image.size if turned < 5 else image.size[::-1]
        box, size = view(width, height)
        shrink = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1]) / _GAP
        if shrink >= 2:
            by = 2 ** min(int(math.log2(shrink)), 3)
            image.draft(None, (image.width // by, image.height // by))
        rgb = _rgb(_upright(image))
    else:
        rgb = _rgb(_upright(image))
        width, height = rgb.size
        box, size = view(width, height)
    if size[0] * size[1] > MOST_PIXELS:
        raise UnreadableError(
            f"{width} x {height} pixels become {size[0]} x {size[1]}, more than {MOST_PIXELS:,}"
        )
    if rgb.size != (width, height):
        # The last of its columns and rows may stand for fewer pixels; turned, they are the first.
        x = rgb.width - width / by if turned in _LAST_COLUMN_FIRST else 0.0
        y = rgb.height - height / by if turned in _LAST_ROW_FIRST else 0.0
        box = (x + box[0] / by, y + box[1] / by, x + box[2] / by, y + box[3] / by)
    if size == rgb.size and box == (0, 0, *size):
        return rgb
    return rgb.resize(size, Image.Resampling.BILINEAR, box=box)


def _orientation(image: Image.Image) -> int:
    """1 to 8 (EXIF 2.32, 4.6.4); damaged EXIF, or another value, leaves the pixels as they are."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
        return found if found in _TURNS else 1
    except Exception:  # Pillow raises whatever its parsers meet
        return 1


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # a PNG may say afterwards how it is turned; a TIFF is turned by Pillow
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # of which Pillow's own conversion keeps the lowest 255 levels
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise UnreadableError(f"values {values.min()} to {values.max()} are more than 16 bits")
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode == "F":
        raise UnreadableError("floating-point values, which do not say what is white")
    elif image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # Pillow warns of the direct way
    return image.convert("RGB")
