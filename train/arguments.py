"""Options of every command, parsed by tyro. A mistake is reported in one line."""

import contextlib
import inspect
import io
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, Union

import tyro
from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError

from train import config as configs
from train.config import Config, recipes, registry
from train.config import section as sections
from train.config.section import Count, CountOrZero, NonNegative, Positive, Seed
from train.errors import UserError, did_you_mean

# Tyro prints the docstrings below for --help: a class for the command, a field for its flag. It
# keeps line breaks within a field's text and does not break long lines of the command's.


def _default(text: str) -> Any:
    return tyro.conf.arg(help_behavior_hint=f"(default: {text})")


@dataclass(frozen=True)
class TrainArguments:
    """Train a network.

    CONFIG is a recipe (see `fnet configs`), a recipe file or a run folder.

    Every field of the config is a flag: `fnet train CONFIG --help` lists them.
    """

    out: Annotated[str | None, _default("runs/NAME, or the run to resume")] = None
    """Run folder."""
    resume: bool = False
    """Resume the run in the run folder, or start it if there is none."""
    folds: Annotated[int | None, Ge(2), _default("none")] = None
    """Train so many runs, each with another part of the images held out, and report them all."""
    profile: Annotated[int, Ge(0), _default("none")] = 0
    """Number of steps to trace for TensorBoard and Perfetto, starting at step 6."""
    distributed: bool = False
    """Train with the other processes of this SLURM, Open MPI, Kubernetes or Cloud TPU job."""
    coordinator: Annotated[str | None, _default("from the cluster")] = None
    """Address of process 0, as host:port."""
    processes: Annotated[int | None, _default("from the cluster")] = None
    """Number of processes."""
    process: Annotated[int | None, _default("from the cluster")] = None
    """Index of this process, from 0."""
    connect_timeout: Annotated[int, Ge(1)] = 300
    """Seconds that a process waits for the others at the start."""


@dataclass(frozen=True)
class MemoryArguments:
    """Predict how much memory training takes, without training.

    CONFIG is a recipe (see `fnet configs`), a recipe file or a run folder.

    Every field of the config is a flag: `fnet memory CONFIG --help` lists them.
    """

    budget: Annotated[str | None, _default("memory.budget of the config")] = None
    """Memory limit per device, such as 4GiB, 4GB or 4096MiB."""
    target: Annotated[str | None, _default("this machine")] = None
    """Device to compile for: h100, v5e, a file that describes a GPU, or several: h100,l4."""
    batch_size: Annotated[str | None, _default("data.batch_size of the config")] = None
    """Batch size, or auto for the largest that fits."""
    out: Annotated[str | None, _default("runs/NAME-memory")] = None
    """Folder for memory.json and memory.png."""


@dataclass(frozen=True)
class ImportArguments:
    """Start a run from pretrained weights.

    CONFIG is a recipe (see `fnet configs`), a recipe file or a run folder.

    WEIGHTS is a torch checkpoint or a safetensors file, a published folder or a run. FILE#ENTRY
    reads the entry ENTRY of a checkpoint.

    Every config field is a flag: `fnet import CONFIG WEIGHTS --help` lists them.
    """

    out: Annotated[str | None, _default("runs/NAME")] = None
    """Run folder."""
    new_classifier: bool = False
    """Initialize the classifier layer instead of loading it, to train on other classes."""
    trained_with: Annotated[
        Literal["abn", "batch"] | None, _default("the publisher's, or the network's")
    ] = None
    """Norm of the pretrained network; the weights are converted if this network has another."""
    allow_nonfinite: bool = False
    """Accept weights with NaN or infinity."""


@dataclass(frozen=True)
class ImportModelArguments:
    """Make a published language model a run.

    MODEL is a folder with config.json, safetensors files and tokenizer.json of Hugging Face. The
    weights are not copied.

    Every config field is a flag: `fnet import MODEL --help` lists them.
    """

    out: Annotated[str | None, _default("runs/NAME")] = None
    """Run folder."""


Way = Literal["full", "compact", "lora", "lora_int8", "lora_nf4"]


