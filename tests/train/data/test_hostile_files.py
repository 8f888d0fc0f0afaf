"""Files that somebody wrote to harm are refused in one line, within limits of memory and time."""

import io
import json
import os
import zipfile

import hostile_files
import numpy as np
import pytest
from hostile_files import damaged_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from program_cases import assert_one_line_error, exit_code

from train import limits
from train.data import shards
from train.data.chat import ChatTemplate
from train.data.drawings import decode_runs
from train.data.text_file import TextFile
from train.data.tokenizer import load_tokenizer
from train.errors import UserError

few = settings(
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def assert_refused_or_read(kind, path, may_pass=True):
    """Read a file in a process that may take 500 MB and 5 s, as the program would."""
    message = limits.run("hostile_files:read", kind, str(path))
    if message is None:
        assert may_pass
    else:
        assert "\n" not in message
        assert 10 < len(message) < 1000


@pytest.fixture(autouse=True)
def wide_limits_of_the_process(monkeypatch):
    """The test's own process has the limits of the whole program, not of a template."""
    monkeypatch.setattr(limits, "CODE_MEMORY", limits.CODE_MEMORY._replace(value=500 * 10**6))
    monkeypatch.setattr(limits, "CODE_TIME", limits.CODE_TIME._replace(value=5))


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        ("config.json", hostile_files.CONFIG),
        ("generation_config.json", hostile_files.SETTINGS),
        ("tokenizer_config.json", hostile_files.TOKENIZER_CONFIG),
        ("tokenizer.json", hostile_files.TOKENIZER),
        ("lines", {"text": "a b"}),
        ("lines", hostile_files.CHAT),
        ("coco.json", hostile_files.COCO),
        ("labelme.json", hostile_files.LABELME),
    ],
)
def test_json_of_others(kind, document, tmp_path):
    is_annotation = kind in ("coco.json", "labelme.json")
    (hostile_files.write_annotated if is_annotation else hostile_files.write_model)(tmp_path)

    @few
    @given(damaged_json(document))
    def check(content):
        (tmp_path / kind).write_bytes(content)
        assert_refused_or_read(kind, tmp_path / kind)

    check()


def test_a_large_tokenizer_may_not_make_more_tokens_than_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "CODE_MEMORY", limits.CODE_MEMORY._replace(value=10**8))
    long = {"type": "Prepend", "prepend": "a" * 10**6}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(hostile_files.TOKENIZER | {"normalizer": long}))
    with pytest.raises(UserError, match=r"needs more than|ended its process"):
        load_tokenizer(TextFile(tokenizer=str(path))).encode("ab")


def write_nothing(folder):
    """The file needs no others beside it."""


