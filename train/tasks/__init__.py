"""Tasks: what a config trains, one module per kind."""

import jax

from train import data
from train.config import Config
from train.data import Dataset, sample_batch
from train.errors import UserError
from train.tasks import classification, diffusion, language, preference, segmentation
from train.tasks import text_classification as text_classes
from train.tasks.task import BatchMetrics, Kind, Task

KINDS: dict[str, Kind] = {
    "classification": classification.KIND,
    "segmentation": segmentation.KIND,
    "language": language.KIND,
    "preference": preference.KIND,
    "reward": preference.REWARD,
    "text_classification": text_classes.KIND,
    "diffusion": diffusion.KIND,
}
"""Kinds of tasks by the name that a network gives."""


def kind_of(config: Config) -> Kind:
    """Return the kind of a config's task, which follows from its network and its data."""
    return KINDS[config.model.task_for(config.data)]


def load(config: Config) -> Dataset:
    """Load the data of a config."""
    kind_of(config).check(config)
    if config.is_private:
        config.data.check_statistics()
    dataset = data.load(config.model.complete(config.data), private=config.is_private)
    if config.is_private:
        config.data.check_statistics(dataset)
    return dataset


def build(config: Config, dataset: Dataset | None = None) -> Task:
    """Build the task of a config, with a dataset in place of the one that it describes if given."""
    kind = kind_of(config)
    kind.check(config)
    dataset = dataset or load(config)
    try:
        task = kind.build(config, dataset)
        params, state = jax.eval_shape(task.model.init, jax.random.key(0))
        batch = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype)
            for name, a in sample_batch(task.dataset, 2).items()
        }
        jax.eval_shape(task.loss, params, state, batch, jax.random.key(0))
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {error}") from error
    return task


__all__ = ["KINDS", "BatchMetrics", "Kind", "Task", "build", "kind_of", "load"]
