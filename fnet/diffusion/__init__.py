"""Diffusion models: the forward process, its reverse (samplers), the denoising loss, and guidance.

Noise schedules are in `fnet.diffusion.schedules`, samplers in `fnet.diffusion.samplers`. The
denoising network is `fnet.models.denoiser`, or any ``denoise(x, t)``.
"""

from fnet.diffusion import samplers as samplers
from fnet.diffusion import schedules as schedules
from fnet.diffusion.guidance import drop_labels as drop_labels
from fnet.diffusion.guidance import guided as guided
from fnet.diffusion.loss import denoising_losses as denoising_losses
from fnet.diffusion.loss import min_snr_weight as min_snr_weight
from fnet.diffusion.loss import sample_timesteps as sample_timesteps
from fnet.diffusion.samplers import ddim as ddim
from fnet.diffusion.samplers import dpm_solver as dpm_solver
from fnet.diffusion.schedules import Schedule as Schedule
from fnet.diffusion.schedules import sampling_timesteps as sampling_timesteps
from fnet.diffusion.targets import add_noise as add_noise
from fnet.diffusion.targets import denoised as denoised
from fnet.diffusion.targets import target as target
