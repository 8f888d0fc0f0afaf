"""Direct preference optimization: a preferred answer becomes likelier than another one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from train.config import Config
from train.data import Arrays, Dataset
from train.data.batch import Batch
from train.data.buckets import bucket_lengths, truncate
from train.tasks import language
from train.tasks.task import BatchMetrics, Kind, Task


def build(config: Config, dataset: Dataset) -> Task:
    """Build the DPO task of a published model (Rafailov et al. 2023).

    With the log-likelihoods of the preferred answer w and of the other one l::

        loss = -log sigmoid(beta ((log p_w - reference_w) - (log p_l - reference_l)))

    The reference is the model that the run begins with. Its log-likelihoods are computed once.

    Raises:
      ValueError: if the network is invalid.
    """
    model, beta = language.build_network(config), config.data.beta
    context = language.text_source(config).context

    def rewards(params: Any, state: Any, batch: Batch, key: Array | None) -> tuple[Array, Any]:
        found, state = _log_likelihoods(model, params, state, batch, key)
        return beta * (found - batch["reference"]), state

    def measures(reward: Array, smoothing: float) -> tuple[Array, dict[str, Array]]:
        margin = reward[:, 0] - reward[:, 1]
        losses = -(1 - smoothing) * jax.nn.log_sigmoid(margin)
        losses -= smoothing * jax.nn.log_sigmoid(-margin)
        return losses, {"accuracy": (margin > 0).astype(jnp.float32), "margin": margin}

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        reward, state = rewards(params, state, batch, key)
        losses, metrics = measures(reward, config.optim.label_smoothing)
        return losses, fnet.Aux(state, metrics)

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        losses, metrics = measures(rewards(params, state, batch, None)[0], 0.0)
        return BatchMetrics({"loss": losses, **metrics})

    def fill_reference() -> None:
        shapes = model.pretrained(*jax.eval_shape(model.init, jax.random.key(0)))
        place = jax.jit(model.place, donate_argnums=1)
        params, state = place(jax.random.key(0), model.read(shapes))
        run = jax.jit(lambda batch: _log_likelihoods(model, params, state, batch, None)[0])
        for rows, batch_of in (
            (dataset.train, lambda r: dataset.augment(r, np.random.default_rng(0))),
            (dataset.test, dataset.prepare),
        ):
            buckets = bucket_lengths(rows["length"].max(1), context)
            for i, bucket in enumerate(buckets.tolist()):
                batch = truncate(batch_of(_row(rows, i)), bucket)
                rows["reference"][i] = np.asarray(run(batch))[0]

    return Task(dataset, model, loss, measure, before_batches=fill_reference)


def _row(rows: Arrays, i: int) -> Arrays:
    return {name: a[i : i + 1] for name, a in rows.items()}


def _log_likelihoods(
    model: Any, params: Any, state: Any, batch: Batch, key: Array | None
) -> tuple[Array, Any]:
    """Sum the log-likelihoods of the learned tokens of each answer, [N, 2]."""
    tokens = batch["tokens"].astype(jnp.int32)
    rows = {n: batch[n].reshape(-1, *batch[n].shape[2:]) for n in ("length", "loss_mask")}
    tokens = tokens.reshape(-1, tokens.shape[-1])
    losses, state = model.losses(
        params,
        state,
        tokens[:, :-1],
        tokens[:, 1:],
        key=key,
        train=key is not None,
        lengths=rows["length"],
        loss_mask=rows["loss_mask"],
    )
    return -losses.sum(1).reshape(-1, 2), state


KIND = Kind("preferences", build, generates="text")
