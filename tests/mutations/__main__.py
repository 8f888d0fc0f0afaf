"""Makes one small wrong change after the other in a copy of the repository, and runs its tests.

    python -m tests.mutations
    python -m tests.mutations --only "eps|variance" --jobs 2
    python -m tests.mutations --list

First the same tests run on the copy as it is: they must pass. Then each change must make one of
them fail. The exit code is 1 if a change survives, or if its place is not found exactly once.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.mutations import ROOMS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("fnet", "train", "tests", "configs", "pyproject.toml")
LIMIT = 900
"""Seconds after which tests are taken to have no end."""

_PASSED, _FAILED = 0, 1  # pytest's exit codes; others are of mistakes in how it was called


class Outcome(NamedTuple):
    """What the tests of a mutation said.

    Attributes:
      caught: whether one of them failed.
      text: which one, or what went wrong.
    """

    caught: bool
    text: str


class Workplace(NamedTuple):
    """A copy of the repository, and how tests run in it.

    Attributes:
      root: of the copy.
      compiled: where compiled programs are kept: a mutation changes few of them.
    """

    root: Path
    compiled: Path

    @classmethod
    def create(cls, root: Path, compiled: Path) -> "Workplace":
        """Copies what tests need."""
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, root / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, root / name)
        return cls(root, compiled)

    def run(self, tests: str, select: str) -> tuple[int, str]:
        """Pytest's exit code and what it wrote; after `LIMIT` seconds, -1."""
        environment = os.environ | {
            "PYTHONPATH": str(self.root),
            # Two changes within a second look the same to what is kept of a module.
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, "-m", "pytest", tests, "-k", select, "-m", "", "-x", "-q"]
        command += ["--tb=no", "--hypothesis-seed=0", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True,
                timeout=LIMIT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return -1, f"no end after {LIMIT} s"
        return done.returncode, done.stdout + done.stderr

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
        if code == _PASSED:
            return Outcome(False, f"SURVIVED {mutation.tests} -k '{mutation.select}'")
        failed = re.search(r"^FAILED \S*::(.*?)(?: - .*)?$", said, re.MULTILINE)
        if code != _FAILED or not failed:
            return Outcome(False, f"the tests did not run, pytest's exit code is {code}: {said}")
        return Outcome(True, failed[1])


def main() -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--only", metavar="PATTERN", default="", help="room, file or change")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="show them, run nothing")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    pattern = re.compile(given.only, re.IGNORECASE)
    chosen = [
        (room, mutation)
        for room, mutations in ROOMS.items()
        for mutation in mutations
        if any(pattern.search(text) for text in (room, mutation.file, mutation.what))
    ]
    if given.list:
        console.print(_table(chosen, [f"{m.tests} -k '{m.select}'" for _, m in chosen], "tests"))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        outcomes = _run(console, Path(folder), [mutation for _, mutation in chosen], given.jobs)
    if outcomes is None:
        return 1
    texts = [o.text if o.caught else f"[bold red]{o.text}[/]" for o in outcomes]
    console.print(_table(chosen, texts, "caught by"))
    caught = sum(o.caught for o in outcomes)
    console.print(f"{caught} of {len(outcomes)} mutations are caught")
    return 0 if caught == len(outcomes) else 1


def _run(
    console: Console, folder: Path, mutations: list[Mutation], jobs: int
) -> list[Outcome] | None:
    """The outcome of each mutation, or None if tests fail without any."""
    workplaces: queue.Queue[Workplace] = queue.Queue()
    for i in range(jobs):
        workplaces.put(Workplace.create(folder / str(i), folder / "compiled"))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def each(what, work, items):
            task = progress.add_task(what, total=len(items))

            def one(item):
                workplace = workplaces.get()
                try:
                    return work(workplace, item)
                finally:
                    workplaces.put(workplace)
                    progress.advance(task)

            with ThreadPoolExecutor(jobs) as pool:
                return list(pool.map(one, items))

        selections = sorted({(m.tests, m.select) for m in mutations})
        unchanged = each("unchanged", lambda place, s: place.run(*s), selections)
        wrong = [
            (s, said)
            for s, (code, said) in zip(selections, unchanged, strict=True)
            if code != _PASSED
        ]
        for (tests, select), said in wrong:
            console.print(f"{tests} -k '{select}' does not pass without a change:\n{said}")
        if wrong:
            return None
        return each("changed", lambda place, mutation: place.outcome(mutation), mutations)


def _table(chosen: list[tuple[str, Mutation]], texts: list[str], column: str) -> Table:
    table = Table("room", "file", "what is wrong", column)
    room = None
    for (name, mutation), text in zip(chosen, texts, strict=True):
        if name != room:
            table.add_section()
        table.add_row("" if name == room else name, Path(mutation.file).name, mutation.what, text)
        room = name
    return table


if __name__ == "__main__":
    sys.exit(main())
