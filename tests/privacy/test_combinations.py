"""Epsilon of each sampling with each strategy: that of jax-privacy, or refused in one line."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy.accounting import accountants, analysis
from jax_privacy.batch_selection import (
    BallsInBinsSampling,
    BMinSepSampling,
    CyclicPoissonSampling,
    FixedBatchSampling,
    PartitionType,
)
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig
from jax_privacy.matrix_factorization import banded, sensitivity, toeplitz

import fnet
from fnet.noise.correlated import DP_SGD
from fnet.noise.imports import in_double_precision
from fnet.privacy import (
    PoissonSampling,
    Sampling,
    Strategy,
    banded_inverse_square_root,
    banded_square_root,
    calibrate_noise_multiplier,
    epsilon,
)
from train.config import Clipped, Config, Digits, Mlp, Train
from train.errors import UserError
from train.run.setup import setup

EXAMPLES, STEPS, NOISE, DELTA = 1000, 60, 2.0, 1e-5
PLD = accountants.PldAccountantConfig()

COLUMNS = in_double_precision(lambda: banded.ColumnNormalizedBanded.default(STEPS, 4))
STRATEGIES = {
    "DP-SGD": DP_SGD,
    "banded": banded_square_root(4),
    "columns": Strategy.of(COLUMNS),
    "inverse": banded_inverse_square_root(4),
    "8 bands": banded_square_root(8),
}
GROUPS = CyclicPoissonSampling(0.2, STEPS, cycle_length=4)
SAMPLINGS = {
    "Poisson": PoissonSampling(EXAMPLES, 50),
    "cyclic": PoissonSampling(EXAMPLES, 50, bands=4),
    "equal groups": Sampling(EXAMPLES, GROUPS),
    "truncated": Sampling(EXAMPLES, dataclasses.replace(GROUPS, truncated_batch_size=60)),
    "balls in bins": Sampling(EXAMPLES, BallsInBinsSampling(STEPS, cycle_length=20)),
    "b-min-sep": Sampling(EXAMPLES, BMinSepSampling(0.1, STEPS, min_sep=6)),
}


def amplified(sampling):
    """Epsilon by the accountant of jax-privacy for DP-SGD and amplified banded matrices."""
    params = analysis.DpParams(
        noise_multipliers=NOISE,
        num_samples=EXAMPLES,
        delta=DELTA,
        batch_size=50,
        cycle_length=sampling.separation,
        truncated_batch_size=sampling.truncated,
    )
    return analysis.DpsgdTrainingAccountant(PLD).compute_epsilon(STEPS, params)


def released_once(strategy, separation):
    """Epsilon by the accountant of jax-privacy for one release of a matrix mechanism."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        column = jnp.asarray(strategy.column(STEPS))
        matrix = column if column.ndim == 2 else toeplitz.materialize_lower_triangular(column)
        largest = sensitivity.get_min_sep_sensitivity_upper_bound(matrix, separation)
        if column.ndim == 1:
            largest = toeplitz.minsep_sensitivity_squared(column, separation) ** 0.5
    params = analysis.DpParams(
        noise_multipliers=NOISE / float(largest), num_samples=EXAMPLES, delta=DELTA, batch_size=50
    )
    return analysis.SingleReleaseTrainingAccountant(PLD).compute_epsilon(STEPS, params)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_epsilon_of_each_combination_is_that_of_jax_privacy_or_refused(name, strategy):
    sampling, chosen = SAMPLINGS[name], STRATEGIES[strategy]
    fits = chosen.bands is not None and chosen.bands <= sampling.separation
    if name == "truncated" and not fits:
        with pytest.raises(ValueError, match="no accountant covers truncated batches"):
            epsilon(NOISE, DELTA, sampling, STEPS, strategy=chosen)
        return
    is_amplified = fits and isinstance(sampling.selection, CyclicPoissonSampling)
    expected = amplified(sampling) if is_amplified else released_once(chosen, sampling.separation)
    spent = epsilon(NOISE, DELTA, sampling, STEPS, strategy=chosen)
    assert spent == pytest.approx(expected, rel=1e-6)


def test_truncated_batches_have_no_accountant_for_a_vanishing_delta():
    with pytest.raises(ValueError, match="no accountant covers truncated batches with delta < "):
        epsilon(1.0, 1e-14, SAMPLINGS["truncated"], steps=10)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("truncated", [60, None])
