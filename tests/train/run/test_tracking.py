"""Experiment trackers, profiles, printed lines, and recompiled steps."""

import contextlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from PIL import Image
from program_cases import exit_code
from rich.console import Console

from train.config import Config, Digits, Mlp, Tracking
from train.errors import TrainingError, UserError
from train.output.progress import line_printer
from train.run import tracking
from train.run.planning import StepCache, compile_step
from train.run.profiling import Profile
from train.run.run_folder import RunFolder
from train.run.setup import setup

pytestmark = pytest.mark.usefixtures("workplace")


def test_tensorboard_has_each_line_and_picture(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c  # the files' own checksum

    Image.new("RGB", (2, 3)).save(tmp_path / "confusion.png")
    config = Config(tracking=Tracking(tensorboard=True))
    with tracking.tracking(config, RunFolder(tmp_path / "r"), 0) as tracker:
        tracker.log(2, {"step": 2, "train/loss": 0.5, "test/auc": None})
        tracker.draw(4, tmp_path / "confusion.png")
        tracker.draw(4, tmp_path / "none.png")
    found = {}
    for path in (tmp_path / "r" / "tensorboard").glob("events*"):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
            event = Event.FromString(data[12 : 12 + length])
            for v in event.summary.value:
                found[v.tag, event.step] = "image" if v.HasField("image") else v.simple_value
            data = data[16 + length :]
    assert found == {("train/loss", 2): 0.5, ("confusion", 4): "image"}


@pytest.mark.parametrize("start", [0, 4])
def test_tensorboard_drops_later_steps_of_a_killed_run(start, tmp_path, monkeypatch):
    begun = []

    @contextlib.contextmanager
    def writer(folder, *, purge_step):
        begun.append(purge_step)
        yield

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=writer))
    config = Config(tracking=Tracking(tensorboard=True))
    with tracking.tracking(config, RunFolder(tmp_path), start):
        assert begun == [start + 1]


@pytest.fixture
def wandb(monkeypatch):
    """Record the calls of a fake wandb: options of runs, logged steps and exit codes."""
    recorded = SimpleNamespace(begun=[], logged=[], ended=[], pictures={})

    def init(**options):  # the module has no util.generate_id any more
        folder = Path(options["dir"])
        folder /= ".wandb" if (folder / ".wandb").exists() else "wandb"
        folder.mkdir(exist_ok=True)
        recorded.begun.append(options)

        def log(line, step):
            if pictures := {n: v for n, v in line.items() if isinstance(v, Path)}:
                recorded.pictures |= dict.fromkeys(pictures, step)
            else:
                recorded.logged.append(step)

        return SimpleNamespace(
            log=log,
            finish=lambda exit_code: recorded.ended.append((len(recorded.logged), exit_code)),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Image=Path))
    return recorded


def test_wandb_continues_the_same_run(tmp_path, wandb):
    folder, picture = RunFolder(tmp_path / "r"), tmp_path / "examples.png"
    folder.create()
    folder.write_config(Config(tracking=Tracking(wandb=True)))
    picture.touch()
    for start in (0, 4):
        with tracking.tracking(folder.read_config(), folder, start) as tracker:
            tracker.log(start + 2, {"train/loss": 0.5})
            tracker.draw(start + 4, picture)
    assert wandb.begun[0]["id"] == wandb.begun[1]["id"] != ""
    assert wandb.begun[0]["config"]["optim.learning_rate"] == 0.1
    assert (wandb.logged, wandb.ended) == ([2, 6], [(1, 0), (2, 0)])
    assert wandb.pictures == {"examples": 8}


def test_wandb_records_a_failed_run(tmp_path, wandb):
    config = Config(tracking=Tracking(wandb=True))
    with pytest.raises(TrainingError), tracking.tracking(config, RunFolder(tmp_path), 0):
        raise TrainingError("the loss is nan")
    assert wandb.ended == [(0, 1)]


def test_wandb_without_a_login_is_a_user_error(tmp_path, monkeypatch):
    class Error(Exception):
        pass

    def init(**options):
        raise Error("api_key not configured (no-tty)")

    module = SimpleNamespace(init=init, errors=SimpleNamespace(Error=Error))
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = Config(tracking=Tracking(wandb=True))
    refused = pytest.raises(UserError, match=r"^tracking.wandb: api_key not configured")
    with refused, tracking.tracking(config, RunFolder(tmp_path), 0):
        pass


@pytest.mark.parametrize(("flag", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_reports_a_tracker_that_is_not_installed(flag, module, workplace, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert exit_code("train", "tiny.py", f"--tracking.{flag}", "--out", "r") == 2
    assert f"pip install 'fnet-jax[{flag}]'" in capsys.readouterr().err
    assert not (workplace / "r").exists()


def test_profiles_the_given_number_of_steps(tmp_path):
    output, add = [], jax.jit(lambda x: x + 1)
    with contextlib.closing(Profile(2, tmp_path / "profile", 0, output.append)) as profile:
        for step in range(1, 9):
            with profile.step(step, None):
                add(1.0)
    (line,) = output
    assert line.startswith(f"profile of 2 steps in {tmp_path}/profile;")
    names = {p.name.split(".", 1)[-1] for p in (tmp_path / "profile").rglob("*")}
    assert any(name.endswith("xplane.pb") for name in names)
    assert any(name.endswith("json.gz") for name in names)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (5, "no profile: the run ended before step 6, where it begins"),
        (7, "profile of 2 steps in "),
        (8, "profile of 3 steps in "),
        (20, "profile of 3 steps in "),
    ],
)
def test_reports_the_number_of_profiled_steps(last, words, tmp_path, monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    output = []
    with contextlib.closing(Profile(3, tmp_path, 0, output.append)) as profile:
        for step in range(1, last + 1):
            with profile.step(step, None):
                pass
    (line,) = output
    assert line.startswith(words)


def test_logs_nothing_without_a_profile(tmp_path):
    output = []
    with (
        contextlib.closing(Profile(0, tmp_path, 0, output.append)) as profile,
        profile.step(1, None),
    ):
        pass
    assert not output


def test_prints_lines_without_markup():
    output = io.StringIO()
    line_printer(Console(file=output, force_terminal=True, width=20))(
        "runs/a:100:b [bold] 3.14 " * 2
    )
    assert output.getvalue() == "runs/a:100:b [bold] 3.14 " * 2 + "\n"


def test_reports_why_a_step_is_compiled_again():
    run = setup(Config(data=Digits(batch_size=8), model=Mlp(hidden=(4,))))
    output = []
    step = StepCache(compile_step(run), output.append)
    state = run.init(jax.random.key(0))
    batch = next(run.training_batches(0))
    state, _ = step(state, batch)
    assert not output
    half = {name: a[:4] for name, a in batch.items()}
    state, _ = step(state, half)
    state, _ = step(state, half)
    assert len(step.executables) == 2
    (words,) = output
    assert words.startswith("compiled again in ")
    assert "batch['image'] was float32[8, 8, 8, 1], is float32[4, 8, 8, 1]" in words
    assert "batch['label'] was int32[8], is int32[4]" in words
