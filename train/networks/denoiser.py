"""Class-conditional diffusion models."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from fnet import layers, models
from train.config.section import Count, Fraction
from train.networks.transformer import Transformer


@dataclass(frozen=True)
class Denoiser(Transformer):
    """Class-conditional diffusion model: a transformer on image patches.

    Images are scaled to -1 to 1; data.mean and data.std are not used.
    """

    task: ClassVar[str] = "diffusion"

    name: Literal["denoiser"] = "denoiser"
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

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> models.Denoiser:
        """Build the network for images [H, W, C]."""
        attention = layers.attention(self.width, self.heads, bias=False)
        return models.denoiser(
            image_shape=image_shape,
            blocks=[layers.Block(attention, self.feed_forward())] * self.blocks,
            num_classes=num_classes,
            patch=self.patch,
            **self.stack_options,
        )
