"""Experts match the formula that computes all of them, and no example depends on others."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fnet
from fnet import layers, lora, quantization
from fnet.autodiff.coupling import find_coupling
from fnet.jaxpr import find_equations
from fnet.layers.experts import Router, balance_loss, experts

WIDTH, HIDDEN, COUNT = 8, 16, 5
CASES = {
    "normalized": {"router": Router(normalize=True, epsilon=0.5)},
    "softmax of the chosen, clamped": {
        "router": Router("softmax_of_chosen", bias=True),
        **{"bias": True, "clamp": 0.5, "up_offset": 1.0, "fused": True},
    },
    "sigmoid, with a shared one": {
        "router": Router("sigmoid", normalize=True, scale=1.5, choice_bias=True),
        "shared": layers.feed_forward(WIDTH, 6),
        "shared_gate": True,
    },
}


def built(chosen=2, **options):
    layer = experts(WIDTH, HIDDEN, COUNT, chosen, **options)
    params, _ = layer.init(jax.random.key(0))
    noise = jax.tree.map(lambda a: 0.1 * jax.random.normal(jax.random.key(a.size), a.shape), params)
    return layer, jax.tree.map(jnp.add, params, noise)


def inputs(b=3, t=21):
    return jax.random.normal(jax.random.key(1), (b, t, WIDTH))


def all_experts(p, x, *, router, fused=False, clamp=None, up_offset=0.0, chosen=2, **_):

    def linear(x, p, axes):
        bias = p["bias"] if "bias" in p else jnp.zeros(())
        return jnp.einsum(axes, x, p["kernel"]) + bias

    logits = x @ p["router"]["kernel"] + p["router"].get("bias", 0.0)
    if fused:
        gate, up = jnp.split(linear(x, p["experts"]["expand"], "btd,edh->bteh"), 2, -1)
    else:
        gate, up = (linear(x, p["experts"][n], "btd,edh->bteh") for n in ("gate", "up"))
    if clamp:
        gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
    y = linear(jax.nn.silu(gate) * (up + up_offset), p["experts"]["contract"], "bteh,ehd->bted")
    scores = jax.nn.sigmoid(logits) if router.scores == "sigmoid" else jax.nn.softmax(logits)
    index = jnp.argsort(-(scores + p["router"].get("choice_bias", 0.0)), -1)[..., :chosen]
    weights = jnp.take_along_axis(scores, index, -1)
    if router.normalize or router.scores == "softmax_of_chosen":
        weights = weights / (weights.sum(-1, keepdims=True) + router.epsilon)
    weights = weights * router.scale
    y = (jnp.take_along_axis(y, index[..., None], 2) * weights[..., None]).sum(2)
    if "shared" in p:
        shared, _ = layers.feed_forward(WIDTH, 6).apply(p["shared"], {}, x, train=True)
        y += shared * jax.nn.sigmoid(x @ p["shared_gate"]["kernel"])
    return y


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradient_are_those_of_the_formula(case):
    layer, params = built(**CASES[case])
    x = inputs()

    def loss(f, params, x):
        return jnp.square(f(params, x)).mean()

    def apply(params, x):
        return layer.apply(params, {}, x, train=False)[0]

    formula = functools.partial(all_experts, **CASES[case])

    @jax.jit
    def both(*a):
        return [(f(*a), jax.grad(functools.partial(loss, f), (0, 1))(*a)) for f in (apply, formula)]

    with jax.numpy_rank_promotion("allow"):
        got, expected = both(params, x)
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-4)
    one = jax.jit(apply)(params, x[:, :1])  # a token while text is generated
    chex.assert_trees_all_close(one, expected[0][:, :1], rtol=1e-4, atol=1e-4)


def mean_of_rows(layer):
    def loss(params, state, batch, key):
        y, _ = layer.apply(params, {}, batch["x"], train=True)
        return jnp.square(y).mean((1, 2))

    return loss


@pytest.mark.slow
def test_no_loss_depends_on_other_examples():
    layer, params = built(**CASES["normalized"])
    loss, x, key = mean_of_rows(layer), inputs(), jax.random.key(2)
    assert find_coupling(loss, params, {}, {"x": x}, key) is None

    @jax.jit
    def norm(row):
        gradient = jax.grad(lambda p: loss(p, {}, {"x": row[None]}, key).sum())
        return optax.tree.norm(gradient(params))

    clipped_grad = jax.jit(fnet.autodiff.clipped_grad(loss, 0.5))
    clipped, info = clipped_grad(params, {}, {"x": x}, key)
    np.testing.assert_allclose(info.norms, [*map(norm, x)], rtol=1e-5)
    assert optax.tree.norm(clipped) <= 0.5 * len(x)


def test_low_rank_updates_reach_one_expert_at_a_time():
    layer, params = built(**CASES["normalized"])
    frozen = quantization.quantize(params, "nf4")
    config, x = lora.LoRA(rank=2, targets=("*experts*kernel",)), inputs()
    adapters = jax.tree.map(
        lambda a: jax.random.normal(jax.random.key(3), a.shape),
        lora.init(config, params, jax.random.key(0)),
    )

    def apply(params, x):
        return layer.apply(params, {}, x, train=False)[0]

    wrapped = lora.wrap(apply, config)
    merged = lora.merge(config, frozen, adapters)
    full = jax.jit(fnet.represented.wrap(apply))(merged, x)
    got = jax.jit(wrapped)(adapters, frozen, x)
    chex.assert_trees_all_close(got, full, rtol=1e-4, atol=1e-4)
    closed = jax.make_jaxpr(lambda a, x: wrapped(a, frozen, x))(adapters, x)
    shapes = {
        v.aval.shape for eqn in find_equations(closed, "") for v in eqn.outvars if v.aval.shape
    }
    assert not {(COUNT, WIDTH, HIDDEN), (COUNT, HIDDEN, WIDTH)} & shapes


def test_balance_loss_is_that_of_switch_transformers_for_each_row():
    probabilities = jax.nn.softmax(jax.random.normal(jax.random.key(0), (2, 2, 7, 3)))
    chosen = jnp.argsort(-probabilities, -1)[..., :2]
    mask = jnp.arange(7)[None] < jnp.array([[7], [4]])
    routing = [
        {"probabilities": p, "chosen": c} for p, c in zip(probabilities, chosen, strict=True)
    ]
    losses = balance_loss(routing, mask)
    for row, n in enumerate((7, 4)):
        own, index = probabilities[:, row, :n].reshape(-1, 3), chosen[:, row, :n].reshape(-1, 2)
        used = np.bincount(index.ravel(), minlength=3) / len(own)
        np.testing.assert_allclose(losses[row], 3 * (used * own.mean(0)).sum(), rtol=1e-6)


def test_a_model_adds_the_balance_to_learned_tokens():
    block = layers.Block(layers.attention(WIDTH, 2, causal=True), experts(WIDTH, HIDDEN, COUNT, 2))
    model = fnet.models.language_model(vocabulary=11, width=WIDTH, blocks=[block] * 2)
    params, state = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 11)
    loss_mask = jnp.arange(9)[None] > jnp.array([[2], [5]])

    def losses(balance):
        return model.losses(
            params, state, tokens, tokens, train=True, loss_mask=loss_mask, balance=balance
        )

    (plain, after), (balanced, _) = jax.jit(lambda: (losses(0.0), losses(0.1)))()
    assert after == {}
    added = np.asarray(balanced - plain)
    assert (added[~np.asarray(loss_mask)] == 0).all()
    for row, mask in zip(added, np.asarray(loss_mask), strict=True):
        np.testing.assert_allclose(row[mask], row[mask][0], rtol=1e-4)
        assert 0.15 < row[mask][0] < 0.5  # 0.1 times a bit more than the 2 chosen
    dense = fnet.models.language_model(
        vocabulary=11, width=WIDTH, blocks=[block._replace(feed_forward=None)]
    )
    params, _ = jax.eval_shape(dense.init, jax.random.key(0))
    with pytest.raises(ValueError, match="expected the routing of layers of experts, got none"):
        jax.eval_shape(
            lambda p: dense.losses(p, {}, tokens, tokens, train=True, balance=0.1), params
        )


def test_rejects_invalid_arguments():
    for options, match in (
        ({"chosen": 6}, "chosen must be at most count=5, got 6"),
        ({"router": Router("top")}, "scores must be one of .*softmax"),
        ({"shared_gate": True}, "shared_gate needs a shared layer"),
        ({"chosen": 0}, "chosen must be at least 1"),
    ):
        with pytest.raises(ValueError, match=match):
            experts(WIDTH, HIDDEN, COUNT, **{"chosen": 2} | options)


def test_rejects_inputs_of_another_shape():
    layer, params = built()
    assert layer.apply(params, {}, jnp.ones((3, WIDTH)), train=False)[0].shape == (3, WIDTH)
    for x in (jnp.ones((2, 3, 4)), jnp.ones(WIDTH)):
        with pytest.raises(ValueError, match="experts: expected"):
            layer.apply(params, {}, x, train=False)
