"""In-place activated batch norm: keeps its output, and runs it backwards.

Source: Rota Bulo, Porzi, Kontschieder, "In-Place Activated BatchNorm for
Memory-Optimized Training of DNNs", CVPR 2018, and its reference implementation
(mapillary/inplace_abn), from which the |gamma| + eps form is taken.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float

from fnet.backward_pass import keep
from fnet.layer import Layer, Params, State, check_sizes
from fnet.layers import activations
from fnet.mesh import equally_varying
from fnet.precision import wide, widened

AxisName = str | tuple[str, ...] | None


def abn(
    x: Float[Array, "..."],
    gamma: Float[Array, " c"] | None,
    beta: Float[Array, " c"] | None,
    running_mean: Float[Array, " c"] | None,
    running_var: Float[Array, " c"] | None,
    *,
    train: bool,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    eps: float = 1e-5,
    decay: ArrayLike | None = 0.9,
    axis: int = -1,
    mask: Bool[Array, " n"] | None = None,
    axis_name: AxisName = None,
) -> tuple[Array, Array | None, Array | None]:
    """Batch norm and activation in one, with one array kept for the backward pass.

    Rota Bulo, Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized
    Training of DNNs", CVPR 2018. With n samples a channel::

        mean = E[x];  var = E[(x - mean)^2]
        z = (x - mean) / sqrt(var + eps) * (|gamma| + eps) + beta
        y = act(z)
        running = decay * running + (1 - decay) * new      (new variance unbiased)

    The backward pass never needs ``x``. Where the activation has a stable
    inverse it keeps ``y`` and finds z and act'(z) from it:

    ======================================== ==================================
    activation                               kept for the backward pass
    ======================================== ==================================
    identity, leaky_relu, elu, softplus      y
    relu, gelu, silu, tanh, sigmoid          z; act is recomputed under `fnet.recompute`
    ======================================== ==================================

    What ``y`` lost by rounding comes back as an error of ``xhat`` of about
    ``|beta| / |gamma|`` roundings, and shows in the gradient of ``gamma``. Largest
    relative error over 4,096 samples, float32, ``beta`` standard normal:

    =========  =====  =====  =====  =====  =====  =====
    gamma      1      1e-1   1e-2   1e-3   1e-4   1e-5
    dgamma     1e-7   2e-7   4e-6   2e-5   3e-4   2e-3
    dx         1e-7   1e-7   1e-7   8e-7   7e-6   4e-5
    =========  =====  =====  =====  =====  =====  =====

    With ``beta`` 0 both stay at 2e-7 throughout. In bfloat16 dgamma has 2e-3 at
    gamma 1, 2e-2 at 0.1 and 2e-1 at 0.01, where a norm that keeps ``x`` has 2e-5.

    Args:
      x: [N, ..., C] for ``axis=-1``, rank >= 2; float16, bfloat16, float32 or
        float64. Statistics are computed in float32 (float64 for float64).
      gamma: scale [C], float32 or wider; None, with ``beta``: no affine part.
      beta: offset [C], likewise.
      running_mean: [C], float32 or wider; None, with ``running_var``: not
        tracked, and evaluation uses the batch's own statistics.
      running_var: [C], likewise.
      train: True: normalise with the batch's statistics and renew the running
        ones. False: normalise with the running ones and return them as they are.
      activation: a name in the table above.
      activation_param: slope of ``leaky_relu``, alpha of ``elu`` (elsewhere often 1); > 0.
      eps: added to the variance and to |gamma|.
      decay: weight of the old running statistics; may be traced. For a
        cumulative average pass ``1 - 1 / count``, the count being the caller's.
      axis: the channel axis.
      mask: [N], True for a real example. Others count in no statistic, come out
        as 0 and receive no gradient: the result equals a smaller batch's. With no real
        example the running statistics stay as they are.
      axis_name: mapped axes (``jax.shard_map``, ``jax.vmap``) over which statistics are
        global; with running ones they need not exist. Under ``jax.jit`` with sharded
        arrays they are global without it. A gradient taken outside the mapped function
        is complete. Inside it, differentiate each device's own part of the loss: the
        gradient of ``x`` is that of all parts together; so are those of ``gamma`` and
        ``beta`` with ``check_vma=True``. With ``check_vma=False`` and in ``jax.vmap``
        theirs are one device's share, to be summed with ``jax.lax.psum``; there, a loss
        that was itself summed over devices has a gradient as many times too large.

    Returns:
      ``(y, running_mean, running_var)``; ``y`` has the shape and dtype of ``x``,
      the statistics those given. No gradient flows into the statistics.

    Raises:
      TypeError: if ``x`` is not floating, or a parameter or statistic is
        narrower than float32; from JAX in forward mode (``jax.jvp``), which a
        gradient of `abn` allows and `abn` itself does not.
      ValueError: for a parameter of another length than C, ``gamma`` without
        ``beta``, an empty batch, one sample a channel in training, an unknown
        activation, or a slope or alpha that cannot be inverted.
    """
    activation_param = activations.check_parameter("abn", activation, activation_param)
    _check_arrays(x, axis, mask, gamma=gamma, beta=beta)
    _check_arrays(x, axis, mask, running_mean=running_mean, running_var=running_var)
    axis %= x.ndim
    frozen = running_mean is not None and not train
    if not frozen:
        _check_samples(x, axis, axis_name)
    if train and running_mean is not None and decay is None:
        raise ValueError(
            "abn: a cumulative average needs the number of batches seen: pass "
            "decay=1 - 1 / count, or use layers.abn(decay=None), which keeps the count"
        )

    act = activations.get(activation)
    # With running statistics nothing is summed over devices, and the axes need not exist.
    axes = None if frozen else axis_name
    spec = _Spec(activation if act.inverse else "identity", activation_param, eps, axis, axes)
    channels = x.shape[axis]
    # The derivative at gamma = 0 is taken as +1.
    g = jnp.ones(channels, wide(x)) if gamma is None else jnp.where(gamma < 0, -gamma, gamma) + eps
    b = jnp.zeros(channels, wide(x)) if beta is None else beta
    statistics = (running_mean, running_var) if frozen else None
    y, mean, var, n = _normalize(spec, *equally_varying((x, g, b, statistics, mask)))
    if not act.inverse:
        y = _real_rows(mask, act.forward(y, activation_param))
    if not train or running_mean is None or running_var is None or decay is None:
        return y, running_mean, running_var
    if mask is not None:  # a batch of padding alone has nothing to renew them with
        decay = jnp.where(spec.over_devices(mask.sum()) > 0, decay, 1.0)
    unbiased = var * (n / jnp.maximum(n - 1, 1))
    return y, _renew(running_mean, mean, decay), _renew(running_var, unbiased, decay)


def abn_layer(
    channels: int,
    *,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    eps: float = 1e-5,
    decay: float | None = 0.9,
    affine: bool = True,
    track: bool = True,
    axis: int = -1,
    axis_name: AxisName = None,
) -> Layer:
    """`fnet.abn` as a layer.

    Args:
      channels: C, the size of the channel axis.
      activation, activation_param, eps, axis, axis_name: as for `fnet.abn`.
      decay: weight of the old running statistics; None: a cumulative average,
        whose count is kept in the state.
      affine: whether there are ``gamma`` (ones at first) and ``beta`` (zeros).
      track: whether running statistics are kept for evaluation.

    Returns:
      A layer with params ``gamma``, ``beta`` [C] and state ``running_mean``,
      ``running_var`` [C], for a cumulative average ``count`` []; all float32.

    Raises:
      ValueError: at construction for ``channels`` below 1 and an activation that is unknown
        or cannot be inverted; when applied, as `fnet.abn`.
      TypeError: when applied, as `fnet.abn`.
    """
    check_sizes("abn", channels=channels)
    activation_param = activations.check_parameter("abn", activation, activation_param)

    def init(key: Array) -> tuple[Params, State]:
        del key
        params, state = initial_arrays(channels)
        count = {"count": jnp.zeros((), jnp.float32)} if decay is None else {}
        return params if affine else {}, state | count if track else {}

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        del key
        state = dict(state)
        old_weight = decay
        if train and "count" in state:
            state["count"] = state["count"] + 1
            old_weight = 1 - 1 / state["count"]
        y, mean, var = abn(
            x,
            params.get("gamma"),
            params.get("beta"),
            state.get("running_mean"),
            state.get("running_var"),
            train=train,
            activation=activation,
            activation_param=activation_param,
            eps=eps,
            decay=old_weight,
            axis=axis,
            axis_name=axis_name,
        )
        return y, (state | {"running_mean": mean, "running_var": var} if track else state)

    return Layer(init, apply)


def _check_arrays(x: Array, axis: int, mask: Array | None, **pair: Array | None) -> None:
    """Refuses an input, a mask or a pair of channel vectors that do not fit each other."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"abn: x must be floating, got {x.dtype}")
    if x.ndim < 2 or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"abn: x must have rank >= 2 and an axis {axis}, got shape {x.shape}")
    if mask is not None and axis % x.ndim == 0:
        raise ValueError("abn: a mask needs examples on axis 0, where axis=0 puts the channels")
    if mask is not None and (mask.dtype != bool or mask.shape != x.shape[:1]):
        raise ValueError(
            f"abn: mask must be bool of shape {x.shape[:1]}, got {mask.dtype} {mask.shape}"
        )
    given = {name: v for name, v in pair.items() if v is not None}
    if len(given) == 1:
        (missing,) = pair.keys() - given.keys()
        raise ValueError(f"abn: got {next(iter(given))} without {missing}; give both or neither")
    for name, v in given.items():
        if v.shape != (x.shape[axis],):
            raise ValueError(
                f"abn: {name} must have shape ({x.shape[axis]},), the channels on axis {axis} "
                f"of x {x.shape}, got {v.shape}"
            )
        if not jnp.issubdtype(v.dtype, jnp.floating) or v.dtype.itemsize < 4:
            raise TypeError(f"abn: {name} must be float32 or wider, got {v.dtype}")


