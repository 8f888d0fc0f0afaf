"""Annotation files of COCO, labelme and YOLO: outlines of objects, as masks."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml  # type: ignore[import-untyped]

from train import limits
from train.data import storage
from train.data.class_table import Row
from train.data.columns import normalized, parse_integer, read_lines, read_names
from train.data.decode import UnreadableError, upright_size
from train.data.drawings import Drawing, Shape, decode_runs
from train.data.files import check_folder, list_images
from train.data.mask_layouts import FoundLayout, Pair, choose_test, find_layout
from train.data.splits import SPLIT_NAMES, split_of
from train.errors import UserError, shorten

Format = Literal["coco", "labelme", "yolo"]

_BACKGROUND = "background"
_NOTHING = (None, "", "null", "~")
"""Fields of YAML without a value."""
_BOXES = (
    "a mask needs outlines: export polygons or RLE from the tool, or masks from a model such as SAM"
)


def _is_background(name: str) -> bool:
    return name.strip("_").lower() == _BACKGROUND


def _is_ignored(name: str) -> bool:
    return Row(name.strip("_")).is_void


class FoundAnnotations(NamedTuple):
    """Images with described masks, by split.

    Attributes:
      root: Folder of the data.
      pairs_by_split: Paths of images below the root, with their masks.
      rows: Class table.
      source: File that names the classes.
      notes: What is left out.
    """

    root: Path
    pairs_by_split: dict[str, list[Pair]]
    rows: tuple[Row, ...]
    source: str
    notes: tuple[str, ...]

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return sorted(self.pairs_by_split)

    @property
    def is_split(self) -> bool:
        """Whether there are training and test images."""
        return self.splits != [""]

    def test(self, given: str | None) -> str:
        """Return the name of the test split.

        Raises:
          UserError: if there is none.
        """
        return choose_test(self.splits, self.root, given)

    def pairs(self, split: str = "") -> list[Pair]:
        """Return the images of a split with their masks."""
        return self.pairs_by_split[split]


class _Object(NamedTuple):
    """An annotated object: its class, and its outline or runs; neither for a box."""

    name: str
    polygons: tuple[np.ndarray, ...] = ()
    runs: tuple[int, ...] = ()


class _Image(NamedTuple):
    """An annotated image: split, path below the root, source, height, width, objects."""

    split: str
    path: str
    source: str
    height: int
    width: int
    objects: list[_Object]


class _Read(NamedTuple):
    """Annotated images, values of classes by name, which the format gives or none, and notes."""

    images: list[_Image]
    values: dict[str, int]
    notes: tuple[str, ...] = ()


def find_annotations(
    root: Path, format: Format, known: Mapping[str, int] | None = None
) -> FoundAnnotations | FoundLayout:
    """Read the annotation files of a folder, or for a trained network find masks that are images.

    Values of masks are 0 for the background; then ids of categories (COCO) if these are 1 to 254,
    else 1, 2, ... in their order; labelme's labels count in alphabetical order.

    Args:
      root: folder of the data.
      format: kind of its annotation files.
      known: values of a trained network's classes by name.

    Raises:
      UserError: if there are none, they are damaged, name unknown classes or have boxes alone.
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
    if boxes:
        raise UserError(
            f"data.format: {boxes[0].source}: {len(boxes):,} of {len(objects):,} objects are boxes "
            f"without outlines, such as in {boxes[0].path}; {_BOXES}"
        )
    names = {o.name for _, o in objects} if format == "labelme" else {*read.values}
    plain = sorted(name for name in names if not (_is_background(name) or _is_ignored(name)))
    values = read.values or {name: i for i, name in enumerate(plain, 1)}
    values |= {name: 0 for name in names if _is_background(name)}
    values |= {name: 255 for name in names if _is_ignored(name)}
    if known is not None:
        if unknown := sorted({o.name for _, o in objects} & {*plain} - known.keys()):
            raise UserError(
                f"data.path: the network knows no class {shorten(unknown)}; its classes are "
                f"{shorten([*known], 12)}"
            )
        values |= known
    first: dict[str, _Image] = {}
    for image in read.images:
        earlier = first.setdefault(image.path, image)
        if earlier is not image and (root / image.path).is_file():
            raise UserError(
                f"data.format: {image.path} is annotated twice, in {earlier.source} and in "
                f"{image.source}; give all its objects in one place"
            )
    pairs: dict[str, list[Pair]] = {}
    for image in read.images:
        shapes = tuple(Shape(values[o.name], o.polygons, o.runs) for o in image.objects)
        drawing = Drawing(image.source, image.height, image.width, shapes)
        pairs.setdefault(image.split, []).append((image.path, drawing))
    rows = (
        Row(_BACKGROUND, 0),
        *(Row("void", 255) for _ in [*filter(_is_ignored, names)][:1]),
        *(Row(name, values[name]) for name in sorted(plain, key=lambda name: values[name])),
    )
    if (len(pairs) > 1 or (known is None and "" not in pairs)) and "train" not in pairs:
        raise UserError(f"data.path: {root} has the splits {shorten(sorted(pairs))}, but no train")
    others = sorted({*list_images(root).paths} - first.keys())
    notes = (
        (f"images that no annotations name are left out: {shorten(others, 3)}",) if others else ()
    )
    return FoundAnnotations(root, pairs, rows, read.images[0].source, read.notes + notes)


