"""Correlated noise of private training, drawn again instead of stored: memory, time and error.

    python -m benchmarks.correlated_noise
    JAX_PLATFORMS=cpu python -m benchmarks.correlated_noise --target h100

The model is an MLP with three dense layers of 512 x 512 and Adam, at a step with all of its
history. Time is with 256 examples; memory with 8, so that activations do not count. The error is
the root mean square of the noise in the sums of gradients over 2,000 steps, averaged over steps, at
equal epsilon and delta 1e-5, relative to DP-SGD. ``--target`` needs the target's compiler but no
device, and runs nothing.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved, markdown_table, step_caller
from fnet import layers, privacy
from fnet.memory import peak, tree_bytes
from fnet.memory.target import Target, compile_for, describe

WIDTH, STEPS = 512, 2000
EXAMPLES = 100_000
CASES = {"20 epochs, epsilon 3": (1000, 3.0), "20 epochs, epsilon 10": (1000, 10.0)}
CASES |= {"100 epochs, epsilon 3": (5000, 3.0)}
"""Mean batch size and epsilon of 2,000 steps."""
MODEL = layers.mlp((WIDTH,) * 4, "tanh")
OPTIMIZER = optax.adam(1e-3)

METHODS = {
    "DP-SGD": privacy.banded_square_root(1),
    **{f"banded, {b} bands": privacy.banded_square_root(b) for b in (2, 4, 8, 16)},
    **{f"banded inverse, {b} bands": privacy.banded_inverse_square_root(b) for b in (4, 16, 64)},
}


def build(
    strategy: privacy.Strategy, rows: int
) -> tuple[fnet.step.Step, fnet.TrainState, dict[str, Any]]:
    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, fnet.Aux]:
        y, state = MODEL.apply(params, state, batch["x"], key=key, train=True)
        return jnp.square(y - batch["y"]).mean(-1), fnet.Aux(state, {})

    mode = fnet.autodiff.clipped(
        1.0, noise_multiplier=1.0, expected_batch_size=rows, strategy=strategy
    )
    state = fnet.TrainState.create(MODEL, OPTIMIZER, jax.random.key(0))
    state = dataclasses.replace(state, step=jnp.int32(STEPS))
    batch = {"x": jnp.ones((rows, WIDTH)), "y": jnp.ones((rows, WIDTH))}
    return fnet.make_step(loss, OPTIMIZER, mode), state, batch


def error(strategy: privacy.Strategy, batch_size: int, epsilon: float) -> float:
    """Root mean square of the noise in prefix sums."""
    # A strategy that is not banded gets the largest separation, one epoch.
    bands = strategy.bands or EXAMPLES // batch_size
    sampling = privacy.PoissonSampling(EXAMPLES, batch_size, bands)
    noise = privacy.calibrate_noise_multiplier(epsilon, 1e-5, sampling, STEPS, strategy=strategy)
    assert strategy.noising is not None
    coef = np.zeros(STEPS)
    used = strategy.noising[0, :STEPS]
    coef[: len(used)] = used
    return float(noise * np.sqrt(np.cumsum(np.cumsum(coef) ** 2).mean()))


def compiled(
    step: fnet.step.Step, state: fnet.TrainState, batch: Any, target: Target | None
) -> tuple[Any, int]:
    """Return the program and the bytes of its temporaries."""
    if target is None:
        program: Any = fnet.compile_step(step, state, batch)
        return program, program.report.peak.temporaries
    program = compile_for(target, step, state, batch)
    return program, peak(program).temporaries


def main() -> None:
    options = argument_parser(__doc__, rounds=7, target=True).parse_args()
    target = describe(options.target) if options.target else None
    temporaries, calls = {}, {}
    for name, strategy in METHODS.items():
        _, temporaries[name] = compiled(*build(strategy, 8), target)
        if target is None:
            step, state, batch = build(strategy, 256)
            calls[name] = step_caller(compiled(step, state, batch, None)[0], state, batch)
    seconds = interleaved(calls, options.rounds) if calls else {}
    errors = {n: {c: error(s, *case) for c, case in CASES.items()} for n, s in METHODS.items()}
    size = tree_bytes(build(METHODS["DP-SGD"], 8)[1].params)
    more = {name: (t - temporaries["DP-SGD"]) / size for name, t in temporaries.items()}
    rows = [
        {
            "noise": name,
            "draws per step": str(np.asarray(strategy.noising).size),
            "temporaries above DP-SGD / P": f"{more[name]:.4f}",
            "time / DP-SGD": f"{seconds[name] / seconds['DP-SGD']:.2f}" if seconds else "",
            **{
                f"error / DP-SGD, {case}": f"{errors[name][case] / errors['DP-SGD'][case]:.2f}"
                for case in CASES
            },
        }
        for name, strategy in METHODS.items()
    ]
    where = f"ahead of time for {options.target}" if target else jax.default_backend()
    print(f"3 x dense({WIDTH}, {WIDTH}), Adam, {where}. P: bytes of the parameters.\n")
    print(markdown_table(rows))
    publish(claims(more, where), options, "jax", "jaxlib", "jax-cuda13-plugin")


def claims(more: dict[str, float], where: str) -> Iterator[Claim]:
    """Claim that correlated noise needs no buffer of the size of the parameters."""
    yield Claim(
        f"correlated noise, {where}: temporaries above DP-SGD's / parameters, the largest",
        "one stored buffer per further band: 1.0 or more",
        max(more.values()),
        "<= 0.01",
    )


if __name__ == "__main__":
    main()
