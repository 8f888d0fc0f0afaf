"""Weights in files, published folders and runs: initial values of a run, ``fnet export``.

Torch checkpoints are read as weights only: code in a file is never run.
"""

import argparse
import contextlib
import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

import fnet
from fnet import models
from fnet.interop import families
from fnet.interop import torch as interop
from fnet.layers import activations
from train import limits
from train.arguments import ExportArguments, ImportArguments
from train.config import Config
from train.data import Outputs, Scaling, storage
from train.data.columns import is_named, order_of
from train.data.model_folder import SINGLE, is_model_folder, read_config, read_tensors
from train.errors import UserError, output_file, shorten
from train.networks.model_images import class_names
from train.run.checkpoints import Checkpoints, Owner
from train.run.open_run import OpenRun, begin, write_classes
from train.run.run_folder import RunFolder, part_of
from train.run.same_data import describe_data
from train.run.seeds import read_seeds
from train.run.setup import Setup, setup
from train.tasks import kind_of

_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02")
"""First bytes of torch.save's files: a zip archive; before torch 1.6 a pickle of protocol 2."""

_MIN_TORCH = (2, 6)
"""First torch version whose ``weights_only`` is safe."""

_OPTIONS = ("new_classifier", "trained_with", "allow_nonfinite")
"""Arguments of `fnet.interop.torch` that are options of ``fnet import``."""
_ARGUMENT = re.compile(r"\b([a-z_]+)=(?:'([\w.]+)'|([\w.]+))")
_EXAMPLES = 2
"""Number of array names of each kind that are shown."""

_KINDS = {
    "fnet": "weights of fnet",
    "reference": "weights with names of mapillary/inplace_abn",
    "torchvision": "weights with names of torchvision",
    "timm": "weights with names of timm",
}
"""Title of weights of no known family, by their naming scheme."""

_NOT_IN_ARRAYS = (
    *("activation", "activation_param", "dilation", "dilate_first", "dilated"),
    *("pooling_size", "variant", "eps", "padding"),
)
"""Options of networks that the shapes of their arrays do not show."""

T = TypeVar("T")


class InitialWeights(NamedTuple):
    """Variables that a run begins with, and where they come from.

    Attributes:
      variables: ``(params, model_state)``; arrays that take their initial values are None.
      report: which arrays were read.
      values: number of values that were taken, that are new, and that were left in the file.
      source: file or folder.
    """

    variables: tuple[Any, Any]
    report: interop.LoadReport
    values: tuple[int, int, int]
    source: str

    def as_dict(self) -> dict[str, Any]:
        """Return what ``import.json`` holds."""
        report = self.report._asdict() | {"file": self.source, "renamed": self.report.renamed}
        weights = self.report.weights
        return report | {"weights": weights.title if weights else None}

    def lines(self) -> RenderableType:
        """Count the arrays and values that were taken, new and left, with a few names."""
        report = self.report
        what = report.weights.title if report.weights else _KINDS[report.names]
        taken = [k if k == n else f"{k} -> {n}" for k, n in report.read.items()]
        arrays = {"taken": taken, "new": report.initial, "left": report.unused}
        texts = [f"{what}: {self.source}"]
        for (kind, names), count in zip(arrays.items(), self.values, strict=True):
            more = ["..."] if len(names) > _EXAMPLES else []
            examples = ", ".join([*names[:_EXAMPLES], *more])
            texts.append(f"  {kind:<5} {len(names):>6,} arrays {count:>13,} values  {examples}")
        notes = [Text(f"note: {note}") for note in report.notes]
        return Group(*(Text(text, no_wrap=True, overflow="ellipsis") for text in texts), *notes)


