"""``fnet train`` and ``fnet eval`` in this process, on a network that trains in a second."""

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import chex
import jax
import pytest
from program_cases import (
    assert_one_line_error,
    exit_code,
    final_state,
    fnet_command,
    metrics_of,
    output_of,
)

import fnet
from train import cli
from train.config import Config, Mlp, Synthetic, Train, recipes
from train.errors import UserError
from train.output.formats import number
from train.run.planning import StepCache
from train.run.run_folder import RunFolder
from train.run.setup import setup

pytestmark = pytest.mark.usefixtures("workplace")


def interrupted_at(step, monkeypatch, how):
    """Let the next run call ``how()`` before the step after ``step``."""
    call, taken = StepCache.__call__, itertools.count()

    def once(self, state, batch):
        if next(taken) == step:
            monkeypatch.setattr(StepCache, "__call__", call)
            how()
        return call(self, state, batch)

    monkeypatch.setattr(StepCache, "__call__", once)


def test_writes_the_documented_files(finished_run, tmp_path_factory):
    out, shelf = finished_run, tmp_path_factory.getbasetemp()
    summary = json.loads((out / "summary.json").read_text())
    assert summary.keys() >= {
        "metrics", "seconds", "examples_per_second", "parameters", "state_bytes",
        "donated_bytes", "peak_bytes_predicted", "peak_bytes_seen", "versions",
    }  # fmt: skip
    assert summary["donated_bytes"] == summary["state_bytes"] > 0
    assert summary["versions"]["jax"] == jax.__version__
    config = RunFolder(out).read_config()
    state = setup(config).state_shapes
    assert summary["state_bytes"] == fnet.memory.tree_bytes(state)
    assert summary["parameters"] == sum(a.size for a in jax.tree.leaves(state.params))
    memory = json.loads((out / "memory.json").read_text())
    # The process takes memory besides its compiled program.
    assert 0 < memory["peak"]["total"] < summary["peak_bytes_predicted"]

    lines = metrics_of(out)
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert [line["step"] for line in lines if "test/accuracy" in line] == [4, 8]
    assert lines[-1]["test/accuracy"] == summary["metrics"]["test/accuracy"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")

    printed = (shelf / "printed.txt").read_text().splitlines()
    assert printed.pop(0) == f"no run in {shelf / 'finished_run'} yet: starting a new one"
    first = next(i for i, text in enumerate(printed) if text.startswith("step 2/8  elapsed "))
    assert first <= 15  # lines of summary
    before, after = (
        dict(text.split(maxsplit=1) for text in t) for t in (printed[:8], printed[12:])
    )
    assert before["data"] == "digits: 1,437 training and 360 test examples, 10 classes"
    assert before["network"] == f"preact_resnet: {summary['parameters']:,} parameters to train"
    assert f"test accuracy {number(summary['metrics']['test/accuracy'])}" in after["result:"]
    assert "curves.png" in after["files"]
    place = shelf / "finished_run"
    commands = f"fnet report {place}", f"fnet eval {place}", f"fnet predict {place} IMAGE"
    assert after["next:"] == ", ".join(commands)


def test_ctrl_c_during_a_garbage_collection_is_not_lost(monkeypatch, capsys):
    def command(argv):
        def _xla_gc_callback():
            signal.raise_signal(signal.SIGINT)

        with contextlib.suppress(KeyboardInterrupt):  # as Python does around such a callback
            _xla_gc_callback()
        ended.append("callback")
        for _ in range(1000):  # until the signal comes again
            time.sleep(0.01)

    ended = []
    monkeypatch.setattr(cli, "_dispatch", command)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert exit_code("train") == 1
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == ["callback"]
    assert capsys.readouterr().err == "fnet: interrupted\n"


def test_a_run_that_crashed_and_was_interrupted_ends_with_the_same_bits(
    workplace, finished_run, monkeypatch, capsys
):
    def die():
        raise RuntimeError("killed")

    interrupted_at(5, monkeypatch, die)
    with pytest.raises(RuntimeError, match="killed"):
        fnet_command("train", "tiny.py", "--out", "parts")
    # The first step is from second 1000, and the last line is cut off by the kill.
    path = workplace / "parts" / "metrics.jsonl"
    run, first, *_ = path.read_text().splitlines()
    first = json.dumps(json.loads(first) | {"seconds": 1000.0})
    path.write_text(f'{run}\n{first}\n{{"step": 6, "tra')
    capsys.readouterr()

    # Before step 4, at whose end an evaluation is due.
    interrupted_at(0, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    printed = output_of(capsys, "train", "tiny.py", "--out", "parts", "--resume")
    assert "resumed after step 3 of 8" in printed
    assert "SIGTERM: saved after step 4 of 8" in printed
    assert "fnet train parts/ --resume" in printed
    assert not (workplace / "parts" / "summary.json").exists()

    printed = output_of(capsys, "train", "parts/", "--resume")
    assert "  time      about " in printed
    assert "for 4 steps, as fast as before" in printed
    chex.assert_trees_all_equal(final_state(finished_run), final_state(workplace / "parts"))
    lines = metrics_of(workplace / "parts")
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert [line["step"] for line in lines if "test/loss" in line] == [4, 8]
    assert lines[2:] == metrics_of(finished_run)[2:]
    seconds = [json.loads(line)["seconds"] for line in path.read_text().splitlines()[1:]]
    ended = json.loads((workplace / "parts" / "summary.json").read_text())["seconds"]
    assert 1000 == seconds[0] < seconds[1] < seconds[2] < seconds[3] < ended


@pytest.mark.parametrize(("epochs", "steps"), [(25.0, 7), (26.0, 8), (1e-9, 1)])
def test_number_of_steps_covers_the_epochs(epochs, steps):
    examples = Synthetic(examples=7, batch_size=25, image_size=4, channels=1, classes=2)
    config = Config(data=examples, model=Mlp(hidden=(2,)), train=Train(epochs=epochs))
    assert setup(config).steps == steps  # 25 * (7 / 25) is not 7


def test_configs_lists_each_recipe_with_its_first_line(capsys):
    lines = output_of(capsys, "configs").splitlines()
    recorded = dict(line.split(maxsplit=1) for line in lines)
    assert recorded == recipes.recipes()
    assert recorded.keys() >= {"digits", "digits_mlp"}
    assert all(len(line.split()) > 3 for line in recorded.values())


MISTAKES = [
    (("train", "digitz"), "no recipe digitz (did you mean digits?)"),
    (("train", "nowhere/run.py"), "nowhere/run.py: no nowhere in .; give the name of a recipe"),
    (("train",), "missing CONFIG; usage: fnet train CONFIG"),
    (("trian", "digits"), "no command trian (did you mean train?)"),
    (("train", "tiny.py", "--grad.epsilon", "3"), "--grad.epsilon: an option of --grad.mode clipped; see fnet"),
    (("train", "tiny.py", "--optim.lerning-rate", "1"), "unknown option --optim.lerning-rate (did you mean --optim.learning-rate?)"),
    (("train", "tiny.py", "--no-nonfinite.skip"), "unknown option --no-nonfinite.skip (did you mean --nonfinite.no-skip?)"),
    (("train", "tiny.py", "--nonfinite.no-skip", "yes"), "--nonfinite.no-skip: expected no value, got yes"),
    (("train", "tiny.py", "--optim.learning-rate", "fast"), "--optim.learning-rate: expected a number, got fast"),
    (("train", "tiny.py", "--optim.learning-rate"), "--optim.learning-rate: expected a number, got nothing"),
    (("train", "tiny.py", "--profile", "-3"), "--profile: expected greater than or equal to 0, got -3"),
    (("train", "tiny.py", "--train.steps", "1.5"), "--train.steps: expected an integer or None, got 1.5"),
    (("train", "tiny.py", "--optim.clip-norm", "nan"), "optim.clip_norm: expected a finite number, got nan"),
    (("train", "tiny.py", "--optim.learning-rate", "-1"), "optim.learning_rate: expected greater than 0, got -1.0"),
    (("train", "tiny.py", "--optim.name", "sdg"), "--optim.name: expected one of sgd, adam, adamw, lion, adafactor, compact_adamw, compact_sgd, compact_lion, muon, schedule_free_adamw, galore, got sdg"),
    (("train", "tiny.py", "--model.widths", "3", "x"), "--model.widths: expected an integer, one or more times, got 3 x"),
    (("train", "tiny.py", "--model.name", "resnet9", "--model.widths", "4", "8"), "--model.widths: expected an integer, 3 times, got 4 8"),
    (("train", "tiny.py", "--name", "a b"), "name: string should match pattern"),
    (("train", "tiny.py", "--data.batch-size", "100000000000000000000"), "data.batch_size: expected less than 2147483648"),
    (("train", "tiny.py", "--train.steps", "None", "--train.epochs", "1e308"), "train.epochs: 1e+308 gives 2^31 steps or more"),
    (("train", "tiny.py", "--optim.schedule", "step", "--optim.decay-epochs", "1", "2"), "optim.decay_epochs: 1, 2, counted in steps: make_schedule: step needs one decay_steps > 0, got ("),
    (("train", "tiny.py", "--model.name", "mlp", "--optim.classifier-learning-rate", "1"), "named classifier or cls or fc or head; add --optim.classifier-learning-rate None"),
    (("train", "a" * 300), "cannot read aaa"),
    (("train", "tiny.py", "--out", "a" * 300), "cannot write aaa"),
    (("train", "tiny.py", "stray"), "unexpected stray"),
    (("train", "tiny.py", "--model.activation-param", "0"), "slope must be > 0 to be inverted, got 0.0"),
    (("train", "tiny.py", "--data.test-fraction", "0.001"), "data.test_fraction: 0.001 does not work"),
    (("train", "tiny.py", "--out", "tiny.py/run"), "cannot write tiny.py/run"),
    (("train", "tiny.py", "--out", "."), ". is not empty and holds no run"),
    (("train", "bad.json"), "bad.json: optim.learning_rate: expected a valid number, got 'x'"),
    (("train", "typo.json"), "typo.json: unknown field optim.lerning_rate (did you mean optim.learning_rate?)"),
    (("train", "kind.json"), "kind.json: unknown field data.image_sise (did you mean data.image_size?)"),
    (("train", "no_tag.json"), "no_tag.json: grad.mode: expected one of 'attribution', 'clipped', 'mean', 'microbatch', 'per_example', got nothing"),
    (("train", "mean.json"), "mean.json: data.mean.0: expected less than 1, got 2"),
    (("train", "half.json"), "half.json: not a config: Invalid JSON"),
    (("train", "tag.json"), "tag.json: model.name: expected one of 'convnext', 'deeplab', 'denoiser', 'densenet', 'efficientnet', 'language_model', 'mlp', 'preact_resnet', 'pretrained', 'regnet', 'resnet', 'resnet9', 'resnext', 'revnet', 'swin', 'vit', 'wider_resnet', got 'resnett'"),
    (("train", "broken.py"), "broken.py: TypeError: Optim.__init__() got an unexpected keyword argument 'lr'"),
    (("train", "range.py"), "range.py: data.batch_size: expected greater than or equal to 1, got 0"),
    (("train", "numpy.py"), "numpy.py: optim.learning_rate: expected a valid number, got '0.5'"),
    (("train", "class.py"), "class.py: model"),
    (("train", "other.py"), "other.py: config() must return a Config, got int"),
    (("train", "exit.py"), "exit.py: SystemExit: 0"),
    (("train", "empty.py"), "empty.py: a recipe needs a function config() that returns a Config"),
    (("eval", "nowhere"), "no run in nowhere: it has no config.json"),
    (("memory", "tiny.py", "--budget", "much"), "memory.budget: expected a number with a unit (4GB, 4GiB, 4096MiB;"),
    (("memory", "tiny.py", "--target", "h1000"), "--target: expected one of"),
    (("memory", "tiny.py", "--batch-size", "auto"), "--batch-size auto: needs --budget or --target"),
    (("memory", "tiny.py", "--batch-size", "none"), "--batch-size: expected a number of examples or auto, got none"),
    (("memory", "tiny.py", "--batch-size", "9" * 5000), "--batch-size: expected a number of examples or auto, got 999"),
    (("memory", "tiny.py", "--budget", "16MiB"), "a budget of 16.00 MiB is too small: the process takes 16."),
    (("train", "tiny.py", "--memory.policy", "offload"), "memory.policy: offload does not work on cpu: expected one of auto, none"),
    (("train", "tiny.py", "--grad.mode", "clip"), "--grad.mode: expected one of attribution, clipped, mean, microbatch, per_example, got clip"),
    (("train", "tiny.py", "--grad.mode", "microbatch", "--grad.microbatches", "3"), "grad.microbatches: 3 do not divide data.batch_size 16"),
    (("train", "tiny.py", "--grad.mode", "microbatch", "--grad.clip", "3"), "--grad.clip: an option of --grad.mode clipped"),
    (("train", "tiny.py", "--data.batch-size", "1438"), "data.batch_size: 1,438 is more than the 1,437 training examples; give a smaller one"),
    (("configs", "all"), "unexpected all; usage: fnet configs"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_exit_code_2_and_writes_nothing(
    words, message, workplace, capsys
):
    head = "from train.config import *\ndef config(): return "
    (workplace / "bad.json").write_text('{"optim": {"learning_rate": "x"}}')
    (workplace / "typo.json").write_text('{"optim": {"lerning_rate": 1}}')
    (workplace / "kind.json").write_text('{"data": {"source": "synthetic", "image_sise": 8}}')
    (workplace / "no_tag.json").write_text('{"grad": {"microbatches": 2}}')
    (workplace / "mean.json").write_text('{"data": {"source": "image_folder", "mean": [2, 0, 0]}}')
    (workplace / "half.json").write_text('{"optim": ')
    (workplace / "tag.json").write_text('{"model": {"name": "resnett"}}')
    (workplace / "broken.py").write_text(head + "Config(optim=Optim(lr=1))")
    (workplace / "range.py").write_text(head + "Config(data=Digits(batch_size=0))")
    half = "__import__('numpy').float32(0.5)"
    (workplace / "numpy.py").write_text(head + f"Config(optim=Optim(learning_rate={half}))")
    (workplace / "class.py").write_text(head + "Config(model=ResNet)")
    (workplace / "other.py").write_text(head + "3")
    (workplace / "exit.py").write_text("raise SystemExit(0)")
    (workplace / "empty.py").write_text("x = 1")
    before = {p: p.read_bytes() for p in workplace.rglob("*") if p.is_file()}
    assert exit_code(*words) == 2
    assert_one_line_error(capsys, message)
    assert before == {p: p.read_bytes() for p in workplace.rglob("*") if p.is_file()}


def test_a_run_that_ended_before_its_first_line_can_begin_again(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_config(Config())
    folder.metrics.touch()
    folder.checkpoints.mkdir()
    folder.unreadable.write_text("file,reason\n")
    (tmp_path / "run" / "private").mkdir()
    (tmp_path / "run" / "private" / "secret_seed").touch()
    assert not folder.has_started
    folder.create()
    assert not folder.config.exists()
    assert not folder.unreadable.exists()
    folder.write_config(Config())
    folder.metrics.write_text('{"step": 1}\n')
    assert folder.has_started
    with pytest.raises(UserError, match="already holds a run"):
        folder.create()


def test_commands_that_read_a_run_say_that_it_was_not_finished(finished_run, capsys):
    def printed():
        fnet_command("eval", "finished_run")
        fnet_command("export", "finished_run")
        (finished_run / "weights.safetensors").unlink()
        return capsys.readouterr().err

    assert printed() == ""
    config = finished_run / "config.json"
    config.write_text(config.read_text().replace('"steps": 8', '"steps": 20'))
    line = "fnet: finished_run: step 8 of 20: the run was not finished; continue it with"
    assert printed() == f"{line} fnet train finished_run/ --resume\n" * 2


def test_never_overwrites_a_run(finished_run, capsys):
    before = {p: p.read_bytes() for p in finished_run.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert exit_code("train", "tiny.py", "--out", "finished_run") == 2
    assert "finished_run already holds a run: continue it with --resume" in capsys.readouterr().err
    other = ("--optim.learning-rate", "0.9", "--data.batch-size", "8")
    assert exit_code("train", "tiny.py", "--out", "finished_run", "--resume", *other) == 2
    error = capsys.readouterr().err
    assert "data.batch_size is 16 there and 8 here" in error
    assert "optim.learning_rate is 0.05 there and 0.9 here" in error
    assert before == {p: p.read_bytes() for p in finished_run.rglob("*") if p.is_file()}


def test_reports_both_shapes_for_a_checkpoint_of_another_model(finished_run, capsys):
    path = finished_run / "config.json"
    path.write_text(path.read_text().replace('"blocks_per_stage": 1', '"blocks_per_stage": 2'))
    assert exit_code("eval", "finished_run") == 2
    error = capsys.readouterr().err
    assert "checkpoints/8 is of another model: ema.stage0.block1" in error
    assert "absent there, (4,) here" in error


def test_ends_without_traceback_if_nobody_reads_the_output():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "train", "configs"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": ""},  # the output is buffered
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_prints_to_limited_or_closed_outputs(workplace, monkeypatch):
    (workplace / "tiny.py").rename(workplace / "größe.py")
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", output)
    assert exit_code("train", "größe.py", "--help") == 0
    assert b"gr??e.py" in output.buffer.getvalue()
    monkeypatch.setattr("sys.stdout", None)  # closed, as by >&-
    fnet_command("configs")


def test_importing_the_library_imports_neither_program_nor_adapters():
    done = subprocess.run(
        [sys.executable, "-c", "import fnet, fnet.interop, sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    modules = set(done.stdout.split())
    roots = {name.split(".")[0] for name in modules}
    assert not roots & {"train", "tyro", "grain", "matplotlib", "sklearn", "pydantic"}
    assert not [m for m in modules if "nnx" in m or "interop." in m]


def test_resume_does_not_start_a_run_among_other_files(workplace, capsys):
    assert exit_code("train", "tiny.py", "--out", ".", "--resume") == 2
    assert_one_line_error(capsys, ". is not empty and holds no run")


def test_removes_the_folder_of_a_run_that_did_not_start(workplace, monkeypatch):
    def refuse(folder, config, run_id):
        raise UserError("refused")

    monkeypatch.setattr(RunFolder, "create", refuse)
    assert exit_code("train", "tiny.py", "--out", "new") == 2
    assert not (workplace / "new").exists()


@pytest.mark.slow
def test_resuming_a_finished_run_prints_its_results_and_changes_nothing(finished_run, capsys):
    before = final_state(finished_run), metrics_of(finished_run)
    summary = json.loads((finished_run / "summary.json").read_text())
    printed = output_of(capsys, "eval", "finished_run")
    assert "after step 8" in printed
    assert f"test/accuracy {summary['metrics']['test/accuracy']:.6g}" in printed

    printed = output_of(capsys, "train", "finished_run", "--resume")
    assert "resumed after step 8 of 8" in printed
    assert f"result: test accuracy {number(summary['metrics']['test/accuracy'])}" in printed
    chex.assert_trees_all_equal(before, (final_state(finished_run), metrics_of(finished_run)))
    again = json.loads((finished_run / "summary.json").read_text())
    for name in ("seconds", "examples_per_second", "peak_bytes_seen"):
        assert again[name] == summary[name] is not None


@pytest.mark.parametrize("fewer", [("--train.steps", 7), ("--train.epochs", 0.01)])
def test_a_run_cannot_have_fewer_steps_than_were_saved(finished_run, fewer, capsys):
    before = (finished_run / "config.json").read_text(), metrics_of(finished_run)
    if fewer[0] == "--train.epochs":
        fewer = *fewer, "--train.steps", None
    assert exit_code("train", "finished_run", "--resume", *fewer) == 2
    assert_one_line_error(capsys, "but finished_run was saved after step 8; raise train.steps or")
    assert before == ((finished_run / "config.json").read_text(), metrics_of(finished_run))
