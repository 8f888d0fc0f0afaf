"""Correlated noise of DP-FTRL and banded matrix factorization, regenerated instead of stored.

The noise of step i is a linear combination of the standard normal z of past steps. Each z follows
from the key of its step, so a step draws it again. No buffer outlives the step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet import checks
from fnet.privacy.noise import add_noise, add_noise_to

_NEGLIGIBLE = 2.0**-24
"""L2 norm of the dropped coefficients relative to the others: less than float32 rounds away."""

_MAX_COEFS = 2**14
"""Most coefficients of correlated noise: z of that many steps would be drawn at each step."""


@functools.lru_cache(maxsize=4)
def _inverse(coef: tuple[float, ...], size: int) -> np.ndarray:
    """Return the first column of the inverse of a lower-triangular Toeplitz matrix, [size]."""
    inverse = np.zeros(size)
    inverse[0] = 1 / coef[0]
    tail = np.array(coef[1:])
    for i in range(1, size):
        n = min(i, len(tail))
        inverse[i] = -(tail[:n] @ inverse[i - n : i][::-1]) / coef[0]
    return inverse


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Strategy matrix C of correlated noise: a lower-triangular Toeplitz matrix, [steps, steps].

    For the sums of clipped gradients x [steps, parameters] and standard normal z, the steps
    release x + stddev C^-1 z. The noise of step i is::

        stddev * sum_j noising_coef[j] z[i - j],        z[i] = 0 for i < 0

    This is post-processing of C x + stddev z, a Gaussian mechanism. The sensitivity of C x
    depends on how far apart two steps with the same example are. The default is DP-SGD.

    Attributes:
      noising_coef: First column of C^-1; the rest is 0.
      bands: Number of nonzero bands of C, which then has columns of norm 1 at most. None for a C
        that is not banded.

    Raises:
      ValueError: If ``noising_coef`` does not give such a C.

    Example:
      >>> from fnet.privacy.correlated import Strategy
      >>> strategy = Strategy.banded_inverse([1.0, -0.5])
      >>> strategy.sensitivity(steps=3, separation=3) ** 2  # 1 + 1/4 + 1/16
      1.3125

    References:
      Denisov et al. 2022, "Improved differential privacy for SGD via optimal private linear
      operators on adaptive streams", Theorem 2.1, arXiv:2202.08312.
    """

    noising_coef: tuple[float, ...] = (1.0,)
    bands: int | None = 1

    def __post_init__(self) -> None:
        """Reject coefficients that do not give such a C."""
        coef = self.noising_coef
        if not coef or not coef[0] > 0 or not all(map(math.isfinite, coef)):
            raise ValueError(
                "Strategy: noising_coef must be finite and begin with a positive number, got "
                f"{coef}"
            )
        if self.bands is not None:
            strategy = _inverse(coef, 2 * len(coef) + self.bands)
            rest = np.linalg.norm(strategy[self.bands :])
            if np.linalg.norm(strategy) > 1 + 1e-6 or rest > 1e-6:
                raise ValueError(
                    f"Strategy: these noising_coef do not give a C with {self.bands} bands of norm "
                    "1; use Strategy.banded or Strategy.banded_inverse"
                )

    @classmethod
    def banded(cls, coef: Sequence[float] | np.ndarray) -> "Strategy":
        """Return the strategy whose C has these bands, scaled to norm 1.

        Args:
          coef: First column of C, positive and non-increasing, such as the result of
            ``jax_privacy.matrix_factorization.toeplitz.optimize_banded_toeplitz``.

        Returns:
          The strategy. Its C^-1 is not banded, so a step draws about 10 z per band. The tail
          that is smaller than the rounding of float32 is dropped.

        Raises:
          ValueError: If the coefficients do not decrease, or those of C^-1 do not fall off.
        """
        strategy = np.asarray(coef, float)
        _check_decreasing("Strategy.banded", strategy)
        strategy = strategy / np.linalg.norm(strategy)
        if len(strategy) == 1:
            return DP_SGD
        size = 64 * len(strategy)
        while size <= _MAX_COEFS:
            noising = _inverse(tuple(strategy.tolist()), size)
            tail = np.sqrt(np.cumsum(noising[::-1] ** 2)[::-1]) / np.linalg.norm(noising)
            count = int(np.argmax(tail <= _NEGLIGIBLE))
            if 0 < count <= size // 2:  # the half behind it shows that the tail stays small
                return cls(tuple(noising[:count].tolist()), len(strategy))
            size *= 2
        raise ValueError(
            f"Strategy.banded: C^-1 does not fall off within {_MAX_COEFS} steps; give coefficients "
            f"that decrease faster, got {list(coef)}"
        )

    @classmethod
    def banded_inverse(cls, noising_coef: Sequence[float] | np.ndarray) -> "Strategy":
        """Return the strategy whose C^-1 has these bands; a step draws one z per band.

        Args:
          noising_coef: First column of C^-1, of which the first is positive.

        Returns:
          The strategy. Its C is not banded.

        Raises:
          ValueError: If the first coefficient is not positive, or any is not finite.
        """
        coef = tuple(float(c) for c in noising_coef)
        return DP_SGD if coef == (1.0,) else cls(coef, None)

    def sensitivity(self, steps: int, separation: int) -> float:
        """Compute the L2 sensitivity of C x to one example, in units of the clip.

        For a C with non-negative and non-increasing coefficients, the worst case are
        participations that are exactly ``separation`` apart::

            | sum_j C[:, j * separation] |                     (Kalinin and Lampert 2024, Theorem 2)

        Args:
          steps: Length of the run.
          separation: Least number of steps between two steps with the same example. 1 allows all.

        Returns:
          The sensitivity.

        Raises:
          ValueError: If C has a negative or an increasing coefficient.
        """
        strategy = _inverse(self.noising_coef, steps)
        _check_decreasing("Strategy.sensitivity", strategy)
        contribution = np.zeros(steps)
        for start in range(0, steps, separation):
            contribution[start:] += strategy[: steps - start]
        return float(np.linalg.norm(contribution))


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
      >>> (
      ...     strategy.bands,
      ...     len(strategy.noising_coef),
      ...     round(strategy.noising_coef[1], 2),
      ... )
      (4, 44, -0.61)

    References:
      Kalinin and Lampert 2024, "Banded square root matrix factorization for differentially private
      model training", arXiv:2405.13763. Choquette-Choo et al. 2023, "(Amplified) banded matrix
      factorization", arXiv:2306.08153.
    """
    return Strategy.banded(_square_root("banded_square_root", bands, 0.5))


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
      >>> banded_inverse_square_root(4).noising_coef
      (1.0, -0.5, -0.125, -0.0625)

    References:
      Kalinin et al. 2025, "Back to square roots: an optimal bound on the matrix factorization
      error for multi-epoch differentially private SGD", arXiv:2505.12128.
    """
    return Strategy.banded_inverse(_square_root("banded_inverse_square_root", bands, 1.5))


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

        tree + stddev * sum_j noising_coef[j] z[step - j]

    The past z are drawn again, one after the other, and added to ``tree`` in place.

    Args:
      tree: Floating arrays of any shapes.
      stddev: Standard deviation [].
      key: Random key, the same at all steps and used for nothing else.
      step: Number of the step from 0, an integer [].
      strategy: The strategy.
      step_key: ``(key, step) -> key`` of a step's z.

    Returns:
      The noisy tree, with the shapes and dtypes of ``tree``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import privacy
      >>> from fnet.privacy.correlated import add_correlated_noise
      >>> strategy, key = privacy.banded_inverse_square_root(4), jax.random.key(0)
      >>> noise = [
      ...     add_correlated_noise(jnp.zeros(10_000), 1.0, key, i, strategy)
      ...     for i in range(2)
      ... ]
      >>> round(float(jnp.corrcoef(*noise)[0, 1]), 1)  # -0.5 / sqrt(1.25)
      -0.4
    """
    coef = strategy.noising_coef
    if len(coef) == 1:
        return add_noise(tree, stddev * coef[0], step_key(key, jnp.asarray(step)))
    coefs = jnp.asarray(coef, jnp.float32)
    leaves, treedef = jax.tree.flatten(tree)

    def add_all(i: int, leaf: Array) -> Array:
        def add(j: Array, leaf: Array) -> Array:
            def draw(leaf: Array) -> Array:
                return add_noise_to(leaf, stddev * coefs[j], step_key(key, step - j), i)

            # Outside of a condition, XLA would hold the generator's counters, two arrays of the
            # size of the leaf, over the whole loop.
            noisy: Array = jax.lax.cond(j <= step, draw, lambda leaf: leaf, leaf)
            return noisy

        noisy: Array = jax.lax.fori_loop(0, len(coef), add, leaf)
        return noisy

    return jax.tree.unflatten(treedef, [add_all(i, leaf) for i, leaf in enumerate(leaves)])


def _square_root(name: str, bands: int, exponent: float) -> np.ndarray:
    """Return coefficients of ``(1 - x) ** (exponent - 1)``, [bands]."""
    checks.numbers(name, ">= 1", bands=bands)
    j = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((j - exponent) / j)])


def _check_decreasing(name: str, coef: np.ndarray) -> None:
    """Reject coefficients that are negative or increase by more than rounding errors."""
    if coef.ndim != 1 or not coef.size or not np.isfinite(coef).all() or not coef[0] > 0:
        raise ValueError(f"{name}: expected a list of finite numbers, the first > 0, got {coef}")
    tolerance = 1e-6 * coef[0]
    if coef.min() < -tolerance or (np.diff(coef) > tolerance).any():
        raise ValueError(
            f"{name}: the coefficients of C must be >= 0 and not increase, got {coef[:8]}..."
        )
