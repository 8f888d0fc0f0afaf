"""`fnet predict`: what a trained network sees in images that anyone gives it."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from train.arguments import PredictArguments
from train.config import Config, DeepLab, Denoiser, LanguageModel
from train.data import padded
from train.data.decode import UnreadableError, decode
from train.data.files import LOOKED_FOR, images_below
from train.data.image_input import Preparation, Prepared
from train.errors import UserError
from train.output.palette import overlay_labels, voc_colors
from train.output.progress import plain, printable
from train.run.checkpoint import Checkpoints
from train.run.class_names import read_classes
from train.run.run_folder import RunFolder, as_json, write_whole
from train.tasks.classification import logits_by_crop
from train.tasks.segmentation import Views, logits_by_view

_BATCH = 16
"""Images, crops counted, that the network is given at once, unless it was trained on fewer."""


class Prediction(NamedTuple):
    """What is seen in an image.

    Attributes:
      image: its path, as it was given or found.
      labels: names with their probabilities, the likeliest first; of a segmented image, with
        their shares of its pixels.
      mask: the PNG of its labels, of a segmented one: a palette image of the image's size.
      overlay: the PNG of the image with the labels' colours over it.
    """

    image: str
    labels: list[tuple[str, float]]
    mask: str | None = None
    overlay: str | None = None


class Predictions(NamedTuple):
    """Of all images.

    Attributes:
      step: the checkpoint's.
      predictions: of those that can be read.
      unreadable: path and reason of the others.
      path: of predictions.json, if it was written.
    """

    step: int
    predictions: list[Prediction]
    unreadable: list[tuple[str, str]]
    path: Path | None = None


def find_images(given: Sequence[str]) -> list[str]:
    """Paths of image files: those that are given, and of folders those of all images below.

    Raises:
      UserError: for a path where nothing is, and for a folder without images.
    """
    found: list[str] = []
    for name in given:
        if not os.path.isdir(name):
            if not os.path.exists(name):
                raise UserError(f"no image {name}: there is no such file or folder")
            found.append(name)
            continue
        try:
            below = images_below(Path(name))
        except UserError as error:
            raise UserError(str(error).removeprefix("data.path: ")) from error
        if not below:
            raise UserError(f"no image in {name}; looked for {LOOKED_FOR}")
        found += [os.path.join(name, image) for image in below]
    return found


def predict(
    folder: RunFolder, config: Config, given: Sequence[str], a: PredictArguments
) -> Predictions:
    """What the run's newest checkpoint makes of images, prepared as its test images are.

    Masks and overlays of segmented images are written, and predictions.json without ``a.json``.

    Args:
      folder: of the run.
      config: likewise.
      given: files and folders.
      a: what to say of them.

    Raises:
      UserError: if it is no run on images, has no checkpoint, if a path has no image, or the
        folder cannot be written.
    """
    if isinstance(config.model, LanguageModel | Denoiser):
        raise UserError(
            f"{folder.path} is a run of {config.model.name}, which labels no images; "
            "fnet sample draws from it"
        )
    paths = find_images(given)
    classes = read_classes(folder, config)
    prepare = Preparation(config)
    model = config.model.build(prepare.shape, len(classes))
    with Checkpoints(folder.checkpoints, best=a.best) as checkpoints:
        params, state, step = checkpoints.restore_network(model.init)
    segments = isinstance(config.model, DeepLab)
    out = Path(a.out) if a.out else folder.path / "predictions"
    labelled = (
        _segmented(out, paths, classes, a.top_k) if segments else _classified(classes, a.top_k)
    )
    predictions, unreadable = [], []
    try:
        if segments or not a.json:
            out.mkdir(parents=True, exist_ok=True)
        network = jax.jit(_network(config, model))
        most = max(min(_BATCH, config.data.batch_size) // prepare.crops, 1)
        for path, prepared, made in _outputs(
            paths, prepare, lambda x: network(params, state, x), min(most, len(paths))
        ):
            try:
                if isinstance(prepared, UnreadableError):
                    raise prepared
                predictions.append(labelled(path, prepared, made))
            except UnreadableError as error:
                unreadable.append((path, str(error)))
        found = Predictions(step, predictions, unreadable)
        if not a.json:
            found = found._replace(path=out / "predictions.json")
            write_whole(out / "predictions.json", as_json(as_dict(found)))
    except OSError as error:
        raise UserError(
            f"cannot write to {out}: {error.strerror or error}; choose another --out"
        ) from error
    return found


def labels_of(logits: np.ndarray, prepared: Prepared) -> np.ndarray:
    """Labels uint8 [H, W] of the file's pixels, by logits [h, w, K] interpolated to its size."""
    height, width, classes = logits.shape
    side = prepared.image.shape[0]
    part = tuple(
        length * n / side for length, n in zip(prepared.part, (width, height), strict=True)
    )
    best = np.full(prepared.size[::-1], -np.inf, np.float32)
    labels = np.zeros(best.shape, np.uint8)
    for label in range(classes):
        whole = Image.fromarray(np.ascontiguousarray(logits[..., label], np.float32))
        z = np.asarray(whole.resize(prepared.size, Image.Resampling.BILINEAR, box=(0, 0, *part)))
        labels[z > best] = label
        np.maximum(best, z, out=best)
    return labels


