"""Clipped per-example gradients; with noise, differentially private training."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import override

import fnet
from fnet.noise.imports import jax_privacy
from fnet.noise.schedules import check_schedule
from train.config import Config
from train.config.gradient import Built, GradientMode
from train.config.section import Count, Positive, Seed
from train.errors import UserError

if TYPE_CHECKING:
    import optax

    from fnet.privacy.canaries import GradientCanaries
    from train.privacy import Privacy

MAX_EPSILON = 1000.0
_FOR_SOME_STEPS = ("optimized", "column_normalized", "dense", "buffered")
"""Strategies that are optimized for the length of a run."""


@dataclass(frozen=True)
class Clipped(GradientMode):
    """Per-example gradient clipping; with noise, differentially private training (DP-SGD)."""

    is_per_example: ClassVar[bool] = True

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
    noise_schedule: tuple[tuple[int, float], ...] = ()
    """Factors of the noise from steps on, such as 0 1.0 500 0.7."""
    clip_schedule: tuple[tuple[int, float], ...] = ()
    """Factors of the clip from steps on."""
    noise_bands: Count = 1
    """Bands of correlated noise, with cyclic sampling of as many groups; 1 is DP-SGD."""
    noise_strategy: Literal[
        "square_root", "inverse_square_root", "optimized", "column_normalized", "dense", "buffered"
    ] = "square_root"
    """Strategy matrix of correlated noise, of jax-privacy; buffered has no bands."""
    sampling: Literal["poisson", "balls_in_bins", "b_min_sep"] = "poisson"
    """How batches are drawn; poisson is cyclic with a separation above 1."""
    separation: Count | None = None
    """Least number of steps between two with the same example; None is noise_bands."""
    truncated_batch_size: Count | None = None
    """Largest batch of Poisson sampling; protects examples in data of a public size."""
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

    @property
    def num_canaries(self) -> int:
        """Number of canaries to train on for an audit."""
        return self.audit or 0

    def check(self, config: Config) -> None:
        """Check that the options fit each other and the other sections."""
        super().check(config)
        schedules = {"noise_schedule": self.noise_schedule, "clip_schedule": self.clip_schedule}
        try:
            check_schedule("grad", **schedules)
        except ValueError as error:
            raise UserError(str(error)) from error
        if self.quantile is not None:
            self._check_adaptive()
        if self.is_private:
            self._check_noise()
            return
        if self.delta is not None:
            raise UserError("grad.delta: needs grad.epsilon or grad.noise_multiplier, too")
        for name in _OF_NOISE:
            if getattr(self, name) != getattr(type(self), name):
                raise UserError(
                    f"grad.{name}: {getattr(self, name)}, but there is no noise; give "
                    "grad.epsilon or grad.noise_multiplier, too"
                )

    def _check_noise(self) -> None:
        has_bands = self.noise_strategy != "buffered"
        separation = self.separation or self.noise_bands
        message = ""
        if has_bands and self.noise_strategy != "square_root" and self.noise_bands == 1:
            message = (
                f"noise_strategy: {self.noise_strategy} with one band is independent noise; give "
                "grad.noise_bands, too"
            )
        elif not has_bands and self.noise_bands > 1:
            message = (
                f"noise_bands: {self.noise_bands}, but grad.noise_strategy buffered has no bands; "
                "give grad.separation"
            )
        elif self.sampling == "balls_in_bins" and self.separation is not None:
            message = (
                f"separation: {self.separation}, but with grad.sampling balls_in_bins it follows "
                "from data.batch_size; leave it out"
            )
        elif self.sampling == "b_min_sep" and separation == 1:
            message = "sampling: b_min_sep needs grad.separation above 1"
        elif self.sampling != "poisson" and self.truncated_batch_size is not None:
            message = (
                f"truncated_batch_size: no accountant covers it with grad.sampling {self.sampling};"
                " leave it out"
            )
        if message:
            raise UserError(f"grad.{message}")

    def _check_adaptive(self) -> None:
        if self.per_layer or self.automatic is not None:
            other = "per_layer" if self.per_layer else "automatic"
            raise UserError(
                f"grad.quantile: adapts one clip for whole gradients, so that grad.{other} cannot "
                "be used; give one of them"
            )
        for name in ("noise_bands", "noise_strategy", "noise_schedule", "clip_schedule"):
            if getattr(self, name) != getattr(type(self), name):
                raise UserError(
                    f"grad.{name}: {getattr(self, name)}, but grad.quantile needs independent "
                    "noise and sets the clip; give one of them"
                )

    @override
    def build(
        self, config: Config, optimizer: "optax.GradientTransformation", privacy: "Privacy | None"
    ) -> Built:
        options: dict[str, Any] = {
            "noise_multiplier": privacy.noise_multiplier if privacy else 0.0,
            "expected_batch_size": config.data.batch_size,
            "microbatches": self.microbatches,
        }
        if self.quantile is not None:
            try:
                mode: Any = fnet.autodiff.AdaptiveClipping(
                    self.clip, quantile=self.quantile, **options
                )
            except ValueError as error:
                raise UserError(f"grad.quantile: {error}") from error
        else:
            names = ("per_layer", "automatic", "noise_schedule", "clip_schedule")
            options |= {name: getattr(self, name) for name in names}
            options |= {"strategy": privacy.strategy} if privacy else {}
            mode = fnet.autodiff.clipped(self.clip, **options)
        return mode, mode.wrap_optimizer(optimizer)

    @override
    def with_microbatches(self, count: int) -> Self:
        return dataclasses.replace(self, microbatches=count)  # batches are padded to a multiple

    def draw_canaries(self, params: Any, seed: int) -> "GradientCanaries":
        """Draw the canaries of an audit."""
        from fnet.privacy.canaries import GradientCanaries  # imports JAX

        count = self.num_canaries
        if self.delta is not None and 2 * count * self.delta > 1:
            raise UserError(
                f"grad.audit: {count} canaries are too many at grad.delta {self.delta:g}; "
                f"expected at most 1 / (2 delta) = {int(1 / (2 * self.delta))}"
            )
        try:
            # Well above the clip, which may adapt.
            return GradientCanaries.draw(params, count, seed, norm=10 * self.clip)
        except ValueError as error:
            raise UserError(f"grad.audit: {error}") from error

    def privacy(self, config: Config, units: int, steps: int) -> "Privacy | None":
        """Return the guarantee of a run; None without noise."""
        if not self.is_private:
            return None
        from train.privacy import Privacy, check_accounting, make_strategy  # imports JAX

        if self.epsilon is not None and self.noise_multiplier is not None:
            raise UserError(
                f"grad: epsilon {self.epsilon} and noise_multiplier {self.noise_multiplier} "
                "each set the noise; give one of them"
            )
        if self.delta is None:
            given = "epsilon" if self.epsilon is not None else "noise_multiplier"
            raise UserError(
                f"grad.delta: grad.{given} needs it, too; give less than 1 / {units} "
                f"{_units(config)}, for example 1e-5"
            )
        if self.delta >= 1 / units:
            raise UserError(
                f"grad.delta: {self.delta:g} would allow publishing one of {units} "
                f"{_units(config)}; expected less than 1 / {units} = {1 / units:.2g}"
            )
        check_accounting()
        sampling = self._sampling(config, units)
        strategy = make_strategy(self.noise_strategy, self.noise_bands, sampling.separation, steps)
        unit: Literal["example", "user"] = "user" if config.examples_per_user else "example"
        without = Privacy(
            1.0, sampling, self.delta, self.accountant, unit, strategy, self.noise_schedule
        )
        try:
            return self._with_noise(without, steps)
        except ValueError as error:  # no accountant covers it, or the target is impossible
            name = "noise_multiplier" if self.epsilon is None else "epsilon"
            raise UserError(f"grad.{name}: {error}") from error

    def _with_noise(self, privacy: "Privacy", steps: int) -> "Privacy":
        if self.noise_multiplier is not None:
            privacy = dataclasses.replace(privacy, noise_multiplier=self.noise_multiplier)
            quick = self.accountant if self.truncated_batch_size else "rdp"
            spent = dataclasses.replace(privacy, accountant=quick).epsilon(steps)
            if spent > MAX_EPSILON:
                raise UserError(
                    f"grad.noise_multiplier: {self.noise_multiplier:g} gives no privacy: {steps} "
                    f"steps spend epsilon {spent:.3g}; expected at most {MAX_EPSILON:g}"
                )
            return privacy
        assert self.epsilon is not None
        noise = fnet.privacy.calibrate_noise_multiplier(
            self.epsilon,
            privacy.delta,
            privacy.sampling,
            steps,
            strategy=privacy.strategy,
            noise_schedule=privacy.noise_schedule,
            accountant=self.accountant,
        )
        return dataclasses.replace(privacy, noise_multiplier=noise)

    def _sampling(self, config: Config, units: int) -> "fnet.privacy.Sampling":
        size, separation = config.data.batch_size, self.separation or self.noise_bands
        if size > units:
            raise UserError(
                f"data.batch_size: {size} is more than the {units} {_units(config)}; "
                "private training samples each at most once per step; give a smaller one"
            )
        if self.sampling == "balls_in_bins":
            separation = units // size
        if separation * size > units:
            name = "noise_bands" if self.separation is None else "separation"
            raise UserError(
                f"grad.{name}: {separation} groups of {units} {_units(config)} are smaller than "
                f"the {size} of data.batch_size; give at most {units // size}"
            )
        if self.truncated_batch_size is not None and self.truncated_batch_size < size:
            raise UserError(
                f"grad.truncated_batch_size: {self.truncated_batch_size} is less than the {size} "
                "of data.batch_size; give more"
            )
        # A multiple of 8 for vector units, of the devices, and of the microbatches.
        multiple = math.lcm(8, config.mesh.data * config.mesh.fsdp) * self.microbatches
        of, steps = jax_privacy("batch_selection"), 0
        if self.sampling == "balls_in_bins":
            selection = of.BallsInBinsSampling(steps, separation)
        elif self.sampling == "b_min_sep":
            probability = size / (units - (separation - 1) * size)
            selection = of.BMinSepSampling(probability, steps, separation)
        else:
            most, kind = self.truncated_batch_size, of.PartitionType
            probability, split = separation * size / units, kind.INDEPENDENT
            if most is not None:
                probability, split = size / (units // separation), kind.EQUAL_SPLIT
            selection = of.CyclicPoissonSampling(probability, steps, most, separation, split)
        return fnet.privacy.Sampling(units, selection, multiple)

    @override
    def batch_rows(self, config: Config, units: int) -> int:
        if not self.is_private:
            return config.data.batch_size
        # The search for the largest batch also tries more than the training examples.
        least = (self.separation or self.noise_bands) * config.data.batch_size
        most = max(least, units)
        return self._sampling(config, most).rows

    @override
    def check_length(self, before: int, now: int) -> None:
        if self.epsilon is not None and before != now:
            raise UserError(
                "train.steps: the noise was calibrated to spend epsilon "
                f"{self.epsilon:g} over {before} steps, not {now}; use grad.noise_multiplier for a "
                "run whose length may change"
            )
        if self.noise_strategy in _FOR_SOME_STEPS and before != now:
            raise UserError(
                f"train.steps: the noise of grad.noise_strategy {self.noise_strategy} was made "
                f"for {before} steps, not {now}; keep them, or use square_root"
            )


_OF_NOISE = (
    "noise_bands", "noise_strategy", "noise_schedule", "sampling", "separation",
    "truncated_batch_size", "release_only", "insecure_noise_seed",
)  # fmt: skip
"""Fields that mean something with noise alone."""


def _units(config: Config) -> str:
    return "users" if config.examples_per_user else "training examples"
