"""Reversible stacks: the backward pass restores activations from the output."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet import checks
from fnet.layer import Children, Layer, Params, State, init_children
from fnet.mesh import equally_varying
from fnet.precision import sum_dtype, upcast

GRID = 2.0**-16
"""The streams are integer multiples of this number."""

LIMIT = 2.0**15
"""Bound of the magnitude of streams and updates: the range of 32 bits."""


def reversible(blocks: Sequence[tuple[Layer, Layer]], *, restore: bool = True) -> Layer:
    """Stack blocks whose activations are restored in the backward pass instead of saved.

    With ``x1, x2`` the halves of the last axis, each block ``(f, g)`` computes::

        y1 = x1 + f(x2);    y2 = x2 + g(y1)
        x2 = y2 - g(y1);    x1 = y1 - f(x2)    (backward pass)

    The streams are fixed-point numbers, multiples of 2^-16 in an int32. The inputs and the values
    of ``f`` and ``g`` are rounded to the nearest multiple, with a straight-through gradient.
    Integer arithmetic is exact, so restored activations equal the original ones bit for bit at any
    depth, and so do the gradients. Each ``f`` and ``g`` runs twice. Gomez, Ren, Urtasun, Grosse,
    "The Reversible Residual Network", NeurIPS 2017, for the coupling; fixed-point streams as in
    Maclaurin, Duvenaud, Adams, "Gradient-based Hyperparameter Optimization through Reversible
    Learning", ICML 2015, and Zhang et al., "On Exact Bit-level Reversible Transformers", 2024.

    Args:
      blocks: pairs of layers, each mapping [..., C / 2] to the same shape. Layers may have
        state and draw random numbers: running statistics are updated once, in the forward
        pass, and dropout masks are the same in both passes.
      restore: False saves every stream, one activation per block, instead of restoring it.
        The result is the same; use it for comparison.

    Returns:
      A layer, [..., C] -> [..., C], in the floating dtype of the input. Its params and state
      are ``{"0": {"f": ..., "g": ...}, ...}``. An example's output is all NaN if a stream, or a
      value of an ``f`` or ``g``, is not finite or outside (-2^15, 2^15), the range of the
      fixed-point numbers.

    Raises:
      ValueError: if there is no block; when applied, if the last axis is odd or
        a layer changes the shape of its input.
      TypeError: if the input is not floating; when its gradient is differentiated again.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> from fnet import layers
      >>> net = fnet.reversible([(layers.dense(4, 4), layers.dense(4, 4))] * 3)
      >>> params, state = jax.jit(net.init)(jax.random.key(0))
      >>> y, _ = net.apply(params, state, jnp.ones((2, 8)), train=True)
      >>> y.shape, sorted(params), sorted(params["0"])
      ((2, 8), ['0', '1', '2'], ['f', 'g'])
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
        checks.floating("reversible", x=x)
        if not x.ndim or x.shape[-1] % 2:
            raise ValueError(f"reversible: the last axis must be even to be halved, got {x.shape}")
        # In `jax.shard_map` the custom backward rule returns cotangents that all vary as x does.
        params, x = equally_varying((params, x))
        return _apply((stack, train), params, state, key, x)

    return Layer(init, apply)


class _Stack(NamedTuple):
    pairs: tuple[dict[str, Layer], ...]
    restore: bool


def _bind(
    stack: _Stack, train: bool, i: int, params: Params, state: State, key: Array | None
) -> Children:
    name = str(i)
    key = None if key is None else jax.random.fold_in(key, i)
    return Children(stack.pairs[i], params.get(name, {}), state.get(name, {}), key, train)


def _half(child: Children, i: int, which: str, x: Array) -> Array:
    with jax.named_scope(str(i)):
        y = child(which, x)
    if y.shape != x.shape:
        raise ValueError(
            f"reversible: {which} of block {i} maps {x.shape} to {y.shape}; it must "
            "preserve the shape of its input, one half of the last axis"
        )
    return y


