"""Pictures of a run: panels and tiles stand where their labels say."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from fnet.memory import REMAT_POLICIES, Candidate, Cost, Peak, Plan
from train.output import curves, plots
from train.output.curves import MOST_POINTS, read_curves, thin
from train.output.formats import duration, number, percent
from train.output.palette import overlay_labels, palette
from train.output.tables import Cell, Table, to_rich


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def test_a_row_of_the_confusion_matrix_is_a_true_class_in_shares(drawn, tmp_path):
    matrix = np.array([[3, 1, 0], [0, 2, 0], [1, 0, 9]])
    plots.confusion_matrix(matrix, ("cat", "dog", "$cow$"), "a title", tmp_path / "a.png")
    (ax,) = drawn[0].axes
    shares = [[0.75, 0.25, 0], [0, 1, 0], [0.1, 0, 0.9]]
    np.testing.assert_allclose(ax.images[0].get_array(), shares)
    texts = {text.get_position(): text.get_text() for text in ax.texts}
    assert texts == {(0, 0): "75%", (1, 0): "25%", (1, 1): "100%", (0, 2): "10%", (2, 2): "90%"}
    for labels in (ax.get_yticklabels(), ax.get_xticklabels()):
        assert [label.get_text() for label in labels] == ["cat", "dog", "$cow$"]
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("true", "predicted")
    assert ax.get_title() == "a title: 87.50% correct"


@pytest.mark.filterwarnings("error")
def test_names_without_glyphs_are_drawn_as_codes(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "_other_families", lambda: ())
    plots._add_font.cache_clear()
    assert plots.drawable("猫 and café") == "<U+732B> and café"
    names = ("猫", "犬", "🐶")
    plots.confusion_matrix(np.eye(3, dtype=int), names, "path=猫", tmp_path / "a.png")
    images = np.zeros((3, 4, 4, 3), np.uint8)
    plots.classifications(images, names, [True] * 3, "猫", tmp_path / "b.png")
    masks = np.arange(3)[:, None, None] * np.ones((3, 4, 4), int)
    colors = palette()
    plots.segmentations(images, masks, masks, names, colors, names, "猫", tmp_path / "c.png")
    plots._add_font.cache_clear()


def test_colors_of_classes_are_far_from_each_other_and_from_the_background():
    colors = palette()[:255].astype(int)
    assert np.isin(colors, np.linspace(0, 255, 9).round()).all()
    assert len(np.unique(colors, axis=0)) == 255
    # By a plain distance between colors, which is not the one that chose them.
    first = np.concatenate([[[0, 0, 0], [255, 255, 255]], colors[:8]])
    distances = np.abs(first[:, None] - first[None]).sum(2) + 1000 * np.eye(len(first), dtype=int)
    assert distances.min() >= 90  # of 765


def test_another_font_draws_what_the_first_one_lacks(monkeypatch):
    monkeypatch.setattr(plots, "_other_families", lambda: ("STIXGeneral",))
    plots._add_font.cache_clear()
    lacking = chr(7553)  # a hooked d, which DejaVu Sans does not have
    with mpl.rc_context():
        assert plots.drawable(f"a{lacking}") == f"a{lacking}"
        assert mpl.rcParams["font.family"] == ["sans-serif", "STIXGeneral"]
    plots._add_font.cache_clear()


def test_image_mask_and_prediction_stand_side_by_side_under_their_names(drawn, tmp_path):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (2, 8, 6, 3), np.uint8)
    masks, predictions = generator.integers(0, 3, (2, 2, 8, 6))
    masks[0, 0, 0] = 255
    colors, names = palette(), ("a", "b", "c")
    captions = ("first, 50 %", "second")
    plots.segmentations(
        images, masks, predictions, names, colors, captions, "a title", tmp_path / "a.png"
    )
    (ax,) = drawn[0].axes
    canvas = np.asarray(ax.images[0].get_array())
    expected = [
        tile
        for image, mask, prediction in zip(images, masks, predictions, strict=True)
        for tile in (
            image,
            overlay_labels(image, mask, colors),
            overlay_labels(image, prediction, colors),
        )
    ]
    texts = ["image", "truth", captions[0], "image", "truth", captions[1]]
    assert [text.get_text() for text in ax.texts] == texts
    for text, picture in zip(ax.texts, expected, strict=True):
        middle, above = text.get_position()
        x, y = round(middle - 3 + 0.5), round(above + 0.02 * 8 + 0.5)
        np.testing.assert_array_equal(canvas[y : y + 8, x : x + 6], picture)
    legend = ax.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == ["a", "b", "c", "void"]
    drawn_colors = [(255 * np.array(p.get_facecolor()[:3])).round() for p in legend.get_patches()]
    np.testing.assert_array_equal(drawn_colors, colors[[0, 1, 2, 255]])


def test_segmentations_of_several_sizes_are_centered_on_white(drawn, tmp_path):
    images = [np.zeros((4, 8, 3), np.uint8), np.zeros((6, 4, 3), np.uint8)]
    masks = [np.zeros(image.shape[:2], np.uint8) for image in images]
    args = ("a", "b"), palette(), ["first", "second"], "a title", tmp_path / "a.png"
    plots.segmentations(images, masks, masks, *args)
    (ax,) = drawn[0].axes
    canvas = np.asarray(ax.images[0].get_array())
    for text, image in zip(ax.texts[::3], images, strict=True):
        middle, above = text.get_position()
        x, y = round(middle - 4 + 0.5), round(above + 0.02 * 6 + 0.5)
        expected = np.full((6, 8, 3), 255)
        left = (8 - image.shape[1]) // 2
        expected[: image.shape[0], left : left + image.shape[1]] = image
        np.testing.assert_array_equal(canvas[y : y + 6, x : x + 8], expected)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a"]


def test_curves_have_a_panel_for_each_metric_with_train_and_test_by_step(drawn, tmp_path):
    lines = [
        {"step": 10, "train/loss": 2.0, "train/learning_rate": 0.1, "train/grad_norm": 1.0},
        {"step": 20, "train/loss": 1.0, "train/learning_rate": 0.1, "test/loss": 0.5},
    ]
    plots.curves(lines, "$a$ title", tmp_path / "a.png")
    loss, rate = drawn[0].axes
    assert (loss.get_title("left"), rate.get_title("left")) == ("loss", "learning rate")
    points = {line.get_label(): line.get_xydata().tolist() for line in loss.lines}
    assert points == {"train 1": [[10, 2.0], [20, 1.0]], "test 0.5": [[20, 0.5]]}
    assert rate.get_ylim()[0] == 0
    assert loss.get_xlim() == (0, 20)


def test_a_run_without_lines_has_an_empty_picture(tmp_path):
    plots.curves([], "nothing", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("values", "scale"),
    [([0.1, 2.0], "log"), ([1.0, 2.0], "linear"), ([0.0, 2.0], "linear"), ([-1.0, 20], "linear")],
)
def test_losses_that_span_a_factor_of_ten_get_a_log_axis(values, scale, drawn, tmp_path):
    lines = [{"step": i, "train/loss": value} for i, value in enumerate(values)]
    plots.curves(lines, "", tmp_path / "a.png")
    assert drawn[0].axes[0].get_yscale() == scale


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -1.0, 1e-320, 1e30, 1e99, -1e99],
        [5.0, 5.0 + 1e-12],
        [0.0, 0.0],
        [1e15, 1e15 + 1],
        [1e-9, 1e9],
        [1.0],
        [3.0, 4.0, 1e400, float("nan"), True, "7", None, 10**400],
    ],
)
def test_extreme_values_lie_inside_their_panel(values, tmp_path):
    for name in ("train/loss", "train/accuracy", "examples_per_second"):
        lines = [{"step": i, name: value} for i, value in enumerate(values)]
        (metric,) = curves.metrics_of([read_curves(lines)])
        ax = Figure().subplots()
        plots.draw(ax, metric, curves.XAxis("step", 0, len(lines) - 1))
        ax.figure.savefig(tmp_path / "a.svg")
        low, high = ax.get_ylim()
        points = ax.lines[0].get_xydata()
        assert len(points) == sum(type(v) in (int, float) and abs(v) < 1e100 for v in values)
        assert ((low <= points[:, 1]) & (points[:, 1] <= high)).all()
        labels = [t.get_text() for t in ax.get_yticklabels()]
        assert len(labels) <= 12


@pytest.mark.parametrize("count", [1, 5, MOST_POINTS, MOST_POINTS + 1, 12_345])
def test_thinned_curves_keep_mean_and_extremes(count):
    x = np.cumsum(np.random.default_rng(0).integers(1, 9, count)).astype(float)
    y = np.random.default_rng(1).normal(size=count)
    places, mean, low, high = thin(x, y, MOST_POINTS)
    assert len(places) <= MOST_POINTS
    assert len(places) == count or count > MOST_POINTS
    assert (low.min(), high.max()) == (y.min(), y.max())
    assert ((low <= mean) & (mean <= high)).all()
    assert (np.diff(places) > 0).all()
    if count > MOST_POINTS:
        edges = np.linspace(x[0], x[-1], MOST_POINTS + 1)[:2]
        first = (x >= edges[0]) & (x < edges[1])
        np.testing.assert_allclose(mean[0], y[first].mean())
        np.testing.assert_allclose(places[0], x[first].mean())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.10123, "0.1012"), (12345.6, "12,346"), (1.8656e-6, "1.866e-6"), (0, "0"), (-5, "-5")],
)
def test_numbers_have_four_digits(value, text):
    assert number(value) == text


def test_shares_and_times_have_their_units():
    assert percent(0.97188) == "97.19%"
    assert [duration(s) for s in (1.25, 75, 7384)] == ["1.2 s", "1 min 15 s", "2 h 3 min"]


def printed(table, width=80):
    """A table as the terminal shows it."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(to_rich(table))
    return capture.get()


