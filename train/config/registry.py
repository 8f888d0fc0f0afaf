"""Registry of sections with variants: data sources, networks and gradient modes.

A variant is registered when its class is defined, by the value of the field that names it. So a
variant is one file: one of fnet's in the package of its kind, or any file of a user.
"""

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union

from pydantic import Field

from train.config.section import Section
from train.errors import UserError

PLUGINS = "FNET_PLUGINS"
"""Environment variable with the Python files of a user's variants, separated as in PATH."""


class Variant(Section):
    """Base class of sections that have several variants.

    Its direct subclasses are kinds of sections, such as `train.config.data.Data`. Their subclasses
    are variants, if they give a value to the field that names them.

    Attributes:
      section: name of the section in a config.
      tag: field that names the variant.
      package: package with fnet's own variants, one or several in a module.
    """

    section: ClassVar[str] = ""
    tag: ClassVar[str]
    package: ClassVar[str]

    def __init_subclass__(cls, *, section: str = "", tag: str = "", package: str = "") -> None:
        super().__init_subclass__()
        if section:
            cls.section, cls.tag, cls.package = section, tag, package
            _KINDS[section], _VARIANTS[section] = cls, {}
            return
        name = cls.__dict__.get(cls.tag)
        if not name or not isinstance(name, str):
            return  # a base class of variants
        known = _VARIANTS[cls.section].get(name)
        if known and known.__module__ != cls.__module__ and known.__module__.startswith("train."):
            raise UserError(
                f"{cls.section}.{cls.tag}: {name} is a variant of fnet, {known.__name__}; give "
                f"{cls.__name__} another name"
            )
        # A recipe that is loaded again defines its variants again.
        _VARIANTS[cls.section][name] = cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return the schema of a variant, or of the union of all variants of a kind."""
        if cls is not _KINDS[cls.section]:
            return handler(source)
        union: Any = Union[tuple(variants(cls.section).values())]  # noqa: UP007
        return handler.generate_schema(Annotated[union, Field(discriminator=cls.tag)])


_KINDS: dict[str, type[Variant]] = {}
_VARIANTS: dict[str, dict[str, type[Variant]]] = {}
_plugins: set[str] = set()


def variants(section: str) -> dict[str, Any]:
    """``{"mean": Mean, ...}``: variants of a section by their name, or {} if it has one form.

    Raises:
      UserError: if a file of ``FNET_PLUGINS`` cannot be imported.
    """
    if section not in _KINDS:
        return {}
    _import_modules(_KINDS[section].package)
    import_plugins()
    return dict(sorted(_VARIANTS[section].items()))


def sections() -> tuple[str, ...]:
    """Return the names of the sections that have variants."""
    return tuple(_KINDS)


def all_variants() -> Iterator[type[Variant]]:
    """Yield the variants of all sections."""
    for section in _KINDS:
        yield from variants(section).values()


def tag_of(section: str) -> str | None:
    """Return the name of the field that names a section's variant; None if it has one form."""
    return _KINDS[section].tag if section in _KINDS else None


@functools.cache
def _import_modules(name: str) -> None:
    """Import the modules of a package, which define fnet's own variants."""
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__, f"{name}."):
        importlib.import_module(module.name)


def import_plugins() -> None:
    """Import the files of ``FNET_PLUGINS``.

    Raises:
      UserError: if one cannot be imported.
    """
    for path in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
        if path in _plugins:
            continue
        _plugins.add(path)  # before the import, which may ask for variants
        name = f"fnet_plugin_{len(_plugins)}_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        try:
            if spec is None or spec.loader is None:
                raise ImportError("not a Python file")
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            _plugins.discard(path)
            raise UserError(f"{PLUGINS}: {path}: {type(error).__name__}: {error}") from error
