"""Families of published models: one row each, in a registry."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.typing import DTypeLike

from fnet.interop.huggingface.checkpoint import Names, PretrainedModel, name_tensors
from fnet.interop.huggingface.options import Options, Source
from fnet.models import LanguageModel
from fnet.models.vit import Interpolation

ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "quickgelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by their names in transformers and timm."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that share a ``model_type``: how ``config.json`` becomes a network, and its names.

    Options that nothing reads are refused, unless they have no effect.

    Attributes:
      model_type: ``model_type`` in ``config.json``.
      architectures: Names of the classes with the head that is supported.
      network: ``(options, names, dtype, **arguments) -> (network, kinds of its blocks)``, such as
        `decoder`.
      arguments: Its arguments. Each is a value, an `Option` of ``config.json``, or a function of
        `Options`.
      names: Names of the tensors, the same for reading and writing; see `table`. ``ROOT`` stands
        for the model type. It may be a function of `Options`.
      prefix: Prefix that checkpoints without a head lack.
      others: Names of tensors of another model in the same checkpoint, such as a text tower.
      ignored: Options without effect on the output, beyond those that every config may have. ``*``
        stands for any text.
      supported: Supported values of other options. The first one is the default.
      interpolation: How learned positions are resized for images of other sizes; None: there are
        no positions of image patches.
      part: Returns the options of the network, where they are a part of ``config.json``.

    Example:
      >>> from fnet.interop.huggingface import FAMILIES
      >>> FAMILIES["mistral"].architectures
      ('MistralForCausalLM',)
    """

    model_type: str
    architectures: tuple[str, ...]
    network: Callable[..., tuple[Any, tuple[Any, ...]]]
    arguments: Mapping[str, Source]
    names: Source
    prefix: str | None = "model."
    others: re.Pattern[str] | None = None
    ignored: tuple[str, ...] = ()
    supported: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    interpolation: Interpolation | None = None
    part: Callable[[Options], Options] = lambda options: options

    def like(self, model_type: str, *architectures: str, **changes: Any) -> "Family":
        """Return a family that differs in some fields or arguments."""
        fields = {f.name for f in dataclasses.fields(self)}
        given = {name: value for name, value in changes.items() if name not in fields}
        return dataclasses.replace(
            self,
            model_type=model_type,
            architectures=architectures,
            **{
                "arguments": {**self.arguments, **given},
                **{name: value for name, value in changes.items() if name in fields},
            },
        )

    def build(
        self, options: Options, dtype: DTypeLike, *, interpolate: bool = False
    ) -> PretrainedModel:
        """Build the network, and name its tensors.

        Raises:
          ValueError: for an option that is missing or not supported.
        """
        if interpolate and self.interpolation is None:
            raise ValueError(
                f"{options.kind}: has no positions of image patches; leave interpolate_positions "
                "out"
            )
        part = self.part(options)
        for name, values in self.supported.items():
            part.require(name, *values)
        part.ignore(*self.ignored)
        arguments = {name: part.value(source) for name, source in self.arguments.items()}
        if interpolate:
            arguments["interpolate"] = self.interpolation
        names: Names = part.value(self.names)
        network, kinds = self.network(part, names, dtype, **arguments)
        part.reject_unread()
        options.reject_unread()
        shapes, _ = jax.eval_shape(network.init, jax.random.key(0))
        tensors = name_tensors(shapes, names, self.model_type)
        of_text = network if isinstance(network, LanguageModel) else None
        return PretrainedModel(
            network.init,
            network.apply,
            network.decode,
            of_text and of_text.losses,
            tensors,
            tuple(kinds),
            of_text and of_text.features,
            self.model_type,
        )


FAMILIES: dict[str, Family] = {}
"""Supported models by ``model_type``."""


def register(*families: Family) -> None:
    """Add families to `FAMILIES`.

    Args:
      families: Rows, such as `Family.like` returns.

    Raises:
      ValueError: if a model type is known already.

    Example:
      >>> from fnet.interop.huggingface import FAMILIES, build_model, register
      >>> register(FAMILIES["llama"].like("my_llama", residual_scale=0.5))
      >>> sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16}
      >>> sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
      >>> model = build_model({"model_type": "my_llama"} | sizes)
      >>> model.tensors[-1].name
      'model.norm.weight'
      >>> del FAMILIES["my_llama"]
    """
    for family in families:
        if family.model_type in FAMILIES:
            raise ValueError(f"register: the model_type {family.model_type!r} is registered twice")
        FAMILIES[family.model_type] = family


def activation(name: str, default: str) -> Source:
    """An option with the name of an activation in transformers or timm, as fnet's name."""
    return lambda options: ACTIVATIONS[options.require(name, default, *ACTIVATIONS)]
