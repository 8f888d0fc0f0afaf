"""What the values of masks mean, as a config and a class table say."""

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
from train.output.palette import palette

RED, GREEN, BLUE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0)
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
    samples = [Sample.of(f"{i}.png", mask) for i, mask in enumerate(masks)]
    return make_label_map(SegmentationFolder(**options), rows, source, samples)


def labels(mask, *masks, **options):
    return decide(mask, *masks, **options).labels(mask)[0].tolist()


def refused(*masks, **options):
    with pytest.raises(UserError) as caught:
        decide(*masks, **options)
    return str(caught.value)


def test_labels_are_values_and_255_is_ignored_if_that_is_said():
    assert labels(gray(0, 2, 1, 255), classes=3, ignore=(255,)) == [0, 2, 1, 255]
    assert labels(indexed(0, 2, 255, colors=[BLACK]), classes=3, ignore=(255,)) == [0, 2, 255]
    assert decide(gray(0), classes=3).names == ("0", "1", "2")
    with pytest.raises(UnreadableError, match="value 255, expected 0 to 2"):
        labels(gray(0, 255), classes=3)


def test_white_of_black_and_white_images_is_1_or_255():
    bits = rgb(0, 255, mode="1")
    assert labels(bits, gray(0, 1), classes=2) == [0, 1]
    assert labels(bits, gray(0, 255), mask_values=(0, 255)) == [0, 1]
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
    assert labels(gray(30, 10, 20), mask_values=(10, 20, 30)) == [2, 0, 1]


def test_ignored_values_are_not_counted_as_classes():
    assert labels(gray(0, 10, 11), classes=11, ignore=(11,)) == [0, 10, 255]  # CamVid
    assert labels(gray(0, 1, 150), classes=150, ignore=(0,)) == [255, 0, 149]  # ADE20K
    with pytest.raises(UnreadableError, match="value 255, expected 0 to 2, or 3 to ignore a pixel"):
        labels(gray(255), classes=3, ignore=(3,))


def test_a_table_has_names_values_colors_and_void():
    label_map = decide(gray(7, 33, 0), rows=PUBLISHED["cityscapes"])
    assert label_map.labels(gray(7, 8, 33, 0))[0].tolist() == [0, 1, 18, 255]
    assert (len(label_map.names), label_map.names[13]) == (19, "car")
    assert label_map.colors[13] == (0, 0, 142)
    label_map = decide(gray(0, 11), rows=PUBLISHED["camvid"])
    assert label_map.labels(gray(0, 10, 11))[0].tolist() == [0, 10, 255]
    assert (len(label_map.names), label_map.names[8], label_map.void) == (11, "Car", BLACK)


def test_gray_labels_take_names_and_colors_from_the_rows_of_a_table():
    rows = (Row("soil", None, RED), Row("leaf", None, GREEN), Row("fruit", None, BLUE))
    label_map = decide(gray(0, 2, 1), rows=rows)
    assert label_map.labels(gray(0, 2, 1))[0].tolist() == [0, 2, 1]
    assert label_map.names == ("soil", "leaf", "fruit")
    assert (label_map.colors, label_map.reading) == ((RED, GREEN, BLUE), "index")


def test_colors_are_looked_up_in_the_table():
    assert labels(colored(RED, BLACK, GREEN), rows=COLORED) == [0, 255, 1]
    with pytest.raises(UnreadableError, match="the color 1 2 3 is of no class"):
        labels(colored(RED, (1, 2, 3)), colored(RED, GREEN), rows=COLORED)
    with pytest.raises(UnreadableError, match="it has colors, and no class table names them"):
        labels(colored(RED, GREEN), classes=2)


WHITE = (255, 255, 255)
SWAPPED = (Row("road", None, WHITE), Row("rest", None, BLACK))


