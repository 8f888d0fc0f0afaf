"""What a run is made of: frozen dataclasses, every field with its meaning and unit."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from fnet import memory, models
from fnet.layer import Layer
from train.errors import UserError, nearest

Count = Annotated[int, Ge(1)]
EvenCount = Annotated[int, Ge(2), MultipleOf(2)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1)]
Activation = Literal["leaky_relu", "elu", "softplus", "relu", "gelu", "silu"]


def _readable(amount: str) -> str:
    memory.read_bytes(amount)
    return amount


Amount = Annotated[str, AfterValidator(_readable)]
"""Of memory: 4GiB, 4GB, 4096MiB."""


class _Strict:
    """A section of a config: no unknown key, no conversion, no nan or infinity."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _options(model: Any) -> dict[str, Any]:
    """The fields of a model's section but its name: options of the function that builds it."""
    return {f.name: getattr(model, f.name) for f in fields(model) if f.name != "name"}


@dataclass(frozen=True)
class Digits(_Strict):
    """Scikit-learn's bundled handwritten digits: 1,797 grey images of 8 x 8 pixels."""

    source: Literal["digits"] = "digits"
    """Where the examples come from."""
    batch_size: Count = 64
    """Examples a training step."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of the images that is held out for testing, the same of every class."""
    split_seed: Seed = 0
    """Which images are held out."""
    max_shift: Annotated[int, Ge(0), Lt(8)] = 1
    """Training images are moved by up to that many pixels in each direction."""


@dataclass(frozen=True)
class Synthetic(_Strict):
    """Random images with random labels, for measuring: there is nothing to learn."""

    source: Literal["synthetic"] = "synthetic"
    """Where the examples come from."""
    batch_size: Count = 32
    """Examples a training step."""
    image_size: Count = 224
    """Height and width."""
    channels: Count = 3
    """Of each image."""
    classes: Count = 1000
    """How many labels there are."""
    examples: Count = 256
    """Training images; a quarter as many are held out."""


@dataclass(frozen=True)
class PreactResNet(_Strict):
    """A pre-activation residual network with in-place activated batch norm."""

    name: Literal["preact_resnet"] = "preact_resnet"
    """The family of networks."""
    widths: Annotated[tuple[Count, ...], MinLen(1)] = (16, 32)
    """Channels of each stage; each stage after the first halves the image."""
    blocks_per_stage: Count = 2
    """Residual blocks of each stage."""
    activation: Activation = "leaky_relu"
    """Activation in every in-place activated batch norm."""
    activation_param: float = 0.01
    """Slope of leaky_relu or alpha of elu, above 0; others have none."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images [H, W, C]."""
        return models.preact_resnet(
            num_classes=num_classes, in_channels=image_shape[-1], **_options(self)
        )


@dataclass(frozen=True)
class ResNet(_Strict):
    """A residual network (He et al. 2015)."""

    name: Literal["resnet"] = "resnet"
    """The family of networks."""
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Layers."""
    activation: Activation = "leaky_relu"
    """After every norm but a block's last, and after every sum."""
    activation_param: float = 0.01
    """Slope of leaky_relu or alpha of elu, above 0; others have none."""
    norm: Literal["abn", "group"] = "abn"
    """In-place activated batch norm, or group norm, by which no example depends on another."""
    small_images: bool = False
    """Whether the stem keeps the image's size; if not, it quarters height and width."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images [H, W, C]."""
        return models.resnet(num_classes=num_classes, in_channels=image_shape[-1], **_options(self))


