"""Measured memory of the process."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from program_cases import state_of

from train.config import Memory, recipes
from train.errors import UserError
from train.run import process_memory
from train.run.checkpoints import Checkpoints
from train.run.process_memory import IN_FLIGHT, HighWater, overhead
from train.run.setup import setup

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux only"
)


def test_measures_the_peak_above_the_baseline():
    alone, shared = HighWater(), HighWater(4)
    held = np.ones(64 * 2**20, np.uint8)
    del held
    assert 60 * 2**20 <= alone.bytes() < 100 * 2**20
    assert 15 * 2**20 <= shared.bytes() < 25 * 2**20
    assert HighWater().bytes() < 32 * 2**20


def test_files_that_are_read_after_the_peak_do_not_count(monkeypatch):
    status = {"VmRSS": 100, "VmHWM": 100, "RssFile": 10}
    monkeypatch.setattr(process_memory, "_status", status.get)
    memory = HighWater()
    for changed, peak in (
        ({"VmHWM": 160, "RssFile": 15}, 55),  # code that was loaded meanwhile
        ({"RssFile": 40}, 55),
        ({"VmHWM": 170}, 55),  # a peak does not fall
        ({"VmHWM": 260}, 130),
    ):
        status |= changed
        assert memory.bytes() == peak


def test_what_compiling_takes_and_keeps_is_left_out():
    memory = HighWater()
    with memory.without():
        kept = np.ones(64 * 2**20, np.uint8)
        np.ones(64 * 2**20, np.uint8)
    assert memory.bytes() < 32 * 2**20
    more = np.ones(64 * 2**20, np.uint8)
    assert kept.sum() == more.sum()
    assert 60 * 2**20 <= memory.bytes() < 100 * 2**20


USES_GAPS = """
import ctypes
from fnet.cpu.heap import limit_freed_memory, occupy_gaps

limit_freed_memory()
library = ctypes.CDLL("libc.so.6")
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

def is_in_a_gap():
    array = library.malloc(2**20)
    library.free(array)
    return min(arrays) <= array <= max(arrays)

blocks = [library.malloc(2**20) for _ in range(41)]
arrays = blocks[1::2]
for array in arrays:
    library.free(array)
print(is_in_a_gap())
occupy_gaps()
print(is_in_a_gap())
"""


def test_arrays_do_not_spread_over_occupied_gaps():
    child = [sys.executable, "-c", USES_GAPS]
    printed = subprocess.run(child, check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["True", "False"]


def test_users_may_keep_freed_memory_but_then_no_budget_holds(monkeypatch):
    config = recipes.load("digits")
    small = dataclasses.replace(config, memory=Memory(budget="1GB"))
    setup(small)
    assert not any("GLIBC_TUNABLES" in note for note in setup(config).notes)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=9")
    assert any("may hold more than predicted" in note for note in setup(config).notes)
    with pytest.raises(UserError, match=r"memory\.budget: 1GB, but GLIBC_TUNABLES keeps freed"):
        setup(small)


@pytest.mark.slow
def test_saving_takes_less_memory_than_the_state(tmp_path):
    state = jax.block_until_ready(state_of(48, 2**21))  # 384 MiB
    with Checkpoints(tmp_path / "c", keep=1, shapes=state) as checkpoints:
        memory = HighWater()
        checkpoints.save(1, state, {})
        assert memory.bytes() < 200 * 2**20


def test_small_states_are_written_while_steps_run_and_large_ones_between_them():
    def shapes(size):
        return {"w": jax.ShapeDtypeStruct((size // 4,), np.float32)}

    small, large = (overhead(shapes(size), {}, 1) for size in (2**20, 2**28))
    assert (small.background, small.checkpoint) == (2**21, 0)
    assert (large.background, large.checkpoint) == (0, 2**28 + IN_FLIGHT)
    step = 2**28 + 2**20
    assert large.peak(2**28, step) == large.always + 2**28 + large.checkpoint
    assert small.peak(2**20, step) == small.always + step
    assert "checkpoints 2.00 MiB" in str(small)


def test_peak_of_a_device_is_unknown_until_it_exceeds_what_compiling_took(monkeypatch):
    counted = {"bytes_in_use": 50, "peak_bytes_in_use": 200}
    monkeypatch.setattr(process_memory.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(process_memory, "_device", counted.get)
    memory = HighWater()
    assert memory.bytes() is None
    counted["peak_bytes_in_use"] = 300
    assert memory.bytes() == 250
    with memory.without():
        counted["peak_bytes_in_use"] = 900
    assert memory.bytes() == 250
    counted["peak_bytes_in_use"] = 1000
    assert memory.bytes() == 950


RUNS_STEPS = """
import jax, numpy as np
from train.config import Config, Mesh
from train.run.mesh import layout, make_cpu_devices

make_cpu_devices(Mesh())
here = layout(Config())

@jax.jit
def step(state, batch):
    return jax.lax.fori_loop(0, 20, lambda i, a: a @ batch, state)

state, batch = here.put((np.eye(384), np.eye(384)))
step = step.lower(state, batch).compile()
for i in range(10):
    state = step(state, here.put(np.eye(384)))
    assert state.is_ready(), f"step {i} is dispatched asynchronously"
"""


def test_a_step_on_a_cpu_begins_after_the_last_one_has_returned_its_memory():
    command = [sys.executable, "-c", RUNS_STEPS]
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, env=env, check=True)
