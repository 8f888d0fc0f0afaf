"""Crops, flips, color jitter, cutout and mixup."""

import math

import chex
import numpy as np
import pytest

from train.data import augment
from train.data.augment import (
    RESIZED_CROP_DRAWS,
    center_crop,
    evaluation_crops,
    fit,
    horizontal_flip,
    random_resized_crop,
    random_scale_crop,
    resize_shorter_side,
    shift,
)
from train.data.drawings import fill_polygon
from train.data.image_batches import ImageOptions


def generator(seed=0):
    return np.random.default_rng(seed)


def images(n, height, width):
    return generator().integers(0, 256, (n, height, width, 3), np.uint8)


def crops(width, height, n=2000, **options):
    draws = generator().random((n, RESIZED_CROP_DRAWS))
    return np.array([random_resized_crop(width, height, 224, d, **options).box for d in draws])


@pytest.mark.parametrize(("width", "height"), [(500, 375), (30, 200), (32, 32), (1, 1)])
def test_resized_crops_lie_within_the_image_and_give_squares(width, height):
    left, top, right, bottom = crops(width, height).T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert ((right - left > 0) & (right <= width)).all()
    assert ((bottom - top > 0) & (bottom <= height)).all()
    assert random_resized_crop(width, height, 224, np.zeros(RESIZED_CROP_DRAWS)).size == (224, 224)


def test_resized_crops_have_the_given_areas_and_ratios():
    left, top, right, bottom = crops(640, 640, area=(0.25, 0.5)).T
    w, h = right - left, bottom - top
    fraction = w * h / 640**2
    assert 0.248 < fraction.min() < 0.26
    assert 0.49 < fraction.max() < 0.502
    assert abs(fraction.mean() - 0.375) < 0.01  # uniform
    ratio = np.log(w / h)
    assert np.abs(ratio).max() < math.log(4 / 3) + 0.01
    assert abs(ratio.mean()) < 0.01  # symmetric
    # Positions are uniform among the possible ones.
    for start, free in ((left, 640 - w), (top, 640 - h)):
        assert abs((start / free).mean() - 0.5) < 0.02


def test_each_attempt_of_a_resized_crop_has_an_area_and_a_ratio_of_its_own():
    draws = np.full(RESIZED_CROP_DRAWS, 0.0)
    draws[:6] = 0.999, 0.999, 0.999, 0.999, 0.25, 0.5  # two that do not fit, a square
    assert random_resized_crop(100, 100, 8, draws, area=(0.0, 1.0)).box == (0, 0, 50, 50)


def test_random_crops_reach_the_last_pixel():
    draws = np.array([0.25, *[0.5] * (RESIZED_CROP_DRAWS - 3), 0.999, 0.999])
    assert random_resized_crop(100, 100, 8, draws, area=(0.0, 1.0)).box == (50, 50, 100, 100)
    placed = random_scale_crop(16, 16, 8, np.array([0.5, 0.999, 0.999]), (2.0, 2.0))
    assert placed.view.box == (8, 8, 16, 16)


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (100, 10, (43, 0, 56, 10)),  # 10 * 4/3 = 13 wide
        (10, 100, (0, 43, 10, 56)),  # 10 / (3/4) = 13 high
    ],
)
def test_resized_crop_falls_back_to_the_center(width, height, box):
    # The largest area, for which no allowed ratio fits.
    draws = np.full(RESIZED_CROP_DRAWS, 0.999)
    assert random_resized_crop(width, height, 8, draws).box == box


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    # torchvision.transforms.Resize(256): the longer side is int(256 * long / short).
    [(500, 375, (341, 256)), (375, 500, (256, 341)), (256, 256, (256, 256)), (32, 48, (256, 384))],
)
def test_resizes_the_shorter_side_like_torchvision(width, height, expected):
    assert resize_shorter_side(256)(width, height) == ((0, 0, width, height), expected)


def test_center_crop_takes_the_center():
    image = images(1, 7, 10)[0]
    chex.assert_trees_all_equal(center_crop(image, 4), image[2:6, 3:7])
    chex.assert_trees_all_equal(center_crop(image, 7), image[:, 2:9])


