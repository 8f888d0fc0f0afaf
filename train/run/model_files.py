"""A fine-tuned model in the files of its publisher: merged, or adapters alone."""

import contextlib
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fnet.interop.huggingface.checkpoint import Tensor, leaf
from fnet.interop.huggingface.timm import family_of
from fnet.interop.peft import huggingface_modules, to_peft
from train.arguments import ExportArguments
from train.config.data import Data
from train.data.chat import load_generation_settings, load_json
from train.data.chat_end import find_end
from train.data.model_folder import INDEX, SINGLE, read_folder
from train.data.text import Text
from train.data.text_file import TextFile
from train.data.tokenizer import load_tokenizer
from train.errors import UserError, shorten, writing
from train.networks import pretrained
from train.networks.pretrained import Pretrained
from train.run import weight_files
from train.run.checkpoints import load_network
from train.run.image_model_files import published_model
from train.run.open_run import OpenRun, copy_small_files
from train.run.run_folder import as_json, part_of
from train.tasks import language

SHARD_BYTES = 2 * 2**30
"""Largest size of a file, unless one tensor is larger."""

_EXPERTS_NOTE = (
    "adapters of experts: PEFT 0.21 applies them to Mixtral, MiniMax, OLMoE, FlexOlmo, and drops "
    "them in other models without an error; without --adapters they are merged"
)


def export_model(opened: OpenRun, options: ExportArguments) -> Path:
    """Write a fine-tuned model with its config and tokenizer, and return the folder.

    Tensors have the names, layouts and dtypes of the published model. Adapters are merged, or
    written alone as PEFT reads them. Models of images have the classes of the run.
    """
    folder, section = opened.folder, opened.config.model
    assert isinstance(section, Pretrained)  # because it is published
    if options.adapters and section.lora_rank is None:
        raise UserError("--adapters: the run has none, because it trains all parameters")
    out = Path(options.out) if options.out else folder.exported
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"--out: {out} is not an empty folder; give a new one")
    source = read_folder(Path(section.path))
    if opened.kind.content == "images":
        files, named, params, dtypes, step = published_model(opened, source, best=options.best)
        with _new_folder(out) as part:
            _write_tensors(part, named, params, dtypes, folder.origin(step))
            copy_small_files(part, folder.model, source.path)
            for name, content in files.items():
                (part / name).write_text(as_json(content))
        return out
    network = opened.build_network()
    if network.new:
        labels = opened.outputs.names if opened.kind.predicts else ("reward",)
        if options.adapters:
            raise UserError("--adapters: a model with a new head is written whole; leave it out")
        if not all(name.endswith("ForCausalLM") for name in source.config.get("architectures", ())):
            raise UserError(f"{section.path} with a new head has no published layout")
    trained, state, step = load_network(folder, network, best=options.best)
    adapters = pretrained.adapters_of(section)
    with _new_folder(out) as part:
        if options.adapters and adapters is not None:
            if lacking := pretrained.without_module(network, trained):
                raise UserError(
                    f"--adapters: PEFT has no module for {shorten(lacking)}; leave --adapters out "
                    "to write the merged model"
                )
            if any("/experts/" in path for path in trained):
                print(_EXPERTS_NOTE, file=sys.stderr)
            if section.quantize:
                print(
                    f"adapters trained over {section.quantize} weights: load the published model "
                    "quantized alike, or export without --adapters; over other weights results "
                    "differ",
                    file=sys.stderr,
                )
            peft_config, tensors = to_peft(
                adapters, trained, huggingface_modules(network.base), str(source.path)
            )
            peft_config["task_type"] = "CAUSAL_LM"
            (part / "adapter_config.json").write_text(as_json(peft_config))
            metadata = {"format": "pt"} | folder.origin(step)
            weight_files.write(part / "adapter_model.safetensors", tensors, metadata)
        else:
            dtypes = {name: t.dtype for name, t in source.tensors.items()}
            params, named = pretrained.merge(section, trained, state), network.base.tensors
            if network.new:
                score = trained[network.new]["kernel"]
                params |= {network.new: {"kernel": score}}
                named = (
                    *(t for t in named if not t.path.startswith("head/") and not t.optional),
                    Tensor("score.weight", f"{network.new}/kernel", score.shape, "ba"),
                )
                dtypes["score.weight"] = np.dtype(np.float32)
            own = {t.name for t in named}
            pattern = family_of(source.config).others
            others = {
                name: t
                for name, t in source.tensors.items()
                if name not in own and pattern and pattern.search(name)
            }
            _write_tensors(part, named, params, dtypes, folder.origin(step), others)
            copy_small_files(part, folder.model, source.path)
            _name_end(part, opened.config.data)
            if network.new:
                (part / "config.json").write_text(as_json(_with_score(source.config, labels)))
    return out


def _name_end(out: Path, data: Data) -> None:
    """Name the end of answers in generation_config.json, if the run may have learned it."""
    if isinstance(data, TextFile) or not isinstance(data, Text):
        return
    tokenizer = load_tokenizer(data)
    try:
        end = find_end(language.chat_template(data, tokenizer), tokenizer)
    except UserError:  # there is no template, so that these are no chats
        return
    ends, path = load_generation_settings(out).end_tokens, out / "generation_config.json"
    if end and end.token not in ends:
        path.write_text(as_json(load_json(path) | {"eos_token_id": [*ends, end.token]}))


def _with_score(config: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Return the config.json of a model with a head for these labels as transformers reads it."""
    names = config.get("architectures", ())
    names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in names]
    numbers = {label: i for i, label in enumerate(labels)}
    by_number = {str(i): label for label, i in numbers.items()}
    changed = {"architectures": names, "id2label": by_number, "label2id": numbers}
    return {n: v for n, v in config.items() if n != "num_labels"} | changed


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    part = part_of(out)
    with writing(out):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            if out.is_dir():
                out.rmdir()
            part.rename(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _write_tensors(
    out: Path,
    tensors: tuple[Tensor, ...],
    params: Any,
    dtypes: Mapping[str, np.dtype],
    origin: Mapping[str, str],
    others: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write safetensors files, and an index if there are several; ``others`` are only copied."""

    def array(t: Tensor) -> np.ndarray:
        own = t.to_file(np.asarray(leaf(params, t.path)))
        return np.ascontiguousarray(own).astype(dtypes[t.name])

    made: dict[str, Callable[[], np.ndarray]] = {t.name: partial(array, t) for t in tensors}
    made |= {name: partial(np.array, tensor[...]) for name, tensor in others.items()}
    sizes = {t.name: math.prod(t.file_shape) * dtypes[t.name].itemsize for t in tensors}
    sizes |= {name: tensor.nbytes for name, tensor in others.items()}
    shards: list[list[str]] = [[]]
    size = 0
    for name, nbytes in sizes.items():
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = SINGLE
        if len(shards) > 1:
            name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        arrays = {own: made[own]() for own in shard}
        weight_files.write(out / name, arrays, {"format": "pt", **origin})
        weight_map |= dict.fromkeys(arrays, name)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(as_json(index))
