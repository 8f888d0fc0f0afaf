"""Losses that try to break the privacy bound of `fnet.clipped_grad`.

The gradient of example b is that of the loss on a batch that holds b alone. Each loss below is either
refused, or its clipped sum equals a loop over batches of one example and moves by at most 1.001
clips if any example is removed or masked. Four tables say what is expected:

- `MIXING` and `POSITION`: layers whose rows depend on other rows, or on their own position. They
  must be refused.
- `ROWWISE`: layers that treat each row alone. They must be computed.
- `EITHER`: layers that a proof may or may not cover. Both are right, a wrong sum is not.

A layer takes and returns activations [batch, 4]. `LOSSES` holds losses with more arguments.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import private_programs
import pytest
from flax import nnx
from jax import lax
from jax.experimental import io_callback

import fnet

pytestmark = pytest.mark.usefixtures("allow_key_reuse")


B = D = 4
"""Examples and features. They coincide, so that no check of shapes alone tells them apart."""


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W = normal(0, B, D), normal(1, D, D)


def row_losses(h):
    return (jnp.sin(h) * h).reshape(len(h), -1).sum(-1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss and its arguments.

    Attributes:
      loss: ``loss(params, *batch) -> losses [batch]``.
      params: Parameters.
      batch: Arrays with one row per example. A single random key becomes one key per example.
      tolerance: Largest error of the clipped sum, in clips per example.
      slack: Largest factor between the sensitivity and the clip.
    """

    loss: Callable[..., Any]
    params: Any = dataclasses.field(default_factory=lambda: jnp.asarray(W))
    batch: tuple[Any, ...] = (X,)
    tolerance: float = 2e-4
    slack: float = 1.001


def after_dense(layer):
    """A loss with the layer between a dense layer and one loss for each row."""
    return Case(lambda p, x: row_losses(layer(jnp.tanh(x @ p))))


def is_key(a):
    return jnp.issubdtype(jnp.asarray(a).dtype, jax.dtypes.prng_key)


def flat(tree):
    """All leaves in one float64 vector."""
    leaves = [np.asarray(a).ravel() for a in jax.tree.leaves(tree)]
    wide = [a.astype(np.complex128 if np.iscomplexobj(a) else np.float64) for a in leaves]
    return np.concatenate([np.zeros(0), *wide])


def check_bound(case):
    """Compare the clipped sum with a loop over batches of one, and with the sum of fewer examples.

    Raises:
      ValueError, TypeError: The loss is refused.
    """
    is_single_key = [is_key(a) and not jnp.ndim(a) for a in case.batch]

    def rows(batch, selected):
        pairs = zip(batch, is_single_key, strict=True)
        return tuple(a if single_key else a[selected] for a, single_key in pairs)

    @jax.jit  # One program, because compilation takes most of the time.
    def results(params, batch, mask, clip, b):
        """The clipped sum, the sum without example b, and the gradient of example b alone."""
        gradient = fnet.clipped_grad(case.loss, 1.0)
        total = gradient(params, *batch, mask=mask, clip=clip)[0]
        others = jnp.arange(B - 1) + (jnp.arange(B - 1) >= b)
        without = gradient(params, *rows(batch, others), clip=clip)[0]
        pairs = zip(batch, is_single_key, strict=True)
        example = [jax.random.fold_in(a, b) if k else a[b][None] for a, k in pairs]
        value, alone = jax.value_and_grad(lambda p: case.loss(p, *example)[0])(params)
        # An example whose loss has no value contributes 0.
        return total, without, jax.tree.map(lambda g: jnp.where(jnp.isfinite(value), g, 0), alone)

    everyone = np.ones(B, bool)
    for batch in case.batch, with_row(case.batch, 100), with_row(case.batch, np.nan):

        def compute(mask, clip, b, batch=batch):
            return [flat(a) for a in results(case.params, batch, mask, clip, b)]

        plain = compute(everyone, np.inf, 0)[0]
        grads = [compute(everyone, np.inf, b)[2] for b in range(B)]
        grads = [g if np.isfinite(g).all() else np.zeros_like(g) for g in grads]
        norms = np.array([np.linalg.norm(g) for g in grads])
        np.testing.assert_allclose(plain, sum(grads), rtol=0, atol=case.tolerance * norms.sum())

        clip = float(np.float32(np.median(norms[norms > 0]) / 2)) if norms.any() else 1.0
        scales = np.minimum(1, clip / np.where(norms > 0, norms, 1))
        expected = sum(s * g for s, g in zip(scales, grads, strict=True))
        for b in range(B):
            total, without, _ = compute(everyone, clip, b)
            np.testing.assert_allclose(total, expected, rtol=0, atol=case.tolerance * B * clip)
            masked = compute(everyone & (np.arange(B) != b), clip, b)[0]
            assert np.linalg.norm(total - masked) <= case.slack * clip
            if not any(is_single_key):  # Else removing an example changes the keys of later ones.
                assert np.linalg.norm(total - without) <= case.slack * clip


def with_row(batch, factor):
    """The batch with a second example that is multiplied by a factor."""

    def multiply(a):
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return a
        factors = np.array([1, factor, 1, 1], np.float32)
        return (a * factors.reshape(B, *[1] * (a.ndim - 1))).astype(a.dtype)

    return tuple(map(multiply, batch))


# Layers whose rows depend on other rows.


def attend(h):
    return jax.nn.softmax(h @ h.T) @ h


def centered(h):
    return h - h.mean(0, keepdims=True)