def load(
    run: Setup,
    source: str,
    *,
    trained_with: str | None = None,
    new_classifier: bool | None = None,
    allow_nonfinite: bool = False,
) -> InitialWeights:
    """Read weights for the network of a run, from a file or folder as for `read`.

    Without ``trained_with``, it is the norm in the file's metadata, or the norm of its publisher,
    or the network's. The other options are as in `fnet.interop.torch.load_state_dict`.
    """
    weights = read(source)
    names = _field(weights.metadata, "classes", lambda names: tuple(map(str, names))) or ()
    classes = run.task.dataset.classes
    order, is_said = order_of(classes, names)
    are_others = order is None and len(names) == len(classes) and is_named(names)
    if are_others and new_classifier is False:
        raise UserError(
            f"{source}: weights for other classes: {shorten(names)}, not {shorten(classes)}; "
            "--new-classifier leaves the classifier at its initial values"
        )
    network = describe_network(run.config)
    norm, shapes = network["norm"], run.state_shapes
    try:
        found = interop.unwrap(weights.state_dict, weights.entry)
        publisher = families.recognize(families.shapes_of(found.arrays))
        trained_with = trained_with or weights.metadata.get("norm")
        if trained_with is None and publisher is not None:
            trained_with = publisher.norm
        if not {norm, trained_with} <= {"abn", "batch", None}:
            trained_with = norm  # no conversion
        loaded = interop.load_state_dict(
            shapes.params,
            shapes.model_state,
            weights.state_dict,
            norm=norm,
            trained_with=trained_with,
            new_classifier=new_classifier or (True if are_others else new_classifier),
            entry=weights.entry,
            allow_nonfinite=allow_nonfinite,
        )
    except (TypeError, ValueError) as error:
        theirs, ours = weights.metadata.get("network"), network["network"]
        which = (
            f"weights of {theirs}, the network is {ours}: " if theirs not in (None, ours) else ""
        )
        raise UserError(f"{source}: {which}{with_flags(error)}") from error
    report, options = loaded.report, weights.metadata
    if publisher is not None:
        own = {"activation": publisher.activation} if publisher.activation else {}
        options = {
            name: str(value) for name, value in {**own, **publisher.options}.items()
        } | options
    notes = (*map(with_flags, report.notes), *_differences(options, network))
    is_kept = any(families.is_classifier(name) for name in report.read.values())
    old = _field(weights.metadata, "scaling", lambda fields: Scaling(**fields))
    new = run.task.dataset.scaling
    if is_kept and new and not old:
        notes += ("the scale of its outputs is not known: they count as standardized numbers",)
    if is_kept and old and not new:
        notes += ("its outputs were standardized numbers",)
    if are_others:
        notes += (f"the classifier is new, because the weights are for {shorten(names)}",)
    elif is_kept and not is_said:
        outputs = shorten(names) if is_named(names) else "which have no names"
        ours = "the classes by number" if order else f"{shorten(classes)} in this order"
        notes += (f"the classifier is kept: its outputs, {outputs}, are taken for {ours}",)

    def variable(path: Any, a: Any) -> Any:
        """Return an array with its outputs in the order of the classes; None if it is new."""
        if isinstance(a, jax.ShapeDtypeStruct):
            return None
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not families.is_classifier(name):
            return a
        a = a[..., order] if order else a
        if not (old and new):
            return a
        # The same numbers, with the scaling of this run.
        mean, std = (np.asarray(v)[list(order)] if order else np.asarray(v) for v in old)
        shift = mean - np.asarray(new.mean) if name.endswith("bias") else 0.0
        return ((np.asarray(a) * std + shift) / np.asarray(new.std)).astype(a.dtype)

    params = jax.tree_util.tree_map_with_path(variable, loaded.params)
    variables = params, jax.tree_util.tree_map_with_path(variable, loaded.state)
    sizes = {key: math.prod(shape) for key, shape in families.shapes_of(found.arrays).items()}
    taken = sum(sizes[key] for key in report.read)
    total = sum(a.size for a in jax.tree.leaves((shapes.params, shapes.model_state)))
    values = taken, total - taken, sum(sizes.values()) - taken
    return InitialWeights(variables, report._replace(notes=notes), values, source)


