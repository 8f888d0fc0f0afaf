"""Gradient modes of a train step, per-example gradients and batched derivatives.

Modes turn one loss per example into an update: `mean`, `microbatches` (gradient accumulation),
`clipped` and `AdaptiveClipping` (private training, DP-SGD), `per_example` (gradient noise scale),
`optimizer_in_backward` (fused optimizer). The functions behind them work on their own.
"""

from typing import TYPE_CHECKING

from fnet import lazy

if TYPE_CHECKING:
    from fnet.autodiff.accumulate import accumulate_grad as accumulate_grad
    from fnet.autodiff.accumulate import microbatches
    from fnet.autodiff.batched.derivatives import hvps
    from fnet.autodiff.batched.derivatives import jacobian as jacobian
    from fnet.autodiff.batched.derivatives import jvps as jvps
    from fnet.autodiff.batched.derivatives import vjps as vjps
    from fnet.autodiff.fused_optimizer.mode import optimizer_in_backward
    from fnet.autodiff.mean import Aux as Aux
    from fnet.autodiff.mean import Gradient as Gradient
    from fnet.autodiff.mean import Loss as Loss
    from fnet.autodiff.mean import mean
    from fnet.autodiff.mean import weighted_mean as weighted_mean
    from fnet.autodiff.per_example.adaptive import AdaptiveClipping
    from fnet.autodiff.per_example.adaptive import adapt_clip as adapt_clip
    from fnet.autodiff.per_example.clipped import ClippedInfo as ClippedInfo
    from fnet.autodiff.per_example.clipped import clipped_grad as clipped_grad
    from fnet.autodiff.per_example.clipped import gradient_strategies as gradient_strategies
    from fnet.autodiff.per_example.gradients import NoiseScale as NoiseScale
    from fnet.autodiff.per_example.gradients import importance_sampling as importance_sampling
    from fnet.autodiff.per_example.gradients import influence as influence
    from fnet.autodiff.per_example.gradients import noise_scale, per_example_norms
    from fnet.autodiff.per_example.gradients import per_example_grad as per_example_grad
    from fnet.autodiff.per_example.modes import ClippedMode as clipped  # noqa: N813, a mode like `mean`
    from fnet.autodiff.per_example.modes import PerExampleMode as per_example  # noqa: N813
    from fnet.autodiff.update import Mode as Mode
    from fnet.autodiff.update import Update as Update
else:
    lazy.import_names_late(__name__)

__all__ = ["AdaptiveClipping", "clipped", "hvps", "mean", "microbatches", "noise_scale"]
__all__ += ["optimizer_in_backward", "per_example", "per_example_norms"]
