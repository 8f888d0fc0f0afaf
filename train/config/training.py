"""Optimizer, length, memory, devices and outputs of a run."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Le, Lt

from train.config import section
from train.config.section import Count, CountOrZero, Fraction, NonNegative, Positive, Section, Seed
from train.errors import UserError


@dataclass(frozen=True)
class Optim(Section):
    """Optimizer and learning rate schedule."""

    needs: ClassVar[section.Needs] = {
        **dict.fromkeys(("momentum", "nesterov"), ("name", ("sgd", "compact_sgd").__contains__)),
        **dict.fromkeys(("galore_rank", "galore_every"), ("name", "galore".__eq__)),
        **dict.fromkeys(
            ("decay_epochs", "decay_rate"),
            ("schedule", ("step", "multistep", "exponential").__contains__),
        ),
    }

    name: Literal[
        "sgd", "adam", "adamw", "lion", "adafactor", "compact_adamw", "compact_sgd", "compact_lion",
        "muon", "schedule_free_adamw", "galore",
    ] = "sgd"  # fmt: skip
    """Optimizer; compact ones have 8-bit states and need train.params_dtype bfloat16."""
    learning_rate: Positive = 0.1
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "linear", "step", "multistep", "exponential"] = "cosine"
    """Learning rate schedule; cosine and linear end at 0."""
    decay_epochs: tuple[Positive, ...] = (30.0,)
    """Epochs per decay (step, exponential), or epochs of each decay (multistep)."""
    decay_rate: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Learning rate factor per decay (step, multistep, exponential)."""
    warmup_steps: CountOrZero = 0
    """Steps of linear learning rate warmup from 0; a shorter run has a tenth of its steps."""
    momentum: Fraction = 0.9
    """Momentum of sgd and compact_sgd."""
    nesterov: bool = False
    """Use Nesterov momentum (sgd, compact_sgd)."""
    galore_rank: Count = 128
    """Number of directions that gradients are projected on (galore)."""
    galore_every: Count = 200
    """Steps between choices of the directions (galore)."""
    classifier_learning_rate: Positive | None = None
    """Peak learning rate of the classifier layer; None uses the same rate as all layers."""
    layer_decay: Annotated[float, Gt(0), Le(1)] | None = None
    """Learning rate factor per block, from the last to the first; None is the same rate for all."""
    weight_decay: NonNegative = 0.0
    """Weight decay of kernels; biases and norms have none."""
    clip_norm: Positive | None = None
    """Clip the gradient to this global norm; None does not clip."""
    label_smoothing: Fraction = 0.0
    """Label smoothing of the training loss."""
    focal: NonNegative = 0.0
    """Focal loss of classes: exponent that lowers easy examples; 2 is common, 0 is off."""
    expert_balance: NonNegative = 0.0
    """Factor of the load balancing loss of experts; 0.001 to 0.02 in published models."""
    freeze_backbone: bool = False
    """Train only the classifier, on a pretrained backbone whose statistics stay, too."""
    ema_decay: Annotated[float, Gt(0), Lt(1)] | None = None
    """Decay of the parameters' moving average (EMA), which is evaluated; None has no EMA."""

    @property
    def is_compact(self) -> bool:
        """Whether the optimizer has 8-bit states, for bfloat16 parameters."""
        return self.name.startswith("compact_")

    @property
    def is_schedule_free(self) -> bool:
        """Whether the optimizer averages parameters instead of decaying the learning rate."""
        return self.name == "schedule_free_adamw"

    def check(self, config: section.WholeConfig) -> None:
        """Check that the optimizer fits the dtype of the parameters and its own options."""
        if self.freeze_backbone:
            self._check_frozen(config)
        dtype = config.train.params_dtype
        if self.is_compact and dtype == "float32":
            raise UserError(
                f"optim.name: {self.name} has 8-bit states for bfloat16 parameters, but "
                "train.params_dtype is float32; give train.params_dtype bfloat16"
            )
        if not self.is_compact and dtype != "float32":
            raise UserError(
                f"train.params_dtype: {dtype}, but optim.name {self.name} loses steps that are "
                "below the precision of bfloat16; give optim.name compact_adamw, compact_sgd or "
                "compact_lion"
            )
        if self.is_schedule_free and self.schedule != "constant":
            raise UserError(
                f"optim.schedule: {self.schedule}, but optim.name {self.name} averages in place of "
                "a decay; give optim.schedule constant, with optim.warmup_steps"
            )
        if self.is_schedule_free and self.ema_decay is not None:
            raise UserError(
                f"optim.ema_decay: {self.ema_decay:g}, but optim.name {self.name} evaluates its "
                "own average; give None"
            )
        for field in ("classifier_learning_rate", "layer_decay"):
            value = getattr(self, field)
            if (self.is_compact or self.is_schedule_free) and value is not None:
                raise UserError(
                    f"optim.{field}: {value:g}, but optim.name {self.name} has one learning rate "
                    "for all layers; give None"
                )
        if self.layer_decay is not None and config.data.content in ("text", "preferences"):
            raise UserError(
                f"optim.layer_decay: {self.layer_decay:g}, but it is for image networks"
            )

    def _check_frozen(self, config: section.WholeConfig) -> None:
        if config.model.task_for(config.data) != "classification":
            raise UserError("optim.freeze_backbone: is for classifiers of images; give False")
        if config.model.pretrained is None and not config.model.is_published:
            raise UserError(
                "optim.freeze_backbone: the backbone has random weights; give model.pretrained"
            )
        if self.layer_decay is not None or self.is_compact or self.is_schedule_free:
            raise UserError(
                f"optim.freeze_backbone: is not for optim.name {self.name} and optim.layer_decay; "
                "give False"
            )


