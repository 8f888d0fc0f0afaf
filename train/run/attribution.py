"""Scores of a run's training examples: in blocks on disk, as a table and as a picture."""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fnet.attribution import InRunState
from train.data import Arrays, Dataset, augment_rows, num_examples, select_rows
from train.data.masks import spread
from train.errors import UserError
from train.output import plots
from train.output.progress import line_printer, showing
from train.output.rows import as_csv
from train.output.tables import Table, to_rich
from train.run.run_folder import RunFolder, as_json, atomic_write, read_sealed, seal
from train.stored import read_arrays

_NUM_PICTURED = 24
_MOST_BLOCKS = 64
"""Blocks on disk: at most this share of the work is lost if it is stopped."""


class TrainingRows:
    """Batches ``(batch,)`` of all training examples in order, the last one padded by its rows.

    Examples are prepared as for training, with the same random numbers whenever they are read. With
    ``most``, at most so many are read, spread evenly.
    """

    def __init__(self, dataset: Dataset, size: int, most: int | None = None):
        self.dataset = dataset
        count = num_examples(dataset.train)
        self._chosen = spread(count, count if most is None else most)
        self.size = min(size, len(self._chosen))

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self._chosen) // self.size)

    def __iter__(self) -> Iterator[tuple[Arrays]]:
        return ((self.batch(i),) for i in range(len(self)))

    def indices(self, number: int) -> np.ndarray:
        """Return the indices of the examples in a batch, without the padding."""
        return self._chosen[number * self.size : (number + 1) * self.size]

    def batch(self, number: int) -> Arrays:
        """Return a batch."""
        return self.read(np.resize(self.indices(number), self.size), number)

    def read(self, index: np.ndarray, seed: int = 0) -> Arrays:
        """Return a batch of these examples."""
        rows, generator = select_rows(self.dataset.train, index), np.random.default_rng(seed)
        batch = augment_rows(self.dataset, rows, generator)
        return {name: a for name, a in batch.items() if name != "row"}

    def label(self, row: int) -> str:
        """Return the name of an example's class; "" without one."""
        labels, classes = self.dataset.train.get("label"), self.dataset.classes
        return classes[labels[row]] if labels is not None and classes else ""


def score_in_blocks(
    folder: Path,
    identity: dict[str, Any],
    rows: TrainingRows,
    make_scorer: Callable[[], Callable[[Arrays], Any]],
    progress: Callable[[int, int], None],
) -> np.ndarray:
    """Score all training examples [train, columns]; blocks of an earlier, stopped call are read.

    Blocks in the folder that follow from another identity are removed.
    """
    key = folder / "blocks.json"
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # none yet, or damaged
        known = read_sealed(key)
    if known != identity:
        for path in folder.glob("*.npy"):
            path.unlink()
        atomic_write(key, as_json(seal(identity)))
    scorer: Callable[[Arrays], Any] | None = None
    blocks, per_block = [], -(-len(rows) // _MOST_BLOCKS)
    for start in range(0, len(rows), per_block):
        path, end = folder / f"{start:08}.npy", min(start + per_block, len(rows))
        block = read_arrays(path).get("")
        if block is None:
            scorer = scorer or make_scorer()
            scores = []
            for number in range(start, end):
                batch, count = rows.batch(number), len(rows.indices(number))
                scores.append(np.asarray(scorer(batch))[:count])
                progress(number + 1, len(rows))
            file, block = io.BytesIO(), np.concatenate(scores)
            np.save(file, block)
            atomic_write(path, file.getvalue())
        blocks.append(block)
    return np.concatenate(blocks)


@contextlib.contextmanager
def counting(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show the batches that are done, of all: at the bottom of a terminal, or a line per tenth."""
    tenths: set[int] = set()
    with showing(console, what, log_first=False) as show:

        def count(done: int, total: int) -> None:
            tenth = 10 * done // total
            if console.is_terminal or tenth not in tenths:
                tenths.add(tenth)
                show(f"{what}: batch {done:,}/{total:,}")

        yield count


Columns = dict[str, np.ndarray]
"""``loss`` [train], and ``score`` [train]: how much each training example helps a query."""


def columns_of(state: InRunState) -> Columns:
    """Return what a run recorded of its training examples; the query is the test loss."""
    return {"loss": np.asarray(state.mean_losses), "score": np.asarray(state.scores)}


def write_losses(folder: RunFolder, rows: TrainingRows, columns: Columns) -> list[Path]:
    """Write attribution.csv and attribution.png: training examples of the highest loss first."""
    order = descending(columns["loss"])
    shown = dict.fromkeys(order[:_NUM_PICTURED], True)
    title = "training images of the highest loss, which may have wrong labels"
    return _write(folder.attributions, rows, columns, order, shown, title)


def write_query(
    folder: RunFolder, rows: TrainingRows, columns: Columns, name: str, text: str
) -> list[Path]:
    """Write attribution/NAME.csv and NAME.png: the training examples that help most first."""
    order, half = descending(columns["score"]), _NUM_PICTURED // 2
    shown = {row: bool(columns["score"][row] < 0) for row in order[:half] + order[-half:]}
    title = f"helpful and, in red, harmful training images for {text}"
    return _write(folder.attribution / f"{name}.csv", rows, columns, order, shown, title)


def descending(values: np.ndarray) -> list[int]:
    """Return the order of descending values, NaN last."""
    keys = np.where(np.isnan(values), np.inf, -values)
    order: list[int] = np.argsort(keys, kind="stable").tolist()
    return order


def _write(
    table: Path,
    rows: TrainingRows,
    columns: Columns,
    order: Sequence[int],
    shown: dict[int, bool],
    title: str,
) -> list[Path]:
    content = [
        {"row": row, "example": rows.dataset.name(row)}
        | rows.dataset.place(row)
        | {"label": rows.label(row)}
        | {name: float(column[row]) for name, column in columns.items()}
        for row in order
    ]
    atomic_write(table, as_csv(content))
    if not rows.dataset.classes or "label" not in rows.dataset.train:
        return [table]
    images, picture = rows.read(np.array([*shown]))["image"], table.with_suffix(".png")
    names = ((rows.label(row), rows.dataset.name(row)) for row in shown)
    captions = ["\n".join(plots.end_of(text, 26) for text in pair) for pair in names]
    plots.classifications(images, captions, [not h for h in shown.values()], title, picture)
    return [table, picture]


def print_examples(
    kind: str, rows: TrainingRows, columns: Columns, chosen: Sequence[int], console: Console
) -> None:
    """Print examples as a table on a terminal, as lines elsewhere."""
    lines = []
    for row in chosen:
        texts = [f"{column[row]:.4g}" for column in columns.values()]
        lines.append((rows.dataset.name(row), rows.label(row), *texts))
    if console.is_terminal:
        heads = ("training example", "label", *columns)
        console.print(to_rich(Table(kind, heads, lines, texts=2)))
        return
    for example, label, *values in lines:
        scores = (f"{name} {value}" for name, value in zip(columns, values, strict=True))
        named = [f"label {label}"] if label else []
        line_printer(console)("  ".join([f"{kind}: {example}", *named, *scores]))
