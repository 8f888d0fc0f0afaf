"""Nothing but clipped, noised sums depends on the training examples of a private run.

Each source is loaded with one training example replaced and one removed, and a run is recorded as
it reads its examples.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import chex
import numpy as np
import pytest
from data_cases import error_message
from image_cases import write_image
from PIL import Image
from rich.console import Console
from shard_cases import png, write_parquet, write_tar

import train as train_package
from fnet import layers
from tests.pretrained_folder import write_folder
from train import config as configs
from train import data as data_package
from train import tasks
from train.data.image_shards import ImageShards
from train.data.image_table import ImageTable
from train.data.preference_file import PreferenceFile
from train.run import loop

N, OTHER = 40, 8
"""Training examples, and the one that is another or missing."""


def rows(change):
    """Pairs of the number of an example, and of what it has."""
    pairs = [(i, 91 + i if (i, change) == (OTHER, "replaced") else i) for i in range(N)]
    return [pair for pair in pairs if (pair[0], change) != (OTHER, "removed")]


def size(i):
    """Size of image i; that of a replaced one is another."""
    return (12, 10) if i < N else (17, 31)


def arrays(change):
    images = np.random.default_rng(0).integers(0, 256, (200, 8, 8, 1), np.uint8)
    own = [of for _, of in rows(change)]
    labels = np.array(own) % 2
    np.savez(
        "data.npz", x_train=images[own], y_train=labels, x_test=images[-9:], y_test=np.arange(9) % 2
    )
    return configs.ArrayFile(path="data.npz", batch_size=4)


def folders(change):
    for split, pairs in (("train", rows(change)), ("val", rows(None)[:9])):
        for i, of in pairs:
            write_image(Path("data", split, "ab"[of % 2], f"{i}.png"), of, size(of))
    return configs.ImageFolder(path="data", batch_size=4, image_size=8)


def held_out(change):
    for i, of in rows(change):
        write_image(Path("data", "ab"[i % 2], f"{i}.png"), of, size(of))
    return configs.ImageFolder(path="data", batch_size=4, image_size=8, split_seed=3)


def table(change):
    lines = ["file,label,split"]
    pairs = [("train", rows(change)), ("test", rows(None)[:9])]
    for split, i, of in [(split, *pair) for split, pairs in pairs for pair in pairs]:
        write_image(Path("data", split, f"{i}.png"), of, size(of))
        lines.append(f"{split}/{i}.png,{of / 4},{split}")
    Path("data", "labels.csv").write_text("\n".join(lines))
    numbers = {"targets": "numbers", "label_mean": (5.0,), "label_std": (3.0,)}
    return ImageTable(
        path="data/labels.csv",
        images="data",
        label=("label",),
        image_size=8,
        batch_size=4,
        **numbers,
    )


def shards(change):
    def files(of):
        return lambda i: {"png": png(of[i], size(of[i])), "cls": str(of[i] % 3).encode()}

    for split, pairs in (("train", rows(change)), ("val", rows(None)[:9])):
        of = dict(pairs)
        write_tar(Path("data", f"{split}-0.tar"), list(of), files=files(of))
    return ImageShards(path=("data",), batch_size=4, image_size=8, crop="center")


def parquet(change):
    for split, pairs in (("train", rows(change)), ("val", rows(None)[:9])):
        write_parquet(Path("data", f"{split}-0.parquet"), [of for _, of in pairs])
    return ImageShards(path=("data",), batch_size=4, image_size=8, crop="center")


def masks(change):
    for split, pairs in (("train", rows(change)), ("val", rows(None)[:9])):
        for i, of in pairs:
            write_image(Path("data", split, "images", f"{i}.png"), of, size(of))
            mask = Image.fromarray(np.full(size(of)[::-1], of % 3, np.uint8), "P")
            mask.putpalette([0, 0, 0, 0, 255, 0, 0, 0, 255] + [of] * 3 * (of >= N))
            path = Path("data", split, "masks", f"{i}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            mask.save(path)
    return configs.SegmentationFolder(
        path="data", classes=3, mask_reading="index", image_size=8, batch_size=4
    )


def jsonl(name, pairs, record):
    Path(name).write_text("\n".join(json.dumps(record(of)) for _, of in pairs))
    return name


def text(change):
    def document(of):
        return f"document {of} " + "." * (of % 9 + 10 * (of > N))

    Path("data.txt").write_text("|".join(document(of) for _, of in rows(change)))
    return configs.TextFile(path="data.txt", separator="|", context=64, batch_size=4)


def chats(change):
    def record(of):
        return {"prompt": f"{of}", "completion": "yes" * (of % 9 + 1)}

    path, test = jsonl("d.jsonl", rows(change), record), jsonl("t.jsonl", rows(None)[:9], record)
    return configs.ChatFile(path=path, test_path=test, context=32, batch_size=4)


def classes(change):
    def record(of):
        return {"text": f"{of}" + "x" * (of % 9), "kind": "ab"[of % 2]}

    path, test = jsonl("d.jsonl", rows(change), record), jsonl("t.jsonl", rows(None)[:9], record)
    return configs.ChatFile(path=path, test_path=test, label="kind", context=32, batch_size=4)


def pairs(change):
    def record(of):
        return {"prompt": f"{of}", "chosen": "yes" * (of % 9 + 1), "rejected": "no"}

    path, test = jsonl("d.jsonl", rows(change), record), jsonl("t.jsonl", rows(None)[:9], record)
    return PreferenceFile(path=path, test_path=test, context=32, batch_size=4)


_FILES = arrays, folders, held_out, table, shards, parquet, masks, text, chats, classes, pairs
SOURCES = {source.__name__: source for source in _FILES}
WITHOUT_FILES = {"digits", "synthetic", "huggingface"}
"""Sources whose examples no file of the user's has, and one that only names others' splits."""


def test_each_source_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {source(None).source for source in SOURCES.values()}
    assert asked | WITHOUT_FILES == set(configs.variants("data"))


def public(dataset):
    """Return what a run uses or publishes of a dataset, besides batches."""
    private = "train", "contents", "notes", "users"
    fields = dataset._asdict().items()
    values = {k: v for k, v in fields if k not in private and not callable(v)}
    test = {k: v for k, v in dataset.test.items() if k not in ("id", "start", "span")}
    batch = data_package.sample_batch(dataset, 2)
    shapes = {k: (a.shape, a.dtype) for k, a in batch.items()}
    tested = dataset.test_batch(dataset.test)
    tested = {k: v for k, v in tested.items() if k not in ("id", "start")}
    return values | {"test": test, "tested": tested, "ratio": dataset.tokens_per_byte()}, shapes


@pytest.mark.parametrize("change", ["replaced", "removed"])
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_published_of_the_data_does_not_depend_on_a_training_example(
    source, change, tmp_path, monkeypatch
):
    found = []
    for name, changed in (("one", None), ("other", change)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        config = SOURCES[source](changed)
        dataset = config.load(private=True)
        assert OTHER in range(len(dataset.train[next(iter(dataset.train))]))
        found.append((*public(dataset), data_package.num_examples(dataset.train)))
    (values, shapes, count), (other, other_shapes, other_count) = found
    assert count - other_count == (change == "removed")
    assert shapes == other_shapes
    chex.assert_trees_all_equal(values.pop("test"), other.pop("test"))
    chex.assert_trees_all_equal(values.pop("tested"), other.pop("tested"))
    assert str(values) == str(other)


def test_no_split_depends_on_a_copy_of_an_example(tmp_path, monkeypatch):
    """Images without names, of which each is there three times."""
    monkeypatch.chdir(tmp_path)

    def held_out(ids):
        write_parquet(Path("data.parquet"), ids, plain=True)
        data = ImageShards(path=("data.parquet",), batch_size=4, split_seed=0, image_size=4)
        dataset = data.load(private=True)
        images = dataset.prepare(dataset.test)["image"]
        return {image.tobytes() for image in images}, len(images)

    every = [*range(12)] * 3
    images, count = held_out(every)
    assert count == 3 * len(images)
    for i in range(12):
        fewer, left = held_out(every[:i] + every[i + 1 :])
        assert fewer == images
        assert count - left in (0, 1)


SHAPES = "shapes and dtypes of a batch, from the first example"
ALLOWED = {
    "train.tasks.__init__:build": SHAPES,
    "train.tasks.images:build_network": SHAPES,
    "train.run.setup:_batch_shapes": SHAPES,
    "train.data.poisson:poisson_batches": "batches, whose clipped sum gets noise",
    "train.data.poisson:user_batches": "batches, whose clipped sum gets noise",
    "train.run.same_data:describe_data": "a checksum, which private/data.json has, or with a key",
    "train.data.unreadable:UnreadableFiles.look": "names of files, in private/unreadable.csv",
    "a thread": "whether a file can be read, for UnreadableFiles.look",
    "train.data.poisson:num_users": "the number of users, which is public as that of examples is",
    "train.tasks.diffusion:_check_unit_interval": "a check that refuses images outside [0, 1]",
    "train.run.examples:draw_augmented": "pictures in private/augmented.png",
    "train.tasks.preference:build": "what a pair's loss reads, which private/reference.npz keeps",
    "train.tasks.preference:_identity": "a checksum, in private/reference.npz",
}
"""Functions that may ask for training examples, and what becomes of them."""
NOT_RELEASED = {"train.run.examples:draw_augmented"}
PASS_ON = {"select_rows", "augment_rows", "sample_batch", "sample_user_batch", "hash_names"}
"""Functions that return examples to the one that asks."""


class Recorder:
    """Record the functions of the program that ask for training examples, and how many."""

    def __init__(self):
        self.readers = {}

    def add(self, count):
        frame, package = sys._getframe(2), str(Path(train_package.__file__).parent)
        while frame is not None:
            path, name = frame.f_code.co_filename, frame.f_code.co_qualname.split(".<locals>")[0]
            if path.startswith(package) and name not in PASS_ON:
                break
            frame = frame.f_back
        place = path[len(package) - len("train") : -len(".py")].replace("/", ".")
        reader = f"{place}:{name}" if frame else "a thread"
        self.readers[reader] = max(self.readers.get(reader, 0), count)

    def calls_of(self, function):
        def recorded(*args):
            self.add(0)
            return function(*args)

        return recorded

    def watch(self, dataset):
        functions = "name", "file_bytes", "files", "explain"
        return dataset._replace(
            train={name: Rows(a, self) for name, a in dataset.train.items()},
            contents=tuple(Rows(a, self) for a in dataset.contents),
            users=None if dataset.users is None else Rows(dataset.users, self),
            **{name: self.calls_of(getattr(dataset, name)) for name in functions},
        )


class Rows:
    """An array of training examples, whose values cannot be read without a record."""

    def __init__(self, array, recorder):
        self.array, self.recorder = array, recorder
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __len__(self):
        return len(self.array)

    def __getattr__(self, name):
        self.recorder.add(len(self))
        return getattr(self.array, name)

    def __array__(self, dtype=None, copy=None):
        self.recorder.add(len(self))
        return np.asarray(self.array, dtype)

    def __getitem__(self, index):
        values = self.array[index]
        self.recorder.add(np.size(index) if isinstance(index, np.ndarray) else len(values))
        return values

    def __setitem__(self, index, values):
        self.array[index] = values


class StopHereError(Exception):
    """The end of what a test runs."""


class Pixels(configs.DeepLab):
    """A classifier of single pixels, which is compiled in seconds."""

    def build(self, image_shape, num_classes):
        return layers.conv(image_shape[-1], num_classes, 1)


TEXT_MODEL = configs.LanguageModel(width=16, heads=2)
PUBLISHED, BYTES = configs.Pretrained(path="model"), {"vocabulary": 256}
RUNS = {
    "images": (folders, configs.Mlp(hidden=()), {}, {}),
    "release only": (folders, configs.Mlp(hidden=()), {}, {"release_only": True}),
    "numbers": (table, configs.Mlp(hidden=()), {}, {}),
    "texts": (text, TEXT_MODEL, {}, {}),
    "users": (text, TEXT_MODEL, {"user": "document", "examples_per_user": 2}, {}),
    "chats": (chats, TEXT_MODEL, {}, {}),
    "denoiser": (arrays, configs.Denoiser(width=16, heads=2), {}, {"microbatches": 2}),
    "shards": (shards, configs.Mlp(hidden=()), {}, {}),
    "parquet": (parquet, configs.Mlp(hidden=()), {}, {}),
    "masks": (masks, Pixels(), {}, {}),
    "classes of texts": (classes, PUBLISHED, BYTES, {}),
    "dpo": (pairs, PUBLISHED, BYTES, {}),
    "dpo, release only": (pairs, PUBLISHED, BYTES, {"release_only": True}),
    "orpo": (pairs, PUBLISHED, BYTES | {"objective": "orpo"}, {}),
    "rewards": (pairs, PUBLISHED, BYTES | {"objective": "reward"}, {}),
}
SLOW = {"texts", "chats", "denoiser", "dpo, release only", "orpo", "rewards", "classes of texts"}


def runs():
    for name in RUNS:
        yield pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])


def test_each_task_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = [
        configs.Config(data=source(None).replace(**options), model=model)
        for source, model, options, _ in RUNS.values()
    ]
    assert {tasks.kind_of(config).build for config in asked} == {
        kind.build for kind in tasks.KINDS.values()
    }


@pytest.mark.parametrize(
    ("source", "options", "refused"),
    [
        (masks, {"mask_reading": None}, "data.mask_reading: None looks at training masks"),
        (shards, {"weights": (1.0,)}, "data.weights: (1.0,), but this depends on all training"),
        (held_out, {"folds": 5}, "data.folds: 5, but this depends on all training examples"),
    ],
)
def test_statistics_that_the_config_does_not_give_are_refused(
    source, options, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    data, model = (
        source(None).replace(**options),
        Pixels() if source is masks else configs.Mlp(hidden=()),
    )
    private = configs.Clipped(noise_multiplier=1.0, delta=1e-3)
    assert tasks.load(configs.Config(data=data, model=model)).classes
    assert refused in error_message(
        tasks.load, configs.Config(data=data, model=model, grad=private)
    )


@pytest.mark.parametrize("name", list(runs()))
def test_only_functions_of_a_list_ask_for_training_examples(name, tmp_path, monkeypatch):
    """One run is trained to its end, and others until their programs are compiled."""
    monkeypatch.chdir(tmp_path)
    source, model, options, grad = RUNS[name]
    if model is PUBLISHED:
        write_folder(Path("model"))
    recorder, load = Recorder(), tasks.load
    monkeypatch.setattr(tasks, "load", lambda config: recorder.watch(load(config)))
    config = configs.Config(
        name="private",
        data=source(None).replace(**options),
        model=model,
        grad=configs.Clipped(noise_multiplier=1.0, delta=1e-3, **grad),
        train=configs.Train(steps=1),
    )
    is_whole = name in ("images", "release only")
    if not is_whole:

        def stop(*_):
            raise StopHereError

        monkeypatch.setattr(loop, "compile_programs", stop)
    console = Console(file=io.StringIO())
    with contextlib.nullcontext() if is_whole else pytest.raises(StopHereError):
        loop.train(config, tmp_path / "r", resume=False, console=console)
    allowed = ALLOWED.keys() - (NOT_RELEASED if grad.get("release_only") else set())
    assert recorder.readers.keys() <= allowed
    assert "train.run.same_data:describe_data" in recorder.readers
    assert ("train.data.poisson:poisson_batches" in recorder.readers) == is_whole
    counts = {c for reader, c in recorder.readers.items() if ALLOWED[reader] == SHAPES}
    assert counts == {1}
