"""Targets of classifiers of images: one class, several labels at once, or numbers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

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


ByClass = tuple[np.ndarray, dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Targets:
    """Targets of a dataset: what networks learn, what outputs [K] mean, and how both are written.

    A kind has ``losses`` [N] of logits, smoothed and focal if asked for, perhaps weighted by class,
    and ``accuracy``, metrics of training. ``outputs`` are the probabilities or numbers of logits.
    ``measure`` returns metrics of a test batch, and ``scores`` those of all test examples, from
    arrays of an evaluation (`train.run.evaluation.Evaluation`). ``worst`` returns which of these
    are wrong, and a key that sorts the worst to the front. ``describe`` returns the target of an
    example, and ``row`` the prediction of outputs, both for a row of a table.
    """

    dataset: Dataset
    has_errors: ClassVar[bool] = True
    """Whether a prediction is right or wrong, not just near."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return self.dataset.classes

    @staticmethod
    def row(names: Sequence[str], output: np.ndarray) -> dict[str, Any]:
        raise NotImplementedError

    def predicted(self, examples: Arrays, i: int) -> dict[str, Any]:
        """Return the prediction of a test example, as ``row``."""
        return self.row(self.names, examples["outputs"][i])

    @staticmethod
    def best(names: Sequence[str], output: np.ndarray, most: int) -> dict[str, Any]:
        """Return what outputs predict, as JSON: the most probable labels first."""
        chosen = np.argsort(-output, kind="stable")[:most]
        return {"labels": [{"label": names[i], "probability": float(output[i])} for i in chosen]}

    def by_class(self, examples: Arrays, target: np.ndarray, confusion: Any) -> ByClass | None:
        """Return the number of examples and the scores of each class or label; None without any."""
        return None