@dataclass(frozen=True)
class FitArguments:
    """Show the ways to fine-tune a published model in a budget, from its headers alone.

    MODEL is a folder with config.json and safetensors files of Hugging Face. No weight is read.
    """

    budget: Annotated[str | None, _default("the memory of --target")] = None
    """Memory of the device, such as 24GB or 80GiB."""
    target: Annotated[str | None, _default("this machine, without times")] = None
    """Device to compile for, such as rtx4090 or h100, or a file that describes a GPU."""
    context: Annotated[Annotated[int, Ge(2)] | None, _default("2048, or the model's")] = None
    """Context length: tokens per row."""
    batch_size: Count = 8
    """Rows per step, in microbatches."""
    ways: Annotated[tuple[Way, ...], _default("all that may be better than others")] = ()
    """Ways to show, of full, compact, lora, lora_int8 and lora_nf4."""
    lora_rank: Count = 16
    """Rank of the adapters."""
    exact: bool = False
    """Compile all blocks of the model instead of a few, which takes minutes for large models."""


@dataclass(frozen=True)
class CheckpointArguments:
    """Choose a checkpoint of a run."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    best: bool = False
    """Use the best saved checkpoint instead of the newest."""


@dataclass(frozen=True)
class ExportArguments(CheckpointArguments):
    """Write the weights of a run, or its network as a program.

    RUN is a run folder.
    """

    needs: ClassVar[sections.Needs] = dict.fromkeys(
        ("names", "for_norm", "adapters"), ("format", "safetensors".__eq__)
    )

    out: Annotated[str | None, _default("weights.safetensors, or exported/, in the run")] = None
    """Output file; a folder for a published model."""
    format: Literal["safetensors", "stablehlo", "onnx"] = "safetensors"
    """Weights alone, or an image network for any batch size: for jax.export, or for ONNX."""
    names: Annotated[
        Literal["reference", "torchvision", "timm"] | None, _default("the first that fits")
    ] = None
    """Array names: of mapillary/inplace_abn (reference), torchvision or timm, where it has them."""
    for_norm: Annotated[Literal["abn", "batch"] | None, _default("the norm of the network")] = None
    """Norm of the network that will load the weights; they are converted to it."""
    adapters: bool = False
    """Write the adapters of a published model alone, as PEFT reads them, instead of merging."""


@dataclass(frozen=True)
class ReportArguments:
    """Write an HTML page about one or several runs.

    RUN is a run folder.
    """

    out: Annotated[str | None, _default("report.html in the run, or here for several")] = None
    """Output file."""


@dataclass(frozen=True)
class EvalArguments(CheckpointArguments):
    """Evaluate a run on its test examples, or on others.

    RUN is a run folder.
    """

    needs: ClassVar[sections.Needs] = {"chat": ("choices", bool)}

    path: Annotated[str | None, _default("data.path of the run")] = None
    """Folder or file of other test examples. A folder without splits is evaluated whole."""
    split: Annotated[str | None, _default("data.test_split of the run")] = None
    """Split to evaluate on, such as test or train."""
    mask_reading: Annotated[Literal["index", "color"] | None, _default("as in the run")] = None
    """Segmentation: whether the numbers of masks count, or their colors."""
    crops: Annotated[Literal[1, 2, 10] | None, _default("data.crops of the run")] = None
    """Test-time crops per image: 1 center crop, 2 with its horizontal flip, 10 for ten-crop."""
    border: Annotated[CountOrZero | None, _default("data.border of the run")] = None
    """Pixels of reflected border that are added to each image before ten-crop."""
    image_size: Annotated[Count | None, _default("data.image_size of the run")] = None
    """Height and width of the network's input."""
    resize: Annotated[Count | None, _default("data.resize of the run")] = None
    """Shorter side of each image before it is cropped."""
    scales: Annotated[tuple[Positive, ...], _default("1")] = ()
    """Segmentation: scales for test-time augmentation; 1 is the scale of training."""
    flip: bool = False
    """Segmentation: average with the predictions for the horizontal flip."""
    choices: Annotated[str | None, _default("the run's test examples")] = None
    """Language models: a JSON lines file of multiple-choice questions to answer instead."""
    chat: bool = False
    """With choices: write questions with the chat template, as a user's messages."""


