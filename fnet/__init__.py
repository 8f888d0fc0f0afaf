"""fnet trains bigger networks in the same memory, as pure functions over JAX.

The names in ``__all__`` are what most users need. Everything else stays importable from its
module, such as ``fnet.step.plan_step`` or ``fnet.layers.group_norm``.
"""

from fnet import (
    attribution,
    autodiff,
    diffusion,
    interop,
    layers,
    lora,
    losses,
    memory,
    models,
    optim,
    privacy,
    quantization,
)
from fnet.autodiff import (
    Aux,
    accumulate_grad,
    clipped_grad,
    jacobian,
    jvps,
    per_example_grad,
)
from fnet.autodiff import vjps as vjps
from fnet.backward_pass import params_first as params_first
from fnet.backward_pass import recompute
from fnet.generate import generate
from fnet.generate import sample_token as sample_token
from fnet.generate import stream as stream
from fnet.layer import Decode as Decode
from fnet.layer import Layer, repeat, residual, serial
from fnet.layers.abn import abn
from fnet.layers.attention_context import apply_context as apply_context
from fnet.layers.attention_context import update_context as update_context
from fnet.layers.dot_product_attention import dot_product_attention as dot_product_attention
from fnet.layers.gated_delta import gated_delta_rule as gated_delta_rule
from fnet.layers.group_norm import group_norm as group_norm
from fnet.layers.mamba import selective_scan as selective_scan
from fnet.layers.mamba2 import state_space_dual as state_space_dual
from fnet.layers.norm import layer_norm, rms_norm
from fnet.layers.recurrence import linear_recurrence as linear_recurrence
from fnet.layers.reversible import reversible
from fnet.losses import linear_cross_entropy
from fnet.state import TrainState
from fnet.step import compile_step, make_step
from fnet.step import plan_step as plan_step

__version__ = "0.1.0"

__all__ = [
    "Aux",
    "Layer",
    "TrainState",
    "abn",
    "accumulate_grad",
    "attribution",
    "autodiff",
    "clipped_grad",
    "compile_step",
    "diffusion",
    "generate",
    "interop",
    "jacobian",
    "jvps",
    "layer_norm",
    "layers",
    "linear_cross_entropy",
    "lora",
    "losses",
    "make_step",
    "memory",
    "models",
    "optim",
    "per_example_grad",
    "privacy",
    "quantization",
    "recompute",
    "repeat",
    "residual",
    "reversible",
    "rms_norm",
    "serial",
]
