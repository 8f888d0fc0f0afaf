"""Folding: an evaluated batch norm is an affine map, which the layer before it can absorb."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.layer import Params, State


def fold(
    kernel: Float[Array, "... c"],
    bias: Float[Array, " c"] | None,
    gamma: Float[Array, " c"] | None,
    beta: Float[Array, " c"] | None,
    running_mean: Float[Array, " c"],
    running_var: Float[Array, " c"],
    *,
    eps: float = 1e-5,
    norm: Literal["abn", "batch"] = "abn",
) -> tuple[Float[Array, "... c"], Float[Array, " c"]]:
    """Merges a batch norm in evaluation mode into the linear layer before it.

    `fnet.abn` with ``train=False`` applies, before its activation, to the
    output ``x = linear(input) + bias`` of a convolution or a dense layer::

        z = (x - running_mean) * s + beta,    s = (|gamma| + eps) / sqrt(running_var + eps)

    which is the same layer with other parameters (Jacob et al. 2018,
    "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", section 3.2)::

        kernel' = kernel * s                  (along the output channels)
        bias'   = (bias - running_mean) * s + beta

    The activation is not part of it: the caller applies it to the folded
    layer's output.

    Args:
      kernel: [H, W, I, O] of a convolution, whatever its stride, dilation,
        padding and groups, or [I, O] of a dense layer: output channels last.
      bias: [C] of that layer, C being O; None: it has none.
      gamma: [C]; None: the scale is exactly 1, without ``+ eps``.
      beta: [C]; None: 0.
      running_mean: [C].
      running_var: [C].
      eps: that of the batch norm, added to the variance and to |gamma|.
      norm: ``"batch"`` for plain batch norm, as `fnet.layers.batch_norm` or another library's:
        gamma is then the scale as it is.

    Returns:
      ``(kernel, bias)``, of the shapes given and both in the kernel's dtype;
      computed in float32, or wider where an argument is.

    Raises:
      TypeError: if an argument is not floating.
      ValueError: if the kernel has rank < 2, or another argument a shape that
        is not [C]; for another ``norm``.
    """
    vectors = {
        "bias": bias,
        "gamma": gamma,
        "beta": beta,
        "running_mean": running_mean,
        "running_var": running_var,
    }
    _check(kernel, vectors)
    if norm not in ("abn", "batch"):
        raise ValueError(f"fold: norm must be 'abn' or 'batch', got {norm!r}")
    given = [v.dtype for v in vectors.values() if v is not None]
    wide = jnp.result_type(jnp.float32, kernel.dtype, *given)
    absent = jnp.zeros(kernel.shape[-1], wide)
    b, g, offset, mean, var = (
        absent if v is None else jnp.asarray(v, wide) for v in vectors.values()
    )
    of_gamma = 1 if gamma is None else g if norm == "batch" else jnp.abs(g) + eps
    scale = jax.lax.rsqrt(var + eps) * of_gamma
    folded = jnp.asarray(kernel, wide) * jnp.expand_dims(scale, range(kernel.ndim - 1))
    return folded.astype(kernel.dtype), ((b - mean) * scale + offset).astype(kernel.dtype)


def fold_layer(
    params: Params,
    abn_params: Params,
    abn_state: State,
    *,
    eps: float = 1e-5,
    norm: Literal["abn", "batch"] = "abn",
) -> Params:
    """`fold` on the params and state of `fnet.layers`.

    Args:
      params: of ``layers.conv`` or ``layers.dense``, with or without ``bias``.
      abn_params: of the ``layers.abn`` behind it, affine or not; or ``layers.batch_norm``.
      abn_state: its state, with ``running_mean`` and ``running_var``.
      eps: that norm's.
      norm: ``"batch"`` where it is ``layers.batch_norm``, whose params have the same names.

    Returns:
      ``{"kernel", "bias"}`` for the same layer built with ``bias=True``, behind
      which ``layers.activation``, with that norm's ``activation_param``, takes its place.

    Raises:
      TypeError: as `fold`.
      ValueError: as `fold`; also where there is no kernel to fold into, or no
        running statistics to fold.
    """
    if "kernel" not in params:
        raise ValueError(
            f"fold_layer: expected the params of conv or dense, with 'kernel', got {sorted(params)}"
        )
    missing = {"running_mean", "running_var"} - abn_state.keys()
    if missing:
        raise ValueError(
            f"fold_layer: the state lacks {sorted(missing)}, it has {sorted(abn_state)}; "
            "without running statistics (track=False) there is nothing fixed to fold"
        )
    kernel, bias = fold(
        params["kernel"],
        params.get("bias"),
        abn_params.get("gamma"),
        abn_params.get("beta"),
        abn_state["running_mean"],
        abn_state["running_var"],
        eps=eps,
        norm=norm,
    )
    return {"kernel": kernel, "bias": bias}


def _check(kernel: Array, vectors: dict[str, Array | None]) -> None:
    """Refuses a kernel, or a channel vector that does not fit its output channels."""
    if kernel.ndim < 2:
        raise ValueError(f"fold: kernel must have rank >= 2, channels last, got {kernel.shape}")
    for name, v in ({"kernel": kernel} | vectors).items():
        if v is None:
            continue
        if not jnp.issubdtype(v.dtype, jnp.floating):
            raise TypeError(f"fold: {name} must be floating, got {v.dtype}")
        if name != "kernel" and v.shape != kernel.shape[-1:]:
            raise ValueError(
                f"fold: {name} must have shape {kernel.shape[-1:]}, the output channels of "
                f"kernel {kernel.shape}, got {v.shape}"
            )
