"""Mamba: a selective state space layer, and its scan."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from fnet import checks, chunks
from fnet.backward_pass import save
from fnet.layer import Layer, Params
from fnet.layers.causal_conv import causal_conv_layer
from fnet.layers.norm import rms_norm
from fnet.layers.recurrence import Step, init_step_bias, recurrent, time_steps, torch_linear
from fnet.layers.segments import restarts
from fnet.mesh import equally_varying
from fnet.precision import broadcast_like, sum_dtype


def mamba(
    width: int,
    *,
    expand: float = 2,
    state: int = 16,
    conv: int = 4,
    dt_rank: int | None = None,
    chunk: int | None = None,
    bias: bool = False,
    conv_bias: bool = True,
    select_norm_eps: float | None = None,
) -> Layer:
    """Mamba block: a causal convolution and a selective scan, gated.

    Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"::

        u, z    = split(x W_in);  u = silu(causal_conv(u))
        r, B, C = split(u W_u);   dt = softplus(r W_dt + dt_bias)
        y       = (selective_scan(u, dt, -exp(A_log), B, C, D) * silu(z)) W_out

    Parameters are initialized as in the paper: A = -1, ..., -N in each channel, D = 1, and
    ``dt_bias`` such that dt is log-uniform in [0.001, 0.1]. Time steps and recurrence are
    computed in float32 or wider, everything else in the dtype of the input. Under
    `fnet.recompute` the output of the scan is saved.

    Args:
      width: D, size of the last axis of input and output.
      expand: the inner width E is ``round(expand * width)``.
      state: N, state size per channel.
      conv: width of the causal convolution.
      dt_rank: size of r; default ceil(width / 16).
      chunk: as for `fnet.selective_scan`.
      bias: whether the first and the last dense layer have biases.
      conv_bias: whether the convolution has a bias.
      select_norm_eps: epsilon of RMS norms, without scales, of r, B and C, as in Falcon Mamba.
        None: no norms.

    Returns:
      A causal layer, [B, T, D] -> [B, T, D]. Params are float32; apply weight decay only
      to those named ``kernel``. A ``mask`` [B, T] is accepted but not needed: padding at
      the end never reaches real tokens. With ``segments`` [B, T], integers, the state restarts at 0
      where they change, for several documents in a row. `fnet.layer.Decode` is
      supported with a cache of constant size: the last ``conv - 1`` inputs of the convolution, and
      the state [B, N, E] in float32 or wider.

    Raises:
      ValueError: for a size below 1; when applied, if ``x`` does not end in ``width``.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.mamba(8, state=4)
      >>> params, state = jax.jit(layer.init)(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 16, 8)), train=True)[0].shape
      (2, 16, 8)
    """
    inner = round(expand * width)
    rank = math.ceil(width / 16) if dt_rank is None else dt_rank
    sizes = {"width": width, "inner": inner, "state": state, "conv": conv, "dt_rank": rank}
    checks.sizes("mamba", **sizes, chunk=chunk)

    def init_own(steps_key: Array) -> Params:
        rates = jnp.arange(1, state + 1, dtype=jnp.float32)
        return {
            "A_log": jnp.log(jnp.broadcast_to(rates[None], (inner, state))),
            "D": jnp.ones(inner, jnp.float32),
            "dt_bias": init_step_bias(steps_key, inner),
        }

    def mix(step: Step) -> tuple[Array, Array]:
        params = step.child.params
        u, z = jnp.split(step("in"), 2, axis=-1)
        u = jax.nn.silu(step.convolve(u))
        r, B, C = jnp.split(step("select", u), [rank, rank + state], axis=-1)
        if select_norm_eps is not None:
            r, B, C = (rms_norm(a, None, eps=select_norm_eps) for a in (r, B, C))
        with jax.named_scope("scan"):
            dt = time_steps(step("dt", r), params["dt_bias"])
            A = -jnp.exp(params["A_log"].astype(sum_dtype(u)))
            y, last = selective_scan(u, dt, A, B, C, params["D"], step.state, chunk, step.segments)
        return step("out", save(y) * jax.nn.silu(z)), last

    plain = functools.partial(torch_linear, bias=False)
    return recurrent(
        "mamba",
        width,
        mix,
        inputs={"in": 2 * inner},
        conv=causal_conv_layer(inner, conv, bias=conv_bias),
        inner=inner,
        state_shape=(state, inner),
        linear=functools.partial(torch_linear, bias=bias),
        between={"select": plain(inner, rank + 2 * state), "dt": plain(rank, inner)},
        init_own=init_own,
        draws=1,
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
    segments: Int[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t e"], Float[Array, "b n e"]]:
    """Run a state space model whose time step, input and output depend on the position.

    Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State
    Spaces". For each channel e and each of its N states n::

        h_t[n, e] = exp(dt_t[e] A[e, n]) h_{t-1}[n, e] + dt_t[e] B_t[n] x_t[e]
        y_t[e]    = sum_n C_t[n] h_t[n, e] + D[e] x_t[e]

    The backward pass saves the arguments and the state before each chunk. It rematerializes
    the states of one chunk at a time. A reversed loop then computes g_t, the cotangent
    of h_t, and from it all gradients::

        g_t = C_t dy_t + p_{t+1};  p_t = exp(dt_t A) g_t;  s_t = p_t h_{t-1}
        dA = sum_t dt_t s_t;  ddt_t = sum_n (A s_t + g_t B_t x_t);  dx_t = sum_n g_t B_t dt_t

    Chunks of sqrt(T) steps need memory for 2 sqrt(T) states instead of T (Chen et al. 2016,
    "Training Deep Nets with Sublinear Memory Cost"), without compiler options. Compute
    grows linearly with T. Reverse mode can be nested and vmapped; the second derivative
    saves the states of all steps.

    This is a sequential loop, written for CPUs. Value and gradients of 2,048 steps with 256
    channels and 16 states in float32 need 8.5 MB of temporaries and 27 ms on two CPU cores. Under
    automatic differentiation the same loop needs 111 MB and 181 ms, and an associative scan 235 MB
    and 620 ms (``python -m benchmarks.selective_scan``). On an accelerator each step launches a few
    small kernels. Use `fnet.layers.mamba2` there: it computes matrix products.

    Args:
      x: inputs [B, T, E], T >= 1; floating. The recurrence is computed in float32 (float64 if any
        argument but D is float64).
      dt: time steps, [B, T, E], >= 0. A step with dt = 0 leaves the state unchanged.
      A: [E, N], negative.
      B, C: [B, T, N].
      D: [E]; None: 0.
      initial: h_0, [B, N, E], channels last for contiguous access; None: zeros.
      chunk: steps per chunk. The default is the divisor of T nearest to sqrt(T), or
        sqrt(T) rounded if no divisor is near.
      segments: as for `fnet.linear_recurrence`.

    Returns:
      ``(y, h_T)``: y [B, T, E] in the dtype of ``x``, and the last state [B, N, E] in
      the dtype of the recurrence.

    Raises:
      TypeError: if an array is not floating, or the segments are not integers; from JAX in
        forward mode.
      ValueError: if the shapes do not match, T is 0, or ``chunk < 1``.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> x, dt, A = jnp.ones((1, 6, 4)), jnp.full((1, 6, 4), 0.1), -jnp.ones((4, 3))
      >>> B = C = jnp.ones((1, 6, 3))
      >>> y, last = jax.jit(fnet.selective_scan)(x, dt, A, B, C)
      >>> y.shape, last.shape
      ((1, 6, 4), (1, 3, 4))
    """
    where = "selective_scan"
    checks.floating(where, x=x, dt=dt, A=A, B=B, C=C, D=D, initial=initial)
    inputs = {"x": (x, "b t e"), "A": (A, "e n"), "dt": (dt, "b t e"), "B": (B, "b t n")}
    lengths = checks.dims(where, **inputs, C=(C, "b t n"), D=(D, "e"), initial=(initial, "b n e"))
    checks.sizes(where, T=lengths["t"], N=lengths["n"], chunk=chunk)
    t = x.shape[1]
    size = _near_root(t) if chunk is None else min(t, chunk)
    _, size = chunks.even(t, size)

    dtype = sum_dtype(*(a for a in (x, dt, A, B, C, initial) if a is not None))
    if initial is None:
        initial = jnp.zeros_like(jnp.repeat(x[:, 0, None], A.shape[1], axis=1), dtype)
    initial, A = initial.astype(dtype), A.astype(dtype)
    starts = restarts("selective_scan", segments, x.shape[:2])
    y, last = _scan(size, *equally_varying((x, dt, A, B, C, initial, starts)))
    if D is not None:
        y = y + broadcast_like(D, y) * x.astype(dtype)
    return y.astype(x.dtype), last


_Inputs = tuple[tuple[Array, ...], Array | None]
"""Floating arrays over the sequence, and where documents start."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(size: int, *arrays: Any) -> tuple[Array, Array]:
    """Compute outputs and last state, both in the dtype of ``initial``."""
    return _scan_fwd(size, *arrays)[0]


