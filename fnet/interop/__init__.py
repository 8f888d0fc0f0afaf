"""Adapters to flax (`linen`, `nnx`) and `jax_privacy`; weights of torch, Hugging Face and PEFT.

Each is imported on first use, so that `import fnet` does not import flax. torch is never needed.
"""

import importlib
from typing import Any

__all__ = [
    "from_huggingface",
    "from_peft",
    "from_torch",
    "to_huggingface",
    "to_peft",
    "to_torch",
]

_ATTRIBUTES = {
    "jax_privacy": "fnet.interop.jax_privacy",
    "linen": "fnet.interop.linen",
    "nnx": "fnet.interop.nnx",
    "torch": "fnet.interop.torch",
    "huggingface": "fnet.interop.huggingface",
    "from_huggingface": "fnet.interop.huggingface:from_huggingface",
    "to_huggingface": "fnet.interop.huggingface:to_huggingface",
    "peft": "fnet.interop.peft",
    "from_peft": "fnet.interop.peft:from_peft",
    "to_peft": "fnet.interop.peft:to_peft",
    "from_torch": "fnet.interop.torch:from_torch",
    "to_torch": "fnet.interop.torch:to_torch",
}


def __getattr__(name: str) -> Any:
    """Import an adapter on first use."""
    if name not in _ATTRIBUTES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _ATTRIBUTES[name].partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, attribute) if attribute else imported


def __dir__() -> list[str]:
    """List the adapters too, although they are not imported yet."""
    return sorted({*globals(), *_ATTRIBUTES})
