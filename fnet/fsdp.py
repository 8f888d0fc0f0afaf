"""Fully sharded data parallelism (FSDP, ZeRO): gather parameters where they are used.

`shard_state` decides how a train state is divided. `gather_at_use` rewrites a traced train step,
after differentiation. So it holds for any loss, gradient mode and remat policy: forward pass,
rematerialization and backward pass each gather a parameter where it meets data, and free it
afterwards.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fnet.jaxpr import ELEMENTWISE, Scan, aval
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
      >>> from jax.sharding import AxisType
      >>> mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
      >>> def create(key):
      ...     params = {
      ...         "kernel": jnp.ones((64, 256)),
      ...         "bias": jnp.zeros(256),
      ...     }
      ...     return fnet.TrainState.create(
      ...         params=params, optimizer=optax.adam(1e-3), key=key
      ...     )
      >>> shapes = fnet.fsdp.shard_state(
      ...     jax.eval_shape(create, jax.random.key(0)), mesh
      ... )
      >>> shapes.params["kernel"].sharding.spec, shapes.params["bias"].sharding.spec
      (P(None, 'fsdp'), P())
      >>> shardings = jax.tree.map(lambda a: a.sharding, shapes)
      >>> state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
      >>> state.params["kernel"].addressable_shards[0].data.shape
      (64, 64)

    References:
      Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter
      models", arXiv:1910.02054, stage 3.
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
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
      >>> from fnet.fsdp import gather_at_use
      >>> mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
      >>> rows = NamedSharding(mesh, PartitionSpec("fsdp"))
      >>> grad = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())
      >>> w, x = jax.device_put((jnp.ones((8, 4)), jnp.ones((16, 8))), rows)
      >>> sharded = gather_at_use(grad, (rows, None), rows)
      >>> bool(jnp.allclose(jax.jit(sharded)(w, x), grad(w, x)))
      True

    References:
      Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter
      models", arXiv:1910.02054, stage 3.
    """
    meshes = [s.mesh for s in jax.tree.leaves((in_shardings, out_shardings)) if _is_sharded(s)]
    if not meshes or AxisType.Explicit in meshes[0].axis_types:
        return f
    mesh: Mesh = meshes[0]

    def sharded(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        in_specs = _specs(in_shardings, args)
        closed, shapes = jax.make_jaxpr(
            lambda *leaves: f(*jax.tree.unflatten(structure, leaves)), return_shape=True
        )(*leaves)
        out_specs = _specs(out_shardings, shapes)
        names = {n for spec in in_specs if spec for n in _names(spec)} if axes is None else axes
        states: list[State] = [
            DATA if spec is None else Shard(spec, v.aval.size, frozenset({i}))
            for i, (v, spec) in enumerate(zip(closed.jaxpr.invars, in_specs, strict=True))
        ]
        search = _Gather(mesh, frozenset(names), None)
        search.visit(closed.jaxpr, states)
        gather = _Gather(mesh, frozenset(names), search)
        jaxpr, _ = gather.visit(closed.jaxpr, states)
        jaxpr, _ = _shard_results(mesh, jaxpr, [None] * len(leaves), out_specs)
        results = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return sharded


def _is_sharding(sharding: Any) -> bool:
    return isinstance(sharding, jax.sharding.Sharding)


def _is_sharded(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and any(
        sharding.mesh.shape[name] > 1 for name in _names(tuple(sharding.spec))
    )


def _names(spec: Sequence[Any]) -> Iterator[str]:
    """Yield the mesh axes of a spec."""
    for entry in spec:
        if entry is not None:
            yield from entry if isinstance(entry, tuple) else (entry,)


def _specs(shardings: Any, tree: Any) -> list[Spec | None]:
    """Return the spec of each leaf of a tree; None if it is not sharded."""
    specs: list[Spec | None] = []

    def add(sharding: Any, subtree: Any) -> None:
        for leaf in jax.tree.leaves(subtree):
            padding = [None] * (leaf.ndim - len(sharding.spec)) if _is_sharded(sharding) else []
            specs.append((*sharding.spec, *padding) if _is_sharded(sharding) else None)

    jax.tree.map(add, shardings, tree, is_leaf=lambda s: s is None or _is_sharding(s))
    return specs


# Gathers.


class Shard(NamedTuple):
    """A value that stays sharded: a parameter, or what depends on parameters alone.

    Attributes:
      spec: Its sharding; None if unknown.
      size: Number of elements, without those that a broadcast repeats.
      params: Numbers of the parameters.
    """

    spec: Spec | None
    size: int
    params: frozenset[int]


DATA = "data"
"""State of a value that depends on data."""

State = Shard | str | None
"""None: a constant."""


class _Gather:
    """Insert gathers into a jaxpr.

    Attributes:
      gathered: Parameters that were gathered.
      stacked: Parameters that a scan has sliced.
    """

    def __init__(self, mesh: Mesh, axes: frozenset[str], search: "_Gather | None") -> None:
        self._mesh, self._axes, self._search = mesh, axes, search
        self.gathered: set[int] = set()
        self.stacked: set[int] = set()

    def visit(self, jaxpr: Jaxpr, states: Sequence[State]) -> tuple[Jaxpr, list[State]]:
        """Rewrite a jaxpr, and return the states of its results."""
        known: dict[Any, State] = dict.fromkeys(jaxpr.constvars)
        known |= zip(jaxpr.invars, states, strict=True)
        eqns: list[JaxprEqn] = []

        def arrays_of_data(variables: Sequence[Any]) -> list[Any]:
            return [v for v in variables if known.get(v) == DATA and _is_array(v)]

        latest = arrays_of_data(jaxpr.invars)[:1]  # the last array of data so far
        for eqn in jaxpr.eqns:
            inputs = [None if isinstance(v, Literal) else known[v] for v in eqn.invars]
            codes = [i for i, v in enumerate(eqn.invars) if _is_code(v) and _is_shard(inputs[i])]
            if codes and eqn.primitive.name not in _MOVES | {*_CALLS, *_CONTROL}:
                # Quantized weights are gathered before they are dequantized.
                new, whole = self._with_whole(eqn, inputs, codes, latest)
                new = [*new, whole]
                results: Sequence[State] = [DATA] * len(eqn.outvars)
            else:
                new, results = self._equation(eqn, inputs)
            eqns += new
            known |= zip(eqn.outvars, results, strict=True)
            latest = arrays_of_data(eqn.outvars)[-1:] or latest
        outputs = [None if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]
        return jaxpr.replace(eqns=eqns), outputs

    def _equation(
        self, eqn: JaxprEqn, states: list[State]
    ) -> tuple[list[JaxprEqn], Sequence[State]]:
        name = eqn.primitive.name
        if not any(isinstance(s, Shard) for s in states):
            return [eqn], [DATA if DATA in states else None] * len(eqn.outvars)
        if name == "shard_map":
            return [eqn], [DATA] * len(eqn.outvars)
        if name == "optimization_barrier":
            return [eqn], states
        if name == "scan":
            return self._scan(eqn, states)
        if name == "while":
            return self._while(eqn, states)
        if name == "cond":
            return self._cond(eqn, states)
        if (param := _called(eqn)) is not None:
            inner, results = self._visit_closed(eqn.params[param], states)
            return [_with_params(eqn, {param: inner})], results
        shards = [s for s in states if isinstance(s, Shard)]
        if DATA not in states or _is_elementwise(eqn, shards):
            return [eqn], _after(eqn, shards)
        positions = [i for i, s in enumerate(states) if isinstance(s, Shard)]
        eqns, eqn = self._with_whole(eqn, states, positions)
        return [*eqns, eqn], [DATA] * len(eqn.outvars)

    def _with_whole(
        self,
        eqn: JaxprEqn,
        states: Sequence[State],
        positions: Sequence[int],
        after: Sequence[Any] = (),
    ) -> tuple[list[JaxprEqn], JaxprEqn]:
        """Return the gathers of some operands, and the equation of the gathered operands.

        Args:
          eqn: An equation.
          states: States of its operands.
          positions: Numbers of the operands to gather.
          after: Further variables to wait for.
        """
        atoms = list(eqn.invars)
        params = frozenset().union(*(_shard(states[i]).params for i in positions))
        self.gathered |= params
        # Compilers merge gathers that nothing orders. One gather would then serve several layers,
        # or both the forward and the backward pass, and its result would stay alive in between.
        met = [v for v, s in zip(atoms, states, strict=True) if s == DATA and _is_array(v)]
        met += after
        waiting = list(dict.fromkeys([*(atoms[i] for i in positions), *met]))
        eqns, results = _spliced(_barrier, waiting, eqn)
        renamed = dict(zip(waiting, results, strict=True))
        atoms = [v if isinstance(v, Literal) else renamed.get(v, v) for v in atoms]
        for i in positions:
            gather = functools.partial(self._gathered, _shard(states[i]).spec)
            new, (atoms[i],) = _spliced(gather, [atoms[i]], eqn)
            eqns += new
        return eqns, eqn.replace(invars=atoms)

    def _gathered(self, spec: Spec | None, a: Any) -> Any:
        if spec is None:
            return _constrained(self._mesh, (), a)
        # Sharded before, so that the compiler does not gather what the array is computed from.
        whole = tuple(_without(self._axes, entry) for entry in spec)
        return _constrained(self._mesh, whole, _constrained(self._mesh, spec, a))

    def _visit_closed(self, inner: Any, states: Sequence[State]) -> tuple[Any, list[State]]:
        jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
        new, results = self.visit(jaxpr, states)
        return inner.replace(jaxpr=new) if isinstance(inner, ClosedJaxpr) else new, results

    def _scan(self, eqn: JaxprEqn, states: list[State]) -> tuple[list[JaxprEqn], Sequence[State]]:
        scan, length = Scan.of(eqn), eqn.params["length"]
        first_x = scan.num_consts + scan.num_carry

        def slice_of(state: State) -> State:
            if not isinstance(state, Shard) or state.spec is None:
                return state
            if state.spec[0] is not None:
                return DATA
            self.stacked |= state.params
            return state._replace(spec=state.spec[1:], size=state.size // length)

        carry, xs = states[scan.num_consts : first_x], states[first_x:]
        inputs = [*self._consts(states[: scan.num_consts], states), *carry, *map(slice_of, xs)]
        body, inputs, results = self._loop(eqn.params["jaxpr"], inputs, scan.num_consts, len(carry))
        eqns, eqn = self._with_whole_inputs(eqn, states, inputs)
        outputs = [
            s._replace(spec=s.spec and (None, *s.spec), size=s.size * length)
            if isinstance(s, Shard)
            else s
            for s in results[scan.num_carry :]
        ]
        carry = inputs[scan.num_consts : first_x]
        return [*eqns, _with_params(eqn, {"jaxpr": body})], [*carry, *outputs]

    def _while(self, eqn: JaxprEqn, states: list[State]) -> tuple[list[JaxprEqn], Sequence[State]]:
        first, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = states[first + num_consts :]
        inputs = [*self._consts(states[first : first + num_consts], states), *carry]
        body, inputs, _ = self._loop(eqn.params["body_jaxpr"], inputs, num_consts, len(carry))
        in_condition = [DATA if isinstance(s, Shard) else s for s in states[:first]]
        eqns, eqn = self._with_whole_inputs(eqn, states, [*in_condition, *inputs])
        carry = inputs[num_consts:]
        condition, _ = self._visit_closed(eqn.params["cond_jaxpr"], [*in_condition, *carry])
        params = {"cond_jaxpr": condition, "body_jaxpr": body}
        return [*eqns, _with_params(eqn, params)], carry

    def _consts(self, consts: Sequence[State], states: Sequence[State]) -> list[State]:
        """Return the states, in a loop, of values that all its iterations share."""
        if self._search is None:
            return list(consts)
        # A loop over time gathers its weights once. A loop over microbatches, which uses all
        # parameters, must not hold all of them, nor all layers of a stack.
        in_loop = frozenset().union(*(s.params for s in states if isinstance(s, Shard)))
        enters = in_loop >= self._search.gathered
        return [
            DATA if isinstance(s, Shard) and not (enters or s.params & self._search.stacked) else s
            for s in consts
        ]

    def _loop(
        self, jaxpr: ClosedJaxpr, inputs: list[State], first: int, count: int
    ) -> tuple[ClosedJaxpr, list[State], list[State]]:
        """Visit the body of a loop until the states of its carry, ``count`` from ``first``, stay.

        Returns:
          The body, and the states of its inputs and results.
        """
        while True:
            body, results = self._visit_closed(jaxpr, inputs)
            before = inputs[first : first + count]
            carry = [b if r in (None, b) else DATA for b, r in zip(before, results, strict=False)]
            if carry == before:
                return body, inputs, results
            inputs = [*inputs[:first], *carry, *inputs[first + count :]]

    def _with_whole_inputs(
        self, eqn: JaxprEqn, states: Sequence[State], inputs: Sequence[State]
    ) -> tuple[list[JaxprEqn], JaxprEqn]:
        """Gather the operands of a loop that are data inside of it."""
        positions = [i for i, s in enumerate(states) if isinstance(s, Shard) and inputs[i] == DATA]
        return self._with_whole(eqn, states, positions) if positions else ([], eqn)

    def _cond(self, eqn: JaxprEqn, states: list[State]) -> tuple[list[JaxprEqn], Sequence[State]]:
        visited = [self._visit_closed(branch, states[1:]) for branch in eqn.params["branches"]]
        branches, results = zip(*visited, strict=True)
        same = [s[0] if len(set(s)) == 1 else DATA for s in zip(*results, strict=True)]
        return [_with_params(eqn, {"branches": branches})], same


def _is_shard(state: State) -> bool:
    return isinstance(state, Shard)


def _is_code(atom: Any) -> bool:
    """Whether a value is an array of one-byte integers, as in `fnet.quantization`."""
    dtype = getattr(aval(atom), "dtype", jnp.float32)
    return jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize == 1


def _shard(state: State) -> Shard:
    assert isinstance(state, Shard)
    return state


def _without(axes: frozenset[str], entry: Any) -> Any:
    """Return the mesh axes of one array axis, without some."""
    rest = tuple(n for n in _names([entry]) if n not in axes)
    return rest or None


def _is_elementwise(eqn: JaxprEqn, shards: Sequence[Shard]) -> bool:
    """Whether an equation combines shards elementwise with arrays of their shape."""
    if eqn.primitive.name not in _ELEMENTWISE:
        return False
    shape = aval(eqn.outvars[0]).shape
    shapes = {aval(v).shape for v in eqn.invars} - {()}
    return shapes <= {shape} and all(s.size == math.prod(shape) for s in shards)


def _after(eqn: JaxprEqn, shards: Sequence[Shard]) -> list[State]:
    """Return the states of the results of an equation that keeps its operands sharded."""
    params = frozenset().union(*(s.params for s in shards))
    specs = {s.spec for s in shards if s.size > 1}
    spec = specs.pop() if len(specs) == 1 else None
    # A bias that is broadcast to all rows of a batch still has the elements of one row.
    size = max(s.size for s in shards) if eqn.primitive.name in _ELEMENTWISE | _REARRANGED else None
    return [
        Shard(spec and _spec_after(eqn, spec, v), size or aval(v).size, params) for v in eqn.outvars
    ]


_ELEMENTWISE = ELEMENTWISE | {"add_any", "stop_gradient"}
_REARRANGED = frozenset(("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims"))
_MOVES = _REARRANGED | {"slice", "dynamic_slice", "optimization_barrier", "copy"}
"""Primitives that move elements, or some of them. Codes stay sharded behind them."""

_CONTROL = ("scan", "while", "cond", "shard_map")


def _spec_after(eqn: JaxprEqn, spec: Spec, out: Any) -> Spec | None:
    """Return the spec of an equation's result, from the spec of its operand."""
    name, shape = eqn.primitive.name, aval(out).shape
    if name in _ELEMENTWISE:
        return spec if len(spec) == len(shape) else None
    if name == "transpose":
        return tuple(spec[i] for i in eqn.params["permutation"])
    if name == "broadcast_in_dim":
        entries: list[Any] = [None] * len(shape)
        for i, entry in zip(eqn.params["broadcast_dimensions"], spec, strict=True):
            entries[i] = entry
        return tuple(entries)
    before = aval(eqn.invars[0]).shape
    if name in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(before, shape, spec)
    if name in ("slice", "dynamic_slice", "rev") and len(shape) == len(before):
        pairs = zip(before, shape, spec, strict=True)
        return spec if all(a == b or entry is None for a, b, entry in pairs) else None
    return None


def _reshaped(before: Sequence[int], after: Sequence[int], spec: Spec) -> Spec | None:
    """Return the spec after a reshape; None if a sharded axis is not kept as it is."""
    entries: list[Any] = [None] * len(after)
    for i, entry in enumerate(spec):
        if entry is None:
            continue
        left, size = math.prod(before[:i]), before[i]
        same = [j for j, n in enumerate(after) if n == size and math.prod(after[:j]) == left]
        if not same:
            return None
        entries[same[0]] = entry
    return tuple(entries)


# Results.


def _shard_results(
    mesh: Mesh, jaxpr: Jaxpr, in_specs: Sequence[Spec | None], out_specs: Sequence[Spec | None]
) -> tuple[Jaxpr, list[Spec | None]]:
    """Shard results, and what they are computed from elementwise, where it is computed.

    Args:
      mesh: Mesh of the specs.
      jaxpr: A jaxpr.
      in_specs: Specs of references among its arguments.
      out_specs: Specs of its results.

    Returns:
      The rewritten jaxpr, and specs for its arguments.
    """
    specs: dict[Any, Spec | None] = {}

    def want(atoms: Sequence[Any], wanted: Sequence[Spec | None]) -> None:
        for v, spec in zip(atoms, wanted, strict=True):
            if spec is not None and not isinstance(v, Literal) and any(spec):
                specs.setdefault(v, spec)

    want(jaxpr.invars, in_specs)
    want(jaxpr.outvars, out_specs)
    reversed_eqns: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        outs = [specs.get(v) for v in eqn.outvars]
        refs = [specs.get(v) if _is_ref(v) else None for v in eqn.invars]
        if not any([*outs, *refs]):
            reversed_eqns.append(eqn)
            continue
        after, inputs = _equation_of_results(mesh, eqn, refs, outs)
        want(eqn.invars, inputs)
        reversed_eqns += after[::-1]
    return jaxpr.replace(eqns=reversed_eqns[::-1]), [specs.get(v) for v in jaxpr.invars]


def _equation_of_results(
    mesh: Mesh, eqn: JaxprEqn, refs: Sequence[Spec | None], outs: Sequence[Spec | None]
) -> tuple[list[JaxprEqn], Sequence[Spec | None]]:
    """Return an equation whose results are sharded, and specs for its operands."""
    name, nothing = eqn.primitive.name, [None] * len(eqn.invars)

    def visit(inner: Any, ins: Sequence[Spec | None], outs: Sequence[Spec | None]) -> Any:
        jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
        new, wanted = _shard_results(mesh, jaxpr, ins, outs)
        return inner.replace(jaxpr=new) if isinstance(inner, ClosedJaxpr) else new, wanted

    if name == "scan":
        scan = Scan.of(eqn)
        first_x = scan.num_consts + scan.num_carry
        ins = [*refs[:first_x], *(s and s[1:] for s in refs[first_x:])]
        ys = [s[1:] if s and s[0] is None else None for s in outs[scan.num_carry :]]
        body, wanted = visit(eqn.params["jaxpr"], ins, [*outs[: scan.num_carry], *ys])
        carry = [a or b for a, b in zip(outs, wanted[scan.num_consts : first_x], strict=False)]
        xs = [s and (None, *s) for s in wanted[first_x:]]
        inputs = [*wanted[: scan.num_consts], *carry, *xs]
        return [_with_params(eqn, {"jaxpr": body})], inputs
    if name == "while":
        first, carry = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body, wanted = visit(eqn.params["body_jaxpr"], refs[first:], outs)
        inputs = [*wanted[:carry], *(a or b for a, b in zip(outs, wanted[carry:], strict=True))]
        return [_with_params(eqn, {"body_jaxpr": body})], [*nothing[:first], *inputs]
    if name == "cond":
        visited = [visit(branch, refs[1:], outs) for branch in eqn.params["branches"]]
        wanted = [next(filter(None, s), None) for s in zip(*(w for _, w in visited), strict=True)]
        return [_with_params(eqn, {"branches": tuple(b for b, _ in visited)})], [None, *wanted]
    if (param := _called(eqn)) is not None:
        inner, wanted = visit(eqn.params[param], refs, outs)
        return [_with_params(eqn, {param: inner})], wanted
    if name == "optimization_barrier":
        return [eqn], outs
    if name in ("freeze", "new_ref"):
        return [eqn], [*outs, *nothing[1:]]
    if any(refs):  # an addition to a reference, or to a part of it
        values = [
            refs[0][len(refs[0]) - len(aval(v).shape) :] if refs[0] and not _is_ref(v) else None
            for v in eqn.invars
        ]
        return [eqn], [
            s if s and len(s) == len(aval(v).shape) else None
            for s, v in zip(values, eqn.invars, strict=True)
        ]
    spec = outs[0]
    before = _specs_before(eqn, spec) if len(outs) == 1 and spec else None
    if before is not None:
        return [eqn], before
    after: list[JaxprEqn] = []
    outvars = list(eqn.outvars)
    for i, (v, spec) in enumerate(zip(eqn.outvars, outs, strict=True)):
        if spec and not _is_ref(v):
            constrain = functools.partial(_constrained, mesh, spec)
            new, (outvars[i],) = _spliced(constrain, [v], eqn, as_result=True)
            after += new
    return [eqn.replace(outvars=outvars), *after], nothing


def _specs_before(eqn: JaxprEqn, spec: Spec) -> list[Spec | None] | None:
    """Return specs of operands that give the result a spec; None if the equation is no such."""
    name, shape = eqn.primitive.name, aval(eqn.outvars[0]).shape
    if name in _ELEMENTWISE:
        return [spec if aval(v).shape == shape else None for v in eqn.invars]
    if name == "transpose":
        entries: list[Any] = [None] * len(shape)
        for i, axis in enumerate(eqn.params["permutation"]):
            entries[axis] = spec[i]
        return [tuple(entries)]
    before = aval(eqn.invars[0]).shape if eqn.invars else ()
    if name in ("reshape", "squeeze", "expand_dims"):
        reshaped = _reshaped(shape, before, spec)
        return None if reshaped is None else [reshaped]
    if name == "broadcast_in_dim" and not math.prod(before) > 1:
        return [None] * len(eqn.invars)
    return None


# Equations.


def _called(eqn: JaxprEqn) -> str | None:
    """Return the name of the parameter that holds the jaxpr of a call."""
    if eqn.primitive.name not in _CALLS:
        return None
    return next((name for name in ("jaxpr", "call_jaxpr") if name in eqn.params), None)


_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
)


def _with_params(eqn: JaxprEqn, params: dict[str, Any]) -> JaxprEqn:
    new: JaxprEqn = eqn.replace(params=eqn.params | params)
    return new


def _is_array(atom: Any) -> bool:
    is_key = jnp.issubdtype(aval(atom).dtype, jax.dtypes.extended)
    return not is_key and not _is_ref(atom)


def _is_ref(atom: Any) -> bool:
    return hasattr(aval(atom), "inner_aval")


def _barrier(*arrays: Any) -> Any:
    return jax.lax.optimization_barrier(arrays)


def _constrained(mesh: Mesh, spec: Spec, a: Any) -> Any:
    return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, PartitionSpec(*spec)))


def _spliced(
    f: Callable[..., Any], variables: Sequence[Any], like: JaxprEqn, *, as_result: bool = False
) -> tuple[list[JaxprEqn], list[Any]]:
    """Return the equations of a function of some variables, and the variables of its results.

    Args:
      f: A function whose results are arrays.
      variables: Its arguments.
      like: The equation whose named scopes and source line the new ones get.
      as_result: Whether ``variables`` are the results instead. Then the arguments are returned.
    """
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
        if hasattr(a := aval(v), "weak_type")
        else jax.ShapeDtypeStruct(a.shape, a.dtype)
        for v in variables
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
