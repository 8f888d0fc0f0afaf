"""A short causal depthwise convolution over the sequence."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from fnet import checks
from fnet.layer import Children, Decode, Layer, Params, State, composite
from fnet.layers.segments import restarts
from fnet.precision import broadcast_like


def causal_conv(
    x: Float[Array, "b t c"],
    kernel: Float[Array, "w c"],
    bias: Float[Array, " c"] | None = None,
    past: Float[Array, "b w-1 c"] | None = None,
    segments: Int[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t c"], Float[Array, "b w-1 c"]]:
    """Convolve each channel with its own short causal filter.

    ::

        y_t[c] = sum_w kernel[w, c] x_{t - W + 1 + w}[c] + bias[c]

    It is computed as a sum of W shifted products. A depthwise ``lax.conv`` of this size is slower
    on CPU, and many times slower inside a scan. ``past`` are the W - 1 inputs before ``x``, oldest
    first; None: zeros. Inputs of other documents count as zeros, and ``past`` belongs to the first
    one. Returns y in the dtype of ``x``, and the last W - 1 inputs for the next call.
    """
    if x.ndim != 3 or kernel.ndim != 2 or not kernel.shape[0] or kernel.shape[1] != x.shape[2]:
        raise ValueError(
            "causal_conv: expected x [B, T, C] and a kernel [W, C] with W >= 1, "
            f"got x {x.shape} and kernel {kernel.shape}"
        )
    (b, t, c), width = x.shape, kernel.shape[0]
    given = f"x {x.shape} and kernel {kernel.shape}"
    checks.shapes("causal_conv", given, bias=(bias, (c,)), past=(past, (b, width - 1, c)))
    checks.floating("causal_conv", x=x)
    if past is None:
        past = jnp.pad(x[:, :0], ((0, 0), (width - 1, 0), (0, 0)))  # zeros, sharded like x
    inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    starts = restarts("causal_conv", segments, (b, t))
    documents = None if starts is None else jnp.cumsum(starts, axis=1)

    def shifted(w: int) -> Array:
        """Inputs W - 1 - w positions before, or zeros if they are of another document."""
        before = inputs[:, w : w + t]
        if documents is None or w == width - 1:
            return before
        of_inputs = jnp.pad(documents, ((0, 0), (width - 1, 0)))[:, w : w + t]
        return jnp.where((of_inputs == documents)[..., None], before, 0)

    y = functools.reduce(jnp.add, [shifted(w) * broadcast_like(kernel[w], x) for w in range(width)])
    if bias is not None:
        y = y + broadcast_like(bias, x)
    return y, inputs[:, t:].astype(past.dtype)


def causal_conv_layer(channels: int, width: int = 4, *, bias: bool = True) -> Layer:
    """Convolve each channel with a short causal filter.

    Args:
      channels: C.
      width: W, the filter width: each output sees W inputs.
      bias: whether to add a bias.

    Returns:
      A layer, [B, T, C] -> [B, T, C], without state. Its params, float32, are ``kernel``
      [W, C], initially uniform with standard deviation 1 / sqrt(3 W), and ``bias`` [C],
      initially zeros. ``apply`` also takes ``segments`` [B, T], as `causal_conv` does.
      `fnet.layer.Decode` is supported; the cache holds the last W - 1 inputs.

    Raises:
      ValueError: if ``channels`` or ``width`` is below 1; when applied, if the shapes do not match.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.causal_conv(8, width=4)
      >>> params, state = layer.init(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 10, 8)), train=True)[0].shape
      (2, 10, 8)
    """
    checks.sizes("causal_conv", channels=channels, width=width)

    def init(key: Array) -> tuple[Params, State]:
        bound = width**-0.5
        kernel = jax.random.uniform(key, (width, channels), jnp.float32, -bound, bound)
        return {"kernel": kernel} | ({"bias": jnp.zeros(channels, jnp.float32)} if bias else {}), {}

    def apply(
        child: Children, x: Array, mask: Array | None = None, segments: Array | None = None
    ) -> Array:
        del mask
        return causal_conv(x, **child.params, segments=segments)[0]

    def init_cache(batch: int, length: int, dtype: DTypeLike) -> Array:
        del length
        return jnp.zeros((batch, width - 1, channels), dtype)

    def extend(
        params: Params, state: State, cache: Array, x: Array, position: Array
    ) -> tuple[Array, Array]:
        del state, position
        return causal_conv(x, **params, past=cache)

    layer = composite({}, apply, init=init, random=False)
    return layer._replace(decode=Decode(init_cache, extend))
