"""Pictures of a run: images with what the network makes of them, its memory and its curves."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fnet.memory import format_bytes
from train.output.curves import MOST_POINTS, Metric, XAxis, metrics_of, read_curves, thin
from train.output.formats import number, percent
from train.output.logged import NOT_PRIVATE
from train.output.memory_tables import PHASES, StepMemory
from train.output.palette import overlay_labels

if TYPE_CHECKING:
    from fnet.memory import Plan

COLORS = (
    *("#1f6fb4", "#c2410c", "#15803d", "#9333a8"),
    *("#856a00", "#0e7c86", "#be185d", "#57534e"),
)
"""Colors of runs. The report's style sheet has the same, and lighter ones for dark mode."""
DASHES = ("solid", "dashed", "dotted")
"""Line styles of runs, once the colors are used up."""
GRID_COLOR = "#d8dbdf"
_ON_PICTURE = (
    *("loss", "accuracy", "pixel_accuracy", "mean_iou"),
    *("learning_rate", "privacy/epsilon", "noise_scale"),
)
_MOST_POINTS = 400
"""Points of the curve of live bytes."""
_NO_FONT = "Last Resort"
"""Begins the name of matplotlib's font that draws any character as a box."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def image_grid(images: np.ndarray, names: Sequence[str], title: str, path: Path) -> None:
    """Save rows of images [rows, columns, H, W, C] in [0, 1], in the format of the path's suffix.

    Without a suffix it is PNG. One channel is drawn dark on white. Of three or more channels the
    first three are shown.
    """
    rows, columns, h, w, c = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
    canvas = padded.swapaxes(1, 2).reshape(rows * (h + 2), columns * (w + 2), c)
    figure = Figure(figsize=(1 + 0.6 * columns, 1 + 0.6 * rows), layout="constrained")
    ax = figure.subplots()
    ax.imshow(_rgb(canvas))
    middles = (np.arange(rows) + 0.5) * (h + 2) - 0.5
    ax.set_yticks(middles, [*map(drawable, names)], parse_math=False)
    ax.set_xticks([])
    ax.set_title(drawable(title), fontsize=9)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    # Without a format, matplotlib would add a suffix to a path that has none.
    figure.savefig(path, dpi=110, format=path.suffix[1:] or "png")


def classifications(
    images: np.ndarray, captions: Sequence[str], correct: Sequence[bool], title: str, path: Path
) -> None:
    """Save images with their predicted classes as a PNG; wrong ones are captioned in red.

    Images are [N, H, W, C], uint8, or floating point in [0, 1]. One channel is drawn dark on white.
    """
    colors = ["black" if is_correct else "#cc3311" for is_correct in correct]
    texts = list(zip(captions, colors, strict=True))
    # Two lines of text take 0.3 of an image's height.
    figure, _ = _tile(_rgb(images), texts, title, columns=min(len(images), 6), room=0.3, inches=1.7)
    figure.savefig(path, dpi=110)


def segmentations(
    images: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    predictions: Sequence[np.ndarray],
    classes: Sequence[str],
    colors: np.ndarray,
    captions: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Save images, true masks and predicted masks side by side with a legend, as a PNG.

    Images are uint8 [H, W, 3] and may differ in size. True labels beyond the classes are drawn as
    void. The legend shows the classes that occur.
    """
    masks = [np.where(mask < len(classes), mask, 255) for mask in masks]
    tiles, texts = [], []
    for image, mask, prediction, caption in zip(images, masks, predictions, captions, strict=True):
        overlays = (overlay_labels(image, labels, colors) for labels in (mask, prediction))
        tiles += [image, *overlays]
        texts += [(text, "black") for text in ("image", "truth", caption)]
    figure, ax = _tile(tiles, texts, title, columns=3, room=0.1, inches=3.0)
    labels = np.unique(np.concatenate([a.ravel() for a in (*masks, *predictions)]))
    shown = {int(i): "void" if i == 255 else drawable(classes[i]) for i in labels}
    patches = [Patch(color=colors[i] / 255, label=end_of(n)) for i, n in shown.items()]
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": 4}
    legend = ax.legend(handles=patches, fontsize=7, frameon=False, **place)
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def confusion_matrix(matrix: np.ndarray, classes: Sequence[str], title: str, path: Path) -> None:
    """Save counts [true, predicted] as a PNG; each row is a true class in shares of its examples.

    Up to 50 classes are named, and the cells of up to 20 are numbered. The title gets the accuracy.
    """
    n = len(matrix)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    side = min(3 + 0.4 * n, 14)
    figure = Figure(figsize=(side, side), layout="constrained")
    ax = figure.subplots()
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    accuracy = np.trace(matrix) / max(matrix.sum(), 1)
    ax.set_title(drawable(f"{title}: {accuracy:.2%} correct"), fontsize=10)
    ax.set_ylabel("true")
    ax.set_xlabel("predicted")
    if n <= 50:
        # Class names may contain dollar signs, which are no formula.
        names = [*map(drawable, classes)]
        ax.set_yticks(range(n), names, parse_math=False)
        slanted: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
        ax.set_xticks(range(n), names, parse_math=False, **slanted)
        ax.tick_params(labelsize=8)
    if n <= 20:
        for i, j in zip(*np.nonzero(matrix), strict=True):
            color = "white" if shares[i, j] > 0.5 else "black"
            ax.text(j, i, f"{shares[i, j]:.0%}", ha="center", va="center", color=color, size=6)
    figure.savefig(path, dpi=110)


