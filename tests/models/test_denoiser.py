"""The diffusion transformer: patches, conditions and contexts."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fnet import layers, models

SHAPE, WIDTH, CLASSES = (4, 6, 2), 8, 3


@functools.cache
def _build(image_shape, width, heads, blocks, num_classes, **options):
    block = layers.Block(layers.attention(width, heads), layers.feed_forward(width, 16))
    model = models.denoiser(
        image_shape=image_shape,
        width=width,
        blocks=[block] * blocks,
        num_classes=num_classes,
        **options,
    )
    return model, *jax.jit(model.init)(jax.random.key(0))


def build(*, image_shape=SHAPE, width=WIDTH, heads=2, blocks=1, num_classes=CLASSES, **options):
    """A new denoiser; the returned dicts may be changed."""
    model, *variables = _build(image_shape, width, heads, blocks, num_classes, **options)
    return model, *jax.tree.map(lambda a: a, variables)


def build_randomized(*, context="lagged", blocks=2, **options):
    """A denoiser with random parameters and contexts, as after some training."""
    model, params, state = build(context=context, blocks=blocks, **options)
    draw = np.random.default_rng(7).normal
    randomized = jax.tree.map(lambda a: a + np.float32(draw(0, 0.4, a.shape)), (params, state))
    return model, *randomized


def run(model, params, state, x, *, train=False, **condition):
    """The denoiser's prediction and state, compiled."""
    return _compiled(model, train)(params, state, x, condition)


@functools.cache
def _compiled(model, train):
    return jax.jit(lambda p, s, x, condition: model.apply(p, s, x, **condition, train=train))


def images(n=3, shape=SHAPE, seed=1):
    return jax.random.normal(jax.random.key(seed), (n, *shape))


def conditions(n=3):
    return {"timestep": 10 * jnp.arange(n), "label": jnp.arange(n) % CLASSES}


def patches_of(image, patch):
    """The patches of an image [H, W, C], by their top left corner."""
    height, width, _ = image.shape
    return {
        (i, j): image[i : i + patch, j : j + patch]
        for i in range(0, height, patch)
        for j in range(0, width, patch)
    }


def test_patches_return_to_their_pixels():
    """With identities for its dense layers, a new denoiser is the layer norm of each patch."""
    shape, patch = (4, 6, 3), 2
    patch_size = patch * patch * shape[-1]
    model, params, state = build(image_shape=shape, patch=patch, width=patch_size, heads=1)
    params["patches"]["kernel"] = params["output"]["kernel"] = jnp.eye(patch_size)
    params["pos_embedding"] = jnp.zeros_like(params["pos_embedding"])
    x = images(shape=shape)
    y, _ = run(model, params, state, x, **conditions())
    for image, out in zip(np.asarray(x), np.asarray(y), strict=True):
        for corner, given in patches_of(image, patch).items():
            expected = (given - given.mean()) / np.sqrt(given.var() + 1e-6)
            np.testing.assert_allclose(patches_of(out, patch)[corner], expected, atol=1e-5)


def test_position_embedding_tells_equal_patches_apart():
    model, params, state = build_randomized(patch=2)
    same = jnp.broadcast_to(images(shape=(2, 2, 2))[:1], (1, 2, 2, 2))
    y, _ = run(model, params, state, jnp.tile(same, (1, 2, 3, 1)), **conditions(1))
    first, second = y[0, :2, :2], y[0, 2:, 4:]
    assert jnp.abs(first - second).max() > 1e-2


def test_prediction_depends_on_timestep_and_label():
    model, params, state = build_randomized()
    x = jnp.broadcast_to(images(1), (5, *SHAPE))
    y, _ = run(
        model,
        params,
        state,
        x,
        timestep=jnp.array([5, 5, 5, 6, 5]),
        label=jnp.array([0, 1, CLASSES, 0, 0]),
    )
    for other in y[1:4]:
        assert jnp.abs(other - y[0]).max() > 1e-3
    chex.assert_trees_all_close(y[4], y[0], atol=1e-5)


@pytest.mark.parametrize("patch", [0, 3])
def test_rejects_patch_that_does_not_divide_the_image(patch):
    with pytest.raises(ValueError, match=rf"got patch={patch} and an image of 4 x 6"):
        build(patch=patch)


def test_rejects_wrong_shapes_and_labels():
    for given, message in (
        ({"x": jnp.zeros((3, 6, 4, 2))}, r"images must have shape \(4, 6, 2\), got \(6, 4, 2\)"),
        ({"x": jnp.zeros(SHAPE)}, r"images must have shape \(4, 6, 2\), got \(6, 2\)"),
        ({"label": None}, "num_classes is 3, but got no label"),
        ({"label": jnp.zeros((3,))}, "must be integers, got float32"),
        (
            {"label": jnp.zeros((2,), jnp.int32)},
            r"label must have shape \(3,\) for one entry per image .* got \(2,\)",
        ),
        (
            {"timestep": jnp.zeros(())},
            r"timestep must have shape \(3,\) for one entry per image .* got \(\)",
        ),
    ):
        model, params, state = build()
        arguments = {"x": images()} | conditions() | given
        with pytest.raises((ValueError, TypeError), match=message):
            run(model, params, state, arguments.pop("x"), **arguments)


@pytest.mark.parametrize("heads", [3, 0])
def test_rejects_heads_that_do_not_divide_the_width(heads):
    with pytest.raises(ValueError, match=rf"heads.*{heads}"):
        build(heads=heads)


def test_gradient_has_the_explicit_sharding_of_the_images():
    model, params, state = build_randomized(patch=2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def on_devices(shape, dtype):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(params, x, label):
        y, _ = model.apply(params, state, x, timestep=jnp.ones_like(label), label=label, train=True)
        return jnp.square(y).sum()

    x, label = on_devices((4, *SHAPE), jnp.float32), on_devices((4,), jnp.int32)
    with jax.set_mesh(mesh):
        dx = jax.eval_shape(jax.grad(loss, 1), params, x, label)
    assert dx.sharding.spec[0] == "data"
