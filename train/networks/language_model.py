"""Language models of attention, state spaces and recurrences."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from annotated_types import MinLen
from typing_extensions import override

from fnet import layers, models
from fnet.layer import Layer
from train.config.section import Count, Positive
from train.networks.transformer import Transformer

Mixer = Literal["attention", "mamba", "mamba2", "rg_lru"]


@dataclass(frozen=True)
class LanguageModel(Transformer):
    """Language model: a transformer, a state-space model, or a hybrid of both."""

    task: ClassVar[str] = "language"

    name: Literal["language_model"] = "language_model"
    mixers: Annotated[tuple[Mixer, ...], MinLen(1)] = ("attention",)
    """Token mixer of each block, repeated cyclically from the first block to the last."""
    groups: Count | None = None
    """Number of key-value heads (grouped-query attention); None is one per head."""
    window: Count | None = None
    """Sliding-window size of attention, in tokens; None attends to all previous tokens."""
    expand: Positive = 2.0
    """Inner width of mamba, mamba2 and rg_lru, as a multiple of width."""

    @override
    def for_text(self, vocabulary: int, precision: str) -> models.LanguageModel:
        mixers = {name: self._mixer(name) for name in self.mixers}
        names = [self.mixers[i % len(self.mixers)] for i in range(self.blocks)]
        feed_forward = self.feed_forward()
        return models.language_model(
            vocabulary=vocabulary,
            blocks=[layers.Block(mixers[name], feed_forward) for name in names],
            dtype=precision,
            **self.stack_options,
        )

    @override
    def for_sampling(self, context: int) -> Self:
        # It has seen no position beyond the context.
        return dataclasses.replace(self, window=min(self.window or context, context))

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
