"""Examples, in batches: what a task trains and is tested on."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import grain

Arrays = dict[str, np.ndarray]
"""Named arrays with one leading axis of examples."""

READ_AHEAD = 2
"""Batches that lie ready; one more is in the making, and two belong to steps not yet looked at."""


class Dataset(NamedTuple):
    """A data source, split.

    Attributes:
      train: training examples, or where they are: of a text, where each row begins.
      test: held-out examples, seen by no step, or where they are.
      classes: their names, by label; () where there are none.
      augment: ``(rows, generator) -> batch`` makes training batches of rows of ``train``.
      prepare: ``rows -> batch`` makes batches of rows of ``test``; by default they are one.
      name: of a row of ``train``, what a person can find it by: its file, or its number.
      explain: of an ``id`` of weight 0, why it is: its file and what is wrong with that; None
        if nothing is.
      max_bad_fraction: of the files of a split, so many may be unreadable.
    """

    train: Arrays
    test: Arrays
    classes: tuple[str, ...]
    augment: Callable[[Arrays, np.random.Generator], Arrays]
    prepare: Callable[[Arrays], Arrays] = lambda rows: rows
    name: Callable[[int], str] = str
    explain: Callable[[int], str | None] = lambda id: None
    max_bad_fraction: float = 0.0


def size(arrays: Arrays) -> int:
    """How many examples there are."""
    return len(next(iter(arrays.values())))


class _Rows:
    """Arrays as grain's random access source: one example an index."""

    def __init__(self, arrays: Arrays):
        self._arrays = arrays

    def __len__(self) -> int:
        return size(self._arrays)

    def __getitem__(self, index: Any) -> Arrays:
        return numbered(self._arrays, index)


def numbered(arrays: Arrays, index: Any) -> Arrays:
    """Some rows, and in ``row`` which they are."""
    return {name: a[index] for name, a in arrays.items()} | {"row": np.asarray(index, np.int32)}


def augmented(dataset: Dataset, rows: Arrays, generator: np.random.Generator) -> Arrays:
    """A training batch of rows; ``row`` [batch] says which they are."""
    plain = {name: a for name, a in rows.items() if name != "row"}
    return dataset.augment(plain, generator) | {"row": rows["row"]}


def batch_of(dataset: Dataset, rows: int) -> Arrays:
    """What the shapes of a training batch of that many rows are, filled with one example."""
    one = numbered(dataset.train, np.arange(1))
    return _repeated(augmented(dataset, one, np.random.default_rng(0)), rows)


def evaluation_batch_of(dataset: Dataset, rows: int) -> Arrays:
    """The same of an evaluation batch: no more than one example is read."""
    return _repeated(padded(dataset.prepare(_first(dataset.test)), 1), rows)


def _first(arrays: Arrays) -> Arrays:
    return {name: a[:1] for name, a in arrays.items()}


def _repeated(one: Arrays, rows: int) -> Arrays:
    return {name: np.broadcast_to(a, (rows, *a.shape[1:])) for name, a in one.items()}


def training_batches(dataset: Dataset, batch_size: int, seed: int) -> "grain.DatasetIterator":
    """Endless augmented batches, reshuffled every epoch, always full.

    The iterator's ``get_state()`` is its position as JSON; after ``set_state``
    the same batches follow.
    """
    import grain  # and JAX with it, which processes that decode images do without

    return read_ahead(
        grain.MapDataset.source(_Rows(dataset.train))
        .seed(seed)
        .shuffle()
        .repeat()
        .batch(batch_size, drop_remainder=True)  # of which there is none: the source is endless
        .random_map(functools.partial(augmented, dataset))
    )


def read_ahead(batches: "grain.MapDataset") -> "grain.DatasetIterator":
    """The batches in order, made by a thread while the device is at work."""
    import grain

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    return iter(batches.to_iter_dataset(options))


def evaluation_batches(dataset: Dataset, batch_size: int) -> Iterator[Arrays]:
    """Every held-out example once, in order; the last batch is padded. One is read ahead.

    Each batch has ``weight`` [batch]: 1.0 for an example, 0.0 for padding.
    """

    def batch(start: int) -> Arrays:
        rows = {name: a[start : start + batch_size] for name, a in dataset.test.items()}
        return padded(dataset.prepare(rows), batch_size)

    starts = range(0, size(dataset.test), batch_size)
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(batch, 0)
        for start in starts:
            ready = ahead.result()
            if start + batch_size in starts:
                ahead = reader.submit(batch, start + batch_size)
            yield ready


def padded(batch: Arrays, rows: int) -> Arrays:
    """The batch with zeros up to that many rows, and ``weight`` [rows]: 0.0 for those, else 1.0.

    A weight that the batch brings is kept. In ``id`` padding is -1: 0 is an example's.
    """
    real = size(batch)
    batch = {"weight": np.ones(real, np.float32)} | batch

    def longer(a: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(a, [(0, rows - real)] + [(0, 0)] * (a.ndim - 1), constant_values=fill)

    return {name: longer(a, -1 if name == "id" else 0) for name, a in batch.items()}
