"""Compact AdamW (24-bit master weights, 8-bit moments) against AdamW in float32.

    python -m benchmarks.compact_optimizer --path tinyshakespeare.txt

Bytes per parameter are read from the compiled step of a stack of dense layers in bfloat16, with the
optimizer after the backward pass and inside of it. The stack has few activations. Compact updates
run in chunks of 65,536 elements. The optimizer alone and the whole step are timed.

Losses are from the text_transformer recipe, three seeds each, with activations in float32 for
both. Runs are processes of their own; with ``--out``, they are saved there, and an interrupted
benchmark resumes. Other options, such as --train.steps 1000, are passed to each run. Without
``--path`` nothing is trained.
"""

import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import fnet
from benchmarks.claims import Claim, add_sizes, argument_parser, publish
from benchmarks.measure import compile_with_each_option, fastest, markdown_table, step_caller
from fnet import TrainState, layers
from fnet.autodiff import mean, optimizer_in_backward
from fnet.memory import tree_bytes
from fnet.memory.peak import compile_min_memory
from fnet.precision import cast_kernels

MASK = fnet.optim.weight_decay_mask
OPTIMIZERS = {
    "adamw, float32": optax.adamw(1e-4, weight_decay=0.1, mask=MASK),
    # The default chunk is larger than the arrays here; it is meant for a billion parameters.
    "compact_adamw": fnet.optim.compact_adamw(1e-4, weight_decay=0.1, mask=MASK, chunk_size=2**16),
}
MODES: dict[str, Any] = {"after": mean, "inside": optimizer_in_backward("blocks")}
EXPECTED = {"after": 7, "inside": 5}
RUNS = {
    "adamw, float32": {"optim.name": "adamw"},
    "compact_adamw": {"optim.name": "compact_adamw", "train.params-dtype": "bfloat16"},
}
# Their 8-bit optimizers are CUDA kernels, so they cannot be measured on a CPU.
NOT_ON_CPU = ("bitsandbytes: 8-bit AdamW needs CUDA", "flashoptim: needs CUDA and Triton")


def stack(depth: int, width: int, batch: int) -> tuple[fnet.Layer, Any]:
    """Return residual blocks of two dense layers, and the shapes of a batch in bfloat16."""
    block = fnet.residual(
        fnet.serial(
            expand=layers.dense(width, 4 * width),
            act=layers.activation("relu"),
            contract=layers.dense(4 * width, width),
        )
    )
    x = jax.ShapeDtypeStruct((batch, width), jnp.bfloat16)
    return fnet.serial(blocks=fnet.repeat(block, depth)), {"x": x}


def create(model: fnet.Layer, optimizer: str) -> TrainState:
    params, model_state = model.init(jax.random.key(0))
    return TrainState.create(
        params=cast_kernels(params, jnp.bfloat16) if "compact" in optimizer else params,
        model_state=model_state,
        optimizer=OPTIMIZERS[optimizer],
        key=jax.random.key(1),
    )


def measure_steps(model: fnet.Layer, batch: Any, rounds: int) -> dict[tuple[str, str], Any]:
    """Return bytes per parameter and seconds per step, by optimizer and mode."""

    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, fnet.Aux]:
        y, state = model.apply(params, state, batch["x"], key=key, train=True)
        return jnp.square(y.astype(jnp.float32)).mean(-1), fnet.Aux(state, {})

    results: dict[tuple[str, str], Any] = {}
    calls = {}
    for name, optimizer in OPTIMIZERS.items():
        for where, mode in MODES.items():
            step = fnet.make_step(loss, optimizer, mode)
            shapes = jax.eval_shape(functools.partial(create, model, name))
            report = fnet.compile_step(step, shapes, batch).report
            size = report.parameters
            results[name, where] = {
                "state": report.state_bytes / size,
                "peak": report.peak.total / size,
                "temporaries": report.peak.temporaries / size,
            }
            programs = compile_with_each_option(step.lower(shapes, batch))
            arrays = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), batch)
            calls[name, where] = [step_caller(p, create(model, name), arrays) for p in programs]
    for key, seconds in fastest(calls, rounds).items():
        results[key]["seconds"] = seconds
    return results


def time_updates(model: fnet.Layer, rounds: int) -> dict[str, float]:
    """Return the seconds of the optimizer alone."""

    def update(optimizer: Any, state: TrainState, grads: Any) -> tuple[TrainState, Any]:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # Something to wait for.
        last = jax.tree.leaves(params)[0].ravel()[0]
        return dataclasses.replace(state, params=params, opt_state=opt_state), last

    calls = {}
    for name, optimizer in OPTIMIZERS.items():
        state = create(model, name)
        grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3, p.dtype), state.params)
        lowered = jax.jit(functools.partial(update, optimizer), donate_argnums=0).lower(
            state, grads
        )
        programs = [lowered.compile(), compile_min_memory(lowered)[0]]
        calls[name] = [step_caller(p, create(model, name), grads) for p in programs]
    return fastest(calls, rounds)


