"""Gradient modes: from a loss and an optimizer to one update of the parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet.autodiff.mean import Gradient, Loss
from fnet.precision import upcast

Update = Callable[
    [Any, optax.OptState, Any, dict[str, Array], Array],
    tuple[Any, optax.OptState, Any, dict[str, Array]],
]
"""``update(params, opt_state, model_state, batch, key)`` of one train step.

It returns the first three updated, and scalar metrics, among them ``grad_norm``."""


class Mode:
    """How a train step turns per-example losses into an update of the parameters.

    Subclasses are frozen dataclasses. They declare their capabilities as fields and define
    either ``__call__``, which gives the gradient, or ``update``.

    Attributes:
      microbatches: Number of equal parts of a batch, computed one after the other.
      noise_multiplier: Standard deviation of the noise on the sum of clipped gradients, in
        units of the clip; 0 for modes that are not private.
      whole_gradient: Whether all of the gradient exists before any of it is applied.
      splittable: Whether ``microbatches`` may be changed.
      per_example: Whether the gradient is a sum over batches of one example, so that microbatches
        cannot change it.
      differentiates_mean: Whether the mean of the losses is differentiated, so that `update_with`
        puts its remat policy on the mean.
    """

    microbatches: int = 1
    noise_multiplier: float = 0.0
    whole_gradient: ClassVar[bool] = True
    splittable: ClassVar[bool] = False
    per_example: ClassVar[bool] = False
    differentiates_mean: ClassVar[bool] = False

    def step_key(self, key: Array, step: Array) -> Any:
        """Return the randomness of a step, which the update and the gradient get as ``key``.

        Args:
          key: Random key of the run, ``state.key``.
          step: Number of the step, int32 [].
        """
        return jax.random.fold_in(key, step)

    def __call__(self, loss: Loss) -> Gradient:
        """Return the gradient function of a loss.

        Raises:
          TypeError: If the mode has no gradient to give.
        """
        raise TypeError(f"{type(self).__name__}: this mode updates without giving a gradient")

    def update(self, loss: Loss, optimizer: optax.GradientTransformation) -> Update:
        """Return the update function of a loss and an optimizer."""
        # A loss has no noise, so a private update must not depend on it.
        return gradient_then_optimizer(self(loss), optimizer, with_loss=not self.noise_multiplier)

    def update_with(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        remat: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> Update:
        """Return the update function, with a remat policy on what is differentiated: the losses."""
        return self.update(remat(loss), optimizer)

    def split(self, microbatches: int) -> "Mode":
        """Return the same mode with another number of microbatches.

        Raises:
          ValueError: If the number is below 1 or the mode cannot be split.
        """
        if microbatches == self.microbatches:
            return self
        if not self.splittable:
            raise ValueError(
                f"make_step: mode {self} cannot be split into microbatches, got {microbatches}"
            )
        split: Mode = dataclasses.replace(cast(Any, self), microbatches=microbatches)
        return split


@dataclasses.dataclass(frozen=True)
class GradientFunction(Mode):
    """A mode made from a plain function.

    Attributes:
      function: ``loss -> gradient``; see `fnet.autodiff.Gradient`.
    """

    function: Callable[[Loss], Gradient]

    def __call__(self, loss: Loss) -> Gradient:
        """Return the gradient function of a loss."""
        return self.function(loss)


def gradient_then_optimizer(
    gradient: Gradient, optimizer: optax.GradientTransformation, *, with_loss: bool = True
) -> Update:
    """Return the update that computes the whole gradient first and then applies the optimizer.

    Optimizers that ask for it get the mean loss as ``value``, such as
    ``optax.contrib.reduce_on_plateau``.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def update(
        params: Any,
        opt_state: optax.OptState,
        model_state: Any,
        batch: dict[str, Array],
        key: Array,
    ) -> tuple[Any, optax.OptState, Any, dict[str, Array]]:
        grads, model_state, metrics = gradient(params, model_state, batch, key)
        # Without a barrier, the compiler holds the squared gradients for both the norm and Adam,
        # which takes the memory of the parameters once more.
        leaves, structure = jax.tree.flatten(grads)
        pairs = [jax.lax.optimization_barrier((squared_norm(g), g)) for g in leaves]
        grad_norm = jnp.sqrt(jnp.asarray(sum(square for square, _ in pairs)))
        grads = jax.tree.unflatten(structure, [g for _, g in pairs])
        with jax.named_scope("optimizer"):
            extra = {"value": metrics["loss"]} if with_loss and "loss" in metrics else {}
            try:
                updates, opt_state = optimizer.update(uphill(grads), opt_state, params, **extra)
            except TypeError as error:
                raise TypeError(
                    f"make_step: optimizer.update fails: {error}; a step gives gradients, state, "
                    "parameters and, without noise, value=loss"
                ) from error
            params = optax.apply_updates(params, updates)
        return params, opt_state, model_state, metrics | {"grad_norm": grad_norm}

    return update


def uphill(grads: Any) -> Any:
    """Return the direction in which the loss rises, which an optimizer goes down.

    For a complex number, `jax.grad` gives its conjugate.
    """
    return jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, grads)


class Carried(NamedTuple):
    """State of an optimizer that also carries something of the mode from step to step.

    Attributes:
      value: What the mode updates.
      inner: State of the wrapped optimizer.
    """

    value: Any
    inner: optax.OptState


def carrying(
    optimizer: optax.GradientTransformation, initial: Callable[[Any], Any]
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with ``initial(params)`` in its state, see `Carried`."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Carried:
        return Carried(initial(params), optimizer.init(params))

    def update(grads: Any, state: Carried, params: Any = None, **extra: Any) -> tuple[Any, Carried]:
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        return updates, Carried(state.value, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def carried_update(
    name: str, gradient: Gradient, optimizer: optax.GradientTransformation, *, with_loss: bool
) -> Update:
    """Return the update of a gradient whose model state is ``(carried value, model state)``."""
    plain_update = gradient_then_optimizer(gradient, optimizer, with_loss=with_loss)

    def update(
        params: Any, opt_state: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Any, Any, Any, dict[str, Array]]:
        expected = jax.eval_shape(optimizer.init, params)
        if not isinstance(opt_state, Carried) or not isinstance(expected, Carried):
            raise ValueError(
                f"{name}: the optimizer does not carry the state of the mode; use "
                "mode.wrap_optimizer(optimizer) for both the state and the step"
            )
        params, opt_state, (value, model_state), metrics = plain_update(
            params, opt_state, (opt_state.value, model_state), batch, key
        )
        return params, opt_state._replace(value=value), model_state, metrics

    return update


def squared_norm(tree: Any) -> Array:
    """Return the squared L2 norm of all leaves together, in float32 or wider."""
    squares = (jnp.square(upcast(jnp.abs(a))).sum() for a in jax.tree.leaves(tree))
    return jnp.asarray(sum(squares))
