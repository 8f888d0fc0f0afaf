"""In-place activated batch norm (ABN): saves its output and runs backward from it.

As in the reference implementation, mapillary/inplace_abn, the scale is |gamma| + eps.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float

from fnet import checks
from fnet.backward_pass import save
from fnet.layer import Children, Layer, Params, State, composite
from fnet.layers import activations
from fnet.mesh import equally_varying
from fnet.precision import sum_dtype, upcast

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
    """Batch norm and activation that save one array for the backward pass.

    With n samples per channel (Rota Bulo, Porzi, Kontschieder, "In-Place Activated BatchNorm",
    CVPR 2018)::

        mean = E[x];  var = E[(x - mean)^2]
        z = (x - mean) / sqrt(var + eps) * (|gamma| + eps) + beta
        y = act(z)
        running = decay * running + (1 - decay) * new      (new variance unbiased)

    The backward pass never needs ``x``. ``identity``, ``leaky_relu``, ``elu`` and ``softplus`` have
    a stable inverse: it saves ``y``, and computes z and act'(z) from it. For others, such as
    ``relu``, ``gelu``, ``silu``, ``tanh`` and ``sigmoid``, it saves z. The next layer then saves
    its input y, too, which `fnet.recompute` rematerializes.

    Rounding of ``y`` causes an error in ``xhat`` of about ``|beta| / |gamma|`` roundings,
    which shows in the gradient of ``gamma``. Its largest relative error over 4,096 samples in
    float32, with ``beta`` standard normal, is 1e-7 at gamma 1, 4e-6 at 0.01 and 3e-4 at 1e-4; that
    of dx is 7e-6 at 1e-4. With ``beta`` 0 both stay at 2e-7. In bfloat16 the error of dgamma is
    2e-3 at gamma 1, 2e-2 at 0.1 and 2e-1 at 0.01. A norm that saves ``x`` has an error of 2e-5.

    Args:
      x: [N, ..., C] for ``axis=-1``, rank >= 2; floating. Statistics are computed in float32
        (float64 for float64).
      gamma: scale [C], float32 or wider. None (also for ``beta``): no scale and offset.
      beta: offset [C], float32 or wider.
      running_mean: [C], float32 or wider. None (also for ``running_var``): not tracked, and
        evaluation uses the statistics of the batch.
      running_var: [C], float32 or wider.
      train: True: normalize with the statistics of the batch and update the running
        ones. False: normalize with the running ones and return them unchanged.
      activation: name of an activation, as for `fnet.layers.activation`.
      activation_param: slope of ``leaky_relu`` (0.01 by default) or alpha of ``elu`` (1 by
        default); > 0. The reference implementation defaults to 0.01 for both.
      eps: added to the variance and to |gamma|.
      decay: weight of the old running statistics; may be traced. For a cumulative average
        count the batches and pass ``1 - 1 / count``.
      axis: the channel axis.
      mask: [N] bool, True for real examples. Others are left out of the statistics, their
        output is 0 and they receive no gradient, as if the batch were smaller. If no example
        is real, the running statistics do not change.
      axis_name: mapped axes of ``jax.shard_map`` or ``jax.vmap`` over which to compute the
        statistics. The axes need not exist in evaluation. Under ``jax.jit`` with sharded
        arrays, statistics are global without it.

        A gradient taken outside of the mapped function is complete. Inside it, differentiate
        each device's own part of the loss. ``x`` then gets the gradient of all parts. With
        ``check_vma=True`` so do ``gamma`` and ``beta``. With ``check_vma=False`` and in
        ``jax.vmap`` they get one device's share, which you sum with ``jax.lax.psum``. In these
        two cases, the gradient of a loss that is already summed over devices is too large by
        the number of devices.

    Returns:
      ``(y, running_mean, running_var)``; ``y`` has the shape and dtype of ``x``, and the
      statistics have the shape and dtype of the arguments. No gradient flows into the statistics.

    Raises:
      TypeError: if ``x`` is not floating, or a parameter or statistic is narrower than
        float32; from JAX in forward mode (``jax.jvp``), which works on a gradient of
        `abn`, but not on `abn` itself.
      ValueError: for a parameter that does not have shape [C], ``gamma`` without ``beta``,
        an empty batch, one sample per channel in training, an unknown activation, or a
        slope or alpha that cannot be inverted.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> x = jax.random.normal(jax.random.key(0), (64, 8, 8, 3))
      >>> zeros, ones = jnp.zeros(3), jnp.ones(3)
      >>> abn = jax.jit(fnet.abn, static_argnames="train")
      >>> y, mean, var = abn(x, ones, zeros, zeros, ones, train=True)
      >>> y.shape, bool(abs(mean).max() < 0.1)
      ((64, 8, 8, 3), True)
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

    # With running statistics there is no sum over devices, so the axes need not exist.
    axes = None if frozen else axis_name
    spec = _Spec(activation, activation_param, eps, axis, axes)
    channels = x.shape[axis]
    # The derivative at gamma = 0 is taken as +1.
    g = (
        jnp.ones(channels, sum_dtype(x))
        if gamma is None
        else jnp.where(gamma < 0, -gamma, gamma) + eps
    )
    b = jnp.zeros(channels, sum_dtype(x)) if beta is None else beta
    statistics = (running_mean, running_var) if frozen else None
    y, mean, var, n = _normalize(spec, *equally_varying((x, g, b, statistics, mask)))
    if not train or running_mean is None or running_var is None or decay is None:
        return y, running_mean, running_var
    if mask is not None:  # a batch of padding only does not update the statistics
        decay = jnp.where(spec.sum_over_devices(mask.sum()) > 0, decay, 1.0)
    unbiased = var * (n / jnp.maximum(n - 1, 1))
    new = _update_running(running_mean, mean, decay), _update_running(running_var, unbiased, decay)
    return y, *new


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
    """In-place activated batch norm as a layer; see `fnet.abn`.

    Args:
      channels: C, size of the channel axis.
      activation, activation_param, eps, axis, axis_name: as for `fnet.abn`.
      decay: weight of the old running statistics; None: a cumulative average, whose
        count is part of the state.
      affine: whether there are ``gamma`` and ``beta``.
      track: whether to track running statistics for evaluation.

    Returns:
      A layer, x [N, ..., C] -> [N, ..., C] in the dtype of x. Its params are ``gamma`` [C],
      initially ones, and ``beta`` [C], initially zeros. Its state is ``running_mean`` [C],
      ``running_var`` [C], and ``count`` [] for a cumulative average. All are float32.

    Raises:
      ValueError: if ``channels`` is below 1, or the activation is unknown or cannot be
        inverted; when applied, as `fnet.abn`.
      TypeError: when applied, as `fnet.abn`.

    Example:
      >>> import jax, fnet
      >>> layer = fnet.layers.abn(3)
      >>> params, state = layer.init(jax.random.key(0))
      >>> x = jax.random.normal(jax.random.key(1), (64, 8, 8, 3))
      >>> y, state = layer.apply(params, state, x, train=True)
      >>> y.shape, sorted(params), sorted(state)
      ((64, 8, 8, 3), ['beta', 'gamma'], ['running_mean', 'running_var'])
    """
    checks.sizes("abn", channels=channels)
    activation_param = activations.check_parameter("abn", activation, activation_param)

    def init(key: Array) -> tuple[Params, State]:
        del key
        params, state = initial_arrays(channels)
        count = {"count": jnp.zeros((), jnp.float32)} if decay is None else {}
        return params if affine else {}, state | count if track else {}

    def apply(child: Children, x: Array) -> Array:
        old_weight = decay
        if child.train and "count" in child.state:
            child.state = child.state | {"count": child.state["count"] + 1}
            old_weight = 1 - 1 / child.state["count"]
        y, mean, var = abn(
            x,
            child.params.get("gamma"),
            child.params.get("beta"),
            child.state.get("running_mean"),
            child.state.get("running_var"),
            train=child.train,
            activation=activation,
            activation_param=activation_param,
            eps=eps,
            decay=old_weight,
            axis=axis,
            axis_name=axis_name,
        )
        if track:
            child.state = child.state | {"running_mean": mean, "running_var": var}
        return y

    return composite({}, apply, init=init, random=False)


