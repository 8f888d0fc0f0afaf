"""``fnet import``: start a run from pretrained weights, or make a published model a run."""

from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from fnet.memory import format_bytes
from train.arguments import ImportArguments, ImportModelArguments, read_config
from train.config import Config
from train.data.chat import has_template
from train.data.model_folder import ModelFolder, is_model_folder, read_folder
from train.data.text import Text
from train.errors import UserError
from train.networks.pretrained import Pretrained
from train.networks.published import network as published
from train.output.progress import line_printer
from train.output.tables import Table, to_rich
from train.run import weight_files
from train.run.open_run import begin, published_config
from train.run.run_folder import RunFolder, quote
from train.run.weight_files import import_weights


def main(argv: list[str]) -> None:
    """Run ``fnet import CONFIG WEIGHTS``, or ``fnet import MODEL`` for a published model."""
    console = Console()
    log = line_printer(console)
    if argv and is_model_folder(Path(argv[0])):
        weight_files.check_importable(Path(argv[0]))
        _, options, config = read_config(
            argv, "fnet import MODEL", ImportModelArguments, published_config
        )
        out = Path(options.out or f"runs/{config.name}")
        if not isinstance(section := config.model, Pretrained):
            raise UserError(f"model.name: expected pretrained, got {config.model.name}")
        folder, shapes = import_model(config, section, out)
        console.print(to_rich(model_table(folder, shapes)))
        for note in config.model.notes(config.data, ()):
            log(note)
        log(f"wrote {out}; the weights stay in {folder.path}")
        log(_next_commands(config, section, quote(out)))
        return
    (_, weights), weight_options, config = read_config(
        argv, "fnet import CONFIG WEIGHTS", ImportArguments
    )
    out = Path(weight_options.out or f"runs/{config.name}")
    console.print(import_weights(config, weights, out, weight_options).lines())
    log(
        f"wrote {out} at step 0; evaluate it with fnet eval {quote(out)}, train it with "
        f"fnet train {quote(out)} --resume"
    )


def import_model(config: Config, section: Pretrained, out: Path) -> tuple[ModelFolder, Any]:
    """Create a run at step 0 with the weights of the published model.

    The weights are not copied. Their headers are compared with config.json. Returns the model's
    folder, and the shapes of its parameters.
    """
    source = read_folder(Path(section.path))
    _, shapes = published.match(source, config.train.precision)
    folder = RunFolder(out)
    with folder.lock():
        begin(folder, config)
    return source, shapes


def model_table(folder: ModelFolder, shapes: Any) -> Table:
    """Describe a published model: architecture, size and what comes with it."""
    dtypes = sorted({str(t.dtype) for t in folder.tensors.values()})
    kind = folder.config.get("model_type") or folder.config.get("architecture")
    facts = {
        "model": str(kind),
        "parameters": f"{sum(a.size for a in jax.tree.leaves(shapes)):,}",
        "weights": f"{format_bytes(folder.nbytes)}, {', '.join(dtypes)}",
        "tensors": f"{len(folder.tensors):,}",
    }
    files = {"tokenizer": "tokenizer.json", "generation settings": "generation_config.json"}
    for name, file in files.items():
        facts[name] = file if (folder.path / file).is_file() else "none"
    return Table(str(folder.path), ("", ""), list(facts.items()), texts=2)


def _next_commands(config: Config, section: Pretrained, run: str) -> str:
    adapters = section.lora_rank is not None
    what = "adapters" if adapters else "all parameters"
    if not isinstance(config.data, Text):
        return f"Train {what} with fnet train {run} --data.path FOLDER --resume"
    path, model = quote(Path(str(config.data.path))), Path(section.path)
    chat = " --chat" if has_template(model) else ""
    commands = (
        f"Generate text with fnet sample {run}{chat} --prompt TEXT. "
        f"Train {what} with fnet train {run} --data.path {path} --resume"
    )
    if adapters:
        return commands
    return (
        f"{commands}, or adapters with fnet train finetune_lora --model.path {quote(model)} "
        f"--data.path {path}"
    )
