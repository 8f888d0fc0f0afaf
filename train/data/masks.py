"""Labels of mask files: decided from a config, a class table and some of the files.

This module runs in the processes of `train.data.workers`, so it must not import JAX.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from train.data.class_table import VOID, Row
from train.data.columns import is_named
from train.data.decode import MaskValues, UnreadableError, pack_colors
from train.data.label_map import (
    IGNORE,
    INVALID,
    KINDS,
    PNG,
    LabelMap,
    Reading,
    color_text,
    colors_of,
    ranges,
)
from train.errors import UserError, shorten

_MAX_MASK_VALUES = 32
"""Most values that an error message proposes as classes."""
_BINARY = ("background", "foreground")


class _Config(Protocol):
    """What a `SegmentationFolder` says of masks. Its module would load pydantic in each worker."""

    @property
    def path(self) -> str: ...
    @property
    def classes(self) -> int | None: ...
    @property
    def mask_values(self) -> tuple[int, ...]: ...
    @property
    def ignore(self) -> tuple[int | str, ...] | None: ...
    def replace(self, **changes: Any) -> Self: ...


class Sample(NamedTuple):
    """Values of a mask.

    Attributes:
      path: The file.
      counts: Pixels by value: gray values, palette indices, or colors as 0xRRGGBB.
      mask: The values, each once, as `decode_mask` returns a mask.
    """

    path: str
    counts: Counter[int]
    mask: MaskValues

    @classmethod
    def of(cls, path: str, mask: MaskValues) -> Self:
        """Count the values of a mask, in only some rows and columns of a large one."""
        stride = max(math.ceil(math.sqrt(mask.values.size / 2**18)), 1)
        values, counts = np.unique(mask.values[::stride, ::stride], return_counts=True)
        counter = Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        return cls(path, counter, mask._replace(values=values[None]))


def make_label_map(
    config: _Config, rows: Sequence[Row], source: str, samples: Sequence[Sample]
) -> tuple[LabelMap, list[str]]:
    """Decide what the values of masks mean, from the config, a class table and some masks.

    The values come from ``mask_values``, else from the table, else they are 0, 1, ... without the
    ignored ones. The config and the table name ignored values. By default, 255 is ignored, unless
    it is the value of a class. Masks of 0 and 255 alone are binary if there are two classes or an
    unknown number. Returns the map, and notes for the user.
    """
    ignored_values, rows = _ignored(config, rows)
    _refuse_contradictions(config, rows, source, ignored_values)
    num_given = len(config.mask_values) or config.classes
    classes_of = _table_values(rows or (Row(""),) * (num_given or 0), ignored_values)
    numbers = {value for value, label in classes_of.items() if label != IGNORE}
    gray_palettes, notes = _have_grays(samples, {*config.mask_values} or numbers)
    samples = [*map(_as_gray, samples)] if gray_palettes else samples
    gray = _count_numbers(samples)
    if not rows and num_given is None:
        names = _guess_binary(gray, samples)
        if names is None:
            raise UserError(_explain_unknown_classes(gray, samples, ignored_values, config.path))
        rows = tuple(Row(name) for name in names)
    is_numbered = not rows
    rows = rows or tuple(Row(str(i)) for i in range(num_given or 0))
    classes = [row for row in rows if not row.is_void]
    if num_given is not None and len(classes) != num_given:
        field = "mask_values" if config.mask_values else "classes"
        raise UserError(
            f"data.{field}: {num_given}, but {source} has {len(classes)} classes; leave it "
            "out, or give another table"
        )
    if not 2 <= len(classes) <= IGNORE:
        raise UserError(
            f"data.class_table: {source} names {len(classes)} classes; expected 2 to {IGNORE}"
        )

    number = iter(range(len(classes)))
    labels = [IGNORE if row.is_void else next(number) for row in rows]
    codes = {
        int(pack_colors(np.array(row.color))): label
        for row, label in zip(rows, labels, strict=True)
        if row.color is not None
    }
    colors = tuple(row.color for row in classes if row.color is not None)
    voids = [row.color for row in rows if row.is_void and row.color is not None]
    if len(colors) < len(classes):
        codes, colors, voids = {}, (), []
    is_binary = (
        len(classes) == 2
        and not config.mask_values
        and config.ignore is None
        and all(row.value is None for row in rows)
        and {*gray} == {0, 255}
        and not {0, 0xFFFFFF} <= codes.keys()
    )
    if is_binary:
        values = {0: 0, 255: 1}
        notes.append(
            f"masks hold 0 and 255 only: 0 is {classes[0].name}, 255 is {classes[1].name} "
            "(data.ignore 255 would ignore it)"
        )
    else:
        values = _values(config, rows, ignored_values)
        others = [f"{i} is the value {v}" for v, i in values.items() if i not in (v, IGNORE)]
        if is_numbered and others:
            notes.append(f"classes are called by their numbers: {shorten(others)}")

    label_map = LabelMap(
        names=tuple(row.name for row in classes),
        values=tuple(sorted(values.items())),
        codes=tuple(sorted(codes.items())),
        colors=colors,
        void=next(iter(voids), VOID),
        gray_palettes=gray_palettes,
    )
    has_values = bool(config.mask_values) or all(row.value is not None for row in rows)
    label_map, more = choose_readings(config, label_map, samples, has_values=has_values)
    if config.ignore is None and all(row.value is None for row in rows):
        _refuse_two_whites(label_map, samples, is_trained=False)
    compared = [] if has_values and not codes else samples
    shown = tuple(sorted(_palette_colors(label_map, compared).items()))
    return replace(label_map, shown=shown), notes + more


def _refuse_contradictions(
    config: _Config, rows: Sequence[Row], source: str, ignored: set[int] | None
) -> None:
    if config.mask_values and any(row.value is not None for row in rows):
        raise UserError(f"data.mask_values: {source} has the values of classes; give one of them")
    for value in _row_numbers(rows) & (ignored or set()):
        if not rows[value].is_void:
            name = rows[value].name
            raise UserError(
                f"data.ignore: {value} may also be {name}, because the rows of {source} count from "
                f"0; give the table a column value, or ignore {name} by its name"
            )


def _values(config: _Config, rows: Sequence[Row], ignored: set[int] | None) -> dict[int, int]:
    """Return the label of each value, from the config or the rows of a table."""
    values = _table_values(rows, ignored)
    if config.mask_values:
        values = {value: label for label, value in enumerate(config.mask_values)}
        if len(values) < len(config.mask_values):
            raise UserError("data.mask_values: a value is there twice")
    for value in {255} if ignored is None else ignored:
        if ignored is not None and values.get(value, IGNORE) != IGNORE:
            name = [row.name for row in rows if not row.is_void][values[value]]
            raise UserError(f"data.ignore: {value} is the value of class {name}; give another")
        values.setdefault(value, IGNORE)
    return values


def _have_grays(samples: Sequence[Sample], classes: Collection[int]) -> tuple[bool, list[str]]:
    """Return whether the grays of palettes are the values of masks, and a note if that matters.

    They are if all palettes are of grays, and if an index has several, or is no class: files of few
    colors, such as GIF, renumber gray values.
    """
    masks = [sample.mask for sample in samples if sample.mask.kind == "palette"]
    pairs: set[tuple[int, int]] = set()
    for mask in masks:
        if (gray := mask.as_gray()) is None:
            return False, []
        pairs |= {*zip(mask.values[0].tolist(), gray.values[0].tolist(), strict=True)}
    if all(index == gray for index, gray in pairs):
        return bool(masks), []
    indices, held = {index for index, _ in pairs}, {gray for _, gray in pairs}
    if len(indices) == len(pairs) and (not classes or indices <= {*classes}):
        note = "the palettes of masks are of grays; indices count as values, not the grays"
        return False, [note] if held <= {*classes} else []
    return True, ["the palettes of masks are of grays, which count as values, not their indices"]


def _as_gray(sample: Sample) -> Sample:
    """Return a mask with the grays of its palette as values, if it has a palette of grays."""
    gray = sample.mask.as_gray() if sample.mask.kind == "palette" else None
    if gray is None:
        return sample
    new, old = gray.values[0].tolist(), sample.mask.values[0].tolist()
    counts = Counter({n: sample.counts[o] for o, n in zip(old, new, strict=True)})
    return Sample(sample.path, counts, gray)


def _count_numbers(samples: Sequence[Sample]) -> Counter[int]:
    """Count values that are no colors. White of a black and white image is 1, or 255 as others."""
    numbers = [s for s in samples if not s.mask.holds_colors]
    counts: Counter[int] = sum((s.counts for s in numbers if s.mask.kind != "bits"), Counter())
    bits: Counter[int] = sum((s.counts for s in numbers if s.mask.kind == "bits"), Counter())
    white = 255 if 255 in counts and 1 not in counts else 1
    return counts + Counter({0: bits[0], white: bits[1]})


def _refuse_two_whites(label_map: LabelMap, samples: Sequence[Sample], *, is_trained: bool) -> None:
    """Refuse masks that may mean 1 by 255, which is ignored.

    They hold no 1, but other masks do, or the masks of the run did. No mask holds both.
    """
    if label_map.values != ((0, 0), (1, 1), (IGNORE, IGNORE)):
        return
    numbers = [s for s in samples if s.mask.kind != "bits" and not label_map.reads_color(s.mask)]
    whites = [s.path for s in numbers if 255 in s.counts and 1 not in s.counts]
    ones = [s.path for s in numbers if 1 in s.counts]
    is_both = any(255 in s.counts and 1 in s.counts for s in numbers)
    if not whites or is_both or not (ones or is_trained):
        return
    where = "the masks of the run hold 1 there" if is_trained else f"{ones[0]} holds 1 there"
    remedy = (
        "name both values in a classes.csv next to the masks, with a first line name,value"
        if is_trained
        else "save all alike, or give data.ignore 255 if such pixels do not count"
    )
    raise UserError(f"data.path: {whites[0]} holds 0 and 255, but {where}; {remedy}")


def _palette_colors(label_map: LabelMap, samples: Iterable[Sample]) -> dict[int, int]:
    """Return the color of each label in palettes that are read by their values.

    Raises:
      UserError: if a label has several.
    """
    found: dict[int, tuple[int, str]] = {}
    for path, _, mask in samples:
        for index, label, color in label_map.palette_colors(mask):
            if label == IGNORE or color < 0:
                continue
            other, earlier = found.setdefault(label, (color, path))
            if color != other:
                raise UserError(
                    f"data.class_table: the palette index {index} is the color "
                    f"{color_text(color)} in {path}, but {color_text(other)} in {earlier}; name "
                    "the class of each color in classes.csv in the folder of the data, or save "
                    "masks as gray PNG"
                )
    return {label: color for label, (color, _) in found.items()}


def _ignored(config: _Config, rows: Sequence[Row]) -> tuple[set[int] | None, tuple[Row, ...]]:
    """Return the ignored values, and the rows; rows of ignored names become void."""
    if config.ignore is None:
        return None, tuple(rows)
    names = {name for name in config.ignore if isinstance(name, str)}
    if unknown := names - {row.name for row in rows}:
        raise UserError(f"data.ignore: no class {shorten(sorted(unknown))} in the class table")
    values = {value for value in config.ignore if isinstance(value, int)}
    kept = (row for row in rows if row.value is None or row.value not in values)
    return values, tuple(row._replace(name="void") if row.name in names else row for row in kept)


def _row_numbers(rows: Sequence[Row]) -> set[int]:
    return {number for number, row in enumerate(rows) if row.value is None}


def _table_values(rows: Sequence[Row], ignored: set[int] | None) -> dict[int, int]:
    """Return the label of each value. Rows without a value are counted from 0."""
    free = (value for value in range(2**16) if value not in (ignored or ()))
    values: dict[int, int] = {}
    label = 0
    for row in rows:
        value = next(free) if row.value is None else row.value
        values[value] = IGNORE if row.is_void else label
        label += not row.is_void
    return values


def _guess_binary(gray: Counter[int], samples: Sequence[Sample]) -> tuple[str, ...] | None:
    """Return the names of two classes if masks hold two values as binary masks do."""
    is_gray = not any(sample.mask.holds_colors for sample in samples)
    return _BINARY if is_gray and {*gray} in ({0, 1}, {0, 255}) else None


def choose_readings(
    config: _Config,
    label_map: LabelMap,
    samples: Sequence[Sample],
    *,
    has_values: bool,
) -> tuple[LabelMap, list[str]]:
    """Decide whether masks that are no color images are read by value or by color.

    For each kind of file, what more of them allow counts. If both are possible, they are read by
    color, but gray images whose values are all classes, or are given as options, are read by value.
    Returns notes where that matters. If the class table has values, gray masks have these.
    """
    if not label_map.codes:
        return label_map, []
    given = bool(config.mask_values) or config.ignore is not None
    chosen: dict[str, Reading] = {}
    notes, is_colored, decided = [], False, [*label_map.decided]
    for name, what in _NAMES.items():
        masks = [s.mask for s in samples if s.mask.kind in KINDS[name]]
        readings = [_both_readings(label_map, mask) for mask in masks]
        alone = [(INVALID not in v) - (INVALID not in c) for v, c in readings]
        votes = sum(alone)
        labels = {
            i for m, (v, _) in zip(masks, readings, strict=True) if m.kind == "gray" for i in v
        }
        are_classes = bool(labels) and not labels & {IGNORE, INVALID}
        prefers_values = name == "grays" and (given or (are_classes and not is_colored))
        chosen[name] = "indices" if votes > 0 or (votes == 0 and prefers_values) else "colors"
        if name in label_map.decided and all(
            INVALID not in (v if getattr(label_map, name) == "indices" else c) for v, c in readings
        ):
            chosen[name] = getattr(label_map, name)
        elif masks:
            decided.append(name)
        is_colored |= bool(masks) and chosen[name] == "colors"
        # Some masks speak for the other reading; a color is rather a class than an ignored value.
        is_open = votes == 0 or (1 if chosen[name] == "colors" else -1) in alone
        is_open |= any(IGNORE in v and not {IGNORE, INVALID} & {*c} for v, c in readings)
        if is_open and any(v != c and INVALID not in v + c for v, c in readings):
            by, other = ("values", "colors") if chosen[name] == "indices" else ("colors", "values")
            notes.append(f"{what} are read by their {by}; by their {other}, classes would differ")
        if name == "palettes" and chosen[name] == "colors" and not has_values:
            label_map, more = _with_indices(config, label_map, samples)
            notes += more
    label_map = replace(
        label_map,
        palettes=chosen["palettes"],
        rgbs=chosen["rgbs"],
        grays=chosen["grays"],
        decided=tuple(dict.fromkeys(decided)),
    )
    return label_map, notes


def _with_indices(
    config: _Config, label_map: LabelMap, samples: Sequence[Sample]
) -> tuple[LabelMap, list[str]]:
    """Let gray masks have the indices of palettes that are read by color.

    Only if no values are given, every class has one, and an index has the same color in all files.
    """
    masks = [sample.mask for sample in samples if sample.mask.kind == "palette"]
    if config.mask_values or any(isinstance(value, int) for value in config.ignore or ()):
        return label_map, []
    codes, values, own = dict(label_map.codes), dict(label_map.values), dict[int, int]()
    for mask in masks:
        assert mask.palette is not None
        held = {*mask.values[0].tolist()}
        for index, color in enumerate(mask.palette.tolist()):
            label = codes.get(color, IGNORE)
            if index not in held and (color not in codes or label in own.values()):
                continue  # of no class, or a filler
            if own.setdefault(index, label) != label:
                return label_map, []
    if not {*range(len(label_map.names))} <= {*own.values()}:
        return label_map, []
    if values.get(255) == IGNORE:
        own.setdefault(255, IGNORE)
    grays = {v for s in samples if s.mask.kind == "gray" for v in s.mask.values[0].tolist()}
    differ = any(own.get(value) != values.get(value) for value in grays)
    note = "gray masks have the indices of the palettes; by the rows of the table, classes differ"
    return replace(label_map, indices=tuple(own.items())), [note] if differ else []


_NAMES = {"palettes": "palette masks", "rgbs": "RGB masks of grays", "grays": "gray masks"}


def _both_readings(label_map: LabelMap, mask: MaskValues) -> tuple[list[int], list[int]]:
    """Return the labels of a mask's values by value and by color; -1 for none."""
    values, codes = dict(label_map.values_of(mask)), dict(label_map.codes)
    numbers = [INVALID] if mask.holds_colors else label_map.numbers(mask).ravel().tolist()
    has_colors = mask.holds_colors or max(numbers) < 256
    colors = colors_of(mask).ravel().tolist() if has_colors else [INVALID]
    return [values.get(i, INVALID) for i in numbers], [codes.get(c, INVALID) for c in colors]