def _check_arrays(x: Array, axis: int, mask: Array | None, **pair: Array | None) -> None:
    checks.floating("abn", x=x)
    if x.ndim < 2 or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"abn: x must have rank >= 2 and an axis {axis}, got shape {x.shape}")
    if mask is not None and axis % x.ndim == 0:
        raise ValueError("abn: a mask needs examples on axis 0, but axis=0 holds the channels")
    checks.mask("abn", mask, x.shape[:1])
    arrays = {name: v for name, v in pair.items() if v is not None}
    if len(arrays) == 1:
        (missing,) = pair.keys() - arrays.keys()
        raise ValueError(f"abn: got {next(iter(arrays))} without {missing}; give both or neither")
    given = f"the channels on axis {axis} of x {x.shape}"
    checks.shapes("abn", given, **{n: (v, (x.shape[axis],)) for n, v in arrays.items()})
    checks.wide("abn", **arrays)


def _update_running(old: Array, new: Array, decay: ArrayLike) -> Array:
    old_share = jnp.asarray(decay, old.dtype) * old
    new_share = (1 - jnp.asarray(decay, new.dtype)) * jax.lax.stop_gradient(new)
    return (old_share + new_share).astype(old.dtype)


def _check_samples(x: Array, axis: int, axis_name: AxisName) -> None:
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    if x.size == 0 or x.size * devices == x.shape[axis]:
        what = "one sample per channel" if x.size else "an empty batch"
        raise ValueError(
            f"abn: {what} has no batch statistics: x has shape {x.shape}, with channels on axis "
            f"{axis}; pass at least two samples, or train=False with running statistics"
        )


