"""What the backward pass keeps, by layer: read from the traced function, before anything runs."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path

from fnet import jaxprs
from fnet.memory.origins import Origins, Residual, Traced


class LayerResiduals(NamedTuple):
    """What the backward pass keeps of one layer, beyond what exists anyway.

    Attributes:
      layer: its name, or the line of the source where nothing was named.
      bytes: of the arrays together.
      arrays: how many.
    """

    layer: str
    bytes: int
    arrays: int


def residuals(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> list[Residual]:
    """What ``jax.vjp`` of a function keeps between the forward and the backward pass.

    The function is traced, never run; arrays may be given as their shapes. Any
    JAX function will do. An array that is kept twice, or kept and only
    renamed (a reshape, ``checkpoint_name``), is listed once. Not listed is what the
    backward pass never reads, and an array of one number, which a compiler writes
    where it is read. Of a scan, an array is the stack of those of all iterations.

    The sum of ``added`` is what automatic differentiation hands to the compiler. The
    compiled program may hold less, since a compiler recomputes what is cheap and
    frees what was read, or more, since it may put off reading: 16 blocks of
    convolution, batch norm and leaky ReLU keep 68 activations here and hold 66
    compiled for a CPU, 50 scheduled for memory and 33 for an H100. What a program
    will hold is told by `fnet.memory.peak`; what follows from which line, here.

    Args:
      f: any function. With ``has_aux`` it returns ``(value, aux)``, of which only
        the value is differentiated, as in ``jax.grad``.
      *args: of ``f``: arrays, or shapes (`jax.ShapeDtypeStruct`) in any tree. All
        leaves that are neither are handed to ``f`` as they are.
      argnums: which arguments are differentiated, as in ``jax.grad``: by default the
        first, the ``params`` of a loss. Leaves of theirs that are not floating (counters,
        keys) are not. What only the gradient of the others needs is not listed.
      has_aux: whether ``f`` returns a pair.
      **kwargs: of ``f``; not differentiated.

    Returns:
      Residuals in the order of the forward pass: arguments, constants, then
      arrays as they are made.

    Raises:
      TypeError: if an output to differentiate is not floating, naming it, or no leaf
        of the arguments to differentiate is.
      ValueError: if ``f`` returns no array, or an ``argnums`` is not an argument's position.
    """
    traced = _trace(f, args, kwargs, argnums, has_aux)
    origins = Origins(traced)
    found: dict[Hashable, tuple[tuple[int, ...], Residual]] = {}
    for atom in traced.residuals:
        identity = origins.identity(atom)
        if identity not in found and (entry := origins.find(atom)):
            found[identity] = entry
    return [residual for _, residual in sorted(found.values(), key=lambda entry: entry[0])]


def by_layer(residuals: Sequence[Residual], depth: int | None = None) -> list[LayerResiduals]:
    """What is kept beyond what exists anyway, summed over each layer, in forward order.

    Args:
      residuals: from `residuals`.
      depth: how many parts of a layer's name count: 1 puts ``layer1/0/conv`` and
        ``layer1/1/abn`` together as ``layer1``. None: all.

    Returns:
      A row a layer: its name, its bytes, its arrays.

    Raises:
      ValueError: if ``depth`` is less than 1.
    """
    if depth is not None and depth < 1:
        raise ValueError(f"by_layer: depth must be at least 1, or None for all, got {depth}")
    rows: dict[str, LayerResiduals] = {}
    for r in residuals:
        if r.alias_of:
            continue
        line = r.source.rpartition("/")[2]  # no folder of this machine
        layer = "/".join(r.layer.split("/")[:depth]) or line or r.operation
        _, size, arrays = rows.get(layer, (layer, 0, 0))
        rows[layer] = LayerResiduals(layer, size + r.bytes, arrays + 1)
    return list(rows.values())


def _trace(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> Traced:
    """Traces ``jax.vjp(f, ...)``, a pytree whose leaves are what is kept."""
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(not -len(args) <= n < len(args) for n in positions):
        raise ValueError(
            f"residuals: argnums={argnums}, but f has {len(args)} positional arguments"
        )
    positions = tuple(n % len(args) for n in positions)
    names = jaxprs.argument_names(f, args)
    paths, tree = tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in paths]
    chosen = [
        i
        for i, (path, leaf) in enumerate(paths)
        if path[0].idx == 0 and path[1].idx in positions and _is_floating(leaf)
    ]
    if not chosen:
        given = ", ".join(names[n] for n in positions)
        raise TypeError(
            f"residuals: nothing to differentiate: {given} has no floating leaf; "
            "choose another argument with argnums"
        )
    arrays = [i for i, leaf in enumerate(leaves) if i in chosen or _is_array(leaf)]

    def forward(*values: Any) -> tuple[Any, ...]:
        known = dict(zip(arrays, values, strict=True))

        def of_chosen(*differentiated: Any) -> Any:
            here = known | dict(zip(chosen, differentiated, strict=True))
            a, k = jax.tree.unflatten(tree, [here.get(i, leaf) for i, leaf in enumerate(leaves)])
            out = f(*a, **k)
            _check_differentiable(out[0] if has_aux else out, has_aux)
            return out

        differentiate: Any = jax.vjp
        found: tuple[Any, ...] = differentiate(
            of_chosen, *(known[i] for i in chosen), has_aux=has_aux
        )
        return found

    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*(leaves[i] for i in arrays))
    out, vjp = shapes[:2]
    # What the forward pass hands over, a custom rule may never read.
    backward = jax.make_jaxpr(lambda vjp, cotangent: vjp(cotangent))(vjp, out).jaxpr
    _, read = dce_jaxpr(backward, [True] * len(backward.outvars))
    first, count = len(jax.tree.leaves(out)), len(jax.tree.leaves(vjp))
    atoms = closed.jaxpr.outvars
    kept = [atom for atom, is_read in zip(atoms[first:], read[:count], strict=False) if is_read]

    returned = tree_leaves_with_path((out, *shapes[2:]) if has_aux else out)
    outputs = zip(atoms[:first] + atoms[first + count :], returned, strict=True)
    inputs = dict.fromkeys(closed.jaxpr.constvars, "constant")
    for var, i in zip(closed.jaxpr.invars, arrays, strict=True):
        inputs[var] = "argument " + _leaf_name(paths[i][0], names)
    return Traced(
        closed.jaxpr, inputs, [(a, f"output {keystr(p)}".strip()) for a, (p, _) in outputs], kept
    )


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, np.generic)


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, float | complex):
        return True
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _check_differentiable(out: Any, has_aux: bool) -> None:
    outputs = tree_leaves_with_path(out)
    if not outputs:
        raise ValueError(f"residuals: f returns no array to differentiate, but {out!r}")
    for path, leaf in outputs:
        if not _is_floating(leaf):
            name = keystr(path)
            what = f"{leaf.dtype}{list(leaf.shape)}" if _is_array(leaf) else type(leaf).__name__
            fix = "" if has_aux else ", or (value, aux) with has_aux=True"
            raise TypeError(
                f"residuals: f cannot be differentiated: its output {name + ' ' if name else ''}is "
                f"{what}; return floating arrays only{fix}"
            )


def _leaf_name(path: Any, names: list[str]) -> str:
    keyword = path[0].idx == 1
    name: str = (path[1].key if keyword else names[path[1].idx]) + keystr(path[2:])
    return name
