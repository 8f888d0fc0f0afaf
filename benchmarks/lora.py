"""LoRA step compared with full AdamW, with materialized W + A B, and with PEFT: time and peak.

    python -m benchmarks.lora
    JAX_PLATFORMS=cpu python -m benchmarks.lora --target h100

The model has 8 residual blocks of two dense layers, 512 to 2,048 and back, in float32. The
batch has 64 rows, the adapters have rank 8, the optimizer is AdamW. Materialized means plain
JAX: ``jax.grad`` in the adapters of a loss of ``W + A B``, jitted with the state donated and the
frozen weights as an argument. PEFT is the same network in PyTorch, if torch and peft are
installed. All sides start from the same weights, and their losses are compared first. Each side
uses JAX's default options or one of `fnet.compile_step`: the fastest for time and the smallest
for peak. The peak of PEFT is not compared: PyTorch has no compiled program to read it from.
``--target`` compiles for a device that is not present and reports peaks only.
"""

import argparse
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import fnet
from benchmarks.claims import Claim, add_sizes, argument_parser, publish
from benchmarks.measure import compile_with_each_option, fastest, markdown_table
from fnet import layers, lora, quantization
from fnet.memory import peak, tree_bytes
from fnet.memory.target import compile_for, describe

RATE = 1e-3
OPTIMIZER = optax.adamw(RATE)
FULL, PLAIN, PEFT = "full AdamW", "materialized W + A B", "PEFT"
KINDS = {"LoRA": None, "LoRA, int8": "int8", "LoRA, nf4": "nf4"}
DORA = "DoRA"


class Sizes(argparse.Namespace):
    """Sizes of the model and the batch."""

    blocks: int
    width: int
    batch: int
    rank: int


def weights(s: Sizes) -> tuple[Any, Any]:
    """Frozen parameters and adapters as numpy arrays, the same for all sides."""
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    sizes = {"expand": (s.width, 4 * s.width), "contract": (4 * s.width, s.width)}
    frozen, adapters = {}, {}
    for name, (n_in, n_out) in sizes.items():
        frozen[name] = {
            "kernel": normal(s.blocks, n_in, n_out, scale=n_in**-0.5),
            "bias": np.zeros((s.blocks, n_out), np.float32),
        }
        adapters[f"{name}/kernel"] = {
            "a": normal(s.blocks, n_in, s.rank, scale=n_in**-0.5),
            "b": normal(s.blocks, s.rank, n_out, scale=0.01),
        }
    return frozen, adapters


def loss_of(s: Sizes) -> Callable[..., Any]:
    block = fnet.serial(
        expand=layers.dense(s.width, 4 * s.width),
        relu=layers.activation("relu"),
        contract=layers.dense(4 * s.width, s.width),
    )
    model = fnet.repeat(fnet.residual(block), s.blocks)

    def loss(params: Any, model_state: Any, batch: Any, key: Array) -> Array:
        y, _ = model.apply({"body": params | {"relu": {}}}, {}, batch["x"], train=True)
        return jnp.square(y).mean(-1)

    return loss


def adapted_state(s: Sizes, kind: str | None, dora: bool) -> fnet.TrainState:
    frozen, adapters = jax.tree.map(jnp.asarray, weights(s))
    if kind:
        frozen = quantization.quantize(frozen, kind)
    if dora:
        fresh = lora.init(config_of(s, dora), frozen, jax.random.key(1))
        for path, adapter in adapters.items():
            adapter["magnitude"] = fresh[path]["magnitude"]
    return fnet.TrainState.create(
        params=adapters,
        optimizer=OPTIMIZER,
        key=jax.random.key(0),
        model_state={"frozen": frozen, "model": {}},
    )


def config_of(s: Sizes, dora: bool) -> lora.LoRA:
    return lora.LoRA(s.rank, dora=dora)


