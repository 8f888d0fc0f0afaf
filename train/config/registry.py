"""Registry of sections with variants: data sources, networks and gradient modes.

A variant is registered when its class is defined, under the value of its tag field. So it needs one
file: fnet's are in the package of their kind, and a user's may be anywhere.
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
    are variants, if they give a value to the tag field.

    Attributes:
      section: name of the section in a config.
      tag: field that names the variant.
      package: package with fnet's own variants.
      required: fields that each variant must have.
    """

    required: ClassVar[tuple[str, ...]] = ()
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
            return  # A base class of variants, or a subclass of one that inherits its name.
        known = _VARIANTS[cls.section].get(name, cls)
        # Either may be defined first.
        by_origin = {kind.__module__.startswith("train."): kind for kind in (known, cls)}
        if len(by_origin) == 2:
            raise UserError(
                f"{cls.section}.{cls.tag}: {name} is a variant of fnet, "
                f"{by_origin[True].__name__}; give {by_origin[False].__name__} another name"
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
    """Return the variants of a section by name, as in ``{"mean": Mean}``; {} if it has none."""
    if section not in _KINDS:
        return {}
    _import_modules(_KINDS[section].package)
    import_plugins()
    for kind in _VARIANTS[section].values():
        names = vars(kind).get("__dataclass_fields__", {})
        for name in [name for name in kind.required if name not in names]:
            lacks = f"the field {name}" if names else "@dataclass(frozen=True) above it"
            raise UserError(f"{section}.{kind.tag}: the class {kind.__name__} lacks {lacks}")
    return dict(sorted(_VARIANTS[section].items()))


def sections() -> tuple[str, ...]:
    """Return the names of the sections that have variants."""
    return tuple(_KINDS)


def all_variants() -> Iterator[type[Variant]]:
    """Yield the variants of all sections."""
    for section in _KINDS:
        yield from variants(section).values()


def tag_of(section: str) -> str | None:
    """Return the name of the field that names a section's variant; None if it has none."""
    return _KINDS[section].tag if section in _KINDS else None


@functools.cache
def _import_modules(name: str) -> None:
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__, f"{name}."):
        importlib.import_module(module.name)


def import_plugins() -> None:
    """Import the files of ``FNET_PLUGINS``."""
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
