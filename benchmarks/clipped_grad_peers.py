"""Clipped per-example gradients of other libraries, each compared with its own plain gradient.

    pip install '.[peers]'
    python -m benchmarks.clipped_grad_peers

jax-privacy and optax run on the networks of `benchmarks.clipped_grad` in plain JAX, jitted, and
Opacus on the same networks in torch. All run on the CPU, in float32, without noise. "time" and
"memory" are relative to the plain gradient of the same framework, in the faster image layout.
Opacus runs in NCHW only, because Opacus 1.6 computes wrong gradients of channels_last
activations. Every sum is compared with a loop over examples. Libraries that are not installed are
skipped and listed.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine, networks
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.clipped_grad import (
    by_optax,
    check,
    clipped,
    compile_program,
    loop_over_examples,
    plain,
)
from benchmarks.measure import interleaved, markdown_table, temporaries
from benchmarks.networks import CHANNELS, CLASSES, HIDDEN, IMAGE, MLP_SIZES, Network

CLIP = 1.0
OURS = "`fnet.clipped_grad`"
Steps = dict[str, Callable[[], Any]]

try:
    import jax_privacy.clipping as jax_privacy
except ImportError as error:
    jax_privacy = error
try:
    import opacus
    import opacus.grad_sample
    import opacus.optimizers
    import opacus.utils.fast_gradient_clipping_utils as ghost
    import torch
    from torch import nn

    from benchmarks.abn_against_torch import LAYOUTS, peak_allocated
except ImportError as error:
    opacus = error


def main() -> None:
    parser = argument_parser(__doc__, rounds=21)
    parser.add_argument("--threads", type=int, default=machine.cores(), help="Threads of torch.")
    args = parser.parse_args()
    rounds = args.rounds
    cases = {
        "MLP 784-512-512-10, batch 256": networks.mlp()["JAX"],
        "small CNN 28x28, batch 128": networks.cnn()["JAX"],
    }
    lines: list[dict[str, str]] = []
    claimed: list[Claim] = []
    for name, network in cases.items():
        measured = measure(*jax_steps(network), rounds)
        if isinstance(opacus, ModuleType):
            measured |= measure(*torch_steps(network, args.threads), rounds)
        lines += rows(name, measured)
        claimed += claims(name, measured)
    print(
        f"Medians of {rounds} interleaved rounds, CPU, float32, torch with {args.threads} threads."
    )
    print(f"\n{markdown_table(lines)}")
    libraries = {"jax-privacy": jax_privacy, "opacus": opacus}
    publish(
        claimed,
        args,
        *("jax", "jaxlib", "jax-privacy", "optax", "torch", "opacus"),
        missing=[f"{p} ({e})" for p, e in libraries.items() if not isinstance(e, ModuleType)],
    )


class Step(NamedTuple):
    """Seconds and bytes, and their ratios to the plain gradient of the same framework."""

    seconds: float
    time: float
    size: int
    memory: float


def measure(steps: Steps, sizes: dict[str, int], rounds: int, slow: float = 0.5) -> dict[str, Step]:
    """Measure each step; ratios are relative to the fastest "plain" one."""
    once = interleaved(steps, 1)
    quick = {row: step for row, step in steps.items() if once[row] < slow}
    seconds = interleaved({row: steps[row] for row in steps if row not in quick}, 3)
    seconds |= interleaved(quick, rounds)
    base = min((row for row in steps if row.startswith("plain")), key=lambda row: seconds[row])
    return {
        row: Step(seconds[row], seconds[row] / seconds[base], sizes[row], sizes[row] / sizes[base])
        for row in steps
    }


def rows(name: str, measured: dict[str, Step]) -> list[dict[str, str]]:
    """Build a row for each step."""
    return [
        {
            "": name,
            "gradient": row,
            "ms": f"{step.seconds * 1e3:.1f}",
            "time": f"{step.time:.2f}",
            "temporaries MB": f"{step.size / 1e6:.1f}",
            "memory": f"{step.memory:.2f}",
        }
        for row, step in measured.items()
    ]


def claims(name: str, measured: dict[str, Step]) -> Iterator[Claim]:
    """Compare the relative cost of clipping with each library's best method."""
    ours = measured[OURS]
    for library in ("optax", "jax-privacy", "Opacus"):
        theirs = {row: step for row, step in measured.items() if row.startswith(library)}
        if not theirs:
            continue
        for kind in ("time", "memory"):
            best = min(theirs, key=lambda row: getattr(theirs[row], kind))
            cost, least = getattr(ours, kind), getattr(theirs[best], kind)
            what = f"clipped_grad, {name}: {kind} relative to a plain gradient, {cost:.2f}"
            baseline = f"{best}: {least:.2f} relative to its own"
            yield Claim(what, baseline, cost / least, "<= 1.0", kind)


