"""Pieces of a traced loss: adjacent equations between places where few bytes pass."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr

from fnet import measured
from fnet.jaxpr import Scan, is_checkpoint, nbytes, part_of_jaxpr
from fnet.jaxpr.primitives import made_bytes
from fnet.memory.apply import variables


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
    count, least = len(jaxpr.eqns), measured.LARGE_LOOP * sum(made)
    loops = {i: scan for i, e in enumerate(jaxpr.eqns) if (scan := Scan.read(e))}
    # A loop whose iterations are under a jax.checkpoint already is whole, and runs once more alone.
    alone = {i for i, scan in loops.items() if all(map(is_checkpoint, scan.body.jaxpr.eqns))}
    large = {i for i in loops if made[i] > least} - alone
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

    A loop, and a piece above the limit, is a window of its own. Returns the bytes that pass, and
    the first piece of each window.
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


def _passing_bytes(jaxpr: Jaxpr) -> list[int]:
    """Bytes that are made before each position and read after it, without arguments."""
    changes = [0] * (len(jaxpr.eqns) + 2)
    made = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in variables(e.invars) if v in made}
    for v, read in last.items():
        changes[made[v] + 1] += nbytes(v)
        changes[read + 1] -= nbytes(v)
    return list(itertools.accumulate(changes))
