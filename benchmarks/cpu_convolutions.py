"""Convolutions and train steps of convolutional networks on one CPU core, compared with torch.

    python -m benchmarks.cpu_convolutions

CPU seconds of one core, in float32. The first table has the forward pass and both gradients of
single convolutions: XLA with JAX's default options, XLA with Eigen's convolutions, fnet's replaced
convolutions, and torch (oneDNN, channels_last). The second has SGD steps with momentum of ResNet-9
on images of 32 x 32 and of DeepLabV3 on a ResNet-18 with output stride 8.

``--only networks --sizes 64 --images 8`` has the same steps of published networks, relative to the
faster layout of torchvision's. ``--only sweep`` has single convolutions of all kinds, and lists
where fnet takes more than 1.5 times as long as torch.
"""

import argparse
import collections
import functools
import importlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

if __name__ == "__main__":  # before a thread pool counts the cores
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
import numpy as np
import optax
import torch
from jax import Array
from torch import nn
from torch.nn import functional

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table, step_caller
from benchmarks.vision_networks import flax_norm
from fnet import Layer, losses, memory, models
from fnet.cpu.convolutions import for_cpus
from fnet.step import Step

# Images, height and width; channels in and out; dilation; groups and kernel size, if not 1 and 3.
SHAPES: dict[str, tuple[Any, ...]] = {
    "ResNet-9, stage 0, residual": ((64, 15, 15), 128, 128, 1),
    "ResNet-9, stage 1": ((64, 15, 15), 128, 256, 1),
    "ResNet-9, stage 2": ((64, 7, 7), 256, 512, 1),
    "ResNet-18, stage 1": ((8, 56, 56), 64, 64, 1),
    "ResNet-18, stage 3": ((8, 14, 14), 256, 256, 1),
    "DeepLab, stage 3": ((4, 16, 16), 256, 256, 2),
    "DeepLab, stage 4": ((4, 16, 16), 512, 512, 4),
    "DeepLab, head": ((4, 16, 16), 512, 256, 12),
    "ConvNeXt, stage 1, depthwise 7x7": ((8, 28, 28), 192, 192, 1, 192, 7),
    "MobileNet, depthwise 3x3": ((8, 56, 56), 128, 128, 1, 128),
    "ResNeXt-50, stage 1, 32 groups": ((8, 28, 28), 256, 256, 1, 32),
}
NETWORKS = ("resnet18", "resnet34", "resnet50", "mobilenet_v3_large", "convnext_tiny")
SIZES = (32, 64, 96, 128, 224)
KINDS_OF_GROUPS = {"dense": 1, "32 groups": 32, "depthwise": 0}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
TORCH, FLAX, XLA, FNET = (
    "torch, channels_last",
    "flax norm, relu, optax; JAX's defaults",
    "fnet, JAX's default options",
    "fnet.compile_step",
)


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Time functions in turns and return the median CPU seconds per call, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            start = time.process_time()
            jax.block_until_ready(call())
            if number > 1:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def convolutions(
    images: tuple[int, int, int],
    n_in: int,
    n_out: int,
    dilation: int,
    groups: int = 1,
    size: int = 3,
    stride: int = 1,
    *,
    rounds: int,
    only_fnet: bool = False,
) -> dict[str, float]:
    """Time a convolution and both gradients, each as a program of its own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*images, n_in)).astype(np.float32)
    kernel = rng.normal(size=(size, size, n_in // groups, n_out)).astype(np.float32)
    padding = dilation * (size // 2)

    def convolve(x: Array, kernel: Array) -> Array:
        return jax.lax.conv_general_dilated(
            *(x, kernel, (stride, stride), [(padding, padding)] * 2),
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    y = rng.normal(size=jax.eval_shape(convolve, x, kernel).shape).astype(np.float32)

    def by_input(y: Array, kernel: Array) -> Array:
        [gradient] = jax.linear_transpose(lambda x: convolve(x, kernel), x)(y)
        return gradient

    def by_kernel(y: Array, x: Array) -> Array:
        [gradient] = jax.linear_transpose(lambda k: convolve(x, k), kernel)(y)
        return gradient

    programs: dict[str, list[Callable[[], Any]]] = collections.defaultdict(list)
    eigen = dict(memory.CANDIDATE_OPTIONS["cpu"][0])
    for f, arguments in ((convolve, (x, kernel)), (by_input, (y, kernel)), (by_kernel, (y, x))):
        arrays = jax.device_put(arguments)
        for name, g, options in (
            ("fnet", for_cpus(f), eigen),
            *(() if only_fnet else (("default", f, {}), ("Eigen", f, eigen))),
        ):
            compiled = jax.jit(g).lower(*arrays).compile(compiler_options=options)
            programs[name].append(functools.partial(compiled, *arrays))
    tensors = [channels_last(a) for a in (x, kernel.transpose(3, 0, 1, 2), y)]
    torch_x, torch_kernel, torch_y = tensors
    sizes: Any = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)

    def gradient(mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            torch_y, torch_x, torch_kernel, None, *sizes, mask
        )

    programs["torch"] = [
        lambda: functional.conv2d(torch_x, torch_kernel, None, stride, padding, dilation, groups),
        lambda: gradient([True, False, False]),
        lambda: gradient([False, True, False]),
    ]
    calls = {f"{name}/{i}": f for name, fs in programs.items() for i, f in enumerate(fs)}
    with torch.no_grad():
        return interleaved(calls, rounds)


def channels_last(images: np.ndarray) -> torch.Tensor:
    """Turn NHWC into a channels_last tensor; a kernel is OHWI."""
    nchw = torch.from_numpy(images).permute(0, 3, 1, 2)
    return nchw.contiguous(memory_format=torch.channels_last)


def norm_and_activation(n: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(n), nn.LeakyReLU(0.01, inplace=True)]


class Residual(nn.Module):
    """``after(shortcut(x) + body(x))``."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, after: nn.Module):
        super().__init__()
        self.body, self.shortcut, self.after = body, shortcut, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.after(self.shortcut(x) + self.body(x))
        return y


