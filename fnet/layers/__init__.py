"""Layers, one family per file. Each layer is a `fnet.Layer`."""

from fnet.layers.abn import abn_layer
from fnet.layers.activations import activation as activation
from fnet.layers.attention import AttentionVariant as AttentionVariant
from fnet.layers.attention import attention as attention
from fnet.layers.batch_norm import batch_norm as batch_norm
from fnet.layers.causal_conv import causal_conv_layer
from fnet.layers.conv import conv as conv
from fnet.layers.dense import dense as dense
from fnet.layers.dense import mlp as mlp
from fnet.layers.dropout import dropout as dropout
from fnet.layers.dynamic_tanh import dynamic_tanh as dynamic_tanh
from fnet.layers.embedding import embedding as embedding
from fnet.layers.embedding import unembed as unembed
from fnet.layers.experts import experts as experts
from fnet.layers.feed_forward import feed_forward as feed_forward
from fnet.layers.fold import fold as fold
from fnet.layers.gated_delta import gated_delta_net as gated_delta_net
from fnet.layers.group_norm import group_norm_layer
from fnet.layers.mamba import mamba as mamba
from fnet.layers.mamba2 import mamba2 as mamba2
from fnet.layers.norm import layer_norm_layer, rms_norm_layer
from fnet.layers.pooling import avg_pool as avg_pool
from fnet.layers.pooling import global_avg_pool as global_avg_pool
from fnet.layers.pooling import max_pool as max_pool
from fnet.layers.rg_lru import rg_lru as rg_lru
from fnet.layers.rotary import Rotary as Rotary
from fnet.layers.rotary import rotary as rotary
from fnet.layers.short_conv import short_conv as short_conv
from fnet.layers.stack import Block as Block
from fnet.layers.stack import stack as stack
from fnet.layers.transformer import transformer as transformer

# Without the suffix, modules and functions of arrays have these names.
abn = abn_layer
causal_conv = causal_conv_layer
group_norm = group_norm_layer
layer_norm = layer_norm_layer
rms_norm = rms_norm_layer
