"""Dynamic tanh, a replacement for norms that runs backward from its output."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet import checks
from fnet.backward_pass import save
from fnet.layer import Layer, Params, from_function
from fnet.layers.norm import expand_like, invertible_scale, scale_and_bias
from fnet.mesh import equally_varying
from fnet.precision import upcast


def dynamic_tanh(d: int, alpha: float = 0.5) -> Layer:
    """Apply ``y = tanh(alpha x) * scale + bias``, elementwise, instead of a norm.

    Zhu et al., "Transformers without Normalization", CVPR 2025. The backward pass saves
    ``y``, which a dense layer after it saves anyway, and the parameters, but not ``x``. As in
    `fnet.layer_norm`, it inverts the layer::

        t = (y - bias) / scale
        x = atanh(t) / alpha

    Rounding of ``y`` causes an error in ``t`` of about ``u * (|t| + |bias / scale|)``, where
    u is half the epsilon of the dtype of ``x``. Without a bias, gradients are as accurate as
    the output: in bfloat16 to about 2^-8 of the largest. If ``|scale| <= 2 u |bias|``, ``t``
    is lost and replaced by 0. If ``|alpha scale| <= 2 u |bias|``, ``x`` is replaced by 0 in
    the gradient of alpha.

    Args:
      d: size of the last axis of the input.
      alpha: initial value of the trained scalar, not 0. The paper uses 0.5.

    Returns:
      A layer, x [..., d] -> [..., d] in the dtype of x, without state. Its params are
      ``alpha`` [], ``scale`` [d], initially ones, and ``bias`` [d], initially zeros, float32.
      It is computed in float32 (float64 for float64).

    Raises:
      ValueError: if ``d`` is below 1 or ``alpha`` is 0; when applied, if the input does
        not end in ``d``.
      TypeError: when applied, if ``x`` is not floating; from JAX in forward mode.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.dynamic_tanh(4)
      >>> params, state = layer.init(jax.random.key(0))
      >>> x = jax.random.normal(jax.random.key(1), (2, 4))
      >>> y, _ = layer.apply(params, state, x, train=True)
      >>> bool(jnp.allclose(y, jnp.tanh(0.5 * x)))
      True
    """
    checks.sizes("dynamic_tanh", d=d)
    if alpha == 0:
        raise ValueError(
            "dynamic_tanh: alpha must not be 0, got 0; then the output does not depend on x"
        )

    def apply(params: Params, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        checks.last_axis("dynamic_tanh", x, d)
        arrays = x, params["alpha"], params["scale"], params["bias"]
        return _dynamic_tanh(*equally_varying(arrays))

    return from_function(
        lambda key: {"alpha": jnp.full((), alpha, jnp.float32)} | scale_and_bias(d), apply
    )


@jax.custom_vjp
def _dynamic_tanh(x: Array, alpha: Array, scale: Array, bias: Array) -> Array:
    t = jnp.tanh(invertible_scale(alpha, x) * upcast(x))
    return (t * expand_like(invertible_scale(scale, x), x) + expand_like(bias, x)).astype(x.dtype)


def _dynamic_tanh_fwd(
    x: Array, alpha: Array, scale: Array, bias: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    # Without the barrier XLA saves x and recomputes y from it.
    y, alpha, scale, bias = jax.lax.optimization_barrier(
        (save(_dynamic_tanh(x, alpha, scale, bias)), alpha, scale, bias)
    )
    return y, (y, alpha, scale, bias)


def _dynamic_tanh_bwd(
    residuals: tuple[Array, Array, Array, Array], dy: Array
) -> tuple[Array, Array, Array, Array]:
    y, alpha, scale, bias = residuals
    a, b = invertible_scale(alpha, y), expand_like(bias, y)
    s = expand_like(invertible_scale(scale, y), y)
    noise = float(jnp.finfo(y.dtype).eps) * jnp.abs(b)
    # If y rounds by more than the scale, t cannot be recovered.
    t = (upcast(y) - b) * jnp.where(jnp.abs(s) > noise, 1 / s, 0)
    t = jnp.clip(t, -1, 1)

    rows = tuple(range(y.ndim - 1))
    dz = upcast(dy)
    dscale, dbias = (dz * t).sum(rows), dz.sum(rows)
    dz = dz * expand_like(scale, y) * (1 - t * t)
    # If t rounds to 1 its derivative is 0, so the exact x does not matter.
    below_one = 1 - float(jnp.finfo(t.dtype).epsneg)
    x = jnp.arctanh(jnp.clip(t, -below_one, below_one)) / a
    dalpha = (dz * jnp.where(jnp.abs(a * s) > noise, x, 0)).sum()
    # Compute the sums before dx: otherwise XLA may delay them, and keep dy alive.
    dalpha, dscale, dbias, a = jax.lax.optimization_barrier((dalpha, dscale, dbias, a))
    dscale, dbias = dscale.astype(scale.dtype), dbias.astype(bias.dtype)
    return (dz * a).astype(y.dtype), dalpha.astype(alpha.dtype), dscale, dbias


_dynamic_tanh.defvjp(_dynamic_tanh_fwd, _dynamic_tanh_bwd)
