"""Classes of a run, saved in its folder so that prediction does not need the training data."""

import itertools
import json

from train import tasks
from train.config import Config
from train.data.masks import LabelMap, plain_label_map
from train.errors import UserError
from train.run.run_folder import RunFolder, as_json, atomic_write


def write_classes(
    folder: RunFolder, classes: tuple[str, ...], label_map: LabelMap | None = None
) -> None:
    """Write the names of labels 0, 1, ..., if there are any, and what values of masks mean."""
    if classes:
        masks = {"masks": label_map.as_dict()} if label_map else {}
        atomic_write(folder.classes, as_json({"classes": list(classes)} | masks))


def check_classes(
    folder: RunFolder, classes: tuple[str, ...], label_map: LabelMap | None = None
) -> None:
    """Check that the labels of the data mean the same as when the run began.

    Args:
      folder: folder of the run; without class names in it, any are accepted.
      classes: class names of the data.
      label_map: labels of the values of masks, if there are masks.

    Raises:
      UserError: for the first label that has another name, or for a mask's value that has another
        label.
    """
    if not folder.classes.is_file():
        return
    names, saved_map = _read(folder)
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


def read_classes(folder: RunFolder, config: Config) -> tuple[str, ...]:
    """Return the names of labels 0, 1, ..., from the run's folder or else from its dataset.

    Raises:
      UserError: if neither has them.
    """
    return _read(folder)[0] if folder.classes.is_file() else tasks.load(config).classes


def read_label_map(folder: RunFolder, config: Config) -> LabelMap:
    """Return the labels of the values of masks, from the run's folder or else from its dataset.

    Raises:
      UserError: if neither has them.
    """
    if not folder.classes.is_file():
        dataset = tasks.load(config)
        return dataset.label_map or plain_label_map(dataset.classes)
    names, label_map = _read(folder)
    return label_map or plain_label_map(names)


def _read(folder: RunFolder) -> tuple[tuple[str, ...], LabelMap | None]:
    path = folder.classes
    try:
        plain = json.loads(path.read_bytes())
        names = plain["classes"]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("it has no class names")
        label_map = LabelMap.from_dict(plain["masks"]) if "masks" in plain else None
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return tuple(names), label_map
