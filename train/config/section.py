"""Types of config fields, and the base class of config sections."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import AfterValidator, ConfigDict

from fnet.memory.sizes import parse_bytes

WholeConfig: TypeAlias = Any
"""The `train.config.Config` that a section is part of: it imports the sections, not they it."""
Count = Annotated[int, Ge(1), Lt(2**31)]
CountOrZero = Annotated[int, Ge(0), Lt(2**31)]
EvenCount = Annotated[int, Ge(2), Lt(2**31), MultipleOf(2)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Share = Annotated[float, Ge(0), Le(1)]


def _check_bytes(text: str) -> str:
    parse_bytes(text)
    return text


Bytes = Annotated[str, AfterValidator(_check_bytes)]
"""Bytes of memory with a unit: 4GiB, 4GB, 4096MiB."""


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Marks the type of a field that names an entry of a table, to which a user may add.

    Attributes:
      names: Returns the names in the table.
    """

    names: Callable[[], Collection[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return the schema of a text that is in the table."""
        return handler.generate_schema(Annotated[source, AfterValidator(self._check)])

    def _check(self, name: str) -> str:
        if name not in self.names():
            known = ", ".join(map(repr, self.names()))
            raise ValueError(f"expected one of {known}, got {name!r}")
        return name


Needs: TypeAlias = dict[str, tuple[str, Callable[[Any], bool]]]
"""Fields that count only if a test of another one holds: ``{field: (other, test)}``."""


class Section:
    """Base class of config sections: no unknown fields, no type conversion, no nan or infinity."""

    needs: ClassVar[Needs] = {}
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def replace(self, **changes: Any) -> Self:
        """Return the section with other values of some fields."""
        section: Any = self  # a dataclass
        return dataclasses.replace(section, **changes)

    def check(self, config: WholeConfig) -> None:
        """Raise `UserError` if the section does not fit itself or the others of a config."""


def without_effect(section: Any, spell: Callable[[str], str]) -> list[str]:
    """Describe the fields of a dataclass with ``needs`` that are given in vain, by name."""
    found = []
    for f in dataclasses.fields(section):
        other, counts = getattr(section, "needs", {}).get(f.name, ("", None))
        value = getattr(section, f.name)
        if counts and value != f.default and not counts(by := getattr(section, other)):
            found.append(f"{spell(f.name)}: {value} has no effect with {spell(other)} {by}")
    return found
