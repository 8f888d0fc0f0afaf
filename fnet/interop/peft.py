"""Adapter files of PEFT (LoRA, rsLoRA and DoRA), in and out. Pure functions of dicts."""

import glob
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fnet.interop.huggingface.checkpoint import regrouped
from fnet.lora import Adapters, LoRA

_PREFIX = "base_model.model."

_TENSORS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}

# Those of the first line are read. The others do not change what the adapters compute.
_KNOWN = frozenset(
    (  # noqa: SIM905
        "peft_type r lora_alpha use_dora use_rslora "
        "auto_mapping base_model_name_or_path exclude_modules fan_in_fan_out inference_mode "
        "init_lora_weights layers_pattern layers_to_transform lora_dropout megatron_core "
        "peft_version qalora_group_size revision runtime_config target_modules task_type"
    ).split()
)

REFUSED = {
    **dict.fromkeys(("mamba", "falcon_mamba"), ("out_proj", "dt_proj")),
    **dict.fromkeys(("mamba2", "falcon_h1"), ("out_proj",)),
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "lfm2_moe"), ("gate",)),
    "gpt_oss": ("router",),
}
"""Modules by family that PEFT refuses, or whose weight transformers reads past an adapter."""

_OWN_INITIAL_WEIGHTS = (True, False, "gaussian", "eva")


class Module(NamedTuple):
    """Place of a module's weight in a tree of parameters.

    Attributes:
      path: Path of the weight, keys joined by "/".
      transposed: Whether the weight is [out, in], as in torch and Equinox.
      layer: Number of the layer, if the weight stacks the layers of several modules.
      grouped: ``(n, m)``, if outputs of the module are n groups of m parts, and of the weight m
        groups of n parts, such as query, key and value of each head in GPT-NeoX.
    """

    path: str
    transposed: bool = False
    layer: int | None = None
    grouped: tuple[int, int] | None = None


Modules = Mapping[str, Sequence[Any]]
"""Name of a module in the checkpoint -> `Module`, or a tuple of its fields."""


def from_peft(
    config: Mapping[str, Any], tensors: Mapping[str, Any], modules: Modules
) -> tuple[LoRA, dict[str, dict[str, Any]]]:
    """Convert a PEFT adapter.

    The adapters compute what PEFT computes in evaluation mode. Dropout is not an option of
    `fnet.lora`, so ``lora_dropout`` is ignored.

    Args:
      config: ``adapter_config.json`` as a dict.
      tensors: ``adapter_model.safetensors``: name -> array, as in
        ``"base_model.model.layers.0.q_proj.lora_A.weight"`` [rank, in].
      modules: Name of each adapted module -> `Module` or ``(path, transposed)``. Modules without
        an adapter are ignored.

    Returns:
      ``(config, adapters)`` for `fnet.lora`, float32. The targets of the configuration are the
      adapted paths.

    Raises:
      ValueError: If an option of the configuration is not supported; it is named. If a tensor
        is unknown, missing or of another rank, or not every layer of a stack has an adapter.

    Example:
      >>> import numpy as np
      >>> from fnet.interop.peft import from_peft
      >>> tensors = {
      ...     "base_model.model.head.lora_A.weight": np.ones((2, 6), np.float32),
      ...     "base_model.model.head.lora_B.weight": np.ones((3, 2), np.float32),
      ... }
      >>> config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
      >>> modules = {"head": ("head/kernel", False)}
      >>> lora_config, adapters = from_peft(config, tensors, modules)
      >>> lora_config.scale, adapters["head/kernel"]["a"].shape
      (2.0, (6, 2))
    """
    _check_config(config)
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        module, kind = _module_and_kind(name)
        if module not in modules:
            where = f"the module {module!r}, which modules does not contain"
            raise ValueError(f"from_peft: {name!r} belongs to {where}; add where its weight is")
        array = np.asarray(tensor, np.float32)
        array = array.T if kind in ("a", "b") else array.ravel()
        grouped = Module(*modules[module]).grouped
        if grouped is not None and kind != "a":
            array = regrouped(array, array.ndim - 1, *grouped)
        parts.setdefault(module, {})[kind] = array
    if not parts:
        raise ValueError("from_peft: expected the tensors of an adapter, got none")
    rank, dora = int(config["r"]), bool(config.get("use_dora"))
    expected = {"a", "b", "magnitude"} if dora else {"a", "b"}
    for module, arrays in parts.items():
        if arrays.keys() != expected:
            wanted = f"the parts {sorted(expected)}, got {sorted(arrays)}"
            raise ValueError(f"from_peft: the module {module!r} must have {wanted}")
        if (ranks := (arrays["a"].shape[-1], arrays["b"].shape[0])) != (rank, rank):
            raise ValueError(
                f"from_peft: the module {module!r} must have the rank r={rank}, got {ranks}"
            )
    adapters, layouts = _placed({m: Module(*modules[m]) for m in parts}, parts)
    targets = {glob.escape(path): layout for path, layout in layouts.items()}
    alpha = config.get("lora_alpha", rank)
    return LoRA(rank, alpha, targets, dora=dora, rslora=bool(config.get("use_rslora"))), adapters


