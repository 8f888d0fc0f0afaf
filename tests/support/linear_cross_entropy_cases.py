"""Arrays, and a reference on materialized logits, for the tests of `linear_cross_entropy`."""

import jax
import jax.numpy as jnp
import numpy as np

D, V = 5, 37
ALL_OPTIONS = {"smoothing": 0.2, "z_loss": 0.03, "soft_cap": 2.0}


def arrays(*tokens, dtype=jnp.float64, width=D, vocabulary=V, seed=0):
    """x, kernel, bias, labels, and weights for a weighted sum of the losses."""
    rng = np.random.default_rng(seed)
    shapes = ((*tokens, width), (width, vocabulary), (vocabulary,), tokens)
    x, kernel, bias, weights = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return x, kernel, bias, jnp.asarray(rng.integers(0, vocabulary, tokens)), weights


def full_logits(x, kernel, bias=None, *, soft_cap=None):
    """Logits in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    z = x.astype(wide) @ kernel.astype(wide)
    if bias is not None:
        z += jnp.expand_dims(bias.astype(wide), range(z.ndim - 1))
    return z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)


def reference_losses(
    x, kernel, labels, *, bias=None, mask=None, smoothing=0.0, z_loss=0.0, soft_cap=None
):
    """The formula of the docstring."""
    z = full_logits(x, kernel, bias, soft_cap=soft_cap)
    lse = jax.nn.logsumexp(z, -1)
    picked = jnp.take_along_axis(z, labels[..., None], -1)[..., 0]
    got = lse - (1 - smoothing) * picked - smoothing * z.mean(-1) + z_loss * lse**2
    return got if mask is None else jnp.where(mask, got, 0)


def value_and_gradients(f, labels, weights, **options):
    """Compiled losses, and gradients of their weighted sum by x, kernel and bias."""

    @jax.jit
    def both(x, kernel, bias):
        def of_arrays(x, kernel, bias):
            return f(x, kernel, labels, bias=bias, **options)

        got, pullback = jax.vjp(of_arrays, x, kernel, bias)
        return got, pullback(weights.astype(got.dtype))

    return both
