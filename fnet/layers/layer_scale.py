"""Layer scale: a learned factor per feature."""

import jax.numpy as jnp
from jax import Array

from fnet import checks
from fnet.layer import Layer, Params, from_function
from fnet.precision import multiply


def layer_scale(d: int, *, initial: float = 1e-5) -> Layer:
    """Scale each feature: ``y = scale x``.

    Touvron et al. 2021, "Going deeper with Image Transformers".

    At the end of a residual branch, a small initial scale makes a deep network trainable. Pass it
    to `fnet.layers.stack` as the post-norm.

    Args:
      d: size of the last axis of the input.
      initial: initial value of all scales.

    Returns:
      A layer, x [..., d] -> [..., d] in the dtype of x, without state. Its param is ``scale`` [d],
      float32.

    Raises:
      ValueError: if ``d`` is below 1; when applied, if the input does not end in ``d``.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import layers
      >>> layer = layers.layer_scale(3, initial=0.5)
      >>> params, state = layer.init(jax.random.key(0))
      >>> y, _ = layer.apply(params, state, jnp.ones((1, 3)), train=True)
      >>> y.tolist()
      [[0.5, 0.5, 0.5]]
    """
    checks.sizes("layer_scale", d=d)

    def apply(params: Params, x: Array) -> Array:
        checks.last_axis("layer_scale", x, d)
        return multiply(x, jnp.expand_dims(params["scale"], range(x.ndim - 1)))

    return from_function(lambda key: {"scale": jnp.full(d, initial, jnp.float32)}, apply)
