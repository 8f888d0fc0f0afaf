"""What the backward pass keeps is listed, whatever the function is made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import fnet
from fnet import layers, models, serial
from fnet.memory.peak import CANDIDATE_OPTIONS, peak
from fnet.memory.residuals import by_layer, residuals

F32 = jnp.float32
X = jax.ShapeDtypeStruct((8, 16), F32)
W = jax.ShapeDtypeStruct((16, 16), F32)


def described(found):
    return [(r.layer, r.operation, r.shape, r.dtype.name, r.alias_of) for r in found]


def added(found):
    return sum(r.added for r in found)


def test_a_dense_layer_keeps_its_input_and_relu_a_mask():
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


def test_layers_are_summed_in_forward_order_and_to_a_depth():
    def loss(w, x):
        for name in ("b/first", "b/second", "a/first"):
            with jax.named_scope(name):
                x = jnp.sin(x @ w)
        return x.sum()

    found, one = residuals(loss, W, X), 8 * 16 * 4
    # Each keeps its cosine; all but the last, whose sum needs nothing, their output too.
    assert by_layer(found) == [
        ("b/first", 2 * one, 2),
        ("b/second", 2 * one, 2),
        ("a/first", one, 1),
    ]
    assert by_layer(found, depth=1) == [("b", 4 * one, 4), ("a", one, 1)]
    with pytest.raises(ValueError, match="depth must be at least 1, or None for all, got 0"):
        by_layer(found, depth=0)


def test_without_named_scopes_a_layer_is_its_line():
    (row,) = by_layer(residuals(lambda w, x: jnp.sin(x @ w).sum(), W, X))
    assert row.layer.startswith("test_residuals.py:")
    assert row.bytes == 8 * 16 * 4


IMAGES = jax.ShapeDtypeStruct((4, 8, 8, 6), F32)
ONE = 4 * 8 * 8 * 6 * 4


def stack(blocks, activation="leaky_relu"):
    block = serial(conv=layers.conv(6, 6, bias=False), abn=layers.abn(6, activation=activation))
    return serial(*[block] * blocks)


def loss_of(layer, wrap=lambda f: f):
    params, state = jax.eval_shape(layer.init, jax.random.key(0))

    def apply(params, state, x):
        return layer.apply(params, state, x, train=True)[0]

    return lambda params, state, x: wrap(apply)(params, state, x).sum(), params, state


def test_a_block_with_abn_keeps_one_activation_and_its_statistics():
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
def test_recompute_keeps_what_the_layers_name(activation, without, with_):
    def activations(wrap):
        found = residuals(*loss_of(stack(4, activation), wrap), IMAGES)
        return [r.layer for r in found if r.shape == IMAGES.shape and not r.alias_of]

    # The last output goes into a sum, which keeps nothing of it.
    assert len(activations(fnet.recompute)) == 4 * with_
    assert activations(fnet.recompute) == [f"{i}/abn" for i in range(4)]
    assert len(activations(lambda f: f)) >= 4 * without - 1


def test_a_checkpointed_block_keeps_its_input():
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


def test_a_policy_keeps_what_it_names_and_may_keep_it_on_the_host():
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


def test_of_a_scan_the_stack_of_all_iterations_is_kept():
    block = serial(dense=layers.dense(16, 16), act=layers.activation("softplus"))
    model = serial(first=layers.dense(16, 16), blocks=fnet.repeat(block, 5))
    found = residuals(*loss_of(model), X)
    stacked = [r for r in found if r.shape == (5, 8, 16)]
    # The first iteration's input comes from outside, the others' from the one before.
    assert {r.layer for r in stacked} == {"blocks/act"}
    assert all(r.bytes == 5 * 8 * 16 * 4 for r in stacked)
    kernels = [r for r in found if r.shape == (5, 16, 16)]
    assert [r.alias_of for r in kernels] == ["argument params['blocks']['dense']['kernel']"]


def test_a_reversible_stack_keeps_nothing_a_block():
    half = serial(conv=layers.conv(3, 3, bias=False), abn=layers.abn(3))

    def kept(blocks, restore):
        layer = layers.reversible([(half, half)] * blocks, restore=restore)
        return added(residuals(*loss_of(layer), IMAGES))

    assert kept(2, True) == kept(6, True) == ONE
    assert kept(6, False) == 7 * ONE


def test_arguments_constants_and_outputs_are_kept_anyway():
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
    # The product of what two arguments and the output give exists nowhere else.
    assert added(found) <= 8 * 16 * 4


def test_a_number_everywhere_takes_no_memory():
    def loss(w):
        return (jnp.full((8, 16), 3.0) * w * jnp.arange(8.0)[:, None]).sum()

    assert residuals(loss, X) == []


def test_only_what_the_gradient_of_the_chosen_arguments_needs_is_kept():
    def loss(w, x):
        return jnp.sum(x @ w)

    assert [r.alias_of for r in residuals(loss, W, X)] == ["argument x"]
    assert [r.alias_of for r in residuals(loss, W, X, argnums=1)] == ["argument w"]
    both = [r.alias_of for r in residuals(loss, W, X, argnums=(0, -1))]
    assert both == ["argument w", "argument x"]


def test_an_output_without_a_derivative_is_named():
    def predict(w, x):
        logits = x @ w
        return {"logits": logits, "label": logits.argmax(-1)}

    with pytest.raises(TypeError) as error:
        residuals(predict, W, X)
    assert str(error.value) == (
        "residuals: f cannot be differentiated: its output ['label'] is int32[8]; "
        "return floating arrays only, or (value, aux) with has_aux=True"
    )
    with pytest.raises(TypeError, match=r"its output is int32\[8\]; return floating"):
        residuals(lambda w, x: predict(w, x)["label"], W, X)
    with pytest.raises(TypeError, match="its output is str; return floating"):
        residuals(lambda w: "loss", W)
    with pytest.raises(ValueError, match="returns no array to differentiate, but None"):
        residuals(lambda w: None, W)
    found = residuals(lambda w, x: (predict(w, x)["logits"], predict(w, x)), W, X, has_aux=True)
    assert [r.alias_of for r in found] == ["argument x"]


def test_a_loop_that_cannot_be_run_backwards_is_jaxs_own_error():
    def loss(w, n):
        return jax.lax.fori_loop(0, n, lambda i, w: w @ w, w).sum()

    with pytest.raises(ValueError, match=r"does not work for lax\.while_loop"):
        residuals(loss, W, jax.ShapeDtypeStruct((), jnp.int32))


def test_a_call_with_nothing_to_differentiate_is_refused():
    integers = jax.ShapeDtypeStruct((3,), jnp.int32)
    with pytest.raises(TypeError, match="nothing to differentiate: labels has no floating leaf"):
        residuals(lambda labels, w: w.sum() * labels.sum(), integers, W)
    with pytest.raises(ValueError, match="argnums=2, but f has 2 positional arguments"):
        residuals(lambda labels, w: w.sum(), integers, W, argnums=2)


def test_keys_integers_and_flags_are_no_obstacle():
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


def test_shapes_and_arrays_tell_the_same():
    f, params, state = loss_of(stack(2))
    zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype))
    assert residuals(f, params, state, IMAGES) == residuals(
        f, zeros(params), zeros(state), zeros(IMAGES)
    )


def test_a_network_has_its_layers_in_forward_order():
    model = models.get("resnet18", num_classes=10)
    found = residuals(*loss_of(model), jax.ShapeDtypeStruct((2, 32, 32, 3), F32))
    rows = by_layer(found, depth=1)
    stages = ["layer1", "layer2", "layer3", "layer4"]
    assert [r.layer for r in rows if r.layer in stages] == stages
    assert rows[0].layer == "bn1"
    assert sum(r.bytes for r in rows) == added(found)
    assert sum(r.arrays for r in rows) == sum(not r.alias_of for r in found)


def test_the_sum_is_what_a_simple_program_holds():
    def loss(ws, x):
        for w in ws:
            x = jnp.sin(x @ w)
        return jnp.square(x).mean()

    arguments = [jax.ShapeDtypeStruct((64, 64), F32)] * 8, jax.ShapeDtypeStruct((512, 64), F32)
    compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile(CANDIDATE_OPTIONS["cpu"][0])
    # A sine and a cosine a layer; beside them, while running, one cotangent at most.
    one = 512 * 64 * 4
    assert added(residuals(loss, *arguments)) == 16 * one
    assert abs(peak(compiled).temporaries - 16 * one) <= one
