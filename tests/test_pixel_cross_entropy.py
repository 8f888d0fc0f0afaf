"""Cross-entropy of pixels against interpolated logits and optax's loss; and what it takes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fnet.losses.segmentation import pixel_cross_entropy, pixel_predictions
from fnet.memory import compile_min_memory, peak

S = jax.ShapeDtypeStruct
CLASSES = 5


def arrays(images=3, grid=(4, 6), size=(13, 20), seed=0, dtype=np.float32):
    """Logits of a grid, and labels of pixels, some of which are not counted."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(images, *grid, CLASSES)).astype(dtype)
    labels = generator.integers(-1, CLASSES + 1, (images, *size))
    return jnp.asarray(logits), jnp.asarray(np.where(labels == CLASSES, 255, labels))


def interpolated(logits, size):
    shape = (logits.shape[0], *size, logits.shape[-1])
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.image.resize(wide, shape, "bilinear", antialias=False)


def from_whole_logits(logits, labels, smoothing=0.0):
    counted = (labels >= 0) & (labels < logits.shape[-1])
    z = interpolated(logits, labels.shape[1:])
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=z.dtype)
    each = optax.softmax_cross_entropy(z, optax.smooth_labels(hot, smoothing))
    n = jnp.maximum(counted.sum((1, 2)), 1)
    losses = jnp.where(counted, each, 0).sum((1, 2)) / n
    return losses, (counted & (z.argmax(-1) == labels)).sum((1, 2)) / n


def with_gradient(f):
    """Losses, accuracies and the gradient of weighted losses."""

    @jax.jit
    def both(logits, labels):
        def total(logits):
            losses, accuracy = f(logits, labels)
            return (losses * jnp.arange(1, len(losses) + 1)).sum(), (losses, accuracy)

        (_, found), gradient = jax.value_and_grad(total, has_aux=True)(logits)
        return found, gradient

    return both


GRIDS = {
    "of an eighth": ((4, 6), (32, 48)),
    "of another shape": ((4, 6), (13, 20)),
    "as large as the image": ((7, 5), (7, 5)),
    "as wide as the image": ((4, 5), (7, 5)),
    "larger than the image": ((9, 8), (7, 5)),
    "of one position": ((1, 1), (7, 5)),
}


@pytest.mark.parametrize(
    ("grid", "size"),
    [
        pytest.param(*sizes, id=name, marks=[pytest.mark.slow] * name.startswith("as "))
        for name, sizes in GRIDS.items()
    ],
)
def test_losses_accuracy_and_gradients_are_those_of_whole_logits(grid, size):
    logits, labels = arrays(grid=grid, size=size)
    options = {"smoothing": 0.1}
    got = with_gradient(functools.partial(pixel_cross_entropy, rows=3, **options))
    want = with_gradient(functools.partial(from_whole_logits, **options))
    (losses, gradient), (wanted, wanted_gradient) = got(logits, labels), want(logits, labels)
    chex.assert_trees_all_close((*losses,), (*wanted,), rtol=1e-5)
    chex.assert_trees_all_close(gradient, wanted_gradient, atol=1e-6)


def test_losses_without_a_gradient_are_those_with_one():
    logits, labels = arrays()
    got = pixel_cross_entropy(logits, labels)
    want, _ = with_gradient(pixel_cross_entropy)(logits, labels)
    chex.assert_trees_all_close((*got,), (*want,), rtol=1e-6)
    chex.assert_trees_all_close(got, pixel_cross_entropy(logits, labels, rows=1), rtol=1e-6)


def test_an_image_without_a_counted_pixel_has_no_loss_and_no_gradient():
    logits, labels = arrays()
    logits = logits.at[1].set(jnp.inf)  # whatever its logits are
    (losses, accuracy), gradient = with_gradient(pixel_cross_entropy)(logits, labels.at[1].set(255))
    assert losses[1] == accuracy[1] == 0
    assert losses[0] > 0
    chex.assert_trees_all_equal(gradient[1], jnp.zeros_like(gradient[1]))
    assert jnp.isfinite(gradient).all()


def test_labels_may_be_bytes_and_logits_16_bits():
    logits, labels = arrays(dtype=jnp.bfloat16)
    got, gradient = with_gradient(pixel_cross_entropy)(logits, labels.astype(jnp.uint8))
    chex.assert_type([*got, gradient], [jnp.float32, jnp.float32, jnp.bfloat16])
    labels = jnp.where(labels < 0, 255, labels)
    want, _ = with_gradient(from_whole_logits)(logits.astype(jnp.float32), labels)
    chex.assert_trees_all_close((*got,), (*want,), rtol=1e-5)


