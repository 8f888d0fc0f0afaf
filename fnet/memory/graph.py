"""The graph of a traced loss: its arrays, what makes them, and what the backward pass reads.

`linearize` traces the forward pass of a gradient. `analyze` divides a loss into pieces, linearizes
each one, and returns their arrays and operations, with bytes and FLOPs. `fnet.memory.residuals`
lists what a whole function saves. `fnet.memory.proposals` chooses what a loss saves.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from fnet import measured
from fnet.jaxpr import (
    Scan,
    active_variables,
    aval,
    evaluate,
    inline,
    interpret,
    is_checkpoint,
    is_elementwise,
    is_fused,
    is_reduction,
    nbytes,
    part_of_jaxpr,
    renames,
)
from fnet.jaxpr.primitives import CheckpointName, made_bytes
from fnet.memory.cost import Cost, equation_cost

_PREFIX = "fnet_tensor:"

Name = tuple[int, int]
"""Equation and output of an array in an inlined jaxpr. ``(CARRY, i)`` is a carry of a loop."""

CARRY = -1
IN_LOOP = 1 << 20
"""Number of the first equation in the body of a loop, above the numbers of the function."""


# The forward pass.


class Forward(NamedTuple):
    """The forward pass of a gradient.

    Attributes:
      closed: Maps arrays to what the function returns and to residuals.
      returned: Shapes of what the function returns: its value and its aux.
      residuals: Positions of the results that the backward pass reads.
    """

    closed: ClosedJaxpr
    returned: tuple[Any, Any]
    residuals: list[int]


def linearize(f: Callable[..., Any], args: Sequence[Any], chosen: Sequence[int]) -> Forward:
    """Trace ``jax.vjp`` of a function, and the backward pass to see what it reads.

    Args:
      f: Function of arrays that returns ``(value, aux)``. The value is differentiated.
      args: Arrays or their shapes.
      chosen: Positions of the arguments to differentiate, at least one.
    """

    def forward(*args: Any) -> Any:
        def of_chosen(*differentiated: Any) -> Any:
            given = list(args)
            for i, a in zip(chosen, differentiated, strict=True):
                given[i] = a
            return f(*given)

        value, vjp, aux = jax.vjp(of_chosen, *(args[i] for i in chosen), has_aux=True)
        return (value, aux), vjp  # a pytree whose leaves are the residuals

    closed, (returned, vjp) = jax.make_jaxpr(forward, return_shape=True)(*args)
    # A custom_vjp rule may save arrays that its backward pass never reads.
    backward = jax.make_jaxpr(lambda vjp, cotangent: vjp(cotangent))(vjp, returned[0]).jaxpr
    _, is_read = dce_jaxpr(backward, [True] * len(backward.outvars))
    first = len(jax.tree.leaves(returned))
    positions = range(first, first + len(jax.tree.leaves(vjp)))
    return Forward(closed, returned, [i for i, r in zip(positions, is_read, strict=False) if r])


def variables(atoms: Iterable[Any]) -> Iterator[Var]:
    """Yield the inputs of an equation that are variables."""
    return (a for a in atoms if not isinstance(a, Literal))


# Pieces.


class Piece(NamedTuple):
    """Adjacent equations of a loss, between places where few bytes pass.

    Attributes:
      start: First equation.
      end: Equation after the last.
      is_loop: Whether it is a single scan, planned by iteration.
      made: Bytes that its equations make. 0 for a loop.
      passing: Bytes that are made before the piece and read in it or later, without arguments.
    """

    start: int
    end: int
    is_loop: bool
    made: int
    passing: int


def pieces(jaxpr: Jaxpr) -> list[Piece]:
    """Divide an inlined jaxpr into small pieces. A loop that makes many bytes is one of its own."""
    made, passing = [*map(made_bytes, jaxpr.eqns)], _passing_bytes(jaxpr)
    count, large = len(jaxpr.eqns), _large_loops(jaxpr, made)
    # A loop whose iterations are under a jax.checkpoint already is whole, and runs once more alone.
    alone = {i for i, e in enumerate(jaxpr.eqns) if _is_checkpointed(e)}
    forced = {0, count} | {i + side for i in large | alone for side in (0, 1)}
    made = [0 if i in large else b for i, b in enumerate(made)]
    made_before = [0, *itertools.accumulate(made)]
    size = max(made_before[-1] / measured.MOST_PIECES, 1)
    best: dict[int, int] = {}
    for i in range(1, count):
        # On a plateau, as in a chain of matrix products, every place is as good.
        if i not in forced and passing[i] <= passing[i - 1] and passing[i] <= passing[i + 1]:
            part = int(made_before[i] / size)
            if part not in best or passing[i] <= passing[best[part]]:
                best[part] = i
    return [
        Piece(start, end, start in large, made_before[end] - made_before[start], passing[start])
        for start, end in itertools.pairwise(sorted(forced | set(best.values())))
    ]


def merge(pieces: Sequence[Piece], sizes: Sequence[float], limit: float) -> tuple[float, list[int]]:
    """Merge pieces into windows of at most ``limit`` bytes, so that the fewest bytes pass.

    A loop, and a piece above the limit, is a window of its own.

    Returns:
      Bytes that pass between windows, and the first piece of each window.
    """
    best: list[tuple[float, int]] = [(0.0, 0)]
    for j in range(1, len(pieces) + 1):
        options: list[tuple[float, int]] = []
        total = 0.0
        for i in range(j - 1, -1, -1):
            total += sizes[i]
            if options and (total > limit or pieces[i].is_loop):
                break
            options.append((best[i][0] + pieces[i].passing, i))
            if pieces[i].is_loop:
                break
        best.append(min(options))
    starts, j = [], len(pieces)
    while j:
        j = best[j][1]
        starts.append(j)
    return best[-1][0], starts[::-1]


def segment_of(jaxpr: Jaxpr, start: int, end: int) -> Jaxpr:
    """Equations [start, end) as a jaxpr, from the variables they read to those read later."""
    eqns = jaxpr.eqns[start:end]
    made = dict.fromkeys(v for e in eqns for v in e.outvars)
    inputs = dict.fromkeys(v for e in eqns for v in variables(e.invars) if v not in made)
    read_later = {v for e in jaxpr.eqns[end:] for v in variables(e.invars)}
    read_later |= set(variables(jaxpr.outvars))
    return part_of_jaxpr(eqns, list(inputs), [v for v in made if v in read_later])


def _large_loops(jaxpr: Jaxpr, made: Sequence[int]) -> set[int]:
    return {
        i
        for i, e in enumerate(jaxpr.eqns)
        if Scan.read(e) and made[i] > measured.LARGE_LOOP * sum(made) and not _is_checkpointed(e)
    }


def _is_checkpointed(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan whose iterations are under a `jax.checkpoint`."""
    scan = Scan.read(eqn)
    return scan is not None and all(map(is_checkpoint, scan.body.jaxpr.eqns))