def jax_steps(n: Network) -> tuple[Steps, dict[str, int]]:
    """Jitted programs, all checked against a loop over examples."""
    functions = {
        OURS: clipped(n.loss, CLIP),
        "optax, per_example_global_norm_clip": by_optax(n.loss, CLIP),
    }
    if isinstance(jax_privacy, ModuleType):
        for size in (None, 1, 16):
            functions[f"jax-privacy, microbatch_size {size}"] = jax_privacy.clipped_grad(
                lambda *args: n.loss(*args)[0],
                l2_clip_norm=CLIP,
                batch_argnums=(1, 2),
                microbatch_size=size,
            )
    programs = {"plain, JAX": compile_program(plain(n.loss), n)}
    expected = loop_over_examples(n, CLIP)
    for name, function in functions.items():
        programs[name] = compile_program(function, n)
        check(programs[name](n.params, n.x, n.y), expected)
    steps: Steps = {row: functools.partial(p, n.params, n.x, n.y) for row, p in programs.items()}
    return steps, {row: temporaries(p) for row, p in programs.items()}


def torch_steps(n: Network, threads: int) -> tuple[Steps, dict[str, int]]:
    """Plain gradient, hooks and ghost clipping in torch, checked against a loop over examples."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)  # With some seeds, rounding flips a relu between batch and loop.
    # Copy in this order, because torch takes a permuted image of one channel for channels_last.
    nchw = np.array(n.x.transpose(0, 3, 1, 2) if n.x.ndim == 4 else n.x, order="C")
    x, y = torch.from_numpy(nchw), torch.from_numpy(np.array(n.y)).long()
    model = torch_cnn() if x.ndim == 4 else torch_mlp()
    steps = {"plain, torch": torch_plain(copy.deepcopy(model), x, y)}
    if x.ndim == 4:
        order = LAYOUTS["channels_last"]
        steps["plain, torch, channels_last"] = torch_plain(
            copy.deepcopy(model).to(memory_format=order), x.contiguous(memory_format=order), y
        )
    expected = torch_loop_over_examples(model, x, y)
    for name, make in (("hooks", opacus_hooks), ("ghost clipping", opacus_ghost)):
        step = make(copy.deepcopy(model), x, y)
        check([np.array(g) for g in step()], expected)
        steps[f"Opacus, {name}"] = step
    return steps, {row: peak_allocated(step) for row, step in steps.items()}


def torch_loop_over_examples(model: Any, x: Any, y: Any) -> list[np.ndarray]:
    total = [np.zeros(p.shape, np.float32) for p in model.parameters()]
    for i in range(len(x)):
        grads = torch_plain(model, x[i : i + 1], y[i : i + 1])()
        norm = float(sum(g.square().sum() for g in grads)) ** 0.5
        total = [t + min(1, CLIP / norm) * g.numpy() for t, g in zip(total, grads, strict=True)]
    return total


def torch_mlp() -> Any:
    return nn.Sequential(*dense(MLP_SIZES))


def torch_cnn() -> Any:
    parts = []
    for n_in, n_out in itertools.pairwise(CHANNELS):
        parts += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    sizes = ((IMAGE // 4) ** 2 * CHANNELS[-1], HIDDEN, CLASSES)
    return nn.Sequential(*parts, nn.Flatten(), *dense(sizes))


def dense(sizes: tuple[int, ...]) -> Iterator[Any]:
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        if i:
            yield nn.ReLU()
        yield nn.Linear(n_in, n_out)


def torch_plain(model: Any, x: Any, y: Any) -> Callable[[], Any]:
    losses = nn.CrossEntropyLoss()
    return lambda: torch.autograd.grad(losses(model(x), y), [*model.parameters()])


def opacus_hooks(model: Any, x: Any, y: Any) -> Callable[[], Any]:
    """Per-example gradients materialized by hooks, then clipped and summed."""
    module, losses = opacus.GradSampleModule(model), nn.CrossEntropyLoss()
    optimizer = opacus.optimizers.DPOptimizer(sgd(model), **clipping(x))

    def step() -> Any:
        losses(module(x), y).backward()
        optimizer.clip_and_accumulate()
        sums = [p.summed_grad for p in model.parameters()]
        optimizer.zero_grad(set_to_none=True)
        return sums

    return step


def opacus_ghost(model: Any, x: Any, y: Any) -> Callable[[], Any]:
    """Norms from activations and cotangents, then a second backward pass."""
    module = opacus.grad_sample.GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP)
    optimizer = opacus.optimizers.DPOptimizerFastGradientClipping(sgd(model), **clipping(x))
    losses = ghost.DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())

    def step() -> Any:
        losses(module(x), y).backward()
        sums = [p.grad for p in model.parameters()]
        optimizer.zero_grad(set_to_none=True)
        return sums

    return step


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def clipping(x: Any) -> dict[str, Any]:
    return {"noise_multiplier": 0.0, "max_grad_norm": CLIP, "expected_batch_size": len(x)}


if __name__ == "__main__":
    main()
