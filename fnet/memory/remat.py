"""Gradient checkpointing (remat, `jax.checkpoint`): policies, segments, check of the result."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fnet.backward_pass import bind_static, recompute
from fnet.jaxpr import CHECKPOINT, Scan, in_scopes, inline, nbytes
from fnet.memory import hlo
from fnet.memory.peak import CANDIDATE_OPTIONS, peak, platform

F = TypeVar("F", bound=Callable[..., Any])
CheckpointPolicy = Callable[..., Any]

# A loop that makes more than this share of all bytes is rematerialized iteration by iteration.
_LARGE_LOOP = 0.2
# Number of limits on the size of a segment that are tried.
_TRIALS = 200


def remat_in_segments(
    f: F, policy: CheckpointPolicy | None = None, *, loops_on_host: bool = False
) -> F:
    """Divide a function into segments and rematerialize each in the backward pass.

    The backward pass saves only the arrays that pass from one segment to the next. ``f`` is
    traced and its equations are divided into segments, each under a `jax.checkpoint` of its own.
    The last segment needs none. The cuts minimize the sum of what they save and of the largest
    segment, which is alive while it is rematerialized. A ``lax.scan`` that would save a large
    share of all bytes saves the carry of each iteration instead.

    A single `jax.checkpoint` around a whole network saves no memory, because the whole network is
    rematerialized when the backward pass begins.

    On CPU it has an effect only with the compiler options that `fnet.compile_step` uses.

    Args:
      f: A function of pytrees of arrays. Keyword arguments that are a bool, a string or None,
        such as ``train=True``, are static.
      policy: One of ``jax.checkpoint_policies``: what a segment or an iteration saves besides its
        inputs. By default nothing.
      loops_on_host: Whether the carries of large loops are offloaded to host memory
        (``pinned_host``, on GPU and TPU). ``policy`` then applies outside of these loops only.

    Returns:
      A function with the same arguments, values and gradients.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> def loss(params, x):
      ...     for w in params:
      ...         x = jnp.tanh(jnp.tanh(x @ w) * x)
      ...     return x.sum()
      >>> params, x = [jnp.zeros((16, 16))] * 16, jnp.zeros((32, 16))
      >>> def saved_bytes(f):
      ...     return sum(r.added for r in memory.residuals(f, params, x))
      >>> saved_bytes(memory.remat_in_segments(loss)) < saved_bytes(loss) / 2
      True

    References:
      Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, for a list of layers.
      Here for any function.
    """

    @functools.wraps(f)
    def with_remat(*args: Any, **kwargs: Any) -> Any:
        with_static, arrays = bind_static(f, kwargs)
        leaves, structure = jax.tree.flatten((args, arrays))

        def flat(*leaves: Any) -> Any:
            args, arrays = jax.tree.unflatten(structure, leaves)
            return with_static(*args, **arrays)

        traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        results = _run_segments(inline(traced), leaves, policy, loops_on_host)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return with_remat  # type: ignore[return-value]


class Policy(NamedTuple):
    """A remat policy: what the backward pass saves, and what it rematerializes.

    Attributes:
      saves: Description of the residuals that are saved.
      apply: Wraps a function of arrays. The values and gradients stay the same.
      platforms: Platforms it works on. Empty for all.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> list(memory.REMAT_POLICIES)
      ['none', 'norms', 'dots', 'segments', 'offload']
      >>> memory.REMAT_POLICIES["dots"].saves
      'results of matrix products and convolutions'
      >>> loss = memory.REMAT_POLICIES["segments"].apply(lambda x: jnp.cos(x).sum())
      >>> float(loss(jnp.zeros(3)))
      3.0
    """

    saves: str
    apply: Callable[[Any], Any]
    platforms: tuple[str, ...] = ()


_save_dots = functools.partial(remat_in_segments, policy=jax.checkpoint_policies.dots_saveable)
_offload = functools.partial(remat_in_segments, loops_on_host=True)

REMAT_POLICIES: dict[str, Policy] = {
    "none": Policy("all residuals", lambda f: f),
    "norms": Policy("the arrays that fnet's norms name", recompute),
    "dots": Policy("results of matrix products and convolutions", _save_dots),
    "segments": Policy("arrays that pass between segments", remat_in_segments),
    "offload": Policy("as segments, loop carries in host memory", _offload, ("gpu", "tpu")),
}
"""Remat policies by name, from the fewest additional FLOPs to the most."""


def policies_for(platform: str) -> list[str]:
    """Return the names of the policies that work on a `jax.Device.platform`."""
    family = "gpu" if platform in ("cuda", "rocm") else platform
    return [name for name, p in REMAT_POLICIES.items() if not p.platforms or family in p.platforms]


# Segments.


def _run_segments(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    policy: CheckpointPolicy | None,
    loops_on_host: bool,
) -> list[Any]:
    """Evaluate a jaxpr segment by segment, each under a `jax.checkpoint`."""
    jaxpr = closed.jaxpr
    large = _large_loops(jaxpr)
    loop_policy = _ON_HOST if loops_on_host else policy
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [a.val if isinstance(a, Literal) else values[a] for a in atoms]

    for start, end in itertools.pairwise(_cuts(jaxpr, large)):
        if start in large:
            loop = jaxpr.eqns[start]
            with in_scopes(loop):
                outputs = _remat_iterations(loop, read(loop.invars), loop_policy)
            values |= zip(loop.outvars, outputs, strict=True)
            continue
        segment = _segment(jaxpr, start, end)
        run = jaxpr_as_fun(ClosedJaxpr(segment, []))
        if end != len(jaxpr.eqns):
            run = jax.checkpoint(run, policy=policy)
        values |= zip(segment.outvars, run(*read(segment.invars)), strict=True)
    return read(jaxpr.outvars)


def _segment(jaxpr: Jaxpr, start: int, end: int) -> Jaxpr:
    """Equations [start, end) as a jaxpr, from the variables they read to those read later."""
    eqns = jaxpr.eqns[start:end]
    made = dict.fromkeys(v for e in eqns for v in e.outvars)
    inputs = dict.fromkeys(v for e in eqns for v in _variables(e.invars) if v not in made)
    read_later = {v for e in jaxpr.eqns[end:] for v in _variables(e.invars)}
    read_later |= set(_variables(jaxpr.outvars))
    segment: Jaxpr = jaxpr.replace(
        eqns=eqns,
        constvars=[],
        invars=list(inputs),
        outvars=[v for v in made if v in read_later],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return segment


def _variables(atoms: Sequence[Any]) -> Iterator[Var]:
    return (a for a in atoms if not isinstance(a, Literal))


def _made_bytes(jaxpr: Jaxpr) -> list[int]:
    """Bytes of the results of each equation, and for a loop of all iterations.

    This bounds what autodiff saves of the equation.
    """
    return [
        e.params["length"] * sum(_made_bytes(Scan.of(e).body.jaxpr))
        if e.primitive.name == "scan"
        else sum(map(nbytes, e.outvars))
        for e in jaxpr.eqns
    ]


def _large_loops(jaxpr: Jaxpr) -> set[int]:
    """Positions of the loops to rematerialize iteration by iteration."""
    made = _made_bytes(jaxpr)
    return {
        i
        for i, e in enumerate(jaxpr.eqns)
        if e.primitive.name == "scan"
        and made[i] > _LARGE_LOOP * sum(made)
        # A loop whose iterations are under a jax.checkpoint already does not change.
        and any(inner.primitive.name not in CHECKPOINT for inner in Scan.of(e).body.jaxpr.eqns)
    }


_CARRY = "fnet_carry"
_ON_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_CARRY],
    offload_src="device",
    offload_dst="pinned_host",
)


def _remat_iterations(
    loop: JaxprEqn, inputs: Sequence[Any], policy: CheckpointPolicy | None
) -> list[Any]:
    """Evaluate a scan with each iteration under a `jax.checkpoint`."""
    scan = Scan.of(loop)
    consts, carry, xs = scan.split(inputs)
    body = jaxpr_as_fun(scan.body)

    def iteration(carry: list[Any], xs: Sequence[Any]) -> list[Any]:
        # The policy sees only names inside the checkpoint.
        named = [checkpoint_name(c, _CARRY) for c in carry] if policy is _ON_HOST else carry
        results: list[Any] = body(*consts, *named, *xs)
        return results

    with_remat = jax.checkpoint(iteration, prevent_cse=False, policy=policy)

    def step(carry: Any, xs: Any) -> Any:
        results = with_remat(carry, xs)
        return results[: scan.num_carry], results[scan.num_carry :]

    carry, ys = scan.run(step, carry, xs)
    return [*carry, *ys]


def _cuts(jaxpr: Jaxpr, large: set[int]) -> list[int]:
    """Positions between equations where segments begin and end, from 0 to the last."""
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
    made_before = [0, *itertools.accumulate(made)]

    def division(limit: int) -> tuple[float, list[int]]:
        """The saved bytes and the cuts of the best segments of up to ``limit`` bytes."""
        best: list[tuple[float, int]] = [(0.0, 0)]
        for j in range(1, len(places)):
            options = []
            for i in range(j - 1, -1, -1):
                if made_before[places[j]] - made_before[places[i]] > limit:
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

    # The largest segment is at least the largest one between two neighboring places.
    sizes = {made_before[b] - made_before[a] for a in places for b in places if a < b}
    neighbors = itertools.pairwise(places)
    least = max((made_before[b] - made_before[a] for a, b in neighbors), default=0)
    limits = sorted(size for size in sizes if size >= least) or [0]
    trials = limits[:: max(1, len(limits) // _TRIALS)]
    _, best_limit = min((division(limit)[0] + limit, limit) for limit in trials)
    return division(best_limit)[1]


def _passing_bytes(jaxpr: Jaxpr) -> list[int]:
    """Bytes that are made before each position and read after it, without arguments."""
    changes = [0] * (len(jaxpr.eqns) + 2)
    made = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in _variables(e.invars) if v in made}
    for v, read in last.items():
        changes[made[v] + 1] += nbytes(v)
        changes[read + 1] -= nbytes(v)
    return list(itertools.accumulate(changes))


# A check of the compiled program.

# A compiler moves this share of the temporaries by itself. A policy that works saves far more.
_LEAST_SAVING = 0.01


class RematReport(NamedTuple):
    """Effect of rematerialization on a compiled program.

    Attributes:
      flops_before: FLOPs without rematerialization; see `flops`.
      flops_after: FLOPs with it.
      bytes_before: Bytes read and written by all operations, or None if the compiler does not
        count them (GPUs).
      bytes_after: The same with rematerialization.
      temporaries_before: Bytes of temporaries.
      temporaries_after: The same with rematerialization.
    """

    flops_before: int
    flops_after: int
    bytes_before: int | None
    bytes_after: int | None
    temporaries_before: int
    temporaries_after: int

    @property
    def flops_ratio(self) -> float:
        """``flops_after / flops_before``: 1.33 if the whole forward pass runs twice."""
        return self.flops_after / max(self.flops_before, 1)

    @property
    def temporaries_ratio(self) -> float:
        """``temporaries_after / temporaries_before``."""
        return self.temporaries_after / max(self.temporaries_before, 1)


class RematError(ValueError):
    """A remat policy that saves no memory in the compiled program."""


def check_remat(plain: jax.stages.Compiled, remat: jax.stages.Compiled) -> RematReport:
    """Check that rematerialization saves memory in the compiled program.

    XLA can undo it: common-subexpression elimination merges an operation with its
    rematerialization, and the result stays alive in between. JAX puts a barrier between the two,
    which the CPU compiler of jax 0.10 drops by default.

    Args:
      plain: The program without remat policy, ``jax.jit(f).lower(...).compile(...)``.
      remat: The same program with `jax.checkpoint`, `fnet.recompute` or a remat policy. Compile
        both with the same options, which save memory themselves.

    Returns:
      FLOPs and bytes of both programs.

    Raises:
      RematError: If the temporaries shrink by less than 1 %. The message gives the numbers and the
        reason: merged by XLA (equal FLOPs), or rematerialized all at once.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> def loss(params, x):
      ...     for w in params:
      ...         x = jnp.tanh(jnp.tanh(x @ w) * x)
      ...     return x.sum()
      >>> args = [jnp.zeros((64, 64))] * 6, jnp.zeros((256, 64))
      >>> options = memory.CANDIDATE_OPTIONS["cpu"][0]
      >>> def compiled(f):
      ...     return jax.jit(jax.grad(f)).lower(*args).compile(options)
      >>> report = memory.check_remat(compiled(loss), compiled(memory.remat_in_segments(loss)))
      >>> 1 < report.flops_ratio < 4 / 3, report.temporaries_ratio < 0.7
      (True, True)
    """
    report = RematReport(
        flops_before=flops(plain),
        flops_after=flops(remat),
        bytes_before=_cost(plain, "bytes accessed"),
        bytes_after=_cost(remat, "bytes accessed"),
        temporaries_before=peak(plain).temporaries,
        temporaries_after=peak(remat).temporaries,
    )
    if report.temporaries_after >= (1 - _LEAST_SAVING) * report.temporaries_before:
        raise RematError(_explain(report, platform(remat)))
    return report


def flops(compiled: jax.stages.Compiled) -> int:
    """Count the floating-point operations of a compiled program. A loop counts one iteration.

    This is the compiler's own number. GPU compilers give none. For them it is the FLOPs of
    convolutions and matrix products in the program, including padding. Compare programs of one
    backend only.

    Args:
      compiled: The compiled program, ``jax.jit(f).lower(...).compile()``.
    """
    counted = _cost(compiled, "flops")
    return _product_flops(compiled.as_text() or "") if counted is None else counted


def _cost(compiled: jax.stages.Compiled, name: str) -> int | None:
    """A number of the compiler's cost analysis. XLA's GPU compiler gives none."""
    costs: dict[str, Any] = compiled.cost_analysis() or {}
    return int(costs[name]) if name in costs else None


def _explain(report: RematReport, backend: str) -> str:
    message = (
        f"the policy saves no memory: temporaries {report.temporaries_before:,} bytes before, "
        f"{report.temporaries_after:,} after, FLOPs times {report.flops_ratio:.3f}. "
    )
    if report.flops_ratio > 1 + _LEAST_SAVING:
        message += "Everything is rematerialized at once: wrap each block by itself."
    else:
        message += (
            "XLA merged the rematerialized operations with the original ones (prevent_cse=False), "
            "or the program had no residuals that the policy drops."
        )
    if backend == "cpu":
        message += (
            " The CPU compiler of jax 0.10 always merges them, unless you compile with "
            f"compiler_options={CANDIDATE_OPTIONS['cpu'][0]}, as fnet.compile_step does."
        )
    return message


_KERNEL_LABELS = r"dim_labels=\w+_(\w+)->\w+"
_CONTRACTED = r"lhs_contracting_dim(?:ension)?s\"?[=:][\[{]([\d,\"]*)[\]}]"


def _product_flops(text: str) -> int:
    """FLOPs of the convolutions and matrix products in a program's text.

    A convolution and each of its two transposes take ``2 |output| |kernel| / output channels``,
    a matrix product ``2 |output| (contracted length)``.
    """
    total = 0
    for computation in hlo.read(text).computations.values():
        shapes = {i.name: _first_shape(i) for i in computation}
        for i in computation:
            if i.opcode not in ("dot", "convolution", "custom-call"):
                continue
            out, operands = shapes[i.name], [shapes[name] for name in i.operands]
            if labels := i.attribute(_KERNEL_LABELS):
                image, kernel = out, operands[1]
                if "convBackwardInput" in i.attributes:
                    image = operands[0]
                elif "convBackwardFilter" in i.attributes:
                    image, kernel = operands[1], out
                total += 2 * math.prod(image) * math.prod(kernel) // kernel[labels.index("o")]
            elif contracted := i.attribute(_CONTRACTED):
                axes = [int(axis) for axis in re.findall(r"\d+", contracted)]
                total += 2 * math.prod(out) * math.prod(operands[0][axis] for axis in axes)
    return total


def _first_shape(instruction: hlo.Instruction) -> tuple[int, ...]:
    arrays = list(hlo.arrays(instruction.result).values())
    return arrays[0].shape if arrays else ()
