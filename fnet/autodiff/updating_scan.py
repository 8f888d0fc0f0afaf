"""A scan over layers whose backward pass leaves no gradients behind, but renewed layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from jax import Array

from fnet.autodiff.batched.tangents import is_differentiable
from fnet.autodiff.equations import ELEMENTWISE, Equations, Variable, equations_of
from fnet.autodiff.layerwise import LayerwiseUpdate
from fnet.autodiff.update import squared_norm

Body = Callable[..., tuple[Any, Any]]
"""``body(params, inputs, x, *closed) -> (x, outputs)``: one layer of a stack.

``closed`` are the arrays, the same for all layers, that it would close over."""


class Owned(NamedTuple):
    """What a backward pass renews. The new values come back in place of the cotangents.

    Attributes:
      arrays: slot's number (`LayerwiseUpdate`) -> all layers of it, [n, ...].
      squares: sum of the squares of the gradient's elements, float32 [].
    """

    arrays: dict[int, Array]
    squares: Array


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """One stack of layers, and how it is updated.

    Attributes:
      name: for messages.
      number: its number in ``update``.
      update: of all parameters.
      structure: the tree of the stack's parameters.
    """

    name: str
    number: int
    update: LayerwiseUpdate
    structure: Any

    def params(self, arrays: dict[int, Array]) -> Any:
        """The tree of the parameters among a stack's arrays."""
        return self.structure.unflatten(arrays[n] for n in self._places())

    def gradients(self, grads: Any) -> dict[int, Array]:
        """One layer's gradients by their numbers in the update, each with an axis for the layer."""
        return {n: g[None] for n, g in zip(self._places(), jax.tree.leaves(grads), strict=True)}

    def _places(self) -> list[int]:
        return [n for n in self.update.owned(self.number) if n < len(self.update.grads)]


