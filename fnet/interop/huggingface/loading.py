"""Load published models: from a ``config.json`` and tensors, and back."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding
from jax.typing import DTypeLike

from fnet.interop.huggingface import checkpoint, gemma4, hybrid, vision  # noqa: F401  (rows)
from fnet.interop.huggingface.options import Options
from fnet.interop.huggingface.timm import family_of
from fnet.layer import Params


def build_model(
    config: Mapping[str, Any],
    *,
    dtype: DTypeLike = jnp.float32,
    names: Iterable[str] | None = None,
    interpolate_positions: bool = False,
) -> checkpoint.PretrainedModel:
    """Build the network of a ``config.json``, without weights.

    Args:
      config: ``config.json`` as a dict.
      dtype: dtype of activations.
      names: names of the checkpoint's tensors. They decide whether an image network has a head.
        None: the architecture in the config decides.
      interpolate_positions: as for `from_huggingface`.

    Returns:
      A model. Its ``init`` makes float32 parameters; `from_huggingface` reads the file's.

    Raises:
      ValueError: for an unknown model type, class or option, with its name.

    Example:
      >>> import fnet, jax
      >>> from fnet.interop.huggingface import build_model
      >>> config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024}
      >>> config |= {"n_embd": 768, "n_layer": 12, "n_head": 12}
      >>> params, _ = jax.eval_shape(build_model(config).init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      124439808
    """
    family = family_of(config)
    kind = str(config.get("model_type") or config.get("architecture"))
    for architecture in config.get("architectures") or ():
        if architecture not in family.architectures:
            raise ValueError(
                f"{kind}: architecture {architecture!r} is not supported, only "
                f"{', '.join(family.architectures)}"
            )
    return family.build(Options(config, kind, names), dtype, interpolate=interpolate_positions)


def from_huggingface(
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    dtype: DTypeLike | None = None,
    sharding: Callable[[str, tuple[int, ...]], Sharding] | None = None,
    interpolate_positions: bool = False,
    convert: Callable[[str, Array], Any] | None = None,
) -> tuple[checkpoint.PretrainedModel, Params]:
    """Load a published model, exactly.

    `FAMILIES` has the supported families, and `register` adds more. Outputs equal transformers' and
    timm's up to rounding. An option that is not supported raises an error; nothing is approximated.

    Parameters keep the dtypes of the tensors. Dense kernels are [in, out]. Tensors are read one at
    a time, so a lazy mapping needs host memory for one tensor. With ``sharding``, each process
    reads only the slices of its devices.

    Args:
      config: ``config.json`` as a dict.
      tensors: ``{name: array}`` as in the safetensors files. In place of arrays it may hold objects
        with ``shape`` and ``dtype`` that return arrays for ``tensor[slices]``.
      dtype: dtype of activations. None: the largest tensor's dtype.
      sharding: ``(path, shape) -> sharding`` of each parameter, with paths such as
        ``"blocks/0/mixer/query/kernel"``. None: the default device.
      interpolate_positions: whether an image network takes images of other sizes, with learned
        positions interpolated as in its library.
      convert: ``(path, array) -> leaf``, applied to each parameter right after reading, for
        example a cast. None: parameters stay as they are.

    Returns:
      ``(model, params)``. ``model.apply(params, {}, x, train=False) -> (y, state)``. For language
      models, ``x`` are tokens [B, T] and ``y`` logits [B, T, V]. They also have ``losses`` and
      ``decode``, as `fnet.models.LanguageModel`. For image networks, ``x`` are normalized images
      [B, H, W, C]. ``y`` are logits [B, classes], or features [B, D] if the file has no classifier:
      transformers' ``image_embeds`` or else ``pooler_output``, or the normalized class token.

    Raises:
      ValueError: for an unknown model type, class or option; for tensors that are missing,
        unknown, or of another shape; if a model without positions is to interpolate them.
      TypeError: for tensors that are not floating.

    Example:
      >>> import fnet, jax, numpy as np
      >>> from fnet.interop.huggingface import build_model
      >>> config = {"model_type": "gpt2", "vocab_size": 11, "n_positions": 16}
      >>> config |= {"n_embd": 8, "n_layer": 1, "n_head": 2}
      >>> model = build_model(config)
      >>> params, _ = model.init(jax.random.key(0))
      >>> tensors = fnet.interop.to_huggingface(model, params)
      >>> model, params = fnet.interop.from_huggingface(config, tensors)
      >>> model.apply(params, {}, np.array([[1, 2, 3]]), train=False)[0].shape
      (1, 3, 11)
    """
    model, _ = match_tensors(
        config, tensors, dtype=dtype, interpolate_positions=interpolate_positions
    )
    return model, checkpoint.read_params(model, tensors, sharding, convert)


def match_tensors(
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    dtype: DTypeLike | None = None,
    interpolate_positions: bool = False,
) -> tuple[checkpoint.PretrainedModel, Params]:
    """Build a model and compare its tensors with a checkpoint's, without reading them.

    The arguments are those of `from_huggingface`. Returns the model, and a `jax.ShapeDtypeStruct`
    for each parameter with the dtype of the file.
    """
    named = {**config, **(config.get("text_config") or {})}
    for name in named.keys() & {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"}:
        # Each layer has a tensor. Building layers that are not there takes long.
        if isinstance(layers := named[name], int) and layers > len(tensors):
            raise ValueError(f"{name}: {layers:,}, but the checkpoint has {len(tensors):,} tensors")
    if dtype is None:
        largest = max(tensors.values(), key=lambda t: np.prod(t.shape), default=None)
        dtype = jnp.float32 if largest is None else np.dtype(largest.dtype)
    model = build_model(
        config, dtype=dtype, names=tensors, interpolate_positions=interpolate_positions
    )
    family = family_of(config)
    model = model._replace(
        tensors=checkpoint.match_names(model.tensors, list(tensors), family.prefix, family.others)
    )
    return model, checkpoint.file_shapes(model, tensors)


def to_huggingface(model: checkpoint.PretrainedModel, params: Params) -> dict[str, np.ndarray]:
    """Convert parameters to the tensors of a checkpoint, the inverse of `from_huggingface`.

    Args:
      model: a model of `from_huggingface`.
      params: its parameters.

    Returns:
      ``{name: array}`` in the names, layouts and dtypes of the file.

    Example:
      >>> import fnet, jax
      >>> from fnet.interop.huggingface import build_model
      >>> config = {"model_type": "gpt2", "vocab_size": 11, "n_positions": 16}
      >>> model = build_model(config | {"n_embd": 8, "n_layer": 1, "n_head": 2})
      >>> params, _ = model.init(jax.random.key(0))
      >>> tensors = fnet.interop.to_huggingface(model, params)
      >>> tensors["transformer.wpe.weight"].shape
      (16, 8)
    """
    arrays: dict[str, np.ndarray] = {}
    path, whole = "", np.zeros(0)
    for t in model.tensors:
        if t.path != path:  # The rows of a parameter follow each other.
            path, whole = t.path, np.asarray(checkpoint.leaf(params, t.path))
        arrays[t.name] = np.ascontiguousarray(t.to_file(whole))
    return arrays
