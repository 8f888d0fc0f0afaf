"""Builds the networks of published models."""

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet import layers, lora, quantization
from fnet.interop.huggingface.checkpoint import PretrainedModel, read_params
from fnet.interop.huggingface.loading import match_tensors
from fnet.interop.huggingface.timm import family_of
from fnet.interop.peft import REFUSED, huggingface_modules
from train.data.columns import is_named, order_of
from train.data.model_folder import ModelFolder, read_config, read_folder
from train.errors import UserError, shorten
from train.networks.model_images import class_names
from train.networks.published import LINEAR, Published

FROZEN = "frozen"
"""Name of the frozen parameters in the model state."""


def _no_losses(*args: Any, **options: Any) -> tuple[Array, Any]:
    raise TypeError("the network has no losses of tokens")


class PretrainedNetwork(NamedTuple):
    """A published model as the network of a run.

    Attributes:
      init: ``key -> (params, model state)`` with zeros in place of pretrained values.
      apply, losses, features: as of `fnet.models.LanguageModel`; images only have apply.
      decode: incremental decoding, with parameters of `merge`.
      read: ``shapes -> arrays`` of the pretrained parameters, with the shapes' shardings.
      place: ``(key, arrays) -> (params, model state)`` with the arrays of ``read``.
      is_frozen: whether adapters are trained, and the pretrained parameters are in the model state.
      vocabulary: number of tokens; 0 for images.
      base: the published model.
      new: name of parameters that the published model lacks, such as a new classifier, or "".
      errors: returns the relative error by path of each quantized weight that was read.
    """

    init: Callable[[Array], tuple[Any, Any]]
    apply: Callable[..., tuple[Array, Any]]
    read: Callable[[Any], Any]
    place: Callable[[Array, Any], tuple[Any, Any]]
    base: PretrainedModel
    decode: Any = None
    losses: Callable[..., tuple[Array, Any]] = _no_losses
    is_frozen: bool = False
    vocabulary: int = 0
    new: str = ""
    errors: Callable[[], Mapping[str, float]] = dict
    features: Callable[..., tuple[Array, Any]] | None = None

    def pretrained(self, params: Any, model_state: Any) -> Any:
        """Return the part of params and model state that ``read`` reads."""
        if self.is_frozen:
            return model_state[FROZEN]
        return {name: p for name, p in params.items() if name != self.new} if self.new else params


def build_network(section: Published, precision: str) -> PretrainedNetwork:
    """Build the network from config.json and the headers of the weights."""
    if section.lora_rank is None and (section.dora or section.quantize):
        option = "dora" if section.dora else "quantize"
        raise UserError(f"model.{option}: needs model.lora_rank, the rank of the adapters")
    folder = read_folder(Path(section.path))
    model, shapes = match(folder, precision)
    if model.losses is None:
        raise UserError(
            f"model.path: {folder.path} is not a language model; for images, give the recipe "
            "vit_finetune"
        )
    errors: dict[str, float] = {}
    quantize = _quantize(section, shapes)

    def convert(path: str, a: Array) -> Any:
        weight = quantize(path, a)
        if quantization.is_quantized(weight):
            errors[path] = quantization.report({"w": a}, {"w": weight}).total.error
        return weight

    def zeros() -> Any:
        # Small updates would be lost in 16 bits.
        dtype = jnp.float32 if section.lora_rank is None else None
        params = jax.tree.map(lambda a: jnp.zeros(a.shape, dtype or a.dtype), shapes)
        return quantization.map_with_paths(quantize, params)

    adapters = adapters_of(section)
    apply, losses, features = model.apply, model.losses, model.features
    assert features is not None  # because it is a language model
    if adapters is not None:
        apply, losses, features = (_adapted(f, adapters) for f in (apply, losses, features))

    def place(key: Array, params: Any) -> tuple[Any, Any]:
        if adapters is None:
            return params, {}
        return lora.init(adapters, params, key), {FROZEN: params}

    return PretrainedNetwork(
        init=lambda key: place(key, zeros()),
        apply=apply,
        decode=model.decode,
        losses=losses,
        read=_read(folder, model, convert),
        place=place,
        is_frozen=adapters is not None,
        vocabulary=shapes["embedding"]["embedding"].shape[0],
        base=model,
        errors=lambda: errors,
        features=features,
    )


