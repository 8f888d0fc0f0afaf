"""Several processes on this machine that train one network."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from program_cases import exit_code, fnet_command, output_of

from train.errors import TrainingError, UserError
from train.run import distributed, loop

pytestmark = pytest.mark.usefixtures("workplace")
WATCH = distributed._watch


def by_hand(port, processes, i):
    words = "--coordinator", f"localhost:{port}", "--processes", str(processes), "--process", str(i)
    return words, {}


def by_slurm(port, processes, i):
    """Variables that srun sets; the port follows from the job id."""
    variables = {
        "SLURM_JOB_ID": port % 4096,
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": processes,
        "SLURM_PROCID": i,
        "SLURM_LOCALID": i,
        "SLURM_STEP_NUM_NODES": 1,
    }
    return ("--distributed",), variables


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def together(processes, *words, launcher=by_hand, during=None):
    """Train in several processes; return the output and exit code of each."""
    port = free_port()
    running = []
    for i in range(processes):
        options, variables = launcher(port, processes, i)
        own = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            **{name: str(value) for name, value in variables.items()},
        }
        command = [sys.executable, "-m", "train", "train", *map(str, words), *options]
        running.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | own,
            )
        )
    try:
        if during:
            during(running)
        output = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return output, [process.returncode for process in running]


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines for name in ("train/loss", "test/loss") if name in line]


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_process_resumes(workplace):
    words = "tiny.py", "--optim.schedule", "constant"
    fnet_command("train", *words, "--out", "alone")
    output, codes = together(2, *words, "--mesh.fsdp", 2, "--train.steps", 6, "--out", "both")
    assert codes == [0, 0], output
    assert "step 6/6" in output[0]
    assert "step" not in output[1]
    fnet_command("train", *words, "--out", "both", "--resume")
    # The first run also evaluated its last step.
    both, alone = losses(workplace / "both"), losses(workplace / "alone")
    assert both[:4] + both[-2:] == pytest.approx(alone[:4] + alone[-2:], rel=1e-5)


@pytest.mark.slow
def test_finds_processes_from_the_cluster_environment(workplace):
    output, codes = together(2, "tiny.py", "--mesh.data", 2, "--out", "both", launcher=by_slurm)
    assert codes == [0, 0], output
    assert "step 8/8" in output[0]
    fnet_command("train", "tiny.py", "--out", "alone")
    both, alone = losses(workplace / "both"), losses(workplace / "alone")
    assert both == pytest.approx(alone, rel=1e-4)


def in_processes(monkeypatch, function, *given):
    """Results or errors of a function in several processes that gather arrays: here, threads."""
    here, barrier, arrays = threading.local(), threading.Barrier(len(given)), [None] * len(given)

    def gather(own):
        arrays[here.process] = own
        barrier.wait(60)
        every = np.stack(arrays)
        barrier.wait(60)
        return every

    def run(process):
        here.process = process
        try:
            return function(given[process])
        except UserError as error:
            return str(error)

    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gather)
    with ThreadPoolExecutor(len(given)) as pool:
        return [*pool.map(run, range(len(given)))]


def test_numbers_and_flags_of_all_processes_are_gathered(monkeypatch):
    monkeypatch.setattr(distributed, "has_other_processes", lambda: True)
    union, any_process = distributed.union, distributed.any_process
    assert in_processes(monkeypatch, union, {3}, {0, 2, 7}, set()) == [{0, 2, 3, 7}] * 3
    assert in_processes(monkeypatch, union, set(), set()) == [set()] * 2
    assert in_processes(monkeypatch, any_process, False, True, False) == [True] * 3
    assert in_processes(monkeypatch, any_process, False, False) == [False] * 2


def test_refuses_other_data_in_another_process(monkeypatch):
    data = {"train": 1080, "test": 20, "crc32": 2**32 - 1}
    check = distributed.check_same_data
    assert in_processes(monkeypatch, check, data, data, data) == [None] * 3
    (refused,) = {*in_processes(monkeypatch, check, data, data, data | {"test": 10})}
    what = "process 2 has 1,080 training and 10 test examples, process 0 1,080 training and 20 test"
    assert what in refused
    assert "give every process the same data" in refused
    (refused,) = {*in_processes(monkeypatch, check, data, data | {"crc32": 5})}
    assert "process 1 has other rows than process 0" in refused


@pytest.fixture
def store(monkeypatch):
    """What process 1 of several does to JAX's key-value store, and when and how it ends."""
    store = SimpleNamespace(values={}, slept=[], left=[], ended=[], barriers=[])
    store.key_value_set = store.values.__setitem__
    store.key_value_dir_get = lambda folder: [
        item for item in store.values.items() if item[0].startswith(f"{folder}/")
    ]
    store.wait_at_barrier = lambda *barrier: store.barriers.append(barrier)
    monkeypatch.setattr(distributed, "_client", lambda: store)
    monkeypatch.setattr(distributed, "has_other_processes", lambda: True)
    monkeypatch.setattr(distributed, "_watch", lambda client, is_over: None)
    monkeypatch.setattr(distributed, "_exit", store.ended.append)
    monkeypatch.setattr(distributed.jax, "process_index", lambda: 1)
    monkeypatch.setattr(distributed.time, "sleep", store.slept.append)
    monkeypatch.setattr(distributed.atexit, "register", lambda *call: store.left.append(call))
    return store


