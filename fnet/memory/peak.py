"""Peak memory of a compiled program, and compiler options that lower it."""

import functools
import importlib.metadata
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet.memory import hlo
from fnet.memory.timeline import Buffer, Timeline, timeline

# YNNPACK takes twice as long as Eigen for gradients of convolutions by their kernels. For matrix
# products it is faster, and fused reductions take less memory. jaxlib 0.10 gives it all three.
# XLA rejects options that it does not know, and other versions were not measured.
_EIGEN_CONVOLUTIONS = (
    {
        "xla_cpu_experimental_ynn_fusion_type": (
            "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
        )
    }
    if importlib.metadata.version("jaxlib").startswith("0.10.")
    else {}
)
# jax 0.10's CPU compiler drops the barriers of jax.checkpoint, then merges the rematerialized
# operations with the original ones. Without this pass it cannot. But then XLA's hoisting of small
# loops meets a barrier, and ends the process.
_KEEP_BARRIERS = "cse_barrier_expander,small-while-loop-hoisting"
_KEEP_REMAT = _EIGEN_CONVOLUTIONS | {"xla_disable_hlo_passes": _KEEP_BARRIERS}
# The default scheduler of the CPU compiler trades memory for concurrency.
_SCHEDULE_FOR_MEMORY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

# The CPU compiler computes bfloat16 in float32, and casts whole stacks in front of a loop.
_KEEP_CASTS_IN_LOOPS = (
    _EIGEN_CONVOLUTIONS
    | _SCHEDULE_FOR_MEMORY
    | {
        "xla_disable_hlo_passes": f"{_KEEP_BARRIERS},while-loop-invariant-code-motion,"
        "while-loop-expensive-invariant-code-motion"
    }
)

CANDIDATE_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "cpu": (_KEEP_REMAT, _KEEP_REMAT | _SCHEDULE_FOR_MEMORY),
}
"""Compiler options that `compile_min_memory` tries, by backend. Either may give the lower peak."""

# In YNNPACK, a convolution with a kernel from this size on copies its padded input twice and its
# kernel once. Others copy their padded input. Within 6 % for 21 of 22 measured convolutions.
_LARGE_KERNEL = 3 * 2**17
# The CPU client starts an operation before it frees the workspace of the last two. Of these, up to
# 16 MiB each stay: the C library maps larger arrays separately and returns them at once.
_IN_SUCCESSION = 3
_STAYS = 2**24
# Eigen packs at most about this of the patches of each group of a convolution.
_PACKED_OF_GROUP = 2**21
# Matrix products with less workspace are not counted.
_LEAST_PACKED = 2**20


class _Parts(NamedTuple):
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    workspace: int = 0


