"""Loops over an axis in chunks, where the whole is too large to materialize at once."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import Array

Carry = TypeVar("Carry")
Start = Array | int


def even(length: int, most: int) -> tuple[int, int]:
    """Return the number and the size of chunks of nearly equal length, at most ``most`` long."""
    count = -(-length // most)
    return count, -(-length // count)


def fori_chunks(
    body: Callable[[Start, int, Carry], Carry], carry: Carry, length: int, chunk: int
) -> Carry:
    """Run ``carry = body(start, size, carry)`` for each chunk; the last one may be smaller."""
    whole, rest = divmod(length, chunk)
    carry = jax.lax.fori_loop(0, whole, lambda i, c: body(i * chunk, chunk, c), carry)
    return body(whole * chunk, rest, carry) if rest else carry
