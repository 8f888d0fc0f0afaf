"""Mamba's block: a causal convolution and a selective scan behind a gate."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from fnet.backward_pass import keep
from fnet.layer import Layer, Params, State, apply_child, check_sizes, init_children
from fnet.layers.causal_conv import causal_conv, causal_conv_layer
from fnet.layers.dense import dense
from fnet.layers.recurrence import recurrent
from fnet.mesh import equally_varying
from fnet.precision import broadcast_like, wide, widened

TORCH_LINEAR = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""How the projections of the authors' code start: as torch's Linear does."""


def mamba(
    width: int,
    *,
    expand: float = 2,
    state: int = 16,
    conv: int = 4,
    dt_rank: int | None = None,
    dt_min: float = 1e-3,
    dt_max: float = 1e-1,
    chunk: int | None = None,
) -> Layer:
    """A layer along time that chooses from its input what it remembers.

    Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"::

        u, z    = split(x W_in);  u = silu(causal_conv(u))
        r, B, C = split(u W_u);   dt = softplus(r W_dt + dt_bias)
        y       = (selective_scan(u, dt, -exp(A_log), B, C, D) * silu(z)) W_out

    Initial values are the paper's: A = -1, ..., -N in each channel, D = 1, and a
    ``dt_bias`` with which dt lies between ``dt_min`` and ``dt_max``, uniform in its logarithm.
    Steps and recurrence are computed in float32 or wider, all else in the input's
    dtype. Under `fnet.recompute` the output of the scan is kept.

    Args:
      width: D, the size of the input's and the output's last axis.
      expand: the inner width E is ``round(expand * width)``.
      state: N, states a channel.
      conv: how many inputs the convolution sees.
      dt_rank: size of r; ceil(width / 16) by default.
      dt_min, dt_max: the range of initial time steps, 0 < dt_min <= dt_max.
      chunk: as for `fnet.selective_scan`.

    Returns:
      A layer, [B, T, D] -> [B, T, D], causal. Of the parameters (float32) only those
      named ``kernel`` are meant to decay. A ``mask`` [B, T] is taken and not needed: padding
      comes after what is real, which never sees it. To go on from where it stopped
      (`fnet.layer.Decode`) it needs a cache of one size, whatever the length: the last
      ``conv - 1`` inputs of the convolution, and the state [B, N, E] in float32 or wider.

    Raises:
      ValueError: for a size below 1 or such a range of steps; when applied, if ``x``
        does not end in ``width``.
      TypeError: when applied, if ``x`` is not floating.
    """
    inner = round(expand * width)
    rank = math.ceil(width / 16) if dt_rank is None else dt_rank
    check_sizes(
        "mamba",
        width=width,
        inner=inner,
        state=state,
        conv=conv,
        dt_rank=rank,
        chunk=1 if chunk is None else chunk,
    )
    check_steps("mamba", dt_min, dt_max)
    children = {
        "in": dense(width, 2 * inner, bias=False, kernel_init=TORCH_LINEAR),
        "conv": causal_conv_layer(inner, conv),
        "select": dense(inner, rank + 2 * state, bias=False, kernel_init=TORCH_LINEAR),
        # Uniform within 1 / sqrt(rank), as the paper has it, is what torch's Linear starts with.
        "dt": dense(rank, inner, bias=False, kernel_init=TORCH_LINEAR),
        "out": dense(inner, width, bias=False, kernel_init=TORCH_LINEAR),
    }

    def init(key: Array) -> tuple[Params, State]:
        for_children, for_steps = jax.random.split(key)
        params, _ = init_children(children, for_children)
        rates = jnp.arange(1, state + 1, dtype=jnp.float32)
        return params | {
            "A_log": jnp.log(jnp.broadcast_to(rates[None], (inner, state))),
            "D": jnp.ones(inner, jnp.float32),
            "dt_bias": initial_steps(for_steps, inner, dt_min, dt_max),
        }, {}

    def mix(params: Params, cache: Any, x: Array) -> tuple[Array, Any]:
        def child(name: str, x: Array) -> Array:
            return apply_child(children, name, params, {}, x, key=None, train=False)[0]

        u, z = jnp.split(child("in", x), 2, axis=-1)
        with jax.named_scope("conv"):
            u, past = causal_conv(u, **params["conv"], past=cache.get("conv"))
        u = jax.nn.silu(u)
        r, B, C = jnp.split(child("select", u), [rank, rank + state], axis=-1)
        with jax.named_scope("scan"):
            y, last = selective_scan(
                u,
                time_steps(child("dt", r), params["dt_bias"]),
                -jnp.exp(params["A_log"].astype(wide(x))),
                B,
                C,
                params["D"],
                cache.get("state"),
                chunk,
            )
        y = child("out", keep(y) * jax.nn.silu(z))
        return y, {"conv": past, "state": last}

    def start(batch: int, length: int, dtype: DTypeLike) -> Any:
        del length
        return {
            "conv": jnp.zeros((batch, conv - 1, inner), dtype),
            "state": jnp.zeros((batch, state, inner), wide(dtype)),
        }

    return recurrent("mamba", width, init, mix, start)


