"""Recomputation of any function, segment by segment, cut where little passes between them."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fnet import jaxprs
from fnet.backward_pass import bind_static, recompute
from fnet.memory.peak import CANDIDATE_OPTIONS, peak, platform

F = TypeVar("F", bound=Callable[..., Any])
CheckpointPolicy = Callable[..., Any]

_LARGE_LOOP = 0.2  # share of everything kept from which on a loop is recomputed round by round
_TRIALS = 200  # how many limits on a segment's size are tried


def remat_in_segments(
    f: F, policy: CheckpointPolicy | None = None, *, loops_on_host: bool = False
) -> F:
    """``f``, whose backward pass keeps what passes between segments and recomputes each when due.

    ``f`` is traced and its equations are divided into segments, each under a
    ``jax.checkpoint`` of its own except the last, which is due at once. The cuts
    are chosen so that what they keep and the largest segment, which is alive
    while it is recomputed, are smallest together (Chen et al., "Training Deep
    Nets with Sublinear Memory Cost", 2016, for any function instead of a list of
    layers). A ``lax.scan`` that would keep a large share of everything keeps the
    carry of each round instead, and recomputes the round.

    One ``jax.checkpoint`` around a whole network saves nothing: it is all
    recomputed at once when the backward pass begins.

    Args:
      f: a function of pytrees of arrays that `jax.checkpoint` could wrap. Its
        arguments, parameters for example, are kept anyway and cost nothing; those by
        name that are a bool, a string or None, such as ``train``, stay as they are.
      policy: one of ``jax.checkpoint_policies``: what a segment, or the round of a loop,
        keeps beside its inputs; nothing by default.
      loops_on_host: whether the carries of loops are kept in the host's memory,
        which GPUs and TPUs can read (``pinned_host``); of their rounds nothing else is.

    Returns:
      A function with the same arguments, values and gradients. On CPU it takes
      effect only with the compiler options of `fnet.compile_step`.
    """

    @functools.wraps(f)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        with_switches, arrays = bind_static(f, kwargs)
        leaves, structure = jax.tree.flatten((args, arrays))

        def flat(*leaves: Any) -> Any:
            args, arrays = jax.tree.unflatten(structure, leaves)
            return with_switches(*args, **arrays)

        traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        inlined = jax.make_jaxpr(lambda *leaves: _inline(traced, leaves))(*leaves)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), _run(inlined, leaves, policy, loops_on_host)
        )

    return recomputing  # type: ignore[return-value]


def _run(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    policy: CheckpointPolicy | None,
    loops_on_host: bool,
) -> list[Any]:
    jaxpr = closed.jaxpr
    large = _large_loops(jaxpr)
    of_rounds = _ON_HOST if loops_on_host else policy
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)
    bounds = _cuts(jaxpr, large)
    for start, end in itertools.pairwise(bounds):
        if start in large:
            loop = jaxpr.eqns[start]
            with jaxprs.in_scopes(loop):
                out = _recompute_rounds(loop, _read(loop.invars, values), of_rounds)
            values |= zip(loop.outvars, out, strict=True)
            continue
        part = _part(jaxpr, start, end)
        run = jaxpr_as_fun(ClosedJaxpr(part, []))
        if end != len(jaxpr.eqns):
            run = jax.checkpoint(run, policy=policy)
        values |= zip(part.outvars, run(*(values[v] for v in part.invars)), strict=True)
    return _read(jaxpr.outvars, values)


def _read(atoms: Sequence[Any], values: dict[Var, Any]) -> list[Any]:
    return [a.val if isinstance(a, Literal) else values[a] for a in atoms]


def _inline(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates with the bodies of inner ``jax.jit`` calls in their place."""
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= zip(closed.jaxpr.invars, args, strict=True)
    for equation in closed.jaxpr.eqns:
        given = _read(equation.invars, values)
        if equation.primitive.name in ("jit", "pjit"):
            with jaxprs.in_scopes(equation):
                out = _inline(equation.params["jaxpr"], given)
        else:
            out = jaxprs.run(closed.jaxpr, equation, given)
        values |= zip(equation.outvars, out, strict=True)
    return _read(closed.jaxpr.outvars, values)


