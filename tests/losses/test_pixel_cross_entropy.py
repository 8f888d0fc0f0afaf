"""`pixel_cross_entropy` and `pixel_predictions` against upsampled logits, and their memory."""

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
    """Logits of a grid, and labels of pixels, some of which are ignored."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(images, *grid, CLASSES)).astype(dtype)
    labels = generator.integers(-1, CLASSES + 1, (images, *size))
    return jnp.asarray(logits), jnp.asarray(np.where(labels == CLASSES, 255, labels))


def upsample(logits, size):
    shape = (logits.shape[0], *size, logits.shape[-1])
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.image.resize(wide, shape, "bilinear", antialias=False)


def reference(logits, labels, smoothing=0.0):
    labeled = (labels >= 0) & (labels < logits.shape[-1])
    z = upsample(logits, labels.shape[1:])
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=z.dtype)
    pixel_losses = optax.softmax_cross_entropy(z, optax.smooth_labels(hot, smoothing))
    n = jnp.maximum(labeled.sum((1, 2)), 1)
    losses = jnp.where(labeled, pixel_losses, 0).sum((1, 2)) / n
    return losses, (labeled & (z.argmax(-1) == labels)).sum((1, 2)) / n


def weighted_reference(logits, labels, weights):
    """Losses per image as torch's ``cross_entropy(z, labels, weight=weights)`` defines them."""
    labeled = (labels >= 0) & (labels < logits.shape[-1])
    z = upsample(logits, labels.shape[1:])
    known = jnp.where(labeled, labels, 0)
    weight = jnp.where(labeled, jnp.asarray(weights)[known], 0)
    pixel_losses = optax.softmax_cross_entropy_with_integer_labels(z, known)
    total = weight.sum((1, 2))
    losses = jnp.where(labeled, weight * pixel_losses, 0).sum((1, 2)) / jnp.where(total, total, 1)
    return losses, (labeled & (z.argmax(-1) == labels)).sum((1, 2)) / labeled.sum((1, 2))


def values_and_gradient(f):
    """Losses, accuracies and the gradient of weighted losses."""

    @jax.jit
    def both(logits, labels):
        def total(logits):
            losses, accuracy = f(logits, labels)
            return (losses * jnp.arange(1, len(losses) + 1)).sum(), (losses, accuracy)

        (_, values), gradient = jax.value_and_grad(total, has_aux=True)(logits)
        return values, gradient

    return both


GRIDS = {
    "another shape": ((4, 6), (13, 20)),
    "larger than the image": ((9, 8), (7, 5)),
    "one position": ((1, 1), (7, 5)),
}


@pytest.mark.parametrize(("grid", "size"), GRIDS.values(), ids=GRIDS)
def test_losses_accuracy_and_gradients_match_upsampled_logits(grid, size):
    logits, labels = arrays(grid=grid, size=size)
    options = {"smoothing": 0.1}
    got = values_and_gradient(functools.partial(pixel_cross_entropy, rows=3, **options))
    want = values_and_gradient(functools.partial(reference, **options))
    (losses, gradient), (expected, expected_gradient) = got(logits, labels), want(logits, labels)
    chex.assert_trees_all_close((*losses,), (*expected,), rtol=1e-5)
    chex.assert_trees_all_close(gradient, expected_gradient, atol=1e-6)


def test_values_do_not_depend_on_gradients_or_rows():
    logits, labels = arrays()
    got = pixel_cross_entropy(logits, labels)
    want, _ = values_and_gradient(pixel_cross_entropy)(logits, labels)
    chex.assert_trees_all_close((*got,), (*want,), rtol=1e-6)
    chex.assert_trees_all_close(got, pixel_cross_entropy(logits, labels, rows=1), rtol=1e-6)


def test_image_without_labels_has_zero_loss_and_gradient():
    logits, labels = arrays()
    logits = logits.at[1].set(jnp.inf)
    (losses, accuracy), gradient = values_and_gradient(pixel_cross_entropy)(
        logits, labels.at[1].set(255)
    )
    assert losses[1] == accuracy[1] == 0
    assert losses[0] > 0
    chex.assert_trees_all_equal(gradient[1], jnp.zeros_like(gradient[1]))
    assert jnp.isfinite(gradient).all()


def test_accepts_uint8_labels_and_bfloat16_logits():
    logits, labels = arrays(dtype=jnp.bfloat16)
    got, gradient = values_and_gradient(pixel_cross_entropy)(logits, labels.astype(jnp.uint8))
    chex.assert_type([*got, gradient], [jnp.float32, jnp.float32, jnp.bfloat16])
    labels = jnp.where(labels < 0, 255, labels)
    want, _ = values_and_gradient(reference)(logits.astype(jnp.float32), labels)
    chex.assert_trees_all_close((*got,), (*want,), rtol=1e-5)


