"""Text that the installed fonts can draw."""

import functools

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.font_manager import FontProperties

_NO_FONT = "Last Resort"
"""Begins the name of matplotlib's font that draws any character as a box."""


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
        path = font_manager.findfont(FontProperties(family=[family]), fallback_to_default=False)
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError, ValueError):  # removed, or not what matplotlib can read
        return frozenset()
