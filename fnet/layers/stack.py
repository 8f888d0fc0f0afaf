"""Stacks of blocks over the sequence: norm, mixer, feed-forward, attention context."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from fnet import checks
from fnet.layer import Children, Decode, Layer, Params, State, init_children
from fnet.layers.attention_context import RATE, Passing, apply_context, update_context
from fnet.layers.dense import dense
from fnet.layers.dropout import dropout as dropout_layer
from fnet.layers.dynamic_tanh import dynamic_tanh
from fnet.layers.norm import layer_norm_layer, rms_norm_layer
from fnet.precision import add, multiply

Norm = str | Callable[[int], Layer]
"""A norm by name, or a function ``width -> layer``."""

NORMS: dict[str, Callable[[int], Layer]] = {
    "rms": rms_norm_layer,
    "layer": functools.partial(layer_norm_layer, bias=False),
    "dynamic_tanh": dynamic_tanh,
}
"""Norms by name: ``width -> layer``."""


def resolve_norm(where: str, norm: Norm) -> Callable[[int], Layer]:
    """Look up a norm by name: ``width -> layer``; ValueError for an unknown name."""
    if not isinstance(norm, str):
        return norm
    checks.choice(where, sorted(NORMS), norm=norm)
    return NORMS[norm]


Parallel = Literal["one_norm", "two_norms"]
"""Whether the branches of a parallel block read the same norm."""


class Block(NamedTuple):
    """The layers of one block.

    Attributes:
      mixer: A layer over the sequence, [B, T, D] -> [B, T, D], such as attention or Mamba. It
        must accept ``mask`` if the stack gets one.
      feed_forward: A layer on each position, [B, T, D] -> [B, T, D], without state; or None. What
        `fnet.layers.experts` returns in training enters the state of the stack.
      output: A layer of the block's output [B, T, D] -> [B, T, D], without state, or None. If the
        stack gets ``inputs`` [B, T, blocks, P], it gets its block's part as ``given``.
      reads: Number of an earlier block whose keys and values the mixer attends to, or None. Both
        mixers must be `fnet.layers.attention`, with ``keys="passed_on"`` and ``keys="given"``.
      feed_forward_norm: Whether the stack normalizes the input of the feed-forward.

    Example:
      >>> from fnet import layers
      >>> mixer = layers.attention(8, heads=2)
      >>> block = layers.Block(mixer, layers.feed_forward(8, 32))
      >>> block._fields
      ('mixer', 'feed_forward', 'output', 'reads', 'feed_forward_norm')
    """

    mixer: Layer
    feed_forward: Layer | None = None
    output: Layer | None = None
    reads: int | None = None
    feed_forward_norm: bool = True


def stack(
    width: int,
    blocks: Sequence[Block],
    *,
    norm: Norm | None = "rms",
    post_norm: Norm | None = None,
    parallel: Parallel | None = None,
    context: Passing | None = None,
    context_rate: float = RATE,
    condition: int | None = None,
    dropout: float = 0.0,
    residual_dtype: DTypeLike | None = None,
) -> Layer:
    """Compose residual blocks, with or without the attention context.

    With C the context that a block reads and k its strength, a block computes::

        x' = x + (k / D) x @ C;   m = mixer(norm(x'))
        r  = x' + m;              y = r + feed_forward(norm(r))

    ``x'`` and ``m`` update the context that the next block reads (`fnet.update_context`). The
    first block reads no context. With ``lagged``, blocks read the context of the previous step.
    This is causal, and independent of the order of examples within a batch. With ``current``,
    they read the context that this batch just updated. A little information then flows from
    the future to the past.

    With ``post_norm``, the output of each mixer and each feed-forward passes another norm before it
    is added: ``r = x' + post_norm(m)``. Gemma 2 has both norms, OLMo 2 only the second. Any layer
    without state may be the post-norm, such as a layer scale.

    With ``parallel``, both branches read the input: ``y = x' + mixer(norm(x')) +
    feed_forward(norm(x'))``, with ``one_norm`` or ``two_norms`` (Wang, Komatsuzaki 2021,
    "GPT-J-6B"; Cohere's models have one, GPT-NeoX has two).

    With ``condition``, a dense layer of a vector per example scales and shifts the output of each
    norm and scales each branch. Its parameters are initially 0, so each block starts as the
    identity (adaLN-Zero: Peebles, Xie 2023, "Scalable Diffusion Models with Transformers")::

        m = mixer(norm(x') (1 + s1) + b1);   r = x' + g1 m

    Args:
      width: D, size of the last axis of input and output.
      blocks: at least one.
      norm: norm before each mixer and feed-forward: ``rms``, ``layer`` (without bias) or
        ``dynamic_tanh``, or a function ``width -> layer``; None: no norm.
      post_norm: norm after each mixer and feed-forward, given in the same ways; None: no norm.
      parallel: whether both branches of a block read its input, and through how many norms; None:
        the feed-forward reads the sum.
      context: how contexts are passed, ``lagged`` or ``current``; None: no attention context.
      context_rate: weight of the current batch in a context.
      condition: size of the condition vectors; None: no condition.
      dropout: dropout rate of each branch in training.
      residual_dtype: dtype of the sum of the branches, and so of the output. Norms, mixers and
        feed-forwards are computed in the dtype of the input. None: that dtype.

    Returns:
      A layer, [B, T, D] -> [B, T, D]. ``apply`` also takes ``mask`` [B, T], True for real tokens,
      ``segments`` [B, T], the number of each token's document, which mixers must then accept,
      ``condition`` [B, condition], and ``inputs`` [B, T, blocks, P] of the blocks' outputs. Its
      params are ``{"0": {"mixer_norm", "mixer", "mixer_post_norm", "feed_forward_norm",
      "feed_forward", "feed_forward_post_norm", "output", "modulation", "strength"}, ...}``. Its
      state is ``{"1": {"context": [D, D]}, ...}``, updated in training and read in evaluation. It
      supports `fnet.layer.Decode` if all mixers do and there is no condition.

    Raises:
      ValueError: without blocks, for a block that reads a later one, for a width below 1, a
        dropout rate outside [0, 1), an unknown ``norm``, ``context`` or ``parallel``, or a
        condition of parallel blocks; when initialized, if a feed-forward has state; when applied,
        if the condition is missing, unexpected, or not one vector per example.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import layers
      >>> attention = layers.attention(8, heads=2, causal=True)
      >>> blocks = [layers.Block(attention, layers.feed_forward(8, 32))] * 2
      >>> net = layers.stack(8, blocks, context="lagged")
      >>> params, state = jax.jit(net.init)(jax.random.key(0))
      >>> y, state = net.apply(params, state, jnp.ones((2, 5, 8)), train=True)
      >>> y.shape, jax.tree.map(jnp.shape, state)
      ((2, 5, 8), {'1': {'context': (8, 8)}})
    """
    if not blocks:
        raise ValueError("stack: needs at least one block, got none")
    checks.sizes("stack", width=width, condition=condition)
    norms = {
        suffix: resolve_norm("stack", n)
        for suffix, n in (("norm", norm), ("post_norm", post_norm))
        if n is not None
    }
    checks.choice("stack", (None, *get_args(Passing)), context=context)
    checks.choice("stack", (None, *get_args(Parallel)), parallel=parallel)
    if parallel and condition:
        raise ValueError("stack: parallel blocks do not support a condition")
    reads = [block.reads for block in blocks]
    for i, j in enumerate(reads):
        if j is not None and not 0 <= j < i:
            raise ValueError(f"stack: block {i} must read an earlier block, not {j}")
    build = functools.partial(_children, width, parallel, norms, condition, dropout)
    children = tuple(map(build, blocks))
    decodes = [c["mixer"].decode for c in children if c["mixer"].decode]
    net = _Stack(children, decodes, reads, width, parallel, context, context_rate, residual_dtype)
    if condition is not None or len(decodes) < len(blocks):
        return Layer(net.init, net.apply)
    restarts = {length for decode in decodes for length in decode.restart_lengths}
    return Layer(net.init, net.apply, Decode(net.init_cache, net.extend, tuple(sorted(restarts))))


class _Stack(NamedTuple):
    blocks: tuple[dict[str, Layer], ...]
    decodes: list[Decode]
    reads: list[int | None]
    width: int
    parallel: Parallel | None
    context: Passing | None
    context_rate: float
    residual_dtype: DTypeLike | None

    def init(self, key: Array) -> tuple[Params, State]:
        params: Params = {}
        state: State = {}
        for i, children in enumerate(self.blocks):
            p, s = init_children(children, jax.random.fold_in(key, i))
            if "feed_forward" in s:
                raise ValueError(
                    f"stack: the feed-forward of block {i} has state {sorted(s['feed_forward'])}, "
                    "which a stack does not support; use layers without state, such as rms_norm"
                )
            if self.context and i:
                p |= {"strength": jnp.zeros((), jnp.float32)}
                s |= {"context": jnp.zeros((self.width, self.width), jnp.float32)}
            params |= {str(i): p}
            state |= {str(i): s} if s else {}
        return params, state

    def apply(
        self,
        params: Params,
        state: State,
        x: Float[Array, "b t d"],
        *,
        train: bool,
        segments: Int[Array, "b t"] | None = None,
        **others: Any,
    ) -> tuple[Float[Array, "b t d"], State]:
        _check_condition(self.blocks, others.get("condition"), x)
        every = {"mask": others.get("mask"), "segments": segments}
        given: dict[str, Any] = {name: a for name, a in every.items() if a is not None}
        passed_on: dict[int | None, Any] = {}

        def mix(i: int, child: Children, h: Array) -> Array:
            y = child("mixer", h, **given, **self.read(i, passed_on))
            if "passed_on" in (own := child.state.get("mixer", {})):
                passed_on[i] = own["passed_on"]
                child.state = {n: s for n, s in child.state.items() if n != "mixer"}
            return y

        return self.run(mix, params, state, x, train=train, **others)

    def run(
        self,
        mix: Callable[[int, Children, Array], Array],
        params: Params,
        state: State,
        x: Array,
        *,
        key: Array | None = None,
        train: bool = False,
        mask: Bool[Array, "b t"] | None = None,
        condition: Float[Array, "b c"] | None = None,
        inputs: Float[Array, "b t n p"] | None = None,
    ) -> tuple[Array, State]:
        """Apply all blocks, with ``mix(i, child, h)`` in place of the mixer of block i."""
        dtype = None
        if self.residual_dtype is not None:
            x, dtype = x.astype(self.residual_dtype), x.dtype
        before = x, x  # input and output of the previous block's mixer
        for i, children in enumerate(self.blocks):
            name, k = str(i), None if key is None else jax.random.fold_in(key, i)
            child = Children(children, params[name], state.get(name, {}), k, train)
            with jax.named_scope(name):
                if "strength" in child.params:
                    x = self.pass_context(child, x, before, mask)
                own_mix = functools.partial(mix, i, child)
                y, mixed = _block(child, self.parallel, x, own_mix, condition, dtype)
                before = x, mixed
                x = y
                if "output" in child:
                    x = child("output", x, **({} if inputs is None else {"given": inputs[:, :, i]}))
            state = state | {name: child.state} if child.state else state
        return x, state

    def read(self, i: int, passed_on: dict[int | None, Any]) -> dict[str, Any]:
        return {"given": passed_on[self.reads[i]]} if self.reads[i] is not None else {}

    def pass_context(
        self, child: Children, x: Array, before: tuple[Array, Array], mask: Array | None
    ) -> Array:
        """Update the context with the mixer of the previous block in training, and apply it."""
        block_context = child.state["context"]
        if child.train:
            updated = update_context(block_context, *before, rate=self.context_rate, mask=mask)
            # A delayed update would keep the mixer's input and output alive.
            x, updated = jax.lax.optimization_barrier((x, updated))
            child.state = child.state | {"context": updated}
            block_context = updated if self.context == "current" else block_context
        return apply_context(x, block_context, child.params["strength"])

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        return {str(i): d.init_cache(batch, length, dtype) for i, d in enumerate(self.decodes)}

    def extend(
        self,
        params: Params,
        state: State,
        cache: Any,
        x: Array,
        position: Array,
        inputs: Array | None = None,
    ) -> tuple[Array, Any]:
        passed_on: dict[int | None, Any] = {}

        def mix(i: int, child: Children, h: Array) -> Array:
            nonlocal cache
            own = child.params.get("mixer", {}), child.state.get("mixer", {}), cache[str(i)]
            y, new = self.decodes[i].extend(*own, h, position, **self.read(i, passed_on))
            if isinstance(new, dict) and "passed_on" in new:
                passed_on[i] = new["passed_on"]
                new = {n: a for n, a in new.items() if n != "passed_on"}
            cache = cache | {str(i): new}
            return y

        x, _ = self.run(mix, params, state, x, inputs=inputs)
        return x, cache


def _children(
    width: int,
    parallel: Parallel | None,
    norms: dict[str, Callable[[int], Layer]],
    condition: int | None,
    dropout: float,
    block: Block,
) -> dict[str, Layer]:
    children: dict[str, Layer] = {}
    has_second_norm = parallel != "one_norm" and block.feed_forward_norm
    for branch, layer in zip(_BRANCHES, (block.mixer, block.feed_forward), strict=True):
        if layer is None:
            continue
        if "norm" in norms and (branch == "mixer" or has_second_norm):
            children[f"{branch}_norm"] = norms["norm"](width)
        children[branch] = layer
        if "post_norm" in norms:
            children[f"{branch}_post_norm"] = norms["post_norm"](width)
    if dropout:
        children |= {f"{branch}_dropout": dropout_layer(dropout) for branch in _BRANCHES}
    if condition:
        zeros = jax.nn.initializers.zeros
        numbers = 3 * width * (2 if block.feed_forward else 1)
        children["modulation"] = dense(condition, numbers, kernel_init=zeros)
    if block.output is not None:
        children["output"] = block.output
    return children


_BRANCHES = ("mixer", "feed_forward")


def _block(
    child: Children,
    parallel: Parallel | None,
    x: Array,
    mix: Callable[[Array], Array],
    condition: Array | None,
    dtype: DTypeLike | None,
) -> tuple[Array, Array]:
    """Apply a block, with branches in ``dtype``, or in the dtype of ``x`` if None.

    Returns the output and the mixer's output.
    """

    def as_branch(x: Array) -> Array:
        return x if dtype is None else x.astype(dtype)

    modulation: dict[str, Sequence[Array]] = {}  # scale, shift and gate, [B, 1, D] each
    if condition is not None:
        numbers = child("modulation", as_branch(jax.nn.silu(condition).astype(x.dtype)))[:, None]
        per_branch = jnp.split(numbers, numbers.shape[-1] // (3 * x.shape[-1]), axis=-1)
        modulation = {
            branch: jnp.split(a, 3, axis=-1)
            for branch, a in zip(_BRANCHES, per_branch, strict=False)
        }

    def normalize(branch: str, x: Array) -> Array:
        h = child.optional(f"{branch}_norm", as_branch(x))
        if branch not in modulation:
            return h
        scale, shift, _ = modulation[branch]
        return add(multiply(h, 1 + scale), shift)

    def add_branch(branch: str, x: Array, y: Array) -> Array:
        y = child.optional(f"{branch}_dropout", child.optional(f"{branch}_post_norm", y))
        return x + (multiply(y, modulation[branch][2]) if branch in modulation else y)

    h = normalize("mixer", x)
    mixed = mix(h)
    y = add_branch("mixer", x, mixed)
    if "feed_forward" in child:
        if parallel != "one_norm":
            h = normalize("feed_forward", x if parallel else y)
        y = add_branch("feed_forward", y, child("feed_forward", h))
    return y, mixed


def _check_condition(
    blocks_children: Sequence[dict[str, Layer]], condition: Array | None, x: Array
) -> None:
    expected = "modulation" in blocks_children[0]
    if expected != (condition is not None):
        raise ValueError(
            f"stack: built {'with' if expected else 'without'} a condition, got "
            f"{'none' if condition is None else condition.shape}; pass its size to stack and the "
            "condition to apply"
        )
    if condition is not None and condition.shape[:-1] != x.shape[:1]:
        raise ValueError(
            f"stack: the condition must be one vector per example of x {x.shape}, got "
            f"{condition.shape}"
        )
