"""Clipped per-example gradients; with noise, differentially private training."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import optax
from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import override

from fnet import autodiff
from fnet.privacy import PoissonSampling, banded_square_root, calibrate_noise_multiplier
from fnet.privacy.canaries import GradientCanaries
from train.config import Config
from train.config.gradient import GradientMode
from train.config.section import Count, Positive, Seed
from train.errors import UserError
from train.gradients.privacy import Privacy, check_dp_accounting

MAX_EPSILON = 1000.0


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

    @property
    def num_canaries(self) -> int:
        """Number of canaries to train on for an audit."""
        return self.audit or 0

    def check(self, config: Config) -> None:
        """Check that the options fit each other and the other sections.

        Raises:
          UserError: if they do not.
        """
        super().check(config)
        if self.quantile is not None:
            self._check_adaptive()
        if self.is_private:
            return
        if self.delta is not None:
            raise UserError("grad.delta: needs grad.epsilon or grad.noise_multiplier, too")
        if self.noise_bands > 1:
            raise UserError(
                f"grad.noise_bands: {self.noise_bands}, but there is no noise; give grad.epsilon "
                "or grad.noise_multiplier, too"
            )
        if self.release_only:
            raise UserError(
                "grad.release_only: nothing is covered by a guarantee without noise; give "
                "grad.epsilon or grad.noise_multiplier, too"
            )
        if self.insecure_noise_seed is not None:
            raise UserError(
                f"grad.insecure_noise_seed: {self.insecure_noise_seed}, but there is no noise; "
                "give grad.epsilon or grad.noise_multiplier, too"
            )

    def _check_adaptive(self) -> None:
        if self.per_layer or self.automatic is not None:
            other = "per_layer" if self.per_layer else "automatic"
            raise UserError(
                f"grad.quantile: adapts one clip for whole gradients, so that grad.{other} cannot "
                "be used; give one of them"
            )
        if self.noise_bands > 1:
            raise UserError(
                f"grad.noise_bands: {self.noise_bands}, but grad.quantile needs independent noise; "
                "give one of them"
            )

    @override
    def build(
        self, config: Config, optimizer: optax.GradientTransformation, privacy: Privacy | None
    ) -> tuple[Any, optax.GradientTransformation]:
        noise = privacy.noise_multiplier if privacy else 0.0
        if self.quantile is None:
            mode = autodiff.clipped(
                self.clip,
                noise_multiplier=noise,
                expected_batch_size=config.data.batch_size,
                per_layer=self.per_layer,
                automatic=self.automatic,
                microbatches=self.microbatches,
                **({"strategy": privacy.strategy} if privacy else {}),
            )
            return mode, optimizer
        try:
            adaptive = autodiff.AdaptiveClipping(
                self.clip,
                quantile=self.quantile,
                noise_multiplier=noise,
                expected_batch_size=config.data.batch_size,
                microbatches=self.microbatches,
            )
        except ValueError as error:
            raise UserError(f"grad.quantile: {error}") from error
        return adaptive, adaptive.wrap_optimizer(optimizer)

    @override
    def with_microbatches(self, count: int) -> Self:
        return dataclasses.replace(self, microbatches=count)  # batches are padded to a multiple

    def draw_canaries(self, params: Any, seed: int) -> GradientCanaries:
        """Draw the canaries of an audit.

        Raises:
          UserError: if there are too many for delta or the network.
        """
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

    def privacy(self, config: Config, units: int, steps: int) -> Privacy | None:
        """Return the guarantee of a run; None without noise.

        Raises:
          UserError: if the guarantee is incomplete, meaningless or impossible, or dp_accounting is
            not installed.
        """
        if not self.is_private:
            return None
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
        sampling = self._sampling(config, units)
        check_dp_accounting()
        noise = self._noise(sampling, self.delta, steps)
        unit: Literal["example", "user"] = "user" if config.examples_per_user else "example"
        return Privacy(noise, sampling, self.delta, self.accountant, unit)

    def _noise(self, sampling: PoissonSampling, delta: float, steps: int) -> float:
        """Return the noise multiplier, given or for the target epsilon."""
        if self.noise_multiplier is not None:
            spent = Privacy(self.noise_multiplier, sampling, delta, "rdp").epsilon(steps)
            if spent > MAX_EPSILON:
                raise UserError(
                    f"grad.noise_multiplier: {self.noise_multiplier:g} gives no privacy: {steps} "
                    f"steps spend epsilon {spent:.3g}; expected at most {MAX_EPSILON:g}"
                )
            return self.noise_multiplier
        assert self.epsilon is not None
        try:
            return calibrate_noise_multiplier(
                self.epsilon,
                delta,
                sampling,
                steps,
                strategy=banded_square_root(sampling.bands),
                accountant=self.accountant,
            )
        except ValueError as error:
            raise UserError(f"grad.epsilon: {error}") from error

    def _sampling(self, config: Config, units: int) -> PoissonSampling:
        """Return the sampling of a private run.

        Raises:
          UserError: if batches are larger than the training set.
        """
        size, bands = config.data.batch_size, self.noise_bands
        if size > units:
            raise UserError(
                f"data.batch_size: {size} is more than the {units} {_units(config)}; "
                "private training samples each at most once per step; give a smaller one"
            )
        if bands * size > units:
            raise UserError(
                f"grad.noise_bands: {bands} groups of {units} {_units(config)} are smaller than "
                f"the {size} of data.batch_size; give at most {units // size}"
            )
        # A multiple of 8 for vector units, of the devices, and of the microbatches.
        multiple = math.lcm(8, config.mesh.data * config.mesh.fsdp) * self.microbatches
        return PoissonSampling(units, size, bands, multiple)

    @override
    def batch_rows(self, config: Config, units: int) -> int:
        if not self.is_private:
            return config.data.batch_size
        # The search for the largest batch also tries more than the training examples.
        most = max(self.noise_bands * config.data.batch_size, units)
        return self._sampling(config, most).rows

    @override
    def check_length(self, before: int, now: int) -> None:
        if self.epsilon is not None and before != now:
            raise UserError(
                "train.steps: the noise was calibrated to spend epsilon "
                f"{self.epsilon:g} over {before} steps, not {now}; use grad.noise_multiplier for a "
                "run whose length may change"
            )


def _units(config: Config) -> str:
    return "users" if config.examples_per_user else "training examples"
