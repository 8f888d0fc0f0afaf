"""How images become inputs of a published network: size, crop, interpolation, mean, deviation."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
# Processors for which a size of one number is the shorter side.
_SHORTER_SIDE = ("CLIP", "ConvNext", "Bit")
_IGNORED = frozenset({
    "_processor_class", "_valid_processor_keys", "backend", "data_format", "default_to_square",
    "device", "disable_grouping", "do_convert_rgb", "feature_extractor_type",
    "image_processor_type", "input_data_format", "processor_class", "return_tensors",
})  # fmt: skip


class Preprocessing(NamedTuple):
    """How images become inputs of a network, in the order of the operations.

    Attributes:
      resize: Size before the crop: the shorter side, or (height, width). None: not resized.
      interpolation: Filter that resizes, with antialiasing: ``bicubic``, ``bilinear``, ...
      size: Height and width of the center crop, the input of the network. None: no crop.
      mean: Mean of each channel, of pixels in [0, 1], that is subtracted.
      std: Standard deviation of each channel, that divides.
    """

    resize: int | tuple[int, int] | None
    interpolation: str
    size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """Read a ``preprocessor_config.json`` of transformers, or a ``config.json`` of timm.

    Raises ValueError for an operation that is not supported, or an unknown option, with its name.
    """
    if "architecture" in config:
        return _of_timm(config)
    options = dict(config)
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")

    def take(name: str, default: Any) -> Any:
        value = options.pop(name, None)
        return default if value is None else value

    size = _size(take("size", 224), shorter_side=kind.startswith(_SHORTER_SIDE))
    resize = size if take("do_resize", True) else None
    crop = take("crop_size", 224)
    crop_size = _size(crop, shorter_side=False) if take("do_center_crop", False) else None
    crop_pct = take("crop_pct", 224 / 256)
    if kind.startswith("ConvNext") and resize is not None:
        side = size if isinstance(size, int) else size[0]
        crop_size = side, side
        resize = int(side / crop_pct) if side < 384 else crop_size
    if crop_size is None and isinstance(resize, tuple):
        crop_size = resize
    interpolation = take("resample", 2)
    if interpolation not in _INTERPOLATIONS:
        raise ValueError(f"preprocessing: resample {interpolation!r} is not supported")
    if not take("do_rescale", True) or not math.isclose(take("rescale_factor", 1 / 255), 1 / 255):
        raise ValueError("preprocessing: pixels must be divided by 255; other scales are not known")
    mean, std = take("image_mean", [0.5] * 3), take("image_std", [0.5] * 3)
    if not take("do_normalize", True):
        mean, std = [0.0] * len(mean), [1.0] * len(std)
    unknown = {n: v for n, v in options.items() if n not in _IGNORED and v not in (None, False)}
    if unknown:
        raise ValueError(f"preprocessing: unknown options {unknown}")
    return Preprocessing(resize, _INTERPOLATIONS[interpolation], crop_size, tuple(mean), tuple(std))


def _size(size: Any, *, shorter_side: bool) -> Any:
    if isinstance(size, int):
        return size if shorter_side else (size, size)
    if set(size) == {"shortest_edge"}:
        return int(size["shortest_edge"])
    if set(size) == {"height", "width"}:
        return int(size["height"]), int(size["width"])
    raise ValueError(f"preprocessing: size {dict(size)} is not supported")


def _of_timm(config: Mapping[str, Any]) -> Preprocessing:
    options = config.get("pretrained_cfg", {})
    size = tuple(options["input_size"][1:])
    share, mode = options.get("crop_pct") or 0.875, options.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise ValueError(f"preprocessing: crop_mode {mode!r} is not supported")
    before = tuple(math.floor(side / share) for side in size)
    square = before[0] == before[1]
    if mode == "center" and not square:
        raise ValueError(f"preprocessing: crop_mode 'center' to {size} is not supported")
    return Preprocessing(
        resize=before[0] if mode == "center" else (before[0], before[1]),
        interpolation=options.get("interpolation") or "bicubic",
        size=(size[0], size[1]),
        mean=tuple(options.get("mean") or (0.485, 0.456, 0.406)),
        std=tuple(options.get("std") or (0.229, 0.224, 0.225)),
    )
