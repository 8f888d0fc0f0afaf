"""Labels of mask files: said by a config and a class table, and checked on some of the files.

This module runs in the processes of `train.data.workers`, so it must not import JAX.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from train.data import label_map as readings
from train.data.class_table import VOID, Row
from train.data.columns import is_named
from train.data.decode import MaskValues, UnreadableError, pack_colors
from train.data.label_map import IGNORE, LabelMap, Pairs, Reading, color_text, ranges
from train.errors import UserError, shorten

SAMPLED = 64
"""Number of masks that are read before training to check them."""
_MAX_MASK_VALUES = 32
"""Most values that an error message proposes as classes."""


class _Config(Protocol):
    """What a `SegmentationFolder` says of masks. Its module would load pydantic in each worker."""

    @property
    def path(self) -> str: ...
    @property
    def classes(self) -> int | None: ...
    @property
    def mask_values(self) -> tuple[int, ...]: ...
    @property
    def mask_reading(self) -> Reading | None: ...
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
) -> LabelMap:
    """Return what the values of masks mean, as the config and a class table say.

    Values come from ``mask_values``, else from the table, else they are 0, 1, ... Rows that are
    called void, and what ``ignore`` names, do not count.

    Raises:
      UserError: if nothing says it, if the config and the table contradict each other, or if masks
        allow two readings.
    """
    count = len(config.mask_values) or config.classes
    if not rows and count is None:
        raise UserError(_explain_unknown_classes(samples, config))
    has_table, rows = bool(rows), _without_ignored(config, rows)
    rows = rows or tuple(Row(str(i)) for i in range(count or 0))
    classes = [row for row in rows if not row.is_void]
    if count is not None and len(classes) != count:
        field = "mask_values" if config.mask_values else "classes"
        raise UserError(
            f"data.{field}: {count}, but {source} has {len(classes)} classes; leave it out, or "
            "give another table"
        )
    if not 2 <= len(classes) <= IGNORE:
        raise UserError(
            f"data.class_table: {source} names {len(classes)} classes; expected 2 to {IGNORE}"
        )
    number = iter(range(len(classes)))
    labels = [IGNORE if row.is_void else next(number) for row in rows]
    colored = [(row.color, i) for row, i in zip(rows, labels, strict=True) if row.color is not None]
    if sum(label != IGNORE for _, label in colored) < len(classes):
        colored = []
    label_map = LabelMap(
        names=tuple(row.name for row in classes),
        values=tuple(sorted(_values(config, rows, labels, source, has_table=has_table).items())),
        codes=tuple(sorted((int(pack_colors(np.array(color))), i) for color, i in colored)),
        colors=tuple(color for color, label in colored if label != IGNORE),
        void=next((color for color, label in colored if label == IGNORE), VOID),
    )
    are_values = bool(config.mask_values) or all(row.value is not None for row in rows)
    return choose_reading(config.mask_reading, label_map, samples, are_values=are_values)


def _without_ignored(config: _Config, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows of a table; those that ``ignore`` names, by name or value, become void."""
    ignored = {*(config.ignore or ())}
    if unknown := {i for i in ignored if isinstance(i, str)} - {row.name for row in rows}:
        raise UserError(f"data.ignore: no class {shorten(sorted(unknown))} in the class table")
    return tuple(row._replace(name="void") if ignored & {*row[:2]} else row for row in rows)


def _values(
    config: _Config, rows: Sequence[Row], labels: Sequence[int], source: str, *, has_table: bool
) -> dict[int, int]:
    """Return the label of each value. Rows without a value count from 0."""
    ignored = [value for value in config.ignore or () if isinstance(value, int)]
    if config.mask_values:
        if any(row.value is not None for row in rows):
            raise UserError(
                f"data.mask_values: {source} has the values of classes; give one of them"
            )
        values = {value: label for label, value in enumerate(config.mask_values)}
        if len(values) < len(config.mask_values):
            raise UserError("data.mask_values: a value is there twice")
    else:
        free = (value for value in itertools.count() if has_table or value not in ignored)
        numbers = (next(free) if row.value is None else row.value for row in rows)
        values = dict(zip(numbers, labels, strict=True))
    for value in ignored:
        if (label := values.setdefault(value, IGNORE)) != IGNORE:
            name = [row.name for row in rows if not row.is_void][label]
            raise UserError(
                f"data.ignore: {value} is the value of class {name}; ignore {name} by its name, or "
                "give the table a column value"
            )
    return values


