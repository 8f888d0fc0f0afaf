"""One backward pass that keeps the gradients of all examples apart.

`per_example_gradients` defines the gradient of an example as the gradient of the loss on a
batch that holds it alone, and computes it in this way:

1. Trace the loss of the whole batch, to refuse losses that mix examples (`batch_axis`), and for the
   shapes of its other results.
2. Trace the loss of a batch of one. Differentiate it with respect to taps (`taps`), where
   parameters meet data. Data and cotangents there are the factors of the gradients (`ghost_norm`).
   A parameter that is used in another way is differentiated itself.
3. Execute this program for all examples (`batching`). It sees one example at a time, so no loss
   can make one example's gradient depend on another.
"""

import collections
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fnet.autodiff.examples import (
    Examples,
    PerExampleLoss,
    check_losses,
    check_params,
    check_width,
    is_key,
)
from fnet.autodiff.per_example.batching import Rows, Value, rows_of, run_for_batch
from fnet.autodiff.per_example.derived import DerivedGradients, Group, split_derived
from fnet.autodiff.per_example.ghost_norm import Dot, computed_once, kept_dtype
from fnet.autodiff.per_example.hoist import hoist
from fnet.autodiff.per_example.parameter_gradients import (
    ChunkedGradients,
    FactoredGradients,
    GroupGradients,
    MaterializedGradients,
    ParameterGradients,
    PerExampleGradients,
    RematerializedGradients,
    SeparateGradients,
    UseInputs,
    reads_whole_rows,
)
from fnet.autodiff.per_example.products import uses_of_factors
from fnet.autodiff.per_example.taps import Use, Uses, evaluate_with_taps, find_uses
from fnet.chunks import even
from fnet.cpu.tracing import examples_apart, is_for_cpu
from fnet.jaxpr import (
    ShardMap,
    aval,
    called_jaxpr,
    depends_on,
    evaluate,
    find_equations,
    interpret,
    is_checkpoint,
    is_reference,
    is_separable,
    located,
    place,
    source_line,
)
from fnet.jaxpr.batch_axis import (
    KEY,
    BatchAxis,
    Mixed,
    Shared,
    Unknown,
    find_batch_axes,
)
from fnet.jaxpr.custom_rules import AnyEquation
from fnet.jaxpr.primitives import ConvGeneralDilated, DotGeneral, total
from fnet.measured import (
    ELEMENTS_PER_EQUATION,
    ELEMENTS_PER_PARAMETER,
    FEW_ROWS,
    KEPT_ELEMENTS_PER_EQUATION,
    KEPT_TOKEN_BYTES,
)
from fnet.mesh import batch_devices, equally_varying

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
      TypeError, ValueError: As `trace_loss`; ``width`` is not an int, or less than 1.
    """
    check_width(name, width)
    traced = trace_loss(name, loss, params, examples, has_aux=has_aux)
    return traced.gradients(traced.examples, width=width, remat=remat)


def trace_loss(
    name: str,
    loss: PerExampleLoss,
    params: Any,
    examples: Examples,
    *,
    has_aux: bool = False,
    alone: bool = False,
) -> "TracedLoss":
    """Trace a loss, and check that it treats each example alone.

    It takes the arguments of `per_example_gradients`. With ``alone``, the caller gives it one
    example at a time, so that an operation of which nothing is known is as good as any.

    Raises:
      TypeError: Parameters or losses are not floating-point, or the loss does not return a pair
        although ``has_aux`` is True.
      ValueError: The loss does not return one loss per example, or a layer mixes examples.
    """
    check_params(name, params)
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, params))

    def batch_loss(params: list[Any], batch: Sequence[Any]) -> tuple[Array, Any]:
        out = loss(jax.tree.unflatten(treedef, params), *batch)
        if not has_aux:
            return out, None
        if not isinstance(out, list | tuple) or len(out) != 2:
            raise TypeError(
                f"{name}: has_aux=True expects a loss that returns (losses, aux), "
                f"got {type(out).__name__}"
            )
        losses, aux = out
        return losses, aux

    leaves, rows = equally_varying((leaves, examples.leaves))
    examples = examples._replace(leaves=rows)
    with examples_apart():
        whole, aux_of_batch = _trace_batch(name, batch_loss, leaves, examples)
    # A single key of the batch becomes a key of each example.
    batch = [KEY if shared else BatchAxis(0) for shared in examples.is_single_key]
    shared = [Shared()] * (len(whole.in_avals) - len(batch))
    state = find_batch_axes(whole, [*shared, *batch], max(examples.size, 2))[0]
    if isinstance(state, Mixed):
        raise ValueError(_refusal(name, state))
    with examples_apart():
        one = _trace_one(name, batch_loss, leaves, examples, whole)
    if isinstance(state, Unknown) and not alone:
        raise ValueError(_refusal(name, state))
    closed = hoist(one, len(leaves))
    return TracedLoss(name, batch_loss, closed, leaves, treedef, examples, aux_of_batch)


class Microbatches(NamedTuple):
    """How many examples are differentiated at once, and how.

    Attributes:
      size: Number of examples.
      kept: Parameters whose gradients are materialized although others would do.
      second_pass: Whether parameters inside of `jax.checkpoint` get a second backward pass for
        sums, so that nothing is saved for them.
    """

    size: int
    kept: Collection[int] = ()
    second_pass: bool = True


class TracedLoss(NamedTuple):
    """A loss that treats each example of a batch alone.

    Attributes:
      name: Name of the caller, for error messages.
      loss: The loss.
      closed: ``(*leaves, *batch) -> (losses, *aux)`` for a batch of one.
      leaves: The parameters.
      treedef: Their structure.
      examples: The batch.
      aux: Shapes of the auxiliary output for the batch, or for two examples if it has less.
    """

    name: str
    loss: BatchLoss
    closed: ClosedJaxpr
    leaves: list[Any]
    treedef: Any
    examples: Examples
    aux: Any

    def gradients(
        self,
        examples: Examples,
        *,
        width: int | None = None,
        remat: bool = False,
        kept: Collection[int] = (),
    ) -> PerExampleGradients:
        """Differentiate the losses of some examples, see `per_example_gradients`.

        The gradients of ``kept`` parameters are materialized at once.
        """
        size = examples.size
        if not size:
            losses, aux = self.loss(self.leaves, examples.rebuild_batch(examples.leaves))
            none = {i: FactoredGradients(leaf, 0, []) for i, leaf in enumerate(self.leaves)}
            is_batched = [False] * len(jax.tree.leaves(aux))
            return PerExampleGradients(
                losses, aux, is_batched, self.treedef, [SeparateGradients(none)]
            )
        plan = _Plan.of(self.closed, self.leaves, size, width, remat, kept)
        result = _differentiate(self.name, plan, examples)
        return self._of(examples, result, _gradients(plan, result, self.closed, examples))

    def gradients_of_one(self, number: Array, examples: Examples) -> PerExampleGradients:
        """Differentiate the loss of one example like `jax.grad`, but for tables of embeddings.

        Args:
          number: A number from 0 on that is not constant, such as an iteration's.
          examples: A single example.
        """
        plan = _Plan.of_one(self.closed, self.leaves)
        result = _differentiate_one(self.name, plan, examples, number)
        return self._of(examples, result, _gradients(plan, result, self.closed, examples))

    def microbatches(self, width: int | None) -> Microbatches:
        """Choose the fastest microbatches that take no more memory than the plain gradient.

        All examples are one microbatch if the caller gives a ``width``.
        """
        if width is not None:
            return Microbatches(self.examples.size)
        return Microbatches(1) if self.pays_one_by_one() else self._for_accelerator()

    def pays_one_by_one(self) -> bool:
        """Whether `gradients_of_one` of each example is estimated to be faster than `gradients`.

        On one CPU: arrays of one example stay in the cache. This pays if they are larger than the
        parameters, whose gradients are written and added for each example, and large enough that
        the start of each operation does not matter. XLA's convolutions of one image are slow,
        unless they are products of patches (as in vision transformers).
        """
        if not is_for_cpu() or batch_devices() > 1 or self.examples.size < 2 or self.closed.effects:
            return False
        if any(c.window != c.window_strides for c in ConvGeneralDilated.find(self.closed)):
            return False
        equations, elements = _equations_and_elements(self.closed)
        plan = _Plan.of_one(self.closed, self.leaves)
        params = sum(self.leaves[i].size for i in plan.materialized)
        fewest: float = ELEMENTS_PER_PARAMETER * params + ELEMENTS_PER_EQUATION * equations
        return elements >= fewest

    def _for_accelerator(self) -> Microbatches:
        """Choose what is saved of each example, and of how many at once.

        On one accelerator: to write and read the gradient of a matrix that meets many tokens is
        faster than the second product of a norm and a sum apart, and to save the factors of a
        matrix inside of `jax.checkpoint` is faster than a second backward pass. Microbatches are
        as large as what the plain gradient saves for the whole batch allows, and large enough that
        the start of each operation does not matter.
        """
        size = self.examples.size
        if is_for_cpu() or batch_devices() > 1 or self.closed.effects:
            return Microbatches(size)
        params, uses = self.leaves, _uses_of_products(self.closed, self.leaves)
        kept = [i for i, own in uses.items() if _meets_many_tokens(own, params[i])]
        in_checkpoint = [use for own in uses.values() for use in own if use.may_give_norm]
        if not kept and not in_checkpoint:
            return Microbatches(size)
        # The plain loss may save less: the logits of a few tokens, not those of all.
        plain, _ = _make_jaxpr(self.loss, params, self.examples, 1)
        allowed, saved = size * _saved_bytes(plain), _saved_bytes(self.closed)
        equations, elements = _equations_and_elements(self.closed)

        def width(nbytes: int, elements: int) -> int:
            """Size of microbatches with so many bytes of each example, or 0."""
            most = min(max(allowed // nbytes, 1), size)
            n = max(n for n in range(1, most + 1) if size % n == 0)
            n = n if 2 * n > most else even(size, most)[1]  # which adds examples of weight 0
            return n if n > 1 and n * elements >= KEPT_ELEMENTS_PER_EQUATION * equations else 0

        # Gradients take the place of what was saved, layer by layer, and XLA computes some ahead:
        # compiled models had about half of the smaller of both at their peak.
        gradients = sum(params[i].size * kept_dtype(params[i]).itemsize for i in kept)
        both = max(saved, gradients) + min(saved, gradients) // 2
        if kept and (n := width(both, sum(params[i].size for i in kept))):
            return Microbatches(n, kept, second_pass=False)
        factors = sum(map(_factor_bytes, in_checkpoint))
        if factors and (n := width(saved + factors, elements)):
            return Microbatches(n, second_pass=False)
        return Microbatches(size)

    def shared_aux(self) -> list[Array]:
        """Leaves of the auxiliary output, of which only those are right that examples share."""
        first = [(jax.random.clone(a) if is_key(a) else a)[:1] for a in self.examples.leaves]
        return list(jaxpr_as_fun(self.closed)(*self.leaves, *first)[1:])

    def _of(
        self, examples: Examples, result: "_Results", groups: list[GroupGradients]
    ) -> PerExampleGradients:
        aux, treedef = jax.tree.flatten(self.aux)
        whole = max(self.examples.size, 2)
        shapes = [a.shape for a in self.closed.out_avals[1:]]
        aux = _batched_aux(result.aux, shapes, [a.shape for a in aux], examples.size, whole)
        return PerExampleGradients(
            result.losses,
            jax.tree.unflatten(treedef, aux),
            [isinstance(a, Rows) for a in result.aux],
            self.treedef,
            groups,
        )


def _trace_batch(
    name: str, loss: BatchLoss, params: Sequence[Any], examples: Examples
) -> tuple[ClosedJaxpr, Any]:
    """Trace the loss of ``max(batch, 2)`` examples; also return the shapes of ``aux``."""
    size = max(examples.size, 2)  # With a single example the batch axis has no effect.
    closed, (losses, aux) = _make_jaxpr(loss, params, examples, size)
    check_losses(name, losses, size)
    _check_effects(name, closed)
    return closed, aux


def _refusal(name: str, state: Mixed | Unknown) -> str:
    operation = located(state.operation or "the loss", state.line)
    if isinstance(state, Unknown):
        return (
            f"{name}: it is not known whether {operation} mixes the examples of a batch. Write a "
            "function of one example, and call it with jax.lax.map without batch_size, or pass "
            "microbatch_size=1 to clipped_grad. Inside of jax.shard_map, pass check_vma=False."
        )
    where = state.layer or "the loss"
    if state.by_position:
        return (
            f"{name}: the loss of an example depends on its position in the batch, in {where} "
            f"({operation}). Pass arrays with one row per example as arguments. For dropout, pass "
            "the random key as an argument; each example then gets a key of its own."
        )
    return (
        f"{name}: {where} mixes the examples of a batch ({operation}), so the gradient of one "
        "example does not exist. Write the loss of one example, and call it with jax.vmap, or "
        "with jax.lax.map without batch_size. In place of batch norm, use group norm, or frozen "
        "statistics (train=False)."
    )


def _make_jaxpr(
    loss: BatchLoss, params: Sequence[Any], examples: Examples, size: int
) -> tuple[ClosedJaxpr, Any]:
    """Trace the loss of a batch of this size; also return the shapes of its results."""

    def flat(*args: Any) -> Any:
        n = len(params)
        return loss(list(args[:n]), examples.rebuild_batch(args[n:]))

    result: tuple[ClosedJaxpr, Any] = jax.make_jaxpr(flat, return_shape=True)(
        *params, *examples.of_size(size)
    )
    return result


def _trace_one(
    name: str,
    loss: BatchLoss,
    params: Sequence[Any],
    examples: Examples,
    whole: ClosedJaxpr,
) -> ClosedJaxpr:
    """Trace the loss of a batch that holds one example: ``(*params, *batch) -> (losses, *aux)``."""
    try:
        closed, (losses, _) = _make_jaxpr(loss, params, examples, 1)
    except Exception as error:
        eqn = next(filter(_splits, find_equations(whole)), None)
        if isinstance(error, ValueError) and eqn is not None:
            raise ValueError(
                f"{name}: the loss of a batch of one example must exist, but jax.shard_map at "
                f"{source_line(eqn)} splits the batch over devices. Put jax.shard_map around the "
                "gradient, or leave the batch axis out of in_specs and out_specs."
            ) from error
        error.add_note(f"{name} traced the loss of a batch of one example, which must work")
        raise
    _check_effects(name, closed)
    if losses.shape != (1,):
        raise ValueError(
            f"{name}: expected losses of shape [1] for a batch of one, got {losses.shape}; pass "
            "arrays with one row per example as arguments, not by closure or in params"
        )
    return closed


def _splits(eqn: JaxprEqn) -> bool:
    """Whether a `jax.shard_map` gives devices different parts of an input."""
    mapped = ShardMap.read(eqn)
    return mapped is not None and any(n > 1 for splits in mapped.inputs for n in splits)


def _check_effects(name: str, closed: ClosedJaxpr) -> None:
    """Refuse programs that could carry values from one example to another."""
    effects = [e for e in closed.effects if "Debug" not in type(e).__name__]
    if axes := [e.name for e in effects if type(e).__name__ == "NamedAxisEffect"]:
        raise ValueError(
            f"{name}: the loss communicates over the mesh axis {axes[0]!r}, so the examples of "
            "different devices meet. Remove collectives such as jax.lax.pmean from it."
        )
    if effects:
        raise ValueError(
            f"{name}: the loss has side effects ({', '.join(map(str, effects))}), which could "
            "carry values from one example to another. Read mutable arrays (jax.new_ref) before "
            "the loss, and remove ordered callbacks from it."
        )
    for eqn in find_equations(closed):
        if any(map(is_reference, (*eqn.invars, *eqn.outvars))):
            raise ValueError(
                f"{name}: mutable arrays are not supported in the loss ({place(eqn)}). Use "
                "functional updates, such as x.at[i].set(y)."
            )


class _Plan(NamedTuple):
    """Results of one backward pass.

    Leaves are numbered as in `Split`: the parameters, then the values derived from them.

    Attributes:
      loss: ``(*leaves, *batch) -> (losses, *aux)`` for a batch of one.
      leaves: Their values.
      num_params: How many of them are parameters.
      uses: Uses of leaves that get a tap. Data and cotangents there give the gradients.
      materialized: Leaves that are differentiated themselves.
      groups: Parameters that are combined before they meet data.
      in_chunks: Parameters that are not part of this pass: their gradients are too large.
      width: Number of examples at a time, if the caller gave it.
      kept: Parameters whose gradients are materialized although others would do; see `kept_dtype`.
    """

    loss: ClosedJaxpr
    leaves: list[Any]
    num_params: int
    uses: list[Use]
    materialized: list[int]
    groups: list[Group]
    in_chunks: list[int]
    width: int | None
    kept: Collection[int] = ()

    @classmethod
    def of(
        cls,
        closed: ClosedJaxpr,
        params: Sequence[Any],
        size: int,
        width: int | None,
        remat: bool,
        kept: Collection[int],
    ) -> "_Plan":
        """Choose how each leaf is differentiated."""
        split, count = split_derived(closed, len(params)), len(params)
        leaves = split.leaves(params)
        uses = find_uses(split.loss, len(leaves))
        # Taps give the gradients of leaves that meet data in single equations. Other leaves are
        # differentiated themselves, now or in chunks.
        materialized, too_large = _split_nonlinear(uses, leaves, size, width)
        # A group's gradients need the gradients of all its members.
        skipped = too_large.union(*(g.leaves for g in split.groups if g.leaves & too_large))
        groups = [g for g in split.groups if not g.leaves & skipped]
        tapped = uses.without({*materialized, *skipped})
        if remat:
            tapped = _with_norms(tapped, set(range(count)).difference(*(g.params for g in groups)))
        return cls(
            split.loss,
            leaves,
            count,
            tapped,
            [i for i in materialized if i not in skipped],
            groups,
            sorted(i for i in skipped if i < count),
            width,
            kept,
        )

    @classmethod
    def of_one(cls, closed: ClosedJaxpr, params: Sequence[Any]) -> "_Plan":
        """Differentiate all parameters, except where an example reads a few rows."""
        uses = find_uses(closed, len(params))
        tables = {
            i for i, own in uses.by_param().items()
            if i not in uses.nonlinear and len(own) == 1 and _reads_few_rows(own[0], params[i])
        }  # fmt: skip
        others = [i for i in range(len(params)) if i not in tables]
        return cls(closed, list(params), len(params), uses.without(others), others, [], [], None)


def _saved_bytes(program: ClosedJaxpr) -> int:
    """Bytes of what is saved between the passes of a gradient, and again within a checkpoint.

    Arrays like an argument are left out: they are gradients that a forward pass computes.
    """
    shapes = {a.shape for a in program.in_avals}

    def saved(closed: ClosedJaxpr) -> int:
        backward = jax.make_jaxpr(lambda *args: jax.vjp(jaxpr_as_fun(closed), *args)[1])
        traced = backward(*closed.in_avals).jaxpr
        arrays = map(aval, {*traced.outvars}.difference(traced.invars, traced.constvars))
        return sum(a.size * a.dtype.itemsize for a in arrays if a.shape not in shapes)

    bodies = (called_jaxpr(eqn) for eqn in find_equations(program) if is_checkpoint(eqn))
    kinds = {(*map(str, body.in_avals), len(body.eqns)): body for body in bodies if body}
    return saved(program) + max(map(saved, kinds.values()), default=0)


def _equations_and_elements(program: ClosedJaxpr) -> tuple[int, int]:
    """Number of equations that run, and of elements that they make."""
    counts = (lambda _: 1, lambda e: sum(int(aval(v).size) for v in e.outvars))
    equations, elements = (sum(total(e, count) for e in program.eqns) for count in counts)
    return equations, elements


def _uses_of_products(closed: ClosedJaxpr, params: Sequence[Any]) -> dict[int, list[Use]]:
    """Uses of the parameters that meet data in products alone."""
    split = split_derived(closed, len(params))
    uses = find_uses(split.loss, len(params) + sum(len(group.derived) for group in split.groups))
    elsewhere = uses.nonlinear.union(*(group.params for group in split.groups))
    return {
        i: own
        for i, own in sorted(uses.by_param().items())
        if i < len(params) and i not in elsewhere and all(isinstance(u.equation, Dot) for u in own)
    }


def _meets_many_tokens(uses: Sequence[Use], param: Any) -> bool:
    products = (math.prod(u.scan_lengths) * u.equation.products(u.out) for u in uses)
    nbytes = sum(n * u.out.dtype.itemsize for n, u in zip(products, uses, strict=True))
    return bool(nbytes >= KEPT_TOKEN_BYTES * param.size)


def _factor_bytes(use: Use) -> int:
    nbytes: int = use.equation.factor_size(use.out) * use.out.dtype.itemsize
    return math.prod(use.scan_lengths) * nbytes


def _reads_few_rows(use: Use, table: Any) -> bool:
    """Whether the rows of a table that one example reads are much smaller than the table."""
    rows = math.prod(use.scan_lengths) * math.prod(use.out.shape)
    return reads_whole_rows(use, table) and FEW_ROWS * rows <= table.size


def _split_nonlinear(
    uses: Uses, leaves: Sequence[Any], size: int, width: int | None
) -> tuple[list[int], set[int]]:
    """Split leaves with nonlinear uses: gradients to materialize, and those too large for it.

    Large leaves that `AnyEquation` covers are in neither.
    """
    budget = _memory_budget(leaves)
    materialized, too_large = [], set()
    for i in sorted(uses.nonlinear, key=lambda i: leaves[i].size):
        nbytes = size * leaves[i].nbytes
        if nbytes <= budget and (width is None or size <= width or leaves[i].ndim < 2):
            materialized.append(i)
            budget -= nbytes
        elif i in uses.unknown:
            too_large.add(i)
    return materialized, too_large


def _memory_budget(params: Sequence[Any]) -> int:
    budget: int = sum(p.nbytes for p in params) + _EXTRA_BYTES
    return budget


def _with_norms(uses: Sequence[Use], params: Collection[int]) -> list[Use]:
    """Choose uses whose taps give norms: of these parameters, those with a single use."""
    counts = collections.Counter(use.view.param for use in uses)
    alone = {i for i in params if counts[i] == 1}
    return [use._replace(gives_norm=use.may_give_norm and use.view.param in alone) for use in uses]


class _Results(NamedTuple):
    """Results of the backward pass, for all examples.

    Attributes:
      losses: Losses, [batch].
      aux: Leaves of ``aux``.
      materialized: Per-example gradients [batch, *leaf] by index of the leaf.
      inputs: Data and cotangents of the uses of each other leaf.
      squares: `upper_squared_norms` [batch, *scan_lengths] by parameter, for those with a use
        that gives norms.
    """

    losses: Array
    aux: list[Value]
    materialized: dict[int, Array]
    inputs: dict[int, list[UseInputs]]
    squares: dict[int, Array]


def _trace_derivative(name: str, plan: _Plan, examples: Examples) -> tuple[ClosedJaxpr, Any]:
    """Differentiate the loss of one example; also return the shapes of the results."""

    def differentiate(*args: Any) -> Any:
        zeros = [
            jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), use.tap_shapes) for use in plan.uses
        ]
        # The cotangent of a zero that all devices of a `jax.shard_map` share would be their sum.
        zeros, *_ = equally_varying((zeros, args))

        def tapped_loss(taps: list[Any], selected: dict[int, Any]) -> Any:
            values = [selected.get(i, a) for i, a in enumerate(args)]
            (losses, *aux), data = evaluate_with_taps(plan.loss, values, plan.uses, taps)
            return losses, (aux, data)

        # No leaf with taps is differentiated, so its gradient is never computed as an array.
        selected = {i: args[i] for i in plan.materialized}
        losses, backward, (aux, data) = jax.vjp(tapped_loss, zeros, selected, has_aux=True)
        return losses, aux, data, *backward(jnp.ones_like(losses))

    program, shapes = jax.make_jaxpr(differentiate, return_shape=True)(
        *plan.leaves, *examples.of_size(1)
    )
    _check_effects(name, program)  # A derivative rule may have some.
    return program, shapes


def _differentiate(name: str, plan: _Plan, examples: Examples) -> _Results:
    program, shapes = _trace_derivative(name, plan, examples)
    # The program computes one example, so it cannot mix examples, whatever the loss does.
    rows = [Rows(a, 0) for a in examples.leaves]
    values = run_for_batch(program, [*plan.leaves, *rows], examples.size)
    results = _results(plan, values, shapes, examples.size)
    gradients = {i: computed_once(g) for i, g in results.materialized.items()}
    return results._replace(materialized=gradients)


def _differentiate_one(name: str, plan: _Plan, examples: Examples, number: Array) -> _Results:
    """Differentiate the loss of a single example; ``number`` counts iterations."""
    program, shapes = _trace_derivative(name, plan, examples)

    products = _products_of_parameters(program, plan.leaves)

    def execute(args: list[Array], products: dict[Var, Array]) -> list[Array]:
        def handle(eqn: JaxprEqn, inputs: list[Array]) -> list[Array]:
            if all(v in products for v in eqn.outvars):
                return [products[v] for v in eqn.outvars]
            return evaluate(eqn, inputs)

        # Without axes, arrays cannot leave the branch in an order that readers must transpose.
        return [a.ravel() for a in interpret(program, args, handle)]

    def zeros(*_: Any) -> list[Array]:
        return [jnp.zeros(math.prod(a.shape), a.dtype) for a in program.out_avals]

    # Norms and sums read one array: XLA fuses no reader into a branch, and does not know which of
    # the branches is never taken.
    args = [*plan.leaves, *examples.leaves]
    flat = jax.lax.cond(
        number >= 0, lambda a, known: execute(a, dict(zip(products, known, strict=True))), zeros,
        args, list(products.values()),
    )  # fmt: skip
    arrays = [a.reshape(v.shape) for a, v in zip(flat, program.out_avals, strict=True)]
    is_row = depends_on(program, [False] * len(plan.leaves) + [True] * len(examples.leaves))
    values = [
        Rows(a if a.ndim else a[None], 0) if own else a
        for a, own in zip(arrays, is_row, strict=True)
    ]
    return _results(plan, values, shapes, 1)


def _products_of_parameters(program: ClosedJaxpr, leaves: Sequence[Any]) -> dict[Var, Array]:
    """Products of parameters alone, and what is computed of them, such as ``w + a @ b``.

    XLA computes them once before a loop, but not if they are inside of a branch.
    """
    jaxpr = program.jaxpr
    products: dict[Var, Array] = {}
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(jaxpr.invars, leaves, strict=False))
    for eqn in jaxpr.eqns:
        if eqn.effects or not all(isinstance(v, Literal) or v in known for v in eqn.invars):
            continue
        outputs = evaluate(eqn, [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars])
        known |= dict(zip(eqn.outvars, outputs, strict=True))
        given = [v for v in eqn.invars if not isinstance(v, Literal)]
        largest = max((aval(v).size for v in given), default=0)
        is_small = all(aval(v).size <= largest for v in eqn.outvars)
        if DotGeneral.read(eqn) or (is_small and any(v in products for v in given)):
            products |= {v: known[v] for v in eqn.outvars}
    return products


def _results(plan: _Plan, values: Sequence[Value], shapes: Any, size: int) -> _Results:
    """Collect what the program of `_trace_derivative` returned, given the shapes for one."""
    losses, aux, data, cts, gradients = jax.tree.unflatten(jax.tree.structure(shapes), values)
    inputs: dict[int, list[UseInputs]] = {}
    squares: dict[int, Array] = {}
    for use, x, ct, shape in zip(plan.uses, data, cts, shapes[2], strict=True):
        leaf = use.view.param
        if use.gives_norm:
            squares[leaf] = rows_of(ct, use.scan_lengths, size)
        else:
            of_use = _inputs_of(use, x, ct, shape, size, plan.width)
            inputs.setdefault(leaf, []).append(of_use)
    materialized = {i: rows_of(g, plan.leaves[i].shape, size) for i, g in gradients.items()}
    return _Results(rows_of(losses, (1,), size)[:, 0], aux, materialized, inputs, squares)


def _inputs_of(use: Use, x: Any, ct: Any, shape: Any, size: int, width: int | None) -> UseInputs:
    """Return data and cotangents of a use as arrays [*scan_lengths, batch, ...].

    ``shape`` is the shape of one example's data.
    """
    axis, equation = len(use.scan_lengths), use.equation
    if isinstance(equation, AnyEquation):
        # Arrays that all examples share stay single, such as the other operands of a layer.
        operands = dict(zip(equation.data, x, strict=True))
        shared = {k: a for k, a in operands.items() if not isinstance(a, Rows)}
        pairs = zip(operands.items(), shape, strict=True)
        x = [rows_of(a, own.shape, size) for (k, a), own in pairs if k not in shared]
        use = use._replace(equation=equation._replace(shared=shared, width=width))
    elif equation.data is None:
        x = jnp.zeros((*use.scan_lengths, size, 0))
    else:
        x = rows_of(x, shape.shape, size, axis)

    def rows_of_tap(tap: Any, ct: Any) -> Array:
        return use.view.unscale(rows_of(ct, tap.shape, size, axis))

    return UseInputs(use, x, jax.tree.map(rows_of_tap, use.tap_shapes, ct))


def _take_products_apart(
    plan: _Plan, result: _Results
) -> tuple[dict[int, list[UseInputs]], list[Group]]:
    """Return data and cotangents of uses, also of factors of products, and the other groups."""
    params, inputs, groups = plan.leaves[: plan.num_params], dict(result.inputs), []
    for group in plan.groups:
        # A product of parameters, such as a low-rank update, is taken apart into its factors.
        uses = None
        if not group.leaves & result.materialized.keys():
            of_derived = [inputs.get(i, []) for i in group.derived]
            uses = uses_of_factors(group, [params[i] for i in group.params], of_derived)
        if uses is None:
            groups.append(group)
        for use in uses or ():
            i = use.use.view.param
            inputs[i] = [*inputs.get(i, []), use]
    return inputs, groups


def _gradients(
    plan: _Plan, result: _Results, closed: ClosedJaxpr, examples: Examples
) -> list[GroupGradients]:
    size, leaves, params = examples.size, plan.leaves, plan.leaves[: plan.num_params]
    inputs, groups = _take_products_apart(plan, result)

    def of_leaf(i: int) -> ParameterGradients:
        if leaves[i].size and i in result.materialized:
            return MaterializedGradients(result.materialized[i])
        factored = FactoredGradients(leaves[i], size, inputs.get(i, []) if leaves[i].size else [])
        return factored.kept() if i in plan.kept else factored

    def of_group(group: Group) -> GroupGradients:
        met = [i for i in group.params if i in inputs or i in result.materialized]
        return DerivedGradients(
            group,
            [params[i] for i in group.params],
            {i: of_leaf(i) for i in met},
            [of_leaf(i) for i in group.derived],
        )

    elsewhere = {*result.squares, *plan.in_chunks}.union(*(group.params for group in groups))
    separate = {i: of_leaf(i) for i in range(len(params)) if i not in elsewhere}
    gradients: list[GroupGradients] = [SeparateGradients(separate)]
    if result.squares:
        uses = [use for use in plan.uses if use.gives_norm]
        gradients.append(RematerializedGradients(plan.loss, leaves, examples, uses, result.squares))
    gradients += map(of_group, groups)
    if plan.in_chunks:
        gradients.append(_in_chunks(plan, closed, examples))
    return gradients


def _in_chunks(plan: _Plan, closed: ClosedJaxpr, examples: Examples) -> ChunkedGradients:
    params = plan.leaves[: plan.num_params]
    nbytes = max(sum(params[i].nbytes for i in plan.in_chunks), 1)
    width = plan.width or max(1, min(_memory_budget(params) // nbytes, examples.size))
    if not all(map(is_separable, closed.jaxpr.eqns)):
        width = 1  # `jax.vmap` would not keep the examples apart.
    return ChunkedGradients(closed, params, examples, plan.in_chunks, width)


def _batched_aux(
    aux: Sequence[Value],
    shapes: Sequence[tuple[int, ...]],
    of_whole: Sequence[tuple[int, ...]],
    size: int,
    whole: int,
) -> list[Array]:
    """Leaves of ``aux`` for a batch, given their shapes for one and for ``whole`` examples."""
    leaves = []
    for value, shape, batch_shape in zip(aux, shapes, of_whole, strict=True):
        if not isinstance(value, Rows):
            leaves.append(value)
            continue
        rows = rows_of(value, shape, size)
        has_axis = shape[:1] == (1,) and batch_shape == (whole, *shape[1:])
        leaves.append(rows[:, 0] if has_axis else rows)
    return leaves
