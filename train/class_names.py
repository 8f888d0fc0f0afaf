"""The names of a run's classes, in its folder: what is predicted needs no training data."""

import json

from train.config import Config
from train.errors import UserError
from train.run_folder import RunFolder, as_json, write_whole
from train.tasks import build


def write_classes(folder: RunFolder, classes: tuple[str, ...]) -> None:
    """Writes the names of labels 0, 1, ... where there are any."""
    if classes:
        write_whole(folder.classes, as_json({"classes": list(classes)}))


def read_classes(folder: RunFolder, config: Config) -> tuple[str, ...]:
    """The names of labels 0, 1, ...; of a run that did not write them, its dataset's.

    Raises:
      UserError: if they are in neither.
    """
    path = folder.classes
    if not path.is_file():
        return build(config).dataset.classes
    try:
        names = json.loads(path.read_bytes())["classes"]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("it names no classes")
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return tuple(names)
