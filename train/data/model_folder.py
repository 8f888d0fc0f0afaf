"""Folders of published models: config.json and tensors in safetensors files.

Only headers are read until a tensor is needed. No code in a file is ever run.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from train import limits
from train.data.chat import load_json
from train.data.storage import check_regular
from train.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTERS = "adapter_config.json"
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "tokenizer.model", "spiece.model", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.json",
)  # fmt: skip
SMALL_FILES = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *TEXT_FILES,
)
"""Files of a model that a run copies: all but its weights."""

DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
"""NumPy's dtypes of safetensors."""

_POINTER = b"version https://git-lfs"
"""Begins a file that Git LFS has not downloaded yet."""
_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json")
"""Tokenizers that are not read."""
_NO_GGUF = "fnet reads safetensors; give the folder of the model that it was converted from"
_HUB_NAME = re.compile(r"(?:https?:/+huggingface\.co/)?(?P<model>[\w-][\w.-]*/[\w-][\w.-]*)/?")
"""Name or address of a model of the Hugging Face Hub."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.ckpt", "model.pt")


class FileTensor(NamedTuple):
    """A tensor in a safetensors file, which is read by ``tensor[slices]``.

    Attributes:
      path: File.
      offset: First byte in the file.
      shape: Shape.
      dtype: Dtype.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> np.ndarray:  # type: ignore[override]
        """Map the file and return a part of the tensor, without a copy."""
        if not self.nbytes:
            return np.zeros(self.shape, self.dtype)[index]
        raw = np.memmap(self.path, np.uint8, "r", self.offset, (self.nbytes,))
        return raw.view(self.dtype).reshape(self.shape)[index]


class ModelFolder(NamedTuple):
    """A published model on this machine.

    Attributes:
      path: Folder.
      config: ``config.json``.
      tensors: Tensors by name, from all files.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, FileTensor]

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(t.nbytes for t in self.tensors.values())


def is_model_folder(path: Path) -> bool:
    """Whether a folder has the config.json of a published model. A run's differs."""
    if not (path / "config.json").is_file():
        return False
    config = load_json(path / "config.json")
    return any(name in config for name in ("model_type", "architectures", "architecture"))


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.json`` of a model's folder."""
    check_folder(path)
    config = load_json(path / "config.json")
    if not config:
        raise UserError(f"model.path: {path} has no config.json; give a published model's folder")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        _check_sizes(path, part)
    return config


def _check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `UserError` for a size that no model has, with which nothing would ever end."""
    for name, value in limits.SIZES.items():
        most = value * limits.factor()
        if (given := config.get(name)) is None:
            continue
        values = given if isinstance(given, list) and given else [given]  # perhaps of two axes
        if not all(isinstance(v, int | float) and 0 < v <= most for v in values):
            raise UserError(
                f"model.path: {path / 'config.json'}: {name} must be above 0 and at most "
                f"{most:,.15g}, got {given!r:.40}"
            )


def check_folder(path: Path) -> None:
    """Check that a path is the folder of a published model, and not something similar."""
    if path.suffix == ".gguf":
        raise UserError(f"model.path: {path} is a GGUF file; {_NO_GGUF}")
    if path.is_file():
        raise UserError(f"model.path: {path} is a file; give its folder, {path.parent}")
    if not path.is_dir():
        raise UserError(f"model.path: {path} is not a folder; {how_to_get(path)}")
    if (path / "config.json").is_file():
        return
    if (path / ADAPTERS).is_file():
        base = load_json(path / ADAPTERS).get("base_model_name_or_path")
        of = f", {base}" if base else ""
        raise UserError(
            f"model.path: {path} has adapters of PEFT, not a model; give the folder of the base "
            f"model{of}, or merge them with peft's merge_and_unload"
        )
    if any(path.glob("*.gguf")):
        raise UserError(f"model.path: {path} has GGUF files; {_NO_GGUF}")


def how_to_get(path: Path) -> str:
    """Say how a model gets into a folder that does not exist."""
    model, to, name = "OWNER/NAME", path, _HUB_NAME.fullmatch(str(path))
    if name and not path.parent.is_dir() and path.parent.name != "models":
        model, to = name["model"], Path("models", path.name)
    return f"give a published model's folder, or download one: hf download {model} --local-dir {to}"


def check_tokenizer(path: Path) -> None:
    """Check that a model's folder has a tokenizer."""
    check_folder(path)
    if (path / "tokenizer.json").is_file():
        return
    if others := [name for name in _TOKENIZERS if (path / name).is_file()]:
        raise UserError(
            f"model.path: {path} has {others[0]}, but no tokenizer.json; convert it with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    raise UserError(
        f"model.path: {path} has no tokenizer.json; download it from where the model is, or give "
        "data.tokenizer"
    )


