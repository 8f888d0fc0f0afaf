"""Predicted and measured time of train steps on this CPU.

    python -m benchmarks.step_time

The roofline of `fnet.memory.roofline` needs the rates of a device. Here they are measured first:
a matrix product, a multiplication of large arrays and one in the cache, an exponential, and a loop
of tiny operations. Then the steps of recipes and of networks in plain JAX, flax and optax are
predicted from their compiled programs and timed, between two calibrations. The table gives
predicted / measured time.
"""

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import fnet
from benchmarks.measure import interleaved, markdown_table, step_caller
from fnet.memory import roofline
from fnet.memory.target import Peaks
from train.config import recipes
from train.run.setup import setup

RECIPES = (
    *("digits", "digits_mlp", "digits_revnet", "digits_noise_scale", "digits_dp"),
    *("text_transformer", "text_mamba", "text_hybrid", "digits_diffusion", "resnet50_synthetic"),
)


_CACHE = 8e6
"""Bytes that a kernel may move to count as one that runs in the cache."""


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """Median time of a call whose result is waited for."""
    return interleaved({"": call}, rounds)[""]


def calibrate(rounds: int = 7) -> Peaks:
    """Measure the rates of this CPU."""

    def time_of(f: Callable[..., Any], *args: Any) -> float:
        compiled = jax.jit(f).lower(*args).compile()
        return seconds(lambda: compiled(*args), rounds)

    def repeated(f: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
        return lambda x: jax.lax.fori_loop(0, count, lambda i, x: f(x), x)

    key = jax.random.key(0)
    a = jax.random.normal(key, (1024, 1024))
    product = time_of(jnp.matmul, a, a)
    rates = {}
    for size in (2**17, 2**23):
        count = 2**25 // size
        scaled = time_of(repeated(lambda x: 0.5 * x + 1, count), jnp.ones(size)) / count
        rates[size] = 2 * 4 * size / scaled
    small = jax.random.normal(key, (2**16,))
    special = time_of(repeated(lambda x: jnp.exp(-x), 64), small) / 64
    launch = time_of(repeated(lambda x: jnp.sort(x), 1000), jnp.ones((8, 8))) / 1000
    return Peaks(
        flops={"float32": 2 * 1024**3 / product},
        vector=9 * small.size / special,
        bandwidth=rates[2**23],
        link=1e9,
        network=1e9,
        launch=launch / 3,
        cache=(_CACHE, rates[2**17]),
    )


def between(a: Peaks, b: Peaks) -> Peaks:
    """Return the mean rates of two calibrations."""

    def mean(x: float, y: float) -> float:
        return 2 / (1 / x + 1 / y)

    return a._replace(
        flops={name: mean(rate, b.flops[name]) for name, rate in a.flops.items()},
        vector=mean(a.vector, b.vector),
        bandwidth=mean(a.bandwidth, b.bandwidth),
        launch=mean(a.launch, b.launch),
        cache=(a.cache[0], mean(a.cache[1], b.cache[1])),
    )


Case = tuple[str, jax.stages.Compiled, Callable[[], Any]]


def recipe(name: str) -> Case:
    with contextlib.redirect_stdout(io.StringIO()):
        run = setup(recipes.load(name))
    executable = fnet.compile_step(run.step, run.state_shapes, run.batch_shapes)
    state = jax.jit(run.init)(jax.random.key(0))
    batch = next(run.training_batches(0))
    return name, executable.compiled, step_caller(executable.compiled, state, batch)


def foreign() -> Iterator[Case]:
    """Steps of networks that are not fnet's."""

    class Cnn(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for width in (32, 64, 128):
                x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3), (2, 2))(x)))
            return nn.Dense(10)(x.mean((1, 2)))

    def gelu_mlp(params: Any, x: Any) -> Any:
        for w in params:
            x = jax.nn.gelu(x @ w) + x
        return x

    cnn = Cnn()
    images = jnp.ones((32, 64, 64, 3))
    attention = nn.Sequential(
        [
            nn.LayerNorm(),
            nn.SelfAttention(8),
            nn.LayerNorm(),
            nn.Dense(1024),
            nn.gelu,
            nn.Dense(256),
        ]
    )
    tokens = jnp.ones((8, 256, 256))
    cases: dict[str, tuple[Callable[[Any, Any], Any], Any, Any]] = {
        "mlp": (gelu_mlp, [jnp.eye(512)] * 8, jnp.ones((1024, 512))),
        "flax cnn": (cnn.apply, cnn.init(jax.random.key(0), images), images),
        "flax attention": (
            lambda p, x: attention.apply(p, x) + x,
            attention.init(jax.random.key(0), tokens),
            tokens,
        ),
    }
    for name, (apply, params, x) in cases.items():
        yield _step(name, apply, params, x)


def _step(name: str, apply: Callable[[Any, Any], Any], params: Any, x: Any) -> Case:
    optimizer = optax.adam(1e-3)

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: (apply(p, x) ** 2).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    compiled = jax.jit(step).lower(params, state, x).compile()
    return name, compiled, lambda: compiled(params, state, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="Timed steps of each program.")
    parser.add_argument("--only", nargs="*", default=RECIPES, help="Recipes.")
    args = parser.parse_args()
    rows, after = [], calibrate()
    print(
        f"{after.flops['float32'] / 1e9:.0f} GFLOP/s, {after.vector / 1e9:.1f} G elements/s, "
        f"{after.bandwidth / 1e9:.1f} GB/s, {after.cache[1] / 1e9:.1f} GB/s in the cache, "
        f"{after.launch * 1e6:.2f} us per operation"
    )
    for name, compiled, step in [*map(recipe, args.only), *foreign()]:
        # Other processes slow this machine down: the rates are those around the timed steps.
        before = calibrate()
        measured = seconds(step, args.rounds)
        after = calibrate()
        e = roofline.estimate(compiled, between(before, after))
        rows.append(
            {
                "step": name,
                "GFLOP": f"{e.total_flops / 1e9:.3g}",
                "GB": f"{e.bytes / 1e9:.3g}",
                "predicted, ms": f"{1e3 * e.seconds:.3g}",
                "measured, ms": f"{1e3 * measured:.3g}",
                "predicted / measured": f"{e.seconds / measured:.2f}",
                "limit": " ".join(f"{n} {s:.0%}" for n, s in e.share.items() if s > 0.05),
            }
        )
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
