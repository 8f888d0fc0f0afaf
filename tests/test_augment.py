"""Crops, colours, cutout and mixup: what is random, within which bounds, and what is exact."""

import math

import chex
import numpy as np
import pytest

from train.data import augment
from train.data.augment import (
    RESIZED_CROP_DRAWS,
    center_crop,
    fit,
    horizontal_flip,
    random_resized_crop,
    random_scale_crop,
    resize_shorter_side,
    shift,
    ten_crops,
    two_crops,
)


def generator(seed=0):
    return np.random.default_rng(seed)


def images(n, height, width):
    return generator().integers(0, 256, (n, height, width, 3), np.uint8)


def crops(width, height, n=2000, **options):
    draws = generator().random((n, RESIZED_CROP_DRAWS))
    return np.array([random_resized_crop(width, height, 224, d, **options).box for d in draws])


@pytest.mark.parametrize(("width", "height"), [(500, 375), (30, 200), (32, 32), (1, 1)])
def test_resized_crops_lie_within_the_image_and_are_square_afterwards(width, height):
    left, top, right, bottom = crops(width, height).T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert ((right - left > 0) & (right <= width)).all()
    assert ((bottom - top > 0) & (bottom <= height)).all()
    assert random_resized_crop(width, height, 224, np.zeros(RESIZED_CROP_DRAWS)).size == (224, 224)


def test_resized_crops_keep_to_their_areas_and_ratios():
    left, top, right, bottom = crops(640, 640, area=(0.25, 0.5)).T
    w, h = right - left, bottom - top
    share = w * h / 640**2
    assert 0.248 < share.min() < 0.26
    assert 0.49 < share.max() < 0.502
    assert abs(share.mean() - 0.375) < 0.01  # uniform
    ratio = np.log(w / h)
    assert np.abs(ratio).max() < math.log(4 / 3) + 0.01
    assert abs(ratio.mean()) < 0.01  # as often wide as high
    # Both ends are reached: places are uniform among those that are possible.
    for start, free in ((left, 640 - w), (top, 640 - h)):
        assert abs((start / free).mean() - 0.5) < 0.02


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (100, 10, (43, 0, 56, 10)),  # 10 * 4/3 = 13 wide
        (10, 100, (0, 43, 10, 56)),  # 10 / (3/4) = 13 high
    ],
)
def test_where_no_try_fits_the_middle_is_taken(width, height, box):
    # The largest area each time, which no allowed ratio fits into.
    draws = np.full(RESIZED_CROP_DRAWS, 0.999)
    assert random_resized_crop(width, height, 8, draws).box == box


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    # torchvision.transforms.Resize(256): the longer side is int(256 * long / short).
    [(500, 375, (341, 256)), (375, 500, (256, 341)), (256, 256, (256, 256)), (32, 48, (256, 384))],
)
def test_the_shorter_side_is_resized_as_torchvision_does(width, height, expected):
    assert resize_shorter_side(256)(width, height) == ((0, 0, width, height), expected)


def test_the_middle_is_cut_out():
    image = images(1, 7, 10)[0]
    chex.assert_trees_all_equal(center_crop(image, 4), image[2:6, 3:7])
    chex.assert_trees_all_equal(center_crop(image, 7), image[:, 2:9])


def test_ten_crops_are_corners_middle_and_their_mirror_images():
    image = images(1, 6, 8)[0]
    ten = ten_crops(image, 4)
    # torchvision's order: top left, top right, bottom left, bottom right, centre.
    five = [image[:4, :4], image[:4, 4:], image[2:, :4], image[2:, 4:], image[1:5, 2:6]]
    chex.assert_trees_all_equal(ten[:5], np.stack(five))
    chex.assert_trees_all_equal(ten[5:], np.stack(five)[:, :, ::-1])
    chex.assert_trees_all_equal(two_crops(image, 4), ten[[4, 9]])