def _passing_bytes(jaxpr: Jaxpr) -> list[int]:
    """Bytes that are made before each position and read after it, without arguments."""
    changes = [0] * (len(jaxpr.eqns) + 2)
    made = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in variables(e.invars) if v in made}
    for v, read in last.items():
        changes[made[v] + 1] += nbytes(v)
        changes[read + 1] -= nbytes(v)
    return list(itertools.accumulate(changes))


# Names of arrays.


def array_names(jaxpr: Jaxpr) -> dict[Var, Name]:
    """Return the name of each variable. A reshaped array has the name of the original."""
    names: dict[Var, Name] = {}
    for i, e in enumerate(jaxpr.eqns):
        if renames(e):
            pairs = zip(e.outvars, e.invars, strict=False)
            names |= {v: names[u] for v, u in pairs if not isinstance(u, Literal) and u in names}
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
    kinds = jax.dtypes.extended, jnp.complexfloating  # `AnyPrimitive` saves no complex numbers
    return dtype is not None and not any(jnp.issubdtype(dtype, kind) for kind in kinds)


def as_text(name: Name) -> str:
    """Return the name of an array for `jax.ad_checkpoint.checkpoint_name`."""
    return f"{_PREFIX}{name[0]}:{name[1]}"


def _from_text(text: str) -> Name | None:
    if not text.startswith(_PREFIX):
        return None
    i, j = text.removeprefix(_PREFIX).split(":")
    return int(i), int(j)


