"""Claims of fnet on a GPU, in a few minutes: donation, memory and time of real programs.

    python -m benchmarks --gpu                  # ten minutes, with what it installs
    python -m benchmarks.gpu --minutes 20
    JAX_PLATFORMS=cpu python -m benchmarks --gpu --tiny

Each program is compiled with JAX's default options and runs in a process of its own, so that the
allocator's high-water mark is the program's. The process counts from before its arguments exist.
A recipe is trained for a few steps by the command line program, and its summary is read. Nothing
needs the network.

The programs come in order of worth. Several compile side by side, and each is timed alone. Each
has a time limit, and is written to ``--json`` when it is done. When the minutes are over, the
programs that are left are skipped. Programs and tuned kernels are cached, so that a second run
compiles less.

XLA tries kernels while it compiles, which takes memory too. Where a program never exceeds that,
its peak is unknown, which the table shows.

``--tiny`` runs the same programs at sizes for a test on CPU, and claims nothing.
"""

import argparse
import contextlib
import fcntl
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fnet
from benchmarks import abn_stack, attention, clipped_grad, host_state, machine, networks
from benchmarks import linear_cross_entropy as fused_loss
from benchmarks import transformer_step as language_model
from benchmarks.claims import Claim, argument_parser, publish, write
from benchmarks.measure import interleaved, markdown_table
from fnet import memory
from fnet.memory import peak, roofline
from fnet.memory.target import TARGETS, Gpu
from train.run.process_memory import HighWater

RECIPES = (
    "text_transformer",
    "resnet50_synthetic",
    "digits",
    "digits_dp",
    "digits_revnet",
    "digits_diffusion",
)
ROW_SECONDS = 240
CACHE = Path("runs", "compiled").absolute()
PROCESSES = 5
DEVICE = Path(tempfile.gettempdir(), "fnet-benchmarks-gpu.lock")
"""Held by all processes that compile, or by the one that is timed."""
MEGABYTE = 1e6
TOLERANCE = 0.05, 16 * MEGABYTE
"""Largest difference of predicted and measured bytes: a share of the prediction, or these bytes."""


class Program(NamedTuple):
    """A function and its arguments. Nothing large exists before the arguments are made.

    Attributes:
      function: jitted function, or a compiled one.
      make: makes the arguments.
      donates: whether the function returns its first argument updated, in the same buffers.
    """

    function: Any
    make: Callable[[], tuple[Any, ...]]
    donates: bool = False


class Case(NamedTuple):
    """Programs to compare.

    Attributes:
      programs: ``build(tiny) -> program``, by name. The first is the baseline.
      memory: targets of the measured peaks relative to the baseline's, by name.
      time: targets of the measured seconds relative to the baseline's, by name.
    """

    programs: Mapping[str, Callable[[bool], Program]]
    memory: Mapping[str, str]
    time: Mapping[str, str]


def conv_stack(stack: Any, blocks: int, tiny: bool, **options: Any) -> Program:
    """Gradient of blocks of convolution, batch norm and activation."""
    shape, blocks = ((2, 8, 8, 16), 2) if tiny else ((64, 56, 56, 128), blocks)
    build = functools.partial(stack, blocks, width=shape[-1], **options)
    gradient = jax.jit(jax.value_and_grad(build()[0]))
    return Program(gradient, lambda: (build()[1], jax.random.normal(jax.random.key(0), shape)))


def loss_gradient(losses: Any, tiny: bool) -> Program:
    sizes = (
        fused_loss.Sizes(16, 8, 64) if tiny else fused_loss.Sizes(8192, 2048, 131_072, "bfloat16")
    )
    return Program(jax.jit(fused_loss.value_and_gradients(losses)), sizes.arrays)


def example_gradients(gradient: Any, tiny: bool) -> Program:
    """Gradient of a transformer's loss."""
    width, tokens, batch = (64, 8, 4) if tiny else (768, 256, 64)

    def build() -> networks.Network:
        return networks.fnet_transformer(width, tokens, batch)["fnet"]

    return Program(jax.jit(gradient(build().loss)), lambda: tuple(build()[1:]))


def attention_gradient(side: str, tiny: bool) -> Program:
    shape = (1, 64, 2, 16) if tiny else (1, 4096, 16, 64)
    function = attention.gradient(attention.sides(True, None)[side])

    def make() -> tuple[jax.Array, ...]:
        return tuple(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(4))

    return Program(function, make)


