"""Fine-tune a published language model with LoRA adapters, on answers or chats.

    fnet fit MODEL --target h100         # memory and time of this and other ways
    fnet train finetune_lora --model.path MODEL --data.path data.jsonl

Trains adapters of rank 16 on all matrices of the blocks, 8 rows of 2,048 tokens a step.
For Llama-3-8B these are 41,943,040 parameters. The train state takes 15.43 GiB, and the step
on an H100 about 24.2 GiB and at least 2.1 s, without remat: compiled ahead of time for one and
two blocks and extrapolated to 32. With --model.quantize nf4 the state takes 5.88 GiB.
Checkpoints hold the adapters only. Not trained at that size here.
"""

from train.config import ChatFile, Checkpoint, Config, Microbatch, Optim, Pretrained, Train


def config() -> Config:
    return Config(
        name="finetune_lora",
        data=ChatFile(context=2048, batch_size=8, packing=True),
        model=Pretrained(path="model", lora_rank=16),
        optim=Optim(name="adamw", learning_rate=2e-4, warmup_steps=20, clip_norm=1.0),
        grad=Microbatch(microbatches=8),
        train=Train(epochs=1.0, precision="bfloat16"),
        checkpoint=Checkpoint(every=500),
    )