@pytest.mark.parametrize("reflect", [False, True])
def test_images_are_moved_over_zeros_or_over_their_mirror_image(reflect):
    batch = images(9, 5, 5)
    by = np.array([(y, x) for y in (0, 2, 4) for x in (0, 2, 4)])
    out = shift(batch.copy(), by, 2, reflect=reflect)
    chex.assert_trees_all_equal(out[4], batch[4])
    chex.assert_trees_all_equal(out[0, 2:, 2:], batch[0, :3, :3])
    chex.assert_trees_all_equal(out[8, :3, :3], batch[8, 2:, 2:])
    border = batch[0, 2:0:-1, :3] if reflect else np.zeros((2, 3, 3), np.uint8)
    chex.assert_trees_all_equal(out[0, :2, 2:], border)


def test_chosen_images_are_mirrored():
    batch = images(3, 4, 5)
    out = horizontal_flip(batch.copy(), np.array([True, False, True]))
    chex.assert_trees_all_equal(out, np.stack([batch[0, :, ::-1], batch[1], batch[2, :, ::-1]]))


def test_images_are_fitted_whole_into_one_size():
    assert fit(500, 375, 100) == (((0, 0, 500, 375), (100, 75)), (0, 0))
    assert fit(10, 2000, 100) == (((0, 0, 10, 2000), (1, 100)), (0, 0))


def test_scaled_crops_lie_within_the_image_and_within_the_canvas():
    for draws in generator().random((500, 3)):
        (box, size), at = random_scale_crop(500, 375, 64, draws, (0.5, 2.0))
        for start, end, side, place, length in zip(
            box[:2], box[2:], size, at, (500, 375), strict=True
        ):
            assert 0 <= start < end <= length + 1e-9
            assert 0 <= place <= place + side <= 64
        # One scale in both directions, but for whole pixels.
        scale = [(e - s) / n for s, e, n in zip(box[:2], box[2:], size, strict=True)]
        assert scale[0] == pytest.approx(scale[1], rel=0.05)


def test_a_scale_of_one_is_that_of_evaluation_and_of_two_shows_a_half():
    whole, half = (
        random_scale_crop(400, 400, 64, np.array([u, 0.5, 0.5]), (1.0, 2.0))
        for u in (0.0, 1 - 1e-12)
    )
    assert whole == fit(400, 400, 64)
    assert half == (((100, 100, 300, 300), (64, 64)), (0, 0))


def blended(image, order, blend):
    """Jitter step by step, as each step is defined."""
    x = image.astype(np.float64)
    weights = np.array([0.299, 0.587, 0.114])
    for kind in order:
        grey = (x @ weights)[..., None]
        other = (grey, 0.0, grey.mean())[kind]
        x = blend[kind] * x + (1 - blend[kind]) * other
    return x


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)])
def test_colour_jitter_in_one_map_equals_its_steps(order):
    image = images(1, 6, 5)[0]
    blend = np.array([1.3, 0.7, 0.9])
    mean = image.mean((0, 1))
    matrix = augment.color_matrix(mean, np.array(order), blend, np.zeros(3))
    mapped = image @ matrix[:, :3].T + matrix[:, 3]
    chex.assert_trees_all_close(mapped, blended(image, order, blend), rtol=1e-9)


def test_lighting_adds_the_principal_colours_of_imagenet():
    none = np.arange(3), np.ones(3)
    offset = [augment.color_matrix(np.zeros(3), *none, light)[:, 3] for light in np.eye(3)]
    # eigenvalue * eigenvector: mapillary/inplace_abn, scripts/imagenet/transforms.py.
    expected = [
        0.2175 * np.array([-0.5675, -0.5808, -0.5836]),
        0.0188 * np.array([0.7192, -0.0045, -0.6948]),
        0.0045 * np.array([0.4009, -0.8140, 0.4203]),
    ]
    chex.assert_trees_all_close(np.stack(offset) / 255, np.stack(expected), rtol=1e-9)


