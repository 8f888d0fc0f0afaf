"""Batches of a data source, and what it says of mistakes."""

import chex
import pytest

from train.data import training_batches
from train.data.poisson import poisson_batches
from train.errors import UserError


def seen(dataset, n=6, size=4, seed=0, after=None):
    """``n`` training batches, from a position on, and what gives those that follow."""
    batches = training_batches(dataset, size, seed)
    if after is not None:
        batches.set_state(after)
    return [next(batches) for _ in range(n)], batches


def poisson_weights(dataset, image, n=12):
    """How many examples count in each of ``n`` batches of 8 rows, of which 1 is expected."""
    batches = poisson_batches(dataset, 1, 0, 8)
    drawn = [next(batches) for _ in range(n)]
    chex.assert_shape([batch["image"] for batch in drawn], (8, *image))
    return [batch["weight"].sum() for batch in drawn]


def refusal(load, *args, **options):
    """The one line that is said of a mistake."""
    with pytest.raises(UserError) as caught:
        load(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
