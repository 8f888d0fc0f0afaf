"""Networks for image classification and semantic segmentation."""

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import numpy as np
from annotated_types import Ge, Le, Lt, MaxLen, MinLen

from fnet import layers, models
from fnet.layer import Layer
from fnet.models.resnet import DEPTHS as RESNETS
from fnet.models.resnet import VARIANTS as RESNET_VARIANTS
from train.config.section import Count, CountOrZero, EvenCount, Fraction, Positive, Section, options


@dataclass(frozen=True)
class Network(Section):
    """A network that can start from trained weights."""

    name: str = ""
    """Network; its class has the value."""
    pretrained: str | None = None
    """Weights to start from: a run, a folder of timm, or FILE or FILE#ENTRY; None is random."""


Mixer = Literal["attention", "mamba", "mamba2", "rg_lru"]


@dataclass(frozen=True)
class LanguageModel(Network):
    """Language model: a transformer, a state-space model, or a hybrid of both."""

    name: Literal["language_model"] = "language_model"
    """Network; --model.name NAME --help lists the fields of another one."""
    mixers: Annotated[tuple[Mixer, ...], MinLen(1)] = ("attention",)
    """Token mixer of each block, repeated cyclically from the first block to the last."""
    blocks: Count = 4
    """Number of blocks."""
    width: Count = 128
    """Model width: features per token."""
    hidden: CountOrZero | None = None
    """Width of the feed-forward layers (SwiGLU); None is 8/3 of width, 0 is no feed-forward."""
    heads: Count = 4
    """Number of heads of attention and rg_lru; must divide width."""
    groups: Count | None = None
    """Number of key-value heads (grouped-query attention); None is one per head."""
    window: Count | None = None
    """Sliding-window size of attention, in tokens; None attends to all previous tokens."""
    expand: Positive = 2.0
    """Inner width of mamba, mamba2 and rg_lru, as a multiple of width."""
    norm: Literal["rms", "layer", "dynamic_tanh"] = "rms"
    """Norm before each mixer, each feed-forward and the head."""
    attention_context: Literal["none", "lagged", "current"] = "none"
    """Attention context between blocks: none, from the previous step, or from this one."""
    context_rate: Annotated[float, Ge(0), Le(1)] = 0.01
    """Update rate of the attention context."""
    dropout: Fraction = 0.0
    """Dropout rate of each residual branch."""

    def build(self, vocabulary: int, dtype: str = "float32") -> models.LanguageModel:
        """Build the network for a vocabulary size and a dtype of activations."""
        hidden = _hidden(self.width, self.hidden)
        feed_forward = layers.feed_forward(self.width, hidden) if hidden else None
        mixers = {name: self._mixer(name) for name in self.mixers}
        names = [self.mixers[i % len(self.mixers)] for i in range(self.blocks)]
        return models.language_model(
            vocabulary=vocabulary,
            width=self.width,
            blocks=[layers.Block(mixers[name], feed_forward) for name in names],
            norm=self.norm,
            context=None if self.attention_context == "none" else self.attention_context,
            context_rate=self.context_rate,
            dropout=self.dropout,
            dtype=dtype,
        )

    def _mixer(self, name: str) -> Layer:
        if name == "attention":
            return layers.attention(
                self.width,
                self.heads,
                groups=self.groups,
                causal=True,
                window=self.window,
                rotary=10_000.0,
                bias=False,
            )
        if name == "rg_lru":
            return layers.rg_lru(self.width, expand=self.expand, heads=self.heads)
        state_space = layers.mamba if name == "mamba" else layers.mamba2
        return state_space(self.width, expand=self.expand)


