"""Pretrained weights of image networks from torch, and back: names, layouts and norms.

torch itself is not needed. A state dict is ``{key: array}``, from any source.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet import models
from fnet.interop import families, norm_conversion
from fnet.interop.families import NAMES, Weights
from fnet.interop.huggingface.checkpoint import Tensor
from fnet.layer import Layer, Params, State

Arrays = dict[str, np.ndarray]

_AVERAGES = ("model_ema", "state_dict_ema", "ema_state_dict", "ema")
_ENTRIES = (*_AVERAGES, "state_dict", "model_state_dict", "model")
"""Keys under which checkpoints store a state dict. The first one is read."""

_WRAPPER_MODULES = {"module", "_orig_mod"}
"""Parts of a key that torch's wrappers (DataParallel, compile) add."""


_NOT_WEIGHTS = ("num_batches_tracked", "n_averaged", "relative_position_index", "attn_mask")
"""Counters, and arrays that torch stores although they are computed."""


class LoadReport(NamedTuple):
    """Summary of a loaded state dict.

    Attributes:
      names: naming scheme of the keys: one of `families.NAMES`, or ``"fnet"``.
      read: ``{torch key: name in the network}`` of every array that was read.
      unused: keys that were not read; batch counters come last.
      initial: names of the network's arrays that kept their initial values.
      notes: further remarks, one line each.
      weights: what the state dict holds; None if it is of no known family.
    """

    names: str
    read: dict[str, str]
    unused: tuple[str, ...]
    initial: tuple[str, ...]
    notes: tuple[str, ...]
    weights: Weights | None = None

    @property
    def renamed(self) -> dict[str, str]:
        """The entries of ``read`` whose layer has another name in the network."""

        def layer(name: str) -> str:
            return name.rpartition(".")[0]

        return {key: name for key, name in self.read.items() if layer(key) != layer(name)}


class Loaded(NamedTuple):
    """Variables of a network after `load_state_dict`.

    Attributes:
      params: parameters, in the dtypes of the network.
      state: state, in the dtypes of the network.
      report: which arrays were read, and which were not.
    """

    params: Params
    state: State
    report: LoadReport


class Unwrapped(NamedTuple):
    """Arrays of a checkpoint.

    Attributes:
      arrays: ``{key: array}``, without the parts of keys that wrappers add.
      unused: keys of everything else; batch counters come last.
      entry: path of the state dict in the checkpoint, such as ``"model_ema"``, or ``""``.
      others: other entries with a state dict.
    """

    arrays: dict[str, Any]
    unused: tuple[str, ...]
    entry: str
    others: tuple[str, ...]


def from_torch(
    network: str | Layer,
    state_dict: Mapping[str, Any],
    *,
    num_classes: int | None = None,
    norm: str = "abn",
    trained_with: str | None = None,
    new_classifier: bool | None = False,
    key: Array | None = None,
    **options: Any,
) -> tuple[Params, State]:
    """Convert pretrained weights from torch to params and state of a network.

    Args:
      network: a name for `fnet.models.get`, or a network.
      state_dict: ``{key: array}`` in torch's layouts, floating, as for `load_state_dict`.
      num_classes: number of classes, if ``network`` is a name. None: as many as the classifier in
        the state dict has; if it has none, the network that returns features.
      norm: norm of the network. A network given by name is built with it.
      trained_with, new_classifier: as for `load_state_dict`.
      key: random key for the initial values of a new classifier.
      **options: further arguments of `fnet.models.get`.

    Returns:
      ``(params, state)``, float32, for ``network.apply``.

    Raises:
      TypeError, ValueError: as `load_state_dict`; for an unknown name; for a new classifier
        without a key.

    Example:
      >>> import fnet, numpy as np
      >>> model = fnet.serial(linear=fnet.layers.dense(3, 2))
      >>> arrays = {"linear.weight": np.ones((2, 3)), "linear.bias": np.zeros(2)}
      >>> params, state = fnet.interop.from_torch(model, arrays)
      >>> params["linear"]["kernel"].shape  # [in, out], where torch has [out, in]
      (3, 2)
    """
    if isinstance(network, str):
        if num_classes is None:
            weights = families.recognize(families.shapes_of(unwrap(state_dict).arrays))
            num_classes = weights.classes if weights else None
        if norm != "abn":
            options["norm"] = norm
        network = models.get(network, num_classes=num_classes, **options)
    elif num_classes is not None or options:
        given = ["num_classes"] * (num_classes is not None) + list(options)
        raise ValueError(f"from_torch: {given} only apply to a network given by name")
    if new_classifier is not False and key is None:
        raise ValueError("from_torch: a new classifier needs key= for its initial values")
    if key is None:
        params, state = jax.eval_shape(network.init, jax.random.key(0))
    else:
        params, state = network.init(key)
    loaded = load_state_dict(
        params,
        state,
        state_dict,
        norm=norm,
        trained_with=trained_with,
        new_classifier=new_classifier,
    )
    return loaded.params, loaded.state


