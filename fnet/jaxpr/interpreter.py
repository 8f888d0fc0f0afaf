"""Interpreting traced functions: evaluate, follow or rewrite a jaxpr one equation at a time.

`interpret` is the loop that every interpreter in fnet shares. It follows JAX's guide
"Writing custom Jaxpr interpreters in JAX" and runs on JAX 0.10, 0.11 and 0.12.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

CHECKPOINT = ("checkpoint", "remat2")
"""Names of the primitive behind `jax.checkpoint`."""

Atom = Var | Literal
"""An input of an equation, or a result of a jaxpr."""

_CALLS = ("jit", "pjit", "closed_call", "eval_jaxpr")
CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
"""Primitives of functions with derivative rules of their own."""
_HIGH_LEVEL = "call_hi_primitive"
"""The primitive of all `jax.experimental.hijax.HiPrim`: with such rules, too."""
_TRANSFORMED = re.compile(r"(?<!\w)(?:jvp|transpose|vmap|linearize|pmap)\(([^()]*)\)")
_NOTE = "fnet interpreted the equation "

T = TypeVar("T")


def interpret(
    closed: ClosedJaxpr,
    args: Sequence[T],
    handler: Callable[[JaxprEqn, list[T]], Sequence[T]],
    constant: Callable[[Any], T] | None = None,
) -> list[T]:
    """Interpret a jaxpr: call ``handler(eqn, inputs)`` for every equation, in order.

    With `evaluate` as the handler this is ``jax.core.eval_jaxpr``. Values are opaque: a handler may
    compute shapes, flags or dependencies. It enters inner jaxprs itself, by `interpret` of
    `called_jaxpr` or of the body of a `Scan`. A value is dropped after its last use.

    Args:
      closed: the function, ``jax.make_jaxpr(f)(*args)``.
      args: one value per argument of the jaxpr.
      handler: takes an equation and one value per input of it, and returns one per output. What it
        raises gets a note with the equation, its named scopes and its source line.
      constant: maps a literal or a constant to a value; by default the array itself.
    """
    jaxpr = closed.jaxpr
    values: dict[Var, T] = dict(zip(jaxpr.invars, args, strict=True))

    def value_of(raw: Any) -> T:
        return raw if constant is None else constant(raw)

    def read(atoms: Sequence[Any]) -> list[T]:
        return [value_of(a.val) if isinstance(a, Literal) else values[a] for a in atoms]

    values |= zip(jaxpr.constvars, map(value_of, closed.consts), strict=True)
    last_use = _last_uses(jaxpr)
    for index, eqn in enumerate(jaxpr.eqns):
        inputs = read(eqn.invars)
        for v in eqn.invars:
            if not isinstance(v, Literal) and last_use[v] == index:
                values.pop(v, None)
        try:
            outputs = handler(eqn, inputs)
        except Exception as error:
            _add_location(error, eqn)
            raise
        # A variable without a use is never read again.
        values |= {v: a for v, a in zip(eqn.outvars, outputs, strict=True) if v in last_use}
    return read(jaxpr.outvars)


def evaluate(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate one equation, under its own named scopes: the default handler of `interpret`.

    Args:
      eqn: an equation of any jaxpr.
      inputs: one array per input, literals included.

    Returns:
      One array per output.
    """
    given = {v: a for v, a in zip(eqn.invars, inputs, strict=True) if not isinstance(v, Literal)}
    # Only a jaxpr carries the equation's named scopes and source line along.
    jaxpr = part_of_jaxpr([eqn], list(given), eqn.outvars)
    outputs: list[Any] = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*map(_as_array, given.values()))
    return outputs


