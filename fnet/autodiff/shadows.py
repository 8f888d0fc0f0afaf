"""Shadows of an argument: N tangents, cotangents or accumulators, in one of three forms."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Form = Literal["stacked", "packed", "separate"]


class Shadows(NamedTuple):
    """N shadows of one tree's differentiable leaves.

    Attributes:
      form: how they lie; None where that makes no difference (scalars alone are
        packed as they are stacked).
      n: how many there are; None for a tree without differentiable leaves.
      shapes: of one shadow's leaves.
      lanes: in the form: of all leaves an array each, or if separate, of every
        lane a list of them.
    """

    form: Form | None
    n: int | None
    shapes: list[tuple[int, ...]]
    lanes: list[Any]

    def stacked(self) -> list[Array]:
        """Each leaf [n, *shape]."""
        if self.form == "separate":
            return [jnp.stack(leaves) for leaves in zip(*self.lanes, strict=True)]
        return [
            a.reshape(self.n or 0, *shape) for a, shape in zip(self.lanes, self.shapes, strict=True)
        ]

    def separate(self) -> list[list[Array]]:
        """Of every lane, its leaves."""
        if self.form == "separate":
            return self.lanes
        stacked = self.stacked()
        return [[a[i] for a in stacked] for i in range(self.n or 0)]

    def filled(self, stacked: Sequence[Array]) -> "Shadows":
        """Others in the same form, from each leaf [n, *shape]."""
        if self.form == "separate":
            return self._replace(lanes=[[a[i] for a in stacked] for i in range(self.n or 0)])
        if self.form != "packed":
            return self._replace(lanes=list(stacked))
        return self._replace(
            lanes=[jax.lax.collapse(a, 0, 2) if a.ndim > 1 else a for a in stacked]
        )

    def tree(self, like: Any) -> Any:
        """As the caller gave or gets them: leaves without a derivative are ``float0``."""
        if self.form == "separate":
            return tuple(filled(like, lane, ()) for lane in self.lanes)
        return filled(like, self.lanes, (self.n or 0,))


def empty(form: Form | None, like: Any, n: int) -> Shadows:
    """The form of N shadows of a tree, to be filled."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(like) if differentiable(leaf)]
    return Shadows(form, n, shapes, [])


def filled(like: Any, leaves: Sequence[Array], lanes: tuple[int, ...] = ()) -> Any:
    """A tree like another one of arrays, [*lanes, *shape]; ``float0`` without a derivative."""
    given = iter(leaves)
    return jax.tree.map(
        lambda leaf: (
            next(given)
            if differentiable(leaf)
            else np.zeros((*lanes, *jnp.shape(leaf)), jax.dtypes.float0)
        ),
        like,
    )


