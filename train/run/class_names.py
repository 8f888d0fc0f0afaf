"""Classes of a run, saved in its folder so that prediction does not need the training data."""

import itertools
import json

from train import tasks
from train.config import Config
from train.data import Outputs, Scaling
from train.data.masks import LabelMap, plain_label_map
from train.errors import UserError
from train.run.run_folder import RunFolder, as_json, atomic_write


def write_classes(
    folder: RunFolder,
    classes: tuple[str, ...],
    label_map: LabelMap | None = None,
    scaling: Scaling | None = None,
) -> None:
    """Write the names of the outputs, if there are any, and what masks or numbers mean."""
    if classes:
        masks = {"masks": label_map.as_dict()} if label_map else {}
        numbers = {"scaling": scaling._asdict()} if scaling else {}
        atomic_write(folder.classes, as_json({"classes": list(classes)} | masks | numbers))


def check_classes(
    folder: RunFolder,
    classes: tuple[str, ...],
    label_map: LabelMap | None = None,
    scaling: Scaling | None = None,
) -> None:
    """Check that the labels of the data mean the same as when the run began.

    Raises:
      UserError: for the first label that has another name, for a mask's value that has another
        label, or for numbers of another mean or deviation.
    """
    if not folder.classes.is_file():
        return
    names, saved_map, saved_scaling = _read(folder)
    for label, (then, now) in enumerate(itertools.zip_longest(names, classes)):
        if then != now:
            raise UserError(
                f"data: the classes differ from those that {folder.path} began with: label "
                f"{label} was {then or 'none'}, is {now or 'none'}"
            )
    if saved_map and label_map and saved_map != label_map:
        raise UserError(
            f"data: the values of masks differ from those that {folder.path} began with: they were "
            f"{saved_map.describe_values()}; they are {label_map.describe_values()}"
        )

    if saved_scaling and scaling and saved_scaling != scaling:
        raise UserError(
            f"data: mean and deviation of the numbers differ from those that {folder.path} began "
            f"with: they were {saved_scaling.mean} and {saved_scaling.std}; they are "
            f"{scaling.mean} and {scaling.std}; restore the table, or start a new run"
        )


def read_classes(folder: RunFolder, config: Config) -> tuple[str, ...]:
    """Return the names of labels 0, 1, ..., from the run's folder or else from its dataset.

    Raises:
      UserError: if neither has them.
    """
    return _read(folder).names if folder.classes.is_file() else tasks.load(config).classes


def read_outputs(folder: RunFolder, config: Config) -> Outputs:
    """Return what the outputs mean, from the run's folder or else from its dataset.

    Raises:
      UserError: if neither has them.
    """
    if folder.classes.is_file():
        return _read(folder)
    dataset = tasks.load(config)
    return Outputs(dataset.classes, dataset.label_map, dataset.scaling)


def read_label_map(folder: RunFolder, config: Config) -> LabelMap:
    """Return the labels of the values of masks, as `read_outputs`."""
    outputs = read_outputs(folder, config)
    return outputs.label_map or plain_label_map(outputs.names)


def _read(folder: RunFolder) -> Outputs:
    path = folder.classes
    try:
        plain = json.loads(path.read_bytes())
        names = plain["classes"]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("it has no class names")
        label_map = LabelMap.from_dict(plain["masks"]) if "masks" in plain else None
        scaling = None
        if "scaling" in plain:
            scaling = Scaling(*(tuple(map(float, plain["scaling"][n])) for n in Scaling._fields))
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return Outputs(tuple(names), label_map, scaling)
