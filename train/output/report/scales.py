"""How numbers read, and where an axis has its ticks."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fnet.memory import format_bytes

Format = Callable[[float], str]


class Kind(NamedTuple):
    """What numbers are of.

    Attributes:
      words: of one of them, where there is room.
      from_zero: whether an axis of them begins at 0.
      logarithmic: whether an axis may be: it is where all are above 0 and the largest is
        more than ten times the smallest.
      most: beyond which there are none.
      unit: of ticks: 1, or 1024 for bytes.
    """

    words: Format
    from_zero: bool = False
    logarithmic: bool = False
    most: float = math.inf
    unit: int = 1


def number(value: float) -> str:
    """Four digits: ``0.1012``, ``12,346``, ``1.866e-6``."""
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return _short_exponent(f"{value:.4g}")


def share(value: float) -> str:
    """``0.97188 -> "97.19%"``."""
    return f"{value:.2%}"


def duration(seconds: float) -> str:
    """``75 -> "1 min 15 s"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


NUMBER = Kind(number)
AMOUNT = Kind(number, from_zero=True)
SCORE = Kind(number, logarithmic=True)
SHARE = Kind(share, most=1.0)
SHARE_OF_TIME = Kind(share, from_zero=True, most=1.0)
BYTES = Kind(lambda value: format_bytes(round(value)), from_zero=True, unit=1024)


class Axis(NamedTuple):
    """A range of numbers, and the ticks in it.

    Attributes:
      low: where it begins.
      high: where it ends.
      logarithmic: whether equal ratios are equally far apart.
      ticks: (value, words).
    """

    low: float
    high: float
    logarithmic: bool
    ticks: list[tuple[float, str]]

    def place(self, values: np.ndarray) -> np.ndarray:
        """Values as shares of the way from low to high."""
        if self.logarithmic:
            return np.log(values / self.low) / math.log(self.high / self.low)
        return (values - self.low) / (self.high - self.low)


def axis(kind: Kind, low: float, high: float, most: int = 5) -> Axis:
    """An axis that holds all from low to high, with a little room.

    Args:
      kind: of the numbers.
      low: the smallest of them.
      high: the largest of them.
      most: ticks, about.
    """
    if kind.logarithmic and low > 0 and high > 10 * low:
        room = (high / low) ** 0.03
        low, high = low / room, high * room
        return Axis(low, high, True, _logarithmic_ticks(low, high, most))
    room = 0.04 * (high - low) or 0.1 * abs(high) or 0.5
    below = 0.0 if kind.from_zero and low >= 0 else low - room
    above = high + room if high > kind.most else min(high + room, kind.most)
    if low >= 0:
        below = max(below, 0.0)
    if not above > below:
        below, above = below - room, above + room
    return Axis(below, above, False, _ticks(below, above, kind, most))


def steps_axis(low: float, high: float, most: int = 5) -> Axis:
    """An axis along the run, without room beside it."""
    if not high > low:
        low, high = low - 0.5, high + 0.5
    return Axis(low, high, False, _ticks(low, high, NUMBER, most))


def _ticks(low: float, high: float, kind: Kind, most: int) -> list[tuple[float, str]]:
    unit = 1
    while kind.unit > 1 and high >= unit * kind.unit and unit < kind.unit**4:
        unit *= kind.unit
    low, high = low / unit, high / unit
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.75)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [i * step for i in range(first, last + 1)]
    if kind.unit > 1:
        name = format_bytes(unit).split()[1]
        return [(v * unit, f"{v:.12g} {name}" if v else "0") for v in values]
    return [(v, _tick(v, kind, step)) for v in values]


def _logarithmic_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // most)
    factors = (1,) if last - first > 3 else (1, 3) if last - first > 2 else (1, 2, 5)
    values = [f * 10.0**p for p in range(first, last + 1, every) for f in factors]
    return [(v, _tick(v, NUMBER, v)) for v in values if low <= v <= high]


def _tick(value: float, kind: Kind, step: float) -> str:
    if kind.words is share:
        return f"{value:.{_decimals(100 * step)}%}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size > 1e3):
            return f"{value / size:.6g}{letter}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return _short_exponent(f"{value:.6g}")


def _decimals(step: float) -> int:
    return min(max(0, -math.floor(math.log10(step) + 1e-9)), 6)


def _short_exponent(text: str) -> str:
    """``"1.5e-06" -> "1.5e-6"``."""
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text
