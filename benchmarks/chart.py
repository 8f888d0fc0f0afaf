"""Picture of the first page: what each kind of block saves, and memory of a gradient by depth."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

SOURCE = "abn_stack_on_cpu"
"""Benchmark that the data come from."""

ARRAYS = "conv", "norm", "act"
"""Arrays that a block computes, in order."""

BLOCKS = 3
"""Number of blocks in the diagram."""


class Kind(NamedTuple):
    """A network in both parts of the picture.

    Attributes:
      source: its name in the data of `SOURCE`.
      label: name in the picture.
      saved: arrays of `ARRAYS` that each block saves.
      restored: how the backward pass gets the others.
      light: color on white. The colors are from Okabe and Ito 2008, for readers with color
        blindness; those on dark are lighter.
      dark: color on black.
    """

    source: str
    label: str
    saved: tuple[str, ...]
    restored: str
    light: str
    dark: str


KINDS = (
    Kind(
        "flax BatchNorm, leaky_relu",
        "plain flax",
        ARRAYS,
        "nothing to restore",
        "#555555",
        "#BBBBBB",
    ),
    Kind(
        "jnp, jax.checkpoint per block",
        "jax.checkpoint",
        ("act",),
        "computes each block again",
        "#B8860B",
        "#F0C040",
    ),
    Kind(
        "fnet.abn, leaky_relu",
        "fnet, in-place norm",
        ("act",),
        "inverts norm and activation",
        "#0072B2",
        "#56B4E9",
    ),
    Kind(
        "fnet.reversible", "fnet, reversible", (), "computes each block again", "#C04A00", "#FF9D5C"
    ),
)


class Theme(NamedTuple):
    """Colors of a picture for light or dark pages."""

    dark: bool
    text: str
    page: str

    def color(self, kind: Kind) -> str:
        """Color of a network."""
        return kind.dark if self.dark else kind.light


LIGHT = Theme(False, "#202020", "#FFFFFF")
DARK = Theme(True, "#E8E8E8", "#1E2129")


def memory_by_depth(
    results: Mapping[str, Mapping[str, Any]], path: Path, theme: Theme = LIGHT
) -> bool:
    """Draw the picture as a PNG or SVG, if the results hold data for it; return whether.

    Args:
      results: Results by benchmark. The data of `SOURCE` are ``{"depths": [...], "network": text,
        "temporaries": {name: [bytes at each depth]}}``.
      path: Path of the picture; its suffix is the format.
      theme: Colors. The background is opaque.
    """
    result = results.get(SOURCE, {})
    data = result.get("data")
    if not data:
        return False
    style: Any = {
        "svg.hashsalt": SOURCE,  # the same file for the same data
        "font.size": 13,
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "axes.edgecolor": theme.text,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 8.4), facecolor=theme.page)
        FigureCanvasAgg(figure)
        _draw_arrays(figure.add_axes((0.02, 0.56, 0.96, 0.39)), theme)
        below = figure.add_axes((0.1, 0.12, 0.57, 0.36))
        jax_version = result.get("versions", {}).get("jax", "")
        _draw_curves(below, data, theme, f"CPU, jax {jax_version}" if jax_version else "CPU")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    return True


def _draw_arrays(ax: Axes, theme: Theme) -> None:
    """Draw a row of arrays for each network, filled if the block saves them."""
    size, gap, first = 0.5, 0.12, 3.5
    width = len(ARRAYS) * (size + gap) + gap
    ax.set_title("What the forward pass saves for the backward pass", loc="left", weight="bold")
    for row, kind in enumerate(KINDS):
        y, color = -row, theme.color(kind)
        ax.text(0, y, kind.label, color=color, va="center", weight="bold")
        for block in range(BLOCKS):
            left = first + block * (width + 0.25)
            corners = "round,pad=0,rounding_size=0.1"
            ax.add_patch(
                FancyBboxPatch(
                    (left, y - 0.38),
                    width,
                    0.76,
                    boxstyle=corners,
                    facecolor="none",
                    edgecolor=theme.text,
                    alpha=0.35,
                )
            )
            for i, array in enumerate(ARRAYS):
                saved = array in kind.saved
                corner = left + gap + i * (size + gap)
                ax.add_patch(
                    Rectangle(
                        (corner, y - 0.24),
                        size,
                        0.48,
                        facecolor=color if saved else "none",
                        edgecolor=color,
                        linestyle="-" if saved else ":",
                        linewidth=1.5,
                    )
                )
                if row == 0:
                    ax.text(corner + size / 2, 0.5, array, ha="center", size=10)
        count = len(kind.saved)
        arrays = f"{count} array{'s' * (count != 1)} per block"
        right = first + BLOCKS * (width + 0.25) + 0.1
        ax.text(right, y + 0.19, arrays, color=color, va="center", weight="bold", size=12)
        ax.text(right, y - 0.21, kind.restored, va="center", size=11)
    ax.set_xlim(0, 13.6)
    ax.set_ylim(-len(KINDS) + 0.5, 0.8)
    ax.set_axis_off()


def _draw_curves(ax: Axes, data: Mapping[str, Any], theme: Theme, device: str) -> None:
    """Draw temporaries by depth, with the name of each network at its line."""
    depths = data["depths"]
    drawn = {
        kind: [size / 1e6 for size in data["temporaries"][kind.source]]
        for kind in KINDS
        if kind.source in data["temporaries"]
    }
    last = {kind.label: sizes[-1] for kind, sizes in drawn.items()}
    heights = _apart(last, 0.08 * max(last.values(), default=1))
    for kind, sizes in drawn.items():
        color = theme.color(kind)
        ax.plot(depths, sizes, color=color, marker="o", ms=6, lw=2.5)
        ax.annotate(
            f"{kind.label}: {sizes[-1]:,.0f} MB",
            (depths[-1], heights[kind.label]),
            xytext=(12, 0),
            textcoords="offset points",
            color=color,
            va="center",
            weight="bold",
            annotation_clip=False,
        )
    ax.set_title("Memory of a gradient by depth", loc="left", weight="bold")
    ax.set_xlabel(f"blocks: {data['network']}\n{device}", x=0, ha="left")
    ax.set_ylabel("temporaries, MB")
    ax.set_xticks(depths)
    ax.set_xlim(0, depths[-1] * 1.02)
    ax.set_ylim(0, 1.05 * max([*heights.values(), 1]))
    ax.set_facecolor("none")
    ax.grid(axis="y", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def _apart(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move labels up where they would be closer than a gap."""
    apart: dict[str, float] = {}
    for name in sorted(heights, key=lambda name: heights[name]):
        lowest = max(apart.values(), default=-gap) + gap
        apart[name] = max(heights[name], lowest)
    return apart