class _Stream(NamedTuple):
    """One of the two streams of activations, as fixed-point numbers.

    Attributes:
      units: int32, the values in multiples of `GRID`.
      in_range: bool [batch, 1, ...], whether all values of an example were finite and within
        `LIMIT` so far.
    """

    units: Array
    in_range: Array

    def add(self, f: Array) -> "_Stream":
        added = _to_units(f)
        total = self.units + added
        # An integer sum overflowed if both summands have one sign and the sum the other.
        overflow = ((self.units ^ total) & (added ^ total)) < 0
        # The comparison is False for NaN.
        is_in_range = (jnp.abs(f) < LIMIT) & ~overflow
        rest = tuple(range(min(1, f.ndim - 1), f.ndim))  # A single vector has no batch axis.
        in_range = self.in_range & jnp.all(is_in_range, rest, keepdims=True)
        # The barrier forces the check now: a delayed one would keep its inputs alive.
        return _Stream(*jax.lax.optimization_barrier((total, in_range)))


def _to_units(x: Array) -> Array:
    return jnp.round(upcast(x) / GRID).astype(jnp.int32)


def _from_units(units: Array, dtype: Any) -> Array:
    return (units.astype(sum_dtype(dtype)) * GRID).astype(dtype)


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
    new_state, streams = dict(state), []
    for i in range(len(stack.pairs)):
        streams.append((x1.units, x2.units))
        child = _bind(stack, train, i, params, state, key)
        x1 = x1.add(_half(child, i, "f", _from_units(x2.units, x.dtype)))
        x2 = x2.add(_half(child, i, "g", _from_units(x1.units, x.dtype)))
        new_state |= {str(i): child.state} if child.state else {}
    y = jnp.concatenate([_from_units(s.units, x.dtype) for s in (x1, x2)], axis=-1)
    y = jnp.where(x1.in_range & x2.in_range, y, jnp.nan)
    return (y, new_state), (x1.units, x2.units, None if stack.restore else streams)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(
    static: tuple[_Stack, bool], residuals: tuple[Any, ...], dy: Array
) -> tuple[Params, Array]:
    stack, train = static
    params, state, key, (y1, y2, saved) = residuals

    def undo(which: str, x: Array, y: Array, dy: Array, dx: Array) -> tuple[Array, Any, Array]:
        """Invert ``y = y_before + half(x)``.

        Returns ``y_before``, the cotangent of the params, and ``dx`` plus the contribution
        of this half.
        """
        # Without the barriers XLA finds that the restored values were known in the forward
        # pass, and saves those. Without one on the params, it transposes all of them early.
        p = block.params.get(which, {})
        x, y, dy, dx, p = jax.lax.optimization_barrier((x, y, dy, dx, p))

        def run(p: Params, x: Array) -> Array:
            child = Children(stack.pairs[i], {which: p}, block.state, block.key, train)
            return _half(child, i, which, x)

        value, vjp = jax.vjp(run, p, _from_units(x, dtype))
        y_before, dy = jax.lax.optimization_barrier((y - _to_units(value), dy))
        dp, dx_half = vjp(dy.astype(value.dtype))
        return y_before, dp, dx + dx_half

    dtype = dy.dtype
    d1, d2 = jnp.split(upcast(dy), 2, axis=-1)
    grads: Params = {}
    for i in reversed(range(len(stack.pairs))):
        block = _bind(stack, train, i, params, state, key)
        y2, dg, d1 = undo("g", y1, y2, d2, d1)
        if saved:
            y2 = saved[i][1]
        y1, df, d2 = undo("f", y2, y1, d1, d2)
        if saved:
            y1 = saved[i][0]
        block_grads = {which: d for which, d in (("f", df), ("g", dg)) if d}
        grads |= {str(i): block_grads} if block_grads else {}
    return grads, jnp.concatenate([d1, d2], axis=-1).astype(dtype)


def _refuse(*_: Any) -> Any:
    raise TypeError(
        "reversible: second derivatives are not supported, since the backward pass starts from "
        "integers"
    )


def _forward_rule(
    static: tuple[_Stack, bool], params: Params, state: State, key: Array | None, x: Array
) -> tuple[tuple[Array, State], tuple[Any, ...]]:
    # The backward pass redraws the same random numbers; a clone tells jax_debug_key_reuse so.
    key_again = None if key is None else jax.random.clone(key)
    out, streams = _forward(static, params, state, key, x)
    return out, (params, state, key_again, streams)


def _backward_rule(
    static: tuple[_Stack, bool], residuals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
    dparams, dx = _backward(static, residuals, cotangents[0])
    return dparams, None, None, dx


_apply.defvjp(_forward_rule, _backward_rule)
# Derivatives of the two rules would silently be 0, since they pass through integers.
_forward.defvjp(_refuse, _refuse)
_backward.defvjp(_refuse, _refuse)
