"""An optimizer's update as equations, so that it can run one layer at a time.

`trace_update` traces ``optimizer.update`` for stacks of a single layer and checks that no layer
depends on another. `LayerUpdate.write` evaluates those equations for one layer and writes the
results over the old values.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.tree_util import keystr, tree_flatten_with_path

from fnet.autodiff.update import uphill
from fnet.jaxpr import (
    Atom,
    aval,
    dependencies,
    evaluate_from,
    inline,
    interpret,
    is_elementwise,
    moves_elements,
    separate_factor,
)

INTEGER_CARRIERS = {
    jnp.dtype(jnp.int8): jnp.dtype(jnp.float8_e5m2),
    jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e5m2),
}
"""Floating dtypes of the same size, for integers in a stack."""

REST = -1
"""Owner of arrays outside of all stacks: other parameters, and shared state such as a count."""


class Slot(NamedTuple):
    """An array that the update overwrites: a parameter or a part of the optimizer's state.

    Attributes:
      name: path for error messages, ``"params['w']"``.
      owner: number of the stack that the array belongs to, or `REST`.
      old: variable of the value before the update.
      new: variable of the value after the update.
    """

    name: str
    owner: int
    old: Var
    new: Atom


@dataclasses.dataclass(frozen=True, eq=False)
class LayerUpdate:
    """``optimizer.update`` and ``optax.apply_updates`` as equations, for stacks of one layer.

    Attributes:
      closed: jaxpr ``(grads, opt_state, params) -> (params, opt_state)`` without calls.
      grads: variables of the gradients, in the order of the parameters' leaves.
      slots: the leaves of the parameters, then the leaves of the optimizer's state.
    """

    closed: ClosedJaxpr
    grads: tuple[Var, ...]
    slots: tuple[Slot, ...]

    def owned(self, stack: int) -> list[int]:
        """Return the numbers of a stack's slots, or with `REST` of those in no stack."""
        return [n for n, slot in enumerate(self.slots) if slot.owner == stack]

    def shared(self, stack: int) -> list[int]:
        """Return the numbers of slots outside of the stack whose old values its update reads."""
        owned = self.owned(stack)
        inputs, _ = dependencies(self.closed.jaxpr, [self.slots[n].new for n in owned])
        return [n for n, slot in enumerate(self.slots) if slot.old in inputs and n not in owned]

    def update_rest(self, grads: Mapping[int, Array], old: Mapping[int, Array]) -> dict[int, Array]:
        """Return the new values of the slots in no stack, from gradients and old values."""
        slots = self.owned(REST)
        outputs = [self.slots[n].new for n in slots]
        new = evaluate_from(self.closed.jaxpr, outputs, self._values(grads, old))
        return dict(zip(slots, new, strict=True))

    def write(
        self,
        stack: int,
        layer: Array,
        arrays: Mapping[int, Array],
        grads: Mapping[int, Array],
        shared: Mapping[int, Array],
        before: Any,
    ) -> dict[int, Array]:
        """Update one layer of a stack in place.

        XLA copies an array with all its layers if a layer of it is read after it is written,
        or in no defined order. So arrays are written one after the other, and what depends
        on a new value reads it from where it was written. Optimization barriers enforce the
        order. XLA's CPU compiler may drop barriers, so the index of the layer also depends
        on everything that has to come first, and on ``before``. Arrays and shared values are by
        slot number, gradients by parameter number.
        """
        jaxpr = self.closed.jaxpr
        current, finished = dict(arrays), [before]
        for stage in self.stages(stack):
            current, grads, finished = jax.lax.optimization_barrier(
                (current, dict(grads), finished)
            )
            layer = _known_after(finished, layer)
            new: dict[int, Array] = {}
            for group in stage:
                outputs = [self.slots[n].new for n in group]
                places = {self.slots[n].old: n for n in current}
                places |= {v: n for v, n in self._writers(current).items() if n not in group}
                read = {
                    v: jax.lax.dynamic_slice_in_dim(current[places[v]], layer, 1)
                    for v in dependencies(jaxpr, outputs, places)[0]
                    if v in places
                }
                values = evaluate_from(jaxpr, outputs, self._values(grads, shared) | read)
                if len(group) > 1:  # each reads an old value that another overwrites
                    values = jax.lax.optimization_barrier(values)
                new |= zip(group, values, strict=True)
            for n, value in new.items():
                current[n] = jax.lax.dynamic_update_slice_in_dim(current[n], value, layer, 0)
            finished = [current[n] for n in new]
        return current

    def stages(self, stack: int) -> list[list[list[int]]]:
        """Return the order in which the slots of a stack are written: stages of groups of slots.

        Slots of a stage are independent. The slots of a group read each other's old values,
        so all new values of a group are computed before the first is written.
        """
        slots = [n for n in self.owned(stack) if self.slots[n].new is not self.slots[n].old]
        writers, old = self._writers(slots), {self.slots[n].old: n for n in slots}
        after: dict[int, set[int]] = {n: set() for n in slots}  # slots written before each slot
        for n in slots:
            known = [v for v, writer in writers.items() if writer != n]
            for v in dependencies(self.closed.jaxpr, [self.slots[n].new], known)[0]:
                if v in known:
                    after[n].add(writers[v])
                elif v in old and old[v] != n:
                    after[old[v]].add(n)
        for middle in slots:  # transitive closure
            for n in slots:
                if middle in after[n]:
                    after[n] |= after[middle]
        groups = {
            tuple(m for m in slots if m == n or (m in after[n] and n in after[m])) for n in slots
        }
        stages: list[list[list[int]]] = []
        done: set[int] = set()
        while len(done) < len(slots):
            stage = [g for g in sorted(groups) if g[0] not in done and after[g[0]] <= done | set(g)]
            stages.append([list(g) for g in stage])
            done |= {n for g in stage for n in g}
        return stages

    def _writers(self, slots: Iterable[int]) -> dict[Var, int]:
        """Map each variable that is written to a slot, and can be read back, to that slot."""
        computed = {v for eqn in self.closed.jaxpr.eqns for v in eqn.outvars}
        writers: dict[Var, int] = {}
        for n in slots:
            new = self.slots[n].new
            if not isinstance(new, Literal) and new in computed:
                writers.setdefault(new, n)
        return writers

    def _values(self, grads: Mapping[int, Array], old: Mapping[int, Array]) -> dict[Var, Any]:
        constants = zip(self.closed.jaxpr.constvars, self.closed.consts, strict=True)
        return (
            dict(constants)
            | {self.grads[n]: g for n, g in grads.items()}
            | {self.slots[n].old: value for n, value in old.items()}
        )