def _variables(atoms: Sequence[Any]) -> Iterator[Var]:
    return (a for a in atoms if not isinstance(a, Literal))


def _part(jaxpr: Jaxpr, start: int, end: int) -> Jaxpr:
    """Equations [start, end) as a jaxpr: it takes what it reads, gives what is read later."""
    eqns = jaxpr.eqns[start:end]
    made = dict.fromkeys(v for e in eqns for v in e.outvars)
    taken = dict.fromkeys(v for e in eqns for v in _variables(e.invars) if v not in made)
    later = {v for e in jaxpr.eqns[end:] for v in _variables(e.invars)}
    later |= set(_variables(jaxpr.outvars))
    part: Jaxpr = jaxpr.replace(
        eqns=eqns,
        constvars=[],
        invars=list(taken),
        outvars=[v for v in made if v in later],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return part


def _made_bytes(jaxpr: Jaxpr) -> list[int]:
    """What autodiff would keep of each equation at most: its results, of a loop in every round."""
    return [
        e.params["length"] * sum(_made_bytes(jaxprs.scan(e).body.jaxpr))
        if e.primitive.name == "scan"
        else sum(map(jaxprs.nbytes, e.outvars))
        for e in jaxpr.eqns
    ]


def _large_loops(jaxpr: Jaxpr) -> set[int]:
    made = _made_bytes(jaxpr)
    return {
        i
        for i, e in enumerate(jaxpr.eqns)
        if e.primitive.name == "scan"
        and made[i] > _LARGE_LOOP * sum(made)
        # A loop whose rounds are recomputed already is left as it is.
        and any(r.primitive.name not in jaxprs.CHECKPOINT for r in jaxprs.scan(e).body.jaxpr.eqns)
    }


_CARRY = "fnet_carry"
_ON_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_CARRY],
    offload_src="device",
    offload_dst="pinned_host",
)


def _recompute_rounds(
    loop: JaxprEqn, args: Sequence[Any], policy: CheckpointPolicy | None
) -> list[Any]:
    """The scan, each round under a `jax.checkpoint`."""
    scan = jaxprs.scan(loop)
    before = scan.constants + scan.carry
    constants, carry, rows = args[: scan.constants], args[scan.constants : before], args[before:]
    body = jaxpr_as_fun(scan.body)

    def round_(carry: list[Any], rows: Sequence[Any]) -> list[Any]:
        # The name is inside the checkpoint: the policy sees it.
        named = [checkpoint_name(c, _CARRY) for c in carry] if policy is _ON_HOST else carry
        results: list[Any] = body(*constants, *named, *rows)
        return results

    recomputed = jax.checkpoint(round_, prevent_cse=False, policy=policy)

    def step(carry: Any, rows: Any) -> Any:
        out = recomputed(carry, rows)
        return out[: scan.carry], out[scan.carry :]

    carry, stacked = scan.run(step, list(carry), list(rows))
    return [*carry, *stacked]


