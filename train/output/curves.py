"""Curves of metrics: what the panels of curves.png and of the report show."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from train.output.formats import number, percent
from train.output.logged import NOT_PRIVATE, finite, noise_scale_course

MOST_POINTS = 300
"""Points of a curve, more than a chart has pixels on a phone."""

LOWER_IS_BETTER = ("loss", "mae", "rmse", "calibration_error")
SCORES = (
    *("accuracy", "mean_iou", "pixel_accuracy", "class_accuracy", "top5", "auc", "macro_f1"),
    *("label_accuracy", "exact", "r2", *LOWER_IS_BETTER),
)
"""Metrics that say how well a network does."""

_PARTS = ("train", NOT_PRIVATE, "test", "averaged")
_LABELS = {NOT_PRIVATE: "train, not private"}
_HIDDEN = frozenset({"step", "epoch", "seconds", "skipped"})


class Scale(NamedTuple):
    """How a metric's values are written and drawn.

    With ``from_zero`` the axis begins at 0. With ``log``, values that span more than a factor of
    ten get a log axis.
    """

    text: Callable[[float], str] = number
    from_zero: bool = False
    log: bool = False


_SCORE, _AMOUNT, _SHARE = Scale(log=True), Scale(from_zero=True), Scale(percent)
_KNOWN = {
    "loss": ("loss", _SCORE),
    "accuracy": ("accuracy", _SHARE),
    "mean_iou": ("mean IoU", _SHARE),
    "iou": ("IoU", _SHARE),
    "f1": ("F1", _SHARE),
    "pixel_accuracy": ("pixel accuracy", _SHARE),
    "class_accuracy": ("class accuracy", _SHARE),
    "top5": ("top-5 accuracy", _SHARE),
    "macro_f1": ("macro F1", _SHARE),
    "macro_precision": ("macro precision", _SHARE),
    "macro_recall": ("macro recall", _SHARE),
    "auc": ("AUC", _SHARE),
    "calibration_error": ("calibration error", Scale(percent, from_zero=True)),
    "label_accuracy": ("labels right", _SHARE),
    "exact": ("images with all labels right", _SHARE),
    "mae": ("mean absolute error", _SCORE),
    "rmse": ("root mean squared error", _SCORE),
    "r2": ("R2", Scale()),
    "learning_rate": ("learning rate", _AMOUNT),
    "grad_norm": ("gradient norm", _SCORE),
    "noise_scale": ("gradient noise scale", _SCORE),
    "grad_sq": ("squared gradient norm (estimate)", _SCORE),
    "grad_var": ("gradient variance (estimate)", _SCORE),
    "norm_median": ("median per-example norm", _SCORE),
    "norm_max": ("largest per-example norm", _SCORE),
    "privacy/epsilon": ("epsilon", _AMOUNT),
    "clipped": ("share of gradients clipped", _SHARE),
    "nonfinite": ("non-finite gradients per step", _AMOUNT),
    "examples_per_second": ("examples per second", _AMOUNT),
    "input_wait": ("input wait", Scale(percent, from_zero=True)),
    "unreadable_files": ("unreadable files", _AMOUNT),
}
"""Title and scale of metrics, in the order of their panels. Others follow by name."""


class Curve(NamedTuple):
    """A metric over one run where it was logged and is finite: float64 [N], in the order of steps.

    Epochs are nan where a line has none. ``dropped`` counts the values that are not finite.
    """

    steps: np.ndarray
    epochs: np.ndarray
    values: np.ndarray
    dropped: int = 0


class Metric(NamedTuple):
    """A metric over all runs.

    Attributes:
      name: Name in metrics.jsonl without its part, such as ``"loss"``.
      title: Name for people.
      scale: How values are written and drawn.
      curves: Curves by index of the run and part: train, not_private, test, averaged or empty.
    """

    name: str
    title: str
    scale: Scale
    curves: dict[tuple[int, str], Curve]

    @property
    def parts(self) -> list[str]:
        """Parts that occur in any run."""
        return list(dict.fromkeys(part for _, part in self.curves))

    def label(self, part: str) -> str:
        """Name a part, unless it goes without saying, as for the learning rate."""
        stated = len(self.parts) > 1 or self.name in SCORES or part == NOT_PRIVATE
        return _LABELS.get(part, part) if stated else ""

    @property
    def constant(self) -> float | None:
        """Value of a metric that was logged repeatedly and never changed, else None."""
        first = next(iter(self.curves.values())).values
        same = all((curve.values == first[0]).all() for curve in self.curves.values())
        return float(first[0]) if same and len(first) > 1 else None

    @property
    def log(self) -> bool:
        """Whether the panel has a log axis."""
        values = np.concatenate([curve.values for curve in self.curves.values()])
        return bool(self.scale.log and values.min() > 0 and values.max() > 10 * values.min())


class XAxis(NamedTuple):
    """The horizontal axis that all panels share: ``"step"`` or ``"epoch"``, from low to high."""

    name: str
    low: float
    high: float

    def of(self, curve: Curve) -> np.ndarray:
        """Return where a curve's values lie on the axis."""
        return curve.steps if self.name == "step" else curve.epochs

    def text(self, x: float) -> str:
        """Write a place on the axis: ``"step 1,200"``."""
        return f"step {x:,.0f}" if self.name == "step" else f"epoch {x:.4g}"


