"""Influence functions with eigenvalue-corrected Kronecker-factored curvature (EK-FAC)."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet import checks
from fnet.attribution.curvature import CovarianceFactors, kfac, mean_squares
from fnet.attribution.scores import Scorer, directions_of, scorer_of
from fnet.autodiff.examples import PerExampleLoss


def ekfac(
    loss: PerExampleLoss,
    params: Any,
    batches: Iterable[tuple[Any, ...]],
    queries: tuple[Any, ...],
    *,
    damping: float = 0.1,
    curvature_loss: PerExampleLoss | None = None,
    average: bool = False,
) -> Scorer:
    """Score training examples by influence functions with EK-FAC curvature.

        score(z, q) = grad loss(w, q)^T (F + lambda I)^-1 grad loss(w, z)

    This is how much the loss of q falls, per weight of z, in the optimum of the training loss to
    second order. F is the Fisher matrix, in blocks. The block of a matrix, ``y = x W``, is diagonal
    in the eigenvectors of the means of ``x x^T`` and of ``v v^T``, with the cotangents v of y:

        F = (Q_x ⊗ Q_v) diag(E[(Q_x^T G Q_v)^2]) (Q_x ⊗ Q_v)^T          (George et al. 2018)

    Kernels of convolutions are matrices of patches. The block of any other parameter is diagonal,
    and so is a side of more than 4,096 rows or columns.
    The damping lambda is relative to the mean of each block's eigenvalues (Grosse et al. 2023).

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``.
      params: Trained parameters.
      batches: Training examples that F is a mean over: arguments of the loss after params. They are
        iterated over twice.
      queries: Arguments of the loss for the test examples, [queries, ...] each. Their gradients are
        stored.
      damping: Damping, relative to the mean eigenvalue of each block.
      curvature_loss: Loss whose gradients g give ``F = E[g g^T]``. For the Fisher matrix, it draws
        labels from the model's prediction. By default ``loss``: the empirical Fisher matrix.
      average: Whether to score for the mean loss of the queries, as a single query.

    Returns:
      ``scorer(*batch) -> [batch, queries]``, float32; for `Scores.of`.

    Raises:
      ValueError: ``damping`` is not above 0, or there is no training example.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> def loss(params, x, y):
      ...     return fnet.losses.cross_entropy(x @ params, y)
      >>> x, y = jax.random.normal(jax.random.key(0), (8, 4)), jnp.arange(8) % 2
      >>> params, queries = jnp.ones((4, 2)), (x[:3], y[:3])
      >>> scorer = fnet.attribution.ekfac(loss, params, [(x, y)], queries)
      >>> scorer(x, y).shape
      (8, 3)

    References:
      - George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored
        eigenbasis", arXiv:1806.03884.
      - Grosse et al. 2023, "Studying large language model generalization with influence
        functions", arXiv:2308.03296.
    """
    checks.numbers("ekfac", "> 0", damping=damping)
    curvature_loss = curvature_loss or loss
    factors = kfac(curvature_loss, params, batches)
    treedef: Any = jax.tree.structure(params)
    of_leaves = treedef.flatten_up_to(factors)
    bases = [_Basis() if own is None else _Basis.of(own) for own in of_leaves]

    def rotate(grads: list[Array]) -> list[Array]:
        return [basis.rotate(g) for basis, g in zip(bases, grads, strict=True)]

    eigenvalues = mean_squares("ekfac", curvature_loss, params, batches, rotate)

    def precondition(grads: Any, _: Array) -> Any:
        leaves, treedef = jax.tree.flatten(grads)
        solved = []
        for basis, values, g in zip(bases, eigenvalues, leaves, strict=True):
            damped = (values + damping * values.mean())[None]
            rotated = basis.rotate(g)
            # A parameter without any gradient has no curvature.
            solved.append(basis.rotate_back(jnp.where(damped > 0, rotated / damped, 0), g))
        return jax.tree.unflatten(treedef, solved)

    directions = directions_of("ekfac", loss, params, queries, precondition, average=average)
    return scorer_of("ekfac", loss, [(params, directions)])


class _Basis(NamedTuple):
    """A basis in which the curvature of a parameter is taken to be diagonal.

    ``as_matrices`` moves elements to [groups, rows, cols]; None for the basis of the parameter
    itself. Orthogonal matrices rotate the rows and the columns; None does not.
    """

    as_matrices: Callable[[Array], Array] | None = None
    left: Array | None = None
    right: Array | None = None

    @classmethod
    def of(cls, factors: CovarianceFactors) -> "_Basis":
        sides: Any = factors.inputs, factors.cotangents
        eigenvectors = jax.jit(lambda tree: jax.tree.map(lambda a: jnp.linalg.eigh(a)[1], tree))
        return cls(factors.as_matrices, *eigenvectors(sides))

    def rotate(self, grads: Array) -> Array:
        """Coordinates [n, ...] of gradients [n, *parameter]."""
        if self.as_matrices is None:
            return grads
        matrices = jax.vmap(self.as_matrices)(grads)
        matrices = _multiply("grs,bgrc->bgsc", self.left, matrices)
        return _multiply("gcd,bgrc->bgrd", self.right, matrices)

    def rotate_back(self, coordinates: Array, like: Array) -> Array:
        """Gradients [n, *parameter] of coordinates [n, ...]."""
        if self.as_matrices is None:
            return coordinates
        matrices = _multiply("gsr,bgrc->bgsc", self.left, coordinates)
        matrices = _multiply("gdc,bgrc->bgrd", self.right, matrices)
        # Elements only move, so the transposition is the inverse.
        to_param = jax.linear_transpose(self.as_matrices, like[0])
        grads: Array = jax.vmap(lambda m: to_param(m)[0])(matrices)
        return grads


def _multiply(subscripts: str, basis: Array | None, matrices: Array) -> Array:
    if basis is None:
        return matrices
    return jnp.einsum(subscripts, basis, matrices, precision=jax.lax.Precision.HIGHEST)