def translate(
    config: _Config,
    trained: LabelMap,
    rows: Sequence[Row],
    source: str,
    samples: Sequence[Sample],
) -> tuple[LabelMap, list[str]]:
    """Read other masks with the classes of a run, by name if they have a class table.

    Args:
      config: options of the run.
      trained: the map of the run.
      rows: class table of the other masks; () without one.
      source: where that comes from.
      samples: some of the masks.

    Raises:
      UserError: if the table names a class that the run does not have.
    """
    numbers = {value for value, label in trained.values if label != IGNORE}
    gray_palettes, notes = _have_grays(samples, numbers)
    label_map = replace(trained, gray_palettes=gray_palettes)
    viewed = [*map(_as_gray, samples)] if gray_palettes else samples
    has_values = "palettes" in trained.decided and not trained.indices
    label_map, more = choose_readings(config, label_map, viewed, has_values=has_values)
    notes += more
    if rows and not is_named(trained.names):
        notes.append(f"the classes of the run have no names, so that {source} is not used")
    elif rows:
        named = {row.name for row in rows}
        classes = {row.value for row in rows if not row.is_void} | _row_numbers(rows)
        if config.ignore is not None:  # as far as it is not about other values or names
            kept = (i in named if isinstance(i, str) else i not in classes for i in config.ignore)
            config = config.replace(ignore=(*itertools.compress(config.ignore, kept),) or None)
        num_classes = sum(not row.is_void for row in rows)
        if len(config.mask_values) != num_classes or len(_row_numbers(rows)) < len(rows):
            config = config.replace(mask_values=())
        names = [row.name for row in _ignored(config, rows)[1] if not row.is_void]
        if unknown := [name for name in names if name not in trained.names]:
            raise UserError(
                f"data.path: {source} has the class {unknown[0]}, but the run has "
                f"{shorten(trained.names)}; give it the name of one of them, or void"
            )
        own, more = make_label_map(config.replace(classes=None), rows, source, samples)
        label_of = {i: trained.names.index(name) for i, name in enumerate(names)} | {IGNORE: IGNORE}
        own = replace(
            own,
            names=trained.names,
            values=tuple((value, label_of[label]) for value, label in own.values),
            codes=tuple((color, label_of[label]) for color, label in own.codes),
            indices=tuple((index, label_of[label]) for index, label in own.indices),
            colors=trained.colors,
            void=trained.void,
            shown=tuple((label_of[label], color) for label, color in own.shown),
        )
        read, read_by_run = ([_try(m, s.mask) for s in samples] for m in (own, label_map))
        # A table of names alone may come with masks that have the values of the run.
        has_names_alone = all(row.value is None and row.color is None for row in rows)
        held = {label for labels in read_by_run for label in labels or (INVALID,)}
        if {*own.values} == {*trained.values} and {*own.codes} == {*trained.codes}:
            pass
        elif has_names_alone and None in read and held <= {*label_of.values()}:
            notes.append(f"the masks have the values of the run, and not the rows of {source}")
        else:
            known = dict(trained.values)
            is_new = any(known.get(value, label) != label for value, label in own.values)
            differs = f"{source} gives the values, and its names stand for the classes of the run"
            notes = [*more, differs] if is_new or read != read_by_run else more
            label_map = own
            viewed = [*map(_as_gray, samples)] if own.gray_palettes else samples
    if all(row.value is None for row in rows):
        label_map = replace(label_map, shown=trained.shown)
        if config.ignore is None:
            _refuse_two_whites(label_map, viewed, is_trained=True)
        shown = [*_palette_colors(label_map, viewed).items()]
        notes += compare_palettes(label_map, shown, "the masks of the run")
    return label_map, notes


