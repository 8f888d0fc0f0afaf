"""Images with labels in a table: classes, several labels and numbers; splits, groups and folds."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
from data_cases import error_message
from image_cases import write_image

from train import data as datasets
from train import output, tasks
from train.config import Clipped, Config
from train.data import columns
from train.data.image_table import ImageTable
from train.data.labeled_images import balanced_weights
from train.data.splits import hold_out, hold_out_files
from train.errors import UserError
from train.run.attribution import TrainingRows
from train.run.examples import draw_augmented

N = 40


@pytest.fixture
def folder(tmp_path):
    for i in range(N):
        write_image(tmp_path / "pics" / f"{i:02}.png", i)
    return tmp_path


def write(folder, columns, name="labels.csv", separator=","):
    """Write a table of columns, of which each is a function of the row's number."""
    lines = [separator.join(columns)]
    lines += [separator.join(str(of(i)) for of in columns.values()) for i in range(N)]
    (folder / name).write_text("\n".join(lines) + "\n", "utf-8-sig")
    return folder / name


def load(path, **options):
    config = ImageTable(path=str(path), images=str(path.parent / "pics"), image_size=8, **options)
    return config.load()


FILE = {"filename": lambda i: f"{i:02}.png"}
COLOUR = {"label": lambda i: ("grün", "rot")[i % 2]}


def labels(data):
    every = [*data.train["label"], *data.test["label"]]
    return {data.name(i)[-6:-4]: label for i, label in enumerate(every)}


def test_reads_classes_and_holds_images_out(folder):
    data = load(write(folder, FILE | COLOUR))
    assert data.classes == ("grün", "rot")
    assert labels(data) == {f"{i:02}": i % 2 for i in range(N)}
    assert 4 <= len(data.test["label"]) <= 14
    (batch,) = datasets.evaluation_batches(data, 20)
    assert batch["image"].shape == (20, 8, 8, 3)
    assert "are held out" in data.notes[-1]


def test_one_more_image_moves_no_other_between_the_splits(folder):
    table = write(folder, FILE | COLOUR)
    before = {load(table).name(i) for i in range(len(load(table).train["id"]))}
    table.write_text(table.read_text() + "40.png,rot\n")
    write_image(folder / "pics" / "40.png", 40)
    data = load(table)
    after = {data.name(i) for i in range(len(data.train["id"]))}
    assert after - {str(folder / "pics" / "40.png")} == before


@pytest.mark.parametrize(
    ("name", "separator"),
    [("a.csv", ";"), ("a.tsv", "\t"), ("a.tsv", ","), ("a.csv", "\t"), ("a.csv", "|")],
)
def test_other_separators_of_columns(folder, name, separator):
    assert load(write(folder, FILE | COLOUR, name, separator)).classes == ("grün", "rot")


