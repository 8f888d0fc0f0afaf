"""``fnet fit MODEL``: the ways to fine-tune a published model in a budget, from headers alone."""

import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console

from fnet.memory import format_bytes
from train.arguments import FitArguments
from train.output.progress import line_printer
from train.output.tables import to_rich
from train.platform import use_cpu
from train.run.fine_tuning import WAYS, Planner, context_of, limit_of, read_model
from train.run.planning import target_of


def main(words: list[str], options: FitArguments) -> None:
    """Run ``fnet fit MODEL``."""
    if options.target:
        use_cpu()  # nothing runs, so an accelerator of this machine does not matter
    fit(Path(words[0]), options, Console())


def fit(path: Path, options: FitArguments, console: Console) -> None:
    """Print the ways to train a model, and the command of each that fits."""
    model = read_model(path)
    target = target_of(options.target) if options.target else None
    limit = limit_of(options.budget, target)
    context = context_of(options.context, model)
    tensors = model.folder.tensors.values()
    console.print(
        f"{path}: {model.folder.config.get('model_type')}, "
        f"{sum(int(np.prod(t.shape)) for t in tensors):,} values in "
        f"{format_bytes(model.folder.nbytes)}, {model.blocks} blocks"
    )
    depths = model.depths(options.exact)
    # The context that was asked for, and two with the most remat for the longest one.
    count = len(options.ways) * (2 + len(depths))
    console.print(
        f"compiling {count} programs, or more if the first ones do not fit; a line for each"
    )
    log = line_printer(console)
    with tempfile.TemporaryDirectory() as folder, console.status("reading") as status:
        shallow = Path(folder)
        planner = Planner(
            model, limit, options.lora_rank, target, depths, shallow, log, status.update
        )
        rows = [planner.row(way, context, options.batch_size) for way in options.ways]
    console.print(to_rich(planner.table(rows)))
    for note in planner.notes(rows):
        log(note)
    for row in rows:
        if row.cost and row.cost.peak <= limit:
            log("")
            log(f"{row.way}:")
            recipe, _ = WAYS[row.way]
            log(f"  fnet train {recipe} {' '.join(row.flags)}")
