"""Images in tar and Parquet shards."""

import json
import os
import tarfile

import chex
import numpy as np
import pytest
from data_cases import error_message, take_batches
from shard_cases import CLASSES, WRITERS, pixels, png, write_parquet, write_tar

from train import data as datasets
from train.config import Config, ImageShards
from train.data.shards import Fields, Shards, index_shards
from train.data.unreadable import UnreadableFiles
from train.errors import TrainingError
from train.run.run_folder import RunFolder
from train.run.same_data import check_data, describe_data, write_data


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fnet"


@pytest.fixture(params=WRITERS)
def kind(request):
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    return request.param


SMALL = {"image_size": 5, "resize": 5, "crop": "center", "flip": False, "batch_size": 8}


def load(*paths, **options):
    return ImageShards(path=tuple(map(str, paths)), **SMALL | options).load()


def write(kind, folder, train=24, test=6, shards=2, **options):
    """Write shards of images 0, 1, ... for training, and then for testing."""
    each = train // shards
    for k in range(shards):
        path = folder / f"train-{k}.{kind}"
        WRITERS[kind](path, range(k * each, (k + 1) * each), **options)
    if test:
        WRITERS[kind](folder / f"val-0.{kind}", range(train, train + test), **options)


def center(i):
    """The center crop of image i, which has 6 x 5 pixels."""
    return pixels(i)[:, :5]


# ---- What is read


def test_reads_every_image_with_its_label(kind, tmp_path):
    write(kind, tmp_path)
    data = load(tmp_path)
    assert data.classes == ("0", "1", "2")
    batches, _ = take_batches(data, n=3, size=8)
    seen = set()
    for batch in batches:
        for image, label, id in zip(batch["image"], batch["label"], batch["id"], strict=True):
            i = int(id)  # shards are sorted, so that ids count as the images do
            np.testing.assert_array_equal(image, center(i))
            assert label == i % 3
            seen.add(i)
    assert seen == set(range(24))
    (test,) = datasets.evaluation_batches(data, 6)
    chex.assert_trees_all_equal(test["image"], np.stack([center(i) for i in range(24, 30)]))
    chex.assert_trees_all_equal(test["weight"], np.ones(6, np.float32))


def test_returns_the_bytes_of_images(kind, tmp_path, monkeypatch):
    good = png
    monkeypatch.setattr("shard_cases.png", lambda i: good(i) + bytes(i % 4))  # also zeros
    WRITERS[kind](tmp_path / f"a.{kind}", range(12))
    paths = [str(tmp_path / f"a.{kind}")]
    indices = index_shards(paths, Fields(None, None))
    shards, rows = Shards(paths, indices), np.array([7, 2, 3, 11, 2])
    for _ in range(2):  # Parquet has them in memory the second time
        content = shards.read(np.zeros(5, np.int32), indices[0].places[rows])
        assert content.tolist() == [good(i) + bytes(i % 4) for i in rows]


def test_batches_do_not_depend_on_the_format(tmp_path):
    pytest.importorskip("pyarrow")
    for kind in WRITERS:
        options = {"group": 1} if kind == "parquet" else {}
        write(kind, tmp_path / kind, **options)
    first, *others = (
        take_batches(load(tmp_path / kind, crop="padded", padding=2, flip=True))[0]
        for kind in WRITERS
    )
    for other in others:
        chex.assert_trees_all_equal(other, first)


