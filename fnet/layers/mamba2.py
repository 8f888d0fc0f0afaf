"""Mamba-2: a state space layer, and its scan as matrix products over chunks."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from fnet import checks, chunks
from fnet.layer import Layer, Params
from fnet.layers.causal_conv import causal_conv_layer
from fnet.layers.norm import rms_norm, rms_norm_layer
from fnet.layers.recurrence import Step, init_step_bias, recurrent, time_steps, torch_linear
from fnet.layers.segments import restarts
from fnet.mesh import equally_varying
from fnet.precision import multiply, sum_dtype


def state_space_dual(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    A: Float[Array, " h"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    D: Float[Array, " h"] | None = None,
    initial: Float[Array, "b h n p"] | None = None,
    chunk: int | None = None,
    segments: Int[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h n p"]]:
    """Run a state space model with one decay per head, as matrix products.

    Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms
    Through Structured State Space Duality". In each head, with B and C of its group::

        h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T
        y_t = h_t^T C_t + D x_t

    Within a chunk this is a product with one triangular matrix M, plus the contribution of
    the state before the chunk. With l_t the sum of dt A from the start of the chunk to t::

        M_ts = (C_t . B_s) exp(l_t - l_s) for s <= t, else 0
        y    = M (dt x) + exp(l) C h_before
        h    = exp(l_end) h_before + sum_s exp(l_end - l_s) B_s (dt_s x_s)^T

    With ``segments``, M_ts is 0 if a document starts after s and up to t. The sum over s has the
    steps of the document at the end of the chunk, and h_before reaches only its own document.

    The chunks are scanned and rematerialized in the backward pass. So the matrices of one
    chunk exist at a time, and the backward pass saves the state before each chunk.

    Args:
      x: inputs [B, T, H, P], T >= 1; float16, bfloat16, float32 or float64. Everything is
        computed in float32 (float64 if any argument but D is float64).
      dt: time steps, [B, T, H], >= 0. A step with dt = 0 leaves the state unchanged.
      A: [H], negative.
      B, C: [B, T, G, N] with G dividing H. Heads ``[i H / G, (i + 1) H / G)`` use group i.
      D: [H]; None: 0.
      initial: h_0, [B, H, N, P]; None: zeros.
      chunk: steps per chunk; default 64.
      segments: as for `fnet.linear_recurrence`.

    Returns:
      ``(y, h_T)``: y [B, T, H, P] in the dtype of ``x``, and the last state [B, H, N, P]
      in the dtype of the recurrence.

    Raises:
      TypeError: if an array is not floating, or the segments are not integers.
      ValueError: if the shapes do not match, T is 0, or ``chunk < 1``.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> x, dt, A = jnp.ones((1, 6, 2, 4)), jnp.full((1, 6, 2), 0.1), -jnp.ones(2)
      >>> B = C = jnp.ones((1, 6, 1, 3))
      >>> y, last = jax.jit(fnet.state_space_dual)(x, dt, A, B, C)
      >>> y.shape, last.shape
      ((1, 6, 2, 4), (1, 2, 3, 4))
    """
    where = "state_space_dual"
    checks.floating(where, x=x, dt=dt, A=A, B=B, C=C, D=D, initial=initial)
    inputs = {"x": (x, "b t h p"), "B": (B, "b t g n"), "dt": (dt, "b t h"), "A": (A, "h")}
    checks.dims(where, **inputs, C=(C, "b t g n"), D=(D, "h"), initial=(initial, "b h n p"))
    (b, t, h, p), (groups, n) = x.shape, B.shape[2:]
    checks.sizes(where, T=t, chunk=chunk)
    if not groups or h % groups:
        raise ValueError(
            f"{where}: x's heads must be a multiple of B's groups, got x {x.shape} and B {B.shape}"
        )
    dtype = sum_dtype(*(a for a in (x, dt, A, B, C, initial) if a is not None))
    if initial is None:
        initial = jnp.zeros_like(jnp.repeat(x[:, 0, :, None], n, axis=2), dtype)
    initial, A = initial.astype(dtype), A.astype(dtype)
    x, dt, A, B, C, initial = equally_varying((x, dt, A, B, C, initial))

    y, last = scan_chunks(
        where,
        functools.partial(_one_chunk, A.reshape(groups, h // groups)),
        initial.reshape(b, groups, h // groups, n, p),
        (*(a.reshape(b, t, groups, h // groups, *a.shape[3:]) for a in (x, dt)), B, C),
        chunk,
        segments,
    )
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
    chunk: int | None = None,
    bias: bool = False,
    conv_bias: bool = True,
    norm: bool = True,
    norm_groups: int = 1,
    norm_eps: float = 1e-6,
    step_limits: tuple[float, float] | None = None,
    part_scales: Sequence[float] | None = None,
) -> Layer:
    """Mamba-2 block: Mamba with one decay per head, computed as matrix products.

    Dao and Gu 2024, "Transformers are SSMs"; H heads of P channels each::

        z, xBC, r = split(x W_in);  u, B, C = split(silu(causal_conv(xBC)))
        dt        = softplus(r + dt_bias)
        y         = state_space_dual(u, dt, -exp(A_log), B, C, D)
        y         = rms_norm(y * silu(z)) W_out

    The norm is over all channels, or over each of ``norm_groups`` groups of them. Initially -A is
    uniform in [1, 16], D is 1, and dt is log-uniform in [0.001, 0.1]. Time steps and recurrence are
    computed in float32 or wider, everything else in the dtype of the input. Under `fnet.recompute`
    the output of the norm is saved.

    Args:
      width: D, size of the last axis of input and output.
      expand: the inner width E = H P is ``round(expand * width)``.
      head: P; default the largest divisor of E up to 64.
      state: N, state size per channel.
      groups: number of groups of heads that share B and C; divides the number of heads.
      conv: width of the causal convolution.
      chunk: as for `fnet.state_space_dual`.
      bias: whether the dense layers have biases.
      conv_bias: whether the convolution has a bias.
      norm: whether there is a norm.
      norm_groups: number of groups of channels in the norm; divides E.
      norm_eps: epsilon of the norm.
      step_limits: lower and upper limit of dt. None: no limits.
      part_scales: factors of z, x, B, C and r, which muP has (Zuo et al. 2025, "Falcon-H1"). None:
        no factors.

    Returns:
      A causal layer, [B, T, D] -> [B, T, D]. Its params, ``mask``, ``segments`` and
      `fnet.layer.Decode` are as for `fnet.layers.mamba`; its cached state is [B, H, N, P].

    Raises:
      ValueError: for a size below 1, if ``head`` or ``norm_groups`` does not divide E, or if
        ``groups`` does not divide the heads; when applied, if ``x`` does not end in ``width``.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.mamba2(8, head=4, state=4)
      >>> params, state = jax.jit(layer.init)(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 16, 8)), train=True)[0].shape
      (2, 16, 8)
    """
    inner = round(expand * width)
    if head is None:
        head = max((p for p in range(1, 65) if inner % p == 0), default=1)
    sizes = {"width": width, "inner": inner, "head": head, "state": state, "groups": groups}
    checks.sizes("mamba2", **sizes, conv=conv, chunk=chunk)
    if inner % head:
        raise ValueError(
            f"mamba2: head must divide round(expand * width) = {inner}, got head={head}"
        )
    if norm_groups < 1 or inner % norm_groups:
        raise ValueError(
            f"mamba2: norm_groups must divide round(expand * width) = {inner}, got {norm_groups}"
        )
    heads = inner // head
    if heads % groups:
        raise ValueError(
            f"mamba2: groups must divide the heads, got groups={groups} and "
            f"{heads} heads of {head} channels"
        )
    shared = groups * state

    def init_own(rates_key: Array, steps_key: Array) -> Params:
        rates = jax.random.uniform(rates_key, (heads,), jnp.float32, 1, 16)
        return {
            "A_log": jnp.log(rates),
            "D": jnp.ones(heads, jnp.float32),
            "dt_bias": init_step_bias(steps_key, heads),
        }

    def normalize(step: Step, y: Array) -> Array:
        if not norm:
            return y
        if norm_groups == 1:
            return step("norm", y)
        with jax.named_scope("norm"):
            groups = y.reshape(*y.shape[:2], norm_groups, inner // norm_groups)
            scale = jnp.expand_dims(step.child.params["norm"]["scale"], (0, 1))
            return multiply(rms_norm(groups, None, eps=norm_eps).reshape(y.shape), scale)

    def mix(step: Step) -> tuple[Array, Array]:
        params, given = step.child.params, step("in")
        if part_scales is not None:
            columns = np.repeat(part_scales, [inner, inner, shared, shared, heads])
            given = given * jnp.asarray(columns, given.dtype)[None, None]
        z, u, r = jnp.split(given, [inner, 2 * inner + 2 * shared], axis=-1)
        u, B, C = jnp.split(jax.nn.silu(step.convolve(u)), [inner, inner + shared], axis=-1)
        with jax.named_scope("scan"):
            y, last = state_space_dual(
                u.reshape(*u.shape[:2], heads, head),
                time_steps(r, params["dt_bias"], step_limits),
                -jnp.exp(params["A_log"].astype(sum_dtype(u))),
                B.reshape(*B.shape[:2], groups, state),
                C.reshape(*C.shape[:2], groups, state),
                params["D"],
                step.state,
                chunk,
                step.segments,
            )
        return step("out", normalize(step, y.reshape(z.shape) * jax.nn.silu(z))), last

    return recurrent(
        "mamba2",
        width,
        mix,
        inputs={"in": 2 * inner + 2 * shared + heads},
        conv=causal_conv_layer(inner + 2 * shared, conv, bias=conv_bias),
        inner=inner,
        state_shape=(heads, state, head),
        linear=functools.partial(torch_linear, bias=bias),
        last={"norm": rms_norm_layer(inner, eps=norm_eps)} if norm else {},
        init_own=init_own,
        draws=2,
    )


# Gradient for 4 and 24 heads of 64, N = 64 and 128, 2,048 steps, on two CPU cores: chunks of
# 32 and 64 differ by less than a tenth; 16 and 128 take up to 1.4 and 1.7 times as long. Larger
# chunks save fewer states.
_CHUNK = 64


def _one_chunk(
    A: Float[Array, "g r"],
    state: Float[Array, "b g r n p"],
    inputs: tuple[Array, ...],
    documents: Int[Array, "b q"] | None,
) -> tuple[Array, Array]:
    """Compute the state after a chunk, and its outputs [B, Q, G, R, P] with R heads per group."""
    x, dt, B, C = (a.astype(state.dtype) for a in inputs)
    u = x * dt[..., None]
    decays = chunk_decays(jnp.moveaxis(dt * A[None, None], 1, 3), documents)
    within, from_start, to_end, across = decays
    from_start, to_end = (jnp.moveaxis(a, 3, 1)[..., None] for a in (from_start, to_end))
    scores = jnp.einsum("btgn,bsgn->bgts", C, B)
    y = jnp.einsum("bgrts,bsgrp->btgrp", scores[:, :, None] * within, u)
    y = y + from_start * jnp.einsum("btgn,bgrnp->btgrp", C, state)
    added = jnp.einsum("bsgn,bsgrp->bgrnp", B, to_end * u)
    return across[..., None, None] * state + added, y


def scan_chunks(
    where: str,
    one_chunk: Callable[..., tuple[Array, Array]],
    initial: Array,
    inputs: tuple[Array, ...],
    chunk: int | None,
    segments: Int[Array, "b t"] | None,
) -> tuple[Array, Array]:
    """Scan over chunks of a sequence, and rematerialize each chunk in the backward pass.

    ``one_chunk(state, inputs, documents) -> (state, y)`` gets the documents of a chunk's positions,
    numbered from 0, or None. Inputs [B, T, ...] of 0 must leave the state unchanged. Returns the
    outputs [B, T, ...] and the state after the last chunk.
    """
    b, t = inputs[0].shape[:2]
    _, size = chunks.even(t, min(t, chunk or _CHUNK))
    starts = restarts(where, segments, (b, t))

    # Inside a scan, common subexpressions of forward and backward pass cannot be merged.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state: Array, inputs: tuple[tuple[Array, ...], Array | None]) -> tuple[Array, Array]:
        documents = None if inputs[1] is None else jnp.cumsum(inputs[1], axis=1)
        return one_chunk(state, inputs[0], documents)

    last, y = jax.lax.scan(
        step, initial, jax.tree.map(lambda a: _to_chunks(a, size), (inputs, starts))
    )
    # One axis at a time: shardings propagate only through such reshapes.
    y = jnp.moveaxis(y, 0, 1).reshape(b, y.shape[0] * size, *y.shape[3:])[:, :t]
    return y, last


def chunk_decays(
    log_decays: Float[Array, "b g r q"], documents: Int[Array, "b q"] | None
) -> tuple[Array, Array, Array, Array]:
    """Compute decays between the positions of a chunk from the logarithms of each step's decay.

    Returns the decays from a step s to t [B, G, R, t, s], 0 between documents, from before the
    chunk to t [B, G, R, t], from s to the end, and over the whole chunk [B, G, R].
    """
    logs = _cumsum_by_document(log_decays, documents)
    differences = logs[..., :, None] - logs[..., None, :]
    causal = jnp.tril(jnp.ones(differences.shape[-2:], bool))
    allowed = jnp.expand_dims(causal, (0, 1, 2))
    until_end = logs[..., -1:] - logs
    if documents is not None:
        same = documents[:, :, None] == documents[:, None]
        allowed = allowed & jnp.expand_dims(same, (1, 2))
        is_last = documents == documents[:, -1:]
        until_end = jnp.where(jnp.expand_dims(is_last, (1, 2)), until_end, -jnp.inf)
    # Select before exp: for future steps exp and its gradient would overflow.
    within = jnp.exp(jnp.where(allowed, differences, -jnp.inf))
    from_start = jnp.exp(logs)
    if documents is not None:
        from_start = jnp.where(jnp.expand_dims(documents == 0, (1, 2)), from_start, 0)
    return within, from_start, jnp.exp(until_end), from_start[..., -1]


def _cumsum_by_document(
    a: Float[Array, "b g r q"], documents: Int[Array, "b q"] | None
) -> Float[Array, "b g r q"]:
    """Cumulative sums over the last axis that restart in each document.

    As a product with zeros and ones, so that no rounding of another document enters.
    """
    if documents is None:
        return jnp.cumsum(a, axis=3)
    q = a.shape[3]
    same = documents[:, :, None] == documents[:, None]
    summed = (same & jnp.tril(jnp.ones((q, q), bool))[None]).astype(a.dtype)
    return jnp.einsum("bts,bgrs->bgrt", summed, a, precision=jax.lax.Precision.HIGHEST)


def _to_chunks(a: Array, size: int) -> Array:
    """[B, T, ...] -> [chunks, B, size, ...]; padded steps have dt = 0 and no effect."""
    n = -(-a.shape[1] // size)
    a = jnp.pad(a, ((0, 0), (0, n * size - a.shape[1]), *[(0, 0)] * (a.ndim - 2)))
    return jnp.moveaxis(a.reshape(a.shape[0], n, size, *a.shape[2:]), 1, 0)
