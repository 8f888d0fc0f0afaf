import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import fnet
from fnet import autodiff, layers, losses, models, serial
from fnet.autodiff import mean
from fnet.autodiff.accumulate import as_mode
from fnet.autodiff.update import gradient_then_optimizer
from fnet.memory import DonationError, tree_bytes
from fnet.step import _microbatch_choices, divisors


def classifier():
    return serial(
        conv=layers.conv(1, 4),
        abn=layers.abn(4),
        pool=layers.global_avg_pool(),
        head=layers.dense(4, 3),
    )


def loss_of(model):
    def loss(params, state, batch, key):
        logits, state = model.apply(params, state, batch["image"], key=key, train=True)
        per_example = losses.cross_entropy(logits, batch["label"])
        return per_example, fnet.Aux(state, {"accuracy": losses.accuracy(logits, batch["label"])})

    return loss


def batch_of(n, size=8):
    return {
        "image": jax.random.normal(jax.random.key(1), (n, size, size, 1)),
        "label": jnp.arange(n) % 3,
    }


def created(model, optimizer, *, ema=False):
    """A train state, made by one program."""
    create = functools.partial(fnet.TrainState.create, model, optimizer, ema=ema)
    return jax.jit(create)(jax.random.key(0))


def copy(tree):
    """A deep copy, so that the original can be donated and the copy looked at."""
    return jax.tree.map(jnp.copy, tree)


def test_step_is_the_optimizer_applied_to_the_mean_gradient():
    model, optimizer = classifier(), optax.sgd(0.1, momentum=0.9)
    state = created(model, optimizer)
    batch, loss = batch_of(6), loss_of(model)

    @jax.jit
    def by_hand(state):
        def mean_loss(params):
            per_example, aux = loss(params, state.model_state, batch, jax.random.key(5))
            return per_example.mean(), aux.model_state

        (value, model_state), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return params, opt_state, model_state, state.step + 1, metrics

    params, opt_state, model_state, step, expected = by_hand(state)
    after, metrics = fnet.make_step(loss, optimizer)(state, batch)
    chex.assert_trees_all_close(after.params, params, atol=1e-6)
    chex.assert_trees_all_close(after.opt_state, opt_state, atol=1e-6)
    chex.assert_trees_all_close(after.model_state, model_state, atol=1e-6)
    chex.assert_trees_all_close({name: metrics[name] for name in expected}, expected, atol=1e-6)
    assert int(after.step) == int(step) == 1


@pytest.mark.parametrize("mode", [autodiff.microbatches(2), autodiff.clipped(1e9)])
def test_complex_parameters_go_downhill(mode):
    def loss(params, state, batch, key):
        return jnp.square(jnp.abs(params - batch["z"]))

    sgd, key, z = optax.sgd(0.1), jax.random.key(0), jnp.array([1 + 2j, 3 - 1j])
    state = fnet.TrainState.create(params=jnp.complex64(5j), optimizer=sgd, key=key)
    after, _ = fnet.make_step(loss, sgd, mode)(state, {"z": z})
    chex.assert_trees_all_close(after.params, 5j - 0.2 * (5j - z.mean()))


def test_randomness_of_a_step_follows_from_key_and_step_number():
    def loss(params, state, batch, key):
        noise = jax.random.normal(key, batch["x"].shape)
        return params["w"] * noise, fnet.Aux(state, {"noise": noise})

    model = fnet.Layer(lambda key: ({"w": jnp.ones(())}, {}), None)
    step = fnet.make_step(loss, optax.sgd(0.0))
    state = fnet.TrainState.create(model, optax.sgd(0.0), jax.random.key(3))
    key = copy(state.key)
    for i in range(2):
        state, metrics = step(state, {"x": jnp.zeros(4)})
        drawn = jax.random.normal(jax.random.fold_in(key, i), (4,))
        chex.assert_trees_all_close(metrics["noise"], drawn.mean(), atol=1e-6)


