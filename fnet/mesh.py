"""The mesh in scope, and values that vary over its axes inside `jax.shard_map`."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Tree = TypeVar("Tree")


def equally_varying(arrays: Tree, results: Sequence[Any] = ()) -> Tree:
    """Mark arrays of a tree as varying over all mesh axes that they or results (avals) vary over.

    With ``check_vma=True``, `jax.shard_map` requires that a custom derivative returns
    cotangents that vary over the same axes as the arguments. After marking all arguments
    vary equally, and the transpose of the marking sums the cotangents of arrays that devices
    share. With ``check_vma=False`` and outside of `jax.shard_map` this does nothing.
    """
    axes = frozenset().union(*map(varying_axes, [*jax.tree.leaves(arrays), *results]))

    def mark(a: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(a)))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    marked: Tree = jax.tree.map(mark, arrays)
    return marked


def batch_devices() -> int:
    """Return the number of devices that may share an array here; 1 without a mesh in scope.

    Inside `jax.shard_map`, each device has an array of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes)


def argument_like(shape: Sequence[int], cotangent: Array) -> Any:
    """Return an argument of `jax.linear_transpose` that varies as its cotangent does."""
    zeros = jax.ShapeDtypeStruct(tuple(shape), cotangent.dtype)
    if not varying_axes(cotangent):
        return zeros
    return equally_varying((jnp.zeros(zeros.shape, zeros.dtype), cotangent))[0]


def varying_axes(a: Array) -> frozenset[str]:
    """Return the mesh axes that an array, or an aval, varies over inside `jax.shard_map`."""
    kind: Any = a if isinstance(a, jax.core.ShapedArray) else jax.typeof(a)
    # Older and newer versions of JAX than 0.10 have it as `vma`.
    axes: frozenset[str] = (
        kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    )
    return axes