def _known_after(values: Any, index: Array) -> Array:
    """Return ``index``, but dependent on ``values``: an order that no compiler pass removes."""
    for a in jax.tree.leaves(values):
        if a.size:
            # Slice first: a reshape would gather a sharded array.
            element = jax.lax.slice(a, (0,) * a.ndim, (1,) * a.ndim).reshape(())
            # No number exceeds infinity, but the compiler does not know that.
            index = index + (element.astype(jnp.float32) > jnp.inf).astype(index.dtype)
    return index


def trace_update(
    optimizer: optax.GradientTransformation, params: Any, opt_state: optax.OptState, owners: Any
) -> LayerUpdate:
    """Trace an optimizer's update for stacks of one layer.

    Args:
      optimizer: an optax gradient transformation.
      params: all parameters or their shapes; [n, ...] in a stack.
      opt_state: state of the optimizer, as from ``optimizer.init(params)``.
      owners: pytree like ``params``, with the number of each leaf's stack, or `REST`.

    Raises:
      ValueError: if the update of a layer depends on other layers, on gradients that are not
        known yet or on the number of layers, or if the state belongs to another optimizer.
      TypeError: if a stack has arrays that are not floating, or that change their dtype.
    """
    params, opt_state = jax.eval_shape(lambda *trees: trees, params, opt_state)
    param_owners = jax.tree.leaves(owners)
    state_owners = _state_owners(optimizer, params, opt_state, owners)

    # A layer is a chunk already, so fnet.optim.compact_adamw needs no loop of its own.
    update_whole = optax.with_extra_args_support(optimizer).update

    def trace(layers: int | None) -> ClosedJaxpr:
        p = _resized(params, param_owners, layers)
        s = _resized(opt_state, state_owners, layers)

        def update(grads: Any, state: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
            try:
                updates, new_state = update_whole(uphill(grads), state, params, chunked=False)
            except TypeError as error:
                raise TypeError(
                    f"optimizer_in_backward: optimizer.update fails: {error}; it gets gradients, "
                    "state and parameters, so use mode=mean if it needs the loss"
                ) from error
            structure: Any = jax.tree.structure(state)
            if structure != jax.tree.structure(new_state):
                raise ValueError(
                    "optimizer_in_backward: optimizer.update returns a state of another structure "
                    "than optimizer.init, so the old state cannot be overwritten; fix the "
                    "optimizer, or use mode=mean"
                )
            return optax.apply_updates(params, updates), new_state

        return inline(jax.make_jaxpr(update)(p, s, p), custom_derivatives=True)

    closed, stacked = trace(1), trace(None)
    names = ["params" + keystr(path) for path, _ in tree_flatten_with_path(params)[0]]
    names += ["opt_state" + keystr(path) for path, _ in tree_flatten_with_path(opt_state)[0]]
    inputs, count = closed.jaxpr.invars, len(param_owners)
    grads, state, old_params = inputs[:count], inputs[count:-count], inputs[-count:]
    slots = map(Slot, names, param_owners + state_owners, old_params + state, closed.jaxpr.outvars)
    update = LayerUpdate(closed, tuple(grads), tuple(slots))
    _check_dependence(update, stacked)
    _check_dtypes(update)
    if _operations(closed) != _operations(stacked):
        raise ValueError(
            "optimizer_in_backward: the optimizer's update of a stack depends on the number of "
            "layers, so it cannot be applied one layer at a time; use mode=mean"
        )
    return update


def _resized(tree: Any, owners: Sequence[int], layers: int | None, stack: int | None = None) -> Any:
    """Replace the number of layers in one stack, or in all; None keeps it."""
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        jax.ShapeDtypeStruct((layers, *leaf.shape[1:]), leaf.dtype)
        if layers is not None and owner != REST and stack in (None, owner)
        else leaf
        for leaf, owner in zip(leaves, owners, strict=True)
    )


