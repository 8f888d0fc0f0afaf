"""Train step of a language model compared with flax linen and optax: time and peak.

    python -m benchmarks.transformer_step
    JAX_PLATFORMS=cpu python -m benchmarks.transformer_step --target h100

The model has 12 layers of width 384 with 6 heads and SwiGLU, and a tied embedding of 32,768
tokens. The batch has 8 sequences of 256 tokens; the optimizer is AdamW, in float32. Both sides
start from the same parameters, and their losses are compared first. flax's step is jitted with a
donated state, with and without ``nn.remat`` around each block. Each side uses JAX's default
options or one of `fnet.compile_step`: the fastest for time and the smallest for peak, which may
be different programs. ``--target`` compiles for a device that is not present and reports peaks
only.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import fnet
import fnet.memory.target
from benchmarks.claims import Claim, add_sizes, argument_parser, publish
from benchmarks.measure import compile_with_each_option, interleaved, markdown_table, step_caller
from fnet import layers, models
from fnet.layers.attention_context import Passing
from fnet.memory import peak

OPTIMIZER = optax.adamw(1e-3)
KEY = jax.random.key(0)
POLICIES = ("none", "norms", "dots", "segments")
WITH_CONTEXT = POLICIES[:2]
FLAX, REMAT = "flax linen", "flax linen, nn.remat per block"


class Sizes(argparse.Namespace):
    """Sizes of the model and the batch."""

    blocks: int
    width: int
    heads: int
    tokens: int
    batch: int
    vocabulary: int

    @property
    def hidden(self) -> int:
        return 8 * round(self.width / 3)


class LinenBlock(nn.Module):
    """RMS norm, causal attention with rotary positions, RMS norm, SwiGLU."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        b, t, d = x.shape
        dense = functools.partial(nn.Dense, use_bias=False)
        qkv = dense(3 * d, name="query_key_value")(nn.RMSNorm(name="mixer_norm")(x))
        q, k, v = (a.reshape(b, t, self.heads, -1) for a in jnp.split(qkv, 3, -1))
        positions = jnp.arange(t)
        q, k = layers.rotary(q, positions), layers.rotary(k, positions)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, d)
        x = x + dense(d, name="output")(y)
        gate, up = jnp.split(
            dense(2 * self.hidden, name="expand")(nn.RMSNorm(name="feed_forward_norm")(x)), 2, -1
        )
        return x + dense(d, name="contract")(nn.silu(gate) * up)


class LinenModel(nn.Module):
    """The model with flax's layers."""

    sizes: Sizes
    block: type[nn.Module] = LinenBlock

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        s = self.sizes
        table = nn.Embed(s.vocabulary, s.width, name="embedding")
        x = table(tokens)
        for i in range(s.blocks):
            x = self.block(s.heads, s.hidden, name=str(i))(x)
        return table.attend(nn.RMSNorm(name="norm")(x))


def flax_params(params: Any) -> Any:
    """Convert fnet's parameters to flax's names."""
    blocks = {
        i: {
            "mixer_norm": p["mixer_norm"],
            "feed_forward_norm": p["feed_forward_norm"],
            **p["mixer"],
            **p["feed_forward"],
        }
        for i, p in params["blocks"].items()
    }
    return {"embedding": params["embedding"], "norm": params["norm"]} | blocks


def fnet_model(s: Sizes, context: Passing | None) -> tuple[Any, Callable]:
    attention = layers.attention(s.width, s.heads, causal=True, rotary=10_000.0, bias=False)
    block = layers.Block(attention, layers.feed_forward(s.width, s.hidden))
    model = models.language_model(
        vocabulary=s.vocabulary, width=s.width, blocks=[block] * s.blocks, context=context
    )

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Any:
        tokens = batch["tokens"]
        losses, state = model.losses(
            params, state, tokens[:, :-1], tokens[:, 1:], key=key, train=True
        )
        return losses.mean(1), fnet.Aux(state, {})

    return model, loss


def flax_step(model: LinenModel) -> jax.stages.Wrapped:
    def loss(params: Any, tokens: Array) -> Array:
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: tuple[Any, Any], batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch["tokens"])
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    return step


def flax_state(s: Sizes) -> tuple[Any, Any]:
    """The same initial parameters for flax, and the optimizer state."""
    params = flax_params(fnet.TrainState.create(fnet_model(s, None)[0], OPTIMIZER, KEY).params)
    return params, OPTIMIZER.init(params)


def programs(lowered: jax.stages.Lowered, target: Any) -> list[jax.stages.Compiled]:
    if target:
        return [lowered.compile(compiler_options=target.compiler_options)]
    return compile_with_each_option(lowered)


