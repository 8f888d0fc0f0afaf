"""Mutation testing: change one operator of a core function at a time; a test must fail.

    python -m tests.mutations                               all mutants: hours
    python -m tests.mutations --only "norm.py" --sample 40
    python -m tests.mutations --quick --minutes 60          a table by package, for its page
    python -m tests.mutations --list

A mutant is addressed by file, function, operator and a running number, as in
``fnet/layers/norm.py::_backward: drop factor 2``. The tests that run its line must notice it, and
those of the file's own name. Which tests run a line is measured first, if `--map` or if
dist/mutations is missing: 32 minutes of CPU time. A test that fails must pass without the mutant. The exit
code is 1 if a mutant survives that is not in `EQUIVALENT`.
"""

import argparse
import ast
import compileall
import contextlib
import copy
import functools
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NamedTuple

import hypothesis
import pytest
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from tests import line_map
from tests.line_map import LineMap, in_turn

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    *("fnet", "train", "tests", "configs", "benchmarks", "docs", "pyproject.toml", "mkdocs.yml"),
    *("Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
)
TIME_LIMIT = 600
"""Seconds after which a test run is stopped."""

EQUIVALENT = {
    "fnet/autodiff/per_example/parameter_gradients.py::_Part.squared_norms: drop USub 1": "equations whose terms are summed have one array of data",
    "fnet/autodiff/per_example/parameter_gradients.py::FactoredGradients.sum_and_products: change number 17": "the other factor is 0",
    "fnet/cpu/workspaces.py::_ynnpack_workspace: swap Mult 1": "XLA gives no transposed convolution to YNNPACK (jaxlib 0.10, 0.12)",
    "fnet/autodiff/per_example/ghost_norm.py::squared_norms: swap Lt 1": "either way, if both cost the same",
    "fnet/autodiff/per_example/parameter_gradients.py::InChunks.whole: change number 2": "JAX takes the last chunk for a number beyond it",
    "fnet/jaxpr/axes.py::is_linear_in: change number 3": "an equation rounds both to an exponent and a mantissa, or neither",
    "fnet/privacy/accounting.py::calibrate_noise_multiplier: change number 4": "the start of a search",
    "fnet/fsdp.py::_ShardResults.equation: change number 1": "a new reference has one operand",
    "fnet/generate.py::sample_token: drop USub 2": "logits are [batch, vocabulary]",
    "fnet/generate.py::sample_token: drop USub 11": "logits are [batch, vocabulary]",
    "fnet/layers/abn.py::_invert: swap Lt 1": "an inverse itself stops at the smallest output of its dtype",
    "fnet/memory/regions.py::_roots: swap Lt 1": "the same roots are tried twice",
    "fnet/testing.py::assert_peak.check: swap Lt 1": "warns of a peak that shrank by exactly 1 %",
    "fnet/optim/compact.py::_Step.__call__: change number 7": "rounding errs by half a unit at most",
    "fnet/optim/compact.py::_Step.__call__: drop term 10": "a hash of values, which differ between moments",
    "fnet/optim/compact.py::_store_momentum: swap Gt 1": "a CPU converts 0 / 0 to the integer 0",
    "fnet/privacy/sensitivity.py::_draw.powers: change number 2": "another random number",
    "fnet/privacy/sampling.py::_Draws.__call__: swap Gt 1": "all rows, chosen from all rows and sorted",
    "fnet/privacy/sampling.py::PoissonSampling: change number 2": "bands * batch_size is at most examples",
    "train/tasks/preference.py::build.dpo: change number 3": "JAX takes the last element for an index beyond it",
    "train/data/decode.py::_rgb: swap And 1": "Pillow converts a palette to the same colors by RGBA",
    "train/output/progress.py::Progress.__init__: change number 1": "refreshes of a terminal in a second",
    "train/output/progress.py::Progress._steady: change number 1": "every value has a character",
    "train/run/evaluation.py::Evaluator.__init__.add_batch: change number 8": "labels and predictions have one shape",
    "train/data/order.py::ShuffledBatches.__init__: change number 24": "any negative size is -1 to NumPy",
    "train/run/checkpoints.py::load_network.published: change number 1": "shapes do not depend on the key",
    "train/run/checkpoints.py::Checkpoints.restore_network.read: change number 1": "shapes do not depend on the key",
    "train/data/order.py::ShuffledBatches.__init__: change number 12": "another irrational number spreads as well",
    "train/data/order.py::_ShuffledLanes.__init__: change number 4": "size of a cache",
    "fnet/jaxpr/axes.py::_convolution: swap Gt 1": "one part is all of an axis",
    "fnet/jaxpr/batch_axis.py::BatchAxes._indices: change number 3": "any negative size is -1 to NumPy",
    "fnet/memory/search.py::Planner._paths_of: change number 3": "how many sizes a search tries",
    "fnet/cpu/convolutions.py::_is_mostly_padding: swap GtE 1": "either way, where a measured speed is equal",
    "fnet/memory/regions.py::_Finder._follow: swap Gt 1": "either way, if both make as many bytes",
    "train/data/storage.py::parquet_batches.batches: change number 3": "no row group has one byte",
    "fnet/optim/compact.py::_uniform: change number 1": "another hash",
    "fnet/models/vit.py::_resize_matrix: swap Lt 1": "the weight at distance 2 is 0",
    "fnet/models/vit.py::_resize_matrix: swap LtE 1": "both weights at distance 1 are 0",
    "train/networks/published/network.py::with_head: change number 1": "a width does not depend on tokens",
    "train/networks/published/network.py::with_head: change number 2": "a width does not depend on tokens",
}
"""Address -> why no test can notice this mutant."""

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mirrored(file: str) -> list[str]:
    """The file's own tests: ``tests/layers/test_norm.py`` of ``fnet/layers/norm.py``.

    Defaults of sections and commands are set as ``train`` is imported, which no map shows.
    """
    path = Path(file.removeprefix("fnet/"))
    own = str("tests" / path.with_name(f"test_{path.name}"))
    return [own, *["tests/train/config/test_defaults.py"] * file.startswith("train/")]


