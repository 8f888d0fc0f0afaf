"""Poisson sampling: each example joins each batch independently, with the same probability.

Privacy amplification by subsampling is proven for this sampling, and not for shuffled epochs in
batches of a fixed size.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fnet import checks

OVERFLOW_PROBABILITY = 1e-15
"""Largest probability that a step draws more examples than its arrays have rows."""


@dataclasses.dataclass(frozen=True)
class PoissonSampling:
    """Poisson sampling with padding: who joins the batch of a step, from a seed and the step.

    Each example joins each batch independently with ``batch_size / examples``. Batches differ in
    size but arrays do not, so the rest of the rows is padding of weight 0.

    With ``bands`` above 1, sampling is cyclic: each example is assigned to one of ``bands`` groups,
    independently and uniformly, and joins only the steps of its group::

        P[example e joins step i] = bands * batch_size / examples  if i % bands == group(e), else 0

    Two batches with the same example are then at least ``bands`` steps apart, which correlated
    noise needs. The mean batch size stays ``batch_size``.

    Guarantees:
      - A batch depends on ``seed`` and the step alone, so a resumed run draws the same batches.
      - Whether an example joins does not depend on the presence of other examples. Sampling
        therefore fits data sets that differ by one added or removed example.
      - More than `rows` examples are drawn with probability at most 1e-15. A uniform choice of
        `rows` of them then remains.
      - Batches are as secret as the examples. Do not publish ``seed``.

    The generator is NumPy's Philox, which is not cryptographically secure.

    Attributes:
      examples: Number of examples, or of users.
      batch_size: Mean number of examples per batch.
      bands: Number of groups; 1 is Poisson sampling, as DP-SGD needs it.
      multiple: `rows` is rounded up to a multiple of this number.

    Raises:
      ValueError: A field is out of range, or a group has fewer than ``batch_size`` examples.

    Example:
      >>> from fnet.privacy import PoissonSampling
      >>> sampling = PoissonSampling(examples=60_000, batch_size=256)
      >>> indices, weights = sampling.batch(seed=0, step=0)
      >>> indices.shape, weights.shape, int(weights.sum())
      ((393,), (393,), 246)

    References:
      Abadi et al. 2016, "Deep learning with differential privacy", arXiv:1607.00133. Cyclic
      sampling: Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization", Algorithm 2,
      arXiv:2306.08153.
    """

    examples: int
    batch_size: float
    bands: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        """Reject values out of range."""
        sizes = {"examples": self.examples, "bands": self.bands, "multiple": self.multiple}
        checks.numbers("PoissonSampling", ">= 1", **sizes)
        checks.numbers("PoissonSampling", "> 0", batch_size=self.batch_size)
        needed = self.bands * self.batch_size
        if needed > self.examples:
            bands = f" in each of {self.bands} bands" * (self.bands > 1)
            raise ValueError(
                f"PoissonSampling: batch_size {self.batch_size}{bands} needs at least {needed:g} "
                f"examples, got {self.examples}; choose a smaller batch_size"
            )

    @property
    def probability(self) -> float:
        """Probability with which an example joins a batch of its group."""
        return min(1.0, self.bands * self.batch_size / self.examples)

    @functools.cached_property
    def rows(self) -> int:
        """Number of rows of a batch's arrays."""
        from scipy.stats import binom  # slow to import

        # The size of a batch is binomial, also with groups, because they are random.
        if self.batch_size < self.examples:
            probability = self.batch_size / self.examples
            rows = int(binom.isf(OVERFLOW_PROBABILITY, self.examples, probability))
        else:
            rows = self.examples
        return rows + -rows % self.multiple

    def indices(self, seed: int, step: int) -> np.ndarray:
        """Draw the batch of a step.

        Args:
          seed: Seed of all batches, an integer >= 0 of any size.
          step: Number of the step, from 0.

        Returns:
          Indices of the drawn examples in ascending order, int64, at most `rows`.
        """
        generator = _generator(seed, step, 0)
        joins = generator.random(self.examples) < self.probability
        if self.bands > 1:
            joins &= _groups(seed, self.examples, self.bands) == step % self.bands
        drawn = np.flatnonzero(joins)
        if len(drawn) > self.rows:
            drawn = np.sort(generator.choice(drawn, self.rows, replace=False))
        return drawn

    def batch(self, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the batch of a step, padded with index 0 and weight 0.

        Args:
          seed: As in `indices`.
          step: As in `indices`.

        Returns:
          ``(indices, weights)``, int64 [rows] and float32 [rows].
        """
        drawn = self.indices(seed, step)
        weights = np.zeros(self.rows, np.float32)
        weights[: len(drawn)] = 1
        return np.pad(drawn, (0, self.rows - len(drawn))), weights

    def batches(
        self, arrays: Mapping[str, Any], seed: int, steps: int, *, start: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Iterate over the batches of steps ``start`` to ``steps - 1``.

        Args:
          arrays: Arrays [examples, ...] by name.
          seed: As in `indices`.
          steps: Length of the run.
          start: First step, of a resumed run.

        Yields:
          The arrays' rows [rows, ...] by name, and ``weight``, float32 [rows].

        Raises:
          TypeError: The arrays have no names.
          ValueError: An array has another number of examples, or is named ``weight``.
        """
        if not isinstance(arrays, Mapping):
            raise TypeError(
                f"PoissonSampling: expected arrays by name, as {{'x': x, 'y': y}}, got "
                f"{type(arrays).__name__}"
            )
        for name, array in arrays.items():
            if name == "weight" or len(array) != self.examples:
                raise ValueError(
                    f"PoissonSampling: arrays need {self.examples} rows and any name but weight, "
                    f"got {name} with {len(array)}"
                )
        for step in range(start, steps):
            indices, weights = self.batch(seed, step)
            yield {name: array[indices] for name, array in arrays.items()} | {"weight": weights}


def _generator(seed: int, step: int, stream: int) -> np.random.Generator:
    """Return the generator of one of a step's streams: 0 draws examples, 2 groups at step 0.

    Stream 1 is free for the augmentation of a batch.
    """
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence(seed, spawn_key=(step, stream)))
    )


@functools.lru_cache(maxsize=1)
def _groups(seed: int, examples: int, bands: int) -> np.ndarray:
    """Return the group of each example, [examples]."""
    return _generator(seed, 0, 2).integers(bands, size=examples)
