"""What the backward pass keeps, by layer: read from the traced function, before anything runs."""

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path

from fnet import jaxprs
from fnet.memory.sizes import leaf_bytes


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


class LayerResiduals(NamedTuple):
    """What the backward pass keeps of one layer, beyond what exists anyway.

    Attributes:
      layer: its name, or the line of the source where nothing was named.
      bytes: of the arrays together.
      arrays: how many.
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
    """What ``jax.vjp`` of a function keeps between the forward and the backward pass.

    The function is traced, never run; arrays may be given as their shapes. Any
    JAX function will do. An array that is kept twice, or kept and only
    renamed (a reshape, ``checkpoint_name``), is listed once. Not listed is what the
    backward pass never reads, and an array of one number, which a compiler writes
    where it is read. Of a scan, an array is the stack of those of all iterations.

    The sum of ``added`` is what automatic differentiation hands to the compiler. The
    compiled program may hold less, since a compiler recomputes what is cheap and
    frees what was read, or more, since it may put off reading: 16 blocks of
    convolution, batch norm and leaky ReLU keep 68 activations here and hold 66
    compiled for a CPU, 50 scheduled for memory and 33 for an H100. What a program
    will hold is told by `fnet.memory.peak`; what follows from which line, here.

    Args:
      f: any function. With ``has_aux`` it returns ``(value, aux)``, of which only
        the value is differentiated, as in ``jax.grad``.
      *args: of ``f``: arrays, or shapes (`jax.ShapeDtypeStruct`) in any tree. All
        leaves that are neither are handed to ``f`` as they are.
      argnums: which arguments are differentiated, as in ``jax.grad``: by default the
        first, the ``params`` of a loss. Leaves of theirs that are not floating (counters,
        keys) are not. What only the gradient of the others needs is not listed.
      has_aux: whether ``f`` returns a pair.
      **kwargs: of ``f``; not differentiated.

    Returns:
      Residuals in the order of the forward pass: arguments, constants, then
      arrays as they are made.

    Raises:
      TypeError: if an output to differentiate is not floating, naming it, or no leaf
        of the arguments to differentiate is.
      ValueError: if ``f`` returns no array, or an ``argnums`` is not an argument's position.
    """
    traced = _trace(f, args, kwargs, argnums, has_aux)
    origins = Origins(traced)
    found: dict[Hashable, tuple[tuple[int, ...], Residual]] = {}
    for atom in traced.residuals:
        identity = origins.identity(atom)
        if identity not in found and (entry := origins.find(atom)):
            found[identity] = entry
    return [residual for _, residual in sorted(found.values(), key=lambda entry: entry[0])]


def by_layer(residuals: Sequence[Residual], depth: int | None = None) -> list[LayerResiduals]:
    """What is kept beyond what exists anyway, summed over each layer, in forward order.

    Args:
      residuals: from `residuals`.
      depth: how many parts of a layer's name count: 1 puts ``layer1/0/conv`` and
        ``layer1/1/abn`` together as ``layer1``. None: all.

    Returns:
      A row a layer: its name, its bytes, its arrays.

    Raises:
      ValueError: if ``depth`` is less than 1.
    """
    if depth is not None and depth < 1:
        raise ValueError(f"by_layer: depth must be at least 1, or None for all, got {depth}")
    rows: dict[str, LayerResiduals] = {}
    for r in residuals:
        if r.alias_of:
            continue
        line = r.source.rpartition("/")[2]  # no folder of this machine
        layer = "/".join(r.layer.split("/")[:depth]) or line or r.operation
        _, size, arrays = rows.get(layer, (layer, 0, 0))
        rows[layer] = LayerResiduals(layer, size + r.bytes, arrays + 1)
    return list(rows.values())


def _trace(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> Traced:
    """Traces ``jax.vjp(f, ...)``, a pytree whose leaves are what is kept."""
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(not -len(args) <= n < len(args) for n in positions):
        raise ValueError(
            f"residuals: argnums={argnums}, but f has {len(args)} positional arguments"
        )
    positions = tuple(n % len(args) for n in positions)
    names = jaxprs.argument_names(f, args)
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
            "choose another argument with argnums"
        )
    arrays = [i for i, leaf in enumerate(leaves) if i in chosen or _is_array(leaf)]

    def forward(*values: Any) -> tuple[Any, ...]:
        known = dict(zip(arrays, values, strict=True))

        def of_chosen(*differentiated: Any) -> Any:
            here = known | dict(zip(chosen, differentiated, strict=True))
            a, k = jax.tree.unflatten(tree, [here.get(i, leaf) for i, leaf in enumerate(leaves)])
            out = f(*a, **k)
            _check_differentiable(out[0] if has_aux else out, has_aux)
            return out

        differentiate: Any = jax.vjp
        found: tuple[Any, ...] = differentiate(
            of_chosen, *(known[i] for i in chosen), has_aux=has_aux
        )
        return found

    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*(leaves[i] for i in arrays))
    out, vjp = shapes[:2]
    # What the forward pass hands over, a custom rule may never read.
    backward = jax.make_jaxpr(lambda vjp, cotangent: vjp(cotangent))(vjp, out).jaxpr
    _, read = dce_jaxpr(backward, [True] * len(backward.outvars))
    first, count = len(jax.tree.leaves(out)), len(jax.tree.leaves(vjp))
    atoms = closed.jaxpr.outvars
    kept = [atom for atom, is_read in zip(atoms[first:], read[:count], strict=False) if is_read]

    returned = tree_leaves_with_path((out, *shapes[2:]) if has_aux else out)
    outputs = zip(atoms[:first] + atoms[first + count :], returned, strict=True)
    inputs = dict.fromkeys(closed.jaxpr.constvars, "constant")
    for var, i in zip(closed.jaxpr.invars, arrays, strict=True):
        inputs[var] = "argument " + _leaf_name(paths[i][0], names)
    return Traced(
        closed.jaxpr, inputs, [(a, f"output {keystr(p)}".strip()) for a, (p, _) in outputs], kept
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
        raise ValueError(f"residuals: f returns no array to differentiate, but {out!r}")
    for path, leaf in outputs:
        if not _is_floating(leaf):
            name = keystr(path)
            what = f"{leaf.dtype}{list(leaf.shape)}" if _is_array(leaf) else type(leaf).__name__
            fix = "" if has_aux else ", or (value, aux) with has_aux=True"
            raise TypeError(
                f"residuals: f cannot be differentiated: its output {name + ' ' if name else ''}is "
                f"{what}; return floating arrays only{fix}"
            )


def _leaf_name(path: Any, names: list[str]) -> str:
    keyword = path[0].idx == 1
    name: str = (path[1].key if keyword else names[path[1].idx]) + keystr(path[2:])
    return name
