"""``fnet predict``: label images, their pixels, or texts with a trained network."""

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from PIL import Image
from rich.console import Console

from train import arguments
from train.arguments import PredictArguments
from train.commands.positional import positional
from train.config import ChatFile
from train.data import pad_batch, storage
from train.data.chat_file import line_of, load_unlabeled
from train.data.decode import UnreadableError, decode
from train.data.files import IMAGE_PATTERNS, describe_files, list_images
from train.data.label_map import LabelMap, plain_label_map
from train.data.preprocessing import PreprocessedImage, Preprocessor
from train.errors import UserError, printable, writing
from train.output.formats import number
from train.output.palette import overlay_labels, palette
from train.output.progress import line_printer
from train.output.rows import as_csv
from train.output.tables import Table, to_rich
from train.predictor import Predictor, config_of_images
from train.run.checkpoints import load_network
from train.run.class_names import read_outputs
from train.run.model_files import check_model
from train.run.run_folder import RunFolder, as_json, atomic_write
from train.tasks import kind_of, text_classification
from train.tasks.targets import describe_output


def main(argv: list[str]) -> None:
    """Run ``fnet predict RUN FILE...``."""
    usage = "fnet predict RUN FILE..."
    (given, *files), flags = positional(argv, usage, PredictArguments)
    options = arguments.read(PredictArguments, flags, f"fnet predict {given} FILE...")
    folder = RunFolder.of(given)
    is_of_texts = kind_of(folder.read_config()).predicts == "labels of texts"
    result = (predict_texts if is_of_texts else predict)(folder, files, options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        out = _out(folder, options)
        print_predictions(result, Console())
        print(printable(f"predictions: {out / 'predictions.json'}"))
        if options.csv:
            print(printable(f"table: {out / 'predictions.csv'}"))
        if any("mask" in p for p in result["predictions"]):
            print(printable(f"masks: {out / 'masks'}"))
            print(printable(f"overlays: {out / 'overlays'}"))
    for item in result["unreadable"]:
        print(printable(f"fnet: cannot read {item['image']}: {item['reason']}"), file=sys.stderr)
    if result["unreadable"]:
        raise SystemExit(2)


def _out(folder: RunFolder, options: PredictArguments) -> Path:
    return Path(options.out) if options.out else folder.predictions


def predict(folder: RunFolder, given: Sequence[str], options: PredictArguments) -> dict[str, Any]:
    """Predict labels of images, which are prepared as the run's test images are.

    Masks and overlays of segmented images are written, and predictions.json unless
    ``options.json``.

    Returns:
      The content of predictions.json: ``step``, ``predictions`` of the readable images and
      ``unreadable`` ones. A prediction has ``labels``, the most probable first, or the labels
      with most pixels first, or ``numbers`` by name. A segmented image's also has paths:
      ``mask``, a palette PNG of the image's size with the values of the run's masks, and
      ``overlay``, the image with the mask's colors over it.

    Raises:
      UserError: if there is no run, it does not label images or has no checkpoint, a path has no
        image, or the output folder cannot be written.
    """
    config = config_of_images(folder)
    paths, notes = find_images(given)
    predictor = Predictor(folder.path, best=options.best)
    for note in (*notes, *describe_files(paths, ())):
        print(printable(f"fnet: {note}"), file=sys.stderr)
    classes = predictor.classes
    is_segmentation = kind_of(config).predicts == "masks"
    out = _out(folder, options)
    if is_segmentation:
        outputs = read_outputs(folder, config)
        label_map = outputs.label_map or plain_label_map(outputs.names)
        max_pixels = predictor.preprocessor.max_pixels
        to_prediction = _segmentation(out, paths, max_pixels, label_map, options.top_k)
    else:
        to_prediction = _classification(config.data.targets, classes, options.top_k)
    predictions, unreadable, rows = [], [], []
    if is_segmentation and (out / "masks").exists() and not (out / "overlays").exists():
        raise UserError(f"--out: {out} has masks that are no predictions; give another folder")
    with writing(out):
        for path, output in _outputs(paths, predictor):
            try:
                if isinstance(output, UnreadableError):
                    raise output
                predictions.append(to_prediction(path, output))
                rows.append(_row(config.data.targets, classes, predictions[-1], output))
            except UnreadableError as error:
                unreadable.append({"image": path, "reason": str(error)})
        result = {"step": predictor.step, "predictions": predictions, "unreadable": unreadable}
        _write(out, result, rows, options)
    return result


def predict_texts(
    folder: RunFolder, given: Sequence[str], options: PredictArguments
) -> dict[str, Any]:
    """Predict the classes of the texts of files, which are encoded as the run's test texts are.

    Returns:
      As `predict`, with the file and line of each text as ``text``.

    Raises:
      UserError: if the run has no checkpoint, a file is wrong, or the output folder cannot be
        written.
    """
    config = check_model(folder, folder.read_config())
    data = cast(ChatFile, config.model.complete(config.data))
    found = [load_unlabeled(data, path) for path in given]
    classes = read_outputs(folder, config).names
    model = text_classification.build_network(config, len(classes))
    trained = load_network(folder, model, best=options.best)
    network = jax.jit(functools.partial(text_classification.outputs, model))
    size = config.data.batch_size
    to_prediction = _classification("class", classes, options.top_k, "text")
    predictions, rows = [], []
    for places, texts, notes in found:
        for note in notes:
            print(printable(f"fnet: {note}"), file=sys.stderr)
        for start in range(0, len(places), size):
            names = places[start : start + size]
            batch = {name: a[start : start + size] for name, a in texts.items()}
            outputs = network(
                trained.evaluation_params, trained.model_state, pad_batch(batch, size)
            )
            for name, output in zip(names, np.asarray(outputs), strict=False):
                predictions.append(to_prediction(name, output))
                row = {"text": name, "index": line_of(name)}
                rows.append(row | describe_output("class", classes, output))
    out = _out(folder, options)
    result = {"step": trained.step, "predictions": predictions, "unreadable": []}
    with writing(out):
        _write(out, result, rows, options)
    return result


def _write(
    out: Path, result: dict[str, Any], rows: Sequence[dict[str, Any]], options: PredictArguments
) -> None:
    if not options.json:
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / "predictions.json", as_json(result))
    if options.csv:
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / "predictions.csv", as_csv(rows))


