"""Residuals: the arrays that the forward pass saves for the backward pass, by layer.

`residuals` traces ``jax.vjp`` of a function and interprets the forward pass once more, with an
`_Origin` in place of each array. An origin names the equation that made the array, through jit,
checkpoint, scan and the like.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path

from fnet.jaxpr import Scan, argument_names, aval, inner_jaxprs, interpret, scopes, source_line
from fnet.memory.sizes import leaf_bytes


class Residual(NamedTuple):
    """An array that the forward pass saves for the backward pass.

    Attributes:
      layer: Named scopes the array was made under, ``"layer1/0/conv"``. Empty without scopes, and
        for arguments and constants.
      shape: Shape of the array. Residuals of a scan have the scanned axis in front.
      dtype: Type of its elements.
      bytes: Its size.
      operation: JAX primitive that made it, ``"dot_general"``. Empty for arguments and constants.
      source: Source line that made it, ``"model.py:12 (block)"``. Empty if JAX does not know it.
      alias_of: Array that exists anyway and holds this residual: ``"argument params['w']"``,
        ``"output [1]"``, ``"constant"`` or ``"host memory"``. Empty if it takes device memory of
        its own.
    """

    layer: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    operation: str
    source: str
    alias_of: str

    @property
    def added(self) -> int:
        """Bytes of device memory that the residual adds to what exists anyway."""
        return 0 if self.alias_of else self.bytes


class LayerResiduals(NamedTuple):
    """Residuals of one layer that take memory of their own.

    Attributes:
      layer: Name of the layer, or the source line of code outside of named scopes.
      bytes: Their total size.
      arrays: Their number.
    """

    layer: str
    bytes: int
    arrays: int


def residuals(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> list[Residual]:
    """List the arrays that ``jax.vjp`` of a function saves between forward and backward pass.

    The function is traced, never run, so shapes are enough. It may be any JAX function. An array
    that is saved twice, or saved and renamed (a reshape, ``checkpoint_name``), is listed once.
    Not listed are arrays that the backward pass never reads, and arrays of a single repeated
    number, which XLA writes where it reads them. For a scan, a residual is the stack over all
    iterations.

    The sum of ``added`` is the bytes that autodiff asks XLA to save. The compiled program may hold
    less, because XLA recomputes cheap operations and frees arrays early. It may also hold more,
    because XLA may delay reads. For 16
    blocks of convolution, batch norm and leaky ReLU the residuals are 68 activations. Compiled,
    the program holds 66 on a CPU, 50 on a CPU with the memory scheduler, and 33 on an H100. Use
    `fnet.memory.peak` for the bytes of the program, and `residuals` to see their cause.

    Args:
      f: Any function. With ``has_aux`` it returns ``(value, aux)``, and only the value is
        differentiated, as in ``jax.grad``.
      *args: Arguments of ``f``: pytrees of arrays or `jax.ShapeDtypeStruct`. Other leaves are
        passed to ``f`` unchanged.
      argnums: Arguments to differentiate, as in ``jax.grad``. By default the first, the
        ``params`` of a loss. Their integer and key leaves are not differentiated. Arrays that
        only the gradient of other arguments needs are not listed.
      has_aux: Whether ``f`` returns a pair.
      **kwargs: Keyword arguments of ``f``; not differentiated.

    Returns:
      Residuals in forward order: arguments, constants, then computed arrays.

    Raises:
      TypeError: If a differentiated output is not floating, or no leaf of the arguments to
        differentiate is. The message names it.
      ValueError: If ``f`` returns no array, or ``argnums`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> def loss(params, x):
      ...     with jax.named_scope("hidden"):
      ...         h = jnp.tanh(x @ params["w1"])
      ...     return (h @ params["w2"]).sum()
      >>> params = {"w1": jnp.zeros((8, 16)), "w2": jnp.zeros((16, 4))}
      >>> for r in memory.residuals(loss, params, jnp.zeros((32, 8))):
      ...     print(r.alias_of or r.layer, r.shape, r.added)
      argument params['w2'] (16, 4) 0
      argument x (32, 8) 0
      hidden (32, 16) 2048
      hidden (32, 16) 2048

      tanh saves its derivative, and the second product saves its input.
    """
    forward = _trace(f, args, kwargs, argnums, has_aux)
    origins = forward.origins()
    output_of = {id(origins[i]): name for i, name in forward.outputs.items()}
    found: dict[int, tuple[_Origin, Residual]] = {}
    for i in forward.residuals:
        origin, array = origins[i], aval(forward.jaxpr.outvars[i])
        if origin.is_fill or id(origin) in found:
            continue
        on_host = getattr(getattr(array, "memory_space", None), "name", "") == "Host"
        alias_of = origin.alias_of or output_of.get(id(origin), "host memory" if on_host else "")
        found[id(origin)] = (
            origin,
            Residual(
                layer=origin.layer,
                shape=tuple(array.shape),
                dtype=array.dtype,
                bytes=leaf_bytes(array),
                operation=origin.operation,
                source=origin.source,
                alias_of=alias_of,
            ),
        )
    return [residual for _, residual in sorted(found.values(), key=lambda pair: pair[0].order)]


def by_layer(residuals: Sequence[Residual], depth: int | None = None) -> list[LayerResiduals]:
    """Sum the residuals of each layer that take memory of their own.

    Args:
      residuals: Residuals from `residuals`.
      depth: Number of leading parts of a layer's name to group by. 1 sums ``layer1/0/conv`` and
        ``layer1/1/abn`` as ``layer1``. None groups by the whole name.

    Returns:
      One row per layer, in forward order.

    Raises:
      ValueError: If ``depth`` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import layers, memory
      >>> model = layers.mlp([8, 16, 16, 4])
      >>> params, state = jax.eval_shape(model.init, jax.random.key(0))
      >>> loss = lambda params, x: model.apply(params, state, x, train=True)[0].sum()
      >>> for row in memory.by_layer(
      ...     memory.residuals(loss, params, jnp.zeros((32, 8)))
      ... ):
      ...     print(row.layer, row.bytes, row.arrays)
      activation_1 2560 2
      activation_2 2560 2
    """
    if depth is not None and depth < 1:
        raise ValueError(f"by_layer: depth must be at least 1, or None for all, got {depth}.")
    rows: dict[str, LayerResiduals] = {}
    for r in residuals:
        if r.alias_of:
            continue
        line = r.source.rpartition("/")[2]  # without the folder
        layer = "/".join(r.layer.split("/")[:depth]) or line or r.operation
        _, size, arrays = rows.get(layer, (layer, 0, 0))
        rows[layer] = LayerResiduals(layer, size + r.bytes, arrays + 1)
    return list(rows.values())


class _Forward(NamedTuple):
    """The forward pass of ``jax.vjp`` as a jaxpr.

    Attributes:
      jaxpr: Maps arrays to outputs and residuals.
      arguments: Name of each argument of the jaxpr.
      outputs: Name of each result that ``f`` returns, by its position.
      residuals: Positions of the results that the backward pass reads.
    """

    jaxpr: Jaxpr
    arguments: list[str]
    outputs: dict[int, str]
    residuals: list[int]

    def origins(self) -> "list[_Origin]":
        """The origin of each result."""
        first = -len(self.arguments) - 1  # before constants, which come before all equations
        arguments = [
            _Origin(first + i, alias_of=f"argument {name}") for i, name in enumerate(self.arguments)
        ]
        return _Call(self.jaxpr, itertools.count()).run(arguments)


def _trace(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> _Forward:
    """Trace ``jax.vjp(f, ...)``. Its result is a pytree whose leaves are the residuals."""
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(not -len(args) <= n < len(args) for n in positions):
        raise ValueError(
            f"residuals: argnums={argnums}, but f has {len(args)} positional arguments."
        )
    positions = tuple(n % len(args) for n in positions)
    names = argument_names(f, args)
    paths, tree = tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in paths]
    chosen = [
        i
        for i, (path, leaf) in enumerate(paths)
        if path[0].idx == 0 and path[1].idx in positions and _is_floating(leaf)
    ]
    if not chosen:
        given = ", ".join(names[n] for n in positions)
        raise TypeError(
            f"residuals: nothing to differentiate: {given} has no floating leaf; "
            "choose another argument with argnums."
        )
    arrays = [i for i, leaf in enumerate(leaves) if i in chosen or _is_array(leaf)]

    def forward(*values: Any) -> tuple[Any, ...]:
        traced = dict(zip(arrays, values, strict=True))

        def of_chosen(*differentiated: Any) -> Any:
            given = traced | dict(zip(chosen, differentiated, strict=True))
            a, k = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
            out = f(*a, **k)
            _check_differentiable(out[0] if has_aux else out, has_aux)
            return out

        vjp: Any = jax.vjp
        out_and_vjp: tuple[Any, ...] = vjp(of_chosen, *(traced[i] for i in chosen), has_aux=has_aux)
        return out_and_vjp

    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*(leaves[i] for i in arrays))
    out, vjp = shapes[:2]
    # A custom_vjp rule may save arrays that its backward pass never reads.
    backward = jax.make_jaxpr(lambda vjp, cotangent: vjp(cotangent))(vjp, out).jaxpr
    _, is_read = dce_jaxpr(backward, [True] * len(backward.outvars))
    first, count = len(jax.tree.leaves(out)), len(jax.tree.leaves(vjp))
    returned = tree_leaves_with_path((out, *shapes[2:]) if has_aux else out)
    results = [*range(first), *range(first + count, len(closed.jaxpr.outvars))]
    return _Forward(
        closed.jaxpr,
        [_leaf_name(paths[i][0], names) for i in arrays],
        {i: f"output {keystr(p)}".strip() for i, (p, _) in zip(results, returned, strict=True)},
        [first + i for i in range(count) if is_read[i]],
    )


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, np.generic)


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, float | complex):
        return True
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _check_differentiable(out: Any, has_aux: bool) -> None:
    outputs = tree_leaves_with_path(out)
    if not outputs:
        raise ValueError(f"residuals: f returns no array to differentiate, but {out!r}.")
    for path, leaf in outputs:
        if not _is_floating(leaf):
            name = keystr(path)
            what = f"{leaf.dtype}{list(leaf.shape)}" if _is_array(leaf) else type(leaf).__name__
            fix = "" if has_aux else ", or (value, aux) with has_aux=True"
            raise TypeError(
                f"residuals: f cannot be differentiated: its output {name + ' ' if name else ''}is "
                f"{what}; return floating arrays only{fix}."
            )


def _leaf_name(path: Any, names: list[str]) -> str:
    keyword = path[0].idx == 1
    name: str = (path[1].key if keyword else names[path[1].idx]) + keystr(path[2:])
    return name


# Origins: which equation made an array.


@dataclasses.dataclass(frozen=True, eq=False)
class _Origin:
    """An array of the forward pass. The same array under another name is the same object.

    Attributes:
      order: Position in forward order.
      eqn: Innermost equation that made the array. None for arguments, constants, and arrays that
        enter the body of a loop.
      call: Jaxpr that contains ``eqn``.
      alias_of: ``"argument x"``, ``"constant"`` or empty.
      is_fill: Whether the array is a single repeated number or an iota.
    """

    order: int = 0
    eqn: JaxprEqn | None = None
    call: "_Call | None" = None
    alias_of: str = ""
    is_fill: bool = False

    @property
    def operation(self) -> str:
        return self.eqn.primitive.name if self.eqn else ""

    @property
    def layer(self) -> str:
        return "/".join(self.call.scopes(self.eqn)) if self.call and self.eqn else ""

    @property
    def source(self) -> str:
        return self.call.source(self.eqn) if self.call and self.eqn else ""


# Equations whose output is their input, with the same elements in the same order.
_RENAMING = {
    *("name", "reduce_precision", "optimization_barrier", "copy"),
    *("reshape", "squeeze", "expand_dims", "broadcast_in_dim"),
    *("pvary", "pcast", "sharding_constraint", "stop_gradient"),
}
# Equations that fill an array with a number.
_FILLING = {"broadcast_in_dim", "convert_element_type", "iota", "empty", "empty2"}
# Parameters with jaxprs that make no outputs: the condition of a while, the update of a scatter.
_WITHOUT_OUTPUTS = ("cond_jaxpr", "update_jaxpr")
_CONSTANT = object()


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A jaxpr and the equation that calls it.

    Attributes:
      jaxpr: The equations to interpret.
      clock: Counts equations, in forward order.
      eqn: Equation that calls the jaxpr. None for the outermost jaxpr.
      outer: Call that contains ``eqn``.
    """

    jaxpr: Jaxpr
    clock: Iterator[int]
    eqn: JaxprEqn | None = None
    outer: "_Call | None" = None

    def run(self, inputs: Sequence[_Origin]) -> list[_Origin]:
        """Interpret the jaxpr: one origin per input in, one per result out."""
        closed = ClosedJaxpr(self.jaxpr, [_CONSTANT] * len(self.jaxpr.constvars))
        return interpret(closed, inputs, self._step, _constant)

    def scopes(self, eqn: JaxprEqn) -> tuple[str, ...]:
        """Named scopes of an equation of this jaxpr, including the scopes of the call."""
        inner = scopes(eqn)
        if self.eqn is None or self.outer is None:
            return inner
        # In a jax.custom_jvp, JAX 0.12 repeats the scopes of the call.
        repeated = scopes(self.eqn) if self.eqn.primitive.name == "custom_jvp_call" else ()
        if inner[: len(repeated)] == repeated:
            inner = inner[len(repeated) :]
        return self.outer.scopes(self.eqn) + inner

    def source(self, eqn: JaxprEqn) -> str:
        """Source line of an equation of this jaxpr. For a function of JAX, the line of its call.

        JAX traces its own functions once for all callers, with the line of the first caller.
        """
        return source_line(eqn) if self._line_of_call is None else self._line_of_call

    @functools.cached_property
    def _line_of_call(self) -> str | None:
        if self.eqn is None or self.outer is None:
            return None
        if self.outer._line_of_call is None and _is_jax_function(self.jaxpr):
            return source_line(self.eqn)
        return self.outer._line_of_call

    def _step(self, eqn: JaxprEqn, inputs: list[_Origin]) -> list[_Origin]:
        """The handler of `interpret`: one origin per output of an equation."""
        name = eqn.primitive.name
        made = _Origin(next(self.clock), eqn, self)
        params = tuple(v for k, v in eqn.params.items() if k not in _WITHOUT_OUTPUTS)
        calls = [_Call(inner, self.clock, eqn, self) for inner in inner_jaxprs(params)]
        if name == "scan":
            return _scan(eqn, inputs, made, calls[0])
        if calls:
            return _call(eqn, inputs, made, calls)
        outputs = []
        for i, var in enumerate(eqn.outvars):
            source = min(i, len(inputs) - 1)
            if name in _RENAMING and _is_renaming(eqn, eqn.invars[source], var):
                outputs.append(inputs[source])
            elif (name in _FILLING or aval(var).size <= 1) and all(x.is_fill for x in inputs):
                outputs.append(dataclasses.replace(made, is_fill=True))
            elif name == "device_put":  # for example to host memory
                outputs.append(_made_by(inputs[source], made))
            else:
                outputs.append(dataclasses.replace(made))
        return outputs


def _call(eqn: JaxprEqn, inputs: list[_Origin], made: _Origin, calls: list[_Call]) -> list[_Origin]:
    """Outputs of an equation that calls jaxprs: jit, checkpoint, cond, while, shard_map, ..."""
    name = eqn.primitive.name
    given = inputs[1:] if name == "cond" else inputs
    invars = eqn.invars[1:] if name == "cond" else eqn.invars
    results = []
    for call in calls:
        jaxpr = call.jaxpr
        if len(jaxpr.outvars) != len(eqn.outvars):
            continue
        inner = [_Origin() for _ in jaxpr.invars]
        if name != "while" and len(jaxpr.invars) == len(given):
            pairs = zip(jaxpr.invars, invars, strict=True)
            same = [_shape(a) == _shape(b) for a, b in pairs]
            inner = [g if s else i for g, s, i in zip(given, same, inner, strict=True)]
        results.append(call.run(inner))
    if len(calls) == len(results) == 1 and name != "while":
        inner_shapes = [_shape(v) for v in calls[0].jaxpr.outvars]
        if inner_shapes == [_shape(v) for v in eqn.outvars]:
            return results[0]
    outputs = []
    for i in range(len(eqn.outvars)):
        branches = [result[i] for result in results if not result[i].is_fill]
        outputs.append(_made_by(branches[0] if branches else made, made))
    return outputs


def _scan(eqn: JaxprEqn, inputs: list[_Origin], made: _Origin, call: _Call) -> list[_Origin]:
    """Outputs of a scan. A carry or scanned array that the body returns unchanged is the input."""
    scan = Scan.of(eqn)
    _, carry, xs = scan.split(inputs)
    placeholders = [_Origin() for _ in inputs]
    _, inner_carry, inner_xs = scan.split(placeholders)
    results = call.run(placeholders)
    new_carry, ys = results[: scan.num_carry], results[scan.num_carry :]
    # The carry that enters an iteration was made by the iteration before.
    previous = dict(zip(inner_carry, new_carry, strict=True))

    def maker(result: _Origin) -> _Origin:
        for _ in previous:
            result = previous.get(result, result)
        return _made_by(result, made)

    unchanged = dict(zip(inner_xs, xs, strict=True))
    return [
        outer if result is inner else maker(result)
        for outer, inner, result in zip(carry, inner_carry, new_carry, strict=True)
    ] + [unchanged.get(result) or maker(result) for result in ys]


def _made_by(inner: _Origin, made: _Origin) -> _Origin:
    """A new array: made by the equation behind ``inner`` if there is one, else by ``made``."""
    source = inner if inner.eqn is not None and not inner.is_fill else made
    return dataclasses.replace(source, alias_of="")


def _constant(value: Any) -> _Origin:
    """The origin of a constant of a jaxpr, or of a literal, which is a number."""
    return _Origin(-1, alias_of="constant") if value is _CONSTANT else _Origin(is_fill=True)


def _shape(atom: Any) -> Any:
    """Shape of an array; None for tokens and the like."""
    return getattr(aval(atom), "shape", None)


def _is_renaming(eqn: JaxprEqn, source: Any, var: Any) -> bool:
    if eqn.primitive.name == "reduce_precision":  # jax.checkpoint adds it with all bits
        return bool(eqn.params["mantissa_bits"] == jnp.finfo(aval(var).dtype).nmant)
    return bool(aval(source).size == aval(var).size and aval(source).dtype == aval(var).dtype)


_JAX = inspect.getfile(jax).removesuffix("__init__.py")


def _is_jax_function(jaxpr: Jaxpr) -> bool:
    return _JAX in (getattr(jaxpr.debug_info, "func_src_info", None) or "")
