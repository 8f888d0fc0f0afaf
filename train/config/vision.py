"""Networks for images: a label each, or one for every pixel."""

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import numpy as np
from annotated_types import MaxLen, MinLen

from fnet import models
from fnet.layer import Layer
from train.config.section import Count, EvenCount, Section, options

Activation = Literal["leaky_relu", "elu", "softplus", "relu", "gelu", "silu"]
Norm = Literal["abn", "batch", "group"]
Stem = Literal["7x7", "3x3", "small"]
Dilation = Annotated[tuple[Count, ...], MinLen(4), MaxLen(4)]


@dataclass(frozen=True)
class PreactResNet(Section):
    """A pre-activation residual network (He et al. 2016) for small images."""

    name: Literal["preact_resnet"] = "preact_resnet"
    """The family of networks."""
    widths: Annotated[tuple[Count, ...], MinLen(1)] = (16, 32)
    """Channels of each stage; each stage after the first halves the image."""
    blocks_per_stage: Count = 2
    """Residual blocks of each stage."""
    stem_width: Count | None = None
    """Channels of the first convolution; those of the first stage by default."""
    first_stride: Literal[1, 2] = 1
    """2: the first stage halves the image as well, which makes the network much cheaper."""
    norm: Norm = "abn"
    """In place; plain batch norm; or group norm, by which no example depends on another."""
    activation: Activation = "leaky_relu"
    """After every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (0.01 by default) or alpha of elu (1 by default), above 0."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images [H, W, C]."""
        return models.preact_resnet(
            num_classes=num_classes, in_channels=image_shape[-1], **options(self)
        )


@dataclass(frozen=True)
class ResNet9(Section):
    """A shallow residual network that learns small images in few epochs (Page 2018)."""

    name: Literal["resnet9"] = "resnet9"
    """The family of networks."""
    widths: tuple[Count, Count, Count] = (128, 256, 512)
    """Channels of the three stages, each of which halves the image."""
    norm: Norm = "abn"
    """In place; plain batch norm; or group norm, by which no example depends on another."""
    activation: Activation = "leaky_relu"
    """After every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (0.01 by default) or alpha of elu (1 by default), above 0."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images [H, W, C]."""
        return models.resnet9(num_classes=num_classes, in_channels=image_shape[-1], **options(self))


@dataclass(frozen=True)
class ResNet(Section):
    """A residual network (He et al. 2015)."""

    name: Literal["resnet"] = "resnet"
    """The family of networks."""
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Layers."""
    activation: Activation = "leaky_relu"
    """After every norm but a block's last, and after every sum."""
    activation_param: float | None = None
    """Slope of leaky_relu (0.01 by default) or alpha of elu (1 by default), above 0."""
    norm: Norm = "abn"
    """In place; plain batch norm; or group norm, by which no example depends on another."""
    stem: Stem = "7x7"
    """The first convolution, or three of 3x3; small, one of 3x3, keeps the image's size."""
    dilation: Dilation = (1, 1, 1, 1)
    """Of each stage; one that is dilated has no stride."""

    def build(self, image_shape: tuple[int, ...], num_classes: int | None) -> Layer:
        """The network for images [H, W, C]."""
        return models.resnet(num_classes=num_classes, in_channels=image_shape[-1], **options(self))


@dataclass(frozen=True)
class ResNeXt(Section):
    """A residual network of grouped convolutions (Xie et al. 2017), pre-activation."""

    name: Literal["resnext"] = "resnext"
    """The family of networks."""
    depth: Literal[50, 101, 152] = 50
    """Layers."""
    activation: Activation = "leaky_relu"
    """After every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (0.01 by default) or alpha of elu (1 by default), above 0."""
    norm: Norm = "abn"
    """In place; plain batch norm; or group norm, by which no example depends on another."""
    stem: Stem = "7x7"
    """The first convolution, or three of 3x3; small, one of 3x3, keeps the image's size."""
    dilation: Dilation = (1, 1, 1, 1)
    """Of each stage; one that is dilated has no stride."""
    groups: Count = 64
    """Of each 3x3 convolution; divides 128."""

    def build(self, image_shape: tuple[int, ...], num_classes: int | None) -> Layer:
        """The network for images [H, W, C]."""
        return models.resnext(num_classes=num_classes, in_channels=image_shape[-1], **options(self))


@dataclass(frozen=True)
class WiderResNet(Section):
    """A residual network of few, wide blocks (Wu et al. 2016), pre-activation."""

    name: Literal["wider_resnet"] = "wider_resnet"
    """The family of networks."""
    depth: Literal[16, 20, 38] = 38
    """Layers."""
    activation: Activation = "leaky_relu"
    """After every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (0.01 by default) or alpha of elu (1 by default), above 0."""
    norm: Norm = "abn"
    """In place; plain batch norm; or group norm, by which no example depends on another."""
    a2: bool = False
    """The form with strides in place of maxima, and dropout in its last two stages."""
    dilated: bool = False
    """Of a2: dilated in place of the last two strides."""

    def build(self, image_shape: tuple[int, ...], num_classes: int | None) -> Layer:
        """The network for images [H, W, C]."""
        return models.wider_resnet(
            num_classes=num_classes, in_channels=image_shape[-1], **options(self)
        )


