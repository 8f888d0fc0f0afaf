"""Pictures of a run: its curves, its memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from train.account import Account


def curves(lines: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Loss, accuracy and learning rate over the steps, training and test, as a PNG.

    Args:
      lines: of metrics.jsonl: ``{"step": ..., "train/loss": ..., "test/loss": ...}``.
      title: above the picture.
      path: where it is written.
    """
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(1, 3)
    for ax, name in zip(axes, ("loss", "accuracy", "learning_rate"), strict=True):
        for split, style in (("train", {"lw": 1.2}), ("test", {"lw": 1.2, "marker": "o", "ms": 3})):
            points = [(r["step"], r[key]) for r in lines if (key := f"{split}/{name}") in r]
            if points:
                last = f"{split} {points[-1][1]:.2%}" if name == "accuracy" else split
                ax.plot(*zip(*points, strict=True), label=last, **style)
        ax.set_xlabel("step")
        ax.set_ylabel({"loss": "loss (nats)", "learning_rate": "learning rate"}.get(name, name))
        ax.grid(alpha=0.3)
        if name == "loss":
            ax.set_yscale("log")
        if name != "learning_rate":
            ax.legend(frameon=False)
    figure.savefig(path, dpi=110)


def memory(account: Account, title: str, path: Path) -> None:
    """What is kept by layer, and the bytes alive while the compiled step runs, as a PNG.

    Args:
      account: of a compiled train step.
      title: above the picture.
      path: where it is written.
    """
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
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
