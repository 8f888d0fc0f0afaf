"""Peak memory of train steps of image networks, with fnet's norm and with flax's.

    python -m benchmarks.vision_networks                  # all, 224 x 224, batch 8
    python -m benchmarks.vision_networks --names resnet50 --rounds 5
    JAX_PLATFORMS=cpu python -m benchmarks.vision_networks --target h100

Each network is measured in three forms: with ``flax.linen.BatchNorm`` and relu for every norm; in
place, with `fnet.abn` and leaky_relu and the remat policy ``norms`` (`fnet.recompute`); and in
place with the remat policy ``segments``. The optimizer is SGD with momentum, in float32. Peaks
are arguments + outputs - aliased + temporaries of the compiled step, with the best of the options
of `fnet.compile_step`. The largest batch in the budget is a linear estimate from the peaks at the
batch size and at eight times the batch size. Nothing is run by default. ``--rounds`` also times
the steps, flax's with its fastest options. ``--target`` compiles for a device that is not
present.
"""

import functools
import sys
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
from fnet import Layer, memory, models
from fnet.memory.target import Target, describe, shapes_on

NAMES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50",
    "resnext101",
    "resnext152",
    "wider_resnet16",
    "wider_resnet20",
    "wider_resnet38",
    "wider_resnet16_a2",
    "wider_resnet20_a2",
    "wider_resnet38_a2",
    "densenet121",
    "densenet169",
    "densenet201",
    "densenet264",
)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
FORMS = ("flax", "in place", "segments")


def flax_norm(channels: int, *, activation: str, **_: Any) -> Layer:
    """flax's batch norm, followed by relu unless the activation is identity."""
    norm = nn.BatchNorm(momentum=0.9)

    def init(key: Array) -> tuple[Any, Any]:
        variables = norm.init(key, jnp.zeros((1, channels)), use_running_average=False)
        return variables["params"], variables["batch_stats"]

    def apply(params: Any, state: Any, x: Array, *, train: bool, **_: Any) -> tuple[Array, Any]:
        variables = {"params": params, "batch_stats": state}
        y, after = norm.apply(variables, x, use_running_average=not train, mutable=["batch_stats"])
        return y if activation == "identity" else nn.relu(y), after["batch_stats"]

    return Layer(init, apply)


def network(name: str, form: str) -> Layer:
    """Build the network with flax's norm and relu, or with fnet's norm."""
    options = {"norm": flax_norm, "activation": "relu"} if form == "flax" else {}
    return models.get(name, num_classes=1000, **options)


def train_step(name: str, form: str, batch: int, size: int) -> tuple[Any, Any, Any]:
    """Return the step and the shapes of its state and batch."""
    model = network(name, form)
    policy = {"flax": "none", "in place": "norms", "segments": "segments"}[form]
    step = fnet.make_step(memory.REMAT_POLICIES[policy].apply(image_loss(model)), OPTIMIZER)
    state = jax.eval_shape(
        functools.partial(fnet.TrainState.create, model, OPTIMIZER), jax.random.key(0)
    )
    image = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    label = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return step, state, {"image": image, "label": label}


def peak(name: str, form: str, batch: int, size: int, target: Target | None) -> int:
    """Peak bytes with the best of the compiler options, without generating code."""
    step, *shapes = train_step(name, form, batch, size)
    lowered = step.lower(*(shapes_on(target, shapes) if target else shapes))
    candidates = memory.CANDIDATE_OPTIONS.get(jax.default_backend(), ({},))
    if target:
        candidates = (target.compiler_options,)
    return min(memory.estimate_peak(lowered, options, target).total for options in candidates)


def seconds(name: str, batch: int, size: int, rounds: int) -> dict[str, float]:
    """Median seconds of each form's step; flax's with its fastest options."""
    data = {"image": jnp.ones((batch, size, size, 3)), "label": jnp.zeros(batch, jnp.int32)}
    calls = {}
    for form in FORMS:
        step, *shapes = train_step(name, form, batch, size)
        candidates: list[Any] = (
            [*compile_with_each_option(step.lower(*shapes))]
            if form == "flax"
            else [fnet.compile_step(step, *shapes)]
        )
        create = functools.partial(fnet.TrainState.create, network(name, form), OPTIMIZER)
        calls[form] = [step_caller(p, create(jax.random.key(0)), data) for p in candidates]
    return fastest(calls, rounds)


def main() -> None:
    parser = argument_parser(__doc__, rounds=0, target=True)
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES, help="Networks.")
    parser.add_argument("--batch", type=int, default=8, help="Batch size.")
    parser.add_argument("--size", type=int, default=224, help="Image size.")
    parser.add_argument("--budget", default="8GiB", help="Memory for the largest batch.")
    options = parser.parse_args()
    budget = memory.parse_bytes(options.budget)
    target = describe(options.target) if options.target else None
    what = f"batch {options.batch} at {options.size}" + (f", {target.name}" if target else "")
    rows, claims = [], []
    for name in options.names:
        peaks = {f: peak(name, f, options.batch, options.size, target) for f in FORMS}
        row = {"": name, "flax MB": f"{peaks['flax'] / 1e6:,.0f}"}
        for form in FORMS[1:]:
            row[f"{form} MB"] = f"{peaks[form] / 1e6:,.0f}"
            ratio = peaks[form] / peaks["flax"]
            row[f"{form} / flax"] = f"{ratio:.2f}"
            goal = {"resnext": "<= 0.5", "densenet": "<= 0.6"}.get(name.rstrip("0123456789"), "")
            claim = f"{name}, {form}, {what}: peak of the train step"
            claims.append(Claim(claim, "flax BatchNorm, relu", ratio, goal))
        for form in FORMS:
            larger = peak(name, form, 8 * options.batch, options.size, target)
            bytes_per_example = (larger - peaks[form]) / (7 * options.batch)
            largest = options.batch + (budget - peaks[form]) / bytes_per_example
            row[f"{options.budget}, {form}"] = f"{largest:.0f}"
        if options.rounds and not target:
            times = seconds(name, options.batch, options.size, options.rounds)
            for form in FORMS[1:]:
                row[f"time {form} / flax"] = f"{times[form] / times['flax']:.2f}"
        rows.append(row)
        print(markdown_table([row]), file=sys.stderr, flush=True)
    print(f"{what.capitalize()}.\n")
    print(markdown_table(rows))
    publish(claims, options, "jax", "jaxlib", "flax", "optax")


if __name__ == "__main__":
    main()