def choose_reading(
    given: Reading | None,
    label_map: LabelMap,
    samples: Sequence[Sample],
    *,
    are_values: bool = False,
) -> LabelMap:
    """Read masks as the config says, else by index or by color, whichever they allow.

    Palettes may differ if each class was given its value (``are_values``).

    Raises:
      UserError: if masks allow both with different labels, or differ in what they allow.
    """
    if given is not None:
        return replace(label_map, reading=given, palette=())
    maps = [replace(label_map, reading=reading, palette=()) for reading in readings.READINGS]
    has_colors = any(sample.mask.holds_colors for sample in samples)
    allowed: dict[Reading, str] = {}
    unclear = ""
    for path, _, mask in samples:
        index, color = (_try(labels, mask) for labels in maps)
        if index == color:
            continue
        if index and color:
            i = next(i for i, (a, b) in enumerate(zip(index, color, strict=True)) if a != b)
            unclear = unclear or (
                f"data.mask_reading: {path} allows two readings: {_describe_value(mask, i)} is "
                f"{_name(label_map, index[i])} by index and {_name(label_map, color[i])} by color; "
                "give --data.mask-reading index or --data.mask-reading color"
            )
        else:
            allowed.setdefault("color" if color else "index", path)
    if len(allowed) > 1:
        raise UserError(
            f"data.mask_reading: {allowed['index']} has class numbers, but {allowed['color']} has "
            "colors; save all masks alike"
        )
    if unclear:
        raise UserError(unclear)
    reading = next(iter(allowed), "color" if has_colors and label_map.codes else "index")
    palette = () if reading == "color" or are_values else _common_palette(label_map, samples)
    return replace(label_map, reading=reading, palette=palette)


def _common_palette(label_map: LabelMap, samples: Iterable[Sample]) -> Pairs:
    """Return the color of each index in the palettes of masks, which must be the same in all.

    An index that no mask holds has a color if all palettes agree.
    """
    held: dict[int, tuple[int, str]] = {}
    others: dict[int, set[int]] = {}
    ignored = {value for value, label in label_map.values if label == IGNORE}
    for path, _, mask in samples:
        for index, color in readings.held_colors(mask):
            other, earlier = held.setdefault(index, (color, path))
            if color != other and index not in ignored:
                raise UserError(
                    f"data.mask_reading: palette index {index} is {color_text(color)} in {path}, "
                    f"but {color_text(other)} in {earlier}; if indices count, give "
                    "--data.mask-reading index; if colors count, --data.mask-reading color and a "
                    "class table with lines name,r,g,b"
                )
        if mask.kind == "palette" and mask.palette is not None:
            for index, color in enumerate(mask.palette.tolist()):
                others.setdefault(index, set()).add(color)
    agreed = {index: colors.pop() for index, colors in others.items() if len(colors) == 1}
    palette = agreed | {index: color for index, (color, _) in held.items()}
    return tuple((index, color) for index, color in sorted(palette.items()) if color >= 0)


def _describe_value(mask: MaskValues, i: int) -> str:
    value = int(mask.values.ravel()[i])
    if mask.palette is None or mask.kind != "palette":
        return f"gray {value}"
    return f"palette index {value} of color {color_text(int(mask.palette[value]))}"


def _name(label_map: LabelMap, label: int) -> str:
    return "ignored" if label == IGNORE else label_map.names[label]


