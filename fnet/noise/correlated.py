"""Correlated noise: strategy matrices of jax-privacy, with noise drawn again instead of stored.

The noise of step i is a linear combination of the standard normal z of past steps. Each z follows
from the key of its step, so a step draws it again. No buffer outlives the step, unless the strategy
is one of buffers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet import checks
from fnet.noise.gaussian import add_noise, add_noise_to
from fnet.noise.imports import in_double_precision, jax_privacy

_NEGLIGIBLE = 2.0**-24
"""L2 norm of the dropped coefficients relative to the others: less than float32 rounds away."""

_MAX_COEFS = 2**14
"""Most coefficients of correlated noise: z of that many steps would be drawn at each step."""

_MAX_STEPS = 2**12
"""Most steps of a strategy that is no Toeplitz matrix: the program holds C^-1 as a constant."""


def _padded(coef: np.ndarray, size: int) -> np.ndarray:
    return np.pad(coef[:size], (0, max(size - len(coef), 0)))


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """Strategy matrix C of correlated noise: lower-triangular, [steps, steps].

    For the sums of clipped gradients x [steps, parameters] and standard normal z, the steps
    release x + stddev C^-1 z. The noise of step i is::

        stddev * sum_j noising[i, j] z[i - j],        z[i] = 0 for i < 0

    This is post-processing of C x + stddev z, a Gaussian mechanism. The sensitivity of C x
    depends on how far apart two steps with the same example are. The default is DP-SGD.
    `Strategy.of` takes what jax-privacy optimizes.

    Attributes:
      noising: Coefficients of z by age, [1, k] for a Toeplitz matrix, else [steps, k]. None for a
        strategy with buffers.
      bands: Number of nonzero bands of C, which then has columns of norm 1 at most. None for a C
        that is not banded.
      steps: Number of steps of C; None for any.
      column: First column of C [steps], or C [steps, steps], for a number of steps.
      buffers: The `StreamingMatrix` of C^-1, whose state holds arrays like the parameters.

    Example:
      >>> from fnet.privacy import Strategy
      >>> from jax_privacy.matrix_factorization import toeplitz
      >>> strategy = Strategy.of(toeplitz.optimize_banded_toeplitz(n=100, bands=4))
      >>> strategy.bands, round(strategy.sensitivity(steps=100, separation=25), 4)
      (4, 2.0)

    References: Denisov et al. 2022, "Improved differential privacy for SGD via optimal private
      linear operators on adaptive streams", Theorem 2.1, arXiv:2202.08312.
    """

    noising: np.ndarray | None = dataclasses.field(
        default_factory=lambda: np.ones((1, 1)), repr=False
    )
    bands: int | None = 1
    steps: int | None = None
    column: Callable[[int], np.ndarray] = dataclasses.field(
        default_factory=lambda: functools.partial(_padded, np.ones(1)), repr=False
    )
    buffers: Any = dataclasses.field(default=None, repr=False)

    @classmethod
    def of(cls, matrix: Any, *, inverse: bool = False) -> "Strategy":
        """Return the strategy of a matrix of jax-privacy.

        ====================================  ====================================================
        ``matrix``                            the noise of a step
        ====================================  ====================================================
        coefficients of C, [bands]            about 10 draws per band, such as
                                              ``toeplitz.optimize_banded_toeplitz(n, bands)``
        the same with ``inverse``: of C^-1    a draw per coefficient, such as
                                              ``toeplitz.optimal_max_error_noising_coefs(bands)``
        C, [steps, steps]                     up to a draw per step, such as ``dense.optimize(n)``
        ``banded.ColumnNormalizedBanded``     about 10 draws per band
        ``BufferedToeplitz``                  one draw; each buffer is an array like the
                                              parameters in the optimizer's state
        ====================================  ====================================================

        Args:
          matrix: One of these. C is divided by the largest norm of its columns.
          inverse: Whether ``matrix`` has the coefficients of C^-1.

        Returns:
          The strategy. The tail of the coefficients of C^-1 that is smaller than the rounding of
          float32 is dropped.

        Raises:
          ValueError: If ``matrix`` is none of these, is not invertible or finite, or its C^-1
            takes too many draws.
        """
        factorization = jax_privacy("matrix_factorization")
        if isinstance(matrix, factorization.buffered_toeplitz.BufferedToeplitz):
            return cls._buffered(matrix)
        if isinstance(matrix, factorization.banded.ColumnNormalizedBanded):
            matrix = in_double_precision(lambda: matrix.materialize())
        matrix = np.asarray(matrix, np.float64)
        if matrix.ndim not in (1, 2) or not matrix.size or not np.isfinite(matrix).all():
            raise ValueError(
                "Strategy.of: expected finite coefficients [bands], a matrix [steps, steps], or a "
                f"strategy of jax_privacy.matrix_factorization, got shape {matrix.shape}"
            )
        if matrix.ndim == 2:
            return cls._dense(matrix)
        if not matrix[0] > 0:
            raise ValueError(f"Strategy.of: the first coefficient must be > 0, got {matrix[0]}")
        return cls._inverse(matrix) if inverse else cls._banded(matrix)

    @classmethod
    def _banded(cls, coef: np.ndarray) -> "Strategy":
        coef = coef / np.linalg.norm(coef)
        if len(coef) == 1:
            return DP_SGD
        size = 64 * len(coef)
        while size <= _MAX_COEFS:
            noising = _without_tail(_inverse(coef, size)[None])
            if noising.shape[1] <= size // 2:  # the half behind it shows that the tail stays small
                column = functools.partial(_padded, coef)
                return cls(noising, len(coef), column=column)
            size *= 2
        raise ValueError(
            f"Strategy.of: C^-1 does not fall off within {_MAX_COEFS} steps; give coefficients "
            f"that decrease faster, got {coef.tolist()}"
        )

    @classmethod
    def _inverse(cls, noising: np.ndarray) -> "Strategy":
        if len(noising) == 1:
            return DP_SGD
        return cls(noising[None], None, column=functools.partial(_inverse, noising))

    @classmethod
    def _dense(cls, matrix: np.ndarray) -> "Strategy":
        steps = len(matrix)
        if matrix.shape != (steps, steps) or np.triu(matrix, 1).any() or steps > _MAX_STEPS:
            raise ValueError(
                f"Strategy.of: C must be lower-triangular, with at most {_MAX_STEPS} rows, got "
                f"shape {matrix.shape}"
            )
        matrix = matrix / np.linalg.norm(matrix, axis=0).max()
        inverse = np.linalg.inv(matrix)
        age = np.arange(steps)[:, None] - np.arange(steps)
        by_age = np.where(age >= 0, np.take_along_axis(inverse, np.maximum(age, 0), 1), 0)
        rows, columns = np.nonzero(matrix)
        bands = int((rows - columns).max()) + 1
        return cls(
            _without_tail(by_age), bands if bands < steps else None, steps, lambda n: matrix[:n, :n]
        )

    @classmethod
    def _buffered(cls, matrix: Any) -> "Strategy":
        # In float32, as its buffers: the matrix which makes the noise has this sensitivity.
        wide = dataclasses.replace(
            matrix,
            buf_decay=np.asarray(matrix.buf_decay, np.float32).astype(np.float64),
            output_scale=np.asarray(matrix.output_scale, np.float32).astype(np.float64),
        )
        narrow = jax.tree.map(lambda a: np.asarray(a, np.float32), wide)

        def column(steps: int) -> np.ndarray:
            return np.asarray(in_double_precision(lambda: wide.toeplitz_coefs(steps)))

        return cls(None, None, column=column, buffers=narrow.inverse_as_streaming_matrix())

    @property
    def is_independent(self) -> bool:
        """Whether the noise of each step is its own: DP-SGD."""
        return self.noising is not None and self.noising.shape == (1, 1)

    def sensitivity(self, steps: int, separation: int) -> float:
        """Compute the L2 sensitivity of C x to one example, in units of the clip.

        jax-privacy computes it: ``toeplitz.minsep_sensitivity_squared`` (Kalinin and Lampert 2024,
        Theorem 2), or ``sensitivity.get_min_sep_sensitivity_upper_bound`` for a C that is no
        Toeplitz matrix (Choquette-Choo et al. 2023, Algorithm 4).

        Args:
          steps: Length of the run.
          separation: Least number of steps between two steps with the same example. 1 allows all.

        Returns:
          The sensitivity.

        Raises:
          ValueError: If a Toeplitz C has a negative or an increasing coefficient, or ``steps`` is
            more than C has.
        """
        if self.steps is not None and steps > self.steps:
            raise ValueError(f"Strategy.sensitivity: C has {self.steps} steps, got {steps}")
        of = jax_privacy("matrix_factorization")
        column = self.column(steps)
        if column.ndim == 2:
            bound = of.sensitivity.get_min_sep_sensitivity_upper_bound
            return float(in_double_precision(lambda: bound(jnp.asarray(column), separation)))
        # Rounding errors of an inverse are no increase.
        envelope = np.maximum.accumulate(column[::-1])[::-1].clip(0)
        column = envelope if np.abs(envelope - column).max() <= 1e-6 * column[0] else column
        squared = of.toeplitz.minsep_sensitivity_squared
        value = in_double_precision(lambda: squared(jnp.asarray(column), separation))
        return math.sqrt(value)


DP_SGD = Strategy()
"""Independent noise at each step."""


def banded_square_root(bands: int) -> Strategy:
    """Return correlated noise for cyclic Poisson sampling: banded matrix factorization.

    The strategy matrix C has the first ``bands`` coefficients of the square root of the matrix of
    prefix sums, scaled to norm 1::

        c[0] = 1,      c[j] = c[j - 1] (2 j - 1) / (2 j)      for j < bands

    Sample with ``PoissonSampling(..., bands=bands)``. Sampling then amplifies privacy.

    Args:
      bands: Number of bands. One band is DP-SGD, bit for bit.

    Returns:
      The strategy. A step draws about ``10 * bands`` standard normals per parameter.

    Raises:
      ValueError: If ``bands`` is below 1.

    Example:
      >>> from fnet.privacy import banded_square_root
      >>> strategy = banded_square_root(4)
      >>> strategy.noising.shape, float(strategy.noising[0, 1].round(2))
      ((1, 44), -0.61)

    References: Kalinin and Lampert 2024, "Banded square root matrix factorization for
      differentially private model training", arXiv:2405.13763. Choquette-Choo et al. 2023,
      "(Amplified) banded matrix factorization", arXiv:2306.08153.
    """
    return _square_root("banded_square_root", bands, "optimal_max_error_strategy_coefs")


def banded_inverse_square_root(bands: int) -> Strategy:
    """Return correlated noise that draws ``bands`` normals per parameter: DP-FTRL.

    The inverse of the strategy matrix has the first ``bands`` coefficients of the inverse square
    root of the matrix of prefix sums::

        d[0] = 1,      d[j] = d[j - 1] (2 j - 3) / (2 j)      for j < bands

    Its accounting does not use the randomness of sampling, only how far apart two steps with the
    same example are. `fnet.privacy.PoissonSampling` with as many groups as there are batches in an
    epoch has the largest distance.

    Args:
      bands: Number of bands. One band is DP-SGD, bit for bit.

    Returns:
      The strategy.

    Raises:
      ValueError: If ``bands`` is below 1.

    Example:
      >>> from fnet.privacy import banded_inverse_square_root
      >>> banded_inverse_square_root(4).noising.tolist()
      [[1.0, -0.5, -0.125, -0.0625]]

    References: Kalinin et al. 2025, "Back to square roots: an optimal bound on the matrix
      factorization error for multi-epoch differentially private SGD", arXiv:2505.12128.
    """
    return _square_root("banded_inverse_square_root", bands, "optimal_max_error_noising_coefs")


@functools.cache
def _square_root(name: str, bands: int, coefs: str) -> Strategy:
    checks.numbers(name, ">= 1", bands=bands)
    if bands == 1:
        return DP_SGD
    make = getattr(jax_privacy("matrix_factorization").toeplitz, coefs)
    return Strategy.of(in_double_precision(lambda: make(bands)), inverse="noising" in coefs)


def add_correlated_noise(
    tree: Any,
    stddev: Array | float,
    key: Array,
    step: Array | int,
    strategy: Strategy,
    *,
    step_key: Callable[[Array, Array], Array] = jax.random.fold_in,
) -> Any:
    """Add the noise of a step that is correlated with the noise of earlier steps.

        tree + stddev * sum_j noising[step, j] z[step - j]

    The past z are drawn again, one after the other, and added to ``tree`` in place.

    Args:
      tree: Floating arrays of any shapes.
      stddev: Standard deviation [].
      key: Random key, the same at all steps and used for nothing else.
      step: Number of the step from 0, an integer []. From ``strategy.steps`` on, noise is NaN.
      strategy: The strategy, without buffers.
      step_key: ``(key, step) -> key`` of a step's z.

    Returns:
      The noisy tree, with the shapes and dtypes of ``tree``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import privacy
      >>> from fnet.noise.correlated import add_correlated_noise
      >>> strategy, key = privacy.banded_inverse_square_root(4), jax.random.key(0)
      >>> noise = [
      ...     add_correlated_noise(jnp.zeros(10_000), 1.0, key, i, strategy)
      ...     for i in range(2)
      ... ]
      >>> round(float(jnp.corrcoef(*noise)[0, 1]), 1)  # -0.5 / sqrt(1.25)
      -0.4
    """
    if strategy.noising is None:
        raise ValueError("add_correlated_noise: the strategy has buffers, which a step must update")
    if strategy.is_independent:
        return add_noise(tree, stddev, step_key(key, jnp.asarray(step)))
    table = jnp.asarray(strategy.noising, jnp.float32)
    row = 0 if strategy.steps is None else step
    coefs = jnp.take(table, row, axis=0, mode="fill", fill_value=jnp.nan)
    leaves, treedef = jax.tree.flatten(tree)

    def add_all(i: int, leaf: Array) -> Array:
        def add(j: Array, leaf: Array) -> Array:
            def draw(leaf: Array) -> Array:
                return add_noise_to(leaf, stddev * coefs[j], step_key(key, step - j), i)

            # Outside of a condition, XLA would hold the generator's counters, two arrays of the
            # size of the leaf, over the whole loop.
            noisy: Array = jax.lax.cond(
                (j <= step) & (coefs[j] != 0), draw, lambda leaf: leaf, leaf
            )
            return noisy

        noisy: Array = jax.lax.fori_loop(0, len(coefs), add, leaf)
        return noisy

    return jax.tree.unflatten(treedef, [add_all(i, leaf) for i, leaf in enumerate(leaves)])


def _inverse(coef: np.ndarray, size: int) -> np.ndarray:
    """Return the first column of the inverse of a lower-triangular Toeplitz matrix, [size]."""
    inverse = jax_privacy("matrix_factorization").toeplitz.inverse_coef
    return np.asarray(in_double_precision(lambda: inverse(jnp.asarray(coef), size)))


def _without_tail(by_age: np.ndarray) -> np.ndarray:
    """Drop the columns that are negligible in all rows: [rows, size] -> [rows, k]."""
    with np.errstate(over="ignore", invalid="ignore"):  # what grows has no tail to drop
        squares = np.square(by_age)
        tails = np.sqrt(np.cumsum(squares[:, ::-1], 1)[:, ::-1] / squares.sum(1, keepdims=True))
    is_small = np.append((tails <= _NEGLIGIBLE).all(0), True)
    return by_age[:, : int(np.argmax(is_small))]
