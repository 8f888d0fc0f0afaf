"""Diffusion: schedules of noise, what a denoiser predicts, its loss, guidance, and samplers."""

from fnet.diffusion import samplers, schedules
from fnet.diffusion.guidance import drop_labels, guided
from fnet.diffusion.loss import WEIGHTINGS, denoising_losses, draw_times, min_snr_weight
from fnet.diffusion.samplers import SAMPLERS, ddim, ddpm, dpm_solver
from fnet.diffusion.schedules import SCHEDULES, Schedule, sampling_times
from fnet.diffusion.targets import TARGETS, add_noise, denoised, target

__all__ = [
    "SAMPLERS",
    "SCHEDULES",
    "TARGETS",
    "WEIGHTINGS",
    "Schedule",
    "add_noise",
    "ddim",
    "ddpm",
    "denoised",
    "denoising_losses",
    "dpm_solver",
    "draw_times",
    "drop_labels",
    "guided",
    "min_snr_weight",
    "samplers",
    "sampling_times",
    "schedules",
    "target",
]
