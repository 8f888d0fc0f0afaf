"""The optimizer inside the backward pass: stacks of layers whose gradients never exist whole.

Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with
Limited Resources" (LOMO), ACL 2024, for SGD; here for any elementwise rule.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet.autodiff.elementwise import layerwise_update
from fnet.autodiff.layerwise import REST, LayerwiseUpdate
from fnet.autodiff.mean import Aux, Loss, mean
from fnet.autodiff.update import Mode, Update, squared_norm
from fnet.autodiff.updating_scan import Owned, Stack, UpdatedStack


def optimizer_in_backward(*paths: str) -> "OptimizerInBackward":
    """A mode of `make_step` that updates each layer of a `repeat` in the backward pass.

    As soon as a layer's gradient is known, the layer and its part of the
    optimizer's state are renewed in place, and the gradient is gone: a stack
    takes its parameters and the optimizer's state, without the gradients. The
    rest of the network is updated afterwards. The step is the same as with
    `mean`; so are its metrics.

    The optimizer's update must be elementwise (``sgd`` with or without
    momentum, ``lion``, ``adam``, ``adamw`` with a mask, schedules, ...). That is
    read from its equations, not from its name.

    Args:
      *paths: where in ``params`` the parameters of each such `repeat` stand: keys with
        "/" between, as in ``"encoder/blocks"``; ``""`` for all of ``params``.

    Returns:
      The mode, for ``make_step(loss, optimizer, mode)``.

    Raises:
      ValueError: without a path, or with one inside another; when the step is
        traced: if there is nothing at a path, if no `repeat` uses what is there,
        or more than one, or one inside of a transformation; if no gradient
        reaches it (`jax.lax.stop_gradient`); if the update of a
        layer needs more than that layer (clipping by global norm, a
        factored or normalised rule, ...).
      TypeError: when traced, if anything else uses those parameters (a penalty
        in the loss), which would add to their gradient; when asked for a
        gradient, as accumulation over microbatches does.
    """
    if not paths:
        raise ValueError(
            "optimizer_in_backward: name the path of a repeat's parameters, or "
            '"" where they are all of params'
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
    """The mode that `optimizer_in_backward` gives.

    Attributes:
      paths: of the stacks in ``params``.
    """

    paths: tuple[str, ...]
    whole_gradient: ClassVar[bool] = False

    def __call__(self, loss: Loss) -> NoReturn:
        """Refuses to be a gradient mode."""
        raise TypeError(
            "optimizer_in_backward: has no gradient to give, since the backward pass uses it up: "
            "accumulated over microbatches, it would update after each of them; give it to "
            "make_step as the mode, alone"
        )

    def update(self, loss: Loss, optimizer: optax.GradientTransformation) -> Update:
        """The update of a batch; see `fnet.autodiff.update`."""
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
    rule = layerwise_update(optimizer, params, opt_state, owners)
    stacks = [Stack(p, i, rule, s) for i, (p, s) in enumerate(zip(paths, structures, strict=True))]
    old = dict(enumerate(jax.tree.leaves((params, opt_state))))
    owned = [
        Owned({n: old[n] for n in rule.owned(stack.number)}, jnp.zeros((), jnp.float32))
        for stack in stacks
    ]
    handed: list[UpdatedStack] = []

    def handing_over(
        trained: tuple[Any, list[Owned]], model_state: Any, batch: dict[str, Array], key: Array
    ) -> Array | tuple[Array, Aux]:
        params, owned = trained
        for stack, own in zip(stacks, owned, strict=True):
            shared = {n: old[n] for n in rule.shared(stack.number)}
            handed.append(UpdatedStack(stack, own, shared))
            params = _put(params, stack.name, handed[-1])
        try:
            result = loss(params, model_state, batch, key)
        except (TypeError, ValueError, AttributeError) as error:
            if UpdatedStack.__name__ not in str(error):
                raise
            raise TypeError(
                f"optimizer_in_backward: the parameters at {list(paths)} are updated in the "
                "backward pass of fnet.repeat, and nothing else can take them: neither a function "
                "of them, which would add to their gradient (weight decay belongs to the "
                "optimizer), nor another layer, nor jax.checkpoint as an argument; use mode=mean"
            ) from error
        for updated in handed:
            updated.check_used()
        return result

    # In place of their cotangents the stacks' new values come back.
    (grads, renewed), model_state, metrics = mean(handing_over)(
        (rest, owned), model_state, batch, key
    )
    for updated in handed:
        updated.check_renewed()
    with jax.named_scope("optimizer"):
        new = _rest(rule, owners, grads, old)
    for own in renewed:
        new |= own.arrays
    structure: Any = jax.tree.structure((params, opt_state))
    params, opt_state = structure.unflatten(new[n] for n in range(len(rule.slots)))
    squares = squared_norm(grads) + sum(own.squares for own in renewed)
    return params, opt_state, model_state, metrics | {"grad_norm": jnp.sqrt(squares)}


def _rest(
    rule: LayerwiseUpdate, owners: Any, grads: Any, old: dict[int, Array]
) -> dict[int, Array]:
    """New values of what is in no stack, from its gradients."""
    places = [n for n, owner in enumerate(jax.tree.leaves(owners)) if owner == REST]
    return rule.rest(
        dict(zip(places, jax.tree.leaves(grads), strict=True)),
        {n: old[n] for n in rule.owned(REST)},
    )


def _keys(path: str) -> list[str]:
    return path.split("/") if path else []


def _find(params: Any, path: str) -> Any:
    """The stacked parameters at a path."""
    tree = params
    for key in _keys(path):
        if not isinstance(tree, Mapping) or key not in tree:
            kind = "an array" if isinstance(tree, Array) else f"a {type(tree).__name__}"
            wanted = (
                f"expected one of {list(tree)}"
                if isinstance(tree, Mapping)
                else f"a path goes through dicts, not through {kind}"
            )
            raise ValueError(
                f"optimizer_in_backward: there are no parameters at {path!r}: {wanted}, got {key!r}"
            )
        tree = tree[key]
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise ValueError(
            f"optimizer_in_backward: the parameters at {path!r} are not those of a repeat, whose "
            f"leading axes are all its number of layers: got shapes {shapes}"
        )
    return tree


def _put(tree: Any, path: str, value: Any) -> Any:
    """``tree`` with another value at a path, its leaves in the same order."""

    def put(tree: Any, keys: list[str]) -> Any:
        if not keys:
            return value
        new = {keys[0]: put(tree[keys[0]], keys[1:])}
        # The leaves of an OrderedDict are in its own order, and `|` keeps it one.
        return tree | new if isinstance(tree, dict) else {**tree, **new}

    return put(tree, _keys(path))
