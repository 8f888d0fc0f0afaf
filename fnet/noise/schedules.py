"""Schedules of noise and clip."""

Schedule = tuple[tuple[int, float], ...]
"""Factors from a step on, as in jax-privacy: ``((0, 1.0), (500, 0.7))``. Empty for 1."""


def check_schedule(name: str, **schedules: Schedule) -> None:
    """Reject schedules that do not begin at step 0, are not in order, or have factors <= 0."""
    for argument, schedule in schedules.items():
        steps = [step for step, _ in schedule]
        is_ordered = steps == sorted({*steps}) and steps[:1] in ([], [0])
        if not is_ordered or not all(0 < factor < float("inf") for _, factor in schedule):
            raise ValueError(
                f"{name}: {argument} must be pairs (step, factor > 0) in order from step 0, got "
                f"{schedule}"
            )
