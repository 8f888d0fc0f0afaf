"""Runs on shards: a shard disappears, a process is killed, and another number of processes."""

import os
import re
import signal
import subprocess
import sys

import chex
import pytest
from program_cases import exit_code, final_state, fnet_command, metrics_of
from shard_cases import png, write_tar

from tests.train.run.test_distributed import together
from tests.train.run.test_input_faults import at_step

pytestmark = pytest.mark.slow

RECIPE = """
from train.config import Checkpoint, Config, ImageShards, Optim, PreactResNet, Train

def config():
    return Config(
        name="shards",
        data=ImageShards(path=("data",), batch_size=8, image_size=8, crop="padded", padding=1),
        model=PreactResNet(widths=(4,), blocks_per_stage=1),
        optim=Optim(learning_rate=0.05, schedule="constant"),
        train=Train(steps=12, log_every=1, eval_every=6),
        checkpoint=Checkpoint(every=5, best=False),
    )
"""


@pytest.fixture
def shards(workplace, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / "cache"))
    (workplace / "recipe.py").write_text(RECIPE)
    for k in range(2):
        write_tar(workplace / "data" / f"train-{k}.tar", range(24 * k, 24 * k + 24))
    write_tar(workplace / "data" / "val-0.tar", range(48, 64))
    return workplace / "data"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_after_a_shard_was_missing(workers, shards, workplace, capsys, monkeypatch):
    words = "recipe.py", "--data.workers", workers, "--checkpoint.every", 100
    fnet_command("train", *words, "--out", "whole")
    with monkeypatch.context() as patch:
        at_step(2, patch, lambda: (shards / "train-1.tar").rename(shards / "away"))
        capsys.readouterr()
        assert exit_code("train", *words, "--out", "parts") == 1
    output = capsys.readouterr()
    assert f"fnet: data.path: {shards.name}/train-1.tar does not exist; " in output.err
    assert output.err.count("\n") == 1
    (step,) = re.findall(r"^the input failed: saved after step (\d+) of 12;", output.out, re.M)
    step = int(step)
    assert 2 <= step < 12
    (shards / "away").rename(shards / "train-1.tar")
    fnet_command("train", *words, "--out", "parts", "--resume")
    assert f"resumed after step {step} of 12" in capsys.readouterr().out
    chex.assert_trees_all_equal(final_state(workplace / "whole"), final_state(workplace / "parts"))


def test_a_killed_run_of_two_processes_goes_on_in_one(shards, workplace):
    fnet_command("train", "recipe.py", "--out", "whole")
    words = "recipe.py", "--mesh.data", 2, "--out", "parts"
    output, codes = together(2, *words, "--train.steps", 5, "--train.eval-every", 5)
    assert codes == [0, 0], output
    command = [sys.executable, "-m", "train", "train", "recipe.py", "--out", "parts", "--resume"]
    command += ["--train.log-every", "1", "--train.eval-every", "100"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    for line in running.stdout:
        if line.startswith("step 7/"):
            running.send_signal(signal.SIGKILL)
    running.wait(60)
    output, codes = together(2, *words, "--resume")
    assert codes == [0, 0], output
    whole, parts = metrics_of(workplace / "whole"), metrics_of(workplace / "parts")
    for name in ("train/loss", "train/accuracy"):
        expected = [line[name] for line in whole]
        assert [line[name] for line in parts] == pytest.approx(expected, rel=1e-4)


def test_processes_report_a_damaged_image_together(shards, workplace):
    def write(damaged):
        def files(i):
            return {"png": b"no image" if i in damaged else png(i), "cls": str(i % 3).encode()}

        for k in range(2):
            write_tar(shards / f"train-{k}.tar", range(24 * k, 24 * k + 24), files=files)

    words = "recipe.py", "--mesh.data", 2, "--train.steps", 6, "--data.max-bad-fraction", 0.03
    write((5, 30))  # a tenth of few files is tolerated
    output, codes = together(2, *words, "--out", "few")
    assert codes == [0, 0], output
    assert sum(line.startswith("cannot read data/train-") for line in output[0].splitlines()) == 2
    write((5, 11, 17, 30, 36, 42))
    output, codes = together(2, *words, "--out", "many")
    assert codes == [2, 2], output
    for text in output:
        assert re.search("so far [56] of the 48 training files are unreadable", text)
