"""Targets of classifiers of images: one class, several labels at once, or numbers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fnet import losses
from fnet.precision import upcast
from train.data import Arrays, Dataset
from train.tasks import scores
from train.tasks.task import BatchMetrics

_TOP_K = 5


class OneClass(NamedTuple):
    """One class per image: softmax and cross-entropy."""

    dataset: Dataset

    def losses(self, logits: Array, target: Array, smoothing: float, focal: float) -> Array:
        """Return the cross-entropy, perhaps focal (Lin et al. 2017) and weighted by class."""
        loss = losses.cross_entropy(logits, target, smoothing=smoothing)
        if focal:
            probability = jnp.exp(-losses.cross_entropy(logits, target))
            loss *= jnp.maximum(1 - probability, 1e-6) ** focal  # whose slope at 0 may be infinite
        weights = self.dataset.class_weights
        return loss if weights is None else loss * jnp.array(weights, np.float32)[target]

    def accuracy(self, logits: Array, target: Array) -> dict[str, Array]:
        """Return whether the most probable class is right."""
        return {"accuracy": losses.accuracy(logits, target)}

    @staticmethod
    def outputs(logits: Array) -> Array:
        """Return probabilities."""
        return jax.nn.softmax(upcast(logits))

    def measure(self, logits: Array, target: Array) -> BatchMetrics:
        """Return the metrics of a test batch."""
        metrics = {"loss": losses.cross_entropy(logits, target)} | self.accuracy(logits, target)
        if logits.shape[-1] > _TOP_K:
            top = jax.lax.top_k(logits, _TOP_K)[1]
            metrics[f"top{_TOP_K}"] = (top == target[:, None]).any(-1).astype(jnp.float32)
        outputs = self.outputs(logits)
        examples = {"outputs": outputs}
        return BatchMetrics(metrics, (target, logits.argmax(-1)), outputs.max(-1), examples)

    def scores(self, examples: Arrays, target: np.ndarray, confusion: Any) -> dict[str, float]:
        """Return means over classes, and the calibration error."""
        by_class = scores.by_class(confusion)
        result = {f"macro_{name}": scores.mean(values) for name, values in by_class.items()}
        right = examples["prediction"] == target
        result["calibration_error"] = scores.calibration_error(examples["probability"], right)
        if "outputs" in examples:
            is_class = target[:, None] == np.arange(len(confusion))
            result["auc"] = scores.mean(scores.auc(examples["outputs"], is_class))
        return result


class Labels(NamedTuple):
    """Any number of labels per image: a sigmoid and a binary cross-entropy for each."""

    dataset: Dataset

    def losses(self, logits: Array, target: Array, smoothing: float, focal: float) -> Array:
        """Return the mean over labels, perhaps focal, with rare labels perhaps weighing more."""
        logits = upcast(logits)
        smooth = target * (1 - smoothing) + smoothing / 2
        loss = optax.losses.sigmoid_binary_cross_entropy(logits, smooth)
        if focal:
            wrong = jax.nn.sigmoid(jnp.where(target > 0.5, -logits, logits))
            loss *= jnp.maximum(wrong, 1e-6) ** focal
        weights = self.dataset.class_weights
        if weights is not None:
            loss *= jnp.where(target > 0.5, np.array([weights], np.float32), 1.0)
        return loss.mean(-1)

    def accuracy(self, logits: Array, target: Array) -> dict[str, Array]:
        """Return the share of labels that are right."""
        return {"label_accuracy": ((logits > 0) == (target > 0.5)).mean(-1, dtype=jnp.float32)}

    @staticmethod
    def outputs(logits: Array) -> Array:
        """Return the probability of each label."""
        return jax.nn.sigmoid(upcast(logits))

    def measure(self, logits: Array, target: Array) -> BatchMetrics:
        """Return the metrics of a test batch."""
        plain = Labels(self.dataset._replace(class_weights=None))
        metrics = {"loss": plain.losses(logits, target, 0.0, 0.0)}
        right = (logits > 0) == (target > 0.5)
        metrics |= self.accuracy(logits, target) | {"exact": right.all(-1).astype(jnp.float32)}
        return BatchMetrics(metrics, examples={"outputs": self.outputs(logits)})

    def scores(self, examples: Arrays, target: np.ndarray, confusion: Any) -> dict[str, float]:
        """Return means over labels."""
        by_label = label_scores(examples["outputs"], target)
        means = {name: scores.mean(values) for name, values in by_label.items()}
        return {n if n == "auc" else f"macro_{n}": mean for n, mean in means.items()}


def label_scores(outputs: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    """Return precision, recall, F1 and AUC of each label at a probability of 1/2, [labels]."""
    there, said = target > 0.5, outputs > 0.5
    both = (there & said).sum(0)
    by_label = scores.precision_recall_f1(both, said.sum(0), there.sum(0))
    return by_label | {"auc": scores.auc(outputs, there)}


class Numbers(NamedTuple):
    """One or several numbers per image: squared errors of standardized numbers."""

    dataset: Dataset

    def losses(self, logits: Array, target: Array, smoothing: float, focal: float) -> Array:
        """Return the mean squared error in standard deviations, over the numbers."""
        return ((upcast(logits) - target) ** 2).mean(-1)

    def accuracy(self, logits: Array, target: Array) -> dict[str, Array]:
        """Return nothing."""
        return {}

    @staticmethod
    def outputs(logits: Array) -> Array:
        """Return standardized numbers; `Scaling.restore` gives the table's."""
        return upcast(logits)

    def measure(self, logits: Array, target: Array) -> BatchMetrics:
        """Return the metrics of a test batch."""
        loss = self.losses(logits, target, 0.0, 0.0)
        return BatchMetrics({"loss": loss}, examples={"outputs": self.outputs(logits)})

    def scores(self, examples: Arrays, target: np.ndarray, confusion: Any) -> dict[str, float]:
        """Return MAE, RMSE and R2, as means over the numbers and of each one."""
        by_number = number_scores(examples["outputs"], target)
        result = {name: scores.mean(values) for name, values in by_number.items()}
        names = self.dataset.classes
        if len(names) > 1:
            for name, values in by_number.items():
                result |= {f"{name} {n}": float(v) for n, v in zip(names, values, strict=True)}
        return result


