"""Clipped gradients of losses with `jax.checkpoint`: nothing more is saved than by `jax.grad`."""

import chex
import example_losses
import jax
import jax.numpy as jnp
import pytest
from example_losses import B, Case, assert_clipped_like_a_loop, normal, row_losses

import fnet
from fnet.autodiff import gradient_strategies
from fnet.autodiff.per_example import ghost_norm
from fnet.memory import peak

D = 6
X = normal(9, B, 5, D)
PARAMS = {"in": normal(0, D, D), "up": normal(1, 3, D, 2 * D), "down": normal(2, 3, 2 * D, D)}


def scanned(p, x):
    @jax.checkpoint
    def layer(h, w):
        up, down = w
        return h + jax.nn.silu(h @ up) @ down, None

    return row_losses(jax.lax.scan(layer, x @ p["in"], (p["up"], p["down"]))[0])


def one_layer(p, x):
    """A function with custom derivatives inside of `jax.checkpoint`."""

    @jax.checkpoint
    def layer(h, w):
        return fnet.layer_norm(jax.nn.gelu(h @ w), jnp.ones(D), jnp.zeros(D))

    return row_losses(layer(x, p["in"]) @ p["up"][0])


def shared(p, x):
    """The kernels of one layer are used in every iteration, and one of them outside, too."""

    @jax.checkpoint
    def layer(h, _):
        return jnp.tanh(h @ p["in"] @ p["up"][0]) @ p["down"][0], None

    return row_losses(jax.lax.scan(layer, x @ p["in"], None, length=2)[0])


LOSSES = {"scanned": scanned, "shared": shared}


@pytest.mark.parametrize(("name", "per_layer"), [("scanned", True), ("shared", False)])
def test_matches_a_loop_over_examples(name, per_layer):
    assert_clipped_like_a_loop(Case(LOSSES[name], PARAMS, (X,)), per_layer=per_layer)


@pytest.mark.parametrize("value", [jnp.nan, 1e30])
def test_leaves_out_examples_with_a_gradient_that_is_not_finite(value):
    gradient = jax.jit(fnet.clipped_grad(scanned, 0.1))
    expected, _ = gradient(PARAMS, X, mask=jnp.arange(B) != 2)
    total, info = gradient(PARAMS, X.at[2, 1].set(value))
    assert info.nonfinite == 1
    chex.assert_trees_all_close(total, expected, rtol=1e-5)
    nothing, _ = gradient(PARAMS, jnp.full_like(X, value))
    chex.assert_trees_all_equal(nothing, jax.tree.map(jnp.zeros_like, PARAMS))


def test_strategy():
    expected = {"in": "ghost norm", "up": "rematerialized", "down": "rematerialized"}
    assert gradient_strategies(scanned, PARAMS, X) == expected


def test_temporaries_are_those_of_the_plain_gradient():
    width, depth, length = 64, 12, 32
    params = {
        "in": jax.ShapeDtypeStruct((width, width), jnp.float32),
        "up": jax.ShapeDtypeStruct((depth, width, 4 * width), jnp.float32),
        "down": jax.ShapeDtypeStruct((depth, 4 * width, width), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((16, length, width), jnp.float32)

    def temporaries(f):
        return peak(jax.jit(f).lower(params, x).compile()).temporaries

    plain = temporaries(lambda p, x: jax.grad(lambda p: scanned(p, x).mean())(p))
    assert temporaries(fnet.clipped_grad(scanned, 1.0)) <= 1.3 * plain


def test_chunks_have_a_part_on_every_device_that_shares_the_batch(monkeypatch):
    monkeypatch.setattr(ghost_norm, "_MIN_BYTES", 0)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    chunks = []

    def count(x):
        chunks.append(ghost_norm.number_of_chunks(len(x), [x], x[0].nbytes * len(x)))
        return x

    x = jnp.ones((16, 3))
    count(x)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        count(x)
    # Inside of shard_map the batch of 4 is the device's own.
    rows = jax.sharding.PartitionSpec("data")
    jax.eval_shape(jax.shard_map(count, mesh=mesh, in_specs=rows, out_specs=rows), x)
    assert chunks == [16, 4, 4]


@jax.custom_vjp
def sign_backward(x):
    """Its backward rule is not linear: it forgets the scale of a cotangent."""
    return x


sign_backward.defvjp(lambda x: (x, None), lambda _, ct: (100 * jnp.sign(ct),))


def test_a_backward_rule_that_is_not_linear_stays_within_the_clip():
    def loss(p, x):
        @jax.checkpoint
        def layer(x, w):
            return sign_backward(jnp.tanh(x @ w))

        return row_losses(layer(x, p["in"]))

    p = {"in": PARAMS["in"]}
    assert gradient_strategies(loss, p, X) == {"in": "rematerialized"}
    assert_clipped_like_a_loop(Case(loss, p, (X,)), 0.1)
    assert gradient_strategies(one_layer, PARAMS, X)["in"] == "rematerialized"


@pytest.mark.parametrize("part", [lambda p: p[1:2], lambda p: jnp.split(p, 2)[1]])
def test_microbatches_add_the_gradient_of_a_slice_in_a_checkpoint(part):
    def loss(p, _, batch, __):
        inner = jax.checkpoint(lambda p, x: jnp.tanh(x[:, : len(part(p))] + part(p)[None]))
        return jnp.square(inner(p["e"], batch["x"])).sum((1, 2))

    def gradient(microbatches):
        mode = fnet.autodiff.clipped(1.0, microbatches=microbatches)
        args = {"e": jnp.ones((8, 4))}, None, {"x": example_losses.normal(0, 4, 4, 4)}
        return jax.jit(mode(loss))(*args, jax.random.key(0))[0]

    chex.assert_trees_all_close(gradient(2), gradient(1), rtol=1e-5)
