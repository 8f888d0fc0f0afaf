"""Compact optimizers: 24-bit master weights, 8-bit moments, and the bytes of the compiled step."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from rounding import one_rounding

import fnet
from fnet import TrainState, layers, repeat, residual, serial
from fnet.autodiff import mean, optimizer_in_backward
from fnet.memory import tree_bytes
from fnet.optim import compact_adamw, compact_lion, compact_sgd
from train.run.mesh import Layout, shardings

BFLOAT16 = jnp.bfloat16


def update(optimizer, grads, state, params):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def random_bfloat16(key, shape, *, low=-100, high=100):
    """Random signs, exponents in [low, high) and mantissas."""
    keys = jax.random.split(key, 3)
    sign = jax.random.bernoulli(keys[0], 0.5, shape).astype(jnp.uint16) << 15
    exponent = jax.random.randint(keys[1], shape, 127 + low, 127 + high).astype(jnp.uint16) << 7
    mantissa = jax.random.bits(keys[2], shape, jnp.uint16) & 0x7F
    return jax.lax.bitcast_convert_type(sign | exponent | mantissa, BFLOAT16)


def half_ulp(p):
    _, exponent = np.frexp(np.abs(np.asarray(p, np.float64)))
    return np.ldexp(1.0, exponent - 9)


def master(p, correction):
    p = np.asarray(p, np.float64)
    return p + np.asarray(correction, np.float64) / 127 * half_ulp(p)


def test_parameters_and_corrections_are_the_master_weights():
    keys = jax.random.split(jax.random.key(0), 5)
    shape = 64, 1024
    p = random_bfloat16(keys[0], shape)
    # Also gradients near the parameter: weights that change sign, vanish or barely change.
    near = jnp.where(jax.random.bernoulli(keys[1], 0.5, shape), p, -p)
    near = near * random_bfloat16(keys[2], shape, low=-30, high=3)
    grads = jnp.where(jax.random.bernoulli(keys[3], 0.3, shape), p, near)
    optimizer = compact_sgd(1.0, momentum=0.0)
    state = optimizer.init(p)
    correction = jax.random.randint(keys[4], shape, -127, 128).astype(jnp.int8)
    state = state._replace(correction=correction)
    new, state = jax.jit(update, static_argnums=0)(optimizer, grads, state, p)
    assert new.dtype == BFLOAT16
    expected = master(p, correction) - np.asarray(grads, np.float64)
    # One step of the correction, and the rounding of float32 sums of p and the update.
    largest = np.maximum(abs(np.asarray(p, np.float64)), abs(np.asarray(grads, np.float64)))
    tolerance = half_ulp(new) / 127 + 2.0**-21 * largest
    np.testing.assert_array_less(abs(master(new, state.correction) - expected), tolerance)
    assert float(jnp.mean(state.correction != 0)) > 0.3  # XLA may not leave out the rounding


def test_weights_without_gradient_keep_their_bits():
    keys = jax.random.split(jax.random.key(1), 2)
    p = random_bfloat16(keys[0], (32, 512))
    optimizer = compact_adamw(0.1, weight_decay=0.0)
    # Corrections of all but a half, where p may be one of two neighbours.
    correction = jax.random.randint(keys[1], p.shape, -62, 63).astype(jnp.int8)
    state = optimizer.init(p)._replace(correction=correction)
    new = p
    for _ in range(3):
        new, state = jax.jit(update, static_argnums=0)(optimizer, jnp.zeros_like(p), state, new)
    np.testing.assert_array_equal(new, p)
    np.testing.assert_array_equal(state.correction, correction)


def assert_equal_but_for_random_rounding(a, b):
    """Two programs may round a float32 sum differently, which a stochastic rounding enlarges."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.mean(x != y) < 0.03 or jnp.issubdtype(x.dtype, jnp.floating)
        if jnp.issubdtype(x.dtype, jnp.floating):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            np.testing.assert_allclose(x, y, one_rounding(jnp.bfloat16), 1e-6)


