"""Pictures of a run: its curves, its memory, what it makes of examples."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from train.output.palette import overlay_labels, voc_colors
from train.run.account import Account
from train.run.metrics import noise_scale_course


def curves(lines: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Loss, accuracy and learning rate over the steps, training and test, as a PNG.

    Where they were measured, epsilon spent and the gradient noise scale as well: as far
    as the estimate of |G|^2 is above 0.

    Args:
      lines: of metrics.jsonl: ``{"step": ..., "train/loss": ..., "test/loss": ...}``.
      title: above the picture.
      path: where it is written.
    """
    panels: list[Callable[[Axes, Lines], None]] = [_loss, _learning_rate]
    for name in ("mean_iou", "pixel_accuracy", "accuracy"):
        if any(f"{split}/{name}" in line for line in lines for split in ("train", "test")):
            panels.insert(1, functools.partial(_share, name=name))
    if any("privacy/epsilon" in line for line in lines):
        panels.append(_epsilon)
    if any("train/noise_scale" in line for line in lines):
        panels.append(_noise_scale)
    figure = Figure(figsize=(4 * len(panels), 3.8), layout="constrained")
    figure.suptitle(title)
    for ax, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        panel(ax, lines)
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


Lines = Sequence[dict[str, Any]]

_TEST = {"marker": "o", "ms": 3}


def _loss(ax: Axes, lines: Lines) -> None:
    for split, style in (("train", {}), ("test", _TEST)):
        last = [line[key] for line in lines if (key := f"{split}/loss") in line][-1:]
        label = f"{split} {last[0]:.3f}" if last else None
        _plot(ax, lines, f"{split}/loss", label=label, **style)
    ax.set_ylabel("loss")
    losses = [line[k] for line in lines for k in ("train/loss", "test/loss") if k in line]
    if min(losses, default=0) > 0 and max(losses) > 10 * min(losses):
        ax.set_yscale("log")
    ax.legend(frameon=False)


def _share(ax: Axes, lines: Lines, name: str) -> None:
    for split, style in (("train", {}), ("test", _TEST)):
        last = [line[key] for line in lines if (key := f"{split}/{name}") in line][-1:]
        if last:
            _plot(ax, lines, f"{split}/{name}", label=f"{split} {last[0]:.2%}", **style)
    ax.set_ylabel(name.replace("_", " ").replace("iou", "IoU"))
    ax.legend(frameon=False)


def _learning_rate(ax: Axes, lines: Lines) -> None:
    _plot(ax, lines, "train/learning_rate")
    ax.set_ylabel("learning rate")


def _epsilon(ax: Axes, lines: Lines) -> None:
    _plot(ax, lines, "privacy/epsilon")
    ax.set_ylabel("epsilon spent")
    ax.set_ylim(bottom=0)


def _noise_scale(ax: Axes, lines: Lines) -> None:
    _plot(ax, lines, "train/noise_scale", label="between two lines", ls="", marker=".", alpha=0.4)
    course = noise_scale_course(lines)
    if course:
        step, last = course[-1]
        label = f"averaged, {last:,.0f} at step {step}"
        ax.plot(*zip(*course, strict=True), lw=1.2, label=label)
    ax.set_ylabel("simple noise scale, examples")
    ax.set_yscale("log")
    ax.legend(frameon=False, loc="upper left")


def _plot(ax: Axes, lines: Lines, key: str, **style: Any) -> None:
    points = [(line["step"], line[key]) for line in lines if key in line]
    if points:
        ax.plot(*zip(*points, strict=True), **({"lw": 1.2} | style))


