"""A short causal convolution of each channel along time, written as shifted sums."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from fnet.layer import Decode, Layer, Params, State, check_floating, check_sizes
from fnet.precision import broadcast_like


def causal_conv(
    x: Float[Array, "b t c"],
    kernel: Float[Array, "w c"],
    bias: Float[Array, " c"] | None = None,
    past: Float[Array, "b w-1 c"] | None = None,
) -> tuple[Float[Array, "b t c"], Float[Array, "b w-1 c"]]:
    """Each channel convolved with a filter of its own that sees no later time.

    ::

        y_t[c] = sum_w kernel[w, c] x_{t - W + 1 + w}[c] + bias[c]

    A sum of W shifted products: a depthwise convolution of that size is slower on CPU,
    and in a scan many times slower.

    Args:
      x: [B, T, C].
      kernel: [W, C], cast to the dtype of ``x``; its last row meets the present.
      bias: [C], likewise; None: 0.
      past: the W - 1 inputs before ``x``, the oldest first; None: zeros.

    Returns:
      ``(y, past)``: [B, T, C] in the dtype of ``x``, and what the next call is given as
      its past, in the dtype of ``past``.

    Raises:
      ValueError: if shapes do not fit.
      TypeError: if ``x`` is not floating.
    """
    if x.ndim != 3 or kernel.ndim != 2 or not kernel.shape[0] or kernel.shape[1] != x.shape[2]:
        raise ValueError(
            "causal_conv: expected x [B, T, C] and a kernel [W, C] with W >= 1, "
            f"got x {x.shape} and kernel {kernel.shape}"
        )
    (b, t, c), width = x.shape, kernel.shape[0]
    if bias is not None and bias.shape != (c,):
        raise ValueError(f"causal_conv: bias must have shape {(c,)}, got {bias.shape}")
    check_floating("causal_conv", x)
    if past is None:
        past = jnp.pad(x[:, :0], ((0, 0), (width - 1, 0), (0, 0)))  # zeros that lie as x does
    if past.shape != (b, width - 1, c):
        raise ValueError(
            f"causal_conv: past must have shape {(b, width - 1, c)} for x {x.shape} and "
            f"kernel {kernel.shape}, got {past.shape}"
        )
    seen = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    y = functools.reduce(
        jnp.add, [seen[:, w : w + t] * broadcast_like(kernel[w], x) for w in range(width)]
    )
    if bias is not None:
        y = y + broadcast_like(bias, x)
    return y, seen[:, t:].astype(past.dtype)


def causal_conv_layer(channels: int, width: int = 4) -> Layer:
    """`causal_conv` as a layer.

    Args:
      channels: C.
      width: W, how many inputs an output sees.

    Returns:
      A layer, [B, T, C] -> [B, T, C], with params ``kernel`` [W, C] (uniform with
      deviation 1 / sqrt(3 W) at first) and ``bias`` [C] (zeros), float32; no state. It
      can go on from where it stopped (`fnet.layer.Decode`): its cache is the last W - 1
      inputs.

    Raises:
      ValueError: if ``channels`` or ``width`` is below 1; when applied, as
        `causal_conv`.
      TypeError: when applied, as `causal_conv`.
    """
    check_sizes("causal_conv", channels=channels, width=width)

    def init(key: Array) -> tuple[Params, State]:
        bound = width**-0.5
        kernel = jax.random.uniform(key, (width, channels), jnp.float32, -bound, bound)
        return {"kernel": kernel, "bias": jnp.zeros(channels, jnp.float32)}, {}

    def apply(
        params: Params,
        state: State,
        x: Array,
        *,
        key: Array | None = None,
        train: bool,
        mask: Array | None = None,
    ) -> tuple[Array, State]:
        del key, train, mask
        return causal_conv(x, params["kernel"], params["bias"])[0], state

    def start(batch: int, length: int, dtype: DTypeLike) -> Array:
        del length
        return jnp.zeros((batch, width - 1, channels), dtype)

    def extend(
        params: Params, state: State, cache: Array, x: Array, position: Array
    ) -> tuple[Array, Array]:
        del state, position
        return causal_conv(x, params["kernel"], params["bias"], cache)

    return Layer(init, apply, Decode(start, extend))
