"""Rows shared among processes: the same as without, and what becomes of the processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import chex
import numpy as np
import pytest
import row_functions
from image_cases import write

from train.data.image_batches import EvaluationImages
from train.data.workers import Workers
from train.errors import TrainingError


@pytest.fixture(scope="module")
def two():
    return Workers(2)


def rows(n):
    return {"x": np.arange(n)}


@pytest.mark.parametrize("n", [0, 1, 2, 7, 100])
def test_any_number_of_rows_is_what_the_function_makes_of_them(two, n):
    expected = row_functions.squares(rows(n))
    for workers in (Workers(0), two):
        made = workers(row_functions.squares, rows(n))
        chex.assert_trees_all_equal(made, expected)
        assert {k: a.dtype for k, a in made.items()} == {k: a.dtype for k, a in expected.items()}


def test_rows_larger_than_the_shared_memory_come_back_whole(two):
    chex.assert_trees_all_equal(two(row_functions.large, rows(3)), row_functions.large(rows(3)))


def test_threads_share_the_processes(two):
    made = {}

    def call(i):
        made[i] = [two(row_functions.squares, {"x": np.arange(50) + i})["square"] for _ in range(9)]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, results in made.items():
        chex.assert_trees_all_equal(results, [(np.arange(50) + i) ** 2] * 9)


def test_processes_know_neither_jax_nor_fnet(two):
    made = two(row_functions.modules, rows(8))
    assert os.getpid() not in made["process"]
    assert len({*made["process"].tolist()}) <= 2
    assert not made["known"][:, :3].any()


def test_what_decodes_knows_neither_jax_nor_fnet_nor_grain():
    program = (
        "import sys, train.data.image_batches;"
        "print([m for m in ('jax', 'fnet', 'grain', 'PIL.Image') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=root, check=True)
    assert out.stdout.decode().strip() == "['PIL.Image']"


def test_a_mistake_in_a_process_is_raised_here_and_the_next_call_is_well(two):
    for _ in range(5):  # more often than there are pieces of shared memory
        with pytest.raises(ValueError, match="five"):
            two(row_functions.refuses_five, rows(9))
    chex.assert_trees_all_equal(two(row_functions.refuses_five, rows(5)), rows(5))


def test_a_process_that_is_killed_is_said():
    workers = Workers(1)
    with pytest.raises(TrainingError, match=r"data\.workers: a process that decodes images was"):
        workers(row_functions.ends_its_process, rows(4))


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import numpy as np
import row_functions
from train.data.workers import Workers

if __name__ == "__main__":
    made = Workers(2)(row_functions.modules, {{"x": np.arange(8)}})
    print(len(set(made["process"])), flush=True)
    os.kill(os.getpid(), signal.{signal})
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_processes_end_with_a_program_that_is_killed(tmp_path, name):
    path = tmp_path / "killed.py"
    tests = Path(__file__).parent
    path.write_text(KILLED.format(tests=str(tests), signal=name))
    environment = os.environ | {"PYTHONPATH": str(tests.parent)}
    # They hold its output open: that ends when the last one has.
    out = subprocess.run(
        [sys.executable, str(path)], stdout=subprocess.PIPE, env=environment, timeout=100
    )
    assert out.returncode == -getattr(signal, name)
    assert int(out.stdout) in (1, 2)


CRASHED = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
import row_functions
from train.data.workers import Workers

if __name__ == "__main__":
    Workers(2)(row_functions.ends_its_process, {{"x": np.arange(8)}})
"""


def test_a_program_ends_when_one_of_its_processes_was_killed(tmp_path):
    path = tmp_path / "crashed.py"
    tests = Path(__file__).parent
    path.write_text(CRASHED.format(tests=str(tests)))
    environment = os.environ | {"PYTHONPATH": str(tests.parent)}
    out = subprocess.run(
        [sys.executable, str(path)], capture_output=True, env=environment, timeout=100
    )
    assert out.returncode == 1
    assert b"TrainingError: data.workers: a process that decodes" in out.stderr


def test_images_are_read_by_processes_as_they_are_here(two, tmp_path):
    for i in range(5):
        write(tmp_path / f"{i}.png", i)
    (tmp_path / "3.png").write_bytes(b"")
    paths = {"path": np.array([f"{i}.png".encode() for i in range(5)])}
    images = EvaluationImages(os.fsencode(tmp_path), 8, 8, 1, (1, 2, 3))
    there = two(images, paths)
    chex.assert_trees_all_equal(there, images(paths))
    assert there["weight"].tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]
