"""Language models: an embedding, a stack of blocks, and a head over the vocabulary."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from fnet.layer import Decode, Params, State, apply_child, init_children
from fnet.layers.attention_context import RATE, Passing
from fnet.layers.embedding import embedding, unembed
from fnet.layers.stack import NORMS, Block, stack
from fnet.losses import linear_cross_entropy


class LanguageModel(NamedTuple):
    """A layer from tokens [B, T] to logits [B, T, V], with a fused loss and decoding.

    Attributes:
      init: ``init(key) -> (params, state)``, as for `fnet.Layer`.
      apply: ``apply(params, state, tokens, *, key=None, train, mask=None) -> (logits
        [B, T, V], state)``.
      decode: incremental decoding, or None if a mixer does not support it. Its ``extend``
        returns the logits [B, V] after the last of its tokens [B, t].
      losses: ``losses(params, state, tokens, labels, *, key=None, train, mask=None,
        smoothing=0.0) -> (losses [B, T] in nats, state)``: cross-entropy of the labels
        [B, T] without materializing logits (`fnet.linear_cross_entropy`). Losses are 0 where the
        mask is False; tokens and labels there may have any value, such as -100.
    """

    init: Callable[[Array], tuple[Params, State]]
    apply: Callable[..., tuple[Array, State]]
    decode: Decode | None
    losses: Callable[..., tuple[Array, State]]


def language_model(
    *,
    vocabulary: int,
    width: int,
    blocks: Sequence[Block],
    norm: str = "rms",
    context: Passing | None = None,
    context_rate: float = RATE,
    dropout: float = 0.0,
    dtype: DTypeLike = jnp.float32,
) -> LanguageModel:
    """Language model ``logits = norm(stack(E[tokens])) E^T``, with a tied embedding.

    The mixers encode positions: attention by rotary angles, recurrences by their order. The
    model is causal if all mixers are.

    Args:
      vocabulary: V, the number of tokens.
      width: D, the size of an activation vector.
      blocks: at least one block; see `fnet.layers.stack`.
      norm: norm before each mixer, each feed-forward layer and the head.
      context: how blocks pass on the attention context. None: no attention context.
      context_rate: weight of the current batch in the running context.
      dropout: dropout rate on each residual branch.
      dtype: dtype of activations. Parameters, contexts and losses are float32.

    Returns:
      A language model with params ``{"embedding", "blocks", "norm"}`` and, with an attention
      context, state ``{"blocks"}``.

    Raises:
      ValueError: for sizes below 1, and as `fnet.layers.stack`.

    Example:
      >>> import fnet, jax
      >>> mixer = fnet.layers.attention(32, 2, causal=True, rotary=10_000.0)
      >>> block = fnet.layers.Block(mixer, fnet.layers.feed_forward(32, 64))
      >>> model = fnet.models.language_model(vocabulary=256, width=32, blocks=[block])
      >>> def outputs(key, tokens):
      ...     params, state = model.init(key)
      ...     logits, _ = model.apply(params, state, tokens, train=False)
      ...     losses, _ = model.losses(params, state, tokens[:, :-1], tokens[:, 1:], train=True)
      ...     return logits, losses
      >>> tokens = jax.ShapeDtypeStruct((2, 8), "int32")
      >>> logits, losses = jax.eval_shape(outputs, jax.random.key(0), tokens)
      >>> logits.shape, losses.shape
      ((2, 8, 256), (2, 7))
    """
    children = {
        "embedding": embedding(vocabulary, width, dtype=dtype),
        "blocks": stack(
            width,
            blocks,
            norm=norm,
            context=context,
            context_rate=context_rate,
            dropout=dropout,
        ),
        "norm": NORMS[norm](width),
    }

    def features(
        params: Params, state: State, tokens: Array, key: Array | None, train: bool, mask: Any
    ) -> tuple[Float[Array, "b t d"], State]:
        if mask is not None:  # Padding may have any index, and NaN times 0 is NaN.
            tokens = jnp.where(mask, tokens, 0)
        x, _ = apply_child(children, "embedding", params, {}, tokens, key=key, train=train)
        x, state = apply_child(
            children, "blocks", params, state, x, key=key, train=train, mask=mask
        )
        return final_norm(params, x), state

    def final_norm(params: Params, x: Array) -> Array:
        return apply_child(children, "norm", params, {}, x, key=None, train=False)[0]

    def head(params: Params, x: Array) -> Array:
        with jax.named_scope("head"):
            return unembed(x, params["embedding"]["embedding"])

    def apply(
        params: Params,
        state: State,
        tokens: Int[Array, "b t"],
        *,
        key: Array | None = None,
        train: bool,
        mask: Bool[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t v"], State]:
        x, state = features(params, state, tokens, key, train, mask)
        return head(params, x), state

    def losses(
        params: Params,
        state: State,
        tokens: Int[Array, "b t"],
        labels: Int[Array, "b t"],
        *,
        key: Array | None = None,
        train: bool,
        mask: Bool[Array, "b t"] | None = None,
        smoothing: float = 0.0,
    ) -> tuple[Float[Array, "b t"], State]:
        x, state = features(params, state, tokens, key, train, mask)
        table = params["embedding"]["embedding"]
        with jax.named_scope("head"):
            losses = linear_cross_entropy(
                x, table, labels, mask=mask, smoothing=smoothing, vocab_axis=0
            )
        return losses, state

    def init(key: Array) -> tuple[Params, State]:
        return init_children(children, key)

    decode_blocks = children["blocks"].decode
    if decode_blocks is None:
        return LanguageModel(init, apply, None, losses)

    def init_cache(batch: int, length: int, dtype: DTypeLike = dtype) -> Any:
        return decode_blocks.init_cache(batch, length, dtype)

    def extend(
        params: Params, state: State, cache: Any, tokens: Int[Array, "b t"], position: Array
    ) -> tuple[Float[Array, "b v"], Any]:
        x, _ = apply_child(children, "embedding", params, {}, tokens, key=None, train=False)
        with jax.named_scope("blocks"):
            x, cache = decode_blocks.extend(
                params["blocks"], state.get("blocks", {}), cache, x, position
            )
        return head(params, final_norm(params, x[:, -1])), cache

    return LanguageModel(init, apply, Decode(init_cache, extend), losses)
