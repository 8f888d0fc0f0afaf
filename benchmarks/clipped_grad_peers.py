"""Other libraries' clipped per-example gradients, each against its own plain gradient.

    pip install '.[peers]'
    python -m benchmarks.clipped_grad_peers

jax-privacy and optax on the networks of `benchmarks.clipped_grad` in plain JAX, jitted;
Opacus on the same networks in torch. On the CPU, in float32, without noise. "time" and
"memory" are to the plain gradient of the same framework, jitted or torch's own backward
pass, of images in the faster of both layouts. Opacus has NCHW alone: of channels_last
activations Opacus 1.6 makes wrong gradients. Every sum is compared with a loop over
examples. A library that is not installed is left out, with a line that says so.
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
from benchmarks.clipped_grad import by_optax, checked, clipped, compiled, one_by_one, plain
from benchmarks.measure import interleaved, markdown, temporaries
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

    from benchmarks.abn_against_torch import LAYOUTS, most_allocated
except ImportError as error:
    opacus = error


def main() -> None:
    parser = argument_parser(__doc__, rounds=21)
    parser.add_argument("--threads", type=int, default=machine.cores(), help="of torch")
    args = parser.parse_args()
    rounds = args.rounds
    cases = {
        "MLP 784-512-512-10, batch 256": networks.mlp()["JAX"],
        "small CNN 28x28, batch 128": networks.cnn()["JAX"],
    }
    lines: list[dict[str, str]] = []
    claimed: list[Claim] = []
    for name, network in cases.items():
        found = measured(*in_jax(network), rounds)
        if isinstance(opacus, ModuleType):
            found |= measured(*in_torch(network, args.threads), rounds)
        lines += rows(name, found)
        claimed += claims(name, found)
    print(
        f"Medians of {rounds} interleaved rounds, CPU, float32, torch with {args.threads} threads."
    )
    print(f"\n{markdown(lines)}")
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


def measured(
    steps: Steps, sizes: dict[str, int], rounds: int, slow: float = 0.5
) -> dict[str, Step]:
    """Each step; ratios are to the fastest that begins with "plain"."""
    once = interleaved(steps, 1)
    quick = {row: step for row, step in steps.items() if once[row] < slow}
    seconds = interleaved({row: steps[row] for row in steps if row not in quick}, 3)
    seconds |= interleaved(quick, rounds)
    base = min((row for row in steps if row.startswith("plain")), key=lambda row: seconds[row])
    return {
        row: Step(seconds[row], seconds[row] / seconds[base], sizes[row], sizes[row] / sizes[base])
        for row in steps
    }


def rows(name: str, found: dict[str, Step]) -> list[dict[str, str]]:
    """A line for each step."""
    return [
        {
            "": name,
            "gradient": row,
            "ms": f"{step.seconds * 1e3:.1f}",
            "time": f"{step.time:.2f}",
            "temporaries MB": f"{step.size / 1e6:.1f}",
            "memory": f"{step.memory:.2f}",
        }
        for row, step in found.items()
    ]


def claims(name: str, found: dict[str, Step]) -> Iterator[Claim]:
    """What clipping costs here, to what it costs in each library, in its best way for either."""
    ours = found[OURS]
    for library in ("optax", "jax-privacy", "Opacus"):
        theirs = {row: step for row, step in found.items() if row.startswith(library)}
        if not theirs:
            continue
        for kind in ("time", "memory"):
            best = min(theirs, key=lambda row: getattr(theirs[row], kind))
            cost, least = getattr(ours, kind), getattr(theirs[best], kind)
            what = f"clipped_grad, {name}: {kind} to a plain gradient, {cost:.2f}"
            yield Claim(what, f"{best}: {least:.2f} to its own", cost / least, "<= 1.0", kind)


def in_jax(n: Network) -> tuple[Steps, dict[str, int]]:
    """One jitted program a line; all give the same sum as a loop over examples."""
    ways = {
        OURS: clipped(n.loss, CLIP),
        "optax, per_example_global_norm_clip": by_optax(n.loss, CLIP),
    }
    if isinstance(jax_privacy, ModuleType):
        for size in (None, 1, 16):
            ways[f"jax-privacy, microbatch_size {size}"] = jax_privacy.clipped_grad(
                lambda *args: n.loss(*args)[0],
                l2_clip_norm=CLIP,
                batch_argnums=(1, 2),
                microbatch_size=size,
            )
    programs = {"plain, JAX": compiled(plain(n.loss), n)}
    expected = one_by_one(n, CLIP)
    for name, way in ways.items():
        programs[name] = compiled(way, n)
        checked(programs[name](n.params, n.x, n.y), expected)
    steps: Steps = {row: functools.partial(p, n.params, n.x, n.y) for row, p in programs.items()}
    return steps, {row: temporaries(p) for row, p in programs.items()}


def in_torch(n: Network, threads: int) -> tuple[Steps, dict[str, int]]:
    """Plain, hooks and ghost clipping, on one model; all of Opacus' give the loop's sum."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)  # with some, a relu is at its kink: a batch's rounding is not an example's
    # A copy in this order: a permuted image of one channel passes for channels_last.
    nchw = np.array(n.x.transpose(0, 3, 1, 2) if n.x.ndim == 4 else n.x, order="C")
    x, y = torch.from_numpy(nchw), torch.from_numpy(np.array(n.y)).long()
    model = torch_cnn() if x.ndim == 4 else torch_mlp()
    steps = {"plain, torch": torch_plain(copy.deepcopy(model), x, y)}
    if x.ndim == 4:
        order = LAYOUTS["channels_last"]
        steps["plain, torch, channels_last"] = torch_plain(
            copy.deepcopy(model).to(memory_format=order), x.contiguous(memory_format=order), y
        )
    expected = torch_one_by_one(model, x, y)
    for name, make in (("hooks", opacus_hooks), ("ghost clipping", opacus_ghost)):
        step = make(copy.deepcopy(model), x, y)
        checked([np.array(g) for g in step()], expected)
        steps[f"Opacus, {name}"] = step
    return steps, {row: most_allocated(step) for row, step in steps.items()}


def torch_one_by_one(model: Any, x: Any, y: Any) -> list[np.ndarray]:
    total = [np.zeros(p.shape, np.float32) for p in model.parameters()]
    for i in range(len(x)):
        each = torch_plain(model, x[i : i + 1], y[i : i + 1])()
        norm = float(sum(g.square().sum() for g in each)) ** 0.5
        total = [t + min(1, CLIP / norm) * g.numpy() for t, g in zip(total, each, strict=True)]
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
    """Every example's gradient, kept by hooks, then clipped and summed."""
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
    """Norms from activations and cotangents, and a second backward pass."""
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
