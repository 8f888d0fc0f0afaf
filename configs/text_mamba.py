"""Language model with Mamba blocks, about as large as text_transformer, on bytes.

    fnet train text_mamba --data.path tinyshakespeare.txt

849,152 parameters, 99 MiB at the peak of the train step, 330 s on two CPU cores. Test
loss on the last tenth of tinyshakespeare after 2,000 steps: 1.545 nats per character
(one seed), compared with 1.656 for text_transformer with 824,448 parameters.
"""

from train.config import Checkpoint, Config, LanguageModel, Optim, TextFile, Train


def config() -> Config:
    return Config(
        name="text_mamba",
        data=TextFile(context=64, batch_size=12),
        # No feed-forward layers, as in the paper; more blocks instead.
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
