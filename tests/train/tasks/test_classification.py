"""Classification of images: losses of mixed images, and crops of one image."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.config import Config, Mlp, Optim, Synthetic
from train.tasks import classification

DATA = Synthetic(examples=10, batch_size=4, image_size=4, channels=1, classes=3)


@pytest.fixture
def built():
    config = Config(data=DATA, model=Mlp(hidden=()), optim=Optim(label_smoothing=0.1, focal=1.0))
    task = classification.build(config, dataclasses.replace(DATA).load())
    params, state = task.model.init(jax.random.key(0))
    return task, params, state


def test_a_mixed_image_has_the_losses_and_accuracies_of_both_labels_by_their_shares(built):
    task, params, state = built
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 4, 1), np.uint8)
    labels, share = np.array([[0, 1, 2, 0], [1, 1, 0, 2]]), np.float32([0, 1, 0.25, 0.75])

    def loss(**batch):
        losses, aux = task.loss(params, state, {"image": image} | batch, jax.random.key(1))
        return losses, aux.metrics["accuracy"]

    first, second = (loss(label=label) for label in labels)
    mixed = loss(label=labels[0], label_2=labels[1], mix=share)
    expected = jax.tree.map(lambda a, b: share * a + (1 - share) * b, first, second)
    chex.assert_trees_all_close(mixed, expected, rtol=1e-6)
    assert np.ptp(expected[0]) > 0.1


def test_logits_are_averaged_over_crops(built):
    task, params, state = built
    crops = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 4, 1), np.uint8)
    logits = [task.model.apply(params, state, jnp.float32(c) / 255, train=False)[0] for c in crops]
    found = task.measure(params, state, {"image": crops, "label": np.zeros(5, int)})
    expected = jax.nn.softmax(jnp.stack([a.mean(0) for a in logits]))
    np.testing.assert_allclose(found.examples["outputs"], expected, rtol=1e-5)
