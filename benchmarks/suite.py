"""Benchmarks that `python -m benchmarks` runs, their requirements and their quick options."""

import ast
import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

PATHS = {"text": "a text file, such as tinyshakespeare", "cifar10": "a folder with train/, test/"}
"""Data that some benchmarks need, by option."""


class Benchmark(NamedTuple):
    """A script of this folder and how to run it.

    Attributes:
      script: name of the script, without ``.py``.
      arguments: arguments that are always passed.
      quick: further arguments for ``--quick``, with fewer rounds or cases. They do not change the
        cases of claims. None: skipped with ``--quick``.
      packages: required distributions.
      path: entry of `PATHS` to pass as ``--path``, or "".
      cpu: whether to run on the CPU only.
      trains: whether it trains for long and takes ``--out``. Its runs stay there until it succeeds,
        so an interrupted benchmark resumes.
    """

    script: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = ()
    packages: tuple[str, ...] = ()
    path: str = ""
    cpu: bool = False
    trains: bool = False

    @property
    def name(self) -> str:
        """Name of the script and the device it compiles for."""
        return "_".join([self.script, *(a for a in self.arguments if not a.startswith("-"))])

    @property
    def summary(self) -> str:
        """First line of the script's docstring, read without importing it."""
        spec = importlib.util.find_spec(f"benchmarks.{self.script}")
        assert spec is not None, self.script
        assert spec.origin is not None, self.script
        text = ast.get_docstring(ast.parse(Path(spec.origin).read_text()))
        return (text or "").split("\n")[0]

    def reason_to_skip(self, paths: Mapping[str, str | None], quick: bool) -> str:
        """Reason why it cannot run, or ""."""
        missing = [name for name in self.packages if not _is_installed(name)]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if self.path and not paths.get(self.path):
            return f"needs --{self.path}: {PATHS[self.path]}"
        return "skipped by --quick" if quick and self.quick is None else ""

    @property
    def environment(self) -> dict[str, str]:
        """Additional environment variables."""
        return {"JAX_PLATFORMS": "cpu"} if self.cpu else {}

    def command(self, paths: Mapping[str, str | None], quick: bool, runs: Path) -> list[str]:
        """Command line; ``runs`` is the folder of its training runs."""
        words = [sys.executable, "-m", f"benchmarks.{self.script}", *self.arguments]
        if self.path:
            words += ["--path", str(paths[self.path])]
        if self.trains:
            words += ["--out", str(runs)]
        return words + list(self.quick or ()) * quick


def ahead_of_time(script: str, device: str, quick: tuple[str, ...] | None = ()) -> Benchmark:
    """Build a benchmark that compiles for a device that is not present."""
    compiler = "libtpu" if device.startswith("v") else "jax-cuda13-plugin"
    return Benchmark(script, ("--target", device), quick, packages=(compiler,), cpu=True)


SUITE = (
    Benchmark("abn_stack_on_cpu", quick=("--rounds", "3"), cpu=True),
    ahead_of_time("abn_stack_ahead_of_time", "h100"),
    ahead_of_time("abn_stack_ahead_of_time", "v5e", quick=None),
    Benchmark("abn_against_torch", quick=("--rounds", "3"), packages=("torch",), cpu=True),
    Benchmark("abn_bfloat16", quick=("--seeds", "2"), cpu=True),
    Benchmark("resnet50_step"),
    Benchmark("reversible_grid", quick=("--seeds", "1")),
    Benchmark("vision_networks", quick=("--names", "resnet50", "resnext50", "densenet121")),
    ahead_of_time("vision_networks", "h100", ("--names", "resnet50", "resnext50", "densenet121")),
    Benchmark("cpu_convolutions", quick=("--rounds", "3"), packages=("torch",), cpu=True),
    Benchmark("max_pool", quick=("--rounds", "5")),
    ahead_of_time("max_pool", "h100"),
    Benchmark("cifar10", quick=("--epochs", "0"), path="cifar10", trains=True),
    Benchmark("linear_cross_entropy", quick=("--rounds", "3")),
    ahead_of_time("linear_cross_entropy", "h100"),
    Benchmark("pixel_cross_entropy", quick=("--rounds", "3")),
    Benchmark("accumulation", quick=("--rounds", "3")),
    Benchmark("fsdp", quick=("--widths", "128"), cpu=True),
    ahead_of_time("fsdp", "h100", quick=("--widths", "512")),
    ahead_of_time("fsdp", "v5e", quick=None),
    Benchmark("correlated_noise", quick=("--rounds", "3"), packages=("dp_accounting",)),
    ahead_of_time("accumulation", "h100"),
    ahead_of_time("clipped_composition", "h100", quick=None),
    Benchmark("optimizer_in_backward", quick=("--rounds", "5", "--optimizers", "sgd", "adam")),
    ahead_of_time("optimizer_in_backward", "h100", quick=("--optimizers", "sgd", "adam")),
    Benchmark("lora", quick=("--rounds", "3")),
    ahead_of_time("lora", "h100"),
    Benchmark(
        "compact_optimizer",
        quick=("--rounds", "3", "--seeds", "0", "1"),
        path="text",
        trains=True,
    ),
    Benchmark("attention", quick=("--rounds", "5", "--tokens", "2048")),
    Benchmark("budgets", quick=("--rounds", "1", "--problems", "transformer")),
    Benchmark("planning", quick=None, packages=("equinox", "haiku"), cpu=True),
    Benchmark("clipped_grad", quick=("--rounds", "7", "--only", "MLP")),
    Benchmark("clipped_grad_peers", quick=("--rounds", "7"), cpu=True),
    Benchmark("clipped_grad_slow_paths", quick=("--rounds", "5"), packages=("equinox",), cpu=True),
    Benchmark("peers_tests", packages=("chex", "dp_accounting", "pytest"), cpu=True),
    Benchmark("batched", quick=("--rounds", "7", "--networks", "mlp")),
    Benchmark("attention_context", quick=("--quick",), path="text", trains=True),
    Benchmark("transformer_step", quick=("--rounds", "3")),
    Benchmark("vit_memory", quick=None, cpu=True),
    ahead_of_time("transformer_step", "h100", quick=None),
    Benchmark("selective_scan", quick=("--rounds", "3")),
    Benchmark("generation", quick=("--rounds", "5")),
    Benchmark(
        "text_recipes",
        quick=("--seeds", "0", "--recipes", "text_transformer"),
        path="text",
        trains=True,
    ),
    Benchmark("digits_samples", quick=None),
    Benchmark("input_pipeline", quick=("--rounds", "2")),
    Benchmark("data_sources", quick=None, packages=("pyarrow",), path="cifar10", cpu=True),
    Benchmark("checkpoint_memory", quick=("--rounds", "1"), cpu=True),
    Benchmark("loading", quick=("--rounds", "1", "--width", "256", "--blocks", "2"), cpu=True),
    Benchmark("loop_overhead", quick=("--rounds", "2")),
    Benchmark("import_time", quick=("--rounds", "5")),
    Benchmark("kills", quick=("--kills", "5")),
    Benchmark("processes"),
)

GPU = (Benchmark("gpu"),)
"""What ``python -m benchmarks --gpu`` runs."""


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
