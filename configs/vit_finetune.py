"""Fine-tune a published image network (ViT, DINOv2, ConvNeXt, CLIP) on your own classes.

fnet train vit_finetune --model.path MODEL --data.path IMAGES

A ViT-B/16 with batch 64 takes 4.41 GiB on an H100, compiled ahead of time.
`fnet import MODEL` finds the mean and the standard deviation that the model expects. A run names
them if they are others.
"""

from train.config import Config, ImageFolder, Optim, Pretrained, Train


def config() -> Config:
    return Config(
        name="vit_finetune",
        data=ImageFolder(
            path="images",
            image_size=224,
            batch_size=64,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
        ),
        model=Pretrained(path="model"),
        optim=Optim(
            name="adamw",
            learning_rate=3e-5,
            classifier_learning_rate=1e-3,
            warmup_steps=100,
            weight_decay=0.05,
            clip_norm=1.0,
        ),
        train=Train(epochs=5.0, precision="bfloat16"),
    )
