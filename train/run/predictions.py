"""What ``fnet predict`` says of images and texts: labels, numbers, or masks as files."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from PIL import Image

from train.config import ChatFile
from train.data import Outputs, pad_batch, storage
from train.data.chat_file import line_of, load_unlabeled
from train.data.decode import decode
from train.data.files import IMAGE_PATTERNS, list_images
from train.data.label_map import plain_label_map
from train.errors import UserError, warn
from train.output.palette import overlay_labels, palette
from train.run.open_run import OpenRun
from train.tasks.targets import KINDS

Describe = Callable[[str, np.ndarray], tuple[dict[str, Any], dict[str, Any]]]
"""Return a prediction for predictions.json, and its row of predictions.csv."""


def describe_labels(opened: OpenRun, top_k: int) -> Describe:
    """Describe labels by their probabilities, or numbers, of images or of texts."""
    targets, classes = KINDS[opened.config.data.targets], opened.outputs.names

    def describe(name: str, output: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
        best, row = targets.best(classes, output, top_k), targets.row(classes, output)
        if opened.kind.labels_images:
            return {"image": name} | best, {"file": name} | row
        return {"text": name} | best, {"text": name, "index": line_of(name)} | row

    return describe


def describe_masks(
    outputs: Outputs, out: Path, paths: Sequence[str], max_pixels: int, top_k: int
) -> Describe:
    """Write ``masks/NAME.png`` and ``overlays/NAME.png``, in the same subfolders as the images.

    Masks hold the values of the masks that the run was trained on.
    """
    if (out / "masks").exists() and not (out / "overlays").exists():
        raise UserError(f"--out: {out} has masks that are no predictions; give another folder")
    label_map = outputs.label_map or plain_label_map(outputs.names)
    names, classes, colors = _mask_names(paths), label_map.names, palette(label_map)
    values = label_map.mask_values()
    color_of_value = np.zeros((256, 3), np.uint8)
    if is_small := values.max() < 256:
        color_of_value[values] = colors[: len(values)]

    def describe(path: str, labels: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
        files = {kind: out / f"{kind}s" / names[path] for kind in ("mask", "overlay")}
        for file in files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(values.astype(np.uint8 if is_small else np.uint16)[labels])
        if is_small:
            picture.putpalette(color_of_value.tobytes())
        picture.save(files["mask"])
        image = decode(path, max_pixels=max_pixels)
        Image.fromarray(overlay_labels(image, labels, colors)).save(files["overlay"])
        shares = np.bincount(labels.ravel(), minlength=len(classes)) / labels.size
        largest = [i for i in np.argsort(-shares, kind="stable")[:top_k] if shares[i]]
        shown = [{"label": classes[i], "share": float(shares[i])} for i in largest]
        prediction = {"image": path, "labels": shown} | {k: str(f) for k, f in files.items()}
        named = zip(classes, shares.tolist(), strict=True)
        row = {"file": path, "mask": prediction["mask"]}
        return prediction, row | {f"share of {name}": share for name, share in named}

    return describe


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


def outputs_of_texts(
    opened: OpenRun, given: Sequence[str], *, best: bool
) -> tuple[int, Iterator[tuple[str, np.ndarray]]]:
    """Return the step of the weights, and the probabilities of each text of files."""
    data = cast(ChatFile, opened.config.model.complete(opened.config.data))
    found = [load_unlabeled(data, path) for path in given]
    model, (params, state, step) = opened.network(best=best)
    assert opened.kind.outputs is not None  # because it predicts labels
    network, size = jax.jit(opened.kind.outputs(opened.config, model)), data.batch_size

    def outputs() -> Iterator[tuple[str, np.ndarray]]:
        for places, texts, notes in found:
            for note in notes:
                warn(note)
            for start in range(0, len(places), size):
                batch = {name: a[start : start + size] for name, a in texts.items()}
                rows = np.asarray(network(params, state, pad_batch(batch, size)))
                yield from zip(places[start : start + size], rows, strict=False)

    return step, outputs()


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