def main() -> None:
    parser = argument_parser(__doc__, rounds=7, target=True)
    add_sizes(
        parser,
        {"blocks": 12, "width": 384, "heads": 6, "tokens": 256, "batch": 8, "vocabulary": 32_768},
    )
    parser.add_argument(
        "--policies", nargs="+", default=POLICIES, choices=POLICIES, help="Remat policies."
    )
    s = parser.parse_args(namespace=Sizes())
    target = fnet.memory.target.describe(s.target) if s.target else None
    put = functools.partial(fnet.memory.target.shapes_on, target) if target else lambda x: x

    tokens = jax.random.randint(jax.random.key(1), (s.batch, s.tokens + 1), 0, s.vocabulary)
    batch = {"tokens": tokens}
    programs_by_name = {}
    contexts: tuple[Passing | None, ...] = (None, "lagged")
    for context in contexts:
        model, loss = fnet_model(s, context)
        state = jax.eval_shape(
            lambda m=model: fnet.TrainState.create(m, OPTIMIZER, jax.random.key(0))
        )
        for policy in s.policies:
            if context and policy not in WITH_CONTEXT:
                continue
            step = fnet.make_step(loss, OPTIMIZER, remat=policy)
            name = f"fnet, {policy}" + (f", {context} context" if context else "")
            programs_by_name[name] = programs(step.lower(*put((state, batch))), target)
    arguments = jax.eval_shape(functools.partial(flax_state, s))
    for name, block in ((FLAX, LinenBlock), (REMAT, nn.remat(LinenBlock))):
        lowered = flax_step(LinenModel(s, block)).lower(*put((arguments, batch)))
        programs_by_name[name] = programs(lowered, target)

    def new_state(name: str) -> Any:
        """A new state for a program, which donates it."""
        if name in (FLAX, REMAT):
            return flax_state(s)
        model = fnet_model(s, "lagged" if "lagged" in name else None)[0]
        return fnet.TrainState.create(model, OPTIMIZER, KEY)

    smallest = {n: min(peak(c).total for c in compiled) for n, compiled in programs_by_name.items()}
    seconds: dict[str, float] = {}
    if not target:
        fastest = {
            n: fastest_step(compiled, new_state(n), batch, max(1, s.rounds // 2))
            for n, compiled in programs_by_name.items()
        }
        first = {n: loss for n, (_, loss) in fastest.items()}
        assert np.allclose(list(first.values()), first[FLAX], rtol=1e-4), first
        seconds = interleaved({n: step for n, (step, _) in fastest.items()}, s.rounds)
    count = sum(a.size for a in jax.tree.leaves(arguments[0]))
    print(
        f"{s.blocks} layers, width {s.width}, {s.tokens} tokens, batch {s.batch}, "
        f"vocabulary {s.vocabulary:,}: {count / 1e6:.1f} M parameters"
        f"{f', compiled for {target.name}' if target else ''}.\n"
    )
    print(markdown_table([row(name, smallest, seconds) for name in programs_by_name]))
    where = target.name if target else jax.default_backend()
    publish(claims(smallest, seconds, where), s, "jax", "jaxlib", "flax", "optax")


def row(name: str, peaks: Mapping[str, int], seconds: Mapping[str, float]) -> dict[str, str]:
    """Build a row of the table; without times if nothing was run."""
    cells = {
        "step": name,
        "peak MB": f"{peaks[name] / 1e6:.0f}",
        "peak / flax": f"{peaks[name] / peaks[FLAX]:.2f}",
    }
    if seconds:
        cells["ms"] = f"{seconds[name] * 1e3:.0f}"
        cells["time / flax"] = f"{seconds[name] / seconds[FLAX]:.2f}"
    return cells


def claims(peaks: Mapping[str, int], seconds: Mapping[str, float], where: str) -> Iterator[Claim]:
    """Compare every fnet step with flax, and the policy "segments" also with ``nn.remat``."""
    for name in (n for n in peaks if n.startswith("fnet")):
        what = f"language model train step, {name.removeprefix('fnet, ')}, {where}"
        targets = {FLAX: ("<= 0.5", "<= 0.9")}
        if "segments" in name:
            targets[REMAT] = "", ""
        for side, (memory_target, time_target) in targets.items():
            ratio, baseline = peaks[name] / peaks[side], f"{side}, optax"
            yield Claim(f"{what}: peak of the smallest program", baseline, ratio, memory_target)
            if seconds:
                ratio = seconds[name] / seconds[side]
                claim = f"{what}: time of the fastest program"
                yield Claim(claim, baseline, ratio, time_target, "time")


def fastest_step(
    compiled: list[jax.stages.Compiled], state: Any, batch: Any, rounds: int
) -> tuple[Callable[[], Any], float]:
    """Find the fastest program; return a function that takes its steps, and the first loss."""
    steps = [step_caller(program, jax.tree.map(jnp.copy, state), batch) for program in compiled]
    first = float(steps[0]()["loss"])
    seconds = interleaved(dict(enumerate(steps)), rounds)
    return steps[min(seconds, key=seconds.__getitem__)], first


if __name__ == "__main__":
    main()
