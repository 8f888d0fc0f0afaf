"""Layer norm and RMS norm that run backward from their output."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet import checks
from fnet.backward_pass import save
from fnet.layer import Layer, Params, from_function
from fnet.mesh import equally_varying
from fnet.precision import sum_dtype, upcast


def layer_norm(
    x: Float[Array, "... d"],
    scale: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    *,
    eps: float = 1e-6,
) -> Float[Array, "... d"]:
    """Layer norm (Ba, Kiros, Hinton 2016, "Layer Normalization") that saves its output.

    Over the last axis, with D elements per row::

        xhat = (x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)
        y = xhat * scale + bias

    The backward pass saves ``y``, which a dense layer after the norm saves anyway. It also saves
    the inverse standard deviation of each row and the parameters, but not ``x``. It recovers
    ``xhat = (y - bias) / scale``. A scale closer to 0 than 2^-100 (2^-14 for a float16
    ``x``) is applied as that number with its sign, so that ``y`` still determines ``xhat``.
    The difference is too small to change a sum with values near 1.

    Rounding of ``y`` causes an error in ``xhat`` of about ``u * (|xhat| + |bias / scale|)``,
    where u is half the epsilon of ``x.dtype``:

    * Without a bias, or with bias 0, gradients are as accurate as the output for every scale.
    * If ``|bias|`` is much larger than ``|scale|``, the gradient of ``scale`` loses digits.
    * If ``|scale| <= 2 u |bias|``, ``xhat`` is lost and replaced by 0: the gradient of the
      feature's ``scale`` is 0, and its part of the gradient of ``x`` lacks the term
      ``xhat * mean(dxhat * xhat)``.

    Measured on 512 rows of 256 in float32, the relative error of the gradient of ``scale`` is 1e-7
    with bias 0. With bias 1 it is about ``3e-8 / scale``: 3e-7 at scale 0.1, 3e-2 at 1e-6. In
    bfloat16 it is 2e-2 at scale 0.1 and bias 1, and 2e-1 at scale 0.01. The error of the gradient
    of ``x`` was 1/15 of that, about 1/sqrt(D). If this matters (pruned scales with biases, or small
    scales in bfloat16), omit the bias and use the bias of the next dense layer. That is exact and
    takes the same memory. ``layer_norm(x, scale, None) + bias`` is exact and saves one more array.

    Args:
      x: [..., D], rank >= 1; floating. Statistics are in float32 (float64 for float64).
      scale: [D], float32 or wider; None: 1.
      bias: [D], float32 or wider; None: 0.
      eps: added to the variance.

    Returns:
      y, with the shape and dtype of ``x``.

    Raises:
      TypeError: if ``x`` is not floating, or a parameter is narrower than float32.
      ValueError: if ``x`` has rank 0, or a parameter does not have shape [D].

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> x = jax.random.normal(jax.random.key(0), (2, 64))
      >>> y = fnet.layer_norm(x, jnp.ones(64), jnp.zeros(64))
      >>> bool(abs(y.mean(-1)).max() < 1e-6), [round(float(s), 3) for s in y.std(-1)]
      (True, [1.0, 1.0])
    """
    check_parameters("layer_norm", x, scale=scale, bias=bias)
    return _norm(True, eps, x, scale, bias)


def rms_norm(
    x: Float[Array, "... d"], scale: Float[Array, " d"] | None, *, eps: float = 1e-6
) -> Float[Array, "... d"]:
    """RMS norm (Zhang, Sennrich 2019, "Root Mean Square Layer Normalization"), saving its output.

    Over the last axis::

        y = x / sqrt(mean(x**2) + eps) * scale

    The backward pass saves the same arrays as `layer_norm`. There is no bias, so gradients
    are as accurate as the output for every scale, including 0.

    Args:
      x: [..., D], rank >= 1; floating. The mean square is in float32 (float64 for float64).
      scale: [D], float32 or wider; None: 1. For weights of ``scale - 1`` (Gemma) pass ``1 + w``.
      eps: added to the mean square.

    Returns:
      y, with the shape and dtype of ``x``.

    Raises:
      TypeError: if ``x`` is not floating, or ``scale`` is narrower than float32.
      ValueError: if ``x`` has rank 0, or ``scale`` does not have shape [D].

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> x = jax.random.normal(jax.random.key(0), (2, 64))
      >>> y = fnet.rms_norm(x, jnp.ones(64))
      >>> [round(float(s), 3) for s in (y**2).mean(-1)]
      [1.0, 1.0]
    """
    check_parameters("rms_norm", x, scale=scale)
    return _norm(False, eps, x, scale, None)


def layer_norm_layer(
    d: int, *, scale: bool = True, bias: bool = True, eps: float = 1e-6, offset: float = 0.0
) -> Layer:
    """Layer norm as a layer; see `fnet.layer_norm` for the equation and its precision.

    Args:
      d: size of the last axis of the input.
      scale: whether to multiply by a scale.
      bias: whether to add a bias, which is redundant before a dense layer with a bias.
      eps: added to the variance.
      offset: added to the param ``scale``, as for `fnet.layers.rms_norm`.

    Returns:
      A layer, x [..., d] -> [..., d] in the dtype of x, without state. Its params, if any, are
      ``scale`` [d], initially ``1 - offset``, and ``bias`` [d], initially zeros, float32.

    Raises:
      ValueError: if ``d`` is below 1; when applied, if the input does not end in ``d``.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.layer_norm(8)
      >>> params, state = layer.init(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 8)), train=True)[0].shape
      (2, 8)
    """
    return _norm_layer("layer_norm", d, scale, bias, eps, offset)


def rms_norm_layer(d: int, *, scale: bool = True, eps: float = 1e-6, offset: float = 0.0) -> Layer:
    """RMS norm as a layer; see `fnet.rms_norm` for the equation.

    Args:
      d: size of the last axis of the input.
      scale: whether to multiply by a scale.
      eps: added to the mean square.
      offset: added to the param ``scale``: 1 in Gemma, whose weights are ``scale - 1``.

    Returns:
      A layer, x [..., d] -> [..., d] in the dtype of x, without state. Its param, if any, is
      ``scale`` [d], initially ``1 - offset``, float32.

    Raises:
      TypeError, ValueError: as `fnet.layers.layer_norm`.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.rms_norm(8)
      >>> params, state = layer.init(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 8)), train=True)[0].shape
      (2, 8)
    """
    return _norm_layer("rms_norm", d, scale, False, eps, offset)


def _norm_layer(where: str, d: int, scale: bool, bias: bool, eps: float, offset: float) -> Layer:
    checks.sizes(where, d=d)

    def apply(params: Params, x: Array) -> Array:
        given = {name: upcast(a) for name, a in params.items()}  # pretrained may be bfloat16
        factors = given["scale"] + offset if offset and scale else given.get("scale")
        check_parameters(where, x, scale=factors, bias=given.get("bias"))
        return _norm(where == "layer_norm", eps, x, factors, given.get("bias"))

    initial = 1 - offset if scale else None
    return from_function(lambda key: scale_and_bias(d, initial, bias=bias), apply)


def scale_and_bias(d: int, scale: float | None = 1, *, bias: bool = True) -> Params:
    """Build the initial params of a norm over an axis of size ``d``, float32."""
    initial = {"scale": scale, "bias": 0 if bias else None}
    return {name: jnp.full(d, v, jnp.float32) for name, v in initial.items() if v is not None}


def check_parameters(where: str, x: Array, **parameters: Array | None) -> None:
    """Raise if x is not floating, or a parameter does not match its last axis."""
    checks.floating(where, x=x)
    if x.ndim < 1:
        raise ValueError(f"{where}: x must have rank >= 1, got shape {x.shape}")
    checks.shapes(where, f"x {x.shape}", **{n: (v, x.shape[-1:]) for n, v in parameters.items()})
    checks.wide(where, **parameters)


def _norm(center: bool, eps: float, x: Array, scale: Array | None, bias: Array | None) -> Array:
    scale = jnp.ones(x.shape[-1], sum_dtype(x)) if scale is None else scale
    bias = jnp.zeros(x.shape[-1], sum_dtype(x)) if bias is None else bias
    return _normalize(center, eps, *equally_varying((x, scale, bias)))


def expand_like(v: Array, like: Array) -> Array:
    """[D] -> [1, ..., D] with the rank of ``like``, in the dtype of its statistics."""
    return jnp.expand_dims(v.astype(sum_dtype(like)), range(like.ndim - 1))


def invertible_scale(scale: Array, x: Array) -> Array:
    """Replace scales near 0 by a small number of the same sign, so that they can be inverted.

    The result has the dtype of the statistics of ``x``. The floor is too small to change a
    sum with values near 1.
    """
    scale = scale.astype(sum_dtype(x))
    floor = max(float(jnp.finfo(x.dtype).smallest_normal), 2.0**-100)
    change = jnp.where(jnp.abs(scale) < floor, jnp.copysign(floor, scale) - scale, 0)
    return scale + jax.lax.stop_gradient(change)  # the derivative with respect to scale is 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize(center: bool, eps: float, x: Array, scale: Array, bias: Array) -> Array:
    """Compute ``(x - mean) / sqrt(var + eps) * scale + bias`` over the last axis."""
    return _forward(center, eps, x, scale, bias)[0]


def _forward(
    center: bool, eps: float, x: Array, scale: Array, bias: Array
) -> tuple[Array, Array, Array]:
    w = upcast(x)
    if center:
        w = w - w.mean(-1, keepdims=True)
    inv = jax.lax.rsqrt(jnp.square(w).mean(-1, keepdims=True) + eps)
    xhat = w * inv
    y = xhat * expand_like(invertible_scale(scale, x), x) + expand_like(bias, x)
    return y.astype(x.dtype), xhat, inv


def _normalize_fwd(
    center: bool, eps: float, x: Array, scale: Array, bias: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    y, xhat, inv = _forward(center, eps, x, scale, bias)
    # Without the barrier XLA saves x, and the parameters broadcast to the size of x, and
    # recomputes y from them in the backward pass.
    y, inv, scale, bias = jax.lax.optimization_barrier((save(y), save(inv), scale, bias))
    return y, (_saved_output(y, xhat, expand_like(invertible_scale(scale, x), x)), inv, scale, bias)


@jax.custom_jvp
def _saved_output(y: Array, xhat: Array, s: Array) -> Array:
    """Return ``y``, with the derivative of ``xhat * s`` for fixed ``s`` and bias.

    Only second derivatives use it. The recovered ``xhat`` does not depend on scale and bias.
    Their contributions would enter twice and cancel, but for a small ``s`` the rounding
    errors of these contributions would not.
    """
    del xhat, s
    return y


@_saved_output.defjvp
def _saved_output_jvp(
    primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    y, _, s = primals
    return y, (tangents[1] * s).astype(y.dtype)


def _normalize_bwd(
    center: bool, eps: float, residuals: tuple[Array, Array, Array, Array], dy: Array
) -> tuple[Array, Array, Array]:
    del eps
    y, inv, scale, bias = residuals
    s, b = jax.lax.stop_gradient((invertible_scale(scale, y), bias.astype(inv.dtype)))
    # If y rounds by more than the scale, xhat cannot be recovered.
    recoverable = jnp.abs(s) > float(jnp.finfo(y.dtype).eps) * jnp.abs(b)
    xhat = (upcast(y) - expand_like(b, y)) * expand_like(jnp.where(recoverable, 1 / s, 0), y)

    rows = tuple(range(y.ndim - 1))
    dz = upcast(dy)
    dscale, dbias = (dz * xhat).sum(rows), dz.sum(rows)
    # Compute the sums before dx: otherwise XLA may delay them, and keep dy alive.
    dscale, dbias, inv = jax.lax.optimization_barrier((dscale, dbias, inv))
    dxhat = dz * expand_like(scale, y)
    dx = dxhat - xhat * (dxhat * xhat).mean(-1, keepdims=True)
    if center:
        dx = dx - dxhat.mean(-1, keepdims=True)
    return (dx * inv).astype(y.dtype), dscale.astype(scale.dtype), dbias.astype(bias.dtype)


_normalize.defvjp(_normalize_fwd, _normalize_bwd)