def load_state_dict(
    params: Params,
    state: State,
    state_dict: Mapping[str, Any],
    *,
    norm: str = "abn",
    trained_with: str | None = None,
    new_classifier: bool | None = False,
    entry: str | None = None,
    allow_nonfinite: bool = False,
) -> Loaded:
    """Replace the arrays of a network with the arrays of a torch state dict.

    Supported are the networks of mapillary/inplace_abn, the ResNets, ResNeXts, Wide ResNets and
    DenseNets of torchvision and timm, and torchvision's DeepLabV3, with their own names, and
    fnet's own names. Keys may have a prefix. The state dict may be split (``{"body": ...,
    "head": ..., "cls": ...}``), and a checkpoint may contain it; see `unwrap`. A DeepLab also
    accepts the state dict of its backbone, and a classifier the backbone of a DeepLab. ::

        torch                                 fnet
        weight [O, I / groups, H, W]          kernel [H, W, I / groups, O]
        weight [O, I]                         kernel [I, O]
        weight, bias [C] of a norm            gamma, beta [C]
        running_mean, running_var [C]         running_mean, running_var [C]
        num_batches_tracked                   not needed

    If the network's norm is not the norm of the weights, `norm_conversion.convert` converts
    between in-place and plain batch norm.

    Args:
      params, state: variables of the network: arrays, or shapes (``jax.eval_shape``). Arrays that
        the state dict lacks are returned unchanged.
      state_dict: ``{key: array}``, floating. In place of arrays it may hold objects with ``shape``
        and ``dtype`` that return arrays for ``tensor[...]``.
      norm: norm of the network: ``"abn"`` or ``"batch"``; weights of any other are not converted.
      trained_with: norm that the weights were trained with, ``"abn"`` or ``"batch"``. None: the
        network's norm. Required for names of torchvision and ``norm="abn"``.
      new_classifier: whether to skip the classifier (``fc``, ``classifier``; of a DeepLab ``cls``,
        and ``head`` if the state dict has only the backbone). None: if it does not fit.
      entry: as for `unwrap`.
      allow_nonfinite: whether to accept NaN and infinity.

    Returns:
      ``(params, state, report)``. Arrays that were read are copies in the network's dtypes.

    Raises:
      TypeError: if an array is not floating.
      ValueError: for arrays of another network, with the first array that is missing, unexpected
        or of another shape, and what the weights are; for values that are not finite; for gammas
        that the norm cannot represent.

    Example:
      >>> import fnet, jax, numpy as np
      >>> from fnet.interop.torch import load_state_dict
      >>> model = fnet.serial(linear=fnet.layers.dense(3, 2))
      >>> params, state = jax.eval_shape(model.init, jax.random.key(0))
      >>> arrays = {"linear.weight": np.ones((2, 3)), "linear.bias": np.zeros(2)}
      >>> load_state_dict(params, state, arrays).report.read
      {'linear.bias': 'linear.bias', 'linear.weight': 'linear.kernel'}
    """
    given, unused, found, others = unwrap(state_dict, entry)
    variables = _flatten(params) | _flatten(state)
    match = _match(variables, given)
    expected = {match.prefix + t.name: t for t in match.tensors}
    heads = {k for k, t in expected.items() if families.is_head(_name(t))}
    shapes = {k: t.file_shape for k, t in expected.items()}
    is_body = heads and not match.covers_heads
    fits = all(k in given and tuple(given[k].shape) == shapes[k] for k in heads)
    if new_classifier or is_body or (new_classifier is None and not fits):
        dropped = heads
        if not is_body and new_classifier:
            dropped = {k for k in heads if families.is_classifier(_name(expected[k]))}
        elif not is_body:
            dropped = _misfits(heads, shapes, given)
        expected = {k: t for k, t in expected.items() if k not in dropped}
    skipped = {
        k
        for k in given.keys() - expected.keys()
        if not k.startswith(match.prefix)
        or (
            families.is_torch_head(k.removeprefix(match.prefix))
            and (new_classifier is not False or is_body or k.startswith("aux_"))
        )
    }
    _check_arrays({k: shapes[k] for k in expected}, given, skipped, variables, match.prefix)
    if is_body and new_classifier is False:
        new = sorted(
            {_name(t).partition(".")[0] for t in match.tensors if families.is_head(_name(t))}
        )
        raise ValueError(
            "from_torch: the weights cover only the body; new_classifier=True leaves "
            f"{' and '.join(new)} at their initial values"
        )
    has_norms = any(name.endswith("gamma") for name in variables)
    is_plain = match.names in ("torchvision", "timm") and has_norms
    if is_plain and norm == "abn" and trained_with is None:
        raise ValueError(
            f"from_torch: the names are {match.names}'s, whose networks are trained with plain "
            "batch norm; use norm='batch' to keep it, trained_with='batch' to convert it to "
            "in-place norm, or trained_with='abn' if they were trained with in-place norm"
        )

    arrays, notes = _convert_arrays(
        {_name(t): (t, given[k]) for k, t in expected.items()}, variables, allow_nonfinite
    )
    if others:
        notes = (f"took {found}; the file also has {' and '.join(others)}", *notes)
    negative = sum(int((a < 0).sum()) for name, a in arrays.items() if name.endswith("gamma"))
    if negative and norm == "abn" and trained_with is None:
        notes += (
            f"{negative} gammas are negative, but in-place norm uses their absolute value; if the "
            "weights were trained with plain batch norm, give trained_with='batch'",
        )
    trained_with = trained_with or norm
    arrays = norm_conversion.convert(arrays, trained_with, norm)
    if trained_with != norm:
        notes += (f"weights of norm {trained_with!r} were converted to norm {norm!r}",)
    initial = tuple(name for name in variables if name not in arrays)

    def load(path: Any, leaf: Any) -> Array:
        name = _keystr(path)
        return jnp.array(arrays[name]) if name in arrays else leaf

    read = {key: _name(t) for key, t in expected.items()}
    names = (*sorted(skipped), *unused)
    weights = None if match.names == "fnet" else families.recognize(families.shapes_of(given))
    report = LoadReport(match.names, read, names, initial, notes, weights)
    return Loaded(
        jax.tree_util.tree_map_with_path(load, params),
        jax.tree_util.tree_map_with_path(load, state),
        report,
    )


