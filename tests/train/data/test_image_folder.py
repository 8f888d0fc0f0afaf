"""Image folders: classes, batches, augmentation, and errors."""

import functools
import os
import re
import unicodedata

import chex
import numpy as np
import pytest
from data_cases import error_message, sampled_counts, take_batches
from image_cases import color, write_class_folders, write_image
from PIL import Image

from train.config import Clipped, Config, Mlp
from train.data import (
    augment_rows,
    evaluation_batches,
    image_batches,
    labeled_images,
    select_rows,
    training_batches,
)
from train.data.augment import color_jitter, cutout, horizontal_flip, shift
from train.data.image_batches import ImageOptions
from train.data.image_folder import ImageFolder
from train.data.label_map import plain_label_map
from train.data.rand_augment import rand_augment, random_erasing
from train.errors import UserError
from train.run.setup import setup


@pytest.fixture
def folder(tmp_path):
    write_class_folders(tmp_path)
    return tmp_path


def load(path, **options):
    defaults = {"image_size": 8, "batch_size": 4, "crop": "center", "flip": False, "resize": 8}
    return ImageFolder(path=str(path), **defaults | options).load()


def test_each_folder_is_a_class_in_alphabetical_order(folder):
    write_image(folder / "train" / "ape" / "deep" / "deeper" / "x.PNG", 40)
    write_image(folder / "val" / "ape" / "y.jpeg", 40)
    data = load(folder)
    assert data.classes == ("ape", "cat", "dog")
    assert data.train["label"].tolist() == [0] + [1] * 6 + [2] * 6
    assert data.test["label"].tolist() == [0] + [1] * 3 + [2] * 3
    assert data.train["id"].tolist() == list(range(13))
    assert data.test["id"].tolist() == list(range(13, 20))


