"""Files of every kind as pixels, and what is said of those that are damaged."""

import io
import struct
import warnings
import zlib

import chex
import numpy as np
import pytest
from PIL import Image

from train.data.augment import resize_shorter_side
from train.data.decode import MAX_PIXELS, UnreadableError, View, decode, decode_labels

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
IMAGE = Image.fromarray(PIXELS)
GREY = np.arange(0, 240, dtype=np.uint8).reshape(12, 20)


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
def saved(tmp_path):
    def save(image, name, **options):
        image = image if isinstance(image, Image.Image) else Image.fromarray(image)
        path = str(tmp_path / name)
        image.save(path, **options)
        return path

    return save


def reason(path, function=decode, *arguments):
    with pytest.raises(UnreadableError) as caught:
        function(path, *arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.ppm", "a.tif", "a.tiff"])
def test_colours_are_read_as_they_are(saved, name):
    chex.assert_trees_all_equal(decode(saved(IMAGE, name)), PIXELS)


def test_webp_and_jpeg_are_read(saved):
    chex.assert_trees_all_equal(decode(saved(IMAGE, "a.webp", lossless=True)), PIXELS)
    jpeg = decode(saved(smooth(40, 60), "a.jpg", quality=95))
    assert np.abs(jpeg.astype(int) - smooth(40, 60)).mean() < 2


def test_grey_is_the_same_in_all_three_colours(saved):
    expected = np.repeat(GREY[..., None], 3, axis=-1)
    chex.assert_trees_all_equal(decode(saved(GREY, "grey.png")), expected)
    chex.assert_trees_all_equal(decode(saved(GREY, "grey.pgm")), expected)


def test_one_bit_is_black_and_white(saved):
    bits = GREY > 100
    chex.assert_trees_all_equal(decode(saved(bits, "bits.png"))[..., 1], bits * np.uint8(255))


@pytest.mark.parametrize("transparency", [None, 2, bytes([0, 128, 255])])
def test_indices_of_a_palette_are_looked_up(saved, transparency):
    indices = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8), "L")
    indices.putpalette([255, 0, 0, 0, 255, 0, 10, 20, 30])
    options = {} if transparency is None else {"transparency": transparency}
    path = saved(indices, "palette.png", **options)
    colours = [[[255, 0, 0], [0, 255, 0]], [[10, 20, 30], [0, 255, 0]]]
    chex.assert_trees_all_equal(decode(path), np.array(colours, np.uint8))


def test_alpha_is_dropped(saved):
    alpha = np.arange(600, dtype=np.uint8).reshape(20, 30, 1)
    path = saved(np.concatenate([PIXELS, alpha], -1), "rgba.png")
    chex.assert_trees_all_equal(decode(path), PIXELS)
    grey = np.stack([GREY, GREY[::-1]], -1)
    chex.assert_trees_all_equal(decode(saved(Image.fromarray(grey, "LA"), "la.png"))[..., 2], GREY)


def test_cmyk_becomes_rgb(saved):
    path = saved(IMAGE.convert("CMYK"), "cmyk.tif")
    chex.assert_trees_all_equal(decode(path), PIXELS)  # made without black, it is lossless
    smooth_cmyk = Image.fromarray(smooth(40, 60)).convert("CMYK")
    jpeg = decode(saved(smooth_cmyk, "cmyk.jpg", quality=95))
    assert np.abs(jpeg.astype(int) - smooth(40, 60)).mean() < 2


@pytest.mark.parametrize("name", ["deep.png", "deep.tif", "deep.pgm"])
def test_sixteen_bits_are_scaled_to_eight_not_clipped(saved, name):
    deep = (np.arange(240, dtype=np.uint16) * 274).reshape(12, 20)
    path = saved(deep, name)
    chex.assert_trees_all_equal(decode(path)[..., 0], np.round(deep / 257).astype(np.uint8))


def test_what_is_more_than_sixteen_bits_or_has_no_range_is_refused(saved):
    wide = (GREY.astype(np.int32) * 1000).copy()
    assert reason(saved(wide, "wide.tif")) == "values 0 to 239000 are more than 16 bits"
    assert "floating-point" in reason(saved(GREY.astype(np.float32), "float.tif"))


@pytest.mark.parametrize("name", ["a.webp", "a.png", "a.gif"])
def test_of_an_animation_the_first_frame_is_read(saved, name):
    frames = [np.full((8, 8, 3), v, np.uint8) for v in (10, 200)]
    more = {"save_all": True, "append_images": [Image.fromarray(frames[1])]}
    lossless = {"lossless": True} if name.endswith("webp") else {}
    chex.assert_trees_all_equal(decode(saved(frames[0], name, **more, **lossless)), frames[0])