@dataclass(frozen=True)
class RevNet(_Strict):
    """A reversible residual network: within a stage, nothing is kept per block."""

    name: Literal["revnet"] = "revnet"
    """The family of networks."""
    widths: Annotated[tuple[EvenCount, ...], MinLen(1)] = (32, 64)
    """Channels of each stage, both halves together; each stage after the first halves the image."""
    blocks: Annotated[tuple[Count, ...], MinLen(1)] = (3, 3)
    """Coupled blocks of each stage; each is worth two residual blocks."""
    bottleneck: bool = False
    """Whether a block is three convolutions, narrow between, or two of full width."""
    activation: Activation = "leaky_relu"
    """Activation in every in-place activated batch norm."""
    activation_param: float = 0.01
    """Slope of leaky_relu or alpha of elu, above 0; others have none."""
    small_images: bool = True
    """Whether the stem keeps the image's size; if not, it quarters height and width."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images [H, W, C]."""
        return models.revnet(num_classes=num_classes, in_channels=image_shape[-1], **_options(self))


@dataclass(frozen=True)
class Mlp(_Strict):
    """A multilayer perceptron on flattened images."""

    name: Literal["mlp"] = "mlp"
    """The family of networks."""
    hidden: tuple[Count, ...] = (256, 256)
    """Sizes of the hidden layers."""
    activation: Literal["relu", "leaky_relu", "elu", "softplus", "gelu", "silu", "tanh"] = "relu"
    """Activation between layers."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """The network for images of that shape."""
        return models.mlp(num_classes=num_classes, in_shape=image_shape, **_options(self))


@dataclass(frozen=True)
class Optim(_Strict):
    """The optimizer and its learning rate."""

    name: Literal["sgd", "adam", "adamw", "lion"] = "sgd"
    """The update rule."""
    learning_rate: Positive = 0.1
    """Its highest value."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """How the learning rate falls: not at all, or to 0 at the end of the run."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps over which the learning rate first rises from 0."""
    momentum: Share = 0.9
    """Of sgd."""
    nesterov: bool = False
    """Whether sgd's momentum looks ahead (Nesterov)."""
    weight_decay: NonNegative = 0.0
    """On kernels only, never on biases or norms."""
    clip_norm: Positive | None = None
    """Largest global norm of the gradient."""
    label_smoothing: Share = 0.0
    """Probability spread evenly over all classes in the training loss."""
    ema_decay: Annotated[float, Gt(0), Lt(1)] | None = None
    """Weight of the old average of the parameters; the average is what is evaluated."""


@dataclass(frozen=True)
class Mean(_Strict):
    """One gradient of the examples' mean loss."""

    mode: Literal["mean"] = "mean"
    """What is made of the examples' losses; a memory budget may split its batches."""


@dataclass(frozen=True)
class Microbatch(_Strict):
    """The same gradient, summed over parts of the batch."""

    mode: Literal["microbatch"] = "microbatch"
    """What is made of the examples' losses."""
    microbatches: Count = 2
    """Parts that a batch is split into, one after the other."""


@dataclass(frozen=True)
class PerExample(_Strict):
    """The mean gradient, and how the examples' gradients differ: the gradient noise scale."""

    mode: Literal["per_example"] = "per_example"
    """What is made of the examples' losses."""


@dataclass(frozen=True)
class Clipped(_Strict):
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
    """Divides each gradient by its norm plus this, instead of clipping what is above clip."""
    microbatches: Count = 1
    """Parts that a batch is split into, one after the other."""
    epsilon: Annotated[float, Gt(0), Le(1000)] | None = None
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
class Train(_Strict):
    """The length of the run, and what it reports on the way."""

    epochs: Positive = 10.0
    """Passes over the training examples."""
    steps: Count | None = None
    """Training steps; overrides epochs."""
    seed: Seed = 0
    """Of initial values, order of examples, augmentation and dropout."""
    log_every: Count = 10
    """Steps between two lines of metrics."""
    eval_every: Count | None = None
    """Steps between two evaluations; once an epoch by default."""


@dataclass(frozen=True)
class Checkpoint(_Strict):
    """What is kept of the state on disk."""

    every: Count = 200
    """Steps between two checkpoints; the last step always makes one."""
    keep: Count = 2
    """How many of the newest are kept."""


