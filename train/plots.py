"""A picture of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


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