def test_a_float16_gradient_keeps_what_a_loss_scale_is_to_save():
    # 1/2^8 of a probability of 6e-6 is below float16's smallest number, 2^15 times that is not.
    labels = jnp.asarray(np.random.default_rng(0).integers(CLASSES, size=(1, 16, 16)))
    logits = 12 * jax.nn.one_hot(labels, CLASSES)

    def gradient(logits):
        f = lambda z: (2.0**15 * pixel_cross_entropy(z, labels).losses).sum()  # noqa: E731
        return jax.jit(jax.grad(f))(logits)

    got = gradient(logits.astype(jnp.float16))
    chex.assert_type(got, jnp.float16)
    chex.assert_trees_all_close(got.astype(jnp.float32), gradient(logits), rtol=2e-3)


def test_bytes_may_be_labels_of_as_many_classes_as_they_have_values():
    generator = np.random.default_rng(0)
    logits = jnp.asarray(generator.normal(size=(2, 2, 3, 256)), jnp.float32)
    labels = jnp.asarray(generator.integers(256, size=(2, 5, 7)))
    got = with_gradient(pixel_cross_entropy)(logits, labels.astype(jnp.uint8))
    chex.assert_trees_all_close(got, with_gradient(pixel_cross_entropy)(logits, labels))
    predictions = [pixel_predictions([logits], (5, 7), a) for a in (labels.astype("uint8"), labels)]
    chex.assert_trees_all_close(*predictions)


@pytest.mark.usefixtures("float64")
def test_a_label_beyond_32_bits_is_not_counted():
    logits, labels = arrays()
    beyond = jnp.where(labels == 255, 2**32 + 3, labels.astype(jnp.int64))
    got = with_gradient(pixel_cross_entropy)(logits, beyond)
    chex.assert_trees_all_equal(got, with_gradient(pixel_cross_entropy)(logits, labels))


@pytest.mark.usefixtures("float64")
def test_a_gradient_may_be_differentiated_forward_and_the_loss_itself_not():
    logits, labels = arrays(dtype=np.float64)
    vector = arrays(dtype=np.float64, seed=1)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def hessian_times(f, vector):
        gradient = jax.grad(lambda z: f(z, labels)[0].sum())
        return jax.jvp(gradient, (logits,), (vector,))[1]

    got, want = (hessian_times(f, vector) for f in (pixel_cross_entropy, from_whole_logits))
    chex.assert_trees_all_close(got, want, rtol=1e-9, atol=1e-12)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda z: pixel_cross_entropy(z, labels)[0], (logits,), (logits,))


def test_each_example_alone_by_vmap_has_the_same_gradient():
    logits, labels = arrays()

    def alone(logits, labels):
        return pixel_cross_entropy(logits[None], labels[None])[0][0]

    got = jax.jit(jax.vmap(jax.grad(alone)))(logits, labels)
    want = jax.jit(jax.grad(lambda z: pixel_cross_entropy(z, labels)[0].sum()))(logits)
    chex.assert_trees_all_close(got, want, atol=1e-7)