@pytest.mark.parametrize(
    ("masks", "options", "by_index", "by_color"),
    [
        ([indexed(0, 1, 2, colors=[GREEN, RED, BLACK])], {"rows": COLORED}, [0, 1, 255], [1, 0, 255]),
        ([gray(0)], {"rows": SWAPPED}, [0], [1]),
        ([rgb(0)], {"rows": SWAPPED}, [0], [1]),
        ([rgb(0), colored(RED)], {"rows": COLORED}, [0], [255]),
        ([gray(0), gray(0, 255)], {"rows": SWAPPED}, [0], [1]),
    ],
)  # fmt: skip
def test_two_readings_are_refused_with_the_options_of_both(masks, options, by_index, by_color):
    message = refused(*masks, **options)
    assert "0.png allows two readings: " in message
    assert message.endswith("; give --data.mask-reading index or --data.mask-reading color")
    assert labels(*masks, mask_reading="index", **options) == by_index
    assert labels(*masks, mask_reading="color", **options) == by_color


def test_a_reading_that_masks_allow_alone_or_that_changes_nothing_is_taken():
    assert labels(indexed(0, 1, 2, colors=[RED, GREEN, BLACK]), rows=COLORED) == [0, 1, 255]
    assert labels(indexed(0, 1, colors=[(9, 9, 9), RED]), rows=COLORED) == [0, 1]
    assert labels(gray(255), gray(255, 0), rows=SWAPPED, mask_reading="color") == [0]
    assert labels(gray(0, 255), rows=SWAPPED) == [1, 0]
    assert labels(gray(0, 1), rows=SWAPPED) == [0, 1]
    assert labels(rgb(0, 255, mode="1"), gray(255), rows=SWAPPED[::-1]) == [0, 1]
    assert labels(rgb(0, 1), classes=2) == [0, 1]
    gif = [
        indexed(*i, colors=[(v, v, v) for v in g]) for i, g in (((0, 1), (0, 255)), ((0,), (255,)))
    ]
    by_color = {"mask_values": (0, 255), "mask_reading": "color"}
    assert [labels(mask, *gif, **by_color) for mask in gif] == [[0, 1], [1]]
    assert "index 0 of color 255 255 255 is 0 by index and 1 by color" in refused(
        *gif, mask_values=(0, 255)
    )
    mixed = refused(gray(1, 2), colored(RED, GREEN), rows=COLORED)
    assert mixed.endswith("0.png has class numbers, but 1.png has colors; save all masks alike")


def test_palettes_that_differ_are_refused_unless_indices_are_said_to_count():
    masks = indexed(0, 1, colors=[BLACK, RED]), indexed(0, 1, colors=[BLACK, GREEN])
    assert refused(*masks, classes=2) == (
        "data.mask_reading: palette index 1 is 0 255 0 in 1.png, but 255 0 0 in 0.png; if indices "
        "count, give --data.mask-reading index; if colors count, --data.mask-reading color and a "
        "class table with lines name,r,g,b"
    )
    assert labels(*masks, classes=2, mask_reading="index") == [0, 1]
    assert labels(*masks, rows=(Row("a", 0), Row("b", 1))) == [0, 1]
    assert labels(*masks, mask_values=(0, 1)) == [0, 1]
    first = decide(masks[0], classes=3)
    assert palette(first)[:2].tolist() == [[*BLACK], [*RED]]
    with pytest.raises(UnreadableError, match="palette index 1 is 0 255 0, but 255 0 0 in other m"):
        first.labels(masks[1])  # one that was not looked at
    some = indexed(0, 1, colors=[BLACK, RED, GREEN]), indexed(0, 1, colors=[BLACK, RED, BLUE])
    with pytest.raises(UnreadableError, match="palette index 2 is 0 0 255, but several colors"):
        decide(*some, classes=3).labels(indexed(0, 2, colors=[BLACK, RED, BLUE]))
    assert decide(some[0], classes=3).labels(
        indexed(0, 2, colors=[BLACK, RED, GREEN])
    ).tolist() == [[0, 2]]


