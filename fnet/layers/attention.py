"""Multi-head self-attention."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.layer import Layer, Params, State, apply_child, init_children
from fnet.layers.linear import dense


def attention(width: int, heads: int, *, causal: bool = False) -> Layer:
    """``softmax(q k^T / sqrt(width / heads)) v`` in each head, and a dense layer after it.

    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, computed by
    ``jax.nn.dot_product_attention``.

    Args:
      width: D, the size of the input's and the output's last axis.
      heads: how many; divides ``width``.
      causal: whether a position sees only itself and those before it.

    Returns:
      A layer, [B, T, D] -> [B, T, D], with params ``query_key_value`` and ``output``,
      each ``{"kernel", "bias"}``; no state.

    Raises:
      ValueError: if ``heads`` does not divide ``width``.
    """
    if heads < 1 or width % heads:
        raise ValueError(f"attention: heads must divide width, got heads={heads}, width={width}")
    children = {"query_key_value": dense(width, 3 * width), "output": dense(width, width)}

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "b t d"],
        *,
        key: Array | None = None,
        train: bool,
    ) -> tuple[Float[Array, "b t d"], State]:
        qkv, _ = apply_child(children, "query_key_value", params, {}, x, key=key, train=train)
        qkv = qkv.reshape(*x.shape[:2], 3, heads, width // heads)
        q, k, v = jnp.moveaxis(qkv, 2, 0)  # [B, T, heads, width / heads] each
        y = jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x.shape)
        y, _ = apply_child(children, "output", params, {}, y, key=key, train=train)
        return y, state

    return Layer(lambda key: init_children(children, key), apply)
