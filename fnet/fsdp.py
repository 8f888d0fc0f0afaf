"""Fully sharded data parallelism (FSDP, ZeRO): gather parameters where they are used.

`shard_state` decides how a train state is divided. `gather_at_use` rewrites a traced train step,
after differentiation. So it holds for any loss, gradient mode and remat policy: forward pass,
rematerialization and backward pass each gather a parameter where it meets data, and free it
afterwards.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from typing import Literal as OneOf

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fnet.jaxpr import (
    BackwardPropagation,
    Propagation,
    Scan,
    Site,
    While,
    aval,
    factors,
    inner_jaxprs,
    is_elementwise,
    is_identity,
    is_reference,
    moves_elements,
    places_once,
    splice,
    transformed,
)
from fnet.state import check_state

Spec = tuple[Any, ...]
"""Mesh axes of each array axis, as in `jax.sharding.PartitionSpec`."""

S = TypeVar("S")

_FROZEN = jax.tree_util.DictKey("frozen")
"""Part of the model state that holds frozen parameters."""


def shard_state(state: S, mesh: Mesh, *, axis: str = "fsdp", min_size: int = 2048) -> S:
    """Return the shapes of a train state, with shardings over a mesh.

    Parameters, their average and the optimizer state are sharded along their longest axis that
    the devices divide. Everything else is replicated, except for frozen parameters under
    ``"frozen"`` in the model state. The first axis of an array with three axes or more is not
    sharded, because it may be the axis that a `jax.lax.scan` goes over.

    Use the result as ``state_sharding`` of `fnet.make_step` (its leaves' ``sharding``), and as the
    target of a checkpoint that is restored on other devices.

    Args:
      state: A `fnet.TrainState`, or its shapes from `jax.eval_shape`.
      mesh: Devices.
      axis: Axis of the mesh that shards the state.
      min_size: Smallest number of elements of an array that is sharded.

    Returns:
      The state with a `jax.ShapeDtypeStruct` with a sharding for each array.

    Raises:
      TypeError: If the state is not a `fnet.TrainState`.
      ValueError: If the mesh has no such axis.

    Example:
      >>> import jax, jax.numpy as jnp, optax, fnet
      >>> from fnet import TrainState
      >>> from jax.sharding import AxisType
      >>> mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
      >>> params = {"kernel": jnp.ones((64, 256)), "bias": jnp.zeros(256)}
      >>> def create(key, optimizer=optax.adam(1e-3)):
      ...     return TrainState.create(params=params, optimizer=optimizer, key=key)
      >>> state = jax.eval_shape(create, jax.random.key(0))
      >>> shapes = fnet.fsdp.shard_state(state, mesh)
      >>> shapes.params["kernel"].sharding.spec, shapes.params["bias"].sharding.spec
      (P(None, 'fsdp'), P())
      >>> shardings = jax.tree.map(lambda a: a.sharding, shapes)
      >>> state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
      >>> state.params["kernel"].addressable_shards[0].data.shape
      (64, 64)

    References: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion
      parameter models", arXiv:1910.02054, stage 3.
    """
    check_state("shard_state", state)
    if axis not in mesh.shape:
        raise ValueError(
            f"shard_state: axis must be an axis of the mesh, {mesh.axis_names}, got {axis!r}"
        )
    tree: Any = state
    fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    sharded: S = dataclasses.replace(tree, **shard_fields(fields, mesh, axis, min_size))
    return sharded


def shard_fields(
    fields: dict[str, Any], mesh: Mesh, axis: str = "fsdp", min_size: int = 2048
) -> dict[str, Any]:
    """Return the shapes of some fields of a train state, by name, with shardings."""
    replicated, devices = NamedSharding(mesh, PartitionSpec()), mesh.shape[axis]
    params = {
        path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(fields.get("params"))
    }

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        first = 1 if len(shape) > 2 else 0  # a gather of a slice would gather the whole stack
        axes = [i for i, n in enumerate(shape) if n % devices == 0 and i >= first]
        if not axes or math.prod(shape) < min_size:
            return replicated
        longest = max(axes, key=lambda i: shape[i])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, axis))

    def sharding_like(shape: tuple[int, ...], param: tuple[int, ...]) -> NamedSharding:
        """Shard an array like the parameter it belongs to, such as the scales of its moments."""
        if shape == param or len(shape) != len(param):
            return sharding(shape)
        like = sharding(param)
        i = next((i for i, name in enumerate(like.spec) if name is not None), None)
        return like if i is not None and shape[i] % devices == 0 else replicated

    def place(name: str, path: tuple[Any, ...], a: Any) -> jax.ShapeDtypeStruct:
        if name == "opt_state":  # with the parameters' paths at the end of its own
            ends = (params.get(path[i:]) for i in range(len(path)))
            to = sharding_like(a.shape, next((s for s in ends if s is not None), a.shape))
        else:
            is_sharded = name in ("params", "ema") or path[:1] == (_FROZEN,)
            to = sharding(a.shape) if is_sharded else replicated
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)

    return {
        name: jax.tree.map_with_path(functools.partial(place, name), field)
        for name, field in fields.items()
    }


def gather_at_use(
    f: Callable[..., Any],
    in_shardings: Sequence[Any],
    out_shardings: Any = None,
    *,
    axes: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Make a function of sharded parameters gather each one where it is used, and only there.

    By itself, XLA may gather the batch instead of the parameters, or keep gathered parameters
    from the forward pass until the backward pass. The returned function computes the same values:

    - An equation that combines a parameter with data gets the whole parameter. Each such equation
      gathers for itself. From the second on, the gather waits for the data.
    - In a ``lax.scan`` over stacked parameters, each iteration gathers its own layer. Do not
      shard the scanned axis, or the whole stack is gathered before the loop.
    - What depends on parameters alone stays sharded. A cast to bfloat16 comes before the gather.
    - Quantized weights, in integers of one byte, are gathered before they are dequantized.
    - What is combined elementwise with an array of the parameter's shape stays sharded, such as
      the update of an optimizer.
    - Results with a sharding are sharded where they are computed. A gradient is reduced to shards
      layer by layer, also inside of scans.

    `jax.shard_map` is not entered. Meshes with ``Explicit`` axes are left to JAX.

    Args:
      f: A function of pytrees of arrays. Differentiate it before, not after.
      in_shardings: For each argument the shardings of its leaves, a tree with its structure. None
        for data.
      out_shardings: Shardings of the results, a tree or a prefix of it. None for no sharding.
      axes: Mesh axes to gather over. By default all axes that shard an argument. Leave out the
        axes of tensor parallelism.

    Returns:
      A function with the same arguments and results, to be called inside of `jax.jit`.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
      >>> mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
      >>> rows = NamedSharding(mesh, PartitionSpec("fsdp"))
      >>> grad = jax.grad(lambda w, x: jnp.sin(x @ w).sum())
      >>> w, x = jax.device_put((jnp.ones((8, 4)), jnp.ones((16, 8))), rows)
      >>> sharded = fnet.fsdp.gather_at_use(grad, (rows, None), rows)
      >>> bool(jnp.allclose(jax.jit(sharded)(w, x), grad(w, x)))
      True
    """
    meshes = [s.mesh for s in jax.tree.leaves((in_shardings, out_shardings)) if _is_sharded(s)]
    if not meshes or AxisType.Explicit in meshes[0].axis_types:
        return f
    mesh: Mesh = meshes[0]

    def sharded(*args: Any) -> Any:
        in_specs = _specs(in_shardings, args)

        def change(closed: ClosedJaxpr, shapes: Any) -> ClosedJaxpr:
            names = {n for spec in in_specs if spec for n in _names(spec)} if axes is None else axes
            states: list[State] = [
                DATA if spec is None else Shard(spec, v.aval.size, frozenset({i}))
                for i, (v, spec) in enumerate(zip(closed.jaxpr.invars, in_specs, strict=True))
            ]
            # The first search says which parameters a step gathers, the second which enter loops.
            first = _Search()
            first.run(closed, states)
            search = _Search(first)
            search.run(closed, states)
            jaxpr = _insert_gathers(mesh, frozenset(names), closed.jaxpr, search.gathers)
            out_specs = _specs(out_shardings, shapes)
            wishes = [spec if spec and any(spec) else None for spec in out_specs]
            jaxpr, _ = _ShardResults(mesh).run(jaxpr, [None] * len(in_specs), wishes)
            return ClosedJaxpr(jaxpr, closed.consts)

        return transformed(f, change)(*args)

    return sharded


def _is_sharded(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and any(
        sharding.mesh.shape[name] > 1 for name in _names(tuple(sharding.spec))
    )


def _names(spec: Sequence[Any]) -> Iterator[str]:
    for entry in spec:
        if entry is not None:
            yield from entry if isinstance(entry, tuple) else (entry,)


def _specs(shardings: Any, tree: Any) -> list[Spec | None]:
    specs: list[Spec | None] = []

    def add(sharding: Any, subtree: Any) -> None:
        for leaf in jax.tree.leaves(subtree):
            padding = [None] * (leaf.ndim - len(sharding.spec)) if _is_sharded(sharding) else []
            specs.append((*sharding.spec, *padding) if _is_sharded(sharding) else None)

    leaves = jax.sharding.Sharding, type(None)
    jax.tree.map(add, shardings, tree, is_leaf=lambda s: isinstance(s, leaves))
    return specs


# Gathers.


class Shard(NamedTuple):
    """A value that stays sharded: a parameter, or what depends on parameters alone.

    ``spec`` is None if unknown. ``size`` counts no elements that a broadcast repeats, and
    ``params`` are indices of parameters.
    """

    spec: Spec | None
    size: int
    params: frozenset[int]


DATA = "data"
"""State of a value that depends on data."""

State = Shard | str | None
"""None: a constant."""


class _Gather(NamedTuple):
    """The sharding of operands to gather, by index, and variables that the gathers wait for."""

    specs: dict[int, Spec | None]
    after: list[Any]


class _Search(Propagation[State]):
    """Find where sharded parameters meet data: the ``gathers``, by the path of the equation.

    It also notes which parameters are gathered somewhere, and which a scan slices.
    """

    def __init__(self, before: "_Search | None" = None) -> None:
        self.gathers: dict[tuple[int, ...], _Gather] = {}
        self.gathered: set[int] = set()
        self.stacked_params: set[int] = set()
        self._before = before
        self._latest: dict[tuple[int, ...], list[Any]] = {}

    def constant(self, value: Any) -> State:
        return None

    def join(self, states: Sequence[State]) -> State:
        """Whatever may be sharded in different ways counts as data."""
        different = set(states) - {None}
        return DATA if len(different) > 1 else next(iter(different), None)

    def chosen(self, predicate: State, states: Sequence[State]) -> Sequence[State]:
        return states

    def run(self, closed: ClosedJaxpr, inputs: Sequence[State], site: Site = Site()) -> list[State]:  # noqa: B008
        """Visit a jaxpr, and remember the last array of data that was computed so far."""
        self._latest[site.path] = _arrays_of_data(closed.jaxpr.invars, inputs)[:1]
        return super().run(closed, inputs, site)

    def visit(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        self.gathers.pop(site.path, None)  # of an earlier iteration of a fixed point
        results = self._results(eqn, states, site)
        latest = _arrays_of_data(eqn.outvars, results)[-1:]
        if latest:
            self._latest[site.path[:-1]] = latest
        return results

    def _results(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        is_plain = not any(True for _ in inner_jaxprs(eqn))
        shards = {i for i, s in enumerate(states) if isinstance(s, Shard)}
        codes = [i for i in shards if _is_code(eqn.invars[i])]
        stays_code = moves_elements(eqn) and all(map(_is_code, eqn.outvars))
        if codes and is_plain and not stays_code:
            # Quantized weights are gathered before they are dequantized.
            self._gather(eqn, states, codes, site, self._latest[site.path[:-1]])
            return [DATA] * len(eqn.outvars)
        if not shards:
            return [DATA if DATA in states else None] * len(eqn.outvars)
        return super().visit(eqn, states, site)

    def equation(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        if is_identity(eqn):
            return states
        shards = {i: s for i, s in enumerate(states) if isinstance(s, Shard)}
        if DATA not in states or _is_elementwise(eqn, list(shards.values())):
            return _after(eqn, shards)
        self._gather(eqn, states, list(shards), site)
        return [DATA] * len(eqn.outvars)

    def shard_map(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        return [DATA] * len(eqn.outvars)

    def _gather(
        self,
        eqn: JaxprEqn,
        states: Sequence[State],
        positions: Sequence[int],
        site: Site,
        after: Sequence[Any] = (),
    ) -> None:
        specs = {}
        for i in positions:
            shard = states[i]
            assert isinstance(shard, Shard)
            self.gathered |= shard.params
            specs[i] = shard.spec
        self.gathers[site.path] = _Gather(specs, [*_arrays_of_data(eqn.invars, states), *after])

    def sliced(self, state: State) -> State:
        """A scan slices a stack that is not sharded along its axis."""
        if not isinstance(state, Shard) or state.spec is None:
            return state
        self.stacked_params |= state.params
        return DATA if state.spec[0] is not None else state._replace(spec=state.spec[1:])

    def stacked(self, state: State) -> State:
        """The rows of a stack are sharded, and its first axis is not."""
        if not isinstance(state, Shard):
            return state
        return state._replace(spec=state.spec and (None, *state.spec))

    def scan(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(states)
        slices = [
            s._replace(size=s.size // scan.length) if isinstance(s, Shard) else s
            for s in map(self.sliced, xs)
        ]
        consts = self._consts(consts, states)
        carry, ys = self.fixed_point(scan.body, consts, carry, slices, site)
        self._gather_inputs(eqn, states, [*consts, *carry, *slices], site)
        stacked = [
            s._replace(size=s.size * scan.length) if isinstance(s, Shard) else s
            for s in map(self.stacked, ys)
        ]
        return [*carry, *stacked]

    def loop(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        loop = While.of(eqn)
        condition, consts, carry = loop.split(states)
        inside = [site._replace(path=(*site.path, i)) for i in range(2)]
        consts = self._consts(consts, states)
        carry, _ = self.fixed_point(loop.body, consts, carry, [], inside[0])
        condition = [DATA if isinstance(s, Shard) else s for s in condition]
        self._gather_inputs(eqn, states, [*condition, *consts, *carry], site)
        self.run(loop.condition, [*condition, *carry], inside[1])
        return carry

    def _consts(self, consts: Sequence[State], states: Sequence[State]) -> list[State]:
        """Return the states, in a loop, of values that all its iterations share."""
        before = self._before
        if before is None:
            return list(consts)
        # A loop over time gathers its weights once. A loop over microbatches, which uses all
        # parameters, must not hold all of them, nor all layers of a stack.
        in_loop = frozenset().union(*(s.params for s in states if isinstance(s, Shard)))
        if in_loop >= before.gathered:
            return list(consts)
        return [
            DATA if isinstance(s, Shard) and not s.params & before.stacked_params else s
            for s in consts
        ]

    def _gather_inputs(
        self, eqn: JaxprEqn, states: Sequence[State], inside: Sequence[State], site: Site
    ) -> None:
        pairs = enumerate(zip(states, inside, strict=True))
        positions = [i for i, (s, own) in pairs if isinstance(s, Shard) and own == DATA]
        if positions:
            self._gather(eqn, states, positions, site)


def _insert_gathers(
    mesh: Mesh, axes: frozenset[str], jaxpr: Jaxpr, gathers: Mapping[tuple[int, ...], _Gather]
) -> Jaxpr:
    def gathered(spec: Spec | None, a: Any) -> Any:
        if spec is None:
            return _constrained(mesh, (), a)
        # Sharded before, so that the compiler does not gather what the array is computed from.
        names = ([n for n in _names([entry]) if n not in axes] for entry in spec)
        whole = tuple(tuple(kept) or None for kept in names)
        return _constrained(mesh, whole, _constrained(mesh, spec, a))

    def replace(eqn: JaxprEqn, path: tuple[int, ...]) -> Sequence[JaxprEqn]:
        gather = gathers.get(path)
        if gather is None:
            return [eqn]
        atoms = list(eqn.invars)
        # Compilers merge gathers that nothing orders. One gather would then serve several layers,
        # or both the forward and the backward pass, and its result would stay alive in between.
        waiting = list(dict.fromkeys([*(atoms[i] for i in gather.specs), *gather.after]))
        eqns, results = _spliced(lambda *a: jax.lax.optimization_barrier(a), waiting, eqn)
        renamed = dict(zip(waiting, results, strict=True))
        atoms = [v if isinstance(v, Literal) else renamed.get(v, v) for v in atoms]
        for i, spec in gather.specs.items():
            new, (atoms[i],) = _spliced(functools.partial(gathered, spec), [atoms[i]], eqn)
            eqns += new
        return [*eqns, eqn.replace(invars=atoms)]

    return splice(jaxpr, replace)


def _arrays_of_data(variables: Sequence[Any], states: Sequence[State]) -> list[Any]:
    pairs = zip(variables, states, strict=True)
    return [v for v, s in pairs if s == DATA and not isinstance(v, Literal) and _is_array(v)]


def _is_code(atom: Any) -> bool:
    """Whether a value is an array of one-byte integers, as in `fnet.quantization`."""
    dtype = getattr(aval(atom), "dtype", jnp.float32)
    return jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize == 1


def _is_elementwise(eqn: JaxprEqn, shards: Sequence[Shard]) -> bool:
    shape = aval(eqn.outvars[0]).shape
    shapes = {aval(v).shape for v in eqn.invars} - {()}
    is_whole = all(s.size == math.prod(shape) for s in shards)
    return is_elementwise(eqn) and shapes <= {shape} and is_whole


def _after(eqn: JaxprEqn, shards: Mapping[int, Shard]) -> list[State]:
    """Return the states of the results of an equation that keeps its operands sharded."""
    params = frozenset().union(*(s.params for s in shards.values()))
    arrays = {k: s.spec for k, s in shards.items() if s.size > 1}
    operand, whole = next(iter(arrays.items()), (0, None))
    is_known = whole is not None and {*arrays.values()} == {whole}
    states: list[State] = []
    for number, v in enumerate(eqn.outvars):
        spec = None
        if whole is not None and is_known:
            spec = _along_factors(eqn, whole, ("operands", operand), ("results", number))
        size = aval(v).size
        if is_elementwise(eqn) or moves_elements(eqn):
            # A bias that is broadcast to all rows of a batch still has the elements of one row.
            size = min(size, max(s.size for s in shards.values()))
        states.append(Shard(spec, size, params))
    return states


Place = tuple[OneOf["operands", "results"], int]
"""An operand or a result of an equation, by its index."""


def _along_factors(eqn: JaxprEqn, spec: Spec, start: Place, end: Place) -> Spec | None:
    """Follow a spec from an operand to a result, or back; None if a sharded axis is not kept."""
    v = getattr(eqn, {"operands": "invars", "results": "outvars"}[end[0]])[end[1]]
    entries: list[Any] = [None] * len(aval(v).shape)
    for axis, entry in enumerate(spec):
        if entry is None:
            continue
        kept = (
            getattr(f, end[0])[end[1]]
            for f in factors(eqn)
            if getattr(f, start[0])[start[1]] == axis and f.parts is None
        )
        own = next((a for a in kept if a is not None), None)
        if own is None or own >= len(entries):
            return None
        entries[own] = entry
    return tuple(entries)


# Results.


class _ShardResults(BackwardPropagation[Spec]):
    """Shard results, and what they are computed from elementwise, where it is computed."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def sliced(self, wish: Spec | None) -> Spec | None:
        """A row of a stack is sharded as the stack is, if the stack's first axis is not."""
        return wish[1:] if wish and wish[0] is None and any(wish[1:]) else None

    def stacked(self, wish: Spec | None) -> Spec | None:
        return wish and (None, *wish)

    def equation(
        self, eqn: JaxprEqn, refs: Sequence[Spec | None], outs: Sequence[Spec | None]
    ) -> tuple[Sequence[JaxprEqn], Sequence[Spec | None]]:
        """Constrain the results of an equation, or its operands if it only moves elements."""
        nothing: list[Spec | None] = [None] * len(eqn.invars)
        if is_identity(eqn):
            return [eqn], outs
        if any(map(is_reference, eqn.outvars)):  # a new reference
            return [eqn], [*outs, *nothing[1:]]
        ref = refs[0] if refs else None
        if ref is not None:  # an addition to a reference, or to a part of it
            parts = (ref[max(len(ref) - len(aval(v).shape), 0) :] for v in eqn.invars)
            return [eqn], [
                s if any(s) and len(s) == len(aval(v).shape) and not is_reference(v) else None
                for s, v in zip(parts, eqn.invars, strict=True)
            ]
        if (
            any(map(is_reference, eqn.invars))
            and aval(eqn.invars[0]).shape == aval(eqn.outvars[0]).shape
        ):  # the value of a reference
            return [eqn], [*outs, *nothing[1:]]
        if len(outs) == 1 and outs[0] is not None:
            before = self._before(eqn, outs[0])
            if before is not None:
                return [eqn], before
        after: list[JaxprEqn] = []
        outvars = list(eqn.outvars)
        for i, (v, spec) in enumerate(zip(eqn.outvars, outs, strict=True)):
            if spec:
                constrain = functools.partial(_constrained, self._mesh, spec)
                new, (outvars[i],) = _spliced(constrain, [v], eqn, as_result=True)
                after += new
        return [eqn.replace(outvars=outvars), *after], nothing

    def _before(self, eqn: JaxprEqn, spec: Spec) -> list[Spec | None] | None:
        """Specs of operands that give the result this spec; None if the result needs its own."""
        sizes = {aval(v).size for v in eqn.invars}
        if sizes and max(sizes) <= 1:
            return [None] * len(eqn.invars)
        if is_elementwise(eqn):
            shape = aval(eqn.outvars[0]).shape
            return [spec if aval(v).shape == shape else None for v in eqn.invars]
        if not places_once(eqn) or len(eqn.invars) != 1:
            return None
        before = _along_factors(eqn, spec, ("results", 0), ("operands", 0))
        return None if before is None else [before]


# Equations.


def _is_array(atom: Any) -> bool:
    is_key = jnp.issubdtype(aval(atom).dtype, jax.dtypes.extended)
    return not is_key and not is_reference(atom)


def _constrained(mesh: Mesh, spec: Spec, a: Any) -> Any:
    return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, PartitionSpec(*spec)))


def _spliced(
    f: Callable[..., Any], variables: Sequence[Any], like: JaxprEqn, *, as_result: bool = False
) -> tuple[list[JaxprEqn], list[Any]]:
    """Return the equations of a function of some variables, and the variables of its results.

    They get the named scopes and source line of ``like``. With ``as_result``, ``variables`` are the
    results instead, and the arguments are returned.
    """
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in map(aval, variables)
    ]
    jaxpr = jax.make_jaxpr(f)(*shapes).jaxpr
    old, new = (jaxpr.outvars, jaxpr.invars) if as_result else (jaxpr.invars, jaxpr.outvars)
    names = dict(zip(old, variables, strict=True))

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]

    eqns = [
        e.replace(
            invars=renamed(e.invars), outvars=renamed(e.outvars), source_info=like.source_info
        )
        for e in jaxpr.eqns
    ]
    return eqns, list(new)
