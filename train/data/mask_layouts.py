"""Layouts of folders of images and masks, in one table."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from train.data.class_table import FILES as TABLES
from train.data.columns import normalized, read_lines
from train.data.decode import EXTENSIONS
from train.data.drawings import Mask
from train.data.files import IMAGE_PATTERNS, ImageFiles, check_folder, list_images, subfolders
from train.data.splits import choose_test_split, choose_training_split, split_of
from train.errors import UserError, shorten

Pair = tuple[str, Mask]
"""Path of an image, relative to the folder of the data, and its mask, of which a path is, too."""

_HERE = ""
"""The split of a layout without splits."""


class Layout(NamedTuple):
    """Folders of images and masks; ``{split}`` stands for the name of a split.

    Attributes:
      images: folder of images.
      masks: folder of masks.
      image_suffix: end of an image's name that its mask does not have.
      mask_suffixes: possible ends of a mask's name that its image does not have; the first that
        occurs counts.
      names: file of the names of a split, one per line; None takes all files.
      table: published data set whose class table is used if there is no other.
    """

    images: str
    masks: str
    image_suffix: str = ""
    mask_suffixes: tuple[str, ...] = ("", "_mask", "_label", "_labels", "_L")
    names: str | None = None
    table: str | None = None

    @property
    def split(self) -> str:
        """Path of a split below the root: a file of names, or a folder."""
        return self.names or self.images

    def candidates(self, root: Path) -> list[str]:
        """Return what may be splits of a folder in this layout."""
        if "{split}" not in self.split:
            return [_HERE]
        before, after = self.split.split("{split}")
        parent = root / before if before else root
        if not parent.is_dir():
            return []
        if after and "/" not in after:  # a file of names
            found = {path.name for path in parent.iterdir() if path.is_file()} - {*TABLES}
            return sorted(n.removesuffix(after) for n in found if n.endswith(after))
        return sorted(subfolders(parent).values())

    def splits(self, root: Path) -> list[str]:
        """Find the splits of a folder in this layout."""
        return [s for s in self.candidates(root) if all(f.is_dir() for f in self.folders(root, s))]

    def folders(self, root: Path, split: str) -> tuple[Path, Path]:
        """Return the folders of images and masks of a split."""
        return root / self.images.format(split=split), root / self.masks.format(split=split)


LAYOUTS = (
    Layout("{split}/images", "{split}/masks"),
    Layout("images/{split}", "masks/{split}"),
    Layout("{split}", "{split}annot", table="camvid"),  # SegNet's CamVid
    Layout("{split}", "{split}_labels"),  # the original CamVid
    Layout("{split}", "{split}_masks"),
    Layout(
        "leftImg8bit/{split}",
        "gtFine/{split}",
        "_leftImg8bit",
        ("_gtFine_labelIds",),
        table="cityscapes",
    ),
    Layout("images/{split}", "annotations/{split}"),  # ADE20K
    Layout(
        "JPEGImages", "SegmentationClass", names="ImageSets/Segmentation/{split}.txt", table="voc"
    ),
    Layout("JPEGImages", "SegmentationClass", table="voc"),
    Layout("images", "masks", names="{split}.txt"),
    Layout("images", "masks"),
)


class FoundLayout(NamedTuple):
    """A folder's layout, the splits that it holds, and notes about what is not read."""

    layout: Layout
    root: Path
    splits: list[str]
    notes: tuple[str, ...] = ()

    @property
    def is_split(self) -> bool:
        """Whether the folder is split into training and test images."""
        return self.splits != [_HERE]

    def test(self, given: str | None) -> str:
        """Return the name of the test split: the given one, or val, or test.

        Raises:
          UserError: if there is none.
        """
        return choose_test(self.splits, self.root, given)

    def pairs(self, split: str = _HERE) -> tuple[list[Pair], list[ImageFiles]]:
        """Match the images of a split with their masks.

        Returns:
          The pairs, and all files of both folders.

        Raises:
          UserError: if an image or a mask is without the other, or there is none.
        """
        layout = self.layout
        folders = [text.format(split=split) for text in (layout.images, layout.masks)]
        found = [list_images(self.root / folder) for folder in folders]
        for folder, files in zip(folders, found, strict=True):
            if not files.paths:
                raise UserError(
                    f"data.path: no image in {self.root / folder}; expected {IMAGE_PATTERNS}"
                )
        image_folder, mask_folder = (self.root / folder for folder in folders)
        images = _by_name(image_folder, found[0].paths, layout.image_suffix)
        for suffix in layout.mask_suffixes:
            masks = _by_name(mask_folder, found[1].paths, suffix)
            if images.keys() & masks.keys():
                break
        else:
            masks = _by_name(mask_folder, found[1].paths, layout.mask_suffixes[0])
        if layout.names is not None:
            names = _read_names(self.root / layout.names.format(split=split), images)
            images, masks = (
                {name: by_name[name] for name in names if name in by_name}
                for by_name in (images, masks)
            )
            if missing := [name for name in names if name not in images]:
                raise UserError(
                    f"data.path: no image {image_folder / missing[0]}.*, which "
                    f"{self.root / layout.names.format(split=split)} names"
                )
        sides = ("image", image_folder, images), ("mask", mask_folder, masks)
        for own, partner in (sides, sides[::-1]):
            _check_partners(own, partner)
        pairs: list[Pair] = [
            (f"{folders[0]}/{images[name]}", f"{folders[1]}/{masks[name]}") for name in images
        ]
        return pairs, found