def import_weights(
    config: Config, source: str, out: Path, options: ImportArguments
) -> InitialWeights:
    """Create a run at step 0 with trained weights.

    Raises:
      UserError: if file and network do not fit, or the data or the folder cannot be used.
        Nothing is written then.
    """
    check_network(config)
    run = setup(config)
    imported = load(run, source, **{name: getattr(options, name) for name in _OPTIONS})
    state = run.compile_init(imported.variables)(jax.random.key(config.train.seed))
    folder = RunFolder(out)

    def save() -> None:
        write_classes(folder, run.task.dataset.outputs)
        seeds, owner = read_seeds(folder, config), Owner(folder.id)
        position = run.training_batches(seeds.data).get_state()
        keep, shapes = config.checkpoint.keep, run.state_shapes
        with Checkpoints(folder.checkpoints, keep, shapes=shapes, owner=owner) as checkpoints:
            checkpoints.save(0, seeds.remove_key(state), position)
            checkpoints.wait()

    with folder.lock():
        data = describe_data(run.task.dataset, config.data, private=config.is_private)
        begin(folder, config, data, imported.as_dict(), save=save)
    return imported


def load_configured(run: Setup) -> InitialWeights | None:
    """Read the weights of ``model.pretrained``; None without it."""
    source = run.config.model.pretrained
    return None if source is None else load(run, source)


def _field(metadata: dict[str, str], name: str, make: Callable[[Any], T]) -> T | None:
    """Return a field of weights as a value; None if it is missing, or of another program."""
    try:
        return make(json.loads(metadata[name]))
    except (KeyError, ValueError, TypeError):
        return None


def _differences(theirs: dict[str, str], ours: dict[str, str]) -> tuple[str, ...]:
    """Compare the network's options with the weights' options, which array shapes do not show."""
    return tuple(
        f"{name} is {ours[name]} here; the weights were trained with {theirs[name]}"
        for name in ours
        if name in _NOT_IN_ARRAYS and name in theirs and theirs[name] != ours[name]
    )


class Weights(NamedTuple):
    """Content of a file of weights.

    Attributes:
      state_dict: ``{key: array}``, or a dict that wraps one. Arrays of safetensors files are read
        by ``tensor[...]``.
      metadata: text fields of a safetensors file, or the network of a run; of other files the
        outputs alone. ``classes`` names the outputs, as a JSON list, and ``scaling`` has mean and
        standard deviation of those that are numbers.
      entry: entry of the checkpoint that the user chose, or None.
    """

    state_dict: Mapping[str, Any]
    metadata: dict[str, str]
    entry: str | None = None


def read(given: str) -> Weights:
    """Read weights.

    Args:
      given: a ``.safetensors`` file, which needs no torch; a file of torch.save, perhaps with
        ``#ENTRY``, the entry of a checkpoint; a published folder; or the folder of a run, of which
        the best checkpoint is read, or else the newest.
    """
    path, entry = Path(given), None
    if not path.exists() and "#" in given:
        name, _, entry = given.rpartition("#")
        path = Path(name)
    if path.is_dir() and is_model_folder(path):
        return _read_published(path)
    if path.is_dir() and RunFolder.of(str(path)).config.is_file():
        return _read_run(RunFolder.of(str(path)))
    return _read_file(path)._replace(entry=entry)


def check_importable(path: Path) -> None:
    """Raise `UserError` for a published folder whose network a config must describe."""
    name = read_config(path).get("architecture")
    if name in models.MODELS and not str(name).startswith(("vit", "convnext")):
        raise UserError(
            f"{path} is timm's {name}: give a config of its network, as in fnet import CONFIG "
            f"{path} or fnet train CONFIG --model.pretrained {path}"
        )


