"""Which losses a memory budget may split: compared with gradients of whole and of split batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import CASES
from jax import lax

import fnet
from fnet.autodiff import accumulate_grad, mean
from fnet.autodiff.coupling import find_coupling

pytestmark = pytest.mark.usefixtures("allow_key_reuse", "allow_rank_promotion")


B, T, D = 8, 4, 8
KEY = jax.random.key(0)
cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


BATCH = {"x": normal(0, B, D), "length": 1 + jnp.arange(B) % T}


def coupling(loss, params, model_state=(), batch=BATCH):
    return find_coupling(loss, params, model_state, batch, KEY)


def gradient(mode, loss, params, batch=BATCH):
    return jax.jit(mode(loss))(params, {}, batch, KEY)[0]


def off_by(loss, params, batch=BATCH):
    """Difference between the gradients of two microbatches and of the whole batch, relative."""
    whole, split = (
        gradient(m, loss, params, batch) for m in (mean, lambda loss: accumulate_grad(loss, 2))
    )
    difference = jax.tree.map(jnp.subtract, whole, split)
    return float(optax.tree.norm(difference) / optax.tree.norm(whole))


def reversible():
    half = fnet.serial(fnet.layers.dense(D // 2, D // 2), fnet.layers.dropout(0.5))
    network = fnet.reversible([(half, half)] * 2)
    params, state = network.init(KEY)

    def loss(params, model_state, batch, key):
        return jnp.square(network.apply(params, state, batch["x"], train=True, key=key)[0]).sum(-1)

    return loss, params


def test_losses_of_single_examples_may_be_split_and_the_gradient_is_the_same():
    names = "flax_transformer flax_cnn fnet_transformer layer_norm_in_scan recurrent"
    for name in names.split():
        of_batch, params, (x,) = CASES[name]()
        loss = lambda p, state, batch, key, f=of_batch: f(p, batch["x"])  # noqa: E731
        assert coupling(loss, params, batch={"x": x}) is None, name
        if name in ("recurrent", "layer_norm_in_scan"):  # The others compile for long.
            assert off_by(loss, params, {"x": x}) < 1e-4


def test_dropout_does_not_couple_examples():
    assert coupling(*reversible()) is None
    of_batch, params, (x, _) = CASES["dropout"]()
    loss = lambda p, s, batch, key: of_batch(p, batch["x"], key)  # noqa: E731
    assert coupling(loss, params, batch={"x": x}) is None


# Losses that change if the batch is split.

W = normal(2, D, D)


def of_layer(layer):
    return lambda w, model_state, batch, key: jnp.square(layer(jnp.tanh(batch["x"] @ w))).sum(-1)


@jax.custom_vjp
def with_unit_gradient(w):
    return w


with_unit_gradient.defvjp(lambda w: (w, None), lambda _, ct: (ct / (1e-6 + jnp.linalg.norm(ct)),))


@jax.custom_vjp
def dense_with_clipped_gradient(x, w):
    return x @ w


dense_with_clipped_gradient.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda residuals, ct: (ct @ residuals[1].T, jnp.clip(residuals[0].T @ ct, -0.02, 0.02)),
)


def contrastive(w, model_state, batch, key):
    h = batch["x"] @ w
    return cross_entropy(h @ h.T, jnp.arange(len(h)))


def mean_over_tokens(w, model_state, batch, key):
    mask = jnp.arange(T) < batch["length"][:, None]
    losses = jnp.square(jnp.tanh(batch["x"] @ w)).sum(-1, keepdims=True) * mask
    return losses.sum(1) / mask.sum() * len(mask)


def penalty_per_batch(w, model_state, batch, key):
    return jnp.tanh(batch["x"] @ w).sum(-1) + jnp.square(w).sum() / len(batch["x"])


def in_a_scan(w, model_state, batch, key):
    layer = lambda h, w: (jnp.tanh(h @ with_unit_gradient(w)), None)  # noqa: E731
    return jnp.square(lax.scan(layer, batch["x"], jnp.stack([w, w.T]))[0]).sum(-1)


COUPLED = {
    "contrastive": (contrastive, "dot_general"),
    "mean over all tokens": (mean_over_tokens, "reduce_sum"),
    "batch norm": (of_layer(lambda h: (h - h.mean(0)) / (h.std(0) + 1)), "reduce_sum"),
    "position": (of_layer(lambda h: h * jnp.arange(len(h))[:, None]), "its position in the batch"),
    "penalty per batch": (penalty_per_batch, "div"),
    "a number that is there twice": (
        lambda w, *a: 8 * penalty_per_batch(w, *a) + 4 * of_layer(jnp.sin)(w, *a),
        "div",
    ),
    "count of examples": (of_layer(lambda h: h / jnp.ones(len(h)).sum()), "reduce_sum"),
    "iterations": (of_layer(lambda h: lax.fori_loop(0, len(h), lambda _, c: c / 2, h)), "scan"),
    "another function": (of_layer(lambda h: h if len(h) == B else 2 * h), "square"),
    "unit gradient": (
        lambda w, *a: of_layer(jnp.sin)(with_unit_gradient(w), *a),
        "the derivative rule of custom_vjp_call",
    ),
    "unit gradient in a scan": (in_a_scan, "the derivative rule of custom_vjp_call"),
    "clipped gradient of a layer": (
        lambda w, s, batch, key: dense_with_clipped_gradient(batch["x"], w).sum(-1),
        "the derivative rule of custom_vjp_call",
    ),
}


@pytest.mark.parametrize("name", COUPLED)
def test_losses_whose_gradient_changes_if_the_batch_is_split_are_found_with_their_line(name):
    loss, operation = COUPLED[name]
    message = coupling(loss, W)
    assert operation in message
    assert "test_coupling.py:" in message


def side_effect(w, model_state, batch, key):
    ref = jax.new_ref(batch["x"])
    return (ref[...] @ w).sum(-1)


def hidden(w, model_state, batch, key):
    return (batch["x"] @ w).sum(-1) * jax.pure_callback(np.max, jnp.float32(0), batch["x"])


def test_what_is_not_known_counts_as_coupled():
    assert "it is not known whether side effects (new_ref" in coupling(side_effect, W)
    assert "it is not known whether pure_callback" in coupling(hidden, W)


def test_a_loss_for_one_size_of_batch_is_coupled():
    def loss(w, model_state, batch, key):
        return jnp.square(batch["x"].reshape(B, D) @ w).sum(-1)

    assert coupling(loss, W).startswith("the loss does not work for 4 examples (")


def test_rows_shuffled_by_a_random_key_are_coupled():
    def mixup(w, model_state, batch, key):
        x = batch["x"]
        return jnp.square((x + jax.random.permutation(key, x)) @ w).sum(-1)

    assert "mixes the examples of the batch" in coupling(mixup, W)


def test_random_keys_may_come_from_anywhere():
    constant = jax.random.key(3)

    def loss(w, model_state, batch, key):
        h = batch["x"] @ w
        for k in (constant, jax.random.key(4), jax.random.PRNGKey(5), model_state, key):
            h *= jax.random.bernoulli(jax.random.fold_in(k, 1), 0.5, h.shape)
        return h.sum(-1)

    assert coupling(loss, W, model_state=jax.random.key(6)) is None
    by_position = dict(BATCH, key=jax.random.split(KEY, B))
    rows = lambda w, s, batch, key: jax.vmap(  # noqa: E731
        lambda x, k: jnp.where(jax.random.bernoulli(k, 0.5, (D,)), x @ w, 0).sum()
    )(batch["x"], batch["key"])
    assert coupling(rows, W, batch=by_position) is None
