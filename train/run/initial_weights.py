"""Trained weights as the initial values of a run: ``fnet import`` and ``--model.pretrained``."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from fnet.interop import families
from fnet.interop import torch as interop
from train.data import Scaling
from train.data.columns import is_named, order_of
from train.errors import UserError, shorten
from train.run import weight_files
from train.run.setup import Setup

_EXAMPLES = 2
"""Number of array names of each kind that are shown."""

_KINDS = {
    "fnet": "weights of fnet",
    "reference": "weights with names of mapillary/inplace_abn",
    "torchvision": "weights with names of torchvision",
    "timm": "weights with names of timm",
}
"""Title of weights of no known family, by their naming scheme."""

_NOT_IN_ARRAYS = (
    "activation",
    "activation_param",
    "dilation",
    "dilate_first",
    "dilated",
    "pooling_size",
    "variant",
    "eps",
    "padding",
)
"""Options of networks that the shapes of their arrays do not show."""


T = TypeVar("T")


class Values(NamedTuple):
    """Number of values that were taken from a file, that are new, and that were left there."""

    taken: int
    new: int
    left: int


class InitialWeights(NamedTuple):
    """Variables that a run begins with, and where they come from.

    Attributes:
      variables: ``(params, model_state)``; arrays that take their initial values are None.
      report: which arrays were read.
      values: number of values that were taken, new and left.
      source: file or folder.
    """

    variables: tuple[Any, Any]
    report: interop.LoadReport
    values: Values
    source: str

    def as_dict(self) -> dict[str, Any]:
        """Return what ``import.json`` holds."""
        report = self.report._asdict() | {"file": self.source, "renamed": self.report.renamed}
        weights = self.report.weights
        return report | {"weights": weights.title if weights else None}

    def lines(self) -> RenderableType:
        """Count the arrays and values that were taken, new and left, with a few names."""
        report = self.report
        what = report.weights.title if report.weights else _KINDS[report.names]
        taken = [k if k == n else f"{k} -> {n}" for k, n in report.read.items()]
        rows = [
            ("taken", self.values.taken, taken),
            ("new", self.values.new, report.initial),
            ("left", self.values.left, report.unused),
        ]
        texts = [f"{what}: {self.source}"]
        for kind, count, names in rows:
            more = ["..."] if len(names) > _EXAMPLES else []
            examples = ", ".join([*names[:_EXAMPLES], *more])
            texts.append(f"  {kind:<5} {len(names):>6,} arrays {count:>13,} values  {examples}")
        notes = [Text(f"note: {note}") for note in report.notes]
        return Group(*(Text(text, no_wrap=True, overflow="ellipsis") for text in texts), *notes)


def load(
    run: Setup,
    source: str,
    *,
    trained_with: str | None = None,
    new_classifier: bool | None = None,
    allow_nonfinite: bool = False,
) -> InitialWeights:
    """Read weights for the network of a run, from a file or folder as for `weight_files.read`.

    Without ``trained_with``, it is the norm in the file's metadata, or the norm of its publisher,
    or the network's. The other options are as in `fnet.interop.torch.load_state_dict`.
    """
    weights = weight_files.read(source)
    names = _field(weights.metadata, "classes", lambda names: tuple(map(str, names))) or ()
    classes = run.task.dataset.classes
    order, is_said = order_of(classes, names)
    are_others = order is None and len(names) == len(classes) and is_named(names)
    if are_others and new_classifier is False:
        raise UserError(
            f"{source}: weights for other classes: {shorten(names)}, not {shorten(classes)}; "
            "--new-classifier leaves the classifier at its initial values"
        )
    network = weight_files.describe_network(run.config)
    norm, shapes = network["norm"], run.state_shapes
    try:
        found = interop.unwrap(weights.state_dict, weights.entry)
        publisher = families.recognize(families.shapes_of(found.arrays))
        trained_with = trained_with or weights.metadata.get("norm")
        if trained_with is None and publisher is not None:
            trained_with = publisher.norm
        if not {norm, trained_with} <= {"abn", "batch", None}:
            trained_with = norm  # no conversion
        loaded = interop.load_state_dict(
            shapes.params,
            shapes.model_state,
            weights.state_dict,
            norm=norm,
            trained_with=trained_with,
            new_classifier=new_classifier or (True if are_others else new_classifier),
            entry=weights.entry,
            allow_nonfinite=allow_nonfinite,
        )
    except (TypeError, ValueError) as error:
        theirs, ours = weights.metadata.get("network"), network["network"]
        which = (
            f"weights of {theirs}, the network is {ours}: " if theirs not in (None, ours) else ""
        )
        raise UserError(f"{source}: {which}{weight_files.with_flags(error)}") from error
    report, options = loaded.report, weights.metadata
    if publisher is not None:
        own = {"activation": publisher.activation} if publisher.activation else {}
        options = {
            name: str(value) for name, value in {**own, **publisher.options}.items()
        } | options
    notes = (*map(weight_files.with_flags, report.notes), *_differences(options, network))
    is_kept = any(families.is_classifier(name) for name in report.read.values())
    old = _field(weights.metadata, "scaling", lambda fields: Scaling(**fields))
    new = run.task.dataset.scaling
    if is_kept and new and not old:
        notes += ("the scale of its outputs is not known: they count as standardized numbers",)
    if is_kept and old and not new:
        notes += ("its outputs were standardized numbers",)
    if are_others:
        notes += (f"the classifier is new, because the weights are for {shorten(names)}",)
    elif is_kept and not is_said:
        outputs = shorten(names) if is_named(names) else "which have no names"
        ours = "the classes by number" if order else f"{shorten(classes)} in this order"
        notes += (f"the classifier is kept: its outputs, {outputs}, are taken for {ours}",)

    def variable(path: Any, a: Any) -> Any:
        """Return an array with its outputs in the order of the classes; None if it is new."""
        if isinstance(a, jax.ShapeDtypeStruct):
            return None
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not families.is_classifier(name):
            return a
        a = a[..., order] if order else a
        if not (old and new):
            return a
        # The same numbers, with the scaling of this run.
        mean, std = (np.asarray(v)[list(order)] if order else np.asarray(v) for v in old)
        shift = mean - np.asarray(new.mean) if name.endswith("bias") else 0.0
        return ((np.asarray(a) * std + shift) / np.asarray(new.std)).astype(a.dtype)

    params = jax.tree_util.tree_map_with_path(variable, loaded.params)
    variables = params, jax.tree_util.tree_map_with_path(variable, loaded.state)
    sizes = {key: math.prod(shape) for key, shape in families.shapes_of(found.arrays).items()}
    taken = sum(sizes[key] for key in report.read)
    total = sum(a.size for a in jax.tree.leaves((shapes.params, shapes.model_state)))
    values = Values(taken, total - taken, sum(sizes.values()) - taken)
    return InitialWeights(variables, report._replace(notes=notes), values, source)


def load_configured(run: Setup) -> InitialWeights | None:
    """Read the weights of ``model.pretrained``; None without it."""
    source = run.config.model.pretrained
    return None if source is None else load(run, source)


def _field(metadata: dict[str, str], name: str, make: Callable[[Any], T]) -> T | None:
    """Return a field of weights as a value; None if it is missing, or of another program."""
    try:
        return make(json.loads(metadata[name]))
    except (KeyError, ValueError, TypeError):
        return None


def _differences(theirs: dict[str, str], ours: dict[str, str]) -> tuple[str, ...]:
    """Compare the network's options with the weights' options, which array shapes do not show."""
    return tuple(
        f"{name} is {ours[name]} here; the weights were trained with {theirs[name]}"
        for name in ours
        if name in _NOT_IN_ARRAYS and name in theirs and theirs[name] != ours[name]
    )
