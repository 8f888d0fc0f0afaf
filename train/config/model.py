"""The networks."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen

from fnet import models
from fnet.layer import Layer
from train.config.section import Count, EvenCount, Section, options

Activation = Literal["leaky_relu", "elu", "softplus", "relu", "gelu", "silu"]


@dataclass(frozen=True)
class PreactResNet(Section):
    """A pre-activation residual network with in-place activated batch norm."""

    name: Literal["preact_resnet"] = "preact_resnet"
    """The family of networks."""
    widths: Annotated[tuple[Count, ...], MinLen(1)] = (16, 32)
    """Channels of each stage; each stage after the first halves the image."""
    blocks_per_stage: Count = 2
    """Residual blocks of each stage."""
    activation: Activation = "leaky_relu"
    """Activation in every in-place activated batch norm."""
    activation_param: float = 0.01
    """Slope of leaky_relu or alpha of elu, above 0; others have none."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images [H, W, C]."""
        return models.preact_resnet(
            num_classes=num_classes, in_channels=image_shape[-1], **options(self)
        )


@dataclass(frozen=True)
class ResNet(Section):
    """A residual network (He et al. 2015)."""

    name: Literal["resnet"] = "resnet"
    """The family of networks."""
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Layers."""
    activation: Activation = "leaky_relu"
    """After every norm but a block's last, and after every sum."""
    activation_param: float = 0.01
    """Slope of leaky_relu or alpha of elu, above 0; others have none."""
    norm: Literal["abn", "group"] = "abn"
    """In-place activated batch norm, or group norm, by which no example depends on another."""
    small_images: bool = False
    """Whether the stem keeps the image's size; if not, it quarters height and width."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images [H, W, C]."""
        return models.resnet(num_classes=num_classes, in_channels=image_shape[-1], **options(self))


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
    activation_param: float = 0.01
    """Slope of leaky_relu or alpha of elu, above 0; others have none."""
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
