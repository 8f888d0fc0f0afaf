"""Which losses a memory budget may split: compared with gradients of whole and of split batches."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
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


BATCH = {
    "x": normal(0, B, D),
    "image": normal(1, B, 8, 8, 3),
    "tokens": jnp.arange(B * (T + 1)).reshape(B, T + 1) % 7,
    "label": jnp.arange(B) % 3,
    "length": 1 + jnp.arange(B) % T,
    "weight": 1.0 * (jnp.arange(B) % 4 > 0),
}


def coupling(loss, params, model_state=(), batch=BATCH):
    return find_coupling(loss, params, model_state, batch, KEY)


def gradient(mode, loss, params, batch=BATCH):
    return jax.jit(mode(loss))(params, {}, batch, KEY)[0]


def off_by(loss, params):
    """Difference between the gradients of two microbatches and of the whole batch, relative."""
    whole, split = (
        gradient(m, loss, params) for m in (mean, lambda loss: accumulate_grad(loss, 2))
    )
    difference = jax.tree.map(jnp.subtract, whole, split)
    return float(optax.tree.norm(difference) / optax.tree.norm(whole))


# Losses of the usual libraries, without dropout.


class Block(nn.Module):
    """A transformer block of linen, rematerialized and scanned over depth."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, h, mask):
        y = nn.LayerNorm()(h)
        y = nn.MultiHeadDotProductAttention(2, dropout_rate=self.rate, deterministic=not self.rate)(
            y, mask=mask
        )
        h += nn.Dropout(self.rate, deterministic=not self.rate)(y)
        return h + nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(nn.LayerNorm()(h)))), None


class Transformer(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, D)
        h = embed(tokens) + self.param("position", nn.initializers.normal(), (1, T, D))
        blocks = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=2,
        )
        h, _ = blocks(self.rate)(h, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(h))


def linen_transformer(rate=0.0):
    network = Transformer(rate)
    params = network.init({"params": KEY, "dropout": KEY}, BATCH["tokens"][:, :-1])

    def loss(params, model_state, batch, key):
        logits = network.apply(params, batch["tokens"][:, :-1], rngs={"dropout": key})
        mask = jnp.arange(T) < batch["length"][:, None]
        losses = jnp.where(mask, cross_entropy(logits, batch["tokens"][:, 1:]), 0)
        return losses.sum(1) / batch["length"]

    return loss, params


