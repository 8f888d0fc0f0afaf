"""Residuals are listed by layer, for any function, and named by the equation that made them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import fnet
from fnet import layers, serial
from fnet.memory.peak import CANDIDATE_OPTIONS, peak
from fnet.memory.residuals import by_layer, residuals

F32 = jnp.float32
X = jax.ShapeDtypeStruct((8, 16), F32)
W = jax.ShapeDtypeStruct((16, 16), F32)


def described(found):
    return [(r.layer, r.operation, r.shape, r.dtype.name, r.alias_of) for r in found]


def added(found):
    return sum(r.added for r in found)


def test_a_dense_layer_saves_its_input_and_relu_a_mask():
    def loss(params, x):
        with jax.named_scope("hidden"):
            h = jax.nn.relu(x @ params["w1"])
        with jax.named_scope("head"):
            return (h @ params["w2"]).sum()

    found = residuals(loss, {"w1": W, "w2": jax.ShapeDtypeStruct((16, 4), F32)}, X)
    assert described(found) == [
        ("", "", (16, 4), "float32", "argument params['w2']"),
        ("", "", (8, 16), "float32", "argument x"),
        ("hidden", "max", (8, 16), "float32", ""),
        ("hidden", "gt", (8, 16), "bool", ""),
    ]
    assert [r.bytes for r in found] == [16 * 4 * 4, 8 * 16 * 4, 8 * 16 * 4, 8 * 16]
    assert [r.added for r in found] == [0, 0, 8 * 16 * 4, 8 * 16]
    assert all(r.source.endswith("loss)") and "test_residuals.py:" in r.source for r in found[2:])


def test_by_layer_sums_in_forward_order_to_a_depth():
    def loss(w, x):
        for name in ("b/first", "b/second", "a/first"):
            with jax.named_scope(name):
                x = jnp.sin(x @ w)
        return x.sum()

    found, one = residuals(loss, W, X), 8 * 16 * 4
    # Each layer saves its cosine. All but the last save their output too.
    assert by_layer(found) == [
        ("b/first", 2 * one, 2),
        ("b/second", 2 * one, 2),
        ("a/first", one, 1),
    ]
    assert by_layer(found, depth=1) == [("b", 4 * one, 4), ("a", one, 1)]
    with pytest.raises(ValueError, match="depth must be at least 1, or None for all, got 0"):
        by_layer(found, depth=0)


def test_without_named_scopes_a_layer_is_its_source_line():
    (row,) = by_layer(residuals(lambda w, x: jnp.sin(x @ w).sum(), W, X))
    assert row.layer.startswith("test_residuals.py:")
    assert row.bytes == 8 * 16 * 4


IMAGES = jax.ShapeDtypeStruct((4, 8, 8, 6), F32)


def stack(blocks, activation="leaky_relu"):
    block = serial(conv=layers.conv(6, 6, bias=False), abn=layers.abn(6, activation=activation))
    return serial(*[block] * blocks)


def loss_of(layer, wrap=lambda f: f):
    params, state = jax.eval_shape(layer.init, jax.random.key(0))

    def apply(params, state, x):
        return layer.apply(params, state, x, train=True)[0]

    return lambda params, state, x: wrap(apply)(params, state, x).sum(), params, state


def test_a_block_with_abn_saves_one_activation_and_its_statistics():
    found = residuals(*loss_of(stack(3)), IMAGES)
    kept = [r for r in found if not r.alias_of]
    for i in range(3):
        of_block = [r for r in kept if r.layer == f"{i}/abn"]
        assert sorted(r.shape for r in of_block) == [(4, 8, 8, 6), (6,), (6,), (6,)]
    assert len(kept) == 3 * 4
    assert [r.alias_of for r in found if r.alias_of] == [
        "argument params['0']['abn']['beta']",
        "argument params['1']['abn']['beta']",
        "argument params['1']['conv']['kernel']",
        "argument params['2']['abn']['beta']",
        "argument params['2']['conv']['kernel']",
        "argument x",
    ]


@pytest.mark.parametrize(("activation", "without", "with_"), [("gelu", 2, 1), ("leaky_relu", 1, 1)])
def test_recompute_saves_the_arrays_that_layers_name(activation, without, with_):
    def activations(wrap):
        found = residuals(*loss_of(stack(4, activation), wrap), IMAGES)
        return [r.layer for r in found if r.shape == IMAGES.shape and not r.alias_of]

    # The last output goes into a sum, which saves nothing.
    assert len(activations(fnet.recompute)) == 4 * with_
    assert activations(fnet.recompute) == [f"{i}/abn" for i in range(4)]
    assert len(activations(lambda f: f)) >= 4 * without - 1


def test_a_checkpointed_block_saves_its_input():
    def loss(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"block{i}"):
                x = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w))(w, x)
        return x.sum()

    found = residuals(loss, [W] * 3, X)
    assert [r.layer for r in found if not r.alias_of] == ["block0", "block1"]
    assert [r.alias_of for r in found if r.alias_of] == [
        *(f"argument ws[{i}]" for i in range(3)),
        "argument x",
    ]


def test_a_checkpoint_policy_saves_named_arrays_on_device_or_host():
    def loss(w, x, policy):
        def f(w, x):
            with jax.named_scope("inside"):
                return jnp.sin(jnp.sin(checkpoint_name(x @ w, "product")) @ w).sum()

        return jax.checkpoint(f, policy=policy)(w, x)

    policies = jax.checkpoint_policies
    save = policies.save_only_these_names("product")
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["product"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    *_, kept = residuals(loss, W, X, save)
    assert (kept.layer, kept.operation, kept.added) == ("inside", "dot_general", 8 * 16 * 4)
    *_, kept = residuals(loss, W, X, offload)
    assert (kept.layer, kept.alias_of, kept.added) == ("inside", "host memory", 0)


def test_a_scan_saves_the_stack_of_all_iterations():
    block = serial(dense=layers.dense(16, 16), act=layers.activation("softplus"))
    model = serial(first=layers.dense(16, 16), blocks=fnet.repeat(block, 5))
    found = residuals(*loss_of(model), X)
    stacked = [r for r in found if r.shape == (5, 8, 16)]
    # Only the input of the first iteration comes from outside.
    # JAX 0.12 may repeat a scope inside of a scan: blocks/act/act.
    assert {r.layer.replace("act/act", "act") for r in stacked} == {"blocks/act"}
    assert all(r.bytes == 5 * 8 * 16 * 4 for r in stacked)
    kernels = [r for r in found if r.shape == (5, 16, 16)]
    assert [r.alias_of for r in kernels] == ["argument params['blocks']['dense']['kernel']"]


def test_arguments_constants_and_outputs_add_no_memory():
    table = np.linspace(0, 1, 8 * 16, dtype=np.float32).reshape(8, 16)

    def loss(params, batch, *, scale):
        y = jnp.exp(table * params["w"])
        return (y * batch["x"] * scale).sum(), {"y": y.reshape(16, 8)}

    found = residuals(loss, {"w": X}, {"x": X}, scale=X, has_aux=True)
    assert [r.alias_of for r in found if r.alias_of] == [
        "argument batch['x']",
        "argument scale",
        "constant",
        "output [1]['y']",
    ]
    # Only the product of two arguments takes new memory.
    assert added(found) <= 8 * 16 * 4


def test_an_array_of_one_repeated_number_is_not_listed():
    def loss(w):
        return (jnp.full((8, 16), 3.0) * w * jnp.arange(8.0)[:, None]).sum()

    assert residuals(loss, X) == []


def test_lists_only_residuals_of_the_chosen_arguments():
    def loss(w, x):
        return jnp.sum(x @ w)

    assert [r.alias_of for r in residuals(loss, W, X)] == ["argument x"]
    assert [r.alias_of for r in residuals(loss, W, X, argnums=1)] == ["argument w"]
    both = [r.alias_of for r in residuals(loss, W, X, argnums=(0, -1))]
    assert both == ["argument w", "argument x"]


def test_rejects_an_output_that_is_not_floating():
    def predict(w, x):
        logits = x @ w
        return {"logits": logits, "label": logits.argmax(-1)}

    with pytest.raises(TypeError) as error:
        residuals(predict, W, X)
    assert str(error.value) == (
        "residuals: f cannot be differentiated: its output ['label'] is int32[8]; "
        "return floating arrays only, or (value, aux) with has_aux=True."
    )
    with pytest.raises(TypeError, match=r"its output is int32\[8\]; return floating"):
        residuals(lambda w, x: predict(w, x)["label"], W, X)
    with pytest.raises(TypeError, match="its output is str; return floating"):
        residuals(lambda w: "loss", W)
    with pytest.raises(ValueError, match="returns no array to differentiate, but None"):
        residuals(lambda w: None, W)
    found = residuals(lambda w, x: (predict(w, x)["logits"], predict(w, x)), W, X, has_aux=True)
    assert [r.alias_of for r in found] == ["argument x"]


def test_a_loop_without_a_derivative_raises_the_error_of_jax():
    def loss(w, n):
        return jax.lax.fori_loop(0, n, lambda i, w: w @ w, w).sum()

    with pytest.raises(ValueError, match=r"does not work for lax\.while_loop"):
        residuals(loss, W, jax.ShapeDtypeStruct((), jnp.int32))


def test_rejects_arguments_without_a_floating_leaf():
    integers = jax.ShapeDtypeStruct((3,), jnp.int32)
    with pytest.raises(TypeError, match="nothing to differentiate: labels has no floating leaf"):
        residuals(lambda labels, w: w.sum() * labels.sum(), integers, W)
    with pytest.raises(ValueError, match="argnums=2, but f has 2 positional arguments"):
        residuals(lambda labels, w: w.sum(), integers, W, argnums=2)


def test_accepts_keys_integers_and_flags():
    model = serial(first=layers.dense(16, 4), act=layers.activation("gelu"))
    params, state = jax.eval_shape(model.init, jax.random.key(0))

    def loss(params, batch, key, mode, train=False):
        assert (mode, train) == ("mean", True)
        x = batch["x"] * jax.random.bernoulli(key, 0.9, batch["x"].shape)
        logits, _ = model.apply(params["net"], state, x, key=None, train=train)
        return jnp.take_along_axis(logits, batch["label"][:, None], -1).mean()

    batch = {"x": X, "label": jax.ShapeDtypeStruct((8,), jnp.int32)}
    counted = {"net": params, "step": jax.ShapeDtypeStruct((), jnp.int32), "key": jax.random.key(1)}
    found = residuals(loss, counted, batch, jax.random.key(2), "mean", train=True)
    assert {r.layer for r in found} >= {"act"}
    assert not [r for r in found if "step" in r.alias_of or "key" in r.alias_of]


def test_shapes_and_arrays_give_the_same_residuals():
    f, params, state = loss_of(stack(2))
    zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype))
    assert residuals(f, params, state, IMAGES) == residuals(
        f, zeros(params), zeros(state), zeros(IMAGES)
    )


def test_residuals_of_a_simple_program_sum_to_its_temporaries():
    def loss(ws, x):
        for w in ws:
            x = jnp.sin(x @ w)
        return jnp.square(x).mean()

    arguments = [jax.ShapeDtypeStruct((64, 64), F32)] * 8, jax.ShapeDtypeStruct((512, 64), F32)
    compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile(CANDIDATE_OPTIONS["cpu"][0])
    # A sine and a cosine per layer, and at most one cotangent.
    one = 512 * 64 * 4
    assert added(residuals(loss, *arguments)) == 16 * one
    assert abs(peak(compiled).temporaries - 16 * one) <= one


def test_finds_the_equation_inside_jit():
    @jax.jit
    def block(w, x):
        with jax.named_scope("inner"):
            return jnp.sin(x @ w)

    @jax.jit
    def loss(w, x):
        with jax.named_scope("one"):
            x = block(w, x)
        with jax.named_scope("two"):
            return block(w, x).sum()

    found = [r for r in residuals(loss, W, X) if not r.alias_of]
    assert sorted((r.layer, r.operation) for r in found) == [
        ("one/inner", "cos"),
        ("one/inner", "sin"),
        ("two/inner", "cos"),
    ]
    assert all(r.source.endswith("block)") for r in found)


def test_a_function_of_jax_has_the_source_line_of_its_call():
    def first(x):
        return jax.nn.logsumexp(jnp.sin(x), axis=-1, keepdims=True)

    def second(x):
        return jax.nn.logsumexp(jnp.sin(x), axis=-1, keepdims=True)

    for f in (first, second):
        found = [r for r in residuals(lambda x, f=f: f(x).sum(), X) if not r.alias_of]
        assert found
        assert all(f"{f.__name__})" in r.source for r in found)


def test_finds_the_equation_inside_cond_and_shard_map():
    def branches(w, x, p):
        def one(y):
            with jax.named_scope("one"):
                return jnp.sin(y)

        return jax.lax.cond(p > 0, one, lambda y: 2 * y, x @ w).sum()

    found = residuals(branches, W, X, jax.ShapeDtypeStruct((), F32))
    assert ("one", "cos") in [(r.layer, r.operation) for r in found]

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_devices(w, x):
        def each(w, x):
            with jax.named_scope("each"):
                return jax.lax.psum(jnp.sin(x @ w).sum(), "data")

        return jax.shard_map(each, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)

    kept = [r for r in residuals(on_devices, W, X) if not r.alias_of]
    assert [(r.layer, r.operation, r.shape) for r in kept] == [("each", "cos", (8, 16))]


def test_a_carry_that_a_scan_never_changes_counts_once():
    def loss(w, x):
        def step(carry, _):
            x, w = carry
            with jax.named_scope("step"):
                return (jnp.sin(x @ w), w), None

        return jax.lax.scan(step, (x, w), None, length=4)[0][0].sum()

    found = residuals(loss, W, X)
    assert [r.alias_of for r in found if r.shape == W.shape] == ["argument w"]
    assert {r.layer for r in found if r.shape == (4, 8, 16)} == {"step"}


def test_flax_modules_name_their_layers():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.sin(nn.Dense(16, name="dense")(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Block(name="one")(x)
            x = nn.remat(Block)(name="two")(x)
            return nn.Dense(4, name="head")(x)

    model = Net()
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    found = residuals(model.apply, variables, X)
    assert [r.layer for r in found if not r.alias_of] == ["Net/one", "Net/one", "Net/two"]
    assert "argument variables['params']['head']['kernel']" in {r.alias_of for r in found}


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


def sine_fwd(x):
    with jax.named_scope("rule"):
        cosine = jnp.cos(x)
    unread = jnp.exp(x)
    return jnp.sin(x), (cosine, cosine.reshape(-1), checkpoint_name(cosine, "c"), x, unread)


def sine_bwd(saved, dy):
    return (dy * (saved[0] + saved[1].reshape(dy.shape) + saved[2] + saved[3]),)


sine.defvjp(sine_fwd, sine_bwd)


def test_an_array_saved_twice_counts_once_and_one_never_read_does_not():
    for f in (sine, jax.jit(sine), jax.jit(jax.vmap(sine))):

        def loss(x, f=f):
            with jax.named_scope("loss"):
                return f(x).sum()

        assert described(residuals(loss, X)) == [
            ("", "", (8, 16), "float32", "argument x"),
            ("loss/rule", "cos", (8, 16), "float32", ""),
        ]


def test_a_device_put_makes_an_array_only_if_it_moves_to_other_memory():
    def loss(w, x):
        return jnp.sin(jax.device_put(x) @ w).sum()

    w, x = (jax.ShapeDtypeStruct(s, F32) for s in ((128, 256), (64, 128)))
    found = residuals(loss, w, x)
    assert [(r.operation, r.alias_of) for r in found] == [("", "argument x"), ("cos", "")]
    assert added(found) == peak(jax.jit(jax.grad(loss)).lower(w, x).compile()).temporaries == 65_536

    def twice(w, x, space):
        squares = x * x
        back = jax.device_put(jax.device_put(squares, space), jax.memory.Space.Device)
        return (squares @ w).sum() + (back @ w).sum()

    for space, count in ((jax.memory.Space.Device, 1), (jax.memory.Space.Host, 2)):
        assert added(residuals(functools.partial(twice, space=space), w, x)) == count * 32_768
