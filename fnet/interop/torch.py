"""Pretrained weights of image networks from torch, and back: names, layouts and norms.

torch itself is not needed. A state dict is ``{key: array}``, from any source.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet import models
from fnet.interop import norm_conversion, torch_keys
from fnet.interop.torch_keys import NAMES
from fnet.layer import Layer, Params, State

Arrays = dict[str, np.ndarray]

_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which checkpoints store a state dict."""

_WRAPPER_MODULES = {"module", "_orig_mod"}
"""Parts of a key that torch's wrappers (DataParallel, compile) add."""


class LoadReport(NamedTuple):
    """Summary of a loaded state dict.

    Attributes:
      names: naming scheme of the keys, one of `torch_keys.NAMES`.
      read: ``{torch key: name in the network}`` of every array that was read.
      unused: keys that were not read; batch counters come last.
      initial: names of the network's arrays that kept their initial values.
      notes: further remarks, one line each.
    """

    names: str
    read: dict[str, str]
    unused: tuple[str, ...]
    initial: tuple[str, ...]
    notes: tuple[str, ...]

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


def from_torch(
    network: str | Layer,
    state_dict: Mapping[str, Any],
    *,
    num_classes: int | None = None,
    norm: str = "abn",
    trained_with: str | None = None,
    new_classifier: bool = False,
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
            num_classes = _num_classes(_flatten_state_dict(state_dict)[0])
        if norm != "abn":
            options["norm"] = norm
        network = models.get(network, num_classes=num_classes, **options)
    elif num_classes is not None or options:
        given = ["num_classes"] * (num_classes is not None) + list(options)
        raise ValueError(f"from_torch: {given} only apply to a network given by name")
    if new_classifier and key is None:
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
    new_classifier: bool = False,
) -> Loaded:
    """Replace the arrays of a network with the arrays of a torch state dict.

    Supported are the networks of mapillary/inplace_abn and torchvision's ResNets, with their own
    names. The state dict may be a checkpoint (``{"state_dict": ...}``), it may be split
    (``{"body": ..., "head": ..., "cls": ...}``), and keys may begin with ``module.`` from
    DataParallel. A DeepLab also accepts the state dict of its backbone. ::

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
      state_dict: ``{key: array}``, floating.
      norm: norm of the network: ``"abn"`` or ``"batch"``; weights of any other are not converted.
      trained_with: norm that the weights were trained with, ``"abn"`` or ``"batch"``. None: the
        network's norm. Required for torchvision's ResNets and ``norm="abn"``.
      new_classifier: whether to skip the classifier (``fc``, ``classifier``; of a DeepLab ``cls``,
        and ``head`` if the state dict has only the backbone).

    Returns:
      ``(params, state, report)``. Arrays that were read are copies in the network's dtypes.

    Raises:
      TypeError: if an array is not floating.
      ValueError: for arrays of another network, with the first array that is missing, unexpected
        or of another shape; for gammas that the norm cannot represent.

    Example:
      >>> import fnet, jax, numpy as np
      >>> from fnet.interop.torch import load_state_dict
      >>> model = fnet.serial(linear=fnet.layers.dense(3, 2))
      >>> params, state = jax.eval_shape(model.init, jax.random.key(0))
      >>> arrays = {"linear.weight": np.ones((2, 3)), "linear.bias": np.zeros(2)}
      >>> load_state_dict(params, state, arrays).report.read
      {'linear.weight': 'linear.kernel', 'linear.bias': 'linear.bias'}
    """
    given, unused = _flatten_state_dict(state_dict)
    variables = _flatten(params) | _flatten(state)
    names, prefix, expected = _match_names(variables, given)
    skipped: set[str] = set()
    if new_classifier or prefix:
        expected = {k: n for k, n in expected.items() if not torch_keys.is_classifier(n)}
        skipped = {k for k in given if torch_keys.is_classifier(k)} - expected.keys()
    _check_arrays(
        {k: _torch_shape(variables[n].shape) for k, n in expected.items()}, given, skipped
    )
    if prefix and not new_classifier:
        others = sorted({name.partition(".")[0] for name in variables} - {"body"})
        raise ValueError(
            "from_torch: the weights cover only the body; new_classifier=True leaves "
            f"{' and '.join(others)} at their initial values"
        )
    if names == "torchvision" and norm == "abn" and trained_with is None:
        raise ValueError(
            "from_torch: the names are torchvision's, whose ResNets are trained with plain "
            "batch norm; use norm='batch' to keep it, trained_with='batch' to convert it to "
            "in-place norm, or trained_with='abn' if they were trained with in-place norm"
        )

    arrays, notes = _convert_arrays({n: given[k] for k, n in expected.items()}, variables)
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
        name = _name(path)
        return jnp.array(arrays[name]) if name in arrays else leaf

    read = {key: expected[key] for key in given if key in expected}
    report = LoadReport(names, read, (*sorted(skipped), *unused), initial, notes)
    return Loaded(
        jax.tree_util.tree_map_with_path(load, params),
        jax.tree_util.tree_map_with_path(load, state),
        report,
    )


