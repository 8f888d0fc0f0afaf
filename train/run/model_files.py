"""A fine-tuned model in the files of its publisher: merged, or adapters alone."""

import contextlib
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet.interop.huggingface import build_model
from fnet.interop.huggingface.checkpoint import PretrainedModel, Tensor, leaf
from fnet.interop.huggingface.timm import family_of
from fnet.interop.peft import huggingface_modules, to_peft
from fnet.models.vit import resize_positions
from train.arguments import ExportArguments
from train.config import Config
from train.data.chat import load_generation_settings, load_json
from train.data.chat_end import AnswerEnd, find_end
from train.data.model_folder import INDEX, SINGLE, TEXT_FILES, ModelFolder, read_folder
from train.data.photos import Photos
from train.data.text import Text
from train.data.text_file import TextFile
from train.data.tokenizer import load_tokenizer
from train.errors import UserError, shorten, writing
from train.networks.model_images import position_size
from train.networks.pretrained import Pretrained
from train.networks.published import network as published
from train.networks.published.network import PretrainedNetwork
from train.run import weight_files
from train.run.open_run import OpenRun, copy_small_files
from train.run.run_folder import as_json, part_of
from train.tasks import images, language

SHARD_BYTES = 2 * 2**30
"""Largest size of a file, unless one tensor is larger."""
TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest one."""
_BILINEAR = 2
"""Pillow's number of the filter that resizes images."""

_EXPERTS_NOTE = (
    "adapters of experts: PEFT 0.21 applies them to Mixtral, MiniMax, OLMoE, FlexOlmo, and drops "
    "them in other models without an error; without --adapters they are merged"
)


class _Published(NamedTuple):
    """A trained model as its library reads it: JSON files by name, and tensors with their dtypes.

    Tensors have names and layouts, and are read from the parameters. Those of the source that
    ``others`` names are only copied.
    """

    files: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    params: Any
    dtypes: Mapping[str, np.dtype]
    step: int
    others: Mapping[str, Any] = {}


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
        published = _image_model(opened, source, best=options.best)
    else:
        network = opened.build_network()
        if network.new and options.adapters:
            raise UserError("--adapters: a model with a new head is written whole; leave it out")
        if options.adapters:
            _write_adapters(out, opened, source, network, best=options.best)
            return out
        published = _language_model(opened, source, network, best=options.best)
    with _new_folder(out) as part:
        _write_tensors(part, published, folder.origin(published.step))
        copy_small_files(part, folder.model if folder.model.is_dir() else source.path)
        if end := _unnamed_end(part, opened.config.data):
            path, ends = part / "generation_config.json", load_generation_settings(part).end_tokens
            path.write_text(as_json(load_json(path) | {"eos_token_id": [*ends, end.token]}))
        for name, content in published.files.items():
            (part / name).write_text(as_json(content))
    return out


def _write_adapters(
    out: Path, opened: OpenRun, source: ModelFolder, network: PretrainedNetwork, *, best: bool
) -> None:
    section, (_, (trained, _, step)) = opened.config.model, opened.network(network, best=best)
    assert isinstance(section, Pretrained)  # because it is published
    adapters = published.adapters_of(section)
    assert adapters is not None  # because it has a rank
    if lacking := published.without_module(network, trained):
        raise UserError(
            f"--adapters: PEFT has no module for {shorten(lacking)}; leave --adapters out to write "
            "the merged model"
        )
    if any("/experts/" in path for path in trained):
        print(_EXPERTS_NOTE, file=sys.stderr)
    if section.quantize:
        print(
            f"adapters trained over {section.quantize} weights: load the published model quantized "
            "alike, or export without --adapters; over other weights results differ",
            file=sys.stderr,
        )
    if end := _unnamed_end(source.path, opened.config.data):
        name = source.path / "generation_config.json"
        text = f"{name}: lacks {end.text}, the end of answers; add {end.token} to eos_token_id"
        print(f"{text}, or texts do not stop there", file=sys.stderr)
    modules = huggingface_modules(network.base)
    config, tensors = to_peft(adapters, trained, modules, str(source.path))
    metadata = {"format": "pt"} | opened.folder.origin(step)
    with _new_folder(out) as part:
        copy_small_files(part, opened.folder.model, TEXT_FILES)
        (part / "adapter_config.json").write_text(as_json(config | {"task_type": "CAUSAL_LM"}))
        weight_files.write(part / "adapter_model.safetensors", tensors, metadata)


