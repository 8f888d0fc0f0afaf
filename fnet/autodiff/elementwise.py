"""Whether an optimizer updates each layer of a stack by itself, read from its equations."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from fnet.autodiff.equations import ELEMENTWISE, Equations, equations_of
from fnet.autodiff.layerwise import REST, LayerwiseUpdate, Slot


def layerwise_update(
    optimizer: optax.GradientTransformation, params: Any, opt_state: optax.OptState, owners: Any
) -> LayerwiseUpdate:
    """Traces an optimizer's update for stacks of one layer.

    Args:
      optimizer: an optax gradient transformation.
      params: all parameters, or their shapes; those of a stack are [n, ...].
      opt_state: of ``optimizer.init(params)``.
      owners: like ``params``, the number of each leaf's stack, or `REST`.

    Raises:
      ValueError: if the update of a layer depends on more than that layer: on
        gradients that are not known yet, on other elements, or on how many
        layers there are; the message names what depends on what. If the state
        is another optimizer's.
      TypeError: if a stack has arrays that are not floating, or change their type.
    """
    params, opt_state = jax.eval_shape(lambda *trees: trees, params, opt_state)
    param_owners = jax.tree.leaves(owners)
    state_owners = _state_owners(optimizer, params, opt_state, owners)

    def trace(layers: int | None) -> jax.extend.core.ClosedJaxpr:
        p = _resized(params, param_owners, layers)
        s = _resized(opt_state, state_owners, layers)

        def update(grads: Any, state: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
            updates, after = optimizer.update(grads, state, params)
            structure: Any = jax.tree.structure(state)
            if structure != jax.tree.structure(after):
                raise ValueError(
                    "optimizer_in_backward: an update gives the optimizer's state other leaves "
                    "than optimizer.init, so it cannot be written over the old one; mend the "
                    "optimizer, or use mode=mean"
                )
            return optax.apply_updates(params, updates), after

        return jax.make_jaxpr(update)(p, s, p)

    closed = trace(1)
    one = equations_of(closed)
    names = [keystr(path) for path, _ in tree_flatten_with_path(params)[0]]
    state_names = ["opt_state" + keystr(path) for path, _ in tree_flatten_with_path(opt_state)[0]]
    count, states = len(names), len(state_names)
    rule = LayerwiseUpdate(
        one,
        one.inputs[:count],
        tuple(
            map(
                Slot,
                ["params" + name for name in names] + state_names,
                param_owners + state_owners,
                one.inputs[count + states :] + one.inputs[count : count + states],
                one.outputs,
            )
        ),
    )
    _check_dependence(rule)
    _check_types(rule, closed)
    if _operations(one) != _operations(equations_of(trace(None))):
        raise ValueError(
            "optimizer_in_backward: what the optimizer does to a stack depends on how many layers "
            "the stack has, so it cannot be done a layer at a time; use mode=mean"
        )
    return rule


def _resized(tree: Any, owners: Sequence[int], layers: int | None, stack: int | None = None) -> Any:
    """Shapes with another number of layers in the given stack, or in all."""
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
    """To which stack each leaf of the optimizer's state belongs: with whose depth it grows."""
    param_owners = jax.tree.leaves(owners)
    param_shapes = [leaf.shape for leaf in jax.tree.leaves(params)]

    def shapes(state: optax.OptState) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf in jax.tree.leaves(state)]

    initial = jax.eval_shape(optimizer.init, params)
    trees: list[Any] = [jax.tree.structure(state) for state in (initial, opt_state)]
    if trees[0] != trees[1] or shapes(initial) != shapes(opt_state):
        raise ValueError(
            "optimizer_in_backward: the optimizer's state is not that of optimizer.init(params); "
            "give make_step the optimizer that the state was created with"
        )
    found = [REST] * len(shapes(opt_state))
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
                    f"stack's {layers} layers, but not by an entry for each; use mode=mean"
                )
            found[i] = stack
    return found


def _operations(equations: Equations) -> list[tuple[Any, ...]]:
    """What is computed, whatever the sizes."""
    return [
        (e.primitive, *(str(v.val) for v in e.inputs if isinstance(v, jax.extend.core.Literal)))
        for e in equations.body
    ]


