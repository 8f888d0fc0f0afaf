"""Preferences: a preferred answer becomes likelier (DPO, ORPO), or gets a larger reward."""

import functools
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
from train.networks.published.network import weights_code, with_head
from train.stored import read_arrays
from train.tasks import language
from train.tasks.task import BatchMetrics, Kind, Task


def build(config: Config, dataset: Dataset) -> Task:
    """Build the task of pairs of answers for a published model, DPO or ORPO.

    DPO (Rafailov et al. 2023), with the log-likelihoods of the preferred answer w and of the other
    one l::

        loss = -log sigmoid(beta ((log p_w - reference_w) - (log p_l - reference_l)))

    The reference is the model that the run begins with. Its log-likelihoods are computed once, in
    batches of the run's size, and a resumed run reads them in its folder.

    ORPO (Hong, Lee, Thorne 2024, "ORPO: Monolithic Preference Optimization without Reference
    Model"), with the mean log-likelihoods per token m, and nll of the preferred answer's whole row,
    prompt included, as TRL has it::

        loss = nll - beta log sigmoid(log odds(m_w) - log odds(m_l));   odds(m) = e^m / (1 - e^m)
    """
    model, beta = language.build_network(config), config.data.beta
    context = language.text_source(config).context

    def dpo(losses: Array, batch: Batch) -> tuple[Array, Array]:
        found = -(losses * batch["loss_mask"]).sum(2)
        rewards = beta * (found - batch["reference"])
        return rewards[:, 0] - rewards[:, 1], jnp.zeros(len(found))

    def orpo(losses: Array, batch: Batch) -> tuple[Array, Array]:
        mask = batch["loss_mask"]
        means = -(losses * mask).sum(2) / jnp.maximum(mask.sum(2), 1)
        log_odds = means - jnp.log1p(-jnp.exp(jnp.minimum(means, -1e-6)))
        return log_odds[:, 0] - log_odds[:, 1], losses[:, 0].sum(1) / batch["length"][:, 0]

    is_orpo = config.data.objective == "orpo"
    compare, scale = (orpo, beta) if is_orpo else (dpo, 1.0)

    def losses(
        params: Any, state: Any, batch: Batch, key: Array | None, smoothing: float
    ) -> tuple[Array, dict[str, Array], Any]:
        per_token, state = _losses(model, params, state, batch, key, learned_only=not is_orpo)
        margin, nll = compare(per_token, batch)
        sides, metrics = _sides(margin, smoothing)
        return nll + scale * sides, metrics, state

    if is_orpo:
        return _task(config, dataset, model, losses)

    splits: dict[str, Any] = {
        "train": (dataset.train, lambda rows: dataset.augmented(rows, np.random.default_rng(0))),
        "test": (dataset.test, dataset.prepare),
    }

    def compute_reference() -> None:
        shapes = model.pretrained(*jax.eval_shape(model.init, jax.random.key(0)))
        place = jax.jit(model.place, donate_argnums=1)
        params, state = place(jax.random.key(0), model.read(shapes))
        of = functools.partial(_losses, model, params, state, key=None, learned_only=True)
        run = jax.jit(lambda batch: -of(batch)[0].sum(2))  # of each answer, [N, 2]
        for rows, batch_of in splits.values():
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

    def fill_reference(known: Path | None) -> None:
        identity = _identity(config, dataset)
        saved = read_arrays(known) if known else {}
        if str(saved.get("identity")) == identity:
            for name, (rows, _) in splits.items():
                rows["reference"][:] = saved[name]
            return
        compute_reference()
        if known and not saved and jax.process_index() == 0:
            found = {name: rows["reference"] for name, (rows, _) in splits.items()}
            with writing(known), io.BytesIO() as content:
                np.savez(content, identity=identity, **found)
                atomic_write(known, lambda file: file.write(content.getvalue()))

    return _task(config, dataset, model, losses, before_batches=fill_reference)


def _identity(config: Config, dataset: Dataset) -> str:
    """Return a checksum of what the log-likelihoods of the reference depend on."""
    path = Path(getattr(config.model, "path", ""))
    given = config.model, config.train.precision, weights_code(path)
    found = hashlib.sha256(repr(given).encode())
    for a in dataset.contents:
        found.update(np.ascontiguousarray(a).tobytes())
    return found.hexdigest()


def _losses(
    model: Any, params: Any, state: Any, batch: Batch, key: Array | None, *, learned_only: bool
) -> tuple[Array, Any]:
    tokens, lengths, learned = (
        batch[n].reshape(-1, *batch[n].shape[2:]) for n in ("tokens", "length", "loss_mask")
    )
    mask = learned if learned_only else None
    losses, state = language.token_losses(model, params, state, tokens, lengths, mask, key)
    return losses.reshape(-1, 2, losses.shape[-1]), state


def build_reward(config: Config, dataset: Dataset) -> Task:
    """Build the task of a reward model, a language model with a head for one number.

    The reward r belongs to an answer's last token (Ouyang et al. 2022, "Training language models to
    follow instructions with human feedback")::

        loss = -log sigmoid(r_w - r_l)
    """
    model = with_head(language.build_network(config), 1)

    def losses(
        params: Any, state: Any, batch: Batch, key: Array | None, smoothing: float
    ) -> tuple[Array, dict[str, Array], Any]:
        tokens, lengths = batch["tokens"].astype(jnp.int32), batch["length"].reshape(-1) + 1
        tokens = tokens.reshape(-1, tokens.shape[-1])
        train = key is not None
        rewards, state = model.apply(params, state, tokens, key=key, train=train, lengths=lengths)
        rewards = rewards.astype(jnp.float32).reshape(-1, 2)
        return *_sides(rewards[:, 0] - rewards[:, 1], smoothing), state

    return _task(config, dataset, model, losses)


def _sides(margin: Array, smoothing: float) -> tuple[Array, dict[str, Array]]:
    losses = -(1 - smoothing) * jax.nn.log_sigmoid(margin)
    losses -= smoothing * jax.nn.log_sigmoid(-margin)
    return losses, {"accuracy": (margin > 0).astype(jnp.float32), "margin": margin}


def _task(config: Config, dataset: Dataset, model: Any, losses: Any, **fields: Any) -> Task:
    """Build a task; evaluation does not smooth.

    ``losses(params, state, batch, key, smoothing) -> (losses, metrics, state)``.
    """

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        smoothing = config.optim.label_smoothing
        per_pair, metrics, state = losses(params, state, batch, key, smoothing)
        return per_pair, fnet.Aux(state, metrics)

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        per_pair, metrics, _ = losses(params, state, batch, None, 0.0)
        return BatchMetrics({"loss": per_pair, **metrics})

    return Task(dataset, model, loss, measure, **fields)


KIND = language.KIND._replace(
    content="preferences", build=build, options=(), loss_options=("label_smoothing",)
)
REWARD = Kind(
    "preferences",
    build_reward,
    lambda config, names: with_head(language.build_network(config), 1),
    loss_options=("label_smoothing",),
)
