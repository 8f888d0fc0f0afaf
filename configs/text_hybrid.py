"""Language model with recurrent and attention blocks (Griffin), on bytes.

    fnet train text_hybrid --data.path tinyshakespeare.txt

Two RG-LRU blocks per block of sliding-window attention over 32 tokens (De et al. 2024,
"Griffin"). 1,493,120 parameters, 86 MiB at the peak of the train step, about seven
minutes on two CPU cores. Test loss on the last tenth of tinyshakespeare after 2,000
steps: 1.607 nats per character (one seed).
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
