"""Memory of checkpoints on CPU, where all that they hold lies beside the training state."""

from typing import Any

import jax
from jax import Array

from train.run.process_memory import give_free_memory_back

IN_FLIGHT = 32 * 2**20
"""Bytes of a state, beside its largest array, that go to disk or come from it at a time."""


def in_background(shapes: Any) -> bool:
    """Whether there is room to go on with the training while such a state is written.

    On CPU a state that is being written cannot be donated: each step makes another one. That of
    a small network is less than `IN_FLIGHT`.
    """
    return jax.default_backend() != "cpu" or sum(_sizes(shapes)) <= IN_FLIGHT


def at_a_time(shapes: Any) -> float | None:
    """Gigabytes of arrays that may be on their way at a time; None: any number."""
    if shapes is None or jax.default_backend() != "cpu":
        return None
    return (IN_FLIGHT + max(_sizes(shapes))) / 1e9  # each array must be below orbax's limit


def owned(leaf: Array) -> Array:
    """A restored array, copied into JAX's own memory, in place of the one that was read.

    On CPU most lie where orbax read them to. These cannot be donated: the first step would hold
    them twice.
    """
    copy = jax.block_until_ready(jax.device_put(leaf, leaf.sharding, may_alias=False))
    leaf.delete()
    give_free_memory_back()  # what is free now is too small for the next one by a few bytes
    return copy


def _sizes(shapes: Any) -> list[int]:
    """Bytes of whole arrays: orbax may read one whole of which a device has a part."""
    return [a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)]
