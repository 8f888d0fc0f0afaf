"""Transformers with residual or with reversible blocks."""

from fnet import checks
from fnet.layer import Layer, residual, serial
from fnet.layers.activations import activation
from fnet.layers.attention import attention
from fnet.layers.dense import dense
from fnet.layers.norm import rms_norm_layer
from fnet.layers.reversible import reversible


def _mixer_and_mlp(
    where: str, width: int, heads: int, blocks: int, hidden: int | None, causal: bool, act: str
) -> tuple[Layer, Layer]:
    hidden = 4 * width if hidden is None else hidden
    checks.sizes(where, width=width, blocks=blocks, hidden=hidden)
    mixer = serial(norm=rms_norm_layer(width), attention=attention(width, heads, causal=causal))
    mlp = serial(
        norm=rms_norm_layer(width),
        expand=dense(width, hidden),
        act=activation(act),
        contract=dense(hidden, width),
    )
    return mixer, mlp


def transformer(
    width: int,
    heads: int,
    blocks: int,
    *,
    hidden: int | None = None,
    causal: bool = False,
    activation: str = "gelu",
) -> Layer:
    """Pre-norm transformer: ``x = x + attention(norm(x)); x = x + mlp(norm(x))`` per block.

    For padded sequences, which need a mask, and for incremental decoding, use
    `fnet.layers.stack`.

    Args:
      width: D, size of the last axis of input and output.
      heads: attention heads; divides ``width``.
      blocks: number of blocks.
      hidden: hidden width of the MLP; default 4 D.
      causal: whether each position attends only to itself and earlier positions.
      activation: name of the MLP's activation, as for `fnet.layers.activation`.

    Returns:
      A layer, [B, T, D] -> [B, T, D], without state.

    Raises:
      ValueError: for a size below 1, an unknown activation, or if ``heads`` does not divide
        ``width``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import layers
      >>> net = layers.transformer(8, heads=2, blocks=2, causal=True)
      >>> params, state = jax.jit(net.init)(jax.random.key(0))
      >>> apply = jax.jit(net.apply, static_argnames="train")
      >>> y, _ = apply(params, state, jnp.ones((2, 5, 8)), train=True)
      >>> y.shape
      (2, 5, 8)
    """
    mixer, mlp = _mixer_and_mlp("transformer", width, heads, blocks, hidden, causal, activation)
    return serial(*[serial(residual(mixer), residual(mlp))] * blocks)


def reversible_transformer(
    width: int,
    heads: int,
    blocks: int,
    *,
    hidden: int | None = None,
    causal: bool = False,
    activation: str = "gelu",
    restore: bool = True,
) -> Layer:
    """Transformer with reversible blocks: activations are recomputed from the output.

    With two streams, as in Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer",
    ICLR 2020; see `fnet.reversible`::

        y1 = x1 + attention(norm(x2))
        y2 = x2 + mlp(norm(y1))

    Args:
      width: D, width of each stream. The input holds both, concatenated.
      heads, blocks, hidden, causal, activation: as for `transformer`.
      restore: as for `fnet.reversible`.

    Returns:
      A layer, [B, T, 2 D] -> [B, T, 2 D], without state.

    Raises:
      ValueError: for a size below 1, an unknown activation, or if ``heads`` does not divide
        ``width``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import layers
      >>> net = layers.reversible_transformer(8, heads=2, blocks=1)
      >>> params, state = jax.jit(net.init)(jax.random.key(0))
      >>> apply = jax.jit(net.apply, static_argnames="train")
      >>> y, _ = apply(params, state, jnp.ones((2, 5, 16)), train=True)
      >>> y.shape
      (2, 5, 16)
    """
    where = "reversible_transformer"
    pair = _mixer_and_mlp(where, width, heads, blocks, hidden, causal, activation)
    return reversible([pair] * blocks, restore=restore)
