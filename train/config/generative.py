"""Networks that generate: text, images out of noise."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt, MinLen

from fnet import layers, models
from fnet.layer import Layer
from train.config.section import Count, CountOrZero, Positive, Section, Share

Mixer = Literal["attention", "mamba", "mamba2", "rg_lru"]


@dataclass(frozen=True)
class LanguageModel(Section):
    """Blocks along time that tell the next token: a transformer, a state-space model, or both."""

    name: Literal["language_model"] = "language_model"
    """The family of networks."""
    mixers: Annotated[tuple[Mixer, ...], MinLen(1)] = ("attention",)
    """What mixes positions in each block, in turn from the first block to the last."""
    blocks: Count = 4
    """How many."""
    width: Count = 128
    """Features of a position."""
    hidden: CountOrZero | None = None
    """Width of each block's feed-forward (SwiGLU); 8/3 of width by default, 0 for none."""
    heads: Count = 4
    """Of attention and rg_lru; divides width."""
    groups: Count | None = None
    """Heads of keys and values in attention, fewer than heads; as many by default."""
    window: Count | None = None
    """Positions that attention sees, the own one included; all before by default."""
    expand: Positive = 2.0
    """Inner width of state-space mixers, in widths."""
    norm: Literal["rms", "layer", "dynamic_tanh"] = "rms"
    """Before each mixer, each feed-forward and the head."""
    attention_context: Literal["none", "lagged", "current"] = "none"
    """Whether blocks tell the next which features moved together: a step before, or in this one."""
    context_rate: Annotated[float, Ge(0), Le(1)] = 0.01
    """Weight of what was just seen in an attention context."""
    dropout: Share = 0.0
    """Of each branch, in training."""

    def build(self, vocabulary: int, dtype: str = "float32") -> models.LanguageModel:
        """The network for that many tokens, with activations of a dtype."""
        hidden = _hidden(self.width, self.hidden)
        feed_forward = layers.feed_forward(self.width, hidden) if hidden else None
        made = {name: self._mixer(name) for name in self.mixers}
        turns = [self.mixers[i % len(self.mixers)] for i in range(self.blocks)]
        return models.language_model(
            vocabulary=vocabulary,
            width=self.width,
            blocks=[layers.Block(made[turn], feed_forward) for turn in turns],
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
        of_state_space = layers.mamba if name == "mamba" else layers.mamba2
        return of_state_space(self.width, expand=self.expand)


@dataclass(frozen=True)
class Denoiser(Section):
    """A diffusion model: a transformer that takes noise out of images, by label.

    It sees images from -1 to 1, whatever data.mean and data.std are.
    """

    name: Literal["denoiser"] = "denoiser"
    """The family of networks."""
    patch: Count = 1
    """Side of the patches that an image is cut into, in pixels; divides height and width."""
    blocks: Count = 4
    """How many."""
    width: Count = 128
    """Features of a patch."""
    hidden: CountOrZero | None = None
    """Width of each block's feed-forward (SwiGLU); 8/3 of width by default, 0 for none."""
    heads: Count = 4
    """Of attention; divides width."""
    norm: Literal["rms", "layer", "dynamic_tanh"] = "rms"
    """Before each mixer and each feed-forward."""
    attention_context: Literal["none", "lagged", "current"] = "none"
    """Whether blocks tell the next which features moved together: a step before, or in this one."""
    context_rate: Annotated[float, Ge(0), Le(1)] = 0.01
    """Weight of what was just seen in an attention context."""
    dropout: Share = 0.0
    """Of each branch, in training."""
    schedule: Literal["cosine", "linear", "karras"] = "cosine"
    """How noise grows with the steps."""
    steps: Annotated[int, Ge(2), Lt(2**31)] = 1000
    """Of the schedule; sampling may take fewer."""
    predicts: Literal["eps", "x0", "v"] = "v"
    """What the network gives: the noise, the image, or alpha noise - sigma image."""
    weighting: Literal["uniform", "min_snr"] = "min_snr"
    """Of steps in the loss; Min-SNR (gamma 5) keeps steps of little noise from ruling it."""
    label_dropout: Share = 0.1
    """Share of examples trained without their label, for guidance."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> models.Denoiser:
        """The network for images [H, W, C]."""
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
    """SwiGLU's usual width, 8/3 of the model's, in whole vectors of 8."""
    return 8 * max(round(width / 3), 1) if hidden is None else hidden
