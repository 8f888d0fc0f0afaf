"""The plain gradient mode."""

from dataclasses import dataclass
from typing import Any, Literal

import optax
from typing_extensions import override

from fnet import autodiff
from train.config.gradient import GradientMode


@dataclass(frozen=True)
class Mean(GradientMode):
    """Gradient of the mean loss; a memory budget may split the batch into microbatches."""

    mode: Literal["mean"] = "mean"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""

    @override
    def build(
        self, config: Any, optimizer: optax.GradientTransformation, privacy: Any
    ) -> tuple[Any, optax.GradientTransformation]:
        return autodiff.mean, optimizer
