"""In-run data Shapley: scores of training examples while the network trains."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet.autodiff.examples import examples
from fnet.autodiff.mean import Loss, replace_padding, shares, weighted_mean
from fnet.autodiff.per_example.backward import per_example_gradients
from fnet.autodiff.per_example.modes import cast_like, per_example_loss
from fnet.autodiff.per_example.parameter_gradients import PerExampleGradients
from fnet.autodiff.update import Mode, Update, gradient_then_optimizer

ROW = "row"
"""Name of the array int [batch] of a batch that says which training example each row is."""

_SCORES = "attribution/scores"


class InRunState(NamedTuple):
    """State of an optimizer that `InRun.wrap_optimizer` returns.

    Attributes:
      scores: Scores of the training examples so far, float32 [train].
      losses: Sums of their losses in the steps that they were in, float32 [train].
      counts: Numbers of these steps, int32 [train].
      step: Number of updates, int32 [].
      inner: State of the wrapped optimizer.
    """

    scores: Array
    losses: Array
    counts: Array
    step: Array
    inner: optax.OptState

    @property
    def mean_losses(self) -> Array:
        """Mean loss of each training example over its steps, float32 [train]; NaN without any.

        Wrong labels have the highest: see the benchmark of attribution.
        """
        return jnp.where(self.counts > 0, self.losses / self.counts, jnp.nan)


@dataclasses.dataclass(frozen=True, eq=False)
class InRun(Mode):
    """Use the mean gradient, and score each training example of the batch.

    A step with the learning rate eta and the weights s of the examples, usually 1 / batch, moves
    the parameters by ``-eta sum_i s_i g_i``. In terms of the gradient g_val and the Hessian H_val
    of the mean validation loss, example i lowers this loss by its Shapley value

        eta s_i <g_i, g_val>                                                        first order
        eta s_i <g_i, g_val - eta / 2 H_val sum_j s_j g_j>                          second order

    summed over the steps that it was in (Wang et al. 2024). Positive scores are
    helpful. The equations hold for SGD. With another optimizer, they are scores of the same
    gradients, not of its updates. Mean losses over the run, which find wrong labels, are kept, too.

    Inner products come from the backward pass of the training batch. Layers with one row per
    example need two small Gram matrices (ghost inner products). In layers over a sequence, the
    gradients of a few examples exist at a time, and are added to the sum of all.

    Scores are part of the optimizer's state, so the step donates it and checkpoints save it. Wrap
    the optimizer for both the state and the step. The batch has an array ``"row"`` int [batch],
    which training example each is.

    With ``weight`` in the batch, s_i is proportional to it; 0 is padding. A score or loss that is
    not finite is not added, nor are those of a row out of range. Batch norm is a ValueError, see
    `fnet.clipped_grad`.

    Attributes:
      validation: Arrays [size, ...] of validation examples, with the names of a training batch.
      train_size: Number of training examples.
      learning_rate: Learning rate, or a schedule ``step -> learning rate``.
      validation_batch: Number of validation examples that are drawn for each step; all by default.
      second_order: Whether to add the second order. It takes a product with the Hessian of the
        validation loss.
      per_example: True; see `fnet.autodiff.update.Mode`.

    Raises:
      ValueError: ``validation_batch`` is not within 1 and the number of validation examples. When
        called: the batch has no ``"row"``, the optimizer is not wrapped, or the loss mixes
        examples or changes the model state.

    Example:
      >>> import jax, jax.numpy as jnp, optax, fnet
      >>> def loss(params, model_state, batch, key):
      ...     return (batch["x"] @ params["w"] - batch["y"]) ** 2
      >>> validation = {"x": jnp.array([[1.0, 0.0]]), "y": jnp.array([2.0])}
      >>> mode = fnet.attribution.InRun(validation, train_size=3, learning_rate=0.1)
      >>> optimizer = mode.wrap_optimizer(optax.sgd(0.1))
      >>> step = fnet.make_step(loss, optimizer, mode)
      >>> params, key = {"w": jnp.zeros(2)}, jax.random.key(0)
      >>> state = fnet.TrainState.create(params=params, optimizer=optimizer, key=key)
      >>> x, y = jnp.array([[1.0, 0.0], [1.0, 0.0]]), jnp.array([2.0, -2.0])
      >>> state, _ = step(state, {"x": x, "y": y, "row": jnp.array([0, 2])})
      >>> print(state.opt_state.scores)
      [ 0.8  0.  -0.8]

    References: Wang, Mittal, Song, Jia 2024, "Data Shapley in one training run", arXiv:2406.11011.
    """

    validation: dict[str, Any]
    train_size: int
    learning_rate: Any
    validation_batch: int | None = None
    second_order: bool = False
    per_example: ClassVar[bool] = True

    def __post_init__(self) -> None:
        size = self._size
        if self.validation_batch is not None and not 1 <= self.validation_batch <= size:
            raise ValueError(
                f"InRun: validation_batch must be between 1 and {size}, the number of validation "
                f"examples, got {self.validation_batch}"
            )

    @property
    def _size(self) -> int:
        return int(jax.tree.leaves(self.validation)[0].shape[0])

    def wrap_optimizer(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer with the scores in its state."""
        inner = optax.with_extra_args_support(optimizer)

        def init(params: Any) -> InRunState:
            n = self.train_size
            counts = jnp.zeros(n, jnp.int32)
            inner_state = optimizer.init(params)
            return InRunState(jnp.zeros(n), jnp.zeros(n), counts, jnp.int32(0), inner_state)

        def update(
            grads: Any, state: InRunState, params: Any = None, **extra: Any
        ) -> tuple[Any, InRunState]:
            updates, inner_state = inner.update(grads, state.inner, params, **extra)
            return updates, state._replace(step=state.step + 1, inner=inner_state)

        return optax.GradientTransformationExtraArgs(init, update)

    def update(self, loss: Loss, optimizer: optax.GradientTransformation) -> Update:
        """Return the update function of a loss and a wrapped optimizer."""

        def update(
            params: Any, opt_state: Any, model_state: Any, batch: dict[str, Array], key: Array
        ) -> tuple[Any, Any, Any, dict[str, Array]]:
            if not isinstance(opt_state, InRunState):
                raise ValueError(
                    "InRun: the optimizer has no scores in its state; use "
                    "mode.wrap_optimizer(optimizer) for both the state and the step"
                )
            if ROW not in batch:
                raise ValueError(
                    f'InRun: expected an array "{ROW}" int [batch] in the batch, which training '
                    f"example each is, got {sorted(batch)}"
                )
            rate = self.learning_rate
            rate = rate(opt_state.step) if callable(rate) else rate

            def gradient(
                params: Any, model_state: Any, batch: dict[str, Array], key: Array
            ) -> tuple[Any, Any, dict[str, Array]]:
                grads, metrics = self._gradient(loss, params, model_state, batch, key, rate)
                return grads, model_state, metrics

            params, opt_state, model_state, metrics = gradient_then_optimizer(gradient, optimizer)(
                params, opt_state, model_state, batch, key
            )
            scores, losses, counts = metrics.pop(_SCORES)
            is_finite = jnp.isfinite(scores) & jnp.isfinite(losses)

            def add(total: Array, values: Array) -> Array:
                values = jnp.where(is_finite, values, 0).astype(total.dtype)
                return total.at[batch[ROW]].add(values, mode="drop", wrap_negative_indices=False)

            opt_state = opt_state._replace(
                scores=add(opt_state.scores, scores),
                losses=add(opt_state.losses, losses),
                counts=add(opt_state.counts, counts),
            )
            return params, opt_state, model_state, metrics

        return update

    def _gradient(
        self,
        loss: Loss,
        params: Any,
        model_state: Any,
        batch: dict[str, Array],
        key: Array,
        rate: Any,
    ) -> tuple[Any, dict[str, Array]]:
        """Return the mean gradient, and metrics with the scores of the batch's examples."""
        function = per_example_loss(loss, model_state, params)
        key, draw_key, validation_key = jax.random.split(key, 3)
        validation = self.validation
        if (drawn := self.validation_batch) is not None:
            chosen = jax.random.choice(draw_key, self._size, (drawn,), replace=False)
            validation = jax.tree.map(lambda a: jnp.asarray(a)[chosen], validation)
        validation = replace_padding(validation)

        def differentiate(batch: dict[str, Array], key: Array) -> PerExampleGradients:
            return per_example_gradients(
                "InRun", function, params, examples("InRun", (batch, key)), has_aux=True
            )

        grads, of_validation = differentiate(batch, key), differentiate(validation, validation_key)
        weights, validation_weights = map(_weights, (batch, validation), (grads, of_validation))
        metrics, changes = grads.aux
        if jax.tree.leaves(changes):
            raise ValueError(
                "InRun: the loss changes the model state, which depends on the examples; train "
                "without statistics of batches"
            )
        if self.second_order:
            mean = cast_like(grads.sum_by(weights), params)

            rows = examples("InRun", (validation, validation_key))  # batches of one, their keys

            def validation_loss(params: Any) -> Array:
                losses = rows.map(lambda e: function(params, *rows.rebuild(e))[0][0], rows.size)
                return weighted_mean(losses, validation_weights)

            # Backward twice: many custom derivatives have no forward one.
            (bend,) = jax.vjp(jax.grad(validation_loss), params)[1](mean)
            direction = of_validation.sum_by(validation_weights)
            direction = jax.tree.map(lambda g, h: g - rate / 2 * h, direction, bend)
            products = grads.inner_products(direction)
        else:
            sums, products = grads.sum_and_products(weights, of_validation, validation_weights)
            mean = cast_like(sums, params)
        means = {name: weighted_mean(values, weights) for name, values in metrics.items()}
        counts = weights > 0
        scores = jnp.where(counts, rate * weights * products, 0)
        of_examples: Any = (scores, jnp.where(counts, grads.losses, 0), counts)
        return mean, means | {"loss": weighted_mean(grads.losses, weights), _SCORES: of_examples}


def _weights(batch: dict[str, Array], grads: PerExampleGradients) -> Array:
    return shares(batch.get("weight", jnp.ones(grads.losses.shape)))
