"""A fine-tuned image network in the layout of the published model, with the run's classes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.interop.huggingface import build_model
from fnet.interop.huggingface.checkpoint import PretrainedModel, Tensor
from fnet.interop.huggingface.timm import family_of
from fnet.models.vit import resize_positions
from train.config import Config
from train.data.model_folder import ModelFolder
from train.data.photos import Photos
from train.errors import UserError
from train.networks.model_images import position_size
from train.networks.pretrained import without_classes
from train.run.open_run import OpenRun
from train.tasks import images

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest one."""
_BILINEAR = 2
"""Pillow's number of the filter that resizes images."""


def published_model(
    opened: OpenRun, source: ModelFolder, *, best: bool
) -> tuple[dict[str, Any], tuple[Tensor, ...], Any, dict[str, np.dtype], int]:
    """Return a trained image network as its library reads it, at the image size of the run.

    Learned positions are resized to this size. The logits are compared with the run's. Returns JSON
    files, names and layouts of tensors, parameters, dtypes of tensors, and the step of the run.
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
    return files, tensors, params, dtypes, restored.step


def _with_classes(
    source: ModelFolder, classes: tuple[str, ...], *, has_new: bool
) -> dict[str, Any]:
    config = without_classes(source.config)
    if "architecture" in config:  # of timm
        return config | {"num_classes": len(classes), "label_names": list(classes)}
    heads = [a for a in family_of(config).architectures if a.endswith("ForImageClassification")]
    if not heads:
        raise _not_supported(source)
    if has_new:
        config["architectures"] = heads[:1]
    config.pop("num_labels", None)
    labels = {str(i): name for i, name in enumerate(classes)}
    return config | {"id2label": labels, "label2id": {name: i for i, name in enumerate(classes)}}


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
