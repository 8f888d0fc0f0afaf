"""Files of weights for ``fnet import`` and ``fnet export``: safetensors and torch checkpoints.

Torch checkpoints are read as weights only: code in a file is never run.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fnet.layers import activations
from train.config import Config, Denoiser, LanguageModel
from train.config.section import options
from train.errors import UserError

_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02")
"""First bytes of torch.save's files: a zip archive; before torch 1.6 a pickle of protocol 2."""

_MIN_TORCH = (2, 6)
"""First torch version whose ``weights_only`` is safe."""

_FLAGS = {
    "new_classifier=True": "--new-classifier",
    "trained_with='batch'": "--trained-with batch",
    "trained_with='abn'": "--trained-with abn",
    "norm='batch'": "--model.norm batch",
}
"""Flag for each argument that messages of `fnet.interop.torch` suggest."""


class Weights(NamedTuple):
    """Content of a file of weights.

    Attributes:
      state_dict: ``{key: array}``, or a dict that wraps one.
      metadata: text fields of a safetensors file; else {}.
    """

    state_dict: Mapping[str, Any]
    metadata: dict[str, str]


def read(path: Path) -> Weights:
    """Read a file's arrays into numpy.

    Args:
      path: ``.safetensors``, which needs no torch, or a file of torch.save.

    Raises:
      UserError: if there is no such file, if it holds no weights or more than weights, or if
        torch is needed and not installed.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if not start:
        raise UserError(f"{path} is empty")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if not start.startswith(_TORCH_MAGIC):
        raise UserError(
            f"{path} is not a checkpoint: it begins with {start!r}, unlike files of torch.save; "
            "the name of a safetensors file ends in .safetensors"
        )
    return Weights(_read_torch(path), {})


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically.

    Raises:
      UserError: if it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    part = path.with_name(f".{path.name}.part")
    try:
        part.touch()  # fails with a shorter message than save_file
        save_file(arrays, part, metadata)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {why}; choose another --out") from error


def check_network(config: Config) -> None:
    """Raise `UserError` for a network without counterpart in torch."""
    if isinstance(config.model, LanguageModel | Denoiser):
        raise UserError(
            f"model.name: expected a network for images, got {config.model.name}; torch's names "
            "are known for those only"
        )


def describe_network(config: Config) -> dict[str, str]:
    """Return the network's name and options as text, with its norm."""
    fields = options(config.model)
    if "activation_param" in fields:
        param = fields.pop("activation_param")
        if activations.get(fields["activation"]).parameter:
            fields["activation_param"] = activations.parameter_of(fields["activation"], param)
    variant = f"{fields.pop('depth', '')}{'_a2' if fields.pop('a2', False) else ''}"
    text = {"network": f"{config.model.name}{variant}"} | {k: str(v) for k, v in fields.items()}
    return {"norm": "abn"} | text


def with_flags(message: Exception | str) -> str:
    """Replace the library's arguments in a message by the program's flags."""
    text = str(message).removeprefix("from_torch: ").removeprefix("to_torch: ")
    for argument, flag in _FLAGS.items():
        text = text.replace(argument, flag)
    return text


def _read_safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return Weights(arrays, file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from error
    except AttributeError as error:  # numpy lacks the dtype
        raise UserError(f"{path} holds arrays of a dtype that numpy lacks: {error}") from error


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{path}: reading it needs torch, which is not installed: "
            "pip install 'fnet-jax[torch]', or save the weights as .safetensors"
        ) from None
    version = tuple(int(n) for n in torch.__version__.split(".")[:2])
    if version < _MIN_TORCH:
        raise UserError(
            f"{path}: torch {torch.__version__} may run code in a checkpoint (CVE-2025-32434): "
            "pip install 'fnet-jax[torch]'"
        )

    def to_numpy(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): to_numpy(item) for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        known = (torch.float16, torch.float32, torch.float64)
        unknown = value.is_floating_point() and value.dtype not in known
        return (value.float() if unknown else value).detach().contiguous().numpy()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise UserError(f"{path}: {_explain(error)}") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not the state dict of a network")
    try:
        return to_numpy(content)
    except (TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} holds tensors that are not plain arrays: {reason}") from error


def _explain(error: Exception) -> str:
    """Say in one line why torch refuses a file; its own message suggests to run any code."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"it needs {match[1]}, which is not a weight, and code in a checkpoint is never run; "
            "if you trust the file, save its state dict alone: torch.save(m.state_dict(), ...)"
        )
    first = str(error).strip().split("\n")[0].split(". ")[0]
    return f"damaged or not a checkpoint of torch ({first or 'it ends early'})"
