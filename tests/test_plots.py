"""What is drawn where: of pictures whose parts could change places unseen."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from train.output import plots
from train.output.palette import overlay_labels


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def test_a_row_of_the_confusion_is_a_true_class_by_shares(drawn, tmp_path):
    matrix = np.array([[3, 1, 0], [0, 2, 0], [1, 0, 9]])
    plots.confusion_matrix(matrix, ("cat", "dog", "$cow$"), "a title", tmp_path / "a.png")
    (ax,) = drawn[0].axes
    shares = [[0.75, 0.25, 0], [0, 1, 0], [0.1, 0, 0.9]]
    np.testing.assert_allclose(ax.images[0].get_array(), shares)
    told = {text.get_position(): text.get_text() for text in ax.texts}
    assert told == {(0, 0): "75%", (1, 0): "25%", (1, 1): "100%", (0, 2): "10%", (2, 2): "90%"}
    for labels in (ax.get_yticklabels(), ax.get_xticklabels()):
        assert [label.get_text() for label in labels] == ["cat", "dog", "$cow$"]
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("true", "predicted")
    assert ax.get_title() == "a title: 87.50% right"


def test_image_truth_and_prediction_stand_side_by_side_under_their_names(drawn, tmp_path):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (2, 8, 6, 3), np.uint8)
    truths, found = generator.integers(0, 3, (2, 2, 8, 6))
    truths[0, 0, 0] = 255
    plots.segmentations(images, truths, found, ("a", "b", "c"), "a title", tmp_path / "a.png")
    (ax,) = drawn[0].axes
    canvas = np.asarray(ax.images[0].get_array())
    expected = images[0], overlay_labels(images[0], truths[0]), overlay_labels(images[0], found[0])
    assert [text.get_text() for text in ax.texts] == ["image", "truth", "prediction"]
    for text, picture in zip(ax.texts, expected, strict=True):
        middle, above = text.get_position()
        x, y = round(middle - 3 + 0.5), round(above + 0.02 * 8 + 0.5)
        np.testing.assert_array_equal(canvas[y : y + 8, x : x + 6], picture)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b", "c"]


def test_answers_that_are_wrong_are_red(drawn, tmp_path):
    images = np.zeros((3, 4, 4, 3), np.uint8)
    plots.classifications(
        images, ["cat", "dog", "cow"], [True, False, True], "", tmp_path / "a.png"
    )
    (ax,) = drawn[0].axes
    colours = {text.get_text(): text.get_color() for text in ax.texts}
    assert colours == {"cat": "black", "dog": "#cc3311", "cow": "black"}
