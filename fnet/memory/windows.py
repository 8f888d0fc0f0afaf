"""Windows: parts of a function that are rematerialized together, each under `jax.checkpoint`."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fnet.backward_pass import bind_static, constant, finish_together
from fnet.cpu.tracing import traced_for, tracing_platform
from fnet.jaxpr import AnyPrimitive, Scan, evaluate, in_scopes, inline, is_floating
from fnet.memory.graph import (
    CARRY,
    IN_LOOP,
    Name,
    Piece,
    array_names,
    as_text,
    merge,
    pieces,
    run_named,
    segment_of,
    variables,
)

F = TypeVar("F", bound=Callable[..., Any])
CheckpointPolicy = Callable[..., Any]
Run = Callable[..., list[Any]]
"""Evaluates a window."""

# Number of limits on the size of a segment that are tried.
_TRIALS = 200


class Window(NamedTuple):
    """Equations that are rematerialized together.

    Attributes:
      start: First equation of the inlined function.
      end: Equation after the last.
      is_loop: Whether it is a single scan, rematerialized by iteration.
      is_plain: Whether it saves all its residuals.
      saved: Names of arrays that are saved in addition to the inputs of the window.
      offloaded: Names of arrays that are moved to host memory, inputs included.
    """

    start: int
    end: int
    is_loop: bool = False
    is_plain: bool = False
    saved: frozenset[Name] = frozenset()
    offloaded: frozenset[Name] = frozenset()


def remat_windows(
    f: F, divide: Callable[[ClosedJaxpr], Sequence[Window]], policy: CheckpointPolicy | None = None
) -> F:
    """Divide a function into windows, each under a `jax.checkpoint` of its own.

    Args:
      f: A function of pytrees of arrays, with keyword arguments as for `remat_in_segments`.
      divide: Returns the windows of the inlined function.
      policy: What windows save that name no arrays. By default their inputs only.

    Returns:
      A function with the same arguments, values and gradients.
    """
    return evaluate_as(
        f,
        lambda closed, leaves, _: run_windows(closed, leaves, divide(closed), policy),
        first_alone=False,
    )


def trace_inlined(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ClosedJaxpr, list[Any], Any]:
    """Trace a function, and return its inlined jaxpr, its arguments and its result's structure."""
    with_static, arrays = bind_static(f, kwargs)
    leaves, structure = jax.tree.flatten((args, arrays))

    def flat(*leaves: Any) -> Any:
        args, arrays = jax.tree.unflatten(structure, leaves)
        return with_static(*args, **arrays)

    traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    return inline(traced), leaves, jax.tree.structure(shapes)


def evaluate_as(
    f: F,
    run: Callable[[ClosedJaxpr, list[Any], list[bool]], Sequence[Any]],
    *,
    first_alone: bool = True,
) -> F:
    """Evaluate a function as ``run`` does.

    ``run`` gets its equations, the arrays of its arguments, and which of these are a part of the
    first one. It returns the arrays of the results. With ``first_alone``, other arrays, also those
    that the function closes over, cannot be differentiated.
    """

    def fixed(a: Any) -> Any:
        can_be_differentiated = first_alone and isinstance(a, jax.Array) and is_floating(a)
        return constant(a) if can_be_differentiated else a

    # JAX keeps a traced function and uses it again, so the device is the current one.
    for_device = traced_for(tracing_platform())

    @functools.wraps(f)
    @for_device
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        closed, leaves, structure = trace_inlined(f, args, kwargs)
        count = len(jax.tree.leaves(args[:1]))
        leaves[count:] = map(fixed, leaves[count:])
        closed = ClosedJaxpr(closed.jaxpr, [*map(fixed, closed.consts)])
        differentiated = [i < count for i in range(len(leaves))]
        return jax.tree.unflatten(structure, run(closed, leaves, differentiated))

    return evaluated  # type: ignore[return-value]


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
    offloaded = frozenset[Name]().union(*(w.offloaded for w in windows))
    origins = array_names(jaxpr) if offloaded else {}
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [a.val if isinstance(a, Literal) else values[a] for a in atoms]

    for window in windows:
        loop = jaxpr.eqns[window.start] if window.is_loop else None
        if loop and not window.is_plain and not loop.effects:
            with in_scopes(loop):
                outputs = _remat_iterations(loop, read(loop.invars), window, policy)
            values |= zip(loop.outvars, outputs, strict=True)
            continue
        segment, effects = _without_effects(segment_of(jaxpr, window.start, window.end))
        is_whole = any(e.effects for e in segment.eqns)
        if is_whole:  # a jax.checkpoint would have the effects twice, or rejects them
            window = Window(window.start, window.end, is_plain=True)
        # The policy sees only names inside the checkpoint.
        names = [origins.get(v) for v in segment.invars]
        on_host = {n for n in names if n in offloaded and n is not None and not is_whole}
        chosen = window._replace(offloaded=window.offloaded | on_host)
        part = ClosedJaxpr(segment, [])
        run = inner(part) if inner else _named(part, chosen, names)
        if checkpoint and not window.is_plain:
            run = checkpoint(run, part)
        elif not window.is_plain or on_host:
            run = jax.checkpoint(run, policy=_checkpoint_policy(chosen, policy))
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


