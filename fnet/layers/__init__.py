"""Layers, one family per file. Each layer is a `fnet.Layer`."""

from fnet.layers.abn import abn_layer as abn
from fnet.layers.activations import activation
from fnet.layers.attention import AttentionVariant as AttentionVariant
from fnet.layers.attention import attention
from fnet.layers.attention_context import apply_context as apply_context
from fnet.layers.attention_context import update_context as update_context
from fnet.layers.batch_norm import batch_norm_layer as batch_norm
from fnet.layers.causal_conv import causal_conv_layer as causal_conv
from fnet.layers.conv import conv
from fnet.layers.dense import dense, mlp
from fnet.layers.dropout import dropout
from fnet.layers.dynamic_tanh import dynamic_tanh as dynamic_tanh
from fnet.layers.embedding import embedding
from fnet.layers.embedding import unembed as unembed
from fnet.layers.experts import experts as experts
from fnet.layers.feed_forward import feed_forward
from fnet.layers.fold import fold as fold
from fnet.layers.gated_delta import gated_delta_net as gated_delta_net
from fnet.layers.global_response_norm import global_response_norm as global_response_norm
from fnet.layers.group_norm import group_norm_layer as group_norm
from fnet.layers.kernel_init import cosine_patches as cosine_patches
from fnet.layers.kernel_init import partly_identity as partly_identity
from fnet.layers.layer_scale import layer_scale as layer_scale
from fnet.layers.mamba import mamba
from fnet.layers.mamba2 import mamba2
from fnet.layers.norm import layer_norm_layer as layer_norm
from fnet.layers.norm import rms_norm_layer as rms_norm
from fnet.layers.pooling import avg_pool, global_avg_pool, max_pool
from fnet.layers.pooling import global_max_pool as global_max_pool
from fnet.layers.reversible import reversible as reversible
from fnet.layers.rg_lru import rg_lru as rg_lru
from fnet.layers.rotary import Rotary as Rotary
from fnet.layers.rotary import rotary as rotary
from fnet.layers.short_conv import short_conv as short_conv
from fnet.layers.stack import Block, stack
from fnet.layers.transformer import reversible_transformer as reversible_transformer
from fnet.layers.transformer import transformer as transformer

__all__ = [
    "Block",
    "abn",
    "activation",
    "attention",
    "avg_pool",
    "batch_norm",
    "causal_conv",
    "conv",
    "dense",
    "dropout",
    "embedding",
    "feed_forward",
    "global_avg_pool",
    "group_norm",
    "layer_norm",
    "mamba",
    "mamba2",
    "max_pool",
    "mlp",
    "rms_norm",
    "stack",
]