def conv_over_batch(h):
    return lax.conv_general_dilated(h.T[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0].T


def pairs(h):
    even, odd = h[::2], h[1::2]
    n = len(odd)
    return jnp.concatenate([even[:n] - odd, odd - even[:n], even[n:]])


def preconditioned(h):
    return h - jax.grad(lambda h: jnp.square(h.mean(0)).sum())(h)


def whitened(h):
    return jnp.linalg.solve(h.T @ h + jnp.eye(D), h.T).T


def over_axis(f):
    """A function of one row, vectorized over a named axis of examples."""
    return lambda h: jax.vmap(f, axis_name="examples")(h)


def permutation(size):
    return [(i, (i + 1) % size) for i in range(size)]


MIXING = {
    # Statistics over the batch.
    "mean": centered,
    "detached mean": lambda h: h - lax.stop_gradient(h.mean(0)),
    "variance": lambda h: h / jnp.sqrt(1 + h.var(0)),
    "maximum": lambda h: h / jnp.abs(h).max(),
    "quantile": lambda h: h - jnp.quantile(h, 0.3, axis=0),
    "product": lambda h: h * h.prod(0),
    "custom reduction": lambda h: h * lax.reduce(lax.stop_gradient(h), 1.0, lambda a, b: a + b + a * b, (0,)),
    "mean of a transposed view": lambda h: (h.T - h.T.mean(1, keepdims=True)).T,
    "mean over merged axes": lambda h: h - h.reshape(-1).mean(),
    "mean over split rows": lambda h: h - jnp.sin(h.reshape(-1, 2)).reshape(h.shape).mean((0, 1)),
    "mean in a column map": lambda h: jax.vmap(lambda c: c - c.mean(), 1, 1)(h),
    # Order of the examples, and comparisons with statistics: integers and booleans.
    "sort": lambda h: jnp.sort(h, 0),
    "sort of several": lambda h: lax.sort((h, 2 * h), dimension=0, num_keys=1)[1],
    "largest": lambda h: h - lax.top_k(h.T, 1)[0].T,
    "argmax": lambda h: h * (jnp.argmax(h, 0) + 1),
    "any": lambda h: jnp.where((h > 0.5).any(0), h, 2 * h),
    "above the mean": lambda h: jnp.where(h > h.mean(0), h, 0),
    "sign as int8": lambda h: h * (jnp.sign(h.sum(0)).astype(jnp.int8) + 2),
    "searchsorted": lambda h: h * jnp.searchsorted(jnp.sort(h[:, 0]), h[:, 0])[:, None],
    # Cumulative sums and windows.
    "cumsum": lambda h: jnp.cumsum(h, 0),
    "associative scan": lambda h: lax.associative_scan(jnp.add, h),
    "window sum": lambda h: lax.reduce_window(h, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
    "max pool": lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),
    "convolution": conv_over_batch,
    "fft": lambda h: jnp.fft.fft(h, axis=0).real,
    # Rows that meet or change places.
    "roll": lambda h: h * jnp.roll(h, 1, 0),
    "rev": lambda h: h * h[::-1],
    "shift by padding": lambda h: h + jnp.pad(h, ((1, 0), (0, 0)))[:-1],
    "pairs": pairs,
    "first row": lambda h: h - h[:1],
    "dynamic row": lambda h: h - lax.dynamic_index_in_dim(h, 1, 0, keepdims=False),
    "permuted rows": lambda h: h * jnp.take(h, np.arange(len(h))[::-1], axis=0),
    "row chosen by data": lambda h: h * h[jnp.argmax(h, 1)],
    "transposed": lambda h: h.T.reshape(h.shape) * h,
    "other order of axes": lambda h: h.reshape(2, -1).T.reshape(h.shape) * h,
    "pairwise distances": lambda h: jnp.abs(h[:, None] - h[None]).sum(1),
    "einsum": lambda h: h * jnp.einsum("bd,bd->d", h, h),
    "attention": attend,
    "segment sum": lambda h: h - jax.ops.segment_sum(h, jnp.zeros(len(h), int), 1),
    "scatter-max": lambda h: h + jnp.zeros((1, D)).at[jnp.zeros(len(h), int)].max(h),
    # Linear algebra of the batch.
    "whitened": whitened,
    "cholesky": lambda h: jnp.linalg.cholesky(h @ h.T + 9 * jnp.eye(len(h))) @ h,
    "singular value": lambda h: h / jnp.linalg.svd(h, compute_uv=False)[0],
    # Control flow.
    "scan": lambda h: lax.scan(lambda c, r: (c + r, c + r), jnp.zeros(D), h)[1],
    "fori_loop": lambda h: h + lax.fori_loop(0, len(h), lambda i, c: c + h[i], jnp.zeros(D)),
    "while_loop": lambda h: h + lax.while_loop(lambda c: c.max() < 3, lambda c: 1 + 2 * jnp.abs(c), lax.stop_gradient(h)),
    "cond": lambda h: lax.cond(h.mean() > 0, lambda h: h, lambda h: 2 * h, h),
    "switch": lambda h: lax.switch(jnp.argmax(h[:, 0]) % 2, [jnp.sin, jnp.cos], h),
    "map": lambda h: lax.map(lambda r: r - h.mean(0), h),
    "vmap": lambda h: jax.vmap(lambda i: h[i] - h.mean(0))(jnp.arange(len(h))),
    "jit in jit": lambda h: jax.jit(jax.jit(centered))(h),
    "checkpoint": lambda h: jax.checkpoint(centered)(h),
    "late in a scan": lambda h: lax.scan(lambda c, _: ((h + c[1].sum(0), c[0]), None), (h, h), length=4)[0][1],
    # Named axes.
    "pmean": over_axis(lambda r: r - lax.pmean(r, "examples")),
    "all_gather": over_axis(lambda r: r - lax.all_gather(r, "examples").mean(0)),
    "ppermute": lambda h: over_axis(lambda r: r * lax.ppermute(r, "examples", permutation(len(h))))(h),
    # Derivatives inside the loss.
    "gradient of a batch mean": preconditioned,
    "jvp": lambda h: h + jax.jvp(centered, (h,), (h,))[1],
    "second order": lambda h: h - jax.grad(lambda a: jnp.vdot(a, jax.grad(lambda b: jnp.square(b.sum(0)).sum())(a)))(h),
    # A mean behind operations of each row.
    "mean behind a scatter": lambda h: centered(jax.vmap(lambda r, i: r.at[i].add(1))(h, jnp.argmax(h, 1))),
    "mean behind a gather": lambda h: centered(jax.vmap(lambda r, i: r[i])(h, jnp.argsort(h, 1))),
}  # fmt: skip

# Layers whose rows depend on their position.

SEED = 7


def key():
    """A random key that losses close over, instead of taking it as an argument."""
    return jax.random.key(SEED)


POSITION = {
    "arange": lambda h: h * jnp.arange(len(h))[:, None],
    "numpy constant": lambda h: h * np.linspace(0.5, 2, len(h), dtype=np.float32)[:, None],
    "eye": lambda h: h + jnp.eye(len(h), D),
    "counted ones": lambda h: h * jnp.cumsum(jnp.ones_like(h), 0),
    "first row changed": lambda h: h.at[0].set(0),
    "first row updated": lambda h: lax.dynamic_update_slice(h, jnp.zeros((1, D)), (0, 0)),
    "padded constant": lambda h: h * jnp.pad(jnp.ones((1, D)), ((0, len(h) - 1), (0, 0)), constant_values=2),
    "concatenated constants": lambda h: h * jnp.concatenate([jnp.ones((1, D)), jnp.full((len(h) - 1, D), 2)]),
    "counter in a scan": lambda h: lax.scan(lambda i, r: (i + 1, r * i), 1, h)[1],
    "index in vmap": lambda h: jax.vmap(lambda r, i: r * i)(h, jnp.arange(len(h))),
    "axis_index": over_axis(lambda r: r * lax.axis_index("examples")),
    "mean of tied positions": lambda h: h * jnp.argsort(jnp.zeros(len(h)))[:, None],
    # Random numbers of a key that is not an argument: row b has those of position b.
    "normal": lambda h: h + jax.random.normal(key(), h.shape),
    "categorical": lambda h: h * jax.random.categorical(key(), jnp.zeros((len(h), 3)))[:, None],
    "permutation of rows": lambda h: h * jax.random.permutation(key(), h),
    "split": lambda h: h + jax.vmap(lambda k: jax.random.normal(k, (D,)))(jax.random.split(key(), len(h))),
    "legacy key": lambda h: h + jax.random.normal(jax.random.PRNGKey(SEED), h.shape),
    "rbg key": lambda h: h + jax.random.normal(jax.random.key(SEED, impl="rbg"), h.shape),
    "rng_bit_generator": lambda h: h + lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), h.shape)[1] % 7,
    "linen dropout": lambda h: nn.Dropout(0.5, deterministic=False).apply({}, h, rngs={"dropout": key()}),
    "nnx dropout": lambda h: nnx.Dropout(0.5, deterministic=False)(h, rngs=nnx.Rngs(SEED)),
}  # fmt: skip

