"""Decoding of image files to upright 8-bit RGB, and of mask files to their values."""

import contextlib
import io
import math
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageFile, JpegImagePlugin, TiffImagePlugin, UnidentifiedImageError

# By content, because extensions can be wrong. EPS and WMF run programs, others hold no images.
Image.init()
_USUAL = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")  # which are tried first
_LEFT_OUT = {"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG", "IPTC", "IMT"}
_FORMATS = (*_USUAL, *sorted({*Image.OPEN} - {*_USUAL} - _LEFT_OUT))
EXTENSIONS = (
    "jpg",
    *(
        extension.removeprefix(".")
        for extension, name in sorted(Image.registered_extensions().items())
        if (name in _FORMATS or extension == ".mpo") and extension != ".jpg"
    ),
)
"""Extensions of the image files that Pillow opens."""

MAX_PIXELS = 2**30 // 12
"""Default of the largest image that is decoded, about 89 million pixels."""


class _PixelLimit:
    """Pillow's limit of pixels, which is the process's: lifted while any thread decodes here.

    Pillow would warn about images that `_check_pixels` allows or refuses itself.
    """

    def __init__(self) -> None:
        self._lock, self._threads, self._limit = threading.Lock(), 0, Image.MAX_IMAGE_PIXELS

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                Image.MAX_IMAGE_PIXELS = self._limit


_PIXEL_LIMIT = _PixelLimit()

_WITH_FRAMES = (b"\x89PNG", b"GIF8", b"RIFF", b"II*", b"II+", b"MM\0")
"""First bytes of images with several frames or pages. A JPEG's further frames are no pictures."""
_SMALLER_OR_MASK = 0b101
"""Bits of NewSubfileType of a TIFF's page (TIFF 6.0, section 8)."""
_MOST_PAGES = 32
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Orientations whose upright image has the stored last column (row) first.
_LAST_COLUMN_FIRST, _LAST_ROW_FIRST = {2, 3, 6, 7}, {3, 4, 7, 8}
# A JPEG decoded at reduced scale stays at least this many times larger than the result, so that the
# final resize averages enough pixels (as in Pillow's thumbnails).
_REDUCING_GAP = 2.0
_GRAYS = np.arange(256, dtype=np.int32) * 0x010101
_BLACK_WHITE = np.array([0, 0xFFFFFF, *[-1] * 254], np.int32)


class UnreadableError(Exception):
    """An image file cannot be used. The message is the reason, without the path."""


class View(NamedTuple):
    """Part of an image, and the size to which it is resized.

    Attributes:
      box: left, top, right and bottom, in pixels of the upright image; can be fractional.
      size: width and height of the result.
    """

    box: tuple[float, float, float, float]
    size: tuple[int, int]


ViewOf = Callable[[int, int], View]
"""``(width, height) -> View`` of an upright image."""


def whole(width: int, height: int) -> View:
    """View the whole image at its own size."""
    return View((0, 0, width, height), (width, height))


File = str | os.PathLike[str] | bytes | UnreadableError
"""Path of a file, its content, or why there is no content."""


def decode(
    source: File | Image.Image | np.ndarray,
    view: ViewOf = whole,
    max_pixels: int = MAX_PIXELS,
    check: bool = False,
) -> np.ndarray:
    """Decode an image file to uint8 [height, width, 3].

    The result is the first frame, rotated as EXIF says. Gray, palette and CMYK become RGB, 16 bits
    are scaled to 8, and alpha is dropped. Resizing is bilinear with antialiasing; its filter also
    reads pixels next to the box. A JPEG that shrinks much is decoded at 1/2, 1/4 or 1/8 of its
    size, at least twice as large as the result. This changes photos by one level of 255 on
    average, half the difference between bicubic and bilinear.

    Args:
      source: image file; or an image of Pillow or an array uint8 [H, W], [H, W, 3] or [H, W, 4],
        which are never decoded at reduced size.
      view: part of the image, and its size.
      max_pixels: largest number of pixels of the image and of the result.
      check: return pixels of any size: nothing is resized, and a JPEG is decoded at 1/8 of its
        size. All of a file is read, and raises the same errors.

    Raises:
      UnreadableError: for any problem with the file.
    """

    def read(image: Image.Image) -> np.ndarray:
        _check_range(image)
        return np.asarray(_apply_view(image, view, max_pixels, check))

    if isinstance(source, np.ndarray):
        source = _from_array(source)
    if isinstance(source, Image.Image):
        with _unreadable():
            _check_pixels(source, max_pixels)
            # Decoding a JPEG at reduced size would change the size of the caller's image.
            return read(source.copy())
    return _open(source, read, max_pixels)


