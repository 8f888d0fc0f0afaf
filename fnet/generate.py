"""Generate text with a key-value cache (KV cache), for prompts of any length in one batch."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from fnet import checks
from fnet.layer import Decode


class Decodable(Protocol):
    """A model with ``decode``, such as `fnet.models.language_model` returns."""

    @property
    def decode(self) -> Decode | None:
        """Incremental decoding, or None."""
        ...


def sample_token(
    key: Array,
    logits: Float[Array, "b v"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Int[Array, " b"]:
    """Sample one token per example from ``softmax(logits / temperature)``.

    Temperature applies first, then ``top_k``, ``top_p`` and ``min_p``, as in transformers. Tokens
    as likely as the last one that passes are not excluded.

    Args:
      key: random key [], or one for each example [B]. An example's token then does not depend on
        the others.
      logits: [B, V], floating.
      temperature: sampling temperature >= 0; 0 is greedy.
      top_k: sample from the k most likely tokens. None: from all.
      top_p: nucleus sampling threshold in (0, 1] (Holtzman et al. 2020): sample from the fewest
        most likely tokens whose probabilities sum to at least p. None: from all.
      min_p: sample from tokens that are at least so many times as likely as the most likely one,
        in [0, 1] (Nguyen et al. 2024). None: from all.

    Returns:
      int32 [B].

    Raises:
      ValueError: for a number out of range.

    Example:
      >>> import fnet, jax, jax.numpy as jnp
      >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
      >>> fnet.sample_token(jax.random.key(0), logits, top_p=0.5).tolist()
      [1]
    """
    _check_sampling(temperature, top_k, top_p, min_p)
    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    # Subtract the maximum, because logits divided by a tiny temperature may all be infinite.
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits / max(temperature, float(jnp.finfo(jnp.float32).tiny))
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if top_p is not None and top_p < 1:
        descending = -jnp.sort(-logits, -1)
        p = jax.nn.softmax(descending, -1)
        p_of_likelier = jnp.cumsum(p, -1) - p
        nucleus = jnp.where(p_of_likelier < top_p, descending, jnp.inf)
        logits = jnp.where(logits >= nucleus.min(-1, keepdims=True), logits, -jnp.inf)
    if min_p:
        logits = jnp.where(logits >= math.log(min_p), logits, -jnp.inf)  # the maximum is 0
    draw = jax.vmap(jax.random.categorical) if key.ndim else jax.random.categorical
    return draw(key, logits).astype(jnp.int32)


def _check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    checks.numbers("sampling", ">= 0", temperature=temperature)
    checks.numbers("sampling", ">= 1", top_k=top_k)
    checks.numbers("sampling", "in (0, 1]", top_p=top_p)
    checks.numbers("sampling", "in [0, 1]", min_p=min_p)


class _Sampling(NamedTuple):
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def of_token(self) -> dict[str, Any]:
        return {n: a for n, a in self._asdict().items() if n != "repetition_penalty"}


def generate(
    model: Decodable,
    params: Any,
    state: Any,
    prompt: Int[Array, "b p"],
    key: Array,
    length: int,
    **options: Any,
) -> Int[Array, "b n"]:
    """Generate ``length`` tokens after each prompt.

    This returns all tokens that `stream` yields in chunks. It can be jitted with ``model``,
    ``length``, ``prompt_lengths`` and the sampling options static.

    Args:
      model, params, state, prompt, key, length: as for `stream`.
      **options: ``prompt_lengths`` and the sampling options of `stream`.

    Returns:
      Tokens, int32 [B, length].

    Raises:
      ValueError: as `stream`.

    Example:
      >>> import fnet, jax
      >>> block = fnet.layers.Block(fnet.layers.rg_lru(8, heads=2))
      >>> model = fnet.models.language_model(vocabulary=10, width=8, blocks=[block])
      >>> def generate(key, prompt):
      ...     params, state = model.init(key)
      ...     return fnet.generate(model, params, state, prompt, key, length=5)
      >>> prompt = jax.ShapeDtypeStruct((2, 3), "int32")
      >>> jax.eval_shape(generate, jax.random.key(0), prompt).shape
      (2, 5)
    """
    chunks = stream(model, params, state, prompt, key, length, chunk=max(length, 1), **options)
    return jnp.concatenate(list(chunks), axis=1)


def stream(
    model: Decodable,
    params: Any,
    state: Any,
    prompt: Int[Array, "b p"],
    key: Array,
    length: int,
    *,
    chunk: int = 16,
    prompt_lengths: Sequence[int] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> Iterator[Int[Array, "b n"]]:
    """Generate tokens after each prompt, and yield them in chunks.

    Prompts are read in chunks, and tokens sampled in compiled loops. The cache (keys and values of
    attention, states of recurrences) is donated to each program, which updates it in place. It has
    some more positions than needed, so that few programs are compiled for many prompts.

    Prompts of different length need no padding that attention must not see: all rows are at the
    same position, where a row whose prompt goes on reads it, and a row whose prompt has ended
    samples. So each row continues as it does alone. It takes as many steps as the longest prompt
    has tokens more than the shortest, so batch prompts of similar length.

    Args:
      model: a language model.
      params: parameters of the model.
      state: state of the model. Generation does not update it.
      prompt: tokens [B, P], P >= 1, integers.
      key: random key [] for the batch, or one for each row [B]. Token n is sampled with
        ``fold_in(key, n)``, so the tokens do not depend on ``chunk``, and with keys [B] not on the
        other rows. With one key and prompts of different length, n counts from the end of the
        longest prompt.
      length: number of tokens, >= 1.
      chunk: tokens per chunk, >= 1. The last chunk may have fewer.
      prompt_lengths: number of tokens of each prompt, B integers from 1 to P that are known when
        traced. Tokens after them are padding of any value. None: P.
      temperature, top_k, top_p, min_p: as for `sample_token`.
      repetition_penalty: positive logits of tokens that a row has had, also in its prompt, are
        divided by it, negative ones multiplied, > 0 (Keskar et al. 2019). None: 1.

    Yields:
      int32 [B, n].

    Raises:
      ValueError: at the first chunk, for an empty prompt, a number out of range, or a model that
        does not support decoding, such as one whose attention is not causal.

    Example:
      >>> import fnet, jax
      >>> block = fnet.layers.Block(fnet.layers.rg_lru(8, heads=2))
      >>> model = fnet.models.language_model(vocabulary=10, width=8, blocks=[block])
      >>> def chunks(key, prompt):
      ...     params, state = model.init(key)
      ...     return list(fnet.stream(model, params, state, prompt, key, 5, chunk=2))
      >>> prompt = jax.ShapeDtypeStruct((2, 3), "int32")
      >>> [chunk.shape for chunk in jax.eval_shape(chunks, jax.random.key(0), prompt)]
      [(2, 2), (2, 2), (2, 1)]
    """
    decode: Any = model.decode  # whose caches have a default dtype
    if decode is None:
        raise ValueError(
            "generate: this model does not support decoding, because one of its mixers does not; "
            "use causal mixers, such as attention(causal=True)"
        )
    if prompt.ndim != 2 or not prompt.shape[1]:
        raise ValueError(f"generate: prompt must be [B, P] with P >= 1, got {prompt.shape}")
    rows, width = prompt.shape
    lengths = [width] * rows if prompt_lengths is None else [int(n) for n in prompt_lengths]
    if len(lengths) != rows or not all(1 <= n <= width for n in lengths):
        raise ValueError(
            f"generate: prompt_lengths must be {rows} integers from 1 to {width} for a prompt "
            f"{prompt.shape}, got {lengths}"
        )
    if key.shape not in ((), (rows,)):
        raise ValueError(f"generate: key must be [] or [{rows}], got {key.shape}")
    if length < 1 or chunk < 1:
        raise ValueError(f"generate: length and chunk must be >= 1, got {length} and {chunk}")
    _check_sampling(temperature, top_k, top_p, min_p)
    checks.numbers("generate", "> 0", repetition_penalty=repetition_penalty)
    sampling = _Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    shortest, longest = min(lengths, default=width), max(lengths, default=width)
    total = longest + length
    phases = list(_phases(decode.restart_lengths, shortest, total))
    jax.eval_shape(lambda: decode.init_cache(rows, phases[-1][1]))  # raises if it is too long
    if prompt_lengths is not None:  # Padding may have any index.
        prompt = jnp.where(jnp.arange(width)[None] < jnp.array(lengths)[:, None], prompt, 0)
    tokens = jnp.pad(prompt[:, :longest].astype(jnp.int32), ((0, 0), (0, _roomy(total) - longest)))
    ends = jnp.array(lengths, jnp.int32)
    known, yielded = shortest, 0
    for stop, room in phases:
        cache = decode.init_cache(rows, room)
        cache, position = _read(model, cache, tokens, known, params, state)
        run = _Run(ends, jnp.maximum(ends, known), key)
        while position < stop:
            after = longest + min(yielded + chunk, length)
            count = min(after, stop) - position
            at = jnp.asarray(position), jnp.asarray(count)
            tokens, cache = _decode(model, sampling, (tokens, cache), at, run, params, state)
            position += count
            if position == after:
                columns = ends[:, None] + jnp.arange(yielded, after - longest)[None]
                yield jnp.take_along_axis(tokens, columns, 1)
                yielded = after - longest
        known = stop


def _roomy(n: int) -> int:
    """Round a length up by a quarter at most, so that few lengths are compiled."""
    step: int = max(64, 2 ** max(n.bit_length() - 3, 0))
    return -(-n // step) * step


def _phases(restarts: Sequence[int], first: int, total: int) -> Iterator[tuple[int, int]]:
    """Yield the end of each phase that needs a cache of its own, and the positions in the cache.

    Token p is sampled from p tokens, so a cache for n positions is enough up to the token n.
    """
    for limit in (*sorted(restarts), math.inf):
        if first > limit or first >= total:
            continue
        n = int(min(total - 1, limit))
        # Beyond all of them, the model says whether it has so many positions.
        is_exact = limit == math.inf and bool(restarts)
        yield n + 1, n if is_exact else int(min(_roomy(n), limit))
        first = n + 1


_PROMPT_CHUNKS = 256, 16
"""Tokens of a prompt that are read at once. Each size is one program, for prompts of any length.
Fewer tokens are read one by one, by the program that samples."""


def _read(
    model: Any, cache: Any, tokens: Array, known: int, params: Any, state: Any
) -> tuple[Any, int]:
    """Read most of the tokens before ``known``, but not the last one.

    Returns the cache, and the position of the second token that is not in it.
    """
    start = 0
    for size in _PROMPT_CHUNKS:
        if count := (known - 1 - start) // size:
            at = jnp.asarray(start), jnp.asarray(count)
            cache = _prefill(model, size, cache, tokens, at, params, state)
            start += count * size
    return cache, start + 1


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _prefill(
    model: Any,
    size: int,
    cache: Any,
    tokens: Int[Array, "b w"],
    at: tuple[Array, Array],
    params: Any,
    state: Any,
) -> Any:
    """Extend a cache by chunks of tokens; ``at`` is (position, number of chunks)."""
    start, count = at

    def read(i: Array, cache: Any) -> Any:
        position = start + i * size
        chunk = jax.lax.dynamic_slice_in_dim(tokens, position, size, axis=1)
        return model.decode.extend(params, state, cache, chunk, position)[1]

    return jax.lax.fori_loop(0, count, read, cache)


class _Run(NamedTuple):
    """Lengths of prompts [B], how many tokens of each row are not sampled (again) [B], and keys."""

    ends: Array
    known: Array
    key: Array


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _decode(
    model: Any,
    sampling: _Sampling,
    carry: tuple[Array, Any],
    at: tuple[Array, Array],
    run: _Run,
    params: Any,
    state: Any,
) -> tuple[Int[Array, "b w"], Any]:
    """Sample tokens into ``carry``, (tokens, cache); ``at`` is (position, number of tokens)."""
    start, count = at

    def step(i: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        (tokens, cache), p = carry, start + i
        last, given = (jax.lax.dynamic_slice_in_dim(tokens, n, 1, axis=1) for n in (p - 1, p))
        logits, cache = model.decode.extend(params, state, cache, last, p - 1)
        if (penalty := sampling.repetition_penalty) is not None:
            had = jnp.broadcast_to(jnp.arange(tokens.shape[1]) < p, tokens.shape)
            rows = jnp.arange(len(tokens))[:, None]
            had = jnp.zeros(logits.shape, bool).at[rows, tokens].max(had)
            penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
            logits = jnp.where(had, penalized, logits)
        n = p - (run.ends if run.key.ndim else run.ends.max())
        fold = jax.vmap(jax.random.fold_in) if run.key.ndim else jax.random.fold_in
        token = sample_token(fold(run.key, n), logits, **sampling.of_token)
        token = jnp.where(p < run.known, given[:, 0], token)
        return jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], p, axis=1), cache

    sampled: tuple[Array, Any] = jax.lax.fori_loop(0, count, step, carry)
    return sampled