@dataclass(frozen=True)
class Pretrained(Section):
    """Published language model of Hugging Face, to train as a whole or with LoRA adapters."""

    name: Literal["pretrained"] = "pretrained"
    """Network; --model.name NAME --help lists the fields of another one."""
    path: str = "model"
    """Folder of the model: config.json, safetensors files and tokenizer.json."""
    lora_rank: Count | None = None
    """Rank of LoRA adapters, which alone are trained; None trains all parameters."""
    lora_alpha: Positive | None = None
    """Adapters are scaled by lora_alpha / lora_rank; None is lora_rank."""
    lora_targets: Annotated[tuple[str, ...], MinLen(1)] = ("blocks/*/kernel",)
    """Patterns of the weights with adapters, such as blocks/*/query/kernel."""
    dora: bool = False
    """Train the magnitude of each output, too (DoRA); needs lora_rank."""
    quantize: Literal["int8", "nf4"] | None = None
    """Store the frozen weights of the blocks in 8 or 4 bits; needs lora_rank."""


@dataclass(frozen=True)
class Denoiser(Network):
    """Class-conditional diffusion model: a transformer on image patches.

    Images are scaled to -1 to 1; data.mean and data.std are not used.
    """

    name: Literal["denoiser"] = "denoiser"
    """Network; --model.name NAME --help lists the fields of another one."""
    patch: Count = 1
    """Patch size in pixels; must divide height and width."""
    blocks: Count = 4
    """Number of blocks."""
    width: Count = 128
    """Model width: features per patch."""
    hidden: CountOrZero | None = None
    """Width of the feed-forward layers (SwiGLU); None is 8/3 of width, 0 is no feed-forward."""
    heads: Count = 4
    """Number of attention heads; must divide width."""
    norm: Literal["rms", "layer", "dynamic_tanh"] = "rms"
    """Norm before each attention and each feed-forward."""
    attention_context: Literal["none", "lagged", "current"] = "none"
    """Attention context between blocks: none, from the previous step, or from this one."""
    context_rate: Annotated[float, Ge(0), Le(1)] = 0.01
    """Update rate of the attention context."""
    dropout: Fraction = 0.0
    """Dropout rate of each residual branch."""
    schedule: Literal["cosine", "linear", "karras"] = "cosine"
    """Noise schedule."""
    steps: Annotated[int, Ge(2), Lt(2**31)] = 1000
    """Number of steps of the noise schedule; sampling can use fewer."""
    predicts: Literal["eps", "x0", "v"] = "v"
    """Prediction target: the noise, the image, or v = alpha noise - sigma image."""
    weighting: Literal["uniform", "min_snr"] = "min_snr"
    """Loss weighting over noise levels: uniform, or Min-SNR with gamma 5."""
    label_dropout: Fraction = 0.1
    """Fraction of examples trained without their label, for classifier-free guidance."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> models.Denoiser:
        """Build the network for images [H, W, C]."""
        attention = layers.attention(self.width, self.heads, bias=False)
        hidden = _hidden(self.width, self.hidden)
        feed_forward = layers.feed_forward(self.width, hidden) if hidden else None
        return models.denoiser(
            image_shape=image_shape,
            width=self.width,
            blocks=[layers.Block(attention, feed_forward)] * self.blocks,
            num_classes=num_classes,
            patch=self.patch,
            norm=self.norm,
            context=None if self.attention_context == "none" else self.attention_context,
            context_rate=self.context_rate,
            dropout=self.dropout,
        )


def _hidden(width: int, hidden: int | None) -> int:
    """Width of SwiGLU: 8/3 of the model width by default, rounded to a multiple of 8."""
    return 8 * max(round(width / 3), 1) if hidden is None else hidden


Activation = Literal["leaky_relu", "elu", "softplus", "relu", "gelu", "silu"]
Norm = Literal["abn", "batch", "group"]
Stem = Literal["7x7", "3x3", "deep", "tiered", "wide", "small"]
Dilation = Annotated[tuple[Count, ...], MinLen(4), MaxLen(4)]


@dataclass(frozen=True)
class PreactResNet(Network):
    """Pre-activation ResNet for small images (He et al. 2016)."""

    name: Literal["preact_resnet"] = "preact_resnet"
    """Network; --model.name NAME --help lists the fields of another one."""
    widths: Annotated[tuple[Count, ...], MinLen(1)] = (16, 32)
    """Channels of each stage; each stage after the first halves the resolution."""
    blocks_per_stage: Count = 2
    """Residual blocks per stage."""
    stem_width: Count | None = None
    """Channels of the first convolution; None is the first stage's width."""
    first_stride: Literal[1, 2] = 1
    """Stride of the first stage; 2 makes the network much cheaper."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""
    activation: Activation = "leaky_relu"
    """Activation after every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.preact_resnet(
            num_classes=num_classes, in_channels=image_shape[-1], **options(self)
        )


