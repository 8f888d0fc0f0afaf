"""Classify your own photos: 50 to 50,000 images, on a laptop or a GPU.

    fnet train classify --data.path PHOTOS
    fnet train classify --data.path PHOTOS --model.pretrained resnet18.pth
    fnet train classify --data.path PHOTOS --model.pretrained resnet18.pth --optim.freeze-backbone

PHOTOS holds one folder per class, or train/ and val/ that hold them; for labels in a table add
--data.source image_table --data.path TABLE --data.images PHOTOS. ResNet-18 as torchvision's, so its
weights fit: with fewer than a few thousand images, start from them. The best checkpoint has
the highest macro F1, which counts rare classes as much as others. The run ends after ten
evaluations without a better one. Not tuned on any data set.
"""

from train.config import Checkpoint, Config, ImageFolder, Optim, ResNet, Train


def config() -> Config:
    return Config(
        name="classify",
        data=ImageFolder(
            path="photos",
            image_size=224,
            batch_size=32,
            min_area=0.35,
            color_jitter=0.2,
            random_erasing=0.1,
            class_weights="balanced",
        ),
        model=ResNet(depth=18, norm="batch", activation="relu", dilate_first=False),
        optim=Optim(
            name="adamw",
            learning_rate=3e-4,
            classifier_learning_rate=1e-3,
            warmup_steps=50,
            weight_decay=0.05,
            label_smoothing=0.1,
            clip_norm=1.0,
        ),
        train=Train(epochs=30, patience=10),
        checkpoint=Checkpoint(metric="macro_f1"),
    )
