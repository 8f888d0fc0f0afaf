"""A linear recurrence along time, run backwards from its output, and layers that carry a state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from fnet.layer import Decode, Layer, Params, State
from fnet.mesh import equally_varying
from fnet.precision import wide


def linear_recurrence(
    a: Float[Array, "b t ..."], b: Float[Array, "b t ..."], initial: Array | None = None
) -> Float[Array, "b t ..."]:
    """``h_t = a_t h_{t-1} + b_t`` along axis 1, each element on its own.

    For the backward pass it keeps ``a``, ``initial`` and its own output, never ``b``.
    With dh the cotangent of h, from the last step to the first::

        g_t = dh_t + a_{t+1} g_{t+1};  da_t = g_t h_{t-1};  db_t = g_t;  d initial = a_1 g_1

    Step by step on CPU, where a loop costs little and an associative scan passes over
    all of it log T times; elsewhere an associative scan (Blelloch 1990). Its gradient,
    and the gradient of that, can be had by reverse mode, under `jax.vmap` too.

    Args:
      a: decays, [B, T, ...], T >= 1; float16, bfloat16, float32 or float64. The
        recurrence is computed in float32 (float64 for float64).
      b: inputs, like ``a``.
      initial: h_0, [B, ...]; None: zeros.

    Returns:
      h, [B, T, ...], in the dtype that ``a``, ``b`` and ``initial`` promote to. The last
      state is ``h[:, -1]``.

    Raises:
      TypeError: if an array is not floating; from JAX in forward mode.
      ValueError: if shapes do not fit, or T is 0.
    """
    given = {"a": a, "b": b} | ({} if initial is None else {"initial": initial})
    for name, array in given.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"linear_recurrence: {name} must be floating, got {array.dtype}")
    if a.ndim < 2 or a.shape != b.shape or not a.shape[1]:
        raise ValueError(
            "linear_recurrence: a and b must have one shape [B, T, ...] with T >= 1, "
            f"got a {a.shape} and b {b.shape}"
        )
    shape = (a.shape[0], *a.shape[2:])
    dtype = jnp.result_type(*given.values())
    if initial is None:
        initial = jnp.zeros_like(b[:, 0], dtype)
    if initial.shape != shape:
        raise ValueError(
            f"linear_recurrence: initial must have shape {shape} for a {a.shape}, "
            f"got {initial.shape}"
        )
    return _recurrence(*equally_varying((a, b.astype(dtype), initial)))


def recurrent(
    name: str,
    width: int,
    init: Callable[[Array], tuple[Params, State]],
    mix: Callable[[Params, Any, Array], tuple[Array, Any]],
    start: Callable[[int, int, DTypeLike], dict[str, Array]],
) -> Layer:
    """A layer along time from what it does with a past; without one, the past is empty.

    Args:
      name: of the layer, for errors.
      width: the size of the input's last axis.
      init: the layer's.
      mix: ``(params, cache, x [B, t, width]) -> (y, cache)``. The cache is one of ``start``'s,
        or ``{}`` for an empty past. It gives its arrays in any dtype.
      start: as in `fnet.layer.Decode`.
    """

    def checked(params: Params, cache: Any, x: Array) -> tuple[Array, Any]:
        if x.ndim != 3 or not x.shape[1] or x.shape[2] != width:
            raise ValueError(f"{name}: expected [B, T, {width}] with T >= 1, got {x.shape}")
        return mix(params, cache, x)

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "b t d"],
        *,
        key: Array | None = None,
        train: bool,
        mask: Array | None = None,
    ) -> tuple[Float[Array, "b t d"], State]:
        del key, train, mask  # what is real comes first, and never sees the padding behind it
        return checked(params, {}, x)[0], state

    def extend(
        params: Params, state: State, cache: Any, x: Array, position: Array
    ) -> tuple[Array, Any]:
        del state, position
        y, new = checked(params, cache, x)
        return y, jax.tree.map(lambda a, like: a.astype(like.dtype), new, cache)

    return Layer(init, apply, Decode(start, extend))


@jax.custom_vjp
def _recurrence(a: Array, b: Array, initial: Array) -> Array:
    """States, in the dtype of ``b``."""
    dtype = wide(b)
    arrays = a.astype(dtype), b.astype(dtype), initial.astype(dtype)
    h: Array = jax.lax.platform_dependent(*arrays, cpu=_in_turn, default=_associative)
    return h.astype(b.dtype)


def _recurrence_fwd(a: Array, b: Array, initial: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    h = _recurrence(a, b, initial)
    return h, (a, initial, h)


def _recurrence_bwd(residuals: tuple[Array, Array, Array], dh: Array) -> tuple[Array, Array, Array]:
    a, initial, h = residuals
    dtype = wide(h)
    decays, initial_wide = a.astype(dtype), initial.astype(dtype)
    g = jax.lax.platform_dependent(
        decays, dh.astype(dtype), cpu=_in_turn_backwards, default=_associative_backwards
    )
    before = jnp.concatenate([initial_wide[:, None], h[:, :-1].astype(dtype)], axis=1)
    return (
        (g * before).astype(a.dtype),
        g.astype(dh.dtype),
        (decays[:, 0] * g[:, 0]).astype(initial.dtype),
    )


_recurrence.defvjp(_recurrence_fwd, _recurrence_bwd)


def _in_turn(a: Array, b: Array, initial: Array) -> Array:
    def step(h: Array, ab: tuple[Array, Array]) -> tuple[Array, Array]:
        h = ab[0] * h + ab[1]
        return h, h

    _, h = jax.lax.scan(step, initial, (jnp.moveaxis(a, 1, 0), jnp.moveaxis(b, 1, 0)))
    return jnp.moveaxis(h, 0, 1)


def _in_turn_backwards(a: Array, dh: Array) -> Array:
    def step(passed: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        g = now[1] + passed
        return now[0] * g, g

    times = (jnp.moveaxis(a, 1, 0), jnp.moveaxis(dh, 1, 0))
    nothing, _ = equally_varying((jnp.zeros_like(a[:, 0]), a))
    _, g = jax.lax.scan(step, nothing, times, reverse=True)
    return jnp.moveaxis(g, 0, 1)


def _associative(a: Array, b: Array, initial: Array) -> Array:
    b = b.at[:, 0].add(a[:, 0] * initial)
    h: Array = jax.lax.associative_scan(_then, (a, b), axis=1)[1]
    return h


def _associative_backwards(a: Array, dh: Array) -> Array:
    onwards = jnp.roll(a, -1, axis=1)  # a_{t+1} at t; what comes round meets nothing
    db: Array = jax.lax.associative_scan(_then, (onwards, dh), axis=1, reverse=True)[1]
    return db


def _then(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two steps ``h -> a h + b`` in one."""
    return first[0] * second[0], second[0] * first[1] + second[1]
