"""Decoding of image files of all kinds, and errors for damaged ones."""

import io
import os
import struct
import warnings
import zlib

import chex
import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from train.data.augment import resize_shorter_side
from train.data.decode import (
    MAX_PIXELS,
    UnreadableError,
    View,
    decode,
    decode_mask,
    has_frames,
    whole,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
IMAGE = Image.fromarray(PIXELS)
GRAY = np.arange(0, 240, dtype=np.uint8).reshape(12, 20)


def smooth(height, width):
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / 90 + k) + np.cos(y / 70 - k) for k in range(3)]
    return (127 + 60 * np.stack(waves, -1)).astype(np.uint8)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def save(tmp_path):
    def save_image(image, name, **options):
        image = image if isinstance(image, Image.Image) else Image.fromarray(image)
        path = str(tmp_path / name)
        image.save(path, **options)
        return path

    return save_image


def error_of(path, function=decode, *arguments, **options):
    with pytest.raises(UnreadableError) as caught:
        function(path, *arguments, **options)
    return str(caught.value)


def as_rgb(gray):
    return np.repeat(gray[..., None], 3, axis=-1)


ALPHA = np.arange(600, dtype=np.uint8).reshape(20, 30, 1)
BITS = GRAY > 100
DEEP = (np.arange(240, dtype=np.uint16) * 274).reshape(12, 20)
LOSSLESS = {
    **{f"rgb.{kind}": (IMAGE, PIXELS) for kind in ("png", "bmp", "ppm", "tif", "tiff")},
    **{f"gray.{kind}": (GRAY, as_rgb(GRAY)) for kind in ("png", "pgm")},
    "bits.png": (BITS, as_rgb(BITS * np.uint8(255))),
    "rgba.png": (np.concatenate([PIXELS, ALPHA], -1), PIXELS),
    "la.png": (Image.fromarray(np.stack([GRAY, GRAY[::-1]], -1), "LA"), as_rgb(GRAY)),
    "cmyk.tif": (IMAGE.convert("CMYK"), PIXELS),  # PIL converts to CMYK without black
    **{
        f"16_bits.{kind}": (DEEP, as_rgb(np.round(DEEP / 257).astype(np.uint8)))
        for kind in ("png", "tif", "pgm")
    },
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_images_are_exact(save, name):
    image, expected = LOSSLESS[name]
    chex.assert_trees_all_equal(decode(save(image, name)), expected)


def test_reads_webp_and_jpeg(save):
    chex.assert_trees_all_equal(decode(save(IMAGE, "a.webp", lossless=True)), PIXELS)
    for mode in ("RGB", "CMYK"):
        path = save(Image.fromarray(smooth(40, 60)).convert(mode), f"{mode}.jpg", quality=95)
        assert np.abs(decode(path).astype(int) - smooth(40, 60)).mean() < 2


@pytest.mark.parametrize("transparency", [None, 2, bytes([0, 128, 255])])
def test_palette_indices_become_rgb(save, transparency):
    indices = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8), "L")
    indices.putpalette([255, 0, 0, 0, 255, 0, 10, 20, 30])
    options = {} if transparency is None else {"transparency": transparency}
    path = save(indices, "palette.png", **options)
    colors = [[[255, 0, 0], [0, 255, 0]], [[10, 20, 30], [0, 255, 0]]]
    chex.assert_trees_all_equal(decode(path), np.array(colors, np.uint8))


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "32-bit"), (np.float32, "floating-point")])
def test_refuses_values_whose_range_no_format_defines(save, dtype, kind):
    reason = f"{kind} values, whose range is undefined; save 8 or 16 bits"
    assert error_of(save(GRAY.astype(dtype), "wide.tif")) == reason
    assert error_of(Image.fromarray(GRAY.astype(dtype))) == reason


@pytest.mark.parametrize("name", ["a.webp", "a.png", "a.gif"])
def test_reads_the_first_frame_of_an_animation(save, name):
    frames = [np.full((8, 8, 3), v, np.uint8) for v in (10, 200)]
    more = {"save_all": True, "append_images": [Image.fromarray(frames[1])]}
    lossless = {"lossless": True} if name.endswith("webp") else {}
    chex.assert_trees_all_equal(decode(save(frames[0], name, **more, **lossless)), frames[0])