def to_peft(
    config: LoRA, adapters: Adapters, modules: Modules, base_model: str = ""
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Convert adapters to PEFT: the inverse of `from_peft`.

    Args:
      config: The configuration of the adapters.
      adapters: As `fnet.lora.init` returns.
      modules: As for `from_peft`. An adapter that is in none is left out with a warning while it
        changes nothing.
      base_model: Name of the base model, for ``base_model_name_or_path``.

    Returns:
      ``(adapter_config, tensors)``: contents of ``adapter_config.json`` and of
      ``adapter_model.safetensors``, float32.

    Raises:
      ValueError: If the path of an adapter that changes the weight is in no module.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> from fnet.interop.peft import to_peft
      >>> config = fnet.lora.LoRA(rank=2)
      >>> params, modules = {"kernel": jnp.ones((6, 3))}, {"head": ("kernel", False)}
      >>> adapters = fnet.lora.init(config, params, jax.random.key(0))
      >>> adapter_config, tensors = to_peft(config, adapters, modules)
      >>> {name: array.shape for name, array in tensors.items()}
      {'base_model.model.head.lora_A.weight': (2, 6), 'base_model.model.head.lora_B.weight': (3, 2)}
      >>> adapter_config["target_modules"]
      ['head']
    """
    places = {name: Module(*place) for name, place in modules.items()}
    if missing := sorted(set(adapters) - {place.path for place in places.values()}):
        message = f"to_peft: modules must contain the modules of all adapters, lacks {missing}"
        if config.dora or any(np.any(adapters[path]["b"]) for path in missing):
            raise ValueError(message)
        warnings.warn(f"{message}, which change nothing yet and are left out", stacklevel=2)
    tensors: dict[str, np.ndarray] = {}
    names = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
    targets = [module for module, place in places.items() if place.path in adapters]
    for module in targets:
        place = places[module]
        for kind, array in adapters[place.path].items():
            own = np.asarray(array if place.layer is None else array[place.layer], np.float32)
            if place.grouped is not None and kind != "a":
                own = regrouped(own, own.ndim - 1, *place.grouped[::-1])
            tensors[f"{_PREFIX}{module}.{names[kind]}"] = np.ascontiguousarray(own.T)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.rank if config.alpha is None else config.alpha,
        "use_dora": config.dora,
        "use_rslora": config.rslora,
        "target_modules": targets,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }, tensors


def huggingface_modules(model: Any) -> dict[str, Module]:
    """Return the modules of a published model, for `from_peft` and `to_peft`.

    Args:
      model: A model of `fnet.interop.from_huggingface`.

    Returns:
      Name of each linear module -> `Module`. Left out are embeddings, experts that are one tensor
      of the file, and what PEFT refuses.

    Example:
      >>> from fnet.interop.huggingface import build_model
      >>> from fnet.interop.peft import huggingface_modules
      >>> config = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8}
      >>> config |= {"intermediate_size": 16, "num_hidden_layers": 1}
      >>> model = build_model(config | {"num_attention_heads": 2})
      >>> huggingface_modules(model)["model.layers.0.self_attn.q_proj"].path
      'blocks/0/mixer/query/kernel'
    """
    modules = {}
    for tensor in model.tensors:
        is_matrix = len(tensor.shape) - (tensor.row is not None) == 2
        is_linear = tensor.path.endswith("kernel") and is_matrix and "1" not in tensor.layout
        is_refused = tensor.name.split(".")[-2:][0] in REFUSED.get(model.family, ())
        if not (tensor.name.endswith(".weight") and is_linear) or is_refused:
            continue
        # transformers renames the language model of models that also see images when it loads them.
        inside = r"^language_model\.(model\.)?"
        name = re.sub(inside, lambda m: "model.language_model." if m[1] else "", tensor.name)
        grouped = None
        if tensor.grouped is not None:
            axis, *grouped = tensor.grouped
            assert (tensor.layout or "ab")[axis] == "b"  # outputs
        modules[name.removesuffix(".weight")] = Module(
            tensor.path, layer=tensor.row, grouped=grouped and (grouped[0], grouped[1])
        )
    return modules


def _check_config(config: Mapping[str, Any]) -> None:
    """Reject options that change what an adapter computes, unless `fnet.lora` computes it too."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"from_peft: peft_type must be 'LORA', got {config.get('peft_type')!r}")
    if "r" not in config:
        raise ValueError("from_peft: the rank r is missing in the configuration")
    unsupported = {n: value for n, value in config.items() if value and n not in _KNOWN}
    if unsupported.get("bias") == "none":
        del unsupported["bias"]
    initial = config.get("init_lora_weights", True)
    if initial not in _OWN_INITIAL_WEIGHTS:
        unsupported["init_lora_weights"] = initial  # It changes the weights of the base model.
    if unsupported:
        shown = ", ".join(f"{name}={value!r}" for name, value in sorted(unsupported.items()))
        raise ValueError(
            f"from_peft: these options are not supported: {shown}; merge the adapter with PEFT "
            "and import the merged model"
        )


