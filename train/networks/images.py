"""Networks for images: classifiers, and DeepLabV3 for segmentation."""

import functools
import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import tyro
from annotated_types import MaxLen, MinLen
from typing_extensions import override

import fnet
from train.config.network import Name, Network
from train.config.section import Choice, Count, CountOrZero, EvenCount, Fraction, Positive

_ACTIVATIONS = (
    *("identity", "leaky_relu", "elu", "softplus", "relu", "relu_squared", "gelu", "gelu_exact"),
    *("quick_gelu", "silu", "hard_swish", "hard_sigmoid", "tanh", "sigmoid"),
)


def activation_names() -> tuple[str, ...]:
    """Return the names in `fnet.layers.activations.ACTIVATIONS`, a user's included.

    The module imports JAX. Before somebody imports it, nobody has added to its table.
    """
    module = sys.modules.get("fnet.layers.activations")
    return tuple(module.ACTIVATIONS) if module else _ACTIVATIONS


Activation = Annotated[
    str,
    Choice(activation_names),
    tyro.conf.arg(
        constructor_factory=lambda: Literal[activation_names()],
        help_behavior_hint=lambda default: f"(default: {default.strip('[]').strip(chr(39))})",
    ),
]
Norm = Literal["abn", "batch", "group"]
Stem = Literal["7x7", "3x3", "deep", "tiered", "wide", "small"]
Dilation = Annotated[tuple[Count, ...], MinLen(4), MaxLen(4)]


def _variants(network: str) -> Choice:
    return Choice(lambda: fnet.models.VARIANTS[network])


@dataclass(frozen=True)
class ImageNetwork(Network):
    """A network that `fnet.models.get` knows by its name, or by its field ``variant``.

    The other fields are options of that function.
    """

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Any:
        """Build the network for images [H, W, C]."""
        options = self.options | {"num_classes": num_classes, "in_channels": image_shape[-1]}
        return fnet.models.get(options.pop("variant", self.name), **options)


@dataclass(frozen=True)
class Convolutional(ImageNetwork):
    """A convolutional network with a norm and an activation after each convolution."""

    activation: Activation = "leaky_relu"
    """Activation after every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""


@dataclass(frozen=True)
class ResNet(Convolutional):
    """ResNet (He et al. 2015)."""

    name: Name[Literal["resnet"]] = "resnet"
    depth: Literal[10, 14, 18, 26, 34, 50, 101, 152, 200] = 50
    """Number of layers."""
    activation: Activation = "leaky_relu"
    """Activation after every norm but a block's last, and after every residual sum."""
    stem: Stem = "7x7"
    """Stem: 7x7, three 3x3 (deep, tiered, wide: timm's d, t, s), or one 3x3 (small)."""
    dilation: Dilation = (1, 1, 1, 1)
    """Dilation of each stage; dilated stages have no stride."""
    dilate_first: bool = True
    """Dilate the first block of a stage, too; torchvision and timm do not."""
    shortcut: Literal["conv", "pool"] = "conv"
    """Stride of shortcuts: in a convolution, or in average pooling (timm's suffixes d and t)."""
    groups: Count = 1
    """Groups of each 3x3 convolution of bottlenecks (ResNeXt)."""
    group_width: Count = 64
    """Channels of each group in the first stage; 128 in Wide ResNets."""


@dataclass(frozen=True)
class ResNet9(Convolutional):
    """ResNet-9 for small images, which trains in few epochs (Page 2018)."""

    name: Name[Literal["resnet9"]] = "resnet9"
    widths: tuple[Count, Count, Count] = (128, 256, 512)
    """Channels of the three stages; each halves the resolution."""


@dataclass(frozen=True)
class PreactResNet(Convolutional):
    """Pre-activation ResNet for small images (He et al. 2016)."""

    name: Name[Literal["preact_resnet"]] = "preact_resnet"
    widths: Annotated[tuple[Count, ...], MinLen(1)] = (16, 32)
    """Channels of each stage; each stage after the first halves the resolution."""
    blocks_per_stage: Count = 2
    """Residual blocks per stage."""
    stem_width: Count | None = None
    """Channels of the first convolution; None is the first stage's width."""
    first_stride: Literal[1, 2] = 1
    """Stride of the first stage; 2 makes the network much cheaper."""


@dataclass(frozen=True)
class ResNeXt(Convolutional):
    """ResNeXt with pre-activation (Xie et al. 2017)."""

    name: Name[Literal["resnext"]] = "resnext"
    depth: Literal[50, 101, 152] = 50
    """Number of layers."""
    stem: Stem = "7x7"
    """Stem: a 7x7 convolution, three 3x3, or one 3x3 at full resolution (small)."""
    dilation: Dilation = (1, 1, 1, 1)
    """Dilation of each stage; dilated stages have no stride."""
    groups: Count = 64
    """Groups of each 3x3 convolution; must divide 128."""