@dataclass(frozen=True)
class ResNet9(Network):
    """ResNet-9 for small images, which trains in few epochs (Page 2018)."""

    name: Literal["resnet9"] = "resnet9"
    """Network; --model.name NAME --help lists the fields of another one."""
    widths: tuple[Count, Count, Count] = (128, 256, 512)
    """Channels of the three stages; each halves the resolution."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""
    activation: Activation = "leaky_relu"
    """Activation after every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.resnet9(num_classes=num_classes, in_channels=image_shape[-1], **options(self))


@dataclass(frozen=True)
class ResNet(Network):
    """ResNet (He et al. 2015)."""

    name: Literal["resnet"] = "resnet"
    """Network; --model.name NAME --help lists the fields of another one."""
    depth: Literal[10, 14, 18, 26, 34, 50, 101, 152, 200] = 50
    """Number of layers."""
    activation: Activation = "leaky_relu"
    """Activation after every norm but a block's last, and after every residual sum."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""
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

    def build(self, image_shape: tuple[int, ...], num_classes: int | None) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.resnet(num_classes=num_classes, in_channels=image_shape[-1], **options(self))


@dataclass(frozen=True)
class ResNeXt(Network):
    """ResNeXt with pre-activation (Xie et al. 2017)."""

    name: Literal["resnext"] = "resnext"
    """Network; --model.name NAME --help lists the fields of another one."""
    depth: Literal[50, 101, 152] = 50
    """Number of layers."""
    activation: Activation = "leaky_relu"
    """Activation after every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""
    stem: Stem = "7x7"
    """Stem: a 7x7 convolution, three 3x3, or one 3x3 at full resolution (small)."""
    dilation: Dilation = (1, 1, 1, 1)
    """Dilation of each stage; dilated stages have no stride."""
    groups: Count = 64
    """Groups of each 3x3 convolution; must divide 128."""

    def build(self, image_shape: tuple[int, ...], num_classes: int | None) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.resnext(num_classes=num_classes, in_channels=image_shape[-1], **options(self))


@dataclass(frozen=True)
class WiderResNet(Network):
    """Wider ResNet with pre-activation (Wu et al. 2016)."""

    name: Literal["wider_resnet"] = "wider_resnet"
    """Network; --model.name NAME --help lists the fields of another one."""
    depth: Literal[16, 20, 38] = 38
    """Number of layers."""
    activation: Activation = "leaky_relu"
    """Activation after every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""
    a2: bool = False
    """Use the A2 variant: strides instead of max pooling, dropout in the last two stages."""
    dilated: bool = False
    """Dilate the last two stages instead of striding them (A2 only)."""

    def build(self, image_shape: tuple[int, ...], num_classes: int | None) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.wider_resnet(
            num_classes=num_classes, in_channels=image_shape[-1], **options(self)
        )


@dataclass(frozen=True)
class DenseNet(Network):
    """DenseNet (Huang et al. 2017)."""

    name: Literal["densenet"] = "densenet"
    """Network; --model.name NAME --help lists the fields of another one."""
    depth: Literal[121, 161, 169, 201, 264] = 121
    """Number of layers."""
    activation: Activation = "leaky_relu"
    """Activation after every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""
    stem: Stem = "7x7"
    """Stem: a 7x7 convolution, three 3x3, or one 3x3 at full resolution (small)."""
    dilation: Dilation = (1, 1, 1, 1)
    """Dilation of each stage; there is no pooling before a dilated stage."""
    growth: Count | None = None
    """Growth rate: channels that each layer adds; None is 48 for depth 161, otherwise 32."""
    stem_norm: bool = False
    """Norm after the stem, as in torchvision and timm."""

    def build(self, image_shape: tuple[int, ...], num_classes: int | None) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.densenet(
            num_classes=num_classes, in_channels=image_shape[-1], **options(self)
        )


