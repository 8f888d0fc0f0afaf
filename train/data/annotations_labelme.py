"""Annotations of labelme: a file of shapes per image."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from train.data import annotated
from train.data.splits import split_of


def read(root: Path) -> annotated.Annotations:
    """Read the annotation files of a folder."""
    images, there = [], annotated.by_normalized_path(root)
    for path in annotated.find_files(root, ".json"):
        content = annotated.load_json(path)
        if not isinstance(content, dict) or "shapes" not in content:
            continue
        with annotated.damaged(path):
            split = split_of(f"{path.relative_to(root).parent}/") or ""
            image = annotated.locate(there, root, path, split, str(content["imagePath"]))
            size = int(content["imageHeight"]), int(content["imageWidth"])
            objects = [_object(shape, *size) for shape in content["shapes"]]
            images.append(annotated.AnnotatedImage(split, image, str(path), *size, objects))
    return annotated.Annotations(images, {})


def _object(shape: Mapping[str, Any], height: int, width: int) -> annotated.Object:
    name, points = annotated.class_name(shape["label"]), annotated.to_points(shape["points"])
    kind = shape.get("shape_type") or "polygon"
    if kind == "mask":
        return annotated.Object(name, runs=_runs(shape["mask"], points, height, width))
    if kind == "circle":
        center, edge = points
        angles = np.linspace(0, 2 * np.pi, 64, endpoint=False)
        radius = np.hypot(*(edge - center))
        points = center + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
    elif kind == "rectangle" and len(points) == 2:
        (x0, y0), (x1, y1) = points
        points = np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)])
    elif kind not in ("polygon", "rectangle", "rotation"):
        return annotated.Object(name)
    return annotated.Object(name, (points,) if len(points) > 2 else ())


def _runs(text: str, points: np.ndarray, height: int, width: int) -> tuple[int, ...]:
    """Return the runs of a mask of labelme's AI tools: an image of the box between two points."""
    with Image.open(io.BytesIO(base64.b64decode(text)), formats=("PNG",)) as image:
        if image.width > width or image.height > height or height * width > 2**30:
            raise ValueError(f"a mask of {image.size} in an image of {width} x {height}")
        inside = np.asarray(image.convert("L")) > 0
    x, y = points.min(0).round().astype(int).tolist()
    whole = np.zeros((height, width), bool)
    part = whole[max(y, 0) : y + inside.shape[0], max(x, 0) : x + inside.shape[1]]
    part[:] = inside[max(-y, 0) :, max(-x, 0) :][: part.shape[0], : part.shape[1]]
    columns = whole.T.ravel()
    changes = np.flatnonzero(np.diff(columns, prepend=False))
    return tuple(np.diff(changes, prepend=0, append=columns.size).tolist())