# Custom derivative rules. Each function is the identity, unless it is differentiated.


def with_vjp(forward, backward):
    """The identity, with a rule for reverse mode."""
    f = jax.custom_vjp(lambda h: h)
    f.defvjp(forward, backward)
    return f


def with_jvp(rule):
    """The identity, with a rule ``rule(h, tangent) -> (result, tangent)``."""
    f = jax.custom_jvp(lambda h: h)
    f.defjvp(lambda primals, tangents: rule(*primals, *tangents))
    return f


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_rule(rule, h):
    return h


with_rule.defvjp(lambda rule, h: (rule(h), None), lambda rule, _, ct: (ct,))


@jax.custom_gradient
def with_custom_gradient(h):
    mean = h.mean(0)
    return h, lambda ct: ct * mean


def transposed_by_mean(h):
    """A linear function whose declared transpose mixes examples."""
    return jax.custom_derivatives.linear_call(lambda _, h: h, lambda _, ct: centered(ct), (), h)


def with_closure(h):
    mean = h.mean(0)

    @jax.custom_vjp
    def f(h, mean):
        return h

    f.defvjp(lambda h, mean: (h, mean), lambda mean, ct: (ct + mean, None))
    return f(h, mean)


def second_rule(h):
    """A rule whose own rule mixes: found only where the gradient of a gradient is taken."""
    inner = with_vjp(lambda h: (h, None), lambda _, ct: (centered(ct),))
    return jax.grad(lambda h: jnp.square(inner(h)).sum())(h)


MIXING_RULES = {
    "forward rule": with_vjp(lambda h: (h - h.mean(0), None), lambda _, ct: (ct,)),
    "backward rule": with_vjp(lambda h: (h, None), lambda _, ct: (ct - ct.mean(0),)),
    "residual": with_vjp(lambda h: (h, h.mean(0)), lambda mean, ct: (ct * mean,)),
    "residual used as a boolean": with_vjp(lambda h: (h, h > h.mean(0)), lambda above, ct: (jnp.where(above, ct, 0),)),
    "position in the backward rule": with_vjp(lambda h: (h, None), lambda _, ct: (ct * (1 + jnp.arange(len(ct)))[:, None],)),
    "random backward rule": with_vjp(lambda h: (h, None), lambda _, ct: (ct + jax.random.normal(key(), ct.shape),)),
    "tangent of a jvp rule": with_jvp(lambda h, t: (h, t - t.mean(0))),
    "tangent that depends on a mean": with_jvp(lambda h, t: (h, t * h.mean(0))),
    "nondiff argument": lambda h: with_rule(centered, h),
    "nondiff argument with a closure": lambda h: with_rule(lambda a: a * 2 - a.mean(0), h),
    "custom_gradient": with_custom_gradient,
    "closed-over mean": with_closure,
    "rule in a scan": lambda h: lax.scan(lambda c, _: (with_vjp(lambda h: (h - h.mean(0), None), lambda _, ct: (ct,))(c), None), h, length=2)[0],
    "rule in a checkpoint": lambda h: jax.checkpoint(with_vjp(lambda h: (h - h.mean(0), None), lambda _, ct: (ct,)))(h),
    "rule in a branch": lambda h: lax.cond(True, with_jvp(lambda h, t: (h - h.mean(0), t)), jnp.sin, h),
    "rule in a gradient": second_rule,
}  # fmt: skip