def test_images_shared_among_devices_have_the_same_losses_and_gradient():
    logits, labels = arrays(images=4)
    f = with_gradient(functools.partial(pixel_cross_entropy, rows=3))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    # On each device the images are its own, and so is their weight in the sum.
    mapped = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    )
    (losses, gradient), (want, wanted) = mapped(logits, labels), f(logits, labels)
    chex.assert_trees_all_close((*losses,), (*want,), rtol=1e-6)
    by = jnp.arange(1.0, 5)[:, None, None, None]
    chex.assert_trees_all_close(gradient * by, wanted, rtol=1e-5, atol=1e-7)

    views = (P("data"), P("data"))
    predict = functools.partial(pixel_predictions, size=labels.shape[1:], rows=3)
    predicted = jax.jit(
        jax.shard_map(lambda z, y: predict([z], labels=y), mesh=mesh, in_specs=views, out_specs=P("data"))
    )  # fmt: skip
    chex.assert_trees_all_close(predicted(logits, labels), predict([logits], labels=labels))
    of_one = jax.jit(
        jax.shard_map(lambda y: predict([logits[:1]], labels=y), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    )  # fmt: skip
    same = jnp.broadcast_to(logits[:1], logits.shape)
    chex.assert_trees_all_close(of_one(labels), predict([same], labels=labels))


@pytest.mark.parametrize("rows", [None, 3])
def test_predictions_are_the_likeliest_by_the_mean_probability_of_all_views(rows):
    size = (13, 20)
    views = [arrays(grid=grid, seed=i)[0] for i, grid in enumerate([(4, 6), (13, 20), (15, 9)])]
    labels = arrays(size=size)[1]
    got = pixel_predictions(views, size, labels, rows=rows)
    mean = sum(np.asarray(jax.nn.softmax(interpolated(v, size))) for v in views) / 3
    chex.assert_type(got.labels, jnp.uint8)
    chex.assert_trees_all_equal(np.asarray(got.labels), mean.argmax(-1).astype(np.uint8))
    counted = (labels >= 0) & (labels < CLASSES)
    picked = np.take_along_axis(mean, np.where(counted, labels, 0)[..., None], -1)[..., 0]
    losses = np.where(counted, -np.log(picked), 0).sum((1, 2)) / counted.sum((1, 2))
    chex.assert_trees_all_close(got.losses, losses, rtol=1e-5)


def test_one_view_has_the_losses_of_training_and_needs_no_labels():
    logits, labels = arrays()
    got = pixel_predictions([logits], labels.shape[1:], labels)
    want = pixel_cross_entropy(logits, labels)
    chex.assert_trees_all_close(got.losses, want.losses, rtol=1e-6)
    counted = (labels >= 0) & (labels < CLASSES)
    right = ((got.labels == labels) & counted).sum((1, 2)) / counted.sum((1, 2))
    chex.assert_trees_all_close(right, want.accuracy)
    alone = pixel_predictions([logits], labels.shape[1:])
    assert alone.losses is None
    chex.assert_trees_all_equal(alone.labels, got.labels)


@pytest.mark.usefixtures("float64")
def test_views_may_be_float32_where_float64_is_on():
    logits, labels = arrays()
    got = pixel_predictions([logits, logits], labels.shape[1:], labels, rows=5)
    chex.assert_type([logits, got.losses], jnp.float32)
    chex.assert_trees_all_close(got.losses, pixel_cross_entropy(logits, labels).losses, rtol=1e-6)


def test_of_many_classes_predictions_are_wider_than_bytes():
    logits = jnp.zeros((1, 2, 2, 300)).at[..., 290].set(1)
    assert (pixel_predictions([logits], (4, 4)).labels == 290).all()


IMAGES, SIZE, MANY = 2, 256, 40
WHOLE = 4 * IMAGES * SIZE * SIZE * MANY
SHAPES = (S((IMAGES, 32, 32, MANY), jnp.float32), S((IMAGES, SIZE, SIZE), jnp.uint8))


def temporaries(f, *shapes):
    """With the compiler options that need the least."""
    return peak(compile_min_memory(jax.jit(f).lower(*shapes))[0]).temporaries


def test_logits_of_all_pixels_never_exist():
    def value_and_gradient(f):
        return jax.value_and_grad(lambda z, y: f(z, y)[0].mean())

    chunked = functools.partial(pixel_cross_entropy, rows=8)
    assert temporaries(value_and_gradient(from_whole_logits), *SHAPES) >= 2 * WHOLE
    assert temporaries(value_and_gradient(chunked), *SHAPES) <= 0.15 * WHOLE
    assert temporaries(chunked, *SHAPES) <= 0.12 * WHOLE

    def predicted(z, bigger, y):
        return pixel_predictions([z, bigger], (SIZE, SIZE), y, rows=8)

    logits, labels = SHAPES
    other = S((IMAGES, 48, 48, MANY), jnp.float32)
    assert temporaries(predicted, logits, other, labels) <= 0.2 * WHOLE


MISTAKES = [
    ({"labels": jnp.zeros((3, 8, 8))}, TypeError, "labels must be integers, got float32"),
    ({"logits": jnp.zeros((3, 2, 2, 4), int)}, TypeError, "logits must be floating, got int32"),
    ({"logits": jnp.zeros((3, 2, 4))}, ValueError, r"\[N, h, w, k\], not empty, got \(3, 2, 4\)"),
    ({"logits": jnp.zeros((2, 2, 2, 4))}, ValueError, r"must be \(2, 8, 8\) .* got \(3, 8, 8\)"),
    ({"labels": jnp.zeros((3, 8), int)}, ValueError, r"got \(3, 8\)"),
    ({"rows": 0}, ValueError, "rows must be >= 1, or None for as many as fit, got 0"),
    ({"smoothing": 1.0}, ValueError, r"smoothing must be in \[0, 1\), got 1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "message"), MISTAKES)
def test_what_does_not_fit_is_refused(wrong, kind, message):
    right = {"logits": jnp.zeros((3, 2, 2, 4)), "labels": jnp.zeros((3, 8, 8), int)}
    with pytest.raises(kind, match=message):
        pixel_cross_entropy(**right | wrong)
    if "smoothing" not in wrong:
        given = right | wrong
        with pytest.raises(kind, match=message):
            pixel_predictions([given["logits"]], (8, 8), given["labels"], rows=wrong.get("rows"))


def test_views_must_be_of_the_same_classes_and_there_must_be_one():
    with pytest.raises(ValueError, match="at least one array of logits, got none"):
        pixel_predictions([], (8, 8))
    with pytest.raises(ValueError, match="as many classes each, got 4 and 5"):
        pixel_predictions([jnp.zeros((3, 2, 2, 4)), jnp.zeros((3, 2, 2, 5))], (8, 8))
