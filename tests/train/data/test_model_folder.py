"""Reading folders of published models: lazily, and with one line for each damaged file."""

import json
import struct
from pathlib import Path

import chex
import ml_dtypes
import numpy as np
import pytest
from pretrained_folder import LLAMA, write_folder
from safetensors.numpy import load_file, save_file

from train.data import model_folder
from train.errors import UserError


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_reads_what_safetensors_wrote(tmp_path, shards, dtype):
    tensors = write_folder(tmp_path, dtype=dtype, shards=shards)
    folder = model_folder.read_folder(tmp_path)
    assert folder.config == LLAMA
    assert folder.nbytes == sum(a.nbytes for a in tensors.values())
    chex.assert_trees_all_equal({n: t[...] for n, t in folder.tensors.items()}, tensors)
    name = "model.layers.0.mlp.up_proj.weight"
    part = folder.tensors[name][3:5, ::2]
    chex.assert_trees_all_equal(part, tensors[name][3:5, ::2])
    assert model_folder.is_model_folder(tmp_path)


def test_every_dtype_that_safetensors_writes(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    known = {n: d for n, d in model_folder.DTYPES.items() if not n.startswith("F8")}
    arrays = {name: np.arange(6).astype(dtype).reshape(2, 3) for name, dtype in known.items()}
    arrays["empty"] = np.zeros((0, 3), np.float32)
    arrays["scalar"] = np.array(3, np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    read = {n: t[...] for n, t in model_folder.read_folder(tmp_path).tensors.items()}
    chex.assert_trees_all_equal(read, load_file(tmp_path / "model.safetensors"))


def test_a_run_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "digits", "model": {}}')
    assert not model_folder.is_model_folder(tmp_path)
    assert not model_folder.is_model_folder(tmp_path / "none")


def rewrite_header(path, change):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def entry(header):
    return header["model.norm.weight"]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-4]), "it ends early: 4 bytes of "),
        (lambda p: p.write_bytes(b""), "damaged or not a safetensors file: its header has 0 bytes"),
        (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda p: p.write_bytes(b"PK\x03\x04" * 9), "its header has"),
        (lambda p: p.write_bytes(struct.pack("<Q", 3) + b"abcd"), "its header is not JSON"),
        (lambda p: p.write_bytes(struct.pack("<Q", 2) + b"[]"), "its header is not an object"),
        (lambda p: rewrite_header(p, lambda h: entry(h).update(dtype="Q4")), "entry of model.norm"),
        (lambda p: rewrite_header(p, lambda h: entry(h).update(shape=[31])), "128 bytes for shape"),
        (lambda p: rewrite_header(p, lambda h: entry(h).pop("shape")), "entry of model.norm"),
    ],
)
def test_damaged_files_are_one_line(tmp_path, damage, match):
    write_folder(tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=match) as error:
        model_folder.read_folder(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("owner", ["nobody/", "https://huggingface.co/nobody/", "models/", "/"])
def test_a_missing_folder_is_answered_by_its_download(owner):
    name, to = ("nobody/Llama-0.1B", "models/") if "nobody" in owner else ("OWNER/NAME", owner)
    with pytest.raises(UserError, match=f"download one: hf download {name} --local-dir {to}Llama"):
        model_folder.check_folder(Path(f"{owner}Llama-0.1B"))


def test_folders_that_are_no_models_are_one_line(tmp_path):
    def error():
        with pytest.raises(UserError) as raised:
            model_folder.check_tokenizer(tmp_path)
        return str(raised.value)

    assert "has no tokenizer.json; download it from where the model is" in error()
    (tmp_path / "tokenizer.model").touch()
    assert "has tokenizer.model, but no tokenizer.json; convert it" in error()
    (tmp_path / "model-Q4.gguf").touch()
    assert "has GGUF files; fnet reads safetensors" in error()
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "models/base"}')
    assert "has adapters of PEFT, not a model; give the folder of the base model, mod" in error()
    with pytest.raises(UserError, match="is a GGUF file"):
        model_folder.check_folder(tmp_path / "model-Q4.gguf")
    with pytest.raises(UserError, match="is a file; give its folder"):
        model_folder.check_folder(tmp_path / "tokenizer.model")


def test_missing_files_are_one_line(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        model_folder.read_folder(tmp_path / "none")
    with pytest.raises(UserError, match=r"has no config\.json"):
        model_folder.read_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor"):
        model_folder.read_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model\.bin, a pickle, which may run code"):
        model_folder.read_folder(tmp_path)


def test_an_index_must_match_its_files(tmp_path):
    write_folder(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    index.write_text(
        json.dumps({"weight_map": content["weight_map"] | {"more": content["weight_map"][name]}})
    )
    with pytest.raises(UserError, match=r"lacks more, which model.safetensors.index.json lists"):
        model_folder.read_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {name: "../secret.safetensors"}}))
    with pytest.raises(UserError, match="is not the name of a file in the same folder"):
        model_folder.read_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {name: "model-3.safetensors"}}))
    with pytest.raises(
        UserError, match=r"model-3.safetensors is missing, which .*index.json lists"
    ):
        model_folder.read_folder(tmp_path)
    index.write_text("{}")
    with pytest.raises(UserError, match="it has no weight_map"):
        model_folder.read_folder(tmp_path)


@pytest.mark.parametrize("value", ["1e400", "Infinity", '{"a": 1}'])
@pytest.mark.parametrize("field", ["shape", "data_offsets"])
def test_headers_with_numbers_without_limit_are_one_line(tmp_path, field, value):
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    entry = {"dtype": '"F32"', "shape": "[2]", "data_offsets": "[0, 8]"} | {field: f"[0, {value}]"}
    header = "{" + '"x": {' + ", ".join(f'"{n}": {v}' for n, v in entry.items()) + "}}"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    with pytest.raises(UserError, match=r"the header's entry of x is"):
        model_folder.read_folder(tmp_path)


def test_metadata_that_are_no_object_are_one_line(tmp_path):
    header = '{"__metadata__": 5}'
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(UserError, match=r"its __metadata__ is 5, not an object"):
        model_folder.read_tensors(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", 0),
        ("num_hidden_layers", 10**7),
        ("rope_theta", 0),
        ("rope_theta", float("inf")),
        ("hidden_size", "x"),
        ("image_size", [224, -1]),
        ("rms_norm_eps", float("nan")),
    ],
)
def test_sizes_that_no_model_has_are_one_line(tmp_path, name, value):
    for config in ({name: value}, {"text_config": {name: value}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=rf"config.json: {name} must be above 0 and at most"):
            model_folder.read_config(tmp_path)
