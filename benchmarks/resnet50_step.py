"""A whole ResNet-50 train step: its peak with fnet's norms, and reversible, against flax linen.

    python -m benchmarks.resnet50_step

Batch 16 at 128 x 128, SGD with momentum, float32: arguments + outputs - aliased +
temporaries of the compiled step, compiled with each of the options that
`fnet.compile_step` tries, the one with the lowest peak taken, flax's too. Nothing is
run; ``--rounds`` runs and times each step as well.
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
from benchmarks.measure import interleaved, markdown
from fnet import Layer, models
from fnet.step import Executable

BLOCKS = (3, 4, 6, 3)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


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

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(64, (7, 7), (2, 2), padding=[(3, 3)] * 2, use_bias=False)(x)
        x = self.act(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=[(1, 1)] * 2)
        for i, blocks in enumerate(BLOCKS):
            for j in range(blocks):
                x = Bottleneck(64 * 2**i, 2 if i and not j else 1, self.act)(x)
        return nn.Dense(1000)(x.mean((1, 2)))


def in_flax(act: Callable[[Array], Array]) -> Layer:
    """The flax network as a layer."""
    model = ResNet50(act)

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


def compiled(model: Layer, batch: Any) -> Executable:
    """The train step, ahead of time."""

    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, fnet.Aux]:
        logits, state = model.apply(params, state, batch["image"], key=key, train=True)
        return fnet.losses.cross_entropy(logits, batch["label"]), fnet.Aux(state, {})

    create = functools.partial(fnet.TrainState.create, model, OPTIMIZER)
    state = jax.eval_shape(create, jax.random.key(0))
    return fnet.compile_step(fnet.make_step(loss, OPTIMIZER), state, batch)


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
        "flax linen, leaky_relu": (in_flax(leaky), None),
        "flax linen, relu": (in_flax(nn.relu), None),
        "fnet.abn, leaky_relu": (in_place("leaky_relu"), "flax linen, leaky_relu"),
        "fnet.abn, relu": (in_place("relu"), "flax linen, relu"),
        "fnet.reversible": (models.get("revnet", num_classes=1000), "flax linen, leaky_relu"),
    }
    programs = {name: compiled(model, batch) for name, (model, _) in networks.items()}
    seconds = {}
    if options.rounds:
        states = {
            name: fnet.TrainState.create(model, OPTIMIZER, jax.random.key(0))
            for name, (model, _) in networks.items()
        }

        def step(name: str) -> Any:
            states[name], metrics = programs[name](states[name], batch)
            return metrics

        calls = {name: functools.partial(step, name) for name in programs}
        seconds = interleaved(calls, options.rounds)

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
    peers = {name: peer for name, (_, peer) in networks.items() if peer}
    size = f"batch {options.batch} at {options.size} x {options.size}"
    publish(claims(programs, peers, size), options, "jax", "jaxlib", "flax", "optax")


def claims(
    programs: Mapping[str, Executable], peers: Mapping[str, str], size: str
) -> Iterator[Claim]:
    """Each network of ours to the same in flax, as the whole step's peak and as temporaries."""
    for name, peer in peers.items():
        ours, theirs = programs[name].report.peak, programs[peer].report.peak
        reversible = "reversible" in name
        for what, ratio, target in (
            ("peak", ours.total / theirs.total, "<= 0.35" if reversible else "<= 0.5"),
            ("temporaries", ours.temporaries / theirs.temporaries, "<= 0.25" if reversible else ""),
        ):
            yield Claim(f"ResNet-50 train step, {name}, {size}: {what}", peer, ratio, target)


if __name__ == "__main__":
    main()
