"""The scan of Mamba-2 as matrix products, chunk by chunk, and the layer around it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from fnet.layer import Layer, Params, State, apply_child, check_sizes, init_children
from fnet.layers.causal_conv import causal_conv, causal_conv_layer
from fnet.layers.dense import dense
from fnet.layers.mamba import TORCH_LINEAR, check_steps, initial_steps, time_steps
from fnet.layers.norm import rms_norm_layer
from fnet.layers.recurrence import recurrent
from fnet.mesh import equally_varying
from fnet.precision import wide


def state_space_dual(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    A: Float[Array, " h"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    D: Float[Array, " h"] | None = None,
    initial: Float[Array, "b h n p"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h n p"]]:
    """A state space model with one decay a head, computed by matrix products.

    Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms
    Through Structured State Space Duality". In each head, with B and C those of its group::

        h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T
        y_t = h_t^T C_t + D x_t

    Over a chunk this is one triangular matrix, and what came before it, with
    l the sum of dt A from the chunk's start up to and with t::

        M_ts = (C_t . B_s) exp(l_t - l_s) for s <= t, else 0
        y    = M (dt x) + exp(l) C h_before
        h    = exp(l_end) h_before + sum_s exp(l_end - l_s) B_s (dt_s x_s)^T

    Chunks come one after the other and are computed again in the backward pass, so that
    one chunk's matrices exist at a time, and the state before each.

    Args:
      x: inputs [B, T, H, P], T >= 1; float16, bfloat16, float32 or float64. All is
        computed in float32 (float64 if any argument but D is).
      dt: time steps, [B, T, H], >= 0; with dt = 0 a step leaves the state as it is.
      A: [H], negative.
      B, C: [B, T, G, N], G dividing H: heads ``[i H / G, (i + 1) H / G)`` read group i.
      D: [H]; None: 0.
      initial: h_0, [B, H, N, P]; None: zeros.
      chunk: steps at a time; 64 by default.

    Returns:
      ``(y, h_T)``: y [B, T, H, P] in the dtype of ``x``, the last state [B, H, N, P]
      in that of the recurrence.

    Raises:
      TypeError: if an array is not floating.
      ValueError: if a shape does not fit, T is 0, or ``chunk < 1``.
    """
    _check(x, dt, A, B, C, D, initial)
    if chunk is not None and chunk < 1:
        raise ValueError(f"state_space_dual: chunk must be at least 1, got {chunk}")
    (b, t, h, p), (groups, n) = x.shape, B.shape[2:]
    size = min(t, chunk or _CHUNK)
    size = -(-t // -(-t // size))  # as many chunks, evenly long

    given = [a for a in (x, dt, A, B, C, initial) if a is not None]
    dtype = wide(*given)
    if initial is None:
        initial = jnp.zeros_like(jnp.repeat(x[:, 0, :, None], n, axis=2), dtype)
    initial, A = initial.astype(dtype), A.astype(dtype)
    x, dt, A, B, C, initial = equally_varying((x, dt, A, B, C, initial))

    # In a scan nothing can merge what is computed again with what was.
    one_chunk = jax.checkpoint(
        functools.partial(_one_chunk, A.reshape(groups, h // groups)), prevent_cse=False
    )
    by_group = (
        x.reshape(b, t, groups, h // groups, p),
        dt.reshape(b, t, groups, h // groups),
        B,
        C,
    )
    chunks = tuple(_chunks(a, size) for a in by_group)
    start = initial.reshape(b, groups, h // groups, n, p)
    last, y = jax.lax.scan(one_chunk, start, chunks)
    # One axis at a time: a sharding is followed through no other reshape.
    y = jnp.moveaxis(y, 0, 1).reshape(b, y.shape[0] * size, groups, h // groups, p)[:, :t]
    y = y.reshape(b, t, h, p)
    if D is not None:
        y = y + jnp.broadcast_to(D.astype(dtype)[:, None], x.shape) * x.astype(dtype)
    return y.astype(x.dtype), last.reshape(b, h, n, p)


def mamba2(
    width: int,
    *,
    expand: float = 2,
    head: int | None = None,
    state: int = 64,
    groups: int = 1,
    conv: int = 4,
    dt_min: float = 1e-3,
    dt_max: float = 1e-1,
    chunk: int | None = None,
) -> Layer:
    """Mamba with one decay a head, so that its scan is made of matrix products.

    Dao and Gu 2024, "Transformers are SSMs"; H heads of P channels each::

        z, xBC, r = split(x W_in);  u, B, C = split(silu(causal_conv(xBC)))
        dt        = softplus(r + dt_bias)
        y         = state_space_dual(u, dt, -exp(A_log), B, C, D)
        y         = rms_norm(y * silu(z)) W_out

    The norm is over all channels. At first -A is uniform in [1, 16], D is 1, and dt
    lies between ``dt_min`` and ``dt_max``, uniform in its logarithm. Steps and recurrence are
    computed in float32 or wider, all else in the input's dtype. Under `fnet.recompute`
    the output of the norm is kept.

    Args:
      width: D, the size of the input's and the output's last axis.
      expand: the inner width E = H P is ``round(expand * width)``.
      head: P; by default the largest divisor of E up to 64.
      state: N, states a channel.
      groups: how many different B and C there are; divides the number of heads.
      conv: how many inputs the convolution sees.
      dt_min, dt_max: the range of initial time steps, 0 < dt_min <= dt_max.
      chunk: as for `state_space_dual`.

    Returns:
      A layer, [B, T, D] -> [B, T, D], causal. Of the parameters (float32) only those
      named ``kernel`` are meant to decay. A ``mask`` [B, T] is taken and not needed: padding
      comes after what is real, which never sees it. To go on from where it stopped
      (`fnet.layer.Decode`) it needs a cache of one size, whatever the length: the last
      ``conv - 1`` inputs of the convolution, and the state [B, H, N, P] in float32 or wider.

    Raises:
      ValueError: for a size below 1, a ``head`` that does not divide E, ``groups`` that do
        not divide the heads, or such a range of steps; when applied, if ``x`` does not end
        in ``width``.
      TypeError: when applied, if ``x`` is not floating.
    """
    inner = round(expand * width)
    if head is None:
        head = max((p for p in range(1, 65) if inner % p == 0), default=1)
    sizes = {"width": width, "inner": inner, "head": head, "state": state, "groups": groups}
    check_sizes("mamba2", **sizes, conv=conv, chunk=1 if chunk is None else chunk)
    check_steps("mamba2", dt_min, dt_max)
    if inner % head:
        raise ValueError(
            f"mamba2: head must divide round(expand * width) = {inner}, got head={head}"
        )
    heads = inner // head
    if heads % groups:
        raise ValueError(
            f"mamba2: groups must divide the heads, got groups={groups} and "
            f"{heads} heads of {head} channels"
        )
    shared = groups * state
    children = {
        "in": dense(width, 2 * inner + 2 * shared + heads, bias=False, kernel_init=TORCH_LINEAR),
        "conv": causal_conv_layer(inner + 2 * shared, conv),
        "norm": rms_norm_layer(inner),
        "out": dense(inner, width, bias=False, kernel_init=TORCH_LINEAR),
    }

    def init(key: Array) -> tuple[Params, State]:
        for_children, for_rates, for_steps = jax.random.split(key, 3)
        params, _ = init_children(children, for_children)
        rates = jax.random.uniform(for_rates, (heads,), jnp.float32, 1, 16)
        return params | {
            "A_log": jnp.log(rates),
            "D": jnp.ones(heads, jnp.float32),
            "dt_bias": initial_steps(for_steps, heads, dt_min, dt_max),
        }, {}

    def mix(params: Params, cache: Any, x: Array) -> tuple[Array, Any]:
        def child(name: str, x: Array) -> Array:
            return apply_child(children, name, params, {}, x, key=None, train=False)[0]

        parts = [inner, 2 * inner + 2 * shared]
        z, u, r = jnp.split(child("in", x), parts, axis=-1)
        with jax.named_scope("conv"):
            u, past = causal_conv(u, **params["conv"], past=cache.get("conv"))
        u, B, C = jnp.split(jax.nn.silu(u), [inner, inner + shared], axis=-1)
        with jax.named_scope("scan"):
            y, last = state_space_dual(
                u.reshape(*u.shape[:2], heads, head),
                time_steps(r, params["dt_bias"]),
                -jnp.exp(params["A_log"].astype(wide(x))),
                B.reshape(*B.shape[:2], groups, state),
                C.reshape(*C.shape[:2], groups, state),
                params["D"],
                cache.get("state"),
                chunk,
            )
        y = child("norm", y.reshape(z.shape) * jax.nn.silu(z))
        return child("out", y), {"conv": past, "state": last}

    def start(batch: int, length: int, dtype: DTypeLike) -> Any:
        del length
        return {
            "conv": jnp.zeros((batch, conv - 1, inner + 2 * shared), dtype),
            "state": jnp.zeros((batch, heads, state, head), wide(dtype)),
        }

    return recurrent("mamba2", width, init, mix, start)


# Steps at a time. Gradient for 4 and 24 heads of 64, N = 64 and 128, 2,048 steps, on two CPU cores:
# 32 and 64 are within a tenth of each other; 16 and 128 take up to 1.4 and 1.7 of that. Fewer
# chunks have fewer states to keep.
_CHUNK = 64


def _one_chunk(
    A: Float[Array, "g r"], state: Float[Array, "b g r n p"], now: tuple[Array, ...]
) -> tuple[Array, Array]:
    """The state behind a chunk, and its outputs [B, Q, G, R, P]; R heads a group."""
    x, dt, B, C = (a.astype(state.dtype) for a in now)
    u = x * dt[..., None]
    logs = jnp.cumsum(jnp.moveaxis(dt * A[None, None], 1, 3), axis=3)  # l, [B, G, R, Q]
    between = logs[..., :, None] - logs[..., None, :]
    past = jnp.tril(jnp.ones(between.shape[-2:], bool))
    # Selected before exp: of what lies ahead it would overflow, and so would its gradient.
    decay = jnp.exp(jnp.where(jnp.expand_dims(past, (0, 1, 2)), between, -jnp.inf))
    scores = jnp.einsum("btgn,bsgn->bgts", C, B)
    y = jnp.einsum("bgrts,bsgrp->btgrp", scores[:, :, None] * decay, u)
    onwards = jnp.moveaxis(jnp.exp(logs), 3, 1)[..., None]  # [B, Q, G, R, 1]
    y = y + onwards * jnp.einsum("btgn,bgrnp->btgrp", C, state)
    left = jnp.moveaxis(jnp.exp(logs[..., -1:] - logs), 3, 1)[..., None]
    added = jnp.einsum("bsgn,bsgrp->bgrnp", B, left * u)
    return jnp.exp(logs[..., -1])[..., None, None] * state + added, y


def _chunks(a: Array, size: int) -> Array:
    """[B, T, ...] -> [chunks, B, size, ...]; added steps have dt = 0 and change nothing."""
    n = -(-a.shape[1] // size)
    a = jnp.pad(a, ((0, 0), (0, n * size - a.shape[1]), *[(0, 0)] * (a.ndim - 2)))
    return jnp.moveaxis(a.reshape(a.shape[0], n, size, *a.shape[2:]), 1, 0)


def _check(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None,
    initial: Array | None,
) -> None:
    """Refuses arrays that do not fit each other."""
    where = "state_space_dual"
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "initial": initial}
    for name, array in given.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{where}: {name} must be floating, got {array.dtype}")
    if x.ndim != 4 or not x.shape[1] or B.ndim != 4:
        raise ValueError(
            f"{where}: expected x [B, T, H, P] with T >= 1 and B [B, T, G, N], "
            f"got x {x.shape} and B {B.shape}"
        )
    (b, t, h, p), (groups, n) = x.shape, B.shape[2:]
    if not groups or h % groups:
        raise ValueError(
            f"{where}: x's heads must be a multiple of B's groups, got x {x.shape} and B {B.shape}"
        )
    expected = {"dt": (b, t, h), "A": (h,), "B": (b, t, groups, n), "C": (b, t, groups, n)}
    expected |= {"D": (h,), "initial": (b, h, n, p)}
    for name, shape in expected.items():
        array = given[name]
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{where}: {name} must have shape {shape} for x {x.shape} and B {B.shape}, "
                f"got {array.shape}"
            )
