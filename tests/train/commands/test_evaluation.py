"""``fnet eval``: metrics by class, crops and views of images, and pictures of examples."""

import io
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import vision_cases
from matplotlib.figure import Figure
from program_cases import assert_one_line_error, exit_code, fnet_command, output_of
from rich.console import Console

from train.config import Config, LanguageModel, Mlp, Synthetic, TextFile
from train.config.recipes import load
from train.data import evaluation_batches
from train.data.unreadable import UnreadableFiles
from train.errors import UserError
from train.output import plots
from train.output.palette import palette
from train.run import examples
from train.run.evaluation import Evaluation, Evaluator
from train.run.run_folder import RunFolder
from train.run.setup import setup
from train.tasks import BatchMetrics

small_deeplab = pytest.fixture(vision_cases.small_deeplab)
recipes = pytest.fixture(vision_cases.recipes)
saved = pytest.fixture(vision_cases.saved)
begun = pytest.fixture(vision_cases.begun)


MODEL = Mlp(hidden=(8,))


@pytest.mark.slow
def test_eval_prints_and_writes_the_accuracy_of_each_class(saved, recipes, capsys):
    run = saved("colours")
    config = run / "config.json"
    config.write_text(
        config.read_text().replace('"max_bad_fraction": 0.01', '"max_bad_fraction": 0.5')
    )
    (recipes / "colours" / "val" / "red" / "0.png").write_bytes(b"")
    output = output_of(capsys, "eval", run)
    assert "red/0.png: zero bytes" in output
    result = json.loads((run / "evaluation.json").read_text())
    assert (result["step"], result["unreadable_files"]) == (0, 1)
    assert [c["name"] for c in result["classes"]] == list(vision_cases.CLASSES)
    assert [c["examples"] for c in result["classes"]] == [5, 5, 4]
    right = sum(c["accuracy"] * c["examples"] for c in result["classes"])
    assert right / 14 == pytest.approx(result["metrics"]["test/accuracy"])
    for c in result["classes"]:
        assert f"accuracy of {c['name']}: {c['accuracy']:.4f} ({c['examples']} exa" in output
    for name in ("confusion.png", "examples.png"):
        assert (run / name).is_file()
        assert str(run / name) in output
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    size = ("--image-size", 10, "--resize", 14)
    fnet_command("eval", run, "--crops", 10, *size)
    folder = run / "evaluations" / "crops=10,image_size=10,resize=14"
    other = json.loads((folder / "evaluation.json").read_text())
    assert [v for v in other["options"].values() if v] == [10, 10, 14]
    assert other["metrics"]["test/loss"] != result["metrics"]["test/loss"]
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.slow
def test_eval_prints_and_writes_the_iou_of_each_class(saved, capsys):
    run = saved("halves")
    output = output_of(capsys, "eval", run)
    result = json.loads((run / "evaluation.json").read_text())
    assert result["metrics"].keys() == {
        f"test/{name}" for name in ("loss", "mean_iou", "pixel_accuracy", "class_accuracy")
    }
    ious = [c["iou"] for c in result["classes"]]
    assert np.mean(ious) == pytest.approx(result["metrics"]["test/mean_iou"])
    # The first row of each image and the padding are not counted.
    dataset = setup(RunFolder(run).read_config()).task.dataset
    batches = [b["mask"][b["weight"] > 0] for b in evaluation_batches(dataset, 3)]
    masks = np.concatenate(batches)
    pixels = [int((masks == label).sum()) for label in range(3)]
    assert [c["pixels"] for c in result["classes"]] == pixels
    assert sum(pixels) < masks.size
    for c in result["classes"]:
        assert f"IoU of {c['name']}: {c['iou']:.4f} ({c['pixels']:,} pixels)" in output
    fnet_command("eval", run, "--scales", 0.75, 1.5, "--flip")
    folder = run / "evaluations" / "scales=0.75+1.5,flip"
    assert {path.name for path in folder.iterdir()} == {
        *("evaluation.json", "evaluation.csv", "confusion.png", "examples.png")
    }
    other = json.loads((folder / "evaluation.json").read_text())
    assert other["metrics"]["test/loss"] != result["metrics"]["test/loss"]


