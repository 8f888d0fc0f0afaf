"""Classes of a run, saved in its folder so that prediction does not need the training data."""

import itertools
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from train import tasks
from train.config import Config
from train.data import Outputs, Scaling
from train.data.label_map import LabelMap
from train.data.masks import compare_palettes
from train.errors import UserError
from train.run.run_folder import RunFolder
from train.stored import Stored, StoredError


class _Scaling(Stored):
    mean: tuple[FiniteFloat, ...]
    std: tuple[FiniteFloat, ...]


class _Classes(Stored):
    """Contents of classes.json."""

    classes: Annotated[tuple[str, ...], Field(min_length=1)]
    masks: dict[str, Any] | None = None
    scaling: _Scaling | None = None


def write_classes(folder: RunFolder, outputs: Outputs) -> None:
    """Write the names of the outputs, if there are any, and what masks or numbers mean."""
    if outputs.names:
        masks = {"masks": outputs.label_map.as_dict()} if outputs.label_map else {}
        numbers = {"scaling": outputs.scaling._asdict()} if outputs.scaling else {}
        folder.write(folder.classes, {"classes": list(outputs.names)} | masks | numbers)


def check_classes(folder: RunFolder, outputs: Outputs) -> None:
    """Check that the labels of the data mean the same as when the run began."""
    if not folder.classes.is_file():
        return
    saved, began = _read(folder), f"those that {folder.path} began with"
    for label, (then, now) in enumerate(itertools.zip_longest(saved.names, outputs.names)):
        if then != now:
            raise UserError(
                f"data: the classes differ from {began}: label {label} was {then or 'none'}, is "
                f"{now or 'none'}"
            )
    # How files are read follows from them; the classes of values and colors must stay.
    then_map, now_map = (m and m.without_readings() for m in (saved.label_map, outputs.label_map))
    if then_map and now_map and then_map != now_map:
        values = [m.describe_values() for m in (then_map, now_map)]
        how = f": they were {values[0]}; they are {values[1]}" if values[0] != values[1] else ""
        raise UserError(f"data: the values or colors of masks differ from {began}{how}")
    if saved.label_map and outputs.label_map:
        compare_palettes(saved.label_map, outputs.label_map.shown, began)
    before, after = saved.scaling, outputs.scaling
    if before and after and before != after:
        raise UserError(
            f"data: mean and deviation of the numbers differ from {began}: they were "
            f"{before.mean} and {before.std}; they are {after.mean} and {after.std}; restore the "
            "table, or start a new run"
        )


def read_outputs(folder: RunFolder, config: Config) -> Outputs:
    """Return what the outputs mean, from the run's folder or else from its dataset."""
    return _read(folder) if folder.classes.is_file() else tasks.load(config).outputs


def _read(folder: RunFolder) -> Outputs:
    plain = folder.read(_Classes, folder.classes)
    assert plain is not None  # the callers have looked
    try:
        label_map = None if plain.masks is None else LabelMap.from_dict(plain.masks)
    except (ValueError, TypeError, LookupError) as error:
        raise StoredError(folder.classes, error) from error
    scaling = Scaling(plain.scaling.mean, plain.scaling.std) if plain.scaling else None
    return Outputs(plain.classes, label_map, scaling)
