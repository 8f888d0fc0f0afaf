"""Noise of private training: its distribution, its correlation over steps, and its accounting."""

import dataclasses
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import NeighboringRelation
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_privacy.matrix_factorization.buffered_toeplitz import BufferedToeplitz
from scipy.optimize import brentq
from scipy.stats import norm

import fnet
from fnet.noise.correlated import DP_SGD, Strategy, add_correlated_noise
from fnet.noise.imports import in_double_precision
from fnet.privacy import (
    PoissonSampling,
    add_noise,
    banded_inverse_square_root,
    banded_square_root,
    epsilon,
)

ROWS, SIZE = 4, 8.0
SGD = optax.sgd(1.0)
# Rounded from jax_privacy 2.0.0: buffered_toeplitz.optimize(n=100, min_sep=20, ...).
BUFFERED = in_double_precision(lambda: BufferedToeplitz.build([0.99, 0.887], [0.033, 0.429]))
STRATEGIES = {
    "banded": banded_square_root(4),
    "banded inverse": banded_inverse_square_root(4),
    "buffered": Strategy.of(BUFFERED),
    "dense": Strategy.of(np.tril(1 / (1 + np.abs(np.subtract.outer(range(16), range(16)))))),
}


def loss(params, model_state, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["a"].astype(jnp.float32))
    return (hidden @ params["b"].astype(jnp.float32)).sum(-1)


def noisy_mode(strategy=DP_SGD, *, noise_multiplier=3.0, clip=0.5, microbatches=1):
    return fnet.autodiff.clipped(
        clip,
        noise_multiplier=noise_multiplier,
        expected_batch_size=SIZE,
        strategy=strategy,
        microbatches=microbatches,
    )


def state_of(width, dtype=jnp.float32, optimizer=SGD):
    params = {"a": jnp.zeros((width, width), dtype), "b": jnp.zeros((width, width), dtype)}
    return fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(7))


def padding(width):
    return {"x": jnp.ones((ROWS, width)), "weight": jnp.zeros(ROWS)}


def noise_of(mode, width, steps):
    """Noise of each step in units of ``clip / expected_batch_size``, by parameter."""
    optimizer = mode.wrap_optimizer(optax.sgd(1.0))
    step, state = fnet.make_step(loss, optimizer, mode), state_of(width, optimizer=optimizer)
    before, noise = jax.tree.map(np.array, state.params), []
    for _ in range(steps):
        state, _ = step(state, padding(width))
        after = jax.tree.map(np.array, state.params)
        noise.append(jax.tree.map(lambda a, b: (a - b) * SIZE / mode.clip, before, after))
        before = after
    return jax.tree.map(lambda *rows: np.stack(rows), *noise)


def toeplitz(coef, size):
    """The lower-triangular Toeplitz matrix with this first column."""
    return sum(c * np.eye(size, k=-i) for i, c in enumerate(coef[:size]))


def strategy_matrix(strategy, size):
    """The matrix C of the noise that a strategy really makes."""
    if strategy.buffers is not None:
        with jax.numpy_rank_promotion("allow"):
            return np.linalg.inv(np.array(strategy.buffers.materialize(size), np.float64))
    noising = np.resize(strategy.noising, (size, strategy.noising.shape[1]))
    matrix = np.zeros((size, size))
    for i, j in itertools.product(range(size), range(noising.shape[1])):
        if j <= i:
            matrix[i, i - j] = noising[i, j]
    return np.linalg.inv(matrix)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("make", [banded_square_root, banded_inverse_square_root])
def test_one_band_equals_dp_sgd_bit_for_bit(make):
    batch = {"x": jax.random.normal(jax.random.key(0), (ROWS, 8))}
    states = []
    for mode in (noisy_mode(), noisy_mode(make(1))):
        step, state = fnet.make_step(loss, optax.sgd(1.0), mode), state_of(8)
        for _ in range(3):
            state, _ = step(state, batch)
        states.append(state)
    chex.assert_trees_all_equal(*states)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", STRATEGIES)
