"""A reversible residual network on 8 x 8 handwritten digits: nothing is kept per block.

    fnet train digits_revnet

RESULT
"""

from train.config import Checkpoint, Config, Digits, Optim, RevNet, Train


def config() -> Config:
    return Config(
        name="digits_revnet",
        data=Digits(batch_size=64, max_shift=1),
        model=RevNet(widths=(32, 64), blocks=(3, 3)),
        optim=Optim(
            name="sgd", learning_rate=0.1, nesterov=True, weight_decay=5e-4, warmup_steps=20
        ),
        train=Train(epochs=30, log_every=50, eval_every=100),
        checkpoint=Checkpoint(every=200),
    )
