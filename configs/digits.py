"""Residual network with in-place activated batch norm on 8 x 8 handwritten digits.

    fnet train digits

About 20 s on two CPU cores, compilation included (5 s more the first time).
42,874 parameters, 3.7 MiB at the peak of the train step. Test accuracy on the
held-out fifth, 360 images: 100 %; over five splits and seeds (--data.split-seed
and --train.seed 0 to 4) 98.6 to 100 %, mean 99.4 %.
"""

from train.config import Checkpoint, Config, Digits, Optim, PreactResNet, Train


def config() -> Config:
    return Config(
        name="digits",
        data=Digits(batch_size=64, max_shift=1),
        model=PreactResNet(widths=(16, 32), blocks_per_stage=2),
        optim=Optim(
            name="sgd",
            learning_rate=0.1,
            nesterov=True,
            weight_decay=5e-4,
            schedule="cosine",
            warmup_steps=20,
        ),
        train=Train(epochs=60, log_every=50, eval_every=100),
        checkpoint=Checkpoint(every=200),
    )
