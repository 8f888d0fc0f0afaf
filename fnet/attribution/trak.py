"""TRAK: a linear model of randomly projected gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fnet import checks
from fnet.attribution.scores import Scorer, gradients
from fnet.autodiff.examples import PerExampleLoss

_BLOCK = 2**22
"""Elements of a random matrix that exist at a time."""


def trak(
    loss: PerExampleLoss,
    checkpoints: Sequence[Any],
    batches: Iterable[tuple[Any, ...]],
    queries: tuple[Any, ...],
    key: Array,
    *,
    dim: int = 512,
    damping: float = 0.1,
) -> Scorer:
    """Score training examples by a linear model of randomly projected gradients.

    The loss is a negative log-likelihood: ``exp(-loss)`` is the probability p of what is right.
    Features are the projected gradients of the margin ``f = log(p / (1 - p))``. With the random
    signs P [parameters, dim], and the features Phi of all training examples,

        phi(z) = P^T grad f(w, z),        K = Phi^T Phi + damping mean(diag(Phi^T Phi)) I
        score(z, q) = mean_c [phi(q)^T K^-1 phi(z)] mean_c [1 - p(z)]

    with means over checkpoints of independent runs (Park et al. 2023, equation 13). One checkpoint
    works, and several are better. An example whose loss rounds to 0 has the score 0. One whose
    gradient is not finite is left out of K, and has the score NaN.

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``, such as a cross-entropy.
      checkpoints: Trained parameters of several runs.
      batches: All training examples: arguments of the loss after params.
      queries: Those of the test examples, [queries, ...] each.
      key: Random key of the projections.
      dim: Number of columns of P. It should be less than the number of training examples.
      damping: Ridge, relative to the mean of K's diagonal; 0 in the paper. On digits, a ridge of
        0.1 raises the linear datamodeling score from 0.33 to 0.58.

    Returns:
      ``scorer(*batch) -> [batch, queries]``, float32; for `Scores.of`.

    Raises:
      ValueError: There is no checkpoint, or ``dim`` or ``damping`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> def loss(params, x, y):
      ...     return fnet.losses.cross_entropy(x @ params, y)
      >>> key, y = jax.random.key(1), jnp.arange(8) % 2
      >>> x = jax.random.normal(jax.random.key(0), (8, 4))
      >>> scorer = fnet.attribution.trak(
      ...     loss, [jnp.ones((4, 2))], [(x, y)], (x[:3], y[:3]), key, dim=4
      ... )
      >>> scorer(x, y).shape
      (8, 3)

    References: Park et al. 2023, "TRAK: Attributing model behavior at scale", arXiv:2303.14186.
    """
    checks.numbers("trak", ">= 1", dim=dim)
    checks.numbers("trak", ">= 0 and finite", damping=damping)
    if not checkpoints:
        raise ValueError("trak: expected at least one checkpoint, got none")

    def features(number: int, batch: tuple[Any, ...]) -> tuple[Array, Array]:
        """Features [batch, dim], and 1 - p [batch]."""

        def project(grads: Any, losses: Array) -> tuple[Array, Array]:
            doubt = -jnp.expm1(-losses)  # 1 - p, exact for p near 1.
            # Of a loss that rounds to 0, the margin's gradient is not known: 0 / 0.
            is_sure = doubt <= 0
            rows = jnp.concatenate([g.reshape(len(g), -1) for g in jax.tree.leaves(grads)], 1)
            # df = -dloss / (1 - p). The sign cancels in the scores.
            rows = jnp.where(is_sure[:, None], 0, rows / jnp.where(is_sure, 1, doubt)[:, None])
            return random_projection(rows, jax.random.fold_in(key, number), dim), doubt

        result: tuple[Array, Array] = gradients("trak", loss, checkpoints[number], batch, project)
        return result

    compiled = jax.jit(features, static_argnums=0)
    kernels = [jnp.zeros((dim, dim)) for _ in checkpoints]
    for batch in batches:
        for number in range(len(checkpoints)):
            phi, _ = compiled(number, batch)
            phi = jnp.where(jnp.isfinite(jnp.square(phi).sum(1, keepdims=True)), phi, 0)
            kernels[number] += jnp.matmul(phi.T, phi, precision=jax.lax.Precision.HIGHEST)

    def weights_of(number: int) -> Array:
        kernel, (phi, _) = kernels[number], compiled(number, queries)
        ridge = damping * jnp.trace(kernel) / dim
        # A pseudoinverse, because K is singular if features are all 0, or without a ridge.
        inverse = jnp.linalg.pinv(
            kernel + ridge * jnp.eye(dim), rtol=dim * jnp.finfo(kernel.dtype).eps, hermitian=True
        )
        return jnp.matmul(inverse, phi.T, precision=jax.lax.Precision.HIGHEST)

    weights = [weights_of(number) for number in range(len(checkpoints))]

    def scorer(*batch: Any) -> Array:
        results = [features(number, batch) for number in range(len(checkpoints))]
        linear = [phi @ w for (phi, _), w in zip(results, weights, strict=True)]
        doubts = [doubt for _, doubt in results]
        return jnp.stack(linear).mean(0) * jnp.stack(doubts).mean(0)[:, None]

    return scorer


def random_projection(rows: Array, key: Array, dim: int) -> Array:
    """Multiply rows [n, size] by random signs [size, dim], which exist in blocks."""
    height = min(max(_BLOCK // dim, 1), rows.shape[1])
    blocks = -(-rows.shape[1] // height)
    rows = jnp.pad(rows, ((0, 0), (0, blocks * height - rows.shape[1])))

    def add(total: Array, i: Array) -> tuple[Array, None]:
        signs = jax.random.rademacher(jax.random.fold_in(key, i), (height, dim), rows.dtype)
        block = jax.lax.dynamic_slice_in_dim(rows, i * height, height, axis=1)
        return total + jnp.matmul(block, signs, precision=jax.lax.Precision.HIGHEST), None

    zeros = jnp.zeros((len(rows), dim), rows.dtype)
    total, _ = jax.lax.scan(add, zeros, jnp.arange(blocks))
    return total
