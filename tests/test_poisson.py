"""Poisson sampling: probabilities, padding, and resuming."""

import json

import numpy as np
import pytest
from scipy.stats import binom

from train.data import Dataset
from train.data.poisson import OVERFLOW_PROBABILITY, padded_batch_size, poisson_batches

EXAMPLES = 40


def dataset(augment=lambda batch, generator: batch, examples=EXAMPLES):
    train = {"image": np.arange(1, examples + 1, dtype=np.float32)[:, None] * np.ones(3, "f")}
    return Dataset(train=train, test=train, classes=("0",), augment=augment)


def sampled_examples(batch):
    """Indices of the examples in a batch."""
    return batch["image"][batch["weight"] == 1, 0].astype(int) - 1


def take(batches, n):
    return [next(batches) for _ in range(n)]


def test_samples_each_example_independently_with_the_same_probability():
    steps, probability = 2000, 10 / EXAMPLES
    batches = poisson_batches(dataset(), 10, 0, EXAMPLES)
    joined = np.zeros((steps, EXAMPLES))
    for row, batch in zip(joined, batches, strict=False):
        row[sampled_examples(batch)] = 1
    spread = np.sqrt(probability * (1 - probability) / steps)
    assert np.abs(joined.mean(0) - probability).max() < 4.5 * spread
    # Independent of other examples in the same batch, and of itself in the next one.
    for other in (joined, np.roll(joined, 1, axis=0)):
        correlation = np.corrcoef(joined.T, other.T)[:EXAMPLES, EXAMPLES:]
        if other is joined:
            correlation = correlation[~np.eye(EXAMPLES, dtype=bool)]
        assert np.abs(correlation).max() < 5 / np.sqrt(steps)
    # A batch of fixed size would have variance 0.
    variance = EXAMPLES * probability * (1 - probability)
    assert joined.sum(1).var() == pytest.approx(variance, rel=0.15)


def test_samples_without_duplicates_and_pads_with_zeros_of_weight_zero():
    for batch in take(poisson_batches(dataset(), 10, 0, 32), 20):
        indices = sampled_examples(batch)
        assert len(set(indices)) == len(indices)
        assert batch["image"].shape == (32, 3)
        assert batch["weight"].dtype == np.float32
        assert set(np.unique(batch["weight"])) <= {0.0, 1.0}
        assert not batch["image"][batch["weight"] == 0].any()


def test_a_batch_depends_only_on_seed_and_step():
    first, again = (take(poisson_batches(dataset(), 10, 7, 32), 6) for _ in range(2))
    other = take(poisson_batches(dataset(), 10, 8, 32), 6)
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a["image"], b["image"])
        assert set(sampled_examples(a)) != set(sampled_examples(c))
    assert len({tuple(sampled_examples(b)) for b in first}) == 6


def test_batches_resume_at_a_saved_position():
    def noisy(batch, generator):
        return batch | {"noise": generator.random(len(batch["image"]), np.float32)}

    batches = poisson_batches(dataset(noisy), 10, 0, 32)
    take(batches, 5)
    position = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 3)
    resumed = poisson_batches(dataset(noisy), 10, 0, 32)
    resumed.set_state(position)
    for a, b in zip(expected, take(resumed, 3), strict=True):
        for name in ("image", "noise", "weight"):
            np.testing.assert_array_equal(a[name], b[name])


def test_sampling_does_not_depend_on_the_augmentation():
    def uses_randomness(batch, generator):
        generator.random(1000)
        return batch

    plain, other = (take(poisson_batches(dataset(a), 10, 0, 32), 5) for a in
                    (lambda batch, generator: batch, uses_randomness))  # fmt: skip
    for a, b in zip(plain, other, strict=True):
        np.testing.assert_array_equal(a["image"], b["image"])


def test_an_overflowing_batch_has_a_uniform_subset():
    steps, rows = 1500, 6
    counts = np.zeros(EXAMPLES)
    for batch in take(poisson_batches(dataset(), 20, 0, rows), steps):
        assert batch["image"].shape == (rows, 3)
        counts[sampled_examples(batch)] += 1
    assert counts.sum() == steps * rows  # fewer than 6 of 40 are sampled once in a million steps
    fraction = rows / EXAMPLES
    assert np.abs(counts / steps - fraction).max() < 4.5 * np.sqrt(
        fraction * (1 - fraction) / steps
    )


def test_an_empty_batch_is_all_padding():
    batches = take(poisson_batches(dataset(examples=3), 0.3, 0, 3), 20)
    sizes = [b["weight"].sum() for b in batches]
    assert min(sizes) == 0
    assert max(sizes) > 0


@pytest.mark.parametrize(("examples", "batch_size"), [(1437, 512), (60000, 256), (100, 1)])
def test_padded_batch_size_is_the_smallest_for_the_overflow_probability(examples, batch_size):
    rows = padded_batch_size(examples, batch_size)
    probability = batch_size / examples
    assert binom.sf(rows, examples, probability) <= OVERFLOW_PROBABILITY
    assert binom.sf(rows - 1, examples, probability) > OVERFLOW_PROBABILITY


def test_padded_batch_size_is_rounded_up_to_a_multiple():
    assert padded_batch_size(1437, 512, 16) % 16 == 0
    assert (
        padded_batch_size(1437, 512)
        <= padded_batch_size(1437, 512, 16)
        < padded_batch_size(1437, 512) + 16
    )
    assert padded_batch_size(100, 100) == 100
