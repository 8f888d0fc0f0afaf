"""Curvature of a loss from per-example gradients: the Fisher matrix, diagonal or in factors."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.attribution.scores import sum_of_gradients
from fnet.autodiff.examples import PerExampleLoss, examples
from fnet.autodiff.per_example.backward import per_example_gradients
from fnet.precision import upcast

_LARGEST_SIDE = 4096
"""Sides of a matrix above this length have no covariance, which would take too much memory."""


class CovarianceFactors(NamedTuple):
    """Factors of a parameter's Fisher matrix, see `kfac`; None for a side above 4,096.

    Attributes:
      inputs: Mean of ``u u^T`` over examples and positions, [groups, rows, rows].
      cotangents: Mean over examples of the sum of ``v v^T`` over positions, [groups, cols, cols].
      as_matrices: Moves the elements of an array like the parameter: [groups, rows, cols].
    """

    inputs: Array | None
    cotangents: Array | None
    as_matrices: Callable[[Array], Array]


def kfac(loss: PerExampleLoss, params: Any, batches: Iterable[tuple[Any, ...]]) -> Any:
    """Compute Kronecker factors of the Fisher matrix (K-FAC).

    The gradient of a layer ``y = x W`` is a sum over positions t of ``u_t v_t^T``: its inputs, and
    the cotangents of its outputs. The block of W in the Fisher matrix F is approximately

        F ≈ E[u u^T] ⊗ E[sum_t v_t v_t^T]                          (Martens and Grosse 2015)

    with a mean over examples and positions on the left. It is exact if there is one position, and u
    and v are independent. Kernels of convolutions are matrices of patches (Grosse and Martens
    2016).

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``. Draw labels from the model's prediction for
        the Fisher matrix; labels of the data give the empirical Fisher matrix.
      params: Parameters.
      batches: Arguments of the loss after params, a batch each.

    Returns:
      `CovarianceFactors` in float32 or wider for each parameter, like params. None for parameters
      that are no matrices of one layer. An example whose squares are not finite is left out.

    Raises:
      ValueError: There is no example.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, x):
      ...     return jnp.square(x @ params["w"] + params["b"][None]).sum(-1)
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> factors = fnet.attribution.kfac(loss, params, [(jnp.ones((4, 3)),)])
      >>> factors["w"].inputs.shape, factors["w"].cotangents.shape, factors["b"]
      ((1, 3, 3), (1, 2, 2), None)

    References:
      - Martens and Grosse 2015, "Optimizing neural networks with Kronecker-factored approximate
        curvature", arXiv:1503.05671.
      - Grosse and Martens 2016, "A Kronecker-factored approximate Fisher matrix for convolution
        layers", arXiv:1602.01407.
    """
    as_matrices: dict[int, Callable[[Array], Array]] = {}

    @jax.jit
    def covariances(batch: tuple[Any, ...]) -> dict[int, Any]:
        result = per_example_gradients("kfac", loss, params, examples("kfac", batch))
        found = {}
        for i, g in result.separate().items():
            if (factors := g.kronecker_factors()) is not None:
                as_matrices[i] = factors.as_matrices
                u, v = (jnp.moveaxis(upcast(a), 1, 0) for a in (factors.u, factors.v))
                (u, v), is_counted = _finite([u, v])
                count = is_counted.sum()
                found[i] = (_covariance(u), count * u.shape[2]), (_covariance(v), count)
        return found

    totals = _sum_over("kfac", batches, covariances)
    treedef: Any = jax.tree.structure(params)

    def of_parameter(i: int) -> CovarianceFactors | None:
        if i not in totals:
            return None
        means = [None if total is None else total / count for total, count in totals[i]]
        return CovarianceFactors(means[0], means[1], as_matrices[i])

    return treedef.unflatten(map(of_parameter, range(treedef.num_leaves)))


def fisher_diagonal(loss: PerExampleLoss, params: Any, batches: Iterable[tuple[Any, ...]]) -> Any:
    """Compute the diagonal of the Fisher matrix: the mean squared gradient of each parameter.

        F_ii = E[(d loss / d w_i)^2]                                       (Kirkpatrick et al. 2017)

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``. Draw labels from the model's prediction for
        the Fisher matrix; labels of the data give the empirical Fisher matrix.
      params: Parameters.
      batches: Arguments of the loss after params, a batch each.

    Returns:
      The diagonal, like params, in float32 or wider, without examples that make it infinite or NaN.

    Raises:
      ValueError: There is no example.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> x = jnp.array([[1.0, 2.0], [3.0, 0.0]])
      >>> loss = lambda w, x: x @ w
      >>> print(fnet.attribution.fisher_diagonal(loss, jnp.ones(2), [(x,)]))
      [5. 2.]

    References: Kirkpatrick et al. 2017, "Overcoming catastrophic forgetting in neural networks",
      arXiv:1612.00796.
    """
    squares = mean_squares("fisher_diagonal", loss, params, batches, lambda grads: grads)
    return jax.tree.unflatten(jax.tree.structure(params), squares)


def mean_squares(
    name: str,
    loss: PerExampleLoss,
    params: Any,
    batches: Iterable[tuple[Any, ...]],
    rotate: Callable[[list[Array]], list[Array]],
) -> list[Array]:
    """Mean squares of all coordinates of per-example gradients, a list like the parameters."""

    def squares(grads: Any, _: Array) -> tuple[list[Array], Array]:
        rows, is_counted = _finite(rotate(jax.tree.leaves(grads)))
        return list(map(jnp.square, rows)), is_counted

    add = jax.jit(lambda batch: sum_of_gradients(name, loss, params, batch, squares))
    totals, count = _sum_over(name, batches, add)
    return [total / count for total in totals]


def _finite(arrays: list[Array]) -> tuple[list[Array], Array]:
    """Arrays [batch, ...] with zeros for examples whose squares are not finite; 0 or 1 [batch]."""
    finite = [jnp.isfinite(jnp.square(a)).reshape(len(a), -1).all(1) for a in arrays]
    is_counted = jnp.stack(finite).all(0)
    rows = [jnp.where(jnp.expand_dims(is_counted, range(1, a.ndim)), a, 0) for a in arrays]
    return rows, is_counted.astype(jnp.float32)


def _sum_over(name: str, batches: Iterable[tuple[Any, ...]], f: Callable[..., Any]) -> Any:
    sums = (f(batch) for batch in batches if examples(name, batch).size)
    if (first := next(sums, None)) is None:
        raise ValueError(f"{name}: expected training examples in batches, got none")
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), sums, first)


def _covariance(factor: Array) -> Array | None:
    if factor.shape[-1] > _LARGEST_SIDE:
        return None
    return jnp.einsum("bgtr,bgts->grs", factor, factor)
