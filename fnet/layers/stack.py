"""Blocks along time: a mixer, a feed-forward, and what each block tells the next."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from fnet.layer import Decode, Layer, Params, State, apply_child, check_sizes, init_children
from fnet.layers.attention_context import RATE, Passing, apply_context, update_context
from fnet.layers.dense import dense
from fnet.layers.dropout import dropout as dropout_layer
from fnet.layers.dynamic_tanh import dynamic_tanh
from fnet.layers.norm import layer_norm_layer, rms_norm_layer
from fnet.precision import add, multiply

NORMS: dict[str, Callable[[int], Layer]] = {
    "rms": rms_norm_layer,
    "layer": functools.partial(layer_norm_layer, bias=False),
    "dynamic_tanh": dynamic_tanh,
}
"""What may stand before a mixer or a feed-forward: width -> layer."""


class Block(NamedTuple):
    """What one block is made of.

    Attributes:
      mixer: a layer along time, [B, T, D] -> [B, T, D], which also takes ``mask`` where the
        stack is given one.
      feed_forward: a layer position by position, [B, T, D] -> [B, T, D], without state;
        None for a block that is a mixer alone.
    """

    mixer: Layer
    feed_forward: Layer | None = None


def stack(
    width: int,
    blocks: Sequence[Block],
    *,
    norm: str = "rms",
    context: Passing | None = None,
    context_rate: float = RATE,
    condition: int | None = None,
    dropout: float = 0.0,
) -> Layer:
    """Blocks one after the other, with or without the attention context.

    A block is, with C the context that it reads and k its strength::

        x' = x + (k / D) x @ C;   m = mixer(norm(x'))
        r  = x' + m;              y = r + feed_forward(norm(r))

    and what the next block reads is renewed from ``x'`` and ``m``
    (`fnet.update_context`). The first block reads none. ``lagged`` contexts are those
    of the step before: causal, and independent of the order of examples in time.
    ``current`` ones are renewed by the very sequence that reads them: the way of the
    source, in which a little of the future reaches the past.

    With ``condition``, each norm's output is scaled and shifted, and each branch scaled,
    by numbers that a dense layer makes of a vector per example; all 0 at first, so
    that each block begins as the identity (adaLN-Zero: Peebles, Xie 2023, "Scalable
    Diffusion Models with Transformers")::

        m = mixer(norm(x') (1 + s1) + b1);   r = x' + g1 m

    Args:
      width: D.
      blocks: at least one.
      norm: before each mixer and feed-forward: ``rms``, ``layer`` (without bias) or
        ``dynamic_tanh``.
      context: how contexts are passed on; None: there are none, nor buffers for them.
      context_rate: weight of what was just seen in a context.
      condition: width of the vectors that ``apply`` is then given.
      dropout: rate, on each branch before it is added; in training.

    Returns:
      A layer, [B, T, D] -> [B, T, D]; ``apply`` also takes ``mask`` [B, T], True for a
      real token, and ``condition`` [B, condition]. Params ``{"0": {"mixer_norm",
      "mixer", "feed_forward_norm", "feed_forward", "modulation", "strength"}, ...}``;
      state ``{"1": {"context": [D, D]}, ...}``, renewed in training, read in
      evaluation. It can be decoded where all of its mixers can and there is no
      condition.

    Raises:
      ValueError: if there is no block, for a width below 1, a dropout outside of [0, 1), or
        an unknown norm or way to pass a context; when initialised, if a feed-forward has
        state; when applied, if a condition is missing, given in vain, or not one vector an
        example.
    """
    if not blocks:
        raise ValueError("stack: needs at least one block, got none")
    check_sizes("stack", width=width, condition=1 if condition is None else condition)
    if norm not in NORMS:
        raise ValueError(f"stack: norm must be one of {sorted(NORMS)}, got {norm!r}")
    if context is not None and context not in get_args(Passing):
        raise ValueError(
            f"stack: context must be one of {get_args(Passing)} or None, got {context!r}"
        )
    parts = [_parts(width, block, norm, condition, dropout) for block in blocks]

    def init(key: Array) -> tuple[Params, State]:
        params: Params = {}
        state: State = {}
        for i, children in enumerate(parts):
            p, s = init_children(children, jax.random.fold_in(key, i))
            if "feed_forward" in s:
                raise ValueError(
                    f"stack: the feed-forward of block {i} has state {sorted(s['feed_forward'])}, "
                    "which a stack does not carry; use layers without, as rms_norm for abn"
                )
            if context and i:
                p |= {"strength": jnp.zeros((), jnp.float32)}
                s |= {"context": jnp.zeros((width, width), jnp.float32)}
            params |= {str(i): p}
            state |= {str(i): s} if s else {}
        return params, state

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "b t d"],
        *,
        key: Array | None = None,
        train: bool,
        mask: Bool[Array, "b t"] | None = None,
        condition: Float[Array, "b c"] | None = None,
    ) -> tuple[Float[Array, "b t d"], State]:
        _check_condition(parts, condition, x)
        padded = {} if mask is None else {"mask": mask}
        taken, given = x, x  # what the mixer of the block before took and gave
        for i, children in enumerate(parts):
            name, k = str(i), None if key is None else jax.random.fold_in(key, i)
            p, s = params[name], state.get(name, {})
            with jax.named_scope(name):
                if "strength" in p:
                    here = s["context"]
                    if train:
                        new = update_context(here, taken, given, rate=context_rate, mask=mask)
                        # At once: put off, it would keep what went in and out of a mixer.
                        x, new = jax.lax.optimization_barrier((x, new))
                        s = s | {"context": new}
                        here = new if context == "current" else here
                    x = apply_context(x, here, p["strength"])
                taken = x
                mix = functools.partial(
                    apply_child, children, "mixer", p, s, key=k, train=train, **padded
                )
                x, given, s = _block(children, p, x, mix, condition, key=k, train=train)
            state = state | {name: s} if s else state
        return x, state

    def init_cache(batch: int, length: int, dtype: DTypeLike) -> Any:
        return {str(i): decode.init_cache(batch, length, dtype) for i, decode in enumerate(decodes)}

    def extend(
        params: Params, state: State, cache: Any, x: Array, position: Array
    ) -> tuple[Array, Any]:
        for i, (children, decode) in enumerate(zip(parts, decodes, strict=True)):
            name = str(i)
            p, s = params[name], state.get(name, {})
            with jax.named_scope(name):
                if "strength" in p:
                    x = apply_context(x, s["context"], p["strength"])
                own = p.get("mixer", {}), s.get("mixer", {})
                mix = _going_on(decode, *own, cache[name], position)
                x, _, past = _block(children, p, x, mix, None, key=None, train=False)
            cache = cache | {name: past}
        return x, cache

    decodes = [c["mixer"].decode for c in parts if c["mixer"].decode]
    can_decode = condition is None and len(decodes) == len(parts)
    return Layer(init, apply, Decode(init_cache, extend) if can_decode else None)


def _going_on(
    decode: Decode, params: Params, state: State, cache: Any, position: Array
) -> Callable[[Array], tuple[Array, Any]]:
    return lambda x: decode.extend(params, state, cache, x, position)


def _parts(
    width: int, block: Block, norm: str, condition: int | None, dropout: float
) -> dict[str, Layer]:
    """A block's layers by name."""
    parts = {"mixer_norm": NORMS[norm](width), "mixer": block.mixer}
    if block.feed_forward:
        parts |= {"feed_forward_norm": NORMS[norm](width), "feed_forward": block.feed_forward}
    if dropout:
        parts |= {f"{branch}_dropout": dropout_layer(dropout) for branch in _BRANCHES}
    if condition:
        zeros = jax.nn.initializers.zeros
        numbers = 3 * width * (2 if block.feed_forward else 1)
        parts["modulation"] = dense(condition, numbers, kernel_init=zeros)
    return parts


_BRANCHES = ("mixer", "feed_forward")


def _block(
    children: dict[str, Layer],
    params: Params,
    x: Array,
    mix: Callable[[Array], tuple[Array, Any]],
    condition: Array | None,
    *,
    key: Array | None,
    train: bool,
) -> tuple[Array, Array, Any]:
    """The block's output, what its mixer gave, and what ``mix`` gave beside that."""

    def child(name: str, x: Array) -> Array:
        if name not in children:
            return x
        return apply_child(children, name, params, {}, x, key=key, train=train)[0]

    modulation: dict[str, Sequence[Array]] = {}  # scale, shift and gate, [B, 1, D] each
    if condition is not None:
        numbers = child("modulation", jax.nn.silu(condition).astype(x.dtype))[:, None]
        of_each = jnp.split(numbers, numbers.shape[-1] // (3 * x.shape[-1]), axis=-1)
        modulation = {n: jnp.split(a, 3, axis=-1) for n, a in zip(_BRANCHES, of_each, strict=False)}

    def before(branch: str, x: Array) -> Array:
        h = child(f"{branch}_norm", x)
        if branch not in modulation:
            return h
        scale, shift, _ = modulation[branch]
        return add(multiply(h, 1 + scale), shift)

    def added(branch: str, x: Array, y: Array) -> Array:
        y = child(f"{branch}_dropout", y)
        return x + (multiply(y, modulation[branch][2]) if branch in modulation else y)

    mixed, beside = mix(before("mixer", x))
    x = added("mixer", x, mixed)
    if "feed_forward" in children:
        x = added("feed_forward", x, child("feed_forward", before("feed_forward", x)))
    return x, mixed, beside


def _check_condition(parts: Sequence[dict[str, Layer]], condition: Array | None, x: Array) -> None:
    wanted = "modulation" in parts[0]
    if wanted != (condition is not None):
        raise ValueError(
            f"stack: made {'with' if wanted else 'without'} a condition, got "
            f"{'none' if condition is None else condition.shape}; the condition's width is an "
            "argument of stack, the condition one of apply"
        )
    if condition is not None and condition.shape[:-1] != x.shape[:1]:
        raise ValueError(
            f"stack: the condition must be one vector for each example of x {x.shape}, got "
            f"{condition.shape}"
        )
