"""Proof that a compiled step updates its state in place, leaf by leaf."""

from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from fnet import hlo


class Donation(NamedTuple):
    """Donated buffers of a program, all of which its outputs reuse.

    Attributes:
      aliased_bytes: Bytes of outputs that live in the buffer of a donated argument, per device.
      leaves: Number of donated arrays.
    """

    aliased_bytes: int
    leaves: int


class DonationError(ValueError):
    """A donated buffer is not reused, so that the array exists twice.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> try:
      ...     memory.donation(jax.jit(jnp.sin).lower(jnp.zeros(4)).compile())
      ... except memory.DonationError as error:
      ...     print(error)
      nothing is donated: jit the step with donate_argnums, the positions of its state.
    """


def donation(compiled: jax.stages.Compiled) -> Donation:
    """Check that an output reuses the buffer of every donated argument.

    JAX ignores a donation that fails, or only warns. `donation` works on any program compiled
    ahead of time from ``jax.jit(f, donate_argnums=...)`` if ``f`` returns the updated argument as
    its only or first output.

    Args:
      compiled: The compiled program, ``jax.jit(f, donate_argnums=0).lower(...).compile()``, also
        of ``flax.nnx.jit``.

    Returns:
      The bytes that are reused, and the number of donated arrays.

    Raises:
      DonationError: If a donated leaf is not updated in place. The message names the leaf, its
        shape and dtype before and after, and the reason.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> state = {"w": jnp.zeros(4)}
      >>> def compiled(step):
      ...     return jax.jit(step, donate_argnums=0).lower(state).compile()
      >>> memory.donation(compiled(lambda state: {"w": state["w"] + 1}))
      Donation(aliased_bytes=16, leaves=1)
      >>> try:
      ...     memory.donation(
      ...         compiled(lambda state: {"w": state["w"].astype(jnp.bfloat16)})
      ...     )
      ... except memory.DonationError as error:
      ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
      state not updated in place: ['w'] drifts from float32[4] to bfloat16[4]: cast it back
      with .astype(float32).
    """
    compiled = hlo.unwrap(compiled)
    return read_donation(compiled, compiled.as_text() or "", compiled.memory_analysis())


def read_donation(compiled: jax.stages.Compiled, text: str, stats: Any) -> Donation:
    """Check the donation of a program by its text and the compiler's analysis."""
    arguments = tree_flatten_with_path(compiled.args_info)[0]
    donated = [(path, a) for path, a in arguments if a.donated]
    for option in ("jax_debug_nans", "jax_debug_infs"):
        if getattr(jax.config, option):
            raise DonationError(f"state not updated in place: {option} turns donation off.")
    if not donated:
        raise DonationError(
            "nothing is donated: jit the step with donate_argnums, the positions of its state."
        )
    aliased = _aliased_arguments(compiled, text)
    copied = [(path, a) for i, (path, a) in enumerate(arguments) if a.donated and i not in aliased]
    if not copied:
        return Donation(stats.alias_size_in_bytes, len(donated))

    info: Any = compiled.out_info
    first = info[0] if type(info) is tuple and info else info
    outputs = {keystr(path): leaf for path, leaf in tree_flatten_with_path(first)[0]}
    # XLA may give the buffer of a leaf that changes its dtype to another leaf. The error names
    # the leaf that changes.
    changed = [
        (path, a)
        for path, a in donated
        if (out := outputs.get(_name(path))) is None or (out.shape, out.dtype) != (a.shape, a.dtype)
    ]
    reasons = [_explain(path, a, outputs) for path, a in changed or copied]
    raise DonationError("state not updated in place: " + "; ".join(reasons) + ".")


def _aliased_arguments(compiled: jax.stages.Compiled, text: str) -> set[int]:
    # jit drops arguments that are never read; their sharding is None.
    tree: Any = compiled.in_tree
    shardings = tree.flatten_up_to(compiled.input_shardings)
    positions = [i for i, sharding in enumerate(shardings) if sharding is not None]
    header = text.partition("\n")[0]
    tokens = header.partition("->")[0].count("token[]")  # of ordered effects, before the arguments
    return {positions[number - tokens] for number, _ in hlo.donated(header).values()}


def _name(path: Any) -> str:
    """Path of a leaf inside its argument, which is also its path in the first output."""
    return keystr(path[2:])


def _explain(path: Any, a: Any, outputs: dict[str, Any]) -> str:
    shape, dtype = a.shape, a.dtype
    name = _name(path) or "the argument"
    out = outputs.get(_name(path))
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
        f"{name} ({dtype}{list(shape)}) is overwritten without being read, so that jit drops it "
        "(jit with keep_unused=True), or XLA did not reuse its buffer"
    )
