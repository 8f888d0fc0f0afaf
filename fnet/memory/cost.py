"""FLOPs and bytes: of traced programs, before any compiler, and of compiled instructions."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from fnet import hlo
from fnet.jaxpr import aval, nbytes
from fnet.jaxpr.primitives import DynamicUpdateSlice, product, total

FLOPS_PER_BYTE = 1 / 8
"""Weight of FLOPs and bytes, to rank candidates.

Bytes are counted before fusion, and most of them are never moved. So FLOPs decide; bytes do where
plans have about the same. (An H100 in float32 computes 20 FLOPs while it moves a byte.)
"""


# Large products reach a share of a GPU's highest rate; fusion leaves a share of the bytes of a
# traced program.
MATRIX_UNITS, MOVED = 0.6, 0.3


class Cost(NamedTuple):
    """Compute and memory traffic of a program, before any compiler.

    Attributes:
      flops: Floating-point operations: 2 per multiply-add of matrix products and convolutions, 1
        per element of every other result.
      bytes: Bytes read and written: operands and results of matrix products and convolutions,
        results alone of other operations, which XLA fuses with their readers.
      overhead: What an accelerator takes besides, in the unit of `time`; see `Rates`.
    """

    flops: int
    bytes: int
    overhead: float = 0.0

    @property
    def time(self) -> float:
        """Relative time. Moving a byte takes as long as `FLOPS_PER_BYTE` operations."""
        return self.flops / FLOPS_PER_BYTE + self.bytes + self.overhead

    def with_more(self, other: "Cost", times: int = 1) -> "Cost":
        """The cost of both, of the other one several times."""
        return Cost(self.flops + times * other.flops, self.bytes + times * other.bytes)


class Rates(NamedTuple):
    """FLOPs of an accelerator's matrix units in the time that other work takes.

    Attributes:
      bytes: While it moves a byte of a traced program.
      launch: While it starts a kernel.
    """

    bytes: float
    launch: float

    @classmethod
    def of(cls, peaks: Any) -> "Rates":
        """The rates of a device's `fnet.memory.target.Peaks`."""
        flops = MATRIX_UNITS * peaks.flops["float32"]
        return cls(MOVED * flops / peaks.bandwidth, peaks.launch * flops)

    def priced(self, cost: Cost, launches: int) -> Cost:
        """A cost with what its bytes and its number of kernels take on the accelerator."""
        flops = self.bytes * cost.bytes + self.launch * launches
        return cost._replace(overhead=flops / FLOPS_PER_BYTE - cost.bytes)


def estimate_cost(program: ClosedJaxpr | Jaxpr) -> Cost:
    """Count FLOPs and bytes of a traced program, the same for every device.

    A ``scan`` counts every iteration, a ``while`` loop one, and a ``cond`` its largest branch.
    Rematerialization under `jax.checkpoint` counts.

    Args:
      program: A jaxpr: ``jitted.trace(...).jaxpr`` or ``jax.make_jaxpr(f)(...)``.

    Returns:
      FLOPs and bytes of one run.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> f = lambda a, b: a @ b
      >>> memory.estimate_cost(
      ...     jax.make_jaxpr(f)(jnp.zeros((3, 5)), jnp.zeros((5, 7)))
      ... )
      Cost(flops=210, bytes=284, overhead=0.0)
    """
    costs = list(map(equation_cost, program.eqns))
    return Cost(sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs))


def equation_cost(eqn: JaxprEqn, counts: Callable[[JaxprEqn], Any] = lambda eqn: True) -> Cost:
    """Count FLOPs and bytes of one equation, as `estimate_cost`, of what counts in it."""
    measures = (lambda e, f=f: f(e) if counts(e) else 0 for f in (_flops, _bytes))
    return Cost(*(total(eqn, measure) for measure in measures))


def _made(eqn: JaxprEqn) -> list[Any]:
    """Arrays that are written: of an update, the part alone."""
    return eqn.invars[1:2] if DynamicUpdateSlice.read(eqn) else eqn.outvars