# Effects, and functions whose results JAX cannot see.


def with_reference(h):
    """A reference that holds the mean of the last batch."""
    ref = jax.new_ref(jnp.zeros(D))
    ref[...] = lax.stop_gradient(h).mean(0)
    return h - ref[...]


def scratch_reference(h):
    """A reference that holds rows only."""
    ref = jax.new_ref(jnp.zeros_like(h))
    ref[...] = 2 * h
    return ref[...]


MEMORY = np.zeros(D, np.float32)


def remember(h):
    """Store the first row on the host and return what was there before."""
    before = MEMORY.copy()
    MEMORY[:] = np.asarray(h).reshape(-1, D)[0]
    return np.broadcast_to(before, np.shape(h))


def host_mean(method):
    """The mean over all rows that a callback on the host sees."""

    def mean(h):
        h = np.asarray(h)
        return np.broadcast_to(h.reshape(-1, D).mean(0), h.shape)

    def layer(h):
        detached = lax.stop_gradient(h)
        return h - jax.pure_callback(mean, detached, detached, vmap_method=method)

    return layer


@jax.custom_batching.custom_vmap
def zeros_or_mean(h):
    return 0 * h


@zeros_or_mean.def_vmap
def _(size, is_batched, h):
    return jnp.broadcast_to(h.mean(0), h.shape), True


@jax.custom_batching.custom_vmap
def zeros_or_positions(h):
    return 0 * h


@zeros_or_positions.def_vmap
def _(size, is_batched, h):
    return lax.broadcasted_iota(h.dtype, h.shape, 0), True


def moved_by_jit(h):
    """A branch of Python on the size of the batch."""
    return h if len(h) == 1 else h - h.mean(0)


def experts(h):
    """Rows sorted by expert, multiplied with its matrix, and sorted back."""
    expert = (h[:, 0] > 0).astype(int)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=2)
    out = lax.ragged_dot(h[order], jnp.stack([jnp.eye(D), 2 * jnp.eye(D)]), sizes)
    return out[jnp.argsort(order)]


def chosen_rows(h):
    """The gradient of a `cond` that `jax.vmap` turns into a select."""
    return jax.vmap(lambda r: lax.cond(r[0] > 0, jnp.sin, jnp.cos, r))(h)


EITHER = {
    # Row-wise, in ways that need a proof of their own.
    "mapped dropout with one mask": lambda h: jax.vmap(lambda r: eqx.nn.Dropout(0.5)(r, key=key()))(h),
    "conjugate gradients": lambda h: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, h, maxiter=1)[0],
    "declared transpose": transposed_by_mean,
    # Effects and hidden results.
    "python branch on the size": moved_by_jit,
    "reference": with_reference,
    "reference for scratch": scratch_reference,
    "io_callback in a rule": lambda h: with_vjp(lambda h: (h, h), lambda r, ct: (ct + io_callback(remember, r, r),))(h),
    "debug.callback": lambda h: (jax.debug.callback(lambda a: None, h), h)[1],
    "io_callback": lambda h: h + io_callback(remember, lax.stop_gradient(h), lax.stop_gradient(h)),
    "pure_callback, expand_dims": host_mean("expand_dims"),
    "pure_callback, sequential": host_mean("sequential"),
    "custom_vmap that mixes": lambda h: h - zeros_or_mean(lax.stop_gradient(h)),
    "custom_vmap that counts": lambda h: h - zeros_or_positions(lax.stop_gradient(h)),
    "cond for each row": chosen_rows,
}  # fmt: skip

# Layers that treat each row alone.


def norm_of_rows(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1)


def pooled(h):
    return lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME")


def row_gradient(h):
    return jax.vmap(jax.grad(lambda r: jnp.sin(r).prod()))(h)


def clip_rows(h):
    """A rule that clips the cotangent of each row."""

    def backward(_, ct):
        return (ct / jnp.maximum(1, jnp.linalg.norm(ct, axis=-1, keepdims=True)),)

    return with_vjp(lambda h: (jnp.sin(h), None), backward)(h)


def outer_product(h):
    return (h[:, :, None] * h[:, None]) @ h[:, :, None]


def spd(r):
    return jnp.outer(r, r) + jnp.eye(D)


