"""RegNet."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fnet.models.regnet import VARIANTS
from train.config.section import Choice
from train.networks.convolutional import Convolutional


@dataclass(frozen=True)
class RegNet(Convolutional):
    """RegNetX or RegNetY (Radosavovic et al. 2020)."""

    name: Literal["regnet"] = "regnet"
    """Network; --model.name NAME --help lists the fields of another one."""
    variant: Annotated[str, Choice(lambda: VARIANTS)] = "regnet_y_400mf"
    """Name in torchvision or timm, such as regnet_x_1_6gf or regnety_040."""
