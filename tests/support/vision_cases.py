"""Images and masks that a small network learns in seconds, and runs on them."""

import shutil

import numpy as np
from PIL import Image
from program_cases import fnet_command, initial_run

from fnet import layers
from fnet.layer import Layer, serial
from train.config import Config, DeepLab, SegmentationFolder
from train.config.recipes import load
from train.data import Outputs
from train.run.open_run import write_classes
from train.run.run_folder import RunFolder

RECIPE = """
from train.config import Config, DeepLab, Digits, ImageFolder, Optim, PreactResNet
from train.config import SegmentationFolder, Train

RESNET = PreactResNet(widths=(4,), blocks_per_stage=1)

def config():
    return Config(
        name="{0}", data={1}, model={2}, optim={3},
        train=Train(steps={4}, log_every={4}, eval_every={4}),
    )
"""
SGD = "Optim(learning_rate=0.1)"
COLOURS = 'ImageFolder(path="colours", image_size=8, batch_size=20, crop="center")'
HALVES = 'SegmentationFolder(path="halves", ignore=(255,), image_size=16, batch_size=6, scale=(0.9, 1.1))'
ADAM = 'Optim(name="adam", learning_rate=0.05)'
RECIPES = {
    "digits": RECIPE.format("digits", "Digits(batch_size=32, max_shift=0)", "RESNET", SGD, 20),
    "colours": RECIPE.format("colours", COLOURS, "RESNET", SGD, 20),
    "halves": RECIPE.format("halves", HALVES, "DeepLab()", ADAM, 40),
}

CLASSES = ("blue", "green", "red")


def shades(generator, colour, size):
    """Return an image of one class's color with noise."""
    width, height = size
    pixels = generator.integers(0, 90, (height, width, 3))
    pixels[..., 2 - colour] += 150
    return pixels.astype(np.uint8)


def write_colours(root, classes=CLASSES):
    """Write images of one color each, in folders of those names."""
    generator = np.random.default_rng(0)
    for split, n in (("train", 10), ("val", 5)):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(n):
                pixels = shades(generator, label, (12 + i, 10))
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")


def write_halves(root):
    """Write images of two colors side by side, and their masks, whose first row is 255."""
    generator = np.random.default_rng(1)
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    (root / "classes.txt").write_text("\n".join(CLASSES))
    for i in range(15):
        height, width = 24, 20 + 2 * (i % 3)
        left, right = generator.permutation(3)[:2]
        at = int(generator.integers(6, width - 6))
        pixels = shades(generator, left, (width, height))
        pixels[:, at:] = shades(generator, right, (width - at, height))
        mask = np.full((height, width), left, np.uint8)
        mask[:, at:] = right
        mask[0] = 255
        Image.fromarray(pixels).save(root / "images" / f"{i:02}.png")
        Image.fromarray(mask).save(root / "masks" / f"{i:02}.png")


def small(self, image_shape, num_classes) -> Layer:
    """Return a small network in place of `DeepLab`, with logits at a quarter of the size."""
    return serial(
        conv=layers.conv(image_shape[-1], 8, 4, stride=4),
        norm=layers.abn(8),
        logits=layers.conv(8, num_classes, 1),
    )


def write_shapes_run(root):
    """Write ``runs/shapes`` of the segmentation tutorial with initial values, and some data."""
    write_halves(root / "shapes")
    names = ("ground", "disk", "box", "triangle")
    (root / "shapes" / "classes.txt").write_text("\n".join(names))
    data = SegmentationFolder(path=str(root / "shapes"), ignore=(255,), image_size=96)
    folder = initial_run(root / "runs" / "shapes", Config(data=data, model=DeepLab()))
    write_classes(folder, Outputs(names))


# Fixtures: test modules declare them with pytest.fixture.


def small_deeplab(monkeypatch):
    """Make every `DeepLab` small."""
    monkeypatch.setattr(DeepLab, "build", small)


def recipes(workplace, small_deeplab):
    """Recipes with their images in the workplace."""
    for name, text in RECIPES.items():
        (workplace / f"{name}.py").write_text(text)
    write_colours(workplace / "colours")
    write_halves(workplace / "halves")
    return workplace


def run_of(recipes, tmp_path_factory, capsys, rendered):
    """``run_of(recipe)``: folder of a finished run, which is trained once for all tests."""
    shelf = tmp_path_factory.getbasetemp() / "vision"

    def find(recipe):
        if not (shelf / recipe).exists():
            fnet_command("train", f"{recipe}.py", "--out", shelf / recipe)
        capsys.readouterr()
        return shutil.copytree(shelf / recipe, recipes / "runs" / recipe)

    return find


def begun(recipes):
    """``begun(recipe)``: folder of a run that has only a config."""

    def make(recipe):
        folder = recipes / "runs" / recipe
        folder.mkdir(parents=True)
        RunFolder(folder).create()
        RunFolder(folder).write_config(load(str(recipes / f"{recipe}.py")))
        return folder

    return make


def saved(recipes):
    """``saved(recipe)``: folder of a run with a checkpoint of initial values."""
    return lambda name: initial_run(recipes / "runs" / name, load(str(recipes / f"{name}.py"))).path
