"""Per-example losses by name, for tests of per-example gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fnet
from fnet import layers


class Case(NamedTuple):
    """A loss, its parameters and a batch, of six examples in `CASES`."""

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]


B = 6


def normal(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape) / max(shape[-1], 1) ** 0.5
    return jnp.asarray(values.astype(np.float32))


def tokens(seed: int, vocabulary: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocabulary, shape, np.int32))


def tree(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def row_losses(y: jax.Array) -> jax.Array:
    """One nonlinear loss per row."""
    return (jnp.sin(y) * y).sum(range(1, y.ndim))


def two_layers(p: Any, x: jax.Array) -> jax.Array:
    return row_losses(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])


def dense() -> Case:
    return Case(two_layers, tree(w=(5, 7), b=(7,), v=(7, 3)), (normal(9, B, 5),))


def dense_over_sequence() -> Case:
    return Case(two_layers, tree(w=(5, 7), b=(7,), v=(7, 3)), (normal(9, B, 4, 5),))


def long_sequences() -> Case:
    def loss(p, x):
        return row_losses(jnp.tanh(x @ p["w"]) @ p["v"])

    return Case(loss, tree(w=(2, 3), v=(3, 2)), (normal(9, B, 40, 2),))


def tied_embedding() -> Case:
    def loss(p, t):
        x = jnp.tanh(p["embedding"][t] + p["position"] @ p["mix"])
        logits = x @ p["embedding"].T
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, t).mean(-1)

    return Case(loss, tree(embedding=(11, 4), position=(5, 4), mix=(4, 4)), (tokens(1, 11, B, 5),))


def recurrent() -> Case:
    def loss(p, x):
        def step(h, x):
            h = jnp.tanh(h @ p["w"] + x @ p["u"] + p["b"])
            return h, h @ p["out"]

        return row_losses(jax.lax.scan(step, jnp.zeros((len(x), 4)), jnp.swapaxes(x, 0, 1))[1][-1])

    params = tree(w=(4, 4), u=(3, 4), b=(4,), out=(4, 2))
    return Case(loss, params, (normal(9, B, 7, 3),))


def unrolled_recurrent() -> Case:
    def loss(p, x):
        h = x[:, 0]
        for i in range(4):
            h = jnp.tanh(h @ p["w"] + x[:, i])
        return row_losses(h)

    return Case(loss, tree(w=(4, 4)), (normal(9, B, 4, 4),))


def stacked_layers() -> Case:
    def loss(p, x):
        def layer(h, p):
            return h + jnp.tanh(h @ p["w"] + p["b"]) @ p["v"].T, None

        return row_losses(jax.lax.scan(layer, x, p)[0])

    return Case(loss, tree(w=(3, 4, 6), b=(3, 6), v=(3, 4, 6)), (normal(9, B, 5, 4),))


def nested_scans() -> Case:
    def loss(p, x):
        def inner(h, w):
            return jnp.tanh(h @ w + h @ p["shared"]), None

        def outer(h, w):
            return jax.lax.scan(inner, h, w)[0], None

        return row_losses(jax.lax.scan(outer, x, p["w"])[0])

    return Case(loss, tree(w=(2, 3, 4, 4), shared=(4, 4)), (normal(9, B, 4),))


def checkpointed() -> Case:
    @jax.checkpoint
    def block(p, x):
        return jnp.tanh(x @ p["w"]) @ p["v"]

    def loss(p, x):
        return row_losses(jax.jit(block)(p, block(p, x)))

    return Case(loss, tree(w=(4, 6), v=(6, 4)), (normal(9, B, 3, 4),))


def views() -> Case:
    def loss(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        parts = x @ p["qkv"][:, :4] + x @ p["cube"].reshape(4, 4).T
        low = (x.astype(jnp.bfloat16) @ p["low"].astype(jnp.bfloat16)).astype(jnp.float32)
        return row_losses(q * k + v + parts + low)

    return Case(loss, tree(qkv=(4, 12), cube=(2, 2, 4), low=(4, 4)), (normal(9, B, 3, 4),))


def attention_heads() -> Case:
    def loss(p, x):
        q = jnp.einsum("btd,dhk->bthk", x, p["q"]) + p["b"]
        a = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, q), -1)
        mixed = jnp.einsum("bhts,bshk,hkl->bthl", a, q, p["mix"])
        return row_losses(jnp.einsum("bthk,hkd->btd", mixed, p["o"]))

    params = tree(q=(4, 2, 3), b=(2, 3), mix=(2, 3, 3), o=(2, 3, 4))
    return Case(loss, params, (normal(9, B, 5, 4),))


def convolutions() -> Case:
    def conv(x, w, stride=1, **options):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            options.pop("padding", "SAME"),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            **options,
        )

    def loss(p, x):
        x = jnp.tanh(conv(x, p["stem"], 2))
        x = jnp.tanh(conv(x, p["wide"], rhs_dilation=(2, 2)) + p["b"])
        x = jnp.tanh(conv(x, p["groups"], feature_group_count=2))
        x = jnp.tanh(conv(x, p["depth"], feature_group_count=6))
        return row_losses(conv(x, p["up"], padding=[(1, 2), (2, 0)], lhs_dilation=(2, 2)))

    params = tree(
        stem=(3, 3, 2, 4), wide=(3, 2, 4, 4), b=(4,), groups=(3, 3, 2, 6), depth=(2, 2, 1, 6),
        up=(3, 3, 6, 2),
    )  # fmt: skip
    return Case(loss, params, (normal(9, B, 9, 8, 2),))


def convolution_layouts() -> Case:
    def loss(p, x):
        y = jax.lax.conv(x, p["w"], (1, 1), "VALID")
        z = jax.lax.conv(x[:, :, 1:], p["w"], (2, 1), "SAME")
        as_kernels = jax.lax.conv(p["image"][None], x[:, :, :2, :2], (1, 1), "VALID")[0]
        return row_losses(jnp.tanh(y)) + row_losses(z) + row_losses(as_kernels)

    return Case(loss, tree(w=(3, 2, 2, 3), image=(2, 4, 4)), (normal(9, B, 2, 6, 5),))


def causal_convolution() -> Case:
    def loss(p, x):
        y = jax.lax.conv_general_dilated(
            x, p["w"], (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")
        )
        return row_losses(y)

    return Case(loss, tree(w=(3, 4, 5)), (normal(9, B, 7, 4),))


def custom_derivatives() -> Case:
    @jax.custom_jvp
    def twice(w):
        return 2 * w

    twice.defjvp(lambda p, t: (2 * p[0], 3 * t[0]))

    @jax.custom_vjp
    def gain(x, w):
        return x * w

    gain.defvjp(
        lambda x, w: (x * w, (x, w)), lambda r, ct: (ct * r[1], 5 * (ct * r[0]).sum((0, 1)))
    )

    def loss(p, x):
        return row_losses(gain(jnp.tanh(x @ twice(p["w"])), p["g"]))

    return Case(loss, tree(w=(4, 4), g=(4,)), (normal(9, B, 3, 4),))


def layer_norm_in_scan() -> Case:
    """A custom_vjp of two parameters in a scan, on rows merged over examples and sequence."""

    def loss(p, x):
        def layer(h, v):
            rows = fnet.layer_norm(h.reshape(-1, 4), p["scale"], v["bias"])
            return jnp.tanh(rows @ v["w"]).reshape(h.shape), None

        return row_losses(jax.lax.scan(layer, x, {"w": p["w"], "bias": p["bias"]})[0])

    return Case(loss, tree(scale=(4,), w=(3, 4, 4), bias=(3, 4)), (normal(9, B, 5, 4),))


def nonlinear_uses() -> Case:
    def loss(p, x):
        norm = p["w"] / jnp.linalg.norm(p["w"], axis=0)
        y = jnp.tanh(x @ norm * p["number"]) ** 2 + jnp.exp(p["log"])
        return row_losses(y) + p["number"] + (p["w"] ** 2).sum()

    params = tree(w=(4, 3), log=(3,)) | {"number": jnp.float32(0.7), "unused": jnp.ones((2, 2))}
    return Case(loss, params, (normal(9, B, 5, 4),))


def broadcast_over_batch() -> Case:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p["kernel"] + jnp.broadcast_to(p["bias"], (len(x), 5)))
        h = h * jnp.broadcast_to(p["scale"], h.shape)
        return row_losses(h[:, None] + jnp.broadcast_to(p["shift"], (len(x), 3, 5)))

    return Case(loss, tree(kernel=(4, 5), bias=(5,), scale=(5,), shift=(5,)), (normal(9, B, 4),))


def scaled_parameters() -> Case:
    def loss(p, x):
        return row_losses(jnp.tanh(x @ (p["w"] * 0.5)) @ (1 - 2 * p["v"] / 3))

    return Case(loss, tree(w=(5, 7), v=(7, 3)), (normal(9, B, 5),))


def loss_without_data() -> Case:
    def loss(p, x):
        return row_losses(x) * 0 + (p["w"] ** 2).sum()

    return Case(loss, tree(w=(3, 2)), (normal(9, B, 4),))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(12)(nn.RMSNorm()(x))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, t):
        embed = nn.Embed(11, 6)
        x = embed(t) + self.param("position", nn.initializers.normal(), (5, 6))
        x = Block()(x)
        return embed.attend(nn.LayerNorm()(x))


def flax_transformer() -> Case:
    model, t = Transformer(), tokens(1, 11, B, 5)
    params = jax.jit(model.init)(jax.random.key(0), t)

    def loss(p, t):
        logits = model.apply(p, t)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, t).mean(-1)

    return Case(loss, params, (t,))


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(2)(nn.Conv(4, (3, 3), 2)(x)))
        x = nn.max_pool(nn.relu(nn.Conv(6, (3, 3), feature_group_count=2)(x)), (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(len(x), -1))


def flax_cnn() -> Case:
    model, x = Cnn(), normal(1, B, 8, 8, 2)
    params = jax.jit(model.init)(jax.random.key(0), x)
    return Case(lambda p, x: row_losses(model.apply(p, x)), params, (x,))


def fnet_layers(model: fnet.Layer, x: jax.Array, *, train: bool = True) -> Case:
    params, state = jax.jit(model.init)(jax.random.key(0))
    return Case(lambda p, x: row_losses(model.apply(p, state, x, train=train)[0]), params, (x,))


def fnet_transformer() -> Case:
    return fnet_layers(layers.transformer(8, heads=2, blocks=1, causal=True), normal(1, B, 5, 8))


def fnet_mlp() -> Case:
    return fnet_layers(layers.mlp([4, 8, 3]), normal(1, B, 4))


def frozen_abn() -> Case:
    model = fnet.serial(conv=layers.conv(2, 4), abn=layers.abn(4), pool=layers.global_avg_pool())
    return fnet_layers(model, normal(1, B, 5, 5, 2), train=False)


def dropout() -> Case:
    def loss(p, x, key):
        x = jnp.tanh(x @ p["w"])
        return row_losses(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ p["v"])

    return Case(loss, tree(w=(4, 8), v=(8, 2)), (normal(9, B, 4), jax.random.key(3)))


CASES = {
    case.__name__: case
    for case in (
        dense, dense_over_sequence, long_sequences, tied_embedding, recurrent,
        unrolled_recurrent, stacked_layers, nested_scans, checkpointed, views, attention_heads,
        convolutions, causal_convolution, convolution_layouts, custom_derivatives, layer_norm_in_scan,
        nonlinear_uses, broadcast_over_batch, scaled_parameters, loss_without_data,
        flax_transformer, flax_cnn, fnet_transformer, fnet_mlp, frozen_abn, dropout,
    )
}  # fmt: skip


def norms_of(grads: Any) -> np.ndarray:
    """Norms [batch] of per-example gradients."""
    rows = [np.abs(a).reshape(len(a), -1) for a in jax.tree.leaves(grads)]
    return np.sqrt(sum(np.square(a).sum(1) for a in rows))


def loop_over_examples(case: Case) -> Any:
    """Per-example gradients from a loop over batches of one, in NumPy."""

    def gradient(i: jax.Array) -> Any:
        example = [
            jax.random.fold_in(a, i)
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
            else jax.lax.dynamic_slice_in_dim(a, i, 1)
            for a in case.batch
        ]
        return jax.grad(lambda p: case.loss(p, *example)[0])(case.params)

    rows = jnp.arange(len(case.batch[0]))
    return jax.device_get(jax.jit(lambda: jax.lax.map(gradient, rows))())


def assert_clipped_like_a_loop(
    case: Case, clip: Any = None, *, tolerance: float = 2e-5, **options: Any
) -> None:
    """Compare clipped sums and norms with per-example gradients that a loop clips.

    Args:
      clip: The bound, or with ``per_layer=True`` a tree of bounds. By default the median of the
        norms, so that half of the examples are clipped.
      tolerance: Largest error, relative to the largest element of the sum.
      options: Those of `fnet.clipped_grad`.
    """
    per_example = loop_over_examples(case)
    norms = norms_of(per_example)
    bound = float(np.median(norms)) if clip is None else clip
    if not options.get("per_layer"):
        bounds, by_leaf = jax.tree.map(lambda _: bound, per_example), lambda _: norms
    elif isinstance(bound, dict):
        bounds, by_leaf = bound, norms_of
    else:
        share = bound / len(jax.tree.leaves(per_example)) ** 0.5
        bounds, by_leaf = jax.tree.map(lambda _: share, per_example), norms_of

    def clipped(g: np.ndarray, bound: float) -> np.ndarray:
        return np.tensordot(np.minimum(1, bound / by_leaf(g)), g, 1)

    with np.errstate(divide="ignore"):
        expected = jax.tree.map(clipped, per_example, bounds)
    total, info = jax.jit(fnet.clipped_grad(case.loss, bound, **options))(case.params, *case.batch)
    chex.assert_trees_all_close(info.norms, norms, rtol=tolerance)
    size = max(float(np.abs(a).max()) for a in jax.tree.leaves(expected))
    chex.assert_trees_all_close(total, expected, rtol=tolerance, atol=tolerance * size)
    chex.assert_trees_all_equal_dtypes(total, case.params)
