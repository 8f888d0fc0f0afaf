"""Peak bytes at compile time, and the compiler options that make the savings real."""

import functools
from typing import Any, NamedTuple

import jax

from fnet.memory import hlo
from fnet.memory.timeline import Buffer, Timeline, timeline

# XLA's CPU compiler drops the barriers behind jax.checkpoint and then merges the
# recomputation with the original; without that pass recomputation is kept.
_KEEP_RECOMPUTATION = {"xla_disable_hlo_passes": "cse_barrier_expander"}
# Its default scheduler trades memory for concurrency.
_SCHEDULE_FOR_MEMORY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

CANDIDATE_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "cpu": (_KEEP_RECOMPUTATION, _KEEP_RECOMPUTATION | _SCHEDULE_FOR_MEMORY),
}
"""Compiler options worth trying, by backend; neither of CPU's is always the smaller."""


# What Eigen allocates for itself to convolve on CPU, in units of the operands of the
# program's largest convolution: 2.4 to 2.6 in steps of a ResNet-50, batch 16 to 64 at
# 64 and 128 pixels. XLA does not count it.
_CONVOLUTION_WORKSPACE = 2.5


class _Parts(NamedTuple):
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    workspace: int = 0


class Peak(_Parts):
    """Memory of a compiled program in bytes.

    The curve and the largest buffers are read from the program when first asked for,
    which takes about a second for a ResNet-50's step. Until then the program is kept;
    ``Peak(*peak(compiled))`` is the numbers alone.

    Attributes:
      arguments: of all inputs.
      outputs: of all outputs, those in an input's buffer included.
      aliased: outputs that live in a donated input's buffer.
      temporaries: everything between.
      workspace: an estimate of what convolutions on CPU allocate for themselves,
        beside all that the compiler has assigned; 0 elsewhere.
    """

    _program: jax.stages.Compiled | None = None

    @property
    def total(self) -> int:
        """``assigned + workspace``."""
        return self.assigned + self.workspace

    @property
    def assigned(self) -> int:
        """``arguments + outputs - aliased + temporaries``: the compiler's own count."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def as_dict(self) -> dict[str, int]:
        """The parts and their total."""
        return self._asdict() | {"total": self.total}

    @functools.cached_property
    def timeline(self) -> Timeline:
        """What is alive at each instruction; see `fnet.memory.timeline.timeline`.

        Raises:
          ValueError: for numbers alone, without their program.
        """
        if self._program is None:
            raise ValueError(
                "peak: a copy is the numbers alone, without the program that the curve is read "
                "from; ask what peak(compiled) returned"
            )
        found = timeline(self._program)
        del self._program
        return found

    @property
    def curve(self) -> list[int]:
        """Bytes alive at each instruction, in the order they are scheduled.

        Its maximum is what of ``assigned`` is in use at once: see
        `fnet.memory.timeline.timeline` for what it leaves out.
        """
        return self.timeline.live_bytes

    @property
    def largest(self) -> list[Buffer]:
        """The ten largest buffers alive where the curve is highest."""
        return self.timeline.largest

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are the numbers alone."""
        return Peak, tuple(self)


def peak(compiled: jax.stages.Compiled) -> Peak:
    """What a compiled program will hold at most, without running it.

    Args:
      compiled: ``jax.jit(f).lower(...).compile()``.

    Returns:
      Bytes by kind, their total, and the curve of what is alive.
    """
    m: Any = compiled.memory_analysis()
    found = Peak(
        arguments=m.argument_size_in_bytes,
        outputs=m.output_size_in_bytes,
        aliased=m.alias_size_in_bytes,
        temporaries=m.temp_size_in_bytes,
        workspace=_convolution_workspace(compiled),
    )
    found._program = compiled
    return found


def _convolution_workspace(compiled: jax.stages.Compiled) -> int:
    text = compiled.as_text() if platform(compiled) == "cpu" else None
    if not text or " convolution(" not in text:
        return 0
    largest = 0
    for body in hlo.read(text).computations.values():
        results = {i.name: i.result for i in body}
        for instruction in body:
            if instruction.opcode == "convolution":
                operands = (hlo.arrays(results[name])[()] for name in instruction.operands)
                largest = max(largest, sum(array.bytes for array in operands))
    return int(_CONVOLUTION_WORKSPACE * largest)


def platform(compiled: jax.stages.Compiled) -> str:
    """Of the devices that a program was compiled for."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((d.platform for s in shardings for d in s.device_set), jax.default_backend())


def compile_min_memory(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """Compiles with each of the default backend's candidate options; the one of lowest peak.

    Args:
      lowered: ``jax.jit(f).lower(...)``.

    Returns:
      The compiled program and the options it was compiled with. Of equal ones,
      the first.
    """
    candidates = CANDIDATE_OPTIONS.get(jax.default_backend(), ({},))
    compiled = [(lowered.compile(compiler_options=dict(o)), o) for o in candidates]
    return min(compiled, key=lambda c: peak(c[0]).total)
