"""Transformers with residual or with reversible blocks."""

from fnet import checks
from fnet.layer import Layer, residual, serial
from fnet.layers.activations import activation as activation_layer
from fnet.layers.attention import attention
from fnet.layers.dense import dense
from fnet.layers.norm import rms_norm_layer
from fnet.layers.reversible import reversible as reversible_layer


def transformer(
    width: int,
    heads: int,
    blocks: int,
    *,
    hidden: int | None = None,
    causal: bool = False,
    activation: str = "gelu",
    reversible: bool = False,
    restore: bool = True,
) -> Layer:
    """Pre-norm transformer: ``x = x + attention(norm(x)); x = x + mlp(norm(x))`` per block.

    Reversible blocks restore activations from their output (`fnet.reversible`). They have two
    streams, as in Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer", ICLR 2020::

        y1 = x1 + attention(norm(x2))
        y2 = x2 + mlp(norm(y1))

    For padded sequences, which need a mask, and for incremental decoding, use `fnet.layers.stack`.

    Args:
      width: D, size of the last axis of input and output, or of each stream.
      heads: attention heads; divides ``width``.
      blocks: number of blocks.
      hidden: hidden width of the MLP; default 4 D.
      causal: whether each position attends only to itself and earlier positions.
      activation: name of the MLP's activation, as for `fnet.layers.activation`.
      reversible: whether blocks are reversible. Input and output then hold both streams.
      restore: as for `fnet.reversible`.

    Returns:
      A layer, [B, T, D] -> [B, T, D], or [B, T, 2 D] -> [B, T, 2 D], without state.

    Raises:
      ValueError: for a size below 1, an unknown activation, or if ``heads`` does not divide
        ``width``.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> net = fnet.layers.transformer(8, heads=2, blocks=1, reversible=True)
      >>> params, state = jax.jit(net.init)(jax.random.key(0))
      >>> net.apply(params, state, jnp.ones((2, 5, 16)), train=True)[0].shape
      (2, 5, 16)
    """
    hidden = 4 * width if hidden is None else hidden
    checks.sizes("transformer", width=width, blocks=blocks, hidden=hidden)
    mixer = serial(norm=rms_norm_layer(width), attention=attention(width, heads, causal=causal))
    mlp = serial(
        norm=rms_norm_layer(width),
        expand=dense(width, hidden),
        act=activation_layer(activation),
        contract=dense(hidden, width),
    )
    if reversible:
        return reversible_layer([(mixer, mlp)] * blocks, restore=restore)
    return serial(*[serial(residual(mixer), residual(mlp))] * blocks)
