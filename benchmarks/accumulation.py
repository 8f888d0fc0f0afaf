"""Gradient accumulation over eight microbatches with Adam: peak memory and time of a step.

    python -m benchmarks.accumulation
    JAX_PLATFORMS=cpu python -m benchmarks.accumulation --target h100

The network has 24 dense layers of 1024 x 1024 with relu, in float32. The peak is arguments +
outputs - aliased + temporaries of the compiled step, divided by P, the bytes of the parameters.
Parameters, Adam's two moments and one accumulator are 4 P. ``--target`` needs the target's
compiler but no device, and runs nothing.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved, markdown_table, step_caller
from fnet import Layer, layers, repeat, serial
from fnet.autodiff import Gradient, Loss, mean, microbatches
from fnet.layer import stateless
from fnet.memory import peak, tree_bytes
from fnet.memory.target import Target, compile_for, describe

DEPTH, WIDTH = 24, 1024
MICROBATCHES = 8


class Method(NamedTuple):
    """A way to accumulate gradients.

    Attributes:
      mode: gradient mode.
      optimizer: optimizer.
      calls: steps per batch; each step gets this fraction of it.
    """

    mode: Callable[[Loss], Gradient]
    optimizer: optax.GradientTransformation
    calls: int = 1


def map_then_mean(loss: Loss) -> Gradient:
    """Materialize the gradients of all microbatches, then average them."""
    mean_gradient = mean(loss)

    def gradient(params: Any, state: Any, batch: Any, key: Array) -> tuple[Any, Any, Any]:
        parts = {k: x.reshape(MICROBATCHES, -1, *x.shape[1:]) for k, x in batch.items()}
        grads, _, metrics = jax.lax.map(lambda p: mean_gradient(params, state, p, key), parts)
        average = functools.partial(jax.tree.map, lambda x: x.mean(0))
        return average(grads), state, average(metrics)

    return gradient


def scan_and_add(loss: Loss) -> Gradient:
    """Add the gradient of each microbatch to the carry of a scan."""
    mean_gradient = mean(loss)

    def gradient(params: Any, state: Any, batch: Any, key: Array) -> tuple[Any, Any, Any]:
        parts = {k: x.reshape(MICROBATCHES, -1, *x.shape[1:]) for k, x in batch.items()}

        def add(sums: Any, microbatch: Any) -> tuple[Any, Any]:
            grads, _, metrics = mean_gradient(params, state, microbatch, key)
            return jax.tree.map(lambda s, g: s + g / MICROBATCHES, sums, grads), metrics

        sums, metrics = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        return sums, state, jax.tree.map(lambda x: x.mean(0), metrics)

    return gradient


def optax_microbatch(loss: Loss) -> Gradient:
    """Average the gradients of microbatches with optax's transformation."""
    mean_gradient = mean(loss)

    def gradient(params: Any, state: Any, batch: Any, key: Array) -> tuple[Any, Any, Any]:
        def of_part(batch: Any) -> tuple[Any, Any]:
            grads, _, metrics = mean_gradient(params, state, batch, key)
            return grads, metrics

        size = len(batch["x"]) // MICROBATCHES
        whole = optax.microbatching.microbatch(
            of_part, 0, size, optax.microbatching.AccumulationType.MEAN
        )
        grads, metrics = whole(batch)
        return grads, state, metrics

    return gradient


ADAM = optax.adam(1e-3)
WHOLE, OURS = "whole batch at once", "`fnet.autodiff.microbatches(8)`"
SCAN, OPTAX = "`lax.scan` that adds gradients", "`optax.microbatch`"
MULTI_STEPS = "`optax.MultiSteps`"
METHODS = {
    WHOLE: Method(mean, ADAM),
    OURS: Method(microbatches(MICROBATCHES), ADAM),
    SCAN: Method(scan_and_add, ADAM),
    OPTAX: Method(optax_microbatch, ADAM),
    MULTI_STEPS: Method(mean, optax.MultiSteps(ADAM, MICROBATCHES), calls=MICROBATCHES),
    "`lax.map` of gradients, then their mean": Method(map_then_mean, ADAM),
}
TIMED = (WHOLE, OURS, SCAN, OPTAX, MULTI_STEPS)
TARGETS = {"unrolled": 4.2, "scanned": 4.35}
"""Target of fnet's peak, in P."""


