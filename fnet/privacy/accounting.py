"""Privacy accounting: epsilon of a run, and the noise for a target epsilon.

Mechanisms are jax-privacy's, and accountants dp_accounting's: optional dependencies.
"""

import functools
import logging
from typing import Any, Literal, get_args

from fnet import checks
from fnet.noise.correlated import DP_SGD, Strategy
from fnet.noise.imports import dp_accounting, jax_privacy
from fnet.noise.schedules import Schedule, check_schedule
from fnet.privacy.sampling import Sampling

MAX_NOISE_MULTIPLIER = 1024.0
"""Largest noise multiplier that calibration tries."""

GRID = 1e-4
"""Grid of privacy losses, dp_accounting's default."""

COARSE_GRID = 1e-3
"""Grid of privacy losses of the progress of a run, whose epsilon is an upper bound on any grid."""

Accountant = Literal["pld", "rdp"]
"""Privacy loss distributions (tight), or Renyi differential privacy (looser)."""

_LEAST_DELTA = 1e-13
"""Fourier transforms of float64 round the probabilities of a distribution to about 1e-16."""

_LEAST_NOISE = 0.2
"""With less noise a distribution of privacy losses takes gigabytes, and minutes."""


def epsilon(
    noise_multiplier: float,
    delta: float,
    sampling: Sampling,
    steps: int,
    *,
    strategy: Strategy = DP_SGD,
    noise_schedule: Schedule = (),
    accountant: Accountant = "pld",
    grid: float = GRID,
) -> float:
    """Compute epsilon of the first ``steps`` steps of a private run, an upper bound.

    For data sets D and D' that differ by one added or removed example, and any set S of outcomes::

        P[train(D) in S] <= exp(epsilon) P[train(D') in S] + delta

    With groups of equal size (``PartitionType.EQUAL_SPLIT``, for truncation), the example is
    instead replaced by one without gradient.

    For Poisson and cyclic sampling of some of the examples, with at most as many bands as the
    sampling's `separation`, 1 for DP-SGD, the mechanism is ``ceil(steps / separation)`` times the
    noise, subsampled: ``amplified_bandmf_event``, or ``truncated_amplified_bandmf_event`` for
    truncated batches. Any other strategy or sampling is one Gaussian mechanism, not subsampled,
    with the noise ``noise_multiplier / sensitivity``, whose epsilon has a formula:
    ``GaussianDpEvent``. It does not cover truncated batches.

    Random balls in bins and b-min-sep batches amplify privacy, too. jax-privacy can only simulate
    by how much, which bounds nothing, so it is not counted.

    Args:
      noise_multiplier: Standard deviation of the noise on a step's sum of clipped gradients,
        divided by the sensitivity of this sum to one example.
      delta: Delta of the guarantee, within (0, 1 / examples). A larger one would allow publishing
        an example.
      sampling: How batches are drawn.
      steps: Number of steps, each taken whatever its examples are.
      strategy: Correlation of the noise over steps, as given to `fnet.autodiff.clipped`.
      noise_schedule: Factors of the noise, as given to `fnet.autodiff.clipped`. It needs Poisson
        sampling without groups, and the strategy DP-SGD.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi differential privacy,
        looser). "pld" takes the smaller bound of both, and that of "rdp" alone where distributions
        are not computed: for ``delta < 1e-13`` or ``noise_multiplier < 0.2``.
      grid: Distance of the privacy losses of one step for "pld", which are rounded up to it.
        Epsilon is an upper bound for any grid. A coarse one takes less time and memory. SciPy
        caches the plans of the last 16 Fourier transforms. With the default grid, the plans of a
        run with many calls take up to 100 MB.

    Returns:
      Epsilon, 0 for no steps.

    Raises:
      ModuleNotFoundError: If jax-privacy is not installed.
      TypeError: If ``sampling`` is no `Sampling`.
      ValueError: If an argument is out of range, or no accountant covers the combination.

    Example:
      >>> from fnet.privacy import PoissonSampling, epsilon
      >>> round(epsilon(1.1, 1e-5, PoissonSampling(60_000, 256), steps=3515), 2)
      1.13

    References: Abadi et al. 2016, "Deep learning with differential privacy", arXiv:1607.00133.
      Koskela et al. 2020, "Computing tight differential privacy guarantees using FFT",
      arXiv:1906.03049. Mironov et al. 2019, "Renyi differential privacy of the sampled Gaussian
      mechanism", arXiv:1908.10530. Choquette-Choo et al. 2023, "(Amplified) banded matrix
      factorization", arXiv:2306.08153. Denisov et al. 2022, "Improved differential privacy for SGD
      via optimal private linear operators on adaptive streams", Theorem 2.1, arXiv:2202.08312.
    """
    _check("epsilon", delta, sampling, steps, accountant, noise_schedule)
    checks.numbers("epsilon", "> 0", noise_multiplier=noise_multiplier)
    if steps == 0:
        return 0.0
    event = _event(noise_multiplier, sampling, steps, strategy, noise_schedule)
    if accountant == "pld" and isinstance(event, dp_accounting().GaussianDpEvent):
        return float(dp_accounting().get_epsilon_gaussian(event.noise_multiplier, delta))
    kinds = {accountant} if sampling.truncated is not None else {accountant, "rdp"}
    smallest = noise_multiplier * min([1.0, *(factor for _, factor in noise_schedule)])
    if accountant == "pld" and (delta < _LEAST_DELTA or smallest < _LEAST_NOISE):
        kinds -= {"pld"}
    if not kinds:
        raise ValueError(
            f"epsilon: no accountant covers truncated batches with delta < {_LEAST_DELTA:g} or a "
            f"noise multiplier < {_LEAST_NOISE:g}, got {delta:g} and {smallest:g}"
        )
    accountants = (_accountant(kind, sampling, grid) for kind in sorted(kinds))
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))  # It warns of each Renyi order that it skips.
    try:
        return min(float(each.compose(event).get_epsilon(delta)) for each in accountants)
    finally:
        logger.setLevel(level)


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling: Sampling,
    steps: int,
    *,
    strategy: Strategy = DP_SGD,
    noise_schedule: Schedule = (),
    accountant: Accountant = "pld",
) -> float:
    """Find the smallest noise multiplier with which a run spends at most ``target_epsilon``.

    It inverts `fnet.privacy.epsilon`; see there for what epsilon means.

    Args:
      target_epsilon: Largest epsilon of the whole run.
      delta, sampling, strategy, accountant: As in `fnet.privacy.epsilon`.
      steps: Length of the run.
      noise_schedule: As in `fnet.privacy.epsilon`. The result is the noise at factor 1.

    Returns:
      The noise multiplier, at most 0.5 % above the smallest that `fnet.privacy.epsilon` allows. A
      result below 0.2 is by "rdp" alone, and some 10 % above what a tighter accountant would allow.

    Raises:
      ModuleNotFoundError: If jax-privacy is not installed.
      TypeError: If ``sampling`` is no `Sampling`.
      ValueError: As `fnet.privacy.epsilon`, or even a noise multiplier of 1024 spends more.

    Example:
      >>> from fnet.privacy import PoissonSampling, calibrate_noise_multiplier
      >>> sampling = PoissonSampling(60_000, 256)
      >>> round(calibrate_noise_multiplier(3.0, 1e-5, sampling, steps=3515), 2)
      0.73
    """
    _check("calibrate_noise_multiplier", delta, sampling, steps, accountant, noise_schedule)
    checks.numbers("calibrate_noise_multiplier", "> 0 and finite", target_epsilon=target_epsilon)
    if steps == 0:
        raise ValueError("calibrate_noise_multiplier: a run of 0 steps needs no noise")

    # A coarse grid takes less time. It adds at most 9 * steps * grid**2 to epsilon, as measured.
    grid = min(max((5e-4 * target_epsilon / steps) ** 0.5, GRID), COARSE_GRID)

    @functools.cache
    def spent(noise: float) -> float:
        return epsilon(
            noise,
            delta,
            sampling,
            steps,
            strategy=strategy,
            noise_schedule=noise_schedule,
            accountant=accountant,
            grid=grid,
        )

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
    from scipy.optimize import brentq  # slow to import

    low, tolerance = high / 2, 1e-4 * high
    found = float(brentq(lambda noise: spent(noise) - target_epsilon, low, high, xtol=tolerance))
    while spent(found) > target_epsilon:
        found += tolerance
    return found