def translate(
    config: _Config, trained: LabelMap, rows: Sequence[Row], source: str, samples: Sequence[Sample]
) -> tuple[LabelMap, list[str]]:
    """Read other masks with the classes of a run, by name if they have a class table.

    Returns the map, and notes for the user.

    Raises:
      UserError: if the table names a class that the run does not have, or names other classes than
        the run without their values or colors.
    """
    names = [row.name for row in rows if not row.is_void]
    if not rows or not is_named(trained.names):
        note = f"the classes of the run have no names, so that {source} is not used"
        return _as_in_run(config, trained, samples), [note] if rows else []
    if unknown := [name for name in names if name not in trained.names]:
        raise UserError(
            f"data.path: {source} has the class {unknown[0]}, but the run has "
            f"{shorten(trained.names)}; give it the name of one of them, or void"
        )
    label_of = {i: trained.names.index(name) for i, name in enumerate(names)} | {IGNORE: IGNORE}
    if all(row.value is None and row.color is None for row in rows):
        known, own = dict(trained.values), iter(range(len(names)))
        labels = [IGNORE if row.is_void else label_of[next(own)] for row in rows]
        if any(known.get(value) != label for value, label in enumerate(labels)):
            raise UserError(
                f"data.path: {source} has names alone, and its rows do not count as the values of "
                "the run do; give it a first line name,value and a value for each class"
            )
        return _as_in_run(config, trained, samples), []
    ignored = tuple(value for value, label in trained.values if label == IGNORE)
    ignored = tuple(value for value in ignored if value not in {row.value for row in rows})
    options = config.replace(classes=None, mask_values=(), ignore=ignored or None)
    own_map = make_label_map(options, rows, source, samples)
    values = tuple((value, label_of[label]) for value, label in own_map.values)
    codes = tuple((color, label_of[label]) for color, label in own_map.codes)
    palette = () if dict(values) != dict(trained.values) else own_map.palette
    return replace(
        own_map,
        names=trained.names,
        values=values,
        codes=codes,
        colors=trained.colors,
        palette=palette,
    ), []


def _as_in_run(config: _Config, trained: LabelMap, samples: Sequence[Sample]) -> LabelMap:
    """Read masks as the run did, if they allow it; check that palettes have its colors."""
    given = config.mask_reading
    if given is None:
        as_then = replace(trained, palette=())
        if all(_try(as_then, sample.mask) is not None for sample in samples):
            given = trained.reading
    label_map = choose_reading(given, trained, samples)
    if label_map.reading == "color" or config.mask_reading is not None:
        return label_map
    known = dict(trained.palette)
    for index, color in (pair for sample in samples for pair in readings.held_colors(sample.mask)):
        if known.get(index, color) != color:
            raise UserError(
                f"data.mask_reading: palette index {index} is {color_text(color)}, but "
                f"{color_text(known[index])} in the masks of the run; if indices count, give "
                "--mask-reading index; else name the values of the classes in a classes.csv next "
                "to the masks, with a first line name,value"
            )
    return replace(label_map, palette=trained.palette)


def _try(label_map: LabelMap, mask: MaskValues) -> list[int] | None:
    try:
        labels: list[int] = label_map.labels(mask).ravel().tolist()
        return labels
    except UnreadableError:
        return None


