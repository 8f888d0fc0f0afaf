"""`fnet import` and `fnet export`: a run from weights made elsewhere, and a run's for elsewhere."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax import Array
from rich.markup import escape
from rich.table import Table

import fnet
from fnet import TrainState
from fnet.interop import torch as interop
from fnet.layers import activations
from train.arguments import ExportArguments
from train.commands import weight_files
from train.config import Config, Denoiser, LanguageModel
from train.config.section import options
from train.errors import UserError
from train.run.checkpoint import Checkpoints
from train.run.class_names import write_classes
from train.run.run_folder import RunFolder, as_json, write_whole
from train.run.setup import Setup, setup

_AS_FLAGS = {
    "new_classifier=True": "--new-classifier",
    "trained_with='batch'": "--trained-with batch",
    "trained_with='abn'": "--trained-with abn",
    "norm='batch'": "--model.norm batch",
}
"""What the library says to give, as it is given here."""
_SHOWN = 3


def import_weights(
    config: Config,
    path: Path,
    out: Path,
    *,
    new_classifier: bool = False,
    trained_with: str | None = None,
) -> interop.Report:
    """Makes a run that stands before its first step, with weights from a file.

    Args:
      config: the run's; the weights are its network's.
      path: see `weight_files.read`.
      out: the run's folder: config.json, import.json and a checkpoint of step 0.
      new_classifier, trained_with: as for `fnet.interop.torch.fill`; the norm is by default
        the one that the file tells.

    Raises:
      UserError: if file and network do not fit, or data or folder cannot be used; nothing
        is written then.
    """
    _check_network(config)
    weights = weight_files.read(path)
    run = setup(config)
    known = {"norm": "abn"} | _described(config)
    trained_with = trained_with or weights.metadata.get("norm")
    try:
        filled = interop.fill(
            run.state_shapes.params,
            run.state_shapes.model_state,
            weights.state_dict,
            norm=known["norm"],
            trained_with=trained_with,
            new_classifier=new_classifier,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {_in_flags(error)}") from error
    report = filled.report
    notes = (*map(_in_flags, report.notes), *_differences(report, weights.metadata, known))
    report = report._replace(notes=notes)

    state = _begun(run, filled.params, filled.state)
    folder = RunFolder(out)
    with folder.owned():
        folder.claim()
        write_classes(folder, run.task.dataset.classes)
        with Checkpoints(
            folder.checkpoints, config.checkpoint.keep, shapes=run.state_shapes
        ) as checkpoints:
            checkpoints.save(0, state, run.training_batches().get_state())
            checkpoints.wait()
        folder.write_config(config)  # last: without its weights it is no run
        write_whole(out / "import.json", as_json({"file": str(path)} | _as_dict(report)))
    return report


def export_weights(folder: RunFolder, a: ExportArguments) -> Path:
    """Writes a run's weights as safetensors, in torch's names and layouts; gives the path.

    They are a checkpoint's, averaged where an average is kept. The metadata name the network,
    its norm and its activation.

    Raises:
      UserError: if there is no run or no checkpoint, the names are not for its network, or
        the file cannot be written.
    """
    config = folder.read_config()
    _check_network(config)
    out = Path(a.out) if a.out else folder.path / "weights.safetensors"
    if out.suffix != ".safetensors":
        raise UserError(f"--out: expected a file that ends in .safetensors, got {out}")
    with Checkpoints(folder.checkpoints, best=a.best) as checkpoints:
        params, state, _ = checkpoints.restore_network()
    known = {"norm": "abn"} | _described(config)
    norm = known["norm"]
    try:
        arrays = interop.to_torch(params, state, names=a.names, norm=norm, for_norm=a.for_norm)
    except ValueError as error:
        raise UserError(f"{folder.path}: {_in_flags(error)}") from error
    metadata = known | {"norm": a.for_norm or norm, "names": a.names, "fnet": fnet.__version__}
    weight_files.write(out, arrays, {"format": "pt"} | metadata)
    return out


def report_table(report: interop.Report) -> Table:
    """How many arrays were read, renamed and left, and the first of each."""
    t = Table(title=f"weights, {report.names} names", title_justify="left")
    t.add_column("arrays")
    t.add_column("", justify="right")
    t.add_column("the first", overflow="fold")
    renamed = [f"{key} -> {name}" for key, name in report.renamed.items()]
    for what, which in {
        "read": list(report.read),
        "  renamed": renamed,
        "left in the file": report.left,
        "initial values kept": report.initial,
    }.items():
        more = ["..."] if len(which) > _SHOWN else []
        t.add_row(what, f"{len(which):,}", escape("\n".join([*which[:_SHOWN], *more])))
    for note in report.notes:
        t.add_row("note", "", escape(note))
    return t


def _as_dict(report: interop.Report) -> dict[str, Any]:
    return report._asdict() | {"renamed": report.renamed}


def _check_network(config: Config) -> None:
    if isinstance(config.model, LanguageModel | Denoiser):
        raise UserError(
            f"model.name: torch's names are of networks for images, not of {config.model.name}"
        )


def _described(config: Config) -> dict[str, str]:
    """The network and its options, as text."""
    model = options(config.model)
    if "activation_param" in model:
        param = model.pop("activation_param")
        if activations.get(model["activation"]).parameter:
            model["activation_param"] = activations.parameter_of(model["activation"], param)
    form = f"{model.pop('depth', '')}{'_a2' if model.pop('a2', False) else ''}"
    return {"network": f"{config.model.name}{form}"} | {k: str(v) for k, v in model.items()}


def _differences(
    report: interop.Report, theirs: dict[str, str], ours: dict[str, str]
) -> tuple[str, ...]:
    """What arrays do not show: options of the network that the weights were trained with."""
    theirs = ({"activation": "relu"} if report.names == "torchvision" else {}) | theirs
    return tuple(
        f"{name} is {ours[name]} here, the weights were trained with {theirs[name]}"
        for name in ours
        if name != "norm" and name in theirs and theirs[name] != ours[name]
    )


def _begun(run: Setup, params: Any, model_state: Any) -> TrainState:
    """A run's state before its first step; where a shape is given, with its own initial value."""
    given = params, model_state

    def init(key: Array) -> tuple[Any, TrainState]:
        state = run.init(key)
        own = jax.tree.map(_where_missing, given, (state.params, state.model_state))
        # Initial values that nobody asks for are not computed: they take longest to compile.
        # The optimizer's are of the parameters' shapes alone.
        rest = dataclasses.replace(state, params=None, model_state=None, ema=None)
        return own, rest

    own, state = jax.jit(init)(jax.random.key(run.config.train.seed))
    params, model_state = jax.tree.map(lambda a, b: a if b is None else b, given, own)
    averaged = run.state_shapes.ema is not None
    ema = jax.tree.map(jax.numpy.copy, params) if averaged else None
    return dataclasses.replace(state, params=params, model_state=model_state, ema=ema)


def _where_missing(given: Any, own: Array) -> Array | None:
    return own if isinstance(given, jax.ShapeDtypeStruct) else None


def _in_flags(said: Exception | str) -> str:
    """What the library says, in the words of the command line."""
    text = str(said).removeprefix("from_torch: ").removeprefix("to_torch: ")
    for argument, flag in _AS_FLAGS.items():
        text = text.replace(argument, flag)
    return text