def read_curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curves of a run by name: its metrics, and its noise scale averaged over steps."""
    names = dict.fromkeys(k for line in lines for k, v in line.items() if type(v) in (int, float))
    curves = {}
    for name in names:
        logged = [line for line in lines if type(line.get(name)) in (int, float)]
        steps, epochs, values = (
            np.array([finite(line.get(key)) for line in logged]) for key in ("step", "epoch", name)
        )
        good = ~np.isnan(values)
        curves[name] = Curve(steps[good], epochs[good], values[good], int((~good).sum()))
    if means := noise_scale_course(lines):
        steps, values = np.array(means, np.float64).T
        sq = curves["train/grad_sq"]
        epochs = np.interp(steps, sq.steps, sq.epochs)
        curves["averaged/noise_scale"] = Curve(steps, epochs, values)
    return curves


def metrics_of(runs: Sequence[Mapping[str, Curve]]) -> list[Metric]:
    """Return the metrics that any of several runs has, in the order of their panels."""
    metrics: dict[str, dict[tuple[int, str], Curve]] = {}
    for run, curves in enumerate(runs):
        for key in sorted(curves, key=lambda key: _rank(_split(key)[1], _PARTS)):
            name, part = _split(key)
            if len(curves[key].values) and name not in _HIDDEN:
                metrics.setdefault(name, {})[run, part] = curves[key]
    names = sorted(metrics, key=lambda name: (_rank(name, tuple(_KNOWN)), name))
    return [Metric(name, *describe(name), metrics[name]) for name in names]


def describe(name: str) -> tuple[str, Scale]:
    """Return title and scale of a metric."""
    if name in _KNOWN:
        return _KNOWN[name]
    kind, _, of = name.partition(" ")  # of one of several numbers
    if kind in ("mae", "rmse", "r2"):
        return f"{_KNOWN[kind][0]} of {of}", _KNOWN[kind][1]
    return name.replace("_", " "), _SCORE


def _split(key: str) -> tuple[str, str]:
    part, _, name = key.partition("/")
    return (name, part) if part in _PARTS and name else (key, "")


def _rank(name: str, known: Sequence[str]) -> int:
    return known.index(name) if name in known else len(known)


def thin(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, ...]:
    """Average a curve [N] over ``most`` equal parts of its range; few points are unchanged.

    Returns means of places and of values, and least and greatest values.
    """
    if len(x) <= most or x[-1] <= x[0]:
        return x, y, y, y
    part = np.minimum((x - x[0]) / (x[-1] - x[0]) * most, most - 1).astype(int)
    first = np.flatnonzero(np.diff(part, prepend=-1))
    count = np.diff(first, append=len(x))
    x, mean = np.add.reduceat(x, first) / count, np.add.reduceat(y, first) / count
    return x, mean, np.minimum.reduceat(y, first), np.maximum.reduceat(y, first)