def _coco(root: Path) -> _Read:
    files = _files(root, ".json")
    named = [path for path in files if "instances" in path.name] or files
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in named:
        content = _load(path)
        if not isinstance(content, dict) or not {"images", "annotations"} <= content.keys():
            continue
        split = split_of(str(path.relative_to(root))) or ""
        if split in found:
            raise UserError(
                f"data.format: {found[split][0]} and {path} both annotate "
                f"{split or 'all'} images; move one elsewhere"
            )
        found[split] = path, content
    images: list[_Image] = []
    ids: dict[str, Any] = {}
    there = _by_normalized_path(root)
    for split, (path, content) in found.items():
        with _damaged(path):
            for key in ("images", "categories"):
                counts = Counter(item["id"] for item in content[key])
                if twice := [id for id, count in counts.items() if count > 1]:
                    raise ValueError(f"two of its {key} have the id {twice[0]}")
            names = {c["id"]: _name(c["name"]) for c in content["categories"]}
            for id in sorted(names):
                ids.setdefault(names[id], id)
            sizes = {i["id"]: [int(i["height"]), int(i["width"])] for i in content["images"]}
            objects: dict[Any, list[_Object]] = {}
            for a in content["annotations"]:
                outline = _outline(a.get("segmentation"), sizes[a["image_id"]])
                objects.setdefault(a["image_id"], []).append(
                    _Object(names[a["category_id"]], *outline)
                )
            for image in content["images"]:
                name = _locate(there, root, path, split, str(image["file_name"]))
                own = objects.get(image["id"], [])
                height, width = sizes[image["id"]]
                images.append(_Image(split, name, str(path), height, width, own))
    classes = [name for name in ids if not (_is_background(name) or _is_ignored(name))]
    own = [ids[name] for name in classes]
    is_plain = all(isinstance(id, int) and 0 < id < 255 for id in own) and len({*own}) == len(own)
    numbers = {name: number for number, name in enumerate(classes, 1)}
    return _Read(images, ids if is_plain else dict.fromkeys(ids, 0) | numbers)


def _outline(segmentation: Any, size: list[int]) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """Return polygons or runs of COCO, in an image of a height and width; neither for a box."""
    if isinstance(segmentation, dict):
        if [*segmentation.get("size", size)] != size:
            raise ValueError(f"runs of the size {segmentation['size']} in an image of {size}")
        counts = segmentation["counts"]
        return (), decode_runs(counts) if isinstance(counts, str) else tuple(map(int, counts))
    return tuple(_points(polygon) for polygon in segmentation or () if len(polygon) >= 6), ()


def _points(flat: Sequence[float]) -> np.ndarray:
    points = np.array(flat, np.float64).reshape(-1, 2)
    if not np.isfinite(points).all():
        raise ValueError("a point is not finite")
    return points


def _labelme(root: Path) -> _Read:
    images, there = [], _by_normalized_path(root)
    for path in _files(root, ".json"):
        content = _load(path)
        if not isinstance(content, dict) or "shapes" not in content:
            continue
        with _damaged(path):
            split = split_of(f"{path.relative_to(root).parent}/") or ""
            image = _locate(there, root, path, split, str(content["imagePath"]))
            size = int(content["imageHeight"]), int(content["imageWidth"])
            objects = [_labelme_object(shape) for shape in content["shapes"]]
            images.append(_Image(split, image, str(path), *size, objects))
    return _Read(images, {})


def _labelme_object(shape: Mapping[str, Any]) -> _Object:
    name, points = _name(shape["label"]), _points(np.ravel(shape["points"]).tolist())
    kind = shape.get("shape_type") or "polygon"
    if kind == "circle":
        center, edge = points
        angles = np.linspace(0, 2 * np.pi, 64, endpoint=False)
        radius = np.hypot(*(edge - center))
        points = center + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
    elif kind == "rectangle":
        return _Object(name)
    elif kind != "polygon":
        raise ValueError(f"a shape is a {kind}; expected polygons or circles")
    if len(points) < 3:
        raise ValueError(f"an outline of {name} has {len(points)} points; expected three or more")
    return _Object(name, (points,))


