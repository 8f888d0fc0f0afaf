"""Which values differ between the devices of a mesh, inside `jax.shard_map`."""

from typing import TypeVar

import jax
from jax import Array

Tree = TypeVar("Tree")


def equally_varying(arrays: Tree) -> Tree:
    """The arrays of a tree, all marked as varying over the devices that any of them varies over.

    Where `jax.shard_map` tracks what varies (``check_vma=True``), a custom
    derivative must give every argument a cotangent that varies as it does. Marked
    first, all vary alike, and the transpose of the marking sums the cotangent of
    what is shared over the devices that share it. With ``check_vma=False`` and
    outside of `jax.shard_map` nothing is marked.
    """
    every = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))

    def mark(a: Array) -> Array:
        missing = tuple(sorted(every - _varying(a)))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    marked: Tree = jax.tree.map(mark, arrays)
    return marked


def _varying(a: Array) -> frozenset[str]:
    kind = jax.typeof(a)
    # What jax 0.10 calls manual_axis_type.varying is vma in its neighbours.
    axes: frozenset[str] = (
        kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    )
    return axes
