"""Chart of the first page: memory of a gradient by depth, with and without in-place layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SOURCE = "abn_stack_on_cpu"
"""Benchmark that the data come from."""

# Grey for baselines. The others are from Okabe and Ito 2008, for readers with color blindness.
_COLORS = ("#555555", "#0072B2", "#999999", "#D55E00")


def memory_by_depth(results: Mapping[str, Mapping[str, Any]], path: Path) -> bool:
    """Draw temporaries by depth as a PNG.

    Args:
      results: Results by benchmark. The data of `SOURCE` are ``{"depths": [...], "network": text,
        "temporaries": {name: [bytes at each depth]}}``.
      path: Path of the PNG.

    Returns:
      Whether the results hold data to draw.
    """
    data = results.get(SOURCE, {}).get("data")
    if not data:
        return False
    depths = data["depths"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    lines = {name: [size / 1e6 for size in sizes] for name, sizes in data["temporaries"].items()}
    last = {name: sizes[-1] for name, sizes in lines.items()}
    heights = _apart(last, 0.12 * max(last.values()))
    for color, (name, sizes) in zip(_COLORS, lines.items(), strict=False):
        ax.plot(depths, sizes, color=color, marker="o", ms=5, lw=2)
        ax.annotate(
            f"{name}\n{last[name]:,.0f} MB",
            (depths[-1], heights[name]),
            xytext=(10, 0),
            textcoords="offset points",
            color=color,
            va="center",
            annotation_clip=False,
        )
    ax.set_title("Memory of a gradient by depth", loc="left", weight="bold")
    ax.set_xlabel(f"blocks: {data['network']}")
    ax.set_ylabel("temporaries, MB")
    ax.set_xticks(depths)
    ax.set_xlim(0, depths[-1] * 1.02)
    ax.set_ylim(0, 1.05 * max(heights.values()))
    ax.grid(axis="y", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return True


def _apart(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move labels up where they would be closer than a gap."""
    apart: dict[str, float] = {}
    for name in sorted(heights, key=lambda name: heights[name]):
        lowest = max(apart.values(), default=-gap) + gap
        apart[name] = max(heights[name], lowest)
    return apart
