"""Optimizer, gradient mode, length, memory, devices and outputs of a run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from train.config.section import (
    Bytes,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Seed,
)

MAX_EPSILON = 1000.0


@dataclass(frozen=True)
class Optim(Section):
    """Optimizer and learning rate schedule."""

    name: Literal[
        "sgd",
        "adam",
        "adamw",
        "lion",
        "adafactor",
        "compact_adamw",
        "compact_sgd",
        "compact_lion",
        "muon",
        "schedule_free_adamw",
        "galore",
    ] = "sgd"
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
    ema_decay: Annotated[float, Gt(0), Lt(1)] | None = None
    """Decay of the parameters' moving average (EMA), which is evaluated; None has no EMA."""


@dataclass(frozen=True)
class Mean(Section):
    """Gradient of the mean loss; a memory budget may split the batch into microbatches."""

    mode: Literal["mean"] = "mean"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""


@dataclass(frozen=True)
class Microbatch(Section):
    """Gradient of the mean loss, accumulated over microbatches."""

    mode: Literal["microbatch"] = "microbatch"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""
    microbatches: Count = 2
    """Number of microbatches that each batch is split into."""


@dataclass(frozen=True)
class PerExample(Section):
    """Gradient of the mean loss, and the gradient noise scale from per-example gradients."""

    mode: Literal["per_example"] = "per_example"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""


@dataclass(frozen=True)
class Clipped(Section):
    """Per-example gradient clipping; with noise, differentially private training (DP-SGD)."""

    mode: Literal["clipped"] = "clipped"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""
    clip: Positive = 1.0
    """Clipping norm of per-example gradients."""
    per_layer: bool = False
    """Clip the gradient of each parameter array separately, to an equal share of clip."""
    quantile: Annotated[float, Gt(0), Lt(1)] | None = None
    """Adaptive clipping: fraction of examples to leave unclipped; None keeps clip constant."""
    automatic: Positive | None = None
    """Automatic clipping: scale each gradient by clip / (norm + this value); None clips."""
    microbatches: Count = 1
    """Number of microbatches that each batch is split into; 1 lets a memory budget choose."""
    epsilon: Annotated[float, Gt(0), Le(MAX_EPSILON)] | None = None
    """Privacy budget of the whole run, which sets the noise; needs delta."""
    delta: Annotated[float, Gt(0), Lt(1)] | None = None
    """Privacy delta; choose less than 1 / number of training examples."""
    noise_multiplier: Positive | None = None
    """Noise standard deviation as a multiple of clip, instead of epsilon; needs delta."""
    noise_bands: Count = 1
    """Bands of correlated noise, with cyclic sampling of as many groups; 1 is DP-SGD."""
    accountant: Literal["pld", "rdp"] = "pld"
    """Privacy accountant: privacy loss distributions or Renyi differential privacy."""
    audit: Annotated[int, Ge(8), Lt(2**31)] | None = None
    """Number of canaries to train on for an audit, a lower bound on epsilon; None is no audit."""
    release_only: bool = False
    """Write only what the guarantee covers: parameters, epsilon, metrics on held-out examples."""
    insecure_noise_seed: Seed | None = None
    """Fixed seed of noise and sampling, for tests: no privacy; None draws a secret seed."""

    @property
    def is_private(self) -> bool:
        """Whether training is differentially private: noise and Poisson sampling."""
        return self.epsilon is not None or self.noise_multiplier is not None


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
    """Also keep the best checkpoint by test mean IoU, accuracy or loss."""


@dataclass(frozen=True)
class Nonfinite(Section):
    """Steps whose loss or gradient is NaN or infinite."""

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

    budget: Bytes | None = None
    """Memory limit per device, such as 4GiB; the program picks policy and microbatches to fit."""
    policy: Literal["auto", "none", "norms", "dots", "segments", "offload"] = "auto"
    """Remat policy; auto is the fastest that fits the budget, or none without a budget."""
