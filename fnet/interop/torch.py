"""Weights of torch's networks for images: arrays in, arrays out, in either's names and layouts.

Nothing of torch is needed: a state dict is ``{key: array}``, from wherever it was read.
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
# What wraps a network in torch puts a name before all of its own.
_WRAPPING = {"module", "_orig_mod"}


class Report(NamedTuple):
    """What became of the arrays of a state dict.

    Attributes:
      names: whose they are, one of `torch_keys.NAMES`.
      read: ``{key in torch: name here}``, of every array that was taken.
      left: keys that were not used; counters of batches last.
      initial: names here of arrays that stayed as they were.
      notes: what else there is to know, a line each.
    """

    names: str
    read: dict[str, str]
    left: tuple[str, ...]
    initial: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def renamed(self) -> dict[str, str]:
        """Of those read, the ones whose layer has another name here."""

        def layer(name: str) -> str:
            return name.rpartition(".")[0]

        return {key: name for key, name in self.read.items() if layer(key) != layer(name)}


class Filled(NamedTuple):
    """A network's arrays after `fill`.

    Attributes:
      params: of the network, in its dtypes.
      state: likewise.
      report: which arrays were read, and which were not.
    """

    params: Params
    state: State
    report: Report


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
    """Params and state of a network, from a state dict of torch.

    ::

        params, state = from_torch("resnet50", arrays, norm="batch", activation="relu")
        network = fnet.models.get("resnet50", num_classes=1000, norm="batch", activation="relu")

    Args:
      network: a name of `fnet.models.get`, or a network.
      state_dict: ``{key: array}`` in torch's layouts, floating, of what is said at `fill`.
      num_classes: of a network by name; by default those of the state dict's classifier, and
        without one the network that gives features.
      norm: of the network; of one by name, it is built with it.
      trained_with, new_classifier: as for `fill`.
      key: of the initial values that a new classifier keeps.
      **options: of `fnet.models.get`.

    Returns:
      ``(params, state)``, float32, for ``network.apply``.

    Raises:
      TypeError, ValueError: as `fill`; for an unknown name; for a new classifier without
        a key.
    """
    if isinstance(network, str):
        if num_classes is None:
            num_classes = _classes(_arrays(state_dict)[0])
        if norm != "abn":
            options["norm"] = norm
        network = models.get(network, num_classes=num_classes, **options)
    elif num_classes is not None or options:
        given = ["num_classes"] * (num_classes is not None) + list(options)
        raise ValueError(f"from_torch: {given} are of a network by name; this one is built already")
    if new_classifier and key is None:
        raise ValueError("from_torch: a new classifier needs key=, which its values are drawn with")
    if key is None:
        params, state = jax.eval_shape(network.init, jax.random.key(0))
    else:
        params, state = network.init(key)
    filled = fill(
        params,
        state,
        state_dict,
        norm=norm,
        trained_with=trained_with,
        new_classifier=new_classifier,
    )
    return filled.params, filled.state


def fill(
    params: Params,
    state: State,
    state_dict: Mapping[str, Any],
    *,
    norm: str = "abn",
    trained_with: str | None = None,
    new_classifier: bool = False,
) -> Filled:
    """A network's arrays with those of a state dict in place of them.

    Read are state dicts of mapillary/inplace_abn's networks and torchvision's ResNets, by
    their own names; as they are, in a whole checkpoint (``{"state_dict": ...}``), in parts
    (``{"body": ..., "head": ..., "cls": ...}``), under ``module.`` of DataParallel. A DeepLab
    also takes the state dict of its body alone. ::

        in torch                              here
        weight [O, I / groups, H, W]          kernel [H, W, I / groups, O]
        weight [O, I]                         kernel [I, O]
        weight, bias [C] of a norm            gamma, beta [C]
        running_mean, running_var [C]         running_mean, running_var [C]
        num_batches_tracked                   not needed

    A norm's gamma goes over as it is, where the norm is the one it was trained with; between
    in-place and plain batch norm it is changed as `norm_conversion.change` says.

    Args:
      params, state: of the network: arrays, or shapes (``jax.eval_shape``). What is not read
        is given back as it is.
      state_dict: ``{key: array}``, floating.
      norm: of the network: ``"abn"``, ``"batch"``, or another, which is taken as it is.
      trained_with: the norm of the weights, ``"abn"`` or ``"batch"``. By default the
        network's; torchvision's ResNets, known by their names, have ``"batch"``, and then a
        network in place must be asked for with it.
      new_classifier: True: what makes the logits stays as it is (``fc``, ``classifier``; of a
        DeepLab ``cls``, and where the state dict is its body's, ``head``).

    Returns:
      ``(params, state, report)``; arrays read are copies in the network's dtype.

    Raises:
      TypeError: if an array is not floating.
      ValueError: for arrays of another network, naming the first that is missing, not
        expected or of another shape; for gammas that the norm cannot have.
    """
    given, left = _arrays(state_dict)
    here = _flat(params) | _flat(state)
    names, part, expected = _expected(here, given)
    spare: set[str] = set()
    if new_classifier or part:
        expected = {k: n for k, n in expected.items() if not torch_keys.is_classifier(n)}
        spare = {k for k in given if torch_keys.is_classifier(k)} - expected.keys()
    _compare({k: _torch_shape(here[n].shape) for k, n in expected.items()}, given, spare)
    if part and not new_classifier:
        others = sorted({name.partition(".")[0] for name in here} - {"body"})
        raise ValueError(
            "from_torch: the weights are of the body alone; new_classifier=True leaves "
            f"{' and '.join(others)} at their initial values"
        )
    if names == "torchvision" and norm == "abn" and trained_with is None:
        raise ValueError(
            "from_torch: the names are torchvision's, whose ResNets are trained with plain "
            "batch norm: norm='batch' takes them as they are; trained_with='batch' moves them "
            "to in-place norm, trained_with='abn' says that they come from it"
        )

    arrays, notes = _converted({n: given[k] for k, n in expected.items()}, here)
    negative = sum(int((a < 0).sum()) for name, a in arrays.items() if name.endswith("gamma"))
    if negative and norm == "abn" and trained_with is None:
        notes += (
            f"{negative} gammas are negative, of which in-place norm takes the size: if the "
            "weights were trained with plain batch norm, give trained_with='batch'",
        )
    trained_with = trained_with or norm
    arrays = norm_conversion.change(arrays, trained_with, norm)
    if trained_with != norm:
        notes += (f"weights of norm {trained_with!r} were changed for norm {norm!r}",)
    initial = tuple(name for name in here if name not in arrays)

    def filled(path: Any, leaf: Any) -> Array:
        name = _name(path)
        return jnp.array(arrays[name]) if name in arrays else leaf

    read = {key: expected[key] for key in given if key in expected}
    report = Report(names, read, (*sorted(spare), *left), initial, notes)
    return Filled(
        jax.tree_util.tree_map_with_path(filled, params),
        jax.tree_util.tree_map_with_path(filled, state),
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
    """A state dict of a network: ``{key: array}`` in torch's names and layouts.

    `fill` reads it back to the same arrays, bit for bit, where ``for_norm`` is left out.

    Args:
      params, state: of a network for images.
      names: ``"reference"``: as in mapillary/inplace_abn; ``"torchvision"``, of ResNets.
      norm: of the network.
      for_norm: the norm that will use the weights, ``"abn"`` or ``"batch"``, if another;
        what changes is said at `norm_conversion.change`.

    Returns:
      numpy arrays by their keys in torch, in torch's layouts.

    Raises:
      ValueError: for names that the network cannot have, arrays that have no name in
        torch, or gammas that the norm cannot have.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in (_flat(params) | _flat(state)).items()}
    known = torch_keys.namings(arrays)
    if names not in known:
        why = "" if names not in NAMES else "; torchvision's names are for ResNets"
        raise ValueError(f"to_torch: names must be one of {known}, got {names!r}{why}")
    arrays = norm_conversion.change(arrays, norm, for_norm or norm)
    found = {
        torch_keys.torch_key(name, names): np.array(_to_layout(name, a), order="C")
        for name, a in arrays.items()
    }
    assert len(found) == len(arrays)
    return found


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _flat(tree: Any) -> dict[str, Any]:
    """``{"layer1.0.conv1.kernel": leaf}``."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _to_layout(name: str, a: np.ndarray) -> np.ndarray:
    """HWIO -> OIHW, [I, O] -> [O, I]."""
    if not name.endswith("kernel"):
        return a
    if a.ndim not in (2, 4):
        raise ValueError(f"to_torch: {name} {a.shape} is of no dense layer and no 2d convolution")
    return a.T if a.ndim == 2 else a.transpose(3, 2, 0, 1)


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:1:-1], *shape[:2]) if len(shape) == 4 else shape[::-1]


def _from_layout(a: np.ndarray) -> np.ndarray:
    return a.transpose(2, 3, 1, 0) if a.ndim == 4 else a.T


def _arrays(state_dict: Mapping[str, Any]) -> tuple[Arrays, tuple[str, ...]]:
    """The arrays of a state dict or a checkpoint, by key, and what else there is."""
    outside: list[str] = []
    for wrapper in _WRAPPERS:
        if isinstance(state_dict.get(wrapper), Mapping):
            outside = [key for key in state_dict if key != wrapper]
            state_dict = state_dict[wrapper]
            break
    found: Arrays = {}
    counters = []

    def add(part: Mapping[str, Any], before: tuple[str, ...]) -> None:
        for name, value in part.items():
            steps = [step for step in str(name).split(".") if step not in _WRAPPING]
            key = ".".join((*before, *steps))
            if isinstance(value, Mapping):
                add(value, (*before, *steps))
            elif key.endswith("num_batches_tracked"):
                counters.append(key)
            elif key in found:
                raise ValueError(f"from_torch: {key} is there twice, under different wrappers")
            elif hasattr(value, "shape"):
                found[key] = np.asarray(value)
            else:
                outside.append(key)

    add(state_dict, ())
    if not found:
        raise ValueError(
            f"from_torch: no arrays in it, neither by themselves nor under {' or '.join(_WRAPPERS)}"
        )
    return found, (*outside, *counters)


def _classes(given: Arrays) -> int | None:
    weights = (a for k, a in given.items() if torch_keys.is_classifier(k) and a.ndim > 1)
    return next((a.shape[0] for a in weights), None)


def _expected(here: Iterable[str], given: Iterable[str]) -> tuple[str, str, dict[str, str]]:
    """``(names, part, {key: name here})``: what of the network these arrays are closest to.

    ``part`` is ``"body."`` where keys are of a body alone.
    """
    choices = []
    for names in torch_keys.namings(here):
        keys = {torch_keys.torch_key(name, names): name for name in here}
        for part in ("", "body."):
            of_part = {k.removeprefix(part): n for k, n in keys.items() if k.startswith(part)}
            choices.append((names, part, of_part))
    return max(choices, key=lambda choice: len(choice[2].keys() & set(given)))


def _compare(expected: dict[str, tuple[int, ...]], given: Arrays, spare: set[str]) -> None:
    """Refuses arrays that are not those of the network."""
    problem = None
    for key, a in given.items():
        if key in expected and expected[key] != a.shape:
            problem = f"{key} is {a.shape}, in the network {expected[key]}"
        elif key not in expected and key not in spare:
            problem = f"{key} {a.shape} is not in the network"
        if problem:
            break
    else:
        for key in sorted(expected.keys() - given.keys()):
            problem = f"{key} {expected[key]} is missing"
            break
    if problem is None:
        return
    theirs, ours = torch_keys.recognise(given), torch_keys.recognise(expected)
    stems = ["conv3.weight" in keys or "mod1.conv3.weight" in keys for keys in (given, expected)]
    what = "weights of another network"
    if theirs != ours:
        hint = f"the weights look like {theirs}" if theirs else "the weights are of none known here"
        hint += f", the network is {ours}" if ours else ""
    elif torch_keys.is_classifier(key):
        what = "weights for other classes"
        hint = "new_classifier=True leaves the classifier at its initial values"
    elif stems[0] != stems[1]:
        hint = f"the weights have the stem {'3x3' if stems[0] else '7x7'}"
    else:
        hint = f"both are {ours}, with other options" if ours else "neither is known here"
    raise ValueError(f"from_torch: {what}: {problem}; {hint}")


def _converted(given: Arrays, here: Mapping[str, Any]) -> tuple[Arrays, tuple[str, ...]]:
    """Arrays, by their names here, in the layouts and dtypes that they have here; with notes."""
    arrays, casts, odd = {}, set(), []
    for name, a in given.items():
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"from_torch: {name} must be floating, got {a.dtype}")
        if a.dtype != here[name].dtype:
            casts.add(f"{a.dtype} became {here[name].dtype}")
        arrays[name] = np.array(_from_layout(a), here[name].dtype)
        if not np.isfinite(arrays[name]).all():
            odd.append(name)
    notes = sorted(casts)
    if odd:
        notes.append(f"not all finite: {odd[0]}" + f" and {len(odd) - 1} more" * (len(odd) > 1))
    return arrays, tuple(notes)
