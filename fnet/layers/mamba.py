"""Mamba's block: a causal convolution and a selective scan behind a gate."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fnet.backward_pass import keep
from fnet.layer import Layer, Params, State, apply_child, check_sizes, init_children
from fnet.layers.causal_conv import causal_conv, causal_conv_layer
from fnet.layers.linear import dense
from fnet.layers.recurrence import recurrent
from fnet.layers.selective_scan import selective_scan
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
      chunk: as for `fnet.layers.selective_scan.selective_scan`.

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
