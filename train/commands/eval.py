"""`fnet eval`: a run's newest checkpoint on its test examples, by one or by many views of each."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from train.arguments import EvalArguments
from train.config import Config, DeepLab, Denoiser, HuggingFace, ImageFolder
from train.data.unreadable import UnreadableFiles
from train.errors import UserError
from train.output import examples, plots
from train.output.confusion import accuracy_by_class, iou_by_class
from train.output.progress import plain, printable
from train.run.checkpoint import Checkpoints
from train.run.class_names import check_classes
from train.run.evaluate import Evaluation
from train.run.run_folder import RunFolder, as_json, write_whole
from train.run.setup import Setup, setup
from train.tasks.segmentation import Views, measuring

_MOST_CLASSES = 40
"""Lines of the table of classes, at most."""
_SMALLEST = 8
"""Pixels of a scaled image's side, at least: of them a network makes one feature."""


class ClassScore(NamedTuple):
    """Of one class.

    Attributes:
      name: of the class.
      amount: of its test examples, or pixels.
      score: accuracy, or intersection over union; None where there is nothing to score.
    """

    name: str
    amount: int
    score: float | None


def evaluate_run(folder: RunFolder, a: EvalArguments, console: Console) -> None:
    """Measures, shows and writes evaluation.json, confusion.png and examples.png into the folder.

    Raises:
      UserError: for a run without a checkpoint, an option that is not for runs of its kind, or
        a folder that cannot be written.
    """
    config = with_options(folder, folder.read_config(), a)
    run = setup(config)
    check_classes(folder, run.task.dataset.classes)
    views = Views(a.scales or (1.0,), a.flip)
    if views != Views():
        run = run._replace(task=run.task._replace(measure=measuring(config, run.task.model, views)))
    with Checkpoints(folder.checkpoints, best=a.best) as checkpoints:
        network = checkpoints.restore_network(run.task.model.init)
    # A network that sees each image several times is given as many fewer of them at once.
    rows = max(config.data.batch_size // max(run.crops, views.number), 1)
    say = plain(console)
    unreadable = UnreadableFiles(run.task.dataset, say)
    evaluate = run.compile_evaluation(unreadable, rows)
    found = evaluate(network)

    title = f"{config.name}, step {network.step}"
    as_dict = _as_dict(run, a, network.step, found) | {"unreadable_files": unreadable.count}
    written = {"evaluation": folder.evaluation}
    try:
        write_whole(written["evaluation"], as_json(as_dict))
        if found.confusion is not None:
            plots.confusion_matrix(
                found.confusion, run.task.dataset.classes, title, folder.confusion
            )
            written["confusion"] = folder.confusion
        path = folder.examples
        if examples.draw(run, evaluate, network, path):
            written["examples"] = path
    except OSError as error:
        raise UserError(f"cannot write to {folder.path}: {error.strerror or error}") from error
    say(f"{folder.path} after step {network.step}")
    show(run, found, console)
    for name, file in written.items():
        say(f"{name}: {file}")


def show(run: Setup, found: Evaluation, console: Console) -> None:
    """The metrics, then each class: as a table on a terminal, as lines elsewhere.

    Of more than 40 classes those with the lowest score.
    """
    say = plain(console)
    for name, value in found.metrics.items():
        say(f"test/{name} {value:.6g}")
    scores = _class_scores(run, found.confusion)
    scored = sorted((c for c in scores if c.score is not None), key=lambda c: c.score or 0.0)
    kind, of = ("IoU", "pixels") if _segments(run) else ("accuracy", "examples")
    shown = scores
    if len(scores) > _MOST_CLASSES:
        shown = scored[:_MOST_CLASSES]
        say(f"the {len(shown)} classes of lowest {kind}, of {len(scores)}:")
    if shown and console.is_terminal:
        table = Table()
        table.add_column("class", overflow="fold")
        for name in (of, kind):
            table.add_column(name, justify="right")
        for c in shown:
            table.add_row(
                escape(printable(c.name)),
                f"{c.amount:,}",
                "-" if c.score is None else f"{c.score:.2%}",
            )
        console.print(table)
    else:
        for c in shown:
            score = "-" if c.score is None else f"{c.score:.4f}"
            say(f"{kind} of {c.name} {score}, {c.amount:,} {of}")


def with_options(folder: RunFolder, config: Config, a: EvalArguments) -> Config:
    """The config of a run with what is asked for.

    Raises:
      UserError: for an option that is not for runs of its kind.
    """
    allowed: tuple[str, ...] = ()
    if isinstance(config.model, DeepLab):
        allowed = ("image_size", "scales", "flip")
    elif isinstance(config.data, ImageFolder) and not isinstance(config.model, Denoiser):
        allowed = ("crops", "border", "image_size", "resize")
    elif isinstance(config.data, HuggingFace) and not isinstance(config.model, Denoiser):
        allowed = ("image_size", "resize")
    flags = {f.name: f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(a)}
    options = [f for f in dataclasses.fields(a) if f.name != "best"]  # which is for all runs
    given = [f.name for f in options if getattr(a, f.name) != f.default]
    for name in given:
        if name not in allowed:
            there = ", ".join(flags[n] for n in allowed) or "none"
            raise UserError(
                f"{flags[name]}: {folder.path} is a run of {config.model.name} on "
                f"{config.data.source}; options for it: {there}"
            )
    changes = {n: getattr(a, n) for n in given if n not in ("scales", "flip")}
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))
    for scale in a.scales:
        side = round(scale * getattr(config.data, "image_size", 0))
        if side < _SMALLEST:
            raise UserError(
                f"--scales: {scale:g} leaves images of {side} pixels; "
                f"at least {_SMALLEST} are needed"
            )
    return config


def _class_scores(run: Setup, confusion: np.ndarray | None) -> list[ClassScore]:
    """Of each class; [] where nothing is classified."""
    if confusion is None:
        return []
    of = iou_by_class if _segments(run) else accuracy_by_class
    rows = zip(run.task.dataset.classes, confusion.sum(1), of(confusion), strict=True)
    return [ClassScore(n, int(count), None if np.isnan(v) else float(v)) for n, count, v in rows]


def _as_dict(run: Setup, a: EvalArguments, step: int, found: Evaluation) -> dict[str, Any]:
    kind, of = ("iou", "pixels") if _segments(run) else ("accuracy", "examples")
    return {
        "step": step,
        "options": dataclasses.asdict(a),
        "metrics": {f"test/{name}": value for name, value in found.metrics.items()},
        "classes": [
            {"name": c.name, of: c.amount, kind: c.score}
            for c in _class_scores(run, found.confusion)
        ],
    }


def _segments(run: Setup) -> bool:
    return isinstance(run.config.model, DeepLab)