def test_ten_crops_are_corners_and_center_with_their_flips():
    image = images(1, 6, 8)[0]
    ten = evaluation_crops(image, 4, 10)
    # torchvision's order: top left, top right, bottom left, bottom right, center.
    five = [image[:4, :4], image[:4, 4:], image[2:, :4], image[2:, 4:], image[1:5, 2:6]]
    chex.assert_trees_all_equal(ten[:5], np.stack(five))
    chex.assert_trees_all_equal(ten[5:], np.stack(five)[:, :, ::-1])
    chex.assert_trees_all_equal(evaluation_crops(image, 4, 2), ten[[4, 9]])


@pytest.mark.parametrize("reflect", [False, True])
def test_shift_pads_with_zeros_or_by_reflection(reflect):
    batch = images(9, 5, 5)
    offsets = np.array([(y, x) for y in (0, 2, 4) for x in (0, 2, 4)])
    out = shift(batch.copy(), offsets, 2, reflect=reflect)
    chex.assert_trees_all_equal(out[4], batch[4])
    chex.assert_trees_all_equal(out[0, 2:, 2:], batch[0, :3, :3])
    chex.assert_trees_all_equal(out[8, :3, :3], batch[8, 2:, 2:])
    border = batch[0, 2:0:-1, :3] if reflect else np.zeros((2, 3, 3), np.uint8)
    chex.assert_trees_all_equal(out[0, :2, 2:], border)


def test_horizontal_flip_flips_only_the_chosen_images():
    batch = images(3, 4, 5)
    out = horizontal_flip(batch.copy(), np.array([True, False, True]))
    chex.assert_trees_all_equal(out, np.stack([batch[0, :, ::-1], batch[1], batch[2, :, ::-1]]))


def test_fit_resizes_the_whole_image_to_the_canvas():
    assert fit(500, 375, 100) == (((0, 0, 500, 375), (100, 75)), (0, 0))
    assert fit(10, 2000, 100) == (((0, 0, 10, 2000), (1, 100)), (0, 0))


def test_random_scale_crops_lie_within_image_and_canvas():
    for draws in generator().random((500, 3)):
        (box, size), at = random_scale_crop(500, 375, 64, draws, (0.5, 2.0))
        for start, end, side, place, length in zip(
            box[:2], box[2:], size, at, (500, 375), strict=True
        ):
            assert 0 <= start < end <= length + 1e-9
            assert 0 <= place <= place + side <= 64
        # The same scale in both directions, up to rounding.
        scale = [(e - s) / n for s, e, n in zip(box[:2], box[2:], size, strict=True)]
        assert scale[0] == pytest.approx(scale[1], rel=0.05)


def test_a_line_of_pixels_stays_one_pixel_high():
    (box, sides), _ = random_scale_crop(500, 1, 64, np.array([0.0, 0.5, 0.5]), (0.5, 1.0))
    assert (box, sides) == ((0, 0, 500, 1), (32, 1))


def test_random_scale_crop_with_scale_one_equals_fit():
    whole, half = (
        random_scale_crop(400, 400, 64, np.array([u, 0.5, 0.5]), (1.0, 2.0))
        for u in (0.0, 1 - 1e-12)
    )
    assert whole == fit(400, 400, 64)
    assert half == (((100, 100, 300, 300), (64, 64)), (0, 0))


def apply_jitter_in_steps(image, order, blend):
    """Apply the operations of color jitter one after the other, by their definitions."""
    x = image.astype(np.float64)
    weights = np.array([0.299, 0.587, 0.114])
    for kind in order:
        gray = (x @ weights)[..., None]
        other = (gray, 0.0, gray.mean())[kind]
        x = blend[kind] * x + (1 - blend[kind]) * other
    return x


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)])
def test_color_matrix_equals_the_separate_operations(order):
    image = images(1, 6, 5)[0]
    blend = np.array([1.3, 0.7, 0.9])
    mean = image.mean((0, 1))
    matrix = augment.color_matrix(mean, np.array(order), blend, np.zeros(3))
    mapped = image @ matrix[:, :3].T + matrix[:, 3]
    chex.assert_trees_all_close(mapped, apply_jitter_in_steps(image, order, blend), rtol=1e-9)


