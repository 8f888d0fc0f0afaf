"""Global response norm: channels of an image compete by their norms."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet import checks
from fnet.layer import Layer, Params, from_function
from fnet.layers.norm import scale_and_bias
from fnet.precision import upcast


def global_response_norm(d: int, *, eps: float = 1e-6) -> Layer:
    """Global response norm of NHWC images (Woo et al. 2023, "ConvNeXt V2").

    With the norm of each channel c over the pixels of an image::

        g_c = ||x_c||;   y = x + scale x g / (mean_c(g) + eps) + bias

    x [N, H, W, d] -> [N, H, W, d]. Params are ``scale`` [d] and ``bias`` [d], initially zeros, so
    the layer starts as the identity.
    """
    checks.sizes("global_response_norm", d=d)

    def apply(params: Params, x: Float[Array, "n h w d"]) -> Float[Array, "n h w d"]:
        checks.image("global_response_norm", x, d)
        checks.floating("global_response_norm", x=x)
        w = upcast(x)
        squares = jnp.square(w).sum((1, 2), keepdims=True)
        # The derivative of the root at 0 is infinite: a channel of zeros has none.
        positive = squares > 0
        norms = jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
        ratios = norms / (norms.mean(-1, keepdims=True) + eps)
        scale, bias = (upcast(params[name])[None, None, None] for name in ("scale", "bias"))
        return (w + scale * (w * ratios) + bias).astype(x.dtype)

    return from_function(lambda key: scale_and_bias(d, 0), apply)
