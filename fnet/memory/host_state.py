"""Keep the state of an optimizer in the memory of the host, and fetch it in blocks of rows.

Adam and many other optimizers update each row of a parameter alone, and need its part of the state
for a moment. So the state stays on the host. One parameter after the other, and a block of rows
after the other, it is copied to the device, updated there and copied back. `fnet.memory.rows`
proves that rows are separate in the update, and computes a block of them.

Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training", also keep the state on
the host, where a CPU updates it.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from fnet.chunks import fori_chunks
from fnet.jaxpr import aval, dependencies, evaluate_from, inline, nbytes, part_of_jaxpr
from fnet.jaxpr.batch_axis import BatchAxis, Shared
from fnet.memory.rows import Part, RowAxes, Value, run_rows, slice_rows

_LEAST_BYTES = 2**20
"""The state of a parameter stays on the device if its arrays have fewer bytes."""
_LEAST_BLOCKS, _MOST_BYTES = 8, 2**24
"""Blocks of an array, and bytes of one. XLA copies the arrays of few blocks all at once."""
_LINK_BLOCKS = 4
"""Parts of a block, which are read and written in turn."""


def state_on_host(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keep the large arrays of an optimizer's state in the memory of the host.

    Updates and state are the same to one rounding of the state's dtype, if it is bfloat16, and else
    up to the order of operations. With Adam, a device holds 8 bytes less per float32 parameter.
    Each step moves the state to the device and back, which takes longer if no other work hides it.

    On the host are arrays of at least 1 MiB that the update of one parameter alone reads, row by
    row along the first axis: Adam and its relatives, momentum, Lion, 8-bit states. They
    come to the device in blocks of rows. Numbers that depend on gradients alone, such as their
    norm, are computed before. So give it all of a chain with `optax.clip_by_global_norm`: XLA
    holds a second copy of stacked gradients between the two otherwise.

    Before JAX 0.12, `jax.eval_shape` forgets where arrays are. There, give `fnet.compile_step` a
    state, or shapes with shardings. Donate the parameters and the state of a step of your own, in
    the order of its results, with ``keep_unused=True``: otherwise JAX may give memory of the host
    to parameters, and abort. ``make_step(skip_nonfinite=True)`` needs a state on the device.

    Args:
      optimizer: Any optax transformation.

    Returns:
      The optimizer whose ``init`` places its state, and whose ``update`` fetches it.

    Raises:
      ValueError: If the state has large arrays, but none can be on the host, or if parameters are
        on several devices.
        From the update, if the state is on the device, or has effects.
      TypeError: If the update needs other arguments, as `optax.lbfgs`'s does.

    Example:
      >>> import fnet, jax.numpy as jnp, optax
      >>> from fnet import memory
      >>> optimizer = memory.state_on_host(optax.adam(1e-3))
      >>> params = {"w": jnp.ones((1024, 512)), "b": jnp.ones(512)}
      >>> state = optimizer.init(params)
      >>> moments = state[0].mu
      >>> [moments[name].sharding.memory_kind for name in ("w", "b")]
      ['pinned_host', 'device']
      >>> updates, state = optimizer.update(params, state, params)
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'
    """
    whole = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        counts = [len(a.sharding.device_set) for a in jax.tree.leaves(params) if _is_placed(a)]
        if (count := max(counts, default=1)) > 1:
            raise ValueError(
                f"state_on_host: parameters must be on one device, got some on {count}; shard the "
                "state in place of this (fnet.fsdp)"
            )
        state = optimizer.init(params)
        leaves: list[Any]
        structure: Any
        leaves, structure = jax.tree.flatten(state)
        for k in _Update.trace(whole, params, state, params, {}).on_host:
            leaves[k] = jax.device_put(leaves[k], jax.memory.Space.Host)
        return structure.unflatten(leaves)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return _Update.trace(whole, grads, state, params, extra).run(grads, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_on_host(array: Any) -> bool:
    return bool(jax.typeof(array).memory_space == jax.memory.Space.Host)


def _is_placed(array: Any) -> bool:
    return getattr(array, "sharding", None) is not None and not isinstance(array, jax.core.Tracer)


class _Update(NamedTuple):
    """An optimizer's update as equations.

    Attributes:
      closed: ``(grads, state, params) -> (updates, state)``, flat, without calls.
      grads: Number of gradients.
      scalars: Numbers that depend on no large array of the state, and are computed first.
      blocks: What is computed in blocks of rows.
    """

    closed: ClosedJaxpr
    structure: Any
    grads: int
    scalars: list[Var]
    blocks: "list[_Blocks]"

    @property
    def on_host(self) -> list[int]:
        """Arrays of the state, by number, that are on the host."""
        return [k - self.grads for blocks in self.blocks for k in blocks.numbers[1:]]

    @classmethod
    def trace(
        cls,
        optimizer: optax.GradientTransformationExtraArgs,
        grads: Any,
        state: Any,
        params: Any,
        extra: dict[str, Any],
    ) -> "_Update":
        def on_device(a: Any) -> jax.ShapeDtypeStruct:
            kind = jax.typeof(a)
            return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)

        args = jax.tree.map(on_device, (grads, state, params))

        def make(**options: Any) -> Any:
            return jax.make_jaxpr(
                lambda *trees: optimizer.update(*trees, **{**extra, **options}), return_shape=True
            )(*args)

        try:
            try:  # Blocks are chunks already: fnet.optim.compact_adamw needs no loop of its own.
                traced, results = make(chunked=False)
            except TypeError:
                traced, results = make()
        except (TypeError, ValueError) as error:
            raise type(error)(
                "state_on_host: optimizer.update fails with gradients, state and parameters: "
                f"{error}"
            ) from error
        if traced.effects:
            raise ValueError(
                "state_on_host: optimizer.update must have no effects, such as "
                f"jax.debug.print's, got {', '.join(map(str, traced.effects))}"
            )
        closed = inline(traced, custom_derivatives=True)
        jaxpr, count = closed.jaxpr, len(jax.tree.leaves(grads))
        of_state = jaxpr.invars[count : count + len(jax.tree.leaves(state))]
        owners = _owners(jaxpr, count, of_state)
        scalars = _scalars(jaxpr, {of_state[k] for k in owners})
        found = []
        for number in sorted(set(owners.values())):
            owned = [k for k, owner in owners.items() if owner == number]
            blocks = _Blocks.of(jaxpr, [number, *(count + k for k in owned)], scalars)
            found += [blocks] if blocks else []
        if any(nbytes(v) >= _LEAST_BYTES for v in of_state) and not found:
            raise ValueError(
                "state_on_host: no array of the state can be on the host, because all updates mix "
                "rows or parameters; wrap what is inside of a choice, as in "
                "optax.MultiSteps(state_on_host(optax.adam(...)), ...), or use an optimizer with "
                "a smaller state, such as fnet.optim.compact_adamw"
            )
        return cls(closed, jax.tree.structure(results), count, scalars, found)

    def run(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        jaxpr = self.closed.jaxpr
        arrays = jax.tree.leaves((grads, state, params))
        values = dict(zip(jaxpr.invars, arrays, strict=True))
        values |= zip(jaxpr.constvars, self.closed.consts, strict=True)
        blocks = [b for b in self.blocks if all(map(_is_on_host, (values[v] for v in b.old[1:])))]
        if self.blocks and not blocks:
            # JAX might give its memory to arrays on the host, and abort.
            raise ValueError(
                "state_on_host: expected a state in the memory of the host, got arrays or shapes "
                "of the device; place it as init does"
            )
        computed = evaluate_from(jaxpr, self.scalars, values)
        values |= zip(self.scalars, computed, strict=True)
        results: dict[int, Any] = {}
        done: Any = None
        for block in blocks:
            given = [values[v] for v in block.closed.jaxpr.invars]
            given, _ = jax.lax.optimization_barrier((given, done))
            new = block.run(given)
            results |= zip(block.numbers, new, strict=True)
            done = jax.lax.slice(new[0], (0,) * new[0].ndim, (1,) * new[0].ndim)
        others = [k for k in range(len(jaxpr.outvars)) if k not in results]
        rest = evaluate_from(jaxpr, [jaxpr.outvars[k] for k in others], values)
        results |= zip(others, rest, strict=True)
        updates, new_state = self.structure.unflatten(results[k] for k in range(len(results)))
        return updates, new_state


def _owners(jaxpr: Jaxpr, grads: int, arrays: Sequence[Var]) -> dict[int, int]:
    """Map arrays of the state to the only update that reads them, if some of these are large."""
    reads = [set(dependencies(jaxpr, [v])[0]) for v in jaxpr.outvars]
    readers = [[i for i in range(grads) if v in reads[i]] for v in arrays]
    owners = {
        k: found[0] for k, found in enumerate(readers) if len(found) == 1 and aval(arrays[k]).shape
    }
    while True:
        large = {owner for k, owner in owners.items() if nbytes(arrays[k]) >= _LEAST_BYTES}
        shared = {
            k
            for number, needed in enumerate(reads)
            for k, owner in owners.items()
            if arrays[k] in needed
            and owner != (number if number < grads else owners.get(number - grads))
        }
        kept = {k: o for k, o in owners.items() if k not in shared and o in large}
        if kept == owners:
            return owners
        owners = kept


def _scalars(jaxpr: Jaxpr, large: set[Var]) -> list[Var]:
    """Numbers that depend on none of these arrays, such as the norm of all gradients."""
    reads, found = set(large), []
    for eqn in jaxpr.eqns:
        if any(isinstance(v, Var) and v in reads for v in eqn.invars):
            reads |= set(eqn.outvars)
        else:
            found += [v for v in eqn.outvars if not aval(v).shape]
    return found


class _Blocks(NamedTuple):
    """The update of a parameter whose rows are separate.

    Attributes:
      closed: From all that it reads to the update and the new state.
      axes: The analysis of it.
      kinds: Of each of its inputs and results, whether it is rows or a whole.
      old: The inputs that the results overwrite, the gradient first.
      numbers: Their numbers in the whole update. The results have the same numbers.
    """

    closed: ClosedJaxpr
    axes: RowAxes
    kinds: tuple[list[Any], list[Any]]
    old: list[Var]
    numbers: list[int]

    @classmethod
    def of(cls, jaxpr: Jaxpr, numbers: list[int], scalars: Sequence[Var]) -> "_Blocks | None":
        """Return the blocks of a parameter, or None if its rows are mixed.

        ``numbers`` are of the arguments that are overwritten; ``scalars`` are known before.
        """
        results, old = [jaxpr.outvars[k] for k in numbers], [jaxpr.invars[k] for k in numbers]
        known = {*jaxpr.invars, *jaxpr.constvars, *scalars}
        needed, eqns = dependencies(jaxpr, results, known)
        variables = (*results, *old)
        if any(isinstance(v, Literal) or not aval(v).shape for v in variables):
            return None
        pairs = [(aval(a), aval(b)) for a, b in zip(results, old, strict=True)]
        if any(a.shape != b.shape for a, b in pairs) or any(
            a.dtype != b.dtype for a, b in pairs[1:]
        ):
            return None
        if len(sizes := {aval(v).shape[0] for v in variables}) > 1:
            return None
        axes = RowAxes(sizes.pop())
        part = ClosedJaxpr(part_of_jaxpr(eqns, needed, results), [])
        given = [BatchAxis(0) if v in old else Shared() for v in needed]
        found = axes.run(part, given)
        is_separate = all(kind == BatchAxis(0) for kind in found)
        return cls(part, axes, (given, found), old, numbers) if is_separate else None

    def run(self, given: Sequence[Any]) -> list[Any]:
        inputs, results = self.closed.jaxpr.invars, self.closed.jaxpr.outvars
        values = dict(zip(inputs, given, strict=True))
        gradient, *state = (values.get(v) for v in self.old)
        shape, dtype = aval(results[0]).shape, aval(results[0]).dtype
        is_overwritten = gradient is not None and gradient.dtype == dtype
        rows, half = self.axes.batch_size, len(state) // 2

        def block(update: Any, state: Sequence[Any], part: Part) -> list[Any]:
            known = values | dict(zip(self.old[1:], state, strict=True))
            if gradient is not None:  # A buffer still has the gradients of the next rows.
                known[self.old[0]] = slice_rows(update if is_overwritten else gradient, 0, part)
            args = [Value(kind, known[v]) for v, kind in zip(inputs, self.kinds[0], strict=True)]
            interpreter, new = run_rows(self.closed, args, part, self.axes)
            lowered: list[Any] = interpreter.lowered(new, self.kinds[1], results)
            return lowered

        def body(start: Any, size: int, carry: Any) -> Any:
            update, first, second = carry
            cuts = [size * k // _LINK_BLOCKS for k in range(_LINK_BLOCKS + 1)]
            parts = [
                Part(jnp.asarray(start + a, jnp.int32), b - a, rows)
                for a, b in itertools.pairwise(cuts)
                if a < b
            ]
            read = [*_read(first, parts[0]), *_read(second, parts[0])]
            for part, after in zip(parts, [*parts[1:], None], strict=True):
                new, *old = block(update, read, part)
                update = jax.lax.dynamic_update_slice_in_dim(update, new, part.start, 0)
                halves, read = [], []
                # A link to a host has two directions: while the next block of one half of the state
                # is read, the last one of the other half is written. A barrier says that an array
                # is read before it is overwritten, or XLA copies it.
                for arrays, blocks in ((first, old[:half]), (second, old[half:])):
                    if after is not None:
                        read, arrays = jax.lax.optimization_barrier((read, arrays))
                        of_next, blocks = jax.lax.optimization_barrier(
                            (_read(arrays, after), blocks)
                        )
                        read = [*read, *of_next]
                    halves.append(_written(arrays, blocks, part))
                first, second = halves
            return update, first, second

        bytes_ = max(nbytes(v) for v in results)
        size = max(1, min(-(-rows // _LEAST_BLOCKS), _MOST_BYTES * rows // bytes_))
        buffer = gradient if is_overwritten else jnp.zeros(shape, dtype)
        update, first, second = fori_chunks(body, (buffer, state[:half], state[half:]), rows, size)
        return [update, *first, *second]


def _read(arrays: Sequence[Any], part: Part) -> list[Any]:
    return [jax.device_put(slice_rows(a, 0, part), jax.memory.Space.Device) for a in arrays]


def _written(arrays: Sequence[Any], blocks: Sequence[Any], part: Part) -> list[Any]:
    host = jax.memory.Space.Host
    return [
        jax.lax.dynamic_update_slice_in_dim(a, jax.device_put(b, host), part.start, 0)
        for a, b in zip(arrays, blocks, strict=True)
    ]