FILES = {
    "labels": ("labels/1.txt", hostile_files.write_yolo, hostile_files.yolo_labels()),
    "names": ("data.yaml", hostile_files.write_yolo, hostile_files.yolo_names()),
    "table": ("table.csv", hostile_files.write_annotated, hostile_files.tables()),
    "safetensors": ("a.safetensors", write_nothing, hostile_files.safetensors()),
    "template": ("chat.jinja", write_nothing, hostile_files.templates()),
    "npz": ("a.npz", write_nothing, st.builds(
        hostile_files.npz,
        st.lists(st.sampled_from([0, 1, 8, 2**31, 2**40, 2**62]), max_size=5).map(tuple),
        st.sampled_from(["|u1", "<f4", "<U1000000", "|O", "<i8"]),
    )),
    "tar": ("a.tar", write_nothing, st.builds(
        hostile_files.tar,
        st.sampled_from([b"a.png", b"a.cls", b"../../a.png", b"\xff.png", b"", b"a" * 100]),
        st.sampled_from([b"777777777777", b"-1", b"9", b"\x80" + b"\xff" * 11, b"00000000001\0"]),
        st.sampled_from([b"0", b"5", b"L", b"x", b"S", b"1", b"\0"]),
        st.binary(max_size=20),
    )),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_files_of_others(kind, tmp_path_factory):
    name, write_others, contents = FILES[kind]

    @few
    @given(contents)
    def check(content):
        folder = tmp_path_factory.mktemp(kind)
        write_others(folder)
        is_text = isinstance(content, str)
        content = content.encode("utf-8", "surrogatepass") if is_text else content
        (folder / name).write_bytes(content)
        assert_refused_or_read(kind, folder / name)

    check()


@few
@given(content=hostile_files.pictures())
def test_pictures(content, tmp_path):
    for name in ("cat", "dog"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        hostile_files.write_annotated(folder)
    (folder / "3.png").write_bytes(content)
    assert_refused_or_read("picture", folder / "3.png")


def test_outlines_that_would_take_gigabytes(tmp_path):
    hostile_files.write_annotated(tmp_path)
    Image.new("L", (4, 4000)).save(tmp_path / "1.png")
    zigzag = [[1, 1], [2, 3999]] * 20_000
    size = {"imageHeight": 4000, "imageWidth": 4}
    shapes = [hostile_files.LABELME["shapes"][0] | {"points": zigzag}]
    path = tmp_path / "labelme.json"
    path.write_text(json.dumps(hostile_files.LABELME | size | {"shapes": shapes}))
    assert_refused_or_read("labelme.json", path, may_pass=False)
    with pytest.raises(ValueError, match="more than 60 bits"):
        decode_runs("o" * 10**6)


@pytest.mark.parametrize("kind", ["shards", "lines"])
def test_parquet(kind, tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"

    @few
    @given(hostile_files.damaged(hostile_files.parquet()))
    def check(content):
        path.write_bytes(content)
        assert_refused_or_read(kind, path)

    check()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("shards", {"image": [b"x"] * 999, "label": ["a" * 10**6] * 999}),
        ("shards", {"image": [bytes(2**28)], "label": [0]}),
        ("lines", {"text": ["a" * 10**8]}),
    ],
)
def test_parquet_that_unpacks_to_gigabytes(kind, columns, tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    path.write_bytes(hostile_files.parquet(columns, compression="zstd"))
    assert_refused_or_read(kind, path, may_pass=False)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("shards", {"image": [bytes(2**20)], "label": ["a", "b"]}),
        ("shards", {"image": [b"x"], "label": ["a" * 2**24]}),
        ("records", {"text": ["a" * 2**20]}),
        ("lines", {"text": ["a" * 2**24]}),
    ],
)
def test_parquet_with_one_large_value_in_many_rows(kind, values, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    rows = np.arange(999)
    table = {
        name: pyarrow.DictionaryArray.from_arrays(rows % len(array), array)
        for name, array in values.items()
    }
    path = tmp_path / "a.parquet"
    path.write_bytes(hostile_files.parquet(table, compression="zstd", store_schema=False))
    assert path.stat().st_size < 2**14
    assert_refused_or_read(kind, path, may_pass=False)


def test_links_in_a_tar_are_not_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "CODE_MEMORY", limits.CODE_MEMORY._replace(value=10 * 2**20))
    path = tmp_path / "a.tar"
    path.write_bytes(
        hostile_files.tar(b"a.png", b"00000000000\0", b"2")[:512] * 2**16 + bytes(1024)
    )
    assert_refused_or_read("tar", path, may_pass=False)


def test_a_tar_of_links_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "a.tar"
    link = hostile_files.tar(b"a.png", b"00000000000\0", b"2")[:512]
    with path.open("wb") as file:
        file.write(link * 100_001)
        file.truncate(512 * 2**22)
    with pytest.raises(UserError, match="has 100,001 links and folders; at most 100,000 are read"):
        shards.index_shards([str(path)], shards.Fields(None, None))