def test_classes_of_a_table_can_be_ignored_by_name_or_value():
    assert labels(colored(RED, GREEN), rows=(*COLORED, Row("x", None, (1, 1, 1))), ignore=("red",)) == [255, 0]  # fmt: skip
    rows = (Row("a", 5), Row("b", 6), Row("c", 7))
    assert labels(gray(5, 6, 7), rows=rows, ignore=(5,)) == [255, 0, 1]


MISTAKES = [
    ({"masks": [gray(0, 1, 2)]}, "data.classes: give the number of classes, 2 to 255, or name them in data.class_table or in classes.csv in .; the masks hold 0 to 2, as with --data.classes 3"),
    ({"masks": [gray(0, 255)]}, "the masks hold 0, 255, as with --data.mask-values 0 255"),
    ({"masks": [gray(0, 3, 181, 255)]}, "as with --data.classes 182 --data.ignore 255, or --data.mask-values 0 3 181 255"),
    ({"masks": [gray(0, 1), gray(0, 255), gray(0)]}, "data.path: 1.png holds 255, but 0.png holds 1; save all alike first"),
    ({"masks": [colored(RED, GREEN)]}, "data.class_table: the masks hold 2 colors: 0 255 0, 255 0 0; name the class of each color in ./classes.csv, one line name,r,g,b for each"),
    ({"masks": [gray(0, 3, 255)._replace(is_lossy=True)]}, "data.path: masks are compressed with loss, which changes values: the masks hold 0, 3, 255; save masks as PNG"),
    ({"masks": []}, "no mask can be read"),
    ({"masks": [gray(0)], "classes": 4, "rows": COLORED}, "data.classes: 4, but classes.txt has 2 classes; leave it out, or give another table"),
    ({"masks": [gray(0)], "mask_values": (1, 1)}, "data.mask_values: a value is there twice"),
    ({"masks": [gray(0)], "mask_values": (0, 255), "ignore": (255,)}, "data.ignore: 255 is the value of class 1"),
    ({"masks": [gray(0)], "rows": COLORED, "ignore": ("blue",)}, "data.ignore: no class blue in the class table"),
    ({"masks": [gray(0, 1, 2)], "rows": (Row("a"), Row("b"), Row("c")), "ignore": (1,)}, "data.ignore: 1 is the value of class b; ignore b by its name, or give the table a column value"),
    ({"masks": [gray(0)], "rows": (Row("a", 1), Row("b", 0)), "mask_values": (0, 1)}, "data.mask_values: classes.txt has the values of classes; give one of them"),
    ({"masks": [gray(0)], "rows": (Row("a"),)}, "data.class_table: classes.txt names 1 classes; expected 2 to 255"),
]  # fmt: skip


def test_refuses_unknown_and_contradictory_classes():
    for given, message in MISTAKES:
        options = dict(given)
        with pytest.raises(UserError) as caught:
            decide(*options.pop("masks"), **options)
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
        chosen = [str(kind) for kind in rng.permutation([*kinds])[:most]]
        readings = {"color" if kind in ("colors", "palette") else "index" for kind in chosen}
        self.reading = readings.pop() if len(readings) == 1 else None
        used = [kinds[kind] for kind in chosen]
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


def test_masks_are_read_as_they_were_drawn_or_refused():
    right, refused = 0, 0
    for rng in np.random.default_rng(0).spawn(300):
        folder = Folder(rng, ["ant", "bee", "cow", "dog"][: rng.integers(2, 5)])
        config = SegmentationFolder()
        try:
            label_map = make_label_map(config, folder.rows, "classes.csv", folder.samples)
        except UserError as error:
            refused += 1
            if "two readings" in str(error) and folder.reading:
                config = config.replace(mask_reading=folder.reading)
                label_map = make_label_map(config, folder.rows, "classes.csv", folder.samples)
                assert [*folder.read(label_map)] == folder.truth
            continue
        assert folder.is_right(label_map)
        right += [*folder.read(label_map)] == folder.truth
        other = Folder(rng, folder.names)
        with contextlib.suppress(UserError):
            translated, _ = translate(config, label_map, other.rows, "classes.csv", other.samples)
            assert other.is_right(translated)
    assert right >= 200
    assert refused <= 95


