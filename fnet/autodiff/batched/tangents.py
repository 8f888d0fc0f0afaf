"""N tangents, cotangents or accumulators of one pytree, in the layout that the caller chose."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Layout = Literal["stacked", "packed", "separate"]
"""How N tangents are laid out; see `fnet.jvps`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchedTangents:
    """N tangents (or cotangents, or accumulators) of the differentiable leaves of a pytree.

    Attributes:
      arrays: one array per leaf in the layout; if "separate", one list of leaves per tangent.
      shapes: shape of each leaf of one tangent.
      layout: None if the stacked and the packed layout are the same, as for scalars.
      n: number of tangents; None if the arrays do not determine it, because they
        have no elements or there are no differentiable leaves.
    """

    arrays: list[Any]
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    layout: Layout | None = dataclasses.field(metadata={"static": True})
    n: int | None = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, like: Any, layout: Layout | None, n: int) -> "BatchedTangents":
        """Describe N tangents of a pytree that are still to be computed."""
        leaves = [leaf for leaf in jax.tree.leaves(like) if is_differentiable(leaf)]
        return cls([], tuple(jnp.shape(leaf) for leaf in leaves), layout, n)

    def with_n(self, n: int) -> "BatchedTangents":
        """Return the same tangents, with their number set."""
        return dataclasses.replace(self, n=n)

    def stacked(self) -> list[Array]:
        """Return each leaf, [n, *shape]."""
        if self.layout == "separate":
            return [jnp.stack(leaves) for leaves in zip(*self.arrays, strict=True)]
        pairs = zip(self.arrays, self.shapes, strict=True)
        return [a.reshape(self.n or 0, *shape) for a, shape in pairs]

    def separate(self) -> list[list[Array]]:
        """Return each tangent, a list of its leaves."""
        if self.layout == "separate":
            return self.arrays
        return _unstack(self.stacked(), self.n or 0)

    def replace(self, stacked: Sequence[Array]) -> "BatchedTangents":
        """Return other tangents in the same layout, given each leaf [n, *shape]."""
        arrays: list[Any] = list(stacked)
        if self.layout == "separate":
            arrays = _unstack(arrays, self.n or 0)
        elif self.layout == "packed":
            arrays = [jax.lax.collapse(a, 0, 2) if a.ndim > 1 else a for a in arrays]
        return dataclasses.replace(self, arrays=arrays)

    def as_tree(self, like: Any) -> Any:
        """Return the tangents as the caller sees them; leaves without a derivative are float0."""
        if self.layout == "separate":
            return tuple(fill(like, leaves) for leaves in self.arrays)
        return fill(like, self.arrays, (self.n or 0,))


def _unstack(stacked: Sequence[Array], n: int) -> list[list[Array]]:
    return [[a[i] for a in stacked] for i in range(n)]


def fill(like: Any, leaves: Sequence[Array], batch_shape: tuple[int, ...] = ()) -> Any:
    """Replace the differentiable leaves of a pytree, and the other leaves by float0 zeros."""
    remaining = iter(leaves)
    return jax.tree.map(
        lambda leaf: (
            next(remaining)
            if is_differentiable(leaf)
            else np.zeros((*batch_shape, *jnp.shape(leaf)), jax.dtypes.float0)
        ),
        like,
    )


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf has a derivative, so is floating or complex."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.inexact)


def read_tangents(where: str, like: Any, given: Any) -> BatchedTangents:
    """Check N tangents of a pytree and find their layout from their shapes.

    Args:
      where: name of the tangents in error messages.
      like: the pytree, of arrays or `jax.ShapeDtypeStruct`.
      given: each leaf [N, *shape] (stacked), or each leaf [N * len, *rest] for a
        leaf [len, *rest] (packed), or a list or tuple of N trees (separate).
        Entries for leaves without a derivative are ignored.

    Raises:
      ValueError: for another structure or shape, or if the leaves differ in N, or N is 0.
      TypeError: for another dtype.
    """
    trees = _separate_trees(like, given)
    if trees is not None:
        return _read_separate(where, like, trees)
    leaves = _differentiable_leaves(where, like, given)
    is_packed = any(a.ndim == leaf.ndim > 0 for _, leaf, a in leaves)
    counts = {}
    for path, leaf, a in leaves:
        _check_dtype(f"{where}{path}", leaf, a)
        counts[path] = _count(f"{where}{path}", leaf.shape, a.shape, is_packed and leaf.ndim > 0)
    n = common_n(where, {path: count for path, count in counts.items() if count is not None})
    layout: Layout | None = "packed" if is_packed else "stacked"
    if all(leaf.ndim == 0 for _, leaf, _ in leaves):
        layout = None
    shapes = tuple(leaf.shape for _, leaf, _ in leaves)
    return BatchedTangents([a for _, _, a in leaves], shapes, layout, n)


