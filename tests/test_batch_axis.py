"""The batch axis of each value: known, mixed or unknown."""

import functools

import example_losses
import jax
import jax.numpy as jnp
import pytest
from example_losses import CASES, B, normal, row_losses, tokens

import fnet
from fnet import layers
from fnet.autodiff.per_example.batch_axis import UNKNOWN, BatchAxis, Mixed, find_batch_axes
from fnet.losses.segmentation import pixel_cross_entropy

allow_rank_promotion = pytest.fixture(autouse=True)(example_losses.allow_rank_promotion)

W, X = normal(0, 8, 8), normal(1, B, 5, 8)


def state_of(f, *batch):
    closed = jax.make_jaxpr(f)(*batch)
    return find_batch_axes(closed, [True] * len(closed.jaxpr.invars), B).outputs[0]


def state_of_layer(layer, x=X, *, train=True):
    params, state = jax.eval_shape(layer.init, jax.random.key(0))
    closed = jax.make_jaxpr(lambda p, s, x: layer.apply(p, s, x, train=train)[0])(params, state, x)
    is_batched = [False] * (len(closed.jaxpr.invars) - 1)
    return find_batch_axes(closed, [*is_batched, True], B).outputs[0]


def scatter_add(x):
    return jnp.zeros_like(x).at[:, jnp.array([3, 0])].add(x[:, :2])


OPERATIONS = {
    "merged and split": lambda x: (x.reshape(-1, 8) @ W).reshape(x.shape).sum(1),
    "merged behind another axis": lambda x: jnp.moveaxis(x, 1, 0).reshape(5, -1).T.sum(1),
    "sorted over the sequence": lambda x: jnp.sort(x, 1),
    "reversed over the sequence": lambda x: x[:, ::-1],
    "signbit": jnp.signbit,
    "dynamic_update_slice": lambda x: jax.lax.dynamic_update_slice(x, x[:, :2], (0, 3, 0)),
    "scatter-add": scatter_add,
    "set to 0": lambda x: x.at[:, 0].set(0),
    "sharding constraint": lambda x: jax.lax.with_sharding_constraint(
        x, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
    "cond": lambda x: jax.lax.cond(W.sum() > 0, jnp.sin, lambda x: 0 * x, x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_that_keep_one_row_per_example(name):
    assert state_of(OPERATIONS[name], X) == BatchAxis(0)


UNKNOWN_OPERATIONS = {
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "indexed": lambda x: x[jnp.array([1, 0, 2, 3, 4, 5])],
    "dynamic_update_slice of other examples": lambda x: jax.lax.dynamic_update_slice(
        x, x[:2], (3, 0, 0)
    ),
    "scatter-add to one example": lambda x: x.at[0].add(1),
    "split within examples": lambda x: x.reshape(4, -1),
    "merged pairs of examples": lambda x: x.reshape(3, -1),
    "bitcast to uint8": lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8),
    "switch on data": lambda x: jax.lax.switch(x[0, 0, 0].astype(int), [jnp.sin, abs], x),
}


@pytest.mark.parametrize("name", UNKNOWN_OPERATIONS)
def test_operations_that_move_rows_are_unknown(name):
    assert state_of(UNKNOWN_OPERATIONS[name], X) == UNKNOWN


def recurrence(x):
    return fnet.linear_recurrence(jax.nn.sigmoid(x), jnp.sin(x))


def state_space(x):
    decay, b = -jnp.ones((8, 3)), x[..., :3]
    return fnet.selective_scan(x, jax.nn.softplus(x), decay, b, jnp.sin(b), W[0])[0]


def attention(x, **options):
    q = x.reshape(len(x), 5, 2, 4)
    return fnet.dot_product_attention(q, q, q, **options)


def vocabulary_loss(x, y, **options):
    return fnet.linear_cross_entropy(x, W, y, bias=W[0], **options)


TOKENS = tokens(2, 8, B, 5)
FNET_FUNCTIONS = {
    "layer norm": lambda: state_of(lambda x: fnet.layer_norm(x, W[0], W[1]), X),
    "rms norm": lambda: state_of(lambda x: fnet.rms_norm(x, W[0]), X),
    "group norm": lambda: state_of_layer(layers.group_norm(8, groups=2)),
    "frozen batch norm": lambda: state_of_layer(layers.abn(8), train=False),
    "tanh": lambda: state_of_layer(layers.dynamic_tanh(8)),
    **{
        name: functools.partial(state_of_layer, layers.activation(name))
        for name in ("leaky_relu", "elu", "softplus", "relu", "gelu", "silu")
    },
    "attention": lambda: state_of(functools.partial(attention, causal=True), X),
    "attention in chunks": lambda: state_of(functools.partial(attention, chunk=2, window=3), X),
    "repeat": lambda: state_of_layer(fnet.repeat(layers.transformer(8, heads=2, blocks=1), 2)),
    "causal convolution": lambda: state_of_layer(layers.causal_conv(8)),
    "linear recurrence": lambda: state_of(recurrence, X),
    "rg_lru": lambda: state_of_layer(layers.rg_lru(8, heads=2)),
    "selective scan": lambda: state_of(state_space, X),
    "mamba": lambda: state_of_layer(layers.mamba(8)),
    "mamba 2": lambda: state_of_layer(layers.mamba2(8)),
    "attention context": lambda: state_of(lambda x: fnet.apply_context(x, W, W[0, 0]), X),
    "params_first": lambda: state_of(lambda x: fnet.params_first(x, W)[0] @ W, X),
    "linear cross-entropy": lambda: state_of(vocabulary_loss, X, TOKENS),
    "linear cross-entropy in chunks": lambda: state_of(
        functools.partial(vocabulary_loss, chunk=3, z_loss=0.1), X, TOKENS
    ),
    "pixel cross-entropy": lambda: state_of(
        lambda x, y: pixel_cross_entropy(x[:, None], y, rows=2)[0], X, tokens(3, 8, B, 3, 9)
    ),
}


@pytest.mark.parametrize("name", FNET_FUNCTIONS)
def test_custom_backward_rules_of_fnet_keep_one_row_per_example(name):
    assert FNET_FUNCTIONS[name]() == BatchAxis(0)


def test_layer_norm_of_merged_rows_in_a_scan():
    case = CASES["layer_norm_in_scan"]()
    assert state_of(lambda x: case.loss(case.params, x), *case.batch) == BatchAxis(0)


def test_inner_custom_rules_are_not_differentiated():
    """The forward rule calls a function whose own rule cannot be differentiated."""

    @jax.custom_vjp
    def not_differentiable(x):
        return jnp.sin(x)

    def fail(*_):
        raise TypeError

    not_differentiable.defvjp(fail, fail)

    @jax.custom_vjp
    def f(x):
        return not_differentiable(x)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * jnp.cos(x),))
    assert state_of(f, X) == BatchAxis(0)


def test_reports_the_layer_that_mixes_examples():
    def f(x):
        with jax.named_scope("norm"):
            return row_losses(x - x.reshape(-1, 8).reshape(x.shape).mean((0, 1)))

    assert state_of(f, X) == Mixed("norm", "reduce_sum")


def test_values_read_from_a_reference_are_unknown():
    def f(x):
        total = jax.new_ref(jnp.zeros(x.shape[1:]))
        total[...] = total[...] + x.sum(0)
        return x - total[...][None]

    assert state_of(f, X) == UNKNOWN
