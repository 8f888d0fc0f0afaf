"""Selective scan over the sequence: growth of time, memory, and the layers that use it.

    python -m benchmarks.selective_scan

The first table measures value and gradients by all arguments of the scan, for one example.
``fnet`` is `selective_scan`, ``loop`` is the recurrence in `jax.lax.scan` under automatic
differentiation, and ``associative`` is an associative scan over all T x N x E numbers.
Temporaries are measured for each side's smallest program. fnet is timed with the same program,
baselines with their fastest one. The exponent is the slope of a line fitted to the logarithms of
time and T.

The other tables measure value and gradients of layers by parameters and input, compared with
causal attention of the same width, and the time of one more token after T.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import (
    compile_with_each_option,
    fastest,
    interleaved,
    markdown_table,
    step_caller,
    temporaries,
)
from fnet.layer import Decode, Layer
from fnet.layers.attention import attention
from fnet.layers.mamba import mamba, selective_scan
from fnet.layers.mamba2 import mamba2
from fnet.layers.rg_lru import rg_lru
from fnet.memory.peak import compile_min_memory

CHANNELS, STATES = 256, 16
STEPS = (256, 512, 1024, 2048, 4096, 8192)
ASSOCIATIVE_MAX_T = 2048  # longer ones take seconds and gigabytes
WIDTH, HEADS = 128, 4
LAYERS = ((12, 64), (1, 2048))  # batch, T

Scan = Callable[[Array, Array, Array, Array, Array], Array]


def loop(x: Array, dt: Array, A: Array, B: Array, C: Array) -> Array:
    def step(h: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        x, dt, B, C = now
        h = jnp.exp(dt[:, None] * A.T) * h + (dt * x)[:, None] * B[..., None]
        return h, jnp.einsum("bne,bn->be", h, C)

    start = jnp.zeros((x.shape[0], *A.shape[::-1]))
    _, y = jax.lax.scan(step, start, tuple(jnp.moveaxis(a, 1, 0) for a in (x, dt, B, C)))
    return jnp.moveaxis(y, 0, 1)


def associative(x: Array, dt: Array, A: Array, B: Array, C: Array) -> Array:
    def combine(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    decay = jnp.exp(dt[:, :, None] * A.T)  # [B, T, N, E]
    added = (dt * x)[:, :, None] * B[..., None]
    _, h = jax.lax.associative_scan(combine, (decay, added), axis=1)
    return jnp.einsum("btne,btn->bte", h, C)


SIDES: dict[str, Scan] = {
    "fnet": lambda *given: selective_scan(*given)[0],
    "loop": loop,
    "associative": associative,
}


def scan_arrays(t: int) -> list[Array]:
    """A cotangent and the scan's arguments, with A and dt as initialized by Mamba."""
    rng = np.random.default_rng(0)
    shapes = [(1, t, CHANNELS), (1, t, STATES), (1, t, STATES), (1, t, CHANNELS)]
    x, b, c, dy = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    dt = jnp.asarray(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), size=x.shape)), jnp.float32)
    a = -jnp.broadcast_to(jnp.arange(1.0, STATES + 1), (CHANNELS, STATES))
    return [dy, x, dt, a, b, c]


def compiled_scans(scan: Scan, t: int) -> list[jax.stages.Compiled]:
    """Value and gradients, compiled with each option."""

    def value_and_gradient(dy: Array, *given: Array) -> tuple[Array, tuple[Array, ...]]:
        y, back = jax.vjp(scan, *given)
        return y, back(dy)

    return compile_with_each_option(jax.jit(value_and_gradient).lower(*scan_arrays(t)))


class Scans(NamedTuple):
    """MB and seconds by (T, side), and the exponent of T by side."""

    temporaries: dict[tuple[int, str], float]
    seconds: dict[tuple[int, str], float]
    exponents: dict[str, float]


def scans(steps: tuple[int, ...], rounds: int) -> Scans:
    """Measure every T and side, interleaved."""
    programs = {
        (t, name): compiled_scans(scan, t)
        for t in steps
        for name, scan in SIDES.items()
        if name != "associative" or t <= ASSOCIATIVE_MAX_T
    }
    arrays = {t: scan_arrays(t) for t in steps}
    smallest = {case: min(candidates, key=temporaries) for case, candidates in programs.items()}
    megabytes = {case: temporaries(program) / 1e6 for case, program in smallest.items()}
    # Baselines are timed with each option, fnet with the one that needs the least memory.
    timed = {c: [smallest[c]] if c[1] == "fnet" else ps for c, ps in programs.items()}
    seconds = fastest(
        {c: [functools.partial(p, *arrays[c[0]]) for p in ps] for c, ps in timed.items()}, rounds
    )

    exponents = {}
    for name in SIDES:
        measured = [(t, s) for (t, side), s in seconds.items() if side == name]
        if len(measured) > 1:
            log_t, log_s = np.log(measured).T
            exponents[name] = float(np.polyfit(log_t, log_s, 1)[0])
    return Scans(megabytes, seconds, exponents)


