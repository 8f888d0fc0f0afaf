"""Adaptive clipping: a bound that follows a quantile of the gradient norms, privately."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet import checks
from fnet.autodiff.mean import Gradient, Loss
from fnet.autodiff.per_example.clipped import clipped_grad
from fnet.autodiff.per_example.modes import (
    cast_like,
    check_private,
    check_private_state,
    clipped_sum,
    fraction_clipped,
    mean_of,
    per_example_loss,
    summarize,
)
from fnet.autodiff.update import Mode, Update, carried_update, carrying
from fnet.noise.gaussian import add_noise


def adapt_clip(
    clip: Array | float, below: Array | float, *, quantile: float, learning_rate: float = 0.2
) -> Array:
    """Move the bound towards a quantile of the gradient norms.

        clip exp(-learning_rate (below - quantile))                      (Andrew et al. 2021)

    Args:
      clip: Bound, [].
      below: Fraction of the examples whose gradient norm is at most the bound, [].
      quantile: Fraction to aim at.
      learning_rate: Step size of the bound's logarithm.

    Returns:
      The bound for the next step, floating, [].

    Example:
      >>> from fnet.autodiff import adapt_clip
      >>> # Too few examples are clipped.
      >>> round(float(adapt_clip(1.0, 0.8, quantile=0.5)), 4)
      0.9418
    """
    return clip * jnp.exp(-learning_rate * (below - quantile))


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping(Mode):
    """Clip per-example gradients to a bound that follows a quantile of their norms.

    The mode `fnet.autodiff.clipped` with a new bound after each step. For an expected batch size
    m, it estimates the fraction of gradient norms below the bound from a noisy count:

        below = 1/2 + (sum_b (1[|g_b| <= clip] - 1/2) + N(0, count_noise^2)) / m
        clip <- clip exp(-learning_rate (below - quantile))

    Guarantees:
      - Gradient and count together are as private as `fnet.autodiff.clipped` with the same
        ``noise_multiplier``. For this, the noise on the gradient is larger: its standard
        deviation is ``clip (noise_multiplier^-2 - (2 count_noise)^-2)^(-1/2)``.
      - Dtypes, model state and metrics are treated as by `fnet.autodiff.clipped`. Metrics are
        not private.

    ================================  ===========================================================
    edge case                         effect on the bound
    ================================  ===========================================================
    ``weight`` 0 in the batch         padding is not counted
    gradient that is not finite       counts as above the bound
    batch of padding only             ``below`` is 1/2, plus noise
    ================================  ===========================================================

    The bound is part of the optimizer's state, so the step donates it and checkpoints save it.
    Wrap the optimizer for both the state and the step. Metrics are the metrics of
    `fnet.autodiff.clipped`, and ``clip``, the bound of this step.

    Attributes:
      clip: First bound.
      quantile: Fraction of the examples that are not clipped, within (0, 1).
      learning_rate: Step size of the bound's logarithm.
      noise_multiplier: As in `fnet.autodiff.clipped`; 0 for no noise at all.
      count_noise: Standard deviation of the noise on the count. By default a twentieth of
        ``expected_batch_size``.
      expected_batch_size: As in `fnet.autodiff.clipped`.
      microbatches: As in `fnet.autodiff.clipped`.
      splittable, per_example: True; see `fnet.autodiff.update.Mode`.

    Raises:
      ValueError: An argument is out of range, or ``count_noise`` is at most half of
        ``noise_multiplier``, which leaves no privacy for the gradient. When called with noise:
        the model state depends on the examples.

    Example:
      >>> import jax, jax.numpy as jnp, optax, fnet
      >>> def loss(params, model_state, batch, key):
      ...     return batch["x"] @ params["w"]
      >>> mode = fnet.autodiff.AdaptiveClipping(1.0, quantile=0.5)
      >>> optimizer = mode.wrap_optimizer(optax.sgd(0.1))
      >>> step = fnet.make_step(loss, optimizer, mode)
      >>> state = fnet.TrainState.create(
      ...     params={"w": jnp.zeros(2)}, optimizer=optimizer, key=jax.random.key(0)
      ... )
      >>> state, metrics = step(state, {"x": jnp.array([[3.0, 4.0], [0.0, 2.0]])})
      >>> # Both were clipped.
      >>> float(metrics["clip"]), round(float(state.opt_state.value), 4)
      (1.0, 1.1052)

    References:
      Andrew et al., "Differentially private learning with adaptive clipping", 2021, Theorem 1,
      arXiv:1905.03871.
    """

    clip: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    noise_multiplier: float = 0.0
    count_noise: float | None = None
    expected_batch_size: float | None = None
    microbatches: int = 1
    splittable: ClassVar[bool] = True
    per_example: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject values out of range before anything is traced."""
        checks.numbers("AdaptiveClipping", "> 0 and finite", clip=self.clip)
        if not 0 < self.quantile < 1:
            raise ValueError(
                f"AdaptiveClipping: quantile must be between 0 and 1, got {self.quantile}; to "
                "measure gradients without clipping, use fnet.autodiff.per_example"
            )
        rates = {"learning_rate": self.learning_rate, "count_noise": self.count_noise}
        checks.numbers("AdaptiveClipping", ">= 0 and finite", **rates)
        check_private(
            "AdaptiveClipping", self.noise_multiplier, self.expected_batch_size, self.microbatches
        )
        if self.noise_multiplier and 2 * self._count_noise <= self.noise_multiplier:
            raise ValueError(
                f"AdaptiveClipping: count_noise must be more than half of noise_multiplier, "
                f"{self.noise_multiplier}, got {self._count_noise}"
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

    def wrap_optimizer(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer with the bound in its state, a `fnet.autodiff.update.Carried`."""
        return carrying(optimizer, lambda params: jnp.float32(self.clip))

    def update(self, loss: Loss, optimizer: optax.GradientTransformation) -> Update:
        """Return the update function of a loss and a wrapped optimizer."""
        return carried_update(
            "AdaptiveClipping", self._gradient(loss), optimizer, with_loss=not self.noise_multiplier
        )

    def _gradient(self, loss: Loss) -> Gradient:
        """Return a gradient function whose model state is ``(clip, model_state)``."""

        def gradient(
            params: Any, state: Any, batch: dict[str, Array], key: Array
        ) -> tuple[Any, Any, dict[str, Array]]:
            clip, model_state = state
            loss_key, noise_key = jax.random.split(key)
            function = per_example_loss(loss, model_state, params)
            clipped = clipped_grad(function, self.clip, has_aux=True)
            sums, info, is_counted = clipped_sum(
                "AdaptiveClipping", clipped, params, model_state, batch, loss_key,
                self.microbatches, clip,
            )  # fmt: skip
            gradient_key, count_key = jax.random.split(noise_key)
            if self.noise_multiplier:
                check_private_state("AdaptiveClipping", function, params, batch, key)
                sums = add_noise(sums, self.gradient_noise * clip, gradient_key)
            grads = mean_of(sums, self.expected_batch_size, is_counted)
            metrics, model_state = summarize(info, is_counted, model_state)
            metrics |= {"clipped": fraction_clipped(clip, info, is_counted), "clip": clip}
            next_clip = self._next_clip(clip, info.norms, batch.get("weight"), count_key)
            return cast_like(grads, params), (next_clip, model_state), metrics

        return gradient

    def _next_clip(self, clip: Array, norms: Array, weight: Array | None, key: Array) -> Array:
        is_real = jnp.ones_like(norms) if weight is None else (weight != 0).astype(norms.dtype)
        votes = jnp.where(norms <= clip, 0.5, -0.5) * is_real  # nan and inf are above the bound.
        size = self.expected_batch_size or jnp.maximum(is_real.sum(), 1)
        noise = self._count_noise * jax.random.normal(key) if self.noise_multiplier else 0.0
        below = 0.5 + (votes.sum() + noise) / size
        adapted = adapt_clip(clip, below, quantile=self.quantile, learning_rate=self.learning_rate)
        return adapted.astype(clip.dtype)  # Norms may be float64.
