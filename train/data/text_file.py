"""A text, cut into rows of tokens: each token is learned from those before it in its row."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.config import TextFile
from train.data import Arrays, Dataset
from train.data.tokenizer import tokens_of
from train.errors import UserError


def load(config: TextFile) -> Dataset:
    """Rows of ``tokens`` [N, context + 1]: all but the last are read, all but the first told.

    Without a separator, training rows lie a context apart, each moved on by less than
    that, anew every time. With one, no row crosses from one document to the next, and
    rows have a ``length``, the tokens that are read; what follows is 0. So do test rows.

    Raises:
      UserError: if the text cannot be read, or is too short for a row in each split.
    """
    tokens, documents = _documents(config)
    train, test = _split(documents, config)
    context = config.context
    start, length, slack = _rows(train, context, ragged=config.separator is not None)
    at, real, _ = _rows(test, context, ragged=True)
    if not len(start) or not len(at):
        raise UserError(
            f"data.path: {_name(config)} is too short: {len(tokens)} tokens, of which "
            f"{sum(map(len, train))} to train on and {sum(map(len, test))} to test on; a row has "
            f"data.context {context} tokens and one more"
        )

    if config.separator is None:

        def augment(batch: Arrays, generator: np.random.Generator) -> Arrays:
            moved = batch["start"] + generator.integers(0, batch["slack"] + 1)
            return {"tokens": tokens[moved[:, None] + np.arange(context + 1)]}

        rows_to_train: Arrays = {"start": start, "slack": slack}
    else:

        def augment(batch: Arrays, generator: np.random.Generator) -> Arrays:
            del generator
            return _gathered(tokens, batch["start"], batch["length"], context)

        rows_to_train = {"start": start, "length": length}
    # Every token counts the same.
    weight = {"weight": (real / context).astype(np.float32)}
    return Dataset(
        train=rows_to_train,
        test=_gathered(tokens, at, real, context) | weight,
        classes=(),
        augment=augment,
    )


class _Rows(NamedTuple):
    """Where rows begin, how many tokens they read, and by how many each may be moved on."""

    start: np.ndarray
    length: np.ndarray
    slack: np.ndarray


def _rows(spans: list[range], context: int, *, ragged: bool) -> _Rows:
    """Rows of spans of tokens, a context apart; whether the last of each may be shorter."""
    rows = [_Rows(*[np.zeros(0, np.int64)] * 3)]
    for span in spans:
        reading = len(span) - 1  # the last token is only told
        n = max(-(-reading // context) if ragged else reading // context, 0)
        start = span.start + context * np.arange(n)
        left = span.stop - 1 - start
        rows.append(
            _Rows(start, np.minimum(left, context), np.minimum(left, 2 * context - 1) - context)
        )
    start, length, slack = map(np.concatenate, zip(*rows, strict=True))
    return _Rows(start, length.astype(np.int32), slack)


def _gathered(tokens: np.ndarray, start: np.ndarray, length: np.ndarray, context: int) -> Arrays:
    """``tokens`` [N, context + 1], 0 beyond each row's end, and ``length`` [N]."""
    offsets = np.arange(context + 1)
    inside = offsets <= length[:, None]
    at = np.minimum(start[:, None] + offsets, len(tokens) - 1)
    return {"tokens": np.where(inside, tokens[at], 0).astype(tokens.dtype), "length": length}


def _documents(config: TextFile) -> tuple[np.ndarray, list[range]]:
    """All tokens, and where each document lies."""
    vocabulary = tokens_of(config)
    text = _text(config)
    pieces = text.split(config.separator) if config.separator else [text]
    encoded = [vocabulary.encode(piece) for piece in pieces if piece]
    ends = np.cumsum([0] + [len(e) for e in encoded])
    spans = [range(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    return np.concatenate([np.zeros(0, np.uint8), *encoded]), spans


def _split(documents: list[range], config: TextFile) -> tuple[list[range], list[range]]:
    """Spans to train and to test on: whole documents, or the one text's parts."""
    generator = None if config.split_seed is None else np.random.default_rng(config.split_seed)
    n = len(documents) if config.separator else sum(map(len, documents))
    held_out = round(config.test_fraction * n)
    if config.separator:
        order = np.arange(n) if generator is None else generator.permutation(n)
        chosen = [documents[i] for i in order]
        return chosen[: n - held_out], chosen[n - held_out :]
    first = n - held_out if generator is None else int(generator.integers(0, n - held_out + 1))
    parts = range(0, first), range(first + held_out, n)
    return [part for part in parts if part], [range(first, first + held_out)]


def _text(config: TextFile) -> str:
    """The text; bytes that are no UTF-8 survive as surrogates."""
    try:
        if config.path is not None:
            return Path(config.path).read_bytes().decode("utf-8", "surrogateescape")
        # The order is the same everywhere, the text follows the version of Python.
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        return "\n".join(s.read_text("utf-8", "surrogateescape") for s in sources)
    except OSError as error:
        raise UserError(
            f"data.path: cannot read {_name(config)}: {error.strerror}; give a text file"
        ) from error


def _name(config: TextFile) -> str:
    return config.path if config.path is not None else "the Python standard library's source"
