"""Text generation: time per token by sequence length, and compared with no cache.

    python -m benchmarks.generation

Each model has one kind of mixer; the batch size is 1. The time per token is measured in the scan
of `fnet.stream` over the last tokens that a cache of T positions holds, so that attention sees
nearly T positions. A line fitted to time and T shows the growth, with the largest relative
deviation of a measurement from it.

Attention's cache is allocated for T positions from the start. On CPU it is read up to the current
position; on accelerators all of it is read, so the time depends on the allocated length.

Without a cache, each token needs the model's ``apply`` on the whole sequence, padded to its final
length, in one program for all positions. Every token takes the same time, so only the first 32
are timed and compared.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved, markdown_table, temporaries
from fnet import layers, models
from fnet.generate import _decode, _Run, _Sampling
from fnet.memory import peak, tree_bytes

VOCABULARY, WIDTH, BLOCKS, HEADS, WINDOW = 256, 256, 4, 8, 64
PASTS = (64, 128, 256, 512, 1024, 2048)
CHUNK, TOTAL = 32, 512
SAMPLING = _Sampling()
TOLERANCE = 0.05
"""Relative tolerance for a constant time, or for a line."""

MIXERS: dict[str, Callable[[], fnet.Layer]] = {
    "attention": lambda: layers.attention(WIDTH, HEADS, causal=True, rotary=1e4, bias=False),
    f"window of {WINDOW}": lambda: layers.attention(
        WIDTH, HEADS, causal=True, window=WINDOW, rotary=1e4, bias=False
    ),
    "mamba": lambda: layers.mamba(WIDTH),
    "mamba2": lambda: layers.mamba2(WIDTH),
    "rg_lru": lambda: layers.rg_lru(WIDTH),
}


def build(mixer: str) -> tuple[models.LanguageModel, Any, Any]:
    """A model with a feed-forward layer in each block, its parameters and state."""
    block = layers.Block(MIXERS[mixer](), layers.feed_forward(WIDTH, 8 * WIDTH // 3))
    model = models.language_model(vocabulary=VOCABULARY, width=WIDTH, blocks=[block] * BLOCKS)
    return model, *model.init(jax.random.key(0))


def decoding(mixer: str, past: int) -> tuple[jax.stages.Compiled, Callable[[], Any], int]:
    """The scan that decodes the last tokens of a cache: program, call and bytes of the cache."""
    model, params, state = build(mixer)
    start = jnp.array([past - CHUNK])
    decode: Any = model.decode
    carry = jnp.zeros((1, past), jnp.int32), decode.init_cache(1, past)
    at, run = (start[0], jnp.asarray(CHUNK)), _Run(start, start, jax.random.key(1))
    program = _decode.lower(model, SAMPLING, carry, at, run, params, state).compile()
    box = [carry]

    def call() -> Array:
        box[0] = program(box[0], at, run, params, state)
        return box[0][0]

    return program, call, tree_bytes(carry)


def by_past(
    mixers: list[str], pasts: list[int], rounds: int
) -> tuple[list[dict[str, str]], list[dict[str, str]], list[Claim]]:
    """Time per token by length, memory of the scans, and claims about the growth."""
    cases = {(mixer, past): decoding(mixer, past) for mixer in mixers for past in pasts}
    seconds = interleaved({case: call for case, (_, call, _) in cases.items()}, rounds)
    times, memory, claims = [], [], []
    for mixer in mixers:
        ms = [1e3 * seconds[mixer, past] / CHUNK for past in pasts]
        row = {"ms per token, T =": mixer}
        row |= {str(past): f"{a:.3f}" for past, a in zip(pasts, ms, strict=True)}
        if len(pasts) > 1:
            rise, base = np.polyfit(pasts, ms, 1)
            line = base + rise * np.asarray(pasts)
            deviation = float(np.abs(ms / line - 1).max())
            claims.append(growth(mixer, pasts, ms[-1] / ms[0], deviation))
            row |= {
                "last / first": f"{ms[-1] / ms[0]:.2f}",
                "line": f"{base:.2f} + {1e3 * rise:.3f} T / 1000",
                "deviation": f"{deviation:.0%}",
            }
        times.append(row)
        for past in (pasts[0], pasts[-1]):
            program, _, cache = cases[mixer, past]
            memory.append(
                {
                    "scan": mixer,
                    "T": f"{past:,}",
                    "cache, MB": f"{cache / 1e6:.3f}",
                    "updated in place, MB": f"{peak(program).aliased / 1e6:.3f}",
                    "temporaries, MB": f"{temporaries(program) / 1e6:.3f}",
                }
            )
    return times, memory, claims


def growth(mixer: str, pasts: list[int], last_to_first: float, deviation: float) -> Claim:
    """Claim that the time per token is linear in T for attention, and constant otherwise."""
    if mixer == "attention":
        lengths = f"T = {pasts[0]} to {pasts[-1]:,}"
        what = f"{mixer}: time per token after {lengths}, largest deviation from a line"
        return Claim(what, "a line", deviation, f"<= {TOLERANCE}", "time")
    what = f"{mixer}: time per token after T = {pasts[-1]:,}"
    return Claim(what, f"after T = {pasts[0]}", last_to_first, f"<= {1 + TOLERANCE}", "time")


def without_cache(mixer: str, total: int) -> tuple[jax.stages.Wrapped, list[Any]]:
    """Build a function that adds token n without a cache, and its first arguments.

    It maps ``(params, state, tokens [1, total], n, key)`` to tokens.
    """
    model, params, state = build(mixer)

    @functools.partial(jax.jit, donate_argnums=2)
    def add_token(params: Any, state: Any, tokens: Array, n: Array, key: Array) -> Array:
        logits, _ = model.apply(params, state, tokens, train=False)
        last = jax.lax.dynamic_index_in_dim(logits, n - 1, axis=1, keepdims=False)
        token = fnet.sample_token(jax.random.fold_in(key, n - 1), last)
        return jax.lax.dynamic_update_slice(tokens, token[:, None], (0, n))

    return add_token, [params, state]


def compare_without_cache(
    mixers: list[str], total: int, rounds: int
) -> tuple[list[dict[str, str]], list[Claim]]:
    """Compare generation of ``total`` tokens with and without a cache; a row per mixer."""
    rows, claims = [], []
    prompt, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(1)
    for mixer in mixers:
        add_token, args = without_cache(mixer, total)
        generate = functools.partial(fnet.generate, *build(mixer), prompt, key, total - 1)

        def first_chunk(add_token: Callable = add_token, args: list = args) -> Array:
            tokens = jnp.zeros((1, total), jnp.int32)
            for n in range(1, CHUNK + 1):
                tokens = add_token(*args, tokens, jnp.int32(n), key)
            return tokens[:, 1 : CHUNK + 1]

        seconds = interleaved({"cache": generate, "chunk": first_chunk}, rounds)
        without = seconds["chunk"] * (total - 1) / CHUNK
        speedup = without / seconds["cache"]
        what = f"{mixer}: {total} tokens, speed-up by the cache"
        baseline = f"without a cache, padded to {total}"
        claims.append(Claim(what, baseline, speedup, ">= 10", "time"))
        rows.append(
            {
                f"{total} tokens": mixer,
                "with cache, s": f"{seconds['cache']:.3f}",
                "without, s": f"{without:.2f}",
                "speed-up": f"{speedup:.1f}",
                "same tokens": f"{(generate()[:, :CHUNK] == first_chunk()).mean():.0%}",
            }
        )
    return rows, claims


def main() -> None:
    parser = argument_parser(__doc__, rounds=11)
    parser.add_argument(
        "--mixers", nargs="+", default=list(MIXERS), choices=MIXERS, help="Mixers to measure."
    )
    parser.add_argument("--pasts", type=int, nargs="*", default=PASTS, help="Sequence lengths T.")
    parser.add_argument("--total", type=int, default=TOTAL, help="Tokens to generate.")
    args = parser.parse_args()
    print(f"{BLOCKS} blocks of width {WIDTH}, vocabulary {VOCABULARY}, batch 1, float32.\n")
    claimed: list[Claim] = []
    if args.pasts:
        times, memory, claimed = by_past(args.mixers, args.pasts, args.rounds)
        print(markdown_table(times) + "\n\n" + markdown_table(memory) + "\n")
    rows, claims = compare_without_cache(args.mixers, args.total, max(args.rounds // 4, 3))
    print(markdown_table(rows))
    publish(claimed + claims, args, "jax", "jaxlib")


if __name__ == "__main__":
    main()
