"""Adapters to flax (`linen`, `nnx`) and `jax_privacy`; weights of torch, Hugging Face and PEFT.

Each is imported on first use, so that `import fnet` does not import flax. torch is never needed.
"""

import importlib
from typing import Any

__all__ = ["from_huggingface", "from_peft", "from_torch", "to_huggingface", "to_peft", "to_torch"]

_MODULES = ("huggingface", "jax_privacy", "linen", "nnx", "peft", "torch")


def __getattr__(name: str) -> Any:
    """Import an adapter on first use."""
    module = name.partition("_")[2] if name in __all__ else name
    if module not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    imported = importlib.import_module(f"{__name__}.{module}")
    return getattr(imported, name) if name in __all__ else imported


def __dir__() -> list[str]:
    """List the adapters too, although they are not imported yet."""
    return sorted({*globals(), *__all__, *_MODULES})