def test_colours_are_rounded_and_clipped_once():
    batch = images(2, 6, 5)
    drawn = {
        "order": np.array([[2, 0, 1], [0, 1, 2]]),
        "blend": np.array([[1.4, 1.4, 1.4], [1.0, 1.0, 1.0]]),
        "light": np.array([[0.1, -0.1, 0.2], [0.0, 0.0, 0.0]]),
    }
    out = augment.color_jitter(batch.copy(), drawn)
    light = (
        255
        * 0.1
        * np.array(
            [
                0.2175 * -0.5675 - 0.0188 * 0.7192 + 2 * 0.0045 * 0.4009,
                0.2175 * -0.5808 + 0.0188 * 0.0045 - 2 * 0.0045 * 0.8140,
                0.2175 * -0.5836 + 0.0188 * 0.6948 + 2 * 0.0045 * 0.4203,
            ]
        )
    )
    expected = blended(batch[0], (2, 0, 1), drawn["blend"][0]) + light
    assert np.abs(out[0] - expected.clip(0, 255)).max() <= 0.5 + 1e-3
    chex.assert_trees_all_equal(out[1], batch[1])


def test_what_is_drawn_of_colours_has_its_range_and_every_order():
    drawn = augment.draw_color_jitter(4000, 0.4, 0.1, generator())
    assert 0.6 <= drawn["blend"].min() < 0.61
    assert 1.39 < drawn["blend"].max() <= 1.4
    assert drawn["light"].std() == pytest.approx(0.1, rel=0.05)
    orders, counts = np.unique(drawn["order"], axis=0, return_counts=True)
    assert len(orders) == 6
    assert counts.min() > 4000 / 6 * 0.85


@pytest.mark.parametrize("side", [1, 4, 5])
def test_cutout_takes_a_square_that_ends_at_the_border(side):
    batch = images(200, 9, 12)
    fill = np.array([1, 2, 3])
    centres = generator().random((200, 2))
    out = augment.cutout(batch.copy(), centres, side, fill)
    for image, cut, (y, x) in zip(batch, out, (centres * (9, 12)).astype(int), strict=True):
        rows, columns = np.ogrid[:9, :12]
        top, left = y - side // 2, x - side // 2
        gone = (rows >= top) & (rows < top + side) & (columns >= left) & (columns < left + side)
        assert gone[y, x]
        chex.assert_trees_all_equal(cut, np.where(gone[..., None], fill, image))


def batch_of(n):
    return {
        "image": images(n, 4, 4),
        "label": np.arange(n, dtype=np.int32),
        "weight": np.ones(n, np.float32),
    }


def test_mixup_shares_images_and_labels_alike():
    batch = batch_of(64)
    out = augment.mixup(batch, 0.4, generator())
    assert sorted(out["label_2"]) == list(range(64))
    share = out["mix"][:, None, None, None]
    assert out["mix"].dtype == np.float32
    expected = share * batch["image"] + (1 - share) * batch["image"][out["label_2"]]
    assert np.abs(out["image"] - expected).max() <= 0.5
    chex.assert_trees_all_equal(out["label"], batch["label"])
    assert {*np.round(out["mix"] * 256)} > {0, 256}  # Beta(0.4, 0.4) is mostly at the ends


def test_what_could_not_be_read_is_mixed_into_nothing():
    batch = batch_of(32)
    batch["weight"][::3] = 0.0
    out = augment.mixup(batch, 1.0, generator())
    bad = (batch["weight"] == 0) | (batch["weight"][out["label_2"]] == 0)
    assert 0 < bad.sum() < 32
    assert (out["mix"][bad] == 1).all()
    chex.assert_trees_all_equal(out["image"][bad], batch["image"][bad])


def test_what_is_smaller_than_the_canvas_lies_anywhere_on_it():
    ends = [np.array([0.0, x, y]) for x in (0, 0.999) for y in (0, 0.999)]
    at = [random_scale_crop(10, 10, 16, draws, (0.5, 1.0)).at for draws in ends]
    assert at == [(0, 0), (0, 8), (8, 0), (8, 8)]
