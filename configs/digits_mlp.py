"""A multilayer perceptron on 8 x 8 handwritten digits, for comparison.

    fnet train digits_mlp

RESULT
"""

from train.config import Config, Digits, Mlp, Optim, Train


def config() -> Config:
    return Config(
        name="digits_mlp",
        data=Digits(batch_size=64, max_shift=1),
        model=Mlp(hidden=(256, 256)),
        optim=Optim(name="adamw", learning_rate=2e-3, weight_decay=1e-2, warmup_steps=20),
        train=Train(epochs=60, log_every=50),
    )
