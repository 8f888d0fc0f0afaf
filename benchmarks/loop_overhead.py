"""Overhead of the training loop over its compiled step: input, log, progress, checkpoints.

    python -m benchmarks.loop_overhead

A network whose step takes about 20 ms trains on the digits, on a terminal, with the default
intervals: a line every 10 steps, a checkpoint every 500, saved in the background. Blocks of the
loop's steps alternate with blocks of the compiled step alone, on one batch. The result is the
median of the ratios of neighboring blocks.
"""

import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from rich.console import Console

from benchmarks.claims import Claim, argument_parser, publish
from train.config import Checkpoint, Config, Digits, Optim, PreactResNet, Train
from train.run import loop, planning
from train.run.planning import Planned, StepCache

WARMUP = 30
"""Steps before the first timed one."""


def config(width: int, steps: int, checkpoint_every: int) -> Config:
    return Config(
        data=Digits(batch_size=64),
        model=PreactResNet(widths=(width, 2 * width), blocks_per_stage=2),
        optim=Optim(name="sgd", learning_rate=0.05, schedule="constant"),
        train=Train(steps=steps, eval_every=10**6),
        checkpoint=Checkpoint(every=checkpoint_every),
    )


class Interleaved(StepCache):
    """The loop's step; after every ``block`` of them, it times as many steps alone."""

    def __init__(self, block: int, planned: Planned, *rest: Any):
        super().__init__(planned, *rest)
        run = planned.run
        self._block, self._program = block, planned.executable
        self._state: Any = run.init(jax.random.key(0))
        self._batch = next(run.training_batches(0))
        self._steps, self._seconds_before, self._start = 0, 0.0, 0.0
        self.loop_seconds: list[float] = []
        self.step_seconds: list[float] = []

    def __call__(self, state: Any, batch: Any) -> Any:
        if self._steps >= WARMUP and (self._steps - WARMUP) % self._block == 0:
            jax.block_until_ready(state)
            if self._steps > WARMUP:
                self.loop_seconds.append((time.perf_counter() - self._start) / self._block)
            seconds_after = self._time_alone()
            if self._steps > WARMUP:
                self.step_seconds.append((self._seconds_before + seconds_after) / 2)
            self._seconds_before, self._start = seconds_after, time.perf_counter()
        self._steps += 1
        return super().__call__(state, batch)

    def _time_alone(self) -> float:
        """Seconds per step, with one step in flight, as in the loop."""
        start, previous = time.perf_counter(), None
        for _ in range(self._block):
            self._state, metrics = self._program(self._state, self._batch)
            jax.block_until_ready(previous)
            previous = metrics
        jax.block_until_ready(previous)
        return (time.perf_counter() - start) / self._block


def main() -> None:
    parser = argument_parser(__doc__, rounds=8)
    parser.add_argument("--width", type=int, default=32, help="Width of the first stage.")
    every = Checkpoint().every
    parser.add_argument(
        "--checkpoint-every", type=int, default=every, help="Steps between checkpoints."
    )
    args = parser.parse_args()

    block = args.checkpoint_every  # one checkpoint per block, with time to write it
    created: list[Interleaved] = []

    def interleaved(*arguments: Any) -> Interleaved:
        created.append(Interleaved(block, *arguments))
        return created[-1]

    described = config(args.width, WARMUP + args.rounds * block + 1, args.checkpoint_every)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    with (
        mock.patch.object(planning, "StepCache", interleaved),
        tempfile.TemporaryDirectory() as folder,
    ):
        loop.train(described, Path(folder) / "run", resume=False, console=terminal)

    loop_seconds, step_seconds = created[0].loop_seconds, created[0].step_seconds
    pairs = zip(loop_seconds, step_seconds, strict=True)
    overhead = statistics.median(a / b for a, b in pairs) - 1
    step = statistics.median(step_seconds) * 1e3
    print(
        f"step {step:.2f} ms, in the loop {statistics.median(loop_seconds) * 1e3:.2f} ms: "
        f"{overhead:+.1%} (target: below 2 %); {args.rounds} times {block} steps"
    )
    what = f"training loop, a step of {step:.0f} ms: overhead as a fraction"
    claim = Claim(what, "the compiled step alone", overhead, "< 0.02", "time")
    publish([claim], args, "jax", "jaxlib", "orbax-checkpoint", "grain")


if __name__ == "__main__":
    main()