def to_torch(
    params: Params,
    state: State,
    *,
    names: str = "reference",
    norm: str = "abn",
    for_norm: str | None = None,
) -> Arrays:
    """Convert params and state of an image network to a torch state dict.

    Without ``for_norm``, `load_state_dict` reads the result back bit for bit.

    Args:
      params, state: variables of an image network.
      names: ``"reference"``: keys of mapillary/inplace_abn. ``"torchvision"``: keys of
        torchvision, for ResNets.
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
      >>> {key: array.shape for key, array in fnet.interop.to_torch(params, state).items()}
      {'linear.bias': (2,), 'linear.weight': (2, 3)}
    """
    arrays = {name: np.asarray(leaf) for name, leaf in (_flatten(params) | _flatten(state)).items()}
    known = torch_keys.namings(arrays)
    if names not in known:
        why = "" if names not in NAMES else "; torchvision's names are for ResNets"
        raise ValueError(f"to_torch: names must be one of {known}, got {names!r}{why}")
    arrays = norm_conversion.convert(arrays, norm, for_norm or norm)
    state_dict = {
        torch_keys.torch_key(name, names): np.array(_to_torch_layout(name, a), order="C")
        for name, a in arrays.items()
    }
    assert len(state_dict) == len(arrays)
    return state_dict


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _flatten(tree: Any) -> dict[str, Any]:
    """Flatten variables to ``{"layer1.0.conv1.kernel": leaf}``."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _to_torch_layout(name: str, a: np.ndarray) -> np.ndarray:
    """Convert a kernel from HWIO to OIHW, or from [I, O] to [O, I]."""
    if not name.endswith("kernel"):
        return a
    if a.ndim not in (2, 4):
        raise ValueError(
            f"to_torch: {name} must be a dense or 2d convolution kernel, got shape {a.shape}"
        )
    return a.T if a.ndim == 2 else a.transpose(3, 2, 0, 1)


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:1:-1], *shape[:2]) if len(shape) == 4 else shape[::-1]


def _from_torch_layout(a: np.ndarray) -> np.ndarray:
    return a.transpose(2, 3, 1, 0) if a.ndim == 4 else a.T


def _flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[Arrays, tuple[str, ...]]:
    """Arrays of a state dict or checkpoint by key, and the keys of everything else."""
    other: list[str] = []
    for wrapper in _WRAPPERS:
        if isinstance(state_dict.get(wrapper), Mapping):
            other = [key for key in state_dict if key != wrapper]
            state_dict = state_dict[wrapper]
            break
    arrays: Arrays = {}
    counters = []

    def add(mapping: Mapping[str, Any], prefix: tuple[str, ...]) -> None:
        for name, value in mapping.items():
            parts = [part for part in str(name).split(".") if part not in _WRAPPER_MODULES]
            key = ".".join((*prefix, *parts))
            if isinstance(value, Mapping):
                add(value, (*prefix, *parts))
            elif key.endswith("num_batches_tracked"):
                counters.append(key)
            elif key in arrays:
                raise ValueError(f"from_torch: {key} occurs twice, under different wrappers")
            elif hasattr(value, "shape"):
                arrays[key] = np.asarray(value)
            else:
                other.append(key)

    add(state_dict, ())
    if not arrays:
        raise ValueError(
            "from_torch: no arrays in it, neither at the top level nor under "
            f"{' or '.join(_WRAPPERS)}"
        )
    return arrays, (*other, *counters)


def _num_classes(given: Arrays) -> int | None:
    weights = (a for k, a in given.items() if torch_keys.is_classifier(k) and a.ndim > 1)
    return next((a.shape[0] for a in weights), None)


def _match_names(variables: Iterable[str], given: Iterable[str]) -> tuple[str, str, dict[str, str]]:
    """Find the naming scheme that most of the given keys match.

    Returns:
      ``(names, prefix, {key: name in the network})``. ``prefix`` is ``"body."`` if the keys are
      keys of the backbone only.
    """
    choices = []
    for names in torch_keys.namings(variables):
        keys = {torch_keys.torch_key(name, names): name for name in variables}
        for prefix in ("", "body."):
            expected = {k.removeprefix(prefix): n for k, n in keys.items() if k.startswith(prefix)}
            choices.append((names, prefix, expected))
    return max(choices, key=lambda choice: len(choice[2].keys() & set(given)))


def _check_arrays(expected: dict[str, tuple[int, ...]], given: Arrays, skipped: set[str]) -> None:
    """Check that the given arrays have the keys and shapes of the network."""
    problem = None
    for key, a in given.items():
        if key in expected and expected[key] != a.shape:
            problem = f"{key} is {a.shape}, in the network {expected[key]}"
        elif key not in expected and key not in skipped:
            problem = f"{key} {a.shape} is not in the network"
        if problem:
            break
    else:
        for key in sorted(expected.keys() - given.keys()):
            problem = f"{key} {expected[key]} is missing"
            break
    if problem is None:
        return
    theirs, ours = torch_keys.recognize(given), torch_keys.recognize(expected)
    stems = ["conv3.weight" in keys or "mod1.conv3.weight" in keys for keys in (given, expected)]
    what = "weights of another network"
    if theirs != ours:
        hint = (
            f"the weights look like {theirs}" if theirs else "the weights are of no known network"
        )
        hint += f", the network is {ours}" if ours else ""
    elif torch_keys.is_classifier(key):
        what = "weights for other classes"
        hint = "new_classifier=True leaves the classifier at its initial values"
    elif stems[0] != stems[1]:
        hint = f"the weights have the stem {'3x3' if stems[0] else '7x7'}"
    else:
        hint = f"both are {ours}, with other options" if ours else "neither is a known network"
    raise ValueError(f"from_torch: {what}: {problem}; {hint}")


def _convert_arrays(given: Arrays, variables: Mapping[str, Any]) -> tuple[Arrays, tuple[str, ...]]:
    """Convert arrays to the network's layouts and dtypes, with notes about casts."""
    arrays, casts, not_finite = {}, set(), []
    for name, a in given.items():
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"from_torch: {name} must be floating, got {a.dtype}")
        dtype = variables[name].dtype
        if a.dtype != dtype:
            casts.add(f"{a.dtype} cast to {dtype}")
        arrays[name] = np.array(_from_torch_layout(a), dtype)
        if not np.isfinite(arrays[name]).all():
            not_finite.append(name)
    notes = sorted(casts)
    if not_finite:
        more = f" and {len(not_finite) - 1} more" if len(not_finite) > 1 else ""
        notes.append(f"not finite: {not_finite[0]}{more}")
    return arrays, tuple(notes)
