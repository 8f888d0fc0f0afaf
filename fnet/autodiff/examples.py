"""A batch as examples: the arguments of a loss, one example at a time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

PerExampleLoss = Callable[..., Any]
"""``loss(params, *batch) -> losses [batch]``, or ``(losses, aux)``.

Every array in ``batch`` has a leading axis of examples; scalars are shared by all. Arrays
that the loss closes over are shared too: what has a row for each example is an argument.
A `jax.random.key` without axes becomes one key an example.
"""


class Examples(NamedTuple):
    """Arguments of a loss, with a leading axis of examples.

    Attributes:
      size: how many there are.
      leaves: [size, ...] each.
      rebuild: from one example's leaves, without that axis, to the arguments of a
        batch of one.
      rebuild_batch: from all leaves to the arguments of a batch.
    """

    size: int
    leaves: list[Array]
    rebuild: Callable[[Sequence[Array]], tuple[Any, ...]]
    rebuild_batch: Callable[[Sequence[Array]], tuple[Any, ...]]

    def map(self, f: Callable[[Sequence[Array]], Any], width: int) -> Any:
        """``f`` of each example's leaves, ``width`` of them at a time, results stacked."""
        if self.size <= width:
            return jax.vmap(f)(self.leaves)
        return jax.lax.map(f, self.leaves, batch_size=width)


def examples(name: str, batch: tuple[Any, ...]) -> Examples:
    """Takes the arguments of a loss apart.

    Args:
      name: of the caller, for errors.
      batch: the arguments after the parameters.

    Raises:
      ValueError: if arrays differ in their leading axis, or there are none.
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
        hint = "; a raw key is an array like others: give jax.random.key(seed)" if raw else ""
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
        # All examples of a batch have the first one's key; of none, any will do.
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

    return Examples(size, [rows[i] for i in order], rebuild, rebuild_batch)


def is_key(a: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array is of typed keys, such as `jax.random.key` makes."""
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def by_example(a: Array, axis: int, size: int, before: int = 0) -> Array:
    """Each example's part of that axis stays where it is; the examples go before another.

    Args:
      a: an array.
      axis: that counts examples, with what was merged behind them.
      size: how many there are.
      before: which axis they become.
    """
    a = a.reshape(*a.shape[:axis], size, a.shape[axis] // size, *a.shape[axis + 1 :])
    return jnp.moveaxis(a, axis, before)


def check_losses(name: str, losses: Any, size: int) -> None:
    """Refuses what is not one real loss per example."""
    got = getattr(losses, "shape", type(losses).__name__)
    if got != (size,):
        hints = {
            (): "; return the losses themselves, not their mean",
            "tuple": "; without has_aux=True return the losses alone",
        }
        raise ValueError(
            f"{name}: expected one loss per example, shape [{size}], got {got}{hints.get(got, '')}"
        )
    check_floating(name, losses)


def check_floating(name: str, losses: Any) -> None:
    """Refuses losses that have no gradient, or none that is meant."""
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise TypeError(f"{name}: expected losses that are real and floating, got {losses.dtype}")


def check_params(name: str, params: Any, kind: Any = jnp.floating) -> None:
    """Refuses parameters that have no gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype
        if not jnp.issubdtype(dtype, kind):
            raise TypeError(
                f"{name}: expected floating-point parameters, got {dtype} at "
                f"{jax.tree_util.keystr(path) or 'params'}; keep it outside of params"
            )


def check_width(name: str, width: int | None) -> None:
    """Refuses a number of examples at a time that is none."""
    if width is None:
        return
    if isinstance(width, bool) or not isinstance(width, int):
        raise TypeError(f"{name}: width must be an int or None, got {width!r}")
    if width < 1:
        raise ValueError(
            f"{name}: width must be at least 1, got {width}; "
            "it is how many examples are taken at a time"
        )
