"""Decoding and augmentation: images per second with threads and processes, on one and two cores.

    python -m benchmarks.input_pipeline

The benchmark generates JPEGs of smooth colors with some noise, in the size of CIFAR's images and
of ImageNet's median image. They become batches of 128 as in the recipes. Small images are shifted
with reflection padding and flipped. Large images are randomly cropped, resized to 224 x 224 and
flipped, with or without color jitter and lighting. Files are in the page cache.

Threads share the rows of a batch in one process. Decoding and resizing release Python's GIL; the
rest does not. Processes are `train.data.workers`. With "1 core" all run on one core, by CPU
affinity. The CPU time of one thread depends less on other load than the other columns. "cached"
is its CPU time once all decoded images are in memory.

The last table shows the cost of a process: seconds until its first images, and its private
memory, compared with a worker process of grain. A process imports what the main module imports,
which is why this module imports JAX and grain late.
"""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.claims import argument_parser, publish
from train.data import Arrays
from train.data.image_batches import ImageOptions, read_evaluation, read_training
from train.data.labeled_images import CachedImages
from train.data.workers import Workers

Make = Callable[[Callable[[Arrays], Arrays], Arrays], object]
"""``(read, rows)``: makes a batch of rows."""

BATCH = 128
IMAGES = 512
PARTS: dict[str, Any] = {
    "crop": "resized",
    "min_area": 0.08,
    "padding": 4,
    "flip": True,
    "mean": (0.485, 0.456, 0.406),
}


def write_images(folder: Path, width: int, height: int) -> np.ndarray:
    """Write JPEGs of the given size and return their paths."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for i in range(IMAGES):
        coarse = generator.integers(0, 256, (height // 15 + 2, width // 15 + 2, 3), np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth) + generator.normal(0, 6, (height, width, 3))
        image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        image.save(folder / f"{i}.jpg", quality=90)
    return np.array([str(folder / f"{i}.jpg") for i in range(IMAGES)], object)


def cases(root: Path) -> dict[str, tuple[ImageOptions, np.ndarray]]:
    """Transformation and files, by name of the case."""
    small, large = root / "small", root / "large"
    files = {small: write_images(small, 32, 32), large: write_images(large, 500, 375)}
    chosen: dict[str, tuple[Path, int, dict[str, Any]]] = {
        "32 x 32, shifted and flipped": (small, 32, {"crop": "reflected"}),
        "500 x 375 to 224 x 224": (large, 224, {}),
        "the same with jitter and lighting": (large, 224, {"color_jitter": 0.4, "lighting": 0.1}),
    }
    return {
        name: (
            ImageOptions(**PARTS | {"image_size": size} | options),
            files[folder],
        )
        for name, (folder, size, options) in chosen.items()
    }


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Run the thread and its children on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def threads(n: int) -> Make:
    """Share rows among n threads of this process."""
    pool = ThreadPoolExecutor(n)

    def make(read: Callable[[Arrays], Arrays], rows: Arrays) -> None:
        list(pool.map(read, [{k: a[i::n] for k, a in rows.items()} for i in range(n)]))

    return make


def reading(images: ImageOptions, paths: np.ndarray, make: Make, cores: set[int]) -> Callable:
    """Build a function that makes batches of all files."""

    def read() -> None:
        generator = np.random.default_rng(0)
        with on_cores(cores):
            for start in range(0, len(paths), BATCH):
                path = paths[start : start + BATCH]
                make(
                    functools.partial(read_training, images),
                    {"file": path} | images.draw(len(path), generator),
                )

    return read


def cached(images: ImageOptions, paths: np.ndarray) -> Make:
    """Decode images the first time and augment them each time."""
    plain = dataclasses.replace(images, resize=images.image_size)
    read = functools.partial(read_evaluation, plain)
    cache = CachedImages(
        np.arange(len(paths)), plain, lambda rows: read({"file": paths[rows["id"]]})
    )
    index = {path: i for i, path in enumerate(paths.tolist())}

    def make(read: Callable[[Arrays], Arrays], rows: Arrays) -> None:
        ids = np.array([index[path] for path in rows["file"].tolist()])
        images.augment(cache({"id": ids})["image"], rows)

    return make


def core_seconds(call: Callable, rounds: int) -> float:
    """Median CPU seconds of this process per call; the first call is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        before = time.process_time()
        call()
        seconds.append(time.process_time() - before)
    return statistics.median(seconds[1:])


