"""In-place activated batch norm: forward, backward, statistics, and each activation's inverse."""

from tests.mutations.mutation import changes

_ABN = "fnet/layers/abn.py"
_ACTIVATIONS = "fnet/layers/activations.py"
_TESTS = "tests/test_abn.py"
_DEVICES = "tests/test_abn_devices.py"
_MEAN = "mean = spec.over_devices(spec.sum(_real_rows(mask, w))) / n"
_VARIANCE = "var = spec.over_devices(spec.sum(jnp.square(deviation))) / n"
_DEVIATION = "deviation = _real_rows(mask, w - spec.spread(mean, w))"
_Z = "z = (w - spec.spread(mean, w)) * spec.spread(inv * g, w) + spec.spread(beta, w)"
_MAGNITUDE = "jnp.where(gamma < 0, -gamma, gamma) + eps"

FORWARD = [
    *changes(
        _ABN,
        _TESTS,
        "defining_formula and elu",
        [
            ("the variance has no eps", "rsqrt(var + spec.eps)", "rsqrt(var)"),
            ("the mean is not taken off", _Z, _Z.replace("(w - spec.spread(mean, w))", "w")),
            ("beta is taken off", _Z, _Z.replace(" + ", " - ")),
            ("gamma has no eps", _MAGNITUDE, "jnp.where(gamma < 0, -gamma, gamma)"),
            ("gamma keeps its sign", _MAGNITUDE, "gamma + eps"),
            ("the variance is about 0", _DEVIATION, "deviation = _real_rows(mask, w)"),
            ("the variance is over n - 1", _VARIANCE, _VARIANCE.replace("/ n", "/ (n - 1)")),
            ("the mean is a sum", _MEAN, _MEAN.replace(" / n", "")),
        ],
    ),
    *changes(
        _ABN,
        _TESTS,
        "derivative_at_gamma_0",
        [
            (
                "the derivative at gamma 0 is -1",
                _MAGNITUDE,
                "jnp.where(gamma > 0, gamma, -gamma) + eps",
            )
        ],
    ),
    *changes(
        _ABN,
        _TESTS,
        "narrow_inputs_are_not_rounded",
        [("statistics are in the dtype of x", "    w = widened(x)\n", "    w = x\n")],
    ),
]

MASK = changes(
    _ABN,
    _TESTS,
    "masked and sigmoid or masked and leaky_relu",
    [
        ("padding counts in n", "n = mask.sum(dtype=w.dtype) * (", "n = mask.size * ("),
        ("positions do not count in n", " * (samples // x.shape[0])", ""),
        ("padding counts in the mean", "spec.sum(_real_rows(mask, w))", "spec.sum(w)"),
        ("padding counts in the variance", _DEVIATION, "deviation = w - spec.spread(mean, w)"),
        ("padding comes out as it is", "keep(_real_rows(mask, y))", "keep(y)"),
        (
            "padding comes out activated",
            "_real_rows(mask, act.forward(y, activation_param))",
            "act.forward(y, activation_param)",
        ),
        (
            "padding counts in the gradient",
            "dz = _real_rows(mask, widened(dy) * slope)",
            "dz = widened(dy) * slope",
        ),
        (
            "padding receives a gradient",
            "_real_rows(mask, dx * spec.spread(inv * g, z))",
            "dx * spec.spread(inv * g, z)",
        ),
    ],
)

BACKWARD = [
    *changes(
        _ABN,
        _TESTS,
        "defining_formula and elu",
        [
            ("dx lacks the variance's part", " - xhat * next(means)", ""),
            (
                "dx lacks the mean's part",
                "dx = dx - next(means) - xhat",
                "next(means)\n        dx = dx - xhat",
            ),
            ("dx has the variance's part added", "- xhat * next(means)", "+ xhat * next(means)"),
            ("dx lacks gamma", "dx * spec.spread(inv * g, z)", "dx * spec.spread(inv, z)"),
            ("dx lacks the deviation", "dx * spec.spread(inv * g, z)", "dx * spec.spread(g, z)"),
            ("dgamma lacks xhat", "spec.sum(dz), spec.sum(dz * xhat)", "spec.sum(dz), spec.sum(dz)"),
            ("xhat has beta", "(z - spec.spread(beta, z)) / spec", "z / spec"),
            ("xhat has gamma", "(z - spec.spread(beta, z)) / spec.spread(g, z)", "z - spec.spread(beta, z)"),
            ("the activation has no slope", "widened(dy) * slope", "widened(dy)"),
        ],
    ),
    *changes(
        _ABN,
        _TESTS,
        "evaluation_uses_the_running",
        [("running statistics move with x", "None if statistics else n)", "n)")],
    ),
]  # fmt: skip

