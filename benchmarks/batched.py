"""N tangents or cotangents at one point compared with N single passes: time, and memory by width.

    python -m benchmarks.batched
    python -m benchmarks.batched --networks mlp --lanes 16

The batch has 64 examples; derivatives are with respect to the parameters. The baseline is N calls
of the jitted `jax.jvp` or `jax.vjp`, whose results all stay alive. Times are ratios to this
baseline, interleaved.

- "one jit": the N passes in one program.
- "vmap": `jax.vmap` of the linear function.
- "one by one": width 1.
- "separate": vectors as N trees instead of one stacked tree.
- "into": results are added to accumulators in place, compared with N single passes that add to
  donated accumulators.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved, markdown_table, temporaries
from fnet import layers, serial
from fnet.autodiff.batched.derivatives import jvps, vjps

BATCH = 64
LANES = (1, 4, 16, 64)
WIDTHS = (1, 4, 16, 64)
NETWORKS = ("mlp", "wide", "small", "convolutions")
TARGET_CASE = ("mlp", 16)

Case = tuple[str, str, int]
"""Network, mode and N."""


def network(name: str) -> tuple[Callable[[Any], Array], Any]:
    """Return a function of parameters, and parameters."""
    if name == "convolutions":
        model = serial(
            first=layers.conv(3, 16, (3, 3)),
            relu=layers.activation("relu"),
            second=layers.conv(16, 16, (3, 3)),
            pool=layers.global_avg_pool(),
            head=layers.dense(16, 10),
        )
        shape: tuple[int, ...] = (BATCH, 16, 16, 3)
    else:
        sizes = {"mlp": [784, 512, 512, 10], "wide": [256] * 4, "small": [16] * 3}[name]
        model, shape = layers.mlp(sizes), (BATCH, sizes[0])
    params, state = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), shape)
    return lambda params: model.apply(params, state, x, train=True)[0], params


def lane(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


def stacked(like: Any, n: int, seed: int) -> Any:
    return jax.tree.map(
        lambda a: jax.random.normal(jax.random.key(seed), (n, *a.shape), a.dtype), like
    )


def single(mode: str, f: Callable[[Any], Array]) -> Callable[[Any, Any], Any]:
    if mode == "forward":
        return lambda params, t: jax.jvp(f, (params,), (t,))

    def pull(params: Any, c: Any) -> Any:
        out, vjp = jax.vjp(f, params)
        return out, vjp(c)

    return pull


def vmapped(mode: str, f: Callable[[Any], Array], params: Any, vectors: Any) -> Any:
    if mode == "forward":
        out, push = jax.linearize(f, params)
        return out, jax.vmap(push)(vectors)
    out, pull = jax.vjp(f, params)
    return out, jax.vmap(pull)(vectors)


def batched(mode: str, f: Callable[[Any], Array], width: Any, params: Any, vectors: Any) -> Any:
    if mode == "forward":
        return jvps(f, (params,), (vectors,), width=width)
    return vjps(f, (params,), vectors, width=width)


def accumulating(f: Callable[[Any], Array], params: Any, cotangents: Any, n: int) -> dict:
    """Both sides with donated accumulators."""

    def step(params: Any, c: Any, into: Any) -> Any:
        return vjps(f, (params,), c, into=(into,))

    def single_step(params: Any, c: Any, into: Any) -> Any:
        out, pull = jax.vjp(f, params)
        return out, jax.tree.map(jnp.add, into, pull(c)[0])

    step, single_step = (jax.jit(g, donate_argnums=2) for g in (step, single_step))
    ours = [jax.tree.map(lambda a: jnp.zeros((n, *a.shape), a.dtype), params)]
    theirs = [jax.tree.map(jnp.zeros_like, params) for _ in range(n)]
    singles = [lane(cotangents, i) for i in range(n)]

    def all_at_once() -> Any:
        out, (ours[0],) = step(params, cotangents, ours[0])
        return out, ours[0]

    def one_by_one() -> Any:
        for i, c in enumerate(singles):
            _, theirs[i] = single_step(params, c, theirs[i])
        return list(theirs)

    return {"into": all_at_once, "singles into": one_by_one}


def times(name: str, mode: str, n: int, rounds: int) -> tuple[float, dict[str, float]]:
    """Measure seconds of N single passes, and each side's ratio to its baseline."""
    f, params = network(name)
    vectors = stacked(params if mode == "forward" else f(params), n, 2)
    apart = [lane(vectors, i) for i in range(n)]
    call = jax.jit(single(mode, f))
    sides: dict[str, Callable[[], Any]] = {
        "singles": lambda: [call(params, s) for s in apart],
        "auto": functools.partial(
            jax.jit(functools.partial(batched, mode, f, "auto")), params, vectors
        ),
        "one by one": functools.partial(
            jax.jit(functools.partial(batched, mode, f, 1)), params, vectors
        ),
        "vmap": functools.partial(jax.jit(functools.partial(vmapped, mode, f)), params, vectors),
    }
    if n <= 16:
        fused = jax.jit(lambda params, apart: [single(mode, f)(params, s) for s in apart])
        separate = jax.jit(functools.partial(batched, mode, f, "auto"))
        sides["one jit"] = functools.partial(fused, params, apart)
        sides["separate"] = functools.partial(separate, params, apart)
    if mode == "reverse":
        sides |= accumulating(f, params, vectors, n)
    seconds = interleaved(sides, rounds)
    ratio = {k: s / seconds["singles"] for k, s in seconds.items()}
    if "into" in seconds:
        ratio["into"] = seconds["into"] / seconds["singles into"]
    return seconds["singles"], ratio