@dataclass(frozen=True)
class Train(Section):
    """Length, precision and random seed of the run."""

    epochs: Positive = 10.0
    """Passes over the training examples."""
    steps: Count | None = None
    """Number of training steps; overrides epochs."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and their gradients; the optimizer computes in float32."""
    params_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of kernels and embeddings; bfloat16 needs a compact optimizer. Others are float32."""
    seed: Seed = 0
    """Random seed of initialization, data order, augmentation, dropout; with privacy, the first."""
    log_every: Count = 10
    """Steps between lines of metrics."""
    eval_every: Count | None = None
    """Steps between evaluations; None evaluates once per epoch."""
    patience: Count | None = None
    """Evaluations without a better checkpoint.metric after which the run ends; None is never."""

    def check(self, config: section.WholeConfig) -> None:
        """Check that a private run does not end early."""
        if self.patience is not None and config.is_private:
            raise UserError(
                f"train.patience: {self.patience}, but a private run takes all steps for which its "
                "noise was calibrated; give None"
            )


@dataclass(frozen=True)
class Mesh(Section):
    """Device mesh; on CPU, each core can be a device."""

    data: Count = 1
    """Size of the data-parallel axis: number of replicas of the train state."""
    fsdp: Count = 1
    """Size of the FSDP axis: number of devices that share one replica."""


@dataclass(frozen=True)
class Checkpoint(Section):
    """Checkpoints of the train state."""

    every: Count = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    best: bool = True
    """Also keep the best checkpoint by the metric."""
    metric: str | None = None
    """Test metric of the best one, such as macro_f1 or auc; None is mean IoU, accuracy or loss."""


@dataclass(frozen=True)
class Nonfinite(Section):
    """Steps whose loss or gradient is NaN or infinite."""

    needs: ClassVar[section.Needs] = {"max_skipped": ("skip", bool)}

    skip: bool = True
    """Skip the update and report layer and examples; otherwise, or with privacy, the run ends."""
    max_skipped: Count = 10
    """Consecutive skipped steps after which the run ends."""


@dataclass(frozen=True)
class Tracking(Section):
    """Experiment trackers, in addition to metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard event files to the run folder; needs tensorboardX."""
    wandb: bool = False
    """Log to Weights & Biases; needs wandb, which has its own settings."""


@dataclass(frozen=True)
class Memory(Section):
    """Memory budget and rematerialization (gradient checkpointing)."""

    budget: section.Bytes | None = None
    """Memory limit per device, such as 4GiB; the program picks policy and microbatches to fit."""
    policy: Literal["auto", "none", "norms", "dots", "segments", "nested", "offload"] = "auto"
    """Remat policy; auto is the fastest that fits the budget, or none without a budget."""
