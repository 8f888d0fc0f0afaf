"""The equation that made an array, found through jit, checkpoint, scan and the like."""

import inspect
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from fnet import jaxprs
from fnet.memory.peak import leaf_bytes


class Residual(NamedTuple):
    """An array that the forward pass leaves for the backward pass.

    Attributes:
      layer: the named scopes it was made under, ``"layer1/0/conv"``; empty where
        there were none, and for an argument or a constant.
      shape: of a residual of a scan, with the scan's axis in front.
      dtype: of its elements.
      bytes: its size.
      operation: the JAX primitive that made it, ``"dot_general"``.
      source: the line that made it, ``"model.py:12 (block)"``; empty where JAX
        does not know it.
      alias_of: why it takes no memory of its own on the device:
        ``"argument params['w']"``, ``"output [1]"``, ``"constant"``, ``"host memory"``;
        empty where it takes ``bytes``.
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
        """Bytes it takes beyond what exists anyway."""
        return 0 if self.alias_of else self.bytes


class Traced(NamedTuple):
    """The forward pass as a jaxpr, and which of its results are what."""

    jaxpr: Jaxpr
    inputs: dict[Var, str]
    outputs: list[tuple[Any, str]]
    residuals: list[Any]


class _Level(NamedTuple):
    """A jaxpr, and the equation of the level above that runs it.

    Attributes:
      producers: of each variable, the number of its equation and its place among the outputs.
      position: numbers of the equations that lead here.
      scopes: names of theirs.
      source: what all equations here count as made by, where this is code of JAX's own.
    """

    jaxpr: Jaxpr
    producers: dict[Var, tuple[int, int]]
    above: "_Level | None"
    eqn: JaxprEqn | None
    position: tuple[int, ...]
    scopes: tuple[str, ...]
    source: str | None


# Equations whose output is their input: in this place, with the same elements in order.
_RENAMING = {
    *("name", "reduce_precision", "optimization_barrier", "copy"),
    *("reshape", "squeeze", "expand_dims", "broadcast_in_dim"),
    *("pvary", "pcast", "sharding_constraint", "stop_gradient"),
}
_LOOPS = ("scan", "while")
# Equations that make an array from nothing but a number.
_FILLING = {"broadcast_in_dim", "convert_element_type", "iota", "empty", "empty2"}


class Origins:
    """Finds the equation that made an array, through jit, checkpoint, scan and the like."""

    def __init__(self, traced: Traced) -> None:
        self._levels: dict[tuple[int, ...], _Level] = {}
        self._top = self._level(traced.jaxpr, None, 0, 0)
        self._inputs = traced.inputs
        self._outputs = {self.identity(atom): name for atom, name in traced.outputs}

    def identity(self, atom: Any) -> Hashable:
        """Equal for two variables that hold the same array."""
        level, atom = self._original(self._top, atom)
        return str(atom) if isinstance(atom, Literal) else (level.position, atom)

    def find(self, atom: Any) -> tuple[tuple[int, ...], Residual] | None:
        """What is known of an array, behind its place in the forward pass.

        None for a number, repeated or not.
        """
        level, origin = self._original(self._top, atom)
        if self._is_fill(level, origin):
            return None
        residual = Residual(
            layer="",
            shape=tuple(atom.aval.shape),
            dtype=atom.aval.dtype,
            bytes=leaf_bytes(atom.aval),
            operation="",
            source="",
            alias_of=self._outputs.get(self.identity(atom), ""),
        )
        if origin not in level.producers:
            # Constants of inner functions, too, are inputs of theirs.
            name = self._inputs.get(origin, "constant")
            place = list(self._inputs).index(origin) if origin in self._inputs else 0
            return (-1 if name == "constant" else -2, place), residual._replace(alias_of=name)
        level, origin = self._innermost(level, origin)
        number, _ = level.producers[origin]
        eqn = level.jaxpr.eqns[number]
        space = getattr(getattr(atom.aval, "memory_space", None), "name", "")
        return (*level.position, number), residual._replace(
            layer="/".join(_scopes(level, eqn)),
            operation=eqn.primitive.name,
            source=jaxprs.source(eqn) if level.source is None else level.source,
            alias_of=residual.alias_of or ("host memory" if space == "Host" else ""),
        )

    def _original(self, level: _Level, atom: Any) -> tuple[_Level, Any]:
        """The same array where it first appears: past renamings, in and out of jaxprs."""
        while not isinstance(atom, Literal):
            step = self._renamed(level, atom)
            if step is None:
                break
            level, atom = step
        return level, atom

    def _renamed(self, level: _Level, var: Var) -> tuple[_Level, Any] | None:
        if var not in level.producers:
            return self._given(level, var)
        number, place = level.producers[var]
        eqn = level.jaxpr.eqns[number]
        if eqn.primitive.name in _RENAMING:
            source = eqn.invars[min(place, len(eqn.invars) - 1)]
            return (level, source) if _is_renaming(eqn, source, var) else None
        if eqn.primitive.name in _LOOPS:
            return self._passed_through(level, number, place)
        inner = self._inside(level, number)
        return inner and (inner, inner.jaxpr.outvars[place])

    def _given(self, level: _Level, var: Var) -> tuple[_Level, Any] | None:
        """An input of an inner jaxpr as the outer one knows it."""
        if level.above is None or level.eqn is None or var not in level.jaxpr.invars:
            return None
        given = level.eqn.invars[level.eqn.primitive.name == "cond" :]  # without its index
        if level.eqn.primitive.name in _LOOPS or len(given) != len(level.jaxpr.invars):
            return None
        outer = given[level.jaxpr.invars.index(var)]
        return (level.above, outer) if _shape(outer) == _shape(var) else None

    def _passed_through(self, level: _Level, number: int, place: int) -> tuple[_Level, Any] | None:
        """What a scan hands out as it came in: a carry never changed, or its own stacked input."""
        eqn = level.jaxpr.eqns[number]
        if eqn.primitive.name != "scan":
            return None
        (inner,) = self._levels_inside(level, number)
        end, atom = self._original(inner, inner.jaxpr.outvars[place])
        if isinstance(atom, Literal) or end is not inner or atom not in inner.jaxpr.invars:
            return None
        came = inner.jaxpr.invars.index(atom)
        scan = jaxprs.scan(eqn)
        if place < scan.carry:
            return (level, eqn.invars[came]) if came == scan.constants + place else None
        return (level, eqn.invars[came]) if came >= scan.constants + scan.carry else None

    def _innermost(self, level: _Level, var: Var) -> tuple[_Level, Var]:
        """The equation that computes it, where `_original` is one that runs a jaxpr."""
        seen: set[tuple[tuple[int, ...], Var]] = set()
        best = level, var
        while not isinstance(var, Literal) and var in level.producers:
            if (level.position, var) in seen:
                break
            seen.add((level.position, var))
            best = level, var
            number, place = level.producers[var]
            eqn = level.jaxpr.eqns[number]
            if eqn.primitive.name == "device_put":  # to host memory
                level, var = self._original(level, eqn.invars[place])
                continue
            for inner in self._levels_inside(level, number):
                if len(inner.jaxpr.outvars) != len(eqn.outvars):
                    continue
                at, atom = self._original(inner, inner.jaxpr.outvars[place])
                if not self._is_fill(at, atom):
                    level, var = self._carried(at, atom)
                    break
        return best

    def _carried(self, level: _Level, var: Var) -> tuple[_Level, Any]:
        """A carry that enters an iteration was made by the one before it."""
        if level.eqn is None or level.eqn.primitive.name != "scan" or var in level.producers:
            return level, var
        scan = jaxprs.scan(level.eqn)
        carry = level.jaxpr.invars.index(var) - scan.constants
        if not 0 <= carry < scan.carry:
            return level, var
        return self._original(level, level.jaxpr.outvars[carry])

    def _is_fill(self, level: _Level, atom: Any) -> bool:
        """Whether it is one number everywhere, or a count: compilers write it where it is read."""
        level, atom = self._original(level, atom)
        if isinstance(atom, Literal):
            return True
        if atom not in level.producers:
            return False
        eqn = level.jaxpr.eqns[level.producers[atom][0]]
        if atom.aval.size > 1 and eqn.primitive.name not in _FILLING:
            return False
        # A scalar that a loop or a jitted function makes from numbers is not looked into.
        return not list(_jaxprs(eqn)) and all(self._is_fill(level, a) for a in eqn.invars)

    def _inside(self, level: _Level, number: int) -> _Level | None:
        """The one jaxpr that an equation runs, if its inputs and outputs are the equation's."""
        levels, eqn = self._levels_inside(level, number), level.jaxpr.eqns[number]
        if len(levels) != 1 or len(levels[0].jaxpr.outvars) != len(eqn.outvars):
            return None
        pairs = zip(levels[0].jaxpr.outvars, eqn.outvars, strict=True)
        return levels[0] if all(_shape(a) == _shape(b) for a, b in pairs) else None

    def _levels_inside(self, level: _Level, number: int) -> list[_Level]:
        inner = _jaxprs(level.jaxpr.eqns[number])
        return [self._level(jaxpr, level, number, i) for i, jaxpr in enumerate(inner)]

    def _level(self, jaxpr: Jaxpr, above: _Level | None, number: int, branch: int) -> _Level:
        position = () if above is None else (*above.position, number, branch)
        if position in self._levels:
            return self._levels[position]
        producers = {
            var: (number, place)
            for number, eqn in enumerate(jaxpr.eqns)
            for place, var in enumerate(eqn.outvars)
        }
        level = _Level(jaxpr, producers, above, None, position, (), None)
        if above is not None:
            eqn, source = above.jaxpr.eqns[number], above.source
            if source is None and _is_of_jax(jaxpr):
                # Traced once for all its callers, so that its lines are the first one's.
                source = jaxprs.source(eqn)
            level = level._replace(eqn=eqn, scopes=_scopes(above, eqn), source=source)
        self._levels[position] = level
        return level


