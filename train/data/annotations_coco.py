"""Annotations of COCO: polygons and runs of all images of a split in one file."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from train.data import annotated
from train.data.drawings import decode_runs
from train.data.splits import split_of
from train.errors import UserError


def read(root: Path) -> annotated.Annotations:
    """Read the annotation files of a folder."""
    files = annotated.find_files(root, ".json")
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in [path for path in files if "instances" in path.name] or files:
        content = annotated.load_json(path)
        if not isinstance(content, dict) or not {"images", "annotations"} <= content.keys():
            continue
        split = split_of(str(path.relative_to(root))) or ""
        if split in found:
            raise UserError(
                f"data.format: {found[split][0]} and {path} both annotate "
                f"{split or 'all'} images; move one elsewhere"
            )
        found[split] = path, content
    images: list[annotated.AnnotatedImage] = []
    notes: list[str] = []
    ids: dict[str, Any] = {}
    there = annotated.by_normalized_path(root)
    for split, (path, content) in found.items():
        with annotated.damaged(path):
            for key in ("images", "categories"):
                if twice := _repeated(item["id"] for item in content[key]):
                    raise ValueError(f"two of its {key} have the id {twice[0]}")
            names = {c["id"]: annotated.class_name(c["name"]) for c in content["categories"]}
            if twice := _repeated(names.values()):
                notes.append(f"two categories of {path} are called {twice[0]}, and are one class")
            for id in sorted(names):
                ids.setdefault(names[id], id)
            sizes = {i["id"]: [int(i["height"]), int(i["width"])] for i in content["images"]}
            objects: dict[Any, list[annotated.Object]] = {}
            for i, a in enumerate(content["annotations"], 1):
                with annotated.damaged(path, f", annotation {i}"):
                    outline = _outline(a.get("segmentation"), sizes[a["image_id"]])
                    named = annotated.Object(names[a["category_id"]], *outline)
                    objects.setdefault(a["image_id"], []).append(named)
            for image in content["images"]:
                name = annotated.locate(there, root, path, split, str(image["file_name"]))
                own = objects.get(image["id"], [])
                height, width = sizes[image["id"]]
                images.append(annotated.AnnotatedImage(split, name, str(path), height, width, own))
    classes = [
        name for name in ids if not (annotated.is_background(name) or annotated.is_ignored(name))
    ]
    own = [ids[name] for name in classes]
    is_plain = all(isinstance(id, int) and 0 < id < 255 for id in own) and len({*own}) == len(own)
    numbers = {name: number for number, name in enumerate(classes, 1)}
    return annotated.Annotations(
        images, ids if is_plain else dict.fromkeys(ids, 0) | numbers, tuple(notes)
    )


def _repeated(values: Iterable[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]


def _outline(segmentation: Any, size: list[int]) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """Return polygons or runs of COCO, in an image of a height and width; neither for a box."""
    if isinstance(segmentation, dict):
        if [*segmentation.get("size", size)] != size:
            raise ValueError(f"runs of the size {segmentation['size']} in an image of {size}")
        counts = segmentation["counts"]
        return (), decode_runs(counts) if isinstance(counts, str) else tuple(map(int, counts))
    polygons = map(annotated.to_points, segmentation or ())
    return tuple(polygon for polygon in polygons if len(polygon) > 2), ()