def test_the_content_counts_not_the_extension(tmp_path, saved):
    path = saved(IMAGE, "a.png")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.png").read_bytes())
    chex.assert_trees_all_equal(decode(str(tmp_path / "a.jpg")), decode(path))


# What a viewer does with stored rows and columns, by the tag's value: EXIF 2.32, 4.6.4.
TURNED = {
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


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tif", "a.jpg"])
def test_images_are_turned_as_exif_says(saved, name, orientation):
    stored = smooth(40, 64)
    options = {"jpg": {"quality": 95}, "webp": {"lossless": True}}.get(name[2:], {})
    path = saved(stored, name, exif=exif(orientation), **options)
    difference = decode(path).astype(int) - TURNED[orientation](stored)
    assert np.abs(difference).max() <= (8 if name == "a.jpg" else 0)


def test_a_view_is_of_the_upright_image(saved):
    stored = smooth(40, 64)
    seen = []

    def view(width, height):
        seen.append((width, height))
        return View((0, 0, 20, 30), (20, 30))

    part = decode(saved(stored, "a.jpg", exif=exif(6), quality=95), view)
    assert seen == [(40, 64)]
    upright = np.rot90(stored, -1)
    assert np.abs(part.astype(int) - upright[:30, :20]).max() <= 8


def test_damaged_exif_leaves_the_pixels(saved):
    path = saved(IMAGE, "a.png", exif=b"Exif\x00\x00nonsense")
    chex.assert_trees_all_equal(decode(path), PIXELS)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_exif_does_not_know_leaves_a_photo_as_it_is(saved, orientation):
    stored = smooth(40, 64)
    path = saved(stored, "a.jpg", exif=exif(orientation), quality=95)
    assert np.abs(decode(path).astype(int) - stored).max() <= 8
    half = decode(path, lambda w, h: View((0, 0, w, h), (w // 2, h // 2)))
    assert half.shape == (20, 32, 3)


def test_a_view_is_a_part_of_the_resized_whole(saved):
    part = decode(saved(IMAGE, "a.png"), lambda w, h: View((6, 4, 26, 16), (10, 6)))
    resized = np.asarray(IMAGE.resize((15, 10), Image.Resampling.BILINEAR))
    chex.assert_trees_all_equal(part, resized[2:8, 3:13])


@pytest.mark.parametrize("orientation", [1, 8])
def test_a_jpeg_that_is_wanted_small_is_decoded_small_and_looks_the_same(
    saved, monkeypatch, orientation
):
    decoded = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda im, *a, **k: decoded.append(im.size) or resize(im, *a, **k)
    )
    path = saved(smooth(600, 800), "a.jpg", quality=95, exif=exif(orientation))
    upright = Image.fromarray(TURNED[orientation](smooth(600, 800)).copy())
    for side, by in ((300, 1), (150, 2), (75, 4), (37, 8), (18, 8)):
        size = (side, side)
        part = decode(path, lambda w, h, size=size: View((0, 0, w, h), size))
        assert decoded.pop() == (upright.width // by, upright.height // by)
        expected = resize(upright, size, Image.Resampling.BILINEAR)
        assert np.abs(part.astype(int) - np.asarray(expected)).mean() < 1


@pytest.mark.parametrize("orientation", TURNED)
def test_a_jpeg_of_odd_size_that_is_decoded_small_is_not_stretched(saved, orientation):
    y, x = np.mgrid[0:257, 0:385]  # of an eighth, the last column and row stand for one pixel
    stored = (127 + 60 * np.sin(x / 30) + 60 * np.cos(y / 30)).astype(np.uint8)
    path = saved(stored, "a.jpg", quality=95, exif=exif(orientation))
    upright = Image.fromarray(TURNED[orientation](stored).copy())
    expected = upright.resize((16, 16), Image.Resampling.BILINEAR)
    part = decode(path, lambda w, h: View((0, 0, w, h), (16, 16)))[..., 0]
    assert np.abs(part.astype(int) - np.asarray(expected)).mean() < 1


def test_zero_bytes_are_no_image(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    assert reason(str(tmp_path / "a.jpg")) == "zero bytes"


@pytest.mark.parametrize(
    "content", [b"<html>not found</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_image_is_said_to_be_none(tmp_path, content):
    (tmp_path / "a.jpg").write_bytes(content)
    assert reason(str(tmp_path / "a.jpg")).startswith("not an image: none of JPEG, PNG")


def test_a_missing_file_and_a_folder_are_said(tmp_path):
    assert reason(str(tmp_path / "a.jpg")) == "No such file or directory"
    assert reason(str(tmp_path)) == "Is a directory"


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.bmp", "a.webp", "a.gif", "a.ppm"])
def test_no_truncation_is_read_as_an_image_or_crashes(tmp_path, saved, name):
    path = saved(IMAGE, name)
    content = (tmp_path / name).read_bytes()
    for end in range(1, len(content) * 4 // 5, 7):
        (tmp_path / name).write_bytes(content[:end])
        assert reason(path)


def test_noise_in_a_file_never_raises_anything_else(tmp_path, saved):
    generator = np.random.default_rng(0)
    made, refused = [], []
    for name in ("a.jpg", "a.png", "a.tif", "a.webp", "a.gif"):
        path = saved(IMAGE, name)
        content = np.frombuffer((tmp_path / name).read_bytes(), np.uint8)
        for _ in range(100):
            noisy = content.copy()
            noisy[generator.integers(0, len(noisy), 5)] = generator.integers(0, 256, 5)
            (tmp_path / name).write_bytes(noisy.tobytes())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    made.append(decode(path).ndim)
                except UnreadableError as error:
                    refused.append(str(error))
    assert {*made} == {3}
    assert all(refused)
    assert len(refused) > 50


@pytest.mark.parametrize("pixels", [MAX_PIXELS + 10**5, 10**9])
def test_a_small_file_of_a_huge_image_is_not_decoded(tmp_path, pixels):
    side = int(pixels**0.5)
    buffer = io.BytesIO()
    IMAGE.convert("L").save(buffer, "PNG")
    content = buffer.getvalue()
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    patched = content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]
    (tmp_path / "a.png").write_bytes(patched)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "pixels" in reason(str(tmp_path / "a.png"))


def test_a_thin_image_that_would_become_huge_is_not_resized(saved):
    thin = saved(np.zeros((60_000, 1), np.uint8), "thin.png")
    most = MAX_PIXELS // 60_000
    assert decode(thin).shape == (60_000, 1, 3)
    words = f"1 x 60000 pixels become {most + 1} x 60000, more than {MAX_PIXELS:,}"
    assert reason(thin, decode, lambda w, h: View((0, 0, w, h), (most + 1, h))) == words
    assert reason(thin, decode, resize_shorter_side(256)).startswith(
        "1 x 60000 pixels become 256 x 1536"
    )


def test_labels_are_grey_values_or_indices_of_a_palette(saved):
    labels = np.array([[0, 1, 2], [2, 255, 1]], np.uint8)
    grey = decode_labels(saved(labels, "a.png"), 2)
    palette = Image.fromarray(labels, "L")
    palette.putpalette([7] * 768)
    indices = decode_labels(saved(palette, "b.png"), 2)
    deep = decode_labels(saved(labels.astype(np.uint16), "c.png"), 2)
    for mask in (grey, indices, deep):
        chex.assert_trees_all_equal(np.asarray(mask), labels)
    bits = decode_labels(saved(labels == 1, "d.png"), 1)
    chex.assert_trees_all_equal(np.asarray(bits), (labels == 1).astype(np.uint8))


def test_labels_are_turned_as_their_image_is(saved):
    labels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    turned = decode_labels(saved(labels, "a.png", exif=exif(6)), 11)
    chex.assert_trees_all_equal(np.asarray(turned), np.rot90(labels, -1))


def test_labels_out_of_range_and_colours_are_refused(saved):
    labels = np.array([[0, 1, 7]], np.uint8)
    path = saved(labels, "a.png")
    assert reason(path, decode_labels, 2) == "label 7, expected 0 to 2, or 255 to ignore a pixel"
    deep = saved(np.array([[0, 300]], np.uint16), "b.png")
    assert reason(deep, decode_labels, 254).startswith("label 300")
    assert "mode is RGB" in reason(saved(IMAGE, "c.png"), decode_labels, 2)


def chunk(kind, content):
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def test_levels_of_grey_that_readers_spread_are_no_labels(saved, tmp_path):
    # Pillow, as other readers, makes 0, 13, 255 and 0, 17, 255 of them.
    (tmp_path / "a.pgm").write_bytes(b"P5 3 1 20\n" + bytes([0, 1, 20]))
    header = struct.pack(">IIBBBBB", 3, 1, 4, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" + bytes([0x01, 0xF0]))
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    for name, second in (("a.pgm", 13), ("b.png", 17)):
        path = str(tmp_path / name)
        assert decode(path)[0, :, 0].tolist() == [0, second, 255]
        assert reason(path, decode_labels, 20).startswith("it has fewer than 256 gray levels")
    (tmp_path / "c.pgm").write_bytes(b"P5 3 1 255\n" + bytes([0, 1, 20]))
    assert np.asarray(decode_labels(str(tmp_path / "c.pgm"), 20)).tolist() == [[0, 1, 20]]
    palette = Image.fromarray(np.array([[0, 1, 15]], np.uint8), "P")
    palette.putpalette([7] * 48)
    path = saved(palette, "d.png", bits=4)
    assert np.asarray(decode_labels(path, 20)).tolist() == [[0, 1, 15]]
