"""Errors: bounds out of range, losses that are not per example, layers that mix examples."""

import jax
import jax.numpy as jnp
import pytest
from example_losses import row_losses

import fnet
from fnet.autodiff.per_example.clipped import clipped_grad

INFINITY = float("inf")
X = jnp.array([1.0, 4.0, 7.0])


def halves(p, x):
    return (p - x) ** 2 / 2


def coupled(p, x):
    with jax.named_scope("norm"):
        h = x @ p
        h = h - h.mean(0, keepdims=True)
    return row_losses(h)


@jax.custom_vjp
def clip_cotangents(x):
    return x


clip_cotangents.defvjp(
    lambda x: (x, None), lambda _, ct: (ct / jnp.maximum(1, jnp.linalg.norm(ct)),)
)  # The norm is over the cotangents of all examples.


INVALID = {
    "nan": (lambda: clipped_grad(halves, float("nan")), "clip must be >= 0, got nan"),
    "negative": (lambda: clipped_grad(halves, -1.0), "clip must be >= 0, got -1.0"),
    "relation": (lambda: clipped_grad(halves, 1.0).sensitivity("ADD"), "one of .*'REPLACE_ONE'.*, got 'ADD'"),
    "infinite, automatic": (lambda: clipped_grad(halves, INFINITY, automatic=0.01), "must be finite with automatic, got inf"),
    "tree without per_layer": (lambda: clipped_grad(halves, {"a": 1.0}), "per_layer=True"),
    "width": (
        lambda: clipped_grad(halves, 1.0, width=0)(jnp.float32(1), X), "width must be at least 1, got 0"
    ),
    "mean of the losses": (
        lambda: clipped_grad(lambda p, x: halves(p, x).mean(), 1.0)(jnp.float32(1), X),
        r"got \(\); return the losses, not their mean",
    ),
    "aux without has_aux": (
        lambda: clipped_grad(lambda p, x: (halves(p, x), x), 1.0)(jnp.float32(1), X),
        "got tuple; return the losses alone, or set has_aux=True",
    ),
    "empty tree": (
        lambda: clipped_grad(halves, None, per_layer=True)(jnp.float32(1), X),
        "must be a number or a tree that is a prefix of params",
    ),
    "different batch sizes": (
        lambda: clipped_grad(lambda p, x, y: p * x, 1.0)(jnp.float32(1), X, X[:2]),
        r"argument 1: \(3,\), argument 2: \(2,\)",
    ),
    "wrong number of keys": (
        lambda: clipped_grad(lambda p, x, k: p * x, 1.0)(
            jnp.float32(1), X, jax.random.split(jax.random.key(0), 2)
        ),
        r"argument 1: \(3,\), argument 2: \(2,\)",
    ),
    "raw key": (
        lambda: clipped_grad(lambda p, x, k: p * x, 1.0)(jnp.float32(1), X, jax.random.PRNGKey(0)),
        r"argument 2: \(2,\); use jax.random.key\(seed\) instead of a raw uint32 key",
    ),
    "data in a closure": (
        lambda: clipped_grad(lambda p, x: (p * x).sum(-1) * X, 1.0)(
            jnp.float32(1), jnp.ones((3, 2))
        ),
        r"depends on its position in the batch, in the loss \(mul at .*one row per example",
    ),
    "shape of the mask": (
        lambda: clipped_grad(halves, 1.0)(jnp.float32(1), X, mask=X[:2]), r"shape \[3\], got \(2,\)"
    ),
    "mixed": (
        lambda: clipped_grad(coupled, 1.0)(jnp.ones((2, 2)), jnp.ones((4, 2))),
        "norm mixes the examples.*reduce_sum.*group norm",
    ),
    "mixed by a custom_vjp": (
        lambda: clipped_grad(lambda p, x: row_losses(clip_cotangents(x @ p)), 1.0)(
            jnp.ones((2, 2)), jnp.ones((4, 2))
        ),
        "the loss mixes the examples.*reduce_sum, in the derivative rule",
    ),
}  # fmt: skip


def test_rejects_invalid_arguments():
    for call, message in INVALID.values():
        with pytest.raises(ValueError, match=message):
            call()


def test_rejects_losses_and_parameters_without_a_gradient():
    for dtype in ("int32", "complex64"):
        for function in (lambda f: clipped_grad(f, 1.0), fnet.per_example_grad):
            with pytest.raises(TypeError, match=f"losses that are real and floating, got {dtype}"):
                function(lambda p, x, t=dtype: halves(p, x).astype(t))(jnp.float32(1), X)
    with pytest.raises(TypeError, match=r"expects a loss that returns \(losses, aux\), got "):
        clipped_grad(halves, 1.0, has_aux=True)(jnp.float32(1), X)
    with pytest.raises(TypeError, match=r"got int32 at \['n'\]"):
        clipped_grad(lambda p, x: p["n"] * x, 1.0)({"n": jnp.int32(1)}, X)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_refuses_what_is_unknown_with_and_without_jit(transform):
    def doubled(p, x):
        x = jnp.concatenate([x, jnp.sin(x)])[: len(x)]  # The batch is a part of a longer axis.
        return halves(p, x)

    with pytest.raises(ValueError, match=r"not known whether concatenate at .*jax\.lax\.map"):
        transform(clipped_grad(doubled, 1.0))(jnp.float32(1), X)

    def one_by_one(p, x):
        return jax.lax.map(lambda row: doubled(p, row[None])[0], x)

    total, _ = transform(clipped_grad(one_by_one, INFINITY))(jnp.float32(1), X)
    expected = jax.grad(lambda p: halves(p, X).sum())(jnp.float32(1))
    assert float(total) == pytest.approx(float(expected))
