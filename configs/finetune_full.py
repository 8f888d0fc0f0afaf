"""Fine-tune all parameters of a published language model, with compact optimizer states.

    fnet fit MODEL --target h100         # memory and time of this and other ways
    fnet train finetune_full --model.path MODEL --data.path data.jsonl

Parameters are bfloat16 with 8-bit states, 8 rows of 2,048 tokens a step.
For Llama-3.2-1B, 1,235,814,400 parameters, a step takes 10.35 GiB on an H100, compiled ahead of
time, and at least 0.76 s. The train state takes 5.90 GiB of that. Not trained at that size here.
"""

from train.config import ChatFile, Checkpoint, Config, Microbatch, Optim, Pretrained, Train


def config() -> Config:
    return Config(
        name="finetune_full",
        data=ChatFile(context=2048, batch_size=8, packing=True),
        model=Pretrained(path="model"),
        optim=Optim(name="compact_adamw", learning_rate=1e-5, warmup_steps=20, clip_norm=1.0),
        grad=Microbatch(microbatches=8),
        train=Train(epochs=1.0, precision="bfloat16", params_dtype="bfloat16"),
        checkpoint=Checkpoint(every=500),
    )
