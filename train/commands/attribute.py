"""``fnet attribute``: find the training examples that made predictions better or worse."""

from rich.console import Console

from train.arguments import AttributeArguments
from train.errors import UserError, writing
from train.output.progress import line_printer
from train.run import attribution
from train.run.attribution import TrainingRows, columns_of, descending, print_examples
from train.run.checkpoints import Checkpoints, no_checkpoint
from train.run.open_run import OpenRun


def main(words: list[str], options: AttributeArguments) -> None:
    """Run ``fnet attribute RUN``."""
    attribute(OpenRun.of(words[0]), options, Console())


def attribute(opened: OpenRun, options: AttributeArguments, console: Console) -> None:
    """Score the training examples of a run for its test loss, or for one prediction.

    Print the most important ones, write all of them as a table to ``attribution/NAME.csv``, and
    draw images.
    """
    folder, config, log = opened.folder, opened.config, line_printer(console)
    _check(opened, options)
    mixed = [name for name in ("mixup", "cutmix") if getattr(config.data, name)]
    opened = opened.replace(data=config.data.replace(**dict.fromkeys(mixed, 0.0)))
    is_recorded = config.grad.mode == "attribution"
    # Whatever a run's gradient mode is, its scores do not depend on it.
    run = opened.setup(without_users=not is_recorded)
    if changed := opened.data_change(run):
        log(changed)
    rows = TrainingRows(run)
    is_query = options.example is not None or options.prompt is not None
    query = None
    if is_recorded and not is_query:
        log("losses and scores are those that the run recorded while it trained")
        with Checkpoints(folder.checkpoints) as checkpoints:
            restored = checkpoints.restore(run.state_shapes, run.task.model)
        if restored is None:
            raise no_checkpoint(folder.checkpoints)
        opened.warn_unfinished(restored.step)
        columns = columns_of(restored.state.opt_state)
    else:
        _, network = opened.network(run.task.model, best=options.best)
        query = attribution.query_of(run, network, options)
        columns = attribution.score(folder, run, network, query, rows, options, console)
    with writing(folder.path, "make it writable"):
        if query is None or not is_query:
            groups = {"highest loss": descending(columns["loss"])}
            files = attribution.write_losses(folder, rows, columns)
        else:
            order = descending(columns["score"])
            groups = {"helpful": order, "harmful": order[::-1]}
            files = attribution.write_query(folder, rows, columns, query)
    for kind, order in groups.items():
        print_examples(kind, rows, columns, order[: options.top_k], console)
    log(f"files: {', '.join(map(str, files))}")


def _check(opened: OpenRun, options: AttributeArguments) -> None:
    folder, config, kind = opened.folder, opened.config, opened.kind
    if config.is_release_only:
        raise UserError(
            f"{folder.path} writes only what its privacy guarantee covers (grad.release_only), and "
            "scores of training examples are not covered"
        )
    if (options.prompt is None) != (options.completion is None):
        missing = "prompt" if options.prompt is None else "completion"
        given = "completion" if options.prompt is None else "prompt"
        raise UserError(f"--{given}: needs --{missing}, too")
    if options.example is not None and options.prompt is not None:
        raise UserError("--example and --prompt: give one of them")
    if options.example is not None and (kind.predicts, config.data.targets) != ("labels", "class"):
        raise UserError(
            f"--example: {folder.path} is a run of {config.model.name}, which predicts no class of "
            "an image"
        )
    if options.prompt is not None and kind.generates != "text":
        raise UserError(f"--prompt: {folder.path} is a run of {config.model.name}, not of text")
    if kind.content not in ("images", "text") or kind.generates == "images":
        raise UserError(
            f"{folder.path} is a run of {config.model.name}; expected one that predicts labels of "
            "images or text"
        )