def read_elsewhere(label_map, *masks, rows=(), **options):
    """Return the labels of other masks than those of a run, and the notes."""
    samples = [Sample.of(f"{i}.png", mask) for i, mask in enumerate(masks)]
    config = SegmentationFolder(**options)
    other, notes = translate(config, label_map, rows, "classes.txt", samples)
    return [other.labels(mask)[0].tolist() for mask in masks], notes


def test_masks_elsewhere_mean_what_their_own_table_says():
    rows = (Row("a"), Row("b"), Row("c"))
    label_map = decide(gray(0, 128, 255), rows=rows, mask_values=(0, 128, 255))
    assert read_elsewhere(label_map, gray(0, 128, 255)) == ([[0, 1, 2]], [])
    with pytest.raises(UserError, match="has names alone, and its rows do not count as the values"):
        read_elsewhere(label_map, gray(0, 1, 2), rows=(Row("a"), Row("c"), Row("b")))
    valued = (Row("a", 0), Row("b", 160), Row("c", 80), Row("void", 9))
    found = read_elsewhere(label_map, gray(0, 80, 160, 9), rows=valued, mask_values=(0, 128, 255))
    assert found == ([[0, 2, 1, 255]], [])
    numbered = decide(gray(0, 1, 2), rows=rows)
    assert read_elsewhere(numbered, gray(0, 1), rows=rows[:2]) == ([[0, 1]], [])
    plain = decide(gray(0, 1), classes=2)
    note = ["the classes of the run have no names, so that classes.txt is not used"]
    assert read_elsewhere(plain, gray(0, 1), rows=rows[:2]) == ([[0, 1]], note)
    with pytest.raises(UserError, match=r"classes\.txt has the class d, but the run has a, b, c; "):
        read_elsewhere(numbered, gray(0), rows=(Row("d", 0), Row("a", 1)))
    ignoring = decide(gray(0, 1, 2, 255), rows=rows, ignore=(255,))
    assert read_elsewhere(ignoring, gray(5, 7, 255), rows=(Row("b", 5), Row("a", 7)))[0] == [
        [1, 0, 255]
    ]


def test_masks_elsewhere_are_read_as_those_of_the_run_if_they_can_be():
    label_map = decide(gray(0, 255), rows=SWAPPED)
    assert read_elsewhere(label_map, gray(0, 0)) == ([[1, 1]], [])
    assert read_elsewhere(label_map, gray(0, 1)) == ([[0, 1]], [])
    assert read_elsewhere(label_map, gray(0, 0), mask_reading="index") == ([[0, 0]], [])
    with pytest.raises(UserError, match="allows two readings"):  # the table of the other masks
        read_elsewhere(label_map, gray(0, 0), rows=SWAPPED)


def test_palettes_elsewhere_have_the_colors_of_the_run():
    label_map = decide(indexed(0, 1, colors=[RED, GREEN]), rows=(Row("a"), Row("b")))
    assert label_map.shown() == {0: 0xFF0000, 1: 0x00FF00}
    assert read_elsewhere(label_map, indexed(1, 1, colors=[RED, GREEN])) == ([[1, 1]], [])
    swapped = indexed(1, 1, colors=[GREEN, RED])
    with pytest.raises(UserError, match="palette index 1 is 255 0 0, but 0 255 0 in the masks of"):
        read_elsewhere(label_map, swapped)
    assert read_elsewhere(label_map, swapped, mask_reading="index")[0] == [[1, 1]]
    assert read_elsewhere(label_map, swapped, rows=(Row("b", 0), Row("a", 1)))[0] == [[0, 0]]


