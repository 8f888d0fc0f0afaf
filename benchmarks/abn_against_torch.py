"""`fnet.abn` compared with torch's batch norm and inplace_abn: gradients, memory and step time.

    pip install torch==2.13.0 ninja "setuptools<82" "setuptools_scm<9"
    pip install --no-build-isolation inplace-abn
    JAX_PLATFORMS=cpu python -m benchmarks.abn_against_torch

It runs on CPU, with torch's CPU build. inplace-abn needs a C++ compiler; without it its rows are
skipped.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from benchmarks import abn_stack, machine, measure
from benchmarks.claims import Claim, argument_parser, publish
from fnet.memory import compile_min_memory

try:
    from inplace_abn import InPlaceABN

    MISSING = ""
except ImportError as error:
    InPlaceABN, MISSING = None, str(error)

MakeNorm = Callable[[], nn.Module]
WIDTH, THREADS = abn_stack.WIDTH, machine.cores()
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
FLAX, FNET = "flax linen BatchNorm, leaky_relu", "`fnet.abn`"


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(WIDTH), nn.LeakyReLU(0.01, inplace=True))


NORMS: dict[str, MakeNorm] = {"torch BatchNorm2d, in-place leaky_relu": batch_norm}
if InPlaceABN is not None:
    NORMS["torch inplace_abn"] = lambda: InPlaceABN(WIDTH, activation_param=0.01)


def main() -> None:
    parser = argument_parser(__doc__, rounds=7)
    for option, default in (("--blocks", 16), ("--batch", abn_stack.IMAGES[0])):
        parser.add_argument(option, type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    x = jax.random.normal(jax.random.key(0), (args.batch, *abn_stack.IMAGES[1:]))
    steps, saved, temporaries = {}, {}, {}
    for name, norm in NORMS.items():
        for layout, order in LAYOUTS.items():
            model = torch_stack(norm, args.blocks).to(memory_format=order)  # type: ignore[call-overload,unused-ignore]
            images = nchw(x).contiguous(memory_format=order)
            step, row = torch_step(model, images), f"{name}, {layout}"
            steps[row], saved[row] = step, saved_bytes(step, {images, *model.parameters()})
            temporaries[row] = peak_allocated(step)
    for name, stack in ((FLAX, abn_stack.flax_stack), (FNET, abn_stack.in_place_stack)):
        loss, params = stack(args.blocks)
        compiled, _ = compile_min_memory(jax.jit(jax.grad(loss)).lower(params, x))
        steps[name] = functools.partial(compiled, params, x)
        temporaries[name] = measure.temporaries(compiled)

    seconds = measure.interleaved(steps, args.rounds)
    base = min((row for row in steps if "BatchNorm2d" in row), key=lambda row: seconds[row])
    rows = [
        {
            "": name,
            "saved MB": f"{saved[name] / 1e6:.0f}" if name in saved else "",
            "temporaries MB": f"{size / 1e6:.0f}",
            "ratio": f"{size / temporaries[base]:.2f}",
            "step s": f"{seconds[name]:.2f}",
            "time ratio": f"{seconds[name] / seconds[base]:.2f}",
        }
        for name, size in temporaries.items()
    ]
    print(
        f"{args.blocks} x (3x3 convolution, batch norm, leaky_relu 0.01) at {x.shape}, float32, "
        f"CPU, {THREADS} threads in torch, medians of {args.rounds} interleaved steps. Ratios to "
        f'{base}, the faster layout. "saved": residuals without parameters and input. '
        f'"temporaries": also without gradients.\n\n{measure.markdown_table(rows)}'
    )
    for name, norm in NORMS.items():
        print(f"\nGradients of {name} and fnet differ by {max_difference(norm):.0e} (float64).")
    publish(
        claims(args.blocks, temporaries, seconds),
        args,
        *("jax", "jaxlib", "flax", "torch", "inplace-abn"),
        missing=[f"inplace-abn ({MISSING})"] if MISSING else [],
    )


def claims(blocks: int, temporaries: dict[str, int], seconds: dict[str, float]) -> Iterator[Claim]:
    """Compare fnet with each of torch's norms, in the layout that is best for torch."""
    for name in NORMS:
        layouts = [f"{name}, {layout}" for layout in LAYOUTS]
        for what, kind, measured in (
            ("temporaries", "memory", temporaries),
            ("time", "time", seconds),
        ):
            ratio = measured[FNET] / min(measured[row] for row in layouts)
            yield Claim(
                f"fnet.abn, {blocks} blocks: {what} of the gradient", name, ratio, "<= 1.0", kind
            )


def torch_stack(norm: MakeNorm, blocks: int) -> nn.Sequential:
    pairs = [(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), norm()) for _ in range(blocks)]
    return nn.Sequential(*(module for pair in pairs for module in pair))


def nchw(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x)).permute(0, 3, 1, 2)


def torch_step(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(model(x).square().mean(), [*model.parameters()])


def saved_bytes(step: Callable[[], Any], arguments: set[torch.Tensor]) -> int:
    """Bytes of the distinct storages saved for the backward pass, without arguments."""
    saved: list[torch.Tensor] = []

    def record(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        step()
    excluded = {t.untyped_storage().data_ptr() for t in arguments}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for pointer, size in sizes.items() if pointer not in excluded)


def peak_allocated(step: Callable[[], Any]) -> int:
    """Peak bytes allocated by a step, without its outputs."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        returned = step()
    events = sorted(profile.kineto_results.events(), key=lambda e: e.start_ns())
    allocated = np.cumsum([e.nbytes() for e in events if e.name() == "[memory]"])
    return int(allocated.max()) - sum(t.nbytes for t in returned)


def max_difference(norm: MakeNorm, blocks: int = 4) -> float:
    """Largest difference from fnet's gradients, each relative to its largest value."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        loss, params = abn_stack.in_place_stack(blocks)
        params = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape), params)
        x = rng.normal(size=(4, 8, 8, WIDTH))
        ours = jax.jit(jax.grad(loss))(params, x)
        model = torch_stack(norm, blocks).double()
        with torch.no_grad():
            for p, destination in zip(in_torch_order(params), model.parameters(), strict=True):
                destination[:] = torch.from_numpy(p)
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):  # The other norms use |gamma| + eps.
                    module.weight.add_(module.eps)
        pairs = zip(in_torch_order(ours), torch_step(model, nchw(x))(), strict=True)
        return max(float(abs(a - b.numpy()).max() / abs(a).max()) for a, b in pairs)


def in_torch_order(tree: Any) -> list[np.ndarray]:
    """Params or gradients of fnet in torch's order and layout: kernel, gamma, beta."""
    blocks = [(b["conv"]["kernel"].transpose(3, 2, 0, 1), b["abn"]) for b in tree.values()]
    return [np.array(a) for kernel, abn in blocks for a in (kernel, abn["gamma"], abn["beta"])]


if __name__ == "__main__":
    main()
