"""One label an image: data, network, loss and metrics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import fnet
from fnet import losses
from train.config import Config, LanguageModel
from train.data import batch_of
from train.tasks import images
from train.tasks.task import Batch, Measured, Task

_TOP = 5
"""So many of the likeliest labels are looked at, where there are more."""


def build(config: Config) -> Task:
    """The classification task of a config.

    Raises:
      UserError: if the config names no images.
      ValueError: if the network cannot be built.
    """
    assert not isinstance(config.model, LanguageModel)  # that is another task
    dataset = images.load(config)
    shape = batch_of(dataset, 1)["image"].shape[1:]
    model = config.model.build(shape, len(dataset.classes))

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        image = images.normalized(config, batch["image"])
        logits, state = model.apply(params, state, image, key=key, train=True)

        def mixed(of: Callable[[Array], Array]) -> Array:
            """By the first label and, in images that are mixed of two, by the other one."""
            if "mix" not in batch:
                return of(batch["label"])
            mix = batch["mix"]
            return mix * of(batch["label"]) + (1 - mix) * of(batch["label_2"])

        with jax.named_scope("loss"):
            smoothing = config.optim.label_smoothing
            per_example = mixed(
                lambda label: losses.cross_entropy(logits, label, smoothing=smoothing)
            )
        accuracy = mixed(lambda label: losses.accuracy(logits, label))
        return per_example, fnet.Aux(state, {"accuracy": accuracy})

    logits_of = logits_by_crop(config, model)

    def measure(params: Any, state: Any, batch: Batch) -> Measured:
        logits, label = logits_of(params, state, batch["image"]), batch["label"]
        metrics = {
            "loss": losses.cross_entropy(logits, label),
            "accuracy": losses.accuracy(logits, label),
        }
        if logits.shape[-1] > _TOP:
            likeliest = jax.lax.top_k(logits, _TOP)[1]
            metrics[f"top{_TOP}"] = (likeliest == label[:, None]).any(-1).astype(jnp.float32)
        probability = jax.nn.softmax(logits.astype(jnp.float32)).max(-1)
        return Measured(metrics, (label, logits.argmax(-1)), probability)

    return Task(dataset, model, loss, measure)


def logits_by_crop(config: Config, model: Any) -> Callable[[Any, Any, Array], Array]:
    """``(params, state, image) -> logits [N, classes]``, in evaluation.

    Images are [N, H, W, C]; or [N, crops, H, W, C], of which logits are averaged, as
    mapillary/inplace_abn tests its networks.
    """

    def logits_of(params: Any, state: Any, image: Array) -> Array:
        crops = image.shape[1:-3]
        image = images.normalized(config, image.reshape(-1, *image.shape[-3:]))
        logits, _ = model.apply(params, state, image, train=False)
        several = logits.reshape(-1, *crops, logits.shape[-1])
        return several.mean(tuple(range(1, 1 + len(crops))))

    return logits_of
