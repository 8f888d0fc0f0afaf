"""Layouts of folders with images and masks, as data sets are published."""

import unicodedata

import pytest
from data_cases import error_message

from train.data.mask_layouts import FORMATS, Layout, find_layout


def write(root, *files):
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


LAYOUTS = {
    "split folders": (None, "{split}/images/{name}.jpg", "{split}/masks/{name}.png"),
    "kind folders": (None, "images/{split}/{name}.jpg", "masks/{split}/{name}.png"),
    "suffixes": (None, "{split}/images/{name}.jpg", "{split}/masks/{name}_mask.gif"),
    "original CamVid": (None, "{split}/{name}.png", "{split}_labels/{name}_L.png"),
    "ade20k": (FORMATS["ade20k"], "images/{split}/{name}.jpg", "annotations/{split}/{name}.png"),
    "camvid": (FORMATS["camvid"], "{split}/{name}.png", "{split}annot/{name}.png"),
    "cityscapes": (
        FORMATS["cityscapes"],
        "leftImg8bit/{split}/ulm/{name}_leftImg8bit.png",
        "gtFine/{split}/ulm/{name}_gtFine_labelIds.png",
    ),
    "Roboflow": (
        Layout.of("{split}/{name}.jpg", "{split}/{name}_mask.png"),
        *("{split}/{name}.jpg", "{split}/{name}_mask.png"),
    ),
    "folders": (Layout.of("{split}/img", "{split}/m_*"), "{split}/img/{name}.jpg", "{split}/m_1/{name}.png"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_finds_images_with_their_masks(layout, tmp_path):
    given, *files = LAYOUTS[layout]
    for split, names in {"train": ("a", "b"), "val": ("c",), "test": ("d",)}.items():
        for name in names:
            write(tmp_path, *(file.format(split=split, name=name) for file in files))
    write(tmp_path, "gtFine/train/ulm/a_gtFine_color.png", "train.txt")
    found = find_layout(tmp_path, given)
    assert (found.test(None), found.test("test")) == ("val", "test")
    assert found.pairs("train") == [
        tuple(f.format(split="train", name=name) for f in files) for name in "ab"
    ]
    assert found.notes == ("left out 1 files and folders: 1 x .png in gtFine/train/ulm",)
    if layout in FORMATS:
        assert error_message(find_layout, tmp_path).startswith(
            f"data.format: masks in {tmp_path} are not where they are found without an option; give "
            + f"--data.format {layout}, or --data.images" * (layout != "ade20k")
        )


def test_a_name_of_a_list_loses_the_extension_of_an_image_alone(tmp_path):
    write(tmp_path, "images/x.png", "images/y.v1.png", "masks/x.png", "masks/y.v1.png")
    (tmp_path / "train.txt").write_text("y.v1\nx.JPG\n")
    pairs = find_layout(tmp_path).pairs("train")
    assert [image for image, _ in pairs] == ["images/y.v1.png", "images/x.png"]
    (tmp_path / "train.txt").write_text("x.7\n")
    assert error_message(find_layout, tmp_path).startswith("data.path: no image ")


def test_what_is_not_read_is_counted(tmp_path):
    for split in ("train", "val", "test"):
        write(tmp_path, f"{split}/images/a.png", f"{split}/masks/a.png")
    assert find_layout(tmp_path).notes == ()
    (tmp_path / "val" / "masks").rename(tmp_path / "val" / "labels")
    write(tmp_path, "classes.csv", "notes.md")
    found = find_layout(tmp_path)
    kinds = "1 x .md, 1 x .png in val/images, 1 x .png in val/labels"
    assert (found.splits, found.notes) == (
        ["test", "train"],
        (f"left out 3 files and folders: {kinds}",),
    )


TWO_PLACES = {
    "train/a.png train_labels/a.png train_masks/a.png": (
        "'{split}/{name}.*' --data.masks '{split}_labels/{name}.*'",
        "'{split}/{name}.*' --data.masks '{split}_masks/{name}.*'",
    ),
    "train/images/a.png train/masks/a.png images/a.png masks/a.png": (
        "'{split}/images/{name}.*' --data.masks '{split}/masks/{name}.*'",
        "'images/{name}.*' --data.masks 'masks/{name}.*'",
    ),
    "images/a.png masks/a.png masks/a_mask.png": (
        "'images/{name}.*' --data.masks 'masks/{name}.*'",
        "'images/{name}.*' --data.masks 'masks/{name}_mask.*'",
    ),
}


@pytest.mark.parametrize("files", TWO_PLACES)
def test_masks_in_two_places_are_refused_with_the_options_of_both(files, tmp_path):
    write(tmp_path, *files.split())
    first, second = TWO_PLACES[files]
    message = error_message(find_layout, tmp_path)
    assert message.endswith(f"; give --data.images {first}, or --data.images {second}")


def test_patterns_that_match_nothing_are_counted(tmp_path):
    write(tmp_path, "img/a.jpg", "img/b.jpg", "seg/c.png")
    message = error_message(find_layout, tmp_path, Layout.of("img", "seg"))
    assert message.endswith(
        "; 2 files are images img/{name}.*, such as a, and 1 masks seg/{name}.*, such as c; {name} "
        "must be the same in both"
    )
    assert "in both patterns, or in none" in error_message(Layout.of, "{split}/{name}.jpg", "seg")


def test_matches_images_with_masks_in_both_forms_of_unicode(tmp_path):
    image, mask = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    write(tmp_path, f"images/{image}.jpg", f"masks/{mask}.png")
    pairs = find_layout(tmp_path).pairs()
    assert pairs == [(f"images/{image}.jpg", f"masks/{mask}.png")]


def test_names_of_a_split_have_spaces_and_dots(tmp_path):
    for name in ("im 1", "v1.2", "c"):
        write(tmp_path, f"images/{name}.jpg", f"masks/{name}.png")
    (tmp_path / "train.txt").write_text("im 1\nv1.2\n")
    (tmp_path / "val.txt").write_text("c.jpg 1\n")
    pairs = find_layout(tmp_path).pairs("train")
    assert [image for image, _ in pairs] == ["images/im 1.jpg", "images/v1.2.jpg"]
    assert len(find_layout(tmp_path).pairs("val")) == 1


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (("JPEGImages", "SegmentationClass"), "ImageSets/Segmentation/{split}.txt"),
        (("images", "masks"), "{split}.txt"),
    ],
)
def test_files_of_names_split_voc(folders, names, tmp_path):
    images, masks = folders
    write(tmp_path, *(f"{images}/{name}.jpg" for name in "abcd"))
    write(tmp_path, *(f"{masks}/{name}.png" for name in "abc"), names.format(split="train"))
    (tmp_path / names.format(split="train")).write_text("b\na.jpg a.png\n")
    (tmp_path / names.format(split="val")).write_text("c\n")
    found = find_layout(tmp_path, FORMATS["voc"] if images == "JPEGImages" else None)
    assert found.pairs("train") == [
        (f"{images}/b.jpg", f"{masks}/b.png"),
        (f"{images}/a.jpg", f"{masks}/a.png"),
    ]
    assert found.test(None) == "val"
    (tmp_path / names.format(split="val")).write_text("d\n")
    found = find_layout(tmp_path, found.layout)
    assert error_message(found.pairs, "val") == (
        f"data.path: the image {tmp_path / images / 'd.jpg'} has no mask: no file "
        f"{tmp_path / masks / 'd'}.*; add the mask, or move the image to another folder"
    )
    (tmp_path / names.format(split="val")).write_text("x\n")
    assert error_message(find_layout, tmp_path, found.layout) == (
        f"data.path: no image {tmp_path / images / 'x'}.*, which "
        f"{tmp_path / names.format(split='val')} names; give one name, without its folder, on "
        "each line"
    )


