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
    """Return the data of a language model, by default with a published model's tokenizer."""
    text = config.model.complete(config.data)
    if not isinstance(text, Text):
        KIND.check(config)
    assert isinstance(text, Text)  # because its content is text
    return text


def chat_template(data: Text, tokenizer: Tokenizer) -> ChatTemplate:
    """Load the chat template of the data, by default the tokenizer's."""
    path = data.chat_template
    return load_template(tokenizer.folder, Path(path) if path else None)


def build_network(config: Config) -> Any:
    """Build the network without reading the text."""
    data = text_source(config)
    vocabulary = data.vocabulary or load_tokenizer(data).vocab_size
    return config.model.for_text(vocabulary, config.train.precision)


def token_losses(
    model: Any, params: Any, state: Any, tokens: Any, lengths: Any, mask: Any, key: Any, **how: Any
) -> tuple[Array, Any]:
    """Return the losses [N, T - 1] of the tokens after the first one, and the next state.

    Losses beyond the mask are 0. Training has a key.
    """
    tokens, how = tokens.astype(jnp.int32), how | {"lengths": lengths, "loss_mask": mask}
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return model.losses(params, state, inputs, targets, key=key, train=key is not None, **how)


def build(config: Config, dataset: Dataset) -> Task:
    """Build the language modeling task of a config.

    A step averages over the learned tokens of its global batch. The loss of a row is the mean over
    its own, and batches without privacy weight each row by their number. So packing, buckets,
    microbatches and devices do not change the average. With privacy, all rows count the same,
    because privacy is per row.
    """
    model = build_network(config)

    def losses(
        params: Any, state: Any, batch: Batch, key: Array | None, **terms: float
    ) -> tuple[Array, Any]:
        lengths, learned, how = batch.get("length"), batch.get("loss_mask"), dict[str, Any](terms)
        if "segment" in batch:
            how["segments"] = batch["segment"][:, :-1]
            lengths = (how["segments"] > 0).sum(1)
        length = batch["tokens"].shape[1] - 1
        if learned is None and lengths is not None:
            learned = jnp.arange(length)[None] < lengths[:, None]
        inputs = model, params, state, batch["tokens"], lengths, learned, key
        per_token, state = token_losses(*inputs, **how)
        count = length if learned is None else jnp.maximum(learned.sum(1), 1)
        return per_token.sum(1) / count, state

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        optim = config.optim
        terms = {"smoothing": optim.label_smoothing, "balance": optim.expert_balance}
        per_row, state = losses(params, state, batch, key, **terms)
        return per_row, fnet.Aux(state, {})

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        per_row, _ = losses(params, state, batch, None)
        return BatchMetrics({"loss": per_row})

    return Task(dataset, model, loss, measure)


KIND = Kind(
    "text",
    build,
    lambda config, names: build_network(config),
    generates="text",
    options=("choices", "chat"),
    loss_options=("label_smoothing", "expert_balance"),
)