def full_state(s: Sizes) -> fnet.TrainState:
    frozen = jax.tree.map(jnp.asarray, weights(s)[0])
    return fnet.TrainState.create(params=frozen, optimizer=OPTIMIZER, key=jax.random.key(0))


def plain_step(s: Sizes) -> tuple[jax.stages.Wrapped, Callable[[], Any]]:
    """The step that a user of plain JAX writes, and its state."""
    loss = loss_of(s)

    def of_adapters(adapters: Any, frozen: Any, batch: Any) -> Array:
        merged = {
            name: p | {"kernel": p["kernel"] + update["a"] @ update["b"]}
            for name, p in frozen.items()
            for update in [adapters[f"{name}/kernel"]]
        }
        return loss(merged, {}, batch, None).mean()

    def step(state: Any, batch: Any) -> Any:
        adapters, opt_state, frozen = state
        value, grads = jax.value_and_grad(of_adapters)(adapters, frozen, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, adapters)
        return (optax.apply_updates(adapters, updates), opt_state, frozen), {"loss": value}

    def create() -> Any:
        frozen, adapters = jax.tree.map(jnp.asarray, weights(s))
        return adapters, OPTIMIZER.init(adapters), frozen

    return jax.jit(step, donate_argnums=0), create


def jax_steps(s: Sizes) -> dict[str, tuple[jax.stages.Wrapped, Callable[[], Any]]]:
    """Jitted steps and functions that create their states, by name."""
    loss = loss_of(s)
    steps: dict[str, tuple[jax.stages.Wrapped, Callable[[], Any]]] = {
        FULL: (fnet.make_step(loss, OPTIMIZER).jitted, functools.partial(full_state, s)),
        PLAIN: plain_step(s),
    }
    for name, kind, dora in [*((n, k, False) for n, k in KINDS.items()), (DORA, None, True)]:
        step = fnet.make_step(lora.loss(loss, config_of(s, dora)), OPTIMIZER)
        steps[name] = step.jitted, functools.partial(adapted_state, s, kind, dora)
    return steps


def peft_step(s: Sizes, x: np.ndarray, threads: int) -> Callable[[], float]:
    """The same step in PyTorch with PEFT. It returns the loss."""
    import peft
    import torch

    frozen, adapters = weights(s)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expand = torch.nn.Linear(s.width, 4 * s.width)
            self.contract = torch.nn.Linear(4 * s.width, s.width)

        def forward(self, x: Any) -> Any:
            return x + self.contract(torch.relu(self.expand(x)))

    network = torch.nn.Sequential(*(Block() for _ in range(s.blocks)))
    config = peft.LoraConfig(r=s.rank, lora_alpha=s.rank, target_modules=["expand", "contract"])
    model = peft.get_peft_model(network, config)
    with torch.no_grad():
        for i, block in enumerate(network):
            for name, p in frozen.items():
                layer = getattr(block, name)
                update = adapters[f"{name}/kernel"]
                layer.base_layer.weight.copy_(torch.from_numpy(p["kernel"][i].T))
                layer.base_layer.bias.zero_()
                layer.lora_A["default"].weight.copy_(torch.from_numpy(update["a"][i].T))
                layer.lora_B["default"].weight.copy_(torch.from_numpy(update["b"][i].T))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=1e-4)  # optax's default
    batch = torch.from_numpy(x)

    def step() -> float:
        torch.set_num_threads(threads)
        optimizer.zero_grad()
        value = model(batch).square().mean()
        value.backward()
        optimizer.step()
        return float(value.detach())

    return step


def callers(programs: Sequence[Any], state: Any, batch: Any) -> list[Callable[[], Any]]:
    """Functions that each take one step with a program, all from the same last state."""
    box = [state]

    def step(program: Any) -> Any:
        box[0], metrics = program(box[0], batch)
        return metrics

    return [functools.partial(step, program) for program in programs]


