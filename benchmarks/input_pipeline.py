"""Decoding and augmentation: images a second by threads and by processes, on one core and on two.

    python -m benchmarks.input_pipeline

JPEGs are made on the spot: smooth colours with some noise, of CIFAR's size and of that of
ImageNet's median image. They become batches of 128 as the recipes make them: the small ones
moved over their mirror image and mirrored, the large ones cut at random, resized to 224 x 224
and mirrored, with colour jitter and lighting or without. Files are in the page cache.

Threads share the rows of a batch in one process. Decoding and resizing leave Python's lock, the
rest does not. Processes are `train.data.workers`. "One core": all run on one, by CPU affinity.
What one thread takes of a core's time depends less on what else the machine does than the
other columns; "kept" is what it takes once all files have been decoded and stay in memory.

The last table says what a process costs: seconds until it has made its first images, and memory
that it does not share with others, beside what one of grain's own takes. A process imports what
the program's main module does, which is why this one imports JAX and grain late.
"""

import contextlib
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
from train.data.image_batches import CachedImages, EvaluationImages, TrainingImages
from train.data.workers import Workers

Make = Callable[[TrainingImages, Arrays], object]
"""Makes a batch of rows."""

BATCH = 128
IMAGES = 512
PARTS: dict[str, Any] = {
    "crop": "resized",
    "area": (0.08, 1.0),
    "padding": 4,
    "flip": True,
    "color_jitter": 0.0,
    "lighting": 0.0,
    "cutout": 0,
    "fill": (124, 116, 104),
}


def write_images(folder: Path, width: int, height: int) -> np.ndarray:
    """Paths of JPEGs of that size."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for i in range(IMAGES):
        coarse = generator.integers(0, 256, (height // 15 + 2, width // 15 + 2, 3), np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth) + generator.normal(0, 6, (height, width, 3))
        image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        image.save(folder / f"{i}.jpg", quality=90)
    return np.array([f"{i}.jpg".encode() for i in range(IMAGES)])


def cases(root: Path) -> dict[str, tuple[TrainingImages, np.ndarray]]:
    """By name: how files become images, and which files."""
    small, large = root / "small", root / "large"
    files = {small: write_images(small, 32, 32), large: write_images(large, 500, 375)}
    chosen: dict[str, tuple[Path, int, dict[str, Any]]] = {
        "32 x 32, moved and mirrored": (small, 32, {"crop": "reflected"}),
        "500 x 375 to 224 x 224": (large, 224, {}),
        "the same with jitter and lighting": (large, 224, {"color_jitter": 0.4, "lighting": 0.1}),
    }
    return {
        name: (TrainingImages(**PARTS | {"root": os.fsencode(at), "size": size} | more), files[at])
        for name, (at, size, more) in chosen.items()
    }


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Keeps the thread, and what it starts, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def threads(n: int) -> Make:
    """Rows shared among n threads of this process."""
    pool = ThreadPoolExecutor(n)

    def make(images: TrainingImages, rows: Arrays) -> None:
        list(pool.map(images, [{k: a[i::n] for k, a in rows.items()} for i in range(n)]))

    return make


def reading(images: TrainingImages, paths: np.ndarray, make: Make, cores: set[int]) -> Callable:
    """A function that makes batches of all the files."""

    def read() -> None:
        generator = np.random.default_rng(0)
        with on_cores(cores):
            for start in range(0, len(paths), BATCH):
                path = paths[start : start + BATCH]
                make(images, {"path": path} | images.draw(len(path), generator))

    return read


def kept(images: TrainingImages, paths: np.ndarray) -> Make:
    """Decoded the first time, augmented each time."""
    whole = EvaluationImages(images.root, images.size, images.size, 1, images.fill)
    keep = CachedImages(whole, paths, Workers(0))
    index = {path: i for i, path in enumerate(paths.tolist())}

    def make(images: TrainingImages, rows: Arrays) -> None:
        which = np.array([index[path] for path in rows["path"].tolist()])
        images.augment(keep(which)["image"], rows)

    return make


def core_seconds(call: Callable, rounds: int) -> float:
    """Of this process, the median over calls; the first is not counted."""
    spent = []
    for _ in range(rounds + 1):
        before = time.process_time()
        call()
        spent.append(time.process_time() - before)
    return statistics.median(spent[1:])


def speeds(root: Path, rounds: int) -> Iterator[dict[str, str]]:
    """A row a case: images a second in each way, against the first; one thread's time for one."""
    from benchmarks.measure import interleaved

    cores = sorted(os.sched_getaffinity(0))
    one, two = {cores[0]}, set(cores[:2])
    for case, (images, paths) in cases(root).items():
        ways: dict[str, tuple[Make, set[int]]] = {
            "1 thread, 1 core": (threads(1), one),
            "1 process, 1 core": (Workers(1), one),
            "2 threads, 2 cores": (threads(2), two),
            "2 processes, 2 cores": (Workers(2), two),
        }
        calls = {name: reading(images, paths, *way) for name, way in ways.items()}
        cpu = core_seconds(calls["1 thread, 1 core"], rounds) / len(paths)
        row = {"images": case, "core's time": f"{1e6 * cpu:,.0f} us"}
        row["50,000"] = f"{50_000 * cpu:,.1f} s"
        row["50,000 kept"] = "-"
        if images.crop != "resized":
            again = reading(images, paths, kept(images, paths), one)
            row["50,000 kept"] = f"{50_000 * core_seconds(again, rounds) / len(paths):,.1f} s"
        seconds = interleaved(calls, rounds)
        first = seconds["1 thread, 1 core"]
        for name, s in seconds.items():
            row[name] = f"{len(paths) / s:,.0f}" + (f" ({first / s:.2f} x)" if s != first else "")
        yield row


