"""Where examples come from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from train.config.section import Count, Section, Seed


@dataclass(frozen=True)
class Digits(Section):
    """Scikit-learn's bundled handwritten digits: 1,797 grey images of 8 x 8 pixels."""

    source: Literal["digits"] = "digits"
    """Where the examples come from."""
    batch_size: Count = 64
    """Examples a training step."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of the images that is held out for testing, the same of every class."""
    split_seed: Seed = 0
    """Which images are held out."""
    max_shift: Annotated[int, Ge(0), Lt(8)] = 1
    """Training images are moved by up to that many pixels in each direction."""


@dataclass(frozen=True)
class Synthetic(Section):
    """Random images with random labels, for measuring: there is nothing to learn."""

    source: Literal["synthetic"] = "synthetic"
    """Where the examples come from."""
    batch_size: Count = 32
    """Examples a training step."""
    image_size: Count = 224
    """Height and width."""
    channels: Count = 3
    """Of each image."""
    classes: Count = 1000
    """How many labels there are."""
    examples: Count = 256
    """Training images; a quarter as many are held out."""


@dataclass(frozen=True)
class TextFile(Section):
    """A text, to be continued: each token is learned from those before it."""

    source: Literal["text_file"] = "text_file"
    """Where the examples come from."""
    path: str | None = None
    """A text file; without one, the sources of Python's standard library on this machine."""
    tokenizer: str | None = None
    """A tokenizer.json of the tokenizers library; without one, tokens are bytes."""
    batch_size: Count = 12
    """Rows a training step."""
    context: Annotated[int, Ge(2)] = 64
    """Tokens of a row."""
    separator: Annotated[str, MinLen(1)] | None = None
    """What stands between documents; then no row crosses from one to the next."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Share of the text, or of its documents, that is held out for testing."""
    split_seed: Seed | None = None
    """Which part is held out, drawn; without it, the last."""
