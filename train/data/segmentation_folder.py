"""Images and their segmentation masks in a folder, in one of several layouts."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from typing_extensions import override

from train.config.data import Content
from train.config.section import Count, CountOrZero, Needs, Positive
from train.data import Arrays, Dataset, Outputs, num_examples
from train.data import masks as mask_rules
from train.data.annotations import find_annotations
from train.data.augment import fit, to_uint8
from train.data.class_table import MASK_VALUES, PUBLISHED, find_table
from train.data.columns import describe_classes
from train.data.decode import UnreadableError, View, file_bytes, upright_size
from train.data.drawings import Mask, mask_size, read_mask
from train.data.files import describe_files
from train.data.image_batches import ImageOptions, decode_pair, read_local, read_masked
from train.data.label_map import IGNORE, LabelMap, Reading, plain_label_map
from train.data.mask_layouts import FORMATS, FoundLayout, Layout, Pair, find_layout
from train.data.photos import DecodedImages
from train.data.placeholder import Placeholder, missing_paths, zeros
from train.data.preprocessing import Preprocessor
from train.data.splits import check_split, describe_hold_out, describe_splits, hold_out
from train.data.workers import Workers
from train.errors import UserError, shorten

MaskValue = Annotated[int, Ge(min(MASK_VALUES)), Le(max(MASK_VALUES))]

_WEIGHED = 2000
"""Largest number of masks that class frequencies are measured on."""


@dataclass(frozen=True)
class SegmentationFolder(DecodedImages):
    """Images with segmentation masks: images of the same size whose values are labels."""

    content: ClassVar[Content] = "masks"
    needs: ClassVar[Needs] = {"test_fraction": ("folds", (None,).__contains__)}
    evaluation_options: ClassVar[dict[str, str]] = {
        "split": "test_split",
        "path": "path",
        "mask_reading": "mask_reading",
        "image_size": "image_size",
    }

    source: Literal["segmentation_folder"] = "segmentation_folder"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "."
    """Folder with images/ and masks/, or in another layout that format or two patterns name."""
    images: Annotated[str, MinLen(1)] | None = None
    """Pattern of images below path, as '{split}/{name}.jpg', or their folder."""
    masks: Annotated[str, MinLen(1)] | None = None
    """Pattern of masks, as '{split}/{name}_mask.png', or their folder; with images."""
    test_split: Annotated[str, MinLen(1)] | None = None
    """Split to test on; None is val, or test if there is no val."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Approximate fraction of images to hold out if path is not split."""
    folds: Annotated[int, Ge(2), Le(100)] | None = None
    """Number of folds of a cross-validation, whose fold is held out; see fnet train --folds."""
    fold: Count = 1
    """Fold that is held out, from 1."""
    format: Literal[
        "images", "camvid", "cityscapes", "ade20k", "voc", "coco", "labelme", "yolo"
    ] = "images"
    """Masks are images; or as published; or outlines in files of COCO, labelme or YOLO."""
    classes: Annotated[int, Ge(2), Le(255)] | None = None
    """Number of classes; None counts mask_values or the class table."""
    class_table: Annotated[str, MinLen(1)] | None = None
    """File of class names, mask values and colors, or camvid, cityscapes or voc."""
    mask_values: Annotated[tuple[Annotated[int, Ge(0), Lt(2**16)], ...], MaxLen(255)] = ()
    """Value of each class in masks, as 0 255; empty is the class table's, or 0, 1, ..."""
    mask_reading: Reading | None = None
    """What counts in masks: numbers (gray value, palette index) or colors; needed if both can."""
    ignore: tuple[MaskValue | str, ...] | None = None
    """Mask values, as 255, or names in the class table, that do not count."""
    class_weights: Literal["median_frequency"] | None = None
    """Weights of classes in the loss; median_frequency favors rare ones."""
    batch_size: Count = 16
    """Batch size."""
    image_size: Count = 512
    """Height and width of the network's input; test images are resized to fit into it."""
    scale: tuple[Positive, Positive] = (0.5, 2.0)
    """Smallest and largest random scale of training images; 1 is the scale of test images."""
    workers: CountOrZero = 0
    """Number of processes that decode images; 0 decodes in a thread of this process."""

    def load(self, *, private: bool = False) -> Dataset:
        """Find images and masks; batches read them.

        `train.data.mask_layouts` has the layouts, and `train.data.masks` the rules for the values
        of masks. Some masks are read at once, so that a mistake ends the run before it is compiled.
        Rows are ``id`` int32 [N], which counts training images and then test images. Batches add
        ``image`` uint8 [N, H, W, 3], ``mask`` uint8 [N, H, W], 255 outside the image, and
        ``weight`` float32 [N], 0.0 for an unreadable file.

        Raises:
          UserError: if there is no image, an image or a mask without the other, no number of
            classes, or if masks hold other values than the classes.
        """
        return load(self)

    def load_test(self, trained: Callable[[], Outputs]) -> Dataset:
        """Load only the test images, for a trained network."""
        outputs = trained()
        return load(self, outputs.label_map or plain_label_map(outputs.names))

    @override
    def for_evaluation(self, options: Mapping[str, Any]) -> Self:
        data = super().for_evaluation(options)
        if data.path == self.path or self.class_table is None:
            return data
        is_there = (Path(data.path) / self.class_table).is_file()
        is_own = is_there and not Path(self.class_table).is_absolute()
        return data if is_own else data.replace(class_table=None)

    @override
    def placeholder(self) -> Placeholder | None:
        if (missing := missing_paths((self.path,))) is None:
            return None
        layout = FORMATS.get(self.format)
        names = self.class_table, layout and layout.table, "voc"
        table = next(PUBLISHED[name] for name in names if name in PUBLISHED)
        rows = sum(not row.is_void for row in table)
        batch = {
            "image": np.zeros((1, *self.image_shape), np.uint8),
            "mask": np.zeros((1, *self.image_shape[:2]), np.uint8),
        }
        classes = self.classes or len(self.mask_values) or rows
        return zeros(self.batch_size, batch, batch, classes=classes, missing=missing)

    @property
    def preprocessor(self) -> Preprocessor:
        """Fit the image into a square, at its upper left corner."""

        def pad(image: np.ndarray) -> np.ndarray:
            canvas = np.empty(self.image_shape, np.uint8)
            canvas[:] = to_uint8(self.mean)
            canvas[: image.shape[0], : image.shape[1]] = image
            return canvas

        def view(width: int, height: int) -> View:
            return fit(width, height, self.image_size).view

        return Preprocessor(self.image_shape, view, pad, max_pixels=self.max_pixels)


