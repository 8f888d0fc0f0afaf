"""The attention context: each block passes feature correlations to the next block."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from fnet import checks
from fnet.mesh import equally_varying
from fnet.precision import broadcast_like, upcast

ROWS = 32
"""Maximum number of positions per sequence that correlations are computed from."""

RATE = 0.01
"""Default weight of the current batch in the moving average."""

Passing = Literal["lagged", "current"]
"""Which context a block reads: from before this step, or as updated in this step."""


def apply_context(
    x: Float[Array, "... d"], context: Float[Array, "d d"], strength: Float[Array, ""]
) -> Float[Array, "... d"]:
    """Add correlated features: ``y = x + (strength / D) x @ context``.

    This is how a block reads the attention context (`update_context`), which comes from a
    language model written in Rust. It acts on each position separately, so a single token
    gives the same result as within its sequence. No gradient flows into the context. The
    backward pass saves only ``x`` and the context, and needs one matrix product::

        g = dy @ context^T;   dx = dy + (strength / D) g;   dstrength = <x, g> / D

    Args:
      x: [..., T, D] or [D], floating.
      context: [D, D], floating; cast to the dtype of ``x``.
      strength: [], a trained parameter. At 0 this is the identity, with a nonzero gradient.

    Returns:
      [..., T, D], in the dtype of ``x``.

    Raises:
      TypeError: if ``x`` is not floating.
      ValueError: if the context is not [D, D], or the strength is not a scalar.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> x, context = jnp.ones((2, 5, 4)), jnp.eye(4)
      >>> y = fnet.apply_context(x, context, jnp.float32(2.0))
      >>> y.shape, float(y[0, 0, 0])
      ((2, 5, 4), 1.5)
    """
    _check("apply_context", x, context)
    if jnp.ndim(strength):
        raise ValueError(f"apply_context: strength must be a scalar, got {jnp.shape(strength)}")
    scale = upcast(jnp.asarray(strength)) / x.shape[-1]
    return _apply(x, jax.lax.stop_gradient(context).astype(x.dtype), scale)


@jax.custom_jvp
def _apply(x: Array, context: Array, scale: Array) -> Array:
    return x + scale.astype(x.dtype) * (x @ context)


@_apply.defjvp
def _apply_jvp(
    primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    """Use one product, linear in both tangents, so that the transpose has one product too."""
    x, context, scale = primals
    dx, _, dscale = tangents
    dscaled = scale.astype(x.dtype) * dx + broadcast_like(dscale, x) * x
    return _apply(x, context, scale), dx + dscaled @ context


def update_context(
    context: Float[Array, "d d"],
    x: Float[Array, "*b t d"],
    mixed: Float[Array, "*b t d"],
    *,
    rate: float = RATE,
    mask: Bool[Array, "*b"] | Bool[Array, "*b t"] | None = None,
) -> Float[Array, "d d"]:
    """Update the attention context with the input and output of a mixer.

    The attention context (from a language model written in Rust) is a moving average of the
    correlations between the features of a mixer's input and output. With X and Y the first 32
    rows of ``x`` and ``mixed`` at stride ``max(1, T // min(T, 32))``, and Xc, Yc the same with
    each column centered::

        corr    = Xc^T Yc / (|Xc| |Yc|^T)      0 if the denominator is <= 1e-12
        context = (1 - rate) context + rate mean(tanh(corr))

    The mean is over examples. Entries that start in [-tanh(1), tanh(1)] stay there. Rows
    with a value that is not finite count as zeros. No gradient flows through the update. At
    most about 2^20 correlations, or one example's, are materialized at a time.

    Args:
      context: [D, D], float32 or float64, initially zeros. The update is computed in its dtype.
      x: [T, D] or [B, T, D], the input of the mixer's norm.
      mixed: the output of the mixer, of the shape of ``x``.
      rate: weight of the current batch, in [0, 1].
      mask: [B] bool, True for real examples, or [B, T], True for real tokens; [T] if ``x``
        has no batch axis. Others are ignored. If nothing is real the context does not change.

    Returns:
      [D, D], in the dtype of ``context``.

    Raises:
      TypeError: if ``x`` is not floating.
      ValueError: if the shapes do not match, or ``rate`` is not in [0, 1].

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> x = jax.random.normal(jax.random.key(0), (8, 16, 4))
      >>> update = jax.jit(fnet.update_context, static_argnames="rate")
      >>> context = update(jnp.zeros((4, 4)), x, 2 * x, rate=1.0)
      >>> [round(float(c), 2) for c in jnp.diag(context)]
      [0.76, 0.76, 0.76, 0.76]
    """
    _check("update_context", x, context)
    if x.ndim not in (2, 3) or mixed.shape != x.shape:
        raise ValueError(
            "update_context: x and mixed must both be [T, D] or [B, T, D], "
            f"got {x.shape} and {mixed.shape}"
        )
    checks.numbers("update_context", "in [0, 1]", rate=rate)
    if x.ndim == 2:
        x, mixed = x[None], mixed[None]
        mask = None if mask is None else jnp.expand_dims(mask, 0)
    if not x.size:
        return context
    real = _real_positions(x.shape, mask)

    stride = max(1, x.shape[1] // min(x.shape[1], ROWS))
    x, mixed, real = (jax.lax.stop_gradient(a)[:, ::stride][:, :ROWS] for a in (x, mixed, real))
    total = _sum_over_examples(*(_center(a.astype(context.dtype), real) for a in (x, mixed)))
    count = real.any(1).sum()
    mean = total / jnp.maximum(count, 1).astype(total.dtype)
    return jnp.where(count > 0, (1 - rate) * context + rate * mean, context)


def _real_positions(shape: tuple[int, ...], mask: Array | None) -> Bool[Array, "b t"]:
    examples = shape[:2]
    if mask is None:
        return jnp.ones(examples, bool)
    checks.mask("update_context", mask, examples[:1], examples)
    return jnp.broadcast_to(mask.reshape(examples[0], -1), examples)


def _center(rows: Float[Array, "b r d"], real: Bool[Array, "b r"]) -> Float[Array, "b r d"]:
    """Subtract from each column its mean over the real rows; constant columns become exactly 0."""
    real = real[..., None]
    finite = jnp.isfinite(rows).all(-1, keepdims=True)
    rows = jnp.where(finite, rows, 0)
    mean = jnp.where(real, rows, 0).sum(1, keepdims=True) / jnp.maximum(
        real.sum(1, keepdims=True), 1
    ).astype(rows.dtype)
    # The rounding error of the mean of a constant column would be correlated like a signal.
    highest = jnp.where(real, rows, -jnp.inf).max(1, keepdims=True)
    lowest = jnp.where(real, rows, jnp.inf).min(1, keepdims=True)
    return jnp.where(real & (highest > lowest), rows - mean, 0)


_CORRELATIONS = 2**20


def _sum_over_examples(x: Float[Array, "b r d"], y: Float[Array, "b r d"]) -> Float[Array, "d d"]:
    b, r, d = x.shape
    group = max(g for g in range(1, b + 1) if b % g == 0 and g * d * d <= max(_CORRELATIONS, d * d))

    def sum_over_group(x: Array, y: Array) -> Array:
        lengths = (jnp.sqrt(jnp.square(a).sum(1)) for a in (x, y))
        denominator = jnp.einsum("bi,bj->bij", *lengths)
        corr = jnp.einsum("bri,brj->bij", x, y) / jnp.where(denominator > 1e-12, denominator, 1)
        # Squares of finite rows may overflow, and rounding may exceed 1.
        valid = (denominator > 1e-12) & jnp.isfinite(corr)
        return jnp.tanh(jnp.clip(jnp.where(valid, corr, 0), -1, 1)).sum(0)

    if group == b:
        return sum_over_group(x, y)
    # With examples sharded over devices, each group takes examples from every device.
    groups = [a.reshape(group, b // group, r, d).swapaxes(0, 1) for a in (x, y)]
    # In `jax.shard_map` the carry of a loop must vary over the same mesh axes throughout.
    zero, *groups = equally_varying((jnp.zeros((d, d), x.dtype), *groups))
    return jax.lax.scan(lambda total, xy: (total + sum_over_group(*xy), None), zero, groups)[0]


def _check(where: str, x: Array, context: Array) -> None:
    checks.floating(where, x=x)
    d = x.shape[-1] if x.ndim else 0
    checks.shapes(where, f"x {x.shape}", context=(context, (d, d)))
