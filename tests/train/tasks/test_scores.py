"""Scores of all test examples equal those of scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics

from train.data import Dataset, Scaling
from train.tasks import scores
from train.tasks.targets import Labels, Numbers, OneClass, label_scores, number_scores


def dataset(**others):
    return Dataset({}, {}, ("a", "b", "c"), lambda rows, generator: rows)._replace(**others)


@pytest.fixture
def generator():
    return np.random.default_rng(0)


@pytest.mark.parametrize("kind", [OneClass, Labels, Numbers])
def test_outputs_of_bfloat16_logits_are_float32(kind):
    logits = jnp.asarray([[0.1, 2.0, -3.0]], jnp.bfloat16)
    np.testing.assert_array_equal(kind.outputs(logits), kind.outputs(logits.astype(jnp.float32)))


def test_precision_recall_and_f1(generator):
    label, predicted = generator.integers(0, 3, (2, 50))
    label[0] = predicted[0] = 3  # of a class with one example
    confusion = metrics.confusion_matrix(label, predicted)
    expected = metrics.precision_recall_fscore_support(label, predicted)[:3]
    for values, theirs in zip(scores.by_class(confusion).values(), expected, strict=True):
        np.testing.assert_allclose(values, theirs)


def test_a_class_that_is_never_predicted_has_precision_0_and_one_that_is_not_there_none():
    by_class = scores.by_class(np.array([[2, 0, 1], [3, 0, 0], [0, 0, 0]]))
    assert (by_class["precision"][1], by_class["f1"][1]) == (0, 0)
    assert (by_class["precision"][2], by_class["f1"][2]) == (0, 0)  # it was predicted
    assert np.isnan(by_class["recall"][2])
    by_class = scores.by_class(np.array([[2, 1, 0], [3, 0, 0], [0, 0, 0]]))
    assert np.isnan([values[2] for values in by_class.values()]).all()


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true", "ignore:A single label")
def test_scores_of_few_examples_are_those_of_scikit_learn():
    """Classes, labels and differences of numbers are often missing among five examples."""
    undefined = 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        n, k = int(generator.integers(1, 6)), int(generator.integers(2, 5))
        label = generator.integers(0, k, n)
        outputs = generator.random((n, k)).round(1) + 1e-3
        outputs /= outputs.sum(1, keepdims=True)
        predicted = outputs.argmax(1)
        confusion = metrics.confusion_matrix(label, predicted, labels=range(k))
        examples = {
            "outputs": outputs,
            "prediction": predicted,
            "probability": outputs.max(1).astype(np.float32),
        }
        found = OneClass(dataset()).scores(examples, label, confusion)
        assert found["macro_recall"] == pytest.approx(
            metrics.balanced_accuracy_score(label, predicted)
        )
        kind = {"average": "macro", "zero_division": 0}
        assert found["macro_f1"] == pytest.approx(metrics.f1_score(label, predicted, **kind))
        precision = metrics.precision_score(label, predicted, **kind)
        assert found["macro_precision"] == pytest.approx(precision)
        expected = [metrics.roc_auc_score(label == i, outputs[:, i]) for i in range(k)]
        one_hot = np.eye(k)[label]
        by_label = label_scores(outputs, one_hot)
        np.testing.assert_allclose(by_label["auc"], expected)
        if np.isnan(expected).all():
            undefined += 1
            assert np.isnan(found["auc"])
        else:
            assert found["auc"] == pytest.approx(np.nanmean(expected))
        iou = metrics.jaccard_score(label, predicted, average="macro", zero_division=0)
        assert scores.pixel_scores(confusion)["mean_iou"] == pytest.approx(iou)
        numbers = generator.integers(0, 2, (n, 1)).astype(float)
        r2 = number_scores(outputs[:, :1], numbers)["r2"][0]
        if np.ptp(numbers):
            assert r2 == pytest.approx(metrics.r2_score(numbers, outputs[:, :1]))
        else:
            assert np.isnan(r2)
    assert undefined > 5


def test_auc_with_ties(generator):
    outputs, label = generator.random((60, 3)).round(1), generator.integers(0, 3, 60)
    outputs /= outputs.sum(1, keepdims=True)
    expected = metrics.roc_auc_score(label, outputs, multi_class="ovr")
    is_class = label[:, None] == np.arange(3)
    assert scores.mean(scores.auc(outputs, is_class)) == pytest.approx(expected)
    outputs[5, 1] = np.nan
    assert [*np.isnan(scores.auc(outputs, is_class))] == [False, True, False]
    assert np.isnan(scores.auc(outputs, np.ones((60, 3), bool))).all()


@pytest.mark.parametrize("n", [0, 1, 30, 31])
def test_calibration_error_is_a_sum_over_bins(n, generator):
    """The last of 15 bins includes 1."""
    for _ in range(10):
        probability = (generator.permutation(31)[:n] / 30 + 1e-3).clip(0, 1)
        right = generator.random(n) < 0.5
        expected = 0.0
        for k in range(15):
            inside = (k / 15 <= probability) & ((probability < (k + 1) / 15) | (k == 14))
            if inside.any():
                expected += inside.sum() * abs(right[inside].mean() - probability[inside].mean())
        assert scores.calibration_error(probability, right) == pytest.approx(expected / max(n, 1))
    probability[:1] = np.nan
    assert np.isnan(scores.calibration_error(probability, right)) == (n > 0)


def test_scores_of_labels_and_numbers(generator):
    outputs, label = generator.random((40, 3)), generator.integers(0, 2, (40, 3))
    by_label = label_scores(outputs, label)
    expected = metrics.precision_recall_fscore_support(label, outputs > 0.5)[:3]
    for name, theirs in zip(("precision", "recall", "f1"), expected, strict=True):
        np.testing.assert_allclose(by_label[name], theirs)
    for i in range(3):
        theirs = metrics.roc_auc_score(label[:, i], outputs[:, i])
        assert by_label["auc"][i] == pytest.approx(theirs)
    numbers = 3 * label + outputs
    by_number = number_scores(outputs, numbers)
    kind = {"multioutput": "raw_values"}
    expected = {
        "mae": metrics.mean_absolute_error(numbers, outputs, **kind),
        "rmse": metrics.root_mean_squared_error(numbers, outputs, **kind),
        "r2": metrics.r2_score(numbers, outputs, **kind),
    }
    for name, theirs in expected.items():
        np.testing.assert_allclose(by_number[name], theirs)


@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 4.0)])
@pytest.mark.parametrize("focal", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_losses_are_their_formulas(smoothing, focal, weights, generator):
    logits, label = 2 * generator.normal(size=(5, 3)), np.array([0, 1, 2, 0, 1])
    data, w = dataset(class_weights=weights), np.array(weights or (1, 1, 1))
    p, one_hot = np.exp(logits) / np.exp(logits).sum(1, keepdims=True), np.eye(3)[label]
    entropy = -(((1 - smoothing) * one_hot + smoothing / 3) * np.log(p)).sum(1)
    expected = w[label] * (1 - p[range(5), label]) ** focal * entropy
    found = jax.jit(lambda z: OneClass(data).losses(z, label, smoothing, focal))(logits)
    np.testing.assert_allclose(found, expected, rtol=1e-4)

    target, q = generator.integers(0, 2, (5, 3)), 1 / (1 + np.exp(-logits))
    smooth = (1 - smoothing) * target + smoothing / 2
    entropy = -(smooth * np.log(q) + (1 - smooth) * np.log(1 - q))
    factor = np.where(target, w * (1 - q) ** focal, q**focal)
    found = jax.jit(lambda z: Labels(data).losses(z, np.float32(target), smoothing, focal))(logits)
    np.testing.assert_allclose(found, (factor * entropy).mean(1), rtol=1e-4)


def test_metrics_of_a_batch_are_of_plain_losses_and_predictions(generator):
    data = dataset(class_weights=(1.0, 2.0, 4.0), classes=tuple("abcdefg"))
    logits = generator.normal(size=(6, 7)).astype(np.float32)
    order = np.argsort(-logits, 1)
    label = order[range(6), [0, 1, 4, 5, 6, 0]]  # rank of the label among the logits
    found = OneClass(data).measure(logits, label)
    np.testing.assert_array_equal(found.metrics["accuracy"], [1, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(found.metrics["top5"], [1, 1, 1, 0, 0, 1])
    probabilities = np.asarray(jax.nn.softmax(logits))
    losses = -np.log(probabilities[range(6), label])
    np.testing.assert_allclose(found.metrics["loss"], losses, rtol=1e-5)
    np.testing.assert_array_equal(found.confusion[1], order[:, 0])
    np.testing.assert_allclose(found.probability, probabilities.max(1), rtol=1e-5)
    assert "top5" not in OneClass(dataset()).measure(logits[:, :5], label % 5).metrics

    target = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1]], np.float32)
    logits = np.array([[1, -1, 2], [-1, 3, -1], [-1, -1, -1]], np.float32)
    found = Labels(dataset(class_weights=(1.0, 2.0, 4.0))).measure(logits, target)
    np.testing.assert_array_equal(found.metrics["exact"], [1, 0, 0])
    np.testing.assert_allclose(found.metrics["label_accuracy"], [1, 2 / 3, 0], rtol=1e-6)
    wrong = np.where(target > 0, -logits, logits)
    np.testing.assert_allclose(found.metrics["loss"], np.log1p(np.exp(wrong)).mean(1), rtol=1e-5)


def test_what_outputs_and_targets_say_in_a_table():
    names, output = ("a", "b", "c"), np.array([0.125, 0.75, 0.5])
    assert OneClass.row(names, output) == {"prediction": "b", "probability": 0.75}
    assert OneClass.best(names, output, 2) == {
        "labels": [{"label": "b", "probability": 0.75}, {"label": "c", "probability": 0.5}]
    }
    assert OneClass(dataset()).describe(2) == {"label": "c"}
    assert Labels(dataset()).describe(np.array([1, 0, 1])) == {"label": "a; c"}
    assert Labels.row(names, output + np.eye(3)[0] / 2) == {
        "prediction": "a; b",  # a probability of 1/2 is none
        "probability of a": 0.625, "probability of b": 0.75, "probability of c": 0.5,
    }  # fmt: skip
    described = Numbers(dataset()).describe(output)
    assert described == {"label a": 0.125, "label b": 0.75, "label c": 0.5}
    assert Numbers.row(names[:1], output[:1]) == {"predicted a": 0.125}
    assert Numbers.best(names, output, 1) == {"numbers": {"a": 0.125, "b": 0.75, "c": 0.5}}


@pytest.mark.parametrize("kind", [OneClass, Labels])
def test_focal_losses_of_certain_predictions_have_finite_gradients(kind):
    target = np.array([0]) if kind is OneClass else np.array([[1.0, 0.0, 0.0]])
    logits = jnp.array([[80.0, -80.0, -80.0]])
    gradient = jax.grad(lambda z: kind(dataset()).losses(z, target, 0.0, 0.5).sum())(logits)
    assert np.isfinite(gradient).all()


def test_numbers_have_squared_errors_of_standardized_values(generator):
    data = dataset(classes=("x", "y"), scaling=Scaling((10.0, 0.0), (5.0, 0.1)))
    numbers, logits = Numbers(data), np.zeros((2, 2))
    target = data.standardized({"label": np.array([[15.0, 0.0], [10.0, 0.2]])})["label"]
    np.testing.assert_allclose(numbers.losses(logits, target, 0, 0), [0.5, 2.0], rtol=1e-5)
    outputs = np.asarray(numbers.measure(logits, target).examples["outputs"])
    np.testing.assert_allclose(data.scaling.restore(outputs), [[10, 0], [10, 0]])


def test_certain_errors_come_first_and_certain_hits_last():
    examples = {"prediction": np.arange(4) % 2, "probability": np.array([0.6, 0.9, 0.7, 0.8])}
    wrong, key = OneClass(dataset()).worst(examples, np.array([1, 1, 1, 1]))
    assert wrong.tolist() == [True, False, True, False]
    assert np.argsort(key).tolist() == [2, 0, 3, 1]
    # Several labels: a wrong one is an error; among them, and among hits, by the loss.
    examples = {"outputs": np.array([[0.9, 0.4], [0.6, 0.6], [0.2, 0.7]]), "loss": np.arange(3.0)}
    wrong, key = Labels(dataset()).worst(examples, np.array([[1, 0], [1, 0], [0, 0]]))
    assert wrong.tolist() == [False, True, True]
    assert np.argsort(key).tolist() == [2, 1, 0]
    wrong, key = Numbers(dataset()).worst({"loss": np.array([0.0, 2.0, 1.0])}, np.zeros((3, 1)))
    assert wrong.tolist() == [False, True, True]
    assert np.argsort(key).tolist() == [1, 2, 0]
