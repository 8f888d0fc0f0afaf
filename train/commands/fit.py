"""``fnet fit MODEL``: the ways to fine-tune a published model in a budget, from headers alone."""

import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live

from fnet.memory import format_bytes
from train.arguments import FitArguments
from train.output.progress import line_printer
from train.output.tables import to_rich
from train.platform import use_cpu
from train.run.fine_tuning import WAYS, Planner, Row, context_of, limit_of, read_model
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
    log, depths, rows = line_printer(console), model.depths(options.exact), dict[str, Row]()
    with (
        tempfile.TemporaryDirectory() as folder,
        Live("reading", console=console, transient=True, refresh_per_second=2) as live,
    ):

        def show(status: str) -> None:
            live.update(Group(to_rich(planner.table([*rows.values()])), status))

        shallow, given, size = Path(folder), options.ways, options.batch_size
        planner = Planner(model, limit, options.lora_rank, target, depths, shallow, log, show)
        for rows in planner.search(given or tuple(WAYS), context, size, all_ways=bool(given)):  # noqa: B007
            show("")  # reads rows
    console.print(to_rich(planner.table([*rows.values()])))
    if missing := [] if given else [way for way in WAYS if way not in rows]:
        log(
            "Not compiled, because others train the same parameters and fit without remat; they "
            f"only save memory, for longer contexts: --ways {' '.join(missing)}"
        )
    for note in planner.notes([*rows.values()]):
        log(note)
    for row in rows.values():
        if planner.fits(row):
            log("")
            log(f"{row.way}:")
            log(f"  fnet train {WAYS[row.way][0]} {' '.join(row.flags)}")