def unit_vectors(params, state, batch, key):
    """Loss of embeddings of length 1, whose derivative is NaN for an image of zeros."""
    z = batch["inputs"]["x"] @ params["w"]
    losses = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) * batch["y"][:, None]).sum(-1)
    return losses, fnet.Aux(state, {"length": jnp.linalg.norm(z, axis=-1)})


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        (autodiff.mean, 0.0),
        (autodiff.microbatches(2), jnp.nan),
        (autodiff.per_example(), jnp.inf),
        (autodiff.clipped(1e6, automatic=1e-9, microbatches=2), 0.0),
        (autodiff.clipped(1e6, per_layer=True), jnp.nan),
    ],
    ids=["mean", "microbatches", "per_example", "automatic", "per_layer"],
)
def test_padding_whose_derivative_is_nan_changes_nothing(mode, value):
    params = {"w": jnp.arange(6.0).reshape(3, 2)}
    x = jax.random.normal(jax.random.key(0), (4, 3))
    # Microbatch i is every second row, so the second one has padding only.
    order = jnp.array([0, 2, 1, 3])
    batch = {
        "inputs": {"x": x.at[2:].set(value)[order]},
        "y": jnp.array([1, -2, 5, 7])[order],
        "key": jax.random.split(jax.random.key(1), 4),
        "is_odd": jnp.array([True, False, True, False])[order],
        "weight": jnp.array([1.0, 1.0, 0.0, 0.0])[order],
    }
    real = {"inputs": {"x": x[:2]}, "y": jnp.array([1, -2])}
    gradient = jax.jit(as_mode(mode)(unit_vectors))
    whole = jax.jit(as_mode(mode).split(1)(unit_vectors))
    expected, _, metrics = whole(params, {}, real, jax.random.key(2))
    got, _, padded_metrics = gradient(params, {}, batch, jax.random.key(2))
    chex.assert_trees_all_close(got, expected, atol=1e-6)
    chex.assert_trees_all_close(padded_metrics, metrics, atol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_padding_only_gives_a_gradient_of_0_even_of_a_nan(microbatches):
    batch = {"inputs": {"x": jnp.zeros((4, 3))}, "y": jnp.ones(4), "weight": jnp.zeros(4)}
    gradient = fnet.accumulate_grad(unit_vectors, microbatches)
    grads, _, metrics = gradient({"w": jnp.ones((3, 2))}, {}, batch, None)
    assert not grads["w"].any()
    assert float(metrics["loss"]) == 0.0


def line(params, state, batch, key):
    return (batch["x"] @ params["w"] - 1.0) ** 2, fnet.Aux(state, {})


def states_after(optimizer, mode, steps=3):
    state = fnet.TrainState.create(
        params={"w": jnp.zeros(3)}, optimizer=optimizer, key=jax.random.key(0)
    )
    step = fnet.make_step(line, optimizer, mode)
    for _ in range(steps):
        state, _ = step(state, {"x": jnp.ones((4, 3))})
    return state


@pytest.mark.parametrize("mode", [autodiff.mean, autodiff.microbatches(2), autodiff.clipped(9.0)])
def test_optimizers_that_take_the_loss_get_it(mode):
    """Polyak's step (loss / squared gradient norm) goes half of the way to the root."""
    params = states_after(optax.polyak_sgd(), mode).params
    chex.assert_trees_all_close(params["w"], jnp.full(3, (1 - 0.5**3) / 3), rtol=1e-5)


def test_a_private_optimizer_does_not_get_the_loss():
    mode = autodiff.clipped(1.0, noise_multiplier=1.0, expected_batch_size=4)
    with pytest.raises(TypeError, match=r"make_step: optimizer\.update fails: .*value.* noise"):
        states_after(optax.polyak_sgd(), mode)
    states_after(optax.chain(optax.sgd(0.1)), mode)


def test_a_metric_called_loss_is_not_what_is_differentiated():
    gradient = fnet.autodiff.mean(
        lambda p, s, b, k: (p * b["x"], fnet.Aux(s, {"loss": 9 * p * b["x"]}))
    )
    grads, _, metrics = gradient(jnp.asarray(2.0), {}, {"x": jnp.ones(3)}, None)
    assert float(grads) == 1.0
    assert float(metrics["loss"]) == 2.0


def test_a_batch_without_names_is_refused():
    model, optimizer = classifier(), optax.sgd(0.1)
    step = fnet.make_step(loss_of(model), optimizer)
    with pytest.raises(TypeError, match="the batch must be a dict of arrays, got tuple"):
        step(created(model, optimizer), tuple(batch_of(6).values()))
    with pytest.raises(TypeError, match=r"the batch must be a dict of arrays, got float32\[6\]"):
        step(created(model, optimizer), jnp.ones(6))


def test_a_loss_optimizer_or_mode_of_another_kind_is_refused():
    for arguments, message in (
        ((lambda p, b: p, optax.sgd(0.1)), r"loss: expected a function of \(params, .* got .*\(p, b\)"),
        (("loss", optax.sgd(0.1)), "loss: expected a function of .*, got 'loss'"),
        ((line, optax.sgd), "optimizer must be an optax.*, got sgd"),
        ((line, layers.dense(1, 1)), "optimizer must be an optax.*, got Layer"),
        ((line, optax.sgd(0.1), "clipped"), r"mode must be .* got str"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"make_step: {message}"):
            fnet.make_step(*arguments)


def test_weights_in_a_column_are_refused():
    def loss(params, state, batch, key):
        return params * batch["x"], fnet.Aux(state, {})

    batch = {"x": jnp.ones(4), "weight": jnp.ones((4, 1))}
    with pytest.raises(ValueError, match=r"one weight per loss, shape \(4,\), got \(4, 1\)"):
        mean(loss)(jnp.float32(1), {}, batch, jax.random.key(0))


def test_ema_follows_the_parameters():
    model, optimizer = classifier(), optax.sgd(0.1)
    state = created(model, optimizer, ema=True)
    before = copy(state.ema)
    step = fnet.make_step(loss_of(model), optimizer, ema_decay=0.75)
    after, _ = step(state, batch_of(6))
    expected = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p, before, after.params)
    chex.assert_trees_all_close(after.ema, expected, atol=1e-6)
    chex.assert_trees_all_equal(after.evaluation_params, after.ema)


@pytest.mark.parametrize(
    "losses_of",
    [lambda w, x: w * x + jax.lax.stop_gradient(jnp.inf), lambda w, x: jnp.sqrt(w * x)],
    ids=["an infinite loss", "an infinite gradient of a finite loss"],
)
def test_a_guard_looks_at_the_loss_and_at_the_gradient(losses_of):
    def loss(params, state, batch, key):
        return losses_of(params["w"], batch["x"]), fnet.Aux(state, {})

    model = fnet.Layer(lambda key: ({"w": jnp.zeros(())}, {}), None)
    state = fnet.TrainState.create(model, optax.sgd(1.0), jax.random.key(0))
    after, metrics = fnet.make_step(loss, optax.sgd(1.0), skip_nonfinite=True)(
        state, {"x": jnp.ones(2)}
    )
    finite = [bool(jnp.isfinite(metrics[name])) for name in ("loss", "grad_norm")]
    assert sorted(finite) == [False, True]
    assert metrics["skipped"] == 1
    assert after.params["w"] == 0


@pytest.mark.parametrize(("ema", "decay"), [(True, None), (False, 0.9)])
def test_ema_without_its_decay_or_the_other_way_round_is_refused(ema, decay):
    model, optimizer = classifier(), optax.sgd(0.1)
    state = created(model, optimizer, ema=ema)
    step = fnet.make_step(loss_of(model), optimizer, ema_decay=decay)
    with pytest.raises(ValueError, match=r"TrainState.create\(ema=True\) and make_step"):
        step(state, batch_of(6))


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_an_ema_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match=r"ema_decay must be in \[0, 1\), got"):
        fnet.make_step(loss_of(classifier()), optax.sgd(0.1), ema_decay=decay)