def load(config: SegmentationFolder, trained: LabelMap | None = None) -> Dataset:
    """Load the data of a config."""
    if config.scale[0] > config.scale[1]:
        raise UserError(f"data.scale: {config.scale[0]} is more than {config.scale[1]}")
    root = Path(config.path)
    found = _find(root, config, trained)
    train, test, notes = _find_splits(found, config, test_only=trained is not None)
    if config.format not in ("images", *FORMATS) and not found.rows:
        notes.append(
            f"{root} has no annotations in the format {config.format}; its masks are read as "
            "images with the values of the run's classes"
        )
    notes += found.notes
    splits = {"training": train, "test": test} if trained is None else {"test": test}
    parts = {which: _divide(pairs) for which, pairs in splits.items()}
    later = {
        which: _samples(root, some + others, config) for which, (some, others) in parts.items()
    }
    sampled = {which: [*itertools.islice(later[which], len(parts[which][0]))] for which in parts}
    every = [sample for samples in sampled.values() for sample in samples]
    source = None
    if trained is None:
        if found.rows:
            _refuse_values(config)
            rows, source = found.rows, found.source
        else:
            is_given = config.classes is not None or config.mask_values
            default = None if is_given else found.layout.table
            rows, source = find_table(config.class_table, root, default)
        label_map = mask_rules.make_label_map(config, rows, source, every)
        paths = [str(root / name) for name, _ in train + test]
        more = [*describe_classes(label_map.names)]
        more += describe_files(paths[: len(train)], paths[len(train) :])
    elif not found.rows:
        rows, own = find_table(config.class_table, root, None, is_needed=False)
        label_map, more = mask_rules.translate(config, trained, rows, own, every)
    else:
        label_map, more = trained, []
    notes += more
    for which, pairs in splits.items():
        most = config.max_bad_fraction * len(pairs)
        notes += _check_sizes(root, parts[which][0], config, most)
        samples = itertools.chain(sampled[which], later[which])
        mask_rules.check_masks(label_map, samples, len(pairs), most, which, source)
        notes += mask_rules.describe_labels(label_map, sampled[which], which)

    # As bytes, which take less than half the memory of strings.
    images = np.array([os.fsencode(image) for image, _ in train + test])
    masks: Any = [mask for _, mask in train + test]
    if not found.rows:
        masks = np.array([os.fsencode(mask) for mask in masks])
    ids = np.arange(len(images), dtype=np.int32)
    options = ImageOptions.of(config, crop="scaled")
    workers = Workers(options.workers)
    read_masks = functools.partial(read_masked, options, label_map)

    def paths_of(id: int) -> tuple[str, Mask]:
        mask = masks[id] if isinstance(masks, list) else os.fsdecode(masks[id])
        return str(root / os.fsdecode(images[id])), _below(root, mask)

    def read(rows: Arrays) -> Arrays:
        chosen = np.empty((num_examples(rows), 2), object)
        chosen[:] = [paths_of(id) for id in rows["id"].tolist()] or chosen
        return workers(read_masks, rows | {"file": chosen[:, 0], "mask": chosen[:, 1]})

    def augment(rows: Arrays, generator: np.random.Generator) -> Arrays:
        draws = options.draw(num_examples(rows), generator)
        return rows | read_local(read, {"id": rows["id"]} | draws, rows.get("local"))

    def prepare(rows: Arrays) -> Arrays:
        return rows | read_local(read, {"id": rows["id"]}, rows.get("local"))

    def explain(id: int) -> str | None:
        try:
            size = config.image_size
            decode_pair(*paths_of(id), label_map, lambda w, h: fit(w, h, size), config.max_pixels)
        except UnreadableError as error:
            return str(error)
        return None

    return Dataset(
        train={"id": ids[: len(train)]},
        test={"id": ids[len(train) :]},
        classes=label_map.names,
        augment=augment,
        prepare=prepare,
        reads_local=True,
        name=lambda id: paths_of(id)[0],
        test_name=lambda row: paths_of(len(train) + row)[0],
        file_bytes=lambda id: sum(file_bytes(p) for p in paths_of(id) if isinstance(p, str)),
        files=lambda id: [p for p in paths_of(id) if isinstance(p, str)],
        explain=explain,
        max_bad_fraction=config.max_bad_fraction,
        notes=tuple(notes),
        label_map=label_map,
        class_weights=None
        if config.class_weights is None or trained is not None
        else _class_weights(root, train, config, label_map),
    )