def _read_published(path: Path) -> Weights:
    config = read_config(path)
    name = config.get("architecture") or config.get("model_type")
    if "architecture" not in config or not (path / SINGLE).is_file():
        raise UserError(
            f"{path} is a published {name}: train it with --model.name pretrained --model.path "
            f"{path}"
        )
    if str(name).startswith(("vit_", "deit", "convnext")):
        raise UserError(
            f"{path} is timm's {name}: train it with --model.name pretrained --model.path {path}"
        )
    if name not in models.MODELS:
        raise UserError(f"{path} is timm's {name}, which is not supported")
    tensors, metadata = read_tensors(path / SINGLE)
    options = families.variant_options(str(name), "timm")
    metadata |= {option: str(value) for option, value in options.items()}
    return Weights(tensors, metadata | describe_outputs(Outputs(class_names(config))))


def _read_run(folder: RunFolder) -> Weights:
    opened = OpenRun(folder)
    if opened.config.model.is_published:
        raise UserError(
            f"{folder.path} is a run of a published model: export it with fnet export, and train "
            "the exported folder with --model.name pretrained --model.path"
        )
    with Checkpoints(folder.checkpoints) as checkpoints:
        has_best = checkpoints.best_score > float("-inf")
    with Checkpoints(folder.checkpoints, best=has_best) as checkpoints:
        network = checkpoints.restore_network()
    variables = network.evaluation_params, network.model_state
    arrays = {
        jax.tree_util.keystr(path[1:], simple=True, separator="."): np.asarray(a)
        for path, a in jax.tree_util.tree_flatten_with_path(variables)[0]
    }
    return Weights(arrays, describe_run(opened))


def _read_file(path: Path) -> Weights:
    try:
        storage.check_regular(str(path))
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):
            hint = "; fnet downloads no weights: give a file, a folder of timm, or a run"
        raise UserError(f"cannot read {path}: {error.strerror or error}{hint}") from error
    if not start:
        raise UserError(f"{path} is empty")
    if path.suffix == ".safetensors":
        return Weights(*read_tensors(path))
    if not start.startswith(_TORCH_MAGIC):
        raise UserError(
            f"{path} is not a checkpoint: it begins with {start!r}, unlike files of torch.save; "
            "the name of a safetensors file ends in .safetensors"
        )
    content = _read_torch(path)
    return Weights(content, describe_outputs(Outputs(_torch_classes(content))))


