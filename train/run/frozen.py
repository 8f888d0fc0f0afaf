"""Checkpoints without the frozen parameters of a published model, which do not change."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from fnet import TrainState
from train.networks.pretrained import FROZEN, PretrainedNetwork
from train.run.checkpoints import Checkpoints, Restored, RestoredNetwork
from train.run.run_folder import RunFolder


def without_frozen(state: TrainState) -> TrainState:
    """Return what a checkpoint holds of a state or of its shapes."""
    if FROZEN not in state.model_state:
        return state
    return dataclasses.replace(state, model_state=_without(state.model_state))


def restore(checkpoints: Checkpoints, model: Any, shapes: TrainState) -> Restored | None:
    """Restore the newest checkpoint, and read frozen parameters from the published model."""
    restored = checkpoints.restore(without_frozen(shapes))
    if restored is None or FROZEN not in shapes.model_state:
        return restored
    model_state = restored.state.model_state | {FROZEN: model.read(shapes.model_state[FROZEN])}
    return restored._replace(state=dataclasses.replace(restored.state, model_state=model_state))


def load_network(
    folder: RunFolder,
    model: Any,
    *,
    best: bool = False,
    place: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> RestoredNetwork:
    """Restore the network of a run, with frozen parameters from the published model.

    A run of a published model without a checkpoint, such as `fnet import` makes, has the published
    parameters. ``best`` and ``place`` are as in `Checkpoints` and its ``restore_network``.
    """

    def init(key: Array) -> tuple[Any, Any]:
        params, model_state = model.init(key)
        return params, _without(model_state)

    def placed_shapes() -> tuple[Any, Any]:
        params, model_state = jax.eval_shape(model.init, jax.random.key(0))
        shapes = {"params": params, "model_state": model_state}
        shapes = shapes if place is None else place(shapes)
        return shapes["params"], shapes["model_state"]

    is_pretrained = isinstance(model, PretrainedNetwork)
    if is_pretrained and not folder.checkpoints.is_dir():
        initial = jax.jit(model.place, donate_argnums=1)
        pretrained = model.read(model.pretrained(*placed_shapes()))
        params, model_state = initial(jax.random.key(0), pretrained)
        return RestoredNetwork(params, model_state, 0)
    with Checkpoints(folder.checkpoints, best=best) as checkpoints:
        network = checkpoints.restore_network(init, place)
    if not (is_pretrained and model.is_frozen):
        return network
    frozen = {FROZEN: model.read(model.pretrained(*placed_shapes()))}
    return network._replace(model_state=network.model_state | frozen)


def _without(model_state: Any) -> Any:
    if not isinstance(model_state, dict):
        return model_state
    return {name: value for name, value in model_state.items() if name != FROZEN}