def show(found: Predictions, console: Console) -> None:
    """The predictions as a table on a terminal, as lines elsewhere."""
    if not console.is_terminal:
        say = plain(console)
        for p in found.predictions:
            words = "  ".join(f"{name} {share:.4f}" for name, share in p.labels)
            say(f"{p.image}  {words}")
        return
    table = Table()
    table.add_column("image", overflow="fold")
    table.add_column("label")
    table.add_column("of pixels" if any(p.mask for p in found.predictions) else "probability")
    for p in found.predictions:
        for i, (name, share) in enumerate(p.labels):
            table.add_row(
                "" if i else escape(printable(p.image)), escape(printable(name)), f"{share:.1%}"
            )
    console.print(table)


def as_dict(found: Predictions) -> dict[str, Any]:
    """Everything, for JSON."""

    def one(p: Prediction) -> dict[str, Any]:
        kind = "probability" if p.mask is None else "share"
        labels = [{"label": name, kind: share} for name, share in p.labels]
        files = {} if p.mask is None else {"mask": p.mask, "overlay": p.overlay}
        return {"image": p.image, "labels": labels} | files

    return {
        "step": found.step,
        "predictions": [one(p) for p in found.predictions],
        "unreadable": [{"image": path, "reason": why} for path, why in found.unreadable],
    }


def _network(config: Config, model: Any) -> Callable[[Any, Any, Any], Any]:
    """``(params, state, image [N, ...])`` -> probabilities [N, K], or logits [N, h, w, K]."""
    if isinstance(config.model, DeepLab):
        logits_of = logits_by_view(config, model, Views())
        return lambda params, state, image: logits_of(params, state, image)[0]
    logits_of_all = logits_by_crop(config, model)
    return lambda *given: jax.nn.softmax(logits_of_all(*given).astype(np.float32))


def _outputs(
    paths: Sequence[str], prepare: Preparation, network: Callable[[np.ndarray], Any], rows: int
) -> Iterator[tuple[str, Prepared | UnreadableError, Any]]:
    """Each path with its image and the network's output of it, or with why it has none."""
    for start in range(0, len(paths), rows):
        some = paths[start : start + rows]
        read = [_read(prepare, path) for path in some]
        images = [r.image for r in read if isinstance(r, Prepared)]
        made = iter(())
        if images:
            made = iter(np.asarray(network(padded({"image": np.stack(images)}, rows)["image"])))
        for path, r in zip(some, read, strict=True):
            yield path, r, next(made) if isinstance(r, Prepared) else None


def _read(prepare: Preparation, path: str) -> Prepared | UnreadableError:
    try:
        return prepare(path)
    except UnreadableError as error:
        return error


_Labelled = Callable[[str, Prepared, np.ndarray], Prediction]


def _classified(classes: Sequence[str], top_k: int) -> _Labelled:
    def labelled(path: str, prepared: Prepared, probabilities: np.ndarray) -> Prediction:
        likeliest = np.argsort(-probabilities, kind="stable")[:top_k]
        return Prediction(path, [(classes[i], float(probabilities[i])) for i in likeliest])

    return labelled


def _segmented(out: Path, paths: Sequence[str], classes: Sequence[str], top_k: int) -> _Labelled:
    """Writes ``NAME.mask.png`` and ``NAME.overlay.png``; NAME is as it lies below all images."""
    above = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])

    def labelled(path: str, prepared: Prepared, logits: np.ndarray) -> Prediction:
        labels = labels_of(logits, prepared)
        name = out / os.path.relpath(os.path.abspath(path), above)
        name.parent.mkdir(parents=True, exist_ok=True)
        mask, overlay = (name.with_name(f"{name.name}.{kind}.png") for kind in ("mask", "overlay"))
        picture = Image.fromarray(labels)
        picture.putpalette(voc_colors().tobytes())
        picture.save(mask)
        Image.fromarray(overlay_labels(decode(path), labels)).save(overlay)
        shares = np.bincount(labels.ravel(), minlength=len(classes)) / labels.size
        largest = [i for i in np.argsort(-shares, kind="stable")[:top_k] if shares[i]]
        of = [(classes[i], float(shares[i])) for i in largest]
        return Prediction(path, of, str(mask), str(overlay))

    return labelled