def _torch_classes(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the outputs, where a checkpoint of torch has them as torchvision's data sets do."""
    numbers, names = content.get("class_to_idx"), content.get("classes")
    if isinstance(numbers, Mapping) and sorted(map(str, numbers.values())) == sorted(
        map(str, range(len(numbers)))
    ):
        return tuple(sorted(map(str, numbers), key=lambda name: int(numbers[name])))
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()


def export_weights(opened: OpenRun, options: ExportArguments) -> Path:
    """Write a run's weights with torch's names and layouts and return the path.

    The weights are a checkpoint's: averaged parameters if the run has them. The metadata name
    the network, its norm and its activation.
    """
    folder = opened.folder
    check_network(opened.config)
    out = output_file(options.out, folder.weights)
    if out.suffix != ".safetensors":
        raise UserError(f"--out: expected a file that ends in .safetensors, got {out}")
    _, (params, state, step) = opened.network(best=options.best)
    described = describe_run(opened)
    norm = described["norm"]
    try:
        names = options.names or interop.namings(params, state)[0]
        arrays = interop.to_torch(params, state, names=names, norm=norm, for_norm=options.for_norm)
    except ValueError as error:
        raise UserError(f"{folder.path}: {with_flags(error)}") from error
    metadata = {"names": names, "norm": options.for_norm or norm, "fnet": fnet.__version__}
    metadata = {"format": "pt"} | described | metadata | folder.origin(step)
    write(out, arrays, metadata)
    return out


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    part = part_of(path)
    try:
        part.touch()  # fails with a shorter message than save_file
        mode = part.stat().st_mode
        save_file(arrays, part, metadata)
        part.chmod(mode)  # save_file makes files that only their owner reads
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {why}; choose another --out") from error


def check_network(config: Config) -> None:
    """Raise `UserError` for a network without counterpart in torch."""
    if not kind_of(config).labels_images:
        raise UserError(
            f"model.name: expected a network for images, got {config.model.name}; torch's names "
            "are known for those only"
        )


def describe_network(config: Config) -> dict[str, str]:
    """Return the network's name and options as text, with its norm."""
    fields = config.model.options
    if "activation_param" in fields:
        param = fields.pop("activation_param")
        if activations.get(fields["activation"]).parameter:
            fields["activation_param"] = activations.parameter_of(fields["activation"], param)
    variant = f"{fields.pop('depth', '')}{'_a2' if fields.pop('a2', False) else ''}"
    text = {"network": f"{config.model.name}{variant}"} | {k: str(v) for k, v in fields.items()}
    return {"norm": "abn"} | text


def describe_run(opened: OpenRun) -> dict[str, str]:
    """Return the network of a run as text, and the meaning of its outputs if its folder says it."""
    is_known = opened.folder.classes.is_file()
    outputs = describe_outputs(opened.outputs) if is_known else {}
    return describe_network(opened.config) | outputs


def describe_outputs(outputs: Outputs) -> dict[str, str]:
    """Return the names of outputs, and the scaling of those that are numbers, as text."""
    text = {"classes": json.dumps(list(outputs.names))} if outputs.names else {}
    if outputs.scaling:
        text["scaling"] = json.dumps(outputs.scaling._asdict())
    return text


def with_flags(message: Exception | str) -> str:
    """Replace the library's arguments in a message by the program's flags."""

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2] or match[3]
        section, flag = "" if name in _OPTIONS else "model.", name.replace("_", "-")
        if value in ("True", "False"):
            return f"--{section}{'' if value == 'True' else 'no-'}{flag}"
        return f"--{section}{flag} {value}"

    text = str(message).removeprefix("from_torch: ").removeprefix("to_torch: ")
    return re.sub(r", (?=--)", " ", _ARGUMENT.sub(flag, text))


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{path}: reading it needs torch, which is not installed: "
            "pip install 'fnet-jax[torch]', or save the weights as .safetensors"
        ) from None
    version = tuple(int(n) for n in torch.__version__.split(".")[:2])
    if version < _MIN_TORCH:
        raise UserError(
            f"{path}: torch {torch.__version__} may run code in a checkpoint (CVE-2025-32434): "
            "pip install 'fnet-jax[torch]'"
        )

    size, entries, unpacked = path.stat().st_size, 0, 0

    def to_numpy(value: Any) -> Any:
        nonlocal entries, unpacked
        if isinstance(value, Mapping):
            entries += len(value)  # of one that holds another twice, too
            limits.ENTRIES.check(entries, path)
            return {str(key): to_numpy(item) for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        unpacked += value.numel() * value.element_size()  # of views, too
        limits.check_unpacked(unpacked, size, path)
        known = (torch.float16, torch.float32, torch.float64)
        unknown = value.is_floating_point() and value.dtype not in known
        return (value.float() if unknown else value).detach().contiguous().numpy()

    with (
        contextlib.suppress(OSError, ValueError, zipfile.BadZipFile),
        zipfile.ZipFile(path) as parts,
    ):
        limits.check_unpacked(sum(p.file_size for p in parts.infolist()), size, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # torchvision's and timm's scripts store their options, a plain object.
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise UserError(f"{path}: {_explain(error)}") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not the state dict of a network")
    try:
        return to_numpy(content)
    except (TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} holds tensors that are not plain arrays: {reason}") from error


def _explain(error: Exception) -> str:
    """Say in one line why torch refuses a file; its own message suggests to run any code."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"it needs {match[1]}, which is not a weight, and code in a checkpoint is never run; "
            "if you trust the file, save its state dict alone: torch.save(m.state_dict(), ...)"
        )
    first = str(error).strip().split("\n")[0].split(". ")[0]
    return f"damaged or not a checkpoint of torch ({first or 'it ends early'})"
