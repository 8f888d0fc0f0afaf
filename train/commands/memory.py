"""``fnet memory``: what training would take, on this machine or another, without a step."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from fnet.memory import Candidate, format_bytes
from fnet.memory.target import Target, describe, from_text
from train import config as configs
from train.arguments import MemoryArguments
from train.config import Config, Mesh
from train.errors import UserError
from train.output import plots
from train.output.memory_tables import memory_tables, plan_summary, plan_table
from train.output.progress import plain
from train.run.account import account
from train.run.mesh import layout
from train.run.planning import choose, largest_batch, limit, plan, reserve
from train.run.run_folder import as_json, write_whole
from train.run.setup import setup


def foresee(config: Config, a: MemoryArguments, console: Console) -> None:
    """Prints where the memory would go, and leaves it as data and as a picture.

    Raises:
      UserError: for a budget that nothing fits, an unknown target, a missing compiler.
    """
    target = None if a.target is None else _target(a.target)
    say = plain(console)
    if a.budget is not None:
        config = _changed(config, "memory", budget=a.budget)
    if a.batch_size not in (None, "auto"):
        config = _changed(config, "data", batch_size=_count(a.batch_size))
    run = setup(configs.check(config, "command line"))
    if target is None:
        run = run.on(layout(run.config))
    elif run.config.mesh != Mesh():
        raise UserError("--target: is one device; give --mesh.data 1 --mesh.fsdp 1")
    out = Path(a.out or f"runs/{config.name}-memory")

    with console.status("tracing") as status:

        def compiled(c: Candidate) -> None:
            status.update(f"compiled {c}: {format_bytes(c.peak.total)}")

        def tried(size: int, peak: int) -> None:
            status.update(f"looking for the largest batch: {size} takes {format_bytes(peak)}")

        room = limit(run, target)
        if a.batch_size == "auto":
            if room is None:
                raise UserError("--batch-size auto: largest for what? give --budget or --target")
            free = run._replace(config=_changed(run.config, "memory", budget=None))
            ways = plan(free, target=target, progress=compiled)
            thriftiest = min(ways.candidates, key=lambda c: c.peak.temporaries)
            size = largest_batch(run, thriftiest, room, target=target, progress=tried)
            if size is None:
                raise UserError(f"not even the smallest batch fits in {format_bytes(max(room, 0))}")
            say(f"largest batch that fits, by {thriftiest}: {size}")
            run = run.with_batch_size(size)
            if not run.config.memory.budget:  # of the ways at that size, the fastest that fits
                run = run._replace(config=_changed(run.config, "memory", budget=f"{room}B"))
        ways = plan(run, target=target, progress=compiled)
        status.update(f"compiling {ways.chosen}")
        costs = account(run, choose(run, ways, target=target))
        console.print(*memory_tables(costs), sep="\n")
        console.print(plan_table(ways, reserve(run, target)))
        say(plan_summary(ways, reserve(run, target)))
        if target:
            say(_NOT_COUNTED)
        if room is not None and a.batch_size != "auto":
            for way in _ends(ways.candidates, ways.chosen):
                size = largest_batch(run, way, room, target=target, progress=tried)
                say(f"largest batch that fits, by {way}: {size}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "memory.json", as_json(costs.as_dict()))
        plots.memory(costs, f"{config.name}: memory of a train step", out / "memory.png")
    except OSError as error:
        raise UserError(
            f"cannot write to {out}: {error.strerror or error}; choose another --out"
        ) from error
    say(f"picture: {out / 'memory.png'}")


_NOT_COUNTED = (
    "Not counted, because only the device could tell: workspaces that cuDNN chooses by trying; "
    "a TPU's small arrays, which live on the chip."
)


def _ends(candidates: tuple[Candidate, ...], chosen: Candidate) -> list[Candidate]:
    """The chosen one, and the one that grows least with the batch."""
    thriftiest = min(candidates, key=lambda c: (c.microbatches, c.peak.temporaries))
    return list({c.policy: c for c in (chosen, thriftiest)}.values())


def _changed(config: Config, section: str, **values: Any) -> Config:
    changed = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: changed})


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:  # no number, or one of thousands of digits
        count = 0
    if count < 1:
        raise UserError(f"--batch-size: expected a count of examples or auto, got {text}")
    return count


def _target(given: str) -> Target:
    """A known device, or the one that a file describes."""
    path = Path(given)
    try:
        if path.is_file():
            return from_text(path.stem, path.read_text())
        return describe(given)
    except (ValueError, RuntimeError, OSError) as error:
        said = str(error).removeprefix("describe: ").removeprefix("from_text: ")
        raise UserError(f"--target: {said}") from error
