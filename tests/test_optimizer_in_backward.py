import collections
import functools
import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from in_backward_cases import BATCH, INSIDE, SMALL, WIDTH, classifier, loss_of, small_block
from jax.sharding import NamedSharding, PartitionSpec
from layer_cases import initial

import fnet
from fnet import Layer, TrainState, layers, repeat, residual, serial
from fnet.autodiff import mean
from fnet.autodiff.elementwise import layerwise_update
from fnet.autodiff.in_backward import optimizer_in_backward
from fnet.autodiff.layerwise import REST
from fnet.memory import peak, tree_bytes
from fnet.memory.timeline import layer_of


def full_block():
    """With everything that a layer can have: parameters, state, randomness."""
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
    """The state and the last metrics after some steps, all of them in the same buffers."""
    start = Layer(lambda key: jax.tree.map(jnp.asarray, initial(model)), model.apply)
    create = functools.partial(TrainState.create, start, optimizer, ema=ema_decay is not None)
    state = jax.jit(create)(jax.random.key(0))
    step = fnet.make_step(loss or loss_of(model), optimizer, mode, ema_decay=ema_decay)
    if place:
        state = place(state)
    else:
        # One program, in place of the smallest of several.
        step = fnet.compile_step(step, state, BATCH, compiler_options={})
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return state.replace(key=jax.random.key_data(state.key)), metrics


def assert_the_same(model, optimizer, mode=INSIDE, *, atol=1e-6, **how):
    inside = trained(model, optimizer, mode, **how)
    after = trained(model, optimizer, mean, **how)
    chex.assert_trees_all_close(inside, after, atol=atol, rtol=1e-5)
    return inside, after


SCHEDULE = fnet.optim.make_schedule("cosine", 1e-2, 20, warmup_steps=2)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "lion": fnet.optim.make_optimizer("lion", 1e-3, weight_decay=0.1),
    "adam": optax.adam(1e-2),
    "adamw": fnet.optim.make_optimizer("adamw", SCHEDULE, weight_decay=0.1),
    "lion with decay before it": optax.chain(
        optax.add_decayed_weights(0.1), optax.scale_by_lion(), optax.scale(-1e-3)
    ),
    "decay by rank": optax.adamw(
        1e-2, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda a: a.ndim > 2, tree)
    ),
    "partly frozen": optax.partition(
        {"kernel": optax.adam(1e-2), "other": optax.set_to_zero()},
        lambda tree: jax.tree.map(
            lambda yes: "kernel" if yes else "other", fnet.optim.weight_decay_mask(tree)
        ),
    ),
}


QUICK = "momentum", "adam", "partly frozen"


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in OPTIMIZERS],
)
def test_five_steps_equal_those_with_the_optimizer_after_the_gradient(optimizer):
    inside, after = assert_the_same(SMALL, OPTIMIZERS[optimizer])
    if optimizer in ("sgd", "momentum"):
        chex.assert_trees_all_equal(inside[0].params, after[0].params)
        chex.assert_trees_all_equal(inside[0].opt_state, after[0].opt_state)


@pytest.mark.slow
def test_layers_with_statistics_and_dropout_are_the_same_and_so_is_the_average():
    assert_the_same(classifier(repeat(full_block(), 2)), OPTIMIZERS["adam"], ema_decay=0.9)


@pytest.mark.slow
def test_recomputed_layers_are_the_same():
    def recomputed(layer):
        def apply(params, state, x, *, key=None, train):
            run = jax.checkpoint(
                lambda params, state, x, key: layer.apply(params, state, x, key=key, train=train)
            )
            return run(params, state, x, key)

        return Layer(layer.init, apply)

    assert_the_same(classifier(repeat(recomputed(full_block()), 2)), OPTIMIZERS["sgd"], steps=2)


def test_momentum_in_bfloat16_stays_in_bfloat16():
    rule = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    (state, _), _ = assert_the_same(SMALL, rule, steps=1, atol=1e-5)
    chex.assert_type(state.opt_state[0].mu["blocks"]["dense"]["kernel"], jnp.bfloat16)