def _from_array(pixels: np.ndarray) -> Image.Image:
    is_image = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] in (3, 4))
    if pixels.dtype != np.uint8 or not is_image or not pixels.size:
        raise UnreadableError(
            f"the array is {pixels.dtype} of shape {pixels.shape}; expected uint8 [H, W, 3], "
            "[H, W, 4] or [H, W], with values from 0 to 255"
        )
    return Image.fromarray(pixels)


class MaskValues(NamedTuple):
    """Values of a mask file.

    Attributes:
      values: int32 [height, width]: gray values, 0 and 1 of a black and white image, palette
        indices, or colors as 0xRRGGBB. If all colors of an RGB image are gray, these are the
        values.
      kind: what the file holds.
      palette: color of each value as 0xRRGGBB, int32 [256], -1 beyond a palette; None for gray
        values, which are their colors, and for colors.
      is_lossy: whether the file is compressed with loss, which changes values.
    """

    values: np.ndarray
    kind: Literal["gray", "bits", "palette", "rgb"]
    palette: np.ndarray | None = None
    is_lossy: bool = False

    @property
    def holds_colors(self) -> bool:
        """Whether the values are colors."""
        return self.kind == "rgb" and self.palette is None


def decode_mask(file: File, max_pixels: int = MAX_PIXELS) -> MaskValues:
    """Decode a mask file to its upright values. Colors that are all gray become gray values.

    Raises:
      UnreadableError: if the file is unreadable, has transparent pixels, or has values that
        readers change.
    """

    def read(image: Image.Image) -> MaskValues:
        if _is_animated(image):
            raise UnreadableError("it has several frames or pages; a mask is one image")
        if reason := _changed_by_readers(image):
            raise UnreadableError(
                f"it has {reason}; save labels with 8 or 16 bits, or as a palette image"
            )
        is_lossy = _is_lossy(image)
        image = _upright(image)
        if image.mode in ("LA", "PA", "RGBA"):
            if np.asarray(image.getchannel("A")).min(initial=255) < 255:
                raise UnreadableError("it has transparent pixels; save masks without transparency")
            image = image.convert("L" if image.mode == "LA" else "RGB")
        if image.mode == "P":
            palette = np.full(256, -1, np.int32)
            colors = np.array(image.getpalette("RGB") or [], np.int32).reshape(-1, 3)[:256]
            palette[: len(colors)] = pack_colors(colors)
            values = np.asarray(image, np.int32)
            return MaskValues(values, "palette", palette)
        if image.mode == "RGB":
            pixels = np.asarray(image, np.int32)
            if (pixels == pixels[..., :1]).all():
                return MaskValues(pixels[..., 0], "rgb", _GRAYS, is_lossy)
            return MaskValues(pack_colors(pixels), "rgb", is_lossy=is_lossy)
        if image.mode not in ("1", "L") and not image.mode.startswith("I"):
            raise UnreadableError(
                f"its mode is {image.mode}; a mask is a gray, a palette or an RGB image"
            )
        values = np.asarray(image).astype(np.int32)
        if image.mode == "1":
            return MaskValues(values, "bits", _BLACK_WHITE, is_lossy)
        return MaskValues(values, "gray", is_lossy=is_lossy)

    return _open(file, read, max_pixels)


