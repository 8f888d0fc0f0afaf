"""What a mode makes of a loss and an optimizer in the end: one update of the parameters."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet.autodiff.mean import Gradient, Loss
from fnet.precision import widened

Update = Callable[
    [Any, optax.OptState, Any, dict[str, Array], Array],
    tuple[Any, optax.OptState, Any, dict[str, Array]],
]
"""``update(params, opt_state, model_state, batch, key)``: the first three renewed, and metrics.

The metrics are scalars, among them ``grad_norm``."""


@runtime_checkable
class UpdateMode(Protocol):
    """A mode that calls the optimizer itself, as it must where it never has the whole gradient.

    One that has it says so by an attribute ``whole_gradient``, True; its metrics then have
    ``loss`` and ``grad_norm``, and its steps can be guarded.
    """

    def update(self, loss: Loss, optimizer: optax.GradientTransformation) -> Update:
        """What is to be done with a batch."""


Mode = Callable[[Loss], Gradient] | UpdateMode
"""What is made of the losses: their gradient, or the update itself."""


def update_of(mode: Mode, loss: Loss, optimizer: optax.GradientTransformation) -> Update:
    """The update that a mode leads to: its own, or the optimizer's after the whole gradient."""
    if isinstance(mode, UpdateMode):
        return mode.update(loss, optimizer)
    return gradient_then_optimizer(mode(loss), optimizer)


def gradient_then_optimizer(gradient: Gradient, optimizer: optax.GradientTransformation) -> Update:
    """The plain update: first the gradient of all parameters, then the optimizer."""

    def update(
        params: Any,
        opt_state: optax.OptState,
        model_state: Any,
        batch: dict[str, Array],
        key: Array,
    ) -> tuple[Any, optax.OptState, Any, dict[str, Array]]:
        grads, model_state, metrics = gradient(params, model_state, batch, key)
        grad_norm, grads = _norm_first(grads)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return params, opt_state, model_state, metrics | {"grad_norm": grad_norm}

    return update


def _norm_first(grads: Any) -> tuple[Array, Any]:
    """The global norm, and the gradients once it has read them.

    Otherwise a compiler keeps their squares for the norm and for Adam: as much as
    the parameters once more.
    """
    leaves, structure = jax.tree.flatten(grads)
    pairs = [jax.lax.optimization_barrier((squared_norm(g), g)) for g in leaves]
    norm = jnp.sqrt(jnp.asarray(sum(square for square, _ in pairs)))
    return norm, jax.tree.unflatten(structure, [g for _, g in pairs])


def squared_norm(tree: Any) -> Array:
    """Of all elements together, in float32 at least: in float16 the square of 256 is infinite."""

    def of(a: Array) -> Array:
        size = jnp.abs(a)
        return jnp.square(widened(size)).sum()

    return jnp.asarray(sum(map(of, jax.tree.leaves(tree))))