@dataclass(frozen=True)
class PredictArguments(CheckpointArguments):
    """Predict the labels of images, of their pixels, or of texts.

    RUN is a run folder. FILE is an image file, or a folder of images. Of a run that classifies
    texts, it is a file of JSON lines or .parquet, with the fields of the training data but the
    label.
    """

    top_k: Count = 5
    """Number of labels to report per image or text: the most probable, or the largest by area."""
    json: bool = False
    """Print the predictions as JSON instead of a table."""
    csv: bool = False
    """Also write predictions.csv: a row per image or text, with the probability of its label."""
    out: Annotated[str | None, _default("predictions in the run folder")] = None
    """Folder for predictions.json, masks/ and overlays/."""


@dataclass(frozen=True)
class AttributeArguments(CheckpointArguments):
    """Rank the training examples of a run: those with the highest loss may have wrong labels.

    RUN is a run folder. With --example, or --prompt and --completion, the training examples are
    ranked by how much they support this prediction.
    """

    needs: ClassVar[sections.Needs] = {
        "label": ("example", bool),
        **dict.fromkeys(("damping", "curvature"), ("method", "ekfac".__eq__)),
    }

    example: str | None = None
    """Image file whose predicted label to attribute to training examples."""
    label: Annotated[str | None, _default("the predicted label")] = None
    """Another label of the image."""
    prompt: str | None = None
    """Text before --completion; of a chat run, the user's message."""
    completion: str | None = None
    """Text whose likelihood to attribute to training examples."""
    method: Literal["ekfac", "tracin"] = "ekfac"
    """Influence functions with EK-FAC curvature, or plain inner products of gradients."""
    damping: Positive = 0.1
    """Damping of the curvature, relative to the mean eigenvalue of each parameter."""
    curvature: Count = 4096
    """Largest number of training examples that the curvature is computed from."""
    queries: Count = 256
    """Number of test examples whose mean loss is attributed without a prediction."""
    top_k: Count = 10
    """Number of training examples to print."""


_OF_MODEL = "as generation_config.json of the model"


@dataclass(frozen=True)
class TextArguments(CheckpointArguments):
    """Continue a text with a language model.

    RUN is the run folder of a language model, or the folder of a published one.
    """

    needs: ClassVar[sections.Needs] = {"system": ("chat", bool)}

    prompt: Annotated[tuple[str, ...], _default("a line break; in a chat, the input")] = ()
    """Texts to continue, or with --chat the user's messages. Several are printed as JSON lines."""
    prompts: str | None = None
    """File of prompts: lines of a text, or the field prompt of JSON lines or Parquet."""
    batch_size: Count = 16
    """Number of prompts that are continued at once."""
    chat: bool = False
    """Answer with the chat template of the model; without --prompt, until the input ends."""
    system: str | None = None
    """System message of the chat."""
    length: Count = 500
    """Largest number of tokens to generate; a token that ends the text ends it."""
    temperature: Annotated[NonNegative | None, _default(f"{_OF_MODEL}, or 0.8")] = None
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[Count | None, _default(f"{_OF_MODEL}, or all")] = None
    """Sample only from the k most probable tokens."""
    top_p: Annotated[Annotated[float, Gt(0), Le(1)] | None, _default(f"{_OF_MODEL}, or 1")] = None
    """Nucleus (top-p) threshold."""
    min_p: Annotated[sections.Share | None, _default(f"{_OF_MODEL}, or 0")] = None
    """Sample only tokens with this share of the most probable one's probability."""
    repetition_penalty: Annotated[Positive | None, _default(f"{_OF_MODEL}, or 1")] = None
    """Penalty of tokens that the text or its prompt has already; 1 is none."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and are not printed."""
    seed: Seed = 0
    """Random seed; each further prompt has the next one."""


