"""One open run: config -> data -> network -> weights, as every command reads it.

Training writes into the folder what later commands need without the training data: what the outputs
mean (classes.json), and config and tokenizer of a published model.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, FiniteFloat

from train.arguments import EvalArguments, flag_of, given_options
from train.config import Config, Optim, Train
from train.data import Dataset, Outputs, Scaling, model_folder, num_examples
from train.data.canaries import add_canaries
from train.data.chat_file import ChatFile
from train.data.files import describe_copies, describe_images
from train.data.image_folder import ImageFolder
from train.data.label_map import LabelMap
from train.data.text import Text
from train.errors import UserError, warn, writing
from train.gradients.mean import Mean
from train.networks.model_images import image_data
from train.networks.pretrained import Pretrained
from train.networks.published import network as published
from train.output.logged import Summary, read_metrics, total_steps
from train.run.checkpoints import RestoredNetwork, load_network
from train.run.run_folder import RunFolder
from train.run.same_data import compare_data, describe_data, write_data
from train.run.seeds import create_secret
from train.run.setup import Setup, setup
from train.stored import Stored, StoredError
from train.tasks import Kind, images, kind_of, load

_PLACE = ("split", "path")
"""Options of ``fnet eval`` that name other test examples."""
_MIN_SIDE = 8
"""Smallest side of a scaled image in pixels, from which a network computes one feature."""


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

    def replace(self, **sections: Any) -> Self:
        """Return the run with other sections of its config."""
        opened = copy.copy(self)
        opened.config = self.config.replace(**sections)
        return opened

    @classmethod
    def of(cls, given: str, *, or_model: bool = False) -> Self:
        """Open the run of a folder or config.json that a user gives, or a published model."""
        folder = RunFolder.of(given)
        is_model = or_model and model_folder.is_model_folder(folder.path)
        if or_model and not folder.path.exists():
            near = folder.similar_run()
            raise UserError(
                f"no run or model {given}{near}; {model_folder.how_to_get(folder.path)}"
            )
        return cls(folder, published_config(str(folder.path)) if is_model else None)

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

    def for_evaluation(self, options: EvalArguments) -> Self:
        """Return the run with options of ``fnet eval`` in its config."""
        data, kind = self.config.data, self.kind
        changed = [n for n in _PLACE + kind.data_options if n in data.evaluation_options]
        allowed = (*changed, *kind.options)
        given = {name: v for name, v in given_options(options).items() if name != "best"}
        for name in given:
            if name not in allowed:
                raise UserError(
                    f"{flag_of(name)}: {self.folder.path} is a run of {self.config.model.name} on "
                    f"{data.source}; its options: {', '.join(map(flag_of, allowed)) or 'none'}"
                )
        changes = {name: value for name, value in given.items() if name in changed}
        opened = self.replace(data=data.for_evaluation(changes))
        for scale in options.scales:
            side = round(scale * images.image_shape(opened.config)[0])
            if side < _MIN_SIDE:
                raise UserError(
                    f"--scales: {scale:g} resizes images to {side} pixels; expected at least "
                    f"{_MIN_SIDE} pixels"
                )
        return opened

    def notes_on_test(self, dataset: Dataset) -> tuple[str, ...]:
        """Return notes about other test examples, such as images that the run was trained on."""
        if dataset.test_name is None:
            return dataset.notes
        test = [*map(dataset.test_name, range(num_examples(dataset.test)))]
        notes = describe_images(test)
        with contextlib.suppress(UserError):  # the data of the run may be gone
            own = load(self.folder.read_config())
            if own.name is not None:
                notes += describe_copies(map(own.name, range(num_examples(own.train))), test)
        return (*dataset.notes, *notes)

    def setup(self, dataset: Dataset | None = None, *, without_users: bool = False) -> Setup:
        """Load the data, or take a dataset in their place, and build the network.

        Numbers keep the scaling of the run, whatever rows its table has by now. Without users, the
        gradient is a plain mean, about which nothing is checked.

        Raises:
          UserError: if labels of the data do not mean what they did when the run began.
        """
        dataset = dataset or load(self.config)
        if dataset.scaling and self.outputs.scaling:
            dataset = dataset._replace(scaling=self.outputs.scaling)
        config = self.config
        if without_users:
            config = config.replace(data=config.data.without_users(), grad=Mean())
        run = setup(config, dataset=dataset)._replace(config=self.config)
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

    def network(
        self, model: Any = None, *, best: bool = False, place: Any = None
    ) -> tuple[Any, RestoredNetwork]:
        """Build the network, or take it, and restore the weights as `load_network` does."""
        model = model or self.build_network()
        network = load_network(self.folder, model, best=best, place=place)
        self.warn_unfinished(network.step)
        return model, network

    def warn_unfinished(self, step: int) -> None:
        """Print a line if the run, whose network is of this step, was not finished."""
        folder = self.folder
        with contextlib.suppress(UserError):  # a damaged log does not matter here
            lines, summary = read_metrics(folder.metrics), folder.read(Summary, folder.summary)
            total = total_steps(self._trained.train, lines)
            if lines and not (summary and summary.is_of(lines[-1]["step"], total)):
                warn(
                    f"{folder.path}: step {step:,}{f' of {total:,}' if total else ''}: the run was "
                    f"not finished; continue it with fnet train {folder.as_config} --resume"
                )

    def build_network(self) -> Any:
        """Build the network alone."""
        return self.kind.network(self.config, lambda: self.outputs.names)


def published_config(given: str) -> Config:
    """Return a config that fine-tunes a published model as a whole.

    Images have the size, the mean and the standard deviation of preprocessor_config.json.
    """
    path = Path(given)
    source = model_folder.read_folder(path)
    data: ChatFile | ImageFolder = ChatFile()
    if published.match(source, "float32")[0].losses is None:
        data = image_data(source.path, source.config)
    name = path.resolve().name
    valid = "".join(c if c.isalnum() or c in "_.-" else "-" for c in name).lstrip("_.-")
    return Config(
        name=valid or "model",
        data=data,
        model=Pretrained(path=str(path.resolve())),
        optim=Optim(name="adamw", learning_rate=1e-5, warmup_steps=100),
        train=Train(epochs=1.0, precision="bfloat16"),
    )


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
    """Check that masks mean the same."""
    before, after, colors = dict(then.values), dict(now.values), dict(then.palette)
    is_same = before == after and then.codes == now.codes and then.reading == now.reading
    if is_same and all(colors.get(index, color) == color for index, color in now.palette):
        return
    raise UserError(
        f"data: the values or colors of masks differ from {began}: they were "
        f"{then.describe_values()}; they are {now.describe_values()}; give "
        f"{then.describe_options()} --data.mask-reading {then.reading}, or the class table of the "
        "run"
    )


def begin(
    folder: RunFolder,
    config: Config,
    data: dict[str, Any] | None = None,
    imported: dict[str, Any] | None = None,
    *,
    run_id: str | None = None,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Make a folder a run's, with what `save` writes, and config and tokenizer of its model."""
    folder.create(config, run_id)
    create_secret(folder, config)
    if isinstance(config.model, Pretrained):  # whose weights stay where they are
        with writing(folder.model):
            folder.model.mkdir(exist_ok=True)
            copy_small_files(folder.model, Path(config.model.path))
            if isinstance(config.data, Text):
                _copy_own_text_files(folder.model, config.data)
    save()
    if data is not None:
        write_data(folder, config, data)
    folder.write_config(config)  # last: it makes the folder a run's
    if imported is not None:
        folder.write(folder.imported, imported)


def copy_small_files(
    to: Path, source: Path, names: Iterable[str] = model_folder.SMALL_FILES
) -> None:
    """Copy config and tokenizer, as far as a folder has them."""
    for name in names:
        if (source / name).is_file():
            (to / name).write_bytes((source / name).read_bytes())


def _copy_own_text_files(to: Path, data: Text) -> None:
    """Copy the tokenizer and the chat template of a config in place of the model's."""
    if data.tokenizer is not None:
        path = Path(data.tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        for name in model_folder.TEXT_FILES:
            (to / name).unlink(missing_ok=True)
        copy_small_files(to, path.parent, model_folder.TEXT_FILES)
        (to / "tokenizer.json").write_bytes(path.read_bytes())
    if data.chat_template is not None:
        (to / "chat_template.jinja").write_bytes(Path(data.chat_template).read_bytes())
