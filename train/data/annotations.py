"""Annotation files of COCO, labelme and YOLO: outlines of objects, as masks."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from train.data import annotations_coco, annotations_labelme, annotations_yolo, storage
from train.data.annotated import BACKGROUND, AnnotatedImage, Annotations, is_background, is_ignored
from train.data.class_table import Row
from train.data.drawings import Drawing, Mask, Shape
from train.data.files import check_folder, list_images
from train.data.mask_layouts import FoundLayout, find_layout
from train.errors import UserError, shorten

Format = Literal["coco", "labelme", "yolo"]
_READERS: Mapping[str, Callable[[Path], Annotations]] = {
    "coco": annotations_coco.read,
    "labelme": annotations_labelme.read,
    "yolo": annotations_yolo.read,
}
_BOXES = (
    "a mask needs outlines: export polygons or RLE from the tool, or masks from a model such as SAM"
)


def find_annotations(
    root: Path, format: Format, known: Mapping[str, int] | None = None
) -> FoundLayout:
    """Read the annotation files of a folder, or for a trained network find masks that are images.

    Values of masks are 0 for the background; then ids of categories (COCO) if these are 1 to 254,
    else 1, 2, ... in their order; labelme's labels count in alphabetical order.

    A trained network has ``known`` classes: their values by name.

    Raises:
      UserError: if there are none, they are damaged, name unknown classes or have no outlines.
    """
    check_folder(root, "; expected a folder with images and their annotations")
    read = _READERS[format](root)
    if not read.images:
        if known is not None:  # such as the masks that it predicted
            with contextlib.suppress(UserError):
                return find_layout(root, training=False)
        raise UserError(f"data.format: no annotations in the format {format} in {root}")
    objects = [(image, o) for image in read.images for o in image.objects]
    boxes = [image for image, o in objects if not o.polygons and not o.runs]
    held = f"{len(boxes):,} of {len(objects):,} objects have no outline"
    if boxes and len(boxes) == len(objects):
        raise UserError(
            f"data.format: {boxes[0].source}: {held}, such as in {boxes[0].path}; {_BOXES}"
        )
    notes = [*read.notes]
    if boxes:
        notes.append(f"{held}, and are left out, such as in {boxes[0].path}")
    outlines = [(image, polygon) for image, o in objects for polygon in o.polygons]
    if lost := [image for image, polygon in outlines if not image.shows(polygon)]:
        held = f"{len(lost):,} of {len(outlines):,} outlines"
        held += f" are outside of their image or smaller than a pixel, such as in {lost[0].path}"
        if len(lost) == len(outlines):
            raise UserError(f"data.format: {lost[0].source}: {held}; points are in pixels")
        notes.append(held)
    names = {o.name for _, o in objects} if format == "labelme" else {*read.values}
    plain = sorted(name for name in names if not (is_background(name) or is_ignored(name)))
    values = read.values or {name: i for i, name in enumerate(plain, 1)}
    values |= {name: 0 for name in names if is_background(name)}
    values |= {name: 255 for name in names if is_ignored(name)}
    if known is not None:
        if unknown := sorted({o.name for _, o in objects} & {*plain} - known.keys()):
            raise UserError(
                f"data.path: the network knows no class {shorten(unknown)}; its classes are "
                f"{shorten([*known], 12)}"
            )
        values |= known
    first: dict[str, AnnotatedImage] = {}
    for image in read.images:
        earlier = first.setdefault(image.path, image)
        if earlier is not image and (root / image.path).is_file():
            raise UserError(
                f"data.format: {image.path} is annotated twice, in {earlier.source} and in "
                f"{image.source}; give all its objects in one place"
            )
    images: dict[str, dict[str, str]] = {}
    masks: dict[str, dict[str, Mask]] = {}
    for image in read.images:
        shapes = tuple(Shape(values[o.name], o.polygons, o.runs) for o in image.objects)
        drawing = Drawing(image.source, image.height, image.width, shapes)
        images.setdefault(image.split, {})[image.path] = image.path
        masks.setdefault(image.split, {})[image.path] = drawing
    rows = (
        Row(BACKGROUND, 0),
        *(Row("void", 255) for _ in [*filter(is_ignored, names)][:1]),
        *(Row(name, values[name]) for name in sorted(plain, key=lambda name: values[name])),
    )
    if (len(images) > 1 or (known is None and "" not in images)) and "train" not in images:
        raise UserError(f"data.path: {root} has the splits {shorten(sorted(images))}, but no train")
    sources = {Path(image.source).name for image in read.images}
    tables = {"classes.txt", "data.yaml", "dataset.yaml"} if format == "yolo" else set[str]()
    files = list_images(root, sources | tables)
    others = sorted({*files.paths} - first.keys())
    if others:
        some = shorten(others, 3)
        notes.append(f"{len(others):,} images that no annotations name are left out: {some}")
    notes += storage.describe_skipped(files.skipped)
    return FoundLayout(
        root, images, masks, notes=tuple(notes), rows=rows, source=read.images[0].source
    )