def test_large_templates(tmp_path):
    source = "{{ 1 }}" * (limits.TEMPLATE.most // 7 + 1)
    (tmp_path / "chat.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    for kind in ("template", "tokenizer_config.json"):
        path = tmp_path / ("chat.jinja" if kind == "template" else kind)
        message = limits.run("hostile_files:read", kind, str(path))
        assert "the chat template has 1,048,57" in message


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("zipped", [True, False])
def test_checkpoints(zipped, torch, tmp_path):
    path = tmp_path / "a.pt"
    content = hostile_files.checkpoint(_use_new_zipfile_serialization=zipped)
    path.write_bytes(content)
    assert limits.run("hostile_files:read", "checkpoint", str(path), size=10**6) is None  # imports

    @few
    @given(hostile_files.damaged(content))
    def check(content):
        path.write_bytes(content)
        assert_refused_or_read("checkpoint", path)

    check()


def test_checkpoints_that_unpack_to_gigabytes(torch, tmp_path):
    path = tmp_path / "a.pt"
    nested = {"x": torch.zeros(1)}
    for _ in range(40):
        nested = {"a": nested, "b": nested}
    itself = {}
    itself["itself"] = itself
    for content in (
        {"views": torch.zeros(1).expand(2**31, 2**10)},
        {"empty": torch.zeros(2**40, device="meta")},
        nested,
        itself,
    ):
        path.write_bytes(hostile_files.checkpoint(content))
        assert_refused_or_read("checkpoint", path, may_pass=False)
    zeros = hostile_files.checkpoint({"a": torch.zeros(2**26 + 1)})
    with zipfile.ZipFile(io.BytesIO(zeros)) as stored, zipfile.ZipFile(path, "w", 8) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    assert_refused_or_read("checkpoint", path, may_pass=False)


def test_links_that_are_many_paths(tmp_path):
    for i in range(22):
        (tmp_path / "x" / str(i)).mkdir(parents=True)
    for i in range(21):
        for name in "ab":
            (tmp_path / "x" / str(i) / name).symlink_to(f"../{i + 1}")
    assert_refused_or_read("folder", tmp_path / "x", may_pass=False)
    assert_refused_or_read("folder", tmp_path / "x" / "0", may_pass=False)


@pytest.mark.parametrize(
    "kind", ["lines", "text", "npz", "tar", "template", "safetensors", "folder"]
)
def test_pipes(kind, tmp_path):
    path = tmp_path / ("a.tar" if kind == "tar" else "pipe")
    os.mkfifo(path)
    assert_refused_or_read(kind, path, may_pass=False)


@pytest.mark.parametrize("end", [b"", b'"}\n'])
def test_long_lines(end, tmp_path):
    path = tmp_path / "a.jsonl"
    most = limits.LINE.most
    path.write_bytes(b'{"text": "' + b"a" * most + end)
    message = limits.run("hostile_files:read", "lines", str(path))
    assert message == (
        f"data.path: {path}, line 1: the line has {most + 1:,} bytes; at most {most:,} are read (if "
        "you trust it, --limits 2 allows twice as much)"
    )
    path.write_bytes(b'{"text": "' + b"a" * (most - 13) + b'"}\n' + b'{"text": "abc"}\n' * 9)
    assert limits.run("hostile_files:read", "lines", str(path)) is None


def test_a_template_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(limits, "CODE_TIME", limits.CODE_TIME._replace(value=0.2))
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for _ in range(2):
        with pytest.raises(UserError, match=r"takes more than 0\.2 s"):
            ChatTemplate(loops).render(hostile_files.CHAT["messages"])
    assert ChatTemplate("{{ messages[0].content }}").render(hostile_files.CHAT["messages"]) == "a"


def test_the_flag_raises_the_limits(workplace, capsys):
    (workplace / "lines.jsonl").write_text(json.dumps({"text": "a" * limits.LINE.most}))
    words = "train", "text_transformer", "--data.source", "chat_file", "--data.path", "lines.jsonl"
    assert exit_code(*words) == 2
    assert_one_line_error(capsys, "--limits 2 allows twice as much")
    assert exit_code(*words, "--limits", "2") == 2
    assert_one_line_error(capsys, "expected at least one each")
    assert exit_code(*words, "--limits=x") == 2
    assert_one_line_error(capsys, "--limits: expected a number above 0, got x")


def test_a_limit_of_memory_counts_what_is_added(monkeypatch):
    limits.run("hostile_files:npz", (1,))  # loads the readers, which take more than the limit
    monkeypatch.setattr(limits, "CODE_MEMORY", limits.CODE_MEMORY._replace(value=20 * 2**20))
    assert limits.run("numpy:zeros", 2**17).nbytes == 2**20
    with pytest.raises(limits.CodeError):
        limits.run("numpy:zeros", 2**22)
    assert limits.run("numpy:zeros", 2**22, size=2**16).nbytes == 2**25  # grows with the input
    monkeypatch.setattr(limits, "CODE_MEMORY", limits.CODE_MEMORY._replace(value=2**21))
    assert limits.run("hostile_files:start_threads", os.cpu_count()) is None


def test_a_process_that_dies_is_an_error_and_starts_again():
    with pytest.raises(limits.CodeLimitError, match=r"ended its process \(SIGABRT\)"):
        limits.run("os:abort")
    assert limits.run("math:sqrt", 4) == 2
    with pytest.raises(limits.CodeError, match=r"math domain error|nonnegative"):
        limits.run("math:sqrt", -1)
    assert (limits.run("numpy:arange", 3) == np.arange(3)).all()
