"""Griffin's recurrent block: a gated linear recurrent unit behind a causal convolution."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fnet.backward_pass import keep
from fnet.layer import Layer, Params, State, apply_child, check_sizes, init_children
from fnet.layers.causal_conv import causal_conv, causal_conv_layer
from fnet.layers.dense import dense
from fnet.layers.recurrence import linear_recurrence, recurrent
from fnet.precision import broadcast_like, wide, widened

_SHARPNESS = 8.0  # c
_SLOWEST, _FASTEST = 0.999, 0.9  # exp(-c softplus(L)) at first

_LECUN_NORMAL = jax.nn.initializers.lecun_normal()
_BLOCK_NORMAL = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)


def rg_lru(width: int, *, expand: float = 1, heads: int = 4, conv: int = 4) -> Layer:
    """A layer along time with a real-gated linear recurrent unit (RG-LRU).

    De et al. 2024, "Griffin: Mixing Gated Linear Recurrences with Local Attention for
    Efficient Language Models", with c = 8, s the logistic function and L a parameter::

        u   = causal_conv(x W_recurrent + b_recurrent)
        r   = s(u W_r + b_r);   i = s(u W_i + b_i)               (in blocks, one a head)
        a   = exp(-c softplus(L) r)
        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t
        y   = (h * gelu(x W_gate + b_gate)) W_out + b_out

    1 - a^2 is taken from log a, without the loss of digits near a = 1, and bounded below by
    the smallest normal number, so that every gradient is finite there. At first
    exp(-c softplus(L)) is uniform in [0.9, 0.999]. Products with matrices are in the input's
    dtype, gates and recurrence behind them in float32 or wider. Under `fnet.recompute` the
    states h are kept.

    Args:
      width: D, the size of the input's and the output's last axis.
      expand: the recurrence has ``round(expand * width)`` channels (the paper: 4 / 3).
      heads: blocks of the gates' matrices; divides the channels.
      conv: how many inputs the convolution sees.

    Returns:
      A layer, [B, T, D] -> [B, T, D], causal. Of the parameters (float32) only those
      named ``kernel`` are meant to decay. A ``mask`` [B, T] is taken and not needed: padding
      comes after what is real, which never sees it. To go on from where it stopped
      (`fnet.layer.Decode`) it needs a cache of one size, whatever the length: the last
      ``conv - 1`` inputs of the convolution, and the state [B, E] in float32 or wider.

    Raises:
      ValueError: for a size below 1, or ``heads`` that do not divide the channels; when
        applied, if ``x`` does not end in ``width``.
      TypeError: when applied, if ``x`` is not floating.
    """
    inner = round(expand * width)
    check_sizes("rg_lru", width=width, inner=inner, heads=heads, conv=conv)
    if inner % heads:
        raise ValueError(
            f"rg_lru: heads must divide round(expand * width) = {inner}, got heads={heads}"
        )
    block = inner // heads
    children = {
        "gate": dense(width, inner, kernel_init=_LECUN_NORMAL),
        "recurrent": dense(width, inner, kernel_init=_LECUN_NORMAL),
        "conv": causal_conv_layer(inner, conv),
        "out": dense(inner, width, kernel_init=_LECUN_NORMAL),
    }

    def init(key: Array) -> tuple[Params, State]:
        for_children, for_rates, for_r, for_i = jax.random.split(key, 4)
        params, _ = init_children(children, for_children)
        slowness = jax.random.uniform(for_rates, (inner,), jnp.float32, _FASTEST, _SLOWEST)

        def gate(key: Array) -> Params:
            kernel = _BLOCK_NORMAL(key, (heads, block, block), jnp.float32)
            return {"kernel": kernel, "bias": jnp.zeros(inner, jnp.float32)}

        return params | {
            "L": jnp.log(jnp.expm1(-jnp.log(slowness) / _SHARPNESS)),  # softplus turned round
            "recurrence_gate": gate(for_r),
            "input_gate": gate(for_i),
        }, {}

    def mix(params: Params, cache: Any, x: Array) -> tuple[Array, Any]:
        def child(name: str, x: Array) -> Array:
            return apply_child(children, name, params, {}, x, key=None, train=False)[0]

        u = child("recurrent", x)
        with jax.named_scope("conv"):
            u, past = causal_conv(u, **params["conv"], past=cache.get("conv"))
        with jax.named_scope("recurrence_gate"):
            r = _gate(params["recurrence_gate"], u)
        with jax.named_scope("input_gate"):
            i = _gate(params["input_gate"], u)
        with jax.named_scope("scan"):
            rate = jax.nn.softplus(params["L"].astype(wide(x)))
            log_a = -_SHARPNESS * broadcast_like(rate, r) * r
            scale = _complement(log_a)
            h = linear_recurrence(jnp.exp(log_a), scale * i * u.astype(wide(x)), cache.get("state"))
        y = keep(h.astype(x.dtype)) * jax.nn.gelu(child("gate", x))
        return child("out", y), {"conv": past, "state": h[:, -1]}

    def start(batch: int, length: int, dtype: DTypeLike) -> Any:
        del length
        return {
            "conv": jnp.zeros((batch, conv - 1, inner), dtype),
            "state": jnp.zeros((batch, inner), wide(dtype)),
        }

    return recurrent("rg_lru", width, init, mix, start)


def _gate(params: Params, u: Array) -> Array:
    """``sigmoid(u W + b)`` [B, T, E] with W block-diagonal, in float32 or wider."""
    heads, block, _ = params["kernel"].shape
    parts = u.reshape(*u.shape[:2], heads, block)
    z = jnp.einsum("bthi,hij->bthj", parts, params["kernel"].astype(u.dtype))
    z = widened(z.reshape(u.shape))
    return jax.nn.sigmoid(z + broadcast_like(params["bias"], z))


def _complement(log_a: Array) -> Array:
    """``sqrt(1 - a^2)``, with a gradient that is finite where a = 1."""
    return jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_a), jnp.finfo(log_a.dtype).tiny))
