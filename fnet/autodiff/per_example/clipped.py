"""Per-example clipping (DP-SGD) without materializing per-example gradients.

Materializing per-example gradients takes as much memory as one copy of the parameters per example.
`backward` finds what they follow from, and `parameter_gradients` chooses how norms and sums do.
This file computes the scale ``min(1, clip / norm)`` of each example, and the scaled sum.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet import checks
from fnet.autodiff.examples import PerExampleLoss, check_width, examples
from fnet.autodiff.per_example.backward import Microbatches, TracedLoss, trace_loss
from fnet.autodiff.per_example.ghost_norm import computed_once
from fnet.autodiff.per_example.parameter_gradients import PerExampleGradients, SquaredNorms, sum_of
from fnet.mesh import equally_varying
from fnet.precision import sum_dtype


class ClippedInfo(NamedTuple):
    """Per-example results of `clipped_grad`.

    Attributes:
      losses: Losses, [batch].
      norms: Gradient norms over all parameters before clipping, [batch]; 0 for padding.
      scales: Factors that the gradients were multiplied by, [batch]. With ``per_layer`` a tree of
        them, like ``clip``, or like params if ``clip`` is a number.
      nonfinite: Number of examples whose loss or gradient is not finite, [].
      aux: Auxiliary output of the loss. Leaves are [batch, ...], or of any shape if they do not
        depend on the batch.
      norms_per_layer: Gradient norms of each group of parameters, a tree like ``scales``; 0 for
        padding. None without ``per_layer``.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, x):
      ...     losses = x @ params
      ...     return losses, {"above_0": losses > 0}
      >>> x = jnp.array([[3.0, 4.0], [0.0, jnp.nan]])
      >>> _, info = fnet.clipped_grad(loss, 1.0, has_aux=True)(jnp.ones(2), x)
      >>> print(info.losses, info.norms, info.scales, info.nonfinite)
      [ 7. nan] [ 5. nan] [0.2 0. ] 1
      >>> print(info.aux)
      {'above_0': Array([ True, False], dtype=bool)}
    """

    losses: Array
    norms: Array
    scales: Any
    nonfinite: Array
    aux: Any
    norms_per_layer: Any = None


def clipped_grad(
    loss: PerExampleLoss,
    clip: Any,
    *,
    rescale_to_unit_norm: bool = False,
    per_layer: bool = False,
    automatic: float | None = None,
    has_aux: bool = False,
    width: int | None = None,
    microbatch_size: int | None = None,
) -> "ClippedGrad":
    """Clip per-example gradients and sum them, without materializing them.

    The gradient ``g_b`` of example b is the gradient of the loss on a batch that holds b alone.
    Each is scaled to a norm of at most ``clip``:

        sum_b s_b g_b,    s_b = min(1, clip / |g_b|)             (Abadi et al. 2016)
                          s_b = clip / (|g_b| + automatic)       (Bu et al. 2023, if given)

    One backward pass over the batch gives norms and sum, at about the time and memory of a plain
    gradient. The loss may use any library and any JAX code: dense layers, convolutions and
    embeddings are found in the traced function. They may be inside `jax.jit`, `jax.checkpoint`
    or `jax.lax.scan`, and parameters may be shared, cast, reshaped or sliced. Other operations
    fall back to automatic differentiation per example; `fnet.autodiff.gradient_strategies`
    shows which parameters do.

    Guarantees:
      - The sum equals a loop over batches of one example, up to rounding.
      - Adding or removing one example changes the sum by a norm of at most ``sensitivity()`` of
        the returned function. It is ``clip``, or 1 with ``rescale_to_unit_norm``. A tree of
        bounds has the root of the sum of their squares, or of their number if rescaled.
      - An example contributes exactly 0 if it is masked or its gradient is not finite.
      - Sums are accumulated and returned in float32 or wider, whatever the dtype of the
        parameters. In bfloat16, the error of a sum grows with the number of examples.
      - Rounding is part of the bound: an example contributes at most 1.001 times the clip, even
        if the tokens of a sequence almost cancel. Scaled cotangents of bfloat16 are rounded to
        2^-8 of their value, and products of accelerators by default to 2^-10 (TF32) or 2^-7.
        The largest error that this can cause is added to each example's norm. Gradients that an
        accelerator keeps are products of factors in bfloat16, and rounded to it before their
        norm is taken, unless ``jax_default_matmul_precision`` is ``"float32"`` or ``"highest"``.
        `fnet.privacy.check_sensitivity` tries to break the bound for your loss.

    ================================  ===========================================================
    edge case                         result
    ================================  ===========================================================
    batch of 0 examples               a sum of 0
    all examples masked               a sum of 0
    gradient of norm 0                contributes 0, also with ``rescale_to_unit_norm``
    NaN or infinity in loss or        contributes 0, and ``info.nonfinite`` counts it; its norm
    gradient                          is NaN
    norm above 1e19 in float32        as infinity, because its square is
    ``clip=inf``                      the plain sum of gradients; 0 with ``rescale_to_unit_norm``
    ``clip=0``                        a sum of 0; with ``rescale_to_unit_norm`` each gradient is
                                      normalized
    traced ``clip`` below 0 or NaN    as ``clip=0``
    parameter without effect          a gradient of 0
    layer that mixes examples         ValueError with the layer's name and the source line
    position in the batch             ValueError if the loss depends on it, as with
                                      ``jnp.arange(len(x))`` or dropout with a key from a closure
    batch size                        is 1: ``/ len(x)`` divides by 1
    operation that is not analyzed    ValueError with the operation and its source line, unless
                                      ``microbatch_size=1``
    ================================  ===========================================================

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``; see `PerExampleLoss`.
      clip: Largest norm of an example's gradient. With ``per_layer``, a tree that is a prefix of
        params with one bound for all parameters below each of its leaves. A number with
        ``per_layer`` gives each parameter array the bound ``clip / sqrt(arrays)``.
      rescale_to_unit_norm: Whether to divide by ``clip``: s_b = 1 / max(|g_b|, clip). With a tree
        of bounds, each group is divided by its own.
      per_layer: Whether to clip each parameter or group of parameters on its own.
      automatic: Stability constant of automatic clipping, such as 0.01.
      has_aux: Whether ``loss`` returns ``(losses, aux)``.
      width: Number of examples at a time for gradients by automatic differentiation of large
        parameters. By default as many as take no more memory than the parameters.
      microbatch_size: Number of examples of which one backward pass computes the gradients. 1
        differentiates one example after the other like `jax.grad`, and adds its clipped gradient.
        By default 1 or all, whichever is estimated to be faster.

    Returns:
      A `ClippedGrad`: ``gradient(params, *batch, mask=None, clip=None) -> (sum, ClippedInfo)``.
      The sum is like params, in float32 or wider. ``mask`` [batch] is True (or not 0) for real
      examples. ``clip`` overrides the bound, and may be traced (adaptive clipping).
      ``gradient.sensitivity()`` is the L2 sensitivity of the sum.

    Raises:
      ValueError: ``clip`` is negative, NaN, or infinite with ``automatic``; or ``automatic`` is
        not above 0. When called: ``width`` is below 1, the losses are not [batch], arrays differ
        in their leading axis, a layer mixes examples, or the loss depends on the position in
        the batch.
      TypeError: Parameters are neither floating-point nor complex, or losses are not floating.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, x):
      ...     return x @ params
      >>> # The gradients of this loss are its inputs.
      >>> x = jnp.array([[3.0, 4.0], [0.0, 0.5]])
      >>> gradient = fnet.clipped_grad(loss, 1.0)
      >>> total, info = gradient(jnp.zeros(2), x)
      >>> print(info.norms, info.scales)
      [5.  0.5] [0.2 1. ]
      >>> print(total, gradient.sensitivity())
      [0.6 1.3] 1.0
      >>> total, _ = gradient(jnp.zeros(2), x, mask=jnp.array([True, False]))
      >>> print(total)
      [0.6 0.8]

    References:
      - Abadi et al. 2016, "Deep learning with differential privacy", arXiv:1607.00133.
      - Bu et al. 2023, "Differentially private optimization on large model at small cost",
        arXiv:2210.00038, and "Automatic clipping", arXiv:2206.07136.
    """
    check_clip(clip, per_layer, automatic)
    if microbatch_size is not None:
        checks.sizes("clipped_grad", microbatch_size=microbatch_size)
    return ClippedGrad(
        loss, clip, rescale_to_unit_norm, per_layer, automatic, has_aux, width, microbatch_size
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """The function that `clipped_grad` returns, and its sensitivity.

    Its fields are the arguments of `clipped_grad`. It is pure, and works under `jax.jit`.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> gradient = fnet.clipped_grad(lambda params, x: x @ params, 0.5)
      >>> total, info = jax.jit(gradient)(jnp.zeros(2), jnp.array([[3.0, 4.0]]))
      >>> print(total, gradient.sensitivity())
      [0.3 0.4] 0.5
    """

    loss: PerExampleLoss
    clip: Any
    rescale_to_unit_norm: bool = False
    per_layer: bool = False
    automatic: float | None = None
    has_aux: bool = False
    width: int | None = None
    microbatch_size: int | None = None

    def sensitivity(self, neighboring_relation: Any = "ADD_OR_REMOVE_ONE") -> Any:
        """Return the L2 sensitivity of the sum.

        Noise of standard deviation ``noise_multiplier * sensitivity()`` makes the sum private.

        Args:
          neighboring_relation: How neighboring batches differ: ``"ADD_OR_REMOVE_ONE"`` example,
            ``"REPLACE_SPECIAL"`` (an example is masked) or ``"REPLACE_ONE"``, which doubles the
            sensitivity. A `dp_accounting.NeighboringRelation` works too.

        Raises:
          ValueError: ``neighboring_relation`` is none of these.

        Example:
          >>> import fnet
          >>> bounds = {"encoder": 3.0, "head": 4.0}
          >>> gradient = fnet.clipped_grad(lambda params, x: x, bounds, per_layer=True)
          >>> gradient.sensitivity(), gradient.sensitivity("REPLACE_ONE")
          (5.0, 10.0)
        """
        bounds = jax.tree.leaves(self.clip)
        if self.rescale_to_unit_norm:
            bounds = [1.0] * len(bounds)
        norm = bounds[0] if len(bounds) == 1 else sum(bound**2 for bound in bounds) ** 0.5
        return contributions_changed(neighboring_relation) * norm

    def __call__(
        self, params: Any, *batch: Any, mask: Array | None = None, clip: Any = None
    ) -> tuple[Any, ClippedInfo]:
        """Return the sum of clipped gradients, float32 or wider, and `ClippedInfo`."""
        if any(map(jnp.iscomplexobj, jax.tree.leaves(params))):
            return self._of_complex(params, batch, mask, clip)
        sums, info = self._clip_and_sum(params, batch, mask, clip)
        return jax.tree.map(lambda g, p: g.astype(sum_dtype(p)), sums, params), info

    def add_to(
        self, totals: Any, params: Any, *batch: Any, mask: Array | None = None, clip: Any = None
    ) -> ClippedInfo:
        """Add the sum of clipped gradients to mutable arrays (`jax.new_ref`) like params.

        A backward pass through `jax.checkpoint` adds to them layer by layer, so that no second
        array of the parameters' size exists.
        """
        if any(map(jnp.iscomplexobj, jax.tree.leaves(params))):
            sums, info = self(params, *batch, mask=mask, clip=clip)
            _add_to_refs(totals, sums)
            return info
        return self._clip_and_sum(params, batch, mask, clip, totals)[1]

    def _clip_and_sum(
        self, params: Any, batch: tuple[Any, ...], mask: Array | None, clip: Any, totals: Any = None
    ) -> tuple[Any, ClippedInfo]:
        """Return the sum in float32 or wider, or None if it is added to ``totals``."""
        clip = self.clip if clip is None else clip
        check_clip(clip, self.per_layer, self.automatic)
        check_width("clipped_grad", self.width)
        width = self.microbatch_size
        rows, has_aux = examples("clipped_grad", batch), self.has_aux
        traced = trace_loss(
            "clipped_grad", self.loss, params, rows, has_aux=has_aux, alone=width == 1
        )
        is_real = _is_real(mask, traced.examples.size)
        microbatches = traced.microbatches(self.width) if width is None else Microbatches(width)
        if microbatches.size < traced.examples.size or microbatches.size == 1:
            sums, info = self._in_turn(traced, is_real, clip, microbatches)
            if totals is not None:
                _add_to_refs(totals, sums)
            return sums, info
        _, kept, second_pass = microbatches
        remat = second_pass and not self.per_layer
        grads = traced.gradients(traced.examples, width=self.width, remat=remat, kept=kept)
        scales, is_rough, info = self._scale(grads, is_real, clip)
        return grads.weighted_sum(scales, is_rough, totals), info

    def _in_turn(
        self, traced: TracedLoss, is_real: Array, clip: Any, microbatches: Microbatches
    ) -> tuple[Any, ClippedInfo]:
        """Return the sum of microbatches that are computed one after the other."""
        whole, (width, kept, second_pass) = traced.examples, microbatches
        size = whole.size
        count = -(-size // width)
        padding = count * width - size
        is_batched: list[bool] = []

        def split(a: Array) -> Array:
            if padding:
                a = jnp.concatenate([a, jnp.repeat(a[:1], padding, 0)])
            return a.reshape(count, width, *a.shape[1:])

        def join(a: Array) -> Array:
            return a.reshape(-1, *a.shape[2:])[:size]

        def add(sums: Any, microbatch: Any) -> tuple[Any, ClippedInfo]:
            number, rows, is_real = microbatch
            chosen = whole._replace(size=width, leaves=rows)
            if width == 1:
                grads = traced.gradients_of_one(number, chosen)
            else:
                remat = second_pass and not self.per_layer
                grads = traced.gradients(chosen, width=self.width, remat=remat, kept=kept)
            scales, is_rough, info = self._scale(grads, is_real, clip)
            is_batched[:] = grads.aux_is_batched
            of_rows = [
                a for a, own in zip(jax.tree.leaves(info.aux), is_batched, strict=True) if own
            ]
            sums = grads.plus_weighted_sum(sums, scales, is_rough)
            return sums, info._replace(aux=of_rows)

        zeros = jax.tree.unflatten(
            traced.treedef, [jnp.zeros(p.shape, sum_dtype(p)) for p in traced.leaves]
        )
        is_counted = split(is_real) & (jnp.arange(count * width) < size).reshape(count, width)
        parts = jnp.arange(count), list(map(split, whole.leaves)), is_counted
        (zeros, _) = equally_varying((zeros, parts))
        sums, info = jax.lax.scan(add, zeros, parts)
        nonfinite = info.nonfinite.sum()
        info = jax.tree.map(join, info._replace(nonfinite=info.losses))
        of_rows = iter(info.aux)
        shared = is_batched if all(is_batched) else traced.shared_aux()
        aux = [next(of_rows) if own else a for own, a in zip(is_batched, shared, strict=True)]
        tree = jax.tree.unflatten(jax.tree.structure(traced.aux), aux)
        return sums, info._replace(nonfinite=nonfinite, aux=tree)

    def _scale(
        self, grads: PerExampleGradients, is_real: Array, clip: Any
    ) -> tuple[Any, dict[int, Array | None], ClippedInfo]:
        """Return the scale of each parameter's gradients, which of them are rough, and the rest."""
        by_param = grads.squared_norms(whole=not self.per_layer)
        numbers = jax.tree.unflatten(grads.treedef, range(grads.treedef.num_leaves))
        groups = _clip_groups(clip, numbers, self.per_layer)
        totals = [SquaredNorms.total([by_param[i] for i in own]) for own in groups.members]
        squares = jnp.broadcast_to(sum_of([total.values for total in totals]), is_real.shape)
        # The gradient of a loss without a value may be finite: a label out of range.
        squares = jnp.where(jnp.isfinite(grads.losses), squares, jnp.nan)
        is_counted = is_real & jnp.isfinite(squares)

        scales, scales_by_param = [], []
        for bound, unit, own, total in zip(
            groups.bounds, groups.units, groups.members, totals, strict=True
        ):
            # Rounding may make the norm too small, see `SquaredNorms`.
            upper_norms = jnp.sqrt(total.upper)
            has_scale = is_counted & (upper_norms >= 0)  # NaN has none.
            scale = jnp.where(has_scale, self._scales(bound, unit, upper_norms), 0)
            # Otherwise XLA on CPU computes the scale again for each element of a sum.
            scales.append(computed_once(scale))
            scales_by_param += [scales[-1]] * len(own)
        norms = [jnp.where(is_real, jnp.sqrt(total.values), 0) for total in totals]
        info = ClippedInfo(
            losses=grads.losses,
            norms=jnp.where(is_real, jnp.sqrt(squares), 0),
            scales=groups.treedef.unflatten(scales),
            nonfinite=(is_real & ~is_counted).sum(),
            aux=grads.aux,
            norms_per_layer=groups.treedef.unflatten(norms) if self.per_layer else None,
        )
        is_rough = {i: norms.is_rough for i, norms in by_param.items()}
        return jax.tree.unflatten(grads.treedef, scales_by_param), is_rough, info

    def _of_complex(
        self, params: Any, batch: tuple[Any, ...], mask: Array | None, clip: Any
    ) -> tuple[Any, ClippedInfo]:
        """Differentiate with respect to real and imaginary parts, as `jax.grad` does."""

        def loss(parts: Any, *batch: Any) -> Any:
            return self.loss(_join_complex(parts, 1j), *batch)

        parts = jax.tree.map(
            lambda a: _Parts(jnp.real(a), jnp.imag(a)) if jnp.iscomplexobj(a) else a, params
        )
        sums, info = dataclasses.replace(self, loss=loss)(parts, *batch, mask=mask, clip=clip)
        return _join_complex(sums, -1j), info

    def _scales(self, bound: Any, unit: float, norms: Array) -> Array:
        """Scale gradients of these norms to at most ``bound``, or to ``unit`` if rescaled."""
        bound = jnp.asarray(bound, norms.dtype)
        bound = jnp.where(bound > 0, bound, 0)  # A traced bound may be negative or NaN.
        if self.automatic is not None:
            return (unit if self.rescale_to_unit_norm else bound) / (norms + self.automatic)
        if self.rescale_to_unit_norm:
            larger = jnp.maximum(norms, bound)
            return jnp.where(larger > 0, unit / jnp.where(larger > 0, larger, 1), 0)
        return jnp.where(norms > bound, bound / jnp.where(norms > bound, norms, 1), 1)


