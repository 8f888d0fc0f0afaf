"""Scores of a run's training examples: in blocks on disk, as a table and as a picture."""

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import fnet
from train import output
from train.arguments import AttributeArguments
from train.data import Arrays, augment_rows, num_examples, select_rows
from train.data.batch import Batch
from train.data.decode import UnreadableError
from train.data.masks import spread
from train.data.tokenizer import load_tokenizer
from train.errors import UserError, writing
from train.output.progress import line_printer, show_table, showing
from train.output.rows import as_csv
from train.output.tables import Table
from train.run.checkpoints import RestoredNetwork
from train.run.choices import encode_completions
from train.run.examples import targets_of
from train.run.run_folder import RunFolder, as_json, atomic_write, read_sealed, seal
from train.run.setup import Setup
from train.stored import read_arrays
from train.tasks import kind_of, language

_NUM_PICTURED = 24
_MOST_BLOCKS = 64
"""Blocks on disk: at most this share of the work is lost if it is stopped."""


class Query(NamedTuple):
    """Predictions to attribute to training examples.

    Attributes:
      name: Name of the output files.
      text: Description for the user.
      batch: Arguments of the loss, [queries, ...].
    """

    name: str
    text: str
    batch: Arrays


Columns = dict[str, np.ndarray]
"""``loss`` [train], and ``score`` [train]: how much each training example helps a query."""


class TrainingRows:
    """Batches ``(batch,)`` of all training examples in order, the last one padded by its rows.

    Examples are prepared as for training, with the same random numbers whenever they are read. With
    ``most``, at most so many are read, spread evenly. ``progress`` is told how many were, of all.
    """

    def __init__(
        self,
        run: Setup,
        most: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.dataset, self._run, self._progress = run.task.dataset, run, progress
        count = num_examples(self.dataset.train)
        self._chosen = spread(count, count if most is None else most)
        self.size = min(run.config.data.batch_size, len(self._chosen))

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self._chosen) // self.size)

    def __iter__(self) -> Iterator[tuple[Arrays]]:
        for i in range(len(self)):
            yield (self.batch(i),)
            self._progress(i + 1, len(self))

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
        """Return the name of an example's class, its labels or its numbers; "" without one."""
        labels = self.dataset.train.get("label")
        if labels is None or not self.dataset.classes:
            return ""
        return ", ".join(map(str, targets_of(self._run).describe(labels[row]).values()))


def query_of(run: Setup, network: RestoredNetwork, options: AttributeArguments) -> Query:
    """Return the prediction of the options, or the mean loss of some test examples."""
    if options.example is not None:
        return _of_image(run, options.example, options.label, network)
    if options.prompt is not None:
        assert options.completion is not None
        return _of_text(run, options.prompt, options.completion)
    test = run.task.dataset.test
    chosen = np.asarray(spread(num_examples(test), options.queries))
    batch = run.task.dataset.test_batch({name: a[chosen] for name, a in test.items()})
    return Query("test", f"the mean loss of {len(chosen):,} test examples", batch)


def _of_image(run: Setup, file: str, name: str | None, network: RestoredNetwork) -> Query:
    classes, preprocessor = run.task.dataset.classes, run.config.data.preprocessor
    try:
        image = preprocessor(file).image
    except UnreadableError as error:
        raise UserError(f"--example: {file}: {error}") from error
    if name is None:
        outputs = kind_of(run.config).outputs
        assert outputs is not None  # because it predicts labels
        network_of = jax.jit(outputs(run.config, run.task.model))
        probabilities = network_of(network.evaluation_params, network.model_state, image[None])
        label = int(np.asarray(probabilities)[0].argmax())
    elif name in classes:
        label = classes.index(name)
    else:
        raise UserError(f"--label: no class {name}; expected one of {', '.join(classes[:10])}")
    batch = {"image": image[None], "label": np.array([label], np.int32)}
    stem = file.replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0]
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in stem)
    return Query(f"image-{name}", f"the label {classes[label]} of {file}", batch)