def upright_size(file: File, max_pixels: int = MAX_PIXELS) -> tuple[int, int, int]:
    """Read width and height of an upright image, and its EXIF orientation, 1 to 8.

    Orientations from 5 exchange width and height of the stored image.

    Raises:
      UnreadableError: if the file is unreadable.
    """

    def read(image: Image.Image) -> tuple[int, int, int]:
        if image.format != "JPEG":  # Pillow rotates a TIFF, and a PNG's EXIF can follow its pixels
            image.load()
        orientation = _orientation(image)
        return *(image.size[::-1] if orientation >= 5 else image.size), orientation

    return _open(file, read, max_pixels)


def has_frames(file: File) -> bool:
    """Whether an image file has several frames or pages; False for a JPEG or an unreadable file."""
    try:
        if isinstance(file, UnreadableError):
            return False
        start = file[:8] if isinstance(file, bytes) else _read(file, 8)
        may_have = start.startswith(_WITH_FRAMES) or start[4:] == b"ftyp"  # as AVIF
        return may_have and _open(file, _is_animated, MAX_PIXELS)
    except UnreadableError:
        return False


def changes_of_rgb(file: File) -> tuple[int | None, bool]:
    """Return the largest value of an image with 16 bits, and whether it has transparent pixels."""

    def read(image: Image.Image) -> tuple[int | None, bool]:
        is_deep, alpha = image.mode.startswith("I"), 255
        if image.has_transparency_data:
            alpha = int(np.asarray(image.convert("RGBA").getchannel("A")).min())
        return int(np.asarray(image).max()) if is_deep else None, alpha < 255

    with contextlib.suppress(UnreadableError):
        return _open(file, read, MAX_PIXELS)
    return None, False


def _is_animated(image: Image.Image) -> bool:
    """Whether an image has other frames or pages than smaller copies of itself and its mask."""
    if not getattr(image, "is_animated", False):
        return False
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return True
    kinds = []
    for page in range(1, min(image.n_frames, _MOST_PAGES)):
        image.seek(page)
        kinds.append(image.tag_v2.get(ExifTags.Base.NewSubfileType, 0))
    image.seek(0)
    return not all(kind & _SMALLER_OR_MASK for kind in kinds)


def pack_colors(colors: np.ndarray) -> np.ndarray:
    """Return colors [..., 3] as 0xRRGGBB, int32 [...]."""
    r, g, b = np.moveaxis(np.asarray(colors, np.int32), -1, 0)
    return (r << 16) | (g << 8) | b


def _is_lossy(image: Image.Image) -> bool:
    """Whether an image that is not loaded yet is a JPEG or lossy WebP, perhaps in a TIFF."""
    assert isinstance(image, ImageFile.ImageFile), type(image)
    kind = image.info.get("compression") if image.format == "TIFF" else image.format
    if kind in ("webp", "WEBP") and isinstance(image.fp, io.BytesIO):
        found = re.search(b"VP8[ L]", image.fp.getvalue())
        return found is not None and found[0] == b"VP8 "
    return kind in ("jpeg", "JPEG", "MPO", "AVIF")


def _changed_by_readers(image: Image.Image) -> str:
    """Say what of an image Pillow changes when it loads it, or ``""``: 2 of 3 becomes 170."""
    assert isinstance(image, ImageFile.ImageFile), type(image)
    for tile in image.tile:
        args = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        kind, most = str(args[0]), 255
        if tile.codec_name.startswith("ppm") and args[1:]:  # bits have no largest value
            most = args[1]
        if kind.startswith(("L;2", "L;4")) or most not in (255, 65535):
            return "fewer than 256 gray levels, which readers rescale to 0 to 255"
        if re.match("(RGB.?|LA);16", kind) or (kind == "RGB" and most > 255):
            return "several channels of 16 bits, of which readers keep 8"
    return ""