# The graph.


@dataclasses.dataclass(eq=False, repr=False)  # a repr would have each path through the graph
class Tensor:
    """An array of the linearized forward pass.

    Attributes:
      piece: Piece that makes it.
      bytes: Bytes while it is alive in one iteration.
      saved_bytes: Bytes of saving it: of all iterations, for an array in a loop.
      name: How a policy saves it, or None if it cannot be saved.
      operation: Operation that makes it. None for the carry of a loop.
      copy_of: The same array before it was named. Autodiff reads either one, and a policy saves
        the named one.
    """

    piece: int
    bytes: int
    saved_bytes: int
    name: Name | None = None
    operation: "Operation | None" = None
    copy_of: "Tensor | None" = None


@dataclasses.dataclass(eq=False, repr=False)
class Operation:
    """An equation of the linearized forward pass.

    Attributes:
      cost: FLOPs and bytes of running it again, in all iterations.
      inputs: Arrays that it reads, without arguments and constants.
      is_fused: Whether XLA can compute it where its result is read, without storing the result.
      is_heavy: Whether XLA stores its inputs: a matrix product, a convolution, a call.
      written: Bytes that it reads and writes after XLA fuses elementwise operations.
    """

    cost: Cost
    inputs: tuple[Tensor, ...]
    is_fused: bool = False
    is_heavy: bool = False
    written: int = 0


class Graph(NamedTuple):
    """The pieces of a loss, and the arrays of its linearized forward pass.

    Attributes:
      pieces: In forward order.
      needs: Arrays that the backward pass of each piece reads.
      tensors: All arrays, without arguments and constants.
      fused: Needed arrays that take no memory, because XLA computes them from other needed ones.
      equations: Names of the primitives, to recognize the program.
    """

    pieces: list[Piece]
    needs: list[list[Tensor]]
    tensors: list[Tensor]
    fused: frozenset[Tensor]
    equations: tuple[str, ...]


def equation_names(eqns: Iterable[JaxprEqn]) -> tuple[str, ...]:
    """Return the names of primitives, which identify a program at other shapes."""
    return tuple(e.primitive.name for e in eqns)


def analyze(
    closed: ClosedJaxpr, differentiated: Sequence[bool], objective: Sequence[bool]
) -> Graph:
    """Divide a loss into pieces, and find what the backward pass of each one needs.

    Args:
      closed: The inlined loss.
      differentiated: Whether the loss is differentiated with respect to each argument.
      objective: Whether each result is differentiated.

    Returns:
      The graph of arrays and operations.
    """
    jaxpr = closed.jaxpr
    active = active_variables(jaxpr, differentiated)
    builder = _Builder(jaxpr, active, _useful(jaxpr, objective) & active)
    parts = pieces(jaxpr)
    needs = [builder.add(number, piece) for number, piece in enumerate(parts)]
    fused = _fuse(needs, builder.tensors)
    return Graph(parts, needs, builder.tensors, fused, equation_names(jaxpr.eqns))


