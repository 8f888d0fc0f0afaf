"""Reversible stacks: blocks run backwards from their output, so that nothing is kept per block.

Source: Gomez, Ren, Urtasun, Grosse, "The Reversible Residual Network:
Backpropagation Without Storing Activations", NeurIPS 2017, for the coupling;
fixed-point streams that restore exactly as in Maclaurin, Duvenaud, Adams,
"Gradient-based Hyperparameter Optimization through Reversible Learning", ICML
2015, and Zhang et al., "On Exact Bit-level Reversible Transformers", 2024.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.layer import Layer, Params, State, apply_child, init_children
from fnet.mesh import equally_varying
from fnet.precision import wide, widened

GRID = 2.0**-16
"""What the streams are integer multiples of."""

LIMIT = 2.0**15
"""Magnitude that streams and what is added to them must stay below: where 32 bits end."""


def reversible(blocks: Sequence[tuple[Layer, Layer]], *, restore: bool = True) -> Layer:
    """A stack of additively coupled blocks whose activations are restored, not kept.

    Gomez, Ren, Urtasun, Grosse, "The Reversible Residual Network", NeurIPS 2017. With
    ``x1, x2`` the halves of the last axis, each block ``(f, g)`` is::

        y1 = x1 + f(x2);    y2 = x2 + g(y1)

    and its backward pass starts from ``y1, y2``::

        x2 = y2 - g(y1);    x1 = y1 - f(x2)

    The streams are fixed-point numbers, multiples of 2^-16 in an int32: the
    inputs and every value of ``f`` and ``g`` are rounded to the nearest one, with
    the gradient passing straight through. Integer addition and subtraction are
    exact, so what is restored equals what was there bit for bit, at any depth, and
    so do the gradients. Each ``f`` and ``g`` is computed twice.

    Args:
      blocks: pairs of layers, each mapping [..., C / 2] to the same shape.
        Their params, states and keys are threaded; running statistics are
        renewed once, by the forward pass, and a dropout draws the same again.
      restore: False keeps every stream, one activation a block, instead of
        restoring it: for comparison; the result is the same.

    Returns:
      A layer, [..., C] -> [..., C], in the input's floating dtype. Params and
      state are ``{"0": {"f": ..., "g": ...}, ...}``. The output is all NaN if a
      stream, or a value of an ``f`` or ``g``, is not finite or leaves (-2^15, 2^15),
      where 32 bits do not hold it.

    Raises:
      ValueError: if there is no block; when applied, if the last axis is odd or
        a layer changes the shape of its input.
      TypeError: if the input is not floating; when its gradient is differentiated again.
    """
    if not blocks:
        raise ValueError("reversible: needs at least one block (f, g), got none")
    stack = _Stack(tuple({"f": f, "g": g} for f, g in blocks), restore)

    def init(key: Array) -> tuple[Params, State]:
        params: Params = {}
        state: State = {}
        for i, pair in enumerate(stack.pairs):
            p, s = init_children(pair, jax.random.fold_in(key, i))
            params |= {str(i): p} if p else {}
            state |= {str(i): s} if s else {}
        return params, state

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"reversible: x must be floating, got {x.dtype}")
        if not x.ndim or x.shape[-1] % 2:
            raise ValueError(f"reversible: the last axis must be even to be halved, got {x.shape}")
        # Custom backward rules give what is shared a cotangent that varies as x does.
        params, x = equally_varying((params, x))
        return _apply((stack, train), params, state, key, x)

    return Layer(init, apply)


class _Stack(NamedTuple):
    pairs: tuple[dict[str, Layer], ...]
    restore: bool


class _Block(NamedTuple):
    """One block of a stack, with all that its halves need but their input.

    ``half`` of it is a function of the half's params and input, since that is what
    is differentiated.
    """

    pair: dict[str, Layer]
    name: str
    params: Params
    state: State
    key: Array | None
    train: bool

    def half(self, which: str, params: Params, x: Array) -> tuple[Array, State]:
        """``f`` or ``g``: its value, and the block's state after it."""
        with jax.named_scope(self.name):
            y, state = apply_child(
                self.pair, which, {which: params}, self.state, x, key=self.key, train=self.train
            )
        if y.shape != x.shape:
            raise ValueError(
                f"reversible: {which} of block {self.name} maps {x.shape} to {y.shape}; it must "
                "keep the shape of its half of the last axis"
            )
        return y, state


def _block(stack: _Stack, train: bool, i: int, params: Params, state: State, key: Any) -> _Block:
    name = str(i)
    key = None if key is None else jax.random.fold_in(key, i)
    return _Block(stack.pairs[i], name, params.get(name, {}), state.get(name, {}), key, train)


