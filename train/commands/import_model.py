"""``fnet import MODEL``: make a published model a run, to sample, evaluate or fine-tune it."""

from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from fnet.memory import format_bytes
from train import arguments
from train.arguments import ImportModelArguments
from train.commands.positional import positional
from train.config import Config, Optim, Train
from train.data.chat import has_template
from train.data.chat_file import ChatFile
from train.data.image_folder import ImageFolder
from train.data.model_folder import ModelFolder, read_folder
from train.errors import UserError
from train.networks import pretrained
from train.networks.model_images import image_data
from train.networks.pretrained import Pretrained
from train.output.progress import line_printer
from train.run.model_files import copy_model_files
from train.run.run_folder import RunFolder, quote


def main(argv: list[str]) -> None:
    """Run ``fnet import MODEL``."""
    (given,), flags = positional(argv, "fnet import MODEL", ImportModelArguments)
    config = default_config(Path(given))
    options, config = arguments.read_with_config(
        ImportModelArguments, config, flags, f"fnet import {given}"
    )
    out = Path(options.out or f"runs/{config.name}")
    section = config.model.published
    if section is None:
        raise UserError(f"model.name: expected pretrained, got {config.model.name}")
    folder, shapes = import_model(config, section, out)
    console = Console()
    console.print(model_table(folder, shapes))
    log = line_printer(console)
    for note in config.model.notes(config.data):
        log(note)
    log(f"wrote {out}; the weights stay in {folder.path}")
    log(_next_commands(config, section, quote(out)))


def _next_commands(config: Config, section: Pretrained, run: str) -> str:
    """Name the commands that sample and train an imported model."""
    adapters = section.lora_rank is not None
    what = "adapters" if adapters else "all parameters"
    if config.data.content != "text":
        return f"Train {what} with fnet train {run} --data.path FOLDER --resume"
    path = quote(Path(str(config.data.path)))
    chat = " --chat" if has_template(Path(section.path)) else ""
    commands = (
        f"Generate text with fnet sample {run}{chat} --prompt TEXT. "
        f"Train {what} with fnet train {run} --data.path {path} --resume"
    )
    if adapters:
        return commands
    model = quote(Path(section.path))
    return (
        f"{commands}, or adapters with fnet train finetune_lora --model.path {model} "
        f"--data.path {path}"
    )


def default_config(path: Path) -> Config:
    """Return a config that fine-tunes a published model as a whole.

    Images have the size, the mean and the standard deviation of preprocessor_config.json.

    Raises:
      UserError: if the model is not supported or damaged.
    """
    source = read_folder(path)
    data: ChatFile | ImageFolder = ChatFile()
    if pretrained.match(source, "float32")[0].losses is None:
        data = image_data(source.path, source.config)
    name = path.resolve().name
    valid = "".join(c if c.isalnum() or c in "_.-" else "-" for c in name).lstrip("_.-")
    return Config(
        name=valid or "model",
        data=data,
        model=Pretrained(path=str(path.resolve())),
        optim=Optim(name="adamw", learning_rate=1e-5, warmup_steps=100),
        train=Train(epochs=1.0, precision="bfloat16"),
    )


def import_model(config: Config, section: Pretrained, out: Path) -> tuple[ModelFolder, Any]:
    """Create a run at step 0 with the weights of the published model.

    The weights are not copied. Their headers are compared with config.json.

    Args:
      config: config of the run.
      section: its section ``model``.
      out: folder of the run.

    Returns:
      The model's folder, and the shapes of its parameters.

    Raises:
      UserError: if the model is not supported or damaged, or the folder cannot be used.
    """
    source = read_folder(Path(section.path))
    _, shapes = pretrained.match(source, config.train.precision)
    folder = RunFolder(out)
    with folder.lock():
        folder.create()
        copy_model_files(folder, config)
        folder.write_config(config)
    return source, shapes


def model_table(folder: ModelFolder, shapes: Any) -> Table:
    """Describe a published model: architecture, size and what comes with it."""
    parameters = sum(a.size for a in jax.tree.leaves(shapes))
    dtypes = sorted({str(t.dtype) for t in folder.tensors.values()})
    t = Table(title=str(folder.path), title_justify="left", show_header=False)
    kind = folder.config.get("model_type") or folder.config.get("architecture")
    t.add_row("model", str(kind))
    t.add_row("parameters", f"{parameters:,}")
    t.add_row("weights", f"{format_bytes(folder.nbytes)}, {', '.join(dtypes)}")
    t.add_row("tensors", f"{len(folder.tensors):,}")
    for name, file in {
        "tokenizer": "tokenizer.json",
        "generation settings": "generation_config.json",
    }.items():
        t.add_row(name, file if (folder.path / file).is_file() else "none")
    return t
