"""What a run is made of: frozen dataclasses, every field with its meaning and unit."""

import json
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from train.config.data import (
    ArrayFile,
    Digits,
    HuggingFace,
    ImageFolder,
    SegmentationFolder,
    Synthetic,
    TextFile,
)
from train.config.generative import Denoiser, LanguageModel
from train.config.section import Section
from train.config.training import (
    Checkpoint,
    Clipped,
    Guard,
    Mean,
    Memory,
    Mesh,
    Microbatch,
    Optim,
    PerExample,
    Tracking,
    Train,
)
from train.config.vision import (
    DeepLab,
    DenseNet,
    Mlp,
    PreactResNet,
    ResNet,
    ResNet9,
    ResNeXt,
    RevNet,
    WiderResNet,
)
from train.errors import UserError, nearest

_Data = Digits | ImageFolder | ArrayFile | HuggingFace | SegmentationFolder | Synthetic | TextFile
_Model = (
    PreactResNet
    | ResNet9
    | ResNet
    | ResNeXt
    | WiderResNet
    | DenseNet
    | RevNet
    | Mlp
    | DeepLab
    | LanguageModel
    | Denoiser
)
_Grad = Mean | Microbatch | PerExample | Clipped
VARIANTS = {"data": get_args(_Data), "model": get_args(_Model), "grad": get_args(_Grad)}
"""What a section can be, where it can be several."""


@dataclass(frozen=True)
class Config(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = "run"
    """Names the run's folder where none is given."""
    data: Annotated[_Data, Field(discriminator="source")] = field(default_factory=Digits)
    """Training and test examples."""
    model: Annotated[_Model, Field(discriminator="name")] = field(default_factory=PreactResNet)
    """The network."""
    optim: Optim = field(default_factory=Optim)
    """The optimizer."""
    grad: Annotated[_Grad, Field(discriminator="mode")] = field(default_factory=Mean)
    """What is made of the examples' losses."""
    train: Train = field(default_factory=Train)
    """The length of the run."""
    guard: Guard = field(default_factory=Guard)
    """What is done about a step that is not finite."""
    memory: Memory = field(default_factory=Memory)
    """What training may hold."""
    mesh: Mesh = field(default_factory=Mesh)
    """The devices that train together."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """What is kept on disk."""
    tracking: Tracking = field(default_factory=Tracking)
    """Where metrics go besides."""

    @property
    def is_private(self) -> bool:
        """Whether noise is added to gradients, and batches are sampled for it."""
        return isinstance(self.grad, Clipped) and self.grad.is_private


_ADAPTER = TypeAdapter(Config)


def variants(section: str) -> dict[str, type]:
    """``{"mean": Mean, ...}``: what a section can be, by its first field; else {}."""
    return {
        get_args(next(iter(kind.__annotations__.values())))[0]: kind
        for kind in VARIANTS.get(section, ())
    }


def to_json(config: Config) -> str:
    """The config as JSON that `from_json` reads back to an equal one."""
    # By Python: pydantic writes nan and infinity as null, which comes back as None.
    plain = _ADAPTER.dump_python(config, warnings=False)
    # What is no JSON is of a wrong type, which `from_json` tells, or a path.
    return json.dumps(plain, indent=2, ensure_ascii=False, default=str) + "\n"


def from_json(text: str | bytes, where: str) -> Config:
    """Reads and checks a config.

    Args:
      text: JSON, as `to_json` writes it; keys that are left out take their defaults.
      where: what is read, for the message.

    Raises:
      UserError: naming the first field that is unknown, of a wrong type or out
        of range, its value, and what is allowed.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise UserError(f"{where}: {_first_mistake(error.errors()[0])}") from None


def check(config: Config, where: str) -> Config:
    """The same config, once every field's type and range have been checked.

    Raises:
      UserError: as `from_json`; and for a class of someone's own, of which JSON would keep the
        fields alone.
    """
    checked = from_json(to_json(config), where)
    for here, there in zip(_classes(config), _classes(checked), strict=True):
        if here is not there:
            raise UserError(
                f"{where}: expected {there.__name__}, got {here.__name__}; a config is kept as "
                "JSON, and what a class of one's own adds would be lost"
            )
    return checked


def _classes(config: Config) -> list[type]:
    """Of the whole, and of each section."""
    return [type(config), *(type(getattr(config, f.name)) for f in fields(config))]


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """``{"optim.learning_rate": 0.1, ...}``: every field by its dotted name."""
    flat: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            flat |= flatten(value, f"{prefix}{f.name}.")
        else:
            flat[prefix + f.name] = value
    return flat


def _first_mistake(error: ErrorDetails) -> str:
    loc = [str(part) for part in error["loc"]]
    here = Config()
    if len(loc) > 1 and (kind := variants(loc[0]).get(loc[1])):
        here = Config(**{loc[0]: kind()})
        del loc[1]  # a union's tag, between the section and what is below it
    name = ".".join(loc)
    if error["type"] == "unexpected_keyword_argument":
        known = flatten(here) if len(loc) > 1 else [f.name for f in fields(here)]
        return f"unknown field {name}{nearest(name, known)}"
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = error["ctx"]
        tag, allowed = context["discriminator"].strip("'"), ", ".join(map(repr, variants(name)))
        got = repr(context["tag"]) if "tag" in context else "nothing"
        return f"{name}.{tag}: expected one of {allowed}, got {got}"
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}"
    message = error["msg"].removeprefix("Input should be ")
    if error["type"] == "json_invalid" or not name:
        return f"not a config: {error['msg']}"
    if message == error["msg"]:  # a sentence of its own
        return f"{name}: {message[0].lower()}{message[1:]}, got {error['input']!r}"
    return f"{name}: expected {message}, got {error['input']!r}"
