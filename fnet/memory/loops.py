"""Loops in chunks: a `jax.lax.scan` whose backward pass saves the carry of few iterations.

A scan of L iterations becomes a scan of chunks, each under a `jax.checkpoint`. A chunk is a scan of
iterations, or of smaller chunks. With chunks of the square root of L, the backward pass saves about
``2 sqrt(L)`` carries in place of L, for one more forward pass.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from fnet.jaxpr import (
    AnyPrimitive,
    Scan,
    active_variables,
    call_like,
    called_jaxpr,
    evaluate,
    in_scopes,
    inline,
    interpret,
    is_checkpoint,
    is_floating,
    is_reference,
    nbytes,
    switch,
)
from fnet.jaxpr.primitives import Cond, product
from fnet.memory.apply import evaluate_as, variables
from fnet.memory.cost import Cost, equation_cost
from fnet.memory.residuals import linearize

F = TypeVar("F", bound=Callable[..., Any])

Sizes = tuple[int, ...]
"""Iterations of a chunk, of the chunks in it, and so on."""

# Additional forward passes that are tried, and the share of the iterations that they run again.
_TRIED = ((0, 1.0), (1, 0.25), (1, 0.5), (1, 0.75), (1, 1.0), (2, 1.0), (3, 1.0))

# More FLOPs must save at least this share of what the plain loops save.
_LEAST_SAVING = 0.005
_PRODUCTS = AnyPrimitive(jax.checkpoint_policies.dots_saveable)
# Sizes that are tried besides the divisors of a length, per factor of 2.
_SIZES_PER_OCTAVE = 2


class Chunks(NamedTuple):
    """How a loop is divided.

    Attributes:
      sizes: Iterations of a chunk, of the chunks in it, and so on. () is the plain scan.
      between: Iterations after each chunk that save more.
      policy: What these save, or None for all residuals.
    """

    sizes: Sizes
    between: int = 0
    policy: Callable[..., Any] | None = None


def remat_loops(f: F, passes: int, share: float = 1.0) -> F:
    """Run loops in the chunks that are predicted to need the fewest bytes.

    Args:
      f: A function of pytrees of arrays that is differentiated with respect to its first argument.
        Keyword arguments that are a bool, a string or None are static.
      passes: Largest number of additional forward passes of a loop. Two save about the cube root of
        the length in carries.
      share: Share of the iterations that run again. The others save matrix products, or all
        residuals if these are fewer bytes.

    Returns:
      A function with the same arguments, values and gradients.
    """
    return _chunked(f, lambda part: _best(part, passes, share).chunks)


def loop_choices(
    closed: ClosedJaxpr, differentiated: Sequence[bool]
) -> list[tuple[int, float, int]]:
    """Return arguments of `remat_loops` with the bytes that loops hold, the fewest FLOPs first."""
    part = _Part.of(closed, differentiated)
    found: list[tuple[int, float, int]] = []
    for passes, share in _TRIED:
        size = _best(part, passes, share).bytes
        if not found or size < (1 - _LEAST_SAVING) * found[-1][2]:
            found.append((passes, share, size))
    return found[1:]


def _chunked(f: F, choose: "Callable[[_Part], dict[_Loop, Chunks]]") -> F:
    def run(closed: ClosedJaxpr, leaves: list[Any], differentiated: list[bool]) -> list[Any]:
        part = _Part.of(closed, differentiated)
        return part.run(choose(part), *leaves)

    return evaluate_as(f, run, first_alone=False)


# Loops of a function, and how they run in chunks.


@dataclasses.dataclass(eq=False)
class _Loop:
    """A scan, or another equation that contains scans: one body, or one per branch."""

    eqn: JaxprEqn
    bodies: "list[_Part]"

    @functools.cached_property
    def scan(self) -> Scan | None:
        return Scan.read(self.eqn)

    def run(self, inputs: Sequence[Any], chunks: "dict[_Loop, Chunks]") -> list[Any]:
        if self.scan:
            return self._run_scan(self.scan, inputs, chunks)
        functions = [functools.partial(body.run, chunks) for body in self.bodies]
        if Cond.read(self.eqn):
            results: list[Any] = switch(self.eqn, inputs[0], functions, *inputs[1:])
            return results
        return call_like(self.eqn, functions[0])(*inputs)

    def _run_scan(
        self, scan: Scan, inputs: Sequence[Any], chunks: "dict[_Loop, Chunks]"
    ) -> list[Any]:
        consts, carry, xs = scan.split(inputs)
        # A carry that no iteration changes is saved once.
        changes = _changes(scan)

        def changing(carry: Sequence[Any]) -> list[Any]:
            # JAX's check of keys counts a saved key as used twice.
            return [
                jax.random.key_data(c) if _is_key(c) else c
                for c in itertools.compress(carry, changes)
            ]

        def merge(changing: Sequence[Any]) -> list[Any]:
            remaining = iter(changing)
            return [
                _like(v, next(remaining)) if c else v for c, v in zip(changes, carry, strict=True)
            ]

        def step(given: list[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = self.bodies[0].run(chunks, *consts, *merge(given), *xs)
            return changing(results[: scan.num_carry]), results[scan.num_carry :]

        last, ys = _scan_chunks(
            step,
            changing(carry),
            xs,
            scan.length,
            chunks[self],
            reverse=scan.reverse,
            unroll=scan.unroll,
        )
        return [*merge(last), *ys]


@dataclasses.dataclass(eq=False)
class _Part:
    """An inlined jaxpr and its differentiated loops, by equation."""

    closed: ClosedJaxpr
    differentiated: Sequence[bool]
    loops: dict[JaxprEqn, _Loop]

    @classmethod
    def of(cls, closed: ClosedJaxpr, differentiated: Sequence[bool]) -> "_Part":
        active = active_variables(closed.jaxpr, differentiated)
        loops: dict[JaxprEqn, _Loop] = {}
        for eqn in closed.jaxpr.eqns:
            given = [not isinstance(v, Literal) and v in active for v in eqn.invars]
            # A chunk would have its effects twice.
            if not any(given) or eqn.effects or any(map(is_reference, eqn.invars)):
                continue
            inner: Sequence[ClosedJaxpr] = ()
            if scan := Scan.read(eqn):
                inner = [scan.body]
                for i in range(scan.num_carry):  # the loop may make a carry active
                    given[scan.num_consts + i] |= eqn.outvars[i] in active
            elif cond := Cond.read(eqn):
                inner, given = cond.branches, given[1:]
            elif is_checkpoint(eqn) and (called := called_jaxpr(eqn)):
                inner = [called]
            bodies = [cls.of(inline(body), given) for body in inner]
            if scan or any(body.loops for body in bodies):
                loops[eqn] = _Loop(eqn, bodies)
        return cls(closed, differentiated, loops)

    def run(self, chunks: dict[_Loop, Chunks], *args: Any) -> list[Any]:
        def handle(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
            if eqn not in self.loops:
                return evaluate(eqn, inputs)
            with in_scopes(eqn):
                return self.loops[eqn].run(inputs, chunks)

        return interpret(self.closed, args, handle)

    @functools.cached_property
    def saved(self) -> int:
        """Bytes of the residuals, without its arguments."""
        return self._saved(lambda f: f)

    @functools.cached_property
    def products(self) -> int:
        """Bytes of the residuals if a `jax.checkpoint` saves matrix products."""
        return self._saved(functools.partial(jax.checkpoint, policy=_PRODUCTS))

    def _saved(self, transform: Callable[[Any], Any]) -> int:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.closed.in_avals]
        objective = list(map(is_floating, self.closed.jaxpr.outvars))

        @transform
        def f(*args: Any) -> Any:
            results = interpret(self.closed, args, evaluate)
            return list(itertools.compress(results, objective)), results

        pairs = enumerate(zip(self.differentiated, self.closed.jaxpr.invars, strict=True))
        active = [i for i, (is_active, v) in pairs if is_active and is_floating(v)]
        if not active or not any(objective):
            return 0
        forward = linearize(f, shapes, active)
        jaxpr = forward.closed.jaxpr
        read = dict.fromkeys(variables(jaxpr.outvars[i] for i in forward.residuals))
        arguments = {*jaxpr.invars, *jaxpr.constvars}
        return sum(nbytes(v) for v in read if v not in arguments)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _like(x: Any, data: Any) -> Any:
    """Data of a key as a key, if ``x`` is one."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x)) if _is_key(x) else data


