"""What the process really took."""

import os

import numpy as np
import pytest

from train.process_memory import HighWater


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux only")
def test_the_high_water_is_what_was_in_use_above_the_beginning():
    alone, shared = HighWater(), HighWater(4)
    held = np.ones(64 * 2**20, np.uint8)
    del held
    assert 60 * 2**20 <= alone.bytes() < 100 * 2**20
    assert 15 * 2**20 <= shared.bytes() < 25 * 2**20
    assert HighWater().bytes() < 32 * 2**20