def number_scores(outputs: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    """Return mean absolute error, root mean squared error and R2 of each number, [numbers].

    R2 is 1 - sum of squared errors / sum of squared distances from the mean; NaN if all numbers of
    the table are equal.
    """
    target = target.astype(np.float64)
    error = outputs - target
    spread = ((target - target.mean(0)) ** 2).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = np.where(spread > 0, 1 - (error**2).sum(0) / spread, np.nan)
    return {"mae": np.abs(error).mean(0), "rmse": np.sqrt((error**2).mean(0)), "r2": r2}


KINDS: dict[str, type[OneClass] | type[Labels] | type[Numbers]] = {
    "class": OneClass,
    "labels": Labels,
    "numbers": Numbers,
}
"""Targets by the name that a data source gives."""


def describe_output(kind: str, names: Sequence[str], output: np.ndarray) -> dict[str, Any]:
    """Return what is predicted for an image from its outputs [K], for a row of a table."""
    if kind == "numbers":
        values = zip(names, output.tolist(), strict=True)
        return {f"predicted {name}": value for name, value in values}
    if kind == "class":
        best = int(output.argmax())
        return {"prediction": names[best], "probability": float(output[best])}
    found = "; ".join(name for name, p in zip(names, output, strict=True) if p > 0.5)
    values = zip(names, output.tolist(), strict=True)
    return {"prediction": found} | {f"probability of {name}": p for name, p in values}


def describe_target(kind: str, names: Sequence[str], target: Any) -> dict[str, Any]:
    """Return the target of an image, for a row of a table."""
    if kind == "numbers":
        return {f"label {n}": value for n, value in zip(names, target.tolist(), strict=True)}
    if kind == "class":
        return {"label": names[target]}
    return {"label": "; ".join(name for name, t in zip(names, target, strict=True) if t > 0.5)}
