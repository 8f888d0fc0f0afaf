"""The denoising transformer: patches, conditions, contexts, and what it learns."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fnet import diffusion, layers, models
from fnet.models.denoiser import sinusoids

pytestmark = pytest.mark.slow

SHAPE, WIDTH, CLASSES = (4, 6, 2), 8, 3


@functools.cache
def _made(image_shape, width, heads, blocks, num_classes, **options):
    block = layers.Block(layers.attention(width, heads), layers.feed_forward(width, 16))
    model = models.denoiser(
        image_shape=image_shape,
        width=width,
        blocks=[block] * blocks,
        num_classes=num_classes,
        **options,
    )
    return model, *jax.jit(model.init)(jax.random.key(0))


def made(*, image_shape=SHAPE, width=WIDTH, heads=2, blocks=1, num_classes=CLASSES, **options):
    """A denoiser as it is at first, with a dict of its own."""
    made = _made(image_shape, width, heads, blocks, num_classes, **options)
    return made[0], *jax.tree.map(lambda a: a, made[1:])


def lively(*, context="lagged", blocks=2, **options):
    """A denoiser with every parameter and context away from 0, as after some training."""
    model, params, state = made(context=context, blocks=blocks, **options)
    draw = np.random.default_rng(7).normal
    moved = jax.tree.map(lambda a: a + np.float32(draw(0, 0.4, a.shape)), (params, state))
    return model, *moved


def applied(model, params, state, x, *, train=False, **conditions):
    """The denoiser's prediction and state, compiled."""
    return _compiled(model, train)(params, state, x, conditions)


@functools.cache
def _compiled(model, train):
    return jax.jit(lambda p, s, x, conditions: model.apply(p, s, x, **conditions, train=train))


def images(n=3, shape=SHAPE, seed=1):
    return jax.random.normal(jax.random.key(seed), (n, *shape))


def told(n=3):
    return {"time": 10 * jnp.arange(n), "label": jnp.arange(n) % CLASSES}


def patches_of(image, patch):
    """Each patch of an image [H, W, C], by the corner it begins at."""
    height, across, _ = image.shape
    return {
        (i, j): image[i : i + patch, j : j + patch]
        for i in range(0, height, patch)
        for j in range(0, across, patch)
    }


