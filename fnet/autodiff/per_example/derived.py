"""Values that are computed from parameters alone, and gradients through them.

Weight norm, weight standardization, a low-rank update ``w + a @ b`` or a concatenation of kernels
compute a matrix ``v = h(params)`` before it meets data. The matrix is then used like a parameter:

    g_b(params) = J_h^T g_b(v)

`split_derived` takes a traced loss apart into ``h`` and the rest. `DerivedGradients` computes norms
and sums of the parameters' gradients from the gradients of ``v``, a few examples at a time. If
``h`` only puts elements of parameters in other places, ``|g_b(params)| = |g_b(v)|``, and the sum
needs a single backward pass of ``h``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fnet.autodiff.per_example.ghost_norm import number_of_chunks
from fnet.autodiff.per_example.parameter_gradients import (
    ByIndex,
    GroupInChunks,
    ParameterGradients,
    Rough,
    SquaredNorms,
)
from fnet.autodiff.per_example.taps import DATA, Derived, State, View, after_parameters, takes_part
from fnet.jaxpr import (
    aval,
    bind,
    dependencies,
    evaluate,
    inner_jaxprs,
    interpret,
    is_linear_in,
    places_once,
    slope,
    with_dtypes,
)
from fnet.jaxpr.custom_rules import is_narrow
from fnet.precision import sum_dtype, upcast


class Group(NamedTuple):
    """Parameters that are combined before they meet data.

    Attributes:
      params: Indices of the parameters, as `leaves` of a `Split`.
      derived: Numbers of the derived values, as leaves.
      function: ``(*params) -> derived values``.
      is_placement: Whether each element of the parameters is in exactly one place of the derived
        values, or in none.
    """

    params: tuple[int, ...]
    derived: tuple[int, ...]
    function: ClosedJaxpr
    is_placement: bool

    @property
    def leaves(self) -> frozenset[int]:
        """Parameters and derived values."""
        return frozenset((*self.params, *self.derived))


class Split(NamedTuple):
    """A loss, taken apart.

    Its *leaves* are the values that meet data: first all parameters, then the derived values.

    Attributes:
      loss: ``(*leaves, *batch) -> results``.
      groups: How derived values are computed.
    """

    loss: ClosedJaxpr
    groups: list[Group]

    def leaves(self, params: Sequence[Any]) -> list[Any]:
        """Return the parameters, followed by the derived values."""
        leaves = dict(enumerate(params))
        for group in self.groups:
            results = jaxpr_as_fun(group.function)(*(params[i] for i in group.params))
            leaves |= zip(group.derived, results, strict=True)
        return [leaves[i] for i in range(len(leaves))]


def find_derived(closed: ClosedJaxpr, states: Sequence[State]) -> list[Var]:
    """Find the derived values that meet data, or are results."""
    variables: dict[Var, None] = {}

    def meets_data(atoms: Sequence[Any], states: Sequence[State]) -> None:
        pairs = zip(atoms, states, strict=True)
        variables.update({v: None for v, state in pairs if isinstance(state, Derived)})

    def handle(eqn: JaxprEqn, states: list[State]) -> Sequence[State]:
        if not takes_part(eqn, states):
            return after_parameters(eqn, states)
        meets_data(eqn.invars, states)
        return [DATA] * len(eqn.outvars)

    meets_data(closed.jaxpr.outvars, interpret(closed, states, handle, lambda constant: None))
    return list(variables)


def split_derived(closed: ClosedJaxpr, count: int) -> Split:
    """Take a traced loss apart into functions of its ``count`` parameters and the rest."""
    jaxpr = closed.jaxpr
    views: list[State] = [View.whole(i, v.aval.shape) for i, v in enumerate(jaxpr.invars[:count])]
    variables = find_derived(closed, [*views, *[DATA] * (len(jaxpr.invars) - count)])
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    _, eqns = dependencies(jaxpr, jaxpr.outvars, variables)
    rest = jaxpr.replace(
        invars=[*jaxpr.invars[:count], *variables, *jaxpr.invars[count:]],
        eqns=eqns,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    number = {v: i for i, v in enumerate(jaxpr.invars[:count])}
    read = {v for e in rest.eqns for v in e.invars if not isinstance(v, Literal)}
    groups = []
    for members in _connected(closed, variables, number):
        inputs, eqns = dependencies(jaxpr, members)
        params = [v for v in inputs if v in number]
        own_constants = {v: constants[v] for v in inputs if v in constants}
        function = jaxpr.replace(
            constvars=list(own_constants),
            invars=params,
            outvars=members,
            eqns=eqns,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        # Whether elements only move, each to one place. A parameter that is read elsewhere, and a
        # result that another one is computed from, are in two places.
        atoms = [*(v for e in function.eqns for v in e.invars), *function.outvars]
        places = [v for v in atoms if not isinstance(v, Literal)]
        is_placement = read.isdisjoint(params) and len(places) == len({*places})
        groups.append(
            Group(
                tuple(number[v] for v in params),
                tuple(count + variables.index(v) for v in members),
                # From JAX 0.12 on, `function.constvars` are inputs until they have values.
                ClosedJaxpr(function, list(own_constants.values())),
                is_placement and all(map(_keeps_lengths, function.eqns)),
            )
        )
    return Split(ClosedJaxpr(rest, closed.consts), groups)


def _keeps_lengths(eqn: JaxprEqn) -> bool:
    """Whether an equation puts each element in one place, perhaps with another sign."""
    if any(jnp.iscomplexobj(aval(v)) for v in eqn.outvars):
        return False  # A real parameter gets the real part of the cotangent alone.
    is_placement = places_once(eqn) and is_linear_in(eqn, range(len(eqn.invars)))
    return is_placement or (len(eqn.invars) == 1 and slope(eqn, 0) == -1)


def _connected(
    closed: ClosedJaxpr, variables: Sequence[Var], params: Mapping[Var, int]
) -> Iterator[list[Var]]:
    """Yield the derived values that share parameters."""
    groups: list[tuple[set[Var], list[Var]]] = []
    for v in variables:
        own = {p for p in dependencies(closed.jaxpr, [v])[0] if p in params}
        shared = [g for g in groups if g[0] & own]
        groups = [g for g in groups if not g[0] & own]
        members = [member for _, others in shared for member in others]
        groups.append((own.union(*(used for used, _ in shared)), [*members, v]))
    yield from (members for _, members in groups)


@dataclasses.dataclass(frozen=True, eq=False)
class DerivedGradients(GroupInChunks):
    """Gradients with respect to the parameters of a group.

    Attributes:
      group: The parameters and the function that combines them.
      params: The parameters of the group.
      direct: Gradients with respect to the parameters where they meet data themselves, by
        index of the parameter.
      derived: Gradients with respect to each derived value.
    """

    group: Group
    params: Sequence[Any]
    direct: Mapping[int, ParameterGradients]
    derived: Sequence[ParameterGradients]

    @property
    def indices(self) -> Sequence[int]:
        return self.group.params

    @property
    def size(self) -> int:
        return self.derived[0].size

    @functools.cached_property
    def chunks(self) -> int:
        sizes = [v.aval.size for v in self.group.function.jaxpr.outvars]
        nbytes = 4 * sum([*sizes, *(p.size for p in self.params)])
        return number_of_chunks(self.size, self.arrays, nbytes)

    @property
    def arrays(self) -> list[Array]:
        return [a for g in (*self.direct.values(), *self.derived) for a in g.arrays]

    @property
    def zeros(self) -> list[Array]:
        return [jnp.zeros(p.shape, sum_dtype(p)) for p in self.params]

    def strategies(self) -> dict[int, str]:
        strategy = self.derived[0].strategy if self.group.is_placement else "derived"
        return dict.fromkeys(self.group.params, strategy)

    def squared_norms(self, whole: bool) -> dict[int, SquaredNorms]:
        if not whole or not self.group.is_placement:
            return super().squared_norms(whole)
        first, *others = self.group.params
        norms = SquaredNorms.total([g.squared_norms() for g in self.derived])
        zeros = SquaredNorms(jnp.zeros_like(norms.values), 0.0)
        return {first: norms} | dict.fromkeys(others, zeros)

    def weighted_sums(self, scales: ByIndex, is_rough: Rough) -> Iterator[tuple[int, Array]]:
        """Yield the sum of each parameter.

        Moved elements are summed before they are moved back. Any other function may let gradients
        cancel, and leave the rounding errors of a sum that was made before it.
        """
        numbers = self.group.params
        if not self.group.is_placement:
            yield from super().weighted_sums(scales, is_rough)
            return
        rough, pull_back = is_rough.get(numbers[0]), self._pull_back()
        # Parameters are usually scaled alike. One backward pass is then enough.
        for own in {id(scales[i]): scales[i] for i in numbers}.values():
            totals = pull_back([g.weighted_sum(own, rough) for g in self.derived])
            pairs = zip(numbers, totals, strict=True)
            yield from ((i, total) for i, total in pairs if scales[i] is own)

    def of_chunk(self, chunks: int, number: Array) -> list[Array]:
        def materialize(g: ParameterGradients) -> Array:
            return g.every_nth(chunks, number).materialize()

        direct = {i: materialize(g) for i, g in self.direct.items()}
        pulled = jax.vmap(self._pull_back())([materialize(g) for g in self.derived])
        return [
            g + direct[i].astype(g.dtype) if i in direct else g
            for i, g in zip(self.group.params, pulled, strict=True)
        ]

    def _pull_back(self) -> Callable[[Sequence[Array]], Sequence[Array]]:
        """Compute the derived values, and return the map from their cotangents to gradients.

        It is differentiated at these values, but its sums are float32 or wider: in bfloat16, their
        error grows with the number of examples.
        """
        outputs, backward = jax.vjp(jaxpr_as_fun(self.group.function), *self.params)
        program = jax.make_jaxpr(backward)(list(outputs))

        def pull_back(cotangents: Sequence[Array]) -> Sequence[Array]:
            wide = [_Wide(upcast(ct)) for ct in cotangents]
            grads = interpret(program, wide, _widened, lambda a: a)
            return [upcast(g.array if isinstance(g, _Wide) else g) for g in grads]

        return pull_back


class _Wide(NamedTuple):
    """A cotangent in float32 or wider, whatever the program casts it to."""

    array: Any


def _widened(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Evaluate an equation of a backward pass. What depends on no cotangent has its own dtype."""
    arrays = [a.array if isinstance(a, _Wide) else a for a in inputs]
    if not any(isinstance(a, _Wide) for a in inputs):
        return evaluate(eqn, arrays)
    if any(True for _ in inner_jaxprs(eqn)):
        # Inner equations compute in their own dtypes, for each example alone.
        given = [
            a.array.astype(aval(v).dtype) if isinstance(a, _Wide) else a
            for a, v in zip(inputs, eqn.invars, strict=True)
        ]
        return [_Wide(_upcast(a)) for a in evaluate(eqn, given)]
    if any(map(is_narrow, eqn.outvars)):
        eqn = with_dtypes(eqn, sum_dtype)
    # Literals, too, are wide.
    return list(map(_Wide, bind(eqn, [*map(_upcast, arrays)])))


def _upcast(a: Any) -> Any:
    return upcast(a) if jnp.issubdtype(jnp.result_type(a), jnp.floating) else a