def bind(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Apply the primitive of an equation without inner jaxprs to arrays, also for its literals."""
    results = eqn.primitive.bind(*inputs, **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _as_array(a: Any) -> Any:
    """Return a NumPy constant as an array of JAX, which a derivative rule may index by a tracer."""
    is_other = isinstance(a, jax.Array | jax.core.Tracer) or not hasattr(a, "__array__")
    return a if is_other else jnp.asarray(a)


def differentiate(
    eqn: JaxprEqn, inputs: Sequence[Any], operands: Sequence[int], transform: Any = jax.vjp
) -> tuple[list[Any], Any]:
    """Evaluate one equation and differentiate it, in reverse mode by default.

    Args:
      eqn: an equation of any jaxpr.
      inputs: one array per input.
      operands: indices of the inputs to differentiate with respect to.
      transform: `jax.vjp`, or what calls `jax.jvp` for the same arguments.

    Returns:
      One array per output, and the function from cotangents of the inexact outputs to cotangents
      of the operands, or the tangents of the inexact outputs.
    """

    def function(*chosen: Any) -> tuple[list[Any], list[Any]]:
        given = dict(enumerate(inputs)) | dict(zip(operands, chosen, strict=True))
        outputs = evaluate(eqn, list(given.values()))
        return [a for a in outputs if jnp.issubdtype(a.dtype, jnp.inexact)], outputs

    _, derivative, outputs = transform(function, *(inputs[i] for i in operands), has_aux=True)
    return outputs, derivative


@functools.cache
def _empty_jaxpr() -> Jaxpr:
    jaxpr = jax.make_jaxpr(lambda: ())().jaxpr
    # JAX may compare the number of names with the number of variables.
    empty: Jaxpr = jaxpr.replace(debug_info=jaxpr.debug_info.with_unknown_names())
    return empty


def _last_uses(jaxpr: Jaxpr) -> dict[Any, int]:
    """Map each variable that is read to the number of the last equation that reads it."""
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not isinstance(v, Literal)}
    results = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    return last | dict.fromkeys(results, len(jaxpr.eqns))


def _add_location(error: Exception, eqn: JaxprEqn) -> None:
    if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return  # raised, and noted, within an inner jaxpr
    layer, line = "/".join(scopes(eqn)), source_line(eqn)
    where = f" in {layer}" * bool(layer) + f" at {line}" * bool(line)
    error.add_note(f"{_NOTE}{eqn.primitive.name!r}{where}.")


# Equations that contain jaxprs.


def called_jaxpr(eqn: JaxprEqn, *, custom_derivatives: bool = False) -> ClosedJaxpr | None:
    """Return the jaxpr that a `jax.jit` or `jax.checkpoint` equation calls, else None.

    Args:
      eqn: an equation.
      custom_derivatives: whether to return also the function inside a `jax.custom_jvp` or
        `jax.custom_vjp`. Evaluating it instead of the equation loses its derivative rule.
    """
    name = eqn.primitive.name
    if name in CHECKPOINT:
        return _closed(eqn.params["jaxpr"])
    if name in _CALLS:
        return _closed(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"])
    if custom_derivatives and name.startswith(CUSTOM_DERIVATIVES):
        return _closed(eqn.params["call_jaxpr"])
    if custom_derivatives and name == "linear_call":
        return _closed(eqn.params["callee"])
    return None


def custom_function(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return what an equation with derivative rules of its own computes, else None.

    These are functions with `jax.custom_jvp` or `jax.custom_vjp`, and primitives of
    `jax.experimental.hijax`, such as `jax.numpy.searchsorted` since JAX 0.12.
    """
    if eqn.primitive.name != _HIGH_LEVEL:
        inner = called_jaxpr(eqn, custom_derivatives=True)
        return None if inner is None or called_jaxpr(eqn) is not None else inner
    arrays = [aval(v) for v in eqn.invars]
    if not all(type(a) is jax.core.ShapedArray for a in arrays):
        return None
    return _expansion(eqn.params["_prim"], tuple((a.shape, a.dtype) for a in arrays))


@functools.lru_cache(512)
def _expansion(primitive: Any, arrays: tuple[tuple[tuple[int, ...], Any], ...]) -> ClosedJaxpr:
    def expand(*inputs: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, inputs)))

    expanded: ClosedJaxpr = jax.make_jaxpr(expand)(*(jax.ShapeDtypeStruct(*a) for a in arrays))
    return expanded


