"""Published models as networks of a run: all parameters, or adapters on frozen ones."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import MinLen

from train.config.network import Model
from train.config.section import Count, Needs, Positive

LINEAR = (
    *("blocks/*/kernel", "!*/conv/kernel", "!*/router/kernel"),
    *("!*/input_gate/kernel", "!*/recurrence_gate/kernel"),
)
"""The matrices of the blocks. A causal convolution has a filter per channel, which is none. PEFT
cannot adapt routers and recurrent gates, which transformers does not count as linear."""


@dataclass(frozen=True)
class Published(Model):
    """Options of a published model."""

    is_published: ClassVar[bool] = True
    needs: ClassVar[Needs] = dict.fromkeys(("lora_alpha", "lora_targets"), ("lora_rank", bool))

    name: str = ""
    path: str = "model"
    """Folder of the model: config.json, safetensors files and tokenizer.json."""
    lora_rank: Count | None = None
    """Rank of LoRA adapters, which alone are trained; None trains all parameters."""
    lora_alpha: Positive | None = None
    """Adapters are scaled by lora_alpha / lora_rank; None is lora_rank."""
    lora_targets: Annotated[tuple[str, ...], MinLen(1)] = LINEAR
    """Patterns of the weights with adapters, such as blocks/*/query/kernel; ! leaves out."""
    dora: bool = False
    """Train the magnitude of each output, too (DoRA); needs lora_rank."""
    quantize: Literal["int8", "nf4"] | None = None
    """Store the frozen weights of the blocks in 8 or 4 bits; needs lora_rank."""
    classifier: Literal["keep", "new"] | None = None
    """Classifier of images; None keeps it for as many classes, unless their names differ."""