def _renew(old: Array, new: Array, decay: ArrayLike) -> Array:
    old_part = jnp.asarray(decay, old.dtype) * old
    new_part = (1 - jnp.asarray(decay, new.dtype)) * jax.lax.stop_gradient(new)
    return (old_part + new_part).astype(old.dtype)


def _check_samples(x: Array, axis: int, axis_name: AxisName) -> None:
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    if x.size == 0 or x.size * devices == x.shape[axis]:
        what = "one sample a channel" if x.size else "an empty batch"
        raise ValueError(
            f"abn: no batch statistics of {what}: x has shape {x.shape}, its channels on axis "
            f"{axis}; give two samples or more, or use train=False with running statistics"
        )


class _Spec(NamedTuple):
    """What is static in the normalisation, and the sums and broadcasts that follow from it."""

    activation: str
    param: float
    eps: float
    axis: int
    axis_name: AxisName

    def others(self, ndim: int) -> tuple[int, ...]:
        return tuple(i for i in range(ndim) if i != self.axis)

    def sum(self, a: Array) -> Array:
        """[N, ..., C] -> [C] on this device."""
        return a.sum(self.others(a.ndim))

    def over_devices(self, a: Array) -> Array:
        return a if self.axis_name is None else jax.lax.psum(a, self.axis_name)

    def spread(self, v: Array, like: Array) -> Array:
        """[C] -> [1, ..., C], in the dtype of ``like``."""
        return jnp.expand_dims(v.astype(like.dtype), self.others(like.ndim))