@dataclass(frozen=True)
class ImageArguments(CheckpointArguments):
    """Draw images with a diffusion model.

    RUN is the run folder of a denoiser.
    """

    labels: Annotated[tuple[str, ...], _default("all")] = ()
    """Classes to draw, one row each."""
    count: Count = 10
    """Number of images per class."""
    guidance: Annotated[NonNegative | None, _default("1.5, or 1 without label_dropout")] = None
    """Classifier-free guidance scale; 0 ignores the label, 1 is no guidance."""
    sampler: Literal["dpm_solver", "ddim", "ddpm"] = "dpm_solver"
    """Diffusion sampler."""
    steps: Annotated[Count | None, _default("50, or model.steps if fewer")] = None
    """Number of sampling steps, at most model.steps."""
    seed: Seed = 0
    """Random seed."""
    out: Annotated[str | None, _default("samples.png in the run folder")] = None
    """Output image."""


@dataclass(frozen=True)
class ConfigsArguments:
    """List the recipes that come with fnet."""


A = TypeVar("A")


@dataclass(frozen=True)
class _WithConfig(Generic[A]):
    """Options of a command and the fields of its config, as flags of one command line."""

    options: Annotated[A, tyro.conf.arg(name=""), tyro.conf.DisallowNone]
    config: Annotated[Config, tyro.conf.arg(name="")]


def read_command(argv: Sequence[str], usage: str, kind: type[A]) -> tuple[list[str], A]:
    """Return the positional arguments of a command, and its options."""
    values, flags = positional(argv, usage, kind)
    return values, read(kind, flags, _prog(usage, values))


def read_config(
    argv: Sequence[str], usage: str, kind: type[A], load: Callable[[str], Config] = recipes.load
) -> tuple[list[str], A, Config]:
    """Return the positional arguments of a command, its options and a config with its flags.

    The config is that of the first argument.
    """
    values, flags = positional(argv, usage, kind)
    return values, *read_with_config(kind, load(values[0]), flags, _prog(usage, values))


def _read_eval(argv: Sequence[str]) -> tuple[list[str], EvalArguments]:
    for word in argv:
        if word.startswith("--data."):
            raise UserError(
                f"{word}: fnet eval takes the data of the run; give --split NAME or --path FOLDER "
                "for other examples, or change how masks are read with fnet train RUN --resume"
            )
    return read_command(argv, "fnet eval RUN", EvalArguments)


READERS: dict[str, Callable[[Sequence[str]], tuple[Any, ...]]] = {
    "train": lambda argv: read_config(argv, "fnet train CONFIG", TrainArguments),
    "eval": _read_eval,
    "predict": lambda argv: read_command(argv, "fnet predict RUN FILE...", PredictArguments),
    "attribute": lambda argv: read_command(argv, "fnet attribute RUN", AttributeArguments),
    "memory": lambda argv: read_config(argv, "fnet memory CONFIG", MemoryArguments),
    "fit": lambda argv: read_command(argv, "fnet fit MODEL", FitArguments),
    "sample": lambda argv: positional(argv, "fnet sample RUN", TextArguments, ImageArguments),
    "import": lambda argv: (argv,),  # its usage depends on the first word
    "export": lambda argv: read_command(argv, "fnet export RUN", ExportArguments),
    "report": lambda argv: read_command(argv, "fnet report RUN...", ReportArguments),
    "configs": lambda argv: read_command(argv, "fnet configs", ConfigsArguments),
}
"""Read the words behind a command as the arguments of `main` in its module.

None of them imports JAX, so that ``--help`` and mistakes are printed at once.
"""


def _prog(usage: str, values: Sequence[str]) -> str:
    for name, value in zip(usage.split()[2:], values, strict=False):
        usage = usage if name.endswith("...") else usage.replace(name, value, 1)
    return usage


def positional(argv: Sequence[str], usage: str, *options: type) -> tuple[list[str], list[str]]:
    """Split the words after a command's name into positional arguments and flags.

    Dots in a usage, ``"fnet predict RUN FILE..."``, allow one or more. Without positional
    arguments, ``--help`` shows the ``options``.
    """
    names = usage.split()[2:]
    values = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    if len(values) < len(names):
        if {"-h", "--help"} & set(argv):
            for kind in options[:-1]:
                with contextlib.suppress(SystemExit):
                    read(kind, ["--help"], usage)
            read(options[-1], ["--help"], usage)
        name = names[len(values)].removesuffix("...")
        where = " before the flags" if len(argv) > len(values) else ""
        raise UserError(f"missing {name}{where}; usage: {usage}")
    if len(values) > len(names) and not usage.endswith("..."):
        raise UserError(f"unexpected {values[len(names)]}; usage: {usage}")
    return values, list(argv[len(values) :])


