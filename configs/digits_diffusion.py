"""Diffusion model that draws handwritten digits by label: a transformer on 2 x 2 patches.

    fnet train digits_diffusion
    fnet sample runs/digits_diffusion

2,000 steps in 47 to 87 s on two CPU cores. 240,132 parameters, 18.9 MiB at the peak of the
train step. The classifier of the recipe digits assigns the requested label to 98.2 % of
1,000 samples with default options (dpm_solver, 50 steps, guidance 1.5). The samples are not
copies: the nearest training digit is 1.18 away on average (Euclidean, pixels from 0 to 1),
compared with 1.07 for held-out digits.
"""

from train.config import Checkpoint, Config, Denoiser, Digits, Optim, Train


def config() -> Config:
    return Config(
        name="digits_diffusion",
        data=Digits(batch_size=64, max_shift=0),
        model=Denoiser(patch=2, blocks=3, width=64, heads=4),
        optim=Optim(
            name="adamw",
            learning_rate=2e-3,
            schedule="cosine",
            warmup_steps=100,
            weight_decay=0.01,
            clip_norm=1.0,
            ema_decay=0.995,
        ),
        train=Train(steps=2000, log_every=50, eval_every=500),
        checkpoint=Checkpoint(every=500),
    )