def _yolo(root: Path) -> _Read:
    paths = [path for path in list_images(root).paths if "images" in path.split("/")[:-1]]
    splits = {path: split_of(f"{os.path.dirname(path)}/") or "" for path in paths}
    tables = [path for path in _files(root, ".yaml") if path.name in ("data.yaml", "dataset.yaml")]
    names: Sequence[str] = ()
    if tables[1:]:
        raise UserError(
            f"data.format: {tables[0]} and {tables[1]} both describe {root}; move one elsewhere"
        )
    if tables:
        with _damaged(tables[0]):
            limits.LABEL_FILE.check(tables[0].stat().st_size, f"data.format: {tables[0]}")
            # All scalars are texts: a class can be called no.
            content = yaml.load(tables[0].read_text("utf-8"), yaml.BaseLoader)
            listed = content["names"]
            if not isinstance(listed, dict | list):
                raise TypeError("names is a text; expected a list")
            by_number = listed if isinstance(listed, dict) else dict(enumerate(listed))
            by_number = {parse_integer(str(i)): name for i, name in by_number.items()}
            names = [_name(by_number[i]) for i in sorted(by_number)]
            if [*sorted(by_number)] != [*range(len(names))]:
                raise ValueError(
                    f"names has the keys {shorten([*map(str, by_number)])}, not 0, 1, ..."
                )
            splits = _yolo_splits(root, tables[0], content, paths) or splits
    elif (root / "classes.txt").is_file():
        names = read_names(str(root / "classes.txt"), "data.format")
    if not names:
        if not _files(root, ".txt"):
            return _Read([], {})
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
            objects = [*_yolo_objects(labels, names, width, height)]
        images.append(_Image(split, path, str(labels), height, width, objects))
    if images and not any(image.objects for image in images):
        raise UserError(
            f"data.format: none of {len(images):,} images has labels; {images[0].path} would "
            f"have them in {images[0].source}"
        )
    texts = _files(root, ".txt")
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
    return _Read(images, {name: i for i, name in enumerate(names, 1)}, tuple(notes))


def _yolo_splits(
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
                for path in _yolo_images(root, base, text, known):
                    if (other := splits.setdefault(path, split)) != split:
                        raise ValueError(
                            f"{path} is in {other} and {split}; train alone would hold out "
                            "data.test_fraction"
                        )
    return dict.fromkeys(splits, "") if {*splits.values()} == {"train"} else splits


def _yolo_images(root: Path, base: str, text: Any, known: Mapping[str, None]) -> Iterator[str]:
    """Find the images of a folder, or of a file with a path on each line."""
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


def _name(value: Any) -> str:
    """Return the name of a class. Lists of references to lists would be too much in YAML."""
    if not isinstance(value, str):
        raise TypeError(f"a name is a {type(value).__name__}; expected a text")
    return normalized(value.strip())


def _yolo_objects(path: Path, names: Sequence[str], width: int, height: int) -> Iterator[_Object]:
    for number, line in enumerate(read_lines(str(path), "data.format"), 1):
        values = line.split()
        if not values:
            continue
        with _damaged(path, f", line {number}"):
            label, *numbers = float(values[0]), *map(float, values[1:])
            if label != int(label) or not 0 <= label < len(names):
                raise ValueError(f"the class {values[0]} is none of 0 to {len(names) - 1}")
            if len(numbers) in (4, 5):
                yield _Object(names[int(label)])
                continue
            points = _points(numbers)
            if len(points) < 3 or points.min() < -0.01 or points.max() > 1.01:
                raise ValueError(
                    "expected a class, and x and y from 0 to 1 of three or more points"
                )
            yield _Object(names[int(label)], (points * (width, height),))


_READERS: Mapping[str, Callable[[Path], _Read]] = {
    "coco": _coco,
    "labelme": _labelme,
    "yolo": _yolo,
}


def _files(root: Path, suffix: str) -> list[Path]:
    with storage.reported("data.path", root):
        found = [path for path in storage.walk(str(root), Counter()) if path.endswith(suffix)]
    return [root / path for path in sorted(found)]


def _load(path: Path) -> Any:
    limits.ANNOTATIONS.check(path.stat().st_size, f"data.format: {path}")
    with _damaged(path):
        return json.loads(path.read_bytes())


def _by_normalized_path(root: Path) -> dict[str, str]:
    return {normalized(path): path for path in list_images(root).paths}


def _locate(there: Mapping[str, str], root: Path, annotations: Path, split: str, name: str) -> str:
    """Return the path of an image below the root, of those by `normalized` path in ``there``."""
    name = name.replace("\\", "/")
    stem = annotations.stem.removeprefix("instances_")
    own = os.path.relpath(annotations.parent, root)
    folders = (
        own,
        "",
        "images",
        split,
        f"images/{split}",
        stem,
        f"images/{stem}",
        f"{split}/images",
    )
    paths = [os.path.normpath(os.path.join(folder, name)) for folder in folders]
    found = (there[normalized(path)] for path in paths if normalized(path) in there)
    return next(found, paths[0])


@contextlib.contextmanager
def _damaged(path: Path, place: str = "") -> Iterator[None]:
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