def _language_model(
    opened: OpenRun, source: ModelFolder, network: PretrainedNetwork, *, best: bool
) -> _Published:
    section, names = opened.config.model, source.config.get("architectures", ())
    assert isinstance(section, Pretrained)  # because it is published
    if network.new and not all(name.endswith("ForCausalLM") for name in names):
        raise UserError(f"{section.path} with a new head has no published layout")
    _, (trained, state, step) = opened.network(network, best=best)
    files = dict[str, Any]()
    params, tensors = published.merge(section, trained, state), network.base.tensors
    dtypes = {name: t.dtype for name, t in source.tensors.items()}
    if network.new:
        names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in names]
        config = {n: v for n, v in source.config.items() if n != "num_labels"}
        labels = opened.outputs.names if opened.kind.predicts else ("reward",)
        files["config.json"] = config | {"architectures": names} | _labels(labels)
        score = trained[network.new]["kernel"]
        params |= {network.new: {"kernel": score}}
        tensors = (
            *(t for t in tensors if not t.path.startswith("head/") and not t.optional),
            Tensor("score.weight", f"{network.new}/kernel", score.shape, "ba"),
        )
        dtypes["score.weight"] = np.dtype(np.float32)
    own, pattern = {t.name for t in tensors}, family_of(source.config).others
    unread = {n: t for n, t in source.tensors.items() if n not in own}
    others = {n: t for n, t in unread.items() if pattern and pattern.search(n)}
    return _Published(files, tensors, params, dtypes, step, others)


def _labels(names: Sequence[str]) -> dict[str, Any]:
    numbers = {name: i for i, name in enumerate(names)}
    return {"id2label": {str(i): name for name, i in numbers.items()}, "label2id": numbers}


def _image_model(opened: OpenRun, source: ModelFolder, *, best: bool) -> _Published:
    """Return an image network at the image size of the run, to which positions are resized.

    The logits are compared with the run's.
    """
    config = images.in_float32(opened.config)
    classes, shape = opened.outputs.names, images.image_shape(config)
    network, restored = opened.replace(train=config.train).network(best=best)
    model_config = _with_classes(source, classes, has_new=bool(network.new))
    model_config = _with_size(model_config, shape)
    names = [t.name for t in network.base.tensors]
    model = build_model(model_config, names=[*names, "classifier.weight"] if network.new else names)
    trained = jax.tree.map(np.asarray, restored.evaluation_params)
    params = _arrange(trained, model, source, shape, network.new)
    image = jax.random.normal(jax.random.key(0), (2, *shape))
    expected, _ = network.apply(trained, {}, image, train=False)
    try:
        actual, _ = model.apply(params, {}, image, train=False)
    except (KeyError, TypeError, ValueError) as error:
        raise _not_supported(source) from error
    if not difference(actual, expected) <= TOLERANCE:
        raise _not_supported(source)
    tensors = model.tensors if network.new else network.base.tensors
    published = {t.path: source.tensors[t.name].dtype for t in network.base.tensors}
    usual = next(iter(published.values()))
    files = {"config.json": model_config} | _preprocessor(config, model_config)
    dtypes = {t.name: published.get(t.path, usual) for t in tensors}
    return _Published(files, tensors, params, dtypes, restored.step)


def _with_classes(source: ModelFolder, classes: Sequence[str], *, has_new: bool) -> dict[str, Any]:
    config = published.without_classes(source.config)
    if "architecture" in config:  # of timm
        return config | {"num_classes": len(classes), "label_names": list(classes)}
    heads = [a for a in family_of(config).architectures if a.endswith("ForImageClassification")]
    if not heads:
        raise _not_supported(source)
    if has_new:
        config["architectures"] = heads[:1]
    config.pop("num_labels", None)
    return config | _labels(classes)


