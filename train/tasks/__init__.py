"""Tasks: what a config trains, one module per kind."""

from typing import Any

import jax

from train.config import ChatFile, Config, DeepLab, Denoiser, LanguageModel, Pretrained, TextFile
from train.data import Dataset, sample_batch
from train.errors import UserError
from train.tasks import classification, diffusion, language, segmentation
from train.tasks.task import BatchMetrics, Task

_TASKS: dict[type, Any] = {
    DeepLab: segmentation,
    LanguageModel: language,
    Denoiser: diffusion,
}


def build(config: Config, dataset: Dataset | None = None) -> Task:
    """Build the task of a config, which follows from its network.

    Args:
      config: Config of the run.
      dataset: Data to use in place of those that the config describes.

    Raises:
      UserError: if the network is invalid, or the data do not fit it.
    """
    try:
        task = _module(config).build(config, dataset)
        params, state = jax.eval_shape(task.model.init, jax.random.key(0))
        batch = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype)
            for name, a in sample_batch(task.dataset, 2).items()
        }
        jax.eval_shape(task.loss, params, state, batch, jax.random.key(0))
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {error}") from error
    return task


def _module(config: Config) -> Any:
    """Return the module of the config's task."""
    if isinstance(config.model, Pretrained) and isinstance(config.data, TextFile | ChatFile):
        return language
    return _TASKS.get(type(config.model), classification)


__all__ = ["BatchMetrics", "Task", "build"]
