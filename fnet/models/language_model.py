"""Language models: an embedding, a stack of blocks, and a head over the vocabulary."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from fnet import checks
from fnet.layer import Children, Decode, Layer, Params, State, init_children
from fnet.layers.attention_context import RATE, Passing
from fnet.layers.dense import dense
from fnet.layers.dot_product_attention import cap
from fnet.layers.embedding import embedding, unembed
from fnet.layers.experts import balance_loss
from fnet.layers.segments import positions_in_segments
from fnet.layers.stack import Block, Norm, Parallel, resolve_norm, stack
from fnet.losses import linear_cross_entropy
from fnet.precision import add


class LanguageModel(NamedTuple):
    """A layer from tokens [B, T] to logits [B, T, V], with a fused loss and decoding.

    Attributes:
      init: ``init(key) -> (params, state)``, as for `fnet.Layer`.
      apply: ``apply(params, state, tokens, *, key=None, train, lengths=None, segments=None) ->
        (logits [B, T, V], state)``. Two arguments say what is attended to. ``lengths`` [B],
        integers, are the numbers of real tokens, which padding follows. ``segments`` [B, T],
        integers, number the documents of a row (packing). Documents do not see each other, and
        positions restart in each. Padding on the left is a document of its own, so another
        library's attention mask of 0 and 1 can be passed as ``segments``.
      decode: incremental decoding, or None if a mixer does not support it. Its ``extend``
        returns the logits [B, V] after the last of its tokens [B, t].
      losses: ``losses(params, state, tokens, labels, *, key=None, train, lengths=None,
        segments=None, loss_mask=None, smoothing=0.0, balance=0.0) -> (losses [B, T] in nats,
        state)``: cross-entropy of the labels [B, T] without materializing logits
        (`fnet.linear_cross_entropy`). ``loss_mask`` [B, T], bool, says what is learned: losses are
        0 where it is False, and labels there may have any value, such as -100. It hides nothing
        from attention, so the losses that it keeps do not depend on it. Padding after ``lengths``
        has loss 0, too. ``balance`` is the factor of `fnet.layers.experts.balance_loss`, which is
        added to the loss of each learned token; it needs experts.
      features: ``features(params, state, tokens, *, key=None, train, lengths=None, segments=None)
        -> (x [B, T, D], state)``: what a head reads, without a factor of logits.
    """

    init: Callable[[Array], tuple[Params, State]]
    apply: Callable[..., tuple[Array, State]]
    decode: Decode | None
    losses: Callable[..., tuple[Array, State]]
    features: Callable[..., tuple[Array, State]]


def language_model(
    *,
    vocabulary: int,
    width: int,
    blocks: Sequence[Block],
    norm: Norm = "rms",
    pre_norm: bool = True,
    post_norm: Norm | None = None,
    parallel: Parallel | None = None,
    embed_norm: Norm | None = None,
    block_inputs: Layer | None = None,
    positions: int | None = None,
    embed_scale: float | None = None,
    logit_scale: float | None = None,
    tied: bool = True,
    head_bias: bool = False,
    soft_cap: float | None = None,
    context: Passing | None = None,
    context_rate: float = RATE,
    dropout: float = 0.0,
    dtype: DTypeLike = jnp.float32,
    residual_dtype: DTypeLike | None = None,
) -> LanguageModel:
    """Language model ``logits = norm(stack(E[tokens])) E^T``, with a tied embedding.

    The mixers encode positions: attention by rotary angles, recurrences by their order. The
    model is causal if all mixers are.

    Args:
      vocabulary: V, the number of tokens.
      width: D, the size of an activation vector.
      blocks: at least one block; see `fnet.layers.stack`.
      norm: norm before each mixer, each feed-forward layer and the head: a name, or a function
        ``width -> layer``.
      pre_norm: whether mixers and feed-forward layers have a norm before them.
      post_norm: norm after each mixer and each feed-forward layer; see `fnet.layers.stack`.
      parallel: whether both branches of a block read its input; see `fnet.layers.stack`.
      embed_norm: norm of the embeddings, given as ``norm``; None: no norm.
      block_inputs: what each block gets besides the output of the one before, from the
        embeddings [B, T, D], and the tokens [B, T] as ``tokens``: a layer to [B, T, blocks, P].
        Blocks need an ``output`` that takes it; see `fnet.layers.Block`. None: nothing.
      positions: number of learned position embeddings, the longest sequence. None: no such
        embeddings.
      embed_scale: factor of the token embeddings, sqrt(D) in Gemma. None: 1.
      logit_scale: factor of the logits. None: 1.
      tied: whether the head shares the embedding. Otherwise its kernel is [D, V].
      head_bias: whether logits have a bias; needs a head of its own.
      soft_cap: c, > 0: logits become ``c tanh(logits / c)``. None: no cap.
      context: how blocks pass on the attention context. None: no attention context.
      context_rate: weight of the current batch in the running context.
      dropout: dropout rate on each residual branch.
      dtype: dtype of activations. Parameters, contexts and losses are float32.
      residual_dtype: dtype of the sum of the branches, as for `fnet.layers.stack`. The last
        norm is computed in it, too. None: ``dtype``.

    Returns:
      A language model with params ``{"embedding", "blocks", "norm"}``, ``pos_embedding``
      [positions, D] if positions are learned, ``embed_norm``, ``block_inputs``, and ``head`` if it
      is not tied. With an attention context it has state ``{"blocks"}``.

    Raises:
      ValueError: for sizes below 1, for an unknown norm, for a bias of a tied head, and as
        `fnet.layers.stack`; when applied, for more tokens than ``positions``.

    Example:
      >>> import fnet, jax
      >>> mixer = fnet.layers.attention(32, 2, causal=True, rotary=10_000.0)
      >>> block = fnet.layers.Block(mixer, fnet.layers.feed_forward(32, 64))
      >>> model = fnet.models.language_model(vocabulary=256, width=32, blocks=[block])
      >>> def outputs(key, tokens):
      ...     params, state = model.init(key)
      ...     logits, _ = model.apply(params, state, tokens, train=False)
      ...     losses, _ = model.losses(
      ...         params, state, tokens[:, :-1], tokens[:, 1:], train=True
      ...     )
      ...     return logits, losses
      >>> tokens = jax.ShapeDtypeStruct((2, 8), "int32")
      >>> logits, losses = jax.eval_shape(outputs, jax.random.key(0), tokens)
      >>> logits.shape, losses.shape
      ((2, 8, 256), (2, 7))
    """
    checks.sizes("language_model", positions=positions)
    if tied and head_bias:
        raise ValueError("language_model: a tied head has no bias; set head_bias or tied to False")
    children = {
        "embedding": embedding(vocabulary, width, dtype=dtype),
        "blocks": stack(
            width,
            blocks,
            norm=norm if pre_norm else None,
            post_norm=post_norm,
            parallel=parallel,
            context=context,
            context_rate=context_rate,
            dropout=dropout,
            residual_dtype=residual_dtype,
        ),
        "norm": resolve_norm("language_model", norm)(width),
    }
    if not tied:
        children["head"] = dense(width, vocabulary, bias=head_bias)
    if embed_norm is not None:
        children["embed_norm"] = resolve_norm("language_model", embed_norm)(width)
    if block_inputs is not None:
        children["block_inputs"] = block_inputs

    def embed(params: Params, tokens: Array, at: Array) -> Float[Array, "b t d"]:
        """Embed tokens at positions ``at`` [T] or [B, T]."""
        x = bind(params, {})("embedding", tokens)
        if embed_scale is not None:
            x = x * jnp.asarray(embed_scale, x.dtype)
        if positions is not None:
            with jax.named_scope("pos_embedding"):
                rows = params["pos_embedding"].at[at].get(mode="fill", fill_value=jnp.nan)
                x = add(x, rows if at.ndim == 2 else rows[None])
        return x if embed_norm is None else bind(params, {})("embed_norm", x)

    def bind(
        params: Params, state: State, key: Array | None = None, train: bool = False
    ) -> Children:
        return Children(children, params, state, key, train)

    def inputs_of_blocks(params: Params, x: Array, tokens: Array) -> dict[str, Array]:
        if block_inputs is None:
            return {}
        return {"inputs": bind(params, {})("block_inputs", x, tokens=tokens)}

    def normed(
        child: Children, tokens: Array, real: Array | None, segments: Array | None
    ) -> Float[Array, "b t d"]:
        t = tokens.shape[-1]
        if positions is not None and t > positions:
            raise ValueError(
                f"language_model: {t} tokens, but positions are learned for {positions}; "
                "give shorter sequences"
            )
        if real is not None:  # Padding may have any index, and NaN times 0 is NaN.
            tokens = jnp.where(real, tokens, 0)
        at = jnp.arange(t) if segments is None else positions_in_segments(segments)
        given = {} if segments is None else {"segments": segments}
        x = embed(child.params, tokens, at)
        given |= inputs_of_blocks(child.params, x, tokens)
        x = child("blocks", x, mask=real, **given)
        return final_norm(child.params, x)

    def final_norm(params: Params, x: Array) -> Array:
        x = bind(params, {})("norm", x)
        return x if residual_dtype is None else x.astype(dtype)

    def scaled(x: Array) -> Array:
        return x if logit_scale is None else x * jnp.asarray(logit_scale, x.dtype)

    def head(params: Params, x: Array) -> Array:
        x = scaled(x)
        if tied:
            with jax.named_scope("head"):
                logits = unembed(x, params["embedding"]["embedding"])
        else:
            logits = bind(params, {})("head", x)
        return cap(logits, soft_cap)

    def apply(
        params: Params,
        state: State,
        tokens: Int[Array, "b t"],
        *,
        key: Array | None = None,
        train: bool,
        lengths: Int[Array, " b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t v"], State]:
        x, state = features(
            params, state, tokens, key=key, train=train, lengths=lengths, segments=segments
        )
        return head(params, x), state

    def features(
        params: Params,
        state: State,
        tokens: Int[Array, "b t"],
        *,
        key: Array | None = None,
        train: bool,
        lengths: Int[Array, " b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t d"], State]:
        child = bind(params, state, key, train)
        x = normed(child, tokens, _real_tokens(tokens, lengths), segments)
        return x, _routing(child.state)[1]

    def losses(
        params: Params,
        state: State,
        tokens: Int[Array, "b t"],
        labels: Int[Array, "b t"],
        *,
        key: Array | None = None,
        train: bool,
        lengths: Int[Array, " b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
        loss_mask: Bool[Array, "b t"] | None = None,
        smoothing: float = 0.0,
        balance: float = 0.0,
    ) -> tuple[Float[Array, "b t"], State]:
        child = bind(params, state, key, train)
        real = _real_tokens(tokens, lengths)
        x = scaled(normed(child, tokens, real, segments))
        checks.mask("language_model: loss_mask", loss_mask, tokens.shape)
        learned = loss_mask if real is None else real if loss_mask is None else real & loss_mask
        kernel = params["embedding"]["embedding"] if tied else params["head"]["kernel"]
        with jax.named_scope("head"):
            losses = linear_cross_entropy(
                x,
                kernel,
                labels,
                bias=params["head"]["bias"] if head_bias else None,
                mask=learned,
                smoothing=smoothing,
                soft_cap=soft_cap,
                vocab_axis=0 if tied else 1,
            )
        routing, state = _routing(child.state)
        if balance:
            term = balance * balance_loss(routing, real)[:, None]
            losses += term if learned is None else jnp.where(learned, term, 0)
        return losses, state

    def init(key: Array) -> tuple[Params, State]:
        params, state = init_children(children, key)
        if positions is not None:
            pos_key = jax.random.fold_in(key, len(children))
            pos_embedding = jax.random.normal(pos_key, (positions, width), jnp.float32)
            params["pos_embedding"] = 0.02 * pos_embedding
        return params, state

    decode_blocks = children["blocks"].decode
    if decode_blocks is None:
        return LanguageModel(init, apply, None, losses, features)

    def init_cache(batch: int, length: int, dtype: DTypeLike = dtype) -> Any:
        if positions is not None and length > positions:
            raise ValueError(
                f"language_model: a cache for {length} tokens, but positions are learned for "
                f"{positions}; ask for fewer tokens"
            )
        return decode_blocks.init_cache(batch, length, dtype)

    def extend(
        params: Params, state: State, cache: Any, tokens: Int[Array, "b t"], position: Array
    ) -> tuple[Float[Array, "b v"], Any]:
        x = embed(params, tokens, position + jnp.arange(tokens.shape[1]))
        inputs = inputs_of_blocks(params, x, tokens)
        with jax.named_scope("blocks"):
            x, cache = decode_blocks.extend(
                params["blocks"], state.get("blocks", {}), cache, x, position, **inputs
            )
        return head(params, final_norm(params, x[:, -1])), cache

    restarts = () if positions is None else (positions,)
    return LanguageModel(init, apply, Decode(init_cache, extend, restarts), losses, features)


def _routing(state: State) -> tuple[list[dict[str, Array]], State]:
    """Split off what layers of experts return for the balance of their load."""
    blocks = state.get("blocks", {})
    routing = [block["feed_forward"] for block in blocks.values() if "feed_forward" in block]
    if not routing:
        return [], state
    own = {
        name: {part: s for part, s in block.items() if part != "feed_forward"}
        for name, block in blocks.items()
    }
    own = {name: block for name, block in own.items() if block}
    others = {name: s for name, s in state.items() if name != "blocks"}
    return routing, others | ({"blocks": own} if own else {})


def _real_tokens(tokens: Array, lengths: Array | None) -> Bool[Array, "b t"] | None:
    """Return where the real tokens are; None if all are."""
    if lengths is None:
        return None
    checks.integers("language_model", lengths=lengths)
    checks.shapes("language_model", f"tokens {tokens.shape}", lengths=(lengths, tokens.shape[:1]))
    real: Array = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    return real
