"""`optimizer_in_backward` equals `mean`, without the memory of the gradients."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from fused_optimizer_cases import BATCH, IN_BACKWARD, SMALL, WIDTH, classifier, loss_of, small_block
from jax.sharding import NamedSharding, PartitionSpec
from layer_cases import initial

import fnet
from fnet import Layer, TrainState, layers, repeat, residual, serial
from fnet.autodiff import mean
from fnet.autodiff.fused_optimizer.layer_update import REST, trace_update
from fnet.autodiff.fused_optimizer.mode import optimizer_in_backward
from fnet.memory import peak, tree_bytes
from fnet.memory.timeline import layer_of


def full_block():
    """A block with parameters, state and randomness."""
    return residual(
        serial(
            norm=layers.abn(WIDTH),
            expand=layers.dense(WIDTH, 2 * WIDTH),
            act=layers.activation("gelu"),
            drop=layers.dropout(0.2),
            contract=layers.dense(2 * WIDTH, WIDTH),
        )
    )


def trained(model, optimizer, mode, *, loss=None, steps=5, ema_decay=None, place=None):
    """Return the state and the last metrics after some steps."""
    start = Layer(lambda key: jax.tree.map(jnp.asarray, initial(model)), model.apply)
    create = functools.partial(TrainState.create, start, optimizer, ema=ema_decay is not None)
    state = jax.jit(create)(jax.random.key(0))
    step = fnet.make_step(loss or loss_of(model), optimizer, mode, ema_decay=ema_decay)
    if place:
        state = place(state)
    else:
        # Compile once, instead of searching for the options with the least memory.
        step = fnet.compile_step(step, state, BATCH, compiler_options={})
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return state.replace(key=jax.random.key_data(state.key)), metrics


def assert_equals_mean(model, optimizer, mode=IN_BACKWARD, *, atol=1e-6, **options):
    fused = trained(model, optimizer, mode, **options)
    plain = trained(model, optimizer, mean, **options)
    chex.assert_trees_all_close(fused, plain, atol=atol, rtol=1e-5)
    return fused, plain


SCHEDULE = fnet.optim.make_schedule("cosine", 1e-2, 20, warmup_steps=2)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adamw": fnet.optim.make_optimizer("adamw", SCHEDULE, weight_decay=0.1),
    "lion": fnet.optim.make_optimizer("lion", 1e-3, weight_decay=0.1),
    "lion with decay before it": optax.chain(
        optax.add_decayed_weights(0.1), optax.scale_by_lion(), optax.scale(-1e-3)
    ),
    "decay by rank": optax.adamw(
        1e-2, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda a: a.ndim > 2, tree)
    ),
    "centralized within each layer": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "partly frozen": optax.partition(
        {"kernel": optax.adam(1e-2), "other": optax.set_to_zero()},
        lambda tree: jax.tree.map(
            lambda yes: "kernel" if yes else "other", fnet.optim.weight_decay_mask(tree)
        ),
    ),
}


@pytest.mark.parametrize(
    "optimizer", ["momentum", "decay by rank", "centralized within each layer", "partly frozen"]
)
def test_five_steps_equal_mean(optimizer):
    fused, plain = assert_equals_mean(SMALL, OPTIMIZERS[optimizer])
    if optimizer == "momentum":
        chex.assert_trees_all_equal(fused[0].params, plain[0].params)
        chex.assert_trees_all_equal(fused[0].opt_state, plain[0].opt_state)


@pytest.mark.slow
def test_checkpointed_layers_with_statistics_dropout_and_ema_equal_mean():
    def checkpointed(layer):
        def apply(params, state, x, *, key=None, train):
            run = jax.checkpoint(
                lambda params, state, x, key: layer.apply(params, state, x, key=key, train=train)
            )
            return run(params, state, x, key)

        return Layer(layer.init, apply)

    model = classifier(repeat(checkpointed(full_block()), 2))
    assert_equals_mean(model, OPTIMIZERS["adam"], steps=2, ema_decay=0.9)


def test_bfloat16_momentum_stays_bfloat16():
    rule = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    (state, _), _ = assert_equals_mean(SMALL, rule, steps=1, atol=1e-5)
    chex.assert_type(state.opt_state[0].mu["blocks"]["dense"]["kernel"], jnp.bfloat16)


def test_padding_whose_derivative_is_nan_changes_nothing():
    block = fnet.serial(dense=layers.dense(3, 3), act=layers.activation("tanh"))
    model = fnet.serial(blocks=fnet.repeat(block, 2))

    def loss(params, model_state, batch, key):
        x = batch["x"] / jnp.linalg.norm(batch["x"] * params["scale"][None], axis=-1, keepdims=True)
        y, _ = model.apply({"blocks": params["blocks"]}, {}, x, train=True)
        return (y**2).sum(-1), fnet.Aux(model_state, {})

    optimizer = optax.adam(1e-2)
    step = fnet.make_step(loss, optimizer, IN_BACKWARD)
    x = jax.random.normal(jax.random.key(0), (4, 3))
    padded = {"x": x.at[2:].set(0), "weight": jnp.array([1.0, 1.0, 0.0, 0.0])}
    results = []
    for batch in (padded, {"x": x[:2]}):
        params = model.init(jax.random.key(1))[0] | {"scale": jnp.ones(3)}
        state = fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(2))
        state, metrics = step(state, batch)
        results.append((state.params, metrics))
    chex.assert_trees_all_close(*results, atol=1e-6)


def test_several_stacks_at_any_path():
    model = serial(
        encoder=serial(embed=layers.dense(5, WIDTH), blocks=repeat(small_block(), 2)),
        decoder=repeat(small_block(), 3),
        head=layers.dense(WIDTH, 3),
    )
    assert_equals_mean(
        model, OPTIMIZERS["adamw"], optimizer_in_backward("encoder/blocks", "decoder")
    )


def test_a_stack_may_be_the_whole_network():
    model = repeat(serial(dense=layers.dense(5, 5), act=layers.activation("gelu")), 1)
    assert_equals_mean(model, OPTIMIZERS["adam"], optimizer_in_backward(""))


def test_the_loss_may_use_outputs_of_the_layers():
    """Like a mixture of experts, whose layers return a load-balancing loss."""
    dense = layers.dense(WIDTH, WIDTH)

    def apply(params, state, x, *, key=None, train):
        y, _ = dense.apply(params, {}, x, train=train)
        return x + jnp.tanh(y), {"load": jnp.square(y).mean(), "calls": state["calls"] + 1}

    def init(key):
        return dense.init(key)[0], {"load": jnp.zeros(()), "calls": jnp.zeros((), jnp.int32)}

    model = classifier(repeat(Layer(init, apply), 3))
    loss = loss_of(model, lambda params, state: state["blocks"]["load"].sum())
    (fused, _), _ = assert_equals_mean(model, OPTIMIZERS["sgd"], loss=loss)
    chex.assert_trees_all_equal(fused.model_state["blocks"]["calls"], jnp.full(3, 5))


def test_layers_may_close_over_other_parameters():
    dense = layers.dense(WIDTH, WIDTH)

    def model_with(context):
        def apply(params, state, x, *, key=None, train):
            y, _ = dense.apply(params, {}, x, train=train)
            return x + jnp.tanh(y * context[None]), state

        return classifier(repeat(Layer(dense.init, apply), 3))

    def loss(params, state, batch, key):
        context = params["head"]["kernel"].sum(1)
        model = model_with(context)
        return loss_of(model)(params, state, batch, key)

    assert_equals_mean(model_with(jnp.zeros(WIDTH)), OPTIMIZERS["sgd"], loss=loss)


def test_sharded_parameters_stay_sharded():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(state):
        def sharding(leaf):
            return NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 1), "data"))

        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.device_put(
            state, jax.tree.map(lambda a: sharding(a) if a.ndim == 3 else everywhere, state)
        )

    (fused, _), _ = assert_equals_mean(SMALL, OPTIMIZERS["momentum"], place=place, steps=2)
    kernel = fused.params["blocks"]["dense"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, None, "data")


def test_layers_may_be_trained_in_evaluation_mode():
    """With running statistics and without dropout."""
    model = classifier(repeat(full_block(), 2))

    def apply(params, state, x, *, key, train):
        return model.apply(params, state, x, train=False)

    loss = loss_of(model, apply=apply)
    (fused, _), _ = assert_equals_mean(model, OPTIMIZERS["momentum"], loss=loss, steps=2)
    chex.assert_trees_all_equal(fused.model_state, initial(model)[1])


# Memory of compiled programs, relative to the parameters.

DEPTH, WIDE = 16, 128


def wide_stack(dtype=jnp.float32):
    dense = serial(dense=layers.dense(WIDE, WIDE), act=layers.activation("relu"))
    model = serial(blocks=repeat(dense, DEPTH))

    def loss(params, state, batch, key):
        y, state = model.apply(params, state, batch["x"].astype(dtype), train=True)
        return jnp.square(y.astype(jnp.float32)).mean(-1), fnet.Aux(state, {})

    return model, loss


def wide_step(optimizer, mode, dtype=jnp.float32):
    """Return the step of the wide stack with the shapes of its arguments, and its parameters' bytes."""
    model, loss = wide_stack(dtype)
    create = functools.partial(TrainState.create, model, OPTIMIZERS[optimizer])
    state = jax.eval_shape(create, jax.random.key(0))
    step = fnet.make_step(loss, OPTIMIZERS[optimizer], mode)
    batch = {"x": jax.ShapeDtypeStruct((4, WIDE), jnp.float32)}
    return (step, state, batch), tree_bytes(state.params)