def _is_real(mask: Array | None, size: int) -> Array:
    is_real = jnp.ones(size, bool) if mask is None else jnp.asarray(mask) != 0
    if is_real.shape != (size,):
        raise ValueError(f"clipped_grad: mask must have shape [{size}], got {is_real.shape}")
    return is_real


def _add_to_refs(totals: Any, sums: Any) -> None:
    jax.tree.map(lambda a, g: jax.ref.addupdate(a, ..., g.astype(a.dtype)), totals, sums)


class _Parts(NamedTuple):
    real: Array
    imag: Array


def _join_complex(tree: Any, unit: complex) -> Any:
    def join(a: Any) -> Any:
        return a.real + unit * a.imag if isinstance(a, _Parts) else a

    return jax.tree.map(join, tree, is_leaf=lambda a: isinstance(a, _Parts))


def gradient_strategies(
    loss: PerExampleLoss, params: Any, *batch: Any, has_aux: bool = False, width: int | None = None
) -> Any:
    """Show how `clipped_grad` computes norms and sums for each parameter.

    ============================  ===============================================================
    strategy                      per-example gradients of the parameter
    ============================  ===============================================================
    ``"ghost norm"``              are not materialized: norms and sums follow from inputs and
                                  cotangents of the layers
    ``"materialized"``            are products of inputs and cotangents, and small enough to
                                  materialize
    ``"materialized in chunks"``  are such products, or come from automatic differentiation of one
                                  operation, a few examples at a time
    ``"derived"``                 follow from gradients of a value that is computed from parameters
                                  alone, such as a masked or normalized kernel
    ``"rematerialized"``          are inside of `jax.checkpoint`: norms are computed in the backward
                                  pass, sums in a second one, and nothing is saved
    ``"autodiff"``                come from automatic differentiation, and are materialized
    ``"autodiff in chunks"``      come from automatic differentiation, a few examples at a time
    ``"one example at a time"``   come from `jax.grad` of one example after the other, clipped and
                                  added in place
    ``"unused"``                  are 0: the losses do not depend on the parameter
    ============================  ===============================================================

    Args:
      loss: As in `clipped_grad`.
      params: Arrays or their shapes.
      *batch: Arrays or their shapes.
      has_aux: As in `clipped_grad`.
      width: As in `clipped_grad`.

    Returns:
      A strategy for each parameter, like params.

    Raises:
      ValueError, TypeError: As the function that `clipped_grad` returns.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, x):
      ...     # A masked kernel is derived from another.
      ...     kernel = params["kernel"] * jnp.tri(8)
      ...     return ((x @ params["embed"]) @ kernel).sum(-1)
      >>> params = {"embed": jnp.ones((4, 8)), "kernel": jnp.ones((8, 8))}
      >>> fnet.autodiff.gradient_strategies(loss, params, jnp.ones((2, 4)))
      {'embed': 'ghost norm', 'kernel': 'derived'}
    """
    strategies = []

    def trace(params: Any, batch: Any) -> None:
        name = "gradient_strategies"
        check_width(name, width)
        traced = trace_loss(name, loss, params, examples(name, batch), has_aux=has_aux)
        size, kept, remat = traced.microbatches(width)
        if size == 1 < traced.examples.size:
            one = ["one example at a time"] * len(traced.leaves)
            strategies.append(jax.tree.unflatten(traced.treedef, one))
        else:
            grads = traced.gradients(traced.examples, width=width, remat=remat, kept=kept)
            strategies.append(grads.strategies())

    jax.eval_shape(trace, params, batch)
    return strategies[0]


