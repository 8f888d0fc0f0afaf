"""Recurrence and attention in turn, continuing a text byte by byte.

    fnet train text_hybrid --data.path tinyshakespeare.txt

Two RG-LRU blocks to one of attention over 32 positions (De et al. 2024, "Griffin").
1,493,120 parameters, 86 MiB at the peak of the train step; on two CPU cores about seven
minutes. On tinyshakespeare, the last tenth held out, 1.607 nats a character after 2,000
steps (one seed).
"""

from train.config import Checkpoint, Config, LanguageModel, Optim, TextFile, Train


def config() -> Config:
    return Config(
        name="text_hybrid",
        data=TextFile(context=64, batch_size=12),
        model=LanguageModel(
            mixers=("rg_lru", "rg_lru", "attention"), blocks=6, width=128, window=32
        ),
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
