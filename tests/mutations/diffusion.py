"""Diffusion: schedules, targets, the loss's weights, samplers, guidance."""

from tests.mutations.mutation import changes

_SCHEDULES = "fnet/diffusion/schedules.py"
_TARGETS = "fnet/diffusion/targets.py"
_LOSS = "fnet/diffusion/loss.py"
_SAMPLERS = "fnet/diffusion/samplers.py"
_GUIDANCE = "fnet/diffusion/guidance.py"
_SCHEDULES_TESTS = "tests/test_diffusion_schedules.py"
_TARGETS_TESTS = "tests/test_diffusion_targets.py"
_LOSS_TESTS = "tests/test_diffusion_loss.py"
_SAMPLERS_TESTS = "tests/test_samplers.py"

SCHEDULES = changes(
    _SCHEDULES,
    _SCHEDULES_TESTS,
    "papers or preserve_variance or cuts_the_way or any_number_of_steps",
    [
        ("cosine is not squared", "* np.pi / 2) ** 2", "* np.pi / 2)"),
        ("cosine has no offset", "np.cos((u + s) / (1 + s)", "np.cos(u"),
        ("cosine has no largest beta", "np.minimum(1 - f[1:] / f[:-1], max_beta)", "1 - f[1:] / f[:-1]"),
        ("cosine's betas are their complements", "1 - f[1:] / f[:-1], max_beta", "f[1:] / f[:-1], max_beta"),
        ("linear is of 1,000 steps", "steps) * (1000 / steps)", "steps)"),
        ("alpha is squared", "np.exp(log_alpha_bar / 2)", "np.exp(log_alpha_bar)"),
        ("sigma is squared", "np.sqrt(-np.expm1(log_alpha_bar))", "-np.expm1(log_alpha_bar)"),
        ("betas do not accumulate", "np.cumsum(np.log1p(-betas))", "np.log1p(-betas)"),
        ("karras's ramp is even", "sigma_max ** (1 / rho), steps) ** rho", "sigma_max ** (1 / rho), steps)"),
        ("karras's signal is not scaled", "alpha=1 / np.hypot(1, s)", "alpha=1 / (1 + s)"),
        ("sampling begins at the cleanest", "(schedule.steps - 1 - np.arange(steps)", "(np.arange(steps)"),
    ],
)  # fmt: skip

TARGETS = changes(
    _TARGETS,
    _TARGETS_TESTS,
    "tells_the_example or velocity or clipped_example",
    [
        ("velocity has the other sign", "-jnp.asarray(sigma))", "jnp.asarray(sigma))"),
        ("signal and noise change places", "_per_example(a, x) * x + _per_example(b, x) * y", "_per_example(b, x) * x + _per_example(a, x) * y"),
        ("eps tells an x0 that is not scaled", "(x - s * prediction) / a, prediction", "x - s * prediction, prediction"),
        ("eps is added", "(x - s * prediction) / a", "(x + s * prediction) / a"),
        ("x0 tells an eps that is not scaled", "(x - a * prediction) / s", "x - a * prediction"),
        ("v tells an x0 with the other sign", "a * x - s * prediction", "a * x + s * prediction"),
        ("v tells an eps with the other sign", "s * x + a * prediction", "s * x - a * prediction"),
        ("x0 has one bound", "jnp.clip(x0, -clip, clip)", "jnp.minimum(x0, clip)"),
        ("a clipped x0 leaves the old noise", "return x0, (x - a * x0) / s", "return x0, eps"),
    ],
)  # fmt: skip

LOSS = changes(
    _LOSS,
    _LOSS_TESTS,
    "min_snr_weights or weights_without or mean_square_error or stratified or any_target or uniform",
    [
        ("min-SNR has no gamma", "jnp.minimum(signal, gamma * noise)", "signal"),
        ("min-SNR is the larger", "jnp.minimum(signal, gamma * noise)", "jnp.maximum(signal, gamma * noise)"),
        ("eps has the weight of x0", 'if predicts == "eps" else (noise, gamma)', 'if predicts == "x0" else (noise, gamma)'),
        ("v has the weight of x0", "return least  # snr", "return least / noise  # snr"),
        ("errors are not squared", "jnp.square(error).mean", "jnp.abs(error).mean"),
        ("the weight is left out", "losses = losses * min_snr", "losses = 0 * losses + losses + 0 * min_snr"),
        ("stratified times are one time", " + jnp.arange(examples) / max(examples, 1)", " + jnp.zeros(examples)"),
        ("the last step is never drawn", "0, steps, jnp.int32", "0, steps - 1, jnp.int32"),
    ],
)  # fmt: skip

SAMPLERS = [
    *changes(
        _SAMPLERS,
        _SAMPLERS_TESTS,
        "step_is_the_papers or posterior or same_time",
        [
            ("eta is not squared", "drawn = eta**2 *", "drawn = eta *"),
            ("what is drawn is not taken off", "* np.sqrt(1 - drawn)", ""),
            ("x0 keeps the noise's part", "alpha_next - alpha * a, np", "alpha_next, np"),
            ("noise is a variance", "sigma_next * np.sqrt(drawn))", "sigma_next * drawn)"),
            ("DPM-Solver goes twice as far", "h[1:][finite] / (2 * h[:-1][finite])", "h[1:][finite] / h[:-1][finite]"),
            ("DPM-Solver's r is upside down", "h[1:][finite] / (2 * h[:-1][finite])", "h[:-1][finite] / (2 * h[1:][finite])"),
            ("DPM-Solver looks ahead the wrong way", "-b * extrapolation, d)", "b * extrapolation, d)"),
        ],
    ),
    *changes(
        _SAMPLERS,
        _SAMPLERS_TESTS,
        "key_folded or x0_is_clipped or nothing_to_extrapolate or denoiser_knows",
        [
            ("each step draws the same", "jax.random.fold_in(key, t), x.shape", "jax.random.clone(key), x.shape"),
            ("x0 is not clipped", "alpha, sigma, clip=clip)", "alpha, sigma)"),
            ("the last step is not clean", "np.append(sigma, 0.0)", "np.append(sigma, 0.1)"),
            ("steps are extrapolated into infinity", "finite = np.isfinite(h[1:])", "finite = np.ones(len(h) - 1, bool)"),
        ],
    ),
]  # fmt: skip

GUIDANCE = changes(
    _GUIDANCE,
    "tests/test_guidance.py",
    "goes_on_from or dropped",
    [
        ("the scale is one too large", "(jnp.asarray(scale) - 1).astype", "jnp.asarray(scale).astype"),
        ("guidance leads away", "more * (with_label - without)", "more * (without - with_label)"),
        ("labels are kept at the rate", "labels.shape), without, labels)", "labels.shape), labels, without)"),
    ],
)  # fmt: skip

MUTATIONS = [*SCHEDULES, *TARGETS, *LOSS, *SAMPLERS, *GUIDANCE]