def test_noise_combines_the_noise_of_dp_sgd_at_earlier_steps(name):
    strategy, steps = STRATEGIES[name], 9
    independent = noise_of(noisy_mode(), 8, steps)
    matrix = np.linalg.inv(strategy_matrix(strategy, steps))
    expected = jax.tree.map(lambda z: np.einsum("ij,j...->i...", matrix, z), independent)
    chex.assert_trees_all_close(noise_of(noisy_mode(strategy), 8, steps), expected, atol=2e-5)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", ["dp_sgd", *STRATEGIES])
def test_mean_variance_and_covariance_of_the_noise(name):
    strategy, steps, width = STRATEGIES.get(name, DP_SGD), 8, 96
    noise = noise_of(noisy_mode(strategy), width, steps)
    draws = {k: v.reshape(steps, -1) for k, v in noise.items()}
    inverse = np.linalg.inv(strategy_matrix(strategy, steps))
    expected = 9 * inverse @ inverse.T
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    count = width * width
    for a in draws.values():
        assert (np.abs(a.mean(1)) < 5 * np.sqrt(np.diag(expected) / count)).all()
        assert (np.abs(a @ a.T / count - expected) < 6 * scale / math.sqrt(count)).all()
        assert np.unique(a).size > 0.99 * a.size
    # Parameters are independent of each other, also at different steps.
    across = draws["a"] @ draws["b"].T / count
    assert (np.abs(across) < 5 * scale / math.sqrt(count)).all()
    shifted = draws["a"] @ np.roll(draws["a"], 1, axis=1).T / count
    assert (np.abs(shifted) < 5 * scale / math.sqrt(count)).all()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("strategy", [DP_SGD, STRATEGIES["banded"]], ids=["dp_sgd", "banded"])
def test_noise_is_normal(strategy):
    z = np.sort(noise_of(noisy_mode(strategy), 64, 1)["a"].ravel())
    z /= 3 * strategy.noising[0, 0]
    distance = np.abs(norm.cdf(z) - (np.arange(z.size) + 0.5) / z.size).max()
    assert distance < 1.95 / math.sqrt(z.size)  # Kolmogorov-Smirnov at 1e-3


def test_noise_follows_from_the_step_alone():
    """A resumed run has no noise of its own to restore."""
    mode, width = noisy_mode(STRATEGIES["banded inverse"]), 8
    whole = noise_of(mode, width, 6)
    state = dataclasses.replace(state_of(width), step=jnp.int32(5))
    resumed, _ = fnet.make_step(loss, optax.sgd(1.0), mode)(state, padding(width))
    for name, noise in whole.items():
        last = -np.array(resumed.params[name]) * SIZE / mode.clip
        np.testing.assert_allclose(last, noise[5], atol=1e-4)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("strategy", [DP_SGD, *STRATEGIES.values()])
def test_microbatches_add_noise_once(strategy):
    whole = noise_of(noisy_mode(strategy), 8, 3)
    chex.assert_trees_all_equal(noise_of(noisy_mode(strategy, microbatches=4), 8, 3), whole)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("strategy", [DP_SGD, STRATEGIES["banded"]], ids=["dp_sgd", "banded"])
