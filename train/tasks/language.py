"""Language modeling, which predicts each token from those before it: data, network and loss."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from train.config import Config, LanguageModel, TextFile
from train.data import Dataset, text_file
from train.data.tokenizer import load_tokenizer
from train.errors import UserError
from train.tasks.task import Batch, BatchMetrics, Task


def build_network(config: Config) -> fnet.models.LanguageModel:
    """Build the network without reading the text.

    Raises:
      UserError: if the data source has no text, or the network is not a language model.
      ValueError: if the network is invalid.
    """
    data, model = config.data, config.model
    if not isinstance(data, TextFile) or not isinstance(model, LanguageModel):
        raise UserError(
            f"data.source: {data.source} has no text, which the network {model.name} needs; "
            "give data.source text_file"
        )
    return model.build(data.vocabulary or load_tokenizer(data).vocab_size, config.train.precision)


def build(config: Config, dataset: Dataset | None = None) -> Task:
    """Build the language modeling task of a config, by default with the data it describes.

    Raises:
      UserError: if the text is unreadable.
      ValueError: if the network is invalid.
    """
    model = build_network(config)
    assert isinstance(config.data, TextFile)
    dataset = dataset or text_file.load(config.data)
    if config.is_private and "slack" in dataset.train:
        # Shifted rows share tokens with their neighbors, but privacy is per row: removing a row
        # must remove its tokens.
        no_slack = np.zeros_like(dataset.train["slack"])
        dataset = dataset._replace(train=dataset.train | {"slack": no_slack})

    def losses(params: Any, state: Any, batch: Batch, key: Array | None, smoothing: float) -> Any:
        tokens = batch["tokens"].astype(jnp.int32)
        targets, mask = tokens[:, 1:], None
        if "length" in batch:
            mask = jnp.arange(targets.shape[1])[None] < batch["length"][:, None]
        per_token, state = model.losses(
            params,
            state,
            tokens[:, :-1],
            targets,
            key=key,
            train=key is not None,
            mask=mask,
            smoothing=smoothing,
        )
        count = targets.shape[1] if mask is None else jnp.maximum(batch["length"], 1)
        return per_token.sum(1) / count, state

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        per_row, state = losses(params, state, batch, key, config.optim.label_smoothing)
        return per_row, fnet.Aux(state, {})

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        per_row, _ = losses(params, state, batch, None, 0.0)
        return BatchMetrics({"loss": per_row})

    return Task(dataset, model, loss, measure)
