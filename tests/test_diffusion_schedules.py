import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet.diffusion import (
    SCHEDULES,
    TARGETS,
    Schedule,
    add_noise,
    denoised,
    denoising_losses,
    draw_times,
    min_snr_weight,
    sampling_times,
    schedules,
    target,
)


def images(n, seed=1, size=3, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (n, size, size, 1), dtype)


# Schedules.


def test_cosine_is_the_papers_formula():
    """Nichol & Dhariwal 2021, equation 17: before the clipped last step, alpha_bar itself."""
    steps, s = 1000, 0.008
    t = np.arange(1, steps + 1)
    f = np.cos((t / steps + s) / (1 + s) * np.pi / 2) ** 2
    alpha_bar = f / np.cos(s / (1 + s) * np.pi / 2) ** 2
    got = schedules.cosine(steps)
    np.testing.assert_allclose(got.alpha[:-1] ** 2, alpha_bar[:-1], rtol=1e-9)
    np.testing.assert_allclose(got.alpha[-1] ** 2, alpha_bar[-2] * (1 - 0.999), rtol=1e-9)


def test_cosine_starts_with_less_noise_than_a_grey_level():
    """The paper: s is such that sqrt(beta) at t = 0 is slightly below 1/127.5."""
    assert 0.006 < schedules.cosine(1000).sigma[0] < 1 / 127.5


def test_linear_is_the_papers_formula():
    """Ho et al. 2020, section 4: betas from 1e-4 to 0.02 in 1,000 steps."""
    alpha_bar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    got = schedules.linear()
    np.testing.assert_allclose(got.alpha**2, alpha_bar, rtol=1e-10)
    np.testing.assert_allclose(got.sigma**2, 1 - alpha_bar, rtol=1e-8)
    np.testing.assert_allclose(got.sigma[0], 1e-2, rtol=1e-9)


def test_linear_ends_as_near_to_noise_as_the_paper_says():
    """Ho et al. 2020, section 4: KL(q(x_T | x_0) || N(0, I)) is about 1e-5 bits a dimension."""
    alpha, sigma = (a[-1] for a in schedules.linear())
    mean_square = 0.25  # of pixels in [-1, 1]
    nats = (alpha**2 * mean_square + sigma**2 - 1 - 2 * np.log(sigma)) / 2
    assert 0.5e-5 < nats / np.log(2) < 1.5e-5


@pytest.mark.parametrize("steps", [50, 200, 4000])
def test_linear_ends_with_the_same_noise_at_any_number_of_steps(steps):
    (log_snr, expected) = (
        2 * np.log(s.alpha[-1] / s.sigma[-1]) for s in map(schedules.linear, (steps, 1000))
    )
    # They differ by what log(1 - beta) has beside -beta: sum(beta^2) / 2, of 1 / steps.
    second_order = 1000**2 * np.mean(np.linspace(1e-4, 0.02, 1000) ** 2) / 2
    assert abs(log_snr - expected) < 1.3 * second_order * abs(1 / steps - 1 / 1000)


def test_karras_is_the_papers_ramp():
    """Karras et al. 2022, table 1: sigma from 0.002 to 80, rho 7; theirs begins with the noise."""
    n = 18
    i = np.arange(n)
    ramp = (80 ** (1 / 7) + i / (n - 1) * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    got = schedules.karras(n)
    np.testing.assert_allclose((got.sigma / got.alpha)[::-1], ramp, rtol=1e-10)
    np.testing.assert_allclose((got.sigma / got.alpha)[[0, -1]], [0.002, 80], rtol=1e-10)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [30, 1000])
def test_schedules_preserve_variance_and_lose_signal_at_every_step(name, steps):
    got = schedules.get(name, steps)
    schedules.check(got)
    assert got.steps == steps
    assert got.alpha.shape == got.sigma.shape == (steps,)
    assert got.alpha.dtype == got.sigma.dtype == np.float64
    np.testing.assert_allclose(got.alpha**2 + got.sigma**2, 1, rtol=1e-14)
    assert (np.diff(got.alpha) < 0).all()
    assert (np.diff(got.sigma) >= 0).all()  # the last ones may round to 1


