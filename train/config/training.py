"""How a network is trained, and what the run keeps."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le, Lt
from pydantic import BeforeValidator

from train.config.section import (
    Amount,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Section,
    Seed,
    Share,
)

MOST_EPSILON = 1000.0


@dataclass(frozen=True)
class Optim(Section):
    """The optimizer and its learning rate."""

    name: Literal["sgd", "adam", "adamw", "lion", "adafactor"] = "sgd"
    """The update rule."""
    learning_rate: Positive = 0.1
    """Its highest value."""
    schedule: Literal["constant", "cosine", "linear", "step", "multistep", "exponential"] = "cosine"
    """How the learning rate falls: not at all, to 0 at the end of the run, or by decay_rate."""
    decay_epochs: tuple[Positive, ...] = (30.0,)
    """When it is multiplied: every so many epochs (step, exponential), or at each (multistep)."""
    decay_rate: Annotated[float, Gt(0), Lt(1)] = 0.1
    """By what step, multistep and exponential multiply the learning rate."""
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate first rises from 0."""
    momentum: Share = 0.9
    """Of sgd."""
    nesterov: bool = False
    """Whether sgd's momentum looks ahead (Nesterov)."""
    classifier_learning_rate: Positive | None = None
    """Highest learning rate of the layer that makes logits; that of the others by default."""
    weight_decay: NonNegative = 0.0
    """On kernels only, never on biases or norms."""
    clip_norm: Positive | None = None
    """Largest global norm of the gradient."""
    label_smoothing: Share = 0.0
    """Probability spread evenly over all classes in the training loss."""
    ema_decay: Annotated[float, Gt(0), Lt(1)] | None = None
    """Weight of the old average of the parameters; the average is what is evaluated."""


@dataclass(frozen=True)
class Mean(Section):
    """One gradient of the examples' mean loss."""

    mode: Literal["mean"] = "mean"
    """What is made of the examples' losses; a memory budget may split its batches."""


@dataclass(frozen=True)
class Microbatch(Section):
    """The same gradient, summed over parts of the batch."""

    mode: Literal["microbatch"] = "microbatch"
    """What is made of the examples' losses."""
    microbatches: Count = 2
    """Parts that a batch is split into, one after the other."""


@dataclass(frozen=True)
class PerExample(Section):
    """The mean gradient, and how the examples' gradients differ: the gradient noise scale."""

    mode: Literal["per_example"] = "per_example"
    """What is made of the examples' losses."""


@dataclass(frozen=True)
class Clipped(Section):
    """Each example's gradient scaled to a norm; with noise, differentially private training."""

    mode: Literal["clipped"] = "clipped"
    """What is made of the examples' losses."""
    clip: Positive = 1.0
    """Largest norm of one example's gradient."""
    per_layer: bool = False
    """Whether each parameter array's part is clipped by itself, to an equal share of clip."""
    quantile: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of examples that clip is adapted to, step by step, to leave as they are."""
    automatic: Positive | None = None
    """Multiplies each gradient by clip / (its norm + this), instead of clipping longer ones."""
    microbatches: Count = 1
    """Parts that a batch is split into, one after the other."""
    epsilon: Annotated[float, Gt(0), Le(MOST_EPSILON)] | None = None
    """Privacy that the whole run may spend; the noise follows from it. Needs delta."""
    delta: Annotated[float, Gt(0), Lt(1)] | None = None
    """Chance that is left out of the promise of epsilon; less than 1 / training examples."""
    noise_multiplier: Positive | None = None
    """Standard deviation of the noise, in clips; instead of epsilon. Needs delta."""
    accountant: Literal["pld", "rdp"] = "pld"
    """How epsilon is reckoned: privacy loss distributions, or Renyi differential privacy."""

    @property
    def is_private(self) -> bool:
        """Whether noise is added, and batches are sampled for it."""
        return self.epsilon is not None or self.noise_multiplier is not None


@dataclass(frozen=True)
class Train(Section):
    """The length of the run, and what it reports on the way."""

    epochs: Positive = 10.0
    """Passes over the training examples."""
    steps: Count | None = None
    """Training steps; overrides epochs."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of activations and their gradients; parameters, optimizer and losses stay float32."""
    seed: Seed = 0
    """Of initial values, order of examples, augmentation and dropout."""
    log_every: Count = 10
    """Steps between two lines of metrics."""
    eval_every: Count | None = None
    """Steps between two evaluations; once an epoch by default."""


@dataclass(frozen=True)
class Mesh(Section):
    """The devices that train together; of a CPU, its cores."""

    data: Count = 1
    """Groups of devices; each group holds the whole state."""
    fsdp: Count = 1
    """Devices of a group, over which parameters and optimizer state are spread."""


@dataclass(frozen=True)
class Checkpoint(Section):
    """What is kept of the state on disk."""

    every: Count = 500
    """Steps between two checkpoints; the last step always makes one."""
    keep: Count = 2
    """How many of the newest are kept."""
    best: bool = True
    """Keep the best as well: of highest test mean IoU, or accuracy, or of lowest loss."""


@dataclass(frozen=True)
class Guard(Section):
    """What is done about a step whose loss or gradient is not finite."""

    skip: bool = True
    """Leave it out, and say which layer and examples it comes from; if not, the run ends, as it
    always does in private training."""
    max_bad_steps: Count = 10
    """Steps left out in a row, after which the run ends."""


@dataclass(frozen=True)
class Tracking(Section):
    """Where metrics go beside metrics.jsonl."""

    tensorboard: bool = False
    """Into the run's folder, for TensorBoard; needs tensorboardX."""
    wandb: bool = False
    """To Weights & Biases; needs wandb, which has its own settings."""


# An older run's config.json has these names.
_FORMER_POLICIES = {"keep": "none", "named": "norms", "products": "dots"}


def _renamed(policy: Any) -> Any:
    return _FORMER_POLICIES.get(policy, policy) if isinstance(policy, str) else policy


@dataclass(frozen=True)
class Memory(Section):
    """What training may hold, and what it does to hold less."""

    budget: Amount | None = None
    """Most that training may hold on a device (4GiB, 4096MB); what follows is chosen to fit."""
    policy: Annotated[
        Literal["auto", "none", "norms", "dots", "segments", "offload"], BeforeValidator(_renamed)
    ] = "auto"
    """Remat policy; auto chooses the fastest that fits the budget, or none without a budget."""
