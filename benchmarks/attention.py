"""Attention in chunks of queries against `jax.nn.dot_product_attention`: memory and time.

    python -m benchmarks.attention
    python -m benchmarks.attention --tokens 4096 --window 256
    JAX_PLATFORMS=cpu python -m benchmarks.attention --target h100

The gradient with respect to q, k and v. Temporaries: of each side compiled with
the options that make it smallest. Time: of that program for fnet; for jax.nn, of
the fastest among all options. With ``--window`` only causal attention, and a third
side: fnet without the window. With ``--target`` for a device that is not there:
temporaries, and the fused kernels that the program calls (for cuDNN's, which is
looked for when the program is traced, its library must be installed).
"""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

import fnet.memory.target
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import compiled_each_way, fastest, markdown, temporaries
from fnet.layers.dot_product_attention import dot_product_attention
from fnet.memory import compile_min_memory

HEADS, DIM = 8, 64
TOKENS = (256, 512, 1024, 2048)
AIMED_AT = 2048
"""The number of tokens for which there is a target."""
DTYPES = ("float32", "bfloat16")

Attention = Callable[[Array, Array, Array], Array]


def sides(causal: bool, window: int | None) -> dict[str, Attention]:
    local = None if window is None else (window - 1, 0)
    found: dict[str, Attention] = {
        "jax.nn": functools.partial(
            jax.nn.dot_product_attention, is_causal=causal, local_window_size=local
        ),
        "fnet": functools.partial(dot_product_attention, causal=causal, window=window),
    }
    whole = functools.partial(dot_product_attention, causal=causal)
    return found if window is None else found | {"no window": whole}


def gradient(attention: Attention) -> jax.stages.Wrapped:
    """``(q, k, v, cotangent) -> (dq, dk, dv)``."""
    return jax.jit(lambda q, k, v, dy: jax.vjp(attention, q, k, v)[1](dy))


def here(
    tokens: int, causal: bool, window: int | None, rounds: int
) -> tuple[dict[str, str], list[Claim]]:
    """One line of the table, and what it claims."""
    shape = (1, tokens, HEADS, DIM)
    arrays = [jax.random.normal(jax.random.key(i), shape) for i in range(4)]
    lowered = {name: gradient(f).lower(*arrays) for name, f in sides(causal, window).items()}
    smallest = {name: compile_min_memory(low)[0] for name, low in lowered.items()}
    programs = {name: [program] for name, program in smallest.items()}
    programs["jax.nn"] = compiled_each_way(lowered["jax.nn"])
    seconds = fastest(
        {name: [functools.partial(p, *arrays) for p in of] for name, of in programs.items()}, rounds
    )
    theirs, ours = temporaries(smallest["jax.nn"]), temporaries(smallest["fnet"])
    their_time, our_time = seconds["jax.nn"], seconds["fnet"]
    whole_time = seconds.get("no window")
    case = label(tokens, causal, window)
    row = {
        "tokens": case,
        "jax.nn MB": f"{theirs / 1e6:.1f}",
        "fnet MB": f"{ours / 1e6:.1f}",
        "memory": f"{ours / theirs:.3f}",
        "jax.nn ms": f"{their_time * 1e3:.1f}",
        "fnet ms": f"{our_time * 1e3:.1f}",
        "time": f"{our_time / their_time:.2f}",
    }
    if whole_time is not None:
        row["memory to no window"] = f"{ours / temporaries(smallest['no window']):.2f}"
        row["time to no window"] = f"{our_time / whole_time:.2f}"
    if tokens != AIMED_AT or window is not None:
        return row, []
    what = f"attention, {tokens:,} tokens{', causal' if causal else ''}, gradient"
    peer = "jax.nn.dot_product_attention"
    return row, [
        Claim(f"{what}: temporaries", peer, ours / theirs, "<= 0.12"),
        Claim(f"{what}: time", peer, our_time / their_time, "<= 1.0", "time"),
    ]


def label(tokens: int, causal: bool, window: int | None) -> str:
    return f"{tokens}{', causal' if causal else ''}{f', window {window}' if window else ''}"


def there(
    target: fnet.memory.target.Target, tokens: int, causal: bool, window: int | None, dtype: str
) -> dict:
    x = jax.ShapeDtypeStruct((1, tokens, HEADS, DIM), jnp.dtype(dtype))
    compiled = {
        name: fnet.memory.target.compile_for(target, gradient(f), x, x, x, x)
        for name, f in sides(causal, window).items()
    }
    theirs, ours = (temporaries(compiled[name]) for name in ("jax.nn", "fnet"))
    program = compiled["fnet"].as_text() or ""
    calls = set(re.findall(r'custom_call_target="(__cudnn[^"]*)"', program))
    return {
        f"{target.name}, tokens": f"{label(tokens, causal, window)}, {dtype}",
        "jax.nn MB": f"{theirs / 1e6:.1f}",
        "fnet MB": f"{ours / 1e6:.1f}",
        "memory": f"{ours / theirs:.3f}",
        "kernels": ", ".join(sorted(calls)) or "chunks",
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=11, target=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--window", type=int, help="of causal attention")
    args = parser.parse_args()
    kinds = (True,) if args.window else (False, True)
    cases = [(tokens, causal, args.window) for tokens in args.tokens for causal in kinds]
    claims: list[Claim] = []
    if args.target:
        target = fnet.memory.target.describe(args.target)
        rows = [there(target, *case, dtype) for dtype in DTYPES for case in cases]
    else:
        found = [here(*case, args.rounds) for case in cases]
        rows = [row for row, _ in found]
        claims = [c for _, of in found for c in of]
    print(f"Gradient, batch 1, {HEADS} heads of {DIM}, temporaries; float32 unless said.\n")
    print(markdown(rows))
    publish(claims, args, "jax", "jaxlib", "nvidia-cudnn-cu13", "libtpu")


if __name__ == "__main__":
    main()
