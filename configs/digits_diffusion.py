"""A diffusion model that draws handwritten digits, by label."""

from train.config import Checkpoint, Config, Denoiser, Digits, Optim, Train


def config() -> Config:
    return Config(
        name="digits_diffusion",
        data=Digits(batch_size=128, max_shift=0),
        model=Denoiser(patch=2, blocks=4, width=128, heads=4),
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
