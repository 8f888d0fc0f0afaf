"""Predict a train step on other devices: memory, time, and the largest batch."""

from pathlib import Path
from typing import Any, NamedTuple

from fnet import memory
from fnet.memory import roofline
from fnet.memory.target import Target, describe, from_text
from train.errors import UserError
from train.run.mesh import layout
from train.run.planning import Planned, Progress, SizeProgress, largest_batch, limit, predict
from train.run.setup import Setup


class Prediction(NamedTuple):
    """Memory and time of a train step on a device.

    Attributes:
      planned: The compiled step, of the predicted batch size.
      target: The device; None for this machine.
      limit: Bytes that the compiled step may use; None without a budget.
      estimate: Estimated time of a step; None on this machine and on GPUs of unknown rates.
      utilization: Estimated share of the device's peak (MFU); None without an estimate.
    """

    planned: Planned
    target: Target | None
    limit: int | None
    estimate: roofline.Estimate | None
    utilization: float | None

    @property
    def run(self) -> Setup:
        """Setup of the run on that device."""
        return self.planned.run

    @property
    def peak(self) -> memory.Peak:
        """Peak memory of the step per device."""
        return self.planned.executable.report.peak

    @property
    def fits(self) -> bool:
        """Whether the step fits the limit."""
        return self.limit is None or self.peak.total <= self.limit

    @property
    def unit(self) -> str:
        """Unit of a batch: tokens, images or examples."""
        names = (name for name in ("tokens", "image") if name in self.run.batch_shapes)
        return {"tokens": "tokens", "image": "images"}.get(next(names, ""), "examples")

    @property
    def per_second(self) -> float | None:
        """Tokens, images or examples per second of all devices together."""
        if self.estimate is None:
            return None
        rows = self.run.config.data.batch_size
        if self.unit == "tokens":  # the last token of a row is only a target
            rows *= self.run.batch_shapes["tokens"].shape[-1] - 1
        return rows / self.estimate.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction for memory.json."""
        report, e = self.planned.executable.report, self.estimate
        return {
            "target": self.target.name if self.target else None,
            "devices": self.run.devices,
            "fits": self.fits,
            "limit": self.limit,
            "batch_size": self.run.config.data.batch_size,
            "policy": str(self.planned.policy),
            "microbatches": self.planned.microbatches,
            "peak": report.peak.as_dict(),
            "seconds_per_step": e.seconds if e else None,
            f"{self.unit}_per_second": self.per_second,
            "utilization": self.utilization,
            "flops": e.total_flops if e else None,
            "bytes": e.bytes if e else None,
            "link_bytes": e.link_bytes if e else None,
            "time_share": e.share if e else None,
        }


def predict_on(
    run: Setup,
    target: Target | None,
    *,
    largest: bool = False,
    progress: Progress | None = None,
    size_progress: SizeProgress | None = None,
) -> Prediction:
    """Compile the step of a config for a device, by default this machine, and estimate its time.

    With ``largest``, the largest batch that fits is found.
    """
    run = run.on(layout(run.config, target.devices if target else None))
    most = limit(run, target)
    if largest:
        if most is None:
            raise UserError("--batch-size auto: needs --budget or --target")
        found = largest_batch(run, most, target=target, progress=size_progress)
        if found is None:
            on = f" of {target.name}" if target else ""
            available = memory.format_bytes(max(most, 0))
            raise UserError(f"not even the smallest batch fits in {available}{on}")
        planned = found
    else:
        within = most if run.config.memory.budget or run.config.memory.policy == "auto" else None
        try:
            planned = predict(run, within, target=target, progress=progress)
        except UserError:
            if run.config.memory.budget:
                raise
            planned = predict(run, target=target)  # shows by how much it is too large
    estimate = share = None
    if target and target.peaks:
        estimate = roofline.estimate(planned.executable, target.peaks)
        flops = estimate.total_flops / _extra_flops(planned)
        share = roofline.utilization(flops, estimate.seconds, estimate, target.peaks)
    return Prediction(planned, target, most, estimate, share)


def target_of(given: str, count: int = 1) -> Target:
    """Return ``count`` known devices, or devices that a file describes."""
    path = Path(given)
    try:
        if path.is_file():
            return from_text(path.stem, path.read_text(), count)
        return describe(given, count)
    except (ValueError, RuntimeError, OSError) as error:
        message = str(error).removeprefix("describe: ").removeprefix("from_text: ")
        raise UserError(f"--target: {message}") from error


def _extra_flops(planned: Planned) -> float:
    if str(planned.policy) == "none":
        return 1.0

    def flops(policy: Any) -> int:
        run = planned.run
        step = run.step.replace(remat=policy, microbatches=planned.microbatches)
        traced = step.trace(run.state_shapes, run.batch_shapes)
        return memory.estimate_cost(traced.jaxpr).flops

    return flops(planned.policy) / max(flops("none"), 1)
