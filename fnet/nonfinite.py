"""Find the layer and the operation that produced the first NaN or infinity."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn

from fnet.jaxpr import (
    argument_names,
    called_jaxpr,
    custom_function,
    evaluate,
    interpret,
    scopes,
    source_line,
)


class Nonfinite(NamedTuple):
    """The operation that produced the first NaN or infinity.

    Attributes:
      layer: named scopes around the operation, ``"stage0/block1/conv"``. For an
        argument its name, ``"params['stem']['kernel']"``.
      operation: JAX primitive, ``"log"``; ``"argument"`` if an argument is not finite.
      backward: whether the operation belongs to the backward pass. False does not exclude
        a derivative: JAX computes some derivatives during the forward pass.
      source: source line, ``"model.py:12 (block)"``; empty if JAX does not know it.
      value: ``"nan"`` or ``"inf"``.
    """

    layer: str
    operation: str
    backward: bool
    source: str
    value: str

    def __str__(self) -> str:
        if self.operation == "argument":
            return f"{self.layer} has {self.value}"
        layer = self.layer or "outside of every layer"
        details = ("backward" if self.backward else "", self.operation, self.source)
        return f"{layer} ({', '.join(filter(None, details))}) gives {self.value}"


def find_nonfinite(f: Callable[..., Any], *args: Any) -> Nonfinite | None:
    """Find the operation that produced the first NaN or infinity in ``f(*args)``.

    The function runs once more, with a check of every intermediate array. The search
    starts at the results that are not finite and goes back to an operation whose inputs
    were all finite. An infinity that the code wrote as a constant, as attention masks do,
    is not reported. The operation that turned it into a NaN is.

    A loop (`jax.lax.scan`, `jax.lax.while_loop`) counts as one operation. `jax.checkpoint`
    has no effect here, so the check takes the memory of a backward pass without it.

    Args:
      f: a function of pytrees of arrays, such as ``jax.value_and_grad(loss)``.
      *args: its arguments.

    Returns:
      The operation, or None if every result is finite.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.nonfinite import find_nonfinite
      >>> def loss(w):
      ...     with jax.named_scope("head"):
      ...         return jnp.log(w).sum()
      >>> origin = find_nonfinite(loss, jnp.asarray([1.0, -1.0]))
      >>> origin.layer, origin.operation, origin.value
      ('head', 'log', 'nan')
      >>> print(find_nonfinite(loss, jnp.asarray([1.0, jnp.nan])))
      w has nan
    """
    closed = jax.make_jaxpr(f)(*args)
    names = [
        name + jax.tree_util.keystr(path)
        for name, arg in zip(argument_names(f, args), args, strict=True)
        for path, _ in jax.tree_util.tree_leaves_with_path(arg)
    ]
    arrays: list[_Array] = []
    results: list[int] = []

    def compute_flags(leaves: list[Any]) -> Array:
        recorder = _Recorder(arrays, [])
        inputs = [
            recorder.add(_Array(name, "argument"), leaf)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        outputs = interpret(closed, inputs, recorder.handle, recorder.add_constant)
        results.extend(number for number, _ in outputs)
        return jnp.stack(recorder.flags)

    flags = np.asarray(jax.jit(compute_flags)(jax.tree.leaves(args)))
    origins = {_find_origin(arrays, flags, i) for i in results if flags[i].any()}
    if not origins:
        return None
    first = min(origins)
    array = arrays[first]
    value = "nan" if flags[first, 0] else "inf"
    source = "" if array.eqn is None else source_line(array.eqn)
    return Nonfinite(array.layer, array.operation, array.backward, source, value)


class _Array(NamedTuple):
    """How an intermediate array was computed. `inputs` are the numbers of other arrays."""

    layer: str
    operation: str
    eqn: JaxprEqn | None = None
    inputs: tuple[int, ...] = ()
    backward: bool = False


_Numbered = tuple[int, Any]
"""An array's number in `_Recorder.arrays`, and the array."""


class _Recorder(NamedTuple):
    """All arrays of a computation in order, each with its flags ``[any NaN, any infinity]``."""

    arrays: list[_Array]
    flags: list[Array]

    def add(self, array: _Array, value: Any) -> _Numbered:
        self.arrays.append(array)
        finite = jnp.zeros((), bool)
        flags = [finite, finite]
        if jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            flags = [jnp.isnan(value).any(), jnp.isinf(value).any()]
        self.flags.append(jnp.stack(flags))
        return len(self.arrays) - 1, value

    def add_constant(self, value: Any) -> _Numbered:
        return self.add(_Array("", "constant"), value)

    def handle(
        self,
        eqn: JaxprEqn,
        inputs: list[_Numbered],
        outer_scopes: tuple[str, ...] = (),
        in_backward: bool = False,
    ) -> list[_Numbered]:
        layer = (*outer_scopes, *scopes(eqn))
        # In the backward pass, only a call itself is marked, not its equations.
        backward = in_backward or "transpose(" in str(eqn.source_info.name_stack)
        if (inner := called_jaxpr(eqn) or custom_function(eqn)) is not None:
            handle = functools.partial(self.handle, outer_scopes=layer, in_backward=backward)
            return interpret(inner, inputs, handle, self.add_constant)
        numbers = tuple(number for number, _ in inputs)
        array = _Array("/".join(layer), eqn.primitive.name, eqn, numbers, backward)
        return [self.add(array, value) for value in evaluate(eqn, [a for _, a in inputs])]


def _find_origin(arrays: list[_Array], flags: np.ndarray, number: int) -> int:
    """Find the array behind ``number`` that is not finite although all its inputs are."""
    nan, inf = flags.T
    if nan[number]:
        while (source := next((i for i in arrays[number].inputs if nan[i]), None)) is not None:
            number = source
    candidates = (
        _first_infinity(arrays, inf, i) for i in (number, *arrays[number].inputs) if inf[i]
    )
    return next((i for i in candidates if i is not None), number)


def _first_infinity(arrays: list[_Array], inf: np.ndarray, number: int) -> int | None:
    """Find the operation that overflowed. None if every infinity is a constant."""
    visited: set[int] = set()
    stack = [number]
    while stack:
        current = stack.pop()
        if current in visited:
            continue
        visited.add(current)
        sources = [i for i in arrays[current].inputs if inf[i]]
        if not sources and arrays[current].operation != "constant":
            return current
        stack += reversed(sources)
    return None
