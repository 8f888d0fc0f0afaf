"""What each example contributes to a gradient: norms and scaled sums from one backward pass."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr

from fnet.autodiff.examples import (
    Examples,
    PerExampleLoss,
    by_example,
    check_losses,
    check_params,
    check_width,
    is_key,
)
from fnet.autodiff.per_example.alone import Alone, alone
from fnet.autodiff.per_example.batch_axis import (
    UNKNOWN,
    BatchAxes,
    BatchAxis,
    Mixed,
    depends_on,
    find_batch_axes,
    reachable,
)
from fnet.autodiff.per_example.chunks import Chunks
from fnet.autodiff.per_example.ghost_norm import BiasAdd, Dot, Scale
from fnet.autodiff.per_example.parameter_gradients import Made, Met, Products, Shares, Unused
from fnet.autodiff.per_example.taps import Path, Use, Uses, find_uses, tap, tapped

_AT_ONCE = 16 * 2**20
"""Bytes of shares that may be made at once beside as many as the parameters take."""


class Contributions(NamedTuple):
    """Of every example to every parameter's gradient.

    Attributes:
      losses: [batch].
      aux: what the loss returns beside them: [batch, ...] each, but what does not
        depend on the batch as it is.
      aux_rows: which of its leaves are [batch, ...].
      structure: of the parameters.
      shares: of each parameter by its number.
      chunks: of the parameters that are left.
    """

    losses: Array
    aux: Any
    aux_rows: list[bool]
    structure: Any
    shares: dict[int, Shares]
    chunks: Chunks

    def squared_norms(self) -> Any:
        """Of each example's gradient of each parameter, [batch] each, like params."""
        found = {i: s.squared_norms() for i, s in self.shares.items()}
        return self._tree(found | self.chunks.squared_norms())

    def each(self) -> Any:
        """Every example's gradient, [batch, *parameter] each, like params."""
        found = {i: s.each() for i, s in self.shares.items()}
        return self._tree(found | self.chunks.each())

    def total(self, scales: Any) -> Any:
        """Sums over examples, scaled: ``sum_b scales_b gradient_b``, float32 or wider.

        Args:
          scales: [batch] of each parameter, like params. What is scaled by 0 counts
            as 0, even if it is not finite.
        """
        of = dict(enumerate(jax.tree.leaves(scales)))
        found, made = {}, jnp.zeros(())
        for i, share in sorted(self.shares.items(), reverse=True):
            found[i] = share.total(_after(of[i], made))
            made = found[i] if found[i].ndim > 1 and found[i].size else made
        return self._tree(found | self.chunks.totals(of))

    def routes(self) -> Any:
        """How each parameter's shares are had, like params."""
        found = {i: s.route for i, s in self.shares.items()}
        return self._tree(found | dict.fromkeys(self.chunks.which, "made in chunks"))

    def _tree(self, leaves: dict[int, Any]) -> Any:
        return jax.tree.unflatten(self.structure, [leaves[i] for i in range(len(leaves))])


def _after(scales: Array, made: Array) -> Array:
    """``scales`` as they are, known only once ``made`` is.

    Layer by layer, data and cotangents are then done with one after the other;
    otherwise a compiler scales all of them first, and holds them twice.
    """
    # A barrier would say so, but XLA's CPU compiler drops it before it orders anything.
    return scales + 0 * jnp.nan_to_num(made[(0,) * made.ndim])


