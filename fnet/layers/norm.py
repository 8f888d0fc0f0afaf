"""Layer norm and RMS norm that keep their output, and run backwards from it."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.backward_pass import keep
from fnet.layer import Layer, Params, State, check_sizes
from fnet.mesh import equally_varying
from fnet.precision import wide, widened


def layer_norm(
    x: Float[Array, "... d"],
    scale: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    *,
    eps: float = 1e-6,
) -> Float[Array, "... d"]:
    """Layer norm (Ba, Kiros, Hinton 2016, "Layer Normalization"), keeping its output.

    Over the last axis, with D elements a row::

        xhat = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)
        y    = xhat * scale + bias

    For the backward pass it keeps ``y``, which a dense layer behind it keeps
    anyway, the inverse deviation of each row, and the parameters; never ``x``.
    There ``xhat = (y - bias) / scale``. A scale closer to 0 than 2^-100 (for a
    float16 ``x``: 2^-14) is applied as that number with its sign, below what a
    sum with values near 1 shows, so that ``y`` carries ``xhat`` even there.

    What ``y`` lost by rounding comes back in ``xhat`` as an error of about
    ``u * (|xhat| + |bias / scale|)``, u being half the epsilon of ``x.dtype``:

    * Without a bias, or where it is 0, gradients are as good as the output for
      every scale, 0 included.
    * Where ``|bias|`` is far above ``|scale|``, the gradient of ``scale`` loses
      digits.
    * Where ``|scale|`` is at most ``2 u |bias|``, ``xhat`` is gone and taken as
      0: the feature's ``scale`` receives the gradient 0, and its part of the
      gradient of ``x`` lacks the term ``xhat * mean(dxhat * xhat)``.

    Relative error of the gradient of ``scale``, float32, measured on 512 rows of 256:

    =========  =====  =====  =====  =====  =====  =====  =====
    scale      1      1e-1   1e-2   1e-3   1e-4   1e-5   1e-6
    bias 1     1e-7   3e-7   3e-6   3e-5   3e-4   3e-3   3e-2
    bias 0     1e-7   1e-7   1e-7   1e-7   1e-7   1e-7   1e-7
    =========  =====  =====  =====  =====  =====  =====  =====

    In bfloat16 it is 2e-2 at scale 0.1 and bias 1, and 2e-1 at scale 0.01.
    The error of the gradient of ``x`` was 1/15 of that, about 1/sqrt(D).

    Where that matters (pruned scales beside biases, bfloat16 with small scales)
    leave the bias to the dense layer behind, which has its own: exact, and the
    same memory. Or write ``layer_norm(x, scale, None) + bias``: exact, and one
    more array kept.

    Args:
      x: [..., D], rank >= 1; float16, bfloat16, float32 or float64. Statistics
        are computed in float32 (float64 for float64).
      scale: [D], float32 or wider; None: 1.
      bias: [D], likewise; None: 0.
      eps: added to the variance.

    Returns:
      y, with the shape and dtype of ``x``.

    Raises:
      TypeError: if ``x`` is not floating, or a parameter is narrower than float32.
      ValueError: if ``x`` has rank 0, or a parameter another shape than [D].
    """
    check_parameters("layer_norm", x, scale=scale, bias=bias)
    return _normalize_affine(True, eps, x, scale, bias)


def rms_norm(
    x: Float[Array, "... d"], scale: Float[Array, " d"] | None, *, eps: float = 1e-6
) -> Float[Array, "... d"]:
    """RMS norm (Zhang, Sennrich 2019, "Root Mean Square Layer Normalization"), keeping its output.

    Over the last axis::

        y = x / sqrt(mean(x^2) + eps) * scale

    What is kept, and how, is as for `layer_norm`. There is no bias, so that
    gradients are as good as the output for every scale, 0 included.

    Args:
      x: [..., D], rank >= 1; float16, bfloat16, float32 or float64. The mean
        square is computed in float32 (float64 for float64).
      scale: [D], float32 or wider; None: 1. A network that adds 1 to its stored
        scale passes the sum.
      eps: added to the mean square.

    Returns:
      y, with the shape and dtype of ``x``.

    Raises:
      TypeError: if ``x`` is not floating, or ``scale`` is narrower than float32.
      ValueError: if ``x`` has rank 0, or ``scale`` another shape than [D].
    """
    check_parameters("rms_norm", x, scale=scale)
    return _normalize_affine(False, eps, x, scale, None)


def layer_norm_layer(d: int, *, bias: bool = True, eps: float = 1e-6) -> Layer:
    """`fnet.layer_norm` as a layer.

    Args:
      d: size of the input's last axis.
      bias: whether there is a bias. A dense layer with a bias behind the norm
        makes it redundant, and without it every scale has good gradients.
      eps: added to the variance.

    Returns:
      A layer with params ``scale`` (ones at first) and ``bias`` (zeros), [d],
      float32; no state; ``x`` [..., d] -> [..., d], in the input's dtype.

    Raises:
      ValueError: for ``d`` below 1; when applied to an input that does not end in ``d``.
      TypeError: when applied, as `fnet.layer_norm`.
    """
    check_sizes("layer_norm", d=d)

    def init(key: Array) -> tuple[Params, State]:
        del key
        scale = {"scale": jnp.ones(d, jnp.float32)}
        return scale | ({"bias": jnp.zeros(d, jnp.float32)} if bias else {}), {}

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        del key, train
        return layer_norm(x, params["scale"], params.get("bias"), eps=eps), state

    return Layer(init, apply)


def rms_norm_layer(d: int, *, eps: float = 1e-6) -> Layer:
    """`fnet.rms_norm` as a layer.

    Args:
      d: size of the input's last axis.
      eps: added to the mean square.

    Returns:
      A layer with params ``scale`` [d] (ones at first, float32), no state;
      ``x`` [..., d] -> [..., d], in the input's dtype.

    Raises:
      ValueError: for ``d`` below 1; when applied to an input that does not end in ``d``.
      TypeError: when applied, as `fnet.rms_norm`.
    """
    check_sizes("rms_norm", d=d)

    def init(key: Array) -> tuple[Params, State]:
        del key
        return {"scale": jnp.ones(d, jnp.float32)}, {}

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        del key, train
        return rms_norm(x, params["scale"], eps=eps), state

    return Layer(init, apply)


def check_parameters(where: str, x: Array, **parameters: Array | None) -> None:
    """Refuses an input that is not floating, and parameters that do not fit its last axis."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{where}: x must be floating, got {x.dtype}")
    if x.ndim < 1:
        raise ValueError(f"{where}: x must have rank >= 1, got shape {x.shape}")
    for name, v in parameters.items():
        if v is None:
            continue
        if v.shape != x.shape[-1:]:
            raise ValueError(
                f"{where}: {name} must have shape {x.shape[-1:]}, the last axis of x {x.shape}, "
                f"got {v.shape}"
            )
        if not jnp.issubdtype(v.dtype, jnp.floating) or v.dtype.itemsize < 4:
            raise TypeError(f"{where}: {name} must be float32 or wider, got {v.dtype}")


