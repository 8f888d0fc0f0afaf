"""Trees: how a loss runs, so that its step takes fewer bytes.

A tree is a value: frozen, picklable, of numbers alone. Its nodes divide a function. `Blocks` are
parts of it one after the other, of which the backward pass saves what is dear to compute. `Loops`
are iterations of its scans in chunks, `Rows` are the rows of its axes in chunks. A node holds the
tree of the function that it divides (``of``) or of the part that it makes (``inside``).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from fnet.backward_pass import finish_together
from fnet.jaxpr import (
    AnyPrimitive,
    Scan,
    active_variables,
    evaluate,
    in_scopes,
    inline,
    interpret,
    is_floating,
)
from fnet.memory import devices, loops, regions
from fnet.memory.apply import evaluate_as, variables
from fnet.memory.estimate import density
from fnet.memory.pieces import Piece, merge, pieces, segment_of

F = TypeVar("F", bound=Callable[..., Any])
CheckpointPolicy = Callable[..., Any]
Run = Callable[..., list[Any]]
"""Evaluates a window."""

NOTHING = math.inf
"""No result is saved; see `Window`."""
_INPUT = "fnet_input"


# Windows: parts of a function that are rematerialized together.


class Window(NamedTuple):
    """Equations that are rematerialized together, under a `jax.checkpoint`.

    Attributes:
      start: First equation of the inlined function.
      end: Equation after the last.
      is_loop: Whether it is a single scan, rematerialized by iteration.
      least: FLOPs per byte from which results are saved. None saves all residuals.
      is_on_host: Whether what other windows pass to it, or the carries of a loop, wait for the
        backward pass in host memory.
    """

    start: int
    end: int
    is_loop: bool = False
    least: float | None = NOTHING
    is_on_host: bool = False

    @property
    def policy(self) -> CheckpointPolicy | None:
        """What `jax.checkpoint` saves."""
        if self.is_on_host:
            offload: CheckpointPolicy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=[_INPUT],
                offload_src="device",
                offload_dst="pinned_host",
            )
            return offload
        if self.least in (None, NOTHING):
            return None
        policy: CheckpointPolicy = AnyPrimitive(functools.partial(_is_saved, self.least))
        return policy


def _is_saved(least: float, primitive: Any, *avals: Any, **params: Any) -> bool:
    return density(primitive.name, avals, params) >= least


def remat_windows(
    f: F,
    divide: Callable[[ClosedJaxpr], Sequence[Window]],
    policy: CheckpointPolicy | None = None,
    on_host: bool = False,
) -> F:
    """Divide a function into windows, each under a `jax.checkpoint` of its own.

    ``policy`` says what windows save that save nothing of their own. ``on_host`` says that some
    are on the host: then only the first argument can be differentiated.
    """

    def run(closed: ClosedJaxpr, leaves: list[Any], differentiated: list[bool]) -> Sequence[Any]:
        active = active_variables(closed.jaxpr, differentiated)
        again = checkpoint_of(closed, active) if on_host else None
        return run_windows(closed, leaves, divide(closed), policy, checkpoint=again)

    return evaluate_as(f, run, first_alone=on_host)


def checkpoint_of(closed: ClosedJaxpr, active: set[Var]) -> Callable[[Run, ClosedJaxpr, bool], Run]:
    """A checkpoint of windows of a function, for `run_windows`."""
    given = {*closed.jaxpr.invars, *closed.jaxpr.constvars}

    def checkpoint(run: Run, part: ClosedJaxpr, is_on_host: bool) -> Run:
        variables = part.jaxpr.invars
        moved = [
            is_on_host and is_floating(v) and bool(v.aval.shape) and v not in given
            for v in variables
        ]
        return computed_again(run, [v in active for v in variables], moved)

    return checkpoint


def computed_again(run: Run, differentiated: Sequence[bool], moved: Sequence[bool]) -> Run:
    """Save the arguments alone, as `jax.checkpoint` does; those that are moved, on the host.

    JAX divides a checkpoint around other ones into what is known before the backward pass, such as
    the masks of all chunks of attention, and the rest. Here its backward pass is traced by itself.

    XLA ends a copy to the host where it is read, and begins one from there at once. So three
    barriers say when: before the next window runs, when the cotangents are there, and before the
    backward pass of the window before.
    """

    def place(args: Sequence[Any], space: Any) -> list[Any]:
        pairs = zip(args, moved, strict=True)
        return [jax.device_put(a, space) if is_moved else a for a, is_moved in pairs]

    def forward(*args: Any) -> tuple[list[Any], list[Any]]:
        results, saved = run(*args), place(args, jax.memory.Space.Host)
        waiting = [a for a, is_moved in zip(saved, moved, strict=True) if is_moved]
        if waiting:
            results, waiting = jax.lax.optimization_barrier((results, waiting))
            left = iter(waiting)
            pairs = zip(saved, moved, strict=True)
            saved = [next(left) if is_moved else a for a, is_moved in pairs]
        return results, saved

    def backward(saved: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        floating = [c.dtype != jax.dtypes.float0 for c in cotangents]
        given = [c for c, is_own in zip(cotangents, floating, strict=True) if is_own]
        saved, given = jax.lax.optimization_barrier((saved, given))
        args = place(saved, jax.memory.Space.Device)
        chosen = [a for a, is_own in zip(args, differentiated, strict=True) if is_own]
        chosen, given = jax.lax.optimization_barrier((chosen, given))

        def of_chosen(*chosen: Any) -> list[Any]:
            left = iter(chosen)
            pairs = zip(args, differentiated, strict=True)
            results = run(*(next(left) if is_own else a for a, is_own in pairs))
            return [r for r, is_own in zip(results, floating, strict=True) if is_own]

        found = jax.vjp(of_chosen, *chosen)[1](given)
        grads = iter(jax.lax.optimization_barrier(found) if any(moved) else found)
        return tuple(next(grads) if is_own else None for is_own in differentiated)

    again = jax.custom_vjp(run)
    again.defvjp(forward, backward)
    result: Run = again
    return result


def run_windows(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    windows: Sequence[Window],
    policy: CheckpointPolicy | None = None,
    inner: Callable[[ClosedJaxpr], Run] | None = None,
    checkpoint: Callable[[Run, ClosedJaxpr, bool], Run] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr window by window, each as ``inner`` evaluates it.

    ``checkpoint`` is in place of `jax.checkpoint`; it is told whether a window is on the host.
    """
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [a.val if isinstance(a, Literal) else values[a] for a in atoms]

    for window in windows:
        is_plain = window.least is None
        saved = AnyPrimitive(policy) if policy and window.policy is None else window.policy
        loop = jaxpr.eqns[window.start] if window.is_loop else None
        if loop and not is_plain and not loop.effects:
            with in_scopes(loop):
                outputs = _remat_iterations(loop, read(loop.invars), saved, window.is_on_host)
            values |= zip(loop.outvars, outputs, strict=True)
            continue
        segment, effects = _without_effects(segment_of(jaxpr, window.start, window.end))
        part = ClosedJaxpr(segment, [])
        run: Any = (
            inner(part) if inner else lambda *args, part=part: interpret(part, args, evaluate)
        )
        # A jax.checkpoint would have effects twice, or rejects them.
        if not is_plain and not any(e.effects for e in segment.eqns):
            if checkpoint:
                run = checkpoint(run, part, window.is_on_host)
            else:
                run = jax.checkpoint(run, policy=saved)
        inputs = read(segment.invars)
        floating = [i for i, v in enumerate(segment.invars) if is_floating(v)]
        if len(windows) > 1 and floating:
            finished = finish_together(*(inputs[i] for i in floating))
            for i, a in zip(floating, finished, strict=True):
                inputs[i] = a
        values |= zip(segment.outvars, run(*inputs), strict=True)
        for effect in effects:
            evaluate(effect, read(effect.invars))
    return read(jaxpr.outvars)


