"""Checkpoints of a run: the only place that knows orbax."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from jax import Array

from fnet import TrainState
from train.errors import UserError

# Orbax tells of every directory it makes; what matters is said by the loop.
logging.getLogger("absl").setLevel(logging.ERROR)


class Restored(NamedTuple):
    """A checkpoint: the state after ``step`` steps, and where the data stood."""

    step: int
    state: TrainState
    position: dict[str, Any]


class Checkpoints:
    """The newest checkpoints of a run, saved in the background, each of them whole or absent."""

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, position: dict[str, Any]) -> None:
        """Starts to save; the state may be donated as soon as this returns."""
        if self.latest_step == step:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(position)
            ),
        )

    def wait(self) -> None:
        """Returns when everything is on disk."""
        self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> Restored | None:
        """The newest checkpoint, or None.

        Args:
          like: the shapes of such a state, placed (`train.mesh`) or for one device.

        Raises:
          UserError: if the checkpoint's arrays have other names or shapes.
        """
        step = self.latest_step
        if step is None:
            return None
        self._compare(step, self._manager.item_metadata(step).state.tree, like)
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding or here), like
        )
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore()
            ),
        )
        return Restored(step, restored.state, restored.data)

    def restore_network(
        self, init: Callable[[Array], tuple[Any, Any]] | None = None
    ) -> tuple[Any, Any]:
        """The newest checkpoint's parameters, averaged where an average is kept, and model state.

        Needs neither the data nor the optimizer that they were made with.

        Args:
          init: the network's, ``key -> (params, model_state)``, to compare with; None: what is
            there is taken.

        Raises:
          UserError: if there is no checkpoint, or its arrays have other names or shapes.
        """
        step = self.latest_step
        if step is None:
            raise UserError(
                f"no checkpoint in {self._manager.directory}: the run has not saved one yet"
            )
        there = self._manager.item_metadata(step).state.tree
        if init is not None:
            params, model_state = jax.eval_shape(init, jax.random.key(0))
            self._compare(
                step,
                {name: there[name] for name in ("params", "model_state")},
                {"params": params, "model_state": model_state},
            )
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here),
            there,
            is_leaf=lambda a: hasattr(a, "shape"),
        )
        state = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like))
        ).state
        return state["params"] if state.get("ema") is None else state["ema"], state["model_state"]

    def _compare(self, step: int, there: Any, here: Any) -> None:
        """Refuses a checkpoint whose arrays are not those that are here."""
        found, wanted = _shapes(there), _shapes(here)
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise UserError(
                    f"checkpoint {self._manager.directory / str(step)} is another model's: "
                    f"{name} is {found.get(name, 'absent')} there, "
                    f"{wanted.get(name, 'absent')} here"
                )


def _shapes(tree: Any) -> dict[str, str]:
    """{path: shape} of all leaves but the typed key, which is saved as its data."""

    def name(path: Any) -> str:
        parts = (getattr(p, a) for p in path for a in ("key", "name", "idx") if hasattr(p, a))
        return ".".join(str(p) for p in parts)

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    shapes = {name(p): str(tuple(leaf.shape)) for p, leaf in leaves if hasattr(leaf, "shape")}
    return {name: shape for name, shape in shapes.items() if name != "key"}
