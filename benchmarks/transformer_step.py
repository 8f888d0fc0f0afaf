"""A language model's train step against the same model in flax linen with optax: time and peak.

    python -m benchmarks.transformer_step
    JAX_PLATFORMS=cpu python -m benchmarks.transformer_step --target h100

12 layers of width 384 with 6 heads and SwiGLU, 256 tokens, batch 8, 32,768 words in one
table for both ends, AdamW, float32. Both start from the same parameters, and their
losses are compared first. flax's step is jitted with its state donated, also with
``nn.remat`` around each block; of the compiler options that `fnet.compile_step` tries, and
of none, each side has the fastest for time and the smallest for peak: these may be two
programs. With ``--target``, peaks alone, for a device that is not there.
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
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import compiled_each_way, interleaved, markdown, stepping
from fnet import layers, models
from fnet.layers.attention_context import Passing
from fnet.memory import peak

OPTIMIZER = optax.adamw(1e-3)
KEY = jax.random.key(0)
POLICIES = ("none", "norms", "dots", "segments")
FLAX, REMAT = "flax linen", "flax linen, nn.remat a block"


class Sizes(argparse.Namespace):
    """Of the model and the batch."""

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
        places = jnp.arange(t)
        q, k = layers.rotary(q, places), layers.rotary(k, places)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, d)
        x = x + dense(d, name="output")(y)
        gate, up = jnp.split(
            dense(2 * self.hidden, name="expand")(nn.RMSNorm(name="feed_forward_norm")(x)), 2, -1
        )
        return x + dense(d, name="contract")(nn.silu(gate) * up)


class LinenModel(nn.Module):
    """The same model with flax's layers."""

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


def renamed(params: Any) -> Any:
    """fnet's parameters by flax's names."""
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


def in_fnet(s: Sizes, context: Passing | None) -> tuple[Any, Callable]:
    attention = layers.attention(s.width, s.heads, causal=True, rotary=10_000.0, bias=False)
    block = layers.Block(attention, layers.feed_forward(s.width, s.hidden))
    model = models.language_model(
        vocabulary=s.vocabulary, width=s.width, blocks=[block] * s.blocks, context=context
    )

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Any:
        tokens = batch["tokens"]
        each, state = model.losses(
            params, state, tokens[:, :-1], tokens[:, 1:], key=key, train=True
        )
        return each.mean(1), fnet.Aux(state, {})

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


def for_flax(s: Sizes) -> tuple[Any, Any]:
    """The same initial parameters, and the optimizer's state."""
    params = renamed(fnet.TrainState.create(in_fnet(s, None)[0], OPTIMIZER, KEY).params)
    return params, OPTIMIZER.init(params)


def programs(lowered: jax.stages.Lowered, target: Any) -> list[jax.stages.Compiled]:
    if target:
        return [lowered.compile(compiler_options=target.compiler_options)]
    return compiled_each_way(lowered)


def main() -> None:
    parser = argument_parser(__doc__, rounds=7, target=True)
    for name, size in {
        "blocks": 12,
        "width": 384,
        "heads": 6,
        "tokens": 256,
        "batch": 8,
        "vocabulary": 32_768,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    s = parser.parse_args(namespace=Sizes())
    target = fnet.memory.target.describe(s.target) if s.target else None
    put = functools.partial(fnet.memory.target.shapes_on, target) if target else lambda x: x

    tokens = jax.random.randint(jax.random.key(1), (s.batch, s.tokens + 1), 0, s.vocabulary)
    batch = {"tokens": tokens}
    made = {}
    contexts: tuple[Passing | None, ...] = (None, "lagged")
    for context in contexts:
        model, loss = in_fnet(s, context)
        state = jax.eval_shape(
            lambda m=model: fnet.TrainState.create(m, OPTIMIZER, jax.random.key(0))
        )
        for policy in s.policies if context is None else s.policies[:2]:
            step = fnet.make_step(loss, OPTIMIZER, remat=policy)
            name = f"fnet, {policy}" + (f", {context} context" if context else "")
            made[name] = programs(step.lower(*put((state, batch))), target)
    arguments = jax.eval_shape(functools.partial(for_flax, s))
    for name, block in ((FLAX, LinenBlock), (REMAT, nn.remat(LinenBlock))):
        lowered = flax_step(LinenModel(s, block)).lower(*put((arguments, batch)))
        made[name] = programs(lowered, target)

    def fresh(name: str) -> Any:
        """State as the program takes it; each step renews it in place."""
        if name in (FLAX, REMAT):
            return for_flax(s)
        model = in_fnet(s, "lagged" if "lagged" in name else None)[0]
        return fnet.TrainState.create(model, OPTIMIZER, KEY)

    smallest = {n: min(peak(c).total for c in compiled) for n, compiled in made.items()}
    seconds: dict[str, float] = {}
    if not target:
        fastest = {n: quickest(compiled, fresh(n), batch) for n, compiled in made.items()}
        first = {n: loss for n, (_, loss) in fastest.items()}
        assert np.allclose(list(first.values()), first[FLAX], rtol=1e-4), first
        seconds = interleaved({n: step for n, (step, _) in fastest.items()}, s.rounds)
    count = sum(a.size for a in jax.tree.leaves(arguments[0]))
    print(
        f"{s.blocks} layers, width {s.width}, {s.tokens} tokens, batch {s.batch}, "
        f"{s.vocabulary:,} words: {count / 1e6:.1f} M parameters"
        f"{f', compiled for {target.name}' if target else ''}.\n"
    )
    print(markdown([row(name, smallest, seconds) for name in made]))
    where = target.name if target else jax.default_backend()
    publish(claims(smallest, seconds, where), s, "jax", "jaxlib", "flax", "optax")


def row(name: str, peaks: Mapping[str, int], seconds: Mapping[str, float]) -> dict[str, str]:
    """A line of the table; without times where nothing was run."""
    cells = {
        "step": name,
        "peak MB": f"{peaks[name] / 1e6:.0f}",
        "of flax's": f"{peaks[name] / peaks[FLAX]:.2f}",
    }
    if seconds:
        cells["ms"] = f"{seconds[name] * 1e3:.0f}"
        cells["of flax's time"] = f"{seconds[name] / seconds[FLAX]:.2f}"
    return cells


def claims(peaks: Mapping[str, int], seconds: Mapping[str, float], where: str) -> Iterator[Claim]:
    """Of every step of ours; what recomputes in segments also beside flax's own recomputation."""
    for name in (n for n in peaks if n.startswith("fnet")):
        what = f"language model's train step, {name.removeprefix('fnet, ')}, {where}"
        wanted = {FLAX: ("<= 0.5", "<= 0.9")}
        if "segments" in name:
            wanted[REMAT] = "", ""
        for peer, (of_memory, of_time) in wanted.items():
            ratio, words = peaks[name] / peaks[peer], f"{peer}, optax"
            yield Claim(f"{what}: peak of the smallest program", words, ratio, of_memory)
            if seconds:
                ratio = seconds[name] / seconds[peer]
                yield Claim(f"{what}: time of the fastest", words, ratio, of_time, "time")


def quickest(
    compiled: list[jax.stages.Compiled], state: Any, batch: Any
) -> tuple[Callable[[], Any], float]:
    """A step of the fastest program, which goes on from its own state, and the first loss."""
    steps = [stepping(program, jax.tree.map(jnp.copy, state), batch) for program in compiled]
    first = float(steps[0]()["loss"])
    seconds = interleaved(dict(enumerate(steps)), 3)
    return steps[min(seconds, key=seconds.__getitem__)], first


if __name__ == "__main__":
    main()
