"""Masks from outlines: COCO, labelme and YOLO."""

import base64
import io
import json
import unicodedata

import chex
import numpy as np
import pytest
from data_cases import error_message
from image_cases import write_image, write_mask
from PIL import Image

from train.data import Outputs, evaluation_batches
from train.data.annotated import AnnotatedImage
from train.data.annotations import find_annotations
from train.data.decode import UnreadableError
from train.data.drawings import Drawing, Shape, decode_runs, fill_polygon, fill_runs, read_mask
from train.data.segmentation_folder import SegmentationFolder

SIZE = 16
BOXES = (
    "a mask needs outlines: export polygons or RLE from the tool, or masks from a model such as SAM"
)
SQUARE = [2, 1, 6, 1, 6, 4, 2, 4]
# pycocotools 2.0.11: encode() of a mask [7, 9] with 1 at [1:4, 2:6], [5, 7] and [0, 0].
RUNS = "01>2F00000;NI"
EXPECTED = np.zeros((7, 9), bool)
EXPECTED[1:4, 2:6] = EXPECTED[5, 7] = EXPECTED[0, 0] = True


def test_runs_are_those_of_pycocotools():
    np.testing.assert_array_equal(fill_runs(decode_runs(RUNS), 7, 9), EXPECTED)
    with pytest.raises(ValueError, match="is in no run-length code"):
        decode_runs("0 1")
    with pytest.raises(UnreadableError, match="runs of 3 pixels, but the image has 9 x 7 pixels"):
        fill_runs((1, 2), 7, 9)


def test_polygons_cover_the_pixels_whose_center_is_inside():
    square = np.reshape(SQUARE, (-1, 2)).astype(float)
    expected = np.zeros((7, 9), bool)
    expected[1:4, 2:6] = True
    np.testing.assert_array_equal(fill_polygon(square, 7, 9), expected)
    np.testing.assert_array_equal(fill_polygon(square[::-1], 7, 9), expected)
    np.testing.assert_array_equal(fill_polygon(square - 100, 7, 9), np.zeros((7, 9)))
    assert fill_polygon(np.array([[-5, -5], [50, -5], [50, 50], [-5, 50.0]]), 7, 9).all()


def test_polygons_equal_a_test_of_each_point():
    from matplotlib.path import Path

    generator = np.random.default_rng(0)
    centers = np.stack(np.meshgrid(np.arange(20) + 0.5, np.arange(15) + 0.5), -1).reshape(-1, 2)
    for _ in range(50):
        angles = np.sort(generator.uniform(0, 2 * np.pi, 7))
        around = np.stack([np.cos(angles), np.sin(angles)], 1)
        polygon = (10, 7) + around * generator.uniform(2, 9, (7, 1))
        inside = Path(polygon).contains_points(centers).reshape(15, 20)
        np.testing.assert_array_equal(fill_polygon(polygon, 15, 20), inside)


def test_the_smaller_object_is_on_top():
    def square(size):
        return np.array([[0, 0], [size, 0], [size, size], [0, size]], float)

    for order in ((0, 1), (1, 0)):
        shapes = [Shape(5, (square(4),)), Shape(7, (square(2),))]
        drawing = Drawing("a.json", 6, 6, tuple(shapes[i] for i in order))
        values = read_mask(drawing, 100).values
        assert (values[:2, :2] == 7).all()
        assert np.bincount(values.ravel()).tolist() == [20, 0, 0, 0, 0, 12, 0, 4]
    with pytest.raises(UnreadableError, match="6 x 6 pixels are more"):
        read_mask(drawing, 35)


def coco(images, annotations, categories=((3, "cat"), (9, "dog"))):
    return {
        "images": [
            {"id": 7 + i, "file_name": name, "width": SIZE, "height": SIZE}
            for i, name in enumerate(images)
        ],
        "annotations": [
            {"id": i, "image_id": 7 + image, "category_id": category, "segmentation": segmentation}
            for i, (image, category, segmentation) in enumerate(annotations)
        ],
        "categories": [{"id": id, "name": name} for id, name in categories],
    }


