"""Dynamic tanh, in place of a norm, that keeps its output and runs backwards from it."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.backward_pass import keep
from fnet.layer import Layer, Params, State, check_sizes
from fnet.layers.norm import never_zero, spread
from fnet.mesh import equally_varying
from fnet.precision import widened


def dynamic_tanh(d: int, alpha: float = 0.5) -> Layer:
    """``y = tanh(alpha x) * scale + bias``, position by position, without statistics.

    Zhu et al., "Transformers without Normalization", CVPR 2025. For the backward pass it
    keeps ``y``, which a dense layer behind it keeps anyway, and the parameters; never
    ``x``. There, as in `fnet.layer_norm`::

        t = (y - bias) / scale;   x = atanh(t) / alpha

    What ``y`` lost by rounding comes back in ``t`` as an error of about
    ``u * (|t| + |bias / scale|)``, u being half the epsilon of the dtype of ``x``: without a
    bias gradients are as good as the output, in bfloat16 to about 2^-8 of the largest.
    Where ``|scale|`` is at most ``2 u |bias|``, ``t`` is gone and taken as 0; where
    ``|alpha scale|`` is, ``x`` is taken as 0 in the gradient of alpha.

    Args:
      d: size of the input's last axis.
      alpha: at first, not 0; one number a layer, trained. 0.5 is the paper's.

    Returns:
      A layer with params ``alpha`` [], ``scale`` (ones at first) and ``bias`` (zeros), [d],
      float32; no state; ``x`` [..., d] -> [..., d], in the input's dtype; computed in
      float32 (float64 for float64).

    Raises:
      ValueError: for ``d`` below 1 and ``alpha`` 0; when applied to an input that does not
        end in ``d``.
      TypeError: when applied, if ``x`` is not floating; from JAX in forward mode.
    """
    check_sizes("dynamic_tanh", d=d)
    if alpha == 0:
        raise ValueError("dynamic_tanh: alpha must not be 0 at first, where all inputs are alike")

    def init(key: Array) -> tuple[Params, State]:
        del key
        scale, bias = jnp.ones(d, jnp.float32), jnp.zeros(d, jnp.float32)
        return {"alpha": jnp.full((), alpha, jnp.float32), "scale": scale, "bias": bias}, {}

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "... d"],
        *,
        key: Array | None = None,
        train: bool,
    ) -> tuple[Float[Array, "... d"], State]:
        del key, train
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"dynamic_tanh: x must be floating, got {x.dtype}")
        if x.shape[-1:] != (d,):
            raise ValueError(f"dynamic_tanh: expected [..., {d}], got {x.shape}")
        arrays = x, params["alpha"], params["scale"], params["bias"]
        return _squash(*equally_varying(arrays)), state

    return Layer(init, apply)


@jax.custom_vjp
def _squash(x: Array, alpha: Array, scale: Array, bias: Array) -> Array:
    t = jnp.tanh(never_zero(alpha, x) * widened(x))
    return (t * spread(never_zero(scale, x), x) + spread(bias, x)).astype(x.dtype)


def _squash_fwd(
    x: Array, alpha: Array, scale: Array, bias: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    # Without the barrier XLA keeps x, and computes y again from it.
    y, alpha, scale, bias = jax.lax.optimization_barrier(
        (keep(_squash(x, alpha, scale, bias)), alpha, scale, bias)
    )
    return y, (y, alpha, scale, bias)


def _squash_bwd(
    residuals: tuple[Array, Array, Array, Array], dy: Array
) -> tuple[Array, Array, Array, Array]:
    y, alpha, scale, bias = residuals
    a, s, b = never_zero(alpha, y), spread(never_zero(scale, y), y), spread(bias, y)
    noise = float(jnp.finfo(y.dtype).eps) * jnp.abs(b)
    # Where y rounds by more than the scale, what it still holds of t is noise.
    t = (widened(y) - b) * jnp.where(jnp.abs(s) > noise, 1 / s, 0)
    t = jnp.clip(t, -1, 1)

    rows = tuple(range(y.ndim - 1))
    dz = widened(dy)
    dscale, dbias = (dz * t).sum(rows), dz.sum(rows)
    dz = dz * spread(scale, y) * (1 - t * t)
    # Where t rounds to 1 its derivative is 0, so that the exact x does not matter.
    below_one = 1 - float(jnp.finfo(t.dtype).epsneg)
    x = jnp.arctanh(jnp.clip(t, -below_one, below_one)) / a
    dalpha = (dz * jnp.where(jnp.abs(a * s) > noise, x, 0)).sum()
    # The sums come before dx: left for later, they would keep dy alive.
    dalpha, dscale, dbias, a = jax.lax.optimization_barrier((dalpha, dscale, dbias, a))
    return (
        (dz * a).astype(y.dtype),
        dalpha.astype(alpha.dtype),
        dscale.astype(scale.dtype),
        dbias.astype(bias.dtype),
    )


_squash.defvjp(_squash_fwd, _squash_bwd)