@dataclass(frozen=True)
class RevNet(Network):
    """RevNet: its backward pass recomputes activations and saves none per block."""

    name: Literal["revnet"] = "revnet"
    """Network; --model.name NAME --help lists the fields of another one."""
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

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.revnet(num_classes=num_classes, in_channels=image_shape[-1], **options(self))


@dataclass(frozen=True)
class ViT(Network):
    """Vision transformer (Dosovitskiy et al. 2021)."""

    name: Literal["vit"] = "vit"
    """Network; --model.name NAME --help lists the fields of another one."""
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

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.vit(num_classes=num_classes, image_shape=image_shape, **options(self))


@dataclass(frozen=True)
class ConvNeXt(Network):
    """ConvNeXt, the first and the second version (Liu et al. 2022; Woo et al. 2023)."""

    name: Literal["convnext"] = "convnext"
    """Network; --model.name NAME --help lists the fields of another one."""
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

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.convnext(
            num_classes=num_classes, in_channels=image_shape[-1], **options(self)
        )


@dataclass(frozen=True)
class Mlp(Network):
    """Multilayer perceptron on flattened images."""

    name: Literal["mlp"] = "mlp"
    """Network; --model.name NAME --help lists the fields of another one."""
    hidden: tuple[Count, ...] = (256, 256)
    """Widths of the hidden layers."""
    activation: Literal["relu", "leaky_relu", "elu", "softplus", "gelu", "silu", "tanh"] = "relu"
    """Activation between layers."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images of a shape."""
        return models.mlp(num_classes=num_classes, in_shape=image_shape, **options(self))


Backbone = Literal[
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet18d",
    "resnet34d",
    "resnet50d",
    "resnet101d",
    "resnet152d",
    "wide_resnet50_2",
    "wide_resnet101_2",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "resnext50",
    "resnext101",
    "resnext152",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "densenet264",
    "wider_resnet16_a2",
    "wider_resnet20_a2",
    "wider_resnet38_a2",
]


@dataclass(frozen=True)
class DeepLab(Network):
    """DeepLabV3 for semantic segmentation (Chen et al. 2017)."""

    name: Literal["deeplab"] = "deeplab"
    """Network; --model.name NAME --help lists the fields of another one."""
    backbone: Backbone = "resnet50"
    """Backbone, whose features have an eighth of the image's resolution."""
    activation: Activation = "leaky_relu"
    """Activation after every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""
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

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images [H, W, C]."""
        common = {n: getattr(self, n) for n in ("activation", "activation_param", "norm")}
        wider = self.backbone.startswith("wider")
        if self.stem != "7x7" and (wider or self.backbone in RESNET_VARIANTS):
            raise ValueError(f"stem: {self.backbone} has its own stem; leave model.stem out")
        dilated: dict[str, Any] = {"dilated": True} if wider else {"dilation": (1, 1, 2, 4)}
        if self.stem != "7x7":
            dilated["stem"] = self.stem
        if not self.dilate_first:
            if self.backbone not in {*RESNET_VARIANTS, *(f"resnet{depth}" for depth in RESNETS)}:
                raise ValueError(
                    f"dilate_first: only ResNets can leave it out, not {self.backbone}"
                )
            dilated["dilate_first"] = False
        if self.backbone.startswith("densenet") and self.head == "concat":
            dilated["stem_norm"] = True
        channels = image_shape[-1]
        backbone = models.get(
            self.backbone, num_classes=None, in_channels=channels, **common, **dilated
        )
        image = jax.ShapeDtypeStruct((1, 64, 64, channels), np.float32)
        params, state = jax.eval_shape(backbone.init, jax.random.key(0))
        features, _ = jax.eval_shape(
            functools.partial(backbone.apply, train=False), params, state, image
        )
        return models.deeplab(
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
