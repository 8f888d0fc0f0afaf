"""The names of a run's classes, in its folder: what is predicted needs no training data."""

import itertools
import json

from train.config import Config
from train.errors import UserError
from train.run.run_folder import RunFolder, as_json, atomic_write
from train.tasks import build


def write_classes(folder: RunFolder, classes: tuple[str, ...]) -> None:
    """Writes the names of labels 0, 1, ... where there are any."""
    if classes:
        atomic_write(folder.classes, as_json({"classes": list(classes)}))


def check_classes(folder: RunFolder, classes: tuple[str, ...]) -> None:
    """Refuses data whose labels mean something else than when the run was begun.

    Args:
      folder: of a run; one that names no classes accepts any.
      classes: of the data there are now.

    Raises:
      UserError: then; it names the first that differs.
    """
    if not folder.classes.is_file():
        return
    for label, (then, now) in enumerate(itertools.zip_longest(_read(folder), classes)):
        if then != now:
            raise UserError(
                f"data: the classes are not those that {folder.path} was begun with: label "
                f"{label} was {then or 'none'}, is {now or 'none'}"
            )


def read_classes(folder: RunFolder, config: Config) -> tuple[str, ...]:
    """The names of labels 0, 1, ...; of a run that did not write them, its dataset's.

    Raises:
      UserError: if they are in neither.
    """
    return _read(folder) if folder.classes.is_file() else build(config).dataset.classes


def _read(folder: RunFolder) -> tuple[str, ...]:
    path = folder.classes
    try:
        names = json.loads(path.read_bytes())["classes"]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("it names no classes")
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return tuple(names)