def _try(label_map: LabelMap, mask: MaskValues) -> list[int] | None:
    """Return the labels of a mask's values; None if one is of no class."""
    try:
        labels: list[int] = label_map.labels(mask).ravel().tolist()
        return labels
    except UnreadableError:
        return None


def compare_palettes(
    label_map: LabelMap, shown: Sequence[tuple[int, int]], where: str
) -> list[str]:
    """Compare the colors of palettes that are read by their values with the palettes of a run.

    Args:
      label_map: the map of the run.
      shown: pairs of a label and its color in other masks.
      where: text for the palettes of the run.

    Raises:
      UserError: if a class has the color that another class has in the run.
    """
    of_run = dict(label_map.shown)
    names = []
    for label, color in shown:
        other = label_map.owner_of(label, color)
        if other != label:
            raise UserError(
                f"data.path: {label_map.names[label]} has the palette color {color_text(color)}, "
                f"which {label_map.names[other]} has in {where}; name the values of the classes in "
                "a classes.csv next to the masks, with a first line name,value"
            )
        if of_run.get(label, color) != color:
            names.append(label_map.names[label])
    if not names:
        return []
    return [f"palette masks have other colors than in {where} for {shorten(names)}; values count"]


def describe_labels(label_map: LabelMap, samples: Sequence[Sample], which: str) -> list[str]:
    """Return notes about some masks: the share of each label, classes without one, and losses.

    Masks with a value of no class are left out.
    """
    notes, held = [], Counter[int]()
    for _, counts, mask in samples:
        for value, label in zip(mask.values[0].tolist(), _try(label_map, mask) or (), strict=False):
            held[label] += counts[value]
    names = dict(enumerate(label_map.names)) | {IGNORE: "ignored"}
    if held:
        shares = [
            f"{names[i]} {n / held.total():.1%}" for i, n in held.most_common() if i != IGNORE
        ]
        ignored = f", ignored {held[IGNORE] / held.total():.1%}" if held[IGNORE] else ""
        notes.append(f"{len(samples)} {which} masks were looked at: {shorten(shares)}{ignored}")
    absent = [name for label, name in names.items() if label != IGNORE and label not in held]
    if absent and which == "training":
        notes.append(f"no pixel of {shorten(absent)} in the {which} masks that were looked at")
    if lossy := [sample.path for sample in samples if sample.mask.is_lossy]:
        notes.append(
            f"{which} masks are compressed with loss, which changes values: {shorten(lossy, 3)}"
        )
    return notes