def weights_code(folder: Path) -> str:
    """Return a code of published weights, from 64 places of each file."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            found.update(f"{path.name} {size} ".encode())
            for i in range(64):
                file.seek(max(size - 4096, 0) * i // 63)
                found.update(file.read(4096))
    return found.hexdigest()[:16]


def with_head(network: PretrainedNetwork, outputs: int) -> PretrainedNetwork:
    """Return a language model with a new dense layer on the features of each row's last token.

    Its ``apply(params, state, tokens, *, key=None, train, lengths)`` returns [B, outputs]. It has
    no losses of tokens, and generates no text.
    """
    features = network.features
    assert features is not None  # because it is a language model
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    params, state = jax.eval_shape(network.init, jax.random.key(0))
    x, _ = jax.eval_shape(lambda p, s, t: features(p, s, t, train=False), params, state, tokens)
    init = jax.nn.initializers.normal(0.02)
    head = layers.dense(x.shape[-1], outputs, bias=False, kernel_init=init)

    def with_new(key: Array, params: Any, state: Any) -> tuple[Any, Any]:
        return params | {CLASSIFIER: head.init(jax.random.fold_in(key, 1))[0]}, state

    def apply(
        params: Any, state: Any, tokens: Array, *, lengths: Array, **options: Any
    ) -> tuple[Array, Any]:
        own = {name: p for name, p in params.items() if name != CLASSIFIER}
        x, state = features(own, state, tokens, lengths=lengths, **options)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        with jax.named_scope(CLASSIFIER):
            y, _ = head.apply(params[CLASSIFIER], {}, last, train=options["train"])
        return y, state

    return network._replace(
        init=lambda key: with_new(key, *network.init(key)),
        apply=apply,
        decode=None,
        losses=_no_losses,
        place=lambda key, arrays: with_new(key, *network.place(key, arrays)),
        new=CLASSIFIER,
    )


CLASSIFIER = "classifier"
"""Name of a new classifier. The learning rate of classifiers can differ."""


def build_image_network(
    section: Published, classes: Sequence[str], image_shape: tuple[int, ...], precision: str
) -> PretrainedNetwork:
    """Build an image classifier from config.json and the headers of the weights.

    A model with a classifier for these classes keeps it, with outputs in the order of the classes.
    Otherwise a new one reads the features of the model. Learned positions are interpolated if the
    images have another size.
    """
    if section.lora_rank is not None:
        raise UserError("model.lora_rank: adapters are for language models; omit it for images")
    folder = read_folder(Path(section.path))
    image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    model, shapes, size = _match_images(folder, precision, image)
    head = {t.name for t in model.tensors if t.path.startswith("head/")}
    classifier, order = None, None
    if head and size == len(classes) and section.classifier != "new":
        order = _output_order(section, class_names(folder.config), classes)
    else:
        if section.classifier == "keep":
            theirs = f"a classifier of {size} classes" if head else "no classifier"
            raise UserError(
                f"model.classifier: keep, but {section.path} has {theirs}, and the data have "
                f"{len(classes)}; leave it out to train a new one"
            )
        if head:
            tensors = {name: t for name, t in folder.tensors.items() if name not in head}
            folder = folder._replace(config=without_classes(folder.config), tensors=tensors)
            model, shapes, size = _match_images(folder, precision, image)
        classifier = layers.dense(size, len(classes))

    def reorder(path: str, a: Array) -> Array:
        return a if order is None or not path.startswith("head/") else a[..., np.array(order)]

    def place(key: Array, params: Any) -> tuple[Any, Any]:
        if classifier is not None:
            params = params | {CLASSIFIER: classifier.init(key)[0]}
        return params, {}

    def apply(params: Any, state: Any, x: Array, **options: Any) -> tuple[Array, Any]:
        y, _ = model.apply(params, {}, x, **options)
        if classifier is not None:
            with jax.named_scope(CLASSIFIER):
                y, _ = classifier.apply(params[CLASSIFIER], {}, y, train=options["train"])
        return y, state

    return PretrainedNetwork(
        init=lambda key: place(
            key, jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), shapes)
        ),
        apply=apply,
        read=_read(folder, model, reorder),
        place=place,
        base=model,
        new=CLASSIFIER if classifier is not None else "",
    )


def _output_order(
    section: Published, names: Sequence[str], classes: Sequence[str]
) -> list[int] | None:
    """Return the output of a published classifier for each class; None keeps their order."""
    order, _ = order_of(classes, names)
    if order is None and is_named(names) and section.classifier is None:
        raise UserError(
            f"model.classifier: {section.path} has a classifier of {shorten(names)}, not of "
            f"{shorten(classes)}; give --model.classifier new to train a new one, or keep if these "
            "are other names of the same outputs in this order"
        )
    return order


def _match_images(
    folder: ModelFolder, precision: str, image: jax.ShapeDtypeStruct
) -> tuple[PretrainedModel, Any, int]:
    """Build an image network, the shapes of its parameters, and the size of its output."""
    model, shapes = match(folder, precision)
    try:
        if model.losses is not None:
            raise ValueError("is a language model, but the data are images")
        out, _ = jax.eval_shape(lambda p, x: model.apply(p, {}, x, train=False), shapes, image)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"model.path: {folder.path}: {error}") from error
    return model, shapes, out.shape[-1]


def without_classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a network without its classifier.

    The tensors decide about the classifier in the files of transformers, the config in timm's.
    """
    if "architecture" not in config:
        return dict(config)
    args = {n: v for n, v in config.get("model_args", {}).items() if n != "num_classes"}
    rest = {n: v for n, v in config.items() if n != "model_args"}
    return rest | ({"model_args": args} if args else {}) | {"num_classes": 0}


