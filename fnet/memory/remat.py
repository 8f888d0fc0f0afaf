"""Gradient checkpointing (remat, `jax.checkpoint`): policies and segments."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from fnet.backward_pass import recompute
from fnet.jaxpr import active_variables
from fnet.memory.apply import evaluate_as
from fnet.memory.pieces import Piece, merge, pieces
from fnet.memory.regions import divide, run_divided
from fnet.memory.tree import (
    PLAIN,
    CheckpointPolicy,
    Run,
    Tree,
    Window,
    checkpoint_of,
    remat_windows,
    run_windows,
    windows_of,
)

F = TypeVar("F", bound=Callable[..., Any])


def remat_in_segments(f: F, policy: CheckpointPolicy | None = None) -> F:
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
    return remat_windows(f, segments, policy)


_TRIALS = 200
"""Limits on the size of a segment that are tried."""
_CHUNKS = 16
"""Chunks of the rows of a segment, in `remat_nested`."""


def remat_nested(f: F, on_host: bool = False) -> F:
    """Divide a function into groups of segments, and run the rows of a segment in chunks.

    The backward pass saves only what passes from one group to the next. It rematerializes a group,
    of which it saves only what passes from one segment to the next, and then a segment in chunks.
    A stack of n equal blocks saves about ``2 sqrt(n)`` of their inputs in place of n, and never
    holds a whole hidden layer. The forward pass runs up to four times.

    Args:
      f: A function as for `remat_in_segments`, differentiated with respect to its first argument.
      on_host: Keep what passes from one segment to the next in the memory of the host, of a GPU or
        TPU, in place of groups. A stack of blocks saves none of their inputs on the device, and the
        forward pass runs up to three times.

    Returns:
      A function with the same arguments and values. Gradients are the same up to the order of sums.
    """

    def run(closed: ClosedJaxpr, leaves: list[Any], differentiated: list[bool]) -> list[Any]:
        active = active_variables(closed.jaxpr, differentiated)
        params = active.intersection(closed.jaxpr.invars)

        def rows(part: ClosedJaxpr) -> Run:
            division = divide(part, [v in active for v in part.jaxpr.invars], params=params)
            return lambda *args: run_divided(part, args, division, _CHUNKS)

        def group(part: ClosedJaxpr) -> Run:
            windows = segments(part, chunks=_CHUNKS)
            return lambda *args: run_windows(part, args, windows, inner=rows, checkpoint=again)

        again = checkpoint_of(closed, active)
        if on_host:
            windows = segments(closed, on_host=True, chunks=_CHUNKS)
            return run_windows(closed, leaves, windows, inner=rows, checkpoint=again)
        windows = groups(closed, chunks=_CHUNKS)
        return run_windows(closed, leaves, windows, inner=group, checkpoint=again)

    return evaluate_as(f, run)


def segments(closed: ClosedJaxpr, *, on_host: bool = False, chunks: int = 1) -> list[Window]:
    """Divide an inlined function so that the saved bytes and the largest window are smallest.

    Of ``chunks`` in which a window runs, one is alive at a time. The last window is plain, unless
    it is a loop. What passes ``on_host`` takes no bytes: windows are as large as chunks may be that
    are no larger than what passes, which is on the device while a window runs.
    """
    parts = pieces(closed.jaxpr)
    trials = _trials(parts)
    if on_host:
        passing = max(p.passing for p in parts)
        limit = max((limit for limit in trials if limit <= chunks * passing), default=min(trials))
    else:
        _, limit = min((saved + limit / chunks, limit) for limit, (saved, _) in trials.items())
    return _windows(parts, trials[limit][1], on_host)


def groups(closed: ClosedJaxpr, *, chunks: int) -> list[Window]:
    """Divide an inlined function into windows which are divided into `segments` again."""
    parts = pieces(closed.jaxpr)
    trials = _trials(parts)
    _, cuts = min((saved + limit / chunks, cuts) for limit, (saved, cuts) in trials.items())

    def saved_within(starts: Sequence[int]) -> int:
        bounds = itertools.pairwise([*starts, len(parts)])
        return max(sum(parts[c].passing for c in cuts if a < c < b) for a, b in bounds)

    _, starts = min((saved + saved_within(starts), starts) for saved, starts in trials.values())
    return _windows(parts, starts)


def _trials(parts: Sequence[Piece]) -> dict[int, tuple[float, list[int]]]:
    """For limits on the size of a window: the bytes that pass, and the first piece of each."""
    sizes = [piece.made for piece in parts]
    before = [0, *itertools.accumulate(sizes)]
    least = max(sizes, default=0)
    limits = sorted({b - a for a, b in itertools.combinations(before, 2) if b - a >= least}) or [0]
    step = max(1, len(limits) // _TRIALS)
    return {limit: merge(parts, sizes, limit) for limit in limits[::step]}


def _windows(parts: Sequence[Piece], starts: list[int], on_host: bool = False) -> list[Window]:
    windows = [w._replace(is_on_host=on_host) for w in windows_of(parts, starts)]
    if windows and not windows[-1].is_loop:
        windows[-1] = windows[-1]._replace(least=None, is_on_host=False)
    return windows


class Policy(NamedTuple):
    """A remat policy: what the backward pass saves, and what it rematerializes.

    Attributes:
      name: Its key in `REMAT_POLICIES`, or ``planned`` for a policy of `fnet.memory.plan`.
      saves: Description of the residuals that are saved.
      apply: Wraps a function of arrays. The values and gradients stay the same.
      platforms: Platforms it works on. Empty for all.
      tree: The tree of a planned policy, of which ``apply`` is a method; see `fnet.memory.tree`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> list(memory.REMAT_POLICIES)
      ['none', 'norms', 'dots', 'segments', 'nested', 'offload']
      >>> memory.REMAT_POLICIES["dots"].saves
      'results of matrix products and convolutions'
      >>> loss = memory.REMAT_POLICIES["segments"].apply(lambda x: jnp.cos(x).sum())
      >>> float(loss(jnp.zeros(3)))
      3.0
    """

    name: str
    saves: str
    apply: Callable[[Any], Any]
    platforms: tuple[str, ...] = ()
    tree: Tree | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks in which regions of the function run; see `fnet.memory.regions`."""
        return self.tree.chunks if self.tree else 1

    @classmethod
    def of(cls, tree: "Tree | Policy") -> "Policy":
        """The policy of a tree."""
        if isinstance(tree, Policy):
            return tree
        if tree == PLAIN:
            return REMAT_POLICIES["none"]
        return cls(tree.name, str(tree), tree.apply, tree=tree)

    def __str__(self) -> str:
        return self.name


