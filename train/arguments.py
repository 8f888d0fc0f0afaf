"""Overrides from the command line, read by tyro; each mistake is one line."""

import contextlib
import io
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError

from train import config as configs
from train.config import Config
from train.config.section import Count, CountOrZero, Positive, Seed
from train.errors import UserError, nearest


@dataclass(frozen=True)
class TrainArguments:
    """Trains a network."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    """Fields of the config."""
    out: str | None = None
    """The run's folder; runs/NAME by default, a resumed config.json's own."""
    resume: bool = False
    """Continue the run in that folder."""
    profile: Annotated[int, Ge(0)] = 0
    """Trace so many steps for TensorBoard's profiler and Perfetto, from the sixth on."""
    distributed: bool = False
    """Train together with other processes; SLURM, Open MPI, Kubernetes or Cloud TPU tell which."""
    coordinator: str | None = None
    """Without such a cluster: host:port of the first process."""
    processes: int | None = None
    """Without such a cluster: how many there are."""
    process: int | None = None
    """Without such a cluster: which of them this one is, from 0."""


@dataclass(frozen=True)
class MemoryArguments:
    """Says what training would take, without training."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    """Fields of the config."""
    budget: str | None = None
    """Most that training may hold, 4GiB, 4GB or 4096MiB; memory.budget by another name."""
    target: str | None = None
    """A device that need not be there (h100, a100, v5e, ...), or a GPU's description in a file."""
    batch_size: str | None = None
    """data.batch_size by another name; auto is the largest that fits."""
    out: str | None = None
    """Folder for memory.json and memory.png; runs/NAME-memory by default."""


@dataclass(frozen=True)
class ImportArguments:
    """Makes a run that begins with weights from elsewhere."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    """Fields of the config."""
    out: str | None = None
    """The run's folder; runs/NAME by default."""
    new_classifier: bool = False
    """Leave what makes the logits at its initial values, for other classes."""
    trained_with: Literal["abn", "batch"] | None = None
    """The norm of the weights, where the network has the other and is to have them changed."""


@dataclass(frozen=True)
class CheckpointArguments:
    """Which checkpoint of a run is taken."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    best: bool = False
    """Take the best checkpoint that was kept, not the newest."""


@dataclass(frozen=True)
class ExportArguments(CheckpointArguments):
    """Writes a run's weights as safetensors."""

    out: str | None = None
    """The file; weights.safetensors in the run's folder by default."""
    names: Literal["reference", "torchvision"] = "reference"
    """What arrays are called: as in mapillary/inplace_abn, or, of a ResNet, in torchvision."""
    for_norm: Literal["abn", "batch"] | None = None
    """The norm that will use the weights, to change them for it if the network has the other."""


@dataclass(frozen=True)
class ReportArguments:
    """Shows runs as a page."""

    out: str | None = None
    """The page; report.html in the run's folder by default, of several runs in this one."""


@dataclass(frozen=True)
class EvalArguments(CheckpointArguments):
    """Measures a trained network on its test examples."""

    crops: Literal[1, 2, 10] | None = None
    """Of images of a folder: the middle; 2: that and its mirror image; 10: the corners too."""
    border: CountOrZero | None = None
    """Pixels of its mirror image around an image of a folder of which ten crops are made."""
    image_size: Count | None = None
    """Height and width of what the network sees, where it was trained on another."""
    resize: Count | None = None
    """Shorter side of images of a folder, or of Hugging Face's, before they are cut."""
    scales: tuple[Positive, ...] = ()
    """Sizes at which each image is segmented, 1 as in training; probabilities are averaged."""
    flip: bool = False
    """Segment the mirror image as well; probabilities are averaged."""


@dataclass(frozen=True)
class PredictArguments(CheckpointArguments):
    """Says what is in images."""

    top_k: Count = 5
    """Labels of each image, the likeliest first; of a segmented one, the largest."""
    json: bool = False
    """Print the predictions as JSON instead of a table."""
    out: str | None = None
    """Folder for predictions.json and masks; predictions in the run's folder by default."""


@dataclass(frozen=True)
class TextArguments(CheckpointArguments):
    """Continues a text with a trained model."""

    prompt: str = "\n"
    """What is continued."""
    length: Count = 500
    """Tokens to add."""
    temperature: Annotated[float, Ge(0)] = 0.8
    """Below 1: likelier tokens, 0: the likeliest; 1: as the model says."""
    top_k: Count | None = None
    """Draw from the k likeliest tokens alone."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """Draw from the fewest tokens that have at least this probability together."""
    seed: Seed = 0
    """Of what is drawn."""


@dataclass(frozen=True)
class ImageArguments(CheckpointArguments):
    """Draws images with a trained model."""

    labels: tuple[str, ...] = ()
    """Classes to draw, a row each; all by default."""
    count: Count = 10
    """Images of each."""
    guidance: Annotated[float, Ge(0)] | None = None
    """Above 1: more typical of their label, less varied; 1: as the model says; 0: of any. 1.5 by
    default, or 1 of a run that was never trained without a label."""
    sampler: Literal["dpm_solver", "ddim", "ddpm"] = "dpm_solver"
    """How noise is taken out."""
    steps: Count | None = None
    """Steps to take, at most those of the run's schedule; 50 by default, or all if fewer."""
    seed: Seed = 0
    """Of what is drawn."""
    out: str | None = None
    """The picture; samples.png in the run's folder by default."""