class UpdatedStack:
    """Stands in for a stack's parameters, for one `scan` over its layers.

    It is no array and no pytree of arrays: any other use of the parameters would
    ask for a gradient that is never known as a whole, so it is an error.
    """

    def __init__(self, stack: Stack, owned: Owned, shared: dict[int, Array]) -> None:
        self._stack, self._owned, self._shared = stack, owned, shared
        self._trace = jax.extend.core.get_opaque_trace_state()
        self._uses = 0
        self._renewed = False

    def scan(self, body: Body, inputs: Any, x: Any) -> tuple[Any, Any]:
        """``x`` through all layers, and their outputs stacked.

        Args:
          body: ``body(params, inputs, x) -> (x, outputs)``, one layer.
          inputs: a pytree of arrays [n, ...], a layer each; no gradient goes to them.
          x: the first layer's; a pytree of floating arrays.

        Raises:
          ValueError: the second time, or under a transformation inside of the
            loss: the parameters would be updated more than once.
        """
        name = self._stack.name
        if self._trace != jax.extend.core.get_opaque_trace_state():
            raise ValueError(
                f"optimizer_in_backward: the layers of {name!r} are applied under a transformation "
                "in the loss (jax.checkpoint, vmap, jit, scan, ...), where they could be updated "
                "more than once; apply them outside of it (jax.checkpoint goes around the layer "
                "that repeat is given)"
            )
        self._uses += 1
        if self._uses > 1:
            raise ValueError(
                f"optimizer_in_backward: the layers of {name!r} are applied twice, but one "
                "backward pass through them already updates them; use mode=mean"
            )
        params = self._stack.params(self._owned.arrays)
        first = jax.tree.map(lambda a: a[0], (params, inputs))
        body, closed = jax.closure_convert(body, *first, x)
        work = self._stack, body, self._goes_back
        return _scan(work, self._owned, self._shared, inputs, x, closed)

    def _goes_back(self) -> None:
        self._renewed = True

    def check_used(self) -> None:
        """Raises ValueError if there was no `scan`."""
        if not self._uses:
            raise ValueError(
                f"optimizer_in_backward: no fnet.repeat was given the parameters at "
                f"{self._stack.name!r}, so no backward pass updates them; name the path of a "
                "repeat's parameters"
            )

    def check_renewed(self) -> None:
        """Raises ValueError if no backward pass has come through: there are no new values then."""
        if not self._renewed:
            raise ValueError(
                f"optimizer_in_backward: no gradient reaches the layers of {self._stack.name!r} "
                "(the loss does not depend on what they give, or only behind "
                "jax.lax.stop_gradient), so no backward pass updates them; use mode=mean"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _Vjp:
    """How a layer's vjp is put together again.

    Attributes:
      equations: of the layer; outputs end in the vjp's leaves. No constants.
      leaves: the variables of the vjp's leaves.
      structure: of the vjp, a pytree.
      saved: of the leaves, which the forward pass keeps.
    """

    equations: Equations
    leaves: tuple[Variable, ...]
    structure: Any
    saved: tuple[bool, ...]

    def invariant(self, constants: dict[int, Any]) -> dict[int, Any]:
        """The leaves that are the same in every layer, computed once."""
        same = [
            v
            for v, saved in zip(self.leaves, self.saved, strict=True)
            if isinstance(v, int) and not saved and self.equations.needs([v])[0] <= constants.keys()
        ]
        return constants | dict(zip(same, self.equations.evaluate(same, constants), strict=True))

    def of_layer(
        self, params: Any, saved: list[Array], known: dict[int, Any]
    ) -> Callable[..., Any]:
        """The vjp of the layer with these parameters."""
        kept = [v for v, s in zip(self.leaves, self.saved, strict=True) if s]
        flat = jax.tree.leaves(params)
        values = known | dict(zip(self.equations.inputs[: len(flat)], flat, strict=True))
        values |= {v: a for v, a in zip(kept, saved, strict=True) if isinstance(v, int)}
        vjp: Callable[..., Any] = self.structure.unflatten(
            self.equations.evaluate(self.leaves, values)
        )
        return vjp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    owned: Owned
    shared: dict[int, Array]
    saved: list[Array]
    constants: dict[int, Any]
    closed: list[Array]
    vjp: _Vjp = dataclasses.field(metadata={"static": True})


_Work = tuple[Stack, Body, Callable[[], None]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(
    work: _Work,
    owned: Owned,
    shared: dict[int, Array],
    inputs: Any,
    x: Any,
    closed: list[Array],
) -> tuple[Any, Any]:
    stack, body, _ = work

    def layer(x: Any, xs: tuple[Any, Any]) -> tuple[Any, Any]:
        return body(*xs, x, *closed)

    return jax.lax.scan(layer, x, (stack.params(owned.arrays), inputs))


def _forward(
    work: _Work,
    owned: Owned,
    shared: dict[int, Array],
    inputs: Any,
    x: Any,
    closed: list[Array],
) -> tuple[tuple[Any, Any], _Residuals]:
    stack, body, _ = work

    def layer(
        params: Any, closed: list[Array], inputs: Any, x: Any
    ) -> tuple[Any, Any, Callable[..., Any]]:
        def run(params: Any, closed: list[Array], x: Any) -> tuple[tuple[Any, Any], Any]:
            x, outputs = body(params, inputs, x, *closed)
            floating = jax.tree.map(lambda a: a if is_differentiable(a) else None, outputs)
            return (x, floating), jax.tree.map(
                lambda a: None if is_differentiable(a) else a, outputs
            )

        (x, floating), vjp, others = jax.vjp(run, params, closed, x, has_aux=True)
        outputs = jax.tree.map(
            lambda f, o: o if f is None else f, floating, others, is_leaf=lambda a: a is None
        )
        return x, outputs, vjp

    params = stack.params(owned.arrays)
    first = jax.eval_shape(lambda tree: jax.tree.map(lambda a: a[0], tree), (params, inputs))
    traced, shapes = jax.make_jaxpr(layer, return_shape=True)(first[0], closed, first[1], x)
    structure: Any = jax.tree.structure(shapes)
    vjp_structure: Any = jax.tree.structure(shapes[2])
    equations = equations_of(traced)
    constants, equations = equations.constants, dataclasses.replace(equations, constants={})
    leaves = equations.outputs[len(equations.outputs) - vjp_structure.num_leaves :]
    count = len(jax.tree.leaves(params))
    constants |= zip(equations.inputs[count : count + len(closed)], closed, strict=True)
    of_params = equations.inputs[:count]
    saved = tuple(not _made_again(equations, v, of_params, constants) for v in leaves)

    def step(x: Any, xs: tuple[Any, Any]) -> tuple[Any, tuple[Any, list[Array]]]:
        # The layer is traced once; what its vjp holds then has the order of `leaves`.
        args = jax.tree.leaves((xs[0], closed, xs[1], x))
        flat = jax.extend.core.jaxpr_as_fun(traced)(*args)
        x, outputs, vjp = structure.unflatten(flat)
        kept = [a for a, s in zip(jax.tree.leaves(vjp), saved, strict=True) if s]
        return x, (outputs, kept)

    x, (outputs, kept) = jax.lax.scan(step, x, (params, inputs))
    vjp = _Vjp(equations, leaves, vjp_structure, saved)
    return (x, outputs), _Residuals(owned, shared, kept, constants, closed, vjp)


def _made_again(
    equations: Equations, leaf: Variable, params: tuple[int, ...], constants: dict[int, Any]
) -> bool:
    """Whether the backward pass makes a leaf of the vjp again, rather than keep one a layer.

    So it does with what is the same in all layers, and with parameters, which
    it has, cast or transposed or not.
    """
    needed, between = equations.needs([leaf])
    return needed <= constants.keys() or (
        needed <= constants.keys() | set(params)
        and all(equation.primitive.name in ELEMENTWISE | _LAYOUT for equation in between)
    )


_LAYOUT = frozenset(["broadcast_in_dim", "reshape", "rev", "slice", "squeeze", "transpose"])


def _backward(
    work: _Work, residuals: _Residuals, cotangents: tuple[Any, Any]
) -> tuple[Owned, None, None, Any, list[Array]]:
    stack, _, goes_back = work
    goes_back()  # as it is traced; not at all where every cotangent is known to be 0
    owned, shared, vjp = residuals.owned, residuals.shared, residuals.vjp
    dx, doutputs = cotangents
    doutputs = jax.tree.map(lambda d: None if d.dtype == jax.dtypes.float0 else d, doutputs)
    known = vjp.invariant(residuals.constants)
    layers = jax.tree.leaves(owned.arrays)[0].shape[0]

    def step(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[tuple[Any, ...], None]:
        (dx, dclosed, owned), (saved, doutputs, layer) = carry, xs
        params = jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, layer, keepdims=False),
            stack.params(owned.arrays),
        )
        grads, more, dx = vjp.of_layer(params, saved, known)((dx, doutputs))
        dclosed = jax.tree.map(jnp.add, dclosed, more)
        squares = owned.squares + squared_norm(grads).astype(jnp.float32)
        with jax.named_scope("optimizer"):
            new = stack.gradients(grads)
            first = dx, dclosed, squares
            arrays = stack.update.write(stack.number, layer, owned.arrays, new, shared, first)
        return (dx, dclosed, Owned(arrays, squares)), None

    xs = (residuals.saved, doutputs, jnp.arange(layers))
    start = dx, jax.tree.map(jnp.zeros_like, residuals.closed), owned
    (dx, dclosed, owned), _ = jax.lax.scan(step, start, xs, reverse=True)
    return owned, None, None, dx, dclosed


_scan.defvjp(_forward, _backward)
