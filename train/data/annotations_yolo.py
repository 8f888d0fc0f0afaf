"""Annotations of YOLO: a file of polygons per image, and data.yaml."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from train import limits
from train.data import annotated
from train.data.columns import parse_integer, read_lines, read_names
from train.data.decode import UnreadableError, upright_size
from train.data.files import list_images
from train.data.splits import SPLIT_NAMES, split_of
from train.errors import UserError, shorten

_NOTHING = (None, "", "null", "~")
"""Fields of YAML without a value."""


def read(root: Path) -> annotated.Annotations:
    """Read the annotation files of a folder."""
    paths = [path for path in list_images(root).paths if "images" in path.split("/")[:-1]]
    splits = {path: split_of(f"{os.path.dirname(path)}/") or "" for path in paths}
    tables = [
        path
        for path in annotated.find_files(root, ".yaml")
        if path.name in ("data.yaml", "dataset.yaml")
    ]
    names: Sequence[str] = ()
    if tables[1:]:
        raise UserError(
            f"data.format: {tables[0]} and {tables[1]} both describe {root}; move one elsewhere"
        )
    if tables:
        with annotated.damaged(tables[0]):
            limits.LABEL_FILE.check(tables[0].stat().st_size, f"data.format: {tables[0]}")
            # All scalars are texts: a class can be called no.
            content = yaml.load(tables[0].read_text("utf-8"), yaml.BaseLoader)
            if "kpt_shape" in content:
                raise ValueError("it has kpt_shape: its labels are key points and no outlines")
            listed = content["names"]
            if not isinstance(listed, dict | list):
                raise TypeError("names is a text; expected a list")
            by_number = listed if isinstance(listed, dict) else dict(enumerate(listed))
            by_number = {parse_integer(str(i)): name for i, name in by_number.items()}
            names = [annotated.class_name(by_number[i]) for i in sorted(by_number)]
            if [*sorted(by_number)] != [*range(len(names))]:
                raise ValueError(
                    f"names has the keys {shorten([*map(str, by_number)])}, not 0, 1, ..."
                )
            if content.get("nc", str(len(names))) != str(len(names)):
                raise ValueError(f"nc is {content['nc']}, but names has {len(names)} classes")
            splits = _splits(root, tables[0], content, paths) or splits
    elif (root / "classes.txt").is_file():
        names = read_names(str(root / "classes.txt"), "data.format")
    if not names:
        if not annotated.find_files(root, ".txt"):
            return annotated.Annotations([], {})
        raise UserError(
            f"data.format: no data.yaml with names, and no classes.txt, in {root}; YOLO's labels "
            "are numbers"
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"data.format: two classes of {root} are called {twice[0]}")
    images = []
    for path, split in splits.items():
        parts = path.rpartition(".")[0].split("/")
        at = len(parts) - 1 - parts[::-1].index("images")
        labels = root.joinpath(*parts[:at], "labels", *parts[at + 1 :]).with_suffix(".txt")
        labels = labels.with_name(parts[-1] + ".txt")
        try:
            width, height, _ = upright_size(str(root / path))
        except UnreadableError:
            width = height = 1  # counted in training
        objects = []
        if labels.is_file():  # an image without labels shows background alone
            objects = [*_objects(labels, names, width, height)]
        images.append(annotated.AnnotatedImage(split, path, str(labels), height, width, objects))
    if images and not any(image.objects for image in images):
        raise UserError(
            f"data.format: none of {len(images):,} images has labels; {images[0].path} would "
            f"have them in {images[0].source}"
        )
    texts = annotated.find_files(root, ".txt")
    there = {str(path) for path in texts if "labels" in path.relative_to(root).parts}
    lost = sorted(there - {image.source for image in images})
    lacking = [image.path for image in images if image.source not in there]
    unused = "labels whose image is missing or in no split"
    notes = [f"{unused} are left out: {shorten(lost, 3)}"] if lost else []
    notes += [f"images without labels are background: {shorten(lacking, 3)}"] if lacking else []
    counts = Counter(image.split for image in images)
    if counts.keys() - {""}:
        texts_of = [f"{split or 'none'} {count:,}" for split, count in counts.items()]
        notes.append(f"images of each split: {', '.join(texts_of)}")
    return annotated.Annotations(images, {name: i for i, name in enumerate(names, 1)}, tuple(notes))


def _splits(
    root: Path, table: Path, content: Mapping[str, Any], images: Sequence[str]
) -> dict[str, str]:
    """Return the split of each image that data.yaml names; none if it names no splits."""
    base = content.get("path")
    base = os.path.join(table.parent, "" if base in _NOTHING else base)
    known = dict.fromkeys(images)
    splits: dict[str, str] = {}
    for split, names in SPLIT_NAMES.items():
        given = [content.get(name) for name in names]
        for value in (value for value in given if value not in _NOTHING):
            for text in value if isinstance(value, list) else [value]:
                for path in _images_of(root, base, text, known):
                    if (other := splits.setdefault(path, split)) != split:
                        raise ValueError(
                            f"{path} is in {other} and {split}; train alone would hold out "
                            "data.test_fraction"
                        )
    return dict.fromkeys(splits, "") if {*splits.values()} == {"train"} else splits


def _images_of(root: Path, base: str, text: Any, known: Mapping[str, None]) -> Iterator[str]:
    if not isinstance(text, str):
        raise TypeError(f"a split is a {type(text).__name__}; expected a folder or a list")
    text = text.replace("\\", "/")
    # Roboflow writes ../ for the folder of data.yaml.
    places = [os.path.join(base, name) for name in (text, text.removeprefix("../"))]
    inside = (path for path in places if not os.path.relpath(path, root).startswith(".."))
    place = next(filter(os.path.exists, inside), None)
    if place is None:
        raise ValueError(f"no folder or list {text} in {base}, below {root}")
    if os.path.isdir(place):
        start = f"{os.path.relpath(place, root)}/"
        found = [path for path in known if start == "./" or path.startswith(start)]
        if not found:
            raise ValueError(f"no image in {text}; expected some in a folder images")
        yield from found
        return
    for number, line in enumerate(read_lines(place, "data.format"), 1):
        name = line.strip().replace("\\", "/")
        possible = [
            os.path.relpath(os.path.join(folder, name), root)
            for folder in (os.path.dirname(place), base)
        ]
        path = next((path for path in possible if path in known), None)
        if path is not None:
            yield path
        elif name:
            raise UserError(
                f"data.format: {place}, line {number}: no image {name} in a folder images of {root}"
            )


def _objects(
    path: Path, names: Sequence[str], width: int, height: int
) -> Iterator[annotated.Object]:
    for number, line in enumerate(read_lines(str(path), "data.format"), 1):
        values = line.split()
        if not values:
            continue
        with annotated.damaged(path, f", line {number}"):
            label, *numbers = float(values[0]), *map(float, values[1:])
            if label != int(label) or not 0 <= label < len(names):
                raise ValueError(f"the class {values[0]} is none of 0 to {len(names) - 1}")
            if len(numbers) in (4, 5):
                yield annotated.Object(names[int(label)])
                continue
            points = annotated.to_points(numbers)
            if len(points) < 3 or points.min() < -0.01 or points.max() > 1.01:
                raise ValueError(
                    "expected a class, and x and y from 0 to 1 of three or more points"
                )
            yield annotated.Object(names[int(label)], (points * (width, height),))