def test_float16_gradient_does_not_underflow_with_a_loss_scale():
    # 6e-6 / 2^8 is below the smallest number of float16; times a loss scale of 2^15 it is not.
    labels = jnp.asarray(np.random.default_rng(0).integers(CLASSES, size=(1, 16, 16)))
    logits = 12 * jax.nn.one_hot(labels, CLASSES)

    def gradient(logits):
        f = lambda z: (2.0**15 * pixel_cross_entropy(z, labels).losses).sum()  # noqa: E731
        return jax.jit(jax.grad(f))(logits)

    got = gradient(logits.astype(jnp.float16))
    chex.assert_type(got, jnp.float16)
    chex.assert_trees_all_close(got.astype(jnp.float32), gradient(logits), rtol=2e-3)


def test_accepts_uint8_labels_of_256_classes():
    generator = np.random.default_rng(0)
    logits = jnp.asarray(generator.normal(size=(2, 2, 3, 256)), jnp.float32)
    labels = jnp.asarray(generator.integers(256, size=(2, 5, 7)))
    got = values_and_gradient(pixel_cross_entropy)(logits, labels.astype(jnp.uint8))
    chex.assert_trees_all_close(got, values_and_gradient(pixel_cross_entropy)(logits, labels))
    predictions = [pixel_predictions([logits], (5, 7), a) for a in (labels.astype("uint8"), labels)]
    chex.assert_trees_all_close(*predictions)


@pytest.mark.usefixtures("float64")
def test_ignores_labels_beyond_int32():
    logits, labels = arrays()
    beyond = jnp.where(labels == 255, 2**32 + 3, labels.astype(jnp.int64))
    got = values_and_gradient(pixel_cross_entropy)(logits, beyond)
    chex.assert_trees_all_equal(got, values_and_gradient(pixel_cross_entropy)(logits, labels))


@pytest.mark.usefixtures("float64")
def test_supports_forward_over_reverse_but_not_forward_mode():
    logits, labels = arrays(dtype=np.float64)
    vector = arrays(dtype=np.float64, seed=1)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def hessian_times(f, vector):
        gradient = jax.grad(lambda z: f(z, labels)[0].sum())
        return jax.jvp(gradient, (logits,), (vector,))[1]

    got, want = (hessian_times(f, vector) for f in (pixel_cross_entropy, reference))
    chex.assert_trees_all_close(got, want, rtol=1e-9, atol=1e-12)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda z: pixel_cross_entropy(z, labels)[0], (logits,), (logits,))


def test_per_example_gradients_by_vmap_match_the_batch():
    logits, labels = arrays()

    def unlabeled(logits, labels):
        return pixel_cross_entropy(logits[None], labels[None])[0][0]

    got = jax.jit(jax.vmap(jax.grad(unlabeled)))(logits, labels)
    want = jax.jit(jax.grad(lambda z: pixel_cross_entropy(z, labels)[0].sum()))(logits)
    chex.assert_trees_all_close(got, want, atol=1e-7)


