"""Measured memory of the process."""

import os

import jax
import numpy as np
import pytest
from program_cases import state_of

from train.run.checkpoints import Checkpoints
from train.run.process_memory import HighWater

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


@pytest.mark.slow
def test_saving_takes_less_memory_than_the_state(tmp_path):
    state = jax.block_until_ready(state_of(48, 2**21))  # 384 MiB
    with Checkpoints(tmp_path / "c", keep=1, shapes=state) as checkpoints:
        memory = HighWater()
        checkpoints.save(1, state, {})
        assert memory.bytes() < 200 * 2**20
