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
from typing import Literal as OneOf

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fnet.backward_pass import finish_together
from fnet.jaxpr import AnyPrimitive, Scan, evaluate, in_scopes, inline, interpret, is_floating
from fnet.memory import devices, loops, regions
from fnet.memory.apply import evaluate_as, variables
from fnet.memory.estimate import density
from fnet.memory.pieces import merge, pieces, segment_of

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
      is_on_host: Whether its inputs, or the carries of a loop, are saved in host memory.
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
    f: F, divide: Callable[[ClosedJaxpr], Sequence[Window]], policy: CheckpointPolicy | None = None
) -> F:
    """Divide a function into windows, each under a `jax.checkpoint` of its own.

    ``policy`` says what windows save that save nothing of their own.
    """
    return evaluate_as(
        f,
        lambda closed, leaves, _: run_windows(closed, leaves, divide(closed), policy),
        first_alone=False,
    )


def run_windows(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    windows: Sequence[Window],
    policy: CheckpointPolicy | None = None,
    inner: Callable[[ClosedJaxpr], Run] | None = None,
    checkpoint: Callable[[Run, ClosedJaxpr], Run] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr window by window, each as ``inner`` evaluates it.

    ``checkpoint`` is in place of `jax.checkpoint`.
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
        run = inner(part) if inner else functools.partial(_evaluate, part, window.is_on_host)
        # A jax.checkpoint would have effects twice, or rejects them.
        if not is_plain and not any(e.effects for e in segment.eqns):
            run = checkpoint(run, part) if checkpoint else jax.checkpoint(run, policy=saved)
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


def _evaluate(closed: ClosedJaxpr, is_on_host: bool, *args: Any) -> list[Any]:
    """Evaluate a window, whose inputs are named if they are moved to the host."""
    given = zip(args, closed.jaxpr.invars, strict=True)
    named = [
        checkpoint_name(a, _INPUT) if is_on_host and v.aval.shape and is_floating(v) else a
        for a, v in given
    ]
    return interpret(closed, named, evaluate)


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
      on_host: Whether the inputs of "all" windows or the carries of "loops" go to host memory.
    """

    kind: ClassVar[str] = "planned"
    size: float
    least: tuple[float | None, ...]
    of: Tree = PLAIN
    on_host: OneOf["nothing", "loops", "all"] = "nothing"

    def _apply(self, f: F) -> F:
        return remat_windows(self.of.apply(f), self.windows)

    def windows(self, closed: ClosedJaxpr) -> list[Window]:
        """The windows of a function; one with another number of them saves what every one saves."""
        found = partition(closed.jaxpr, self.size)
        least = self.least
        if len(least) != len(found):
            most = max(-1.0 if x is None else x for x in least)
            least = (None if most < 0 else most,) * len(found)
        on_host = self.on_host
        return [
            w._replace(
                least=x,
                is_on_host=x is not None
                and (on_host == "all" or (w.is_loop and on_host == "loops")),
            )
            for w, x in zip(found, least, strict=True)
        ]

    def __str__(self) -> str:
        saved = sum(x is None for x in self.least)
        nothing = sum(x == NOTHING for x in self.least)
        text = f"{len(self.least)} windows under jax.checkpoint"
        text = f"{text}: {saved} save everything, {nothing} their inputs alone"
        text += f", {self.on_host} in host memory" if self.on_host != "nothing" else ""
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
    _, starts = merge(parts, sizes, size * sum(sizes))
    bounds = [*starts, len(parts)]
    return [
        Window(parts[a].start, parts[b - 1].end, parts[a].is_loop)
        for a, b in itertools.pairwise(bounds)
    ]
