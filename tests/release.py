"""Builds the wheel, as PyPI would get it, and tries it in empty environments beside a user's files.

    python -m tests.release

One environment has the lowest versions of jax, flax and optax that pyproject.toml allows, one
the newest. In each, from a folder that holds a train.py and a configs/ of the user's own: the
recipes are there, digits are trained and evaluated, a config of the user's is trained, and the
user's train.py runs with fnet and its flax adapters in it. What fails ends it with what was said.
"""

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
}
COMMANDS = (
    ("fnet", "configs"),
    ("fnet", "train", "digits", "--train.steps", "20", "--optim.warmup-steps", "2", "--out", "a"),
    ("fnet", "eval", "a"),
    ("fnet", "train", "mine.py", "--out", "b"),
    ("python", "train.py"),
)


def main() -> None:
    """The program."""
    with tempfile.TemporaryDirectory() as made:
        wheel = build(Path(made) / "dist")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB", flush=True)
        for name, pins in {"lowest": lowest(), "newest": []}.items():
            try_out(name, [str(wheel), *pins], Path(made) / name)


def build(into: Path) -> Path:
    """The wheel, built of the source distribution, which holds all that it takes."""
    _run([sys.executable, "-m", "build", "--outdir", str(into), str(ROOT)], ROOT)
    return next(into.glob("*.whl"))


def lowest() -> list[str]:
    """``["jax==0.10", ...]``: the lower bounds of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    bounds = {r.name: next(s for s in r.specifier if s.operator == ">=") for r in wanted}
    return [f"{name}=={bounds[name].version}" for name in PINNED]


def try_out(name: str, packages: list[str], folder: Path) -> None:
    """Runs every command in a new environment with these packages."""
    began = time.perf_counter()
    programs = folder / "environment" / "bin"
    _run([sys.executable, "-m", "venv", str(programs.parent)], ROOT)
    _run([str(programs / "python"), "-m", "pip", "install", "--quiet", *packages], ROOT)
    listed = _run([str(programs / "python"), "-m", "pip", "freeze"], ROOT)
    versions = [line for line in listed.splitlines() if line.partition("==")[0] in PINNED]
    print(f"{name}: {', '.join(versions)}; {time.perf_counter() - began:.0f} s", flush=True)
    work = folder / "work"
    for path, text in FILES.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(text)
    for program, *words in COMMANDS:
        last = _run([str(programs / program), *words], work).strip().splitlines()[-1]
        took = time.perf_counter() - began
        print(f"  {program} {' '.join(words)}: {last}; {took:.0f} s", flush=True)


def _run(command: list[str], folder: Path) -> str:
    """What it printed.

    Raises:
      SystemExit: if it fails, with its exit code and what it printed.
    """
    ended = subprocess.run(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if ended.returncode:
        raise SystemExit(f"{shlex.join(command)}: exit code {ended.returncode}\n{ended.stdout}")
    return ended.stdout


if __name__ == "__main__":
    main()