def test_a_folder_for_evaluation_needs_no_training_images(tmp_path):
    write(tmp_path, "test/images/a.jpg", "test/masks/a.png")
    assert error_message(find_layout, tmp_path) == (
        f"data.path: no training split {tmp_path}/train/images/*.*; there are test"
    )
    assert find_layout(tmp_path, training=False).test(None) == "test"


def test_voc_without_lists_is_one_split_and_other_lists_are_named(tmp_path):
    write(tmp_path, *(f"JPEGImages/{i}.jpg" for i in range(3)))
    write(tmp_path, *(f"SegmentationClass/{i}.png" for i in range(3)))
    found = find_layout(tmp_path, FORMATS["voc"])
    assert (found.is_split, found.layout.table) == (False, "voc")
    assert len(found.pairs()) == 3
    lists = tmp_path / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    for name in ("trainval", "val"):
        (lists / f"{name}.txt").write_text("0\n")
    assert error_message(find_layout, tmp_path, FORMATS["voc"]) == (
        f"data.path: no training split {lists / 'train.txt'}; there are trainval, val"
    )


def test_refuses_folders_that_hold_no_layout(tmp_path):
    assert error_message(find_layout, tmp_path / "x").startswith(
        f"data.path: {tmp_path / 'x'} does not exist; expected a folder with images and masks"
    )
    write(tmp_path, "photos/a.jpg")
    assert error_message(find_layout, tmp_path).startswith(
        f"data.path: no images with masks in {tmp_path}, which holds photos; expected files *.jpg, "
    )


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (("images/a.jpg", "labels/a.png"), "; give --data.images images --data.masks labels; "),
        (("images/a.jpg", "annotations/i.json"), "annotations/i.json give --data.format coco"),
        (("images/a.jpg",), "; give two patterns for others, as --data.images 'img/{name}.jpg'"),
        (("images/a.jpg", "x/a.png", "y/a.png"), "which holds images, x, y; expected files"),
    ],
    ids=["other name", "COCO", "no masks", "two folders"],
)
def test_says_how_a_folder_could_become_a_layout(tmp_path, files, hint):
    write(tmp_path, *files)
    assert hint in error_message(find_layout, tmp_path)


def test_refuses_a_folder_without_a_test_split(tmp_path):
    write(tmp_path, "train/images/a.jpg", "train/masks/a.png")
    found = find_layout(tmp_path)
    assert error_message(found.test, None) == (
        f"data.path: no split val or test in {tmp_path}; there are train; name another one with "
        "data.test_split, or move all images into images/ and all masks into masks/, so that "
        "data.test_fraction of them are held out"
    )
