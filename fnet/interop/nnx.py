"""In-place activated batch norm for flax nnx models."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from fnet.interop.norm_conversion import abn_of
from fnet.layers import activations
from fnet.layers.abn import AxisName


class InPlaceABN(nnx.Module):
    """Replace `flax.nnx.BatchNorm` and its activation, and save only one array for both.

    ::

        # before; then nnx.leaky_relu(self.norm(x))
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        # after; then self.norm(x)
        self.norm = InPlaceABN(64, rngs=rngs)

    The variables have the names of BatchNorm's, so its checkpoints load: `nnx.Param`
    ``scale`` and ``bias``, `nnx.BatchStat` ``mean`` and ``var``, all [num_features].
    ``train()``, ``eval()`` and `nnx.view` set ``use_running_average`` as in BatchNorm. The
    equations are the same as for `fnet.abn`. The differences to BatchNorm in scale, variance and
    mask are those of `fnet.interop.linen.InPlaceABN`. Parameters and statistics are never narrower
    than float32. There are no ``axis_index_groups``, ``use_fast_variance`` and ``promote_dtype``.

    Args:
      num_features: size of the channel axis.
      use_running_average, axis, momentum, epsilon, dtype, param_dtype: as for linen.
      use_bias, use_scale, bias_init, scale_init, axis_name: as for linen.
      activation, activation_param: as for linen.
      rngs: random keys; ``params`` is used.
      bias_metadata: metadata of the variable ``bias``, such as its sharding.
      scale_metadata: metadata of the variable ``scale``.

    Raises:
      ValueError: at construction, for an unknown activation or one whose parameter makes it not
        invertible. When called, if ``use_running_average`` is not given, and as `fnet.abn`.
      TypeError: when called, for a ``dtype`` that is not floating or a
        ``param_dtype`` narrower than float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from fnet.interop.nnx import InPlaceABN
      >>> norm = InPlaceABN(2, rngs=nnx.Rngs(0))
      >>> norm(jnp.arange(8.0).reshape(4, 2)).shape
      (4, 2)
      >>> print(norm.mean[...].round(2))  # updated in place, with momentum 0.99
      [0.03 0.04]
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros,
        scale_init: Initializer = nnx.initializers.ones,
        axis_name: AxisName = None,
        activation: str = "leaky_relu",
        activation_param: float | None = None,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        param = activations.check_parameter("InPlaceABN", activation, activation_param)
        shape = (num_features,)
        self.mean = nnx.BatchStat(jnp.zeros(shape, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(shape, jnp.float32))
        self.scale: nnx.Param[Array] | None = nnx.data(None)
        self.bias: nnx.Param[Array] | None = nnx.data(None)
        if use_scale:
            self.scale = nnx.Param(scale_init(rngs.params(), shape, param_dtype), **scale_metadata)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), shape, param_dtype), **bias_metadata)

        self.num_features = num_features
        self.use_running_average = use_running_average
        self.axis = axis
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = dtype
        self.axis_name = axis_name
        self.activation = activation
        self.activation_param = param

    def __call__(
        self,
        x: Float[Array, "..."],
        use_running_average: bool | None = None,
        *,
        mask: Bool[Array, " n"] | None = None,
    ) -> Float[Array, "..."]:
        """Normalize and activate ``x`` [N, ..., C]; ``mask`` is as for `fnet.abn`."""
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ValueError(
                "InPlaceABN: use_running_average is None in the module and at the call; pass it, "
                "or call the model's train() or eval()"
            )
        train = not use_running_average
        shape = (self.num_features,)
        scale = jnp.ones(shape, jnp.float32) if self.scale is None else self.scale[...]
        bias = jnp.zeros(shape, jnp.float32) if self.bias is None else self.bias[...]

        stats = self.mean[...], self.var[...]
        y: Array
        y, *updated = abn_of(self, x, scale, bias, *stats, train=train, mask=mask)
        if train:
            self.mean[...], self.var[...] = updated
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set attributes for `nnx.view`, which reads what follows.

        Args:
          use_running_average: True: normalize with the running statistics. None: no change.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average