STATISTICS = [
    *changes(
        _ABN,
        _TESTS,
        "running_statistics_move",
        [
            (
                "old and new have each other's weight",
                "jnp.asarray(decay, old.dtype) * old",
                "(1 - jnp.asarray(decay, old.dtype)) * old",
            ),
            (
                "the new statistics have the old ones' weight",
                "(1 - jnp.asarray(decay, new.dtype))",
                "jnp.asarray(decay, new.dtype)",
            ),
            (
                "the running variance is biased",
                "unbiased = var * (n / jnp.maximum(n - 1, 1))",
                "unbiased = var",
            ),
        ],
    ),
    *changes(
        _ABN,
        _TESTS,
        "cumulative_average",
        [
            (
                "a cumulative average forgets the old",
                'old_weight = 1 - 1 / state["count"]',
                'old_weight = 1 / state["count"]',
            ),
            ("batches are not counted", 'state["count"] + 1', 'state["count"]'),
        ],
    ),
]

SYNCHRONISED = changes(
    _ABN,
    _DEVICES,
    "gradients_outside_shard_map",
    [
        ("each device has its own mean", _MEAN, "mean = spec.sum(_real_rows(mask, w)) / n"),
        ("each device has its own variance", _VARIANCE, "var = spec.sum(jnp.square(deviation)) / n"),
        ("each device counts its own samples", "spec.over_devices(n), 1", "n, 1"),
        ("each device has its own part of dx", "spec.over_devices(s * g) / (n * g)", "s / n"),
    ],
)  # fmt: skip

INVERSES = [
    *changes(
        _ACTIVATIONS,
        _TESTS,
        "defining_formula and leaky_relu",
        [
            ("leaky_relu's inverse multiplies", "y / slope", "y * slope"),
            (
                "leaky_relu's slope is that of the inverse",
                "jnp.where(negative, slope, 1.0)",
                "jnp.where(negative, 1 / slope, 1.0)",
            ),
        ],
    ),
    *changes(
        _ACTIVATIONS,
        _TESTS,
        "float16_output_that_underflowed",
        [("leaky_relu's slope at -0.0 is 1", "negative = jnp.signbit(y)", "negative = y < 0")],
    ),
    *changes(
        _ACTIVATIONS,
        _TESTS,
        "defining_formula and elu",
        [
            ("elu's inverse has no alpha", "jnp.minimum(y, 0) / alpha", "jnp.minimum(y, 0)"),
            ("elu's slope has no alpha", "1.0, y + alpha)", "1.0, y + 1)"),
        ],
    ),
    *changes(
        _ACTIVATIONS,
        _TESTS,
        "saturated_elu",
        [("elu's inverse has no bound", "/ alpha, _least_elu(1, y.dtype))", "/ alpha, -1.0)")],
    ),
    *changes(
        _ACTIVATIONS,
        _TESTS,
        "defining_formula and softplus",
        [
            ("softplus's inverse lacks y", "return positive + jnp.log(", "return jnp.log("),
            ("softplus's slope has the other sign", ", -jnp.expm1(-y)", ", jnp.expm1(-y)"),
        ],
    ),
    *changes(
        _ACTIVATIONS,
        _TESTS,
        "softplus and outlier",
        [
            (
                "softplus's inverse has no bound",
                "positive = jnp.maximum(y, jnp.finfo(y.dtype).tiny)",
                "positive = y",
            )
        ],
    ),
    *changes(
        _ACTIVATIONS,
        "tests/test_linear_conv.py",
        "activation_alone",
        [
            (
                "an activation's tangent is times its inverse",
                "tangents[0] * inverse(y, param)[1]",
                "tangents[0] * inverse(y, param)[0]",
            )
        ],
    ),
]

MUTATIONS = [*FORWARD, *MASK, *BACKWARD, *STATISTICS, *SYNCHRONISED, *INVERSES]
