"""Gradient modes for DP-SGD, automatic clipping and the gradient noise scale."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet import checks
from fnet.autodiff.accumulate import split_batch
from fnet.autodiff.mean import Gradient, Loss, losses_and_aux, weighted_mean
from fnet.autodiff.per_example.clipped import ClippedGrad, ClippedInfo, check_clip, clipped_grad
from fnet.autodiff.per_example.gradients import noise_scale
from fnet.autodiff.update import Mode, Update, carried_update, carrying, squared_norm
from fnet.jaxpr import depends_on
from fnet.noise.correlated import DP_SGD, Strategy, add_correlated_noise
from fnet.noise.gaussian import add_noise, factor_at
from fnet.noise.schedules import Schedule, check_schedule
from fnet.precision import sum_dtype


class StepKey(NamedTuple):
    """Randomness of a step whose noise depends on earlier steps.

    Attributes:
      key: Random key of this step, ``fold_in(run, step)``.
      run: Random key of the run.
      step: Number of the step, int32 [].
    """

    key: Array
    run: Array
    step: Array


@dataclasses.dataclass(frozen=True)
class ClippedMode(Mode):
    """Clip per-example gradients, add noise and average them: the mode for DP-SGD and DP-FTRL.

        (sum_b s_b g_b + noise_multiplier * clip * z) / expected_batch_size,      z ~ N(0, 1)

    with the scales s_b of `fnet.clipped_grad` (DP-SGD: Abadi et al. 2016). Noise is drawn in
    float32 from the step's key, with a key of its own for each parameter. With a ``strategy``, the
    noise of step i is correlated over steps: ``sum_j strategy.noising[i, j] z[i - j]`` in place of
    z. A schedule multiplies the clip or ``noise_multiplier`` by factors from given steps on.

    Guarantees:
      - The sum has an L2 sensitivity of ``clip``. Its noise has a standard deviation of
        ``noise_multiplier * clip`` and is added once per step, whatever ``microbatches`` is.
      - Sum and noise are added in float32 or wider, then cast to the dtype of the parameter.
      - Correlated noise is drawn again from the keys of earlier steps and added in place. Nothing
        is stored, unless the strategy has buffers. One band equals DP-SGD bit for bit.
      - With noise, the model state does not depend on the examples.
      - Metrics have no noise. They are not private.

    ================================  ===========================================================
    edge case                         result
    ================================  ===========================================================
    ``weight`` 0 in the batch         padding: contributes 0; any other weight counts as 1
    loss or gradient is not finite    contributes 0, and the metric ``nonfinite`` counts it
    batch of padding only             noise, or 0 without noise
    batch norm                        ValueError, see `fnet.clipped_grad`
    ================================  ===========================================================

    `fnet.make_step` takes this mode. It adds these metrics: ``clipped``, the fraction of examples
    whose gradient norm is above ``clip``; ``norm_median`` and ``norm_max``, of the gradient norms;
    ``nonfinite``, the number of examples with a loss or a gradient that is not finite.

    Attributes:
      clip: Largest norm of an example's gradient.
      noise_multiplier: Standard deviation of the noise in units of ``clip``.
      expected_batch_size: Divisor of the sum. For Poisson sampling, give the mean batch size: it
        must not depend on the batch. By default the number of examples that are not padding and
        have a finite gradient.
      per_layer: Whether to clip each parameter array on its own, to an equal share of ``clip``.
      automatic: As in `fnet.clipped_grad`.
      strategy: Correlation of the noise over steps: `fnet.privacy.banded_square_root`,
        `fnet.privacy.banded_inverse_square_root`, `fnet.privacy.Strategy.of`. By default the noise
        is independent. One with buffers needs `wrap_optimizer`.
      noise_schedule: Pairs ``(step, factor)``: the noise multiplier is multiplied by the factor
        from the step on, until the next pair. Give it to the accounting, too.
      clip_schedule: The same for the clip. The noise is in units of the clip of the step, so it
        does not change the privacy.
      microbatches: Number of equal parts of a batch, computed one after the other.
      splittable, per_example: True; see `fnet.autodiff.update.Mode`.

    Raises:
      ValueError: An argument is out of range, or there is noise without ``expected_batch_size``
        or with an infinite ``clip``. When called with noise: the model state depends on the
        examples. When called with correlated noise or a schedule: the step's number is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, optax, fnet
      >>> def loss(params, model_state, batch, key):
      ...     return batch["x"] @ params["w"]
      >>> mode = fnet.autodiff.clipped(
      ...     1.0, noise_multiplier=0.5, expected_batch_size=2
      ... )
      >>> step = fnet.make_step(loss, optax.sgd(0.1), mode)
      >>> state = fnet.TrainState.create(
      ...     params={"w": jnp.zeros(2)},
      ...     optimizer=optax.sgd(0.1),
      ...     key=jax.random.key(0),
      ... )
      >>> state, metrics = step(state, {"x": jnp.array([[3.0, 4.0], [0.0, 0.5]])})
      >>> float(metrics["clipped"]), float(metrics["norm_max"])
      (0.5, 5.0)

    References:
      Abadi et al. 2016, "Deep learning with differential privacy", arXiv:1607.00133.
    """

    clip: float
    _: dataclasses.KW_ONLY
    noise_multiplier: float = 0.0
    expected_batch_size: float | None = None
    per_layer: bool = False
    automatic: float | None = None
    strategy: Strategy = DP_SGD
    noise_schedule: Schedule = ()
    clip_schedule: Schedule = ()
    microbatches: int = 1
    splittable: ClassVar[bool] = True
    per_example: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject values out of range before anything is traced."""
        check_private("clipped", self.noise_multiplier, self.expected_batch_size, self.microbatches)
        if self.noise_multiplier and not self.clip < float("inf"):
            raise ValueError(f"clipped: clip must be finite with noise, got {self.clip}")
        check_clip(self.clip, self.per_layer, self.automatic)
        checks.numbers("clipped", "> 0", clip=self.clip)  # 0 would train nothing
        schedules = {"noise_schedule": self.noise_schedule, "clip_schedule": self.clip_schedule}
        check_schedule("clipped", **schedules)
        if self.noise_schedule and not self.strategy.is_independent:
            raise ValueError(
                "clipped: no accountant covers a schedule of correlated noise; leave out "
                "noise_schedule or strategy"
            )

    @property
    def _needs_step(self) -> bool:
        is_correlated = self.noise_multiplier and not self.strategy.is_independent
        return bool(is_correlated or self.noise_schedule or self.clip_schedule)

    @property
    def _has_buffers(self) -> bool:
        return bool(self.noise_multiplier) and self.strategy.buffers is not None

    def step_key(self, key: Array, step: Array) -> Any:
        """Return the randomness of a step, with its number if noise or clip depend on it."""
        key_of_step = super().step_key(key, step)
        return StepKey(key_of_step, key, step) if self._needs_step else key_of_step

    def wrap_optimizer(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """Return the optimizer with the buffers of the strategy in its state, if it has any."""
        if not self._has_buffers:
            return optimizer
        return carrying(
            optimizer, lambda params: self.strategy.buffers.init_multiply(_widen(params))
        )

    def update(self, loss: Loss, optimizer: optax.GradientTransformation) -> Update:
        """Return the update function of a loss and an optimizer, wrapped if there are buffers."""
        if not self._has_buffers:
            return super().update(loss, optimizer)
        return carried_update("clipped", self._gradient(loss), optimizer, with_loss=False)

    def __call__(self, loss: Loss) -> Gradient:
        if self._has_buffers:
            raise TypeError(
                "clipped: the buffers of the noise are updated with the optimizer; use "
                "fnet.make_step, or mode.update"
            )
        with_buffers = self._gradient(loss)

        def gradient(
            params: Any, model_state: Any, batch: dict[str, Array], key: Any
        ) -> tuple[Any, Any, dict[str, Array]]:
            grads, (_, state), metrics = with_buffers(params, (None, model_state), batch, key)
            return grads, state, metrics

        return gradient

    def _gradient(self, loss: Loss) -> Gradient:
        """Return a gradient function whose model state is ``(buffers, model_state)``."""

        def gradient(
            params: Any, state: Any, batch: dict[str, Array], key: Any
        ) -> tuple[Any, Any, dict[str, Array]]:
            buffers, model_state = state
            if self._needs_step and not isinstance(key, StepKey):
                raise ValueError(
                    "clipped: correlated noise and schedules depend on the step; use "
                    "fnet.make_step, or give mode.step_key(key, step) as the key"
                )
            step_key = key.key if isinstance(key, StepKey) else key
            loss_key, noise_key = jax.random.split(step_key)
            function = per_example_loss(loss, model_state, params)
            factor = factor_at(self.clip_schedule, key.step) if self.clip_schedule else None
            clip = None if factor is None else jnp.asarray(self.clip * factor)
            clipping = clipped_grad(
                function, self.clip, per_layer=self.per_layer, automatic=self.automatic,
                has_aux=True,
            )  # fmt: skip
            sums, info, is_counted = clipped_sum(
                "clipped", clipping, params, model_state, batch, loss_key, self.microbatches,
                clip,
            )  # fmt: skip
            if self.noise_multiplier:
                check_private_state("clipped", function, params, batch, step_key)
                stddev = self.noise_multiplier * clipping.sensitivity()
                if self._needs_step:
                    stddev = stddev * factor_at(self.noise_schedule, key.step)
                    stddev = stddev if factor is None else stddev * factor
                sums, buffers = self._add_noise(sums, stddev, key, noise_key, buffers)
            metrics, model_state = summarize(info, is_counted, model_state)
            metrics |= {
                "clipped": fraction_clipped(self.clip if clip is None else clip, info, is_counted)
            }
            if clip is not None:
                metrics["clip"] = clip
            grads = mean_of(sums, self.expected_batch_size, is_counted)
            return cast_like(grads, params), (buffers, model_state), metrics

        return gradient

    def _add_noise(
        self, sums: Any, stddev: Any, key: Any, noise_key: Array, buffers: Any
    ) -> tuple[Any, Any]:
        if self.strategy.is_independent:
            return add_noise(sums, stddev, noise_key), buffers
        if not self._has_buffers:
            noisy = add_correlated_noise(
                sums,
                stddev,
                key.run,
                key.step,
                self.strategy,
                step_key=lambda run, step: jax.random.split(jax.random.fold_in(run, step))[1],
            )
            return noisy, buffers
        z = add_noise(jax.tree.map(jnp.zeros_like, sums), 1.0, noise_key)
        with jax.numpy_rank_promotion("allow"):  # jax-privacy relies on it
            correlated, buffers = self.strategy.buffers.multiply_next(z, buffers)
        return jax.tree.map(lambda g, n: g + stddev * n.astype(g.dtype), sums, correlated), buffers


@dataclasses.dataclass(frozen=True)
class PerExampleMode(Mode):
    """Use the mean gradient, and measure per-example norms and the gradient noise scale.

    The mean counts every example once. `fnet.autodiff.mean` differs if the batch has a
    ``weight`` other than 0 and 1: it takes the weighted mean.

    ================================  ===========================================================
    edge case                         result
    ================================  ===========================================================
    ``weight`` 0 in the batch         padding: contributes 0; any other weight counts as 1
    loss or gradient is not finite    contributes 0, and the metric ``nonfinite`` counts it
    batch norm                        ValueError, see `fnet.clipped_grad`
    ================================  ===========================================================

    `fnet.make_step` takes this mode. It adds these metrics: ``norm_median`` and ``norm_max``, of
    the gradient norms; ``nonfinite``, the number of examples with a loss or a gradient that is not
    finite; ``grad_sq`` and ``grad_var`` of `fnet.autodiff.noise_scale`. Their means over steps
    give the noise scale ``grad_var / grad_sq``, a number of examples.

    Attributes:
      per_layer: Whether to also measure both parts for each parameter array, as
        ``grad_sq/NAME`` and ``grad_var/NAME``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, fnet
      >>> def loss(params, model_state, batch, key):
      ...     return batch["x"] @ params["w"]
      >>> step = fnet.make_step(loss, optax.sgd(0.1), fnet.autodiff.per_example())
      >>> state = fnet.TrainState.create(
      ...     params={"w": jnp.zeros(2)},
      ...     optimizer=optax.sgd(0.1),
      ...     key=jax.random.key(0),
      ... )
      >>> state, metrics = step(state, {"x": jnp.array([[3.0, 4.0], [0.0, 1.0]])})
      >>> {
      ...     name: round(float(metrics[name]), 3)
      ...     for name in ("norm_max", "grad_sq", "grad_var")
      ... }
      {'norm_max': 5.0, 'grad_sq': 4.0, 'grad_var': 9.0}
    """

    per_layer: bool = False

    def __call__(self, loss: Loss) -> Gradient:
        def gradient(
            params: Any, model_state: Any, batch: dict[str, Array], key: Array
        ) -> tuple[Any, Any, dict[str, Array]]:
            function = clipped_grad(
                per_example_loss(loss, model_state, params), float("inf"),
                per_layer=self.per_layer, has_aux=True,
            )  # fmt: skip
            sums, info = function(_widen(params), batch, key, mask=batch.get("weight"))
            is_counted = _is_counted(info, batch.get("weight"))
            grads = mean_of(sums, None, is_counted)
            metrics, model_state = summarize(info, is_counted, model_state)
            scale = noise_scale(info.norms, jnp.sqrt(squared_norm(grads)), is_counted)
            metrics |= scale._asdict()
            norms = jax.tree_util.tree_leaves_with_path(info.norms_per_layer)
            for (path, own), mean in zip(norms, jax.tree.leaves(grads), strict=False):
                scale = noise_scale(own, jnp.sqrt(squared_norm(mean)), is_counted)
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                metrics |= {f"{part}/{name}": a for part, a in scale._asdict().items()}
            return cast_like(grads, params), model_state, metrics

        return gradient


def check_private(
    name: str, noise_multiplier: float, expected_batch_size: float | None, microbatches: int
) -> None:
    """Reject arguments out of range for the mode ``name``."""
    checks.numbers(name, ">= 0 and finite", noise_multiplier=noise_multiplier)
    if noise_multiplier and expected_batch_size is None:
        raise ValueError(
            f"{name}: noise needs a divisor that does not depend on the batch; give "
            "expected_batch_size"
        )
    checks.numbers(name, "> 0", expected_batch_size=expected_batch_size)
    checks.numbers(name, ">= 1", microbatches=microbatches)


def check_private_state(
    name: str, loss: Callable[..., Any], params: Any, batch: dict[str, Array], key: Array
) -> None:
    """Reject a model state that depends on the examples, because it has no noise."""
    closed, shapes = jax.make_jaxpr(
        lambda batch: loss(params, batch, key)[1][1], return_shape=True
    )(batch)
    depends_on_batch = depends_on(closed, [True] * len(closed.in_avals))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    names = [
        jax.tree_util.keystr(path)
        for path, depends in zip(paths, depends_on_batch, strict=True)
        if depends
    ]
    if names:
        raise ValueError(
            f"{name}: the model state {', '.join(names)} depends on the examples, but only the "
            "gradient gets noise. Remove the layer that updates it."
        )


def per_example_loss(loss: Loss, model_state: Any, like: Any) -> Callable[..., Any]:
    """Return ``(params, batch, key) -> (losses, (metrics, changes))``.

    It casts its params to the dtypes of ``like`` before it calls ``loss``. The changes are the
    new model state, with None for arrays that the loss passes on: no loop over microbatches
    should stack frozen parameters.
    """

    def function(params: Any, batch: dict[str, Array], key: Array) -> tuple[Array, Any]:
        params = cast_like(params, like)
        losses, aux = losses_and_aux(loss(params, model_state, batch, key), model_state)
        return losses, (aux.metrics, jax.tree.map(change, model_state, aux.model_state))

    def change(before: Any, after: Any) -> Any:
        return None if after is before else after

    return function


def cast_like(tree: Any, like: Any) -> Any:
    """Cast the leaves of ``tree`` to the dtypes of ``like``."""
    return jax.tree.map(lambda a, b: _cast(a, jnp.result_type(b)), tree, like)


def _widen(params: Any) -> Any:
    """Cast params to float32 or wider, so that sums are not rounded before they get noise."""

    def widen(p: Any) -> Any:
        is_floating = jnp.issubdtype(jnp.result_type(p), jnp.floating)
        return _cast(p, sum_dtype(p)) if is_floating else p  # `clipped_grad` rejects others.

    return jax.tree.map(widen, params)


def _cast(a: Any, dtype: Any) -> Any:
    return a if jnp.result_type(a) == dtype else jnp.asarray(a, dtype)


def _is_counted(info: ClippedInfo, weight: Array | None) -> Array:
    """1 for examples that are not padding and have a finite gradient, otherwise 0, [batch]."""
    is_finite = jnp.isfinite(info.norms)
    return (is_finite if weight is None else is_finite & (weight != 0)).astype(jnp.float32)


def clipped_sum(
    name: str,
    function: ClippedGrad,
    params: Any,
    model_state: Any,
    batch: dict[str, Array],
    key: Array,
    microbatches: int,
    clip: Array | None = None,
) -> tuple[Any, ClippedInfo, Array]:
    """Sum the clipped gradients of a batch in float32 or wider: ``(sums, info, is_counted)``.

    ``function`` is what `clipped_grad` returns for a `per_example_loss`, and ``clip`` a bound in
    place of its own.
    """
    params = _widen(params)
    if microbatches == 1:
        sums, info = function(params, batch, key, mask=batch.get("weight"), clip=clip)
    else:
        parts = split_batch(name, batch, microbatches)
        parts = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), parts)
        sums, info = _accumulate(function, params, model_state, parts, key, clip)
    return sums, info, _is_counted(info, batch.get("weight"))


