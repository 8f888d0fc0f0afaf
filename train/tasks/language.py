"""Each token of a text from those before it: data, network, loss and metrics."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from train.config import Config, LanguageModel, TextFile
from train.data import text_file
from train.data.tokenizer import tokens_of
from train.errors import UserError
from train.tasks.task import Batch, Measured, Task


def model_of(config: Config) -> fnet.models.LanguageModel:
    """The network alone, which needs no text.

    Raises:
      UserError: if the config names no text, or another network.
      ValueError: if the network cannot be built.
    """
    data, model = config.data, config.model
    if not isinstance(data, TextFile) or not isinstance(model, LanguageModel):
        raise UserError(
            f"data.source: {data.source} has no text, which the network {model.name} takes; "
            "give data.source text_file"
        )
    return model.build(tokens_of(data).size, config.train.precision)


def build(config: Config) -> Task:
    """The language task of a config.

    Raises:
      UserError: if the text cannot be read.
      ValueError: if the network cannot be built.
    """
    model = model_of(config)
    assert isinstance(config.data, TextFile)
    dataset = text_file.load(config.data)
    if config.is_private and "slack" in dataset.train:
        # Rows that move on are told tokens of each other's: leaving one out would leave its
        # tokens in, where privacy is promised to each row by itself.
        still = np.zeros_like(dataset.train["slack"])
        dataset = dataset._replace(train=dataset.train | {"slack": still})

    def losses(params: Any, state: Any, batch: Batch, key: Array | None, smoothing: float) -> Any:
        tokens = batch["tokens"].astype(jnp.int32)
        told, mask = tokens[:, 1:], None
        if "length" in batch:
            mask = jnp.arange(told.shape[1])[None] < batch["length"][:, None]
        each, state = model.losses(
            params,
            state,
            tokens[:, :-1],
            told,
            key=key,
            train=key is not None,
            mask=mask,
            smoothing=smoothing,
        )
        count = told.shape[1] if mask is None else jnp.maximum(batch["length"], 1)
        return each.sum(1) / count, state

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        each, state = losses(params, state, batch, key, config.optim.label_smoothing)
        return each, fnet.Aux(state, {})

    def measure(params: Any, state: Any, batch: Batch) -> Measured:
        each, _ = losses(params, state, batch, None, 0.0)
        return Measured({"loss": each})

    return Task(dataset, model, loss, measure)
