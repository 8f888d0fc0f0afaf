"""Direct preference optimization: a preferred answer becomes likelier than another one."""

import hashlib
import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from train.config import Config
from train.data import Dataset
from train.data.batch import Batch
from train.data.buckets import bucket_lengths, truncate
from train.data.storage import atomic_write
from train.errors import writing
from train.tasks import language
from train.tasks.task import BatchMetrics, Kind, Task


def build(config: Config, dataset: Dataset) -> Task:
    """Build the DPO task of a published model (Rafailov et al. 2023).

    With the log-likelihoods of the preferred answer w and of the other one l::

        loss = -log sigmoid(beta ((log p_w - reference_w) - (log p_l - reference_l)))

    The reference is the model that the run begins with. Its log-likelihoods are computed once, in
    batches of the run's size, and a resumed run reads them in its folder.

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

    splits = (
        (dataset.train, lambda rows: dataset.augment(rows, np.random.default_rng(0))),
        (dataset.test, dataset.prepare),
    )

    def compute_reference() -> None:
        shapes = model.pretrained(*jax.eval_shape(model.init, jax.random.key(0)))
        place = jax.jit(model.place, donate_argnums=1)
        params, state = place(jax.random.key(0), model.read(shapes))
        run = jax.jit(lambda batch: _log_likelihoods(model, params, state, batch, None)[0])
        for rows, batch_of in splits:
            buckets = bucket_lengths(rows["length"].max(1), context)
            for bucket in np.unique(buckets).tolist():
                own = np.flatnonzero(buckets == bucket)
                for first in range(0, len(own), config.data.batch_size):
                    index = own[first : first + config.data.batch_size]
                    # All batches have one size, so that a bucket has one program.
                    padded = np.resize(index, config.data.batch_size)
                    batch = batch_of({name: a[padded] for name, a in rows.items()})
                    found = np.asarray(run(truncate(batch, bucket)))
                    rows["reference"][index] = found[: len(index)]

    def fill_reference(folder: Path | None) -> None:
        known = folder / "reference.npz" if folder else None
        identity = _identity(config, dataset)
        if known and known.is_file():
            with np.load(known) as file:
                if str(file["identity"]) == identity:
                    for (rows, _), name in zip(splits, _SPLITS, strict=True):
                        rows["reference"][:] = file[name]
                    return
        compute_reference()
        if known and not known.exists() and jax.process_index() == 0:
            train, test = (rows["reference"] for rows, _ in splits)
            with writing(known), io.BytesIO() as content:
                np.savez(content, identity=identity, train=train, test=test)
                atomic_write(known, lambda file: file.write(content.getvalue()))

    return Task(dataset, model, loss, measure, before_batches=fill_reference)


_SPLITS = ("train", "test")


def _identity(config: Config, dataset: Dataset) -> str:
    """Return a checksum of what the log-likelihoods of the reference depend on."""
    path = getattr(config.model, "path", "")
    weights = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(Path(path).glob("*.safetensors"))
    ]
    given = config.model, config.train.precision, weights
    found = hashlib.sha256(repr(given).encode())
    for a in dataset.contents:
        found.update(np.ascontiguousarray(a).tobytes())
    return found.hexdigest()


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
