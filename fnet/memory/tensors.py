"""The arrays of a loss: what the backward pass needs, and what rematerializing it takes.

`analyze` divides a traced loss into segments and linearizes each one. The result is a graph of
tensors and operations. `fnet.memory.proposals` chooses from it what to save.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from fnet.jaxpr import (
    CHECKPOINT,
    ELEMENTWISE,
    Scan,
    aval,
    evaluate,
    inline,
    interpret,
    nbytes,
)
from fnet.memory.cost import Cost, equation_cost

# A scan that makes more than this share of all bytes is planned iteration by iteration.
_LARGE_LOOP = 0.2
# Largest number of segments. Planning time grows with it, because each is linearized.
_MOST_SEGMENTS = 160
_PREFIX = "fnet_tensor:"

Name = tuple[int, int]
"""Equation and output of an array in an inlined jaxpr. ``(CARRY, i)`` is a carry of a loop."""

CARRY = -1

# Equations whose result is their input in another shape, which XLA does not copy.
_RENAMING = frozenset(
    "reshape squeeze expand_dims reduce_precision optimization_barrier copy pvary pcast "  # noqa: SIM905
    "sharding_constraint stop_gradient".split()
)

# Cheap elementwise equations, which XLA fuses with what reads their result.
_FUSED = {*ELEMENTWISE, "broadcast_in_dim", "iota"} - {
    *("cbrt", "cos", "digamma", "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma"),
    *("log", "log1p", "logistic", "pow", "rem", "rsqrt", "sin", "sqrt", "tan", "tanh"),
}
_FUSED_DEPTH = 6


@dataclasses.dataclass(eq=False)
class Tensor:
    """An array of the linearized forward pass.

    Attributes:
      segment: Segment that makes it.
      bytes: Bytes while it is alive in one iteration.
      saved_bytes: Bytes of saving it: of all iterations, for an array in a loop.
      name: How a policy saves it, or None if it cannot be saved.
      operation: Operation that makes it. None for the carry of a loop.
      copy_of: The same array before it was named. Autodiff reads either one, and a policy saves
        the named one.
    """

    segment: int
    bytes: int
    saved_bytes: int
    name: Name | None = None
    operation: "Operation | None" = None
    copy_of: "Tensor | None" = None


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation of the linearized forward pass.

    Attributes:
      segment: Segment it belongs to.
      cost: FLOPs and bytes of running it again, in all iterations.
      written: Bytes that it reads and writes after XLA fuses elementwise operations.
      inputs: Arrays that it reads, without arguments and constants.
      is_fused: Whether XLA can compute it where its result is read, without storing the result.
      is_heavy: Whether XLA stores its inputs: a matrix product, a convolution, a call.
    """

    segment: int
    cost: Cost
    inputs: tuple[Tensor, ...]
    is_fused: bool = False
    is_heavy: bool = False
    written: int = 0


class Segment(NamedTuple):
    """Adjacent equations of a loss.

    Attributes:
      start: First equation.
      end: Equation after the last.
      is_loop: Whether it is a single scan, planned by iteration.
      needs: Arrays that its backward pass reads.
      passing: Bytes that are made before the segment and read in it or later.
    """

    start: int
    end: int
    is_loop: bool
    needs: tuple[Tensor, ...]
    passing: int


class Graph(NamedTuple):
    """The segments of a loss, and the arrays of its linearized forward pass.

    Attributes:
      segments: In forward order.
      tensors: All arrays, without arguments and constants.
      fused: Needed arrays that take no memory, because XLA computes them from other needed ones.
      equations: Names of the primitives, to recognize the program.
    """

    segments: tuple[Segment, ...]
    tensors: tuple[Tensor, ...]
    fused: frozenset[Tensor]
    equations: tuple[str, ...]


def equation_names(jaxpr: Jaxpr) -> tuple[str, ...]:
    """Return the names of the primitives of a jaxpr, which identify it at other shapes."""
    return tuple(e.primitive.name for e in jaxpr.eqns)


def analyze(
    closed: ClosedJaxpr, differentiated: Sequence[bool], objective: Sequence[bool]
) -> Graph:
    """Divide a loss into segments, and find what the backward pass of each one needs.

    Args:
      closed: The inlined loss.
      differentiated: Whether the loss is differentiated with respect to each argument.
      objective: Whether each result is differentiated.

    Returns:
      The graph of arrays and operations.
    """
    jaxpr = closed.jaxpr
    active = _active(jaxpr, differentiated)
    useful = _useful(jaxpr, objective) & active
    large = large_loops(jaxpr)
    places = places_between(jaxpr, large)
    passing = passing_bytes(jaxpr)
    builder = _Builder([], {})
    segments = []
    for number, (start, end) in enumerate(itertools.pairwise(places)):
        is_loop = start in large
        if is_loop:
            needs = builder.add_loop(number, jaxpr.eqns[start], start, active, useful)
        else:
            needs = builder.add_segment(
                number, segment_of(jaxpr, start, end), start, active, useful
            )
        segments.append(Segment(start, end, is_loop, tuple(needs), passing[start]))
    fused = _fuse(segments, builder.tensors)
    return Graph(tuple(segments), tuple(builder.tensors), fused, equation_names(jaxpr))


