"""Memory in addition to the training state while checkpoints are written and read on CPU.

    python -m benchmarks.checkpoint_memory

The state has two arrays of 8 MiB per layer and one of 32 MiB. It is saved three times, with
donated steps in between, then restored and stepped again. fnet, which also verifies checksums, is
compared with orbax's default options, which save in the background. Each runs in a fresh process,
interleaved. The memory is the process's peak above the state, as a fraction of the state; medians
are reported. Seconds are from the first save until the last one is on disk, including the steps.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import in_fresh_process, markdown_table
from fnet.cpu.heap import limit_freed_memory
from fnet.memory import tree_bytes
from train.run.checkpoints import Checkpoints
from train.run.process_memory import HighWater

SAVES, STEPS_BETWEEN = 3, 3


class Side(NamedTuple):
    """Functions that save and restore a state."""

    save: Callable[[int, Any], None]
    wait: Callable[[], None]
    restore: Callable[[], Any]


@contextlib.contextmanager
def ours(folder: Path, shapes: Any) -> Iterator[Side]:
    with Checkpoints(folder, keep=2, shapes=shapes) as checkpoints:

        def restore() -> Any:
            restored = checkpoints.restore(shapes)
            assert restored is not None
            return restored.state

        yield Side(lambda i, state: checkpoints.save(i, state, {}), checkpoints.wait, restore)


@contextlib.contextmanager
def orbax(folder: Path, shapes: Any) -> Iterator[Side]:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder, options=options) as manager:
        yield Side(
            lambda i, state: manager.save(i, args=ocp.args.StandardSave(state)),
            manager.wait_until_finished,
            lambda: manager.restore(SAVES, args=ocp.args.StandardRestore(placed)),
        )


SIDES = {"fnet": ours, "orbax": orbax}


@functools.partial(jax.jit, static_argnums=1)
def init(key: jax.Array, layers: int) -> fnet.TrainState:
    kernels = jax.random.normal(key, (2 * layers, 2**21))
    params = [*kernels, jnp.arange(2.0**23)]
    return fnet.TrainState(jnp.int32(0), params, {}, (), None, jax.random.key(1))


@functools.partial(jax.jit, donate_argnums=0)
def step(state: fnet.TrainState) -> fnet.TrainState:
    params = jax.tree.map(jnp.cos, state.params)
    return dataclasses.replace(state, step=state.step + 1, params=params)


def measure(name: str, layers: int) -> dict[str, float]:
    """Measure one side in this process: fractions of the state, and seconds."""

    def stepped(state: fnet.TrainState) -> fnet.TrainState:
        for _ in range(STEPS_BETWEEN):
            state = step(state)
        return jax.block_until_ready(state)

    def fraction(memory: HighWater) -> float:
        peak = memory.bytes()
        assert peak is not None, "this system does not report the peak memory of a process"
        return peak / tree_bytes(shapes)

    state = stepped(init(jax.random.key(0), layers))
    shapes = jax.eval_shape(lambda: state)
    with tempfile.TemporaryDirectory() as folder, SIDES[name](Path(folder) / "c", shapes) as side:
        memory, start = HighWater(), time.perf_counter()
        for i in range(1, SAVES + 1):
            side.save(i, state)
            state = stepped(state)
        side.wait()
        measured = {"seconds": time.perf_counter() - start, "saving": fraction(memory)}
        jax.tree.map(lambda a: a.delete(), state)
        memory = HighWater()
        state = stepped(side.restore())
        measured["resuming"] = fraction(memory) - 1
    return measured


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--layers", type=int, default=32, help="Layers of the state.")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        limit_freed_memory()
        print(json.dumps(measure(args.worker[0], int(args.worker[1]))))
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for _ in range(args.rounds):
        for name, results in runs.items():
            results.append(in_fresh_process("checkpoint_memory", name, args.layers))
    sides = {
        name: {key: statistics.median(run[key] for run in results) for key in results[0]}
        for name, results in runs.items()
    }
    rows = [{"": name} | {k: f"{v:.2f}" for k, v in side.items()} for name, side in sides.items()]
    print(markdown_table(rows))
    claimed = claims(sides["fnet"], sides["orbax"], args.layers)
    publish(claimed, args, "jax", "jaxlib", "orbax-checkpoint")


def claims(ours: dict[str, float], theirs: dict[str, float], layers: int) -> list[Claim]:
    """Claims from the medians of both sides."""
    mebibytes = tree_bytes(jax.eval_shape(lambda: init(jax.random.key(0), layers))) >> 20
    state, baseline = (
        f"a state of {mebibytes} MiB on CPU",
        "orbax in the background, default options",
    )
    saved, restored = f"{state}, saved between steps", f"{state}, restored and stepped"
    fraction, kind = "memory above it, as a fraction of it", "measured memory"
    saving, seconds = (ours[key] / theirs[key] for key in ("saving", "seconds"))
    return [
        Claim(f"{saved}: {fraction}", "the state", ours["saving"], "< 0.5", kind),
        Claim(f"{restored}: {fraction}", "the state", ours["resuming"], "< 0.5", kind),
        Claim(f"{saved}: memory above it", baseline, saving, kind=kind),
        Claim(
            f"{saved}: time until all are on disk, with checksums", baseline, seconds, kind="time"
        ),
    ]


if __name__ == "__main__":
    main()