PAIRS = {
    "adamw": (compact_adamw(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)),
    "adamw by schedule": (
        compact_adamw(optax.linear_schedule(1e-2, 0, 30), 0.8, 0.9, 1e-6, weight_decay=0.0),
        optax.adamw(optax.linear_schedule(1e-2, 0, 30), 0.8, 0.9, 1e-6, weight_decay=0.0),
    ),
    "sgd": (compact_sgd(1e-2, 0.7), optax.sgd(1e-2, 0.7)),
    "nesterov and decay": (
        compact_sgd(1e-2, 0.7, nesterov=True, weight_decay=0.2),
        optax.chain(optax.add_decayed_weights(0.2), optax.sgd(1e-2, 0.7, nesterov=True)),
    ),
    "lion": (compact_lion(1e-3, weight_decay=0.2), optax.lion(1e-3, weight_decay=0.2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_float32_parameters_are_updated_as_by_optax(name):
    compact, plain = PAIRS[name]
    params = {"scale": jnp.linspace(0.5, 1.5, 7)}
    state, plain_state, expected = compact.init(params), plain.init(params), params
    for i in range(3):
        grads = jax.tree.map(lambda p, i=i: jnp.cos(5 * p + i), params)
        params, state = update(compact, grads, state, params)
        expected, plain_state = update(plain, grads, plain_state, expected)
    chex.assert_trees_all_close(params, expected, rtol=1e-6)


def test_updates_of_float16_parameters_are_rounded_once():
    compact, plain = PAIRS["adamw"]
    params, grads = (jnp.linspace(a, 2 * a, 7).astype(jnp.float16) for a in (0.5, 1e-3))
    got, _ = compact.update(grads, compact.init(params), params)
    params, grads = (a.astype(jnp.float32) for a in (params, grads))
    expected, _ = plain.update(grads, plain.init(params), params)
    np.testing.assert_allclose(got, expected, rtol=one_rounding(jnp.float16))


@pytest.mark.parametrize("name", ["adamw by schedule", "nesterov and decay", "lion"])
def test_bfloat16_parameters_follow_float32_ones(name):
    compact, plain = PAIRS[name]
    start = jax.random.normal(jax.random.key(0), (16, 96)).astype(BFLOAT16)
    params, expected = start, start.astype(jnp.float32)
    state, plain_state = compact.init(params), plain.init(expected)
    steps = [jax.jit(update, static_argnums=0)] * 2
    for i in range(30):
        # The same gradients for both, so that only the rounding differs.
        grads = jax.random.normal(jax.random.key(i), start.shape) + jnp.sin(3 * start)
        grads = grads.astype(BFLOAT16)
        params, state = steps[0](compact, grads, state, params)
        expected, plain_state = steps[1](plain, grads.astype(jnp.float32), plain_state, expected)
    moved = np.asarray(expected - start, np.float64)
    error = master(params, state.correction) - np.asarray(expected, np.float64)
    # Lion's steps are signs, some of which flip near zero.
    assert np.linalg.norm(error) < (0.12 if name == "lion" else 0.03) * np.linalg.norm(moved)


def test_mask_selects_the_leaves_that_decay():
    params = {"kernel": jnp.ones((2, 2), BFLOAT16), "scale": jnp.ones(2)}
    optimizer = compact_adamw(0.1, weight_decay=0.5, mask=fnet.optim.weight_decay_mask)
    grads = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.05, rtol=0.02)
    np.testing.assert_array_equal(updates["scale"], 0)


def test_moments_round_to_a_neighbour_and_are_unbiased():
    optimizer = compact_adamw(0.0, b1=0.0, b2=0.0)  # the moments are the gradient and its square
    grads = jax.random.normal(jax.random.key(0), (64, 1024))
    params = jnp.zeros_like(grads, BFLOAT16)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    value = np.asarray(grads, np.float64)
    groups = abs(value).reshape(64, -1, 32).max(-1)
    for name in ("mu", "nu"):
        scales = np.asarray(state.scales[name], np.float64)
        assert (scales >= groups).all()
        assert (scales <= groups * (1 + 2**-7)).all()
        scale = np.repeat(scales, 32, -1)
        stored = np.asarray(state.moments[name], np.float64)
        if name == "mu":
            x = value / scale
            np.testing.assert_array_less(abs(stored - 254 * x / (1 + abs(x))), 1 + 1e-3)
        else:
            np.testing.assert_array_less(abs(stored - 255 * abs(value) / scale), 1 + 1e-3)
            restored = (scale * stored / 255) ** 2
            np.testing.assert_allclose(restored.mean(), (value**2).mean(), rtol=2e-4)
            small = abs(value) < scale / 255  # most of which nearest rounding would set to 0
            np.testing.assert_allclose(restored[small].mean(), (value[small] ** 2).mean(), rtol=0.1)


@pytest.mark.parametrize(("shape", "dtype"), [((3, 5, 40), BFLOAT16), ((7, 50), jnp.float32)])
def test_chunks_equal_the_whole(shape, dtype):
    whole, chunked = (compact_adamw(0.1, chunk_size=n) for n in (None, 200))
    params = jnp.asarray(jax.random.normal(jax.random.key(0), shape)).astype(BFLOAT16)
    states = [whole.init(params), chunked.init(params)]
    results = [params, params]
    for i in range(2):
        grads = jax.random.normal(jax.random.key(i), shape).astype(dtype)
        for n, optimizer in enumerate((whole, chunked)):
            step = jax.jit(update, static_argnums=0)
            results[n], states[n] = step(optimizer, grads, states[n], results[n])
    assert_equal_but_for_random_rounding((results[0], states[0]), (results[1], states[1]))


def test_state_takes_three_bytes_per_parameter_and_four_per_group():
    params = {"kernel": jnp.zeros((128, 256), BFLOAT16), "scale": jnp.zeros(64)}
    sizes = [
        tree_bytes(compact_adamw(1e-3, group_size=size).init(params))
        - tree_bytes(compact_adamw(1e-3, group_size=size).init({"scale": params["scale"]}))
        for size in (32, 128)
    ]
    assert sizes == [128 * 256 * 3 + 128 * 256 // n * 4 for n in (32, 128)]
    lion = tree_bytes(compact_lion(1e-3).init({"kernel": params["kernel"]}))
    assert lion == 128 * 256 * 2 + 128 * 256 // 32 * 2 + 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compact_adamw(0.1, group_size=0), "compact_adamw: group_size must be >= 1, got 0"),
        (lambda: compact_lion(0.1, chunk_size=0), "compact_lion: chunk_size must be >= 1, got 0"),
        (
            lambda: compact_sgd(0.1).update({}, compact_sgd(0.1).init({})),
            "compact_sgd: update needs params, got None",
        ),
    ],
)
def test_rejects_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The compiled step.

WIDTH, LAYERS = 64, 24
BATCH = {"x": jax.random.normal(jax.random.key(1), (4, WIDTH), BFLOAT16), "label": jnp.arange(4)}
BLOCK = residual(
    serial(
        norm=layers.rms_norm(WIDTH),
        expand=layers.dense(WIDTH, 4 * WIDTH),
        act=layers.activation("relu"),
        contract=layers.dense(4 * WIDTH, WIDTH),
    )
)
MODEL = serial(blocks=repeat(BLOCK, LAYERS), head=layers.dense(WIDTH, 4))


def loss(params, model_state, batch, key):
    logits, model_state = MODEL.apply(params, model_state, batch["x"], key=key, train=True)
    losses = fnet.losses.cross_entropy(logits.astype(jnp.float32), batch["label"])
    return losses, fnet.Aux(model_state, {})


def bfloat16_kernels(params):
    return jax.tree.map(
        lambda p, yes: p.astype(BFLOAT16) if yes else p,
        params,
        fnet.optim.weight_decay_mask(params),
    )


def new_state(optimizer):
    params, model_state = MODEL.init(jax.random.key(0))
    params = bfloat16_kernels(params)
    key = jax.random.key(1)
    return TrainState.create(params=params, model_state=model_state, optimizer=optimizer, key=key)


SIZES = {"mean": (mean, 7), "in the backward pass": (optimizer_in_backward("blocks"), 5)}


@pytest.mark.parametrize("name", SIZES)
def test_bytes_per_parameter_of_the_compiled_step(name):
    (mode, bytes_per_parameter), chunk_size = SIZES[name], 2**14
    optimizer = compact_adamw(1e-3, chunk_size=chunk_size)
    state = jax.eval_shape(lambda: new_state(optimizer))
    step = fnet.make_step(loss, optimizer, mode)
    report = fnet.compile_step(step, state, BATCH).report
    assert report.donation.aliased_bytes == report.state_bytes
    matrices = [p for p in jax.tree.leaves(state.params) if p.dtype == BFLOAT16]
    size = sum(p.size for p in matrices)
    vectors = report.parameters - size
    scales = sum(4 * p.size // p.shape[-1] * -(-p.shape[-1] // 32) for p in matrices)
    assert report.state_bytes == 5 * size + scales + 12 * vectors + 4 + 4 + 8
    # Float32 values of a chunk or of a layer, and activations. A stack in float32 is 4 size / 2.
    layer = size // LAYERS
    expected = report.state_bytes + (bytes_per_parameter - 5) * size
    assert report.peak.total < expected + 16 * vectors + (8 * layer + 16 * chunk_size)
    assert 8 * layer + 16 * chunk_size < size


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [compact_adamw(1e-3), compact_lion(1e-3)], ids=["adamw", "lion"]
)
def test_update_in_the_backward_pass_equals_mean(optimizer):
    results = []
    for mode in (mean, optimizer_in_backward("blocks")):
        step = fnet.make_step(loss, optimizer, mode)
        state = new_state(optimizer)
        step = fnet.compile_step(step, state, BATCH, compiler_options={})
        for _ in range(2):
            state, metrics = step(state, BATCH)
        results.append((state.params, state.opt_state, metrics))
    assert_equal_but_for_random_rounding(*results)


@pytest.mark.slow
def test_fsdp_shards_the_state_like_the_parameters_and_moves_none_of_it():
    optimizer = compact_adamw(1e-3)
    mesh = jax.make_mesh((1, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    layout = Layout(mesh)
    shapes = layout.state(jax.eval_shape(lambda: new_state(optimizer)))
    specs = {
        jax.tree_util.keystr(path): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    for name in ("['expand']['kernel']", "['contract']['kernel']"):
        same = [spec for path, spec in specs.items() if path.endswith(name)]
        assert len(same) == 1 + 1 + 2 + 2  # parameter, correction, moments and scales
        assert len(set(same)) == 1
        assert "fsdp" in tuple(same[0])
    step = fnet.make_step(loss, optimizer, state_sharding=shardings(shapes))
    batch = layout.batch(jax.eval_shape(lambda: BATCH))
    compiled = fnet.compile_step(step, shapes, batch, compiler_options={}).compiled
    collectives = re.findall(
        r'(?:all-gather|all-reduce|all-to-all|collective-permute)\(.*op_name="([^"]*)"',
        compiled.as_text(),
    )
    assert collectives
    assert not [name for name in collectives if "/optimizer/" in name]

    state = jax.device_put(new_state(optimizer), shardings(shapes))
    alone = new_state(optimizer)
    for _ in range(2):
        state, metrics = compiled(state, jax.device_put(BATCH, shardings(batch)))
        alone, expected = fnet.make_step(loss, optimizer)(alone, BATCH)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-2)