def contributions(
    name: str,
    loss: PerExampleLoss,
    params: Any,
    e: Examples,
    *,
    has_aux: bool = False,
    width: int | None = None,
) -> Contributions:
    """One backward pass, and what of it belongs to which example.

    A tap (a zero) stands behind every product of data with a parameter; its
    cotangent and the data give an example's share of the gradient. Other uses of
    a parameter give each example a copy of its own to differentiate.

    Args:
      name: of the caller, for errors.
      loss: see `PerExampleLoss`.
      params: floating-point arrays.
      e: the loss's other arguments.
      has_aux: whether the loss returns ``(losses, aux)``.
      width: for how many examples shares are made at once where they must be made;
        by default as many as take no more than the parameters.

    Raises:
      TypeError: for parameters or losses that have no gradient, a width that is no int, and
        a loss that with ``has_aux`` gives no pair.
      ValueError: for arrays of unequal leading axes, losses that are not one per
        example, a width below 1, and layers that mix examples.
    """
    check_params(name, params)
    check_width(name, width)
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, params))

    def whole(params: list[Any], batch: Sequence[Any]) -> tuple[Array, Any]:
        out = loss(jax.tree.unflatten(structure, params), *batch)
        if not has_aux:
            return out, None
        if not isinstance(out, list | tuple) or len(out) != 2:
            raise TypeError(
                f"{name}: with has_aux=True expected (losses, aux), got {type(out).__name__}"
            )
        losses, aux = out
        return losses, aux

    traced = _follow(name, whole, leaves, e)
    if e.size:
        found = _at_once(whole, traced, leaves, e, width)
        found = found or _one_by_one(name, whole, traced, leaves, e, width)
        losses, aux, shares, chunks = found
    else:
        losses, aux = whole(leaves, e.rebuild_batch(e.leaves))
        aux, shares, chunks = jax.tree.leaves(aux), {}, Chunks(traced.closed, leaves, e, (), 1)
    for i, leaf in enumerate(leaves):
        if not leaf.size or not (i in shares or i in chunks.which):
            shares[i] = Unused(leaf, e.size)
    aux = jax.tree.unflatten(traced.aux, aux)
    rows = [state is not None for state in traced.followed.outputs[1:]]
    return Contributions(losses, aux, rows, structure, shares, chunks)


class _Traced(NamedTuple):
    """The loss of a whole batch.

    Attributes:
      closed: of the parameters, then the batch.
      aux: structure of what is returned beside the losses.
      followed: where the examples are in it.
      shapes: of what is returned beside the losses.
      rows: how many examples the batch has that was traced, at least 2.
    """

    closed: ClosedJaxpr
    aux: Any
    followed: BatchAxes
    shapes: list[tuple[int, ...]]
    rows: int

    @property
    def proven(self) -> bool:
        """Whether each example is known to have a row of its own in every result, or no part."""
        losses, *aux = self.followed.outputs
        return losses == BatchAxis(0) and all(
            state is None or (state == BatchAxis(0) and shape[0] == self.rows)
            for state, shape in zip(aux, self.shapes, strict=True)
        )


def _follow(name: str, whole: Any, leaves: Sequence[Any], e: Examples) -> _Traced:
    """Traces the loss of a batch; refuses losses not one per example, and examples that mix."""
    rows = max(e.size, 2)  # of a single example nothing can be said
    batch = [jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for a in e.leaves]
    closed, out = jax.make_jaxpr(
        lambda *args: whole(list(args[: len(leaves)]), e.rebuild_batch(args[len(leaves) :])),
        return_shape=True,
    )(*leaves, *batch)
    check_losses(name, out[0], rows)
    followed = find_batch_axes(closed, [False] * len(leaves) + [True] * len(batch), rows)
    mixed = followed.outputs[0]
    if mixed == UNKNOWN and any(map(is_key, batch)):
        # What random numbers are made of is not looked into; what they meet may mix all the same.
        data = [False] * len(leaves) + [not is_key(a) for a in batch]
        mixed = find_batch_axes(closed, data, rows).outputs[0]
    if isinstance(mixed, Mixed):
        raise ValueError(
            f"{name}: {mixed.layer or 'the loss'} mixes the examples of a batch "
            f"({mixed.operation}): the gradient of one example does not exist. Batch norm: use "
            "frozen statistics (train=False) or group norm (fnet.layers.group_norm)"
        )
    shapes = [a.shape for a in jax.tree.leaves(out[1])]
    return _Traced(closed, jax.tree.structure(out[1]), followed, shapes, rows)


_Found = tuple[Array, list[Any], dict[int, Shares], Chunks]