class _Spec(NamedTuple):
    """Static arguments of the normalization, and its sums and broadcasts."""

    activation: str
    param: float
    eps: float
    axis: int
    axis_name: AxisName

    def other_axes(self, ndim: int) -> tuple[int, ...]:
        return tuple(i for i in range(ndim) if i != self.axis)

    def sum(self, a: Array) -> Array:
        """[N, ..., C] -> [C] on this device."""
        return a.sum(self.other_axes(a.ndim))

    def sum_over_devices(self, a: Array) -> Array:
        return a if self.axis_name is None else jax.lax.psum(a, self.axis_name)

    def expand(self, v: Array, like: Array) -> Array:
        """[C] -> [1, ..., C], in the dtype of ``like``."""
        return jnp.expand_dims(v.astype(like.dtype), self.other_axes(like.ndim))


def initial_arrays(channels: int) -> tuple[Params, State]:
    """Build initial params and running statistics of a batch norm, float32 [channels]."""
    # One array per leaf: a shared one could not be donated.
    params = {"gamma": jnp.ones(channels, jnp.float32), "beta": jnp.zeros(channels, jnp.float32)}
    mean, var = jnp.zeros(channels, jnp.float32), jnp.ones(channels, jnp.float32)
    return params, {"running_mean": mean, "running_var": var}


def _zero_padding(mask: Array | None, a: Array) -> Array:
    if mask is None:
        return a
    return jnp.where(jnp.expand_dims(mask, range(1, a.ndim)), a, jnp.zeros_like(a))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(spec: _Spec, *arrays: Any) -> tuple[Array, Array, Array, Array]:
    """Compute ``act((x - mean) / sqrt(var + eps) * g + beta)``.

    The statistics are given or computed from the batch. Returns y, the mean [C], the
    biased variance [C], and the number of samples per channel [].
    """
    return _normalize_fwd(spec, *arrays)[0]


def _normalize_fwd(
    spec: _Spec,
    x: Array,
    g: Array,
    beta: Array,
    statistics: tuple[Array, Array] | None,
    mask: Array | None,
) -> tuple[tuple[Array, Array, Array, Array], tuple[Any, ...]]:
    w = upcast(x)
    samples = math.prod(x.shape[i] for i in spec.other_axes(x.ndim))
    n = jnp.asarray(samples, w.dtype)
    if mask is not None and x.size:  # for an empty batch n is 0 already
        n = mask.sum(dtype=w.dtype) * (samples // x.shape[0])
    n = jnp.maximum(spec.sum_over_devices(n), 1)
    if statistics is None:
        mean = spec.sum_over_devices(spec.sum(_zero_padding(mask, w))) / n
        deviation = _zero_padding(mask, w - spec.expand(mean, w))
        var = spec.sum_over_devices(spec.sum(jnp.square(deviation))) / n
    else:
        mean, var = statistics
    inv = jax.lax.rsqrt(var + spec.eps)
    z = (w - spec.expand(mean, w)) * spec.expand(inv * g, w) + spec.expand(beta, w)
    activation = activations.get(spec.activation)
    if activation.inverse:
        z = activation.forward(z, spec.param)
    saved, inv = save(_zero_padding(mask, z.astype(x.dtype))), save(inv)
    y = saved if activation.inverse else activation.forward(saved, spec.param)
    y = _zero_padding(mask, y)
    return (y, mean, var, n), (saved, inv, g, beta, mask, None if statistics else n)


def _normalize_bwd(
    spec: _Spec, residuals: tuple[Any, ...], cotangents: tuple[Array, ...]
) -> tuple[Any, ...]:
    saved, inv, g, beta, mask, n = residuals
    # Without the barrier XLA may compute z, as large as y, before dy is known.
    saved, dy = jax.lax.optimization_barrier((saved, cotangents[0]))
    z, dz = _invert(spec, saved, dy)
    dz = _zero_padding(mask, dz)
    xhat = _zero_padding(mask, (z - spec.expand(beta, z)) / spec.expand(g, z))
    dbeta, dg = spec.sum(dz), spec.sum(dz * xhat)
    dx = dz
    if n is not None:  # the statistics of the batch depend on x
        # Each device weights its sum by its own g, which may differ between devices.
        means = (spec.expand(spec.sum_over_devices(s * g) / (n * g), z) for s in (dbeta, dg))
        dx = dx - next(means) - xhat * next(means)
    dx = _zero_padding(mask, dx * spec.expand(inv * g, z))
    return dx.astype(saved.dtype), dg.astype(g.dtype), dbeta.astype(beta.dtype), None, None


def _invert(spec: _Spec, saved: Array, dy: Array) -> tuple[Array, Array]:
    """Compute z and its cotangent, float32 or wider, from what was saved."""
    activation = activations.get(spec.activation)
    if activation.inverse is None:
        _, vjp = jax.vjp(lambda z: activation.forward(z, spec.param), saved)
        return upcast(saved), upcast(vjp(dy)[0])
    z, slope = activation.inverse(upcast(saved), spec.param)
    if activation.min_output is not None and saved.dtype.itemsize < 4:
        # An output that saturated in its own dtype looks unsaturated in a wider one: clip z.
        min_y = jnp.asarray(activation.min_output(spec.param, saved.dtype), z.dtype)
        z = jnp.maximum(z, activation.inverse(min_y, spec.param)[0])
    return z, upcast(dy) * slope


_normalize.defvjp(_normalize_fwd, _normalize_bwd)