class Peak(_Parts):
    """Peak memory of a compiled program, in bytes per device.

    The timeline and the largest buffers are computed on first access, which takes about a second
    for the step of a ResNet-50. Until then the program is kept alive. ``Peak(*peak(compiled))``
    holds the numbers alone.

    Attributes:
      arguments: Bytes of all inputs.
      outputs: Bytes of all outputs, including those in the buffer of an input.
      aliased: Bytes of outputs in the buffer of a donated input.
      temporaries: Bytes of everything in between.
      workspace: Estimated memory that convolutions and matrix products on CPU allocate outside
        of the compiler's assignment. 0 on other devices.
    """

    _program: jax.stages.Compiled | None = None

    @property
    def total(self) -> int:
        """``assigned + workspace``."""
        return self.assigned + self.workspace

    @property
    def assigned(self) -> int:
        """``arguments + outputs - aliased + temporaries``: the compiler's own number."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def as_dict(self) -> dict[str, int]:
        """Return the parts and their total."""
        return self._asdict() | {"total": self.total}

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Bytes alive at each instruction; see `fnet.memory.timeline`.

        Raises:
          ValueError: If this is a copy, which holds numbers alone.
        """
        if self._program is None:
            raise ValueError(
                "peak: a copy holds the numbers without the program that the timeline is read "
                "from; use the object that peak(compiled) returned."
            )
        computed = timeline(self._program)
        del self._program
        return computed

    @property
    def curve(self) -> list[int]:
        """Bytes alive at each instruction, in scheduled order.

        The maximum is the part of ``assigned`` that is in use at once; see
        `fnet.memory.timeline`.
        """
        return self.timeline.live_bytes

    @property
    def largest(self) -> list[Buffer]:
        """The ten largest buffers alive at the peak."""
        return self.timeline.largest

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce copies and pickles to the numbers."""
        return Peak, tuple(self)


def peak(compiled: jax.stages.Compiled) -> Peak:
    """Report the peak memory of a compiled program without running it.

    XLA fixes memory use at compile time: it assigns every array to a buffer.

    Args:
      compiled: The compiled program, ``jax.jit(f).lower(...).compile()``, also of
        ``flax.nnx.jit``.

    Returns:
      Bytes by kind, their total, and the curve of bytes alive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> f = jax.jit(lambda x: jnp.sort(x) @ x)
      >>> p = memory.peak(f.lower(jnp.zeros((64, 64))).compile())
      >>> p.arguments, p.outputs, p.temporaries
      (16384, 16384, 16384)
      >>> p.total == p.arguments + p.outputs - p.aliased + p.temporaries + p.workspace
      True
    """
    compiled = hlo.unwrap(compiled)
    stats: Any = compiled.memory_analysis()
    measured = Peak(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        workspace=_workspace(compiled),
    )
    measured._program = compiled
    return measured


def _workspace(compiled: jax.stages.Compiled) -> int:
    text = compiled.as_text() if platform(compiled) == "cpu" else None
    if not text or not any(f" {opcode}(" in text for opcode in _WORKSPACES):
        return 0
    module = hlo.read(text)
    sizes = list(_workspaces(module, module.entry))
    largest = 0
    for k in range(len(sizes)):
        window = sorted(sizes[k : k + _IN_SUCCESSION])
        largest = max(largest, window.pop() + sum(min(size, _STAYS) for size in window))
    return largest


def _workspaces(module: hlo.Module, computation: str, *, by_ynnpack: bool = False) -> Iterator[int]:
    """Yield workspaces in scheduled order."""
    results = {i.name: i.result for i in module.computations[computation]}
    for instruction in module.computations[computation]:
        for called in instruction.called_computations:
            yield from _workspaces(module, called, by_ynnpack=by_ynnpack)
        if instruction.opcode == "fusion":
            fused = instruction.fused_computation
            by = bool(instruction.attribute('"kind":"(__ynn_fusion)"'))
            yield from _workspaces(module, fused, by_ynnpack=by)
        if instruction.opcode in _WORKSPACES:
            lhs, rhs = (hlo.arrays(results[name])[()] for name in instruction.operands)
            if instruction.opcode == "dot":
                size = _dot_workspace(instruction, lhs, rhs)
            elif by_ynnpack:
                size = _ynnpack_workspace(instruction, lhs, rhs)
            else:
                size = _eigen_workspace(instruction, lhs)
            if size:
                yield size


def _dot_workspace(dot: hlo.Instruction, lhs: hlo.Array, rhs: hlo.Array) -> int:
    """Packed operands, by measurements of 18 products."""
    batch, contracted = (
        [int(d) for d in dot.attribute(rf"lhs_{kind}_dims=\{{([\d,]*)\}}").split(",") if d]
        for kind in ("batch", "contracting")
    )
    result = hlo.arrays(dot.result)[()]
    # A transposed left-hand side is packed, and so is the right-hand side of a batch.
    is_transposed = contracted != [len(lhs.shape) - 1]
    packed = lhs.bytes + result.bytes if is_transposed else rhs.bytes if batch else 0
    return packed if packed >= _LEAST_PACKED else 0


def _ynnpack_workspace(convolution: hlo.Instruction, lhs: hlo.Array, rhs: hlo.Array) -> int:
    labels = convolution.attribute(r"dim_labels=(\w+)_")
    windows = hlo.window(convolution)
    padded = lhs.bytes
    for d, w in enumerate(windows):
        length = lhs.shape[labels.index(str(d))]
        padded_length = max((length - 1) * w.lhs_dilate + 1 + w.low + w.high, 1)
        padded = padded * padded_length // max(length, 1)
    if rhs.bytes < _LARGE_KERNEL or any(w.lhs_dilate > 1 for w in windows):
        return padded
    return 2 * padded + rhs.bytes


def _eigen_workspace(convolution: hlo.Instruction, lhs: hlo.Array) -> int:
    """Matrices that Eigen makes of images, by measurements of 45 convolutions."""
    labels, out_labels = (
        convolution.attribute(pattern) for pattern in (r"dim_labels=(\w+)_", r"->(\w+)")
    )
    result = hlo.arrays(convolution.result)[()]
    channels, features = lhs.shape[labels.index("f")], result.shape[out_labels.index("f")]
    windows = hlo.window(convolution)
    elements = math.prod(w.size for w in windows)
    if any(w.lhs_dilate > 1 for w in windows):
        # The product of each input with all kernel elements and features.
        return lhs.bytes // channels * elements * features
    # Otherwise Eigen packs a few blocks, up to 6 MB. Of groups, it packs all at the same time.
    groups = int(convolution.attribute(r"feature_group_count=(\d+)") or 1)
    patches = result.bytes // features * elements * channels // groups
    return groups * min(patches, _PACKED_OF_GROUP) if groups > 1 else 0


_WORKSPACES = ("convolution", "dot")


def platform(compiled: jax.stages.Compiled) -> str:
    """Return the platform of the devices that a program was compiled for."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((d.platform for s in shardings for d in s.device_set), jax.default_backend())


def compile_min_memory(
    lowered: jax.stages.Lowered,
) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """Compile with each of the backend's `CANDIDATE_OPTIONS` and return the smallest program.

    On CPU, rematerialization needs these options: jax 0.10 undoes it by default. For bfloat16
    arguments there is one more candidate, which keeps casts to float32 inside of loops.

    Args:
      lowered: The lowered program, ``jax.jit(f).lower(...)``.

    Returns:
      The compiled program with the lowest peak, and the options it was compiled with.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> lowered = jax.jit(jnp.sin).lower(jnp.zeros(8))
      >>> compiled, options = memory.compile_min_memory(lowered)
      >>> options in memory.CANDIDATE_OPTIONS["cpu"]
      True
    """
    candidates = CANDIDATE_OPTIONS.get(jax.default_backend(), ({},))
    if jax.default_backend() == "cpu" and any(
        leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(lowered.args_info)
    ):
        candidates = (*candidates, _KEEP_CASTS_IN_LOOPS)
    compiled = [(lowered.compile(compiler_options=dict(o)), o) for o in candidates]
    return min(compiled, key=lambda c: peak(c[0]).total)
