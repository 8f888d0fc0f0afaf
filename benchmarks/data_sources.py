"""Images per CPU second from folders and shards, compared with torch and webdataset.

    python -m benchmarks.data_sources [--path CIFAR10]

Each side makes batches of 128 of the same JPEGs in a fresh process. Small images are from
``CIFAR10/train`` (a folder per class; without it, images of smooth colors), shifted and flipped.
Large ones have 256 to 400 pixels per side; a random part is resized to 224 x 224 and flipped.
torch's DataLoader reads the folder, as torchvision's ImageFolder does, and webdataset the tar
files. Both decode with Pillow and crop as torchvision does. No side normalizes.

The figure is images divided by CPU seconds of all threads and processes, so that other load on the
machine matters little. The first batches are not counted. Files are in the page cache.
"""

import argparse
import io
import json
import math
import multiprocessing
import os
import random
import statistics
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from benchmarks.claims import Claim, argument_parser, installed, publish

BATCH = 128
SHARD = 1000
FORMATS = ("folder", "tar", "parquet")
PEERS = ("torch", "webdataset")
WARMUP = 8
"""Batches before the clock starts, which fill the queues of all sides."""


class Case:
    """Images of one size."""

    def __init__(self, name: str, size: int, crop: str):
        self.name, self.size, self.crop = name, size, crop


CASES = {
    "small": Case("32 x 32, shifted and flipped", 32, "padded"),
    "large": Case("256 to 400 pixels, a part resized to 224 x 224 and flipped", 224, "resized"),
}


def jpegs(case: str, source: str, count: int) -> Iterator[tuple[bytes, int]]:
    """JPEGs and labels, in random order."""
    generator = np.random.default_rng(0)
    files = sorted(Path(source, "train").glob("*/*.jpg")) if source else []
    labels = {name: i for i, name in enumerate(sorted({file.parent.name for file in files}))}
    chosen = generator.permutation(len(files))[:count] if files else [None] * count
    for index in chosen:
        if index is None:
            coarse = generator.integers(0, 256, (6, 6, 3), np.uint8)
            image, label = Image.fromarray(coarse).resize((32, 32)), int(generator.integers(10))
        else:
            file = files[index]
            image, label = Image.open(file), labels[file.parent.name]
        if case == "large":
            size = tuple(generator.integers(256, 401, 2).tolist())
            image = image.resize(size, Image.Resampling.BICUBIC)
        content = io.BytesIO()
        image.save(content, "JPEG", quality=90)
        yield content.getvalue(), label