class _Stream(NamedTuple):
    """One half of the activations.

    Attributes:
      units: int32, the value in multiples of `GRID`.
      inside: bool [], whether it has always been finite and within `LIMIT`.
    """

    units: Array
    inside: Array

    def add(self, f: Array) -> "_Stream":
        added = _units(f)
        total = self.units + added
        # A sum of two integers of one sign that has the other has left the range.
        left = ((self.units ^ total) & (added ^ total)) < 0
        # False for NaN as well.
        inside = self.inside & jnp.all((jnp.abs(f) < LIMIT) & ~left)
        # Checked at once: a check put off would keep what it looks at.
        return _Stream(*jax.lax.optimization_barrier((total, inside)))


def _units(x: Array) -> Array:
    return jnp.round(widened(x) / GRID).astype(jnp.int32)


def _value(units: Array, dtype: Any) -> Array:
    return (units.astype(wide(dtype)) * GRID).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(
    static: tuple[_Stack, bool], params: Params, state: State, key: Array | None, x: Array
) -> tuple[Array, State]:
    return _forward(static, params, state, key, x)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(
    static: tuple[_Stack, bool], params: Params, state: State, key: Array | None, x: Array
) -> tuple[tuple[Array, State], tuple[Any, ...]]:
    stack, train = static
    zero = _Stream(jnp.zeros_like(x[..., ::2], jnp.int32), jnp.asarray(True))
    x1, x2 = (zero.add(half) for half in jnp.split(x, 2, axis=-1))
    after, streams = dict(state), []
    for i in range(len(stack.pairs)):
        streams.append((x1.units, x2.units))
        block = _block(stack, train, i, params, state, key)
        f, s = block.half("f", block.params.get("f", {}), _value(x2.units, x.dtype))
        x1 = x1.add(f)
        block = block._replace(state=s)
        g, s = block.half("g", block.params.get("g", {}), _value(x1.units, x.dtype))
        x2 = x2.add(g)
        after |= {block.name: s} if s else {}
    y = jnp.concatenate([_value(s.units, x.dtype) for s in (x1, x2)], axis=-1)
    y = jnp.where(x1.inside & x2.inside, y, jnp.nan)
    return (y, after), (x1.units, x2.units, None if stack.restore else streams)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward_once(
    static: tuple[_Stack, bool], residuals: tuple[Any, ...], dy: Array
) -> tuple[Params, Array]:
    """The cotangents of params and input."""
    stack, train = static
    params, state, key, (y1, y2, kept) = residuals

    def undo(which: str, x: Array, y: Array, dy: Array, dx: Array) -> tuple[Array, Any, Array]:
        """From ``y = old + half(x)``: old, the cotangent of params, dx with the half's share."""
        # The barriers keep the compiler from finding that what is restored here
        # was known before, and keeping that instead.
        # The parameters too: their transposes would be laid out long before.
        p = block.params.get(which, {})
        x, y, dy, dx, p = jax.lax.optimization_barrier((x, y, dy, dx, p))
        run = lambda p, x: block.half(which, p, x)[0]  # noqa: E731
        value, vjp = jax.vjp(run, p, _value(x, dtype))
        old, dy = jax.lax.optimization_barrier((y - _units(value), dy))
        dp, share = vjp(dy.astype(value.dtype))
        return old, dp, dx + share

    dtype = dy.dtype
    d1, d2 = jnp.split(widened(dy), 2, axis=-1)
    grads: Params = {}
    for i in reversed(range(len(stack.pairs))):
        block = _block(stack, train, i, params, state, key)
        y2, dg, d1 = undo("g", y1, y2, d2, d1)
        if kept:
            y2 = kept[i][1]
        y1, df, d2 = undo("f", y2, y1, d1, d2)
        if kept:
            y1 = kept[i][0]
        d = {which: d for which, d in (("f", df), ("g", dg)) if d}
        grads |= {block.name: d} if d else {}
    return grads, jnp.concatenate([d1, d2], axis=-1).astype(dtype)


def _refuse(*_: Any) -> Any:
    raise TypeError(
        "reversible: its gradient cannot be differentiated again, since it starts from integers"
    )


def _forward_rule(
    static: tuple[_Stack, bool], params: Params, state: State, key: Array | None, x: Array
) -> tuple[tuple[Array, State], tuple[Any, ...]]:
    # The backward pass draws the same again, on purpose.
    again = None if key is None else jax.random.clone(key)
    out, streams = _forward(static, params, state, key, x)
    return out, (params, state, again, streams)


def _backward_rule(
    static: tuple[_Stack, bool], residuals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
    dparams, dx = _backward_once(static, residuals, cotangents[0])
    return dparams, None, None, dx


_apply.defvjp(_forward_rule, _backward_rule)
# The two rules themselves have no derivatives: through integers they would be 0.
_forward.defvjp(_refuse, _refuse)
_backward_once.defvjp(_refuse, _refuse)