def test_sharded_images_have_the_same_losses_and_gradient():
    logits, labels = arrays(images=4)
    f = values_and_gradient(functools.partial(pixel_cross_entropy, rows=3))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    # Each device weights its image by 1, because it sees a batch of one.
    mapped = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    )
    (losses, gradient), (want, expected) = mapped(logits, labels), f(logits, labels)
    chex.assert_trees_all_close((*losses,), (*want,), rtol=1e-6)
    by = jnp.arange(1.0, 5)[:, None, None, None]
    chex.assert_trees_all_close(gradient * by, expected, rtol=1e-5, atol=1e-7)

    views = (P("data"), P("data"))
    predict = functools.partial(pixel_predictions, size=labels.shape[1:], rows=3)
    predict_views = jax.jit(
        jax.shard_map(lambda z, y: predict([z], labels=y), mesh=mesh, in_specs=views, out_specs=P("data"))
    )  # fmt: skip
    chex.assert_trees_all_close(predict_views(logits, labels), predict([logits], labels=labels))
    predict_first = jax.jit(
        jax.shard_map(lambda y: predict([logits[:1]], labels=y), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    )  # fmt: skip
    same = jnp.broadcast_to(logits[:1], logits.shape)
    chex.assert_trees_all_close(predict_first(labels), predict([same], labels=labels))


@pytest.mark.parametrize(("rows", "grids"), [(None, 3), (3, 3), (3, 1)])
def test_predictions_average_probabilities_over_views(rows, grids):
    size = (13, 20)
    views = [arrays(grid=grid)[0] for grid in [(4, 6), (13, 20), (15, 9)][:grids]]
    labels = arrays(size=size)[1]
    got = pixel_predictions(views, size, labels, rows=rows)
    mean = sum(np.asarray(jax.nn.softmax(upsample(v, size))) for v in views) / grids
    chex.assert_type(got.labels, jnp.uint8)
    chex.assert_trees_all_equal(np.asarray(got.labels), mean.argmax(-1).astype(np.uint8))
    labeled = (labels >= 0) & (labels < CLASSES)
    picked = np.take_along_axis(mean, np.where(labeled, labels, 0)[..., None], -1)[..., 0]
    losses = np.where(labeled, -np.log(picked), 0).sum((1, 2)) / labeled.sum((1, 2))
    chex.assert_trees_all_close(got.losses, losses, rtol=1e-5)
    unlabeled = pixel_predictions(views, size, rows=rows)
    assert unlabeled.losses is None
    chex.assert_trees_all_equal(unlabeled.labels, got.labels)


@pytest.mark.usefixtures("float64")
def test_views_may_be_float32_with_x64_enabled():
    logits, labels = arrays()
    got = pixel_predictions([logits, logits], labels.shape[1:], labels, rows=5)
    chex.assert_type([logits, got.losses], jnp.float32)
    chex.assert_trees_all_close(got.losses, pixel_cross_entropy(logits, labels).losses, rtol=1e-6)


def test_predictions_of_more_than_255_classes_are_int32():
    logits = jnp.zeros((1, 2, 2, 300)).at[..., 290].set(1)
    assert (pixel_predictions([logits], (4, 4)).labels == 290).all()


IMAGES, SIZE, MANY_CLASSES = 2, 256, 40
UPSAMPLED_BYTES = 4 * IMAGES * SIZE * SIZE * MANY_CLASSES
SHAPES = (S((IMAGES, 32, 32, MANY_CLASSES), jnp.float32), S((IMAGES, SIZE, SIZE), jnp.uint8))


def temporaries(f, *shapes):
    """Temporaries with the compiler options that need the least."""
    return peak(compile_min_memory(jax.jit(f).lower(*shapes))[0]).temporaries


def test_upsampled_logits_are_not_materialized():
    def value_and_gradient(f):
        return jax.value_and_grad(lambda z, y: f(z, y)[0].mean())

    chunked = functools.partial(pixel_cross_entropy, rows=8)
    assert temporaries(value_and_gradient(reference), *SHAPES) >= 2 * UPSAMPLED_BYTES
    assert temporaries(value_and_gradient(chunked), *SHAPES) <= 0.15 * UPSAMPLED_BYTES
    assert temporaries(chunked, *SHAPES) <= 0.12 * UPSAMPLED_BYTES

    def predict_views(z, larger, y):
        return pixel_predictions([z, larger], (SIZE, SIZE), y, rows=8)

    logits, labels = SHAPES
    other = S((IMAGES, 48, 48, MANY_CLASSES), jnp.float32)
    assert temporaries(predict_views, logits, other, labels) <= 0.2 * UPSAMPLED_BYTES


MISTAKES = [
    ({"labels": jnp.zeros((3, 8, 8))}, TypeError, "labels must be integers, got float32"),
    ({"logits": jnp.zeros((3, 2, 2, 4), int)}, TypeError, "logits must be floating, got int32"),
    ({"logits": jnp.zeros((3, 2, 4))}, ValueError, r"\[N, h, w, k\] and not empty, got \(3, 2, 4\)"),
    ({"logits": jnp.zeros((2, 2, 2, 4))}, ValueError, r"must be \(2, 8, 8\) .* got \(3, 8, 8\)"),
    ({"labels": jnp.zeros((3, 8), int)}, ValueError, r"got \(3, 8\)"),
    ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
    ({"smoothing": 1.0}, ValueError, r"smoothing must be in \[0, 1\), got 1.0"),
]  # fmt: skip


def test_rejects_invalid_arguments():
    for wrong, kind, message in MISTAKES:
        given = {"logits": jnp.zeros((3, 2, 2, 4)), "labels": jnp.zeros((3, 8, 8), int)} | wrong
        with pytest.raises(kind, match=message):
            pixel_cross_entropy(**given)
        if "smoothing" not in wrong:
            given["rows"] = wrong.get("rows")
            with pytest.raises(kind, match=message):
                pixel_predictions([given["logits"]], (8, 8), given["labels"], rows=given["rows"])
    with pytest.raises(ValueError, match="at least one array of logits, got none"):
        pixel_predictions([], (8, 8))
    with pytest.raises(ValueError, match="same number of classes, got 4 and 5"):
        pixel_predictions([jnp.zeros((3, 2, 2, 4)), jnp.zeros((3, 2, 2, 5))], (8, 8))


WEIGHTS = (0.5, 1.0, 3.0, 0.25, 2.0)


def test_class_weights_give_the_weighted_mean_over_pixels():
    logits, labels = arrays()
    fused = values_and_gradient(
        functools.partial(pixel_cross_entropy, class_weights=WEIGHTS, rows=3)
    )
    expected = values_and_gradient(functools.partial(weighted_reference, weights=WEIGHTS))
    chex.assert_trees_all_close(fused(logits, labels), expected(logits, labels), rtol=1e-4)
    ignored = jnp.full_like(labels, 255)
    assert not pixel_cross_entropy(logits, ignored, class_weights=WEIGHTS).losses.any()


def test_refuses_wrong_class_weights():
    with pytest.raises(ValueError, match="one number per class, 5, got 2"):
        pixel_cross_entropy(*arrays(), class_weights=(1.0, 2.0))
    with pytest.raises(ValueError, match="must be positive"):
        pixel_cross_entropy(*arrays(), class_weights=(1, 1, 1, 1, 0))
