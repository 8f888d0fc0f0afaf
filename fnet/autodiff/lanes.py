"""One linear function at many arguments: how many of them at a time, and in which layout."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.extend
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from fnet import jaxprs
from fnet.autodiff.accumulate import convolutions, is_in_fast_layout
from fnet.mesh import equally_varying

Arrays = Sequence[Array]
Width = int | Literal["auto"]
"""How many lanes exist at a time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """A linear function of arrays, traced once, to be evaluated at many arguments (lanes).

    Attributes:
      jaxpr: its equations.
      residuals: what it closes over, the same for every lane.
    """

    jaxpr: Jaxpr
    residuals: list[Array]

    @classmethod
    def of(cls, f: Callable[..., Arrays], like: Arrays) -> "Linear":
        """Traces ``f(*arrays) -> arrays`` for arguments of the types of ``like``."""
        closed = jax.make_jaxpr(lambda *lane: list(f(*lane)))(*like)
        return cls(closed.jaxpr, list(closed.consts))

    def one(self, lane: Arrays) -> list[Array]:
        """Its results for one lane."""
        results: list[Array] = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.residuals))(*lane)
        return results

    def at_once(self, lanes: Arrays) -> list[Array]:
        """Its results for lanes stacked on a leading axis, stacked likewise."""
        if lanes[0].shape[0] == 1:
            return [a[None] for a in self.one([a[0] for a in lanes])]
        laid_out = _products_by_lane(self.jaxpr, [True] * len(self.jaxpr.invars))[0]
        results: list[Array] = jax.vmap(jaxpr_as_fun(ClosedJaxpr(laid_out, self.residuals)))(*lanes)
        return results

    def over(self, lanes: Arrays, n: int, width: Width, sums: Arrays | None = None) -> list[Array]:
        """Its results for ``n`` stacked lanes, added to ``sums``; `in_chunks` of ``width``."""

        def some(start: Array | int, size: int) -> list[Array]:
            if size == n:
                return list(lanes)
            return [jax.lax.dynamic_slice_in_dim(a, start, size) for a in lanes]

        return self.in_chunks(some, n, width, sums)

    def in_chunks(
        self,
        lanes: Callable[[Array | int, int], Arrays],
        n: int,
        width: Width,
        sums: Arrays | None = None,
    ) -> list[Array]:
        """Its results for ``n`` lanes, ``width`` at a time, the last ones fewer.

        Args:
          lanes: ``lanes(start, size)``, the stacked arguments from lane ``start`` on.
          n: how many lanes there are.
          width: how many are evaluated at once: only so many exist beside the
            results; "auto" is `best_width`.
          sums: [n, ...] to which the results are added; None: 0.
        """
        if width == "auto":
            width = self.best_width(n, accumulated=sums is not None)
        if width >= n:
            results = self.at_once(lanes(0, n))
            return results if sums is None else list(map(jnp.add, sums, results))

        def chunk(sums: Arrays, start: Array | int, size: int) -> list[Array]:
            results = self.at_once(lanes(start, size))
            if fresh:
                return [_write(s, r, start) for s, r in zip(sums, results, strict=True)]
            return [
                _write(s, jax.lax.dynamic_slice_in_dim(s, start, size) + r, start)
                for s, r in zip(sums, results, strict=True)
            ]

        fresh = sums is None
        if sums is None:
            shapes: list[Any] = [v.aval for v in self.jaxpr.outvars]
            sums = [jnp.zeros((n, *a.shape), a.dtype) for a in shapes]
        # Inside `jax.shard_map` what a loop carries varies from the start as in the end.
        carry = equally_varying((list(sums), self.residuals, list(lanes(0, 1))))[0]
        chunks = n // width
        if self.loops_are_slow:
            for i in range(chunks):
                carry = chunk(carry, i * width, width)
        else:
            carry, _ = jax.lax.scan(
                lambda carry, i: (chunk(carry, i * width, width), None), carry, jnp.arange(chunks)
            )
        return chunk(carry, chunks * width, n % width) if n % width else carry

    def best_width(self, n: int, accumulated: bool) -> int:
        """How many of ``n`` lanes at a time take the least time on the default backend.

        On CPUs lanes share caches: as many as fit into `CPU_LANES_BYTES`, which is
        all of them for small functions and one for large. But where new results are
        larger than what is between, and no convolution makes them, all at once: what a
        loop gains it would lose by copying each into its place. On accelerators all,
        since one lane rarely fills them; an eighth where results are added to others,
        so that they hardly exist twice.

        Args:
          n: how many lanes there are.
          accumulated: whether results are added to what is there.
        """
        if jax.default_backend() != "cpu":
            return max(n // 8, 1) if accumulated else n
        made = sum(jaxprs.nbytes(v) for v in _made_by_lanes(self.jaxpr))
        results = sum(jaxprs.nbytes(v) for v in self.jaxpr.outvars)
        between = max(made - results, 0)
        has_convolutions = any(convolutions(self.jaxpr))
        if not accumulated and not has_convolutions and results > between:
            return n
        given = sum(jaxprs.nbytes(v) for v in self.jaxpr.invars)
        most = max(CPU_LANES_BYTES // max(given + made, 1), 1)
        return math.ceil(n / math.ceil(n / most))

    @functools.cached_property
    def loops_are_slow(self) -> bool:
        """Whether chunks are written out one after the other, as `accumulate_grad` has them.

        On CPUs, in a loop, a convolution in another layout than XLA's own takes 10 to
        90 times as long; those of a backward pass are. Written out, the compiler may
        begin one chunk before it ends another: ``width`` then does not bound memory.
        """
        return jax.default_backend() == "cpu" and not all(
            is_in_fast_layout(eqn) for eqn in convolutions(self.jaxpr)
        )


CPU_LANES_BYTES = 2**20
"""What of the lanes is alive at once on CPUs, by `Linear.best_width`."""


def _write(s: Array, r: Array, start: Array | int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(s, r, start, 0)


def _made_by_lanes(jaxpr: Jaxpr) -> list[Any]:
    """Results of the outermost equations that differ from lane to lane, each array once."""
    differing = set(jaxpr.invars)
    made = []
    for eqn in jaxpr.eqns:
        if any(v in differing for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)):
            differing.update(eqn.outvars)
            if eqn.primitive.name not in _SAME_ELEMENTS:
                made += eqn.outvars
    return made


# They give the array another layout or name, not another array.
_SAME_ELEMENTS = {"transpose", "reshape", "squeeze", "expand_dims", "optimization_barrier"}


def _products_by_lane(jaxpr: Jaxpr, laned: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """The same equations, whose products of a lane with what all lanes share are `_product`.

    Args:
      jaxpr: equations, those of calls and of `jax.checkpoint` included; those of
        loops and branches stay as they are.
      laned: of each input, whether it differs from lane to lane.

    Returns:
      The equations, and of each output, whether it differs.
    """
    differs = dict(zip(jaxpr.invars, laned, strict=True))

    def of(v: Any) -> bool:
        return not isinstance(v, jax.extend.core.Literal) and differs.get(v, False)

    eqns = []
    for eqn in jaxpr.eqns:
        given = [of(v) for v in eqn.invars]
        results = [any(given)] * len(eqn.outvars)
        if eqn.primitive.name == "dot_general" and sum(given) == 1:
            operands: list[Any] = [v.aval for v in eqn.invars]
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
            (call,) = jax.make_jaxpr(_product(eqn))(*shapes).jaxpr.eqns
            eqn = eqn.replace(primitive=call.primitive, params=call.params)
        elif eqn.primitive.name in _CALLS and any(given):
            called = eqn.params["jaxpr"]
            plain = called.jaxpr if isinstance(called, ClosedJaxpr) else called
            plain, results = _products_by_lane(plain, given)
            new = called.replace(jaxpr=plain) if isinstance(called, ClosedJaxpr) else plain
            eqn = eqn.replace(params=eqn.params | {"jaxpr": new})
        differs |= zip(eqn.outvars, results, strict=True)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), [of(v) for v in jaxpr.outvars]


_CALLS = {"jit", "pjit", *jaxprs.CHECKPOINT}


def _product(eqn: JaxprEqn) -> Callable[[Array, Array], Array]:
    """A ``dot_general`` whose result over lanes lies lane by lane.

    `jax.vmap` makes one product of what all lanes share and of the lanes side by
    side, which puts the lane's axis within the result wherever the lane's own
    axes surround the contracted one (gradients and tangents of matrices), and
    then moves it to the front: a copy as large as all results. Here such a
    product is as many products, each of which lies where it is wanted: in one
    batched product, or on CPUs, where the lanes' operands are larger than their
    results, one after the other.
    """
    dot = functools.partial(eqn.primitive.bind, **eqn.params)
    (contracted, batch) = eqn.params["dimension_numbers"]
    call = jax.custom_batching.custom_vmap(dot)

    @call.def_vmap
    def _over_lanes(n: int, batched: Sequence[bool], *operands: Array) -> tuple[Array, bool]:
        lane = 0 if batched[0] else 1
        free = set(range(operands[lane].ndim - 1)).difference(contracted[lane], batch[lane])
        if all(batched) or max(free, default=-1) < min(contracted[lane], default=0):
            return jax.vmap(dot, [0 if b else None for b in batched])(*operands), True
        result = jaxprs.nbytes(eqn.outvars[0])
        if jax.default_backend() == "cpu" and operands[lane][0].nbytes > result:
            # XLA's CPU compiler would bring all matrices into another layout first.
            one = (lambda x: dot(x, operands[1])) if lane == 0 else (lambda x: dot(operands[0], x))
            return jax.lax.map(one, operands[lane]), True
        a, b = (
            x if is_lane else jnp.broadcast_to(x, (n, *x.shape))
            for x, is_lane in zip(operands, batched, strict=True)
        )
        return jax.vmap(dot)(a, b), True

    return call
