"""Privacy accounting of DP-SGD: the noise for a target epsilon, and the epsilon spent so far.

All privacy accounting is done by dp_accounting, an optional dependency.
"""

import dataclasses
import functools
import logging
from types import ModuleType
from typing import Any, Literal

from train.config import Clipped
from train.config.training import MAX_EPSILON
from train.errors import UserError
from train.run.process_memory import release_free_memory

_MAX_NOISE = 1024.0
"""Largest noise multiplier that calibration tries."""

_CALIBRATION_GRID = 1e-3
"""Grid of privacy losses during calibration, ten times dp_accounting's default.

Epsilon on a coarser grid is an upper bound: the noise is sufficient, and up to 0.5 % more than
necessary."""


@dataclasses.dataclass(frozen=True)
class Privacy:
    """Privacy guarantee of a run: after each step, (epsilon, delta)-differential privacy.

    Neighboring datasets differ by adding or removing one training example.

    Attributes:
      noise_multiplier: Standard deviation of the noise on a step's sum of clipped gradients,
        divided by the sensitivity of that sum to one example.
      sampling_probability: Probability with which each example joins a batch.
      delta: Delta of the guarantee.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi differential privacy,
        looser).
    """

    noise_multiplier: float
    sampling_probability: float
    delta: float
    accountant: Literal["pld", "rdp"] = "pld"

    def epsilon(self, steps: int) -> float:
        """Return epsilon of the first ``steps`` steps, an upper bound.

        The first call takes 0.02 to 0.3 s, and later ones with the same ``steps`` no time.
        """
        epsilon = _epsilon(self, steps) if steps else 0.0
        release_free_memory()  # distributions of privacy loss are large
        return epsilon

    def as_dict(self, steps: int) -> dict[str, Any]:
        """Return all fields for JSON, with epsilon after ``steps`` steps."""
        return {"epsilon": self.epsilon(steps)} | dataclasses.asdict(self)

    def describe(self, steps: int) -> str:
        """Describe the guarantee after ``steps`` steps in one line."""
        return (
            f"epsilon {self.epsilon(steps):.4g} at delta {self.delta:g} after {steps} steps "
            f"({self.accountant}; noise multiplier {self.noise_multiplier:.4g}, "
            f"sampling probability {self.sampling_probability:.4g})"
        )


def privacy_from_config(
    grad: Clipped, *, batch_size: int, examples: int, steps: int
) -> Privacy | None:
    """Return the guarantee of a config, or None if it adds no noise.

    Args:
      grad: the config's section.
      batch_size: expected number of examples per step.
      examples: number of training examples.
      steps: length of the run, over which a target epsilon is spent.

    Raises:
      UserError: if the guarantee is incomplete, meaningless or impossible, or dp_accounting is
        not installed.
    """
    if not grad.is_private:
        if grad.delta is not None:
            raise UserError("grad.delta: needs grad.epsilon or grad.noise_multiplier, too")
        return None
    if grad.epsilon is not None and grad.noise_multiplier is not None:
        raise UserError(
            f"grad: epsilon {grad.epsilon} and noise_multiplier {grad.noise_multiplier} "
            "each set the noise; give one of them"
        )
    if grad.delta is None:
        given = "epsilon" if grad.epsilon is not None else "noise_multiplier"
        raise UserError(
            f"grad.delta: grad.{given} needs it, too; give less than 1 / {examples} training "
            "examples, for example 1e-5"
        )
    if grad.delta >= 1 / examples:
        raise UserError(
            f"grad.delta: {grad.delta:g} would allow publishing one of {examples} training "
            f"examples; expected less than 1 / {examples} = {1 / examples:.2g}"
        )
    if batch_size > examples:
        raise UserError(
            f"data.batch_size: {batch_size} is more than the {examples} training examples; "
            "private training samples each at most once per step"
        )
    dp_accounting()
    probability = batch_size / examples
    if grad.noise_multiplier is not None:
        noise = grad.noise_multiplier
        epsilon = Privacy(noise, probability, grad.delta, "rdp").epsilon(steps)
        if epsilon > MAX_EPSILON:
            raise UserError(
                f"grad.noise_multiplier: {noise:g} gives no privacy: {steps} steps spend epsilon "
                f"{epsilon:.3g}; expected at most {MAX_EPSILON:g}"
            )
    else:
        assert grad.epsilon is not None
        noise = noise_for(
            grad.epsilon,
            grad.delta,
            sampling_probability=probability,
            steps=steps,
            accountant=grad.accountant,
        )
    return Privacy(noise, probability, grad.delta, grad.accountant)


def noise_for(
    epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    steps: int,
    accountant: Literal["pld", "rdp"] = "pld",
) -> float:
    """Return the smallest noise multiplier with which ``steps`` steps spend at most ``epsilon``.

    Raises:
      UserError: if there is none.
    """
    dp = dp_accounting()

    def event(noise: float) -> Any:
        return _event(noise, sampling_probability, steps)

    def make_accountant() -> Any:
        return _accountant(accountant, _CALIBRATION_GRID)

    @functools.cache
    def spent(noise: float) -> float:
        return make_accountant().compose(event(noise)).get_epsilon(delta)

    # Search from above: with little noise the distributions of privacy loss are very long.
    high = 16.0
    while spent(high) > epsilon:
        if high >= _MAX_NOISE:
            raise UserError(
                f"grad.epsilon: {epsilon:g} is impossible in {steps} steps at delta {delta:g}: "
                f"even a noise multiplier of {high:g} spends {spent(high):.3g}"
            )
        high *= 2
    while spent(high / 2) <= epsilon:
        high /= 2
    bracket = dp.ExplicitBracketInterval(high / 2, high)
    return dp.calibrate_dp_mechanism(
        make_accountant, event, epsilon, delta, bracket, tol=1e-4 * high
    )


def dp_accounting() -> ModuleType:
    """Import dp_accounting.

    Raises:
      UserError: if it is not installed.
    """
    try:
        import dp_accounting
    except ModuleNotFoundError as error:
        raise UserError(
            "grad: private training needs dp_accounting: pip install 'fnet-jax[privacy]'"
        ) from error
    # It warns about each Renyi order that it skips, which is harmless.
    logger = logging.getLogger("absl")
    logger.setLevel(max(logger.level, logging.ERROR))  # orbax uses the same logger
    return dp_accounting


@functools.cache
def _epsilon(privacy: Privacy, steps: int) -> float:
    p = privacy
    if p.accountant == "pld":
        composed = _one_step(p.noise_multiplier, p.sampling_probability).self_compose(steps)
        return float(composed.get_epsilon_for_delta(p.delta))
    accountant = _accountant(p.accountant)
    accountant.compose(_event(p.noise_multiplier, p.sampling_probability, steps))
    return float(accountant.get_epsilon(p.delta))


@functools.lru_cache(maxsize=1)
def _one_step(noise: float, probability: float) -> Any:
    """Return the privacy loss distribution of one step, which PLDAccountant would not cache."""
    dp_accounting()
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=probability)


def _accountant(kind: str, grid: float | None = None) -> Any:
    dp_accounting()
    if kind == "rdp":
        from dp_accounting.rdp import RdpAccountant

        return RdpAccountant()
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(**({} if grid is None else {"value_discretization_interval": grid}))


def _event(noise: float, probability: float, steps: int) -> Any:
    dp = dp_accounting()
    step = dp.PoissonSampledDpEvent(probability, dp.GaussianDpEvent(noise))
    return dp.SelfComposedDpEvent(step, steps)
