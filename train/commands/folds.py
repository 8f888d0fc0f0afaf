"""``fnet train CONFIG --folds K``: cross-validation, with one report of all folds."""

import secrets
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from train.config import Config
from train.errors import UserError
from train.output.curves import describe
from train.output.formats import number
from train.output.logged import Summary
from train.output.progress import line_printer
from train.output.rows import as_csv, read_csv
from train.report import report
from train.run.loop import train
from train.run.run_folder import RunFolder, as_json, atomic_write, quote, run_name
from train.stored import Stored, read
from train.tasks import load


class _Folds(Stored):
    """Contents of folds.json: the id that the ids of the folds' runs begin with."""

    run: str


def train_folds(config: Config, folds: int, out: Path, *, resume: bool, console: Console) -> None:
    """Train a run per fold in ``out/fold_1``, ... and report all of them.

    Writes folds.json with mean, standard deviation and values of each test metric, evaluation.csv
    with the rows of all test images, each from the run that was not trained on it, and report.html.
    A value that is undefined is null, and no part of the mean. A signal ends all folds.
    """
    if config.is_private:
        raise UserError(
            "--folds: each fold spends an epsilon of its own on examples that are in the others, "
            "too, and their sum is not grad.epsilon; train one private run"
        )
    folders = [RunFolder(out / f"fold_{fold}") for fold in range(1, folds + 1)]
    sections = [config.data.with_fold(fold, folds) for fold in range(1, folds + 1)]
    configs = [config.replace(data=data) for data in sections]
    for own in configs:  # a fold that cannot be trained ends all before the first
        load(own)
    at = out / "folds.json"
    run = _id(at, folders, resume=resume)
    command = f"{folders[0].as_config} --folds {folds} --out {quote(out)}"
    for own, folder in zip(configs, folders, strict=True):
        run_of_fold = f"{run}-{folder.path.name}"
        if not train(
            own, folder.path, resume=resume, console=console, command=command, run_id=run_of_fold
        ):
            return
        if not at.exists():  # so that the others are known by it
            atomic_write(at, as_json({"run": run, "folds": folds, "metrics": {}}))
    log = line_printer(console)
    summaries = [folder.read(Summary, folder.summary) for folder in folders]
    by_fold = [summary.metrics for summary in summaries if summary]
    metrics: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for fold in by_fold for name in fold):
        values = [fold.get(name) for fold in by_fold]
        defined = [value for value in values if value is not None]
        mean = float(np.mean(defined)) if defined else None
        std = float(np.std(defined, ddof=1)) if len(defined) > 1 else None
        metrics[name] = {"mean": mean, "std": std, "values": values}
        title = describe(name.removeprefix("test/"))[0]
        text = " +- ".join(number(x) for x in (mean, std) if x is not None) or "undefined"
        missing = folds - len(defined)
        others = f"; it is undefined in the other {missing}" if 0 < missing < folds else ""
        log(f"test {title} {text} over {len(defined) or folds} folds{others}")
    atomic_write(at, as_json({"run": run, "folds": folds, "metrics": metrics}))
    rows = [
        {"fold": fold} | row
        for fold, folder in enumerate(folders, 1)
        if folder.rows.is_file()
        for row in read_csv(folder.rows)
    ]
    if rows:
        atomic_write(out / "evaluation.csv", as_csv(rows))
        log(f"images: {out / 'evaluation.csv'}")
    log(f"folds: {at}")
    report(folders, out / "report.html", console)


def _id(at: Path, folders: list[RunFolder], *, resume: bool) -> str:
    """Return the id that the ids of all folds begin with; a run of another one is refused."""
    known = read(_Folds, at) if resume else None
    begun = [folder for folder in folders if resume and folder.has_started]
    run = known.run if known else secrets.token_hex(8)
    if begun and not known:
        run = (begun[0].id or "").removesuffix(f"-{begun[0].path.name}")
    for folder in begun:
        if folder.id != f"{run}-{folder.path.name}":
            raise UserError(
                f"{folder.path} is {run_name(folder.id)}, not that fold of {at.parent}; "
                "restore it, or choose another folder with --out"
            )
    return run
