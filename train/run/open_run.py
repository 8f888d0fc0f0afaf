"""One open run: config -> data -> network -> weights, as every command reads it.

Training writes into the folder what later commands need without the training data: what the outputs
mean (classes.json), and config and tokenizer of a published model.
"""

import copy
import functools
import itertools
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from train.config import Config
from train.data import Dataset, Outputs, Scaling
from train.data.canaries import add_canaries
from train.data.label_map import IGNORE, LabelMap
from train.data.model_folder import SMALL_FILES
from train.data.text import Text
from train.errors import UserError, writing
from train.networks.pretrained import Pretrained
from train.run.checkpoints import RestoredNetwork, load_network
from train.run.run_folder import RunFolder
from train.run.same_data import compare_data, describe_data
from train.run.setup import Setup, setup
from train.stored import Stored, StoredError
from train.tasks import Kind, kind_of, load


class OpenRun:
    """A run's folder. Each part is read when it is asked for.

    Attributes:
      config: Config of the folder, or the given one, with the run's own tokenizer: one that changes
        later does not change the run.

    Raises:
      UserError: if there is no run, or its published model was moved.
    """

    def __init__(self, folder: RunFolder, config: Config | None = None):
        self.folder, self.config = folder, config or folder.read_config()
        model, text = self.config.model, self.config.data
        if isinstance(model, Pretrained) and not Path(model.path).is_dir():
            raise UserError(
                f"model.path: {model.path} is not a folder; if the model was moved, change "
                f"model.path in {folder.config}"
            )
        own = folder.model / "tokenizer.json"
        if model.is_published and isinstance(text, Text) and not text.tokenizer and own.is_file():
            self.config = self.config.replace(data=text.replace(tokenizer=str(own)))
        self._trained = self.config

    def replace(self, **sections: Any) -> "OpenRun":
        """Return the run with other sections of its config."""
        opened = copy.copy(self)
        opened.config = self.config.replace(**sections)
        return opened

    @property
    def kind(self) -> Kind:
        """Kind of the task."""
        return kind_of(self.config)

    @functools.cached_property
    def outputs(self) -> Outputs:
        """Meaning of the outputs, from the folder or else from the data."""
        if self.folder.classes.is_file():
            return _read_outputs(self.folder)
        return load(self._trained).outputs

    def setup(self, dataset: Dataset | None = None, **sections: Any) -> Setup:
        """Load the data and build the network, perhaps with other sections than the config has.

        Numbers keep the scaling of the run, whatever rows its table has by now.

        Raises:
          UserError: if labels of the data do not mean what they did when the run began.
        """
        dataset = dataset or load(self.config)
        if dataset.scaling and self.outputs.scaling:
            dataset = dataset._replace(scaling=self.outputs.scaling)
        run = setup(self.config.replace(**sections), dataset=dataset)._replace(config=self.config)
        check_classes(self.folder, run.task.dataset.outputs)
        run.task.before_batches(None if self.config.is_release_only else self.folder.reference)
        return run

    def data_change(self, run: Setup) -> str | None:
        """Say how data and config differ from those that the run was trained with."""
        dataset, canaries = run.task.dataset, self.config.grad.num_canaries
        if canaries and not dataset.canaries:  # it was set up with another gradient mode
            dataset = add_canaries(dataset, canaries)
        data = describe_data(dataset, self.config.data, private=self.config.is_private)
        return compare_data(self.folder, self.config, data)

    def network(self, *, best: bool = False) -> tuple[Any, RestoredNetwork]:
        """Build the network and restore its weights, without the data of the run."""
        model = self.build_network()
        return model, load_network(self.folder, model, best=best)

    def build_network(self) -> Any:
        """Build the network alone."""
        return self.kind.network(self.config, lambda: self.outputs.names)


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


def _read_outputs(folder: RunFolder) -> Outputs:
    plain = folder.read(_Classes, folder.classes)
    assert plain is not None  # the callers have looked
    try:
        label_map = None if plain.masks is None else LabelMap.from_dict(plain.masks)
    except (ValueError, TypeError, LookupError) as error:
        raise StoredError(folder.classes, error) from error
    scaling = Scaling(plain.scaling.mean, plain.scaling.std) if plain.scaling else None
    return Outputs(plain.classes, label_map, scaling)


def check_classes(folder: RunFolder, outputs: Outputs) -> None:
    """Check that the labels of the data mean the same as when the run began."""
    if not folder.classes.is_file():
        return
    saved, began = _read_outputs(folder), f"those that {folder.path} began with"
    for label, (then, now) in enumerate(itertools.zip_longest(saved.names, outputs.names)):
        if then != now:
            raise UserError(
                f"data: the classes differ from {began}: label {label} was {then or 'none'}, is "
                f"{now or 'none'}" + "; name them in a classes.csv" * bool(outputs.label_map)
            )
    if saved.label_map and outputs.label_map:
        _compare_masks(saved.label_map, outputs.label_map, began)
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


def copy_model_files(folder: RunFolder, config: Config) -> None:
    """Copy a published model's config and tokenizer to the run; the weights stay where they are."""
    if isinstance(config.model, Pretrained):
        with writing(folder.model):
            folder.model.mkdir(exist_ok=True)
            copy_small_files(folder.model, Path(config.model.path))


def copy_small_files(to: Path, *sources: Path) -> None:
    """Copy config and tokenizer, each from the first source that has it."""
    for name in SMALL_FILES:
        found = [source / name for source in sources if (source / name).is_file()]
        if found:
            (to / name).write_bytes(found[0].read_bytes())