def test_the_whole_state_of_a_recipe_is_renewed_in_place():
    model = models.get(
        "preact_resnet", num_classes=3, in_channels=1, widths=(4,), blocks_per_stage=1
    )
    rule = fnet.optim.make_optimizer("adamw", 0.1, weight_decay=1e-4, clip_norm=1.0)
    state = jax.eval_shape(
        functools.partial(fnet.TrainState.create, model, rule, ema=True),
        jax.random.key(0),
    )
    step = fnet.make_step(loss_of(model), rule, ema_decay=0.99)
    report = fnet.compile_step(step, state, batch_of(6)).report
    assert report.donation.aliased_bytes == report.state_bytes == tree_bytes(state)
    assert report.donation.leaves == len(jax.tree.leaves(state))


def test_an_optimizer_may_keep_the_first_parameters():
    anchored = optax.GradientTransformation(
        init=lambda params: params,
        update=lambda g, first, p: (jax.tree.map(lambda a, b: a - b, first, p), first),
    )
    model = classifier()
    state = fnet.TrainState.create(model, anchored, jax.random.key(0), ema=True)
    first = copy(state.params)
    chex.assert_trees_all_equal(state.opt_state, first)
    chex.assert_trees_all_equal(state.ema, first)
    after, _ = fnet.make_step(loss_of(model), anchored, ema_decay=0.9)(state, batch_of(6))
    chex.assert_trees_all_equal(after.opt_state, first)


