"""Plain batch norm with signed gamma, for pretrained weights of other libraries."""

from jax import Array

from fnet import checks
from fnet.layer import Children, Layer, composite
from fnet.layers import activations
from fnet.layers.abn import AxisName, abn, initial_arrays
from fnet.layers.norm import check_parameters


def batch_norm(
    channels: int,
    *,
    activation: str = "identity",
    activation_param: float | None = None,
    eps: float = 1e-5,
    decay: float = 0.9,
    axis_name: AxisName = None,
) -> Layer:
    """Batch norm as in other libraries (Ioffe, Szegedy, ICML 2015), followed by an activation.

    With the statistics of the batch in training, and running statistics in evaluation::

        y = act((x - mean) / sqrt(var + eps) * gamma + beta)

    `fnet.abn` uses |gamma| + eps instead of gamma, so that it can be inverted, and saves its
    activated output. This layer saves the normalized x, before gamma. Under `fnet.recompute` it
    saves nothing else, and rematerializes what follows up to the next matrix product.

    Args:
      channels: C, size of the last axis of the input.
      activation, activation_param: as for `fnet.layers.activation`.
      eps: added to the variance.
      decay: weight of the old running statistics.
      axis_name: as for `fnet.abn`.

    Returns:
      A layer, x [N, ..., C] -> [N, ..., C] in the dtype of x. Its params are ``gamma``,
      initially ones, and ``beta``, initially zeros; its state is ``running_mean`` and
      ``running_var``; all [C], float32.

    Raises:
      ValueError: if ``channels`` is below 1, or the activation is unknown; when applied,
        if the shape of ``x`` does not match, or the batch has one sample per channel.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.batch_norm(3, activation="relu")
      >>> params, state = layer.init(jax.random.key(0))
      >>> x = jax.random.normal(jax.random.key(1), (64, 3))
      >>> y, state = layer.apply(params, state, x, train=True)
      >>> y.shape, bool(y.min() >= 0), sorted(state)
      ((64, 3), True, ['running_mean', 'running_var'])
    """
    checks.sizes("batch_norm", channels=channels)
    act = activations.get(activation)
    param = activations.parameter_of(activation, activation_param)

    def apply(child: Children, x: Array) -> Array:
        params, state = child.params, child.state
        check_parameters("batch_norm", x, **params, **state)
        y, mean, var = abn(
            x,
            None,
            None,
            **state,
            train=child.train,
            activation="identity",
            eps=eps,
            decay=decay,
            axis_name=axis_name,
        )
        channels_last = (1,) * (x.ndim - 1) + x.shape[-1:]
        gamma, beta = (params[name].reshape(channels_last) for name in ("gamma", "beta"))
        # Not in place: the normalized x is saved anyway.
        child.state = {"running_mean": mean, "running_var": var}
        return act.forward((y * gamma + beta).astype(x.dtype), param)

    return composite({}, apply, init=lambda key: initial_arrays(channels), random=False)