def differentiable(leaf: Any) -> bool:
    """Whether a leaf has a derivative: floating or complex."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.inexact)


def read(where: str, like: Any, given: Any) -> Shadows:
    """The shadows of a tree, their form told by their shapes.

    Args:
      where: how messages call them.
      like: the tree, of arrays or shapes.
      given: each leaf [N, *shape] (stacked), or each leaf [N * len, *rest] for a
        leaf [len, *rest] (packed), or a list or tuple of N trees (separate).
        What stands for a leaf that is not differentiable is not looked at.

    Raises:
      ValueError: for another structure or shape, unequal or no lanes.
      TypeError: for another dtype.
    """
    trees = _trees(like, given)
    if trees is not None:
        if not trees:
            raise ValueError(f"{where}: expected one tree a lane, got none; N must be at least 1")
        lanes = [_leaves(f"{where}, lane {i}", like, tree) for i, tree in enumerate(trees)]
        for i, lane in enumerate(lanes):
            for path, leaf, shadow in lane:
                _same_dtype(f"{where}, lane {i}", path, leaf, shadow)
                if shadow.shape != leaf.shape:
                    raise ValueError(
                        f"{where}, lane {i}{path}: expected shape {leaf.shape}, got {shadow.shape}"
                    )
        shapes = [leaf.shape for _, leaf, _ in lanes[0]]
        return Shadows("separate", len(trees), shapes, [[a for _, _, a in lane] for lane in lanes])

    leaves = _leaves(where, like, given)
    packed = any(a.ndim == leaf.ndim > 0 for _, leaf, a in leaves)
    scalars = all(leaf.ndim == 0 for _, leaf, _ in leaves)
    counts = {}
    for path, leaf, a in leaves:
        _same_dtype(where, path, leaf, a)
        counts[path] = _count(where, path, leaf.shape, a.shape, packed and leaf.ndim > 0)
    n = same_number(where, {path: c for path, c in counts.items() if c is not None})
    form: Form | None = None if scalars else "packed" if packed else "stacked"
    return Shadows(form, n, [leaf.shape for _, leaf, _ in leaves], [a for _, _, a in leaves])


def same_number(where: str, counts: dict[str, int]) -> int | None:
    """The number of lanes on which all agree, at least 1; None of nothing.

    Raises:
      ValueError: if they differ, or are 0.
    """
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name or 'the array'} has {n}" for name, n in counts.items())
        raise ValueError(f"{where}: expected the same number of lanes everywhere, got: {said}")
    n = next(iter(counts.values()), None)
    if n == 0:
        raise ValueError(f"{where}: expected at least 1 lane, got N = 0")
    return n


def fits(like: Any, given: Any, form: Form | None = None) -> bool:
    """Whether ``given`` can be read as shadows of ``like``, in that form or in any."""
    try:
        found = read("", like, given)
    except (TypeError, ValueError):
        return False
    return found.n is not None and form in (None, found.form)


def common_form(forms: Sequence[Form | None]) -> Form:
    """The form of results: that of all arguments that have one, or stacked."""
    told = {form for form in forms if form is not None}
    return told.pop() if len(told) == 1 else "stacked"


def _trees(like: Any, given: Any) -> list[Any] | None:
    """The lanes' trees, if they are given one by one."""
    if not isinstance(given, list | tuple):
        return None
    leaves, structure = _flat(like)
    try:
        parts = structure.flatten_up_to(given)
    except ValueError:
        return list(given)
    # One leaf, or a list of one, takes any list for its own.
    of_leaves = (p for leaf, p in zip(leaves, parts, strict=True) if differentiable(leaf))
    return list(given) if any(isinstance(p, list | tuple) for p in of_leaves) else None


def _flat(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree)


def _leaves(where: str, like: Any, given: Any) -> list[tuple[str, Any, Array]]:
    """Of each differentiable leaf: its path, its shape and dtype, and what is given for it."""
    paths, structure = jax.tree_util.tree_leaves_with_path(like), _flat(like)[1]
    try:
        shadows = structure.flatten_up_to(given)
    except ValueError as error:
        raise ValueError(
            f"{where}: expected the structure {structure}, got {jax.tree.structure(given)}"
        ) from error
    found = []
    for (path, leaf), shadow in zip(paths, shadows, strict=True):
        if not differentiable(leaf):
            continue
        name = jax.tree_util.keystr(path)
        if shadow is None or isinstance(shadow, list | tuple | dict):
            raise ValueError(
                f"{where}{name}: expected an array, got {type(shadow).__name__}; a whole "
                "argument is left out with None, a leaf with zeros"
            )
        shape = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
        python = isinstance(shadow, int | float | complex) and not isinstance(shadow, bool)
        found.append((name, shape, jnp.asarray(shadow, shape.dtype if python else None)))
    return found


def _same_dtype(where: str, path: str, leaf: Any, shadow: Array) -> None:
    if shadow.dtype != leaf.dtype:
        raise TypeError(
            f"{where}{path}: expected dtype {leaf.dtype}, got {shadow.dtype}; "
            f"cast it with .astype({leaf.dtype})"
        )


def _count(
    where: str, path: str, shape: tuple[int, ...], got: tuple[int, ...], packed: bool
) -> int | None:
    """How many shadows an array holds; None where it could be any number."""
    if not packed and got[1:] == shape and got:
        return got[0]
    if packed and len(got) == len(shape) and got[1:] == shape[1:]:
        if shape[0] and got[0] % shape[0] == 0:
            return got[0] // shape[0]
        if shape[0] == got[0] == 0:
            return None
    rest = "".join(f", {d}" for d in shape[1:])
    forms = f"(N, {', '.join(map(str, shape))}) stacked" if shape else "(N,)"
    if shape:
        forms += f" or (N * {shape[0]}{rest or ','}) packed"
    raise ValueError(
        f"{where}{path}: expected shape {forms} for an array of shape {shape}, the same form "
        f"throughout the tree, or N separate trees; got {got}"
    )
