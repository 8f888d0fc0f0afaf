"""Estimated peaks of traced steps against those of compiled ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fnet
from benchmarks.random_losses import random_loss
from fnet import memory
from fnet.memory.assemble import Step
from fnet.memory.estimate import density_of

pytestmark = pytest.mark.usefixtures("allow_rank_promotion")


def estimate_and_peak(loss, params, batch, optimizer):
    shapes = jax.eval_shape(optimizer.init, params)
    has_aux = isinstance(jax.eval_shape(loss, params, batch), tuple)

    def step(params, moments, batch):
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return of_traced(jax.jit(step, donate_argnums=(0, 1)).trace(params, shapes, batch))


def of_traced(traced):
    options = memory.CANDIDATE_OPTIONS["cpu"]
    peak = min(memory.estimate_peak(traced.lower(), o).assigned for o in options)
    donated = [a.donated for a in jax.tree.leaves(traced.args_info)]
    return Step(traced.jaxpr, donated).estimate()[0], peak


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.gelu])
def test_layers_are_estimated_to_within_two_arrays(activation, checkpoint):
    layer = jax.checkpoint(activation) if checkpoint else activation

    def loss(params, x):
        for w in params:
            x = x + layer(x @ w)
        return jax.numpy.square(x).mean()

    params, x = [0.1 * np.eye(64, dtype=np.float32)] * 6, np.ones((2048, 64), np.float32)
    estimated, peak = estimate_and_peak(loss, params, x, optax.adam(1e-3))
    assert abs(estimated - peak) < 2.1 * x.nbytes


def test_a_product_copies_an_operand_whose_axes_are_in_another_order():
    def estimated(equation, *shapes):
        args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        traced = jax.jit(lambda *a: jax.numpy.einsum(equation, *a)).trace(*args)
        return Step(traced.jaxpr, [False, False]).estimate()[0] / 4

    x, y = 8 * 16 * 32, 8 * 16 * 64
    assert estimated("btd,de->bte", (8, 16, 32), (32, 64)) == x + 32 * 64 + y
    assert estimated("btd,te->bde", (8, 16, 32), (16, 64)) == x + 16 * 64 + 8 * 32 * 64 + x


@pytest.mark.parametrize("count", [1, 4])
def test_microbatches_are_estimated_to_within_a_few_of_their_arrays(count):
    def loss(params, model_state, batch, key):
        x = batch["x"]
        for w in params:
            x = x + jax.numpy.tanh(x @ w)
        return jax.numpy.square(x).mean(-1)

    optimizer, x = optax.adam(1e-3), np.ones((8192, 64), np.float32)
    params = [0.1 * np.eye(64, dtype=np.float32)] * 12
    state = fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))
    step = fnet.make_step(loss, optimizer, microbatches=count)
    estimated, peak = of_traced(step.trace(state, {"x": x}))
    assert abs(estimated - peak) < 3.1 * x.nbytes / count


@pytest.mark.slow
def test_most_random_steps_are_estimated_within_5_percent_or_1_megabyte():
    programs = [random_loss(seed, 3)[1] for seed in range(60)]
    with jax.debug_key_reuse(False):
        pairs = [estimate_and_peak(*p[:3], p.optimizer()) for p in programs]
    assert np.mean([abs(e - p) <= max(0.05 * p, 1e6) for e, p in pairs]) >= 0.9
    assert np.median([abs(e / p - 1) for e, p in pairs]) < 0.05


def test_a_convolution_has_a_workspace_and_copies_operands_in_another_order():
    positions, kernel, width, features = 8 * 9 * 10, 3 * 2, 6, 4
    x, w, y = positions * width, kernel * width * features, positions * features

    def estimated(*names, dilation=1, groups=1):
        sizes = {"N": 8, "H": 9, "W": 10, "C": width, "h": 3, "w": 2, "I": width // groups}
        sizes["O"] = features
        named = names[0], names[1].replace("H", "h").replace("W", "w")
        args = [jax.ShapeDtypeStruct([sizes[d] for d in name], "float32") for name in named]
        conv = functools.partial(
            jax.lax.conv_general_dilated,
            window_strides=(dilation, dilation),
            padding=[(1, 1), (1, 0)],
            lhs_dilation=(dilation, dilation),
            dimension_numbers=(*names, "NHWC"),
            feature_group_count=groups,
        )
        return Step(jax.jit(conv).trace(*args).jaxpr, [False, False]).estimate()[0] // 4

    plain = estimated("NHWC", "HWIO")
    assert plain == x + w + y
    assert estimated("NCHW", "HWIO") - plain == x
    assert estimated("NHWC", "OIHW") - plain == w
    # On a CPU: patches of all groups, or the product of each pixel with all of the kernel.
    assert estimated("NHWC", "HWIO", groups=2) - plain == positions * kernel * width - w // 2
    products = positions * kernel * features
    assert estimated("NHWC", "HWIO", dilation=2) - plain == products


def test_densities_are_the_flops_of_a_byte_that_is_made():
    def density(f, *shapes, dtype="float32"):
        args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return density_of(jax.make_jaxpr(f)(*args).eqns[-1])

    conv = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="VALID",
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    for f, shapes in ((jnp.matmul, ((5, 7), (7, 3))), (conv, ((2, 6, 9, 8), (4, 6, 3, 2)))):
        args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        made = jax.eval_shape(f, *args)
        flops = memory.estimate_cost(jax.make_jaxpr(f)(*args)).flops
        assert density(f, *shapes) == flops / (made.size * 4)
        assert density(f, *shapes, dtype="bfloat16") == flops / (made.size * 2)
    assert density(lambda x: x.sum((0, 2)), (5, 7, 3)) == 15 / 4
    assert density(lambda x, y: x + y, (5,), (5,)) == density(lambda x: x.T, (5, 7)) == 0
    assert density(jnp.exp, (5,)) == 10 / 4
    assert density(jax.lax.cumsum, (5,)) == 4 / 4
    assert density(jax.lax.sort, (5,)) == 100
