"""``fnet train CONFIG --folds K``: cross-validation, with one report of all folds."""

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from train.config import Config
from train.output.curves import describe
from train.output.formats import number
from train.output.progress import line_printer
from train.output.rows import as_csv
from train.report import report
from train.run.loop import train
from train.run.run_folder import RunFolder, as_json, atomic_write
from train.tasks import load


def train_folds(config: Config, folds: int, out: Path, *, resume: bool, console: Console) -> None:
    """Train a run per fold in ``out/fold_1``, ... and report all of them.

    Writes folds.json with mean, standard deviation and values of each test metric, evaluation.csv
    with the rows of all test images, each from the run that was not trained on it, and report.html.
    A value that is undefined is null, and no part of the mean.
    """
    folders = [RunFolder(out / f"fold_{fold}") for fold in range(1, folds + 1)]
    sections = [config.data.with_fold(fold, folds) for fold in range(1, folds + 1)]
    configs = [dataclasses.replace(config, data=data) for data in sections]
    for own in configs:  # a fold that cannot be trained ends all before the first
        load(own)
    for own, folder in zip(configs, folders, strict=True):
        train(own, folder.path, resume=resume, console=console)
    log = line_printer(console)
    if not all(folder.summary.is_file() for folder in folders):
        return  # a run was interrupted, and has said how it goes on
    by_fold = [json.loads(folder.summary.read_bytes())["metrics"] for folder in folders]
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
    atomic_write(out / "folds.json", as_json({"folds": folds, "metrics": metrics}))
    rows = [
        {"fold": fold} | row
        for fold, folder in enumerate(folders, 1)
        if folder.rows.is_file()
        for row in csv.DictReader(io.StringIO(folder.rows.read_text("utf-8"), newline=""))
    ]
    if rows:
        atomic_write(out / "evaluation.csv", as_csv(rows))
        log(f"images: {out / 'evaluation.csv'}")
    log(f"folds: {out / 'folds.json'}")
    report(folders, out / "report.html", console)
