"""Recipes: all load and build, and recipes of papers have the published settings."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from image_cases import write_class_folders
from pretrained_folder import write_folder
from program_cases import fnet_command

from train import config as configs
from train.errors import UserError
from train.run.setup import setup


def test_a_recipe_is_listed_with_the_first_line_of_its_docstring():
    text = "Residual network with in-place activated batch norm on 8 x 8 handwritten digits."
    assert configs.recipes.recipes()["digits"] == text


LARGE = (
    *("imagenet_densenet264", "imagenet_resnet101", "imagenet_resnext101_512"),
    *("imagenet_resnext101_batchnorm", "imagenet_resnext152", "imagenet_wider_resnet38"),
    "finetune_private",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LARGE else [])
        for name in sorted(configs.recipes.recipes())
    ],
)
def test_every_recipe_loads_and_builds(name, tmp_path):
    config = configs.recipes.load(name)
    if isinstance(config.data, configs.ImageFolder):  # any folder works
        write_class_folders(tmp_path, train=2, test=2)
        assert replace(config.data, path=str(tmp_path)).load().classes
        if not isinstance(config.model, configs.Pretrained):  # which needs the folder of a model
            network = config.model.build((224, 224, 3), 1000)
            assert jax.eval_shape(network.init, jax.random.key(0))[0]
    elif isinstance(config.model, configs.Pretrained):  # any model works
        write_folder(tmp_path / "model")
        data = replace(config.data, vocabulary=256, context=16)
        model = replace(config.model, path=str(tmp_path / "model"))
        assert setup(replace(config, data=data, model=model), without_data=True).steps > 0
    else:
        assert (
            setup(config, without_data=isinstance(config.data, configs.SegmentationFolder)).steps
            > 0
        )


PEAK = re.compile(r"([\d.]+)\s+MiB\s+at\s+the\s+peak")
CONFIGS = Path(__file__).parents[3] / "configs"
PEAKS = {path.stem: PEAK.search(path.read_text()) for path in CONFIGS.glob("digits*.py")}
STATED_PEAKS = {name: peak[1] for name, peak in sorted(PEAKS.items()) if peak}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATED_PEAKS)
def test_the_peak_memory_is_as_the_recipe_states(name, workplace):
    fnet_command("memory", name, "--out", "out")
    memory = json.loads((workplace / "out" / "memory.json").read_text())
    mebibytes = memory["peak"]["total"] / 2**20
    assert mebibytes == pytest.approx(float(STATED_PEAKS[name]), rel=0.04)


def test_a_recipe_can_give_paths_as_path_objects(workplace):
    head = "from pathlib import Path\nfrom train.config import *\ndef config(): return "
    (workplace / "path.py").write_text(head + 'Config(data=ImageFolder(path=Path("photos/a")))')
    assert configs.recipes.load("path.py") == configs.Config(
        data=configs.ImageFolder(path="photos/a")
    )


def test_a_folder_named_like_a_recipe_does_not_replace_it(workplace):
    # configs/imagenet_resnet101.py loads the recipe imagenet_resnet50.
    base, built = (
        configs.recipes.load("imagenet_resnet50"),
        configs.recipes.load("imagenet_resnet101"),
    )
    other = replace(base, optim=replace(base.optim, learning_rate=0.5))
    (workplace / "imagenet_resnet50").mkdir()
    (workplace / "imagenet_resnet50" / "config.json").write_text(configs.to_json(other))
    assert configs.recipes.load("imagenet_resnet101") == built
    assert configs.recipes.load("imagenet_resnet50") == base
    assert configs.recipes.load("./imagenet_resnet50") == other


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("runs/other", "no other in runs; give"),
        ("runs/own/conf.json", "no conf.json in runs/own (did you mean config.json?)"),
        ("nowhere/own/config.json", "no nowhere in ."),
        ("runs/own", "no config.json in runs/own"),
        ("runs/own/notes.txt", "no config.json in runs/own/notes.txt"),
        ("nothing", "no recipe nothing"),
    ],
)
def test_what_is_missing_on_a_path_is_named(workplace, given, missing):
    (workplace / "runs" / "own").mkdir(parents=True)
    (workplace / "runs" / "own" / "notes.txt").touch()
    if "conf.json" in given:
        (workplace / "runs" / "own" / "config.json").touch()
    with pytest.raises(UserError, match=re.escape(missing)):
        configs.recipes.load(given)


@pytest.mark.parametrize("kind", ["Config", "Mlp"])
def test_refuses_subclasses_in_a_recipe(workplace, kind):
    own = f"from train.config import *\nclass Own({kind}):\n    def build(self, *_): return None\n"
    value = "Own()" if kind == "Config" else "Config(model=Own())"
    (workplace / "own.py").write_text(f"{own}def config(): return {value}")
    with pytest.raises(UserError, match=rf"own\.py: expected {kind}, got Own"):
        configs.recipes.load("own.py")


# mapillary/inplace_abn: experiments/*.json, and top-1 / top-5 from the table of its README, with
# one crop, with ten-crop, and at 320 x 320.
IMAGENET = {
    "resnet34": (configs.ResNet(depth=34), 512, 0.2, "73.27 / 91.34", "75.19 / 92.66", "74.87 / 92.42"),
    "resnet50": (configs.ResNet(depth=50), 512, 0.2, "75.53 / 92.59", "77.04 / 93.57", "76.60 / 93.49"),
    "resnet101": (configs.ResNet(depth=101), 512, 0.2, "77.07 / 93.45", "78.58 / 94.40", "78.25 / 94.19"),
    "resnext101_batchnorm": (configs.ResNeXt(depth=101, stem="3x3", norm="batch"), 256, 0.1, "77.04 / 93.50", "78.72 / 94.47", "77.92 / 94.28"),
    "resnext101": (configs.ResNeXt(depth=101, stem="3x3"), 256, 0.1, "77.70 / 93.78", "79.18 / 94.60", "78.98 / 94.56"),
    "resnext101_512": (configs.ResNeXt(depth=101, stem="3x3"), 512, 0.1, "78.08 / 93.79", "79.52 / 94.66", "79.38 / 94.67"),
    "resnext152": (configs.ResNeXt(depth=152, stem="3x3"), 256, 0.1, "78.28 / 94.04", "79.73 / 94.82", "79.56 / 94.67"),
    "wider_resnet38": (configs.WiderResNet(depth=38), 256, 0.1, "79.72 / 94.78", "81.03 / 95.43", "80.69 / 95.27"),
    "densenet264": (configs.DenseNet(depth=264, stem="3x3"), 256, 0.1, "78.57 / 94.17", "79.72 / 94.93", "79.49 / 94.89"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_recipes_equal_the_published_experiments(name):
    model, batch_size, learning_rate, *published = IMAGENET[name]
    config = configs.recipes.load(f"imagenet_{name}")
    assert config.model == model
    linear = name.startswith("wider")
    assert config.optim == configs.Optim(
        name="sgd",
        learning_rate=learning_rate,
        schedule="linear" if linear else "step",
        decay_epochs=(30.0,),
        decay_rate=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
    )
    data = config.data
    assert (data.batch_size, data.image_size, data.shorter_side) == (batch_size, 224, 256)
    assert (data.crop, data.flip, data.color_jitter, data.lighting) == ("resized", True, 0.4, 0.1)
    assert config.train.epochs == 90
    text = " ".join((configs.recipes.FOLDER / f"imagenet_{name}.py").read_text().split())
    assert all(figure in text for figure in published)


def test_all_nine_published_experiments_have_a_recipe():
    assert {f"imagenet_{name}" for name in IMAGENET} == {
        name for name in configs.recipes.recipes() if name.startswith("imagenet_")
    }
    assert len(IMAGENET) == 9
