"""Tokenizers: bytes, or a tokenizer.json of Hugging Face's tokenizers library."""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.config import TextFile
from train.errors import UserError


class Tokenizer(NamedTuple):
    """Conversion between text and tokens.

    Attributes:
      vocab_size: one more than the largest token.
      encode: text -> tokens [T], in the smallest unsigned dtype that holds all tokens.
      encode_prompt: as ``encode``, without the tokens that end a text.
      decode: tokens -> text; invalid bytes become U+FFFD.
    """

    vocab_size: int
    encode: Callable[[str], np.ndarray]
    encode_prompt: Callable[[str], np.ndarray]
    decode: Callable[[Iterable[int]], str]


def load_tokenizer(config: TextFile) -> Tokenizer:
    """Load the tokenizer of a config.

    Raises:
      UserError: if its file is missing or invalid, or the tokenizers library is not installed.
    """
    if config.tokenizer is None:
        return Tokenizer(256, _encode_bytes, _encode_bytes, _decode_bytes)
    path = Path(config.tokenizer)
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "data.tokenizer: needs the tokenizers library; pip install 'fnet-jax[text]'"
        ) from None
    if not path.is_file():
        raise UserError(f"data.tokenizer: no file {path}; expected a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise UserError(f"data.tokenizer: cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Not the number of tokens, because a vocabulary can skip numbers.
    vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
    dtype = np.min_scalar_type(max(vocab_size - 1, 0))
    model = json.loads(tokenizer.to_str())["model"]  # the only access to a Unigram's unk_id
    unknown = model.get("unk_id")
    if unknown is None:
        unknown = tokenizer.token_to_id(model.get("unk_token") or "")

    def encode(text: str, *, with_end: bool = True) -> np.ndarray:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"{path} reads only UTF-8, and symbol {error.start:,} of the text is not; convert "
                "the text, or omit data.tokenizer"
            ) from None
        try:
            encoding = tokenizer.encode(text)
        except Exception as error:  # a model that has no token for unknown symbols
            raise UserError(f"{path} cannot encode {_shorten(text)!r}: {error}") from error
        ids = np.array(encoding.ids, np.int64)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        # A vocabulary without an unknown token drops unknown symbols silently.
        known = ids != unknown
        covered = np.zeros(len(text) + 1, np.int64)
        np.add.at(covered, starts[known], 1)
        np.add.at(covered, ends[known], -1)
        missing = np.flatnonzero(np.cumsum(covered)[:-1] == 0)
        # The message does not name them, because offsets after a dropped symbol are unreliable.
        if not all(text[i].isspace() for i in missing):
            raise UserError(f"{path} has no token for some of {_shorten(text)!r}")
        if not with_end:  # special tokens after the text, but not those before it
            from_text = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
            ids = ids[: np.max(from_text, initial=-1) + 1]
        return ids.astype(dtype)

    return Tokenizer(
        vocab_size,
        encode,
        functools.partial(encode, with_end=False),
        lambda ids: tokenizer.decode([int(i) for i in ids]),
    )


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)


def _decode_bytes(ids: Iterable[int]) -> str:
    # A vocabulary that is larger than the tokenizer's has tokens that stand for nothing.
    return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
