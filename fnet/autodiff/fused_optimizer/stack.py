"""A scan over layers whose backward pass updates the layers instead of returning gradients."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr, Literal, Var, get_opaque_trace_state, jaxpr_as_fun

from fnet.autodiff.batched.tangents import is_differentiable
from fnet.autodiff.fused_optimizer.layer_update import INTEGER_CARRIERS, LayerUpdate, Slot
from fnet.autodiff.update import squared_norm
from fnet.jaxpr import (
    Atom,
    aval,
    dependencies,
    evaluate_from,
    inline,
    is_elementwise,
    moves_elements,
)

Body = Callable[..., tuple[Any, Any]]
"""``body(params, inputs, x, *closed) -> (x, outputs)``: one layer of a stack.

``closed`` are the arrays that the layer closes over, the same for all layers."""


class Owned(NamedTuple):
    """Arrays that the backward pass updates. It returns the new values as their cotangents.

    Integers have no cotangents, so they pass through differentiation `as_floating`.

    Attributes:
      arrays: all layers [n, ...] by slot number (see `LayerUpdate`).
      squares: sum of the squared elements of the gradients, float32 [].
    """

    arrays: dict[int, Array]
    squares: Array

    def as_floating(self) -> "Owned":
        """Return the same bits as floating arrays, because cotangents of integers have none."""
        return self._replace(arrays={n: _with_dtype(a, None) for n, a in self.arrays.items()})

    def as_stored(self, slots: Sequence[Slot]) -> "Owned":
        """Return the same bits in the dtypes of the slots; the inverse of `as_floating`."""
        arrays = {n: _with_dtype(a, aval(slots[n].old).dtype) for n, a in self.arrays.items()}
        return self._replace(arrays=arrays)


def _with_dtype(a: Array, dtype: Any) -> Array:
    """Reinterpret the bits of an array; None is the floating dtype of their number."""
    dtype = dtype or INTEGER_CARRIERS.get(a.dtype, a.dtype)
    return a if a.dtype == dtype else jax.lax.bitcast_convert_type(a, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """A stack of layers and its update.

    Attributes:
      path: path of the stack in ``params``, for error messages.
      number: number of the stack in ``update``.
      update: the update of all parameters.
      structure: pytree structure of the stack's parameters.
    """

    path: str
    number: int
    update: LayerUpdate
    structure: Any

    def params(self, arrays: dict[int, Array]) -> Any:
        """Return the pytree of the parameters among a stack's arrays."""
        return self.structure.unflatten(arrays[n] for n in self._param_slots())

    def numbered(self, grads: Any) -> dict[int, Array]:
        """Return one layer's gradients by slot number, each with an axis for the layer."""
        pairs = zip(self._param_slots(), jax.tree.leaves(grads), strict=True)
        return {n: g[None] for n, g in pairs}

    def _param_slots(self) -> list[int]:
        return [n for n in self.update.owned(self.number) if n < len(self.update.grads)]