@dataclass(frozen=True)
class Memory(_Strict):
    """What training may hold, and what it does to hold less."""

    budget: Amount | None = None
    """Most that training may hold (4GiB, 4GB, 4096MiB); what follows is then chosen to fit."""
    policy: Literal["auto", "keep", "named", "products", "segments", "offload"] = "auto"
    """What the backward pass keeps; auto is the fastest within the budget, without one: keep."""


@dataclass(frozen=True)
class Config(_Strict):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = "run"
    """Names the run's folder where none is given."""
    data: Annotated[Digits | Synthetic, Field(discriminator="source")] = field(
        default_factory=Digits
    )
    """Training and test examples."""
    model: Annotated[PreactResNet | ResNet | RevNet | Mlp, Field(discriminator="name")] = field(
        default_factory=PreactResNet
    )
    """The network."""
    optim: Optim = field(default_factory=Optim)
    """The optimizer."""
    grad: Annotated[Mean | Microbatch | PerExample | Clipped, Field(discriminator="mode")] = field(
        default_factory=Mean
    )
    """What is made of the examples' losses."""
    train: Train = field(default_factory=Train)
    """The length of the run."""
    memory: Memory = field(default_factory=Memory)
    """What training may hold."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """What is kept on disk."""


_VARIANTS = {
    "data": (Digits, Synthetic),
    "model": (PreactResNet, ResNet, RevNet, Mlp),
    "grad": (Mean, Microbatch, PerExample, Clipped),
}
_ADAPTER = TypeAdapter(Config)


def kinds(section: str) -> dict[str, type]:
    """``{"mean": Mean, ...}``: what a section can be, by its first field; else {}."""
    return {_tags(kind)[0]: kind for kind in _VARIANTS.get(section, ())}


def to_json(config: Config) -> str:
    """The config as JSON that `from_json` reads back to an equal one."""
    return _ADAPTER.dump_json(config, indent=2, warnings=False).decode() + "\n"


def from_json(text: str | bytes, where: str) -> Config:
    """Reads and checks a config.

    Args:
      text: JSON, as `to_json` writes it; keys that are left out take their defaults.
      where: what is read, for the message.

    Raises:
      UserError: naming the first field that is unknown, of a wrong type or out
        of range, its value, and what is allowed.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise UserError(f"{where}: {_first_mistake(error.errors()[0])}") from None


def check(config: Config, where: str) -> Config:
    """The same config, once every field's type and range have been checked.

    Raises:
      UserError: as `from_json`.
    """
    return from_json(to_json(config), where)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """``{"optim.learning_rate": 0.1, ...}``: every field by its dotted name."""
    flat: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            flat |= flatten(value, f"{prefix}{f.name}.")
        else:
            flat[prefix + f.name] = value
    return flat


def _first_mistake(error: ErrorDetails) -> str:
    # A union's tag stands in the location between the field and what is below it.
    tags = {
        tag for variants in _VARIANTS.values() for variant in variants for tag in _tags(variant)
    }
    loc = [str(part) for part in error["loc"] if part not in tags]
    name = ".".join(loc)
    if error["type"] == "unexpected_keyword_argument":
        return f"unknown field {name}{nearest(name, _known_fields())}"
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = error.get("ctx", {})
        tag, allowed = context["discriminator"].strip("'"), context.get("expected_tags", "a name")
        return f"{name}.{tag}: expected one of {allowed}, got {context.get('tag', 'nothing')!r}"
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}"
    message = error["msg"].removeprefix("Input should be ")
    if error["type"] == "json_invalid" or not name:
        return f"not a config: {error['msg']}"
    return f"{name}: expected {message}, got {error['input']!r}"


def _tags(variant: type) -> tuple[str, ...]:
    return get_args(next(iter(variant.__annotations__.values())))


def _known_fields() -> list[str]:
    configs = [
        Config(**{section: variant()})  # type: ignore[arg-type]
        for section, variants in _VARIANTS.items()
        for variant in variants
    ]
    return list(dict.fromkeys(name for config in configs for name in flatten(config)))
