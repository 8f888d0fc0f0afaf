"""Rows of tokens from a text file, for language models."""

import functools
import os
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Gt, Lt, MinLen
from typing_extensions import override

from train.config.section import Count, Seed
from train.data import Arrays, Dataset, storage
from train.data.columns import decode_text, number_users
from train.data.packing import gather
from train.data.placeholder import Placeholder, zero_tokens
from train.data.records import JSON_LINES, SEPARATORS
from train.data.splits import describe_common, hold_out
from train.data.text import Text
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.errors import UserError


@dataclass(frozen=True)
class TextFile(Text):
    """A text file for a language model."""

    source: Literal["text_file"] = "text_file"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str | None = None
    """Text file; None reads the sources of Python's standard library."""
    batch_size: Count = 12
    """Batch size, in rows."""
    user: Literal["document"] | None = None
    """Set to document for privacy per document; needs separator."""
    examples_per_user: Count | None = None
    """Largest number of rows of a user per step; needed with user."""
    separator: Annotated[str, MinLen(1)] | None = None
    """Text between documents; rows then do not cross document boundaries."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of the text, or of its documents, that is held out for testing."""
    split_seed: Seed | None = None
    """Random seed of the held-out part; None holds out the end."""

    def load(self, *, private: bool = False) -> Dataset:
        """Cut a text into rows of ``tokens`` [N, context + 1].

        All tokens of a row but the last are inputs, and all but the first are targets.

        Without a separator, training rows are one context apart, and each batch shifts them by a
        random offset. With a separator, rows do not cross document boundaries and have a
        ``length``, the number of inputs; tokens beyond are 0. Test rows have a ``length`` in both
        cases.

        Raises:
          UserError: if the text is unreadable, or too short for one row in each split; or for a
            vocabulary that is smaller than the tokenizer's.
        """
        tokens, documents, count_bytes, notes = _read_documents(self)
        train, test = _split_documents(tokens, documents, self)
        context = self.context
        if self.user is not None and self.separator is None:
            raise UserError("data.user: document needs data.separator, the text between documents")
        start, length, slack, document = _cut_rows(
            train, context, partial=self.separator is not None
        )
        test_start, test_length, *_ = _cut_rows(test, context, partial=True)
        if not len(start) or not len(test_start):
            raise UserError(
                f"data.path: {_describe_source(self)} is too short: {len(tokens)} tokens, "
                f"{sum(map(len, train))} for training and {sum(map(len, test))} for testing; a row "
                f"needs data.context + 1 = {context + 1} tokens"
            )

        if self.separator is None:

            def augment(batch: Arrays, generator: np.random.Generator) -> Arrays:
                shifted = batch["start"] + generator.integers(0, batch["slack"] + 1)
                return {"tokens": tokens[shifted[:, None] + np.arange(context + 1)]}

            # Shifted rows share tokens with their neighbors, but privacy is per row: removing a row
            # must remove its tokens.
            rows: Arrays = {"start": start, "slack": np.zeros_like(slack) if private else slack}
        else:

            def augment(batch: Arrays, generator: np.random.Generator) -> Arrays:
                del generator
                return _gather(tokens, batch["start"], batch["length"], context)

            rows = {"start": start, "length": length}

        if self.separator:
            spans = ([slice(d.start, d.stop) for d in split] for split in (train, test))
            keys = [[(f"the one at token {d.start}", bytes(tokens[d])) for d in s] for s in spans]
            notes += describe_common(keys[0], keys[1], "documents")

        def tokens_per_byte() -> float | None:
            num_bytes = count_bytes(test)
            return int(test_length.sum()) / num_bytes if num_bytes else None

        weight = (test_length / context).astype(np.float32)  # every token counts the same
        return Dataset(
            train=rows,
            test=_gather(tokens, test_start, test_length, context) | {"weight": weight},
            classes=(),
            augment=augment,
            contents=(tokens,),
            users=None if self.user is None else number_users(document),
            tokens_per_byte=tokens_per_byte,
            notes=notes,
        )

    @override
    def placeholder(self) -> Placeholder | None:
        length = {"length": np.full(1, self.context, np.int32)}
        return zero_tokens(self, length if self.separator else {}, length)

    @property
    @override
    def longest_row(self) -> int | None:
        return self.context if self.separator else None


load = TextFile.load  # a name that scripts call


class _Rows(NamedTuple):
    """Rows of a text: first token, number of inputs, largest random shift and span of each."""

    start: np.ndarray
    length: np.ndarray
    slack: np.ndarray
    span: np.ndarray


