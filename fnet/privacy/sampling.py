"""Batches of private training, drawn by the strategies of jax-privacy and padded.

Privacy amplification by subsampling is proven for these, and not for shuffled epochs in batches of
a fixed size.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fnet import checks
from fnet.noise.imports import jax_privacy

OVERFLOW_PROBABILITY = 1e-15
"""Largest probability that a step draws more examples than its arrays have rows."""

_ENDLESS = 2**62


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Batches of a strategy of jax-privacy, with padding: arrays have one size, batches do not.

    The ``selection`` says which steps an example joins:

      - ``CyclicPoissonSampling``: each ``cycle_length``-th step of its group, independently with
        ``sampling_prob``; `PoissonSampling` makes one. Truncated, it keeps ``truncated_batch_size``
        of more examples, and needs ``PartitionType.EQUAL_SPLIT``.
      - ``BallsInBinsSampling``: each ``cycle_length``-th step, from a random one on.
      - ``BMinSepSampling``: each step with ``sampling_prob``, if it was in none of the
        ``min_sep - 1`` steps before.

    For privacy per user, count users as examples. Padding has weight 0.

    Guarantees:
      - A batch depends on ``seed`` and the step alone, so a resumed run draws the same batches. It
        draws those before once more: about as long as a step of a small network for each.
      - Without truncation, more than `rows` examples are drawn with probability at most 1e-15. A
        uniform choice of `rows` of them then remains.
      - Batches are as secret as the examples. Do not publish ``seed``.

    The generator is NumPy's PCG64, which is not cryptographically secure.

    Attributes:
      examples: Number of examples, or of users.
      selection: The strategy. Its ``iterations`` is not used.
      multiple: `rows` is rounded up to a multiple of this number.

    Raises:
      ValueError: A field is out of range, or batches are larger than the examples.
      TypeError: ``selection`` is none of these.

    Example:
      >>> from fnet.privacy import Sampling
      >>> from jax_privacy.batch_selection import BallsInBinsSampling
      >>> sampling = Sampling(100, BallsInBinsSampling(iterations=8, cycle_length=5))
      >>> indices, weights = sampling.batch(seed=0, step=0)
      >>> indices.shape, sampling.batch_size, sampling.separation
      ((56,), 20.0, 5)

    References: Poisson: Abadi et al. 2016, arXiv:1607.00133. Cyclic: Choquette-Choo et al. 2023,
      Algorithm 2, arXiv:2306.08153. Truncated: Ganesh 2025, arXiv:2508.15089. Balls in bins:
      Choquette-Choo et al. 2024, arXiv:2410.06266. b-min-sep: arXiv:2602.09338.
    """

    examples: int
    selection: Any
    multiple: int = 1

    def __post_init__(self) -> None:
        checks.numbers("Sampling", ">= 1", examples=self.examples, multiple=self.multiple)
        of, chosen = jax_privacy("batch_selection"), self.selection
        known = of.CyclicPoissonSampling, of.BallsInBinsSampling, of.BMinSepSampling
        if not isinstance(chosen, known):
            names = ", ".join(kind.__name__ for kind in known)
            raise TypeError(
                f"Sampling: selection must be one of {names}, whose privacy is accounted for, got "
                f"{type(chosen).__name__}"
            )
        checks.numbers("Sampling", ">= 1", separation=self.separation)
        if self.truncated is not None and isinstance(chosen, of.BMinSepSampling):
            raise ValueError("Sampling: no accountant covers truncated b-min-sep batches")
        if self.truncated is not None and self.adds_or_removes:
            raise ValueError(
                "Sampling: truncation needs partition_type=PartitionType.EQUAL_SPLIT, for data "
                "sets of a public size"
            )
        if isinstance(chosen, of.BMinSepSampling) and chosen.min_sep == 1:
            raise ValueError("Sampling: min_sep must be above 1; PoissonSampling is the same as 1")

    @property
    def separation(self) -> int:
        """Least number of steps between two with the same example."""
        chosen = self.selection
        return int(getattr(chosen, "cycle_length", None) or getattr(chosen, "min_sep", 0) or 0)

    @property
    def amplified(self) -> bool:
        """Whether an accountant counts that the batches are random."""
        return isinstance(self.selection, jax_privacy("batch_selection").CyclicPoissonSampling)

    @property
    def truncated(self) -> int | None:
        """Largest number of examples of a batch; None for any."""
        return getattr(self.selection, "truncated_batch_size", None)

    @property
    def adds_or_removes(self) -> bool:
        """Whether data sets may differ by an example that is missing.

        Otherwise an example is replaced by one without gradient, as the number of examples is
        public.
        """
        split = jax_privacy("batch_selection").PartitionType.EQUAL_SPLIT
        return getattr(self.selection, "partition_type", None) is not split

    @property
    def probability(self) -> float:
        """Probability with which an example joins a step that it may join."""
        return float(getattr(self.selection, "sampling_prob", 1.0))

    @property
    def batch_size(self) -> float:
        """Mean number of examples per batch, without truncation."""
        return self.examples * self._share

    @property
    def _share(self) -> float:
        if hasattr(self.selection, "min_sep"):
            return 1 / (self.separation - 1 + 1 / self.probability) if self.probability else 0.0
        return self.probability / self.separation

    @functools.cached_property
    def rows(self) -> int:
        """Number of rows of a batch's arrays."""
        from scipy.stats import binom  # slow to import

        if self.truncated is not None:
            rows = self.truncated
        elif self.adds_or_removes and self._share < 1:
            # The size of a batch is binomial, also with groups, because they are random.
            rows = int(binom.isf(OVERFLOW_PROBABILITY, self.examples, self._share))
        else:
            group = self.examples // self.separation
            rows = int(binom.isf(OVERFLOW_PROBABILITY, group, self.probability))
        return max(rows, 1) + -max(rows, 1) % self.multiple

    def draws(self, seed: int) -> Callable[[int], np.ndarray]:
        """Return ``step -> indices`` of the drawn examples, fastest for steps in order.

        Args:
          seed: Seed of all batches, an integer >= 0 of any size.

        Returns:
          Indices in ascending order, int64, at most `rows`.
        """
        return _Draws(self, seed)

    def indices(self, seed: int, step: int) -> np.ndarray:
        """Draw the batch of a step, and all before it; see `draws`."""
        return self.draws(seed)(step)

    def batch(self, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the batch of a step, padded with index 0 and weight 0.

        Args:
          seed: As in `draws`.
          step: Number of the step, from 0.

        Returns:
          ``(indices, weights)``, int64 [rows] and float32 [rows].
        """
        return self._padded(self.indices(seed, step))

    def _padded(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = np.zeros(self.rows, np.float32)
        weights[: len(drawn)] = 1
        return np.pad(drawn, (0, self.rows - len(drawn))), weights

    def batches(
        self, arrays: Mapping[str, Any], seed: int, steps: int, *, start: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Iterate over the batches of steps ``start`` to ``steps - 1``.

        Args:
          arrays: Arrays [examples, ...] by name.
          seed: As in `draws`.
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
                f"Sampling: expected arrays by name, as {{'x': x, 'y': y}}, got "
                f"{type(arrays).__name__}"
            )
        if "weight" in arrays:
            raise ValueError("Sampling: weight is the array that marks padding; rename yours")
        for name, array in arrays.items():
            shape = getattr(array, "shape", None)
            if shape is None or shape[:1] != (self.examples,):
                got = type(array).__name__ if shape is None else f"shape {shape}"
                raise ValueError(
                    f"Sampling: expected arrays of {self.examples} rows, got {got} for {name}"
                )
        draw = self.draws(seed)
        for step in range(start, steps):
            indices, weights = self._padded(draw(step))
            yield {name: array[indices] for name, array in arrays.items()} | {"weight": weights}


def PoissonSampling(  # noqa: N802  a kind of Sampling
    examples: int, batch_size: float, bands: int = 1, multiple: int = 1
) -> Sampling:
    """Return Poisson sampling: each example joins each batch independently.

    It joins with ``batch_size / examples``. With ``bands`` above 1, sampling is cyclic: each
    example is assigned to one of ``bands`` groups, independently and uniformly, and joins only the
    steps of its group::

        P[example e joins step i] = bands * batch_size / examples  if i % bands == group(e), else 0

    Two batches with the same example are then at least ``bands`` steps apart, which correlated
    noise needs. The mean batch size stays ``batch_size``. Whether an example joins does not depend
    on the presence of others, so neighboring data sets differ by one added or removed example.

    Args:
      examples: Number of examples, or of users.
      batch_size: Mean number of examples per batch.
      bands: Number of groups; 1 is Poisson sampling, as DP-SGD needs it.
      multiple: As in `Sampling`.

    Returns:
      A `Sampling` of ``jax_privacy.batch_selection.CyclicPoissonSampling``.

    Raises:
      ValueError: An argument is out of range, or a group has fewer than ``batch_size`` examples.

    Example:
      >>> from fnet.privacy import PoissonSampling
      >>> sampling = PoissonSampling(examples=60_000, batch_size=256)
      >>> indices, weights = sampling.batch(seed=0, step=0)
      >>> indices.shape, weights.shape, int(weights.sum())
      ((393,), (393,), 250)

    References: Abadi et al. 2016, arXiv:1607.00133; for cyclic sampling as `Sampling`.
    """
    checks.numbers("PoissonSampling", ">= 1", examples=examples, bands=bands, multiple=multiple)
    checks.numbers("PoissonSampling", "> 0", batch_size=batch_size)
    if bands * batch_size > examples:
        in_bands = f" in each of {bands} bands" * (bands > 1)
        raise ValueError(
            f"PoissonSampling: batch_size {batch_size}{in_bands} needs at least "
            f"{bands * batch_size:g} examples, got {examples}; choose a smaller batch_size"
        )
    of = jax_privacy("batch_selection")
    selection = of.CyclicPoissonSampling(
        min(1.0, bands * batch_size / examples),
        iterations=_ENDLESS,
        cycle_length=bands,
        partition_type=of.PartitionType.INDEPENDENT,
    )
    return Sampling(examples, selection, multiple)


class _Draws:
    """Batches in order; a step before the last one begins again."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling, self.seed = sampling, seed
        self.next = _ENDLESS
        self.lock = threading.Lock()

    def __call__(self, step: int) -> np.ndarray:
        with self.lock:
            if step < self.next:
                # Augmentation and canaries use other streams of the seed.
                sequence = np.random.SeedSequence(self.seed, spawn_key=(0, 0))
                self.rng, self.next = np.random.default_rng(sequence), 0
                selection = dataclasses.replace(self.sampling.selection, iterations=_ENDLESS)
                self.batches = selection.batch_iterator(self.sampling.examples, self.rng)
            while self.next <= step:
                drawn = next(self.batches)
                self.next += 1
            if len(drawn) > self.sampling.rows:
                drawn = self.rng.choice(drawn, self.sampling.rows, replace=False)
            return np.sort(drawn).astype(np.int64)
