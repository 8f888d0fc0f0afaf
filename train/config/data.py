"""Data sources: what a run, an evaluation and a prediction ask of one."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from train.config.registry import Variant
from train.config.section import WholeConfig
from train.errors import UserError

Content = Literal["images", "masks", "text", "preferences"]
"""Images with labels or segmentation masks, rows of tokens, or pairs of these."""


class _Options:
    """Options that only some sources have, with what holds without them.

    A source that has one defines a field of this name, whose help text says what it does.
    """

    source: str
    batch_size: int
    path: str | tuple[str, ...] | None = None
    user: str | None = None
    """Source of users' names; privacy is then per user."""
    examples_per_user: int | None = None
    workers: int | None = None
    """Number of processes that decode images; None if the source never has any."""
    mean: tuple[float, ...] = ()
    """Mean that is subtracted from images, per channel; () does not normalize them."""
    std: tuple[float, ...] = ()
    mixup: float = 0.0
    cutmix: float = 0.0
    targets: str = "class"
    """Kind of labels, a name in `train.tasks.targets.KINDS`."""
    test_fraction: float = 0.0
    split_seed: int | None = None
    folds: int | None = None
    """Number of folds of a cross-validation; None holds out a fraction."""
    fold: int = 1
    class_weights: str | None = None
    balanced: bool = False
    repeats: int = 1
    weights: tuple[float, ...] = ()
    mask_reading: str | None = "index"
    """How masks are read; None finds it in the masks."""
    crops: int = 1
    beta: float = 0.0
    objective: str = "dpo"


@dataclass(frozen=True)
class Data(_Options, Variant, section="data", tag="source", package="train.data"):
    """A data source.

    A subclass is a frozen dataclass. It must have the fields ``source``, its name, and
    ``batch_size``, which `registry.variants` checks, and define `load`. All else has a default.

    Attributes:
      content: What an example is.
      evaluation_options: Options of ``fnet eval`` that the source has, and the field that each one
        sets.
      is_in_unit_interval: Whether floating images are in [0, 1] for certain, as denoisers need.
    """

    required = ("source", "batch_size")
    content: ClassVar[Content] = "images"
    evaluation_options: ClassVar[dict[str, str]] = {}
    is_in_unit_interval: ClassVar[bool] = True

    def load(self, *, private: bool = False) -> Any:
        """Load the data as a `train.data.Dataset`.

        Args:
          private: whether training is differentially private, so that each example must be in one
            row.

        Raises:
          UserError: if they are missing or damaged.
        """
        raise UserError(f"data.source: {type(self).__name__} must define load")

    def load_test(self, trained: Callable[[], Any]) -> Any:
        """Load the test examples alone, for a network whose `train.data.Outputs` are ``trained()``.

        A folder without splits is used whole. None if the source cannot do that.
        """
        return None

    def for_evaluation(self, options: Mapping[str, Any]) -> Self:
        """Return the section with options of ``fnet eval``, some of `evaluation_options`."""
        return self.replace(**{self.evaluation_options[n]: v for n, v in options.items()})

    def with_fold(self, fold: int, folds: int) -> Self:
        """Return the section with a fold of a cross-validation held out."""
        if "folds" not in {field.name for field in dataclasses.fields(self)}:
            raise UserError(f"--folds: data.source {self.source} has no folds; give another source")
        if self.folds not in (None, folds):  # of the config of a fold, all go on
            raise UserError(
                f"--folds: {folds}, but data.folds is {self.folds}, of which one run holds out "
                f"fold {self.fold}; give one of them"
            )
        return self.replace(fold=fold, folds=folds)

    def without_users(self) -> Self:
        """Return the section without users, for an evaluation without training examples."""
        return self if self.user is None else self.replace(user=None, examples_per_user=None)

    def placeholder(self) -> Any:
        """Return a `train.data.placeholder.Placeholder` for data that are not there, or None."""
        return None

    @property
    def scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation of numbers to predict; None measures them."""
        return None

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """Shape [H, W, C] of the network's input; None if only the data have it."""
        return None

    @property
    def preprocessor(self) -> Any:
        """`train.data.preprocessing.Preprocessor` of image files, as in evaluation."""
        raise UserError(
            f"data.source: {self.source} does not define how to convert image files to its size "
            "and value range; use a run on image_folder, for example"
        )

    def check(self, config: WholeConfig) -> None:
        """Check the options of folds and users."""
        if self.folds is None and self.fold != 1:
            raise UserError(
                f"data.fold: {self.fold}, but there are no folds; give data.folds, or leave it out"
            )
        most = self.examples_per_user
        if self.user is None:
            if most is not None:
                raise UserError(
                    f"data.examples_per_user: {most}, but there are no users; give data.user"
                )
            return
        if most is None:
            raise UserError(
                "data.examples_per_user: data.user needs it, too; give the largest number of "
                "examples of a user per step, for example 8"
            )
        if not config.is_private:
            raise UserError(
                f"data.user: {self.user}, but users are protected by noise only; give grad.mode "
                "clipped with grad.epsilon or grad.noise_multiplier"
            )

    def check_statistics(self, dataset: Any = None) -> None:
        """Refuse each number that is computed from training examples, because they are private.

        What is released of them passes through the clipped sum, to which noise is added, and in no
        other way. A ``dataset`` is asked, too, because others may have written its source.
        """
        weights, scaling, label_map = (
            getattr(dataset, name, None) for name in ("class_weights", "scaling", "label_map")
        )
        computed = "class_weights", "balanced", "repeats", "weights", "folds"
        given = [name for name in computed if getattr(self, name) != getattr(_Options, name)]
        for name in given + ["class_weights"] * (weights is not None):
            raise UserError(
                f"data.{name}: {getattr(self, name)}, but this depends on all training examples, "
                "and a private run releases them only with noise and Poisson sampling; leave it out"
            )
        is_unscaled = self.targets == "numbers" and self.scaling is None
        if is_unscaled or scaling not in (None, self.scaling):
            raise UserError(
                "data.targets: numbers are standardized by mean and deviation of the training "
                "labels, which no noise hides in a private run; give data.label_mean and "
                "data.label_std, as far as they are known without the data"
            )
        if self.mask_reading is None or (label_map and label_map.palette):
            raise UserError(
                "data.mask_reading: None looks at training masks, whose palettes would be "
                "published, and no noise hides them in a private run; give index or color"
            )

    @property
    def identity(self) -> tuple[object, ...]:
        """Identity of the data: equal for two runs of the same data."""
        return self.source, self.path

    @property
    def longest_row(self) -> int | None:
        """Largest length of rows of text; None if all have the same."""
        return None