def _cut_rows(spans: list[range], context: int, *, partial: bool) -> _Rows:
    """Cut spans of tokens into rows; ``partial`` keeps the shorter row at each span's end."""
    first, last = np.array([(s.start, s.stop - 1) for s in spans], np.int64).reshape(-1, 2).T
    inputs = last - first  # the last token is only a target
    counts = np.maximum(-(-inputs // context) if partial else inputs // context, 0)
    number = np.repeat(np.arange(len(spans)), counts)
    place = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = first[number] + context * place
    left = last[number] - start
    slack = np.minimum(left, 2 * context - 1) - context
    return _Rows(start, np.minimum(left, context).astype(np.int32), slack, number)


def _gather(tokens: np.ndarray, start: np.ndarray, length: np.ndarray, context: int) -> Arrays:
    return {"tokens": gather(tokens, start, length, context)[0], "length": length}


def _read_documents(
    config: TextFile,
) -> tuple[np.ndarray, list[range], Callable[[list[range]], int | None], tuple[str, ...]]:
    """Return all tokens, the span of each document, a counter of bytes of spans, and notes."""
    tokenizer = load_tokenizer(config)
    text = _read_text(config)
    if config.separator and config.separator not in text:
        raise UserError(
            f"data.separator: {config.separator!r} is not in {_describe_source(config)}; for line "
            "breaks give $'\\n\\n' in a shell"
        )
    documents = text.split(config.separator) if config.separator else [text]
    encoded = [tokenizer.encode(document) for document in documents if document]
    ends = np.cumsum([0] + [len(e) for e in encoded])
    spans = [range(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    tokens = np.concatenate([np.zeros(0, np.uint8), *encoded])
    foreign = len(re.findall("[\0\udc80-\udcff]", text))
    note = f"{foreign:,} bytes of {config.path} are NUL or not UTF-8, and stay as they are"
    count_bytes = functools.partial(_count_bytes, config, tokenizer, tokens, spans)
    return tokens, spans, count_bytes, (note,) * bool(foreign)


def _count_bytes(
    config: TextFile,
    tokenizer: Tokenizer,
    tokens: np.ndarray,
    documents: list[range],
    parts: list[range],
) -> int | None:
    """Count the UTF-8 bytes of parts but their first tokens; None if these do not decode to it."""
    if tokenizer.folder is None:
        return sum(len(part) - 1 for part in parts if part)
    text = _read_text(config)  # again, because the text was not kept in memory
    texts = text.split(config.separator) if config.separator else [text]
    by_start = dict(zip([d.start for d in documents], filter(None, texts), strict=True))
    total = 0
    for part in parts:
        decoded = tokenizer.decode(tokens[part.start : part.stop])
        if decoded not in by_start.get(part.start, text):
            return None
        first = tokenizer.decode(tokens[part.start : part.start + 1])
        total += len(decoded.encode()) - len(first.encode())
    return total


def _split_documents(
    tokens: np.ndarray, documents: list[range], config: TextFile
) -> tuple[list[range], list[range]]:
    n = len(documents) if config.separator else sum(map(len, documents))
    num_test = round(config.test_fraction * n)
    if config.separator:
        is_test = np.arange(n) >= n - num_test
        if config.split_seed is not None:
            contents = (tokens[d.start : d.stop].tobytes().hex() for d in documents)
            is_test = hold_out(config, contents)
        splits: tuple[list[range], list[range]] = [], []
        for document, held_out in zip(documents, is_test, strict=True):
            splits[bool(held_out)].append(document)
        return splits
    first = n - num_test
    if config.split_seed is not None:
        first = int(np.random.default_rng(config.split_seed).integers(0, n - num_test + 1))
    around = range(0, first), range(first + num_test, n)
    return [span for span in around if span], [range(first, first + num_test)]


def _read_text(config: TextFile) -> str:
    """Read the text; bytes that are not UTF-8 become surrogates."""
    with storage.reported("data.path", _describe_source(config)):
        if config.path is not None:
            if os.path.isdir(config.path):
                raise UserError(f"data.path: {config.path} is a folder; give one text file")
            if config.path.lower().removesuffix(".gz").endswith((*JSON_LINES, *SEPARATORS)):
                raise UserError(
                    f"data.path: {config.path} has records, not text alone; give data.source "
                    "chat_file, which reads their fields"
                )
            with storage.open_file(config.path) as file:
                return decode_text(file.read(), config.path, "data.path", "surrogateescape")
        # The order is the same on all machines; the text depends on the version of Python.
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        return "\n".join(s.read_text("utf-8", "surrogateescape") for s in sources)


def _describe_source(config: TextFile) -> str:
    return config.path if config.path is not None else "the Python standard library's source"
