"""What the optimizer inside the backward pass refuses, and what it says then."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from in_backward_cases import BATCH, INSIDE, SMALL, WIDTH, loss_of, small_block

import fnet
from fnet import TrainState, layers, repeat, serial
from fnet.autodiff.in_backward import optimizer_in_backward


def refusal(error, optimizer=None, mode=INSIDE, loss=None, model=None):
    model, optimizer = model or SMALL, optimizer or optax.sgd(0.1)
    create = functools.partial(TrainState.create, model, optimizer)
    state = jax.eval_shape(create, jax.random.key(0))
    with pytest.raises(error) as raised:
        fnet.make_step(loss or loss_of(model), optimizer, mode).lower(state, BATCH)
    return str(raised.value)


def test_clipping_by_global_norm_is_refused():
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    assert refusal(ValueError, rule) == (
        "optimizer_in_backward: the update of params['blocks']['dense']['bias'] needs the gradient "
        "of params['embed']['bias'], but each layer is updated, and its gradient gone, before all "
        "gradients are known, as a global norm needs them; leave out of the optimizer what couples "
        "them (in place of clip_by_global_norm: optax.clip), or use mode=mean"
    )


def test_a_global_norm_over_one_stack_alone_is_refused():
    model = repeat(serial(dense=layers.dense(5, 5)), 3)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    message = refusal(ValueError, rule, optimizer_in_backward(""), model=model)
    assert "the update of params['dense']['bias'] applies reduce_sum to a stack" in message


@pytest.mark.parametrize(
    ("rule", "by"),
    [
        (optax.adafactor(1e-2), "reduce_sum"),
        (optax.lamb(1e-2), "reduce_sum"),
        (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "reduce_sum"),
        (optax.chain(optax.centralize(), optax.sgd(0.1)), "reduce_sum"),
        (
            optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
            "add with an array of no layer",
        ),
    ],
)
def test_rules_that_mix_elements_are_refused_by_their_equations(rule, by):
    message = refusal(ValueError, rule)
    assert f"applies {by} to a stack" in message
    assert "only elementwise operations" in message


@pytest.mark.parametrize(
    "rule", [optax.MultiSteps(optax.sgd(0.1), 2), optax.apply_if_finite(optax.sgd(0.1), 3)]
)
def test_rules_that_look_at_all_gradients_first_are_refused(rule):
    assert "before all gradients are known" in refusal(ValueError, rule)


def test_a_rule_whose_state_is_no_entry_a_layer_is_refused():
    message = refusal(ValueError, optax.flatten(optax.adam(0.1)))
    assert "grows with the stack's 3 layers, but not by an entry for each" in message


def test_a_rule_that_depends_on_the_depth_is_refused():
    def scaled(updates, state, params=None):
        return jax.tree.map(lambda g: g / g.shape[0], updates), state

    rule = optax.GradientTransformation(optax.identity().init, scaled)
    assert "depends on how many layers the stack has" in refusal(ValueError, rule)


def test_a_drifting_dtype_is_refused():
    rule = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda g, state, params=None: (g, jax.tree.map(lambda a: a.astype(jnp.bfloat16), g)),
    )
    message = refusal(TypeError, rule)
    assert "changes from float32[1, 8] to bfloat16[1, 8]" in message


def test_a_state_that_grows_leaves_is_refused():
    rule = optax.GradientTransformation(lambda params: (), lambda g, state, params=None: (g, (g,)))
    assert "other leaves than optimizer.init" in refusal(ValueError, rule)


def test_another_optimizers_state_is_refused():
    create = functools.partial(TrainState.create, SMALL, optax.adam(0.1))
    state = jax.eval_shape(create, jax.random.key(0))
    step = fnet.make_step(loss_of(SMALL), optax.sgd(0.1), INSIDE)
    with pytest.raises(ValueError, match=r"not that of optimizer\.init\(params\)"):
        step.lower(state, BATCH)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["block"], r"no parameters at 'block': expected one of \['blocks', .*\], got 'block'"),
        (["blocks/x"], r"no parameters at 'blocks/x': expected one of \['dense'\], got 'x'"),
        (["blocks/dense/kernel/x"], "through dicts, not through an array, got 'x'"),
        (["head"], r"the parameters at 'head' are not those of a repeat"),
    ],
)
def test_a_path_to_no_stack_is_refused(paths, message):
    assert re.search(message, refusal(ValueError, mode=optimizer_in_backward(*paths)))


def test_no_path_and_overlapping_paths_are_refused():
    with pytest.raises(ValueError, match="name the path of a repeat's parameters"):
        optimizer_in_backward()
    with pytest.raises(ValueError, match="'blocks' and 'blocks/dense' overlap"):
        optimizer_in_backward("blocks", "blocks/dense")


def test_a_stack_that_no_repeat_uses_is_refused():
    def without(params, state, x, *, key, train):
        y, _ = layers.dense(5, WIDTH).apply(params["embed"], {}, x, train=train)
        return y, state

    message = refusal(ValueError, loss=loss_of(SMALL, apply=without))
    assert "no fnet.repeat was given the parameters at 'blocks'" in message


def test_a_stack_that_no_gradient_reaches_is_refused():
    def frozen(params, state, x, *, key, train):
        x, _ = layers.dense(5, WIDTH).apply(params["embed"], {}, x, train=train)
        x, state = repeat(small_block(), 3).apply(params["blocks"], state, x, train=train)
        x = jax.lax.stop_gradient(x)
        return layers.dense(WIDTH, 3).apply(params["head"], {}, x, train=train)[0], state

    message = refusal(ValueError, loss=loss_of(SMALL, apply=frozen))
    assert "no gradient reaches the layers of 'blocks'" in message


def test_layers_that_are_applied_twice_are_refused():
    def twice(params, state, x, *, key, train):
        y, state = SMALL.apply(params, state, x, train=train)
        return y + SMALL.apply(params, state, -x, train=train)[0], state

    assert "'blocks' are applied twice" in refusal(ValueError, loss=loss_of(SMALL, apply=twice))


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.vmap, jax.jit])
def test_layers_under_a_transformation_in_the_loss_are_refused(transform):
    def apply(params, state, x, *, key, train):
        return transform(lambda x: SMALL.apply(params, state, x, train=train)[0])(x), state

    message = refusal(ValueError, loss=loss_of(SMALL, apply=apply))
    assert "'blocks' are applied under a transformation in the loss" in message


@pytest.mark.parametrize(
    "penalty",
    [
        lambda params, state: sum(jnp.sum(a**2) for a in jax.tree.leaves(params)),
        lambda params, state: sum(jnp.square(a).sum() for a in jax.tree.leaves(params)),
        lambda params, state: optax.tree.norm(params),
        lambda params, state: params["blocks"]["dense"]["kernel"].sum(),
        lambda params, state: jax.checkpoint(lambda p: p["head"]["bias"].sum())(params),
    ],
)
def test_any_other_use_of_the_stacks_parameters_is_refused(penalty):
    message = refusal(TypeError, loss=loss_of(SMALL, penalty))
    assert "nothing else can take them" in message
    assert "['blocks']" in message


def test_an_error_of_the_loss_itself_stays_what_it_is():
    def loss(params, state, batch, key):
        raise ValueError("a mistake")

    assert refusal(ValueError, loss=loss) == "a mistake"


def test_it_gives_no_gradient_to_accumulate():
    message = refusal(TypeError, mode=lambda loss: INSIDE(loss))
    assert "over microbatches, it would update after each of them" in message
