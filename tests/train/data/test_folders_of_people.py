"""Folders and files as people have them: each is read right, or one line says what to do."""

import base64
import gzip
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from train.data.chat_file import ChatFile
from train.data.image_folder import ImageFolder
from train.data.image_shards import ImageShards
from train.data.image_table import ImageTable
from train.data.segmentation_folder import SegmentationFolder
from train.data.text_file import TextFile
from train.errors import UserError


def image(i=0, kind="png", size=8):
    """Return an image file; each i is another picture."""
    pixels = np.random.default_rng(i).integers(0, 256, (size, size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def mask(*values, kind="png", mode=None, size=8):
    """Return a mask of vertical stripes of these values."""
    pixels = np.repeat(np.array(values), -(-size // len(values)))[:size]
    pixels = np.broadcast_to(pixels, (size, size)) if pixels.ndim == 1 else pixels
    made = Image.fromarray(pixels.astype(np.uint16 if mode == "I;16" else np.uint8))
    file = io.BytesIO()
    (made if mode in (None, "I;16") else made.convert(mode)).save(file, kind)
    return file.getvalue()


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def classes(prefix="", count=6, end="png", kind="png"):
    """Return the files of a folder per class."""
    return {
        f"{prefix}{name}/{i}.{end}": image(10 * k + i, kind)
        for k, name in enumerate(("cat", "dog"))
        for i in range(count)
    }


def pairs(images, masks, *values, count=6, **options):
    """Return images and masks of these values, by two patterns."""
    files = {images.format(name=i): image(i) for i in range(count)}
    return files | {masks.format(name=i): mask(*values, **options) for i in range(count)}


PNG, TEXTS = image(), [{"text": f"some text {i}"} for i in range(20)]
PAIRS = [{"prompt": f"p{i}", "completion": f"a{i}"} for i in range(20)]
FOLDER = pairs("images/{name}.png", "masks/{name}.png", 0, 1)
ROWS = "".join(f"{i}.png,{('cat', 'dog')[i % 2]}\n" for i in range(12))
PICTURES = {f"{i}.png": image(i) for i in range(12)}
SQUARE = [1, 1, 6, 1, 6, 6, 1, 6]


def coco(*segmentations, categories=((1, "cat"),)):
    images = [{"id": i, "file_name": f"{i}.png", "width": 8, "height": 8} for i in range(6)]
    objects = [
        {"id": i, "image_id": i, "category_id": 1, "segmentation": s, "bbox": [1, 1, 5, 5]}
        for i, s in enumerate(segmentations)
    ]
    named = [{"id": id, "name": name} for id, name in categories]
    return json.dumps({"images": images, "annotations": objects, "categories": named})


def labelme(path="0.png", **shape):
    shape = {"label": "cat", "points": np.reshape(SQUARE, (-1, 2)).tolist()} | shape
    sizes = {"imageHeight": 8, "imageWidth": 8, "imageData": base64.b64encode(PNG).decode()}
    return json.dumps({"imagePath": path, "shapes": [shape], **sizes})


def tar(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


SHARD = {f"{i:03}.{end}": [image(i), str(i % 2).encode()][end == "cls"] for i in range(12) for end in ("png", "cls")}  # fmt: skip
SMALL = {"image_size": 8}

# Files, source, its options, and either the number of examples with what a note says, or what the
# message says that refuses them.
CASES = {
    "archive of macOS": (classes() | {"__MACOSX/cat/._0.png": b"x", "cat/.DS_Store": b""}, ImageFolder, {}, (12, "1 x __MACOSX, 1 x hidden")),
    "Windows": (classes() | {"cat/Thumbs.db": b"x", "dog/desktop.ini": b"x"}, ImageFolder, {}, (12, "1 x Thumbs.db, 1 x desktop.ini")),
    "deleted photos of a Synology": (classes() | {"#recycle/a.png": PNG, "cat/@eaDir/a.png": PNG}, ImageFolder, {}, (12, "1 x #recycle, 1 x @eaDir")),
    "photos of an iPhone": (classes() | {"cat/IMG_1.HEIC": b"x", "cat/IMG_1.MOV": b"x"}, ImageFolder, {}, (12, "1 x .HEIC, 1 x .MOV")),
    "saved from a browser": (classes(end="jfif", kind="jpeg"), ImageFolder, {}, (12, "held out")),
    "AVIF": (classes(end="avif", kind="avif"), ImageFolder, {}, (12, "held out")),
    "a picture next to the classes": (classes() | {"logo.png": PNG, "labels.csv": b""}, ImageFolder, {}, (12, "1 x .csv next to folders, 1 x .png next to folders")),
    "capital splits": (classes("Train/") | classes("Test/"), ImageFolder, {}, "no folder ROOT/train; ROOT must hold"),
    "Roboflow's classes": (classes("train/") | classes("valid/", 2) | classes("test/", 2) | {"README.roboflow.txt": b""}, ImageFolder, {}, (16, "trained on train, tested on valid; not read: test (data.test_split)")),
    "ImageNet's flat val": (classes("train/") | {f"val/{i}.png": PNG for i in range(3)}, ImageFolder, {}, "data.path: the classes differ: only in ROOT/train: cat, dog"),
    "Roboflow's masks": ({f"{s}/{i}{end}": image(i) if end == ".jpg" else mask(0, 1) for s in ("train", "valid") for i in range(4) for end in (".jpg", "_mask.png")} | {"train/_classes.csv": b"Pixel Value, Class\n0, background\n1, car\n"}, SegmentationFolder, {"images": "{split}/{name}.jpg", "masks": "{split}/{name}_mask.png", "class_table": "train/_classes.csv"}, (8, "by index: background 50.0%, car 50.0%")),
    "masks next to images": (pairs("d/{name}.png", "d/{name}_mask.png", 0, 1), SegmentationFolder, {"images": "d/{name}.png", "masks": "d/{name}_mask.png", "classes": 2}, (6, "by index")),
    "Carvana": (pairs("train/{name}.jpg", "train_masks/{name}_mask.gif", 0, 255, kind="gif"), SegmentationFolder, {"images": "train", "masks": "train_masks/{name}_mask.gif", "mask_values": (0, 255)}, (6, "by color: 0 50.0%, 1 (value 255) 50.0%")),
    "trimaps of pets": (pairs("images/{name}.png", "masks/{name}.png", 1, 2, 3), SegmentationFolder, {}, "the masks hold 1 to 3, as with --data.mask-values 1 2 3"),
    "Supervisely": (pairs("ds/img/{name}.png", "ds/masks_machine/{name}.png", 0, 1), SegmentationFolder, {"images": "ds/img", "masks": "ds/masks_machine", "classes": 2}, (6, "by index")),
    "masks of CVAT": (pairs("JPEGImages/{name}.png", "SegmentationClass/{name}.png", 0, 1, mode="P") | {"labelmap.txt": b"# label:color_rgb:parts:actions\nbackground:0,0,0::\ncar:1,1,1::\n"}, SegmentationFolder, {"format": "voc"}, (6, "by index: background 50.0%, car 50.0%")),
    "brushes of Label Studio": ({f"images/{i}.png": image(i) for i in range(3)} | {"masks/task-1-annotation-2-tag-car-0.png": mask(0, 255)}, SegmentationFolder, {}, "give --data.images images --data.masks masks"),
    "masks with transparency": (FOLDER | {f"masks/{i}.png": (lambda f: (Image.new("RGBA", (8, 8)).save(f, "png"), f.getvalue())[1])(io.BytesIO()) for i in range(6)}, SegmentationFolder, {"classes": 2}, "it has transparent pixels; save masks without transparency"),
    "masks in JPEG": (pairs("images/{name}.png", "masks/{name}.jpg", 0, 90, 255, kind="jpeg"), SegmentationFolder, {}, "compressed with loss, which changes values"),
    "black and white bitmaps": (pairs("images/{name}.bmp", "masks/{name}.bmp", 0, 255, mode="1", kind="bmp"), SegmentationFolder, {"classes": 2}, (6, "50.0%")),
    "thumbnails next to masks": (FOLDER | {"masks/@eaDir/0.png": PNG}, SegmentationFolder, {"classes": 2}, (6, "1 x @eaDir")),
    "Roboflow's COCO": ({f"train/{i}.png": image(i) for i in range(6)} | {"train/_annotations.coco.json": coco([SQUARE], [], categories=((0, "pets"), (1, "cat"))).encode()} | {f"valid/{i}.png": image(i) for i in range(6)} | {"valid/_annotations.coco.json": coco([SQUARE], categories=((0, "pets"), (1, "cat"))).encode()}, SegmentationFolder, {"format": "coco"}, (12, "1 of 3 objects have no outline, and are left out, such as in train/1.png")),
    "labelme on Windows": ({f"img/{i}.png": image(i) for i in range(4)} | {f"json/{i}.json": labelme(f"..\\img\\{i}.png").encode() for i in range(4)}, SegmentationFolder, {"format": "labelme"}, (4, "cat")),
    "rectangles of labelme": ({f"{i}.png": image(i) for i in range(4)} | {f"{i}.json": labelme(f"{i}.png", shape_type="rectangle", points=[[6, 6], [1, 1]]).encode() for i in range(4)}, SegmentationFolder, {"format": "labelme"}, (4, "cat 39.1%")),
    "key points of YOLO": ({"images/0.png": PNG, "labels/0.txt": b"0 .5 .5 1 1 .2 .2", "data.yaml": b"names: [a]\nkpt_shape: [1, 2]"}, SegmentationFolder, {"format": "yolo"}, "its labels are key points and no outlines"),
    "classes of YOLO with a blank line": ({"images/0.png": PNG, "labels/0.txt": b"0 0 0 1 0 1 1", "classes.txt": b"a\n\nb\n"}, SegmentationFolder, {"format": "yolo"}, "line 2 of ROOT/classes.txt is empty"),
    "Excel in German": (PICTURES | {"t.csv": ("\ufefffilename;label\r\n" + ROWS.replace(",", ";").replace("\n", "\r\n")).encode()}, ImageTable, {"path": "t.csv"}, (12, "labels are in the column label")),
    "a workbook called CSV": (PICTURES | {"t.csv": b"PK\x03\x04rest"}, ImageTable, {"path": "t.csv"}, "ROOT/t.csv is no text, but a zip archive, such as .docx or .xlsx"),
    "an index of pandas and two columns of paths": (PICTURES | {"t.csv": b",path,image,label\n0,0.png,0.png,a\n1,1.png,1.png,b\n"}, ImageTable, {"path": "t.csv"}, "as with --data.file path or --data.file image"),
    "one-hot columns": (PICTURES | {"t.csv": b"image,MEL,NV\n0.png,1.0,0.0\n1.png,0.0,1.0\n"}, ImageTable, {"path": "t.csv"}, "as with --data.label MEL or --data.label NV"),
    "a table of some of the images": (PICTURES | {"t.csv": ("file,label\n" + "".join(ROWS.splitlines(True)[:8])).encode()}, ImageTable, {"path": "t.csv"}, (8, "left out 4 images in ROOT of no row: 10.png, 11.png, 8.png and 1 more")),
    "addresses in place of files": (PICTURES | {"t.csv": b"file,label\nhttps://x.org/a.png,a\nhttps://x.org/b.png,b\n"}, ImageTable, {"path": "t.csv"}, "no file ROOT/https:/x.org/a.png"),
    "a text that is a document": ({"a.txt": b"PK\x03\x04rest"}, TextFile, {"path": "a.txt"}, "is no text, but a zip archive"),
    "a folder of texts": ({"a/b.txt": b"text"}, TextFile, {"path": "a"}, "ROOT/a is a folder; give one text file"),
    "a text in gzip": ({"a.txt.gz": gzip.compress(b"some text " * 99)}, TextFile, {"path": "a.txt.gz", "context": 8}, (124, "")),
    "a folder of records and others": ({"a.jsonl": lines(*TEXTS).encode(), "b.jsonl.gz": gzip.compress(lines(*TEXTS).encode()), "c.csv": b"x", "README.md": b""}, ChatFile, {"path": ""}, (40, "left out 2 files and folders: 1 x .csv, 1 x .md")),
    "a file and its archive": ({"a.jsonl": lines(*TEXTS).encode(), "a.jsonl.gz": gzip.compress(lines(*TEXTS).encode())}, ChatFile, {"path": ""}, "ROOT/a.jsonl and ROOT/a.jsonl.gz may have the same records; move one elsewhere"),
    "splits in a folder": ({"train.jsonl": lines(*TEXTS).encode(), "test.jsonl": lines(*TEXTS).encode()}, ChatFile, {"path": ""}, "give --data.path and --data.test-path"),
    "Alpaca": ({"a.jsonl": lines(*({"instruction": f"i{i}", "input": "", "output": f"o{i}", "text": "t"} for i in range(20))).encode()}, ChatFile, {"path": "a.jsonl"}, (20, "fields instruction, output are read, and not text")),
    "two answers": ({"a.jsonl": lines(*({"question": "q", "answer": "a", "response": "b"} for _ in range(9))).encode()}, ChatFile, {"path": "a.jsonl"}, "answer and response may both be the answer; give --data.answer answer or --data.answer response"),
    "PowerShell": ({"a.jsonl": lines(*PAIRS).encode("utf-16")}, ChatFile, {"path": "a.jsonl"}, (20, "")),
    "an archive of macOS as a shard": ({"a.tar": tar({"._000.png": b"x", **SHARD})}, ImageShards, {"path": "a.tar"}, (12, "held out")),
    "shards and others": ({"s/a.tar": tar(SHARD), "s/a.idx": b"", "s/sizes.json": b"{}"}, ImageShards, {"path": "s"}, (12, "1 x .idx, 1 x .json")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_or_one_line_says_what_to_do(name, tmp_path):
    files, source, options, expected = CASES[name]
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    fields = source.__dataclass_fields__
    where = str(tmp_path / options.get("path", ""))
    where = (where,) if source is ImageShards else where
    options = {n: v for n, v in SMALL.items() if n in fields} | options | {"path": where}
    message = None
    try:
        data = source(**options).load()
    except UserError as error:
        message = str(error)
    if isinstance(expected, str) or message:
        assert expected.replace("ROOT", str(tmp_path)) in message
        assert "\n" not in message
        return
    count, note = expected
    sizes = [len(next(iter(rows.values()))) for rows in (data.train, data.test)]
    assert (sum(sizes), min(sizes) > 0) == (count, True)
    assert note.replace("ROOT", str(tmp_path)) in "; ".join(data.notes)