@dataclass(frozen=True)
class WiderResNet(Convolutional):
    """Wider ResNet with pre-activation (Wu et al. 2016)."""

    name: Name[Literal["wider_resnet"]] = "wider_resnet"
    depth: Literal[16, 20, 38] = 38
    """Number of layers."""
    a2: bool = False
    """Use the A2 variant: strides instead of max pooling, dropout in the last two stages."""
    dilated: bool = False
    """Dilate the last two stages instead of striding them (A2 only)."""


@dataclass(frozen=True)
class DenseNet(Convolutional):
    """DenseNet (Huang et al. 2017)."""

    name: Name[Literal["densenet"]] = "densenet"
    depth: Literal[121, 161, 169, 201, 264] = 121
    """Number of layers."""
    stem: Stem = "7x7"
    """Stem: a 7x7 convolution, three 3x3, or one 3x3 at full resolution (small)."""
    dilation: Dilation = (1, 1, 1, 1)
    """Dilation of each stage; there is no pooling before a dilated stage."""
    growth: Count | None = None
    """Growth rate: channels that each layer adds; None is 48 for depth 161, otherwise 32."""
    stem_norm: bool = False
    """Norm after the stem, as in torchvision and timm."""


@dataclass(frozen=True)
class RevNet(ImageNetwork):
    """RevNet: its backward pass recomputes activations and saves none per block."""

    name: Name[Literal["revnet"]] = "revnet"
    widths: Annotated[tuple[EvenCount, ...], MinLen(1)] = (32, 64)
    """Channels of each stage; each stage after the first halves the resolution."""
    blocks: Annotated[tuple[Count, ...], MinLen(1)] = (3, 3)
    """Reversible blocks per stage; each is worth two residual blocks."""
    bottleneck: bool = False
    """Use bottleneck blocks of three convolutions instead of two."""
    activation: Activation = "leaky_relu"
    """Activation of every in-place activated batch norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    small_images: bool = True
    """Use a stem at full resolution; otherwise it divides height and width by 4."""


@dataclass(frozen=True)
class RegNet(Convolutional):
    """RegNetX or RegNetY (Radosavovic et al. 2020)."""

    name: Name[Literal["regnet"]] = "regnet"
    variant: Annotated[str, _variants("regnet")] = "regnet_y_400mf"
    """Name in torchvision or timm, such as regnet_x_1_6gf or regnety_040."""


@dataclass(frozen=True)
class EfficientNet(ImageNetwork):
    """EfficientNet, EfficientNetV2 or MobileNetV3 (Tan, Le 2019, 2021; Howard et al. 2019)."""

    name: Name[Literal["efficientnet"]] = "efficientnet"
    variant: Annotated[str, _variants("efficientnet")] = "efficientnet_b0"
    """Name in torchvision or timm, such as efficientnet_v2_s, mobilenet_v3_large."""
    norm: Norm = "batch"
    """Norm: plain batch norm, in-place activated batch norm, or group norm."""
    eps: Positive | None = None
    """Added to the variance in each norm but group norm; None is the publisher's."""
    stochastic_depth: Fraction = 0.0
    """Rate at which the last block is skipped for an image; grows linearly over the blocks."""
    dropout: Fraction = 0.0
    """Dropout rate before the classifier; 0.2 to 0.5 in the papers."""

    @property
    @override
    def options(self) -> dict[str, Any]:
        row = fnet.models.VARIANTS["efficientnet"][self.variant]
        eps, is_group = self.eps or row["eps"], self.norm == "group"
        padding = row.get("padding", "half")
        return super().options | {"eps": 1e-5 if is_group else eps, "padding": padding}


@dataclass(frozen=True)
class ConvNeXt(ImageNetwork):
    """ConvNeXt, the first and the second version (Liu et al. 2022; Woo et al. 2023)."""

    name: Name[Literal["convnext"]] = "convnext"
    blocks: Annotated[tuple[Count, ...], MinLen(1)] = (3, 3, 9, 3)
    """Number of blocks of each stage."""
    widths: Annotated[tuple[Count, ...], MinLen(1)] = (96, 192, 384, 768)
    """Channels of each stage; each stage after the first halves the resolution."""
    patch: Count = 4
    """Window and stride of the first convolution, in pixels."""
    response_norm: bool = False
    """Use global response norm, as in ConvNeXt V2; then set layer_scale to none."""
    layer_scale: Positive | None = 1e-6
    """Initial scale of each block; None is no scale."""
    stochastic_depth: Fraction = 0.0
    """Rate at which the last block is skipped for an image; grows linearly over the blocks."""