def _accumulate(
    function: ClippedGrad,
    params: Any,
    model_state: Any,
    parts: dict[str, Array],
    key: Array,
    clip: Array | None,
) -> tuple[Any, ClippedInfo]:
    """Add up the clipped sums of microbatches, arrays [microbatches, size, ...], in place."""
    microbatches, size = jax.tree.leaves(parts)[0].shape[:2]

    totals = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), params)

    def add(_: None, part: Any) -> tuple[None, ClippedInfo]:
        i, rows = part
        part_key = jax.random.fold_in(key, i)
        return None, function.add_to(
            totals, params, rows, part_key, mask=rows.get("weight"), clip=clip
        )

    _, infos = jax.lax.scan(add, None, (jnp.arange(microbatches), parts))
    sums = jax.tree.map(jax.freeze, totals)

    def join(a: Array) -> Array:
        if a.shape[1:2] != (size,):
            return a[0]  # It does not depend on the batch.
        return jax.lax.collapse(jnp.swapaxes(a, 0, 1), 0, 2)

    def join_state(before: Array, after: Array | None) -> Array | None:
        if after is None:
            return None
        # The first axis of a state may be as long as a microbatch.
        return after[0] if after.ndim == before.ndim + 1 else join(after)

    metrics, states = infos.aux
    info = jax.tree.map(join, infos._replace(aux=metrics))
    states = jax.tree.map(join_state, model_state, states)
    return sums, info._replace(aux=(info.aux, states), nonfinite=infos.nonfinite.sum())