def test_a_table_in_the_terminal_has_every_cell_and_no_markup():
    rows = [["[bold]a", "float32[8]", Cell("1", "note")], ["b", None, "2"]]
    text = printed(Table("A title", ["name", "array", "count"], rows, texts=2))
    for cell in ("A title", "count", "[bold]a", "float32[8]"):
        assert cell in text
    assert "│ b       │ -          │     2 │" in text


def test_numbers_are_whole_in_a_narrow_terminal():
    rows = [["a/very/long/name/of/a/layer/that/folds", "float32[64,1024]", "123.45 KiB"]]
    text = printed(Table("", ["layer", "array", "bytes"], rows, texts=2, bars=[1.0]), width=50)
    assert "float32[64,1024]" in text
    assert "123.45 KiB" in text


def test_the_line_of_a_budget_is_what_the_step_may_use(drawn, tmp_path):
    candidates = tuple(
        Candidate(REMAT_POLICIES["none"], n, Cost(10**9, 10**8), Peak(size, 0, 0, 0), {})
        for n, size in ((1, 30 * 2**20), (2, 19 * 2**20))
    )
    plan = Plan(50 * 2**20, candidates[1], None, candidates)
    plots.plan(plan, 30 * 2**20, "title", tmp_path / "plan.png")
    for ax in drawn[0].axes:
        assert [line.get_xdata() for line in ax.lines] == [[20, 20]]
    [legend] = drawn[0].legends
    assert "budget without 30.00 MiB for the process: 20.00 MiB" in [
        text.get_text() for text in legend.get_texts()
    ]
