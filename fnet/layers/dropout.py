"""Dropout that redraws its mask in the backward pass instead of saving it."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet import checks
from fnet.layer import Children, Layer, composite
from fnet.precision import upcast


def dropout(rate: float, *, shared_axes: tuple[int, ...] = ()) -> Layer:
    """Dropout: ``y = x * m / (1 - rate)`` in training, identity in evaluation.

    Each element of m is 1 with probability 1 - rate, else 0 (Srivastava et al., "Dropout:
    A Simple Way to Prevent Neural Networks from Overfitting", JMLR 2014). The backward
    pass saves the key, not m, and draws m again.

    Args:
      rate: probability of zeroing an element, in [0, 1).
      shared_axes: axes over which m is constant; negative axes count from the end. (1, 2)
        drops whole channels of images [N, H, W, C] (Tompson et al., "Efficient Object
        Localization Using Convolutional Networks", CVPR 2015).

    Returns:
      A layer without params or state. It maps x [...] to the same shape and dtype. ``apply``
      needs a ``key`` if ``train`` and ``rate`` > 0.

    Raises:
      ValueError: if ``rate`` is not in [0, 1); when applied in training with ``rate`` > 0,
        if there is no key, or ``x`` lacks one of ``shared_axes``.
      TypeError: when applied in training with ``rate`` > 0, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.dropout(0.5)
      >>> y, _ = layer.apply({}, {}, jnp.ones(100), key=jax.random.key(0), train=True)
      >>> sorted(set(y.tolist()))
      [0.0, 2.0]
    """
    checks.numbers("dropout", "in [0, 1)", rate=rate)

    def apply(child: Children, x: Float[Array, "..."]) -> Float[Array, "..."]:
        if not child.train or rate == 0:
            return x
        checks.floating("dropout", x=x)
        if child.key is None:
            raise ValueError(
                f"dropout: needs a key in training with rate {rate}; pass key=jax.random.key(...), "
                "or train=False"
            )
        shared = set(shared_axes)
        if any(not -x.ndim <= axis < x.ndim for axis in shared):
            raise ValueError(f"dropout: shared_axes {shared_axes} are not all axes of x {x.shape}")
        mask_shape = tuple(1 if {i, i - x.ndim} & shared else n for i, n in enumerate(x.shape))

        @jax.checkpoint
        def drop(key: Array, x: Array) -> Array:
            # A clone: otherwise jax_debug_key_reuse reports the rematerialized draw as a reuse.
            mask = jax.random.bernoulli(jax.random.clone(key), 1 - rate, mask_shape)
            # In float32: 1 - 0.1 rounds to 0.8984 in bfloat16, and each layer would raise the
            # mean by 0.2 %.
            return jnp.where(mask, (upcast(x) / (1 - rate)).astype(x.dtype), 0)

        y: Array = drop(child.key, x)
        return y

    return composite({}, apply)
