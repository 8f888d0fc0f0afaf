"""Unreadable files: each is reported once, and too many of them end the run."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fnet.privacy.users import EXAMPLE_WEIGHT
from train.data import Arrays, Dataset, num_examples
from train.errors import UserError


class UnreadableFiles:
    """Finds unreadable files by the examples of weight 0 in batches.

    Args:
      dataset: dataset of the batches. Batches without ``id`` and ``weight`` are not checked.
      log: prints one line.
      union: returns the numbers that several processes have together, each of which reads its own
        rows; None for one process. What another process finds is reported by `share`.
    """

    def __init__(
        self,
        dataset: Dataset,
        log: Callable[[str], None],
        union: Callable[[set[int]], set[int]] | None = None,
    ):
        self._dataset, self._log, self._union = dataset, log, union
        self._known: set[int] = set()
        self._found: set[int] = set()
        num_train = num_examples(dataset.train) - dataset.canaries
        self._splits = {
            "training": range(num_train),
            "test": range(num_train, num_train + num_examples(dataset.test)),
        }
        self._errors: dict[str, list[str]] = {split: [] for split in self._splits}

    @property
    def count(self) -> int:
        """Number of unreadable files so far."""
        return sum(map(len, self._errors.values()))

    def watch(self, batches: Iterator[Arrays]) -> "CheckedBatches":
        """Iterate over the same batches, and check each.

        The iterator raises `UserError` when more than the dataset's ``max_bad_fraction`` of the
        training or test files are unreadable, or all of them.
        """
        return CheckedBatches(batches, self._check)

    def share(self) -> None:
        """Report what other processes found, too. All processes must call this together.

        Raises:
          UserError: in all of them, if too many files are unreadable.
        """
        if self._union:
            found, self._found = self._union(self._found), set()
            self._add(found)

    def _check(self, batch: Arrays) -> None:
        weight = batch.get(EXAMPLE_WEIGHT, batch.get("weight"))
        if "id" not in batch or weight is None or weight.all():
            return
        skipped = np.unique(batch["id"][weight == 0])
        found = set(skipped[skipped >= 0].tolist()) - self._known  # -1 is padding
        if self._union:
            self._found |= found
        else:
            self._add(found)

    def _add(self, found: set[int]) -> None:
        for id in sorted(found - self._known):
            self._known.add(id)
            self._report(id, self._dataset.explain(id))
        for split, errors in self._errors.items():
            files = len(self._splits[split])
            if len(errors) == files:
                raise UserError(
                    f"data.path: none of the {files:,} {split} files can be read; the first is "
                    f"{errors[0]}"
                )
            if len(errors) > self._dataset.max_bad_fraction * files:
                raise UserError(
                    f"data.max_bad_fraction: so far {len(errors):,} of the {files:,} {split} files "
                    f"are unreadable, more than {self._dataset.max_bad_fraction:g} of all; the "
                    f"first is {errors[0]}"
                )

    def _report(self, id: int, error: str | None) -> None:
        if error is not None:
            split = next(name for name, ids in self._splits.items() if id in ids)
            self._errors[split].append(error)
            self._log(f"cannot read {error}; skipped")


class CheckedBatches:
    """Iterator that checks each batch before it returns it."""

    def __init__(self, batches: Iterator[Arrays], check: Callable[[Arrays], None]):
        self._batches, self._check = batches, check

    def __iter__(self) -> "CheckedBatches":
        return self

    def __next__(self) -> Arrays:
        batch = next(self._batches)
        self._check(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        """Return ``get_state`` and ``set_state`` of the batches."""
        return getattr(self._batches, name)