def to_torch(
    params: Params,
    state: State,
    *,
    names: str | None = None,
    norm: str = "abn",
    for_norm: str | None = None,
) -> Arrays:
    """Convert params and state of an image network to a torch state dict.

    Without ``for_norm``, `load_state_dict` reads the result back bit for bit.

    Args:
      params, state: variables of an image network.
      names: one of `namings`; None: the first of them. ``"reference"``: keys of
        mapillary/inplace_abn. ``"torchvision"``: keys of torchvision, for ResNets, DenseNets with a
        norm after the stem, and DeepLabs with the head ``"concat"``, which timm names alike; for
        EfficientNets, MobileNetV3s, RegNets and Swins. ``"timm"``: keys of timm for the last four.
      norm: norm of the network.
      for_norm: norm to convert the weights to, ``"abn"`` or ``"batch"``
        (`norm_conversion.convert`). None: no conversion.

    Returns:
      ``{key: numpy array}`` in torch's layouts.

    Raises:
      ValueError: for names that the network does not have, arrays without a name in torch, or
        gammas that the norm cannot represent.

    Example:
      >>> import fnet, jax
      >>> model = fnet.serial(linear=fnet.layers.dense(3, 2))
      >>> params, state = model.init(jax.random.key(0))
      >>> sorted(fnet.interop.to_torch(params, state))
      ['linear.bias', 'linear.weight']
    """
    arrays = {name: np.asarray(leaf) for name, leaf in (_flatten(params) | _flatten(state)).items()}
    known = families.namings(arrays)
    names = known[0] if names is None else names
    if names not in known:
        why = "" if names not in NAMES else "; the network has no counterpart there"
        raise ValueError(f"to_torch: names must be one of {known}, got {names!r}{why}")
    arrays = norm_conversion.convert(arrays, norm, for_norm or norm)
    state_dict = {
        t.name: np.array(t.to_file(arrays[_name(t)]), order="C")
        for t in families.name_tensors(arrays, names)
    }
    assert len(state_dict) == len(arrays)
    return state_dict


