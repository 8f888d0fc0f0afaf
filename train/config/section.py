"""What fields and sections of a config are made of."""

from dataclasses import fields
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt, MultipleOf
from pydantic import AfterValidator, ConfigDict

from fnet import memory

Count = Annotated[int, Ge(1), Lt(2**31)]
CountOrZero = Annotated[int, Ge(0), Lt(2**31)]
EvenCount = Annotated[int, Ge(2), Lt(2**31), MultipleOf(2)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1)]


def _readable(amount: str) -> str:
    memory.parse_bytes(amount)
    return amount


Amount = Annotated[str, AfterValidator(_readable)]
"""Of memory: 4GiB, 4GB, 4096MiB."""


class Section:
    """A section of a config: no unknown key, no conversion, no nan or infinity."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def options(model: Any) -> dict[str, Any]:
    """The fields of a model's section but its name: options of the function that builds it."""
    return {f.name: getattr(model, f.name) for f in fields(model) if f.name != "name"}