def network(*, scanned: bool) -> Layer:
    block = serial(dense=layers.dense(WIDTH, WIDTH), relu=stateless(jax.nn.relu))
    return repeat(block, DEPTH) if scanned else serial(*[block] * DEPTH)


def build_step(
    method: Method, examples: int, *, scanned: bool
) -> tuple[jax.stages.Wrapped, Callable[[], Any], Any]:
    """Return the step, a function that creates its state, and the shapes of its batch."""
    model = network(scanned=scanned)

    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, fnet.Aux]:
        y, state = model.apply(params, state, batch["x"], key=key, train=True)
        return jnp.square(y - batch["y"]).mean(-1), fnet.Aux(state, {})

    create = functools.partial(fnet.TrainState.create, model, method.optimizer)
    shape = jax.ShapeDtypeStruct((examples // method.calls, WIDTH), jnp.float32)
    step = fnet.make_step(loss, method.optimizer, method.mode)
    return step, lambda: create(jax.random.key(0)), {"x": shape, "y": shape}


def compile_step(
    method: Method, examples: int, target: Target | None, *, scanned: bool
) -> tuple[Any, float]:
    """Compile the step; return it and its peak in P."""
    step, create, batch = build_step(method, examples, scanned=scanned)
    state = jax.eval_shape(create)
    if target is None:
        program: Any = fnet.compile_step(step, state, batch)
        total = program.report.peak.total
    else:
        program = compile_for(target, step, state, batch)
        total = peak(program).total
    return program, total / tree_bytes(state.params)


def seconds(
    programs: dict[str, Any], examples: int, rounds: int, *, scanned: bool
) -> dict[str, float]:
    """Seconds per batch, by method."""
    calls = {}
    for name, program in programs.items():
        _, create, shapes = build_step(METHODS[name], examples, scanned=scanned)
        batch = {k: jnp.ones(s.shape, s.dtype) for k, s in shapes.items()}
        step = step_caller(program, create(), batch)
        calls[name] = lambda step=step, n=METHODS[name].calls: [step() for _ in range(n)]
    return interleaved(calls, rounds)


def main() -> None:
    parser = argument_parser(__doc__, rounds=7, target=True)
    parser.add_argument("--batch", type=int, default=256, help="Batch size, a multiple of 8.")
    options = parser.parse_args()
    target = describe(options.target) if options.target else None
    rows: dict[str, dict[str, str]] = {name: {"": name} for name in METHODS}
    peaks: dict[str, dict[str, float]] = {}
    for scanned in (False, True):
        form = "scanned" if scanned else "unrolled"
        programs = {}
        for name, method in METHODS.items():
            program, in_p = compile_step(method, options.batch, target, scanned=scanned)
            peaks.setdefault(form, {})[name] = in_p
            rows[name][f"{form} layers: peak / P"] = f"{in_p:.2f}"
            if name in TIMED:
                programs[name] = program
        if target is None:
            measured = seconds(programs, options.batch, options.rounds, scanned=scanned)
            for name in METHODS:
                ratio = f"{measured[name] / measured[WHOLE]:.2f}" if name in measured else ""
                rows[name][f"{form} layers: time / whole batch"] = ratio
    where = f"ahead of time for {options.target}" if target else jax.default_backend()
    print(f"{DEPTH} x dense({WIDTH}, {WIDTH}), {options.batch} examples, Adam, {where}.\n")
    print(markdown_table(list(rows.values())))
    publish(claims(peaks, where), options, "jax", "jaxlib", "optax", "jax-cuda13-plugin")


def claims(peaks: dict[str, dict[str, float]], where: str) -> Iterator[Claim]:
    """Claim the peak in P, and relative to optax and to a plain scan."""
    for form, by_method in peaks.items():
        what = f"microbatches({MICROBATCHES}), Adam, {form} layers, {where}: peak of the step"
        yield Claim(
            f"{what} / P",
            f"optax.microbatch: {by_method[OPTAX]:.2f}",
            by_method[OURS],
            f"<= {TARGETS[form]}",
        )
        for baseline in (OPTAX, MULTI_STEPS, SCAN):
            ratio = by_method[OURS] / by_method[baseline]
            yield Claim(what, baseline.replace("`", ""), ratio, "<= 1.0")


if __name__ == "__main__":
    main()
