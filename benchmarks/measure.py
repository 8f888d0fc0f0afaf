"""Helpers of the benchmarks: interleaved timing, compiled memory, fresh processes, tables."""

import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fnet.memory import CANDIDATE_OPTIONS, compile_min_memory, peak
from fnet.memory.target import Target, compile_for


def interleaved(functions: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Time functions in turns and return the median seconds per call, by name.

    Each round calls every function once, so that a slow moment of the machine affects all of them.
    The first call of each is not counted.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def fastest(candidates: Mapping[Any, Sequence[Callable[[], Any]]], rounds: int) -> dict[Any, float]:
    """Time all candidates in turns and return the seconds of the fastest one, by name."""
    flat = {(name, i): f for name, fs in candidates.items() for i, f in enumerate(fs)}
    seconds = interleaved(flat, rounds)
    return {name: min(seconds[name, i] for i in range(len(fs))) for name, fs in candidates.items()}


def step_caller(
    program: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any
) -> Callable[[], Any]:
    """Return a function that takes one train step from the last state, which it donates."""
    box = [state]

    def step() -> Any:
        box[0], metrics = program(box[0], batch)
        return metrics

    return step


def compile_with_each_option(lowered: jax.stages.Lowered) -> list[jax.stages.Compiled]:
    """Compile with JAX's default options, and with each of the options of `fnet.compile_step`."""
    options = ({}, *CANDIDATE_OPTIONS.get(jax.default_backend(), ()))
    return [lowered.compile(compiler_options=o) for o in options]


class Measured(NamedTuple):
    """Bytes of temporaries and seconds per call, by name; no seconds if nothing was run."""

    temporaries: dict[str, int]
    seconds: dict[str, float]


def compare(
    baseline: str,
    functions: Mapping[str, jax.stages.Wrapped],
    make_arguments: Callable[[], Sequence[Any]],
    rounds: int,
    target: Target | None = None,
) -> Measured:
    """Measure memory and time of several functions.

    Each is compiled with the options of `fnet.compile_step`, and the smallest program is used. The
    baseline is also timed with JAX's default options, and the faster of the two counts. With a
    ``target``, they are compiled for that device, and nothing is run.
    """
    shapes = jax.eval_shape(make_arguments)
    if target:
        compiled = {name: compile_for(target, f, *shapes) for name, f in functions.items()}
        return Measured({name: temporaries(p) for name, p in compiled.items()}, {})
    lowered = {name: f.lower(*shapes) for name, f in functions.items()}
    programs = {name: [compile_min_memory(low)[0]] for name, low in lowered.items()}
    bytes_by_name = {name: temporaries(smallest) for name, [smallest] in programs.items()}
    programs[baseline].append(lowered[baseline].compile())
    arrays = make_arguments()
    calls = {name: [functools.partial(p, *arrays) for p in ps] for name, ps in programs.items()}
    return Measured(bytes_by_name, fastest(calls, rounds))


def temporaries(compiled: jax.stages.Compiled) -> int:
    """Bytes of the temporaries of a compiled program."""
    return peak(compiled).temporaries


def in_fresh_process(script: str, *arguments: object) -> Any:
    """Run ``python -m benchmarks.SCRIPT --worker ARGUMENTS`` and parse its last line as JSON.

    A fresh process has a memory high-water mark of its own.
    """
    command = [sys.executable, "-m", f"benchmarks.{script}", "--worker", *map(str, arguments)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(answer.stdout.splitlines()[-1])
    print(f"{arguments}: {result}", file=sys.stderr, flush=True)
    return result


def markdown_table(rows: Sequence[Mapping[str, str]], left: int = 1) -> str:
    """Format a Markdown table; ``left`` is the number of left-aligned columns."""
    header = list(rows[0])
    lines = [
        header,
        ["---"] * left + ["---:"] * (len(header) - left),
        *([r[h] for h in header] for r in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