def analyze_regions(
    regions: Sequence[tuple[Jaxpr, Sequence[bool], Sequence[bool], Collection[Var]]],
    held: Collection[Var],
) -> Graph:
    """Return the graph of functions that run in chunks: a piece each, of which rows can be saved.

    What a chunk makes again takes no bytes here.

    Args:
      regions: Inlined jaxprs, whether each argument and each result is differentiated, and the
        variables that are rows. Equations are counted through all of them.
      held: Variables that are in memory in any case.
    """
    parts: list[Piece] = []
    needs: list[list[Tensor]] = []
    tensors: list[Tensor] = []
    eqns = [e for jaxpr, *_ in regions for e in jaxpr.eqns]
    for number, (jaxpr, differentiated, objective, rows) in enumerate(regions):
        start = parts[-1].end if parts else 0
        active = active_variables(jaxpr, differentiated)
        builder = _Builder(jaxpr, active, _useful(jaxpr, objective) & active)
        needs.append(builder.add_whole(number, start))
        for t in builder.tensors:
            t.bytes = 0
            v = eqns[t.name[0]].outvars[t.name[1]] if t.name else None
            if v not in rows:
                t.name = None
            elif v in held:
                t.saved_bytes = 0
        tensors += builder.tensors
        made = sum(map(made_bytes, jaxpr.eqns))
        parts.append(Piece(start, start + len(jaxpr.eqns), False, made, 0))
    return Graph(parts, needs, tensors, _fuse(needs, tensors), equation_names(eqns))


def _useful(jaxpr: Jaxpr, objective: Sequence[bool]) -> set[Var]:
    useful = {
        v for v, o in zip(jaxpr.outvars, objective, strict=True) if o and not isinstance(v, Literal)
    }
    for e in reversed(jaxpr.eqns):
        if any(v in useful for v in e.outvars):
            useful |= set(variables(e.invars))
    return useful