ROWWISE = {
    "identity": lambda h: h,
    "layer norm": norm_of_rows,
    "detached statistics of rows": lambda h: h / lax.stop_gradient(1 + jnp.abs(h).max(-1, keepdims=True)),
    "sort": lambda h: jnp.sort(h, -1),
    "top_k": lambda h: lax.top_k(h, 2)[0],
    "cumsum": lambda h: jnp.cumsum(h, -1),
    "max pool": pooled,
    "closed-over feature weights": lambda h: h * np.linspace(0.5, 2, D, dtype=np.float32),
    "one shared random mask": lambda h: h * jax.random.bernoulli(key(), 0.5, (D,)),
    "zeros of the batch's shape": lambda h: h + jnp.zeros((len(h), D)),
    "tile": lambda h: jnp.tile(h, (1, 2)),
    "stack": lambda h: jnp.stack([h, 2 * h, h], 1),
    "there and back": lambda h: jnp.sin(h.T).T.reshape(len(h), 2, 2).swapaxes(1, 2),
    "outer product": lambda h: outer_product(jnp.tanh(h)),
    "einsum": lambda h: jnp.einsum("bd,be,b->bd", h, h, h[:, 0]),
    "cholesky": lambda h: jax.vmap(lambda r: jnp.linalg.cholesky(spd(r)))(h),
    "batched inverse": lambda h: jnp.linalg.inv(h[:, :, None] * h[:, None] + jnp.eye(D)),
    "gather": lambda h: jnp.take_along_axis(h, jnp.argsort(h, -1), -1),
    "gather from a table": lambda h: jnp.linspace(0, 1, 5)[jnp.digitize(h, jnp.linspace(-1, 1, 4))] * h,
    "scatter": lambda h: jax.vmap(lambda r, i: r.at[i].add(r[0]))(h, jnp.argmax(h, -1)),
    "segment sum in each row": lambda h: jax.vmap(lambda r: jax.ops.segment_sum(r, jnp.array([0, 1, 0, 1]), 2))(h),
    "columns updated": lambda h: h.at[:, 1].set(0),
    "while_loop": lambda h: h * lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, 1.0))[1],
    "while_loop for each row": lambda h: h + jax.vmap(lambda r: lax.while_loop(lambda r: r.max() < 3, lambda r: 1 + 2 * jnp.abs(r), r))(lax.stop_gradient(h)),
    "scan over features": lambda h: lax.scan(lambda c, col: (jnp.tanh(c + col), c), h[:, 0], h.T)[1].T,
    "associative scan": lambda h: lax.associative_scan(jnp.multiply, jnp.tanh(h), axis=1),
    "map over rows": lambda h: lax.map(lambda r: jnp.sin(r) * r.sum(), h),
    "map over experts": lambda h: lax.map(lambda r: experts(r[None])[0], h),
    "vmap of vmap": lambda h: jax.vmap(jax.vmap(jnp.sin))(h),
    "collective within an example": lambda h: jax.vmap(jax.vmap(lambda a: a - lax.pmean(a, "features"), axis_name="features"))(h),
    "cond on a constant": lambda h: lax.cond(True, jnp.sin, jnp.cos, h),
    "jit": lambda h: jax.jit(norm_of_rows)(h),
    "gradient of each row": row_gradient,
    "gradient of the sum": lambda h: h + jax.grad(lambda h: (jnp.sin(h) * h).sum())(h),
    "hessian of each row": lambda h: jax.vmap(jax.hessian(lambda r: jnp.sin(r).prod()))(h),
    "custom_vjp": clip_rows,
    "custom_jvp": with_jvp(lambda h, t: (jnp.sin(h), 2 * t * h)),
    "straight-through": lambda h: h + lax.stop_gradient(jnp.round(h) - h),
    "complex": lambda h: jnp.abs(lax.complex(h, h + 1)),
    "bitcast": lambda h: h * (lax.bitcast_convert_type(lax.stop_gradient(h), jnp.int32) >> 31),
    "convolution": lambda h: lax.conv_general_dilated(h[:, None], jnp.ones((2, 1, 3)), (1,), "SAME"),
    "resize": lambda h: jax.image.resize(h, (len(h), 7), "linear"),
    "equinox layer norm": lambda h: jax.vmap(eqx.nn.LayerNorm(D))(h),
}  # fmt: skip

# Batch norm of other libraries, whose parameters are constants here.

RUNNING = {"batch_stats": {"mean": jnp.zeros(D), "var": jnp.ones(D)}}
SCALE = {"params": {"scale": jnp.ones(D), "bias": jnp.zeros(D)}}


def linen_batch_norm(h, **options):
    norm = nn.BatchNorm(use_running_average=False, **options)
    return norm.apply(SCALE | RUNNING, h, mutable=["batch_stats"])[0]


def nnx_batch_norm(h):
    return nnx.BatchNorm(D, rngs=nnx.Rngs(0))(h)


def equinox_batch_norm(h):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(D, "examples", mode="batch")
    return jax.vmap(norm, axis_name="examples", in_axes=(0, None), out_axes=(0, None))(h, state)[0]


def haiku_batch_norm(h):
    def function(h):
        return hk.BatchNorm(True, True, 0.9)(h, is_training=True)

    params, state = hk.transform_with_state(function).init(None, jnp.zeros((2, D)))
    return hk.transform_with_state(function).apply(params, state, None, h)[0]


def fnet_batch_norm(h):
    layer = fnet.layers.abn(D)
    params, state = layer.init(key())
    return layer.apply(params, state, h[:, None, None], train=True)[0]


BATCH_NORM = {
    "linen": linen_batch_norm,
    "linen, axis_name": over_axis(lambda r: linen_batch_norm(r[None], axis_name="examples")[0]),
    "nnx": nnx_batch_norm,
    "equinox": equinox_batch_norm,
    "haiku": haiku_batch_norm,
    "fnet": fnet_batch_norm,
}

# Losses with other arguments, and layers at other places.

LABELS = np.array([0, 1, 1, 3])
LENGTHS = np.array([1, 3, 2, 3])
SEQUENCES = normal(2, B, 3, D)
TOKENS = np.array([[0, 1, 2], [4, 4, 4], [1, 2, 1], [3, 0, 0]])
KEYS = jax.random.split(jax.random.key(1), B)
RAW_KEYS = np.asarray(jax.random.key_data(KEYS))
HEAD = {"w": jnp.asarray(W), "scale": jnp.float32(0.7), "empty": jnp.zeros((0, 3)), "none": None}


def cross_entropy(p, x, y):
    return optax.losses.softmax_cross_entropy_with_integer_labels(x @ p, y)


def dropout(p, x, k):
    return row_losses(jnp.where(jax.random.bernoulli(k, 0.5, x.shape), jnp.tanh(x @ p), 0))


def dropout_of_rows(p, x, k):
    masks = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (D,)))(k)
    return row_losses(jnp.where(masks, jnp.tanh(x @ p), 0))


def dropout_of_raw_keys(p, x, k):
    return dropout_of_rows(p, x, jax.random.wrap_key_data(k))


def split_for_rows(p, x, k):
    return dropout_of_rows(p, x, jax.random.split(k, len(x)))


def rbg(keys):
    return jax.random.wrap_key_data(np.tile(RAW_KEYS, 2), impl="rbg")[keys]


def token_losses(p, x, lengths):
    """The mean over all tokens of the batch: a common mistake."""
    is_token = jnp.arange(3) < lengths[:, None]
    losses = jnp.where(is_token, jnp.square(jnp.tanh(x @ p)).sum(-1), 0)
    return losses.sum(1) / is_token.sum()


