"""Gradient accumulation."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import optax
from typing_extensions import override

from fnet import autodiff
from train.config.gradient import GradientMode
from train.config.section import Count


@dataclass(frozen=True)
class Microbatch(GradientMode):
    """Gradient of the mean loss, accumulated over microbatches."""

    has_fixed_microbatches: ClassVar[bool] = True

    mode: Literal["microbatch"] = "microbatch"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""
    microbatches: Count = 2
    """Number of microbatches that each batch is split into."""

    @override
    def build(
        self, config: Any, optimizer: optax.GradientTransformation, privacy: Any
    ) -> tuple[Any, optax.GradientTransformation]:
        return autodiff.microbatches(self.microbatches), optimizer