def memory(stored: StepMemory, title: str, path: Path) -> None:
    """Save memory.png: residuals by layer, and live bytes while the compiled step runs."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    figure.suptitle(title, parse_math=False)
    by_layer, over_time = figure.subplots(1, 2)
    names = [end_of(r.layer) for r in stored.residuals]
    sizes = [r.bytes for r in stored.residuals]
    unit = _bytes_axis(by_layer, max(sizes, default=0))
    by_layer.bar(range(len(sizes)), np.array(sizes) / unit, color=COLORS[0])
    by_layer.set_xticks(range(len(sizes)), names, rotation=60, ha="right", parse_math=False)
    by_layer.tick_params("x", labelsize=7)
    by_layer.set_title("residuals saved for the backward pass, in forward order", fontsize=10)
    draw_live_bytes(over_time, stored)
    over_time.set_title("live bytes while the compiled step runs", fontsize=10)
    over_time.set_xlabel("instruction, in the order of the schedule")
    over_time.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def plan(plan: "Plan", reserved: int, title: str, path: Path) -> None:
    """Save plan.png: FLOPs and estimated time of each candidate over its peak memory.

    ``reserved`` are bytes of the budget that the step may not use.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    figure.suptitle(title, parse_math=False)
    fastest = min(plan.candidates, key=lambda c: (c.cost.time, c.peak.total)).cost
    front = {id(c) for c in plan.front}
    limit = plan.budget - reserved if plan.budget else 0
    most = max(limit, *(c.peak.total for c in plan.candidates))
    for ax, name, of in zip(
        figure.subplots(1, 2),
        ("FLOPs, relative to the fastest", "estimated time, relative to the fastest"),
        (lambda c: c.flops / fastest.flops, lambda c: c.time / fastest.time),
        strict=True,
    ):
        unit = _bytes_axis(ax, most, horizontal=True)
        for on_front, label in ((True, "compiled, on the front"), (False, "compiled")):
            group = [c for c in plan.candidates if (id(c) in front) == on_front]
            x, y = [c.peak.total / unit for c in group], [of(c.cost) for c in group]
            color = COLORS[0] if on_front else "0.7"
            ax.scatter(x, y, color=color, zorder=3, label=label if group else None)
        chosen = plan.chosen
        label = f"chosen: {chosen}, {format_bytes(chosen.peak.total)}"
        point = [chosen.peak.total / unit], [of(chosen.cost)]
        ax.scatter(*point, s=140, facecolors="none", edgecolors=COLORS[1], zorder=4, label=label)
        if limit:
            without = f" without {format_bytes(reserved)} for the process" if reserved else ""
            label = f"budget{without}: {format_bytes(limit)}"
            ax.axvline(limit / unit, color=COLORS[1], lw=1, ls="--", label=label)
        ax.set_xlabel("peak of the train step")
        ax.set_title(name, fontsize=10)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def draw_live_bytes(ax: Axes, stored: StepMemory, highest: int = 0) -> None:
    """Draw the bytes that are alive at each instruction, and the peak that XLA assigned.

    The axis reaches to ``highest`` bytes, or to the step's own if these are more.
    """
    assigned = stored.peak.total - stored.peak.workspace - stored.peak.constants
    live = np.array(stored.live_bytes or (0,), np.float64)
    unit = _bytes_axis(ax, max(highest, assigned, live.max()))
    if stored.live_bytes:
        # Each point is the most of the instructions that it stands for.
        first = np.unique(np.linspace(0, len(live), _MOST_POINTS, endpoint=False).astype(int))
        most = np.maximum.reduceat(live, first) / unit
        ax.fill_between(first, most, step="post", color=COLORS[0], alpha=0.3, lw=0)
        ax.step(first, most, where="post", color=COLORS[0], lw=1.2)
    label = f"peak assigned by XLA: {format_bytes(assigned)}{PHASES.get(stored.peak_phase, '')}"
    ax.axhline(assigned / unit, color=COLORS[1], lw=1, ls="--", label=label)
    ax.set_xlim(0, max(len(live) - 1, 1))
    ax.xaxis.set_major_locator(round_ticks())