def test_processes_meet_at_a_barrier_for_a_day(store):
    distributed.wait_for_all("compiled")
    assert store.barriers == [("fnet/compiled", 24 * 3600 * 1000)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("no such file\nas named"), "2 no such file"),
        (ValueError("a b"), "1 a b"),
        (KeyboardInterrupt(), "1 KeyboardInterrupt"),
    ],
)
def test_a_process_that_fails_says_why(store, error, said):
    with pytest.raises(type(error)), distributed.together():
        raise error
    assert store.values == {"fnet/failed/1": said}
    ((leave, code),) = store.left
    assert code == int(said[0])
    leave(code)
    assert (store.ended, store.slept) == ([code], [])
    distributed.jax.process_index = lambda: 0  # which has the store: the others read it first
    leave(code)
    assert store.slept == [4]


LOST = "Gloo AllGather failed: Connection closed by peer"


@pytest.mark.parametrize(
    ("others", "said", "message"),
    [
        ({}, f"1 {LOST}", rf"connection to another process was lost \({LOST}\); see the output"),
        ({"2": "2 no file", "0": "1 b"}, "1 b", "^process 0 ended: b; see its output, and restart"),
        ({"2": "2 no file"}, "1 no file", "^process 2 ended: no file; correct this, and restart"),
        ({"0": f"1 {LOST}"}, f"1 {LOST}", "connection to another process was lost"),
    ],
)
def test_a_lost_connection_is_explained_by_the_process_that_failed(store, others, said, message):
    store.values |= {f"fnet/failed/{process}": reason for process, reason in others.items()}
    with pytest.raises(TrainingError, match=message), distributed.together():
        raise RuntimeError(LOST)
    assert store.slept == [3]  # so that the other one has said it
    assert store.values["fnet/failed/1"] == said


def test_a_process_that_waits_ends_with_the_one_that_failed(store, capsys):
    waits = []
    over = SimpleNamespace(
        wait=lambda seconds: waits.append(seconds) or len(waits) > 5 or bool(store.ended)
    )
    store.values["fnet/failed/1"] = "1 its own"
    WATCH(store, over)
    assert (waits, store.ended) == ([1] * 6, [])
    store.values |= {"fnet/failed/2": "2 no file", "fnet/failed/3": "1 b"}
    waits.clear()
    WATCH(store, over)
    assert (waits, store.ended) == ([1, 2, 1], [2])  # 2 s later: it may end for the same reason
    assert "process 2 ended: no file; correct this" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_process_ends_the_others_with_one_line(workplace):
    words = "tiny.py", "--mesh.data", 2, "--train.steps", 100_000, "--out", "both"

    def kill(running):
        metrics = workplace / "both" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()) and running[0].poll() is None:
            time.sleep(0.1)
        running[1].kill()

    output, codes = together(2, *words, during=kill)
    assert codes == [1, -signal.SIGKILL], output
    assert "fnet: the connection to another process was lost (Gloo" in output[0]
    assert "restart all of them with --resume" in output[0]
    assert "Traceback" not in output[0]


class ThreadNow:  # which ends before `start` does
    def __init__(self, target, daemon):
        self.start = target


@pytest.mark.parametrize(
    ("process", "listens", "why"),
    [
        (0, False, ""),
        (1, False, " (process 0 does not answer: Connection refused)"),
        (1, True, " (process 0 answers)"),
    ],
)
def test_a_process_that_stays_alone_says_whom_it_waits_for(
    process, listens, why, store, monkeypatch, capsys
):
    monkeypatch.setattr(distributed.threading, "Thread", ThreadNow)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        at = f"127.0.0.1:{server.getsockname()[1]}"
        with distributed._gives_up(at, 2, process, 0.01):
            pass
    waiting, ended = capsys.readouterr().err.splitlines()
    assert f"waiting for all 2 processes at {at}{why}; gives up after 0.01 s" in waiting
    assert f"all 2 processes did not meet at {at} within 0.01 s{why}; start each" in ended
    assert store.ended == [2]


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_a_lost_connection_is_recognized_in_errors_of_jax_and_orbax(kind):
    where = "[external/gloo/gloo/transport/tcp/pair.cc:547]"
    error = kind(f"UNKNOWN: Gloo AllGather failed: {where} Connection closed by peer [::1]:10157")
    expected = "Gloo AllGather failed: Connection closed by peer [::1]:10157"
    assert distributed.lost_connection(error) == expected
    assert distributed.lost_connection(kind("No space left on device")) is None


def test_distributed_without_a_cluster_explains_the_flags(capsys):
    assert exit_code("train", "tiny.py", "--distributed") == 2
    assert "give --coordinator HOST:PORT" in capsys.readouterr().err


def test_reports_that_another_process_was_interrupted(monkeypatch, capsys):
    others = {
        "wait_for_all": lambda what: None,
        "check_same_data": lambda data: None,
        "has_other_processes": lambda: True,
        "any_process": lambda flag: True,
        "union": lambda found: found,
    }
    here = SimpleNamespace(run_folder=distributed.run_folder, **others)
    monkeypatch.setattr(loop, "distributed", here)
    output = output_of(capsys, "train", "tiny.py", "--out", "r")
    assert "another process was interrupted: saved after step 2 of 8" in output


def test_refuses_a_coordinator_without_port():
    with pytest.raises(UserError, match="--coordinator: expected HOST:PORT, got host0"):
        distributed.join("host0", 2, 0)