T = TypeVar("T", TrainArguments, MemoryArguments, ImportArguments)
A = TypeVar("A")


def read(defaults: T, given: Sequence[str], prog: str) -> T:
    """``defaults`` with what the command line overrides.

    Args:
      defaults: the arguments' values where nothing is given.
      given: ``["--section.field", "value", ...]``.
      prog: the command, for ``--help``.

    Raises:
      UserError: for an unknown field, or a value of a wrong type or out of range.
      SystemExit: with 0, after ``--help``.
    """
    asks_help = bool({"-h", "--help"} & set(given))
    defaults = replace(defaults, config=_with_variants(defaults.config, given))
    try:
        arguments = _parse(defaults, given, prog, console_outputs=asks_help)
    except SystemExit:
        if asks_help:
            raise
        raise UserError(_first_mistake(defaults, given, prog)) from None
    arguments = replace(arguments, config=configs.check(arguments.config, "command line"))
    return _in_range(type(defaults), arguments)


def read_options(kind: type[A], given: Sequence[str], prog: str) -> A:
    """The options of a command that is given no config.

    Raises:
      UserError: for an unknown option, or a value of a wrong type or out of range.
      SystemExit: with 0, after ``--help``.
    """
    asks_help = bool({"-h", "--help"} & set(given))
    try:
        options = _parse(kind(), given, prog, console_outputs=asks_help)
    except SystemExit:
        if asks_help:
            raise
        raise UserError(_first_mistake(kind(), given, prog)) from None
    return _in_range(kind, options)


def _in_range(kind: type[A], options: A) -> A:
    """The options, once the range of each has been checked, which tyro does not."""
    try:
        return TypeAdapter(kind).validate_python(options.__dict__)
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-")
        expected = first["msg"].removeprefix("Input should be ")
        raise UserError(f"{flag}: expected {expected}, got {first['input']!r}") from None


def _with_variants(config: Config, given: Sequence[str]) -> Config:
    """The config with the sections that ``given`` names a kind of: ``--grad.mode clipped``.

    A section of another kind begins with its own defaults.
    """
    for flag, values in _split(given):
        section, _, name = (flag or "").removeprefix("--").replace("-", "_").partition(".")
        kinds = configs.kinds(section)
        if not kinds or name != fields(getattr(config, section))[0].name or len(values) != 1:
            continue
        if values[0] not in kinds:
            raise UserError(f"{flag}: expected one of {', '.join(kinds)}, got {values[0]}")
        if not isinstance(getattr(config, section), kinds[values[0]]):
            config = replace(config, **{section: kinds[values[0]]()})
    return config


def _parse(defaults: A, given: Sequence[str], prog: str, *, console_outputs: bool) -> A:
    # Some of what tyro says of a mistake comes in spite of console_outputs=False.
    silence = contextlib.nullcontext() if console_outputs else _silence()
    with silence:
        return tyro.cli(
            type(defaults),
            prog=prog,
            args=list(given),
            default=defaults,
            config=(tyro.conf.AvoidSubcommands,),
            console_outputs=console_outputs,
        )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def _first_mistake(defaults: Any, given: Sequence[str], prog: str) -> str:
    """Why tyro refuses ``given``: its own answer fills a screen."""
    known = _flags(defaults)
    for flag, values in _split(given):
        if flag is None:
            return f"unexpected {' '.join(values)}; fields are given as --section.field VALUE"
        name = flag.removeprefix("--").replace("-", "_")
        if name not in known:
            flags = ["--" + k.replace("_", "-") for k in known]
            meant = re.sub(r"^--no-(.*\.)", r"--\1no-", flag)  # "no" goes with the field
            return f"unknown field {flag}{nearest(meant, flags)}; see {prog} --help"
        try:
            _parse(defaults, [flag, *values], prog, console_outputs=False)
        except SystemExit:
            expected = _in_words(known[name])
            got = " ".join(values) if values else "nothing"
            return f"{flag}: expected {expected}, got {got}"
    return f"cannot read {' '.join(given)}; see {prog} --help"


def _split(given: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """``["--a", "1", "2", "--b=3"]`` -> ``("--a", ["1", "2"]), ("--b", ["3"])``."""
    flag: str | None = None
    values: list[str] = []
    for token in [*given, "--"]:
        if not token.startswith("--"):
            values.append(token)
            continue
        if flag is not None or values:
            yield flag, values
        flag, _, value = token.partition("=")
        values = [value] if value else []


def _flags(defaults: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted name: type} of every argument, through the sections that the defaults have."""
    flags: dict[str, Any] = {}
    hints = get_type_hints(type(defaults))
    for f in fields(defaults):
        value = getattr(defaults, f.name)
        if isinstance(value, Config):
            flags |= _flags(value)
        elif is_dataclass(value):
            flags |= _flags(value, f"{prefix}{f.name}.")
        else:
            flags[prefix + f.name] = hints[f.name]
            if hints[f.name] is bool:
                flags[f"{prefix}no_{f.name}"] = bool
    return flags


def _in_words(kind: Any) -> str:
    """``float | None -> "a float or None"``; for a Literal, its values."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (types.UnionType, Union):
        return " or ".join(_in_words(k) for k in get_args(kind))
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        times = "one or more" if rest == [...] else f"{len(rest) + 1}"
        return f"{_in_words(first)}, {times} times"
    return {
        int: "an integer",
        float: "a number",
        bool: "no value, it is a switch",
        str: "a text",
    }.get(kind, "None" if kind is type(None) else str(kind))
