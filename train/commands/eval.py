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
import numpy as np
from rich.console import Console

from train import arguments
from train.arguments import EvalArguments
from train.commands.positional import positional
from train.config import Config
from train.data import Dataset, num_examples
from train.data.files import describe_copies, describe_images
from train.data.tokenizer import load_tokenizer
from train.data.unreadable import UnreadableFiles
from train.errors import UserError, writing
from train.gradients.mean import Mean
from train.output.curves import describe
from train.output.progress import line_printer
from train.output.rows import as_csv
from train.output.tables import MISSING, Table, to_rich
from train.run import examples
from train.run.checkpoints import load_network
from train.run.choices import load_questions, score_choices
from train.run.class_names import check_classes, read_outputs
from train.run.evaluation import Evaluation
from train.run.evaluation_tables import class_scores, describe_undefined, example_rows
from train.run.mesh import layout, make_cpu_devices
from train.run.model_files import check_model, with_model_files
from train.run.results import test_metrics
from train.run.run_folder import RunFolder, atomic_write
from train.run.same_data import compare_data, describe_data
from train.run.setup import Setup, setup
from train.tasks import images, kind_of, language, load
from train.tasks.segmentation import Views, make_measure

_PLACE = ("split", "path")
"""Options that name other test examples."""
_MAX_CLASSES = 40
"""Largest number of rows in the table of classes."""
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
    evaluate_run(RunFolder.of(given), options, Console())


def evaluate_run(folder: RunFolder, options: EvalArguments, console: Console) -> None:
    """Print the metrics and write evaluation.json, confusion.png and examples.png.

    `evaluation_files` names them after the options.

    With a file of questions, the answers are evaluated instead, and choices.json is written.

    A private run of which only covered results are written (`grad.release_only`) has no
    examples.png, because it shows test images.

    Raises:
      UserError: for a run without a checkpoint, an option that its kind does not have, or a
        folder that cannot be written.
    """
    config = check_model(folder, folder.read_config())
    config = apply_options(folder, with_model_files(folder, config), options)
    if options.chat and options.choices is None:
        raise UserError("--chat: writes the questions of --choices; give a file of questions")
    if options.choices is not None:
        answer_choices(folder, config, options, console)
        return
    make_cpu_devices(config.mesh)
    run = _setup(folder, config, options)
    # On the mesh it was trained on, if this machine has as many devices.
    if 1 < config.mesh.data * config.mesh.fsdp <= len(jax.devices()):
        run = run.on(layout(config))
    views = Views(options.scales or (1.0,), options.flip)
    if views != Views():
        run = run._replace(
            task=run.task._replace(measure=make_measure(config, run.task.model, views))
        )
    run.task.before_batches(folder.path)
    place = run.layout.fields if run.layout else None
    network = load_network(folder, run.task.model, best=options.best, place=place)
    # With several crops or views per image, fewer images make a batch of the same size.
    batch_size = config.data.batch_size // max(run.config.data.crops, views.num_views)
    log = line_printer(console)
    changed = None
    if options.path is None and options.split is None:
        data = describe_data(run.task.dataset, private=config.is_private)
        if changed := compare_data(folder, config, data):
            log(changed)
    else:
        for note in (*run.task.dataset.notes, *_describe_test_images(folder, run.task.dataset)):
            log(f"data: {note}")
    unreadable = UnreadableFiles(run.task.dataset, log)
    evaluate = run.evaluation(unreadable, batch_size)
    evaluation = evaluate(network)
    evaluation = evaluation._replace(metrics=evaluation.metrics | _text_metrics(run, evaluation))

    files, description = evaluation_files(folder, given_options(options))
    title = ", ".join(filter(None, [f"{config.name}, step {network.step}", description]))
    written = {"evaluation": files.evaluation}
    with writing(folder.path, "make it writable"):
        files.private.mkdir(parents=True, exist_ok=True)
        content = {
            "step": network.step,
            "options": dataclasses.asdict(options),
            "metrics": test_metrics(evaluation.metrics),
            "classes": class_scores(run, evaluation),
            "description": description,
            "unreadable_files": unreadable.count,
            "data_changed": changed,
        }
        folder.write(files.evaluation, content)
        if rows := example_rows(run, evaluation, options.split or "test"):
            atomic_write(files.rows, as_csv(rows))
            written["images" if kind_of(run.config).labels_images else "texts"] = files.rows
        pictures = {"confusion matrix": files.confusion, "examples": files.examples}
        drawn = examples.draw_results(run, evaluate, network, evaluation, title, *pictures.values())
        written |= {name: path for name, path in pictures.items() if path in drawn}
    described = f" with {description}" if description else ""
    log(f"{folder.path} after step {network.step}{described}")
    print_scores(run, evaluation, console)
    for name, path in written.items():
        log(f"{name}: {path}")


def _setup(folder: RunFolder, config: Config, options: EvalArguments) -> Setup:
    """Set up the run with its own test examples, or with those that the options name."""
    data = config.data
    dataset: Dataset | None = None
    if options.path is not None or options.split is not None:
        dataset = data.load_test(lambda: read_outputs(folder, folder.read_config()))
    if dataset is None:
        if data.targets == "numbers":  # more rows in the table must not change what outputs mean
            scaling = read_outputs(folder, config).scaling
            dataset = load(config)._replace(scaling=scaling)
        run = setup(config, dataset=dataset)
        check_classes(folder, run.task.dataset.outputs)
        return run
    # Without the training examples, nothing about gradients can be checked, and nothing needs to.
    plain = dataclasses.replace(config, data=data.without_users(), grad=Mean())
    return setup(plain, dataset=dataset)._replace(config=config)