def describe_labels(label_map: LabelMap, samples: Sequence[Sample], which: str) -> list[str]:
    """Return notes about some masks: the share of each label, classes without one, and losses.

    Masks with a value of no class are left out.
    """
    notes, held = [], Counter[int]()
    for _, counts, mask in samples:
        for value, label in zip(mask.values[0].tolist(), _try(label_map, mask) or (), strict=False):
            held[label] += counts[value]
    names = dict(enumerate(label_map.names)) | {IGNORE: "ignored"}
    if not is_named(label_map.names):
        values = enumerate(label_map.mask_values().tolist())
        names |= {i: f"{names[i]} (value {value})" for i, value in values if i != value}
    if held:
        shares = [
            f"{names[i]} {n / held.total():.1%}" for i, n in held.most_common() if i != IGNORE
        ]
        ignored = f", ignored {held[IGNORE] / held.total():.1%}" if held[IGNORE] else ""
        notes.append(
            f"{len(samples)} {which} masks were looked at, by {label_map.reading}: "
            f"{shorten(shares)}{ignored}"
        )
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

    Samples after the first `SAMPLED` are read only if these hold too few classes. ``table`` is the
    class table of the map, or ""; None for a network that is trained.

    Raises:
      UserError: if more than ``max_bad`` masks have a value without a label, or all pixels are
        ignored, or all training pixels are of one class.
    """
    bad, need = 0, 2 if which == "training" else 1
    found: set[int] = set()
    looked_at: list[Sample] = []
    for i, sample in enumerate(samples):
        if i >= SAMPLED and len(found) >= need:
            break
        looked_at.append(sample)
        try:
            found |= {*label_map.labels(sample.mask).ravel().tolist()} - {IGNORE}
        except UnreadableError as error:
            bad += 1
            if bad > max_bad:
                looked_at += itertools.islice(samples, SAMPLED)
                raise UserError(_explain_bad(label_map, sample, error, looked_at, table)) from None
    if len(found) >= need or not num_masks:
        return bad
    if not found:
        held = {value for sample in looked_at for value in sample.counts}
        raise UserError(
            f"data.ignore: all pixels of the {num_masks:,} {which} masks are ignored; they hold "
            f"{ranges(held)}"
        )
    raise UserError(
        f"data.path: the {num_masks:,} {which} masks hold only the class "
        f"{label_map.names[found.pop()]}, so that there is nothing to learn"
    )


def _explain_unknown_classes(samples: Sequence[Sample], config: _Config) -> str:
    colors = {color for s in samples if s.mask.holds_colors for color in s.counts}
    values = {value for s in samples if not s.mask.holds_colors for value in s.counts}
    texts = shorten([color_text(color) for color in sorted(colors)])
    held = f"the masks hold {len(colors)} colors: {texts}" if colors else "no mask can be read"
    if values and not colors:
        kinds = {sample.mask.kind for sample in samples}
        held = f"the masks hold {'palette indices ' * (kinds == {'palette'})}{ranges(values)}"
    if any(sample.mask.is_lossy for sample in samples):
        lossy = "masks are compressed with loss, which changes values"
        return f"data.path: {lossy}: {held}; {readings.PNG}"
    if colors:
        return (
            f"data.class_table: {held}; name the class of each color in {config.path}/classes.csv, "
            "one line name,r,g,b for each"
        )
    if whites := _two_whites(samples):
        return whites
    options = _options(values - {*(config.ignore or ())})
    return (
        "data.classes: give the number of classes, 2 to 255, or name them in data.class_table or "
        f"in classes.csv in {config.path}; {held}{f', as with {options}' if options else ''}"
    )


def _two_whites(samples: Sequence[Sample]) -> str:
    """Say that some masks hold 0 and 1, and others 0 and 255; "" if they do not."""
    numbers = [s for s in samples if s.mask.kind != "bits" and not s.mask.holds_colors]
    ones = [s for s in numbers if 1 in s.counts]
    whites = [s for s in numbers if 255 in s.counts]
    are_two = all({*s.counts} in ({0}, {1}, {0, 1}, {0, 255}, {255}) for s in numbers)
    if not (are_two and ones and whites):
        return ""
    return (
        f"data.path: {whites[0].path} holds 255, but {ones[0].path} holds 1; save all alike first"
    )


def _options(values: Iterable[int]) -> str:
    values = sorted(values)
    options = []
    if len(values) > 2 and values[-1] == 255 and values[-2] < 254:
        options.append(f"--data.classes {values[-2] + 1} --data.ignore 255")
    if len(values) > 1 and values == [*range(len(values))]:
        options.append(f"--data.classes {len(values)}")
    elif 2 <= len(values) <= _MAX_MASK_VALUES:
        options.append(f"--data.mask-values {' '.join(map(str, values))}")
    return ", or ".join(options)


def _explain_bad(
    label_map: LabelMap,
    sample: Sample,
    error: UnreadableError,
    samples: Sequence[Sample],
    table: str | None,
) -> str:
    message = f"data.path: {sample.path}: {error}"
    is_color = label_map.reading == "color" or sample.mask.holds_colors
    known, total = dict(label_map.values), sum(sample.counts.values())
    unknown = sorted(value for value in sample.counts if value not in known)
    if sample.mask.is_lossy or (not is_color and not unknown):
        return message
    if table is None:
        what = "name,r,g,b" if is_color else "name,value"
        return f"{message}; name its class in a classes.csv next to the masks, first line {what}"
    if is_color:
        where = table or "classes.csv in the folder of the data"
        return f"{message}; name it in {where}, one line name,r,g,b for each class"
    if whites := _two_whites(samples):
        return whites
    shares = shorten([f"{value} ({sample.counts[value] / total:.1%})" for value in unknown])
    ignored = sorted(value for value, label in label_map.values if label == IGNORE)
    held = {value for s in samples for value in s.counts if known.get(value) != IGNORE}
    options = _options(held)
    classes = sum(label != IGNORE for _, label in label_map.values)
    if sorted(held) == [*range(1, classes + 1)]:
        return f"{message}; the masks count classes from 1; give {options}"
    other = f"add their classes to {table}" if table else options
    if not (table or options):
        other = "other --data.classes or --data.mask-values"
    bits = "; a black and white file holds 0 and 1" if sample.mask.kind == "bits" else ""
    return (
        f"{message}; pixels of this mask without a class: {shares}; give --data.ignore "
        f"{' '.join(map(str, (*ignored, *unknown[:5])))} to ignore them, or {other}{bits}"
    )


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
