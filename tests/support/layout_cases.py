"""Layouts, read element by element."""

import numpy as np


def numbers(layout):
    """The number of each element in the array."""
    result = np.full(layout.shape, layout.start)
    for k, (axis, length) in enumerate(zip(layout.axes, layout.shape, strict=True)):
        left, offsets = np.arange(length), np.zeros(length, int)
        for n, stride in reversed(axis):
            left, digits = np.divmod(left, max(n, 1))
            offsets += digits * stride
        result += offsets.reshape([-1 if i == k else 1 for i in range(layout.ndim)])
    return result
