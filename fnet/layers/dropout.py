"""Dropout whose mask is drawn again in the backward pass, so that nothing is kept for it."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.layer import Layer, Params, State, check_floating
from fnet.precision import widened


def dropout(rate: float, *, shared_axes: tuple[int, ...] = ()) -> Layer:
    """``y = x * m / (1 - rate)`` in training, m being 1 with probability 1 - rate, else 0.

    Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from
    Overfitting", JMLR 2014, scaled in training, so that evaluation is the identity.
    The backward pass keeps the key and draws m from it again.

    Args:
      rate: the part that is set to 0, in [0, 1).
      shared_axes: along these, m is the same; negative ones count from the last axis.
        (1, 2) drops whole channels of images [N, H, W, C] (Tompson et al., "Efficient
        Object Localization Using Convolutional Networks", CVPR 2015).

    Returns:
      A layer without params or state; ``x`` of any shape, in its dtype. In training with
      ``rate`` > 0 ``apply`` needs a ``key``.

    Raises:
      ValueError: if ``rate`` is not in [0, 1); when applied in training with ``rate`` > 0,
        without a key or to an ``x`` that lacks one of ``shared_axes``.
      TypeError: when so applied to what is not floating.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate must be in [0, 1), got {rate}")

    def init(key: Array) -> tuple[Params, State]:
        del key
        return {}, {}

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "..."],
        *,
        key: Array | None = None,
        train: bool,
    ) -> tuple[Float[Array, "..."], State]:
        del params
        if not train or rate == 0:
            return x, state
        check_floating("dropout", x=x)
        if key is None:
            raise ValueError(
                f"dropout: needs a key in training with rate {rate}; pass key=jax.random.key(...), "
                "or train=False"
            )
        shared = set(shared_axes)
        if any(not -x.ndim <= axis < x.ndim for axis in shared):
            raise ValueError(f"dropout: shared_axes {shared_axes} are not all axes of x {x.shape}")
        drawn = tuple(1 if {i, i - x.ndim} & shared else n for i, n in enumerate(x.shape))
        return _dropped(key, x, rate, drawn), state

    return Layer(init, apply)


def _dropped(key: Array, x: Array, rate: float, drawn: tuple[int, ...]) -> Array:
    @jax.checkpoint
    def drop(key: Array, x: Array) -> Array:
        # A clone: JAX's check of reused keys knows no recomputation.
        kept = jax.random.bernoulli(jax.random.clone(key), 1 - rate, drawn)
        # In float32: bfloat16 has 0.8984 for 1 - 0.1, and the mean would grow by 0.2 % a layer.
        return jnp.where(kept, (widened(x) / (1 - rate)).astype(x.dtype), 0)

    y: Array = drop(key, x)
    return y
