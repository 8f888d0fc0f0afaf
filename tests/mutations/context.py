"""The attention context: how it is read, found and averaged; the blocks that pass it on."""

from tests.mutations.mutation import changes

_CONTEXT = "fnet/layers/attention_context.py"
_STACK = "fnet/layers/stack.py"
_TESTS = "tests/test_attention_context.py"
_READ = "return x + scale.astype(x.dtype) * (x @ context)"
_AVERAGE = "(1 - rate) * context + rate * mean"

READ = changes(
    _CONTEXT,
    _TESTS,
    "apply_and_its_gradients or finite_differences",
    [
        ("the strength is not divided by the width", "widened(jnp.asarray(strength)) / x.shape[-1]", "widened(jnp.asarray(strength))"),
        ("the context's part is taken off", _READ, _READ.replace("x +", "x -")),
        ("the context takes the place of x", _READ, _READ.replace("x + ", "")),
        ("the context is transposed", _READ, _READ.replace("context", "context.T")),
        ("dx lacks the context's part", "scale.astype(x.dtype) * dx + broad", "broad"),
        ("dx lacks its own part", "dx + dscaled @ context", "dscaled @ context"),
        ("the strength has no gradient", " + broadcast_like(dscale, x) * x", ""),
    ],
)  # fmt: skip

RENEWED = [
    *changes(
        _CONTEXT,
        _TESTS,
        "contracts_formula and not float64",
        [
            ("old and new have each other's weight", _AVERAGE, "rate * context + (1 - rate) * mean"),
            ("the old does not decay", _AVERAGE, "context + rate * mean"),
            ("the rate is another", "RATE = 0.01", "RATE = 0.1"),
            ("columns are not centred", "rows - mean, 0)", "rows, 0)"),
            ("no tanh", "jnp.tanh(jnp.clip(jnp.where(known, corr, 0), -1, 1))", "jnp.clip(jnp.where(known, corr, 0), -1, 1)"),
            ("lengths are squared", "(jnp.sqrt(jnp.square(a).sum(1)) for a", "(jnp.square(a).sum(1) for a"),
            ("correlations are transposed", '"bri,brj->bij"', '"bri,brj->bji"'),
            ("rows are next to each other", "[:, ::stride][:, :ROWS]", "[:, :ROWS]"),
            ("all rows are looked at", "[:, ::stride][:, :ROWS]", "[:, ::stride]"),
            ("a sum over examples", "total / jnp.maximum(count, 1).astype(total.dtype)", "total"),
        ],
    ),
    *changes(
        _CONTEXT,
        _TESTS,
        "no_gradient_flows",
        [("a gradient flows through", "jax.lax.stop_gradient(a)[:, ::stride]", "a[:, ::stride]")],
    ),
    *changes(
        _CONTEXT,
        _TESTS,
        "constant_columns",
        [("constant columns correlate", "seen & (highest > lowest)", "seen")],
    ),
    *changes(
        _CONTEXT,
        _TESTS,
        "not_finite or overflow or below_the_bound",
        [
            ("rows that are not finite count", "rows = jnp.where(finite, rows, 0)", "pass"),
            ("correlations need not be finite", "(denominator > 1e-12) & jnp.isfinite(corr)", "denominator > 1e-12"),
            ("the denominator's bound is another", "(denominator > 1e-12) & jnp.isfinite(corr)", "(denominator > 1e-8) & jnp.isfinite(corr)"),
            ("the denominator has no bound", "(denominator > 1e-12) & jnp.isfinite(corr)", "jnp.isfinite(corr)"),
        ],
    ),
    *changes(
        _CONTEXT,
        _TESTS,
        "masked_examples",
        [
            ("masked tokens count in the mean", "mean = jnp.where(seen, rows, 0).sum", "mean = rows.sum"),
            ("masked tokens correlate", "seen & (highest > lowest)", "(highest > lowest)"),
            ("masked examples count", "count = real.sum()", "count = jnp.asarray(real.size)"),
            ("with nothing left the context decays", f"jnp.where(count > 0, {_AVERAGE}, context)", _AVERAGE),
        ],
    ),
    *changes(
        _CONTEXT,
        _TESTS,
        "a_few_at_a_time",
        [("the last few examples alone count", "(total + some(*xy), None)", "(some(*xy), None)")],
    ),
]  # fmt: skip

PASSED_ON = changes(
    _STACK,
    "tests/test_stack.py",
    "its_equations",
    [
        ("a lagged context is of this step", 'here = new if context == "current" else here', "here = new"),
        ("a current context is of the step before", 'here = new if context == "current" else here', "pass"),
        ("a block's context is of its own input", "update_context(here, taken, given", "update_context(here, x, given"),
        ("a mixer reads what no norm has seen", 'mix(before("mixer", x))', "mix(x)"),
        ("a mixer's output takes the place of x", 'x = added("mixer", x, mixed)', "x = mixed"),
        ("a scale of 0 gives 0", "return add(multiply(h, 1 + scale), shift)", "return add(multiply(h, scale), shift)"),
        ("a shift is taken off", "return add(multiply(h, 1 + scale), shift)", "return add(multiply(h, 1 + scale), -shift)"),
        ("a branch is scaled by its shift", "multiply(y, modulation[branch][2])", "multiply(y, modulation[branch][1])"),
        ("a condition is not activated", "jax.nn.silu(condition).astype", "condition.astype"),
    ],
)  # fmt: skip

MUTATIONS = [*READ, *RENEWED, *PASSED_ON]