def check_masks(
    label_map: LabelMap,
    samples: Iterable[Sample],
    num_masks: int,
    max_bad: float,
    which: str,
    table: str | None = "",
) -> int:
    """Check that masks have labels, before anything is compiled.

    Args:
      label_map: the map.
      samples: values of masks, read one at a time. Later ones are read only if the first ones
        hold too few classes.
      num_masks: number of masks.
      max_bad: largest number of masks without labels to tolerate.
      which: "training" or "test".
      table: class table of the map, or ""; None for a network that is trained.

    Raises:
      UserError: if too many masks have a value without a label, or all pixels are ignored, or all
        training pixels are of one class.
    """
    bad = 0
    found: set[int] = set()
    held: Counter[int] = Counter()
    need = 2 if which == "training" else 1
    samples = map(_as_gray, samples) if label_map.gray_palettes else samples
    for i, sample in enumerate(samples):
        if i >= SAMPLED and len(found) >= need:
            break
        held += sample.counts
        try:
            labels = label_map.labels(sample.mask)
        except UnreadableError as error:
            bad += 1
            if bad > max_bad:
                for later in itertools.islice(samples, SAMPLED):
                    held += later.counts
                raise UserError(_explain_bad(label_map, sample, error, held, table)) from None
            continue
        found |= {*labels.ravel().tolist()} - {IGNORE}
    if len(found) >= need or not num_masks:
        return bad
    hint = ""
    if 255 in held and dict(label_map.values).get(255) == IGNORE and table is not None:
        hint = "; if 255 is a class, give data.mask_values, such as 0 255"
    if not found:
        raise UserError(
            f"data.ignore: all pixels of the {num_masks:,} {which} masks are ignored; they hold "
            f"{ranges(sorted(held))}{hint}"
        )
    raise UserError(
        f"data.path: the {num_masks:,} {which} masks hold only the class "
        f"{label_map.names[found.pop()]}, so that there is nothing to learn{hint}"
    )