class _Fact(NamedTuple):
    """Where a value comes from.

    Attributes:
      sources: variables of stacks' arrays, and of gradients, that it depends on.
      mixed_by: what made elements of a stack depend on each other.
      uniform: whether all its elements are the same for every layer.
    """

    sources: frozenset[int]
    mixed_by: frozenset[str]
    uniform: bool


def _check_dependence(rule: LayerwiseUpdate) -> None:
    """Refuses an update in which a layer depends on more than itself and what is known before."""
    names = {slot.old: slot.name for slot in rule.slots if slot.owner != REST}
    names |= {v: f"the gradient of {rule.slots[n].name}" for n, v in enumerate(rule.grads)}
    owners = {slot.old: slot.owner for slot in rule.slots if slot.owner != REST}
    owners |= {v: rule.slots[n].owner for n, v in enumerate(rule.grads)}
    facts = _facts(rule.equations, owners)
    for slot in rule.slots:
        if not isinstance(slot.new, int):
            continue
        fact = facts[slot.new]
        foreign = sorted(v for v in fact.sources if owners[v] != slot.owner)
        if foreign:
            raise ValueError(
                f"optimizer_in_backward: the update of {slot.name} needs {names[foreign[0]]}, but "
                "each layer is updated, and its gradient gone, before all gradients are known, as "
                "a global norm needs them; leave out of the optimizer what couples them (in place "
                "of clip_by_global_norm: optax.clip), or use mode=mean"
            )
        if slot.owner != REST and fact.mixed_by:
            raise ValueError(
                f"optimizer_in_backward: the update of {slot.name} applies "
                f"{', '.join(sorted(fact.mixed_by))} to a stack, but its layers are updated one "
                "at a time, before all gradients are known, so only elementwise operations can "
                "be (as in sgd, momentum, lion, adam, adamw); use mode=mean"
            )


def _facts(equations: Equations, owners: Mapping[int, int]) -> dict[int, _Fact]:
    def of_stack(fact: _Fact) -> bool:
        return any(owners[v] != REST for v in fact.sources)

    nothing: frozenset[Any] = frozenset()
    facts = {
        v: _Fact(nothing, nothing, equations.shapes[v] == ())
        for v in (*equations.constants, *equations.inputs)
    }
    facts |= {v: _Fact(frozenset([v]), nothing, False) for v in owners}
    for equation in equations.body:
        name = equation.primitive.name
        inputs = [
            facts[v] if isinstance(v, int) else _Fact(nothing, nothing, True)
            for v in equation.inputs
        ]
        mixed_by = nothing.union(*(f.mixed_by for f in inputs))
        if any(map(of_stack, inputs)):
            shared = [f for f in inputs if not f.uniform and not of_stack(f)]
            if not mixed_by and name not in ELEMENTWISE:
                mixed_by = frozenset([name])
            elif not mixed_by and shared:
                mixed_by = frozenset([f"{name} with an array of no layer"])
        uniform = all(f.uniform for f in inputs) and name in ELEMENTWISE | {"broadcast_in_dim"}
        sources = nothing.union(*(f.sources for f in inputs))
        for v in equation.outputs:
            known_scalar = not sources and equations.shapes[v] == ()
            facts[v] = _Fact(sources, mixed_by, uniform or known_scalar)
    return facts


def _check_types(rule: LayerwiseUpdate, closed: jax.extend.core.ClosedJaxpr) -> None:
    """Refuses what cannot be written over its old value, or go through a backward pass."""
    old = dict(zip(rule.equations.inputs, closed.in_avals, strict=True))
    for slot, after in zip(rule.slots, closed.out_avals, strict=True):
        before = old[slot.old]
        if slot.owner == REST:
            continue
        if not jnp.issubdtype(before.dtype, jnp.floating):
            raise TypeError(
                f"optimizer_in_backward: {slot.name} is {before.dtype}, but what is updated in a "
                "backward pass must be floating; use mode=mean"
            )
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise TypeError(
                f"optimizer_in_backward: for one layer {slot.name} changes from "
                f"{before.dtype}{list(before.shape)} to {after.dtype}{list(after.shape)}, so it "
                "cannot be written over its old value; mend the optimizer, or use mode=mean"
            )