@pytest.mark.parametrize(("shape", "patch"), [(SHAPE, 1), (SHAPE, 2), ((8, 8, 1), 4)])
def test_it_gives_an_image_for_an_image_and_begins_with_zeros(shape, patch):
    model, params, state = made(image_shape=shape, patch=patch)
    assert params["places"].shape == (shape[0] * shape[1] // patch**2, WIDTH)
    y, _ = applied(model, params, state, images(shape=shape), **told(), train=True)
    chex.assert_trees_all_equal(y, jnp.zeros((3, *shape)))
    assert y.dtype == jnp.float32


@pytest.mark.parametrize(("shape", "patch"), [((4, 6, 3), 1), ((4, 6, 3), 2), ((8, 4, 1), 4)])
def test_every_pixel_ends_where_it_began(shape, patch):
    """With identities for its dense layers, a new denoiser is the layer norm of each patch."""
    numbers = patch * patch * shape[-1]
    model, params, state = made(image_shape=shape, patch=patch, width=numbers, heads=1)
    params["patches"]["kernel"] = params["output"]["kernel"] = jnp.eye(numbers)
    params["places"] = jnp.zeros_like(params["places"])
    x = images(shape=shape)
    y, _ = applied(model, params, state, x, **told())
    for image, out in zip(np.asarray(x), np.asarray(y), strict=True):
        for corner, given in patches_of(image, patch).items():
            expected = (given - given.mean()) / np.sqrt(given.var() + 1e-6)
            np.testing.assert_allclose(patches_of(out, patch)[corner], expected, atol=1e-5)


def test_a_new_block_tells_no_patch_of_another_and_a_trained_one_does():
    def reached(params):
        def last_pixel(x):
            y, _ = applied(model, params, state, x[None], **told(1))
            return y[0, -1, -1, 0]

        return jnp.abs(jax.grad(last_pixel)(images()[0])).max(-1) > 1e-9

    model, params, state = made(patch=2)
    params["output"]["kernel"] = jax.random.normal(jax.random.key(1), (WIDTH, 8))
    own = np.zeros(SHAPE[:2], bool)
    own[2:, 4:] = True
    np.testing.assert_array_equal(reached(params), own)
    _, trained, _ = lively(patch=2, context=None, blocks=1)
    assert reached(trained).all()


def test_patches_know_their_places():
    model, params, state = lively(patch=2)
    same = jnp.broadcast_to(images(shape=(2, 2, 2))[:1], (1, 2, 2, 2))
    y, _ = applied(model, params, state, jnp.tile(same, (1, 2, 3, 1)), **told(1))
    first, second = y[0, :2, :2], y[0, 2:, 4:]
    assert jnp.abs(first - second).max() > 1e-2


def test_time_label_and_no_label_each_make_a_difference_of_their_own():
    model, params, state = lively()
    x = jnp.broadcast_to(images(1), (5, *SHAPE))
    y, _ = applied(
        model,
        params,
        state,
        x,
        time=jnp.array([5, 5, 5, 6, 5]),
        label=jnp.array([0, 1, CLASSES, 0, 0]),
    )
    for other in y[1:4]:
        assert jnp.abs(other - y[0]).max() > 1e-3
    chex.assert_trees_all_close(y[4], y[0], atol=1e-5)


def test_without_classes_there_is_no_label():
    model, params, state = lively(num_classes=0)
    assert "label" not in params
    y, _ = applied(model, params, state, images(), time=jnp.arange(3))
    chex.assert_shape(y, (3, *SHAPE))
    assert jnp.abs(y).max() > 0.1


def test_no_image_depends_on_another():
    model, params, state = lively()
    y, _ = applied(model, params, state, images(), **told(), train=True)
    alone, _ = applied(model, params, state, images()[:1], **told(1), train=True)
    chex.assert_trees_all_close(alone, y[:1], atol=1e-5)


def test_the_state_that_is_trained_on_is_what_sampling_reads():
    model, params, state = lively()
    trained, renewed = applied(model, params, state, images(), **told(), train=True)
    sampled, kept = applied(model, params, state, images(), **told())
    chex.assert_trees_all_close(sampled, trained, atol=1e-6)
    chex.assert_trees_all_equal(kept, state)
    before, after = (s["blocks"]["1"]["context"] for s in (state, renewed))
    assert jnp.abs(after - before).max() > 1e-3
    afterwards, _ = applied(model, params, renewed, images(), **told())
    assert jnp.abs(afterwards - sampled).max() > 1e-4


def test_without_contexts_there_is_no_state():
    assert made()[2] == {}


def test_dropout_is_of_training_alone():
    model, params, state = lively(dropout=0.5, blocks=1)
    sampled, _ = applied(model, params, state, images(), **told())
    plain, _ = applied(lively(blocks=1)[0], params, state, images(), **told())
    chex.assert_trees_all_close(sampled, plain, atol=1e-5)
    trained, again = (
        applied(model, params, state, images(), **told(), key=jax.random.key(i), train=True)[0]
        for i in range(2)
    )
    assert jnp.abs(trained - again).max() > 1e-2


def test_it_computes_in_the_dtype_of_its_images():
    model, params, state = lively()
    y, renewed = applied(model, params, state, images().astype(jnp.bfloat16), **told(), train=True)
    assert y.dtype == jnp.bfloat16
    full, _ = applied(model, params, state, images(), **told(), train=True)
    assert jnp.abs(y - full).max() < 0.1 * jnp.abs(full).max()
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(renewed))


def test_sinusoids_are_of_frequencies_from_1_to_a_ten_thousandth():
    # Frequencies 10,000^(-i / 2) of i = 0, 1; the last of an odd width is 0.
    expected = [np.cos(3), np.cos(0.03), np.sin(3), np.sin(0.03)]
    chex.assert_trees_all_close(sinusoids(jnp.array([3]), 4)[0], np.array(expected), atol=1e-6)
    chex.assert_trees_all_close(sinusoids(jnp.array([3]), 5)[0, :4], np.array(expected), atol=1e-6)
    assert sinusoids(jnp.array([3]), 5)[0, 4] == 0