def _read(
    folder: ModelFolder, model: PretrainedModel, convert: Callable[[str, Array], Any]
) -> Callable[[Any], Any]:
    """Return a function that reads parameters with the shardings and dtypes of its argument."""

    def read(targets: Any) -> Any:
        by_path = dict(quantization.leaves_with_paths(targets))
        # The codes of a quantized parameter have its axes.
        shardings = {
            path: (leaf.codes if quantization.is_quantized(leaf) else leaf).sharding
            for path, leaf in by_path.items()
        }
        is_placed = None not in shardings.values()

        def checked(path: str, a: Array) -> Any:
            if jnp.issubdtype(a.dtype, jnp.floating) and (bad := int(_count_nonfinite(a))):
                raise ValueError(f"{path} has {bad:,} values that are NaN or infinite")
            return convert(path, a.astype(by_path[path].dtype))

        try:
            return read_params(
                model,
                folder.tensors,
                (lambda path, shape: shardings[path]) if is_placed else None,
                checked,
            )
        except (OSError, ValueError) as error:
            raise UserError(f"model.path: {folder.path}: {error}") from error

    return read


_count_nonfinite = jax.jit(lambda a: jnp.sum(~jnp.isfinite(a)))


def match(folder: ModelFolder, precision: str) -> tuple[PretrainedModel, Any]:
    """Build the model of a folder, and the shapes of its parameters.

    Learned positions of images are interpolated if images have another size.
    """
    try:
        return match_tensors(
            folder.config,
            folder.tensors,
            dtype=jnp.dtype(precision),
            interpolate_positions=family_of(folder.config).interpolation is not None,
        )
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"model.path: {folder.path}: {error}") from error


def adapters_of(section: Published) -> lora.LoRA | None:
    """Return the config of the adapters, or None if all parameters are trained."""
    if section.lora_rank is None:
        return None
    targets = section.lora_targets
    if targets == LINEAR:
        refused = REFUSED.get(str(read_config(Path(section.path)).get("model_type")), ())
        names = (n.removesuffix("_proj") for n in refused if n.endswith("_proj"))
        targets = (*targets, *map("!*/{}/kernel".format, names))
    return lora.LoRA(section.lora_rank, section.lora_alpha, targets, dora=section.dora)


def without_module(network: PretrainedNetwork, adapters: Iterable[str]) -> list[str]:
    """Return the adapted weights that PEFT has no module for."""
    return sorted({*adapters} - {m.path for m in huggingface_modules(network.base).values()})


def merge(section: Published, params: Any, model_state: Any) -> Any:
    """Return the parameters of the published model: trained, or frozen ones with adapters.

    Frozen parameters are donated, and a new head is left out.
    """
    adapters = adapters_of(section)
    params = {name: p for name, p in params.items() if name != CLASSIFIER}
    if adapters is None:
        return params

    def merged(frozen: Any) -> Any:
        return quantization.dequantize(lora.merge(adapters, frozen, params))

    donated = () if section.quantize else (0,)  # codes are no buffers for weights
    return jax.jit(merged, donate_argnums=donated)(model_state[FROZEN])


def _adapted(
    f: Callable[..., tuple[Array, Any]], adapters: lora.LoRA
) -> Callable[..., tuple[Array, Any]]:
    """Turn ``f(params, {}, *args)`` into ``f(adapters, {"frozen": params}, *args)``."""

    def call(params: Any, state: Any, *args: Any, **options: Any) -> tuple[Array, Any]:
        wrapped = lora.wrap(lambda full: f(full, {}, *args, **options)[0], adapters)
        return wrapped(params, state[FROZEN]), state

    return call


def _quantize(section: Published, shapes: Any) -> Callable[[str, Array], Any]:
    kind = section.quantize
    if kind is None:
        return lambda path, a: a
    targets = quantization.find_targets("model.quantize", shapes, LINEAR)
    quantize = jax.jit(lambda a: quantization.quantize({"w": a}, kind, ("w",))["w"])
    return lambda path, a: quantize(a) if path in targets else a