def test_json_lines_gzip_and_utf_16(folder):
    rows = [{"file": f"{i:02}.png", "label": "ab"[i % 2]} for i in range(N)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name, content in (
        ("a.jsonl", text.encode()),
        ("b.jsonl.gz", gzip.compress(text.encode())),
        ("c.jsonl", text.encode("utf-16")),
    ):
        (folder / name).write_bytes(content)
        assert labels(load(folder / name)) == {f"{i:02}": i % 2 for i in range(N)}


def test_integers_are_names_of_classes(folder):
    data = load(write(folder, FILE | {"grade": lambda i: 1 + i % 10}))
    assert data.classes == tuple(map(str, range(1, 11)))
    assert labels(data)["09"] == 9
    data = load(write(folder, FILE | {"label": lambda i: ("007", "12")[i % 2]}))
    assert data.classes == ("007", "12")


def test_classes_that_join_others_or_look_alike_are_noted():
    assert columns.describe_classes(("cat", "cat | dog", "cat\u200b", "dog")) == (
        "cat and cat\u200b are two classes, which differ in case, space or zeros",
        "the class cat | dog joins others, as several labels of an image would be",
    )


def test_several_labels_in_columns_or_in_one(folder):
    tags = {"red": lambda i: i % 2, "big": lambda i: int(i % 3 == 0)}
    joined = {"tags": lambda i: "|".join(n for n, of in tags.items() if of(i))}
    table = write(folder, FILE | tags | joined)
    by_column = load(table, targets="labels", label=("big", "red"))
    in_one = load(table, targets="labels", label=("tags",), separator="|")
    assert by_column.classes == in_one.classes == ("big", "red")
    for i, label in labels(in_one).items():
        expected = [int(i) % 3 == 0, int(i) % 2]
        assert label.tolist() == labels(by_column)[i].tolist() == expected
    rare = load(table, targets="labels", label=("big", "red"), class_weights="balanced")
    assert rare.class_weights[0] > 1.3


def test_numbers_are_standardized_by_the_training_images(folder):
    table = write(folder, FILE | {"age": lambda i: 20 + i, "weight": lambda i: -i / 7})
    data = load(table, targets="numbers", label=("age", "weight"))
    train = data.train["label"]
    np.testing.assert_allclose(data.scaling.mean, train.mean(0), rtol=1e-5)
    np.testing.assert_allclose(data.scaling.standardize(train).std(0), 1, rtol=1e-5)
    np.testing.assert_allclose(
        data.scaling.restore(data.scaling.standardize(train)), train, rtol=1e-5, atol=1e-5
    )
    assert "numbers are standardized for training: age" in data.notes[1]


@pytest.mark.parametrize("start", [20260101, 10**9])
def test_large_numbers_keep_their_digits(folder, start):
    data = load(write(folder, FILE | {"t": lambda i: start + i}), targets="numbers")
    numbers = np.concatenate([data.train["label"], data.test["label"]])
    np.testing.assert_array_equal(np.sort(numbers[:, 0]), start + np.arange(N))
    batch = data.test_batch({name: a[:2] for name, a in data.test.items()})["label"]
    assert batch.dtype == np.float32
    np.testing.assert_allclose(data.scaling.restore(batch), data.test["label"][:2], atol=1e-5)
    table = write(folder, FILE | {"t": lambda i: 2**53 + i})
    message = error_message(load, table, targets="numbers")
    assert f"t is {2**53 + 1}, which 64 bits round to {2**53}" in message


def test_mixed_images_have_two_standardized_numbers(folder, monkeypatch):
    data = load(write(folder, FILE | {"age": lambda i: 20 + i}), targets="numbers", mixup=1.0)
    rows, generator = datasets.select_rows(data.train, np.arange(8)), np.random.default_rng(0)
    batch = datasets.augment_rows(data, rows, generator)
    for name in ("label", "label_2"):
        found = np.sort(data.scaling.restore(batch[name]), 0)
        np.testing.assert_allclose(found, np.sort(rows["label"], 0), rtol=1e-5)
    config = SimpleNamespace(data=ImageTable(targets="numbers"), is_release_only=False, name="")
    run, drawn = SimpleNamespace(task=SimpleNamespace(dataset=data), config=config), []
    assert TrainingRows(run).label(0) == str(rows["label"][0, 0])
    monkeypatch.setattr(output.plots, "classifications", lambda *given: drawn.extend(given[1]))
    draw_augmented(run, folder)  # shows the numbers of the table
    numbers = {line.split("% ")[1] for text in drawn for line in text.splitlines()}
    assert numbers <= {f"{20 + i:.1f}" for i in range(N)}


def test_a_private_run_takes_the_scaling_of_numbers_from_the_config(folder):
    table = write(folder, FILE | {"age": lambda i: 20 + i})
    config = Config(
        data=ImageTable(
            path=str(table), images=str(folder / "pics"), targets="numbers", image_size=8
        ),
        grad=Clipped(noise_multiplier=1.0, delta=1e-3),
    )
    with pytest.raises(UserError, match=r"data.targets: numbers .* give data.label_mean and"):
        tasks.load(config)
    given = config.data.replace(label_mean=(50.0,), label_std=(20.0,))
    assert tasks.load(config.replace(data=given)).scaling == datasets.Scaling((50.0,), (20.0,))
    with pytest.raises(UserError, match="1 and 0 numbers, but there are 1 to predict"):
        tasks.load(config.replace(data=given.replace(label_std=())))


def test_no_group_is_on_both_sides(folder):
    table = write(folder, FILE | COLOUR | {"patient": lambda i: f"p{i // 4}"})
    for fold in (None, 1, 2, 3):
        options = {} if fold is None else {"folds": 3, "fold": fold}
        data = load(table, group="patient", **options)
        number = [int(data.name(i)[-6:-4]) // 4 for i in range(N)]
        split = len(data.train["id"])
        assert {*number[:split]}.isdisjoint(number[split:])


def test_groups_that_differ_in_case_or_zeros_are_told(folder):
    ids = ("p1", "P1", "7", "07.0", "7.5")
    table = write(folder, FILE | COLOUR | {"patient": lambda i: ids[i % 5]})
    assert load(table, group="patient").notes[-2:] == (
        f"p1 and P1 are two groups in {table}, which differ in case, space or zeros",
        f"7 and 07.0 are two groups in {table}, which differ in case, space or zeros",
    )


@pytest.mark.parametrize("options", [{}, {"folds": 3}])
def test_a_picture_in_two_formats_is_on_one_side(options):
    paths = [f"a/{i}.{kind}" for i in range(40) for kind in ("png", "webp")]
    config, labels = ImageTable(path="t.csv", **options), np.arange(80) // 2 % 2
    is_test = hold_out_files(config, paths, labels)
    assert 0 < is_test.sum() < 80
    np.testing.assert_array_equal(is_test[::2], is_test[1::2])
    np.testing.assert_array_equal(
        hold_out_files(config, paths[::2], labels[::2]), hold_out(config, paths[::2], labels[::2])
    )


def test_folds_hold_out_each_image_once_with_its_class_in_proportion(folder):
    table = write(folder, FILE | {"label": lambda i: "ab"[i % 4 == 0]})
    seen = []
    for fold in range(1, 6):
        data = load(table, folds=5, fold=fold)
        split = len(data.train["id"])
        seen += [data.name(i) for i in range(split, N)]
        assert np.bincount(data.test["label"]).tolist() == [6, 2]
    assert len({*seen}) == len(seen) == N


def test_a_column_tells_the_splits(folder):
    names = ("train", "train", "train", "Valid", "testing")
    table = write(folder, FILE | COLOUR | {"split": lambda i: names[i % 5]})
    assert len(load(table).test["id"]) == N // 5
    data = load(table, test_split="test")
    assert {int(data.name(i)[-6:-4]) % 5 for i in range(24, 32)} == {4}
    message = error_message(load, table, folds=3)
    assert message.startswith("data.folds: 3, but ")
    assert "rows of test (8) in the column split are not read; tested on: val" in load(table).notes
    assert len(load(table, test_split="dev").test["id"]) == N // 5  # another name of val
    message = error_message(load, table, test_split="eval")
    assert "has train, val, test; expected train, and eval" in message


def test_another_table_for_a_trained_network(folder):
    path = write(folder, FILE | COLOUR)
    config = ImageTable(path=str(path), images=str(folder / "pics"), image_size=8)
    data = config.load_test(lambda: datasets.Outputs(("blau", "grün", "rot")))
    assert (len(data.test["id"]), *data.test["label"][:2]) == (N, 1, 2)
    message = error_message(config.load_test, lambda: datasets.Outputs(("rot", "blau")))
    assert "line 2: the network knows no label grün" in message
    message = error_message(
        config.replace(label=("x",)).load_test, lambda: datasets.Outputs(("rot", "grün"))
    )
    assert "data.label: no column x in" in message
    numbers = config.replace(targets="numbers", path=str(write(folder, FILE | {"a": int}, "n.csv")))
    scaling = datasets.Scaling((1.0,), (2.0,))
    assert numbers.load_test(lambda: datasets.Outputs(("a",), None, scaling)).scaling == scaling
    message = error_message(numbers.load_test, lambda: datasets.Outputs(("b",), None, scaling))
    assert "line 2: no column b; there are filename, a" in message


def test_names_without_extension(folder):
    table = write(folder, {"id": lambda i: f"{i:02}"} | COLOUR)
    assert load(table).name(0).endswith(".png")
    write_image(folder / "pics" / "07.jpg", 0)
    assert "line 9: 07 can be 07.jpg, 07.png" in error_message(load, table)


def test_names_in_another_form_of_unicode(folder):
    """A Mac writes file names decomposed; a table has them composed."""
    (folder / "pics" / "30.png").rename(folder / "pics" / "gru\u0308n.png")
    data = load(
        write(folder, {"file": lambda i: "gr\u00fcn.png" if i == 30 else f"{i:02}.png"} | COLOUR)
    )
    (row,) = [i for i in range(N) if data.name(i).endswith("n.png")]
    assert data.explain(row) is None


def test_an_image_with_several_rows_is_on_one_side(folder):
    for spelled, options in ((("", "./"), {}), (("", ""), {"folds": 4})):
        table = write(folder, {"file": lambda i, s=spelled: f"{s[i % 2]}{i // 2:02}.png"} | COLOUR)
        data = load(table, **options)
        train, names = len(data.train["label"]), [data.name(i) for i in range(N)]
        assert not {*names[:train]} & {*names[train:]}
        assert "20, such as 00.png; 20 of them have different labels" in data.notes[2]


def test_lists_of_labels(folder):
    """A text among lists is one label, and nothing in a list is none."""
    tags = [None, ["old", None], "very old", []]
    lines = [json.dumps({"file": f"{i:02}.png", "tags": tags[i % 4]}) for i in range(N)]
    (folder / "t.jsonl").write_text("\n".join(lines))
    data = load(folder / "t.jsonl", targets="labels")
    assert data.classes == ("old", "very old")
    assert labels(data)["02"].tolist() == [0, 1]
    assert labels(data)["01"].tolist() == [1, 0]
    for hot in ([0, 1, 1], [0.0, 1.0], [["a"]]):
        (folder / "t.jsonl").write_text("\n".join([json.dumps({"file": "0", "tags": hot}), *lines]))
        message = error_message(load, folder / "t.jsonl", targets="labels")
        assert f"line 1: tags is {hot}; expected names of labels, each once" in message


def test_one_label_of_0_and_1(folder):
    data = load(write(folder, FILE | {"wet": lambda i: i % 2}), targets="labels")
    assert data.classes == ("wet",)
    assert labels(data)["05"].tolist() == [1]


def test_tells_labels_of_no_training_image(folder):
    table = write(
        folder,
        FILE
        | {"wet": lambda i: i % 2, "dry": lambda i: int(i == 0)}
        | {"split": lambda i: "train" if i > 9 else "val"},
    )
    data = load(table, targets="labels", label=("wet", "dry"))
    assert "2 classes, but no training image of dry" in data.notes


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        (COLOUR, {}, "data.file: "),
        (FILE, {}, "data.label: "),
        ({"file": lambda i: f"x/{i}.png"} | COLOUR, {}, "data.images names the folder"),
        (FILE | {"label": lambda i: i / 2}, {}, "to predict them give data.targets numbers"),
        (FILE | {"label": lambda i: "a" if i else ""}, {}, "line 2: label is empty"),
        (FILE | {"label": lambda i: "a" if i else "NaN"}, {}, "{t}, line 2: label is NaN"),
        (FILE | {"label": lambda i: "a"}, {}, "have the same label"),
        (FILE | {"a": lambda i: i % 3, "b": int}, {"label": ("a", "b")}, "data.targets labels"),
        (
            FILE | {"a": lambda i: i % 3, "b": int},
            {"label": ("a", "b"), "targets": "labels"},
            "line 4: a is '2'; expected 0 or 1",
        ),
        (FILE | {"t": lambda i: "a;b"}, {"targets": "labels"}, "--data.separator ';'"),
        (FILE | {"t": lambda i: "x"}, {"targets": "numbers"}, "expected a finite number"),
        (FILE | {"t": lambda i: "nan"}, {"targets": "numbers"}, "line 2: t is nan, which"),
        (FILE | {"t": lambda i: f"1_{i}"}, {"targets": "numbers"}, "line 2: t is '1_0'"),
        (FILE | {"t": lambda i: f"{i}e38"}, {"targets": "numbers"}, "line 6: t is '4e38'"),
        (
            FILE | {"t": lambda i: "['a'; 'b']"},
            {"targets": "labels", "separator": ";"},
            "line 2: t is the text of a list",
        ),
        (
            {"file": lambda i: f"./{i // 2:02}.png", "t": lambda i: "a|b"},
            {"targets": "labels", "separator": "|"},
            "line 3: 00.png has another row",
        ),
        (
            {"file": lambda i: f"{i % 30:02}.png", "split": lambda i: "train" if i < 30 else "val"}
            | COLOUR,
            {},
            "the image 00.png, 01.png, 02.png and 7 more is in train and in val",
        ),
        (
            FILE | COLOUR | {"who": lambda i: i // 3, "Split": lambda i: ("train", "val")[i > 30]},
            {"group": "who"},
            "data.group: who 10 is in train and in val in the column Split",
        ),
        (FILE | COLOUR | {"who": int}, {"group": "hwo"}, "data.group: no column hwo"),
        (FILE | COLOUR, {"folds": 30}, "data.folds: 30, but a class has only 20"),
        (FILE | COLOUR, {"folds": 3, "fold": 4}, "data.fold: 4, but data.folds is 3"),
        (FILE | COLOUR, {"test_split": "val"}, "has no column of splits"),
        (FILE | COLOUR, {"separator": "|"}, "data.separator: |, but data.targets is class"),
        (
            FILE | {"a": lambda i: i % 2},
            {"targets": "labels", "label": ("a", "a")},
            "data.label: a is given twice",
        ),
        (
            FILE | COLOUR | {"split": lambda i: "train", "Split": lambda i: "val"},
            {},
            "data.split: {t} has several columns (split, Split) that can be the split; name one",
        ),
        (
            FILE | {"t": lambda i: f'"{i},5"'},
            {"targets": "numbers"},
            "expected a finite number, with a point in place of the comma",
        ),
        (FILE | {"t": lambda i: f'"{i},5"'}, {}, "line 2 has the label 0,5, and all are numbers"),
    ],
)
def test_refuses_in_one_line(folder, columns, options, expected):
    table = write(folder, columns)
    message = error_message(load, table, **options)
    assert expected.replace("{t}", str(table)) in message
    assert "\n" not in message


@pytest.mark.parametrize("missing", ["", " ", "NA", "null", "NaN", "n/a", "#N/A", "<NA>"])
def test_missing_cells_are_no_values(folder, missing):
    """As in pandas, which writes nothing, and R, which writes NA."""

    def but(value):
        return lambda i: value(i) if i != 7 else missing

    every = {"who": lambda i: f"p{i // 4}", "split": lambda i: ("train", "dev")[i > 30]}
    for options, given in (
        ({"file": None}, {"filename": but(FILE["filename"])} | COLOUR),
        ({"label": ("label",)}, FILE | {"label": but(COLOUR["label"])}),
        ({"label": ("n",), "targets": "numbers"}, FILE | {"n": but(float)}),
        ({"label": ("n", "m"), "targets": "labels"}, FILE | {"n": but(lambda i: i % 2)}),
        ({"group": "who"}, FILE | COLOUR | {"who": but(every["who"])}),
        ({"split": "split"}, FILE | COLOUR | {"split": but(every["split"])}),
    ):
        columns = {"m": lambda i: i % 2} | every | given
        (option,) = options.keys() - {"targets"}
        table = write(folder, columns)
        message = error_message(load, table, **options)
        assert message.startswith(f"data.{option}: {table}, line 9: ")
        assert ("is empty" if not missing.strip() else f"{missing}, which stands") in message
    tags = FILE | {"tags": but(lambda i: "ab"[i % 2])}
    if missing.strip():
        message = error_message(load, write(folder, tags), targets="labels", separator="|")
        assert f"line 9: tags has {missing}, which stands for none" in message
    else:
        data = load(write(folder, tags), targets="labels", separator="|")
        assert labels(data)["07"].tolist() == [0, 0]


def test_copies_in_both_splits_are_told(folder):
    (folder / "pics" / "39.png").write_bytes((folder / "pics" / "00.png").read_bytes())
    table = write(folder, FILE | COLOUR | {"split": lambda i: ("train", "val")[i > 30]})
    notes = load(table).notes
    columns = (
        "images are in the column filename (data.file)",
        "labels are in the column label (data.label)",
    )
    assert notes[:2] == columns
    assert "39.png of " in notes[2]
    config = ImageTable(path=str(table), images=str(folder / "pics"), image_size=8)
    notes = config.load_test(lambda: datasets.Outputs(("grün", "rot"))).notes
    assert notes[2:] == (
        f"paths begin in {folder / 'pics'}, as in the run; others must be absolute",
    )


def test_what_a_table_may_mean_is_told(folder):
    table = write(
        folder,
        FILE
        | {"class": lambda i: i % 2, "label": lambda i: ("None", "Na")[i % 2]}
        | {"who": lambda i: f"{' ' * (i % 2)}p{i // 4} "},
    )
    several = (
        "has several columns (label, class) that can be the label; name one, as with --data.label "
    )
    assert several + "label or --data.label class" in error_message(load, table, group="who")
    data = load(table, group="who", label=("label",))
    assert data.classes == ("Na", "None")
    cases = load(write(folder, FILE | {"label": lambda i: ("cat", "Cat", "dog")[i % 3]}))
    assert "Cat and cat are two classes, which differ in case, space or zeros" in cases.notes
    train = len(data.train["id"])
    number = [int(data.name(i)[-6:-4]) // 4 for i in range(N)]
    assert {*number[:train]}.isdisjoint(number[train:])


def test_damaged_tables_name_the_line(tmp_path):
    def read(content, name="t.csv"):
        (tmp_path / name).write_bytes(content)
        return [*datasets.records.read(str(tmp_path / name), "data.path")]

    assert read(b'a,b\n"x,\n1",2\n\n')[0].fields == {"a": "x,\n1", "b": "2"}
    assert "line 3: 3 values, but the first line names 2" in error_message(
        read, b"a,b\n1,2\n1,2,3\n"
    )
    assert "two columns are called a" in error_message(read, b"a,a\n1,2\n")
    assert "line 2: " in error_message(read, b'a,b\n"1,2\n')
    message = error_message(read, b'a,b\n"1", "2"\n')
    assert message.endswith("line 2: a quote follows a space: ' \"2\"'; remove it")
    assert "is not UTF-8 at byte 4" in error_message(read, b"a,b\n\xff,2\n")
    assert "is damaged: " in error_message(read, b"\x1f\x8b\x08\0 no gzip", "t.csv.gz")


def test_balanced_weights_are_those_of_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight

    y = np.array([0, 0, 0, 1, 2, 2])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=y)
    np.testing.assert_allclose(balanced_weights(y, 3), expected)
    labels = np.array([[1, 0, 1], [1, 0, 1], [1, 0, 1], [0, 0, 1]])
    np.testing.assert_allclose(balanced_weights(labels, 3), (1 / 3, 1, 1))


def test_groups_need_two(folder):
    config = ImageTable(path="labels.csv")
    assert error_message(hold_out, config, range(4), None, ["a"] * 4) == (
        "data.group: all examples are of the group a, which cannot be both trained and tested on; "
        "give examples of more groups"
    )


def test_rows_that_spell_a_path_differently_are_of_one_image(folder):
    def spelled(i):
        name = f"{i // 2:02}.png"
        odd = (name, str(folder / "pics" / name), f"../pics/{name}")
        return odd[0] if i % 2 == 0 else odd[1 + i // 2 % 2]

    columns = {"filename": spelled, "label": lambda i: "ab"[i // 2 % 2]}
    data = load(write(folder, columns))
    names = [data.name(i) for i in range(N)]
    train = len(data.train["label"])
    assert set(names[:train]).isdisjoint(names[train:])
    assert len({*names}) == N // 2
    table = write(folder, columns | {"split": lambda i: ("train", "val")[i % 2]})
    assert "is in train and in val" in error_message(load, table)


def test_an_image_of_two_groups_is_refused(folder):
    columns = {"filename": lambda i: f"{i // 2:02}.png", "label": lambda i: "ab"[i // 2 % 2]}
    table = write(folder, columns | {"patient": lambda i: f"{'pq'[i % 2]}{i}"})
    assert "00.png has rows of p0 and of q1" in error_message(load, table, group="patient")


def test_rows_of_one_image_are_on_one_side():
    """Also where one of them is the only example of its class on that side."""
    config = ImageTable(path="t.csv")
    for seed in range(30):
        names = [f"{seed}/{i}.png" for i in range(12)]
        labels = np.array([0] * 12 + [1, 1])
        is_test = hold_out(config, [*names, names[0], names[5]], labels)
        assert (is_test[12], is_test[13]) == (is_test[0], is_test[5])
        assert is_test[12] != is_test[13]
        with pytest.raises(UserError, match="needs two or more examples of each class"):
            hold_out(config, [*names, names[0], names[0]], labels)