def test_it_learns_to_draw_the_image_that_a_label_asks_for():
    """Two images, one a label: after some steps, what is drawn is the one that was asked for."""
    model, params, state = made(
        image_shape=(2, 2, 1), width=16, blocks=1, num_classes=2, context="lagged"
    )
    examples = jnp.array([[1.0, -1, -1, 1], [-1, 1, 1, -1]]).reshape(2, 2, 2, 1)
    label = jnp.tile(jnp.arange(2), 16)
    schedule = diffusion.schedules.get("cosine", 50)
    optimizer = optax.adam(1e-2)

    def loss(params, state, key):
        each, state = diffusion.denoising_losses(
            lambda x, t: model.apply(params, state, x, time=t, label=label, train=True),
            examples[label],
            key,
            schedule,
            predicts="v",
            has_aux=True,
        )
        return each.mean(), state

    def step(carry, i):
        params, state, moments = carry
        key = jax.random.fold_in(jax.random.key(3), i)
        (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(params, state, key)
        change, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, change), state, moments), value

    @jax.jit
    def trained(params, state):
        carry = (params, state, optimizer.init(params))
        (params, state, _), losses = jax.lax.scan(step, carry, jnp.arange(200))
        return params, state, losses

    params, state, losses = trained(params, state)
    assert losses[-20:].mean() < 0.2 * losses[:5].mean()

    @jax.jit
    def drawn(params, state, noise):
        def denoise(x, t):
            return model.apply(params, state, x, time=t, label=label, train=False)[0]

        return diffusion.dpm_solver(denoise, schedule, noise, 10, predicts="v")

    error = drawn(params, state, images(32, (2, 2, 1), seed=9)) - examples[label]
    assert jnp.abs(error).mean() < 0.2
    assert jnp.abs(error).max() < 1


@pytest.mark.parametrize("patch", [0, 3])
def test_a_patch_that_does_not_divide_the_image_is_refused(patch):
    with pytest.raises(ValueError, match=rf"got patch={patch} and an image of 4 x 6"):
        made(patch=patch)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": jnp.zeros((3, 6, 4, 2))}, r"expected images \(4, 6, 2\), got \(6, 4, 2\)"),
        ({"x": jnp.zeros(SHAPE)}, r"expected images \(4, 6, 2\), got \(6, 2\)"),
        ({"label": None}, "made for 3 classes, got no label"),
        ({"label": jnp.zeros((3,))}, "must be integers, got float32"),
        ({"label": jnp.zeros((2,), jnp.int32)}, r"are 3 images, but label has shape \(2,\)"),
        ({"time": jnp.zeros(())}, r"are 3 images, but time has shape \(\)"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    model, params, state = made()
    arguments = {"x": images()} | told() | given
    with pytest.raises((ValueError, TypeError), match=message):
        applied(model, params, state, arguments.pop("x"), **arguments)


def test_a_label_given_in_vain_is_refused():
    model, params, state = made(num_classes=0)
    with pytest.raises(ValueError, match="made for 0 classes, got labels"):
        applied(model, params, state, images(), **told())


@pytest.mark.parametrize("heads", [3, 0])
def test_heads_that_do_not_divide_the_width_are_refused(heads):
    with pytest.raises(ValueError, match=rf"heads.*{heads}"):
        made(heads=heads)


def test_images_on_explicit_axes_stay_where_they_are():
    model, params, state = lively(patch=2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def on_devices(shape, dtype):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(params, x, label):
        y, _ = model.apply(params, state, x, time=jnp.ones_like(label), label=label, train=True)
        return jnp.square(y).sum()

    x, label = on_devices((4, *SHAPE), jnp.float32), on_devices((4,), jnp.int32)
    with jax.set_mesh(mesh):
        dx = jax.eval_shape(jax.grad(loss, 1), params, x, label)
    assert dx.sharding.spec[0] == "data"