def test_written_masks_have_the_values_of_the_classes():
    rows = (Row("road", 5, (128, 128, 128)), Row("rest", 3, BLACK))
    assert decide(gray(3, 5), rows=rows).mask_values().tolist() == [5, 3]
    assert decide(gray(0, 128), rows=(*rows, Row("void", 7, RED))).mask_values().tolist() == [5, 3]
    assert (
        decide(gray(0, 255), mask_values=(0, 255)).describe_options() == "--data.mask-values 0 255"
    )
    map_ = decide(gray(0, 1), classes=2, ignore=(255,))
    assert map_.describe_options() == "--data.classes 2 --data.ignore 255"


def check(*masks, which="training", max_bad=0.0, table="", **options):
    samples = [Sample.of(f"{i}.png", mask) for i, mask in enumerate(masks)]
    label_map = make_label_map(SegmentationFolder(**options), (), "", samples)
    return check_masks(label_map, samples, len(samples), max_bad, which, table)


def test_accepts_masks_with_two_classes_and_some_bad_ones():
    assert check(gray(0), gray(1), classes=2) == 0
    assert check(gray(0, 1), gray(9), classes=2, max_bad=1) == 1
    assert check(gray(0), gray(255), which="test", classes=2, ignore=(255,)) == 0


def test_masks_of_a_trained_network_without_a_class_are_refused_without_options_to_train():
    of_colors, of_values = decide(colored(RED, GREEN), rows=COLORED), decide(gray(0, 1), classes=2)
    for label_map, mask, what in (
        (of_values, gray(0, 3), "value"),
        (of_colors, colored(RED, (1, 2, 3)), "r,g,b"),
    ):
        samples = [Sample.of("0.png", mask)]
        with pytest.raises(UserError, match=f"next to the masks, first line name,{what}$"):
            check_masks(label_map, samples, 1, 0, "test", None)


REFUSED = [
    ([gray(9)], {"classes": 3, "ignore": (9,)}, "data.ignore: all pixels of the 1 training masks are ignored; they hold 9"),
    ([gray(0, 0)], {"classes": 3}, "data.path: the 1 training masks hold only the class 0, so that there is nothing to learn"),
    ([gray(0, 0, 0, 11)], {"classes": 11}, "data.path: 0.png: value 11, expected 0 to 10; pixels of this mask without a class: 11 (25.0%); give --data.ignore 11 to ignore them, or --data.mask-values 0 11"),
    ([gray(0, 1), gray(2, 3)], {"classes": 3, "ignore": (9,)}, "data.path: 1.png: value 3, expected 0 to 2, or 9 to ignore a pixel; pixels of this mask without a class: 3 (50.0%); give --data.ignore 9 3 to ignore them, or --data.classes 4"),
    ([gray(0, 1, 255)], {"classes": 2}, "data.path: 0.png: value 255, expected 0, 1; pixels of this mask without a class: 255 (33.3%); give --data.ignore 255 to ignore them, or --data.classes 2 --data.ignore 255"),
    ([gray(0, 3)._replace(is_lossy=True)], {"classes": 2}, "data.path: 0.png: value 3, expected 0, 1; lossy compression changes values: save masks as PNG"),
    ([gray(1, 2), gray(3)], {"classes": 3, "table": "classes.txt"}, "data.path: 1.png: value 3, expected 0 to 2; the masks count classes from 1; give --data.mask-values 1 2 3"),
    ([gray(0, 3)], {"classes": 2, "table": "classes.txt"}, "data.path: 0.png: value 3, expected 0, 1; pixels of this mask without a class: 3 (50.0%); give --data.ignore 3 to ignore them, or add their classes to classes.txt"),
    ([colored(RED, GREEN)], {"classes": 2}, "data.path: 0.png: it has colors, and no class table names them; name it in classes.csv in the folder of the data, one line name,r,g,b for each class"),
    ([rgb(0, 255, mode="1")], {"classes": 3, "mask_reading": "color"}, "data.path: 0.png: the color 255 255 255 is of no class; name it in"),
    ([gray(*range(99))], {"classes": 98}, "data.path: 0.png: value 98, expected 0 to 97; pixels of this mask without a class: 98 (1.0%); give --data.ignore 98 to ignore them, or --data.classes 99"),
]  # fmt: skip


