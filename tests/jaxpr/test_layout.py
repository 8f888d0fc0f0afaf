"""Layouts of random views say what NumPy does."""

import itertools
import math

import numpy as np
import pytest
from layout_cases import numbers

from fnet.jaxpr import Layout, NoLayoutError

SHAPES = [(4, 6), (24,), (2, 3, 4), (8, 9), (3, 1, 5), ()]


def draw(rng, shape):
    """Draw a view: an array of numbers of elements, and its layout."""
    array, layout = np.arange(math.prod(shape)).reshape(shape), Layout.of(shape)
    for _ in range(rng.integers(0, 6)):
        move = draw_move(rng, array)
        try:
            layout = move(layout)
        except NoLayoutError:
            continue
        array = move(array)
    return array, layout


def draw_move(rng, array):
    kind, shape = rng.integers(4), array.shape
    if kind == 0:
        order = rng.permutation(len(shape)).tolist()
        return lambda a: a.transpose(order)
    if kind == 1 and array.size:
        divisors = [n for n in range(1, array.size + 1) if array.size % n == 0]
        first = int(rng.choice(divisors))
        second = int(rng.choice([n for n in divisors if array.size // first % n == 0]))
        return lambda a: a.reshape((first, second, -1))
    if kind == 2:
        sizes = [int(rng.integers(1, 4)) if n == 1 else n for n in shape]
        return lambda a: (
            a.broadcast_to(sizes) if isinstance(a, Layout) else np.broadcast_to(a, sizes)
        )
    index = tuple(draw_index(rng, n) for n in shape)
    return lambda a: a[index]


def draw_index(rng, n):
    start, step = int(rng.integers(0, n + 1)), int(rng.integers(1, 4))
    choices = [
        slice(None), slice(None), slice(None, None, -step),
        slice(start, int(rng.integers(start, n + 1)), step),
    ]  # fmt: skip
    return choices[rng.integers(4)] if rng.integers(5) or not n else int(rng.integers(-n, n))


@pytest.mark.parametrize("seed", range(6))
def test_random_views_have_the_elements_and_overlaps_of_numpy(seed):
    rng, overlapping = np.random.default_rng(seed), 0
    for _ in range(100):
        shape = SHAPES[rng.integers(len(SHAPES))]
        (a, own), (b, other) = draw(rng, shape), draw(rng, shape)
        assert (own.shape, own.ndim, own.size) == (a.shape, a.ndim, a.size)
        assert not a.size or (numbers(own) == a).all()
        assert own.has_repeats == (len(np.unique(a)) < a.size) or not a.size
        expected = bool(np.intersect1d(a, b).size)
        overlapping += expected
        assert own.may_overlap(other) == other.may_overlap(own) == expected
        assert not a.size or (own == other) == (a.shape == b.shape and (a == b).all())
    assert 10 < overlapping < 90


def test_a_long_search_ends_with_overlap():
    own = Layout((10**9,), 0, (((10**4, 7), (10**4, 11)),))
    other = Layout((10**9,), 5 * 10**4, (((10**4, 13), (10**4, 17)),))
    assert own.may_overlap(other)


def test_layouts_of_different_arrays_differ():
    assert Layout.of((4, 6)).reshape((24,)) != Layout.of((24,))


def test_orders_without_factors_are_refused():
    with pytest.raises(NoLayoutError):
        Layout.of((4, 6)).transpose((1, 0)).reshape((24,))[1:7]
    with pytest.raises(NoLayoutError):
        Layout.of((6, 4)).transpose((1, 0)).reshape((3, 8))
    with pytest.raises(NoLayoutError):
        Layout.of((4, 6)).transpose((1, 0)).reshape((24,))[2:10:2]


def test_numbers_and_slices_select_elements_of_an_axis_with_several_factors():
    layout, array = Layout.of((4, 6)).transpose((1, 0)).reshape((24,)), np.arange(24)
    array, refused = array.reshape(4, 6).T.ravel(), 0
    assert [int(numbers(layout[i])) for i in range(-24, 24)] == [*array] * 2
    for ends in itertools.product(range(24), range(24), (1, 2, 3, 4, 8, -1, -2, -4)):
        try:
            assert (numbers(layout[slice(*ends)]) == array[slice(*ends)]).all()
        except NoLayoutError:
            refused += 1
    assert refused < 24 * 24 * 3