def _without_effects(segment: Jaxpr) -> tuple[Jaxpr, list[JaxprEqn]]:
    """Take out callbacks that nothing depends on: a `jax.checkpoint` would call them again."""
    effects = [e for e in segment.eqns if e.effects]
    read = {v for e in segment.eqns for v in variables(e.invars)} | {*segment.outvars}
    if not effects or any(v in read for e in effects for v in e.outvars):
        return segment, []
    operands = dict.fromkeys(v for e in effects for v in variables(e.invars))
    made = {v for e in segment.eqns for v in e.outvars}
    outvars = dict.fromkeys([*segment.outvars, *(v for v in operands if v in made)])
    eqns = [e for e in segment.eqns if not e.effects]
    return segment.replace(eqns=eqns, outvars=list(outvars), effects=set()), effects


def _remat_iterations(
    loop: JaxprEqn, inputs: Sequence[Any], policy: CheckpointPolicy | None, is_on_host: bool
) -> list[Any]:
    scan = Scan.of(loop)
    consts, carry, xs = scan.split(inputs)
    body = inline(scan.body)

    def iteration(carry: list[Any], xs: Sequence[Any]) -> list[Any]:
        named = [checkpoint_name(a, _INPUT) if is_on_host and is_floating(a) else a for a in carry]
        return interpret(body, [*consts, *named, *xs], evaluate)

    with_remat = jax.checkpoint(iteration, prevent_cse=False, policy=policy)
    return scan.evaluate(lambda carry, xs, _: (with_remat(carry, xs), None), carry, xs)[0]


# Nodes.


