"""Transformer language model, on bytes.

    fnet train text_transformer --data.path tinyshakespeare.txt
    fnet sample runs/text_transformer --prompt 'ROMEO:'

Without a path the text is the source code of Python's standard library, 4.7 MB. 824,448
parameters, 34 MiB at the peak of the train step, about two minutes on two CPU cores. Test
loss on the last tenth of tinyshakespeare (1.1 MB): 1.656 nats per character, with a spread
of 0.005 over three seeds. nanoGPT reports 1.88 for this model size and number of steps.
With --model.attention-context lagged it is 1.651, spread 0.016: no significant difference.
"""

from train.config import Checkpoint, Config, LanguageModel, Optim, TextFile, Train


def config() -> Config:
    return Config(
        name="text_transformer",
        data=TextFile(context=64, batch_size=12),
        model=LanguageModel(mixers=("attention",), blocks=4, width=128, heads=4),
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
