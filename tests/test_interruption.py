"""Ctrl-C and SIGTERM, one after the other."""

import signal

from train.interruption import Interruption


def test_the_second_signal_is_left_to_what_was_there_before():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("before"))
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert (interruption.requested, seen) == ("SIGINT", [])
            signal.raise_signal(signal.SIGINT)
            assert seen == ["before"]
    finally:
        signal.signal(signal.SIGINT, before)
