"""The batch axis of each value: known, mixed or unknown."""

import functools

import jax
import jax.numpy as jnp
import pytest
from example_losses import CASES, B, normal, tokens
from pretrained_cases import MIXERS

import fnet
from fnet import layers
from fnet.jaxpr.batch_axis import BatchAxes, BatchAxis, Shared, Unknown, find_batch_axes
from fnet.losses.segmentation import pixel_cross_entropy

pytestmark = pytest.mark.usefixtures("allow_rank_promotion")


W, X = normal(0, 8, 8), normal(1, B, 5, 8)


def state_of(f, *batch):
    closed = jax.make_jaxpr(f)(*batch)
    return find_batch_axes(closed, [BatchAxis(0)] * len(closed.jaxpr.invars), B)[0]


def state_of_layer(layer, x=X, *, train=True):
    params, state = jax.eval_shape(layer.init, jax.random.key(0))
    closed = jax.make_jaxpr(lambda p, s, x: layer.apply(p, s, x, train=train)[0])(params, state, x)
    shared = [Shared()] * (len(closed.jaxpr.invars) - 1)
    return find_batch_axes(closed, [*shared, BatchAxis(0)], B)[0]


def dropout_of_raw_keys(x):
    raw = x[:, 0, :2].astype(jnp.uint32)
    keys = jax.random.wrap_key_data(raw)
    return x * jax.vmap(lambda k: jax.random.uniform(k, (5, 8)))(keys)


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
    "keys from raw keys": dropout_of_raw_keys,
    "set to 0": lambda x: x.at[:, 0].set(0),
    "sharding constraint": lambda x: jax.lax.with_sharding_constraint(
        x, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
    "map over the batch": lambda x: jax.lax.map(lambda x: jnp.sin(x) @ W, x),
    "bitcast to uint8": lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8),
    "cond": lambda x: jax.lax.cond(W.sum() > 0, jnp.sin, lambda x: 0 * x, x),
}


def test_operations_that_keep_one_row_per_example():
    for name, f in OPERATIONS.items():
        assert state_of(f, X) == BatchAxis(0), name


UNKNOWN_OPERATIONS = {
    "twice the batch": lambda x: jnp.concatenate([x, jnp.sin(x)]),
    "scatter-add to one example": lambda x: x.at[0].add(1),
    "split within examples": lambda x: x.reshape(4, -1),
    "merged pairs of examples": lambda x: x.reshape(3, -1),
}


def test_operations_that_move_rows_are_unknown():
    for name, f in UNKNOWN_OPERATIONS.items():
        assert isinstance(state_of(f, X), Unknown), name


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


def test_examples_that_are_split_between_devices_are_unknown():
    to_device = BatchAxes(B).to_device
    assert to_device(BatchAxis(0), (1, 2)) == BatchAxis(0)
    assert to_device(Shared(frozenset({0, 1})), (1, 2)) == Shared(frozenset({0}))
    assert isinstance(to_device(BatchAxis(1), (1, 2)), Unknown)


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
    "selective scan": lambda: state_of(state_space, X),
    **{name: functools.partial(state_of_layer, mixer) for name, mixer in MIXERS.items()},
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


@pytest.mark.sweep(9)
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


UNIFORM = {
    "broadcast parameter": lambda x: x * jnp.broadcast_to(W[0], x.shape),
    "positions in the sequence": lambda x: x * jnp.arange(5.0)[None, :, None],
    "causal mask": lambda x: jnp.where(jnp.tri(8)[None, :5] > 0, x, 0),
    "same mask for all": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape[1:]),
    "zeros": lambda x: x + jnp.zeros((len(x), 5, 8)),
    "concatenated constant": lambda x: jnp.concatenate([x, jnp.ones((len(x), 2, 8))], 1),
}


def test_shared_values_that_are_the_same_for_all_examples():
    for name, f in UNIFORM.items():
        assert state_of(f, X) == BatchAxis(0), name


LABELS = tokens(3, 8, B)
INDEXING = {
    "logits of labels": lambda x, y: x[:, 0][jnp.arange(B), y],
    "logits of labels of a sequence": lambda x, y: x[
        jnp.arange(B)[:, None], jnp.arange(5)[None], y[:, None]
    ],
    "take_along_axis": lambda x, y: jnp.take_along_axis(x[:, 0], y[:, None], 1),
    "under vmap": lambda x, y: jax.vmap(lambda x, y: x[:, y])(x, y),
    "set at labels": lambda x, y: x[:, 0].at[jnp.arange(B), y].set(0),
}


def test_indexing_each_example_by_its_own_row():
    for name, f in INDEXING.items():
        assert state_of(f, X, LABELS) == BatchAxis(0), name