def test_follows_links_but_not_in_circles(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write_image(elsewhere / "more" / "z.png")
    (folder / "train" / "cat" / "linked").symlink_to(elsewhere / "more")
    (folder / "train" / "cat" / "circle").symlink_to(folder / "train" / "cat")
    (folder / "val" / "dog" / "z.png").symlink_to(elsewhere / "more" / "z.png")
    data = load(folder)
    assert (len(data.train["id"]), len(data.test["id"])) == (13, 7)


def test_the_test_folder_is_val_then_test_or_the_given_one(folder):
    write_class_folders(folder / "other", train=2, test=4)
    (folder / "other" / "val").rename(folder / "test")
    assert len(load(folder).test["id"]) == 6
    assert len(load(folder, test_split="test").test["id"]) == 4
    (folder / "val").rename(folder / "kept")
    assert len(load(folder).test["id"]) == 4
    assert len(load(folder, test_split="kept").test["id"]) == 6


def test_batches_have_the_images_of_their_ids(folder):
    data = load(folder)
    by_id = [2 * i for i in range(6)] + [2 * i + 1 for i in range(6)]  # cats, then dogs
    for batch in take_batches(data)[0]:
        chex.assert_shape(batch["image"], (4, 8, 8, 3))
        assert batch["image"].dtype == np.uint8
        assert batch["weight"].tolist() == [1.0] * 4
        assert (batch["label"] == batch["id"] // 6).all()
        for image, id in zip(batch["image"], batch["id"], strict=True):
            assert (image == color(by_id[id])).all()


def test_evaluation_gives_every_image_once_and_pads(folder):
    batches = list(evaluation_batches(load(folder), 4))
    assert [b["weight"].tolist() for b in batches] == [[1.0] * 4, [1.0, 1.0, 0.0, 0.0]]
    ids = np.concatenate([b["id"][b["weight"] > 0] for b in batches])
    assert ids.tolist() == list(range(12, 18))
    assert (batches[0]["image"][0] == color(0)).all()


def test_test_images_are_resized_and_center_cropped(tmp_path):
    write_class_folders(tmp_path, size=(40, 20))
    image = next(evaluation_batches(load(tmp_path, image_size=14, resize=None), 2))["image"]
    chex.assert_shape(image, (2, 14, 14, 3))
    ten = next(evaluation_batches(load(tmp_path, image_size=14, resize=16, crops=10), 2))["image"]
    chex.assert_shape(ten, (2, 10, 14, 14, 3))
    chex.assert_trees_all_equal(ten[:, 4], image)


def test_classes_that_are_balanced_twice_are_told(folder):
    once = load(folder, balanced=True).notes + load(folder, class_weights="balanced").notes
    assert "rare classes" not in "".join(once)
    twice = load(folder, balanced=True, class_weights="balanced").notes
    assert any(note.startswith("rare classes count twice: ") for note in twice)


def test_a_small_middle_of_test_images_is_noted(folder):
    *_, note = load(folder, image_size=8, resize=32).notes
    assert note.startswith("only the middle 6% of each test image is seen: data.resize 32 is much")
    for resize in (10, None):
        assert "the middle" not in "".join(load(folder, image_size=8, resize=resize).notes)


def test_evaluation_at_another_size_shows_as_much_of_an_image():
    data = ImageFolder(image_size=224, resize=256)
    assert data.for_evaluation({"image_size": 112}).shorter_side == 128
    assert data.for_evaluation({"image_size": 112, "resize": 200}).shorter_side == 200
    assert ImageFolder(image_size=224).for_evaluation({"image_size": 112}).shorter_side == 128


def test_ten_crops_extend_into_a_reflected_border(folder):
    for i, path in enumerate(sorted(folder.glob("val/*/*"))):
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    plain = next(evaluation_batches(load(folder, crops=1), 2))["image"]
    ten = next(evaluation_batches(load(folder, crops=10, border=1), 2))["image"]
    chex.assert_trees_all_equal(ten[:, 4], plain)
    chex.assert_trees_all_equal(ten[:, 0, 1:, 1:], plain[:, :-1, :-1])  # shifted by one pixel
    chex.assert_trees_all_equal(ten[:, 0, 0, 1:], plain[:, 1, :-1])  # and reflected at the edge
    chex.assert_trees_all_equal(ten[:, 5:], ten[:, :5, :, ::-1])
    message = "data.border: 1, but only ten-crop uses a border; give data.crops 10"
    assert message in load_error(folder, crops=2, border=1)


AUGMENTATION = {
    "crop": "resized",
    "flip": True,
    "color_jitter": 0.4,
    "lighting": 0.1,
    "cutout": 3,
    "mixup": 0.2,
}


@pytest.mark.parametrize("crop", ["resized", "padded", "reflected", "center"])
def test_augmentation_preserves_shapes_and_dtypes(folder, crop):
    batch = take_batches(load(folder, **AUGMENTATION | {"crop": crop}), 1)[0][0]
    chex.assert_tree_shape_prefix(batch, (4,))
    chex.assert_shape(batch["image"], (4, 8, 8, 3))
    kinds = {name: a.dtype.name for name, a in batch.items()}
    assert kinds == {
        "row": "int32",
        "id": "int32",
        "label": "int32",
        "image": "uint8",
        "weight": "float32",
        "label_2": "int32",
        "mix": "float32",
    }


def test_augmentation_differs_between_epochs(tmp_path):
    rng = np.random.default_rng(0)
    write_class_folders(tmp_path, train=4)
    for path in (tmp_path / "train").rglob("*.png"):
        Image.fromarray(rng.integers(0, 256, (10, 12, 3), np.uint8)).save(path)
    first, second = (
        dict(zip(b["id"], b["image"], strict=True))
        for b in take_batches(load(tmp_path, crop="padded"), 2)[0]
    )
    assert {*first} == {*second}
    assert any((first[i] != second[i]).any() for i in first)


def test_batches_resume_at_a_saved_position_with_any_number_of_workers(folder):
    before, batches = take_batches(load(folder, workers=2, **AUGMENTATION), 5)
    position = batches.get_state()
    more = [next(batches) for _ in range(4)]
    chex.assert_trees_all_equal(
        take_batches(load(folder, workers=2, **AUGMENTATION), 4, after=position)[0], more
    )
    chex.assert_trees_all_equal(
        take_batches(load(folder, **AUGMENTATION), 4, after=position)[0], more
    )
    assert not np.array_equal(more[0]["image"], before[0]["image"])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("options", [{}, {"workers": 1}, {"crops": 10, "resize": 10}])
def test_cached_images_equal_read_images(folder, options):
    (folder / "train" / "cat" / "004.png").write_bytes(b"")
    options |= AUGMENTATION | {"crop": "reflected"}
    read, cached = load(folder, **options), load(folder, cache=True, **options)
    chex.assert_trees_all_equal(take_batches(cached)[0], take_batches(read)[0])
    expected = list(evaluation_batches(read, 4))
    chex.assert_trees_all_equal(list(evaluation_batches(cached, 4)), expected)
    for path in folder.rglob("*.png"):
        path.unlink()
    chex.assert_trees_all_equal(list(evaluation_batches(cached, 4)), expected)
    take_batches(cached, 12)
    assert (next(training_batches(cached, 12, 0))["weight"] == 0).sum() == 1


def test_another_seed_gives_other_batches(folder):
    data = load(folder)
    assert any(
        (a["id"] != b["id"]).any()
        for a, b in zip(take_batches(data)[0], take_batches(data, seed=1)[0], strict=True)
    )


def test_pads_poisson_batches_even_without_a_sampled_example(folder):
    weights = sampled_counts(load(folder, **AUGMENTATION), image=(8, 8, 3))
    assert min(weights) == 0 < max(weights)


def test_unreadable_images_have_weight_0_the_mean_color_and_a_reason(folder):
    path = folder / "train" / "cat" / "004.png"
    path.write_bytes(path.read_bytes()[:45])
    data = load(folder, mean=(0.2, 0.4, 0.6))
    bad = 2  # the third cat
    for batch in take_batches(data)[0]:
        assert (batch["weight"] == (batch["id"] != bad)).all()
        assert (batch["image"][batch["id"] == bad] == (51, 102, 153)).all()
    assert re.fullmatch(re.escape(str(path)) + ": .*truncated.*", data.explain(bad))
    assert data.explain(0) is None
    (folder / "val" / "dog" / "005.png").write_bytes(b"")
    assert data.explain(17) == f"{folder / 'val' / 'dog' / '005.png'}: zero bytes"


load_error = functools.partial(error_message, load)


@pytest.mark.parametrize("inner", ["", "train"])
def test_holds_out_a_fraction_of_each_class_without_a_test_folder(tmp_path, inner):
    for i in range(20):
        write_image(tmp_path / inner / ("cat" if i < 15 else "dog") / f"{i:02}.png", i)
    data = load(tmp_path, test_fraction=0.2, split_seed=3)
    train, test = ([data.name(i) for i in split["id"]] for split in (data.train, data.test))
    assert sorted(train + test) == sorted(map(str, tmp_path.rglob("*.png")))
    assert all(np.bincount(data.test["label"], minlength=2) >= 1)
    assert [*data.train["label"], *data.test["label"]] == [
        ("cat", "dog").index(name.split("/")[-2]) for name in train + test
    ]
    (note,) = data.notes
    assert note.endswith(f"{len(test)} of 20 images are held out for testing (data.test_fraction)")
    again, other = (load(tmp_path, split_seed=seed) for seed in (3, 4))
    assert [again.name(i) for i in again.test["id"]] == test
    assert [other.name(i) for i in other.test["id"]] != test


def test_one_more_image_moves_no_other(tmp_path):
    for i in range(60):
        write_image(tmp_path / "data" / ("cat" if i < 45 else "dog") / f"{i:02}é.png", i)
    before = load(tmp_path / "data", split_seed=3)
    write_image(tmp_path / "data" / "cat" / "-first.png", 60)
    for path in (tmp_path / "data" / "dog").iterdir():  # as a Mac writes it
        path.rename(path.with_name(unicodedata.normalize("NFD", path.name)))
    (tmp_path / "data").rename(tmp_path / "moved")
    after = load(tmp_path / "moved", split_seed=3)

    def test_names(data):
        names = (unicodedata.normalize("NFC", data.name(i)) for i in data.test["id"])
        return {name.partition("/cat/")[2] or name.partition("/dog/")[2] for name in names}

    assert test_names(after) - {"-first.png"} == test_names(before)


def test_tells_of_a_folder_beside_the_training_images(tmp_path):
    for split in ("train", "eval"):
        for name in ("cat", "dog"):
            for i in range(3):
                write_image(tmp_path / split / name / f"{i}.png", i)
    assert load(tmp_path).notes[0].endswith("; eval next to train is not read: data.test_split")
    assert len(load(tmp_path, test_split="eval").test["label"]) == 6


def test_matches_class_folders_in_both_forms_of_unicode(tmp_path):
    for split, form in (("train", "NFD"), ("val", "NFC")):
        for i, name in enumerate(("café", "thé")):
            write_image(tmp_path / split / unicodedata.normalize(form, name) / "a.png", i)
    data = load(tmp_path)
    assert data.classes == tuple(unicodedata.normalize("NFD", name) for name in ("café", "thé"))
    assert data.test["label"].tolist() == [0, 1]
    write_image(tmp_path / "train" / "café" / "b.png", 3)
    assert "are called café, in two forms of Unicode; rename one" in load_error(tmp_path)


def test_counts_files_that_are_left_out(folder):
    cat = folder / "train" / "cat"
    (cat / "Thumbs.db").write_text("")
    (cat / "notes.txt").write_text("")
    (folder / "val" / "cat" / "notes.txt").write_text("")
    os.mkfifo(cat / "pipe.jpg")
    (cat / "loop.png").symlink_to("loop.png")
    for name, folder_above in (("again", cat), ("all", folder)):
        (cat / name).symlink_to(folder_above)
    data = load(folder)
    assert len(data.train["id"]) == 12
    assert data.notes[0] == (
        "left out 7 files and folders: 2 x .txt, 1 x Thumbs.db, 3 x link to itself, "
        "1 x pipe, socket or device"
    )
    assert data.notes[1].startswith("6 test images are training images or copies of them, such as ")


def trained(*classes):
    return lambda: plain_label_map(classes)


def test_loads_test_images_for_a_trained_network(folder, tmp_path_factory):
    config = ImageFolder(path=str(folder), image_size=8, test_split="train")
    data = config.load_test(trained("cat", "cow", "dog"))
    assert (len(data.train["id"]), len(data.test["id"])) == (1, 12)
    assert {*data.test["label"].tolist()} == {0, 2}  # as the network knows them
    other = tmp_path_factory.mktemp("other")
    for i in range(4):
        write_image(other / "dog" / f"{i}.png", i)
    config = ImageFolder(path=str(other), image_size=8)
    data = config.load_test(trained("cat", "dog"))
    assert data.test["label"].tolist() == [1] * 4
    assert len(next(evaluation_batches(data, 4))["image"]) == 4
    message = error_message(config.load_test, trained("cat", "cow"))
    assert message.startswith(f"data.path: the network knows no class dog, a folder of {other};")


BOTH = ("train/cat/a.png", "train/dog/a.png", "val/cat/a.png", "val/dog/a.png")
NONE = [f"{split}/{name}/" for split in ("train", "val") for name in "abcdefg"]
REFUSED = {
    "no folder": (("other/",), {"path": "nowhere"}, "data.path: ROOT/nowhere does not exist; expected a folder with one folder per class, or train/ and val/ or test/ that hold them; for a table give data.source image_table"),
    "a file": (("file",), {"path": "file"}, "data.path: ROOT/file is not a folder"),
    "nothing": ((), {}, "data.path: no folders in ROOT, which are the classes"),
    "one class": (("train/cat/a.png",), {}, "data.path: ROOT/train has only the class cat; give images of two or more"),
    "another split": (("train/cat/a.png", "valid/"), {"test_split": "vald"}, "data.test_split: no split vald in ROOT (did you mean valid?); there are valid"),
    "the training split": (("train/cat/a.png", "valid/"), {"test_split": "train"}, "data.test_split: train in ROOT is the training split; there are valid"),
    "one image": (("cat/1.png", "cat/2.png", "dog/3.png"), {}, "data.test_fraction: 0.2 needs two or more examples of each class, got only dog/3.png, which cannot be both trained and tested on"),
    "names of splits": (("Train/cat/a.png", "Valid/cat/a.png"), {}, "data.path: no folder ROOT/train"),
    "not UTF-8": (("cat/a.png", os.fsdecode(b"d\xf6g/a.png")), {}, "is not UTF-8; rename it"),
    "no class": (("train/0.png", "train/1.png", "train/2.png", "val/"), {}, "data.path: no folders in ROOT/train, which are the classes; its 3 images belong in one folder per class; for a table of their labels give data.source image_table"),
    "an empty class": ((*BOTH, "train/empty/a.txt", "val/empty/"), {}, "data.path: no image of a class in ROOT/train/empty; expected files *.jpg, *.png, *.webp or others that Pillow opens"),
    "no image": (NONE, {}, "data.path: no image in ROOT/train/a, ROOT/train/b, ROOT/train/c, ROOT/train/d, ROOT/train/e and 2 more; expected files *.jpg"),
    "other classes": ((*BOTH, *(f"train/new{i}/a.png" for i in range(9)), "val/old/a.png"), {}, "data.path: the classes differ: only in ROOT/train: new0, new1, new2, new3, new4 and 4 more; only in ROOT/val: old"),
    "a large crop": (BOTH, {"image_size": 9}, "data.resize: 8 is less than data.image_size 9"),
    "crops in a cache": (BOTH, {"cache": True, "crop": "resized"}, "data.cache: resized crops decode each image again"),
    "padding": (BOTH, {"crop": "padded", "padding": 8}, "data.padding: 8 pixels can shift images of 8 x 8 out of view; give fewer"),
    "reflection": (BOTH, {"crop": "reflected", "padding": 8}, "data.padding: 8 pixels can shift images of 8 x 8 out of view; give fewer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_in_one_line(name, tmp_path):
    files, options, message = REFUSED[name]
    for i, file in enumerate(files):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith("/"):
            path.mkdir(exist_ok=True)
        elif file.endswith(".png"):
            write_image(path, i)
        else:
            path.write_text("no image")
    options = dict(options)
    given = load_error(tmp_path / options.pop("path", ""), **options)
    assert message.replace("ROOT", str(tmp_path)) in given
    assert message.startswith("is not UTF-8") or given.startswith(message.partition(" ")[0])


@pytest.mark.parametrize("crop", ["padded", "reflected"])
def test_padding_may_be_a_pixel_less_than_the_image(folder, crop):
    load(folder, crop=crop, padding=7)


def test_explains_a_test_image_at_the_size_of_evaluation(folder):
    Image.new("L", (1, 1500)).save(folder / "val" / "cat" / "thin.png")
    data = load(folder, image_size=224, resize=256)
    (thin,) = [i for i in data.test["id"].tolist() if "thin" in data.name(i)]
    assert "1 x 1500 pixels become 256 x 384000, more than" in data.explain(thin)


def test_reads_images_with_the_options_of_the_config():
    config = ImageFolder(
        image_size=16, crop="reflected", min_area=0.25, padding=3, flip=False, color_jitter=0.2,
        lighting=0.3, cutout=5, mean=(0.1, 0.2, 0.8), rand_augment=2, magnitude=7,
        random_erasing=0.25, max_pixels=1000, mixup=0.1, crops=10, border=1, workers=3,
    )  # fmt: skip
    options = ImageOptions.of(config, resize=config.shorter_side)
    for name, value in vars(options).items():
        if name != "scale":  # of images with masks
            assert value == (18 if name == "resize" else getattr(config, name))
    assert options.fill == (26, 51, 204)


NO_AUGMENTATION = {"image_size": 8, "padding": 2, "mean": (1 / 255, 2 / 255, 3 / 255)}


SINGLE_AUGMENTATIONS = {
    "center": ({}, lambda image, draws: image),
    "padded": ({"crop": "padded"}, lambda image, draws: shift(image, draws["shift"], 2, reflect=False)),
    "reflected": ({"crop": "reflected"}, lambda image, draws: shift(image, draws["shift"], 2, reflect=True)),
    "flip": ({"flip": True}, lambda image, draws: horizontal_flip(image, draws["flip"])),
    "color_jitter": ({"color_jitter": 0.4}, color_jitter),
    "lighting": ({"lighting": 0.1}, color_jitter),
    "cutout": ({"cutout": 3}, lambda image, draws: cutout(image, draws["cutout"], 3, np.array([1, 2, 3]))),
    "rand_augment": ({"rand_augment": 2, "magnitude": 20}, lambda image, draws: rand_augment(image, draws["operations"], 20)),
    "erasing": ({"random_erasing": 0.5}, lambda image, draws: random_erasing(image, draws["erasing"], 0.5, np.array([1, 2, 3]))),
}  # fmt: skip


@pytest.mark.parametrize("name", SINGLE_AUGMENTATIONS)
def test_each_option_applies_its_augmentation(name):
    options, expected = SINGLE_AUGMENTATIONS[name]
    images = ImageOptions(**NO_AUGMENTATION | options)
    draws = images.draw(16, np.random.default_rng(0))
    image = np.random.default_rng(1).integers(0, 256, (16, 8, 8, 3), np.uint8)
    augmented = images.augment(image.copy(), draws)
    chex.assert_trees_all_equal(augmented, expected(image.copy(), draws))
    assert (augmented != image).any() == (name != "center")


def test_refuses_balanced_classes_with_privacy(folder):
    data = ImageFolder(path=str(folder), image_size=8, batch_size=2, balanced=True)
    grad = Clipped(noise_multiplier=1.0, delta=1e-3)
    for other in ({}, {"repeats": 2}, {"class_weights": "balanced"}):
        given = data.replace(balanced=not other, **other)
        with pytest.raises(UserError, match=f"data.{[*other, 'balanced'][0]}: .* depends on all"):
            setup(Config(data=given, model=Mlp(hidden=(4,)), grad=grad))


def test_draws_balanced_classes_and_repeats_from_a_folder(tmp_path):
    for i in range(9):
        write_image(tmp_path / ("dog" if i % 4 == 0 else "cat") / f"{i}.png", i)
    data = load(tmp_path, balanced=True, repeats=2, test_fraction=0.3, max_bad_fraction=0.0)
    batches, _ = take_batches(data, 3)
    for batch in batches:
        assert np.bincount(batch["label"]).tolist() == [2, 2]
        assert (batch["id"][::2] == batch["id"][1::2]).all()
    assert load(tmp_path).order is None


def test_mixup_gets_its_strength_from_the_config(tmp_path, monkeypatch):
    alphas, draw = [], labeled_images.draw_mixup
    monkeypatch.setattr(
        labeled_images,
        "draw_mixup",
        lambda n, alpha, g, cutmix: alphas.append((alpha, cutmix)) or draw(n, alpha, g, cutmix),
    )
    write_class_folders(tmp_path, train=4, test=2)
    options = {"image_size": 8, "resize": 8, "mixup": 0.3, "cutmix": 0.5}
    next(training_batches(ImageFolder(path=str(tmp_path), **options).load(), 4, 0))
    assert {*alphas} == {(0.3, 0.5)}


@pytest.mark.parametrize("options", [{}, {"mixup": 0.4}, {"crop": "padded", "cache": True}])
def test_a_process_reads_its_rows_of_the_same_batch(options, tmp_path, monkeypatch):
    write_class_folders(tmp_path, train=32, test=4)
    config = ImageFolder(path=str(tmp_path), image_size=8, resize=8, color_jitter=0.4, **options)
    decoded, decode = [], image_batches.decode
    monkeypatch.setattr(
        image_batches, "decode", lambda *args: decoded.append(args) or decode(*args)
    )
    local = np.arange(16) >= 14
    data = config.load()
    batch = augment_rows(
        data, select_rows(data.train, np.arange(16)) | {"local": local}, np.random.default_rng(0)
    )
    # Threads of batches read ahead: here there are none yet, but those of other tests.
    own = [args for args in decoded if str(args[0]).startswith(str(tmp_path))]
    assert 2 <= len(own) <= (4 if "mixup" in options else 2)
    whole, _ = take_batches(config.load(), n=2, size=16)
    assert set(batch) == set(whole[0])
    batches = training_batches(data, 16, 0, local)
    for expected in whole:
        batch = next(batches)
        for name in expected:
            chex.assert_trees_all_equal(batch[name][local], expected[name][local])