def test_lighting_adds_imagenets_principal_components():
    none = np.arange(3), np.ones(3)
    offset = [augment.color_matrix(np.zeros(3), *none, light)[:, 3] for light in np.eye(3)]
    # eigenvalue * eigenvector: mapillary/inplace_abn, scripts/imagenet/transforms.py.
    expected = [
        0.2175 * np.array([-0.5675, -0.5808, -0.5836]),
        0.0188 * np.array([0.7192, -0.0045, -0.6948]),
        0.0045 * np.array([0.4009, -0.8140, 0.4203]),
    ]
    chex.assert_trees_all_close(np.stack(offset) / 255, np.stack(expected), rtol=1e-9)


def test_color_jitter_rounds_and_clips_once():
    batch = images(2, 6, 5)
    drawn = {
        "order": np.array([[2, 0, 1], [0, 1, 2]]),
        "blend": np.array([[1.4, 1.4, 1.4], [1.0, 1.0, 1.0]]),
        "light": np.array([[0.1, -0.1, 0.2], [0.0, 0.0, 0.0]]),
    }
    out = augment.color_jitter(batch.copy(), drawn)
    light = [
        0.2175 * -0.5675 - 0.0188 * 0.7192 + 2 * 0.0045 * 0.4009,
        0.2175 * -0.5808 + 0.0188 * 0.0045 - 2 * 0.0045 * 0.8140,
        0.2175 * -0.5836 + 0.0188 * 0.6948 + 2 * 0.0045 * 0.4203,
    ]
    expected = apply_jitter_in_steps(batch[0], (2, 0, 1), drawn["blend"][0])
    expected += 255 * 0.1 * np.array(light)
    assert np.abs(out[0] - expected.clip(0, 255)).max() <= 0.5 + 1e-3
    chex.assert_trees_all_equal(out[1], batch[1])


def test_color_jitter_draws_have_the_given_range_and_every_order():
    drawn = augment.draw_color_jitter(4000, 0.4, 0.1, generator())
    assert 0.6 <= drawn["blend"].min() < 0.61
    assert 1.39 < drawn["blend"].max() <= 1.4
    assert drawn["light"].std() == pytest.approx(0.1, rel=0.05)
    orders, counts = np.unique(drawn["order"], axis=0, return_counts=True)
    assert len(orders) == 6
    assert counts.min() > 4000 / 6 * 0.85


@pytest.mark.parametrize("side", [1, 4, 5])
def test_cutout_fills_a_square_clipped_at_the_border(side):
    batch = images(200, 9, 12)
    fill = np.array([1, 2, 3])
    centers = generator().random((200, 2))
    out = augment.cutout(batch.copy(), centers, side, fill)
    for image, result, (y, x) in zip(batch, out, (centers * (9, 12)).astype(int), strict=True):
        rows, columns = np.ogrid[:9, :12]
        top, left = y - side // 2, x - side // 2
        inside = (rows >= top) & (rows < top + side) & (columns >= left) & (columns < left + side)
        assert inside[y, x]
        chex.assert_trees_all_equal(result, np.where(inside[..., None], fill, image))


def make_batch(n):
    return {
        "image": images(n, 4, 4),
        "label": np.arange(n, dtype=np.int32),
        "weight": np.ones(n, np.float32),
    }


def test_mixup_mixes_images_and_labels_by_the_same_weight():
    batch = make_batch(64)
    out = augment.mixup(batch, augment.draw_mixup(64, 0.4, generator()))
    assert sorted(out["label_2"]) == list(range(64))
    mix = out["mix"][:, None, None, None]
    assert out["mix"].dtype == np.float32
    expected = mix * batch["image"] + (1 - mix) * batch["image"][out["label_2"]]
    assert np.abs(out["image"] - expected).max() <= 0.5
    chex.assert_trees_all_equal(out["label"], batch["label"])
    assert {*np.round(out["mix"] * 256)} > {0, 256}  # Beta(0.4, 0.4) is mostly at the ends


def test_mixup_leaves_out_unreadable_images():
    batch = make_batch(32)
    batch["weight"][::3] = 0.0
    out = augment.mixup(batch, augment.draw_mixup(32, 1.0, generator()))
    bad = (batch["weight"] == 0) | (batch["weight"][out["label_2"]] == 0)
    assert 0 < bad.sum() < 32
    assert (out["mix"][bad] == 1).all()
    chex.assert_trees_all_equal(out["image"][bad], batch["image"][bad])


