"""Shards of small images in each format."""

import io
import json
import tarfile

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog", "owl")


def pixels(i, size=(6, 5)):
    """Pixels of image i, uint8 [height, width, 3]."""
    return np.random.default_rng(i).integers(0, 256, (*size[::-1], 3), np.uint8)


def png(i, size=(6, 5)):
    file = io.BytesIO()
    Image.fromarray(pixels(i, size)).save(file, "png")
    return file.getvalue()


def write_tar(path, ids, *, files=None):
    """Write a shard as WebDataset does; ``files(i)`` are extensions and contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = files or (lambda i: {"png": png(i), "cls": str(i % 3).encode()})
    with tarfile.open(path, "w") as shard:
        for i in ids:
            for extension, content in files(i).items():
                member = tarfile.TarInfo(f"{i:04}.{extension}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def write_parquet(path, ids, *, group=4, names=(), label="label", plain=False):
    """Write a shard as Hugging Face's datasets library does."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    images = [png(i) if plain else {"bytes": png(i), "path": f"{i}.png"} for i in ids]
    table = pyarrow.table({"image": images, label: [i % 3 for i in ids]})
    if names:
        features = {label: {"names": list(names), "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        table = table.replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, path, row_group_size=group)


WRITERS = {"tar": write_tar, "parquet": write_parquet}
