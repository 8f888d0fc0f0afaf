"""Gated DeltaNet: a recurrence that corrects its state, as matrix products over chunks."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from fnet import checks
from fnet.layer import Layer, Params
from fnet.layers.causal_conv import causal_conv_layer
from fnet.layers.mamba2 import chunk_decays, scan_chunks
from fnet.layers.norm import rms_norm_layer
from fnet.layers.recurrence import Step, recurrent, time_steps, torch_linear
from fnet.mesh import equally_varying
from fnet.precision import multiply, sum_dtype, upcast

# Errors of the inverse would grow with the length of a chunk.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def gated_delta_rule(
    q: Float[Array, "b t g n"],
    k: Float[Array, "b t g n"],
    v: Float[Array, "b t h p"],
    log_decay: Float[Array, "b t h"],
    beta: Float[Array, "b t h"],
    initial: Float[Array, "b h n p"] | None = None,
    chunk: int | None = None,
    segments: Int[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h n p"]]:
    """Run a recurrence that writes what its state does not predict yet, as matrix products.

    Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule". In
    each head, with q and k of its group::

        h_t = a_t h_{t-1} + k_t u_t^T,  a_t = exp(log_decay_t)
        u_t = beta_t (v_t - a_t h_{t-1}^T k_t)
        y_t = h_t^T q_t

    Within a chunk all u_t are the solution of one triangular system. With l_t the sum of log_decay
    from the start of the chunk to t, and h the state before the chunk::

        u_t + beta_t sum_{s<t} exp(l_t - l_s) (k_t . k_s) u_s = beta_t (v_t - exp(l_t) h^T k_t)
        y_t = exp(l_t) h^T q_t + sum_{s<=t} exp(l_t - l_s) (q_t . k_s) u_s

    The chunks are scanned and rematerialized in the backward pass, and documents restart the state,
    as in `fnet.state_space_dual`. The rule is stable for keys of norm at most 1 and beta in [0, 2].

    Args:
      q: queries [B, T, G, N], T >= 1; float16, bfloat16, float32 or float64. Everything is computed
        in float32 (float64 if any argument is float64).
      k: keys [B, T, G, N].
      v: values [B, T, H, P] with G dividing H. Heads ``[i H / G, (i + 1) H / G)`` use group i.
      log_decay: [B, T, H], <= 0.
      beta: [B, T, H]. A step with beta = 0 and log_decay = 0 leaves the state unchanged.
      initial, chunk, segments: as for `fnet.state_space_dual`.

    Returns:
      ``(y, h_T)``: y [B, T, H, P] in the dtype of ``v``, and the last state [B, H, N, P]
      in the dtype of the recurrence.

    Raises:
      TypeError, ValueError: as for `fnet.state_space_dual`.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> q = k = jnp.full((1, 6, 1, 4), 0.5)
      >>> v, log_decay = jnp.ones((1, 6, 2, 3)), jnp.zeros((1, 6, 2))
      >>> y, last = jax.jit(fnet.gated_delta_rule)(q, k, v, log_decay, v[..., 0])
      >>> y.shape, last.shape
      ((1, 6, 2, 3), (1, 2, 4, 3))
    """
    where = "gated_delta_rule"
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    checks.floating(where, **arrays, initial=initial)
    of_heads = {"log_decay": (log_decay, "b t h"), "beta": (beta, "b t h")}
    given = {"k": (k, "b t g n"), "v": (v, "b t h p"), "q": (q, "b t g n")} | of_heads
    checks.dims(where, **given, initial=(initial, "b h n p"))
    (groups, n), (h, p) = k.shape[2:], v.shape[2:]
    checks.sizes(where, T=k.shape[1], chunk=chunk)
    if not groups or h % groups:
        raise ValueError(
            f"{where}: v's heads must be a multiple of k's groups, got v {v.shape} and k {k.shape}"
        )
    dtype = sum_dtype(*arrays.values(), *(() if initial is None else (initial,)))
    if initial is None:
        initial = jnp.zeros_like(jnp.repeat(v[:, 0, :, None], n, axis=2), dtype)
    *inputs, initial = equally_varying((*arrays.values(), initial.astype(dtype)))

    def by_group(a: Array) -> Array:
        return a.reshape(*a.shape[:2], groups, h // groups, *a.shape[3:])

    q, k, *rest = inputs
    y, last = scan_chunks(
        where,
        _one_chunk,
        initial.reshape(initial.shape[0], groups, h // groups, n, p),
        (q, k, *map(by_group, rest)),
        chunk,
        segments,
    )
    return y.reshape(v.shape).astype(v.dtype), last.reshape(initial.shape)


def _one_chunk(
    state: Float[Array, "b g r n p"], inputs: tuple[Array, ...], documents: Int[Array, "b q"] | None
) -> tuple[Array, Array]:
    """Compute the state after a chunk, and its outputs [B, Q, G, R, P] with R heads per group."""
    q, k, v, log_decay, beta = (a.astype(state.dtype) for a in inputs)
    within, from_start, to_end, across = chunk_decays(jnp.moveaxis(log_decay, 1, 3), documents)
    v, beta = jnp.moveaxis(v, 1, 3), jnp.moveaxis(beta, 1, 3)[..., None]  # [B, G, R, Q, ...]

    def read(x: Array) -> Array:
        """Compute what the state before the chunk has for keys or queries: [B, G, R, Q, P]."""
        return from_start[..., None] * jnp.einsum("btgn,bgrnp->bgrtp", x, state)

    def scores(x: Array) -> Array:
        return jnp.einsum("btgn,bsgn->bgts", x, k)[:, :, None] * within

    written = _solve(beta * scores(k), beta * (v - read(k)))
    y = read(q) + jnp.einsum("bgrts,bgrsp->bgrtp", scores(q), written)
    added = jnp.einsum("bsgn,bgrsp->bgrnp", k, to_end[..., None] * written)
    return across[..., None, None] * state + added, jnp.moveaxis(y, 3, 1)


@jax.custom_jvp
def _solve(
    lower: Float[Array, "b g r q q"], b: Float[Array, "b g r q p"]
) -> Float[Array, "b g r q p"]:
    """Solve ``(I + L) x = b``, where L is the part of ``lower`` below the diagonal.

    A triangular solve of so small matrices takes several times as long as the inverse on a CPU, and
    JAX's gradient of one fails for explicit shardings.
    """
    return _matmul(_inverse(lower), b)


@_solve.defjvp
def _solve_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    lower, b = primals
    inverse = _inverse(lower)
    x = _matmul(inverse, b)
    below = jnp.tril(jnp.ones(lower.shape[-2:], lower.dtype), -1)
    dlower = tangents[0] * jnp.expand_dims(below, (0, 1, 2))
    return x, _matmul(inverse, tangents[1] - _matmul(dlower, x))


def _inverse(lower: Float[Array, "*batch q q"]) -> Float[Array, "*batch q q"]:
    """Invert ``I + L``, where L is the part of ``lower`` below the diagonal, by halves.

    The inverse of ``[[A, 0], [C, B]]`` is ``[[A', 0], [-B' C A', B']]``, A' inverse to A.
    """
    q = lower.shape[-1]
    if q == 1:
        return jnp.ones_like(lower)
    half = 1 << (q - 1).bit_length() - 1
    rest = [(0, 0)] * (lower.ndim - 2) + [(0, 2 * half - q)] * 2
    lower = jnp.pad(lower, rest)
    first, second = slice(None, half), slice(half, None)
    blocks = jnp.stack([lower[..., first, first], lower[..., second, second]], axis=-3)
    a, b = jnp.unstack(_inverse(blocks), axis=-3)
    c = -_matmul(_matmul(b, lower[..., second, first]), a)
    top = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([c, b], axis=-1)], axis=-2)[..., :q, :q]


def gated_delta_net(
    width: int,
    *,
    heads: int,
    head_dim: int,
    groups: int | None = None,
    key_dim: int | None = None,
    conv: int = 4,
    chunk: int | None = None,
    norm_eps: float = 1e-6,
) -> Layer:
    """Gated DeltaNet block: linear attention whose state forgets, and corrects what it holds.

    Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", as in Qwen3.5; H heads of P
    channels, and G <= H queries and keys of N channels::

        q, k, v = split(silu(causal_conv(x W_qkv)))
        q, k    = q / (|q| sqrt(N)), k / |k|
        y       = gated_delta_rule(q, k, v, -exp(A_log) softplus(x W_decay + dt_bias),
                                   sigmoid(x W_beta))
        y       = (rms_norm(y) * silu(x W_gate)) W_out

    The norm is over the channels of each head. Initially exp(A_log) is uniform in [0.01, 16], and
    ``dt_bias`` is 1. Norms of queries and keys, decays and recurrence are computed in float32 or
    wider, everything else in the dtype of the input.

    Args:
      width: D, size of the last axis of input and output.
      heads: H, heads of values.
      head_dim: P, channels of a value.
      groups: G, queries and keys, each for H / G heads; divides ``heads``. None: H.
      key_dim: N, channels of a query or key. None: P.
      conv: width of the causal convolution.
      chunk: as for `fnet.gated_delta_rule`.
      norm_eps: epsilon of the norm of outputs.

    Returns:
      A causal layer, [B, T, D] -> [B, T, D]. Its ``mask``, ``segments`` and
      `fnet.layer.Decode` are as for `fnet.layers.mamba`; its cached state is [B, H, N, P]. Its
      params are ``query_key_value``, ``gate``, ``beta``, ``decay``, ``conv``, ``norm``, ``out``,
      ``A_log`` and ``dt_bias``; there are no biases.

    Raises:
      ValueError: for a size below 1, or if ``groups`` does not divide ``heads``; when applied, if
        ``x`` does not end in ``width``.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.gated_delta_net(8, heads=2, head_dim=4)
      >>> params, state = jax.jit(layer.init)(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 16, 8)), train=True)[0].shape
      (2, 16, 8)
    """
    groups = heads if groups is None else groups
    n = head_dim if key_dim is None else key_dim
    sizes = {"width": width, "heads": heads, "head_dim": head_dim, "groups": groups, "key_dim": n}
    checks.sizes("gated_delta_net", **sizes, conv=conv, chunk=chunk)
    if heads % groups:
        raise ValueError(
            f"gated_delta_net: groups must divide heads, got groups={groups}, heads={heads}"
        )
    keys, values = groups * n, heads * head_dim

    def init_own(key: Array) -> Params:
        rates = jax.random.uniform(key, (heads,), jnp.float32, 0.01, 16)
        return {"A_log": jnp.log(rates), "dt_bias": jnp.ones(heads, jnp.float32)}

    def split(a: Array, count: int) -> Array:
        return a.reshape(*a.shape[:2], count, -1)

    def mix(step: Step) -> tuple[Array, Array]:
        mixed = jax.nn.silu(step.convolve(step("query_key_value")))
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        q, k = (_normalized(split(a, groups)) for a in (q, k))
        steps = time_steps(step("decay"), step.child.params["dt_bias"])
        rates = jnp.exp(step.child.params["A_log"].astype(steps.dtype))
        with jax.named_scope("scan"):
            y, last = gated_delta_rule(
                q * jnp.asarray(n**-0.5, q.dtype),
                k,
                split(v, heads),
                steps * -rates[None, None],
                jax.nn.sigmoid(upcast(step("beta"))),
                step.state,
                chunk,
                step.segments,
            )
        y = multiply(step("norm", y), jax.nn.silu(split(step("gate"), heads)))
        return step("out", y.reshape(*y.shape[:2], values)), last

    return recurrent(
        "gated_delta_net",
        width,
        mix,
        inputs={"query_key_value": 2 * keys + values, "gate": values}
        | dict.fromkeys(("beta", "decay"), heads),
        conv=causal_conv_layer(2 * keys + values, conv, bias=False),
        inner=values,
        state_shape=(heads, n, head_dim),
        linear=functools.partial(torch_linear, bias=False),
        between={"norm": rms_norm_layer(head_dim, eps=norm_eps)},
        init_own=init_own,
        draws=1,
    )


def _normalized(x: Float[Array, "b t g n"]) -> Array:
    x = upcast(x)
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)
