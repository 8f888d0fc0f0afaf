"""A memory budget for a loss in a train step of another library."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet import checks
from fnet.cpu.tracing import traced_for
from fnet.measured import SPARE_OF_PARAMETERS
from fnet.memory.plan import Candidate, Plan, plan
from fnet.memory.remat import Policy
from fnet.memory.sizes import parse_bytes, tree_bytes
from fnet.memory.target import Target, shapes_on

F = TypeVar("F", bound=Callable[..., Any])


def remat_to_fit(
    loss: F,
    *args: Any,
    budget: float | str | None = None,
    optimizer: optax.GradientTransformation | None = None,
    held: Any = None,
    target: Target | None = None,
    progress: Callable[[Candidate], None] | None = None,
    **kwargs: Any,
) -> tuple[F, Plan]:
    """Rematerialize a loss so that the step that differentiates it fits a memory budget.

    Put the returned loss in the place of yours, in a train step of your own: under
    ``jax.value_and_grad``, ``nnx.value_and_grad`` or ``eqx.filter_value_and_grad``. Values,
    gradients and updated variables stay the same. Use `fnet.compile_step` if the step is from
    `fnet.make_step`.

    Candidates are compiled, never run: a step of your optimizer that donates the parameters and
    the optimizer's state. Let your step donate them, too. Otherwise old and new arrays both exist.

    Without ``optimizer``, the candidate is a step of gradient descent. XLA may schedule another
    update differently, so three quarters of the parameters' bytes stay free.

    Args:
      loss: ``loss(model, ...)`` returns a scalar or ``(scalar, aux)``. The floating arrays of its
        first argument are differentiated; of an nnx module, its `nnx.Param`.
      *args: Arguments of the loss, or trees of their shapes. The budget may stand before them:
        ``remat_to_fit(loss, "8GiB", model, batch)``.
      budget: Bytes, or text for `parse_bytes`, such as ``"8GiB"``, or a share of the plain step's
        peak, such as ``"50%"``.
      optimizer: The optimizer of your step. It updates the floating arrays of the first argument:
        of an nnx module its ``nnx.state(module, nnx.Param)``, with None in the place of other
        leaves.
      held: Other arrays that stay in memory meanwhile, or their shapes, such as an average of the
        parameters. Without ``optimizer``, its state belongs here, too.
      target: A device to compile for. By default this machine's.
      progress: Called with each candidate after it is compiled.
      **kwargs: Keyword arguments of the loss.

    Returns:
      The loss to use, and the plan. ``plan.chosen.peak.total`` plus the bytes of ``held`` is at
      most the budget. On CPU, give ``plan.chosen.compiler_options`` to your ``jax.jit``: XLA's
      CPU compiler undoes rematerialization by default.

    Raises:
      BudgetError: If nothing fits. The message gives the lowest peak and what to change.
      TypeError: If the loss does not return a scalar, or its arguments are missing.
      ValueError: If the budget cannot be read. When the returned loss is differentiated: if it is
        with respect to more than its first argument, where it runs in chunks.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from fnet import memory
      >>> def loss(params, x):
      ...     for w in params:
      ...         x = jnp.tanh(jnp.tanh(x @ w) * x)
      ...     return x.sum()
      >>> params, x = [jnp.zeros((16, 16))] * 8, jnp.zeros((256, 16))
      >>> smaller, plan = memory.remat_to_fit(
      ...     loss, params, x, optimizer=optax.adam(1e-3), budget="224KiB"
      ... )
      >>> plan.chosen.peak.total <= 224 * 1024
      True
      >>> value, grads = jax.value_and_grad(smaller)(params, x)
    """
    if budget is None:
        budget, *args = args or (None,)  # type: ignore[assignment]
        if not isinstance(budget, str) and not jnp.isscalar(budget):
            raise TypeError(
                "remat_to_fit: no budget; give it as budget= or in front of the loss's arguments"
            )
    parse_bytes(budget, "remat_to_fit: budget", lambda: 2**40)
    if optimizer is not None:
        checks.optimizer("remat_to_fit", optimizer)
    if not args:
        raise TypeError("remat_to_fit: the arguments of the loss are missing, the model first")
    call = _Call.of(tuple(args), kwargs)
    transform = optax.with_extra_args_support(optimizer or optax.sgd(1.0))
    moments, held = _separate(held, jax.eval_shape(transform.init, call.tree(call.params)))
    arrays = call.params, moments, call.others

    def build(policy: Policy, microbatches: int) -> jax.stages.Traced:
        del microbatches
        f = policy.apply(call.pure(loss, []))

        def step(params: list[Any], moments: Any, others: list[Any]) -> Any:
            (value, arrays), grads = jax.value_and_grad(f, has_aux=True)(params, others)
            tree, gradient = call.tree(params), call.tree(grads)
            try:
                updates, moments = transform.update(
                    gradient, moments, tree, value=value, grad=gradient
                )
            except TypeError as error:
                raise TypeError(
                    f"remat_to_fit: optimizer.update with value= and grad= fails: {error}; plan "
                    "without optimizer=, and give its state as held="
                ) from error
            return optax.apply_updates(tree, updates), moments, value, arrays

        arguments = shapes_on(target, arrays) if target else arrays
        return jax.jit(step, donate_argnums=(0, 1)).trace(*arguments)

    held_bytes = tree_bytes(held)
    spare = 0 if optimizer else int(SPARE_OF_PARAMETERS * tree_bytes(call.params))
    chosen = plan(build, budget, reserve=held_bytes + spare, target=target, progress=progress)
    chosen = chosen._replace(reserve=held_bytes)
    policy = chosen.chosen.policy

    @functools.wraps(loss)
    @traced_for(target and target.device)
    def fitted(*args: Any, **kwargs: Any) -> Any:
        call = _Call.of(args, kwargs)
        finish: list[Callable[[Array, list[Any]], Any]] = []
        try:
            value, arrays = policy.apply(call.pure(loss, finish))(call.params, call.others)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise TypeError(
                "remat_to_fit: the planned loss has gradients alone, in reverse mode; take jax.jvp "
                "or jax.jacfwd of the loss itself, or of the gradient of the planned one"
            ) from None
        return finish[-1](value, arrays)

    return fitted, chosen  # type: ignore[return-value]


def _separate(held: Any, moments: Any) -> tuple[Any, Any]:
    """Take the optimizer's state out of what is held, if it is there: it may be sharded."""
    structure: Any = jax.tree.structure(moments)
    if not structure.num_leaves:
        return moments, held
    parts = jax.tree.leaves(held, is_leaf=lambda x: jax.tree.structure(x) == structure)
    states = [x for x in parts if jax.tree.structure(x) == structure]
    others = [x for x in parts if jax.tree.structure(x) != structure]
    return (states[0] if states else moments), others + states[1:]


