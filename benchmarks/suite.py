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
      quick: further arguments for ``--quick``, with fewer rounds or cases than all that the first
        page shows. None: not on the first page, and skipped with ``--quick``.
      packages: required distributions.
      path: entry of `PATHS` to pass as ``--path``, or "".
      cpu: whether to run on the CPU only.
      trains: whether it trains for long and takes ``--out``. Its runs stay there until it succeeds,
        so an interrupted benchmark resumes.
    """

    script: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
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
        return "not on the first page" if quick and self.quick is None else ""

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


def ahead_of_time(script: str, device: str) -> Benchmark:
    """Build a benchmark that compiles for a device that is not present."""
    compiler = "libtpu" if device.startswith("v") else "jax-cuda13-plugin"
    return Benchmark(script, ("--target", device), packages=(compiler,), cpu=True)


SUITE = (
    Benchmark("readme", quick=(), cpu=True),
    Benchmark("abn_stack_on_cpu", quick=("--rounds", "1"), cpu=True),
    ahead_of_time("abn_stack_ahead_of_time", "h100"),
    ahead_of_time("abn_stack_ahead_of_time", "v5e"),
    Benchmark("abn_against_torch", packages=("torch",), cpu=True),
    Benchmark("abn_bfloat16", cpu=True),
    Benchmark("resnet50_step", quick=(), cpu=True),
    Benchmark("reversible_grid"),
    Benchmark("vision_networks"),
    ahead_of_time("vision_networks", "h100"),
    Benchmark("cpu_convolutions", packages=("torch",), cpu=True),
    Benchmark("cpu_workspaces", cpu=True),
    Benchmark("max_pool"),
    ahead_of_time("max_pool", "h100"),
    Benchmark("cifar10", path="cifar10", trains=True),
    Benchmark("linear_cross_entropy"),
    ahead_of_time("linear_cross_entropy", "h100"),
    ahead_of_time("gpu_ahead_of_time", "h200"),
    Benchmark("pixel_cross_entropy"),
    Benchmark("accumulation"),
    Benchmark("fsdp", cpu=True),
    ahead_of_time("host_state", "v5e"),
    ahead_of_time("fsdp", "h100"),
    ahead_of_time("fsdp", "v5e"),
    Benchmark("attribution", packages=("scikit-learn", "scipy"), cpu=True),
    Benchmark("correlated_noise", packages=("jax_privacy",)),
    ahead_of_time("accumulation", "h100"),
    Benchmark("optimizer_in_backward"),
    ahead_of_time("optimizer_in_backward", "h100"),
    Benchmark("lora"),
    ahead_of_time("lora", "h100"),
    Benchmark("compact_optimizer", path="text", trains=True),
    Benchmark("attention"),
    Benchmark("budgets"),
    Benchmark("fitted_steps", cpu=True),
    Benchmark("foreign_steps", cpu=True),
    Benchmark("random_steps", packages=("hypothesis",), cpu=True),
    Benchmark("torch_memory_budget", packages=("torch",), cpu=True),
    Benchmark("planning", packages=("equinox", "dm-haiku"), cpu=True),
    Benchmark("clipped_grad"),
    Benchmark("clipped_grad_peers", quick=("--rounds", "7"), cpu=True),
    Benchmark("clipped_grad_models", cpu=True),
    Benchmark("clipped_grad_slow_paths", packages=("equinox",), cpu=True),
    Benchmark("peers_tests", packages=("chex", "dp_accounting", "pytest"), cpu=True),
    Benchmark("batched"),
    Benchmark("attention_context", path="text", trains=True),
    Benchmark("transformer_step", quick=("--rounds", "3", "--policies", "segments"), cpu=True),
    Benchmark("vit_memory", cpu=True),
    ahead_of_time("transformer_step", "h100"),
    Benchmark("selective_scan"),
    Benchmark("generation"),
    Benchmark("text_recipes", path="text", trains=True),
    Benchmark("digits_samples"),
    Benchmark("data_sources", packages=("pyarrow",), path="cifar10", cpu=True),
    Benchmark("checkpoint_memory", cpu=True),
    Benchmark("loop_overhead"),
    Benchmark("import_time"),
    Benchmark("kills"),
    Benchmark("soak", cpu=True),
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
