"""Wheels for a machine without internet: a folder of what fnet needs besides JAX.

    python -m benchmarks.wheels                 # here, with internet: dist/wheels, two minutes
    python -m benchmarks --gpu                  # there, in a clone with dist/wheels

The folder takes less than 40 MiB. It has no JAX, and nothing that JAX needs. The benchmarks run
without matplotlib, then without pictures, and without scikit-learn, then without the recipes of
digits. So the folder has neither. Large wheels are compressed again, with LZMA.

There, pip finds out what is missing, and installs it into a folder of its own. The machine's
packages stay as they are. This module needs Python's standard library and pip only.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "dist" / "wheels"
MOST_BYTES = 40 * 2**20
PYTHON, JAX = "3.12", "0.11"
LEFT_OUT = ("matplotlib", "scikit-learn")
FROM_JAX = ("jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy")
"""JAX and what it needs, as their wheels begin."""
_LARGE = 2**21
_GLIBC = 39  # of Ubuntu 24.04

NO_MATPLOTLIB = """
import sys


class Nothing(float):  # as a limit of an axis
    def __new__(cls, *args, **options):
        return super().__new__(cls, 1.0)

    def __getattr__(self, name):
        return Nothing()

    def __call__(self, *args, **options):
        return Nothing()

    def __getitem__(self, key):
        return Nothing()

    def __iter__(self):  # two axes, two limits, handles and labels
        return iter((Nothing(), Nothing()))


for name in "axes backends backends.backend_agg figure font_manager patches ticker".split():
    sys.modules[f"{__name__}.{name}"] = Nothing()
sys.modules[f"{__name__}.figure"].Figure = Nothing


def __getattr__(name):
    return Nothing()
"""
"""A matplotlib whose figures draw nothing."""


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="Folder; it is emptied.")
    parser.add_argument("--python", default=PYTHON, help="Python's version there.")
    parser.add_argument("--jax", default=JAX, help="JAX's version there.")
    args = parser.parse_args()
    size = collect(args.out, args.python, args.jax)
    print(f"{args.out}: {len(list(args.out.iterdir()))} wheels, {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        raise SystemExit(f"wheels: more than {MOST_BYTES / 2**20:.0f} MiB")


def requirements() -> list[str]:
    """Return what training needs, privately too, without JAX and what the folder leaves out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["privacy"]]
    skipped = {*FROM_JAX, *LEFT_OUT}
    return [line for line in lines if _name(line) not in skipped]


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


def collect(folder: Path, python: str, jax: str) -> int:
    """Download the wheels for a version of Python and JAX on Linux, and return their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(_GLIBC, 16, -1)]
    platforms += [f"manylinux{version}_x86_64" for version in (2014, 2010, 1)]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    options += [f"--platform={platform}" for platform in platforms]
    with tempfile.TemporaryDirectory() as downloaded:
        wanted = [f"jax=={jax}.*", *requirements()]
        _pip(["download", "--quiet", "--dest", downloaded, *options, *wanted])
        for wheel in sorted(Path(downloaded).iterdir()):
            if wheel.name.split("-")[0] not in FROM_JAX:
                _copy(wheel, folder / wheel.name)
    return sum(wheel.stat().st_size for wheel in folder.iterdir())


def _copy(wheel: Path, to: Path) -> None:
    """Copy a wheel; a large one is compressed with LZMA, which pip reads as well."""
    if wheel.stat().st_size < _LARGE:
        to.write_bytes(wheel.read_bytes())
        return
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(to, "w") as target:
        for member in source.infolist():
            target.writestr(member, source.read(member), zipfile.ZIP_LZMA)


def install(folder: Path = FOLDER) -> list[str]:
    """Install what is missing, here and for processes that it starts; return names and versions."""
    if not folder.is_dir():
        return []
    packages = folder.parent / "packages"
    sys.path.insert(0, str(packages))
    paths = [str(packages), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    offline = ["--isolated", "install", "--quiet", "--no-index", f"--find-links={folder}"]
    report = _pip([*offline, "--dry-run", "--report=-", *requirements()])
    missing = [
        f"{item['metadata']['name']}=={item['metadata']['version']}"
        for item in json.loads(report)["install"]
    ]
    if missing:
        _pip([*offline, "--no-deps", "--upgrade", f"--target={packages}", *missing])
    if importlib.util.find_spec("matplotlib") is None:
        module = packages / "matplotlib" / "__init__.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(NO_MATPLOTLIB)
        missing.append("no matplotlib, so no pictures")
    importlib.invalidate_caches()
    return missing


def _pip(words: Sequence[str]) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"wheels: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
