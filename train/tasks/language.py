"""Language modeling, which predicts each token from those before it: data, network and loss."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import Array

import fnet
from train.config import Config
from train.data import Dataset
from train.data.batch import Batch
from train.data.chat import ChatTemplate, load_template
from train.data.text import Text
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.tasks.task import BatchMetrics, Kind, Task


def text_source(config: Config) -> Text:
    """Return the data section of a language model, by default with a published model's tokenizer.

    Raises:
      UserError: if the data source has no text.
    """
    KIND.check(config)
    text = config.model.complete(config.data).as_text
    assert text is not None  # because its content is text
    return text


def chat_template(data: Text, tokenizer: Tokenizer) -> ChatTemplate:
    """Load the chat template of the data, by default the tokenizer's.

    Raises:
      UserError: if there is none, or it is unreadable.
    """
    path = data.chat_template
    return load_template(tokenizer.folder, Path(path) if path else None)


def build_network(config: Config) -> Any:
    """Build the network without reading the text.

    Raises:
      UserError: if the data source has no text, or the network is not a language model.
      ValueError: if the network is invalid.
    """
    data = text_source(config)
    vocabulary = data.vocabulary or load_tokenizer(data).vocab_size
    return config.model.for_text(vocabulary, config.train.precision)


def build(config: Config, dataset: Dataset) -> Task:
    """Build the language modeling task of a config.

    The loss of a row is the mean over its targets. Batches without privacy weight each row by the
    number of its targets, so that all targets count the same. With privacy, all rows count the
    same, because privacy is per row.

    Raises:
      ValueError: if the network is invalid.
    """
    model = build_network(config)

    def losses(params: Any, state: Any, batch: Batch, key: Array | None, smoothing: float) -> Any:
        tokens = batch["tokens"].astype(jnp.int32)
        targets, mask, segments = tokens[:, 1:], None, {}
        if "segment" in batch:
            # The last token of a segment has no target, as if the segment were a row.
            inputs = batch["segment"][:, :-1]
            mask = (inputs > 0) & (inputs == batch["segment"][:, 1:])
            segments = {"segments": inputs}
        elif "length" in batch:
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
            **segments,
        )
        if "target_mask" in batch:
            per_token = jnp.where(batch["target_mask"], per_token, 0)
            return per_token.sum(1) / jnp.maximum(batch["target_mask"].sum(1), 1), state
        count = targets.shape[1] if mask is None else jnp.maximum(batch["length"], 1)
        return per_token.sum(1) / count, state

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        per_row, state = losses(params, state, batch, key, config.optim.label_smoothing)
        return per_row, fnet.Aux(state, {})

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        per_row, _ = losses(params, state, batch, None, 0.0)
        return BatchMetrics({"loss": per_row})

    return Task(dataset, model, loss, measure)


KIND = Kind("text", build, generates="text", options=("choices", "chat"))
