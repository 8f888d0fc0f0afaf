"""Recurrent block of Griffin: a causal convolution and a gated linear recurrent unit."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from fnet import checks
from fnet.backward_pass import save
from fnet.layer import Layer, Params
from fnet.layers.causal_conv import causal_conv_layer
from fnet.layers.dense import dense
from fnet.layers.recurrence import Step, linear_recurrence, recurrent
from fnet.layers.segments import restarts
from fnet.precision import broadcast_like, sum_dtype, upcast

_SHARPNESS = 8.0  # c in the paper
_MIN_DECAY, _MAX_DECAY = 0.9, 0.999  # range of the initial exp(-c softplus(L))

_BLOCK_NORMAL = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)


def rg_lru(
    width: int, *, expand: float = 1, heads: int = 4, conv: int = 4, scale_first: bool = True
) -> Layer:
    """Recurrent block with a real-gated linear recurrent unit (RG-LRU).

    De et al. 2024, "Griffin: Mixing Gated Linear Recurrences with Local Attention for
    Efficient Language Models", with c = 8, s the logistic function and L a parameter::

        u   = causal_conv(x W_recurrent + b_recurrent)
        r   = s(u W_r + b_r);   i = s(u W_i + b_i)      (block-diagonal, one block per head)
        a   = exp(-c softplus(L) r)
        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t
        y   = (h * gelu(x W_gate + b_gate)) W_out + b_out

    1 - a^2 is computed from log a, to keep precision near a = 1. It is at least the
    smallest normal number, so that every gradient is finite. Initially exp(-c softplus(L))
    is uniform in [0.9, 0.999]. Matrix products are computed in the dtype of the input,
    gates and recurrence in float32 or wider. Under `fnet.recompute` the states h are saved.

    Args:
      width: D, size of the last axis of input and output.
      expand: the recurrence has ``round(expand * width)`` channels (4 / 3 in the paper).
      heads: number of diagonal blocks of the gates' matrices; divides the channels.
      conv: width of the causal convolution.
      scale_first: whether sqrt(1 - a^2) scales the input also at the first position of a
        document. In RecurrentGemma it does not.

    Returns:
      A causal layer, [B, T, D] -> [B, T, D]. Its params, ``mask``, ``segments`` and
      `fnet.layer.Decode` are as for `fnet.layers.mamba`; its cached state is [B, E].

    Raises:
      ValueError: for a size below 1, or if ``heads`` does not divide the channels; when
        applied, if ``x`` does not end in ``width``.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.rg_lru(8, heads=2)
      >>> params, state = jax.jit(layer.init)(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 16, 8)), train=True)[0].shape
      (2, 16, 8)
    """
    inner = round(expand * width)
    checks.sizes("rg_lru", width=width, inner=inner, heads=heads, conv=conv)
    if inner % heads:
        raise ValueError(
            f"rg_lru: heads must divide round(expand * width) = {inner}, got heads={heads}"
        )
    block = inner // heads

    def init_own(decay_key: Array, r_key: Array, i_key: Array) -> Params:
        decay = jax.random.uniform(decay_key, (inner,), jnp.float32, _MIN_DECAY, _MAX_DECAY)

        def gate(key: Array) -> Params:
            kernel = _BLOCK_NORMAL(key, (heads, block, block), jnp.float32)
            return {"kernel": kernel, "bias": jnp.zeros(inner, jnp.float32)}

        return {
            "L": jnp.log(jnp.expm1(-jnp.log(decay) / _SHARPNESS)),  # inverse of softplus
            "recurrence_gate": gate(r_key),
            "input_gate": gate(i_key),
        }

    def mix(step: Step) -> tuple[Array, Array]:
        params, x = step.child.params, step.x
        u = step.convolve(step("recurrent"))
        with jax.named_scope("recurrence_gate"):
            r = _gate(params["recurrence_gate"], u)
        with jax.named_scope("input_gate"):
            i = _gate(params["input_gate"], u)
        with jax.named_scope("scan"):
            rate = jax.nn.softplus(params["L"].astype(sum_dtype(x)))
            log_a = -_SHARPNESS * broadcast_like(rate, r) * r
            scale = _complement(log_a)
            if not scale_first:
                is_first = (step.position + jnp.arange(x.shape[1]) == 0)[None]
                starts = restarts("rg_lru", step.segments, x.shape[:2])
                is_first = is_first if starts is None else is_first | starts
                scale = jnp.where(is_first[..., None], 1, scale)
            b = scale * i * u.astype(sum_dtype(x))
            h = linear_recurrence(jnp.exp(log_a), b, step.state, step.segments)
        y = save(h.astype(x.dtype)) * jax.nn.gelu(step("gate"))
        return step("out", y), h[:, -1]

    return recurrent(
        "rg_lru",
        width,
        mix,
        inputs=dict.fromkeys(("gate", "recurrent"), inner),
        conv=causal_conv_layer(inner, conv),
        inner=inner,
        state_shape=(inner,),
        linear=functools.partial(dense, kernel_init=jax.nn.initializers.lecun_normal()),
        init_own=init_own,
        draws=3,
    )


def _gate(params: Params, u: Array) -> Array:
    """Compute ``sigmoid(u W + b)`` [B, T, E], W block-diagonal, in float32 or wider."""
    heads, block, _ = params["kernel"].shape
    parts = u.reshape(*u.shape[:2], heads, block)
    z = jnp.einsum("bthi,hij->bthj", parts, params["kernel"].astype(u.dtype))
    z = upcast(z.reshape(u.shape))
    return jax.nn.sigmoid(z + broadcast_like(params["bias"], z))


def _complement(log_a: Array) -> Array:
    """Compute ``sqrt(1 - a^2)`` with a finite gradient at a = 1."""
    return jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_a), jnp.finfo(log_a.dtype).tiny))
