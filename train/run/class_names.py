"""Classes of a run, saved in its folder so that prediction does not need the training data."""

import itertools
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from train import tasks
from train.config import Config
from train.data import Outputs, Scaling
from train.data.label_map import IGNORE, LabelMap
from train.errors import UserError
from train.run.run_folder import RunFolder
from train.stored import Stored, StoredError


class _Scaling(Stored):
    mean: tuple[FiniteFloat, ...]
    std: tuple[FiniteFloat, ...]


class _Classes(Stored):
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
                f"{now or 'none'}" + "; name them in a classes.csv" * bool(outputs.label_map)
            )
    then_map, now_map = saved.label_map, outputs.label_map
    if then_map and now_map:
        _compare_masks(then_map, now_map, began)
    before, after = saved.scaling, outputs.scaling
    if before and after and before != after:
        raise UserError(
            f"data: mean and deviation of the numbers differ from {began}: they were "
            f"{before.mean} and {before.std}; they are {after.mean} and {after.std}; restore the "
            "table, or start a new run"
        )


def _compare_masks(then: LabelMap, now: LabelMap, began: str) -> None:
    """Check that masks mean the same. Older runs saved no reading, and ignored 255 unsaid."""
    before, after, colors = dict(then.values), dict(now.values), dict(then.palette)
    if then.reading is None and IGNORE not in after and before.get(IGNORE) == IGNORE:
        del before[IGNORE]
    is_same = before == after and then.codes == now.codes and then.reading in (None, now.reading)
    if is_same and all(colors.get(index, color) == color for index, color in now.palette):
        return
    reading = f" --data.mask-reading {then.reading}" if then.reading else ""
    raise UserError(
        f"data: the values or colors of masks differ from {began}: they were "
        f"{then.describe_values()}; they are {now.describe_values()}; give "
        f"{then.describe_options()}{reading}, or the class table of the run"
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