def test_the_format_follows_from_the_content_not_the_extension(tmp_path, save):
    path = save(IMAGE, "a.png")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.png").read_bytes())
    chex.assert_trees_all_equal(decode(str(tmp_path / "a.jpg")), decode(path))


# Upright image from stored rows and columns, by orientation tag (EXIF 2.32, 4.6.4).
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tif", "a.jpg"])
def test_rotates_images_by_their_exif_orientation(save, name):
    stored = smooth(40, 64)
    options = {"jpg": {"quality": 95}, "webp": {"lossless": True}}.get(name[2:], {})
    for orientation, upright in UPRIGHT.items():
        path = save(stored, name, exif=exif(orientation), **options)
        difference = decode(path).astype(int) - upright(stored)
        assert np.abs(difference).max() <= (8 if name == "a.jpg" else 0), orientation


def test_a_view_refers_to_the_upright_image(save):
    stored = smooth(40, 64)
    seen = []

    def view(width, height):
        seen.append((width, height))
        return View((0, 0, 20, 30), (20, 30))

    part = decode(save(stored, "a.jpg", exif=exif(6), quality=95), view)
    assert seen == [(40, 64)]
    assert np.abs(part.astype(int) - np.rot90(stored, -1)[:30, :20]).max() <= 8


def test_ignores_damaged_exif(save):
    path = save(IMAGE, "a.png", exif=b"Exif\x00\x00nonsense")
    chex.assert_trees_all_equal(decode(path), PIXELS)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_ignores_unknown_orientations(save, orientation):
    stored = smooth(40, 64)
    path = save(stored, "a.jpg", exif=exif(orientation), quality=95)
    assert np.abs(decode(path).astype(int) - stored).max() <= 8
    half = decode(path, lambda w, h: View((0, 0, w, h), (w // 2, h // 2)))
    assert half.shape == (20, 32, 3)


def test_a_view_equals_a_part_of_the_resized_image(save):
    part = decode(save(IMAGE, "a.png"), lambda w, h: View((6, 4, 26, 16), (10, 6)))
    resized = np.asarray(IMAGE.resize((15, 10), Image.Resampling.BILINEAR))
    chex.assert_trees_all_equal(part, resized[2:8, 3:13])


@pytest.mark.parametrize("orientation", [1, 8])
def test_decodes_a_jpeg_at_reduced_scale_for_small_views(save, monkeypatch, orientation):
    decoded = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda im, *a, **k: decoded.append(im.size) or resize(im, *a, **k)
    )
    path = save(smooth(600, 800), "a.jpg", quality=95, exif=exif(orientation))
    upright = Image.fromarray(UPRIGHT[orientation](smooth(600, 800)).copy())
    for side, by in ((300, 1), (150, 2), (75, 4), (37, 8), (18, 8)):
        size = (side, side)
        part = decode(path, lambda w, h, size=size: View((0, 0, w, h), size))
        assert decoded.pop() == (upright.width // by, upright.height // by)
        expected = resize(upright, size, Image.Resampling.BILINEAR)
        assert np.abs(part.astype(int) - np.asarray(expected)).mean() < 1


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_reduced_decoding_does_not_stretch_a_jpeg_of_odd_size(save, orientation):
    y, x = np.mgrid[0:257, 0:385]  # at 1/8, the last column and row stand for one pixel
    stored = (127 + 60 * np.sin(x / 30) + 60 * np.cos(y / 30)).astype(np.uint8)
    path = save(stored, "a.jpg", quality=95, exif=exif(orientation))
    upright = Image.fromarray(UPRIGHT[orientation](stored).copy())
    for box in ((0, 0, *upright.size), (40, 24, 232, 220)):
        expected = upright.resize((12, 12), Image.Resampling.BILINEAR, box=box)
        part = decode(path, lambda w, h, box=box: View(box, (12, 12)))[..., 0]
        assert np.abs(part.astype(int) - np.asarray(expected)).mean() < 1


def test_refuses_empty_files(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    assert error_of(str(tmp_path / "a.jpg")) == "zero bytes"


@pytest.mark.parametrize(
    "content", [b"<html>not found</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x89PNG\r\n\x1a\n"]
)
def test_refuses_files_that_are_not_images(tmp_path, content):
    (tmp_path / "a.jpg").write_bytes(content)
    assert error_of(str(tmp_path / "a.jpg")).startswith("not an image: no format")


def test_refuses_missing_files_and_folders(tmp_path):
    assert error_of(str(tmp_path / "a.jpg")) == "No such file or directory"
    assert error_of(str(tmp_path)) == "Is a directory"


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.bmp", "a.webp", "a.gif", "a.ppm"])
def test_refuses_truncated_files(tmp_path, save, name):
    path = save(IMAGE, name)
    content = (tmp_path / name).read_bytes()
    for end in range(1, len(content) * 4 // 5, 7):
        (tmp_path / name).write_bytes(content[:end])
        assert error_of(path) == error_of(path, decode, check=True)


def test_noise_in_a_file_raises_only_unreadable_errors(tmp_path, save):
    generator = np.random.default_rng(0)
    decoded, errors = [], []
    for name in ("a.jpg", "a.png", "a.tif", "a.webp", "a.gif"):
        path = save(IMAGE, name)
        content = np.frombuffer((tmp_path / name).read_bytes(), np.uint8)
        for _ in range(100):
            noisy = content.copy()
            noisy[generator.integers(0, len(noisy), 5)] = generator.integers(0, 256, 5)
            (tmp_path / name).write_bytes(noisy.tobytes())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    decoded.append(decode(path).ndim)
                    decode(path, check=True)
                except UnreadableError as error:
                    errors.append(str(error))
                    assert error_of(path, decode, check=True) == errors[-1]
    assert {*decoded} == {3}
    assert all(errors)
    assert len(errors) > 50


@pytest.mark.parametrize("pixels", [MAX_PIXELS + 10**5, 10**9])
def test_refuses_huge_images_before_decoding(tmp_path, pixels):
    side = int(pixels**0.5)
    buffer = io.BytesIO()
    IMAGE.convert("L").save(buffer, "PNG")
    content = buffer.getvalue()
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    patched = content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]
    (tmp_path / "a.png").write_bytes(patched)
    message = f"{side} x {side} pixels are more than data.max_pixels {MAX_PIXELS:,}"
    assert error_of(str(tmp_path / "a.png")) == message  # and Pillow does not warn


def test_a_limit_of_pixels_can_be_raised(save):
    path = save(IMAGE, "a.png")
    assert error_of(path, decode, whole, 599) == (
        "30 x 20 pixels are more than data.max_pixels 599"
    )
    assert error_of(path, decode_mask, 599).startswith("30 x 20 pixels are more than")
    chex.assert_trees_all_equal(decode(path, max_pixels=600), PIXELS)


def test_refuses_to_resize_thin_images_to_huge_ones(save):
    thin = save(np.zeros((60_000, 1), np.uint8), "thin.png")
    most = MAX_PIXELS // 60_000
    assert decode(thin).shape == (60_000, 1, 3)
    words = f"1 x 60000 pixels become {most + 1} x 60000, more than data.max_pixels {MAX_PIXELS:,}"
    assert error_of(thin, decode, lambda w, h: View((0, 0, w, h), (most + 1, h))) == words
    words = "1 x 60000 pixels become 256 x 1536"
    view = resize_shorter_side(256)
    assert error_of(thin, decode, view, check=True).startswith(words)


def test_masks_hold_gray_values_palette_indices_or_colors(save):
    labels = np.array([[0, 1, 2], [2, 255, 1]], np.uint8)
    rgb = np.repeat(labels[..., None], 3, axis=-1)
    rgba = np.dstack([rgb, np.full_like(labels, 255)])
    palette = Image.fromarray(labels, "L")
    palette.putpalette([7, 0, 1] * 256)
    grays = save(labels, "a.png"), save(labels.astype(np.uint16), "c.png")
    for path in (*grays, save(rgb, "e.png"), save(rgba, "f.png")):
        mask = decode_mask(path)
        kind = "gray" if path in grays else "rgb"
        assert (mask.kind, mask.palette is None) == (kind, path in grays)
        chex.assert_trees_all_equal(mask.values, labels.astype(np.int32))
    mask = decode_mask(save(palette, "b.png"))
    chex.assert_trees_all_equal(mask.values, labels.astype(np.int32))
    assert (mask.kind, {*mask.palette.tolist()}) == ("palette", {0x070001})
    gif = decode_mask(save(labels, "h.gif"))
    chex.assert_trees_all_equal(gif.palette[gif.values], labels.astype(np.int32) * 0x010101)
    bits = decode_mask(save(labels == 1, "d.png"))
    assert (bits.kind, bits.palette[1]) == ("bits", 0xFFFFFF)
    chex.assert_trees_all_equal(bits.values, (labels == 1).astype(np.int32))
    rgb[0, 1] = (1, 2, 3)
    colors = decode_mask(save(rgb, "g.png"))
    assert (colors.kind, colors.holds_colors) == ("rgb", True)
    assert colors.values[0].tolist() == [0, 0x010203, 0x020202]


def test_tells_masks_that_are_compressed_with_loss(save):
    for name, options, is_lossy in (
        ("a.jpg", {}, True),
        ("b.webp", {"quality": 100}, True),
        ("c.webp", {"quality": 100, "exif": exif(1)}, True),
        ("d.webp", {"lossless": True, "exif": exif(1)}, False),
        ("e.tif", {"compression": "jpeg"}, True),
        ("f.tif", {"compression": "tiff_lzw"}, False),
        ("g.png", {}, False),
    ):
        assert decode_mask(save(PIXELS, name, **options)).is_lossy == is_lossy, name


def test_rotates_masks_by_their_exif_orientation(save):
    labels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    turned = decode_mask(save(labels, "a.png", exif=exif(6))).values
    chex.assert_trees_all_equal(turned, np.rot90(labels, -1).astype(np.int32))


def test_refuses_masks_with_transparent_pixels_and_unusual_modes(save):
    clear = np.zeros((2, 2, 4), np.uint8)
    assert "it has transparent pixels" in error_of(save(clear, "a.png"), decode_mask)
    cmyk = Image.new("CMYK", (2, 2))
    assert error_of(save(cmyk, "b.tif"), decode_mask).startswith("its mode is CMYK; a mask is")
    gray = [Image.new("L", (2, 2), i) for i in range(3)]
    pages = save(gray[0], "c.tif", save_all=True, append_images=gray[1:])
    assert error_of(pages, decode_mask) == "it has several frames or pages; a mask is one image"


def test_a_tiff_may_have_smaller_copies_of_itself():
    labels, file = Image.new("L", (8, 8), 3), io.BytesIO()
    with TiffImagePlugin.AppendingTiffWriter(file, new=True) as writer:
        for page, kind in ((labels, 0), (labels.resize((4, 4)), 1)):
            page.save(writer, "TIFF", tiffinfo={254: kind})
            writer.newFrame()
    assert Image.open(io.BytesIO(file.getvalue())).n_frames == 2
    assert (decode_mask(file.getvalue()).values == np.full((8, 8), 3)).all()
    assert not has_frames(file.getvalue())


def test_refuses_a_pipe_which_would_block(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    assert error_of(str(tmp_path / "a.png")) == "not a regular file"


def chunk(kind, content):
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def test_refuses_gray_levels_that_readers_rescale(save, tmp_path):
    # Pillow and other readers rescale them to 0, 13, 255 and 0, 17, 255.
    (tmp_path / "a.pgm").write_bytes(b"P5 3 1 20\n" + bytes([0, 1, 20]))
    header = struct.pack(">IIBBBBB", 3, 1, 4, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" + bytes([0x01, 0xF0]))
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    for name, second in (("a.pgm", 13), ("b.png", 17)):
        path = str(tmp_path / name)
        assert decode(path)[0, :, 0].tolist() == [0, second, 255]
        assert error_of(path, decode_mask).startswith("it has fewer than 256 gray levels")
    (tmp_path / "c.pgm").write_bytes(b"P5 3 1 255\n" + bytes([0, 1, 20]))
    assert decode_mask(str(tmp_path / "c.pgm")).values.tolist() == [[0, 1, 20]]
    (tmp_path / "c.pbm").write_bytes(b"P1 3 1\n0 1 0\n")
    assert decode_mask(str(tmp_path / "c.pbm")).values.tolist() == [[1, 0, 1]]
    palette = Image.fromarray(np.array([[0, 1, 15]], np.uint8), "P")
    palette.putpalette([7] * 48)
    assert decode_mask(save(palette, "d.png", bits=4)).values.tolist() == [[0, 1, 15]]


def test_an_array_is_an_image_of_its_colors():
    pixels = np.arange(90, dtype=np.uint8).reshape(5, 6, 3)
    np.testing.assert_array_equal(decode(pixels), pixels)
