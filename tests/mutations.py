"""Mutation testing: change one operator of a core function at a time; a test must fail.

    python -m tests.mutations                               all mutants: hours
    python -m tests.mutations --only "norm.py" --sample 40
    python -m tests.mutations --quick --minutes 60          a table by package, for its page
    python -m tests.mutations --list

A mutant is addressed by file, function, operator and a running number, as in
``fnet/layers/norm.py::_backward: drop factor 2``. The tests of each file first run on the
unchanged copy and must pass. The exit code is 1 if a mutant survives that is not in `EQUIVALENT`.
"""

import argparse
import ast
import compileall
import contextlib
import copy
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

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("fnet", "train", "tests", "configs", "benchmarks", "docs", "pyproject.toml")
TIME_LIMIT = 900
"""Seconds after which a test run is stopped."""

NAMED = {
    "fnet/attribution/scores.py": "tests/attribution/test_scorers.py",
    "fnet/attribution/tracin.py": "tests/attribution/test_inner_products.py tests/attribution/test_scorers.py",
    "fnet/attribution/trak.py": "tests/attribution/test_scorers.py",
    "fnet/autodiff/accumulate.py": "tests/autodiff/test_accumulate.py tests/step/test_step.py",
    "fnet/autodiff/mean.py": "tests/step/test_step.py",
    "fnet/autodiff/per_example/backward.py": "tests/autodiff/per_example/test_clipped.py tests/autodiff/per_example/test_clipped_errors.py",
    "fnet/autodiff/per_example/batch_axis.py": "tests/autodiff/per_example/test_batch_axis.py tests/autodiff/per_example/test_clipped_errors.py tests/autodiff/per_example/test_sensitivity.py",
    "fnet/autodiff/per_example/batching.py": "tests/autodiff/per_example/test_batching.py tests/autodiff/per_example/test_clipped.py",
    "fnet/autodiff/per_example/clipped.py": "tests/autodiff/per_example/test_clipped.py tests/autodiff/per_example/test_clipped_errors.py",
    "fnet/autodiff/per_example/derived.py": "tests/autodiff/per_example/test_derived.py tests/autodiff/per_example/test_parameter_parts.py",
    "fnet/autodiff/per_example/ghost_norm.py": "tests/autodiff/per_example/test_ghost_norm.py tests/autodiff/per_example/test_parameter_parts.py tests/autodiff/per_example/test_clipped.py",
    "fnet/autodiff/per_example/hoist.py": "tests/autodiff/per_example/test_derived.py tests/autodiff/per_example/test_clipped_remat.py",
    "fnet/autodiff/per_example/modes.py": "tests/autodiff/test_modes.py tests/privacy/test_combinations.py",
    "fnet/autodiff/per_example/parameter_gradients.py": "tests/attribution/test_in_run.py tests/autodiff/per_example/test_ghost_norm.py tests/autodiff/per_example/test_parameter_parts.py tests/autodiff/per_example/test_clipped.py",
    "fnet/autodiff/per_example/taps.py": "tests/autodiff/per_example/test_clipped.py tests/autodiff/per_example/test_clipped_remat.py",
    "fnet/diffusion/schedules.py": "tests/diffusion/test_diffusion_schedules.py",
    "fnet/diffusion/targets.py": "tests/diffusion/test_diffusion_targets.py",
    "fnet/fsdp.py": "tests/step/test_fsdp.py",
    "fnet/generate.py": "tests/models/test_language_model.py",
    "fnet/interop/families.py": "tests/interop/test_torch_keys.py tests/interop/test_torch_values.py",
    "fnet/interop/huggingface/decoders.py": "tests/interop/test_interop_huggingface.py",
    "fnet/interop/huggingface/hybrid.py": "tests/interop/test_interop_huggingface.py",
    "fnet/interop/huggingface/rotary.py": "tests/interop/test_interop_huggingface.py",
    "fnet/interop/norm_conversion.py": "tests/interop/test_torch_values.py tests/interop/test_torch_checkpoints.py",
    "fnet/interop/peft.py": "tests/interop/test_lora_peft.py tests/interop/test_lora.py",
    "fnet/jaxpr/axes.py": "tests/jaxpr/test_axes.py tests/memory/test_rows.py",
    "fnet/layers/abn.py": "tests/layers/test_abn.py tests/layers/test_abn_transforms.py tests/layers/test_abn_devices.py",
    "fnet/layers/activations.py": "tests/layers/test_activations.py tests/layers/test_abn.py",
    "fnet/layers/attention_context.py": "tests/layers/test_attention_context.py tests/layers/test_stack.py",
    "fnet/layers/dot_product_attention.py": "tests/layers/test_dot_product_attention.py tests/layers/test_pretrained_layers.py",
    "fnet/layers/dynamic_tanh.py": "tests/layers/test_feed_forward.py",
    "fnet/layers/gated_delta.py": "tests/layers/test_recurrence.py tests/layers/test_mamba.py",
    "fnet/layers/mamba.py": "tests/layers/test_mamba.py tests/layers/test_recurrence.py",
    "fnet/layers/mamba2.py": "tests/layers/test_mamba.py",
    "fnet/losses/classification.py": "tests/losses/test_cross_entropy.py",
    "fnet/losses/segmentation.py": "tests/losses/test_pixel_cross_entropy.py tests/train/tasks/test_segmentation.py",
    "fnet/memory/fit.py": "tests/memory/test_remat_to_fit.py",
    "fnet/memory/graph.py": "tests/memory/test_proposals.py tests/memory/test_residuals.py",
    "fnet/memory/plan.py": "tests/memory/test_plan.py tests/memory/test_largest_size.py",
    "fnet/models/blocks.py": "tests/models/test_models.py",
    "fnet/models/swin.py": "tests/models/test_image_networks.py tests/interop/test_torchvision_networks.py",
    "fnet/optim/__init__.py": "tests/optim/test_optim.py",
    "fnet/privacy/accounting.py": "tests/privacy/test_privacy.py tests/privacy/test_combinations.py",
    "fnet/privacy/correlated.py": "tests/privacy/test_correlated_noise.py",
    "fnet/privacy/noise.py": "tests/privacy/test_correlated_noise.py",
    "fnet/privacy/sampling.py": "tests/train/data/test_poisson.py",
    "fnet/quantization.py": "tests/interop/test_quantization.py",
    "fnet/represented.py": "tests/interop/test_quantization.py tests/interop/test_lora.py",
    "fnet/step.py": "tests/step/test_step.py tests/step/test_skip_nonfinite.py tests/memory/test_plan.py",
    "train/commands/predict.py": "tests/train/commands/test_predict.py tests/train/tasks/test_text_classification.py",
    "train/config/registry.py": "tests/train/config/test_config.py tests/train/config/test_plugins.py",
    "train/data/annotations.py": "tests/train/data/test_annotations.py tests/train/data/test_hostile_files.py",
    "train/data/buckets.py": "tests/train/data/test_text_file.py tests/train/data/test_chat_file.py",
    "train/data/columns.py": "tests/train/data/test_image_table.py",
    "train/data/drawings.py": "tests/train/data/test_annotations.py tests/train/data/test_hostile_files.py",
    "train/data/image_batches.py": "tests/train/data/test_augment.py tests/train/data/test_image_folder.py",
    "train/data/order.py": "tests/train/data/test_shard_order.py",
    "train/data/preference_file.py": "tests/train/tasks/test_preference.py",
    "train/data/sampling.py": "tests/train/data/test_sampling.py tests/train/data/test_poisson.py",
    "train/data/shards.py": "tests/train/data/test_image_shards.py tests/train/data/test_shard_order.py",
    "train/data/splits.py": "tests/train/data/test_image_folder.py tests/train/data/test_arrays.py tests/train/data/test_users.py",
    "train/gradients/clipped.py": "tests/privacy/test_privacy.py tests/privacy/test_combinations.py",
    "train/limits.py": "tests/train/data/test_hostile_files.py",
    "train/output/curves.py": "tests/train/report/test_report.py tests/train/output/test_plots.py",
    "train/output/formats.py": "tests/train/output/test_progress.py tests/train/run/test_metrics.py tests/train/report/test_report.py",
    "train/output/logged.py": "tests/train/run/test_metrics.py tests/privacy/test_privacy.py",
    "train/output/palette.py": "tests/train/output/test_plots.py tests/train/data/test_masks.py",
    "train/report/svg.py": "tests/train/report/test_report.py tests/train/output/test_plots.py",
    "train/run/evaluation.py": "tests/train/run/test_evaluator.py tests/train/commands/test_evaluation.py",
    "train/run/metrics.py": "tests/train/run/test_metrics.py tests/train/run/test_input_wait.py",
    "train/tasks/scores.py": "tests/train/tasks/test_scores.py tests/train/tasks/test_segmentation.py",
    "train/tasks/targets.py": "tests/train/tasks/test_scores.py",
}
"""File -> the tests that must notice a mutant of its functions, where `mirrored` is not enough."""

