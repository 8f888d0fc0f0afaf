"""Unreadable files: each is reported once, and too many of them end the run."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fnet.privacy.batch_names import EXAMPLE_WEIGHT
from train.data import Arrays, Dataset, num_examples
from train.errors import UserError

_FEW_FILES, _FEW_BYTES = 1000, 2**28
"""Largest number of files, and of their bytes, that are all read before a run is compiled."""
_TOLERATED, _TOLERATED_SHARE = 10, 0.1
"""So many unreadable files never end a run, unless they are a larger share of all, or
``max_bad_fraction`` is 0: one file of a small folder is more than 1 % of it."""


class UnreadableFiles:
    """Finds unreadable files by the examples of weight 0 in batches.

    Args:
      dataset: dataset of the batches. Batches without ``id`` and ``weight`` are not checked.
      log: prints one line.
      write: is given file, split and reason of all unreadable files so far, whenever there are
        more.
      union: returns the numbers that several processes have together, each of which reads its own
        rows; None for one process. What another process finds is reported by `share`.
    """

    def __init__(
        self,
        dataset: Dataset,
        log: Callable[[str], None],
        union: Callable[[set[int]], set[int]] | None = None,
        write: Callable[[list[dict[str, str]]], None] = lambda rows: None,
    ):
        self._dataset, self._log, self._union, self._write = dataset, log, union, write
        self._known: set[int] = set()
        self._found: set[int] = set()
        num_train = num_examples(dataset.train) - dataset.canaries
        ids = range(num_train + num_examples(dataset.test))
        self._splits = {"training": ids[:num_train], "test": ids[num_train:]}
        self._rows: list[dict[str, str]] = []
        self._errors: dict[str, list[str]] = {split: [] for split in self._splits}

    @property
    def count(self) -> int:
        """Number of unreadable files so far."""
        return sum(map(len, self._errors.values()))

    def watch(self, batches: Iterator[Arrays]) -> "CheckedBatches":
        """Iterate over the same batches, and check each.

        The iterator raises `UserError` when more than the dataset's ``max_bad_fraction`` of the
        training or test files are unreadable, and more than a few; or all of them.
        """
        return CheckedBatches(batches, self._check)

    def look(self) -> None:
        """Read all files, if they are few, before anything is compiled."""
        splits = (self._dataset.train, self._dataset.test)
        ids = [id for rows in splits if "id" in rows for id in rows["id"].tolist()]
        if self._union or not 0 < len(ids) <= _FEW_FILES:
            return
        if sum(map(self._dataset.file_bytes, ids)) > _FEW_BYTES:
            return
        with ThreadPoolExecutor(4) as threads:
            reasons = [*threads.map(self._dataset.explain, ids)]
        self._add({id for id, reason in zip(ids, reasons, strict=True) if reason is not None})

    def share(self) -> None:
        """Report what other processes found, too. All processes must call this together."""
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
        new = sorted(found - self._known)
        for id in new:
            self._known.add(id)
            if (error := self._dataset.explain(id)) is None:
                continue
            split = next(name for name, ids in self._splits.items() if id in ids)
            self._errors[split].append(error)
            name_of = self._dataset.name if split == "training" else self._dataset.test_name or str
            name = name_of(self._splits[split].index(id))
            reason = error.removeprefix(f"{name}: ")
            self._rows.append({"file": name, "split": split, "reason": reason})
            self._log(f"cannot read {error}; skipped")
        if new:
            self._write(self._rows)
        for split, errors in self._errors.items():
            files = len(self._splits[split])
            if len(errors) == files:
                raise UserError(
                    f"data.path: none of the {files:,} {split} files can be read; the first is "
                    f"{errors[0]}"
                )
            fraction = self._dataset.max_bad_fraction
            tolerated = min(_TOLERATED, _TOLERATED_SHARE * files) if fraction else 0
            if len(errors) > max(fraction * files, tolerated):
                raise UserError(
                    f"data.max_bad_fraction: so far {len(errors):,} of the {files:,} {split} files "
                    f"are unreadable, more than {fraction:g} of all; the first is {errors[0]}"
                )


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
