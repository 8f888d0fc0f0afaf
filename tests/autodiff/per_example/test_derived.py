"""Parameters that are combined, sliced or normalized before they meet data."""

import chex
import jax
import jax.numpy as jnp
import pytest
from example_losses import B, Case, assert_clipped_like_a_loop, normal, row_losses

import fnet
from fnet.autodiff import gradient_strategies
from fnet.backward_pass import finish_together

D = 6
X = normal(9, B, 5, D)


def matrices(*names):
    return {name: normal(i, D, D) for i, name in enumerate(names)}


def concatenated_cell(p, x):
    def cell(h, x):
        kernel = jnp.concatenate([p["a"], p["b"]], 1)
        i, f = jnp.split(x @ kernel + h @ jnp.concatenate([p["c"], p["d"]], 1), 2, 1)
        return jnp.tanh(i) * jax.nn.sigmoid(f), None

    return row_losses(jax.lax.scan(cell, x[:, 0], jnp.swapaxes(x, 0, 1))[0])


def loop_over_slices(p, x):
    def body(i, x):
        return jnp.tanh(x @ p[i] + x)

    return row_losses(jax.lax.fori_loop(1, 4, body, x))


def slices_by_a_float(p, x):
    def body(carry, _):
        i, x = carry
        return (i + 1.5, jnp.tanh(x @ p[i.astype(jnp.int32)])), None

    return row_losses(jax.lax.scan(body, (0.0, x), None, length=3)[0][1])


def normalized_in_scan(p, x):
    def layer(x, w):
        return jnp.tanh(x @ (w / jnp.linalg.norm(w))), None

    return row_losses(jax.lax.scan(layer, x, p)[0])


def normalized_in_checkpoint(p, x):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ (w / jnp.linalg.norm(w)))

    return row_losses(layer(layer(x, p["a"]), p["b"]))


def stacked(p, x):
    def layer(x, p):
        return jnp.tanh(x @ p["a"]), None

    stack = jax.tree.map(lambda a: jnp.stack([a, 0.7 * a]), p)
    return row_losses(jax.lax.scan(jax.checkpoint(layer), x, stack)[0])


def weight_norm(p, x):
    kernel = p["a"] / jnp.linalg.norm(p["a"], axis=0) * p["g"]
    return row_losses(jnp.tanh(x @ kernel) @ p["b"])


def straight_through(p, x):
    kernel = p["a"] + jax.lax.stop_gradient(jnp.round(p["a"] * 4) / 4 - p["a"])
    return row_losses(jnp.tanh(x @ kernel))


def low_rank_update(p, x):
    return row_losses(jnp.tanh(x @ (p["w"] + p["a"] @ p["b"])) @ p["w"])


STACK = normal(0, 5, D, D)
CASES = {
    "concatenated in a cell": (concatenated_cell, matrices("a", "b", "c", "d"), "ghost norm"),
    "stacked": (
        lambda p, x: row_losses(
            jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([p["a"], p["b"]]))[0]
        ),
        matrices("a", "b"), "ghost norm",
    ),
    "slices by a counter": (loop_over_slices, STACK, "ghost norm"),
    "slices by a float": (slices_by_a_float, STACK, "autodiff"),
    "normalized in a scan": (normalized_in_scan, STACK, "derived"),
    "normalized in jax.checkpoint": (normalized_in_checkpoint, matrices("a", "b"), "derived"),
    "stacked, one unused": (stacked, matrices("a", "unused"), "derived"),
    "weight norm": (
        weight_norm, matrices("a", "b") | {"g": normal(5, D)},
        {"a": "derived", "b": "ghost norm", "g": "derived"},
    ),
    "straight-through": (straight_through, matrices("a"), "ghost norm"),
    "low-rank update of a tied kernel": (
        low_rank_update, {"w": normal(0, D, D), "a": normal(1, D, 2), "b": normal(2, 2, D)},
        "ghost norm",
    ),
    "complex": (
        lambda p, x: jnp.abs((1j * x + 1) @ p["a"].astype(complex)).sum((1, 2)), matrices("a"),
        "derived",
    ),
    "finished together with data": (
        lambda p, x: row_losses(jnp.matmul(*finish_together(x, jnp.tanh(p["a"])))),
        matrices("a"), "derived",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["slices by a counter", "normalized in a scan", "weight norm", "complex"]
)
def test_matches_a_loop_over_examples(name):
    loss, params, _ = CASES[name]
    assert_clipped_like_a_loop(Case(loss, params, (X,)))


def test_strategies():
    for loss, params, strategy in CASES.values():
        same = isinstance(strategy, str)
        expected = jax.tree.map(lambda _, s=strategy: s, params) if same else strategy
        assert gradient_strategies(loss, params, X) == expected


def test_each_parameter_of_a_group_is_clipped_on_its_own():
    loss, params, _ = CASES["concatenated in a cell"]
    assert_clipped_like_a_loop(Case(loss, params, (X,)), 0.1, per_layer=True)


def test_loops_may_derive_values_from_several_stacks():
    def loss(p, x):
        def layer(x, p):
            return jnp.tanh(x @ (p["w"] / jnp.linalg.norm(p["v"]))), None

        return row_losses(jax.lax.scan(layer, x, p)[0])

    assert_clipped_like_a_loop(Case(loss, {"w": STACK, "v": STACK + 1}, (X,)))


def test_embedded_positions_in_chunks_of_examples():
    # The positions are derived from their table. They are added, so their gradient has no data.
    def loss(p, x):
        return row_losses(jnp.tanh(x + jax.vmap(lambda i: p["table"][i])(jnp.arange(200))))

    case = Case(loss, {"table": normal(0, 256, 128)}, (normal(1, B, 200, 128),))
    assert_clipped_like_a_loop(case)


@pytest.mark.parametrize(
    "derive",
    [
        lambda w: jnp.where(w + 256 > 256, w * w, 0.1 * w),
        lambda w: ((w + 256) - 256) ** 2,
        lambda w: jnp.copysign(jnp.sqrt(jnp.abs(w) + 1), w),
    ],
)
def test_values_in_bfloat16_are_differentiated_where_they_are(derive):
    def loss(w, x):
        return row_losses((x @ derive(w)).astype(jnp.float32))

    w, x = (normal(i, D, D).astype(jnp.bfloat16) for i in range(2))
    total, info = jax.jit(fnet.clipped_grad(loss, float("inf")))(w, x)
    one, expected = jax.jit(fnet.clipped_grad(loss, float("inf"), microbatch_size=1))(w, x)
    chex.assert_trees_all_close(info.norms, expected.norms, rtol=2**-6)
    chex.assert_trees_all_close(total, one, atol=2**-6 * float(jnp.abs(one).max()))


def test_a_scale_below_the_range_of_float32(float64):
    def loss(w, x):
        return ((1e60 * x) @ (w * 1e-60)).sum(-1)

    w, x = jnp.ones((2, 2)), jnp.array([[1.0, 2.0]])
    total, _ = fnet.clipped_grad(loss, float("inf"))(w, x)
    chex.assert_trees_all_close(total, jnp.array([[1.0, 1.0], [2.0, 2.0]]))