@dataclass(frozen=True)
class DenseNet(Section):
    """A dense network (Huang et al. 2017)."""

    name: Literal["densenet"] = "densenet"
    """The family of networks."""
    depth: Literal[121, 169, 201, 264] = 121
    """Layers."""
    activation: Activation = "leaky_relu"
    """After every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (0.01 by default) or alpha of elu (1 by default), above 0."""
    norm: Norm = "abn"
    """In place; plain batch norm; or group norm, by which no example depends on another."""
    stem: Stem = "7x7"
    """The first convolution, or three of 3x3; small, one of 3x3, keeps the image's size."""
    dilation: Dilation = (1, 1, 1, 1)
    """Of each stage; before one that is dilated nothing is pooled."""
    growth: Count = 32
    """Channels that each layer adds."""

    def build(self, image_shape: tuple[int, ...], num_classes: int | None) -> Layer:
        """The network for images [H, W, C]."""
        return models.densenet(
            num_classes=num_classes, in_channels=image_shape[-1], **options(self)
        )


@dataclass(frozen=True)
class RevNet(Section):
    """A reversible residual network: within a stage, nothing is kept per block."""

    name: Literal["revnet"] = "revnet"
    """The family of networks."""
    widths: Annotated[tuple[EvenCount, ...], MinLen(1)] = (32, 64)
    """Channels of each stage, both halves together; each stage after the first halves the image."""
    blocks: Annotated[tuple[Count, ...], MinLen(1)] = (3, 3)
    """Coupled blocks of each stage; each is worth two residual blocks."""
    bottleneck: bool = False
    """Whether a block is three convolutions, narrow between, or two of full width."""
    activation: Activation = "leaky_relu"
    """Activation in every in-place activated batch norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (0.01 by default) or alpha of elu (1 by default), above 0."""
    small_images: bool = True
    """Whether the stem keeps the image's size; if not, it quarters height and width."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images [H, W, C]."""
        return models.revnet(num_classes=num_classes, in_channels=image_shape[-1], **options(self))


@dataclass(frozen=True)
class Mlp(Section):
    """A multilayer perceptron on flattened images."""

    name: Literal["mlp"] = "mlp"
    """The family of networks."""
    hidden: tuple[Count, ...] = (256, 256)
    """Sizes of the hidden layers."""
    activation: Literal["relu", "leaky_relu", "elu", "softplus", "gelu", "silu", "tanh"] = "relu"
    """Activation between layers."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images of that shape."""
        return models.mlp(num_classes=num_classes, in_shape=image_shape, **options(self))


Body = Literal[
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50",
    "resnext101",
    "resnext152",
    "densenet121",
    "densenet169",
    "densenet201",
    "densenet264",
    "wider_resnet16_a2",
    "wider_resnet20_a2",
    "wider_resnet38_a2",
]


@dataclass(frozen=True)
class DeepLab(Section):
    """A segmentation network: DeepLabV3 (Chen et al. 2017) on a dilated body."""

    name: Literal["deeplab"] = "deeplab"
    """The family of networks."""
    body: Body = "resnet50"
    """The network that makes the features, an eighth of the image's size."""
    activation: Activation = "leaky_relu"
    """After every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (0.01 by default) or alpha of elu (1 by default), above 0."""
    norm: Norm = "abn"
    """In place; plain batch norm; or group norm, by which no example depends on another."""
    stem: Literal["7x7", "3x3"] = "7x7"
    """What of the body meets the image; wider networks have one of their own."""
    hidden: Count = 256
    """Channels of each branch of the head."""
    dilations: Annotated[tuple[Count, ...], MinLen(1)] = (12, 24, 36)
    """Of the head's 3x3 convolutions, in features."""
    pooling_size: tuple[Count, Count] | None = None
    """Features over which the head's mean is taken in evaluation; the whole image by default."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images [H, W, C]."""
        common = {n: getattr(self, n) for n in ("activation", "activation_param", "norm")}
        wider = self.body.startswith("wider")
        if wider and self.stem != "7x7":
            raise ValueError(f"stem: {self.body} has one of its own; leave model.stem out")
        thin = {"dilated": True} if wider else {"dilation": (1, 1, 2, 4), "stem": self.stem}
        channels = image_shape[-1]
        body = models.get(self.body, num_classes=None, in_channels=channels, **common, **thin)
        image = jax.ShapeDtypeStruct((1, 64, 64, channels), np.float32)
        params, state = jax.eval_shape(body.init, jax.random.key(0))
        features, _ = jax.eval_shape(
            functools.partial(body.apply, train=False), params, state, image
        )
        return models.deeplab(
            body,
            features[-1].shape[-1],
            num_classes=num_classes,
            hidden=self.hidden,
            dilations=self.dilations,
            pooling_size=self.pooling_size,
            interpolate=False,  # the task's loss does
            **common,
        )