def choose_test(splits: Sequence[str], root: Path, given: str | None) -> str:
    """Return the given test split, or val, or test.

    Raises:
      UserError: if there is none.
    """
    test = choose_test_split(given, splits, root)
    if test is None:
        raise UserError(
            f"data.path: no split val or test in {root}; there are {shorten(splits)}; name another "
            "one with data.test_split, or move all images into images/ and all masks into masks/, "
            "so that data.test_fraction of them are held out"
        )
    return test


def find_layout(root: Path, *, training: bool = True) -> FoundLayout:
    """Find the layout of a folder.

    Args:
      root: folder that the user gave.
      training: whether it must hold training images.

    Raises:
      UserError: if it is in no known layout.
    """
    check_folder(root, "; expected a folder with images and masks")
    for layout in LAYOUTS:
        splits = layout.splits(root)
        if splits == [_HERE] or (splits and (not training or choose_training_split(splits))):
            return FoundLayout(layout, root, splits, _left_out(layout, root, splits))
        if any(map(split_of, splits)):
            raise UserError(
                f"data.path: no training split {root / layout.split.format(split='train')}; there "
                f"are {shorten(splits)}"
            )
    there = [*subfolders(root).values()]
    raise UserError(
        f"data.path: no images with masks in {root}, which holds "
        f"{shorten(there) if there else 'no folders'}{_hint(root, there)}; expected images with "
        "masks, train/images with train/masks, or the folders of CamVid, Cityscapes, ADE20K or "
        "PASCAL VOC"
    )


def _left_out(layout: Layout, root: Path, splits: Sequence[str]) -> tuple[str, ...]:
    """Return notes about splits without masks, and other masks of the same images."""
    notes = []
    for split in layout.candidates(root):
        images, masks = layout.folders(root, split)
        if split_of(f"{split}/") == split.lower() and images.is_dir() and not masks.is_dir():
            notes.append(f"{images} is not read: there is no {masks}")
    read = [layout.folders(root, split) for split in splits]
    others = [other.folders(root, s) for other in LAYOUTS for s in other.splits(root)]
    for images, masks in dict.fromkeys(others):
        if not any(masks.is_relative_to(m) or m.is_relative_to(masks) for _, m in read):
            notes.append(f"masks are read from {read[0][1]}; {masks} of {images} is not read")
    return tuple(notes)


def _hint(root: Path, there: Sequence[str]) -> str:
    annotations = [
        path for name in ("", *there) for path in sorted((root / name).glob("*.json"))[:1]
    ]
    if annotations:
        return f"; for annotations such as {annotations[0]} give data.format coco or labelme"
    if "images" not in there:
        return ""
    others = [name for name in there if name != "images" and list_images(root / name).paths]
    if len(others) == 1:
        return f"; if {others[0]} has the masks, rename it to masks"
    return "; a mask is an image of the labels of all pixels" if not others else ""


def _by_name(folder: Path, files: Sequence[str], suffix: str) -> dict[str, str]:
    """Return files by their names without extension and suffix; those without it are left out."""
    by_name: dict[str, str] = {}
    for file in files:
        name = file.rpartition(".")[0]
        if not name.endswith(suffix):
            continue
        name = normalized(name.removesuffix(suffix))
        if name in by_name:
            raise UserError(f"data.path: {by_name[name]} and {file} in {folder} have the same name")
        by_name[name] = file
    return by_name


_Side = tuple[str, Path, dict[str, str]]
"""Kind of the files, their folder, and the files by name."""


def _check_partners(own: _Side, partner: _Side) -> None:
    (kind, folder, files), (partner_kind, partner_folder, partners) = own, partner
    single = [name for name in files if name not in partners]
    if single:
        raise UserError(
            f"data.path: the {kind} {folder / files[single[0]]} has no {partner_kind}: no file "
            f"{partner_folder / single[0]}.*"
            + (f"; nor have {len(single) - 1} others" if single[1:] else "")
            + f"; add the {partner_kind}, or move the {kind} to another folder"
        )


def _without_extension(name: str) -> str:
    stem, dot, extension = name.rpartition(".")
    return stem if dot and extension.lower() in EXTENSIONS else name


def _read_names(path: Path, known: Collection[str]) -> list[str]:
    """Read the names of a split: a line or its first word, perhaps with an extension."""
    names: dict[str, None] = {}
    for line in filter(None, map(str.strip, read_lines(str(path), "data.path"))):
        texts = [normalized(text) for text in (line, line.split()[0])]
        possible = [name for text in texts for name in (text, _without_extension(text))]
        names[next((name for name in possible if name in known), possible[-1])] = None
    return [*names]
