"""Numbers as text."""

import math


def number(value: float) -> str:
    """Write a number with four digits: ``0.1012``, ``12,346``, ``1.866e-6``."""
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    mantissa, e, exponent = f"{value:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def percent(value: float) -> str:
    """Write a share of 1 as a percentage: ``0.97188 -> "97.19%"``."""
    return f"{value:.2%}"


def duration(seconds: float) -> str:
    """Write a time: ``75 -> "1 min 15 s"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def clock(seconds: float) -> str:
    """Write a time as on a clock: ``75 -> "1:15"``, ``3675 -> "1:01:15"``; nan as ``"-:--"``."""
    if math.isnan(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
