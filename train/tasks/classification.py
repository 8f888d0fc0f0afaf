"""Image classification: data, network, loss and metrics."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

import fnet
from train.config import Config
from train.data import Arrays, Dataset
from train.data.batch import Batch
from train.tasks import images
from train.tasks.targets import KINDS
from train.tasks.task import BatchMetrics, Kind, Task


def build(config: Config, dataset: Dataset) -> Task:
    """Build the classification task of a config."""
    model = images.build_network(config, dataset)
    targets = KINDS[config.data.targets](dataset)
    train_apply = images.training_apply(config, model)

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        image = images.normalize(config, batch["image"])
        logits, state = train_apply(params, state, image, key)

        def mix_labels(metric: Callable[[Array], Any]) -> Any:
            """Average a metric over both labels of images that mixup mixed."""
            if "mix" not in batch:
                return metric(batch["label"])
            mix = batch["mix"]
            both = metric(batch["label"]), metric(batch["label_2"])
            return jax.tree.map(lambda a, b: mix * a + (1 - mix) * b, *both)

        optim = config.optim
        with jax.named_scope("loss"):
            per_example = mix_labels(
                lambda label: targets.losses(logits, label, optim.label_smoothing, optim.focal)
            )
        return per_example, fnet.Aux(state, mix_labels(lambda y: targets.accuracy(logits, y)))

    apply = average_logits_over_crops(config, model)

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        return targets.measure(apply(params, state, batch["image"]), batch["label"])

    def scores(examples: Arrays, rows: Arrays, confusion: Any) -> dict[str, float]:
        return targets.scores(examples, rows["label"], confusion)

    return Task(dataset, model, loss, measure, scores)


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


def _outputs(config: Config, model: Any) -> Callable[[Any, Any, Array], Array]:
    mean_logits = average_logits_over_crops(config, model)
    outputs = KINDS[config.data.targets].outputs
    return lambda *inputs: outputs(mean_logits(*inputs))


KIND = Kind(
    "images",
    build,
    images.network_for,
    predicts="labels",
    outputs=_outputs,
    data_options=("crops", "border", "image_size", "resize"),
    loss_options=("label_smoothing", "focal"),
)
