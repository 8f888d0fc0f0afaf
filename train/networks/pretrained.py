"""Published models as the section ``model`` of a config."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from train.config.data import Data
from train.config.network import Name
from train.data.columns import order_of
from train.data.model_folder import check_tokenizer, read_config
from train.data.photos import Photos
from train.data.text import Text
from train.errors import UserError
from train.networks.model_images import class_names, own_options
from train.networks.published import Published

if TYPE_CHECKING:
    from train.networks.published.network import PretrainedNetwork


@dataclass(frozen=True)
class Pretrained(Published):
    """Published language model of Hugging Face, to train as a whole or with LoRA adapters."""

    name: Name[Literal["pretrained"]] = "pretrained"

    @override
    def task_for(self, data: Data) -> str:
        if data.content == "preferences":
            return "reward" if data.objective == "reward" else "preference"
        if not isinstance(data, Text):
            return self.task
        return "language" if data.label is None else "text_classification"

    @override
    def for_images(
        self, image_shape: tuple[int, ...], classes: Sequence[str], precision: str
    ) -> "PretrainedNetwork":
        from train.networks.published.network import build_image_network  # imports JAX

        return build_image_network(self, classes, image_shape, precision)

    @override
    def for_text(self, vocabulary: int, precision: str) -> "PretrainedNetwork":
        from train.networks.published.network import build_network  # imports JAX

        network = build_network(self, precision)
        if vocabulary > network.vocabulary:
            raise UserError(
                f"data.vocabulary: {vocabulary:,}, but the model has {network.vocabulary:,} "
                "tokens; leave it out"
            )
        return network

    def complete(self, data: Data) -> Data:
        """Return text with the tokenizer and the vocabulary of the model, unless it has its own."""
        if not isinstance(data, Text):
            return data
        vocabulary = data.vocabulary
        if vocabulary is None and (Path(self.path) / "config.json").is_file():
            config = read_config(Path(self.path))
            part = config.get("text_config", {})  # of a model that also sees images
            vocabulary = config.get("vocab_size", part.get("vocab_size"))
        tokenizer = Path(self.path) / "tokenizer.json"
        if data.tokenizer is None and tokenizer.is_file():
            data = data.replace(tokenizer=str(tokenizer))
        elif data.tokenizer is None and data.vocabulary is None:
            check_tokenizer(Path(self.path))
        return data.replace(vocabulary=vocabulary)

    def notes(self, data: Data, classes: Sequence[str]) -> list[str]:
        """Tell the user if images are prepared otherwise than the model's, or outputs no names."""
        if not isinstance(data, Photos):
            return []
        path, notes = Path(self.path), []
        for name, own in own_options(path).items():
            if (given := getattr(data, name)) != own:
                values = " ".join(map(str, own if isinstance(own, tuple) else [own]))
                notes.append(
                    f"data.{name}: {given}, but {path} was trained with {own}; "
                    f"give --data.{name.replace('_', '-')} {values} to train as it was"
                )
        own_classes = class_names(read_config(path))
        is_kept = len(own_classes) == len(classes) and self.classifier != "new"
        order, is_said = order_of(classes, own_classes)
        if is_kept and not is_said:
            first, second = ("0", "1") if order else classes[:2]
            notes.append(
                f"model.classifier: keeps the classifier of {path}, whose outputs are not named as "
                f"your classes are: output 0 is taken for {first}, 1 for {second}, and so "
                "on; give --model.classifier new for a new one"
            )
        if len(own_classes) != len(classes) and own_classes and classes and self.classifier is None:
            notes.append(
                f"model.classifier: new, because {path} has one of {len(own_classes):,} classes, "
                f"not of {len(classes):,}"
            )
        return notes
