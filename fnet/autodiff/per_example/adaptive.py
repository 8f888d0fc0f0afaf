"""Clipping to a quantile of the norms, which is followed, privately, while training goes on."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet.autodiff.mean import Gradient, Loss
from fnet.autodiff.per_example.clipped import clipped_grad
from fnet.autodiff.per_example.modes import (
    as_those,
    check_private,
    check_state,
    clipped_sum,
    noised_mean,
    per_example_loss,
    share_above,
    summary,
)
from fnet.autodiff.update import Mode, Update, gradient_then_optimizer


class AdaptiveState(NamedTuple):
    """State of an optimizer that keeps the bound.

    Attributes:
      clip: the bound of the next step, float32 [].
      inner: state of the optimizer itself.
    """

    clip: Array
    inner: optax.OptState


def adapted_clip(
    clip: Array | float, below: Array | float, *, quantile: float, learning_rate: float = 0.2
) -> Array:
    """The next bound.

        clip exp(-learning_rate (below - quantile))                      (Andrew et al. 2021)

    Args:
      clip: the bound, [].
      below: the share of examples whose norm is at most the bound, [].
      quantile: the share that is aimed at.
      learning_rate: of the bound's logarithm.

    Returns:
      The bound of the next step, floating, [].
    """
    return clip * jnp.exp(-learning_rate * (below - quantile))


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping(Mode):
    """The gradient mode of private training whose bound follows a quantile of the norms.

    As `fnet.autodiff.clipped`, and after each step, with m examples expected a batch,

        below = 1/2 + (sum_b (1[|g_b| <= clip] - 1/2) + N(0, count_noise^2)) / m
        clip <- clip exp(-learning_rate (below - quantile))

    Gradients have noise of ``clip (noise_multiplier^-2 - (2 count_noise)^-2)^(-1/2)``, so
    that both together spend what ``noise_multiplier`` alone would. Source: Andrew et
    al., "Differentially Private Learning with Adaptive Clipping", 2021, Theorem 1.

    The bound lives in the optimizer's state, where it is donated and checkpointed::

        mode = AdaptiveClipping(0.1, quantile=0.5)
        optimizer = mode.keeping_clip(optax.sgd(0.1))
        state = fnet.TrainState.create(model, optimizer, key)
        step = fnet.make_step(loss, optimizer, mode)

    Metrics are those of `clipped`, and ``clip``, the bound that was used.

    Attributes:
      clip: the first bound.
      quantile: the share of examples that shall not be clipped, within (0, 1).
      learning_rate: of the bound's logarithm.
      noise_multiplier: as in `clipped`; 0: no noise anywhere.
      count_noise: standard deviation of the noise on the number of examples below the
        bound; by default a twentieth of ``expected_batch_size``.
      expected_batch_size: as in `clipped`.
      microbatches: likewise.
      splittable: True; see `fnet.autodiff.update.Mode`.

    Raises:
      ValueError: for values outside of these, and for too little noise on the count
        (at most half the noise multiplier) to leave any for gradients; when called
        with noise, for a model state that is made of the examples.
    """

    clip: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    noise_multiplier: float = 0.0
    count_noise: float | None = None
    expected_batch_size: float | None = None
    microbatches: int = 1
    splittable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuses what makes no sense, before anything is traced."""
        if not 0 < self.clip < float("inf"):
            raise ValueError(
                f"AdaptiveClipping: clip must be above 0 and finite to be adapted, got {self.clip}"
            )
        if not 0 < self.quantile < 1:
            raise ValueError(
                f"AdaptiveClipping: quantile must be between 0 and 1, got {self.quantile}; for "
                "gradients as they are use fnet.autodiff.per_example"
            )
        for name in ("learning_rate", "count_noise"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(
                    f"AdaptiveClipping: {name} must be at least 0 and finite, got {value}"
                )
        check_private(
            "AdaptiveClipping", self.noise_multiplier, self.expected_batch_size, self.microbatches
        )
        if self.noise_multiplier and 2 * self._count_noise <= self.noise_multiplier:
            raise ValueError(
                f"AdaptiveClipping: a count_noise of {self._count_noise} spends more than a "
                f"noise_multiplier of {self.noise_multiplier} allows; give more than half of that"
            )

    @property
    def _count_noise(self) -> float:
        if not self.noise_multiplier:
            return 0.0
        if self.count_noise is not None:
            return self.count_noise
        return (self.expected_batch_size or 0.0) / 20

    @property
    def gradient_noise(self) -> float:
        """Standard deviation of the noise on a sum of gradients, in units of the bound."""
        if not self.noise_multiplier:
            return 0.0
        deviation: float = (self.noise_multiplier**-2 - (2 * self._count_noise) ** -2) ** -0.5
        return deviation

    def keeping_clip(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """The same optimizer, with the bound in its state."""

        def init(params: Any) -> AdaptiveState:
            return AdaptiveState(jnp.float32(self.clip), optimizer.init(params))

        def update(
            grads: Any, state: AdaptiveState, params: Any = None, **extra: Any
        ) -> tuple[Any, AdaptiveState]:
            inner = optax.with_extra_args_support(optimizer)
            updates, after = inner.update(grads, state.inner, params, **extra)
            return updates, AdaptiveState(state.clip, after)

        return optax.GradientTransformationExtraArgs(init, update)

    def update(self, loss: Loss, optimizer: optax.GradientTransformation) -> Update:
        """What is done with a batch, by `fnet.make_step`."""
        plain = gradient_then_optimizer(self._gradient(loss), optimizer)

        def update(
            params: Any, opt_state: Any, model_state: Any, batch: dict[str, Array], key: Array
        ) -> tuple[Any, Any, Any, dict[str, Array]]:
            made = jax.eval_shape(optimizer.init, params)
            if not isinstance(opt_state, AdaptiveState) or not isinstance(made, AdaptiveState):
                raise ValueError(
                    "AdaptiveClipping: the optimizer keeps no bound; make it with "
                    "mode.keeping_clip(optimizer), for the state and the step"
                )
            params, opt_state, (clip, model_state), metrics = plain(
                params, opt_state, (opt_state.clip, model_state), batch, key
            )
            return params, opt_state._replace(clip=clip), model_state, metrics

        return update

    def _gradient(self, loss: Loss) -> Gradient:
        """To it the bound is a part of the model's state."""

        def gradient(
            params: Any, state: Any, batch: dict[str, Array], key: Array
        ) -> tuple[Any, Any, dict[str, Array]]:
            clip, model_state = state
            each = per_example_loss(loss, model_state, params)
            bounded = clipped_grad(each, self.clip, has_aux=True)
            sums, info, counts, noise_key = clipped_sum(
                "AdaptiveClipping", functools.partial(bounded, clip=clip), params, model_state,
                batch, key, self.microbatches,
            )  # fmt: skip
            if self.noise_multiplier:
                check_state("AdaptiveClipping", each, params, batch, key)
            noise_key, count_key = jax.random.split(noise_key)
            noise = self.gradient_noise * clip if self.noise_multiplier else 0.0
            grads = noised_mean(sums, noise, self.expected_batch_size, counts, noise_key)
            metrics, model_state = summary(info, counts, model_state)
            metrics |= {"clipped": share_above(clip, info, counts), "clip": clip}
            after = self._next(clip, info.norms, batch.get("weight"), count_key)
            return as_those(grads, params), (after, model_state), metrics

        return gradient

    def _next(self, clip: Array, norms: Array, weight: Array | None, key: Array) -> Array:
        """Examples whose gradient is not finite are above any bound."""
        real = jnp.ones_like(norms) if weight is None else (weight != 0).astype(norms.dtype)
        votes = jnp.where(norms <= clip, 0.5, -0.5) * real
        size = self.expected_batch_size or jnp.maximum(real.sum(), 1)
        noise = self._count_noise * jax.random.normal(key) if self.noise_multiplier else 0.0
        below = 0.5 + (votes.sum() + noise) / size
        after = adapted_clip(clip, below, quantile=self.quantile, learning_rate=self.learning_rate)
        return after.astype(clip.dtype)  # norms may be float64
