"""Types of config fields, and the base class of config sections."""

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
Fraction = Annotated[float, Ge(0), Lt(1)]


def _check_bytes(text: str) -> str:
    memory.parse_bytes(text)
    return text


Bytes = Annotated[str, AfterValidator(_check_bytes)]
"""Bytes of memory with a unit: 4GiB, 4GB, 4096MiB."""


class Section:
    """Base class of config sections: no unknown fields, no type conversion, no nan or infinity."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def options(model: Any) -> dict[str, Any]:
    """Fields of a model section that are options of the function that builds the network."""
    other = ("name", "pretrained")
    return {f.name: getattr(model, f.name) for f in fields(model) if f.name not in other}
