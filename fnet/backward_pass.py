"""What the backward pass keeps and in which order it works: hints that a compiler needs."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from fnet.mesh import equally_varying

KEPT = "fnet_kept"
"""The name of arrays that are kept for the backward pass under `recompute`."""

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P")


def keep(x: Array) -> Array:
    """Names an array as one to keep under `recompute`; otherwise the identity."""
    named: Array = checkpoint_name(x, KEPT)
    return named


def recompute(f: F) -> F:
    """``f``, whose backward pass keeps only what fnet's layers name and recomputes the rest.

    Normalising layers name their output (where the activation has an inverse) or
    the normalised pre-activation (where it has none) and their statistics. A
    network of convolutions and `fnet.abn` then keeps one activation a block
    whatever the activation is, and recomputes only activation functions, neither
    a convolution nor a statistic.

    Wrap what contains the whole network, for example its ``apply``; arguments by name that are
    a bool, a string or None, such as ``train``, stay as they are. What has no
    named array between it and the input is recomputed from the input, so a
    network without fnet's norms gains nothing.

    It is ``jax.checkpoint`` with ``save_only_these_names``; on CPU it takes effect
    only with the compiler options that `fnet.compile_step` uses
    (`fnet.memory.CANDIDATE_OPTIONS`).

    Args:
      f: a function of pytrees of arrays.

    Returns:
      A function with the same arguments, values and gradients.
    """
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with_switches, arrays = bind_switches(f, kwargs)
        return jax.checkpoint(with_switches, policy=policy)(*args, **arrays)

    return run  # type: ignore[return-value]


def bind_switches(
    f: Callable[..., Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """``f`` with those arguments by name that are a bool, a string or None; and the others.

    Such an argument decides what is traced, so that it cannot be traced itself.
    """
    switches = {k: v for k, v in kwargs.items() if v is None or isinstance(v, bool | str)}
    return functools.partial(f, **switches), {k: kwargs[k] for k in kwargs if k not in switches}


def params_first(x: Array, params: P) -> tuple[Array, P]:
    """``x`` and ``params`` as they are; backwards, params' cotangents are finished before x's.

    A compiler is free to go on backwards through the network and compute the
    parameters' gradients last, for which it keeps each layer's input and
    cotangent: one more activation a block. Layers with large parameters pass
    their arguments through this, so that both are free once a layer is passed.

    Args:
      x: the layer's input, [...], of any dtype.
      params: any pytree of arrays.

    Returns:
      ``(x, params)``, as they were given: x [...].
    """
    return _params_first(*equally_varying((x, params)))


@jax.custom_jvp
def _params_first(x: Array, params: Any) -> tuple[Array, Any]:
    return x, params


def _params_first_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
    # Transposed, a barrier on tangents is one on cotangents. Where only one side
    # is differentiated there is nothing to put in order.
    if any(isinstance(t, SymbolicZero) for t in jax.tree.leaves(tangents)):
        return primals, tangents
    x, params = tangents
    # JAX 0.11 fails to add what comes out of a barrier to a reference, but not of a copy.
    return primals, jax.lax.optimization_barrier((x, jax.tree.map(jnp.copy, params)))


_params_first.defjvp(_params_first_jvp, symbolic_zeros=True)


def is_params_first(eqn: JaxprEqn) -> bool:
    """Whether an equation is `params_first`: it gives what it takes."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    return bool(eqn.params["call_jaxpr"].jaxpr.debug_info.func_name == "_params_first")
