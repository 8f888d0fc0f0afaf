"""A train step of eight microbatches with Adam: its peak, several ways, and its time.

    python -m benchmarks.accumulation
    JAX_PLATFORMS=cpu python -m benchmarks.accumulation --target h100

24 dense layers of 1024 x 1024 with relu, float32: arguments + outputs - aliased +
temporaries of the compiled step over P, the bytes of the parameters. Parameters,
Adam's two moments and one accumulator make 4. With ``--target``, which needs the
target's compiler and not the device, nothing is run.
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
from benchmarks.measure import interleaved, markdown, stepping
from fnet import Layer, layers, repeat, serial
from fnet.autodiff import Gradient, Loss, mean, microbatches
from fnet.layer import stateless
from fnet.memory import peak, tree_bytes
from fnet.memory.target import Target, compile_for, describe

DEPTH, WIDTH = 24, 1024
PARTS = 8


class Way(NamedTuple):
    """One way to train on a batch.

    Attributes:
      mode: the gradient mode.
      optimizer: what takes its gradient.
      calls: steps a batch takes; each gets that fraction of it.
    """

    mode: Callable[[Loss], Gradient]
    optimizer: optax.GradientTransformation
    calls: int = 1


def mapped(loss: Loss) -> Gradient:
    """All parts' gradients, then their mean."""
    whole = mean(loss)

    def gradient(params: Any, state: Any, batch: Any, key: Array) -> tuple[Any, Any, Any]:
        parts = {k: x.reshape(PARTS, -1, *x.shape[1:]) for k, x in batch.items()}
        grads, _, metrics = jax.lax.map(lambda part: whole(params, state, part, key), parts)
        average = functools.partial(jax.tree.map, lambda x: x.mean(0))
        return average(grads), state, average(metrics)

    return gradient


def added(loss: Loss) -> Gradient:
    """A scan that adds each part's gradient to what it carries."""
    whole = mean(loss)

    def gradient(params: Any, state: Any, batch: Any, key: Array) -> tuple[Any, Any, Any]:
        parts = {k: x.reshape(PARTS, -1, *x.shape[1:]) for k, x in batch.items()}

        def one(sums: Any, part: Any) -> tuple[Any, Any]:
            grads, _, metrics = whole(params, state, part, key)
            return jax.tree.map(lambda s, g: s + g / PARTS, sums, grads), metrics

        sums, metrics = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)
        return sums, state, jax.tree.map(lambda x: x.mean(0), metrics)

    return gradient


ADAM = optax.adam(1e-3)
WHOLE, OURS = "the whole batch at once", "`fnet.autodiff.microbatches(8)`"
ADDED, OPTAX = "`lax.scan` that adds gradients", "`optax.MultiSteps`"
WAYS = {
    WHOLE: Way(mean, ADAM),
    OURS: Way(microbatches(PARTS), ADAM),
    ADDED: Way(added, ADAM),
    OPTAX: Way(mean, optax.MultiSteps(ADAM, PARTS), calls=PARTS),
    "`lax.map` of gradients, then their mean": Way(mapped, ADAM),
}
TIMED = (WHOLE, OURS, ADDED, OPTAX)
WANTED = {"unrolled": 4.2, "scanned": 4.35}
"""Of our peak, in P."""


def network(*, scanned: bool) -> Layer:
    block = serial(dense=layers.dense(WIDTH, WIDTH), relu=stateless(jax.nn.relu))
    return repeat(block, DEPTH) if scanned else serial(*[block] * DEPTH)


def step_of(
    way: Way, examples: int, *, scanned: bool
) -> tuple[jax.stages.Wrapped, Callable[[], Any], Any]:
    """The step, what makes its state, and the shapes of its batch."""
    model = network(scanned=scanned)

    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, fnet.Aux]:
        y, state = model.apply(params, state, batch["x"], key=key, train=True)
        return jnp.square(y - batch["y"]).mean(-1), fnet.Aux(state, {})

    create = functools.partial(fnet.TrainState.create, model, way.optimizer)
    shape = jax.ShapeDtypeStruct((examples // way.calls, WIDTH), jnp.float32)
    step = fnet.make_step(loss, way.optimizer, way.mode)
    return step, lambda: create(jax.random.key(0)), {"x": shape, "y": shape}


def compiled(way: Way, examples: int, target: Target | None, *, scanned: bool) -> tuple[Any, float]:
    """The compiled step and its peak in P."""
    step, create, batch = step_of(way, examples, scanned=scanned)
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
    """Of a batch, by way."""
    calls = {}
    for name, program in programs.items():
        _, create, shapes = step_of(WAYS[name], examples, scanned=scanned)
        batch = {k: jnp.ones(s.shape, s.dtype) for k, s in shapes.items()}
        step = stepping(program, create(), batch)
        calls[name] = lambda step=step, n=WAYS[name].calls: [step() for _ in range(n)]
    return interleaved(calls, rounds)


def main() -> None:
    parser = argument_parser(__doc__, rounds=7, target=True)
    parser.add_argument("--batch", type=int, default=256, help="examples, a multiple of 8")
    options = parser.parse_args()
    target = describe(options.target) if options.target else None
    rows: dict[str, dict[str, str]] = {name: {"": name} for name in WAYS}
    peaks: dict[str, dict[str, float]] = {}
    for scanned in (False, True):
        form = "scanned" if scanned else "unrolled"
        programs = {}
        for name, way in WAYS.items():
            program, in_p = compiled(way, options.batch, target, scanned=scanned)
            peaks.setdefault(form, {})[name] = in_p
            rows[name][f"{form} layers: peak / P"] = f"{in_p:.2f}"
            if name in TIMED:
                programs[name] = program
        if target is None:
            took = seconds(programs, options.batch, options.rounds, scanned=scanned)
            for name in WAYS:
                ratio = f"{took[name] / took[WHOLE]:.2f}" if name in took else ""
                rows[name][f"{form} layers: time / whole batch"] = ratio
    where = f"ahead of time for {options.target}" if target else jax.default_backend()
    print(f"{DEPTH} x dense({WIDTH}, {WIDTH}), {options.batch} examples, Adam, {where}.\n")
    print(markdown(list(rows.values())))
    publish(claims(peaks, where), options, "jax", "jaxlib", "optax", "jax-cuda13-plugin")


def claims(peaks: dict[str, dict[str, float]], where: str) -> Iterator[Claim]:
    """The whole peak in P, by form of the network; and beside optax's and a plain scan's."""
    for form, of in peaks.items():
        what = f"microbatches({PARTS}), Adam, {form} layers, {where}: peak of the step"
        yield Claim(
            f"{what} / P", f"optax.MultiSteps: {of[OPTAX]:.2f}", of[OURS], f"<= {WANTED[form]}"
        )
        for peer in (OPTAX, ADDED):
            yield Claim(what, peer.replace("`", ""), of[OURS] / of[peer], "<= 1.0")


if __name__ == "__main__":
    main()