class _Call(NamedTuple):
    """A call of a loss, as a function of lists of arrays.

    Attributes:
      params: Differentiated arrays, or their shapes.
      merge: ``merge(params, others) -> (args, kwargs, nnx objects)``.
      tree: ``tree(params)`` is the first argument as an optimizer takes it.
    """

    params: list[Any]
    others: list[Any]
    merge: Callable[[list[Any], list[Any]], tuple[Any, Any, tuple[Any, ...]]]
    tree: Callable[[list[Any]], Any]
    objects: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        """Separate the arrays of a call from everything else."""
        nnx = _nnx()

        def is_object(x: Any) -> bool:
            return nnx is not None and isinstance(x, nnx.Module | nnx.Rngs)

        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        places = [i for i, leaf in enumerate(leaves) if is_object(leaf)]
        objects = tuple(leaves[i] for i in places)
        first, first_structure = jax.tree.flatten(args[:1], is_leaf=is_object)
        count = len(first)
        differentiated = [i for i, leaf in enumerate(leaves[:count]) if _is_floating(leaf)]
        rest = [i for i, x in enumerate(leaves) if _is_array(x) and i not in set(differentiated)]
        in_first = sum(map(is_object, first))

        def is_weight(path: tuple[Any, ...], variable: Any) -> bool:
            return path[0] < in_first and isinstance(variable, nnx.Param)

        graph, weights, state = nnx.split(objects, is_weight, ...) if objects else (None, {}, {})
        weight_leaves, weight_structure = jax.tree.flatten(weights)
        state_leaves, state_structure = jax.tree.flatten(state)

        def merge(params: list[Any], others: list[Any]) -> tuple[Any, Any, tuple[Any, ...]]:
            merged = dict(enumerate(leaves))
            merged |= zip(differentiated, params, strict=False)
            merged |= zip(rest, others, strict=False)
            new: tuple[Any, ...] = ()
            if objects:
                new = nnx.merge(
                    graph,
                    jax.tree.unflatten(weight_structure, params[len(differentiated) :]),
                    jax.tree.unflatten(state_structure, others[len(rest) :]),
                )
                merged |= zip(places, new, strict=True)
            return *jax.tree.unflatten(structure, merged.values()), new

        def tree(params: list[Any]) -> Any:
            merged: dict[int, Any] = dict.fromkeys(range(count))
            merged |= zip(differentiated, params, strict=False)
            weights = jax.tree.unflatten(weight_structure, params[len(differentiated) :])
            merged |= {i: weights.get(n, nnx.State({})) for n, i in enumerate(places[:in_first])}
            return jax.tree.unflatten(first_structure, merged.values())[0]

        params = [leaves[i] for i in differentiated] + weight_leaves
        others = [leaves[i] for i in rest] + state_leaves
        return cls(params, others, merge, tree, objects)

    def pure(
        self, loss: Callable[..., Any], finish: list[Callable[[Array, list[Any]], Any]]
    ) -> Callable[[list[Any], list[Any]], tuple[Array, list[Any]]]:
        """Return ``f(params, others) -> (value, arrays)``.

        It appends to ``finish`` what updates nnx objects and returns what the loss returns.
        """

        def f(params: list[Any], others: list[Any]) -> tuple[Array, list[Any]]:
            args, kwargs, objects = self.merge(params, others)
            before, attributes = dict[Any, Any](), _attributes(objects)
            if objects:
                _nnx().state(objects, lambda path, v: before.update({path: v.get_value()}))
            result = loss(*args, **kwargs)
            has_aux = isinstance(result, tuple) and len(result) == 2
            value, aux = result if has_aux else (result, None)
            if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
                raise TypeError(
                    "remat_to_fit: the loss must return a scalar or (scalar, aux), got "
                    f"{_describe(result)}."
                )
            if not jnp.issubdtype(dtype := jnp.result_type(value), jnp.floating):
                function = "real" if jnp.issubdtype(dtype, jnp.complexfloating) else "float32"
                raise TypeError(
                    f"remat_to_fit: the loss must be a real floating number, got {dtype}; return "
                    f"jnp.{function} of it."
                )
            if aux is not None and _like(aux, args[0]):
                raise TypeError(
                    "remat_to_fit: the loss returned a value and arrays like its first argument: "
                    "pass the loss itself, not jax.value_and_grad of it."
                )
            # The step returns updated weights. Returned without an update, they would be copied.
            changed, newly_set = {}, _attributes(objects).items() - attributes.items()
            if objects:
                changed = _nnx().state(objects, lambda k, v: v.get_value() is not before.get(k))
            leaves, structure = jax.tree.flatten((aux, changed))
            known = [None if _is_array(leaf) else (leaf,) for leaf in leaves]

            def finished(value: Array, arrays: list[Any]) -> Any:
                remaining = iter(arrays)
                merged = [k[0] if k else next(remaining) for k in known]
                aux, changed = jax.tree.unflatten(structure, merged)
                if self.objects:
                    _nnx().update(self.objects, changed)
                    nodes = dict(_nnx().iter_graph(self.objects)) if newly_set else {}
                    for (*path, name), attribute in newly_set:
                        setattr(nodes[tuple(path)], name, attribute)
                return (value, aux) if has_aux else value

            finish.append(finished)
            return value, [leaf for leaf in leaves if _is_array(leaf)]

        return f


