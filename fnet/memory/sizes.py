"""Sizes in bytes: of arrays, and as people read and write them."""

import math
import numbers
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(size: str | float, name: str = "", of: Callable[[], int] | None = None) -> int:
    """Parse an amount of memory such as ``"4GiB"``.

    Units are B, and K, M, G or T followed by B (powers of 1000) or iB (powers of 1024), in upper
    or lower case. Fractions and a space before the unit are allowed.

    Args:
      size: A number with a unit, or a number of bytes, such as ``0.5 * peak.total``.
      name: What an error starts with, such as the argument's name.
      of: Returns the bytes that a percentage such as ``"50%"`` is of. By default there is none.

    Returns:
      The number of bytes, rounded down.

    Raises:
      ValueError: If ``size`` has another form, is less than one byte, or above 16 EiB.

    Example:
      >>> from fnet import memory
      >>> (
      ...     memory.parse_bytes("4GB"),
      ...     memory.parse_bytes("4GiB"),
      ...     memory.parse_bytes("1.5 kib"),
      ...     memory.parse_bytes(0.5 * 1537),
      ... )
      (4000000000, 4294967296, 1536, 768)
    """
    match = isinstance(size, str) and re.fullmatch(
        r"\s*(-?\d+(?:\.\d*)?|-?\.\d+)\s*([a-z]+|%)\s*", size.lower()
    )
    start = f"{name}: " if name else ""
    value: Any
    if isinstance(size, numbers.Real) and not isinstance(size, bool):  # NumPy's numbers, too
        # An int is compared without rounding.
        value = int(size) if isinstance(size, numbers.Integral) else float(size)
    elif match and match[2].upper() in _UNITS:
        value = Fraction(match[1]) * _UNITS[match[2].upper()]
    elif match and match[2] == "%" and of:
        value = Fraction(match[1]) * of() / 100
    else:
        simple = isinstance(size, str | bool) or size is None
        raise ValueError(
            f"{start}expected a number with a unit (4GB, 4GiB, 4096MiB; B, KB to TB are powers of "
            f"1000, KiB to TiB of 1024), got {repr(size) if simple else type(size).__name__}"
        )
    if not 1 <= value <= 2**64:
        shown = f"{size!r:.40}"
        raise ValueError(f"{start}expected at least one byte and at most 16 EiB, got {shown}")
    return int(value)


def format_bytes(size: int | None) -> str:
    """Format a number of bytes with a binary unit.

    Args:
      size: Number of bytes, or None for an unknown one.

    Returns:
      Two decimals and a unit up to TiB, or ``"unknown"``.

    Example:
      >>> from fnet import memory
      >>> (
      ...     memory.format_bytes(1536),
      ...     memory.format_bytes(12),
      ...     memory.format_bytes(None),
      ... )
      ('1.50 KiB', '12 bytes', 'unknown')
    """
    if size is None:
        return "unknown"
    if abs(size) < 1024:
        return f"{size:.0f} bytes"
    value = size / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if round(abs(value), 2) < 1024:
            return f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def leaf_bytes(leaf: Any) -> int:
    """Return the bytes of an array, a typed key, or the shape of either, on one device."""
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
    size: int = math.prod(shape) * leaf.dtype.itemsize
    return size


def tree_bytes(tree: Any) -> int:
    """Sum the bytes of all arrays in a pytree. Sharded arrays count as their part on one device.

    Args:
      tree: A pytree of arrays, typed keys, or their shapes (``jax.eval_shape``).

    Returns:
      Bytes on each device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> shapes = jax.eval_shape(
      ...     lambda: {"w": jnp.ones((4, 8)), "step": jnp.int32(0)}
      ... )
      >>> memory.tree_bytes(shapes)
      132
    """
    import jax

    return sum(map(leaf_bytes, jax.tree.leaves(tree)))


class LayerResiduals(NamedTuple):
    """Residuals of one layer that take memory of their own.

    Attributes:
      layer: Name of the layer, or the source line of code outside of named scopes.
      bytes: Their total size.
      arrays: Their number.
    """

    layer: str
    bytes: int
    arrays: int