def image_grid(images: np.ndarray, names: Sequence[str], title: str, path: Path) -> None:
    """Images [rows, columns, H, W, C] in [0, 1], a named row each, in the suffix's format or PNG.

    One channel is shown as ink on paper, of several the first three.
    """
    rows, columns, h, w, c = images.shape
    # A pixel of paper around each.
    framed = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
    whole = framed.swapaxes(1, 2).reshape(rows * (h + 2), columns * (w + 2), c)
    figure = Figure(figsize=(1 + 0.6 * columns, 1 + 0.6 * rows), layout="constrained")
    ax = figure.subplots()
    ax.imshow(_rgb(whole))
    ax.set_yticks((np.arange(rows) + 0.5) * (h + 2) - 0.5, names, parse_math=False)
    ax.set_xticks([])
    ax.set_title(title, fontsize=9)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    # By itself matplotlib would write photo.png where photo is asked for.
    figure.savefig(path, dpi=110, format=path.suffix[1:] or "png")


def classifications(
    images: np.ndarray, words: Sequence[str], right: Sequence[bool], title: str, path: Path
) -> None:
    """Images with what is said of each above it, in red where that is wrong, as a PNG.

    Args:
      images: [N, H, W, C], uint8, or floating and shown as far as it is in [0, 1]; one channel
        is shown as ink on paper.
      words: of each.
      right: likewise.
      title: above the picture.
      path: where it is written.
    """
    columns = min(len(images), 6)
    above = 0.3  # of an image's height, for two lines of words
    figure, ax, corners = _tiled(_rgb(images), columns, above, title, inches=1.7)
    height, width = images.shape[1:3]
    for (x, y), text, is_right in zip(corners, words, right, strict=True):
        ink = "black" if is_right else "#cc3311"
        ax.text(
            x + width / 2,
            y - 0.03 * height,
            text,
            ha="center",
            va="bottom",
            size=7,
            color=ink,
            parse_math=False,
        )
    figure.savefig(path, dpi=110)


