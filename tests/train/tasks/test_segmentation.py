"""Semantic segmentation: the task, its scores and its colors."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
import vision_cases
from program_cases import assert_one_line_error, exit_code

from train.config import Config, DeepLab, Optim, PreactResNet
from train.data import evaluation_batches
from train.data.class_table import PUBLISHED, VOID
from train.data.label_map import LabelMap
from train.data.segmentation_folder import SegmentationFolder
from train.output.palette import overlay_labels, palette
from train.tasks import build
from train.tasks.scores import accuracy_by_class, iou_by_class, pixel_scores
from train.tasks.segmentation import Views, logits_by_view, make_measure

small_deeplab = pytest.fixture(vision_cases.small_deeplab)
recipes = pytest.fixture(vision_cases.recipes)

DATA = SegmentationFolder(path="halves", ignore=(255,), image_size=16, batch_size=4)


@pytest.fixture
def config(recipes):
    return Config(data=DATA, model=DeepLab())


@pytest.fixture
def task(config):
    return build(config)


@pytest.fixture
def network(task):
    return jax.jit(task.model.init)(jax.random.key(0))


@pytest.fixture
def batch(task):
    return next(evaluation_batches(task.dataset, 3))


def upsampled_probabilities(logits, size):
    """Upsample logits to ``size`` and apply the softmax."""
    whole = (len(logits), *size, logits.shape[-1])
    return np.asarray(jax.nn.softmax(jax.image.resize(logits, whole, "bilinear", antialias=False)))


def apply_network(task, network, image):
    return task.model.apply(*network, image, train=False)[0]


def normalize(image):
    return ((np.asarray(image) / 255 - DATA.mean) / DATA.std).astype(np.float32)


def test_the_loss_is_the_mean_over_pixels_that_are_not_ignored(task, network, batch):
    batch["mask"][1] = 255
    losses, aux = jax.jit(task.loss)(*network, batch, jax.random.key(0))
    logits, _ = task.model.apply(*network, normalize(batch["image"]), train=True)
    probabilities = upsampled_probabilities(logits, (16, 16))
    for i, mask in enumerate(batch["mask"]):
        counted = mask < 3
        if i == 1:
            assert not counted.any()
            assert losses[i] == aux.metrics["pixel_accuracy"][i] == 0
            continue
        assert 0 < counted.sum() < mask.size  # some pixels are ignored
        picked = np.take_along_axis(probabilities[i], np.where(counted, mask, 0)[..., None], -1)[
            ..., 0
        ]
        chex.assert_trees_all_close(losses[i], -np.log(picked)[counted].mean(), rtol=1e-4)
        right = (probabilities[i].argmax(-1) == mask)[counted].mean()
        chex.assert_trees_all_close(aux.metrics["pixel_accuracy"][i], right, rtol=1e-5)


def test_label_smoothing_applies_only_to_the_training_loss(config, task, network, batch):
    smooth = build(dataclasses.replace(config, optim=Optim(label_smoothing=0.2)))
    key = jax.random.key(0)
    losses, _ = jax.jit(smooth.loss)(*network, batch, key)
    assert not np.allclose(losses, jax.jit(task.loss)(*network, batch, jax.random.key(0))[0])
    chex.assert_trees_all_equal(
        jax.jit(smooth.measure)(*network, batch), jax.jit(task.measure)(*network, batch)
    )


def test_predicts_the_most_probable_class_of_each_pixel(task, network, batch):
    labels, predictions = jax.jit(task.measure)(*network, batch).confusion
    chex.assert_trees_all_equal(labels, batch["mask"])
    expected = upsampled_probabilities(
        apply_network(task, network, normalize(batch["image"])), (16, 16)
    )
    chex.assert_trees_all_equal(np.asarray(predictions), expected.argmax(-1).astype(np.uint8))


def test_averages_probabilities_over_scales_and_flips(config, task, network, batch):
    image = normalize(batch["image"])
    n, _, _, channels = image.shape
    expected = []
    for side in (12, 16, 19):  # 0.75, 1 and 1.2 of 16, rounded
        scaled = jax.image.resize(image, (n, side, side, channels), "bilinear", antialias=False)
        expected.append(upsampled_probabilities(apply_network(task, network, scaled), (16, 16)))
        flipped = upsampled_probabilities(
            apply_network(task, network, scaled[:, :, ::-1]), (16, 16)
        )
        expected.append(flipped[:, :, ::-1])
    views = Views((0.75, 1.0, 1.2), flip=True)
    assert views.num_views == len(expected)
    measure = jax.jit(make_measure(config, task.model, views))
    result = measure(*network, batch)
    mean = sum(expected) / len(expected)
    chex.assert_trees_all_equal(np.asarray(result.confusion[1]), mean.argmax(-1).astype(np.uint8))
    counted = batch["mask"] < 3
    picked = np.take_along_axis(mean, np.where(counted, batch["mask"], 0)[..., None], -1)[..., 0]
    losses = np.where(counted, -np.log(picked), 0).sum((1, 2)) / counted.sum((1, 2))
    chex.assert_trees_all_close(result.metrics["loss"], losses, rtol=1e-4)


def test_views_are_the_logits_of_the_image_and_its_flip(config, task, network, batch):  # fmt: skip
    apply = logits_by_view(config, task.model, Views((1.0,), flip=True))
    plain, flipped = apply(*network, batch["image"])
    swapped, back = apply(*network, batch["image"][:, :, ::-1])
    chex.assert_trees_all_close((swapped, back), (flipped[:, :, ::-1], plain[:, :, ::-1]))
    assert not np.allclose(plain, flipped, atol=1e-3)


# Rows are true classes. The third class is only predicted, the last neither true nor predicted.
COUNTS = np.array([[6, 2, 0, 0], [1, 3, 4, 0], [0, 0, 0, 0], [0, 0, 0, 0]])


def test_scores_equal_values_computed_by_hand():
    chex.assert_trees_all_close(accuracy_by_class(COUNTS), np.array([6 / 8, 3 / 8, np.nan, np.nan]))
    chex.assert_trees_all_close(iou_by_class(COUNTS), np.array([6 / 9, 3 / 10, 0, np.nan]))
    chex.assert_trees_all_close(
        pixel_scores(COUNTS),
        {
            "mean_iou": (6 / 9 + 3 / 10 + 0) / 3,
            "pixel_accuracy": 9 / 16,
            "class_accuracy": (6 / 8 + 3 / 8) / 2,
        },
    )


def test_scores_without_pixels_are_undefined():
    assert np.isnan([*pixel_scores(np.zeros((4, 4), int)).values()]).all()


def test_voc_has_the_colors_of_its_development_kit():
    # VOClabelcolormap: background, aeroplane, bicycle, ..., tv/monitor; void.
    rows = PUBLISHED["voc"]
    assert [row.color for row in rows[:4]] == [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0)]
    assert (rows[20].name, rows[20].color) == ("tvmonitor", (0, 64, 128))
    assert rows[-1] == ("void", 255, VOID)
    for label, row in enumerate(rows[:21]):
        bits = [[label >> (3 * i + channel) & 1 for i in range(3)] for channel in range(3)]
        assert row[1:] == (label, tuple(128 * a + 64 * b + 32 * c for a, b, c in bits))


def test_given_colors_come_first_in_the_palette():
    label_map = LabelMap(
        ("a", "b"), ((0, 0), (1, 1)), colors=((1, 2, 3), (4, 5, 6)), void=(7, 8, 9)
    )
    assert palette(label_map)[[0, 1, 255]].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert palette()[255].tolist() == [*VOID]
    plain = LabelMap(("background", "a"), ((0, 0), (1, 1)))
    assert palette(plain)[0].tolist() == [0, 0, 0]
    assert palette(plain)[1].tolist() == palette()[1].tolist()


def test_overlays_labels_on_the_image():
    image = np.full((1, 2, 3), 200, np.uint8)
    colors = np.array([(0, 0, 0), (128, 0, 0)])
    overlay = overlay_labels(image, np.array([[1, 0]]), colors, opacity=0.5)
    assert overlay.tolist() == [[[164, 100, 100], [100, 100, 100]]]


MISTAKES = [
    ({"model": DeepLab()}, "data.source: digits has no masks, which the network deeplab needs; give data.source segmentation_folder"),
    ({"model": PreactResNet(), "data": DATA}, "data.source: segmentation_folder has no images"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "message"), MISTAKES)
def test_refuses_data_of_another_kind(sections, message, recipes, capsys):
    text = f"from train.config import *\ndef config(): return {Config(**sections)!r}"
    (recipes / "other.py").write_text(text)
    assert exit_code("train", "other.py", "--out", "new") == 2
    assert_one_line_error(capsys, message)
    assert not (recipes / "new").exists()
