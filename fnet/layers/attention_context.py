"""The attention context: a block tells the next one which features moved together.

Source: the component of that name in a language model written in Rust, whose
transformer, state-space and diffusion blocks share it.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from fnet.mesh import equally_varying
from fnet.precision import broadcast_like, widened

ROWS = 32
"""Most positions of a sequence that are looked at."""

RATE = 0.01
"""Weight of what was just seen in a context."""

Passing = Literal["lagged", "current"]
"""Which context a block reads: that of the step before, or the one that this very step renews."""


def apply_context(
    x: Float[Array, "... d"], context: Float[Array, "d d"], strength: Float[Array, ""]
) -> Float[Array, "... d"]:
    """``x + (strength / D) x @ context``: features follow those that they moved with.

    The attention context of a language model written in Rust. No gradient flows into it.
    The backward pass is one matrix product, which serves both gradients, and nothing is
    kept for it but ``x`` and the context::

        g = dy @ context^T;   dx = dy + (strength / D) g;   dstrength = <x, g> / D

    Position by position, so that a token alone gives what it gives in its sequence.

    Args:
      x: [..., T, D] or [D], floating.
      context: [D, D], floating; used in the dtype of ``x``.
      strength: [], a trained parameter; at 0 this is the identity, and its gradient
        is not 0.

    Returns:
      [..., T, D], in the dtype of ``x``.

    Raises:
      TypeError: if ``x`` is not floating.
      ValueError: if the context is not square of the width of ``x``, or the strength
        not a scalar.
    """
    _check("apply_context", x, context)
    if jnp.ndim(strength):
        raise ValueError(f"apply_context: strength must be a scalar, got {jnp.shape(strength)}")
    scale = widened(jnp.asarray(strength)) / x.shape[-1]
    return _applied(x, jax.lax.stop_gradient(context).astype(x.dtype), scale)


@jax.custom_jvp
def _applied(x: Array, context: Array, scale: Array) -> Array:
    return x + scale.astype(x.dtype) * (x @ context)


@_applied.defjvp
def _applied_jvp(
    primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    """One product, of what is linear in both tangents; its transpose is the backward pass."""
    x, context, scale = primals
    dx, _, dscale = tangents
    dscaled = scale.astype(x.dtype) * dx + broadcast_like(dscale, x) * x
    return _applied(x, context, scale), dx + dscaled @ context


def update_context(
    context: Float[Array, "d d"],
    x: Float[Array, "*b t d"],
    mixed: Float[Array, "*b t d"],
    *,
    rate: float = RATE,
    mask: Bool[Array, "*b"] | Bool[Array, "*b t"] | None = None,
) -> Float[Array, "d d"]:
    """The context once a mixer has made ``mixed`` of ``x``: correlations of features, averaged.

    The attention context of a language model written in Rust. Of the first 32 rows at
    stride ``max(1, T // min(T, 32))``, each column centred::

        corr    = Xc^T Yc / (|Xc| |Yc|^T)      0 where the denominator is <= 1e-12
        context = (1 - rate) context + rate mean(tanh(corr))

    the mean being over examples. No entry leaves [-tanh(1), tanh(1)] once it is
    within. A row with a number that is not finite counts as zeros. No gradient flows
    through. At most about 2^20 correlations exist at a time, beside one example's.

    Args:
      context: [D, D], float32 or float64; zeros at first. Computed in its dtype.
      x: [T, D] or [B, T, D]: what went into the mixer's norm.
      mixed: what came out of the mixer, of the shape of ``x``.
      rate: weight of what was just seen, in [0, 1].
      mask: [B], True for a real example, or [B, T], True for a real token; without an
        example, [T]. Others are left out; with nothing left the context stays as it is.

    Returns:
      [D, D], in the dtype of ``context``.

    Raises:
      TypeError: if ``x`` is not floating.
      ValueError: for shapes that do not fit, or a rate out of range.
    """
    _check("update_context", x, context)
    if x.ndim not in (2, 3) or mixed.shape != x.shape:
        raise ValueError(
            "update_context: x and mixed must both be [T, D] or [B, T, D], "
            f"got {x.shape} and {mixed.shape}"
        )
    if not 0 <= rate <= 1:
        raise ValueError(f"update_context: rate must be in [0, 1], got {rate}")
    if x.ndim == 2:
        x, mixed = x[None], mixed[None]
        mask = None if mask is None else jnp.expand_dims(mask, 0)
    if not x.size:
        return context
    seen = _seen(x.shape, mask)

    stride = max(1, x.shape[1] // min(x.shape[1], ROWS))
    x, mixed, seen = (jax.lax.stop_gradient(a)[:, ::stride][:, :ROWS] for a in (x, mixed, seen))
    real = seen.any(1)
    total = _sum_over_examples(*(_centred(a.astype(context.dtype), seen) for a in (x, mixed)))
    count = real.sum()
    mean = total / jnp.maximum(count, 1).astype(total.dtype)
    return jnp.where(count > 0, (1 - rate) * context + rate * mean, context)


def _seen(shape: tuple[int, ...], mask: Array | None) -> Bool[Array, "b t"]:
    """Which positions are real."""
    examples = shape[:2]
    if mask is None:
        return jnp.ones(examples, bool)
    if mask.dtype != bool or mask.shape not in (examples[:1], examples):
        raise ValueError(
            f"update_context: mask must be bool of shape {examples[:1]} or {examples}, "
            f"got {mask.dtype} {mask.shape}"
        )
    return jnp.broadcast_to(mask.reshape(examples[0], -1), examples)


def _centred(rows: Float[Array, "b r d"], seen: Bool[Array, "b r"]) -> Float[Array, "b r d"]:
    """Columns less their means over the rows that are seen; exactly 0 where constant."""
    seen = seen[..., None]
    finite = jnp.isfinite(rows).all(-1, keepdims=True)
    rows = jnp.where(finite, rows, 0)
    mean = jnp.where(seen, rows, 0).sum(1, keepdims=True) / jnp.maximum(
        seen.sum(1, keepdims=True), 1
    ).astype(rows.dtype)
    # What rounding of the mean leaves of a constant column would correlate like any other.
    highest = jnp.where(seen, rows, -jnp.inf).max(1, keepdims=True)
    lowest = jnp.where(seen, rows, jnp.inf).min(1, keepdims=True)
    return jnp.where(seen & (highest > lowest), rows - mean, 0)


_AT_A_TIME = 2**20


def _sum_over_examples(x: Float[Array, "b r d"], y: Float[Array, "b r d"]) -> Float[Array, "d d"]:
    """The sum of ``tanh(corr)``, a few examples at a time."""
    b, r, d = x.shape
    group = max(g for g in range(1, b + 1) if b % g == 0 and g * d * d <= max(_AT_A_TIME, d * d))

    def some(x: Array, y: Array) -> Array:
        lengths = (jnp.sqrt(jnp.square(a).sum(1)) for a in (x, y))
        denominator = jnp.einsum("bi,bj->bij", *lengths)
        corr = jnp.einsum("bri,brj->bij", x, y) / jnp.where(denominator > 1e-12, denominator, 1)
        # Finite rows may have squares that are not; and rounding may exceed 1.
        known = (denominator > 1e-12) & jnp.isfinite(corr)
        return jnp.tanh(jnp.clip(jnp.where(known, corr, 0), -1, 1)).sum(0)

    if group == b:
        return some(x, y)
    # Examples of one device stay there: each turn takes some from every device.
    turns = [a.reshape(group, b // group, r, d).swapaxes(0, 1) for a in (x, y)]
    # Inside `jax.shard_map` what a loop carries varies from the start as in the end.
    zero, *turns = equally_varying((jnp.zeros((d, d), x.dtype), *turns))
    return jax.lax.scan(lambda total, xy: (total + some(*xy), None), zero, turns)[0]


def _check(where: str, x: Array, context: Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{where}: x must be floating, got {x.dtype}")
    d = x.shape[-1] if x.ndim else 0
    if context.shape != (d, d):
        raise ValueError(
            f"{where}: context must have shape {(d, d)}, the width of x {x.shape}, "
            f"got {context.shape}"
        )
