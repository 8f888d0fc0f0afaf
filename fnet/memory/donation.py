"""Proof that a compiled step renews its state in place, leaf by leaf."""

from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from fnet.memory import hlo


class Donation(NamedTuple):
    """What a program was given to keep, all of which it reused.

    Of a program that several devices share, the bytes are those of each.

    Attributes:
      aliased_bytes: bytes of outputs that live in a donated argument's buffer.
      leaves: how many arrays were donated.
    """

    aliased_bytes: int
    leaves: int


class DonationError(ValueError):
    """A donated argument that the program does not reuse: it would exist twice."""


def donation(compiled: jax.stages.Compiled) -> Donation:
    """Checks that every donated argument's buffer is reused by an output.

    JAX says nothing where donation fails, or only warns. Works on any program
    compiled ahead of time from ``jax.jit(f, donate_argnums=...)`` where ``f``
    returns the renewed argument as its (first) output.

    Args:
      compiled: ``jax.jit(f, donate_argnums=0).lower(...).compile()``.

    Returns:
      The bytes that are reused, and of how many arrays.

    Raises:
      DonationError: naming each leaf that is not renewed in place, its shape
        and dtype in and out, and the reason.
    """
    arguments = tree_flatten_with_path(compiled.args_info)[0]
    kept = _kept(compiled, len(arguments))
    header = (compiled.as_text() or "").partition("\n")[0]
    aliased = {kept[number] for number, _ in hlo.donated(header).values()}
    donated = [(path, a) for path, a in arguments if a.donated]
    debugging = [o for o in ("jax_debug_nans", "jax_debug_infs") if getattr(jax.config, o)]
    if debugging:
        raise DonationError(f"state not renewed in place: {debugging[0]} turns donation off")
    if not donated:
        raise DonationError("nothing is donated: jit the step with donate_argnums=0")
    not_reused = [
        (path, a) for i, (path, a) in enumerate(arguments) if a.donated and i not in aliased
    ]
    if not not_reused:
        memory: Any = compiled.memory_analysis()
        return Donation(memory.alias_size_in_bytes, len(donated))

    outputs = _outputs_by_place(compiled.out_info)
    # Buffers are interchangeable: if `a` drifts to another dtype, its buffer may
    # serve `b`, and b's stay unused. The leaf to mend is `a`, so those come first.
    changed = [
        (path, a)
        for path, a in donated
        if (out := outputs.get(_place(path))) is None or _type(out) != _type(a)
    ]
    lines = [_explain(path, a, outputs) for path, a in changed or not_reused]
    raise DonationError("state not renewed in place: " + "; ".join(lines))


def _place(path: Any) -> str:
    """A leaf's path inside its argument or output: without the leading positions."""
    return keystr(path[2:])


def _outputs_by_place(out_info: Any) -> dict[str, Any]:
    first = out_info[0] if type(out_info) is tuple and out_info else out_info
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(first)[0]}


def _type(a: Any) -> tuple[Any, Any]:
    return a.shape, a.dtype


def _explain(path: Any, a: Any, outputs: dict[str, Any]) -> str:
    shape, dtype = _type(a)
    out = outputs.get(_place(path))
    name = _place(path) or "the argument"
    if out is None:
        return f"{name} ({dtype}{list(shape)}) has no output in its place: return it"
    if out.dtype != dtype:
        return (
            f"{name} drifts from {dtype}{list(shape)} to {out.dtype}{list(out.shape)}: "
            f"cast it back with .astype({dtype})"
        )
    if out.shape != shape:
        return f"{name} changes shape from {dtype}{list(shape)} to {dtype}{list(out.shape)}"
    return (
        f"{name} ({dtype}{list(shape)}) is overwritten without being read, which drops it, or "
        "the compiler did not reuse its buffer: jit with keep_unused=True"
    )


def _kept(compiled: jax.stages.Compiled, arguments: int) -> list[int]:
    """Which arguments the compiled program takes, in order: JAX drops those never read."""
    kept = getattr(compiled._executable, "_kept_var_idx", None)
    return sorted(range(arguments) if kept is None else kept)