SAMPLED = 64
"""Number of masks that are read before training to check them."""


def _explain_unknown_classes(
    gray: Counter[int], samples: Sequence[Sample], ignored: set[int] | None, path: str
) -> str:
    held = _held(gray, samples)
    if any(sample.mask.is_lossy for sample in samples):
        return f"data.path: masks are compressed with loss, which changes values: {held}; {PNG}"
    if any(sample.mask.holds_colors for sample in samples):
        return (
            f"data.class_table: {held}; name the class of each color in {path}/classes.csv, "
            "one line name,r,g,b for each"
        )
    options = _options([value for value in gray if value not in (ignored or {IGNORE})])
    return (
        "data.classes: give the number of classes, 2 to 255, or name them in data.class_table or "
        f"in classes.txt in {path}; {held}{f', as with {options}' if options else ''}"
    )


def _options(values: Iterable[int]) -> str:
    """Return the option that makes each value a class, or ``""`` if there are too many or few."""
    values = sorted(values)
    if not 2 <= len(values) <= _MAX_MASK_VALUES:
        return ""
    if values == list(range(len(values))):
        return f"--data.classes {len(values)}"
    return f"--data.mask-values {' '.join(map(str, values))}"


def _explain_bad(
    label_map: LabelMap,
    sample: Sample,
    error: UnreadableError,
    held: Counter[int],
    table: str | None,
) -> str:
    message = f"data.path: {sample.path}: {error}"
    if sample.mask.is_lossy:
        return message
    if table is None:
        what = "name,r,g,b" if label_map.reads_color(sample.mask) else "name,value"
        return f"{message}; name its class in a classes.csv next to the masks, first line {what}"
    if label_map.reads_color(sample.mask):
        if not label_map.codes:
            colors = shorten([color_text(color) for color in sorted(sample.counts)])
            lacks = f", but {table} has none" if table else ""
            where = table or "classes.csv in the folder of the data"
            return (
                f"data.class_table: {sample.path}: the mask holds colors{lacks}: {colors}; name "
                f"the class of each color in {where}, one line name,r,g,b for each"
            )
        return f"{message}; {table or 'data.class_table'} has the colors of the classes"
    known, total = dict(label_map.values), sum(sample.counts.values())
    unknown = sorted(value for value in sample.counts if value not in known)
    shares = shorten([f"{value} ({sample.counts[value] / total:.1%})" for value in unknown])
    ignore = f"give --data.ignore {' '.join(map(str, unknown[:5]))} to ignore them"
    options = _options(value for value in held if known.get(value) != IGNORE)
    if table:
        other = f"or add their classes to {table}"
        if unknown == [len(label_map.names)] and 0 in held:
            other += ", or put void first if its rows count from 1"
    elif options:
        other = f"or {options} to make every value a class"
    else:
        other = "or other --data.classes or --data.mask-values"
    return f"{message}; pixels of this mask without a class: {shares}; {ignore}, {other}"


