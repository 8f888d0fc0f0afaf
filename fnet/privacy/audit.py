"""Audit of privacy with one training run: a lower bound on epsilon from canaries."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fnet import checks

_FEWEST_GUESSES = 8


class Audit(NamedTuple):
    """Result of `audit_epsilon`.

    Attributes:
      epsilon: Lower bound on epsilon, >= 0.
      delta: Delta of the bound.
      confidence: Probability with which the bound is below the true epsilon, at least.
      canaries: Number of canaries.
      guesses: Number of guesses of which the bound was computed.
      correct: Number of correct ones.
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int


def audit_epsilon(
    scores: ArrayLike, included: ArrayLike, delta: float, *, confidence: float = 0.95
) -> Audit:
    """Compute a lower bound on epsilon from the canaries of one training run.

    Draw for each of m canaries independently with probability 1/2 whether it is in the training
    set, and train once. A score says how much the model seems to know a canary, such as minus its
    loss. The highest scores are guessed to be included, as many of the lowest to be excluded. If
    training is (epsilon, delta)-differentially private with respect to each canary, many correct
    guesses are unlikely.

    The bound is the smallest epsilon that the guesses do not refute. It is computed for 8, 16,
    32, ... and m guesses. Each has a confidence high enough for all (Bonferroni), and the largest
    bound is returned.

    Args:
      scores: Scores [m]. Equal scores are ordered as given, so the order must not depend on
        ``included``.
      included: Whether each canary was in the training set [m].
      delta: Delta of the guarantee to audit, below 1 / (2 m).
      confidence: Probability with which the bound holds, within (0, 1).

    Returns:
      The bound and the guesses it comes from.

    Raises:
      ValueError: If an argument is out of range, shapes differ or a score is NaN.

    Example:
      >>> import numpy as np
      >>> from fnet.privacy.audit import audit_epsilon
      >>> rng = np.random.default_rng(0)
      >>> included = rng.random(1000) < 0.5
      >>> # One noisy observation of each canary.
      >>> scores = included + rng.normal(size=1000)
      >>> audit = audit_epsilon(scores, included, delta=1e-5)
      >>> round(audit.epsilon, 2), audit.guesses, audit.correct
      (1.66, 128, 118)

    References: Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run",
      Algorithm 1 and Theorem 5.2, arXiv:2305.08846.
    """
    scores, included = np.asarray(scores, np.float64), np.asarray(included, bool)
    if scores.ndim != 1 or scores.shape != included.shape or not len(scores):
        raise ValueError(
            "audit_epsilon: expected scores [m] and included [m], got shapes "
            f"{scores.shape} and {included.shape}"
        )
    if np.isnan(scores).any():
        raise ValueError("audit_epsilon: a score is NaN; replace it by the lowest score")
    checks.numbers("audit_epsilon", "in (0, 1)", confidence=confidence)
    m = len(scores)
    order = np.argsort(scores, kind="stable")
    counts = _guess_counts(m)
    significance = (1 - confidence) / len(counts)
    audits = []
    for guesses in counts:
        lowest, highest = order[: guesses // 2], order[m - (guesses - guesses // 2) :]
        correct = int((~included[lowest]).sum() + included[highest].sum())
        bound = _largest_refuted(m, guesses, correct, delta, significance)
        audits.append(Audit(bound, delta, confidence, m, guesses, correct))
    return max(audits, key=lambda audit: (audit.epsilon, audit.guesses))


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Bound the probability of so many correct guesses under (epsilon, delta)-privacy.

    With W ~ Binomial(guesses, q) and q = exp(epsilon) / (1 + exp(epsilon))::

        P[W >= correct] + delta canaries max_i (2 / i) P[correct > W >= correct - i]

    (Steinke, Nasr and Jagielski 2023, Theorem 5.2). It rises with epsilon, and is at most 1.

    >>> round(p_value(100, 100, 75, epsilon=0.5, delta=0.0), 4)
    0.0048
    """
    from scipy.stats import binom  # slow to import

    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            "p_value: expected 0 <= correct <= guesses <= canaries, got "
            f"{correct}, {guesses} and {canaries}"
        )
    checks.numbers("p_value", ">= 0", epsilon=epsilon)
    if not 0 <= delta * 2 * canaries <= 1:
        raise ValueError(
            f"p_value: delta must be from 0 to 1 / (2 * {canaries} canaries), got {delta}; use "
            "fewer canaries"
        )
    q = 1 / (1 + math.exp(-epsilon))
    probability = float(binom.sf(correct - 1, guesses, q))
    if delta and correct:
        below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, q).cumsum()
        probability += 2 * canaries * delta * float((below / np.arange(1, correct + 1)).max())
    return min(probability, 1.0)


def _guess_counts(canaries: int) -> list[int]:
    """Numbers of guesses to try, which do not depend on the scores."""
    doublings = range(_FEWEST_GUESSES.bit_length() - 1, canaries.bit_length())
    return sorted({canaries} | {2**i for i in doublings if 2**i < canaries})


def _largest_refuted(
    canaries: int, guesses: int, correct: int, delta: float, significance: float
) -> float:
    """Return the supremum of epsilons whose p-value is below the significance, or 0."""

    def is_refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon, delta) < significance

    low, high = 0.0, 1.0
    if not is_refuted(low):
        return 0.0
    while is_refuted(high):
        low, high = high, 2 * high
    for _ in range(40):  # p rises with epsilon
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low