def read_folder(path: Path) -> ModelFolder:
    """Read config and headers of a model's folder."""
    config = read_config(path)
    if (path / INDEX).is_file():
        return ModelFolder(path, config, _read_index(path / INDEX))
    if (path / SINGLE).is_file():
        return ModelFolder(path, config, read_tensors(path / SINGLE)[0])
    if pickles := [name for name in _PICKLES if (path / name).exists()]:
        raise UserError(
            f"model.path: {path} has {pickles[0]}, a pickle, which may run code; "
            "convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise UserError(f"model.path: {path} has neither {SINGLE} nor {INDEX}")


def _read_index(path: Path) -> dict[str, FileTensor]:
    weight_map = load_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise UserError(f"{path} is damaged: it has no weight_map")
    tensors: dict[str, FileTensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise UserError(f"{path}: {name!r} is not the name of a file in the same folder")
        if not (path.parent / name).is_file():
            raise UserError(f"{path.parent / name} is missing, which {path.name} lists")
        tensors |= read_tensors(path.parent / name)[0]
    for tensor, file in weight_map.items():
        if tensor not in tensors or tensors[tensor].path.name != file:
            raise UserError(f"{path.parent / file} lacks {tensor}, which {path.name} lists")
    return tensors


def read_tensors(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors of a safetensors file, and its metadata.

    https://huggingface.co/docs/safetensors: 8 bytes with the length of the header, the header as
    JSON, then the tensors.
    """

    def damaged(why: str) -> UserError:
        return UserError(f"{path} is damaged or not a safetensors file: {why}")

    try:
        check_regular(str(path))
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
            if start == _POINTER:
                raise UserError(
                    f"{path} is a pointer of Git LFS, without the weights; run git lfs pull in "
                    "its folder"
                )
            file.seek(8)
            length = int.from_bytes(start[:8], "little")
            if size < 8 or not 0 < length <= size - 8:
                raise damaged(f"its header has {length:,} bytes, the file {size:,}")
            limits.HEADER.check(length, path)
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise damaged("its header is not JSON") from error
    if not isinstance(header, dict):
        raise damaged("its header is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise damaged(f"its __metadata__ is {metadata!r:.40}, not an object")
    tensors = {}
    for name, entry in header.items():
        try:
            dtype = np.dtype(DTYPES[entry["dtype"]])
            shape = tuple(int(n) for n in entry["shape"])
            first, last = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise damaged(f"the header's entry of {name} is {entry!r}") from error
        is_valid = first >= 0 and min(shape, default=0) >= 0
        if not is_valid or last - first != math.prod(shape) * dtype.itemsize:
            raise damaged(f"{name} has {last - first:,} bytes for shape {shape} and {dtype}")
        if 8 + length + last > size:
            missing = 8 + length + last - size
            raise damaged(f"it ends early: {missing:,} bytes of {name} are missing")
        tensors[name] = FileTensor(path, 8 + length + first, shape, dtype)
    return tensors, {str(key): str(value) for key, value in metadata.items()}
