"""What the values of masks mean, decided from a config, a class table and some masks."""

import contextlib
import io
from collections import Counter

import chex
import numpy as np
import pytest
from PIL import Image

from train.data.class_table import PUBLISHED, Row, find_table, read_table
from train.data.decode import MaskValues, UnreadableError, decode_mask, pack_colors
from train.data.label_map import LabelMap
from train.data.masks import (
    Sample,
    check_masks,
    make_label_map,
    median_frequency_weights,
    spread,
    translate,
)
from train.data.segmentation_folder import SegmentationFolder
from train.errors import UserError
from train.output.palette import distinct_colors, palette

RED, GREEN, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 0)
COLORED = (Row("red", None, RED), Row("green", None, GREEN), Row("void", None, BLACK))


def gray(*values):
    return MaskValues(np.array([values], np.int32), "gray")


def rgb(*values, mode="RGB"):
    file = io.BytesIO()
    Image.fromarray(np.array([values], np.uint8)).convert(mode).save(file, "PNG")
    return decode_mask(file.getvalue())


def colored(*colors):
    return MaskValues(pack_colors(np.array([colors])), "rgb")


def indexed(*indices, colors):
    palette = np.full(256, -1, np.int32)
    palette[: len(colors)] = pack_colors(np.array(colors))
    return MaskValues(np.array([indices], np.int32), "palette", palette)


def decide(*masks, rows=(), source="classes.txt", **options):
    """Return the label map of some masks, and the notes."""
    samples = [Sample.of(f"{i}.png", mask) for i, mask in enumerate(masks)]
    return make_label_map(SegmentationFolder(**options), rows, source, samples)


def labels(mask, *masks, **options):
    """Return the labels of a mask."""
    return decide(mask, *masks, **options)[0].labels(mask)[0].tolist()


def test_labels_are_values_and_255_is_ignored():
    assert labels(gray(0, 2, 1, 255), classes=3) == [0, 2, 1, 255]
    assert labels(indexed(0, 2, 255, colors=[BLACK]), classes=3) == [0, 2, 255]
    assert decide(gray(0), classes=3)[0].names == ("0", "1", "2")


@pytest.mark.parametrize("options", [{}, {"classes": 2}, {"rows": (Row("sky"), Row("bird"))}])
def test_masks_of_0_and_255_are_binary(options):
    label_map, notes = decide(gray(0, 255), gray(0, 0), **options)
    assert label_map.labels(gray(255, 0))[0].tolist() == [1, 0]
    first, second = label_map.names
    assert notes == [
        f"masks hold 0 and 255 only: 0 is {first}, 255 is {second} (data.ignore 255 would ignore it)"
    ]


def test_masks_of_0_and_1_are_binary_if_nothing_else_is_given():
    label_map, notes = decide(gray(0, 1))
    assert (label_map.names, notes) == (("background", "foreground"), [])


@pytest.mark.parametrize(
    ("masks", "options"),
    [
        ([gray(0, 255)], {"classes": 2, "ignore": (255,)}),
        ([gray(0, 255)], {"classes": 3}),
        ([gray(0, 255), gray(1, 255)], {"classes": 2}),
        ([gray(0, 255), gray(1)], {"classes": 2, "ignore": (255,)}),
        ([gray(0, 255), gray(1)], {"rows": (Row("a"), Row("b"), Row("void", 255))}),
        ([gray(255)], {"classes": 2}),
    ],
)
def test_255_is_ignored_if_masks_may_not_be_binary(masks, options):
    assert labels(gray(255), *masks[:0], **options) == [255]
    label_map, notes = decide(*masks, **options)
    assert label_map.labels(gray(255, 0))[0].tolist() == [255, 0]
    assert notes == []


def test_masks_that_mean_1_by_255_are_refused_beside_others():
    message = "data.path: 1.png holds 0 and 255, but 0.png holds 1 there; save all alike, or give"
    for options in ({"classes": 2}, {"rows": (Row("a"), Row("b"))}):
        with pytest.raises(UserError, match=message):
            decide(gray(0, 1), gray(0, 255), **options)


def test_white_of_black_and_white_images_is_1_or_255():
    bits = rgb(0, 255, mode="1")
    assert labels(bits, gray(0, 1), classes=2) == [0, 1]
    assert labels(bits, gray(0, 255)) == [0, 1]
    assert labels(bits) == [0, 1]
    assert labels(bits, gray(0, 128, 255), mask_values=(0, 128, 255)) == [0, 2]
    with pytest.raises(UnreadableError, match="value 0, expected 10, 20"):
        labels(bits, mask_values=(10, 20))


def test_negative_and_large_values_are_of_no_class():
    for value in (-1, -256, -9999, 257, 2**31 - 1):
        with pytest.raises(UnreadableError, match=f"value {value}, expected 0 to 2"):
            labels(gray(0, value), classes=3)
    rows = (Row("a", 0), Row("b", 1), Row("void", -1), Row("c", 300))
    assert labels(gray(0, -1, 1, 300), rows=rows) == [0, 255, 1, 2]
    assert labels(gray(0, -1, 1), classes=2, ignore=(-1,)) == [0, 255, 1]
    with pytest.raises(UnreadableError, match="value 301, expected 0, 1, 300, or -1"):
        labels(gray(0, 301), rows=rows)


def test_mask_values_name_the_value_of_each_class():
    assert labels(gray(255, 0, 7), mask_values=(0, 255), ignore=(7,)) == [1, 0, 255]
    assert labels(gray(30, 10, 20, 255), mask_values=(10, 20, 30)) == [2, 0, 1, 255]


