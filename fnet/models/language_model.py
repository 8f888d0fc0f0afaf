"""Language models: tokens, blocks along time, and a head over the vocabulary."""

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
    """A layer from tokens [B, T] to logits [B, T, V], and what needs no logits.

    Attributes:
      init: as of `fnet.Layer`.
      apply: ``apply(params, state, tokens, *, key=None, train, mask=None) -> (logits
        [B, T, V], state)``.
      decode: ``extend`` gives the logits [B, V] after the last of its tokens [B, t];
        None where a mixer cannot be decoded.
      losses: ``losses(params, state, tokens, labels, *, key=None, train, mask=None,
        smoothing=0.0) -> (losses [B, T] in nats, state)``: cross-entropy of each label
        [B, T], without the logits (`fnet.linear_cross_entropy`); 0 where the mask is False,
        whatever tokens and labels are there, such as -100.
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
    """``logits = norm(stack(E[tokens])) E^T``: the head shares the embedding's table.

    Positions are the mixers' affair: rotary angles in attention, order itself in a
    recurrence. Of mixers that are causal, so is the whole.

    Args:
      vocabulary: V.
      width: D.
      blocks: at least one; see `fnet.layers.stack`.
      norm: before each mixer, each feed-forward and the head.
      context: how blocks pass on the attention context; None: not at all.
      context_rate: weight of what was just seen in a context.
      dropout: rate, on each branch.
      dtype: of activations; parameters, contexts and losses are float32.

    Returns:
      A language model with params ``{"embedding", "blocks", "norm"}`` and, with
      contexts, state ``{"blocks"}``.

    Raises:
      ValueError: for sizes below 1, or as `fnet.layers.stack`.
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
        if mask is not None:  # padding may be any number, and NaN times 0 would be NaN
            tokens = jnp.where(mask, tokens, 0)
        x, _ = apply_child(children, "embedding", params, {}, tokens, key=key, train=train)
        x, state = apply_child(
            children, "blocks", params, state, x, key=key, train=train, mask=mask
        )
        return normed(params, x), state

    def normed(params: Params, x: Array) -> Array:
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
            each = linear_cross_entropy(
                x, table, labels, mask=mask, smoothing=smoothing, vocab_axis=0
            )
        return each, state

    def init(key: Array) -> tuple[Params, State]:
        return init_children(children, key)

    of_blocks = children["blocks"].decode
    if of_blocks is None:
        return LanguageModel(init, apply, None, losses)

    def start(batch: int, length: int, dtype: DTypeLike = dtype) -> Any:
        return of_blocks.start(batch, length, dtype)

    def extend(
        params: Params, state: State, cache: Any, tokens: Int[Array, "b t"], position: Array
    ) -> tuple[Float[Array, "b v"], Any]:
        x, _ = apply_child(children, "embedding", params, {}, tokens, key=None, train=False)
        with jax.named_scope("blocks"):
            x, cache = of_blocks.extend(
                params["blocks"], state.get("blocks", {}), cache, x, position
            )
        return head(params, normed(params, x[:, -1])), cache

    return LanguageModel(init, apply, Decode(start, extend), losses)