def _at_once(
    whole: Any, traced: _Traced, leaves: Sequence[Any], e: Examples, width: int | None
) -> _Found | None:
    """The batch as it is, if all that a parameter meets has a row an example."""
    uses = find_uses(traced.closed, len(leaves))
    if e.size < 2 or uses.lost or not traced.proven:
        return None
    if (apart := _alone(whole, traced, uses, leaves, e, width)) is None:
        return None
    axes = []
    for use in uses.every:
        given, (out, *_) = traced.followed.equations.get(use.path, ([UNKNOWN] * 2, [UNKNOWN]))
        data = given[use.product.data] if use.product.data is not None else BatchAxis(0)
        if not isinstance(data, BatchAxis) or not isinstance(out, BatchAxis):
            return None
        if _differs_by_example(use, out.axis):
            return None
        axes.append((data.axis, out.axis))

    def losses(taps: list[Array]) -> Any:
        args = [*leaves, *e.leaves]
        (losses, *aux), data = tapped(traced.closed, uses.every, taps, args, apart)
        return losses, (aux, data)

    def zeros(use: Use) -> Array:
        copies = () if use.operand is None else (e.size,)
        return jnp.zeros((*use.loops, *copies, *use.out.shape), use.out.dtype)

    found, vjp, (aux, data) = jax.vjp(losses, list(map(zeros, uses.every)), has_aux=True)
    (cotangents,) = vjp(jnp.ones_like(found))

    met: dict[int, list[Met]] = {}
    for use, x, ct, (data_axis, out_axis) in zip(uses.every, data, cotangents, axes, strict=True):
        n = len(use.loops)
        if use.product.data is None:
            x = jnp.zeros((*use.loops, e.size, 0))
        else:
            x = by_example(x, n + data_axis, e.size, n)
        ct = ct if use.operand is not None else by_example(ct, n + out_axis, e.size, n)
        met.setdefault(use.view.param, []).append(Met(use, x, use.view.unscaled(ct)))
    shares: dict[int, Shares] = {i: Products(leaves[i], m) for i, m in met.items()}
    return found, aux, shares, Chunks(traced.closed, leaves, e, (), 1)


def _differs_by_example(use: Use, axis: int) -> bool:
    """Whether examples, along that axis of the result, meet different elements of the parameter."""
    product, elements = use.product, use.view.elements
    if isinstance(product, Dot):
        if axis >= len(product.batch_dims[1]):
            return False
        axis = product.batch_dims[1][axis]
    elif use.operand is not None or not isinstance(product, BiasAdd | Scale):
        return False
    axis += len(use.view.loops)
    return elements.shape[axis] > 1 and elements.strides[axis] != 0


def _alone(
    whole: Any,
    traced: _Traced,
    uses: Uses,
    leaves: Sequence[Any],
    e: Examples,
    width: int | None,
) -> dict[Path, Alone] | None:
    """Equations that use parameters in other ways than products, example by example.

    None where one cannot be had, or the examples' copies would be too large.
    """
    copied = [use for use in uses.every if use.operand is not None]
    taken = sum(e.size * math.prod((*use.loops, *use.out.shape)) * 4 for use in copied)
    if taken > _allowed(leaves) or _divided(uses, leaves, e.size, width)[1]:
        return None
    if not copied:
        return {}
    shapes = [jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for a in e.leaves]
    one = jax.make_jaxpr(
        lambda *args: whole(list(args[: len(leaves)]), e.rebuild_batch(args[len(leaves) :]))
    )(*leaves, *shapes)
    found = {}
    for path in {use.path for use in copied}:
        states = traced.followed.equations.get(path, ([UNKNOWN], [UNKNOWN]))
        if (equation := alone(traced.closed, one, path, e.size, states)) is None:
            return None
        found[path] = equation
    return found