def test_noise_does_not_depend_on_the_sharding(strategy):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    step = fnet.make_step(loss, optax.sgd(1.0), noisy_mode(strategy))

    def params_after(spec):
        state, batch = state_of(8), padding(8)
        sharding = jax.tree.map(
            lambda a: NamedSharding(mesh, spec if a.ndim == 2 else PartitionSpec()), state
        )
        state = jax.device_put(state, sharding)
        sharded = step.replace(state_sharding=sharding)
        for _ in range(3):
            state, _ = sharded(state, batch)
        assert state.params["a"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        return jax.tree.map(np.array, state.params)

    sharded, whole = (params_after(PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    chex.assert_trees_all_close(sharded, whole, rtol=1e-6)


def test_noise_of_bfloat16_parameters_is_drawn_and_added_in_float32():
    key, x = jax.random.key(0), jnp.full(1000, 3.0, jnp.bfloat16)
    noisy = add_noise([x], 0.5, key)[0]
    assert noisy.dtype == jnp.bfloat16
    exact = add_noise([x.astype(jnp.float32)], 0.5, key)[0]
    chex.assert_trees_all_equal(noisy, exact.astype(jnp.bfloat16))
    gradient = jax.jit(noisy_mode()(loss))
    low, high = (
        gradient(state_of(8, dtype).params, {}, padding(8), jax.random.key(1))[0]
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    chex.assert_trees_all_equal(low, jax.tree.map(lambda a: a.astype(jnp.bfloat16), high))


def test_correlated_noise_takes_at_most_one_array_more_than_dp_sgd():
    """Drawing noise again takes one array while the step runs, whatever the number of bands."""
    batch = {"x": jnp.ones((ROWS, 128))}
    reports = {}
    for name, strategy in [
        ("dp_sgd", DP_SGD),
        ("inverse", banded_inverse_square_root(64)),
        ("banded", banded_square_root(8)),
    ]:
        step = fnet.make_step(loss, optax.sgd(1.0), noisy_mode(strategy))
        reports[name] = fnet.compile_step(step, state_of(128), batch).report
    parameter = 128 * 128 * 4
    for name in ("inverse", "banded"):
        assert reports[name].state_bytes == reports["dp_sgd"].state_bytes
        more = reports[name].peak.temporaries - reports["dp_sgd"].peak.temporaries
        assert more < 1.02 * parameter


def test_own_loops_add_the_same_noise():
    strategy, key = STRATEGIES["banded inverse"], jax.random.key(3)
    tree = {"a": jnp.ones((3, 2)), "b": jnp.zeros(5)}
    z = [add_noise(tree, 1.0, jax.random.fold_in(key, i)) for i in range(3)]
    z = [jax.tree.map(jnp.subtract, noisy, tree) for noisy in z]
    got = add_correlated_noise(tree, 2.0, key, 2, strategy)
    expected = jax.tree.map(
        lambda x, a, b, c: x + 2 * (c - 0.5 * b - 0.125 * a), tree, z[0], z[1], z[2]
    )
    chex.assert_trees_all_close(got, expected, atol=1e-5)


# Computed by jax_privacy 2.0.0, module matrix_factorization.toeplitz, in float64.
def test_coefficients_equal_those_of_jax_privacy():
    expected = [1.21995133e00, -6.09975665e-01, -1.52493916e-01, -7.62469582e-02, 2.85926093e-01]
    expected += [-6.67160884e-02, -5.00370663e-02, -3.93148378e-02, 5.92700964e-02]
    np.testing.assert_allclose(banded_square_root(4).noising[0, :9], expected, rtol=1e-8)
    assert banded_inverse_square_root(4).noising.tolist() == [[1.0, -0.5, -0.125, -0.0625]]


@pytest.mark.parametrize("bands", [2, 4, 16])
def test_dropped_coefficients_are_smaller_than_the_rounding_of_float32(bands):
    kept = banded_square_root(bands).noising[0]
    coef = np.cumprod([1.0, *((2 * j - 1) / (2 * j) for j in range(1, bands))])
    whole = np.linalg.inv(toeplitz(coef / np.linalg.norm(coef), 400))[:, 0]
    tails = [np.linalg.norm(whole[i:]) / np.linalg.norm(whole) for i in range(len(whole))]
    assert tails[len(kept)] <= 2**-24 < tails[len(kept) - 1]
    np.testing.assert_allclose(kept, whole[: len(kept)], atol=1e-12)


MINSEP = [
    (banded_square_root(4), 10, 3, 4.931758530183727),
    (banded_square_root(4), 10, 4, 2.839895013123359),
    (banded_square_root(4), 10, 1, 27.052493438320212),
    (banded_inverse_square_root(4), 25, 1, 206.63601954761),
    (banded_inverse_square_root(4), 25, 7, 7.685655364751808),
    (banded_inverse_square_root(4), 25, 25, 1.6224002447734032),
]


@pytest.mark.parametrize(("strategy", "steps", "separation", "squared"), MINSEP)
def test_sensitivity_equals_that_of_jax_privacy(strategy, steps, separation, squared):
    assert strategy.sensitivity(steps, separation) ** 2 == pytest.approx(squared, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "separation"),
    [*((name, 3) for name in STRATEGIES), *(("banded", n) for n in (1, 2, 5)), ("dense", 2)],
)
def test_sensitivity_is_the_largest_over_all_participation_patterns(name, separation):
    strategy, steps = STRATEGIES[name], 8
    matrix = strategy_matrix(strategy, steps)
    largest = 0.0
    for pattern in itertools.product([-1, 0, 1], repeat=steps):  # aligned or opposed gradients
        where = np.flatnonzero(pattern)
        if (np.diff(where) >= separation).all():
            largest = max(largest, np.linalg.norm(matrix @ np.array(pattern)))
    # That of a C which is no Toeplitz matrix is an upper bound.
    bound = strategy.sensitivity(steps, separation)
    assert largest * (1 - 1e-6) <= bound <= largest * (1.3 if name == "dense" else 1 + 1e-6)


# Computed by jax_privacy 2.0.0: toeplitz.optimize_banded_toeplitz(n=2000, bands=4).
OPTIMIZED = Strategy.of([0.56864703, 0.50502032, 0.47653809, 0.44102889])


@pytest.mark.parametrize("strategy", [*map(banded_square_root, (2, 4, 16)), OPTIMIZED])
def test_banded_strategies_have_bands_of_norm_one(strategy):
    """What amplification by cyclic sampling needs, of the matrix that the noise really has."""
    bands, size = strategy.bands, 12 * strategy.bands
    matrix = strategy_matrix(strategy, size)
    assert np.abs(matrix[np.tri(size, k=-bands, dtype=bool)]).max() < 1e-6
    assert np.linalg.norm(matrix, axis=0).max() == pytest.approx(1, abs=1e-6)


def gaussian_epsilon(noise, delta):
    """Epsilon of the Gaussian mechanism: Balle and Wang 2018, Theorem 8, arXiv:1805.06530."""

    def excess(eps):
        a, b = 0.5 / noise, eps * noise
        return norm.cdf(a - b) - math.exp(eps) * norm.cdf(-a - b) - delta

    return brentq(excess, 0, 200)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("noise", [1.5, 4.0])
@pytest.mark.parametrize(("steps", "bands"), [(64, 8), (60, 8), (5, 8), (12, 1)])
def test_epsilon_without_subsampling_is_that_of_one_gaussian_mechanism(noise, steps, bands):
    sampling = PoissonSampling(800, 800 / bands, bands=bands)
    participations = math.ceil(steps / bands)
    expected = gaussian_epsilon(noise / math.sqrt(participations), 1e-5)
    spent = epsilon(noise, 1e-5, sampling, steps, strategy=banded_square_root(bands))
    assert spent == pytest.approx(expected, rel=1e-4)
    assert spent >= expected * (1 - 1e-6)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("separation", [1, 3, 8])
def test_epsilon_of_other_strategies_follows_from_the_sensitivity(separation):
    """Also of a banded strategy whose bands are more than the separation of sampling."""
    sampling = PoissonSampling(800, 10, bands=separation)
    for strategy in (banded_inverse_square_root(4), banded_square_root(16)):
        matrix = strategy_matrix(strategy, 24)
        worst = matrix[:, ::separation].sum(1)
        expected = gaussian_epsilon(8.0 / np.linalg.norm(worst), 1e-5)
        assert epsilon(8.0, 1e-5, sampling, 24, strategy=strategy) == pytest.approx(
            expected, rel=1e-4
        )


def subsampled_delta(eps, noise, probability):
    """Delta of one Poisson-subsampled Gaussian, both directions, by numerical integration."""
    x = np.linspace(-12 * noise, 1 + 12 * noise, 400_001)
    without = norm.pdf(x, 0, noise)
    with_example = (1 - probability) * without + probability * norm.pdf(x, 1, noise)
    pairs = ((without, with_example), (with_example, without))
    return max(np.trapezoid(np.maximum(p - math.exp(eps) * q, 0), x) for p, q in pairs)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("noise", "probability"), [(1.0, 0.25), (0.7, 0.5)])
def test_epsilon_of_a_subsampled_step_equals_numerical_integration(noise, probability):
    sampling = PoissonSampling(1000, 1000 * probability / 4, bands=4)
    assert sampling.probability == probability
    expected = brentq(lambda eps: subsampled_delta(eps, noise, probability) - 1e-5, 0, 50)
    for steps in (1, 4):  # an example joins at most one of them
        spent = epsilon(noise, 1e-5, sampling, steps, strategy=banded_square_root(4))
        assert spent == pytest.approx(expected, rel=1e-3)


# Computed by jax_privacy 2.0.0: accounting.amplified_bandmf_event and a PLDAccountant.
AMPLIFIED = [
    (1.5, PoissonSampling(3200, 100, bands=8), 64, 2.8145578261472655),
    (2.0, PoissonSampling(800, 100, bands=8), 100, 8.803462634665042),
    (0.8, PoissonSampling(20_000, 100, bands=4), 1000, 3.5352783661866165),
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("noise", "sampling", "steps", "expected"), AMPLIFIED)
def test_amplified_epsilon_equals_that_of_jax_privacy(noise, sampling, steps, expected):
    strategy = banded_square_root(sampling.separation)
    assert epsilon(noise, 1e-5, sampling, steps, strategy=strategy) == pytest.approx(expected)


def test_an_example_of_one_step_has_the_longest_column_as_its_sensitivity():
    c = np.array([[1.0, 0, 0], [3, 2, 0], [0, 4, 1]])
    strategy = Strategy.of(c)
    assert strategy.sensitivity(3, 3) == pytest.approx(1)  # as C is divided by it, columns first
    noise = 0.3 * np.linalg.inv(c / np.linalg.norm(c, axis=0).max())
    found = [strategy.noising[t, : t + 1][::-1] for t in range(3)]
    for t in range(3):
        np.testing.assert_allclose(0.3 * found[t], noise[t, : t + 1], atol=1e-6)


def test_sensitivity_is_that_of_the_clipped_gradient():
    """Noise is in units of what one example can move the sum by."""
    gradient = fnet.clipped_grad(lambda params, x: x @ params, 0.5, per_layer=True)
    assert gradient.sensitivity() == 0.5
    assert gradient.sensitivity(NeighboringRelation.ADD_OR_REMOVE_ONE) == 0.5


def test_rejects_correlated_noise_without_a_step():
    mode = noisy_mode(STRATEGIES["banded"])
    args = state_of(8).params, {}, padding(8)
    with pytest.raises(ValueError, match=r"use fnet\.make_step, or give mode\.step_key"):
        mode(loss)(*args, jax.random.key(0))
    grads, _, _ = mode(loss)(*args, mode.step_key(jax.random.key(0), jnp.int32(0)))
    assert jnp.std(grads["a"]) > 0


def test_rejects_invalid_strategies():
    for make, message in (
        (lambda: banded_square_root(0), "bands must be >= 1, got 0"),
        (lambda: banded_inverse_square_root(0), "bands must be >= 1, got 0"),
        (lambda: Strategy.of([1.0, 2.0]), "does not fall off"),
        (lambda: Strategy.of([1.0, 1.0]), "does not fall off"),
        (lambda: Strategy.of([]), "expected finite coefficients"),
        (lambda: Strategy.of([[[1.0]]]), r"got shape \(1, 1, 1\)"),
        (lambda: Strategy.of([1.0, math.nan], inverse=True), "expected finite coefficients"),
        (lambda: Strategy.of([0.0, 1.0], inverse=True), "first coefficient must be > 0"),
        (lambda: Strategy.of(np.ones((2, 2))), "must be lower-triangular"),
        (lambda: Strategy.of([1.0, 0.5], inverse=True).sensitivity(4, 1), "non-negative"),
        (lambda: Strategy.of(np.tri(3)).sensitivity(4, 1), "C has 3 steps, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_banded_matrix_has_its_number_of_bands():
    assert Strategy.of(np.eye(4) + 0.5 * np.eye(4, k=-1)).bands == 2
