"""What the benchmarks share: interleaved medians, programs, fresh processes, Markdown tables."""

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
    """Seconds a call takes, by name: the median over rounds.

    Each round calls every function once, so that a machine that slows down slows
    all of them down. A first call of each is not counted.

    Args:
      functions: to be called without arguments; JAX arrays they return are waited for.
      rounds: how often each is timed.
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
    """Of each name's functions, all of them `interleaved`, the seconds of the fastest."""
    each = {(name, i): f for name, of in candidates.items() for i, f in enumerate(of)}
    seconds = interleaved(each, rounds)
    return {name: min(seconds[name, i] for i in range(len(of))) for name, of in candidates.items()}


def stepping(
    program: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any
) -> Callable[[], Any]:
    """Calls of a step, which give its metrics; each goes on from the state before, given away."""
    box = [state]

    def step() -> Any:
        box[0], metrics = program(box[0], batch)
        return metrics

    return step


def compiled_each_way(lowered: jax.stages.Lowered) -> list[jax.stages.Compiled]:
    """With JAX's default options, and with each of those that `fnet.compile_step` tries."""
    options = ({}, *CANDIDATE_OPTIONS.get(jax.default_backend(), ()))
    return [lowered.compile(compiler_options=o) for o in options]


class Measured(NamedTuple):
    """Bytes of temporaries and seconds a call, by name; no seconds where nothing was run."""

    held: dict[str, int]
    seconds: dict[str, float]


def beside(
    peer: str,
    ways: Mapping[str, jax.stages.Wrapped],
    make: Callable[[], Sequence[Any]],
    rounds: int,
    target: Target | None = None,
) -> Measured:
    """Memory and time of the peer and of what stands beside it.

    Each is compiled with the options that `fnet.compile_step` tries, and the smallest program is
    taken. The peer is timed under JAX's default options as well, and counts as what is faster.

    Args:
      peer: one of the names.
      ways: jitted functions by name.
      make: their arguments.
      rounds: how often each is timed.
      target: a device to compile for instead of this one; nothing is run then.
    """
    shapes = jax.eval_shape(make)
    if target:
        compiled = {name: compile_for(target, way, *shapes) for name, way in ways.items()}
        return Measured({name: temporaries(p) for name, p in compiled.items()}, {})
    lowered = {name: way.lower(*shapes) for name, way in ways.items()}
    programs = {name: [compile_min_memory(low)[0]] for name, low in lowered.items()}
    held = {name: temporaries(smallest) for name, [smallest] in programs.items()}
    programs[peer].append(lowered[peer].compile())
    arrays = make()
    calls = {name: [functools.partial(p, *arrays) for p in of] for name, of in programs.items()}
    return Measured(held, fastest(calls, rounds))


def temporaries(compiled: jax.stages.Compiled) -> int:
    """Bytes of all that is neither an argument nor an output of a compiled program."""
    return peak(compiled).temporaries


def in_a_process(script: str, *arguments: object) -> Any:
    """What a script of this folder prints last when ``--worker`` has it measure, read as JSON.

    It runs in a fresh process: what others have held before does not count.
    """
    command = [sys.executable, "-m", f"benchmarks.{script}", "--worker", *map(str, arguments)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(answer.stdout.splitlines()[-1])
    print(f"{arguments}: {found}", file=sys.stderr, flush=True)
    return found


def markdown(rows: Sequence[Mapping[str, str]], left: int = 1) -> str:
    """A Markdown table with the keys of the first row as header, so many columns to the left."""
    header = list(rows[0])
    lines = [
        header,
        ["---"] * left + ["---:"] * (len(header) - left),
        *([r[h] for h in header] for r in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
