"""Diffusion models: the forward process, its reverse (samplers), the denoising loss, and guidance.

Noise schedules are in `fnet.diffusion.schedules`, samplers in `fnet.diffusion.samplers`. The
denoising network is `fnet.models.denoiser`, or any ``denoise(x, t)``.
"""

from fnet.diffusion import samplers, schedules
from fnet.diffusion.guidance import drop_labels as drop_labels
from fnet.diffusion.guidance import guided
from fnet.diffusion.loss import WEIGHTINGS as WEIGHTINGS
from fnet.diffusion.loss import denoising_losses
from fnet.diffusion.loss import min_snr_weight as min_snr_weight
from fnet.diffusion.loss import sample_timesteps as sample_timesteps
from fnet.diffusion.samplers import SAMPLERS as SAMPLERS
from fnet.diffusion.samplers import ddim as ddim
from fnet.diffusion.samplers import ddpm as ddpm
from fnet.diffusion.samplers import dpm_solver as dpm_solver
from fnet.diffusion.schedules import SCHEDULES as SCHEDULES
from fnet.diffusion.schedules import Schedule as Schedule
from fnet.diffusion.schedules import sampling_timesteps as sampling_timesteps
from fnet.diffusion.targets import TARGETS as TARGETS
from fnet.diffusion.targets import add_noise as add_noise
from fnet.diffusion.targets import denoised as denoised
from fnet.diffusion.targets import target as target

__all__ = ["denoising_losses", "guided", "samplers", "schedules"]
