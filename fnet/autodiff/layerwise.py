"""An optimizer's update of one layer of a stack, written over the old values, in a safe order."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.autodiff.equations import Equations, Variable

REST = -1
"""Owner of what is in no stack: other parameters, and what they all share, such as a count."""


class Slot(NamedTuple):
    """One array that an update renews.

    Attributes:
      name: its path, for messages.
      owner: number of the stack it belongs to, or `REST`.
      old: the variable of its value before the update.
      new: the variable of its value after it.
    """

    name: str
    owner: int
    old: int
    new: Variable


@dataclasses.dataclass(frozen=True, eq=False)
class LayerwiseUpdate:
    """``optimizer.update`` and ``optax.apply_updates`` as equations, for stacks of one layer.

    Attributes:
      equations: inputs are all gradients, the optimizer's state, all parameters.
      grads: the gradients' variables, in the order of the parameters' leaves.
      slots: the parameters' leaves, then those of the optimizer's state.
    """

    equations: Equations
    grads: tuple[int, ...]
    slots: tuple[Slot, ...]

    def owned(self, stack: int) -> list[int]:
        """Numbers of the slots of one stack, or with `REST` of what is in none."""
        return [n for n, slot in enumerate(self.slots) if slot.owner == stack]

    def shared(self, stack: int) -> list[int]:
        """Numbers of the slots outside of the stack whose old values its update reads."""
        own = self.owned(stack)
        needed, _ = self.equations.needs([self.slots[n].new for n in own])
        return [n for n, slot in enumerate(self.slots) if slot.old in needed and n not in own]

    def rest(self, grads: Mapping[int, Array], old: Mapping[int, Array]) -> dict[int, Array]:
        """The new values of what is in no stack.

        Args:
          grads: parameter's number -> gradient, of those in no stack.
          old: slot's number -> value, of those in no stack.
        """
        slots = self.owned(REST)
        wanted = [self.slots[n].new for n in slots]
        new = self.equations.evaluate(wanted, self._values(grads, old))
        return dict(zip(slots, new, strict=True))

    def write(
        self,
        stack: int,
        layer: Array,
        arrays: Mapping[int, Array],
        grads: Mapping[int, Array],
        shared: Mapping[int, Array],
        first: Any,
    ) -> dict[int, Array]:
        """Renews one layer of a stack's arrays where they lie.

        Where a layer of one array is read after, or in no order with, the
        writing of that array, XLA copies the array with all its layers. So
        arrays are written one after the other, and what depends on a new value
        reads it from where it was written. Barriers say so; since XLA's CPU
        compiler may drop them, the position that is written to depends on what
        has to come before as well.

        Args:
          stack: its number.
          layer: which layer, int [].
          arrays: slot's number -> all layers [n, ...].
          grads: parameter's number -> the layer's gradient [1, ...].
          shared: slot's number -> value, of those that `shared` names.
          first: any pytree of arrays; they are finished before anything is written.

        Returns:
          ``arrays`` with that layer renewed.
        """
        current, before = dict(arrays), [first]
        for stage in self.stages(stack):
            current, grads, before = jax.lax.optimization_barrier((current, dict(grads), before))
            layer = _known_after(before, layer)
            new: dict[int, Array] = {}
            for group in stage:
                wanted = [self.slots[n].new for n in group]
                places = {self.slots[n].old: n for n in current}
                places |= {v: n for v, n in self._written(current).items() if n not in group}
                read = {
                    v: jax.lax.dynamic_slice_in_dim(current[places[v]], layer, 1)
                    for v in self.equations.needs(wanted, places)[0] & places.keys()
                }
                values = self._values(grads, shared) | read
                results = self.equations.evaluate(wanted, values)
                if len(group) > 1:  # each reads what another overwrites
                    results = jax.lax.optimization_barrier(results)
                new |= zip(group, results, strict=True)
            for n, value in new.items():
                current[n] = jax.lax.dynamic_update_slice_in_dim(current[n], value, layer, 0)
            before = [current[n] for n in new]
        return current

    def stages(self, stack: int) -> list[list[list[int]]]:
        """The order in which the slots of a stack are written.

        Slots of a stage are independent. Those of a group read each other's old
        values, so that all new ones are made before the first is written.
        """
        slots = [n for n in self.owned(stack) if self.slots[n].new != self.slots[n].old]
        written, old = self._written(slots), {self.slots[n].old: n for n in slots}
        after: dict[int, set[int]] = {n: set() for n in slots}
        for n in slots:
            given = [v for v, writer in written.items() if writer != n]
            for v in self.equations.needs([self.slots[n].new], given)[0]:
                if v in given:
                    after[n].add(written[v])
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

    def _written(self, slots: Iterable[int]) -> dict[int, int]:
        """Variables that can be read back from where they were written, and from which slot."""
        made = {v for equation in self.equations.body for v in equation.outputs}
        places: dict[int, int] = {}
        for n in slots:
            new = self.slots[n].new
            if isinstance(new, int) and new in made:
                places.setdefault(new, n)
        return places

    def _values(self, grads: Mapping[int, Array], old: Mapping[int, Array]) -> dict[int, Any]:
        return (
            self.equations.constants
            | {self.grads[n]: g for n, g in grads.items()}
            | {self.slots[n].old: value for n, value in old.items()}
        )


def _known_after(values: Any, index: Array) -> Array:
    """``index``, but not known before ``values`` are: an order that no compiler pass undoes."""
    for a in jax.tree.leaves(values):
        if a.size:
            # A slice, since reshaping would gather what is sharded.
            one = jax.lax.slice(a, (0,) * a.ndim, (1,) * a.ndim).reshape(())
            # No number exceeds infinity, but that is for the compiler to find out.
            index = index + (one > jnp.inf).astype(index.dtype)
    return index