def test_small_images_are_placed_anywhere_on_the_canvas():
    ends = [np.array([0.0, x, y]) for x in (0, 0.999) for y in (0, 0.999)]
    at = [random_scale_crop(10, 10, 16, draws, (0.5, 1.0)).at for draws in ends]
    assert at == [(0, 0), (0, 8), (8, 0), (8, 8)]


def test_random_shifts_are_all_that_the_padding_allows():
    options = ImageOptions(image_size=8, crop="padded", padding=2)
    shifts = options.draw(500, generator())["shift"]
    assert set(shifts.ravel().tolist()) == {0, 1, 2, 3, 4}
    assert shifts.shape == (500, 2)


def test_a_warp_of_nothing_changes_nothing_and_a_quarter_turn_is_one():
    image = np.random.default_rng(0).integers(0, 255, (1, 20, 20, 3)).astype(np.uint8)
    draws = np.zeros((1, 9))
    np.testing.assert_array_equal(augment.warp(image.copy(), draws, (0, 0, 0)), image)
    draws[0, 0] = 90
    turned = augment.warp(image.copy(), draws, (0, 0, 0))
    np.testing.assert_array_equal(turned[0], np.rot90(image[0], 3))


def test_a_perspective_moves_the_corners_into_the_image():
    points = np.array([[0, 0], [8, 0], [8, 8], [0, 8]], float)
    targets = np.array([[1, 2], [7, 0], [8, 6], [0, 8]], float)
    a, b, c, d, e, f, g, h = augment.perspective_from(points, targets)
    for (x, y), expected in zip(points, targets, strict=True):
        scale = g * x + h * y + 1
        mapped = (a * x + b * y + c) / scale, (d * x + e * y + f) / scale
        np.testing.assert_allclose(mapped, expected, atol=1e-9)
    draws = augment.draw_warp(50, 0.0, 0.5, np.random.default_rng(0))
    shifts = np.abs(draws[:, 1:])
    assert (shifts <= 0.25).all()
    assert (shifts.max(0) > 0.2).all()
    moved = augment.warp(np.full((50, 16, 16, 3), 200, np.uint8), draws, (9, 9, 9))
    assert (moved[:, 0, 0] < 200).any()
    assert (moved[:, 8, 8] == 200).all()


@pytest.mark.parametrize("corner", range(4))
def test_a_moved_corner_leaves_the_fill_beside_the_image(corner):
    draws = np.zeros((1, 9))
    inward = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]])[corner] * (0.3, 0.2)
    draws[0, 1 + 2 * corner : 3 + 2 * corner] = inward
    moved = augment.warp(np.full((1, 50, 40, 3), 200, np.uint8), draws, (0, 0, 0))
    outline = np.array([[0, 0], [40, 0], [40, 50], [0, 50]], float)
    outline[corner] += inward * (40, 50)
    np.testing.assert_array_equal(moved[0, ..., 0] == 200, fill_polygon(outline, 50, 40))


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_cutmix_weighs_labels_by_the_pixels_of_each_image(alpha):
    generator = np.random.default_rng(0)
    n = 40
    image = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 20, 30, 3))
    batch = {"image": image, "label": np.arange(n), "weight": np.ones(n, np.float32)}
    batch["weight"][3] = 0
    draws = augment.draw_mixup(n, alpha, generator, 1.0)
    mixed = augment.mixup(batch, draws)
    is_cut = draws["box"].any(1)
    assert is_cut.mean() == 1.0 if not alpha else 0.2 < is_cut.mean() < 0.8
    assert mixed["mix"][3] == 1
    for i in np.flatnonzero(is_cut):
        own = (mixed["image"][i, ..., 0] == i).mean()
        if mixed["label_2"][i] != i and mixed["mix"][i] < 1:
            assert mixed["mix"][i] == pytest.approx(own)
            y, x, tall, wide = draws["box"][i] * (20, 30, 20, 30)
            rows, columns = np.nonzero(mixed["image"][i, ..., 0] != i)
            ends = [*(y + tall * np.array([-1, 1]) / 2), *(x + wide * np.array([-1, 1]) / 2)]
            expected = np.clip(np.round(ends), 0, [20, 20, 30, 30])
            assert [rows.min(), rows.max() + 1, columns.min(), columns.max() + 1] == [*expected]
    uncut = mixed["image"][~is_cut]
    assert (uncut == uncut[:, :1, :1]).all()
