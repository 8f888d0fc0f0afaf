"""Linear recurrence with an in-place backward pass, and a builder for recurrent layers."""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from fnet import checks
from fnet.layer import Children, Decode, Layer, Params, State, composite, init_children
from fnet.layers.causal_conv import causal_conv
from fnet.layers.dense import dense
from fnet.layers.segments import restarts
from fnet.mesh import equally_varying
from fnet.precision import broadcast_like, sum_dtype, upcast

torch_linear = functools.partial(
    dense, kernel_init=jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
)
"""A dense layer with the initializer of torch's ``nn.Linear``, as in the authors' code."""

MIN_STEP, MAX_STEP = 1e-3, 1e-1
"""Range of the initial time steps."""


def linear_recurrence(
    a: Float[Array, "b t ..."],
    b: Float[Array, "b t ..."],
    initial: Array | None = None,
    segments: Int[Array, "b t"] | None = None,
) -> Float[Array, "b t ..."]:
    """Compute ``h_t = a_t h_{t-1} + b_t`` over axis 1, elementwise.

    The backward pass saves ``a``, ``initial`` and the output, but not ``b``. With dh the
    cotangent of h, it runs from the last step to the first::

        g_t = dh_t + a_{t+1} g_{t+1};  da_t = g_t h_{t-1};  db_t = g_t;  dinitial = a_1 g_1

    On CPU this is a sequential loop, since an associative scan passes over the whole
    array log T times. Other backends use an associative scan (Blelloch 1990). Reverse mode
    can be nested, also under `jax.vmap`.

    Args:
      a: decays, [B, T, ...] with T >= 1; float16, bfloat16, float32 or float64. The
        recurrence is computed in float32 (float64 for float64).
      b: inputs, like ``a``.
      initial: h_0, [B, ...]; None: zeros.
      segments: number of the document of each position [B, T]. The state restarts at 0 where
        the number changes. ``initial`` belongs to the first document. None: one document.

    Returns:
      h, [B, T, ...], in the promoted dtype of ``a``, ``b`` and ``initial``. The last
      state is ``h[:, -1]``.

    Raises:
      TypeError: if an array is not floating, or the segments are not integers; from JAX in
        forward mode.
      ValueError: if the shapes do not match, or T is 0.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> a, b = jnp.full((1, 4), 0.5), jnp.ones((1, 4))
      >>> fnet.linear_recurrence(a, b).tolist()
      [[1.0, 1.5, 1.75, 1.875]]
    """
    checks.floating("linear_recurrence", a=a, b=b, initial=initial)
    if a.ndim < 2 or a.shape != b.shape or not a.shape[1]:
        raise ValueError(
            "linear_recurrence: a and b must have one shape [B, T, ...] with T >= 1, "
            f"got a {a.shape} and b {b.shape}"
        )
    shape = (a.shape[0], *a.shape[2:])
    dtype = jnp.result_type(a, b) if initial is None else jnp.result_type(a, b, initial)
    if initial is None:
        initial = jnp.zeros_like(b[:, 0], dtype)
    checks.shapes("linear_recurrence", f"a {a.shape}", initial=(initial, shape))
    starts = restarts("linear_recurrence", segments, a.shape[:2])
    if starts is not None:
        a = jnp.where(jnp.expand_dims(starts, range(2, a.ndim)), 0, a)
    return _recurrence(*equally_varying((a, b.astype(dtype), initial)))


class Step(NamedTuple):
    """What a recurrent mixer reads in one call; ``step(name, x)`` applies a child."""

    child: Children
    x: Array  # [B, t, width]
    convolve: Callable[[Array], Array]
    state: Any  # None at the start of a sequence
    segments: Array | None  # number of each position's document
    position: Array | int  # number of positions before x

    def __call__(self, name: str, x: Array | None = None) -> Array:
        """Apply a child, to the input if there is no ``x``."""
        return self.child(name, self.x if x is None else x)


