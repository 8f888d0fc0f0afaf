"""Chunked attention compared with `jax.nn.dot_product_attention`: memory and time.

    python -m benchmarks.attention
    python -m benchmarks.attention --tokens 4096 --window 256
    JAX_PLATFORMS=cpu python -m benchmarks.attention --target h100

This measures the gradient with respect to q, k and v. Temporaries are measured for
the smallest program of each side. Times are of the same program for fnet, and of the fastest
program for jax.nn. ``--window`` measures causal attention only, and adds fnet without the window.
``--target`` compiles for a device that is not present. It reports temporaries and the fused
kernels that the program calls. For cuDNN's kernels its library must be installed, because JAX
looks for it during tracing.
"""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

import fnet.memory.target
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import compile_with_each_option, fastest, markdown_table, temporaries
from fnet.layers.dot_product_attention import dot_product_attention
from fnet.memory import compile_min_memory

HEADS, DIM = 8, 64
TOKENS = (256, 512, 1024, 2048)
TARGET_TOKENS = 2048
"""Number of tokens for which there is a target."""
DTYPES = ("float32", "bfloat16")

Attention = Callable[[Array, Array, Array], Array]


def sides(causal: bool, window: int | None) -> dict[str, Attention]:
    local = None if window is None else (window - 1, 0)
    by_name: dict[str, Attention] = {
        "jax.nn": functools.partial(
            jax.nn.dot_product_attention, is_causal=causal, local_window_size=local
        ),
        "fnet": functools.partial(dot_product_attention, causal=causal, window=window),
    }
    no_window = functools.partial(dot_product_attention, causal=causal)
    return by_name if window is None else by_name | {"no window": no_window}


def gradient(attention: Attention) -> jax.stages.Wrapped:
    """``(q, k, v, cotangent) -> (dq, dk, dv)``."""
    return jax.jit(lambda q, k, v, dy: jax.vjp(attention, q, k, v)[1](dy))


def measure_here(
    tokens: int, causal: bool, window: int | None, rounds: int
) -> tuple[dict[str, str], list[Claim]]:
    """Measure one case on this device; return a row and claims."""
    shape = (1, tokens, HEADS, DIM)
    arrays = [jax.random.normal(jax.random.key(i), shape) for i in range(4)]
    lowered = {name: gradient(f).lower(*arrays) for name, f in sides(causal, window).items()}
    smallest = {name: compile_min_memory(low)[0] for name, low in lowered.items()}
    programs = {name: [program] for name, program in smallest.items()}
    programs["jax.nn"] = compile_with_each_option(lowered["jax.nn"])
    seconds = fastest(
        {name: [functools.partial(p, *arrays) for p in ps] for name, ps in programs.items()}, rounds
    )
    theirs, ours = temporaries(smallest["jax.nn"]), temporaries(smallest["fnet"])
    their_time, our_time = seconds["jax.nn"], seconds["fnet"]
    no_window_time = seconds.get("no window")
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
    if no_window_time is not None:
        row["memory / no window"] = f"{ours / temporaries(smallest['no window']):.2f}"
        row["time / no window"] = f"{our_time / no_window_time:.2f}"
    if tokens != TARGET_TOKENS or window is not None:
        return row, []
    what = f"attention, {tokens:,} tokens{', causal' if causal else ''}, gradient"
    baseline = "jax.nn.dot_product_attention"
    return row, [
        Claim(f"{what}: temporaries", baseline, ours / theirs, "<= 0.12"),
        Claim(f"{what}: time", baseline, our_time / their_time, "<= 1.0", "time"),
    ]


def label(tokens: int, causal: bool, window: int | None) -> str:
    return f"{tokens}{', causal' if causal else ''}{f', window {window}' if window else ''}"


def measure_target(
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
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="Sequence lengths.")
    parser.add_argument("--window", type=int, help="Window of causal attention.")
    args = parser.parse_args()
    kinds = (True,) if args.window else (False, True)
    cases = [(tokens, causal, args.window) for tokens in args.tokens for causal in kinds]
    claims: list[Claim] = []
    if args.target:
        target = fnet.memory.target.describe(args.target)
        rows = [measure_target(target, *case, dtype) for dtype in DTYPES for case in cases]
    else:
        measured = [measure_here(*case, args.rounds) for case in cases]
        rows = [row for row, _ in measured]
        claims = [c for _, case_claims in measured for c in case_claims]
    print(f"Gradient, batch 1, {HEADS} heads of {DIM}, temporaries; float32 by default.\n")
    print(markdown_table(rows))
    publish(claims, args, "jax", "jaxlib", "nvidia-cudnn-cu13", "libtpu")


if __name__ == "__main__":
    main()