def _state_owners(
    optimizer: optax.GradientTransformation, params: Any, opt_state: optax.OptState, owners: Any
) -> list[int]:
    """Return each state leaf's stack: the one with whose number of layers the leaf grows."""
    param_owners = jax.tree.leaves(owners)
    param_shapes = [leaf.shape for leaf in jax.tree.leaves(params)]

    def shapes(state: optax.OptState) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf in jax.tree.leaves(state)]

    initial = jax.eval_shape(optimizer.init, params)
    structures: list[Any] = [jax.tree.structure(state) for state in (initial, opt_state)]
    if structures[0] != structures[1] or shapes(initial) != shapes(opt_state):
        raise ValueError(
            "optimizer_in_backward: opt_state does not match optimizer.init(params); "
            "give make_step the optimizer that the state was created with"
        )
    state_owners = [REST] * len(shapes(opt_state))
    names = [keystr(path) for path, _ in tree_flatten_with_path(opt_state)[0]]
    for stack in sorted(set(param_owners) - {REST}):
        layers = param_shapes[param_owners.index(stack)][0]
        deeper = _resized(params, param_owners, layers + 1, stack)
        larger = shapes(jax.eval_shape(optimizer.init, deeper))
        for i, (small, large) in enumerate(zip(shapes(initial), larger, strict=True)):
            if small == large:
                continue
            if (layers, *small[1:]) != small or (layers + 1, *small[1:]) != large:
                raise ValueError(
                    f"optimizer_in_backward: opt_state{names[i]} of shape {small} grows with the "
                    f"{layers} layers of the stack, but not by one entry per layer; use mode=mean"
                )
            state_owners[i] = stack
    return state_owners


def _operations(closed: ClosedJaxpr) -> list[tuple[Any, ...]]:
    return [
        (e.primitive, *(str(v.val) for v in e.invars if isinstance(v, Literal)))
        for e in closed.jaxpr.eqns
    ]


class _Source(NamedTuple):
    """An array that a value depends on: a gradient, or an array of a stack."""

    number: int
    name: str
    owner: int


