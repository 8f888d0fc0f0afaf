"""What the training loop takes beside its compiled step: input, log, progress, checkpoints.

    python -m benchmarks.loop_overhead

The digits through a network whose step takes about 20 ms, on a terminal, with the intervals that
a config has by default: a line every 10 steps, a checkpoint every 500, saved in the background.
One run; every so many steps of it, the compiled step is taken as often by itself, on one batch:
the two lie side by side in time. The quotients' median.
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
from train.run import loop
from train.run.planning import Planned, StepCache
from train.run.setup import Setup

BEGIN = 30
"""Steps before the first that is timed."""


def config(width: int, steps: int, checkpoint_every: int) -> Config:
    return Config(
        data=Digits(batch_size=64),
        model=PreactResNet(widths=(width, 2 * width), blocks_per_stage=2),
        optim=Optim(name="sgd", learning_rate=0.05, schedule="constant"),
        train=Train(steps=steps, eval_every=10**6),
        checkpoint=Checkpoint(every=checkpoint_every),
    )


class Interleaved(StepCache):
    """The loop's step; after every ``block`` of them it is taken as often alone."""

    def __init__(self, block: int, run: Setup, planned: Planned, *rest: Any):
        super().__init__(run, planned, *rest)
        self._block, self._program = block, planned.executable
        self._state: Any = run.init(jax.random.key(0))
        self._batch = next(run.training_batches())
        self._taken, self._before, self._began = 0, 0.0, 0.0
        self.of_the_loop: list[float] = []
        self.alone: list[float] = []

    def __call__(self, state: Any, batch: Any) -> Any:
        if self._taken >= BEGIN and (self._taken - BEGIN) % self._block == 0:
            jax.block_until_ready(state)
            if self._taken > BEGIN:
                self.of_the_loop.append((time.perf_counter() - self._began) / self._block)
            after = self._take_alone()
            if self._taken > BEGIN:
                self.alone.append((self._before + after) / 2)
            self._before, self._began = after, time.perf_counter()
        self._taken += 1
        return super().__call__(state, batch)

    def _take_alone(self) -> float:
        """Seconds of a step, of which one is ahead, as in the loop."""
        began, before = time.perf_counter(), None
        for _ in range(self._block):
            self._state, metrics = self._program(self._state, self._batch)
            jax.block_until_ready(before)
            before = metrics
        jax.block_until_ready(before)
        return (time.perf_counter() - began) / self._block


def main() -> None:
    parser = argument_parser(__doc__, rounds=8)
    parser.add_argument("--width", type=int, default=32, help="of the network's first stage")
    every = Checkpoint().every
    parser.add_argument("--checkpoint-every", type=int, default=every)
    args = parser.parse_args()

    block = args.checkpoint_every  # each with one checkpoint, and time for it to be written
    made: list[Interleaved] = []

    def interleaved(*arguments: Any) -> Interleaved:
        made.append(Interleaved(block, *arguments))
        return made[-1]

    described = config(args.width, BEGIN + args.rounds * block + 1, args.checkpoint_every)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    with (
        mock.patch.object(loop, "StepCache", interleaved),
        tempfile.TemporaryDirectory() as folder,
    ):
        loop.train(described, Path(folder) / "run", resume=False, console=terminal)

    of_the_loop, alone = made[0].of_the_loop, made[0].alone
    ratio = statistics.median(a / b for a, b in zip(of_the_loop, alone, strict=True)) - 1
    step = statistics.median(alone) * 1e3
    print(
        f"step {step:.2f} ms, of the loop {statistics.median(of_the_loop) * 1e3:.2f} ms: "
        f"{ratio:+.1%} (target: below 2 %); {args.rounds} times {block} steps"
    )
    what = f"the loop, a step of {step:.0f} ms: time beside it, as a part"
    claim = Claim(what, "the compiled step alone", ratio, "< 0.02", "time")
    publish([claim], args, "jax", "jaxlib", "orbax-checkpoint", "grain")


if __name__ == "__main__":
    main()