OF_STATE = [
    ("adam", 3),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sgd", 1), ("lion", 2))),
]
"""Optimizers, and how many arrays of the size of the parameters a state has."""


@pytest.mark.parametrize(("optimizer", "copies"), OF_STATE)
def test_peak_is_little_more_than_the_state(optimizer, copies):
    step, params = wide_step(optimizer, IN_BACKWARD)
    report = fnet.compile_step(*step).report
    # One layer has 1/16 of the parameters.
    assert report.peak.total <= (copies + 0.15) * params
    assert report.donation.aliased_bytes == report.state_bytes
    step, _ = wide_step(optimizer, mean)
    plain = fnet.compile_step(*step, compiler_options=report.compiler_options).report
    assert report.peak.total <= plain.peak.total - 0.95 * params


@pytest.mark.parametrize(("optimizer", "copies"), OF_STATE)
def test_a_compiler_that_drops_barriers_copies_nothing(optimizer, copies):
    step, params = wide_step(optimizer, IN_BACKWARD)
    compiled = fnet.compile_step(*step, compiler_options={}).compiled
    assert peak(compiled).total <= (copies + 0.15) * params


def test_cast_parameters_are_not_saved():
    step, params = wide_step("sgd", IN_BACKWARD, jnp.bfloat16)
    assert peak(fnet.compile_step(*step, compiler_options={}).compiled).total <= 1.25 * params


