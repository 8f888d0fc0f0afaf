"""Documents that share a row, numbered by the ``segments`` of their positions."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int


def restarts(
    where: str, segments: Int[Array, "b t"] | None, shape: tuple[int, ...]
) -> Bool[Array, "b t"] | None:
    """Find the positions at which a recurrence restarts.

    Args:
      where: name of the calling function, for errors.
      segments: number of the document of each position, or None.
      shape: expected shape ``(B, T)``.

    Returns:
      [B, T], True where the number differs from the one before, and False at position 0: a state
      given for the start of the row belongs to its first document. None without segments.

    Raises:
      TypeError: if the segments are not integers.
      ValueError: if they have another shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from fnet.layers.segments import restarts
      >>> restarts("example", jnp.array([[1, 1, 2, 2, 0]]), (1, 5)).tolist()
      [[False, False, True, False, True]]
    """
    if segments is None:
        return None
    if not jnp.issubdtype(segments.dtype, jnp.integer):
        raise TypeError(f"{where}: segments must be integers, got {segments.dtype}")
    if segments.shape != shape:
        raise ValueError(
            f"{where}: segments must have shape {shape}, [B, T] of the input, got {segments.shape}"
        )
    changes = segments[:, 1:] != segments[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)))[:, : shape[1]]