def recurrent(
    name: str,
    width: int,
    mix: Callable[[Step], tuple[Array, Array | None]],
    *,
    inputs: Mapping[str, int],
    conv: Layer,
    inner: int,
    state_shape: tuple[int, ...] | None,
    linear: Callable[[int, int], Layer],
    between: Mapping[str, Layer] = MappingProxyType({}),
    last: Mapping[str, Layer] = MappingProxyType({}),
    init_own: Callable[..., Params] = dict,
    draws: int = 0,
) -> Layer:
    """Build a causal layer with dense layers, a short convolution and a recurrent state.

    ``inputs`` are dense layers of the input by name, with their output sizes. ``mix(step) -> (y,
    state)`` may return the state in any dtype. ``inner`` is the input size of the dense layer
    ``out``, and ``state_shape`` the state of one example, or None if only the convolution has one.
    ``linear`` builds dense layers. ``between`` and ``last`` are further layers, in the order of
    their keys before and after ``out``. ``init_own`` makes params of the layer itself from
    ``draws`` keys.
    """
    layers = {
        **{child: linear(width, size) for child, size in inputs.items()},
        **{"conv": conv, **between, "out": linear(inner, width), **last},
    }

    def init(key: Array) -> tuple[Params, State]:
        children_key, *keys = jax.random.split(key, 1 + draws)
        return init_children(layers, children_key)[0] | init_own(*keys), {}

    def run(
        params: Params, cache: Any, x: Array, segments: Array | None, position: Array | int
    ) -> tuple[Array, Any]:
        if x.ndim != 3 or not x.shape[1] or x.shape[2] != width:
            raise ValueError(f"{name}: expected [B, T, {width}] with T >= 1, got {x.shape}")
        new = {}

        def convolve(u: Array) -> Array:
            with jax.named_scope("conv"):
                u, new["conv"] = causal_conv(
                    u, **params["conv"], past=cache.get("conv"), segments=segments
                )
            return u

        child = Children(layers, params, {}, None, False)
        y, state = mix(Step(child, x, convolve, cache.get("state"), segments, position))
        return y, new if state is None else new | {"state": state}

    def apply(
        child: Children, x: Array, mask: Array | None = None, segments: Array | None = None
    ) -> Array:
        del mask  # real tokens come first and do not see the padding after them
        return run(child.params, {}, x, segments, 0)[0]

    def init_cache(batch: int, length: int, dtype: DTypeLike) -> dict[str, Array]:
        conv = layers["conv"].decode
        assert conv is not None
        cache = {"conv": conv.init_cache(batch, length, dtype)}
        if state_shape is not None:
            cache["state"] = jnp.zeros((batch, *state_shape), sum_dtype(dtype))
        return cache

    def extend(
        params: Params, state: State, cache: Any, x: Array, position: Array
    ) -> tuple[Array, Any]:
        del state
        y, new = run(params, cache, x, None, position)
        return y, jax.tree.map(lambda a, like: a.astype(like.dtype), new, cache)

    layer = composite(layers, apply, init=init, random=False)
    return layer._replace(decode=Decode(init_cache, extend))


def init_step_bias(key: Array, n: int) -> Array:
    """Draw biases [n] whose softplus is log-uniform in [MIN_STEP, MAX_STEP]."""
    low, high = math.log(MIN_STEP), math.log(MAX_STEP)
    dt = jnp.exp(jax.random.uniform(key, (n,), jnp.float32, low, high))
    return dt + jnp.log(-jnp.expm1(-dt))


def time_steps(x: Array, bias: Array, limits: tuple[float, float] | None = None) -> Array:
    """Compute ``softplus(x + bias)`` for [B, T, C] and [C], within limits, in float32 or wider."""
    x = upcast(x)
    dt = jax.nn.softplus(x + broadcast_like(bias, x))
    return dt if limits is None else jnp.clip(dt, *limits)


@jax.custom_vjp
def _recurrence(a: Array, b: Array, initial: Array) -> Array:
    dtype = sum_dtype(b)
    arrays = a.astype(dtype), b.astype(dtype), initial.astype(dtype)
    h: Array = jax.lax.platform_dependent(*arrays, cpu=_sequential, default=_associative)
    return h.astype(b.dtype)


def _recurrence_fwd(a: Array, b: Array, initial: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    h = _recurrence(a, b, initial)
    return h, (a, initial, h)


def _recurrence_bwd(residuals: tuple[Array, Array, Array], dh: Array) -> tuple[Array, Array, Array]:
    a, initial, h = residuals
    dtype = sum_dtype(h)
    decays, initial_wide = a.astype(dtype), initial.astype(dtype)
    g = jax.lax.platform_dependent(
        decays, dh.astype(dtype), cpu=_sequential_backward, default=_associative_backward
    )
    previous = jnp.concatenate([initial_wide[:, None], h[:, :-1].astype(dtype)], axis=1)
    return (
        (g * previous).astype(a.dtype),
        g.astype(dh.dtype),
        (decays[:, 0] * g[:, 0]).astype(initial.dtype),
    )


_recurrence.defvjp(_recurrence_fwd, _recurrence_bwd)


def _sequential(a: Array, b: Array, initial: Array) -> Array:
    def step(h: Array, ab: tuple[Array, Array]) -> tuple[Array, Array]:
        h = ab[0] * h + ab[1]
        return h, h

    _, h = jax.lax.scan(step, initial, (jnp.moveaxis(a, 1, 0), jnp.moveaxis(b, 1, 0)))
    return jnp.moveaxis(h, 0, 1)


def _sequential_backward(a: Array, dh: Array) -> Array:
    def step(carry: Array, a_and_dh: tuple[Array, Array]) -> tuple[Array, Array]:
        a, dh = a_and_dh
        g = dh + carry
        return a * g, g

    steps = (jnp.moveaxis(a, 1, 0), jnp.moveaxis(dh, 1, 0))
    zeros, _ = equally_varying((jnp.zeros_like(a[:, 0]), a))
    _, g = jax.lax.scan(step, zeros, steps, reverse=True)
    return jnp.moveaxis(g, 0, 1)


def _associative(a: Array, b: Array, initial: Array) -> Array:
    b = b.at[:, 0].add(a[:, 0] * initial)
    h: Array = jax.lax.associative_scan(_compose, (a, b), axis=1)[1]
    return h


def _associative_backward(a: Array, dh: Array) -> Array:
    next_a = jnp.roll(a, -1, axis=1)  # a_{t+1} at t; the wrapped value is never used
    db: Array = jax.lax.associative_scan(_compose, (next_a, dh), axis=1, reverse=True)[1]
    return db


def _compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    return first[0] * second[0], second[0] * first[1] + second[1]