FILES = [
    str(path.relative_to(ROOT))
    for package in ("fnet", "train")
    for path in sorted((ROOT / package).rglob("*.py"))
]
"""Files that are mutated."""


class Mutant(NamedTuple):
    """One changed operator.

    Attributes:
      address: File, function, operator and running number.
      file: Path from the root of the repository.
      before: Source of the changed expression.
      after: Its replacement.
      text: The whole file with the change.
      statement: Its lines; of a statement with a body, those above the body.
      function: Lines of the innermost function or class.
    """

    address: str
    file: str
    before: str
    after: str
    text: str
    statement: range
    function: range

    @property
    def package(self) -> str:
        """Folder below fnet or train, or the file itself."""
        return "/".join(self.file.split("/")[:2])


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of the functions in a file, in the order of its lines."""
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]
    numbers: Counter[tuple[str, str]] = Counter()
    found = []
    for function, node, *places in _expressions(ast.parse(source)):
        for operator, new in _changed(node):
            numbers[function, operator] += 1
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            whole, after = source.encode(), ast.unparse(new)
            text = (whole[:begin] + f"({after})".encode() + whole[end:]).decode()
            address = f"{file}::{function}: {operator} {numbers[function, operator]}"
            found.append(Mutant(address, file, whole[begin:end].decode(), after, text, *places))
    return found


def _expressions(tree: ast.Module) -> Iterator[tuple[str, ast.expr, range, range]]:
    """Every expression in a function's body, with the function's qualified name, and the lines of
    the statement and of the function.

    Errors and their messages are left alone: only what a function computes is changed.
    """

    def visit(node: ast.AST, name: str, *places: range) -> Iterator[tuple]:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{name}.{node.name}" if name else node.name
            for child in node.body:
                yield from visit(child, inner, range(0), range(node.lineno, node.end_lineno + 1))
            return
        if isinstance(node, ast.stmt) and places:
            body = getattr(node, "body", None)
            end = max(body[0].lineno, node.lineno + 1) if body else node.end_lineno + 1
            places = range(node.lineno, end), places[1]
        if name and isinstance(node, ast.expr):
            yield name, node, *places
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, name, *places)

    yield from visit(tree, "")


def _changed(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Each way to change the outermost operator of an expression, with the operator's name."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        yield f"swap {type(node.op).__name__}", _with(node, op=_SWAPS[type(node.op)]())
        term = "term" if isinstance(node.op, ast.Add | ast.Sub) else "factor"
        yield f"drop {term}", node.left
        if isinstance(node.op, ast.Add | ast.Mult):
            yield f"drop first {term}", node.right
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        new = _SWAPS[type(node.ops[0])]()
        yield f"swap {type(node.ops[0]).__name__}", _with(node, ops=[new, *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        yield f"swap {type(node.op).__name__}", _with(node, op=_SWAPS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield f"drop {type(node.op).__name__}", node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "change number", ast.Constant(node.value * 2 if node.value else 1)


def _with(node: ast.expr, **changes: object) -> ast.expr:
    new = copy.copy(node)
    for name, value in changes.items():
        setattr(new, name, value)
    return new


def copied(root: Path) -> Path:
    """A copy of what the tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, root / name)
    # By time and size, two changes within a second could look the same.
    compileall.compile_dir(
        root / "fnet", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH
    )
    return root


