"""One train step: a pure function of state and batch, jitted, its state donated."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet.autodiff import Loss, mean
from fnet.autodiff.update import Mode, UpdateMode, update_of
from fnet.memory.donation import Donation, donation
from fnet.memory.peak import Peak, compile_min_memory, peak, tree_bytes
from fnet.state import TrainState

Metrics = dict[str, Array]


def make_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mode: Mode = mean,
    *,
    ema_decay: float | None = None,
    state_sharding: Any = None,
    guard: bool = False,
) -> jax.stages.Wrapped:
    """A jitted ``step(state, batch) -> (state, metrics)`` that owns its state.

    The state is donated: the new one takes its buffers, and the old one must not
    be used again. Randomness of step i is ``fold_in(state.key, i)``.

    Args:
      loss: ``loss(params, model_state, batch, key) -> (losses [batch], Aux)``.
      optimizer: an optax gradient transformation.
      mode: what is made of the losses; see `fnet.autodiff`.
      ema_decay: weight of the old average in ``state.ema``, in [0, 1); required exactly
        when the state keeps one.
      state_sharding: a state's tree of `jax.sharding.Sharding`: where the new state lies,
        for a state that is spread over devices. By default XLA decides.
      guard: True: where the loss or the gradient's norm is not finite, everything but
        ``step`` stays as it was, and the metric ``skipped`` is 1, else 0. All of the
        gradient then exists before any of it is applied.

    Returns:
      The step; ``metrics`` are scalars: what the mode reports, and ``grad_norm``.

    Raises:
      ValueError: for a guard of a mode that applies the gradient before all of it is known, or
        that adds noise (a step left out tells of its examples, and no noise covers that), or
        an ``ema_decay`` out of range; when called with a state whose ``ema`` does not match
        ``ema_decay``.
      TypeError: when called, for a loss that returns anything but ``(losses, Aux)``, or a batch
        that is no dict.
    """
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(f"make_step: ema_decay must be in [0, 1), got {ema_decay}")
    if guard and not getattr(mode, "whole_gradient", not isinstance(mode, UpdateMode)):
        raise ValueError(
            f"make_step: a guard needs the whole gradient before the update, which {mode} never has"
        )
    noise: float = getattr(mode, "noise_multiplier", 0.0)
    if guard and noise:
        raise ValueError(
            "make_step: a step that a guard leaves out tells of its examples, which noise is to "
            "hide; private modes leave out single examples instead"
        )
    return jit_step(TrainStep(loss, optimizer, mode, ema_decay, state_sharding, guard))


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """The pure function behind a step, ``make_step(...).__wrapped__``.

    ``jit_step(dataclasses.replace(...))`` is the same step with another loss or mode.

    Attributes:
      loss: as `make_step` takes it.
      optimizer: likewise.
      mode: likewise.
      ema_decay: likewise.
      state_sharding: likewise.
      guard: likewise.
    """

    loss: Loss
    optimizer: optax.GradientTransformation
    mode: Mode = mean
    ema_decay: float | None = None
    state_sharding: Any = None
    guard: bool = False

    # What the compiled program is called.
    __name__ = "step"

    def __call__(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        """The next state, and metrics []."""
        if (state.ema is None) != (self.ema_decay is None):
            raise ValueError(
                f"make_step: ema_decay={self.ema_decay}, but the state "
                f"{'has no' if state.ema is None else 'has an'} average; "
                "TrainState.create(ema=True) and make_step(ema_decay=...) go together"
            )
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"make_step: expected a batch of named arrays, a dict, got a {type(batch).__name__}"
            )
        update = update_of(self.mode, self.loss, self.optimizer)
        key = jax.random.fold_in(state.key, state.step)
        params, opt_state, model_state, metrics = update(
            state.params, state.opt_state, state.model_state, batch, key
        )
        ema = state.ema
        if self.ema_decay is not None:
            ema = optax.incremental_update(params, ema, step_size=1 - self.ema_decay)
        new = {
            "params": params,
            "model_state": model_state,
            "opt_state": opt_state,
            "ema": ema,
        }
        if self.guard:
            finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            old = {name: getattr(state, name) for name in new}
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
            metrics |= {"skipped": (~finite).astype(jnp.float32)}
        new_state = dataclasses.replace(state, step=state.step + 1, **new)
        if self.state_sharding is not None:
            new_state = jax.lax.with_sharding_constraint(new_state, self.state_sharding)
        return new_state, metrics


def jit_step(step: TrainStep) -> jax.stages.Wrapped:
    """The step jitted, its state donated; ``__wrapped__`` gives ``step`` back."""
    # A leaf that is overwritten without being read still gives its buffer.
    return jax.jit(step, donate_argnums=0, keep_unused=True)


class Report(NamedTuple):
    """What a compiled step costs, known before it runs; all in bytes but ``parameters``.

    Of a step that several devices share, the bytes are those of each.

    Attributes:
      parameters: how many numbers are trained.
      state_bytes: the whole state's.
      peak: arguments, outputs, aliased, temporaries and their peak.
      donation: the proof that the state is renewed in place.
      compiler_options: those given, or found to need the least memory.
    """

    parameters: int
    state_bytes: int
    peak: Peak
    donation: Donation
    compiler_options: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain nested dicts."""
        return self._asdict() | {
            "peak": self.peak.as_dict(),
            "donation": self.donation._asdict(),
        }


class Executable(NamedTuple):
    """A compiled step and what it costs."""

    compiled: jax.stages.Compiled
    report: Report

    def __call__(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        """The next state, in the buffers of ``state``, and the step's metrics."""
        after: tuple[TrainState, Metrics] = self.compiled(state, batch)
        return after


def compile_step(
    step: jax.stages.Wrapped,
    state: TrainState,
    batch: dict[str, Array],
    *,
    compiler_options: Mapping[str, Any] | None = None,
) -> Executable:
    """Compiles a step ahead of time, once; the result both runs and reports its memory.

    Args:
      step: from `make_step`.
      state: the state, or its shapes (``jax.eval_shape``).
      batch: a batch, or its shapes.
      compiler_options: to compile with. By default each of the backend's
        candidates is tried, and the smallest program kept.

    Returns:
      An executable ``(state, batch) -> (state, metrics)`` with ``.report``.

    Raises:
      DonationError: if a leaf of the state is not renewed in place; the message
        names it, its shape and dtype in and out, and the reason.
    """
    lowered = step.lower(state, batch)
    if compiler_options is None:
        compiled, options = compile_min_memory(lowered)
    else:
        options = dict(compiler_options)
        compiled = lowered.compile(compiler_options=options)
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
