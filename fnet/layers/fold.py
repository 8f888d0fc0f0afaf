"""Fold an evaluated batch norm into the linear layer before it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet import checks


def fold(
    kernel: Float[Array, "... c"],
    bias: Float[Array, " c"] | None,
    gamma: Float[Array, " c"] | None,
    beta: Float[Array, " c"] | None,
    running_mean: Float[Array, " c"],
    running_var: Float[Array, " c"],
    *,
    eps: float = 1e-5,
    norm: Literal["abn", "batch"] = "abn",
) -> tuple[Float[Array, "... c"], Float[Array, " c"]]:
    """Fold a batch norm in evaluation mode into the linear layer before it.

    With ``train=False``, `fnet.abn` first applies an affine map to the output
    ``x = linear(input) + bias`` of a convolution or dense layer::

        z = (x - running_mean) * s + beta,    s = (|gamma| + eps) / sqrt(running_var + eps)

    This equals the same linear layer with other parameters (Jacob et al. 2018, "Quantization and
    Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2)::

        kernel' = kernel * s                  (over the output channels)
        bias'   = (bias - running_mean) * s + beta

    The activation is not folded: apply `fnet.layers.activation` to the output of the folded layer.

    Args:
      kernel: [H, W, I, O] of a convolution with any stride, dilation, padding and groups,
        or [I, O] of a dense layer. Output channels are last.
      bias: [C] of that layer, with C = O, or None if it has no bias.
      gamma: [C]; None: the scale is exactly 1, without ``+ eps``.
      beta: [C]; None: 0.
      running_mean: [C].
      running_var: [C].
      eps: as in the batch norm, which adds it to the variance and to |gamma|.
      norm: ``"batch"`` for plain batch norm, as in `fnet.layers.batch_norm` and other
        libraries: the scale is then gamma itself, not |gamma| + eps.

    Returns:
      ``(kernel, bias)`` in the shapes given, both in the dtype of the kernel. They are
      computed in float32, or in float64 if an argument is float64.

    Raises:
      TypeError: if an argument is not floating.
      ValueError: if the kernel has rank < 2, another argument has a shape other than [C],
        or ``norm`` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> conv = fnet.layers.conv(3, 8, bias=False)
      >>> abn = fnet.layers.abn(8, activation="identity")
      >>> params, _ = conv.init(jax.random.key(0))
      >>> norm_params, norm_state = abn.init(jax.random.key(1))
      >>> x = jnp.ones((2, 4, 4, 3))
      >>> y, _ = conv.apply(params, {}, x, train=False)
      >>> y, _ = abn.apply(norm_params, norm_state, y, train=False)
      >>> given = norm_params | norm_state
      >>> kernel, bias = fnet.layers.fold(params["kernel"], None, **given)
      >>> folded = fnet.layers.conv(3, 8)
      >>> z, _ = folded.apply({"kernel": kernel, "bias": bias}, {}, x, train=False)
      >>> bool(jnp.allclose(y, z, atol=1e-5))
      True
    """
    vectors = {"bias": bias, "gamma": gamma, "beta": beta}
    vectors |= {"running_mean": running_mean, "running_var": running_var}
    if kernel.ndim < 2:
        raise ValueError(f"fold: kernel must have rank >= 2, channels last, got {kernel.shape}")
    checks.floating("fold", kernel=kernel, **vectors)
    expected = {name: (v, kernel.shape[-1:]) for name, v in vectors.items()}
    checks.shapes("fold", f"kernel {kernel.shape}, output channels last", **expected)
    checks.choice("fold", ("abn", "batch"), norm=norm)
    dtypes = [v.dtype for v in vectors.values() if v is not None]
    wide = jnp.result_type(jnp.float32, kernel.dtype, *dtypes)
    zeros = jnp.zeros(kernel.shape[-1], wide)
    b, g, offset, mean, var = (
        zeros if v is None else jnp.asarray(v, wide) for v in vectors.values()
    )
    gamma_scale = 1 if gamma is None else g if norm == "batch" else jnp.abs(g) + eps
    scale = jax.lax.rsqrt(var + eps) * gamma_scale
    folded = jnp.asarray(kernel, wide) * jnp.expand_dims(scale, range(kernel.ndim - 1))
    return folded.astype(kernel.dtype), ((b - mean) * scale + offset).astype(kernel.dtype)
