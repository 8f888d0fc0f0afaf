"""Datasets, and their batches for training and evaluation."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from train.data.work import RECORD
from train.errors import UserError

if TYPE_CHECKING:
    import grain

    from train.config.data import Data
    from train.data.label_map import LabelMap

Arrays = dict[str, np.ndarray]
"""Named arrays with one leading axis of examples."""

PREFETCHED_BATCHES = 2
"""Batches that are ready; beyond these, one is being made and the loop holds up to two."""


class Scaling(NamedTuple):
    """Mean and standard deviation of numbers that are predicted, each [numbers].

    Networks learn standardized numbers, so that their losses are alike.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, numbers: np.ndarray) -> "Scaling":
        """Measure numbers [N, numbers]; the deviation of equal ones counts as 1."""
        std = numbers.std(0)
        return cls(tuple(numbers.mean(0).tolist()), tuple(np.where(std > 0, std, 1).tolist()))

    @staticmethod
    def _row(values: tuple[float, ...], like: Any) -> np.ndarray:
        row = np.reshape(values, [1] * (like.ndim - 1) + [-1])
        # On the host in 64 bits, so that 20260101 keeps its digits.
        return row if isinstance(like, np.ndarray) else row.astype(np.float32)

    def standardize(self, numbers: Any) -> Any:
        """Subtract the mean and divide by the standard deviation."""
        return (numbers - self._row(self.mean, numbers)) / self._row(self.std, numbers)

    def restore(self, standardized: Any) -> Any:
        """Invert `standardize`."""
        return standardized * self._row(self.std, standardized) + self._row(self.mean, standardized)


class Outputs(NamedTuple):
    """Meaning of a network's outputs, which its run folder keeps.

    Attributes:
      names: Names of classes, labels or numbers, one per output.
      label_map: Labels of the values of masks, if there are masks.
      scaling: Scaling of numbers, if these are predicted.
    """

    names: tuple[str, ...]
    label_map: "LabelMap | None" = None
    scaling: Scaling | None = None


class Dataset(NamedTuple):
    """Training and test examples of a data source.

    A row is what a batch needs to make one example: the example itself, or where to find it, such
    as an index into a list of files.

    Attributes:
      train: Rows of the training examples.
      test: Rows of the test examples.
      classes: Class names by label; () without labels.
      augment: ``(rows, generator) -> batch``, makes a training batch; None: as `prepare`.
      prepare: ``rows -> batch``, makes a test batch; by default the rows are the batch.
      reads_local: Whether ``augment`` and ``prepare`` read only the rows where ``local`` bool
        [batch] is true, if the rows have it. The other rows are then arbitrary, of weight 1.
      order: ``(batch_size, seed) -> (step -> indices)``, which rows of ``train`` are in the batch
        of step 0, 1, ...; None shuffles all of them in each epoch.
      batches_at_once: Number of training batches that threads make at once.
      name: Describes a row of ``train`` to the user: its file, or its index.
      test_name: The same for a row of ``test``; None if examples have no names, only numbers.
      place: Column ``index`` of a row in tables: index in the user's array, or line of their file;
        {} if its name is a path. Rows of ``test`` come after ``train``'s.
      file_bytes: Size of the files that only this row points to, -1 if unreadable. Rows of
        ``test`` come after ``train``'s.
      files: Those files, or their contents. Reading them may take long.
      contents: Arrays that rows point into, such as all tokens, or sizes of shared files.
      explain: Says why the example with this ``id`` has weight 0: its file and the error. None if
        it can be read.
      max_bad_fraction: Largest fraction of unreadable files to tolerate, per split.
      users: Number of the user of each training row, int32 [N]; None without users.
      canaries: Number of canaries, the last training rows; see `train.data.canaries`.
      tokens_per_byte: Counts the test targets per UTF-8 byte of the text that they stand for.
        None if that is unknown, or there is no text.
      notes: What was changed in the data, for the user.
      label_map: Labels of the values of masks; None without masks.
      class_weights: Weight of each class in the loss; None weighs all alike. Of several labels per
        image, weight of the examples that have each one.
      scaling: Scaling of the numbers that are labels; None if these are no numbers.
      is_chat: Whether the text was written by a chat template.
      rows: What ``train`` and ``test`` consist of, for the user.
    """

    train: Arrays
    test: Arrays
    classes: tuple[str, ...]
    augment: Callable[[Arrays, np.random.Generator], Arrays] | None = None
    prepare: Callable[[Arrays], Arrays] = lambda rows: rows
    reads_local: bool = False
    order: Callable[[int, int], Callable[[int], np.ndarray]] | None = None
    batches_at_once: int = 1
    name: Callable[[int], str] = str
    test_name: Callable[[int], str] | None = None
    place: Callable[[int], dict[str, int]] = lambda row: {}
    file_bytes: Callable[[int], int] = lambda row: 0
    files: Callable[[int], Iterable[Any]] = lambda row: ()
    contents: tuple[np.ndarray, ...] = ()
    explain: Callable[[int], str | None] = lambda id: None
    max_bad_fraction: float = 0.0
    users: np.ndarray | None = None
    canaries: int = 0
    tokens_per_byte: Callable[[], float | None] = lambda: None
    notes: tuple[str, ...] = ()
    label_map: "LabelMap | None" = None
    class_weights: tuple[float, ...] | None = None
    scaling: Scaling | None = None
    is_chat: bool = False
    rows: str = "examples"

    @property
    def outputs(self) -> Outputs:
        """Meaning of the outputs of a network."""
        return Outputs(self.classes, self.label_map, self.scaling)

    def augmented(self, rows: Arrays, generator: np.random.Generator) -> Arrays:
        """Make a training batch of rows."""
        return self.augment(rows, generator) if self.augment else self.prepare(rows)

    def test_batch(self, rows: Arrays) -> Arrays:
        """Make a test batch of rows, with standardized labels if these are numbers."""
        return self.standardized(self.prepare(rows))

    def standardized(self, batch: Arrays) -> Arrays:
        """Return a batch as the loss reads it: with standardized labels if these are numbers."""
        if (scaling := self.scaling) is None:
            return batch
        numbers = {name: batch[name] for name in ("label", "label_2") if name in batch}
        return batch | {n: scaling.standardize(a).astype(np.float32) for n, a in numbers.items()}