def _named(
    closed: ClosedJaxpr, window: Window, inputs: Sequence[Name | None]
) -> Callable[..., list[Any]]:
    """A jaxpr as a function that names the arrays of a window."""
    first = IN_LOOP if window.is_loop else window.start

    def name_of(i: int, j: int) -> str | None:
        name = (first + i, j)
        return as_text(name) if name in window.saved or name in window.offloaded else None

    def run(*args: Any) -> list[Any]:
        named = [
            checkpoint_name(a, as_text(n)) if n in window.saved | window.offloaded and n else a
            for a, n in zip(args, inputs, strict=True)
        ]
        return run_named(closed, named, name_of)

    return run


def _checkpoint_policy(window: Window, policy: CheckpointPolicy | None) -> CheckpointPolicy | None:
    saved, offloaded = ([as_text(n) for n in ns] for ns in (window.saved, window.offloaded))
    if offloaded:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    elif saved:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
    return AnyPrimitive(policy) if policy else None


def _remat_iterations(
    loop: JaxprEqn, inputs: Sequence[Any], window: Window, policy: CheckpointPolicy | None
) -> list[Any]:
    scan = Scan.of(loop)
    consts, carry, xs = scan.split(inputs)
    carries: list[Name | None] = [(CARRY, i) for i in range(scan.num_carry)]
    others: list[Name | None] = [None] * len(xs)
    names = [*([None] * len(consts)), *carries, *others]
    body = _named(inline(scan.body), window, names)

    def iteration(carry: list[Any], xs: Sequence[Any]) -> list[Any]:
        return body(*consts, *carry, *xs)

    with_remat = jax.checkpoint(
        iteration, prevent_cse=False, policy=_checkpoint_policy(window, policy)
    )

    return scan.evaluate(lambda carry, xs, _: (with_remat(carry, xs), None), carry, xs)[0]


def segments(closed: ClosedJaxpr, *, loops_on_host: bool = False, chunks: int = 1) -> list[Window]:
    """Divide an inlined function so that the saved bytes and the largest window are smallest.

    Args:
      closed: The inlined function.
      loops_on_host: Whether to move the carries of loops to host memory.
      chunks: Number of chunks in which a window runs, of which one is alive at a time.

    Returns:
      The windows. The last one is plain, unless it is a loop.
    """
    parts = pieces(closed.jaxpr)
    trials = _trials(parts)
    _, limit = min((saved + limit / chunks, limit) for limit, (saved, _) in trials.items())
    return _windows(closed, parts, trials[limit][1], loops_on_host)


def groups(closed: ClosedJaxpr, *, chunks: int) -> list[Window]:
    """Divide an inlined function into windows which are divided into `segments` again."""
    parts = pieces(closed.jaxpr)
    trials = _trials(parts)
    _, cuts = min((saved + limit / chunks, cuts) for limit, (saved, cuts) in trials.items())

    def saved_within(starts: Sequence[int]) -> int:
        bounds = itertools.pairwise([*starts, len(parts)])
        return max(sum(parts[c].passing for c in cuts if a < c < b) for a, b in bounds)

    _, starts = min((saved + saved_within(starts), starts) for saved, starts in trials.values())
    return _windows(closed, parts, starts)


def _trials(parts: Sequence[Piece]) -> dict[int, tuple[float, list[int]]]:
    """For limits on the size of a window: the bytes that pass, and the first piece of each."""
    sizes = [piece.made for piece in parts]
    before = [0, *itertools.accumulate(sizes)]
    least = max(sizes, default=0)
    limits = sorted({b - a for a, b in itertools.combinations(before, 2) if b - a >= least}) or [0]
    step = max(1, len(limits) // _TRIALS)
    return {limit: merge(parts, sizes, limit) for limit in limits[::step]}


def _windows(
    closed: ClosedJaxpr, parts: Sequence[Piece], starts: list[int], loops_on_host: bool = False
) -> list[Window]:
    windows = []
    for first, after in itertools.pairwise([*starts, len(parts)]):
        start, end, is_loop = parts[first].start, parts[after - 1].end, parts[first].is_loop
        offloaded: frozenset[Name] = frozenset()
        if loops_on_host and is_loop:
            num_carry = Scan.of(closed.jaxpr.eqns[start]).num_carry
            offloaded = frozenset((CARRY, i) for i in range(num_carry))
        plain = after == len(parts) and not is_loop
        windows.append(Window(start, end, is_loop, plain, offloaded=offloaded))
    return windows