def _find(root: Path, config: SegmentationFolder, trained: LabelMap | None) -> FoundLayout:
    if config.format in ("coco", "labelme", "yolo"):
        known = None
        if trained is not None:
            known = dict(zip(trained.names, trained.mask_values().tolist(), strict=True))
        return find_annotations(root, config.format, known)
    given = FORMATS.get(config.format)
    if config.format == "voc" and trained is None and not (root / "SegmentationClass").is_dir():
        raise UserError(
            f"data.format: no folder SegmentationClass in {root}, which has the masks of VOC; "
            "boxes in Annotations/*.xml are no masks"
        )
    if config.images is not None or config.masks is not None:
        if config.images is None or config.masks is None or given:
            raise UserError(
                "data.masks: give data.images and data.masks together, without data.format"
            )
        given = Layout.of(config.images, config.masks)
    table = None if config.class_table is None else os.path.basename(config.class_table)
    if trained is not None and given is not None:  # elsewhere, masks may lie as in any layout
        with contextlib.suppress(UserError):
            return find_layout(root, given, training=False, table=table)
        given = None
    return find_layout(root, given, training=trained is None, table=table)


def _refuse_values(config: SegmentationFolder) -> None:
    for name in ("classes", "class_table", "mask_values"):
        if getattr(config, name):
            raise UserError(
                f"data.{name}: {getattr(config, name)}, but the annotations name the classes; "
                "leave it out"
            )