def _changes(scan: Scan) -> list[bool]:
    _, carry, _ = scan.split(scan.body.jaxpr.invars)
    return [v is not w for v, w in zip(carry, scan.body.jaxpr.outvars, strict=False)]


def _scan_chunks(
    step: Callable[..., Any],
    carry: Any,
    xs: list[Any],
    length: int,
    chunks: Chunks,
    *,
    is_chunk: bool = False,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """Run a loop in chunks, each under a `jax.checkpoint`.

    ``step(carry, xs) -> (carry, ys)`` is one iteration, with lists of arrays. ``is_chunk`` is
    whether this loop is inside of another one.
    """
    sizes, between, policy = chunks
    # A single chunk saves nothing.
    sizes = next((sizes[i:] for i, s in enumerate(sizes) if s + between < length), ())
    if not sizes:
        return jax.lax.scan(step, carry, xs, length, **options)
    if sizes[0] == 1 and not between:
        return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), carry, xs, length, **options)

    def part(size: int, whole: bool = True) -> Callable[..., Any]:

        def run(carry: Any, xs: list[Any]) -> Any:
            inside = Chunks(sizes[1:])
            return _scan_chunks(step, carry, xs, size, inside, is_chunk=True, **options)

        # Outside of a loop, XLA could merge a chunk with its rematerialization.
        return jax.checkpoint(run, prevent_cse=not (whole or is_chunk))

    def other(carry: Any, xs: list[Any]) -> Any:
        saving = jax.checkpoint(step, prevent_cse=False, policy=policy) if policy else step
        return jax.lax.scan(saving, carry, xs, between, **options)

    def turn(carry: Any, xs: list[Any]) -> Any:
        return _in_turn([(part(sizes[0]), sizes[0]), (other, between)], carry, xs, reverse)

    def turns(carry: Any, xs: list[Any]) -> Any:
        stacked = [x.reshape(count, size, *x.shape[1:]) for x in xs]
        carry, ys = jax.lax.scan(turn, carry, stacked, count, reverse)
        return carry, [y.reshape(count * size, *y.shape[2:]) for y in ys]

    reverse, size = options["reverse"], sizes[0] + between
    count, rest = divmod(length, size)
    return _in_turn([(turns, count * size), (part(rest, False), rest)], carry, xs, reverse)


