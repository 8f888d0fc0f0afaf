"""Stacks of blocks: language models and denoisers."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Lt, MinLen
from typing_extensions import override

import fnet
from train.config.network import Name, Network
from train.config.section import Count, CountOrZero, Fraction, Needs, Positive, Share

Mixer = Literal["attention", "mamba", "mamba2", "rg_lru"]


@dataclass(frozen=True)
class Transformer(Network):
    """A stack of blocks, each a token mixer and a feed-forward layer."""

    needs: ClassVar[Needs] = {"context_rate": ("attention_context", "none".__ne__)}

    blocks: Count = 4
    """Number of blocks."""
    width: Count = 128
    """Model width: features per token or patch."""
    hidden: CountOrZero | None = None
    """Width of the feed-forward layers (SwiGLU); None is 8/3 of width, 0 is no feed-forward."""
    heads: Count = 4
    """Number of heads of attention and rg_lru; must divide width."""
    norm: Literal["rms", "layer", "dynamic_tanh"] = "rms"
    """Norm before each mixer, each feed-forward and the head."""
    attention_context: Literal["none", "lagged", "current"] = "none"
    """Attention context between blocks: none, from the previous step, or from this one."""
    context_rate: Share = 0.01
    """Update rate of the attention context."""
    dropout: Fraction = 0.0
    """Dropout rate of each residual branch."""

    def feed_forward(self) -> "fnet.Layer | None":
        """Return the feed-forward layer of a block; its default width is a multiple of 8."""
        hidden = 8 * max(round(self.width / 3), 1) if self.hidden is None else self.hidden
        return fnet.layers.feed_forward(self.width, hidden) if hidden else None

    @property
    def stack_options(self) -> dict[str, Any]:
        """Options that fnet's stacks of blocks have in common."""
        context = None if self.attention_context == "none" else self.attention_context
        names = ("width", "norm", "context_rate", "dropout")
        return {name: getattr(self, name) for name in names} | {"context": context}


@dataclass(frozen=True)
class LanguageModel(Transformer):
    """Language model: a transformer, a state-space model, or a hybrid of both."""

    task: ClassVar[str] = "language"
    needs: ClassVar[Needs] = Transformer.needs | {
        **dict.fromkeys(("groups", "window"), ("mixers", lambda names: "attention" in names)),
        "expand": ("mixers", lambda names: {*names} != {"attention"}),
    }

    name: Name[Literal["language_model"]] = "language_model"
    mixers: Annotated[tuple[Mixer, ...], MinLen(1)] = ("attention",)
    """Token mixer of each block, repeated cyclically from the first block to the last."""
    groups: Count | None = None
    """Number of key-value heads (grouped-query attention); None is one per head."""
    window: Count | None = None
    """Sliding-window size of attention, in tokens; None attends to all previous tokens."""
    expand: Positive = 2.0
    """Inner width of mamba, mamba2 and rg_lru, as a multiple of width."""

    @override
    def for_text(self, vocabulary: int, precision: str) -> "fnet.models.LanguageModel":
        mixers = {name: self._mixer(name) for name in self.mixers}
        names = [self.mixers[i % len(self.mixers)] for i in range(self.blocks)]
        feed_forward = self.feed_forward()
        return fnet.models.language_model(
            vocabulary=vocabulary,
            blocks=[fnet.layers.Block(mixers[name], feed_forward) for name in names],
            dtype=precision,
            **self.stack_options,
        )

    @override
    def for_sampling(self, context: int) -> Self:
        # It has seen no position beyond the context.
        return dataclasses.replace(self, window=min(self.window or context, context))

    def _mixer(self, name: str) -> "fnet.Layer":
        if name == "attention":
            return fnet.layers.attention(
                self.width,
                self.heads,
                groups=self.groups,
                causal=True,
                window=self.window,
                rotary=10_000.0,
                bias=False,
            )
        if name == "rg_lru":
            return fnet.layers.rg_lru(self.width, expand=self.expand, heads=self.heads)
        state_space = fnet.layers.mamba if name == "mamba" else fnet.layers.mamba2
        return state_space(self.width, expand=self.expand)


@dataclass(frozen=True)
class Denoiser(Transformer):
    """Class-conditional diffusion model: a transformer on image patches.

    Images are scaled to -1 to 1; data.mean and data.std are not used.
    """

    task: ClassVar[str] = "diffusion"

    name: Name[Literal["denoiser"]] = "denoiser"
    patch: Count = 1
    """Patch size in pixels; must divide height and width."""
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

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> "fnet.models.Denoiser":
        """Build the network for images [H, W, C]."""
        attention = fnet.layers.attention(self.width, self.heads, bias=False)
        return fnet.models.denoiser(
            image_shape=image_shape,
            blocks=[fnet.layers.Block(attention, self.feed_forward())] * self.blocks,
            num_classes=num_classes,
            patch=self.patch,
            **self.stack_options,
        )