def mean_of(sums: Any, size: float | None, is_counted: Array) -> Any:
    """Divide sums by ``size``, or by the number of counted examples."""
    return jax.tree.map(lambda g: g / (size or jnp.maximum(is_counted.sum(), 1)), sums)


def fraction_clipped(clip: Array | float, info: ClippedInfo, is_counted: Array) -> Array:
    """Fraction of the counted examples with a norm above ``clip``, []."""
    return weighted_mean((info.norms > clip).astype(jnp.float32), is_counted)


def summarize(
    info: ClippedInfo, is_counted: Array, model_state: Any
) -> tuple[dict[str, Array], Any]:
    """Average metrics over the counted examples, and model states that depend on the batch.

    ``info`` is of a `per_example_loss`, and ``model_state`` that before the step.
    """
    metrics, states = info.aux
    means = {name: weighted_mean(values, is_counted) for name, values in metrics.items()}
    norms = jnp.where(is_counted > 0, info.norms, jnp.nan)

    def average_state(before: Array, after: Array | None) -> Array:
        if after is None:
            return before
        if after.shape == before.shape:
            return after
        mean = jax.vmap(functools.partial(weighted_mean, weight=is_counted), -1)
        rows = after.reshape(len(after), -1)
        average = mean(rows).reshape(before.shape).astype(before.dtype)
        return jnp.where(is_counted.sum() > 0, average, before)

    # The loss of a batch of padding is 0. If no example has a finite gradient, it is nan.
    all_nonfinite = (is_counted.sum() == 0) & (info.nonfinite > 0)
    return {
        **means,
        "loss": jnp.where(all_nonfinite, jnp.nan, weighted_mean(info.losses, is_counted)),
        "norm_median": jnp.nan_to_num(jnp.nanmedian(norms)),
        "norm_max": jnp.nan_to_num(jnp.nanmax(norms, initial=0)),
        "nonfinite": info.nonfinite.astype(jnp.float32),
    }, jax.tree.map(average_state, model_state, states)
