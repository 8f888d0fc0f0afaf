"""Optimizers with 8-bit states for bfloat16 parameters: 7 bytes per parameter with gradients.

A bfloat16 parameter p and an int8 correction c are together a 24-bit master weight,

    w = p + c / 127 * ulp(p) / 2.

A moment is stored in 8 bits per element and one scale s per group of elements along the last axis:

    momentum  m = s z / (2 - |z|),  z = q / 127,  q in [-127, 127]
    variance  v = (s q / 255)^2,                  q in [0, 255]

These companding functions spend more of the 256 values on small elements. Each step computes in
float32 and stores the results in 8 bits again.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet import checks
from fnet.chunks import fori_chunks

_Moments = dict[str, Array]

Mask = Any
"""A pytree of bools like the parameters, or a function from parameters to one."""


class CompactState(NamedTuple):
    """State of a compact optimizer.

    Attributes:
      count: Number of updates, int32 [].
      correction: int8 like the parameters; nothing for parameters that are not bfloat16.
      moments: Moments by name, each like the parameters. int8 (momentum) or uint8 (variance) for
        bfloat16 parameters, else float32.
      scales: Scales of the moments by name, bfloat16 [..., groups]; nothing for parameters that
        are not bfloat16.
    """

    count: Array  # type: ignore[assignment]  # not tuple.count
    correction: Any
    moments: dict[str, Any]
    scales: dict[str, Any]


def compact_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Mask | None = None,
    *,
    group_size: int = 32,
    chunk_size: int | None = 2**22,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with 24-bit master weights and 8-bit moments, for bfloat16 parameters.

    Parameter, correction, two moments and a bfloat16 gradient take 7 bytes per parameter, and 5
    with `fnet.autodiff.optimizer_in_backward`. AdamW in float32 takes 16. The scales add 4 bytes
    per group. Parameters of another dtype, such as float32 scales of norms, have float32 moments.

    With g the gradient, eta the learning rate and lambda the weight decay, step t computes

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        w = w - eta (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + lambda w)

    in float32. `optax.apply_updates` gives exactly the new bfloat16 part of w, so nothing must
    change the updates or the parameters in between: put gradient clipping before this optimizer.

    Corrections and moments are rounded stochastically. Rounding to the nearest value would freeze
    v, whose elements change by less than half a step at b2 = 0.999, and lose small steps of w. The
    random bits are a hash of the rounded values and ``count``, so a resumed run is bit-identical.

    Args:
      learning_rate: A number or a schedule.
      b1: Decay of the momentum.
      b2: Decay of the variance.
      eps: Added to the root of the variance.
      weight_decay: Decoupled weight decay, multiplied by the learning rate.
      mask: Leaves that decay, a pytree of bools or a function from parameters to one. None for all.
      group_size: Number of elements along the last axis that share a scale. A shorter axis is one
        group.
      chunk_size: Number of elements that are updated at once, which bounds the float32
        temporaries. None updates each array as a whole, which shards over any axis.
        ``update(..., chunked=False)`` does the same for one call.

    Returns:
      An optimizer; its state is a `CompactState`.

    Raises:
      ValueError: If ``group_size`` or ``chunk_size`` is below 1. When updating: if there are no
        ``params``.

    Example:
      >>> import fnet, jax, jax.numpy as jnp, optax
      >>> optimizer = fnet.optim.compact_adamw(1e-4, weight_decay=0.1)
      >>> params = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}
      >>> state = optimizer.init(params)
      >>> # float32 AdamW: 8, and 4 for the weights
      >>> fnet.memory.tree_bytes(state) / 64**2 < 3.2
      True
      >>> grads = {"kernel": jnp.full((64, 64), 0.5, jnp.bfloat16)}
      >>> for _ in range(20):
      ...     updates, state = optimizer.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> # 20 steps of 1e-4 are half a step of bfloat16 near 1
      >>> print(params["kernel"][0, 0])
      0.996094

    References: Gonzalez Ortiz et al. 2026, "FlashOptim: Optimizers for Memory Efficient Training",
      arXiv:2602.23349, for the master weights and the companding. There, rounding is to nearest and
      scales are float16; here it is stochastic, and scales are bfloat16, rounded up.
    """

    def update(grad: Array, moments: _Moments, count: Array) -> tuple[Array, _Moments]:
        mu = b1 * moments["mu"] + (1 - b1) * grad
        nu = b2 * moments["nu"] + (1 - b2) * grad * grad
        t = count.astype(jnp.float32)
        direction = mu / (1 - b1**t) / (jnp.sqrt(nu / (1 - b2**t)) + eps)
        return direction, {"mu": mu, "nu": nu}

    rule = _Rule({"mu": True, "nu": False}, True, update)
    return _compact(
        "compact_adamw", rule, learning_rate, weight_decay, mask, group_size, chunk_size
    )