def _describe_test_images(folder: RunFolder, dataset: Dataset) -> tuple[str, ...]:
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


def answer_choices(
    folder: RunFolder, config: Config, options: EvalArguments, console: Console
) -> None:
    """Print how many multiple-choice questions the model answers, and write choices.json.

    Neither the training nor the test data of the run are read.

    Raises:
      UserError: for a run without a checkpoint, a wrong file of questions, or a folder that cannot
        be written.
    """
    file, data = options.choices, language.text_source(config)
    assert file is not None
    tokenizer = load_tokenizer(data)
    try:
        template = language.chat_template(data, tokenizer) if options.chat else None
    except UserError as error:
        raise UserError(f"--chat: {error}") from error
    questions = load_questions(file, "--choices", tokenizer, data.context, template)
    model = language.build_network(config)
    params, state, step = load_network(folder, model, best=options.best)
    scores = score_choices(model, params, state, questions, data.batch_size, data.context)
    metrics = {
        f"choices/{name}": value
        for name, value in scores._asdict().items()
        if name.startswith("accuracy")
    }
    num_truncated = sum(question.truncated for question in questions)
    as_dict = {
        "step": step,
        "file": file,
        "metrics": metrics,
        "questions": len(questions),
        "truncated_questions": num_truncated,
        "answers": [
            {"answer": q.answer, "log_likelihoods": s.tolist()}
            for q, s in zip(questions, scores.log_likelihoods, strict=True)
        ],
    }
    with writing(folder.path, "make it writable"):
        folder.write(folder.choices, as_dict)
    log = line_printer(console)
    log(f"{folder.path} after step {step}, {len(questions):,} questions")
    if num_truncated:
        log(f"{num_truncated:,} questions lost their beginning to fit in {data.context} tokens")
    for name, value in metrics.items():
        log(f"{name} {value:.6g}")
    log(f"choices: {folder.choices}")


def _text_metrics(run: Setup, evaluation: Evaluation) -> dict[str, float]:
    """Return the perplexity of a language model, and its bits per byte if they are known."""
    if kind_of(run.config).generates != "text":
        return {}
    loss = evaluation.metrics["loss"]
    with np.errstate(over="ignore"):
        metrics = {"perplexity": float(np.exp(loss))}
    ratio = run.task.dataset.tokens_per_byte()
    return metrics if ratio is None else metrics | {"bits_per_byte": loss * ratio / np.log(2)}


def print_scores(run: Setup, evaluation: Evaluation, console: Console) -> None:
    """Print metrics and class scores, as a table on a terminal and as lines elsewhere.

    With more than 40 classes, only those with the lowest scores are printed.
    """
    log = line_printer(console)
    for name, value in test_metrics(evaluation.metrics).items():
        log(f"{name} undefined" if value is None else f"{name} {value:.6g}")
    for line in describe_undefined(run, evaluation):
        log(line)
    scores = class_scores(run, evaluation)
    if not scores:
        return
    _, unit, score, *_ = scores[0]
    title, _ = describe(score)
    if len(scores) > _MAX_CLASSES:
        defined = [c for c in scores if c[score] is not None]
        lowest = sorted(defined, key=lambda c: c[score])[:_MAX_CLASSES]
        log(f"the {len(lowest)} of {len(scores)} classes with the lowest {title}:")
        scores = lowest
    if console.is_terminal:
        rows = [
            (c["name"], f"{c[unit]:,}", None if c[score] is None else f"{c[score]:.2%}")
            for c in scores
        ]
        console.print(to_rich(Table("", ("class", unit, title), rows)))
        return
    for c in scores:
        shown = MISSING if c[score] is None else f"{c[score]:.4f}"
        log(f"{title} of {c['name']}: {shown} ({c[unit]:,} {unit})")


def apply_options(folder: RunFolder, config: Config, options: EvalArguments) -> Config:
    """Return the run's config with the evaluation's options."""
    data, kind = config.data, kind_of(config)
    changed = [n for n in _PLACE + kind.data_options if n in data.evaluation_options]
    allowed = (*changed, *kind.options)
    given = {n: value for n, value in given_options(options).items() if n != "best"}
    for name in given:
        if name not in allowed:
            flags = ", ".join(_flag(n) for n in allowed) or "none"
            raise UserError(
                f"{_flag(name)}: {folder.path} is a run of {config.model.name} on "
                f"{data.source}; its options: {flags}"
            )
    changes = {n: value for n, value in given.items() if n in changed}
    config = dataclasses.replace(config, data=data.for_evaluation(changes))
    for scale in options.scales:
        side = round(scale * images.image_shape(config)[0])
        if side < _MIN_SIDE:
            raise UserError(
                f"--scales: {scale:g} resizes images to {side} pixels; expected at least "
                f"{_MIN_SIDE} pixels"
            )
    return config


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
