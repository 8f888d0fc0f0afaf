"""Access to jax-privacy and dp_accounting, which are optional dependencies."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any


def dp_accounting() -> ModuleType:
    """Import dp_accounting, or say how to install it."""
    return _import("dp_accounting")


def jax_privacy(module: str) -> ModuleType:
    """Import a module of jax-privacy, or say how to install it."""
    return _import(f"jax_privacy.{module}")


def in_double_precision(function: Callable[[], Any]) -> Any:
    """Call a function of jax-privacy, which computes on few numbers, in float64."""
    import jax

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        return function()


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"private training needs {name.split('.')[0]}: pip install 'fnet-jax[privacy]'"
        ) from error
