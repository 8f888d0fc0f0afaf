"""Mamba's selective scan in chunks of time: T x N x E numbers never exist at once."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.mesh import equally_varying
from fnet.precision import broadcast_like, wide


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
