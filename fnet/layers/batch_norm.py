"""Plain batch norm, any sign of gamma: for weights that were trained with it elsewhere."""

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
    """Batch norm as other libraries train it (Ioffe, Szegedy, ICML 2015).

    In training and evaluation, with the batch's statistics or running ones::

        y = (x - mean) / sqrt(var + eps) * gamma + beta

    `fnet.abn` has |gamma| + eps in place of gamma, which it needs to run backwards, and
    keeps its activated output. Here the normalised x, which has no gamma in it, is kept
    for the backward pass; under `fnet.recompute` it is all that is kept, and what
    follows it up to the next product is computed again.

    Args:
      x: [N, ..., C], rank >= 2, as for `fnet.abn`.
      gamma, beta, running_mean, running_var: [C], float32 or wider.
      train: True: the batch's statistics, and running ones renewed. False: running ones.
      eps: added to the variance.
      decay: weight of the old running statistics.
      axis_name: as for `fnet.abn`.

    Returns:
      ``(y, running_mean, running_var)``; ``y`` has the shape and dtype of ``x``.

    Raises:
      TypeError, ValueError: as `fnet.abn`.
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
    spread = (1,) * (x.ndim - 1) + x.shape[-1:]
    y = normalized * gamma.reshape(spread) + beta.reshape(spread)
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
    """`batch_norm`, and an activation behind it, as a layer.

    Args:
      channels: C, the size of the input's last axis.
      activation, activation_param: one of `fnet.layers.activation`, and its parameter.
      eps, decay, axis_name: as for `batch_norm`.

    Returns:
      A layer with params ``gamma`` (ones at first), ``beta`` (zeros) and state
      ``running_mean``, ``running_var``, all [C], float32; ``x`` [N, ..., C] ->
      [N, ..., C], in the input's dtype.

    Raises:
      ValueError: for ``channels`` below 1 or an unknown activation; when applied, as
        `batch_norm`.
      TypeError: when applied, as `batch_norm`.
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
        # Not in place: the normalised x is kept already.
        return act.forward(y, param), {"running_mean": mean, "running_var": var}

    return Layer(init, apply)