def test_update_has_its_named_scope_in_the_compiled_program():
    (step, *shapes), _ = wide_step("sgd", IN_BACKWARD)
    text = step.lower(*shapes).compile().as_text()
    layers_of_ops = {layer_of(name) for name in re.findall(r'op_name="([^"]*)"', text)}
    assert {("blocks/optimizer", "optimizer"), ("blocks/dense", "forward")} <= layers_of_ops


# The order in which arrays are overwritten.


W, MU, NU = "params['w']", "opt_state[0].mu['w']", "opt_state[0].nu['w']"
WITH_UNCHANGED = optax.chain(
    optax.trace(0.9), optax.scale(-0.1), optax.masked(optax.ema(0.9), {"w": False})
)
# Names of a stack's arrays, by stage and group.
WRITTEN = {
    "params after the moments they read": (optax.adam(0.1), [[[MU], [NU]], [[W]]]),
    "params before the momentum they read": (optax.lion(0.1, weight_decay=0.0), [[[W]], [[MU]]]),
    "together": (OPTIMIZERS["lion with decay before it"], [[[W, "opt_state[1].mu['w']"]]]),
    "unchanged ones not": (WITH_UNCHANGED, [[["opt_state[0].trace['w']"]], [[W]]]),
}


def test_arrays_are_written_when_nothing_reads_them_anymore():
    params = {"w": jnp.zeros((3, 2))}
    for optimizer, order in WRITTEN.values():
        update = trace_update(optimizer, params, optimizer.init(params), {"w": 0})
        stages = update.stages(0)
        assert [[[update.slots[n].name for n in group] for group in s] for s in stages] == order


def test_arrays_outside_of_stacks_have_no_owner():
    params = {"w": jnp.zeros((3, 2)), "head": jnp.zeros(2)}
    optimizer = optax.adam(0.1)
    update = trace_update(optimizer, params, optimizer.init(params), {"w": 0, "head": REST})
    owners = {slot.name: slot.owner for slot in update.slots}
    assert owners == {
        "params['head']": REST,
        "params['w']": 0,
        "opt_state[0].count": REST,
        "opt_state[0].mu['head']": REST,
        "opt_state[0].mu['w']": 0,
        "opt_state[0].nu['head']": REST,
        "opt_state[0].nu['w']": 0,
    }
    count = next(n for n, slot in enumerate(update.slots) if slot.name.endswith("count"))
    assert update.shared(0) == [count]
