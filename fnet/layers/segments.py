"""Documents that share a row, numbered by the ``segments`` of their positions."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from fnet import checks


def restarts(
    where: str, segments: Int[Array, "b t"] | None, shape: tuple[int, ...]
) -> Bool[Array, "b t"] | None:
    """Find the positions at which a recurrence restarts: [B, T], or None without segments.

    True where the number differs from the one before, and False at position 0: a state given for
    the start of the row belongs to its first document.
    """
    if segments is None:
        return None
    checks.integers(where, segments=segments)
    checks.shapes(where, f"an input {[*shape]}", segments=(segments, shape))
    changes = segments[:, 1:] != segments[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)))[:, : shape[1]]


def positions_in_segments(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Count positions from 0 in each run of equal numbers: [B, T] -> int32 [B, T]."""
    at = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    is_first = restarts("positions_in_segments", segments, segments.shape)
    assert is_first is not None  # because there are segments
    return at - jax.lax.cummax(jnp.where(is_first, at, 0), axis=1)
