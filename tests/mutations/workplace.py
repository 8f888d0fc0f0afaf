"""A copy of the repository, where a change is made, its tests run, and the change is taken back."""

import compileall
import contextlib
import multiprocessing
import os
import re
import shutil
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NamedTuple

import hypothesis
import pytest

from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("fnet", "train", "tests", "configs", "pyproject.toml")
LIMIT = 900
"""Seconds after which tests are taken to have no end."""

# Imported once, by the process that all others are forked from: most of what a test takes.
_PRELOADED = ["chex", "flax.linen", "hypothesis", "jax", "jax.numpy", "optax", "pytest"]
_ENVIRONMENT = {
    # As in tests/conftest.py, which these modules come before.
    "JAX_PLATFORMS": "cpu",
    # Most programs are the same with a mutation and without.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


class Outcome(NamedTuple):
    """What the tests of a mutation said.

    Attributes:
      caught: whether one of them failed.
      text: which one, or what went wrong.
    """

    caught: bool
    text: str


def prepare(compiled: Path) -> None:
    """Before the first test: where compiled programs are kept, and what is imported but once."""
    os.environ.update(_ENVIRONMENT, JAX_COMPILATION_CACHE_DIR=str(compiled))
    multiprocessing.set_forkserver_preload(_PRELOADED)


class Workplace(NamedTuple):
    """A copy of the repository.

    Attributes:
      root: of the copy.
    """

    root: Path

    @classmethod
    def create(cls, root: Path) -> "Workplace":
        """Copies what tests need."""
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, root / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, root / name)
        # By time and size, two changes within a second may look the same.
        checked = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(root / "fnet", quiet=1, invalidation_mode=checked)
        return cls(root)

    def run(self, tests: str, select: str) -> tuple[int | None, str]:
        """Pytest's exit code and what it wrote; after `LIMIT` seconds, None."""
        said = self.root / "said.txt"
        process: BaseProcess = multiprocessing.get_context("forkserver").Process(
            target=_pytest, args=(self.root, tests, select, said)
        )
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
            return None, f"no end after {LIMIT} s"
        return process.exitcode, said.read_text()

    def outcome(self, mutation: Mutation) -> Outcome:
        """Runs the tests with the change, and takes it back."""
        place = self.root / mutation.file
        before = place.read_text()
        try:
            changed = mutation.apply(self.root)
        except ValueError as error:
            return Outcome(False, str(error))
        place.write_text(changed)
        try:
            code, said = self.run(mutation.tests, mutation.select)
        finally:
            place.write_text(before)
        if code == pytest.ExitCode.OK:
            return Outcome(False, f"SURVIVED {mutation.tests} -k '{mutation.select}'")
        failed = re.search(r"^FAILED \S*::(.*?)(?: - .*)?$", said, re.MULTILINE)
        if code != pytest.ExitCode.TESTS_FAILED or not failed:
            return Outcome(False, f"the tests did not run, pytest's exit code is {code}: {said}")
        return Outcome(True, failed[1])


def _pytest(root: Path, tests: str, select: str, said: Path) -> None:
    """Runs tests of a copy, in a process of its own, and ends with pytest's exit code."""
    os.chdir(root)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
    # One failing example is enough; hypothesis would look for the smallest.
    phases = hypothesis.Phase.explicit, hypothesis.Phase.generate
    hypothesis.settings.register_profile("first", phases=phases, database=None)
    hypothesis.settings.load_profile("first")
    with said.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        how = ["-x", "-q", "--tb=no", "--hypothesis-seed=0", "-p", "no:cacheprovider"]
        code = pytest.main([tests, "-k", select, "-m", "", *how])
    os._exit(code)  # without waiting for what JAX has started