def _one_by_one(
    name: str, whole: Any, traced: _Traced, leaves: Sequence[Any], e: Examples, width: int | None
) -> _Found:
    """Each example as a batch of one, vectorised."""
    axes = [None if state is None else 0 for state in traced.followed.outputs[1:]]

    def one(*args: Any) -> tuple[Array, list[Array]]:
        losses, aux = whole(list(args[: len(leaves)]), e.rebuild(args[len(leaves) :]))
        if jnp.shape(losses) != (1,):
            raise ValueError(
                f"{name}: expected losses of shape [1] of a batch of one, got {jnp.shape(losses)}; "
                "give arrays with a row for each example as arguments, not by closure or in params"
            )
        rows = zip(jax.tree.leaves(aux), traced.shapes, axes, strict=True)
        # What has a row an example in a batch has one row here.
        return losses[0], [
            a[0]
            if axis == 0 and a.shape[:1] == (1,) and shape == (traced.rows, *a.shape[1:])
            else a
            for a, shape, axis in rows
        ]

    shapes = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in e.leaves]
    closed = jax.make_jaxpr(one)(*leaves, *shapes)
    uses = find_uses(closed, len(leaves))
    # Where a parameter meets what all examples share, a tap would be as large as all copies of it.
    of_data = reachable(closed, [False] * len(leaves) + [True] * len(shapes))
    shared = {use.view.param for use in uses.every if use.path not in of_data.equations}
    uses = uses._replace(other=uses.other | shared)
    at_once, in_chunks = _divided(uses, leaves, e.size, width)
    # Each example has its own of what follows from a parameter of which it has a copy, or a tap.
    own = {*at_once, *(use.view.param for use in uses.known)}
    by_own = depends_on(closed, [i in own for i in range(len(leaves) + len(shapes))])[1:]
    same = [axis is None and o for axis, o in zip(axes, by_own, strict=True)]
    given = [0 if s else axis for s, axis in zip(same, axes, strict=True)]
    losses, aux, shares = _backward(closed, uses, leaves, e, at_once, given)
    aux = [a[0] if s else a for s, a in zip(same, aux, strict=True)]
    chunks = Chunks(closed, leaves, e, in_chunks, _width(in_chunks, leaves, e.size, width))
    return losses, aux, shares, chunks


def _allowed(leaves: Sequence[Any]) -> int:
    """Bytes of shares that may be made at once."""
    allowed: int = sum(p.nbytes for p in leaves) + _AT_ONCE
    return allowed


def _divided(
    uses: Uses, leaves: Sequence[Any], size: int, width: int | None
) -> tuple[list[int], list[int]]:
    """Parameters used in other ways: those whose shares are made at once, and the rest."""
    allowed = _allowed(leaves)
    at_once, in_chunks = [], []
    for i in sorted(uses.other, key=lambda i: leaves[i].size):
        taken = size * leaves[i].nbytes
        if taken <= allowed and (width is None or size <= width or leaves[i].ndim < 2):
            at_once.append(i)
            allowed -= taken
        else:
            in_chunks.append(i)
    return at_once, in_chunks


def _backward(
    closed: ClosedJaxpr,
    uses: Uses,
    leaves: Sequence[Any],
    e: Examples,
    made: Sequence[int],
    aux_axes: Sequence[int | None],
) -> tuple[Array, list[Any], dict[int, Shares]]:
    """Losses, aux, and the shares of all parameters but those made in chunks."""
    known = uses.known

    def one(taps: list[Array], copies: dict[int, Array], example: list[Array]) -> Any:
        own = [tap(p, copies[i]) if i in copies else p for i, p in enumerate(leaves)]
        (loss, *aux), data = tapped(closed, known, taps, [*own, *example])
        return loss, (aux, data)

    loops = [len(use.loops) for use in known]
    batched = jax.vmap(one, in_axes=(loops, 0, 0), out_axes=(0, (list(aux_axes), loops)))
    taps = [jnp.zeros((*use.loops, e.size, *use.out.shape), use.out.dtype) for use in known]
    copies = {i: jnp.zeros((e.size, *leaves[i].shape), leaves[i].dtype) for i in made}
    losses, vjp, (aux, data) = jax.vjp(
        lambda taps, copies: batched(taps, copies, e.leaves), taps, copies, has_aux=True
    )
    cotangents, each = vjp(jnp.ones_like(losses))
    met: dict[int, list[Met]] = {}
    for use, x, ct in zip(known, data, cotangents, strict=True):
        met.setdefault(use.view.param, []).append(Met(use, x, use.view.unscaled(ct)))
    shares: dict[int, Shares] = {i: Products(leaves[i], m) for i, m in met.items()}
    return losses, aux, shares | {i: Made(g) for i, g in each.items()}


def _width(which: Sequence[int], leaves: Sequence[Any], size: int, width: int | None) -> int:
    each = sum(leaves[i].nbytes for i in which)
    allowed = _allowed(leaves)
    return width or max(1, min(allowed // max(each, 1), size))