def write(root: Path, images: list[tuple[bytes, int]]) -> None:
    """Write the images in all formats, each with a small split to test on."""
    import pyarrow
    import pyarrow.parquet

    for i, (content, label) in enumerate(images):
        for split in ("train", "val") if i < 100 else ("train",):
            path = root / "folder" / split / f"class{label}" / f"{i:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for split, part in (("train", images), ("val", images[:100])):
        for k in range(0, len(part), SHARD):
            shard = list(enumerate(part[k : k + SHARD], k))
            paths = {kind: root / kind / f"{split}-{k // SHARD}.{kind}" for kind in FORMATS[1:]}
            for path in paths.values():
                path.parent.mkdir(exist_ok=True)
            with tarfile.open(paths["tar"], "w") as tar:
                for i, (content, label) in shard:
                    for name, data in (("jpg", content), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{i:05}.{name}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
            columns = {
                "image": [{"bytes": content, "path": None} for _, (content, _) in shard],
                "label": [label for _, (_, label) in shard],
            }
            pyarrow.parquet.write_table(
                pyarrow.table(columns), paths["parquet"], row_group_size=100
            )


# ---- fnet


def fnet_batches(kind: str, root: Path, case: Case, workers: int) -> Iterator[Any]:
    from train.config import ImageFolder, ImageShards
    from train.data import training_batches

    options: dict[str, Any] = {"image_size": case.size, "crop": case.crop, "workers": workers}
    if kind == "folder":
        dataset = ImageFolder(path=str(root / kind), **options).load()
    else:
        dataset = ImageShards(path=(str(root / kind),), **options).load()
    return training_batches(dataset, BATCH, seed=0)


# ---- torch and webdataset, with torchvision's transforms written in Pillow


def transform(case: Case) -> Callable[[Image.Image], np.ndarray]:
    """RandomCrop with padding 4, or RandomResizedCrop, and RandomHorizontalFlip."""

    def apply(image: Image.Image) -> np.ndarray:
        size = case.size
        if case.crop == "padded":
            image = ImageOps.expand(image, 4)
            x, y = random.randint(0, 8), random.randint(0, 8)
            image = image.crop((x, y, x + size, y + size))
        else:
            left, top, width, height = random_part(*image.size)
            image = image.crop((left, top, left + width, top + height))
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.array(image)

    return apply


def random_part(width: int, height: int) -> tuple[int, int, int, int]:
    """Choose a part, as torchvision's RandomResizedCrop.get_params does."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


class Folder:
    """torchvision's ImageFolder: paths and labels, opened and converted by Pillow."""

    def __init__(self, root: Path, case: Case):
        self._files = sorted((root / "folder" / "train").glob("*/*.jpg"))
        self._labels = [int(file.parent.name.removeprefix("class")) for file in self._files]
        self._transform = transform(case)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        with open(self._files[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        return self._transform(image), self._labels[index]


def torch_batches(root: Path, case: Case, workers: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        Folder(root, case),  # type: ignore[arg-type]
        BATCH,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=bool(workers),
    )
    while True:
        yield from loader


def webdataset_batches(root: Path, case: Case, workers: int) -> Iterator[Any]:
    import webdataset
    from torch.utils.data import DataLoader

    change = transform(case)
    shards = sorted(map(str, (root / "tar").glob("train-*.tar")))
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
        .shuffle(1000)
        .decode("pilrgb")
        .to_tuple("jpg", "cls")
        .map_tuple(change, lambda label: label)
        .batched(BATCH, partial=False)
    )
    loader: Any = DataLoader(dataset, None, num_workers=workers, persistent_workers=bool(workers))
    while True:
        yield from loader


def cpu_seconds() -> float:
    """CPU seconds of this process and its children so far."""
    total = sum(os.times()[:4])
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(side: str, root: Path, case: Case, workers: int, batches: int) -> float:
    """Images per CPU second."""
    if side in PEERS:
        import torch

        torch.set_num_threads(1)
        make = {"torch": torch_batches, "webdataset": webdataset_batches}[side]
        made = make(root, case, workers)
    else:
        made = fnet_batches(side, root, case, workers)
    for _ in range(WARMUP):
        next(made)
    start = cpu_seconds()
    for _ in range(batches):
        next(made)
    return BATCH * batches / (cpu_seconds() - start)


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--path", default="", help="Folder with train/, of small images.")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        side, root, case, workers, batches = args.worker
        print(json.dumps(measure(side, Path(root), CASES[case], int(workers), int(batches))))
        return
    from benchmarks.measure import in_fresh_process, markdown_table

    peers = [peer for peer in PEERS if installed(peer)]
    sides = [*FORMATS, *peers]
    rows, claims, data = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for case, count, batches in (("small", 20_000, 300), ("large", 2_000, 30)):
            root = Path(folder, case)
            write(root, list(jpegs(case, args.path, count)))
            for workers in (0, 2):
                found: dict[str, list[float]] = {side: [] for side in sides}
                for _ in range(args.rounds):
                    for side in sides:
                        words = side, root, case, workers, batches
                        found[side].append(in_fresh_process("data_sources", *words))
                speed = {side: statistics.median(values) for side, values in found.items()}
                best = max((speed[peer] for peer in peers), default=math.nan)
                what = f"{CASES[case].name}, {workers or 'no'} worker processes"
                data[what] = speed
                rows.append(
                    {"images": CASES[case].name, "processes": str(workers)}
                    | {f"fnet, {side}": f"{speed[side]:,.0f}" for side in FORMATS}
                    | {peer: f"{speed[peer]:,.0f}" for peer in peers}
                )
                for kind in FORMATS if peers else ():
                    peer = max(peers, key=lambda peer: speed[peer])
                    name = {"torch": "torch's DataLoader", "webdataset": "webdataset"}[peer]
                    claims.append(
                        Claim(
                            f"read {kind}: images per CPU second, {what}",
                            f"{name}, the faster of the peers",
                            speed[kind] / best,
                            ">= 1.0",
                            "time",
                        )
                    )
    print(markdown_table(rows, left=1))
    missing = [peer for peer in PEERS if peer not in peers]
    packages = "pillow", "numpy", "grain", "pyarrow", *PEERS
    publish(claims, args, *packages, missing=missing, data=data)


if __name__ == "__main__":
    main()