def _normalize_affine(
    center: bool, eps: float, x: Array, scale: Array | None, bias: Array | None
) -> Array:
    scale = jnp.ones(x.shape[-1], wide(x)) if scale is None else scale
    bias = jnp.zeros(x.shape[-1], wide(x)) if bias is None else bias
    return _normalize(center, eps, *equally_varying((x, scale, bias)))


def spread(v: Array, like: Array) -> Array:
    """[D] -> [1, ..., D], in the dtype of the statistics of ``like``."""
    return jnp.expand_dims(v.astype(wide(like)), range(like.ndim - 1))


def never_zero(scale: Array, x: Array) -> Array:
    """A scale as it is applied, so that it can be undone, in the dtype of the statistics of ``x``.

    Below what a sum shows it is that floor, with its sign.
    """
    scale = scale.astype(wide(x))
    floor = max(float(jnp.finfo(x.dtype).smallest_normal), 2.0**-100)
    step = jnp.where(jnp.abs(scale) < floor, jnp.copysign(floor, scale) - scale, 0)
    return scale + jax.lax.stop_gradient(step)  # its derivative stays 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize(center: bool, eps: float, x: Array, scale: Array, bias: Array) -> Array:
    """``(x - mean) / sqrt(var + eps) * scale + bias`` along the last axis."""
    return _forward(center, eps, x, scale, bias)[0]


def _forward(
    center: bool, eps: float, x: Array, scale: Array, bias: Array
) -> tuple[Array, Array, Array]:
    """The output, xhat and the inverse deviation."""
    w = widened(x)
    if center:
        w = w - w.mean(-1, keepdims=True)
    inv = jax.lax.rsqrt(jnp.square(w).mean(-1, keepdims=True) + eps)
    xhat = w * inv
    y = xhat * spread(never_zero(scale, x), x) + spread(bias, x)
    return y.astype(x.dtype), xhat, inv


def _normalize_fwd(
    center: bool, eps: float, x: Array, scale: Array, bias: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    y, xhat, inv = _forward(center, eps, x, scale, bias)
    # Without the barrier XLA computes y again from x in the backward pass and keeps x for
    # that, and the parameters at the size of x.
    y, inv, scale, bias = jax.lax.optimization_barrier((keep(y), keep(inv), scale, bias))
    return y, (_kept(y, xhat, spread(never_zero(scale, x), x)), inv, scale, bias)


@jax.custom_jvp
def _kept(y: Array, xhat: Array, s: Array) -> Array:
    """``y``; in a second derivative, ``xhat * s`` with ``s`` and the bias held still.

    Nothing recovered from ``y`` moves with them: their own part would come in
    twice and cancel, and for a small ``s`` the rounding of that would not.
    """
    del xhat, s
    return y


@_kept.defjvp
def _kept_jvp(
    primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    y, _, s = primals
    return y, (tangents[1] * s).astype(y.dtype)


def _normalize_bwd(
    center: bool, eps: float, residuals: tuple[Array, Array, Array, Array], dy: Array
) -> tuple[Array, Array, Array]:
    del eps
    y, inv, scale, bias = residuals
    s, b = jax.lax.stop_gradient((never_zero(scale, y), bias.astype(inv.dtype)))
    # Where y rounds by more than the scale, what it still holds of xhat is noise.
    readable = jnp.abs(s) > float(jnp.finfo(y.dtype).eps) * jnp.abs(b)
    xhat = (widened(y) - spread(b, y)) * spread(jnp.where(readable, 1 / s, 0), y)

    rows = tuple(range(y.ndim - 1))
    dz = widened(dy)
    dscale, dbias = (dz * xhat).sum(rows), dz.sum(rows)
    # The sums come before dx: left for later, they would keep dy alive.
    dscale, dbias, inv = jax.lax.optimization_barrier((dscale, dbias, inv))
    dxhat = dz * spread(scale, y)
    dx = dxhat - xhat * (dxhat * xhat).mean(-1, keepdims=True)
    if center:
        dx = dx - dxhat.mean(-1, keepdims=True)
    return (dx * inv).astype(y.dtype), dscale.astype(scale.dtype), dbias.astype(bias.dtype)


_normalize.defvjp(_normalize_fwd, _normalize_bwd)