def _read(path: str | os.PathLike[str], size: int = -1) -> bytes:
    """Read a file, or its first bytes.

    A memory-mapped file that is truncated would kill the process.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UnreadableError("not a regular file")
            return file.read(size)
    except OSError as error:
        raise UnreadableError(error.strerror or str(error) or type(error).__name__) from error


def file_bytes(file: File) -> int:
    """Return the size of a file, -1 if it is unreadable."""
    try:
        return len(file) if isinstance(file, bytes) else os.stat(file).st_size  # type: ignore[arg-type]
    except (OSError, TypeError):
        return -1


def file_crc(file: File, crc: int = 0) -> int:
    """Continue a checksum with the contents of a file; an unreadable one adds nothing."""
    try:
        return zlib.crc32(file if isinstance(file, bytes) else _read(file), crc)  # type: ignore[arg-type]
    except (UnreadableError, TypeError):
        return crc


_T = TypeVar("_T")


def _open(file: File, use: Callable[[Image.Image], _T], max_pixels: int) -> _T:
    if isinstance(file, UnreadableError):
        raise file
    content = file if isinstance(file, bytes) else _read(file)
    if not content:
        raise UnreadableError("zero bytes")
    with _unreadable(), Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        _check_pixels(image, max_pixels)
        return use(image)


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    try:
        with _PIXEL_LIMIT:
            yield
    except UnreadableError:
        raise
    except UnidentifiedImageError:
        raise UnreadableError("not an image: no format that Pillow opens") from None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error) or type(error).__name__) from error
    except Exception as error:  # Pillow's parsers raise anything on a damaged file
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise UnreadableError(
            f"{image.width} x {image.height} pixels are more than data.max_pixels {max_pixels:,}"
        )


def _check_range(image: Image.Image) -> None:
    """Raise an error for values whose black and white are not defined by the format."""
    # Mode I of PNG and PNM has 16 bits.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise UnreadableError(f"{kind} values, whose range is undefined; save 8 or 16 bits")


def _apply_view(image: Image.Image, view: ViewOf, max_pixels: int, check: bool) -> Image.Image:
    scale = orientation = 1
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        # The orientation of a JPEG is known before it is loaded, and draft() must come before too.
        orientation = _orientation(image)
        width, height = image.size if orientation < 5 else image.size[::-1]
        box, size = view(width, height)
        shrink = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1]) / _REDUCING_GAP
        if shrink >= 2 or check:
            scale = 8 if check else 2 ** min(int(math.log2(shrink)), 3)
            image.draft(None, (image.width // scale, image.height // scale))
        image.load()
        rgb = _rgb(_rotate(image, orientation))
    else:
        rgb = _rgb(_upright(image))
        width, height = rgb.size
        box, size = view(width, height)
    if size[0] * size[1] > max_pixels:
        raise UnreadableError(
            f"{width} x {height} pixels become {size[0]} x {size[1]}, more than data.max_pixels "
            f"{max_pixels:,}"
        )
    if rgb.size != (width, height):
        # The last stored column and row can stand for fewer pixels; rotation can put them first.
        x = rgb.width - width / scale if orientation in _LAST_COLUMN_FIRST else 0.0
        y = rgb.height - height / scale if orientation in _LAST_ROW_FIRST else 0.0
        box = (x + box[0] / scale, y + box[1] / scale, x + box[2] / scale, y + box[3] / scale)
    if check or (size == rgb.size and box == (0, 0, *size)):
        return rgb
    return rgb.resize(size, Image.Resampling.BILINEAR, box=box)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8 (EXIF 2.32, 4.6.4); 1 for damaged EXIF or another value."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        return orientation if orientation in _TRANSPOSE else 1
    except Exception:  # Pillow's parsers raise anything
        return 1


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # a PNG's EXIF can follow its pixels; Pillow itself rotates a TIFF
    return _rotate(image, _orientation(image))


def _rotate(image: Image.Image, orientation: int) -> Image.Image:
    method = _TRANSPOSE.get(orientation)
    return image if method is None else image.transpose(method)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # Pillow's own conversion clips at 255
        values = np.asarray(image).astype(np.int32)
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # Pillow warns about the direct conversion
    return image.convert("RGB")
