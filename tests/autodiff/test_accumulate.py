"""`accumulate_grad` equals the gradient of the whole batch, in the memory of a microbatch."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fnet
from fnet import layers, repeat, serial
from fnet.autodiff import accumulate_grad, mean, microbatches
from fnet.layer import stateless
from fnet.memory import tree_bytes


def normal(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes]


def mlp_loss(params, state, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["w"] + jnp.expand_dims(params["b"], 0))
    y = hidden @ params["v"]
    return jnp.square(y - batch["y"]), fnet.Aux(state, {"output": y, "is_positive": y > 0})


whole_batch = jax.jit(mean(mlp_loss))
in_four_parts = jax.jit(accumulate_grad(mlp_loss, 4))


def mlp_params():
    w, v = normal((3, 5), 5)
    return {"w": w, "b": jnp.ones(5), "v": v}


def mlp_batch(n=12):
    x, y = normal((n, 3), n, seed=1)
    return {"x": x, "y": y}


WEIGHTS = {
    "none": None,
    "unequal": np.arange(12.0),
    "padding in every microbatch": np.asarray([1.0, 1.0, 0.0] * 4) * 1e-20,
    "a microbatch of padding": np.asarray([1.0, 0.0, 2.0, 3.0] * 3) * 1e38,
    "all padding": np.zeros(12),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_gradient_and_metrics_equal_the_whole_batch(weight):
    batch = mlp_batch() | ({} if weight is None else {"weight": jnp.asarray(weight, jnp.float32)})
    params, unit = mlp_params(), 1 if weight is None else weight.max() or 1
    relative = jax.tree.map(lambda a: a / unit, {n: batch[n] for n in batch if n == "weight"})
    expected, _, metrics = whole_batch(params, {}, batch | relative, None)
    got, _, got_metrics = in_four_parts(params, {}, batch, None)
    chex.assert_trees_all_close(got, expected, atol=1e-6)
    chex.assert_trees_all_close(got_metrics, metrics, atol=1e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes((got, got_metrics), (expected, metrics))
    if weight is not None and not weight.any():
        chex.assert_trees_all_equal(
            (got, got_metrics), jax.tree.map(jnp.zeros_like, (got, metrics))
        )


def test_accumulates_every_use_of_a_parameter():
    def loss(params, state, batch, key):
        w, x = params["w"], batch["x"]
        y = x @ w + x @ w.T  # twice
        y += jnp.expand_dims(w[0] + w[-1] + w[:, 1] + jnp.flip(w[::2][0]), 0)  # static slices
        y += jax.jit(lambda w: jnp.expand_dims(w[:2].sum(0), 0))(w)  # in a call
        y += jax.checkpoint(lambda w: jnp.expand_dims(jnp.sin(w)[1:3].prod(0), 0))(w)
        y += w[jnp.asarray([0, 2, 2])].sum()  # gathered
        rows = jax.lax.scan(lambda y, row: (jnp.tanh(y + row[:1].sum()), None), y, w)[0]
        y += jax.lax.cond(y.sum() > 0, lambda: rows, lambda: rows * w[1, 1])
        return y.sum(-1), fnet.Aux(state, {})

    params = {"w": jax.random.normal(jax.random.key(0), (4, 4)), "unused": jnp.ones(3)}
    batch = {"x": jax.random.normal(jax.random.key(1), (6, 4))}
    # Each microbatch takes its own branch of the cond, so compare microbatches.
    parts = [{"x": batch["x"][i::3]} for i in range(3)]
    whole = jax.jit(mean(loss))
    grads = [whole(params, {}, part, None)[0] for part in parts]
    expected = jax.tree.map(lambda *g: sum(g) / 3, *grads)
    got, _, _ = jax.jit(accumulate_grad(loss, 3))(params, {}, batch, None)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_microbatch_i_uses_the_key_folded_with_i():
    def loss(params, state, batch, key):
        noise = jax.random.normal(key, batch["x"].shape)
        return params * noise, fnet.Aux(state, {"noise": noise})

    gradient = accumulate_grad(loss, 3)
    got, _, metrics = gradient(jnp.ones(()), {}, {"x": jnp.zeros(6)}, jax.random.key(7))
    keys = [jax.random.fold_in(jax.random.key(7), i) for i in range(3)]
    drawn = jnp.stack([jax.random.normal(key, 2) for key in keys])
    chex.assert_trees_all_close(got, drawn.mean(), atol=1e-6)
    chex.assert_trees_all_close(metrics["noise"], drawn.mean(), atol=1e-6)


def test_running_statistics_pass_from_microbatch_to_microbatch():
    norm = layers.abn(3)

    def loss(params, state, batch, key):
        y, state = norm.apply(params, state, batch["x"], train=True)
        return y.sum(-1), fnet.Aux(state, {})

    params, state = norm.init(jax.random.key(0))
    x = 2 + jax.random.normal(jax.random.key(1), (12, 3))

    @jax.jit
    def one_after_another(params, state, x):
        for i in range(4):
            _, state = norm.apply(params, state, x[i::4], train=True)
        return state

    _, got, _ = jax.jit(accumulate_grad(loss, 4))(params, state, {"x": x}, None)
    chex.assert_trees_all_close(got, one_after_another(params, state, x), atol=1e-6)


def test_one_microbatch_is_mean():
    args = mlp_params(), {}, mlp_batch(), jax.random.key(0)
    one, whole = accumulate_grad(mlp_loss, 1), mean(mlp_loss)
    assert str(jax.make_jaxpr(one)(*args)) == str(jax.make_jaxpr(whole)(*args))


def test_accumulator_has_the_dtype_of_the_parameters():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), mlp_params())
    batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), mlp_batch())
    got, _, metrics = in_four_parts(params, {}, batch, None)
    expected, _, expected_metrics = whole_batch(params, {}, batch, None)
    chex.assert_trees_all_equal_dtypes((got, metrics), (expected, expected_metrics))
    chex.assert_trees_all_close(got, expected, rtol=0.05, atol=0.05)


def dense_network(depth=24, width=128, *, scanned):
    block = serial(dense=layers.dense(width, width), relu=stateless(jax.nn.relu))
    return repeat(block, depth) if scanned else serial(*[block] * depth)


def regression(model):
    def loss(params, state, batch, key):
        y, state = model.apply(params, state, batch["x"], key=key, train=True)
        return jnp.square(y).mean(-1), fnet.Aux(state, {})

    return loss


def compiled_step(optimizer, mode, *, scanned, batch=64, width=128):
    model = dense_network(width=width, scanned=scanned)
    create = functools.partial(fnet.TrainState.create, model, optimizer)
    state = jax.eval_shape(create, jax.random.key(0))
    step = fnet.make_step(regression(model), optimizer, mode)
    batch = {"x": jax.ShapeDtypeStruct((batch, width), jnp.float32)}
    return fnet.compile_step(step, state, batch).report, tree_bytes(state.params)


@pytest.mark.parametrize(
    ("optimizer", "copies", "scanned"),
    # Parameters, one or two moments, and the accumulator.
    [(optax.sgd(0.1, momentum=0.9), 3, False), (optax.adam(1e-3), 4, True)],
    ids=["momentum", "adam"],
)
def test_peak_is_state_and_accumulator(optimizer, copies, scanned):
    report, params = compiled_step(optimizer, microbatches(8), scanned=scanned)
    # Besides: the gradient of one layer (1/24) and the activations of 8 examples (1/16).
    assert report.peak.total <= (copies + 0.3) * params
    assert report.donation.aliased_bytes == report.state_bytes


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_sharded_batch_gives_the_same_gradient_and_moves_no_example(axis_type):
    axis_types = (getattr(jax.sharding.AxisType, axis_type),)
    mesh = jax.make_mesh((4,), ("data",), axis_types=axis_types)
    params = mlp_params()
    batch = mlp_batch(24) | {"weight": jnp.arange(24) % 5.0}
    expected, _, metrics = whole_batch(params, {}, batch, None)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params = jax.device_put(params, NamedSharding(mesh, P()))
        gradient = jax.jit(accumulate_grad(mlp_loss, 3)).lower(params, {}, batch, None).compile()
        got, _, got_metrics = gradient(params, {}, batch, None)
    chex.assert_trees_all_close(jax.device_get(got), expected, atol=1e-6)
    chex.assert_trees_all_close(jax.device_get(got_metrics), metrics, atol=1e-6)
    program = gradient.as_text()
    assert "all-reduce" in program
    for moving in ("all-gather", "all-to-all", "collective-permute"):
        assert moving not in program


@pytest.mark.parametrize("per_device", [False, True])
def test_gradients_inside_shard_map_are_summed_as_by_jax_grad(per_device):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradient(mode, params, batch):
        if per_device:  # sum over devices only after the last microbatch
            params = jax.lax.pcast(params, "data", to="varying")
        grads, _, metrics = mode(mlp_loss)(params, {}, batch, None)
        grads = jax.lax.pmean(grads, "data") if per_device else grads
        return grads, jax.lax.pmean(metrics, "data")

    def mapped(mode):
        f = functools.partial(gradient, mode)
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.jit(jax.shard_map(f, mesh=mesh, **specs))(mlp_params(), mlp_batch(24))

    got = mapped(microbatches(3))
    chex.assert_trees_all_close(got, mapped(mean), atol=1e-5)


def averaged(params, state, batch, key):
    losses, aux = mlp_loss(params, state, batch, key)
    return losses.mean(), aux


def test_rejects_what_microbatches_do_not_divide():
    for loss, n, more, message in (
        (mlp_loss, 5, {}, "5 microbatches do not divide a batch of 12 examples; pad it to 15 exam"),
        (mlp_loss, 0, {}, "microbatches must be at least 1, got 0"),
        (mlp_loss, 4, {"odd": jnp.ones(11)}, "must share their leading axis"),
        (mlp_loss, 4, {"odd": jnp.ones(())}, "must share their leading axis"),
        (averaged, 1, {}, r"one loss per example, shape \[batch\], got \(\)"),
        (averaged, 4, {}, r"one loss per example, shape \[batch\], got \(\)"),
    ):
        for mode in (accumulate_grad, lambda loss, n: microbatches(n)(loss)):
            with pytest.raises(ValueError, match=message):
                mode(loss, n)(mlp_params(), {}, mlp_batch() | more, None)


def test_rejects_integer_losses_and_parameters():
    def whole(params, state, batch, key):
        losses, aux = mlp_loss(params, state, batch, key)
        return losses.astype(int), aux

    for n in (1, 4):
        with pytest.raises(TypeError, match="losses that are real and floating, got int32"):
            accumulate_grad(whole, n)(mlp_params(), {}, mlp_batch(), None)
        with pytest.raises(TypeError, match="int32"):
            accumulate_grad(mlp_loss, n)((mlp_params(), jnp.int32(1)), {}, mlp_batch(), None)
