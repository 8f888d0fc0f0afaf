"""Image classification: data, network, loss and metrics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from fnet import losses
from train.config import Config
from train.data import Dataset
from train.data.batch import Batch
from train.tasks import images
from train.tasks.task import BatchMetrics, Kind, Task

_TOP_K = 5


def build(config: Config, dataset: Dataset) -> Task:
    """Build the classification task of a config.

    Raises:
      UserError: if files of a published model are missing or damaged.
      ValueError: if the network is invalid.
    """
    model = images.build_network(config, dataset)

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        image = images.normalize(config, batch["image"])
        logits, state = model.apply(params, state, image, key=key, train=True)

        def mix_labels(metric: Callable[[Array], Array]) -> Array:
            """Average a metric over both labels of images that mixup mixed."""
            if "mix" not in batch:
                return metric(batch["label"])
            mix = batch["mix"]
            return mix * metric(batch["label"]) + (1 - mix) * metric(batch["label_2"])

        with jax.named_scope("loss"):
            smoothing = config.optim.label_smoothing
            per_example = mix_labels(
                lambda label: losses.cross_entropy(logits, label, smoothing=smoothing)
            )
        accuracy = mix_labels(lambda label: losses.accuracy(logits, label))
        return per_example, fnet.Aux(state, {"accuracy": accuracy})

    apply = average_logits_over_crops(config, model)

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        logits, label = apply(params, state, batch["image"]), batch["label"]
        metrics = {
            "loss": losses.cross_entropy(logits, label),
            "accuracy": losses.accuracy(logits, label),
        }
        if logits.shape[-1] > _TOP_K:
            top = jax.lax.top_k(logits, _TOP_K)[1]
            metrics[f"top{_TOP_K}"] = (top == label[:, None]).any(-1).astype(jnp.float32)
        probability = jax.nn.softmax(logits.astype(jnp.float32)).max(-1)
        return BatchMetrics(metrics, (label, logits.argmax(-1)), probability)

    return Task(dataset, model, loss, measure)


def average_logits_over_crops(config: Config, model: Any) -> Callable[[Any, Any, Array], Array]:
    """Return ``(params, state, image) -> logits [N, classes]``, for evaluation.

    Images are [N, H, W, C], or [N, crops, H, W, C]. Logits are averaged over crops, as
    mapillary/inplace_abn tests its networks.
    """

    def apply(params: Any, state: Any, image: Array) -> Array:
        crops = image.shape[1:-3]
        image = images.normalize(config, image.reshape(-1, *image.shape[-3:]))
        logits, _ = model.apply(params, state, image, train=False)
        by_crop = logits.reshape(-1, *crops, logits.shape[-1])
        return by_crop.mean(tuple(range(1, 1 + len(crops))))

    return apply


def probabilities(config: Config, model: Any) -> Callable[[Any, Any, Array], Array]:
    """Return ``(params, state, image) -> probabilities [N, classes]``, for prediction."""
    mean_logits = average_logits_over_crops(config, model)
    return lambda *inputs: jax.nn.softmax(mean_logits(*inputs).astype(np.float32))


KIND = Kind(
    "images",
    build,
    predicts="labels",
    outputs=probabilities,
    data_options=("crops", "border", "image_size", "resize"),
)
