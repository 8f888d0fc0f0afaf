"""Which axis counts examples: where it is known, where they meet, where it cannot be told."""

import functools

import example_losses
import jax
import jax.numpy as jnp
import pytest
from example_losses import CASES, B, normal, rows, tokens

import fnet
from fnet import layers
from fnet.autodiff.per_example.batch_axis import UNKNOWN, BatchAxis, Mixed, find_batch_axes
from fnet.losses.segmentation import pixel_cross_entropy

as_users_write = pytest.fixture(autouse=True)(example_losses.as_users_write)

W, X = normal(0, 8, 8), normal(1, B, 5, 8)


def followed(f, *batch):
    closed = jax.make_jaxpr(f)(*batch)
    return find_batch_axes(closed, [True] * len(closed.jaxpr.invars), B).outputs[0]


def of_layer(layer, x=X, *, train=True):
    params, state = jax.eval_shape(layer.init, jax.random.key(0))
    closed = jax.make_jaxpr(lambda p, s, x: layer.apply(p, s, x, train=train)[0])(params, state, x)
    mine = [False] * (len(closed.jaxpr.invars) - 1)
    return find_batch_axes(closed, [*mine, True], B).outputs[0]


def at_indices(x):
    return jnp.zeros_like(x).at[:, jnp.array([3, 0])].add(x[:, :2])


OPERATIONS = {
    "merged and divided": lambda x: (x.reshape(-1, 8) @ W).reshape(x.shape).sum(1),
    "merged behind another axis": lambda x: jnp.moveaxis(x, 1, 0).reshape(5, -1).T.sum(1),
    "sorted in time": lambda x: jnp.sort(x, 1),
    "reversed in time": lambda x: x[:, ::-1],
    "read as bits": jnp.signbit,
    "written over": lambda x: jax.lax.dynamic_update_slice(x, x[:, :2], (0, 3, 0)),
    "added in places": at_indices,
    "set to 0 in places": lambda x: x.at[:, 0].set(0),
    "laid on devices": lambda x: jax.lax.with_sharding_constraint(
        x, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
    "a branch": lambda x: jax.lax.cond(W.sum() > 0, jnp.sin, lambda x: 0 * x, x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_an_example_stays_one(name):
    assert followed(OPERATIONS[name], X) == BatchAxis(0)


LOST = {
    "moved round": lambda x: jnp.roll(x, 1, 0),
    "by number": lambda x: x[jnp.array([1, 0, 2, 3, 4, 5])],
    "written over another": lambda x: jax.lax.dynamic_update_slice(x, x[:2], (3, 0, 0)),
    "added to another": lambda x: x.at[0].add(1),
    "divided otherwise": lambda x: x.reshape(4, -1),
    "halves of examples": lambda x: x.reshape(3, -1),
    "other bits": lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8),
    "branches by the data": lambda x: jax.lax.switch(x[0, 0, 0].astype(int), [jnp.sin, abs], x),
}


@pytest.mark.parametrize("name", LOST)
def test_what_takes_rows_out_of_the_batch_is_not_known(name):
    assert followed(LOST[name], X) == UNKNOWN


def recurrence(x):
    return fnet.linear_recurrence(jax.nn.sigmoid(x), jnp.sin(x))


def state_space(x):
    decay, each = -jnp.ones((8, 3)), x[..., :3]
    return fnet.selective_scan(x, jax.nn.softplus(x), decay, each, jnp.sin(each), W[0])[0]


def attention(x, **how):
    q = x.reshape(len(x), 5, 2, 4)
    return fnet.dot_product_attention(q, q, q, **how)


def words(x, y, **how):
    return fnet.linear_cross_entropy(x, W, y, bias=W[0], **how)


TOKENS = tokens(2, 8, B, 5)
RULES = {
    "layer norm": lambda: followed(lambda x: fnet.layer_norm(x, W[0], W[1]), X),
    "root mean square": lambda: followed(lambda x: fnet.rms_norm(x, W[0]), X),
    "group norm": lambda: of_layer(layers.group_norm(8, groups=2)),
    "frozen batch norm": lambda: of_layer(layers.abn(8), train=False),
    "tanh": lambda: of_layer(layers.dynamic_tanh(8)),
    **{
        name: functools.partial(of_layer, layers.activation(name))
        for name in ("leaky_relu", "elu", "softplus", "relu", "gelu", "silu")
    },
    "attention": lambda: followed(functools.partial(attention, causal=True), X),
    "attention in chunks": lambda: followed(functools.partial(attention, chunk=2, window=3), X),
    "repeated": lambda: of_layer(fnet.repeat(layers.transformer(8, heads=2, blocks=1), 2)),
    "convolution in time": lambda: of_layer(layers.causal_conv(8)),
    "recurrence": lambda: followed(recurrence, X),
    "recurrent block": lambda: of_layer(layers.rg_lru(8, heads=2)),
    "state space": lambda: followed(state_space, X),
    "mamba": lambda: of_layer(layers.mamba(8)),
    "mamba 2": lambda: of_layer(layers.mamba2(8)),
    "context": lambda: followed(lambda x: fnet.apply_context(x, W, W[0, 0]), X),
    "parameters first": lambda: followed(lambda x: fnet.params_first(x, W)[0] @ W, X),
    "words": lambda: followed(words, X, TOKENS),
    "words in chunks": lambda: followed(functools.partial(words, chunk=3, z_loss=0.1), X, TOKENS),
    "pixels": lambda: followed(
        lambda x, y: pixel_cross_entropy(x[:, None], y, rows=2)[0], X, tokens(3, 8, B, 3, 9)
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_what_goes_back_by_a_rule_of_fnet_has_a_row_an_example_too(name):
    assert RULES[name]() == BatchAxis(0)


def test_norms_of_merged_rows_in_a_loop_are_known():
    case = CASES["norms_of_merged_rows"]()
    assert followed(lambda x: case.loss(case.params, x), *case.batch) == BatchAxis(0)


def test_rules_inside_of_a_function_with_a_rule_are_not_gone_back_through():
    """Its forward rule calls it, and what it computes by has none."""

    @jax.custom_vjp
    def refused(x):
        return jnp.sin(x)

    def refuse(*_):
        raise TypeError

    refused.defvjp(refuse, refuse)

    @jax.custom_vjp
    def f(x):
        return refused(x)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * jnp.cos(x),))
    assert followed(f, X) == BatchAxis(0)


def test_the_place_where_examples_meet_is_told():
    def f(x):
        with jax.named_scope("norm"):
            return rows(x - x.reshape(-1, 8).reshape(x.shape).mean((0, 1)))

    assert followed(f, X) == Mixed("norm", "reduce_sum")


def test_what_was_written_to_a_reference_is_not_known():
    def f(x):
        total = jax.new_ref(jnp.zeros(x.shape[1:]))
        total[...] = total[...] + x.sum(0)
        return x - total[...][None]

    assert followed(f, X) == UNKNOWN