def mean_of_tokens(p, x, lengths):
    is_token = jnp.arange(3) < lengths[:, None]
    losses = jnp.where(is_token, jnp.square(jnp.tanh(x @ p)).sum(-1), 0)
    return losses.sum(1) / is_token.sum(1)


def contrastive(p, x):
    h = x @ p
    return optax.losses.softmax_cross_entropy_with_integer_labels(h @ h.T, jnp.arange(len(x)))


def hardest(p, x, y):
    losses = cross_entropy(p, x, y)
    return jnp.where(losses >= jnp.median(losses), losses, 0)


def language_model(p, t):
    h = jnp.tanh(p["embed"][t] + p["position"])
    scores = jnp.where(jnp.tri(3, dtype=bool), jnp.einsum("btd,bsd->bts", h, h), -jnp.inf)
    logits = (h + jax.nn.softmax(scores) @ h) @ p["embed"].T
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits[:, :-1], t[:, 1:]).mean(1)


def recurrent(p, x):
    def step(h, column):
        h = jnp.tanh(h @ p["w"] * p["scale"] + column)
        return h, h

    return row_losses(lax.scan(step, jnp.zeros((len(x), D)), x.swapaxes(0, 1))[1].swapaxes(0, 1))


def adapted(p, x):
    """One gradient step on the batch's mean loss, then the loss (MAML)."""
    return row_losses(x @ (p - jax.grad(lambda p: row_losses(x @ p).mean())(p)))


def adapted_to_each(p, x):
    def loss(p, r):
        return jnp.square(jnp.tanh(r) @ p).sum()

    return jax.vmap(lambda r: loss(p - 0.1 * jax.grad(loss)(p, r), r))(x)


REFERENCE = jax.new_ref(jnp.zeros(D))
TOTAL = jax.new_ref(jnp.zeros(()))


def with_outer_reference(p, x):
    h = jnp.tanh(x @ p)
    REFERENCE[...] = lax.stop_gradient(h).mean(0)
    return row_losses(h - REFERENCE[...])


def counted_by_a_reference(p, x):
    TOTAL[...] = TOTAL[...] + 1
    return row_losses(x @ p) * TOTAL[...]


def added_to_a_reference(p, x):
    h = jnp.tanh(x @ p)
    REFERENCE[...] = jnp.zeros(D)
    for row in lax.stop_gradient(h):
        REFERENCE[...] += row
    return row_losses(h - REFERENCE[...])


REFUSED_LOSSES = {
    "contrastive": Case(contrastive),
    "mean behind dropout": Case(lambda p, x, k: row_losses(centered(jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x @ p, 0))), batch=(X, jax.random.key(2))),
    "mixup": Case(lambda p, x, y: 0.7 * cross_entropy(p, x, y) + 0.3 * cross_entropy(p, x, y[::-1]), batch=(X, LABELS)),
    "label frequency": Case(lambda p, x, y: cross_entropy(p, x, y) * jnp.bincount(y, length=D)[y], batch=(X, LABELS)),
    "mean over all tokens": Case(token_losses, batch=(SEQUENCES, LENGTHS)),
    "hardest examples": Case(hardest, batch=(X, LABELS)),
    "mean of the losses": Case(lambda p, x: jnp.full(len(x), row_losses(x @ p).mean())),
    "ranked losses": Case(lambda p, x: jnp.sort(row_losses(x @ p))),
    "parameter by position": Case(lambda p, x: row_losses(x * p[jnp.arange(len(x))])),
    "parameters with a batch axis": Case(lambda p, x: row_losses(x * p)),
    "constant with a batch axis": Case(lambda p, x: row_losses(x @ p * W)),
    "adapted to the batch": Case(adapted),
    "reference": Case(with_outer_reference),
    "reference that counts": Case(counted_by_a_reference),
    "reference added to": Case(added_to_a_reference),
    "statistics of the input": Case(lambda p, x: row_losses((x - x.mean(0)) @ p)),
    "row chosen by an argument": Case(lambda p, x, y: row_losses(x[y] @ p), batch=(X, LABELS)),
    "segments given by an argument": Case(lambda p, x, y: row_losses(jax.ops.segment_sum(x @ p, y, D)[y]), batch=(X, LABELS)),
}  # fmt: skip

TABLE = jnp.asarray(normal(3, 5, D))

COMPUTED_LOSSES = {
    "cross entropy": Case(cross_entropy, batch=(X, LABELS)),
    "mean over own tokens": Case(mean_of_tokens, batch=(SEQUENCES, LENGTHS)),
    "tied language model": Case(language_model, {"embed": TABLE, "position": TABLE[:3]}, (TOKENS,)),
    "recurrent": Case(recurrent, HEAD, (SEQUENCES,)),
    "without data": Case(lambda p, x: 0 * x[:, 0] + jnp.square(p).sum()),
    "adapted to each example": Case(adapted_to_each),
    "dropout": Case(dropout, batch=(X, jax.random.key(2))),
    "dropout with a key for each example": Case(dropout_of_rows, batch=(X, KEYS)),
    "dropout with raw keys": Case(dropout_of_raw_keys, batch=(X, RAW_KEYS)),
    "nnx dropout": Case(lambda p, x, k: row_losses(nnx.Dropout(0.5, deterministic=False)(x @ p, rngs=nnx.Rngs(k))), batch=(X, jax.random.key(2))),
    "bfloat16": Case(lambda p, x: row_losses(x.astype(jnp.bfloat16) @ p.astype(jnp.bfloat16)).astype(jnp.float32), tolerance=0.03),
    "float16 parameters": Case(lambda p, x: row_losses(x.astype(jnp.float16) @ p).astype(jnp.float32), jnp.asarray(W, jnp.float16), tolerance=0.01),
}  # fmt: skip


def of_concatenated(f):
    """A loss of a matrix that is concatenated from two parameters."""
    halves = {"a": jnp.asarray(W[:2]), "b": jnp.asarray(W[2:])}
    return Case(lambda p, x: f(jnp.concatenate([p["a"], p["b"]]), x), halves)


