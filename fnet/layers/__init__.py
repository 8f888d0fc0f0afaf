"""Layers, one family a file; each is a `fnet.Layer`."""

from fnet.layers.abn import layer as abn
from fnet.layers.activations import activation
from fnet.layers.conv import avg_pool, conv, global_avg_pool, max_pool
from fnet.layers.linear import dense
from fnet.layers.mlp import mlp
from fnet.layers.reversible import reversible

__all__ = [
    "abn",
    "activation",
    "avg_pool",
    "conv",
    "dense",
    "global_avg_pool",
    "max_pool",
    "mlp",
    "reversible",
]