def compact_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    *,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    group_size: int = 32,
    chunk_size: int | None = 2**22,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum, 24-bit master weights and 8-bit momentum, for bfloat16 parameters.

    With a bfloat16 gradient it takes 6 bytes per parameter. See `compact_adamw` for what it
    stores. Step t computes m = momentum m + g and w = w - eta m, where g includes the decay.

    Args:
      learning_rate: A number or a schedule.
      momentum: Decay of the momentum.
      nesterov: Whether to use Nesterov momentum.
      weight_decay: Weight decay, added to the gradient.
      mask, group_size, chunk_size: As for `compact_adamw`.

    Returns:
      An optimizer; its state is a `CompactState`.

    Raises:
      ValueError: As `compact_adamw`.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> optimizer = fnet.optim.compact_sgd(0.1)
      >>> state = optimizer.init({"kernel": jnp.ones((64, 64), jnp.bfloat16)})
      >>> print(state.moments["momentum"]["kernel"].dtype)
      int8
    """

    def update(grad: Array, moments: _Moments, count: Array) -> tuple[Array, _Moments]:
        del count
        new = momentum * moments["momentum"] + grad
        return grad + momentum * new if nesterov else new, {"momentum": new}

    rule = _Rule({"momentum": True}, False, update)
    return _compact("compact_sgd", rule, learning_rate, weight_decay, mask, group_size, chunk_size)


def compact_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Mask | None = None,
    *,
    group_size: int = 32,
    chunk_size: int | None = 2**22,
) -> optax.GradientTransformationExtraArgs:
    """Lion with 24-bit master weights and 8-bit momentum, for bfloat16 parameters.

    With a bfloat16 gradient it takes 6 bytes per parameter. See `compact_adamw` for what it
    stores. Step t computes w = w - eta (sign(b1 m + (1 - b1) g) + lambda w), and then
    m = b2 m + (1 - b2) g.

    Args:
      learning_rate: A number or a schedule.
      b1: Weight of the momentum in the update.
      b2: Decay of the momentum.
      weight_decay: Decoupled weight decay, multiplied by the learning rate.
      mask, group_size, chunk_size: As for `compact_adamw`.

    Returns:
      An optimizer; its state is a `CompactState`.

    Raises:
      ValueError: As `compact_adamw`.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> optimizer = fnet.optim.compact_lion(1e-4)
      >>> state = optimizer.init({"kernel": jnp.ones((64, 64), jnp.bfloat16)})
      >>> sorted(state.moments)
      ['momentum']

    References: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675.
    """

    def update(grad: Array, moments: _Moments, count: Array) -> tuple[Array, _Moments]:
        del count
        old = moments["momentum"]
        return jnp.sign(b1 * old + (1 - b1) * grad), {"momentum": b2 * old + (1 - b2) * grad}

    rule = _Rule({"momentum": True}, True, update)
    return _compact("compact_lion", rule, learning_rate, weight_decay, mask, group_size, chunk_size)


class _Rule(NamedTuple):
    """An optimizer's update of one array, in float32.

    ``moments`` says which are signed, and ``decoupled`` whether the weight decay is multiplied by
    the learning rate alone. ``update(grad, moments, t) -> (direction of the step, new moments)``.
    """

    moments: dict[str, bool]
    decoupled: bool
    update: Callable[[Array, _Moments, Array], tuple[Array, _Moments]]


# The transformation.


class _Leaf(NamedTuple):
    """The arrays of one bfloat16 parameter. An update has the new parameter in ``new``."""

    new: Array
    correction: Array
    moments: dict[str, Array]
    scales: dict[str, Array]


def _compact(
    name: str,
    rule: _Rule,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    mask: Mask | None,
    group_size: int,
    chunk_size: int | None,
) -> optax.GradientTransformationExtraArgs:
    checks.numbers(name, ">= 1", group_size=group_size, chunk_size=chunk_size)

    def init(params: optax.Params) -> CompactState:
        def compressed(make: Callable[[Any], Any], other: Callable[[Any], Any]) -> Any:
            return jax.tree.map(lambda p: make(p) if _is_compressed(p) else other(p), params)

        def nothing(_: Any) -> optax.MaskedNode:
            return optax.MaskedNode()

        def wide(p: Any) -> Array:
            return jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))

        def scale(p: Any) -> Array:
            *rows, columns = _shape(p)
            return jnp.zeros((*rows, -(-columns // group_size)), jnp.bfloat16)

        def zeros(dtype: Any) -> Callable[[Any], Array]:
            return lambda p: jnp.zeros(_shape(p), dtype)

        codes = {True: zeros(jnp.int8), False: zeros(jnp.uint8)}
        return CompactState(
            count=jnp.zeros((), jnp.int32),
            correction=compressed(codes[True], nothing),
            moments={m: compressed(codes[signed], wide) for m, signed in rule.moments.items()},
            scales={m: compressed(scale, nothing) for m in rule.moments},
        )

    def update(
        grads: optax.Updates,
        state: CompactState,
        params: optax.Params | None = None,
        *,
        chunked: bool = True,
        **_: Any,
    ) -> tuple[optax.Updates, CompactState]:
        if params is None:
            raise ValueError(f"{name}: update needs params, got None; pass update(grads, state, p)")
        count = state.count + 1
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        structure: Any
        leaves, structure = jax.tree.flatten(params)
        decays = structure.flatten_up_to(mask(params) if callable(mask) else mask) if (
            mask is not None
        ) else [True] * len(leaves)  # fmt: skip

        flat, tree = structure.flatten_up_to, structure.unflatten
        updates: list[Array] = []
        new: list[_Leaf] = []
        moments = {moment: flat(tree) for moment, tree in state.moments.items()}
        scales = {moment: flat(tree) for moment, tree in state.scales.items()}
        corrections = flat(state.correction)
        for i, (p, g, decay) in enumerate(zip(leaves, flat(grads), decays, strict=True)):
            step = _Step(rule, rate, weight_decay if decay else 0.0, count, group_size)
            leaf = _Leaf(
                g,
                corrections[i],
                {moment: values[i] for moment, values in moments.items()},
                {moment: values[i] for moment, values in scales.items()},
            )
            if _is_compressed(p):
                whole = p.reshape(_shape(p))
                leaf = leaf._replace(new=g.reshape(_shape(p)))
                leaf = step.in_chunks(whole, leaf, chunk_size if chunked else None)
                change = leaf.new.astype(jnp.float32) - whole.astype(jnp.float32)
                updates.append(change.reshape(p.shape))
            else:
                w, leaf_moments = step.plain(p, g, leaf.moments)
                updates.append(w)
                leaf = leaf._replace(moments=leaf_moments)
            new.append(leaf)

        return tree(updates), CompactState(
            count,
            tree(leaf.correction for leaf in new),
            {m: tree(leaf.moments[m] for leaf in new) for m in moments},
            {m: tree(leaf.scales[m] for leaf in new) for m in scales},
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _is_compressed(p: Any) -> bool:
    return bool(p.dtype == jnp.bfloat16)


def _shape(p: Any) -> tuple[int, ...]:
    """Return the shape of a parameter; a scalar is one group of one element."""
    return tuple(p.shape) or (1,)


@dataclasses.dataclass(frozen=True)
class _Step:
    rule: _Rule
    rate: Any
    weight_decay: float
    count: Array
    group_size: int

    def _decayed(
        self, w: Array, grad: Array, moments: dict[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        if self.weight_decay and not self.rule.decoupled:
            grad = grad + self.weight_decay * w
        direction, moments = self.rule.update(grad, moments, self.count)
        if self.weight_decay and self.rule.decoupled:
            direction = direction + self.weight_decay * w
        return -self.rate * direction, moments

    def plain(
        self, p: Array, grad: Array, moments: dict[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        wide = jnp.promote_types(p.dtype, jnp.float32)
        change, moments = self._decayed(p.astype(wide), grad.astype(wide), moments)
        return change.astype(p.dtype), moments

    def in_chunks(self, p: Array, leaf: _Leaf, chunk_size: int | None) -> _Leaf:
        """Update a bfloat16 parameter, a number of rows at a time and in place."""
        rows, columns = math.prod(p.shape[:-1]), p.shape[-1]
        step = max((chunk_size or p.size) // max(columns, 1), 1)
        if step >= rows:
            return self(p, leaf)
        # The new parameters overwrite the gradient. The old ones are needed for the update.
        in_place = leaf.new.dtype == p.dtype
        out, grads = (leaf.new, ()) if in_place else (p, leaf.new)

        def flat(tree: Any) -> Any:
            return jax.tree.map(lambda a: a.reshape(rows, a.shape[-1]), tree)

        p2, grads2, leaf2 = flat((p, grads, leaf._replace(new=out)))

        def update(start: Any, size: int, leaf: _Leaf) -> _Leaf:
            def part(a: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(a, start, size)

            # The barrier ties the constants of the loop to its index. Otherwise XLA moves a cast
            # of all parameters to float32 in front of the loop.
            start, p, grads = jax.lax.optimization_barrier((start, p2, grads2))
            inputs = jax.tree.map(part, leaf)
            if not in_place:
                inputs = inputs._replace(new=part(grads))
            # All is read before anything is written, or XLA copies whole arrays.
            p, inputs = jax.lax.optimization_barrier((part(p), inputs))
            new = jax.lax.optimization_barrier(self(p, inputs))
            written: _Leaf = jax.tree.map(
                lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 0), leaf, new
            )
            return written

        leaf2 = fori_chunks(update, leaf2, rows, step)
        new: _Leaf = jax.tree.map(lambda a, b: a.reshape(b.shape), leaf2, leaf._replace(new=p))
        return new

    def __call__(self, p: Array, leaf: _Leaf) -> _Leaf:
        signed, columns = self.rule.moments, p.shape[-1]
        moments = {
            m: (_momentum if signed[m] else _variance)(q, self._spread(leaf.scales[m], columns))
            for m, q in leaf.moments.items()
        }
        p32 = p.astype(jnp.float32)
        correction = leaf.correction.astype(jnp.float32) / 127 * _half_ulp(p)
        change, moments = self._decayed(p32 + correction, leaf.new.astype(jnp.float32), moments)
        change = correction + change
        w = p32 + change
        # Only what apply_updates reaches: a sum with p32, rounded. The correction has the rest.
        # reduce_precision, because XLA may leave out a cast to bfloat16 and back.
        rounded = _as_bfloat16(p32 + (_as_bfloat16(w) - p32))
        new = rounded.astype(jnp.bfloat16)
        seed = self.count.astype(jnp.uint32) * 4
        error = ((p32 - rounded) + change) / _half_ulp(new) * 127
        # Rounding errors of float32 must not move a weight that does not change.
        noise = 0.001 + 0.998 * _uniform(change, seed)
        correction = jnp.clip(jnp.floor(error + noise), -127, 127).astype(jnp.int8)
        scales, stored = {}, {}
        for number, (m, value) in enumerate(moments.items(), start=1):
            scales[m] = _round_up(self._largest(value if signed[m] else jnp.sqrt(value)))
            scale = self._spread(scales[m], columns)
            noise = _uniform(value, seed + jnp.uint32(number))
            stored[m] = (_store_momentum if signed[m] else _store_variance)(value, scale, noise)
        return _Leaf(new, correction, stored, scales)

    def _spread(self, scales: Array, columns: int) -> Array:
        """Repeat each scale for the elements of its group: [..., groups] to [..., columns]."""
        repeated = jnp.broadcast_to(scales[..., None], (*scales.shape, self.group_size))
        spread = repeated.reshape(*scales.shape[:-1], scales.shape[-1] * self.group_size)
        return spread[..., :columns].astype(jnp.float32)

    def _largest(self, values: Array) -> Array:
        """Return the largest magnitude of each group: [..., columns] to [..., groups]."""
        padding = -values.shape[-1] % self.group_size
        values = jnp.pad(jnp.abs(values), [(0, 0)] * (values.ndim - 1) + [(0, padding)])
        groups = values.reshape(*values.shape[:-1], -1, self.group_size)
        return groups.max(-1)


# Numbers in 8 and 16 bits.


def _momentum(q: Array, scale: Array) -> Array:
    z = q.astype(jnp.float32) / 127
    return scale * z / (2 - jnp.abs(z))


def _store_momentum(value: Array, scale: Array, noise: Array) -> Array:
    x = jnp.where(scale > 0, value / scale, 0)
    return jnp.clip(jnp.floor(254 * x / (1 + jnp.abs(x)) + noise), -127, 127).astype(jnp.int8)


def _variance(q: Array, scale: Array) -> Array:
    return jnp.square(scale * q.astype(jnp.float32) / 255)


def _store_variance(value: Array, scale: Array, noise: Array) -> Array:
    # The chance to round up makes the square unbiased, not its root.
    x = jnp.where(scale > 0, jnp.sqrt(value) / scale * 255, 0)
    below = jnp.floor(x)
    up = noise * (2 * below + 1) < x * x - below * below
    return jnp.clip(below + up.astype(jnp.float32), 0, 255).astype(jnp.uint8)


def _uniform(value: Array, seed: Array) -> Array:
    """Return numbers in [0, 1) that are a hash of the values and a seed."""
    # Without the last bits, in which two compilations of the same sum may differ.
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) >> 4
    bits = bits ^ (seed * jnp.uint32(0x9E3779B1))
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    bits = bits ^ (bits >> 16)
    return jnp.asarray((bits >> 8).astype(jnp.float32) * jnp.float32(2**-24))


def _half_ulp(p: Array) -> Array:
    """Return half of the distance to the next larger bfloat16, at least 2^-126, as float32."""
    bits = jax.lax.bitcast_convert_type(p, jnp.uint16).astype(jnp.uint32)
    exponent = (bits >> 7) & jnp.uint32(0xFF)
    half = jnp.maximum(exponent, jnp.uint32(9)) - jnp.uint32(8)
    return jax.lax.bitcast_convert_type(half << 23, jnp.float32)


def _as_bfloat16(x: Array) -> Array:
    """Round float32 values to bfloat16 precision; the dtype stays float32."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _round_up(x: Array) -> Array:
    """Round float32 values >= 0 up to bfloat16, so that no element exceeds its scale."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0xFFFF)
    upper = (bits >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