def test_ignored_values_are_not_counted_as_classes():
    assert labels(gray(0, 10, 11), classes=11, ignore=(11,)) == [0, 10, 255]  # CamVid
    assert labels(gray(0, 1, 150), classes=150, ignore=(0,)) == [255, 0, 149]  # ADE20K
    with pytest.raises(UnreadableError, match="value 255, expected 0 to 2, or 3 to ignore a pixel"):
        labels(gray(255), classes=3, ignore=(3,))


def test_a_table_has_names_values_colors_and_void():
    label_map, _ = decide(gray(7, 33, 0, 255), rows=PUBLISHED["cityscapes"])
    assert label_map.labels(gray(7, 8, 33, 0, 255))[0].tolist() == [0, 1, 18, 255, 255]
    assert (len(label_map.names), label_map.names[13]) == (19, "car")
    assert label_map.colors[13] == (0, 0, 142)
    label_map, _ = decide(gray(0, 11), rows=PUBLISHED["camvid"])
    assert label_map.labels(gray(0, 10, 11))[0].tolist() == [0, 10, 255]
    assert (len(label_map.names), label_map.names[8], label_map.void) == (11, "Car", BLACK)


def test_gray_labels_take_names_and_colors_from_the_rows_of_a_table():
    rows = (Row("soil", None, RED), Row("leaf", None, GREEN), Row("fruit", None, BLACK))
    label_map, notes = decide(gray(0, 2, 1, 255), rows=rows)
    assert label_map.labels(gray(0, 2, 1, 255))[0].tolist() == [0, 2, 1, 255]
    assert label_map.names == ("soil", "leaf", "fruit")
    assert label_map.colors == (RED, GREEN, BLACK)
    assert notes == []


def test_colors_are_looked_up_in_the_table():
    assert labels(colored(RED, BLACK, GREEN), rows=COLORED) == [0, 255, 1]
    with pytest.raises(UnreadableError, match="the color 1 2 3 is of no class"):
        labels(colored(RED, (1, 2, 3)), rows=COLORED)
    with pytest.raises(UnreadableError, match=r"it has colors; give data\.class_table"):
        labels(colored(RED, GREEN), classes=2)


def test_palettes_are_read_by_color_if_the_table_has_their_colors():
    swapped = indexed(0, 1, 2, colors=[GREEN, RED, BLACK])
    as_in_table = indexed(0, 1, 2, colors=[RED, GREEN, BLACK])
    assert labels(swapped, rows=COLORED) == [1, 0, 255]
    assert labels(swapped, as_in_table, rows=COLORED) == [1, 0, 255]
    label_map, notes = decide(as_in_table, rows=COLORED)  # which has seen no other order
    assert (label_map.labels(swapped)[0].tolist(), notes) == ([1, 0, 255], [])
    assert decide(swapped, rows=COLORED)[1] == [
        "palette masks are read by their colors; by their values, classes would differ"
    ]
    other_colors = indexed(0, 1, 2, colors=[(9, 9, 9), RED, GREEN])
    assert labels(other_colors, rows=COLORED) == [0, 1, 255]
    rows = (Row("a", 0, RED), Row("b", 1, GREEN))
    assert labels(indexed(0, 1, colors=[(5, 5, 5), (6, 6, 6)]), rows=rows) == [0, 1]


def test_rgb_masks_of_one_gray_are_read_by_color_like_the_others():
    label_map, notes = decide(rgb(0), colored(RED, GREEN, BLACK), rows=COLORED)
    assert (label_map.labels(rgb(0))[0].tolist(), notes) == ([255], [])
    assert label_map.labels(gray(0))[0].tolist() == [255]  # as an optimizer of PNG stores it
    assert labels(rgb(0, 1, 2), rgb(0), rows=COLORED) == [0, 1, 255]  # numbers of classes
    assert labels(rgb(0, 1), classes=2) == [0, 1]
    others = [indexed(0, 1, 2, colors=[(9, 9, 9), (8, 9, 9), (7, 9, 9)])] * 2  # by value
    assert labels(rgb(0), colored(RED, GREEN, BLACK), *others, rows=COLORED) == [255]


def test_gray_masks_are_read_by_the_grays_of_a_table_unless_they_are_numbers_of_classes():
    white = (255, 255, 255)
    rows = (Row("road", None, white), Row("rest", None, BLACK))
    for mask in (gray(0, 255), rgb(0, 255)):
        label_map, _ = decide(mask, gray(0), rows=rows)
        assert label_map.labels(mask)[0].tolist() == [1, 0]
        assert label_map.mask_values().tolist() == [255, 0]
    assert labels(rgb(0, 255, mode="1"), rows=rows) == [1, 0]
    assert labels(gray(0, 255), rows=rows, mask_values=(0, 255)) == [0, 1]
    assert labels(gray(0, 255), rows=rows, ignore=(255,)) == [0, 255]
    assert labels(gray(0, 1), rows=rows) == [0, 1]
    label_map, notes = decide(gray(0, 255), rows=(*rows, Row("sky", None, RED)))
    assert label_map.labels(gray(0, 255))[0].tolist() == [1, 0]
    assert notes == ["gray masks are read by their colors; by their values, classes would differ"]
    with pytest.raises(UnreadableError, match="value 300, expected 0 to 2"):
        label_map.labels(gray(300))