def _module_and_kind(name: str) -> tuple[str, str]:
    for suffix, kind in _TENSORS.items():
        if name.startswith(_PREFIX) and name.endswith(suffix):
            return name[len(_PREFIX) : -len(suffix)], kind
    raise ValueError(
        f"from_peft: expected tensors {_PREFIX}MODULE with one of {sorted(_TENSORS)}, got {name!r}"
    )


def _placed(
    places: Mapping[str, Module], parts: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the adapters by path, with layers stacked, and the layout of each path."""
    members: dict[str, dict[int | None, dict[str, Any]]] = {}
    layouts: dict[str, str] = {}
    for module, place in places.items():
        layout = "n" * (place.layer is not None) + ("oi" if place.transposed else "io")
        by_layer = members.setdefault(place.path, {})
        if place.layer in by_layer or layouts.setdefault(place.path, layout) != layout:
            raise ValueError(f"from_peft: two modules are at {place.path!r}, one is {module!r}")
        by_layer[place.layer] = parts[module]
    adapters = {}
    for path, by_layer in members.items():
        if None in by_layer:
            adapters[path] = {kind: jnp.asarray(array) for kind, array in by_layer[None].items()}
            continue
        found = sorted(by_layer, key=int)  # type: ignore[arg-type]
        if found != [*range(len(found))]:
            raise ValueError(
                f"from_peft: every layer of {path!r} must have an adapter, got layers {found}"
            )
        kinds = by_layer[0]
        adapters[path] = {k: jnp.stack([by_layer[i][k] for i in found]) for k in kinds}
    return adapters, layouts