def load(source: "Data", *, private: bool) -> Dataset:
    """Load the data of a source, which a user may have written, and check their parts.

    Raises:
      UserError: if the data are missing or damaged, or the source does not follow `Dataset`.
    """
    method = f"{type(source).__name__}.load"
    name = f"data.source: {method}"
    try:
        dataset = source.load(private=private)
    except TypeError as error:
        if not str(error).startswith(("Dataset.__new__() ", f"{method}() ")):
            raise
        raise UserError(f"{name}: {error}") from error
    if not isinstance(dataset, Dataset):
        raise UserError(f"{name} must return a Dataset, got {type(dataset).__name__}")
    for part in ("train", "test"):
        arrays = getattr(dataset, part)
        lengths = {n: len(a) for n, a in arrays.items()} if isinstance(arrays, dict) else {}
        if len({*lengths.values()}) != 1:
            raise UserError(f"{name}: {part} must be arrays by name with one length, got {lengths}")
    for part in ("augment", "prepare"):
        if not callable(given := getattr(dataset, part)) and (part, given) != ("augment", None):
            raise UserError(f"{name}: {part} must be a function, got {given!r:.40}")
    return dataset


def num_examples(arrays: Arrays) -> int:
    """Count the examples in named arrays."""
    return len(next(iter(arrays.values())))


def select_rows(arrays: Arrays, index: Any) -> Arrays:
    """Select rows, and add their indices as ``row``."""
    return {name: a[index] for name, a in arrays.items()} | {"row": np.asarray(index, np.int32)}


def augment_rows(dataset: Dataset, rows: Arrays, generator: np.random.Generator) -> Arrays:
    """Make a training batch of rows from `select_rows`; ``row`` [batch] is passed on."""
    plain = {name: a for name, a in rows.items() if name != "row"}
    with RECORD.measured():
        batch = dataset.standardized(dataset.augmented(plain, generator))
    batch.pop("local", None)
    return batch | {"row": rows["row"]}


def sample_batch(dataset: Dataset, batch_size: int) -> Arrays:
    """Make a batch with the shapes and dtypes of a training batch from one example."""
    row = select_rows(dataset.train, np.arange(1))
    return repeat_row(augment_rows(dataset, row, np.random.default_rng(0)), batch_size)