def write_coco(root):
    """Write train2017 and val2017 as COCO has them; the first object is a half, in runs."""
    runs = {"size": [SIZE, SIZE], "counts": [0, SIZE * SIZE // 2, SIZE * SIZE // 2]}
    for split, n in (("train2017", 4), ("val2017", 2)):
        names = [f"{i}.png" for i in range(n)]
        for i, name in enumerate(names):
            write_image(root / split / name, i, (SIZE, SIZE))
        objects = [(i, 9, [SQUARE]) for i in range(n - 1)]
        content = coco(names, [(0, 3, runs), *objects])
        path = root / "annotations" / f"instances_{split}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        (path.parent / f"captions_{split}.json").write_text("{}")


def load(root, format, **options):
    config = SegmentationFolder(path=str(root), format=format, image_size=SIZE, **options)
    return config.load()


def test_coco_with_its_splits_ids_and_runs(tmp_path):
    write_coco(tmp_path)
    data = load(tmp_path, "coco")
    assert data.classes == ("background", "cat", "dog")
    assert data.label_map.mask_values().tolist() == [0, 3, 9]  # the ids are the values of masks
    (batch,) = evaluation_batches(data, 2)
    assert batch["weight"].tolist() == [1, 1]
    first, second = batch["mask"]
    # the cat is the left half, in runs, with the dog on it, a square of 12 pixels
    assert np.bincount(first.ravel()).tolist() == [128, 116, 12]
    assert not first[:, 8:].any()
    assert (first[1:4, 2:6] == 2).all()
    assert not second.any()  # an image without objects


def test_another_folder_for_a_trained_network_has_the_values_of_its_names(tmp_path):
    write_coco(tmp_path)
    trained = load(tmp_path, "coco").outputs
    path = tmp_path / "annotations" / "instances_val2017.json"
    other = json.loads(path.read_text())
    swapped = {3: "dog", 9: "cat"}
    other["categories"] = [{"id": id, "name": name} for id, name in swapped.items()]
    path.write_text(json.dumps(other))
    config = SegmentationFolder(path=str(tmp_path), format="coco", image_size=SIZE)
    (batch,) = evaluation_batches(config.load_test(lambda: trained), 2)
    assert np.bincount(batch["mask"][0].ravel()).tolist() == [128, 12, 116]
    other["categories"][0]["name"] = "cow"
    path.write_text(json.dumps(other))
    message = error_message(config.load_test, lambda: trained)
    assert message.startswith("data.path: the network knows no class cow")
    assert Outputs(*trained).names == ("background", "cat", "dog")


def test_coco_with_other_categories_and_names_in_another_form_of_unicode(tmp_path):
    write_coco(tmp_path)
    path = tmp_path / "annotations" / "instances_val2017.json"
    other = json.loads(path.read_text())
    names = {category["id"]: category["name"] for category in other["categories"]}
    assert names == {3: "cat", 9: "dog"}
    # dog has the id that cat has in the other file
    other["categories"] = [{"id": 1, "name": "cow"}, {"id": 3, "name": "dog"}]
    for annotation in other["annotations"]:
        annotation["category_id"] = 3
    for image in other["images"]:
        file = tmp_path / "val2017" / image["file_name"]
        file = file if file.is_file() else next(tmp_path.glob(f"**/{image['file_name']}"))
        file.rename(file.with_name(unicodedata.normalize("NFD", f"é{file.name}")))
        image["file_name"] = unicodedata.normalize("NFC", f"é{image['file_name']}")
    path.write_text(json.dumps(other))
    data = load(tmp_path, "coco")
    assert {*data.classes} == {"background", "cat", "dog", "cow"}
    assert data.label_map.mask_values().tolist() == [0, 1, 3, 9]
    (batch,) = evaluation_batches(data, 2)
    assert batch["weight"].tolist() == [1, 1]
    assert np.unique(batch["mask"][0]).tolist() == [0, data.classes.index("dog")]


@pytest.mark.parametrize("name", ["Void", "unlabeled", "__ignore__", "Background"])
def test_names_of_ignored_pixels_and_of_the_background_are_no_classes(tmp_path, name):
    write_coco(tmp_path)
    for path in (tmp_path / "annotations").glob("*.json"):
        path.write_text(path.read_text().replace('"dog"', json.dumps(name)))
    data = load(tmp_path, "coco")
    assert data.classes == ("background", "cat")
    config = SegmentationFolder(path=str(tmp_path), format="coco", image_size=SIZE)
    (batch,) = evaluation_batches(config.load_test(lambda: data.outputs), 2)
    (own,) = evaluation_batches(data, 2)
    chex.assert_trees_all_equal(batch["mask"], own["mask"])
    assert (batch["mask"][0] == 255).sum() == (0 if name == "Background" else 12)


@pytest.mark.parametrize("format", ["coco", "labelme", "yolo"])
def test_masks_of_a_trained_network_are_read_without_annotations(tmp_path, format):
    write_coco(tmp_path / "coco")
    trained = load(tmp_path / "coco", "coco").outputs
    mask = np.full((SIZE, SIZE), 3, np.uint8)
    mask[0] = 9
    for i in range(2):
        write_image(tmp_path / "fed" / "images" / f"{i}.png", i, (SIZE, SIZE))
        write_mask(tmp_path / "fed" / "masks" / f"{i}.png", mask)
    (tmp_path / "fed" / "predictions.json").write_text("[]")
    config = SegmentationFolder(path=str(tmp_path / "fed"), format=format, image_size=SIZE)
    data = config.load_test(lambda: trained)
    (batch,) = evaluation_batches(data, 2)
    assert np.bincount(batch["mask"].ravel()).tolist() == [0, 2 * SIZE * (SIZE - 1), 2 * SIZE]
    assert "its masks are read as images" in data.notes[0]
    assert "no annotations in the format" in error_message(config.load)


def test_labelme(tmp_path):
    for i in range(6):
        write_image(tmp_path / f"{i}.png", i, (SIZE, SIZE))
        shapes = [
            {"label": "leaf", "points": np.reshape(SQUARE, (-1, 2)).tolist()},
            {"label": "bud", "shape_type": "circle", "points": [[10, 10], [10, 13]]},
            {"label": "__ignore__", "shape_type": "polygon", "points": [[0, 15], [9, 15], [4, 16]]},
        ]
        content = {"imagePath": f"{i}.png", "imageHeight": SIZE, "imageWidth": SIZE}
        (tmp_path / f"{i}.json").write_text(json.dumps(content | {"shapes": shapes}))
    write_image(tmp_path / "other.png", 9, (SIZE, SIZE))
    data = load(tmp_path, "labelme")
    assert data.classes == ("background", "bud", "leaf")
    assert data.notes == (
        f"{tmp_path} has no splits: 1 of 6 images are held out for testing (data.test_fraction)",
        "1 images that no annotations name are left out: other.png",
        "5 training masks were looked at, by index: background 81.2%, bud 12.5%, leaf 4.7%, ignored 1.6%",
        "1 test masks were looked at, by index: background 81.2%, bud 12.5%, leaf 4.7%, ignored 1.6%",
    )
    (batch,) = evaluation_batches(data, len(data.test["id"]))
    count = np.bincount(batch["mask"][0].ravel(), minlength=256)
    assert count[2] == 12
    assert abs(count[1] - np.pi * 9) < 4
    assert count[255] > 0


def test_yolo(tmp_path):
    (tmp_path / "data.yaml").write_text("names: {0: car, 1: bus}\nnc: 2\n")
    for split, n in (("train", 4), ("val", 2)):
        for i in range(n):
            write_image(tmp_path / "images" / split / f"{i}.png", i, (SIZE, SIZE))
            labels = tmp_path / "labels" / split / f"{i}.txt"
            labels.parent.mkdir(parents=True, exist_ok=True)
            lines = ["0 0 0 0.5 0 0.5 1 0 1", f"1 {' '.join(str(x / SIZE) for x in SQUARE)}"]
            labels.write_text("\n".join(lines) if i == 0 else "")
    (tmp_path / "labels" / "train" / "3.txt").rename(tmp_path / "labels" / "train" / "03.txt")
    data = load(tmp_path, "yolo")
    assert data.classes == ("background", "car", "bus")
    lost = tmp_path / "labels" / "train" / "03.txt"
    assert data.notes[:3] == (
        f"labels whose image is missing or in no split are left out: {lost}",
        "images without labels are background: images/train/3.png",
        "images of each split: train 4, val 2",
    )
    (batch,) = evaluation_batches(data, 2)
    assert np.bincount(batch["mask"][0].ravel()).tolist() == [128, 116, 12]


def write_yolo(root, names):
    (root / "classes.txt").write_text("car\n")
    for name in names:
        write_image(root / "images" / f"{name}.png", 0, (SIZE, SIZE))
        labels = root / "labels" / f"{name}.txt"
        labels.parent.mkdir(parents=True, exist_ok=True)
        labels.write_text("0 0 0 0.5 0 0.5 1 0 1")


def yolo_splits(root):
    images = find_annotations(root, "yolo").images
    return {split: sorted(found) for split, found in images.items()}


def test_the_split_of_an_image_of_yolo_is_that_of_its_folder(tmp_path):
    names = ("train/a", "train/b_test_02", "train/val_street/c", "val/train_03", "val/test/d")
    write_yolo(tmp_path, names)
    paths = [f"images/{name}.png" for name in names]
    assert yolo_splits(tmp_path) == {"train": paths[:3], "val": [paths[4], paths[3]]}


@pytest.mark.parametrize(
    ("splits", "others"),
    [
        ({"train": "images/a", "val": "images/b"}, []),
        ({"path": "images", "train": ["a"], "validation": "./b", "test": None}, []),
        ({"train": "../images/a", "val": "../images/b/"}, []),  # as Roboflow writes them
        ({"path": ".", "train": "train.txt", "val": "lists/val.txt"}, ["images/a/2.png"]),
    ],
)
def test_the_splits_of_yolo_are_those_of_its_file(tmp_path, splits, others):
    root = tmp_path / "data"
    (root / "lists").mkdir(parents=True)
    write_yolo(root, ("a/0", "a/1", "a/2", "b/0"))
    (root / "train.txt").write_text("./images/a/0.png\n\nimages/a/1.png\n")
    (root / "lists" / "val.txt").write_text("../images/b/0.png\n")
    (root / "data.yaml").write_text(json.dumps({"names": ["car"], **splits}))
    train = sorted({"images/a/0.png", "images/a/1.png", "images/a/2.png"} - {*others})
    assert yolo_splits(root) == {"train": train, "val": ["images/b/0.png"]}
    notes = load(root, "yolo").notes
    assert f"images of each split: train {len(train)}, val 1" in notes
    left_out = f"{len(others)} images that no annotations name are left out: {', '.join(others)}"
    assert (left_out in notes) == bool(others)


def test_images_are_held_out_if_yolo_names_training_images_alone(tmp_path):
    write_yolo(tmp_path, ("a/0", "a/1", "val/0"))
    (tmp_path / "data.yaml").write_text('{"names": ["car"], "train": "images/a"}')
    assert yolo_splits(tmp_path) == {"": ["images/a/0.png", "images/a/1.png"]}


def test_splits_of_yolo_that_are_not_there_are_refused(tmp_path):
    write_yolo(tmp_path, ("a/0", "b/0"))
    (tmp_path / "list.txt").write_text("images/b/0.png\nimages/a/7.png\n")
    for splits, expected in (
        ({"val": "images/c"}, f"data.yaml: no folder or list images/c in {tmp_path}"),
        ({"val": ".."}, "data.yaml: no folder or list .. in"),
        ({"path": "/nowhere", "val": "images/b"}, "no folder or list images/a in /nowhere, below"),
        ({"val": "list.txt"}, "list.txt, line 2: no image images/a/7.png in a folder images of"),
        ({"val": {"a": 1}}, "data.yaml: a split is a dict; expected a folder or a list"),
        ({"val": "labels"}, "data.yaml: no image in labels; expected some in a folder images"),
        ({"val": ["images/b", "images"]}, "data.yaml: images/a/0.png is in train and val; train"),
        ({"train": None, "val": "images/b"}, "has the splits val, but no train"),
    ):
        content = {"names": ["car"], "train": "images/a", **splits}
        (tmp_path / "data.yaml").write_text(json.dumps(content))
        assert expected in error_message(find_annotations, tmp_path, "yolo")
    (tmp_path / "dataset.yaml").write_text("names: [bus]")
    assert "both describe" in error_message(find_annotations, tmp_path, "yolo")


@pytest.mark.parametrize("format", ["coco", "labelme", "yolo"])
def test_boxes_alone_are_refused(tmp_path, format):
    write_image(tmp_path / "images" / "a.png", 0, (SIZE, SIZE))
    (tmp_path / "classes.txt").write_text("car\n")
    content = {
        "coco": coco(["a.png"], [(0, 3, [])]),
        "labelme": {
            **{"imagePath": "images/a.png", "imageHeight": SIZE, "imageWidth": SIZE},
            "shapes": [{"label": "x", "shape_type": "line", "points": [[0, 0], [4, 4]]}],
        },
        "yolo": {},
    }[format]
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 .5 .5 .1 .1\n")
    message = error_message(find_annotations, tmp_path, format)
    assert "1 of 1 objects have no outline" in message
    assert message.endswith("or masks from a model such as SAM")


def test_objects_without_an_outline_are_left_out_and_counted(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for i in range(count):
            write_image(tmp_path / split / f"{i}.png", i, (SIZE, SIZE))
        content = coco([f"{i}.png" for i in range(count)], [(0, 3, [SQUARE]), (1, 9, [])])
        (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(content))
    data = load(tmp_path, "coco")
    assert data.classes == ("background", "cat", "dog")
    note = "2 of 4 objects have no outline, and are left out, such as in train/1.png"
    assert note in data.notes


def test_every_shape_of_labelme_is_drawn(tmp_path):
    inside = np.zeros((3, 4), bool)
    inside[0, 1] = inside[2] = True
    file = io.BytesIO()
    Image.fromarray(inside).save(file, "PNG")
    shapes = [
        ("rectangle", [[9, 9], [5, 7]], {}),
        ("mask", [[1, 2], [4, 4]], {"mask": base64.b64encode(file.getvalue()).decode()}),
        ("rotation", [[10, 0], [12, 0], [12, 3], [10, 3]], {}),
        ("point", [[0, 0]], {}),
    ]
    content = {"imagePath": "a.png", "imageHeight": SIZE, "imageWidth": SIZE, "shapes": [
        {"label": kind, "shape_type": kind, "points": points, **others}
        for kind, points, others in shapes
    ]}  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "classes.txt").write_text("rectangle\n")  # of YOLO
    found = find_annotations(tmp_path, "labelme")
    assert "left out 1 files and folders: 1 x .txt" in found.notes
    ((_, drawing),) = found.pairs()
    values = read_mask(drawing, 999).values
    value_of = {row.name: row.value for row in found.rows}
    expected = np.zeros((SIZE, SIZE), int)
    expected[7:9, 5:9] = value_of["rectangle"]
    expected[0:3, 10:12] = value_of["rotation"]
    expected[2:5, 1:5][inside] = value_of["mask"]
    np.testing.assert_array_equal(values, expected)
    assert "1 of 4 objects have no outline, and are left out, such as in a.png" in found.notes
    (tmp_path / "a.json").write_text(json.dumps(content | {"imageWidth": 3}))
    message = error_message(find_annotations, tmp_path, "labelme")
    assert message.endswith("a.json: a mask of (4, 3) in an image of 3 x 16")


def test_damaged_annotations_name_their_file(tmp_path):
    path = tmp_path / "a.json"
    for content, expected in (
        ("{", "a.json: Expecting"),
        (json.dumps(coco(["a.png"], [(0, 5, [SQUARE])])), "a.json, annotation 1: no field or id 5"),
        (
            json.dumps(coco(["a.png"], [(0, 3, [["x"] * 6])])),
            "a.json, annotation 1: could not convert",
        ),
        ("{}", "no annotations in the format coco"),
    ):
        path.write_text(content)
        assert expected in error_message(find_annotations, tmp_path, "coco")
    write_image(tmp_path / "pics" / "a.png", 0, (SIZE, SIZE))
    twice = coco(["pics\\a.png", "pics/a.png"], [(0, 3, [SQUARE]), (1, 9, [SQUARE])])
    path.write_text(json.dumps(twice))
    message = error_message(find_annotations, tmp_path, "coco")
    assert f"pics/a.png is annotated twice, in {path} and in {path}; give all" in message
    for key, what in (("images", 7), ("categories", 3)):
        same = coco(["a.png", "b.png"], [])
        same[key][1]["id"] = what
        path.write_text(json.dumps(same))
        message = error_message(find_annotations, tmp_path, "coco")
        assert f"a.json: two of its {key} have the id {what}" in message
    turned = {"size": [SIZE // 2, 2 * SIZE], "counts": [SIZE * SIZE]}
    path.write_text(json.dumps(coco(["a.png"], [(0, 3, turned)])))
    assert "runs of the size [8, 32] in an image of [16, 16]" in error_message(
        find_annotations, tmp_path, "coco"
    )
    square = np.reshape(SQUARE, (-1, 2)).tolist()
    for label, points, expected in (
        (None, square, "a.json: a name is a NoneType; expected a text"),
        (
            " leaf ",
            square[:2],
            "a.json: 1 of 1 objects have no outline, such as in a.png; " + BOXES,
        ),
    ):
        sizes = {"imagePath": "a.png", "imageHeight": SIZE, "imageWidth": SIZE}
        path.write_text(json.dumps(sizes | {"shapes": [{"label": label, "points": points}]}))
        assert error_message(find_annotations, tmp_path, "labelme").endswith(expected)
    path.unlink()
    for split, categories in (("train", [(1, "cat")]), ("val", [(1, "dog"), (2, "cat")])):
        content = coco(["a.png"], [(0, 1, [SQUARE])], categories)
        (tmp_path / f"instances_{split}.json").write_text(json.dumps(content))
    classes = [(row.name, row.value) for row in find_annotations(tmp_path, "coco").rows]
    assert classes == [("background", 0), ("cat", 1), ("dog", 2)]  # by name: cat and dog are 1
    for split in ("train", "val"):
        (tmp_path / f"instances_{split}.json").unlink()
    write_image(tmp_path / "images" / "a.png")
    (tmp_path / "data.yaml").write_text("names: {1: car, 2: bus}")
    assert "names has the keys 1, 2, not 0, 1, ..." in error_message(
        find_annotations, tmp_path, "yolo"
    )
    (tmp_path / "data.yaml").unlink()
    (tmp_path / "classes.txt").write_text("car\ncar \n")
    assert "two classes of" in error_message(find_annotations, tmp_path, "yolo")
    (tmp_path / "classes.txt").write_text("car\n")
    assert "none of 1 images has labels; images/a.png would have them in" in error_message(
        find_annotations, tmp_path, "yolo"
    )
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("1 0 0 1 0 1 1\n")
    message = error_message(find_annotations, tmp_path, "yolo")
    assert message.endswith("a.txt, line 1: the class 1 is none of 0 to 0")
    message = error_message(load, tmp_path, "coco", classes=3)
    assert "no annotations" in message
    assert "boxes in Annotations/*.xml are no masks" in error_message(load, tmp_path, "voc")


def test_an_object_is_shown_if_it_is_a_pixel_wide_or_high_inside():
    image = AnnotatedImage("train", "a.png", "", height=10, width=20, objects=[])
    for (left, top, right, bottom), shown in {
        (3, 3, 4, 3.5): True,
        (3, 3, 3.9, 3.9): False,
        (19.5, 3, 30, 9): True,
        (-5, -5, 0.5, 0.9): False,
        (-5, -5, 0.5, 1): True,
        (3, 3, 3, 9): False,  # of no width
        (20, 3, 30, 9): False,
    }.items():
        outline = np.array([(right, top), (left, bottom)], float)
        assert image.shows(outline) == shown, outline