@dataclasses.dataclass(frozen=True)
class Tree:
    """A loss as it is: the leaf of every tree, and the base of all nodes."""

    kind: ClassVar[str] = ""

    @property
    def held(self) -> Any:
        """The tree, or remat policy, that a node holds; None for a leaf."""
        return getattr(self, "of", None) or getattr(self, "inside", None)

    @property
    def name(self) -> str:
        """How it treats residuals, for a table."""
        inner = self.held.name if self.held else "none"
        return " with ".join(n for n in (self.kind, inner) if n not in ("", "none")) or "none"

    @property
    def chunks(self) -> int:
        """Number of chunks of rows."""
        return getattr(self, "count", 0) or (self.held.chunks if self.held else 1)

    def apply(self, f: F) -> F:
        """Return a function with the same values and gradients that runs as the tree says."""
        return self._apply(f)

    def _apply(self, f: F) -> F:
        return f

    def __str__(self) -> str:
        return "the loss as it is"


PLAIN = Tree()


@dataclasses.dataclass(frozen=True)
class Blocks(Tree):
    """Windows of a function, each under a `jax.checkpoint` that saves what is dear to compute.

    Attributes:
      size: Bytes that a window makes at most, as a share of all.
      least: For each window, FLOPs per byte from which a result is saved; None saves everything.
      of: What the function becomes before.
      on_host: Whether what passes between windows, and the carries of loops, go to host memory.
    """

    kind: ClassVar[str] = "planned"
    size: float
    least: tuple[float | None, ...]
    of: Tree = PLAIN
    on_host: bool = False

    def _apply(self, f: F) -> F:
        return remat_windows(self.of.apply(f), self.windows, on_host=self.on_host)

    def windows(self, closed: ClosedJaxpr) -> list[Window]:
        """The windows of a function; one with another number of them saves what every one saves."""
        found = partition(closed.jaxpr, self.size)
        least = self.least
        if len(least) != len(found):
            most = max(-1.0 if x is None else x for x in least)
            least = (None if most < 0 else most,) * len(found)
        return [
            w._replace(least=x, is_on_host=self.on_host and x is not None)
            for w, x in zip(found, least, strict=True)
        ]

    def __str__(self) -> str:
        saved = sum(x is None for x in self.least)
        nothing = sum(x == NOTHING for x in self.least)
        text = f"{len(self.least)} windows under jax.checkpoint"
        text = f"{text}: {saved} save everything, {nothing} their inputs alone"
        text += ", in host memory" * self.on_host
        return text if self.of == PLAIN else f"{text}, of {self.of}"


@dataclasses.dataclass(frozen=True)
class Loops(Tree):
    """Iterations of scans in chunks, each under a `jax.checkpoint`; see `fnet.memory.loops`.

    Attributes:
      passes: Additional forward passes of a loop.
      share: Share of the iterations that run again.
    """

    kind: ClassVar[str] = "chunked loops"
    passes: int
    share: float = 1.0

    def _apply(self, f: F) -> F:
        return loops.remat_loops(f, self.passes, self.share)

    def __str__(self) -> str:
        again = f" in {self.share:.0%} of them" * (self.share < 1)
        return f"iterations of loops in chunks, {self.passes} more passes{again}"


@dataclasses.dataclass(frozen=True)
class Rows(Tree):
    """Rows of the outermost separate axes in chunks; see `fnet.memory.regions`.

    Attributes:
      count: Number of chunks.
      depth: Regions that are searched for one after the other.
      keep: Number of arrays of rows that the backward pass does not compute again, the dearest.
      inside: What a chunk of the largest region becomes: a tree or a remat policy.
      made: Bytes that the function makes outside of its regions and in them, where it was planned.
    """

    count: int
    depth: int = regions.MOST_REGIONS
    keep: int = 0
    inside: Any = PLAIN
    made: tuple[int, int] = (0, 0)

    def _apply(self, f: F) -> F:
        return regions.cut(f, self.count, self.inside.apply, self.keep, self.depth, self.made)

    def __str__(self) -> str:
        text = f"rows in {self.count} chunks"
        text += f" that keep {self.keep} arrays" if self.keep else ""
        return text if self.inside == PLAIN else f"{text}, inside: {self.inside}"


@dataclasses.dataclass(frozen=True)
class OnDevices(Tree):
    """What each device computes inside of a `jax.shard_map` runs as another tree says."""

    inside: Tree

    def _apply(self, f: F) -> F:
        return devices.on_devices(f, self.inside.apply)

    def __str__(self) -> str:
        return f"on each device {self.inside}"


def partition(jaxpr: Jaxpr, size: float) -> list[Window]:
    """Divide an inlined function where few bytes pass, into windows of a share of its bytes."""
    parts = pieces(jaxpr)
    sizes = [p.made for p in parts]
    return windows_of(parts, merge(parts, sizes, size * sum(sizes))[1])


def windows_of(parts: Sequence[Piece], starts: Sequence[int]) -> list[Window]:
    """Windows of adjacent pieces, from the number of the first piece of each."""
    bounds = itertools.pairwise([*starts, len(parts)])
    return [Window(parts[a].start, parts[b - 1].end, parts[a].is_loop) for a, b in bounds]