def _nnx() -> Any:
    """Return flax nnx if it is imported. Without it, no argument can be an nnx object."""
    return sys.modules.get("flax.nnx")


def _attributes(objects: Any) -> dict[Any, Any]:
    """Numbers, names and flags of nnx objects, by path."""
    kinds = int | float | str | None
    found = _nnx().iter_graph(objects) if objects else ()
    return {k: a for k, a in found if isinstance(a, kinds) and isinstance(k[-1], str)}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _like(a: Any, b: Any) -> bool:
    """Whether two trees of several floating arrays have the same structure and shapes."""
    leaves, other = jax.tree.leaves(a), jax.tree.leaves(b)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (a, b)]
    return (
        structures[0] == structures[1]
        and len(leaves) > 1
        and all(map(_is_floating, leaves + other))
        and all(x.shape == y.shape for x, y in zip(leaves, other, strict=True))
    )


def _describe(result: Any) -> str:
    if _is_array(result):
        return str(result.shape)
    if isinstance(result, tuple) and len(result) == 2 and _is_array(result[0]):
        return f"({result[0].shape}, aux)"
    given = f"{type(result).__name__} of {len(jax.tree.leaves(result)):,} arrays"
    return f"{'None' if result is None else given}; pass the loss, not the whole train step"


def _is_floating(leaf: Any) -> bool:
    return _is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
