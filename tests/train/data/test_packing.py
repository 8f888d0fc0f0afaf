"""Packing of documents into rows."""

import itertools

import numpy as np

from train.data.packing import pack


def test_packing_uses_few_rows_and_each_example_once():
    lengths = np.random.default_rng(0).integers(1, 40, 500)
    rows = pack(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(lengths[row].sum() <= 64 for row in rows)
    lower_bound = -(-lengths.sum() // 64)
    assert lower_bound <= len(rows) <= lower_bound * 1.03
    assert rows == pack(lengths, 64)


def test_packing_chooses_the_fullest_row_with_space():
    assert pack(np.array([3, 6, 4, 2, 1]), 8) == [[1, 3], [2, 0, 4]]
    assert pack(np.array([8, 8]), 8) == [[0], [1]]
    assert pack(np.array([], int), 8) == []


def test_packing_keeps_its_bound_on_the_number_of_rows():
    """Compare with the best of all packings, found by trying them."""
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 10, 7)
        fewest = min(
            first_fit(lengths[list(order)], 10) for order in itertools.permutations(range(7))
        )  # some order makes first-fit optimal
        assert fewest <= len(pack(lengths, 10)) <= 11 / 9 * fewest + 4, seed


def first_fit(lengths, size):
    rows = []
    for length in lengths:
        row = next((i for i, used in enumerate(rows) if used + length <= size), None)
        if row is None:
            rows.append(length)
        else:
            rows[row] += length
    return len(rows)


def test_rows_equal_those_of_best_fit_by_search():
    lengths = np.random.default_rng(1).integers(1, 30, 300)
    spaces, expected = [], []
    for i in np.argsort(-lengths, kind="stable"):
        fitting = [s for s in spaces if s >= lengths[i]]
        if fitting:
            spaces[spaces.index(min(fitting))] -= lengths[i]
        else:
            spaces.append(29 - lengths[i])
            expected.append(i)
    rows = pack(lengths, 29)
    assert [row[0] for row in rows] == expected
    assert sorted(29 - lengths[row].sum() for row in rows) == sorted(spaces)