def _scan_fwd(
    size: int,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    initial: Array,
    starts: Array | None,
) -> tuple[tuple[Array, Array], tuple[Array | None, ...]]:
    At, wide = A.T, initial.dtype

    def step(h: Array, inputs: _Inputs) -> tuple[Array, Array]:
        (x, dt, B, C), start = tuple(a.astype(wide) for a in inputs[0]), inputs[1]
        h = _next_state(_unless(start, h), At, dt, dt * x, B)
        return h, jnp.einsum("bne,bn->be", h, C)

    def one_chunk(h: Array, inputs: _Inputs) -> tuple[Array, tuple[Array, Array]]:
        last, y = jax.lax.scan(step, h, inputs)
        return last, (y, h)

    inputs = _to_chunks(((x, dt, B, C), starts), size)
    last, (y, states) = jax.lax.scan(one_chunk, initial, inputs)
    return (_from_chunks(y, x.shape[1]), last), (x, dt, A, B, C, states, starts)


def _scan_bwd(
    size: int, residuals: Any, cotangents: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    x, dt, A, B, C, states, starts = residuals
    dy, dlast = cotangents
    At, wide = A.T, A.dtype

    def one_chunk(
        carry: tuple[Array, Array], inputs: tuple[_Inputs, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        (arrays, starts), first_state = inputs
        x, dt, B, C, dy = (a.astype(wide) for a in arrays)
        u = dt * x

        # Rematerialize the states of this chunk, and compute dC while the next state exists.
        def forward(h: Array, inputs: _Inputs) -> tuple[Array, tuple[Array, Array]]:
            (dt, u, B, dy), start = inputs
            next_h = _next_state(_unless(start, h), At, dt, u, B)
            return next_h, (h, jnp.einsum("bne,be->bn", next_h, dy))

        _, (h, dC) = jax.lax.scan(forward, first_state, ((dt, u, B, dy), starts))

        def backward(
            carry: tuple[Array, Array], inputs: _Inputs
        ) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
            p, dAt = carry
            (dt, u, B, C, dy, h), start = inputs
            g = C[..., None] * dy[:, None] + p
            p = _unless(start, jnp.exp(dt[:, None] * At[None]) * g)
            # XLA on CPU does not vectorize a sum over an inner axis, so it is unrolled.
            As = functools.reduce(
                jnp.add, [p[:, n] * h[:, n] * At[n][None] for n in range(At.shape[0])]
            )
            dAt = dAt + dt[:, None] * (p * h)
            gB = jnp.einsum("bne,bn->be", g, B)
            return (p, dAt), (gB, As, jnp.einsum("bne,be->bn", g, u))

        steps = (dt, u, B, C, dy, h), starts
        carry, (gB, As, dB) = jax.lax.scan(backward, carry, steps, reverse=True)
        grads = (dt * gB, As + x * gB, dB, dC)
        return carry, tuple(g.astype(a.dtype) for g, a in zip(grads, arrays[:4], strict=True))

    inputs = _to_chunks(((x, dt, B, C, dy), starts), size), states
    # One gradient of A per example, summed at the end: a sum in every step is slower.
    carry = equally_varying((dlast, jnp.zeros_like(dlast)))
    (dinitial, dAt), grads = jax.lax.scan(one_chunk, carry, inputs, reverse=True)
    dx, ddt, dB, dC = (_from_chunks(g, x.shape[1]) for g in grads)
    return dx, ddt, dAt.sum(0).T, dB, dC, dinitial, None


_scan.defvjp(_scan_fwd, _scan_bwd)


def _near_root(t: int) -> int:
    """Return a chunk length near sqrt(t), a divisor if possible, to avoid padding."""
    root = math.sqrt(t)
    divisors = [d for d in range(math.ceil(root / 2), int(2 * root) + 1) if t % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d / root)), default=round(root))


def _next_state(h: Array, At: Array, dt: Array, u: Array, B: Array) -> Array:
    return jnp.exp(dt[:, None] * At[None]) * h + u[:, None] * B[..., None]


def _unless(start: Bool[Array, " b"] | None, h: Float[Array, "b n e"]) -> Array:
    """Select 0 in place of a state, or of its cotangent, where a document starts."""
    return h if start is None else jnp.where(start[:, None, None], 0, h)


def _to_chunks(arrays: _Inputs, size: int) -> _Inputs:
    """[B, T, ...] -> [chunks, size, B, ...]; padded steps have dt = 0 and no effect."""

    def to_chunks(a: Array) -> Array:
        a = jnp.moveaxis(a, 1, 0)
        n = -(-a.shape[0] // size)
        a = jnp.pad(a, ((0, n * size - a.shape[0]), *[(0, 0)] * (a.ndim - 1)))
        return a.reshape(n, size, *a.shape[1:])

    inputs: _Inputs = jax.tree.map(to_chunks, arrays)
    return inputs


def _from_chunks(a: Array, t: int) -> Array:
    return jnp.moveaxis(a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])[:t], 0, 1)