def test_epsilon_and_stddev_equal_an_execution_plan_of_jax_privacy(truncated):
    """Whose event its authors have verified, for groups of equal size."""
    coef = np.asarray(toeplitz.optimal_max_error_strategy_coefs(4))
    config = BandMFExecutionPlanConfig(
        iterations=STEPS, strategy=coef, epsilon=None, delta=None, noise_multiplier=NOISE,
        sampling_prob=0.2, truncated_batch_size=truncated, num_examples=EXAMPLES,
    )  # fmt: skip
    selection = config.plan.batch_selection_strategy
    expected = config.accountant.compose(config.plan.dp_event).get_epsilon(DELTA)
    spent = epsilon(
        NOISE, DELTA, Sampling(EXAMPLES, selection), STEPS, strategy=banded_square_root(4)
    )
    assert spent == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cut", [20, 75])
def test_epsilon_of_a_noise_schedule_is_that_of_jax_privacy(cut):
    schedule = ((0, 1.0), (cut, 0.7))
    params = analysis.DpParams(
        noise_multipliers=[(0, NOISE), (cut, 0.7 * NOISE)] if cut < STEPS else NOISE,
        num_samples=EXAMPLES, delta=DELTA, batch_size=50,
    )  # fmt: skip
    expected = analysis.DpsgdTrainingAccountant(PLD).compute_epsilon(STEPS, params)
    sampling = SAMPLINGS["Poisson"]
    spent = epsilon(NOISE, DELTA, sampling, STEPS, noise_schedule=schedule)
    assert spent == pytest.approx(expected, rel=1e-9)
    if cut > STEPS:  # as without a schedule
        return
    noise = calibrate_noise_multiplier(2.0, DELTA, sampling, STEPS, noise_schedule=schedule)
    assert 1.98 < epsilon(noise, DELTA, sampling, STEPS, noise_schedule=schedule) <= 2.0


def test_the_least_noise_of_a_schedule_says_which_accountant_is_fit():
    args, schedule = (NOISE, DELTA, SAMPLINGS["Poisson"], STEPS), ((0, 1.0), (STEPS - 1, 0.01))
    spent, looser = (
        epsilon(*args, noise_schedule=schedule, accountant=kind) for kind in ("pld", "rdp")
    )
    assert spent == looser


def test_a_noise_schedule_that_no_accountant_covers_is_refused():
    for sampling in (SAMPLINGS["cyclic"], SAMPLINGS["balls in bins"]):
        with pytest.raises(ValueError, match="no accountant covers a schedule of the noise"):
            epsilon(NOISE, DELTA, sampling, STEPS, noise_schedule=((0, 1.0), (5, 2.0)))
    with pytest.raises(ValueError, match="covers a schedule of correlated noise"):
        fnet.autodiff.clipped(
            1.0, noise_multiplier=1.0, expected_batch_size=1, strategy=banded_square_root(2),
            noise_schedule=((0, 1.0),),
        )  # fmt: skip


def test_rejects_invalid_schedules():
    for schedule in (((1, 1.0),), ((0, 1.0), (0, 2.0)), ((0, 0.0),)):
        with pytest.raises(ValueError, match="must be pairs"):
            fnet.autodiff.clipped(1.0, clip_schedule=schedule)
        with pytest.raises(ValueError, match="must be pairs"):
            epsilon(NOISE, DELTA, SAMPLINGS["Poisson"], STEPS, noise_schedule=schedule)


def test_clip_and_noise_follow_their_schedules():
    def loss(params, model_state, batch, key):
        return batch["x"] @ params

    def moved(step, **options):
        mode = fnet.autodiff.clipped(0.5, expected_batch_size=1, **options)
        state = fnet.TrainState.create(
            params=jnp.zeros(4000), optimizer=optax.sgd(1.0), key=jax.random.key(0)
        )
        state = dataclasses.replace(state, step=jnp.int32(step))
        state, metrics = fnet.make_step(loss, optax.sgd(1.0), mode)(state, batch)
        return np.array(state.params), metrics

    batch, clips, noises = {"x": jnp.ones((1, 4000))}, ((0, 1.0), (3, 4.0)), ((0, 2.0), (3, 0.5))
    for step, clip, noise in ((2, 0.5, 6.0), (3, 2.0, 1.5)):
        params, metrics = moved(step, clip_schedule=clips)
        assert np.linalg.norm(params) == pytest.approx(clip, rel=1e-5)
        assert metrics["clip"] == clip
        options = {"clip_schedule": clips, "noise_schedule": noises, "noise_multiplier": 3.0}
        noisy, _ = moved(step, **options)
        assert (noisy - params).std() == pytest.approx(clip * noise, rel=0.05)