def _cuts(jaxpr: Jaxpr, large: set[int]) -> list[int]:
    """Positions between equations, from 0 to the last: those that keep least."""
    count = len(jaxpr.eqns)
    passing = _passing_bytes(jaxpr)
    forced = {i + side for i in large for side in (0, 1)}
    places = [
        i
        for i in range(count + 1)
        if i in (0, count)
        or i in forced
        or (passing[i] <= passing[i - 1] and passing[i] < passing[i + 1])
    ]
    made = [0 if i in large else b for i, b in enumerate(_made_bytes(jaxpr))]
    before = [0]
    for b in made:
        before.append(before[-1] + b)

    def division(limit: int) -> tuple[float, list[int]]:
        """Of the divisions into segments of up to ``limit`` bytes, the one that keeps least."""
        best: list[tuple[float, int]] = [(0.0, 0)]
        for j in range(1, len(places)):
            options = []
            for i in range(j - 1, -1, -1):
                if before[places[j]] - before[places[i]] > limit:
                    break
                options.append((best[i][0] + (passing[places[i]] if i else 0), i))
                if places[i] in forced:
                    break
            best.append(min(options))
        cuts, j = [places[-1]], len(places) - 1
        while j:
            j = best[j][1]
            cuts.append(places[j])
        return best[-1][0], cuts[::-1]

    # No division has a smaller largest segment than that between some two neighbours.
    least = max((before[b] - before[a] for a, b in itertools.pairwise(places)), default=0)
    between = {before[b] - before[a] for a in places for b in places if a < b}
    sizes = sorted(size for size in between if size >= least) or [0]
    trials = sizes[:: max(1, len(sizes) // _TRIALS)]
    best = min((division(limit)[0] + limit, limit) for limit in trials)
    return division(best[1])[1]


def _passing_bytes(jaxpr: Jaxpr) -> list[int]:
    """At each position, the bytes made before and read after; the arguments do not count."""
    changes = [0] * (len(jaxpr.eqns) + 2)
    made = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in _variables(e.invars) if v in made}
    for v, read in last.items():
        changes[made[v] + 1] += jaxprs.nbytes(v)
        changes[read + 1] -= jaxprs.nbytes(v)
    passing, total = [], 0
    for change in changes:
        total += change
        passing.append(total)
    return passing


class Policy(NamedTuple):
    """A way to spend arithmetic for memory.

    Attributes:
      saves: residuals that the backward pass reads, as a phrase.
      apply: a function of arrays -> one with the same values and gradients.
      platforms: where it works; empty means everywhere.
    """

    saves: str
    apply: Callable[[Any], Any]
    platforms: tuple[str, ...] = ()


_keep_products = functools.partial(remat_in_segments, policy=jax.checkpoint_policies.dots_saveable)
_offload = functools.partial(remat_in_segments, loops_on_host=True)

REMAT_POLICIES: dict[str, Policy] = {
    "none": Policy("all residuals", lambda f: f),
    "norms": Policy("the arrays that fnet's norms name", recompute),
    "dots": Policy("results of matrix products and convolutions", _keep_products),
    "segments": Policy("arrays that pass between segments", remat_in_segments),
    "offload": Policy("as segments, loop carries in host memory", _offload, ("gpu", "tpu")),
}
"""By name, from the least arithmetic to the most."""


def policies_for(platform: str) -> list[str]:
    """Names of the policies that work there; ``platform`` is that of a `jax.Device`."""
    family = "gpu" if platform in ("cuda", "rocm") else platform
    return [name for name, p in REMAT_POLICIES.items() if not p.platforms or family in p.platforms]


# What a compiler moves about by itself; a policy that works saves far more.
_LEAST_SAVING = 0.01


class RematReport(NamedTuple):
    """What a policy changed in a program, as its compiler counts it.

    Attributes:
      flops_before, flops_after: see `flops`.
      bytes_before, bytes_after: read and written by the program's operations; None
        where the compiler does not count them (GPUs).
      temporaries_before, temporaries_after: bytes held beside arguments and outputs.
    """

    flops_before: int
    flops_after: int
    bytes_before: int | None
    bytes_after: int | None
    temporaries_before: int
    temporaries_after: int

    @property
    def flops_ratio(self) -> float:
        """``flops_after / flops_before``: 1.33 where a whole forward pass is repeated."""
        return self.flops_after / max(self.flops_before, 1)

    @property
    def temporaries_ratio(self) -> float:
        """``temporaries_after / temporaries_before``."""
        return self.temporaries_after / max(self.temporaries_before, 1)


class RematError(ValueError):
    """A policy that was asked for and saves nothing in the compiled program."""


def check_remat(plain: jax.stages.Compiled, recomputed: jax.stages.Compiled) -> RematReport:
    """Checks that a recomputation policy reached the compiled program.

    It may not: a compiler that finds the same operation twice merges the two, and keeps
    the result between them as if nobody had asked to recompute it. JAX puts a
    barrier between them, which the CPU compiler of jax 0.10 drops by default.

    Args:
      plain: the program without the policy: ``jax.jit(f).lower(...).compile(...)``.
      recomputed: the same with it (`jax.checkpoint`, `fnet.recompute`). Compile both
        with the same options, which save memory of their own.

    Returns:
      Cost and bytes of both.

    Raises:
      RematError: if the second holds not even 1% less beside its arguments
        and outputs. The message gives both figures, and the reason: merged again
        (the arithmetic is the same), or recomputed and all held again.
    """
    found = RematReport(
        flops_before=flops(plain),
        flops_after=flops(recomputed),
        bytes_before=_moved(plain),
        bytes_after=_moved(recomputed),
        temporaries_before=peak(plain).temporaries,
        temporaries_after=peak(recomputed).temporaries,
    )
    if found.temporaries_after >= (1 - _LEAST_SAVING) * found.temporaries_before:
        raise RematError(_explain(found, platform(recomputed)))
    return found


def flops(compiled: jax.stages.Compiled) -> int:
    """Floating-point operations of a compiled program, of each loop those of one iteration.

    They are the compiler's own count. GPU compilers give none: there it is that of
    convolutions and matrix products, two operations a product, read from the
    program's text, padding included. Compare programs of one backend only.

    Args:
      compiled: ``jax.jit(f).lower(...).compile()``.
    """
    counted = _counted(compiled, "flops")
    return _products(compiled.as_text() or "") if counted is None else counted


def _moved(compiled: jax.stages.Compiled) -> int | None:
    return _counted(compiled, "bytes accessed")


def _counted(compiled: jax.stages.Compiled, what: str) -> int | None:
    """One of the compiler's own figures; XLA's GPU compiler gives none."""
    figures: dict[str, Any] = compiled.cost_analysis() or {}
    return int(figures[what]) if what in figures else None


def _explain(found: RematReport, backend: str) -> str:
    message = (
        f"the policy saves nothing: temporaries {found.temporaries_before:,} bytes "
        f"before, {found.temporaries_after:,} after, arithmetic times {found.flops_ratio:.3f}; "
    )
    if backend == "cpu":
        message += (
            "the CPU compiler of jax 0.10 drops the barriers behind jax.checkpoint (in its pass "
            "cse_barrier_expander) and merges what is computed twice: compile with "
            f"compiler_options={CANDIDATE_OPTIONS['cpu'][0]}, as fnet.compile_step does; "
            "if that was done: "
        )
    if found.flops_ratio > 1 + _LEAST_SAVING:
        return message + "what is recomputed together is held together: wrap parts, a block each"
    return message + (
        "nothing was kept before that the policy drops, or prevent_cse=False let the "
        "recomputation be merged"
    )


# %name = f32[4,16]{1,0} dot(%a, %b), attributes; of a tuple, the first part's shape.
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%([\w.-]+) = \(?\w+\[([\d,]*)\][^=]*? ([\w-]+)\(([^()]*)\)(.*)$", re.MULTILINE
)
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->\w+")
_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s\"?[=:][\[{]([\d,\"]*)[\]}]")


def _products(text: str) -> int:
    """Operations of the convolutions and matrix products in a program's text.

    A convolution with kernel k takes 2 |out| |k| / (its output channels), its two
    transposes as much; a product takes 2 |out| (length of what is contracted).
    """
    shapes: dict[str, tuple[int, ...]] = {}
    total = 0
    for name, dims, operation, given, attributes in _INSTRUCTION.findall(text):
        out = shapes[name] = tuple(int(d) for d in dims.split(",") if d)
        if operation not in ("dot", "convolution", "custom-call"):
            continue
        operands = [shapes.get(o, ()) for o in re.findall(r"%([\w.-]+)", given)]
        if labels := _LABELS.search(attributes):
            image, kernel = out, operands[1]
            if "convBackwardInput" in attributes:
                image = operands[0]
            elif "convBackwardFilter" in attributes:
                image, kernel = operands[1], out
            total += 2 * math.prod(image) * math.prod(kernel) // kernel[labels[1].index("o")]
        elif contracted := _CONTRACTED.search(attributes):
            axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
            total += 2 * math.prod(out) * math.prod(operands[0][axis] for axis in axes)
    return total
