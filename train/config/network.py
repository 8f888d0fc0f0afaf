"""Networks: what a task, an export and a report ask of one."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Self, TypeVar

import tyro
from typing_extensions import override

from train.config.data import Data
from train.config.registry import Variant

T = TypeVar("T")
_HELP = "Network; --model.name NAME --help lists the fields of another one."
Name = Annotated[T, tyro.conf.arg(help=_HELP)]
"""Type of the field that names a network, a literal."""


class _Options:
    name: str
    pretrained: str | None = None


@dataclass(frozen=True)
class Model(_Options, Variant, section="model", tag="name", package="train.networks"):
    """The section ``model`` of a config: a `Network`, or a published model.

    Attributes:
      task: Name of the task in `train.tasks.KINDS` that trains the network.
      is_published: Whether it is a published model, whose files have its weights.
    """

    task: ClassVar[str] = "classification"
    is_published: ClassVar[bool] = False

    def task_for(self, data: Data) -> str:
        """Return the name of the task that trains the network on these data."""
        return self.task

    def for_images(
        self, image_shape: tuple[int, ...], classes: Sequence[str], precision: str
    ) -> Any:
        """Build the network for images [H, W, C] of these classes, with a dtype of activations.

        Raises:
          UserError: if files of a published model are missing or damaged.
          ValueError: if the network is invalid.
        """
        raise NotImplementedError

    def for_text(self, vocabulary: int, precision: str) -> Any:
        """Build the network for tokens, with a dtype of activations."""
        raise NotImplementedError

    def for_sampling(self, context: int) -> Self:
        """Return the section of a network that generates text, trained on rows of this length."""
        return self

    def complete(self, data: Data) -> Data:
        """Return the data with what they take from the network, such as its tokenizer."""
        return data

    def notes(self, data: Data, classes: Sequence[str]) -> list[str]:
        """Tell the user where data or classes differ from those that the network is made for."""
        return []

    @property
    def options(self) -> dict[str, Any]:
        """Fields that are options of the function that builds the network."""
        other = ("name", "pretrained")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in other}


@dataclass(frozen=True)
class Network(Model):
    """A network of fnet's layers, which can start from trained weights.

    A subclass is a frozen dataclass with a field ``name``, the network's name, and its options. It
    must define `build`.
    """

    name: str = ""
    pretrained: str | None = None
    """Weights to start from: a run, a folder of timm, or FILE or FILE#ENTRY; None is random."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Any:
        """Build the network for images [H, W, C]."""
        raise NotImplementedError

    @override
    def for_images(
        self, image_shape: tuple[int, ...], classes: Sequence[str], precision: str
    ) -> Any:
        return self.build(image_shape, len(classes))
