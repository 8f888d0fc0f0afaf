"""Checkpoints: detection of damage, the best checkpoint, and one writer per folder."""

import errno
import gc
import json
import shutil
import subprocess
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_cases import assert_one_line_error, exit_code, fnet_command, output_of, state_of

from train.config import Config, recipes
from train.errors import TrainingError, UserError, printable
from train.run.checkpoints import Checkpoints, checksums
from train.run.run_folder import RunFolder, read_sealed, seal, unseal
from train.run.setup import setup

pytestmark = pytest.mark.usefixtures("workplace")


@pytest.fixture
def run(finished_run):
    """A finished run with checkpoints of steps 6 and 8."""
    return finished_run


def test_each_bit_changes_the_checksum_of_its_array_only():
    tree = {
        "f": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
        "h": np.ones((2, 2), jnp.bfloat16),
        "i": np.arange(5),
        "b": np.asarray([True, False]),
        "none": np.zeros((0, 3), np.float32),
        "scalar": np.float32(2),
    }
    before = checksums(jax.tree.map(jnp.asarray, tree))
    for name in ("f", "h", "i", "b", "scalar"):
        for bit in (0, 7):
            changed = np.array(jnp.asarray(tree[name]))
            changed.reshape(-1).view(np.uint8)[-1] ^= np.uint8(1 if name == "b" else 1 << bit)
            after = checksums(jax.tree.map(jnp.asarray, tree | {name: changed}))
            assert {k for k in after if after[k] != before[k]} == {name}
    assert checksums({"f": jnp.asarray(tree["f"][::-1])})["f"] != before["f"]


def test_a_checkpoint_leaves_few_objects_behind(tmp_path):
    """TensorStore keeps those of paths; of its metrics, it would keep as many again."""
    state = state_of(48, 16)
    arrays = len(jax.tree.leaves(state))
    with Checkpoints(
        tmp_path / "checkpoints", keep=1, shapes=jax.eval_shape(lambda: state)
    ) as saved:

        def blocks_after(steps):
            for step in steps:
                saved.save(step, state, {})
                saved.wait()
            gc.collect()
            return sys.getallocatedblocks()

        before = blocks_after(range(8))
        growth = (blocks_after(range(8, 28)) - before) / 20
    assert growth < 6 * arrays, growth


def test_checksums_do_not_depend_on_sharding():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    a = jnp.arange(24.0).reshape(8, 3)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert checksums([a]) == checksums([jax.device_put(a, rows)])
    key = jax.random.key(3)
    assert checksums(key) != checksums(jax.random.key(4))


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    path = largest_file(folder / "state")
    path.write_bytes(path.read_bytes()[:-40])


def flip(folder):
    path = largest_file(folder / "state")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def lose(folder):
    largest_file(folder / "state").unlink()


def position_file(folder):
    return next(p for p in (folder / "data").rglob("*") if b"checksums" in p.read_bytes())


def edit(folder, change):
    """Change what is saved besides the arrays, with a checksum that fits."""
    path = position_file(folder)
    content = unseal(json.loads(path.read_bytes()))
    change(content)
    path.write_text(json.dumps(seal(content)))


def forge(folder):
    """Other values than those saved, in intact files."""
    read = ("params", "ema")  # one is read to resume, the other to evaluate

    def change(data):
        data["checksums"] |= {f"{name}.head.kernel": 1 for name in read}

    edit(folder, change)


def lose_the_score(folder):
    position_file(folder).write_bytes(b"")


def flip_the_position(folder):
    """One bit, which makes another number of a digit."""
    path = position_file(folder)
    content = bytearray(path.read_bytes())
    at = content.index(b'"position"')
    digit = next(i for i in range(at, len(content)) if chr(content[i]).isdigit())
    content[digit] ^= 1
    path.write_bytes(content)


def flip_the_name_of_the_checksum(folder):
    """One bit, after which nothing says that there was a checksum."""
    path = position_file(folder)
    path.write_bytes(path.read_bytes().replace(b'"checksum"', b'"ahecksum"'))


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = (
    *(truncate, flip, lose, lose_the_score, flip_the_position, flip_the_name_of_the_checksum),
    *(forge, empty),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_restores_the_checkpoint_before_a_damaged_one(damage, run, capsys):
    damage(run / "checkpoints" / "8")
    with Checkpoints(run / "checkpoints") as checkpoints:  # to read alone, which moves nothing
        assert checkpoints.restore_network().step == 6
    assert "is damaged (" in capsys.readouterr().err
    assert (run / "checkpoints" / "8").is_dir()
    shapes = setup(RunFolder(run).read_config()).state_shapes
    with Checkpoints(run / "checkpoints", 2) as checkpoints:
        assert checkpoints.restore(shapes).step == 6
    assert (run / "damaged_checkpoint_8").is_dir()


@pytest.mark.slow
def test_a_run_goes_on_before_a_damaged_checkpoint(run, capsys):
    flip(run / "checkpoints" / "8")
    expected = (run / "metrics.jsonl").read_text().splitlines()[-1]
    printed = output_of(capsys, "train", "tiny.py", "--out", run, "--resume")
    assert "checkpoints/8 is damaged (" in printed
    assert "compiling 2 programs, train step and initial values; a large" in printed
    assert "resumed after step 6 of 8" in printed
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["test/loss"] == json.loads(expected)["test/loss"]
    with Checkpoints(run / "checkpoints") as checkpoints:
        assert checkpoints.latest_step == 8


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.EMFILE, "x"), TrainingError, "checkpoints/8, which is not changed: of"),
        (MemoryError("no room"), MemoryError, "of the library that reads"),
    ],
    ids=["no handle", "no memory"],
)
def test_does_not_take_a_machine_error_for_damage(error, raised, message, run, monkeypatch):
    def read(*_):
        raise type(error)("of the library that reads") from error

    monkeypatch.setattr(Checkpoints, "_read", read)
    refused = pytest.raises(raised, match=message)
    with Checkpoints(run / "checkpoints", 2) as checkpoints, refused:
        checkpoints.restore_network()
    assert not list(run.glob("damaged_*"))