def _in_turn(
    parts: Sequence[tuple[Callable[..., Any], int]], carry: Any, xs: list[Any], reverse: bool
) -> tuple[Any, list[Any]]:
    """Run parts of a loop one after the other, each with its number of iterations."""
    parts = [(run, size) for run, size in parts if size]
    if len(parts) == 1:
        return parts[0][0](carry, xs)  # type: ignore[no-any-return]
    ends = list(itertools.accumulate(size for _, size in parts))
    found = []
    for (run, size), end in list(zip(parts, ends, strict=True))[:: -1 if reverse else 1]:
        carry, ys = run(carry, [x[end - size : end] for x in xs])
        found.append(ys)
    ordered = found[:: -1 if reverse else 1]
    return carry, [jnp.concatenate(ys) for ys in zip(*ordered, strict=True)]


# The choice of sizes.


class _Choice(NamedTuple):
    """Chunk sizes of loops, and what they are predicted to need.

    Attributes:
      chunks: How each loop is divided.
      saved: Bytes that are saved for the backward pass.
      working: Bytes while a chunk is rematerialized.
      cost: Additional FLOPs and bytes.
    """

    chunks: dict[_Loop, Chunks]
    saved: int
    working: int
    cost: Cost

    @property
    def bytes(self) -> int:
        return self.saved + self.working


def _cheapest(choices: Sequence[_Choice], slack: float) -> _Choice:
    """The fewest FLOPs that need few more than the fewest bytes."""
    least = min(c.bytes for c in choices) + slack
    return min((c for c in choices if c.bytes <= least), key=lambda c: (c.cost.time, c.bytes))


def _best(part: _Part, passes: int, share: float = 1.0) -> _Choice:
    """The sizes that need the fewest bytes with a number of additional forward passes."""
    options = [
        [_best_of_loop(loop, p, share) for p in range(passes + 1)] for loop in part.loops.values()
    ]
    slack = _LEAST_SAVING * sum(plain.bytes for plain, *_ in options)
    return _joined([_cheapest(choices, slack) for choices in options])


