"""Batches of a data source, and what it says of mistakes."""

import pytest

from train.data import training_batches
from train.errors import UserError


def seen(dataset, n=6, size=4, seed=0, after=None):
    """``n`` training batches, from a position on, and what gives those that follow."""
    batches = training_batches(dataset, size, seed)
    if after is not None:
        batches.set_state(after)
    return [next(batches) for _ in range(n)], batches


def refusal(load, *args, **options):
    """The one line that is said of a mistake."""
    with pytest.raises(UserError) as caught:
        load(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
