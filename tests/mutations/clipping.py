"""Clipped sums, single gradients and their statistics, noise, bounds that adapt, accumulation."""

from tests.mutations.mutation import changes

_CLIPPED = "fnet/autodiff/per_example/clipped.py"
_OUTER = "fnet/autodiff/per_example/ghost_norm.py"
_SHARES = "fnet/autodiff/per_example/parameter_gradients.py"
_MODES = "fnet/autodiff/per_example/modes.py"
_SINGLE = "fnet/autodiff/per_example.py"
_ADAPTIVE = "fnet/autodiff/per_example/adaptive.py"
_MEAN = "fnet/autodiff/mean.py"
_PARTS = "fnet/autodiff/accumulate.py"
_TESTS = "tests/test_clipped.py"
_VIEWS = "fnet/autodiff/per_example/views.py"
_FOLLOWED = "fnet/autodiff/per_example/batch_axis.py"
_RULES = "fnet/autodiff/per_example/axis_rules.py"
_SINGLE_TESTS = "tests/test_per_example.py"
_MODE_TESTS = "tests/test_modes.py"
_ADAPTIVE_TESTS = "tests/test_adaptive.py"
_PARTS_TESTS = "tests/test_accumulate.py"
_SCALE = "s = jnp.where(norm > bound, bound / jnp.where(norm > bound, norm, 1), 1)"
_COUNTED = "jnp.where(real & finite, s, 0)"

BOUND = [
    *changes(
        _CLIPPED,
        _TESTS,
        "golden or padding or nothing_normalises or on_their_own or automatic",
        [
            ("nothing is clipped", _SCALE, "s = jnp.ones_like(norm)"),
            ("short gradients are made longer", _SCALE, "s = bound / norm"),
            ("long gradients are clipped to 1", _SCALE, _SCALE.replace("bound / jnp", "1 / jnp")),
            ("the norm is squared", "norm = jnp.sqrt(square)", "norm = square"),
            ("padding counts", _COUNTED, "jnp.where(finite, s, 0)"),
            ("rescaled gradients of any length have norm 1", "longer = jnp.maximum(norm, bound)", "longer = norm"),
            ("automatic clipping has no constant", "/ (norm + automatic)", "/ norm"),
            ("each layer has the whole bound", "clip / max(len(leaves), 1) ** 0.5", "clip"),
            ("norms are told squared", "jnp.where(real, jnp.sqrt(whole), 0)", "jnp.where(real, whole, 0)"),
        ],
    ),
    *changes(
        _CLIPPED,
        _TESTS,
        "not_finite and dense_over_time",
        [
            ("an infinite gradient counts", _COUNTED, "jnp.where(real, s, 0)"),
            ("infinite gradients are not counted", "(real & ~finite).sum()", "(~real).sum()"),
        ],
    ),
    *changes(
        _OUTER,
        _TESTS,
        "not_finite and fnet_mlp",
        [
            ("0 times infinity is nan", "jnp.where(real.all(), 0, parts)", "0"),
            ("0 times nan is nan", "jnp.where(real[:, None], v * rows[:, None].astype(v.dtype), 0)", "v * rows[:, None].astype(v.dtype)"),
        ],
    ),
]  # fmt: skip

NORMS = [
    *changes(
        _OUTER,
        _TESTS,
        "loop_over_examples and (dense or tied_embedding) and not transformer",
        [
            ("a product's norm is one factor's", "_squared_lengths(u) * _squared_lengths(v)", "_squared_lengths(u)"),
            ("sums are not scaled", "v * rows[:, None].astype(v.dtype)", "v"),
        ],
    ),
    *changes(
        _OUTER,
        _TESTS,
        "loop_over_examples and fnet_transformer",
        [("Gram matrices are added", "(_gram(u, u) * _gram(v, v)).sum", "(_gram(u, u) + _gram(v, v)).sum")],
    ),
    *changes(
        _SHARES,
        _TESTS,
        "loop_over_examples and tied_embedding",
        [("two uses meet once", "2 * outer.inner_products", "outer.inner_products")],
    ),
    *changes(
        _SHARES,
        _TESTS,
        "golden or not_finite",
        [("made shares of 0 are nan", "jnp.where(scales[:, None] != 0, rows, 0)", "rows")],
    ),
]  # fmt: skip

FOLLOWED = [
    *changes(
        _VIEWS,
        _TESTS,
        "loop_over_examples and scaled_by_numbers",
        [
            ("what scales a parameter is forgotten", "cotangent if self.scale == 1 else cotangent * self.scale", "cotangent"),
            ("the last number alone scales", "scale=self.scale * scale", "scale=scale"),
            ("division multiplies", "return 1 / c", "return c"),
            ("what is taken away has the wrong sign", 'case "sub", float(), None:\n            return -1.0', 'case "sub", float(), None:\n            return 1.0'),
        ],
    ),
    *changes(
        _FOLLOWED,
        "tests/test_clipped_refused.py",
        "mistakes_are_named",
        [
            ("backward rules are not looked at", "if not own or not ends:", "if True:"),
            ("a loop is looked at once", "if met == carry:", "if True:"),
        ],
    ),
    *changes(
        _RULES,
        "tests/test_clipped_refused.py",
        "mistakes_are_named",
        [("pairs of examples are taken for examples", "return MIXED if found == UNKNOWN else found", "return found")],
    ),
]  # fmt: skip

