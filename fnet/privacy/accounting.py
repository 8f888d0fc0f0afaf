"""Privacy accounting: epsilon of a run, and the noise for a target epsilon.

All accounting is done by dp_accounting, an optional dependency.
"""

import functools
import importlib
from types import ModuleType
from typing import Any, Literal, get_args

from fnet import checks
from fnet.privacy.correlated import DP_SGD, Strategy
from fnet.privacy.sampling import PoissonSampling

MAX_NOISE_MULTIPLIER = 1024.0
"""Largest noise multiplier that calibration tries."""

GRID = 1e-4
"""Grid of privacy losses, dp_accounting's default."""

COARSE_GRID = 1e-3
"""Grid of privacy losses during calibration and of the progress of a run.

Epsilon on a coarser grid is an upper bound: the noise is sufficient, and up to 0.5 % more than
necessary."""

Accountant = Literal["pld", "rdp"]
"""Privacy loss distributions (tight), or Renyi differential privacy (looser)."""


def epsilon(
    noise_multiplier: float,
    delta: float,
    sampling: PoissonSampling,
    steps: int,
    *,
    strategy: Strategy = DP_SGD,
    accountant: Accountant = "pld",
    grid: float = GRID,
) -> float:
    """Compute epsilon of the first ``steps`` steps of a private run, an upper bound.

    For data sets D and D' that differ by one added or removed example, and any set S of outcomes::

        P[train(D) in S] <= exp(epsilon) P[train(D') in S] + delta

    The steps are a composition of Poisson-subsampled Gaussian mechanisms. Their number and the
    noise of each depend on the strategy:

    ==============================  ============================================================
    strategy                        mechanism
    ==============================  ============================================================
    DP-SGD                          ``steps`` times the noise multiplier, subsampled with
                                    ``sampling.probability`` (Abadi et al. 2016)
    banded, at most                 ``ceil(steps / sampling.bands)`` times the noise multiplier,
    ``sampling.bands`` bands        subsampled with ``sampling.probability`` (Choquette-Choo et
                                    al. 2023, Theorem 4)
    any other                       once ``noise_multiplier / strategy.sensitivity(steps,
                                    sampling.bands)``, not subsampled (Denisov et al. 2022)
    ==============================  ============================================================

    Args:
      noise_multiplier: Standard deviation of the noise on a step's sum of clipped gradients,
        divided by the sensitivity of this sum to one example.
      delta: Delta of the guarantee, within (0, 1 / examples). A larger one would allow publishing
        an example.
      sampling: How batches are drawn.
      steps: Number of steps, each taken whatever its examples are.
      strategy: Correlation of the noise over steps, as given to `fnet.autodiff.clipped`.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi differential privacy,
        looser).
      grid: Distance of the privacy losses of one step for "pld", which are rounded up to it.
        Epsilon is an upper bound for any grid. A coarse one takes less time and memory. SciPy
        caches the plans of the last 16 Fourier transforms. With the default grid, the plans of a
        run with many calls take up to 100 MB.

    Returns:
      Epsilon, 0 for no steps.

    Raises:
      ModuleNotFoundError: If dp_accounting is not installed.
      ValueError: If an argument is out of range.

    Example:
      >>> from fnet.privacy import PoissonSampling, epsilon
      >>> round(epsilon(1.1, 1e-5, PoissonSampling(60_000, 256), steps=3515), 2)
      1.13

    References:
      Abadi et al. 2016, "Deep learning with differential privacy", arXiv:1607.00133. Koskela et
      al. 2020, "Computing tight differential privacy guarantees using FFT", arXiv:1906.03049.
      Mironov et al. 2019, "Renyi differential privacy of the sampled Gaussian mechanism",
      arXiv:1908.10530. Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization",
      arXiv:2306.08153. Denisov et al. 2022, "Improved differential privacy for SGD via optimal
      private linear operators on adaptive streams", Theorem 2.1, arXiv:2202.08312.
    """
    _check("epsilon", delta, sampling, steps, accountant)
    checks.numbers("epsilon", "> 0", noise_multiplier=noise_multiplier)
    if steps == 0:
        return 0.0
    if accountant == "pld":
        noise, probability, count = _mechanism(noise_multiplier, sampling, steps, strategy)
        once = _privacy_loss(noise, probability, grid)
        return float(once.self_compose(count).get_epsilon_for_delta(delta))
    event = _event(noise_multiplier, sampling, steps, strategy)
    return float(_accountant(accountant).compose(event).get_epsilon(delta))


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling: PoissonSampling,
    steps: int,
    *,
    strategy: Strategy = DP_SGD,
    accountant: Accountant = "pld",
) -> float:
    """Find the smallest noise multiplier with which a run spends at most ``target_epsilon``.

    It inverts `fnet.privacy.epsilon`; see there for what epsilon means.

    Args:
      target_epsilon: Largest epsilon of the whole run.
      delta: As in `fnet.privacy.epsilon`.
      sampling: As in `fnet.privacy.epsilon`.
      steps: Length of the run.
      strategy: As in `fnet.privacy.epsilon`.
      accountant: As in `fnet.privacy.epsilon`.

    Returns:
      The noise multiplier, at most 0.5 % above the smallest.

    Raises:
      ModuleNotFoundError: If dp_accounting is not installed.
      ValueError: If an argument is out of range, or even a noise multiplier of 1024 spends more.

    Example:
      >>> from fnet.privacy import PoissonSampling, calibrate_noise_multiplier
      >>> sampling = PoissonSampling(60_000, 256)
      >>> round(calibrate_noise_multiplier(3.0, 1e-5, sampling, steps=3515), 2)
      0.73
    """
    _check("calibrate_noise_multiplier", delta, sampling, steps, accountant)
    checks.numbers("calibrate_noise_multiplier", "> 0", target_epsilon=target_epsilon)
    if steps == 0:
        raise ValueError("calibrate_noise_multiplier: a run of 0 steps needs no noise")

    def make_event(noise: float) -> Any:
        return _event(noise, sampling, steps, strategy)

    def make_accountant() -> Any:
        return _accountant(accountant, COARSE_GRID)

    @functools.cache
    def spent(noise: float) -> float:
        return float(make_accountant().compose(make_event(noise)).get_epsilon(delta))

    # Search from above: with little noise the distributions of privacy loss are very long.
    high = 16.0
    while spent(high) > target_epsilon:
        if high >= MAX_NOISE_MULTIPLIER:
            raise ValueError(
                f"calibrate_noise_multiplier: epsilon {target_epsilon:g} is impossible in {steps} "
                f"steps at delta {delta:g}: even a noise multiplier of {high:g} spends "
                f"{spent(high):.3g}"
            )
        high *= 2
    while spent(high / 2) <= target_epsilon:
        high /= 2
    dp = dp_accounting()
    bracket = dp.ExplicitBracketInterval(high / 2, high)
    return float(
        dp.calibrate_dp_mechanism(
            make_accountant, make_event, target_epsilon, delta, bracket, tol=1e-4 * high
        )
    )


