"""Files of data and models that somebody wrote to harm, and their readers in a process of their own."""

import io
import itertools
import json
import threading
import zipfile
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from train.data import evaluation_batches, records
from train.data.arrays import ArrayFile
from train.data.chat import ChatTemplate, load_generation_settings, load_template
from train.data.chat_file import ChatFile
from train.data.image_folder import ImageFolder
from train.data.image_shards import ImageShards
from train.data.image_table import ImageTable
from train.data.model_folder import SINGLE, read_folder, read_tensors
from train.data.segmentation_folder import SegmentationFolder
from train.data.text_file import TextFile
from train.data.tokenizer import load_tokenizer
from train.errors import TrainingError, UserError

VALUES = (
    "1e400", "-1", "0", "1.5", "Infinity", "NaN", "null", "true", "[]", "{}", '""', "[1e9, 1e9]",
    "9" * 30, "9" * 5000, "10000000", '"\\ud800"', '"\\u0000"', "[" * 100_000, "[" * 900 + "]" * 900,
    '"' + "a" * 100_000 + '"', '{"a": [{"b": 1e400}]}',
)  # fmt: skip
"""JSON that no file has where these replace another value."""


def damaged_json(document):
    """Draw bytes: a JSON document with one value replaced, cut off, or with other bytes."""
    paths = list(_paths(document))

    @st.composite
    def draw_bytes(draw):
        path, value = draw(st.sampled_from(paths)), draw(st.sampled_from(VALUES))
        text = json.dumps(_replaced(document, path)).replace('"@"', value)
        content = text.encode("utf-8", "surrogatepass")
        cut = draw(st.none() | st.integers(0, len(content)))
        content = content[:cut]
        if content and draw(st.booleans()):
            place = draw(st.integers(0, len(content) - 1))
            content = content[:place] + draw(st.binary(min_size=1, max_size=3)) + content[place:]
        return content

    return draw_bytes()


def _paths(document, path=()):
    if path:
        yield path
    if isinstance(document, dict | list):
        keys = document if isinstance(document, dict) else range(len(document))
        for key in keys:
            yield from _paths(document[key], (*path, key))


def _replaced(document, path):
    if not path:
        return "@"
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = _replaced(copy[path[0]], path[1:])
    return copy


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "intermediate_size": 8, "vocab_size": 11, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "text_config": {"depth": 2},
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
SETTINGS = {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "eos_token_id": [1]}
TOKENIZER = {
    "version": "1.0", "added_tokens": [], "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "unk_token": None},
}  # fmt: skip
TOKENIZER_CONFIG = {
    "bos_token": {"content": "<s>"},
    "chat_template": [{"name": "default", "template": "a"}],
}


COCO = {
    "images": [{"id": i, "file_name": f"{i}.png", "width": 8, "height": 8} for i in (1, 2)],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 3, "segmentation": [[2, 1, 6, 1, 6, 4, 2, 4]]},
        {"id": 2, "image_id": 2, "category_id": 9, "segmentation": {"size": [8, 8], "counts": [1, 9, 54]}},
    ],
    "categories": [{"id": 3, "name": "cat"}, {"id": 9, "name": "dog"}],
}  # fmt: skip
LABELME = {
    "imagePath": "1.png", "imageHeight": 8, "imageWidth": 8,
    "shapes": [
        {"label": "cat", "points": [[1, 1], [5, 1], [5, 5]], "shape_type": "polygon"},
        {"label": "dog", "points": [[4, 4], [6, 6]], "shape_type": "circle"},
    ],
}  # fmt: skip


def write_annotated(folder):
    """Write the pictures of `COCO` and `LABELME`, and their good annotations."""
    for i in (1, 2):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i}.png")
    for i, name in ((1, "labelme"), (2, "other")):
        content = json.dumps(LABELME | {"imagePath": f"{i}.png"})
        (folder / f"{name}.json").write_text(content)


def write_yolo(folder):
    for kind in ("images", "labels"):
        (folder / kind).mkdir()
    for i in (1, 2):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / "images" / f"{i}.png")
        (folder / "labels" / f"{i}.txt").write_text("0 0.1 0.1 0.9 0.1 0.5 0.9")
    (folder / "data.yaml").write_text("names: [cat]")