def time_row(case: Case, singles: float, ratio: dict[str, float]) -> dict[str, str]:
    name, mode, n = case
    columns = ("auto", "vmap", "one by one", "separate", "one jit", "into")
    return {
        "network": f"{name}, {mode}",
        "N": str(n),
        "N singles ms": f"{singles * 1e3:.1f}",
        **{k: f"{ratio[k]:.2f}" if k in ratio else "" for k in columns},
    }


def claims(measured: dict[Case, tuple[float, dict[str, float]]]) -> Iterator[Claim]:
    """Claim the case with a target, and the slowest case."""
    sides = {"forward": "jvps", "reverse": "vjps"}
    for (name, mode, n), (_, ratio) in measured.items():
        if (name, n) == TARGET_CASE:
            what, baseline = f"{sides[mode]}, MLP, batch {BATCH}, N = {n}: time", f"jax, {n} calls"
            yield Claim(what, baseline, ratio["auto"], "<= 0.7", "time")
            yield Claim(what, "jax.vmap", ratio["auto"] / ratio["vmap"], "<= 1.0", "time")
    for mode, side in sides.items():
        worst, case = max((r["auto"], case) for case, (_, r) in measured.items() if case[1] == mode)
        what = f"{side}, width auto, slowest case ({case[0]}, N = {case[2]}): time"
        yield Claim(what, "jax, N calls", worst, "<= 1.0", "time")


def memory_row(name: str, mode: str, n: int) -> dict[str, str]:
    f, params = network(name)
    vectors = stacked(params if mode == "forward" else f(params), n, 2)

    def mb(g: Callable[..., Any]) -> str:
        return f"{temporaries(jax.jit(g).lower(params, vectors).compile()) / 1e6:.2f}"

    widths = {str(w): mb(functools.partial(batched, mode, f, w)) for w in (*WIDTHS, "auto")}
    return {"network": f"{name}, {mode}", **widths, "vmap": mb(functools.partial(vmapped, mode, f))}


def main() -> None:
    parser = argument_parser(__doc__, rounds=15)
    parser.add_argument(
        "--networks", nargs="+", default=NETWORKS, choices=NETWORKS, help="Networks to measure."
    )
    parser.add_argument("--lanes", type=int, nargs="+", default=LANES, help="Values of N.")
    args = parser.parse_args()
    modes = ("forward", "reverse")
    cases = [(name, mode) for name in args.networks for mode in modes]
    print(f"Time as a ratio to N single passes, batch {BATCH}, {jax.default_backend()}.\n")
    timed = [(*case, n) for case in cases for n in args.lanes]
    measured = {case: times(*case, args.rounds) for case in timed}
    print(markdown_table([time_row(case, *result) for case, result in measured.items()]))
    print("\nTemporaries in MB, N = 64, by width.\n")
    print(markdown_table([memory_row(*case, max(WIDTHS)) for case in cases]))
    publish(claims(measured), args, "jax", "jaxlib")


if __name__ == "__main__":
    main()
