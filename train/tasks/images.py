"""Sources of labelled images."""

from collections.abc import Callable
from typing import Any

from train.config import Config, Digits, Synthetic
from train.data import Dataset, digits, synthetic
from train.errors import UserError

_SOURCES: dict[type, Callable[[Any], Dataset]] = {Digits: digits.load, Synthetic: synthetic.load}


def load(config: Config) -> Dataset:
    """Images [N, H, W, C] with a label each.

    Raises:
      UserError: if the config's data are no images.
    """
    if type(config.data) not in _SOURCES:
        raise UserError(
            f"data.source: {config.data.source} has no images, which the network "
            f"{config.model.name} takes; give data.source digits or synthetic"
        )
    return _SOURCES[type(config.data)](config.data)