def is_checkpoint(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jax.checkpoint`."""
    return eqn.primitive.name in CHECKPOINT


@dataclasses.dataclass(frozen=True)
class AnyPrimitive:
    """A policy of `jax.checkpoint` for equations of any library, and of complex numbers.

    JAX calls a policy with the parameters of an equation by their names. Equinox's primitives have
    one named ``prim``, as is the first argument of JAX's own policies. Results of complex numbers
    are never saved, because JAX 0.10 fails to.

    Attributes:
      policy: A policy that does not read ``prim``, such as one of ``jax.checkpoint_policies``.
    """

    policy: Callable[..., Any]

    def __call__(self, primitive: Any, /, *avals: Any, **params: Any) -> Any:
        """Return what the policy says of an equation."""
        params.pop("prim", None)
        dtypes = (getattr(a, "dtype", jnp.float32) for a in avals)
        is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
        return not is_complex and self.policy(primitive, *avals, **params)


def call_like(eqn: JaxprEqn, f: Callable[..., T]) -> Callable[..., T]:
    """Wrap ``f`` in the `jax.checkpoint` of ``eqn``, if the equation is one.

    A handler uses it to replace the function that an equation calls.
    """
    if not is_checkpoint(eqn):
        return f
    policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
    wrapped: Callable[..., T] = jax.checkpoint(f, prevent_cse=prevent_cse, policy=policy)
    return wrapped


class Scan(NamedTuple):
    """The parts of a `jax.lax.scan` equation.

    Attributes:
      body: ``(consts, carry, xs) -> (carry, ys)``, flat, for one iteration.
      num_consts: number of inputs that are the same in every iteration.
      num_carry: number of inputs that pass from iteration to iteration.
      length: number of iterations.
      reverse: whether it goes from the last entry of xs to the first.
      unroll: number of iterations per iteration of the compiled loop.
    """

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "Scan":
        """Take the equation of a scan apart."""
        params = eqn.params
        body, length = _closed(params["jaxpr"]), params["length"]

        # The names of these counts in `eqn.params` differ between versions of JAX. Scanned
        # arrays have one more axis outside of the body than inside.
        def scanned(outer: Sequence[Any], inner: Sequence[Any]) -> int:
            return sum(o.aval.ndim > i.aval.ndim for o, i in zip(outer, inner, strict=True))

        num_carry = len(eqn.outvars) - scanned(eqn.outvars, body.jaxpr.outvars)
        num_consts = len(eqn.invars) - num_carry - scanned(eqn.invars, body.jaxpr.invars)
        return cls(body, num_consts, num_carry, length, params["reverse"], params["unroll"])

    @classmethod
    def read(cls, eqn: JaxprEqn) -> "Scan | None":
        """Take an equation apart if it is a scan, else return None."""
        return cls.of(eqn) if eqn.primitive.name == "scan" else None

    def split(self, inputs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split one value per input of the equation into ``(consts, carry, xs)``."""
        xs = self.num_consts + self.num_carry
        return (
            list(inputs[: self.num_consts]),
            list(inputs[self.num_consts : xs]),
            list(inputs[xs:]),
        )

    def evaluate(
        self,
        body: Callable[[list[Any], list[Any], Any], tuple[Sequence[Any], Any]],
        carry: Sequence[Any],
        xs: Sequence[Any],
        more: Any = None,
    ) -> tuple[list[Any], Any]:
        """Execute the same loop with another body, which may read and return more.

        Args:
          body: ``(carry, slices, more) -> (results, outputs)`` for one iteration. The results
            stand for the results of the equation's own body.
          carry: values that pass from iteration to iteration; pytrees.
          xs: values that the loop goes over; pytrees.
          more: what the loop also goes over, or None.

        Returns:
          Values for the results of the equation, and the stacked outputs.
        """

        def step(carry: Any, slices: tuple[list[Any], Any]) -> tuple[Any, Any]:
            results, outputs = body(carry, *slices)
            return list(results[: self.num_carry]), (list(results[self.num_carry :]), outputs)

        scanned = list(xs), more
        carry, (ys, outputs) = jax.lax.scan(
            step, list(carry), scanned, self.length, self.reverse, self.unroll
        )
        return [*carry, *ys], outputs


def switch(
    eqn: JaxprEqn, index: Any, branches: Sequence[Callable[..., Any]], *operands: Any
) -> Any:
    """Call one of the branches that replace the branches of a `jax.lax.cond` equation.

    Branches of `jax.lax.platform_dependent` are lowered for their own platform only, so the
    platform chooses here, too, and ``index`` is ignored.
    """
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return jax.lax.switch(index, branches, *operands)
    by_platform = {
        name: branch
        for names, branch in zip(platforms, branches, strict=True)
        for name in (names or ("default",))
    }
    return jax.lax.platform_dependent(*operands, **by_platform)


class While(NamedTuple):
    """The parts of a `jax.lax.while_loop` equation.

    Attributes:
      condition: ``(condition_consts, carry) -> bool``, flat.
      body: ``(body_consts, carry) -> carry``, flat, for one iteration.
      num_condition_consts: number of inputs that only the condition reads.
      num_body_consts: number of inputs that are the same in every iteration of the body.
    """

    condition: ClosedJaxpr
    body: ClosedJaxpr
    num_condition_consts: int
    num_body_consts: int

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "While":
        """Take the equation of a while loop apart."""
        p = eqn.params
        closed = _closed(p["cond_jaxpr"]), _closed(p["body_jaxpr"])
        return cls(*closed, p["cond_nconsts"], p["body_nconsts"])

    def split(self, inputs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split one value per input of the equation: condition_consts, body_consts, carry."""
        body = self.num_condition_consts + self.num_body_consts
        return (
            list(inputs[: self.num_condition_consts]),
            list(inputs[self.num_condition_consts : body]),
            list(inputs[body:]),
        )

    def evaluate(
        self,
        condition: Callable[[Sequence[Any]], Any],
        body: Callable[[Sequence[Any]], Sequence[Any]],
        carry: Sequence[Any],
    ) -> list[Any]:
        """Run the loop with functions in the place of its own.

        `jax.vmap` makes a condition with axes, the first ones of the carry. Each position stops by
        itself.
        """
        axes = self.condition.out_avals[0].ndim

        def goes_on(carry: list[Any]) -> Any:
            return condition(carry).any() if axes else condition(carry)

        def step(carry: list[Any]) -> list[Any]:
            after = body(carry)
            if not axes:
                return list(after)
            going = condition(carry)
            return [
                jnp.where(jax.lax.expand_dims(going, range(axes, a.ndim)), b, a)
                for a, b in zip(carry, after, strict=True)
            ]

        results: list[Any] = jax.lax.while_loop(goes_on, step, list(carry))
        return results


class ShardMap(NamedTuple):
    """The parts of a `jax.shard_map` equation.

    Attributes:
      body: the function that each device runs, flat.
      inputs: by how many devices each axis of each input is split.
      outputs: the same for each output.
      options: arguments of `jax.shard_map` that make it.
    """

    body: ClosedJaxpr
    inputs: list[list[int]]
    outputs: list[list[int]]
    options: dict[str, Any]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "ShardMap":
        """Take the equation of a `jax.shard_map` apart."""
        p = eqn.params
        sizes = p["mesh"].shape

        def devices(part: Any) -> int:
            names = part if isinstance(part, tuple) else () if part is None else (part,)
            return math.prod(sizes[name] for name in names)

        def splits(specs: Sequence[Any], variables: Sequence[Any]) -> list[list[int]]:
            return [
                [*map(devices, spec), *[1] * (aval(v).ndim - len(spec))]
                for spec, v in zip(specs, variables, strict=True)
            ]

        inputs, outputs = splits(p["in_specs"], eqn.invars), splits(p["out_specs"], eqn.outvars)
        options = {name: p[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
        options["axis_names"] = p["newly_manual_axes"]
        return cls(_closed(p["jaxpr"]), inputs, outputs, options)

    @classmethod
    def read(cls, eqn: JaxprEqn) -> "ShardMap | None":
        """Take an equation apart if it is a `jax.shard_map`, else return None."""
        return cls.of(eqn) if eqn.primitive.name == "shard_map" else None


def inner_jaxprs(value: Any) -> Iterator[Jaxpr]:
    """Yield the jaxprs in an equation's parameters, but not the jaxprs inside those."""
    if isinstance(value, JaxprEqn):
        yield from inner_jaxprs(tuple(value.params.values()))
    elif isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif type(value) is tuple:
        for item in value:
            yield from inner_jaxprs(item)


def primitive_names(eqn: JaxprEqn) -> set[str]:
    """Return the names of an equation's primitive and of those in its inner jaxprs."""
    inner = (e for jaxpr in inner_jaxprs(eqn) for e in jaxpr.eqns)
    return {eqn.primitive.name}.union(*map(primitive_names, inner))


def find_equations(
    jaxpr: Jaxpr | ClosedJaxpr, name: str | tuple[str, ...] = ""
) -> Iterator[JaxprEqn]:
    """Yield all equations whose primitive's name starts with ``name``, inner jaxprs included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(name):
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from find_equations(inner, name)


def has_forward_derivative(closed: ClosedJaxpr) -> bool:
    """Whether `jax.jvp` can differentiate a program: it has no `jax.custom_vjp`."""
    return not any(find_equations(closed, "custom_vjp_call"))


def rewrite(
    closed: ClosedJaxpr,
    replace: Callable[[JaxprEqn], JaxprEqn],
    enter: Callable[[JaxprEqn], bool] = lambda eqn: True,
) -> ClosedJaxpr:
    """Replace equations one for one, inner jaxprs included. Derivative rules are not rewritten.

    Args:
      closed: a traced function.
      replace: returns the equation that takes the given one's place: itself, or another
        with the same inputs and outputs.
      enter: whether to rewrite the jaxprs inside an equation.
    """

    def rewritten(value: Any) -> Any:
        if isinstance(value, JaxprEqn):
            params = dict(value.params)
            if enter(value):
                params = {name: rewritten(param) for name, param in params.items()}
            unchanged = all(params[name] is param for name, param in value.params.items())
            return replace(value if unchanged else value.replace(params=params))
        if isinstance(value, Jaxpr):
            eqns = [rewritten(eqn) for eqn in value.eqns]
            unchanged = all(a is b for a, b in zip(eqns, value.eqns, strict=True))
            return value if unchanged else value.replace(eqns=eqns)
        if isinstance(value, ClosedJaxpr):
            jaxpr = rewritten(value.jaxpr)
            return value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
        if type(value) is tuple:
            items = tuple(map(rewritten, value))
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        return value

    return ClosedJaxpr(rewritten(closed.jaxpr), closed.consts)


def call_in_place(eqn: JaxprEqn, f: Callable[..., Any]) -> JaxprEqn:
    """The equation that calls a jitted function of the inputs of another one, for `rewrite`."""
    with jax.disable_jit(False):
        [call] = jax.make_jaxpr(jax.jit(f))(*map(aval, eqn.invars)).eqns
    made: JaxprEqn = eqn.replace(primitive=call.primitive, params=call.params)
    return made


def transformed(
    f: Callable[..., T], change: Callable[[ClosedJaxpr, Any], ClosedJaxpr]
) -> Callable[..., T]:
    """Make a function that is jitted evaluate a changed program of its own.

    ``change`` gets the program and the shapes of its results, as a pytree.
    """

    def call(*args: Any) -> T:
        leaves, structure = jax.tree.flatten(args)
        closed, shapes = jax.make_jaxpr(
            lambda *leaves: f(*jax.tree.unflatten(structure, leaves)), return_shape=True
        )(*leaves)
        results = jaxpr_as_fun(change(closed, shapes))(*leaves)
        made: T = jax.tree.unflatten(jax.tree.structure(shapes), results)
        return made

    return call


def inline(closed: ClosedJaxpr, *, custom_derivatives: bool = False) -> ClosedJaxpr:
    """Replace `jax.jit` calls by the equations inside them, under the call's named scopes.

    Args:
      closed: a traced function.
      custom_derivatives: whether to inline also functions with a `jax.custom_jvp` or
        `jax.custom_vjp`, which then lose their derivative rules.
    """

    def handle(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        inner = called_jaxpr(eqn) or (custom_function(eqn) if custom_derivatives else None)
        if inner is None or is_checkpoint(eqn):
            return evaluate(eqn, inputs)
        with in_scopes(eqn):
            return interpret(inner, inputs, handle)

    inlined: ClosedJaxpr = jax.make_jaxpr(lambda *args: interpret(closed, args, handle))(
        *closed.in_avals
    )
    return inlined


# Parts of a jaxpr.


def part_of_jaxpr(
    eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Atom]
) -> Jaxpr:
    """Return some equations as a jaxpr, for example those that `dependencies` finds."""
    part: Jaxpr = _empty_jaxpr().replace(
        eqns=list(eqns), invars=list(inputs), outvars=list(outputs)
    )
    return part


def dependencies(
    jaxpr: Jaxpr, outputs: Iterable[Atom], known: Collection[Var] = ()
) -> tuple[list[Var], list[JaxprEqn]]:
    """Find the variables and the equations that some variables are computed from.

    Literals need nothing, and dependencies of ``known`` variables do not matter.

    Returns:
      ``(inputs, eqns)``: the known variables, arguments and constants that are needed, and the
      equations in between, in order.
    """
    needed = {v: None for v in outputs if not isinstance(v, Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        computed = [v for v in eqn.outvars if v in needed and v not in known]
        if computed:
            for v in computed:
                del needed[v]
            needed |= {v: None for v in eqn.invars if not isinstance(v, Literal)}
            eqns.append(eqn)
    return list(needed), eqns[::-1]


def evaluate_from(jaxpr: Jaxpr, outputs: Sequence[Atom], values: Mapping[Var, Any]) -> list[Any]:
    """Evaluate some variables of a jaxpr from the values of others.

    Args:
      jaxpr: a jaxpr.
      outputs: variables to evaluate.
      values: arrays for all that ``dependencies(jaxpr, outputs, values)`` names.
    """
    env = dict(values)

    def read(atoms: Sequence[Atom]) -> list[Any]:
        return [a.val if isinstance(a, Literal) else env[a] for a in atoms]

    for eqn in dependencies(jaxpr, outputs, values)[1]:
        # A known value is not overwritten by an equation with several outputs.
        env = dict(zip(eqn.outvars, evaluate(eqn, read(eqn.invars)), strict=True)) | env
    return read(outputs)


# One equation: its arrays, named scopes and source line.


def aval(atom: Any) -> Any:
    """Return the abstract value (shape and dtype) of an equation's input or output."""
    return atom.aval


def is_floating(v: Any) -> bool:
    """Whether a variable can be differentiated."""
    return hasattr(aval(v), "dtype") and jnp.issubdtype(aval(v).dtype, jnp.inexact)


def is_reference(atom: Any) -> bool:
    """Whether an input or output of an equation is a mutable array (`jax.new_ref`)."""
    return hasattr(atom.aval, "inner_aval")


def nbytes(atom: Any) -> int:
    """Return the bytes of an equation's input or output; 0 for keys and tokens."""
    array = atom.aval
    if not hasattr(array, "shape") or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return 0
    size: int = math.prod(array.shape) * array.dtype.itemsize
    return size


def scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the named scopes of an equation without transformations: "conv" for "jvp(conv)"."""
    name, replaced = str(eqn.source_info.name_stack), 1
    while replaced:
        name, replaced = _TRANSFORMED.subn(r"\1", name)
    return tuple(part for part in name.split("/") if part)


@contextlib.contextmanager
def in_scopes(eqn: JaxprEqn) -> Iterator[None]:
    """Trace under the named scopes of an equation. For handlers that do not `evaluate` it."""
    name = str(eqn.source_info.name_stack)
    with jax.named_scope(name) if name else contextlib.nullcontext():
        yield


def source_line(eqn: JaxprEqn) -> str:
    """Return ``file:line (function)`` of the innermost frame of the user's code, "" if unknown.

    That is a line of a model, where its layers are from an installed library.
    """
    frames = source_info_util.summarize(eqn.source_info, _FRAMES).split("\n")[::-1]
    line = next((frame for frame in frames if not frame.startswith(_INSTALLED)), frames[0])
    return "" if line == "unknown" else re.sub(r":(\d+):\d+ \(", r":\1 (", line)


def place(eqn: JaxprEqn) -> str:
    """Name an equation in a message: ``dot_general at model.py:3 (loss)``."""
    return located(eqn.primitive.name, source_line(eqn))


def located(operation: str, line: str) -> str:
    """Name an operation in a message, with its source line if it is known."""
    return f"{operation} at {line}" if line else operation


_FRAMES = 1000
_INSTALLED = (
    *map(sysconfig.get_path, ("purelib", "platlib", "scripts")),
    __file__.rpartition("jaxpr")[0],  # fnet itself, which may be installed from a clone
)


def argument_names(f: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """Return the names of the positional arguments in the signature of ``f``."""
    try:
        bound = inspect.signature(f).bind_partial(*args)
    except (TypeError, ValueError):  # builtins have no signature
        return [f"args[{i}]" for i in range(len(args))]
    names: list[str] = []
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(value))]
        else:
            names.append(name)
    return names


def _closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, [])


def with_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr, tuple[int, ...]], Jaxpr]) -> JaxprEqn:
    """Replace the jaxprs inside of a call, loop or branch.

    Args:
      eqn: Any equation; one without inner jaxprs that run as written is returned unchanged.
      change: ``(jaxpr, index) -> jaxpr``. The index is () for the body of a call or scan, (0,) and
        (1,) for body and condition of a while loop, and the index of a branch, as in
        `fnet.jaxpr.Site`.
    """

    def changed(inner: Any, index: tuple[int, ...]) -> Any:
        if isinstance(inner, ClosedJaxpr):
            return inner.replace(jaxpr=change(inner.jaxpr, index))
        return change(inner, index)

    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "while":
        params["body_jaxpr"] = changed(params["body_jaxpr"], (0,))
        params["cond_jaxpr"] = changed(params["cond_jaxpr"], (1,))
    elif name == "cond":
        branches = enumerate(params["branches"])
        params["branches"] = tuple(changed(branch, (i,)) for i, branch in branches)
    elif name == "scan" or called_jaxpr(eqn, custom_derivatives=True) is not None:
        key = "jaxpr" if "jaxpr" in params else "call_jaxpr"
        params[key] = changed(params[key], ())
    new: JaxprEqn = eqn.replace(params=params)
    return new


def splice(
    jaxpr: Jaxpr,
    replace: Callable[[JaxprEqn, tuple[int, ...]], Sequence[JaxprEqn]],
    path: tuple[int, ...] = (),
) -> Jaxpr:
    """Replace each equation by several, inner jaxprs included.

    Args:
      jaxpr: A jaxpr.
      replace: ``(eqn, path) -> eqns``, called after the jaxprs inside of the equation were
        rewritten. For paths, see `fnet.jaxpr.Site`.
      path: Path of the jaxpr.
    """
    eqns: list[JaxprEqn] = []
    for index, eqn in enumerate(jaxpr.eqns):
        here = (*path, index)

        def change(inner: Jaxpr, index: tuple[int, ...], here: tuple[int, ...] = here) -> Jaxpr:
            return splice(inner, replace, (*here, *index))

        eqns += replace(with_bodies(eqn, change), here)
    spliced: Jaxpr = jaxpr.replace(eqns=eqns)
    return spliced
