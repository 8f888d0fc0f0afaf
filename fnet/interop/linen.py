"""In-place activated batch norm where a Flax linen model has BatchNorm and an activation."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from fnet.layers import activations
from fnet.layers.abn import AxisName, abn


class InPlaceABN(nn.Module):
    """`flax.linen.BatchNorm` and the activation after it, with one array kept between them.

    ::

        x = nn.leaky_relu(nn.BatchNorm(use_running_average=not train)(x))     # before
        x = InPlaceABN(use_running_average=not train)(x)                      # after

    The variables are BatchNorm's, so that its checkpoints load: params ``scale``
    and ``bias``, collection ``batch_stats`` with ``mean`` and ``var``, all [C].
    With the equations of `fnet.abn`, these differ from BatchNorm:

    ========================= ==========================================================
    scale                     multiplies as ``|scale| + epsilon``: its sign is lost
    running variance          moves to the unbiased variance, n / (n - 1) of BatchNorm's
    mask                      is per example, [N]; the others' output is 0
    use_scale=False           leaves a constant scale of 1, ``use_bias=False`` a bias of 0
    dtype                     is that of the input from the start, as in `flax.nnx`: the
                              statistics, always float32 or wider, are of the cast input
    ``init``                  normalises with the initial statistics, so that one sample
                              a channel is enough; as in BatchNorm it renews nothing
    axis_index_groups         does not exist; nor do ``use_fast_variance`` (the variance is
                              always that of the deviations) and
                              ``force_float32_reductions`` (always)
    ========================= ==========================================================

    Attributes:
      use_running_average: True: normalise with ``batch_stats`` and leave them.
        False: with the batch's statistics, and renew ``batch_stats``, which must
        be mutable. None: given at the call.
      axis: the channel axis, one integer.
      momentum: weight of the old running statistics.
      epsilon: added to the variance and to |scale|.
      dtype: of the output; None: the widest of input and parameters.
      param_dtype: of ``scale`` and ``bias``, float32 or wider.
      use_bias: whether ``bias`` is a parameter.
      use_scale: whether ``scale`` is a parameter.
      bias_init: initialiser of ``bias``.
      scale_init: initialiser of ``scale``.
      axis_name: mapped axes over which the batch's statistics are global. Unused
        in ``init`` and with running statistics, where the axes need not exist.
      activation: ``identity``, ``leaky_relu``, ``elu`` or ``softplus`` in place;
        or ``relu``, ``gelu``, ``silu``, ``tanh``, ``sigmoid``; see `fnet.abn`.
      activation_param: slope of ``leaky_relu``, 0.01 by default, or alpha of ``elu``,
        1 by default; > 0.

    Raises:
      ValueError: at construction, for an activation that is unknown or cannot be
        inverted; when applied, if ``use_running_average`` is given twice or not at
        all, and as `fnet.abn`.
      TypeError: when applied, for a ``dtype`` that is not floating or a
        ``param_dtype`` narrower than float32.
    """

    use_running_average: bool | None = None
    axis: int = -1
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = nn.initializers.zeros
    scale_init: Initializer = nn.initializers.ones
    axis_name: AxisName = None
    activation: str = "leaky_relu"
    activation_param: float | None = None

    def __post_init__(self) -> None:
        activations.check_parameter("InPlaceABN", self.activation, self.activation_param)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "..."],
        use_running_average: bool | None = None,
        *,
        mask: Bool[Array, " n"] | None = None,
    ) -> Float[Array, "..."]:
        """The normalised and activated input.

        Args:
          x: [N, ..., C] for ``axis=-1``, rank >= 2.
          use_running_average: as the attribute, where that is None.
          mask: [N], True for a real example; others count in no statistic, come
            out as 0 and receive no gradient.

        Returns:
          An array of the shape of ``x``.
        """
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        train = not (use_running_average or self.is_initializing())
        if not -x.ndim <= self.axis < x.ndim:
            raise ValueError(f"InPlaceABN: x has no axis {self.axis}, got shape {x.shape}")
        shape = (x.shape[self.axis],)

        mean: nn.Variable[Any] = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var: nn.Variable[Any] = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        # Weakly typed, so that they do not widen the output.
        scale, bias = jnp.full(shape, 1.0), jnp.full(shape, 0.0)
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)

        dtype = jnp.result_type(x, scale, bias) if self.dtype is None else self.dtype
        y, new_mean, new_var = abn(
            jnp.asarray(x, dtype),
            scale,
            bias,
            mean.value,
            var.value,
            train=train,
            activation=self.activation,
            activation_param=self.activation_param,
            eps=self.epsilon,
            decay=self.momentum,
            axis=self.axis,
            mask=mask,
            axis_name=self.axis_name if train else None,
        )
        if train:
            mean.value, var.value = new_mean, new_var
        return y
