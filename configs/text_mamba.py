"""A Mamba that continues a text, byte by byte, with as many parameters as the transformer.

    fnet train text_mamba --data.path tinyshakespeare.txt

849,152 parameters, 99 MiB at the peak of the train step, 330 s on two CPU cores. On
tinyshakespeare, the last tenth held out, 1.545 nats a character after 2,000 steps (one
seed), where the transformer of 824,448 parameters has 1.656.
"""

from train.config import Checkpoint, Config, LanguageModel, Optim, TextFile, Train


def config() -> Config:
    return Config(
        name="text_mamba",
        data=TextFile(context=64, batch_size=12),
        # Mixers alone, as in the paper: what a feed-forward would take is more blocks.
        model=LanguageModel(mixers=("mamba",), blocks=7, width=128, hidden=0),
        optim=Optim(
            name="adamw",
            learning_rate=3e-3,
            schedule="cosine",
            warmup_steps=100,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        train=Train(steps=2000, log_every=50, eval_every=500),
        checkpoint=Checkpoint(every=500),
    )