@pytest.mark.parametrize("what", ["no data.json", "checkpoints", "folder"])
def test_refuses_to_resume_if_the_checkpoints_are_gone(what, run, capsys):
    if what == "folder":
        shutil.rmtree(run / "checkpoints")
    else:
        for path in (run / "checkpoints").iterdir():
            shutil.rmtree(path)
    if what == "no data.json":
        (run / "data.json").unlink()
    before = (run / "metrics.jsonl").read_text()
    for _ in range(2):
        assert exit_code("train", "tiny.py", "--out", run, "--resume") == 2
        error = capsys.readouterr().err
        assert f"no checkpoint is left in {run}/checkpoints" in error
        assert "start a new run with another --out" in error
        assert (run / "metrics.jsonl").read_text() == before


def test_begins_again_if_no_checkpoint_was_saved_yet(run, capsys):
    shutil.rmtree(run / "checkpoints")
    written = read_sealed(run / "data.json")
    assert written["has_saved"]
    (run / "data.json").write_text(json.dumps(seal(written | {"has_saved": False})))
    fnet_command("train", "tiny.py", "--out", run, "--resume")
    assert f"{run} has no checkpoint yet: starting again at step 0" in capsys.readouterr().out
    assert read_sealed(run / "data.json")["has_saved"]


def test_refuses_to_resume_if_all_checkpoints_are_damaged(run):
    for step in ("6", "8"):
        flip(run / "checkpoints" / step)
    for message in ("every checkpoint in", f"every checkpoint of {run} is damaged"):
        refused = pytest.raises(UserError, match=message)
        with Checkpoints(run / "checkpoints", 2) as checkpoints, refused:
            checkpoints.restore_network()


def test_keeps_the_best_checkpoint_besides_the_newest(workplace):
    run = setup(recipes.load("tiny.py"))
    state = jax.jit(run.init)(jax.random.key(0))
    with Checkpoints(workplace / "c", keep=1) as checkpoints:
        for step, score in ((1, 0.25), (2, 0.75), (3, 0.5), (4, None)):
            checkpoints.save(step, state, {}, score)
    assert {int(p.name) for p in (workplace / "c").iterdir() if p.name.isdigit()} == {2, 4}
    with Checkpoints(workplace / "d", keep=1, keep_best=False) as checkpoints:
        for step, score in ((1, 0.75), (2, 0.5)):
            checkpoints.save(step, state, {}, score)
    assert {p.name for p in (workplace / "d").iterdir() if p.name.isdigit()} == {"2"}
    with Checkpoints(workplace / "c") as checkpoints:
        assert checkpoints.best_score == 0.75
    with Checkpoints(workplace / "c", best=True) as checkpoints:
        assert checkpoints.restore_network(run.task.model.init).step == 2


@pytest.mark.parametrize("kept", ["params", "ema"])
def test_restore_network_reads_only_variables_for_inference(kept, workplace, monkeypatch):
    run = setup(recipes.load("tiny.py"))
    state = jax.jit(run.init)(jax.random.key(0))
    averaged = jax.tree.map(lambda a: a + 1, state.params)
    state = state.replace(ema=averaged if kept == "ema" else None)
    with Checkpoints(workplace / "c", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
    read: list[str] = []

    def noted(tree):
        read.extend(tree)
        return checksums(tree)

    monkeypatch.setattr("train.run.checkpoints.checksums", noted)
    with Checkpoints(workplace / "c") as checkpoints:
        network = checkpoints.restore_network(run.task.model.init)
    assert sorted(read) == sorted([kept, "model_state"])  # no optimizer state
    chex.assert_trees_all_equal(network.evaluation_params, state.evaluation_params)


def test_eval_best_uses_the_best_checkpoint(workplace):
    words = "--checkpoint.best", "--checkpoint.keep", 1, "--train.eval-every", 2
    fnet_command("train", "tiny.py", *words, "--train.steps", 12, "--out", "r")
    lines = map(json.loads, (workplace / "r" / "metrics.jsonl").read_text().splitlines())
    reached = {line["step"]: line["test/accuracy"] for line in lines if "test/accuracy" in line}
    best = max(reached, key=lambda step: (reached[step], -step))
    with Checkpoints(workplace / "r" / "checkpoints") as checkpoints:
        assert checkpoints.best_score == pytest.approx(reached[best])
    fnet_command("eval", "r", "--best")
    evaluation = workplace / "r" / "evaluations" / "best" / "evaluation.json"
    assert json.loads(evaluation.read_text())["step"] == best


def test_reuses_a_folder_where_a_kill_cut_off_the_first_file(workplace):
    (workplace / "r").mkdir()
    (workplace / "r" / ".config.json.part").write_text("{")
    folder = RunFolder(workplace / "r")
    folder.create()
    folder.write_config(Config())
    assert folder.read_config() == Config()


def test_refuses_best_without_scores(run, capsys):
    shutil.rmtree(run / "checkpoints" / "8")  # the only one with a score
    assert exit_code("eval", run, "--best") == 2
    assert "has a score; leave out --best" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lose_the_score, flip_the_position])