def test_finds_labels_in_json_and_in_names_of_folders(tmp_path):
    def with_json(i):
        return {"png": png(i), "json": json.dumps({"breed": CLASSES[i % 3], "n": i}).encode()}

    write_tar(tmp_path / "a.tar", range(12), files=with_json)
    data = load(tmp_path / "a.tar", label="json.breed", test_fraction=0.25)
    assert data.classes == CLASSES
    labels = np.concatenate([data.train["label"], data.test["label"]])
    assert np.bincount(labels).tolist() == [4, 4, 4]
    message = error_message(load, tmp_path / "a.tar", label="json.kind")
    assert message.startswith("data.label: 0000.json in ")
    assert message.endswith("a.tar has no field kind")
    with tarfile.open(tmp_path / "b.tar", "w") as shard:
        for i in range(12):
            (tmp_path / "image.png").write_bytes(png(i))
            shard.add(tmp_path / "image.png", f"train/{CLASSES[i % 3]}/{i}.png")
            shard.add(tmp_path / "image.png", f"train/{CLASSES[i % 3]}/@eaDir/{i}.png/THUMB_M.png")
    data = load(tmp_path / "b.tar", test_fraction=0.25)  # thumbnails of a NAS are no images
    assert data.classes == CLASSES
    assert data.notes[0] == "files and folders are left out of shards: @eaDir"
    write_tar(tmp_path / "c.tar", range(3), files=lambda i: {"png": png(i)})
    message = error_message(load, tmp_path / "c.tar")
    assert "no file *.cls, and its images are in no folders" in message


def test_finds_class_names_that_come_with_shards(tmp_path):
    pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "a.parquet", range(12), names=CLASSES)
    assert load(tmp_path / "a.parquet", test_fraction=0.25).classes == CLASSES
    (tmp_path / "names.txt").write_text("x\ny\nz\n")
    named = load(
        tmp_path / "a.parquet", test_fraction=0.25, class_names=str(tmp_path / "names.txt")
    )
    assert named.classes == ("x", "y", "z")
    write_parquet(tmp_path / "b.parquet", range(12), names=("a", "b", "c"))
    assert "has the classes" in error_message(load, tmp_path / "*.parquet")