def of_rule(backward):
    """A loss of a parameter whose gradient passes through a rule that is not linear."""
    rule = with_vjp(lambda w: (w, None), lambda _, ct: (backward(ct),))
    return Case(lambda p, x: row_losses(jnp.tanh(x) @ rule(p)))


NONLINEAR_RULES = {
    "constant added to the cotangent": lambda ct: ct + 1.0,
    "sign added to the cotangent": lambda ct: ct + 5 * jnp.sign(ct),
    "cotangent in float8": lambda ct: ct.astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "cotangent in 2 bits": lambda ct: lax.reduce_precision(ct, 8, 1),
    "cotangent as an integer": lambda ct: (3 * ct).astype(jnp.int32).astype(jnp.float32),
    "rounded cotangent": lambda ct: jnp.round(3 * ct),
    "loop until the cotangent is small": lambda ct: lax.while_loop(lambda c: jnp.abs(c).max() > 1, lambda c: c / 2, ct),
}  # fmt: skip
"""Backward rules that are not linear and homogeneous in the cotangent."""


def in_checkpoint(backward):
    """A loss whose cotangents pass through a rule inside of `jax.checkpoint`."""
    rule = with_vjp(lambda h: (h, None), lambda _, ct: (backward(ct),))
    return Case(lambda p, x: row_losses(jax.checkpoint(lambda p, x: rule(jnp.tanh(x @ p)))(p, x)))


@jax.custom_vjp
def with_penalty_on(h, penalty):
    """``h``; the gradient is the one of the loss plus the penalty, whatever the loss is."""
    return h


with_penalty_on.defvjp(
    lambda h, penalty: (h, jnp.zeros_like(penalty)), lambda zero, ct: (ct, jnp.ones_like(zero))
)


def with_penalty(p, x):
    gate = jax.nn.softmax(x @ p)
    return row_losses(with_penalty_on(gate, 0.04 * jnp.square(gate).sum(-1)))


SPD = jnp.asarray(W @ W.T + np.diag(np.linspace(1, 9, D)), jnp.float32)


def cg(p):
    """Two iterations, which depend on the right-hand side, of a solve that takes four."""
    return jax.scipy.sparse.linalg.cg(lambda v: SPD @ v, p, maxiter=2)[0]


COMPUTED_LOSSES |= {
    "concatenated, used twice": of_concatenated(lambda w, x: (x @ w + x @ w.reshape(-1).reshape(D, D)).sum(1)),
    "concatenated, transposed": of_concatenated(lambda w, x: row_losses(x @ w) + row_losses(x @ w.T)),
    "concatenated, negative": of_concatenated(lambda w, x: (x @ w - x @ -w).sum(1)),
    "normalized gradient of a parameter": of_rule(lambda ct: ct / jnp.linalg.norm(ct)),
    "sign of the gradient of a parameter": of_rule(jnp.sign),
    "clipped gradient of a parameter": of_rule(lambda ct: jnp.clip(ct, -0.1, 0.1)),
    **{
        f"{name} of the gradient of a parameter": of_rule(backward)
        for name, backward in NONLINEAR_RULES.items()
    },
    **{
        f"{name} in a checkpoint": in_checkpoint(backward)
        for name, backward in NONLINEAR_RULES.items()
        if not name.startswith("loop")  # It mixes examples.
    },
    "penalty in a checkpoint": Case(jax.checkpoint(with_penalty), batch=(1e-3 * X,)),
    "parameter of few bits": Case(lambda p, x: row_losses(x @ lax.reduce_precision(p, 8, 1))),
    "parameter as float8": Case(lambda p, x: row_losses(x @ p.astype(jnp.float8_e4m3fn).astype(jnp.float32))),
    "iterations that solve for a parameter": Case(lambda p, x: row_losses(x @ cg(p)), tolerance=2e-3),
    "solve for a parameter": Case(lambda p, x: row_losses(x @ jnp.linalg.solve(SPD, p))),
    "solve for a parameter in a checkpoint": Case(jax.checkpoint(lambda p, x: row_losses(x @ cg(p))), tolerance=2e-3),
    "solve with an own transpose": Case(lambda p, x: row_losses(x @ private_programs.solved(p))),
    "reshape that transposes": Case(lambda p, x: row_losses(lax.reshape(jnp.tanh(x @ p)[..., None] * jnp.arange(3.0), (len(x), 12), (0, 2, 1)) * jnp.arange(12.0))),
}  # fmt: skip

EITHER_LOSSES = {
    "key split for the rows": Case(split_for_rows, batch=(X, jax.random.key(2))),
    "rbg keys": Case(dropout_of_rows, batch=(X, rbg(slice(None)))),
    "first key for all": Case(lambda p, x, k: dropout(p, x, k[0]), batch=(X, KEYS)),
    "independent of the batch": Case(lambda p, x: jnp.full(len(x), jnp.square(p).sum())),
    "single reference, read only": Case(lambda p, x: row_losses(x @ p + REFERENCE[...])),
}  # fmt: skip


def after_each(layers):
    return {name: after_dense(layer) for name, layer in layers.items()}


REFUSED = {
    "mixing": (after_each(MIXING), "mixes the examples"),
    "position": (
        after_each(POSITION),
        r"its position in the batch|not known whether (scatter|dynamic_update_slice)|\(gather at",
    ),
    "rule": (after_each(MIXING_RULES), "mixes the examples|its position in the batch"),
    "batch norm": (after_each(BATCH_NORM), "mixes the examples of a batch"),
    "loss": (REFUSED_LOSSES, ""),
}
COMPUTED = after_each(ROWWISE) | COMPUTED_LOSSES
UNDECIDED = after_each(EITHER) | EITHER_LOSSES


def refusal_of(function, case):
    """The message with which a loss is refused, or an empty string."""
    message = ""
    try:
        function(case)
    except (ValueError, TypeError) as error:
        message = str(error)
    assert not message or message.startswith("clipped_grad: ")
    return message


