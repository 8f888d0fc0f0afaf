import chex
import example_losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import CASES, B, one_by_one
from hypothesis import given, settings
from hypothesis import strategies as st

import fnet
from fnet import autodiff, layers
from fnet.autodiff import influence, noise_scale, per_example_grad, per_example_norms

as_users_write = pytest.fixture(autouse=True)(example_losses.as_users_write)


@pytest.mark.parametrize("width", [None, 1, 4])
@pytest.mark.parametrize(
    "name", ["tied_embedding", "convolutions", "stacked_layers", "unusual", "dropout"]
)
def test_gradients_are_those_of_a_loop_over_examples(name, width):
    case = CASES[name]()
    found = jax.jit(per_example_grad(case.loss, width=width))(case.params, *case.batch)
    chex.assert_trees_all_close(found, one_by_one(case), rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2),
    st.integers(1, 2), st.sampled_from(["SAME", "VALID"]),
)  # fmt: skip
def test_gradients_and_norms_of_convolutions_of_all_shapes_are_those_of_single_examples(
    size, window, stride, dilation, groups, features, padding
):
    side = size + dilation * (window - 1)
    x = jax.random.normal(jax.random.key(0), (3, side, side + 1, groups * features))
    kernel = jax.random.normal(jax.random.key(1), (window, window, features, 2 * groups))

    def loss(kernel, x):
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip
        return jnp.sin(y).sum((1, 2, 3))

    @jax.jit
    def both_ways(kernel, x):
        one = jax.grad(lambda k, x: loss(k, x[None])[0])
        singly = jnp.stack([one(kernel, x[i]) for i in range(3)])
        return per_example_grad(loss)(kernel, x), per_example_norms(loss)(kernel, x), singly

    found, norms, expected = both_ways(kernel, x)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)
    lengths = jnp.linalg.norm(expected.reshape(3, -1), axis=1)
    chex.assert_trees_all_close(norms, lengths, rtol=1e-4, atol=1e-4)


def test_what_the_loss_returns_beside_comes_along():
    def loss(p, x, name):
        return p * x, {"doubled": 2 * x, "same": name}

    x = jnp.arange(3.0)
    grads, aux = jax.jit(per_example_grad(loss, has_aux=True, width=2))(
        jnp.float32(2), x, jnp.float32(7)
    )
    chex.assert_trees_all_close(grads, x)
    chex.assert_trees_all_close(aux["doubled"], 2 * x)


@pytest.mark.parametrize("how", ["at once", "on batches of one"])
def test_what_is_returned_beside_has_an_axis_of_examples_even_if_its_first_is_merged(how):
    def loss(p, x):
        h = x @ p if how == "at once" else jnp.roll(x @ p, 1, 0)
        return h.sum(1), x.reshape(-1, 4)

    p, x = jnp.ones(4), jax.random.normal(jax.random.key(0), (B, 3, 4))
    for width in (None, 2):
        _, aux = jax.jit(per_example_grad(loss, width=width, has_aux=True))(p, x)
        chex.assert_trees_all_equal(aux, x)
    _, info = jax.jit(fnet.clipped_grad(loss, 1.0, has_aux=True))(p, x)
    chex.assert_trees_all_equal(info.aux, x)


def test_what_follows_from_parameters_alone_comes_along_once():
    def loss(p, x):
        aux = {"squares": jnp.square(p["w"]).sum(), "seen": jnp.eye(2) @ p["v"]}
        return jnp.tanh(x @ p["v"]) @ p["w"], aux

    p, x = {"v": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "w": jnp.array([3.0, 4.0])}, jnp.ones((3, 2))
    _, info = jax.jit(fnet.clipped_grad(loss, 1.0, has_aux=True))(p, x)
    chex.assert_trees_all_equal_shapes(info.aux, loss(p, x)[1])
    chex.assert_trees_all_close(info.aux, loss(p, x)[1])


def test_influence_is_the_dot_product_with_each_gradient():
    case = CASES["heads"]()
    direction = jax.tree.map(jnp.ones_like, case.params)
    expected = jax.vmap(optax.tree.vdot, (0, None))(one_by_one(case), direction)
    found = jax.jit(influence(case.loss))(direction, case.params, *case.batch)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


