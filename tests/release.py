"""Builds the wheel, as PyPI would get it, and tries it in empty environments beside a user's files.

    python -m tests.release

One environment has the lowest versions of jax, flax and optax that pyproject.toml allows, one
the newest. In each, from a folder that holds a train.py and a configs/ of the user's own: the
recipes are there, digits are trained and evaluated, a config of the user's is trained, and the
user's train.py runs with fnet in it. The exit code is 1 if anything fails.
"""

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

import fnet

model = fnet.layers.abn(4)
params, state = model.init(jax.random.key(0))
y, _ = model.apply(params, state, jnp.ones((2, 3, 4)), train=True)
assert y.shape == (2, 3, 4), y.shape
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


def main() -> int:
    """The program; returns its exit code."""
    with tempfile.TemporaryDirectory() as made:
        wheel = build(Path(made) / "dist")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB", flush=True)
        for name, pins in {"lowest": lowest(), "newest": []}.items():
            if not tried(name, [str(wheel), *pins], Path(made) / name):
                return 1
    return 0


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


def tried(name: str, packages: list[str], folder: Path) -> bool:
    """Whether every command ends well in a new environment with these packages."""
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
        try:
            said = _run([str(programs / program), *words], work)
        except subprocess.CalledProcessError as error:
            print(f"  {program} {' '.join(words)}: failed\n{error.output}")
            return False
        last = said.strip().splitlines()[-1]
        print(f"  {program} {' '.join(words)}: {last}; {time.perf_counter() - began:.0f} s")
    return True


def _run(command: list[str], folder: Path) -> str:
    """What it printed; raises if it fails."""
    ended = subprocess.run(
        command, cwd=folder, text=True, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return ended.stdout


if __name__ == "__main__":
    raise SystemExit(main())
