"""Split the arguments of a loss into examples, and check losses and parameters."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.mesh import varying_axes

PerExampleLoss = Callable[..., Any]
"""``loss(params, *batch) -> losses [batch]``, or ``(losses, aux)``.

Every array in ``batch`` has a leading axis of examples. All examples share scalars, and arrays
that the loss closes over, so an array with one row per example must be an argument.
A single `jax.random.key` becomes one key per example.
"""


class Examples(NamedTuple):
    """The arguments of a loss, split into examples.

    Attributes:
      size: number of examples.
      leaves: arrays [size, ...].
      rebuild: maps one example's leaves, without the leading axis, to the arguments of
        the loss for a batch of one.
      rebuild_batch: maps all leaves to the arguments of the loss.
      is_single_key: whether each array holds keys that were made from a single one.
    """

    size: int
    leaves: list[Array]
    rebuild: Callable[[Sequence[Array]], tuple[Any, ...]]
    rebuild_batch: Callable[[Sequence[Array]], tuple[Any, ...]]
    is_single_key: list[bool]

    def of_size(self, size: int) -> list[Any]:
        """Shapes of the leaves of a batch of ``size`` examples.

        Inside of a `jax.shard_map` they are arrays, because a shape has no mesh axes that it varies
        over.
        """
        if any(map(varying_axes, self.leaves)):
            return [a[jnp.zeros(size, int)] for a in self.leaves]
        return [jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype) for a in self.leaves]

    def map(self, f: Callable[[Sequence[Array]], Any], width: int) -> Any:
        """Call ``f`` with each example's leaves, ``width`` at a time; stack the results."""
        if self.size <= width:
            return jax.vmap(f)(self.leaves)
        return jax.lax.map(f, self.leaves, batch_size=width)


def examples(name: str, batch: tuple[Any, ...]) -> Examples:
    """Split the arguments of a loss into examples.

    Args:
      name: name of the caller, for error messages.
      batch: the arguments of the loss after the parameters.

    Raises:
      ValueError: if the arrays differ in their leading axis, or there are none.
    """
    leaves, structure = jax.tree.flatten(batch)
    leaves = [a if isinstance(a, jax.Array) else jnp.asarray(a) for a in leaves]
    rows = {i: a for i, a in enumerate(leaves) if a.ndim}
    sizes = {a.shape[0] for a in rows.values()}
    if len(sizes) != 1:
        paths = jax.tree_util.tree_flatten_with_path(batch)[0]
        shapes = [
            f"{jax.tree_util.keystr(path[1:]) or f'argument {path[0].idx + 1}'}: {a.shape}"
            for (path, _), a in zip(paths, leaves, strict=True)
        ]
        raw = any(a.shape == (2,) and a.dtype == jnp.uint32 for a in leaves)
        hint = "; use jax.random.key(seed) instead of a raw uint32 key" if raw else ""
        raise ValueError(
            f"{name}: expected arrays that share a leading axis of examples, got "
            f"{', '.join(shapes) or 'none'}{hint}"
        )
    (size,) = sizes
    keys = {i: a for i, a in enumerate(leaves) if is_key(a) and not a.ndim}
    rows |= {
        i: jax.vmap(jax.random.fold_in, (None, 0))(a, jnp.arange(size)) for i, a in keys.items()
    }
    order = sorted(rows)

    def rebuild(example: Sequence[Array]) -> tuple[Any, ...]:
        one = [a if i in keys else a[None] for i, a in zip(order, example, strict=True)]
        return arguments(one)

    def rebuild_batch(rows: Sequence[Array]) -> tuple[Any, ...]:
        # The loss of a whole batch gets the first example's key, of an empty batch the original.
        whole = [
            a if i not in keys else a[0] if len(a) else keys[i]
            for i, a in zip(order, rows, strict=True)
        ]
        return arguments(whole)

    def arguments(given: Sequence[Array]) -> tuple[Any, ...]:
        whole = list(leaves)
        for i, a in zip(order, given, strict=True):
            whole[i] = a
        batch: tuple[Any, ...] = jax.tree.unflatten(structure, whole)
        return batch

    single_keys = [i in keys for i in order]
    return Examples(size, [rows[i] for i in order], rebuild, rebuild_batch, single_keys)


def is_key(a: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array holds typed keys, as from `jax.random.key`."""
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def check_losses(name: str, losses: Any, size: int) -> None:
    """Raise ValueError unless there is one loss per example, TypeError unless it is floating."""
    got = getattr(losses, "shape", type(losses).__name__)
    if got != (size,):
        hints = {
            (): "; return the losses, not their mean",
            "tuple": "; return the losses alone, or set has_aux=True",
        }
        raise ValueError(
            f"{name}: expected one loss per example, shape [{size}], got {got}{hints.get(got, '')}"
        )
    check_floating(name, losses)


def check_floating(name: str, losses: Any) -> None:
    """Raise TypeError for losses that are integer or complex."""
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise TypeError(f"{name}: expected losses that are real and floating, got {losses.dtype}")


def check_params(name: str, params: Any, kind: Any = jnp.floating) -> None:
    """Raise TypeError for parameters without a gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype
        if not jnp.issubdtype(dtype, kind):
            raise TypeError(
                f"{name}: expected floating-point parameters, got {dtype} at "
                f"{jax.tree_util.keystr(path) or 'params'}; move it out of params, as "
                "nnx.split(model, nnx.Param, ...) or eqx.partition(model, eqx.is_inexact_array) do"
            )


def check_width(name: str, width: int | None) -> None:
    """Raise unless ``width`` is None or a number of examples that is at least 1."""
    if width is None:
        return
    if isinstance(width, bool) or not isinstance(width, int):
        raise TypeError(f"{name}: width must be an int or None, got {width!r}")
    if width < 1:
        raise ValueError(
            f"{name}: width must be at least 1, got {width}; "
            "it is the number of examples processed at a time"
        )
