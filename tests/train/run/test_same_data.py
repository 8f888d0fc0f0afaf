"""A resumed run finds the data that it began with; a private run does not continue without them."""

import hmac
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from image_cases import write_image, write_mask
from PIL import Image
from program_cases import assert_one_line_error, exit_code, fnet_command, output_of

from train.config import ArrayFile, ChatFile, ImageFolder, SegmentationFolder, TextFile
from train.data import Dataset
from train.run.run_folder import FILES, RunFolder, read_sealed, seal
from train.run.same_data import describe_data

TEXT = "In the beginning there was a text of some length. " * 20


def text(path, changed):
    path.write_text(TEXT.replace("text", "word", 1) if changed else TEXT)
    return TextFile(path=str(path), context=16).load()


def chats(path, changed):
    answers = ["yes" * i for i in range(1, 30)]
    answers[7] = answers[7].replace("y", "b") if changed else answers[7]
    examples = [{"prompt": str(i), "completion": text} for i, text in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, examples)))
    return ChatFile(path=str(path), context=128).load()


def images_in_one_file(path, changed):
    image = np.arange(30 * 4 * 4 * 3, dtype=np.uint8).reshape(30, 4, 4, 3)
    image[17, 2, 2, 0] += changed
    np.savez(path.with_suffix(".npz"), x=image, y=np.arange(30) % 3)
    return ArrayFile(path=str(path.with_suffix(".npz")), images="x", labels="y").load()


def image_files(path, changed):
    for split in ("train", "val"):
        for i in range(8):
            write_image(path / split / "ab"[i % 2] / f"{i}.png", i)
    if changed:
        write_image(path / "train" / "b" / "3.png", 20, (40, 40))
    return ImageFolder(path=str(path)).load()


def masks(path, changed):
    labels = np.repeat(np.array([[0], [1]], np.uint8), 32).reshape(8, 8)
    for split in ("train", "val"):
        for i in range(4):
            write_image(path / split / "images" / f"{i}.png", i, (8, 8))
            write_mask(path / split / "masks" / f"{i}.png", labels)
    if changed:
        write_mask(path / "train" / "masks" / "1.png", labels.T)
    return SegmentationFolder(path=str(path), classes=2, image_size=8).load()


@pytest.mark.parametrize("source", [text, chats, images_in_one_file, image_files, masks])
@pytest.mark.parametrize("private", [False, True])
def test_other_contents_of_as_many_rows_are_other_data(source, private, tmp_path):
    before, same, other = (
        describe_data(source(tmp_path / "data", changed), private=private)
        for changed in (False, False, True)
    )
    assert before == same
    assert before != other
    assert (before["train"], before["test"]) == (other["train"], other["test"])


@pytest.mark.parametrize("source", [text, chats, images_in_one_file, image_files, masks])
def test_data_that_moved_are_the_same_data(source, tmp_path):
    found = []
    for name in ("here", "there"):
        path = tmp_path / name / "data"
        path.parent.mkdir()
        dataset = source(path, False)
        file = path if path.exists() else path.with_suffix(".npz")
        found.append(describe_data(dataset, TextFile(path=str(file)), private=True))
    assert found[0] == found[1]


def test_a_private_run_recognizes_each_of_many_files():
    names = [f"{i}.png" for i in range(25_001)]
    renamed = [*names[:12_001], "other.png", *names[12_002:]]
    rows = {"id": np.arange(25_001)}
    before, other = (
        describe_data(Dataset(rows, rows, (), lambda *rows: rows, name=n.__getitem__), private=True)
        for n in (names, renamed)
    )
    assert before != other


RECIPE = """
from train.config import ArrayFile, Clipped, Config, Mlp, Optim, Train

def config():
    return Config(
        name="private",
        data=ArrayFile(path="data.npz", batch_size=16),
        model=Mlp(hidden=()),
        optim=Optim(learning_rate=0.5),
        grad=Clipped(noise_multiplier=1.0, delta=1e-5),
        train=Train(steps=2, log_every=1, eval_every=2),
    )
"""


