"""ONNX programs: the same outputs as the network, from the image file on, for any batch size."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pretrained_image_cases
import pytest
import torchvision_cases
import vision_cases
from PIL import ExifTags, Image, ImageOps
from program_cases import fnet_command, initial_run

from fnet.interop.huggingface import build_model
from fnet.layers.activations import ACTIVATIONS
from train.config import recipes, registry
from train.data import Outputs
from train.onnx_program import UnsupportedError, to_onnx
from train.predictor import Predictor
from train.run.open_run import write_classes
from train.run.program_files import _upsample
from train.tasks import KINDS

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def session_of(content):
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def assert_same(function, shape):
    """Assert that the program of a function of images computes it, for two batch sizes."""
    session = session_of(to_onnx(lambda x: {"y": function(x)}, shape, {}))
    x = np.random.default_rng(0).random((3, *shape), np.float32)
    compiled = jax.jit(function).lower(x).compile({"xla_backend_optimization_level": 0})
    expected = np.asarray(compiled(x))
    for n in (1, 3):
        (actual,) = session.run(None, {"image": x[:n]})
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(actual, expected[:n], rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.where(x > 0.5, jnp.sqrt(x), -x) ** 3 + jnp.clip(x, 0.2, 0.7),
        lambda x: jax.nn.gelu(x, approximate=False) + jax.nn.silu(x) + jax.lax.rsqrt(x + 1),
        lambda x: jax.nn.softmax(x.reshape(x.shape[0], -1)),
        lambda x: jax.lax.slice_in_dim(jnp.einsum("nhwc,nvwc->nhv", x, x), 1, 5, 2, axis=2),
        lambda x: jnp.concatenate([x.transpose(0, 3, 1, 2).mean(2), x.max((1, 2))[:, :, None]], 2),
        lambda x: jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
        ),
        lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 1), (0, 0)), constant_values=3.0),
        lambda x: jax.lax.map(
            lambda row: row * 2 + x[:, 0], jnp.arange(12.0).reshape(3, 4, 1)
        ).swapaxes(0, 1),
        lambda x: jnp.stack([x.sum((1, 2)), jnp.ones_like(x[:, 0].max(1))], 1) + jnp.arange(3.0),
        lambda x: jnp.roll(x, (1, -2), (1, 2))[:, 1:] + x[:, jnp.array([3, 0, 3, 1, 5])],
        lambda x: (jnp.isfinite(x) & ~(x > 0.3)).astype(jnp.float32),
    ],
)
def test_operations(function):
    with jax.numpy_rank_promotion("allow"):
        assert_same(function, (6, 4, 3))


SMALL = {
    "convnext": {"blocks": (1, 2), "widths": (4, 8)},
    "deeplab": {"backbone": "resnet18d", "hidden": 4, "pooling_size": (2, 2)},
    "densenet": {"growth": 2},
    "mlp": {"hidden": (8,)},
    "preact_resnet": {"widths": (4, 8), "blocks_per_stage": 1},
    "resnet": {"depth": 18, "norm": "group"},
    "resnet9": {},
    "resnext": {"depth": 50},
    "revnet": {"widths": (4, 8), "blocks": (1, 1)},
    "vit": {"width": 12, "blocks": 1, "registers": 2, "pooling": "mean", "layer_scale": 0.1},
    "wider_resnet": {"depth": 16, "a2": True},
}
"""Options of small networks, by ``model.name``."""
ELSEWHERE = {"efficientnet", "regnet", "swin", "pretrained"}
"""Networks that have no small variant: their functions are tested with other options."""


def assert_same_network(network, shape):
    """Assert that the program of a network with drawn arrays computes it."""
    generator = np.random.default_rng(0)

    def draw(leaf):
        if leaf.ndim < 2:
            return generator.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        size = np.sqrt(np.prod(leaf.shape[:-1]))
        return (generator.standard_normal(leaf.shape) / size).astype(leaf.dtype)

    arrays = jax.tree.map(draw, jax.eval_shape(network.init, jax.random.key(0)))
    assert_same(lambda x: network.apply(*arrays, x, train=False)[0], shape)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n in ("densenet", "wider_resnet")))
        for n in SMALL
    ],
)
def test_networks(name):
    section = registry.variants("model")[name](**SMALL[name])
    assert_same_network(section.build((32, 32, 3), 3), (32, 32, 3))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", torchvision_cases.CASES)
def test_networks_of_torchvision(name):
    assert_same_network(torchvision_cases.build(name), (45, 37, 3))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", pretrained_image_cases.CONFIGS)
def test_published_networks(name):
    config = pretrained_image_cases.CONFIGS[name]
    size = pretrained_image_cases.image_size(config)
    assert_same_network(build_model(config), (*size, 3))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    activation = ACTIVATIONS[name]
    assert_same(lambda x: activation.forward(4 * x - 2, activation.default), (4, 2, 3))


def test_no_network_that_labels_images_is_left_out():
    sections = registry.variants("model")
    assert {n for n, s in sections.items() if KINDS[s.task].predicts} == {*SMALL, *ELSEWHERE}


def test_logits_of_masks_get_the_size_of_the_image():
    x = np.random.default_rng(0).random((2, 5, 4, 3), np.float32)
    expected = jax.image.resize(x, (2, 9, 14, 3), "bilinear", antialias=False)
    np.testing.assert_allclose(_upsample(jnp.asarray(x), 9, 14), expected, rtol=1e-5)
    assert_same(lambda x: _upsample(x, 9, 14), x.shape[1:])


def test_an_operation_that_is_not_written_is_named():
    with pytest.raises(UnsupportedError, match="no operation cumsum"):
        to_onnx(lambda x: {"y": jnp.cumsum(x, 1)}, (2, 2, 3), {})


def prepare(path, about):
    """Read an image file as docs/how_to/export.md says."""
    side, size = int(about["resize_shorter_side"]), int(about["center_crop"])
    image = Image.open(path)
    turn = image.getexif().get(0x0112, 1)
    width, height = image.size[::-1] if turn > 4 else image.size
    short, scale = min(width, height), 1
    sides = int(side * width / short), int(side * height / short)
    if image.format == "JPEG":
        shrink = min(width / sides[0], height / sides[1]) / 2
        scale = 2 ** min(int(np.log2(max(shrink, 1))), 3)
        image.draft(None, (image.width // scale, image.height // scale))
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        values = (np.asarray(image).astype(int) + 128) // 257
        image = Image.fromarray(values.astype(np.uint8))
    if isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")
    right, low = width / scale, height / scale
    x = image.width - right if turn in (2, 3, 6, 7) else 0
    y = image.height - low if turn in (3, 4, 7, 8) else 0
    box = x, y, x + right, y + low
    image = image.convert("RGB").resize(sides, Image.Resampling.BILINEAR, box)
    left, top = (round((n - size) / 2) for n in image.size)
    image = image.crop((left, top, left + size, top + size))
    return np.asarray(image, np.float32) / 255


def write_odd_pictures(folder):
    """Write pictures of many kinds; return their paths."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    photo = Image.fromarray(generator.integers(0, 255, (90, 130, 3)).astype(np.uint8))
    for orientation in range(1, 9):
        exif = photo.getexif()
        exif[ExifTags.Base.Orientation] = orientation
        photo.save(folder / f"turned{orientation}.jpg", exif=exif)
    photo.convert("CMYK").save(folder / "cmyk.jpg")
    gray = np.asarray(photo.convert("L"))
    Image.fromarray(gray.astype(np.uint16) * 257).save(folder / "16 bit.png")
    photo.quantize(16).save(folder / "palette.png")
    photo.quantize(16).save(folder / "holes.png", transparency=bytes([0] * 4 + [255] * 12))
    for mode in ("L", "1", "LA", "RGBA"):
        photo.convert(mode).save(folder / f"{mode}.png")
    for suffix in ("gif", "webp", "tiff", "bmp"):
        photo.save(folder / f"a.{suffix}")
    photo.resize((800, 640)).save(folder / "large.jpeg")
    photo.save(folder / "wrong.jpg", "PNG")
    return sorted(map(str, folder.iterdir()))


@pytest.mark.slow
def test_onnxruntime_predicts_odd_pictures_as_the_command(workplace, capsys):
    (workplace / "colours.py").write_text(vision_cases.RECIPES["colours"])
    vision_cases.write_colours(workplace / "colours")
    folder = initial_run(workplace / "run", recipes.load("colours.py"))
    write_classes(folder, Outputs(vision_cases.CLASSES))
    fnet_command("export", "run", "--format", "onnx")
    assert "ran it on batches of 1 and 3: logits differ by at most " in capsys.readouterr().err
    session = session_of("run/model.onnx")
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == list(vision_cases.CLASSES)
    assert json.loads(about["mean"]) == [0.485, 0.456, 0.406]
    paths = write_odd_pictures(workplace / "odd")
    assert len(paths) >= 20
    images = np.stack([prepare(path, about) for path in paths])
    (predictions,) = session.run(["predictions"], {"image": images})
    np.testing.assert_allclose(predictions, Predictor("run")(paths), atol=1e-4)
