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
from fnet.losses.linear_cross_entropy import linear_cross_entropy
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


class LanguageModelVariant(NamedTuple):
    """What published models change in `language_model`. The defaults are the plain model.

    Attributes:
      pre_norm: whether mixers and feed-forward layers have a norm before them.
      post_norm: norm after each mixer and each feed-forward layer; see `fnet.layers.stack`.
      parallel: whether both branches of a block read its input; see `fnet.layers.stack`.
      embed_norm: norm of the embeddings, given as ``norm``; None: no norm.
      embed_scale: factor of the token embeddings, sqrt(D) in Gemma. None: 1.
      block_inputs: what each block gets besides the output of the one before, from the
        embeddings [B, T, D], and the tokens [B, T] as ``tokens``: a layer to [B, T, blocks, P].
        Blocks need an ``output`` that takes it; see `fnet.layers.Block`. None: nothing.
      logit_scale: factor of the logits. None: 1.
      logit_soft_cap: c, > 0: logits become ``c tanh(logits / c)``. None: no cap.
      head_bias: whether logits have a bias; needs a head of its own.

    Example:
      >>> import fnet
      >>> gemma = fnet.models.LanguageModelVariant(
      ...     embed_scale=8.0, logit_soft_cap=30.0
      ... )
      >>> options = {
      ...     "blocks": [fnet.layers.Block(fnet.layers.rg_lru(64))],
      ...     "variant": gemma,
      ... }
      >>> model = fnet.models.language_model(vocabulary=256, width=64, **options)
    """

    pre_norm: bool = True
    post_norm: Norm | None = None
    parallel: Parallel | None = None
    embed_norm: Norm | None = None
    embed_scale: float | None = None
    block_inputs: Layer | None = None
    logit_scale: float | None = None
    logit_soft_cap: float | None = None
    head_bias: bool = False


