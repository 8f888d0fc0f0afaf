"""The folder of wheels for a machine without internet."""

import json
import subprocess
import sys
import zipfile

import pytest

from benchmarks import wheels


def test_folder_has_no_jax_and_nothing_that_benchmarks_run_without():
    names = [wheels._name(line) for line in wheels.requirements()]
    assert {"flax", "optax", "orbax-checkpoint", "grain", "tyro", "rich"} <= set(names)
    assert not {"jax", *wheels.LEFT_OUT} & set(names)


@pytest.fixture
def folder(tmp_path):
    """A folder with one wheel, compressed as large ones are."""
    path, info = tmp_path / "fnet_probe-1.0-py3-none-any.whl", "fnet_probe-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("fnet_probe.py", "VALUE = 3\n" + "# filler\n" * 10_000)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fnet-probe\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    made = tmp_path / "dist" / "wheels"
    made.mkdir(parents=True)
    wheels._LARGE, large = 0, wheels._LARGE
    wheels._copy(path, made / path.name)
    wheels._LARGE = large
    return made


def test_missing_packages_are_installed_offline_into_a_folder_of_their_own(folder, monkeypatch):
    monkeypatch.setattr(wheels, "requirements", lambda: ["numpy", "fnet-probe>=1"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    assert wheels.install(folder) == ["fnet-probe==1.0"]
    assert wheels.install(folder) == []  # it is there now
    values = "import fnet_probe; print(fnet_probe.VALUE, fnet_probe.__file__)"
    seen = subprocess.run([sys.executable, "-c", values], capture_output=True, text=True)
    assert seen.stdout.split() == ["3", str(folder.parent / "packages" / "fnet_probe.py")]
    monkeypatch.setattr(wheels, "requirements", lambda: ["fnet-probe>=2"])
    with pytest.raises(SystemExit, match="fnet-probe>=2"):
        wheels.install(folder)


def test_without_the_folder_nothing_is_installed(tmp_path):
    assert wheels.install(tmp_path / "wheels") == []


def test_without_matplotlib_pictures_are_left_out(tmp_path):
    module = tmp_path / "matplotlib" / "__init__.py"
    module.parent.mkdir()
    module.write_text(wheels.NO_MATPLOTLIB)
    lines = [{"step": i, "train/loss": 2.0 - i, "train/accuracy": 0.1 * i} for i in range(3)]
    code = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(tmp_path)!r})
from train.output import curves, plots
curves.save(json.loads({json.dumps(json.dumps(lines))}), "title", Path("x.png"))
plots.confusion_matrix(__import__("numpy").eye(2), ["a", "b"], "title", Path("y.png"))
import benchmarks.chart
"""
    subprocess.run([sys.executable, "-c", code], check=True)
