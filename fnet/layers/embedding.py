"""Embedding of tokens, and the head that shares its table."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from fnet.layer import Layer, Params, State, check_floating, check_sizes
from fnet.precision import as_int32


def embedding(words: int, width: int, *, dtype: DTypeLike = jnp.float32) -> Layer:
    """``y = E[token]``: a row of a table for each token.

    A token outside of [0, words) gives a row of NaN and its gradient goes nowhere: a
    wrong vocabulary shows in the first loss, where an index that is clamped or wraps
    around would train on another word's row.

    Args:
      words: V, how many different tokens there are.
      width: D.
      dtype: of the output; the table is float32.

    Returns:
      A layer with params ``embedding`` [V, D] (float32, normal with variance 1 / D, so
      that `unembed` gives logits of about the size of its input), no state; integer
      tokens [...] -> [..., D].

    Raises:
      ValueError: if ``words`` or ``width`` is below 1.
      TypeError: when applied to anything but integers.
    """
    check_sizes("embedding", words=words, width=width)

    def init(key: Array) -> tuple[Params, State]:
        table = jax.random.normal(key, (words, width), jnp.float32) * width**-0.5
        return {"embedding": table}, {}

    def apply(
        params: Params,
        state: State,
        tokens: Int[Array, "..."],
        *,
        key: Array | None = None,
        train: bool,
    ) -> tuple[Float[Array, "... d"], State]:
        del key, train
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"embedding: tokens must be integers, got {tokens.dtype}")
        rows = params["embedding"].at[as_int32(tokens)]
        # Rows lie where their tokens do; on explicit axes a gather must be told.
        of = jax.typeof(tokens).sharding
        there = of.update(spec=PartitionSpec(*of.spec, None)) if any(of.spec) else None
        y = rows.get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False, out_sharding=there
        )
        return y.astype(dtype), state

    return Layer(init, apply)


def unembed(x: Float[Array, "... d"], embedding: Float[Array, "v d"]) -> Float[Array, "... v"]:
    """``x E^T``: logits from the table of an `embedding`, which both then train.

    Press, Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017. For
    a cross-entropy without the logits ever being whole:
    ``fnet.linear_cross_entropy(x, embedding, labels, vocab_axis=0)``.

    Args:
      x: [..., D], floating.
      embedding: [V, D]; cast to the dtype of ``x``.

    Returns:
      Logits [..., V], in the dtype of ``x``.

    Raises:
      ValueError: if ``x`` does not end in D.
      TypeError: if ``x`` is not floating.
    """
    check_floating("unembed", x=x)
    if x.shape[-1:] != embedding.shape[-1:]:
        raise ValueError(f"unembed: expected [..., {embedding.shape[-1]}], got {x.shape}")
    return x @ embedding.astype(x.dtype).T