def yolo_labels():
    """Draw lines of numbers, some of which are none."""
    numbers = st.sampled_from(
        ["0", "0.5", "1", "-1", "nan", "inf", "-inf", "1e400", "9" * 400, "x", "", "0x1", "1_0"]
    )
    line = st.lists(numbers, max_size=9).map(" ".join)
    return st.lists(line, max_size=3).map("\n".join)


def yolo_names():
    """Draw the YAML of a data set; one has a billion names, by references."""
    bomb = "a: &a [x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in itertools.pairwise("abcdefghij")
    )
    values = st.sampled_from([
        "[cat]", "{0: cat}", "{a: cat, 1: dog}", "[[cat]]", "5", "", "[!!python/name:os.system x]",
        "&a [*a]", "[" * 900, "{0: {0: {0: x}}}", "[*j, *j]", "[1e400, .inf, .nan]", '"\\ud800"',
    ])  # fmt: skip
    return values.map(lambda value: f"{bomb if '*j' in value else ''}names: {value}") | st.text()


def tables():
    """Draw a CSV table of pictures and labels with something wrong."""
    cells = st.sampled_from(
        [
            "1.png",
            "2.png",
            "../../etc/passwd",
            "a",
            "1",
            "",
            '"',
            '"x',
            "\0",
            "a" * 2000,
            "\ud800",
            "nan",
        ]
    )
    row = st.lists(cells, min_size=1, max_size=3).map(",".join)
    heads = st.sampled_from(["file,label", "file", "file,label,split", "file,file", "", "\0"])
    return st.builds(lambda head, rows: "\n".join([head, *rows]), heads, st.lists(row, max_size=6))


def pictures():
    """Draw a picture whose header lies about its size, or that is cut off or damaged."""
    formats = st.sampled_from(["PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"])

    @st.composite
    def draw_bytes(draw):
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (1, 2, 3)).save(file, draw(formats))
        content = bytearray(file.getvalue())
        for _ in range(draw(st.integers(1, 4))):
            place = draw(st.integers(0, min(len(content), 64) - 1))
            content[place] = draw(st.sampled_from([0, 1, 127, 255]))
        return bytes(content[: draw(st.none() | st.integers(1, len(content)))])

    return draw_bytes()


def safetensors():
    """Draw the content of a file: a length, a header, and the tensors."""

    def with_length(header, length):
        return (
            (len(header) if length is None else length).to_bytes(8, "little") + header + bytes(24)
        )

    lengths = st.none() | st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1])
    return st.builds(with_length, damaged_json(HEADER), lengths)


def templates():
    """Draw a Jinja template that needs much of something."""
    grows = st.sampled_from([
        "{{ 'a' * %d }}", "{{ '%%%dd' %% 1 }}", "{{ 'a'.center(%d) }}", "{{ [0] * %d }}",
        "{{ range(%d) | list }}", "{{ 'a' | indent(%d) }}", "{{ '{:%d}'.format(1) }}",
        "{%% set n = namespace(x='a') %%}{%% for i in range(%d) %%}{%% set n.x = n.x ~ n.x %%}{%% endfor %%}",
    ])  # fmt: skip
    deep = st.sampled_from(
        ["{{ " + "(" * 9000, "{% if 1 %}" * 9000, "{{ a" + ".a" * 9000, "[" * 9000]
    )
    wrong = st.sampled_from(
        ["{{ a.__class__ }}", "{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
    )
    sizes = st.sampled_from([10**9, 10**10, 10**18])
    return st.builds(lambda text, size: text % size, grows, sizes) | deep | wrong | st.text()


def damaged(content):
    """Draw the content of a binary file, cut off or with other bytes."""
    numbers = [
        b"\0",
        b"\xff",
        b"\x7f",
        b"\xff" * 8,
        bytes(8),
        b"\0\0\0\x80",
        b"\xff\xff\xff\xff\x0f",
    ]
    pieces = st.lists(
        st.tuples(
            st.integers(0, len(content) - 1), st.sampled_from(numbers) | st.binary(max_size=4)
        ),
        min_size=1,
        max_size=4,
    )

    def replaced(pieces, cut):
        whole = bytearray(content)
        for place, piece in pieces:
            whole[place : place + len(piece)] = piece
        return bytes(whole[:cut])

    return st.builds(replaced, pieces, st.none() | st.integers(0, len(content)))


def parquet(columns=None, **options):
    """Return a Parquet file of pictures and chats, or of these columns."""
    import pyarrow.parquet

    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    messages = [CHAT["messages"]] * 6
    usual = {"image": [picture.getvalue()] * 6, "label": [0, 1] * 3, "messages": messages}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns or usual), file, **options)
    return file.getvalue()