class OneClass(Targets):
    """One class per image: softmax and cross-entropy."""

    def losses(self, logits: Array, target: Array, smoothing: float, focal: float) -> Array:
        loss = losses.cross_entropy(logits, target, smoothing=smoothing)
        if focal:
            probability = jnp.exp(-losses.cross_entropy(logits, target))
            loss *= jnp.maximum(1 - probability, 1e-6) ** focal  # whose slope at 0 may be infinite
        weights = self.dataset.class_weights
        return loss if weights is None else loss * jnp.array(weights, np.float32)[target]

    def accuracy(self, logits: Array, target: Array) -> dict[str, Array]:
        return {"accuracy": losses.accuracy(logits, target)}

    @staticmethod
    def outputs(logits: Array) -> Array:
        return jax.nn.softmax(upcast(logits))

    def measure(self, logits: Array, target: Array) -> BatchMetrics:
        metrics = {"loss": losses.cross_entropy(logits, target)} | self.accuracy(logits, target)
        if logits.shape[-1] > _TOP_K:
            top = jax.lax.top_k(logits, _TOP_K)[1]
            metrics[f"top{_TOP_K}"] = (top == target[:, None]).any(-1).astype(jnp.float32)
        outputs = self.outputs(logits)
        examples = {"outputs": outputs}
        return BatchMetrics(metrics, (target, logits.argmax(-1)), outputs.max(-1), examples)

    def describe(self, target: Any) -> dict[str, Any]:
        return {"label": self.names[target]}

    @staticmethod
    def row(names: Sequence[str], output: np.ndarray) -> dict[str, Any]:
        best = int(output.argmax())
        return {"prediction": names[best], "probability": float(output[best])}

    def predicted(self, examples: Arrays, i: int) -> dict[str, Any]:
        label, probability = examples["prediction"][i], examples["probability"][i]
        return {"prediction": self.names[label], "probability": float(probability)}

    def worst(self, examples: Arrays, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wrong, certain = examples["prediction"] != target, examples["probability"]
        return wrong, np.where(wrong, -certain, 1 + certain)

    def by_class(self, examples: Arrays, target: np.ndarray, confusion: Any) -> ByClass | None:
        if confusion is None:
            return None
        values = {"accuracy": scores.accuracy_by_class(confusion)} | scores.by_class(confusion)
        if "outputs" in examples:
            is_class = target[:, None] == np.arange(len(confusion))
            values["auc"] = scores.auc(examples["outputs"], is_class)
        return confusion.sum(1), values

    def scores(self, examples: Arrays, target: np.ndarray, confusion: Any) -> dict[str, float]:
        by_class = scores.by_class(confusion)
        result = {f"macro_{name}": scores.mean(values) for name, values in by_class.items()}
        right = examples["prediction"] == target
        result["calibration_error"] = scores.calibration_error(examples["probability"], right)
        if "outputs" in examples:
            is_class = target[:, None] == np.arange(len(confusion))
            result["auc"] = scores.mean(scores.auc(examples["outputs"], is_class))
        return result


class Labels(Targets):
    """Any number of labels per image: a sigmoid and a binary cross-entropy for each."""

    def losses(self, logits: Array, target: Array, smoothing: float, focal: float) -> Array:
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
        return {"label_accuracy": ((logits > 0) == (target > 0.5)).mean(-1, dtype=jnp.float32)}

    @staticmethod
    def outputs(logits: Array) -> Array:
        return jax.nn.sigmoid(upcast(logits))

    def measure(self, logits: Array, target: Array) -> BatchMetrics:
        plain = Labels(self.dataset._replace(class_weights=None))
        metrics = {"loss": plain.losses(logits, target, 0.0, 0.0)}
        right = (logits > 0) == (target > 0.5)
        metrics |= self.accuracy(logits, target) | {"exact": right.all(-1).astype(jnp.float32)}
        return BatchMetrics(metrics, examples={"outputs": self.outputs(logits)})

    def describe(self, target: Any) -> dict[str, Any]:
        there = zip(self.names, target, strict=True)
        return {"label": "; ".join(name for name, share in there if share > 0.5)}

    @staticmethod
    def row(names: Sequence[str], output: np.ndarray) -> dict[str, Any]:
        values = [*zip(names, output.tolist(), strict=True)]
        found = "; ".join(name for name, p in values if p > 0.5)
        return {"prediction": found} | {f"probability of {name}": p for name, p in values}

    def worst(self, examples: Arrays, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wrong = ((examples["outputs"] > 0.5) != (target > 0.5)).any(-1)
        return wrong, -examples["loss"]

    def by_class(self, examples: Arrays, target: np.ndarray, confusion: Any) -> ByClass | None:
        return target.sum(0), label_scores(examples["outputs"], target)

    def scores(self, examples: Arrays, target: np.ndarray, confusion: Any) -> dict[str, float]:
        by_label = label_scores(examples["outputs"], target)
        means = {name: scores.mean(values) for name, values in by_label.items()}
        return {n if n == "auc" else f"macro_{n}": mean for n, mean in means.items()}


def label_scores(outputs: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    """Return precision, recall, F1 and AUC of each label at a probability of 1/2, [labels]."""
    there, said = target > 0.5, outputs > 0.5
    both = (there & said).sum(0)
    by_label = scores.precision_recall_f1(both, said.sum(0), there.sum(0))
    return by_label | {"auc": scores.auc(outputs, there)}


class Numbers(Targets):
    """One or several numbers per image: squared errors of standardized numbers."""

    has_errors = False

    def losses(self, logits: Array, target: Array, smoothing: float, focal: float) -> Array:
        return ((upcast(logits) - target) ** 2).mean(-1)

    def accuracy(self, logits: Array, target: Array) -> dict[str, Array]:
        return {}

    @staticmethod
    def outputs(logits: Array) -> Array:
        return upcast(logits)

    def measure(self, logits: Array, target: Array) -> BatchMetrics:
        loss = self.losses(logits, target, 0.0, 0.0)
        return BatchMetrics({"loss": loss}, examples={"outputs": self.outputs(logits)})

    def describe(self, target: Any) -> dict[str, Any]:
        values = zip(self.names, target.tolist(), strict=True)
        return {f"label {name}": value for name, value in values}

    @staticmethod
    def row(names: Sequence[str], output: np.ndarray) -> dict[str, Any]:
        values = zip(names, output.tolist(), strict=True)
        return {f"predicted {name}": value for name, value in values}

    @staticmethod
    def best(names: Sequence[str], output: np.ndarray, most: int) -> dict[str, Any]:
        return {"numbers": dict(zip(names, output.tolist(), strict=True))}

    def worst(self, examples: Arrays, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return examples["loss"] != 0, -examples["loss"]

    def scores(self, examples: Arrays, target: np.ndarray, confusion: Any) -> dict[str, float]:
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