def test_influence_is_that_of_each_example_with_its_own_key():
    case = CASES["dropout"]()
    direction = jax.tree.map(jnp.ones_like, case.params)
    each = jax.jit(per_example_grad(case.loss))(case.params, *case.batch)
    expected = jax.vmap(optax.tree.vdot, (0, None))(each, direction)
    found = jax.jit(influence(case.loss))(direction, case.params, *case.batch)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_noise_scale_is_unbiased():
    true = np.array([1.0, -2.0, 0.5])
    deviation = np.array([0.5, 1.0, 2.0])
    g = true + deviation * np.random.default_rng(0).standard_normal((20_000, 8, 3))
    norms = jnp.asarray(np.linalg.norm(g, axis=-1))
    mean = jnp.asarray(np.linalg.norm(g.mean(1), axis=-1))
    found = jax.vmap(noise_scale)(norms, mean)
    chex.assert_trees_all_close(found.grad_sq.mean(), (true**2).sum(), rtol=0.02)
    chex.assert_trees_all_close(found.grad_var.mean(), (deviation**2).sum(), rtol=0.02)


def test_padding_is_no_part_of_the_noise_scale():
    norms, weight = jnp.array([1.0, 2.0, jnp.nan]), jnp.array([1.0, 1.0, 0.0])
    found = noise_scale(norms, jnp.float32(1.2), weight)
    chex.assert_trees_all_close(found, noise_scale(norms[:2], jnp.float32(1.2)))


@pytest.mark.parametrize("width", [0, -1, 1.5, True])
def test_a_width_is_a_whole_number(width):
    with pytest.raises(ValueError, match="a whole number above 0; got"):
        per_example_grad(lambda p, x: p * x, width=width)


MODEL = layers.mlp([4, 8, 3])


def model_loss(params, state, batch, key):
    logits, state = MODEL.apply(params, state, batch["x"], key=key, train=True)
    losses = fnet.losses.cross_entropy(logits, batch["label"])
    return losses, fnet.Aux(state, {"accuracy": fnet.losses.accuracy(logits, batch["label"])})


def batch(weight=None):
    x = jax.random.normal(jax.random.key(0), (B, 4))
    found = {"x": x, "label": jnp.arange(B) % 3}
    return found if weight is None else found | {"weight": jnp.asarray(weight, jnp.float32)}


def gradient(mode, batch):
    params, state = MODEL.init(jax.random.key(1))
    return jax.jit(mode(model_loss))(params, state, batch, jax.random.key(2))


@pytest.mark.parametrize("weight", [None, [1, 0, 1, 1, 0, 1]])
@pytest.mark.parametrize(
    "mode", [autodiff.per_example(), autodiff.clipped(1e6), autodiff.clipped(float("inf"))]
)
def test_without_a_bound_the_modes_give_the_mean_gradient(mode, weight):
    found, _, metrics = gradient(mode, batch(weight))
    expected, _, means = gradient(autodiff.mean, batch(weight))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    for name, value in means.items():
        chex.assert_trees_all_close(metrics[name], value, rtol=1e-5)


def test_microbatches_of_a_private_step_change_nothing():
    weight = [1, 0, 1, 1, 0, 1]
    whole = gradient(autodiff.clipped(0.5), batch(weight))
    parts = gradient(autodiff.clipped(0.5, microbatches=3), batch(weight))
    chex.assert_trees_all_close(parts, whole, rtol=1e-5, atol=1e-6)


def test_a_batch_may_be_a_tree():
    batch = {
        "inputs": {"ids": jnp.arange(12).reshape(B, 2) % 5, "mask": jnp.arange(B) % 2},
        "label": jnp.arange(B) / B,
    }

    def loss(params, state, batch, key):
        seen = params[batch["inputs"]["ids"]].sum(1) * batch["inputs"]["mask"]
        return (jnp.tanh(seen) - batch["label"]) ** 2, fnet.Aux(state, {"seen": seen})

    args = jnp.linspace(-1, 1, 5), {}, batch
    for whole, parts in [
        (autodiff.mean, autodiff.microbatches(2)),
        (autodiff.clipped(0.1), autodiff.clipped(0.1, microbatches=2)),
    ]:
        found, expected = (jax.jit(m(loss))(*args, jax.random.key(0)) for m in (parts, whole))
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-7)


