"""What a config trains: one module a kind of task."""

from typing import Any

import jax

from train.config import Config, DeepLab, Denoiser, LanguageModel
from train.data import batch_of
from train.errors import UserError
from train.tasks import classification, diffusion, language, segmentation
from train.tasks.task import Measured, Task

_TASKS: dict[type, Any] = {
    DeepLab: segmentation,
    LanguageModel: language,
    Denoiser: diffusion,
}


def build(config: Config) -> Task:
    """The task of a config: that of its network.

    Raises:
      UserError: if the network cannot be built, or the data are not for it.
    """
    try:
        task = _TASKS.get(type(config.model), classification).build(config)
        params, state = jax.eval_shape(task.model.init, jax.random.key(0))
        batch = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype)
            for name, a in batch_of(task.dataset, 2).items()
        }
        jax.eval_shape(task.loss, params, state, batch, jax.random.key(0))
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {error}") from error
    return task


__all__ = ["Measured", "Task", "build"]
