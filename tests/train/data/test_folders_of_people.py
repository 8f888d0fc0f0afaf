"""Folders and files as people have them: each is read right, or one line says what to do."""

import base64
import gzip
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from train.data.arrays import ArrayFile
from train.data.chat_file import ChatFile
from train.data.image_folder import ImageFolder
from train.data.image_shards import ImageShards
from train.data.image_table import ImageTable
from train.data.preference_file import PreferenceFile
from train.data.segmentation_folder import SegmentationFolder
from train.data.text_file import TextFile
from train.errors import UserError


def image(i=0, kind="png", size=8):
    pixels = np.random.default_rng(i).integers(0, 256, (size, size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def mask(*values, kind="png", mode=None, size=8):
    pixels = np.repeat(np.array(values), -(-size // len(values)))[:size]
    pixels = np.broadcast_to(pixels, (size, size)) if pixels.ndim == 1 else pixels
    made = Image.fromarray(pixels.astype(np.uint16 if mode == "I;16" else np.uint8))
    file = io.BytesIO()
    (made if mode in (None, "I;16") else made.convert(mode)).save(file, kind)
    return file.getvalue()


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def classes(prefix="", count=6, end="png", kind="png"):
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


def transparent(content):
    picture = Image.open(io.BytesIO(content))
    picture.putalpha(0)
    picture.save(file := io.BytesIO(), "png")
    return file.getvalue()


COCO = {f"{i}.png": image(i) for i in range(6)}
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
    "splits of another name": (classes("train_set/") | classes("test_set/"), ImageFolder, {}, "no folder ROOT/train; ROOT must hold"),
    "a fraction of what is split": (classes("train/") | classes("val/", 2), ImageFolder, {"test_fraction": 0.5}, (16, "data.test_fraction: has no effect, because ROOT has the folder val")),
    "Roboflow's classes": (classes("train/") | classes("valid/", 2) | classes("test/", 2) | {"README.roboflow.txt": b""}, ImageFolder, {}, (16, "trained on train, tested on valid; not read: test (data.test_split)")),
    "ImageNet's flat val": (classes("train/") | {f"val/{i}.png": PNG for i in range(3)}, ImageFolder, {}, "data.path: the classes differ: only in ROOT/train: cat, dog"),
    "Roboflow's masks": ({f"{s}/{i}{end}": image(i) if end == ".jpg" else mask(0, 1) for s in ("train", "valid") for i in range(4) for end in (".jpg", "_mask.png")} | {"train/_classes.csv": b"Pixel Value, Class\n0, background\n1, car\n"}, SegmentationFolder, {"images": "{split}/{name}.jpg", "masks": "{split}/{name}_mask.png", "class_table": "train/_classes.csv"}, (8, "by index: background 50.0%, car 50.0%")),
    "masks next to images": (pairs("d/{name}.png", "d/{name}_mask.png", 0, 1), SegmentationFolder, {"images": "d/{name}.png", "masks": "d/{name}_mask.png", "classes": 2}, (6, "by index")),
    "Carvana": (pairs("train/{name}.jpg", "train_masks/{name}_mask.gif", 0, 255, kind="gif"), SegmentationFolder, {"images": "train", "masks": "train_masks/{name}_mask.gif", "mask_values": (0, 255)}, (6, "by color: 0 50.0%, 1 (value 255) 50.0%")),
    "trimaps of pets": (pairs("images/{name}.png", "masks/{name}.png", 1, 2, 3), SegmentationFolder, {}, "the masks hold 1 to 3, as with --data.mask-values 1 2 3"),
    "Supervisely": (pairs("ds/img/{name}.png", "ds/masks_machine/{name}.png", 0, 1), SegmentationFolder, {"images": "ds/img", "masks": "ds/masks_machine", "classes": 2}, (6, "by index")),
    "masks of CVAT": (pairs("JPEGImages/{name}.png", "SegmentationClass/{name}.png", 0, 1, mode="P") | {"labelmap.txt": b"# label:color_rgb:parts:actions\nbackground:0,0,0::\ncar:1,1,1::\n"}, SegmentationFolder, {"format": "voc"}, (6, "by index: background 50.0%, car 50.0%")),
    "brushes of Label Studio": ({f"images/{i}.png": image(i) for i in range(3)} | {"masks/task-1-annotation-2-tag-car-0.png": mask(0, 255)}, SegmentationFolder, {}, "such as task-1-annotation-2-tag-car-0; {name} must be the same in both"),
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
    "a table of some of the images": ({f"p/{name}": content for name, content in PICTURES.items()} | {"p/t.csv": ("file,label\n" + "".join(f"../p/{row}" for row in ROWS.splitlines(True)[:8])).encode()}, ImageTable, {"path": "p/t.csv"}, (8, "left out 4 images in ROOT/p of no row: 10.png, 11.png, 8.png and 1 more")),
    "labels with another separator": (PICTURES | {"t.csv": b"file,label\n" + ROWS.replace("cat", "a;b").encode()}, ImageTable, {"path": "t.csv", "targets": "labels", "separator": "|"}, (12, "no label has data.separator |: one label per image")),
    "a table called a text": ({"a.csv": b"text\nsome text\n"}, TextFile, {"path": "a.csv"}, "has records, not text alone"),
    "a document many times": ({"a.txt": b"some text|" * 20}, TextFile, {"path": "a.txt", "separator": "|", "context": 8}, (20, "2 test documents are training documents or copies of them")),
    "classes that nobody can name": ({"a.npz": npz(x_train=np.zeros((6, 8, 8), np.uint8), y_train=[0, 1, 2] * 2, x_test=np.ones((3, 8, 8), np.uint8), y_test=[0, 1, 2], classes=["a", "a", ""])}, ArrayFile, {"path": "a.npz"}, (9, "several classes are called a; reports cannot tell them apart; class 2 has no name")),
    "floating images of two scales": ({"a.npz": npz(x_train=np.ones((4, 8, 8)), y_train=[0, 1] * 2, x_test=np.full((2, 8, 8), 255.0), y_test=[0, 1])}, ArrayFile, {"path": "a.npz"}, (6, "x_train from 1 to 1; x_test from 255 to 255")),
    "labels in binary": ({"a.tar": tar({name: b"\1\0\0\0" if name.endswith("cls") else content for name, content in SHARD.items()})}, ImageShards, {"path": "a.tar"}, "expected an integer from 0, or a name"),
    "fractions as classes": ({"a.tar": tar({name: b"0.5" if name.endswith("cls") else content for name, content in SHARD.items()})}, ImageShards, {"path": "a.tar"}, "has the label 0.5, and all are numbers"),
    "addresses in place of files": (PICTURES | {"t.csv": b"file,label\nhttps://x.org/a.png,a\nhttps://x.org/b.png,b\n"}, ImageTable, {"path": "t.csv"}, "no file ROOT/https:/x.org/a.png"),
    "a text that is a document": ({"a.txt": b"PK\x03\x04rest"}, TextFile, {"path": "a.txt"}, "is no text, but a zip archive"),
    "a folder of texts": ({"a/b.txt": b"text"}, TextFile, {"path": "a"}, "ROOT/a is a folder; give one text file"),
    "a text in gzip": ({"a.txt.gz": gzip.compress(b"some text " * 99)}, TextFile, {"path": "a.txt.gz", "context": 8}, (124, "")),
    "a folder of records and others": ({"a.jsonl": lines(*TEXTS).encode(), "b.jsonl.gz": gzip.compress(lines(*TEXTS).encode()), "c.csv": b"x", "README.md": b""}, ChatFile, {"path": ""}, (40, "left out 2 files and folders: 1 x .csv, 1 x .md")),
    "a file and its archive": ({"a.jsonl": lines(*TEXTS).encode(), "a.jsonl.gz": gzip.compress(lines(*TEXTS).encode())}, ChatFile, {"path": ""}, "ROOT/a.jsonl and ROOT/a.jsonl.gz may have the same records; move one elsewhere"),
    "splits in a folder": ({"train.jsonl": lines(*TEXTS).encode(), "test.jsonl": lines(*TEXTS).encode()}, ChatFile, {"path": ""}, "give --data.path and --data.test-path"),
    "Alpaca": ({"a.jsonl": lines(*({"instruction": f"i{i}", "input": "", "output": f"o{i}", "text": "t"} for i in range(20))).encode()}, ChatFile, {"path": "a.jsonl"}, (20, "fields instruction, output, input are read, and not text")),
    "two answers": ({"a.jsonl": lines(*({"question": "q", "answer": "a", "response": "b"} for _ in range(9))).encode()}, ChatFile, {"path": "a.jsonl"}, "answer and response may both be the answer; give --data.answer answer or --data.answer response"),
    "PowerShell": ({"a.jsonl": lines(*PAIRS).encode("utf-16")}, ChatFile, {"path": "a.jsonl"}, (20, "")),
    "an archive of macOS as a shard": ({"a.tar": tar({"._000.png": b"x", **SHARD})}, ImageShards, {"path": "a.tar"}, (12, "held out")),
    "outlines as pairs of points": (COCO | {"a.json": coco(*[[[[1, 1], [6, 1], [6, 6]]]] * 6).encode()}, SegmentationFolder, {"format": "coco"}, (6, "cat")),
    "outlines without lists": (COCO | {"a.json": coco(SQUARE).encode()}, SegmentationFolder, {"format": "coco"}, "ROOT/a.json, annotation 1: an outline is 1; expected finite numbers x, y, x, y, ..."),
    "fractions in COCO": (COCO | {"a.json": coco([[0.1, 0.1, 0.8, 0.1, 0.8, 0.8]]).encode()}, SegmentationFolder, {"format": "coco"}, "1 of 1 outlines are outside of their image or smaller than a pixel, such as in 0.png; points are in pixels"),
    "outlines of a larger picture": (COCO | {"a.json": coco([SQUARE], [[90, 90, 99, 90, 99, 99]]).encode()}, SegmentationFolder, {"format": "coco"}, (6, "1 of 2 outlines are outside of their image or smaller than a pixel, such as in 1.png")),
    "two categories of a name": (COCO | {"a.json": coco([SQUARE], categories=((1, "cat"), (2, "cat"))).encode()}, SegmentationFolder, {"format": "coco"}, (6, "two categories of ROOT/a.json are called cat, and are one class")),
    "classes of YOLO that do not count": ({"images/0.png": PNG, "labels/0.txt": b"0 0 0 1 0 1 1", "data.yaml": b"nc: 3\nnames: [a]"}, SegmentationFolder, {"format": "yolo"}, "nc is 3, but names has 1 classes"),
    "masks with zeros before their numbers": (pairs("images/{name}.png", "masks/00{name}.png", 0, 1), SegmentationFolder, {"classes": 2}, "6 files are images images/{name}.*, such as 0, and 6 masks masks/{name}.*, such as 000; {name} must be the same in both"),
    "splits in a column of another name": (PICTURES | {"t.csv": b"file,label,set\n" + ROWS.replace("\n", ",test\n").encode()}, ImageTable, {"path": "t.csv"}, (12, "columns file, label are read, and not set")),
    "UTF-16 without its mark": (PICTURES | {"t.csv": f"file,label\n{ROWS}".encode("utf-16-le")}, ImageTable, {"path": "t.csv"}, "ROOT/t.csv has NUL at symbol 1, as UTF-16 without a byte order mark has"),
    "a table called text": (PICTURES | {"t.txt": f"file,label\n{ROWS}".encode()}, ImageTable, {"path": "t.txt"}, "each line must be a JSON object; tables are .csv, .tsv or .parquet"),
    "classes with a line break": (PICTURES | {"t.csv": b"file,label\n" + ROWS.replace("cat", '"cat\nb"').replace("dog", "cat b").encode()}, ImageTable, {"path": "t.csv"}, "have the same label"),
    "classes that differ in a space": (classes() | {"cat /0.png": PNG, "cat /1.png": PNG}, ImageFolder, {}, (14, "cat and cat  are two classes, which differ in case, space or zeros")),
    "logos": ({name: transparent(content) for name, content in classes().items()}, ImageFolder, {}, (12, "images with transparent pixels, of which the colors below are used: 12 of 12")),
    "thirteen channels first": ({"a.npz": npz(x=np.zeros((9, 13, 8, 8), np.uint8), y=[0, 1, 2] * 3)}, ArrayFile, {"path": "a.npz"}, "may be first or last; give channels_first or channels_last"),
    "a field twice": ({"a.jsonl": b'{"text": "a", "text": "b"}\n'}, ChatFile, {"path": "a.jsonl"}, "line 1: not JSON: two fields are called text"),
    "zstd called JSON lines": ({"a.jsonl": b"\x28\xb5\x2f\xfdrest"}, ChatFile, {"path": "a.jsonl"}, "is no text, but compressed with zstd"),
    "an example many times": ({"a.jsonl": lines(*([TEXTS[0]] * 20)).encode()}, ChatFile, {"path": "a.jsonl"}, (20, "2 test examples are training examples or copies of them, such as ROOT/a.jsonl, line 19 of ROOT/a.jsonl, line 1;")),
    "a field from the second line on": ({"a.jsonl": lines(PAIRS[0], *({"input": "i", **pair} for pair in PAIRS)).encode()}, ChatFile, {"path": "a.jsonl"}, (21, "fields prompt, completion are read, and not input")),
    "tools and thoughts": ({"t.jinja": b"{% for m in messages %}{{ m.role }}{{ m.content }};{% endfor %}", "a.jsonl": lines(*({"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "a", "thought": "t"}], "tools": [{"name": "f"}]} for i in range(20))).encode()}, ChatFile, {"path": "a.jsonl", "chat_template": "t.jinja"}, (20, "t.jinja does not write thought, tools of chats")),
    "scores of answers": ({"a.jsonl": lines(*({"prompt": f"p{i % 10}", "chosen": "a", "rejected": "b", "score": 1} for i in range(20))).encode()}, PreferenceFile, {"path": "a.jsonl"}, (20, "2 test pairs are training pairs or copies of them, such as ROOT/a.jsonl, line 19 of ROOT/a.jsonl, line 9; they make test scores too good; fields prompt, chosen, rejected are read, and not score")),
    "records as a text": ({"a.jsonl": lines(*TEXTS).encode()}, TextFile, {"path": "a.jsonl"}, "ROOT/a.jsonl has records, not text alone; give data.source chat_file"),
    "Latin-1": ({"a.txt": b"caf\xe9 " * 99}, TextFile, {"path": "a.txt", "context": 8}, (62, "99 bytes of ROOT/a.txt are NUL or not UTF-8, and stay as they are")),
    "a separator of the shell": ({"a.txt": b"text\n\n" * 99}, TextFile, {"path": "a.txt", "separator": "\\n\\n"}, "is not in ROOT/a.txt; for line breaks give $'\\n\\n' in a shell"),
    "captions and a lost image": ({"a.tar": tar({"0.txt": b"a cat", "x.cls": b"0", **SHARD})}, ImageShards, {"path": "a.tar"}, (12, "files cls, png are read, and not txt; 2 examples of ROOT/a.tar have no image, such as 0")),
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
    if "chat_template" in options:
        options["chat_template"] = str(tmp_path / options["chat_template"])
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
