"""Build the wheel and the source distribution as for PyPI, and try them in empty environments.

    python -m tests.release [--pythons 3.11 3.13]

The oldest supported Python gets the wheel with the lowest versions of all dependencies that
pyproject.toml allows. Each Python gets the wheel with the newest, and the newest Python also
installs the source distribution. For each Python, pip also finds wheels of all extras at once,
without their gigabytes. A Python that this machine lacks is listed. In each environment the
commands below run in a folder with a train.py and a configs/ of the user's own, which comes first
on the path. The script ends with the output of the first command that fails.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SHOWN = ("jax", "flax", "optax", "numpy")

FILES = {
    "train.py": """
import jax
import jax.numpy as jnp
from flax import nnx

import fnet
from fnet.interop import linen as fnet_linen
from fnet.interop import nnx as fnet_nnx

key, x = jax.random.key(0), jnp.ones((2, 3, 4))
model = fnet.layers.abn(4)
ours, _ = model.apply(*model.init(key), x, train=True)
linens, _ = fnet_linen.InPlaceABN(use_running_average=False).init_with_output(key, x)
nnxs = nnx.view(fnet_nnx.InPlaceABN(4, rngs=nnx.Rngs(0)), use_running_average=True)(x)
assert ours.shape == linens.shape == nnxs.shape == x.shape
print("the user's train.py ran")
""",
    "configs/__init__.py": "raise RuntimeError('not the recipes')",
    "configs/digits.py": "raise RuntimeError('not the recipe')",
    "mine.py": """
from train.config import Config, Digits, Mlp, Train


def config():
    return Config(data=Digits(), model=Mlp(hidden=(16,)), train=Train(steps=3))
""",
    "workers.py": """
from train.config import Config, ImageFolder, Mlp, Train


def config():
    data = ImageFolder(path="images", image_size=8, batch_size=4, workers=2)
    return Config(data=data, model=Mlp(hidden=(4,)), train=Train(steps=2))
""",
    "make_images.py": """
import pathlib

from PIL import Image

for i in range(16):
    path = pathlib.Path("images", ("train", "val")[i % 2], ("cat", "dog")[i // 2 % 2], f"{i}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(path)
print("images written")
""",
}
COMMANDS = (
    ("fnet", "configs"),
    ("fnet", "train", "digits", "--train.steps", "20", "--optim.warmup-steps", "2", "--out", "a"),
    ("fnet", "eval", "a"),
    ("fnet", "report", "a"),
    ("fnet", "train", "mine.py", "--out", "b"),
    ("python", "-m", "fnet", "train", "mine.py", "--out", "c"),
    ("python", "make_images.py"),
    ("fnet", "train", "workers.py", "--out", "d"),
    ("python", "train.py"),
)


def main() -> None:
    """Build both distributions and try them in every environment."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--pythons", nargs="+", default=supported(), help="Versions of Python, oldest first."
    )
    pythons = {version: interpreter(version) for version in parser.parse_args().pythons}
    found = {version: path for version, path in pythons.items() if path}
    if not found:
        raise SystemExit(f"release: none of the Pythons {', '.join(pythons)} is installed")
    with tempfile.TemporaryDirectory() as made:
        wheel, source = build(Path(made) / "dist")
        for path in (wheel, source):
            print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)
        for version, python in found.items():
            count = find_extras(python, wheel, Path(made) / "extras")
            print(f"Python {version}, all extras: {count} packages", flush=True)
        oldest, newest = supported()[0], list(found)[-1]
        tries = [
            *((v, "lowest versions", [str(wheel), *lowest()]) for v in found if v == oldest),
            *((version, "newest versions", [str(wheel)]) for version in found),
            (newest, "source distribution", [str(source)]),
        ]
        for i, (version, name, packages) in enumerate(tries):
            python = found[version]
            try_out(f"Python {version}, {name}", python, packages, Path(made) / str(i))
            shutil.rmtree(Path(made) / str(i))
    if missing := [version for version in pythons if version not in found]:
        print(f"not tried, not installed: Python {', '.join(missing)}")


def supported() -> list[str]:
    """Return the versions of Python that pyproject.toml lists, oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    return sorted(listed, key=lambda version: int(version.partition(".")[2]))


def interpreter(version: str) -> str | None:
    """Return a working Python of this version, from the path or from pyenv; None without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in candidates:
        try:
            subprocess.run([candidate, "-c", "import ensurepip"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue  # absent, without pip, or a pyenv shim whose version is not selected
        return candidate
    return None


def build(into: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it; return wheel and source."""
    _run([sys.executable, "-m", "build", "--outdir", str(into), str(ROOT)], ROOT)
    return next(into.glob("*.whl")), next(into.glob("*.tar.gz"))


def lowest() -> list[str]:
    """Return the lower bounds of all dependencies: ``["jax==0.10", ...]``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    bounds = {r.name: next(s for s in r.specifier if s.operator == ">=") for r in wanted}
    return [f"{name}=={bound.version}" for name, bound in bounds.items()]


def find_extras(python: str, wheel: Path, folder: Path) -> int:
    """Resolve the wheel with all its extras for a Python; return the number of packages.

    Raises:
      SystemExit: if a package has no wheel for it, or if two extras exclude each other.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = f"{wheel}[{','.join(project['optional-dependencies'])}]"
    _run([python, "-m", "venv", str(folder)], ROOT)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    found = folder / "found.json"
    only_find = ["--dry-run", "--only-binary=:all:", "--ignore-installed", f"--report={found}"]
    _run([*command, *only_find, wanted], ROOT)
    count = len(json.loads(found.read_text())["install"])
    shutil.rmtree(folder)
    return count


def try_out(name: str, python: str, packages: list[str], folder: Path) -> None:
    """Run every command in a new environment with these packages."""
    start = time.perf_counter()
    programs = folder / "environment" / "bin"
    _run([python, "-m", "venv", str(programs.parent)], ROOT)
    _run([str(programs / "python"), "-m", "pip", "install", "--quiet", *packages], ROOT)
    listed = _run([str(programs / "python"), "-m", "pip", "freeze"], ROOT)
    versions = [line for line in listed.splitlines() if line.partition("==")[0] in SHOWN]
    print(f"{name}: {', '.join(versions)}; {time.perf_counter() - start:.0f} s", flush=True)
    work = folder / "work"
    for path, text in FILES.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(text)
    for program, *words in COMMANDS:
        last = _run([str(programs / program), *words], work).strip().splitlines()[-1]
        seconds = time.perf_counter() - start
        print(f"  {program} {' '.join(words)}: {last}; {seconds:.0f} s", flush=True)


def _run(command: list[str], folder: Path) -> str:
    """Run a command with ``folder`` first on Python's path and return its output.

    Raises:
      SystemExit: if it fails, with its exit code and output.
    """
    process = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": "."},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)}: exit code {process.returncode}\n{process.stdout}")
    return process.stdout


if __name__ == "__main__":
    main()
