"""Tokenizers: bytes, or a tokenizer.json of Hugging Face's tokenizers library."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
        the config's vocabulary is smaller than the tokenizer's.
    """
    tokenizer = _load(config)
    if config.vocabulary is not None and config.vocabulary < tokenizer.vocab_size:
        raise UserError(
            f"data.vocabulary: {config.vocabulary}, but the tokenizer has {tokenizer.vocab_size} "
            "tokens; give at least as many"
        )
    return tokenizer


def _load(config: Text) -> Tokenizer:
    if config.tokenizer is None:
        return Tokenizer(
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

    def check_text(text: str) -> None:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"{path} reads only UTF-8, and symbol {error.start:,} of the text is not; convert "
                "the text, or omit data.tokenizer"
            ) from None

    def as_pieces(encoding: Any, text: str) -> Pieces:
        """Convert the tokens of a text, of which each symbol must have one."""
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
        return Pieces(ids.astype(dtype), starts, ends)

    def encode_with(encoder: Any, text: str, *, add_special_tokens: bool = True) -> Any:
        check_text(text)
        try:
            return encoder.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # a model that has no token for unknown symbols
            raise UserError(f"{path} cannot encode {_shorten(text)!r}: {error}") from error

    def encode(text: str, *, with_end: bool = True) -> np.ndarray:
        encoding = encode_with(tokenizer, text)
        ids = as_pieces(encoding, text).ids
        if not with_end:  # special tokens after the text, but not those before it
            from_text = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
            ids = ids[: np.max(from_text, initial=-1) + 1]
        return ids

    @functools.cache
    def whole() -> Any:
        """Return the tokenizer with offsets that include spaces."""
        copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        copy.post_processor = tokenizers.processors.TemplateProcessing("$A", None, [])
        return copy

    def encode_pieces(texts: Sequence[str]) -> list[Pieces]:
        for text in texts:
            check_text(text)
        try:  # on all cores
            encodings = whole().encode_batch(list(texts), add_special_tokens=False)
        except Exception:  # of one of them, which is found by encoding each alone
            encodings = [encode_with(whole(), t, add_special_tokens=False) for t in texts]
        return [as_pieces(e, text) for e, text in zip(encodings, texts, strict=True)]

    def start_tokens() -> np.ndarray:
        # Any text will do that has a token.
        sample = next((t for t in ("a", *tokenizer.get_vocab()) if whole().encode(t).ids), "")
        encoding = tokenizer.encode(sample)
        count = np.cumprod(np.array(encoding.special_tokens_mask, np.int64)).sum()
        return np.array(encoding.ids[:count], np.int64).astype(dtype)

    def end_token() -> int | None:
        name = special_tokens(path.parent).get("eos_token")
        token = None if name is None else tokenizer.token_to_id(name)
        if name is not None and token is None:
            raise UserError(
                f"{path} has no token {name!r}, which tokenizer_config.json gives as eos_token"
            )
        return token

    return Tokenizer(
        vocab_size,
        encode,
        functools.partial(encode, with_end=False),
        lambda ids: tokenizer.decode([int(i) for i in ids]),
        encode_pieces,
        functools.cache(start_tokens),
        functools.cache(end_token),
        path.parent,
    )


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
