"""The ``fnet`` command next to a user's own files named train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from image_cases import write_class_folders

ROOT = Path(__file__).parents[3]
MODULE = (sys.executable, "-m", "fnet")
SCRIPT = (sys.executable, "-c", "from fnet.__main__ import main; main()")

RECIPE = """
from train.config import Config, ImageFolder, Mlp, Train

def config():
    data = ImageFolder(path="images", image_size=8, batch_size=4, workers=2)
    return Config(data=data, model=Mlp(hidden=(4,)), train=Train(steps=2))
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a recipe, and a train.py and configs of the user's own."""
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "train.py").write_text("raise RuntimeError('the train.py of the user')")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits.py").write_text("raise RuntimeError('not the recipe')")
    return tmp_path


def run(folder, *command):
    environment = os.environ | {"PYTHONPATH": f".{os.pathsep}{ROOT}"}
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, check=True
    ).stdout


def test_ignores_a_train_module_of_the_user(folder):
    assert "digits" in run(folder, *MODULE, "configs")


@pytest.mark.slow
def test_recipes_and_worker_processes_find_the_program(folder):
    write_class_folders(folder / "images", train=4, test=4)
    assert "2/2" in run(folder, *SCRIPT, "train", "mine.py", "--out", "run")


@pytest.mark.parametrize("words", ["--help", "train --help", "train mine.py --help", "report run"])
def test_help_and_reports_do_not_import_jax(words, folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text('{"name": "run"}')
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    code = f"import sys\nfrom fnet.__main__ import main\nsys.argv = 'fnet {words}'.split()\n"
    code += (
        "try: main()\nexcept SystemExit: pass\nprint({'jax', 'optax', 'grain'} & {*sys.modules})"
    )
    assert run(folder, sys.executable, "-c", code).endswith("\nset()\n")