def _held(gray: Counter[int], samples: Sequence[Sample]) -> str:
    colors = {color for s in samples if s.mask.holds_colors for color in s.counts}
    if colors:
        texts = [color_text(color) for color in sorted(colors)]
        return f"the masks hold {len(colors)} colors: {shorten(texts)}"
    kind = "palette indices " if any(s.mask.kind == "palette" for s in samples) else ""
    return f"the masks hold {kind}{ranges(sorted(gray))}" if gray else "no mask can be read"


def spread(n: int, most: int) -> np.ndarray:
    """Return up to ``most`` of the indices 0 to n - 1, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(most, n)).round().astype(int)) if n else np.arange(0)


def median_frequency_weights(counts: np.ndarray) -> np.ndarray:
    """Compute a weight per class that is larger for rare classes.

    The frequency of a class is its share of the labeled pixels of the images that show it. Its
    weight is the median of all frequencies divided by its own.

    Args:
      counts: pixels [N, classes] of each class in each mask.

    Returns:
      float32 [classes]; 1 for a class that is in no mask.

    References:
      Eigen and Fergus 2015, "Predicting Depth, Surface Normals and Semantic Labels with a Common
      Multi-Scale Convolutional Architecture", section 6.3.2.
    """
    counts = counts.astype(np.float64)
    shown_in = np.where(counts > 0, counts.sum(1, keepdims=True), 0).sum(0)
    frequency = counts.sum(0) / np.maximum(shown_in, 1)
    median = np.median(frequency[frequency > 0]) if frequency.any() else 1.0
    weights = np.divide(median, frequency, out=np.ones_like(frequency), where=frequency > 0)
    return weights.astype(np.float32)
