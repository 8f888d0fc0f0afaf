"""Class names of a run, saved in its folder so that prediction does not need the training data."""

import itertools
import json

from train.config import Config
from train.errors import UserError
from train.run.run_folder import RunFolder, as_json, atomic_write
from train.tasks import build


def write_classes(folder: RunFolder, classes: tuple[str, ...]) -> None:
    """Write the names of labels 0, 1, ..., if there are any."""
    if classes:
        atomic_write(folder.classes, as_json({"classes": list(classes)}))


def check_classes(folder: RunFolder, classes: tuple[str, ...]) -> None:
    """Check that the labels of the data mean the same as when the run began.

    Args:
      folder: folder of the run; without class names in it, any are accepted.
      classes: class names of the data.

    Raises:
      UserError: for the first label that has another name.
    """
    if not folder.classes.is_file():
        return
    for label, (then, now) in enumerate(itertools.zip_longest(_read(folder), classes)):
        if then != now:
            raise UserError(
                f"data: the classes differ from those that {folder.path} began with: label "
                f"{label} was {then or 'none'}, is {now or 'none'}"
            )


def read_classes(folder: RunFolder, config: Config) -> tuple[str, ...]:
    """Return the names of labels 0, 1, ..., from the run's folder or else from its dataset.

    Raises:
      UserError: if neither has them.
    """
    return _read(folder) if folder.classes.is_file() else build(config).dataset.classes


def _read(folder: RunFolder) -> tuple[str, ...]:
    path = folder.classes
    try:
        names = json.loads(path.read_bytes())["classes"]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("it has no class names")
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return tuple(names)