def test_arrays_of_a_tree_are_told_by_their_names():
    batch = {"inputs": {"ids": jnp.ones(B), "mask": jnp.ones(4)}}
    with pytest.raises(ValueError, match=r"'inputs.ids': \(6,\), 'inputs.mask': \(4,\)"):
        autodiff.microbatches(2)(model_loss)({}, {}, batch, jax.random.key(0))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("clipped", autodiff.clipped(1.0, microbatches=4)),
        ("AdaptiveClipping", autodiff.AdaptiveClipping(1.0, microbatches=4)),
    ],
)
def test_a_batch_without_equal_parts_is_refused_in_the_name_of_the_mode(name, mode):
    rule = optax.sgd(0.1)
    rule = mode.keeping_clip(rule) if name == "AdaptiveClipping" else rule
    state = fnet.TrainState.create(MODEL, rule, jax.random.key(0))
    with pytest.raises(ValueError, match=f"^{name}: a batch of 6 examples has no 4 .* to 8 exam"):
        jax.eval_shape(fnet.make_step(model_loss, rule, mode), state, batch())


def test_gradients_have_the_dtype_of_the_parameters():
    model = fnet.Layer(lambda key: (jnp.ones(2, jnp.bfloat16), {}), None)

    def loss(params, state, batch, key):
        return (params * batch["x"]).sum(-1), fnet.Aux(state, {})

    rule, x = optax.sgd(0.25, momentum=0.5), {"x": jnp.ones((B, 2))}
    state = fnet.TrainState.create(model, rule, jax.random.key(0))
    step = fnet.compile_step(fnet.make_step(loss, rule, autodiff.per_example()), state, x)
    state, _ = step(state, x)  # one of another dtype would not fit the second
    state, _ = step(state, x)
    chex.assert_trees_all_equal(state.params, jnp.full(2, 1 - 0.25 - 0.375, jnp.bfloat16))


def test_sums_of_narrow_parameters_are_not_rounded_as_they_are():
    def loss(params, state, batch, key):
        return (params * batch["x"]).sum(-1), fnet.Aux(state, {})

    params, x = jnp.ones(1, jnp.bfloat16), {"x": jnp.ones((512, 1))}
    run = autodiff.clipped(1.0, expected_batch_size=512, microbatches=512)(loss)
    found, _, _ = run(params, {}, x, jax.random.key(0))  # in bfloat16 256 + 1 = 256
    chex.assert_trees_all_equal(found, params)


def test_a_state_as_long_as_a_microbatch_is_not_taken_for_one_row_an_example():
    def loss(params, state, batch, key):
        return (params * batch["x"] * state["scale"]).sum(-1), fnet.Aux(state, {})

    state = {"scale": jnp.array([2.0, 3.0])}  # parts of 2
    run = autodiff.clipped(1.0, microbatches=3)(loss)
    _, found, _ = run(jnp.ones(2), state, {"x": jnp.ones((B, 2))}, jax.random.key(0))
    chex.assert_trees_all_equal(found, state)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_state_that_is_made_of_the_examples_is_refused_where_there_is_noise(parts):
    def loss(params, state, batch, key):
        seen = {"mean": 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)}
        return (params * batch["x"]).sum(-1), fnet.Aux(seen, {})

    state, x = {"mean": jnp.zeros(2)}, {"x": jnp.ones((B, 2))}
    how = {"expected_batch_size": B, "microbatches": parts}
    _, found, _ = autodiff.clipped(1.0, **how)(loss)(jnp.ones(2), state, x, jax.random.key(0))
    chex.assert_trees_all_close(found, {"mean": jnp.full(2, 0.1)})
    private = autodiff.clipped(1.0, noise_multiplier=1.0, **how)(loss)
    with pytest.raises(ValueError, match=r"clipped: the model state \['mean'\] is made of the ex"):
        private(jnp.ones(2), state, x, jax.random.key(0))


def replaced(params, state, batch, key):
    return (params * batch["x"]).sum(-1), fnet.Aux({"last": batch["x"]}, {})


def counted(params, state, batch, key):
    drawn = jax.random.uniform(key)
    return (params * batch["x"]).sum(-1), fnet.Aux({"n": state["n"] + 1, "drawn": drawn}, {})


def private_gradients(loss, state):
    """Of both private modes."""
    how = {"noise_multiplier": 1.0, "expected_batch_size": B}
    adaptive = autodiff.AdaptiveClipping(1.0, **how, count_noise=B)
    keeping = adaptive.keeping_clip(optax.sgd(0.1))
    args = jnp.ones(2), state, {"x": jnp.ones((B, 2))}
    yield "clipped", lambda: autodiff.clipped(1.0, **how)(loss)(*args, jax.random.key(0))[1]
    yield (
        "AdaptiveClipping",
        lambda: adaptive.update(loss, keeping)(
            args[0], keeping.init(args[0]), *args[1:], jax.random.key(0)
        )[2],
    )


