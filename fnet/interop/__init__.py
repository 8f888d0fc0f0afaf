"""Adapters to other libraries, each imported by its own name: `linen`, `nnx`, `torch`."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The adapters, and torch's `from_torch` and `to_torch`, known when they are asked for."""
    if name in ("linen", "nnx", "torch"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in ("from_torch", "to_torch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fnet.interop import torch

    return getattr(torch, name)
