"""Control what the backward pass saves (`recompute`) and its order (`params_first`)."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fnet.jaxpr.axes import IDENTITY, register
from fnet.jaxpr.interpreter import AnyPrimitive
from fnet.mesh import equally_varying

SAVED = "fnet_saved"
"""Name of the arrays that `recompute` saves for the backward pass."""

DEAR = "fnet_dear"
"""Name of a result that takes many operations for its bytes, which plans save before others."""

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P")


def save(x: Array) -> Array:
    """Name an array so that `recompute` saves it for the backward pass; otherwise the identity."""
    named: Array = checkpoint_name(x, SAVED)
    return named


def recompute(f: F) -> F:
    """Apply `jax.checkpoint` and save only the arrays that fnet's norms name.

    This is ``jax.checkpoint(f, policy=save_only_these_names(SAVED))``: gradient checkpointing
    (rematerialization) with a policy for networks with norms. Each norm names its output and
    its statistics. If its activation has no inverse, it names the normalized pre-activation
    instead of the output. A network of convolutions and `fnet.abn` then saves one activation
    per block with any activation function. It rematerializes the activation functions, but no
    convolution and no statistics.

    Wrap the whole network, for example its ``apply``. Everything before the first named
    array is rematerialized from the input, so a network without fnet's norms saves no memory.

    On CPU it only has an effect with the compiler options that `fnet.compile_step` uses
    (`fnet.memory.CANDIDATE_OPTIONS`). Otherwise XLA removes the recomputation.

    Args:
      f: a function of pytrees of arrays. Keyword arguments that are a bool, a string or None,
        such as ``train=True``, are static.

    Returns:
      A function with the same arguments, values and gradients.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> model = fnet.serial(
      ...     fnet.layers.conv(3, 4), fnet.layers.abn(4, activation="gelu")
      ... )
      >>> params, state = model.init(jax.random.key(0))
      >>> apply = fnet.recompute(model.apply)
      >>> def loss(params, x):
      ...     return jnp.square(apply(params, state, x, train=True)[0]).mean()
      >>> grads = jax.grad(loss)(params, jnp.ones((2, 8, 8, 3)))
      >>> grads["0"]["kernel"].shape
      (3, 3, 3, 4)
    """
    policy = AnyPrimitive(jax.checkpoint_policies.save_only_these_names(SAVED))

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with_static, arrays = bind_static(f, kwargs)
        return jax.checkpoint(with_static, policy=policy)(*args, **arrays)

    return run  # type: ignore[return-value]


def bind_static(
    f: Callable[..., Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Bind the keyword arguments that are a bool, a string or None; return the others too.

    Such an argument decides which operations are traced, so it must not be traced itself.
    """
    static = {k: v for k, v in kwargs.items() if v is None or isinstance(v, bool | str)}
    return functools.partial(f, **static), {k: kwargs[k] for k in kwargs if k not in static}


def params_first(x: Array, params: P) -> tuple[Array, P]:
    """Return ``x`` and ``params``; in the backward pass, compute params' gradients before x's.

    The backward pass of a layer computes the cotangent of its input ``x``, which the layer
    below needs, and the gradients of its parameters, which nothing needs until the optimizer
    runs. XLA may postpone the parameters' gradients to the end. It must then hold the input
    and the output cotangent of every layer until then, one more activation per layer.

    Pass a layer's input and parameters through this function to prevent that. It adds a barrier
    (`jax.lax.optimization_barrier`) to the cotangents, so that the layer below gets the cotangent
    of ``x`` only after the gradients of ``params`` are computed. fnet's dense and convolution
    layers do it. Use it in a layer of your own if its parameters are matrices or kernels. Values
    and gradients do not change. Nothing happens if only one of the two is differentiated.

    Args:
      x: input of the layer, [...], of any dtype.
      params: parameters of the layer, a pytree of arrays.

    Returns:
      ``(x, params)`` unchanged, with x [...].

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> def dense(kernel, x):
      ...     x, kernel = fnet.params_first(x, kernel)
      ...     return x @ kernel
      >>> jax.grad(lambda w: dense(w, jnp.ones((2, 3))).sum())(jnp.ones((3, 4))).shape
      (3, 4)
    """
    x, params = equally_varying((x, params))
    leaves, structure = jax.tree.flatten(params)
    x, *leaves = finish_together(x, *leaves)
    return x, jax.tree.unflatten(structure, leaves)


def finish_together(*args: Any) -> tuple[Any, ...]:
    """Return the arguments; in the backward pass, wait for the gradients of all of them.

    See `params_first`.
    """
    return tuple(FINISH_TOGETHER.bind(*args))


FINISH_TOGETHER = Primitive("fnet_finish_together")
"""The primitive behind `finish_together`: an identity that orders cotangents."""

FINISH_TOGETHER.multiple_results = True
FINISH_TOGETHER.def_impl(lambda *args: list(args))
FINISH_TOGETHER.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(FINISH_TOGETHER, lambda context, *args: args)
batching.primitive_batchers[FINISH_TOGETHER] = lambda args, axes: (
    FINISH_TOGETHER.bind(*args),
    axes,
)
register(FINISH_TOGETHER.name, IDENTITY)


def _order_tangents(primals: Any, tangents: Any) -> Any:
    # The transpose of a barrier on tangents is a barrier on cotangents. If only one argument is
    # differentiated, there is nothing to order.
    nonzero = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    after = list(tangents)
    if len(nonzero) > 1:
        # JAX 0.11 fails to add the output of a barrier to a reference, but can add a copy of it.
        barred = jax.lax.optimization_barrier([jnp.copy(tangents[i]) for i in nonzero])
        for i, t in zip(nonzero, barred, strict=True):
            after[i] = t
    return list(primals), after


ad.primitive_jvps[FINISH_TOGETHER] = _order_tangents


def constant(x: Array) -> Array:
    """Return an array that is not differentiated, or raise ValueError where it is.

    A backward pass of our own has gradients of some arguments alone. Without this, a gradient with
    respect to another one would be 0.
    """
    made: Array = CONSTANT.bind(x)
    return made


CONSTANT = Primitive("fnet_constant")
"""The primitive behind `constant`."""

CONSTANT.def_impl(lambda x: x)
CONSTANT.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(CONSTANT, lambda context, x: [x])
batching.primitive_batchers[CONSTANT] = lambda args, axes: (CONSTANT.bind(*args), axes[0])
register(CONSTANT.name, IDENTITY)


def _refuse(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "a loss that runs in chunks to fit a budget is differentiated with respect to its first "
        f"argument alone, but here also to {jax.typeof(primals[0])}; make it a part of the first "
        "argument, as in loss((params, x), ...), and plan again"
    )


ad.primitive_jvps[CONSTANT] = _refuse
