"""Language modeling, which predicts each token from those before it: data, network and loss."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from train.config import ChatFile, Config, LanguageModel, Pretrained, TextFile
from train.data import Dataset, chat_file, text_file
from train.data.chat import ChatTemplate, load_template
from train.data.model_folder import check_tokenizer
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.errors import UserError
from train.tasks import pretrained
from train.tasks.pretrained import PretrainedNetwork
from train.tasks.task import Batch, BatchMetrics, Task


def text_source(config: Config) -> TextFile | ChatFile:
    """Return the data section of a language model, by default with a published model's tokenizer.

    Raises:
      UserError: if the data source has no text.
    """
    data, model = config.data, config.model
    if not isinstance(data, TextFile | ChatFile):
        raise UserError(
            f"data.source: {data.source} has no text, which the network {model.name} needs; "
            "give data.source text_file or chat_file"
        )
    if not isinstance(model, Pretrained) or data.tokenizer is not None:
        return data
    tokenizer = Path(model.path) / "tokenizer.json"
    if tokenizer.is_file():
        return dataclasses.replace(data, tokenizer=str(tokenizer))
    if data.vocabulary is None:
        check_tokenizer(Path(model.path))
    return data


def chat_template(data: TextFile | ChatFile, tokenizer: Tokenizer) -> ChatTemplate:
    """Load the chat template of the data, by default the tokenizer's.

    Raises:
      UserError: if there is none, or it is unreadable.
    """
    path = data.chat_template if isinstance(data, ChatFile) else None
    return load_template(tokenizer.folder, Path(path) if path else None)


def build_network(config: Config) -> fnet.models.LanguageModel | PretrainedNetwork:
    """Build the network without reading the text.

    Raises:
      UserError: if the data source has no text, or the network is not a language model.
      ValueError: if the network is invalid.
    """
    data, model = text_source(config), config.model
    if isinstance(model, Pretrained):
        network = pretrained.build_network(config)
        size = data.vocabulary or load_tokenizer(data).vocab_size
        if size > network.vocabulary:
            raise UserError(
                f"data.tokenizer: has {size:,} tokens, but the model has {network.vocabulary:,}; "
                "give the model's own tokenizer"
            )
        return network
    assert isinstance(model, LanguageModel)
    return model.build(data.vocabulary or load_tokenizer(data).vocab_size, config.train.precision)


def build(config: Config, dataset: Dataset | None = None) -> Task:
    """Build the language modeling task of a config, by default with the data it describes.

    The loss of a row is the mean over its targets. Batches without privacy weight each row by the
    number of its targets, so that all targets count the same. With privacy, all rows count the
    same, because privacy is per row.

    Raises:
      UserError: if the data are unreadable, or one row has several examples and privacy.
      ValueError: if the network is invalid.
    """
    model = build_network(config)
    config = dataclasses.replace(config, data=text_source(config))
    dataset = dataset or _load(config)
    if config.is_private and "slack" in dataset.train:
        # Shifted rows share tokens with their neighbors, but privacy is per row: removing a row
        # must remove its tokens.
        no_slack = np.zeros_like(dataset.train["slack"])
        dataset = dataset._replace(train=dataset.train | {"slack": no_slack})

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


def _load(config: Config) -> Dataset:
    """Load the data; with privacy, each example is in one row.

    Raises:
      UserError: if they are unreadable, or their options do not allow privacy per row.
    """
    data = config.data
    if not isinstance(data, ChatFile):
        assert isinstance(data, TextFile)
        return text_file.load(data)
    if config.is_private:
        if data.packing:
            raise UserError(
                "data.packing: puts several examples into a row, but privacy is per row; give "
                "data.packing False"
            )
        if data.user is None:
            if data.long == "cut":
                raise UserError(
                    "data.long: cut makes several rows of an example, but privacy is per row; "
                    "give truncate or drop, or privacy per user with data.user"
                )
            data = dataclasses.replace(data, long=data.long or "truncate")
    return chat_file.load(data)