def namings(params: Params, state: State) -> tuple[str, ...]:
    """Return the naming schemes of `families.NAMES` that have all arrays of a network.

    Args:
      params, state: variables of an image network.

    Returns:
      At least one name.

    Example:
      >>> import fnet, jax
      >>> from fnet.interop.torch import namings
      >>> model = fnet.models.get("swin_t", num_classes=2, width=3, blocks=(1,))
      >>> namings(*jax.eval_shape(model.init, jax.random.key(0)))
      ('torchvision', 'timm')
    """
    return families.namings(_flatten(params) | _flatten(state))


def unwrap(content: Mapping[str, Any], entry: str | None = None) -> Unwrapped:
    """Find the arrays in a checkpoint.

    A checkpoint may store them under ``state_dict``, ``model``, ``model_ema`` or similar keys, also
    nested. Averaged weights (EMA) are preferred, because they are what a publisher evaluates.

    Args:
      content: a state dict, or a checkpoint that contains one.
      entry: key of the state dict in the checkpoint. None: the first of the known keys.

    Returns:
      The arrays, and what else there is.

    Raises:
      ValueError: if there are no arrays, a key occurs twice, or there is no such entry.

    Example:
      >>> import numpy as np
      >>> from fnet.interop.torch import unwrap
      >>> arrays = {"module.fc.bias": np.zeros(3)}
      >>> checkpoint = {"model": arrays, "model_ema": arrays, "epoch": 3}
      >>> found = unwrap(checkpoint)
      >>> found.entry, found.others, list(found.arrays)
      ('model_ema', ('model',), ['fc.bias'])
    """
    unused: list[str] = []
    path: list[str] = []
    others: tuple[str, ...] = ()
    while True:
        entries = [k for k in _ENTRIES if isinstance(content.get(k), Mapping)]
        if entry is not None and not path:
            if not isinstance(content.get(entry), Mapping):
                has = f"has {', '.join(entries)}" if entries else "holds weights alone"
                raise ValueError(f"from_torch: no entry {entry!r} with weights; it {has}")
            entries = [entry, *(k for k in entries if k != entry)]
        if not entries:
            break
        others = others or tuple(entries[1:])
        unused += [str(key) for key in content if key not in entries]
        content, path = content[entries[0]], [*path, entries[0]]
    arrays: dict[str, Any] = {}
    counters = []

    def add(mapping: Mapping[str, Any], prefix: tuple[str, ...]) -> None:
        for name, value in mapping.items():
            parts = [part for part in str(name).split(".") if part not in _WRAPPER_MODULES]
            key = families.current_key(".".join((*prefix, *parts)))
            if isinstance(value, Mapping):
                add(value, (*prefix, *parts))
            elif key.endswith(_NOT_WEIGHTS):
                counters.append(key)
            elif key in arrays:
                raise ValueError(f"from_torch: {key} occurs twice, under different wrappers")
            elif hasattr(value, "shape"):
                arrays[key] = value
            else:
                unused.append(key)

    add(content, ())
    if not arrays:
        raise ValueError(
            "from_torch: no arrays in it, neither at the top level nor under "
            f"{', '.join(_ENTRIES[:-1])} or {_ENTRIES[-1]}"
        )
    return Unwrapped(arrays, (*unused, *counters), ".".join(path), others)