@dataclass(frozen=True)
class ViT(Network):
    """Vision transformer (Dosovitskiy et al. 2021)."""

    name: Name[Literal["vit"]] = "vit"
    patch: Count = 4
    """Patch size in pixels; pixels beyond the last whole patch are cut off."""
    width: Count = 192
    """Model width: features per patch; 192, 384, 768 and 1024 in the papers."""
    blocks: Count = 12
    """Number of blocks."""
    heads: Count = 3
    """Number of attention heads; must divide width."""
    hidden: Count | None = None
    """Width of the feed-forward layers (GELU); None is 4 times width."""
    registers: CountOrZero = 0
    """Number of register tokens, which are neither image nor output."""
    pooling: Literal["token", "mean"] = "token"
    """Features of the classifier: the class token, or the mean of the patches."""
    layer_scale: Positive | None = None
    """Initial scale of each residual branch; None is no scale."""
    dropout: Fraction = 0.0
    """Dropout rate of each residual branch."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> "fnet.Layer":
        """Build the network for images [H, W, C]."""
        return fnet.models.get(
            "vit", num_classes=num_classes, image_shape=image_shape, **self.options
        )


@dataclass(frozen=True)
class Swin(ImageNetwork):
    """Swin transformer (Liu et al. 2021)."""

    name: Name[Literal["swin"]] = "swin"
    variant: Annotated[str, _variants("swin")] = "swin_t"
    """Name in torchvision or timm, such as swin_s or swin_base_patch4_window12_384."""
    stochastic_depth: Fraction = 0.0
    """Rate at which the last block is skipped for an image; grows linearly over the blocks."""


@dataclass(frozen=True)
class Mlp(Network):
    """Multilayer perceptron on flattened images."""

    name: Name[Literal["mlp"]] = "mlp"
    hidden: tuple[Count, ...] = (256, 256)
    """Widths of the hidden layers."""
    activation: Activation = "relu"
    """Activation between layers."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> "fnet.Layer":
        """Build the network for images of a shape."""
        return fnet.models.get("mlp", num_classes=num_classes, in_shape=image_shape, **self.options)


# Not all of `fnet.models.VARIANTS`: only networks that can be dilated are backbones.
# fmt: off
Backbone = Literal[
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet18d", "resnet34d",
    "resnet50d", "resnet101d", "resnet152d", "wide_resnet50_2", "wide_resnet101_2",
    "resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "resnext50", "resnext101",
    "resnext152", "densenet121", "densenet161", "densenet169", "densenet201", "densenet264",
    "wider_resnet16_a2", "wider_resnet20_a2", "wider_resnet38_a2",
]
# fmt: on


@dataclass(frozen=True)
class DeepLab(Convolutional):
    """DeepLabV3 for semantic segmentation (Chen et al. 2017)."""

    task: ClassVar[str] = "segmentation"

    name: Name[Literal["deeplab"]] = "deeplab"
    backbone: Backbone = "resnet50"
    """Backbone, whose features have an eighth of the image's resolution."""
    stem: Literal["7x7", "3x3"] = "7x7"
    """Stem of the backbone: a 7x7 convolution or three 3x3; some backbones have their own."""
    dilate_first: bool = True
    """Dilate the first block of a stage of a ResNet, too; torchvision does not."""
    head: Literal["sum", "concat"] = "sum"
    """Head (ASPP): branches are summed, or concatenated as in torchvision."""
    hidden: Count = 256
    """Channels of each branch of the head (ASPP)."""
    dilations: Annotated[tuple[Count, ...], MinLen(1)] = (12, 24, 36)
    """Dilations of the head's 3x3 convolutions."""
    pooling_size: tuple[Count, Count] | None = None
    """Window of the head's average pooling in evaluation; None is the whole image."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> "fnet.Layer":
        """Build the network for images [H, W, C]."""
        import jax

        common = {n: getattr(self, n) for n in ("activation", "activation_param", "norm")}
        network = next(n for n, names in fnet.models.VARIANTS.items() if self.backbone in names)
        wider, own = network == "wider_resnet", fnet.models.VARIANTS[network][self.backbone]
        if self.stem != "7x7" and (wider or own.keys() > {"depth"}):
            raise ValueError(f"stem: {self.backbone} has its own stem; leave model.stem out")
        dilated: dict[str, Any] = {"dilated": True} if wider else {"dilation": (1, 1, 2, 4)}
        if self.stem != "7x7":
            dilated["stem"] = self.stem
        if not self.dilate_first and network != "resnet":
            raise ValueError(f"dilate_first: only ResNets can leave it out, not {self.backbone}")
        if not self.dilate_first:
            dilated["dilate_first"] = False
        if network == "densenet" and self.head == "concat":
            dilated["stem_norm"] = True
        channels = image_shape[-1]
        backbone = fnet.models.get(
            self.backbone, num_classes=None, in_channels=channels, **common, **dilated
        )
        image = jax.ShapeDtypeStruct((1, 64, 64, channels), np.float32)
        params, state = jax.eval_shape(backbone.init, jax.random.key(0))
        apply = functools.partial(backbone.apply, train=False)
        features, _ = jax.eval_shape(apply, params, state, image)
        return fnet.models.deeplab(
            backbone,
            features[-1].shape[-1],
            num_classes=num_classes,
            hidden=self.hidden,
            dilations=self.dilations,
            pooling_size=self.pooling_size,
            head=self.head,
            interpolate=False,  # the loss upsamples the logits
            **common,
        )
