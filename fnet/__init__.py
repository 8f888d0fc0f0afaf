"""fnet trains bigger networks in the same memory, as pure functions over JAX."""

from fnet import autodiff, diffusion, interop, layers, losses, memory, models, optim
from fnet.autodiff import (
    Aux,
    accumulate_grad,
    clipped_grad,
    jacobian,
    jvps,
    per_example_grad,
    vjps,
)
from fnet.backward_pass import params_first, recompute
from fnet.generate import generate, sample_token, stream
from fnet.layer import Decode, Layer, repeat, residual, serial
from fnet.layers.abn import abn
from fnet.layers.attention_context import apply_context, update_context
from fnet.layers.dot_product_attention import dot_product_attention
from fnet.layers.group_norm import group_norm
from fnet.layers.mamba import selective_scan
from fnet.layers.mamba2 import state_space_dual
from fnet.layers.norm import layer_norm, rms_norm
from fnet.layers.recurrence import linear_recurrence
from fnet.layers.reversible import reversible
from fnet.losses import linear_cross_entropy
from fnet.planning import plan_step, variant
from fnet.state import TrainState
from fnet.step import compile_step, make_step

__version__ = "0.1.0"

__all__ = [
    "Aux",
    "Decode",
    "Layer",
    "TrainState",
    "abn",
    "accumulate_grad",
    "apply_context",
    "autodiff",
    "clipped_grad",
    "compile_step",
    "diffusion",
    "dot_product_attention",
    "generate",
    "group_norm",
    "interop",
    "jacobian",
    "jvps",
    "layer_norm",
    "layers",
    "linear_cross_entropy",
    "linear_recurrence",
    "losses",
    "make_step",
    "memory",
    "models",
    "optim",
    "params_first",
    "per_example_grad",
    "plan_step",
    "recompute",
    "repeat",
    "residual",
    "reversible",
    "rms_norm",
    "sample_token",
    "selective_scan",
    "serial",
    "state_space_dual",
    "stream",
    "update_context",
    "variant",
    "vjps",
]
