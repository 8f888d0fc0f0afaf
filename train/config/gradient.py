"""Gradient modes: how a step computes its gradient, and what the run must know about it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from train.config.registry import Variant
from train.config.section import WholeConfig
from train.errors import UserError

if TYPE_CHECKING:
    import optax

    from fnet.privacy.canaries import GradientCanaries

Built: TypeAlias = "tuple[Any, optax.GradientTransformation]"


class _Options:
    mode: str
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""
    release_only: bool = False
    delta: float | None = None
    insecure_noise_seed: int | None = None


@dataclass(frozen=True)
class GradientMode(_Options, Variant, section="grad", tag="mode", package="train.gradients"):
    """A gradient mode.

    A subclass is a frozen dataclass with a field ``mode``, the name of the mode, and its options.
    It must define `build`.

    Attributes:
      is_per_example: Whether it needs the gradient of each example: in float32, and of networks
        that do not mix the examples of a batch.
      has_fixed_microbatches: Whether a memory plan may not choose the number of microbatches.
    """

    is_per_example: ClassVar[bool] = False
    has_fixed_microbatches: ClassVar[bool] = False

    def build(
        self, config: WholeConfig, optimizer: "optax.GradientTransformation", privacy: Any
    ) -> Built:
        """Return the mode for `fnet.make_step`, and the optimizer with the state it may add."""
        raise NotImplementedError

    def build_for(
        self,
        config: WholeConfig,
        optimizer: "optax.GradientTransformation",
        privacy: Any,
        dataset: Any,
        schedule: "optax.Schedule",
    ) -> Built:
        """As `build`, for modes that also need the data or the learning rates."""
        return self.build(config, optimizer, privacy)

    def check(self, config: WholeConfig) -> None:
        """Check that the other sections allow gradients per example."""
        if not self.is_per_example:
            return
        for name, strength in (("mixup", config.data.mixup), ("cutmix", config.data.cutmix)):
            if strength > 0:
                raise UserError(
                    f"data.{name}: mixes two examples in one image, but grad.mode {self.mode} "
                    f"needs their gradients apart; give data.{name} 0"
                )
        if config.train.params_dtype != "float32":
            raise UserError(
                f"train.params_dtype: {config.train.params_dtype}, but grad.mode {self.mode} needs "
                "gradients in float32; give train.params_dtype float32"
            )

    def with_microbatches(self, count: int) -> Self:
        """Return the mode for batches that will be split into so many microbatches."""
        return self

    # Only private modes have what follows.

    @property
    def is_private(self) -> bool:
        """Whether training is differentially private: noise and Poisson sampling."""
        return False

    @property
    def num_canaries(self) -> int:
        """Number of canaries to train on for an audit."""
        return 0

    def draw_canaries(self, params: Any, seed: int) -> "GradientCanaries":
        """Draw the canaries of an audit for parameters of these shapes."""
        raise NotImplementedError

    def privacy(self, config: WholeConfig, units: int, steps: int) -> Any:
        """Return the guarantee of a run for so many examples, or users; None without noise."""
        return None

    def batch_rows(self, config: WholeConfig, units: int) -> int:
        """Return the number of rows of a batch; a private run pads its batches."""
        return config.data.batch_size

    def check_length(self, before: int, now: int) -> None:
        """Raise `UserError` if a run that began with one number of steps cannot have another."""