def _bytes_axis(ax: Axes, highest: float, horizontal: bool = False) -> int:
    """Let an axis reach from 0 to a number of bytes, and return the unit to draw in."""
    power = min(int(np.log2(max(highest, 1)) // 10), len(_UNITS) - 1)
    limits, axis = (ax.set_xlim, ax.xaxis) if horizontal else (ax.set_ylim, ax.yaxis)
    limits(0, 1.05 * max(highest, 1) / 1024**power)
    axis.set_major_locator(round_ticks())
    axis.set_major_formatter(ticker.StrMethodFormatter(f"{{x:g}} {_UNITS[power]}"))
    style(ax)
    return 1024**power


def _rgb(images: np.ndarray) -> np.ndarray:
    """Return images as uint8 RGB: the first three channels, or one channel dark on white."""
    if images.dtype != np.uint8:
        images = (255 * np.clip(images, 0, 1)).round().astype(np.uint8)
    if images.shape[-1] >= 3:
        return images[..., :3]
    return np.repeat(255 - images.mean(-1, keepdims=True).astype(np.uint8), 3, -1)


def _tile(
    images: Sequence[np.ndarray] | np.ndarray,
    captions: Sequence[tuple[str, str]],
    title: str,
    *,
    columns: int,
    room: float,
    inches: float,
) -> tuple[Figure, Axes]:
    """Draw images in rows on white as one picture, which is faster than one axes per image."""
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    rows, above, gap = -(-len(images) // columns), max(round(room * height), 1), max(width // 16, 1)
    canvas = np.full((rows * (height + above), columns * (width + gap), 3), 255, np.uint8)
    total = inches * columns
    figure = Figure(figsize=(total, total * canvas.shape[0] / canvas.shape[1] + 0.4))
    ax = figure.add_axes((0, 0, 1, 1 - 0.4 / figure.get_figheight()))
    for i, (image, (text, color)) in enumerate(zip(images, captions, strict=True)):
        y, x = i // columns * (height + above) + above, i % columns * (width + gap)
        left = x + (width - image.shape[1]) // 2
        canvas[y : y + image.shape[0], left : left + image.shape[1]] = image
        # imshow places a pixel's center at its index.
        place: dict[str, Any] = {"ha": "center", "va": "bottom", "size": 7.5}
        at = x - 0.5 + width / 2, y - 0.5 - 0.02 * height
        ax.text(*at, drawable(text), color=color, parse_math=False, **place)
    ax.imshow(canvas, interpolation="nearest")
    ax.set_title(drawable(title), fontsize=10)
    ax.axis("off")
    return figure, ax


def end_of(name: str, most: int = 32) -> str:
    """Return a name, or the end of a long one."""
    return name if len(name) <= most else "…" + name[-most + 1 :]


def drawable(text: str) -> str:
    """Return a text for a picture, with codes such as ``<U+732B>`` for what no font can draw.

    Matplotlib draws with one font, which has no Chinese, for instance. Other installed fonts are
    added where they are needed. A code is not nice, but unlike a box it tells classes apart.
    """
    return "".join(c if c.isascii() or _add_font(ord(c)) else f"<U+{ord(c):04X}>" for c in text)


@functools.cache
def _add_font(code: int) -> bool:
    """Let matplotlib draw a character with the first font that has it; whether there is one."""
    families = mpl.rcParams["font.family"]
    for family in (*families, *_other_families()):
        if code in _characters(family):
            mpl.rcParams["font.family"] = [*families, *[family] * (family not in families)]
            return True
    return False


@functools.cache
def _other_families() -> tuple[str, ...]:
    names = {font.name for font in font_manager.fontManager.ttflist}
    return tuple(sorted(name for name in names if not name.startswith(_NO_FONT)))


@functools.cache
def _characters(family: str) -> frozenset[int]:
    try:
        path = font_manager.findfont(
            font_manager.FontProperties(family=[family]), fallback_to_default=False
        )
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError, ValueError):  # removed, or not what matplotlib can read
        return frozenset()


def draw(ax: Axes, metric: Metric, x_axis: XAxis, runs: int = 1, points: int = MOST_POINTS) -> None:
    """Draw a metric of one or several runs, with a band from least to greatest if thinned.

    Lines of run i have the gid ``run{i}-{part}``. The lines of one run are colored by part, else by
    run.
    """
    if metric.log:
        ax.set_yscale("log")
    several, parts = runs > 1, metric.parts
    for (run, part), curve in metric.curves.items():
        first = part in (parts[0], NOT_PRIVATE)
        faint = len(parts) > 1 and first and (several or "averaged" in parts)
        index = run if several else int(part in ("test", "averaged"))
        color = COLORS[index % len(COLORS)]
        x, mean, low, high = thin(x_axis.of(curve), curve.values, points)
        if len(x) < len(curve.values):
            band: dict[str, Any] = {"alpha": 0.2, "lw": 0, "clip_on": False, "gid": f"run{run}"}
            ax.fill_between(x, low, high, color=color, **band)
        dots = len(x) == 1 or (part == "test" and len(x) <= 40)
        look: dict[str, Any] = {"lw": 1 if faint else 1.5, "alpha": 0.6 if faint else 1}
        look |= {"marker": "o" if dots else "", "ms": 4, "color": color, "clip_on": False}
        dashes = DASHES[index // len(COLORS) % len(DASHES)]
        label = f"{metric.label(part)} {metric.scale.text(curve.values[-1])}".strip()
        ax.plot(x, mean, ls=dashes, gid=f"run{run}-{part}", label=label, **look)
    _scale(ax, metric)
    margin = 0 if x_axis.high > x_axis.low else 0.5
    ax.set_xlim(x_axis.low - margin, x_axis.high + margin)
    ax.xaxis.set_major_locator(round_ticks())
    style(ax)


def _scale(ax: Axes, metric: Metric) -> None:
    low = min(curve.values.min() for curve in metric.curves.values())
    high = max(curve.values.max() for curve in metric.curves.values())
    if metric.log:
        subs = (1, 2, 5) if high < 200 * low else (1,)
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=6))
        ax.yaxis.set_minor_locator(ticker.NullLocator())
        ax.yaxis.set_major_formatter(lambda value, _: number(value))
        return
    ax.yaxis.set_major_locator(round_ticks())
    if metric.scale.text is percent:
        ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.6g}%")
        if high <= 1:
            ax.set_ylim(top=min(ax.get_ylim()[1], 1))
    bottom = ax.get_ylim()[0]
    if low >= 0 and (metric.scale.from_zero or bottom < 0):
        ax.set_ylim(bottom=0)


def style(ax: Axes) -> None:
    """Leave a panel with horizontal grid lines and without a frame."""
    ax.grid(axis="y", color=GRID_COLOR, lw=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(GRID_COLOR)
    ax.tick_params(length=0)


def round_ticks() -> ticker.Locator:
    """Return a locator of about five ticks that are multiples of 1, 2, 2.5 or 5."""
    return ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])


def curves(lines: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write curves.png: loss, scores, learning rate and the like over the steps of a run."""
    metrics = [m for m in metrics_of([read_curves(lines)]) if m.name in _ON_PICTURE]
    steps = np.concatenate([c.steps for m in metrics for c in m.curves.values()] or [np.zeros(1)])
    figure = Figure(figsize=(4 * max(len(metrics), 1), 3.8), layout="constrained")
    figure.suptitle(title, parse_math=False)
    for i, metric in enumerate(metrics):
        ax = figure.add_subplot(1, len(metrics), i + 1)
        draw(ax, metric, XAxis("step", 0.0, steps.max()))
        ax.set_title(metric.title, fontsize=10, loc="left")
        ax.set_xlabel("step")
        ax.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
