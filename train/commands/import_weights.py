"""``fnet import``: start a run from pretrained weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fnet import TrainState
from fnet.interop import torch as interop
from train import arguments
from train.arguments import ImportArguments
from train.commands import import_model, weight_files
from train.commands.positional import positional
from train.config import Config, recipes
from train.data.model_folder import is_model_folder
from train.errors import UserError
from train.output.progress import line_printer
from train.run.checkpoints import Checkpoints
from train.run.class_names import write_classes
from train.run.run_folder import RunFolder, as_json, atomic_write, quote
from train.run.seeds import create_secret, read_seeds
from train.run.setup import Setup, setup

_TABLE_EXAMPLES = 3
"""Number of array names that the table shows of each kind."""


def main(argv: list[str]) -> None:
    """Run ``fnet import CONFIG WEIGHTS``, or ``fnet import MODEL`` for a published model."""
    if argv and is_model_folder(Path(argv[0])):
        import_model.main(argv)
        return
    (given, weights), flags = positional(argv, "fnet import CONFIG WEIGHTS", ImportArguments)
    options, config = arguments.read_with_config(
        ImportArguments, recipes.load(given), flags, f"fnet import {given} {weights}"
    )
    out = Path(options.out or f"runs/{config.name}")
    report = import_weights(config, Path(weights), out, options)
    console = Console()
    console.print(report_table(report))
    run = quote(out)
    line_printer(console)(
        f"wrote {out} at step 0; evaluate it with fnet eval {run}, train it with "
        f"fnet train {run} --resume"
    )


def import_weights(
    config: Config, path: Path, out: Path, options: ImportArguments
) -> interop.LoadReport:
    """Create a run at step 0 with weights from a file.

    Args:
      config: config of the run, whose network takes the weights.
      path: file of weights (`weight_files.read`).
      out: folder of the run: config.json, import.json and a checkpoint of step 0.
      options: which arrays to read. The norm of the weights is by default the one in the
        file's metadata.

    Raises:
      UserError: if file and network do not fit, or the data or the folder cannot be used.
        Nothing is written then.
    """
    weight_files.check_network(config)
    weights = weight_files.read(path)
    run = setup(config)
    network = weight_files.describe_network(config)
    try:
        loaded = interop.load_state_dict(
            run.state_shapes.params,
            run.state_shapes.model_state,
            weights.state_dict,
            norm=network["norm"],
            trained_with=options.trained_with or weights.metadata.get("norm"),
            new_classifier=options.new_classifier,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {weight_files.with_flags(error)}") from error
    report = loaded.report
    notes = map(weight_files.with_flags, report.notes)
    differences = _differences(report, weights.metadata, network)
    report = report._replace(notes=(*notes, *differences))

    state = _initial_state(run, loaded.params, loaded.state)
    folder = RunFolder(out)
    with folder.lock():
        folder.create()
        write_classes(folder, run.task.dataset.classes, run.task.dataset.label_map)
        create_secret(folder, config)
        seeds = read_seeds(folder, config)
        position = run.training_batches(seeds.data).get_state()
        with Checkpoints(
            folder.checkpoints, config.checkpoint.keep, shapes=run.state_shapes
        ) as checkpoints:
            checkpoints.save(0, seeds.remove_key(state), position)
            checkpoints.wait()
        folder.write_config(config)  # last, so that a folder without weights is not a run
        as_dict = report._asdict() | {"file": str(path), "renamed": report.renamed}
        atomic_write(folder.imported, as_json(as_dict))
    return report


def report_table(report: interop.LoadReport) -> Table:
    """Count the arrays that were read, renamed and skipped, with the first few of each."""
    t = Table(title=f"weights with {report.names} names", title_justify="left")
    t.add_column("arrays")
    t.add_column("", justify="right")
    t.add_column("first", overflow="fold")
    renamed = [f"{key} -> {name}" for key, name in report.renamed.items()]
    for kind, names in {
        "read": list(report.read),
        "  renamed": renamed,
        "unused": report.unused,
        "initial values": report.initial,
    }.items():
        more = ["..."] if len(names) > _TABLE_EXAMPLES else []
        t.add_row(kind, f"{len(names):,}", escape("\n".join([*names[:_TABLE_EXAMPLES], *more])))
    for note in report.notes:
        t.add_row("note", "", escape(note))
    return t


def _differences(
    report: interop.LoadReport, theirs: dict[str, str], ours: dict[str, str]
) -> tuple[str, ...]:
    """Compare the network's options with those in the file, which array shapes do not show."""
    theirs = ({"activation": "relu"} if report.names == "torchvision" else {}) | theirs
    return tuple(
        f"{name} is {ours[name]} here; the weights were trained with {theirs[name]}"
        for name in ours
        if name != "norm" and name in theirs and theirs[name] != ours[name]
    )


def _initial_state(run: Setup, params: Any, model_state: Any) -> TrainState:
    """Build the state before the first step; shapes in place of arrays take initial values."""
    given = params, model_state

    def init(key: Array) -> tuple[Any, TrainState]:
        state = run.init(key)
        missing = jax.tree.map(_where_missing, given, (state.params, state.model_state))
        # Unused initial values are not returned, so that XLA need not compile them.
        rest = dataclasses.replace(state, params=None, model_state=None, opt_state=None, ema=None)
        return missing, rest

    missing, state = jax.jit(init)(jax.random.key(run.config.train.seed))
    params, model_state = jax.tree.map(lambda a, b: a if b is None else b, given, missing)
    shapes = run.state_shapes
    ema = shapes.ema and jax.tree.map(lambda a, to: jnp.array(a, to.dtype), params, shapes.ema)
    params = jax.tree.map(lambda a, to: a.astype(to.dtype), params, shapes.params)
    opt_state = jax.jit(run.step.optimizer.init)(params)  # some states hold the parameters
    return dataclasses.replace(
        state, params=params, model_state=model_state, opt_state=opt_state, ema=ema
    )


def _where_missing(given: Any, initial: Array) -> Array | None:
    return initial if isinstance(given, jax.ShapeDtypeStruct) else None
