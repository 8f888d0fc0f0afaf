"""Error of the gradients of `fnet.abn` and flax batch norm in 16 bits, relative to float64.

    JAX_PLATFORMS=cpu python -m benchmarks.abn_bfloat16

`fnet.abn` computes xhat as (z - beta) / gamma from an output rounded to 16 bits. This amplifies
the rounding error by |beta| / gamma, above all in dgamma. In float16 an output may also underflow
to zero. In a stack, the errors of both mostly come from activations whose sign flips by rounding.
"""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table
from benchmarks.networks import convolution

Norm = Callable[[Array, Array, Array], Array]
EPS, SLOPE = 1e-5, 0.01
LAYER, STACK, BLOCKS = (16, 28, 28, 32), (8, 14, 14, 32), 4
GAMMAS, BETAS = (1.0, 0.1, 0.01), (0.0, 0.1, 1.0)


def exact(x: Array, gamma: Array, beta: Array) -> Array:
    """The defining formula, not in place."""
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return jax.nn.leaky_relu((x - mean) / jnp.sqrt(var + EPS) * (gamma + EPS) + beta, SLOPE)


def in_place(x: Array, gamma: Array, beta: Array) -> Array:
    return fnet.abn(x, gamma, beta, None, None, train=True, eps=EPS, activation_param=SLOPE)[0]


def flax_norm(x: Array, gamma: Array, beta: Array) -> Array:
    # fnet's scale is |gamma| + eps.
    params = {"scale": gamma + EPS, "bias": beta}
    running = {"mean": jnp.zeros_like(beta), "var": jnp.ones_like(beta)}
    norm = nn.BatchNorm(use_running_average=False, epsilon=EPS, dtype=x.dtype)
    variables = {"params": params, "batch_stats": running}
    return jax.nn.leaky_relu(norm.apply(variables, x, mutable=["batch_stats"])[0], SLOPE)


def stack(norm: Norm, blocks: int, params: dict[str, Array], x: Array) -> Array:
    """``blocks`` x (3x3 convolution, norm); a single block has no convolution."""
    for i in range(blocks):
        if "kernels" in params:
            x = convolution(x, params["kernels"][i].astype(x.dtype))
        x = norm(x, params["gamma"][i], params["beta"][i])
    return x


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(norm: Norm, blocks: int, params: dict[str, Array], x: Array, dy: Array) -> Any:
    _, vjp = jax.vjp(functools.partial(stack, norm, blocks), params, x)
    params_gradient, dx = vjp(dy)
    return {f"d{name}": g for name, g in params_gradient.items()} | {"dx": dx}


def inputs(
    shape: tuple[int, ...], blocks: int, gamma: float, beta: float, dtype: Any, seed: int
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Float32 params with gamma ~ N(gamma, gamma / 10), beta ~ N(0, beta); x, dy in ``dtype``."""
    rng, channels = np.random.default_rng(seed), shape[-1]
    params = {
        "gamma": gamma * rng.normal(1, 0.1, (blocks, channels)),
        "beta": beta * rng.normal(size=(blocks, channels)),
    }
    if blocks > 1:
        he = np.sqrt(2 / (9 * channels))
        params["kernels"] = he * rng.normal(size=(blocks, 3, 3, channels, channels))
    x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    return {name: p.astype(np.float32) for name, p in params.items()}, x, dy


def errors(norm: Norm, expected: dict[str, np.ndarray], *arguments: Any) -> dict[str, float]:
    """Largest error of each gradient, relative to its largest exact value, over all blocks."""
    got = gradients(norm, len(arguments[0]["gamma"]), *arguments)
    worst = {}
    for name, e in expected.items():
        g = np.asarray(got[name], np.float64)
        blocks = [(g, e)] if name == "dx" else zip(g, e, strict=True)
        worst[name] = max(float(abs(a - b).max() / abs(b).max()) for a, b in blocks)
    return worst


def medians(
    shape: tuple[int, ...], blocks: int, gamma: float, beta: float, dtype: Any, seeds: int
) -> dict[str, tuple[float, float]]:
    """Median error of each gradient over seeds, for fnet and flax."""
    by_norm: dict[Norm, list[dict[str, float]]] = {in_place: [], flax_norm: []}
    for seed in range(seeds):
        arguments = inputs(shape, blocks, gamma, beta, dtype, seed)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), arguments)
            expected = jax.tree.map(np.asarray, gradients(exact, blocks, *wide))
        for norm, by_seed in by_norm.items():
            by_seed.append(errors(norm, expected, *jax.tree.map(jnp.asarray, arguments)))
    ours, theirs = by_norm.values()
    return {
        name: (statistics.median(e[name] for e in ours), statistics.median(e[name] for e in theirs))
        for name in sorted(expected)
    }


def row(gamma: float, beta: float, measured: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Build a row; each cell is "fnet / flax = ratio"."""
    return {"gamma": f"{gamma:g}", "beta": f"{beta:g}"} | {
        name: f"{ours:.1e} / {theirs:.1e} = {ours / theirs:.2f}"
        for name, (ours, theirs) in measured.items()
    }


def claims(what: str, measured: list[dict[str, tuple[float, float]]]) -> Iterator[Claim]:
    """Claim each gradient's error at the worst gamma and beta."""
    for name in measured[0]:
        worst = max(errors[name][0] / errors[name][1] for errors in measured)
        yield Claim(
            f"fnet.abn, {what}: error of {name}", "flax BatchNorm", worst, "<= 1.0", "error"
        )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    claimed: list[Claim] = []
    print(
        "Largest error of each gradient relative to its largest exact value (float64), "
        f"`fnet.abn` / flax = ratio, medians of {args.seeds} seeds; gamma ~ N(gamma, gamma / 10), "
        f"beta ~ N(0, beta). {jax.default_backend()}."
    )
    for dtype in (jnp.bfloat16, jnp.float16):
        for shape, blocks in ((LAYER, 1), (STACK, BLOCKS)):
            what = f"{blocks} x (3x3 convolution, norm, " if blocks > 1 else "One layer (norm, "
            cases = [(gamma, beta) for gamma in GAMMAS for beta in BETAS]
            measured = [medians(shape, blocks, *case, dtype, args.seeds) for case in cases]
            print(f"\n{what}leaky_relu {SLOPE}) at {shape}, {np.dtype(dtype)}:\n")
            rows = [row(*case, errors) for case, errors in zip(cases, measured, strict=True)]
            print(markdown_table(rows), flush=True)
            stack = f"{blocks} blocks" if blocks > 1 else "one layer"
            claimed += claims(f"{stack}, {np.dtype(dtype)}", measured)
    publish(claimed, args, "jax", "jaxlib", "flax")


if __name__ == "__main__":
    main()
