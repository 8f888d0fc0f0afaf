"""Wider ResNets: few, wide pre-activation blocks; the body of segmentation networks."""

from fnet import layers
from fnet.layer import Layer, serial
from fnet.models import norm_activation
from fnet.models.backbone import backbone, classifier, stage_blocks
from fnet.models.norm_activation import NormActivation
from fnet.models.residual_blocks import convolution, pre_activation

DEPTHS = {
    16: (1, 1, 1, 1, 1, 1),
    20: (1, 1, 1, 3, 1, 1),
    38: (3, 3, 6, 3, 1, 1),
}
"""Blocks a stage, by depth (Wu et al. 2016)."""
CHANNELS = (
    (128, 128),
    (256, 256),
    (512, 512),
    (512, 1024),
    (512, 1024, 2048),
    (1024, 2048, 4096),
)
"""Of the convolutions of each stage's blocks."""


def wider_resnet(
    depth: int,
    *,
    num_classes: int | None,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    norm: str | NormActivation = "abn",
    a2: bool = False,
    dilated: bool = False,
) -> Layer:
    """A wider ResNet for images.

    Wu, Shen, van den Hengel, "Wider or Deeper: Revisiting the ResNet Model for Visual
    Recognition", Pattern Recognition 2019 (arXiv 2016), as mapillary/inplace_abn has it.

    Args:
      depth: 16, 20 or 38.
      num_classes: length of the logits; None: the six stages' outputs instead, the last
        one normed and activated.
      in_channels, activation, activation_param, norm: as for `fnet.models.resnet`.
      a2: the paper's second variant, "A2": maxima halve the image before the first two
        stages, strides in the next three, where otherwise maxima do it before the first
        five; and the last two stages drop 30 % and 50 % of their channels in training.
      dilated: of ``a2``: the last three stages dilate by 2, 4 and 4 in place of strides,
        so that features are an eighth of the image's size, not a 32nd.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of
      six features. Names follow mapillary/inplace_abn's: ``mod1`` to ``mod7``,
      ``bn_out``, ``classifier``. With ``a2``, training needs a key.

    Raises:
      ValueError: for another depth or norm, ``dilated`` without ``a2``, or an activation that
        is unknown or that the norm does not take.
    """
    counts = stage_blocks("wider_resnet", DEPTHS, depth)
    if dilated and not a2:
        raise ValueError("wider_resnet: dilated=True is of the A2 form alone; give a2=True")
    normed = norm_activation.find("wider_resnet", norm, activation, activation_param)
    dilations = (1, 1, 1, 2, 4, 4) if dilated else (1,) * 6
    dropout = (0, 0, 0, 0, 0.3, 0.5) if a2 else (0,) * 6
    pooled = range(2) if a2 else range(5)
    strided = range(2, 3 if dilated else 5) if a2 else ()

    children = {"mod1": serial(conv1=convolution(in_channels, 64, 3))}
    n_in = 64
    for i, (count, channels) in enumerate(zip(counts, CHANNELS, strict=True)):
        if i in pooled:
            children[f"pool{i + 2}"] = layers.max_pool(3, stride=2, padding=1)
        blocks = {}
        for j in range(count):
            blocks[f"block{j + 1}"] = pre_activation(
                n_in,
                channels,
                normed,
                stride=2 if i in strided and not j else 1,
                dilation=dilations[i],
                dropout=dropout[i],
            )
            n_in = channels[-1]
        children[f"mod{i + 2}"] = serial(**blocks)
    children["bn_out"] = normed(n_in)
    features = (*(f"mod{i}" for i in range(2, 7)), "bn_out")
    return backbone(children, features, classifier(n_in, num_classes))
