"""Tiny configs of published image networks, their weights, and outputs of transformers and timm.

Weights are drawn by NumPy from the tensors' names in the files. The outputs are those of
transformers 5.24.0 and timm 1.0.31 with torch 2.13.0 in float32, in
``pretrained_image_cases.json``: ``python tests/support/pretrained_image_cases.py`` prints its lines
again.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from pretrained_cases import weights

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
_VIT = _SIZES | {"image_size": 16, "intermediate_size": 48}
_CONVNEXT = {
    "depths": [2, 1, 2],
    "hidden_sizes": [8, 12, 16],
    "num_stages": 3,
    "patch_size": 2,
    "image_size": 16,
}
_LABELS = {"id2label": {str(i): f"LABEL_{i}" for i in range(5)}}
_TOWERS = {"projection_dim": 6, "text_config": {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 4, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": 0, "projection_dim": 6,
}}  # fmt: skip

CONFIGS = {
    "vit": {"architectures": ["ViTForImageClassification"]} | _VIT | _LABELS,
    "vit_wide": {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
    | _VIT
    | _LABELS
    | {"image_size": [16, 24], "qkv_bias": False, "hidden_act": "gelu_new"},
    "vit_pooler": {"architectures": ["ViTModel"], "model_type": "vit", "pooler_output_size": 7}
    | _VIT,
    "deit": {"architectures": ["DeiTForImageClassificationWithTeacher"]} | _VIT | _LABELS,
    "deit_class_token": {"architectures": ["DeiTForImageClassification"], "model_type": "deit"}
    | _VIT
    | _LABELS,
    "dinov2": {"architectures": ["Dinov2Model"], "image_size": 16} | _SIZES,
    "dinov2_giant": {"architectures": ["Dinov2ForImageClassification"], "model_type": "dinov2"}
    | _SIZES
    | _LABELS
    | {"image_size": 16, "use_swiglu_ffn": True},
    "dinov2_with_registers": {"architectures": ["Dinov2WithRegistersModel"], "image_size": 16}
    | _SIZES,
    "dinov2_registers_labels": {
        "architectures": ["Dinov2WithRegistersForImageClassification"],
        "model_type": "dinov2_with_registers",
        "num_register_tokens": 3,
        "image_size": 18,
    }
    | _SIZES
    | _LABELS,
    "clip_vision_model": {"architectures": ["CLIPVisionModelWithProjection"], "projection_dim": 6}
    | _VIT,
    "clip_no_projection": {"architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model"}
    | _VIT,
    "clip": {"architectures": ["CLIPModel"], "vision_config": _VIT} | _TOWERS,
    "convnext": {"architectures": ["ConvNextForImageClassification"]} | _CONVNEXT | _LABELS,
    "convnext_features": {"architectures": ["ConvNextModel"], "model_type": "convnext"}
    | _CONVNEXT
    | {"layer_scale_init_value": 0.0},
    "convnextv2": {"architectures": ["ConvNextV2ForImageClassification"]} | _CONVNEXT | _LABELS,
    "siglip_vision_model": {"architectures": ["SiglipVisionModel"]} | _VIT,
    "siglip": {"architectures": ["SiglipModel"], "vision_config": _VIT | {"image_size": 18}}
    | _TOWERS,
}  # fmt: skip
CONFIGS = {name: {"model_type": name} | config for name, config in CONFIGS.items()}


def _timm(architecture, size=16, **options):
    """A config of timm's repositories on the hub, at a tiny size."""
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 4, "img_size": size}
    return {
        "architecture": architecture,
        "num_classes": options.pop("num_classes", 5),
        "num_features": 32,
        "pretrained_cfg": {"input_size": [3, size, size], "num_classes": 1000, "mean": [0.5] * 3},
        "model_args": sizes | options,
    }


