"""A data source, a gradient mode, a network or an activation is one file: the pages' own files."""

import dataclasses
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import jax
import numpy as np
import pytest
from program_cases import assert_one_line_error, exit_code, fnet_command, metrics_of
from registry_cases import copy_tables

from train.config import Config, from_json, recipes, registry, to_json, variants
from train.data import training_batches
from train.run.setup import setup

HOW_TO = Path(__file__).parents[3] / "docs" / "how_to"


def code_of(page):
    """The first block of Python of a page: the file that it is about."""
    return re.search(r"```python\n(.*?)```", (HOW_TO / page).read_text(), re.DOTALL)[1]


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    """What a test adds is gone afterwards."""
    copy_tables(monkeypatch)
    monkeypatch.delenv(registry.PLUGINS, raising=False)


SHORT = ("--train.steps", 4, "--train.log-every", 2)


@pytest.mark.parametrize(
    ("page", "flags", "section", "name"),
    [
        ("add_a_dataset.md", ("--data.source", "stripes"), "data", "stripes"),
        ("add_a_network.md", ("--model.name", "small_cnn"), "model", "small_cnn"),
    ],
)
def test_a_variant_is_one_file(page, flags, section, name, workplace, monkeypatch, capsys):
    (workplace / "own.py").write_text(code_of(page))
    monkeypatch.setenv(registry.PLUGINS, "own.py")
    fnet_command("train", "digits_mlp", *flags, "--out", "run", *SHORT)
    assert metrics_of(workplace / "run")[-1]["step"] == 4
    fnet_command("eval", "run")
    capsys.readouterr()
    assert exit_code("train", "digits_mlp", *flags, "--help") == 0
    assert name in variants(section)
    kind = variants(section)[name]
    output = " ".join(capsys.readouterr().out.split())
    for field in fields(kind):
        assert f"--{section}.{field.name.replace('_', '-')}" in output
    config = recipes.load("run")
    assert isinstance(getattr(config, section), kind)
    assert from_json(to_json(config), "config.json") == config


def test_an_activation_is_one_file(workplace, monkeypatch, capsys):
    (workplace / "own.py").write_text(code_of("add_an_activation.md"))
    monkeypatch.setenv(registry.PLUGINS, "own.py")
    exit_code("train", "digits", "--help")
    assert "arcsinh" in capsys.readouterr().out
    config = recipes.load("digits")
    run = setup(config.replace(model=dataclasses.replace(config.model, activation="arcsinh")))
    assert "asinh" in str(jax.make_jaxpr(run.step)(run.state_shapes, run.batch_shapes))


def test_a_run_without_its_plugin_is_one_line(workplace, monkeypatch, capsys):
    (workplace / "own.py").write_text(code_of("add_a_gradient_mode.md"))
    monkeypatch.setenv(registry.PLUGINS, "own.py")
    fnet_command("train", "digits_mlp", "--grad.mode", "centralized", "--out", "run", *SHORT)
    monkeypatch.delenv(registry.PLUGINS)
    registry._VARIANTS["grad"].pop("centralized")
    assert exit_code("eval", "run") == 2
    assert_one_line_error(
        capsys,
        "grad.mode: expected one of 'attribution', 'clipped', 'mean', 'microbatch', 'per_example', "
        "got 'centralized'",
    )


def test_a_recipe_registers_what_it_defines(workplace):
    source = code_of("add_a_dataset.md")
    recipe = (
        "\nfrom train.config import Config\n\ndef config():\n    return Config(data=Stripes())\n"
    )
    (workplace / "own.py").write_text(source + recipe)
    for _ in range(2):  # the file is run each time
        assert recipes.load("own.py").data.source == "stripes"
    assert "stripes" in variants("data")


@pytest.mark.parametrize("code", ["recipes.load('digits')", "registry.variants('data')"])
def test_a_variant_cannot_take_the_name_of_one_of_fnets(code, workplace, monkeypatch):
    (workplace / "own.py").write_text(code_of("add_a_dataset.md").replace('"stripes"', '"digits"'))
    monkeypatch.setenv(registry.PLUGINS, "own.py")
    # In a process of its own, which has imported neither fnet's variants nor the file.
    code = f"import train.config.{code.partition('.')[0]}; train.config.{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "digits is a variant of fnet, Digits; give Stripes another name" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_like_it", "own.py: ModuleNotFoundError"),
        (None, "own.py: FileNotFoundError"),
    ],
)
def test_a_plugin_that_fails_is_one_line(text, message, workplace, monkeypatch, capsys):
    if text is not None:
        (workplace / "own.py").write_text(text)
    monkeypatch.setenv(registry.PLUGINS, "own.py")
    assert exit_code("train", "digits") == 2
    assert_one_line_error(capsys, f"fnet: FNET_PLUGINS: {message}")


STRIPES = code_of("add_a_dataset.md")


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("    batch_size: Count = 32\n", "", "the class Stripes lacks the field batch_size"),
        ("@dataclass(frozen=True)\n", "", "the class Stripes lacks @dataclass(frozen=True)"),
        ("def load(", "def read(", "Stripes must define load"),
        ("load(self, *, private: bool = False)", "load(self)", "keyword argument 'private'"),
        ("return Dataset(", "return dict(", "Stripes.load must return a Dataset, got dict"),
        (
            "            test=draw(self.examples // 4),\n",
            "",
            "Stripes.load: Dataset.__new__() miss",
        ),
        ("train=draw(self.examples)", "train={}", "Stripes.load: train must be arrays by name"),
        ("augment=add_noise", "augment=3", "Stripes.load: augment must be a function, got 3"),
    ],
)
def test_what_a_source_lacks_is_one_line(was, now, message, workplace, monkeypatch, capsys):
    (workplace / "own.py").write_text(STRIPES.replace(was, now))
    monkeypatch.setenv(registry.PLUGINS, "own.py")
    assert exit_code("train", "digits_mlp", "--data.source", "stripes") == 2
    assert_one_line_error(capsys, message)


def test_training_batches_are_prepared_as_test_batches_without_augmentation():
    names, prepare = {}, "prepare=lambda rows: rows | {'image': 1 - rows['image']}"
    exec(STRIPES.replace("augment=add_noise", prepare), names)
    dataset = names["Stripes"]().load()
    batch = next(training_batches(dataset, 4, seed=0))
    np.testing.assert_array_equal(batch["image"], 1 - dataset.train["image"][batch["row"]])


def test_the_config_package_imports_no_jax():
    code = "import sys, train.config; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert Config().data.source == "digits"
