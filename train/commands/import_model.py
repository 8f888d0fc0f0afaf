"""``fnet import MODEL``: make a published model a run, to sample, evaluate or fine-tune it."""

from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from fnet.interop.huggingface import preprocessing
from fnet.memory import format_bytes
from train import arguments
from train.arguments import ImportModelArguments
from train.commands.positional import positional
from train.config import ChatFile, Config, ImageFolder, Optim, Pretrained, Train
from train.data.chat import has_template, load_json
from train.data.model_folder import ModelFolder, read_folder
from train.errors import UserError
from train.output.progress import line_printer
from train.run.model_files import copy_model_files
from train.run.run_folder import RunFolder, quote
from train.tasks import pretrained


def main(argv: list[str]) -> None:
    """Run ``fnet import MODEL``."""
    (given,), flags = positional(argv, "fnet import MODEL", ImportModelArguments)
    config = default_config(Path(given))
    options, config = arguments.read_with_config(
        ImportModelArguments, config, flags, f"fnet import {given}"
    )
    out = Path(options.out or f"runs/{config.name}")
    folder, shapes = import_model(config, out)
    console = Console()
    console.print(model_table(folder, shapes))
    log = line_printer(console)
    log(f"wrote {out}; the weights stay in {folder.path}")
    log(_next_commands(config, quote(out)))


def _next_commands(config: Config, run: str) -> str:
    """Name the commands that sample and train an imported model."""
    assert isinstance(config.model, Pretrained)
    adapters = config.model.lora_rank is not None
    what = "adapters" if adapters else "all parameters"
    if not isinstance(config.data, ChatFile):
        return f"Train {what} with fnet train {run} --data.path FOLDER --resume"
    chat = " --chat" if has_template(Path(config.model.path)) else ""
    commands = (
        f"Generate text with fnet sample {run}{chat} --prompt TEXT. "
        f"Train {what} with fnet train {run} --data.path chats.jsonl --resume"
    )
    if adapters:
        return commands
    model = quote(Path(config.model.path))
    return (
        f"{commands}, or adapters with fnet train finetune_lora --model.path {model} "
        "--data.path chats.jsonl"
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
        data = _image_data(source)
    name = path.resolve().name
    valid = "".join(c if c.isalnum() or c in "_.-" else "-" for c in name).lstrip("_.-")
    return Config(
        name=valid or "model",
        data=data,
        model=Pretrained(path=str(path.resolve())),
        optim=Optim(name="adamw", learning_rate=1e-5, warmup_steps=100),
        train=Train(epochs=1.0, precision="bfloat16"),
    )


def _image_data(source: ModelFolder) -> ImageFolder:
    """Return images with the input size, mean and standard deviation of a published model."""
    stored = load_json(source.path / "preprocessor_config.json")
    if "architecture" in source.config:  # of timm, which has no other file
        stored = source.config
    default = ImageFolder()
    size = source.config.get("image_size", default.image_size)
    size = size if isinstance(size, int) else size[0]
    if not stored:
        return ImageFolder(image_size=size)
    try:
        how = preprocessing(stored)
    except (ValueError, LookupError) as error:
        raise UserError(f"{source.path}: {error}") from error
    side = how.size[0] if how.size else size
    shorter = how.resize if isinstance(how.resize, int) and how.resize >= side else None
    if len(how.mean) != 3 or len(how.std) != 3:
        raise UserError(f"{source.path}: expected images of 3 channels, got mean {how.mean}")
    (r, g, b), (dr, dg, db) = how.mean, how.std
    return ImageFolder(image_size=side, resize=shorter, mean=(r, g, b), std=(dr, dg, db))


def import_model(config: Config, out: Path) -> tuple[ModelFolder, Any]:
    """Create a run at step 0 with the weights of the published model.

    The weights are not copied. Their headers are compared with config.json.

    Args:
      config: config of the run.
      out: folder of the run.

    Returns:
      The model's folder, and the shapes of its parameters.

    Raises:
      UserError: if the model is not supported or damaged, or the folder cannot be used.
    """
    assert isinstance(config.model, Pretrained)
    source = read_folder(Path(config.model.path))
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
