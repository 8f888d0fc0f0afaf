"""Batches and error messages of data sources."""

import chex
import pytest

from fnet.privacy import PoissonSampling
from train.data import num_examples, training_batches
from train.data.poisson import poisson_batches
from train.errors import UserError


def take_batches(dataset, n=6, size=4, seed=0, after=None):
    """Take ``n`` training batches, after a saved position if given; return them and the iterator."""
    batches = training_batches(dataset, size, seed)
    if after is not None:
        batches.set_state(after)
    return [next(batches) for _ in range(n)], batches


def sampled_counts(dataset, image, n=12):
    """Count the sampled examples in each of ``n`` padded Poisson batches, 1 on average."""
    sampling = PoissonSampling(num_examples(dataset.train), 1, multiple=8)
    batches = poisson_batches(dataset, sampling, 0)
    drawn = [next(batches) for _ in range(n)]
    chex.assert_shape([batch["image"] for batch in drawn], (sampling.rows, *image))
    return [batch["weight"].sum() for batch in drawn]


def error_message(load, *args, **options):
    """Return the message of the UserError that ``load`` raises, which must be one line."""
    with pytest.raises(UserError) as caught:
        load(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