def _check(
    name: str, delta: float, sampling: Sampling, steps: int, accountant: str, schedule: Schedule
) -> None:
    if not isinstance(sampling, Sampling):
        raise TypeError(
            f"{name}: expected a Sampling, such as PoissonSampling(examples, batch_size), got "
            f"{type(sampling).__name__}"
        )
    if not 0 < delta < 1 / sampling.examples:
        raise ValueError(
            f"{name}: delta must be > 0 and less than 1 / examples = {1 / sampling.examples:.2g}, "
            f"got {delta:g}; a larger delta would allow publishing an example"
        )
    if steps < 0 or steps != int(steps):
        raise ValueError(f"{name}: steps must be an integer >= 0, got {steps}")
    checks.choice(name, get_args(Accountant), accountant=accountant)
    check_schedule(name, noise_schedule=schedule)
    if sampling.truncated is not None and accountant == "rdp":
        raise ValueError(f'{name}: truncated batches need accountant="pld", got "rdp"')


def _accountant(kind: Accountant, sampling: Sampling, grid: float) -> Any:
    dp = dp_accounting()
    relation = dp.NeighboringRelation[
        "ADD_OR_REMOVE_ONE" if sampling.adds_or_removes else "REPLACE_SPECIAL"
    ]
    if kind == "rdp":
        return dp.rdp.RdpAccountant(neighboring_relation=relation)
    return dp.pld.PLDAccountant(relation, value_discretization_interval=grid)


