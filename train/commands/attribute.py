"""``fnet attribute``: find the training examples that made predictions better or worse."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from fnet.attribution import ekfac, tracin
from train.arguments import AttributeArguments, read_command
from train.data import Arrays, num_examples
from train.data.batch import Batch
from train.data.decode import UnreadableError
from train.data.masks import spread
from train.data.tokenizer import load_tokenizer
from train.errors import UserError, writing
from train.gradients.mean import Mean
from train.output.progress import line_printer
from train.run.attribution import (
    TrainingRows,
    columns_of,
    counting,
    descending,
    print_examples,
    score_in_blocks,
    write_losses,
    write_query,
)
from train.run.checkpoints import Checkpoints, RestoredNetwork, load_network, no_checkpoint
from train.run.choices import encode_completions
from train.run.open_run import OpenRun
from train.run.run_folder import RunFolder
from train.run.setup import Setup
from train.tasks import kind_of, language


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


class _Curvature(TrainingRows):
    progress: Callable[[int, int], None]

    def __iter__(self) -> Iterator[tuple[Arrays]]:
        for i, batch in enumerate(super().__iter__()):
            yield batch
            self.progress(i + 1, len(self))


def main(argv: list[str]) -> None:
    """Run ``fnet attribute RUN``."""
    (given,), options = read_command(argv, "fnet attribute RUN", AttributeArguments)
    attribute(OpenRun(RunFolder.of(given)), options, Console())


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
    plain: dict[str, Any] = {"data": opened.config.data.without_users(), "grad": Mean()}
    run = opened.setup() if is_recorded else opened.setup(**plain)
    if changed := opened.data_change(run):
        log(changed)
    rows = TrainingRows(run.task.dataset, config.data.batch_size)
    is_query = options.example is not None or options.prompt is not None
    if is_recorded and not is_query:
        log("losses and scores are those that the run recorded while it trained")
        with Checkpoints(folder.checkpoints) as checkpoints:
            restored = checkpoints.restore(run.state_shapes, run.task.model)
        if restored is None:
            raise no_checkpoint(folder.checkpoints)
        columns, query = columns_of(restored.state.opt_state), None
    else:
        network = load_network(folder, run.task.model, best=options.best)
        query = _query(run, network, options)
        columns = _compute(folder, run, network, query, rows, options, console)
    with writing(folder.path, "make it writable"):
        if query is None or not is_query:
            groups = {"highest loss": descending(columns["loss"])}
            files = write_losses(folder, rows, columns)
        else:
            order = descending(columns["score"])
            groups = {"helpful": order, "harmful": order[::-1]}
            files = write_query(folder, rows, columns, query.name, query.text)
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
    if options.label is not None and options.example is None:
        raise UserError("--label: is the label of --example; give an image")
    if options.example is not None and kind.predicts != "labels":
        raise UserError(
            f"--example: {folder.path} is a run of {config.model.name}, which predicts no labels "
            "of images"
        )
    if options.prompt is not None and kind.generates != "text":
        raise UserError(f"--prompt: {folder.path} is a run of {config.model.name}, not of text")
    if kind.content not in ("images", "text") or kind.generates == "images":
        raise UserError(
            f"{folder.path} is a run of {config.model.name}; expected one that predicts labels of "
            "images or text"
        )


def _query(run: Setup, network: RestoredNetwork, options: AttributeArguments) -> Query:
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
    """Return the query of a completion: the mean loss of its tokens after the prompt."""
    data = language.text_source(run.config)
    tokenizer = load_tokenizer(data)
    template = language.chat_template(data, tokenizer) if run.task.dataset.is_chat else None
    completions = [(completion, "--completion:")]
    ((tokens, count),) = encode_completions(tokenizer, prompt, completions, data.context, template)
    tokens = tokens[-(data.context + 1) :]
    is_learned = np.arange(1, len(tokens)) >= len(tokens) - count
    batch = {"tokens": tokens[None], "loss_mask": is_learned[None]}
    return Query("completion", f"{completion!r:.40} after {prompt!r:.40}", batch)


def _compute(
    folder: RunFolder,
    run: Setup,
    network: RestoredNetwork,
    query: Query,
    rows: TrainingRows,
    options: AttributeArguments,
    console: Console,
) -> dict[str, np.ndarray]:
    params = network.evaluation_params

    def losses(params: Any, batch: Batch) -> jax.Array:
        return run.task.measure(params, network.model_state, batch).metrics["loss"]

    def make_scorer() -> Callable[[Arrays], Any]:
        batch = (jax.tree.map(jnp.asarray, query.batch),)
        try:
            if options.method == "tracin":
                score = tracin(losses, [params], [1.0], batch, average=True)
            else:
                curvature = _Curvature(run.task.dataset, rows.size, options.curvature)
                with counting(console, "computing the curvature, in two passes") as progress:
                    curvature.progress = progress
                    score = ekfac(
                        losses, params, curvature, batch, damping=options.damping, average=True
                    )
        except ValueError as error:  # a network that mixes examples
            raise UserError(f"{folder.path}: {error}") from error

        def loss_and_score(batch: Any) -> jax.Array:
            return jnp.concatenate([losses(params, batch)[:, None], score(batch)], 1)

        return jax.jit(loss_and_score)

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