@pytest.mark.slow
def test_transformer_blocks_are_the_same():
    blocks = repeat(layers.transformer(WIDTH, 2, 1, causal=True), 2)
    model = serial(embed=layers.dense(5, WIDTH), blocks=blocks, head=layers.dense(WIDTH, 3))

    def apply(params, state, x, *, key, train):
        tokens = x[:, None] * jnp.arange(1.0, 5.0)[None, :, None]
        y, state = model.apply(params, state, tokens, key=key, train=train)
        return y.mean(1), state

    # A bias of the keys has no gradient but for rounding, which adam would divide by itself.
    loss = loss_of(model, apply=apply)
    assert_the_same(model, OPTIMIZERS["momentum"], loss=loss, steps=2)


@pytest.mark.slow
def test_several_stacks_may_lie_anywhere_in_the_parameters():
    model = serial(
        encoder=serial(embed=layers.dense(5, WIDTH), blocks=repeat(small_block(), 2)),
        decoder=repeat(small_block(), 3),
        head=layers.dense(WIDTH, 3),
    )
    assert_the_same(model, OPTIMIZERS["adamw"], optimizer_in_backward("encoder/blocks", "decoder"))


def test_parameters_may_be_in_an_order_of_their_own():
    def init(key):
        params, state = SMALL.init(key)
        return collections.OrderedDict((name, params[name]) for name in order), state

    order = ["head", "embed", "blocks"]
    assert_the_same(Layer(init, SMALL.apply), OPTIMIZERS["momentum"], loss=loss_of(SMALL), steps=2)


@pytest.mark.parametrize("depth", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_stack_may_be_the_whole_network(depth):
    model = repeat(serial(dense=layers.dense(5, 5), act=layers.activation("gelu")), depth)
    assert_the_same(model, OPTIMIZERS["adam"], optimizer_in_backward(""))


def test_the_loss_may_use_the_layers_outputs_beside_x():
    """As a mixture of experts does, whose layers give a loss of their own."""
    dense = layers.dense(WIDTH, WIDTH)

    def apply(params, state, x, *, key=None, train):
        y, _ = dense.apply(params, {}, x, train=train)
        return x + jnp.tanh(y), {"load": jnp.square(y).mean(), "calls": state["calls"] + 1}

    def init(key):
        return dense.init(key)[0], {"load": jnp.zeros(()), "calls": jnp.zeros((), jnp.int32)}

    model = classifier(repeat(Layer(init, apply), 3))
    loss = loss_of(model, lambda params, state: state["blocks"]["load"].sum())
    (inside, _), _ = assert_the_same(model, OPTIMIZERS["sgd"], loss=loss)
    chex.assert_trees_all_equal(inside.model_state["blocks"]["calls"], jnp.full(3, 5))


def test_layers_may_close_over_what_is_trained():
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

    assert_the_same(model_with(jnp.zeros(WIDTH)), OPTIMIZERS["sgd"], loss=loss)


def test_sharded_parameters_stay_sharded():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(state):
        def sharding(leaf):
            return NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 1), "data"))

        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.device_put(
            state,
            jax.tree.map(lambda a: sharding(a) if a.ndim == 3 else everywhere, state),
        )

    (inside, _), _ = assert_the_same(SMALL, OPTIMIZERS["momentum"], place=place, steps=2)
    kernel = inside.params["blocks"]["dense"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, None, "data")


@pytest.mark.slow
def test_layers_may_be_trained_as_they_are_evaluated():
    """With the statistics as they are and without dropout."""
    model = classifier(repeat(full_block(), 2))

    def apply(params, state, x, *, key, train):
        return model.apply(params, state, x, train=False)

    loss = loss_of(model, apply=apply)
    (inside, _), _ = assert_the_same(model, OPTIMIZERS["momentum"], loss=loss, steps=2)
    chex.assert_trees_all_equal(inside.model_state, initial(model)[1])


# Sizes of compiled programs, in bytes of the parameters.

DEPTH, WIDE = 16, 128


