"""Layouts of folders of images and masks: two patterns each, in one table."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from train.data import files as image_files
from train.data import storage
from train.data.class_table import FILES as TABLES
from train.data.class_table import Row
from train.data.columns import normalized, read_lines
from train.data.drawings import Mask
from train.data.splits import SPLIT_NAMES, choose_test_split, choose_training_split, split_of
from train.errors import UserError, shorten

Pair = tuple[str, Mask]
"""Path of an image, relative to the folder of the data, and its mask, of which a path is, too."""

_HERE = ""
"""The split of a layout without splits."""
_Files = dict[str, dict[str, str]]
"""Paths by split and name."""


class Layout(NamedTuple):
    """Patterns of the paths of images and masks.

    In a pattern, ``{split}`` stands for the name of a split, ``{name}`` for what an image and its
    mask have in common, at any depth, and ``*`` for any other text, as that of an extension.

    Attributes:
      images: pattern of images.
      masks: pattern of masks.
      suffixes: possible ends of a mask's name that its image does not have.
      names: file of the names of a split, one per line; None takes all files.
      table: published data set whose class table is used if there is no other.
    """

    images: str
    masks: str
    suffixes: tuple[str, ...] = ("",)
    names: str | None = None
    table: str | None = None

    def __str__(self) -> str:
        return f"--data.images '{self.images}' --data.masks '{self.masks}'"

    @classmethod
    def of(cls, images: str, masks: str) -> "Layout":
        """Return the layout of two patterns, or of two folders."""
        images, masks = (
            pattern if "{name}" in pattern else f"{pattern.rstrip('/')}/{{name}}.*"
            for pattern in (images, masks)
        )
        layout = cls(images, masks)
        if ("{split}" in images) != ("{split}" in masks):
            raise UserError(f"data.masks: {layout}: give {{split}} in both patterns, or in none")
        return layout


_USUAL = {name for names in SPLIT_NAMES.values() for name in names}
_SUFFIXES = ("", "_mask", "_label", "_labels", "_L")
LAYOUTS = (
    Layout("{split}/images/{name}.*", "{split}/masks/{name}.*", _SUFFIXES),
    Layout("images/{split}/{name}.*", "masks/{split}/{name}.*", _SUFFIXES),
    Layout("{split}/{name}.*", "{split}_labels/{name}.*", _SUFFIXES),
    Layout("{split}/{name}.*", "{split}_masks/{name}.*", _SUFFIXES),
    Layout("images/{name}.*", "masks/{name}.*", _SUFFIXES, "{split}.txt"),
)
"""Layouts that need no option."""
FORMATS: Mapping[str, Layout] = {
    "camvid": Layout("{split}/{name}.*", "{split}annot/{name}.*", table="camvid"),
    "cityscapes": Layout(
        "leftImg8bit/{split}/{name}_leftImg8bit.*",
        "gtFine/{split}/{name}_gtFine_labelIds.*",
        table="cityscapes",
    ),
    "ade20k": Layout("images/{split}/{name}.*", "annotations/{split}/{name}.*"),
    "voc": Layout(
        "JPEGImages/{name}.*",
        "SegmentationClass/{name}.*",
        names="ImageSets/Segmentation/{split}.txt",
        table="voc",
    ),
}
"""Layouts of published data sets, by `data.format`."""


class FoundLayout(NamedTuple):
    """Images and masks of a folder.

    Attributes:
      root: folder of the data.
      images: paths below it by split and name.
      masks: masks of these names.
      layout: patterns of both.
      notes: what is not read.
      rows: class table of annotations; () for masks that are images.
      source: file of annotations that names the classes.
    """

    root: Path
    images: _Files
    masks: Mapping[str, Mapping[str, Mask]]
    layout: Layout = Layout("", "")
    notes: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    source: str = ""

    @property
    def paths(self) -> set[Mask]:
        """Images and masks of all splits."""
        return {p for side in self[1:3] for paths in side.values() for p in paths.values()}

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return sorted(self.images)

    @property
    def is_split(self) -> bool:
        """Whether the folder is split into training and test images."""
        return self.splits != [_HERE]

    @property
    def train(self) -> str | None:
        """Name of the training split; None if there is none."""
        return choose_training_split(self.splits) or self._only("train")

    def _only(self, kind: str) -> str | None:
        """Return the only split such as train2017; None for several."""
        found = [split for split in self.splits if _stem(split) in SPLIT_NAMES[kind]]
        return found[0] if len(found) == 1 else None

    def test(self, given: str | None) -> str:
        """Return the name of the test split: the given one, or val, or test.

        Raises:
          UserError: if there is none.
        """
        test = choose_test_split(given, self.splits, self.root)
        test = test or self._only("val") or self._only("test")
        if test is None:
            raise UserError(
                f"data.path: no split val or test in {self.root}; there are "
                f"{shorten(self.splits)}; name another one with data.test_split, or move all "
                "images into images/ and all masks into masks/, so that data.test_fraction of "
                "them are held out"
            )
        return test

    def pairs(self, split: str = _HERE) -> list[Pair]:
        """Match the images of a split with their masks.

        Raises:
          UserError: if an image or a mask is without the other.
        """
        images, masks = self.images[split], self.masks[split]
        sides: tuple[tuple[str, str, Mapping[str, Mask]], ...]
        sides = ("image", self.layout.images, images), ("mask", self.layout.masks, masks)
        for (kind, _, own), (other, pattern, others) in (sides, sides[::-1]):
            if single := [name for name in own if name not in others]:
                missing = self.root / pattern.format(split=split, name=single[0])
                alone = self.root / str(own[single[0]])
                raise UserError(
                    f"data.path: the {kind} {alone} has no {other}: no file {missing}"
                    + (f"; nor have {len(single) - 1} others" if single[1:] else "")
                    + f"; add the {other}, or move the {kind} to another folder"
                )
        return [(images[name], masks[name]) for name in images]


def find_layout(
    root: Path, given: Layout | None = None, *, training: bool = True, table: str | None = None
) -> FoundLayout:
    """Find the images and masks of a folder.

    Args:
      given: its layout; None tries all that need no option. A trained network also tries those of
        published data sets.
      training: whether it must hold training images.
      table: name of a class table, which is read.

    Raises:
      UserError: if it is in no known layout, or in several.
    """
    image_files.check_folder(root, "; expected a folder with images and masks")
    texts = (p for folder in ("", "ImageSets/Segmentation") for p in (root / folder).glob("*.txt"))
    lists = {path.name for path in texts if split_of(path.stem)}  # perhaps of a split's images
    files = image_files.list_images(root, {*TABLES, table or "", "data.yaml", *lists})
    known = (given,) if given else LAYOUTS + (() if training else (*FORMATS.values(),))
    found = [f for layout in known if (f := _find(root, layout, files.paths))]
    if given is None:  # images/cats/ is no split, and images/train/ is one
        split = [f for f in found if "{split}" in f.layout.images]
        usual = [f for f in split if not _USUAL.isdisjoint(map(_stem, f.splits))]
        read = {path for f in usual for path in f.paths}
        whole = [f for f in found if f not in split and read.isdisjoint(f.paths or read)]
        found = usual + whole or ([] if training else split)
    if not found:
        raise UserError(_explain_nothing(root, given, files.paths))
    if len(found) > 1:
        raise UserError(
            f"data.path: {root} has masks in two places; give {found[0].layout}, or "
            f"{found[1].layout}"
        )
    (only,) = found
    if training and only.is_split and not only.train:
        where = only.layout.names or only.layout.images
        raise UserError(
            f"data.path: no training split {root / where.format(split='train', name='*')}; there "
            f"are {shorten(only.splits)}"
        )
    parts = [path.rpartition("/") for path in {*files.paths} - only.paths]
    left = Counter(f"{storage.kind_of(name)}{slash and f' in {at}'}" for at, slash, name in parts)
    return only._replace(notes=storage.describe_skipped(files.skipped + left))


def _stem(split: str) -> str:
    return re.sub(r"[^a-z]+$", "", split.lower())


def _find(root: Path, layout: Layout, files: Sequence[str]) -> FoundLayout | None:
    """Return the images and masks of a layout; None if a folder has none that belong together."""
    (images, twice), (masks, twice_masks) = (_by_name(p, files) for p in layout[:2])
    common = [split for split in images if split in masks]
    for split in common:  # in one folder, masks may have the pattern of images
        are_masks = {*masks[split].values()}
        images[split] = {n: path for n, path in images[split].items() if path not in are_masks}
    ends = {
        end: {split: {n.removesuffix(end): p for n, p in masks[split].items() if n.endswith(end)}
              for split in common}
        for end in layout.suffixes
    }  # fmt: skip
    ends = {
        end: by_split
        for end, by_split in ends.items()
        if any(images[split].keys() & by_split[split].keys() for split in common)
    }
    if not ends:
        return None
    for split in common:
        if same := twice.get(split) or twice_masks.get(split):
            raise UserError(f"data.path: {same} in {root} have the same name")
    if len(ends) > 1:
        choices = [layout.masks.replace("{name}", f"{{name}}{end}") for end in ends]
        options = [str(layout._replace(masks=choice)) for choice in choices[:2]]
        raise UserError(f"data.path: {root} has masks of two kinds; give {', or '.join(options)}")
    ((end, of_splits),) = ends.items()
    layout = layout._replace(masks=layout.masks.replace("{name}", f"{{name}}{end}"))
    found = FoundLayout(root, {s: images[s] for s in common}, of_splits, layout)
    return _by_lists(found) if layout.names else found


def _by_lists(found: FoundLayout) -> FoundLayout:
    root, names = found.root, found.layout.names or ""
    folder, _, end = (root / names).as_posix().rpartition("{split}")
    lists = {path.name.removesuffix(end): path for path in Path(folder).glob(f"*{end}")}
    lists = {split: path for split, path in lists.items() if path.name not in TABLES}
    if not any(map(split_of, lists)):
        return found
    images, masks = found.images[_HERE], found.masks[_HERE]
    by_split: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for split, path in sorted(lists.items()):
        listed = _read_names(path, images)
        if missing := [name for name in listed if name not in images]:
            pattern = found.layout.images.format(name=missing[0])
            if split_of(split):
                raise UserError(
                    f"data.path: no image {root / pattern}, which {path} names; give one name, "
                    "without its folder, on each line"
                )
            continue  # another text
        by_split[0][split] = {name: images[name] for name in listed if name in images}
        by_split[1][split] = {name: masks[name] for name in listed if name in masks}
    return found._replace(images=by_split[0], masks=by_split[1])


def _by_name(pattern: str, files: Sequence[str]) -> tuple[_Files, dict[str, str]]:
    """Return the files that match a pattern, and by split two of the same name."""
    matches, found, twice = _matcher(pattern), dict[str, dict[str, str]](), dict[str, str]()
    for file in files:
        if (match := matches(file)) is None:
            continue
        parts = match.groupdict()
        split, name = parts.get("split", _HERE), normalized(parts["name"])
        other = found.setdefault(split, {}).setdefault(name, file)
        if other != file:
            twice[split] = f"{other} and {file}"
    return found, twice


def _matcher(pattern: str) -> Callable[[str], re.Match[str] | None]:
    stem = pattern.removesuffix(".*")
    texts = {"{split}": "(?P<split>[^/]+)", "{name}": "(?P<name>.+)", "*": "[^/]*"}
    expression = ""
    for part in re.split(r"(\{split\}|\{name\}|\*)", stem):
        group = f"(?P<{part[1:-1]}>"
        expression += (
            f"(?P={part[1:-1]})" if group in expression else texts.get(part, re.escape(part))
        )
    return re.compile(expression + (r"\.[^./]+" if stem != pattern else "")).fullmatch


def _explain_nothing(root: Path, given: Layout | None, files: Sequence[str]) -> str:
    there = [*image_files.subfolders(root).values()]
    held = f"{root}, which holds {shorten(there) if there else 'no folders'}"
    for layout in (given,) if given else LAYOUTS:
        sides = [
            [n for by_name in _by_name(p, files)[0].values() for n in by_name] for p in layout[:2]
        ]
        names = [f"such as {side[0]}" if side else "none" for side in sides]
        if given or all(sides):
            return (
                f"data.path: no images with masks in {held}; {len(sides[0]):,} files are images "
                f"{layout.images}, {names[0]}, and {len(sides[1]):,} masks {layout.masks}, "
                f"{names[1]}; {{name}} must be the same in both"
            )
    for name, layout in FORMATS.items():
        if fits := _find(root, layout, files):
            is_other = name == "ade20k" and "training" not in fits.splits  # such as COCO-Stuff
            what = "" if is_other else f"--data.format {name}, or "
            hint = ", as --data.classes 182 --data.ignore 255" * is_other
            return (
                f"data.format: masks in {root} are not where they are found without an option; "
                f"give {what}{layout}, and say what they hold{hint}"
            )
    found = [p for name in ("", *there) for p in sorted((root / name).glob("*.json"))[:1]]
    folders = sorted({path.rpartition("/")[0] for path in files}, key=lambda f: f != "images")
    hint = ""
    if found:
        hint = f"; for annotations such as {found[0]} give --data.format coco or labelme"
    elif len(folders) == 2:
        hint = f"; give --data.images {folders[0]} --data.masks {folders[1]}"
    return (
        f"data.path: no images with masks in {held}{hint}; expected "
        f"{image_files.IMAGE_PATTERNS} in images/ and masks/, or train/images/ and train/masks/; "
        "give two patterns for others, as --data.images 'img/{name}.jpg' --data.masks "
        "'seg/{name}.png'"
    )


def _read_names(path: Path, known: Collection[str]) -> list[str]:
    """Read the names of a split: a line or its first word, perhaps with an extension."""
    names: dict[str, None] = {}
    for line in filter(None, map(str.strip, read_lines(str(path), "data.path"))):
        texts = [normalized(text) for text in (line, line.split()[0])]
        possible = [name for text in texts for name in (text, image_files.without_extension(text))]
        names[next((name for name in possible if name in known), possible[-1])] = None
    return [*names]