def read(kind: type[A], flags: Sequence[str], prog: str) -> A:
    """Parse the options of a command; ``prog`` is shown by ``--help``."""
    return _in_range(kind, _parse(kind, kind(), flags, prog))


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def given_options(options: Any) -> dict[str, Any]:
    """Return the options by name that are not at their default."""
    return {f.name: v for f in fields(options) if (v := getattr(options, f.name)) != f.default}


def read_with_config(
    kind: type[A], config: Config, flags: Sequence[str], prog: str
) -> tuple[A, Config]:
    """Parse the options of a command and the overrides of its config, as `read`."""
    defaults = _WithConfig(kind(), _switch_variants(config, flags))
    summary = (inspect.getdoc(kind) or "").partition("\n")[0]
    parsed = _parse(_WithConfig[kind], defaults, flags, prog, summary)  # type: ignore[valid-type]
    # The recipe was checked under its own name. A mistake that is left is one of the flags.
    config = configs.check(parsed.config, "command line")
    return _in_range(kind, parsed.options), config


def _in_range(kind: type[A], options: A) -> A:
    try:
        options = TypeAdapter(kind).validate_python(options.__dict__)
    except ValidationError as error:
        first = error.errors()[0]
        expected = first["msg"].removeprefix("Input should be ")
        flag = flag_of(str(first["loc"][0]))
        raise UserError(f"{flag}: expected {expected}, got {first['input']!r}") from None
    for text in sections.without_effect(options, flag_of):
        raise UserError(f"{text}; leave one of them out")
    return options


def _switch_variants(config: Config, flags: Sequence[str]) -> Config:
    """Replace a section by the defaults of another variant: ``--grad.mode clipped``."""
    for flag, values in _split(flags):
        section, _, name = (flag or "").removeprefix("--").replace("-", "_").partition(".")
        variants = configs.variants(section)
        if not variants or name != configs.tag_of(section) or len(values) != 1:
            continue
        if values[0] not in variants:
            raise UserError(f"{flag}: expected one of {', '.join(variants)}, got {values[0]}")
        current: Any = config.sections[section]  # a dataclass
        kind = variants[values[0]]
        if type(current) is not kind:
            # They share the fields of a base class, such as size and augmentation of images.
            base = next(base for base in type(current).__mro__ if issubclass(kind, base))
            names = {f.name for f in fields(base)} if is_dataclass(base) else set()
            names -= {f.name for f in fields(kind) if f.name in kind.__annotations__}
            if section == "data":  # what the recipe sets of other fields of the same type
                both = type(current), kind
                old, new = (typing.get_type_hints(c, include_extras=True) for c in both)
                names |= {n for n in given_options(current) if old[n] == new.get(n)}
            switched: Any = {section: kind(**{name: getattr(current, name) for name in names})}
            config = replace(config, **switched)
    return config


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _variant_tag(
    field: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Show all variants for a field that names its section's: ``--data.source {digits,...}``."""
    names = typing.get_args(field.type) if field.type_origin is Literal else ()
    for tags in map(tuple, map(configs.variants, registry.sections())):
        if len(names) == 1 and names[0] in tags:
            return tyro.constructors.PrimitiveConstructorSpec(
                nargs=1,
                metavar=f"{{{','.join(tags)}}}",
                instance_from_str=lambda words: words[0],
                is_instance=tags.__contains__,
                str_from_instance=lambda value: [value],
                choices=tags,
            )
    return None


def _parse(
    kind: Any, defaults: Any, flags: Sequence[str], prog: str, description: str | None = None
) -> Any:
    help_requested = bool({"-h", "--help"} & set(flags))
    markers: list[Any] = [tyro.conf.AvoidSubcommands]
    if not isinstance(defaults, _WithConfig):
        markers.append(tyro.conf.DisallowNone)

    def parse(words: Sequence[str]) -> Any:
        with contextlib.ExitStack() as stack:
            if not help_requested:  # Tyro prints some errors even with console_outputs=False.
                for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                    stack.enter_context(redirect(io.StringIO()))
            return tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=list(words),
                default=defaults,
                config=markers,
                console_outputs=help_requested,
                registry=_REGISTRY,
            )

    _check_repeated(flags)
    try:
        return parse(flags)
    except SystemExit:
        if help_requested:
            raise
        raise UserError(_first_mistake(parse, defaults, flags, prog)) from None