def language_model_step(tiny: bool) -> tuple[fnet.step.Step, Any, dict[str, Any], Any]:
    """A train step of a language model, the shapes of its state and batch, and ``create(key)``."""
    s = language_model.Sizes(
        blocks=12, width=768, heads=12, tokens=1024, batch=16, vocabulary=32_768
    )
    if tiny:
        s = language_model.Sizes(blocks=2, width=32, heads=2, tokens=64, batch=8, vocabulary=64)
    model, loss = language_model.fnet_model(s, None)
    optimizer = optax.adamw(1e-3)
    create = functools.partial(fnet.TrainState.create, model, optimizer)
    shapes = jax.eval_shape(create, jax.random.key(0))
    batch: Any = {"tokens": jax.ShapeDtypeStruct((s.batch, s.tokens + 1), jnp.int32)}
    return fnet.make_step(loss, optimizer), shapes, batch, create


def train_step(share: float, tiny: bool) -> Program:
    """The step of `language_model_step`, within a share of the plain one's predicted bytes."""
    step, shapes, batch, create = language_model_step(tiny)
    compiled = fnet.compile_step(step, shapes, batch, compiler_options={})
    if share < 1:
        budget = int(share * compiled.report.peak.total)
        compiled = fnet.compile_step(step, shapes, batch, budget=budget)

    def make() -> tuple[Any, ...]:
        key = jax.random.key(1)
        vocabulary = len(shapes.params["embedding"]["embedding"])
        tokens = jax.random.randint(key, batch["tokens"].shape, 0, vocabulary)
        return jax.jit(create)(jax.random.key(0)), {"tokens": tokens}

    return Program(compiled.compiled, make, donates=True)


