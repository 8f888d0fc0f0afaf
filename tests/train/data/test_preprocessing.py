"""Preprocessing of published image networks, as their configs say."""

import pytest

from fnet.interop.huggingface.images import preprocessing

HALF = (0.5, 0.5, 0.5)
MEAN_STD = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
NORMALIZE = {"do_normalize": True, "do_resize": True, **MEAN_STD}
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
    filter = "bilinear" if name == "vit" else "bicubic"
    assert how == (RESIZED[name], filter, (224, 224), HALF, HALF)


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
