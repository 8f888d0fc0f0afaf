"""Errors of `optimizer_in_backward`."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from fused_optimizer_cases import BATCH, IN_BACKWARD, SMALL, WIDTH, loss_of, small_block

import fnet
from fnet import TrainState, layers, repeat, serial
from fnet.autodiff.fused_optimizer.mode import optimizer_in_backward


def error_message(error, optimizer=None, mode=IN_BACKWARD, loss=None, model=None):
    model, optimizer = model or SMALL, optimizer or optax.sgd(0.1)
    create = functools.partial(TrainState.create, model, optimizer)
    state = jax.eval_shape(create, jax.random.key(0))
    with pytest.raises(error) as raised:
        fnet.make_step(loss or loss_of(model), optimizer, mode).lower(state, BATCH)
    return str(raised.value)


def test_rejects_clipping_by_global_norm():
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    assert error_message(ValueError, rule) == (
        "optimizer_in_backward: the update of params['blocks']['dense']['bias'] needs the gradient "
        "of params['embed']['bias'], but a layer is updated before all gradients are known; use an "
        "optimizer that does not couple layers (optax.clip in place of clip_by_global_norm), or "
        "mode=mean"
    )


def test_rejects_a_global_norm_over_one_stack():
    model = repeat(serial(dense=layers.dense(5, 5)), 3)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    message = error_message(ValueError, rule, optimizer_in_backward(""), model=model)
    assert "the update of params['dense']['bias'] applies reduce_sum to a stack" in message


def test_rejects_optimizers_that_mix_layers():
    for rule, by in (
        (optax.adafactor(1e-2), "reduce_sum"),
        (optax.lamb(1e-2), "reduce_sum"),
        (optax.add_noise(0.1, 0.5, 0), "add with an array of no layer"),
    ):
        message = error_message(ValueError, rule)
        assert f"applies {by} to a stack" in message
        assert "only operations inside of a layer" in message
    for rule in (optax.MultiSteps(optax.sgd(0.1), 2), optax.apply_if_finite(optax.sgd(0.1), 3)):
        assert "before all gradients are known" in error_message(ValueError, rule)


def test_rejects_a_state_without_one_entry_per_layer():
    message = error_message(ValueError, optax.flatten(optax.adam(0.1)))
    assert "grows with the 3 layers of the stack, but not by one entry per layer" in message


def test_rejects_an_update_that_depends_on_the_depth_or_changes_the_dtype_or_the_state():
    def rule(update, init=lambda params: ()):
        return optax.GradientTransformation(init, lambda g, state, params=None: update(g, state))

    by_depth = rule(lambda g, state: (jax.tree.map(lambda a: a / a.shape[0], g), state))
    assert "depends on the number of layers" in error_message(ValueError, by_depth)
    narrow = rule(
        lambda g, state: (g, jax.tree.map(lambda a: a.astype(jnp.bfloat16), g)),
        lambda params: jax.tree.map(jnp.zeros_like, params),
    )
    assert "from float32[1, 8] to bfloat16[1, 8]" in error_message(TypeError, narrow)
    other = rule(lambda g, state: (g, (g,)))
    assert "another structure than optimizer.init" in error_message(ValueError, other)


def test_rejects_the_state_of_another_optimizer():
    create = functools.partial(TrainState.create, SMALL, optax.adam(0.1))
    state = jax.eval_shape(create, jax.random.key(0))
    step = fnet.make_step(loss_of(SMALL), optax.sgd(0.1), IN_BACKWARD)
    with pytest.raises(ValueError, match=r"created with another optimizer"):
        step.lower(state, BATCH)


def test_rejects_a_path_without_a_stack():
    for path, message in (
        ("block", r"no parameters at 'block': expected one of \['blocks', .*\], got 'block'"),
        ("blocks/x", r"no parameters at 'blocks/x': expected one of \['dense'\], got 'x'"),
        ("blocks/dense/kernel/x", "through dicts, not through an array, got 'x'"),
        ("head", r"the parameters at 'head' do not belong to a repeat"),
    ):
        assert re.search(message, error_message(ValueError, mode=optimizer_in_backward(path)))


def test_rejects_no_path_and_overlapping_paths():
    with pytest.raises(ValueError, match="expected the path of a repeat's parameters, got none"):
        optimizer_in_backward()
    with pytest.raises(ValueError, match="'blocks' and 'blocks/dense' overlap"):
        optimizer_in_backward("blocks", "blocks/dense")


def test_rejects_a_stack_that_no_repeat_uses():
    def without(params, state, x, *, key, train):
        y, _ = layers.dense(5, WIDTH).apply(params["embed"], {}, x, train=train)
        return y, state

    message = error_message(ValueError, loss=loss_of(SMALL, apply=without))
    assert "no fnet.repeat was given the parameters at 'blocks'" in message


def test_rejects_a_stack_that_no_gradient_reaches():
    def frozen(params, state, x, *, key, train):
        x, _ = layers.dense(5, WIDTH).apply(params["embed"], {}, x, train=train)
        x, state = repeat(small_block(), 3).apply(params["blocks"], state, x, train=train)
        x = jax.lax.stop_gradient(x)
        return layers.dense(WIDTH, 3).apply(params["head"], {}, x, train=train)[0], state

    message = error_message(ValueError, loss=loss_of(SMALL, apply=frozen))
    assert "no gradient reaches the layers of 'blocks'" in message


def test_rejects_layers_that_are_applied_twice():
    def twice(params, state, x, *, key, train):
        y, state = SMALL.apply(params, state, x, train=train)
        return y + SMALL.apply(params, state, -x, train=train)[0], state

    assert "'blocks' are applied twice" in error_message(
        ValueError, loss=loss_of(SMALL, apply=twice)
    )


def test_rejects_layers_under_a_transformation_in_the_loss():
    for transform in (jax.checkpoint, jax.vmap, jax.jit):

        def apply(params, state, x, *, key, train, wrap=transform):
            return wrap(lambda x: SMALL.apply(params, state, x, train=train)[0])(x), state

        message = error_message(ValueError, loss=loss_of(SMALL, apply=apply))
        assert "'blocks' are applied under a transformation in the loss" in message


def test_rejects_any_other_use_of_the_stacks_parameters():
    for penalty in (
        lambda params, state: sum(jnp.square(a).sum() for a in jax.tree.leaves(params)),
        lambda params, state: optax.tree.norm(params),
        lambda params, state: params["blocks"]["dense"]["kernel"].sum(),
        lambda params, state: jax.checkpoint(lambda p: p["head"]["bias"].sum())(params),
        lambda params, state: jnp.sum(params["blocks"]),
        lambda params, state: params["blocks"] * 2.0,
        lambda params, state: 2.0 ** params["blocks"],
        lambda params, state: params["blocks"].get("dense"),
        lambda params, state: sum(params["blocks"]),
    ):
        message = error_message(TypeError, loss=loss_of(SMALL, penalty))
        assert "nothing else can use them" in message
        assert "'blocks'" in message


def test_says_that_it_serves_stacks_of_fnet():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.tanh(nn.Dense(4)(x)), None

    scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    network, optimizer, x = scan(), optax.sgd(0.1), jnp.ones((2, 4))
    params = network.init(jax.random.key(0), x, None)["params"]
    state = TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(1))

    def loss(params, model_state, batch, key):
        return network.apply({"params": params}, batch["x"], None)[0].sum(-1)

    step = fnet.make_step(loss, optimizer, optimizer_in_backward("Dense_0"))
    with pytest.raises(TypeError, match=r"fnet.repeat, .* no scan of another library"):
        step.lower(state, {"x": x})


def test_errors_of_the_loss_pass_unchanged():
    def loss(params, state, batch, key):
        raise ValueError("a mistake")

    assert error_message(ValueError, loss=loss) == "a mistake"


def test_rejects_accumulation_over_microbatches():
    message = error_message(TypeError, mode=lambda loss: IN_BACKWARD(loss))
    assert "cannot be accumulated over microbatches" in message
