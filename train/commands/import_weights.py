"""``fnet import``: start a run from pretrained weights."""

from pathlib import Path

import jax
from rich.console import Console

from train import arguments
from train.arguments import ImportArguments
from train.commands import import_model
from train.commands.positional import positional
from train.config import Config, recipes
from train.data.model_folder import is_model_folder
from train.output.progress import line_printer
from train.run import weight_files
from train.run.checkpoints import Checkpoints
from train.run.class_names import write_classes
from train.run.initial_weights import InitialWeights, load
from train.run.run_folder import RunFolder, as_json, atomic_write, quote
from train.run.seeds import create_secret, read_seeds
from train.run.setup import setup


def main(argv: list[str]) -> None:
    """Run ``fnet import CONFIG WEIGHTS``, or ``fnet import MODEL`` for a published model."""
    if argv and is_model_folder(Path(argv[0])):
        weight_files.check_importable(Path(argv[0]))
        import_model.main(argv)
        return
    (given, weights), flags = positional(argv, "fnet import CONFIG WEIGHTS", ImportArguments)
    options, config = arguments.read_with_config(
        ImportArguments, recipes.load(given), flags, f"fnet import {given} {weights}"
    )
    out = Path(options.out or f"runs/{config.name}")
    imported = import_weights(config, weights, out, options)
    console = Console()
    console.print(imported.lines())
    run = quote(out)
    line_printer(console)(
        f"wrote {out} at step 0; evaluate it with fnet eval {run}, train it with "
        f"fnet train {run} --resume"
    )


def import_weights(
    config: Config, source: str, out: Path, options: ImportArguments
) -> InitialWeights:
    """Create a run at step 0 with trained weights.

    Args:
      config: config of the run, whose network takes the weights.
      source: file or folder of weights (`weight_files.read`).
      out: folder of the run: config.json, import.json and a checkpoint of step 0.
      options: which arrays to read. The norm of the weights is by default the one in the
        file's metadata, or the publisher's.

    Raises:
      UserError: if file and network do not fit, or the data or the folder cannot be used.
        Nothing is written then.
    """
    weight_files.check_network(config)
    run = setup(config)
    imported = load(
        run,
        source,
        trained_with=options.trained_with,
        new_classifier=options.new_classifier,
        allow_nonfinite=options.allow_nonfinite,
    )
    state = run.compile_init(imported.variables)(jax.random.key(config.train.seed))
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
        atomic_write(folder.imported, as_json(imported.as_dict()))
    return imported
