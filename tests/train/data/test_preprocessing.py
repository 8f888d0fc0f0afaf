"""Preprocessing of published image networks, as their configs say and as transformers applies it."""

import json

import numpy as np
import pytest
from PIL import Image

from fnet.interop.huggingface.images import preprocessing

HALF = (0.5, 0.5, 0.5)
NORMALIZE = {
    "do_normalize": True,
    "do_resize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
# The files of google/vit-base-patch16-224, facebook/deit-base-distilled-patch16-224,
# openai/clip-vit-base-patch32, facebook/convnext-tiny-224, facebook/dinov2-base, with mean 0.5.
CONFIGS = {
    "vit": NORMALIZE | {"resample": 2, "size": 224},
    "deit": NORMALIZE
    | {"crop_size": 224, "do_center_crop": True, "feature_extractor_type": "DeiTFeatureExtractor",
       "resample": 3, "size": 256},
    "clip": NORMALIZE
    | {"crop_size": 224, "do_center_crop": True, "feature_extractor_type": "CLIPFeatureExtractor",
       "resample": 3, "size": 224},
    "convnext": NORMALIZE
    | {"crop_pct": 0.875, "feature_extractor_type": "ConvNextFeatureExtractor", "resample": 3,
       "size": 224},
    "dinov2": NORMALIZE
    | {"crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "do_convert_rgb": True,
       "do_rescale": True, "image_processor_type": "BitImageProcessor", "resample": 3,
       "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 256}},
}  # fmt: skip
RESIZED = {"vit": (224, 224), "deit": (256, 256), "clip": 224, "convnext": 256, "dinov2": 256}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs(name):
    how = preprocessing(CONFIGS[name])
    assert how == (
        RESIZED[name],
        "bilinear" if name == "vit" else "bicubic",
        (224, 224),
        HALF,
        HALF,
    )


def apply(how, image):
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    if isinstance(how.resize, int):
        width, height = image.size
        factor = how.resize / min(width, height)
        # As transformers, round the longer side down.
        to = (
            (how.resize, int(height * factor))
            if width <= height
            else (int(width * factor), how.resize)
        )
    else:
        to = how.resize[::-1]
    image = image.resize(to, filters[how.interpolation])
    top, left = ((n - m) // 2 for n, m in zip(image.size[::-1], how.size, strict=True))
    x = np.asarray(image)[top : top + how.size[0], left : left + how.size[1]] / 255
    return (x - how.mean) / how.std


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_pixels_match_those_of_transformers(name, tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kinds = {"vit": "ViT", "deit": "DeiT", "clip": "CLIP", "convnext": "ConvNext", "dinov2": "Bit"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CONFIGS[name]))
    theirs = getattr(transformers, f"{kinds[name]}ImageProcessorPil").from_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
    image = Image.fromarray(pixels).resize((400, 300), Image.Resampling.BICUBIC)
    expected = theirs(image, return_tensors="np")["pixel_values"][0]
    got = apply(preprocessing(CONFIGS[name]), image)
    np.testing.assert_allclose(np.moveaxis(got, -1, 0), expected, atol=1.01 / 127.5)


def timm(**options):
    return {"architecture": "vit_base_patch16_224", "pretrained_cfg": options}


def test_configs_of_timm():
    config = timm(
        input_size=[3, 224, 224], interpolation="bicubic", crop_pct=0.9, mean=HALF, std=HALF
    )
    assert preprocessing(config) == (248, "bicubic", (224, 224), HALF, HALF)
    config["pretrained_cfg"] |= {"crop_mode": "squash", "crop_pct": 1.0}
    assert preprocessing(config).resize == (224, 224)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (CONFIGS["vit"] | {"do_pad": True}, "unknown options {'do_pad': True}"),
        (CONFIGS["vit"] | {"resample": 9}, "resample 9 is not supported"),
        (CONFIGS["vit"] | {"rescale_factor": 1 / 127.5}, "pixels must be divided by 255"),
        (CONFIGS["vit"] | {"size": {"longest_edge": 224}}, "size {'longest_edge': 224} is not sup"),
        (timm(input_size=[3, 8, 8], crop_mode="border"), "crop_mode 'border' is not supported"),
        (timm(input_size=[3, 8, 16]), "crop_mode 'center' to .8, 16. is not supported"),
    ],
)
def test_rejects_what_it_cannot_describe(config, match):
    with pytest.raises(ValueError, match=match):
        preprocessing(config)


def test_without_normalization():
    how = preprocessing(CONFIGS["vit"] | {"do_normalize": False, "do_resize": False})
    assert how == (None, "bilinear", None, (0.0,) * 3, (1.0,) * 3)
