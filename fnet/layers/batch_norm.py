"""Plain batch norm with signed gamma, for pretrained weights of other libraries."""

from jax import Array
from jaxtyping import Float

from fnet.layer import Layer, Params, State, check_sizes
from fnet.layers import activations
from fnet.layers.abn import AxisName, abn, initial_arrays
from fnet.layers.norm import check_parameters


def batch_norm(
    x: Float[Array, "n ... c"],
    gamma: Float[Array, " c"],
    beta: Float[Array, " c"],
    running_mean: Float[Array, " c"],
    running_var: Float[Array, " c"],
    *,
    train: bool,
    eps: float = 1e-5,
    decay: float = 0.9,
    axis_name: AxisName = None,
) -> tuple[Array, Array, Array]:
    """Batch norm as in other libraries (Ioffe, Szegedy, ICML 2015).

    With the statistics of the batch in training, and running statistics in evaluation::

        y = (x - mean) / sqrt(var + eps) * gamma + beta

    `fnet.abn` uses |gamma| + eps instead of gamma, so that it can be inverted, and saves its
    activated output. This function saves the normalized x, before gamma. Under
    `fnet.recompute` it saves nothing else, and rematerializes what follows up to the next
    matrix product.

    Args:
      x: [N, ..., C], rank >= 2, as for `fnet.abn`.
      gamma, beta, running_mean, running_var: [C], float32 or wider.
      train: whether to use the statistics of the batch, and update the running ones.
      eps: added to the variance.
      decay: weight of the old running statistics.
      axis_name: as for `fnet.abn`.

    Returns:
      ``(y, running_mean, running_var)``; ``y`` has the shape and dtype of ``x``.

    Raises:
      TypeError, ValueError: as `fnet.abn`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.layers.batch_norm import batch_norm
      >>> x = jax.random.normal(jax.random.key(0), (64, 3))
      >>> gamma, beta, mean, var = (
      ...     jnp.full(3, -2.0),
      ...     jnp.zeros(3),
      ...     jnp.zeros(3),
      ...     jnp.ones(3),
      ... )
      >>> y, mean, var = batch_norm(x, gamma, beta, mean, var, train=True)
      >>> y.shape, [round(float(s), 2) for s in y.std(0)]
      ((64, 3), [2.0, 2.0, 2.0])
    """
    check_parameters(
        "batch_norm", x, gamma=gamma, beta=beta, running_mean=running_mean, running_var=running_var
    )
    normalized, *statistics = abn(
        x,
        None,
        None,
        running_mean,
        running_var,
        train=train,
        activation="identity",
        eps=eps,
        decay=decay,
        axis_name=axis_name,
    )
    channels_last = (1,) * (x.ndim - 1) + x.shape[-1:]
    y = normalized * gamma.reshape(channels_last) + beta.reshape(channels_last)
    return y.astype(x.dtype), *statistics  # type: ignore[return-value]


def batch_norm_layer(
    channels: int,
    *,
    activation: str = "identity",
    activation_param: float | None = None,
    eps: float = 1e-5,
    decay: float = 0.9,
    axis_name: AxisName = None,
) -> Layer:
    """Batch norm followed by an activation, as a layer.

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
      >>> import jax, jax.numpy as jnp
      >>> from fnet import layers
      >>> layer = layers.batch_norm(3, activation="relu")
      >>> params, state = layer.init(jax.random.key(0))
      >>> x = jax.random.normal(jax.random.key(1), (64, 3))
      >>> y, state = layer.apply(params, state, x, train=True)
      >>> y.shape, bool(y.min() >= 0), sorted(state)
      ((64, 3), True, ['running_mean', 'running_var'])
    """
    check_sizes("batch_norm", channels=channels)
    act = activations.get(activation)
    param = activations.parameter_of(activation, activation_param)

    def init(key: Array) -> tuple[Params, State]:
        del key
        return initial_arrays(channels)

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        del key
        y, mean, var = batch_norm(
            x,
            params["gamma"],
            params["beta"],
            state["running_mean"],
            state["running_var"],
            train=train,
            eps=eps,
            decay=decay,
            axis_name=axis_name,
        )
        # Not in place: the normalized x is saved anyway.
        return act.forward(y, param), {"running_mean": mean, "running_var": var}

    return Layer(init, apply)
