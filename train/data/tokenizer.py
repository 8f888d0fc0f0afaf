"""Tokenizers: bytes, or a tokenizer.json of Hugging Face's tokenizers library."""

import functools
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train import limits
from train.data.chat import special_tokens
from train.data.text import Text
from train.errors import UserError


class Pieces(NamedTuple):
    """Tokens of a text, and the part of the text that each one stands for.

    Attributes:
      ids: Tokens [T], in the smallest unsigned dtype that holds all tokens.
      start, end: First character of each token, and the one after its last, int64 [T].
    """

    ids: np.ndarray
    start: np.ndarray
    end: np.ndarray


class Tokenizer(NamedTuple):
    """Conversion between text and tokens.

    Attributes:
      vocab_size: one more than the largest token.
      text_size: the same without special tokens, such as one that stands for an image.
      encode: text -> tokens [T], in the smallest unsigned dtype that holds all tokens.
      encode_prompt: as ``encode``, without the tokens that end a text.
      decode: tokens -> text; invalid bytes become U+FFFD.
      encode_pieces: texts -> `Pieces` of each one, without the tokens that begin or end a text.
        Special tokens that a text itself contains, such as ``</s>``, are encoded as such.
      start_tokens: () -> tokens that begin a text.
      end_token: () -> token that ends a text, ``eos_token`` of tokenizer_config.json; or None.
      folder: folder of the tokenizer's files; None for bytes.
    """

    vocab_size: int
    text_size: int
    encode: Callable[[str], np.ndarray]
    encode_prompt: Callable[[str], np.ndarray]
    decode: Callable[[Iterable[int]], str]
    encode_pieces: Callable[[Sequence[str]], list[Pieces]]
    start_tokens: Callable[[], np.ndarray]
    end_token: Callable[[], int | None]
    folder: Path | None = None


def load_tokenizer(config: Text) -> Tokenizer:
    """Load the tokenizer of a config.

    Raises:
      UserError: if its file is missing or invalid, the tokenizers library is not installed, or
        the config's vocabulary is smaller than the tokenizer's. Special tokens beyond it are
        refused when a text has one.
    """
    tokenizer, vocabulary = _load(config), config.vocabulary
    if vocabulary is not None and vocabulary < tokenizer.text_size:
        raise UserError(
            f"data.tokenizer: has {tokenizer.text_size:,} tokens of text, but the vocabulary has "
            f"{vocabulary:,}; give the model's own tokenizer, or a larger data.vocabulary"
        )
    return tokenizer


