"""Files that cannot be read: each is said once and counted; too many end the run."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from train.data import Arrays, Dataset, size
from train.errors import UserError


class UnreadableFiles:
    """Looks at every batch for examples of weight 0, and asks the dataset why they are.

    Args:
      dataset: whose batches it sees; those without ``id`` and ``weight`` are passed on.
      log: shows one line.
    """

    def __init__(self, dataset: Dataset, log: Callable[[str], None]):
        self._dataset, self._log = dataset, log
        self._asked: set[int] = set()
        trained = size(dataset.train)
        self._splits = {
            "training": range(trained),
            "test": range(trained, trained + size(dataset.test)),
        }
        self._bad: dict[str, list[str]] = {split: [] for split in self._splits}

    @property
    def count(self) -> int:
        """How many files could not be read since this was made."""
        return sum(map(len, self._bad.values()))

    def watch(self, batches: Iterator[Arrays]) -> "Watched":
        """The same batches.

        The iterator raises `UserError` once more than the dataset's ``max_bad_fraction`` of
        the training files, or of the test files, could not be read; or all of them, whatever
        that fraction is.
        """
        return Watched(batches, self._look)

    def _look(self, batch: Arrays) -> None:
        if "id" not in batch or "weight" not in batch or batch["weight"].all():
            return
        left_out = np.unique(batch["id"][batch["weight"] == 0])
        for id in left_out[left_out >= 0].tolist():  # -1 is padding
            if id not in self._asked:
                self._asked.add(id)
                self._note(id, self._dataset.explain(id))
        for split, bad in self._bad.items():
            files = len(self._splits[split])
            if len(bad) == files:
                raise UserError(
                    f"data.path: none of the {files:,} {split} files can be read; the first is "
                    f"{bad[0]}"
                )
            if len(bad) > self._dataset.max_bad_fraction * files:
                raise UserError(
                    f"data.max_bad_fraction: so far {len(bad):,} of the {files:,} {split} files "
                    f"cannot be read, more than {self._dataset.max_bad_fraction:g} of all; the "
                    f"first is {bad[0]}"
                )

    def _note(self, id: int, why: str | None) -> None:
        if why is not None:
            split = next(name for name, ids in self._splits.items() if id in ids)
            self._bad[split].append(why)
            self._log(f"cannot read {why}; it is left out")


class Watched:
    """An iterator of batches, each of which was looked at before it is given."""

    def __init__(self, batches: Iterator[Arrays], look: Callable[[Arrays], None]):
        self._batches, self._look = batches, look

    def __iter__(self) -> "Watched":
        return self

    def __next__(self) -> Arrays:
        batch = next(self._batches)
        self._look(batch)
        return batch

    def get_state(self) -> Any:
        """The position, as grain's iterators have it."""
        return self._batches.get_state()  # type: ignore[attr-defined]

    def set_state(self, state: Any) -> None:
        """Goes on from a position."""
        self._batches.set_state(state)  # type: ignore[attr-defined]
