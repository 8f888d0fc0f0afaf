"""fnet trains bigger networks in the same memory, as pure functions over JAX.

Public is what this module and the packages below it name. The rest is imported from its module,
such as ``fnet.fsdp.shard_state``.
"""

from typing import TYPE_CHECKING

from fnet import lazy

if TYPE_CHECKING:
    from fnet import attribution as attribution
    from fnet import autodiff as autodiff
    from fnet import diffusion as diffusion
    from fnet import interop as interop
    from fnet import layers as layers
    from fnet import lora as lora
    from fnet import losses as losses
    from fnet import memory as memory
    from fnet import models as models
    from fnet import optim as optim
    from fnet import privacy as privacy
    from fnet import quantization as quantization
    from fnet.autodiff import Aux as Aux
    from fnet.autodiff import accumulate_grad as accumulate_grad
    from fnet.autodiff import clipped_grad as clipped_grad
    from fnet.autodiff import jacobian as jacobian
    from fnet.autodiff import jvps as jvps
    from fnet.autodiff import per_example_grad as per_example_grad
    from fnet.autodiff import vjps as vjps
    from fnet.backward_pass import params_first as params_first
    from fnet.backward_pass import recompute as recompute
    from fnet.generate import generate as generate
    from fnet.generate import sample_token as sample_token
    from fnet.generate import stream as stream
    from fnet.layer import Decode as Decode
    from fnet.layer import Layer as Layer
    from fnet.layer import repeat as repeat
    from fnet.layer import residual as residual
    from fnet.layer import serial as serial
    from fnet.layers.abn import abn as abn
    from fnet.layers.attention_context import apply_context as apply_context
    from fnet.layers.attention_context import update_context as update_context
    from fnet.layers.dot_product_attention import dot_product_attention as dot_product_attention
    from fnet.layers.gated_delta import gated_delta_rule as gated_delta_rule
    from fnet.layers.group_norm import group_norm as group_norm
    from fnet.layers.mamba import selective_scan as selective_scan
    from fnet.layers.mamba2 import state_space_dual as state_space_dual
    from fnet.layers.norm import layer_norm as layer_norm
    from fnet.layers.norm import rms_norm as rms_norm
    from fnet.layers.recurrence import linear_recurrence as linear_recurrence
    from fnet.layers.reversible import reversible as reversible
    from fnet.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from fnet.state import TrainState as TrainState
    from fnet.step import compile_step as compile_step
    from fnet.step import make_step as make_step
    from fnet.step import plan_step as plan_step
else:
    lazy.import_names_late(__name__)

__version__ = "0.1.0"
