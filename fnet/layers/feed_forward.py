"""The feed-forward half of a transformer block, gated (SwiGLU) or plain."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.layer import Layer, Params, State, apply_child, check_sizes, init_children
from fnet.layers import activations
from fnet.layers.dense import dense
from fnet.layers.dropout import dropout as dropout_layer


def feed_forward(
    width: int,
    hidden: int,
    *,
    activation: str = "silu",
    gated: bool = True,
    bias: bool = False,
    dropout: float = 0.0,
) -> Layer:
    """``(act(x Wg) * (x Wu)) Wd``, or without a gate ``act(x Wu) Wd``.

    Shazeer 2020, "GLU Variants Improve Transformer": SwiGLU with silu, GEGLU with gelu.
    The backward pass keeps the products ``x Wg`` and ``x Wu`` and makes the activation
    and the gated product, [..., hidden] each, again.

    Args:
      width: D, the size of the input's and the output's last axis.
      hidden: the width between; with 8 / 3 D the gated form has as many parameters as the
        plain one with 4 D.
      activation: a name of `fnet.layers.activations`.
      gated: whether half of what the first product gives scales the other half.
      bias: whether the dense layers have one.
      dropout: rate, of the output in training.

    Returns:
      A layer, [..., D] -> [..., D], with params ``expand``, whose kernel is [D, 2 hidden]
      (gate, then up), without a gate [D, hidden], and ``contract`` [hidden, D]; no state.

    Raises:
      ValueError: if ``width`` or ``hidden`` is below 1, the activation unknown, or the rate
        not in [0, 1); when applied in training with dropout and without a key.
    """
    check_sizes("feed_forward", width=width, hidden=hidden)
    act, param = activations.get(activation).forward, activations.parameter_of(activation, None)
    children = {
        "expand": dense(width, hidden * (2 if gated else 1), bias=bias),
        "contract": dense(hidden, width, bias=bias),
        "dropout": dropout_layer(dropout),
    }

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "... d"],
        *,
        key: Array | None = None,
        train: bool,
    ) -> tuple[Float[Array, "... d"], State]:
        z, _ = apply_child(children, "expand", params, {}, x, key=None, train=train)

        @jax.checkpoint
        def contract(params: Params, z: Array) -> Array:
            if gated:
                gate, up = jnp.split(z, 2, axis=-1)
                h = act(gate, param) * up
            else:
                h = act(z, param)
            return apply_child(children, "contract", params, {}, h, key=None, train=train)[0]

        y = contract({"contract": params["contract"]}, z)
        y, _ = apply_child(children, "dropout", {}, {}, y, key=key, train=train)
        return y, state

    return Layer(lambda key: init_children(children, key), apply)
