"""The meter of the loop: how far it runs ahead of the device, and what it calls a wait."""

import numpy as np
import pytest

from train.metrics import Meter


class Late(np.ndarray):
    """A metric of a step that is at work until somebody waits for it."""

    done = False

    def is_ready(self):
        return self.done

    def block_until_ready(self):
        self.done = True
        return self


def steps(meter, count):
    made = [np.ones(()).view(Late) for _ in range(count)]
    for loss in made:
        meter.add({"loss": loss})
    return made


def test_one_step_is_at_work_and_none_behind_it_when_the_next_batch_is_taken():
    meter = Meter(batch_size=8)
    seen = []

    def batches():
        made = []
        while True:
            seen.append([loss.done for loss in made])
            made += steps(meter, 1)
            yield len(made)

    source = batches()
    assert [meter.take(source) for _ in range(4)] == [1, 2, 3, 4]
    assert seen == [[], [False], [True, False], [True, True, False]]


@pytest.mark.parametrize("at_work", [True, False])
def test_a_batch_is_waited_for_only_where_the_device_has_nothing_to_do(at_work):
    meter = Meter(batch_size=8)
    (last,) = steps(meter, 1)
    last.done = not at_work
    meter.take(iter([{}]))
    assert (meter.means(1)["input_wait"] == 0) == at_work
