"""`fnet.abn` beside torch's batch norm and inplace_abn: the same gradients, memory and step time.

    pip install torch==2.13.0 flax "setuptools>=70,<82" "setuptools_scm<9" ninja
    pip install --no-build-isolation inplace-abn
    JAX_PLATFORMS=cpu python -m benchmarks.abn_against_torch

On CPU. Where inplace-abn could not be compiled, its rows are left out.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from benchmarks import abn_stack, measure
from fnet.memory import compile_smallest

try:
    from inplace_abn import InPlaceABN

    MISSING = ""
except ImportError as error:
    InPlaceABN, MISSING = None, str(error)

WIDTH, THREADS = abn_stack.WIDTH, 2
FORMATS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "torch BatchNorm2d, in-place leaky_relu": lambda: nn.Sequential(
        nn.BatchNorm2d(WIDTH), nn.LeakyReLU(0.01, inplace=True)
    )
}
if InPlaceABN is not None:
    NORMS["torch inplace_abn"] = lambda: InPlaceABN(WIDTH, activation_param=0.01)
JAX_STACKS: dict[str, abn_stack.Stack] = {
    "flax linen BatchNorm, leaky_relu": abn_stack.flax_stack,
    "`fnet.abn`": abn_stack.in_place_stack,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in (("--blocks", 16), ("--batch", abn_stack.IMAGES[0]), ("--rounds", 7)):
        parser.add_argument(option, type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)

    x = jax.random.normal(jax.random.key(0), (args.batch, *abn_stack.IMAGES[1:]))
    steps, saved, temporaries = {}, {}, {}
    for name, norm in NORMS.items():
        for layout, memory_format in FORMATS.items():
            model = torch_stack(norm, args.blocks).to(memory_format=memory_format)
            images = nchw(x).contiguous(memory_format=memory_format)
            step, row = torch_step(model, images), f"{name}, {layout}"
            steps[row], saved[row] = step, saved_bytes(step, {images, *model.parameters()})
            temporaries[row] = most_allocated(step)
    for name, stack in JAX_STACKS.items():
        loss, params = stack(args.blocks)
        compiled, _ = compile_smallest(jax.jit(jax.grad(loss)).lower(params, x))
        steps[name] = lambda compiled=compiled, params=params: compiled(params, x)
        temporaries[name] = measure.temporaries(compiled)

    seconds = measure.interleaved(steps, args.rounds)
    base = min((row for row in steps if "BatchNorm2d" in row), key=seconds.__getitem__)
    rows = [
        {
            "": name,
            "saved MB": f"{saved[name] / 1e6:.0f}" if name in saved else "",
            "temporaries MB": f"{temporaries[name] / 1e6:.0f}",
            "ratio": f"{temporaries[name] / temporaries[base]:.2f}",
            "step s": f"{seconds[name]:.2f}",
            "time ratio": f"{seconds[name] / seconds[base]:.2f}",
        }
        for name in steps
    ]
    print(
        f"{args.blocks} x (3x3 convolution, batch norm, leaky_relu 0.01) at {x.shape}, float32, "
        f"CPU, {THREADS} threads in torch, medians of {args.rounds} interleaved steps. Ratios to: "
        f"{base} (the faster layout). Saved: what torch keeps for the backward pass, without "
        "parameters and input. Temporaries: all that a step holds at once, without parameters, "
        "input and gradients; as torch allocated, as XLA assigned.\n\n" + measure.markdown(rows)
    )
    for name, norm in NORMS.items():
        print(f"\nGradients of {name} and of fnet differ by {disagreement(norm):.0e} (float64).")
    if MISSING:
        print(f"\nLeft out: inplace_abn, which did not load: {MISSING}.")
    print(f"\nVersions: {measure.versions('jax', 'jaxlib', 'flax', 'torch', 'inplace-abn')}.")


def torch_stack(norm: Callable[[], nn.Module], blocks: int) -> nn.Sequential:
    pairs = ((nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), norm()) for _ in range(blocks))
    return nn.Sequential(*itertools.chain(*pairs))


def nchw(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x)).permute(0, 3, 1, 2)


def torch_step(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(model(x).square().mean(), [*model.parameters()])


def saved_bytes(step: Callable[[], Any], arguments: set[torch.Tensor]) -> int:
    """Bytes of the distinct storages saved for the backward pass, those of arguments left out."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        step()
    held = {t.untyped_storage().data_ptr() for t in arguments}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for pointer, size in sizes.items() if pointer not in held)


def most_allocated(step: Callable[[], Any]) -> int:
    """The most bytes that a step holds at once, less what it returns."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        returned = step()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(np.cumsum(changes).max()) - sum(t.nbytes for t in returned)


def disagreement(norm: Callable[[], nn.Module], blocks: int = 4) -> float:
    """The largest difference from fnet's gradients, each relative to its largest value."""
    with jax.enable_x64(True):
        loss, params = abn_stack.in_place_stack(blocks)
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda p: jnp.asarray(p + 0.1 * rng.normal(size=p.shape)), params)
        x = rng.normal(size=(4, 8, 8, WIDTH))
        ours = jax.jit(jax.grad(loss))(params, jnp.asarray(x))
        model = torch_stack(norm, blocks).double()
        with torch.no_grad():
            for p, destination in zip(in_torch_order(params), model.parameters(), strict=True):
                destination[:] = torch.from_numpy(p)
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):  # the others use |gamma| + eps
                    module.weight += module.eps
        theirs = torch_step(model, nchw(x))()
        pairs = zip(in_torch_order(ours), theirs, strict=True)
        return max(float(abs(a - b.numpy()).max() / abs(a).max()) for a, b in pairs)


def in_torch_order(tree: Any) -> list[np.ndarray]:
    """The params or gradients of fnet in the order and layout of torch's: kernel, gamma, beta."""
    blocks = ((b["conv"]["kernel"], b["abn"]["gamma"], b["abn"]["beta"]) for b in tree.values())
    return [
        np.array(a.transpose(range(a.ndim) if a.ndim == 1 else (3, 2, 0, 1)))
        for b in blocks
        for a in b
    ]


if __name__ == "__main__":
    main()