def _scopes(level: _Level, eqn: JaxprEqn) -> tuple[str, ...]:
    """From the outside in. Within a `jax.custom_jvp` JAX 0.12 tells those around it once more."""
    inner = jaxprs.scopes(eqn)
    outer: tuple[str, ...] = ()
    if level.eqn is not None and level.eqn.primitive.name == "custom_jvp_call":
        outer = jaxprs.scopes(level.eqn)
    return level.scopes + (inner[len(outer) :] if inner[: len(outer)] == outer else inner)


def _jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an equation runs: one, or the branches of a cond."""
    for name, value in eqn.params.items():
        if name in ("cond_jaxpr", "update_jaxpr"):  # of a while and a scatter: make no output
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def _shape(atom: Any) -> Any:
    """None of what is no array."""
    return getattr(atom.aval, "shape", None)


def _is_renaming(eqn: JaxprEqn, source: Any, var: Any) -> bool:
    if eqn.primitive.name == "reduce_precision":  # of all bits, as jax.checkpoint puts it
        return bool(eqn.params["mantissa_bits"] == jnp.finfo(var.aval.dtype).nmant)
    return bool(source.aval.size == var.aval.size and source.aval.dtype == var.aval.dtype)


_JAX = inspect.getfile(jax).removesuffix("__init__.py")


def _is_of_jax(jaxpr: Jaxpr) -> bool:
    return _JAX in (getattr(jaxpr.debug_info, "func_src_info", None) or "")