def test_a_state_of_the_same_shape_that_is_made_of_the_examples_is_refused():
    for name, run in private_gradients(replaced, {"last": jnp.zeros((B, 2))}):
        with pytest.raises(ValueError, match=rf"{name}: the model state \['last'\] is made of the"):
            run()


def test_a_state_that_does_not_depend_on_the_examples_is_renewed_beside_noise():
    for _, run in private_gradients(counted, {"n": jnp.int32(3), "drawn": jnp.zeros(())}):
        assert run()["n"] == 4


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_state_of_one_number_that_follows_the_batch_is_averaged(microbatches):
    def loss(params, state, batch, key):
        mean = fnet.Aux({"mean": batch["x"].mean(0)}, {})
        return (params * batch["x"]).sum(-1), mean

    run = autodiff.clipped(1.0, microbatches=microbatches)(loss)
    x = jnp.arange(float(B)).reshape(B, 1)
    _, found, _ = run(jnp.ones(1), {"mean": jnp.zeros(1)}, {"x": x}, jax.random.key(0))
    chex.assert_trees_all_close(found, {"mean": x.mean(0)})


def test_noise_has_the_deviation_asked_for_and_a_new_key_each_step():
    mode = autodiff.clipped(0.5, noise_multiplier=3.0, expected_batch_size=10)
    silent, _, _ = gradient(autodiff.clipped(0.5, expected_batch_size=10), batch())
    run = jax.jit(mode(model_loss))
    params, state = MODEL.init(jax.random.key(1))
    draws = [run(params, state, batch(), jax.random.key(i))[0] for i in range(200)]
    noise = jax.tree.map(lambda *g: np.stack(g[1:]) - g[0], silent, *draws)
    values = np.concatenate([np.ravel(n) for n in jax.tree.leaves(noise)])
    assert values.std() == pytest.approx(3 * 0.5 / 10, rel=0.03)
    assert np.unique(values).size > 0.99 * values.size


def test_noise_is_added_to_the_clipped_mean():
    silent, _, _ = gradient(autodiff.clipped(0.5, expected_batch_size=10), batch())
    faint = autodiff.clipped(0.5, noise_multiplier=1e-3, expected_batch_size=10)
    noised, _, _ = gradient(faint, batch())
    for with_noise, without in zip(*map(jax.tree.leaves, (noised, silent)), strict=True):
        assert 0 < jnp.abs(with_noise - without).max() < 6 * 1e-3 * 0.5 / 10


def test_an_example_that_is_not_finite_leaves_the_metrics_finite():
    bad = batch()
    bad["x"] = bad["x"].at[1].set(jnp.nan)
    for mode in (autodiff.per_example(), autodiff.clipped(0.5)):
        grads, _, metrics = gradient(mode, bad)
        chex.assert_tree_all_finite((grads, metrics))
        assert metrics["nonfinite"] == 1


def test_a_batch_that_is_all_padding_gives_nothing():
    grads, _, metrics = gradient(autodiff.clipped(0.5), batch(np.zeros(B)))
    chex.assert_trees_all_equal(grads, jax.tree.map(jnp.zeros_like, grads))
    chex.assert_tree_all_finite(metrics)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_of_padding_alone_no_state_is_made(microbatches):
    def loss(params, state, batch, key):
        seen = {"mean": 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)}
        return (params * batch["x"]).sum(-1), fnet.Aux(seen, {})

    run = autodiff.clipped(1.0, microbatches=microbatches)(loss)
    state, padding = {"mean": jnp.full(2, 3.0)}, {"x": jnp.ones((B, 2)), "weight": jnp.zeros(B)}
    _, found, _ = run(jnp.ones(2), state, padding, jax.random.key(0))
    chex.assert_trees_all_equal(found, state)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clip": -1.0}, "at least 0"),
        ({"clip": 1.0, "noise_multiplier": 1.0}, "expected_batch_size"),
        ({"clip": 1.0, "noise_multiplier": -1.0}, "noise_multiplier must be at least 0"),
        ({"clip": 1.0, "expected_batch_size": 0}, "expected_batch_size must be above 0, got 0"),
        (
            {"clip": float("inf"), "noise_multiplier": 1.0, "expected_batch_size": 8},
            "clip, which must be finite, got inf",
        ),
        ({"clip": 1.0, "microbatches": 0}, "microbatches must be at least 1"),
    ],
)
def test_modes_refuse_what_makes_no_sense(wrong, message):
    with pytest.raises(ValueError, match=message):
        autodiff.clipped(**wrong)