def test_the_executable_takes_the_buffers_of_its_state():
    model, optimizer = classifier(), optax.sgd(0.1, momentum=0.9)
    state = created(model, optimizer)
    expected, _ = jax.jit(fnet.make_step(loss_of(model), optimizer).apply)(copy(state), batch_of(6))
    execute = fnet.compile_step(fnet.make_step(loss_of(model), optimizer), state, batch_of(6))
    kernel = state.params["head"]["kernel"].unsafe_buffer_pointer()
    after, _ = execute(state, batch_of(6))
    assert after.params["head"]["kernel"].unsafe_buffer_pointer() == kernel
    assert state.params["head"]["kernel"].is_deleted()
    chex.assert_trees_all_close(after.params, expected.params, atol=1e-6)


def test_compile_step_needs_only_shapes():
    model, optimizer = classifier(), optax.sgd(0.1)
    state = jax.eval_shape(
        lambda key: fnet.TrainState.create(model, optimizer, key), jax.random.key(0)
    )
    batch = jax.eval_shape(lambda: batch_of(6))
    report = fnet.compile_step(fnet.make_step(loss_of(model), optimizer), state, batch).report
    leaves = jax.tree.leaves(model.init(jax.random.key(0))[0])
    assert report.parameters == sum(leaf.size for leaf in leaves)
    assert report.as_dict()["peak"]["total"] == report.peak.total


def test_compiler_options_are_those_given():
    model, optimizer = classifier(), optax.sgd(0.1)
    state = created(model, optimizer)
    step = fnet.make_step(loss_of(model), optimizer)
    options = {"xla_backend_optimization_level": 0}
    execute = fnet.compile_step(step, state, batch_of(6), compiler_options=options)
    assert execute.report.compiler_options == options


def test_replace_returns_a_step_with_another_mode():
    model, optimizer = classifier(), optax.sgd(0.1)
    step = fnet.make_step(loss_of(model), optimizer)
    assert step.optimizer is optimizer

    def twice(loss):
        def gradient(*args):
            grads, state, metrics = mean(loss)(*args)
            return jax.tree.map(lambda g: 2 * g, grads), state, metrics

        return gradient

    state = created(model, optimizer)
    _, metrics = step(copy(state), batch_of(6))
    _, doubled = step.replace(mode=twice)(copy(state), batch_of(6))
    chex.assert_trees_all_close(doubled["grad_norm"], 2 * metrics["grad_norm"], rtol=1e-6)


def test_a_mode_may_make_the_update_itself():
    class Halving(fnet.autodiff.Mode):
        def update(self, loss, optimizer):
            def update(params, opt_state, model_state, batch, key):
                return jax.tree.map(lambda p: p / 2, params), opt_state, model_state, {}

            return update

    model, optimizer = classifier(), optax.sgd(0.1)
    state = created(model, optimizer)
    after, metrics = fnet.make_step(loss_of(model), optimizer, Halving())(copy(state), batch_of(6))
    chex.assert_trees_all_equal(after.params, jax.tree.map(lambda p: p / 2, state.params))
    assert metrics == {}


def test_a_drifting_optimizer_is_caught_by_compile_step():
    model = classifier()
    drifting = optax.GradientTransformation(
        init=lambda params: jax.tree.map(jnp.zeros_like, params),
        update=lambda g, s, p=None: (g, jax.tree.map(lambda a: a.astype(jnp.bfloat16), g)),
    )
    state = created(model, drifting)
    step = fnet.make_step(loss_of(model), drifting)
    with pytest.raises(
        DonationError, match=r"\.opt_state\['head'\]\['kernel'\] drifts from float32"
    ):
        fnet.compile_step(step, state, batch_of(6))