def checkpoint(content=None, **options):
    """Return a file of torch.save."""
    import torch

    file = io.BytesIO()
    network = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    torch.save(content or {"model": network, "epoch": 3, "name": "x"}, file, **options)
    return file.getvalue()


def start_threads(count):
    """Have so many threads at a time, each with its stack."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    end.set()
    for thread in threads:
        thread.join()


def read(kind, path):
    """Read a file, and return the program's message if it refuses it."""
    path = Path(path)
    try:
        _READERS[kind](path)
    except (UserError, TrainingError) as error:
        return str(error)
    return None


def _read_template(path):
    template = load_template(None, path)
    ChatTemplate(template.source, where=str(path)).render(CHAT["messages"])


def _read_model(path):
    assert read_folder(path.parent).nbytes < 2**20


def _read_tokenizer(path):
    load_tokenizer(TextFile(tokenizer=str(path))).encode("ab" * 9)


def _read_masks(path, format):
    root = path.parent.parent if format == "yolo" and path.suffix == ".txt" else path.parent
    options = {"test_fraction": 0.5, "image_size": 8, "batch_size": 2}
    dataset = SegmentationFolder(path=str(root), format=format, **options).load()
    for rows in (dataset.train, dataset.test):
        dataset.prepare(rows)


def _read_shards(path):
    options = {"image_size": 8, "test_fraction": 0.5, "batch_size": 2}
    dataset = ImageShards(path=(str(path),), **options).load()
    for _ in evaluation_batches(dataset, 1):
        pass


def _read_checkpoint(path):
    import train.run.weight_files

    train.run.weight_files.read(str(path))


def _read_pictures(path):
    dataset = ImageFolder(path=str(path.parent.parent), image_size=8, test_fraction=0.5).load()
    for _ in evaluation_batches(dataset, 1):
        pass


_READERS = {
    "coco.json": lambda path: _read_masks(path, "coco"),
    "labelme.json": lambda path: _read_masks(path, "labelme"),
    "labels": lambda path: _read_masks(path, "yolo"),
    "names": lambda path: _read_masks(path, "yolo"),
    "table": lambda path: ImageTable(path=str(path), image_size=8).load(),
    "picture": _read_pictures,
    "safetensors": lambda path: [t[...] for t in read_tensors(path)[0].values()],
    "config.json": _read_model,
    "template": _read_template,
    "tokenizer_config.json": lambda path: load_template(path.parent),
    "tokenizer.json": _read_tokenizer,
    "generation_config.json": lambda path: load_generation_settings(path.parent),
    "chats.jsonl": lambda path: ChatFile(
        path=str(path), chat_template="template", context=8
    ).load(),
    "lines": lambda path: ChatFile(path=str(path), context=512).load(),
    "records": lambda path: sum(1 for _ in records.read(str(path), "data.path")),
    "text": lambda path: TextFile(path=str(path), context=8).load(),
    "npz": lambda path: ArrayFile(path=str(path)).load(),
    "tar": lambda path: ImageShards(path=(str(path),)).load(),
    "shards": _read_shards,
    "checkpoint": _read_checkpoint,
    "folder": lambda path: ImageFolder(path=str(path), image_size=8).load(),
}


def write_model(folder):
    """Write the tensors that belong to `CONFIG`."""
    header = json.dumps(HEADER).encode()
    (folder / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))


def npz(shape, dtype="|u1"):
    """Return an .npz file whose array says that it has another shape."""
    file, array = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(
        array, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", array.getvalue() + bytes(1000))
        archive.writestr("y.npy", array.getvalue() + bytes(1000))
    return file.getvalue()


def tar(name, size, kind=b"0", content=b""):
    """Return a tar file with a header that says this."""
    header = bytearray(512)
    header[: len(name[:100])] = name[:100]
    header[100:108], header[124:136] = b"0000644\0", size[:12].ljust(12, b"\0")
    header[136:148], header[156:157] = b"00000000000\0", kind
    header[257:265] = b"ustar\x0000"
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header) + content + bytes(-len(content) % 512) + bytes(1024)
