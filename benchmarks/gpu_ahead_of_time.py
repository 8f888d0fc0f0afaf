"""Memory and estimated time of the programs of `benchmarks.gpu`, compiled without a GPU.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu_ahead_of_time --target h200

This needs ``fnet-jax[target-gpu]``. The time of a program is estimated from its instructions
(`fnet.memory.roofline`). What runs on a GPU takes longer: docs/benchmarks/gpu.md has the ratios. It
takes half an hour, because plans are found within four budgets.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fnet
from benchmarks import clipped_grad
from benchmarks import linear_cross_entropy as fused_loss
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.gpu import Program, example_gradients, language_model_step, loss_gradient
from benchmarks.measure import markdown_table
from fnet import layers, models
from fnet.losses import cross_entropy
from fnet.memory import peak, roofline
from fnet.memory.target import TARGETS, Target, compile_for, describe
from fnet.step import plan_step

STEP = "train step of a language model, 12 blocks of 768, 16 x 1,024 tokens"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin")
BUDGETS = {0.9: "<= 1.03", 0.7: "<= 1.08", 0.5: "<= 1.15", 0.35: "<= 1.25"}
"""Targets of the time within these shares of the plain peak."""


class Row(NamedTuple):
    """A compiled program: what it does, how, its bytes and its estimated seconds."""

    case: str
    name: str
    bytes: int
    seconds: float


def compiled(target: Target, case: str, name: str, jitted: Any, *args: Any, **options: Any) -> Row:
    """Compile a program for the target."""
    found = compile_for(target, jitted, *args, compiler_options=options)
    assert target.peaks is not None
    seconds = roofline.estimate(found, target.peaks).seconds
    return Row(case, name, peak(found).total, seconds)


def train_steps(target: Target) -> Iterator[Row]:
    """A train step of a language model, as it is and within budgets."""
    step, state, batch, _ = language_model_step(tiny=False)
    plain = compiled(target, STEP, "plain", step.jitted, state, batch)
    yield plain
    for share in BUDGETS:
        chosen = plan_step(step, state, batch, int(share * plain.bytes), target=target).chosen
        planned = step.replace(remat=chosen.policy, microbatches=chosen.microbatches)
        options = chosen.compiler_options
        name = f"budget of {share:.0%}"
        yield compiled(target, STEP, name, planned.jitted, state, batch, **options)


def programs() -> Iterator[tuple[str, str, Program]]:
    """Programs of `benchmarks.gpu`: the case, the name, and how to make it."""
    losses = {"optax": fused_loss.optax_losses, "fnet": fnet.linear_cross_entropy}
    for name, function in losses.items():
        case = "fused loss, 8,192 tokens x 2,048 x 131,072, bfloat16"
        yield case, name, loss_gradient(function, tiny=False)

    def per_layer(loss: Any) -> Any:
        return lambda *args: fnet.clipped_grad(loss, 1.0, per_layer=True)(*args)[0]

    gradients = {
        "plain": clipped_grad.plain,
        "fnet": functools.partial(clipped_grad.clipped, bound=1.0),
        "fnet, per layer": per_layer,
        "vmap": functools.partial(clipped_grad.clip_and_sum, bound=1.0),
    }
    for name, gradient in gradients.items():
        case = "clipped gradients of 64 sequences of 256 tokens, a transformer of width 768"
        yield case, name, example_gradients(gradient, tiny=False)
    del gradients["fnet, per layer"]
    for model, (loss, *shapes) in published_models().items():
        for name, gradient in gradients.items():
            function = jax.jit(functools.partial(gradient_of, gradient, loss))
            yield (
                f"clipped gradients of {model}",
                name,
                Program(function, functools.partial(tuple, shapes)),
            )


def gradient_of(gradient: Any, loss: Any, params: Any, frozen: Any, x: Any, y: Any) -> Any:
    return gradient(lambda params, x, y: loss(params, frozen, x, y))(params, x, y)


def published_models() -> dict[str, tuple[Any, ...]]:
    """A loss of examples ``(params, frozen, x, y)`` of each, and the shapes of its arguments."""

    def text(vocabulary: int, batch: int, tokens: int, causal: bool) -> tuple[Any, ...]:
        hidden = layers.feed_forward(768, 3072, activation="gelu", gated=False)
        block = layers.Block(layers.attention(768, 12, causal=causal), hidden)
        options: Any = {"norm": "layer", "positions": tokens}
        model = models.language_model(
            vocabulary=vocabulary, width=768, blocks=[block] * 12, **options
        )
        params, state = jax.eval_shape(model.init, jax.random.key(0))

        def loss(params: Any, frozen: Any, x: Any, y: Any) -> Any:
            return model.losses(params, state, x, y, train=True)[0].mean(1)

        ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
        return loss, params, {}, ids, ids

    def images(name: str, **options: Any) -> tuple[Any, ...]:
        model = models.get(name, num_classes=1000, **options)
        params, state = jax.eval_shape(model.init, jax.random.key(0))

        def loss(params: Any, frozen: Any, x: Any, y: Any) -> Any:
            return cross_entropy(model.apply(params, state, x, train=True)[0], y)

        shapes = ((64, 224, 224, 3), jnp.float32), ((64,), jnp.int32)
        return loss, params, {}, *(jax.ShapeDtypeStruct(*each) for each in shapes)

    gpt2 = loss, weights, _, *tokens = text(50_257, 16, 1024, causal=True)
    lora = fnet.lora.LoRA(8, targets=("blocks/*/kernel",))
    adapters = jax.eval_shape(functools.partial(fnet.lora.init, lora), weights, jax.random.key(0))

    def lora_loss(adapters: Any, weights: Any, x: Any, y: Any) -> Any:
        return fnet.lora.wrap(lambda params, x, y: loss(params, {}, x, y), lora)(
            adapters, weights, x, y
        )

    return {
        "GPT-2, 16 x 1,024 tokens": gpt2,
        "LoRA (rank 8) of that GPT-2": (lora_loss, adapters, weights, *tokens),
        "BERT, 64 x 128 tokens": text(30_522, 64, 128, causal=False),
        "ViT-B/16, 64 images of 224 pixels": images("vit_base"),
        "ResNet-50 with group norm, 64 images of 224 pixels": images("resnet50", norm="group"),
    }


TARGETS_OF = {"fused loss": ("<= 0.35", "<= 1.0"), "clipped": ("<= 1.0", "<= 1.15")}
"""Targets of memory and of time of fnet, by the first words of the case."""


def claims(rows: list[Row]) -> Iterator[Claim]:
    """Each row relative to the first of its case."""
    first: dict[str, Row] = {}
    for row in rows:
        base = first.setdefault(row.case, row)
        if row is base:
            continue
        memory, time = next((t for k, t in TARGETS_OF.items() if row.case.startswith(k)), ("", ""))
        if row.name == "vmap":
            memory = time = ""
        if row.name.endswith("per layer"):
            time = "<= 1.05"
        if "LoRA" in row.case and time:
            time = "<= 1.02"
        if row.name.startswith("budget"):
            share = float(row.name.split()[-1].rstrip("%")) / 100
            memory, time = f"<= {share:g}", BUDGETS[share]
        what = f"{row.case}, {row.name}"
        yield Claim(f"peak, {what}", base.name, row.bytes / base.bytes, memory, "memory")
        yield Claim(
            f"estimated time, {what}", base.name, row.seconds / base.seconds, time, "estimate"
        )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--target", choices=TARGETS, default="h200", help="Device to compile for.")
    parser.add_argument("--only", default="", help="Part of the names of cases.")
    args = parser.parse_args()
    target, rows = describe(args.target), list[Row]()

    def add(row: Row) -> None:
        rows.append(row)
        print(f"{row.case}, {row.name}: {row.bytes / 1e6:,.1f} MB, {row.seconds * 1e3:.2f} ms")

    for case, name, program in programs():
        if args.only not in case:
            continue
        add(compiled(target, case, name, program.function, *jax.eval_shape(program.make)))
    for row in train_steps(target) if args.only in STEP else ():
        add(row)
    table = [
        {"": f"{r.case}, {r.name}", "MB": f"{r.bytes / 1e6:,.1f}", "ms": f"{r.seconds * 1e3:.2f}"}
        for r in rows
    ]
    print(markdown_table(table))
    publish(claims(rows), args, *PACKAGES)


if __name__ == "__main__":
    main()
