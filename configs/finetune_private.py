"""Fine-tune a published language model on private data: LoRA with DP-SGD, epsilon 8.

    pip install '.[privacy]'
    fnet train finetune_private --model.path MODEL --data.path data.jsonl

Each row is one example of at most 512 tokens, and batches have 256 rows on average. Their
gradients are clipped to 0.1 one by one. Give --grad.delta below 1 / number of examples, and
--data.user for privacy per user. For Llama-3-8B the train state is 15.43 GiB, of which
0.47 GiB are adapters and their optimizer. Not trained at that size here.
"""

from train.config import ChatFile, Checkpoint, Clipped, Config, Optim, Pretrained, Train


def config() -> Config:
    return Config(
        name="finetune_private",
        data=ChatFile(context=512, batch_size=256, long="truncate"),
        model=Pretrained(path="model", lora_rank=16),
        optim=Optim(name="adamw", learning_rate=5e-4, schedule="constant"),
        grad=Clipped(clip=0.1, epsilon=8.0, delta=1e-5, microbatches=64),
        train=Train(epochs=3.0, precision="bfloat16"),
        checkpoint=Checkpoint(every=500),
    )
