"""Where a train step's memory goes: everything that is known before it runs, as data."""

from typing import Any, NamedTuple

import jax

from fnet import memory
from fnet.memory import Buffer, LayerResiduals, Plan, Timeline
from train.run.planning import Planned
from train.run.setup import Setup

_LAYERS = 20
"""Most rows of a table and bars of a picture."""


class Account(NamedTuple):
    """What is known of a compiled train step.

    Attributes:
      planned: the step, and what it was chosen from.
      kept: what the backward pass keeps, by layer, in forward order; of a
        microbatch where there are several.
      timeline: bytes alive over the compiled program's schedule; None where the
        device's compiler does not tell.
    """

    planned: Planned
    kept: list[LayerResiduals]
    timeline: Timeline | None

    @property
    def largest(self) -> list[Buffer]:
        """The largest buffers alive at the peak."""
        return self.timeline.largest if self.timeline else []

    def as_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        planned = self.planned
        return planned.executable.report.as_dict() | {
            "policy": planned.policy,
            "microbatches": planned.microbatches,
            "remat": planned.proof._asdict() if planned.proof else None,
            "plan": _plan(planned.plan) if planned.plan else None,
            "kept": [layer._asdict() for layer in self.kept],
            "largest_at_peak": [buffer._asdict() for buffer in self.largest],
            "live_bytes": self.timeline.live_bytes if self.timeline else None,
        }


def account(run: Setup, planned: Planned) -> Account:
    """What is known of a compiled train step of a run."""
    try:
        timeline = planned.executable.report.peak.timeline
    except ValueError:
        timeline = None
    return Account(planned, kept(run, planned.policy, planned.microbatches), timeline)


def kept(run: Setup, policy: str, microbatches: int) -> list[LayerResiduals]:
    """What the backward pass of the run's loss keeps, by layer, under a policy.

    Names are cut to as many parts as leave a table that can be read.
    """
    state = run.state_shapes
    loss = memory.REMAT_POLICIES[policy].apply(run.task.loss)

    def objective(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        losses, aux = loss(params, model_state, batch, key)
        return losses.mean(), aux

    def of_a_part(parts: int) -> list[memory.Residual]:
        batch = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((a.shape[0] // parts, *a.shape[1:]), a.dtype),
            run.batch_shapes,
        )
        return memory.residuals(
            objective, state.params, state.model_state, batch, state.key, has_aux=True
        )

    try:
        found = of_a_part(microbatches * run.devices)
    except ValueError:  # alone, a device would have too few examples for a norm
        found = [r._replace(bytes=r.bytes // run.devices) for r in of_a_part(microbatches)]
    rows = [memory.by_layer(found, depth) for depth in range(1, 9)]
    return max((r for r in rows if len(r) <= _LAYERS), key=len, default=rows[0])


def _plan(plan: Plan) -> dict[str, Any]:
    def candidate(c: memory.Candidate | None) -> dict[str, Any] | None:
        if c is None:
            return None
        return c._asdict() | {"cost": c.cost._asdict(), "peak": c.peak.as_dict()}

    return {
        "budget": plan.budget,
        "chosen": candidate(plan.chosen),
        "smaller": candidate(plan.smaller),
        "candidates": [candidate(c) for c in plan.candidates],
    }
