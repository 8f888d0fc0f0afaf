"""``fnet eval``: evaluate a run's checkpoint on its test examples."""

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from train import arguments
from train.arguments import EvalArguments, positional
from train.data import Dataset, num_examples
from train.data.files import describe_copies, describe_images
from train.data.unreadable import UnreadableFiles
from train.errors import UserError, writing
from train.gradients.mean import Mean
from train.output.progress import line_printer
from train.output.rows import as_csv
from train.run import examples
from train.run.checkpoints import load_network
from train.run.choices import answer_choices
from train.run.examples import class_scores, example_rows, print_scores, text_metrics
from train.run.mesh import layout, make_cpu_devices
from train.run.open_run import OpenRun
from train.run.run_folder import RunFolder, atomic_write
from train.tasks import images, load
from train.tasks.segmentation import Views, make_measure

_PLACE = ("split", "path")
"""Options that name other test examples."""
_MIN_SIDE = 8
"""Smallest side of a scaled image in pixels, from which a network computes one feature."""


def main(argv: list[str]) -> None:
    """Run ``fnet eval RUN``."""
    (given,), flags = positional(argv, "fnet eval RUN", EvalArguments)
    for flag in flags:
        if flag.startswith("--data."):
            raise UserError(
                f"{flag}: fnet eval takes the data of the run; give --split NAME or --path FOLDER "
                "for other examples, or change how masks are read with fnet train RUN --resume"
            )
    options = arguments.read(EvalArguments, flags, f"fnet eval {given}")
    opened = with_options(OpenRun(RunFolder.of(given)), options)
    if options.chat and options.choices is None:
        raise UserError("--chat: writes the questions of --choices; give a file of questions")
    if options.choices is None:
        evaluate_run(opened, options, Console())
    else:
        log, best, chat = line_printer(Console()), options.best, options.chat
        answer_choices(opened, options.choices, log, best=best, chat=chat)


def evaluate_run(opened: OpenRun, options: EvalArguments, console: Console) -> None:
    """Print the metrics and write evaluation.json, confusion.png and examples.png.

    `evaluation_files` names them after the options. A private run of which only covered results are
    written (`grad.release_only`) has no examples.png, because it shows test images.
    """
    folder, config, log = opened.folder, opened.config, line_printer(console)
    make_cpu_devices(config.mesh)
    is_own = options.path is None and options.split is None
    dataset = None if is_own else config.data.load_test(lambda: opened.outputs)
    if dataset is None:
        run = opened.setup()
    else:  # Without the training examples, nothing about gradients can be checked.
        run = opened.setup(dataset, data=config.data.without_users(), grad=Mean())
    # On the mesh it was trained on, if this machine has as many devices.
    if 1 < config.mesh.data * config.mesh.fsdp <= len(jax.devices()):
        run = run.on(layout(config))
    views = Views(options.scales or (1.0,), options.flip)
    if views != Views():
        measure = make_measure(config, run.task.model, views)
        run = run._replace(task=run.task._replace(measure=measure))
    place = run.layout.fields if run.layout else None
    network = load_network(folder, run.task.model, best=options.best, place=place)
    changed = opened.data_change(run) if is_own else None
    notes = () if is_own else (*run.task.dataset.notes, *_describe_test(folder, run.task.dataset))
    for note in (*([changed] if changed else ()), *(f"data: {note}" for note in notes)):
        log(note)
    unreadable = UnreadableFiles(run.task.dataset, log)
    # With several crops or views per image, fewer images make a batch of the same size.
    batch_size = config.data.batch_size // max(config.data.crops, views.num_views)
    evaluate = run.evaluation(unreadable, batch_size)
    evaluation = evaluate(network)
    evaluation = evaluation._replace(metrics=evaluation.metrics | text_metrics(run, evaluation))

    files, description = evaluation_files(folder, given_options(options))
    title = ", ".join(filter(None, [f"{config.name}, step {network.step}", description]))
    written = {"evaluation": files.evaluation}
    with writing(folder.path, "make it writable"):
        files.private.mkdir(parents=True, exist_ok=True)
        content = {
            "step": network.step,
            "options": dataclasses.asdict(options),
            "metrics": evaluation.test_metrics,
            "classes": class_scores(run, evaluation),
            "description": description,
            "unreadable_files": unreadable.count,
            "data_changed": changed,
        }
        folder.write(files.evaluation, content)
        if rows := example_rows(run, evaluation, options.split or "test"):
            atomic_write(files.rows, as_csv(rows))
            written["images" if opened.kind.labels_images else "texts"] = files.rows
        pictures = {"confusion matrix": files.confusion, "examples": files.examples}
        drawn = examples.draw_results(run, evaluate, network, evaluation, title, *pictures.values())
        written |= {name: path for name, path in pictures.items() if path in drawn}
    described = f" with {description}" if description else ""
    log(f"{folder.path} after step {network.step}{described}")
    print_scores(run, evaluation, console)
    for name, path in written.items():
        log(f"{name}: {path}")