def test_the_norm_of_float16_gradients_is_float32():
    def loss(params, state, batch, key):
        return (params * batch["x"]).astype(jnp.float32), fnet.Aux(state, {})

    rule, params = optax.sgd(1e-3), jnp.ones((), jnp.float16)
    update = gradient_then_optimizer(mean(loss), rule)
    batch = {"x": jnp.full(4, 300.0, jnp.float16)}
    *_, metrics = update(params, rule.init(params), {}, batch, None)
    assert float(metrics["grad_norm"]) == 300  # whose square is infinite in float16


def test_a_state_of_params_equals_the_state_of_the_model_that_made_them():
    model, optimizer = classifier(), optax.adam(0.1)
    key = jax.random.key(7)
    expected = fnet.TrainState.create(model, optimizer, jax.random.clone(key), ema=True)
    params, model_state = model.init(jax.random.split(jax.random.clone(key))[0])
    got = fnet.TrainState.create(
        params=params, model_state=model_state, optimizer=optimizer, key=key, ema=True
    )
    chex.assert_trees_all_equal(got, expected)


def test_rejects_a_state_without_what_it_needs():
    for arguments, message in (
        ({}, "give either a model or params"),
        ({"model": 1, "params": 1}, "give either a model or params"),
        ({"params": {}, "key": 1}, "optimizer is missing"),
        ({"params": {}, "optimizer": 1}, "key is missing"),
        ({"params": {}, "optimizer": 1, "key": 0}, "key must be a random key.*, got 0"),
    ):
        with pytest.raises(TypeError, match=message):
            fnet.TrainState.create(**arguments)


def test_rejects_a_model_state_next_to_a_model():
    with pytest.raises(TypeError, match="model_state comes with params"):
        fnet.TrainState.create(classifier(), optax.sgd(0.1), jax.random.key(0), model_state={})


def test_microbatches_of_make_step_are_those_of_the_mode():
    step = fnet.make_step(loss_of(classifier()), optax.sgd(0.1), microbatches=2)
    assert step.mode == fnet.autodiff.microbatches(2)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_state_that_was_donated_is_named(compiled):
    model, optimizer = classifier(), optax.sgd(0.1)
    state, batch = created(model, optimizer), batch_of(2)
    step = fnet.make_step(loss_of(model), optimizer)
    if compiled:
        step = fnet.compile_step(step, state, batch, compiler_options={})
    step(state, batch)
    with pytest.raises(RuntimeError, match="donated to an earlier step: use the state that the"):
        step(state, batch)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (optax.adam(0.1), optax.sgd(0.1)),
        (optax.sgd(0.1), optax.adam(0.1)),
        (optax.sgd(0.1, momentum=0.9), optax.sgd(0.1)),
    ],
)
def test_rejects_a_state_of_another_optimizer(own, other):
    model = classifier()
    step = fnet.make_step(loss_of(model), own)
    with pytest.raises(ValueError, match=r"the optimizer has .*: it was created with another"):
        step(created(model, other), batch_of(2))


def test_rejects_a_model_state_of_another_structure():
    def loss(params, model_state, batch, key):
        return batch["x"] @ params, fnet.Aux(None, {})

    state = fnet.TrainState.create(
        params=jnp.ones(2), optimizer=optax.sgd(0.1), key=jax.random.key(0)
    )
    with pytest.raises(TypeError, match=r"Aux\(model_state, metrics\) needs .*; pass on model_st"):
        fnet.make_step(loss, optax.sgd(0.1))(state, {"x": jnp.ones((3, 2))})


@pytest.mark.parametrize(
    ("mode", "choices"),
    [(fnet.autodiff.microbatches(2), [2, 4]), (fnet.autodiff.per_example(), [1])],
)
def test_only_modes_that_can_be_split_have_a_choice_of_microbatches(mode, choices):
    step = fnet.make_step(lambda *_: jnp.zeros(4), optax.sgd(0.1), mode)
    assert _microbatch_choices(step, {"x": jnp.zeros((4, 2))}) == choices


@pytest.mark.parametrize("rows", [1, 2, 12, 97, 183, 256, 1000])
def test_rows_are_split_by_their_prime_factors_one_after_the_other(rows):
    chain = divisors(rows)
    assert (chain[0], chain[-1]) == (1, rows)
    factors = [b // a for a, b in itertools.pairwise(chain)]
    assert math.prod(factors) == rows
    assert factors == sorted(factors)
    assert all(factor % n for factor in factors for n in range(2, factor))
    if rows % 4 == 0:
        assert divisors(rows, 4) == chain[2:]
    assert divisors(rows, 7) == [7]