def _flops(eqn: JaxprEqn) -> int:
    multiply = product(eqn)
    if multiply is not None:
        return multiply.flops
    return sum(math.prod(getattr(aval(v), "shape", ())) for v in _made(eqn))


def _bytes(eqn: JaxprEqn) -> int:
    return sum(map(nbytes, [*(eqn.invars if product(eqn) else ()), *_made(eqn)]))


# Compiled instructions.


def instruction_flops(module: hlo.Module, i: hlo.Instruction) -> tuple[float, str]:
    """Count FLOPs of a matrix product, a convolution or attention, also by cuBLAS or cuDNN.

    Args:
      module: The program.
      i: One of its instructions. Others than these count as 0.

    Returns:
      FLOPs, and the dtype whose rate it has: ``highest`` for full float32.
    """
    library = i.attribute(r'custom_call_target="([^"]*)"') if i.opcode == "custom-call" else ""
    if library.startswith("__cudnn$fmha"):
        q = module.operands(i)[0][0]
        products = 5 if "Backward" in library else 2
        return 2.0 * products * _scores(i) * q.shape[-1], q.dtype
    is_product = i.opcode == "dot" or library.startswith("__cublas")
    if not is_product and i.opcode != "convolution" and not library.startswith("__cudnn$conv"):
        return 0.0, ""
    (lhs, *_), (rhs, *_) = module.operands(i)[:2]
    out = i.arrays[0]
    if is_product:
        # lhs_contracting_dims={2}, lhs_contracting_dimensions":["2"]
        contracted = i.attribute(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([\d,"]*)[\]}]')
        products = math.prod(lhs.shape[int(d)] for d in re.findall(r"\d+", contracted))
        return 2.0 * math.prod(out.shape) * products, _dtype(i, lhs)
    # The operands of a gradient, in the order of the convolution: image, kernel, output.
    shapes = [lhs.shape, rhs.shape, out.shape]
    if library.endswith("BackwardFilter"):
        shapes = [lhs.shape, out.shape, rhs.shape]
    elif library.endswith("BackwardInput"):
        shapes = [out.shape, rhs.shape, lhs.shape]
    return _convolution_flops(i, *shapes), _dtype(i, lhs)


def _scores(attention: hlo.Instruction) -> float:
    """Scores that cuDNN's attention computes: of a causal mask, half of all."""
    sizes = attention.attribute(r'intermediate_tensor_shape":\{[^}]*?"dimensions":\[([\d",]*)\]')
    batch, heads, queries, keys = (int(size.strip('"')) for size in sizes.split(","))
    window = int(attention.attribute(r'"sliding_window_length":"?(\d+)') or 0) or keys
    if "CAUSAL" not in attention.attribute(r'"mask_type":"(\w+)"'):
        return batch * heads * float(queries) * keys
    first = min(window, queries)  # queries whose window begins before the first key
    return batch * heads * (first * (first + 1) / 2 + (queries - first) * float(window))


def _convolution_flops(
    i: hlo.Instruction, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]
) -> float:
    """FLOPs of a convolution. Padding and the holes of dilation are skipped."""
    labels = i.attribute(r"dim_labels=(\w+_\w+->\w+)")
    input_labels, kernel_labels, output_labels = re.split(r"_|->", labels)
    pairs = 1.0
    for d, w in enumerate(hlo.window(i)):
        length = lhs[input_labels.index(str(d))]
        positions = np.arange(out[output_labels.index(str(d))])[:, None] * w.stride - w.low
        reached = positions + np.arange(w.size)[None] * w.rhs_dilate
        inside = (reached >= 0) & (reached <= (length - 1) * w.lhs_dilate)
        pairs *= float(np.count_nonzero(inside & (reached % w.lhs_dilate == 0)))
    batch, features = (out[output_labels.index(label)] for label in "bf")
    return 2.0 * pairs * batch * features * rhs[kernel_labels.index("i")]


def _dtype(i: hlo.Instruction, operand: hlo.Array) -> str:
    highest = re.search(r"operand_precision[^}\]]*(highest|HIGHEST)", i.attributes)
    return "highest" if operand.dtype == "float32" and highest else operand.dtype
