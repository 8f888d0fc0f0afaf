"""LoRA and DoRA: equal to materialized weights, for any library, and in any train step."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import Case, assert_clipped_like_a_loop
from flax import linen, nnx
from jax.extend.core import Primitive

import fnet
from fnet import layers, lora
from fnet.autodiff import gradient_strategies
from fnet.autodiff.per_example import parameter_gradients
from fnet.jaxpr import find_equations
from fnet.quantization import dequantize, leaves_with_paths, map_with_paths, quantize
from fnet.step import _updated_model_state


def new_key():
    return jax.random.key(0)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def trained(config, params, seed=1):
    """Adapters as after some steps: no part is 0."""
    adapters = lora.init(config, params, jax.random.key(seed))
    leaves, structure = jax.tree.flatten(adapters)
    noise = [0.3 * normal(*leaf.shape, seed=seed + i) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, [a + n for a, n in zip(leaves, noise, strict=True)])


def materialized(config, params, adapters, axes=None):
    """W + s A B in plain JAX; ``axes`` are the output axes of weights that are not [.., in, out]."""

    def update(path, leaf):
        if path not in adapters:
            return leaf
        adapter = adapters[path]
        delta = jnp.einsum("...ir,...ro->...io", adapter["a"], adapter["b"]) * config.scale
        if axes is None:
            weight = leaf + delta
            length = jax.lax.stop_gradient(jnp.linalg.norm(weight, axis=-2, keepdims=True))
            magnitude = adapter.get("magnitude")
            return weight if magnitude is None else weight * magnitude[..., None, :] / length
        weight = jnp.moveaxis(leaf, axes, range(leaf.ndim - len(axes), leaf.ndim))
        n_out = int(np.prod(weight.shape[-len(axes) :]))
        matrix = weight.reshape(-1, n_out) + delta
        if "magnitude" in adapter:
            length = jax.lax.stop_gradient(jnp.linalg.norm(matrix, axis=0))
            matrix = matrix * (adapter["magnitude"] / length)[None]
        return jnp.moveaxis(
            matrix.reshape(weight.shape), range(leaf.ndim - len(axes), leaf.ndim), axes
        )

    return map_with_paths(update, dequantize(params))


def assert_same(config, params, f, *args, axes=None, quantized=None):
    """Values and gradients equal those of materialized weights."""
    frozen = params if quantized is None else quantize(params, quantized, config.targets)
    adapters = trained(config, frozen)
    weights = jax.tree.leaves(jax.eval_shape(f, params, *args))[0]
    ct = normal(*weights.shape, seed=9)

    def by_parts(adapters, *args):
        return (lora.wrap(f, config)(adapters, frozen, *args) * ct).sum()

    def plain(adapters, *args):
        return (f(materialized(config, frozen, adapters, axes), *args) * ct).sum()

    floating = [i for i, a in enumerate(args, 1) if jnp.issubdtype(a.dtype, jnp.floating)]
    gradient = functools.partial(jax.value_and_grad, argnums=(0, *floating))
    expected = jax.jit(gradient(plain))(adapters, *args)
    result = jax.jit(gradient(by_parts))(adapters, *args)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(result[1][0]))
    return by_parts, adapters


LORA, DORA = {"rslora": True, "alpha": 3.0}, {"dora": True, "alpha": 3.0}


@pytest.mark.parametrize(("form", "quantized"), [(LORA, "int8"), (DORA, None)], ids=str)
def test_products_of_every_form(form, quantized):
    def f(params, x):
        w, v = params["w"], params["v"]
        y = jnp.tanh(x @ w) @ v.T  # contracts inputs, then outputs
        z = jnp.einsum("io,bti->otb", v.astype(jnp.float32), x)  # the weight is on the left
        return y.sum() + jnp.square(z).mean((1, 2)) + (v.T @ x[0].T).sum()

    params = {"w": normal(64, 6), "v": normal(64, 6, seed=1)}
    config = lora.LoRA(2, targets=("*",), **form)
    assert_same(config, params, f, normal(2, 3, 64, seed=2), quantized=quantized)


def test_other_operations_get_the_whole_weight():
    def f(params, x, rows):
        table = params["table"]
        norm = table / jnp.linalg.norm(table, axis=0, keepdims=True)
        return table[rows] + norm[:1] * jnp.where(x > 0, table[1][None], table[2][None])

    params = {"table": normal(5, 4)}
    config = lora.LoRA(2, targets=("table",), **DORA)
    assert_same(config, params, f, normal(3, 4, seed=2), jnp.array([0, 4, 4]))


@pytest.mark.parametrize(("form", "quantized"), [(LORA, None), (DORA, "nf4")], ids=str)
def test_stacked_layers_in_a_scan(form, quantized):
    def f(params, x):
        @jax.checkpoint
        def body(x, layer):
            y = jnp.tanh(jax.jit(jnp.matmul)(x, layer["kernel"]) + layer["bias"][None])
            return y @ params["shared"]["kernel"], y.sum()

        y, sums = jax.lax.scan(body, x, params["blocks"], reverse=True)
        return y + sums.sum()

    blocks = {"kernel": normal(3, 8, 6), "bias": normal(3, 6)}
    params = {"blocks": blocks, "shared": {"kernel": normal(6, 8, seed=3) / 3}}
    config = lora.LoRA(2, **form)
    assert_same(config, params, f, normal(2, 8, seed=2), quantized=quantized)


@pytest.mark.parametrize(("form", "quantized"), [(LORA, None), (DORA, "nf4")], ids=str)
def test_layers_of_a_stack_by_number(form, quantized):
    def f(params, x):
        w = params["blocks"]["kernel"]
        x = jnp.tanh(x @ w[2]) @ w[-1]
        return jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ w[i]), x) @ w[:2].sum(0)

    params = {"blocks": {"kernel": normal(3, 8, 8)}}
    config = lora.LoRA(2, **form)
    by_parts, adapters = assert_same(config, params, f, normal(2, 8, seed=2), quantized=quantized)
    # Only the sum over a slice needs a whole weight, of the two layers in the slice.
    jaxpr = jax.make_jaxpr(by_parts)(adapters, normal(2, 8, seed=2))
    products = [e.outvars[0].aval.shape for e in find_equations(jaxpr, "dot_general")]
    assert products.count((2, 8, 8)) == 1
    assert (3, 8, 8) not in products


@pytest.mark.parametrize(
    ("own", "other"),
    [
        *(("nio", other) for other in ("bni", "bin", "nbo")),
        ("noi", "bno"),
    ],
)
def test_products_of_every_layer_of_a_stack(own, other):
    config = lora.LoRA(2, targets={"*kernel": "nio"}, alpha=3.0)
    result = "nb" + ("o" if "i" in other else "i")

    def f(params, x):
        w = params["kernel"] if own == "nio" else params["kernel"].transpose(0, 2, 1)
        right = jnp.einsum(f"{other},{own}->{result}", x, w)
        return jnp.tanh(right) + jnp.einsum(f"{own},{other}->{result}", w, x)

    sizes = {"n": 3, "b": 2, "i": 8, "o": 6}
    x = normal(*(sizes[axis] for axis in other), seed=2)
    assert_same(config, {"kernel": normal(3, 8, 6)}, f, x)


@pytest.mark.parametrize(
    ("order", "dora"),
    [
        *((order, False) for order in ((0, 2, 1), (2, 1, 0))),
        ((2, 0, 1), True),
    ],
)
def test_weights_of_three_axes_in_any_order(order, dora):
    def f(params, x):
        w = params["kernel"].transpose(order)
        return jnp.tanh(jnp.tensordot(x, w, (1, order.index(0))))

    config = lora.LoRA(2, targets={"*kernel": "ioo"}, dora=dora, alpha=3.0)
    assert_same(config, {"kernel": normal(8, 4, 3)}, f, normal(5, 8, seed=2), axes=(1, 2))


@pytest.mark.parametrize(("axes", "quantized"), [(0, None), (1, "int8"), (2, None)])
def test_each_example_may_have_its_own_layer_of_a_stack(axes, quantized):
    def f(params, x, numbers):
        w = jnp.take(params["kernel"], numbers, 0, mode="clip")
        y = jnp.tanh(jnp.einsum("...i,...io->...o", x, w))
        return y.sum(-1, keepdims=True) + jnp.einsum("...o,...io->...i", y, w)

    numbers = jnp.array([[2, 0], [1, 2], [0, 0]])[((slice(None),) * axes + (0, 0))[:2]]
    x = normal(*numbers.shape, 8, seed=2)
    config = lora.LoRA(2, targets={"*kernel": "nio"}, alpha=3.0)
    assert_same(config, {"kernel": normal(3, 8, 6)}, f, x, numbers, quantized=quantized)


def test_weights_inside_of_while_and_cond():
    def f(params, x):
        w = params["w"]

        def body(carry):
            i, x = carry
            return i + 1, jax.lax.cond(i > 0, lambda x: jnp.tanh(x @ w), lambda x: x - 1, x)

        return jax.lax.while_loop(lambda c: c[0] < jnp.round(w[0, 0] * 0) + 3, body, (0, x))[1]

    config, params, x = lora.LoRA(2, targets=("w",)), {"w": normal(4, 4)}, normal(2, 4)
    adapters = trained(config, params)
    expected = f(materialized(config, params, adapters), x)
    result = lora.wrap(f, config)(adapters, params, x)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_weights_inside_of_branches_for_platforms():
    only_cuda = Primitive("only_cuda")  # has no lowering for the CPU
    only_cuda.def_abstract_eval(lambda a: a)

    def f(params, x):
        return jax.lax.platform_dependent(
            x,
            cuda=lambda x: only_cuda.bind(x @ params["w"]),
            default=lambda x: jnp.tanh(x @ params["w"]),
        )

    config, params, x = lora.LoRA(2, targets=("w",)), {"w": normal(4, 4)}, normal(2, 4)
    adapters = trained(config, params)
    expected = f(materialized(config, params, adapters), x)
    result = jax.jit(lora.wrap(f, config))(adapters, params, x)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_linen():
    class Network(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Conv(4, (3,))(x)
            x = linen.Dense(6)(linen.LayerNorm()(x))
            return linen.Dense(3, use_bias=False)(linen.gelu(x))

    x, network = normal(2, 5, 4), Network()
    params = network.init(new_key(), x)["params"]
    config = lora.LoRA(2, targets=("Dense*/kernel",), **DORA)
    assert_same(config, params, lambda p, x: network.apply({"params": p}, x), x)


@pytest.mark.parametrize(("form", "name"), [(LORA, "query"), (DORA, "out")], ids=str)
def test_attention_of_nnx(form, name):
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    assert f"{name}/kernel" in dict(leaves_with_paths(params))
    layout, axes = ("ioo", (1, 2)) if name == "query" else ("iio", (2,))
    config = lora.LoRA(2, targets={f"{name}/kernel": layout}, **form)
    assert_same(
        config, params, lambda p, x: nnx.merge(graph, p, rest)(x), normal(2, 3, 8), axes=axes
    )


def test_equinox():
    eqx = pytest.importorskip("equinox")
    arrays, static = eqx.partition(eqx.nn.MLP(4, 3, 6, 2, key=new_key()), eqx.is_inexact_array)
    config = lora.LoRA(2, targets={"*/weight": "oi"}, **LORA)
    assert sorted(lora.init(config, arrays, new_key()))[0] == "layers/0/weight"
    assert_same(
        config, arrays, lambda p, x: jax.vmap(eqx.combine(p, static))(x), normal(5, 4), axes=(0,)
    )


def test_an_equinox_model_need_not_be_partitioned():
    eqx = pytest.importorskip("equinox")
    model, x = eqx.nn.MLP(4, 3, 6, 1, key=new_key()), normal(2, 4)
    config = lora.LoRA(2, targets={"*/weight": "oi"})
    adapters = trained(config, model)
    y = lora.wrap(lambda model, x: jax.vmap(model)(x), config)(adapters, model, x)
    np.testing.assert_allclose(y, jax.vmap(lora.merge(config, model, adapters))(x), rtol=1e-4)


def test_haiku():
    hk = pytest.importorskip("haiku")
    network = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([6, 3], activation=jnp.tanh)(x))
    )
    x = normal(5, 4)
    params = network.init(new_key(), x)
    assert_same(lora.LoRA(2, targets=("*/w",)), params, network.apply, x)


BLOCK = fnet.serial(
    expand=layers.dense(8, 16), act=layers.activation("gelu"), contract=layers.dense(16, 8)
)
MODEL = fnet.serial(
    embedding=layers.embedding(7, 8),
    blocks=fnet.repeat(fnet.residual(BLOCK), 2),
    head=layers.dense(8, 3),
)


def model_loss(params, model_state, batch, key):
    y, model_state = MODEL.apply(params, model_state, batch["x"], train=True)
    return jnp.square(y).mean((1, 2)), fnet.Aux(model_state, {})


def test_layers_of_fnet():
    model = fnet.serial(
        embedding=layers.embedding(7, 8),
        blocks=fnet.repeat(layers.transformer(8, 2, 1, causal=True), 2),
    )
    params, _ = model.init(new_key())
    tokens = jnp.arange(10).reshape(2, 5) % 7

    def apply(params, x):
        return model.apply(params, {}, x, train=True)[0]

    by_parts, adapters = assert_same(lora.LoRA(2, **DORA), params, apply, tokens)
    # The backward pass of a layer still finishes its adapters before it goes on.
    gradient = jax.make_jaxpr(jax.grad(by_parts))(adapters, tokens)
    assert any(find_equations(gradient, "optimization_barrier"))


def test_no_product_of_the_factors_in_forward_and_backward_pass():
    params = {"kernel": normal(32, 24)}
    for dora in (False, True):
        config = lora.LoRA(2, dora=dora)
        f = lora.wrap(lambda p, x: jnp.tanh(x @ p["kernel"]).sum(), config)
        jaxpr = jax.make_jaxpr(jax.grad(f))(trained(config, params), params, normal(3, 32))
        products = find_equations(jaxpr, ("dot_general", "mul", "add"))
        large = [e for e in products if e.outvars[0].aval.shape in ((32, 24), (24, 32))]
        assert not large, large


def test_casts_are_followed():
    config, params = lora.LoRA(2), {"kernel": normal(16, 8)}
    adapters, x = trained(config, params), normal(3, 16).astype(jnp.bfloat16)

    def f(params, x):
        return x @ params["kernel"].astype(x.dtype)

    y = lora.wrap(f, config)(adapters, params, x)
    assert y.dtype == jnp.bfloat16
    expected = materialized(config, params, adapters)["kernel"]
    np.testing.assert_allclose(
        y.astype(jnp.float32), x.astype(jnp.float32) @ expected, rtol=0.03, atol=0.1
    )


def test_an_adapter_for_each_example():
    config, params = lora.LoRA(2), {"kernel": normal(4, 3)}
    adapters = [trained(config, params, seed) for seed in range(3)]
    apply = lora.wrap(lambda params, x: x @ params["kernel"], config)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *adapters)
    x = normal(3, 2, 4)
    result = jax.vmap(apply, (0, None, 0))(stacked, params, x)
    for y, adapter, row in zip(result, adapters, x, strict=True):
        np.testing.assert_allclose(y, apply(adapter, params, row), rtol=1e-5)


@pytest.mark.parametrize(("form", "quantized"), [(LORA, "int8"), (DORA, None)], ids=str)
def test_inside_of_shard_map(form, quantized):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = layers.mlp([4, 6, 3])
    params, _ = model.init(new_key())
    config = lora.LoRA(2, **form)
    frozen = quantize(params, quantized) if quantized else params
    adapters, x = trained(config, frozen), normal(8, 4)
    apply = lora.wrap(lambda p, x: model.apply(p, {}, x, train=True)[0], config)

    def loss(adapters, frozen, x):
        return jnp.square(apply(adapters, frozen, x)).sum()

    whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "data"),
        mesh=mesh,
        in_specs=(whole, whole, rows),
        out_specs=whole,
    )
    expected = jax.grad(loss)(adapters, frozen, x)
    result = jax.jit(jax.grad(sharded))(adapters, frozen, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), result, expected)
    jaxpr = jax.make_jaxpr(sharded)(adapters, frozen, x)
    products = [e.outvars[0].aval.shape for e in find_equations(jaxpr, "dot_general")]
    assert (2, 3) in products
    assert (6, 3) not in products


def test_a_fresh_adapter_changes_nothing():
    params = {"kernel": normal(6, 4)}
    for dora in (False, True):
        config = lora.LoRA(3, dora=dora)
        adapters = lora.init(config, params, new_key())
        y = lora.wrap(lambda p, x: x @ p["kernel"], config)(adapters, params, normal(2, 6))
        np.testing.assert_allclose(y, normal(2, 6) @ params["kernel"], rtol=1e-5)


def test_a_is_uniform_up_to_the_bound():
    params = {"kernel": jax.ShapeDtypeStruct((400, 4), jnp.bfloat16)}
    shapes = jax.eval_shape(lambda p: lora.init(lora.LoRA(8), p, new_key()), params)
    assert shapes["kernel"]["a"] == jax.ShapeDtypeStruct((400, 8), jnp.float32)
    a = lora.init(lora.LoRA(8), {"kernel": jnp.zeros((400, 4))}, new_key())["kernel"]["a"]
    assert 0.0495 < jnp.abs(a).max() <= 0.05
    np.testing.assert_allclose(a.std(), 0.05 / 3**0.5, rtol=0.03)


@pytest.mark.parametrize(("form", "quantized"), [(LORA, None), (DORA, "int8")], ids=str)
def test_merged_weights_have_the_function_of_the_adapters(form, quantized):
    params = {"a": {"kernel": normal(3, 64, 6)}, "b": {"w": normal(4, 64), "bias": normal(4)}}
    config = lora.LoRA(2, targets={"*kernel": "nio", "b/w": "oi"}, **form)
    frozen = quantize(params, quantized, config.targets) if quantized else params
    adapters = trained(config, frozen)

    def f(params, x):
        return jnp.einsum("bi,nio->bno", x, params["a"]["kernel"]).sum(1) @ jnp.ones((6, 4)) + (
            x @ params["b"]["w"].T + params["b"]["bias"][None]
        )

    merged = lora.merge(config, frozen, adapters)
    x = normal(5, 64, seed=4)
    y = lora.wrap(f, config)(adapters, frozen, x)
    np.testing.assert_allclose(f(merged, x), y, rtol=1e-4, atol=1e-4)
    assert merged["b"]["bias"] is params["b"]["bias"]


def state_of(config, params, optimizer):
    return fnet.TrainState.create(
        params=lora.init(config, params, new_key()),
        optimizer=optimizer,
        key=jax.random.key(1),
        model_state={"frozen": params, "model": {}},
    )


MODES = {
    "mean": fnet.autodiff.mean,
    "microbatches": fnet.autodiff.microbatches(2),
    "clipped": fnet.autodiff.clipped(0.1),
    "clipped microbatches": fnet.autodiff.clipped(0.1, microbatches=2),
}


@pytest.mark.parametrize("mode", ["mean", "clipped microbatches"])
def test_a_step_trains_the_adapters_alone(mode):
    params, _ = MODEL.init(new_key())
    params = quantize(params, "int8", ("blocks/*kernel",))
    config, optimizer = lora.LoRA(2), optax.adam(1e-2)
    before = jax.tree.map(np.asarray, params)
    state = state_of(config, params, optimizer)
    batch = {"x": jnp.arange(20).reshape(4, 5) % 7}
    step = fnet.make_step(lora.loss(model_loss, config), optimizer, MODES[mode])
    state, first = step(state, batch)
    state, second = step(state, batch)
    assert second["loss"] < first["loss"]
    jax.tree.map(np.testing.assert_array_equal, state.model_state["frozen"], before)
    assert all(jnp.abs(a["b"]).max() > 0 for a in state.params.values())


@pytest.mark.sweep(9)
@pytest.mark.parametrize("mode", [*MODES, "remat"])
def test_no_array_of_the_frozen_size_exists_besides_the_frozen_weights(mode):
    width, depth = 64, 8
    block = fnet.serial(dense=layers.dense(width, width), act=layers.activation("gelu"))
    model = fnet.serial(blocks=fnet.repeat(block, depth), head=layers.dense(width, 2))

    def loss(params, model_state, batch, key):
        y, _ = model.apply(params, {}, batch["x"], train=True)
        return jnp.square(y).mean(-1)

    kernels = depth * width * width * 4
    optimizer, config = optax.adam(1e-3), lora.LoRA(1, targets=("blocks/*kernel",))
    batch = {"x": jax.ShapeDtypeStruct((2, width), jnp.float32)}
    for kind in (None, "nf4"):

        def create(kind=kind):
            params, _ = model.init(new_key())
            params = quantize(params, kind, config.targets) if kind else params
            return state_of(config, params, optimizer)

        step = fnet.make_step(
            lora.loss(loss, config),
            optimizer,
            MODES.get(mode, fnet.autodiff.mean),
            remat="segments" if mode == "remat" else "none",
        )
        report = fnet.compile_step(step, jax.eval_shape(create), batch).report
        assert report.donation.aliased_bytes == report.state_bytes
        assert report.peak.temporaries < 0.6 * kernels
        assert report.peak.outputs - report.peak.aliased < 1000
        if kind:
            assert report.state_bytes < 0.35 * kernels


def test_a_plan_may_split_the_batch_of_a_frozen_model():
    params, _ = MODEL.init(new_key())
    config, optimizer = lora.LoRA(2), optax.sgd(0.1)
    batch = {"x": jnp.arange(20).reshape(4, 5) % 7}

    def updates(model_state, batch, key):
        return jax.tree.map(lambda a: a + 1, model_state)

    for update in (None, updates):

        def loss(params, model_state, batch, key, update=update):
            losses, _ = model_loss(params, {}, batch, key)
            new = update(model_state, batch, key) if update else model_state
            return losses, fnet.Aux(new, {})

        state = fnet.TrainState.create(
            params=lora.init(config, params, new_key()),
            optimizer=optimizer,
            key=new_key(),
            model_state={"frozen": params, "model": jnp.zeros(2)},
        )
        step = fnet.make_step(lora.loss(loss, config), optimizer)
        assert bool(_updated_model_state(step, state, batch)) == (update is not None)


def test_a_skipped_step_keeps_frozen_weights_in_place():
    params, config, optimizer = {"kernel": normal(64, 64)}, lora.LoRA(1), optax.sgd(0.1)
    state = state_of(config, params, optimizer)

    def loss(params, model_state, batch, key):
        return jnp.log(batch["x"] @ params["kernel"]).sum(-1)

    step = fnet.make_step(lora.loss(loss, config), optimizer, skip_nonfinite=True)
    step = fnet.compile_step(step, state, {"x": jnp.zeros((1, 64))})
    assert step.report.peak.temporaries < 64 * 64
    before = np.asarray(params["kernel"])
    state, metrics = step(state, {"x": jnp.zeros((1, 64))})
    assert metrics["skipped"] == 1
    np.testing.assert_array_equal(state.model_state["frozen"]["kernel"], before)


@pytest.mark.slow
def test_clipping_finds_the_factors_by_ghost_norms(monkeypatch):
    monkeypatch.setattr(parameter_gradients, "_MATERIALIZED", 0.25)  # small ones count as large
    params, _ = MODEL.init(new_key())
    params = quantize(params, "int8", ("blocks/*kernel",))
    config = lora.LoRA(2, **DORA)
    adapters = trained(config, params)

    def losses(adapters, x):
        return lora.loss(model_loss, config)(
            adapters, {"frozen": params, "model": {}}, {"x": x}, None
        )[0]

    x = jnp.arange(15).reshape(3, 5) % 7
    strategies = gradient_strategies(losses, adapters, x)
    in_blocks = [s for path, s in strategies.items() if path.startswith("blocks")]
    assert len(in_blocks) == 2
    assert all(s["a"] == s["b"] == "ghost norm" for s in in_blocks)
    with jax.numpy_rank_promotion("allow"):
        assert_clipped_like_a_loop(Case(losses, adapters, (x,)), tolerance=1e-4)


@pytest.mark.slow
def test_frozen_weights_are_sharded_and_gathered_where_they_are_used():
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    params, _ = MODEL.init(new_key())
    params = quantize(params, "int8", ("blocks/*kernel",))
    config, optimizer = lora.LoRA(2), optax.adam(1e-2)
    state = state_of(config, params, optimizer)
    batch = {"x": jnp.arange(20).reshape(4, 5) % 7}
    loss = lora.loss(model_loss, config)
    expected, metrics = fnet.make_step(loss, optimizer)(jax.tree.map(jnp.copy, state), batch)

    def sharding(leaf):
        sharded = leaf.ndim > 1 and leaf.shape[-1] % 4 == 0
        spec = [None] * (leaf.ndim - 1) + ["fsdp"] if sharded else []
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    shardings = jax.tree.map(sharding, state)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    state, batch = jax.device_put(state, shardings), jax.device_put(batch, rows)
    step = fnet.make_step(loss, optimizer, state_sharding=shardings)
    executable = fnet.compile_step(step, state, batch)
    gathers = re.findall(r"= (\w+)\[(\S*)\]\S* all-gather", executable.compiled.as_text())
    assert {"s8", "f32"} <= {dtype for dtype, _ in gathers}
    # The codes of one layer at a time, not its float values.
    assert {shape for dtype, shape in gathers if dtype == "s8"} == {"8,16", "16,8"}
    assert not {"8,16", "16,8"} & {shape for dtype, shape in gathers if dtype == "f32"}
    new, sharded_metrics = executable(state, batch)
    np.testing.assert_allclose(sharded_metrics["loss"], metrics["loss"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), new.params, expected.params
    )
    kernel = new.model_state["frozen"]["blocks"]
    codes = [leaf for leaf in jax.tree.leaves(kernel) if leaf.dtype == jnp.int8]
    assert codes
    assert all(leaf.addressable_shards[0].data.size == leaf.size // 4 for leaf in codes)


def test_rejects_adapters_of_another_configuration():
    for config, message in (
        (lora.LoRA(2, targets=("b/*",)), r"adapters must be of \['b/kernel'\], got \['a/kernel'\]"),
        (lora.LoRA(3, targets=("a/*",)), r"the adapter of 'a/kernel' must have the shapes"),
        (lora.LoRA(2, targets=("a/*",), dora=True), "'magnitude': "),
        (lora.LoRA(2, targets=("c/*",)), r"no parameter matches \['c/\*'\]"),
    ):
        params = {"a": {"kernel": normal(4, 3)}, "b": {"kernel": normal(4, 3)}}
        adapters = lora.init(lora.LoRA(2, targets=("a/*",)), params, new_key())
        with pytest.raises(ValueError, match=message):
            lora.wrap(lambda p, x: x, config)(adapters, params, 1.0)


def test_rejects_rank_0():
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        lora.LoRA(0)


def test_results_and_arguments_of_any_kind_pass_through():
    params = {"kernel": normal(4, 3)}
    adapters = trained(lora.LoRA(1), params)

    def f(params, x, mode, scale, *, flag):
        assert (mode, scale, flag) == ("train", 2, True)
        return {"kernel": params["kernel"], "y": scale * x, "none": None}

    result = lora.wrap(f, lora.LoRA(1))(adapters, params, jnp.ones(2), "train", 2, flag=True)
    merged = lora.merge(lora.LoRA(1), params, adapters)
    np.testing.assert_allclose(result["kernel"], merged["kernel"], rtol=1e-6)
    assert result["none"] is None
