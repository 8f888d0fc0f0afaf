"""The start of a run: its folder, and its first state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from fnet import TrainState
from train.run.checkpoints import Checkpoints
from train.run.class_names import check_classes
from train.run.frozen import load_network, restore
from train.run.initial_weights import InitialWeights
from train.run.model_files import copy_model_files
from train.run.run_folder import RunFolder, as_json, atomic_write
from train.run.same_data import check_data, write_data
from train.run.seeds import check_secret, create_secret, needs_secret
from train.run.setup import Setup, check_same_noise


class Start(NamedTuple):
    """What a run begins with.

    Attributes:
      step: Number of steps that were taken before.
      state: Train state.
      position: Position in the data; None for the beginning.
    """

    step: int
    state: TrainState
    position: Any = None


def create_folder(
    folder: RunFolder, run: Setup, data: dict[str, Any], weights: InitialWeights | None
) -> None:
    """Create the folder of a new run.

    Args:
      folder: folder of the run.
      run: setup of the run.
      data: `train.run.same_data.describe_data` of its data set.
      weights: pretrained weights that it begins with, or None.

    Raises:
      UserError: if it cannot be written, or has a run.
    """
    folder.create()
    create_secret(folder, run.config)
    copy_model_files(folder, run.config)
    write_data(folder, run.config, data)
    folder.write_config(run.config)
    if weights is not None:
        atomic_write(folder.imported, as_json(weights.as_dict()))


def reopen_folder(
    folder: RunFolder, run: Setup, data: dict[str, Any], log: Callable[[str], None]
) -> None:
    """Prepare the folder of a run that is resumed.

    Args:
      folder: folder of the run.
      run: setup of the run, whose config may have changed.
      data: `train.run.same_data.describe_data` of its data set.
      log: prints a line.

    Raises:
      UserError: if the run cannot go on with this config, data or folder.
    """
    before = folder.read_config()
    check_same_noise(run, before)
    check_classes(folder, run.task.dataset.classes, run.task.dataset.label_map)
    check_secret(folder, before)
    changed = check_data(folder, run.config, data)
    folder.resume(run.config)
    if changed:
        log(changed)
    if needs_secret(run.config) and not needs_secret(before):  # imported, not trained yet
        create_secret(folder, run.config)
    write_data(folder, run.config, data)


def first_state(
    run: Setup,
    folder: RunFolder,
    checkpoints: Checkpoints,
    init: Callable[[Array], TrainState],
    *,
    resume: bool,
) -> Start:
    """Return the state of the last checkpoint, or initial values.

    Args:
      run: setup of the run.
      folder: folder of the run.
      checkpoints: checkpoints of the run.
      init: compiled function ``key -> TrainState``.
      resume: whether to continue from a checkpoint.
    """
    key = jax.random.key(run.config.train.seed)
    if resume and checkpoints.latest_step == 0:
        # An imported network: the rest follows from the config, which may have changed.
        network = load_network(folder, run.task.model)
        init = run.compile_init((network.evaluation_params, network.model_state))
    elif resume and (restored := restore(checkpoints, run.task.model, run.state_shapes)):
        return Start(restored.step, restored.state, restored.position)
    return Start(0, init(key))
