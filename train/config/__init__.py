"""Config of a run: frozen dataclasses. The docstrings of their fields are the --help texts."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

import fnet
from train.config.data import Data
from train.config.gradient import GradientMode
from train.config.network import Model
from train.config.registry import PLUGINS, all_variants, tag_of, variants
from train.config.section import Section
from train.config.training import Checkpoint, Memory, Mesh, Nonfinite, Optim, Tracking, Train
from train.errors import UserError, did_you_mean


def _default(section: str, name: str) -> Callable[[], Any]:
    return lambda: variants(section)[name]()


@dataclass(frozen=True)
class Config(Section):
    """Config of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = "run"
    """Name of the run; its folder is runs/NAME by default."""
    data: Data = field(default_factory=_default("data", "digits"))
    """Data source."""
    model: Model = field(default_factory=_default("model", "preact_resnet"))
    """Network."""
    optim: Optim = field(default_factory=Optim)
    """Optimizer and learning rate schedule."""
    grad: GradientMode = field(default_factory=_default("grad", "mean"))
    """Gradient mode."""
    train: Train = field(default_factory=Train)
    """Length, precision and random seed of the run."""
    nonfinite: Nonfinite = field(default_factory=Nonfinite)
    """Steps whose loss or gradient is NaN or infinite."""
    memory: Memory = field(default_factory=Memory)
    """Memory budget and rematerialization (gradient checkpointing)."""
    mesh: Mesh = field(default_factory=Mesh)
    """Device mesh; on CPU, each core can be a device."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Checkpoints of the train state."""
    tracking: Tracking = field(default_factory=Tracking)
    """Experiment trackers, in addition to metrics.jsonl."""

    @property
    def sections(self) -> dict[str, Section]:
        """Sections by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}

    @property
    def is_private(self) -> bool:
        """Whether training is differentially private: noise and Poisson sampling."""
        return self.grad.is_private

    @property
    def is_release_only(self) -> bool:
        """Whether the run writes only what its privacy guarantee covers."""
        return self.grad.release_only

    @property
    def examples_per_user(self) -> int | None:
        """Largest number of examples of a user per step; None if privacy is per example."""
        return None if self.data.user is None else self.data.examples_per_user


def __getattr__(name: str) -> Any:
    """Look up a variant by the name of its class: ``from train.config import ImageFolder``.

    Their modules import this one, so they are imported when they are needed.
    """
    if name == "__all__":
        own = [name for name in globals() if not name.startswith("_")]
        return [*own, *(kind.__name__ for kind in all_variants())]
    if not name.startswith("_"):
        for kind in all_variants():
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.lru_cache(maxsize=1)
def _adapter(kinds: tuple[type[Section], ...]) -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def to_json(config: Config, run: str | None = None) -> str:
    """Write a config as JSON, which `from_json` reads back as an equal config.

    The key ``fnet_version`` holds the version of fnet that wrote it, and ``run`` the id of its run.
    """
    # Converted by Python, because pydantic writes nan and infinity as null.
    plain = (
        {"fnet_version": fnet.__version__}
        | ({"run": run} if run else {})
        | _adapter(tuple(all_variants())).dump_python(config, warnings=False)
    )
    # Values that JSON lacks are paths, or of a wrong type, which `from_json` reports.
    return json.dumps(plain, indent=2, ensure_ascii=False, default=str) + "\n"


def from_json(text: str | bytes, where: str) -> Config:
    """Read and check a config. Missing fields take their defaults.

    Raises:
      UserError: for an unknown field, a wrong type or a value out of range. The error names the
        source ``where``, the first such field, its value, the allowed values and, if it differs,
        the version of fnet that wrote the config.
    """
    text, version = _split_version(text)
    try:
        return _adapter(tuple(all_variants())).validate_json(text)
    except ValidationError as error:
        written = f" (written by fnet {version}, this is {fnet.__version__})"
        raise UserError(
            f"{where}: {_first_mistake(error.errors()[0])}"
            f"{written if version not in (None, fnet.__version__) else ''}"
        ) from None


def _split_version(text: str | bytes) -> tuple[str | bytes, str | None]:
    """Return the JSON of a config alone, and the version of fnet that wrote it."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        return text, None
    if not isinstance(plain, dict):
        return text, None
    version, _ = plain.pop("fnet_version", None), plain.pop("run", None)
    return json.dumps(plain, ensure_ascii=False), version


def check(config: Config, where: str) -> Config:
    """Check the type and range of every field; return an equal config."""
    checked = from_json(to_json(config), where)
    classes = ([type(c), *map(type, c.sections.values())] for c in (config, checked))
    for given, expected in zip(*classes, strict=True):
        if given is not expected:
            raise UserError(
                f"{where}: expected {expected.__name__}, got {given.__name__}; a config is saved "
                "as JSON, which cannot hold a subclass"
            )
    return checked


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """``{"optim.learning_rate": 0.1, ...}``: all fields by their dotted names."""
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
    default = Config()
    if len(loc) > 1 and (kind := variants(loc[0]).get(loc[1])):
        default = replace(default, **{loc[0]: kind()})
        del loc[1]  # the variant's name, which pydantic inserts after the section
    name = ".".join(loc)
    if error["type"] == "unexpected_keyword_argument":
        known = flatten(default) if len(loc) > 1 else [f.name for f in fields(default)]
        return f"unknown field {name}{did_you_mean(name, known)}"
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = error["ctx"]
        allowed = ", ".join(map(repr, variants(name)))
        if "tag" not in context:
            return f"{name}.{tag_of(name)}: expected one of {allowed}, got nothing"
        return (
            f"{name}.{tag_of(name)}: expected one of {allowed}, got {context['tag']!r}; for one of "
            f"your own, name its file in {PLUGINS}"
        )
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}"
    message = error["msg"].removeprefix("Input should be ")
    if error["type"] == "json_invalid" or not name:
        return f"not a config: {error['msg']}"
    if message == error["msg"]:  # the message is a full sentence
        return f"{name}: {message[0].lower()}{message[1:]}, got {error['input']!r}"
    return f"{name}: expected {message}, got {error['input']!r}"