class Zeros:
    """Grain's source of something to begin with."""

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> Arrays:
        return {"image": np.zeros((2, 32, 32, 3), np.uint8)}


def grains_worker() -> object:
    """Grain's own process, once it has made something."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    source = grain.MapDataset.source(Zeros()).to_iter_dataset(grain.ReadOptions(1, 1))
    batches = iter(source.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)))
    next(batches)
    return batches


def costs(root: Path) -> Iterator[dict[str, str]]:
    """A row a kind of process: seconds to begin, MB that are its own and that it holds in all."""
    images = TrainingImages(**PARTS | {"root": os.fsencode(root / "small"), "size": 32})
    files = {"path": np.array([b"0.jpg", b"1.jpg"])} | images.draw(2, np.random.default_rng(0))

    def ours() -> Workers:
        workers = Workers(1)
        workers(images, files)
        return workers

    import grain  # noqa: F401 (what the program has imported when it starts them)

    for name, begin in (("this", ours), ("grain's", grains_worker)):
        there = {child.pid for child in multiprocessing.active_children()}
        started = time.perf_counter()
        kept = begin()
        seconds = time.perf_counter() - started
        (pid,) = {child.pid for child in multiprocessing.active_children()} - there
        held = Path(f"/proc/{pid}/smaps_rollup").read_text().split("\n")[1:]
        kb = {line.split(":")[0]: int(line.split()[1]) for line in held if line}
        private = kb["Private_Clean"] + kb["Private_Dirty"]
        yield {
            "process": name,
            "seconds to its first images": f"{seconds:.2f}",
            "MB of its own": f"{private / 1024:.0f}",
            "MB in all": f"{kb['Rss'] / 1024:.0f}",
        }
        del kept


def main() -> None:
    from benchmarks.measure import markdown

    options = argument_parser(__doc__, rounds=7).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "speeds": list(speeds(Path(folder), options.rounds)),
            "costs": list(costs(Path(folder))),
        }
    print("\n\n".join(map(markdown, tables.values())))
    print(f"\nBatches of {BATCH}.")
    publish([], options, "pillow", "numpy", "grain", data=tables)


if __name__ == "__main__":
    main()
