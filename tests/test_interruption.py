"""Ctrl-C and SIGTERM, one after the other."""

import signal

import pytest

from train.run.interruption import Interruption


def test_afterwards_signals_do_what_they_did_before():
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(n) for n in numbers]
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signal == "SIGTERM"
    assert [signal.getsignal(n) for n in numbers] == before
    with pytest.raises(KeyError), Interruption():
        raise KeyError
    assert [signal.getsignal(n) for n in numbers] == before


def test_the_second_signal_is_left_to_what_was_there_before():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("before"))
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert (interruption.signal, seen) == ("SIGINT", [])
            signal.raise_signal(signal.SIGINT)
            assert seen == ["before"]
    finally:
        signal.signal(signal.SIGINT, before)
