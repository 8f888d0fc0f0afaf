"""Layer norm, RMS norm, group norm, dynamic tanh, and a norm folded into the layer before it."""

from tests.mutations.mutation import changes

_NORM = "fnet/layers/norm.py"
_GROUP = "fnet/layers/group_norm.py"
_TANH = "fnet/layers/dynamic_tanh.py"
_FOLD = "fnet/layers/fold.py"
_TESTS = "tests/test_norm.py"
_GROUP_TESTS = "tests/test_group_norm.py"
_TANH_TESTS = "tests/test_feed_forward.py"

LAYER_NORM = [
    *changes(
        _NORM,
        _TESTS,
        "finite_differences or hessian",
        [
            ("the variance has no eps", "keepdims=True) + eps)", "keepdims=True))"),
            ("the mean is not taken off", "w = w - w.mean(-1, keepdims=True)", "pass"),
            ("the variance is a sum", "jnp.square(w).mean(-1", "jnp.square(w).sum(-1"),
            ("the bias is taken off", "+ spread(bias, x)", "- spread(bias, x)"),
            ("dx lacks the mean's part", "dx = dx - dxhat.mean(-1, keepdims=True)", "pass"),
            ("dx has the variance's part added", "dxhat - xhat * (dxhat", "dxhat + xhat * (dxhat"),
            ("dx lacks the deviation", "(dx * inv).astype", "dx.astype"),
            ("dx lacks the scale", "dz * spread(scale, y)", "dz"),
            ("dscale lacks xhat", "(dz * xhat).sum(rows)", "dz.sum(rows)"),
            ("xhat has the bias", "(widened(y) - spread(b, y))", "widened(y)"),
        ],
    ),
    *changes(
        _NORM,
        _TESTS,
        "hessian",
        [
            ("a second derivative lacks the scale", "(tangents[1] * s)", "tangents[1]"),
            (
                "a second derivative moves the parameters twice",
                "jax.lax.stop_gradient((never_zero(scale, y), bias.astype(inv.dtype)))",
                "(never_zero(scale, y), bias.astype(inv.dtype))",
            ),
        ],
    ),
    *changes(
        _NORM,
        _TESTS,
        "drowns_its_scale",
        [("noise is read as xhat", "jnp.where(readable, 1 / s, 0)", "1 / s")],
    ),
    *changes(
        _NORM,
        _TESTS,
        "a_scale_of_0",
        [("a scale of 0 is applied as 0", "jnp.copysign(floor, scale) - scale, 0)", "0.0, 0)")],
    ),
]  # fmt: skip

GROUP_NORM = changes(
    _GROUP,
    _GROUP_TESTS,
    "equal_flaxs",
    [
        ("the variance has no eps", "jnp.square(centered), groups) + eps", "jnp.square(centered), groups)"),
        ("the mean is not taken off", "centered = w - keep(_group_mean(w, groups))", "centered = w"),
        ("the variance is about 0", "_group_mean(jnp.square(centered)", "_group_mean(jnp.square(w)"),
        ("means are of all channels", "sums * (groups * n", "sums * (n"),
        ("the bias is taken off", "y = y + spread(bias", "y = y - spread(bias"),
    ],
)  # fmt: skip

DYNAMIC_TANH = [
    *changes(
        _TANH,
        _TANH_TESTS,
        "dynamic_tanh_equals_autodiff",
        [
            ("the bias is taken off", "+ spread(bias, x))", "- spread(bias, x))"),
            ("tanh has no derivative", "* spread(scale, y) * (1 - t * t)", "* spread(scale, y)"),
            ("dx lacks alpha", "(dz * a).astype(y.dtype)", "dz.astype(y.dtype)"),
            ("dalpha has alpha", "jnp.clip(t, -below_one, below_one)) / a", "jnp.clip(t, -below_one, below_one))"),
            ("dscale lacks t", "(dz * t).sum(rows)", "dz.sum(rows)"),
            ("t has the bias", "(widened(y) - b)", "widened(y)"),
        ],
    ),
    *changes(
        _TANH,
        _TANH_TESTS,
        "dynamic_tanh_is_finite or parameter_at_zero or reads_nothing",
        [
            ("t has no bound", "jnp.arctanh(jnp.clip(t, -below_one, below_one))", "jnp.arctanh(t)"),
            ("noise is read as t", "jnp.where(jnp.abs(s) > noise, 1 / s, 0)", "1 / s"),
        ],
    ),
    *changes(
        _NORM,
        _TANH_TESTS,
        "parameter_at_zero",
        [("a parameter of 0 is applied as 0", "jnp.copysign(floor, scale) - scale, 0)", "0.0, 0)")],
    ),
]  # fmt: skip

FOLD = changes(
    _FOLD,
    "tests/test_fold.py",
    "counts_twice or magnitude or folded_dense",
    [
        ("the variance has no eps", "rsqrt(var + eps)", "rsqrt(var)"),
        ("gamma has no eps", "jnp.abs(g) + eps", "jnp.abs(g)"),
        ("gamma keeps its sign", "jnp.abs(g) + eps", "g + eps"),
        ("the bias is not scaled", "(b - mean) * scale + offset", "b - mean * scale + offset"),
    ],
)

MUTATIONS = [*LAYER_NORM, *GROUP_NORM, *DYNAMIC_TANH, *FOLD]
