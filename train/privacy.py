"""Privacy guarantee of a run, and the epsilon spent so far."""

import dataclasses
import functools
from typing import Any, Literal

from fnet import privacy
from fnet.cpu.heap import release_free_memory
from fnet.noise.correlated import DP_SGD
from fnet.noise.imports import in_double_precision, jax_privacy
from fnet.noise.schedules import Schedule
from fnet.privacy.accounting import COARSE_GRID, GRID, Accountant, epsilon
from train.errors import UserError, at_most, warn


@dataclasses.dataclass(frozen=True)
class Privacy:
    """Privacy guarantee of a run: after each step, (epsilon, delta)-differential privacy.

    Neighboring datasets differ by adding or removing one training example, or one user with all
    of their training examples. With truncated batches, it is replaced by one without gradient.

    Attributes:
      noise_multiplier: Standard deviation of the noise on a step's sum of clipped gradients,
        divided by the sensitivity of that sum to one example.
      sampling: How batches are drawn.
      delta: Delta of the guarantee.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi differential privacy,
        looser).
      unit: what is added or removed.
      strategy: Correlation of the noise over steps.
      noise_schedule: Factors of the noise from given steps on.
    """

    noise_multiplier: float
    sampling: privacy.Sampling
    delta: float
    accountant: Accountant = "pld"
    unit: Literal["example", "user"] = "example"
    strategy: privacy.Strategy = DP_SGD
    noise_schedule: Schedule = ()

    def epsilon(self, steps: int) -> float:
        """Return epsilon of the first ``steps`` steps, an upper bound.

        The first call takes 0.02 to 0.3 s, and later ones with the same ``steps`` no time.
        """
        epsilon = _epsilon(self, steps)
        release_free_memory()  # distributions of privacy loss are large
        return epsilon

    def spent(self, step: int, steps: int) -> float:
        """Return an upper bound on epsilon of the first ``step`` steps of ``steps``.

        It is at most 0.002 or 0.5 % above `epsilon`, or more if epsilon of the run is below 0.01.
        It takes a tenth of the time and memory.
        """
        bound = _epsilon(self, step, COARSE_GRID)
        release_free_memory()
        return min(bound, self.epsilon(steps))

    def as_dict(self, steps: int) -> dict[str, Any]:
        """Return all fields for JSON, with epsilon after ``steps`` steps."""
        return {
            "epsilon": self.epsilon(steps),
            "noise_multiplier": self.noise_multiplier,
            "sampling_probability": self.sampling.probability,
            "noise_bands": self.strategy.bands,
            "separation": self.sampling.separation,
            "neighbors": "missing" if self.sampling.adds_or_removes else "without gradient",
            "delta": self.delta,
            "accountant": self.accountant,
            "unit": self.unit,
        }

    def describe(self, steps: int) -> str:
        """Describe the guarantee after ``steps`` steps in one line."""
        groups = self.sampling.separation
        return (
            f"epsilon {at_most(self.epsilon(steps))} at delta {self.delta:g} after {steps} steps"
            f"{' for each user' if self.unit == 'user' else ''} "
            f"({self.accountant}; noise multiplier {self.noise_multiplier:.4g}, "
            f"sampling probability {self.sampling.probability:.4g}"
            f"{f', at least {groups} steps apart' if groups > 1 else ''})"
        )


def check_accounting() -> None:
    """Import jax-privacy and dp_accounting."""
    try:
        jax_privacy("accounting")
    except ModuleNotFoundError as error:
        raise UserError(f"grad: {error}") from error


@functools.cache
def make_strategy(name: str, bands: int, separation: int, steps: int) -> privacy.Strategy:
    """Return the strategy of correlated noise of this name, optimized by jax-privacy."""
    if name == "square_root":
        return privacy.banded_square_root(bands)
    if name == "inverse_square_root":
        return privacy.banded_inverse_square_root(bands)
    of = jax_privacy("matrix_factorization")
    warn(f"optimizing {name} noise for {steps} steps")
    bands = min(bands, steps)
    optimize = {
        "optimized": lambda: of.toeplitz.optimize_banded_toeplitz(steps, bands),
        "column_normalized": lambda: of.banded.optimize(steps, bands=bands),
        "dense": lambda: of.dense.optimize(steps, bands=bands, equal_norm=True),
        "buffered": lambda: of.buffered_toeplitz.optimize(
            n=steps, min_sep=separation, max_participations=None
        ),
    }
    return privacy.Strategy.of(in_double_precision(optimize[name]))


@functools.cache
def _epsilon(run: Privacy, steps: int, grid: float = GRID) -> float:
    return epsilon(
        run.noise_multiplier,
        run.delta,
        run.sampling,
        steps,
        strategy=run.strategy,
        noise_schedule=run.noise_schedule,
        accountant=run.accountant,
        grid=grid,
    )