def speeds(root: Path, rounds: int) -> Iterator[dict[str, str]]:
    """Images per second of each method, and CPU time of one thread; a row per case."""
    from benchmarks.measure import interleaved

    cores = sorted(os.sched_getaffinity(0))
    one, two = {cores[0]}, set(cores[:2])
    for case, (images, paths) in cases(root).items():
        methods: dict[str, tuple[Make, set[int]]] = {
            "1 thread, 1 core": (threads(1), one),
            "1 process, 1 core": (Workers(1), one),
            "2 threads, 2 cores": (threads(2), two),
            "2 processes, 2 cores": (Workers(2), two),
        }
        calls = {name: reading(images, paths, *method) for name, method in methods.items()}
        cpu = core_seconds(calls["1 thread, 1 core"], rounds) / len(paths)
        row = {"images": case, "CPU time": f"{1e6 * cpu:,.0f} us"}
        row["50,000"] = f"{50_000 * cpu:,.1f} s"
        row["50,000 cached"] = "-"
        if images.crop != "resized":
            read = reading(images, paths, cached(images, paths), one)
            row["50,000 cached"] = f"{50_000 * core_seconds(read, rounds) / len(paths):,.1f} s"
        seconds = interleaved(calls, rounds)
        first = seconds["1 thread, 1 core"]
        for name, s in seconds.items():
            row[name] = f"{len(paths) / s:,.0f}" + (f" ({first / s:.2f} x)" if s != first else "")
        yield row


class Zeros:
    """Random-access source for grain."""

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> Arrays:
        return {"image": np.zeros((2, 32, 32, 3), np.uint8)}


def start_grain_worker() -> object:
    """Start a worker process of grain and wait for its first batch."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    source = grain.MapDataset.source(Zeros()).to_iter_dataset(grain.ReadOptions(1, 1))
    batches = iter(source.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)))
    next(batches)
    return batches


def costs(root: Path) -> Iterator[dict[str, str]]:
    """Startup time and memory of a worker process; a row per kind."""
    images = ImageOptions(**PARTS | {"image_size": 32})
    paths = np.array([str(root / "small" / f"{i}.jpg") for i in range(2)], object)
    files = {"file": paths} | images.draw(2, np.random.default_rng(0))

    def start_worker() -> Workers:
        workers = Workers(1)
        workers(functools.partial(read_training, images), files)
        return workers

    import grain  # noqa: F401 (the program has imported it when it starts workers)

    for name, start in (("fnet", start_worker), ("grain", start_grain_worker)):
        existing = {child.pid for child in multiprocessing.active_children()}
        began = time.perf_counter()
        worker = start()
        seconds = time.perf_counter() - began
        (pid,) = {child.pid for child in multiprocessing.active_children()} - existing
        smaps = Path(f"/proc/{pid}/smaps_rollup").read_text().split("\n")[1:]
        kb = {line.split(":")[0]: int(line.split()[1]) for line in smaps if line}
        private = kb["Private_Clean"] + kb["Private_Dirty"]
        yield {
            "process": name,
            "seconds to first images": f"{seconds:.2f}",
            "private MB": f"{private / 1024:.0f}",
            "resident MB": f"{kb['Rss'] / 1024:.0f}",
        }
        del worker


def main() -> None:
    from benchmarks.measure import markdown_table

    options = argument_parser(__doc__, rounds=7).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "speeds": list(speeds(Path(folder), options.rounds)),
            "costs": list(costs(Path(folder))),
        }
    print("\n\n".join(map(markdown_table, tables.values())))
    print(f"\nBatches of {BATCH}.")
    publish([], options, "pillow", "numpy", "grain", data=tables)


if __name__ == "__main__":
    main()