EQUIVALENT = {
    "fnet/autodiff/per_example/parameter_gradients.py::_Part.squared_norms: drop USub 1": "equations whose terms are summed have one array of data",
    "fnet/cpu/workspaces.py::_ynnpack_workspace: swap Mult 1": "XLA gives no transposed convolution to YNNPACK (jaxlib 0.10, 0.12)",
    "fnet/fsdp.py::_ShardResults.equation: change number 1": "a new reference has one operand",
    "fnet/generate.py::sample_token: drop USub 2": "logits are [batch, vocabulary]",
    "fnet/generate.py::sample_token: drop USub 11": "logits are [batch, vocabulary]",
    "fnet/memory/regions.py::_roots: swap Lt 1": "the same roots are tried twice",
    "fnet/optim/compact.py::_Step.__call__: drop term 10": "a hash of values, which differ between moments",
    "fnet/optim/compact.py::_store_momentum: swap Gt 1": "a CPU converts 0 / 0 to the integer 0",
    "fnet/attribution/in_run.py::_weights: change number 1": "keeps a sum of weights above 0",
    "fnet/privacy/sampling.py::_Draws.__call__: swap Gt 1": "all rows, chosen from all rows and sorted",
    "fnet/privacy/sampling.py::PoissonSampling: change number 2": "bands * batch_size is at most examples",
    "train/tasks/preference.py::build.dpo: change number 3": "JAX takes the last element for an index beyond it",
    "train/data/decode.py::_rgb: swap And 1": "Pillow converts a palette to the same colors by RGBA",
    "train/output/progress.py::Progress.__init__: change number 1": "refreshes of a terminal in a second",
    "train/output/progress.py::Progress._steady: change number 1": "every value has a character",
    "train/run/evaluation.py::Evaluator.__init__.add_batch: change number 8": "labels and predictions have one shape",
    "train/run/metrics.py::Meter._computed: change number 2": "stands for a metric that is absent; 1 is finite, too",
    "train/data/order.py::ShuffledBatches.__init__: change number 24": "any negative size is -1 to NumPy",
    "train/data/order.py::_ShuffledLanes.__init__: change number 4": "size of a cache",
}
"""Address -> why no test can notice this mutant."""

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mirrored(file: str) -> str:
    """The file's own tests: ``tests/layers/test_norm.py`` of ``fnet/layers/norm.py``."""
    path = Path(file.removeprefix("fnet/"))
    return str("tests" / path.with_name(f"test_{path.name}"))


