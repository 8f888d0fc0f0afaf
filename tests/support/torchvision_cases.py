"""Tiny EfficientNet, MobileNetV3, RegNets and Swin, and logits of torchvision's.

Weights are drawn by NumPy from the names of the arrays. The logits are those of torchvision 0.29.1
with torch 2.13.0 in float32: ``python tests/support/torchvision_cases.py`` prints them again.
"""

import numpy as np
from pretrained_cases import weights

from fnet import models
from fnet.models.efficientnet import Stage

CASES = {
    "efficientnet": (
        "efficientnet",
        {
            "stages": (
                Stage(2, 3, 1, 1, 8, squeeze=False, fused=True),
                Stage(2, 3, 2, 4, 16, squeeze=False, fused=True),
                Stage(2, 5, 2, 1, 16),
                Stage(1, 3, 1, 6, 24),
            ),
            "stem": 8,
            "last": 12,
            "eps": 1e-3,
        },
    ),
    "mobilenet": (
        "efficientnet",
        {
            "stages": (
                (Stage(1, 3, 2, 1, 16, activation="relu"),),
                (Stage(1, 3, 1, 4.5, 16, squeeze=False), Stage(2, 5, 2, 2, 24)),
            ),
            "stem": 16,
            "last": 144,
            "hidden": 10,
            "activation": "hard_swish",
            "eps": 1e-3,
        },
    ),
    "regnet_x": (
        "regnet",
        {"blocks": (1, 2), "widths": (8, 24), "group_width": 8, "squeeze": False},
    ),
    "regnet_y": ("regnet", {"blocks": (2, 1), "widths": (8, 16), "group_width": 16}),
    "swin": ("swin", {"width": 8, "blocks": (2, 2, 1), "heads": 2, "window": 3, "patch": 2}),
}
"""Name and options for `fnet.models.get`, by case."""

LOGITS = {
    "efficientnet": [-0.28985, 0.38704, -0.83628, 0.43548],
    "mobilenet": [0.49415, -0.31815, 0.35692, -0.71935],
    "regnet_x": [1.19545, 1.78607, -1.88905, -0.60703],
    "regnet_y": [1.5056, 1.0774, 0.98973, -2.076],
    "swin": [-0.67194, -0.6814, 0.51574, 0.3117],
}
"""The logits of the second of the `images`."""

CLASSES = 4


def build(name):
    """The network of a case."""
    network, options = CASES[name]
    own = {"activation": "relu", "norm": "batch"} if "regnet" in name else {}
    return models.get(network, num_classes=CLASSES, **options, **own)


def images():
    """Two images [2, 45, 37, 3], whose sides no window and no stride divides."""
    return np.random.default_rng(0).standard_normal((2, 45, 37, 3)).astype(np.float32)


def draw(shapes):
    """Arrays by name, with positive variances, and kernels that keep the size of their input."""
    arrays = {k: a / np.sqrt(np.prod(a.shape[1:-1])) for k, a in weights(shapes).items()}
    arrays = {k: np.abs(a) + 0.5 if k.endswith("running_var") else a for k, a in arrays.items()}
    return {k: a.astype(np.float32) for k, a in arrays.items()}


def peer(name):
    """The same network of torchvision."""
    from functools import partial

    from torch import nn
    from torchvision.models import efficientnet, mobilenetv3, regnet, swin_transformer

    norm = partial(nn.BatchNorm2d, eps=1e-3)
    if name == "efficientnet":
        fused, mb = efficientnet.FusedMBConvConfig, efficientnet.MBConvConfig
        rows = [
            fused(1, 3, 1, 8, 8, 2),
            fused(4, 3, 2, 8, 16, 2),
            mb(1, 5, 2, 16, 16, 2),
            mb(6, 3, 1, 16, 24, 1),
        ]
        return efficientnet.EfficientNet(
            rows, 0.2, num_classes=CLASSES, norm_layer=norm, last_channel=12
        )
    if name == "mobilenet":
        row = partial(mobilenetv3.InvertedResidualConfig, dilation=1, width_mult=1)
        rows = [
            row(16, 3, 16, 16, True, "RE", 2),
            row(16, 3, 72, 16, False, "HS", 1),
            row(16, 5, 32, 24, True, "HS", 2),
            row(24, 5, 48, 24, True, "HS", 1),
        ]
        return mobilenetv3.MobileNetV3(rows, 10, num_classes=CLASSES)
    options = CASES[name][1]
    if name == "swin":
        return swin_transformer.SwinTransformer(
            [2, 2], 8, [2, 2, 1], [2, 4, 8], [3, 3], num_classes=CLASSES
        )
    stages = len(options["blocks"])
    groups = [min(options["group_width"], width) for width in options["widths"]]
    params = regnet.BlockParams(
        options["blocks"],
        options["widths"],
        groups,
        [1.0] * stages,
        [2] * stages,
        0.25 if options.get("squeeze", True) else None,
    )
    return regnet.RegNet(params, num_classes=CLASSES)


def logits(model, arrays):
    """Logits of a network of torch with these weights."""
    import torch

    model.load_state_dict({k: torch.tensor(a) for k, a in arrays.items()}, strict=False)
    with torch.no_grad():
        return model.eval()(torch.tensor(np.moveaxis(images(), -1, 1).copy())).numpy()


if __name__ == "__main__":
    for name in CASES:
        network = peer(name)
        floating = {
            k: tuple(a.shape) for k, a in network.state_dict().items() if a.is_floating_point()
        }
        y = logits(network, draw(floating))
        print(f'    "{name}": {[round(float(v), 5) for v in y[1]]},')