class _Policies(dict[str, Policy]):
    def __getitem__(self, policy: str | Policy) -> Policy:
        return policy if isinstance(policy, Policy) else super().__getitem__(policy)


_save_dots = functools.partial(remat_in_segments, policy=jax.checkpoint_policies.dots_saveable)
_offload = functools.partial(remat_nested, on_host=True)


REMAT_POLICIES = _Policies(
    (p.name, p)
    for p in (
        Policy("none", "all residuals", lambda f: f),
        Policy("norms", "the arrays that fnet's norms name", recompute),
        Policy("dots", "results of matrix products and convolutions", _save_dots),
        Policy("segments", "arrays that pass between segments", remat_in_segments),
        Policy("nested", "arrays that pass between groups of segments", remat_nested),
        Policy("offload", "what passes between segments, on the host", _offload, ("gpu", "tpu")),
    )
)
"""Remat policies by name, from the fewest additional FLOPs to the most.

A policy of a plan is its own key: ``REMAT_POLICIES[policy]`` takes a name or a policy.
"""


def policies_for(platform: str) -> list[str]:
    """Return the names of the policies that work on a `jax.Device.platform`."""
    family = "gpu" if platform in ("cuda", "rocm") else platform
    return [name for name, p in REMAT_POLICIES.items() if not p.platforms or family in p.platforms]