@pytest.mark.parametrize(("masks", "options", "message"), REFUSED)
def test_refuses_masks_from_which_nothing_can_be_learned(masks, options, message):
    with pytest.raises(UserError) as caught:
        check(*masks, **options)
    assert str(caught.value).startswith(message)


def test_samples_count_values():
    assert Sample.of("a", gray(5, 5, 7)).counts == Counter({5: 2, 7: 1})
    large = MaskValues(np.zeros((2048, 1024), np.int32), "gray")
    assert 2**16 < Sample.of("a", large).counts[0] <= 2**18


def test_maps_survive_json():
    label_map = decide(colored(RED, GREEN), rows=COLORED)
    assert LabelMap.from_dict(label_map.as_dict()) == label_map
    with pytest.raises(ValueError, match="masks are read by x"):
        LabelMap.from_dict(label_map.as_dict() | {"reading": "x"})


TABLES = {
    "sky\n left half \n\n \n": [Row("sky"), Row("left half")],
    '"wall, brick",1,2,3\nroad,4,5,6\n': [Row("wall, brick", None, (1, 2, 3)), Row("road", None, (4, 5, 6))],
    'name,r,g,b\n"wall\nbrick",1,2,3\n"a ""b""",4,5,6\n': [Row("wall brick", None, (1, 2, 3)), Row('a "b"', None, (4, 5, 6))],
    '"sky, blue"\nroad\n': [Row("sky, blue"), Row("road")],
    "Pixel Value, Class\n0, background\n1, car\n": [Row("background", 0), Row("car", 1)],
    "name\ntype 1\ntype 2\n": [Row("type 1"), Row("type 2")],
    "64 128 64\tAnimal\n192 0 128\t\tArch way\n": [Row("Animal", None, (64, 128, 64)), Row("Arch way", None, (192, 0, 128))],
    "id;name\n4;a\n7;b, c\n": [Row("a", 4), Row("b, c", 7)],
    "Idx\tRatio\tTrain\tName\n1\t0.1\t11664\twall\n2\t0.2\t6046\tbuilding, edifice\n": [Row("wall", 1), Row("building, edifice", 2)],
    "Class Name\nred\nlabel\n": [Row("red"), Row("label")],
    "# from 2020\nlabel\nsky\n # all\nname\n": [Row("sky"), Row("name")],
    "name,value,red,green,blue\na,0,1,2,3\n": [Row("a", 0, (1, 2, 3))],
    "name,class_id,Red (0-255),Green (0-255),Blue (0-255)\na,4,1,2,3\n": [Row("a", 4, (1, 2, 3))],
    "name,color,supercategory\na,#ff0080,x\nb,\"1, 2, 3\",y\n": [Row("a", None, (255, 0, 128)), Row("b", None, (1, 2, 3))],
    "cat 255 0 0\nbig dog 0 255 0\n": [Row("cat", None, RED), Row("big dog", None, GREEN)],
    "#ff0000 cat\n# a comment\n#00ff00 dog\n": [Row("cat", None, RED), Row("dog", None, GREEN)],
    "cat: #ff0000\ndog: #00ff00\n": [Row("cat", None, RED), Row("dog", None, GREEN)],
    "# label:color_rgb:parts:actions\ncat:255,0,0::\nbig dog:0,255,0::\n": [Row("cat", None, RED), Row("big dog", None, GREEN)],
    "label,r,g,b\ncat,255,0,0\ndog,0,255,0\n": [Row("cat", None, RED), Row("dog", None, GREEN)],
    ",name,value\n0,cat,2\n1,dog,1\n": [Row("cat", 2), Row("dog", 1)],
    "2: cat\n-1: void\n": [Row("cat", 2), Row("void", -1)],
    "cat=2\ndog=0\n": [Row("cat", 2), Row("dog", 0)],
    "2,cat,255,0,0\n0,dog,0,255,0\n": [Row("cat", 2, RED), Row("dog", 0, GREEN)],
    "car\n2 wheeler\nroute 66\n": [Row("car"), Row("2 wheeler"), Row("route 66")],
    "name value\ncat 2\ndog  0\n": [Row("cat", 2), Row("dog", 0)],
    "Categories:\ncat\ndog\n": [Row("cat"), Row("dog")],
    "#ff0000 2 cat\n#00ff00 0 dog\n": [Row("cat", 2, RED), Row("dog", 0, GREEN)],
    "2,#ff0000,cat\n0,#00ff00,dog\n": [Row("cat", 2, RED), Row("dog", 0, GREEN)],
    "255,0,0,cat,2\n0,255,0,dog,0\n": [Row("cat", 2, RED), Row("dog", 0, GREEN)],
    "0\n1\n": [Row("0"), Row("1")],
    "class,name\n1,cat\n0,dog\n": [Row("cat", 1), Row("dog", 0)],
    "name,class\ncat,1\ndog,0\n": [Row("cat", 1), Row("dog", 0)],
    "Class_Name,Mask Value\ncafe\u0301,1\ndog,0\n": [Row("caf\xe9", 1), Row("dog", 0)],
}  # fmt: skip


