"""What the training loop takes beside its compiled step: input, log, progress, checkpoints.

    python -m benchmarks.loop_overhead

The digits through a network whose step takes about 20 ms, a line every 10 steps, a checkpoint
every 50, saved in the background. A step of the loop is the difference between a run and one of
twice its length, by the number of steps between: what comes before and after the loop is in
both. The compiled step is taken by itself, one after the other, on one batch. Rounds are
interleaved; medians.
"""

import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks.claims import Claim, argument_parser, publish
from train.config import Checkpoint, Config, Digits, Optim, PreactResNet, Train
from train.loop import train
from train.planning import compile_step
from train.setup import setup


def config(width: int, steps: int) -> Config:
    return Config(
        data=Digits(batch_size=64),
        model=PreactResNet(widths=(width, 2 * width), blocks_per_stage=2),
        optim=Optim(name="sgd", learning_rate=0.05, schedule="constant"),
        train=Train(steps=steps, log_every=10, eval_every=10**6),
        checkpoint=Checkpoint(every=50),
    )


def run(width: int, steps: int) -> float:
    """Seconds of a whole run."""
    console = Console(file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        train(config(width, steps), Path(folder) / "run", resume=False, console=console)
        return time.perf_counter() - began


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--width", type=int, default=32, help="of the network's first stage")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    made = setup(config(args.width, args.steps))
    executable = compile_step(made).executable
    state: Any = made.init(jax.random.key(0))
    batch = next(made.training_batches())

    def alone() -> float:
        nonlocal state
        began = time.perf_counter()
        for _ in range(args.steps):
            state, metrics = executable(state, batch)
            jax.block_until_ready(metrics)
        return (time.perf_counter() - began) / args.steps

    alone()
    run(args.width, 10)
    steps, loops = [], []
    for _ in range(args.rounds):
        steps.append(alone())
        short, long = run(args.width, args.steps), run(args.width, 2 * args.steps)
        steps.append(alone())
        loops.append((long - short) / args.steps)
    step, loop = statistics.median(steps), statistics.median(loops)
    print(
        f"step {step * 1e3:.2f} ms, of the loop {loop * 1e3:.2f} ms: {loop / step - 1:+.1%} "
        f"(target: below 2 %); {args.steps} steps, {args.rounds} rounds."
    )
    what = f"the loop, a step of {step * 1e3:.0f} ms: time beside it, as a part"
    claim = Claim(what, "the compiled step alone", loop / step - 1, "< 0.02", "time")
    publish([claim], args, "jax", "jaxlib", "orbax-checkpoint", "grain")


if __name__ == "__main__":
    main()
