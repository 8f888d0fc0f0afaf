"""Privacy accounting of a run: the noise for a target epsilon, and the epsilon spent so far."""

import dataclasses
import functools
import logging
import math
from typing import Any, Literal

from fnet import privacy
from fnet.cpu.heap import release_free_memory
from fnet.privacy.accounting import (
    COARSE_GRID,
    GRID,
    Accountant,
    dp_accounting,
    epsilon,
)
from train.config import Clipped, Config
from train.config.training import MAX_EPSILON
from train.errors import UserError


@dataclasses.dataclass(frozen=True)
class Privacy:
    """Privacy guarantee of a run: after each step, (epsilon, delta)-differential privacy.

    Neighboring datasets differ by adding or removing one training example, or one user with all
    of their training examples.

    Attributes:
      noise_multiplier: Standard deviation of the noise on a step's sum of clipped gradients,
        divided by the sensitivity of that sum to one example.
      sampling: How batches are drawn.
      delta: Delta of the guarantee.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi differential privacy,
        looser).
      unit: what is added or removed.
    """

    noise_multiplier: float
    sampling: privacy.PoissonSampling
    delta: float
    accountant: Accountant = "pld"
    unit: Literal["example", "user"] = "example"

    @property
    def strategy(self) -> privacy.Strategy:
        """Correlation of the noise over steps."""
        return privacy.banded_square_root(self.sampling.bands)

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
            "noise_bands": self.sampling.bands,
            "delta": self.delta,
            "accountant": self.accountant,
            "unit": self.unit,
        }

    def describe(self, steps: int) -> str:
        """Describe the guarantee after ``steps`` steps in one line."""
        bands = self.sampling.bands
        return (
            f"epsilon {self.epsilon(steps):.4g} at delta {self.delta:g} after {steps} steps"
            f"{' for each user' if self.unit == 'user' else ''} "
            f"({self.accountant}; noise multiplier {self.noise_multiplier:.4g}, "
            f"sampling probability {self.sampling.probability:.4g}"
            f"{f' in one of {bands} groups' if bands > 1 else ''})"
        )


def sampling_from_config(config: Config, examples: int) -> privacy.PoissonSampling:
    """Return the sampling of a private run.

    Args:
      config: the run's config, whose section grad is `Clipped`.
      examples: number of training examples, or of users.

    Raises:
      UserError: if batches are larger than the training set.
    """
    assert isinstance(config.grad, Clipped)
    size = config.data.batch_size
    if size > examples:
        raise UserError(
            f"data.batch_size: {size} is more than the {examples} {_units(config)}; "
            "private training samples each at most once per step; give a smaller one"
        )
    bands = config.grad.noise_bands
    if bands * size > examples:
        raise UserError(
            f"grad.noise_bands: {bands} groups of {examples} {_units(config)} are smaller than "
            f"the {size} of data.batch_size; give at most {examples // size}"
        )
    # A multiple of 8 for vector units, of the devices, and of the microbatches.
    multiple = math.lcm(8, config.mesh.data * config.mesh.fsdp) * config.grad.microbatches
    return privacy.PoissonSampling(examples, size, bands, multiple)


def privacy_from_config(config: Config, *, examples: int, steps: int) -> Privacy | None:
    """Return the guarantee of a config, or None if it adds no noise.

    Args:
      config: the run's config.
      examples: number of training examples, or of users.
      steps: length of the run, over which a target epsilon is spent.

    Raises:
      UserError: if the guarantee is incomplete, meaningless or impossible, or dp_accounting is
        not installed.
    """
    grad = config.grad
    if not isinstance(grad, Clipped):
        return None
    if not grad.is_private:
        if grad.delta is not None:
            raise UserError("grad.delta: needs grad.epsilon or grad.noise_multiplier, too")
        if grad.noise_bands > 1:
            raise UserError(
                f"grad.noise_bands: {grad.noise_bands}, but there is no noise; give grad.epsilon "
                "or grad.noise_multiplier, too"
            )
        if grad.release_only:
            raise UserError(
                "grad.release_only: nothing is covered by a guarantee without noise; give "
                "grad.epsilon or grad.noise_multiplier, too"
            )
        if grad.insecure_noise_seed is not None:
            raise UserError(
                f"grad.insecure_noise_seed: {grad.insecure_noise_seed}, but there is no noise; "
                "give grad.epsilon or grad.noise_multiplier, too"
            )
        return None
    if grad.epsilon is not None and grad.noise_multiplier is not None:
        raise UserError(
            f"grad: epsilon {grad.epsilon} and noise_multiplier {grad.noise_multiplier} "
            "each set the noise; give one of them"
        )
    if grad.delta is None:
        given = "epsilon" if grad.epsilon is not None else "noise_multiplier"
        raise UserError(
            f"grad.delta: grad.{given} needs it, too; give less than 1 / {examples} "
            f"{_units(config)}, for example 1e-5"
        )
    if grad.delta >= 1 / examples:
        raise UserError(
            f"grad.delta: {grad.delta:g} would allow publishing one of {examples} "
            f"{_units(config)}; expected less than 1 / {examples} = {1 / examples:.2g}"
        )
    sampling = sampling_from_config(config, examples)
    check_dp_accounting()
    if grad.noise_multiplier is not None:
        noise = grad.noise_multiplier
        epsilon = Privacy(noise, sampling, grad.delta, "rdp").epsilon(steps)
        if epsilon > MAX_EPSILON:
            raise UserError(
                f"grad.noise_multiplier: {noise:g} gives no privacy: {steps} steps spend epsilon "
                f"{epsilon:.3g}; expected at most {MAX_EPSILON:g}"
            )
    else:
        assert grad.epsilon is not None
        try:
            noise = privacy.calibrate_noise_multiplier(
                grad.epsilon,
                grad.delta,
                sampling,
                steps,
                strategy=privacy.banded_square_root(sampling.bands),
                accountant=grad.accountant,
            )
        except ValueError as error:
            raise UserError(f"grad.epsilon: {error}") from error
    unit: Literal["example", "user"] = "user" if config.examples_per_user else "example"
    return Privacy(noise, sampling, grad.delta, grad.accountant, unit)


def _units(config: Config) -> str:
    return "users" if config.examples_per_user else "training examples"


def check_dp_accounting() -> None:
    """Import dp_accounting, without its harmless warnings.

    Raises:
      UserError: if it is not installed.
    """
    try:
        dp_accounting()
    except ModuleNotFoundError as error:
        raise UserError(f"grad: {error}") from error
    # It warns about each Renyi order that it skips.
    logger = logging.getLogger("absl")
    logger.setLevel(max(logger.level, logging.ERROR))  # orbax uses the same logger


@functools.cache
def _epsilon(run: Privacy, steps: int, grid: float = GRID) -> float:
    return epsilon(
        run.noise_multiplier,
        run.delta,
        run.sampling,
        steps,
        strategy=run.strategy,
        accountant=run.accountant,
        grid=grid,
    )
