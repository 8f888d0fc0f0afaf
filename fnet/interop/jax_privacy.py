"""`jax_privacy.clipped_grad` without materialized per-example gradients.

Change the import, and nothing else in a program::

    from jax_privacy.clipping import clipped_grad  # before
    from fnet.interop.jax_privacy import clipped_grad  # after

jax_privacy does not need to be installed. Arguments and results follow its version 2.3.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fnet.autodiff.per_example import clipped
from fnet.precision import sum_dtype


class AuxiliaryOutput(NamedTuple):
    """Per-example results of `clipped_grad`. Each is None if it was not asked for.

    Attributes:
      values: Values of the function, [batch].
      grad_norms: Gradient norms before clipping, [batch], 0 for padding. With a tree of bounds,
        a tree like it, with the norm of each group.
      aux: Auxiliary output of the function, [batch, ...].
    """

    values: Any
    grad_norms: Any
    aux: Any


@dataclasses.dataclass(frozen=True, eq=False)
class BoundedSensitivityCallable:
    """A function whose first result has a bounded sensitivity.

    Attributes:
      bounded_sensitivity_fun: The function.
      l2_norm_bound: Largest change of the norm of its result if one example is added or removed.
      has_aux: Whether it returns ``(result, AuxiliaryOutput)``.
    """

    bounded_sensitivity_fun: Callable[..., Any]
    l2_norm_bound: Any
    has_aux: bool

    def __call__(self, *args: Any, is_padding_example: Array | None = None, **kwargs: Any) -> Any:
        """Call the function. Examples [batch] with ``is_padding_example`` contribute 0."""
        return self.bounded_sensitivity_fun(*args, is_padding_example=is_padding_example, **kwargs)

    def sensitivity(self, neighboring_relation: Any = "REPLACE_SPECIAL") -> Any:
        """Return the L2 sensitivity, see `fnet.autodiff.per_example.clipped.ClippedGrad`."""
        return clipped.contributions_changed(neighboring_relation) * self.l2_norm_bound


def clipped_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Callable[[Any], Any] | None = None,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: DTypeLike | None = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
    grid_scale: int | None = None,
) -> BoundedSensitivityCallable:
    """Clip per-example gradients and sum them, with the signature of jax_privacy.

    The gradient of example b is the gradient of ``fun`` for a batch that holds b alone. Norms and
    sums come from `fnet.clipped_grad`, so gradients are not materialized. They are materialized
    with ``pre_clipping_transform``, ``spmd_axis_name`` or ``grid_scale``, as in jax_privacy.

    Guarantees:
      - Adding or removing one example changes the sum by a norm of at most ``sensitivity()`` of
        the returned function.
      - Results of one example do not depend on other examples.

    In contrast to jax_privacy, sums are float32 or wider also for bfloat16 parameters, padding has
    a ``grad_norms`` of 0, microbatches of padding are skipped wherever they are, and with
    ``nan_safe=False`` the whole sum is NaN if a gradient is not finite.

    Args:
      fun: ``fun(*args, **kwargs) -> value []``, or ``(value, aux)`` with ``has_aux``.
      argnums, has_aux, normalize_by, keep_batch_dim, return_values: As in jax_privacy.
      return_grad_norms, prng_argnum, spmd_axis_name: As in jax_privacy.
      l2_clip_norm: Largest norm of an example's gradient, or a tree that is a prefix of the
        gradient with one bound for all arrays below each of its leaves.
      rescale_to_unit_norm: Whether to divide gradients by ``l2_clip_norm``.
      batch_argnums: Arguments whose arrays have a leading axis of examples. Keyword arguments
        have one too.
      pre_clipping_transform: Function of an example's gradient that returns what is clipped.
      microbatch_size: Number of examples at a time. By default all.
      nan_safe: Whether examples with a gradient that is not finite contribute 0.
      dtype: Dtype of the result, by default float32 or wider. In a narrower one, the sum of n
        examples is rounded by up to ``n * eps / 2`` bounds, which ``sensitivity()`` leaves out.
        There is a warning; add the noise before you cast.
      grid_scale: Number of steps of a grid per ``l2_clip_norm``: each clipped gradient is divided
        by the step and rounded, for the discrete Gaussian mechanism. It is clipped to
        ``l2_clip_norm - sqrt(elements) * step / 2``, so that its norm is at most ``grid_scale``.
        The sum is int64, which needs ``jax_enable_x64``.

    Returns:
      A function of the arguments of ``fun`` and of ``is_padding_example`` [batch]. It returns the
      sum, or ``(sum, AuxiliaryOutput)`` if anything else is asked for. Its ``sensitivity()`` is
      the L2 sensitivity of the sum.

    Raises:
      ValueError: An argument is out of range, or an argument number is in both ``argnums`` and
        ``batch_argnums``. When called: arrays differ in the size of their leading axis, or it is
        not divisible by ``microbatch_size``.
      TypeError: When called: ``fun`` does not return a scalar, or arguments to differentiate are
        not floating-point.

    Example:
      >>> import jax.numpy as jnp
      >>> from fnet.interop.jax_privacy import clipped_grad
      >>> loss = lambda params, x: jnp.mean(x @ params)  # its gradients are x
      >>> options = {"normalize_by": 2.0, "return_grad_norms": True}
      >>> gradient = clipped_grad(loss, l2_clip_norm=1.0, **options)
      >>> total, aux = gradient(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
      >>> print(total, aux.grad_norms, gradient.sensitivity())
      [0.3  0.65] [5.  0.5] 0.5

    References: `jax_privacy.clipping.clipped_grad`, https://github.com/google-deepmind/jax_privacy.
    """
    if dtype is not None and jnp.dtype(dtype).itemsize < 4:
        warnings.warn(
            f"clipped_grad: a sum that is rounded to {jnp.dtype(dtype).name} may move by more than "
            "sensitivity(). Add the noise before you cast it",
            stacklevel=2,
        )
    numbers = _as_tuple(argnums)
    batch_numbers = _as_tuple(batch_argnums)
    _check_numbers(numbers, batch_numbers)
    if not normalize_by > 0:
        raise ValueError(f"clipped_grad: normalize_by must be > 0, got {normalize_by}")
    per_layer = not jax.tree_util.all_leaves([l2_clip_norm])
    if grid_scale is not None:
        _check_grid(rescale_to_unit_norm, normalize_by, per_layer)
    is_materialized = (
        pre_clipping_transform is not None or spmd_axis_name is not None or grid_scale is not None
    )
    transform = pre_clipping_transform or (lambda grads: grads)
    how = {"rescale_to_unit_norm": rescale_to_unit_norm, "per_layer": per_layer}
    bound = clipped.clipped_grad(fun, l2_clip_norm, **how).sensitivity() / normalize_by

    def gradient(*args: Any, is_padding_example: Array | None = None, **kwargs: Any) -> Any:
        size = _batch_size([args[i] for i in batch_numbers if i < len(args)], kwargs)
        is_padding = _check_padding(is_padding_example, size)
        rows = {i: args[i] for i in batch_numbers}
        if prng_argnum is not None:
            rows[prng_argnum] = jax.tree.map(
                lambda key: jax.random.split(key, size), args[prng_argnum]
            )
        params = tuple(args[i] for i in numbers)

        def value_and_aux(params: Any, row: Any) -> tuple[Array, Any]:
            given, keywords = row
            if keep_batch_dim:
                given = given | jax.tree.map(
                    lambda a: jnp.expand_dims(a, 0), {i: given[i] for i in batch_numbers}
                )
            given = given | dict(zip(numbers, params, strict=True))
            out = fun(*(given.get(i, arg) for i, arg in enumerate(args)), **keywords)
            value, aux = out if has_aux else (out, None)
            if jnp.shape(value) != ():
                raise TypeError(
                    f"clipped_grad: fun must return a scalar, got shape {jnp.shape(value)}"
                )
            return value, aux

        def fused(rows: Any, is_padding: Array) -> tuple[Any, Array, AuxiliaryOutput]:
            def losses(wide: Any, rows: Any) -> Any:
                own = jax.tree.map(lambda p, like: p.astype(jnp.result_type(like)), wide, params)
                return jax.vmap(lambda row: value_and_aux(own, row))(rows)

            clip = (l2_clip_norm,) if per_layer and isinstance(argnums, int) else l2_clip_norm
            total, info = clipped.clipped_grad(losses, clip, **how, has_aux=True)(
                _widened(params), rows, mask=~is_padding
            )
            norms = info.norms_per_layer if per_layer else info.norms
            if isinstance(argnums, int):
                total, norms = total[0], norms[0] if per_layer else norms
            size = is_padding.shape
            aux = jax.tree.map(lambda a: jnp.broadcast_to(a, (*size, *a.shape[1:])), info.aux)
            return total, info.nonfinite, AuxiliaryOutput(info.losses, norms, aux)

        def materialized(rows: Any, is_padding: Array) -> tuple[Any, Array, AuxiliaryOutput]:
            def values_and_grad(row: Any) -> Any:
                (value, aux), grads = jax.value_and_grad(value_and_aux, has_aux=True)(params, row)
                grads = grads[0] if isinstance(argnums, int) else grads
                norms = jax.tree.map(lambda _, g: _norm(g), l2_clip_norm, grads)
                return transform(grads), AuxiliaryOutput(value, norms, aux)

            grads, per_example = jax.vmap(values_and_grad, spmd_axis_name=spmd_axis_name)(rows)
            zeros = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], g.dtype), grads)
            clip = l2_clip_norm
            if grid_scale is not None:
                elements = sum(zero.size for zero in jax.tree.leaves(zeros))
                clip = _clip_for_grid(clip, grid_scale, elements)
            total, info = clipped.clipped_grad(_inner_products, clip, **how)(
                _widened(zeros), grads, mask=~is_padding
            )
            if grid_scale is not None:
                total = _sum_on_grid(grads, info.scales * (grid_scale / l2_clip_norm))
            return total, info.nonfinite, per_example

        part = materialized if is_materialized else fused
        if microbatch_size is None:
            total, nonfinite, per_example = part((rows, kwargs), is_padding)
        else:
            total, nonfinite, per_example = _in_microbatches(
                part, (rows, kwargs), is_padding, microbatch_size
            )
        if grid_scale is None:
            scale = (
                1 / normalize_by
                if nan_safe
                else jnp.where(nonfinite > 0, jnp.nan, 1 / normalize_by)
            )
            total = jax.tree.map(lambda g: (g * scale).astype(dtype or g.dtype), total)
        if not (has_aux or return_values or return_grad_norms):
            return total
        aux = per_example.aux
        if keep_batch_dim:
            aux = jax.tree.map(lambda a: a[:, 0] if a.shape[1:2] == (1,) else a, aux)
        return total, AuxiliaryOutput(
            values=per_example.values if return_values else None,
            grad_norms=per_example.grad_norms if return_grad_norms else None,
            aux=aux if has_aux else None,
        )

    return BoundedSensitivityCallable(
        gradient,
        bound if grid_scale is None else float(grid_scale),
        has_aux or return_values or return_grad_norms,
    )


def _as_tuple(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _check_numbers(argnums: tuple[int, ...], batch_argnums: tuple[int, ...]) -> None:
    if not batch_argnums:
        raise ValueError("clipped_grad: Batch Argnums must not be empty")
    if min(argnums + batch_argnums) < 0:
        raise ValueError(
            f"clipped_grad: argnums and batch_argnums must be >= 0, got {argnums} and "
            f"{batch_argnums}"
        )
    overlap = sorted({*argnums} & {*batch_argnums})
    if overlap:
        raise ValueError(
            f"clipped_grad: argnums {argnums} and batch_argnums {batch_argnums} overlap in "
            f"{overlap}; parameters have no batch axis"
        )


def _check_grid(rescale_to_unit_norm: bool, normalize_by: float, per_layer: bool) -> None:
    if rescale_to_unit_norm or normalize_by != 1.0 or per_layer:
        raise ValueError(
            "clipped_grad: grid_scale needs a number as l2_clip_norm, "
            "rescale_to_unit_norm=False and normalize_by=1"
        )
    if jax.dtypes.canonicalize_dtype(jnp.int64) != jnp.int64:
        raise ValueError(
            "clipped_grad: grid_scale needs 64-bit integers; call "
            'jax.config.update("jax_enable_x64", True)'
        )


def _batch_size(args: Sequence[Any], kwargs: Any) -> int:
    shapes = [jnp.shape(a) for a in jax.tree.leaves((args, kwargs))]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            "clipped_grad: batch arguments and keyword arguments must have the same size along "
            f"axis 0, got shapes {shapes}"
        )
    ((size,),) = sizes
    return size


def _check_padding(is_padding: Array | None, size: int) -> Array:
    is_padding = jnp.zeros(size, bool) if is_padding is None else jnp.asarray(is_padding)
    if is_padding.shape != (size,) or is_padding.dtype != bool:
        raise ValueError(
            f"clipped_grad: is_padding_example must be bool with shape [{size}], got "
            f"{is_padding.dtype} with shape {is_padding.shape}"
        )
    return is_padding


def _widened(params: Any) -> Any:
    def widened(p: Any) -> Any:
        is_floating = jnp.issubdtype(jnp.result_type(p), jnp.floating)
        return jnp.asarray(p, sum_dtype(p)) if is_floating else p  # `clipped_grad` rejects others.

    return jax.tree.map(widened, params)


def _norm(grads: Any) -> Array:
    squares = [jnp.square(g.astype(sum_dtype(g))).sum() for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def _inner_products(params: Any, grads: Any) -> Any:
    """Losses whose per-example gradients are ``grads``, arrays [batch, ...]."""

    def products(p: Array, g: Array) -> Array:
        return g.reshape(len(g), p.size).astype(p.dtype) @ p.ravel()

    return sum(jax.tree.leaves(jax.tree.map(products, params, grads)))


def _clip_for_grid(clip: Any, grid_scale: int, elements: int) -> Any:
    """Lower a bound by the norm of rounding errors on the grid, half a step per element."""
    lowered = clip * (1 - elements**0.5 / (2 * grid_scale))
    if not isinstance(lowered, jax.core.Tracer) and not lowered > 0:
        raise ValueError(
            f"clipped_grad: grid_scale must be above sqrt(elements) / 2 = {elements**0.5 / 2:.4g} "
            f"for gradients of {elements} elements, got {grid_scale}"
        )
    return lowered


def _sum_on_grid(grads: Any, scales: Array) -> Any:
    def total(g: Array) -> Array:
        s = scales.reshape(-1, *[1] * (g.ndim - 1))
        return jnp.round(jnp.where(s > 0, g * s, 0)).astype(jnp.int64).sum(0)

    return jax.tree.map(total, grads)


def _in_microbatches(
    part: Callable[[Any, Array], tuple[Any, Array, AuxiliaryOutput]],
    rows: Any,
    is_padding: Array,
    size: int,
) -> tuple[Any, Array, AuxiliaryOutput]:
    """Call ``part`` for ``size`` examples at a time, and add up its sums.

    A microbatch takes every n-th example, so that it has rows of each device.
    """
    if size < 1 or len(is_padding) % size:
        raise ValueError(
            f"clipped_grad: the batch of {len(is_padding)} examples must be divisible by "
            f"microbatch_size, got {size}"
        )

    def split(a: Array) -> Array:
        return jnp.swapaxes(jnp.reshape(a, (size, len(a) // size, *a.shape[1:])), 0, 1)

    def join(a: Array) -> Array:
        return jnp.swapaxes(a, 0, 1).reshape(len(is_padding), *a.shape[2:])

    parts = jax.tree.map(split, (rows, is_padding))
    shapes = jax.eval_shape(part, *jax.tree.map(lambda a: a[0], parts))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

    def add(total: Any, microbatch: Any) -> Any:
        sums, nonfinite, per_example = jax.lax.cond(
            microbatch[1].all(), lambda *_: zeros, part, *microbatch
        )
        return jax.tree.map(jnp.add, total, (sums, nonfinite)), per_example

    (total, nonfinite), per_example = jax.lax.scan(add, zeros[:2], parts)
    return total, nonfinite, jax.tree.map(join, per_example)