CONFIGS |= {
    "timm_vit": _timm("vit_base_patch16_224"),
    "timm_vit_features": _timm("vit_tiny_patch16_384", num_classes=0, qkv_bias=False),
    "timm_deit_distilled": _timm("deit_tiny_distilled_patch16_224"),
    "timm_deit3": _timm("deit3_small_patch16_224"),
    "timm_dinov2": _timm("vit_small_patch14_dinov2", num_classes=0),
    "timm_dinov2_registers": _timm("vit_giant_patch14_reg4_dinov2", num_classes=0),
    "timm_clip": _timm("vit_base_patch32_clip_quickgelu_224"),
    "timm_siglip": _timm("vit_so400m_patch16_siglip_256", size=18, num_classes=0, mlp_ratio=1.5),
    "timm_siglip_gap": _timm("vit_base_patch16_siglip_gap_224"),
    "timm_mean": _timm("vit_base_patch16_reg4_gap_256"),
}
_STAGES = {"depths": [1, 2, 1, 1], "dims": [8, 12, 16, 8]}
CONFIGS |= {
    f"timm_{name}": _timm(name, size=36, **options)
    | {"model_args": _STAGES | {n: o for n, o in options.items() if n != "num_classes"}}
    for name, options in {
        "convnext_tiny": {},
        "convnextv2_atto": {},
        "convnextv2_base": {"num_classes": 0},
        "convnext_large_mlp": {"head_hidden_size": 6, "act_layer": "gelu_tanh"},
    }.items()
}

OUTPUTS = json.loads(Path(__file__).with_suffix(".json").read_text())
"""The first outputs for the second of the `images`."""

OTHER_SIZES = {
    "vit": [-0.14813, 0.23006, 0.58569, 0.67748],
    "deit": [1.57042, 0.81862, -0.68361, 0.02641],
    "dinov2": [1.01785, -0.39356, 0.40834, 0.84646],
    "dinov2_with_registers": [1.01119, -0.40173, 0.42912, 0.85486],
    "clip": [-2.28053, 0.25916, -0.58982, 1.4761],
    "siglip_vision_model": [-0.6077, 1.27531, 1.14339, 1.72969],
    "timm_vit": [0.55895, -0.40571, -0.02958, 0.5133],
    "timm_deit3": [0.28928, -0.6043, 0.07912, -0.32768],
}
"""The same for images of 24 x 20, with interpolated positions (timm: ``dynamic_img_size``)."""

MASKED = [1.01468, -0.54052, 0.39843, 0.84785]
"""The same for ``dinov2``, with the mask of `masked_patches`."""


def image_size(config):
    """Height and width that a config says."""
    if "model_args" in config:
        return tuple(config["pretrained_cfg"]["input_size"][1:])
    size = config.get("vision_config", config)["image_size"]
    return (size, size) if isinstance(size, int) else tuple(size)


def images(size):
    """Two normalized images [2, H, W, 3]."""
    return np.random.default_rng(0).standard_normal((2, *size, 3)).astype(np.float32)


def masked_patches():
    """Which of 16 patches of two images are masked."""
    return np.random.default_rng(1).random((2, 16)) < 0.5


def peer(name):
    """The model with these weights, its own config, and the tensors of its file."""
    if name.startswith("timm"):
        return _peer_of_timm(CONFIGS[name])
    import transformers
    from safetensors.numpy import load_file, save_file

    config = dict(CONFIGS[name])
    model_class = getattr(transformers, config["architectures"][0])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        model_class(config).save_pretrained(folder)
        shapes = {n: a.shape for n, a in load_file(path).items()}
        tensors = weights({n: shape or (1,) for n, shape in shapes.items()})
        tensors = {n: a.reshape(shapes[n]) for n, a in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})
        written = json.loads(Path(folder, "config.json").read_text())
        return model_class.from_pretrained(folder).eval(), written, tensors


def _peer_of_timm(config):
    import timm
    import torch

    args = {"num_classes": config["num_classes"]} | config["model_args"]
    model = timm.create_model(config["architecture"], **args).eval()
    tensors = weights({n: tuple(a.shape) for n, a in model.state_dict().items()})
    model.load_state_dict({n: torch.tensor(a) for n, a in tensors.items()})
    return model, config, tensors


def outputs(model, x, **options):
    """Outputs of a peer's model for images [N, H, W, 3]."""
    import torch

    pixels = torch.tensor(np.moveaxis(x, -1, 1).copy())
    with torch.no_grad():
        if hasattr(model, "get_image_features"):
            features = model.get_image_features(pixels, **options)
            return getattr(features, "pooler_output", features).numpy()
        y = model(pixels, **options)
        if isinstance(y, torch.Tensor):
            return y.numpy()
        names = ("logits", "image_embeds", "pooler_output")
        return next(y[n] for n in names if n in y and y[n] is not None).numpy()


if __name__ == "__main__":
    for name, config in CONFIGS.items():
        y = outputs(peer(name)[0], images(image_size(config)))
        print(f'  "{name}": {[round(float(v), 5) for v in y[1, :4]]},')
