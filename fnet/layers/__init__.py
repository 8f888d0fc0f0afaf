"""Layers, one family a file; each is a `fnet.Layer`."""

from fnet.layers.abn import abn_layer as abn
from fnet.layers.activations import activation
from fnet.layers.attention import attention
from fnet.layers.attention_context import apply_context, update_context
from fnet.layers.batch_norm import batch_norm_layer as batch_norm
from fnet.layers.causal_conv import causal_conv_layer as causal_conv
from fnet.layers.conv import conv
from fnet.layers.dense import dense, mlp
from fnet.layers.dropout import dropout
from fnet.layers.dynamic_tanh import dynamic_tanh
from fnet.layers.embedding import embedding, unembed
from fnet.layers.feed_forward import feed_forward
from fnet.layers.fold import fold, fold_layer
from fnet.layers.group_norm import group_norm_layer as group_norm
from fnet.layers.kernel_init import cosine_patches, partly_identity
from fnet.layers.mamba import mamba
from fnet.layers.mamba2 import mamba2
from fnet.layers.norm import layer_norm_layer as layer_norm
from fnet.layers.norm import rms_norm_layer as rms_norm
from fnet.layers.pooling import avg_pool, global_avg_pool, global_max_pool, max_pool
from fnet.layers.reversible import reversible
from fnet.layers.rg_lru import rg_lru
from fnet.layers.rotary import rotary
from fnet.layers.stack import Block, stack
from fnet.layers.transformer import reversible_transformer, transformer

__all__ = [
    "Block",
    "abn",
    "activation",
    "apply_context",
    "attention",
    "avg_pool",
    "batch_norm",
    "causal_conv",
    "conv",
    "cosine_patches",
    "dense",
    "dropout",
    "dynamic_tanh",
    "embedding",
    "feed_forward",
    "fold",
    "fold_layer",
    "global_avg_pool",
    "global_max_pool",
    "group_norm",
    "layer_norm",
    "mamba",
    "mamba2",
    "max_pool",
    "mlp",
    "partly_identity",
    "reversible",
    "reversible_transformer",
    "rg_lru",
    "rms_norm",
    "rotary",
    "stack",
    "transformer",
    "unembed",
    "update_context",
]
