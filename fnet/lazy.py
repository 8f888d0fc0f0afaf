"""Packages whose names are imported when they are used, as in scikit-image (PEP 562)."""

import ast
import importlib.util
import sys
from types import ModuleType
from typing import Any


def import_names_late(package: str) -> None:
    """Let a package have the names that it imports under ``TYPE_CHECKING``.

    Type checkers find them there. So ``import fnet`` does not import JAX, and the program prints
    its help at once. A name may be that of its module, such as ``fnet.generate``.
    """
    module = sys.modules[package]
    loader: Any = module.__spec__ and module.__spec__.loader
    origins = {
        alias.asname or alias.name: (node.module, alias.name)
        for block in ast.parse(loader.get_source(package)).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            origin, original = origins.get(name, (package, name))
            if origin == package:  # a module, such as fnet.fsdp
                if name.startswith("__") or not importlib.util.find_spec(f"{package}.{name}"):
                    raise AttributeError(f"module {package!r} has no attribute {name!r}")
                return importlib.import_module(f"{package}.{name}")
            value = getattr(importlib.import_module(origin), original)
            vars(self)[name] = value
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            # An import of the module fnet.generate would hide the function of this name.
            if not isinstance(value, ModuleType) or origins.get(name, (package,))[0] == package:
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*vars(self), *origins})

    module.__class__ = Package
