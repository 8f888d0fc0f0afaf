"""Gradient modes of train steps that look at every example's gradient."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from fnet.autodiff.accumulate import equal_parts
from fnet.autodiff.mean import Gradient, Loss, losses_and_aux, weighted_mean
from fnet.autodiff.per_example.batch_axis import depends_on
from fnet.autodiff.per_example.clipped import ClippedInfo, clipped_grad
from fnet.autodiff.per_example.gradients import noise_scale
from fnet.autodiff.update import Mode, squared_norm
from fnet.precision import wide


def clipped(
    clip: float,
    *,
    noise_multiplier: float = 0.0,
    expected_batch_size: float | None = None,
    per_layer: bool = False,
    automatic: float | None = None,
    microbatches: int = 1,
) -> "ClippedMode":
    """The gradient mode of private training: clipped, noised, averaged.

        (sum_b s_b g_b + noise_multiplier * clip * N(0, 1)) / expected_batch_size

    with s_b as in `fnet.clipped_grad` (DP-SGD: Abadi et al. 2016). Noise is float32, drawn
    from the step's key and the parameter's number.

    Args:
      clip: the bound on each example's gradient.
      noise_multiplier: standard deviation of the noise, in units of the bound.
      expected_batch_size: what sums are divided by: for Poisson sampling the mean
        batch size, which must not depend on the batch. By default the examples are
        counted that are no padding and have a finite gradient.
      per_layer: each parameter array has an equal share of the bound.
      automatic: as in `fnet.clipped_grad`.
      microbatches: in how many parts a batch is taken, one after the other.

    Returns:
      A mode for `fnet.make_step`. ``weight`` 0 in a batch is padding, any other counts as 1.
      Metrics beside those of the loss: ``clipped``, the share of examples whose whole norm is
      above the bound; ``norm_median`` and ``norm_max`` of their gradients; ``nonfinite``, how
      many were left out.

    Raises:
      ValueError: for bounds that `fnet.clipped_grad` refuses, noise below 0 or not
        finite, noise without ``expected_batch_size`` or with an infinite bound, an
        expected size that is not above 0, and less than one microbatch; when called
        with noise, for a model state that is made of the examples.
    """
    return ClippedMode(
        clip, noise_multiplier, expected_batch_size, per_layer, automatic, microbatches
    )


@dataclasses.dataclass(frozen=True)
class ClippedMode(Mode):
    """The mode that `clipped` returns; its fields are the arguments of `clipped`."""

    clip: float
    noise_multiplier: float = 0.0
    expected_batch_size: float | None = None
    per_layer: bool = False
    automatic: float | None = None
    microbatches: int = 1
    splittable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject values out of range before anything is traced."""
        check_private("clipped", self.noise_multiplier, self.expected_batch_size, self.microbatches)
        if self.noise_multiplier and not self.clip < float("inf"):
            raise ValueError(
                f"clipped: noise is in units of the clip, which must be finite, got {self.clip}"
            )
        self._clipped_grad(_no_loss)  # checks clip, per_layer and automatic

    def _clipped_grad(self, loss: Callable[..., Any]) -> Callable[..., tuple[Any, ClippedInfo]]:
        return clipped_grad(
            loss, self.clip, per_layer=self.per_layer, automatic=self.automatic, has_aux=True
        )

    def __call__(self, loss: Loss) -> Gradient:
        """Return the gradient function of a loss."""
        # 0 times an infinite clip is nan.
        noise = self.noise_multiplier * self.clip if self.noise_multiplier else 0.0

        def gradient(
            params: Any, model_state: Any, batch: dict[str, Array], key: Array
        ) -> tuple[Any, Any, dict[str, Array]]:
            each = per_example_loss(loss, model_state, params)
            sums, info, counts, noise_key = clipped_sum(
                "clipped", self._clipped_grad(each), params, model_state, batch, key,
                self.microbatches,
            )  # fmt: skip
            if self.noise_multiplier:
                check_state("clipped", each, params, batch, key)
            grads = noised_mean(sums, noise, self.expected_batch_size, counts, noise_key)
            metrics, state = summary(info, counts, model_state)
            metrics |= {"clipped": share_above(self.clip, info, counts)}
            return as_those(grads, params), state, metrics

        return gradient