def test_reads_class_tables_of_several_kinds(tmp_path):
    path = tmp_path / "classes.csv"
    for text, rows in TABLES.items():
        path.write_text(text)
        assert list(read_table(path)) == rows, text
        found, source = find_table(None, tmp_path, None)
        assert (list(found), source) == (rows, str(path)), text


DAMAGED = [
    ("a,b\nc,d\n", "no column name in its first line, a,b"),
    ("name,r,g,b\nx,1,2\n", "3 columns instead of 4 in x,1,2"),
    ("a\na\n", "the name a is there twice"),
    ("name,value\na,1\nb,1\n", "the value 1 is there twice"),
    ("a,1,2,300\n", "the color 1 2 300 is not of three integers from 0 to 255, or #rrggbb"),
    ("a,1,2,3,4\nb,5,6,7,8\n", "no column name in its first line, a,1,2,3,4, and the lines"),
    ("1 255 0 0 a\n0 0 0 0 b\n", "no column name in its first line, 1 255 0 0 a"),
    ("a,1,2\nb,5,6\n", "no column name in its first line, a,1,2"),
    ("a,1\nb\n", "no column name in its first line, a,1"),
    ("a\n\nb\n", "data.class_table: line 2 of .* is empty; expected a class name"),
    ("name,r,g,b\na,1,2,3\n,,,\nb,1,2,4\n", "line 3 of .* is empty"),
    ("2 cat\n1 dog\n", "each line has a number, as 2 cat, which may be a value or part of the"),
    ("type 1\ntype 2\n", "each line has a number, as type 1, which may be a value or part"),
    ('a\n"b\n', "line 2 of .*: unexpected end of data"),
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
]


def test_refuses_damaged_class_tables(tmp_path):
    for text, problem in DAMAGED:
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
    # Class 3 is nowhere. A sum in float32 would lose each small mask beside the large one.
    counts = np.array([[2**25, 2**24, 0, 0], *[[1, 0, 0, 0]] * 4096, [0, 0, 90, 0]])
    frequency = np.array([(2**25 + 4096) / (3 * 2**24 + 4096), 1 / 3, 1.0])
    expected = [*(np.median(frequency) / frequency), 1.0]
    chex.assert_trees_all_close(median_frequency_weights(counts), np.float32(expected), rtol=1e-6)


def test_spread_indices_cover_the_range():
    assert spread(10, 4).tolist() == [0, 3, 6, 9]
    assert spread(3, 5).tolist() == [0, 1, 2]
    assert spread(0, 5).tolist() == []