def _check_repeated(flags: Sequence[str]) -> None:
    """Refuse a flag that is given twice, of which only the last value would count."""
    given: dict[str, list[str]] = {}
    for flag, values in _split(flags):
        text = [flag or "", *values]
        name = re.sub(r"^(--(?:.*\.)?)no-", r"\1", text[0]).replace("_", "-")
        if flag is not None and given.setdefault(name, text) != text:
            raise UserError(
                f"{flag}: given twice, as {' '.join(given[name])} and as {' '.join(text)}; give it "
                "once"
            )


def _first_mistake(
    parse: Callable[[Sequence[str]], Any], defaults: Any, flags: Sequence[str], prog: str
) -> str:
    """Describe the first flag that tyro refuses in one line; its own message fills a screen."""
    known = _flag_types(defaults)
    for flag, values in _split(flags):
        if flag is None:
            return f"unexpected {' '.join(values)}; see {prog} --help"
        name = flag.removeprefix("--").replace("-", "_")
        if name not in known:
            section, _, field = name.partition(".")
            kinds = registry.variants(section).items()
            owners = [k for k, v in kinds if field in v.__dataclass_fields__]
            if owners:
                tag = f"--{section}.{registry.tag_of(section)}"
                return f"{flag}: an option of {tag} {' or '.join(owners)}; see {prog} --help"
            names = [*map(flag_of, known)]
            meant = re.sub(r"^--no-(.*\.)", r"--\1no-", flag)  # "no" goes with the field
            return f"unknown option {flag}{did_you_mean(meant, names)}; see {prog} --help"
        try:
            parse([flag, *values])
        except SystemExit:
            got = " ".join(values) if values else "nothing"
            expected = _describe(known[name], none_allowed="." in name)
            return f"{flag}: expected {expected}, got {got}"
    return f"cannot read {' '.join(flags)}; see {prog} --help"


def _split(words: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """``["--a", "1", "2", "--b=3"]`` -> ``("--a", ["1", "2"]), ("--b", ["3"])``."""
    flag: str | None = None
    values: list[str] = []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag is not None or values:
            yield flag, values
        flag, _, value = word.partition("=")
        values = [value] if value else []


def _flag_types(defaults: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted name: type} of every flag, through the sections of the defaults."""
    flag_types: dict[str, Any] = {}
    hints = typing.get_type_hints(type(defaults), include_extras=True)
    for f in fields(defaults):
        value = getattr(defaults, f.name)
        if isinstance(defaults, _WithConfig):
            flag_types |= _flag_types(value)
        elif is_dataclass(value):
            flag_types |= _flag_types(value, f"{prefix}{f.name}.")
        else:
            flag_types[prefix + f.name] = hints[f.name]
            if hints[f.name] is bool:
                flag_types[f"{prefix}no_{f.name}"] = bool
    return flag_types


def _describe(kind: Any, *, none_allowed: bool = True) -> str:
    """``float | None -> "a number or None"``; the values of a Literal."""
    if typing.get_origin(kind) is Annotated:
        plain, *marks = typing.get_args(kind)
        tables = [mark.names() for mark in marks if isinstance(mark, sections.Choice)]
        return _describe(Literal[tuple(tables[0])] if tables else plain, none_allowed=none_allowed)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (types.UnionType, Union):
        kinds = [k for k in typing.get_args(kind) if none_allowed or k is not type(None)]
        return " or ".join(map(_describe, kinds))
    if typing.get_origin(kind) is tuple:
        first, *rest = typing.get_args(kind)
        times = "one or more" if rest == [...] else f"{len(rest) + 1}"
        return f"{_describe(first)}, {times} times"
    names = {int: "an integer", float: "a number", str: "text", type(None): "None"}
    return names.get(kind, "no value" if kind is bool else str(kind))
