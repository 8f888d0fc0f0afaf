"""The sum of clipped per-example gradients, which never exist."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.autodiff.examples import PerExampleLoss, examples
from fnet.autodiff.per_example.backward import contributions


class Clipped(NamedTuple):
    """What `clipped_grad` says of each example.

    Attributes:
      losses: [batch].
      norms: of the whole gradients, before clipping, [batch]; 0 for padding.
      scales: what each gradient was multiplied by, [batch]; with ``per_layer`` a list of
        such, one for each leaf of ``clip``, or of params where that is a number.
      nonfinite: how many examples had a gradient that is not finite, [].
      aux: what the loss returns beside the losses: [batch, ...] each, but what does not
        depend on the batch as it is.
    """

    losses: Array
    norms: Array
    scales: Any
    nonfinite: Array
    aux: Any


def clipped_grad(
    loss: PerExampleLoss,
    clip: Any,
    *,
    rescale_to_unit_norm: bool = False,
    per_layer: bool = False,
    automatic: float | None = None,
    has_aux: bool = False,
    width: int | None = None,
) -> Callable[..., tuple[Any, Clipped]]:
    """The sum over a batch of each example's gradient, scaled to a norm of at most ``clip``.

        sum_b s_b g_b,    s_b = min(1, clip / |g_b|)                     (Abadi et al. 2016)
                          s_b = clip / (|g_b| + automatic)     where given (Bu et al. 2023)

    at about the price of the plain gradient. One backward pass gives the cotangents of
    every layer; norms follow from activations and cotangents, and the sum is one
    product a layer of the same, scaled (Goodfellow 2015; Bu et al. 2023, "book-keeping").
    Layers are found in the traced loss, whichever library wrote them:
    products, convolutions and embedding lookups of parameters, through casts,
    transposes, reshapes, slices, `jax.jit`, `jax.checkpoint` and `jax.lax.scan`, used once or many
    times. Of other parameters each example has its own gradient made, for few
    examples at a time where it is large. `routes` tells which is which.

    Guarantees:
      - The same as a loop over examples, each a batch of one, to rounding.
      - Without one example the sum differs by at most ``clip``, by 1 if rescaled.
      - An example with a gradient that is not finite, or masked, contributes exactly 0.
      - A batch of 0 examples gives 0.
      - Sums are kept in float32 (of float64, in that). Of narrower activations scaled
        cotangents are rounded like any, so that bounds hold to such a rounding: in
        bfloat16 to 0.4 %.

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``; see `PerExampleLoss`.
      clip: the bound. With ``per_layer``, a tree that begins as params does: one
        bound for all parameters below each of its leaves; or a number, which each
        parameter array gets an equal share of (clip / sqrt(arrays)).
        May be 0 where rescaled, and infinite where neither rescaled nor automatic.
      rescale_to_unit_norm: divides by ``clip``: s_b = 1 / max(|g_b|, clip). With a clip of 0,
        gradients are normalised.
      per_layer: whether each group is clipped on its own.
      automatic: the stability constant of automatic clipping, for example 0.01.
      has_aux: whether ``loss`` returns ``(losses, aux)``.
      width: for how many examples at a time gradients are made that must be made;
        by default what takes no more memory than the parameters.

    Returns:
      ``gradient(params, *batch, mask=None, clip=clip) -> (sum, Clipped)``. The sum is like params.
      ``mask`` [batch] is True (or not 0) for real examples; ``clip`` replaces the
      bound by another, which may be traced (adaptive clipping).

    Raises:
      ValueError: for a clip that is negative, nan, 0 without rescaling, or infinite with
        it or with ``automatic``, which must be above 0; when called, for a width below
        1, losses that are not one per example, arrays of unequal leading axes, and
        layers that mix examples, by name.
      TypeError: for parameters or losses that are not floating-point.
    """
    _check(clip, rescale_to_unit_norm, per_layer, automatic)

    def gradient(
        params: Any, *batch: Any, mask: Array | None = None, clip: Any = clip
    ) -> tuple[Any, Clipped]:
        _check(clip, rescale_to_unit_norm, per_layer, automatic)
        e = examples("clipped_grad", batch)
        found = contributions("clipped_grad", loss, params, e, has_aux=has_aux, width=width)
        count = found.losses.shape[0]
        real = jnp.ones(count, bool) if mask is None else jnp.asarray(mask) != 0
        if real.shape != (count,):
            raise ValueError(f"clipped_grad: expected a mask of shape [{count}], got {real.shape}")
        squares = found.squared_norms()
        whole = sum(jax.tree.leaves(squares), jnp.zeros(count))
        finite = jnp.isfinite(whole)
        bounds, groups = _groups(clip, squares, per_layer)

        def scale(bound: Any, square: Array) -> Array:
            norm = jnp.sqrt(square)
            bound = jnp.asarray(bound, norm.dtype)
            if automatic is not None:
                s = (1 if rescale_to_unit_norm else bound) / (norm + automatic)
            elif rescale_to_unit_norm:
                longer = jnp.maximum(norm, bound)
                s = jnp.where(longer > 0, 1 / jnp.where(longer > 0, longer, 1), 0)
            else:
                s = jnp.where(norm > bound, bound / jnp.where(norm > bound, norm, 1), 1)
            return jnp.where(real & finite, s, 0)

        scales = [
            scale(bound, sum(jax.tree.leaves(group), jnp.zeros(count)))
            for bound, group in zip(bounds, groups, strict=True)
        ]
        each = [jax.tree.map(lambda _, s=s: s, g) for g, s in zip(groups, scales, strict=True)]
        leaves = [leaf for group in each for leaf in jax.tree.leaves(group)]
        sums = found.total(jax.tree.unflatten(found.structure, leaves))
        sums = jax.tree.map(lambda g, p: g.astype(jnp.result_type(p)), sums, params)
        info = Clipped(
            losses=found.losses,
            norms=jnp.where(real, jnp.sqrt(whole), 0),
            scales=scales if per_layer else scales[0],
            nonfinite=(real & ~finite).sum(),
            aux=found.aux,
        )
        return sums, info

    return gradient


def routes(
    loss: PerExampleLoss, params: Any, *batch: Any, has_aux: bool = False, width: int | None = None
) -> Any:
    """How `clipped_grad` comes by each parameter's share of an example's gradient, like params.

    ``"products"``: norms and sums are products of activations and cotangents.
    ``"kept"``: such products, small enough to be made once and kept.
    ``"made"``: each example's own gradient, by automatic differentiation.
    ``"made in parts"``, ``"made in chunks"``: likewise, few examples at a time.
    ``"unused"``: the losses do not depend on it.

    Args:
      loss: see `clipped_grad`.
      params: arrays or their shapes.
      *batch: likewise.
      has_aux: as in `clipped_grad`.
      width: likewise.

    Returns:
      One of these words for each parameter.

    Raises:
      ValueError, TypeError: as `clipped_grad`, when it is called.
    """
    found = {}

    def trace(params: Any, batch: Any) -> None:
        e = examples("routes", batch)
        c = contributions("routes", loss, params, e, has_aux=has_aux, width=width)
        found["routes"] = c.routes()

    jax.eval_shape(trace, params, batch)
    return found["routes"]


def _groups(clip: Any, squares: Any, per_layer: bool) -> tuple[list[Any], list[Any]]:
    """Bounds, and the part of the parameters that each is for."""
    if not per_layer:
        return [clip], [squares]
    if jax.tree_util.all_leaves([clip]):
        leaves = jax.tree.leaves(squares)
        return [clip / max(len(leaves), 1) ** 0.5] * len(leaves), leaves
    structure: Any
    bounds, structure = jax.tree.flatten(clip)
    try:
        return bounds, structure.flatten_up_to(squares)
    except ValueError as error:
        raise ValueError(
            f"clipped_grad: per_layer: expected a number or a tree of bounds that begins as the "
            f"parameters do, {jax.tree.structure(squares)}, got {structure}"
        ) from error


def _check(clip: Any, rescale: bool, per_layer: bool, automatic: float | None) -> None:
    if not per_layer and not jax.tree_util.all_leaves([clip]):
        raise ValueError(f"clipped_grad: expected one bound, got {clip!r}; use per_layer=True")
    for bound in jax.tree.leaves(clip):
        if isinstance(bound, jax.core.Tracer):
            continue
        value = float(bound)
        if not value >= 0:
            raise ValueError(f"clipped_grad: clip must be at least 0, got {value}")
        if value == 0 and not rescale:
            raise ValueError(
                "clipped_grad: a clip of 0 leaves nothing; with rescale_to_unit_norm=True it "
                "normalises gradients"
            )
        if value == float("inf") and rescale:
            raise ValueError("clipped_grad: an infinite clip cannot be rescaled to 1")
        if value == float("inf") and automatic is not None:
            raise ValueError("clipped_grad: automatic makes norms those of the clip, got inf")
    if automatic is not None and not automatic > 0:
        raise ValueError(f"clipped_grad: automatic must be above 0, got {automatic}")
