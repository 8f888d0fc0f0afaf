"""Layer scale: a learned factor per feature."""

import jax.numpy as jnp
from jax import Array

from fnet import checks
from fnet.layer import Layer, Params, from_function
from fnet.precision import multiply


def layer_scale(d: int, *, initial: float = 1e-5) -> Layer:
    """Scale each feature: ``y = scale x``, x [..., d], with the param ``scale`` [d].

    Touvron et al. 2021, "Going deeper with Image Transformers". At the end of a residual branch, a
    small initial scale makes a deep network trainable.
    """
    checks.sizes("layer_scale", d=d)

    def apply(params: Params, x: Array) -> Array:
        checks.last_axis("layer_scale", x, d)
        return multiply(x, jnp.expand_dims(params["scale"], range(x.ndim - 1)))

    return from_function(lambda key: {"scale": jnp.full(d, initial, jnp.float32)}, apply)
