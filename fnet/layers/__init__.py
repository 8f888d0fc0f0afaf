"""Layers, one family a file; each is a `fnet.Layer`."""

from fnet.layers.abn import layer as abn
from fnet.layers.activations import activation
from fnet.layers.attention import attention
from fnet.layers.conv import avg_pool, conv, global_avg_pool, max_pool
from fnet.layers.embedding import embedding, unembed
from fnet.layers.fold import fold, fold_layer
from fnet.layers.group_norm import group_norm_layer as group_norm
from fnet.layers.linear import dense
from fnet.layers.mlp import mlp
from fnet.layers.norm import layer_norm_layer as layer_norm
from fnet.layers.norm import rms_norm_layer as rms_norm
from fnet.layers.reversible import reversible
from fnet.layers.transformer import reversible_transformer, transformer

__all__ = [
    "abn",
    "activation",
    "attention",
    "avg_pool",
    "conv",
    "dense",
    "embedding",
    "fold",
    "fold_layer",
    "global_avg_pool",
    "group_norm",
    "layer_norm",
    "max_pool",
    "mlp",
    "reversible",
    "reversible_transformer",
    "rms_norm",
    "transformer",
    "unembed",
]