def test_classes_of_a_table_can_be_ignored_by_name_or_value():
    assert labels(colored(RED, GREEN), rows=(*COLORED, Row("x", None, (1, 1, 1))), ignore=("red",)) == [255, 0]  # fmt: skip
    rows = (Row("a", 5), Row("b", 6), Row("c", 7))
    assert labels(gray(5, 6, 7), rows=rows, ignore=(5,)) == [255, 0, 1]


MISTAKES = [
    ({"masks": [gray(0, 1, 2)]}, "data.classes: give the number of classes, 2 to 255, or name them in data.class_table or in classes.txt in .; the masks hold 0 to 2, as with --data.classes 3"),
    ({"masks": [gray(0, 60, 255)], "ignore": (60,)}, "the masks hold 0, 60, 255, as with --data.mask-values 0 255"),
    ({"masks": [gray(255)]}, "the masks hold 255"),
    ({"masks": [colored(RED, GREEN)]}, "data.class_table: the masks hold 2 colors: 0 255 0, 255 0 0; name the class of each color in ./classes.csv, one line name,r,g,b for each"),
    ({"masks": [gray(0, 3, 255)._replace(is_lossy=True)]}, "data.path: masks are compressed with loss, which changes values: the masks hold 0, 3, 255; save masks as PNG"),
    ({"masks": []}, "no mask can be read"),
    ({"masks": [gray(0)], "classes": 4, "rows": COLORED}, "data.classes: 4, but classes.txt has 2 classes; leave it out, or give another table"),
    ({"masks": [gray(0)], "mask_values": (1, 1)}, "data.mask_values: a value is there twice"),
    ({"masks": [gray(0)], "mask_values": (0, 255), "ignore": (255,)}, "data.ignore: 255 is the value of class 1"),
    ({"masks": [gray(0)], "rows": COLORED, "ignore": ("blue",)}, "data.ignore: no class blue in the class table"),
    ({"masks": [gray(0, 1, 2)], "rows": (Row("a"), Row("b"), Row("c")), "ignore": (1,)}, "data.ignore: 1 may also be b, because the rows of classes.txt count from 0; give the table a column value, or ignore b by its name"),
    ({"masks": [gray(0)], "rows": (Row("a", 1), Row("b", 0)), "mask_values": (0, 1)}, "data.mask_values: classes.txt has the values of classes; give one of them"),
    ({"masks": [gray(0)], "rows": (Row("a"),)}, "data.class_table: classes.txt names 1 classes; expected 2 to 255"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_refuses_unknown_and_contradictory_classes(options, message):
    masks = options.pop("masks")
    with pytest.raises(UserError) as caught:
        decide(*masks, **options)
    options["masks"] = masks
    assert message in str(caught.value)


GRAYS = (0, 1, 2, 3, 128, 255)


class Folder:
    """Masks of random files, drawn from classes that a random table describes."""

    def __init__(self, rng, names):
        self.names = [*rng.permutation(names)]
        rows = rng.permutation([*self.names, *["void"] * rng.integers(2)])
        n = len(rows)
        colors = [(g, g, g) for g in rng.permutation(GRAYS)[:n]]
        colors = [
            (*rng.integers(256, size=3).tolist(),) if rng.random() < 0.4 else c for c in colors
        ]
        values = [range(n), rng.permutation(n), rng.permutation(GRAYS)][rng.integers(3)]
        has_value, has_color = rng.random(2) < 0.5
        numbers = np.array(values[:n] if has_value else range(n))
        self.rows = [
            Row(name, int(v) if has_value else None, color if has_color else None)
            for name, v, color in zip(rows, numbers, colors, strict=True)
        ]
        palette, others = rng.permutation(n), rng.integers(4, 250, (256, 3))
        kinds = {"gray": lambda i: gray(*numbers[i]), "rgb": lambda i: rgb(*numbers[i])}
        kinds["other palette"] = lambda i: indexed(*numbers[i], colors=others)
        if has_color:
            shades = np.array(colors)
            kinds["colors"] = lambda i: rgb(*shades[i])
            kinds["palette"] = lambda i: indexed(*palette[i], colors=shades[np.argsort(palette)])
        most = 1 if rng.random() < 0.8 else 2
        used = [kinds[kind] for kind in rng.permutation([*kinds])[:most]]
        drawn = [rng.integers(n, size=rng.integers(1, 6)) for _ in range(8)]
        self.masks = [used[i % most](indices) for i, indices in enumerate(drawn)]
        self.truth = [[rows[i] for i in indices] for indices in drawn]
        self.samples = [Sample.of(f"{i}.png", mask) for i, mask in enumerate(self.masks)]

    def read(self, label_map):
        """Return the names of pixels; None for masks that are refused."""
        names = dict(enumerate(label_map.names)) | {255: "void"}
        for mask in self.masks:
            try:
                yield [names[label] for label in label_map.labels(mask)[0].tolist()]
            except UnreadableError:
                yield None

    def is_right(self, label_map):
        pairs = zip(self.read(label_map), self.truth, strict=True)
        return all(names in (None, truth) for names, truth in pairs)


@pytest.mark.parametrize("seed", range(10))
def test_masks_are_read_as_they_were_drawn_or_a_note_says_how(seed):
    for rng in np.random.default_rng(seed).spawn(30):
        check_random_folders(rng)


def check_random_folders(rng):
    config = SegmentationFolder()
    first = Folder(rng, ["ant", "bee", "cow", "dog"][: rng.integers(2, 5)])
    try:
        label_map, notes = make_label_map(config, first.rows, "classes.csv", first.samples)
    except UserError:
        return
    assert first.is_right(label_map) or notes
    other = Folder(rng, first.names)
    with contextlib.suppress(UserError):
        translated, notes = translate(config, label_map, other.rows, "classes.csv", other.samples)
        assert other.is_right(translated) or any("by their" in note for note in notes)


def read_elsewhere(label_map, *masks, rows=(), **options):
    """Return the labels of other masks than those of a run, and the notes."""
    samples = [Sample.of(f"{i}.png", mask) for i, mask in enumerate(masks)]
    config = SegmentationFolder(**options)
    other, notes = translate(config, label_map, rows, "classes.txt", samples)
    return [other.labels(mask)[0].tolist() for mask in masks], notes


def test_masks_elsewhere_mean_what_their_own_table_says():
    rows = (Row("a"), Row("b"), Row("c"))
    swapped = (Row("a"), Row("c"), Row("b"))
    differs = ["classes.txt gives the values, and its names stand for the classes of the run"]
    spread_values = {"mask_values": (0, 128, 255)}
    label_map, _ = decide(gray(0, 128, 255), rows=rows, **spread_values)
    for own, expected, notes in ((rows, [0, 1, 2], []), (swapped, [0, 2, 1], differs)):
        found = read_elsewhere(label_map, gray(0, 128, 255), rows=own, **spread_values)
        assert found == ([expected], notes)
    valued = (Row("a", 128), Row("b", 32), Row("c", 0))
    label_map, _ = decide(gray(0, 128, 32), rows=valued)
    assert read_elsewhere(label_map, gray(0, 1, 2), rows=swapped) == ([[0, 2, 1]], differs)
    beside = ["the masks have the values of the run, and not the rows of classes.txt"]
    assert read_elsewhere(label_map, gray(0, 32, 128), rows=swapped) == ([[2, 1, 0]], beside)
    assert read_elsewhere(label_map, gray(0, 32, 128)) == ([[2, 1, 0]], [])


def test_gray_masks_elsewhere_have_the_indices_of_palettes_there():
    rows = (Row("red", None, RED), Row("green", None, GREEN), Row("black", None, BLACK))
    label_map, _ = decide(colored(RED, GREEN, BLACK), rows=rows)
    masks = indexed(0, 1, 2, colors=[BLACK, RED, GREEN]), gray(0, 1, 2)
    found, _ = read_elsewhere(label_map, *masks, rows=(rows[1], rows[0], rows[2]))
    assert found == [[2, 0, 1], [2, 0, 1]]


def test_masks_elsewhere_are_read_as_those_of_the_run_if_they_can_be():
    rows = (Row("white", None, (255, 255, 255)), Row("black", None, BLACK))
    label_map, _ = decide(gray(0, 255), rows=rows)
    assert read_elsewhere(label_map, gray(0, 0), rows=rows)[0] == [[1, 1]]
    assert read_elsewhere(label_map, gray(0, 0))[0] == [[1, 1]]
    names = (Row("a"), Row("b"), Row("c"))
    label_map, _ = decide(gray(0, 80, 160), rows=names, mask_values=(0, 80, 160))
    with pytest.raises(UnreadableError, match="value 80"):  # the table has no b
        read_elsewhere(label_map, gray(0, 80), rows=(Row("a"), Row("c")), mask_values=(0, 80, 160))


def test_values_of_a_table_elsewhere_count_more_than_options_of_the_run():
    rows, options = (Row("a"), Row("b"), Row("c")), {"mask_values": (0, 80, 160)}
    label_map, _ = decide(gray(0, 80, 160), rows=rows, **options)
    valued = (Row("a", 0), Row("b", 160), Row("c", 80))
    assert read_elsewhere(label_map, gray(0, 80, 160), rows=valued, **options)[0] == [[0, 2, 1]]
    fewer = (Row("c", 0), Row("a", 1))
    assert read_elsewhere(label_map, gray(0, 1), rows=fewer, **options)[0] == [[2, 0]]
    assert read_elsewhere(label_map, gray(0, 1), rows=rows[1:], **options)[0] == [[1, 2]]
    label_map, _ = decide(gray(1, 2, 3, 0), rows=(Row("void"), *rows), ignore=(0,))
    own = (Row("b"), Row("a"))
    assert read_elsewhere(label_map, gray(0, 255), rows=own, ignore=(0,))[0] == [[1, 0]]
    label_map, _ = decide(gray(0, 1, 2, 3), rows=rows, ignore=(3,))
    others = (Row("void"), Row("c"), Row("b"), Row("a"))
    assert read_elsewhere(label_map, gray(0, 1, 3), rows=others, ignore=(3,))[0] == [[255, 2, 0]]
    assert labels(gray(0, 1, 2, 3), rows=(*rows, Row("void")), ignore=(3,)) == [0, 1, 2, 255]


def test_masks_elsewhere_that_mean_1_by_255_are_refused():
    label_map, _ = decide(gray(0, 1), classes=2)
    with pytest.raises(UserError, match=r"1\.png holds 0 and 255, but the masks of the run hold 1"):
        read_elsewhere(label_map, gray(0), gray(0, 255))
    assert read_elsewhere(label_map, gray(0, 255), gray(1, 255))[0] == [[0, 255], [1, 255]]
    assert read_elsewhere(label_map, gray(0, 255), ignore=(255,))[0] == [[0, 255]]
    label_map, _ = decide(gray(0, 1))
    rows = (Row("background", 0), Row("foreground", 255))
    assert read_elsewhere(label_map, gray(0, 255), rows=rows)[0] == [[0, 1]]


def test_palettes_elsewhere_have_the_colors_of_the_run():
    rows = (Row("a"), Row("b"))
    label_map, _ = decide(indexed(0, 1, colors=[RED, GREEN]), rows=rows)
    assert label_map.shown == ((0, 0xFF0000), (1, 0x00FF00))
    assert palette(label_map)[:2].tolist() == [[*RED], [*GREEN]]
    black = decide(indexed(1, 255, colors=[RED, distinct_colors(1)[0]]), rows=rows)[0]
    assert palette(black)[1].tolist() == distinct_colors(1)[0].tolist()
    assert len({*map(tuple, palette(black)[:20].tolist())}) == 20
    assert read_elsewhere(label_map, indexed(1, 1, colors=[RED, GREEN])) == ([[1, 1]], [])
    swapped = indexed(1, 1, colors=[GREEN, RED])
    with pytest.raises(UserError, match="b has the palette color 255 0 0, which a has in the mas"):
        read_elsewhere(label_map, swapped)
    assert read_elsewhere(label_map, swapped, rows=(Row("b", 0), Row("a", 1)))[0] == [[0, 0]]
    with pytest.raises(UnreadableError, match="index 1 is 255 0 0, the color of a in other masks"):
        label_map.labels(swapped)  # one that was not looked at
    others = indexed(1, 1, colors=[BLACK, (9, 9, 200)])
    note = "palette masks have other colors than in the masks of the run for b; values count"
    assert read_elsewhere(label_map, others) == ([[1, 1]], [note])


def grays_of(*values, palette):
    """Return a palette mask of gray values, by index."""
    return indexed(*(palette.index(v) for v in values), colors=[(v, v, v) for v in palette])


def test_palettes_of_grays_have_gray_values_if_the_indices_of_all_files_cannot_be_labels():
    note = ["the palettes of masks are of grays, which count as values, not their indices"]
    gif = grays_of(0, 255, palette=[0, 255]), grays_of(255, 255, palette=[255])
    label_map, notes = decide(*gif)
    assert [label_map.labels(mask)[0].tolist() for mask in gif] == [[0, 1], [1, 1]]
    assert notes[:1] == note
    mask = grays_of(0, 128, 255, palette=[0, 128, 255])
    assert labels(mask, mask_values=(0, 128, 255)) == [0, 1, 2]
    assert labels(mask, classes=3) == [0, 1, 2]  # by index
    assert labels(grays_of(1, 2, palette=[1, 2]), grays_of(0, palette=[0]), classes=3) == [1, 2]
    label_map, notes = decide(grays_of(1, 2, palette=[1, 2]), classes=3)
    assert label_map.labels(grays_of(1, 2, palette=[1, 2])).tolist() == [[0, 1]]
    assert notes == ["the palettes of masks are of grays; indices count as values, not the grays"]
    written = indexed(255, 0, colors=[(255, 255, 255), *[BLACK] * 255])
    rows = (Row("paper", 0, (255, 255, 255)), Row("ink", 255, BLACK))
    assert labels(written, rows=rows) == [1, 0]
    assert labels(written, mask_values=(0, 255)) == [1, 0]
    inverted = grays_of(255, 0, palette=[255, 0])
    rows = (Row("white", 0), Row("black", 1))
    assert (labels(inverted, rows=rows), labels(inverted)) == ([0, 1], [0, 1])
    colors = indexed(0, 1, colors=[RED, GREEN])
    assert decide(gray(0, 1))[0].labels(colors).tolist() == [[0, 1]]  # with no palette before
    # With a color in one file, no palette is of grays: files of few colors leave out the rest.
    few = indexed(0, 1, colors=[BLACK, (255, 255, 255)])
    many = indexed(0, 1, 2, colors=[BLACK, (255, 255, 255), RED])
    assert labels(few, many, classes=3) == [0, 1]
    label_map, _ = decide(*gif)
    with pytest.raises(
        UnreadableError, match="its palette has colors, but other masks have palettes"
    ):
        label_map.labels(many)
    samples = [Sample.of("0.png", grays_of(0, 9, palette=[0, 9]))]
    message = r"value 9, .*: 9 \(50.0%\); give --data.ignore 9 to ignore them"
    label_map, _ = make_label_map(
        SegmentationFolder(classes=2),
        (),
        "",
        [samples[0], Sample.of("1.png", grays_of(9, palette=[9]))],
    )
    with pytest.raises(UserError, match=message):
        check_masks(label_map, samples, 1, 0, "training")
    assert read_elsewhere(decide(gray(0, 255))[0], *gif) == ([[0, 1], [1, 1]], note)


def test_palettes_of_named_values_may_differ():
    rows = (Row("a", 0), Row("b", 1))
    masks = indexed(0, 1, colors=[RED, GREEN]), indexed(0, 1, colors=[GREEN, BLACK])
    assert labels(*masks, rows=rows) == [0, 1]
    assert labels(*masks, mask_values=(0, 1)) == [0, 1]


def test_written_masks_have_the_values_of_masks_that_are_read_by_color():
    rows = (Row("road", None, (128, 128, 128)), Row("rest", None, BLACK))
    label_map, _ = decide(gray(0, 128), rows=(*rows, Row("void", None, RED)))
    assert label_map.mask_values().tolist() == [128, 0]
    rows = (Row("red", None, RED), Row("green", None, GREEN), Row("black", None, BLACK))
    own = indexed(0, 1, 2, colors=[BLACK, RED, GREEN])
    assert decide(own, rows=rows)[0].mask_values().tolist() == [1, 2, 0]
    other = indexed(0, 1, 2, colors=[GREEN, RED, BLACK])
    assert decide(own, other, rows=rows)[0].mask_values().tolist() == [0, 1, 2]
    # The palette has classes that no mask shows, and filler.
    some = indexed(0, 2, colors=[BLACK, RED, GREEN, BLACK])
    label_map, _ = decide(some, rows=rows)
    assert label_map.mask_values().tolist() == [1, 2, 0]
    assert decide(some, rows=rows, ignore=("red",))[0].mask_values().tolist() == [2, 0]
    # Gray masks have the indices of the palettes.
    label_map, notes = decide(gray(0, 1, 2), own, own, rows=rows)
    assert label_map.labels(gray(0, 1, 2)).tolist() == [[2, 0, 1]]
    assert any(note.startswith("gray masks have the indices of the palettes") for note in notes)
    assert LabelMap.from_dict(label_map.as_dict()) == label_map
    valued = [row._replace(value=value) for row, value in zip(rows, (0, 1, 2), strict=True)]
    label_map, _ = decide(gray(0, 1, 2), own, own, rows=valued)
    assert label_map.labels(gray(0, 1, 2)).tolist() == [[0, 1, 2]]  # as the table says


def test_the_random_folders_are_almost_always_read():
    folders = [Folder(np.random.default_rng(seed), ["ant", "bee", "cow"]) for seed in range(100)]
    right = 0
    for folder in folders:
        with contextlib.suppress(UserError):
            args = SegmentationFolder(), folder.rows, "classes.csv", folder.samples
            right += [*folder.read(make_label_map(*args)[0])] == folder.truth
    assert right >= 85


def check(*masks, which="training", max_bad=0.0, table="", **options):
    samples = [Sample.of(f"{i}.png", mask) for i, mask in enumerate(masks)]
    label_map = make_label_map(SegmentationFolder(**options), (), "", samples)[0]
    return check_masks(label_map, samples, len(samples), max_bad, which, table)


def test_accepts_masks_with_two_classes_and_some_bad_ones():
    assert check(gray(0), gray(1), classes=2) == 0
    assert check(gray(0, 1), gray(9), classes=2, max_bad=1) == 1
    assert check(gray(0), gray(255), which="test", classes=2, ignore=(255,)) == 0


def test_masks_of_a_trained_network_without_a_class_are_refused_without_options_to_train():
    of_colors, of_values = decide(colored(RED, GREEN), rows=COLORED)[0], decide(gray(0, 1))[0]
    for label_map, mask, what in (
        (of_values, gray(0, 3), "value"),
        (of_colors, colored(RED, (1, 2, 3)), "r,g,b"),
    ):
        samples = [Sample.of("0.png", mask)]
        with pytest.raises(UserError, match=f"next to the masks, first line name,{what}$"):
            check_masks(label_map, samples, 1, 0, "test", None)


REFUSED = [
    ([gray(255)], {"classes": 3}, "data.ignore: all pixels of the 1 training masks are ignored; they hold 255; if 255 is a class, give data.mask_values, such as 0 255"),
    ([gray(9)], {"classes": 3, "ignore": (9,), "which": "test"}, "data.ignore: all pixels of the 1 test masks are ignored; they hold 9"),
    ([gray(0, 255)], {"classes": 3}, "data.path: the 1 training masks hold only the class 0, so that there is nothing to learn; if 255"),
    ([gray(0, 0, 0, 11)], {"classes": 11}, "data.path: 0.png: value 11, expected 0 to 10, or 255 to ignore a pixel; pixels of this mask without a class: 11 (25.0%); give --data.ignore 11 to ignore them, or --data.mask-values 0 11 to make every value a class"),
    ([gray(0, 1), gray(2, 3)], {"classes": 3}, "data.path: 1.png: value 3, expected 0 to 2, or 255 to ignore a pixel; pixels of this mask without a class: 3 (50.0%); give --data.ignore 3 to ignore them, or --data.classes 4 to make every value a class"),
    ([gray(0, 3)._replace(is_lossy=True)], {"classes": 2}, "data.path: 0.png: value 3, expected 0, 1, or 255 to ignore a pixel; lossy compression changes values: save masks as PNG"),
    ([gray(0, 1, 2)], {"classes": 2, "table": "classes.txt"}, "data.path: 0.png: value 2, expected 0, 1, or 255 to ignore a pixel; pixels of this mask without a class: 2 (33.3%); give --data.ignore 2 to ignore them, or add their classes to classes.txt, or put void first if its rows count from 1"),
    ([gray(0, 3)], {"classes": 2, "table": "classes.txt"}, "data.path: 0.png: value 3, expected 0, 1, or 255 to ignore a pixel; pixels of this mask without a class: 3 (50.0%); give --data.ignore 3 to ignore them, or add their classes to classes.txt"),
    ([colored(RED, GREEN)], {"classes": 2}, "data.class_table: 0.png: the mask holds colors: 0 255 0, 255 0 0; name the class of each color in classes.csv in the folder of the data, one line name,r,g,b for each"),
    ([colored(RED, GREEN)], {"classes": 2, "table": "classes.csv"}, "data.class_table: 0.png: the mask holds colors, but classes.csv has none: 0 255 0, 255 0 0; name the class of each color in classes.csv, one line name,r,g,b for each"),
    ([indexed(0, 1, colors=[BLACK, RED]), indexed(0, 1, colors=[BLACK, GREEN])], {"classes": 2}, "data.class_table: the palette index 1 is the color 0 255 0 in 1.png, but 255 0 0 in 0.png; name the class of each color in classes.csv in the folder of the data, or save masks as gray PNG"),
    ([gray(*range(99))], {"classes": 98}, "data.path: 0.png: value 98, expected 0 to 97, or 255 to ignore a pixel; pixels of this mask without a class: 98 (1.0%); give --data.ignore 98 to ignore them, or other --data.classes or --data.mask-values"),
]  # fmt: skip


@pytest.mark.parametrize(("masks", "options", "message"), REFUSED)
def test_refuses_masks_from_which_nothing_can_be_learned(masks, options, message):
    with pytest.raises(UserError) as caught:
        check(*masks, **options)
    assert str(caught.value).startswith(message)


def test_a_jpeg_is_named_as_the_cause_of_unknown_values():
    mask = gray(0, 3)._replace(is_lossy=True)
    with pytest.raises(UnreadableError, match="lossy compression changes values"):
        labels(mask, classes=2)


def test_a_color_of_no_class_is_reported_with_the_class_table():
    sample = Sample.of("0.png", colored(RED, (1, 2, 3)))
    label_map = make_label_map(SegmentationFolder(), COLORED, "classes.csv", [sample])[0]
    with pytest.raises(UserError) as caught:
        check_masks(label_map, [sample], 1, 0, "training", "classes.csv")
    assert str(caught.value) == (
        "data.path: 0.png: the color 1 2 3 is of no class; classes.csv has the colors of the "
        "classes"
    )


def test_samples_count_values():
    assert Sample.of("a", gray(5, 5, 7)).counts == Counter({5: 2, 7: 1})
    large = MaskValues(np.zeros((2048, 1024), np.int32), "gray")
    assert 2**16 < Sample.of("a", large).counts[0] <= 2**18


def test_maps_survive_json():
    label_map, _ = decide(colored(RED, GREEN), rows=COLORED)
    assert LabelMap.from_dict(label_map.as_dict()) == label_map
    older = {name: value for name, value in label_map.as_dict().items() if name != "grays"}
    assert LabelMap.from_dict(older).grays == "indices"
    older = {name: value for name, value in label_map.as_dict().items() if name != "rgbs"}
    assert LabelMap.from_dict(older | {"palettes": "colors"}).rgbs == "colors"
    with pytest.raises(ValueError, match="palettes are x"):
        LabelMap.from_dict(label_map.as_dict() | {"palettes": "x"})


TABLES = {
    "sky\n\n left half \n": [Row("sky"), Row("left half")],
    "64 128 64\tAnimal\n192 0 128\t\tArch way\n": [Row("Animal", None, (64, 128, 64)), Row("Arch way", None, (192, 0, 128))],
    "Animal,64,128,64\nSky, 1, 2, 3\n": [Row("Animal", None, (64, 128, 64)), Row("Sky", None, (1, 2, 3))],
    "name,r,g,b\nAnimal,64,128,64\n": [Row("Animal", None, (64, 128, 64))],
    "id;name\n4;a\n7;b, c\n": [Row("a", 4), Row("b, c", 7)],
    "Idx\tRatio\tTrain\tName\n1\t0.1\t11664\twall\n2\t0.2\t6046\tbuilding, edifice\n": [Row("wall", 1), Row("building, edifice", 2)],
    "Class Name\nred\nlabel\n": [Row("red"), Row("label")],
    "# from 2020\nlabel\nsky\n # all\nname\n": [Row("sky"), Row("name")],
    "red\ngreen\n": [Row("red"), Row("green")],
    "# name,r,g,b\nAnimal,64,128,64\n": [Row("Animal", None, (64, 128, 64))],
    "name,value,red,green,blue\na,0,1,2,3\n": [Row("a", 0, (1, 2, 3))],
    "name,class_id,Red (0-255),Green (0-255),Blue (0-255)\na,4,1,2,3\n": [Row("a", 4, (1, 2, 3))],
    "name,color,supercategory\na,#ff0080,x\nb,\"1, 2, 3\",y\n": [Row("a", None, (255, 0, 128)), Row("b", None, (1, 2, 3))],
    "cat 255 0 0\nbig dog 0 255 0\n": [Row("cat", None, RED), Row("big dog", None, GREEN)],
    "#ff0000 cat\n# a comment\n#00ff00 dog\n": [Row("cat", None, RED), Row("dog", None, GREEN)],
    "cat: #ff0000\ndog: #00ff00\n": [Row("cat", None, RED), Row("dog", None, GREEN)],
    "2 cat\n1 dog\n": [Row("cat", 2), Row("dog", 1)],
    "cat\t2\ndog\t1\n": [Row("cat", 2), Row("dog", 1)],
    "name,id,trainId,category\ncat,2,0,pet\n": [Row("cat", 2)],
    "10 km/h\n20 km/h\n": [Row("10 km/h"), Row("20 km/h")],
    "# label:color_rgb:parts:actions\ncat:255,0,0::\nbig dog:0,255,0::\n": [Row("cat", None, RED), Row("big dog", None, GREEN)],
    "label,r,g,b\ncat,255,0,0\ndog,0,255,0\n": [Row("cat", None, RED), Row("dog", None, GREEN)],
    ",name,value\n0,cat,2\n1,dog,1\n": [Row("cat", 2), Row("dog", 1)],
    "2: cat\n-1: void\n": [Row("cat", 2), Row("void", -1)],
    "cat=2\ndog=0\n": [Row("cat", 2), Row("dog", 0)],
    "2,cat,255,0,0\n0,dog,0,255,0\n": [Row("cat", 2, RED), Row("dog", 0, GREEN)],
    "type 1\ntype 2\n": [Row("type 1"), Row("type 2")],
    "car\n2 wheeler\nroute 66\n": [Row("car"), Row("2 wheeler"), Row("route 66")],
    "name value\ncat 2\ndog  0\n": [Row("cat", 2), Row("dog", 0)],
    "name r g b\ncat 255 0 0\n": [Row("cat", None, RED)],
    "Categories:\ncat\ndog\n": [Row("cat"), Row("dog")],
    "cat,2,#ff0000\ndog,0,#00ff00\n": [Row("cat", 2, RED), Row("dog", 0, GREEN)],
    "#ff0000 2 cat\n#00ff00 0 dog\n": [Row("cat", 2, RED), Row("dog", 0, GREEN)],
    "2,#ff0000,cat\n0,#00ff00,dog\n": [Row("cat", 2, RED), Row("dog", 0, GREEN)],
    "255,0,0,cat,2\n0,255,0,dog,0\n": [Row("cat", 2, RED), Row("dog", 0, GREEN)],
    "0\n1\n": [Row("0"), Row("1")],
    "class,name\n1,cat\n0,dog\n": [Row("cat", 1), Row("dog", 0)],
    "name,class\ncat,1\ndog,0\n": [Row("cat", 1), Row("dog", 0)],
    "Class_Name,Mask Value\ncafe\u0301,1\ndog,0\n": [Row("caf\xe9", 1), Row("dog", 0)],
}  # fmt: skip


@pytest.mark.parametrize("text", TABLES)
def test_reads_class_tables_of_several_kinds(text, tmp_path):
    (tmp_path / "classes.csv").write_text(text)
    assert list(read_table(tmp_path / "classes.csv")) == TABLES[text]
    rows, source = find_table(None, tmp_path, None)
    assert (list(rows), source) == (TABLES[text], str(tmp_path / "classes.csv"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\nc,d\n", "no column name in its first line, a,b"),
        ("name,r,g,b\nx,1,2\n", "3 columns instead of 4 in x,1,2"),
        ("a\na\n", "the name a is there twice"),
        ("name,value\na,1\nb,1\n", "the value 1 is there twice"),
        ("a,1,2,300\n", "the color 1 2 300 is not of three integers from 0 to 255, or #rrggbb"),
        ("a,1,2,3,4\nb,5,6,7,8\n", "no column name in its first line, a,1,2,3,4, and the lines"),
        ("1 255 0 0 a\n0 0 0 0 b\n", "no column name in its first line, 1 255 0 0 a"),
        ("a,1,2\nb,5,6\n", "no column name in its first line, a,1,2"),
        ("a,1\nb\n", "no column name in its first line, a,1"),
        ("class,r,g,b\n1,1,2,3\n2,4,5,6\n", "its names are numbers, 1, 2, but not 0, 1, ...; na"),
        ("2\n1\n0\n", "its names are numbers, 2, 1, 0, but not 0, 1, ...; name each value"),
        ("name,color\na,red\n", "the color red is not of three integers"),
        ("name,value,id\na,1,2\n", "its columns value and id mean the same; leave one out"),
        ("name,r,g\na,1,2\n", "it has some of r, g and b, but not all: name, r, g"),
        ("name,x\na,1\nb,2\n", "its column x may hold the value of each class; call it value"),
        ("name,x\na,ff0000\nb,00ff00\n", "its column x may hold the color of each class"),
        ("name,value\na,1\nb,-1\n", "the class b has the value -1; call it void, or change it"),
        ("name,value\na,1\nb,70000\n", "the value 70000 is not from -32,768 to 65,535"),
        ("name,value\na,x\n", "'x' is not an integer"),
    ],
)
def test_refuses_damaged_class_tables(text, problem, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=problem):
        read_table(tmp_path / "t.csv")


def test_finds_published_tables_and_names_missing_files(tmp_path):
    assert find_table("voc", tmp_path, None) == (PUBLISHED["voc"], "voc")
    assert find_table(None, tmp_path, "camvid")[1] == "camvid"
    assert find_table(None, tmp_path, None) == ((), "")
    with pytest.raises(UserError, match=r"no file x\.csv, here or in .*camvid, cityscapes, voc"):
        find_table("x.csv", tmp_path, None)


def test_two_class_tables_must_agree(tmp_path):
    (tmp_path / "classes.csv").write_text("name,r,g,b\na,1,2,3\nb,4,5,6\n")
    (tmp_path / "classes.txt").write_text("a\nb\n")
    assert find_table(None, tmp_path, None)[1] == str(tmp_path / "classes.csv")
    (tmp_path / "classes.txt").write_text("b\na\n")
    with pytest.raises(UserError, match=r"classes\.csv and .*classes\.txt differ; move one els"):
        find_table(None, tmp_path, None)
    assert find_table("classes.txt", tmp_path, None)[0] == (Row("b"), Row("a"))


def test_rare_classes_weigh_more():
    # Class 0: 90 of 200 pixels; class 1: 100 of 200; class 2: 10 of 100; class 3: nowhere.
    counts = np.array([[90, 0, 10, 0], [0, 100, 0, 0]])
    frequency = np.array([0.9, 1.0, 0.1])
    expected = [*(np.median(frequency) / frequency), 1.0]
    chex.assert_trees_all_close(median_frequency_weights(counts), np.float32(expected), rtol=1e-6)


def test_spread_indices_cover_the_range():
    assert spread(10, 4).tolist() == [0, 3, 6, 9]
    assert spread(3, 5).tolist() == [0, 1, 2]
    assert spread(0, 5).tolist() == []
