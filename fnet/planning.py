"""A train step that fits a budget: the same step, with another policy and in microbatches."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import Array

from fnet.autodiff import mean, microbatches
from fnet.memory.peak import tree_bytes
from fnet.memory.plan import Candidate, Plan, plan
from fnet.memory.policy import REMAT_POLICIES
from fnet.memory.target import Target, on
from fnet.state import TrainState
from fnet.step import TrainStep, jit_step


def plan_step(
    step: jax.stages.Wrapped,
    state: TrainState,
    batch: dict[str, Array],
    budget: int | str | None = None,
    *,
    policies: Sequence[str] | None = None,
    splits: Iterable[int] | None = None,
    reserve: int = 0,
    target: Target | None = None,
    progress: Callable[[Candidate], None] | None = None,
) -> Plan:
    """The fastest way to take a train step within a budget, found without taking one.

    The result's ``chosen`` is made with `variant` and compiled with
    ``fnet.compile_step(..., compiler_options=chosen.compiler_options)``.

    Args:
      step: from `fnet.make_step`, in the mode ``mean``.
      state: the state, or its shapes (``jax.eval_shape``).
      batch: a batch, or its shapes.
      budget: bytes, or as ``4GiB``, ``4GB``, ``4096MiB``; None for no limit.
      policies: keys of `fnet.memory.REMAT_POLICIES` to choose from; all by default.
      splits: numbers of microbatches to choose from. By default the powers of two
        that divide the batch where there is a budget and all its arrays share their leading
        axis, else 1. Where the state has
        statistics of the batch (``model_state``), which splitting changes, they
        are the last resort; parts that the network refuses as too small are left out.
      reserve: bytes of the budget that others need.
      target: a device to plan for; this machine's by default.
      progress: called with each candidate once it is compiled.

    Returns:
      The plan: ``chosen``, and all candidates that were compiled.

    Raises:
      BudgetError: for a budget below the state's size, and where nothing fits.
      ValueError: for a budget that cannot be read, an unknown policy, nothing to choose from, or
        microbatches in another mode.
    """
    if splits is None:
        sizes: set[Any] = {getattr(x, "shape", ())[:1] for x in jax.tree.leaves(batch)}
        shared = len(sizes) == 1 and () not in sizes  # a number has no parts
        rows = sizes.pop()[0] if shared and budget is not None else 1
        splits = [2**i for i in range(rows.bit_length()) if rows % 2**i == 0]
    splits = tuple(splits)
    variant(step, "none", max(splits, default=1))  # a mode that cannot be split is told at once

    def build(policy: str, split: int) -> jax.stages.Traced:
        args: tuple[Any, Any] = (state, batch)
        return variant(step, policy, split).trace(*(on(target, args) if target else args))

    return plan(
        build,
        budget,
        policies=policies,
        microbatches=splits,
        couples_batch=bool(jax.tree.leaves(state.model_state)),
        state_bytes=tree_bytes(state),
        reserve=reserve,
        target=target,
        progress=progress,
    )


def variant(step: jax.stages.Wrapped, policy: str, split: int = 1) -> jax.stages.Wrapped:
    """The same train step under a policy, its batch in microbatches.

    Args:
      step: from `fnet.make_step`.
      policy: a key of `fnet.memory.REMAT_POLICIES`.
      split: how many microbatches; 1 leaves the step's mode as it is.

    Returns:
      A jitted ``step(state, batch) -> (state, metrics)``, its state donated, as `fnet.make_step`
      gives it.

    Raises:
      ValueError: for an unknown policy, a split below 1, or microbatches in another mode than
        ``mean``.
    """
    if policy not in REMAT_POLICIES:
        raise ValueError(f"variant: expected a policy of {list(REMAT_POLICIES)}, got {policy!r}")
    if split < 1:
        raise ValueError(f"variant: split must be at least 1, got {split}")
    plain: TrainStep = step.__wrapped__  # type: ignore[attr-defined]
    mode = plain.mode
    if split > 1:
        if mode is not mean:
            raise ValueError(f"variant: only the mode mean can be split, got {mode}")
        mode = microbatches(split)
    return jit_step(
        dataclasses.replace(plain, loss=REMAT_POLICIES[policy].apply(plain.loss), mode=mode)
    )
