"""Generative networks: language models and diffusion models."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt, MinLen

from fnet import layers, models
from fnet.layer import Layer
from train.config.section import Count, CountOrZero, Fraction, Positive, Section

Mixer = Literal["attention", "mamba", "mamba2", "rg_lru"]


@dataclass(frozen=True)
class LanguageModel(Section):
    """Language model: a transformer, a state-space model, or a hybrid of both."""

    name: Literal["language_model"] = "language_model"
    """Network; add --help to see the fields of another one."""
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
class Denoiser(Section):
    """Class-conditional diffusion model: a transformer on image patches.

    Images are scaled to -1 to 1; data.mean and data.std are not used.
    """

    name: Literal["denoiser"] = "denoiser"
    """Network; add --help to see the fields of another one."""
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