def is_floating(v: Any) -> bool:
    """Whether a variable can be differentiated."""
    return hasattr(aval(v), "dtype") and jnp.issubdtype(aval(v).dtype, jnp.inexact)


def variables(atoms: Iterable[Any]) -> Iterator[Var]:
    """Yield the inputs of an equation that are variables."""
    return (a for a in atoms if not isinstance(a, Literal))


def _active(jaxpr: Jaxpr, differentiated: Sequence[bool]) -> set[Var]:
    """Variables that depend on the differentiated arguments."""
    active = {v for v, d in zip(jaxpr.invars, differentiated, strict=True) if d and is_floating(v)}
    for e in jaxpr.eqns:
        if e.primitive.name != "stop_gradient" and any(v in active for v in variables(e.invars)):
            active |= {v for v in e.outvars if is_floating(v)}
    return active


def _useful(jaxpr: Jaxpr, objective: Sequence[bool]) -> set[Var]:
    """Variables that the objective depends on."""
    useful = {
        v for v, o in zip(jaxpr.outvars, objective, strict=True) if o and not isinstance(v, Literal)
    }
    for e in reversed(jaxpr.eqns):
        if any(v in useful for v in e.outvars):
            useful |= set(variables(e.invars))
    return useful


# Segments.


def segment_of(jaxpr: Jaxpr, start: int, end: int) -> Jaxpr:
    """Equations [start, end) as a jaxpr, from the variables they read to those read later."""
    eqns = jaxpr.eqns[start:end]
    made = dict.fromkeys(v for e in eqns for v in e.outvars)
    inputs = dict.fromkeys(v for e in eqns for v in variables(e.invars) if v not in made)
    read_later = {v for e in jaxpr.eqns[end:] for v in variables(e.invars)}
    read_later |= set(variables(jaxpr.outvars))
    segment: Jaxpr = jaxpr.replace(
        eqns=eqns,
        constvars=[],
        invars=list(inputs),
        outvars=[v for v in made if v in read_later],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return segment


def made_bytes(jaxpr: Jaxpr) -> list[int]:
    """Bytes of the results of each equation, and for a loop of all iterations."""
    return [
        e.params["length"] * sum(made_bytes(Scan.of(e).body.jaxpr))
        if e.primitive.name == "scan"
        else sum(map(nbytes, e.outvars))
        for e in jaxpr.eqns
    ]


def large_loops(jaxpr: Jaxpr) -> set[int]:
    """Positions of the loops to plan iteration by iteration."""
    made = made_bytes(jaxpr)
    return {
        i
        for i, e in enumerate(jaxpr.eqns)
        if e.primitive.name == "scan"
        and made[i] > _LARGE_LOOP * sum(made)
        # A loop whose iterations are under a jax.checkpoint already does not change.
        and any(inner.primitive.name not in CHECKPOINT for inner in Scan.of(e).body.jaxpr.eqns)
    }


def passing_bytes(jaxpr: Jaxpr) -> list[int]:
    """Bytes that are made before each position and read after it, without arguments."""
    changes = [0] * (len(jaxpr.eqns) + 2)
    made = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in variables(e.invars) if v in made}
    for v, read in last.items():
        changes[made[v] + 1] += nbytes(v)
        changes[read + 1] -= nbytes(v)
    return list(itertools.accumulate(changes))


def places_between(jaxpr: Jaxpr, large: set[int]) -> list[int]:
    """Positions between equations where few bytes pass: the ends of the smallest segments."""
    count = len(jaxpr.eqns)
    passing = passing_bytes(jaxpr)
    forced = {0, count} | {i + side for i in large for side in (0, 1)}
    made = [0 if i in large else b for i, b in enumerate(made_bytes(jaxpr))]
    made_before = [0, *itertools.accumulate(made)]
    size = max(made_before[-1] / _MOST_SEGMENTS, 1)
    best: dict[int, int] = {}
    for i in range(1, count):
        # On a plateau, as in a chain of matrix products, every position is as good.
        if i not in forced and passing[i] <= passing[i - 1] and passing[i] <= passing[i + 1]:
            part = int(made_before[i] / size)
            if part not in best or passing[i] <= passing[best[part]]:
                best[part] = i
    return sorted(forced | set(best.values()))


# Names of arrays.