def per_example() -> "PerExampleMode":
    """The gradient mode that measures noise: the mean gradient, and the norms of all examples'.

    ``weight`` 0 in a batch is padding; every other example counts as one, whatever its weight,
    where `fnet.autodiff.mean` takes a weighted mean.

    Returns:
      A mode for `fnet.make_step`. Metrics beside those of the loss: ``norm_median``, ``norm_max``;
      ``grad_sq`` and ``grad_var``, whose averages over steps give the simple noise
      scale ``grad_var / grad_sq`` in examples (`fnet.autodiff.noise_scale`);
      ``nonfinite``, how many examples were left out.
    """
    return PerExampleMode()


@dataclasses.dataclass(frozen=True)
class PerExampleMode(Mode):
    """The mode that `per_example` returns."""

    def __call__(self, loss: Loss) -> Gradient:
        """Return the gradient function of a loss."""

        def gradient(
            params: Any, model_state: Any, batch: dict[str, Array], key: Array
        ) -> tuple[Any, Any, dict[str, Array]]:
            function = clipped_grad(
                per_example_loss(loss, model_state, params), float("inf"), has_aux=True
            )
            sums, info = function(_wide(params), batch, key, mask=batch.get("weight"))
            counts = _counting(info, batch.get("weight"))
            grads = jax.tree.map(lambda g: g / jnp.maximum(counts.sum(), 1), sums)
            metrics, state = summary(info, counts, model_state)
            scale = noise_scale(info.norms, jnp.sqrt(squared_norm(grads)), counts)
            return as_those(grads, params), state, metrics | scale._asdict()

        return gradient


def check_private(
    name: str, noise_multiplier: float, expected_batch_size: float | None, microbatches: int
) -> None:
    """Refuses noise, sizes and microbatches that no private mode can have."""
    if not 0 <= noise_multiplier < float("inf"):
        raise ValueError(
            f"{name}: noise_multiplier must be at least 0 and finite, got {noise_multiplier}"
        )
    if noise_multiplier and expected_batch_size is None:
        raise ValueError(
            f"{name}: with noise the sum is divided by a number that does not depend on the "
            "batch; give expected_batch_size"
        )
    if expected_batch_size is not None and not expected_batch_size > 0:
        raise ValueError(f"{name}: expected_batch_size must be above 0, got {expected_batch_size}")
    if microbatches < 1:
        raise ValueError(f"{name}: microbatches must be at least 1, got {microbatches}")


def check_state(
    name: str, each: Callable[..., Any], params: Any, batch: dict[str, Array], key: Array
) -> None:
    """Refuses a state that is made of the examples: noise covers the gradient alone."""
    closed, shapes = jax.make_jaxpr(
        lambda batch: each(params, batch, key)[1][1], return_shape=True
    )(batch)
    of_batch = depends_on(closed, [True] * len(closed.in_avals))
    states = jax.tree_util.tree_leaves_with_path(shapes)
    made = [
        jax.tree_util.keystr(path)
        for (path, _), depending in zip(states, of_batch, strict=True)
        if depending
    ]
    if made:
        raise ValueError(
            f"{name}: the model state {', '.join(made)} is made of the examples, and no noise "
            "covers it: nothing would be private; leave out the layer that keeps it"
        )


def _no_loss(params: Any) -> Array:
    raise NotImplementedError


def per_example_loss(loss: Loss, model_state: Any, like: Any) -> Callable[..., Any]:
    """``(params, batch, key) -> (losses, (metrics, model state))``, of params cast to those."""

    def function(params: Any, batch: dict[str, Array], key: Array) -> tuple[Array, Any]:
        params = as_those(params, like)
        losses, aux = losses_and_aux(loss(params, model_state, batch, key), model_state)
        return losses, (aux.metrics, aux.model_state)

    return function


def as_those(tree: Any, like: Any) -> Any:
    """A tree in the dtypes of another."""
    return jax.tree.map(lambda a, b: _cast(a, jnp.result_type(b)), tree, like)


def _wide(params: Any) -> Any:
    """In float32 at least: sums have the dtype of params, and none is rounded before its noise."""

    def one(p: Any) -> Any:
        floating = jnp.issubdtype(jnp.result_type(p), jnp.floating)  # what is not is refused
        return _cast(p, wide(p)) if floating else p

    return jax.tree.map(one, params)


def _cast(a: Any, dtype: Any) -> Any:
    return a if jnp.result_type(a) == dtype else jnp.asarray(a, dtype)


def _counting(info: ClippedInfo, weight: Array | None) -> Array:
    """1 for examples that are real and have a finite gradient, [batch]."""
    counts = jnp.isfinite(info.norms)
    return (counts if weight is None else counts & (weight != 0)).astype(jnp.float32)