def sample_evaluation_batch(dataset: Dataset, batch_size: int) -> Arrays:
    """Make a batch with the shapes and dtypes of an evaluation batch from one example."""
    row = {name: a[:1] for name, a in dataset.test.items()}
    return repeat_row(pad_batch(dataset.test_batch(row), 1), batch_size)


def repeat_row(row: Arrays, *shape: int) -> Arrays:
    """Repeat arrays of one row to arrays [*shape, ...]."""
    return {name: np.broadcast_to(a, (*shape, *a.shape[1:])) for name, a in row.items()}


def training_batches(
    dataset: Dataset, batch_size: int, seed: int, local: np.ndarray | None = None
) -> "grain.DatasetIterator":
    """Iterate over full, augmented batches without end, reshuffled every epoch.

    The iterator's ``get_state()`` returns its position as JSON. After ``set_state`` it continues
    with the same batches.

    Args:
      dataset: dataset.
      batch_size: number of rows of a batch.
      seed: seed of order and augmentation.
      local: rows of each batch that are needed, bool [batch_size]; the others may be arbitrary.
        The batches differ in nothing else. None needs all of them.
    """
    needed = {"local": local} if dataset.reads_local and local is not None else {}
    if dataset.order is None:
        import grain  # imports JAX, which processes that decode images must not

        rows = grain.MapDataset.range(num_examples(dataset.train)).seed(seed).shuffle().repeat()
        index = rows.batch(batch_size, drop_remainder=True)  # drops nothing: it is endless
    else:
        index = _endless(dataset.order(batch_size, seed)).seed(seed)

    def make_batch(index: np.ndarray, generator: np.random.Generator) -> Arrays:
        return augment_rows(dataset, select_rows(dataset.train, index) | needed, generator)

    return _prefetch(index.random_map(make_batch), dataset.batches_at_once)


def batches_by_step(make_batch: Callable[[int], Arrays]) -> "grain.DatasetIterator":
    """Iterate over ``make_batch(0)``, ``make_batch(1)``, ... without end, as `training_batches`."""
    return _prefetch(_endless(make_batch))


def _endless(function: Callable[[int], Any]) -> "grain.MapDataset":
    import grain

    return grain.MapDataset.range(2**62).map(function)


def _prefetch(
    batches: "grain.MapDataset", threads: int = 1, ready: int = PREFETCHED_BATCHES
) -> "grain.DatasetIterator":
    """Iterate over batches in order; threads make them while the device computes."""
    import grain

    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ready)
    return iter(batches.to_iter_dataset(options))


def evaluation_batches(
    dataset: Dataset, batch_size: int, local: np.ndarray | None = None
) -> Iterator[Arrays]:
    """Iterate over the test examples once, in order; a thread makes the next batch.

    Each batch has ``weight`` [batch]: 1.0 for an example, 0.0 for the padding of the last batch.
    ``local`` is as in `training_batches`.
    """
    import grain

    def make_batch(start: int) -> Arrays:
        rows = {name: a[start : start + batch_size] for name, a in dataset.test.items()}
        if dataset.reads_local and local is not None:
            rows["local"] = local[: num_examples(rows)]
        batch = dataset.test_batch(rows)
        batch.pop("local", None)
        return pad_batch(batch, batch_size)

    starts = grain.MapDataset.range(0, num_examples(dataset.test), batch_size)
    return _prefetch(starts.map(make_batch), ready=1)


def pad_batch(batch: Arrays, batch_size: int) -> Arrays:
    """Pad a batch with zeros, and add ``weight`` [batch_size]: 0.0 for padding, else 1.0.

    A ``weight`` in the batch takes precedence. The padding of ``id`` is -1, because 0 is an id.
    """
    count = num_examples(batch)
    batch = {"weight": np.ones(count, np.float32)} | batch

    def pad(a: np.ndarray, fill: int) -> np.ndarray:
        widths = [(0, batch_size - count)] + [(0, 0)] * (a.ndim - 1)
        return np.pad(a, widths, constant_values=fill)

    return {name: pad(a, -1 if name == "id" else 0) for name, a in batch.items()}