class StackPlaceholder:
    """Stands for the parameters of a stack inside of the loss, for one `scan` over its layers.

    Any other use of the parameters would add to a gradient that never exists as a whole, so it
    raises a TypeError: indexing, arithmetic, attributes, and all JAX functions, since the
    placeholder is a pytree that cannot be flattened.
    """

    def __init__(self, stack: Stack, owned: Owned, shared: dict[int, Array]) -> None:
        self._stack, self._owned, self._shared = stack, owned, shared
        self._trace = get_opaque_trace_state()
        self._is_used = False
        self._is_updated = False

    def scan(self, body: Body, inputs: Any, x: Any) -> tuple[Any, Any]:
        """Apply all layers to ``x``.

        Args:
          body: ``body(params, inputs, x) -> (x, outputs)``, one layer.
          inputs: a pytree of arrays [n, ...], one entry per layer, without gradients.
          x: the input of the first layer; a pytree of floating arrays.

        Returns:
          The output of the last layer, and the outputs of all layers, stacked.

        Raises:
          ValueError: if called twice, or under a transformation inside of the loss,
            because the parameters would be updated more than once.
        """
        path = self._stack.path
        if self._trace != get_opaque_trace_state():
            raise ValueError(
                f"optimizer_in_backward: the layers of {path!r} are applied under a transformation "
                "in the loss (jax.checkpoint, vmap, jit, scan, ...), which could update them "
                "more than once; apply them outside of it (jax.checkpoint goes around the layer "
                "inside of repeat)"
            )
        if self._is_used:
            raise ValueError(
                f"optimizer_in_backward: the layers of {path!r} are applied twice, but one "
                "backward pass through them already updates them; use mode=mean"
            )
        self._is_used = True
        params = self._stack.params(self._owned.arrays)
        first = jax.tree.map(lambda a: a[0], (params, inputs))
        body, closed = jax.closure_convert(body, *first, x)
        static = _Static(self._stack, body, self._mark_updated)
        return _scan(static, self._owned, self._shared, inputs, x, closed)

    def _mark_updated(self) -> None:
        self._is_updated = True

    def check_used(self) -> None:
        """Raise ValueError if there was no `scan`."""
        if not self._is_used:
            raise ValueError(
                f"optimizer_in_backward: no fnet.repeat was given the parameters at "
                f"{self._stack.path!r}, so no backward pass updates them; give the path of a "
                "repeat's parameters"
            )

    def check_updated(self) -> None:
        """Raise ValueError if no backward pass went through the layers."""
        if not self._is_updated:
            raise ValueError(
                f"optimizer_in_backward: no gradient reaches the layers of {self._stack.path!r} "
                "(the loss does not depend on their output, or only behind "
                "jax.lax.stop_gradient), so no backward pass updates them; use mode=mean"
            )

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"optimizer_in_backward: the parameters at {self._stack.path!r} are updated in the "
            "backward pass of fnet.repeat, and nothing else can use them: no scan of another "
            "library, such as flax's nn.scan, no function of them in the loss, which would add to "
            "their gradient (weight decay belongs to the optimizer), no other layer, and no "
            "jax.checkpoint around the network; use mode=mean"
        )

    def __getattr__(self, name: str) -> Any:
        """Raise TypeError, except for special methods, which Python looks up for its own use."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __getitem__ = __iter__ = __len__ = __contains__ = __jax_array__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __abs__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse


def _unflatten(_: Any, children: Any) -> StackPlaceholder:
    raise AssertionError("a placeholder is never flattened")


jax.tree_util.register_pytree_node(
    StackPlaceholder, flatten_func=StackPlaceholder._refuse, unflatten_func=_unflatten
)


class _Static(NamedTuple):
    stack: Stack
    body: Body
    mark_updated: Callable[[], None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(
    static: _Static,
    owned: Owned,
    shared: dict[int, Array],
    inputs: Any,
    x: Any,
    closed: list[Array],
) -> tuple[Any, Any]:
    def layer(x: Any, xs: tuple[Any, Any]) -> tuple[Any, Any]:
        return static.body(*xs, x, *closed)

    return jax.lax.scan(layer, x, (static.stack.params(owned.arrays), inputs))


@dataclasses.dataclass(frozen=True, eq=False)
class _LayerVjp:
    """The vjp of a layer, taken apart into leaves so that only some of them are saved.

    Attributes:
      jaxpr: the layer; its results end in the leaves of the vjp.
      params: variables of the layer's parameters.
      constants: variables that have the same value in all layers.
      leaves: variables of the vjp's leaves.
      saved: whether the forward pass saves each leaf. The others are rematerialized.
      structure: pytree structure of the vjp.
    """

    jaxpr: Jaxpr
    params: tuple[Var, ...]
    constants: tuple[Var, ...]
    leaves: tuple[Atom, ...]
    saved: tuple[bool, ...]
    structure: Any

    def invariants(self, constants: Sequence[Any]) -> dict[Var, Any]:
        """Return the constants and all leaves that depend on them alone, computed once."""
        values = dict(zip(self.constants, constants, strict=True))
        leaves = [
            v
            for v, saved in zip(self.leaves, self.saved, strict=True)
            if not isinstance(v, Literal)
            and not saved
            and set(dependencies(self.jaxpr, [v])[0]) <= values.keys()
        ]
        evaluated = evaluate_from(self.jaxpr, leaves, values)
        return values | dict(zip(leaves, evaluated, strict=True))

    def of_layer(
        self, params: Any, saved: list[Array], invariants: dict[Var, Any]
    ) -> Callable[..., Any]:
        values = invariants | dict(zip(self.params, jax.tree.leaves(params), strict=True))
        saved_leaves = [v for v, is_saved in zip(self.leaves, self.saved, strict=True) if is_saved]
        values |= {
            v: a for v, a in zip(saved_leaves, saved, strict=True) if not isinstance(v, Literal)
        }
        vjp: Callable[..., Any] = self.structure.unflatten(
            evaluate_from(self.jaxpr, self.leaves, values)
        )
        return vjp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    owned: Owned
    shared: dict[int, Array]
    saved: list[Array]
    constants: list[Any]
    closed: list[Array]
    vjp: _LayerVjp = dataclasses.field(metadata={"static": True})


def _forward(
    static: _Static,
    owned: Owned,
    shared: dict[int, Array],
    inputs: Any,
    x: Any,
    closed: list[Array],
) -> tuple[tuple[Any, Any], _Residuals]:
    def layer(
        params: Any, closed: list[Array], inputs: Any, x: Any
    ) -> tuple[Any, Any, Callable[..., Any]]:
        def run(params: Any, closed: list[Array], x: Any) -> tuple[tuple[Any, Any], Any]:
            x, outputs = static.body(params, inputs, x, *closed)
            floating = jax.tree.map(lambda a: a if is_differentiable(a) else None, outputs)
            others = jax.tree.map(lambda a: None if is_differentiable(a) else a, outputs)
            return (x, floating), others

        (x, floating), vjp, others = jax.vjp(run, params, closed, x, has_aux=True)
        outputs = jax.tree.map(
            lambda f, o: o if f is None else f, floating, others, is_leaf=lambda a: a is None
        )
        return x, outputs, vjp

    params = static.stack.params(owned.arrays)
    first = jax.eval_shape(lambda tree: jax.tree.map(lambda a: a[0], tree), (params, inputs))
    traced, shapes = jax.make_jaxpr(layer, return_shape=True)(first[0], closed, first[1], x)
    structure: Any = jax.tree.structure(shapes)
    vjp_structure: Any = jax.tree.structure(shapes[2])

    inlined = inline(traced, custom_derivatives=True)
    jaxpr, count = inlined.jaxpr, len(jax.tree.leaves(params))
    param_vars, closed_vars = jaxpr.invars[:count], jaxpr.invars[count : count + len(closed)]
    constants = [*jaxpr.constvars, *closed_vars]
    leaves = jaxpr.outvars[len(jaxpr.outvars) - vjp_structure.num_leaves :]

    def is_saved(leaf: Atom) -> bool:
        # Computed again is what is the same in all layers, and parameters, which exist anyway.
        inputs, eqns = dependencies(jaxpr, [leaf])
        is_param = all(is_elementwise(eqn) or moves_elements(eqn) for eqn in eqns)
        return not set(inputs) <= {*constants, *param_vars * is_param}

    saved = [is_saved(leaf) for leaf in leaves]

    def step(x: Any, xs: tuple[Any, Any]) -> tuple[Any, tuple[Any, list[Array]]]:
        # The layer is traced only once, so that the leaves of its vjp have the order of `leaves`.
        args = jax.tree.leaves((xs[0], closed, xs[1], x))
        x, outputs, vjp = structure.unflatten(jaxpr_as_fun(traced)(*args))
        pairs = zip(jax.tree.leaves(vjp), saved, strict=True)
        return x, (outputs, [a for a, is_saved in pairs if is_saved])

    x, (outputs, saved_arrays) = jax.lax.scan(step, x, (params, inputs))
    vjp = _LayerVjp(
        jaxpr, tuple(param_vars), tuple(constants), tuple(leaves), tuple(saved), vjp_structure
    )
    values = [*inlined.consts, *closed]
    return (x, outputs), _Residuals(owned, shared, saved_arrays, values, closed, vjp)


def _backward(
    static: _Static, residuals: _Residuals, cotangents: tuple[Any, Any]
) -> tuple[Owned, None, None, Any, list[Array]]:
    static.mark_updated()  # while tracing; JAX skips this rule if all cotangents are zero
    stack, shared, vjp = static.stack, residuals.shared, residuals.vjp
    owned = residuals.owned.as_stored(stack.update.slots)
    dx, doutputs = cotangents
    doutputs = jax.tree.map(lambda d: None if d.dtype == jax.dtypes.float0 else d, doutputs)
    invariants = vjp.invariants(residuals.constants)
    layers = jax.tree.leaves(owned.arrays)[0].shape[0]

    def step(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[tuple[Any, ...], None]:
        (dx, dclosed, owned), (saved, doutputs, layer) = carry, xs
        params = jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, layer, keepdims=False),
            stack.params(owned.arrays),
        )
        grads, dclosed_layer, dx = vjp.of_layer(params, saved, invariants)((dx, doutputs))
        dclosed = jax.tree.map(jnp.add, dclosed, dclosed_layer)
        squares = owned.squares + squared_norm(grads).astype(jnp.float32)
        with jax.named_scope("optimizer"):
            arrays = stack.update.write(
                stack.number,
                layer,
                owned.arrays,
                stack.numbered(grads),
                shared,
                before=(dx, dclosed, squares),
            )
        return (dx, dclosed, Owned(arrays, squares)), None

    xs = (residuals.saved, doutputs, jnp.arange(layers))
    carry = dx, jax.tree.map(jnp.zeros_like, residuals.closed), owned
    (dx, dclosed, owned), _ = jax.lax.scan(step, carry, xs, reverse=True)
    return owned.as_floating(), None, None, dx, dclosed


_scan.defvjp(_forward, _backward)
