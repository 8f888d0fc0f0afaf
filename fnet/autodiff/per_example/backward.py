"""One backward pass that keeps the gradients of all examples apart.

`per_example_gradients` works in three steps:

1. Trace the loss of the whole batch, find the batch axis of every value (`batch_axis`), and
   refuse losses that mix examples.
2. Differentiate the loss of the whole batch with respect to taps (`taps`), if each equation that
   combines a parameter with data has one row per example. Data and cotangents of these equations
   are the factors of all per-example gradients (`ghost_norm`). An equation that is not linear in
   a parameter runs per example with copies of the parameter, see `taps.PerExampleEquation`.
3. Otherwise, trace the loss of one example and vectorize it with `jax.vmap`. This is right for
   every loss. It is not the first choice because XLA keeps some arrays twice if they have axes
   of size 1. A parameter with nonlinear uses gets one copy per example. If the copies would
   exceed the memory budget, its gradients are computed for a few examples at a time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fnet.autodiff.examples import (
    Examples,
    PerExampleLoss,
    by_example,
    check_losses,
    check_params,
    check_width,
    is_key,
)
from fnet.autodiff.per_example.batch_axis import (
    UNKNOWN,
    BatchAxes,
    BatchAxis,
    Mixed,
    Path,
    State,
    depends_on,
    find_batch_axes,
    reachable,
)
from fnet.autodiff.per_example.ghost_norm import BiasAdd, Dot, Scale
from fnet.autodiff.per_example.parameter_gradients import (
    ChunkedGradients,
    FactoredGradients,
    MaterializedGradients,
    ParameterGradients,
    PerExampleGradients,
    UseInputs,
    ZeroGradients,
)
from fnet.autodiff.per_example.taps import (
    PerExampleEquation,
    Use,
    Uses,
    evaluate_with_taps,
    find_uses,
    tap,
)
from fnet.jaxpr import Scan, aval, called_jaxpr

_EXTRA_BYTES = 16 * 2**20
"""Copies of parameters may take as many bytes as all parameters, plus this many."""


def per_example_gradients(
    name: str,
    loss: PerExampleLoss,
    params: Any,
    examples: Examples,
    *,
    has_aux: bool = False,
    width: int | None = None,
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

    traced = _trace(name, batch_loss, leaves, examples)
    by_param: dict[int, ParameterGradients] = {}
    chunked = None
    if examples.size:
        result = _differentiate_batch(traced, width) or _differentiate_examples(traced, width)
        losses, aux, by_param, chunked = result
    else:
        losses, aux_tree = batch_loss(leaves, examples.rebuild_batch(examples.leaves))
        aux = jax.tree.leaves(aux_tree)
    numbers = {*by_param, *(chunked.numbers if chunked else ())}
    for i, leaf in enumerate(leaves):
        if not leaf.size or i not in numbers:
            by_param[i] = ZeroGradients(leaf, examples.size)
    return PerExampleGradients(
        losses, jax.tree.unflatten(traced.aux_treedef, aux), traced.aux_is_batched,
        treedef, by_param, chunked,
    )  # fmt: skip


class _Traced(NamedTuple):
    """The traced loss of a whole batch.

    Attributes:
      name: Name of the caller, for error messages.
      function: The loss, ``(params, batch) -> (losses, aux)``.
      params: The parameters.
      examples: The batch.
      closed: ``(*params, *batch) -> (losses, *aux)``.
      batch_axes: Batch axes of the values in ``closed``.
      batch_size: Number of examples in ``closed``, at least 2.
      aux_treedef: Structure of ``aux``.
      aux_shapes: Shapes of its leaves.
    """

    name: str
    function: Callable[[list[Any], Sequence[Any]], tuple[Array, Any]]
    params: Sequence[Any]
    examples: Examples
    closed: ClosedJaxpr
    batch_axes: BatchAxes
    batch_size: int
    aux_treedef: Any
    aux_shapes: list[tuple[int, ...]]

    @property
    def aux_is_batched(self) -> list[bool]:
        """Whether each leaf of ``aux`` depends on the batch."""
        return [state is not None for state in self.batch_axes.outputs[1:]]

    def has_one_row_per_example(self) -> bool:
        """Whether all results that depend on the batch provably have one row per example."""
        losses, *aux = self.batch_axes.outputs
        return losses == BatchAxis(0) and all(
            state is None or (state == BatchAxis(0) and shape[0] == self.batch_size)
            for state, shape in zip(aux, self.aux_shapes, strict=True)
        )

    def state(self, path: Path) -> tuple[list[State], list[State]]:
        """States of the operands and results of an equation."""
        return self.batch_axes.equations.get(path, ([UNKNOWN] * 2, [UNKNOWN]))


def _trace(
    name: str,
    function: Callable[[list[Any], Sequence[Any]], tuple[Array, Any]],
    params: Sequence[Any],
    examples: Examples,
) -> _Traced:
    """Trace the loss of a batch and check that it does not mix examples."""
    size = max(examples.size, 2)  # With a single example the batch axis has no effect.
    batch = [jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype) for a in examples.leaves]
    closed, (losses, aux) = _make_batch_jaxpr(function, params, examples, batch)
    check_losses(name, losses, size)
    axes = find_batch_axes(closed, [False] * len(params) + [True] * len(batch), size)
    state = axes.outputs[0]
    if state is UNKNOWN and any(map(is_key, batch)):
        # How random numbers follow from keys is not analyzed. Look for equations that mix the
        # rest of the batch.
        is_data = [False] * len(params) + [not is_key(a) for a in batch]
        state = find_batch_axes(closed, is_data, size).outputs[0]
    if isinstance(state, Mixed):
        raise ValueError(
            f"{name}: {state.layer or 'the loss'} mixes the examples of a batch "
            f"({state.operation}), so the gradient of one example does not exist. For batch norm, "
            "use frozen statistics (train=False) or group norm (fnet.layers.group_norm)."
        )
    shapes = [a.shape for a in jax.tree.leaves(aux)]
    return _Traced(
        name, function, params, examples, closed, axes, size, jax.tree.structure(aux), shapes
    )


def _make_batch_jaxpr(
    function: Callable[[list[Any], Sequence[Any]], tuple[Array, Any]],
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


_Result = tuple[Array, list[Any], dict[int, ParameterGradients], ChunkedGradients | None]
"""Losses, leaves of ``aux``, gradients by number of the parameter, and the chunked ones."""


def _differentiate_batch(traced: _Traced, width: int | None) -> _Result | None:
    """Differentiate the loss of the whole batch.

    None if a use of a parameter does not provably have one row per example.
    """
    params, examples = traced.params, traced.examples
    uses = find_uses(traced.closed, len(params))
    if examples.size < 2 or uses.without_data or not traced.has_one_row_per_example():
        return None
    nonlinear = _nonlinear_equations(traced, uses, width)
    if nonlinear is None:
        return None
    axes = []  # Batch axes of each use's data and result.
    for use in uses.all:
        operands, (out, *_) = traced.state(use.path)
        data = BatchAxis(0) if use.equation.data is None else operands[use.equation.data]
        if not isinstance(data, BatchAxis) or not isinstance(out, BatchAxis):
            return None
        if _has_elements_per_example(use, out.axis):
            return None
        axes.append((data.axis, out.axis))

    def tapped_loss(taps: list[Array]) -> Any:
        args = [*params, *examples.leaves]
        (losses, *aux), data = evaluate_with_taps(traced.closed, args, uses.all, taps, nonlinear)
        return losses, (aux, data)

    def zeros(use: Use) -> Array:
        copies = () if use.operand is None else (examples.size,)
        return jnp.zeros((*use.scan_lengths, *copies, *use.out.shape), use.out.dtype)

    taps = [zeros(use) for use in uses.all]
    losses, backward, (aux, data) = jax.vjp(tapped_loss, taps, has_aux=True)
    (cotangents,) = backward(jnp.ones_like(losses))

    xs, cts = [], []
    for use, x, ct, (data_axis, out_axis) in zip(uses.all, data, cotangents, axes, strict=True):
        n = len(use.scan_lengths)
        if use.equation.data is None:
            xs.append(jnp.zeros((*use.scan_lengths, examples.size, 0)))
        else:
            xs.append(by_example(x, n + data_axis, examples.size, n))
        has_copies = use.operand is not None
        cts.append(ct if has_copies else by_example(ct, n + out_axis, examples.size, n))
    return losses, aux, _factored_gradients(params, uses.all, xs, cts), None


def _factored_gradients(
    params: Sequence[Any], uses: Sequence[Use], xs: Sequence[Array], cts: Sequence[Array]
) -> dict[int, ParameterGradients]:
    """Gradients by number of the parameter, given data and cotangents of each use."""
    inputs: dict[int, list[UseInputs]] = {}
    for use, x, ct in zip(uses, xs, cts, strict=True):
        inputs.setdefault(use.view.param, []).append(UseInputs(use, x, use.view.unscale(ct)))
    return {i: FactoredGradients(params[i], param_inputs) for i, param_inputs in inputs.items()}


def _has_elements_per_example(use: Use, axis: int) -> bool:
    """Whether the batch axis of the result indexes different elements of the parameter."""
    equation, elements = use.equation, use.view.elements
    if isinstance(equation, Dot):
        if axis >= len(equation.batch_dims[1]):
            return False
        axis = equation.batch_dims[1][axis]
    elif use.operand is not None or not isinstance(equation, BiasAdd | Scale):
        return False
    axis += len(use.view.scans)
    return elements.shape[axis] > 1 and elements.strides[axis] != 0


def _nonlinear_equations(
    traced: _Traced, uses: Uses, width: int | None
) -> dict[Path, PerExampleEquation] | None:
    """The equations that are not linear in a parameter.

    None if one cannot be vectorized, or if copies of its operands would exceed the memory
    budget.
    """
    params, examples = traced.params, traced.examples
    copied = [use for use in uses.all if use.operand is not None]
    copied_bytes = sum(
        examples.size * math.prod((*use.scan_lengths, *use.out.shape)) * 4 for use in copied
    )
    _, in_chunks = _split_nonlinear(uses, params, examples.size, width)
    if copied_bytes > _memory_budget(params) or in_chunks:
        return None
    if not copied:
        return {}
    batch_of_one = [jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for a in examples.leaves]
    one, _ = _make_batch_jaxpr(traced.function, params, examples, batch_of_one)
    equations = {}
    for path in {use.path for use in copied}:
        equation = _per_example_equation(traced, one, path)
        if equation is None:
            return None
        equations[path] = equation
    return equations


def _per_example_equation(
    traced: _Traced, one: ClosedJaxpr, path: Path
) -> PerExampleEquation | None:
    """The equation at that path in ``one``, the loss for a batch of one; None if it differs."""
    operands, results = traced.state(path)
    if not all(isinstance(state, BatchAxis) for state in results):
        return None
    if not all(state is None or isinstance(state, BatchAxis) for state in operands):
        return None
    pair = _corresponding_equations(traced.closed, one, path)
    if pair is None:
        return None
    eqn, eqn_of_one = pair
    atoms = [*zip(eqn.invars, eqn_of_one.invars, operands, strict=True)]
    atoms += zip(eqn.outvars, eqn_of_one.outvars, results, strict=True)
    for a, b, state in atoms:
        shape = list(aval(a).shape)
        if isinstance(state, BatchAxis):
            shape[state.axis] //= traced.examples.size
        if tuple(shape) != aval(b).shape:
            return None
    operand_axes = [s.axis if isinstance(s, BatchAxis) else None for s in operands]
    result_axes = [s.axis for s in results if isinstance(s, BatchAxis)]
    return PerExampleEquation(eqn_of_one, traced.examples.size, operand_axes, result_axes)


def _corresponding_equations(
    whole: ClosedJaxpr, one: ClosedJaxpr, path: Path
) -> tuple[JaxprEqn, JaxprEqn] | None:
    """The equations at that path, if both jaxprs have the same primitives all the way."""
    names = [[eqn.primitive.name for eqn in closed.jaxpr.eqns] for closed in (whole, one)]
    if names[0] != names[1]:
        return None
    pair = whole.jaxpr.eqns[path[0]], one.jaxpr.eqns[path[0]]
    if len(path) == 1:
        return pair
    inner: Any = [
        Scan.of(eqn).body if eqn.primitive.name == "scan" else called_jaxpr(eqn) for eqn in pair
    ]
    return _corresponding_equations(inner[0], inner[1], path[1:])


def _differentiate_examples(traced: _Traced, width: int | None) -> _Result:
    """Differentiate the loss of one example, vectorized over examples."""
    params, examples = traced.params, traced.examples
    n = len(params)
    is_batched = traced.aux_is_batched

    def example_loss(*args: Any) -> tuple[Array, list[Array]]:
        losses, aux = traced.function(list(args[:n]), examples.rebuild(args[n:]))
        if jnp.shape(losses) != (1,):
            raise ValueError(
                f"{traced.name}: expected losses of shape [1] for a batch of one, got "
                f"{jnp.shape(losses)}; pass arrays with one row per example as arguments, not by "
                "closure or in params."
            )

        def without_batch_axis(a: Array, batch_shape: tuple[int, ...], batched: bool) -> Array:
            has_axis = a.shape[:1] == (1,) and batch_shape == (traced.batch_size, *a.shape[1:])
            return a[0] if batched and has_axis else a

        leaves = zip(jax.tree.leaves(aux), traced.aux_shapes, is_batched, strict=True)
        return losses[0], [without_batch_axis(*leaf) for leaf in leaves]

    shapes = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in examples.leaves]
    closed = jax.make_jaxpr(example_loss)(*params, *shapes)
    uses = find_uses(closed, n)
    # A tap behind an equation without data would be as large as its result for each example.
    # Copy the parameter instead.
    with_data = reachable(closed, [False] * n + [True] * len(shapes)).equations
    shared = {use.view.param for use in uses.all if use.path not in with_data}
    uses = uses._replace(nonlinear=uses.nonlinear | shared)
    copied, in_chunks = _split_nonlinear(uses, params, examples.size, width)

    # Results that do not depend on the batch, but on a parameter with taps or copies, become
    # batched too. All examples have the same value there.
    has_taps = {*copied, *(use.view.param for use in uses.linear)}
    depends_on_taps = depends_on(closed, [i in has_taps for i in range(n + len(shapes))])[1:]
    out_axes = [
        0 if batched or tapped else None
        for batched, tapped in zip(is_batched, depends_on_taps, strict=True)
    ]

    def tapped_loss(taps: list[Array], copies: dict[int, Array], example: list[Array]) -> Any:
        own = [tap(p, copies[i]) if i in copies else p for i, p in enumerate(params)]
        (loss, *aux), data = evaluate_with_taps(closed, [*own, *example], uses.linear, taps)
        return loss, (aux, data)

    # Scans come before the batch axis in taps and data.
    scans = [len(use.scan_lengths) for use in uses.linear]
    batched_loss = jax.vmap(tapped_loss, in_axes=(scans, 0, 0), out_axes=(0, (out_axes, scans)))
    size = examples.size
    taps = [
        jnp.zeros((*use.scan_lengths, size, *use.out.shape), use.out.dtype) for use in uses.linear
    ]
    copies = {i: jnp.zeros((size, *params[i].shape), params[i].dtype) for i in copied}
    losses, backward, (aux, xs) = jax.vjp(
        lambda taps, copies: batched_loss(taps, copies, examples.leaves),
        taps,
        copies,
        has_aux=True,
    )
    cts, gradients_of_copies = backward(jnp.ones_like(losses))
    aux = [
        a if batched or axis is None else a[0]
        for a, batched, axis in zip(aux, is_batched, out_axes, strict=True)
    ]
    by_param = _factored_gradients(params, uses.linear, xs, cts)
    by_param |= {i: MaterializedGradients(g) for i, g in gradients_of_copies.items()}
    chunked = None
    if in_chunks:
        param_bytes = sum(params[i].nbytes for i in in_chunks)
        default = max(1, min(_memory_budget(params) // max(param_bytes, 1), size))
        chunked = ChunkedGradients(closed, params, examples, in_chunks, width or default)
    return losses, aux, by_param, chunked


def _memory_budget(params: Sequence[Any]) -> int:
    """Bytes that per-example copies of parameters may take."""
    budget: int = sum(p.nbytes for p in params) + _EXTRA_BYTES
    return budget


def _split_nonlinear(
    uses: Uses, params: Sequence[Any], size: int, width: int | None
) -> tuple[list[int], list[int]]:
    """Split the parameters with nonlinear uses: those that get copies, and those in chunks."""
    budget = _memory_budget(params)
    copied, in_chunks = [], []
    for i in sorted(uses.nonlinear, key=lambda i: params[i].size):
        copied_bytes = size * params[i].nbytes
        if copied_bytes <= budget and (width is None or size <= width or params[i].ndim < 2):
            copied.append(i)
            budget -= copied_bytes
        else:
            in_chunks.append(i)
    return copied, in_chunks