def test_refuses_batches_without_an_accountant():
    independent = {"truncated_batch_size": 4, "partition_type": PartitionType.INDEPENDENT}
    for selection, message in (
        (FixedBatchSampling(2, 8), "must be one of CyclicPoissonSampling"),
        (BMinSepSampling(0.1, 8, 3, truncated_batch_size=4), "covers truncated b-min-sep"),
        (CyclicPoissonSampling(0.1, 8, **independent), "truncation needs partition_type"),
        (BMinSepSampling(0.1, 8, 1), "min_sep must be above 1"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Sampling(10, selection)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_batches_have_the_stated_size_and_separation(name):
    sampling, steps = SAMPLINGS[name], 120
    draw = sampling.draws(seed=3)
    joined = np.zeros((steps, EXAMPLES))
    for step in range(steps):
        joined[step, draw(step)] = 1
        assert len(draw(step)) <= sampling.rows
    size = min(sampling.batch_size, sampling.truncated or math.inf)
    assert joined.sum(1).mean() == pytest.approx(size, rel=0.1)
    for apart in range(1, sampling.separation):
        assert not (joined[apart:] * joined[:-apart]).any()
    np.testing.assert_array_equal(sampling.indices(3, 40), np.flatnonzero(joined[40]))
    indices, weights = sampling.batch(3, 40)
    np.testing.assert_array_equal(indices[weights == 1], np.flatnonzero(joined[40]))


def config(**grad):
    fixed = {"delta": 1e-5, "noise_multiplier": 4.0, "insecure_noise_seed": 0}
    clipped = Clipped(**fixed | grad)
    return Config(
        name="private", data=Digits(batch_size=64), model=Mlp(hidden=()), grad=clipped,
        train=Train(steps=20),
    )  # fmt: skip


OPTIONS = {
    "optimized": {"noise_bands": 4, "noise_strategy": "optimized"},
    "balls in bins": {"sampling": "balls_in_bins"},
    "b-min-sep": {"sampling": "b_min_sep", "separation": 5, "noise_bands": 3},
    "truncated": {"truncated_batch_size": 80},
    "schedules": {"noise_schedule": ((0, 1.0), (10, 0.5)), "clip_schedule": ((0, 1.0), (5, 0.5))},
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_takes_each_option(name):
    run = setup(config(**OPTIONS[name]))
    batch = next(run.training_batches(0))
    chex.assert_trees_all_equal_shapes(batch, run.batch_shapes)
    _, metrics = run.step(run.init(jax.random.key(0)), batch)
    assert jnp.isfinite(metrics["grad_norm"])
    privacy = run.privacy
    assert privacy.sampling.batch_size == pytest.approx(64, rel=0.03)
    expected = epsilon(
        4.0, 1e-5, privacy.sampling, 20,
        strategy=privacy.strategy, noise_schedule=privacy.noise_schedule,
    )  # fmt: skip
    assert privacy.epsilon(20) == expected
    assert run.step.mode.strategy is privacy.strategy
    neighbors = privacy.as_dict(20)["neighbors"]
    assert neighbors == ("without gradient" if name == "truncated" else "missing")


def test_a_run_refuses_what_no_accountant_covers():
    for grad, message in (
        ({"noise_strategy": "dense"}, "dense with one band is independent noise"),
        ({"noise_strategy": "buffered", "noise_bands": 2}, "buffered has no bands"),
        ({"noise_schedule": ((0, 1.0),), "noise_bands": 2}, "no accountant covers a"),
        ({"noise_schedule": ((3, 1.0),)}, "must be pairs"),
        ({"sampling": "balls_in_bins", "separation": 3}, "follows from data.batch_size"),
        ({"sampling": "b_min_sep"}, "needs grad.separation above 1"),
        ({"sampling": "b_min_sep", "separation": 40}, "give at most 22"),
        ({"truncated_batch_size": 80, "sampling": "balls_in_bins"}, "no accountant covers it"),
        ({"truncated_batch_size": 80, "noise_bands": 4, "separation": 2}, "no accountant covers"),
        ({"truncated_batch_size": 80, "accountant": "rdp"}, "truncated batches need"),
        ({"truncated_batch_size": 20}, "is less than the 64 of data.batch_size"),
        ({"quantile": 0.5, "clip_schedule": ((0, 1.0),)}, "grad.quantile needs independent"),
        ({"noise_multiplier": None, "delta": None, "sampling": "b_min_sep"}, "there is no noise"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            setup(config(**grad))


def test_a_strategy_for_a_number_of_steps_refuses_another():
    grad = config(**OPTIONS["optimized"]).grad
    with pytest.raises(UserError, match="was made for 20 steps, not 30"):
        grad.check_length(20, 30)