def test_options_reach_the_schedule():
    by_name = schedules.get("karras", 10, sigma_max=10.0)
    chex.assert_trees_all_equal(by_name, schedules.karras(10, sigma_max=10.0))
    np.testing.assert_allclose(by_name.sigma[-1] / by_name.alpha[-1], 10.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_sampling_begins_at_the_noisiest_step_and_cuts_the_way_evenly(name):
    schedule = schedules.get(name, 1000)
    assert sampling_times(schedule, 1).tolist() == [999]
    assert sampling_times(schedule, 4).tolist() == [999, 749, 499, 249]
    assert sampling_times(schedule, 1000).tolist() == list(range(999, -1, -1))
    for n in (3, 7, 333, 999):
        times = sampling_times(schedule, n)
        widths = -np.diff(np.append(times, -1))
        assert times[0] == 999
        assert times.dtype == np.int32
        assert set(widths) <= {1000 // n, 1000 // n + 1}


@pytest.mark.parametrize("n", [0, -1, 11])
def test_more_steps_than_the_schedule_has_or_less_than_one_are_refused(n):
    with pytest.raises(ValueError, match=rf"steps must be in \[1, 10\].*got {n}"):
        sampling_times(schedules.cosine(10), n)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.get("sine"), r"one of \('cosine', 'linear', 'karras'\), got 'sine'"),
        (lambda: schedules.cosine(0), "steps must be at least 1, got 0"),
        (lambda: schedules.cosine(10, s=-1.0), "s must be >= 0"),
        (lambda: schedules.cosine(10, max_beta=1.0), r"max_beta in \(0, 1\)"),
        (lambda: schedules.linear(20), "use more than 20 steps"),
        (lambda: schedules.linear(first=0.0), r"first and last must be > 0, got 0.0 and 0.02$"),
        (lambda: schedules.linear(last=-0.1), r"first and last must be > 0, got 0.0001 and -0.1$"),
        (lambda: schedules.karras(1), "steps must be at least 2, got 1"),
        (lambda: schedules.karras(10, sigma_min=2.0, sigma_max=1.0), "sigma_min < sigma_max"),
        (lambda: schedules.karras(10, rho=0.0), "rho > 0"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("alpha", "sigma", "message"),
    [
        ([0.8, 0.6], [0.6], r"shapes \(2,\) and \(1,\)"),
        ([], [], "one length"),
        ([0.8, 0.6], [0.8, 0.8], r"must be 1, got alpha=0.8 and sigma=0.8 at step 0"),
        ([0.6, 0.8], [0.8, 0.6], "must fall with the step, got 0.75 at step 0"),
        ([1.0, 0.6], [0.0, 0.8], "sigma > 0"),
        ([0.6, -0.8], [0.8, 0.6], "alpha >= 0"),
        ([0.6, np.nan], [0.8, 0.6], "alpha >= 0"),
    ],
)
def test_arrays_that_are_no_schedule_are_refused(alpha, sigma, message):
    with pytest.raises(ValueError, match=message):
        schedules.check(Schedule(np.asarray(alpha), np.asarray(sigma)))


def test_a_traced_schedule_is_refused():
    with pytest.raises(TypeError, match="close over the schedule"):
        jax.jit(lambda s: schedules.check(s))(schedules.cosine(10))


# Targets.


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("per_example", [False, True])
def test_a_target_tells_the_example_and_the_noise(float64, name, per_example):
    x0, noise = images(2, 1, dtype=jnp.float64), images(2, 2, dtype=jnp.float64)
    angle = jnp.asarray([0.3, 1.2]) if per_example else jnp.asarray(0.7)
    alpha, sigma = jnp.cos(angle), jnp.sin(angle)
    x = add_noise(x0, noise, alpha, sigma)
    said = target(name, x0, noise, alpha, sigma)
    chex.assert_trees_all_close(
        jax.jit(denoised, static_argnums=0)(name, said, x, alpha, sigma), (x0, noise), atol=1e-13
    )


def test_noisy_examples_and_velocity_are_the_papers():
    """Ho et al. 2020, equation 4; Salimans & Ho 2022, section 4: v = alpha eps - sigma x."""
    x0, noise = jnp.asarray([[2.0], [3.0]]), jnp.asarray([[5.0], [7.0]])
    alpha, sigma = jnp.asarray([0.6, 0.0]), jnp.asarray([0.8, 1.0])
    chex.assert_trees_all_close(add_noise(x0, noise, alpha, sigma), jnp.asarray([[5.2], [7.0]]))
    chex.assert_trees_all_close(target("v", x0, noise, alpha, sigma), jnp.asarray([[1.4], [-3.0]]))
    chex.assert_trees_all_equal(target("eps", x0, noise, alpha, sigma), noise)
    chex.assert_trees_all_equal(target("x0", x0, noise, alpha, sigma), x0)


@pytest.mark.parametrize("name", TARGETS)
def test_a_clipped_example_leaves_the_noise_that_makes_up_x(name):
    x0, noise = 2 * images(2, 1), images(2, 2)
    x = add_noise(x0, noise, 0.6, 0.8)
    clipped, eps = denoised(name, target(name, x0, noise, 0.6, 0.8), x, 0.6, 0.8, clip=1.0)
    assert float(jnp.abs(x0).max()) > 1.0
    chex.assert_trees_all_close(clipped, jnp.clip(x0, -1, 1), atol=1e-5)
    chex.assert_trees_all_close(add_noise(clipped, eps, 0.6, 0.8), x, atol=1e-6)


def test_conversions_take_vmap_and_stay_in_their_dtype():
    x0, noise = images(4, 1), images(4, 2)
    alpha, sigma = jnp.full(4, 0.6), jnp.full(4, 0.8)
    one_by_one = jax.vmap(lambda *a: add_noise(*(v[None] for v in a[:2]), *a[2:])[0])
    chex.assert_trees_all_close(
        one_by_one(x0, noise, alpha, sigma), add_noise(x0, noise, alpha, sigma), atol=1e-6
    )
    half = add_noise(x0.astype(jnp.bfloat16), noise.astype(jnp.bfloat16), alpha, sigma)
    assert half.dtype == jnp.bfloat16
    narrowed = add_noise(x0.astype(jnp.bfloat16), noise, alpha, sigma)
    chex.assert_trees_all_equal(narrowed, half)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("predicted", "dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)]
)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_what_a_prediction_stands_for_is_in_the_dtype_of_x(name, predicted, dtype, clip):
    x, prediction = images(2, 1, dtype=dtype), images(2, 2, dtype=predicted)
    got = denoised(name, prediction, x, jnp.float32(0.6), jnp.float32(0.8), clip=clip)
    chex.assert_type([*got], dtype)
    # As exact as the narrower of the two.
    wide = denoised(
        name, prediction.astype(jnp.float32), x.astype(jnp.float32), 0.6, 0.8, clip=clip
    )
    got = tuple(a.astype(jnp.float32) for a in got)
    chex.assert_trees_all_close(got, wide, atol=1e-6 if dtype == jnp.float32 else 0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: target("u", x, x, 0.6, 0.8), r"one of \('eps', 'x0', 'v'\), got 'u'"),
        (lambda x: denoised("u", x, x, 0.6, 0.8), r"one of \('eps', 'x0', 'v'\), got 'u'"),
        (lambda x: denoised("v", x[1:], x, 0.6, 0.8), "the prediction must have the shape of x"),
        (lambda x: denoised("v", x, x, 0.6, 0.8, clip=0.0), "clip: must be > 0"),
        (lambda x: add_noise(x, x[1:], 0.6, 0.8), "one shape"),
        (lambda x: add_noise(x, x, jnp.ones(2), 0.8), r"per example, \(3,\), got shape \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(images(3))


# Weights.


def test_min_snr_weights_are_the_papers():
    """Hang et al. 2023, section 3.4 and its appendix: gamma 5, at snr 100, 5, 1/4."""
    snr = np.asarray([100.0, 5.0, 0.25])
    alpha, sigma = np.sqrt(snr / (1 + snr)), np.sqrt(1 / (1 + snr))
    expected = {
        "x0": [5.0, 5.0, 0.25],
        "eps": [0.05, 1.0, 1.0],
        "v": [5 / 101, 5 / 6, 0.2],
    }
    for name, weights in expected.items():
        chex.assert_trees_all_close(
            min_snr_weight(name, alpha, sigma), jnp.asarray(weights, jnp.float32), rtol=1e-5
        )


@pytest.mark.parametrize(("name", "ends"), [("x0", (0, 3)), ("eps", (1, 0)), ("v", (0, 0))])
def test_weights_without_signal_or_noise_are_their_limits(name, ends):
    got = min_snr_weight(name, jnp.asarray([0.0, 1.0]), jnp.asarray([1.0, 0.0]), gamma=3.0)
    chex.assert_trees_all_equal(got, jnp.asarray(ends, jnp.float32))
    near = min_snr_weight(name, jnp.asarray([1e-4, 1.0]), jnp.asarray([1.0, 1e-4]), gamma=3.0)
    chex.assert_trees_all_close(near, got, atol=1e-6)


def test_an_error_of_any_target_weighs_the_same():
    """The three weights are one weight of x0's error, in three coordinates."""
    x0, noise, wrong = images(3, 1), images(3, 2), images(3, 3)
    angle = jnp.asarray([0.1, 0.6, 1.4])
    alpha, sigma = jnp.cos(angle), jnp.sin(angle)
    x = add_noise(x0, noise, alpha, sigma)
    _, wrong_noise = denoised("x0", wrong, x, alpha, sigma)
    errors = []
    for name in TARGETS:
        error = target(name, wrong, wrong_noise, alpha, sigma) - target(
            name, x0, noise, alpha, sigma
        )
        weight = min_snr_weight(name, alpha, sigma)
        errors.append(weight * jnp.square(error).mean((1, 2, 3)))
    chex.assert_trees_all_close(errors[1], errors[0], rtol=1e-4)
    chex.assert_trees_all_close(errors[2], errors[0], rtol=1e-4)


# Losses.


@pytest.mark.parametrize("predicts", TARGETS)
@pytest.mark.parametrize("weighting", ["uniform", "min_snr"])
def test_the_loss_is_0_for_who_knows_the_example_and_not_otherwise(predicts, weighting):
    x0, schedule = images(8), schedules.cosine(100)
    alpha, sigma = (jnp.asarray(a, jnp.float32) for a in schedule)

    def knows(x, t):
        _, noise = denoised("x0", x0, x, alpha[t], sigma[t])
        return target(predicts, x0, noise, alpha[t], sigma[t])

    def losses(denoise):
        return denoising_losses(
            denoise, x0, jax.random.key(3), schedule, predicts=predicts, weighting=weighting
        )

    chex.assert_trees_all_close(losses(knows), jnp.zeros(8), atol=1e-7)
    chex.assert_shape(losses(lambda x, t: knows(x, t) + 0.1), (8,))
    assert float(losses(lambda x, t: knows(x, t) + 0.1).min()) > 0


def test_the_loss_is_the_mean_square_error_times_the_weight_at_the_step_drawn():
    x0, schedule, seen = images(64, size=2), schedules.linear(100), {}

    def zero(x, t):
        seen.update(x=x, t=t)
        return jnp.zeros_like(x)

    got = denoising_losses(
        zero, x0, jax.random.key(3), schedule, predicts="v", weighting="min_snr", gamma=2.0
    )
    alpha, sigma = (np.asarray(a)[seen["t"], None, None, None] for a in schedule)
    noise = (np.asarray(seen["x"]) - alpha * np.asarray(x0)) / sigma
    snr = (alpha / sigma)[:, 0, 0, 0] ** 2
    error = ((alpha * noise - sigma * np.asarray(x0)) ** 2).mean((1, 2, 3))
    np.testing.assert_allclose(got, error * np.minimum(snr, 2.0) / (snr + 1), rtol=1e-3)
    assert seen["t"].dtype == jnp.int32
    assert len(set(seen["t"].tolist())) > 30
    assert abs(noise.mean()) < 5 / np.sqrt(noise.size)
    assert abs(noise.var() - 1) < 5 * np.sqrt(2 / noise.size)


def test_losses_of_bfloat16_examples_are_float32_and_the_model_sees_bfloat16():
    def same(x, t):
        assert x.dtype == jnp.bfloat16
        return x

    got = denoising_losses(
        same, images(4).astype(jnp.bfloat16), jax.random.key(3), schedules.cosine(10)
    )
    assert got.dtype == jnp.float32
    chex.assert_tree_all_finite(got)


def test_what_the_model_returns_beside_is_handed_on_and_the_losses_differentiate():
    x0, schedule = images(4), schedules.cosine(10)

    @jax.jit
    @jax.grad
    def gradient(w):
        losses, state = denoising_losses(
            lambda x, t: (w * x, {"seen": t}), x0, jax.random.key(3), schedule, has_aux=True
        )
        chex.assert_shape(state["seen"], (4,))
        return losses.mean()

    assert float(gradient(0.0)) < 0  # more of x is more of its noise


def test_times_are_uniform_and_each_step_is_drawn():
    n, steps = 20_000, 10
    counts = np.bincount(draw_times(jax.random.key(1), n, steps), minlength=steps)
    assert counts.shape == (steps,)
    assert np.abs(counts - n / steps).max() < 5 * np.sqrt(n / steps)


def test_stratified_times_hit_every_step_and_each_is_uniform():
    draw = jax.jit(jax.vmap(lambda key: draw_times(key, 10, 10, stratified=True)))
    times = np.asarray(draw(jax.random.split(jax.random.key(1), 2000)))
    # Ten equal parts of a circle: one each, but for the rounding of u + i / 10.
    assert (np.sort(times, -1) == np.arange(10)).all(-1).mean() > 0.99
    for example in (0, 7):
        counts = np.bincount(times[:, example], minlength=10)
        assert np.abs(counts - 200).max() < 5 * np.sqrt(200)
    more = np.bincount(draw_times(jax.random.key(2), 1000, 10, stratified=True), minlength=10)
    assert np.abs(more - 100).max() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predicts": "u"}, r"one of \('eps', 'x0', 'v'\), got 'u'"),
        ({"weighting": "snr"}, r"one of \('uniform', 'min_snr'\), got 'snr'"),
        ({"weighting": "min_snr", "gamma": 0.0}, "gamma must be > 0, got 0.0"),
    ],
)
def test_unknown_targets_and_weightings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        denoising_losses(
            lambda x, t: x, images(2), jax.random.key(1), schedules.cosine(10), **options
        )


def test_predictions_of_another_shape_and_examples_in_bytes_are_refused():
    schedule = schedules.cosine(10)
    with pytest.raises(ValueError, match=r"the shape of x0, \(2, 3, 3, 1\), got \(1, 3, 3, 1\)"):
        denoising_losses(lambda x, t: x[:1], images(2), jax.random.key(1), schedule)
    with pytest.raises(TypeError, match="x0 must be floating, got uint8"):
        denoising_losses(lambda x, t: x, jnp.zeros((2, 3), jnp.uint8), jax.random.key(1), schedule)
