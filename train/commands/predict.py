"""``fnet predict``: label images, their pixels, or texts with a trained network."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from train.arguments import PredictArguments
from train.data.decode import UnreadableError
from train.data.files import describe_files
from train.errors import printable, warn, writing
from train.output.formats import number
from train.output.progress import line_printer, show_table
from train.output.rows import as_csv
from train.output.tables import Table
from train.predictor import Predictor
from train.run.open_run import OpenRun
from train.run.predictions import describe_labels, describe_masks, find_images, outputs_of_texts
from train.run.run_folder import RunFolder, as_json, atomic_write


def main(words: list[str], options: PredictArguments) -> None:
    """Run ``fnet predict RUN FILE...``."""
    folder = RunFolder.of(words[0])
    result, out = predict(folder, words[1:], options), Path(options.out or folder.predictions)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_predictions(result, Console())
        print(printable(f"predictions: {out / 'predictions.json'}"))
        if options.csv:
            print(printable(f"table: {out / 'predictions.csv'}"))
        if any("mask" in p for p in result["predictions"]):
            print(printable(f"masks: {out / 'masks'}"))
            print(printable(f"overlays: {out / 'overlays'}"))
    for item in result["unreadable"]:
        warn(f"cannot read {item['image']}: {item['reason']}")
    if result["unreadable"]:
        raise SystemExit(2)


def predict(folder: RunFolder, given: Sequence[str], options: PredictArguments) -> dict[str, Any]:
    """Predict labels of images or of the texts of files, prepared as the run's test examples are.

    Masks and overlays of segmented images are written, and predictions.json unless
    ``options.json``.

    Returns:
      The content of predictions.json: ``step``, ``predictions`` of the readable images and
      ``unreadable`` ones. A prediction has ``labels``, the most probable first, or the labels
      with most pixels first, or ``numbers`` by name. A segmented image's also has paths:
      ``mask``, a palette PNG of the image's size with the values of the run's masks, and
      ``overlay``, the image with the mask's colors over it. A text's has file and line as ``text``.
    """
    opened, out = OpenRun(folder), Path(options.out or folder.predictions)
    outputs: Iterator[tuple[str, np.ndarray | UnreadableError]]
    if opened.kind.predicts == "labels of texts":
        step, outputs = outputs_of_texts(opened, given, best=options.best)
    else:
        paths, notes = find_images(given) if opened.kind.labels_images else ([], [])
        predictor = Predictor(folder.path, best=options.best)
        for note in (*notes, *describe_files(paths, ())):
            warn(note)
        step, outputs = predictor.step, predictor.predict_files(paths)
    if opened.kind.predicts == "masks":
        max_pixels = predictor.preprocessor.max_pixels
        describe = describe_masks(opened.outputs, out, paths, max_pixels, options.top_k)
    else:
        describe = describe_labels(opened, options.top_k)
    predictions, unreadable, rows = [], [], []
    with writing(out):
        for name, output in outputs:
            try:
                if isinstance(output, UnreadableError):
                    raise output
                prediction, row = describe(name, output)
            except UnreadableError as error:
                unreadable.append({"image": name, "reason": str(error)})
            else:
                predictions.append(prediction)
                rows.append(row)
        result = {"step": step, "predictions": predictions, "unreadable": unreadable}
        if options.csv or not options.json:
            out.mkdir(parents=True, exist_ok=True)
        if not options.json:
            atomic_write(out / "predictions.json", as_json(result))
        if options.csv:
            atomic_write(out / "predictions.csv", as_csv(rows))
    return result


def print_predictions(result: dict[str, Any], console: Console) -> None:
    """Print the predictions as a table on a terminal, as lines elsewhere."""
    lines, rows, what, score = list[str](), list[tuple[str, ...]](), "image", "probability"
    for p in result["predictions"]:
        if "numbers" in p:
            texts = [f"{name} {number(value)}" for name, value in p["numbers"].items()]
            line_printer(console)(f"{p['image']}  {'  '.join(texts)}")
            continue
        score, what = "share" if "mask" in p else score, "text" if "text" in p else what
        labels = [(label["label"], label[score]) for label in p["labels"]]
        lines.append("  ".join([p[what], "  ".join(f"{name} {s:.2%}" for name, s in labels)]))
        rows += [("" if i else p[what], name, f"{s:.1%}") for i, (name, s) in enumerate(labels)]
    last = "pixels" if score == "share" else score
    if rows:
        show_table(console, Table("", (what, "label", last), rows, texts=2), lines)