def language_model(
    *,
    vocabulary: int,
    width: int,
    blocks: Sequence[Block],
    norm: Norm = "rms",
    positions: int | None = None,
    tied: bool = True,
    context: Passing | None = None,
    context_rate: float = RATE,
    dropout: float = 0.0,
    dtype: DTypeLike = jnp.float32,
    residual_dtype: DTypeLike | None = None,
    variant: LanguageModelVariant | None = None,
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
      positions: number of learned position embeddings, the longest sequence. None: no such
        embeddings.
      tied: whether the head shares the embedding. Otherwise its kernel is [D, V].
      context: how blocks pass on the attention context. None: no attention context.
      context_rate: weight of the current batch in the running context.
      dropout: dropout rate on each residual branch.
      dtype: dtype of activations. Parameters, contexts and losses are float32.
      residual_dtype: dtype of the sum of the branches, as for `fnet.layers.stack`. The last
        norm is computed in it, too. None: ``dtype``.
      variant: what published models change; None: nothing.

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
      >>> def losses(key, tokens):
      ...     params, state = model.init(key)
      ...     return model.losses(
      ...         params, state, tokens[:, :-1], tokens[:, 1:], train=True
      ...     )
      >>> tokens = jax.ShapeDtypeStruct((2, 8), "int32")
      >>> jax.eval_shape(losses, jax.random.key(0), tokens)[0].shape
      (2, 7)
    """
    variant = LanguageModelVariant() if variant is None else variant
    checks.sizes("language_model", positions=positions)
    if tied and variant.head_bias:
        raise ValueError("language_model: a tied head has no bias; set head_bias or tied to False")
    children = {
        "embedding": embedding(vocabulary, width, dtype=dtype),
        "blocks": stack(
            width,
            blocks,
            norm=norm if variant.pre_norm else None,
            post_norm=variant.post_norm,
            parallel=variant.parallel,
            context=context,
            context_rate=context_rate,
            dropout=dropout,
            residual_dtype=residual_dtype,
        ),
        "norm": resolve_norm("language_model", norm)(width),
    }
    if not tied:
        children["head"] = dense(width, vocabulary, bias=variant.head_bias)
    if variant.embed_norm is not None:
        children["embed_norm"] = resolve_norm("language_model", variant.embed_norm)(width)
    if variant.block_inputs is not None:
        children["block_inputs"] = variant.block_inputs
    decode = children["blocks"].decode
    net = _Network(children, decode, width, positions, dtype, residual_dtype, variant)
    if decode is not None:
        restarts = decode.restart_lengths if positions is None else (positions,)
        decode = Decode(net.init_cache, net.extend, restarts)
    return LanguageModel(net.init, net.apply, decode, net.losses, net.features)


class _Network(NamedTuple):
    children: dict[str, Layer]
    decode: Any  # of the blocks
    width: int
    positions: int | None
    dtype: DTypeLike
    residual_dtype: DTypeLike | None
    variant: LanguageModelVariant

    def init(self, key: Array) -> tuple[Params, State]:
        params, state = init_children(self.children, key)
        if self.positions is not None:
            pos_key = jax.random.fold_in(key, len(self.children))
            shape = self.positions, self.width
            params["pos_embedding"] = 0.02 * jax.random.normal(pos_key, shape, jnp.float32)
        return params, state

    def apply(
        self, params: Params, state: State, tokens: Int[Array, "b t"], **given: Any
    ) -> tuple[Float[Array, "b t v"], State]:
        x, state = self.features(params, state, tokens, **given)
        return self.head(params, x), state

    def features(
        self,
        params: Params,
        state: State,
        tokens: Int[Array, "b t"],
        *,
        key: Array | None = None,
        train: bool,
        lengths: Int[Array, " b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t d"], State]:
        child = self.bind(params, state, key, train)
        x = self.normed(child, tokens, _real_tokens(tokens, lengths), segments)
        return x, _routing(child.state)[1]

    def losses(
        self,
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
        child = self.bind(params, state, key, train)
        real = _real_tokens(tokens, lengths)
        x = self.scaled(self.normed(child, tokens, real, segments))
        checks.mask("language_model: loss_mask", loss_mask, tokens.shape)
        learned = loss_mask if real is None else real if loss_mask is None else real & loss_mask
        tied = "head" not in child
        kernel = params["embedding"]["embedding"] if tied else params["head"]["kernel"]
        with jax.named_scope("head"):
            losses = linear_cross_entropy(
                x,
                kernel,
                labels,
                bias=params["head"]["bias"] if self.variant.head_bias else None,
                mask=learned,
                smoothing=smoothing,
                soft_cap=self.variant.logit_soft_cap,
                vocab_axis=0 if tied else 1,
            )
        routing, state = _routing(child.state)
        if balance:
            term = balance * balance_loss(routing, real)[:, None]
            losses += term if learned is None else jnp.where(learned, term, 0)
        return losses, state

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> Any:
        if self.positions is not None and length > self.positions:
            raise ValueError(
                f"language_model: a cache for {length} tokens, but positions are learned for "
                f"{self.positions}; ask for fewer tokens"
            )
        return self.decode.init_cache(batch, length, self.dtype if dtype is None else dtype)

    def extend(
        self, params: Params, state: State, cache: Any, tokens: Array, position: Array
    ) -> tuple[Float[Array, "b v"], Any]:
        x = self.embed(params, tokens, position + jnp.arange(tokens.shape[1]))
        inputs = self.inputs_of_blocks(params, x, tokens)
        with jax.named_scope("blocks"):
            arrays = params["blocks"], state.get("blocks", {}), cache, x, position
            x, cache = self.decode.extend(*arrays, **inputs)
        return self.head(params, self.final_norm(params, x[:, -1])), cache

    def bind(
        self, params: Params, state: State, key: Array | None = None, train: bool = False
    ) -> Children:
        return Children(self.children, params, state, key, train)

    def embed(self, params: Params, tokens: Array, at: Array) -> Float[Array, "b t d"]:
        """Embed tokens at positions ``at`` [T] or [B, T]."""
        child = self.bind(params, {})
        x = child("embedding", tokens)
        if self.variant.embed_scale is not None:
            x = x * jnp.asarray(self.variant.embed_scale, x.dtype)
        if self.positions is not None:
            with jax.named_scope("pos_embedding"):
                rows = params["pos_embedding"].at[at].get(mode="fill", fill_value=jnp.nan)
                x = add(x, rows if at.ndim == 2 else rows[None])
        return child.optional("embed_norm", x)

    def inputs_of_blocks(self, params: Params, x: Array, tokens: Array) -> dict[str, Array]:
        child = self.bind(params, {})
        if "block_inputs" not in child:
            return {}
        return {"inputs": child("block_inputs", x, tokens=tokens)}

    def normed(
        self, child: Children, tokens: Array, real: Array | None, segments: Array | None
    ) -> Float[Array, "b t d"]:
        t = tokens.shape[-1]
        if self.positions is not None and t > self.positions:
            raise ValueError(
                f"language_model: {t} tokens, but positions are learned for {self.positions}; "
                "give shorter sequences"
            )
        if real is not None:  # Padding may have any index, and NaN times 0 is NaN.
            tokens = jnp.where(real, tokens, 0)
        at = jnp.arange(t) if segments is None else positions_in_segments(segments)
        given = {} if segments is None else {"segments": segments}
        x = self.embed(child.params, tokens, at)
        given |= self.inputs_of_blocks(child.params, x, tokens)
        x = child("blocks", x, mask=real, **given)
        return self.final_norm(child.params, x)

    def final_norm(self, params: Params, x: Array) -> Array:
        x = self.bind(params, {})("norm", x)
        return x if self.residual_dtype is None else x.astype(self.dtype)

    def scaled(self, x: Array) -> Array:
        scale = self.variant.logit_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def head(self, params: Params, x: Array) -> Array:
        x, child = self.scaled(x), self.bind(params, {})
        if "head" in child:
            logits = child("head", x)
        else:
            with jax.named_scope("head"):
                logits = unembed(x, params["embedding"]["embedding"])
        return cap(logits, self.variant.logit_soft_cap)


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
    if lengths is None:
        return None
    checks.integers("language_model", lengths=lengths)
    checks.shapes("language_model", f"tokens {tokens.shape}", lengths=(lengths, tokens.shape[:1]))
    real: Array = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    return real
