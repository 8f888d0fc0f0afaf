"""Write a fine-tuned model as a folder that other programs load."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fnet.interop.huggingface.checkpoint import Tensor, leaf
from fnet.interop.peft import huggingface_modules, to_peft
from train.arguments import ExportArguments
from train.commands import export_images
from train.config import Config
from train.data.model_folder import INDEX, SINGLE, ModelFolder, read_folder
from train.errors import UserError
from train.networks import pretrained
from train.networks.pretrained import Pretrained
from train.run import weight_files
from train.run.frozen import load_network
from train.run.model_files import copy_small_files
from train.run.run_folder import RunFolder, as_json

SHARD_BYTES = 2 * 2**30
"""Largest size of a file, unless one tensor is larger."""


def export_model(
    folder: RunFolder, config: Config, section: Pretrained, options: ExportArguments
) -> Path:
    """Write a fine-tuned model with its config and tokenizer, and return the folder.

    Tensors have the names, layouts and dtypes of the published model. Adapters are merged, or
    written alone as PEFT reads them. Models of images have the classes of the run.

    Raises:
      UserError: if there is no checkpoint, or the folder cannot be written.
    """
    if options.adapters and section.lora_rank is None:
        raise UserError("--adapters: the run has none, because it trains all parameters")
    out = Path(options.out) if options.out else folder.path / "exported"
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out: {out} is not empty; give a new folder")
    source = read_folder(Path(section.path))
    has_text = config.data.content == "text"
    export = _language_model if has_text else _image_model
    write = export(folder, config, section, options, source)
    part = out.with_name(f".{out.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        if out.is_dir():
            out.rmdir()
        part.rename(out)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(
            f"cannot write {out}: {error.strerror or error}; choose another --out"
        ) from error
    return out


def _language_model(
    folder: RunFolder,
    config: Config,
    section: Pretrained,
    options: ExportArguments,
    source: ModelFolder,
) -> Callable[[Path], None]:
    """Restore a language model, and return a function that writes it to a folder."""
    adapters = pretrained.adapters_of(section)
    model = pretrained.build_network(section, config.train.precision)
    network = load_network(folder, model, best=options.best)
    trained = network.evaluation_params

    def write(part: Path) -> None:
        if options.adapters and adapters is not None:
            modules = huggingface_modules(model.base)
            peft_config, tensors = to_peft(adapters, trained, modules, str(source.path))
            (part / "adapter_config.json").write_text(as_json(peft_config))
            weight_files.write(part / "adapter_model.safetensors", tensors, {"format": "pt"})
            return
        params = pretrained.merge(section, trained, network.model_state)
        dtypes = {name: t.dtype for name, t in source.tensors.items()}
        _write_tensors(part, model.base.tensors, params, dtypes)
        copy_small_files(part, folder.model, source.path)

    return write


def _image_model(
    folder: RunFolder,
    config: Config,
    section: Pretrained,
    options: ExportArguments,
    source: ModelFolder,
) -> Callable[[Path], None]:
    """Restore an image network, and return a function that writes it to a folder."""
    model = export_images.published_model(folder, config, section, source, best=options.best)

    def write(part: Path) -> None:
        _write_tensors(part, model.tensors, model.params, model.dtypes)
        copy_small_files(part, folder.model, source.path)
        for name, content in model.files.items():
            (part / name).write_text(as_json(content))

    return write


def _write_tensors(
    out: Path, tensors: tuple[Tensor, ...], params: Any, dtypes: Mapping[str, np.dtype]
) -> None:
    """Write safetensors files, and an index if there are several."""
    shards = list(_shards(tensors, params, dtypes))
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = SINGLE
        if len(shards) > 1:
            name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        arrays = {
            t.name: np.ascontiguousarray(t.to_file(np.asarray(leaf(params, t.path)))).astype(
                dtypes[t.name]
            )
            for t in shard
        }
        weight_files.write(out / name, arrays, {"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(as_json(index))


def _shards(
    tensors: tuple[Tensor, ...], params: Any, dtypes: Mapping[str, np.dtype]
) -> Iterator[list[Tensor]]:
    shard: list[Tensor] = []
    size = 0
    for t in tensors:
        nbytes = leaf(params, t.path).size * dtypes[t.name].itemsize
        if shard and size + nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(t)
        size += nbytes
    yield shard