def suite_of(file: str) -> str:
    """Files of tests that must notice a mutant of a file; empty if none is known."""
    own = mirrored(file)
    return NAMED.get(file) or (own if (ROOT / own).is_file() else "")


FILES = [
    str(path.relative_to(ROOT))
    for package in ("fnet", "train")
    for path in sorted((ROOT / package).rglob("*.py"))
    if suite_of(str(path.relative_to(ROOT)))
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
    """

    address: str
    file: str
    before: str
    after: str
    text: str

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
    for function, node in _expressions(ast.parse(source)):
        for operator, new in _changed(node):
            numbers[function, operator] += 1
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            whole, after = source.encode(), ast.unparse(new)
            text = (whole[:begin] + f"({after})".encode() + whole[end:]).decode()
            address = f"{file}::{function}: {operator} {numbers[function, operator]}"
            found.append(Mutant(address, file, whole[begin:end].decode(), after, text))
    return found


def _expressions(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Every expression in a function's body, with the function's qualified name.

    Errors and their messages are left alone: only what a function computes is changed.
    """

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, ast.expr]]:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{name}.{node.name}" if name else node.name
            for child in node.body:
                yield from visit(child, inner)
            return
        if name and isinstance(node, ast.expr):
            yield name, node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, name)

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


def _drawn(chosen: list[Mutant], size: int, draw: random.Random) -> list[Mutant]:
    """A random sample in the order of the mutants; all if there are no more."""
    drawn = set(draw.sample(range(len(chosen)), min(size, len(chosen))))
    return [m for i, m in enumerate(chosen) if i in drawn]


