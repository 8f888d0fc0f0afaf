"""Images as a published model expects them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.data.chat import load_json
from train.data.image_folder import ImageFolder
from train.data.model_folder import read_config
from train.errors import UserError


def position_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the height and width of images that a config.json describes.

    Learned positions are for this size. Images are often prepared at another one.
    """
    if "architecture" in config:  # of timm
        size = config.get("pretrained_cfg", {}).get("input_size", (3, 224, 224))[1:]
        size = config.get("model_args", {}).get("img_size", size)
    else:
        size = (config.get("vision_config") or config).get("image_size", 224)
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classifier's outputs in config.json, or () if it has none."""
    names = config.get("label_names") or config.get("id2label") or ()  # of timm, or transformers
    try:
        if isinstance(names, str):
            raise TypeError
        if isinstance(names, Mapping):
            by_output = {int(output): name for output, name in names.items()}
            names = [by_output[i] for i in range(len(names))]
        return tuple(map(str, names))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"config.json: id2label must name the outputs 0, 1, ..., got {names!r:.80}"
        ) from error


def image_data(path: Path, config: Mapping[str, Any]) -> ImageFolder:
    """Return images with the input size, mean and standard deviation of a published model."""
    from fnet.interop.huggingface.images import preprocessing  # imports JAX

    # timm has no other file.
    stored = config if "architecture" in config else load_json(path / "preprocessor_config.json")
    size = position_size(config)[0]
    if not stored:
        return ImageFolder(image_size=size)
    try:
        how = preprocessing(stored)
    except (ValueError, LookupError) as error:
        raise UserError(f"{path}: {error}") from error
    side = how.size[0] if how.size else size
    shorter = how.resize if isinstance(how.resize, int) and how.resize >= side else None
    if shorter == ImageFolder(image_size=side).shorter_side:
        shorter = None  # so that it follows from another data.image_size
    if len(how.mean) != 3 or len(how.std) != 3:
        raise UserError(f"{path}: expected images of 3 channels, got mean {how.mean}")
    (r, g, b), (dr, dg, db) = how.mean, how.std
    return ImageFolder(image_size=side, resize=shorter, mean=(r, g, b), std=(dr, dg, db))


def own_options(path: Path) -> dict[str, Any]:
    """Return what is known of the images that a published model is made for, by field."""
    stored = read_config(path)
    try:
        data = image_data(path, stored)
    except UserError:  # its preprocessing is not supported
        return {"image_size": position_size(stored)[0]}
    is_known = "architecture" in stored or (path / "preprocessor_config.json").is_file()
    return {n: getattr(data, n) for n in ("image_size", "mean", "std")[: 3 if is_known else 1]}