def array_names(jaxpr: Jaxpr) -> dict[Var, Name]:
    """Return the name of each variable. A reshaped array has the name of the original."""
    names: dict[Var, Name] = {}
    for i, e in enumerate(jaxpr.eqns):
        if e.primitive.name in _RENAMING and len(e.invars) == len(e.outvars):
            for v, u in zip(e.outvars, e.invars, strict=True):
                if not isinstance(u, Literal) and u in names:
                    names[v] = names[u]
        else:
            names.update((v, (i, j)) for j, v in enumerate(e.outvars) if _can_be_named(v))
    return names


def run_named(closed: ClosedJaxpr, args: Sequence[Any], name_of: Any) -> list[Any]:
    """Evaluate a jaxpr; ``name_of(equation, output)`` names results for a checkpoint policy."""
    numbers = itertools.count()

    def handle(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        i = next(numbers)
        outputs = evaluate(eqn, inputs)
        names = [name_of(i, j) for j in range(len(outputs))]
        return [
            o if n is None or not _can_be_named(v) else checkpoint_name(o, n)
            for o, n, v in zip(outputs, names, eqn.outvars, strict=True)
        ]

    return interpret(closed, args, handle)


def _can_be_named(v: Any) -> bool:
    dtype = getattr(aval(v), "dtype", None)
    return dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended)


def as_text(name: Name) -> str:
    """Return the name of an array for `jax.ad_checkpoint.checkpoint_name`."""
    return f"{_PREFIX}{name[0]}:{name[1]}"


def _from_text(text: str) -> Name | None:
    if not text.startswith(_PREFIX):
        return None
    i, j = text.removeprefix(_PREFIX).split(":")
    return int(i), int(j)


# The graph.