def segmentations(
    images: np.ndarray,
    truths: np.ndarray,
    predictions: np.ndarray,
    classes: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Images, what is there and what is seen, side by side, with a legend, as a PNG.

    Args:
      images: uint8 [N, H, W, 3].
      truths: [N, H, W], labels; those beyond the classes are painted as void.
      predictions: likewise.
      classes: names; the legend has those that are there or seen.
      title: above the picture.
      path: where it is written.
    """
    truths = np.where(truths < len(classes), truths, 255)
    pictures = [
        picture
        for image, truth, found in zip(images, truths, predictions, strict=True)
        for picture in (image, overlay_labels(image, truth), overlay_labels(image, found))
    ]
    figure, ax, corners = _tiled(np.stack(pictures), 3, 0.1, title, inches=3.0)
    height, width = images.shape[1:3]
    for (x, y), name in zip(corners[:3], ("image", "truth", "prediction"), strict=True):
        ax.text(x + width / 2, y - 0.02 * height, name, ha="center", va="bottom", size=8)
    there = [i for i in np.union1d(truths, predictions) if i < len(classes)]
    handles = [Patch(color=voc_colors()[i] / 255, label=_short(classes[i])) for i in there]
    legend = ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        ncols=4,
        fontsize=7,
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _rgb(images: np.ndarray) -> np.ndarray:
    """Images as bytes of red, green and blue: the first three channels, or ink on paper."""
    if images.dtype != np.uint8:
        images = (255 * np.clip(images, 0, 1)).round().astype(np.uint8)
    if images.shape[-1] >= 3:
        return images[..., :3]
    return np.repeat(255 - images.mean(-1, keepdims=True).astype(np.uint8), 3, -1)


def _tiled(
    images: np.ndarray, columns: int, above: float, title: str, *, inches: float
) -> tuple[Figure, Axes, list[tuple[float, float]]]:
    """Images in rows on white, with room above each; as one picture, which is drawn at once.

    Args:
      images: uint8 [N, H, W, 3].
      columns: of each row.
      above: the room, of an image's height.
      title: above all.
      inches: of a column.

    Returns:
      The figure, its axes, and x and y of each image's upper left corner in them.
    """
    n, height, width, _ = images.shape
    rows, room, beside = -(-n // columns), max(round(above * height), 1), max(width // 16, 1)
    whole = np.full((rows * (height + room), columns * (width + beside), 3), 255, np.uint8)
    corners = []
    for i, image in enumerate(images):
        y, x = i // columns * (height + room) + room, i % columns * (width + beside)
        whole[y : y + height, x : x + width] = image
        corners.append((x - 0.5, y - 0.5))  # a pixel's place is that of its middle
    across = inches * columns
    figure = Figure(figsize=(across, across * whole.shape[0] / whole.shape[1] + 0.4))
    ax = figure.add_axes((0, 0, 1, 1 - 0.4 / figure.get_figheight()))
    ax.imshow(whole, interpolation="nearest")
    ax.set_title(title, fontsize=10)
    ax.axis("off")
    return figure, ax, corners


def confusion_matrix(matrix: np.ndarray, classes: Sequence[str], title: str, path: Path) -> None:
    """What was taken for what, as a PNG: each row, a true class, as shares of its examples.

    Cells are numbered, and classes named, as far as there is room.

    Args:
      matrix: [true, predicted], counts.
      classes: their names.
      title: above the picture, with the share that is right.
      path: where it is written.
    """
    n = len(matrix)
    counts = matrix.sum(1, keepdims=True)
    shares = matrix / np.maximum(counts, 1)
    side = min(3 + 0.4 * n, 14)
    figure = Figure(figsize=(side, side), layout="constrained")
    ax = figure.subplots()
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    right = np.trace(matrix) / max(matrix.sum(), 1)
    ax.set_title(f"{title}: {right:.2%} right", fontsize=10)
    ax.set_ylabel("true")
    ax.set_xlabel("predicted")
    if n <= 50:
        ax.set_yticks(range(n), classes, parse_math=False)  # a name with dollars is no formula
        ax.set_xticks(
            range(n), classes, rotation=60, ha="right", rotation_mode="anchor", parse_math=False
        )
        ax.tick_params(labelsize=8)
    if n <= 20:
        for i, j in np.ndindex(n, n):
            if matrix[i, j]:
                ink = "white" if shares[i, j] > 0.5 else "black"
                ax.text(j, i, f"{shares[i, j]:.0%}", ha="center", va="center", color=ink, size=6)
    figure.savefig(path, dpi=110)


def memory(account: Account, title: str, path: Path) -> None:
    """What is kept by layer, and the bytes alive while the compiled step runs, as a PNG.

    Args:
      account: of a compiled train step.
      title: above the picture.
      path: where it is written.
    """
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    figure.suptitle(title)
    by_layer, over_time = figure.subplots(1, 2)
    sizes = [layer.bytes / 2**20 for layer in account.kept]
    by_layer.bar(range(len(sizes)), sizes, color="#4477aa")
    by_layer.set_xticks(
        range(len(sizes)), [_short(r.layer) for r in account.kept], rotation=60, ha="right"
    )
    by_layer.tick_params("x", labelsize=7)
    by_layer.set_title("kept for the backward pass, forward from left to right", fontsize=10)
    by_layer.set_ylabel("MiB")
    assigned = account.planned.executable.report.peak.assigned
    if account.timeline:
        live = [b / 2**20 for b in account.timeline.live_bytes]
        over_time.fill_between(range(len(live)), live, step="post", color="#4477aa", alpha=0.7)
        over_time.axvline(account.timeline.peak_index, color="#cc3311", lw=1)
    over_time.axhline(
        assigned / 2**20, color="#cc3311", lw=1, ls="--", label="peak, as the compiler assigned it"
    )
    over_time.set_title("alive while the compiled step runs", fontsize=10)
    over_time.set_xlabel("instruction, in the order of the schedule")
    over_time.set_ylabel("MiB")
    over_time.set_ylim(bottom=0)
    over_time.legend(frameon=False, loc="lower right")
    for ax in (by_layer, over_time):
        ax.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=110)


def _short(name: str, most: int = 32) -> str:
    return name if len(name) <= most else "…" + name[-most + 1 :]
