"""Text as numbers: bytes, or what a file of the tokenizers library makes of it."""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.config import TextFile
from train.errors import UserError


class Tokens(NamedTuple):
    """A vocabulary.

    Attributes:
      size: one more than the largest token.
      encode: text -> tokens [T], of the smallest unsigned dtype that holds them all.
      prompt: the same of a text that is to go on, without what ends one.
      decode: tokens -> text; bytes that are no text come out as U+FFFD.
    """

    size: int
    encode: Callable[[str], np.ndarray]
    prompt: Callable[[str], np.ndarray]
    decode: Callable[[Iterable[int]], str]


def tokens_of(config: TextFile) -> Tokens:
    """The vocabulary that a config names.

    Raises:
      UserError: if its file is missing or is none of a tokenizer, or the library is
        not installed.
    """
    if config.tokenizer is None:
        return Tokens(256, _encode_bytes, _encode_bytes, _decode_bytes)
    path = Path(config.tokenizer)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError(
            "data.tokenizer: needs the tokenizers library; pip install 'fnet-jax[text]'"
        ) from None
    if not path.is_file():
        raise UserError(f"data.tokenizer: no file {path}; it is a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"data.tokenizer: cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Not their number: a vocabulary may leave numbers out.
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    dtype = np.min_scalar_type(max(size - 1, 0))
    model = json.loads(tokenizer.to_str())["model"]  # has what a Unigram hides
    unknown = model.get("unk_id")
    if unknown is None:
        unknown = tokenizer.token_to_id(model.get("unk_token") or "")

    def encode(text: str, *, ended: bool = True) -> np.ndarray:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"{path} reads UTF-8 alone, which the text is not, at symbol {error.start:,}; "
                "convert it, or leave data.tokenizer out"
            ) from None
        try:
            encoding = tokenizer.encode(text)
        except Exception as error:  # no token for the unknown where the model wants one
            raise UserError(f"{path} cannot read {_shortened(text)!r}: {error}") from error
        ids = np.array(encoding.ids, np.int64)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        # A vocabulary without a token for the unknown drops it: what no token covers is lost.
        known = ids != unknown
        covered = np.zeros(len(text) + 1, np.int64)
        np.add.at(covered, starts[known], 1)
        np.add.at(covered, ends[known], -1)
        missing = np.flatnonzero(np.cumsum(covered)[:-1] == 0)
        # Which they are is not said: offsets after a dropped symbol are the library's guess.
        if not all(text[i].isspace() for i in missing):
            raise UserError(f"{path} has no token for some of {_shortened(text)!r}")
        if not ended:  # a template's tokens are marked, and may stand before the text as well
            of_text = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
            ids = ids[: np.max(of_text, initial=-1) + 1]
        return ids.astype(dtype)

    prompt = functools.partial(encode, ended=False)
    return Tokens(size, encode, prompt, lambda ids: tokenizer.decode([int(i) for i in ids]))


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)


def _decode_bytes(ids: Iterable[int]) -> str:
    return bytes(int(i) for i in ids).decode("utf-8", "replace")


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