def test_best_ignores_checkpoints_with_a_damaged_score(damage, run, capsys):
    edit(run / "checkpoints" / "6", lambda data: data.update(score=0.25))
    damage(run / "checkpoints" / "8")
    with Checkpoints(run / "checkpoints", best=True) as checkpoints:
        assert checkpoints.restore_network().step == 6
    assert "checkpoints/8 is damaged (" in capsys.readouterr().err


def test_reports_that_every_checkpoint_with_a_score_is_damaged(run, capsys):
    flip(run / "checkpoints" / "8")  # the only one with a score
    refused = pytest.raises(UserError, match=r"with a score in .* is damaged; leave out --best$")
    with Checkpoints(run / "checkpoints", best=True) as checkpoints, refused:
        checkpoints.restore_network()
    assert "checkpoints/8 is damaged (" in capsys.readouterr().err
    with Checkpoints(run / "checkpoints") as checkpoints:
        assert checkpoints.restore_network().step == 6


def test_reading_does_not_disturb_a_save_in_progress(run):
    begun = run / "checkpoints" / "9.orbax-checkpoint-tmp"
    begun.mkdir()
    fnet_command("eval", run)
    assert begun.is_dir()


def test_refuses_a_folder_that_another_process_uses(workplace, capsys):
    holding = """
import sys
from pathlib import Path
from train.run.run_folder import RunFolder, read_sealed, seal, unseal
with RunFolder(Path("r")).lock():
    print("held", flush=True)
    sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holding], **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        assert exit_code("train", "tiny.py", "--out", "r") == 2
        assert f"process {other.pid}" in capsys.readouterr().err
        other.kill()  # which releases the lock
    with RunFolder(workplace / "r").lock():
        pass
    assert not list((workplace / "r").iterdir())


@pytest.mark.parametrize("name", ["lr[0.1]", "lr*", "lr?", "a\\b", "a\udcff"])
def test_refuses_paths_that_orbax_misreads(workplace, capsys, name):
    # Orbax would not find checkpoints in lr[0.1] again.
    assert exit_code("train", "tiny.py", "--out", f"{name}/r") == 2
    assert_one_line_error(capsys, printable(name))
    assert not (workplace / name).exists()
    with pytest.raises(UserError, match="checkpoints cannot be saved"):
        Checkpoints(workplace / name)


def test_failing_to_save_is_one_line(workplace, monkeypatch, capsys):
    def full(self, *args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: write failed [No space left on device]\nat line 3")

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", full)
    assert exit_code("train", "tiny.py", "--out", "r") == 1
    assert_one_line_error(capsys, "No space left on device")


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Checkpoints whose last one fails to be written in the background."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    close = checkpoints._manager.close

    def full():
        close()
        raise ValueError("write failed [No space left on device]\nat line 3")

    monkeypatch.setattr(checkpoints._manager, "close", full)
    return checkpoints


@pytest.mark.slow
def test_saved_and_restored_states_can_be_donated(tmp_path):
    @partial(jax.jit, donate_argnums=0)
    def step(params):
        return jax.tree.map(lambda a: a + 1, params)

    def stays_where_it_is(state):
        before = [a.unsafe_buffer_pointer() for a in state.params]
        return before == [a.unsafe_buffer_pointer() for a in step(state.params)]

    state = state_of(64, 2**17 + 1)  # slightly more than 32 MiB
    shapes = jax.eval_shape(lambda: state)
    with Checkpoints(tmp_path / "c", keep=1, shapes=shapes) as checkpoints:
        checkpoints.save(1, state, {})
        assert stays_where_it_is(state)
        assert stays_where_it_is(checkpoints.restore(shapes).state)


def test_raises_background_errors_at_the_end(failing):
    message = r"^cannot save .*No space left on device\]; earlier checkpoints"
    with pytest.raises(TrainingError, match=message), failing:
        pass


def test_background_errors_do_not_mask_an_exception(failing):
    with pytest.raises(KeyError, match="first"), failing:
        raise KeyError("first")
