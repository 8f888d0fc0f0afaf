"""Lower bounds on epsilon from canaries."""

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import binom

from fnet.privacy.audit import audit_epsilon, p_value
from train.data.canaries import draw_included
from train.run.results import audit


def randomized_response(rng, m, epsilon, delta=0.0):
    """Scores 1 or -1 that tell inclusion with the accuracy of an epsilon-private mechanism."""
    included = rng.random(m) < 0.5
    truthful = rng.random(m) < 1 / (1 + np.exp(-epsilon))
    truthful |= rng.random(m) < delta  # what delta allows in addition
    return np.where(included == truthful, 1.0, -1.0), included


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 0.0), (3.0, 0.0), (1.0, 1e-3)])
def test_the_bound_holds_with_the_claimed_confidence(epsilon, delta):
    rng, trials, confidence = np.random.default_rng(0), 400, 0.8
    above = 0
    for _ in range(trials):
        audit = audit_epsilon(
            *randomized_response(rng, 256, epsilon, delta), delta, confidence=confidence
        )
        above += audit.epsilon > epsilon
    # At most a fifth of the bounds is too high; 4 standard deviations for chance.
    assert above <= trials * (1 - confidence) + 4 * np.sqrt(trials * confidence * (1 - confidence))


def test_the_test_of_one_number_of_guesses_is_exact_without_delta():
    """For randomized response, the p-value is the probability itself, not only a bound."""
    rng, m, epsilon = np.random.default_rng(1), 60, 1.0
    counts = [
        int((included == (scores > 0)).sum())
        for scores, included in (randomized_response(rng, m, epsilon) for _ in range(4000))
    ]
    for correct in (44, 48, 52):
        share = np.mean(np.array(counts) >= correct)
        expected = p_value(m, m, correct, epsilon, 0.0)
        assert share == pytest.approx(expected, abs=4 * np.sqrt(expected / 4000))


def test_the_bound_approaches_epsilon_with_more_canaries():
    rng = np.random.default_rng(0)
    means = [
        np.mean([audit_epsilon(*randomized_response(rng, m, 2.0), 0.0).epsilon for _ in range(10)])
        for m in (30, 300, 3000, 30000)
    ]
    assert all(a < b for a, b in itertools.pairwise(means))
    assert 1.85 < means[-1] < 2


def test_audits_the_gaussian_mechanism_from_below():
    """Scores of each canary: its inclusion plus noise, as in a step of DP-SGD with its direction."""
    rng, m, noise, delta = np.random.default_rng(0), 20_000, 0.7, 1e-5
    epsilon = PLDAccountant().compose(GaussianDpEvent(noise)).get_epsilon(delta)
    for _ in range(5):
        included = rng.random(m) < 0.5
        audit = audit_epsilon(included + noise * rng.normal(size=m), included, delta)
        assert 0.3 * epsilon < audit.epsilon < epsilon


def test_perfect_guesses_give_the_bound_of_a_binomial():
    for m, tries in ((8, 1), (11, 2), (24, 3)):
        included = np.arange(m) % 2 == 0
        audit = audit_epsilon(np.where(included, 5.0, -5.0), included, 0.0, confidence=0.9)
        # Of 8, 16, ... and m guesses, m are best: q^m = 0.1 / tries, epsilon = log(q / (1 - q)).
        q = (0.1 / tries) ** (1 / m)
        assert audit.epsilon == pytest.approx(np.log(q / (1 - q)), rel=1e-6)
        assert (audit.guesses, audit.correct, audit.canaries) == (m, m, m)


def test_few_confident_guesses_are_better_than_many():
    rng = np.random.default_rng(0)
    included = rng.random(1024) < 0.5
    included[:32] = np.arange(32) % 2 == 0
    scores = rng.normal(size=1024)
    scores[:32] += np.where(included[:32], 10, -10)  # of the others nothing is known
    audit = audit_epsilon(scores, included, 1e-6)
    assert audit.guesses == audit.correct == 32
    assert audit.epsilon > 1.5


def test_scores_without_information_give_no_bound():
    rng = np.random.default_rng(3)
    assert audit_epsilon(rng.normal(size=512), rng.random(512) < 0.5, 1e-5).epsilon == 0
    assert audit_epsilon(np.zeros(512), rng.random(512) < 0.5, 1e-5).epsilon == 0


def by_hand(m, r, v, epsilon, delta):
    """The bound of Theorem 5.2, term by term."""
    q = np.exp(epsilon) / (1 + np.exp(epsilon))
    pmf = [binom.pmf(k, r, q) for k in range(r + 1)]
    alpha = max(2 / i * sum(pmf[max(v - i, 0) : v]) for i in range(1, m + 1))
    return min(sum(pmf[v:]) + alpha * m * delta, 1)


def test_the_p_value_is_that_of_the_theorem():
    for case in (
        (40, 20, 15, 0.5, 1e-3), (40, 40, 20, 0.0, 1e-2), (9, 9, 9, 2.0, 0.05), (5, 4, 0, 1.0, 0.1)
    ):  # fmt: skip
        assert p_value(*case) == pytest.approx(by_hand(*case), rel=1e-9)


def test_refuses_what_cannot_be_audited():
    for arguments, message in (
        (([1.0], [True, False], 0.0), r"shapes \(1,\) and \(2,\)"),
        (([], [], 0.0), r"shapes \(0,\)"),
        (([np.nan], [True], 0.0), "a score is NaN"),
        (([1.0, 2.0], [True, False], 0.3), r"delta must be from 0 to 1 / \(2 \* 2 canaries\)"),
    ):
        with pytest.raises(ValueError, match=message):
            audit_epsilon(*arguments)
    with pytest.raises(ValueError, match=r"confidence must be in \(0, 1\), got 1"):
        audit_epsilon([1.0], [True], 0.0, confidence=1.0)
    with pytest.raises(ValueError, match="got 3, 2 and 5"):
        p_value(5, 2, 3, 1.0, 0.0)
    with pytest.raises(ValueError, match="epsilon must be >= 0, got -1"):
        p_value(5, 2, 1, -1.0, 0.0)


def test_a_run_is_audited_by_how_far_its_included_canaries_fell():
    start = jnp.linspace(0.0, 100.0, 64)
    run = SimpleNamespace(
        layout=None,
        config=SimpleNamespace(train=SimpleNamespace(seed=3), grad=SimpleNamespace(delta=None)),
        init=lambda key: SimpleNamespace(params=start),
    )
    canaries = SimpleNamespace(values=lambda params: params)
    seed = next(s for s in range(99) if draw_included(64, s).sum() == 32)
    fallen = start - draw_included(64, seed)
    sure = audit(run, canaries, fallen, seed).epsilon
    assert sure == audit_epsilon(np.arange(64.0), np.arange(64) >= 32, 0.0).epsilon > 2
    assert audit(run, canaries, fallen, seed + 1).epsilon < sure  # other ones were included
    assert audit(run, canaries, fallen, seed, initial_known=False).epsilon < sure
    fallen = jnp.where(draw_included(64, seed), fallen, jnp.nan)  # as if nothing were known
    assert audit(run, canaries, fallen, seed).epsilon == sure
