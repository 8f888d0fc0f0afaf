"""Peak memory of a compiled program, and compiler options that lower it."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet import hlo
from fnet.cpu import options
from fnet.cpu.workspaces import workspace
from fnet.memory.timeline import Buffer, Timeline, timeline

CANDIDATE_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "cpu": (options.KEEP_REMAT, options.MIN_MEMORY)
}
"""Compiler options that `compile_min_memory` tries, by backend. Either may give the lower peak."""


class _Parts(NamedTuple):
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    workspace: int = 0
    constants: int = 0


# XLA does not print the elements of larger constants.
_CONSTANT = re.compile(r"= (\S+) constant\(\{\.\.\.\}\)")


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
      constants: Bytes of arrays that the program contains, such as those that a loss closes over.
    """

    _program: jax.stages.Compiled | None = None

    @property
    def total(self) -> int:
        """``assigned + workspace + constants``."""
        return self.assigned + self.workspace + self.constants

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
        """Bytes alive at each instruction, in scheduled order; see `fnet.memory.timeline`."""
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
      >>> p.total == p.assigned + p.workspace + p.constants
      True
    """
    compiled = hlo.unwrap(compiled)
    return read_peak(compiled, compiled.as_text() or "", compiled.memory_analysis())


def read_peak(compiled: jax.stages.Compiled, text: str, stats: Any) -> Peak:
    """Report the peak memory of a program by its text and the compiler's analysis."""
    measured = Peak(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        workspace=workspace(text) if platform(compiled) == "cpu" else 0,
        constants=sum(a.bytes for r in _CONSTANT.findall(text) for a in hlo.arrays(r).values()),
    )
    measured._program = compiled
    return measured


def platform(compiled: jax.stages.Compiled) -> str:
    """Return the platform of the devices that a program was compiled for."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((d.platform for s in shardings for d in s.device_set), jax.default_backend())


def compile_min_memory(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, dict[str, Any]]:
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
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(lowered.args_info)]
    if jax.default_backend() == "cpu" and jnp.bfloat16 in dtypes:
        candidates = (*candidates, options.KEEP_CASTS_IN_LOOPS)
    compiled = [(lowered.compile(compiler_options=dict(o)), o) for o in candidates]
    return min(compiled, key=lambda c: peak(c[0]).total)