def nnx_resnet(rate=0.0):
    """Convolutions with group norm, label smoothing and a learned temperature."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(3, D, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(D, 2, rngs=rngs)
            self.conv = nnx.Conv(D, D, (3, 3), strides=2, rngs=rngs)
            self.head = nnx.Linear(D, 3, rngs=rngs)
            self.dropout = nnx.Dropout(rate)

        def __call__(self, x, rngs):
            h = self.stem(x)
            h += nnx.relu(self.norm(h))
            h = nnx.avg_pool(nnx.silu(self.conv(h)), (2, 2), (2, 2)).mean((1, 2))
            return self.head(self.dropout(h, rngs=rngs))

    graph, params = nnx.split(Network(nnx.Rngs(0)))

    def loss(params, model_state, batch, key):
        logits = nnx.merge(graph, params)(batch["image"], nnx.Rngs(key))
        smooth = optax.smooth_labels(jax.nn.one_hot(batch["label"], 3), 0.1)
        return optax.losses.softmax_cross_entropy(logits, smooth) * batch["weight"]

    return loss, params


def equinox_mlp(rate=0.0):
    network = eqx.nn.Sequential(
        [eqx.nn.MLP(D, D, 2 * D, 2, key=KEY), eqx.nn.Dropout(rate), eqx.nn.Linear(D, 3, key=KEY)]
    )
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def loss(params, model_state, batch, key):
        keys = jax.random.split(key, len(batch["x"]))
        logits = jax.vmap(lambda x, key: eqx.combine(params, static)(x, key=key))(batch["x"], keys)
        return cross_entropy(logits, batch["label"])

    return loss, params


def haiku_lstm(rate=0.0):
    def network(tokens):
        h = hk.Embed(7, D)(tokens).swapaxes(0, 1)
        core = hk.LSTM(D)
        h, _ = hk.dynamic_unroll(core, h, core.initial_state(tokens.shape[0]))
        return hk.Linear(3)(hk.dropout(hk.next_rng_key(), rate, h[-1]))

    pure = hk.transform(network)
    params = pure.init(KEY, BATCH["tokens"])

    def loss(params, model_state, batch, key):
        return cross_entropy(pure.apply(params, key, batch["tokens"]), batch["label"])

    return loss, params


def fnet_transformer(rate=0.0):
    network = fnet.serial(
        fnet.layers.embedding(7, D),
        fnet.layers.transformer(D, heads=2, blocks=2, causal=True),
        fnet.layers.dropout(rate),
        fnet.layers.dense(D, 7),
    )
    params, _ = network.init(KEY)

    def loss(params, model_state, batch, key):
        logits, _ = network.apply(params, {}, batch["tokens"][:, :-1], train=True, key=key)
        return fnet.losses.cross_entropy(logits, batch["tokens"][:, 1:]).mean(1)

    return loss, params


def reversible(rate=0.0):
    half = fnet.serial(fnet.layers.dense(D // 2, D // 2), fnet.layers.dropout(rate))
    network = fnet.reversible([(half, half)] * 2)
    params, state = network.init(KEY)

    def loss(params, model_state, batch, key):
        return jnp.square(network.apply(params, state, batch["x"], train=True, key=key)[0]).sum(-1)

    return loss, params


ORDINARY = {
    f.__name__: f
    for f in (
        linen_transformer, nnx_resnet, equinox_mlp, haiku_lstm, fnet_transformer, reversible
    )
}  # fmt: skip


@pytest.mark.sweep(15)
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_losses_may_be_split_and_the_gradient_is_the_same(name):
    loss, params = ORDINARY[name]()
    assert coupling(loss, params) is None
    assert off_by(loss, params) < 1e-4


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", ORDINARY)
def test_dropout_does_not_couple_examples(name):
    assert coupling(*ORDINARY[name](rate=0.5)) is None


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


def normalized_advantages(w, model_state, batch, key):
    advantage = batch["x"][:, 0]
    advantage = (advantage - advantage.mean()) / advantage.std()
    return advantage * jnp.tanh(batch["x"] @ w).sum(-1)


def mean_over_tokens(w, model_state, batch, key):
    mask = jnp.arange(T) < batch["length"][:, None]
    losses = jnp.square(jnp.tanh(batch["x"] @ w)).sum(-1, keepdims=True) * mask
    return losses.sum(1) / mask.sum() * len(mask)


def penalty_per_batch(w, model_state, batch, key):
    return jnp.tanh(batch["x"] @ w).sum(-1) + jnp.square(w).sum() / len(batch["x"])


def in_a_scan(w, model_state, batch, key):
    def layer(h, w):
        return jnp.tanh(h @ with_unit_gradient(w)), None

    return jnp.square(lax.scan(layer, batch["x"], jnp.stack([w, w.T]))[0]).sum(-1)


COUPLED = {
    "contrastive": (contrastive, "dot_general"),
    "normalized advantages": (normalized_advantages, "reduce_sum"),
    "mean over all tokens": (mean_over_tokens, "reduce_sum"),
    "batch norm": (of_layer(lambda h: (h - h.mean(0)) / (h.std(0) + 1)), "reduce_sum"),
    "balance of experts": (of_layer(lambda h: h * jax.nn.softmax(h).mean(0)), "reduce_sum"),
    "batch norm in a checkpoint": (of_layer(jax.checkpoint(lambda h: h - h.mean(0))), "reduce_sum"),
    "position": (of_layer(lambda h: h * jnp.arange(len(h))[:, None]), "its position in the batch"),
    "penalty per batch": (penalty_per_batch, "8 in div"),
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


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", COUPLED)
def test_losses_whose_gradient_changes_if_the_batch_is_split_are_found_with_their_line(name):
    loss, operation = COUPLED[name]
    assert off_by(loss, W) > 1e-3
    message = coupling(loss, W)
    assert operation in message
    assert "test_coupling.py:" in message


def side_effect(w, model_state, batch, key):
    ref = jax.new_ref(batch["x"])
    return (ref[...] @ w).sum(-1)


def hidden(w, model_state, batch, key):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return (batch["x"] @ w).sum(-1) * jax.pure_callback(np.max, shape, batch["x"])


@pytest.mark.parametrize(("loss", "what"), [(side_effect, "new_ref"), (hidden, "pure_callback")])
def test_what_is_not_known_counts_as_coupled(loss, what):
    assert f"it is not known whether {'side effects (' * (what == 'new_ref')}{what}" in coupling(
        loss, W
    )


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