def losses(path: str, out: Path, seeds: list[int], more: list[str]) -> dict[str, list[float]]:
    """Train the recipe with each optimizer and seed, and return the losses on held-out text."""
    by_name: dict[str, list[float]] = {}
    for seed in seeds:
        for name, settings in RUNS.items():
            folder = out / f"{settings['optim.name']}-{seed}"
            if not (folder / "summary.json").is_file():
                options = {"data.path": path, "train.seed": seed, **settings}
                words = [str(w) for key, value in options.items() for w in (f"--{key}", value)]
                resume = ["--resume"] if (folder / "config.json").is_file() else []
                program = [sys.executable, "-m", "train", "train", "text_transformer", "--out"]
                subprocess.run(
                    [*program, str(folder), *resume, *words, *more], check=True, stdout=sys.stderr
                )
            summary = json.loads((folder / "summary.json").read_text())
            by_name.setdefault(name, []).append(summary["metrics"]["test/loss"])
    return by_name


def memory_claims(results: dict[tuple[str, str], Any], network: str) -> Iterator[Claim]:
    baseline, compact = OPTIMIZERS
    for where, expected in EXPECTED.items():
        before, after = results[baseline, where], results[compact, where]
        what = f"compact_adamw {where} the backward pass, {network}"
        peak = f"adamw float32: {before['peak']:.2f}"
        target = f"<= {expected + 1}"
        yield Claim(f"{what}: peak of the step, bytes per parameter", peak, after["peak"], target)
        ratio = after["seconds"] / before["seconds"]
        yield Claim(f"{what}: time of the step", baseline, ratio, kind="time")
    state = f"adamw float32: {results[baseline, 'after']['state']:.2f}"
    figure = results[compact, "after"]["state"]
    yield Claim(f"compact_adamw: state, bytes per parameter, {network}", state, figure, "<= 5.2")


def quality_claims(by_name: dict[str, list[float]], recipe: str) -> Iterator[Claim]:
    baseline, compact = (by_name[name] for name in OPTIMIZERS)
    difference = statistics.mean(compact) - statistics.mean(baseline)
    noise = statistics.stdev(baseline)
    yield Claim(
        f"compact_adamw, {recipe}, mean of {len(baseline)} seeds: difference of the held-out loss "
        "in standard deviations over seeds",
        f"adamw float32: {statistics.mean(baseline):.4f}, standard deviation {noise:.4f}",
        difference / noise,
        "<= 1",
        "quality",
    )


def main() -> None:
    parser = argument_parser(__doc__, rounds=9)
    add_sizes(parser, {"depth": 24, "width": 256, "batch": 32})
    parser.add_argument("--path", help="Text file.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="Seeds.")
    parser.add_argument("--out", help="Folder for runs.")
    args, more = parser.parse_known_args()
    model, batch = stack(args.depth, args.width, args.batch)
    size = tree_bytes(jax.eval_shape(model.init, jax.random.key(0))[0]) // 4
    network = f"{args.depth} blocks of width {args.width}, {size:,} parameters"
    results = measure_steps(model, batch, args.rounds)
    seconds = time_updates(model, args.rounds)
    rows = [
        {
            "optimizer": name,
            "backward pass": where,
            "state, B/parameter": f"{r['state']:.3f}",
            "temporaries, B/parameter": f"{r['temporaries']:.3f}",
            "peak, B/parameter": f"{r['peak']:.3f}",
            "step, ms": f"{r['seconds'] * 1e3:.0f}",
            "optimizer alone, ms": f"{seconds[name] * 1e3:.0f}" if where == "after" else "",
        }
        for (name, where), r in results.items()
    ]
    print(f"{network}, batch {args.batch}:\n\n{markdown_table(rows, 2)}\n", flush=True)
    claimed = list(memory_claims(results, network))
    ratio = seconds["compact_adamw"] / seconds["adamw, float32"]
    claimed.append(
        Claim(f"compact_adamw: optimizer alone, {network}", "adamw, float32", ratio, kind="time")
    )
    if args.path:
        by_name = losses(args.path, Path(args.out or tempfile.mkdtemp()), args.seeds, more)
        rows = [
            {"optimizer": name}
            | {f"seed {s}": f"{v:.4f}" for s, v in zip(args.seeds, values, strict=True)}
            | {
                "mean": f"{statistics.mean(values):.4f}",
                "spread": f"{statistics.stdev(values):.4f}",
            }
            for name, values in by_name.items()
        ]
        recipe = " ".join(["text_transformer", Path(args.path).stem, *more])
        print(f"Held-out loss, nats per token, {recipe}:\n\n{markdown_table(rows)}\n", flush=True)
        claimed += quality_claims(by_name, recipe)
    publish(claimed, args, "jax", "jaxlib", "optax", missing=NOT_ON_CPU)


if __name__ == "__main__":
    main()