def _with_size(config: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    height, width, channels = shape
    if "architecture" not in config:
        return config | {"image_size": height if height == width else [height, width]}
    args, stored = config.get("model_args", {}), config.get("pretrained_cfg", {})
    config = config | {"pretrained_cfg": stored | {"input_size": [channels, height, width]}}
    if "img_size" in args:
        config["model_args"] = args | {"img_size": [height, width]}
    return config


def _arrange(
    trained: Mapping[str, Any],
    model: PretrainedModel,
    source: ModelFolder,
    shape: tuple[int, ...],
    new: str,
) -> dict[str, Any]:
    shapes = {t.path: t.shape for t in model.tensors}
    params = {name: p for name, p in trained.items() if name != new}
    if new:
        kernel, bias = trained[new]["kernel"], trained[new]["bias"]
        if "head/kernel" not in shapes:
            raise _not_supported(source)
        # DINOv2's classifier also reads the mean of the patches, which the run did not.
        rest = shapes["head/kernel"][0] - len(kernel)
        params["head"] = {"kernel": np.pad(kernel, ((0, max(rest, 0)), (0, 0))), "bias": bias}
    positions = params.get("pos_embedding")
    if positions is not None and positions.shape != shapes["pos_embedding"]:
        patch = params["patches"]["kernel"].shape[:2]
        rows, columns = (side // p for side, p in zip(shape, patch, strict=False))
        height, width = position_size(source.config)
        before = height // patch[0], width // patch[1]
        prefix = shapes["pos_embedding"][0] - rows * columns
        interpolation = family_of(source.config).interpolation
        assert interpolation is not None  # because there are positions
        own = jnp.asarray(positions[prefix:])
        resized = resize_positions(own, before, (rows, columns), interpolation)
        params["pos_embedding"] = np.concatenate([positions[:prefix], resized])
    return params


def difference(actual: Any, expected: Any) -> float:
    """Return the largest difference of logits, relative to the largest one."""
    if actual.shape != expected.shape:
        return float("inf")
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def _preprocessor(config: Config, model_config: dict[str, Any]) -> dict[str, Any]:
    data = config.data
    if not isinstance(data, Photos):
        return {}
    size, shorter = data.image_size, data.shorter_side
    mean, std = list(data.mean), list(data.std)
    if "architecture" in model_config:
        stored = model_config["pretrained_cfg"] | {
            "mean": mean,
            "std": std,
            "interpolation": "bilinear",
            "crop_pct": size / shorter,
            "crop_mode": "center",
            "num_classes": model_config["num_classes"],
        }
        return {"config.json": model_config | {"pretrained_cfg": stored}}
    return {
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",  # resizes the shorter side, then crops
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": shorter},
            "resample": _BILINEAR,
            "do_center_crop": True,
            "crop_size": {"height": size, "width": size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": mean,
            "image_std": std,
        }
    }


def _not_supported(source: ModelFolder) -> UserError:
    kind = source.config.get("model_type") or source.config.get("architecture")
    return UserError(
        f"{source.path}: {kind} with a classifier of your classes has no published layout; give "
        "--format stablehlo or --format onnx"
    )


def _unnamed_end(folder: Path, data: Any) -> AnswerEnd | None:
    """Return the end of answers that the run may have learned, if the folder does not name it."""
    if isinstance(data, TextFile) or not isinstance(data, Text):
        return None
    tokenizer = load_tokenizer(data)
    try:
        end = find_end(language.chat_template(data, tokenizer), tokenizer)
    except UserError:  # there is no template, so that these are no chats
        return None
    return end if end and end.token not in load_generation_settings(folder).end_tokens else None


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


def _write_tensors(out: Path, model: _Published, origin: Mapping[str, str]) -> None:
    def array(t: Tensor) -> np.ndarray:
        own = t.to_file(np.asarray(leaf(model.params, t.path)))
        return np.ascontiguousarray(own).astype(model.dtypes[t.name])

    sizes = {t.name: math.prod(t.file_shape) * model.dtypes[t.name].itemsize for t in model.tensors}
    sizes |= {name: tensor.nbytes for name, tensor in model.others.items()}
    made: dict[str, Callable[[], np.ndarray]] = {t.name: partial(array, t) for t in model.tensors}
    made |= {name: partial(np.array, tensor[...]) for name, tensor in model.others.items()}
    shards, size = [list[str]()], 0
    for name, nbytes in sizes.items():
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        whole = len(shards) == 1
        file = SINGLE if whole else f"model-{i:05}-of-{len(shards):05}.safetensors"
        arrays = {name: made[name]() for name in shard}
        weight_files.write(out / file, arrays, {"format": "pt", **origin})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(as_json(index))