def _in_turn(chosen: list[Mutant], draw: random.Random) -> list[Mutant]:
    """All mutants in a random order, one of each package, another of each, and so on."""
    numbers: Counter[str] = Counter()
    rounds = []
    for m in draw.sample(chosen, len(chosen)):
        numbers[m.package] += 1
        rounds.append((numbers[m.package], m.package, m))
    return [m for *_, m in sorted(rounds, key=lambda r: r[:2])]


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


def run_tests(root: Path, tests: str, marks: str = "") -> tuple[int | None, str]:
    """Pytest's exit code and output, from a fresh process; None after `TIME_LIMIT` seconds."""
    log = root / "pytest.txt"
    process = multiprocessing.get_context("forkserver").Process(
        target=_pytest, args=(root, tests, marks, log)
    )
    process.start()
    process.join(TIME_LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
        return None, f"no end after {TIME_LIMIT} s"
    return process.exitcode, log.read_text()


def _pytest(root: Path, tests: str, marks: str, log: Path) -> None:
    os.chdir(root)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)  # for processes that tests start
    # One failing example is enough; hypothesis would look for the smallest.
    phases = hypothesis.Phase.explicit, hypothesis.Phase.generate
    hypothesis.settings.register_profile("first", phases=phases, database=None)
    hypothesis.settings.load_profile("first")
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        options = ["-x", "-q", "--tb=no", "--hypothesis-seed=0", "-p", "no:cacheprovider"]
        code = pytest.main([*tests.split(), "-m", marks, *options])
    os._exit(code)  # without waiting for JAX's threads


def outcome(root: Path, mutant: Mutant, marks: str = "") -> tuple[bool, str]:
    """Whether a test failed with the mutant in place, and which one."""
    place = root / mutant.file
    before = place.read_text()
    place.write_text(mutant.text)
    try:
        code, log = run_tests(root, suite_of(mutant.file), marks)
    finally:
        place.write_text(before)
    if code == pytest.ExitCode.OK:
        return mutant.address in EQUIVALENT, EQUIVALENT.get(mutant.address, "SURVIVED")
    failed = re.search(r"^(?:FAILED|ERROR) \S*?::(.*?)(?: - .*)?$", log, re.MULTILINE)
    return True, failed[1] if failed else f"pytest's exit code is {code}"


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
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    every = [m for file in FILES for m in mutants(file, (ROOT / file).read_text())]
    chosen = [m for m in every if re.search(args.only, m.address)]
    draw = random.Random(args.seed)
    if args.sample is not None:
        chosen = _drawn(chosen, args.sample, draw)
    if args.minutes is not None:
        chosen = _in_turn(chosen, draw)
    if args.list:
        for m in chosen:
            console.print(escape(f"{m.address}: {m.before} -> {m.after}"), soft_wrap=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder:
        # As in tests/conftest.py, which the preloaded modules come before.
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "compiled"),
        }
        multiprocessing.set_forkserver_preload(["chex", "flax.linen", "jax", "optax", "pytest"])
        root = copied(Path(folder) / "copy")
        marks = "not slow" if args.quick else ""
        passed: set[str] = set()
        survivors = 0
        verdicts: dict[str, Counter[str]] = {}
        end = time.monotonic() + 60 * (args.minutes or float("inf"))
        for m in track(chosen, "mutants", console=console, disable=not console.is_terminal):
            if time.monotonic() > end:
                break
            tests = suite_of(m.file)
            if tests not in passed:
                code, log = run_tests(root, tests, marks)
                if code == pytest.ExitCode.NO_TESTS_COLLECTED:
                    console.print(escape(f"{m.address}: not drawn: {tests} is slow"))
                    continue
                if code != pytest.ExitCode.OK:
                    console.print(escape(f"{tests} must pass without a mutant:\n{log}"))
                    return 1
                passed.add(tests)
            caught, reason = outcome(root, m, marks)
            survivors += not caught
            verdict = "equal" if m.address in EQUIVALENT else "caught" if caught else "survived"
            verdicts.setdefault(m.package, Counter())[verdict] += 1
            change = " ".join(f"{m.before} -> {m.after}".split())
            console.print(escape(f"{m.address}: {change}: {reason}"), soft_wrap=True)
    print("| package | drawn | caught | equal programs |\n|---|---:|---:|---:|")
    for package, of in sorted(verdicts.items()):
        print(f"| `{package}` | {of.total()} | {of['caught']} | {of['equal']} |")
    drawn = sum(of.total() for of in verdicts.values())
    console.print(f"{drawn - survivors} of {drawn} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