def _read_separate(where: str, like: Any, trees: list[Any]) -> BatchedTangents:
    if not trees:
        raise ValueError(f"{where}: expected at least one tree, got an empty list")
    tangents = []
    for i, tree in enumerate(trees):
        leaves = _differentiable_leaves(f"{where}, tree {i}", like, tree)
        for path, leaf, a in leaves:
            _check_dtype(f"{where}, tree {i}{path}", leaf, a)
            if a.shape != leaf.shape:
                raise ValueError(
                    f"{where}, tree {i}{path}: expected shape {leaf.shape}, got {a.shape}"
                )
        tangents.append([a for _, _, a in leaves])
    shapes = tuple(leaf.shape for _, leaf, _ in leaves)
    return BatchedTangents(tangents, shapes, "separate", len(trees))


def common_n(where: str, counts: dict[str, int]) -> int | None:
    """Return the number of tangents on which all entries agree; None if there are no entries.

    Raises:
      ValueError: if the numbers differ, or are 0.
    """
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name or 'the array'} has {n}" for name, n in counts.items())
        raise ValueError(f"{where}: expected the same N everywhere, got different ones: {listed}")
    n = next(iter(counts.values()), None)
    if n == 0:
        raise ValueError(f"{where}: N must be at least 1, got 0")
    return n


def fits(like: Any, given: Any, layout: Layout | None = None) -> bool:
    """Whether ``given`` can be read as N tangents of ``like``, in that layout or in any."""
    try:
        tangents = read_tangents("", like, given)
    except (TypeError, ValueError):
        return False
    return tangents.n is not None and layout in (None, tangents.layout)


def common_layout(layouts: Sequence[Layout | None]) -> Layout:
    """Return the layout that all arguments share, or else "stacked"."""
    distinct = set(layouts) - {None}
    return distinct.pop() or "stacked" if len(distinct) == 1 else "stacked"


def _separate_trees(like: Any, given: Any) -> list[Any] | None:
    """Return the N trees if ``given`` is a list of trees, else None."""
    if not isinstance(given, list | tuple):
        return None
    leaves, structure = _flatten(like)
    try:
        parts = structure.flatten_up_to(given)
    except ValueError:
        return list(given)
    # A single leaf, or a list of one leaf, has the structure of any list.
    differentiable = (p for leaf, p in zip(leaves, parts, strict=True) if is_differentiable(leaf))
    return list(given) if any(isinstance(p, list | tuple) for p in differentiable) else None


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree)


def _differentiable_leaves(
    where: str, like: Any, given: Any
) -> list[tuple[str, jax.ShapeDtypeStruct, Array]]:
    """Return path, shape and dtype, and the array given for each differentiable leaf."""
    paths, structure = jax.tree_util.tree_leaves_with_path(like), _flatten(like)[1]
    try:
        tangents = structure.flatten_up_to(given)
    except ValueError as error:
        raise ValueError(
            f"{where}: expected the structure {structure}, got {jax.tree.structure(given)}"
        ) from error
    leaves = []
    for (path, leaf), tangent in zip(paths, tangents, strict=True):
        if not is_differentiable(leaf):
            continue
        name = jax.tree_util.keystr(path)
        if tangent is None or isinstance(tangent, list | tuple | dict):
            raise ValueError(
                f"{where}{name}: expected an array, got {type(tangent).__name__}; "
                "use None for a constant argument, and zeros for a constant leaf"
            )
        shape = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
        is_number = isinstance(tangent, int | float | complex) and not isinstance(tangent, bool)
        leaves.append((name, shape, jnp.asarray(tangent, shape.dtype if is_number else None)))
    return leaves


def _check_dtype(where: str, leaf: jax.ShapeDtypeStruct, tangent: Array) -> None:
    if tangent.dtype != leaf.dtype:
        raise TypeError(
            f"{where}: expected dtype {leaf.dtype}, got {tangent.dtype}; "
            f"cast it with .astype({leaf.dtype})"
        )


def _count(where: str, shape: tuple[int, ...], got: tuple[int, ...], is_packed: bool) -> int | None:
    """Return how many tangents an array holds; None for any number, of an empty leaf."""
    if not is_packed and got[1:] == shape and got:
        return got[0]
    if is_packed and len(got) == len(shape) and got[1:] == shape[1:]:
        if shape[0] and got[0] % shape[0] == 0:
            return got[0] // shape[0]
        if shape[0] == got[0] == 0:
            return None
    rest = "".join(f", {d}" for d in shape[1:])
    expected = f"(N, {', '.join(map(str, shape))}) stacked" if shape else "(N,)"
    if shape:
        expected += f" or (N * {shape[0]}{rest or ','}) packed"
    raise ValueError(
        f"{where}: expected shape {expected} for an array of shape {shape}, in one layout "
        f"for all leaves, or a list of N trees; got {got}"
    )
