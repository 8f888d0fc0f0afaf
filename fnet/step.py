"""One train step: a pure function of state and batch, jitted, its state donated."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax import Array

from fnet.autodiff import Gradient, Loss, mean
from fnet.memory.donation import Donation, donation
from fnet.memory.peak import Peak, compile_smallest, peak, tree_bytes
from fnet.state import TrainState

Metrics = dict[str, Array]


def make_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mode: Callable[[Loss], Gradient] = mean,
    *,
    ema_decay: float | None = None,
) -> jax.stages.Wrapped:
    """A jitted ``step(state, batch) -> (state, metrics)`` that owns its state.

    The state is donated: the new one takes its buffers, and the old one must not
    be used again. Randomness of step i is ``fold_in(state.key, i)``.

    Args:
      loss: ``loss(params, model_state, batch, key) -> (losses [batch], Aux)``.
      optimizer: an optax gradient transformation.
      mode: what is made of the losses; see `fnet.autodiff`.
      ema_decay: weight of the old average in ``state.ema``; required exactly
        when the state keeps one.

    Returns:
      The step; ``metrics`` are scalars: what the mode reports, and ``grad_norm``.

    Raises:
      ValueError: when called with a state whose ``ema`` does not match ``ema_decay``.
    """
    gradient = mode(loss)

    def step(state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        if (state.ema is None) != (ema_decay is None):
            raise ValueError(
                f"make_step: ema_decay={ema_decay}, but the state "
                f"{'has no' if state.ema is None else 'has an'} average; "
                "TrainState.create(ema=True) and make_step(ema_decay=...) go together"
            )
        key = jax.random.fold_in(state.key, state.step)
        grads, model_state, metrics = gradient(state.params, state.model_state, batch, key)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema_decay is not None:
            ema = optax.incremental_update(params, ema, step_size=1 - ema_decay)
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            ema=ema,
        )
        return new_state, metrics | {"grad_norm": optax.tree.norm(grads)}

    # A leaf that is overwritten without being read still gives its buffer.
    return jax.jit(step, donate_argnums=0, keep_unused=True)


class Report(NamedTuple):
    """What a compiled step costs, known before it runs; all in bytes but ``parameters``.

    Attributes:
      parameters: how many numbers are trained.
      state_bytes: the whole state's.
      peak: arguments, outputs, aliased, temporaries and their peak.
      donation: the proof that the state is renewed in place.
      compiler_options: those found to need the least memory.
    """

    parameters: int
    state_bytes: int
    peak: Peak
    donation: Donation
    compiler_options: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain nested dicts."""
        return self._asdict() | {
            "peak": self.peak._asdict() | {"total": self.peak.total},
            "donation": self.donation._asdict(),
        }


class Executable(NamedTuple):
    """A compiled step and what it costs."""

    compiled: jax.stages.Compiled
    report: Report

    def __call__(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        """The next state, in the buffers of ``state``, and the step's metrics."""
        return self.compiled(state, batch)


def compile_step(
    step: jax.stages.Wrapped, state: TrainState, batch: dict[str, Array]
) -> Executable:
    """Compiles a step ahead of time, once; the result both runs and reports its memory.

    Args:
      step: from `make_step`.
      state: the state, or its shapes (``jax.eval_shape``).
      batch: a batch, or its shapes.

    Returns:
      An executable ``(state, batch) -> (state, metrics)`` with ``.report``.

    Raises:
      DonationError: if a leaf of the state is not renewed in place; the message
        names it, its shape and dtype in and out, and the reason.
    """
    compiled, options = compile_smallest(step.lower(state, batch))
    return Executable(
        compiled,
        Report(
            parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            state_bytes=tree_bytes(state),
            peak=peak(compiled),
            donation=donation(compiled),
            compiler_options=options,
        ),
    )