def train_privately(folder, *flags):
    """Train a private run of two steps; return the folder, with its data."""
    images_in_one_file(folder / "data", changed=False)
    (folder / "private.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fnet_command("train", "private.py", "--out", "run", *flags)
    return folder


@pytest.fixture(scope="module")
def private_run(tmp_path_factory):
    return train_privately(tmp_path_factory.mktemp("private_run"))


@pytest.fixture(scope="module")
def release_only(tmp_path_factory):
    return train_privately(tmp_path_factory.mktemp("release_only"), "--grad.release-only")


@pytest.fixture
def resumed(private_run, tmp_path, monkeypatch):
    """Copies the private run, and returns the words that continue it for one more step."""
    shutil.copytree(private_run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return "train", "run/config.json", "--resume", "--train.steps", 3


def test_a_private_run_continues_with_the_same_data(resumed, capsys):
    assert "resumed after step 2 of 3" in output_of(capsys, *resumed)


def replaced(file, old, new):
    def change(run):
        path = getattr(run, file)
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


def library(version):
    def change(run):
        pytest.importorskip("jax_privacy")
        written = read_sealed(run.data)
        written["versions"].pop("jax-privacy")
        written["versions"] |= {"jax-privacy": version} if version else {}
        run.data.write_text(json.dumps(seal(written)))

    return change


CHANGES = {
    "no description": (
        lambda run: run.data.unlink(),
        "cannot read DATA: No such file or directory",
    ),
    "damaged description": (
        replaced("data", "true", "false"),
        "cannot read DATA: it is damaged: its checksum differs from its contents'",
    ),
    "another secret seed": (
        lambda run: Path("run/secret_seed").write_text("00" * 32),
        "secret_seed: is not the secret seed that this run began with",
    ),
    "other pixels": (
        lambda run: images_in_one_file(Path("data").absolute(), changed=True),
        "data: changed since run was last trained: other rows; ",
    ),
    "another noise": (
        replaced("config", '"noise_multiplier": 1.0', '"noise_multiplier": 2.0'),
        "run/config.json: changed since the run was last trained: grad.noise_multiplier was "
        "1.0, is 2.0; the guarantee holds for the same data and config",
    ),
    "another mode": (replaced("config", '"mode": "clipped"', '"mode": "mean"'), ""),
    "another library": (library("1.9"), "jax-privacy 1.9 drew the"),
    "an unknown library": (library(None), "jax-privacy of an unknown version drew the"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_private_run_does_not_continue_with_something_else(resumed, name, capsys):
    change, message = CHANGES[name]
    run = RunFolder(Path("run"))
    path = str(run.data)
    change(run)
    capsys.readouterr()
    assert exit_code(*resumed) == 2
    assert_one_line_error(capsys, message.replace("DATA", path))


def test_release_only_describes_the_data_only_to_the_holder_of_the_seed(release_only):
    written = read_sealed(RunFolder(release_only / "run").data)
    config = json.loads((release_only / "run" / "config.json").read_text())
    assert written.pop("has_saved")
    assert written.pop("run") == config["run"]
    ((_, *checksums),) = written.pop("stamps")
    assert len({*checksums}) == 2
    assert written.pop("config")["grad.noise_multiplier"] == "1.0"
    assert written.pop("versions")["jax"] == jax.__version__
    assert written.pop("trained_before") is None
    secret = bytes.fromhex((release_only / "run" / "secret_seed").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(release_only)
        dataset = images_in_one_file(Path("data"), changed=False)
        data = describe_data(dataset, TextFile(path="data.npz"), private=True)
    code = hmac.new(secret, json.dumps(data).encode(), "sha256").hexdigest()
    assert written == {"keyed_checksum": code}


def test_release_only_scores_no_training_examples(release_only, monkeypatch, capsys):
    monkeypatch.chdir(release_only)
    assert exit_code("eval", "run", "--split", "train") == 2
    assert_one_line_error(capsys, "--split: train, but run writes only what its privacy guarantee")


def test_private_files_are_in_one_folder_and_nowhere_with_release_only(private_run, release_only):
    for folder in (private_run, release_only):
        run, there = RunFolder(folder / "run"), set()
        for file in (file for file in FILES if file.__get__(run, RunFolder).exists()):
            there.add(file.__get__(run, RunFolder))
            assert file.kind != "private" or file.released or run.private != run.path
        assert {*run.path.iterdir(), *run.private.iterdir()} == there | {run.private} - {run.path}
        assert (run.private != run.path) == (run.private / "evaluation.csv").exists()
        assert (run.private != run.path) == (folder == private_run)


PICTURES = """
from train.config import Config, ImageFolder, Mlp, Train

def config():
    data = ImageFolder(
        path="data", batch_size=4, image_size=8, resize=8, crop="center", flip=False
    )
    train = Train(steps=2, log_every=1, eval_every=2)
    return Config(name="pictures", data=data, model=Mlp(hidden=()), train=train)
"""


@pytest.fixture(scope="module")
def picture_run(tmp_path_factory):
    """A folder with a run on pictures that are split by their names."""
    folder = tmp_path_factory.mktemp("picture_run")
    for i in range(40):
        write_image(folder / "data" / "ab"[i % 2] / f"{i:02}.png", i)
    (folder / "pictures.py").write_text(PICTURES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fnet_command("train", "pictures.py", "--out", "run")
    return folder


@pytest.fixture
def pictures(picture_run, tmp_path, monkeypatch):
    shutil.copytree(picture_run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


RESUME = "train", "run/config.json", "--resume", "--train.steps", 3


def test_nothing_is_said_of_the_same_data(pictures, capsys):
    out = output_of(capsys, *RESUME)
    said = "data: changed", "config.json: changed", "versions:", "damaged"
    assert not any(words in out for words in said)


@pytest.mark.parametrize("command", [("eval", "run"), RESUME], ids=["eval", "resume"])
def test_test_images_that_were_trained_on_are_reported(command, pictures, capsys):
    config = pictures / "run" / "config.json"
    before = ImageFolder(path="data", image_size=8).load()
    after = ImageFolder(path="data", image_size=8, split_seed=1).load()
    trained = {*map(before.name, before.train["id"])}
    tests = [*map(after.name, after.test["id"])]
    config.write_text(config.read_text().replace('"split_seed": 0', '"split_seed": 1'))
    out = output_of(capsys, *command)
    seen = sum(name in trained for name in tests)
    assert seen > 0
    assert f"{seen} of {len(tests)} test examples were trained on, so that test scores" in out
    if command == RESUME:  # which remembers it
        fnet_command("eval", "run")
        assert f"{seen} of {len(tests)} test examples were trained on" in capsys.readouterr().out
        evaluation = json.loads((pictures / "run" / "evaluation.json").read_text())
        assert "trained on" in evaluation["data_changed"]


def test_notes_of_an_evaluation_are_about_the_images_of_a_folder_alone(pictures, capsys):
    shutil.copytree("data", "other")
    for path in pictures.glob("*/a/*.png"):
        frames = [Image.new("RGB", (9, 9), color) for color in ("red", "blue")]
        frames[0].save(path, save_all=True, append_images=frames[1:])
    count = len([*pictures.glob("other/a/*.png")])
    note = (
        f"images of several frames or pages, of which the first is used: {count}, such as other/a"
    )
    for is_there in (True, False):
        if not is_there:
            shutil.rmtree("data")
        out = output_of(capsys, "eval", "run", "--path", "other")
        assert note in out
        assert ("test images are training images or copies of them" in out) == is_there


def test_new_and_missing_images_are_counted(pictures, capsys):
    before = read_sealed(pictures / "run" / "data.json")
    write_image(pictures / "data" / "a" / "new.png")
    (pictures / "data" / "b" / "01.png").rename(pictures / "data" / "b" / "renamed.png")
    out = output_of(capsys, "eval", "run")
    assert f"{before['train']} training and {before['test']} test examples then, " in out
    assert "; 2 names are new; 1 name is gone" in out


def test_a_damaged_description_is_reported(pictures, capsys):
    path = pictures / "run" / "data.json"
    path.write_text(path.read_text().replace('"test": ', '"test": 1'))
    out = output_of(capsys, "eval", "run")
    assert "cannot read run/data.json: it is damaged: its checksum differs from its" in out


def test_an_edited_config_is_reported_but_data_may_move(pictures, capsys):
    config = pictures / "run" / "config.json"
    (pictures / "data").rename(pictures / "moved")
    text = config.read_text().replace('"path": "data"', '"path": "moved"')
    config.write_text(text.replace('"resize": 8', '"resize": 12'))
    changed = "run/config.json: changed since the run was last trained: data.resize was 8, is 12"
    for command in (("eval", "run"), RESUME):
        assert changed in output_of(capsys, *command)
    # A run that was resumed goes on from the new config.
    assert "config.json: changed" not in output_of(capsys, *RESUME[:-1], 4)


def test_a_damaged_log_is_reported_once(pictures, capsys):
    run = RunFolder(pictures / "run")
    logged, text = run.logged, run.metrics.read_text()
    said = "metrics.jsonl: damaged, lost or changed"
    for damaged, left in ((text[:-9], 1), ("", 0), (text.replace("loss", "lost"), 2)):
        run.metrics.write_text(damaged)
        (line,) = run.drop_metrics_after(2, logged)
        assert f"run/{said}: {left} of 2 lines up to step 2 can be read; curves" in line
    fnet_command(*RESUME)
    assert said in capsys.readouterr().out
    assert said not in output_of(capsys, *RESUME[:-1], 4)


def test_the_first_line_of_a_log_changes_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    before = folder.logged
    folder.metrics.write_text('{"run": "0123456789abcdef"}\n')  # before lines of later steps
    assert folder.logged == before


def test_other_versions_are_reported(pictures, capsys):
    path = pictures / "run" / "data.json"
    written = read_sealed(path)
    path.write_text(
        json.dumps(seal(written | {"versions": written["versions"] | {"jax": "0.9.9"}}))
    )
    fnet_command(*RESUME)
    expected = f"versions: jax 0.9.9 then, {jax.__version__} now; the next steps may be rounded"
    assert expected in capsys.readouterr().out
