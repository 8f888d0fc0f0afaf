"""The gradient modes clipped and per_example."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import B

import fnet
from fnet import autodiff, layers

pytestmark = pytest.mark.usefixtures("allow_rank_promotion")

MODEL = layers.mlp([4, 8, 3])


def model_loss(params, state, batch, key):
    logits, state = MODEL.apply(params, state, batch["x"], key=key, train=True)
    losses = fnet.losses.cross_entropy(logits, batch["label"])
    return losses, fnet.Aux(state, {"accuracy": fnet.losses.accuracy(logits, batch["label"])})


def batch(weight=None):
    x = jax.random.normal(jax.random.key(0), (B, 4))
    arrays = {"x": x, "label": jnp.arange(B) % 3}
    return arrays if weight is None else arrays | {"weight": jnp.asarray(weight, jnp.float32)}


def gradient(mode, batch):
    params, state = MODEL.init(jax.random.key(1))
    return jax.jit(mode(model_loss))(params, state, batch, jax.random.key(2))


@pytest.mark.parametrize(
    ("mode", "weight"),
    [
        (autodiff.per_example(), [1, 0, 1, 1, 0, 1]),
        (autodiff.clipped(1e6), [0, 0, 1, 0, 0, 0]),
        (autodiff.clipped(float("inf")), None),
    ],
)
def test_modes_give_the_mean_gradient_without_a_bound(mode, weight):
    grads, _, metrics = gradient(mode, batch(weight))
    expected, _, means = gradient(autodiff.mean, batch(weight))
    chex.assert_trees_all_close(grads, expected, rtol=1e-5, atol=1e-6)
    for name, value in means.items():
        chex.assert_trees_all_close(metrics[name], value, rtol=1e-5)


def test_microbatches_do_not_change_clipped_gradients():
    weight = [1, 0, 1, 1, 0, 1]
    whole = gradient(autodiff.clipped(0.5), batch(weight))
    parts = gradient(autodiff.clipped(0.5, microbatches=3), batch(weight))
    chex.assert_trees_all_close(parts, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mode", [autodiff.microbatches(3), autodiff.clipped(1e6), autodiff.clipped(1e6, microbatches=3)]
)
def test_each_example_of_each_microbatch_draws_its_own_numbers(mode):
    def loss(params, state, batch, key):
        return batch["x"] @ params * jax.random.normal(key, (len(batch["x"]),)), fnet.Aux(state, {})

    grads, *_ = jax.jit(mode(loss))(jnp.ones(B), {}, {"x": jnp.eye(B)}, jax.random.key(3))
    assert len(np.unique(np.abs(grads).round(5))) == B


def test_errors_name_nested_arrays():
    batch = {"inputs": {"ids": jnp.ones(B), "mask": jnp.ones(4)}}
    with pytest.raises(ValueError, match=r"'inputs.ids': \(6,\), 'inputs.mask': \(4,\)"):
        autodiff.microbatches(2)(model_loss)({}, {}, batch, jax.random.key(0))


PRIVATE = {"clipped": autodiff.clipped, "AdaptiveClipping": autodiff.AdaptiveClipping}


@pytest.mark.parametrize(("name", "mode"), PRIVATE.items())
def test_rejects_a_batch_that_microbatches_do_not_divide(name, mode):
    mode, rule = mode(1.0, microbatches=4), optax.sgd(0.1)
    rule = mode.wrap_optimizer(rule) if name == "AdaptiveClipping" else rule
    state = fnet.TrainState.create(MODEL, rule, jax.random.key(0))
    with pytest.raises(
        ValueError,
        match=f"^{name}: 4 microbatches do not divide a batch of 6 examples; pad it to 8 examples, "
        r"with weight 0, as PoissonSampling\(..., multiple=4\) does",
    ):
        jax.eval_shape(fnet.make_step(model_loss, rule, mode), state, batch())


def test_gradients_have_the_dtype_of_the_parameters():
    model = fnet.Layer(lambda key: (jnp.ones(2, jnp.bfloat16), {}), None)

    def loss(params, state, batch, key):
        return (params * batch["x"]).sum(-1), fnet.Aux(state, {})

    rule, x = optax.sgd(0.25, momentum=0.5), {"x": jnp.ones((B, 2))}
    state = fnet.TrainState.create(model, rule, jax.random.key(0))
    step = fnet.make_step(loss, rule, autodiff.per_example())
    step = fnet.compile_step(step, state, x, compiler_options={})
    state, _ = step(state, x)  # Params of another dtype would not fit the compiled step.
    state, _ = step(state, x)
    chex.assert_trees_all_equal(state.params, jnp.full(2, 1 - 0.25 - 0.375, jnp.bfloat16))


def test_sums_are_accumulated_in_float32():
    def loss(params, state, batch, key):
        return (params * batch["x"]).sum(-1), fnet.Aux(state, {})

    params, x = jnp.ones(1, jnp.bfloat16), {"x": jnp.ones((512, 1))}
    run = jax.jit(autodiff.clipped(1.0, expected_batch_size=512, microbatches=512)(loss))
    grads, _, _ = run(params, {}, x, jax.random.key(0))  # In bfloat16, 256 + 1 = 256.
    chex.assert_trees_all_equal(grads, params)


def test_state_as_long_as_a_microbatch_is_not_averaged():
    def loss(params, state, batch, key):
        return (params * batch["x"] * state["scale"]).sum(-1), fnet.Aux(state, {})

    state = {"scale": jnp.array([2.0, 3.0])}  # Microbatches have 2 examples.
    run = jax.jit(autodiff.clipped(1.0, microbatches=3)(loss))
    _, new_state, _ = run(jnp.ones(2), state, {"x": jnp.ones((B, 2))}, jax.random.key(0))
    chex.assert_trees_all_equal(new_state, state)


def averages(params, state, batch, key):
    mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)
    return (params * batch["x"]).sum(-1), fnet.Aux({"mean": mean}, {})


@pytest.mark.parametrize("parts", [1, 3])
def test_rejects_noise_if_the_state_depends_on_examples(parts):
    state, x = {"mean": jnp.zeros(2)}, {"x": jnp.ones((B, 2))}
    options = {"expected_batch_size": B, "microbatches": parts}
    run = jax.jit(autodiff.clipped(1.0, **options)(averages))
    _, new_state, _ = run(jnp.ones(2), state, x, jax.random.key(0))
    chex.assert_trees_all_close(new_state, {"mean": jnp.full(2, 0.1)})
    private = autodiff.clipped(1.0, noise_multiplier=1.0, **options)(averages)
    with pytest.raises(
        ValueError, match=r"clipped: the model state \['mean'\] depends on the exam"
    ):
        private(jnp.ones(2), state, x, jax.random.key(0))


def replaces_state(params, state, batch, key):
    return (params * batch["x"]).sum(-1), fnet.Aux({"last": batch["x"]}, {})


def counts_steps(params, state, batch, key):
    drawn = jax.random.uniform(key)
    return (params * batch["x"]).sum(-1), fnet.Aux({"n": state["n"] + 1, "drawn": drawn}, {})


def private_gradients(loss, state):
    """Functions that compute the new model state, by private mode."""
    options = {"noise_multiplier": 1.0, "expected_batch_size": B}
    adaptive = autodiff.AdaptiveClipping(1.0, **options, count_noise=B)
    wrapped = adaptive.wrap_optimizer(optax.sgd(0.1))
    args = jnp.ones(2), state, {"x": jnp.ones((B, 2))}
    yield "clipped", lambda: autodiff.clipped(1.0, **options)(loss)(*args, jax.random.key(0))[1]
    yield (
        "AdaptiveClipping",
        lambda: adaptive.update(loss, wrapped)(
            args[0], wrapped.init(args[0]), *args[1:], jax.random.key(0)
        )[2],
    )


def test_rejects_noise_if_the_state_is_replaced_by_examples():
    for name, run in private_gradients(replaces_state, {"last": jnp.zeros((B, 2))}):
        with pytest.raises(ValueError, match=rf"{name}: the model state \['last'\] depends on the"):
            run()


def test_state_that_does_not_depend_on_examples_is_updated_with_noise():
    for _, run in private_gradients(counts_steps, {"n": jnp.int32(3), "drawn": jnp.zeros(())}):
        assert run()["n"] == 4


def test_state_that_depends_on_the_batch_is_averaged():
    def loss(params, state, batch, key):
        mean = fnet.Aux({"mean": batch["x"].mean(0)}, {})
        return (params * batch["x"]).sum(-1), mean

    run = jax.jit(autodiff.clipped(1.0, microbatches=3)(loss))
    x = jnp.arange(float(B)).reshape(B, 1)
    _, new_state, _ = run(jnp.ones(1), {"mean": jnp.zeros(1)}, {"x": x}, jax.random.key(0))
    chex.assert_trees_all_close(new_state, {"mean": x.mean(0)})


def test_noise_has_the_given_deviation_and_a_new_key_each_step():
    mode = autodiff.clipped(0.5, noise_multiplier=3.0, expected_batch_size=10)
    without_noise, _, _ = gradient(autodiff.clipped(0.5, expected_batch_size=10), batch())
    run = jax.jit(mode(model_loss))
    params, state = MODEL.init(jax.random.key(1))
    draws = [run(params, state, batch(), jax.random.key(i))[0] for i in range(200)]
    noise = jax.tree.map(lambda *g: np.stack(g[1:]) - g[0], without_noise, *draws)
    values = np.concatenate([np.ravel(n) for n in jax.tree.leaves(noise)])
    assert values.std() == pytest.approx(3 * 0.5 / 10, rel=0.03)
    assert values.mean() == pytest.approx(0, abs=0.006)  # 4 deviations of the mean
    assert np.unique(values).size > 0.99 * values.size


def test_metrics_stay_finite_with_a_nonfinite_example():
    bad = batch()
    bad["x"] = bad["x"].at[1].set(jnp.nan)
    for mode in (autodiff.per_example(), autodiff.clipped(0.5)):
        grads, _, metrics = gradient(mode, bad)
        chex.assert_tree_all_finite((grads, metrics))
        assert metrics["nonfinite"] == 1


def test_batch_of_padding_gives_a_zero_gradient():
    grads, _, metrics = gradient(autodiff.clipped(0.5), batch(np.zeros(B)))
    chex.assert_trees_all_equal(grads, jax.tree.map(jnp.zeros_like, grads))
    chex.assert_tree_all_finite(metrics)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_batch_of_padding_does_not_change_the_state(microbatches):
    run = jax.jit(autodiff.clipped(1.0, microbatches=microbatches)(averages))
    state, padding = {"mean": jnp.full(2, 3.0)}, {"x": jnp.ones((B, 2)), "weight": jnp.zeros(B)}
    _, new_state, _ = run(jnp.ones(2), state, padding, jax.random.key(0))
    chex.assert_trees_all_equal(new_state, state)


def test_rejects_invalid_arguments():
    size = {"expected_batch_size": 8}
    for arguments, message in (
        ({"clip": -1.0}, "clip must be >= 0, got -1.0"),
        ({"clip": 0}, "clipped: clip must be > 0, got 0"),  # it leaves nothing
        ({"clip": 1.0, "noise_multiplier": 1.0}, "expected_batch_size"),
        ({"clip": 1.0, "noise_multiplier": -1.0}, "noise_multiplier must be >= 0"),
        ({"clip": 1.0, "noise_multiplier": float("inf")} | size, "noise_multiplier must be"),
        ({"clip": 1.0, "expected_batch_size": 0}, "expected_batch_size must be > 0, got 0"),
        (
            {"clip": float("inf"), "noise_multiplier": 1.0} | size,
            "must be finite with noise, got inf",
        ),
        ({"clip": 1.0, "microbatches": 0}, "microbatches must be >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            autodiff.clipped(**arguments)


def test_mode_clips_like_clipped_grad():
    options = {"per_layer": True, "automatic": 0.5}
    grads, _, _ = gradient(autodiff.clipped(0.05, **options), batch())
    plain, _, _ = gradient(autodiff.clipped(0.05), batch())
    params, state = MODEL.init(jax.random.key(1))

    def losses(params, rows):
        return model_loss(params, state, rows, jax.random.key(2))[0]

    sums, _ = jax.jit(fnet.clipped_grad(losses, 0.05, **options))(params, batch())
    expected = jax.tree.map(lambda a: a / B, sums)
    chex.assert_trees_all_close(grads, expected, rtol=1e-5, atol=1e-7)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True)
    assert max(float(jnp.abs(a - b).max()) for a, b in pairs) > 1e-4


@pytest.mark.parametrize("mode", [autodiff.microbatches(2), autodiff.clipped(1.0)])
def test_a_loss_may_return_plain_losses(mode):
    def with_aux(params, model_state, batch, key):
        return batch["x"] @ params, fnet.Aux(model_state, {})

    def plain(params, model_state, batch, key):
        return batch["x"] @ params

    args = jnp.ones(4), {"count": jnp.zeros(())}, batch()
    got, expected = (jax.jit(mode(loss))(*args, jax.random.key(0)) for loss in (plain, with_aux))
    chex.assert_trees_all_equal(got, expected)


def test_rejects_a_loss_that_returns_a_dict_of_metrics():
    def loss(params, model_state, batch, key):
        return batch["x"] @ params, {}

    expected = r"expected losses \[batch\] or \(losses \[batch\], fnet.Aux"
    for mode in (autodiff.mean, autodiff.clipped(1.0)):
        with pytest.raises(TypeError, match=expected):
            mode(loss)(jnp.ones(4), {}, batch(), jax.random.key(0))


def test_metrics_of_norms_and_noise_scale():
    def loss(params, state, batch, key):
        return batch["x"] @ params, fnet.Aux(state, {})

    x = jnp.array([[1.0, 0.0], [2.0, 0.0], [0.0, 4.0], [0.0, 9.0]])
    batch = {"x": x, "weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
    args = jnp.zeros(2), {}, batch, jax.random.key(0)
    _, _, metrics = jax.jit(autodiff.per_example()(loss))(*args)
    # The mean gradient is (1, 4/3), its square 25/9. The mean of the squares is 7.
    expected = {"norm_median": 2.0, "norm_max": 4.0, "grad_sq": 2 / 3, "grad_var": 19 / 3}
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5), name
    of_layers = lambda p, *rest: loss(jnp.concatenate([p["a"], p["b"]["c"]]), *rest)  # noqa: E731
    run = jax.jit(autodiff.per_example(per_layer=True)(of_layers))
    _, _, metrics = run({"a": jnp.zeros(1), "b": {"c": jnp.zeros(1)}}, *args[1:])
    # The first column is 1, 2, 0 and the second 0, 0, 4.
    expected = {"grad_sq/a": 2 / 3, "grad_var/a": 1.0, "grad_sq/b.c": 0.0, "grad_var/b.c": 16 / 3}
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5, abs=1e-5), name
    _, _, metrics = jax.jit(autodiff.clipped(1.5)(loss))(*args)
    values = [float(metrics[name]) for name in ("norm_median", "norm_max", "clipped")]
    assert values == pytest.approx([2, 4, 2 / 3])
