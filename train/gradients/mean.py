"""The gradient of the mean loss: of the whole batch, over microbatches, or per example."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from typing_extensions import override

import fnet
from train.config.gradient import Built, GradientMode
from train.config.section import Count


@dataclass(frozen=True)
class Mean(GradientMode):
    """Gradient of the mean loss; a memory budget may split the batch into microbatches."""

    mode: Literal["mean"] = "mean"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""

    @override
    def build(self, config: Any, optimizer: Any, privacy: Any) -> Built:
        return fnet.autodiff.mean, optimizer


@dataclass(frozen=True)
class Microbatch(GradientMode):
    """Gradient of the mean loss, accumulated over microbatches."""

    has_fixed_microbatches: ClassVar[bool] = True

    mode: Literal["microbatch"] = "microbatch"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""
    microbatches: Count = 2
    """Number of microbatches that each batch is split into."""

    @override
    def build(self, config: Any, optimizer: Any, privacy: Any) -> Built:
        return fnet.autodiff.microbatches(self.microbatches), optimizer


@dataclass(frozen=True)
class PerExample(GradientMode):
    """Gradient of the mean loss, and the gradient noise scale from per-example gradients."""

    is_per_example: ClassVar[bool] = True
    has_fixed_microbatches: ClassVar[bool] = True

    mode: Literal["per_example"] = "per_example"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""
    per_layer: bool = False
    """Measure the noise scale of each parameter array, too."""

    @override
    def build(self, config: Any, optimizer: Any, privacy: Any) -> Built:
        return fnet.autodiff.per_example(self.per_layer), optimizer
