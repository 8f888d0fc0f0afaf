"""A transformer that continues a text, byte by byte.

    fnet train text_transformer --data.path tinyshakespeare.txt
    fnet sample runs/text_transformer --prompt 'ROMEO:'

Without a path the text is that of the Python standard library's sources, 4.7 MB. 824,448
parameters, 34 MiB at the peak of the train step, about two minutes on two CPU cores. On
tinyshakespeare (1.1 MB), the last tenth held out: 1.656 nats a character, 0.005 the
spread of three seeds; nanoGPT states 1.88 for a model of this size and these steps. With
--model.attention-context lagged 1.651, spread 0.016: no difference that three seeds show.
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
