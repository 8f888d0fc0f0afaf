"""A sum over an axis that is too long to be looked at whole: chunk by chunk."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import Array

Carry = TypeVar("Carry")
Start = Array | int


def over_chunks(
    body: Callable[[Start, int, Carry], Carry], carry: Carry, length: int, chunk: int
) -> Carry:
    """``carry = body(start, size, carry)`` chunk by chunk; the last has what is left."""
    whole, rest = divmod(length, chunk)
    carry = jax.lax.fori_loop(0, whole, lambda i, c: body(i * chunk, chunk, c), carry)
    return body(whole * chunk, rest, carry) if rest else carry
