"""Memory of a compiled train step: everything that is known before it runs, as data."""

from typing import Any

import jax

from fnet import memory
from fnet.memory import LayerResiduals, Plan, Policy
from train.run.planning import Planned
from train.run.setup import Setup

_MAX_LAYERS = 20
"""Largest number of rows in a table and of bars in a plot."""


def memory_report(planned: Planned) -> dict[str, Any]:
    """Return the contents of memory.json.

    ``live_bytes`` and ``largest_at_peak`` are empty if the compiler does not report the schedule,
    and ``residuals`` are of one microbatch if there are several.
    """
    try:
        timeline = planned.executable.report.peak.timeline
    except ValueError:
        timeline = None
    residuals = residuals_by_layer(planned.run, planned.policy, planned.microbatches)
    return planned.executable.report.as_dict() | {
        "policy": str(planned.policy),
        "microbatches": planned.microbatches,
        "remat": planned.remat._asdict() if planned.remat else None,
        "plan": _plan_as_dict(planned.plan) if planned.plan else None,
        "residuals": [layer._asdict() for layer in residuals],
        "largest_at_peak": [b._asdict() for b in timeline.largest] if timeline else [],
        "live_bytes": timeline.live_bytes if timeline else None,
    }


def residuals_by_layer(run: Setup, policy: str | Policy, microbatches: int) -> list[LayerResiduals]:
    """Return the bytes that the loss saves for the backward pass, by layer in forward order.

    Layers are grouped by the first parts of their names, so that at most 20 rows remain.
    """
    state = run.state_shapes
    loss = memory.REMAT_POLICIES[policy].apply(run.task.loss)

    def mean_loss(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        losses, aux = loss(params, model_state, batch, key)
        return losses.mean(), aux

    def residuals(parts: int) -> list[memory.Residual]:
        batch = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((a.shape[0] // parts, *a.shape[1:]), a.dtype),
            run.batch_shapes,
        )
        return memory.residuals(
            mean_loss, state.params, state.model_state, batch, state.key, has_aux=True
        )

    try:
        per_device = residuals(microbatches * run.devices)
    except ValueError:  # one device has too few examples for a norm without the others
        everywhere = residuals(microbatches)
        per_device = [r._replace(bytes=r.bytes // run.devices) for r in everywhere]
    groupings = [memory.by_layer(per_device, depth) for depth in range(1, 9)]
    readable = (rows for rows in groupings if len(rows) <= _MAX_LAYERS)
    return max(readable, key=len, default=groupings[0])


def _plan_as_dict(plan: Plan) -> dict[str, Any]:
    def as_dict(c: memory.Candidate) -> dict[str, Any]:
        costs = {"cost": c.cost._asdict(), "peak": c.peak.as_dict()}
        return c._asdict() | {"policy": str(c.policy)} | costs

    return {
        "budget": plan.budget,
        "chosen": as_dict(plan.chosen),
        "smaller": as_dict(plan.smaller) if plan.smaller else None,
        "candidates": [as_dict(c) for c in plan.candidates],
    }
