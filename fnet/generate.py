"""Text from a language model: tokens drawn one after the other in one compiled scan."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from fnet.layer import Decode


class Decodable(Protocol):
    """A model with ``decode``, as `fnet.models.language_model` makes it."""

    @property
    def decode(self) -> Decode | None:
        """How it goes on; None where it cannot."""
        ...


def sample_token(
    key: Array,
    logits: Float[Array, "b v"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, " b"]:
    """One token an example, drawn from ``softmax(logits / temperature)``, cut as asked.

    Args:
      key: typed key [].
      logits: [B, V], floating.
      temperature: >= 0; 0 takes the likeliest.
      top_k: only the k likeliest are drawn, and what is as likely as the last of them.
      top_p: only the likeliest whose probabilities sum to at least p, as few as do,
        and what is as likely as the last of them (nucleus sampling: Holtzman et al. 2020), of
        what ``top_k`` leaves; in (0, 1].

    Returns:
      int32 [B].

    Raises:
      ValueError: for a number out of its range.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    # Less the largest, which stays 0: divided by a tiny number, all could be infinite.
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits / max(temperature, float(jnp.finfo(jnp.float32).tiny))
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p is not None and top_p < 1:
        descending = -jnp.sort(-logits, -1)
        p = jax.nn.softmax(descending, -1)
        before = jnp.cumsum(p, -1) - p  # of those that are likelier
        least = jnp.where(before < top_p, descending, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuses what `sample_token` cannot draw with.

    Raises:
      ValueError: naming the number and its range.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
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
    """``length`` tokens after a prompt: what `stream` yields, in one piece.

    Can be jitted with ``model``, ``length`` and all after it static.

    Args:
      model: a language model, as for `stream`; so are ``params``, ``state`` and ``key``.
      params: see there.
      state: see there.
      prompt: tokens [B, P], P >= 1, integers.
      key: see there.
      length: how many tokens, >= 1.
      temperature: as for `sample_token`; so are ``top_k`` and ``top_p``.
      top_k: see there.
      top_p: see there.

    Returns:
      int32 [B, length].

    Raises:
      ValueError: as `stream`.
    """
    pieces = stream(
        model,
        params,
        state,
        prompt,
        key,
        length,
        at_a_time=max(length, 1),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    return jnp.concatenate(list(pieces), axis=1)


def stream(
    model: Decodable,
    params: Any,
    state: Any,
    prompt: Int[Array, "b p"],
    key: Array,
    length: int,
    *,
    at_a_time: int = 16,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Iterator[Int[Array, "b n"]]:
    """Tokens after a prompt, in pieces, as they are drawn.

    The prompt is read in one pass; then one scan draws each piece. Keys and values of
    attention and states of recurrences lie in one cache, which each piece is given
    and renews in place (it is donated).

    Args:
      model: a language model.
      params: its parameters.
      state: its state; contexts are read, not renewed.
      prompt: tokens [B, P], P >= 1.
      key: typed key []; token n is drawn with ``fold_in(key, n)``.
      length: how many tokens, >= 1.
      at_a_time: tokens a piece, >= 1; the last piece may have fewer.
      temperature: as for `sample_token`; so are ``top_k`` and ``top_p``.
      top_k: see there.
      top_p: see there.

    Yields:
      int32 [B, n].

    Raises:
      ValueError: when the first piece is asked for: for an empty prompt, a number out of range,
        or a model that cannot be decoded, such as one whose attention is not causal.
    """
    if model.decode is None:
        raise ValueError(
            "generate: this model cannot go on from where it stopped: one of its mixers has no "
            "decode; a language model needs causal ones"
        )
    if prompt.ndim != 2 or not prompt.shape[1]:
        raise ValueError(f"generate: prompt must be [B, P] with P >= 1, got {prompt.shape}")
    if length < 1 or at_a_time < 1:
        raise ValueError(
            f"generate: length and at_a_time must be at least 1, got {length} and {at_a_time}"
        )
    check_sampling(temperature, top_k, top_p)
    sampling = _Sampling(temperature, top_k, top_p)
    carry = _read(model, length, params, state, prompt)
    for first in range(0, length, at_a_time):
        n = min(at_a_time, length - first)
        at = jnp.asarray(prompt.shape[1]), jnp.asarray(first)
        carry, tokens = _draw(model, sampling, n, carry, at, params, state, key)
        yield tokens


class _Sampling(NamedTuple):
    temperature: float
    top_k: int | None
    top_p: float | None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(model: Any, length: int, params: Any, state: Any, prompt: Array) -> tuple[Array, Any]:
    """The logits after the prompt, and the cache with room for ``length`` tokens more."""
    cache = model.decode.init_cache(prompt.shape[0], prompt.shape[1] + length)
    read: tuple[Array, Any] = model.decode.extend(
        params, state, cache, prompt, jnp.zeros((), jnp.int32)
    )
    return read


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _draw(
    model: Any,
    sampling: _Sampling,
    n: int,
    carry: tuple[Array, Any],
    at: tuple[Array, Array],
    params: Any,
    state: Any,
    key: Array,
) -> tuple[tuple[Array, Any], Int[Array, "b n"]]:
    """The next ``n`` tokens; ``at`` says how many the prompt has, and how many were drawn."""
    past, first = at

    def one(carry: tuple[Array, Any], i: Array) -> tuple[tuple[Array, Any], Array]:
        logits, cache = carry
        token = sample_token(jax.random.fold_in(key, i), logits, **sampling._asdict())
        return model.decode.extend(params, state, cache, token[:, None], past + i), token

    carry, tokens = jax.lax.scan(one, carry, first + jnp.arange(n))
    return carry, tokens.T