def shown_of(run, confusion, *, terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    examples.print_scores(run, Evaluation({"accuracy": 0.5}, confusion), console)
    return text.getvalue()


def test_prints_the_worst_of_many_classes():
    run = setup(Config(data=Synthetic(image_size=4, classes=50, examples=400), model=MODEL))
    matrix = np.diag(np.arange(50))  # the first class has no example
    matrix[:, 0] += 10
    output = shown_of(run, matrix, terminal=False)
    assert "the 40 of 50 classes with the lowest accuracy:" in output
    assert output.count("accuracy of ") == 40
    assert "accuracy of 1: 0.0909 (11 examples)" in output
    assert "accuracy of 45:" not in output
    run = setup(Config(data=Synthetic(image_size=4, classes=40, examples=400), model=MODEL))
    output = shown_of(run, np.eye(40, dtype=int), terminal=False)
    assert (output.count("accuracy of "), "lowest" in output) == (40, False)
    few = setup(Config(data=Synthetic(image_size=4, classes=2, examples=8), model=MODEL))
    output = shown_of(few, np.array([[3, 1], [0, 0]]), terminal=False)
    assert "accuracy of 0: 0.7500 (4 examples)\naccuracy of 1: - (0 examples)\n" in output
    table = shown_of(few, np.array([[3, 1], [0, 0]]), terminal=True)
    assert "75.00%" in table
    assert "┃" in table


def test_perplexity_and_bits_per_byte_follow_from_the_loss():
    config = Config(data=TextFile(), model=LanguageModel())

    def metrics(loss, ratio):
        task = SimpleNamespace(dataset=SimpleNamespace(tokens_per_byte=lambda: ratio))
        run = SimpleNamespace(config=config, task=task)
        return examples.text_metrics(run, Evaluation({"loss": loss}, None))

    assert metrics(np.log(8), 0.25) == pytest.approx({"perplexity": 8, "bits_per_byte": 3 / 4})
    assert metrics(np.log(8), None) == pytest.approx({"perplexity": 8})
    assert metrics(1e4, None) == {"perplexity": np.inf}


@pytest.fixture
def evaluated(recipes):
    """``evaluated(recipe, batch_size)``: setup of a recipe, its evaluator and a state."""

    def find(recipe, rows):
        run = setup(load(f"{recipe}.py"))
        state = jax.jit(run.init)(jax.random.key(0))
        return run, Evaluator(run.task, rows, run.state_shapes), state

    return find


def test_examples_are_spread_over_the_test_set(evaluated):
    _, evaluate, state = evaluated("colours", 4)
    output = list(evaluate.predict(state, 6))
    ids = np.concatenate([batch["id"][batch["weight"] > 0] for batch, _ in output])
    assert ids.tolist() == [30, 32, 35, 38, 41, 44]  # 15 test images follow 30 training images
    assert all(len(predictions) == 4 for _, predictions in output)
    everything = evaluate.predict(state, 100)
    predictions = np.concatenate([labels[batch["weight"] > 0] for batch, labels in everything])
    assert len(predictions) == 15
    matrix = evaluate(state).confusion
    assert np.bincount(predictions, minlength=3).tolist() == matrix.sum(0).tolist()


def test_examples_show_confident_errors_first_and_then_unsure_ones(evaluated, monkeypatch, tmp_path):  # fmt: skip
    run, evaluate, state = evaluated("colours", 4)
    probability = iter(evaluate(state).examples["probability"].tolist())
    everything = [
        (bool(batch["label"][i] == predictions[i]), next(probability), batch["image"][i])
        for batch, predictions in evaluate.predict(state, 1000)
        for i in np.flatnonzero(batch["weight"])
    ]
    recorded = {}

    def classifications(images, words, right, title, path):
        recorded.update(images=images, words=words, right=right, title=title)

    monkeypatch.setattr(plots, "classifications", classifications)
    monkeypatch.setattr(examples, "_NUM_CLASSIFIED", 12)
    files = RunFolder(tmp_path)
    drawn = examples.write(run, evaluate, state, evaluate(state), "a title", files)
    assert [*drawn] == ["confusion matrix", "examples", "images"]
    wrong = sorted((e for e in everything if not e[0]), key=lambda e: -e[1])
    right = sorted((e for e in everything if e[0]), key=lambda e: e[1])
    assert 0 < len(wrong) < 12
    expected = (wrong + right)[:12]
    assert recorded["right"] == [e[0] for e in expected]
    shares = [words.split("\n")[0].split()[1] for words in recorded["words"]]
    assert shares == [f"{e[1]:.0%}" for e in expected]
    assert ["\nis " in words for words in recorded["words"]] == [not e[0] for e in expected]
    np.testing.assert_array_equal(recorded["images"], [e[2] for e in expected])
    assert recorded["title"] == (
        f"a title: {len(wrong)} errors on 15 test images; errors first, then the least confident"
    )


def test_examples_show_segmented_images_without_their_padding(evaluated, monkeypatch, tmp_path):
    run, evaluate, state = evaluated("halves", 3)
    recorded = {}

    def segmentations(images, masks, predictions, *rest):
        recorded.update(images=images, masks=masks, predictions=predictions)

    monkeypatch.setattr(plots, "segmentations", segmentations)
    files = RunFolder(tmp_path)
    drawn = examples.write(run, evaluate, state, evaluate(state), "a title", files)
    assert [*drawn] == ["confusion matrix", "examples", "images"]
    # Files are 20, 22 or 24 pixels wide and 24 high; the longer side becomes 16.
    widths = {image.shape[1] for image in recorded["images"]}
    assert widths <= {13, 15, 16}
    assert len(widths) > 1
    for image, *labels in zip(*recorded.values(), strict=True):
        assert image.shape[0] == 16
        assert all(a.shape == image.shape[:2] for a in labels)
        assert (labels[0][1:] != 255).all()


def test_class_names_with_dollars_are_not_formulas(tmp_path):
    names = ("$_$", "$\\no$")
    image = np.zeros((1, 8, 8, 3), np.uint8)
    mask = np.eye(8, dtype=np.uint8)[None]
    plots.confusion_matrix(np.eye(2, dtype=int), names, "two", tmp_path / "confusion.png")
    plots.image_grid(np.zeros((2, 1, 8, 8, 1)), names, "two", tmp_path / "grid.png")
    path = tmp_path / "segmentations.png"
    plots.segmentations(image, mask, mask, names, palette(), ["$a$"], "two", path)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_image_grid_puts_each_image_in_the_row_of_its_name(channels, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    images = np.random.default_rng(0).uniform(size=(2, 3, 4, 5, channels)).astype(np.float32)
    plots.image_grid(images, ("a", "b"), "grid", tmp_path / "grid.png")
    (ax,) = figures[0].axes
    recorded = np.asarray(ax.images[0].get_array()) / 255
    assert recorded.shape == (2 * 6, 3 * 7, 3)
    for i, (tick, label) in enumerate(zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)):
        rows = slice(round(tick - 1.5), round(tick + 1.5) + 1)  # the four pixels around the tick
        assert label.get_text() == "ab"[i]
        for j in range(3):
            expected = images[i, j, ..., :3]
            if channels < 3:  # drawn dark on white
                expected = np.repeat(1 - images[i, j].mean(-1, keepdims=True), 3, -1)
            result = recorded[rows, 7 * j + 1 : 7 * j + 6]
            np.testing.assert_allclose(result, expected, atol=1 / 255)


MISTAKES = [
    ("digits", ("--crops", "10"), "--crops: runs/digits is a run of preact_resnet on digits; its options: none"),
    ("colours", ("--scales", "1"), "--scales: runs/colours is a run of preact_resnet on image_folder; its options: --split, --path, --crops, --border, --image-size, --resize"),
    ("colours", ("--flip",), "--flip: runs/colours is a run of"),
    ("colours", ("--crops", "5"), "--crops: expected one of 1, 2, 10"),
    ("colours", ("--resize", "4"), "data.resize: 4 is less than data.image_size 8"),
    ("colours", ("--image-size", "0"), "--image-size: expected greater than or equal to 1, got 0"),
    ("halves", ("--crops", "10"), "its options: --split, --path, --image-size, --mask-reading, --scales, --flip"),
    ("halves", ("--scales", "0"), "--scales: expected greater than 0"),
    ("halves", ("--scales", "inf"), "--scales: expected a finite number, got inf"),
    ("halves", ("--scales", "0.1"), "--scales: 0.1 resizes images to 2 pixels; expected at least 8 pixels"),
    ("halves", ("--scale", "1"), "unknown option --scale (did you mean --scales?)"),
    ("halves", ("again",), "unexpected again"),
    ("halves", ("--data.test-split", "test"), "--data.test-split: fnet eval takes the data of the run; give --split NAME"),
    ("halves", (), "runs/halves/checkpoints: none was saved, or they are gone"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "words", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_exit_code_2(recipe, words, message, begun, capsys):
    begun(recipe)
    assert exit_code("eval", f"runs/{recipe}", *words) == 2
    assert_one_line_error(capsys, message)


def test_refuses_an_evaluation_in_which_nothing_counts():
    run = setup(Config(data=Synthetic(image_size=4, classes=3, examples=40), model=MODEL))
    evaluate = Evaluator(run.task, 8, run.state_shapes)

    def ignored(params, state, batch):
        metrics, (labels, predictions), *others = run.task.measure(params, state, batch)
        return BatchMetrics(metrics, (labels + 255, predictions), *others)

    state = jax.jit(run.init)(jax.random.key(0))
    assert evaluate(state).confusion.sum() == 10
    evaluate = Evaluator(run.task._replace(measure=ignored), 8, run.state_shapes)
    with pytest.raises(UserError, match="none of the 10 test examples has a label that counts"):
        evaluate(state)


def test_long_evaluations_do_not_overflow():
    run = setup(Config(data=Synthetic(image_size=4, classes=3, examples=40), model=MODEL))
    state = jax.jit(run.init)(jax.random.key(0))
    evaluate = run.evaluation(UnreadableFiles(run.task.dataset, print), run.config.data.batch_size)
    assert evaluate.batch_size == 10  # there are no more examples
    expected = evaluate(state)
    evaluate._counts_per_batch = 2**30  # as in a segmentation of many large images
    result = evaluate(state)
    np.testing.assert_array_equal(result.confusion, expected.confusion)
    assert result.metrics == pytest.approx(expected.metrics)
