"""Worker processes: same results as without them, and their end."""

import functools
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
from image_cases import write_image

from train.data.image_batches import ImageOptions, read_evaluation
from train.data.workers import Workers
from train.errors import TrainingError


@pytest.fixture(scope="module")
def two_workers():
    return Workers(2)


def rows(n):
    return {"x": np.arange(n)}


@pytest.mark.parametrize("n", [0, 1, 2, 7, 100])
def test_results_equal_the_function_for_any_number_of_rows(two_workers, n):
    expected = row_functions.squares(rows(n))
    for workers in (Workers(0), two_workers):
        result = workers(row_functions.squares, rows(n))
        chex.assert_trees_all_equal(result, expected)
        assert {k: a.dtype for k, a in result.items()} == {k: a.dtype for k, a in expected.items()}


def test_threads_share_the_workers(two_workers):
    results_by_thread = {}

    def call(i):
        results_by_thread[i] = [
            two_workers(row_functions.squares, {"x": np.arange(50) + i})["square"] for _ in range(9)
        ]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, results in results_by_thread.items():
        chex.assert_trees_all_equal(results, [(np.arange(50) + i) ** 2] * 9)


def test_workers_import_neither_jax_nor_fnet(two_workers):
    result = two_workers(row_functions.modules, rows(8))
    assert os.getpid() not in result["process"]
    assert len({*result["process"].tolist()}) <= 2
    assert not result["imported"][:, :3].any()


def test_decoding_imports_neither_jax_nor_fnet_nor_grain():
    program = (
        "import sys, train.data.image_batches;"
        "print([m for m in ('jax', 'fnet', 'grain', 'PIL.Image') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=root, check=True)
    assert out.stdout.decode().strip() == "['PIL.Image']"


def test_raises_a_workers_error_and_continues_with_the_next_call(two_workers):
    for _ in range(5):
        with pytest.raises(ValueError, match="five"):
            two_workers(row_functions.raises_for_five, rows(9))
    chex.assert_trees_all_equal(two_workers(row_functions.raises_for_five, rows(5)), rows(5))


def test_reports_a_killed_worker():
    workers = Workers(1)
    with pytest.raises(TrainingError, match=r"data\.workers: a process that decodes images was"):
        workers(row_functions.kills_its_process, rows(4))


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import numpy as np
import row_functions
from train.data.workers import Workers

if __name__ == "__main__":
    result = Workers(2)(row_functions.modules, {{"x": np.arange(8)}})
    print(len(set(result["process"])), flush=True)
    os.kill(os.getpid(), signal.{signal})
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_workers_end_with_a_killed_program(tmp_path, name):
    path = tmp_path / "killed.py"
    support = Path(row_functions.__file__).parent
    path.write_text(KILLED.format(tests=str(support), signal=name))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    # Workers hold stdout open, so this returns after the last one has ended.
    out = subprocess.run(
        [sys.executable, str(path)], stdout=subprocess.PIPE, env=environment, timeout=100
    )
    assert out.returncode == -getattr(signal, name)
    assert int(out.stdout) in (1, 2)


def test_workers_read_the_same_images(two_workers, tmp_path):
    for i in range(5):
        write_image(tmp_path / f"{i}.png", i)
    (tmp_path / "3.png").write_bytes(b"")
    files = {"file": np.array([f"{tmp_path}/{i}.png" for i in range(5)], object)}
    read = functools.partial(read_evaluation, ImageOptions(image_size=8, resize=8, mean=(0, 0, 1)))
    batch = two_workers(read, files)
    chex.assert_trees_all_equal(batch, read(files))
    assert batch["weight"].tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]