def _load(config: Text) -> Tokenizer:
    if config.tokenizer is None:
        return Tokenizer(
            256,
            256,
            _encode_bytes,
            _encode_bytes,
            _decode_bytes,
            lambda texts: [_split_bytes(text) for text in texts],
            lambda: np.zeros(0, np.uint8),
            lambda: None,
        )
    path = Path(config.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if importlib.util.find_spec("tokenizers") is None:
        raise UserError(
            "data.tokenizer: needs the tokenizers library; pip install 'fnet-jax[text]'"
        )
    if not path.is_file():
        raise UserError(f"data.tokenizer: no file {path}; expected a tokenizer.json")
    num_bytes = path.stat().st_size
    limits.JSON_FILE.check(num_bytes, f"data.tokenizer: {path}")

    def run(function: str, *args: Any, size: int = 0) -> Any:
        """Call a function of this module that needs the library, which reads what others wrote."""
        name = f"train.data.tokenizer:{function}"
        # A vocabulary takes 17 to 40 times the memory of its file, much less than a text.
        return limits.run(name, str(path.absolute()), *args, size=num_bytes // 32 + size)

    try:
        vocab_size, text_size, unknown = run("describe")
    except limits.CodeError as error:
        raise UserError(f"data.tokenizer: cannot read {path}: {error}") from error
    limits.VOCABULARY.check(vocab_size, f"data.tokenizer: {path}")
    dtype = np.min_scalar_type(max(vocab_size - 1, 0))

    def encodings(texts: Sequence[str], *, is_whole: bool) -> list[Encoding]:
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{path} reads only UTF-8, and symbol {error.start:,} of the text is not; "
                    "convert the text, or omit data.tokenizer"
                ) from None
        try:
            found: list[Encoding] = run("encode", texts, is_whole, size=sum(map(len, texts)))
        except limits.CodeError as error:  # a model that has no token for unknown symbols
            if len(texts) > 1 and not isinstance(error, limits.CodeLimitError):
                # Which of them it is, is found by encoding each alone.
                return [encodings([text], is_whole=is_whole)[0] for text in texts]
            raise UserError(f"{path} cannot encode {_shorten(texts[0])!r}: {error}") from error
        return found

    def as_pieces(encoding: Encoding, text: str) -> Pieces:
        """Convert the tokens of a text, of which each symbol must have one."""
        ids, (starts, ends) = encoding.ids, encoding.offsets
        # A vocabulary without an unknown token drops unknown symbols silently.
        known = ids != (-1 if unknown is None else unknown)
        covered = np.zeros(len(text) + 1, np.int64)
        np.add.at(covered, starts[known], 1)
        np.add.at(covered, ends[known], -1)
        missing = np.flatnonzero(np.cumsum(covered)[:-1] == 0)
        # The message does not name them, because offsets after a dropped symbol are unreliable.
        if not all(text[i].isspace() for i in missing):
            raise UserError(f"{path} has no token for some of {_shorten(text)!r}")
        return Pieces(ids.astype(dtype), starts, ends)

    def check(ids: np.ndarray) -> np.ndarray:
        vocabulary, largest = config.vocabulary, ids.max(initial=0)
        if vocabulary is not None and largest >= vocabulary:
            raise UserError(
                f"the text has the special token {largest}, which a vocabulary of "
                f"{vocabulary:,} does not have; remove it from the text"
            )
        return ids

    def encode(text: str, *, with_end: bool = True) -> np.ndarray:
        (encoding,) = encodings([text], is_whole=False)
        ids = as_pieces(encoding, text).ids
        if not with_end:  # special tokens after the text, but not those before it
            from_text = np.flatnonzero(~encoding.is_special)
            ids = ids[: np.max(from_text, initial=-1) + 1]
        return check(ids)

    def encode_pieces(texts: Sequence[str]) -> list[Pieces]:
        found = encodings(list(texts), is_whole=True)
        pieces = [as_pieces(e, text) for e, text in zip(found, texts, strict=True)]
        for own in pieces:
            check(own.ids)
        return pieces

    def decode(ids: Iterable[int]) -> str:
        try:
            text: str = run("call", "decode", [int(i) for i in ids])
        except limits.CodeError as error:
            raise UserError(f"{path} cannot decode its tokens: {error}") from error
        return text

    def end_token() -> int | None:
        name = special_tokens(path.parent).get("eos_token")
        token: int | None = None if name is None else run("call", "token_to_id", name)
        if name is not None and token is None:
            raise UserError(
                f"{path} has no token {name!r}, which tokenizer_config.json gives as eos_token"
            )
        return token

    return Tokenizer(
        vocab_size,
        text_size,
        encode,
        functools.partial(encode, with_end=False),
        decode,
        encode_pieces,
        functools.cache(lambda: run("find_start_tokens").astype(dtype)),
        functools.cache(end_token),
        path.parent,
    )


# ---- The library, in the process for what others wrote (`train.limits.run`).


class Encoding(NamedTuple):
    """Tokens of a text as the library gives them.

    Attributes:
      ids: Tokens int64 [T].
      offsets: First character of each token, and the one after its last, int64 [2, T].
      is_special: Whether the library added a token, bool [T].
    """

    ids: np.ndarray
    offsets: np.ndarray
    is_special: np.ndarray


@functools.lru_cache(maxsize=4)
def _library(path: str, stamp: tuple[int, int]) -> tuple[Any, Any]:
    """Return the tokenizer of a file, and the same with offsets that include spaces."""
    del stamp
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    whole = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    whole.post_processor = tokenizers.processors.TemplateProcessing("$A", None, [])
    return tokenizer, whole


def _load_library(path: str) -> tuple[Any, Any]:
    status = os.stat(path)
    return _library(path, (status.st_size, status.st_mtime_ns))


def describe(path: str) -> tuple[int, int, int | None]:
    """Return the sizes of the vocabulary with and without special tokens, and the unknown token."""
    tokenizer, _ = _load_library(path)
    # Not the number of tokens, because a vocabulary can skip numbers.
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = set(tokenizer.get_vocab().values())
    vocab_size, text_size = (max(i, default=-1) + 1 for i in (ids, ids - special))
    model = json.loads(tokenizer.to_str())["model"]  # the only access to a Unigram's unk_id
    unknown = model.get("unk_id")
    if unknown is None:
        unknown = tokenizer.token_to_id(model.get("unk_token") or "")
    return vocab_size, text_size, unknown


def encode(path: str, texts: Sequence[str], is_whole: bool) -> list[Encoding]:
    """Encode texts; whole ones have no special tokens, and offsets that include spaces."""
    tokenizer = _load_library(path)[is_whole]
    return [
        Encoding(
            np.array(e.ids, np.int64),
            np.array(e.offsets, np.int64).reshape(-1, 2).T,
            np.array(e.special_tokens_mask, bool),
        )
        for e in tokenizer.encode_batch(texts, add_special_tokens=not is_whole)  # on all cores
    ]


def call(path: str, method: str, argument: Any) -> Any:
    """Call a method of the library's tokenizer."""
    return getattr(_load_library(path)[0], method)(argument)


def find_start_tokens(path: str) -> np.ndarray:
    """Return the tokens that begin each text."""
    tokenizer, whole = _load_library(path)
    # Any text will do that has a token.
    sample = next((t for t in ("a", *tokenizer.get_vocab()) if whole.encode(t).ids), "")
    encoding = tokenizer.encode(sample)
    count = np.cumprod(np.array(encoding.special_tokens_mask, np.int64)).sum()
    return np.array(encoding.ids[:count], np.int64)


def _encode_bytes(text: str) -> np.ndarray:
    try:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
    except UnicodeEncodeError as error:
        raise UserError(
            f"symbol {error.start:,} of the text, {text[error.start]!r}, is half of a surrogate "
            "pair; repair or remove it"
        ) from None


def _split_bytes(text: str) -> Pieces:
    ids = _encode_bytes(text)
    sizes = [len(c.encode("utf-8", "surrogateescape")) for c in text]
    start = np.repeat(np.arange(len(text)), sizes)
    return Pieces(ids, start, start + 1)


def _decode_bytes(ids: Iterable[int]) -> str:
    # A vocabulary that is larger than the tokenizer's has tokens that stand for nothing.
    return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
