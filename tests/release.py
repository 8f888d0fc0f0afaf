"""Build the wheel as for PyPI and try it in empty environments, next to a user's files.

    python -m tests.release

One environment has the lowest versions of jax, flax and optax that pyproject.toml allows, the
other the newest. In each, the commands below run in a folder with a train.py and a configs/ of the
user's own, which comes first on the path. The script ends with the output of the first command
that fails.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PINNED = ("jax", "flax", "optax")

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
    """Build the wheel and try it in both environments."""
    with tempfile.TemporaryDirectory() as made:
        wheel = build(Path(made) / "dist")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB", flush=True)
        for name, pins in {"lowest": lowest(), "newest": []}.items():
            try_out(name, [str(wheel), *pins], Path(made) / name)


def build(into: Path) -> Path:
    """Build the wheel from the source distribution and return its path."""
    _run([sys.executable, "-m", "build", "--outdir", str(into), str(ROOT)], ROOT)
    return next(into.glob("*.whl"))


def lowest() -> list[str]:
    """Return the lower bounds of pyproject.toml: ``["jax==0.10", ...]``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    bounds = {r.name: next(s for s in r.specifier if s.operator == ">=") for r in wanted}
    return [f"{name}=={bounds[name].version}" for name in PINNED]


def try_out(name: str, packages: list[str], folder: Path) -> None:
    """Run every command in a new environment with these packages."""
    start = time.perf_counter()
    programs = folder / "environment" / "bin"
    _run([sys.executable, "-m", "venv", str(programs.parent)], ROOT)
    _run([str(programs / "python"), "-m", "pip", "install", "--quiet", *packages], ROOT)
    listed = _run([str(programs / "python"), "-m", "pip", "freeze"], ROOT)
    versions = [line for line in listed.splitlines() if line.partition("==")[0] in PINNED]
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