def find_images(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the given files and all images below the given folders, and notes about others."""
    paths: list[str] = []
    notes: list[str] = []
    for name in given:
        if not os.path.isdir(name):
            if not os.path.exists(name):
                raise UserError(f"no image {name}: there is no such file or folder")
            paths.append(name)
            continue
        try:
            below = list_images(Path(name))
        except UserError as error:
            raise UserError(str(error).removeprefix("data.path: ")) from error
        if not below.paths:
            raise UserError(f"no image in {name}; expected {IMAGE_PATTERNS}")
        notes += [f"{name}: {note}" for note in storage.describe_skipped(below.skipped)]
        paths += [os.path.join(name, image) for image in below.paths]
    return paths, notes


def _row(
    kind: str, classes: Sequence[str], prediction: dict[str, Any], output: np.ndarray
) -> dict[str, Any]:
    """Return a row of predictions.csv; a segmented image's has the share of each class."""
    row = {"file": prediction["image"]}
    if "mask" not in prediction:
        return row | describe_output(kind, classes, output)
    shares = np.bincount(output.ravel(), minlength=len(classes)) / output.size
    named = zip(classes, shares.tolist(), strict=True)
    return row | {"mask": prediction["mask"]} | {f"share of {name}": s for name, s in named}


def print_predictions(result: dict[str, Any], console: Console) -> None:
    """Print the predictions as a table on a terminal, as lines elsewhere."""
    log, rows, score = line_printer(console), [], "probability"
    for p in result["predictions"]:
        if "numbers" in p:
            texts = [f"{what} {number(value)}" for what, value in p["numbers"].items()]
            log(f"{p['image']}  {'  '.join(texts)}")
            continue
        score, name = "share" if "mask" in p else "probability", p.get("image") or p["text"]
        if not console.is_terminal:
            labels = "  ".join(f"{label['label']} {label[score]:.2%}" for label in p["labels"])
            log(f"{name}  {labels}")
        for i, label in enumerate(p["labels"]):
            rows.append(("" if i else name, label["label"], f"{label[score]:.1%}"))
    if console.is_terminal and rows:
        last = "pixels" if score == "share" else score
        what = "text" if "text" in p else "image"
        console.print(to_rich(Table("", (what, "label", last), rows, texts=2)))


def _outputs(
    paths: Sequence[str], predictor: Predictor
) -> Iterator[tuple[str, np.ndarray | UnreadableError]]:
    size = predictor.batch_size
    for start in range(0, len(paths), size):
        batch_paths = paths[start : start + size]
        batch = [_read(predictor.preprocessor, path) for path in batch_paths]
        readable = [item for item in batch if isinstance(item, PreprocessedImage)]
        outputs = predictor.predict_batch(readable)
        for path, item in zip(batch_paths, batch, strict=True):
            yield path, next(outputs) if isinstance(item, PreprocessedImage) else item


def _read(prepare: Preprocessor, path: str) -> PreprocessedImage | UnreadableError:
    try:
        return prepare(path)
    except UnreadableError as error:
        return error


_ToPrediction = Callable[[str, np.ndarray], dict[str, Any]]


def _classification(
    kind: str, classes: Sequence[str], top_k: int, what: str = "image"
) -> _ToPrediction:
    """Name a prediction's outputs; ``what`` is the key of what was predicted."""

    def to_prediction(path: str, outputs: np.ndarray) -> dict[str, Any]:
        if kind == "numbers":
            return {what: path, "numbers": dict(zip(classes, outputs.tolist(), strict=True))}
        most_probable = np.argsort(-outputs, kind="stable")[:top_k]
        labels = [{"label": classes[i], "probability": float(outputs[i])} for i in most_probable]
        return {what: path, "labels": labels}

    return to_prediction


def _segmentation(
    out: Path,
    paths: Sequence[str],
    max_pixels: int,
    label_map: LabelMap,
    top_k: int,
) -> _ToPrediction:
    """Write ``masks/NAME.png`` and ``overlays/NAME.png``, in the same subfolders as the images.

    Masks hold the values of the masks that the run was trained on.
    """
    names, classes, colors = _mask_names(paths), label_map.names, palette(label_map)
    values = label_map.mask_values()
    color_of_value = np.zeros((256, 3), np.uint8)
    if is_small := values.max() < 256:
        color_of_value[values] = colors[: len(values)]

    def to_prediction(path: str, labels: np.ndarray) -> dict[str, Any]:
        mask, overlay = (out / kind / names[path] for kind in ("masks", "overlays"))
        for file in (mask, overlay):
            file.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(values.astype(np.uint8 if is_small else np.uint16)[labels])
        if is_small:
            picture.putpalette(color_of_value.tobytes())
        picture.save(mask)
        image = decode(path, max_pixels=max_pixels)
        Image.fromarray(overlay_labels(image, labels, colors)).save(overlay)
        shares = np.bincount(labels.ravel(), minlength=len(classes)) / labels.size
        largest = [i for i in np.argsort(-shares, kind="stable")[:top_k] if shares[i]]
        shown = [{"label": classes[i], "share": float(shares[i])} for i in largest]
        return {"image": path, "labels": shown, "mask": str(mask), "overlay": str(overlay)}

    return to_prediction


def _mask_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the name of each image's mask, which has the image's name, as data sets have it.

    Images that differ only in their extension keep it: ``a.jpg.png``.
    """
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = {path: os.path.relpath(os.path.abspath(path), root) for path in paths}
    stems = Counter(os.path.splitext(name)[0] for name in {*names.values()})
    return {
        path: f"{stem if stems[stem := os.path.splitext(name)[0]] == 1 else name}.png"
        for path, name in names.items()
    }