def initial_arrays(channels: int) -> tuple[Params, State]:
    """Parameters and statistics of a batch norm that has seen nothing, float32 [channels]."""
    # No array in two places, which could not be donated.
    params = {"gamma": jnp.ones(channels, jnp.float32), "beta": jnp.zeros(channels, jnp.float32)}
    mean, var = jnp.zeros(channels, jnp.float32), jnp.ones(channels, jnp.float32)
    return params, {"running_mean": mean, "running_var": var}


def _real_rows(mask: Array | None, a: Array) -> Array:
    """``a`` [N, ...] with the rows that are padding set to 0."""
    if mask is None:
        return a
    return jnp.where(jnp.expand_dims(mask, range(1, a.ndim)), a, jnp.zeros_like(a))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(
    spec: _Spec,
    x: Array,
    g: Array,
    beta: Array,
    statistics: tuple[Array, Array] | None,
    mask: Array | None,
) -> tuple[Array, Array, Array, Array]:
    """``act((x - mean) / sqrt(var + eps) * g + beta)`` with given or the batch's statistics.

    Returns y, the mean [C], the biased variance [C], and the samples a channel [].
    """
    return _normalize_fwd(spec, x, g, beta, statistics, mask)[0]


def _normalize_fwd(
    spec: _Spec,
    x: Array,
    g: Array,
    beta: Array,
    statistics: tuple[Array, Array] | None,
    mask: Array | None,
) -> tuple[tuple[Array, Array, Array, Array], tuple[Any, ...]]:
    w = widened(x)
    samples = math.prod(x.shape[i] for i in spec.others(x.ndim))
    n = jnp.asarray(samples, w.dtype)
    if mask is not None and x.size:  # an empty batch has n = 0 as it is
        n = mask.sum(dtype=w.dtype) * (samples // x.shape[0])
    n = jnp.maximum(spec.over_devices(n), 1)
    if statistics is None:
        mean = spec.over_devices(spec.sum(_real_rows(mask, w))) / n
        deviation = _real_rows(mask, w - spec.spread(mean, w))
        var = spec.over_devices(spec.sum(jnp.square(deviation))) / n
    else:
        mean, var = statistics
    inv = jax.lax.rsqrt(var + spec.eps)
    z = (w - spec.spread(mean, w)) * spec.spread(inv * g, w) + spec.spread(beta, w)
    y = activations.get(spec.activation).forward(z, spec.param).astype(x.dtype)
    y, inv = keep(_real_rows(mask, y)), keep(inv)
    return (y, mean, var, n), (y, inv, g, beta, mask, None if statistics else n)


def _normalize_bwd(
    spec: _Spec, residuals: tuple[Any, ...], cotangents: tuple[Array, ...]
) -> tuple[Any, ...]:
    y, inv, g, beta, mask, n = residuals
    activation = activations.get(spec.activation)
    inverse = activation.inverse
    assert inverse is not None
    # Not before its turn: what follows from y alone is as large as y.
    y, dy = jax.lax.optimization_barrier((y, cotangents[0]))
    z, slope = inverse(widened(y), spec.param)
    if activation.min_output is not None and y.dtype.itemsize < 4:
        # As far as y tells it in its own dtype, not where it would have saturated in a wider one.
        least = jnp.asarray(activation.min_output(spec.param, y.dtype), z.dtype)
        z = jnp.maximum(z, inverse(least, spec.param)[0])
    dz = _real_rows(mask, widened(dy) * slope)
    xhat = _real_rows(mask, (z - spec.spread(beta, z)) / spec.spread(g, z))
    dbeta, dg = spec.sum(dz), spec.sum(dz * xhat)
    dx = dz
    if n is not None:  # the batch's own statistics moved with x
        # Each device's sum with its own g, should that differ between them.
        means = (spec.spread(spec.over_devices(s * g) / (n * g), z) for s in (dbeta, dg))
        dx = dx - next(means) - xhat * next(means)
    dx = _real_rows(mask, dx * spec.spread(inv * g, z))
    return dx.astype(y.dtype), dg.astype(g.dtype), dbeta.astype(beta.dtype), None, None


_normalize.defvjp(_normalize_fwd, _normalize_bwd)