class _Builder:
    def __init__(self, jaxpr: Jaxpr, active: set[Var], useful: set[Var]):
        self._jaxpr, self._active, self._useful = jaxpr, active, useful
        self.tensors: list[Tensor] = []
        self._made: dict[Var, Tensor] = {}  # of variables that are no arguments

    def add(self, number: int, piece: Piece) -> list[Tensor]:
        if piece.is_loop:
            return self._add_loop(number, piece.start)
        segment = segment_of(self._jaxpr, piece.start, piece.end)
        results, needs = self._linearized(
            number,
            ClosedJaxpr(segment, []),
            [self._made.get(v) for v in segment.invars],
            [v in self._active for v in segment.invars],
            [v in self._useful for v in segment.outvars],
            first=piece.start,
        )
        for v, t in zip(segment.outvars, results, strict=True):
            if t is not None and isinstance(v, Var):
                self._made[v] = t
        return needs

    def add_whole(self, number: int, first: int) -> list[Tensor]:
        jaxpr = self._jaxpr
        return self._linearized(
            number,
            ClosedJaxpr(jaxpr, []),
            [None] * len(jaxpr.invars),
            [v in self._active for v in jaxpr.invars],
            [v in self._useful for v in jaxpr.outvars],
            first=first,
        )[1]

    def _add_loop(self, number: int, position: int) -> list[Tensor]:
        eqn = self._jaxpr.eqns[position]
        scan = Scan.of(eqn)
        given = [None if isinstance(v, Literal) else self._made.get(v) for v in eqn.invars]
        consts, _, xs = scan.split(given)
        _, carries, _ = scan.split(scan.body.jaxpr.invars)
        carry = [
            self._new(Tensor(number, nbytes(v), scan.length * nbytes(v), (CARRY, i)))
            for i, v in enumerate(carries)
        ]
        active = [not isinstance(v, Literal) and v in self._active for v in eqn.invars]
        useful = [v in self._useful for v in eqn.outvars]
        for i in range(scan.num_carry):  # A carry is active if the loop makes it so.
            active[scan.num_consts + i] |= eqn.outvars[i] in self._active
            useful[i] |= active[scan.num_consts + i] and any(useful)
        given = [*consts, *carry, *xs]
        _, needs = self._linearized(
            number, inline(scan.body), given, active, useful, first=IN_LOOP, times=scan.length
        )
        for j, v in enumerate(eqn.outvars):
            self._made[v] = self._new(Tensor(number, nbytes(v), nbytes(v), (position, j)))
        return needs

    def _new(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor

    def _linearized(
        self,
        number: int,
        closed: ClosedJaxpr,
        given: Sequence[Tensor | None],
        active: Sequence[bool],
        useful: Sequence[bool],
        *,
        first: int = 0,
        times: int = 1,
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Add the linearized equations; return the results, and what the backward pass reads."""
        forward, results, read = _named_forward(closed, active, useful, first)
        known: dict[Var, Tensor | None] = dict(zip(forward.invars, given, strict=True))

        def tensors(atoms: Iterable[Any]) -> list[Tensor | None]:
            return [None if isinstance(v, Literal) else known.get(v) for v in atoms]

        for eqn in forward.eqns:
            inputs = tensors(eqn.invars)
            made_from = tuple(dict.fromkeys(t for t in inputs if t is not None))
            mark = CheckpointName.read(eqn)
            if mark and (parsed := _from_text(mark.name)):
                (source,) = inputs
                if source is None or source.operation is None or source.name is not None:
                    known[eqn.outvars[0]] = source  # an argument, or a renamed array
                    continue
                operation = Operation(Cost(0, 0), (source,), is_fused=True)
                known[eqn.outvars[0]] = self._new(
                    Tensor(number, source.bytes, source.saved_bytes, parsed, operation, source)
                )
            elif renames(eqn) and len(made_from) <= 1:
                known |= zip(eqn.outvars, inputs, strict=False)
            else:
                operation = Operation(
                    Cost(*(times * c for c in equation_cost(eqn))),
                    made_from,
                    is_fused(eqn),
                    not (is_elementwise(eqn) or is_fused(eqn) or is_reduction(eqn)),
                )
                for v in eqn.outvars:
                    size = nbytes(v)
                    known[v] = self._new(Tensor(number, size, times * size, None, operation))
        needs = dict.fromkeys(tensors(read))
        return tensors(results), [t for t in needs if t is not None]


def _named_forward(
    closed: ClosedJaxpr, active: Sequence[bool], useful: Sequence[bool], first: int
) -> tuple[Jaxpr, list[Any], list[Any]]:
    """Linearize a jaxpr whose arrays have names, and inline it.

    Returns:
      The forward pass, the results of ``closed`` in it, and what its backward pass reads.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    chosen = [i for i, a in enumerate(active) if a]

    def run(*values: Any) -> Any:
        results = run_named(closed, values, lambda i, j: as_text((first + i, j)))
        return [r for r, u in zip(results, useful, strict=True) if u], results

    if not chosen or not any(useful):
        plain = inline(jax.make_jaxpr(lambda *values: run(*values)[1])(*shapes)).jaxpr
        return plain, plain.outvars, []
    forward = linearize(run, shapes, chosen)
    jaxpr = inline(forward.closed).jaxpr
    results = jaxpr.outvars[sum(useful) :][: len(useful)]
    return jaxpr, results, [jaxpr.outvars[i] for i in forward.residuals]


def _fuse(needs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> frozenset[Tensor]:
    """Account for XLA's fusion of elementwise operations.

    The result of an operation that is fused with its readers is neither written nor read.

    Returns:
      Needed arrays that XLA computes from other needed arrays where the backward pass reads them.
    """
    needed = dict.fromkeys(itertools.chain.from_iterable(needs))
    stored = set(needed)
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

    for t in reversed(needed):
        if is_fused(t, measured.FUSED_DEPTH):
            stored.remove(t)
    for t in tensors:
        if t.operation and (t.operation.is_heavy or t in operands or t in stored):
            t.operation.written = t.operation.cost.bytes
    return frozenset(needed) - stored
