"""Token embedding, and the output head that shares its weights (weight tying)."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from fnet import checks
from fnet.layer import Layer, Params, from_function
from fnet.precision import as_int32


def embedding(vocab_size: int, width: int, *, dtype: DTypeLike = jnp.float32) -> Layer:
    """Look up token embeddings: ``y = E[token]``.

    A token outside [0, vocab_size) gives NaN and receives no gradient. So a wrong vocabulary
    shows in the first loss. A clamped or wrapped index would silently train another row.

    Args:
      vocab_size: V, number of tokens in the vocabulary.
      width: D, size of an embedding.
      dtype: dtype of the output; the table is float32.

    Returns:
      A layer, integer tokens [...] -> [..., D], without state. Its param ``embedding`` [V, D]
      is float32, initially normal with variance 1 / D, so that the logits of `unembed` have
      about the scale of its input.

    Raises:
      ValueError: if ``vocab_size`` or ``width`` is below 1.
      TypeError: when applied, if the tokens are not integers.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.embedding(vocab_size=256, width=8)
      >>> params, state = layer.init(jax.random.key(0))
      >>> layer.apply(params, state, jnp.array([[1, 2, 255]]), train=True)[0].shape
      (1, 3, 8)
    """
    checks.sizes("embedding", vocab_size=vocab_size, width=width)

    def init(key: Array) -> Params:
        return {"embedding": jax.random.normal(key, (vocab_size, width), jnp.float32) * width**-0.5}

    def apply(params: Params, tokens: Int[Array, "..."]) -> Float[Array, "... d"]:
        checks.integers("embedding", tokens=tokens)
        rows = params["embedding"].at[as_int32(tokens)]
        # On explicit mesh axes, a gather needs the sharding of its output, here the tokens'.
        sharding = jax.typeof(tokens).sharding
        spec = PartitionSpec(*sharding.spec, None)
        y: Array = rows.get(
            mode="fill",
            fill_value=jnp.nan,
            wrap_negative_indices=False,
            out_sharding=sharding.update(spec=spec) if any(sharding.spec) else None,
        )
        return y.astype(dtype)

    return from_function(init, apply)


def unembed(x: Float[Array, "... d"], embedding: Float[Array, "v d"]) -> Float[Array, "... v"]:
    """Compute logits ``x E^T`` from the table of an `embedding`, which is shared.

    Press, Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017. For a
    cross-entropy that never materializes all logits, use
    ``fnet.linear_cross_entropy(x, embedding, labels, vocab_axis=0)``.

    Args:
      x: [..., D], floating.
      embedding: [V, D]; cast to the dtype of ``x``.

    Returns:
      Logits [..., V], in the dtype of ``x``.

    Raises:
      ValueError: if ``x`` does not end in D.
      TypeError: if ``x`` is not floating.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> fnet.layers.unembed(jnp.ones((1, 3, 8)), jnp.ones((256, 8))).shape
      (1, 3, 256)
    """
    checks.last_axis("unembed", x, embedding.shape[-1])
    return x @ embedding.astype(x.dtype).T