def clipped_sum(
    name: str,
    function: Callable[..., tuple[Any, ClippedInfo]],
    params: Any,
    model_state: Any,
    batch: dict[str, Array],
    key: Array,
    microbatches: int,
) -> tuple[Any, ClippedInfo, Array, Array]:
    """A batch's sum, what is said of it, which examples count, and a key for noise.

    Sums are float32 at least, whatever the parameters are.
    """
    drawn, noise_key = jax.random.split(key)
    sums, info = _in_parts(name, function, _wide(params), model_state, batch, drawn, microbatches)
    return sums, info, _counting(info, batch.get("weight")), noise_key


def _in_parts(
    name: str,
    function: Callable[..., tuple[Any, ClippedInfo]],
    params: Any,
    model_state: Any,
    batch: dict[str, Array],
    key: Array,
    n: int,
) -> tuple[Any, ClippedInfo]:
    """The function of a batch, in n parts one after the other, sums added up in place."""
    if n == 1:
        return function(params, batch, key, mask=batch.get("weight"))
    parts = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), equal_parts(name, batch, n))
    size = jax.tree.leaves(parts)[0].shape[1]

    def add(sums: Any, part: Any) -> tuple[Any, ClippedInfo]:
        i, rows = part
        more, info = function(params, rows, jax.random.fold_in(key, i), mask=rows.get("weight"))
        return jax.tree.map(jnp.add, sums, more), info

    zeros = jax.tree.map(jnp.zeros_like, params)
    sums, infos = jax.lax.scan(add, zeros, (jnp.arange(n), parts))

    def joined(a: Array) -> Array:
        if a.shape[1:2] != (size,):
            return a[0]  # the same in all parts
        return jax.lax.collapse(jnp.swapaxes(a, 0, 1), 0, 2)

    def renewed(before: Array, after: Array) -> Array:
        return after[0] if after.ndim == before.ndim + 1 else joined(after)

    metrics, states = infos.aux
    info = jax.tree.map(joined, infos._replace(aux=metrics))
    # A state's own first axis may be as long as a part.
    states = jax.tree.map(renewed, model_state, states)
    return sums, info._replace(aux=(info.aux, states), nonfinite=infos.nonfinite.sum())


def noised_mean(
    sums: Any, deviation: Array | float, size: float | None, counts: Array, key: Array
) -> Any:
    """Sums with noise of that deviation, over the expected size or over those that count."""
    if not (isinstance(deviation, float) and deviation == 0):
        sums = _noised(sums, deviation, key)
    return jax.tree.map(lambda g: g / (size or jnp.maximum(counts.sum(), 1)), sums)


def share_above(clip: Array | float, info: ClippedInfo, counts: Array) -> Array:
    """Of the examples that count, [] in [0, 1]."""
    return weighted_mean((info.norms > clip).astype(jnp.float32), counts)


def _noised(sums: Any, deviation: Array | float, key: Array) -> Any:
    leaves, structure = jax.tree.flatten(sums)
    noisy = [
        (g + deviation * jax.random.normal(jax.random.fold_in(key, i), g.shape)).astype(g.dtype)
        for i, g in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, noisy)


def summary(info: ClippedInfo, counts: Array, model_state: Any) -> tuple[dict[str, Array], Any]:
    """Metrics as means over the examples that count, and the model state, averaged likewise."""
    metrics, states = info.aux
    means = {name: weighted_mean(values, counts) for name, values in metrics.items()}
    norms = jnp.where(counts > 0, info.norms, jnp.nan)

    def renewed(before: Array, after: Array) -> Array:
        if after.shape == before.shape:
            return after
        mean = jax.vmap(functools.partial(weighted_mean, weight=counts), -1)
        flat = after.reshape(len(after), -1)
        of_all = mean(flat).reshape(before.shape).astype(before.dtype)
        return jnp.where(counts.sum() > 0, of_all, before)

    # Of no examples at all, 0; but where none of those that there are has a finite gradient, nan.
    lost = (counts.sum() == 0) & (info.nonfinite > 0)
    return {
        **means,
        "loss": jnp.where(lost, jnp.nan, weighted_mean(info.losses, counts)),
        "norm_median": jnp.nan_to_num(jnp.nanmedian(norms)),
        "norm_max": jnp.nan_to_num(jnp.nanmax(norms, initial=0)),
        "nonfinite": info.nonfinite.astype(jnp.float32),
    }, jax.tree.map(renewed, model_state, states)