def test_finds_columns_by_type_and_by_name(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(tmp_path / "a.parquet", range(12), label="breed", plain=True)
    table = parquet.read_table(tmp_path / "a.parquet").append_column("note", [[""] * 12])
    parquet.write_table(table, tmp_path / "b.parquet")
    notes = load(tmp_path / "b.parquet", label="breed").notes
    assert "columns image, breed are read, and not note" in notes
    assert load(tmp_path / "a.parquet", test_fraction=0.25).classes == ("0", "1", "2")
    message = error_message(load, tmp_path / "a.parquet", label="bred")
    assert message.endswith("(did you mean breed?); there are image, breed")
    assert "data.image: " in error_message(load, tmp_path / "a.parquet", image="picture")


def write_labels(path, labels):
    def with_json(i):
        return {"png": png(i), "json": json.dumps({"y": labels[i]}).encode()}

    write_tar(path, range(len(labels)), files=with_json)


@pytest.mark.parametrize("wrong", [0.5, 2.0, None, [0], {"a": 1}, " "])
def test_labels_that_are_neither_integers_nor_names_are_refused(wrong, tmp_path):
    write_labels(tmp_path / "a.tar", [0, 1, 0, wrong])
    message = error_message(load, tmp_path / "a.tar", label="json.y")
    assert message.startswith("data.label: 0003 in ")
    assert message.endswith(f"has the label {wrong!r}; expected an integer from 0, or a name")


def test_labels_in_parquet_are_integers_or_names(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    for values, expected in (
        ([0.5, 1.0], "row 0 of {} has the label 0.5; expected"),
        ([0, None], "row 1 of {} has the label None; expected"),
        ([[0], [1]], "row 0 of {} has the label [0]; expected"),
    ):
        table = pyarrow.table({"image": [png(0), png(1)], "label": values})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        message = error_message(load, tmp_path / "a.parquet", label="label")
        assert expected.format(tmp_path / "a.parquet") in message


def test_only_digits_are_numbers_and_names_have_one_form(tmp_path):
    write_labels(tmp_path / "a.tar", ["10", "1_0", "20"] * 4)
    data = load(tmp_path / "a.tar", label="json.y", test_fraction=0.25)
    assert data.classes == ("10", "1_0", "20")
    write_labels(tmp_path / "c.tar", ["caf\u00e9", "\ufeffcafe\u0301 ", "the"] * 4)
    assert load(tmp_path / "c.tar", label="json.y").classes == ("caf\u00e9", "the")
    write_labels(tmp_path / "b.tar", ["1", "0", "02"] * 4)
    data = load(tmp_path / "b.tar", label="json.y", test_fraction=0.25)
    assert data.classes == ("0", "02", "1")


def test_names_in_one_shard_and_numbers_in_another_are_refused(tmp_path):
    write_labels(tmp_path / "a.tar", [0, 1] * 6)
    write_labels(tmp_path / "b.tar", ["cat", "dog"] * 6)
    message = error_message(load, tmp_path, label="json.y")
    assert f"labels are names in {tmp_path / 'b.tar'}, but numbers in other shards" in message


def test_numbers_are_names_if_one_has_zeros_before_it_else_they_count_from_0(tmp_path):
    write_labels(tmp_path / "a.tar", ["01", "1"] * 6)
    write_labels(tmp_path / "b.tar", ["10"] * 6)
    data = load(tmp_path, label="json.y")
    assert data.classes == ("01", "1", "10")
    assert "01 and 1 are two classes, which differ in case, space or zeros" in data.notes
    (tmp_path / "names.txt").write_text("\n".join(f"class {i}" for i in range(11)))
    data = load(tmp_path, label="json.y", class_names=str(tmp_path / "names.txt"))
    assert {*data.train["label"].tolist()} == {1, 10}
    absent = ", ".join(f"class {i}" for i in (0, 2, 3, 4, 5))
    assert f"11 classes, but no training image of {absent} and 4 more" in data.notes
    write_labels(tmp_path / "a.tar", ["1", "2"] * 6)
    data = load(tmp_path / "a.tar", label="json.y")
    assert data.classes == ("0", "1", "2")
    rule = "labels that are numbers count classes from 0"
    assert f"3 classes, but no training image of 0; {rule}" in data.notes


def test_copies_in_test_shards_are_told(kind, tmp_path):
    write(kind, tmp_path, train=6, test=3)
    assert not any("copies" in note for note in load(tmp_path).notes)
    (tmp_path / f"train-0.{kind}").rename(tmp_path / f"train-7.{kind}")
    (tmp_path / f"val-7.{kind}").write_bytes((tmp_path / f"train-7.{kind}").read_bytes())
    (note,) = (note for note in load(tmp_path).notes if "copies" in note)
    assert "test images are training images or copies of them, such as " in note
    assert f"{tmp_path}/val-7.{kind}" in note


def test_files_of_class_names_may_have_a_byte_order_mark_but_no_gaps(tmp_path):
    write_tar(tmp_path / "a.tar", range(12))
    names = tmp_path / "names.txt"
    options = {"test_fraction": 0.25, "class_names": str(names)}
    names.write_bytes("\ufeffkatze \r\nhünd\r\neule\r\n\r\n".encode())
    assert load(tmp_path / "a.tar", **options).classes == ("katze", "hünd", "eule")
    names.write_text("cat\n\ndog\nowl\n")
    assert error_message(load, tmp_path / "a.tar", **options) == (
        f"data.class_names: line 2 of {names} is empty; expected a class name"
    )
    for text in ("2 owl\n0 cat\n1 dog\n", "name\ncat\ndog\nowl\n"):
        names.write_text(text)
        assert f"line 1 of {names} is " in error_message(load, tmp_path / "a.tar", **options)
    names.write_text("2\n0\n1\n")
    message = error_message(load, tmp_path / "a.tar", **options)
    assert message.startswith("data.class_names: names are numbers, 2, 0, 1, but not 0, 1, ...")
    names.write_bytes("h\xfcnd\n".encode("latin-1"))
    assert "is not UTF-8 at byte 1; convert it" in error_message(
        load, tmp_path / "a.tar", **options
    )


def test_images_with_several_dots_in_their_names_are_not_left_out_silently(tmp_path):
    def dotted(i):
        return {"2020.png" if i else "png": png(i), "cls": b"0"}

    write_tar(tmp_path / "a.tar", range(4), files=dotted)
    message = error_message(load, tmp_path / "a.tar")
    assert message.startswith("data.image: 0001.2020.png in ")
    assert message.endswith("rename such files, or give data.image")


@pytest.mark.parametrize(
    "pattern", ["{folder}", "{folder}/*.tar", "{folder}/{{train-{{0..1}},val-0}}.tar"]
)
def test_finds_splits_by_the_names_of_shards(pattern, tmp_path):
    write("tar", tmp_path)
    data = load(pattern.format(folder=tmp_path))
    assert (len(data.train["id"]), len(data.test["id"])) == (24, 6)


def test_a_pattern_without_a_test_shard_holds_out_a_fraction(tmp_path):
    write("tar", tmp_path)
    data = load(tmp_path / "train-{0..1}.tar", test_fraction=0.25)
    assert len(data.train["id"]) + len(data.test["id"]) == 24
    assert set(data.train["label"]) == set(data.test["label"])
    explicit = load(tmp_path / "train-{0..1}.tar", test_path=(str(tmp_path / "val-0.tar"),))
    assert (len(explicit.train["id"]), len(explicit.test["id"])) == (24, 6)
    message = error_message(load, tmp_path / "*.tar", test_path=(str(tmp_path / "train-0.tar"),))
    assert message.endswith("train-0.tar would be trained on, too")
    link = tmp_path / "link.tar"
    link.symlink_to(tmp_path / "train-0.tar")
    for other in (link, tmp_path / "x" / ".." / "train-0.tar"):
        message = error_message(load, tmp_path / "train-*.tar", test_path=(str(other),))
        assert message.endswith("would be trained on, too")


@pytest.mark.parametrize(
    "options", [{"kind": "tar"}, {"kind": "parquet"}, {"kind": "parquet", "plain": True}]
)
def test_one_image_less_moves_no_other(options, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.image_shards, "_READ_AT_ONCE", 16)
    kind = options["kind"]
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    others = {name: value for name, value in options.items() if name != "kind"}

    def tested(ids):
        WRITERS[kind](tmp_path / f"a.{kind}", ids, **others)
        data = load(tmp_path / f"a.{kind}", test_fraction=0.3, split_seed=1)
        (batch,) = datasets.evaluation_batches(data, len(data.test["id"]))
        images = {center(i).tobytes(): i for i in ids}
        return {images[image.tobytes()] for image in batch["image"]}

    whole = tested(range(40))
    assert 3 < len(whole) < 25
    assert tested([i for i in range(40) if i != 7]) == whole - {7}


def test_mixes_paths_by_weight(tmp_path):
    write_tar(tmp_path / "a.tar", range(12))
    write_tar(tmp_path / "b.tar", range(12, 18))
    write_tar(tmp_path / "val.tar", range(6))
    paths = tmp_path / "a.tar", tmp_path / "b.tar"
    options = {"test_path": (str(tmp_path / "val.tar"),)}
    batches, _ = take_batches(load(*paths, weights=(1.0, 3.0), **options), n=9, size=8)
    from_b = np.array([batch["id"] >= 12 for batch in batches])
    assert from_b.mean(1).tolist() == [0.75] * 9
    ids = np.concatenate([batch["id"] for batch in batches])
    np.testing.assert_allclose(np.bincount(ids), np.repeat([1.5, 9], [12, 6]), atol=0.5)
    assert "1 weights, but data.path has 2" in error_message(load, *paths, weights=(1.0,))


def test_the_index_is_kept_until_a_shard_changes(kind, tmp_path, cache, monkeypatch):
    write(kind, tmp_path / "d")
    first = take_batches(load(tmp_path / "d"))[0]
    files = sorted((cache / "shards").iterdir())
    assert len(files) == 3
    opened = []
    with monkeypatch.context() as patch:
        patch.setattr(f"train.data.shards._index_{kind}", lambda *args: opened.append(args))
        again = load(tmp_path / "d")
    assert not opened
    chex.assert_trees_all_equal(take_batches(again)[0], first)
    WRITERS[kind](tmp_path / "d" / f"train-1.{kind}", range(30, 38))
    assert len(load(tmp_path / "d").train["id"]) == 20
    files[0].write_bytes(b"damaged")
    assert len(load(tmp_path / "d").train["id"]) == 20


# ---- Which process reads what, and from where


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("processes", [2, 4])
def test_a_batch_is_the_same_for_any_number_of_processes(
    processes, workers, kind, tmp_path, monkeypatch
):
    monkeypatch.setattr("train.data.order.MIN_LANE_ROWS", 2)
    write(kind, tmp_path)
    options = {"crop": "resized", "flip": True, "color_jitter": 0.4}
    whole, _ = take_batches(load(tmp_path, **options), n=4, size=8)
    parts = []
    for process in range(processes):
        data = load(tmp_path, workers=workers, **options)
        local = np.arange(8) * processes // 8 == process
        batches = datasets.training_batches(data, 8, 0, local)
        parts.append([next(batches) for _ in range(4)])
        for batch, expected in zip(parts[-1], whole, strict=True):
            assert batch["weight"].all()
            assert not batch["image"][~local].any()
            for name in batch:
                chex.assert_trees_all_equal(batch[name][local], expected[name][local])
        test = list(datasets.evaluation_batches(data, 4, local[:4]))
        for batch, expected in zip(test, datasets.evaluation_batches(data, 4), strict=True):
            chex.assert_trees_all_equal(batch["image"][local[:4]], expected["image"][local[:4]])
            chex.assert_trees_all_equal(batch["weight"], expected["weight"])


def test_a_process_reads_only_its_rows(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.order.MIN_LANE_ROWS", 2)
    counts, make = [], datasets.image_shards.Shards

    def counted(*args):
        counts.append(make(*args))
        return counts[-1]

    monkeypatch.setattr(datasets.image_shards, "Shards", counted)
    write(kind, tmp_path, train=64, test=4, **({"group": 2} if kind == "parquet" else {}))
    for processes in (1, 4):
        data, local = load(tmp_path), np.arange(8) * processes // 8 == 0
        order = data.order(8, 0)
        batches = datasets.training_batches(data, 8, 0, local)
        for _ in range(8):
            next(batches)
        ids = {int(i) for step in range(8 + 3) for i in order(step)[local]}  # three are prefetched
        if kind == "parquet":  # 32 row groups
            assert counts[-1].reads.sum() <= len({i // 2 for i in ids})
            assert processes == 1 or counts[-1].reads.sum() <= 32 / processes + 4
        else:
            assert 8 * 8 / processes <= counts[-1].reads.sum() <= 8 * 11 / processes


def test_continues_in_the_middle_of_an_epoch_with_other_processes(kind, tmp_path):
    write(kind, tmp_path)
    options = {"crop": "padded", "flip": True}
    whole, _ = take_batches(load(tmp_path, **options), n=7, size=8)
    data = load(tmp_path, **options)
    batches = UnreadableFiles(data, print).watch(
        datasets.training_batches(data, 8, 0, np.arange(8) < 4)
    )
    for _ in range(4):
        next(batches)
    position = json.loads(json.dumps(batches.get_state()))  # as a checkpoint has it
    data = load(tmp_path, **options)
    batches = UnreadableFiles(data, print).watch(datasets.training_batches(data, 8, 0))
    batches.set_state(position)
    chex.assert_trees_all_equal([next(batches) for _ in range(3)], whole[4:])


def describe(folder):
    return describe_data(load(folder), private=False)


def test_a_resumed_run_finds_that_shards_changed(tmp_path):
    write("tar", tmp_path / "d")
    folder, config = RunFolder(tmp_path), Config()
    folder.write_config(config)
    folder.metrics.write_text('{"step": 1}\n')
    write_data(folder, config, describe(tmp_path / "d"))
    os.utime(tmp_path / "d" / "train-0.tar", (0, 0))  # the same content
    assert check_data(folder, config, describe(tmp_path / "d")) == []
    write_tar(tmp_path / "d" / "train-0.tar", range(1, 13))
    (changed,) = check_data(folder, config, describe(tmp_path / "d"))
    assert "other rows; the next batches are of the new data" in changed
    write_tar(tmp_path / "d" / "train-2.tar", range(3))
    (changed,) = check_data(folder, config, describe(tmp_path / "d"))
    assert "24 training and 6 test examples then, 27 training" in changed


def test_reads_remote_shards_as_local_ones(kind, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    write(kind, tmp_path / "d")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "d"), "/bucket", recursive=True)
    try:
        data = load("memory://bucket")
        assert data.batches_at_once == 2
        assert data.name(0).startswith("memory://")
        expected, _ = take_batches(load(tmp_path / "d"))
        chex.assert_trees_all_equal(take_batches(data)[0], expected)
        for pattern in ("{0..1}", "*"):
            data = load(f"memory://bucket/train-{pattern}.{kind}")
            local = load(tmp_path / "d" / f"train-{pattern}.{kind}")
            assert len(data.train["id"]) + len(data.test["id"]) == 24
            chex.assert_trees_all_equal(data.test, local.test)
    finally:
        memory.rm("/bucket", recursive=True)


# ---- Faults


def test_a_truncated_shard_is_named_with_its_end(kind, tmp_path):
    write(kind, tmp_path, shards=4, test=0)
    path = tmp_path / f"train-1.{kind}"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    message = error_message(load, tmp_path)
    assert message.startswith(f"data.path: {path} is damaged: ")
    assert f"{len(content) // 2:,}" in message
    assert message.endswith("give data.max_bad_fraction 0.25 to train without what is missing")
    data = load(tmp_path, max_bad_fraction=0.25, test_fraction=0.2)
    note, _, held_out = data.notes  # a cache lies next to the shards
    assert note.startswith(f"{path} is damaged")
    assert held_out.startswith(f"no test shards in {tmp_path}: ")
    images = len(data.train["id"]) + len(data.test["id"])
    assert 18 <= images < 24
    assert (images > 18) == (kind == "tar")  # a tar file is readable up to its end
    for batch in take_batches(data, n=4)[0]:
        assert batch["weight"].all()


def test_a_tar_without_its_end_is_damaged(tmp_path):
    write_tar(tmp_path / "a.tar", range(6))
    content = (tmp_path / "a.tar").read_bytes().rstrip(b"\0")
    content += bytes(-len(content) % 512)
    (tmp_path / "a.tar").write_bytes(content)
    message = error_message(load, tmp_path / "a.tar")
    assert f"it is damaged at byte {len(content):,}, after 0005.cls" in message


def test_a_damaged_image_is_reported_and_skipped(kind, tmp_path, monkeypatch):
    good = png
    monkeypatch.setattr("shard_cases.png", lambda i: b"no image" if i == 7 else good(i))
    write(kind, tmp_path)
    data, lines = load(tmp_path, max_bad_fraction=0.1), []
    for batch in UnreadableFiles(data, lines.append).watch(
        iter(take_batches(data, n=3, size=8)[0])
    ):
        assert ((batch["weight"] == 0) == (batch["id"] == 7)).all()
    place = {"tar": "bytes ", "parquet": "row 3 of row group 1"}[kind]
    (line,) = lines
    assert line.startswith(f"cannot read {tmp_path}/train-0.{kind}, {place}")
    assert "not an image" in line


@pytest.mark.parametrize("fault", ["vanished", "changed"])
def test_a_shard_that_vanishes_or_changes_stops_the_run(fault, kind, tmp_path):
    write(kind, tmp_path)
    data = load(tmp_path)
    path = tmp_path / f"train-1.{kind}"
    if fault == "vanished":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + bytes(10240))
    with pytest.raises(TrainingError) as caught:
        take_batches(data, n=3, size=8)
    assert str(caught.value).startswith(f"data.path: {path} ")
    assert ("does not exist" if fault == "vanished" else "10,240") or fault
    assert str(caught.value).endswith("continue with --resume")
    assert "\n" not in str(caught.value)


class Refusing:
    """Storage that refuses access, as s3fs and gcsfs do."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        raise self.error


NO_CREDENTIALS = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")


@pytest.mark.parametrize(
    ("url", "error", "expected"),
    [
        ("s3://b/a.tar", NO_CREDENTIALS, "AWS_PROFILE"),
        ("s3://b/a.tar", PermissionError("Forbidden"), "AWS_ACCESS_KEY_ID"),
        ("gs://b/a.tar", OSError("Anonymous caller does not have storage access"), "gcloud auth"),
        ("gs://b/*.tar", ImportError("Please install gcsfs to access"), "pip install gcsfs"),
        ("s3://b/a.tar", FileNotFoundError("b/a.tar"), "s3://b/a.tar does not exist"),
        ("s3://b/a.tar", TimeoutError("no\nanswer"), "cannot read s3://b/a.tar: no answer"),
    ],
)
def test_says_what_remote_storage_needs(url, error, expected, monkeypatch):
    monkeypatch.setattr("train.data.storage.filesystem", lambda path: Refusing(error))
    message = error_message(load, url)
    assert message.startswith("data.path: ")
    assert url in message
    assert expected in message


def test_unknown_storage_is_one_line():
    assert error_message(load, "nowhere://b/a.tar") == (
        "data.path: nowhere://b/a.tar: fsspec knows no storage nowhere://"
    )


def test_says_what_is_wrong_with_the_files(tmp_path):
    assert error_message(load, tmp_path) == (
        f"data.path: no files in {tmp_path}; expected files *.tar or *.parquet"
    )
    (tmp_path / "a.txt").write_text("")
    assert "no shards in" in error_message(load, tmp_path)
    (tmp_path / "a.tar.gz").write_text("")
    assert error_message(load, tmp_path / "a.tar.gz").endswith("one by one; decompress it")
    (tmp_path / "x.array_record-00000-of-00001").write_text("")
    message = error_message(load, tmp_path / "x.array_record-00000-of-00001")
    assert message.endswith("are not read; convert them to Parquet, as the page on shards shows")
    assert "does not exist" in error_message(load, tmp_path / "none.tar")
    write_tar(tmp_path / "b.tar", range(3), files=lambda i: {"txt": b"a", "cls": b"0"})
    message = error_message(load, tmp_path / "b.tar")
    assert message.endswith("b.tar has no file with an image; there are cls, txt")
    write_tar(
        tmp_path / "c.tar", range(3), files=lambda i: {"png": png(i)} | ({"cls": b"1"} if i else {})
    )
    assert "data.label: 0000 in " in error_message(load, tmp_path / "c.tar")
    write_tar(
        tmp_path / "d.tar", range(3), files=lambda i: {"png": png(i), "jpg": png(i), "cls": b"0"}
    )
    assert "has several images: jpg, png; name one" in error_message(load, tmp_path / "d.tar")


@pytest.mark.parametrize("options", [{}, {"mixup": 0.2}, {"cutmix": 0.2}, {"crops": 10}])
def test_memory_of_shards_that_are_not_there_yet(tmp_path, options):
    write_tar(tmp_path / "a.tar", range(6))
    missing = ImageShards(path=("none/train",), image_size=8, batch_size=2, **options).placeholder()
    assert missing.note == "no folder none/train: 1,000 classes are assumed"
    data = load(tmp_path / "a.tar", image_size=8, resize=8, test_fraction=0.5, **options)
    for sample in (datasets.sample_batch, datasets.sample_evaluation_batch):
        shapes = [
            {name: (a.shape, a.dtype) for name, a in sample(d, 2).items()}
            for d in (missing.dataset, data)
        ]
        assert shapes[0] == shapes[1]
    large = ImageShards(path=("none/train",), batch_size=300).placeholder()
    assert len(large.dataset.train["id"]) >= 300
    for there in (str(tmp_path / "a.tar"), "s3://bucket/x", "x-*.tar"):
        assert ImageShards(path=("none", there)).placeholder() is None


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (1001, "data.label: 0000 in PATH: the label has 1,001 symbols; at most 1,000 are read (if you trust it, --limits 2"),
        (2**20 + 1, "data.label: 0000.cls in PATH: the label has 1,048,577 bytes; at most 1,048,576 are read"),
    ],
)  # fmt: skip
def test_labels_without_limit_are_refused(size, message, tmp_path):
    label, path = b"a" * size, tmp_path / "a.tar"
    write_tar(path, range(8), files=lambda i: {"png": png(i), "cls": b"b" if i % 2 else label})
    assert message.replace("PATH", str(path)) in error_message(load, path)


def test_long_numbers_are_names(tmp_path):
    files = lambda i: {"png": png(i), "cls": b"b" if i % 2 else b"1" * 30}  # noqa: E731
    write_tar(tmp_path / "a.tar", range(8), files=files)
    assert load(tmp_path / "a.tar").classes == ("1" * 30, "b")
