"""A whole ResNet-50 train step: its peak with fnet's norms, and reversible, against flax linen.

    python -m benchmarks.resnet50_step

Batch 16 at 128 x 128, SGD with momentum, float32: arguments + outputs - aliased +
temporaries of the compiled step, compiled with each of the options that
`fnet.compile_step` tries, the one with the lowest peak taken, flax's too, also with
``nn.remat`` around each block. Nothing is run; ``--rounds`` runs and times each step as
well, flax's in the fastest way that it can be compiled.
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
from benchmarks.measure import compiled_each_way, fastest, markdown, stepping
from benchmarks.networks import image_loss
from fnet import Layer, models
from fnet.step import Executable

BLOCKS = (3, 4, 6, 3)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
REMAT = "flax linen, relu, nn.remat a block"


class Bottleneck(nn.Module):
    """He et al. 2016, the stride on the 3x3 convolution."""

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
    """The network of ``models.get("resnet50")``, in flax."""

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


def in_flax(model: ResNet50) -> Layer:
    """The flax network as a layer."""

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
    """The step, and the shapes of its state."""
    state = jax.eval_shape(functools.partial(create, model))
    return fnet.make_step(image_loss(model), OPTIMIZER), state


def timed(
    networks: Mapping[str, Layer], programs: Mapping[str, Executable], batch: Any, rounds: int
) -> dict[str, float]:
    """Seconds of each step: ours as it is smallest, flax's as it is fastest."""
    calls = {}
    for name, model in networks.items():
        ways: list[Any] = [programs[name]]
        if name.startswith("flax"):
            step, state = train_step(model)
            ways = list(compiled_each_way(step.lower(state, batch)))
        calls[name] = [stepping(way, create(model), batch) for way in ways]
    return fastest(calls, rounds)


def main() -> None:
    parser = argument_parser(__doc__, rounds=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=128)
    options = parser.parse_args()
    batch = {
        "image": jnp.ones((options.batch, options.size, options.size, 3)),
        "label": jnp.zeros(options.batch, int),
    }
    leaky = functools.partial(nn.leaky_relu, negative_slope=0.01)
    networks = {
        "flax linen, leaky_relu": (in_flax(ResNet50(leaky)), None),
        "flax linen, relu": (in_flax(ResNet50(nn.relu)), None),
        REMAT: (in_flax(ResNet50(nn.relu, nn.remat(Bottleneck))), "flax linen, relu"),
        "fnet.abn, leaky_relu": (in_place("leaky_relu"), "flax linen, leaky_relu"),
        "fnet.abn, relu": (in_place("relu"), "flax linen, relu"),
        "fnet.reversible": (models.get("revnet", num_classes=1000), "flax linen, leaky_relu"),
    }
    made = {name: model for name, (model, _) in networks.items()}
    programs = {name: fnet.compile_step(*train_step(model), batch) for name, model in made.items()}
    seconds = timed(made, programs, batch, options.rounds) if options.rounds else {}

    rows = []
    for name, (_, peer) in networks.items():
        report = programs[name].report
        row = {
            "": name,
            "parameters": f"{report.parameters / 1e6:.1f} M",
            "peak MB": f"{report.peak.total / 1e6:.0f}",
            "temporaries MB": f"{report.peak.temporaries / 1e6:.0f}",
            "peak / flax": f"{report.peak.total / programs[peer].report.peak.total:.3f}"
            if peer
            else "",
        }
        if seconds:
            row["s"] = f"{seconds[name]:.2f}"
            row["time / flax"] = f"{seconds[name] / seconds[peer]:.2f}" if peer else ""
        rows.append(row)
    print(f"Batch {options.batch} at {options.size} x {options.size}.\n")
    print(markdown(rows))
    peers = {name: peer for name, (_, peer) in networks.items() if peer and name != REMAT}
    size = f"batch {options.batch} at {options.size} x {options.size}"
    publish(claims(programs, peers, size), options, "jax", "jaxlib", "flax", "optax")


def claims(
    programs: Mapping[str, Executable], peers: Mapping[str, str], size: str
) -> Iterator[Claim]:
    """Each network of ours to the same in flax, as the whole step's peak and as temporaries."""
    recomputed = programs[REMAT].report.peak
    for name, peer in peers.items():
        ours, theirs = programs[name].report.peak, programs[peer].report.peak
        what, reversible = f"ResNet-50 train step, {name}, {size}", "reversible" in name
        target = "<= 0.35" if reversible else "<= 0.5"
        yield Claim(f"{what}: peak", peer, ours.total / theirs.total, target)
        yield Claim(f"{what}: peak", REMAT, ours.total / recomputed.total)
        ratio, target = ours.temporaries / theirs.temporaries, "<= 0.25" if reversible else ""
        yield Claim(f"{what}: temporaries", peer, ratio, target)


if __name__ == "__main__":
    main()