def _joined(choices: Sequence[_Choice]) -> _Choice:
    return _Choice(
        {loop: chunks for c in choices for loop, chunks in c.chunks.items()},
        sum(c.saved for c in choices),
        max((c.working for c in choices), default=0),
        Cost(sum(c.cost.flops for c in choices), sum(c.cost.bytes for c in choices)),
    )


def _best_of_loop(loop: _Loop, passes: int, share: float) -> _Choice:
    if loop.scan is None:
        choices = [_best(body, passes, share) for body in loop.bodies]
        # JAX saves what all branches need, and runs one.
        inner = _joined(choices)._replace(cost=max(choice.cost for choice in choices))
        if is_checkpoint(loop.eqn):  # what is inside is alive during its backward pass only
            inner = inner._replace(saved=0, working=inner.bytes)
        return inner
    (body,), scan = loop.bodies, loop.scan
    consts, carries, xs = scan.split(body.closed.jaxpr.invars)
    carry = sum(map(nbytes, itertools.compress(carries, _changes(scan))))
    stacked = sum(map(nbytes, [*xs, *body.closed.jaxpr.outvars[scan.num_carry :]]))
    # The backward pass of each level adds up gradients of the constants.
    gradients = sum(nbytes(v) for v, d in zip(consts, body.differentiated, strict=False) if d)
    own = max(body.saved - _best(body, 0).saved, 0)
    forward, products = equation_cost(loop.eqn), equation_cost(loop.eqn, product)
    choices = []
    for levels in range(passes + 1):
        inner = _best(body, passes - levels, share)
        residuals = carry + own + inner.saved
        sizes, saved, working = _sizes(scan.length, levels, carry, residuals, stacked)
        chunks, again = Chunks(sizes), 1.0
        turn = _nearest_divisor(scan.length, sizes[0] / share) if sizes else 0
        size = max(round(share * turn), 1)
        if size < turn:
            few = carry + body.products < residuals
            chunks = Chunks((size,), turn - size, _PRODUCTS if few else None)
            other = carry + body.products if few else residuals
            saved = int(scan.length / turn * (carry + chunks.between * other))
            # The parts of a turn save what they are cut out of, and are copied to the whole.
            saved += scan.length * sum(map(nbytes, xs))
            working = size * residuals + chunks.between * other
            again = size / turn
        some = (1 - again) * (chunks.policy is not None)
        choices.append(
            _Choice(
                {loop: chunks} | inner.chunks,
                saved,
                working + inner.working + len(sizes) * gradients,
                Cost(
                    *(
                        int(len(sizes) * again * whole + some * (whole - part) + scan.length * more)
                        for whole, part, more in zip(forward, products, inner.cost, strict=True)
                    )
                ),
            )
        )
    return _cheapest(choices, _LEAST_SAVING * choices[0].bytes)


def _nearest_divisor(length: int, size: float) -> int:
    """The divisor of a length that is nearest to a size, or the size if none is near."""
    divisors = [n for n in _promising(length) if length % n == 0]
    near = min(divisors, key=lambda n: abs(math.log(n / size)), default=1)
    return near if 0.6 < near / size < 1.7 else round(size)


@functools.cache
def _sizes(
    length: int, levels: int, carry: int, residuals: int, stacked: int
) -> tuple[Sizes, int, int]:
    """Choose chunk sizes for the fewest bytes.

    Args:
      length: Number of iterations.
      levels: Largest number of sizes.
      residuals: Bytes that a plain iteration saves.
      stacked: Bytes of scanned arrays per iteration, which are copied if a size does not divide.

    Returns:
      The sizes, bytes that are saved, and bytes while a chunk is rematerialized.
    """
    best: tuple[Sizes, int, int] = ((), length * residuals, 0)
    for size in _promising(length) if levels else ():
        copied = length * stacked if length % size else 0
        smaller, *inner = _sizes(size, levels - 1, carry, residuals, stacked)
        found = (size, *smaller), -(-length // size) * carry + copied, sum(inner)
        best = min(best, found, key=lambda f: f[1] + f[2])
    return best


def _promising(length: int) -> set[int]:
    """Divisors of a length, and other numbers below it, more of the small ones."""
    octaves = range(_SIZES_PER_OCTAVE * length.bit_length())
    some = {round(2 ** (i / _SIZES_PER_OCTAVE)) for i in octaves}
    some |= {
        d for n in range(1, math.isqrt(length) + 1) if length % n == 0 for d in (n, length // n)
    }
    return {n for n in some if n < length}
