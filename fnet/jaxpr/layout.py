"""Which element of an array is where after it was reshaped, transposed, sliced or broadcast."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

Factors = tuple[tuple[int, int], ...]
"""Sizes and strides, outermost first. The digits of an index in these sizes select an element."""

_MOST_SUMS = 10_000
"""Sums of strides that `Layout.may_overlap` compares before it gives up."""


class NoLayoutError(ValueError):
    """No factors describe the order of the elements."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Elements of an array in another arrangement, by their numbers in row-major order.

    The index of an axis is a number with one digit per factor of the axis. Each digit counts
    steps of the factor's stride:

        number(i, j, ...) = start + sum_k digit_k stride_k

    Layouts are equal if and only if they have the same elements in the same order. They have the
    methods of an array that only move elements, so one function moves an array and its layout.

    Attributes:
      whole: Shape of the array.
      start: Number of the first element.
      axes: Factors of each axis, `merged`.
    """

    whole: tuple[int, ...]
    start: int
    axes: tuple[Factors, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Layout":
        """Return the layout of a whole array."""
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        axes = (merged([factor]) for factor in zip(shape, strides, strict=True))
        return cls(tuple(shape), 0, tuple(axes))

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return tuple(math.prod(n for n, _ in axis) for axis in self.axes)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.axes)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def factors(self) -> Factors:
        """Factors of all axes."""
        return tuple(itertools.chain(*self.axes))

    @property
    def has_repeats(self) -> bool:
        """Whether an element occurs more than once, after a broadcast."""
        return any(not stride for _, stride in self.factors)

    def transpose(self, order: Sequence[int]) -> "Layout":
        """Permute the axes."""
        return dataclasses.replace(self, axes=tuple(self.axes[i] for i in order))

    def reshape(self, shape: Sequence[int]) -> "Layout":
        """Split and join axes; a length of -1 follows from the others."""
        sizes = list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.size // -math.prod(sizes)
        if not self.size:
            return dataclasses.replace(self, axes=tuple(merged([(n, 1)]) for n in sizes))
        rest, axes = list(merged(self.factors)), []
        for length in sizes:
            own = []
            while length > 1:
                n, stride = rest.pop(0)
                taken = math.gcd(n, length)
                if taken not in (n, length):
                    raise NoLayoutError
                own.append((taken, stride * (n // taken)))
                if taken < n:
                    rest.insert(0, (n // taken, stride))
                length //= taken
            axes.append(merged(own))
        return dataclasses.replace(self, axes=tuple(axes))

    def broadcast_to(self, shape: Sequence[int]) -> "Layout":
        """Repeat elements along axes of length 1."""
        pairs = zip(self.axes, self.shape, shape, strict=True)
        axes = (axis if n == m else merged([(m, 0)]) for axis, n, m in pairs)
        return dataclasses.replace(self, axes=tuple(axes))

    def __getitem__(self, index: Any) -> "Layout":
        """Select elements with numbers and slices, one per axis or fewer."""
        indices = index if isinstance(index, tuple) else (index,)
        indices += (slice(None),) * (self.ndim - len(indices))
        start, axes = self.start, []
        for axis, length, own in zip(self.axes, self.shape, indices, strict=True):
            numbers = range(length)
            chosen = numbers[own] if isinstance(own, slice) else numbers[own:][:1]
            offset, factors = _select(axis, chosen)
            start += offset
            if isinstance(own, slice):
                axes.append(merged(factors))
        return dataclasses.replace(self, start=start, axes=tuple(axes))

    def may_overlap(self, other: "Layout") -> bool:
        """Whether two layouts of one array may have an element in common.

        They have if a sum of strides of both leads from one start to the other. The search goes
        from large strides to small ones. It keeps what is left of the distance and can still be
        reached. False is exact. True may be wrong only after `_MOST_SUMS` sums.
        """
        if not self.size or not other.size:
            return False
        distance, steps = other.start - self.start, collections.Counter[int]()
        for n, stride in (*self.factors, *((n, -stride) for n, stride in other.factors)):
            # Digits of negative strides are counted from their end.
            distance -= min(stride, 0) * (n - 1)
            steps[abs(stride)] += n - 1
        del steps[0]
        distances, reach = {distance}, sum(stride * n for stride, n in steps.items())
        strides = sorted(steps, reverse=True)
        for k, stride in enumerate(strides):
            reach -= stride * steps[stride]
            rest = math.gcd(*strides[k + 1 :])
            sums = (
                left - stride * digit
                for left in distances
                for digit in range(
                    max(0, -((reach - left) // stride)), min(steps[stride], left // stride) + 1
                )
            )
            some = list(itertools.islice(sums, _MOST_SUMS))
            if len(some) == _MOST_SUMS:
                return True
            distances = {left for left in some if not left or (rest and left % rest == 0)}
        return 0 in distances


def merged(factors: Iterable[tuple[int, int]]) -> Factors:
    """Join factors that count on where the next one ends, and drop those of size 1."""
    joined: list[tuple[int, int]] = []
    for n, stride in factors:
        if n != 1 and joined and joined[-1][1] == n * stride:
            joined[-1] = (joined[-1][0] * n, stride)
        elif n != 1:
            joined.append((n, stride))
    return tuple(joined)


def _select(axis: Factors, chosen: range) -> tuple[int, Factors]:
    """Return the start and the factors of some indices of an axis."""
    if not chosen:
        return 0, ((0, 1),)
    if not axis:
        return 0, ()
    if chosen.step < 0:
        start, factors = _select(axis, chosen[::-1])
        last = start + sum((n - 1) * stride for n, stride in factors)
        return last, tuple((n, -stride) for n, stride in factors)
    (_, stride), *others = axis
    inner, step, count = math.prod(n for n, _ in others), chosen.step, len(chosen)
    digit, first = divmod(chosen[0], inner)
    if chosen[-1] // inner == digit and others:  # All have this digit.
        start, factors = _select(tuple(others), range(first, first + count * step, step))
        return digit * stride + start, factors
    if step % inner == 0:  # All differ in this digit alone.
        start, _ = _select(tuple(others), range(first, first + 1))
        return digit * stride + start, ((count, stride * (step // inner)),)
    each = inner // step
    if inner % step == 0 and first < step and count % each == 0:  # The same for every digit.
        start, factors = _select(tuple(others), range(first, inner, step))
        return digit * stride + start, ((count // each, stride), *factors)
    raise NoLayoutError