def initial_steps(key: Array, n: int, dt_min: float, dt_max: float) -> Array:
    """Biases [n] whose softplus lies in [dt_min, dt_max], uniform in its logarithm."""
    dt = jnp.exp(jax.random.uniform(key, (n,), jnp.float32, math.log(dt_min), math.log(dt_max)))
    return dt + jnp.log(-jnp.expm1(-dt))


def time_steps(x: Array, bias: Array) -> Array:
    """``softplus(x + bias)``, [B, T, C] and [C], in float32 or wider."""
    x = widened(x)
    return jax.nn.softplus(x + broadcast_like(bias, x))


def check_steps(where: str, dt_min: float, dt_max: float) -> None:
    """Refuses a range of steps that is empty or does not lie above 0."""
    if not 0 < dt_min <= dt_max:
        raise ValueError(
            f"{where}: time steps need 0 < dt_min <= dt_max, got dt_min={dt_min}, dt_max={dt_max}"
        )


def selective_scan(
    x: Float[Array, "b t e"],
    dt: Float[Array, "b t e"],
    A: Float[Array, "e n"],
    B: Float[Array, "b t n"],
    C: Float[Array, "b t n"],
    D: Float[Array, " e"] | None = None,
    initial: Float[Array, "b n e"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "b t e"], Float[Array, "b n e"]]:
    """A state space model whose step, input and output vary with time.

    Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State
    Spaces". For each channel e and each of its N states n::

        h_t[n, e] = exp(dt_t[e] A[e, n]) h_{t-1}[n, e] + dt_t[e] B_t[n] x_t[e]
        y_t[e]    = sum_n C_t[n] h_t[n, e] + D[e] x_t[e]

    Kept for the backward pass: the arguments, and the state before each chunk. The
    states within a chunk are made again when its turn comes, and the same loop
    backwards finds g_t, the cotangent of h_t, and all gradients from it::

        g_t = C_t dy_t + p_{t+1};  p_t = exp(dt_t A) g_t;  s_t = p_t h_{t-1}
        dA = sum_t dt_t s_t;  ddt_t = sum_n (A s_t + g_t B_t x_t);  dx_t = sum_n g_t B_t dt_t

    With chunks of sqrt(T) steps, 2 sqrt(T) states exist instead of T (Chen et al. 2016,
    "Training Deep Nets with Sublinear Memory Cost"). No compiler option is needed for
    that. Time is linear in T. The gradient can be had by reverse mode, under `jax.vmap`
    too; its own derivative keeps the states of all steps.

    It is a loop over time, made for CPUs. Value and gradients of 256 channels of 16
    states, float32, two cores, temporaries and time against the same loop and an
    associative scan under automatic differentiation (``python -m benchmarks.selective_scan``):

    =====  ===============  ================  ==================
    T      fnet             loop              associative
    =====  ===============  ================  ==================
    256    1.5 MB, 3.6 ms   14 MB, 23 ms      29 MB, 41 ms
    2,048  8.5 MB, 27 ms    111 MB, 181 ms    235 MB, 620 ms
    8,192  30 MB, 121 ms    446 MB, 720 ms
    =====  ===============  ================  ==================

    On an accelerator each step is a few small kernels: `fnet.layers.mamba2`, which is made
    of matrix products, is meant for it.

    Args:
      x: inputs [B, T, E], T >= 1; float16, bfloat16, float32 or float64. The
        recurrence is computed in float32 (float64 if any argument but D is).
      dt: time steps, [B, T, E], >= 0; with dt = 0 a step leaves the state as it is.
      A: [E, N], negative.
      B, C: [B, T, N].
      D: [E]; None: 0.
      initial: h_0, [B, N, E]; None: zeros. The channels come last, as processors
        take neighbours together.
      chunk: steps at a time; by default the divisor of T nearest to sqrt(T), or sqrt(T)
        where there is none near.

    Returns:
      ``(y, h_T)``: y [B, T, E] in the dtype of ``x``, the last state [B, N, E] in
      that of the recurrence.

    Raises:
      TypeError: if an array is not floating; from JAX in forward mode.
      ValueError: if a shape does not fit, T is 0, or ``chunk < 1``.
    """
    _check(x, dt, A, B, C, D, initial)
    if chunk is not None and chunk < 1:
        raise ValueError(f"selective_scan: chunk must be at least 1, got {chunk}")
    t = x.shape[1]
    size = _near_root(t) if chunk is None else min(t, chunk)
    size = -(-t // -(-t // size))  # as many chunks, evenly long

    given = [a for a in (x, dt, A, B, C, initial) if a is not None]
    dtype = wide(*given)
    if initial is None:
        initial = jnp.zeros_like(jnp.repeat(x[:, 0, None], A.shape[1], axis=1), dtype)
    initial, A = initial.astype(dtype), A.astype(dtype)
    y, last = _scan(size, *equally_varying((x, dt, A, B, C, initial)))
    if D is not None:
        y = y + broadcast_like(D, y) * x.astype(dtype)
    return y.astype(x.dtype), last


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(
    size: int, x: Array, dt: Array, A: Array, B: Array, C: Array, initial: Array
) -> tuple[Array, Array]:
    """Outputs and the last state, both in the dtype of ``initial``."""
    return _scan_fwd(size, x, dt, A, B, C, initial)[0]


def _scan_fwd(
    size: int, x: Array, dt: Array, A: Array, B: Array, C: Array, initial: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    At, wide = A.T, initial.dtype

    def step(h: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        x, dt, B, C = (a.astype(wide) for a in now)
        h = _next(h, At, dt, dt * x, B)
        return h, jnp.einsum("bne,bn->be", h, C)

    def one_chunk(h: Array, now: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        last, y = jax.lax.scan(step, h, now)
        return last, (y, h)

    chunks = tuple(_chunks(a, size) for a in (x, dt, B, C))
    last, (y, states) = jax.lax.scan(one_chunk, initial, chunks)
    return (_whole(y, x.shape[1]), last), (x, dt, A, B, C, states)


def _scan_bwd(
    size: int, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, ...]:
    x, dt, A, B, C, states = residuals
    dy, dlast = cotangents
    At, wide = A.T, A.dtype

    def one_chunk(
        carry: tuple[Array, Array], now: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        h0 = now[-1]
        x, dt, B, C, dy = (a.astype(wide) for a in now[:-1])
        u = dt * x

        # The states of this chunk once more, and what needs each in full, while it is there.
        def again(h: Array, now: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            dt, u, B, dy = now
            after = _next(h, At, dt, u, B)
            return after, (h, jnp.einsum("bne,be->bn", after, dy))

        _, (before, dC) = jax.lax.scan(again, h0, (dt, u, B, dy))

        def back(
            carry: tuple[Array, Array], now: tuple[Array, ...]
        ) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
            p, dAt = carry
            dt, u, B, C, dy, h = now
            g = C[..., None] * dy[:, None] + p
            p = jnp.exp(dt[:, None] * At[None]) * g
            # XLA on CPU does not vectorise a sum over an inner axis; written out it does.
            rates = functools.reduce(
                jnp.add, [p[:, n] * h[:, n] * At[n][None] for n in range(At.shape[0])]
            )
            dAt = dAt + dt[:, None] * (p * h)
            gB = jnp.einsum("bne,bn->be", g, B)
            return (p, dAt), (gB, rates, jnp.einsum("bne,be->bn", g, u))

        carry, (gB, rates, dB) = jax.lax.scan(back, carry, (dt, u, B, C, dy, before), reverse=True)
        of = now[:4]
        grads = (dt * gB, rates + x * gB, dB, dC)
        return carry, tuple(g.astype(a.dtype) for g, a in zip(grads, of, strict=True))

    chunks = (*(_chunks(a, size) for a in (x, dt, B, C, dy)), states)
    # One gradient of A for each example, summed at the end: a sum over them every step is slower.
    start = equally_varying((dlast, jnp.zeros_like(dlast)))
    (dinitial, dAt), grads = jax.lax.scan(one_chunk, start, chunks, reverse=True)
    dx, ddt, dB, dC = (_whole(g, x.shape[1]) for g in grads)
    return dx, ddt, dAt.sum(0).T, dB, dC, dinitial


_scan.defvjp(_scan_fwd, _scan_bwd)


def _near_root(t: int) -> int:
    """Near sqrt(t), a divisor if there is one: chunks that need no padding need no copies."""
    root = math.sqrt(t)
    near = [d for d in range(math.ceil(root / 2), int(2 * root) + 1) if t % d == 0]
    return min(near, key=lambda d: abs(math.log(d / root)), default=round(root))


def _next(h: Array, At: Array, dt: Array, u: Array, B: Array) -> Array:
    """The state [B, N, E] one step on."""
    return jnp.exp(dt[:, None] * At[None]) * h + u[:, None] * B[..., None]


def _chunks(a: Array, size: int) -> Array:
    """[B, T, ...] -> [chunks, size, B, ...]; added steps have dt = 0 and change nothing."""
    a = jnp.moveaxis(a, 1, 0)
    n = -(-a.shape[0] // size)
    a = jnp.pad(a, ((0, n * size - a.shape[0]), *[(0, 0)] * (a.ndim - 1)))
    return a.reshape(n, size, *a.shape[1:])


def _whole(a: Array, t: int) -> Array:
    """[chunks, size, B, ...] -> [B, T, ...]."""
    return jnp.moveaxis(a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])[:t], 0, 1)


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
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "initial": initial}
    for name, array in given.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"selective_scan: {name} must be floating, got {array.dtype}")
    if x.ndim != 3 or not x.shape[1] or A.ndim != 2 or not A.shape[1]:
        raise ValueError(
            "selective_scan: expected x [B, T, E] with T >= 1 and A [E, N] with N >= 1, "
            f"got x {x.shape} and A {A.shape}"
        )
    (b, t, e), n = x.shape, A.shape[1]
    expected = {"dt": (b, t, e), "A": (e, n), "B": (b, t, n), "C": (b, t, n)}
    expected |= {"D": (e,), "initial": (b, n, e)}
    for name, shape in expected.items():
        array = given[name]
        if array is not None and array.shape != shape:
            raise ValueError(
                f"selective_scan: {name} must have shape {shape} for x {x.shape} and "
                f"A {A.shape}, got {array.shape}"
            )