def _keystr(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _flatten(tree: Any) -> dict[str, Any]:
    return {_keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _name(t: Tensor) -> str:
    return t.path.replace("/", ".")


class _Match(NamedTuple):
    """How the keys of a file correspond to the arrays of a network.

    Attributes:
      names: naming scheme.
      prefix: prefix of the keys in the file.
      tensors: names of the network's arrays after the prefix; of those that the file may have.
      covers_heads: whether the file has the network's head or classifier.
    """

    names: str
    prefix: str
    tensors: tuple[Tensor, ...]
    covers_heads: bool


_NO_BODY = {"reference": "body.", "torchvision": "backbone.", "timm": "body.", "fnet": "body."}
"""Prefix of the backbone of a DeepLab, which the weights of a classifier lack."""


def _match(variables: Mapping[str, Any], given: Mapping[str, Any]) -> _Match:
    """Find the naming scheme and the prefix that most of the given keys match."""
    prefixes = families.prefixes(given)
    best, most = _Match("reference", "", (), True), -1
    for names in (*NAMES, "fnet"):
        try:
            tensors = families.name_tensors(variables, names)
        except ValueError:  # arrays that no network of torch has
            continue
        body = _NO_BODY[names]
        without = tuple(
            t._replace(name=t.name.removeprefix(body)) for t in tensors if t.name.startswith(body)
        )
        for prefix in prefixes:
            for candidates in (tensors, without):
                bodies = [t for t in candidates if not families.is_head(_name(t))]
                overlap = sum(prefix + t.name in given for t in bodies or candidates)
                if overlap > most:
                    heads = [t for t in tensors if families.is_head(_name(t))]
                    covers = any(prefix + t.name in given for t in heads) and candidates is tensors
                    kept = candidates if covers else (*bodies, *heads)
                    best, most = _Match(names, prefix, tuple(kept), covers or not heads), overlap
    return best


def _misfits(heads: set[str], shapes: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """Return the layers of a head of which an array is missing or has another shape."""
    layers = {
        key.rpartition(".")[0]
        for key in heads
        if key not in given or tuple(given[key].shape) != shapes[key]
    }
    return {key for key in heads if key.rpartition(".")[0] in layers}


def _check_arrays(
    expected: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Any],
    skipped: set[str],
    variables: Mapping[str, Any],
    prefix: str,
) -> None:
    problems = {}
    for key, a in given.items():
        shape = tuple(a.shape)
        if key in expected and expected[key] != shape:
            problems[key] = f"{key} is {shape}, in the network {expected[key]}"
        elif key not in expected and key not in skipped:
            problems[key] = f"{key} {shape} is not in the network"
    for key in sorted(expected.keys() - given.keys()):
        problems[key] = f"{key} {expected[key]} is missing"
    if not problems:
        return
    others = [p for k, p in problems.items() if not families.is_torch_head(k.removeprefix(prefix))]
    if not others:
        raise ValueError(
            f"from_torch: weights for other classes: {next(iter(problems.values()))}; "
            "new_classifier=True leaves the classifier at its initial values"
        )
    theirs, ours = families.recognize(families.shapes_of(given)), _describe(variables)
    hint = families.compare(theirs, ours) if theirs or ours else "neither is a known network"
    raise ValueError(f"from_torch: weights of another network: {others[0]}; {hint}")


def _describe(variables: Mapping[str, Any]) -> Weights | None:
    for names in families.namings(variables):
        try:
            tensors = families.name_tensors(variables, names)
        except ValueError:
            continue
        found = families.recognize({t.name: t.file_shape for t in tensors})
        if found is not None:
            return found
    return None


def _convert_arrays(
    given: Mapping[str, tuple[Tensor, Any]], variables: Mapping[str, Any], allow_nonfinite: bool
) -> tuple[Arrays, tuple[str, ...]]:
    arrays, casts, not_finite = {}, set(), []
    for name, (t, tensor) in given.items():
        a, dtype = np.asarray(tensor[...]), variables[name].dtype
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"from_torch: {name} must be floating, got {a.dtype}")
        if a.dtype != dtype:
            casts.add(f"{a.dtype} cast to {dtype}")
        arrays[name] = np.array(t.to_param(a), dtype)
        if bad := int(arrays[name].size - np.isfinite(arrays[name]).sum()):
            not_finite.append(f"{t.name} ({bad:,} of {arrays[name].size:,} values)")
    notes = sorted(casts)
    if not_finite:
        more = f" and {len(not_finite) - 1} more arrays" if len(not_finite) > 1 else ""
        problem = f"not finite: {not_finite[0]}{more}"
        if not allow_nonfinite:
            raise ValueError(f"from_torch: {problem}; allow_nonfinite=True accepts them")
        notes.append(problem)
    return arrays, tuple(notes)
