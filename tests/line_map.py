"""Which tests run which lines of fnet and train: a plugin of pytest that finds out, and a reader.

A line belongs to a test that ran it, or whose own processes ran it. Lines whose results are kept
for later tests belong to the first test of a file.
"""

import difflib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import coverage
import pytest

MADE = Path("dist/mutations")
"""Folder of coverage's data, the tests' times and the sources as they were."""

_times: Counter[str] = Counter()
_failed: set[str] = set()
_file = ""


def make(root: Path, processes: int = 2) -> None:
    """Run a project's quick tests to find out which lines each runs: 32 minutes of CPU time.

    The project is a copy: its sources move into the folder `MADE`.
    """
    made = root / MADE
    made.mkdir(parents=True)
    paths = f"{root}{os.pathsep}{Path(__file__).parents[1]}"
    environment = os.environ | {"PYTHONPATH": paths, "COVERAGE_FILE": str(made / "data")}
    options = f"-q -n {processes} -p {__name__} -p no:cacheprovider --hypothesis-seed=0 --cov --cov-report="
    command = [sys.executable, "-m", "pytest", *options.split()]
    subprocess.run(command, cwd=root, env=environment, check=False)
    for package in ("fnet", "train"):
        shutil.move(root / package, made / package)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """From now on, lines belong to this test."""
    global _file
    run = coverage.Coverage.current()
    assert run is not None, "a map is made with --cov"
    run.switch_context(item.nodeid)
    run.config.context = item.nodeid  # of processes that the test starts
    os.environ["COVERAGE_PROCESS_CONFIG"] = run.config.serialize()
    if _file != (_file := file_of(item.nodeid)):
        _forget_results()


def _forget_results() -> None:
    """Empty the caches of functions, as the file's tests find them if they run alone."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fnet.", "train.")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the times of a test's phases."""
    _times[report.nodeid] += report.duration
    if report.outcome != "passed":
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the tests' times."""
    if not hasattr(session.config, "workerinput"):
        times = {test: None if test in _failed else round(t, 3) for test, t in _times.items()}
        (MADE / "times.json").write_text(json.dumps(times, indent=0))


class LineMap:
    """A map, for the sources of a folder, which may have changed since it was made.

    Args:
      share: Of the suite's time, to ask about one statement. Tests of the file's own name are not
        counted.

    Attributes:
      known: Tests that ran.
      times: Seconds of those that passed.
    """

    def __init__(self, made: Path, root: Path, share: float = 1 / 16) -> None:
        times = json.loads((made / "times.json").read_text())
        self.known = set(times)
        self.times: dict[str, float] = {test: t for test, t in times.items() if t is not None}
        self._made, self._root, self._share = made, root, share
        self._data = coverage.CoverageData(str(made / "data"))
        self._data.read()
        self._measured = self._data.measured_files()
        self._lines = functools.cache(self._read_lines)

    def _read_lines(self, file: str) -> dict[int, set[str]]:
        """Contexts of each line; a line that changed since has that of imports."""
        measured = [path for path in self._measured if path.endswith(f"/{file}")]
        contexts = self._data.contexts_by_lineno(measured[0]) if measured else {}
        before, now = self._made / file, (self._root / file).read_text().split("\n")
        then = before.read_text().split("\n") if before.is_file() else []
        lines = {n: {""} for n in range(1, len(now) + 1)}
        for b in difflib.SequenceMatcher(None, then, now, autojunk=False).get_matching_blocks():
            for i in range(1, b.size + 1):
                lines[b.b + i] = set(contexts.get(b.a + i, ()))
        return lines

    def is_run(self, file: str, statement: range) -> bool:
        """Whether a test or an import runs a statement, or it changed since."""
        return any(map(self._lines(file).get, statement))

    def tests(self, file: str, statement: range, function: range, own: Sequence[str]) -> list[str]:
        """Tests that must notice a changed statement, in the order to run them.

        First those that run it. Then those of the file's own name, those that run the function,
        and those beside the first ones, which may have found their results; if only an import runs
        it, all that run the file. Of each kind the fastest of each test file come first, then the
        next ones, for a share of the suite's time. The list is empty if nothing runs the statement.
        """
        if not self.is_run(file, statement):
            return []
        first = self._that_run(file, statement)
        files = {file_of(test) for test in first}
        own_tests = [test for test in self.times if file_of(test) in own]
        beside = [test for test in self.times if file_of(test) in files]
        chosen: dict[str, int] = {}
        left = self._share * sum(self.times.values())
        for tests in (
            first,
            self._that_run(file, function),
            beside,
            self._that_run(file, self._lines(file)),
        ):
            for test in in_turn(sorted(tests, key=self.times.get), file_of):
                if test not in chosen and left > 0:
                    left -= self.times[test]
                    chosen[test] = test not in first
        chosen = dict.fromkeys(own_tests, True) | chosen
        order = {name: i for i, name in enumerate(dict.fromkeys(map(file_of, chosen)))}
        return sorted(chosen, key=lambda t: (chosen[t], order[file_of(t)], self.times[t]))

    def _that_run(self, file: str, lines: Iterable[int]) -> set[str]:
        """Tests that run one of the lines."""
        return set().union(*[self._lines(file).get(n, ()) for n in lines]) & self.times.keys()


def in_turn(items: Iterable, group: Callable) -> list:
    """One item of each group, another of each, and so on."""
    numbers: Counter[str] = Counter()

    def turn(item: object) -> int:
        numbers[group(item)] += 1
        return numbers[group(item)]

    return sorted(items, key=turn)


def file_of(test: str) -> str:
    """The file of a test's address."""
    return test.split("::")[0]