def call_once(case):
    """Trace the clipped sum."""
    jax.eval_shape(fnet.clipped_grad(case.loss, 1.0), case.params, *case.batch)


@pytest.mark.parametrize("table", REFUSED)
def test_refuses_losses_that_mix_examples_or_depend_on_the_position(table):
    cases, expected = REFUSED[table]
    messages = {name: refusal_of(call_once, case) for name, case in cases.items()}
    wrong = {name: m for name, m in messages.items() if not (m and re.search(expected, m))}
    assert wrong == {}
    if table == "mixing":
        assert [name for name, m in messages.items() if "position" in m] == []
    if table in ("mixing", "position"):
        assert all("test_sensitivity.py:" in m for m in messages.values())
        for name, size in itertools.product(("mean", "arange", "normal") & cases.keys(), range(3)):
            assert refusal_of(call_once, dataclasses.replace(cases[name], batch=(X[:size],)))


def test_refuses_no_loss_that_treats_each_example_alone():
    assert {n: m for n, case in COMPUTED.items() if (m := refusal_of(call_once, case))} == {}


@pytest.mark.sweep(15)
@pytest.mark.parametrize("name", COMPUTED)
def test_computes_losses_that_treat_each_example_alone(name):
    check_bound(COMPUTED[name])


@pytest.mark.parametrize("name", UNDECIDED)
def test_never_computes_another_loss(name):
    refusal_of(call_once, UNDECIDED[name]) or refusal_of(check_bound, UNDECIDED[name])


# Options of `clipped_grad`, small batches, and auxiliary outputs.

SENSITIVITY_OPTIONS = {
    "clip": {"clip": 0.3},
    "rescaled": {"clip": 0.3, "rescale_to_unit_norm": True},
    "automatic": {"clip": 0.3, "automatic": 0.01},
    "per layer": {"clip": 0.3, "per_layer": True},
    "per layer, automatic": {"clip": 0.3, "per_layer": True, "automatic": 0.01},
    "tree": {"clip": {"v": 0.1, "w": 0.3}, "per_layer": True},
    "in chunks": {"clip": 0.3, "width": 2},
}


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", SENSITIVITY_OPTIONS)
def test_removing_an_example_moves_the_sum_by_at_most_the_sensitivity(name):
    def loss(p, x):
        return row_losses(jnp.tanh(x @ p["w"]) @ (p["v"] / (1 + jnp.square(p["v"]).sum())))

    gradient = fnet.clipped_grad(loss, **SENSITIVITY_OPTIONS[name])
    params = {"v": jnp.asarray(W), "w": jnp.asarray(W.T)}
    batch = X * np.array([[1], [1e4], [1e-4], [1e30]], np.float32)
    sums = jax.jit(jax.vmap(lambda mask: gradient(params, batch, mask=mask)[0]))
    everyone = jax.tree.map(lambda a: a[0], sums(np.ones((1, B), bool)))
    without = sums(~np.eye(B, dtype=bool))
    for b in range(B):
        moved = flat(everyone) - flat(jax.tree.map(lambda a, b=b: a[b], without))
        assert np.linalg.norm(moved) <= 1.001 * gradient.sensitivity()


def test_statistics_of_the_batch_in_aux_do_not_move_the_sum():
    def loss(p, x):
        h = jnp.tanh(x @ p)
        return row_losses(h), {"mean": h.mean(), "rows": h}

    def without_aux(p, x):
        return loss(p, x)[0]

    total, _ = jax.jit(fnet.clipped_grad(loss, 1.0, has_aux=True))(jnp.asarray(W), X)
    expected, _ = jax.jit(fnet.clipped_grad(without_aux, 1.0))(jnp.asarray(W), X)
    np.testing.assert_allclose(total, expected, rtol=1e-5)


# Sums of many clipped gradients, which are float32 whatever the layers compute in.

LARGE = 1024
ROWS = (normal(5, 1, 16) + 0.05 * normal(6, LARGE, 16)).astype(np.float32)
KERNEL = jnp.asarray(normal(7, 16, 16) / 4)
BF16 = jnp.bfloat16


def remat_dense(p, x):
    return jax.checkpoint(lambda w, x: x.astype(BF16) @ w.astype(BF16))(p, x)


def remat_layers(p, x):
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w.astype(BF16)), None))
    return lax.scan(layer, x.astype(BF16), jnp.stack([p, p.T]))[0]


def remat_scale_and_bias(p, x):
    return jax.checkpoint(lambda p, x: x * p[0].astype(BF16) + p[1].astype(BF16))(p, x.astype(BF16))


def cast_after_concatenation(p, x):
    return x.astype(BF16) @ jnp.concatenate([p[:, :4], 2 * p], 1).astype(BF16)


def concatenation_of_casts(p, x):
    return x.astype(BF16) @ jnp.concatenate([p[:, :4].astype(BF16), p.astype(BF16)], 1)


def standardized(p, x):
    w = p.astype(BF16)
    return x.astype(BF16) @ ((w - w.mean(0)) / jnp.sqrt(w.var(0) + 1e-4))


NARROW = {
    f.__name__: f
    for f in (
        remat_dense, remat_layers, remat_scale_and_bias, cast_after_concatenation,
        concatenation_of_casts, standardized,
    )
}  # fmt: skip


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", NARROW)
def test_sums_of_many_gradients_are_not_rounded_to_bfloat16(name):
    def loss(p, x):
        return NARROW[name](p, x).astype(jnp.float32).sum(-1)

    @jax.jit
    def moved(i):
        gradient = fnet.clipped_grad(loss, 1.0)
        total, without = (
            gradient(KERNEL, ROWS, mask=mask)[0]
            for mask in (jnp.ones(LARGE, bool), jnp.arange(LARGE) != i)
        )
        return jnp.linalg.norm(total - without)

    assert max(float(moved(i)) for i in range(0, LARGE, 128)) < 1.001