def wide_stack(dtype=jnp.float32):
    dense = serial(dense=layers.dense(WIDE, WIDE), act=layers.activation("relu"))
    model = serial(blocks=repeat(dense, DEPTH))

    def loss(params, state, batch, key):
        y, state = model.apply(params, state, batch["x"].astype(dtype), train=True)
        return jnp.square(y.astype(jnp.float32)).mean(-1), fnet.Aux(state, {})

    return model, loss


def wide_step(optimizer, mode, dtype=jnp.float32):
    """The step of the wide stack, its arguments' shapes, and its parameters' bytes."""
    model, loss = wide_stack(dtype)
    create = functools.partial(TrainState.create, model, OPTIMIZERS[optimizer])
    state = jax.eval_shape(create, jax.random.key(0))
    step = fnet.make_step(loss, OPTIMIZERS[optimizer], mode)
    batch = {"x": jax.ShapeDtypeStruct((4, WIDE), jnp.float32)}
    return (step, state, batch), tree_bytes(state.params)


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 1), ("adam", 3)])
def test_the_peak_is_the_state_and_little_more(optimizer, copies):
    step, params = wide_step(optimizer, INSIDE)
    report = fnet.compile_step(*step).report
    # A layer's parameters are 1 / 16 of all.
    assert report.peak.total <= (copies + 0.15) * params
    assert report.donation.aliased_bytes == report.state_bytes
    step, _ = wide_step(optimizer, mean)
    after = fnet.compile_step(*step, compiler_options=report.compiler_options).report
    assert report.peak.total <= after.peak.total - 0.95 * params


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        ("adam", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sgd", 1), ("lion", 2))),
    ],
)
def test_a_compiler_that_drops_barriers_copies_nothing_either(optimizer, copies):
    step, params = wide_step(optimizer, INSIDE)
    compiled = fnet.compile_step(*step, compiler_options={}).compiled
    assert peak(compiled).total <= (copies + 0.15) * params


def test_parameters_that_are_cast_are_not_kept_a_second_time():
    step, params = wide_step("sgd", INSIDE, jnp.bfloat16)
    compiled = fnet.compile_step(*step, compiler_options={}).compiled
    assert peak(compiled).total <= 1.25 * params


def test_the_update_carries_its_name_into_the_compiled_program():
    (step, *shapes), _ = wide_step("sgd", INSIDE)
    text = step.lower(*shapes).compile().as_text()
    found = {layer_of(name) for name in re.findall(r'op_name="([^"]*)"', text)}
    assert {("blocks/optimizer", "optimizer"), ("blocks/dense", "forward")} <= found


# The order in which arrays are overwritten.


def written(optimizer):
    """Names of the arrays of a stack, by stage and group."""
    params = {"w": jnp.zeros((3, 2))}
    update = layerwise_update(optimizer, params, optimizer.init(params), {"w": 0})
    return [
        [[update.slots[n].name for n in group] for group in stage] for stage in update.stages(0)
    ]


def test_what_depends_on_a_new_value_is_written_after_it():
    assert written(optax.adam(0.1)) == [
        [["opt_state[0].mu['w']"], ["opt_state[0].nu['w']"]],
        [["params['w']"]],
    ]


def test_what_depends_on_an_old_value_is_written_before_it_is_gone():
    assert written(optax.lion(0.1, weight_decay=0.0)) == [
        [["params['w']"]],
        [["opt_state[0].mu['w']"]],
    ]


def test_what_depends_on_each_other_is_made_before_either_is_written():
    assert written(OPTIMIZERS["lion with decay before it"]) == [
        [["params['w']", "opt_state[1].mu['w']"]]
    ]


def test_what_does_not_change_is_not_written():
    assert written(
        optax.chain(optax.trace(0.9), optax.scale(-0.1), optax.masked(optax.ema(0.9), {"w": False}))
    ) == [
        [["opt_state[0].trace['w']"]],
        [["params['w']"]],
    ]


def test_what_is_in_no_stack_has_no_owner():
    params = {"w": jnp.zeros((3, 2)), "head": jnp.zeros(2)}
    optimizer = optax.adam(0.1)
    update = layerwise_update(optimizer, params, optimizer.init(params), {"w": 0, "head": REST})
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
