"""In-place activated batch norm for flax linen models."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from fnet.interop.norm_conversion import abn_of
from fnet.layers import activations
from fnet.layers.abn import AxisName


class InPlaceABN(nn.Module):
    """Replace `flax.linen.BatchNorm` and its activation, and save only one array for both.

    ::

        x = nn.leaky_relu(nn.BatchNorm(use_running_average=not train)(x))  # before
        x = InPlaceABN(use_running_average=not train)(x)  # after

    The variables have the names of BatchNorm's, so its checkpoints load: params ``scale``
    and ``bias``, collection ``batch_stats`` with ``mean`` and ``var``, all [C].
    The equations are the same as for `fnet.abn`. Differences to BatchNorm:

    ========================= ==========================================================
    scale                     multiplies as ``|scale| + epsilon``: its sign is lost
    running variance          tracks the unbiased variance, n / (n - 1) of BatchNorm's
    mask                      is per example, [N]; the output of masked examples is 0
    use_scale=False           uses a constant scale of 1, ``use_bias=False`` a bias of 0
    dtype                     casts the input before the statistics, as in `flax.nnx`; they
                              are in float32 or wider
    ``init``                  normalizes with the initial statistics, so one sample per
                              channel is enough; like BatchNorm it updates nothing
    axis_index_groups         does not exist; nor do ``use_fast_variance`` (never) and
                              ``force_float32_reductions`` (always)
    ========================= ==========================================================

    Attributes:
      use_running_average: True: normalize with ``batch_stats``. False: normalize with the
        statistics of the batch and update ``batch_stats``, which must be mutable. None: given
        at the call.
      axis: channel axis, one integer.
      momentum, use_bias, use_scale, bias_init, scale_init, axis_name: as for BatchNorm.
      epsilon: constant added to the variance and to ``|scale|``.
      dtype: dtype of the output. None: the widest of input and parameters.
      param_dtype: dtype of ``scale`` and ``bias``, float32 or wider.
      activation, activation_param: activation after the norm, as for `fnet.abn`.

    Raises:
      ValueError: at construction, for an unknown activation or one whose parameter makes it not
        invertible. When applied, if ``use_running_average`` is given twice or not at all, and as
        `fnet.abn`.
      TypeError: when applied, for a ``dtype`` that is not floating or a
        ``param_dtype`` narrower than float32.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.interop.linen import InPlaceABN
      >>> model = InPlaceABN(use_running_average=False)
      >>> def normalize(key, x):
      ...     variables = model.init(key, x)
      ...     return model.apply(variables, x, mutable=["batch_stats"])
      >>> y, updated = jax.eval_shape(normalize, jax.random.key(0), jnp.zeros((4, 2)))
      >>> y.shape, sorted(updated["batch_stats"])
      ((4, 2), ['mean', 'var'])
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
        """Normalize and activate ``x`` [N, ..., C]; ``mask`` is as for `fnet.abn`."""
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        train = not (use_running_average or self.is_initializing())
        if not -x.ndim <= self.axis < x.ndim:
            raise ValueError(f"InPlaceABN: x has no axis {self.axis}, got shape {x.shape}")
        shape = (x.shape[self.axis],)

        mean: nn.Variable[Any] = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var: nn.Variable[Any] = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        # Weakly typed, so that constants do not widen the output.
        scale, bias = jnp.full(shape, 1.0), jnp.full(shape, 0.0)
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)

        y: Array
        y, *updated = abn_of(self, x, scale, bias, mean.value, var.value, train=train, mask=mask)
        if train:
            mean.value, var.value = updated
        return y
