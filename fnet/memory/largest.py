"""The largest size that fits: found from few measurements of something nearly linear."""

from collections.abc import Callable

_TOLERANCE = 0.02


def largest(peak: Callable[[int], int], limit: int, start: int) -> int | None:
    """The largest ``n`` with ``peak(n) <= limit``, to within 2 % of it.

    ``peak`` is assumed to grow with ``n``, about linearly: each probe is where the
    line through the two nearest measurements meets the limit.

    Args:
      peak: bytes at size n, for example of a step compiled for a batch of n.
      limit: bytes.
      start: a size to begin with, >= 1.

    Returns:
      The size, or None where not even 1 fits.

    Raises:
      ValueError: if ``start < 1``, from where doubling leads nowhere.
    """
    if start < 1:
        raise ValueError(f"largest: start must be at least 1, got {start}")
    fitting: tuple[int, int] | None = None
    too_large: tuple[int, int] | None = None
    n = start
    while True:
        bytes_ = peak(n)
        if bytes_ <= limit:
            fitting = (n, bytes_)
        else:
            too_large = (n, bytes_)
        if too_large is None:
            n *= 2
        elif fitting is None:
            if n == 1:
                return None
            n //= 2
        else:
            (low, least), (high, most) = fitting, too_large
            if high - low <= max(1, _TOLERANCE * low):
                return low
            meets = low + (high - low) * (limit - least) / (most - least)
            # A little above the line, then a little below: the bracket closes from both sides.
            aim = meets * (1 + _TOLERANCE / 4) if n == low else meets * (1 - _TOLERANCE / 4)
            n = min(max(int(aim), low + 1), high - 1)