def torch_resnet9() -> nn.Module:
    def block(n_in: int, n_out: int, pool: bool = False) -> list[nn.Module]:
        convolution = nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)
        return [convolution, *[nn.MaxPool2d(2)] * pool, *norm_and_activation(n_out)]

    def residual(n: int) -> nn.Module:
        return Residual(nn.Sequential(*block(n, n), *block(n, n)), nn.Identity(), nn.Identity())

    return nn.Sequential(
        *(nn.Conv2d(3, 24, 2, bias=False), *norm_and_activation(24)),
        *(*block(24, 128, pool=True), residual(128)),
        *block(128, 256, pool=True),
        *(*block(256, 512, pool=True), residual(512)),
        *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(512, 10, bias=False)),
    )


class TorchDeepLab(nn.Module):
    """DeepLabV3 on a ResNet-18 with output stride 8."""

    def __init__(self, num_classes: int, hidden: int = 256):
        super().__init__()

        def convolution(n_in: int, n_out: int, window: int, stride: int = 1, dilation: int = 1):  # type: ignore[no-untyped-def]
            padding = dilation * (window // 2)
            return nn.Conv2d(*(n_in, n_out, window, stride, padding, dilation), bias=False)

        def block(n_in: int, n_out: int, stride: int, dilation: int) -> nn.Module:
            body = nn.Sequential(
                convolution(n_in, n_out, 3, stride, dilation),
                *norm_and_activation(n_out),
                convolution(n_out, n_out, 3, 1, dilation),
                nn.BatchNorm2d(n_out),
            )
            projection = [convolution(n_in, n_out, 1, stride), nn.BatchNorm2d(n_out)]
            shortcut = nn.Sequential(*projection if n_in != n_out or stride > 1 else [])
            return Residual(body, shortcut, nn.LeakyReLU(0.01, inplace=True))

        self.body = nn.Sequential(
            *(convolution(3, 64, 7, 2), *norm_and_activation(64), nn.MaxPool2d(3, 2, 1)),
            *(block(64, 64, 1, 1), block(64, 64, 1, 1)),
            *(block(64, 128, 2, 1), block(128, 128, 1, 1)),
            *(block(128, 256, 1, 2), block(256, 256, 1, 2)),
            *(block(256, 512, 1, 4), block(512, 512, 1, 4)),
        )
        branches = [convolution(512, hidden, 1)]
        branches += [convolution(512, hidden, 3, dilation=rate) for rate in (12, 24, 36)]
        self.branches = nn.ModuleList(branches)
        self.reduce = nn.Sequential(
            *norm_and_activation(4 * hidden), convolution(4 * hidden, hidden, 1)
        )
        self.pooled = nn.Sequential(
            *(convolution(512, hidden, 1), *norm_and_activation(hidden)),
            convolution(hidden, hidden, 1),
        )
        self.logits = nn.Sequential(*norm_and_activation(hidden), nn.Conv2d(hidden, num_classes, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.body(images)
        y = self.reduce(torch.cat([branch(x) for branch in self.branches], 1))
        logits = self.logits(y + self.pooled(x.mean((2, 3), keepdim=True)))
        return functional.interpolate(logits, images.shape[2:], mode="bilinear")


def torch_step(
    model: nn.Module,
    images: np.ndarray,
    labels: np.ndarray,
    layout: torch.memory_format = torch.channels_last,
) -> Callable[[], Any]:
    """Return a function that takes one step."""
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = channels_last(images).contiguous(memory_format=layout)
    y = torch.from_numpy(labels.astype(np.int64))

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def resnet9(**options: Any) -> Layer:
    return models.get("resnet9", num_classes=10, **options)


def deeplab(**options: Any) -> Layer:
    body = models.get("resnet", depth=18, num_classes=None, dilation=(1, 1, 2, 4), **options)
    return models.deeplab(body, 512, num_classes=11, interpolate=False, **options)


def loss_of(model: Layer) -> Any:
    def loss(params: Any, model_state: Any, batch: Any, key: Array) -> tuple[Array, fnet.Aux]:
        y, model_state = model.apply(params, model_state, batch["image"], key=key, train=True)
        if y.ndim == 4:
            return losses.pixel_cross_entropy(y, batch["label"]).losses, fnet.Aux(model_state, {})
        return losses.cross_entropy(y, batch["label"]), fnet.Aux(model_state, {})

    return loss


def steps(name: str, images: int, size: int) -> tuple[dict[str, Callable[[], Any]], float]:
    """Return one function per row that takes a step, and fnet's peak relative to XLA's."""
    is_deeplab = name == "DeepLab"
    network = deeplab if is_deeplab else resnet9
    peer = TorchDeepLab(11) if is_deeplab else torch_resnet9()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(images, size, size, 3)).astype(np.float32)
    labels = rng.integers(0, 10, (images, size, size) if is_deeplab else images, np.uint8)
    batch = jax.device_put({"image": x, "label": labels})

    def program(model: Layer) -> tuple[Step, Any]:
        state = jax.jit(lambda key: fnet.TrainState.create(model, OPTIMIZER, key))
        return fnet.make_step(loss_of(model), OPTIMIZER), state(jax.random.key(0))

    flax: dict[str, Any] = {"norm": flax_norm, "activation": "relu"}
    calls = {TORCH: torch_step(peer, x, labels)}
    for row, options in {FLAX: flax, XLA: {}}.items():
        step, state = program(network(**options))
        plain = step.jitted.lower(state, batch)
        calls[row] = step_caller(plain.compile(), state, batch)
    step, state = program(network())
    executable = fnet.compile_step(step, state, batch)
    calls[FNET] = step_caller(executable.__call__, state, batch)
    smallest, _ = memory.compile_min_memory(plain)
    return calls, executable.report.peak.total / memory.peak(smallest).total


def networks(args: argparse.Namespace) -> list[Claim]:
    """Print the time of a step of each network and size, relative to torchvision's."""
    rows, claims = [], []
    for size, images, name in itertools.product(args.sizes, args.images, args.networks):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(images, size, size, 3)).astype(np.float32)
        labels = rng.integers(0, 10, images, np.uint8)
        batch = jax.device_put({"image": x, "label": labels})
        model = models.get(name, num_classes=10)
        state = jax.jit(lambda key, m=model: fnet.TrainState.create(m, OPTIMIZER, key))(
            jax.random.key(0)
        )
        executable = fnet.compile_step(fnet.make_step(loss_of(model), OPTIMIZER), state, batch)
        peer = getattr(importlib.import_module("torchvision.models"), name)
        calls = {"fnet": step_caller(executable.__call__, state, batch)}
        for layout in (torch.contiguous_format, torch.channels_last):
            step = torch_step(peer(num_classes=10), x, labels, layout)
            calls[f"torch, {str(layout).removeprefix('torch.')}"] = step
        seconds = interleaved(calls, args.rounds)
        ratio = seconds["fnet"] / min(s for row, s in seconds.items() if row != "fnet")
        cells = {"": f"{name}, {images} images of {size} x {size}"}
        cells |= {name: f"{time:.3f}" for name, time in seconds.items()}
        rows.append(cells | {"ratio": f"{ratio:.2f}"})
        print(markdown_table(rows[-1:]), f"load average {os.getloadavg()[0]:.1f}\n", flush=True)
        what = f"{name} step on one CPU core, {images} images of {size} x {size}: time"
        claims.append(Claim(what, "the faster layout of torch", ratio, "<= 1.3", "time"))
    print(markdown_table(rows))
    return claims


def sweep(args: argparse.Namespace) -> None:
    """Print the time of convolutions of all kinds, relative to torch's, and the slow ones."""
    slow = []
    shapes = itertools.product(
        KINDS_OF_GROUPS, (1, 3, 5, 7), (2, 4, 8, 16, 32), (32, 64, 256), (1, 2), (1, 2)
    )
    for groups, size, side, channels, stride, dilation in shapes:
        if (groups == "32 groups" and channels == 32) or dilation > (
            1 if size == 1 or stride > 1 else 2
        ):
            continue
        shape = ((8, side, side), channels, channels, dilation, KINDS_OF_GROUPS[groups] or channels)
        seconds = convolutions(*shape, size, stride, rounds=args.rounds, only_fnet=True)
        cells = {
            "": f"{groups}, {size} x {size}, stride {stride}, dilation {dilation}, "
            f"{channels} channels, {side} x {side}"
        }
        ratios = []
        for i, part in enumerate(("forward", "by input", "by kernel")):
            own, peer = seconds[f"fnet/{i}"], seconds[f"torch/{i}"]
            ratios.append(own / peer)
            cells[part] = f"{1e3 * own:.2f} / {1e3 * peer:.2f} ms = {own / peer:.2f}"
        print(*cells.values(), sep=" | ", flush=True)
        if max(ratios) > 1.5:
            slow.append(cells)
    print(markdown_table(slow))


def main() -> None:
    parser = argument_parser(__doc__, rounds=9)
    tables = ("shapes", "steps", "networks", "sweep")
    parser.add_argument("--only", choices=tables, help="One of the tables.")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="Sides of images.")
    parser.add_argument("--images", nargs="+", type=int, default=(8, 32), help="Images of a batch.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES, help="Shapes.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only == "networks":
        publish(networks(args), args, "jax", "jaxlib", "torch", "torchvision")
        return
    if args.only == "sweep":
        sweep(args)
        return
    claims = []
    if args.only != "steps":
        rows = []
        for shape in args.shapes:
            seconds = convolutions(*SHAPES[shape], rounds=args.rounds)
            cells = {"": shape}
            for i, part in enumerate(("forward", "by input", "by kernel")):
                times = [seconds[f"{n}/{i}"] for n in ("default", "Eigen", "fnet", "torch")]
                cells[f"{part}, ms"] = ", ".join(f"{1e3 * t:.1f}" for t in times)
            fnet_, torch_ = (sum(seconds[f"{n}/{i}"] for i in range(3)) for n in ("fnet", "torch"))
            cells["fnet / torch"] = f"{fnet_ / torch_:.2f}"
            rows.append(cells)
            print(markdown_table([cells]), flush=True)
        print("\nJAX's default options, Eigen, fnet, torch:\n\n" + markdown_table(rows))
    rows = []
    cases = {"ResNet-9": (64, 32, "<= 1.3"), "DeepLab": (4, 256, "<= 1.5")}
    for name, (images, size, target) in cases.items() if args.only != "shapes" else ():
        calls, peak = steps(name, images, size)
        seconds = interleaved(calls, args.rounds)
        for row in calls:
            rows.append(
                {
                    "": f"{name}: {row}",
                    "CPU seconds": f"{seconds[row]:.3f}",
                    "images per CPU second": f"{images / seconds[row]:.1f}",
                    "/ torch": f"{seconds[row] / seconds[TORCH]:.2f}",
                }
            )
        print(markdown_table(rows[-len(calls) :]), flush=True)
        what = f"{name} step on one CPU core, {images} images of {size} x {size}"
        claims += [
            Claim(f"{what}: time", TORCH, seconds[FNET] / seconds[TORCH], target, "time"),
            Claim(f"{what}: time", XLA, seconds[FNET] / seconds[XLA], kind="time"),
            Claim(f"{what}: peak", "the same without replaced convolutions", peak, "<= 1.1"),
        ]
    publish(claims, args, "jax", "jaxlib", "flax", "optax", "torch")


if __name__ == "__main__":
    main()