def adam_step(on_host: bool, tiny: bool) -> Program:
    """Train step of `benchmarks.host_state`, with Adam's state on the host or on the device."""
    width, batch = (512, 8) if tiny else (host_state.WIDTH, host_state.BATCH)
    params = {str(i): jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(8)}
    adam = optax.adam(1e-3)
    create = functools.partial(fnet.TrainState.create, optimizer=adam, key=jax.random.key(0))
    state = jax.eval_shape(lambda params: create(params=params), params)

    mesh = jax.sharding.Mesh(jax.devices()[:1], "device")

    def placed(a: jax.ShapeDtypeStruct, kind: str = "device") -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.NamedSharding(mesh, jax.P(), memory_kind=kind)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    kind = "pinned_host" if on_host else "device"
    moments = jax.tree.map(lambda a: placed(a, kind if a.shape else "device"), state.opt_state)
    inputs = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    shapes = (
        jax.tree.map(placed, state.replace(opt_state=())).replace(opt_state=moments),
        {"x": placed(inputs)},
    )
    optimizer = memory.state_on_host(adam) if on_host else adam
    step = fnet.make_step(host_state.losses(host_state.layers), optimizer)

    def array(a: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return jax.jit(lambda: jnp.full(a.shape, 1e-3, a.dtype), out_shardings=a.sharding)()

    compiled = step.jitted.lower(*shapes).compile()
    return Program(compiled, lambda: jax.tree.map(array, shapes), donates=True)


def on(build: Callable[..., Program], *args: Any, **options: Any) -> Callable[[bool], Program]:
    return lambda tiny: build(*args, tiny=tiny, **options)


PLAIN, HALF = "plain", "budget of 50 %"
CASES = {
    "train step": Case(
        {PLAIN: on(train_step, 1.0), HALF: on(train_step, 0.5)}, {HALF: "<= 0.5"}, {HALF: "<= 1.4"}
    ),
    "in-place norm": Case(
        {
            "flax": on(conv_stack, abn_stack.flax_stack, 16, activation="relu"),
            "fnet": on(conv_stack, abn_stack.in_place_stack, 16, activation="relu"),
        },
        {"fnet": "<= 0.6"},
        {"fnet": "<= 1.1"},
    ),
    "fused loss": Case(
        {
            "optax": on(loss_gradient, fused_loss.optax_losses),
            "fnet": on(loss_gradient, fnet.linear_cross_entropy),
        },
        {"fnet": "<= 0.5"},
        {"fnet": "<= 1.1"},
    ),
    "clipped gradients": Case(
        {
            PLAIN: on(example_gradients, clipped_grad.plain),
            "fnet": on(example_gradients, functools.partial(clipped_grad.clipped, bound=1.0)),
            "vmap": on(example_gradients, functools.partial(clipped_grad.clip_and_sum, bound=1.0)),
        },
        {"fnet": "<= 1.1", "vmap": ""},
        {"fnet": "<= 1.1", "vmap": ""},
    ),
    "attention": Case(
        {"jax.nn": on(attention_gradient, "jax.nn"), "fnet": on(attention_gradient, "fnet")},
        {"fnet": "<= 1.0"},
        {"fnet": "<= 1.1"},
    ),
    "reversible blocks": Case(
        {
            PLAIN: on(conv_stack, abn_stack.plain_coupled_stack, 16),
            "fnet": on(conv_stack, abn_stack.reversible_stack, 16),
            "fnet, twice as deep": on(conv_stack, abn_stack.reversible_stack, 32),
        },
        {"fnet": "<= 0.3", "fnet, twice as deep": "<= 0.3"},
        {"fnet": "<= 1.6"},
    ),
    "Adam": Case(
        {"state on the device": on(adam_step, False), "state on the host": on(adam_step, True)},
        {"state on the host": "<= 0.6"},
        {"state on the host": ""},
    ),
}


@contextlib.contextmanager
def device(use: int) -> Iterator[None]:
    """Use the device, with others (``fcntl.LOCK_SH``) or alone (``fcntl.LOCK_EX``)."""
    with DEVICE.open("w") as file:
        fcntl.flock(file, use)
        yield


def measure(case: str, name: str, tiny: bool) -> dict[str, Any]:
    """Compile a program while other processes compile theirs, then run it alone.

    Returns:
      ``predicted`` and ``measured`` bytes (None if unknown), ``compile_seconds`` with
      building and tracing, ``seconds`` per call, on a known GPU
      the ``estimated`` seconds, and for a program that donates, the share of its buffers that
      are ``in_place``.
    """
    start = time.monotonic()
    with device(fcntl.LOCK_SH):
        program = CASES[case].programs[name](tiny)
        compiled = program.function
        if not isinstance(compiled, jax.stages.Compiled):
            compiled = compiled.lower(*jax.eval_shape(program.make)).compile()
        result: dict[str, Any] = {
            "predicted": peak(compiled).total,
            "compile_seconds": time.monotonic() - start,
        }
        kind = jax.devices()[0].device_kind
        for known in TARGETS.values():
            if isinstance(known, Gpu) and known.device == kind:
                result["estimated"] = roofline.estimate(compiled, known.peaks).seconds
    with device(fcntl.LOCK_EX):
        return result | run(compiled, program.make, program.donates, 2 if tiny else 10)


def run(
    compiled: Any, make: Callable[[], tuple[Any, ...]], donates: bool, rounds: int
) -> dict[str, Any]:
    """Run a compiled program; return ``seconds``, ``measured`` bytes and what is ``in_place``."""
    high_water = HighWater()
    state, *rest = make()
    result = {}
    if donates:
        before = _pointers(state)
        box = [compiled(state, *rest)[0]]
        del state
        result["in_place"] = sum(map(before.__contains__, _pointers(box[0]))) / len(before)

        def call() -> Any:
            box[0], metrics = compiled(box[0], *rest)
            return metrics

    else:

        def call() -> Any:
            return compiled(state, *rest)

    seconds = interleaved({"": call}, rounds)[""]
    return result | {"seconds": seconds, "measured": high_water.bytes()}


def _pointers(tree: Any) -> list[int]:
    """Addresses of the buffers of a tree's arrays."""
    arrays = (
        jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a
        for a in jax.tree.leaves(tree)
    )
    return [a.unsafe_buffer_pointer() for a in arrays]


def train_recipe(recipe: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Train a recipe for a few steps with the program; return its predicted and measured bytes.

    It is trained twice. What XLA tries while it compiles would hide the peak of the first run.
    """
    out = folder / recipe
    command = [sys.executable, "-m", "fnet", "train", recipe]
    for again in ("first", "second"):
        _run([*command, "--out", str(out / again), "--train.steps", "8"], seconds)
    summary = json.loads((out / "second" / "summary.json").read_text())
    return {"predicted": summary["peak_bytes_predicted"], "measured": summary["peak_bytes_seen"]}


def run_all(
    minutes: float,
    tiny: bool,
    parallel: int,
    row_seconds: float = ROW_SECONDS,
    only: Sequence[str] = ("",),
    written: Callable[[Mapping[str, Any]], None] = lambda results: None,
) -> tuple[dict[str, Any], list[str]]:
    """Run every program and recipe; return results by name, and who failed, with reasons."""
    end = time.monotonic() + 60 * minutes
    results: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    lock = threading.Lock()

    def attempt(name: str, row: Callable[[float], Any]) -> None:
        left = end - time.monotonic()
        answer, reason = None, "no time left"
        if left > 0:
            try:
                answer = row(min(left, row_seconds))
            except subprocess.TimeoutExpired as error:
                reason = f"more than {error.timeout:.0f} s"
            except RuntimeError as error:
                reason = str(error)
        with lock:
            if answer is None:
                reasons[name] = reason
            else:
                results[name] = answer
            written(dict(results))
            print(f"{name}: {answer or reason}", file=sys.stderr, flush=True)

    def measured(case: str, name: str, seconds: float) -> Any:
        command = [sys.executable, "-m", "benchmarks.gpu", "--worker", case, name]
        return json.loads(_run([*command, *["--tiny"] * tiny], seconds))

    has_digits = importlib.util.find_spec("sklearn") is not None
    recipes = [r for r in RECIPES if has_digits or not r.startswith("digits")]
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            f"{case}, {name}": functools.partial(measured, case, name)
            for case in CASES
            for name in CASES[case].programs
        }
        trained = {
            f"recipe {recipe}": functools.partial(train_recipe, recipe, Path(folder))
            for recipe in (recipes[:1] if tiny else recipes)
        }
        # One after the other: recipes would keep programs from being alone.
        for attempts in programs, trained:
            chosen = {n: row for n, row in attempts.items() if any(part in n for part in only)}
            with ThreadPoolExecutor(parallel) as pool:
                list(pool.map(attempt, chosen, chosen.values()))
    names = [*programs, *trained]
    in_order = {name: results[name] for name in names if name in results}
    return in_order, [f"{name}: {reasons[name]}" for name in names if name in reasons]


def _run(command: list[str], seconds: float) -> str:
    """Run a command for at most so many seconds; return the last line of its output.

    Raises:
      RuntimeError: if it fails; the message is its last line of output.
    """
    answer = subprocess.run(
        command,
        timeout=seconds,
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": str(CACHE),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        },
    )
    if answer.returncode:
        raise RuntimeError((answer.stderr.strip() or answer.stdout.strip()).splitlines()[-1])
    return answer.stdout.strip().splitlines()[-1]


def claims(results: Mapping[str, Any]) -> Iterator[Claim]:
    """Claim memory and time relative to the baselines, true predictions, and donation."""
    for case, (programs, bytes_, seconds) in CASES.items():
        baseline = next(iter(programs))
        for kind, key, targets in (
            ("measured memory", "measured", bytes_),
            ("time", "seconds", seconds),
        ):
            for name, target in targets.items():
                both = [results.get(f"{case}, {n}", {}).get(key) for n in (name, baseline)]
                if all(both):
                    what = f"{case}, {name}: {'peak' if key == 'measured' else 'time'}"
                    yield Claim(what, baseline, both[0] / both[1], target, kind)
    for name, result in results.items():
        if "in_place" in result:
            what = f"{name}: share of the state's buffers that are updated in place"
            yield Claim(what, "all", result["in_place"], ">= 1", "measured memory")
        if "estimated" in result:
            what = f"{name}: estimated seconds"
            yield Claim(what, "measured", result["estimated"] / result["seconds"], ">= 0.5", "time")
        if result["measured"]:
            share, least = TOLERANCE
            difference = abs(result["measured"] - result["predicted"])
            allowed = max(share * result["predicted"], least)
            what = f"{name}: difference of predicted and measured peak"
            yield Claim(what, "5 % or 16 MB", difference / allowed, "<= 1", "measured memory")


def rows(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """Build a row for each program and recipe."""

    def megabytes(value: float | None) -> str:
        return "unknown" if value is None else f"{value / MEGABYTE:,.1f}"

    return [
        {
            "program": name,
            "predicted MB": megabytes(r["predicted"]),
            "measured MB": megabytes(r["measured"]),
            "measured / predicted": f"{r['measured'] / r['predicted']:.3f}"
            if r["measured"]
            else "",
            "compile s": f"{r['compile_seconds']:.0f}" if "compile_seconds" in r else "",
            "ms": f"{r['seconds'] * 1e3:,.2f}" if "seconds" in r else "",
            "estimated / measured": f"{r['estimated'] / r['seconds']:.2f}"
            if "estimated" in r
            else "",
        }
        for name, r in results.items()
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=8.5, help="Time limit.")
    parser.add_argument("--only", nargs="+", default=("",), help="Parts of the names of rows.")
    parser.add_argument("--tiny", action="store_true", help="Small sizes, to try it on CPU.")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not (args.minutes > 0 and math.isfinite(args.minutes)):
        parser.error(f"--minutes: expected a number above 0, got {args.minutes}")
    if args.worker:
        case, name = args.worker
        print(json.dumps(measure(case, name, args.tiny)))
        return
    start = time.monotonic()
    packages = "jax", "jaxlib", "flax", "optax"

    def claimed(results: Mapping[str, Any]) -> Iterator[Claim]:
        return iter(()) if args.tiny else claims(results)

    def written(results: Mapping[str, Any]) -> None:
        if args.json:
            write(args.json, claimed(results), *packages, data=results)

    parallel = min(max(machine.cores() // 2, 1), PROCESSES)
    results, failed = run_all(args.minutes, args.tiny, parallel, only=args.only, written=written)
    print(f"{', '.join(machine.describe()['devices'])}, {time.monotonic() - start:.0f} s.\n")
    if results:
        print(markdown_table(rows(results)))
    for reason in failed:
        print(f"- skipped: {reason}")
    publish(claimed(results), args, *packages, data=results)


if __name__ == "__main__":
    main()
