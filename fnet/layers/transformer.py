"""Stacks of transformer blocks: residual, or reversible, which keeps nothing per block."""

from fnet.layer import Layer, check_sizes, residual, serial
from fnet.layers.activations import activation
from fnet.layers.attention import attention
from fnet.layers.dense import dense
from fnet.layers.norm import rms_norm_layer
from fnet.layers.reversible import reversible


def _halves(
    where: str, width: int, heads: int, blocks: int, hidden: int | None, causal: bool, act: str
) -> tuple[Layer, Layer]:
    hidden = 4 * width if hidden is None else hidden
    check_sizes(where, width=width, blocks=blocks, hidden=hidden)
    mixer = serial(norm=rms_norm_layer(width), attention=attention(width, heads, causal=causal))
    feed_forward = serial(
        norm=rms_norm_layer(width),
        expand=dense(width, hidden),
        act=activation(act),
        contract=dense(hidden, width),
    )
    return mixer, feed_forward


def transformer(
    width: int,
    heads: int,
    blocks: int,
    *,
    hidden: int | None = None,
    causal: bool = False,
    activation: str = "gelu",
) -> Layer:
    """Pre-norm transformer blocks: ``x = x + attention(norm(x)); x = x + mlp(norm(x))``.

    Args:
      width: D.
      heads: of attention; divides ``width``.
      blocks: how many.
      hidden: width of the MLP; 4 D by default.
      causal: whether a position sees only itself and those before it.
      activation: of the MLP.

    Returns:
      A layer, [B, T, D] -> [B, T, D]; for padded rows, which need a mask, or to be decoded,
      take `fnet.layers.stack`.

    Raises:
      ValueError: for a size below 1, an unknown activation, or if ``heads`` does not divide
        ``width``.
    """
    mixer, feed_forward = _halves("transformer", width, heads, blocks, hidden, causal, activation)
    return serial(*[serial(residual(mixer), residual(feed_forward))] * blocks)


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
    """Transformer blocks on two coupled streams, with `fnet.reversible`.

    ``y1 = x1 + attention(norm(x2)); y2 = x2 + mlp(norm(y1))`` (Kitaev, Kaiser,
    Levskaya, "Reformer: The Efficient Transformer", ICLR 2020).

    Args:
      width: of each stream; the input has both, one after the other.
      heads, blocks, hidden, causal, activation: as for `transformer`.
      restore: as for `fnet.reversible`.

    Returns:
      A layer, [B, T, 2 D] -> [B, T, 2 D].

    Raises:
      ValueError: for a size below 1, an unknown activation, or if ``heads`` does not divide
        ``width``.
    """
    where = "reversible_transformer"
    pair = _halves(where, width, heads, blocks, hidden, causal, activation)
    return reversible([pair] * blocks, restore=restore)
