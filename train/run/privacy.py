"""Differentially private training: noise for a target epsilon, and epsilon as it is spent.

All arithmetic of privacy is dp_accounting's, an optional dependency.
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

_MOST_NOISE = 1024.0
"""Noise multiplier beyond which none is looked for."""

"""Above, there is nothing to account for, and distributions of privacy loss fill the memory."""

_COARSE = 1e-3
"""Grid of privacy losses while noise is looked for, ten times dp_accounting's own.

Epsilon on a coarser grid is an upper bound: what is found is enough, and up to 0.5 %
more than was needed."""


@dataclasses.dataclass(frozen=True)
class Privacy:
    """What noise and sampling promise: after each step, (epsilon, delta)-differential privacy.

    Of one example's presence: neighbouring sets of training examples differ by one
    that is added or removed.

    Attributes:
      noise_multiplier: standard deviation of the noise on a step's sum of clipped
        gradients, over the most that one example changes that sum.
      sampling_probability: with which each example joins each step's batch.
      delta: chance that is left out of the promise.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi
        differential privacy, looser).
    """

    noise_multiplier: float
    sampling_probability: float
    delta: float
    accountant: Literal["pld", "rdp"] = "pld"

    def epsilon(self, steps: int) -> float:
        """Epsilon of the first ``steps`` steps together: an upper bound, rising with each.

        Takes 0.02 to 0.3 s, and nothing where it was asked before.
        """
        spent = _epsilon(self, steps) if steps else 0.0
        release_free_memory()  # distributions of privacy loss are large, and many
        return spent

    def as_dict(self, steps: int) -> dict[str, Any]:
        """All of it for JSON, with epsilon after ``steps`` steps."""
        return {"epsilon": self.epsilon(steps)} | dataclasses.asdict(self)

    def in_words(self, steps: int) -> str:
        """What ``steps`` steps spend, in a line."""
        return (
            f"epsilon {self.epsilon(steps):.4g} at delta {self.delta:g} after {steps} steps "
            f"({self.accountant}; noise multiplier {self.noise_multiplier:.4g}, "
            f"sampling probability {self.sampling_probability:.4g})"
        )


def privacy_of(grad: Clipped, *, batch_size: int, examples: int, steps: int) -> Privacy | None:
    """The promise of a config; None where it adds no noise.

    Args:
      grad: the config's section.
      batch_size: examples a step, on average.
      examples: training examples.
      steps: of the whole run, which a target epsilon is spread over.

    Raises:
      UserError: for a promise that is half named, worthless or out of reach, and
        where dp_accounting is missing.
    """
    if not grad.is_private:
        if grad.delta is not None:
            raise UserError("grad.delta: needs grad.epsilon or grad.noise_multiplier beside it")
        return None
    if grad.epsilon is not None and grad.noise_multiplier is not None:
        raise UserError(
            f"grad: epsilon {grad.epsilon} and noise_multiplier {grad.noise_multiplier} "
            "each set the noise; give one of them"
        )
    if grad.delta is None:
        given = "epsilon" if grad.epsilon is not None else "noise_multiplier"
        raise UserError(
            f"grad.delta: missing beside grad.{given}; "
            f"give less than 1 / {examples} training examples, for example 1e-5"
        )
    if grad.delta >= 1 / examples:
        raise UserError(
            f"grad.delta: {grad.delta:g} would permit publishing one of {examples} training "
            f"examples whole; expected less than 1 / {examples} = {1 / examples:.2g}"
        )
    if batch_size > examples:
        raise UserError(
            f"data.batch_size: {batch_size} is more than the {examples} training examples, "
            "of which private training draws each at most once a step"
        )
    dp_accounting()
    probability = batch_size / examples
    if grad.noise_multiplier is not None:
        noise = grad.noise_multiplier
        spent = Privacy(noise, probability, grad.delta, "rdp").epsilon(steps)
        if spent > MAX_EPSILON:
            raise UserError(
                f"grad.noise_multiplier: {noise:g} keeps nothing private: {steps} steps spend "
                f"epsilon {spent:.3g}, and above {MAX_EPSILON:g} it is not reckoned"
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
    """The least noise multiplier with which ``steps`` steps spend at most ``epsilon``.

    Raises:
      UserError: if there is none.
    """
    dp = dp_accounting()

    def event(noise: float) -> Any:
        return _event(noise, sampling_probability, steps)

    def fresh() -> Any:
        return _accountant(accountant, _COARSE)

    @functools.cache
    def spent(noise: float) -> float:
        return fresh().compose(event(noise)).get_epsilon(delta)

    # From above: with little noise the distributions of privacy loss are very long.
    high = 16.0
    while spent(high) > epsilon:
        if high >= _MOST_NOISE:
            raise UserError(
                f"grad.epsilon: {epsilon:g} is out of reach in {steps} steps at delta {delta:g}: "
                f"even a noise multiplier of {high:g} spends {spent(high):.3g}"
            )
        high *= 2
    while spent(high / 2) <= epsilon:
        high /= 2
    bracket = dp.ExplicitBracketInterval(high / 2, high)
    return dp.calibrate_dp_mechanism(fresh, event, epsilon, delta, bracket, tol=1e-4 * high)


def dp_accounting() -> ModuleType:
    """The module.

    Raises:
      UserError: if it is not installed.
    """
    try:
        import dp_accounting
    except ModuleNotFoundError as error:
        raise UserError(
            "grad: private training needs dp_accounting: pip install 'fnet-jax[privacy]'"
        ) from error
    # It tells of each Renyi order that it leaves out, which makes no epsilon wrong.
    logger = logging.getLogger("absl")
    logger.setLevel(max(logger.level, logging.ERROR))  # it is orbax's as well
    return dp_accounting


@functools.cache
def _epsilon(privacy: Privacy, steps: int) -> float:
    p = privacy
    if p.accountant == "pld":
        spent = _one_step(p.noise_multiplier, p.sampling_probability).self_compose(steps)
        return float(spent.get_epsilon_for_delta(p.delta))
    accountant = _accountant(p.accountant)
    accountant.compose(_event(p.noise_multiplier, p.sampling_probability, steps))
    return float(accountant.get_epsilon(p.delta))


@functools.lru_cache(maxsize=1)
def _one_step(noise: float, probability: float) -> Any:
    """One step's privacy loss distribution, of which PLDAccountant keeps no copy."""
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