def row(t: int, measured: Scans) -> dict[str, str]:
    """Build a row of the table; "-" if a side was skipped."""
    by_side = {
        name: (measured.temporaries[t, name], 1e3 * measured.seconds[t, name])
        for name in SIDES
        if (t, name) in measured.temporaries
    }
    mb, ms = by_side["fnet"]
    cells = {"T": str(t), "T N E, MB": f"{all_states_mb(t):.0f}"}
    for name in SIDES:
        theirs, milliseconds = by_side.get(name, (None, None))
        cells[f"{name} MB"] = f"{theirs:.1f}" if theirs else "-"
        cells[f"{name} ms"] = f"{milliseconds:.1f}" if milliseconds else "-"
        if name != "fnet":
            cells[f"memory / {name}"] = f"{mb / theirs:.3f}" if theirs else "-"
            cells[f"time / {name}"] = f"{ms / milliseconds:.3f}" if milliseconds else "-"
    return cells


def all_states_mb(t: int) -> float:
    """MB of all states over the sequence, float32."""
    return 4e-6 * t * STATES * CHANNELS


def claims(steps: tuple[int, ...], measured: Scans) -> Iterator[Claim]:
    """Claim that time is linear in T, and that not all states are saved."""
    last = max(steps)
    if "fnet" in measured.exponents:
        what = f"selective_scan, T from {min(steps)} to {last:,}: k of time ~ T^k"
        yield Claim(what, "linear", measured.exponents["fnet"], "<= 1.05", "time")
    size, what = (
        measured.temporaries[last, "fnet"],
        f"selective_scan, T = {last:,}, value and gradients",
    )
    yield Claim(f"{what}: temporaries", "T x N x E numbers", size / all_states_mb(last), "< 1.0")
    ratio = size / measured.temporaries[last, "loop"]
    yield Claim(f"{what}: temporaries", "lax.scan", ratio, "<= 1.0")
    ratio = measured.seconds[last, "fnet"] / measured.seconds[last, "loop"]
    yield Claim(f"{what}: time", "lax.scan", ratio, "<= 1.0", "time")


def mixers() -> dict[str, Layer]:
    return {
        "attention": attention(WIDTH, HEADS, causal=True),
        "mamba": mamba(WIDTH),
        "mamba2": mamba2(WIDTH),
        "rg_lru": rg_lru(WIDTH),
    }


def next_token(decode: Decode, params: dict, position: int) -> Callable[[Any, Array], Any]:
    """Function ``(cache, x) -> (cache, y)`` at a position; it donates the cache."""
    extend, position_array = jax.jit(decode.extend, donate_argnums=2), jnp.int32(position)
    return lambda cache, x: extend(params, {}, cache, x, position_array)[::-1]


def layers(batch: int, t: int, rounds: int) -> list[dict[str, str]]:
    x = jax.random.normal(jax.random.key(0), (batch, t, WIDTH))
    programs, calls, tokens, sizes = {}, {}, {}, {}
    for name, layer in mixers().items():
        params, _ = layer.init(jax.random.key(1))
        sizes[name] = sum(a.size for a in jax.tree.leaves(params))

        def loss(params: dict, x: Array, layer: Layer = layer) -> Array:
            return jnp.square(layer.apply(params, {}, x, train=True)[0]).sum()

        lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(params, x)
        programs[name] = compile_min_memory(lowered)[0]
        calls[name] = functools.partial(programs[name], params, x)
        if layer.decode is None:
            continue
        cache = layer.decode.init_cache(batch, t + 1, x.dtype)
        tokens[name] = step_caller(next_token(layer.decode, params, t), cache, x[:, :1])
    seconds, token_seconds = interleaved(calls, rounds), interleaved(tokens, rounds)
    base = seconds["attention"]
    return [
        {
            f"{batch} x {t}": name,
            "parameters": f"{sizes[name]:,}",
            "MB": f"{temporaries(programs[name]) / 1e6:.1f}",
            "ms": f"{seconds[name] * 1e3:.1f}",
            "/ attention": f"{seconds[name] / base:.2f}",
            "token, ms": f"{token_seconds[name] * 1e3:.2f}" if name in token_seconds else "-",
        }
        for name in calls
    ]


def main() -> None:
    parser = argument_parser(__doc__, rounds=7)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="Sequence lengths T.")
    args = parser.parse_args()
    measured = scans(tuple(args.steps), args.rounds)
    print(f"Selective scan, value and gradients, 1 x T x {CHANNELS}, N = {STATES}, float32.\n")
    print(markdown_table([row(t, measured) for t in args.steps]))
    exponents = ", ".join(f"{name} k = {k:.2f}" for name, k in measured.exponents.items())
    print(f"\nTime ~ T^k: {exponents}")
    for batch, t in LAYERS:
        print(f"\nLayers of width {WIDTH}, value and gradients, float32.\n")
        print(markdown_table(layers(batch, t, args.rounds)))
    publish(claims(tuple(args.steps), measured), args, "jax", "jaxlib")


if __name__ == "__main__":
    main()
