"""Processes that train together, on this machine: the same training, one folder."""

import json
import os
import socket
import subprocess
import sys

import pytest
from program_cases import exit_code, fnet_command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("workplace")]


def together(processes, *words, devices=1):
    """Trains in several processes; what each of them said, and its exit code."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "train", "train", *map(str, words)),
                *("--coordinator", f"localhost:{port}"),
                *("--processes", str(processes), "--process", str(i)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        )
        for i in range(processes)
    ]
    said = [process.communicate(timeout=240)[0] for process in started]
    return said, [process.returncode for process in started]


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines for name in ("train/loss", "test/loss") if name in line]


def test_two_processes_train_as_one_and_one_goes_on_from_their_checkpoint(workplace):
    words = "tiny.py", "--optim.schedule", "constant"
    fnet_command("train", *words, "--out", "alone")
    said, codes = together(2, *words, "--mesh.fsdp", 2, "--train.steps", 6, "--out", "both")
    assert codes == [0, 0], said
    assert "step 6/6" in said[0]
    assert "step" not in said[1]
    fnet_command("train", *words, "--out", "both", "--resume")
    # The last step of the first part was evaluated as well.
    both, alone = losses(workplace / "both"), losses(workplace / "alone")
    assert both[:4] + both[-2:] == pytest.approx(alone[:4] + alone[-2:], rel=1e-5)


def test_what_the_first_process_refuses_ends_all(workplace):
    (workplace / "full").mkdir()
    (workplace / "full" / "mine.txt").write_text("")
    said, codes = together(2, "tiny.py", "--mesh.data", 2, "--out", "full")
    assert codes == [2, 2], said
    assert "is not empty and holds no run" in said[0]
    assert "the first process refused to begin" in said[1]


def test_without_others_it_is_said_how_to_name_them(capsys):
    assert exit_code("train", "tiny.py", "--distributed") == 2
    assert "give --coordinator HOST:PORT" in capsys.readouterr().err
