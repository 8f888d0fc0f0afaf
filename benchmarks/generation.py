"""Generation: cost of a token by the length of the past, and against the form without a cache.

    python -m benchmarks.generation

Models of one kind of mixer, batch 1. A token's cost is that of the scan that `fnet.stream`
runs, over the last tokens that a cache of T positions has room for, so that attention
sees a past of nearly T. A line through milliseconds and T says how they grow, with the
largest part by which a measurement is off it.

Attention's cache has room for T from the start. On CPU it is read up to the position
reached, on accelerators whole, so that there the cost follows the room and not what fills it.

Without a cache, each token takes the model's ``apply`` on the whole sequence, padded to its
final length, in one program for all positions, and the logits of one. Every token costs
the same there, so the first 32 are timed and compared, and stand for the others.
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
from benchmarks.measure import interleaved, markdown, temporaries
from fnet import layers, models
from fnet.generate import _decode, _prefill, _Sampling
from fnet.memory import peak, tree_bytes

VOCABULARY, WIDTH, BLOCKS, HEADS, WINDOW = 256, 256, 4, 8, 64
PASTS = (64, 128, 256, 512, 1024, 2048)
PIECE, TOTAL = 32, 512
SAMPLING = _Sampling(1.0, None, None)
WITHIN = 0.05
"""As a part: what counts as constant, or as a line."""

MIXERS: dict[str, Callable[[], fnet.Layer]] = {
    "attention": lambda: layers.attention(WIDTH, HEADS, causal=True, rotary=1e4, bias=False),
    f"window of {WINDOW}": lambda: layers.attention(
        WIDTH, HEADS, causal=True, window=WINDOW, rotary=1e4, bias=False
    ),
    "mamba": lambda: layers.mamba(WIDTH),
    "mamba2": lambda: layers.mamba2(WIDTH),
    "rg_lru": lambda: layers.rg_lru(WIDTH),
}


def made(mixer: str) -> tuple[models.LanguageModel, Any, Any]:
    """A model with a feed-forward in each block, its parameters and state."""
    block = layers.Block(MIXERS[mixer](), layers.feed_forward(WIDTH, 8 * WIDTH // 3))
    model = models.language_model(vocabulary=VOCABULARY, width=WIDTH, blocks=[block] * BLOCKS)
    return model, *model.init(jax.random.key(0))


def drawing(mixer: str, past: int) -> tuple[jax.stages.Compiled, Callable[[], Any], int]:
    """The scan that draws the last tokens of a cache of ``past``; a call; the cache's bytes."""
    model, params, state = made(mixer)
    start, key = past - PIECE, jax.random.key(1)
    prompt = jnp.zeros((1, start), jnp.int32)
    carry = _prefill(model, PIECE, params, state, prompt)
    at = jnp.asarray(start), jnp.asarray(0)
    program = _decode.lower(model, SAMPLING, PIECE, carry, at, params, state, key).compile()
    box = [carry]

    def call() -> Array:
        box[0], tokens = program(box[0], at, params, state, key)
        return tokens

    return program, call, tree_bytes(carry)


def by_past(
    mixers: list[str], pasts: list[int], rounds: int
) -> tuple[list[dict[str, str]], list[dict[str, str]], list[Claim]]:
    """Milliseconds a token, what the scans hold, and how the cost grows."""
    cases = {(mixer, past): drawing(mixer, past) for mixer in mixers for past in pasts}
    seconds = interleaved({case: call for case, (_, call, _) in cases.items()}, rounds)
    times, memory, claims = [], [], []
    for mixer in mixers:
        ms = [1e3 * seconds[mixer, past] / PIECE for past in pasts]
        row = {"ms a token, T =": mixer}
        row |= {str(past): f"{a:.3f}" for past, a in zip(pasts, ms, strict=True)}
        if len(pasts) > 1:
            rise, base = np.polyfit(pasts, ms, 1)
            line = base + rise * np.asarray(pasts)
            off = float(np.abs(ms / line - 1).max())
            claims.append(growth(mixer, pasts, ms[-1] / ms[0], off))
            row |= {
                "last / first": f"{ms[-1] / ms[0]:.2f}",
                "line": f"{base:.2f} + {1e3 * rise:.3f} T / 1000",
                "off it": f"{off:.0%}",
            }
        times.append(row)
        for past in (pasts[0], pasts[-1]):
            program, _, cache = cases[mixer, past]
            memory.append(
                {
                    "scan": mixer,
                    "T": f"{past:,}",
                    "cache, MB": f"{cache / 1e6:.3f}",
                    "renewed in place, MB": f"{peak(program).aliased / 1e6:.3f}",
                    "temporaries, MB": f"{temporaries(program) / 1e6:.3f}",
                }
            )
    return times, memory, claims


