"""Files of weights: safetensors, and torch's as weights alone. No code in a file is ever run."""

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.errors import UserError

_TORCH = (b"PK\x03\x04", b"\x80\x02")
"""How torch.save's files begin: a zip archive, before torch 1.6 a pickle of protocol 2."""

_SAFE = (2, 6)
"""The first torch whose weights_only keeps its promise."""


class Weights(NamedTuple):
    """What a file of weights holds.

    Attributes:
      state_dict: ``{key: array}``, or what wraps one.
      metadata: of a safetensors file, as text; else {}.
    """

    state_dict: Mapping[str, Any]
    metadata: dict[str, str]


def read(path: Path) -> Weights:
    """A file's arrays, in numpy.

    Args:
      path: ``.safetensors``, read without torch, or what torch.save wrote.

    Raises:
      UserError: if there is no such file, or it holds no weights or more than weights; if
        torch is needed and not there.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if not start:
        raise UserError(f"{path} is empty")
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if not start.startswith(_TORCH):
        raise UserError(
            f"{path} is no checkpoint: it begins with {start!r}, not as torch.save's files do; "
            "safetensors files are known by their suffix .safetensors"
        )
    return Weights(_torch(path), {})


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, whole or not at all.

    Raises:
      UserError: if it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    part = path.with_name(f".{path.name}.part")
    try:
        part.touch()  # says in fewer words why it cannot be written
        save_file(arrays, part, metadata)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {why}; choose another --out") from error


def _safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return Weights(arrays, file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is no safetensors file, or a damaged one: {error}") from error
    except AttributeError as error:  # of numpy, which has no such dtype
        raise UserError(f"{path} holds arrays that are none of numpy's: {error}") from error


def _torch(path: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{path}: torch reads it, which is not here: pip install 'fnet-jax[torch]', or save "
            "the weights as .safetensors"
        ) from None
    version = tuple(int(n) for n in torch.__version__.split(".")[:2])
    if version < _SAFE:
        raise UserError(
            f"{path}: torch {torch.__version__} can be made to run code in a checkpoint "
            "(CVE-2025-32434): pip install 'fnet-jax[torch]'"
        )

    def in_numpy(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): in_numpy(part) for key, part in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        known = (torch.float16, torch.float32, torch.float64)
        narrow = value.is_floating_point() and value.dtype not in known
        return (value.float() if narrow else value).detach().contiguous().numpy()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, none of them torch's own
        raise UserError(f"{path}: {_why(error)}") from error
    if not isinstance(held, Mapping):
        raise UserError(f"{path} holds a {type(held).__name__}, not the state dict of a network")
    try:
        return in_numpy(held)
    except (TypeError, RuntimeError) as error:
        what = str(error).splitlines()[0]
        raise UserError(f"{path} holds tensors that are no plain arrays: {what}") from error


def _why(error: Exception) -> str:
    """Why torch refuses a file: its own answer is a page, and names the way to run any code."""
    if found := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"it asks for {found[1]}, which is no weight, and code in a checkpoint is never run; "
            "where the file is trusted, save its state dict alone: torch.save(m.state_dict(), ...)"
        )
    first = str(error).strip().split("\n")[0].split(". ")[0]
    return f"torch cannot read it, so it is damaged or no checkpoint ({first or 'it ends early'})"
