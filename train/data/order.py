"""Order of training rows: of shards, of equally frequent classes, of repeated augmentation."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_LANES = 8
MIN_LANE_ROWS = 512
"""Rows per epoch of each source that a lane needs, so that lanes stay in the same epoch: their
numbers of rows differ by one."""
_MAX_WINDOW = 8
_MIX_PERIOD = 2**16


class Rows(NamedTuple):
    """Rows of one source of a mixture.

    Attributes:
      blocks: Number of rows in each block, [blocks]. The rows of a block are stored together, such
        as in a row group of Parquet, so that it is cheap to read them at about the same time.
      block_bytes: Size of the largest block.
    """

    blocks: np.ndarray
    block_bytes: int = 0


class ShuffledBatches:
    """``batches(i) -> rows`` [batch_size] of training batch i, a function of the arguments alone.

    A batch has lanes, groups of consecutive rows of the batch. Each lane reads its own part of an
    epoch's rows, so that processes with different rows of a batch read different blocks. The number
    of lanes depends on batch size and data, not on the number of processes.

    In each epoch of a source, its blocks are shuffled and divided among the lanes. Rows of a lane
    are then shuffled within windows of a few blocks. Each row occurs once per epoch, apart from the
    ends of the lanes. With blocks of one row, this is a shuffle of all rows. Few rows have one
    lane.

    Args:
      sources: rows of each source. Indices count the rows of the first source, then of the second.
      weights: share of each source in the batches, positive; exact up to 1 / 65,536.
      batch_size: number of rows of a batch.
      seed: seed of the order.
      budget: bytes of blocks that one process should have in memory, if it reads all lanes.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        budget: int = 2**30,
    ):
        counts = [int(source.blocks.sum()) for source in sources]
        block_bytes = max(source.block_bytes for source in sources)
        lanes = math.gcd(batch_size, MAX_LANES)
        while lanes > 1 and (
            min(counts) < lanes * MIN_LANE_ROWS or 2 * lanes * block_bytes > budget
        ):
            lanes //= 2
        window = min(max(budget // (lanes * max(block_bytes, 1)) - 1, 1), _MAX_WINDOW)
        self.lanes, self._batch_size = lanes, batch_size
        self._offsets = np.cumsum([0, *counts])
        self._sources = [
            _ShuffledLanes(source.blocks, lanes, window, (seed, i))
            for i, source in enumerate(sources)
        ]
        # Which source each row of a batch comes from, in a period of batches, and how many rows of
        # this source its lane has had before in the period.
        batches = max(_MIX_PERIOD // batch_size, 1) if len(sources) > 1 else 1
        source = _mix(weights, batches * batch_size).reshape(batches, batch_size)
        # Rotated, so that each lane gets its share of each source. The golden ratio spreads evenly.
        shifts = [int(i * batch_size * (math.sqrt(5) - 1) / 2) for i in range(batches)]
        self._source = np.stack([np.roll(a, n) for a, n in zip(source, shifts, strict=True)])
        by_lane = self._source.reshape(batches, lanes, -1).swapaxes(0, 1).reshape(lanes, -1)
        rank = np.empty_like(by_lane)
        self._rows_per_period = np.empty((lanes, len(sources)), np.int64)
        for i in range(len(sources)):
            is_source = by_lane == i
            rank[is_source] = (np.cumsum(is_source, 1) - 1)[is_source]
            self._rows_per_period[:, i] = is_source.sum(1)
        self._rank = rank.reshape(lanes, batches, -1).swapaxes(0, 1).reshape(batches, -1)

    def __call__(self, batch: int) -> np.ndarray:
        """Return the rows of a batch, int64 [batch_size]."""
        period, i = divmod(batch, len(self._source))
        rows = np.empty(self._batch_size, np.int64)
        size = self._batch_size // self.lanes
        for lane in range(self.lanes):
            part = slice(lane * size, (lane + 1) * size)
            source, rank = self._source[i, part], self._rank[i, part]
            for s in np.unique(source).tolist():
                chosen = source == s
                positions = period * self._rows_per_period[lane, s] + rank[chosen]
                rows[part][chosen] = self._offsets[s] + self._sources[s](lane, positions)
        return rows


class _ShuffledLanes:
    """``lanes(lane, positions) -> rows``: rows of each lane, shuffled in windows of blocks."""

    def __init__(self, blocks: np.ndarray, lanes: int, window: int, seed: tuple[int, ...]):
        self._blocks, self._seed = blocks, seed
        count = int(blocks.sum())
        self._starts = [lane * count // lanes for lane in range(lanes + 1)]
        self._has_blocks = count > len(blocks)
        self._window = max(window * count // len(blocks), 1)
        self._first = np.cumsum(blocks) - blocks
        # Lanes are in the same epoch, or in two that follow each other.
        self._shuffle_blocks = functools.lru_cache(2)(self._shuffle_blocks)  # type: ignore[method-assign]
        self._shuffle_window = functools.lru_cache(2 * lanes)(self._shuffle_window)  # type: ignore[method-assign]

    def __call__(self, lane: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at positions of a lane's endless sequence, int64 [positions]."""
        length = self._starts[lane + 1] - self._starts[lane]
        rows = np.empty(len(positions), np.int64)
        epochs, positions = np.divmod(positions, length)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            rows[chosen] = self._epoch_rows(lane, epoch, positions[chosen], length)
        return rows

    def _epoch_rows(self, lane: int, epoch: int, places: np.ndarray, length: int) -> np.ndarray:
        blocks, ends = self._shuffle_blocks(epoch)
        if not self._has_blocks:
            return blocks[self._starts[lane] + places]
        windows, places = np.divmod(places, self._window)
        for window in np.unique(windows).tolist():
            chosen, start = windows == window, window * self._window
            size = min(self._window, length - start)
            order = self._shuffle_window(epoch, lane, window, size)
            places[chosen] = start + order[places[chosen]]
        places += self._starts[lane]
        i = np.searchsorted(ends, places, side="right")
        block = blocks[i]
        return self._first[block] + places - (ends[i] - self._blocks[block])

    def _shuffle_blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks of an epoch in their order, and where the rows of each end."""
        blocks = np.random.default_rng((*self._seed, epoch)).permutation(len(self._blocks))
        return blocks, np.cumsum(self._blocks[blocks])

    def _shuffle_window(self, epoch: int, lane: int, window: int, size: int) -> np.ndarray:
        return np.random.default_rng((*self._seed, epoch, lane, window)).permutation(size)


class SampledBatches:
    """``batches(step) -> rows`` [batch_size] of a training batch; depends on nothing else.

    Args:
      labels: [N], label of each row, for equally frequent classes: each class is drawn once
        per round, in random order, and its rows are shuffled within the class. None shuffles all
        rows in each epoch.
      num_rows: N.
      batch_size: number of rows of a batch.
      repeats: how often a row follows itself, each time with another augmentation (Hoffer et al.
        2020, "Augment Your Batch").
      seed: seed of the order.

    Example:
      >>> batches = SampledBatches(np.array([0, 0, 0, 1]), 4, 8, 1, seed=0)
      >>> np.bincount(np.array([0, 0, 0, 1])[batches(5)]).tolist()
      [4, 4]
    """

    def __init__(
        self, labels: np.ndarray | None, num_rows: int, batch_size: int, repeats: int, seed: int
    ):
        self._batch_size, self._repeats, self._seed = batch_size, repeats, seed
        groups = [np.arange(num_rows)]
        if labels is not None:
            groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        self._groups = groups
        # A batch needs at most a few permutations at a time.
        self._permutation = functools.lru_cache(maxsize=4 * len(groups) + 4)(self._permute)

    def __call__(self, step: int) -> np.ndarray:
        """Return the rows of a batch."""
        first = step * self._batch_size
        places = range(first, first + self._batch_size)
        return np.array([self._row(place // self._repeats) for place in places])

    def _row(self, place: int) -> int:
        turn, slot = divmod(place, len(self._groups))
        group = 0 if len(self._groups) == 1 else int(self._permutation(-1, turn)[slot])
        rows = self._groups[group]
        epoch, i = divmod(turn, len(rows))
        return int(rows[self._permutation(group, epoch)[i]])

    def _permute(self, group: int, epoch: int) -> np.ndarray:
        count = len(self._groups) if group < 0 else len(self._groups[group])
        return np.random.default_rng([self._seed, group + 1, epoch]).permutation(count)


def _mix(weights: Sequence[float], length: int) -> np.ndarray:
    """Spread sources evenly over a sequence, int64 [length], each as often as its weight says."""
    ideal = np.array(weights, float) / sum(weights) * length
    counts = np.maximum(np.floor(ideal), 1).astype(int)
    missing = length - counts.sum()
    for source in np.argsort(counts - ideal, kind="stable")[: max(missing, 0)]:
        counts[source] += 1
    times = [(np.arange(count) + 0.5) / count for count in counts]
    sources = np.repeat(np.arange(len(counts)), counts)
    return sources[np.argsort(np.concatenate(times), kind="stable")][:length]