def _below(root: Path, mask: Mask) -> Mask:
    return str(root / mask) if isinstance(mask, str) else mask


def _find_splits(
    found: FoundLayout, config: SegmentationFolder, *, test_only: bool
) -> tuple[list[Pair], list[Pair], list[str]]:
    root = found.root
    if not found.is_split:
        if config.test_split is not None:
            raise UserError(
                f"data.test_split: {root} is not split into folders, and data.test_fraction "
                "of its images is held out; move the training images into train/"
            )
        pairs = found.pairs()
        if test_only:
            return pairs[:1], pairs, []
        splits: tuple[list[Pair], list[Pair]] = [], []
        held_out = hold_out(config, (image for image, _ in pairs))
        for pair, is_test in zip(pairs, held_out, strict=True):
            splits[bool(is_test)].append(pair)
        return *splits, [describe_hold_out(config, held_out, f"{root} has no splits")]
    given = check_split(config, f"{root} has the splits {shorten(found.splits)}")
    test_split = found.test(config.test_split)
    if test_only:
        test = found.pairs(test_split)
        return test[:1], test, []
    train_split = found.train
    assert train_split is not None  # `find_layout` has looked for it
    notes = [*describe_splits(train_split, test_split, found.splits), *given]
    return found.pairs(train_split), found.pairs(test_split), notes


def _divide(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    first = mask_rules.spread(len(pairs), mask_rules.SAMPLED)
    others = np.setdiff1d(np.arange(len(pairs)), first)
    return [pairs[i] for i in first], [pairs[i] for i in others]


def _samples(
    root: Path, pairs: Sequence[Pair], config: SegmentationFolder
) -> Iterator[mask_rules.Sample]:
    """Read masks one at a time; skip unreadable ones, unless all are."""
    errors: list[str] = []
    for _, mask in pairs:
        path = _below(root, mask)
        source = path if isinstance(path, str) else path.source
        try:
            yield mask_rules.Sample.of(source, read_mask(path, config.max_pixels))
        except UnreadableError as error:  # counted in training, with images that are unreadable
            errors.append(f"{source}: {error}")
    if errors and len(errors) == len(pairs):
        raise UserError(f"data.path: none of {len(pairs):,} masks can be read, such as {errors[0]}")


def _check_sizes(
    root: Path, pairs: Sequence[Pair], config: SegmentationFolder, max_bad: float
) -> list[str]:
    """Raise `UserError` if too many masks have another size than their image.

    Returns a note about images that are turned otherwise than their masks.
    """
    differ, turned = [], 0
    for image, mask in pairs:
        try:
            width, height, turn = upright_size(str(root / image), config.max_pixels)
            mask_width, mask_height, mask_turn = mask_size(_below(root, mask), config.max_pixels)
        except UnreadableError:
            continue  # counted in training
        turned += turn != mask_turn
        if (width, height) != (mask_width, mask_height):
            text = f"{root / image} is {width} x {height}, its mask {mask_width} x {mask_height}"
            if turn >= 5 and (width, height) == (mask_height, mask_width):
                text += "; the image has an EXIF orientation, so its mask must be rotated too"
            differ.append(text)
    if len(differ) > max_bad:
        others = len(differ) - 1
        raise UserError(
            f"data.path: {differ[0]}"
            + (f"; {others} more of {len(pairs)} pairs differ" if others else "")
            + "; give each mask the size of its image"
        )
    if not turned:
        return []
    return [
        f"{turned} of {len(pairs)} images that were opened have another EXIF orientation than "
        "their masks; each is turned by its own"
    ]


def _class_weights(
    root: Path, pairs: Sequence[Pair], config: SegmentationFolder, label_map: LabelMap
) -> tuple[float, ...]:
    counts = []
    for i in mask_rules.spread(len(pairs), _WEIGHED):
        try:
            mask = read_mask(_below(root, pairs[i][1]), config.max_pixels)
            labels = label_map.labels(mask).ravel()
        except UnreadableError:
            continue
        counts.append(np.bincount(labels, minlength=IGNORE + 1)[: len(label_map.names)])
    return tuple(mask_rules.median_frequency_weights(np.array(counts)).tolist())
