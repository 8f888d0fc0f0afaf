"""Evaluate one linear function at N inputs, some of them at a time."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from fnet.cpu.convolutions import for_loops
from fnet.cpu.tracing import is_for_cpu
from fnet.jaxpr import called_jaxpr, interpret, nbytes, places_once, rewrite
from fnet.jaxpr.primitives import ConvGeneralDilated, DotGeneral
from fnet.mesh import equally_varying

Arrays = Sequence[Array]
Width = int | Literal["auto"]
"""How many inputs are evaluated at a time."""

CPU_CACHE_BYTES = 2**20
"""Bytes of inputs and intermediates that are evaluated at a time on CPUs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """A linear function of arrays, traced once.

    Attributes:
      jaxpr: the traced function.
      residuals: constants of the jaxpr, the same for every input.
    """

    jaxpr: Jaxpr = dataclasses.field(metadata={"static": True})
    residuals: list[Array]

    @classmethod
    def of(cls, f: Callable[..., Arrays], like: Arrays) -> "Linear":
        """Trace ``f(*arrays) -> arrays`` for arguments with the shapes and dtypes of ``like``."""
        closed = jax.make_jaxpr(lambda *arrays: list(f(*arrays)))(*like)
        return cls(closed.jaxpr, list(closed.consts))

    def __call__(self, inputs: Arrays) -> list[Array]:
        """Evaluate one input."""
        outputs: list[Array] = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.residuals))(*inputs)
        return outputs

    def evaluate_batch(self, inputs: Arrays) -> list[Array]:
        """Evaluate inputs that are stacked on a leading axis; the outputs are stacked too."""
        if inputs[0].shape[0] == 1:
            return [a[None] for a in self([a[0] for a in inputs])]
        closed = rewrite(
            ClosedJaxpr(self.jaxpr, self.residuals),
            _batchable_product,
            enter=lambda eqn: called_jaxpr(eqn) is not None,
        )
        outputs: list[Array] = jax.vmap(jaxpr_as_fun(closed))(*inputs)
        return outputs

    def evaluate(
        self, inputs: Arrays, n: int, width: Width, accumulators: Arrays | None = None
    ) -> list[Array]:
        """Evaluate ``n`` stacked inputs; see `evaluate_in_chunks`."""

        def chunk(start: Array | int, size: int) -> list[Array]:
            if size == n:
                return list(inputs)
            return [jax.lax.dynamic_slice_in_dim(a, start, size) for a in inputs]

        return self.evaluate_in_chunks(chunk, n, width, accumulators)

    def evaluate_in_chunks(
        self,
        inputs: Callable[[Array | int, int], Arrays],
        n: int,
        width: Width,
        accumulators: Arrays | None = None,
    ) -> list[Array]:
        """Evaluate ``n`` inputs, ``width`` at a time. The last chunk may be smaller.

        ``inputs(start, size)`` returns the stacked inputs from ``start`` on. Outputs are added to
        ``accumulators`` [n, ...], or to zeros.
        """
        if width == "auto":
            width = self.best_width(n, accumulate=accumulators is not None)
        if width >= n:
            outputs = self.evaluate_batch(inputs(0, n))
            return outputs if accumulators is None else list(map(jnp.add, accumulators, outputs))

        def add_chunk(sums: Arrays, start: Array | int, size: int) -> list[Array]:
            outputs = self.evaluate_batch(inputs(start, size))
            if accumulators is not None:
                outputs = [
                    jax.lax.dynamic_slice_in_dim(s, start, size) + o
                    for s, o in zip(sums, outputs, strict=True)
                ]
            return [
                jax.lax.dynamic_update_slice_in_dim(s, o, start, 0)
                for s, o in zip(sums, outputs, strict=True)
            ]

        shapes: list[Any] = [v.aval for v in self.jaxpr.outvars]
        if accumulators is None:
            sums = [jnp.zeros((n, *a.shape), a.dtype) for a in shapes]
        else:
            sums = list(accumulators)
        # Inside `jax.shard_map` the carry of a loop must vary over the same mesh axes from the
        # start as in the end.
        sums = equally_varying((sums, self.residuals, list(inputs(0, 1))), shapes)[0]
        chunks = n // width
        chunk = for_loops(lambda sums, i: add_chunk(sums, i * width, width))
        sums, _ = jax.lax.scan(lambda sums, i: (chunk(sums, i), None), sums, jnp.arange(chunks))
        return add_chunk(sums, chunks * width, n % width) if n % width else sums

    def best_width(self, n: int, accumulate: bool) -> int:
        """Return how many of ``n`` inputs at a time are fastest on the default backend.

        On CPUs a chunk should fit into the caches, `CPU_CACHE_BYTES`: all inputs of a small
        function, one input of a large one. If the outputs are larger than the intermediates
        and no convolution computes them, all inputs: a loop would copy each output into its
        place. On accelerators all inputs, since one input rarely fills them. With
        accumulators an eighth of the inputs, so that the outputs hardly exist twice.

        Args:
          n: number of inputs.
          accumulate: whether outputs are added to accumulators.
        """
        if not is_for_cpu():
            return max(n // 8, 1) if accumulate else n
        outputs = sum(map(nbytes, self.jaxpr.outvars))
        computed = self._bytes_per_input()
        may_loop = accumulate or any(ConvGeneralDilated.find(self.jaxpr))
        if not may_loop and outputs > max(computed - outputs, 0):
            return n
        per_input = sum(map(nbytes, self.jaxpr.invars)) + computed
        largest = max(CPU_CACHE_BYTES // max(per_input, 1), 1)
        return math.ceil(n / math.ceil(n / largest))

    def _bytes_per_input(self) -> int:
        """Return the bytes that the outermost equations compute for each input."""
        total = 0

        def handle(eqn: JaxprEqn, depends: list[bool]) -> list[bool]:
            nonlocal total
            if any(depends) and not (places_once(eqn) and len(eqn.invars) == 1):
                total += sum(map(nbytes, eqn.outvars))
            return [any(depends)] * len(eqn.outvars)

        closed = ClosedJaxpr(self.jaxpr, self.residuals)
        interpret(closed, [True] * len(self.jaxpr.invars), handle, constant=lambda _: False)
        return total


def _batchable_product(eqn: JaxprEqn) -> JaxprEqn:
    dot = DotGeneral.read(eqn)
    if dot is None:
        return eqn
    avals: list[Any] = [v.aval for v in eqn.invars]
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    (call,) = jax.make_jaxpr(_product(dot))(*operands).jaxpr.eqns
    new: JaxprEqn = eqn.replace(primitive=call.primitive, params=call.params)
    return new


def _product(dot: DotGeneral) -> Callable[[Array, Array], Array]:
    """Return the function of a ``dot_general`` with a batching rule that needs no copies.

    `jax.vmap` computes the product of a shared matrix with a batch as one larger product.
    Its batch axis lies inside of the result if the operand's own axes surround the
    contracted one, as for gradients and tangents of matrices. Moving it to the front copies
    all results. This rule computes one product per element of the batch instead: as one
    batched product, or in a loop on CPUs if the operands are larger than the results.
    """
    call = jax.custom_batching.custom_vmap(dot.bind)

    @call.def_vmap
    def _batched_product(n: int, batched: Sequence[bool], *operands: Array) -> tuple[Array, bool]:
        axes = [0 if b else None for b in batched]
        k = batched.index(True)
        _, summed, own = dot.axes(k)
        batch_comes_first = max(own, default=-1) < min(summed, default=0)
        if all(batched) or batch_comes_first:
            return jax.vmap(dot.bind, axes)(*operands), True
        if is_for_cpu() and operands[k][0].nbytes > nbytes(dot.eqn.outvars[0]):
            # XLA's CPU compiler would first transpose all matrices.
            shared = operands[1 - k]
            one = (lambda x: dot.bind(x, shared)) if k == 0 else (lambda x: dot.bind(shared, x))
            return jax.lax.map(one, operands[k]), True
        a, b = (
            x if is_batched else jnp.broadcast_to(x, (n, *x.shape))
            for x, is_batched in zip(operands, batched, strict=True)
        )
        return jax.vmap(dot.bind)(a, b), True

    return call
