"""Multilayer perceptron on 8 x 8 handwritten digits, as a baseline.

    fnet train digits_mlp

About 10 s on two CPU cores. 85,002 parameters, 2.0 MiB at the peak of the train
step. Test accuracy on the held-out fifth: 98.6 %; over five splits and seeds 97.8
to 98.6 %, mean 98.2 %.
"""

from train.config import Config, Digits, Mlp, Optim, Train


def config() -> Config:
    return Config(
        name="digits_mlp",
        data=Digits(batch_size=64, max_shift=1),
        model=Mlp(hidden=(256, 256)),
        optim=Optim(name="adamw", learning_rate=2e-3, weight_decay=1e-2, warmup_steps=20),
        train=Train(epochs=60, log_every=50, eval_every=100),
    )