def contributions_changed(neighboring_relation: Any) -> int:
    """Count the contributions that differ between neighboring batches: 1, or 2 if replaced."""
    relations = {"ADD_OR_REMOVE_ONE": 1, "REPLACE_SPECIAL": 1, "REPLACE_ONE": 2}
    relation = getattr(neighboring_relation, "name", neighboring_relation)
    if relation not in relations:
        raise ValueError(
            f"sensitivity: neighboring_relation must be one of {list(relations)}, got "
            f"{neighboring_relation!r}"
        )
    return relations[relation]


class _Groups(NamedTuple):
    """Groups of parameters that are clipped together.

    Attributes:
      treedef: Structure of the groups.
      bounds: Bound of each.
      units: Its norm if gradients are rescaled to unit norm.
      members: Indices of its parameters.
    """

    treedef: Any
    bounds: list[Any]
    units: list[float]
    members: list[list[int]]


def _clip_groups(clip: Any, numbers: Any, per_layer: bool) -> _Groups:
    """Split params, here their indices, into groups with one bound each."""
    treedef: Any
    bounds, treedef = jax.tree.flatten(clip)
    if not per_layer:
        return _Groups(treedef, [clip], [1.0], [jax.tree.leaves(numbers)])
    if jax.tree_util.all_leaves([clip]):
        leaves, treedef = jax.tree.flatten(numbers, is_leaf=lambda a: isinstance(a, _Parts))
        share = max(len(leaves), 1) ** -0.5
        alone = list(map(jax.tree.leaves, leaves))
        return _Groups(treedef, [clip * share] * len(leaves), [share] * len(leaves), alone)
    try:
        members = list(map(jax.tree.leaves, treedef.flatten_up_to(numbers)))
        return _Groups(treedef, bounds, [1.0] * len(bounds), members)
    except ValueError as error:
        raise ValueError(
            "clipped_grad: with per_layer=True, clip must be a number or a tree that is a prefix "
            f"of params, {jax.tree.structure(numbers)}, got {treedef}"
        ) from error


def check_clip(clip: Any, per_layer: bool, automatic: float | None) -> None:
    """Reject bounds out of range. The arguments have the meaning they have in `clipped_grad`."""
    if not per_layer and not jax.tree_util.all_leaves([clip]):
        raise ValueError(
            f"clipped_grad: clip must be a number, got {clip!r}; a tree of bounds needs "
            "per_layer=True"
        )
    for bound in jax.tree.leaves(clip):
        if isinstance(bound, jax.core.Tracer):
            continue
        if not bound >= 0:
            raise ValueError(f"clipped_grad: clip must be >= 0, got {float(bound)}")
        if bound == float("inf") and automatic is not None:
            raise ValueError("clipped_grad: clip must be finite with automatic, got inf")
    checks.numbers("clipped_grad", "> 0", automatic=automatic)