class _Dependence(NamedTuple):
    """Dependence of a value.

    Attributes:
      sources: gradients and arrays of stacks.
      mixed_by: operations that made elements of a stack depend on each other.
      uniform: whether all its elements are the same for every layer.
    """

    sources: frozenset[_Source] = frozenset()
    mixed_by: frozenset[str] = frozenset()
    uniform: bool = False

    @property
    def on_stack(self) -> bool:
        """Whether the value depends on an array of a stack."""
        return any(source.owner != REST for source in self.sources)


def _check_dependence(update: LayerUpdate, stacked: ClosedJaxpr) -> None:
    """Raise ValueError if a layer depends on more than itself and on what is known before.

    Args:
      update: the update of stacks of one layer.
      stacked: its jaxpr with all layers, whose shapes tell the layers from other axes.
    """
    slot_of = {slot.old: slot for slot in update.slots}
    dependences = []
    for number, v in enumerate(update.closed.jaxpr.invars):
        if number < len(update.grads):
            slot = update.slots[number]
            source = _Source(number, f"the gradient of {slot.name}", slot.owner)
        elif slot_of[v].owner != REST:
            source = _Source(number, slot_of[v].name, slot_of[v].owner)
        else:
            dependences.append(_Dependence(uniform=aval(v).shape == ()))
            continue
        dependences.append(_Dependence(frozenset([source])))
    results = interpret(
        stacked,
        dependences,
        _follow_layers,
        constant=lambda a: _Dependence(uniform=jnp.ndim(a) == 0),
    )
    for slot, result in zip(update.slots, results, strict=True):
        foreign = min((s for s in result.sources if s.owner != slot.owner), default=None)
        if foreign is not None:
            raise ValueError(
                f"optimizer_in_backward: the update of {slot.name} needs {foreign.name}, but a "
                "layer is updated before all gradients are known; use an optimizer that does not "
                "couple layers (optax.clip in place of clip_by_global_norm), or mode=mean"
            )
        if slot.owner != REST and result.mixed_by:
            raise ValueError(
                f"optimizer_in_backward: the update of {slot.name} applies "
                f"{', '.join(sorted(result.mixed_by))} to a stack, but layers are updated one at "
                "a time, so only operations inside of a layer are possible (as in sgd, momentum, "
                "lion, adam, adamw, compact_adamw); use mode=mean"
            )


def _follow_layers(eqn: JaxprEqn, states: list[_Dependence]) -> list[_Dependence]:
    """Follow whether layers stay apart: along a factor that is the first axis of the results.

    Loops and branches are single equations here, as they are when a layer is updated.
    """
    name = eqn.primitive.name
    sources: frozenset[_Source] = frozenset().union(*(s.sources for s in states))
    mixed_by: frozenset[str] = frozenset().union(*(s.mixed_by for s in states))
    if not mixed_by and any(s.on_stack for s in states):
        factor = separate_factor(eqn, [0 if s.on_stack else None for s in states])
        if factor is None or factor.parts or set(factor.results) != {0}:
            mixed_by = frozenset([name])
        elif any(
            axis is not None and not (s.uniform or s.on_stack)
            for axis, s in zip(factor.operands, states, strict=True)
        ):
            mixed_by = frozenset([f"{name} with an array of no layer"])
    # Elements of one array that are all alike stay so wherever they are put.
    is_moved = moves_elements(eqn) and len(eqn.invars) == 1
    uniform = all(s.uniform for s in states) and (is_moved or is_elementwise(eqn))
    return [
        _Dependence(sources, mixed_by, uniform or (not sources and aval(v).shape == ()))
        for v in eqn.outvars
    ]


def _check_dtypes(update: LayerUpdate) -> None:
    """Raise TypeError for arrays of a stack that cannot be overwritten in a backward pass."""
    for slot in update.slots:
        old, new = aval(slot.old), aval(slot.new)
        if slot.owner == REST:
            continue
        if not jnp.issubdtype(old.dtype, jnp.floating) and old.dtype not in INTEGER_CARRIERS:
            raise TypeError(
                f"optimizer_in_backward: {slot.name} is {old.dtype}, but arrays of a stack "
                "must be floating, int8 or uint8 to be updated in the backward pass; use mode=mean"
            )
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise TypeError(
                f"optimizer_in_backward: the update of one layer changes {slot.name} from "
                f"{old.dtype}{list(old.shape)} to {new.dtype}{list(new.shape)}, so it "
                "cannot overwrite the old value; fix the optimizer, or use mode=mean"
            )