def claims(s: Sizes, totals: Any, seconds: Any, where: str) -> Iterator[Claim]:
    what = f"{s.blocks} blocks of {s.width}, batch {s.batch}, rank {s.rank}, {where}"
    for name, baseline, target in [
        ("LoRA", FULL, "<= 0.35"),
        ("LoRA", PLAIN, "<= 0.5"),
        ("LoRA, int8", FULL, "<= 0.15"),
        ("LoRA, nf4", FULL, "<= 0.1"),
        (DORA, FULL, "<= 0.4"),
    ]:
        ratio = totals[name] / totals[baseline]
        yield Claim(f"{name}, {what}: peak of the step", baseline, ratio, target)
    for name, baseline, target in [
        ("LoRA", FULL, "<= 1.0"),
        ("LoRA", PLAIN, "<= 1.0"),
        ("LoRA", PEFT, "<= 1.0"),
        ("LoRA, int8", "LoRA", ""),
        ("LoRA, nf4", "LoRA", ""),
        (DORA, "LoRA", ""),
    ]:
        if name in seconds and baseline in seconds:
            ratio = seconds[name] / seconds[baseline]
            yield Claim(f"{name}, {what}: time of the step", baseline, ratio, target, "time")


def main() -> None:
    parser = argument_parser(__doc__, rounds=7, target=True)
    add_sizes(parser, {"blocks": 8, "width": 512, "batch": 64, "rank": 8})
    options = parser.parse_args(namespace=Sizes())
    x = np.random.default_rng(1).standard_normal((options.batch, options.width)).astype(np.float32)
    batch = {"x": jnp.asarray(x)}
    target = describe(options.target) if options.target else None
    totals: dict[str, int] = {}
    calls: dict[str, list[Callable[[], Any]]] = {}
    for name, (step, create) in jax_steps(options).items():
        shapes = jax.eval_shape(create)
        if target:
            totals[name] = peak(compile_for(target, step, shapes, batch)).total
            continue
        programs = compile_with_each_option(step.lower(shapes, batch))
        totals[name] = min(peak(program).total for program in programs)
        calls[name] = callers(programs, create(), batch)
    seconds: dict[str, float] = {}
    missing = []
    packages = ["jax", "jaxlib", "optax", "jax-cuda13-plugin", "libtpu"]
    if calls:
        if all(importlib.util.find_spec(name) for name in ("torch", "peft")):
            # On busy machines one thread may be faster than all.
            calls[PEFT] = [peft_step(options, x, threads) for threads in (1, os.cpu_count() or 1)]
            packages += ["torch", "peft"]
        else:
            missing = ["PEFT, which needs torch and peft"]
        losses = {name: _loss(steps[0]()) for name, steps in calls.items()}
        for name in (PLAIN, PEFT):
            if name in losses and not math.isclose(losses[name], losses["LoRA"], rel_tol=1e-3):
                raise SystemExit(f"benchmarks.lora: the losses differ: {losses}")
        seconds = fastest(calls, options.rounds)
    where = options.target or jax.default_backend()
    count = sum(a.size for a in jax.tree.leaves(weights(options)[0]))
    rows = [
        {
            "": name,
            "peak, MB": f"{total / 1e6:.1f}",
            "bytes per weight": f"{total / count:.2f}",
            **({"step, ms": f"{seconds[name] * 1e3:.0f}"} if seconds else {}),
        }
        for name, total in totals.items()
    ]
    if PEFT in seconds:
        peft = f"{seconds[PEFT] * 1e3:.0f}"
        rows.append({"": PEFT, "peak, MB": "-", "bytes per weight": "-", "step, ms": peft})
    state = tree_bytes(jax.eval_shape(functools.partial(full_state, options)).params)
    print(f"{count:,} weights, {state / 1e6:.0f} MB, {where}:\n\n{markdown_table(rows)}\n")
    publish(list(claims(options, totals, seconds, where)), options, *packages, missing=missing)


def _loss(result: Any) -> float:
    return float(result["loss"] if isinstance(result, dict) else result)


if __name__ == "__main__":
    main()
