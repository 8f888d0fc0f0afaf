"""Workspaces of convolutions and matrix products on a CPU, predicted and measured.

    python -m benchmarks.cpu_workspaces

Each program is a few operations that XLA gives to Eigen or to YNNPACK. It runs in a process of
its own. Predicted is `fnet.memory.peak`, measured the high-water mark above the memory in use
before. The constants of `fnet.cpu.workspaces` in `fnet/measured.py` come from such runs.
"""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import in_fresh_process, markdown_table
from fnet.cpu.heap import limit_freed_memory, occupy_gaps
from fnet.cpu.options import KEEP_REMAT
from fnet.memory import peak
from train.run.process_memory import HighWater

CALLS = 3


def convolution(x: Any, kernel: Any, stride: int = 1, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def by_input(kernel: Any, y: Any, size: int) -> Any:
    x = jax.ShapeDtypeStruct((y.shape[0], size, size, kernel.shape[2]), y.dtype)
    return jax.linear_transpose(lambda x: convolution(x, kernel, stride=2), x)(y)[0]


def chain(x: Any, *matrices: Any) -> Any:
    return functools.reduce(lambda x, m: jnp.tanh(x @ m), matrices, x)


class Case(NamedTuple):
    """A program: its function, the shapes of its arguments, and its compiler options."""

    f: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    options: dict[str, Any] = KEEP_REMAT


CASES = {
    "3x3, YNNPACK": Case(convolution, [(32, 64, 64, 64), (3, 3, 64, 64)], {}),
    "3x3 with a large kernel, YNNPACK": Case(
        convolution, [(32, 32, 32, 256), (3, 3, 256, 256)], {}
    ),
    "3x3, Eigen": Case(convolution, [(32, 64, 64, 64), (3, 3, 64, 64)]),
    "gradient by the input of stride 2, Eigen": Case(
        functools.partial(by_input, size=64), [(3, 3, 64, 64), (16, 32, 32, 64)]
    ),
    "32 groups, Eigen": Case(
        functools.partial(convolution, groups=32), [(32, 64, 64, 128), (3, 3, 4, 128)]
    ),
    "product with a transposed matrix": Case(lambda x, y: x.T @ y, [(65536, 256), (65536, 256)]),
    "three batched products": Case(chain, [(16, 512, 512)] * 4),
}


def measure(name: str) -> dict[str, int]:
    """Compile and run a program; return bytes of it, without its arguments."""
    f, shapes, options = CASES[name]
    args = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    program = jax.jit(f).lower(*args).compile(compiler_options=options)
    jax.block_until_ready(args)
    jax.block_until_ready(program(*(a + 0 for a in args)))  # starts threads
    occupy_gaps()
    memory, predicted = HighWater(), peak(program)
    for _ in range(CALLS):
        jax.block_until_ready(program(*args))
    return {
        "without": predicted.assigned - predicted.arguments,
        "predicted": predicted.total - predicted.arguments,
        "measured": memory.bytes() or 0,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        limit_freed_memory()
        print(json.dumps(measure(options.worker)))
        return
    rows, claims = [], []
    for name in CASES:
        result = in_fresh_process("cpu_workspaces", name)
        rows.append({"program": name} | {k: f"{v / 1e6:.0f} MB" for k, v in result.items()})
        error = abs(result["predicted"] - result["measured"])
        bound = max(0.1 * result["measured"], 16e6)
        claim = f"workspace of {name}: error of the prediction"
        claims.append(Claim(claim, "10 % or 16 MB", error / bound, "<= 1.0", "measured memory"))
    print(markdown_table(rows))
    publish(claims, options, "jax", "jaxlib")


if __name__ == "__main__":
    main()
