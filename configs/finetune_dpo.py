"""Fine-tune a published language model on pairs of answers, of which one is preferred (DPO).

    fnet train finetune_dpo --model.path MODEL --data.path pairs.jsonl

Trains adapters of rank 16 on all matrices of the blocks, 16 pairs a step, with beta 0.1. A line is
{"prompt": ..., "chosen": ..., "rejected": ...}, with texts or messages. The log-likelihoods of the
model before training are computed once, before the first step. Not trained on a large model here.
"""

from train.config import Checkpoint, Config, Microbatch, Optim, PreferenceFile, Pretrained, Train


def config() -> Config:
    return Config(
        name="finetune_dpo",
        data=PreferenceFile(context=1024, batch_size=16),
        model=Pretrained(path="model", lora_rank=16),
        optim=Optim(name="adamw", learning_rate=5e-6, warmup_steps=20, clip_norm=1.0),
        grad=Microbatch(microbatches=16),
        train=Train(epochs=1.0, precision="bfloat16"),
        checkpoint=Checkpoint(every=500),
    )
