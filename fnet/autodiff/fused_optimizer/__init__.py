"""The optimizer inside the backward pass, so that gradients of stacked layers never exist whole."""

from fnet.autodiff.fused_optimizer.mode import OptimizerInBackward, optimizer_in_backward
from fnet.autodiff.fused_optimizer.stack import StackPlaceholder

__all__ = ["OptimizerInBackward", "StackPlaceholder", "optimizer_in_backward"]