def _describe_test(folder: RunFolder, dataset: Dataset) -> tuple[str, ...]:
    """Return notes about images of several frames, and those that the run was trained on."""
    if dataset.test_name is None:
        return ()
    test = [*map(dataset.test_name, range(num_examples(dataset.test)))]
    notes = describe_images(test)
    with contextlib.suppress(UserError):  # the data of the run may be gone
        own = load(folder.read_config())
        if own.name is not None:
            train = map(own.name, range(num_examples(own.train)))
            notes += describe_copies(train, test)
    return notes


def with_options(opened: OpenRun, options: EvalArguments) -> OpenRun:
    """Return the run with the evaluation's options in its config."""
    data, kind = opened.config.data, opened.kind
    changed = [n for n in _PLACE + kind.data_options if n in data.evaluation_options]
    allowed = (*changed, *kind.options)
    given = {n: value for n, value in given_options(options).items() if n != "best"}
    for name in given:
        if name not in allowed:
            raise UserError(
                f"{_flag(name)}: {opened.folder.path} is a run of {opened.config.model.name} on "
                f"{data.source}; its options: {', '.join(map(_flag, allowed)) or 'none'}"
            )
    changes = {n: value for n, value in given.items() if n in changed}
    opened = opened.replace(data=data.for_evaluation(changes))
    for scale in options.scales:
        side = round(scale * images.image_shape(opened.config)[0])
        if side < _MIN_SIDE:
            raise UserError(
                f"--scales: {scale:g} resizes images to {side} pixels; expected at least "
                f"{_MIN_SIDE} pixels"
            )
    return opened


def given_options(options: EvalArguments) -> dict[str, Any]:
    """Return the options by name that are not at their default."""
    fields = dataclasses.fields(options)
    return {f.name: v for f in fields if (v := getattr(options, f.name)) != f.default}


def evaluation_files(folder: RunFolder, options: Mapping[str, Any]) -> tuple[RunFolder, str]:
    """Return where an evaluation with some options is written, and ``"split test, flip"``.

    Without options, it is the folder that training writes to, too. Other options do not overwrite.
    """
    if not options:
        return folder, ""
    at = folder.evaluations / ",".join(_file_name(*item) for item in options.items())
    return RunFolder(at), ", ".join(_describe(*item) for item in options.items())


def _describe(name: str, value: Any) -> str:
    name = name.replace("_", " ")
    return name if value is True else f"{name} {' '.join(_texts(value))}"


def _file_name(name: str, value: Any) -> str:
    if value is True:
        return name
    text = "+".join(_texts(value))
    safe = re.sub(r"[^\w.+-]", "_", Path(text).name or "root")[-60:]
    if safe != text:  # two folders can have the same name
        digest = hashlib.sha256(os.fsencode(os.path.abspath(text))).hexdigest()
        safe = f"{safe}-{digest[:6]}"
    return f"{name}={safe}"


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, tuple) else (value,)
    return [f"{v:g}" if isinstance(v, float) else str(v) for v in values]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
