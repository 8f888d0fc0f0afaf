"""``fnet eval``: evaluate a run's checkpoint on its test examples."""

import dataclasses

import jax
from rich.console import Console

from train.arguments import EvalArguments, given_options
from train.data.splits import split_of
from train.data.unreadable import UnreadableFiles
from train.errors import UserError, writing
from train.output.progress import line_printer
from train.run import examples
from train.run.choices import answer_choices
from train.run.mesh import layout, make_cpu_devices
from train.run.open_run import OpenRun
from train.tasks.segmentation import Views, make_measure


def main(words: list[str], options: EvalArguments) -> None:
    """Run ``fnet eval RUN``."""
    opened = OpenRun.of(words[0]).for_evaluation(options)
    if options.choices is None:
        evaluate_run(opened, options, Console())
    else:
        log, best, chat = line_printer(Console()), options.best, options.chat
        answer_choices(opened, options.choices, log, best=best, chat=chat)


def evaluate_run(opened: OpenRun, options: EvalArguments, console: Console) -> None:
    """Print the metrics and write evaluation.json, confusion.png and examples.png.

    `examples.files_for` names them after the options. A private run of which only covered results
    are written (`grad.release_only`) has no examples.png, because it shows test images.
    """
    folder, config, log = opened.folder, opened.config, line_printer(console)
    make_cpu_devices(config.mesh)
    if config.is_release_only and split_of(f"{options.split}/") == "train":
        raise UserError(
            f"--split: {options.split}, but {folder.path} writes only what its privacy guarantee "
            "covers (grad.release_only), and scores of training examples are not covered"
        )
    is_own = options.path is None and options.split is None
    dataset = None if is_own else config.data.load_test(lambda: opened.outputs)
    # Without the training examples, nothing about gradients can be checked.
    run = opened.setup(dataset, without_users=dataset is not None)
    # On the mesh it was trained on, if this machine has as many devices.
    if 1 < config.mesh.data * config.mesh.fsdp <= len(jax.devices()):
        run = run.on(layout(config))
    views = Views(options.scales or (1.0,), options.flip)
    if views != Views():
        measure = make_measure(config, run.task.model, views)
        run = run._replace(task=run.task._replace(measure=measure))
    place = run.layout.fields if run.layout else None
    _, network = opened.network(run.task.model, best=options.best, place=place)
    changed = opened.data_change(run) if is_own else None
    if changed:
        log(changed)
    for note in () if is_own else opened.notes_on_test(run.task.dataset):
        log(f"data: {note}")
    unreadable = UnreadableFiles(run.task.dataset, log)
    # With several crops or views per image, fewer images make a batch of the same size.
    batch_size = config.data.batch_size // max(config.data.crops, views.num_views)
    evaluate = run.evaluation(unreadable, batch_size)
    evaluation = evaluate(network)
    metrics = evaluation.metrics | examples.text_metrics(run, evaluation)
    evaluation = evaluation._replace(metrics=metrics)

    files, description = examples.files_for(folder, given_options(options))
    title = ", ".join(filter(None, [f"{config.name}, step {network.step}", description]))
    with writing(folder.path, "make it writable"):
        files.private.mkdir(parents=True, exist_ok=True)
        content = {
            "step": network.step,
            "options": dataclasses.asdict(options),
            "metrics": evaluation.test_metrics,
            "classes": examples.class_scores(run, evaluation),
            "description": description,
            "unreadable_files": unreadable.count,
            "data_changed": changed,
        }
        folder.write(files.evaluation, content)
        split = options.split or "test"
        written = examples.write(run, evaluate, network, evaluation, title, files, split)
    described = f" with {description}" if description else ""
    log(f"{folder.path} after step {network.step}{described}")
    examples.print_scores(run, evaluation, console)
    for name, path in ({"evaluation": files.evaluation} | written).items():
        log(f"{name}: {path}")
