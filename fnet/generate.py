"""Generate text with a key-value cache (KV cache); temperature, top-k and top-p sampling."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from fnet.layer import Decode


class Decodable(Protocol):
    """A model with ``decode``, such as `fnet.models.language_model` returns."""

    @property
    def decode(self) -> Decode | None:
        """Incremental decoding, or None if the model does not support it."""
        ...


def sample_token(
    key: Array,
    logits: Float[Array, "b v"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, " b"]:
    """Sample one token per example from ``softmax(logits / temperature)``.

    Temperature applies first, then ``top_k``, then ``top_p``. Tokens as likely as the last one
    that passes are not excluded.

    Args:
      key: random key [].
      logits: [B, V], floating.
      temperature: sampling temperature >= 0; 0 is greedy.
      top_k: sample from the k most likely tokens. None: from all.
      top_p: nucleus sampling threshold in (0, 1] (Holtzman et al. 2020): sample from the fewest
        most likely tokens whose probabilities sum to at least p. None: from all.

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
    _check_sampling(temperature, top_k, top_p)
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
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be >= 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")


def generate(
    model: Decodable,
    params: Any,
    state: Any,
    prompt: Int[Array, "b p"],
    key: Array,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, "b n"]:
    """Generate ``length`` tokens after a prompt.

    This returns all tokens that `stream` yields in chunks. It can be jitted with ``model``,
    ``length`` and the sampling options static.

    Args:
      model, params, state, key: as for `stream`.
      prompt: tokens [B, P], P >= 1, integers.
      length: number of tokens, >= 1.
      temperature, top_k, top_p: as for `sample_token`.

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
      ...     return fnet.generate(
      ...         model, params, state, prompt, key, 5, temperature=0.0
      ...     )
      >>> prompt = jax.ShapeDtypeStruct((2, 3), "int32")
      >>> jax.eval_shape(generate, jax.random.key(0), prompt).shape
      (2, 5)
    """
    chunks = stream(
        model,
        params,
        state,
        prompt,
        key,
        length,
        chunk=max(length, 1),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
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
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Iterator[Int[Array, "b n"]]:
    """Generate tokens after a prompt, and yield them in chunks.

    The prompt is processed in one pass. Then each chunk is one compiled scan. The cache (keys and
    values of attention, states of recurrences) is donated to each scan, which updates it in place.

    Args:
      model: a language model.
      params: parameters of the model.
      state: state of the model. Generation does not update it.
      prompt: tokens [B, P], P >= 1, integers.
      key: random key []. Token n is sampled with ``fold_in(key, n)``, so the tokens do not depend
        on ``chunk``.
      length: number of tokens, >= 1.
      chunk: tokens per chunk, >= 1. The last chunk may have fewer.
      temperature, top_k, top_p: as for `sample_token`.

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
    if model.decode is None:
        raise ValueError(
            "generate: this model does not support decoding, because one of its mixers does not; "
            "use causal mixers, such as attention(causal=True)"
        )
    if prompt.ndim != 2 or not prompt.shape[1]:
        raise ValueError(f"generate: prompt must be [B, P] with P >= 1, got {prompt.shape}")
    if length < 1 or chunk < 1:
        raise ValueError(f"generate: length and chunk must be >= 1, got {length} and {chunk}")
    _check_sampling(temperature, top_k, top_p)
    sampling = _Sampling(temperature, top_k, top_p)
    carry = _prefill(model, length, params, state, prompt)
    for first in range(0, length, chunk):
        n = min(chunk, length - first)
        position = jnp.asarray(prompt.shape[1]), jnp.asarray(first)
        carry, tokens = _decode(model, sampling, n, carry, position, params, state, key)
        yield tokens


class _Sampling(NamedTuple):
    temperature: float
    top_k: int | None
    top_p: float | None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(model: Any, length: int, params: Any, state: Any, prompt: Array) -> tuple[Array, Any]:
    """Logits after the prompt, and a cache with room for ``length`` more tokens."""
    cache = model.decode.init_cache(prompt.shape[0], prompt.shape[1] + length)
    carry: tuple[Array, Any] = model.decode.extend(
        params, state, cache, prompt, jnp.zeros((), jnp.int32)
    )
    return carry


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _decode(
    model: Any,
    sampling: _Sampling,
    n: int,
    carry: tuple[Array, Any],
    position: tuple[Array, Array],
    params: Any,
    state: Any,
    key: Array,
) -> tuple[tuple[Array, Any], Int[Array, "b n"]]:
    """Sample the next ``n`` tokens; ``position`` is (prompt length, tokens sampled so far)."""
    prompt_length, first = position

    def step(carry: tuple[Array, Any], i: Array) -> tuple[tuple[Array, Any], Array]:
        logits, cache = carry
        token = sample_token(jax.random.fold_in(key, i), logits, **sampling._asdict())
        return model.decode.extend(params, state, cache, token[:, None], prompt_length + i), token

    carry, tokens = jax.lax.scan(step, carry, first + jnp.arange(n))
    return carry, tokens.T