@dataclasses.dataclass
class _Builder:
    """Collects the arrays of one segment after the other.

    Attributes:
      tensors: All arrays so far.
      made: Array of each variable of the loss that is not an argument.
    """

    tensors: list[Tensor]
    made: dict[Var, Tensor]

    def add_segment(
        self, number: int, segment: Jaxpr, first: int, active: set[Var], useful: set[Var]
    ) -> list[Tensor]:
        """Add a segment, and return what its backward pass needs."""
        given = [self.made.get(v) for v in segment.invars]
        results, needs = self._linearized(
            number,
            segment,
            given,
            [v in active for v in segment.invars],
            [v in useful for v in segment.outvars],
            lambda i, j: as_text((first + i, j)),
            times=1,
        )
        for v, t in zip(segment.outvars, results, strict=True):
            if t is not None and isinstance(v, Var):
                self.made[v] = t
        return needs

    def add_loop(
        self, number: int, eqn: JaxprEqn, position: int, active: set[Var], useful: set[Var]
    ) -> list[Tensor]:
        """Add a scan whose iterations are planned, and return what its backward pass needs."""
        scan, times = Scan.of(eqn), eqn.params["length"]
        given = [None if isinstance(v, Literal) else self.made.get(v) for v in eqn.invars]
        consts, _, xs = scan.split(given)
        body = inline(scan.body)
        carries = body.jaxpr.invars[scan.num_consts : scan.num_consts + scan.num_carry]
        carry = [
            self._new(Tensor(number, nbytes(v), times * nbytes(v), (CARRY, i)))
            for i, v in enumerate(carries)
        ]
        is_active = [not isinstance(v, Literal) and v in active for v in eqn.invars]
        is_useful = [v in useful for v in eqn.outvars]
        for i in range(scan.num_carry):  # A carry is active if the loop makes it so.
            is_active[scan.num_consts + i] |= eqn.outvars[i] in active
            is_useful[i] |= is_active[scan.num_consts + i] and any(is_useful)
        _, needs = self._linearized(
            number,
            body.jaxpr.replace(constvars=[], invars=[*body.jaxpr.constvars, *body.jaxpr.invars])
            if body.jaxpr.constvars
            else body.jaxpr,
            [*([None] * len(body.jaxpr.constvars)), *consts, *carry, *xs],
            [*([False] * len(body.jaxpr.constvars)), *is_active],
            is_useful,
            lambda i, j: as_text((i, j)),
            times=times,
        )
        for j, v in enumerate(eqn.outvars):
            self.made[v] = self._new(Tensor(number, nbytes(v), nbytes(v), (position, j)))
        return needs

    def _new(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor

    def _linearized(
        self,
        number: int,
        jaxpr: Jaxpr,
        given: Sequence[Tensor | None],
        active: Sequence[bool],
        useful: Sequence[bool],
        name_of: Any,
        times: int,
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Add the linearized equations; return the results, and what the backward pass reads."""
        forward, residuals = linearized(ClosedJaxpr(jaxpr, []), active, useful, name_of)
        known: dict[Var, Tensor | None] = dict(zip(forward.invars, given, strict=True))
        for eqn in forward.eqns:
            inputs = [known.get(v) for v in variables(eqn.invars)]
            made_from = tuple(dict.fromkeys(t for t in inputs if t is not None))
            name = eqn.primitive.name
            same = name in _RENAMING and len(eqn.invars) == len(eqn.outvars)
            if name == "name" and (parsed := _from_text(eqn.params["name"])):
                source = inputs[0] if inputs else None
                if source is None or source.operation is None or source.name is not None:
                    known[eqn.outvars[0]] = source  # an argument, or a renamed array
                    continue
                operation = Operation(number, Cost(0, 0), (source,), is_fused=True)
                known[eqn.outvars[0]] = self._new(
                    Tensor(number, source.bytes, source.saved_bytes, parsed, operation, source)
                )
            elif name == "name" or (same and len(made_from) <= 1):
                # The same arrays under another name.
                known |= zip(eqn.outvars, _padded(eqn, known), strict=True)
            else:
                cost = equation_cost(eqn)
                operation = Operation(
                    number,
                    Cost(*(times * c for c in cost)),
                    made_from,
                    name in _FUSED,
                    not name.startswith("reduce") and name not in ELEMENTWISE | _FUSED,
                )
                for v in eqn.outvars:
                    size = nbytes(v)
                    known[v] = self._new(Tensor(number, size, times * size, None, operation))
        results = [
            None if isinstance(v, Literal) else known.get(v)
            for v in forward.outvars[: len(jaxpr.outvars)]
        ]
        needs = dict.fromkeys(known.get(v) for v in residuals)
        return results, [t for t in needs if t is not None]


def _fuse(segments: Sequence[Segment], tensors: Sequence[Tensor]) -> frozenset[Tensor]:
    """Account for XLA's fusion of elementwise operations.

    The result of an operation that is fused with its readers is neither written nor read.

    Returns:
      Needed arrays that XLA computes from other needed arrays where the backward pass reads them.
    """
    needs = dict.fromkeys(t for s in segments for t in s.needs)
    stored = set(needs)
    operands = {
        i for t in tensors if t.operation and t.operation.is_heavy for i in t.operation.inputs
    }

    def is_fused(t: Tensor, depth: int) -> bool:
        operation = t.operation
        if operation is None or not operation.is_fused or not depth or t in operands:
            return False
        if t.saved_bytes > t.bytes:  # A loop stores what the loop of the backward pass reads.
            return False
        return all(not i.bytes or i in stored or is_fused(i, depth - 1) for i in operation.inputs)

    for t in reversed(needs):
        if is_fused(t, _FUSED_DEPTH):
            stored.remove(t)
    for t in tensors:
        if t.operation and (t.operation.is_heavy or t in operands or t in stored):
            t.operation.written = t.operation.cost.bytes
    return frozenset(needs) - stored


def _padded(eqn: JaxprEqn, known: dict[Var, Tensor | None]) -> list[Tensor | None]:
    return [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]


def linearized(
    closed: ClosedJaxpr, active: Sequence[bool], useful: Sequence[bool], name_of: Any
) -> tuple[Jaxpr, list[Var]]:
    """Trace the forward pass of `jax.vjp` for some inputs and results of a jaxpr.

    Args:
      closed: The function, without constants.
      active: Whether each input is differentiated.
      useful: Whether each result is differentiated.
      name_of: Name of an output of an equation, for `checkpoint_name`, or None.

    Returns:
      The forward pass, and its variables that the backward pass reads. Its first results are the
      results of the function.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    chosen = [i for i, a in enumerate(active) if a]

    def forward(*values: Any) -> Any:
        def of_chosen(*differentiated: Any) -> Any:
            args = list(values)
            for i, d in zip(chosen, differentiated, strict=True):
                args[i] = d
            results = run_named(closed, args, name_of)
            return [r for r, u in zip(results, useful, strict=True) if u], results

        _, vjp, results = jax.vjp(of_chosen, *(values[i] for i in chosen), has_aux=True)
        return results, vjp

    if not chosen or not any(useful):
        plain = inline(jax.make_jaxpr(lambda *v: run_named(closed, v, name_of))(*shapes))
        return plain.jaxpr, []
    traced, (results, vjp) = jax.make_jaxpr(forward, return_shape=True)(*shapes)
    cotangents = [r for r, u in zip(results, useful, strict=True) if u]
    backward = jax.make_jaxpr(lambda vjp, cotangents: vjp(cotangents))(vjp, cotangents).jaxpr
    _, is_read = dce_jaxpr(backward, [True] * len(backward.outvars))
    jaxpr = inline(traced).jaxpr
    first = len(results)
    read = [
        v
        for v, r in zip(jaxpr.outvars[first:], is_read, strict=False)
        if r and not isinstance(v, Literal)
    ]
    return jaxpr, read
