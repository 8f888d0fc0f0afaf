"""Poisson sampling: probabilities, padding, and resuming."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy import batch_selection as of
from scipy.stats import binom

from fnet.privacy import PoissonSampling, Sampling
from fnet.privacy.sampling import OVERFLOW_PROBABILITY
from train.data import Dataset, num_examples
from train.data.poisson import poisson_batches

EXAMPLES = 40


def dataset(augment=lambda batch, generator: batch, examples=EXAMPLES):
    train = {"image": np.arange(1, examples + 1, dtype=np.float32)[:, None] * np.ones(3, "f")}
    return Dataset(train=train, test=train, classes=("0",), augment=augment)


def sampled_examples(batch):
    return batch["image"][batch["weight"] == 1, 0].astype(int) - 1


def batches_of(dataset, batch_size, seed=0):
    return poisson_batches(dataset, PoissonSampling(num_examples(dataset.train), batch_size), seed)


def take(batches, n):
    return [next(batches) for _ in range(n)]


def test_samples_each_example_independently_with_the_same_probability():
    steps, probability = 2000, 10 / EXAMPLES
    batches = batches_of(dataset(), 10, seed=1)
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


@pytest.mark.parametrize(
    "selection",
    [
        of.BMinSepSampling(0.25, 400, min_sep=4),
        of.CyclicPoissonSampling(0.5, 400, cycle_length=4),
        of.BallsInBinsSampling(400, cycle_length=8),
    ],
    ids=lambda selection: type(selection).__name__,
)
def test_batches_have_the_batch_size_on_average(selection):
    draw = (sampling := Sampling(200, selection)).draws(3)
    assert np.mean([len(draw(i)) for i in range(400)]) == pytest.approx(sampling.batch_size, abs=1)


def test_samples_without_duplicates_and_pads_with_zeros_of_weight_zero():
    rows = PoissonSampling(EXAMPLES, 10).rows
    for batch in take(batches_of(dataset(), 10), 20):
        indices = sampled_examples(batch)
        assert len(set(indices)) == len(indices)
        assert batch["image"].shape == (rows, 3)
        assert batch["weight"].dtype == np.float32
        assert set(np.unique(batch["weight"])) <= {0.0, 1.0}
        assert not batch["image"][batch["weight"] == 0].any()


def test_a_batch_depends_only_on_seed_and_step():
    first, again = (take(batches_of(dataset(), 10, 7), 6) for _ in range(2))
    other = take(batches_of(dataset(), 10, 8), 6)
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a["image"], b["image"])
        assert set(sampled_examples(a)) != set(sampled_examples(c))
    assert len({tuple(sampled_examples(b)) for b in first}) == 6


def test_batches_resume_at_a_saved_position():
    def noisy(batch, generator):
        return batch | {"noise": generator.random(len(batch["image"]), np.float32)}

    batches = batches_of(dataset(noisy), 10)
    take(batches, 5)
    position = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 3)
    resumed = batches_of(dataset(noisy), 10)
    resumed.set_state(position)
    for a, b in zip(expected, take(resumed, 3), strict=True):
        for name in ("image", "noise", "weight"):
            np.testing.assert_array_equal(a[name], b[name])


def test_sampling_does_not_depend_on_the_augmentation():
    def uses_randomness(batch, generator):
        generator.random(1000)
        return batch

    plain, other = (take(batches_of(dataset(a), 10), 5) for a in
                    (lambda batch, generator: batch, uses_randomness))  # fmt: skip
    for a, b in zip(plain, other, strict=True):
        np.testing.assert_array_equal(a["image"], b["image"])


def test_steps_and_seeds_share_no_augmentation():
    seen = []

    def draws(batch, generator):
        seen.append(int(generator.integers(2**62)))
        return batch

    for seed in range(2):
        take(batches_of(dataset(draws), 10, seed), 20)
    assert len({*seen}) == len(seen) >= 40


def test_an_overflowing_batch_has_a_uniform_subset(monkeypatch):
    monkeypatch.setattr("fnet.privacy.sampling.OVERFLOW_PROBABILITY", 1 - 1e-5)
    steps, rows = 1500, PoissonSampling(EXAMPLES, 20).rows
    assert rows < 10
    counts = np.zeros(EXAMPLES)
    for batch in take(batches_of(dataset(), 20), steps):
        assert batch["image"].shape == (rows, 3)
        counts[sampled_examples(batch)] += 1
    assert counts.sum() == steps * rows
    fraction = rows / EXAMPLES
    assert np.abs(counts / steps - fraction).max() < 4.5 * np.sqrt(
        fraction * (1 - fraction) / steps
    )


def test_an_empty_batch_is_all_padding():
    batches = take(batches_of(dataset(examples=3), 0.3), 20)
    sizes = [b["weight"].sum() for b in batches]
    assert min(sizes) == 0
    assert max(sizes) > 0


@pytest.mark.parametrize(("examples", "batch_size"), [(1437, 512), (60000, 256), (100, 1)])
@pytest.mark.parametrize("bands", [1, 2])
def test_rows_are_the_fewest_for_the_overflow_probability(examples, batch_size, bands):
    rows = PoissonSampling(examples, batch_size, bands).rows
    probability = batch_size / examples
    assert binom.sf(rows, examples, probability) <= OVERFLOW_PROBABILITY
    assert binom.sf(rows - 1, examples, probability) > OVERFLOW_PROBABILITY


def test_rows_are_rounded_up_to_a_multiple():
    rows = PoissonSampling(1437, 512).rows
    rounded = PoissonSampling(1437, 512, multiple=16).rows
    assert rounded % 16 == 0
    assert rows <= rounded < rows + 16
    assert PoissonSampling(100, 100).rows == 100


def test_groups_of_equal_size_have_fewer_rows():
    split = of.PartitionType.EQUAL_SPLIT
    chosen = of.CyclicPoissonSampling(0.5, iterations=8, cycle_length=3, partition_type=split)
    rows = Sampling(99, chosen).rows
    assert rows % 2  # no multiple is the default
    assert rows == binom.isf(OVERFLOW_PROBABILITY, 33, 0.5) == 33
    assert Sampling(99, dataclasses.replace(chosen, partition_type=None)).rows > 33


def test_batch_is_padded_with_weight_zero():
    sampling = PoissonSampling(EXAMPLES, 10)
    for step in range(5):
        drawn = sampling.indices(3, step)
        indices, weights = sampling.batch(3, step)
        assert indices.shape == weights.shape == (sampling.rows,)
        assert weights.dtype == np.float32
        np.testing.assert_array_equal(indices[weights == 1], drawn)
        assert set(indices[weights == 0]) <= {0}


def test_batches_have_the_rows_of_the_arrays_and_resume():
    sampling = PoissonSampling(EXAMPLES, 10)
    arrays = {"x": np.arange(EXAMPLES), "y": jnp.arange(2 * EXAMPLES).reshape(EXAMPLES, 2)}
    batches = list(sampling.batches(arrays, seed=1, steps=4))
    for step, batch in enumerate(batches):
        indices, weights = sampling.batch(1, step)
        np.testing.assert_array_equal(batch["x"], indices)
        np.testing.assert_array_equal(batch["y"][:, 1], 2 * indices + 1)
        np.testing.assert_array_equal(batch["weight"], weights)
    (resumed,) = sampling.batches(arrays, seed=1, steps=4, start=3)
    np.testing.assert_array_equal(resumed["x"], batches[3]["x"])


def test_cyclic_sampling_draws_each_example_in_its_group_only():
    sampling, steps = PoissonSampling(EXAMPLES, 5, bands=4), 4000
    assert sampling.probability == 0.5
    joined, draw = np.zeros((steps, EXAMPLES)), sampling.draws(0)
    for step in range(steps):
        joined[step, draw(step)] = 1
    by_phase = joined.reshape(-1, 4, EXAMPLES).mean(0)
    assert ((by_phase > 0).sum(0) == 1).all()
    spread = np.sqrt(0.25 / (steps / 4))
    assert np.abs(by_phase.max(0) - 0.5).max() < 4.5 * spread


def test_groups_are_uniform_and_independent_of_the_other_examples():
    groups = np.array(
        [
            [
                i
                for step in range(3)
                for i in [step] * len(PoissonSampling(3, 1, 3).indices(s, step))
            ]
            for s in range(900)
        ]
    )  # with probability 1: how large each group is
    sizes = np.stack([(groups == g).sum(1) for g in range(3)], 1)
    # Multinomial, not an equal split: the variance of a group's size is 3 (1/3) (2/3).
    assert sizes.mean(0) == pytest.approx([1, 1, 1], abs=0.12)
    assert sizes.var(0) == pytest.approx([2 / 3] * 3, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"examples": 0, "batch_size": 1}, "examples must be >= 1, got 0"),
        ({"examples": 8, "batch_size": 0}, "batch_size must be > 0, got 0"),
        ({"examples": 8, "batch_size": 9}, "batch_size 9 needs at least 9 examples, got 8"),
        ({"examples": 8, "batch_size": 5, "bands": 2}, "2 bands needs at least 10 examples, got 8"),
        ({"examples": 8, "batch_size": 5, "bands": 0}, "bands must be >= 1, got 0"),
        ({"examples": 8, "batch_size": 5, "multiple": 0}, "multiple must be >= 1, got 0"),
    ],
)
def test_rejects_invalid_sampling(arguments, message):
    with pytest.raises(ValueError, match=message):
        PoissonSampling(**arguments)


def test_rejects_an_array_for_a_number():
    with pytest.raises(TypeError, match=r"examples must be a number, got an array of shape \(3,\)"):
        PoissonSampling(np.ones(3), 2)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(7)}, r"expected arrays of 8 rows, got shape \(7,\) for x"),
        ({"x": [0] * 8}, "expected arrays of 8 rows, got list for x"),
        ({"weight": np.zeros(8)}, "weight is the array that marks padding; rename yours"),
    ],
)
def test_rejects_arrays_that_do_not_fit(arrays, message):
    with pytest.raises(ValueError, match=message):
        next(PoissonSampling(8, 2).batches(arrays, 0, 1))


def test_rejects_arrays_without_names():
    with pytest.raises(TypeError, match=r"expected arrays by name, .* got list"):
        next(PoissonSampling(8, 2).batches([np.zeros(8)], 0, 1))
