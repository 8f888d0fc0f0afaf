"""The gradient mode that applies the optimizer inside the backward pass."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet.autodiff.fused_optimizer.layer_update import REST, LayerUpdate, trace_update
from fnet.autodiff.fused_optimizer.stack import Owned, Stack, StackPlaceholder
from fnet.autodiff.mean import Loss, gradient_of, mean_loss, replace_padding
from fnet.autodiff.update import Mode, Update, squared_norm


def optimizer_in_backward(*paths: str) -> "OptimizerInBackward":
    """Return a mode that updates each layer of a `fnet.repeat` inside the backward pass.

    As soon as the gradient of a layer is known, the layer and its part of the optimizer's
    state are updated in place, and the gradient is freed. A stack of layers then takes the
    memory of its parameters and optimizer state, without gradients. All other parameters
    are updated after the backward pass. The step and its metrics are the same as with `mean`.

    The optimizer must not mix layers: ``sgd`` with or without momentum, ``lion``, ``adam``,
    ``adamw`` with a mask, `fnet.optim.compact_adamw`, schedules and so on. fnet checks this in the
    jaxpr of the update, so your own optimizers work too.

    Args:
      *paths: paths of the parameters of each such `repeat` in ``params``, keys separated by
        "/", as in ``"encoder/blocks"``; ``""`` if they are all of ``params``.

    Returns:
      The mode, for ``make_step(loss, optimizer, mode)``.

    Raises:
      ValueError: without a path, or if one path is inside another. When the step is
        traced: if there are no parameters at a path; if no `repeat` uses them, or more than
        one, or one inside of a transformation; if no gradient reaches them
        (`jax.lax.stop_gradient`); or if the update of a layer depends on other layers
        (clipping by global norm, factored or normalized optimizers).
      TypeError: when the step is traced, if the loss uses those parameters in any other way,
        such as a penalty, which would add to their gradient; or if a whole gradient is needed,
        as for microbatches.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import fnet
      >>> from fnet import layers, losses
      >>> block = fnet.serial(dense=layers.dense(4, 4), act=layers.activation("relu"))
      >>> model = fnet.serial(blocks=fnet.repeat(block, 3), head=layers.dense(4, 2))
      >>> def loss(params, model_state, batch, key):
      ...     logits, model_state = model.apply(
      ...         params, model_state, batch["x"], train=True
      ...     )
      ...     return losses.cross_entropy(logits, batch["y"]), fnet.Aux(
      ...         model_state, {}
      ...     )
      >>> optimizer = optax.adam(1e-3)
      >>> state = fnet.TrainState.create(model, optimizer, jax.random.key(0))
      >>> mode = fnet.autodiff.optimizer_in_backward("blocks")
      >>> step = fnet.make_step(loss, optimizer, mode)
      >>> state, metrics = step(
      ...     state, {"x": jnp.ones((2, 4)), "y": jnp.zeros(2, int)}
      ... )
      >>> sorted(metrics)
      ['grad_norm', 'loss']

    References:
      Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources"
      (LOMO), ACL 2024, for SGD. This mode extends it to any optimizer that
      does not mix layers.
    """
    if not paths:
        raise ValueError(
            "optimizer_in_backward: expected the path of a repeat's parameters, got none; use "
            '"" if they are all of params'
        )
    for i, path in enumerate(paths):
        for other in paths[:i]:
            a, b = _keys(path), _keys(other)
            if a[: len(b)] == b or b[: len(a)] == a:
                raise ValueError(
                    f"optimizer_in_backward: {other!r} and {path!r} overlap; name each stack once"
                )
    return OptimizerInBackward(paths)


@dataclasses.dataclass(frozen=True)
class OptimizerInBackward(Mode):
    """The mode that `optimizer_in_backward` returns.

    Attributes:
      paths: paths of the stacks in ``params``.
    """

    paths: tuple[str, ...]
    whole_gradient: ClassVar[bool] = False

    def __call__(self, loss: Loss) -> NoReturn:
        """Raise TypeError: the mode has no gradient to return."""
        raise TypeError(
            "optimizer_in_backward: the backward pass uses up the gradient, so it cannot be "
            "accumulated over microbatches; give this mode to make_step without microbatches"
        )

    def update(self, loss: Loss, optimizer: optax.GradientTransformation) -> Update:
        """Return the update function of a loss and an optimizer."""
        return functools.partial(_update, self.paths, loss, optimizer)


def _update(
    paths: tuple[str, ...],
    loss: Loss,
    optimizer: optax.GradientTransformation,
    params: Any,
    opt_state: optax.OptState,
    model_state: Any,
    batch: dict[str, Array],
    key: Array,
) -> tuple[Any, optax.OptState, Any, dict[str, Array]]:
    rest, owners = params, jax.tree.map(lambda _: REST, params)
    structures = []
    for number, path in enumerate(paths):
        stacked = _find(params, path)
        structures.append(jax.tree.structure(stacked))
        owners = _put(owners, path, jax.tree.map(lambda _, number=number: number, stacked))
        rest = _put(rest, path, None)
    update = trace_update(optimizer, params, opt_state, owners)
    stacks = [
        Stack(path, number, update, structure)
        for number, (path, structure) in enumerate(zip(paths, structures, strict=True))
    ]
    old = dict(enumerate(jax.tree.leaves((params, opt_state))))
    owned = [
        Owned(
            {n: old[n] for n in update.owned(stack.number)}, jnp.zeros((), jnp.float32)
        ).as_floating()
        for stack in stacks
    ]
    placeholders: list[StackPlaceholder] = []

    def loss_of_placeholders(
        trained: tuple[Any, list[Owned]], model_state: Any, batch: dict[str, Array], key: Array
    ) -> Any:
        params, owned = trained
        for stack, own in zip(stacks, owned, strict=True):
            shared = {n: old[n] for n in update.shared(stack.number)}
            placeholders.append(StackPlaceholder(stack, own, shared))
            params = _put(params, stack.path, placeholders[-1])
        result = loss(params, model_state, batch, key)
        for placeholder in placeholders:
            placeholder.check_used()
        return result

    # The cotangents of `owned` are the new values of the stacks.
    gradient = gradient_of(mean_loss(loss_of_placeholders))
    (grads, new_owned), model_state, metrics = gradient(
        (rest, owned), model_state, replace_padding(batch), key
    )
    for placeholder in placeholders:
        placeholder.check_updated()
    with jax.named_scope("optimizer"):
        new = _update_rest(update, owners, grads, old)
    for own in new_owned:
        new |= own.as_stored(update.slots).arrays
    structure: Any = jax.tree.structure((params, opt_state))
    params, opt_state = structure.unflatten(new[n] for n in range(len(update.slots)))
    squares = squared_norm(grads) + sum(own.squares for own in new_owned)
    return params, opt_state, model_state, metrics | {"grad_norm": jnp.sqrt(squares)}


def _update_rest(
    update: LayerUpdate, owners: Any, grads: Any, old: dict[int, Array]
) -> dict[int, Array]:
    """Return the new values of all arrays in no stack, by slot number."""
    numbers = [n for n, owner in enumerate(jax.tree.leaves(owners)) if owner == REST]
    return update.update_rest(
        dict(zip(numbers, jax.tree.leaves(grads), strict=True)),
        {n: old[n] for n in update.owned(REST)},
    )


def _keys(path: str) -> list[str]:
    return path.split("/") if path else []


def _find(params: Any, path: str) -> Any:
    tree = params
    for key in _keys(path):
        if not isinstance(tree, Mapping) or key not in tree:
            kind = "an array" if isinstance(tree, Array) else f"a {type(tree).__name__}"
            expected = (
                f"expected one of {list(tree)}"
                if isinstance(tree, Mapping)
                else f"a path goes through dicts, not through {kind}"
            )
            raise ValueError(
                f"optimizer_in_backward: no parameters at {path!r}: {expected}, got {key!r}"
            )
        tree = tree[key]
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise ValueError(
            f"optimizer_in_backward: the parameters at {path!r} do not belong to a repeat, whose "
            f"leading axes all equal the number of layers; got shapes {shapes}"
        )
    return tree


def _put(tree: Any, path: str, value: Any) -> Any:
    """Return ``tree`` with another value at a path and the same order of leaves."""

    def put(tree: Any, keys: list[str]) -> Any:
        if not keys:
            return value
        new = {keys[0]: put(tree[keys[0]], keys[1:])}
        # Leaves of an OrderedDict have its own order, and `|` returns another OrderedDict.
        return tree | new if isinstance(tree, dict) else {**tree, **new}

    return put(tree, _keys(path))