def _of_text(run: Setup, prompt: str, completion: str) -> Query:
    data = language.text_source(run.config)
    tokenizer = load_tokenizer(data)
    template = language.chat_template(data, tokenizer) if run.task.dataset.is_chat else None
    completions = [(completion, "--completion:")]
    ((tokens, count),) = encode_completions(tokenizer, prompt, completions, data.context, template)
    tokens = tokens[-(data.context + 1) :]
    is_learned = np.arange(1, len(tokens)) >= len(tokens) - count
    batch = {"tokens": tokens[None], "loss_mask": is_learned[None]}
    return Query("completion", f"{completion!r:.40} after {prompt!r:.40}", batch)


def score(
    folder: RunFolder,
    run: Setup,
    network: RestoredNetwork,
    query: Query,
    rows: TrainingRows,
    options: AttributeArguments,
    console: Console,
) -> Columns:
    """Compute loss and score of each training example; blocks of a stopped call are read."""
    params = network.evaluation_params

    def losses(params: Any, batch: Batch) -> jax.Array:
        return run.task.measure(params, network.model_state, batch).metrics["loss"]

    def make_scorer() -> Callable[[Arrays], Any]:
        batch = (jax.tree.map(jnp.asarray, query.batch),)
        try:
            if options.method == "tracin":
                score = fnet.attribution.tracin(losses, [params], [1.0], batch, average=True)
            else:
                with counting(console, "computing the curvature, in two passes") as progress:
                    few = TrainingRows(run, options.curvature, progress)
                    score = fnet.attribution.ekfac(
                        losses, params, few, batch, damping=options.damping, average=True
                    )
        except ValueError as error:  # a network that mixes examples
            raise UserError(f"{folder.path}: {error}") from error

        return jax.jit(
            lambda batch: jnp.concatenate([losses(params, batch)[:, None], score(batch)], 1)
        )

    identity = {
        "run": folder.id,
        "step": network.step,
        "query": query.text,
        "options": dataclasses.asdict(options),
        "examples": num_examples(run.task.dataset.train),
        "batch_size": rows.size,
    }
    what = f"scoring {identity['examples']:,} training examples"
    line_printer(console)(f"{what} of step {network.step} for {query.text}")
    with writing(folder.path, "make it writable"), counting(console, what) as progress:
        blocks = folder.attribution / query.name
        values = score_in_blocks(blocks, identity, rows, make_scorer, progress)
    return {"loss": values[:, 0], "score": values[:, 1]}


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


def columns_of(state: "fnet.attribution.InRunState") -> Columns:
    """Return what a run recorded of its training examples; the query is the test loss."""
    return {"loss": np.asarray(state.mean_losses), "score": np.asarray(state.scores)}


def write_losses(folder: RunFolder, rows: TrainingRows, columns: Columns) -> list[Path]:
    """Write attribution.csv and attribution.png: training examples of the highest loss first."""
    order = descending(columns["loss"])
    shown = dict.fromkeys(order[:_NUM_PICTURED], True)
    title = "training images of the highest loss, which may have wrong labels"
    return _write(folder.attributions, rows, columns, order, shown, title)


def write_query(
    folder: RunFolder, rows: TrainingRows, columns: Columns, query: Query
) -> list[Path]:
    """Write attribution/NAME.csv and NAME.png: the training examples that help most first."""
    order, half = descending(columns["score"]), _NUM_PICTURED // 2
    shown = {row: bool(columns["score"][row] < 0) for row in order[:half] + order[-half:]}
    title = f"helpful and, in red, harmful training images for {query.text}"
    return _write(folder.attribution / f"{query.name}.csv", rows, columns, order, shown, title)


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
    captions = ["\n".join(output.plots.end_of(text, 26) for text in pair) for pair in names]
    output.plots.classifications(images, captions, [not h for h in shown.values()], title, picture)
    return [table, picture]


def print_examples(
    kind: str, rows: TrainingRows, columns: Columns, chosen: Sequence[int], console: Console
) -> None:
    """Print examples as a table on a terminal, as lines elsewhere."""
    cells, lines = [], []
    for row in chosen:
        example, label = rows.dataset.name(row), rows.label(row)
        scores = {name: f"{column[row]:.4g}" for name, column in columns.items()}
        cells.append((example, label, *scores.values()))
        texts = [f"label {label}"] * bool(label) + [f"{n} {text}" for n, text in scores.items()]
        lines.append("  ".join([f"{kind}: {example}", *texts]))
    heads = ("training example", "label", *columns)
    show_table(console, Table(kind, heads, cells, texts=2), lines)
