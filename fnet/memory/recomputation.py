"""Proof that recomputation happened: arithmetic and bytes of programs, before and after."""

import math
import re
from typing import Any, NamedTuple

import jax

from fnet.memory.peak import CANDIDATE_OPTIONS, peak, platform

# What a compiler moves about by itself; a policy that works saves far more.
_LEAST_SAVING = 0.01


class Recomputation(NamedTuple):
    """What a policy changed in a program, as its compiler counts it.

    Attributes:
      flops_before, flops_after: see `flops`.
      bytes_before, bytes_after: read and written by the program's operations; None
        where the compiler does not count them (GPUs).
      temporaries_before, temporaries_after: bytes held beside arguments and outputs.
    """

    flops_before: int
    flops_after: int
    bytes_before: int | None
    bytes_after: int | None
    temporaries_before: int
    temporaries_after: int

    @property
    def arithmetic(self) -> float:
        """``flops_after / flops_before``: 1.33 where a whole forward pass is repeated."""
        return self.flops_after / max(self.flops_before, 1)

    @property
    def memory(self) -> float:
        """``temporaries_after / temporaries_before``."""
        return self.temporaries_after / max(self.temporaries_before, 1)


class RecomputationError(ValueError):
    """A policy that was asked for and saves nothing in the compiled program."""


def recomputation(plain: jax.stages.Compiled, recomputed: jax.stages.Compiled) -> Recomputation:
    """Checks that a recomputation policy reached the compiled program.

    It may not: a compiler that finds the same operation twice merges the two, and keeps
    the result between them as if nobody had asked to recompute it. JAX puts a
    barrier between them, which the CPU compiler of jax 0.10 drops by default.

    Args:
      plain: the program without the policy: ``jax.jit(f).lower(...).compile(...)``.
      recomputed: the same with it (`jax.checkpoint`, `fnet.recompute`). Compile both
        with the same options, which save memory of their own.

    Returns:
      Arithmetic and bytes of both.

    Raises:
      RecomputationError: if the second holds not even 1% less beside its arguments
        and outputs. The message gives both figures, and the reason: merged again
        (the arithmetic is the same), or recomputed and all held again.
    """
    found = Recomputation(
        flops_before=flops(plain),
        flops_after=flops(recomputed),
        bytes_before=_moved(plain),
        bytes_after=_moved(recomputed),
        temporaries_before=peak(plain).temporaries,
        temporaries_after=peak(recomputed).temporaries,
    )
    if found.temporaries_after >= (1 - _LEAST_SAVING) * found.temporaries_before:
        raise RecomputationError(_explain(found, platform(recomputed)))
    return found


def flops(compiled: jax.stages.Compiled) -> int:
    """Floating-point operations of a compiled program, of each loop those of one iteration.

    They are the compiler's own count. GPU compilers give none: there it is that of
    convolutions and matrix products, two operations a product, read from the
    program's text, padding included. Compare programs of one backend only.

    Args:
      compiled: ``jax.jit(f).lower(...).compile()``.
    """
    counted = _counted(compiled, "flops")
    return _products(compiled.as_text() or "") if counted is None else counted


def _moved(compiled: jax.stages.Compiled) -> int | None:
    return _counted(compiled, "bytes accessed")


def _counted(compiled: jax.stages.Compiled, what: str) -> int | None:
    """One of the compiler's own figures; XLA's GPU compiler gives none."""
    figures: dict[str, Any] = compiled.cost_analysis() or {}
    return int(figures[what]) if what in figures else None


def _explain(found: Recomputation, backend: str) -> str:
    message = (
        f"the policy saves nothing: temporaries {found.temporaries_before:,} bytes "
        f"before, {found.temporaries_after:,} after, arithmetic times {found.arithmetic:.3f}; "
    )
    if backend == "cpu":
        message += (
            "the CPU compiler of jax 0.10 drops the barriers behind jax.checkpoint (in its pass "
            "cse_barrier_expander) and merges what is computed twice: compile with "
            f"compiler_options={CANDIDATE_OPTIONS['cpu'][0]}, as fnet.compile_step does; "
            "if that was done: "
        )
    if found.arithmetic > 1 + _LEAST_SAVING:
        return message + "what is recomputed together is held together: wrap parts, a block each"
    return message + (
        "nothing was kept before that the policy drops, or prevent_cse=False let the "
        "recomputation be merged"
    )


# %name = f32[4,16]{1,0} dot(%a, %b), attributes; of a tuple, the first part's shape.
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%([\w.-]+) = \(?\w+\[([\d,]*)\][^=]*? ([\w-]+)\(([^()]*)\)(.*)$", re.MULTILINE
)
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->\w+")
_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s\"?[=:][\[{]([\d,\"]*)[\]}]")


def _products(text: str) -> int:
    """Operations of the convolutions and matrix products in a program's text.

    A convolution with kernel k takes 2 |out| |k| / (its output channels), its two
    transposes as much; a product takes 2 |out| (length of what is contracted).
    """
    shapes: dict[str, tuple[int, ...]] = {}
    total = 0
    for name, dims, operation, given, attributes in _INSTRUCTION.findall(text):
        out = shapes[name] = tuple(int(d) for d in dims.split(",") if d)
        if operation not in ("dot", "convolution", "custom-call"):
            continue
        operands = [shapes.get(o, ()) for o in re.findall(r"%([\w.-]+)", given)]
        if labels := _LABELS.search(attributes):
            image, kernel = out, operands[1]
            if "convBackwardInput" in attributes:
                image = operands[0]
            elif "convBackwardFilter" in attributes:
                image, kernel = operands[1], out
            total += 2 * math.prod(image) * math.prod(kernel) // kernel[labels[1].index("o")]
        elif contracted := _CONTRACTED.search(attributes):
            axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
            total += 2 * math.prod(out) * math.prod(operands[0][axis] for axis in axes)
    return total