def growth(mixer: str, pasts: list[int], last_to_first: float, off_line: float) -> Claim:
    """Attention's cost grows along a line; the others' does not grow."""
    if mixer == "attention":
        what = f"{mixer}: a token after T = {pasts[0]} to {pasts[-1]:,}, largest part off a line"
        return Claim(what, "a line", off_line, f"<= {WITHIN}", "time")
    what = f"{mixer}: a token after T = {pasts[-1]:,}"
    return Claim(what, f"after T = {pasts[0]}", last_to_first, f"<= {1 + WITHIN}", "time")


def without_cache(mixer: str, total: int) -> tuple[jax.stages.Wrapped, list[Any]]:
    """``(params, state, tokens [1, total], n, key) -> tokens``, one more at n, and arguments."""
    model, params, state = made(mixer)

    @functools.partial(jax.jit, donate_argnums=2)
    def one(params: Any, state: Any, tokens: Array, n: Array, key: Array) -> Array:
        logits, _ = model.apply(params, state, tokens, train=False)
        last = jax.lax.dynamic_index_in_dim(logits, n - 1, axis=1, keepdims=False)
        token = fnet.sample_token(jax.random.fold_in(key, n - 1), last)
        return jax.lax.dynamic_update_slice(tokens, token[:, None], (0, n))

    return one, [params, state]


def against(mixers: list[str], total: int, rounds: int) -> tuple[list[dict[str, str]], list[Claim]]:
    """A row for each mixer: ``total`` tokens, the first given, with a cache and without."""
    rows, claims = [], []
    prompt, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(1)
    for mixer in mixers:
        one, given = without_cache(mixer, total)
        generate = functools.partial(fnet.generate, *made(mixer), prompt, key, total - 1)

        def piece(one: Callable = one, given: list = given) -> Array:
            tokens = jnp.zeros((1, total), jnp.int32)
            for n in range(1, PIECE + 1):
                tokens = one(*given, tokens, jnp.int32(n), key)
            return tokens[:, 1 : PIECE + 1]

        seconds = interleaved({"cache": generate, "piece": piece}, rounds)
        without = seconds["piece"] * (total - 1) / PIECE
        times = without / seconds["cache"]
        what = f"{mixer}: {total} tokens, times as fast with a cache"
        peer = f"without a cache, padded to {total}"
        claims.append(Claim(what, peer, times, ">= 10", "time"))
        rows.append(
            {
                f"{total} tokens": mixer,
                "with cache, s": f"{seconds['cache']:.3f}",
                "without, s": f"{without:.2f}",
                "times as fast": f"{times:.1f}",
                "same tokens": f"{(generate()[:, :PIECE] == piece()).mean():.0%}",
            }
        )
    return rows, claims


def main() -> None:
    parser = argument_parser(__doc__, rounds=11)
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS)
    parser.add_argument("--pasts", type=int, nargs="*", default=PASTS, help="lengths T")
    parser.add_argument("--total", type=int, default=TOTAL, help="tokens, with a cache and without")
    args = parser.parse_args()
    print(f"{BLOCKS} blocks of width {WIDTH}, vocabulary {VOCABULARY}, batch 1, float32.\n")
    claimed: list[Claim] = []
    if args.pasts:
        times, memory, claimed = by_past(args.mixers, args.pasts, args.rounds)
        print(markdown(times) + "\n\n" + markdown(memory) + "\n")
    rows, claims = against(args.mixers, args.total, max(args.rounds // 4, 3))
    print(markdown(rows))
    publish(claimed + claims, args, "jax", "jaxlib")


if __name__ == "__main__":
    main()