def dp_accounting() -> ModuleType:
    """Import dp_accounting; ModuleNotFoundError tells how to install it."""
    try:
        module = importlib.import_module("dp_accounting")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "privacy accounting needs dp_accounting: pip install 'fnet-jax[privacy]'"
        ) from error
    return module


def _check(name: str, delta: float, sampling: PoissonSampling, steps: int, accountant: str) -> None:
    if not 0 < delta < 1 / sampling.examples:
        raise ValueError(
            f"{name}: delta must be > 0 and less than 1 / examples = {1 / sampling.examples:.2g}, "
            f"got {delta:g}; a larger delta would allow publishing an example"
        )
    if steps < 0 or steps != int(steps):
        raise ValueError(f"{name}: steps must be an integer >= 0, got {steps}")
    checks.choice(name, get_args(Accountant), accountant=accountant)


@functools.lru_cache(maxsize=1)
def _privacy_loss(noise: float, probability: float, grid: float) -> Any:
    """Return the privacy loss distribution of one step, which PLDAccountant would not cache."""
    dp_accounting()
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=probability, value_discretization_interval=grid
    )


def _accountant(kind: Accountant, grid: float | None = None) -> Any:
    dp_accounting()
    if kind == "rdp":
        from dp_accounting.rdp import RdpAccountant

        return RdpAccountant()
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(**({} if grid is None else {"value_discretization_interval": grid}))


def _mechanism(
    noise: float, sampling: PoissonSampling, steps: int, strategy: Strategy
) -> tuple[float, float, int]:
    """Return noise multiplier, sampling probability and number of equal Gaussian mechanisms."""
    if strategy.bands is not None and strategy.bands <= sampling.bands:
        return noise, sampling.probability, -(-steps // sampling.bands)
    return noise / strategy.sensitivity(steps, sampling.bands), 1.0, 1


def _event(noise: float, sampling: PoissonSampling, steps: int, strategy: Strategy) -> Any:
    dp = dp_accounting()
    noise, probability, count = _mechanism(noise, sampling, steps, strategy)
    once = dp.PoissonSampledDpEvent(probability, dp.GaussianDpEvent(noise))
    return dp.SelfComposedDpEvent(once, count)
