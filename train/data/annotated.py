"""Annotated images as the readers of annotation files return them, and what these share."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml  # type: ignore[import-untyped]

from train import limits
from train.data import storage
from train.data.class_table import Row
from train.data.columns import clean_name, normalized, parse_json
from train.data.files import list_images
from train.errors import UserError

BACKGROUND = "background"


def is_background(name: str) -> bool:
    """Whether a class stands for pixels of no object."""
    return name.strip("_").lower() == BACKGROUND


def is_ignored(name: str) -> bool:
    """Whether the pixels of a class do not count."""
    return Row(name.strip("_")).is_void


class Object(NamedTuple):
    """An annotated object: its class, and its outline or runs; neither for a box."""

    name: str
    polygons: tuple[np.ndarray, ...] = ()
    runs: tuple[int, ...] = ()


class AnnotatedImage(NamedTuple):
    """An annotated image: split, path below the root, source, height, width, objects."""

    split: str
    path: str
    source: str
    height: int
    width: int
    objects: list[Object]

    def shows(self, outline: np.ndarray) -> bool:
        """Whether an outline has a part inside that is a pixel wide or high."""
        (left, top), (right, bottom) = outline.min(0).tolist(), outline.max(0).tolist()
        inside = min(right, self.width) - max(left, 0), min(bottom, self.height) - max(top, 0)
        return min(inside) > 0 and max(inside) >= 1


class Annotations(NamedTuple):
    """Annotated images, values of classes by name, which the format gives or none, and notes."""

    images: list[AnnotatedImage]
    values: dict[str, int]
    notes: tuple[str, ...] = ()


def to_points(flat: Any) -> np.ndarray:
    """Return points [N, 2] from x, y, x, y, ..., or from pairs of them."""
    values = np.array(flat, np.float64).ravel()
    if values.size % 2 or not np.isfinite(values).all():
        raise ValueError(f"an outline is {flat!r:.40}; expected finite numbers x, y, x, y, ...")
    return values.reshape(-1, 2)


def class_name(value: Any) -> str:
    """Return the name of a class. Lists of references to lists would be too much in YAML."""
    if not isinstance(value, str):
        raise TypeError(f"a name is a {type(value).__name__}; expected a text")
    return clean_name(value)


def find_files(root: Path, suffix: str) -> list[Path]:
    """Return the files below a folder whose names end in ``suffix``."""
    with storage.reported("data.path", root):
        found = [path for path in storage.walk(str(root), Counter()) if path.endswith(suffix)]
    return [root / path for path in sorted(found)]


def load_json(path: Path) -> Any:
    """Return what a file of annotations holds."""
    limits.ANNOTATIONS.check(path.stat().st_size, f"data.format: {path}")
    with damaged(path):
        return parse_json(path.read_bytes())


def by_normalized_path(root: Path) -> dict[str, str]:
    """Return the images below a folder by `normalized` path."""
    return {normalized(path): path for path in list_images(root).paths}


def locate(there: Mapping[str, str], root: Path, annotations: Path, split: str, name: str) -> str:
    """Return the path of an image below the root, of those by `normalized` path in ``there``."""
    name = name.replace("\\", "/")
    stem = annotations.stem.removeprefix("instances_")
    own = os.path.relpath(annotations.parent, root)
    folders = own, "", "images", split, stem
    below = f"images/{split}", f"images/{stem}", f"{split}/images"
    paths = [os.path.normpath(os.path.join(folder, name)) for folder in folders + below]
    found = (there[normalized(path)] for path in paths if normalized(path) in there)
    return next(found, paths[0])


@contextlib.contextmanager
def damaged(path: Path, place: str = "") -> Iterator[None]:
    """Turn errors of damaged annotations into a `UserError` with their file."""
    where = f"data.format: {path}{place}"
    try:
        yield
    except KeyError as error:
        raise UserError(f"{where}: no field or id {error.args[0]!r:.100}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: it is not YAML") from error
    except (
        *(ValueError, TypeError, AttributeError, IndexError),
        *(OverflowError, OSError, RecursionError),
    ) as error:
        raise UserError(f"{where}: {' '.join(str(error).split()):.200}") from error
