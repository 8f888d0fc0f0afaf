"""The train step: randomness, the average, the guard; the optimizer inside the backward pass."""

from tests.mutations.mutation import changes

_STEP = "fnet/step.py"
_UPDATE = "fnet/autodiff/update.py"
_INSIDE = "fnet/autodiff/in_backward.py"
_SCAN = "fnet/autodiff/updating_scan.py"
_TESTS = "tests/test_step.py"
_INSIDE_TESTS = "tests/test_optimizer_in_backward.py"
_FINITE = 'jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])'

STEP = [
    *changes(
        _STEP,
        _TESTS,
        "ema_follows",
        [
            ("the average follows at once", "step_size=1 - self.ema_decay", "step_size=self.ema_decay"),
            ("the average is of the old parameters", "incremental_update(params, ema", "incremental_update(state.params, ema"),
        ],
    ),
    *changes(
        _STEP,
        _TESTS,
        "optimizer_applied_to_the_mean or randomness",
        [
            ("every step draws the same", "jax.random.fold_in(state.key, state.step)", "jax.random.clone(state.key)"),
            ("steps are not counted", "step=state.step + 1", "step=state.step"),
            ("the model's state is not renewed", '"model_state": model_state,', '"model_state": state.model_state,'),
        ],
    ),
    *changes(
        _STEP,
        _TESTS,
        "guard_looks",
        [
            ("a gradient that is not finite is applied", _FINITE, 'jnp.isfinite(metrics["loss"])'),
            ("a loss that is not finite is applied", _FINITE, 'jnp.isfinite(metrics["grad_norm"])'),
        ],
    ),
    *changes(
        _STEP,
        "tests/test_guard.py",
        "a_finite_step",
        [
            ("finite steps are left out", "jnp.where(finite, a, b)", "jnp.where(finite, b, a)"),
            ("skipped is told of finite steps", "(~finite).astype", "finite.astype"),
        ],
    ),
    *changes(
        _UPDATE,
        _TESTS,
        "optimizer_applied_to_the_mean",
        [
            ("the norm is squared", "norm = jnp.sqrt(jnp.asarray(sum(", "norm = jnp.asarray((sum("),
            ("the gradient is applied as it is", "optax.apply_updates(params, updates)", "optax.apply_updates(params, grads)"),
        ],
    ),
]  # fmt: skip

INSIDE = [
    *changes(
        _SCAN,
        _INSIDE_TESTS,
        "after_the_gradient and momentum or what_is_trained",
        [
            ("the norm is of the last layer", "squares = owned.squares + squared", "squares = 0 * owned.squares + squared"),
            ("layers go forwards", "start, xs, reverse=True)", "start, xs)"),
            ("what layers close over gets the last one's gradient", "jax.tree.map(jnp.add, dclosed, more)", "more"),
        ],
    ),
    *changes(
        _INSIDE,
        _INSIDE_TESTS,
        "after_the_gradient and momentum",
        [
            ("the norm lacks the stacks", " + sum(own.squares for own in renewed)", ""),
            ("the norm is squared", '{"grad_norm": jnp.sqrt(squares)}', '{"grad_norm": squares}'),
            ("the stacks stay as they are", "        new |= own.arrays\n", "        new |= {n: old[n] for n in own.arrays}\n"),
        ],
    ),
]  # fmt: skip

MUTATIONS = [*STEP, *INSIDE]
