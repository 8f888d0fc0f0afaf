"""Images with segmentation masks: the same geometry for both, and errors for invalid pairs."""

import functools

import chex
import numpy as np
import pytest
from data_cases import error_message, take_batches
from image_cases import write_image, write_mask
from PIL import ExifTags, Image

from train.data import evaluation_batches
from train.data.label_map import plain_label_map
from train.data.segmentation_folder import SegmentationFolder


def make_mask(height, width):
    """Make a mask with labels 1 (left), 2 (right) and 0 (top quarter)."""
    labels = np.ones((height, width), np.uint8)
    labels[:, width // 2 :] = 2
    labels[: height // 4] = 0
    return labels


def as_image(labels):
    """Make an image that shows a mask: gray value 100 * label."""
    return Image.fromarray(np.repeat((labels * 100)[..., None], 3, axis=-1))


def write_pair(folder, name, labels):
    write_mask(folder / "masks" / f"{name}.png", labels)
    (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
    as_image(labels).save(folder / "images" / f"{name}.bmp")


@pytest.fixture
def folder(tmp_path):
    for split, n in (("train", 6), ("val", 3)):
        for i in range(n):
            write_pair(tmp_path / split, f"{i:02}", make_mask(24 + 4 * i, 40))
    return tmp_path


def load(path, **options):
    defaults = {"image_size": 20, "classes": 3, "batch_size": 4, "flip": False}
    return SegmentationFolder(path=str(path), **defaults | options).load()


def test_batches_hold_images_and_masks(folder):
    data = load(folder)
    assert data.train["id"].tolist() == list(range(6))
    assert data.test["id"].tolist() == [6, 7, 8]
    assert data.classes == ("0", "1", "2")
    for batch in (take_batches(data, 1)[0][0], next(evaluation_batches(data, 4))):
        kinds = {name: (a.shape, a.dtype.name) for name, a in batch.items() if name != "row"}
        assert kinds == {
            "id": ((4,), "int32"),
            "image": ((4, 20, 20, 3), "uint8"),
            "mask": ((4, 20, 20), "uint8"),
            "weight": ((4,), "float32"),
        }


def far_from_edges(mask, radius):
    """Whether all labels around each pixel [N, H, W] are the same."""
    height, width = mask.shape[1:]
    padded = np.pad(mask, ((0, 0), (radius, radius), (radius, radius)), constant_values=254)
    far = mask != 255
    for y, x in np.ndindex(2 * radius + 1, 2 * radius + 1):
        other = padded[:, y : y + height, x : x + width]
        far &= (other == mask) | (other == 255)
    return far


@pytest.mark.parametrize(
    ("options", "radius"),
    # Interpolation reaches to the next pixel of the image or the canvas, whichever is larger.
    [({}, 2), ({"flip": True}, 2), ({"scale": (0.5, 0.8)}, 1), ({"scale": (2.0, 3.0)}, 3)],
)
def test_scales_crops_and_flips_image_and_mask_alike(folder, options, radius):
    compared = set()
    for batch in take_batches(load(folder, **options), 12)[0]:
        mask, image = batch["mask"], batch["image"]
        assert {*np.unique(mask)} <= {0, 1, 2, 255}
        far = far_from_edges(mask, radius)
        chex.assert_trees_all_equal(image[far], np.repeat(mask[far][:, None] * 100, 3, axis=1))
        assert (image[mask == 255] == (124, 116, 104)).all()  # the mean color
        compared |= {*mask[far].tolist()}
    assert compared >= {1, 2}


def test_flipped_masks_have_left_and_right_exchanged(folder):
    plain, _ = take_batches(load(folder, scale=(1.0, 1.0)), 6)
    batches, _ = take_batches(load(folder, scale=(1.0, 1.0), flip=True), 6)
    sides = [m[m != 255].tolist()[-1] for b in batches for m in b["mask"]]
    assert {*sides} == {1, 2}  # label of the last pixel
    assert {m[m != 255].tolist()[-1] for b in plain for m in b["mask"]} == {2}


def test_random_scales_cover_the_given_range(folder):
    fractions = [
        (mask != 255).any(0).mean()
        for b in take_batches(load(folder, scale=(0.5, 2.0)), 10, 2)[0]
        for mask in b["mask"]
    ]
    assert min(fractions) < 0.6
    assert max(fractions) == 1.0


def test_test_images_fit_the_canvas_and_the_rest_is_ignored(folder):
    batch = next(evaluation_batches(load(folder), 3))
    for i, height in enumerate((24, 28, 32)):
        rows = round(height * 20 / 40)
        mask = batch["mask"][i]
        assert (mask[rows:] == 255).all()
        expected = Image.fromarray(make_mask(height, 40)).resize(
            (20, rows), Image.Resampling.NEAREST
        )
        chex.assert_trees_all_equal(mask[:rows], np.asarray(expected))
        assert (batch["image"][i, rows:] == (124, 116, 104)).all()


def test_color_jitter_leaves_the_canvas_around_the_image(folder):
    options = {"scale": (0.5, 0.5), "color_jitter": 0.4, "lighting": 0.1}
    plain, changed = (
        take_batches(load(folder, **o), 1)[0][0] for o in ({"scale": (0.5, 0.5)}, options)
    )
    chex.assert_trees_all_equal(plain["mask"], changed["mask"])
    outside = plain["mask"] == 255
    chex.assert_trees_all_equal(plain["image"][outside], changed["image"][outside])
    assert (plain["image"] != changed["image"]).any((1, 2, 3)).all()


def test_batches_are_the_same_with_workers_and_after_resuming(folder):
    options = {"flip": True, "color_jitter": 0.2}
    expected, _ = take_batches(load(folder, **options), 6)
    first, batches = take_batches(load(folder, workers=2, **options), 3)
    chex.assert_trees_all_equal(first, expected[:3])
    after = take_batches(load(folder, **options), 3, after=batches.get_state())[0]
    chex.assert_trees_all_equal(after, expected[3:])


def test_a_seed_splits_images_without_split_folders(tmp_path):
    for i in range(10):
        write_pair(tmp_path, f"sub/{i}", make_mask(24 + i, 40))
    sizes = {}
    for seed in (0, 0, 1):
        data = load(tmp_path, test_fraction=0.3, split_seed=seed)
        assert len(data.train["id"]) + len(data.test["id"]) == 10
        heights = [(m[:, 0] != 255).sum() for b in evaluation_batches(data, 3) for m in b["mask"]]
        assert sizes.setdefault(seed, heights) == heights
    assert sizes[0] != sizes[1]
    assert len(load(tmp_path, test_fraction=0.01).test["id"]) == 1
    assert len(load(tmp_path, test_fraction=0.99).train["id"]) == 1


def test_refuses_a_test_folder_for_images_without_split_folders(tmp_path):
    for i in range(4):
        write_pair(tmp_path, f"{i}", make_mask(24, 40))
    assert load_error(tmp_path, test_split="val").startswith(
        f"data.test_split: {tmp_path} is not split into folders, and data.test_fraction"
    )


def test_reads_class_names_from_a_file(folder):
    (folder / "classes.txt").write_text("sky\nleft half\nright half\n\n")
    assert load(folder, classes=None).classes == ("sky", "left half", "right half")
    assert load(folder, classes=3).classes == ("sky", "left half", "right half")


load_error = functools.partial(error_message, load)


def unreadable_reasons(data):
    """Reasons of the examples with weight 0, by id."""
    reasons = {}
    for batch in [*evaluation_batches(data, 3), *take_batches(data, 4, 3)[0]]:
        for id, weight, mask in zip(batch["id"], batch["weight"], batch["mask"], strict=True):
            if weight == 0:
                assert (mask == 255).all()
                reasons[int(id)] = data.explain(id)
    return reasons


def test_skips_invalid_pairs_with_a_reason(folder):
    train, val = folder / "train", folder / "val"
    write_mask(train / "masks" / "01.png", make_mask(24, 40))
    write_mask(train / "masks" / "02.png", np.full((32, 40), 3))
    (train / "images" / "03.bmp").write_bytes(b"")
    (val / "masks" / "00.png").write_bytes(b"no image")
    Image.new("RGB", (40, 28), (1, 2, 3)).save(val / "masks" / "01.png")
    assert unreadable_reasons(load(folder, max_bad_fraction=0.5)) == {
        1: f"{train / 'images' / '01.bmp'}: it is 40 x 28, its mask 40 x 24",
        2: f"{train / 'masks' / '02.png'}: value 3, expected 0 to 2",
        3: f"{train / 'images' / '03.bmp'}: zero bytes",
        6: f"{val / 'masks' / '00.png'}: not an image: no format that Pillow opens",
        7: f"{val / 'masks' / '01.png'}: it has colors, and no class table names them",
    }


def test_refuses_masks_of_another_size_before_training(folder):
    image, mask = folder / "train" / "images" / "01.bmp", folder / "train" / "masks" / "01.png"
    write_mask(mask, make_mask(24, 40))
    assert load_error(folder) == (
        f"data.path: {image} is 40 x 28, its mask 40 x 24; give each mask the size of its image"
    )
    assert load(folder, max_bad_fraction=1 / 6)
    for path in (folder / "train" / "masks").iterdir():
        write_mask(path, make_mask(5, 5))
    assert "its mask 5 x 5; 5 more of 6 pairs differ; give each" in load_error(folder)


def test_says_that_a_rotated_image_needs_a_rotated_mask(folder):
    image = folder / "train" / "images" / "00.bmp"
    image.unlink()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (40, 24)).save(image.with_suffix(".jpg"), exif=exif)
    write_mask(folder / "train" / "masks" / "00.png", make_mask(24, 40))
    assert "00.jpg is 24 x 40, its mask 40 x 24; the image has an EXIF" in load_error(folder)


def test_images_that_are_turned_without_their_masks_are_counted(folder):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    for name in ("01", "02"):
        path = folder / "train" / "images" / f"{name}.bmp"
        Image.open(path).save(path.with_suffix(".jpg"), exif=exif)
        path.unlink()
    mask = folder / "train" / "masks" / "02.png"
    Image.open(mask).save(mask, exif=exif)
    note = (
        "1 of 6 images that were opened have another EXIF orientation than their masks; each is "
        "turned by its own"
    )
    assert [text for text in load(folder).notes if "EXIF" in text] == [note]


def test_masks_of_which_none_can_be_read_say_why(folder):
    for path in folder.glob("**/masks/*.png"):
        values = np.asarray(Image.open(path), np.float32)
        path.unlink()
        Image.fromarray(values).save(path.with_suffix(".tif"))
    message = load_error(folder)
    assert "masks can be read, such as " in message
    assert "00.tif: its mode is F; a mask is a gray" in message


def test_a_format_has_the_layout_and_the_classes_of_published_data(tmp_path):
    for split in ("train", "val"):
        for i in range(2):
            write_image(tmp_path / split / f"{i}.png", i, (40, 24))
            write_mask(tmp_path / f"{split}annot" / f"{i}.png", make_mask(24, 40))
    assert "give --data.format camvid, or --data.images" in load_error(tmp_path, classes=None)
    data = load(tmp_path, classes=None, format="camvid")
    assert (data.classes[0], len(data.classes)) == ("Sky", 11)
    assert data.notes[0].startswith("2 test images are training images or copies of them")
    assert data.notes[1:3] == (
        "2 training masks were looked at, by index: Building 37.5%, Pole 37.5%, Sky 25.0%",
        "no pixel of Road, Pavement, Tree, SignSymbol, Fence and 3 more in the training masks that "
        "were looked at",
    )
    patterns = {"images": "{split}/{name}.png", "masks": "{split}annot/{name}.png"}
    assert load(tmp_path, classes=None, class_table="camvid", **patterns).notes == data.notes
    assert load(tmp_path, classes=3, format="camvid").classes == ("0", "1", "2")
    for wrong in ({"masks": "x"}, patterns | {"format": "camvid"}):
        message = "data.masks: give data.images and data.masks together, without data.format"
        assert load_error(tmp_path, **wrong) == message


def test_other_masks_have_the_classes_of_their_own_table_by_name(folder, tmp_path_factory):
    (folder / "classes.txt").write_text("x\ny\nz\n")
    outputs = load(folder, classes=None).outputs
    other = tmp_path_factory.mktemp("other")
    for i in range(2):
        write_pair(other, f"{i}", make_mask(24, 40))

    def test_masks(**options):
        data = SegmentationFolder(path=str(other), image_size=40, **options)
        data = data.load_test(lambda: outputs)
        mask = next(evaluation_batches(data, 1))["mask"][0]
        return [mask[0, 0], mask[10, 0], mask[10, 39]], [*data.notes[:-1]]

    assert test_masks() == ([0, 1, 2], [])
    (other / "classes.txt").write_text("x\ny\nz\n")
    assert test_masks(classes=3) == ([0, 1, 2], [])
    (other / "classes.txt").write_text("z\nvoid\nx\n")
    assert "has names alone, and its rows do not count as" in error_message(test_masks)
    (other / "classes.txt").write_text("name,value\nz,0\nvoid,1\nx,2\n")
    assert test_masks(classes=3) == ([2, 255, 0], [])
    assert test_masks(class_table="elsewhere.csv") == ([0, 1, 2], [])
    (other / "classes.txt").write_text("x\ny\nw\n")
    words = f"data.path: {other}/classes.txt has the class w, but the run has x, y, z; give it"
    assert error_message(test_masks).startswith(words)
    outputs = outputs._replace(label_map=plain_label_map(("0", "1", "2")))
    note = f"the classes of the run have no names, so that {other}/classes.txt is not used"
    assert test_masks() == ([0, 1, 2], [note])


def test_a_class_table_that_was_given_stays_with_the_folder_of_the_run(folder):
    (folder / "mine.csv").write_text("x\ny\nz\n")
    here = SegmentationFolder(path=str(folder), class_table="mine.csv")
    assert here.for_evaluation({"split": "train"}).class_table == "mine.csv"
    assert here.for_evaluation({"path": str(folder)}).class_table == "mine.csv"
    assert here.for_evaluation({"path": str(folder / "val")}).class_table is None
    given = here.replace(class_table=str(folder / "mine.csv"))
    assert given.for_evaluation({"path": str(folder / "val")}).class_table is None
    voc = here.replace(class_table="voc")
    assert voc.for_evaluation({"path": str(folder / "val")}).class_table is None


def test_masks_ignore_pixels_with_255(folder):
    labels = make_mask(24, 40)
    labels[:, :20] = 255
    write_mask(folder / "val" / "masks" / "00.png", labels)
    assert "give --data.ignore 255 to ignore them" in load_error(folder)
    data = load(folder, ignore=(255,))
    batch = next(evaluation_batches(data, 1))
    assert batch["weight"][0] == 1.0
    assert (batch["mask"][0, :12, :10] == 255).all()
    assert (batch["mask"][0, :12, 10:] != 255).all()
    assert data.explain(6) is None


def test_refuses_images_without_masks_and_masks_without_images(folder):
    write_image(folder / "train" / "images" / "new.png")
    images, masks = folder / "train" / "images", folder / "train" / "masks"
    assert load_error(folder) == (
        f"data.path: the image {images / 'new.png'} has no mask: no file {masks / 'new'}.*; "
        "add the mask, or move the image to another folder"
    )
    (images / "new.png").unlink()
    for i in range(3):
        (images / f"{i:02}.bmp").unlink()
    assert load_error(folder) == (
        f"data.path: the mask {masks / '00.png'} has no image: no file {images / '00'}.*; "
        "nor have 2 others; add the image, or move the mask to another folder"
    )


def test_refuses_two_images_with_the_same_name(folder):
    write_image(folder / "train" / "images" / "02.png")
    assert "02.bmp and train/images/02.png in" in load_error(folder)


def test_refuses_missing_folders(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    assert load_error(empty).startswith(
        f"data.path: no images with masks in {empty}, which holds no folders; expected "
        "files *.jpg, "
    )
    (folder / "val" / "masks").rename(folder / "val" / "labels")
    assert load_error(folder).startswith("data.path: no split val or ")
    assert load_error(folder, test_split="vall") == (
        f"data.test_split: no split vall in {folder}; there are no others"
    )


def test_refuses_scales_in_the_wrong_order(folder):
    assert load_error(folder, scale=(2.0, 0.5)) == "data.scale: 2.0 is more than 0.5"


@pytest.mark.parametrize(
    ("options", "classes"), [({}, 21), ({"classes": 3}, 3), ({"class_table": "camvid"}, 11)]
)
def test_memory_is_predicted_before_the_folder_exists(options, classes):
    missing = SegmentationFolder(path="absent", **options).placeholder()
    assert missing.note == f"no folder absent: {classes} classes are assumed"
    assert len(missing.dataset.classes) == classes
