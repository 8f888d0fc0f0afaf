"""One backward pass that keeps the gradients of all examples apart.

`per_example_gradients` defines the gradient of an example as the gradient of the loss on a
batch that holds it alone, and computes it in this way:

1. Trace the loss of the whole batch, only to refuse losses that mix examples (`batch_axis`).
2. Trace the loss of a batch of one. Differentiate it with respect to taps (`taps`), where
   parameters meet data. Data and cotangents there are the factors of the gradients (`ghost_norm`).
   A parameter that is used in another way is differentiated itself.
3. Execute this program for all examples (`batching`). It sees one example at a time, so no loss
   can make one example's gradient depend on another.
"""

import collections
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fnet.autodiff.examples import (
    Examples,
    PerExampleLoss,
    check_losses,
    check_params,
    check_width,
    is_key,
)
from fnet.autodiff.per_example.batch_axis import (
    KEY,
    BatchAxis,
    Mixed,
    Shared,
    Unknown,
    find_batch_axes,
)
from fnet.autodiff.per_example.batching import Rows, Value, is_separable, rows_of, run_for_batch
from fnet.autodiff.per_example.derived import DerivedGradients, split_derived
from fnet.autodiff.per_example.hoist import hoist
from fnet.autodiff.per_example.parameter_gradients import (
    ChunkedGradients,
    FactoredGradients,
    GroupGradients,
    MaterializedGradients,
    ParameterGradients,
    PerExampleGradients,
    SquaredNorms,
    UseInputs,
    ZeroGradients,
)
from fnet.autodiff.per_example.taps import OWN_TRANSPOSES, Uses, evaluate_with_taps, find_uses
from fnet.jaxpr import aval, called_jaxpr, evaluate, find_equations, interpret, source_line
from fnet.mesh import equally_varying, varying_axes

BatchLoss = Callable[[list[Any], Sequence[Any]], tuple[Array, Any]]
"""``(params, batch) -> (losses, aux)``."""

_EXTRA_BYTES = 16 * 2**20
"""Per-example gradients may take as many bytes as all parameters, plus this many."""


