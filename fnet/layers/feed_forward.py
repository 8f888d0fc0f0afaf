"""Feed-forward layer of a transformer block, gated (SwiGLU) or plain."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet import checks
from fnet.layer import Children, Layer, Params, composite
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
    fused: bool = True,
    dropout: float = 0.0,
    hidden_norm: Layer | None = None,
    gate_scale: float | None = None,
) -> Layer:
    """Feed-forward layer, gated by default: ``y = (act(x Wg) * (x Wu)) Wd``.

    Shazeer 2020, "GLU Variants Improve Transformer": SwiGLU with ``silu``, GEGLU with
    ``gelu``. Without a gate, ``y = act(x Wu) Wd``. The backward pass saves ``x Wg`` and
    ``x Wu`` [..., hidden] and rematerializes the activation and the gated product.

    Args:
      width: D, size of the last axis of input and output.
      hidden: hidden width. With 8 / 3 D the gated form has as many parameters as the plain
        one with 4 D.
      activation: name of an activation, as for `fnet.layers.activation`.
      gated: whether to multiply by a gate.
      bias: whether the dense layers have biases.
      fused: whether one dense layer computes the gate and what it multiplies. Otherwise there are
        two.
      dropout: dropout rate of the output in training.
      hidden_norm: a layer [..., hidden] -> [..., hidden] before ``Wd``, which is rematerialized,
        such as that of ConvNeXt V2; None: no such layer.
      gate_scale: factor of the gate before its activation; None: no factor.

    Returns:
      A layer, [..., D] -> [..., D], without state. Its params are ``expand`` with kernel
      [D, 2 hidden] (gate, then up) or without a gate [D, hidden], and ``contract`` with
      kernel [hidden, D]. If gated and not fused, ``gate`` and ``up`` [D, hidden] replace
      ``expand``. ``hidden_norm`` has its own.

    Raises:
      ValueError: if ``width`` or ``hidden`` is below 1, the activation is unknown, or the
        rate is not in [0, 1); when applied in training with dropout and without a key.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.feed_forward(8, 32)
      >>> params, state = layer.init(jax.random.key(0))
      >>> jax.tree.map(jnp.shape, params)
      {'contract': {'kernel': (32, 8)}, 'expand': {'kernel': (8, 64)}}
      >>> layer.apply(params, state, jnp.ones((2, 5, 8)), train=True)[0].shape
      (2, 5, 8)
    """
    checks.sizes("feed_forward", width=width, hidden=hidden)
    act, param = activations.get(activation).forward, activations.parameter_of(activation, None)
    if gated and not fused:
        expand = {name: dense(width, hidden, bias=bias) for name in ("gate", "up")}
    else:
        expand = {"expand": dense(width, hidden * (2 if gated else 1), bias=bias)}
    children = expand | {
        "contract": dense(hidden, width, bias=bias),
        "dropout": dropout_layer(dropout),
    }
    if hidden_norm is not None:
        children["hidden_norm"] = hidden_norm

    def apply(child: Children, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        z = [child(name, x) for name in expand]
        params = {name: p for name, p in child.params.items() if name not in expand}

        @jax.checkpoint
        def contract(params: Params, z: list[Array]) -> Array:
            if gated:
                gate, up = z if len(z) == 2 else jnp.split(z[0], 2, axis=-1)
                if gate_scale is not None:
                    gate = gate * jnp.asarray(gate_scale, gate.dtype)
                h = act(gate, param) * up
            else:
                h = act(z[0], param)
            inner = Children(children, params, {}, None, child.train)
            return inner.in_order([n for n in ("hidden_norm", "contract") if n in children], h)

        return child("dropout", contract(params, z))

    return composite(children, apply, random=dropout > 0)