def _event(
    noise: float, sampling: Sampling, steps: int, strategy: Strategy, schedule: Schedule
) -> Any:
    of = jax_privacy("experimental.accounting")
    separation, probability = sampling.separation, sampling.probability
    is_banded = strategy.bands is not None and strategy.bands <= separation
    is_whole = probability == 1 and sampling.truncated is None and not schedule
    if sampling.amplified and is_banded and not is_whole:
        if schedule:
            if separation > 1 or not strategy.is_independent:
                raise ValueError(
                    "epsilon: no accountant covers a schedule of the noise with groups or "
                    "correlated noise; leave one out"
                )
            ends = [min(step, steps) for step, _ in schedule[1:]] + [steps]
            parts = [
                of.dpsgd_event(noise * factor, end - start, sampling_prob=probability)
                for (_, factor), start, end in zip(schedule, [0, *ends], ends, strict=False)
                if end > start
            ]
            return dp_accounting().ComposedDpEvent(parts)
        how = {"num_bands": separation, "sampling_prob": probability}
        if sampling.truncated is None:
            return of.amplified_bandmf_event(noise, steps, **how)
        return of.truncated_amplified_bandmf_event(
            noise,
            steps,
            largest_group_size=sampling.examples // separation,
            truncated_batch_size=sampling.truncated,
            **how,
        )
    if sampling.truncated is not None or schedule:
        what = "truncated batches" if sampling.truncated is not None else "a schedule of the noise"
        raise ValueError(
            f"epsilon: no accountant covers {what} with this strategy and sampling; use "
            "Poisson sampling and at most as many bands as it has groups"
        )
    return dp_accounting().GaussianDpEvent(noise / strategy.sensitivity(steps, separation))