SINGLE = [
    *changes(
        _SINGLE,
        _SINGLE_TESTS,
        "noise_scale",
        [
            ("the true gradient's square is biased", "(count * whole - squares) / (count - 1)", "whole"),
            ("the variance is biased", "(squares - whole) * count / (count - 1)", "squares - whole"),
            ("padding counts", "jnp.where(real, jnp.square(norms), 0).sum()", "jnp.square(norms).sum()"),
            ("norms are not squared", "jnp.where(real, jnp.square(norms), 0)", "jnp.where(real, norms, 0)"),
        ],
    ),
    *changes(
        _SINGLE,
        _SINGLE_TESTS,
        "convolutions_of_all_shapes",
        [
            (
                "norms are squared",
                "return (jnp.sqrt(squares), found.aux) if has_aux else jnp.sqrt(squares)",
                "return (squares, found.aux) if has_aux else squares",
            )
        ],
    ),
]  # fmt: skip

PRIVATE = [
    *changes(
        _MODES,
        _MODE_TESTS,
        "noise_has_the_deviation or noise_is_added",
        [
            ("noise is not in units of the bound", "noise_multiplier * clip if", "noise_multiplier if"),
            ("noise is of the batch's size", "g / (size or jnp.maximum(counts.sum(), 1)), sums)", "g / jnp.maximum(counts.sum(), 1), sums)"),
            ("noise replaces the gradient", "(g + deviation * jax", "(deviation * jax"),
            ("all parameters have the same noise", "jax.random.fold_in(key, i), g.shape", "jax.random.clone(key), g.shape"),
        ],
    ),
    *changes(
        _MODES,
        _MODE_TESTS,
        "modes_give_the_mean or microbatches_of_a_private or leaves_the_metrics",
        [
            ("the last microbatch alone counts", "jax.tree.map(jnp.add, sums, more), info", "more, info"),
            ("padding counts in metrics", "counts if weight is None else counts & (weight != 0)", "counts"),
            ("an infinite gradient counts in metrics", "counts = jnp.isfinite(info.norms)", "counts = jnp.ones(info.norms.shape, bool)"),
            ("the sum is not averaged", "g / jnp.maximum(counts.sum(), 1), sums)\n            metrics", "g, sums)\n            metrics"),
        ],
    ),
]  # fmt: skip

ADAPTIVE = [
    *changes(
        _ADAPTIVE,
        _ADAPTIVE_TESTS,
        "geometric_rule or second_step or no_vote",
        [
            ("the bound goes the wrong way", "jnp.exp(-learning_rate", "jnp.exp(learning_rate"),
            ("the bound moves by a sum", "clip * jnp.exp(-learning_rate * (below - quantile))", "clip - learning_rate * (below - quantile)"),
            ("the share begins at 0", "below = 0.5 + (", "below = ("),
            ("votes are of who is above", "norms <= clip, 0.5, -0.5", "norms <= clip, -0.5, 0.5"),
            ("padding votes", "0.5, -0.5) * real", "0.5, -0.5)"),
            ("the first bound is used for ever", "functools.partial(bounded, clip=clip)", "bounded"),
        ],
    ),
    *changes(
        _ADAPTIVE,
        _ADAPTIVE_TESTS,
        "spend_what or deviations",
        [
            ("the count spends a quarter", "(2 * self._count_noise) ** -2", "self._count_noise**-2"),
            ("noise is not in units of the bound", "self.gradient_noise * clip if", "self.gradient_noise if"),
            ("the count has no noise", "(votes.sum() + noise) / size", "votes.sum() / size"),
            ("count and gradients share their noise", "count_key = jax.random.split(noise_key)", "count_key = noise_key, jax.random.fold_in(jax.random.clone(noise_key), 0)"),
        ],
    ),
]  # fmt: skip

MEAN = [
    *changes(
        _MEAN,
        "tests/test_step.py",
        "padding_with_weight_0 or all_weights_0",
        [
            ("the mean is over padding too", "/ jnp.maximum(whole, 1e-12)", "/ weight.size"),
            ("infinite padding counts", "jnp.where(weight != 0, values * weight, 0)", "(values * weight)"),
            ("no weight is 0 by 0", "jnp.maximum(whole, 1e-12)", "weight.sum()"),
        ],
    ),
    *changes(
        _PARTS,
        _PARTS_TESTS,
        "those_of_the_whole_batch or folded_with_i or golden_values",
        [
            ("parts are added, not averaged", "jnp.full(n, 1 / n)", "jnp.ones(n)"),
            ("all parts count the same", "return sums / jnp.maximum(sums.sum(), 1e-12)", "return jnp.full(n, 1 / n)"),
            ("metrics are of equal parts", "(shares * m).sum().astype", "m.mean().astype"),
            ("all parts draw the same", "else jax.random.fold_in(key, i)", "else jax.random.clone(key)"),
            ("no weight is 0 by 0", "jnp.maximum(sums.sum(), 1e-12)", "sums.sum()"),
        ],
    ),
]  # fmt: skip

MUTATIONS = [*BOUND, *NORMS, *FOLLOWED, *SINGLE, *PRIVATE, *ADAPTIVE, *MEAN]