class Runner:
    """Runs the tests on mutants, in a copy of the project."""

    def __init__(self, root: Path, lines: LineMap, marks: str) -> None:
        self._root, self._lines, self._marks = root, lines, marks
        self._passes = functools.cache(lambda test: self._run([test], None)[0] == 0)

    def outcome(self, mutant: Mutant) -> tuple[str, str]:
        """Whether a mutant is caught, survives or equals the program, and by which test or why."""
        tests = self._lines.tests(
            mutant.file, mutant.statement, mutant.function, mirrored(mutant.file)
        )
        place = self._root / mutant.file
        before = place.read_text()
        place.write_text(mutant.text)
        try:
            code, failed = self._run(tests, self._lines.known) if tests else (0, "")
        finally:
            place.write_text(before)
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            reason = EQUIVALENT.get(mutant.address)
            return ("equal", reason) if reason else ("survived", "" if tests else "not run")
        if "::" in failed and not self._passes(failed):
            self._lines.known.add(failed)
            self._lines.times.pop(failed, None)
            return self.outcome(mutant)
        return "caught", failed or f"pytest's exit code is {code}"

    def _run(self, tests: list[str], known: set[str] | None) -> tuple[int | None, str]:
        """Pytest's exit code, None after `TIME_LIMIT` seconds, and the test that failed.

        With ``known``, also tests of the same files that are not known: new ones and slow ones.
        """
        log = self._root / "failed.txt"
        log.write_text("")
        process = multiprocessing.get_context("forkserver").Process(
            target=_pytest, args=(self._root, self._marks, _Chosen(tests, known, log))
        )
        process.start()
        process.join(TIME_LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
            return None, f"no end after {TIME_LIMIT} s"
        return process.exitcode, log.read_text()


class _Chosen:
    """A plugin of pytest: runs tests in this order and writes the address of one that fails."""

    def __init__(self, tests: list[str], known: set[str] | None, log: Path) -> None:
        self.files = [*dict.fromkeys(map(line_map.file_of, tests))]
        self._order = {test: i for i, test in enumerate(tests)}
        self._known, self._log = known, log

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order, known = self._order, self._known
        new = {i.nodeid for i in items} - known if known is not None else ()
        items[:] = [i for i in items if i.nodeid in order or i.nodeid in new]
        items.sort(key=lambda item: order.get(item.nodeid, len(order)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._log.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def _pytest(root: Path, marks: str, chosen: _Chosen) -> None:
    os.chdir(root)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)  # for processes that tests start
    # One failing example is enough; hypothesis would look for the smallest.
    phases = hypothesis.Phase.explicit, hypothesis.Phase.generate
    hypothesis.settings.register_profile("first", phases=phases, database=None, deadline=None)
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", marks]
    options += ["--hypothesis-seed=0", "--hypothesis-profile=first"]
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        code = pytest.main([*chosen.files, *options], plugins=[chosen])
    os._exit(code)  # without waiting for JAX's threads


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", metavar="PATTERN", default="", help="regex on addresses")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N of the mutants")
    parser.add_argument("--minutes", type=float, help="draw of each package in turn, for a time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--quick", action="store_true", help="leave out the slow tests")
    parser.add_argument("--map", action="store_true", help="measure again which tests run a line")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    every = [m for file in FILES for m in mutants(file, (ROOT / file).read_text())]
    chosen = [m for m in every if re.search(args.only, m.address)]
    draw = random.Random(args.seed)
    if args.sample is not None:
        chosen = draw.sample(chosen, min(args.sample, len(chosen)))
    if args.minutes is not None:
        chosen = in_turn(draw.sample(chosen, len(chosen)), lambda m: m.package)
    if args.list:
        for m in chosen:
            console.print(escape(f"{m.address}: {m.before} -> {m.after}"), soft_wrap=True)
        return 0
    made = ROOT / line_map.MADE
    if args.map or not made.is_dir():
        with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
            line_map.make(copied(Path(folder) / "copy"))
            shutil.rmtree(made, ignore_errors=True)
            shutil.move(Path(folder) / "copy" / line_map.MADE, made)
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder:
        # As in tests/conftest.py, which the preloaded modules come before.
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_COMPILATION_CACHE_DIR": str(made / "compiled"),
        }
        preloaded = "chex flax.linen grain.python jax matplotlib.figure optax pytest scipy.stats"
        multiprocessing.set_forkserver_preload(preloaded.split())
        root = copied(Path(folder) / "copy")
        lines = LineMap(made, root)
        idle = Counter(m.package for m in every if not lines.is_run(m.file, m.statement))
        runner = Runner(root, lines, "not slow" if args.quick else "")
        verdicts: dict[str, Counter[str]] = {}
        end = time.monotonic() + 60 * (args.minutes or float("inf"))
        for m in track(chosen, "mutants", console=console, disable=not console.is_terminal):
            if time.monotonic() > end:
                break
            verdict, reason = runner.outcome(m)
            verdicts.setdefault(m.package, Counter())[verdict] += 1
            change = " ".join(f"{m.before} -> {m.after}".split())
            console.print(escape(f"{m.address}: {change}: {verdict}: {reason}"), soft_wrap=True)
    print(
        "| package | drawn | caught | equal programs | not run, of all |\n|---|---:|---:|---:|---:|"
    )
    sizes = Counter(m.package for m in every)
    for package, of in sorted(verdicts.items()):
        share = f"{idle[package] / sizes[package]:.1%}"
        print(f"| `{package}` | {of.total()} | {of['caught']} | {of['equal']} | {share} |")
    total = sum(verdicts.values(), Counter())
    console.print(f"{total['caught']} of {total.total() - total['equal']} mutants caught")
    return 1 if total["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
