"""Fields that stacks of blocks have in common."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from fnet import layers
from fnet.layer import Layer
from train.config.network import Network
from train.config.section import Count, CountOrZero, Fraction


@dataclass(frozen=True)
class Transformer(Network):
    """A stack of blocks, each a token mixer and a feed-forward layer."""

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
    context_rate: Annotated[float, Ge(0), Le(1)] = 0.01
    """Update rate of the attention context."""
    dropout: Fraction = 0.0
    """Dropout rate of each residual branch."""

    def feed_forward(self) -> Layer | None:
        """Return the feed-forward layer of a block; its default width is a multiple of 8."""
        hidden = 8 * max(round(self.width / 3), 1) if self.hidden is None else self.hidden
        return layers.feed_forward(self.width, hidden) if hidden else None

    @property
    def stack_options(self) -> dict[str, Any]:
        """Options that fnet's stacks of blocks have in common."""
        context = None if self.attention_context == "none" else self.attention_context
        return {
            "width": self.width,
            "norm": self.norm,
            "context": context,
            "context_rate": self.context_rate,
            "dropout": self.dropout,
        }