def per_example_gradients(
    name: str,
    loss: PerExampleLoss,
    params: Any,
    examples: Examples,
    *,
    has_aux: bool = False,
    width: int | None = None,
    remat: bool = False,
) -> PerExampleGradients:
    """Differentiate the losses of all examples in one backward pass.

    Args:
      name: Name of the caller, for error messages.
      loss: See `PerExampleLoss`.
      params: Floating-point arrays.
      examples: The loss's other arguments.
      has_aux: Whether the loss returns ``(losses, aux)``.
      width: Number of examples at a time for gradients computed in chunks; by default as many
        as take no more memory than the parameters.
      remat: Whether parameters inside of `jax.checkpoint` get a second backward pass for sums,
        so that nothing is saved for them. Sums may have one set of scales only.

    Raises:
      TypeError: Parameters or losses are not floating-point, ``width`` is not an int, or
        the loss does not return a pair although ``has_aux`` is True.
      ValueError: The loss does not return one loss per example, ``width`` is less than 1, or a
        layer mixes examples.
    """
    check_params(name, params)
    check_width(name, width)
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, params))

    def batch_loss(params: list[Any], batch: Sequence[Any]) -> tuple[Array, Any]:
        out = loss(jax.tree.unflatten(treedef, params), *batch)
        if not has_aux:
            return out, None
        if not isinstance(out, list | tuple) or len(out) != 2:
            raise TypeError(
                f"{name}: has_aux=True expects a loss that returns (losses, aux), "
                f"got {type(out).__name__}."
            )
        losses, aux = out
        return losses, aux

    size = examples.size
    leaves, rows = equally_varying((leaves, examples.leaves))
    examples = examples._replace(leaves=rows)
    aux_treedef, aux_shapes = _check_whole_batch(name, batch_loss, leaves, examples)
    closed = hoist(_trace_one(name, batch_loss, leaves, examples), len(leaves))
    if not size:
        losses, aux = batch_loss(leaves, examples.rebuild_batch(examples.leaves))
        none: dict[int, ParameterGradients]
        none = {i: ZeroGradients(leaf, 0) for i, leaf in enumerate(leaves)}
        return PerExampleGradients(
            losses, aux, [False] * len(aux_shapes), treedef, none, [], None
        )  # fmt: skip

    result = _differentiate(name, closed, leaves, examples, width, remat)
    shapes_of_one = [a.shape for a in closed.out_avals[1:]]
    aux = _batched_aux(result.aux, shapes_of_one, aux_shapes, size)
    chunked = None
    if result.in_chunks:
        nbytes = sum(leaves[i].nbytes for i in result.in_chunks)
        default = max(1, min(_memory_budget(leaves) // max(nbytes, 1), size))
        if not all(map(is_separable, closed.jaxpr.eqns)):
            width = 1
        chunked = ChunkedGradients(closed, leaves, examples, result.in_chunks, width or default)
    return PerExampleGradients(
        result.losses, jax.tree.unflatten(aux_treedef, aux),
        [isinstance(a, Rows) for a in result.aux], treedef, result.by_param, result.groups, chunked,
    )  # fmt: skip


def _check_whole_batch(
    name: str, function: BatchLoss, params: Sequence[Any], examples: Examples
) -> tuple[Any, list[tuple[int, ...]]]:
    """Trace the loss of the whole batch and refuse it if it mixes examples.

    Returns:
      The structure of ``aux``, and the shapes of its leaves for ``max(batch, 2)`` examples.
    """
    size = max(examples.size, 2)  # With a single example the batch axis has no effect.
    batch = _shapes(examples, size)
    closed, (losses, aux) = _make_jaxpr(function, params, examples, batch)
    check_losses(name, losses, size)
    _check_effects(name, closed)
    # A single key of the batch becomes a key of each example.
    states = [Shared()] * len(params) + [
        KEY if shared else BatchAxis(0) for shared in examples.is_single_key
    ]
    state = find_batch_axes(closed, states, size)[0]
    if isinstance(state, Mixed):
        raise ValueError(_refusal(name, state))
    if isinstance(state, Unknown):
        _trace_one(name, function, params, examples)  # It must work for a batch of one.
        _compare_losses(name, state, function, params, examples)
    return jax.tree.structure(aux), [a.shape for a in jax.tree.leaves(aux)]


def _refusal(name: str, state: Mixed) -> str:
    where = state.layer or "the loss"
    operation = f"{state.operation}{f' at {state.line}' * bool(state.line)}"
    if state.by_position:
        return (
            f"{name}: the loss of an example depends on its position in the batch, in {where} "
            f"({operation}). Pass arrays with one row per example as arguments. For dropout, pass "
            "the random key as an argument; each example then gets a key of its own."
        )
    return (
        f"{name}: {where} mixes the examples of a batch ({operation}), so the gradient of one "
        "example does not exist. For batch norm, use frozen statistics (train=False) or group "
        "norm (fnet.layers.group_norm)."
    )


def _compare_losses(
    name: str, state: Unknown, function: BatchLoss, params: Sequence[Any], examples: Examples
) -> None:
    """Compare the losses of the whole batch with batches of one, if they are concrete."""
    reason = (
        f"{name}: it is not known whether {state.operation or 'the loss'}"
        f"{f' at {state.line}' * bool(state.line)} mixes the examples of a batch"
    )
    if any(isinstance(a, jax.core.Tracer) for a in [*params, *examples.leaves]):
        warnings.warn(
            f"{reason}; fnet takes the gradients of batches of one example. Call it once without "
            "jax.jit to compare the losses.",
            stacklevel=2,
        )
        return
    if examples.size < 2:
        return

    def losses(rows: Sequence[Array]) -> Array:
        return function(list(params), examples.rebuild_batch(rows))[0]

    whole = losses(examples.leaves)
    single = jnp.concatenate(
        [losses([a[i : i + 1] for a in examples.leaves]) for i in range(examples.size)]
    )
    if any(examples.is_single_key) or jnp.allclose(whole, single, rtol=1e-3, atol=1e-5):
        return
    raise ValueError(
        f"{reason}, and the losses of the batch differ from the losses of its examples alone by up "
        f"to {float(jnp.abs(whole - single).max()):.3g}. Write the loss so that each example's "
        "loss depends on this example alone."
    )


def _shapes(examples: Examples, size: int) -> list[Any]:
    """Shapes of a batch of ``size`` examples."""
    if any(map(varying_axes, examples.leaves)):  # A shape has no mesh axes that it varies over.
        return [a[jnp.zeros(size, int)] for a in examples.leaves]
    return [jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype) for a in examples.leaves]


def _make_jaxpr(
    function: BatchLoss,
    params: Sequence[Any],
    examples: Examples,
    batch: Sequence[jax.ShapeDtypeStruct],
) -> tuple[ClosedJaxpr, Any]:
    """Trace the loss of a batch of these shapes; also return the shapes of its results."""

    def flat(*args: Any) -> Any:
        n = len(params)
        return function(list(args[:n]), examples.rebuild_batch(args[n:]))

    result: tuple[ClosedJaxpr, Any] = jax.make_jaxpr(flat, return_shape=True)(*params, *batch)
    return result


def _trace_one(
    name: str, function: BatchLoss, params: Sequence[Any], examples: Examples
) -> ClosedJaxpr:
    """Trace the loss of a batch that holds one example: ``(*params, *batch) -> (losses, *aux)``."""
    try:
        closed, (losses, _) = _make_jaxpr(function, params, examples, _shapes(examples, 1))
    except Exception as error:
        error.add_note(
            f"{name} traced the loss of a batch of one example, which must work. jax.shard_map "
            "goes around the gradient, not into the loss."
        )
        raise
    _check_effects(name, closed)
    if losses.shape != (1,):
        raise ValueError(
            f"{name}: expected losses of shape [1] for a batch of one, got {losses.shape}; pass "
            "arrays with one row per example as arguments, not by closure or in params."
        )
    return closed


def _check_effects(name: str, closed: ClosedJaxpr) -> None:
    """Refuse programs that could carry values from one example to another."""
    if effects := [e for e in closed.effects if "Debug" not in type(e).__name__]:
        raise ValueError(
            f"{name}: the loss has side effects ({', '.join(map(str, effects))}), which could "
            "carry values from one example to another. Remove mutable arrays (jax.new_ref) and "
            "ordered callbacks from it."
        )
    for primitive in ("new_ref", "empty_ref", "freeze"):
        if eqn := next(find_equations(closed, primitive), None):
            raise ValueError(
                f"{name}: mutable arrays are not supported in the loss ({primitive} at "
                f"{source_line(eqn)}). Use functional updates, such as x.at[i].set(y)."
            )


class _Differentiated(NamedTuple):
    """Results of the backward pass, for all examples.

    Attributes:
      losses: Losses, [batch].
      aux: Leaves of ``aux``.
      by_param: Gradients by number of the parameter.
      groups: Gradients of parameters that are combined before they meet data.
      in_chunks: Parameters whose gradients would take too much memory.
    """

    losses: Array
    aux: list[Value]
    by_param: dict[int, ParameterGradients]
    groups: list[GroupGradients]
    in_chunks: list[int]


def _differentiate(
    name: str,
    closed: ClosedJaxpr,
    params: Sequence[Any],
    examples: Examples,
    width: int | None,
    remat: bool,
) -> _Differentiated:
    """Differentiate the loss of one example, and execute the result for all examples."""
    size = examples.size
    split = split_derived(closed, len(params))
    leaves = [*params, *split.values(params)]
    count = len(leaves)
    uses = find_uses(split.loss, count)
    materialized, too_large = _split_nonlinear(uses, leaves, size, width)
    in_chunks = {i for i in too_large if i < len(params)}
    groups = []
    for group in split.groups:
        members = {*group.params, *(len(params) + i for i in group.derived)}
        if members & set(too_large):
            in_chunks |= set(group.params)
        else:
            groups.append(group)

    grouped = {i for group in groups for i in group.params}
    # A second backward pass scales cotangents before the rules of custom derivatives.
    remat &= all(map(_is_linear, find_equations(split.loss, OWN_TRANSPOSES)))
    measured = _rematerialized(uses, range(len(params)), grouped) if remat else {}

    def differentiate(*args: Any) -> Any:
        zeros: list[Array] = [
            jnp.zeros(u.scan_lengths)
            if k in measured
            else jnp.zeros((*u.scan_lengths, *u.out.shape), u.out.dtype)
            for k, u in enumerate(uses.linear)
        ]
        # The cotangent of a zero that all devices of a `jax.shard_map` share would be their sum.
        zeros, *_ = equally_varying((zeros, args))

        def tapped_loss(taps: list[Array], selected: dict[int, Any]) -> Any:
            own = [selected.get(i, p) for i, p in enumerate(args[:count])]
            (losses, *aux), data = evaluate_with_taps(
                split.loss, [*own, *args[count:]], uses.linear, taps, measured
            )
            return losses, (aux, data)

        selected = {i: args[i] for i in materialized}
        losses, backward, (aux, data) = jax.vjp(tapped_loss, zeros, selected, has_aux=True)
        return losses, aux, data, *backward(jnp.ones_like(losses))

    batch_of_one = _shapes(examples, 1)
    program, shapes = jax.make_jaxpr(differentiate, return_shape=True)(*leaves, *batch_of_one)
    _check_effects(name, program)  # A derivative rule may have some.
    results = run_for_batch(program, [*leaves, *(Rows(a, 0) for a in examples.leaves)], size)
    losses, aux, data, cts, gradients = jax.tree.unflatten(jax.tree.structure(shapes), results)
    by_leaf: dict[int, ParameterGradients] = {
        i: MaterializedGradients(rows_of(g, leaves[i].shape, size)) for i, g in gradients.items()
    }
    inputs: dict[int, list[UseInputs]] = {}
    squares: dict[int, Array] = {}
    for k, (use, x, ct, shape) in enumerate(zip(uses.linear, data, cts, shapes[2], strict=True)):
        n = len(use.scan_lengths)
        if k in measured:
            layers = rows_of(ct, use.scan_lengths, size).reshape(size, -1)
            squares[use.view.param] = layers.sum(1)
            continue
        if use.equation.data is None:
            x = jnp.zeros((*use.scan_lengths, size, 0))
        else:
            x = rows_of(x, shape.shape, size, n)
        ct = rows_of(ct, (*use.scan_lengths, *use.out.shape), size, n)
        inputs.setdefault(use.view.param, []).append(UseInputs(use, x, use.view.unscale(ct)))
    by_leaf |= {i: FactoredGradients(leaves[i], of_leaf) for i, of_leaf in inputs.items()}

    def gradients_of(i: int) -> ParameterGradients:
        return by_leaf[i] if i in by_leaf and leaves[i].size else ZeroGradients(leaves[i], size)

    rematerialized = RematerializedGradients(split.loss, leaves, examples, squares)
    return _Differentiated(
        rows_of(losses, (1,), size)[:, 0],
        aux,
        {
            i: gradients_of(i)
            for i in range(len(params))
            if i not in grouped | in_chunks | set(squares)
        },
        [
            *([rematerialized] if squares else []),
            *(
                DerivedGradients(
                    group,
                    [params[i] for i in group.params],
                    {i: by_leaf[i] for i in group.params if i in by_leaf},
                    [gradients_of(len(params) + i) for i in group.derived],
                )
                for group in groups
            ),
        ],
        sorted(in_chunks),
    )


def _is_linear(eqn: JaxprEqn) -> bool:
    """Whether the backward rule of a `jax.custom_vjp` is linear in the cotangent.

    It is if JAX can transpose it.
    """
    if eqn.primitive.name != "custom_vjp_call":
        return False
    inputs, outputs = (
        [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in variables]
        for variables in (eqn.invars, eqn.outvars)
    )
    floating = [jnp.issubdtype(a.dtype, jnp.inexact) for a in inputs]

    def backward(inputs: list[Any], cotangents: list[Any]) -> Any:
        def function(*selected: Any) -> list[Any]:
            given = iter(selected)
            values = [next(given) if f else a for f, a in zip(floating, inputs, strict=True)]
            return evaluate(eqn, values)

        return jax.vjp(function, *(a for f, a in zip(floating, inputs, strict=True) if f))[1](
            cotangents
        )

    def without_barriers(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        # A barrier of cotangents and other values would make these depend on the cotangents.
        if eqn.primitive.name == "optimization_barrier":
            return values
        inner = called_jaxpr(eqn)
        return (
            evaluate(eqn, values) if inner is None else interpret(inner, values, without_barriers)
        )

    def transpose(inputs: list[Any], cotangents: list[Any]) -> Any:
        closed = jax.make_jaxpr(backward)(inputs, cotangents)

        def of_cotangents(cotangents: list[Any]) -> list[Any]:
            return interpret(closed, [*inputs, *cotangents], without_barriers)

        gradients = jax.eval_shape(of_cotangents, cotangents)
        zeros = [jnp.zeros(a.shape, a.dtype) for a in gradients]
        return jax.linear_transpose(of_cotangents, cotangents)(zeros)

    try:
        jax.eval_shape(transpose, inputs, outputs)
    except Exception:  # Whatever JAX says of a rule that is not linear.
        return False
    return True


def _rematerialized(uses: Uses, params: Sequence[int], grouped: Collection[int]) -> set[int]:
    """Numbers of the uses inside of `jax.checkpoint`, if each gives a parameter's norm alone."""
    counts = collections.Counter(use.view.param for use in uses.linear)
    inside = {k: use for k, use in enumerate(uses.linear) if use.in_checkpoint}
    alone = all(
        use.norm_fits
        and counts[use.view.param] == 1
        and len(use.scan_lengths) == len(use.view.scans)
        and not use.view.has_repeats
        and use.view.param in params
        and use.view.param not in grouped
        for use in inside.values()
    )
    return set(inside) if alone else set()


class RematerializedGradients(NamedTuple):
    """Gradients of parameters inside of `jax.checkpoint`, of which only norms were computed.

    Attributes:
      loss: The traced loss of a batch of one: ``(*params, *batch) -> (losses, ...)``.
      params: Its first arguments.
      examples: The batch.
      squares: `upper_squared_norms` [batch] by number of the parameter.
      strategy: See `GroupGradients`.
    """

    loss: ClosedJaxpr
    params: Sequence[Any]
    examples: Examples
    squares: dict[int, Array]
    strategy: str = "rematerialized"

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the parameters."""
        return list(self.squares)

    def squared_norms(self, whole: bool) -> dict[int, SquaredNorms]:
        """See `GroupGradients`."""
        return {i: SquaredNorms(a, jnp.zeros_like(a)) for i, a in self.squares.items()}

    def materialize(self) -> dict[int, Array]:
        """See `GroupGradients`."""
        chunks = ChunkedGradients(
            self.loss, self.params, self.examples, self.numbers, self.examples.size
        )
        return chunks.materialize()

    def weighted_sum(
        self, scales_by_param: Mapping[int, Array], is_rough: Array | None = None
    ) -> dict[int, Array]:
        """See `GroupGradients`. A second backward pass, with weighted losses."""
        scales = scales_by_param[self.numbers[0]]
        included = scales != 0
        # An example that is left out, which may be infinite, is computed as another one.
        size = self.examples.size
        number = jnp.where(included, jnp.arange(size), jnp.argmax(included))

        def replace(a: Array) -> Array:
            a = jax.random.clone(a) if is_key(a) else a  # The same masks as in the first pass.
            return a[number]

        rows = [Rows(replace(a), 0) for a in self.examples.leaves]

        def weighted_loss(selected: dict[int, Any]) -> Array:
            params = [selected.get(i, p) for i, p in enumerate(self.params)]
            losses, *_ = run_for_batch(self.loss, [*params, *rows], size, keep_rules=True)
            return (rows_of(losses, (1,), size)[:, 0] * scales).sum()

        sums = jax.grad(weighted_loss)({i: self.params[i] for i in self.numbers})
        return {i: jnp.where(included.any(), g, 0) for i, g in sums.items()}


def _batched_aux(
    aux: Sequence[Value],
    shapes: Sequence[tuple[int, ...]],
    whole: Sequence[tuple[int, ...]],
    size: int,
) -> list[Array]:
    """Leaves of ``aux`` for the batch.

    Args:
      aux: Leaves for all examples.
      shapes: Their shapes for a batch of one.
      whole: Their shapes for ``max(size, 2)`` examples.
      size: Number of examples.
    """
    leaves = []
    for value, shape, batch_shape in zip(aux, shapes, whole, strict=True):
        if not isinstance(value, Rows):
            leaves.append(value)
            continue
        rows = rows_of(value, shape, size)
        has_axis = shape[:1] == (1,) and batch_shape == (max(size, 2), *shape[1:])
        leaves.append(rows[:, 0] if has_axis else rows)
    return leaves


def _memory_budget(params: Sequence[Any]) -> int:
    """Bytes that per-example gradients may take."""
    budget: int = sum(p.nbytes for p in params) + _EXTRA_BYTES
    return budget


def _split_nonlinear(
    uses: Uses, params: Sequence[Any], size: int, width: int | None
) -> tuple[list[int], list[int]]:
    """Split parameters with nonlinear uses: gradients that are materialized, and in chunks."""
    budget = _memory_budget(params)
    materialized, in_chunks = [], []
    for i in sorted(uses.nonlinear, key=lambda i: params[i].size):
        nbytes = size * params[i].nbytes
        if nbytes <= budget and (width is None or size <= width or params[i].ndim < 2):
            materialized.append(i)
            budget -= nbytes
        else:
            in_chunks.append(i)
    return materialized, in_chunks
