"""Amounts of memory as people write and read them."""

import math
import re
import sys
from fractions import Fraction
from typing import Any

import jax

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


def parse_bytes(text: str | int) -> int:
    """``"4GB" -> 4_000_000_000``, ``"4GiB"`` and ``"4096MiB" -> 4_294_967_296``; an int is bytes.

    Units are B, and K, M, G or T with B (powers of 1000) or iB (powers of 1024),
    in upper or lower case; a fraction and a space before the unit are allowed.

    Args:
      text: a number with a unit, or an int.

    Returns:
      Bytes, rounded down.

    Raises:
      ValueError: for anything else, and for less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", str(text).lower())
    if isinstance(text, int) and not isinstance(text, bool):
        value = Fraction(text)
    elif found and found[2].upper() in _UNITS:
        value = Fraction(found[1]) * _UNITS[found[2].upper()]
    else:
        raise ValueError(
            f"expected a number with a unit (4GB, 4GiB, 4096MiB; B, KB to TB are powers of 1000, "
            f"KiB to TiB of 1024), got {text!r}"
        )
    if not 1 <= value <= sys.float_info.max:
        raise ValueError(f"expected at least one byte, and not infinitely many, got {text!r}")
    return int(value)


def format_bytes(n: int | None) -> str:
    """``1536 -> "1.50 KiB"``; None is unknown.

    Args:
      n: bytes.
    """
    if n is None:
        return "unknown"
    if abs(n) < 1024:
        return f"{n:.0f} bytes"
    value = n / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if round(abs(value), 2) < 1024:
            return f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def leaf_bytes(leaf: Any) -> int:
    """Bytes of an array, a typed key, or the shape of either, on each device that shares it."""
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
    size: int = math.prod(shape) * leaf.dtype.itemsize
    return size


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves of a tree of arrays or of their shapes.

    Args:
      tree: any pytree of arrays, typed keys, or their shapes; of a sharded array, the bytes on
        each device.
    """
    return sum(map(leaf_bytes, jax.tree.leaves(tree)))
