"""``fnet predict``: label images, their pixels, or texts with a trained network."""

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

from train.arguments import PredictArguments, read_command
from train.config import ChatFile
from train.data import pad_batch, storage
from train.data.chat_file import line_of, load_unlabeled
from train.data.decode import UnreadableError, decode
from train.data.files import IMAGE_PATTERNS, describe_files, list_images
from train.data.label_map import LabelMap, plain_label_map
from train.data.preprocessing import PreprocessedImage
from train.errors import UserError, printable, writing
from train.output.formats import number
from train.output.palette import overlay_labels, palette
from train.output.progress import line_printer
from train.output.rows import as_csv
from train.output.tables import Table, to_rich
from train.predictor import Predictor
from train.run.open_run import OpenRun
from train.run.run_folder import RunFolder, as_json, atomic_write
from train.tasks.targets import KINDS


def main(argv: list[str]) -> None:
    """Run ``fnet predict RUN FILE...``."""
    (given, *files), options = read_command(argv, "fnet predict RUN FILE...", PredictArguments)
    folder = RunFolder.of(given)
    result = predict(folder, files, options)
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
    opened, out = OpenRun(folder), _out(folder, options)
    what, targets = "image", KINDS[opened.config.data.targets]
    if opened.kind.predicts == "labels of texts":
        what = "text"
        step, outputs = _outputs_of_texts(opened, given, best=options.best)
    else:
        paths, notes = find_images(given) if opened.kind.labels_images else ([], [])
        predictor = Predictor(folder.path, best=options.best)
        for note in (*notes, *describe_files(paths, ())):
            _note(note)
        step, outputs = predictor.step, _outputs_of_images(paths, predictor)
    classes = opened.outputs.names
    if opened.kind.predicts == "masks":
        if (out / "masks").exists() and not (out / "overlays").exists():
            raise UserError(f"--out: {out} has masks that are no predictions; give another folder")
        label_map = opened.outputs.label_map or plain_label_map(classes)
        max_pixels = predictor.preprocessor.max_pixels
        write_mask = _segmentation(out, paths, max_pixels, label_map, options.top_k)
    predictions, unreadable, rows = [], [], []
    with writing(out):
        for name, output in outputs:
            try:
                if isinstance(output, UnreadableError):
                    raise output
                row: dict[str, Any] = {"file": name}
                if what == "text":
                    row = {"text": name, "index": line_of(name)}
                if opened.kind.predicts == "masks":
                    predictions.append(write_mask(name, output))
                    shares = np.bincount(output.ravel(), minlength=len(classes)) / output.size
                    named = zip(classes, shares.tolist(), strict=True)
                    row |= {"mask": predictions[-1]["mask"]}
                    rows.append(row | {f"share of {name}": share for name, share in named})
                else:
                    best = targets.best(classes, output, options.top_k)
                    predictions.append({what: name} | best)
                    rows.append(row | targets.row(classes, output))
            except UnreadableError as error:
                unreadable.append({"image": name, "reason": str(error)})
        result = {"step": step, "predictions": predictions, "unreadable": unreadable}
        if options.csv or not options.json:
            out.mkdir(parents=True, exist_ok=True)
        if not options.json:
            atomic_write(out / "predictions.json", as_json(result))
        if options.csv:
            atomic_write(out / "predictions.csv", as_csv(rows))
    return result


_Outputs = Iterator[tuple[str, np.ndarray | UnreadableError]]


def _outputs_of_texts(opened: OpenRun, given: Sequence[str], *, best: bool) -> tuple[int, _Outputs]:
    """Return the step of the weights, and the probabilities of each text of files."""
    data = cast(ChatFile, opened.config.model.complete(opened.config.data))
    found = [load_unlabeled(data, path) for path in given]
    model, (params, state, step) = opened.network(best=best)
    assert opened.kind.outputs is not None  # because it predicts labels
    network, size = jax.jit(opened.kind.outputs(opened.config, model)), data.batch_size

    def outputs() -> _Outputs:
        for places, texts, notes in found:
            for note in notes:
                _note(note)
            for start in range(0, len(places), size):
                batch = {name: a[start : start + size] for name, a in texts.items()}
                rows = np.asarray(network(params, state, pad_batch(batch, size)))
                yield from zip(places[start : start + size], rows, strict=False)

    return step, outputs()


def _outputs_of_images(paths: Sequence[str], predictor: Predictor) -> _Outputs:
    def read(path: str) -> PreprocessedImage | UnreadableError:
        try:
            return predictor.preprocessor(path)
        except UnreadableError as error:
            return error

    for start in range(0, len(paths), predictor.batch_size):
        batch = [(path, read(path)) for path in paths[start : start + predictor.batch_size]]
        readable = [item for _, item in batch if isinstance(item, PreprocessedImage)]
        outputs = predictor.predict_batch(readable)
        for path, item in batch:
            yield path, next(outputs) if isinstance(item, PreprocessedImage) else item


def _note(text: str) -> None:
    print(printable(f"fnet: {text}"), file=sys.stderr)


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


def _segmentation(
    out: Path, paths: Sequence[str], max_pixels: int, label_map: LabelMap, top_k: int
) -> Callable[[str, np.ndarray], dict[str, Any]]:
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
