"""ResNet-50 train step, in place and reversible, compared with flax linen: peak memory.

    python -m benchmarks.resnet50_step

The batch has 16 images of 128 x 128; the optimizer is SGD with momentum, in float32. The peak is
arguments + outputs - aliased + temporaries of the compiled step, for the best of the options of
`fnet.compile_step`. flax is measured with and without ``nn.remat`` around each block. Nothing is
run by default. ``--rounds`` also times each step, flax's with its fastest options.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import compile_with_each_option, fastest, markdown_table, step_caller
from benchmarks.networks import image_loss
from fnet import Layer, models
from fnet.step import Executable

BLOCKS = (3, 4, 6, 3)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
REMAT = "flax linen, relu, nn.remat per block"


class Bottleneck(nn.Module):
    """Bottleneck of He et al. 2016, with the stride on the 3x3 convolution."""

    width: int
    stride: int
    act: Callable[[Array], Array]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        conv = functools.partial(nn.Conv, use_bias=False)
        y = self.act(norm()(conv(self.width, (1, 1))(x)))
        y = conv(self.width, (3, 3), (self.stride,) * 2, padding=[(1, 1)] * 2)(y)
        y = norm()(conv(4 * self.width, (1, 1))(self.act(norm()(y))))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, (1, 1), (self.stride,) * 2)(x))
        return self.act(x + y)


class ResNet50(nn.Module):
    """``models.get("resnet50")`` in flax."""

    act: Callable[[Array], Array]
    block: type[nn.Module] = Bottleneck

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(64, (7, 7), (2, 2), padding=[(3, 3)] * 2, use_bias=False)(x)
        x = self.act(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=[(1, 1)] * 2)
        for i, blocks in enumerate(BLOCKS):
            for j in range(blocks):
                x = self.block(64 * 2**i, 2 if i and not j else 1, self.act)(x)
        return nn.Dense(1000)(x.mean((1, 2)))


def flax_layer(model: ResNet50) -> Layer:
    """A flax network as a layer."""

    def init(key: Array) -> tuple[Any, Any]:
        variables = model.init(key, jnp.zeros((1, 32, 32, 3)))
        return variables["params"], variables["batch_stats"]

    def apply(params: Any, state: Any, x: Array, **_: Any) -> tuple[Array, Any]:
        variables = {"params": params, "batch_stats": state}
        y, after = model.apply(variables, x, mutable=["batch_stats"])
        return y, after["batch_stats"]

    return Layer(init, apply)


def in_place(activation: str) -> Layer:
    """fnet's network under `fnet.recompute`."""
    model = models.get("resnet50", num_classes=1000, activation=activation)
    apply = fnet.recompute(functools.partial(model.apply, train=True))
    return Layer(model.init, lambda params, state, x, **_: apply(params, state, x))


def create(model: Layer) -> fnet.TrainState:
    return fnet.TrainState.create(model, OPTIMIZER, jax.random.key(0))


def train_step(model: Layer) -> tuple[jax.stages.Wrapped, fnet.TrainState]:
    """Return the step and the shapes of its state."""
    state = jax.eval_shape(functools.partial(create, model))
    return fnet.make_step(image_loss(model), OPTIMIZER), state


def time_steps(
    networks: Mapping[str, Layer], programs: Mapping[str, Executable], batch: Any, rounds: int
) -> dict[str, float]:
    """Seconds of each step: fnet's smallest program, flax's fastest."""
    calls = {}
    for name, model in networks.items():
        candidates: list[Any] = [programs[name]]
        if name.startswith("flax"):
            step, state = train_step(model)
            candidates = list(compile_with_each_option(step.lower(state, batch)))
        calls[name] = [step_caller(p, create(model), batch) for p in candidates]
    return fastest(calls, rounds)


def main() -> None:
    parser = argument_parser(__doc__, rounds=0)
    parser.add_argument("--batch", type=int, default=16, help="Batch size.")
    parser.add_argument("--size", type=int, default=128, help="Image size.")
    options = parser.parse_args()
    batch = {
        "image": jnp.ones((options.batch, options.size, options.size, 3)),
        "label": jnp.zeros(options.batch, int),
    }
    leaky = functools.partial(nn.leaky_relu, negative_slope=0.01)
    networks = {
        "flax linen, leaky_relu": (flax_layer(ResNet50(leaky)), None),
        "flax linen, relu": (flax_layer(ResNet50(nn.relu)), None),
        REMAT: (flax_layer(ResNet50(nn.relu, nn.remat(Bottleneck))), "flax linen, relu"),
        "fnet.abn, leaky_relu": (in_place("leaky_relu"), "flax linen, leaky_relu"),
        "fnet.abn, relu": (in_place("relu"), "flax linen, relu"),
        "fnet.reversible": (models.get("revnet", num_classes=1000), "flax linen, leaky_relu"),
    }
    models_by_name = {name: model for name, (model, _) in networks.items()}
    programs = {
        name: fnet.compile_step(*train_step(model), batch) for name, model in models_by_name.items()
    }
    seconds = {}
    if options.rounds:
        seconds = time_steps(models_by_name, programs, batch, options.rounds)

    rows = []
    for name, (_, baseline) in networks.items():
        report = programs[name].report
        row = {
            "": name,
            "parameters": f"{report.parameters / 1e6:.1f} M",
            "peak MB": f"{report.peak.total / 1e6:.0f}",
            "temporaries MB": f"{report.peak.temporaries / 1e6:.0f}",
            "peak / flax": f"{report.peak.total / programs[baseline].report.peak.total:.3f}"
            if baseline
            else "",
        }
        if seconds:
            row["s"] = f"{seconds[name]:.2f}"
            row["time / flax"] = f"{seconds[name] / seconds[baseline]:.2f}" if baseline else ""
        rows.append(row)
    print(f"Batch {options.batch} at {options.size} x {options.size}.\n")
    print(markdown_table(rows))
    baselines = {name: b for name, (_, b) in networks.items() if b and name != REMAT}
    size = f"batch {options.batch} at {options.size} x {options.size}"
    publish(claims(programs, baselines, size), options, "jax", "jaxlib", "flax", "optax")


def claims(
    programs: Mapping[str, Executable], baselines: Mapping[str, str], size: str
) -> Iterator[Claim]:
    """Compare peak and temporaries of each fnet step with flax."""
    remat = programs[REMAT].report.peak
    for name, baseline in baselines.items():
        ours, theirs = programs[name].report.peak, programs[baseline].report.peak
        what, reversible = f"ResNet-50 train step, {name}, {size}", "reversible" in name
        target = "<= 0.35" if reversible else "<= 0.5"
        yield Claim(f"{what}: peak", baseline, ours.total / theirs.total, target)
        yield Claim(f"{what}: peak", REMAT, ours.total / remat.total)
        ratio, target = ours.temporaries / theirs.temporaries, "<= 0.25" if reversible else ""
        yield Claim(f"{what}: temporaries", baseline, ratio, target)


if __name__ == "__main__":
    main()
